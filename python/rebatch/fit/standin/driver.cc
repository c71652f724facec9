/* Owns the functions of CUDA's driver, but for those of contexts (device.cc).
 * Must not keep any state. */
#include <string.h>

#include "standin.h"

using namespace standin;

#define RESULT(expression) (CUresult)(expression)

/* Where cuda.h names a function's version by a macro, the definition here gets that version. */

STANDIN_API CUresult cuInit(unsigned)
{
    return gpu_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

STANDIN_API CUresult cuDriverGetVersion(int *version)
{
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

STANDIN_API CUresult cuGetErrorString(CUresult error, const char **text)
{
    *text = text_of(error);
    return CUDA_SUCCESS;
}

STANDIN_API CUresult cuGetErrorName(CUresult error, const char **text)
{
    *text = name_of(error);
    return CUDA_SUCCESS;
}

STANDIN_API CUresult cuGetProcAddress_v2(const char *name, void **out, int, cuuint64_t,
                                         CUdriverProcAddressQueryResult *result)
{
    *out = find_function(name);
    if (!*out)
        note_missing(__builtin_return_address(0));
    if (result)
        *result = *out ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* Tables of functions that NVIDIA's own libraries use: there are none, as they learn. */
STANDIN_API CUresult cuGetExportTable(const void **out, const CUuuid *)
{
    *out = nullptr;
    return CUDA_ERROR_NOT_FOUND;
}

/* ---- devices ---- */

STANDIN_API CUresult cuDeviceGetCount(int *count)
{
    *count = gpu_count();
    return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDeviceGet(CUdevice *out, int ordinal)
{
    *out = ordinal;
    return is_gpu(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

STANDIN_API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute asked, CUdevice gpu)
{
    return RESULT(attribute(value, asked, gpu));
}

STANDIN_API CUresult cuDeviceTotalMem(size_t *bytes, CUdevice gpu)
{
    if (!is_gpu(gpu))
        return CUDA_ERROR_INVALID_DEVICE;
    size_t free_bytes;
    memory_info(&free_bytes, bytes, gpu);
    return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDeviceCanAccessPeer(int *can, CUdevice gpu, CUdevice peer)
{
    *can = is_gpu(gpu) && is_gpu(peer) && gpu != peer;
    return CUDA_SUCCESS;
}

STANDIN_API CUresult cuCtxSynchronize(void)
{
    int gpu;
    const code result = context_gpu(&gpu);
    return RESULT(result ? result : wait_for_all(gpu));
}

/* ---- memory ---- */

STANDIN_API CUresult cuMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    int gpu;
    const code result = context_gpu(&gpu);
    if (!result)
        memory_info(free_bytes, total_bytes, gpu);
    return RESULT(result);
}

STANDIN_API CUresult cuMemAlloc(CUdeviceptr *out, size_t bytes)
{
    int gpu;
    void *memory = nullptr;
    code result = bytes ? context_gpu(&gpu) : INVALID;
    if (!result)
        result = alloc(&memory, bytes, gpu);
    *out = (CUdeviceptr)memory;
    return RESULT(result);
}

STANDIN_API CUresult cuMemFree(CUdeviceptr memory)
{
    return RESULT(release((void *)memory));
}

STANDIN_API CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned)
{
    int gpu;
    const code result = context_gpu(&gpu);
    return RESULT(result ? result : alloc_pinned(out, bytes));
}

STANDIN_API CUresult cuMemFreeHost(void *memory)
{
    return RESULT(release_pinned(memory));
}

STANDIN_API CUresult cuMemGetAddressRange(CUdeviceptr *begin, size_t *bytes, CUdeviceptr address)
{
    const owner found = owner_of((void *)address);
    if (found.kind == owner::NOBODY)
        return CUDA_ERROR_NOT_FOUND;
    if (begin)
        *begin = (CUdeviceptr)found.begin;
    if (bytes)
        *bytes = found.bytes;
    return CUDA_SUCCESS;
}

STANDIN_API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    const code result = check_stream(stream);
    if (!result && !capture_of(stream))
        memmove((void *)to, (void *)from, bytes);
    return RESULT(result);
}

STANDIN_API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes,
                                     CUstream stream)
{
    const code result = check_stream(stream);
    if (!result && !capture_of(stream) && bytes <= fill_most())
        memset((void *)to, value, bytes);
    return RESULT(result);
}

STANDIN_API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream)
{
    const code result = check_stream(stream);
    if (!result && !capture_of(stream))
        for (size_t i = 0; i < count; i++)
            ((unsigned *)to)[i] = value;
    return RESULT(result);
}

/* ---- physical memory and addresses ---- */

STANDIN_API CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *,
                                                   CUmemAllocationGranularity_flags)
{
    *bytes = PAGE_BYTES;
    return CUDA_SUCCESS;
}

STANDIN_API CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes,
                                 const CUmemAllocationProp *kind, unsigned long long)
{
    if (kind->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA && has_host_memory())
        return RESULT(create(out, bytes, -1, false));
    if (kind->location.type != CU_MEM_LOCATION_TYPE_DEVICE || !is_gpu(kind->location.id))
        return CUDA_ERROR_INVALID_DEVICE;
    return RESULT(create(out, bytes, kind->location.id, kind->requestedHandleTypes != 0));
}

