/* Owns the CUDA device: a GPU's primary context, its memory, streams and events, by the driver API.
 * Must not know pools, kernels or who asks. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "device/cuda_driver.h"
#include "device/device.h"
#include "rebatch/cuda.h"

/* Values of cuda.h. */
enum {
    ATTRIBUTE_INTEGRATED = 18,
    ATTRIBUTE_SAME_HOST_ADDRESS = 91, /* of registered memory */
    ATTRIBUTE_VIRTUAL_MEMORY = 102,
    ATTRIBUTE_FILE_DESCRIPTORS = 103,
    ATTRIBUTE_HOST_NODE = 134,
    ATTRIBUTE_HOST_VIRTUAL_MEMORY = 141,
    CODE_INVALID_VALUE = 1,
    CODE_OUT_OF_MEMORY = 2,
    CODE_NOT_READY = 600,
    PINNED_PORTABLE = 1,
    PINNED_MAPPED = 2,
    EVENT_WITHOUT_TIMING = 2,
    STREAM_NON_BLOCKING = 1,
    LOCATION_DEVICE = 1,
    LOCATION_HOST_NODE = 3,
    KIND_PINNED = 1,
    HANDLE_FILE_DESCRIPTOR = 1,
    ACCESS_READ = 1,
    ACCESS_READ_WRITE = 3,
    GRANULARITY_MINIMUM = 0
};

/* Without virtual memory an allocation is the driver's, which rounds small ones to this itself. */
#define PLAIN_PAGE_BYTES ((size_t)2 << 20)

#define PEERS_MOST 31

struct cuda {
    const struct rbi_cuda_driver *driver;
    rebatch_device *device; /* this one, for the room that ambiguous codes ask about */
    int ordinal;            /* as the user counts */
    int handle;             /* as the driver calls it */
    cu_context context;     /* the primary one; NULL: not retained */
    size_t page_bytes;
    bool is_integrated; /* the GPU's memory is the machine's */
    struct cu_memory_kind kind, host_kind;
    int (*take_last_error)(void);
    struct rbi_device_ops ops; /* without virtual memory where the GPU has none */
    pthread_mutex_t lock;
    size_t used_bytes;
    int peers[PEERS_MOST]; /* other GPUs whose kernels may use the memory */
    size_t peer_count;
};

static int attribute_of(const struct cuda *cuda, int attribute)
{
    int value = 0; /* also where the driver does not know the attribute */
    return cuda->driver->device_get_attribute(&value, attribute, cuda->handle) ? 0 : value;
}

/* ---- the context ---- */

/* Makes the GPU's context current in this thread for one call; whatever was current comes back. */
static bool enter(const struct cuda *cuda, int *code)
{
    cu_context current = NULL;
    *code = cuda->driver->context_get(&current);
    if (*code || current == cuda->context)
        return false;
    *code = cuda->driver->context_push(cuda->context);
    return *code == 0;
}

static void leave(const struct cuda *cuda, bool entered)
{
    cu_context ours;
    if (entered)
        (void)cuda->driver->context_pop(&ours);
}

#define CALL(call)                                                                                 \
    do {                                                                                           \
        struct cuda *cuda = self;                                                                  \
        int code;                                                                                  \
        const bool entered = enter(cuda, &code);                                                   \
        if (!code)                                                                                 \
            code = cuda->driver->call;                                                             \
        leave(cuda, entered);                                                                      \
        return rebatch_from_cuda(cuda->device, code);                                              \
    } while (0)

static void cuda_close(void *self)
{
    struct cuda *cuda = self;
    if (cuda->context)
        (void)cuda->driver->context_release(cuda->handle);
    pthread_mutex_destroy(&cuda->lock);
    rbi_heap_free(cuda);
}

/* ---- memory ---- */

static size_t cuda_page_bytes(void *self)
{
    return ((struct cuda *)self)->page_bytes;
}

/* HAMi refuses the call while its container uses more than its limit: then nothing is free. */
static int ask_memory(const struct rbi_cuda_driver *driver, int gpu, rebatch_memory_info *out)
{
    const int code = driver->memory_info(&out->free_bytes, &out->total_bytes);
    if (code != CODE_INVALID_VALUE)
        return code;
    out->free_bytes = 0;
    return driver->device_total(&out->total_bytes, gpu);
}

