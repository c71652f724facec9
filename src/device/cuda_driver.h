/* The entry points of CUDA's driver that the device uses, found by name at run time.
 * Must not know what they are used for. */
#ifndef RBI_CUDA_DRIVER_H
#define RBI_CUDA_DRIVER_H

#include "base/base.h"

/* CUDA's own types, as far as they are passed. The layouts are those of cuda.h, which keeps
 * them. */
typedef unsigned long long cu_pointer;
typedef struct cu_context_object *cu_context;
typedef struct rebatch_stream_object *cu_stream;
typedef struct rbi_event_object *cu_event;
typedef struct cu_graph_object *cu_graph;
typedef struct rbi_graph_object *cu_executable;

struct cu_location {
    int type, id;
};

/* CUmemAllocationProp */
struct cu_memory_kind {
    int type, handle_types;
    struct cu_location location;
    void *win32;
    struct {
        unsigned char compression, rdma;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
};

/* CUmemAccessDesc */
struct cu_access {
    struct cu_location location;
    int flags;
};

/* X(member, the symbol's name, arguments). All of them return a CUresult. */
#define RBI_CUDA_CALLS(X)                                                                          \
    X(init, cuInit, (unsigned flags))                                                              \
    X(get_version, cuDriverGetVersion, (int *version))                                             \
    X(device_get_count, cuDeviceGetCount, (int *count))                                            \
    X(device_get, cuDeviceGet, (int *device, int ordinal))                                         \
    X(device_get_name, cuDeviceGetName, (char *name, int size, int device))                        \
    X(device_get_attribute, cuDeviceGetAttribute, (int *value, int attribute, int device))         \
    X(device_total, cuDeviceTotalMem_v2, (size_t * bytes, int device))                             \
    X(context_retain, cuDevicePrimaryCtxRetain, (cu_context * context, int device))                \
    X(context_release, cuDevicePrimaryCtxRelease_v2, (int device))                                 \
    X(context_get, cuCtxGetCurrent, (cu_context * context))                                        \
    X(context_push, cuCtxPushCurrent_v2, (cu_context context))                                     \
    X(context_pop, cuCtxPopCurrent_v2, (cu_context * context))                                     \
    X(context_synchronize, cuCtxSynchronize, (void))                                               \
    X(memory_info, cuMemGetInfo_v2, (size_t * free_bytes, size_t * total_bytes))                   \
    X(plain_alloc, cuMemAlloc_v2, (cu_pointer * out, size_t bytes))                                \
    X(plain_free, cuMemFree_v2, (cu_pointer memory))                                               \
    X(pinned_alloc, cuMemHostAlloc, (void **out, size_t bytes, unsigned flags))                    \
    X(pinned_free, cuMemFreeHost, (void *memory))                                                  \
    X(copy, cuMemcpyAsync, (cu_pointer to, cu_pointer from, size_t bytes, cu_stream stream))       \
    X(fill, cuMemsetD8Async, (cu_pointer to, unsigned char value, size_t bytes, cu_stream stream)) \
    X(stream_create, cuStreamCreate, (cu_stream * out, unsigned flags))                            \
    X(stream_destroy, cuStreamDestroy_v2, (cu_stream stream))                                      \
    X(stream_synchronize, cuStreamSynchronize, (cu_stream stream))                                 \
    X(stream_call, cuLaunchHostFunc, (cu_stream stream, void (*function)(void *), void *user))     \
    X(event_create, cuEventCreate, (cu_event * out, unsigned flags))                               \
    X(event_destroy, cuEventDestroy_v2, (cu_event event))                                          \
    X(event_query, cuEventQuery, (cu_event event))                                                 \
    X(event_synchronize, cuEventSynchronize, (cu_event event))                                     \
    X(granularity, cuMemGetAllocationGranularity,                                                  \
      (size_t * bytes, const struct cu_memory_kind *kind, int option))                             \
    X(reserve, cuMemAddressReserve,                                                                \
      (cu_pointer * out, size_t bytes, size_t alignment, cu_pointer wish,                          \
       unsigned long long flags))                                                                  \
    X(unreserve, cuMemAddressFree, (cu_pointer address, size_t bytes))                             \
    X(create, cuMemCreate,                                                                         \
      (unsigned long long *out, size_t bytes, const struct cu_memory_kind *kind,                   \
       unsigned long long flags))                                                                  \
    X(release, cuMemRelease, (unsigned long long physical))                                        \
    X(map, cuMemMap,                                                                               \
      (cu_pointer address, size_t bytes, size_t offset, unsigned long long physical,               \
       unsigned long long flags))                                                                  \
    X(can_access_peer, cuDeviceCanAccessPeer, (int *can, int device, int peer))                    \
    X(set_access, cuMemSetAccess,                                                                  \
      (cu_pointer address, size_t bytes, const struct cu_access *access, size_t count))            \
    X(unmap, cuMemUnmap, (cu_pointer address, size_t bytes))

/* What a driver may lack: CUDA 12.5 and later have the first, CUDA 11.4 all others. */
#define RBI_CUDA_OPTIONAL_CALLS(X)                                                                 \
    X(context_record, cuCtxRecordEvent, (cu_context context, cu_event event))                      \
    X(export_handle, cuMemExportToShareableHandle,                                                 \
      (int *fd, unsigned long long physical, int type, unsigned long long flags))                  \
    X(import_handle, cuMemImportFromShareableHandle,                                               \
      (unsigned long long *physical, void *fd, int type))                                          \
    X(host_register, cuMemHostRegister_v2, (void *memory, size_t bytes, unsigned flags))           \
    X(host_unregister, cuMemHostUnregister, (void *memory))                                        \
    X(begin_capture, cuStreamBeginCapture_v2, (cu_stream stream, int mode))                        \
    X(end_capture, cuStreamEndCapture, (cu_stream stream, cu_graph * out))                         \
    X(graph_instantiate, cuGraphInstantiateWithFlags,                                              \
      (cu_executable * out, cu_graph graph, unsigned long long flags))                             \
    X(graph_destroy, cuGraphDestroy, (cu_graph graph))                                             \
    X(graph_launch, cuGraphLaunch, (cu_executable graph, cu_stream stream))                        \
    X(graph_executable_destroy, cuGraphExecDestroy, (cu_executable graph))

/* A preloaded librebatch_wrap.so (preload/) answers this name with a dlsym() that finds the
 * driver's own functions: what a pool takes from the driver does not come from a pool. */
#define RBI_CUDA_REAL_DLSYM "rebatch_wrap_real_dlsym"

struct rbi_cuda_driver {
#define RBI_CUDA_MEMBER_(member, symbol, arguments) int(*member) arguments;
    RBI_CUDA_CALLS(RBI_CUDA_MEMBER_)
    RBI_CUDA_OPTIONAL_CALLS(RBI_CUDA_MEMBER_) /* or NULL */
#undef RBI_CUDA_MEMBER_
};

/* Loads the driver once and initialises it. REBATCH_E_NO_DEVICE when there is none, or it lacks a
 * call: then it is too old. */
rebatch_status rbi_cuda_driver_load(const struct rbi_cuda_driver **out);

#endif
