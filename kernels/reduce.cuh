/** @file reduce.cuh
 *  Sums and maxima over a warp or a block in a fixed order. Device side.
 *
 *  The butterfly gives every lane the same bits: at each level both partners add the same two
 *  numbers, and an fp32 addition does not depend on their order. */
#ifndef REBATCH_KERNELS_REDUCE_CUH
#define REBATCH_KERNELS_REDUCE_CUH

constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr int WARP = 32;
constexpr int WARPS_LIMIT = 32;

__device__ inline float warp_sum(float x)
{
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        x = __fadd_rn(x, __shfl_xor_sync(FULL_WARP, x, distance));
    return x;
}

__device__ inline double warp_sum(double x)
{
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        x = __dadd_rn(x, __shfl_xor_sync(FULL_WARP, x, distance));
    return x;
}

__device__ inline float warp_max(float x)
{
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, distance));
    return x;
}

/** Add N numbers over the block, each for itself; every thread gets the sums. All threads of the
 *  block must call it, and the block must be whole warps.
 *  @param shared  N * WARPS_LIMIT numbers of shared memory */
template <int N> __device__ inline void block_sum(float (&v)[N], float *shared)
{
    const int warp = threadIdx.x / WARP;
    const int warps = blockDim.x / WARP;
#pragma unroll
    for (int n = 0; n < N; n++)
        v[n] = warp_sum(v[n]);
    __syncthreads(); /* whoever still reads the sums of the last call */
    if (threadIdx.x % WARP == 0) {
#pragma unroll
        for (int n = 0; n < N; n++)
            shared[n * WARPS_LIMIT + warp] = v[n];
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; n++) {
        float sum = shared[n * WARPS_LIMIT];
        for (int w = 1; w < warps; w++)
            sum += shared[n * WARPS_LIMIT + w];
        v[n] = sum;
    }
}

/** The same for one fp64 number.
 *  @param shared  WARPS_LIMIT numbers of shared memory */
__device__ inline double block_sum(double x, double *shared)
{
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % WARP == 0)
        shared[threadIdx.x / WARP] = x;
    __syncthreads();
    x = shared[0];
    for (int w = 1; w < (int)blockDim.x / WARP; w++)
        x += shared[w];
    return x;
}

/** Maximum over the block; every thread gets it.
 *  @param shared  WARPS_LIMIT numbers of shared memory */
__device__ inline float block_max(float x, float *shared)
{
    x = warp_max(x);
    __syncthreads();
    if (threadIdx.x % WARP == 0)
        shared[threadIdx.x / WARP] = x;
    __syncthreads();
    x = shared[0];
    for (int w = 1; w < (int)blockDim.x / WARP; w++)
        x = fmaxf(x, shared[w]);
    return x;
}

#endif
