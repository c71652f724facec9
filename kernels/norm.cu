/* Squared norm, clip coefficient and finite check of gradients. Owns rbk_squared_norm*,
 * rbk_clip_coefficient and rbk_finite_check. Must not know: what is done about the result. */
#include "common.cuh"
#include "reduce.cuh"
#include "types.cuh"

/* Partial sums: at most this many, so that one block adds them up. */
constexpr size_t NORM_BLOCKS = 1024;
constexpr int FINAL_THREADS = 256;

/* partial[block] = sum of squares of chunks block, block + grid, ... */
__global__ void squares_kernel(double *partial, const float *in, size_t count)
{
    __shared__ double shared[WARPS_LIMIT];
    const size_t stride = (size_t)gridDim.x * blockDim.x * 8;
    float sum = 0.0f;
    for (chunk c = thread_chunk(count); c.size > 0;) {
        float x[8];
        load_chunk(x, in, c);
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum = fmaf(x[i], x[i], sum);
        c.first += stride;
        c.size = c.first >= count ? 0 : count - c.first < 8 ? (int)(count - c.first) : 8;
    }
    const double total = block_sum((double)sum, shared);
    if (threadIdx.x == 0)
        partial[blockIdx.x] = total;
}

/* sum[0] += the partial sums: thread i adds i, i + FINAL_THREADS, ..., then threads as block_sum.
 * */
__global__ void final_sum_kernel(double *sum, const double *partial, int parts)
{
    __shared__ double shared[WARPS_LIMIT];
    double x = 0.0;
    for (int p = threadIdx.x; p < parts; p += FINAL_THREADS)
        x += partial[p];
    x = block_sum(x, shared);
    if (threadIdx.x == 0)
        sum[0] += x;
}

__global__ void clip_kernel(float *clip, float *norm, const double *squared,
                            const float *inverse_scale, float limit)
{
    const float length = (float)(sqrt(*squared) * (inverse_scale ? (double)*inverse_scale : 1.0));
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

static size_t norm_blocks(size_t count)
{
    const size_t blocks = ceil_div(count, (size_t)CHUNK * CHUNK_THREADS);
    return blocks < NORM_BLOCKS ? blocks : NORM_BLOCKS;
}

extern "C" size_t rbk_squared_norm_scratch_bytes(size_t count)
{
    return norm_blocks(count) * sizeof(double);
}

extern "C" cudaError_t rbk_squared_norm(double *sum, const float *in, void *scratch,
                                        size_t scratch_bytes, size_t count, cudaStream_t stream)
{
    if (!are_values(sum) || !are_arrays(in, scratch) || !is_count(count) ||
        scratch_bytes < rbk_squared_norm_scratch_bytes(count))
        return cudaErrorInvalidValue;
    const size_t blocks = norm_blocks(count);
    squares_kernel<<<(unsigned)blocks, CHUNK_THREADS, 0, stream>>>((double *)scratch, in, count);
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess)
        return status;
    final_sum_kernel<<<1, FINAL_THREADS, 0, stream>>>(sum, (const double *)scratch, (int)blocks);
    return cudaGetLastError();
}

extern "C" cudaError_t rbk_clip_coefficient(float *clip, float *norm, const double *squared,
                                            const float *inverse_scale, float limit,
                                            cudaStream_t stream)
{
    if (!are_values(clip) || !are_optional_values(norm) || !are_values(squared) ||
        !are_optional_values(inverse_scale) || !(limit >= 0.0f))
        return cudaErrorInvalidValue;
    clip_kernel<<<1, 1, 0, stream>>>(clip, norm, squared, inverse_scale, limit);
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
