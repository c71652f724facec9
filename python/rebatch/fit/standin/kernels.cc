/* Owns kernels: they are launched without effect, and counted, because a driver loads each into the
 * GPU's memory at its first launch. Must not know memory. */
#include <string.h>

#include <mutex>
#include <unordered_set>

#include "standin.h"

namespace
{

struct state {
    std::mutex lock;
    std::unordered_set<const void *> launched;
};

state &the_state(void)
{
    static state &s = *new state;
    return s;
}

void note(const void *function)
{
    auto &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    s.launched.insert(function);
}

} // namespace

/* How many different kernels were launched. */
STANDIN_API size_t standin_kernels(void)
{
    auto &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    return s.launched.size();
}

STANDIN_API cudaError_t cudaLaunchKernel(const void *function, dim3, dim3, void **, size_t,
                                         cudaStream_t)
{
    note(function);
    return cudaSuccess;
}

STANDIN_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *function,
                                            void **)
{
    note(function);
    return cudaSuccess;
}

/* What CUDA 13's compiler calls in their place: a kernel is known by its function. */
STANDIN_API cudaError_t __cudaGetKernel(void **out, const void *function)
{
    *out = (void *)function;
    return cudaSuccess;
}

STANDIN_API cudaError_t __cudaLaunchKernel(void *kernel, dim3, dim3, void **, size_t, cudaStream_t)
{
    note(kernel);
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
