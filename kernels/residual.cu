/* Residual addition. Owns rbk_residual_add. Must not know: which branch is which. */
#include "common.cuh"
#include "types.cuh"

/* out[i] = a[i] + b[i] */
template <typename T>
__global__ void residual_add_kernel(T *out, const T *a, const T *b, size_t count)
{
    const chunk c = thread_chunk(count);
    float x[8], y[8];
    load_chunk(x, a, c);
    load_chunk(y, b, c);
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] += y[i];
    store_chunk(out, x, c);
}

extern "C" cudaError_t rbk_residual_add(void *out, const void *a, const void *b, size_t count,
                                        rbk_dtype dtype, cudaStream_t stream)
{
    if (!are_arrays(out, a, b) || !is_count(count))
        return cudaErrorInvalidValue;
    return with_dtype(dtype, [=](auto tag) {
        using T = typename decltype(tag)::type;
        residual_add_kernel<T><<<chunk_blocks(count), CHUNK_THREADS, 0, stream>>>(
            (T *)out, (const T *)a, (const T *)b, count);
        return cudaGetLastError();
    });
}
