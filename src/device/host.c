/* Owns the host device: CPU memory under a cap that can change, and the list of its streams.
 * Must not know who asks for memory, or why. */
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "device/device.h"
#include "device/host_memory.h"
#include "device/host_stream.h"

#define DEFAULT_PAGE_BYTES 65536u

struct host {
    size_t page_bytes;
    pthread_mutex_t lock;      /* of everything below */
    size_t capacity_bytes;     /* REBATCH_UNLIMITED: no cap */
    size_t used_bytes;         /* may exceed the cap after it was lowered */
    size_t overflow_bytes;     /* what is left beside the cap */
    struct rbi_host_file file; /* what physical memory is made of */
    rebatch_stream streams;    /* list of all that are open */
};

static void host_close(void *self)
{
    struct host *host = self;
    while (host->streams) {
        rebatch_stream stream = host->streams;
        host->streams = *rbi_host_stream_next(stream);
        rbi_host_stream_destroy(stream);
    }
    rbi_host_file_close(&host->file);
    pthread_mutex_destroy(&host->lock);
    rbi_heap_free(host);
}

static size_t host_page_bytes(void *self)
{
    return ((struct host *)self)->page_bytes;
}

/* ---- memory ---- */

static size_t machine_bytes(void)
{
    const long host_pages = sysconf(_SC_PHYS_PAGES);
    const long host_page_bytes = sysconf(_SC_PAGESIZE);
    return host_pages > 0 && host_page_bytes > 0 ? (size_t)host_pages * (size_t)host_page_bytes
                                                 : SIZE_MAX;
}

static rebatch_status host_memory(void *self, rebatch_memory_info *out)
{
    struct host *host = self;
    pthread_mutex_lock(&host->lock);
    const size_t capacity = host->capacity_bytes;
    const size_t used = host->used_bytes;
    pthread_mutex_unlock(&host->lock);
    out->total_bytes = capacity == REBATCH_UNLIMITED ? machine_bytes() : capacity;
    out->free_bytes = out->total_bytes > used ? out->total_bytes - used : 0;
    out->used_bytes = used;
    return REBATCH_OK;
}

/* Takes `bytes` of the capacity; false when they are not there. */
static bool take(struct host *host, size_t bytes)
{
    pthread_mutex_lock(&host->lock);
    const bool fits = host->used_bytes <= host->capacity_bytes &&
                      bytes <= host->capacity_bytes - host->used_bytes;
    if (fits)
        host->used_bytes += bytes;
    rbi_assert(!fits || host->used_bytes <= host->capacity_bytes);
    pthread_mutex_unlock(&host->lock);
    return fits;
}

static void give(struct host *host, size_t bytes)
{
    pthread_mutex_lock(&host->lock);
    rbi_assert(bytes <= host->used_bytes);
    host->used_bytes -= bytes;
    pthread_mutex_unlock(&host->lock);
}

static rebatch_status host_alloc(void *self, void **out, size_t bytes)
{
    struct host *host = self;
    if (!take(host, bytes))
        return rbi_error(REBATCH_OOM, "the host device has no room for %zu bytes", bytes);
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        give(host, bytes);
        return rbi_error(REBATCH_OOM, "the machine has no room for %zu bytes", bytes);
    }
    *out = memory;
    return REBATCH_OK;
}

static rebatch_status host_free(void *self, void *memory, size_t bytes)
{
    if (munmap(memory, bytes) != 0)
        return rbi_error(REBATCH_E_DEVICE, "the machine did not take back %zu bytes at %p", bytes,
                         memory);
    give(self, bytes);
    return REBATCH_OK;
}

/* ---- virtual memory ---- */

static rebatch_status host_reserve(void *self, void **out, size_t bytes)
{
    (void)self;
    return rbi_host_reserve(out, bytes);
}

static rebatch_status host_unreserve(void *self, void *address, size_t bytes)
{
    (void)self;
    return rbi_host_unreserve(address, bytes);
}

static rebatch_status host_create(void *self, rbi_physical *out, size_t bytes)
{
    struct host *host = self;
    if (!take(host, bytes))
        return rbi_error(REBATCH_OOM, "the host device has no room for %zu bytes", bytes);
    pthread_mutex_lock(&host->lock);
    const rebatch_status status = rbi_host_file_take(&host->file, out, bytes);
    pthread_mutex_unlock(&host->lock);
    if (status)
        give(host, bytes);
    return status;
}

static rebatch_status host_release(void *self, rbi_physical physical, size_t bytes)
{
    struct host *host = self;
    pthread_mutex_lock(&host->lock);
    const rebatch_status status = rbi_host_file_give(&host->file, physical, bytes);
    pthread_mutex_unlock(&host->lock);
    if (!status)
        give(host, bytes);
    return status;
}

static size_t host_host_room(void *self)
{
    struct host *host = self;
    pthread_mutex_lock(&host->lock);
    const size_t bytes = host->overflow_bytes;
    pthread_mutex_unlock(&host->lock);
    return bytes;
}

