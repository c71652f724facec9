/* The trainer of docs/guide.md as it was before rebatch: it ends where memory does. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model.h"

struct trainer {
    float *weights, *gradients, *momentum;
    float loss;
    uint64_t random;
};

static float *need(size_t floats) /* cudaMalloc, in a program that runs on a GPU */
{
    float *memory = malloc(floats * sizeof *memory);
    if (!memory) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
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
    backward_out(t->gradients, &t->loss, hidden, error, 1.0f / BATCH, count);
    float *slope = need(count * HIDDEN);
    backward_in(t->gradients, slope, hidden, error, t->weights, x, 1.0f / BATCH, count);
    free(slope);
    free(hidden);
    free(error);
    free(x);
}

static void optimizer_step(struct trainer *t)
{
    if (!t->momentum) {
        t->momentum = need(WEIGHTS);
        memset(t->momentum, 0, WEIGHTS * sizeof *t->momentum);
    }
    descend(t->weights, t->momentum, t->gradients);
}

int main(void)
{
    struct trainer t = {need(WEIGHTS), need(WEIGHTS), .random = 1};
    initialize(t.weights, &t.random);
    for (int step = 0; step < STEPS; step++) {
        zero_grad(&t);
        forward_backward(&t, 0, BATCH);
        optimizer_step(&t);
        printf("step %d: loss %.4f\n", step, t.loss);
    }
    printf("weights %016" PRIx64 "\n", fingerprint(t.weights));
    free(t.momentum);
    free(t.gradients);
    free(t.weights);
    return 0;
}
