/** @file layer_norm_warp.cuh
 *  Layer norm forward with a warp a row: for rows that its registers hold. Lane i owns the channels
 *  8i .. 8i + 7, 256 + 8i .. and so on. No barrier stands between a row's loads and its stores, so
 *  that the warps of a multiprocessor keep its memory busy. Device side. */
#ifndef REBATCH_KERNELS_LAYER_NORM_WARP_CUH
#define REBATCH_KERNELS_LAYER_NORM_WARP_CUH

#include "reduce.cuh"
#include "types.cuh"

constexpr int WARP_CHANNELS = WARP * 8; /* of one chunk a lane */

/** Chunks a lane: the largest number that registers hold. */
template <typename T> constexpr int most_chunks = sizeof(T) == 2 ? 5 : 3;

constexpr int FORWARD_WARPS = 8;

/** The chunks of a row that this lane owns; 0 past the end. */
template <typename T, int CHUNKS>
__device__ inline void load_row(raw8<T> (&raw)[CHUNKS], const T *row, int width)
{
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int column = c * WARP_CHANNELS + lane * 8;
        raw[c] = raw8<T>{};
        if (column < width)
            raw[c] = load_raw8(row + column);
    }
}

/** One warp: one row of [rows, width]. */
template <typename T, int CHUNKS>
__global__ void __launch_bounds__(FORWARD_WARPS *WARP)
    layer_norm_forward_warp_kernel(T *out, float *mean, float *rstd, const T *in, const T *gamma,
                                   const T *beta, int rows, int width, float epsilon)
{
    const int lane = threadIdx.x % WARP;
    const int row = blockIdx.x * FORWARD_WARPS + threadIdx.x / WARP;
    if (row >= rows)
        return;
    const float inverse = 1.0f / (float)width;
    raw8<T> raw[CHUNKS];
    load_row<T, CHUNKS>(raw, in + (size_t)row * width, width);
    float x[8], sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        unpack8<T>(x, raw[c]);
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum += x[i];
    }
    const float row_mean = warp_sum(sum) * inverse;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        unpack8<T>(x, raw[c]);
        const bool inside = c * WARP_CHANNELS + lane * 8 < width;
#pragma unroll
        for (int i = 0; i < 8; i++)
            squares = inside ? fmaf(x[i] - row_mean, x[i] - row_mean, squares) : squares;
    }
    const float row_rstd = 1.0f / sqrtf(fmaf(warp_sum(squares), inverse, epsilon));
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int column = c * WARP_CHANNELS + lane * 8;
        if (column >= width)
            continue;
        float g[8], b[8];
        load8(g, gamma + column);
        load8(b, beta + column);
        unpack8<T>(x, raw[c]);
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = fmaf((x[i] - row_mean) * row_rstd, g[i], b[i]);
        store8(out + (size_t)row * width + column, x);
    }
    if (mean && lane == 0) {
        mean[row] = row_mean;
        rstd[row] = row_rstd;
    }
}

#endif
