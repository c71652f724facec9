/* The gradient of a weight on devices that have wgmma. Owns weight_gradient_sm90. Must not know:
 * the cut.
 *
 * A block owns a tile of the gradient, which its accumulators start from; the rows of a and b pass
 * by, STEP positions of one sample at a time. One warp has boxes of them copied into a ring of
 * stages; each of the other warpgroups adds 64 rows of the tile. The products of a step, of 16
 * positions each, join the accumulator one after the other: an element is one chain over all
 * positions, whatever the tile, and a chain goes on from where an earlier call left it. */
#include "boxes.cuh"
#include "hopper.cuh"
#include "weight_gradient.cuh"

constexpr int STEP = 64;           /* positions */
constexpr int GROUP_ROWS = 64;     /* of the gradient, a warpgroup */
constexpr int GROUP_THREADS = 128; /* of a warpgroup */
constexpr int SHARED_BYTES = 227 * 1024;

/* A tile: GROUPS * 64 rows of the gradient by COLUMNS columns. */
template <int GROUPS_, int COLUMNS_> struct tile_shape {
    static constexpr int GROUPS = GROUPS_, COLUMNS = COLUMNS_, ROWS = GROUPS * GROUP_ROWS;
    static constexpr int BOX_COLUMNS = COLUMNS % 64 == 0 ? 64 : 32; /* of b */
    static constexpr int BOXES = COLUMNS / BOX_COLUMNS;
    static constexpr int A_BOX_BYTES = STEP * GROUP_ROWS * 2, B_BOX_BYTES = STEP * BOX_COLUMNS * 2;
    static constexpr int STAGE_BYTES = GROUPS * A_BOX_BYTES + BOXES * B_BOX_BYTES;
    /* 1 KiB for barriers, and 1 KiB to begin at a multiple of it, as swizzled boxes have to. */
    static constexpr int STAGES =
        (SHARED_BYTES - 2048) / STAGE_BYTES < 8 ? (SHARED_BYTES - 2048) / STAGE_BYTES : 8;
    static constexpr int BYTES = STAGES * STAGE_BYTES + 2048;
    static constexpr int THREADS = GROUPS * GROUP_THREADS + 32;
};

struct box_sum_shape {
    int rows, columns;
    int steps, sample_steps; /* of STEP positions: in all, and of a sample */
    unsigned column_tiles;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int PRODUCT_ROWS = 16; /* positions of one product */

/* The barriers of a stage: its boxes are there; they are no longer needed. */
struct ring {
    shared_address boxes, full, empty;

