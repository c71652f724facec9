/* Owns the public face of every device: argument checks, and the one test for optional operations.
 * Must not know what a device is made of. */
#include "device/device.h"

#include <stdio.h>

#include "rebatch/cuda.h"

rebatch_status rbi_device_create(rebatch_device **out, const struct rbi_device_ops *ops, void *self,
                                 const char *name)
{
    rbi_assert(ops->close && ops->page_bytes && ops->memory && ops->alloc && ops->free);
    *out = NULL;
    rebatch_device *device = rbi_heap_calloc(1, sizeof *device);
    if (!device)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for device %s", name);
    device->ops = ops;
    device->self = self;
    device->others.bytes = SIZE_MAX;
    (void)pthread_mutex_init(&device->given_lock, NULL);
    (void)snprintf(device->name, sizeof device->name, "%s", name);
    *out = device;
    return REBATCH_OK;
}

void rebatch_device_close(rebatch_device *device)
{
    if (!device)
        return;
    const size_t users = atomic_load(&device->users);
    if (users) {
        (void)rbi_error(REBATCH_E_STATE,
                        "device %s stays open: what is open on it is %zu, expected 0 pools "
                        "and sessions",
                        device->name, users);
        return;
    }
    device->ops->close(device->self);
    rbi_given_forget(device->pinned);
    rbi_given_forget(device->exports);
    (void)pthread_mutex_destroy(&device->given_lock);
    rbi_heap_free(device);
}

void rbi_device_hold(rebatch_device *device)
{
    atomic_fetch_add(&device->users, 1);
}

void rbi_device_let_go(rebatch_device *device)
{
    const size_t users = atomic_fetch_sub(&device->users, 1);
    rbi_assert(users > 0);
    (void)users;
}

const char *rebatch_device_name(const rebatch_device *device)
{
    return device ? device->name : "";
}

static rebatch_status check_device(const rebatch_device *device)
{
    return device ? REBATCH_OK : rbi_error(REBATCH_E_INVALID, "device is NULL");
}

/* Every call that takes a stream of the user's goes through here. */
static rebatch_status check_stream(rebatch_device *device, rebatch_stream stream)
{
    if (!device)
        return check_device(device);
    if (!rbi_device_stream_is_valid(device, stream))
        return rbi_error(REBATCH_E_INVALID, "stream %p is not a stream of device %s",
                         (void *)stream, device->name);
    return REBATCH_OK;
}

rebatch_status rebatch_device_memory(rebatch_device *device, rebatch_memory_info *out)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL");
    *out = (rebatch_memory_info){0};
    const rebatch_status status = check_device(device);
    return status ? status : device->ops->memory(device->self, out);
}

rebatch_status rebatch_device_set_capacity(rebatch_device *device, size_t capacity_bytes)
{
    const rebatch_status status = check_device(device);
    if (status)
        return status;
    if (!device->ops->set_capacity)
        return rbi_error(REBATCH_E_UNSUPPORTED, "device %s has no capacity that can be set",
                         device->name);
    return device->ops->set_capacity(device->self, capacity_bytes);
}

rebatch_status rebatch_device_ordinal(int *out, const rebatch_device *device)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL");
    *out = -1;
    const rebatch_status status = check_device(device);
    if (status)
        return status;
    if (!device->ops->ordinal)
        return rbi_error(REBATCH_E_UNSUPPORTED, "the device is \"%s\": expected an NVIDIA GPU",
                         device->name);
    return device->ops->ordinal(device->self, out);
}

rebatch_status rbi_device_synchronize(rebatch_device *device)
{
    const rebatch_status status = check_device(device);
    if (status || !device->ops->synchronize)
        return status;
    return device->ops->synchronize(device->self);
}

rebatch_status rebatch_stream_create(rebatch_stream *out, rebatch_device *device)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL");
    *out = NULL;
    const rebatch_status status = check_device(device);
    return status ? status : device->ops->stream_create(device->self, out);
}

void rebatch_stream_destroy(rebatch_device *device, rebatch_stream stream)
{
    if (device && stream && rbi_device_stream_is_valid(device, stream))
        device->ops->stream_destroy(device->self, stream);
}