STANDIN_API CUresult cuMemRelease(CUmemGenericAllocationHandle physical)
{
    return RESULT(drop(physical));
}

STANDIN_API CUresult cuMemExportToShareableHandle(void *fd, CUmemGenericAllocationHandle physical,
                                                  CUmemAllocationHandleType type,
                                                  unsigned long long)
{
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    return RESULT(export_physical((int *)fd, physical));
}

STANDIN_API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *fd,
                                                    CUmemAllocationHandleType type)
{
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    return RESULT(import_physical(out, (int)(intptr_t)fd));
}

STANDIN_API CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t alignment,
                                         CUdeviceptr wish, unsigned long long)
{
    uintptr_t address = 0;
    const code result = reserve(&address, bytes, alignment, (uintptr_t)wish);
    *out = address;
    return RESULT(result);
}

STANDIN_API CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes)
{
    return RESULT(unreserve((uintptr_t)address, bytes));
}

STANDIN_API CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                              CUmemGenericAllocationHandle physical, unsigned long long)
{
    return RESULT(map((uintptr_t)address, bytes, offset, physical));
}

STANDIN_API CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    return RESULT(unmap((uintptr_t)address, bytes));
}

/* Any access that is given is given to the host, which plays all GPUs. */
STANDIN_API CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *who,
                                    size_t count)
{
    uint32_t gpus = 0;
    bool may_write = false;
    for (size_t i = 0; i < count; i++)
        if (who[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE) {
            gpus |= UINT32_C(1) << who[i].location.id;
            may_write |= who[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        }
    return RESULT(set_access((uintptr_t)address, bytes, gpus, may_write));
}

/* ---- kernels that are compiled at run time: they do nothing either ---- */

namespace
{
char kernel; /* what a program passes on */
} // namespace

STANDIN_API CUresult cuLibraryLoadData(CUlibrary *out, const void *, CUjit_option *, void **,
                                       unsigned, CUlibraryOption *, void **, unsigned)
{
    *out = (CUlibrary)&kernel;
    return CUDA_SUCCESS;
}

STANDIN_API CUresult cuLibraryGetKernel(CUkernel *out, CUlibrary, const char *)
{
    *out = (CUkernel)&kernel;
    return CUDA_SUCCESS;
}

STANDIN_API CUresult cuKernelGetFunction(CUfunction *out, CUkernel)
{
    *out = (CUfunction)&kernel;
    return CUDA_SUCCESS;
}

STANDIN_API CUresult cuModuleLoadDataEx(CUmodule *out, const void *, unsigned, CUjit_option *,
                                        void **)
{
    *out = (CUmodule)&kernel;
    return CUDA_SUCCESS;
}

STANDIN_API CUresult cuModuleLoadData(CUmodule *out, const void *)
{
    *out = (CUmodule)&kernel;
    return CUDA_SUCCESS;
}

STANDIN_API CUresult cuModuleGetFunction(CUfunction *out, CUmodule, const char *)
{
    *out = (CUfunction)&kernel;
    return CUDA_SUCCESS;
}

/* ---- streams and events ---- */

STANDIN_API CUresult cuStreamCreate(CUstream *out, unsigned)
{
    int gpu;
    const code result = context_gpu(&gpu);
    return RESULT(result ? result : create_stream((void **)out, 0));
}

STANDIN_API CUresult cuStreamCreateWithPriority(CUstream *out, unsigned, int priority)
{
    int gpu;
    const code result = context_gpu(&gpu);
    return RESULT(result ? result : create_stream((void **)out, priority));
}

STANDIN_API CUresult cuStreamDestroy(CUstream stream)
{
    return RESULT(destroy_stream(stream));
}

STANDIN_API CUresult cuStreamQuery(CUstream stream)
{
    return RESULT(query_stream(stream));
}

STANDIN_API CUresult cuStreamSynchronize(CUstream stream)
{
    return RESULT(wait_stream(stream));
}

STANDIN_API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned)
{
    return RESULT(wait_event(stream, event));
}

STANDIN_API CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status)
{
    *status = capture_of(stream) ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return RESULT(check_stream(stream));
}

STANDIN_API CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *user)
{
    const code result = check_stream(stream);
    if (!result && !capture_of(stream))
        function(user);
    return RESULT(result);
}

STANDIN_API CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    *mode = (CUstreamCaptureMode)exchange_mode(*mode);
    return CUDA_SUCCESS;
}

STANDIN_API CUresult cuEventCreate(CUevent *out, unsigned)
{
    int gpu;
    const code result = context_gpu(&gpu);
    return RESULT(result ? result : create_event((void **)out));
}

STANDIN_API CUresult cuEventDestroy(CUevent event)
{
    return RESULT(destroy_event(event));
}

STANDIN_API CUresult cuEventRecord(CUevent event, CUstream stream)
{
    return RESULT(record_event(event, stream));
}

STANDIN_API CUresult cuCtxRecordEvent(CUcontext, CUevent event)
{
    return RESULT(record_all(event));
}

STANDIN_API CUresult cuEventQuery(CUevent event)
{
    return RESULT(query_event(event));
}

STANDIN_API CUresult cuEventSynchronize(CUevent event)
{
    wait_for_gpus();
    return RESULT(check_event(event));
}

STANDIN_API CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end)
{
    return RESULT(elapsed(milliseconds, start, end));
}