    __device__ explicit ring(unsigned char *shared)
    {
        full = (shared_address_of(shared) + 1023) & ~1023u;
        empty = full + 512;
        boxes = full + 1024;
    }
};

/* One thread: start the copies of every step, each into its stage when that is free. */
template <class tile>
__device__ inline void copy_steps(const ring &r, const CUtensorMap *a, const CUtensorMap *b,
                                  const box_sum_shape &shape, int row, int column)
{
    int sample = 0, position = 0, stage = 0;
    unsigned parity = 1;
    for (int step = 0; step < shape.steps; step++) {
        const shared_address to = r.boxes + stage * tile::STAGE_BYTES;
        const shared_address full = r.full + stage * 8;
        barrier_wait(r.empty + stage * 8, parity);
        barrier_arrive_expecting(full, tile::STAGE_BYTES);
#pragma unroll
        for (int i = 0; i < tile::GROUPS; i++)
            copy_box(to + i * tile::A_BOX_BYTES, a, row + i * GROUP_ROWS, position, sample, full);
#pragma unroll
        for (int i = 0; i < tile::BOXES; i++)
            copy_box(to + tile::GROUPS * tile::A_BOX_BYTES + i * tile::B_BOX_BYTES, b,
                     column + i * tile::BOX_COLUMNS, position, sample, full);
        position += STEP;
        if (position >= shape.sample_steps * STEP) {
            position = 0;
            sample++;
        }
        if (++stage == tile::STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
}

/* One warpgroup: acc += what its 64 rows of the tile get from every step. */
template <typename T, class tile>
__device__ inline void add_steps(float (&acc)[tile::COLUMNS / 2], const ring &r, int group,
                                 int steps)
{
    constexpr int A_SWIZZLE = GROUP_ROWS * 2, B_SWIZZLE = tile::BOX_COLUMNS * 2;
    const uint64_t a_first =
        operand_descriptor<A_SWIZZLE>(r.boxes + group * tile::A_BOX_BYTES, tile::A_BOX_BYTES);
    const uint64_t b_first = operand_descriptor<B_SWIZZLE>(
        r.boxes + tile::GROUPS * tile::A_BOX_BYTES, tile::B_BOX_BYTES);
    const bool tells = threadIdx.x % 32 == 0;
    int stage = 0, last = 0;
    unsigned parity = 0;
    for (int step = 0; step < steps; step++) {
        barrier_wait(r.full + stage * 8, parity);
        const uint64_t offset = (uint64_t)(stage * tile::STAGE_BYTES) >> 4;
        products_begin();
#pragma unroll
        for (int k = 0; k < STEP / PRODUCT_ROWS; k++)
            multiply_group<T, tile::COLUMNS>(
                acc, a_first + offset + k * (PRODUCT_ROWS * A_SWIZZLE >> 4),
                b_first + offset + k * (PRODUCT_ROWS * B_SWIZZLE >> 4));
        products_commit();
        products_wait<1>(); /* those of the step before */
        if (step > 0 && tells)
            barrier_arrive(r.empty + last * 8);
        last = stage;
        if (++stage == tile::STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    products_wait<0>();
}

/* Between the accumulators and the warpgroup's rows of the gradient, two columns at a time. */
template <int REGISTERS, typename Move>
__device__ inline void each_pair(float (&acc)[REGISTERS], float *grad, const box_sum_shape &shape,
                                 int row, int column, Move move)
{
    const int thread = threadIdx.x % GROUP_THREADS;
    const int first_row = row + thread / 32 * 16 + thread % 32 / 4;
    const int first_column = column + thread % 4 * 2;
#pragma unroll
    for (int r = 0; r < REGISTERS; r += 2) {
        const int at_row = first_row + r / 2 % 2 * 8, at_column = first_column + r / 4 * 8;
        if (at_row < shape.rows && at_column < shape.columns)
            move(acc[r], acc[r + 1],
                 reinterpret_cast<float2 *>(grad + (size_t)at_row * shape.columns + at_column));
    }
}

#endif

/* Grid: tiles, those of a row of tiles next to each other. */
template <typename T, class tile>
__global__ void __launch_bounds__(tile::THREADS, 1)
    weight_gradient_sm90_kernel(float *grad, const __grid_constant__ CUtensorMap a,
                                const __grid_constant__ CUtensorMap b, box_sum_shape shape)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ unsigned char shared[];
    const ring r(shared);
    const int row = (int)(blockIdx.x / shape.column_tiles) * tile::ROWS;
    const int column = (int)(blockIdx.x % shape.column_tiles) * tile::COLUMNS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < tile::STAGES; i++) {
            barrier_init(r.full + i * 8, 1);
            barrier_init(r.empty + i * 8, tile::GROUPS * GROUP_THREADS / 32);
        }
        barrier_init_done();
    }
    __syncthreads();
    const int group = threadIdx.x / GROUP_THREADS;
    if (group == tile::GROUPS) {
        if (threadIdx.x % 32 == 0)
            copy_steps<tile>(r, &a, &b, shape, row, column);
        return;
    }
    float acc[tile::COLUMNS / 2] = {};
    const int own = row + group * GROUP_ROWS;
    each_pair(acc, grad, shape, own, column, [](float &x, float &y, const float2 *from) {
        const float2 pair = *from;
        x = pair.x;
        y = pair.y;
    });
    add_steps<T, tile>(acc, r, group, shape.steps);
    each_pair(acc, grad, shape, own, column,
              [](float x, float y, float2 *to) { *to = make_float2(x, y); });
#else
    __trap(); /* has_sm90() says no */
#endif
}

/* ---- host ---- */

template <typename T, class tile>
static cudaError_t launch_tile(const weight_gradient_call &call, rbk_dtype dtype)
{
    const auto kernel = weight_gradient_sm90_kernel<T, tile>;
    CUtensorMap a, b;
    cudaError_t status =
        describe_boxes(&a, call.a, call.batch, call.length, call.rows, STEP, GROUP_ROWS, dtype);
    if (status == cudaSuccess)
        status = describe_boxes(&b, call.b, call.batch, call.length, call.columns, STEP,
                                tile::BOX_COLUMNS, dtype);
    if (status == cudaSuccess)
        status = allow_shared(kernel, tile::BYTES);
    if (status != cudaSuccess)
        return status;
    const size_t column_tiles = ceil_div(call.columns, tile::COLUMNS);
    const size_t sample_steps = ceil_div(call.length, STEP);
    const box_sum_shape shape = {(int)call.rows, (int)call.columns,
                                 (int)(call.batch * sample_steps), (int)sample_steps,
                                 (unsigned)column_tiles};
    const size_t tiles = ceil_div(call.rows, tile::ROWS) * column_tiles;
    kernel<<<(unsigned)tiles, tile::THREADS, tile::BYTES, call.stream>>>(call.grad, a, b, shape);
    return cudaGetLastError();
}

/* Cycles that a step takes in all waves of tiles. A multiprocessor multiplies 2048 pairs a cycle;
 * it gets 45 bytes of operands a cycle when all of them ask. Both go on at once, but not quite: an
 * eighth of the shorter is seen too. Fitted to an H200. */
template <class tile> static double cost_of(const weight_gradient_call &call, int multiprocessors)
{
    const double tiles =
        (double)(ceil_div(call.rows, tile::ROWS) * ceil_div(call.columns, tile::COLUMNS));
    const double asking = tiles < multiprocessors ? tiles / multiprocessors : 1.0;
    const double multiplying = tile::ROWS * tile::COLUMNS * STEP / 2048.0;
    const double loading = tile::STAGE_BYTES / 45.0 * asking;
    return ceil(tiles / multiprocessors) *
           (fmax(multiplying, loading) + fmin(multiplying, loading) / 8.0);
}

typedef cudaError_t launcher(const weight_gradient_call &call, rbk_dtype dtype);

/* Keep the cheapest launcher so far. */
template <typename T, class tile>
static void consider(launcher **best, double *least, const weight_gradient_call &call,
                     int multiprocessors)
{
    const double cost = cost_of<tile>(call, multiprocessors);
    if (cost >= *least)
        return;
    *least = cost;
    *best = launch_tile<T, tile>;
}

template <typename T> static cudaError_t launch(const weight_gradient_call &call, rbk_dtype dtype)
{
    int multiprocessors;
    const cudaError_t status = find_multiprocessors(&multiprocessors);
    if (status != cudaSuccess)
        return status;
    launcher *best = nullptr;
    double least = INFINITY;
    consider<T, tile_shape<2, 256>>(&best, &least, call, multiprocessors);
    consider<T, tile_shape<2, 128>>(&best, &least, call, multiprocessors);
    consider<T, tile_shape<3, 96>>(&best, &least, call, multiprocessors);
    consider<T, tile_shape<1, 128>>(&best, &least, call, multiprocessors);
    consider<T, tile_shape<1, 64>>(&best, &least, call, multiprocessors);
    return best(call, dtype);
}

cudaError_t weight_gradient_sm90(const weight_gradient_call &call, rbk_dtype dtype)
{
    return dtype == RBK_BF16 ? launch<__nv_bfloat16>(call, dtype) : launch<__half>(call, dtype);
}
