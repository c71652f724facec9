/* Owns the face of pinned host memory, and the record of what was given out, with its size.
 * Must not know what a device is made of. */
#include "device/device.h"

struct rbi_pinned {
    struct rbi_pinned *next;
    void *memory;
    size_t bytes;
};

/* Where pinned memory is asked for or given back. */
static rebatch_status check(const rebatch_device *device, size_t bytes)
{
    if (!device)
        return rbi_error(REBATCH_E_INVALID, "device is NULL");
    if (!device->ops->pinned_alloc)
        return rbi_error(REBATCH_E_UNSUPPORTED, "device %s has no pinned host memory",
                         device->name);
    return bytes ? REBATCH_OK : rbi_error(REBATCH_E_INVALID, "bytes is 0: expected at least 1");
}

static void record(rebatch_device *device, struct rbi_pinned *pinned)
{
    pthread_mutex_lock(&device->pinned_lock);
    pinned->next = device->pinned;
    device->pinned = pinned;
    pthread_mutex_unlock(&device->pinned_lock);
}

rebatch_status rebatch_pinned_alloc(void **out, rebatch_device *device, size_t bytes)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL");
    *out = NULL;
    rebatch_status status = check(device, bytes);
    if (status)
        return status;
    struct rbi_pinned *const pinned = rbi_heap_calloc(1, sizeof *pinned);
    if (!pinned)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for %zu pinned bytes", bytes);
    status = device->ops->pinned_alloc(device->self, out, bytes);
    if (status) {
        *out = NULL;
        rbi_heap_free(pinned);
        return status;
    }
    pinned->memory = *out;
    pinned->bytes = bytes;
    record(device, pinned);
    return REBATCH_OK;
}

/* Takes the record of `memory` off the list. The lock is held. */
static rebatch_status take(struct rbi_pinned **out, rebatch_device *device, const void *memory,
                           size_t bytes)
{
    struct rbi_pinned **link = &device->pinned;
    while (*link && (*link)->memory != memory)
        link = &(*link)->next;
    *out = *link;
    if (!*link)
        return rbi_error(REBATCH_E_INVALID,
                         "device %s has given out no pinned memory at %p, or it was freed already",
                         device->name, memory);
    if ((*link)->bytes != bytes)
        return rbi_error(REBATCH_E_INVALID,
                         "bytes is %zu: expected %zu, as the pinned memory at %p was allocated",
                         bytes, (*link)->bytes, memory);
    *link = (*link)->next;
    return REBATCH_OK;
}

rebatch_status rebatch_pinned_free(rebatch_device *device, void *memory, size_t bytes)
{
    struct rbi_pinned *pinned;
    if (device && !memory)
        return REBATCH_OK;
    rebatch_status status = check(device, bytes);
    if (status)
        return status;
    pthread_mutex_lock(&device->pinned_lock);
    status = take(&pinned, device, memory, bytes);
    pthread_mutex_unlock(&device->pinned_lock);
    if (status)
        return status;
    status = device->ops->pinned_free(device->self, memory, bytes);
    if (status)
        record(device, pinned);
    else
        rbi_heap_free(pinned);
    return status;
}

void rbi_pinned_forget(rebatch_device *device)
{
    while (device->pinned) {
        struct rbi_pinned *const pinned = device->pinned;
        device->pinned = pinned->next;
        rbi_heap_free(pinned);
    }
}
