/* Cast, scale, fill, and the size of a dtype. Owns rbk_cast, rbk_scale, rbk_fill, rbk_dtype_bytes.
 * Must not know: what the arrays hold. */
#include "common.cuh"
#include "types.cuh"

/* out[i] = in[i] */
template <typename To, typename From>
__global__ void cast_kernel(To *out, const From *in, size_t count)
{
    const chunk c = thread_chunk(count);
    float x[8];
    load_chunk(x, in, c);
    store_chunk(out, x, c);
}

/* data[i] *= factor */
template <typename T>
__global__ void scale_kernel(T *data, float factor, const float *device_factor, size_t count)
{
    if (device_factor)
        factor *= *device_factor;
    const chunk c = thread_chunk(count);
    float x[8];
    load_chunk(x, data, c);
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] *= factor;
    store_chunk(data, x, c);
}

/* data[i] = value */
template <typename T> __global__ void fill_kernel(T *data, float value, size_t count)
{
    const float x[8] = {value, value, value, value, value, value, value, value};
    store_chunk(data, x, thread_chunk(count));
}

extern "C" size_t rbk_dtype_bytes(rbk_dtype dtype)
{
    switch (dtype) {
    case RBK_F32:
        return 4;
    case RBK_BF16:
    case RBK_F16:
        return 2;
    }
    return 0;
}

extern "C" cudaError_t rbk_cast(void *out, rbk_dtype out_dtype, const void *in, rbk_dtype in_dtype,
                                size_t count, cudaStream_t stream)
{
    if (!are_arrays(out, in) || !is_count(count))
        return cudaErrorInvalidValue;
    return with_dtype(out_dtype, [=](auto to) {
        using To = typename decltype(to)::type;
        return with_dtype(in_dtype, [=](auto from) {
            using From = typename decltype(from)::type;
            cast_kernel<To, From><<<chunk_blocks(count), CHUNK_THREADS, 0, stream>>>(
                (To *)out, (const From *)in, count);
            return cudaGetLastError();
        });
    });
}

extern "C" cudaError_t rbk_scale(void *data, float factor, const float *device_factor, size_t count,
                                 rbk_dtype dtype, cudaStream_t stream)
{
    if (!are_arrays(data) || !are_optional_values(device_factor) || !is_count(count))
        return cudaErrorInvalidValue;
    return with_dtype(dtype, [=](auto tag) {
        using T = typename decltype(tag)::type;
        scale_kernel<T><<<chunk_blocks(count), CHUNK_THREADS, 0, stream>>>((T *)data, factor,
                                                                           device_factor, count);
        return cudaGetLastError();
    });
}

extern "C" cudaError_t rbk_fill(void *data, float value, size_t count, rbk_dtype dtype,
                                cudaStream_t stream)
{
    if (!are_arrays(data) || !is_count(count))
        return cudaErrorInvalidValue;
    return with_dtype(dtype, [=](auto tag) {
        using T = typename decltype(tag)::type;
        fill_kernel<T><<<chunk_blocks(count), CHUNK_THREADS, 0, stream>>>((T *)data, value, count);
        return cudaGetLastError();
    });
}