static rebatch_status driver_memory(void *self, rebatch_memory_info *out)
{
    struct cuda *cuda = self;
    int code;
    const bool entered = enter(cuda, &code);
    if (!code)
        code = ask_memory(cuda->driver, cuda->handle, out);
    leave(cuda, entered);
    return rebatch_from_cuda(cuda->device, code);
}

/* Of memory that the GPU shares with the machine, this part stays free: without any, the machine
 * hangs. */
#define SHARE_OF_MACHINE 16

/* Of shared memory the driver leaves out the file cache, which the machine gives up when memory is
 * short. */
static rebatch_status memory_info(void *self, rebatch_memory_info *out)
{
    const struct cuda *cuda = self;
    const rebatch_status status = driver_memory(self, out);
    const size_t available = status || !cuda->is_integrated ? 0 : rbi_host_free_bytes();
    if (available == 0) /* or the machine does not say */
        return status;
    const size_t kept = out->total_bytes / SHARE_OF_MACHINE;
    out->free_bytes = rbi_min(available - rbi_min(available, kept), out->total_bytes);
    return REBATCH_OK;
}

/* A driver gives shared memory until the machine has none. */
static rebatch_status check_room(void *self, size_t bytes)
{
    rebatch_memory_info info;
    if (!((struct cuda *)self)->is_integrated)
        return REBATCH_OK;
    const rebatch_status status = memory_info(self, &info);
    return status || bytes <= info.free_bytes
               ? status
               : rbi_error(REBATCH_OOM,
                           "the machine has %zu bytes for the GPU, and no room for %zu",
                           info.free_bytes, bytes);
}

static rebatch_status cuda_memory(void *self, rebatch_memory_info *out)
{
    struct cuda *cuda = self;
    const rebatch_status status = memory_info(self, out);
    pthread_mutex_lock(&cuda->lock);
    out->used_bytes = cuda->used_bytes;
    pthread_mutex_unlock(&cuda->lock);
    return status;
}

/* What was taken or given back counts when the call has succeeded. */
static rebatch_status count(void *self, rebatch_status status, size_t taken, size_t given)
{
    struct cuda *cuda = self;
    if (status)
        return status;
    pthread_mutex_lock(&cuda->lock);
    rbi_assert(given <= cuda->used_bytes + taken);
    cuda->used_bytes += taken;
    cuda->used_bytes -= given;
    pthread_mutex_unlock(&cuda->lock);
    return REBATCH_OK;
}

static rebatch_status alloc(void *self, cu_pointer *out, size_t bytes)
{
    CALL(plain_alloc(out, bytes));
}

static rebatch_status cuda_alloc(void *self, void **out, size_t bytes)
{
    cu_pointer memory = 0;
    rebatch_status status = check_room(self, bytes);
    if (!status)
        status = alloc(self, &memory, bytes);
    *out = (void *)(uintptr_t)memory;
    return count(self, status, bytes, 0);
}

static rebatch_status release_plain(void *self, void *memory)
{
    CALL(plain_free((uintptr_t)memory));
}

static rebatch_status cuda_free(void *self, void *memory, size_t bytes)
{
    return count(self, release_plain(self, memory), 0, bytes);
}

static rebatch_status cuda_copy(void *self, void *to, const void *from, size_t bytes,
                                rebatch_stream stream)
{
    CALL(copy((uintptr_t)to, (uintptr_t)from, bytes, stream));
}

static rebatch_status cuda_fill(void *self, void *to, uint8_t value, size_t bytes,
                                rebatch_stream stream)
{
    CALL(fill((uintptr_t)to, value, bytes, stream));
}

/* ---- pinned memory: the machine's, so what is out of memory is the host ---- */

#define HUGE_PAGE ((size_t)2 << 20)
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* of Linux 5.14 */
#endif

/* Whether so much is mapped here and registered. A GiB in huge pages takes 0.2 s so, and
 * cuMemHostAlloc() takes 0.5 s. */
