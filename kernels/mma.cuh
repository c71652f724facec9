/** @file mma.cuh
 *  The PTX instructions that the attention kernels use, one function each: asynchronous copies into
 *  shared memory, matrix loads from it, the tensor cores' product. Device side, sm_80 and later.
 *  Fragment layouts: PTX ISA, "Matrix fragments for mma.m16n8k16". */
#ifndef REBATCH_KERNELS_MMA_CUH
#define REBATCH_KERNELS_MMA_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

/** An address inside the block's shared memory. */
typedef unsigned shared_address;

__device__ inline shared_address shared_address_of(const void *pointer)
{
    return (shared_address)__cvta_generic_to_shared(pointer);
}

/** Start copying 16 bytes; zeros when `inside` is false (`from` is then not read). */
__device__ inline void copy_async_16(shared_address to, const void *from, bool inside)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from),
                 "r"(inside ? 16 : 0)
                 : "memory");
}

/** The same for 4 bytes. */
__device__ inline void copy_async_4(shared_address to, const void *from, bool inside)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(to), "l"(from),
                 "r"(inside ? 4 : 0)
                 : "memory");
}

/** What this thread started since the last call becomes a group. */
__device__ inline void copy_async_commit()
{
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}

/** Wait until at most `PENDING` of this thread's groups are unfinished. Other threads' copies:
 *  their own wait, then a barrier. */
template <int PENDING> __device__ inline void copy_async_wait()
{
    asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING) : "memory");
}

/** Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8, and
 *  gets of each matrix the elements (l / 4, 2 (l % 4)) and the one after it. */
__device__ inline void load_matrix_x4(unsigned (&r)[4], shared_address row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

/** The same, each matrix transposed. */
__device__ inline void load_matrix_x4_transposed(unsigned (&r)[4], shared_address row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

/** c (16x8, fp32) += a (16x16) * b (16x8). */
template <typename T>
__device__ inline void multiply_16816(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                      unsigned b1);

template <>
__device__ inline void multiply_16816<__nv_bfloat16>(float (&c)[4], const unsigned (&a)[4],
                                                     unsigned b0, unsigned b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void multiply_16816<__half>(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                              unsigned b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
