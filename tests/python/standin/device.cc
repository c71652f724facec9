/* Owns the GPUs: how many there are, which one a thread uses, what they say of themselves.
 * Must not know memory beyond its size. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "standin.h"

namespace standin
{
namespace
{

/* The numbers of an A100, as far as PyTorch and rebatch ask. On later GPUs PyTorch computes
 * attention by graphs of cuDNN, which need cuDNN itself. */
constexpr int MAJOR = 8, MINOR = 0, PROCESSORS = 108, WARP = 32;
constexpr int BLOCK_THREADS = 1024, PROCESSOR_THREADS = 2048, REGISTERS = 65536;
constexpr int SHARED = 49152, SHARED_MOST = 166912, SHARED_PROCESSOR = 167936;
constexpr int L2_BYTES = 40 << 20, GRID_X = 0x7fffffff, GRID_YZ = 65535;

const struct {
    int attribute, value;
} attributes[] = {
    {cudaDevAttrMaxThreadsPerBlock, BLOCK_THREADS},
    {cudaDevAttrMaxBlockDimX, BLOCK_THREADS},
    {cudaDevAttrMaxBlockDimY, BLOCK_THREADS},
    {cudaDevAttrMaxBlockDimZ, 64},
    {cudaDevAttrMaxGridDimX, GRID_X},
    {cudaDevAttrMaxGridDimY, GRID_YZ},
    {cudaDevAttrMaxGridDimZ, GRID_YZ},
    {cudaDevAttrMaxSharedMemoryPerBlock, SHARED},
    {cudaDevAttrMaxSharedMemoryPerBlockOptin, SHARED_MOST},
    {cudaDevAttrMaxSharedMemoryPerMultiprocessor, SHARED_PROCESSOR},
    {cudaDevAttrWarpSize, WARP},
    {cudaDevAttrMaxRegistersPerBlock, REGISTERS},
    {cudaDevAttrMaxRegistersPerMultiprocessor, REGISTERS},
    {cudaDevAttrMultiProcessorCount, PROCESSORS},
    {cudaDevAttrMaxThreadsPerMultiProcessor, PROCESSOR_THREADS},
    {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
    {cudaDevAttrComputeCapabilityMajor, MAJOR},
    {cudaDevAttrComputeCapabilityMinor, MINOR},
    {cudaDevAttrL2CacheSize, L2_BYTES},
    {cudaDevAttrTextureAlignment, 512},
    {cudaDevAttrClockRate, 1410000},
    {cudaDevAttrCanMapHostMemory, 1},
    {cudaDevAttrConcurrentKernels, 1},
    {cudaDevAttrUnifiedAddressing, 1},
    {cudaDevAttrCanUseHostPointerForRegisteredMem, 1},
    {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
};

/* One for each GPU; their addresses are the contexts of the driver. */
struct context {
    std::atomic<bool> is_used;
} contexts[GPUS_MOST];

/* The contexts of a thread, the current one last; -1: none. */
constexpr int STACK_MOST = 64;
thread_local int stack[STACK_MOST] = {-1};
thread_local int stack_top;

CUcontext context_of(int gpu)
{
    return gpu < 0 ? nullptr : (CUcontext)&contexts[gpu];
}

/* -1 for NULL. */
code gpu_of(int *gpu, CUcontext c)
{
    *gpu = c ? (int)((context *)c - contexts) : -1;
    return !c || is_gpu(*gpu) ? OK : INVALID;
}

} // namespace

int gpu_count(void)
{
    static const int count = [] {
        const char *text = getenv("STANDIN_GPUS");
        const int asked = text ? atoi(text) : 1;
        return asked < 0 ? 0 : asked > GPUS_MOST ? GPUS_MOST : asked;
    }();
    return count;
}

bool is_gpu(int gpu)
{
    return gpu >= 0 && gpu < gpu_count();
}

/* As the runtime does it: a thread that has none gets the first. */
int current_gpu(void)
{
    if (stack[stack_top] < 0)
        stack[stack_top] = 0;
    return stack[stack_top];
}

code context_gpu(int *gpu)
{
    *gpu = stack[stack_top];
    return *gpu < 0 ? NO_CONTEXT : OK;
}

code use_gpu(int gpu)
{
    if (!is_gpu(gpu))
        return INVALID;
    stack[stack_top] = gpu;
    contexts[gpu].is_used = true;
    return OK;
}

bool is_gpu_used(int gpu)
{
    return contexts[gpu].is_used;
}

// CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, which CUDA 12 does not name.
constexpr int MAPS_HOST_MEMORY = 141;

code attribute(int *value, int asked, int gpu)
{
    if (!is_gpu(gpu))
        return INVALID;
    *value = 0;
    for (const auto &a : attributes)
        if (a.attribute == asked)
            *value = a.value;
    if (asked == MAPS_HOST_MEMORY)
        *value = has_host_memory();
    return OK;
}

} // namespace standin