static bool is_registered(const struct cuda *cuda, size_t bytes)
{
    return bytes >= HUGE_PAGE && cuda->driver->host_register && cuda->driver->host_unregister &&
           attribute_of(cuda, ATTRIBUTE_SAME_HOST_ADDRESS);
}

/* Memory in huge pages, where the kernel has some. A child of fork() does not share it, so that no
 * page is copied that the GPU writes. NULL: there is no memory. */
static void *map_huge(size_t bytes)
{
    if (bytes > rbi_host_free_bytes())
        return NULL;
    bytes = (bytes + 4095) & ~(size_t)4095;
    char *const at =
        mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return NULL;
    const size_t before = (HUGE_PAGE - (uintptr_t)at % HUGE_PAGE) % HUGE_PAGE;
    if (before)
        (void)munmap(at, before);
    (void)munmap(at + before + bytes, HUGE_PAGE - before);
    (void)madvise(at + before, bytes, MADV_HUGEPAGE);
    (void)madvise(at + before, bytes, MADV_DONTFORK);
    (void)madvise(at + before, bytes, MADV_POPULATE_WRITE);
    return at + before;
}

static int register_huge(struct cuda *cuda, void **out, size_t bytes)
{
    void *const memory = map_huge(bytes);
    if (!memory)
        return CODE_OUT_OF_MEMORY;
    const int code = cuda->driver->host_register(memory, bytes, PINNED_PORTABLE | PINNED_MAPPED);
    if (code)
        (void)munmap(memory, bytes);
    else
        *out = memory;
    return code;
}

static rebatch_status cuda_pinned_alloc(void *self, void **out, size_t bytes)
{
    struct cuda *cuda = self;
    int code;
    const bool entered = enter(cuda, &code);
    if (!code && is_registered(cuda, bytes))
        code = register_huge(cuda, out, bytes);
    else if (!code)
        code = cuda->driver->pinned_alloc(out, bytes, PINNED_PORTABLE | PINNED_MAPPED);
    leave(cuda, entered);
    if (code != CODE_OUT_OF_MEMORY)
        return rebatch_from_cuda(cuda->device, code);
    return rbi_error(REBATCH_E_HOST_OOM, "no host memory for %zu pinned bytes", bytes);
}

static rebatch_status unregister_huge(void *self, void *memory)
{
    CALL(host_unregister(memory));
}

static rebatch_status cuda_pinned_free(void *self, void *memory, size_t bytes)
{
    if (!is_registered(self, bytes))
        CALL(pinned_free(memory));
    const rebatch_status status = unregister_huge(self, memory);
    if (status == REBATCH_OK)
        (void)munmap(memory, bytes);
    return status;
}

/* ---- virtual memory ---- */

static rebatch_status reserve(void *self, cu_pointer *out, size_t bytes)
{
    CALL(reserve(out, bytes, 0, 0, 0));
}

static rebatch_status cuda_reserve(void *self, void **out, size_t bytes)
{
    cu_pointer address = 0;
    const rebatch_status status = reserve(self, &address, bytes);
    *out = (void *)(uintptr_t)address;
    return status;
}

static rebatch_status cuda_unreserve(void *self, void *address, size_t bytes)
{
    CALL(unreserve((uintptr_t)address, bytes));
}

static rebatch_status create(void *self, unsigned long long *out, size_t bytes, int handle_types)
{
    struct cu_memory_kind kind = ((struct cuda *)self)->kind;
    kind.handle_types = handle_types;
    CALL(create(out, bytes, &kind, 0));
}

static rebatch_status create_with(void *self, rbi_physical *out, size_t bytes, int handle_types)
{
    unsigned long long physical = 0;
    rebatch_status status = check_room(self, bytes);
    if (!status)
        status = create(self, &physical, bytes, handle_types);
    *out = physical;
    return count(self, status, bytes, 0);
}

static rebatch_status cuda_create(void *self, rbi_physical *out, size_t bytes)
{
    return create_with(self, out, bytes, 0);
}

static rebatch_status cuda_create_shared(void *self, rbi_physical *out, size_t bytes)
{
    return create_with(self, out, bytes, HANDLE_FILE_DESCRIPTOR);
}

static rebatch_status cuda_export(void *self, int *fd, rbi_physical physical)
{
    CALL(export_handle(fd, physical, HANDLE_FILE_DESCRIPTOR, 0));
}

