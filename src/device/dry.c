/* Owns the dry device: it answers as a device of some capacity would, with nothing behind it.
 * Must not know what the addresses are used for. */
#include <pthread.h>

#include "device/device.h"

#define DEFAULT_PAGE_BYTES ((size_t)2 << 20)
#define LEAST_PAGE_BYTES 4096
/* Addresses that no mapping of the process will ever have on x86-64 and arm64 with 48-bit addresses
 * (the upper half of 57 bits), so that touching one faults. */
#define FIRST_ADDRESS ((uintptr_t)1 << 52)

struct dry {
    size_t page_bytes;
    pthread_mutex_t lock; /* of everything below */
    size_t capacity_bytes;
    size_t used_bytes;
    uintptr_t next_address; /* addresses are used once */
    rbi_physical next_physical;
};

/* Streams and events hold nothing: work on them is done as soon as it is enqueued. */
struct rebatch_stream_object {
    char unused;
};

static void dry_close(void *self)
{
    struct dry *dry = self;
    pthread_mutex_destroy(&dry->lock);
    rbi_heap_free(dry);
}

static size_t dry_page_bytes(void *self)
{
    return ((struct dry *)self)->page_bytes;
}

/* ---- memory ---- */

static rebatch_status dry_memory(void *self, rebatch_memory_info *out)
{
    struct dry *dry = self;
    pthread_mutex_lock(&dry->lock);
    out->total_bytes = dry->capacity_bytes;
    out->used_bytes = dry->used_bytes;
    pthread_mutex_unlock(&dry->lock);
    out->free_bytes = out->total_bytes > out->used_bytes ? out->total_bytes - out->used_bytes : 0;
    return REBATCH_OK;
}

/* Addresses end where the kernel's begin. */
static rebatch_status take_addresses(struct dry *dry, size_t bytes, void **address)
{
    rbi_assert(dry->next_address >= FIRST_ADDRESS && dry->next_address <= INTPTR_MAX);
    if (bytes > (size_t)INTPTR_MAX - dry->next_address)
        return rbi_error(REBATCH_OOM, "the dry device has no addresses left for %zu bytes", bytes);
    *address = (void *)dry->next_address;
    dry->next_address += bytes;
    return REBATCH_OK;
}

/* Takes `bytes` of the capacity and, where asked for, of the addresses. */
static rebatch_status take(struct dry *dry, size_t bytes, void **address, rbi_physical *physical)
{
    rebatch_status status = REBATCH_OK;
    pthread_mutex_lock(&dry->lock);
    if (dry->used_bytes > dry->capacity_bytes || bytes > dry->capacity_bytes - dry->used_bytes) {
        status = rbi_error(REBATCH_OOM, "the dry device has no room for %zu bytes", bytes);
    } else {
        if (address)
            status = take_addresses(dry, bytes, address);
        if (!status)
            dry->used_bytes += bytes;
        rbi_assert(dry->used_bytes <= dry->capacity_bytes);
        if (!status && physical)
            *physical = dry->next_physical++;
    }
    pthread_mutex_unlock(&dry->lock);
    return status;
}

static rebatch_status give(struct dry *dry, size_t bytes)
{
    pthread_mutex_lock(&dry->lock);
    rbi_assert(bytes <= dry->used_bytes);
    dry->used_bytes -= bytes;
    pthread_mutex_unlock(&dry->lock);
    return REBATCH_OK;
}

static rebatch_status dry_alloc(void *self, void **out, size_t bytes)
{
    return take(self, bytes, out, NULL);
}

static rebatch_status dry_free(void *self, void *memory, size_t bytes)
{
    (void)memory;
    return give(self, bytes);
}

static rebatch_status dry_reserve(void *self, void **out, size_t bytes)
{
    struct dry *dry = self;
    pthread_mutex_lock(&dry->lock);
    const rebatch_status status = take_addresses(dry, bytes, out);
    pthread_mutex_unlock(&dry->lock);
    return status;
}

static rebatch_status dry_create(void *self, rbi_physical *out, size_t bytes)
{
    return take(self, bytes, NULL, out);
}

static rebatch_status dry_release(void *self, rbi_physical physical, size_t bytes)
{
    (void)physical;
    return give(self, bytes);
}

static rebatch_status dry_map(void *self, void *address, size_t bytes, rbi_physical physical)
{
    (void)self;
    (void)address;
    (void)bytes;
    (void)physical;
    return REBATCH_OK;
}

static size_t dry_host_room(void *self)
{
    (void)self;
    return 0;
}

/* A copy of a pool has the host's memory of the original, which counts nowhere. */
static rebatch_status dry_create_host(void *self, rbi_physical *out, size_t bytes)
{
    (void)bytes;
    struct dry *dry = self;
    pthread_mutex_lock(&dry->lock);
    *out = dry->next_physical++;
    pthread_mutex_unlock(&dry->lock);
    return REBATCH_OK;
}

static rebatch_status dry_release_host(void *self, rbi_physical physical, size_t bytes)
{
    (void)self;
    (void)physical;
    (void)bytes;
    return REBATCH_OK;
}

