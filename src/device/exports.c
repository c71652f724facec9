/* Owns memory between two processes: descriptors of a device's memory, and mapping those of another
 * process. Must not know which blocks lie there. */
#include <fcntl.h>
#include <stdio.h>

#include "device/device.h"
#include "rebatch/sharing.h"

rebatch_status rbi_device_check_shared(const rebatch_device *device)
{
    return device->ops->create_shared
               ? REBATCH_OK
               : rbi_error(REBATCH_E_UNSUPPORTED,
                           "device %s gives no file descriptors for its memory: other processes "
                           "cannot map it",
                           device->name);
}

rebatch_status rbi_device_create_shared(rebatch_device *device, rbi_physical *out, size_t bytes)
{
    *out = 0;
    return device->ops->create_shared(device->self, out, bytes);
}

rebatch_status rbi_device_export(rebatch_device *device, int *fd, rbi_physical physical)
{
    *fd = -1;
    const rebatch_status status = device->ops->export_physical(device->self, fd, physical);
    if (!status)
        (void)fcntl(*fd, F_SETFD, FD_CLOEXEC);
    return status;
}

/* ---- the reader ---- */

static rebatch_status check(const rebatch_device *device, const rebatch_export_piece *pieces,
                            size_t count)
{
    if (!device || !pieces || count == 0)
        return rbi_error(REBATCH_E_INVALID, "%s: expected what was exported",
                         !device  ? "device is NULL"
                         : pieces ? "count is 0"
                                  : "pieces is NULL");
    const size_t page = rbi_device_page_bytes(device);
    size_t end = 0;
    for (size_t i = 0; i < count; i++) {
        const rebatch_export_piece *const p = &pieces[i];
        if (p->offset < end || p->offset % page || p->bytes == 0 || p->bytes % page ||
            !rbi_add(p->offset, p->bytes, &end))
            return rbi_error(
                REBATCH_E_INVALID,
                "piece %zu has %zu bytes at %zu: expected whole pages of %zu bytes, in "
                "order",
                i, p->bytes, p->offset, page);
    }
    return REBATCH_OK;
}

static size_t extent_of(const rebatch_export_piece *pieces, size_t count)
{
    return pieces[count - 1].offset + pieces[count - 1].bytes;
}

/* Unmaps the first `count` of `all` pieces, and gives the addresses back. */
static rebatch_status unmap(rebatch_device *device, char *address,
                            const rebatch_export_piece *pieces, size_t count, size_t all)
{
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < count && !status; i++)
        status = rbi_device_unmap(device, address + pieces[i].offset, pieces[i].bytes);
    return status ? status : rbi_device_unreserve(device, address, extent_of(pieces, all));
}

static void say(const rebatch_export_piece *piece, size_t number, rebatch_status status)
{
    char why[256];
    (void)snprintf(why, sizeof why, "%s", rebatch_last_error());
    (void)rbi_error(status,
                    "piece %zu has %zu bytes in fd %d, which cannot be mapped: expected offsets, "
                    "sizes and descriptors as another process has exported them (%s)",
                    number, piece->bytes, piece->fd, why);
}

/* Offsets and sizes as one number, which is not 0. */
static size_t shape_of(const rebatch_export_piece *pieces, size_t count)
{
    uint64_t shape = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < count; i++) {
        shape = (shape ^ pieces[i].offset) * UINT64_C(0x100000001b3);
        shape = (shape ^ pieces[i].bytes) * UINT64_C(0x100000001b3);
    }
    return (size_t)shape | 1;
}

static rebatch_status map(void *address, rebatch_device *device, const rebatch_export_piece *pieces,
                          size_t count)
{
    rebatch_status status = REBATCH_OK;
    size_t mapped = 0;
    while (mapped < count && !status) {
        char *const at = (char *)address + pieces[mapped].offset;
        const size_t bytes = pieces[mapped].bytes;
        status = device->ops->map_export(device->self, at, bytes, pieces[mapped].fd);
        if (status && status != REBATCH_OOM)
            say(&pieces[mapped], mapped, status);
        mapped += !status;
    }
    if (status)
        (void)unmap(device, address, pieces, mapped, count);
    return status;
}

rebatch_status rebatch_export_map(void **out, rebatch_device *device,
                                  const rebatch_export_piece *pieces, size_t count)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL: expected where to put the address");
    *out = NULL;
    void *address;
    rebatch_status status = check(device, pieces, count);
    if (status || (status = rbi_device_check_shared(device)))
        return status;
    struct rbi_given *const given = rbi_heap_calloc(1, sizeof *given);
    if (!given)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for the record of an export");
    status = rbi_device_reserve(device, &address, extent_of(pieces, count));
    if (!status)
        status = map(address, device, pieces, count);
    if (status) {
        rbi_heap_free(given);
        return status;
    }
    given->address = *out = address;
    given->size = shape_of(pieces, count);
    rbi_given_add(device, &device->exports, given);
    return REBATCH_OK;
}

rebatch_status rebatch_export_unmap(rebatch_device *device, void *address,
                                    const rebatch_export_piece *pieces, size_t count)
{
    size_t known;
    rebatch_status status = check(device, pieces, count);
    if (status || !address)
        return status;
    struct rbi_given *const given =
        rbi_given_take(device, &device->exports, address, shape_of(pieces, count), &known);
    if (!given)
        return rbi_error(REBATCH_E_INVALID, "address is %p, %s", address,
                         known ? "and the pieces are others than those that were mapped there"
                               : "where no export is mapped, or it was unmapped already");
    status = unmap(device, address, pieces, count, count);
    if (status)
        rbi_given_add(device, &device->exports, given);
    else
        rbi_heap_free(given);
    return status;
}
