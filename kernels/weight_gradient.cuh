/** @file weight_gradient.cuh
 *  What the files of the weight gradient have in common. Host side. */
#ifndef REBATCH_KERNELS_WEIGHT_GRADIENT_CUH
#define REBATCH_KERNELS_WEIGHT_GRADIENT_CUH

#include "common.cuh"

/** grad [rows, columns] += sum over b,t of a[b,t,rows] * b[b,t,columns]. */
struct weight_gradient_call {
    float *grad;
    const void *a, *b;
    size_t batch, length, rows, columns;
    cudaStream_t stream;
};

/** Multiprocessors of the current device. */
static inline cudaError_t find_multiprocessors(int *out)
{
    int device;
    const cudaError_t status = cudaGetDevice(&device);
    return status != cudaSuccess
               ? status
               : cudaDeviceGetAttribute(out, cudaDevAttrMultiProcessorCount, device);
}

/** For bf16 and fp16, where has_sm90(). Arguments were checked. */
cudaError_t weight_gradient_sm90(const weight_gradient_call &call, rbk_dtype dtype);

#endif
