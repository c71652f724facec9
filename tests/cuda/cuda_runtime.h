/* What rebatch/wrap.h needs of CUDA's runtime, under its name, so that the header can be compiled
 * and tested without CUDA. Who is linked with it defines the functions. Values are CUDA's. */
#ifndef CUDA_RUNTIME_STANDIN_H
#define CUDA_RUNTIME_STANDIN_H

#include <stddef.h>

typedef enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorNoDevice = 100,
    cudaErrorNotReady = 600,
    cudaErrorLaunchFailure = 719,
    cudaErrorNotSupported = 801,
    cudaErrorUnknown = 999
} cudaError_t;

typedef struct CUstream_st *cudaStream_t;
#define cudaStreamNonBlocking 0x01
typedef struct CUmemPoolHandle_st *cudaMemPool_t;
#define cudaStreamPerThread ((cudaStream_t)0x2)

enum cudaMemoryType {
    cudaMemoryTypeUnregistered = 0,
    cudaMemoryTypeHost = 1,
    cudaMemoryTypeDevice = 2,
    cudaMemoryTypeManaged = 3
};

struct cudaPointerAttributes {
    enum cudaMemoryType type;
    int device;
    void *devicePointer;
    void *hostPointer;
};

enum cudaMemcpyKind {
    cudaMemcpyHostToHost = 0,
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3
};

#ifdef __cplusplus
extern "C" {
#endif

cudaError_t cudaGetDevice(int *device);
cudaError_t cudaGetLastError(void);
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *pointer);
cudaError_t cudaMalloc(void **out, size_t bytes);
cudaError_t cudaFree(void *pointer);
cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream);
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream);
cudaError_t cudaMallocFromPoolAsync(void **out, size_t bytes, cudaMemPool_t pool,
                                    cudaStream_t stream);

/* What rebatch/nccl.h calls besides. */
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaFreeHost(void *pointer);
cudaError_t cudaGetDeviceCount(int *out);
cudaError_t cudaSetDevice(int device);

/* What trainers call besides. */
const char *cudaGetErrorString(cudaError_t code);
cudaError_t cudaMallocHost(void **out, size_t bytes);
cudaError_t cudaMemset(void *to, int value, size_t bytes);
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind);

#ifdef __cplusplus
}
template <class T> static inline cudaError_t cudaMalloc(T **out, size_t bytes)
{
    return cudaMalloc((void **)(void *)out, bytes);
}
template <class T> static inline cudaError_t cudaMallocHost(T **out, size_t bytes)
{
    return cudaMallocHost((void **)(void *)out, bytes);
}
#endif
#endif