rebatch_status rebatch_stream_synchronize(rebatch_device *device, rebatch_stream stream)
{
    const rebatch_status status = check_stream(device, stream);
    return status ? status : device->ops->stream_synchronize(device->self, stream);
}

rebatch_status rebatch_stream_call(rebatch_device *device, rebatch_stream stream,
                                   void (*function)(void *user), void *user)
{
    const rebatch_status status = check_stream(device, stream);
    if (status)
        return status;
    if (!function)
        return rbi_error(REBATCH_E_INVALID, "function is NULL");
    return device->ops->stream_call(device->self, stream, function, user);
}

/* Where memory is read or written. */
static rebatch_status check_contents(rebatch_device *device, rebatch_stream stream)
{
    const rebatch_status status = check_stream(device, stream);
    if (status || rbi_device_has_contents(device))
        return status;
    return rbi_error(REBATCH_E_UNSUPPORTED, "device %s has no contents to read or write",
                     device->name);
}

/* What can be known of a range on any device; `name` is the argument's. */
static rebatch_status check_range(const void *address, size_t bytes, const char *name)
{
    if (!address)
        return rbi_error(REBATCH_E_INVALID, "%s is NULL: expected %zu bytes there", name, bytes);
    if (bytes > UINTPTR_MAX - (uintptr_t)address)
        return rbi_error(REBATCH_E_INVALID, "the %zu bytes at %p (%s) end beyond the last address",
                         bytes, address, name);
    return REBATCH_OK;
}

rebatch_status rebatch_copy(rebatch_device *device, void *to, const void *from, size_t bytes,
                            rebatch_stream stream)
{
    rebatch_status status = check_contents(device, stream);
    if (status || bytes == 0)
        return status;
    status = check_range(to, bytes, "to");
    if (!status)
        status = check_range(from, bytes, "from");
    if (status)
        return status;
    const uintptr_t a = (uintptr_t)to;
    const uintptr_t b = (uintptr_t)from;
    if ((a > b ? a - b : b - a) < bytes)
        return rbi_error(REBATCH_E_INVALID, "the %zu bytes at %p and at %p overlap", bytes, to,
                         from);
    return device->ops->copy(device->self, to, from, bytes, stream);
}

rebatch_status rebatch_fill(rebatch_device *device, void *to, uint8_t value, size_t bytes,
                            rebatch_stream stream)
{
    rebatch_status status = check_contents(device, stream);
    if (status || bytes == 0)
        return status;
    status = check_range(to, bytes, "to");
    return status ? status : device->ops->fill(device->self, to, value, bytes, stream);
}

/* ---- for the rest of the library ---- */

rebatch_status rbi_device_check_capacity(size_t capacity_bytes, size_t page_bytes)
{
    if (capacity_bytes >= page_bytes)
        return REBATCH_OK;
    return rbi_error(REBATCH_E_INVALID,
                     "capacity_bytes is %zu: expected at least one page of %zu bytes",
                     capacity_bytes, page_bytes);
}

size_t rbi_device_page_bytes(const rebatch_device *device)
{
    return device->ops->page_bytes(device->self);
}

rebatch_status rbi_device_alloc(rebatch_device *device, void **out, size_t bytes)
{
    *out = NULL;
    return device->ops->alloc(device->self, out, bytes);
}

rebatch_status rbi_device_free(rebatch_device *device, void *memory, size_t bytes)
{
    return device->ops->free(device->self, memory, bytes);
}

bool rbi_device_has_virtual_memory(const rebatch_device *device)
{
    return device->ops->reserve != NULL;
}

rebatch_status rbi_device_reserve(rebatch_device *device, void **out, size_t bytes)
{
    *out = NULL;
    return device->ops->reserve(device->self, out, bytes);
}

rebatch_status rbi_device_unreserve(rebatch_device *device, void *address, size_t bytes)
{
    return device->ops->unreserve(device->self, address, bytes);
}

