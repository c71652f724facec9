/* The trainer of docs/guide.md under rebatch, with its step written in place: before.c, which
 * survives running out of memory. Settings are the environment's. */
#include <inttypes.h>
#include <rebatch/rebatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model.h"

struct trainer {
    float *weights, *gradients, *momentum;
    float loss;
    uint64_t random;
};

static rebatch *rb;

static void check(rebatch_status status)
{
    if (status) {
        fprintf(stderr, "%s\n", rebatch_last_error());
        exit(1);
    }
}

static float *need(size_t floats)
{
    float *memory = rebatch_alloc_or_escape(rb, floats * sizeof *memory);
    if (!memory)
        check(rebatch_last_status());
    return memory;
}

static void zero_grad(struct trainer *t)
{
    memset(t->gradients, 0, WEIGHTS * sizeof *t->gradients);
    t->loss = 0;
}

static void forward_backward(struct trainer *t, size_t first, size_t count)
{
    float *x = need(count * INPUTS), *error = need(count), *hidden = need(count * HIDDEN);
    load(x, error, &t->random, first, count);
    forward(hidden, error, t->weights, x, count);
    float *slope = need(count * HIDDEN);
    rebatch_mutating(rb);
    backward_out(t->gradients, &t->loss, hidden, error, 1.0f / BATCH, count);
    backward_in(t->gradients, slope, hidden, error, t->weights, x, 1.0f / BATCH, count);
    check(rebatch_free(rb, slope));
    check(rebatch_free(rb, hidden));
    check(rebatch_free(rb, error));
    check(rebatch_free(rb, x));
}

static void optimizer_step(struct trainer *t)
{
    if (!t->momentum) {
        t->momentum = need(WEIGHTS);
        memset(t->momentum, 0, WEIGHTS * sizeof *t->momentum);
    }
    rebatch_mutating(rb);
    descend(t->weights, t->momentum, t->gradients);
}

int main(void)
{
    check(rebatch_open_default(&rb, "device.kind = host; device.capacity = 16MiB"));
    struct trainer t = {need(WEIGHTS), need(WEIGHTS), .random = 1};
    initialize(t.weights, &t.random);
    check(rebatch_guard(rb, &t.random, sizeof t.random, REBATCH_GUARD_HOST));
    check(rebatch_guard(rb, &t.momentum, sizeof t.momentum, REBATCH_GUARD_HOST));
    for (int step = 0; step < STEPS; step++) {
        REBATCH_STEP (rb, BATCH, part, REBATCH_DECLARES_MUTATION) {
            if (part.first == 0)
                zero_grad(&t);
            forward_backward(&t, part.first, part.count);
        }
        REBATCH_UPDATE (rb)
            optimizer_step(&t);
        check(rebatch_step_end(rb, NULL));
        printf("step %d: loss %.4f\n", step, t.loss);
    }
    printf("weights %016" PRIx64 "\n", fingerprint(t.weights));
    rebatch_close(rb);
    return 0;
}
