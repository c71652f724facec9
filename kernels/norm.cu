/* Sums of squares, clip coefficient and finite check of gradients. Owns rbk_sum_squares,
 * rbk_clip_coefficient and rbk_finite_check. Must not know: what is done about the result. */
#include "common.cuh"
#include "reduce.cuh"
#include "types.cuh"

constexpr int CLIP_THREADS = 1024;
static_assert(RBK_NORM_CHUNK == 2 * CHUNK * CHUNK_THREADS, "two chunks a thread");

/* partial[block] = sum of the squares of the block's elements: a thread has 8 neighbours of the
 * first half and 8 of the second. */
__global__ void sum_squares_kernel(double *partial, const float *in, size_t count)
{
    __shared__ double shared[WARPS_LIMIT];
    float sum = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const size_t first = (size_t)blockIdx.x * RBK_NORM_CHUNK +
                             (half * CHUNK_THREADS + threadIdx.x) * (size_t)CHUNK;
        const size_t left = first < count ? count - first : 0;
        float x[8];
        load_chunk(x, in, {first, left < CHUNK ? (int)left : CHUNK});
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum = fmaf(x[i], x[i], sum);
    }
    const double total = block_sum((double)sum, shared);
    if (threadIdx.x == 0)
        partial[blockIdx.x] = total;
}

/* One block. */
__global__ void __launch_bounds__(CLIP_THREADS)
    clip_kernel(float *clip, float *norm, const double *partial, size_t parts,
                const float *inverse_scale, float limit)
{
    __shared__ double shared[WARPS_LIMIT];
    double sum = 0.0;
#pragma unroll 4
    for (size_t p = threadIdx.x; p < parts; p += CLIP_THREADS)
        sum += partial[p];
    sum = block_sum(sum, shared);
    if (threadIdx.x != 0)
        return;
    const float length = (float)(sqrt(sum) * (inverse_scale ? (double)*inverse_scale : 1.0));
    *clip = limit > 0.0f && length > limit ? limit / length : 1.0f;
    if (norm)
        *norm = length;
}

/* Several threads may find something; they all write the same. */
__global__ void finite_kernel(uint32_t *flag, const float *in, size_t count)
{
    const chunk c = thread_chunk(count);
    float x[8];
    load_chunk(x, in, c);
    bool finite = true;
#pragma unroll
    for (int i = 0; i < 8; i++)
        finite = finite && isfinite(x[i]);
    if (!finite)
        atomicOr(flag, 1u);
}

extern "C" cudaError_t rbk_sum_squares(double *partial, const float *in, size_t count,
                                       cudaStream_t stream)
{
    if (!are_values(partial) || !are_arrays(in) || !is_count(count))
        return cudaErrorInvalidValue;
    sum_squares_kernel<<<(unsigned)ceil_div(count, RBK_NORM_CHUNK), CHUNK_THREADS, 0, stream>>>(
        partial, in, count);
    return cudaGetLastError();
}

extern "C" cudaError_t rbk_clip_coefficient(float *clip, float *norm, const double *partial,
                                            size_t parts, const float *inverse_scale, float limit,
                                            cudaStream_t stream)
{
    if (!are_values(clip) || !are_optional_values(norm, inverse_scale) || !are_values(partial) ||
        parts == 0 || !(limit >= 0.0f))
        return cudaErrorInvalidValue;
    clip_kernel<<<1, CLIP_THREADS, 0, stream>>>(clip, norm, partial, parts, inverse_scale, limit);
    return cudaGetLastError();
}

extern "C" cudaError_t rbk_finite_check(uint32_t *flag, const float *in, size_t count,
                                        cudaStream_t stream)
{
    if (!are_values(flag) || !are_arrays(in) || !is_count(count))
        return cudaErrorInvalidValue;
    finite_kernel<<<chunk_blocks(count), CHUNK_THREADS, 0, stream>>>(flag, in, count);
    return cudaGetLastError();
}
