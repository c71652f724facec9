/* The trainer of docs/guide.md under rebatch: before.c, which survives running out of memory.
 *
 *   train [SETTINGS]   with a file of settings (docs/config.md); default: environment alone */
#include <inttypes.h>
#include <rebatch/rebatch.h>
#include <stdio.h>
#include <string.h>

#include "model.h"

struct trainer {
    float *weights, *gradients, *momentum;
    float loss;
    uint64_t random;
    rebatch *rb;
};

static rebatch_status take(float **out, rebatch *rb, size_t floats)
{
    void *memory;
    const rebatch_status status =
        rebatch_pool_alloc(&memory, rebatch_get_pool(rb), floats * sizeof(float), NULL, 0);
    *out = memory;
    return status;
}

static void release(rebatch *rb, float *memory)
{
    (void)rebatch_pool_free(rebatch_get_pool(rb), memory);
}

static rebatch_status zero_grad(void *user)
{
    struct trainer *t = user;
    memset(t->gradients, 0, WEIGHTS * sizeof *t->gradients);
    t->loss = 0;
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    const size_t count = mb->count;
    const float weight = 1.0f / (float)mb->batch;
    float *x, *error, *hidden, *slope;
    rebatch_status status;
    if ((status = take(&x, t->rb, count * INPUTS)) || (status = take(&error, t->rb, count)) ||
        (status = take(&hidden, t->rb, count * HIDDEN)))
        return status;
    load(x, error, &t->random, mb->first, count);
    forward(hidden, error, t->weights, x, count);

    if ((status = rebatch_reserve(t->rb, count * HIDDEN * sizeof *slope)))
        return status;
    rebatch_mutating(t->rb);
    backward_out(t->gradients, &t->loss, hidden, error, weight, count);
    if ((status = take(&slope, t->rb, count * HIDDEN)))
        return status;
    backward_in(t->gradients, slope, hidden, error, t->weights, x, weight, count);

    release(t->rb, slope);
    release(t->rb, hidden);
    release(t->rb, error);
    release(t->rb, x);
    return REBATCH_OK;
}

static rebatch_status optimizer_step(void *user)
{
    struct trainer *t = user;
    rebatch_status status;
    if (!t->momentum) {
        if ((status = take(&t->momentum, t->rb, WEIGHTS)))
            return status;
        memset(t->momentum, 0, WEIGHTS * sizeof *t->momentum);
    }
    rebatch_mutating(t->rb);
    descend(t->weights, t->momentum, t->gradients);
    return REBATCH_OK;
}

static void print_event(const rebatch_event *event, void *user)
{
    char line[512];
    (void)user;
    (void)rebatch_event_format(line, sizeof line, event);
    printf("  %s\n", line);
}

static rebatch_status open_session(rebatch **rb, rebatch_device **device, const char *settings)
{
    rebatch_config *config;
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch_status status = rebatch_config_load(&config, settings);
    if (!status)
        status = rebatch_config_open_device(device, config);
    if (!status)
        status = rebatch_config_options(&options, config);
    rebatch_config_free(config);
    options.on_event = print_event;
    return status ? status : rebatch_open(rb, *device, &options);
}

static rebatch_status name_results(struct trainer *t)
{
    const rebatch_status status =
        rebatch_watch(t->rb, "gradients", t->gradients, WEIGHTS * sizeof *t->gradients,
                      REBATCH_GUARD_DEVICE, REBATCH_F32);
    return status ? status
                  : rebatch_watch(t->rb, "loss", &t->loss, sizeof t->loss, REBATCH_GUARD_HOST,
                                  REBATCH_F32);
}

static rebatch_status train(struct trainer *t)
{
    const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                  .zero_grad = zero_grad,
                                  .forward_backward = forward_backward,
                                  .optimizer_step = optimizer_step,
                                  .flags = REBATCH_DECLARES_MUTATION};
    rebatch_step_report report;
    rebatch_status status = REBATCH_OK;
    for (int step = 0; step < STEPS && !status; step++) {
        status = rebatch_step(t->rb, &ops, BATCH, t, &report);
        if (!status)
            printf("step %d: loss %.4f, micro-batch %zu x %u\n", step, t->loss, report.micro_after,
                   report.microbatches);
    }
    return status;
}

int main(int argc, char **argv)
{
    rebatch_device *device = NULL;
    struct trainer t = {.random = 1};
    rebatch_status status = open_session(&t.rb, &device, argc > 1 ? argv[1] : NULL);
    if (!status && !(status = take(&t.weights, t.rb, WEIGHTS)) &&
        !(status = take(&t.gradients, t.rb, WEIGHTS)) &&
        !(status = rebatch_guard(t.rb, &t.random, sizeof t.random, REBATCH_GUARD_HOST)) &&
        !(status = rebatch_guard(t.rb, &t.momentum, sizeof t.momentum, REBATCH_GUARD_HOST))) {
        initialize(t.weights, &t.random);
        status = name_results(&t);
        if (!status)
            status = train(&t);
    }
    if (status)
        fprintf(stderr, "train: %s: %s\n", rebatch_status_name(status), rebatch_last_error());
    else
        printf("weights %016" PRIx64 "\n", fingerprint(t.weights));
    rebatch_close(t.rb);
    rebatch_device_close(device);
    return status ? 1 : 0;
}
