/* Owns the host operations of the update: finite check, gradient norm, clipping, AdamW.
 * Must not know which tensors there are. */
#include <math.h>

#include "gpt/host.h"

/* ---- finite or not ---- */

struct finite_check {
    uint32_t *flag;
    const float *x;
};

/* Items are elements. The sum of x * 0 is 0, unless one of them is infinite or no number. */
GPT_INLINE void check_body(size_t begin, size_t end, const void *user)
{
    const struct finite_check *c = user;
    const float *x = c->x + begin;
    float lanes[GPT_LANES] = {0};
    GPT_FOR_LANES(end - begin, lanes[lane] += x[i] * 0.0f);
    if (gpt_sum_lanes(lanes) != 0.0f) /* NaN */
        __atomic_store_n(c->flag, 1u, __ATOMIC_RELAXED);
}
GPT_VARIANTS(check)

rebatch_status gpt_host_check_finite(const struct gpt_queue *queue, uint32_t *flag, const float *x,
                                     size_t count)
{
    const struct finite_check c = {flag, x};
    return gpt_host_for(queue, count, GPT_ELEMENT_GRAIN, check, &c);
}

/* ---- norm ---- */

struct squares {
    double *partials;
    const float *x;
    size_t count;
};

/* Items are chunks. */
GPT_INLINE void sum_chunks_body(size_t begin, size_t end, const void *user)
{
    const struct squares *s = user;
    for (size_t chunk = begin; chunk < end; chunk++) {
        const float *x = s->x + chunk * GPT_NORM_CHUNK;
        const size_t left = s->count - chunk * GPT_NORM_CHUNK;
        const size_t count = left < GPT_NORM_CHUNK ? left : GPT_NORM_CHUNK;
        double lanes[GPT_LANES] = {0};
        GPT_FOR_LANES(count, lanes[lane] += (double)x[i] * (double)x[i]);
        for (size_t half = GPT_LANES / 2; half > 0; half /= 2)
            for (size_t lane = 0; lane < half; lane++)
                lanes[lane] += lanes[lane + half];
        s->partials[chunk] = lanes[0];
    }
}
GPT_VARIANTS(sum_chunks)

rebatch_status gpt_host_sum_squares(const struct gpt_queue *queue, double *partials, const float *x,
                                    size_t count)
{
    const struct squares s = {partials, x, count};
    const size_t chunks = (count + GPT_NORM_CHUNK - 1) / GPT_NORM_CHUNK;
    return gpt_host_for(queue, chunks, GPT_ELEMENT_GRAIN / GPT_NORM_CHUNK, sum_chunks, &s);
}

struct clip {
    float *norm_and_scale;
    const double *partials;
    size_t count;
    float most;
    const float *inverse;
};

static void find_scale(size_t begin, size_t end, const void *user)
{
    (void)begin, (void)end; /* one item */
    const struct clip *c = user;
    double sum = 0.0;
    for (size_t i = 0; i < c->count; i++)
        sum += c->partials[i];
    const float norm = (float)(sqrt(sum) * (c->inverse ? (double)*c->inverse : 1.0));
    c->norm_and_scale[0] = norm;
    c->norm_and_scale[1] = c->most > 0.0f && norm > c->most ? c->most / norm : 1.0f;
}

rebatch_status gpt_host_clip_scale(const struct gpt_queue *queue, float *norm_and_scale,
                                   const double *partials, size_t count, float most,
                                   const float *inverse)
{
    const struct clip c = {norm_and_scale, partials, count, most, inverse};
    return gpt_host_for(queue, 1, 1, find_scale, &c);
}

/* ---- AdamW ---- */

struct adamw {
    struct gpt_adamw_arrays arrays;
    float learning_rate, beta1, beta2, epsilon, weight_decay;
    float correction1, correction2; /* 1 / (1 - beta^update) */
};

/* Items are elements. */
GPT_INLINE void update_body(size_t begin, size_t end, const void *user)
{
    const struct adamw *a = user;
    float *restrict weight = a->arrays.weight;
    float *restrict first = a->arrays.first_moment, *restrict second = a->arrays.second_moment;
    const float *restrict gradient = a->arrays.gradient;
    const float inverse = a->arrays.inverse ? *a->arrays.inverse : 1.0f, scale = *a->arrays.scale;
    for (size_t i = begin; i < end; i++) {
        const float g = gradient[i] * inverse * scale;
        const float m = a->beta1 * first[i] + (1.0f - a->beta1) * g;
        const float v = a->beta2 * second[i] + (1.0f - a->beta2) * (g * g);
        const float towards = m * a->correction1 / (sqrtf(v * a->correction2) + a->epsilon);
        first[i] = m;
        second[i] = v;
        weight[i] -= a->learning_rate * (towards + a->weight_decay * weight[i]);
    }
}
GPT_VARIANTS(update)

rebatch_status gpt_host_adamw(const struct gpt_queue *queue, const struct gpt_adamw_arrays *arrays,
                              const struct gpt_adamw *settings)
{
    const double update_number = (double)settings->update;
    const struct adamw a = {
        .arrays = *arrays,
        .learning_rate = settings->learning_rate,
        .beta1 = settings->beta1,
        .beta2 = settings->beta2,
        .epsilon = settings->epsilon,
        .weight_decay = settings->weight_decay,
        .correction1 = (float)(1.0 / (1.0 - pow((double)settings->beta1, update_number))),
        .correction2 = (float)(1.0 / (1.0 - pow((double)settings->beta2, update_number)))};
    return gpt_host_for(queue, arrays->count, GPT_ELEMENT_GRAIN, update, &a);
}
