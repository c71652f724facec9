/** @file attention_sm90.cuh
 *  Attention on devices that have wgmma, for heads 64 wide: what its kernels have in common, and
 *  their launchers.
 *
 *  A warpgroup owns 64 rows of one head, queries or keys; the others pass by, 64 at a time. One
 *  warp has tiles of both copied: those that a block owns once, the others into a ring of stages.
 *  What is between two products stays in registers: accumulators have the layout of the next
 *  product's first operand. */
#ifndef REBATCH_KERNELS_ATTENTION_SM90_CUH
#define REBATCH_KERNELS_ATTENTION_SM90_CUH

#include "attention_tile.cuh"
#include "boxes.cuh"
#include "hopper.cuh"

constexpr int HEAD = 64;      /**< width of a head */
constexpr int TILE = 64;      /**< rows of a tile */
constexpr int RING = 4;       /**< stages of two tiles */
constexpr int OWN_GROUPS = 2; /**< warpgroups of a block that own rows */
constexpr int GROUP = 128;    /**< threads of a warpgroup */
constexpr int OWN_ROWS = OWN_GROUPS * TILE;
constexpr int SM90_THREADS = OWN_GROUPS * GROUP + 32;
constexpr int TILE_BYTES = TILE * HEAD * 2;
/** Barriers and statistics, two own tiles a warpgroup, the ring, and room to begin at 1 KiB. */
constexpr int STATISTICS_BYTES = 2 * TILE * 4;
constexpr int HEADER_BYTES = 1024 + RING * STATISTICS_BYTES;
constexpr int SM90_SHARED_BYTES =
    1024 + HEADER_BYTES + 2 * OWN_GROUPS * TILE_BYTES + RING * 2 * TILE_BYTES;
static_assert(HEADER_BYTES % 1024 == 0, "tiles begin at multiples of 1 KiB");

/** [B,T,3,H,64] and its gradient, [B,T,H,64], log_sum and delta [B,H,T]. */
struct sm90_backward_call {
    void *dqkv;
    const void *qkv, *dout;
    const float *log_sum, *delta;
    size_t batch, length, heads;
    float scale;
    cudaStream_t stream;
};

/** For bf16 and fp16, where has_sm90(). Arguments were checked, delta is there. */
cudaError_t attention_backward_sm90(const sm90_backward_call &call, rbk_dtype dtype);

struct sm90_forward_call {
    void *out;
    float *log_sum;
    const void *qkv;
    size_t batch, length, heads;
    float scale2;
    cudaStream_t stream;
};

/** The same. */
cudaError_t attention_forward_sm90(const sm90_forward_call &call, rbk_dtype dtype);

/** Where things are in a block's shared memory. */
struct sm90_shared {
    unsigned char *header;
    shared_address own_full, full, empty; /* barriers: one, and one a stage */
    shared_address own, stages;           /* tiles */

    __device__ explicit sm90_shared(unsigned char *shared)
    {
        const unsigned misfit = shared_address_of(shared) & 1023;
        header = shared + (misfit ? 1024 - misfit : 0);
        own_full = shared_address_of(header);
        full = own_full + 64;
        empty = own_full + 128;
        own = own_full + HEADER_BYTES;
        stages = own + 2 * OWN_GROUPS * TILE_BYTES;
    }

    /** Statistics of a stage: two numbers for each of its rows. */
    __device__ float *statistics(int stage) const
    {
        return reinterpret_cast<float *>(header + 1024 + stage * STATISTICS_BYTES);
    }

    /** The first of the two own tiles of a warpgroup. */
    __device__ unsigned char *own_tiles(int group) const
    {
        return header + HEADER_BYTES + group * 2 * TILE_BYTES;
    }
};

/** A stage, and the parity of the phase that fills it. */
struct ring_place {
    int stage = 0;
    unsigned parity = 0;

    __device__ void advance()
    {
        if (++stage == RING) {
            stage = 0;
            parity ^= 1;
        }
    }
};

/** All threads of a block: barriers that wait for `fillers` arrivals of those who fill a stage, and
 *  `users` of those who are done with it: one of each warp, or each thread for itself where threads
 *  read it themselves. */
__device__ inline void sm90_begin(const sm90_shared &s, unsigned fillers,
                                  unsigned users = OWN_GROUPS * GROUP / 32)
{
    if (threadIdx.x == 0) {
        barrier_init(s.own_full, 1);
        for (int i = 0; i < RING; i++) {
            barrier_init(s.full + i * 8, fillers);
            barrier_init(s.empty + i * 8, users);
        }
        barrier_init_done();
    }
    __syncthreads();
}

/** Where a block's head is: columns of q, k and v in a row of qkv, and the sample. */
struct head_place {
    int q, k, v, dout, sample;

    __device__ head_place()
    {
        const int width = gridDim.y * HEAD;
        dout = blockIdx.y * HEAD;
        q = dout;
        k = width + dout;
        v = 2 * width + dout;
        sample = blockIdx.z;
    }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/** c = a b^T over the head's width; both are whole tiles. */
template <typename T>
__device__ inline void multiply_tiles(float (&c)[8][4], shared_address a, shared_address b)
{
    const uint64_t a_rows = row_descriptor(a), b_rows = row_descriptor(b);
#pragma unroll
    for (int k = 0; k < HEAD / 16; k++)
        multiply_by_rows<T>(c, a_rows + k * 2, b_rows + k * 2, k > 0);
}

/** c += a b, with the rows of tile b as the inner dimension. */
template <typename T>
__device__ inline void multiply_kept(float (&c)[8][4], const unsigned (&a)[4][4], shared_address b)
{
    const uint64_t b_columns = operand_descriptor<128>(b, 16);
#pragma unroll
    for (int k = 0; k < TILE / 16; k++)
        multiply_registers<T>(c, a[k], b_columns + k * (16 * HEAD * 2 >> 4));
}

/** One warp: copies the own tiles, of columns `one` of one array and, unless that is NULL, `two` of
 *  another. */
__device__ inline void fill_own(const sm90_shared &s, const CUtensorMap *one_map, int one,
                                const CUtensorMap *two_map, int two, int first, int sample)
{
    if (threadIdx.x % 32 > 0)
        return;
    barrier_arrive_expecting(s.own_full, OWN_GROUPS * (two_map ? 2 : 1) * TILE_BYTES);
    for (int g = 0; g < OWN_GROUPS; g++) {
        const shared_address to = s.own + g * 2 * TILE_BYTES;
        copy_box(to, one_map, one, first + g * TILE, sample, s.own_full);
        if (two_map)
            copy_box(to + TILE_BYTES, two_map, two, first + g * TILE, sample, s.own_full);
    }
}

/** The keys of a stage: k and v. */
__device__ inline void fill_keys(const sm90_shared &s, const CUtensorMap *qkv,
                                 const head_place &place, int last)
{
    if (threadIdx.x % 32 > 0)
        return;
    ring_place at;
    for (int key = 0; key <= last; key += TILE, at.advance()) {
        const shared_address to = s.stages + at.stage * 2 * TILE_BYTES,
                             full = s.full + at.stage * 8;
        barrier_wait(s.empty + at.stage * 8, at.parity ^ 1);
        barrier_arrive_expecting(full, 2 * TILE_BYTES);
        copy_box(to, qkv, place.k, key, place.sample, full);
        copy_box(to + TILE_BYTES, qkv, place.v, key, place.sample, full);
    }
}

#endif

#endif
