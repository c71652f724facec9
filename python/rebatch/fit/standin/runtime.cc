/* Owns the functions of CUDA's runtime, and the last error of each thread.
 * Must not keep any other state. */
#include <string.h>

#include "standin.h"

using namespace standin;

namespace
{

thread_local cudaError_t last_error;

cudaError_t result(int error)
{
    if (error && error != NOT_READY)
        last_error = (cudaError_t)error;
    return (cudaError_t)error;
}

/* Graphs hold nothing: these are what a program passes on. */
char graph, executable;

/* What cudaGetSymbolAddress() answers: there are no symbols of a GPU. */
char symbol[1 << 20];

} // namespace

/* ---- errors, versions ---- */

STANDIN_API cudaError_t cudaGetLastError(void)
{
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

STANDIN_API cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

STANDIN_API const char *cudaGetErrorString(cudaError_t error)
{
    return text_of(error);
}

STANDIN_API const char *cudaGetErrorName(cudaError_t error)
{
    return name_of(error);
}

STANDIN_API cudaError_t cudaDriverGetVersion(int *version)
{
    *version = CUDA_VERSION;
    return cudaSuccess;
}

STANDIN_API cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

STANDIN_API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned,
                                                         unsigned long long,
                                                         cudaDriverEntryPointQueryResult *found)
{
    *out = find_function(name);
    if (!*out)
        *out = unsupported_function();
    if (found)
        *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* ---- devices ---- */

STANDIN_API cudaError_t cudaGetDeviceCount(int *count)
{
    *count = gpu_count();
    return *count ? cudaSuccess : result(cudaErrorNoDevice);
}

STANDIN_API cudaError_t cudaGetDevice(int *gpu)
{
    *gpu = current_gpu();
    return cudaSuccess;
}

STANDIN_API cudaError_t cudaSetDevice(int gpu)
{
    return result(use_gpu(gpu) ? cudaErrorInvalidDevice : cudaSuccess);
}

STANDIN_API cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr asked, int gpu)
{
    return result(attribute(value, asked, gpu) ? cudaErrorInvalidDevice : cudaSuccess);
}

STANDIN_API cudaError_t cudaDeviceCanAccessPeer(int *can, int gpu, int peer)
{
    *can = is_gpu(gpu) && is_gpu(peer) && gpu != peer;
    return cudaSuccess;
}

STANDIN_API cudaError_t cudaDeviceGetStreamPriorityRange(int *lowest, int *highest)
{
    *lowest = 0;
    *highest = -5;
    return cudaSuccess;
}

STANDIN_API cudaError_t cudaDeviceSynchronize(void)
{
    return result(wait_for_all(current_gpu()));
}

/* ---- memory ---- */

STANDIN_API cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    memory_info(free_bytes, total_bytes, current_gpu());
    return cudaSuccess;
}

STANDIN_API cudaError_t cudaMalloc(void **out, size_t bytes)
{
    return result(alloc(out, bytes, current_gpu()));
}

STANDIN_API cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream)
{
    return result(alloc(out, bytes, gpu_of_stream(stream)));
}

STANDIN_API cudaError_t cudaMallocManaged(void **out, size_t bytes, unsigned)
{
    return result(alloc(out, bytes, current_gpu()));
}

STANDIN_API cudaError_t cudaFree(void *memory)
{
    return result(release(memory));
}

STANDIN_API cudaError_t cudaFreeAsync(void *memory, cudaStream_t)
{
    return result(release(memory));
}

STANDIN_API cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned)
{
    return result(alloc_pinned(out, bytes));
}

STANDIN_API cudaError_t cudaMallocHost(void **out, size_t bytes)
{
    return result(alloc_pinned(out, bytes));
}

STANDIN_API cudaError_t cudaFreeHost(void *memory)
{
    return result(release_pinned(memory));
}

STANDIN_API cudaError_t cudaHostRegister(void *memory, size_t bytes, unsigned)
{
    return result(pin(memory, bytes));
}

STANDIN_API cudaError_t cudaHostUnregister(void *memory)
{
    return result(unpin(memory));
}

STANDIN_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *out, const void *address)
{
    const owner found = owner_of(address);
    memset(out, 0, sizeof *out);
    out->type = found.kind == owner::GPU      ? cudaMemoryTypeDevice
                : found.kind == owner::PINNED ? cudaMemoryTypeHost
                                              : cudaMemoryTypeUnregistered;
    out->device = found.kind == owner::NOBODY ? -1 : found.gpu;
    out->devicePointer = found.kind == owner::NOBODY ? nullptr : (void *)address;
    out->hostPointer = found.kind == owner::GPU ? nullptr : (void *)address;
    return cudaSuccess;
}

STANDIN_API cudaError_t cudaGetSymbolAddress(void **out, const void *)
{
    *out = symbol;
    return cudaSuccess;
}

/* ---- copies ---- */