static bool take_overflow(struct host *host, size_t bytes)
{
    pthread_mutex_lock(&host->lock);
    const bool fits = bytes <= host->overflow_bytes;
    if (fits)
        host->overflow_bytes -= bytes;
    pthread_mutex_unlock(&host->lock);
    return fits;
}

static void give_overflow(struct host *host, size_t bytes)
{
    pthread_mutex_lock(&host->lock);
    rbi_assert(bytes <= SIZE_MAX - host->overflow_bytes);
    host->overflow_bytes += bytes;
    pthread_mutex_unlock(&host->lock);
}

static rebatch_status host_create_host(void *self, rbi_physical *out, size_t bytes)
{
    struct host *host = self;
    if (!take_overflow(host, bytes))
        return rbi_error(REBATCH_OOM, "the host device has no %zu bytes beside its cap", bytes);
    pthread_mutex_lock(&host->lock);
    const rebatch_status status = rbi_host_file_take(&host->file, out, bytes);
    pthread_mutex_unlock(&host->lock);
    if (status)
        give_overflow(host, bytes);
    return status;
}

static rebatch_status host_release_host(void *self, rbi_physical physical, size_t bytes)
{
    struct host *host = self;
    pthread_mutex_lock(&host->lock);
    const rebatch_status status = rbi_host_file_give(&host->file, physical, bytes);
    pthread_mutex_unlock(&host->lock);
    if (!status)
        give_overflow(host, bytes);
    return status;
}

static rebatch_status host_map(void *self, void *address, size_t bytes, rbi_physical physical)
{
    struct host *host = self;
    return rbi_host_map(&host->file, address, bytes, physical);
}

static rebatch_status host_set_access(void *self, void *address, size_t bytes)
{
    (void)self;
    return rbi_host_set_access(address, bytes);
}

static rebatch_status host_unmap(void *self, void *address, size_t bytes)
{
    (void)self;
    return rbi_host_unmap(address, bytes);
}

static rebatch_status host_export(void *self, int *fd, rbi_physical physical)
{
    return rbi_host_file_export(&((struct host *)self)->file, fd, physical);
}

static rebatch_status host_map_export(void *self, void *address, size_t bytes, int fd)
{
    (void)self;
    return rbi_host_map_export(address, bytes, fd);
}

/* ---- memory that does not count ---- */

static rebatch_status host_pinned_alloc(void *self, void **out, size_t bytes)
{
    (void)self;
    void *const memory =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return rbi_error(REBATCH_E_HOST_OOM, "the machine has no room for %zu bytes", bytes);
    *out = memory;
    return REBATCH_OK;
}

static rebatch_status host_pinned_free(void *self, void *memory, size_t bytes)
{
    (void)self;
    if (munmap(memory, bytes) != 0)
        return rbi_error(REBATCH_E_DEVICE, "the machine did not take back %zu bytes at %p", bytes,
                         memory);
    return REBATCH_OK;
}

/* ---- the cap ---- */

static rebatch_status host_set_capacity(void *self, size_t capacity_bytes)
{
    struct host *host = self;
    const rebatch_status status = rbi_device_check_capacity(capacity_bytes, host->page_bytes);
    if (status)
        return status;
    pthread_mutex_lock(&host->lock);
    host->capacity_bytes = capacity_bytes;
    pthread_mutex_unlock(&host->lock);
    return REBATCH_OK;
}

static rebatch_status host_copy(void *self, void *to, const void *from, size_t bytes,
                                rebatch_stream stream)
{
    (void)self;
    return rbi_host_stream_copy(stream, to, from, bytes);
}

static rebatch_status host_fill(void *self, void *to, uint8_t value, size_t bytes,
                                rebatch_stream stream)
{
    (void)self;
    return rbi_host_stream_fill(stream, to, value, bytes);
}

/* ---- streams ---- */

/* The link that points at `stream`, or the list's end. The lock is held. */
static rebatch_stream *find_stream(struct host *host, rebatch_stream stream)
{
    rebatch_stream *link = &host->streams;
    while (*link && *link != stream)
        link = rbi_host_stream_next(*link);
    return link;
}

static rebatch_status host_stream_create(void *self, rebatch_stream *out)
{
    struct host *host = self;
    const rebatch_status status = rbi_host_stream_create(out);
    if (status)
        return status;
    pthread_mutex_lock(&host->lock);
    rbi_assert(*find_stream(host, *out) == NULL);
    *rbi_host_stream_next(*out) = host->streams;
    host->streams = *out;
    pthread_mutex_unlock(&host->lock);
    return REBATCH_OK;
}

static void host_stream_destroy(void *self, rebatch_stream stream)
{
    struct host *host = self;
    pthread_mutex_lock(&host->lock);
    rebatch_stream *link = find_stream(host, stream);
    if (*link)
        *link = *rbi_host_stream_next(stream);
    pthread_mutex_unlock(&host->lock);
    rbi_host_stream_destroy(stream);
}

