/* The model of docs/guide.md: y = sum over j of out[j] max(0, sum over k of in[j][k] x[k]).
 * These functions are what a program's kernels are: they compute, and allocate nothing. Sums over
 * samples run in the order of the samples and add to what is there. */
#ifndef GUIDE_MODEL_H
#define GUIDE_MODEL_H

#include <stddef.h>
#include <stdint.h>

enum { INPUTS = 8, HIDDEN = 8192, BATCH = 64, STEPS = 6, WEIGHTS = HIDDEN * (INPUTS + 1) };

static inline float uniform(uint64_t *random) /* in [-1, 1) */
{
    *random = *random * 6364136223846793005u + 1442695040888963407u;
    return (float)(*random >> 40) / (1 << 23) - 1;
}

/* x[s][k] is input k of sample first + s, with noise; error[s] is minus the sample's target. */
static inline void load(float *x, float *error, uint64_t *random, size_t first, size_t count)
{
    for (size_t s = 0; s < count; s++) {
        uint64_t sample = first + s;
        for (int k = 0; k < INPUTS; k++)
            x[s * INPUTS + k] = uniform(&sample) + 0.01f * uniform(random);
        error[s] = x[s * INPUTS] * x[s * INPUTS + 1] - 1;
    }
}

/* hidden[s][j] = max(0, sum over k of in[j][k] x[s][k]), and error[s] += y[s] */
static inline void forward(float *hidden, float *error, const float *weights, const float *x,
                           size_t count)
{
    for (size_t s = 0; s < count; s++)
        for (int j = 0; j < HIDDEN; j++) {
            float sum = 0;
            for (int k = 0; k < INPUTS; k++)
                sum += weights[j * INPUTS + k] * x[s * INPUTS + k];
            hidden[s * HIDDEN + j] = sum > 0 ? sum : 0;
            error[s] += hidden[s * HIDDEN + j] * weights[HIDDEN * INPUTS + j];
        }
}

/* Adds each sample's share of the loss and of the gradients of out, with a weight of 1/batch. */
static inline void backward_out(float *gradients, float *loss, const float *hidden,
                                const float *error, float weight, size_t count)
{
    for (size_t s = 0; s < count; s++) {
        *loss += weight * error[s] * error[s];
        for (int j = 0; j < HIDDEN; j++)
            gradients[HIDDEN * INPUTS + j] += 2 * weight * error[s] * hidden[s * HIDDEN + j];
    }
}

/* slope[s][j] is the derivative of the loss by hidden[s][j]; adds the gradients of in. */
static inline void backward_in(float *gradients, float *slope, const float *hidden,
                               const float *error, const float *weights, const float *x,
                               float weight, size_t count)
{
    for (size_t s = 0; s < count; s++)
        for (int j = 0; j < HIDDEN; j++) {
            const float out = weights[HIDDEN * INPUTS + j];
            slope[s * HIDDEN + j] = hidden[s * HIDDEN + j] > 0 ? 2 * weight * error[s] * out : 0;
            for (int k = 0; k < INPUTS; k++)
                gradients[j * INPUTS + k] += slope[s * HIDDEN + j] * x[s * INPUTS + k];
        }
}

static inline void descend(float *weights, float *momentum, const float *gradients)
{
    for (int i = 0; i < WEIGHTS; i++) {
        momentum[i] = 0.5f * momentum[i] + gradients[i];
        weights[i] -= 5e-5f * momentum[i];
    }
}

static inline void initialize(float *weights, uint64_t *random)
{
    for (int i = 0; i < WEIGHTS; i++)
        weights[i] = (i < HIDDEN * INPUTS ? 1 : 0.01f) * uniform(random);
}

/* A number that differs when any bit of the weights does (FNV-1a). */
static inline uint64_t fingerprint(const float *weights)
{
    const unsigned char *bytes = (const unsigned char *)weights;
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < WEIGHTS * sizeof *weights; i++)
        hash = (hash ^ bytes[i]) * 1099511628211u;
    return hash;
}

#endif
