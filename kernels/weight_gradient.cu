/* The gradient of a weight: a sum over all positions of all samples. Owns rbk_weight_gradient*.
 * Must not know: the cut.
 *
 * A block owns a tile of the gradient, which its accumulators start from, and goes through the
 * positions in order: so a sum goes on from where an earlier call left it, and nothing tells where
 * one call ended and the next began. */
#include "boxes.cuh"
#include "mma.cuh"
#include "weight_gradient.cuh"

/* ---- fp16 and bf16, on the tensor cores ---- */

constexpr int STEP = 32; /* positions of a stage */
constexpr int STAGES = 4;
constexpr int WARP_ROWS = 64, WARP_COLUMNS = 32;

/* A tile of SIDE x SIDE, one warp for each 64 x 32 of it. */
template <int SIDE> struct side_shape {
    static constexpr int WARPS = SIDE / WARP_ROWS * (SIDE / WARP_COLUMNS), THREADS = 32 * WARPS;
    static constexpr int CHUNKS = SIDE / 8;               /* of 16 bytes, a position */
    static constexpr int OPERAND_BYTES = STEP * SIDE * 2; /* of a stage */
    static constexpr int BYTES = STAGES * 2 * OPERAND_BYTES;
};

/* Byte offset of a chunk of a position. Neighbouring positions have the same chunk in different
 * groups of banks. */
template <int SIDE> __device__ inline int stage_offset(int position, int chunk)
{
    return (position * side_shape<SIDE>::CHUNKS + (chunk ^ (position & 7))) * 16;
}

/* Start copying STEP positions of SIDE columns of one sample; what is outside becomes zeros. */
template <typename T, int SIDE>
__device__ inline void copy_operand(shared_address to, const T *sample, int position, int length,
                                    int column, int width)
{
    using s = side_shape<SIDE>;
#pragma unroll
    for (int i = threadIdx.x; i < STEP * s::CHUNKS; i += s::THREADS) {
        const int at = position + i / s::CHUNKS, chunk = i % s::CHUNKS;
        const bool inside = at < length && column + chunk * 8 < width;
        copy_async_16(to + stage_offset<SIDE>(i / s::CHUNKS, chunk),
                      inside ? sample + (size_t)at * width + column + chunk * 8 : sample, inside);
    }
}

struct gradient_shape {
    int rows, columns, length;
    int steps, sample_steps; /* of STEP positions: in all, and of a sample */
};

/* Start copying a step's operands, if there is such a step. */
template <typename T, int SIDE>
__device__ inline void copy_step(shared_address stages, const T *a, const T *b,
                                 const gradient_shape &shape, int step, int row, int column)
{
    using s = side_shape<SIDE>;
    if (step < shape.steps) {
        const size_t sample = step / shape.sample_steps;
        const int position = step % shape.sample_steps * STEP;
        const shared_address to = stages + step % STAGES * 2 * s::OPERAND_BYTES;
        copy_operand<T, SIDE>(to, a + sample * shape.length * shape.rows, position, shape.length,
                              row, shape.rows);
        copy_operand<T, SIDE>(to + s::OPERAND_BYTES, b + sample * shape.length * shape.columns,
                              position, shape.length, column, shape.columns);
    }
    copy_async_commit();
}

constexpr int ROW_BLOCKS = WARP_ROWS / 16, COLUMN_BLOCKS = WARP_COLUMNS / 8;