/* set_access, unmap and unreserve: there is nothing to do. */
static rebatch_status dry_range(void *self, void *address, size_t bytes)
{
    (void)self;
    (void)address;
    (void)bytes;
    return REBATCH_OK;
}

static rebatch_status dry_set_capacity(void *self, size_t capacity_bytes)
{
    struct dry *dry = self;
    const rebatch_status status = rbi_device_check_capacity(capacity_bytes, dry->page_bytes);
    if (status)
        return status;
    pthread_mutex_lock(&dry->lock);
    dry->capacity_bytes = capacity_bytes;
    pthread_mutex_unlock(&dry->lock);
    return REBATCH_OK;
}

/* ---- streams ---- */

static rebatch_status dry_stream_create(void *self, rebatch_stream *out)
{
    (void)self;
    *out = rbi_heap_calloc(1, sizeof **out);
    return *out ? REBATCH_OK : rbi_error(REBATCH_E_HOST_OOM, "no host memory for a stream");
}

static void dry_stream_destroy(void *self, rebatch_stream stream)
{
    (void)self;
    rbi_heap_free(stream);
}

static rebatch_status dry_stream_synchronize(void *self, rebatch_stream stream)
{
    (void)self;
    (void)stream;
    return REBATCH_OK;
}

static rebatch_status dry_stream_call(void *self, rebatch_stream stream, void (*function)(void *),
                                      void *user)
{
    (void)self;
    (void)stream;
    function(user);
    return REBATCH_OK;
}

static rebatch_status dry_event_create(void *self, rbi_event *out)
{
    *out = self; /* all events are alike */
    return REBATCH_OK;
}

static void dry_event_destroy(void *self, rbi_event event)
{
    (void)self;
    (void)event;
}

static rebatch_status dry_event_record(void *self, rbi_event event)
{
    (void)self;
    (void)event;
    return REBATCH_OK;
}

static rebatch_status dry_event_query(void *self, rbi_event event, bool *done)
{
    (void)self;
    (void)event;
    *done = true;
    return REBATCH_OK;
}

static rebatch_status dry_event_synchronize(void *self, rbi_event event)
{
    (void)self;
    (void)event;
    return REBATCH_OK;
}

/* ---- opening ---- */

/* What every dry device has. */
#define DRY_OPS                                                                                    \
    .struct_size = sizeof(struct rbi_device_ops), .close = dry_close,                              \
    .page_bytes = dry_page_bytes, .memory = dry_memory, .alloc = dry_alloc, .free = dry_free,      \
    .stream_create = dry_stream_create, .stream_destroy = dry_stream_destroy,                      \
    .stream_synchronize = dry_stream_synchronize, .stream_call = dry_stream_call,                  \
    .event_create = dry_event_create, .event_destroy = dry_event_destroy,                          \
    .event_record = dry_event_record, .event_query = dry_event_query,                              \
    .event_synchronize = dry_event_synchronize, .set_capacity = dry_set_capacity

static const struct rbi_device_ops plain_ops = {DRY_OPS};

/* An H100's with driver 580: means over some thousand calls for pieces of 2 to 128 MiB. */
static const struct rbi_device_prices prices = {
    .create = 12000, .release = 12000, .map = 1500, .unmap = 20000, .access = 30000};

static const struct rbi_device_ops virtual_ops = {
    DRY_OPS,
    .prices = &prices,
    .reserve = dry_reserve,
    .unreserve = dry_range,
    .create = dry_create,
    .release = dry_release,
    .map = dry_map,
    .set_access = dry_range,
    .unmap = dry_range,
    .host_room = dry_host_room,
    .create_host = dry_create_host,
    .release_host = dry_release_host,
};

rebatch_status rebatch_device_open_dry(rebatch_device **out, size_t capacity_bytes,
                                       size_t page_bytes)
{
    return rbi_device_open_dry(out, capacity_bytes, page_bytes, true);
}

rebatch_status rbi_device_open_dry(rebatch_device **out, size_t capacity_bytes, size_t page_bytes,
                                   bool has_virtual_memory)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL");
    *out = NULL;
    const size_t page = page_bytes ? page_bytes : DEFAULT_PAGE_BYTES;
    if (!rbi_is_power_of_two(page) || page < LEAST_PAGE_BYTES)
        return rbi_error(REBATCH_E_INVALID,
                         "page_bytes is %zu: expected a power of two of at least %d", page,
                         LEAST_PAGE_BYTES);
    rebatch_status status = rbi_device_check_capacity(capacity_bytes, page);
    if (status)
        return status;
    struct dry *dry = rbi_heap_calloc(1, sizeof *dry);
    if (!dry)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a dry device");
    pthread_mutex_init(&dry->lock, NULL);
    dry->page_bytes = page;
    dry->capacity_bytes = capacity_bytes;
    dry->next_address = FIRST_ADDRESS;
    dry->next_physical = 1;
    status = rbi_device_create(out, has_virtual_memory ? &virtual_ops : &plain_ops, dry, "dry");
    if (status)
        dry_close(dry);
    return status;
}
