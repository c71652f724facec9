/* Owns the face of pinned host memory.
 * Must not know what a device is made of. */
#include "device/device.h"

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

rebatch_status rebatch_pinned_alloc(void **out, rebatch_device *device, size_t bytes)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL");
    *out = NULL;
    rebatch_status status = check(device, bytes);
    if (status)
        return status;
    struct rbi_given *const pinned = rbi_heap_calloc(1, sizeof *pinned);
    if (!pinned)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for %zu pinned bytes", bytes);
    status = device->ops->pinned_alloc(device->self, out, bytes);
    if (status) {
        *out = NULL;
        rbi_heap_free(pinned);
        return status;
    }
    pinned->address = *out;
    pinned->size = bytes;
    rbi_given_add(device, &device->pinned, pinned);
    return REBATCH_OK;
}

rebatch_status rebatch_pinned_free(rebatch_device *device, void *memory, size_t bytes)
{
    size_t known;
    if (device && !memory)
        return REBATCH_OK;
    rebatch_status status = check(device, bytes);
    if (status)
        return status;
    struct rbi_given *const pinned = rbi_given_take(device, &device->pinned, memory, bytes, &known);
    if (!pinned && known)
        return rbi_error(REBATCH_E_INVALID,
                         "bytes is %zu: expected %zu, as the pinned memory at %p was allocated",
                         bytes, known, memory);
    if (!pinned)
        return rbi_error(REBATCH_E_INVALID,
                         "device %s has given out no pinned memory at %p, or it was freed already",
                         device->name, memory);
    status = device->ops->pinned_free(device->self, memory, bytes);
    if (status)
        rbi_given_add(device, &device->pinned, pinned);
    else
        rbi_heap_free(pinned);
    return status;
}
