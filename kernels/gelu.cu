/* GELU forward, backward, and fused with the bias before it. Owns rbk_gelu_* and rbk_bias_gelu_*.
 * Must not know: what computed the input, or whether the output is kept. */
#include "common.cuh"
#include "gelu.cuh"
#include "types.cuh"

/* out[i] = gelu(in[i]) */
template <typename T> __global__ void gelu_forward_kernel(T *out, const T *in, size_t count)
{
    const chunk c = thread_chunk(count);
    float x[8];
    load_chunk(x, in, c);
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] = gelu(x[i]);
    store_chunk(out, x, c);
}

/* din[i] = dout[i] * gelu'(in[i]) */
template <typename T>
__global__ void gelu_backward_kernel(T *din, const T *dout, const T *in, size_t count)
{
    const chunk c = thread_chunk(count);
    float x[8], d[8];
    load_chunk(x, in, c);
    load_chunk(d, dout, c);
#pragma unroll
    for (int i = 0; i < 8; i++)
        d[i] *= gelu_derivative(x[i]);
    store_chunk(din, d, c);
}

/* pre[r,c] = in[r,c] + bias[c], out[r,c] = gelu(pre[r,c] as it was rounded); width8 = width / 8 */
template <typename T>
__global__ void bias_gelu_kernel(T *out, T *pre, const T *in, const T *bias, size_t count,
                                 unsigned width8)
{
    const chunk c = thread_chunk(count);
    if (c.size == 0)
        return;
    float x[8], b[8];
    load8(x, in + c.first);
    load8(b, bias + (size_t)((unsigned)(c.first / 8) % width8) * 8);
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] = to_float(from_float<T>(x[i] + b[i]));
    if (pre)
        store8(pre + c.first, x);
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] = gelu(x[i]);
    store8(out + c.first, x);
}

extern "C" cudaError_t rbk_gelu_forward(void *out, const void *in, size_t count, rbk_dtype dtype,
                                        cudaStream_t stream)
{
    if (!are_arrays(out, in) || !is_count(count))
        return cudaErrorInvalidValue;
    return with_dtype(dtype, [=](auto tag) {
        using T = typename decltype(tag)::type;
        gelu_forward_kernel<T>
            <<<chunk_blocks(count), CHUNK_THREADS, 0, stream>>>((T *)out, (const T *)in, count);
        return cudaGetLastError();
    });
}

extern "C" cudaError_t rbk_gelu_backward(void *din, const void *dout, const void *in, size_t count,
                                         rbk_dtype dtype, cudaStream_t stream)
{
    if (!are_arrays(din, dout, in) || !is_count(count))
        return cudaErrorInvalidValue;
    return with_dtype(dtype, [=](auto tag) {
        using T = typename decltype(tag)::type;
        gelu_backward_kernel<T><<<chunk_blocks(count), CHUNK_THREADS, 0, stream>>>(
            (T *)din, (const T *)dout, (const T *)in, count);
        return cudaGetLastError();
    });
}

extern "C" cudaError_t rbk_bias_gelu_forward(void *out, void *pre, const void *in, const void *bias,
                                             size_t rows, size_t width, rbk_dtype dtype,
                                             cudaStream_t stream)
{
    if (!are_arrays(out, in, bias) || !are_optional_arrays(pre) || !is_matrix(rows, width))
        return cudaErrorInvalidValue;
    const size_t count = rows * width;
    return with_dtype(dtype, [=](auto tag) {
        using T = typename decltype(tag)::type;
        bias_gelu_kernel<T><<<chunk_blocks(count), CHUNK_THREADS, 0, stream>>>(
            (T *)out, (T *)pre, (const T *)in, (const T *)bias, count, (unsigned)(width / 8));
        return cudaGetLastError();
    });
}
