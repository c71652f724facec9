/** @file attention_plain.cuh
 *  Tiles and products of tiles in fp32 without tensor cores. Device side.
 *
 *  A block of 16 x 16 threads owns OWN rows (of queries or of keys) and goes through tiles of
 *  plain_rows<D> rows of the other kind. Thread (x, y) has the own rows 4y..4y+3; of a product of
 *  the two tiles the columns x, x+16, ...; and of a row of D channels the vectors described at
 *  plain_column(). */
#ifndef REBATCH_KERNELS_ATTENTION_PLAIN_CUH
#define REBATCH_KERNELS_ATTENTION_PLAIN_CUH

#include "exponential.cuh"

constexpr int PLAIN_SIDE = 16;
constexpr int PLAIN_THREADS = PLAIN_SIDE * PLAIN_SIDE;
constexpr int PLAIN_OWN = 64;
constexpr int PLAIN_EACH = PLAIN_OWN / PLAIN_SIDE;

/** Rows of a tile that is gone through: what leaves room for the own rows in 99 KiB. */
template <int D> constexpr int plain_rows = D == 128 ? 16 : 32;

/** Floats from one row of a tile to the next: 16 bytes more than the row, so that neighbouring rows
 *  lie in different banks. */
template <int D> constexpr int plain_stride = D + 4;

/** The same for the weights: [PLAIN_OWN, plain_rows]. */
template <int D> constexpr int plain_weight_stride = plain_rows<D> + 1;

/** Shared memory of a block with `own` tiles of its own rows: floats. */
template <int D> constexpr int plain_shared_floats(int own)
{
    return own * PLAIN_OWN * plain_stride<D> + 2 * plain_rows<D> * plain_stride<D> +
           PLAIN_OWN * plain_weight_stride<D>;
}

/** Channels that a thread holds of a row: VECTORS vectors of WIDTH neighbours. */
template <int D> struct plain_channels {
    static constexpr int WIDTH = D >= 64 ? 4 : 2;
    static constexpr int VECTORS = D / PLAIN_SIDE / WIDTH;
    static constexpr int COUNT = D / PLAIN_SIDE;
};

/** Channel of the i-th number that thread column x holds of a row. */
template <int D> __device__ inline int plain_column(int i)
{
    constexpr int width = plain_channels<D>::WIDTH;
    return (i / width * PLAIN_SIDE + (int)(threadIdx.x % PLAIN_SIDE)) * width + i % width;
}

/** Bring ROWS rows into a tile; rows from `length` on become zeros. */
template <int D, int ROWS>
__device__ inline void plain_load(float *tile, const float *from, size_t stride, int first,
                                  int length)
{
    constexpr int words = D / 4;
    for (int i = threadIdx.x; i < ROWS * words; i += PLAIN_THREADS) {
        const int row = i / words, word = i % words;
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first + row < length)
            x = *reinterpret_cast<const float4 *>(from + (size_t)(first + row) * stride + word * 4);
        *reinterpret_cast<float4 *>(tile + row * plain_stride<D> + word * 4) = x;
    }
}

/** product[r][c] = <own row 4y+r, other row x+16c>, channels ascending. */
template <int D>
__device__ inline void plain_dot(float (&product)[PLAIN_EACH][plain_rows<D> / PLAIN_SIDE],
                                 const float *own, const float *other)
{
    constexpr int columns = plain_rows<D> / PLAIN_SIDE;
    const int x = threadIdx.x % PLAIN_SIDE, y = threadIdx.x / PLAIN_SIDE;
#pragma unroll
    for (int r = 0; r < PLAIN_EACH; r++)
#pragma unroll
        for (int c = 0; c < columns; c++)
            product[r][c] = 0.0f;
#pragma unroll 4
    for (int d = 0; d < D; d += 4) {
        float4 a[PLAIN_EACH], b[columns];
#pragma unroll
        for (int r = 0; r < PLAIN_EACH; r++)
            a[r] =
                *reinterpret_cast<const float4 *>(own + (y * PLAIN_EACH + r) * plain_stride<D> + d);
#pragma unroll
        for (int c = 0; c < columns; c++)
            b[c] = *reinterpret_cast<const float4 *>(other +
                                                     (x + c * PLAIN_SIDE) * plain_stride<D> + d);
#pragma unroll
        for (int r = 0; r < PLAIN_EACH; r++) {
#pragma unroll
            for (int c = 0; c < columns; c++) {
                product[r][c] = fmaf(a[r].x, b[c].x, product[r][c]);
                product[r][c] = fmaf(a[r].y, b[c].y, product[r][c]);
                product[r][c] = fmaf(a[r].z, b[c].z, product[r][c]);
                product[r][c] = fmaf(a[r].w, b[c].w, product[r][c]);
            }
        }
    }
}

/** Put a product where plain_accumulate() reads it. An own row's weights are written and read by
 *  one half of a warp, so the warp is all that has to wait. */
template <int D>
__device__ inline void
plain_put_weights(float *weights, const float (&product)[PLAIN_EACH][plain_rows<D> / PLAIN_SIDE])
{
    const int x = threadIdx.x % PLAIN_SIDE, y = threadIdx.x / PLAIN_SIDE;
    __syncwarp();
#pragma unroll
    for (int r = 0; r < PLAIN_EACH; r++)
#pragma unroll
        for (int c = 0; c < plain_rows<D> / PLAIN_SIDE; c++)
            weights[(y * PLAIN_EACH + r) * plain_weight_stride<D> + x + c * PLAIN_SIDE] =
                product[r][c];
    __syncwarp();
}

/** sum[r] += weights of own row 4y+r * other rows, rows ascending. */
template <int D>
__device__ inline void plain_accumulate(float (&sum)[PLAIN_EACH][plain_channels<D>::COUNT],
                                        const float *weights, const float *other)
{
    constexpr int count = plain_channels<D>::COUNT;
    const int y = threadIdx.x / PLAIN_SIDE;
#pragma unroll 4
    for (int k = 0; k < plain_rows<D>; k++) {
        float b[count];
#pragma unroll
        for (int i = 0; i < count; i++)
            b[i] = other[k * plain_stride<D> + plain_column<D>(i)];
#pragma unroll
        for (int r = 0; r < PLAIN_EACH; r++) {
            const float w = weights[(y * PLAIN_EACH + r) * plain_weight_stride<D> + k];
#pragma unroll
            for (int i = 0; i < count; i++)
                sum[r][i] = fmaf(w, b[i], sum[r][i]);
        }
    }
}

/** Write the own rows, each times its factor. */
template <int D>
__device__ inline void plain_store(float *to, size_t stride,
                                   const float (&sum)[PLAIN_EACH][plain_channels<D>::COUNT],
                                   const float (&factor)[PLAIN_EACH], int first, int length)
{
    const int y = threadIdx.x / PLAIN_SIDE;
#pragma unroll
    for (int r = 0; r < PLAIN_EACH; r++) {
        const int row = first + y * PLAIN_EACH + r;
        if (row >= length)
            continue;
#pragma unroll
        for (int i = 0; i < plain_channels<D>::COUNT; i++)
            to[(size_t)row * stride + plain_column<D>(i)] = sum[r][i] * factor[r];
    }
}

/** Over the 16 threads that share own rows. */
__device__ inline float plain_row_sum(float x)
{
#pragma unroll
    for (int distance = PLAIN_SIDE / 2; distance > 0; distance /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

__device__ inline float plain_row_max(float x)
{
#pragma unroll
    for (int distance = PLAIN_SIDE / 2; distance > 0; distance /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

#endif
