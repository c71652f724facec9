/* AdamW with fp32 master weights. Owns rbk_adamw. Must not know: which parameters it updates.
 *
 * One element is one function of its own numbers, written with explicit roundings, so that the
 * compiler cannot contract it differently for whole chunks and for the last one. */
#include "common.cuh"
#include "types.cuh"

struct adamw_rule {
    float decay; /* 1 - learning rate * weight decay */
    float beta1, beta2;
    float one_minus_beta1, one_minus_beta2;
    float step; /* learning rate / (1 - beta1^update) */
    float root; /* sqrt(1 - beta2^update) */
    float epsilon;
};

__device__ inline void adamw_element(float &w, float &m, float &v, float g, const adamw_rule &rule)
{
    m = __fmaf_rn(rule.beta1, m, __fmul_rn(rule.one_minus_beta1, g));
    v = __fmaf_rn(rule.beta2, v, __fmul_rn(rule.one_minus_beta2, __fmul_rn(g, g)));
    const float distance = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), rule.root), rule.epsilon);
    w = __fmaf_rn(-rule.step, __fdiv_rn(m, distance), __fmul_rn(w, rule.decay));
}

template <typename T>
__global__ void adamw_kernel(float *master, float *m, float *v, T *working, const float *grad,
                             adamw_rule rule, const float *inverse_scale, const float *clip,
                             const uint32_t *skip, size_t count)
{
    if (skip && *skip)
        return;
    const float inverse = inverse_scale ? *inverse_scale : 1.0f;
    const float coefficient = clip ? *clip : 1.0f;
    const chunk c = thread_chunk(count);
    float w[8], first[8], second[8], g[8];
    load_chunk(w, master, c);
    load_chunk(first, m, c);
    load_chunk(second, v, c);
    load_chunk(g, grad, c);
#pragma unroll
    for (int i = 0; i < 8; i++)
        adamw_element(w[i], first[i], second[i], __fmul_rn(__fmul_rn(g[i], inverse), coefficient),
                      rule);
    store_chunk(master, w, c);
    store_chunk(m, first, c);
    store_chunk(v, second, c);
    if (working)
        store_chunk(working, w, c);
}

static bool is_settings(const rbk_adamw_settings *s)
{
    return s != nullptr && s->update >= 1 && s->beta1 >= 0.0f && s->beta1 < 1.0f &&
           s->beta2 >= 0.0f && s->beta2 < 1.0f && s->epsilon >= 0.0f && s->weight_decay >= 0.0f &&
           s->learning_rate >= 0.0f && isfinite(s->learning_rate) && isfinite(s->weight_decay) &&
           isfinite(s->epsilon);
}

static adamw_rule rule_of(const rbk_adamw_settings *s)
{
    adamw_rule rule;
    rule.decay = (float)(1.0 - (double)s->learning_rate * s->weight_decay);
    rule.beta1 = s->beta1;
    rule.beta2 = s->beta2;
    rule.one_minus_beta1 = (float)(1.0 - (double)s->beta1);
    rule.one_minus_beta2 = (float)(1.0 - (double)s->beta2);
    rule.step = (float)(s->learning_rate / (1.0 - pow(s->beta1, (double)s->update)));
    rule.root = (float)sqrt(1.0 - pow(s->beta2, (double)s->update));
    rule.epsilon = s->epsilon;
    return rule;
}

extern "C" cudaError_t rbk_adamw(float *master, float *m, float *v, void *working,
                                 const float *grad, const rbk_adamw_settings *settings,
                                 const float *inverse_scale, const float *clip,
                                 const uint32_t *skip, size_t count, rbk_dtype dtype,
                                 cudaStream_t stream)
{
    if (!are_arrays(master, m, v, grad) || !are_optional_arrays(working) ||
        !is_settings(settings) || !are_optional_values(inverse_scale, clip) ||
        !are_optional_values(skip) || !is_count(count))
        return cudaErrorInvalidValue;
    const adamw_rule rule = rule_of(settings);
    return with_dtype(dtype, [=](auto tag) {
        using T = typename decltype(tag)::type;
        adamw_kernel<T><<<chunk_blocks(count), CHUNK_THREADS, 0, stream>>>(
            master, m, v, (T *)working, grad, rule, inverse_scale, clip, skip, count);
        return cudaGetLastError();
    });
}