static bool host_stream_is_valid(void *self, rebatch_stream stream)
{
    struct host *host = self;
    pthread_mutex_lock(&host->lock);
    const bool valid = *find_stream(host, stream) != NULL;
    pthread_mutex_unlock(&host->lock);
    return valid;
}

/* No stream comes or goes meanwhile. */
static rebatch_status host_synchronize(void *self)
{
    struct host *host = self;
    pthread_mutex_lock(&host->lock);
    for (rebatch_stream s = host->streams; s; s = *rbi_host_stream_next(s))
        (void)rbi_host_stream_synchronize(s);
    pthread_mutex_unlock(&host->lock);
    return REBATCH_OK;
}

static rebatch_status host_stream_synchronize(void *self, rebatch_stream stream)
{
    (void)self;
    return rbi_host_stream_synchronize(stream);
}

static rebatch_status host_stream_call(void *self, rebatch_stream stream, void (*function)(void *),
                                       void *user)
{
    (void)self;
    return rbi_host_stream_call(stream, function, user);
}

static rebatch_status host_event_create(void *self, rbi_event *out)
{
    (void)self;
    return rbi_host_event_create(out);
}

static void host_event_destroy(void *self, rbi_event event)
{
    (void)self;
    rbi_host_event_destroy(event);
}

static rebatch_status host_event_record(void *self, rbi_event event)
{
    struct host *host = self;
    rebatch_status status = REBATCH_OK;
    pthread_mutex_lock(&host->lock);
    for (rebatch_stream s = host->streams; s && !status; s = *rbi_host_stream_next(s))
        status = rbi_host_event_record(event, s);
    pthread_mutex_unlock(&host->lock);
    return status;
}

static rebatch_status host_event_query(void *self, rbi_event event, bool *done)
{
    (void)self;
    *done = rbi_host_event_is_done(event);
    return REBATCH_OK;
}

static rebatch_status host_event_synchronize(void *self, rbi_event event)
{
    (void)self;
    rbi_host_event_synchronize(event);
    return REBATCH_OK;
}

/* Each stream has a thread. */
static bool host_is_in_process(void *self)
{
    struct host *host = self;
    pthread_mutex_lock(&host->lock);
    const bool has_none = !host->streams;
    pthread_mutex_unlock(&host->lock);
    return has_none;
}

/* ---- opening ---- */

static const struct rbi_device_ops host_ops = {
    .struct_size = sizeof(struct rbi_device_ops),
    .close = host_close,
    .page_bytes = host_page_bytes,
    .memory = host_memory,
    .alloc = host_alloc,
    .free = host_free,
    .copy = host_copy,
    .fill = host_fill,
    .synchronize = host_synchronize,
    .stream_create = host_stream_create,
    .stream_destroy = host_stream_destroy,
    .stream_synchronize = host_stream_synchronize,
    .stream_call = host_stream_call,
    .event_create = host_event_create,
    .event_destroy = host_event_destroy,
    .event_record = host_event_record,
    .event_query = host_event_query,
    .event_synchronize = host_event_synchronize,
    .stream_is_valid = host_stream_is_valid,
    .is_in_process = host_is_in_process,
    .set_capacity = host_set_capacity,
    .pinned_alloc = host_pinned_alloc,
    .pinned_free = host_pinned_free,
    .reserve = host_reserve,
    .unreserve = host_unreserve,
    .create = host_create,
    .release = host_release,
    .map = host_map,
    .set_access = host_set_access,
    .unmap = host_unmap,
    .host_room = host_host_room,
    .create_shared = host_create,
    .export_physical = host_export,
    .map_export = host_map_export,
    .create_host = host_create_host,
    .release_host = host_release_host,
};

rebatch_status rebatch_device_open_host(rebatch_device **out, size_t capacity_bytes,
                                        const rebatch_host_options *options)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL");
    *out = NULL;
    rebatch_host_options o = REBATCH_HOST_OPTIONS_INIT;
    rebatch_status status =
        rbi_options_copy(&o, sizeof o, RBI_SIZE_TO(rebatch_host_options, page_bytes), options,
                         "rebatch_host_options");
    if (status)
        return status;
    const size_t page = o.page_bytes ? o.page_bytes : DEFAULT_PAGE_BYTES;
    const size_t host_page = (size_t)sysconf(_SC_PAGESIZE);
    if (!rbi_is_power_of_two(page) || page < host_page)
        return rbi_error(REBATCH_E_INVALID,
                         "page_bytes is %zu: expected a power of two of at least %zu", page,
                         host_page);
    status = rbi_device_check_capacity(capacity_bytes, page);
    if (status)
        return status;
    struct host *host = rbi_heap_calloc(1, sizeof *host);
    if (!host)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a host device");
    pthread_mutex_init(&host->lock, NULL);
    host->page_bytes = page;
    host->capacity_bytes = capacity_bytes;
    host->overflow_bytes = o.overflow_bytes;
    host->file = RBI_HOST_FILE_INIT;
    status = rbi_device_create(out, &host_ops, host, "host");
    if (status)
        host_close(host);
    return status;
}