static rebatch_status import(void *self, unsigned long long *out, int fd)
{
    CALL(import_handle(out, (void *)(uintptr_t)fd, HANDLE_FILE_DESCRIPTOR));
}

static rebatch_status release(void *self, rbi_physical physical)
{
    CALL(release(physical));
}

static rebatch_status cuda_release(void *self, rbi_physical physical, size_t bytes)
{
    return count(self, release(self, physical), 0, bytes);
}

/* Pinned memory is the host's no longer, so the pool takes one part in PARTS_OF_HOST of what the
 * host has free. */
#define PARTS_OF_HOST 2

static size_t cuda_host_room(void *self)
{
    (void)self;
    return rbi_host_free_bytes() / PARTS_OF_HOST;
}

static rebatch_status create_host(void *self, unsigned long long *out, size_t bytes)
{
    CALL(create(out, bytes, &cuda->host_kind, 0));
}

static rebatch_status cuda_create_host(void *self, rbi_physical *out, size_t bytes)
{
    unsigned long long physical = 0;
    const rebatch_status status = create_host(self, &physical, bytes);
    *out = physical;
    return status;
}

static rebatch_status cuda_release_host(void *self, rbi_physical physical, size_t bytes)
{
    (void)bytes;
    return release(self, physical);
}

static rebatch_status cuda_map(void *self, void *address, size_t bytes, rbi_physical physical)
{
    CALL(map((uintptr_t)address, bytes, 0, physical, 0));
}

static rebatch_status cuda_set_access(void *self, void *address, size_t bytes)
{
    struct cuda *c = self;
    struct cu_access access[1 + PEERS_MOST];
    (void)pthread_mutex_lock(&c->lock);
    rbi_assert(c->peer_count <= PEERS_MOST);
    const size_t gpus = 1 + c->peer_count;
    for (size_t i = 0; i < gpus; i++) {
        access[i] = (struct cu_access){.location = c->kind.location, .flags = ACCESS_READ_WRITE};
        if (i > 0)
            access[i].location.id = c->peers[i - 1];
    }
    (void)pthread_mutex_unlock(&c->lock);
    CALL(set_access((uintptr_t)address, bytes, access, gpus));
}

static rebatch_status check_peer(const struct cuda *cuda, int *peer, int ordinal)
{
    int can = 0;
    int code = cuda->driver->device_get(peer, ordinal);
    if (!code && *peer != cuda->handle)
        code = cuda->driver->can_access_peer(&can, *peer, cuda->handle);
    if (code)
        return rebatch_from_cuda(cuda->device, code);
    return can || *peer == cuda->handle
               ? REBATCH_OK
               : rbi_error(REBATCH_E_UNSUPPORTED, "GPU %d cannot reach the memory of GPU %d",
                           ordinal, cuda->ordinal);
}

static rebatch_status add_peer(struct cuda *cuda, int peer)
{
    for (size_t i = 0; i < cuda->peer_count; i++)
        if (cuda->peers[i] == peer)
            return REBATCH_OK;
    if (cuda->peer_count == PEERS_MOST)
        return rbi_error(REBATCH_E_UNSUPPORTED, "%d other GPUs have access: expected no more",
                         PEERS_MOST);
    cuda->peers[cuda->peer_count++] = peer;
    return REBATCH_OK;
}

static rebatch_status cuda_allow_peer(void *self, int ordinal)
{
    struct cuda *cuda = self;
    int peer = 0;
    rebatch_status status = check_peer(cuda, &peer, ordinal);
    if (status || peer == cuda->handle)
        return status;
    (void)pthread_mutex_lock(&cuda->lock);
    status = add_peer(cuda, peer);
    (void)pthread_mutex_unlock(&cuda->lock);
    return status;
}

static rebatch_status cuda_unmap(void *self, void *address, size_t bytes)
{
    CALL(unmap((uintptr_t)address, bytes));
}

static rebatch_status open_as(void *self, void *address, size_t bytes, int flags)
{
    const struct cu_access access = {((struct cuda *)self)->kind.location, flags};
    CALL(set_access((uintptr_t)address, bytes, &access, 1));
}

