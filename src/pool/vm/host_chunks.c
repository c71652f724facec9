/* Owns the chunks of host memory: making them, where they are mapped, replacing them by chunks of
 * the device at the same addresses. Must not know when host memory may be taken. */
#include "base/base.h"
#include "pool/tuning.h"
#include "pool/vm/calls.h"
#include "pool/vm/spare.h"

/* ---- the list ---- */

struct rbi_host_chunk *rbi_overflow_find(const struct rbi_vm *vm, const char *at)
{
    for (size_t i = 0; i < vm->overflow.count; i++)
        if (vm->overflow.chunks[i].at == at)
            return &vm->overflow.chunks[i];
    return NULL;
}

struct rbi_host_chunk *rbi_overflow_next(const struct rbi_vm *vm, size_t most)
{
    struct rbi_host_chunk *best = NULL;
    for (size_t i = 0; i < vm->overflow.count; i++) {
        struct rbi_host_chunk *const chunk = &vm->overflow.chunks[i];
        if (!chunk->at && (size_t)1 << chunk->size <= most && (!best || chunk->size > best->size))
            best = chunk;
    }
    return best;
}

size_t rbi_overflow_unmapped_pages(const struct rbi_vm *vm)
{
    size_t pages = 0;
    for (size_t i = 0; i < vm->overflow.count; i++)
        if (!vm->overflow.chunks[i].at)
            pages += (size_t)1 << vm->overflow.chunks[i].size;
    return pages;
}

static bool prepare(struct rbi_overflow *overflow)
{
    if (overflow->count < overflow->capacity)
        return true;
    const size_t capacity = rbi_max(2 * overflow->capacity, 64);
    struct rbi_host_chunk *chunks = rbi_heap_resize(overflow->chunks, capacity, sizeof *chunks);
    if (!chunks)
        return false;
    overflow->chunks = chunks;
    overflow->capacity = capacity;
    return true;
}

static void give_back(struct rbi_vm *vm, struct rbi_host_chunk *chunk)
{
    struct rbi_overflow *const overflow = &vm->overflow;
    const size_t bytes = vm->page_bytes << chunk->size;
    chunk->at = NULL;
    if (rbi_call_release(vm, chunk->chunk, bytes, true) != REBATCH_OK)
        return; /* the next to be mapped */
    overflow->bytes -= bytes;
    rbi_vm_note_given(vm, bytes);
    *chunk = overflow->chunks[--overflow->count];
}

void rbi_overflow_drop(struct rbi_vm *vm)
{
    for (size_t i = vm->overflow.count; i-- > 0;)
        if (!vm->overflow.chunks[i].at)
            give_back(vm, &vm->overflow.chunks[i]);
}

void rbi_overflow_close(struct rbi_vm *vm)
{
    rbi_overflow_drop(vm);
    rbi_heap_free(vm->overflow.chunks);
}

/* ---- making ---- */

static rebatch_status make(struct rbi_vm *vm, unsigned size)
{
    struct rbi_overflow *const overflow = &vm->overflow;
    rbi_physical chunk;
    const size_t bytes = vm->page_bytes << size;
    if (!prepare(overflow))
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory to note another %zu bytes", bytes);
    const rebatch_status status = rbi_call_create(vm, &chunk, bytes, RBI_MEMORY_HOST);
    if (status != REBATCH_OK)
        return status;
    overflow->chunks[overflow->count++] = (struct rbi_host_chunk){NULL, chunk, size};
    overflow->bytes += bytes;
    overflow->total_bytes += bytes;
    overflow->peak_bytes = rbi_max(overflow->peak_bytes, overflow->bytes);
    rbi_vm_note_taken(vm, bytes);
    return REBATCH_OK;
}

/* The largest first, as they are taken. */
size_t rbi_overflow_pages_at_hand(const struct rbi_vm *vm, size_t count)
{
    size_t of_size[RBI_OVERFLOW_LARGEST + 1] = {0}, pages = 0;
    for (size_t i = 0; i < vm->overflow.count; i++)
        of_size[vm->overflow.chunks[i].size] += !vm->overflow.chunks[i].at;
    for (unsigned size = RBI_OVERFLOW_LARGEST + 1; size-- > 0;)
        pages += rbi_min(of_size[size], (count - pages) >> size) << size;
    return pages;
}

