/* Owns the memory that is held from the device: making chunks, keeping the spare ones, giving them
 * back. Must not know where they are mapped, nor what memory is asked for. */
#include <unistd.h>

#include "base/base.h"
#include "pool/tuning.h"
#include "pool/vm/calls.h"
#include "pool/vm/spare.h"

/* ---- counting ---- */

void rbi_vm_note_taken(struct rbi_vm *vm, size_t bytes)
{
    vm->taken_bytes += bytes;
    vm->peak_bytes = rbi_max(vm->peak_bytes, rbi_vm_bytes(vm));
}

void rbi_vm_note_given(struct rbi_vm *vm, size_t bytes)
{
    rbi_assert(rbi_vm_bytes(vm) >= bytes);
    vm->given_bytes += bytes;
}

void rbi_vm_open(struct rbi_vm *vm, rebatch_device *device)
{
    *vm = (struct rbi_vm){.device = device, .page_bytes = rbi_device_page_bytes(device)};
}

void rbi_vm_reset_peak(struct rbi_vm *vm)
{
    vm->peak_bytes = rbi_vm_bytes(vm);
}

/* ---- plain allocations ---- */

rebatch_status rbi_vm_alloc(void **out, struct rbi_vm *vm, size_t bytes)
{
    vm->allocations++;
    const rebatch_status status = rbi_device_alloc(vm->device, out, bytes);
    if (status == REBATCH_OK)
        rbi_vm_note_taken(vm, bytes);
    return status;
}

rebatch_status rbi_vm_free(struct rbi_vm *vm, void *address, size_t bytes)
{
    const rebatch_status status = rbi_device_free(vm->device, address, bytes);
    if (status != REBATCH_OK)
        return status;
    vm->frees++;
    rbi_vm_note_given(vm, bytes);
    return REBATCH_OK;
}

/* ---- spare chunks ---- */

/* There is a place for each chunk that is held, so that an unmapped one always has one. */
static bool prepare_spare(struct rbi_spare *spare)
{
    if (spare->held < spare->capacity)
        return true;
    const size_t capacity = rbi_max(2 * spare->capacity, 64);
    rbi_physical *chunks = rbi_heap_resize(spare->chunks, capacity, sizeof *chunks);
    if (!chunks)
        return false;
    spare->chunks = chunks;
    spare->capacity = capacity;
    return true;
}

void rbi_spare_put(struct rbi_vm *vm, rbi_physical chunk, unsigned size)
{
    rbi_assert(chunk && size < RBI_CHUNK_SIZES);
    struct rbi_spare *spare = &vm->spare[size];
    spare->chunks[spare->count++] = chunk;
    vm->spare_pages += (size_t)1 << size;
}

rbi_physical rbi_spare_newest(const struct rbi_vm *vm, unsigned size)
{
    rbi_assert(vm->spare[size].count > 0);
    return vm->spare[size].chunks[vm->spare[size].count - 1];
}

void rbi_spare_drop(struct rbi_vm *vm, unsigned size)
{
    rbi_assert(vm->spare[size].count > 0 && vm->spare_pages >= (size_t)1 << size);
    vm->spare[size].count--;
    vm->spare_pages -= (size_t)1 << size;
}

unsigned rbi_spare_choose(const struct rbi_vm *vm, size_t most)
{
    rbi_assert(vm->spare_pages > 0);
    unsigned size = RBI_CHUNK_SIZES;
    while (size-- > 0)
        if (vm->spare[size].count && (size_t)1 << size <= most)
            return size;
    while (vm->spare[++size].count == 0)
        ;
    return size;
}

bool rbi_vm_has_large(const struct rbi_vm *vm)
{
    for (unsigned size = 1; size < RBI_CHUNK_SIZES; size++)
        if (vm->spare[size].held > vm->spare[size].count)
            return true;
    return false;
}

/* Gives the newest spare chunk of a size back. */
static rebatch_status release(struct rbi_vm *vm, unsigned size)
{
    const size_t bytes = vm->page_bytes << size;
    const rebatch_status status = rbi_call_release(vm, rbi_spare_newest(vm, size), bytes, false);
    if (status != REBATCH_OK)
        return status; /* it stays spare */
    rbi_spare_drop(vm, size);
    rbi_assert(vm->spare[size].held > vm->spare[size].count);
    vm->spare[size].held--;
    vm->held_pages -= (size_t)1 << size;
    rbi_vm_note_given(vm, bytes);
    return REBATCH_OK;
}

size_t rbi_vm_release(struct rbi_vm *vm, size_t keep)
{
    size_t released = 0;
    while (vm->spare_pages > keep && vm->held_pages > vm->floor_pages) {
        const size_t most = vm->held_pages - vm->floor_pages;
        const unsigned size = rbi_spare_choose(vm, rbi_min(vm->spare_pages - keep, most));
        if ((vm->floor_pages && (size_t)1 << size > most) || release(vm, size) != REBATCH_OK)
            break;
        released += (size_t)1 << size;
    }
    vm->frees += released > 0;
    return released;
}

/* ---- making chunks ---- */

