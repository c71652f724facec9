/* What wrapping a step costs when memory never runs out: nanoseconds a micro-batch, and heap calls.
 * The callbacks do nothing, so all the time is the wrap's own. */
#include <stdio.h>

#include "base/base.h"
#include "measure.h"
#include "rebatch/rebatch.h"

enum { MICROBATCHES = 64, STEPS = 4000, RUNS = 9 };

static rebatch *rb;

static rebatch_status zero_grad(void *user)
{
    (void)user;
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    (void)mb;
    (void)user;
    rebatch_mutating(rb);
    return REBATCH_OK;
}

static rebatch_status optimizer_step(void *user)
{
    (void)user;
    rebatch_mutating(rb);
    return REBATCH_OK;
}

static rebatch_status run_steps(int steps)
{
    const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                  .zero_grad = zero_grad,
                                  .forward_backward = forward_backward,
                                  .optimizer_step = optimizer_step,
                                  .flags = REBATCH_DECLARES_MUTATION};
    rebatch_status status = REBATCH_OK;
    for (int i = 0; i < steps && !status; i++)
        status = rebatch_step(rb, &ops, MICROBATCHES, NULL, NULL);
    return status;
}

int main(void)
{
    rebatch_device *device = NULL;
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.micro_start = 1;
    options.micro_largest = 1;
    rebatch_status status = rebatch_device_open_host(&device, 64 << 20, NULL);
    if (!status)
        status = rebatch_open(&rb, device, &options);
    if (!status)
        status = run_steps(STEPS); /* warm */
    double ns[RUNS];
    const uint64_t heap_calls = rbi_heap_calls();
    for (int run = 0; run < RUNS && !status; run++) {
        const uint64_t began = rbi_now_ns();
        status = run_steps(STEPS);
        ns[run] = (double)(rbi_now_ns() - began) / ((double)STEPS * MICROBATCHES);
    }
    if (status) {
        fprintf(stderr, "bench-step: %s\n", rebatch_last_error());
        return 1;
    }
    const double median = measure_median(ns, RUNS);
    printf("%d runs of %d steps of %d micro-batches, callbacks empty; ns a micro-batch: "
           "min %.1f, median %.1f, max %.1f\n",
           RUNS, STEPS, MICROBATCHES, ns[0], median, ns[RUNS - 1]);
    printf("step: ns_per_microbatch=%.0f heap_calls=%llu\n", median,
           (unsigned long long)(rbi_heap_calls() - heap_calls));
    rebatch_close(rb);
    rebatch_device_close(device);
    return 0;
}
