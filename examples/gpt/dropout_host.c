/* Owns dropout on the host: which element is dropped is a function of what it is, and nothing is
 * stored. Must not know where in the model it stands. */
#include "gpt/error.h"
#include "gpt/host.h"
#include "gpt/random.h"

/* Philox blocks that run side by side; four elements each. */
#define SIDE 16
#define GROUP (4 * SIDE)

struct dropout {
    float *out;
    const float *residual; /* NULL: 0 */
    const float *x;
    size_t sample_elements, groups; /* of a sample */
    uint64_t key;
    uint32_t site, step, threshold;
    float scale;
    size_t first_sample;
};

/* keep[i] = all ones when element `first` + i of the sample is kept, else 0. */
GPT_INLINE void draw(const struct dropout *d, size_t sample, size_t first,
                     uint32_t keep[restrict GROUP])
{
    uint32_t c0[SIDE], c1[SIDE], c2[SIDE], c3[SIDE];
    for (uint32_t i = 0; i < SIDE; i++) {
        c0[i] = (uint32_t)(first / 4) + i;
        c1[i] = (uint32_t)(d->first_sample + sample);
        c2[i] = d->site;
        c3[i] = d->step;
    }
    uint32_t key0 = (uint32_t)d->key, key1 = (uint32_t)(d->key >> 32);
    for (int round = 0; round < GPT_PHILOX_ROUNDS; round++) {
        for (int i = 0; i < SIDE; i++)
            GPT_PHILOX_ROUND(c0[i], c1[i], c2[i], c3[i], key0, key1);
        key0 += GPT_PHILOX_WEYL_0;
        key1 += GPT_PHILOX_WEYL_1;
    }
    for (int i = 0; i < SIDE; i++) {
        keep[4 * i] = c0[i] < d->threshold ? 0 : ~(uint32_t)0;
        keep[4 * i + 1] = c1[i] < d->threshold ? 0 : ~(uint32_t)0;
        keep[4 * i + 2] = c2[i] < d->threshold ? 0 : ~(uint32_t)0;
        keep[4 * i + 3] = c3[i] < d->threshold ? 0 : ~(uint32_t)0;
    }
}

GPT_INLINE float kept(float x, float scale, uint32_t keep)
{
    return keep ? x * scale : 0.0f;
}

/* Items are groups of a sample's elements. */
GPT_INLINE void drop_groups_body(size_t begin, size_t end, const void *user)
{
    const struct dropout *d = user;
    uint32_t keep[GROUP];
    for (size_t item = begin; item < end; item++) {
        const size_t sample = item / d->groups, first = item % d->groups * GROUP;
        const size_t left = d->sample_elements - first;
        const size_t count = left < GROUP ? left : GROUP;
        const size_t at = sample * d->sample_elements + first;
        draw(d, sample, first, keep);
        if (d->residual)
            for (size_t i = 0; i < count; i++)
                d->out[at + i] = d->residual[at + i] + kept(d->x[at + i], d->scale, keep[i]);
        else
            for (size_t i = 0; i < count; i++)
                d->out[at + i] = kept(d->x[at + i], d->scale, keep[i]);
    }
}
GPT_VARIANTS(drop_groups)

/* Items are elements: nothing is dropped. */
GPT_INLINE void keep_all_body(size_t begin, size_t end, const void *user)
{
    const struct dropout *d = user;
    for (size_t i = begin; i < end; i++)
        d->out[i] = d->residual ? d->residual[i] + d->x[i] : d->x[i];
}
GPT_VARIANTS(keep_all)

rebatch_status gpt_host_dropout_add(const struct gpt_queue *queue, void *out, const void *residual,
                                    const void *x, size_t samples, size_t sample_elements,
                                    const struct gpt_dropout *dropout)
{
    const float probability = dropout->probability;
    if (!(probability >= 0.0f && probability < 1.0f))
        return gpt_error(REBATCH_E_INVALID, "dropout is %g: expected at least 0 and less than 1",
                         (double)probability);
    struct dropout d = {.out = out,
                        .residual = residual,
                        .x = x,
                        .sample_elements = sample_elements,
                        .groups = (sample_elements + GROUP - 1) / GROUP,
                        .key = dropout->seed ^ (dropout->step & 0xffffffff00000000u),
                        .site = dropout->site,
                        .step = (uint32_t)dropout->step,
                        .threshold = (uint32_t)((double)probability * 4294967296.0),
                        .scale = 1.0f / (1.0f - probability),
                        .first_sample = dropout->first_sample};
    if (probability == 0.0f)
        return gpt_host_for(queue, samples * sample_elements, GPT_ELEMENT_GRAIN, keep_all, &d);
    return gpt_host_for(queue, samples * d.groups, GPT_ELEMENT_GRAIN / GROUP, drop_groups, &d);
}