namespace
{

thread_local bool leaves_out = false;

/* A write within a GPU, or one to it that is left out, of which only those up to STANDIN_FILL_MOST
 * bytes are done. */
bool is_done(size_t bytes, cudaMemcpyKind kind = cudaMemcpyDeviceToDevice)
{
    const bool may_leave_out =
        kind == cudaMemcpyDeviceToDevice || (kind == cudaMemcpyHostToDevice && leaves_out);
    return !may_leave_out || bytes <= fill_most();
}

} // namespace

/* Whether this thread's copies to a GPU are left out. */
STANDIN_API void standin_leave_out(bool leaves)
{
    leaves_out = leaves;
}

STANDIN_API cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind)
{
    const code error = check_unsafe();
    if (!error && is_done(bytes, kind))
        memmove(to, from, bytes);
    return result(error);
}

STANDIN_API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes,
                                        cudaMemcpyKind kind, cudaStream_t stream)
{
    const code error = check_stream(stream);
    if (!error && !capture_of(stream) && is_done(bytes, kind))
        memmove(to, from, bytes);
    return result(error);
}

STANDIN_API cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes,
                                            cudaStream_t stream)
{
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}

STANDIN_API cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from,
                                          size_t from_pitch, size_t width, size_t height,
                                          cudaMemcpyKind kind, cudaStream_t stream)
{
    const code error = check_stream(stream);
    if (!error && !capture_of(stream) && is_done(width * height, kind))
        for (size_t row = 0; row < height; row++)
            memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return result(error);
}

STANDIN_API cudaError_t cudaMemset(void *to, int value, size_t bytes)
{
    if (is_done(bytes))
        memset(to, value, bytes);
    return cudaSuccess;
}

STANDIN_API cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    const code error = check_stream(stream);
    if (!error && !capture_of(stream) && is_done(bytes))
        memset(to, value, bytes);
    return result(error);
}

/* ---- streams and events ---- */

STANDIN_API cudaError_t cudaStreamCreate(cudaStream_t *out)
{
    return result(create_stream((void **)out, 0));
}

STANDIN_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned)
{
    return result(create_stream((void **)out, 0));
}

STANDIN_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned, int priority)
{
    return result(create_stream((void **)out, priority));
}

STANDIN_API cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    return result(destroy_stream(stream));
}

STANDIN_API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority)
{
    *priority = priority_of(stream);
    return result(check_stream(stream));
}

STANDIN_API cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    return result(query_stream(stream));
}

STANDIN_API cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    return result(wait_stream(stream));
}

STANDIN_API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
    return result(wait_event(stream, event));
}

STANDIN_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *user)
{
    const code error = check_stream(stream);
    if (!error && !capture_of(stream))
        function(user);
    return result(error);
}

STANDIN_API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function,
                                              void *user, unsigned)
{
    const code error = check_stream(stream);
    if (!error)
        function(stream, cudaSuccess, user);
    return result(error);
}

STANDIN_API cudaError_t cudaEventCreate(cudaEvent_t *out)
{
    return result(create_event((void **)out));
}

STANDIN_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned)
{
    return result(create_event((void **)out));
}

STANDIN_API cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    return result(destroy_event(event));
}

STANDIN_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    return result(record_event(event, stream));
}

STANDIN_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned)
{
    return result(record_event(event, stream));
}

STANDIN_API cudaError_t cudaEventQuery(cudaEvent_t event)
{
    return result(query_event(event));
}

STANDIN_API cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    wait_for_gpus();
    return result(check_event(event));
}

STANDIN_API cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start,
                                             cudaEvent_t end)
{
    return result(elapsed(milliseconds, start, end));
}

/* ---- graphs: captured, and launched without effect ---- */

STANDIN_API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode)
{
    return result(begin_capture(stream, mode));
}

STANDIN_API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out)
{
    *out = (cudaGraph_t)&graph;
    return result(end_capture(stream));
}

STANDIN_API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status)
{
    *status = capture_of(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return result(check_stream(stream));
}

STANDIN_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream,
                                                 cudaStreamCaptureStatus *status,
                                                 unsigned long long *id, cudaGraph_t *out,
                                                 const cudaGraphNode_t **nodes,
#if CUDART_VERSION >= 13000
                                                 const cudaGraphEdgeData **edges,
#endif
                                                 size_t *count)
{
    const unsigned long long capture = capture_of(stream);
    *status = capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    if (id)
        *id = capture;
    if (out)
        *out = (cudaGraph_t)&graph;
    if (nodes)
        *nodes = nullptr;
#if CUDART_VERSION >= 13000
    if (edges)
        *edges = nullptr;
#endif
    if (count)
        *count = 0;
    return result(check_stream(stream));
}

STANDIN_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode)
{
    return result(cuThreadExchangeStreamCaptureMode((CUstreamCaptureMode *)mode));
}

STANDIN_API cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t, unsigned long long)
{
    *out = (cudaGraphExec_t)&executable;
    return cudaSuccess;
}

STANDIN_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t,
                                                      unsigned long long)
{
    *out = (cudaGraphExec_t)&executable;
    return cudaSuccess;
}

STANDIN_API cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t *, size_t *count)
{
    *count = 1;
    return cudaSuccess;
}
