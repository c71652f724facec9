/* Owns the GPUs: how many there are, which one a thread uses, what they say of themselves.
 * Must not know memory beyond its size. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <string>

#include "standin.h"

namespace standin
{
namespace
{

/* What differs between cards, as far as PyTorch and rebatch ask. STANDIN_CARD has it as
 * "name=NVIDIA L4,major=8,minor=9,…", by the names here; what it leaves out is an A100's. */
struct card {
    char name[128] = "stand-in for a GPU";
    int major = 8, minor = 0, processors = 108;
    int processor_threads = 2048, processor_blocks = 32;
    int shared_most = 166912, shared_processor = 167936;
    int l2_bytes = 40 << 20, bus_bits = 5120, clock_khz = 1410000;
    int virtual_memory = 1, integrated = 0, file_descriptors = 1;
};

void set(card &c, const char *name, const char *value)
{
    const struct {
        const char *name;
        int *number;
    } numbers[] = {
        {"major", &c.major},
        {"minor", &c.minor},
        {"processors", &c.processors},
        {"processor_threads", &c.processor_threads},
        {"processor_blocks", &c.processor_blocks},
        {"shared_most", &c.shared_most},
        {"shared_processor", &c.shared_processor},
        {"l2_bytes", &c.l2_bytes},
        {"bus_bits", &c.bus_bits},
        {"clock_khz", &c.clock_khz},
        {"virtual_memory", &c.virtual_memory},
        {"file_descriptors", &c.file_descriptors},
        {"integrated", &c.integrated},
    };
    if (strcmp(name, "name") == 0)
        snprintf(c.name, sizeof c.name, "%s", value);
    for (const auto &n : numbers)
        if (strcmp(name, n.name) == 0)
            *n.number = atoi(value);
}

const card &the_card(void)
{
    static const card &found = *[] {
        card *c = new card;
        const char *text = getenv("STANDIN_CARD");
        std::string left = text ? text : "";
        while (!left.empty()) {
            const size_t end = left.find(',');
            const std::string pair = left.substr(0, end);
            const size_t equals = pair.find('=');
            if (equals != std::string::npos)
                set(*c, pair.substr(0, equals).c_str(), pair.substr(equals + 1).c_str());
            left = end == std::string::npos ? "" : left.substr(end + 1);
        }
        return c;
    }();
    return found;
}

constexpr int WARP = 32, BLOCK_THREADS = 1024, REGISTERS = 65536, SHARED = 49152;
constexpr int GRID_X = 0x7fffffff, GRID_YZ = 65535;

/* Those of all cards. */
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
    {cudaDevAttrWarpSize, WARP},
    {cudaDevAttrMaxRegistersPerBlock, REGISTERS},
    {cudaDevAttrMaxRegistersPerMultiprocessor, REGISTERS},
    {cudaDevAttrTextureAlignment, 512},
    {cudaDevAttrCanMapHostMemory, 1},
    {cudaDevAttrConcurrentKernels, 1},
    {cudaDevAttrUnifiedAddressing, 1},
    {cudaDevAttrCanUseHostPointerForRegisteredMem, 1},
};

/* Those of this one. */
int attribute_of(const card &c, int asked)
{
    switch (asked) {
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        return c.shared_most;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        return c.shared_processor;
    case cudaDevAttrMultiProcessorCount:
        return c.processors;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        return c.processor_threads;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
        return c.processor_blocks;
    case cudaDevAttrComputeCapabilityMajor:
        return c.major;
    case cudaDevAttrComputeCapabilityMinor:
        return c.minor;
    case cudaDevAttrL2CacheSize:
        return c.l2_bytes;
    case cudaDevAttrClockRate:
        return c.clock_khz;
    case cudaDevAttrIntegrated:
        return c.integrated;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
        return c.virtual_memory;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
        return c.file_descriptors;
    default:
        return 0;
    }
}

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
    *value = attribute_of(the_card(), asked);
    for (const auto &a : attributes)
        if (a.attribute == asked)
            *value = a.value;
    if (asked == MAPS_HOST_MEMORY)
        *value = has_host_memory();
    return OK;
}

} // namespace standin

using namespace standin;

/* For NVML, a library of its own. */
STANDIN_API const char *standin_card(void)
{
    return the_card().name;
}

/* ---- the runtime's functions ---- */

STANDIN_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int gpu)
{
    if (!is_gpu(gpu))
        return cudaErrorInvalidDevice;
    const card &c = the_card();
    size_t free_bytes;
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", c.name);
    memory_info(&free_bytes, &p->totalGlobalMem, gpu);
    p->major = c.major;
    p->minor = c.minor;
    p->multiProcessorCount = c.processors;
    p->warpSize = WARP;
    p->maxThreadsPerBlock = BLOCK_THREADS;
    p->maxThreadsPerMultiProcessor = c.processor_threads;
    p->maxBlocksPerMultiProcessor = c.processor_blocks;
    p->regsPerBlock = p->regsPerMultiprocessor = REGISTERS;
    p->sharedMemPerBlock = SHARED;
    p->sharedMemPerBlockOptin = c.shared_most;
    p->sharedMemPerMultiprocessor = c.shared_processor;
    p->l2CacheSize = c.l2_bytes;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = BLOCK_THREADS;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = GRID_X;
    p->maxGridSize[1] = p->maxGridSize[2] = GRID_YZ;
    p->textureAlignment = 512;
    p->memoryBusWidth = c.bus_bits;
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
    snprintf(text, (size_t)size, "%s", the_card().name);
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
