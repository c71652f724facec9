/** @file attention_softmax.cuh
 *  The online softmax of attention on the tensor cores (Milakov and Gimelshein, 2018). Device side.
 */
#ifndef REBATCH_KERNELS_ATTENTION_SOFTMAX_CUH
#define REBATCH_KERNELS_ATTENTION_SOFTMAX_CUH

#include "exponential.cuh"

/** A row's softmax so far, for the rows lane / 4 and lane / 4 + 8 of each 16: the highest product,
 * and this lane's share of the sum of exponentials. */
template <int M> struct softmax_state {
    float high[M][2];
    float sum[M][2];
};

/** Products become probabilities relative to the highest product so far; what was added up before
 *  is brought to the same scale. Every row has its key 0, so `high` is finite from the first tile
 *  on. */
template <int D, int M, int N>
__device__ inline void softmax_step(float (&s)[M][N][4], float (&acc)[M][D / 8][4],
                                    softmax_state<M> &state, float scale2)
{
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float high = state.high[m][half];
#pragma unroll
            for (int n = 0; n < N; n++)
                high = fmaxf(high, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
            high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
            high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
            const float shrink = power_of_2((state.high[m][half] - high) * scale2);
            const float base = high * scale2;
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < N; n++) {
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) {
                    s[m][n][e] = power_of_2(fmaf(s[m][n][e], scale2, -base));
                    sum += s[m][n][e];
                }
            }
            state.high[m][half] = high;
            state.sum[m][half] = fmaf(state.sum[m][half], shrink, sum);
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                acc[m][n][2 * half] *= shrink;
                acc[m][n][2 * half + 1] *= shrink;
            }
        }
    }
}

/** The lanes' sums become the rows' sums: factor = 1 / sum, and the logarithms are written. */
template <int M>
__device__ inline void finish_softmax(float (&factor)[M][2], float *log_sum,
                                      const softmax_state<M> &state, float scale2, int warp_query,
                                      int length)
{
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = state.sum[m][half];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            factor[m][half] = 1.0f / sum;
            const int query = warp_query + m * 16 + lane / 4 + half * 8;
            if ((lane & 3) == 0 && query < length)
                log_sum[query] = fmaf(state.high[m][half], scale2, log2f(sum)) * LN_2;
        }
    }
}

#endif
