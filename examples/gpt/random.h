/* Random numbers that are a function of what they are for, never of how often they were asked for.
 * Must not know what a number decides. */
#ifndef GPT_RANDOM_H
#define GPT_RANDOM_H

#include <stdint.h>

/* Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3",
 * SC11: ten rounds over a counter of four words under a key of two. */
#define GPT_PHILOX_ROUNDS 10
#define GPT_PHILOX_MULTIPLY_0 0xD2511F53u
#define GPT_PHILOX_MULTIPLY_1 0xCD9E8D57u
#define GPT_PHILOX_WEYL_0 0x9E3779B9u
#define GPT_PHILOX_WEYL_1 0xBB67AE85u

/* One round on the counter c0..c3 with the round's key. */
#define GPT_PHILOX_ROUND(c0, c1, c2, c3, key0, key1)                                               \
    do {                                                                                           \
        const uint64_t product0_ = (uint64_t)GPT_PHILOX_MULTIPLY_0 * (c0);                         \
        const uint64_t product1_ = (uint64_t)GPT_PHILOX_MULTIPLY_1 * (c2);                         \
        const uint32_t next0_ = (uint32_t)(product1_ >> 32) ^ (c1) ^ (key0);                       \
        const uint32_t next2_ = (uint32_t)(product0_ >> 32) ^ (c3) ^ (key1);                       \
        (c1) = (uint32_t)product1_;                                                                \
        (c3) = (uint32_t)product0_;                                                                \
        (c0) = next0_;                                                                             \
        (c2) = next2_;                                                                             \
    } while (0)

static inline void gpt_philox(uint32_t out[4], const uint32_t counter[4], uint64_t key)
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t key0 = (uint32_t)key, key1 = (uint32_t)(key >> 32);
    for (int round = 0; round < GPT_PHILOX_ROUNDS; round++) {
        GPT_PHILOX_ROUND(c0, c1, c2, c3, key0, key1);
        key0 += GPT_PHILOX_WEYL_0;
        key1 += GPT_PHILOX_WEYL_1;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* What a stream of numbers is for: word 2 of the counter. Dropout sites count from 0. */
enum {
    GPT_RANDOM_INITIAL = 0x40000000,  /* + the tensor: initial weights */
    GPT_RANDOM_TRAINING = 0x7ffffffe, /* where a training sample begins */
    GPT_RANDOM_HELD_OUT = 0x7fffffff  /* where an evaluation sample begins */
};

#endif