/* What is mapped stays, without its handle. A driver may refuse memory that is only read. */
static rebatch_status cuda_map_export(void *self, void *address, size_t bytes, int fd)
{
    unsigned long long physical = 0;
    rebatch_status status = import(self, &physical, fd);
    if (status)
        return status;
    status = cuda_map(self, address, bytes, physical);
    (void)release(self, physical);
    if (status)
        return status;
    status = open_as(self, address, bytes, ACCESS_READ);
    if (status)
        status = open_as(self, address, bytes, ACCESS_READ_WRITE);
    if (status)
        (void)cuda_unmap(self, address, bytes);
    return status;
}

/* ---- streams and events ---- */

static rebatch_status cuda_synchronize(void *self)
{
    CALL(context_synchronize());
}

static rebatch_status cuda_stream_create(void *self, rebatch_stream *out)
{
    CALL(stream_create(out, STREAM_NON_BLOCKING));
}

static rebatch_status destroy_stream(void *self, rebatch_stream stream)
{
    CALL(stream_destroy(stream));
}

static rebatch_status cuda_stream_synchronize(void *self, rebatch_stream stream)
{
    CALL(stream_synchronize(stream));
}

static void cuda_stream_destroy(void *self, rebatch_stream stream)
{
    (void)cuda_stream_synchronize(self, stream);
    (void)destroy_stream(self, stream);
}

static rebatch_status cuda_stream_call(void *self, rebatch_stream stream, void (*function)(void *),
                                       void *user)
{
    CALL(stream_call(stream, function, user));
}

static rebatch_status cuda_event_create(void *self, rbi_event *out)
{
    CALL(event_create(out, EVENT_WITHOUT_TIMING));
}

static rebatch_status destroy_event(void *self, rbi_event event)
{
    CALL(event_destroy(event));
}

static void cuda_event_destroy(void *self, rbi_event event)
{
    (void)destroy_event(self, event);
}

/* Drivers before CUDA 12.5 have no events of all streams. */
static rebatch_status cuda_event_record(void *self, rbi_event event)
{
    if (!((struct cuda *)self)->driver->context_record)
        return REBATCH_E_UNSUPPORTED;
    CALL(context_record(cuda->context, event));
}

/* "Not ready" is an answer, not an error. */
static rebatch_status cuda_event_query(void *self, rbi_event event, bool *done)
{
    struct cuda *cuda = self;
    int code;
    const bool entered = enter(cuda, &code);
    if (!code)
        code = cuda->driver->event_query(event);
    leave(cuda, entered);
    *done = code == 0;
    return code == CODE_NOT_READY ? REBATCH_OK : rebatch_from_cuda(cuda->device, code);
}

static rebatch_status cuda_event_synchronize(void *self, rbi_event event)
{
    CALL(event_synchronize(event));
}

/* ---- graphs ---- */

/* Calls of other threads do not end the capture, nor are they held up. */
#define CAPTURE_THREAD_LOCAL 1

static rebatch_status cuda_begin_capture(void *self, rebatch_stream stream)
{
    const struct rbi_cuda_driver *driver = ((struct cuda *)self)->driver;
    if (!driver->begin_capture || !driver->end_capture || !driver->graph_instantiate ||
        !driver->graph_destroy || !driver->graph_launch || !driver->graph_executable_destroy)
        return rbi_error(REBATCH_E_UNSUPPORTED, "the driver is too old to capture: expected CUDA "
                                                "11.4 or later");
    CALL(begin_capture(stream, CAPTURE_THREAD_LOCAL));
}

static rebatch_status end_capture(void *self, rebatch_stream stream, cu_graph *out)
{
    CALL(end_capture(stream, out));
}

static rebatch_status instantiate(void *self, rbi_graph *out, cu_graph graph)
{
    CALL(graph_instantiate(out, graph, 0));
}

static rebatch_status destroy_graph(void *self, cu_graph graph)
{
    CALL(graph_destroy(graph));
}

static rebatch_status cuda_end_capture(void *self, rebatch_stream stream, rbi_graph *out)
{
    cu_graph graph = NULL;
    rebatch_status status = end_capture(self, stream, &graph);
    if (!status)
        status = instantiate(self, out, graph);
    if (graph)
        (void)destroy_graph(self, graph);
    return status;
}

