/* Owns the copy of what is held and mapped, over a dry device, which only counts bytes.
 * Must not know what the copy is for. */
#include "base/base.h"
#include "pool/vm/vm.h"

/* The copy's device gives one handle for all the memory: to->spare[i].chunks are all that. */
static bool copy_spare(struct rbi_vm *to, const struct rbi_vm *from, rbi_physical handle)
{
    for (unsigned size = 0; size < RBI_CHUNK_SIZES; size++) {
        struct rbi_spare *const ours = &to->spare[size];
        const struct rbi_spare *const theirs = &from->spare[size];
        ours->chunks = rbi_heap_calloc(theirs->capacity + 1, sizeof *ours->chunks);
        if (!ours->chunks)
            return false;
        ours->capacity = theirs->capacity;
        ours->held = theirs->held;
        while (ours->count < theirs->count)
            ours->chunks[ours->count++] = handle;
    }
    to->held_pages = from->held_pages;
    to->spare_pages = from->spare_pages;
    return true;
}

/* The copy's chunks of host memory are where the original's are; its device counts none. */
static bool copy_overflow(struct rbi_vm *to, const struct rbi_vm *from)
{
    to->overflow = from->overflow;
    to->overflow.chunks = rbi_heap_calloc(from->overflow.count + 1, sizeof *to->overflow.chunks);
    to->overflow.capacity = to->overflow.chunks ? from->overflow.count + 1 : 0;
    if (!to->overflow.chunks) {
        to->overflow.count = 0;
        return false;
    }
    for (size_t i = 0; i < from->overflow.count; i++)
        to->overflow.chunks[i] = from->overflow.chunks[i];
    return true;
}

rebatch_status rbi_vm_copy(rbi_physical *handle, struct rbi_vm *to, const struct rbi_vm *from)
{
    rebatch_status status = REBATCH_OK;
    to->taken_bytes = from->taken_bytes;
    to->given_bytes = from->given_bytes;
    to->broken_bytes = from->broken_bytes;
    to->peak_bytes = from->peak_bytes;
    to->quarantined_bytes = from->quarantined_bytes;
    to->allocations = from->allocations;
    to->frees = from->frees;
    to->calls = from->calls;
    *handle =
        from->overflow.count > 0; /* stands for those of the host, where there are no others */
    if (from->overflow.count && !copy_overflow(to, from))
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory to copy %zu chunks",
                         from->overflow.count);
    if (from->held_pages)
        status =
            rbi_device_create_physical(to->device, handle, from->held_pages * from->page_bytes);
    if (status || from->held_pages == 0)
        return status;
    if (!copy_spare(to, from, *handle))
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory to copy %zu pages", from->held_pages);
    return REBATCH_OK;
}

struct rbi_map *rbi_map_copy(const struct rbi_map *from)
{
    struct rbi_map *to = rbi_heap_calloc(1, sizeof *to + from->pages * sizeof *to->chunks);
    if (!to)
        return NULL;
    to->address = from->address;
    to->pages = from->pages;
    to->page_shift = from->page_shift;
    return to;
}

void rbi_map_copy_chunks(struct rbi_map *to, const struct rbi_map *from, size_t first, size_t end,
                         rbi_physical handle)
{
    for (size_t i = first; i < end; i++) {
        const bool begins = from->chunks[i] != 0 && from->chunks[i] != RBI_CHUNK_GOES_ON;
        to->chunks[i] = begins ? handle : from->chunks[i];
    }
}