rebatch_status rbi_device_create_physical(rebatch_device *device, rbi_physical *out, size_t bytes)
{
    *out = 0;
    return device->ops->create(device->self, out, bytes);
}

rebatch_status rbi_device_release_physical(rebatch_device *device, rbi_physical physical,
                                           size_t bytes)
{
    return device->ops->release(device->self, physical, bytes);
}

bool rbi_device_has_overflow(const rebatch_device *device)
{
    return rbi_device_has_virtual_memory(device) && device->ops->create_host != NULL;
}

size_t rbi_device_host_room(const rebatch_device *device)
{
    return device->ops->host_room(device->self);
}

rebatch_status rbi_device_create_host(rebatch_device *device, rbi_physical *out, size_t bytes)
{
    *out = 0;
    return device->ops->create_host(device->self, out, bytes);
}

rebatch_status rbi_device_release_host(rebatch_device *device, rbi_physical physical, size_t bytes)
{
    return device->ops->release_host(device->self, physical, bytes);
}

rebatch_status rbi_device_map(rebatch_device *device, void *address, size_t bytes,
                              rbi_physical physical)
{
    return device->ops->map(device->self, address, bytes, physical);
}

rebatch_status rbi_device_set_access(rebatch_device *device, void *address, size_t bytes)
{
    return device->ops->set_access(device->self, address, bytes);
}

rebatch_status rbi_device_allow_peer(rebatch_device *device, int ordinal)
{
    if (device->ops->allow_peer)
        return device->ops->allow_peer(device->self, ordinal);
    return rbi_error(REBATCH_E_UNSUPPORTED, "device %s is no GPU: expected one for peer access",
                     device->name);
}

rebatch_status rbi_device_unmap(rebatch_device *device, void *address, size_t bytes)
{
    return device->ops->unmap(device->self, address, bytes);
}

rebatch_status rbi_device_begin_capture(rebatch_device *device, rebatch_stream stream)
{
    if (device->ops->begin_capture)
        return device->ops->begin_capture(device->self, stream);
    return rbi_error(REBATCH_E_UNSUPPORTED, "device %s cannot capture: expected a GPU",
                     device->name);
}

rebatch_status rbi_device_end_capture(rebatch_device *device, rebatch_stream stream, rbi_graph *out)
{
    *out = NULL;
    return device->ops->end_capture(device->self, stream, out);
}

rebatch_status rbi_graph_launch(rebatch_device *device, rbi_graph graph, rebatch_stream stream)
{
    return device->ops->graph_launch(device->self, graph, stream);
}

void rbi_graph_destroy(rebatch_device *device, rbi_graph graph)
{
    if (graph)
        device->ops->graph_destroy(device->self, graph);
}

bool rbi_device_has_contents(const rebatch_device *device)
{
    return device->ops->copy != NULL;
}

bool rbi_device_is_in_process(const rebatch_device *device)
{
    return device->ops->is_in_process && device->ops->is_in_process(device->self);
}

bool rbi_device_stream_is_valid(rebatch_device *device, rebatch_stream stream)
{
    return !stream || !device->ops->stream_is_valid ||
           device->ops->stream_is_valid(device->self, stream);
}

rebatch_status rbi_device_take_last_error(rebatch_device *device)
{
    return device->ops->take_last_error ? device->ops->take_last_error(device->self) : REBATCH_OK;
}

rebatch_status rbi_event_create(rebatch_device *device, rbi_event *out)
{
    *out = NULL;
    return device->ops->event_create(device->self, out);
}

void rbi_event_destroy(rebatch_device *device, rbi_event event)
{
    if (event)
        device->ops->event_destroy(device->self, event);
}

rebatch_status rbi_event_record(rebatch_device *device, rbi_event event)
{
    return device->ops->event_record(device->self, event);
}

rebatch_status rbi_event_query(rebatch_device *device, rbi_event event, bool *done)
{
    *done = false;
    return device->ops->event_query(device->self, event, done);
}

rebatch_status rbi_event_synchronize(rebatch_device *device, rbi_event event)
{
    return device->ops->event_synchronize(device->self, event);
}