static rebatch_status cuda_graph_launch(void *self, rbi_graph graph, rebatch_stream stream)
{
    CALL(graph_launch(graph, stream));
}

static rebatch_status destroy_executable(void *self, rbi_graph graph)
{
    CALL(graph_executable_destroy(graph));
}

static void cuda_graph_destroy(void *self, rbi_graph graph)
{
    (void)destroy_executable(self, graph);
}

static rebatch_status cuda_ordinal(void *self, int *out)
{
    *out = ((struct cuda *)self)->ordinal;
    return REBATCH_OK;
}

static rebatch_status cuda_take_last_error(void *self)
{
    struct cuda *cuda = self;
    return cuda->take_last_error ? rebatch_from_cuda(cuda->device, cuda->take_last_error())
                                 : REBATCH_OK;
}

/* ---- opening ---- */

static const struct rbi_device_ops cuda_ops = {
    .struct_size = sizeof(struct rbi_device_ops),
    .close = cuda_close,
    .page_bytes = cuda_page_bytes,
    .memory = cuda_memory,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .copy = cuda_copy,
    .fill = cuda_fill,
    .synchronize = cuda_synchronize,
    .stream_create = cuda_stream_create,
    .stream_destroy = cuda_stream_destroy,
    .stream_synchronize = cuda_stream_synchronize,
    .stream_call = cuda_stream_call,
    .event_create = cuda_event_create,
    .event_destroy = cuda_event_destroy,
    .event_record = cuda_event_record,
    .event_query = cuda_event_query,
    .event_synchronize = cuda_event_synchronize,
    .take_last_error = cuda_take_last_error,
    .pinned_alloc = cuda_pinned_alloc,
    .pinned_free = cuda_pinned_free,
    .begin_capture = cuda_begin_capture,
    .end_capture = cuda_end_capture,
    .graph_launch = cuda_graph_launch,
    .graph_destroy = cuda_graph_destroy,
    .ordinal = cuda_ordinal,
    .allow_peer = cuda_allow_peer,
    .reserve = cuda_reserve,
    .unreserve = cuda_unreserve,
    .create = cuda_create,
    .release = cuda_release,
    .map = cuda_map,
    .set_access = cuda_set_access,
    .unmap = cuda_unmap,
    .create_shared = cuda_create_shared,
    .export_physical = cuda_export,
    .map_export = cuda_map_export,
    .host_room = cuda_host_room,
    .create_host = cuda_create_host,
    .release_host = cuda_release_host,
};

/* The shared runtime of this process, if it has one, keeps an error until somebody asks. */
static int (*shared_runtime_last_error(void))(void)
{
    void *found = dlsym(RTLD_DEFAULT, "cudaGetLastError");
    int (*function)(void) = NULL;
    memcpy(&function, &found, sizeof found);
    return function;
}

/* Whether memory of the host node next to the GPU can be mapped in its pages, and is memory that
 * the GPU does not have anyway. */
static bool finds_host_memory(struct cuda *cuda)
{
    size_t bytes = 0;
    if (cuda->is_integrated || !attribute_of(cuda, ATTRIBUTE_HOST_VIRTUAL_MEMORY))
        return false;
    const int node = attribute_of(cuda, ATTRIBUTE_HOST_NODE);
    cuda->host_kind = (struct cu_memory_kind){
        .type = KIND_PINNED, .location = {LOCATION_HOST_NODE, node > 0 ? node : 0}};
    return cuda->driver->granularity(&bytes, &cuda->host_kind, GRANULARITY_MINIMUM) == 0 && bytes &&
           cuda->page_bytes % bytes == 0;
}

/* Drivers of virtual GPUs may say that they have virtual memory, and refuse its calls: what they
 * have then is plain allocations. */
