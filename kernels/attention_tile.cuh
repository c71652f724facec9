/** @file attention_tile.cuh
 *  Tiles of a head's rows in shared memory, and products of tiles on the tensor cores. Device side.
 *
 *  A tile is [rows, D] of 16-bit elements in 16-byte chunks. Chunk c of row r lies at chunk
 *  c ^ swizzle(r) of its row, so that eight neighbouring rows of one chunk column, which is what a
 *  matrix load reads, lie in eight different groups of banks. */
#ifndef REBATCH_KERNELS_ATTENTION_TILE_CUH
#define REBATCH_KERNELS_ATTENTION_TILE_CUH

#include "exponential.cuh"
#include "mma.cuh"
#include "types.cuh"

/** Threads of a block of the tensor-core kernels. */
constexpr int MMA_WARPS = 4;
constexpr int MMA_THREADS = MMA_WARPS * 32;

template <int D> constexpr int tile_row_bytes = D * 2;

template <int D> __device__ inline int tile_swizzle(int row)
{
    return D == 32 ? row >> 1 & 3 : row & 7;
}

/** Byte offset of a chunk inside its tile. */
template <int D> __device__ inline int tile_offset(int row, int chunk)
{
    return row * tile_row_bytes<D> + ((chunk ^ tile_swizzle<D>(row)) << 4);
}

/** Start copying ROWS rows into a tile; rows from `length` on become zeros.
 *  @param from    row 0 of the sequence, at this head
 *  @param stride  elements from one row to the next
 *  @param first   the tile's first row */
template <typename T, int D, int ROWS>
__device__ inline void tile_load(shared_address tile, const T *from, size_t stride, int first,
                                 int length)
{
    constexpr int chunks = D / 8;
    constexpr int rows_at_once = MMA_THREADS / chunks;
    static_assert(ROWS % rows_at_once == 0, "every thread copies the same number of chunks");
    static_assert(rows_at_once % 8 == 0, "a thread's rows have the same swizzle");
    const int row = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
    const shared_address to = tile + tile_offset<D>(row, chunk);
    const T *source = from + (size_t)(first + row) * stride + chunk * 8;
#pragma unroll
    for (int r = 0; r < ROWS; r += rows_at_once) {
        const bool inside = first + row + r < length;
        copy_async_16(to + r * tile_row_bytes<D>, inside ? source + r * stride : from, inside);
    }
}

/** Where this lane's row of a 16x16 block at (row, column chunk `chunk`) begins; row is a multiple
 *  of 16, chunk is even. Matrices: top left, bottom left, top right, bottom right. As it is, this
 *  is operand a of a row-major tile; transposed, operand b of the tile's rows as the inner
 *  dimension. */
template <int D>
__device__ inline shared_address block_address(shared_address tile, int row, int chunk)
{
    const int lane = threadIdx.x & 31;
    const int lane_row = lane & 15;
    const int low = lane >> 4 ^ tile_swizzle<D>(lane_row);
    return tile + (row + lane_row) * tile_row_bytes<D> + ((chunk ^ low) << 4);
}

/** The same with matrices top left, top right, bottom left, bottom right: operand b of two
 *  neighbouring products, of a tile that holds b's columns as rows. */
template <int D>
__device__ inline shared_address columns_address(shared_address tile, int row, int chunk)
{
    const int lane = threadIdx.x & 31;
    const int lane_row = (lane & 7) | (lane >> 4 << 3);
    const int low = (lane >> 3 & 1) ^ tile_swizzle<D>(lane_row);
    return tile + (row + lane_row) * tile_row_bytes<D> + ((chunk ^ low) << 4);
}

/** acc[16*M rows, 8*N columns] += a * b^T, operand a in registers: rows `b_row`... of tile b. */
template <typename T, int D, int M, int N>
__device__ inline void multiply_transposed(float (&acc)[M][N][4], const unsigned (&a)[M][D / 16][4],
                                           shared_address b, int b_row)
{
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned columns[4];
            load_matrix_x4(columns, columns_address<D>(b, b_row + n * 8, k * 2));
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_16816<T>(acc[m][n], a[m][k], columns[0], columns[1]);
                multiply_16816<T>(acc[m][n + 1], a[m][k], columns[2], columns[3]);
            }
        }
    }
}