rebatch_status rbi_overflow_make(struct rbi_vm *vm, size_t count)
{
    size_t made = rbi_overflow_pages_at_hand(vm, count);
    unsigned size = RBI_OVERFLOW_LARGEST;
    while (made < count) {
        while ((size_t)1 << size > count - made)
            size--;
        const rebatch_status status = make(vm, size);
        if (status == REBATCH_OK) {
            made += (size_t)1 << size;
        } else if (status == REBATCH_OOM && size > 0) {
            size--;
        } else {
            rbi_overflow_drop(vm);
            return status;
        }
    }
    return REBATCH_OK;
}

/* Pages of several holes come one hole after the other: a chunk may be larger than the hole. */
rebatch_status rbi_overflow_break(struct rbi_vm *vm, size_t most)
{
    while (!rbi_overflow_next(vm, most)) {
        struct rbi_host_chunk *const larger = rbi_overflow_next(vm, SIZE_MAX);
        if (!larger)
            return REBATCH_OOM;
        const size_t before = vm->overflow.count;
        const unsigned half = larger->size - 1;
        give_back(vm, larger);
        if (vm->overflow.count == before)
            return rbi_error(REBATCH_OOM, "the host did not take back memory that is too large");
        rebatch_status status = make(vm, half);
        if (status == REBATCH_OK)
            status = make(vm, half);
        if (status != REBATCH_OK)
            return status;
    }
    return REBATCH_OK;
}

/* ---- replacing one ---- */

static rebatch_status copy_to(struct rbi_vm *vm, void *beside, rbi_physical chunk,
                              const struct rbi_host_chunk *from)
{
    const size_t bytes = vm->page_bytes << from->size;
    rebatch_status status = rbi_call_map(vm, beside, bytes, chunk);
    if (status != REBATCH_OK)
        return status;
    status = rbi_call_set_access(vm, beside, bytes, 1);
    if (status == REBATCH_OK)
        status = rebatch_copy(vm->device, beside, from->at, bytes, NULL);
    const rebatch_status done = rbi_device_synchronize(vm->device);
    const rebatch_status unmapped = rbi_call_unmap(vm, beside, bytes);
    return status ? status : done ? done : unmapped;
}

/* Maps `chunk` where `host` is. Where that fails, `host` is there again. */
static rebatch_status exchange(struct rbi_vm *vm, const struct rbi_host_chunk *host,
                               rbi_physical chunk)
{
    rbi_assert(host->at);
    const size_t bytes = vm->page_bytes << host->size;
    rebatch_status status = rbi_call_unmap(vm, host->at, bytes);
    if (status != REBATCH_OK)
        return status;
    status = rbi_call_map(vm, host->at, bytes, chunk);
    if (status == REBATCH_OK) {
        status = rbi_call_set_access(vm, host->at, bytes, 1);
        if (status == REBATCH_OK)
            return REBATCH_OK;
        (void)rbi_call_unmap(vm, host->at, bytes);
    }
    rebatch_status back = rbi_call_map(vm, host->at, bytes, host->chunk);
    if (back == REBATCH_OK)
        back = rbi_call_set_access(vm, host->at, bytes, 1);
    return back ? rbi_error(REBATCH_E_DEVICE,
                            "the device did not map %zu bytes again at %p, where blocks in use lie",
                            bytes, (void *)host->at)
                : status;
}

rebatch_status rbi_overflow_move(struct rbi_vm *vm, struct rbi_map *map, size_t index, void *beside)
{
    struct rbi_host_chunk *const host = &vm->overflow.chunks[index];
    const unsigned size = host->size;
    rebatch_status status = rbi_spare_make(vm, size);
    if (status != REBATCH_OK)
        return status;
    const rbi_physical chunk = rbi_spare_newest(vm, size);
    status = copy_to(vm, beside, chunk, host);
    if (status == REBATCH_OK)
        status = exchange(vm, host, chunk);
    if (status != REBATCH_OK) {
        rbi_spare_give_back(vm, size);
        return status;
    }
    map->chunks[(size_t)(host->at - map->address) >> map->page_shift] = chunk;
    rbi_spare_drop(vm, size);
    give_back(vm, host);
    return REBATCH_OK;
}
