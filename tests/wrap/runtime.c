/* A stand-in for CUDA's runtime, over the stand-in for its driver with memory (tests/drivers/gpu.c,
 * DRIVER_MEMORY): for trainers that are built and run without CUDA. Must not know them. */
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void function(void);

static function *driver(const char *symbol)
{
    static void *library;
    function *found = NULL;
    if (!library)
        library = dlopen("libcuda.so.1", RTLD_NOW);
    void *const address = library ? dlsym(library, symbol) : NULL;
    if (!address) {
        fprintf(stderr, "no %s in the driver: %s\n", symbol, dlerror());
        exit(2);
    }
    memcpy(&found, &address, sizeof found);
    return found;
}

static cudaError_t last_error;

static cudaError_t ended(int code)
{
    last_error = code ? (cudaError_t)code : last_error;
    return (cudaError_t)code;
}

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    unsigned long long address = 0;
    int (*const alloc)(unsigned long long *, size_t) =
        (int (*)(unsigned long long *, size_t))driver("cuMemAlloc_v2");
    const int code = alloc(&address, bytes);
    *out = (void *)(uintptr_t)address;
    return ended(code);
}

cudaError_t cudaFree(void *pointer)
{
    int (*const give)(unsigned long long) = (int (*)(unsigned long long))driver("cuMemFree_v2");
    return ended(give((uintptr_t)pointer));
}

cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream)
{
    (void)stream;
    return cudaMalloc(out, bytes);
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream)
{
    (void)stream;
    return cudaFree(pointer);
}

cudaError_t cudaMallocFromPoolAsync(void **out, size_t bytes, cudaMemPool_t pool,
                                    cudaStream_t stream)
{
    (void)pool;
    return cudaMallocAsync(out, bytes, stream);
}

cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    const cudaError_t code = last_error;
    last_error = cudaSuccess;
    return code;
}

const char *cudaGetErrorString(cudaError_t code)
{
    return code == cudaErrorMemoryAllocation ? "out of memory" : "an error";
}

/* Device memory is in the lower 4 GiB, where no position-independent program has any. */
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *pointer)
{
    memset(out, 0, sizeof *out);
    out->type = (uintptr_t)pointer >> 32 ? cudaMemoryTypeUnregistered : cudaMemoryTypeDevice;
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **out, size_t bytes)
{
    *out = malloc(bytes);
    return *out ? cudaSuccess : cudaErrorUnknown;
}

cudaError_t cudaMemset(void *to, int value, size_t bytes)
{
    memset(to, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    (void)kind;
    memcpy(to, from, bytes);
    return cudaSuccess;
}
