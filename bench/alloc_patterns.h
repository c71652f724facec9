/* The allocation patterns that every contender runs, so that their figures can be laid side by
 * side. A contender gives two functions; a pattern returns nanoseconds a pair of allocation and
 * free. What is timed, and the order of calls and sizes, is fixed: figures of other machines rest
 * on it. */
#ifndef BENCH_ALLOC_PATTERNS_H
#define BENCH_ALLOC_PATTERNS_H

#include <math.h>
#include <stdint.h>

#include "measure.h"

typedef void *(*pat_alloc)(size_t bytes, void *user);
typedef void (*pat_free)(void *block, size_t bytes, void *user);

/* xorshift64*; the state is never 0. */
static inline uint64_t pat_rng(uint64_t *state)
{
    uint64_t x = *state;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    *state = x;
    return x * UINT64_C(2685821657736338717);
}

/* In [0, 1). */
static inline double pat_unit(uint64_t *state)
{
    return (double)(pat_rng(state) >> 11) / 9007199254740992.0;
}

/* One block of 1 MiB taken and given back. */
static inline double pat_hot(pat_alloc take, pat_free give, void *user, int pairs)
{
    const size_t bytes = (size_t)1 << 20;
    for (int i = 0; i < 100; i++)
        give(take(bytes, user), bytes, user);
    const double began = measure_seconds();
    for (int i = 0; i < pairs; i++)
        give(take(bytes, user), bytes, user);
    return 1e9 * (measure_seconds() - began) / pairs;
}

/* A live set of 256 blocks of which each turn replaces one; sizes log-uniform in 512 B to 32 MiB.
 * -1 when memory runs out. */
static inline double pat_random(pat_alloc take, pat_free give, void *user, int pairs)
{
    enum { LIVE = 256 };
    void *blocks[LIVE] = {0};
    size_t sizes[LIVE] = {0};
    uint64_t state = UINT64_C(88172645463325252);
    double began = 0;
    for (int i = 0; i < pairs + 4 * LIVE; i++) {
        if (i == 4 * LIVE)
            began = measure_seconds();
        const size_t k = pat_rng(&state) % LIVE;
        const double exponent = 9 + 16.0 * pat_unit(&state);
        if (blocks[k])
            give(blocks[k], sizes[k], user);
        sizes[k] = (size_t)exp2(exponent);
        blocks[k] = take(sizes[k], user);
        if (!blocks[k])
            return -1;
    }
    const double ns = 1e9 * (measure_seconds() - began) / pairs;
    for (size_t k = 0; k < LIVE; k++)
        if (blocks[k])
            give(blocks[k], sizes[k], user);
    return ns;
}

/* A training step: 12 layers take 13 activations each in forward; backward takes 4 scratch blocks a
 * layer and gives all back. */
static inline double pat_train(pat_alloc take, pat_free give, void *user, int steps)
{
    enum { LAYERS = 12, KEPT = 13, SCRATCH = 4, WARM_STEPS = 20 };
    static const size_t weights[KEPT] = {1, 1, 3, 1, 1, 1, 1, 1, 4, 4, 1, 1, 1};
    const size_t unit = (size_t)4 * 1024 * 768 * 2;
    void *kept[LAYERS][KEPT];
    void *scratch[SCRATCH];
    double began = 0;
    for (int step = 0; step < steps + WARM_STEPS; step++) {
        if (step == WARM_STEPS)
            began = measure_seconds();
        for (int l = 0; l < LAYERS; l++)
            for (int a = 0; a < KEPT; a++)
                kept[l][a] = take(unit * weights[a], user);
        for (int l = LAYERS - 1; l >= 0; l--) {
            for (size_t i = 0; i < SCRATCH; i++)
                scratch[i] = take(unit * (i + 1), user);
            for (int a = KEPT - 1; a >= 0; a--)
                give(kept[l][a], unit * weights[a], user);
            for (size_t i = 0; i < SCRATCH; i++)
                give(scratch[i], unit * (i + 1), user);
        }
    }
    return 1e9 * (measure_seconds() - began) / ((double)steps * LAYERS * (KEPT + SCRATCH));
}

#endif
