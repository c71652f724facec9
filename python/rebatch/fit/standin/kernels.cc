/* Owns kernels: what is asked of one before it is launched. A launch does nothing (build), as the
 * functions of which nothing is said. Must not know memory. */
#include <string.h>

#include "standin.h"

/* What CUDA 13's compiler asks for before a launch: a kernel is known by its function. */
STANDIN_API cudaError_t __cudaGetKernel(void **out, const void *function)
{
    *out = (void *)function;
    return cudaSuccess;
}

STANDIN_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *out, const void *)
{
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024;
    out->numRegs = 32;
    out->ptxVersion = out->binaryVersion = 80;
    return cudaSuccess;
}

STANDIN_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *, int,
                                                                      size_t)
{
    *count = 2;
    return cudaSuccess;
}

STANDIN_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count,
                                                                               const void *, int,
                                                                               size_t, unsigned)
{
    *count = 2;
    return cudaSuccess;
}
