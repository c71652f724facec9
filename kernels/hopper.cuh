/** @file hopper.cuh
 *  The PTX instructions of sm_90a that the weight gradient uses, one function each: barriers in
 *  shared memory, copies of boxes into it (TMA), the asynchronous product of a warpgroup (wgmma).
 *  Device side. In code for other architectures nothing of this may be called. */
#ifndef REBATCH_KERNELS_HOPPER_CUH
#define REBATCH_KERNELS_HOPPER_CUH

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "mma.cuh"

/* ---- barriers ---- */

/** Complete whenever `count` arrivals, and the bytes that they announced, are there. */
__device__ inline void barrier_init(shared_address barrier, unsigned count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(count) : "memory");
}

/** The barriers that this thread made are there for copies too; a __syncthreads() has to follow. */
__device__ inline void barrier_init_done()
{
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

__device__ inline void barrier_arrive(shared_address barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

/** Arrive, and announce `bytes` that copies will bring. */
__device__ inline void barrier_arrive_expecting(shared_address barrier, unsigned bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}

/** Wait until the phase of this parity is complete: 0 for the first, then in turn. The phase before
 *  the first counts as complete. */
__device__ inline void barrier_wait(shared_address barrier, unsigned parity)
{
    unsigned done = 0;
    while (!done)
        asm volatile("{\n"
                     ".reg .pred complete;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, complete;\n"
                     "}\n"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
}

/* ---- copies of boxes ---- */

/** Start copying the box at (x, y, z) of the array that `map` describes; its bytes count for
 *  `barrier`. What lies outside the array is zeros. */
__device__ inline void copy_box(shared_address to, const CUtensorMap *map, int x, int y, int z,
                                shared_address barrier)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile"
                 ".mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];\n" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

/* ---- products of a warpgroup ---- */

/** Wait for the other warps of this warpgroup: barrier `id`, from 1. */
__device__ inline void warpgroup_wait(int id)
{
    asm volatile("bar.sync %0, 128;\n" ::"r"(id) : "memory");
}

/** Operand of which `SWIZZLE` bytes of neighbouring columns stand together: 128 or 64. Boxes of
 *  that width, [rows][SWIZZLE bytes], swizzled by the copy, lie `box_bytes` apart; the rows are the
 *  inner dimension of the product. PTX ISA, "Matrix descriptor"; the leading offset goes from box
 *  to box, the stride offset from 8 rows to the next 8. */
template <int SWIZZLE>
__device__ inline uint64_t operand_descriptor(shared_address start, unsigned box_bytes)
{
    static_assert(SWIZZLE == 128 || SWIZZLE == 64, "the swizzles that are in use");
    constexpr uint64_t layout = SWIZZLE == 128 ? 1 : 2;
    constexpr uint64_t stride_bytes = 8 * SWIZZLE;
    return (uint64_t)((start & 0x3FFFF) >> 4) | (uint64_t)(box_bytes >> 4) << 16 |
           stride_bytes >> 4 << 32 | layout << 62;
}

/** Registers that ordinary code wrote may be read by the products that follow. */
__device__ inline void products_begin()
{
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

/** The products started since the last call become a group. */
__device__ inline void products_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

/** Wait until at most PENDING groups are unfinished. */
template <int PENDING> __device__ inline void products_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(PENDING) : "memory");
}

/* Eight registers of an accumulator, as operands. */
#define EIGHT_(c, i)                                                                               \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]),    \
        "+f"(c[i + 6]), "+f"(c[i + 7])

#define REGISTERS_64_                                                                              \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "                 \
    "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define OPERANDS_64_(c) EIGHT_(c, 0), EIGHT_(c, 8), EIGHT_(c, 16), EIGHT_(c, 24)

#define REGISTERS_96_                                                                              \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "                 \
    "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                  \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "                  \
    "%47}, "
#define OPERANDS_96_(c)                                                                            \
    EIGHT_(c, 0), EIGHT_(c, 8), EIGHT_(c, 16), EIGHT_(c, 24), EIGHT_(c, 32), EIGHT_(c, 40)

#define REGISTERS_128_                                                                             \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "                 \
    "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                  \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "                  \
    "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "                  \
    "%62, %63}, "
#define OPERANDS_128_(c)                                                                           \
    EIGHT_(c, 0), EIGHT_(c, 8), EIGHT_(c, 16), EIGHT_(c, 24), EIGHT_(c, 32), EIGHT_(c, 40),        \
        EIGHT_(c, 48), EIGHT_(c, 56)

#define REGISTERS_256_                                                                             \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "                 \
    "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                  \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "                  \
    "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "                  \
    "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, "                  \
    "%77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, "                  \
    "%92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, "                 \
    "%106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, "                     \
    "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
#define OPERANDS_256_(c)                                                                           \
    EIGHT_(c, 0), EIGHT_(c, 8), EIGHT_(c, 16), EIGHT_(c, 24), EIGHT_(c, 32), EIGHT_(c, 40),        \
        EIGHT_(c, 48), EIGHT_(c, 56), EIGHT_(c, 64), EIGHT_(c, 72), EIGHT_(c, 80), EIGHT_(c, 88),  \
        EIGHT_(c, 96), EIGHT_(c, 104), EIGHT_(c, 112), EIGHT_(c, 120)

/* `a` and `b` are transposed: their rows are the inner dimension. The first operand behind the
 * accumulator has the number `at`. */
#define PRODUCT_(columns, type, a_at, b_at)                                                        \
    asm volatile("{\n"                                                                             \
                 ".reg .pred add;\n"                                                               \
                 "setp.eq.u32 add, 0, 0;\n"                                                        \
                 "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type             \
                 " " REGISTERS_##columns##_ "%" #a_at ", %" #b_at ", add, 1, 1, 1, 1;\n"           \
                                            "}\n"                                                  \
                 : OPERANDS_##columns##_(c)                                                        \
                 : "l"(a), "l"(b))

/** Start c (64 x COLUMNS, fp32) += a^T b, with a [16][64] and b [16][COLUMNS] in shared memory.
 *  Of c, thread i of the warpgroup has row i / 32 * 16 + i % 32 / 4 + 8 (r / 2 % 2), column
 *  r / 4 * 8 + i % 4 * 2 + r % 2 in register r. */
template <typename T, int COLUMNS>
__device__ inline void multiply_group(float (&c)[COLUMNS / 2], uint64_t a, uint64_t b);

template <>
__device__ inline void multiply_group<__nv_bfloat16, 64>(float (&c)[32], uint64_t a, uint64_t b)
{
    PRODUCT_(64, "bf16", 32, 33);
}

template <>
__device__ inline void multiply_group<__half, 64>(float (&c)[32], uint64_t a, uint64_t b)
{
    PRODUCT_(64, "f16", 32, 33);
}

template <>
__device__ inline void multiply_group<__nv_bfloat16, 96>(float (&c)[48], uint64_t a, uint64_t b)
{
    PRODUCT_(96, "bf16", 48, 49);
}

template <>
__device__ inline void multiply_group<__half, 96>(float (&c)[48], uint64_t a, uint64_t b)
{
    PRODUCT_(96, "f16", 48, 49);
}

template <>
__device__ inline void multiply_group<__nv_bfloat16, 128>(float (&c)[64], uint64_t a, uint64_t b)
{
    PRODUCT_(128, "bf16", 64, 65);
}

template <>
__device__ inline void multiply_group<__half, 128>(float (&c)[64], uint64_t a, uint64_t b)
{
    PRODUCT_(128, "f16", 64, 65);
}

template <>
__device__ inline void multiply_group<__nv_bfloat16, 256>(float (&c)[128], uint64_t a, uint64_t b)
{
    PRODUCT_(256, "bf16", 128, 129);
}

template <>
__device__ inline void multiply_group<__half, 256>(float (&c)[128], uint64_t a, uint64_t b)
{
    PRODUCT_(256, "f16", 128, 129);
}

/* ---- the same for attention: 64 x 64, with the accumulator as rows of eight columns ---- */

/** Operand [rows][64 elements of 16 bits] in one swizzled box, of which the columns are the inner
 *  dimension; its next 16 columns are 2 further. */
__device__ inline uint64_t row_descriptor(shared_address start)
{
    return operand_descriptor<128>(start, 16);
}

#define FOUR_(c, i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define SQUARE_(c)                                                                                 \
    FOUR_(c, 0), FOUR_(c, 1), FOUR_(c, 2), FOUR_(c, 3), FOUR_(c, 4), FOUR_(c, 5), FOUR_(c, 6),     \
        FOUR_(c, 7)

#define ROWS_PRODUCT_(type)                                                                        \
    asm volatile("{\n"                                                                             \
                 ".reg .pred add;\n"                                                               \
                 "setp.ne.b32 add, %34, 0;\n"                                                      \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " REGISTERS_64_     \
                 "%32, %33, add, 1, 1, 0, 0;\n"                                                    \
                 "}\n"                                                                             \
                 : SQUARE_(c)                                                                      \
                 : "l"(a), "l"(b), "r"((int)adds))

/** Start c = a b^T, or c += it, with a and b [64][16] in shared memory: row_descriptor(). For
 *  thread i of the warpgroup, c[j][r] is column 8 j + i % 4 * 2 + r % 2 and, of the warp's 16 rows,
 *  row i % 32 / 4 + 8 (r / 2). */
template <typename T>
__device__ inline void multiply_by_rows(float (&c)[8][4], uint64_t a, uint64_t b, bool adds);

template <>
__device__ inline void multiply_by_rows<__nv_bfloat16>(float (&c)[8][4], uint64_t a, uint64_t b,
                                                       bool adds)
{
    ROWS_PRODUCT_("bf16");
}

template <>
__device__ inline void multiply_by_rows<__half>(float (&c)[8][4], uint64_t a, uint64_t b, bool adds)
{
    ROWS_PRODUCT_("f16");
}

#define REGISTERS_PRODUCT_(type)                                                                   \
    asm volatile("{\n"                                                                             \
                 ".reg .pred add;\n"                                                               \
                 "setp.eq.u32 add, 0, 0;\n"                                                        \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " REGISTERS_64_     \
                 "{%32, %33, %34, %35}, %36, add, 1, 1, 1;\n"                                      \
                 "}\n"                                                                             \
                 : SQUARE_(c)                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

/** Start c += a b, with a [64][16] in registers, a warp's 16 rows as mma.sync has them, and b
 *  [16][64] in shared memory: operand_descriptor<128>(). */
template <typename T>
__device__ inline void multiply_registers(float (&c)[8][4], const unsigned (&a)[4], uint64_t b);

template <>
__device__ inline void multiply_registers<__nv_bfloat16>(float (&c)[8][4], const unsigned (&a)[4],
                                                         uint64_t b)
{
    REGISTERS_PRODUCT_("bf16");
}

template <>
__device__ inline void multiply_registers<__half>(float (&c)[8][4], const unsigned (&a)[4],
                                                  uint64_t b)
{
    REGISTERS_PRODUCT_("f16");
}

#endif
