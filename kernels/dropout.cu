/* Dropout keyed by (seed, step, site, sample, element), alone and fused with the bias before it and
 * the residual after it. Owns rbk_dropout and rbk_bias_dropout_residual. Must not know: the cut. */
#include "common.cuh"
#include "philox.cuh"
#include "types.cuh"

/* out[b,e] = dropout(in[b,e]); elements8 = elements of one sample / 8 */
template <typename T>
__global__ void dropout_kernel(T *out, const T *in, dropout_rule rule, size_t count,
                               unsigned elements8)
{
    const chunk c = thread_chunk(count);
    if (c.size == 0)
        return;
    const unsigned eighth = (unsigned)(c.first / 8);
    const unsigned sample = eighth / elements8;
    float x[8];
    load8(x, in + c.first);
    drop8(x, rule, sample, eighth - sample * elements8);
    store8(out + c.first, x);
}

/* out[b,t,c] = residual[b,t,c] + dropout(in[b,t,c] + bias[c]), without what is NULL;
 * width8 = width / 8 */
template <typename T>
__global__ void bias_dropout_residual_kernel(T *out, const T *in, const T *bias, const T *residual,
                                             dropout_rule rule, size_t count, unsigned elements8,
                                             unsigned width8)
{
    const chunk c = thread_chunk(count);
    if (c.size == 0)
        return;
    const unsigned eighth = (unsigned)(c.first / 8);
    const unsigned sample = eighth / elements8;
    const unsigned element8 = eighth - sample * elements8;
    float x[8], b[8] = {}, r[8] = {};
    load8(x, in + c.first);
    if (residual)
        load8(r, residual + c.first);
    if (bias)
        load8(b, bias + (size_t)(element8 % width8) * 8);
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] += b[i];
    drop8(x, rule, sample, element8);
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] += r[i];
    store8(out + c.first, x);
}

/* A counter's word is element / 4: below 2^32. */
static bool is_sample(size_t elements)
{
    return elements >= CHUNK && elements % CHUNK == 0 && elements < (size_t)1 << 34;
}

extern "C" cudaError_t rbk_dropout(void *out, const void *in, const rbk_dropout_key *key,
                                   size_t batch, size_t elements, rbk_dtype dtype,
                                   cudaStream_t stream)
{
    if (!are_arrays(out, in) || !is_dropout_key(key) || !are_sizes(INDEX_LIMIT, batch) ||
        !is_sample(elements) || batch > SIZE_MAX / elements || !is_count(batch * elements))
        return cudaErrorInvalidValue;
    const dropout_rule rule = dropout_rule_of(key);
    const size_t count = batch * elements;
    return with_dtype(dtype, [=](auto tag) {
        using T = typename decltype(tag)::type;
        dropout_kernel<T><<<chunk_blocks(count), CHUNK_THREADS, 0, stream>>>(
            (T *)out, (const T *)in, rule, count, (unsigned)(elements / 8));
        return cudaGetLastError();
    });
}

extern "C" cudaError_t rbk_bias_dropout_residual(void *out, const void *in, const void *bias,
                                                 const void *residual, const rbk_dropout_key *key,
                                                 size_t batch, size_t length, size_t width,
                                                 rbk_dtype dtype, cudaStream_t stream)
{
    if (!are_arrays(out, in) || !are_optional_arrays(bias, residual) || !is_dropout_key(key) ||
        !are_sizes(INDEX_LIMIT, batch, length) || !is_matrix(batch * length, width) ||
        !is_sample(length * width))
        return cudaErrorInvalidValue;
    const dropout_rule rule = dropout_rule_of(key);
    const size_t elements = length * width;
    return with_dtype(dtype, [=](auto tag) {
        using T = typename decltype(tag)::type;
        bias_dropout_residual_kernel<T>
            <<<chunk_blocks(batch * elements), CHUNK_THREADS, 0, stream>>>(
                (T *)out, (const T *)in, (const T *)bias, (const T *)residual, rule,
                batch * elements, (unsigned)(elements / 8), (unsigned)(width / 8));
        return cudaGetLastError();
    });
}
