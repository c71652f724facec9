/** @file philox.cuh
 *  Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3",
 *  SC'11) and the dropout rule that kernels.h defines by it. Device side, but for
 *  dropout_rule_of(). */
#ifndef REBATCH_KERNELS_PHILOX_CUH
#define REBATCH_KERNELS_PHILOX_CUH

#include "kernels.h"

__device__ inline uint4 philox4x32_10(uint4 counter, uint2 key)
{
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const unsigned high0 = __umulhi(0xD2511F53u, counter.x);
        const unsigned low0 = 0xD2511F53u * counter.x;
        const unsigned high1 = __umulhi(0xCD9E8D57u, counter.z);
        const unsigned low1 = 0xCD9E8D57u * counter.z;
        counter = make_uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
        key.x += 0x9E3779B9u; /* the golden ratio */
        key.y += 0xBB67AE85u; /* sqrt(3) - 1 */
    }
    return counter;
}

/** A dropout key as the kernels use it. */
struct dropout_rule {
    uint2 key;
    unsigned step, site;
    unsigned first_sample;
    unsigned threshold; /**< a word below it drops its element; 0: nothing is dropped */
    float scale;
};

static inline dropout_rule dropout_rule_of(const rbk_dropout_key *key)
{
    dropout_rule rule;
    rule.key =
        make_uint2((unsigned)key->seed, (unsigned)(key->seed >> 32) ^ (unsigned)(key->step >> 32));
    rule.step = (unsigned)key->step;
    rule.site = key->site;
    rule.first_sample = (unsigned)key->first_sample;
    rule.threshold = (unsigned)((double)key->probability * 4294967296.0);
    rule.scale = 1.0f / (1.0f - key->probability);
    return rule;
}

/** False for a NaN too. */
static inline bool is_dropout_key(const rbk_dropout_key *key)
{
    return key != nullptr && key->probability >= 0.0f && key->probability < 1.0f;
}

/** Drop some of the 8 elements of `sample` that start at element 8 * `eighth`. */
__device__ inline void drop8(float (&v)[8], const dropout_rule &rule, unsigned sample,
                             unsigned eighth)
{
    if (rule.threshold == 0)
        return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint4 words = philox4x32_10(
            make_uint4(2 * eighth + half, rule.first_sample + sample, rule.site, rule.step),
            rule.key);
        float *four = v + 4 * half;
        four[0] = words.x >= rule.threshold ? four[0] * rule.scale : 0.0f;
        four[1] = words.y >= rule.threshold ? four[1] * rule.scale : 0.0f;
        four[2] = words.z >= rule.threshold ? four[2] * rule.scale : 0.0f;
        four[3] = words.w >= rule.threshold ? four[3] * rule.scale : 0.0f;
    }
}

#endif
