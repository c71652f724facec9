/** @file common.cuh
 *  What every launcher does before it launches: check pointers and sizes, turn the run-time dtype
 *  into a type. Host side only. */
#ifndef REBATCH_KERNELS_COMMON_CUH
#define REBATCH_KERNELS_COMMON_CUH

#include <math.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels.h"

/** Rows and positions are indexed with int in the kernels. */
constexpr size_t INDEX_LIMIT = (size_t)1 << 31;

/** gridDim.y and gridDim.z go no further. */
constexpr size_t GRID_YZ_LIMIT = 65535;

/** Elements that one thread of a one-dimensional kernel handles, and its threads a block. */
constexpr int CHUNK = 8;
constexpr int CHUNK_THREADS = 256;

/** A multiple of 16 bytes and not NULL, each of them. */
template <typename... Pointers> static inline bool are_arrays(Pointers... pointers)
{
    return (... && (pointers != nullptr && ((uintptr_t)pointers & 15) == 0));
}

/** The same, but NULL is allowed. */
template <typename... Pointers> static inline bool are_optional_arrays(Pointers... pointers)
{
    return (... && (((uintptr_t)pointers & 15) == 0));
}

/** Aligned for their type; NULL is allowed. */
template <typename... Types> static inline bool are_optional_values(const Types *...pointers)
{
    return (... && (((uintptr_t)pointers & (sizeof(Types) - 1)) == 0));
}

/** The same and not NULL. */
template <typename... Types> static inline bool are_values(const Types *...pointers)
{
    return (... && (pointers != nullptr)) && are_optional_values(pointers...);
}

/** 1 <= size < limit, each of them. */
template <typename... Sizes> static inline bool are_sizes(size_t limit, Sizes... sizes)
{
    return (... && (sizes >= 1 && sizes < limit));
}

static inline bool is_width(size_t width)
{
    return width >= 1 && width <= RBK_WIDTH_LIMIT && width % RBK_WIDTH_MULTIPLE == 0;
}

static inline size_t ceil_div(size_t a, size_t b)
{
    return (a + b - 1) / b;
}

/** Chunks of a one-dimensional grid are counted in 32 bits. */
static inline bool is_count(size_t count)
{
    return count >= 1 && count / CHUNK < (size_t)UINT32_MAX - CHUNK_THREADS;
}

/** [rows, width], dense, by chunks that do not cross a row. */
static inline bool is_matrix(size_t rows, size_t width)
{
    return are_sizes(INDEX_LIMIT, rows) && is_width(width) && is_count(rows * width);
}

/** [batch, length, width] with one layer of the grid a sample. */
static inline bool is_batch(size_t batch, size_t length, size_t width)
{
    return are_sizes(GRID_YZ_LIMIT + 1, batch) && are_sizes(INDEX_LIMIT, length) &&
           is_matrix(batch * length, width);
}

static inline unsigned chunk_blocks(size_t count)
{
    return (unsigned)ceil_div(count, (size_t)CHUNK * CHUNK_THREADS);
}

template <typename T> struct type_tag {
    using type = T;
};

/** Call `launch` with the type that `dtype` stands for. */
template <typename Launch> static inline cudaError_t with_dtype(rbk_dtype dtype, Launch launch)
{
    switch (dtype) {
    case RBK_F32:
        return launch(type_tag<float>{});
    case RBK_BF16:
        return launch(type_tag<__nv_bfloat16>{});
    case RBK_F16:
        return launch(type_tag<__half>{});
    }
    return cudaErrorInvalidValue;
}

/** More than 48 KiB of shared memory must be asked for. */
template <typename Kernel> static inline cudaError_t allow_shared(Kernel *kernel, size_t bytes)
{
    if (cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             (int)bytes) == cudaSuccess)
        return cudaSuccess;
    return cudaGetLastError();
}

#endif