static void find_page(struct cuda *cuda)
{
    cuda->is_integrated = attribute_of(cuda, ATTRIBUTE_INTEGRATED) != 0;
    if (!attribute_of(cuda, ATTRIBUTE_VIRTUAL_MEMORY) ||
        cuda->driver->granularity(&cuda->page_bytes, &cuda->kind, GRANULARITY_MINIMUM) ||
        cuda->page_bytes == 0) {
        cuda->page_bytes = PLAIN_PAGE_BYTES;
        cuda->ops.reserve = NULL;
    }
    if (!cuda->ops.reserve || !finds_host_memory(cuda))
        cuda->ops.create_host = NULL;
    if (!cuda->ops.reserve || !cuda->driver->export_handle || !cuda->driver->import_handle ||
        !attribute_of(cuda, ATTRIBUTE_FILE_DESCRIPTORS))
        cuda->ops.create_shared = NULL;
}

static rebatch_status open_gpu(struct cuda *cuda, const rebatch_cuda_options *o, char *name,
                               int name_size)
{
    cuda->ordinal = o->ordinal;
    rebatch_status status = rbi_cuda_driver_load(&cuda->driver);
    if (status)
        return status;
    int count = 0;
    status = rebatch_from_cuda(NULL, cuda->driver->device_get_count(&count));
    if (status)
        return status;
    if (count == 0)
        return rbi_error(REBATCH_E_NO_DEVICE, "no CUDA device: the driver sees none");
    if (o->ordinal < 0 || o->ordinal >= count)
        return rbi_error(REBATCH_E_NO_DEVICE,
                         "ordinal is %d: expected 0 to %d, there are %d CUDA devices", o->ordinal,
                         count - 1, count);
    status = rebatch_from_cuda(NULL, cuda->driver->device_get(&cuda->handle, o->ordinal));
    if (!status)
        status =
            rebatch_from_cuda(NULL, cuda->driver->device_get_name(name, name_size, cuda->handle));
    if (!status)
        status =
            rebatch_from_cuda(NULL, cuda->driver->context_retain(&cuda->context, cuda->handle));
    cuda->kind = (struct cu_memory_kind){
        .type = KIND_PINNED, .location = {.type = LOCATION_DEVICE, .id = cuda->ordinal}};
    if (!status)
        find_page(cuda);
    return status;
}

/* "CUDA 13.0, driver 580.159.04": of CUDA what the driver knows, and its own number where the
 * system says it. */
static void describe_driver(rebatch_device *device, const struct rbi_cuda_driver *driver)
{
    int version = 0;
    char *number;
    size_t length;
    struct rbi_text t = {device->driver, sizeof device->driver, 0};
    (void)driver->get_version(&version);
    rbi_text_add(&t, "CUDA %d.%d", version / 1000, version % 1000 / 10);
    if (rbi_file_read(&number, &length, "/sys/module/nvidia/version", 4097) == REBATCH_OK &&
        length > 0)
        rbi_text_add(&t, ", driver %.*s", (int)strcspn(number, "\n"), number);
    rbi_heap_free(number);
    rebatch_clear_error();
}

rebatch_status rebatch_device_open_cuda(rebatch_device **out, const rebatch_cuda_options *options)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL");
    *out = NULL;
    rebatch_cuda_options o = REBATCH_CUDA_OPTIONS_INIT;
    rebatch_status status =
        rbi_options_copy(&o, sizeof o, RBI_SIZE_TO(rebatch_cuda_options, take_last_error), options,
                         "rebatch_cuda_options");
    if (status)
        return status;
    struct cuda *cuda = rbi_heap_calloc(1, sizeof *cuda);
    if (!cuda)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a CUDA device");
    pthread_mutex_init(&cuda->lock, NULL);
    cuda->ops = cuda_ops;
    cuda->take_last_error = o.take_last_error ? o.take_last_error : shared_runtime_last_error();
    char gpu[48] = "";
    char name[64];
    status = open_gpu(cuda, &o, gpu, sizeof gpu);
    (void)snprintf(name, sizeof name, "cuda:%d %s", o.ordinal, gpu);
    if (!status)
        status = rbi_device_create(&cuda->device, &cuda->ops, cuda, name);
    if (status) {
        cuda_close(cuda);
        return status;
    }
    describe_driver(cuda->device, cuda->driver);
    if (rbi_others_limit_read(&cuda->device->others, o.ordinal))
        rebatch_clear_error(); /* theirs, which `rebatch doctor` shows */
    *out = cuda->device;
    return REBATCH_OK;
}
