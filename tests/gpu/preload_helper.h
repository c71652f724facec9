/* Code of an earlier header: compiled without rebatch/wrap.h, it calls CUDA's own functions.
 * Must not know who includes it. */
#include <cuda_runtime.h>

static inline cudaError_t helper_alloc(void **out, size_t bytes)
{
    return cudaMalloc(out, bytes);
}

static inline cudaError_t helper_free(void *memory)
{
    return cudaFree(memory);
}

static inline cudaError_t helper_free_async(void *memory, cudaStream_t stream)
{
    return cudaFreeAsync(memory, stream);
}