using namespace standin;

/* ---- the runtime's functions ---- */

STANDIN_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int gpu)
{
    if (!is_gpu(gpu))
        return cudaErrorInvalidDevice;
    size_t free_bytes;
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "stand-in for a GPU");
    memory_info(&free_bytes, &p->totalGlobalMem, gpu);
    p->major = MAJOR;
    p->minor = MINOR;
    p->multiProcessorCount = PROCESSORS;
    p->warpSize = WARP;
    p->maxThreadsPerBlock = BLOCK_THREADS;
    p->maxThreadsPerMultiProcessor = PROCESSOR_THREADS;
    p->maxBlocksPerMultiProcessor = 32;
    p->regsPerBlock = p->regsPerMultiprocessor = REGISTERS;
    p->sharedMemPerBlock = SHARED;
    p->sharedMemPerBlockOptin = SHARED_MOST;
    p->sharedMemPerMultiprocessor = SHARED_PROCESSOR;
    p->l2CacheSize = L2_BYTES;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = BLOCK_THREADS;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = GRID_X;
    p->maxGridSize[1] = p->maxGridSize[2] = GRID_YZ;
    p->textureAlignment = 512;
    p->memoryBusWidth = 5120;
    p->unifiedAddressing = p->canMapHostMemory = p->concurrentKernels = 1;
    p->pciBusID = gpu;
    p->uuid.bytes[0] = (char)(gpu + 1);
    return cudaSuccess;
}

STANDIN_API cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int gpu)
{
    if (!is_gpu(gpu))
        return cudaErrorInvalidDevice;
    snprintf(text, (size_t)size, "0000:%02x:00.0", (unsigned)gpu);
    return cudaSuccess;
}

/* ---- the driver's functions ---- */

STANDIN_API CUresult cuDeviceGetName(char *text, int size, CUdevice gpu)
{
    if (!is_gpu(gpu))
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(text, (size_t)size, "stand-in for a GPU");
    return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice gpu)
{
    if (!is_gpu(gpu))
        return CUDA_ERROR_INVALID_DEVICE;
    contexts[gpu].is_used = true;
    *out = context_of(gpu);
    return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice gpu)
{
    return is_gpu(gpu) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

STANDIN_API CUresult cuDevicePrimaryCtxGetState(CUdevice gpu, unsigned *flags, int *is_active)
{
    if (!is_gpu(gpu))
        return CUDA_ERROR_INVALID_DEVICE;
    *flags = 0;
    *is_active = is_gpu_used(gpu);
    return CUDA_SUCCESS;
}

STANDIN_API CUresult cuCtxGetCurrent(CUcontext *out)
{
    *out = context_of(stack[stack_top]);
    return CUDA_SUCCESS;
}

STANDIN_API CUresult cuCtxGetDevice(CUdevice *out)
{
    return (CUresult)context_gpu(out);
}

STANDIN_API CUresult cuCtxSetCurrent(CUcontext c)
{
    return (CUresult)gpu_of(&stack[stack_top], c);
}

STANDIN_API CUresult cuCtxPushCurrent_v2(CUcontext c)
{
    int gpu;
    if (gpu_of(&gpu, c) || stack_top + 1 == STACK_MOST)
        return CUDA_ERROR_INVALID_VALUE;
    stack[++stack_top] = gpu;
    return CUDA_SUCCESS;
}

STANDIN_API CUresult cuCtxPopCurrent_v2(CUcontext *out)
{
    if (out)
        *out = context_of(stack[stack_top]);
    if (stack_top > 0)
        stack_top--;
    else if (stack[0] < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    else
        stack[0] = -1;
    return CUDA_SUCCESS;
}