/** The same with operand a in a tile too: its rows `a_row`... */
template <typename T, int D, int M, int N>
__device__ inline void multiply_transposed(float (&acc)[M][N][4], shared_address a, int a_row,
                                           shared_address b, int b_row)
{
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        unsigned rows[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
            load_matrix_x4(rows[m], block_address<D>(a, a_row + m * 16, k * 2));
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned columns[4];
            load_matrix_x4(columns, columns_address<D>(b, b_row + n * 8, k * 2));
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_16816<T>(acc[m][n], rows[m], columns[0], columns[1]);
                multiply_16816<T>(acc[m][n + 1], rows[m], columns[2], columns[3]);
            }
        }
    }
}

/** Keys after their query do not count: their products become -inf. Row 0 and column 0 of the
 *  accumulators are at `row` and `column` of the sequence; the rows are queries and the columns
 *  keys, or the other way round. */
template <int M, int N, bool ROWS_ARE_KEYS>
__device__ inline void mask_later_keys(float (&s)[M][N][4], int row, int column)
{
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int at_row = row + m * 16 + lane / 4 + (e / 2) * 8;
                const int at_column = column + n * 8 + (lane & 3) * 2 + (e & 1);
                if (ROWS_ARE_KEYS ? at_row > at_column : at_column > at_row)
                    s[m][n][e] = -INFINITY;
            }
        }
    }
}

/** Operand a of products over 16*K columns, from accumulators: rounded to T. An accumulator's
 *  layout is that of operand a, 8 columns at a time. */
template <typename T, int M, int N>
__device__ inline void round_to_operand(unsigned (&a)[M][N / 2][4], const float (&acc)[M][N][4])
{
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int k = 0; k < N / 2; k++) {
            a[m][k][0] = pack2<T>(acc[m][2 * k][0], acc[m][2 * k][1]);
            a[m][k][1] = pack2<T>(acc[m][2 * k][2], acc[m][2 * k][3]);
            a[m][k][2] = pack2<T>(acc[m][2 * k + 1][0], acc[m][2 * k + 1][1]);
            a[m][k][3] = pack2<T>(acc[m][2 * k + 1][2], acc[m][2 * k + 1][3]);
        }
    }
}

/** acc[16*M rows, D columns] += a * b, the inner dimension being rows `b_row`... of tile b. */
template <typename T, int D, int M, int K>
__device__ inline void multiply_rows(float (&acc)[M][D / 8][4], const unsigned (&a)[M][K][4],
                                     shared_address b, int b_row)
{
#pragma unroll
    for (int k = 0; k < K; k++) {
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            unsigned columns[4];
            load_matrix_x4_transposed(columns, block_address<D>(b, b_row + k * 16, n));
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_16816<T>(acc[m][n], a[m][k], columns[0], columns[1]);
                multiply_16816<T>(acc[m][n + 1], a[m][k], columns[2], columns[3]);
            }
        }
    }
}

/** Round this warp's accumulators, times a factor for each of its rows, and write them to global
 *  memory 16 bytes at a time, by way of the warp's own rows of a tile that nobody else reads any
 *  more.
 *  @param row     of the tile where the warp's rows begin
 *  @param factor  [m][0] for row lane / 4 of the m-th 16, [m][1] for 8 rows further
 *  @param first   row of the sequence that is row 0 of the tile; rows from `length` on are left out
 *                 */
template <typename T, int D, int M>
__device__ inline void store_rows(T *to, size_t stride, const float (&acc)[M][D / 8][4],
                                  const float (&factor)[M][2], unsigned char *tile, int row,
                                  int first, int length)
{
    constexpr int chunks = D / 8;
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int at = row + m * 16 + half * 8 + lane / 4;
#pragma unroll
            for (int n = 0; n < chunks; n++)
                *reinterpret_cast<unsigned *>(tile + tile_offset<D>(at, n) + (lane & 3) * 4) =
                    pack2<T>(acc[m][n][2 * half] * factor[m][half],
                             acc[m][n][2 * half + 1] * factor[m][half]);
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < M * 16 * chunks; i += 32) {
        const int at = row + i / chunks, chunk = i % chunks;
        if (first + at < length)
            *reinterpret_cast<uint4 *>(to + (size_t)(first + at) * stride + chunk * 8) =
                *reinterpret_cast<const uint4 *>(tile + tile_offset<D>(at, chunk));
    }
}

#endif
