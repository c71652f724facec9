/** @file attention_launch.cuh
 *  What the launchers of attention have in common: sizes of tiles, checks, the choice of head
 *  width. Host side. */
#ifndef REBATCH_KERNELS_ATTENTION_LAUNCH_CUH
#define REBATCH_KERNELS_ATTENTION_LAUNCH_CUH

#include <type_traits>

#include "common.cuh"

/** Of a warp's own rows, how many times 16: as many as the registers hold at this head width. */
template <int D> struct mma_shape {
    static constexpr int BLOCKS = D == 128 ? 1 : 2;
    static constexpr int OWN = 4 * 16 * BLOCKS; /**< own rows of a block of 4 warps */
};

/** Positions and what tiles add to them are ints. */
constexpr size_t ATTENTION_LENGTH_LIMIT = (size_t)1 << 24;

static inline bool is_attention(size_t batch, size_t length, size_t heads, float scale)
{
    return are_sizes(GRID_YZ_LIMIT + 1, batch, heads) &&
           are_sizes(ATTENTION_LENGTH_LIMIT, length) && scale > 0.0f && isfinite(scale);
}

/** Call `launch` with the head width as a compile-time number. */
template <typename Launch>
static inline cudaError_t with_head_width(size_t head_width, Launch launch)
{
    switch (head_width) {
    case 32:
        return launch(std::integral_constant<int, 32>{});
    case 64:
        return launch(std::integral_constant<int, 64>{});
    case 128:
        return launch(std::integral_constant<int, 128>{});
    default:
        return cudaErrorInvalidValue;
    }
}

#endif