static rebatch_status create_of(struct rbi_vm *vm, unsigned size, enum rbi_memory kind)
{
    rbi_physical chunk;
    const size_t bytes = vm->page_bytes << size;
    if (!prepare_spare(&vm->spare[size]))
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory to note another %zu bytes", bytes);
    const rebatch_status status = rbi_call_create(vm, &chunk, bytes, kind);
    if (status != REBATCH_OK)
        return status;
    rbi_spare_put(vm, chunk, size);
    vm->spare[size].held++;
    vm->held_pages += (size_t)1 << size;
    rbi_vm_note_taken(vm, bytes);
    return REBATCH_OK;
}

static rebatch_status create(struct rbi_vm *vm, unsigned size)
{
    return create_of(vm, size, RBI_MEMORY_OWN);
}

rebatch_status rbi_spare_make(struct rbi_vm *vm, unsigned size)
{
    return create(vm, size);
}

void rbi_spare_give_back(struct rbi_vm *vm, unsigned size)
{
    (void)release(vm, size);
}

/* The largest size up to `most` that has no more than `count` pages, of which there are some. */
static unsigned largest_within(size_t count, unsigned most)
{
    rbi_assert(count > 0);
    const unsigned size = 63 - (unsigned)__builtin_clzll(count);
    return size < most ? size : most;
}

static size_t chunk_of(size_t pages)
{
    return (size_t)1 << largest_within(rbi_max(pages, 1), RBI_CHUNK_SIZES - 1);
}

static size_t least_of(size_t a, size_t b, size_t c)
{
    return rbi_min(rbi_min(a, b), c);
}

rebatch_status rbi_spare_make_shared(struct rbi_vm *vm, size_t most, unsigned *size)
{
    *size = largest_within(most, RBI_CHUNK_SIZES - 1);
    rebatch_status status = create_of(vm, *size, RBI_MEMORY_SHARED);
    while (status == REBATCH_OOM && *size > 0)
        status = create_of(vm, --*size, RBI_MEMORY_SHARED);
    return status;
}

rebatch_status rbi_vm_try_export(struct rbi_vm *vm)
{
    unsigned size;
    int fd;
    rebatch_status status = rbi_device_check_shared(vm->device);
    if (status || (status = rbi_spare_make_shared(vm, 1, &size)))
        return status;
    status = rbi_device_export(vm->device, &fd, rbi_spare_newest(vm, size));
    if (!status)
        (void)close(fd);
    (void)release(vm, size);
    return status;
}

/* A chunk takes the driver about as long as a page, to create, to map and to move. But what a block
 * in use leaves of a chunk is of no use elsewhere, which counts when memory is short. */
size_t rbi_vm_chunk(const struct rbi_vm *vm, size_t count, size_t room)
{
    const size_t ordinary = least_of(count / RBI_CHUNK_PARTS_OF_REQUEST,
                                     room / RBI_CHUNK_PARTS_OF_ROOM, RBI_CHUNK_ORDINARY_MOST);
    const size_t growth = least_of(vm->held_pages / RBI_CHUNK_PARTS_OF_HELD,
                                   room / RBI_CHUNK_PARTS_OF_PLENTY, RBI_CHUNK_GROWTH_MOST);
    return chunk_of(rbi_max(rbi_max(ordinary, growth), count / RBI_CHUNK_PARTS_OF_HUGE));
}

size_t rbi_vm_chunk_ahead(size_t count)
{
    return chunk_of(count / RBI_CHUNK_PARTS_OF_AHEAD);
}

/* Gives what was made since back. */
static void unmake(struct rbi_vm *vm, const size_t before[static RBI_CHUNK_SIZES])
{
    for (unsigned size = 0; size < RBI_CHUNK_SIZES; size++)
        while (vm->spare[size].count > before[size] && release(vm, size) == REBATCH_OK)
            ;
}

rebatch_status rbi_vm_create(struct rbi_vm *vm, size_t count, size_t chunk)
{
    rbi_assert(count > 0 && chunk > 0 && (chunk & (chunk - 1)) == 0);
    size_t before[RBI_CHUNK_SIZES];
    for (unsigned size = 0; size < RBI_CHUNK_SIZES; size++)
        before[size] = vm->spare[size].count;
    vm->allocations++;
    unsigned most = RBI_CHUNK_SIZES - 1; /* what the device has in one chunk */
    for (size_t made = 0; made < count;) {
        const unsigned size = largest_within(rbi_min(count - made, chunk), most);
        const rebatch_status status = create(vm, size);
        if (status == REBATCH_OK) {
            made += (size_t)1 << size;
        } else if (status == REBATCH_OOM && size > 0) {
            most = size - 1;
        } else {
            unmake(vm, before);
            return status;
        }
    }
    return REBATCH_OK;
}

rebatch_status rbi_spare_break(struct rbi_vm *vm, unsigned size)
{
    rebatch_status status = release(vm, size);
    if (status == REBATCH_OK)
        status = create(vm, 0);
    for (unsigned smaller = size; status == REBATCH_OK && smaller-- > 0;)
        status = create(vm, smaller);
    if (status == REBATCH_OK)
        vm->broken_bytes += vm->page_bytes << size;
    return status;
}

void rbi_vm_destroy(struct rbi_vm *vm)
{
    vm->floor_pages = 0;
    (void)rbi_vm_release(vm, 0);
    for (unsigned size = 0; size < RBI_CHUNK_SIZES; size++)
        rbi_heap_free(vm->spare[size].chunks);
}