/* acc += the products of a stage's positions, 16 at a time, ascending. */
template <typename T, int SIDE>
__device__ inline void add_step(float (&acc)[ROW_BLOCKS][COLUMN_BLOCKS][4], shared_address stage,
                                int row, int column)
{
    const int lane = threadIdx.x & 31;
    const shared_address b_stage = stage + side_shape<SIDE>::OPERAND_BYTES;
#pragma unroll
    for (int k = 0; k < STEP; k += 16) {
        unsigned a[ROW_BLOCKS][4], b[COLUMN_BLOCKS / 2][4];
#pragma unroll
        for (int m = 0; m < ROW_BLOCKS; m++)
            load_matrix_x4_transposed(
                a[m], stage + stage_offset<SIDE>(k + (lane & 7) + (lane >> 4 << 3),
                                                 (row + m * 16) / 8 + (lane >> 3 & 1)));
#pragma unroll
        for (int n = 0; n < COLUMN_BLOCKS / 2; n++)
            load_matrix_x4_transposed(
                b[n],
                b_stage + stage_offset<SIDE>(k + (lane & 15), (column + n * 16) / 8 + (lane >> 4)));
#pragma unroll
        for (int m = 0; m < ROW_BLOCKS; m++) {
#pragma unroll
            for (int n = 0; n < COLUMN_BLOCKS; n++)
                multiply_16816<T>(acc[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
    }
}

/* Between the accumulators and the gradient, two columns at a time. */
template <typename Move>
__device__ inline void each_pair(float (&acc)[ROW_BLOCKS][COLUMN_BLOCKS][4], float *grad,
                                 const gradient_shape &shape, int row, int column, Move move)
{
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int m = 0; m < ROW_BLOCKS; m++) {
#pragma unroll
        for (int n = 0; n < COLUMN_BLOCKS; n++) {
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const int at_row = row + m * 16 + lane / 4 + e / 2 * 8;
                const int at_column = column + n * 8 + (lane & 3) * 2;
                if (at_row < shape.rows && at_column < shape.columns)
                    move(acc[m][n][e], acc[m][n][e + 1],
                         reinterpret_cast<float2 *>(grad + (size_t)at_row * shape.columns +
                                                    at_column));
            }
        }
    }
}

/* Grid: tiles of columns, tiles of rows. */
template <typename T, int SIDE>
__global__ void __launch_bounds__(side_shape<SIDE>::THREADS)
    weight_gradient_mma_kernel(float *grad, const T *a, const T *b, gradient_shape shape)
{
    extern __shared__ __align__(128) unsigned char shared[];
    const shared_address stages = shared_address_of(shared);
    const int row = blockIdx.y * SIDE, column = blockIdx.x * SIDE;
    const int warp = threadIdx.x / 32;
    const int warp_row = warp / (SIDE / WARP_COLUMNS) * WARP_ROWS;
    const int warp_column = warp % (SIDE / WARP_COLUMNS) * WARP_COLUMNS;
    for (int step = 0; step < STAGES - 1; step++)
        copy_step<T, SIDE>(stages, a, b, shape, step, row, column);
    float acc[ROW_BLOCKS][COLUMN_BLOCKS][4] = {};
    each_pair(acc, grad, shape, row + warp_row, column + warp_column,
              [](float &x, float &y, const float2 *from) {
                  const float2 pair = *from;
                  x = pair.x;
                  y = pair.y;
              });
    for (int step = 0; step < shape.steps; step++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads(); /* the step is there, and nobody uses the stage of the one before */
        copy_step<T, SIDE>(stages, a, b, shape, step + STAGES - 1, row, column);
        add_step<T, SIDE>(acc, stages + step % STAGES * 2 * side_shape<SIDE>::OPERAND_BYTES,
                          warp_row, warp_column);
    }
    copy_async_wait<0>();
    each_pair(acc, grad, shape, row + warp_row, column + warp_column,
              [](float x, float y, float2 *to) { *to = make_float2(x, y); });
}

template <typename T, int SIDE> static cudaError_t launch_mma_side(const weight_gradient_call &call)
{
    using s = side_shape<SIDE>;
    const auto kernel = weight_gradient_mma_kernel<T, SIDE>;
    const cudaError_t status = allow_shared(kernel, s::BYTES);
    if (status != cudaSuccess)
        return status;
    const size_t sample_steps = ceil_div(call.length, STEP);
    const gradient_shape shape = {(int)call.rows, (int)call.columns, (int)call.length,
                                  (int)(call.batch * sample_steps), (int)sample_steps};
    const dim3 grid((unsigned)ceil_div(call.columns, SIDE), (unsigned)ceil_div(call.rows, SIDE));
    kernel<<<grid, s::THREADS, s::BYTES, call.stream>>>(call.grad, (const T *)call.a,
                                                        (const T *)call.b, shape);
    return cudaGetLastError();
}

/* ---- fp32, on the plain units ---- */

constexpr int PLAIN_STEP = 16; /* positions */
constexpr int PLAIN_SIDE_THREADS = 16, PLAIN_BLOCK_THREADS = 256;

/* Start copying PLAIN_STEP positions of SIDE columns; what is outside becomes zeros. */
template <int SIDE>
__device__ inline void copy_plain(float *to, const float *from, size_t position, size_t positions,
                                  int column, int width)
{
    constexpr int chunks = SIDE / 4;
#pragma unroll
    for (int i = threadIdx.x; i < PLAIN_STEP * chunks; i += PLAIN_BLOCK_THREADS) {
        const size_t at = position + i / chunks;
        const int at_column = column + i % chunks * 4;
        const bool inside = at < positions && at_column < width;
        copy_async_16(shared_address_of(to + i * 4), inside ? from + at * width + at_column : from,
                      inside);
    }
}

/* Where a thread's i-th row or column of a tile is: in pairs, which lie 32 apart, so that
 * neighbouring threads read neighbouring pairs. */
__device__ inline int plain_at(int thread, int i)
{
    return i / 2 * (2 * PLAIN_SIDE_THREADS) + thread * 2 + i % 2;
}

/* acc += the product of one position. */
template <int EACH>
__device__ inline void add_plain(float (&acc)[EACH][EACH], const float *a, const float *b, int x,
                                 int y)
{
    float2 as[EACH / 2], bs[EACH / 2];
#pragma unroll
    for (int i = 0; i < EACH / 2; i++) {
        as[i] = *reinterpret_cast<const float2 *>(a + plain_at(y, 2 * i));
        bs[i] = *reinterpret_cast<const float2 *>(b + plain_at(x, 2 * i));
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
#pragma unroll
        for (int j = 0; j < EACH; j++)
            acc[i][j] = __fmaf_rn(i % 2 ? as[i / 2].y : as[i / 2].x,
                                  j % 2 ? bs[j / 2].y : bs[j / 2].x, acc[i][j]);
    }
}

/* Between the accumulators and the gradient, two columns at a time. */
template <int EACH, typename Move>
__device__ inline void each_plain_pair(float (&acc)[EACH][EACH], float *grad, int rows, int columns,
                                       int row, int column, Move move)
{
#pragma unroll
    for (int i = 0; i < EACH; i++) {
#pragma unroll
        for (int j = 0; j < EACH; j += 2) {
            const int at_row = row + plain_at(threadIdx.x / PLAIN_SIDE_THREADS, i);
            const int at_column = column + plain_at(threadIdx.x % PLAIN_SIDE_THREADS, j);
            if (at_row < rows && at_column < columns)
                move(acc[i][j], acc[i][j + 1],
                     reinterpret_cast<float2 *>(grad + (size_t)at_row * columns + at_column));
        }
    }
}

/* Each thread has EACH x EACH elements of a tile. Grid: tiles of columns, tiles of rows. */
template <int EACH>
__global__ void __launch_bounds__(PLAIN_BLOCK_THREADS, 2)
    weight_gradient_plain_kernel(float *grad, const float *a, const float *b, size_t positions,
                                 int rows, int columns)
{
    constexpr int SIDE = PLAIN_SIDE_THREADS * EACH;
    __shared__ __align__(16) float a_stages[2][PLAIN_STEP][SIDE], b_stages[2][PLAIN_STEP][SIDE];
    const int row = blockIdx.y * SIDE, column = blockIdx.x * SIDE;
    const int x = threadIdx.x % PLAIN_SIDE_THREADS, y = threadIdx.x / PLAIN_SIDE_THREADS;
    copy_plain<SIDE>(a_stages[0][0], a, 0, positions, row, rows);
    copy_plain<SIDE>(b_stages[0][0], b, 0, positions, column, columns);
    copy_async_commit();
    float acc[EACH][EACH] = {};
    each_plain_pair(acc, grad, rows, columns, row, column,
                    [](float &p, float &q, const float2 *from) {
                        const float2 pair = *from;
                        p = pair.x;
                        q = pair.y;
                    });
    int now = 0;
    for (size_t position = 0; position < positions; position += PLAIN_STEP, now ^= 1) {
        copy_async_wait<0>();
        __syncthreads(); /* the step is there, and nobody uses the other stage */
        if (position + PLAIN_STEP < positions) {
            copy_plain<SIDE>(a_stages[now ^ 1][0], a, position + PLAIN_STEP, positions, row, rows);
            copy_plain<SIDE>(b_stages[now ^ 1][0], b, position + PLAIN_STEP, positions, column,
                             columns);
            copy_async_commit();
        }
        /* Positions past the end are left out: 0 added to -0 would be another number. */
        if (positions - position >= PLAIN_STEP) {
#pragma unroll
            for (int k = 0; k < PLAIN_STEP; k++)
                add_plain<EACH>(acc, a_stages[now][k], b_stages[now][k], x, y);
        } else {
            for (int k = 0; k < (int)(positions - position); k++)
                add_plain<EACH>(acc, a_stages[now][k], b_stages[now][k], x, y);
        }
    }
    each_plain_pair(acc, grad, rows, columns, row, column,
                    [](float p, float q, float2 *to) { *to = make_float2(p, q); });
}

template <int EACH> static cudaError_t launch_plain_tiles(const weight_gradient_call &call)
{
    constexpr int side = PLAIN_SIDE_THREADS * EACH;
    const dim3 grid((unsigned)ceil_div(call.columns, side), (unsigned)ceil_div(call.rows, side));
    weight_gradient_plain_kernel<EACH><<<grid, PLAIN_BLOCK_THREADS, 0, call.stream>>>(
        call.grad, (const float *)call.a, (const float *)call.b, call.batch * call.length,
        (int)call.rows, (int)call.columns);
    return cudaGetLastError();
}

/* Whether there are tiles of side x side for every multiprocessor. */
static bool keeps_busy(const weight_gradient_call &call, size_t side, int multiprocessors)
{
    return ceil_div(call.columns, side) * ceil_div(call.rows, side) >= (size_t)multiprocessors;
}

static cudaError_t launch_plain(const weight_gradient_call &call, int multiprocessors)
{
    if (keeps_busy(call, 128, multiprocessors))
        return launch_plain_tiles<8>(call);
    if (keeps_busy(call, 64, multiprocessors))
        return launch_plain_tiles<4>(call);
    return launch_plain_tiles<2>(call);
}

template <typename T>
static cudaError_t launch_mma(const weight_gradient_call &call, int multiprocessors)
{
    return keeps_busy(call, 128, multiprocessors) ? launch_mma_side<T, 128>(call)
                                                  : launch_mma_side<T, 64>(call);
}

/* ---- launchers ---- */

/* Tiles of rows are blocks in y; a stage's positions and columns are counted with int. */
static bool is_call(const weight_gradient_call &call)
{
    return are_arrays(call.grad, call.a, call.b) &&
           are_sizes(INDEX_LIMIT, call.batch, call.length, call.rows, call.columns) &&
           call.rows % RBK_WIDTH_MULTIPLE == 0 && call.columns % RBK_WIDTH_MULTIPLE == 0 &&
           ceil_div(call.rows, 32) <= GRID_YZ_LIMIT && call.columns < INDEX_LIMIT / 2 &&
           call.batch <= (INDEX_LIMIT - 1) / ceil_div(call.length, STEP);
}

/* Small tiles where large ones would leave multiprocessors without work. */
static cudaError_t launch_portable(const weight_gradient_call &call, rbk_dtype dtype)
{
    int multiprocessors;
    const cudaError_t status = find_multiprocessors(&multiprocessors);
    if (status != cudaSuccess)
        return status;
    switch (dtype) {
    case RBK_F32:
        return launch_plain(call, multiprocessors);
    case RBK_BF16:
        return launch_mma<__nv_bfloat16>(call, multiprocessors);
    case RBK_F16:
        return launch_mma<__half>(call, multiprocessors);
    }
    return cudaErrorInvalidValue;
}

extern "C" cudaError_t rbk_weight_gradient_portable(float *grad, const void *a, const void *b,
                                                    size_t batch, size_t length, size_t rows,
                                                    size_t columns, rbk_dtype dtype,
                                                    cudaStream_t stream)
{
    const weight_gradient_call call = {grad, a, b, batch, length, rows, columns, stream};
    return is_call(call) && rbk_dtype_bytes(dtype) > 0 ? launch_portable(call, dtype)
                                                       : cudaErrorInvalidValue;
}

extern "C" cudaError_t rbk_weight_gradient(float *grad, const void *a, const void *b, size_t batch,
                                           size_t length, size_t rows, size_t columns,
                                           rbk_dtype dtype, cudaStream_t stream)
{
    const weight_gradient_call call = {grad, a, b, batch, length, rows, columns, stream};
    if (!is_call(call) || rbk_dtype_bytes(dtype) == 0)
        return cudaErrorInvalidValue;
    bool is_sm90;
    const cudaError_t status = has_sm90(&is_sm90);
    if (status != cudaSuccess)
        return status;
    return is_sm90 && dtype != RBK_F32 ? weight_gradient_sm90(call, dtype)
                                       : launch_portable(call, dtype);
}
