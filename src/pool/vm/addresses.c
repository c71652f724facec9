/* Owns address ranges and what is mapped there: mapping and unmapping, and where chunks begin.
 * Must not know blocks, nor why memory is mapped.
 *
 * A large chunk can only be unmapped as a whole, and then keeps free memory from where it is
 * needed. */
#include <string.h>

#include "base/base.h"
#include "pool/vm/calls.h"
#include "pool/vm/spare.h"

static size_t index_of(const struct rbi_map *map, const char *at)
{
    rbi_assert(at >= map->address);
    return (size_t)(at - map->address) >> map->page_shift;
}

static size_t page_bytes(const struct rbi_map *map)
{
    return (size_t)1 << map->page_shift;
}

/* Of a chunk of a power of two of pages. */
static unsigned size_of(size_t pages)
{
    return (unsigned)__builtin_ctzll(pages);
}

/* ---- where chunks begin ---- */

bool rbi_map_is_mapped(const struct rbi_map *map, const char *at)
{
    return map->chunks[index_of(map, at)] != 0;
}

static bool goes_on(const struct rbi_map *map, size_t index)
{
    return index < map->pages && map->chunks[index] == RBI_CHUNK_GOES_ON;
}

static size_t chunk_pages(const struct rbi_map *map, size_t index)
{
    size_t pages = 1;
    while (goes_on(map, index + pages))
        pages++;
    return pages;
}

rbi_physical rbi_map_chunk(const struct rbi_map *map, const char *at)
{
    return goes_on(map, index_of(map, at)) ? 0 : map->chunks[index_of(map, at)];
}

size_t rbi_map_chunk_pages(const struct rbi_map *map, const char *at)
{
    return chunk_pages(map, index_of(map, at));
}

size_t rbi_map_cut_off(const struct rbi_map *map, const char *at, bool behind)
{
    const size_t index = index_of(map, at);
    size_t count = 0;
    if (behind)
        while (goes_on(map, index + count))
            count++;
    else if (goes_on(map, index))
        while (goes_on(map, index - count++ - 1))
            ;
    return count;
}

size_t rbi_map_shrink(const struct rbi_map *map, char **first, size_t count)
{
    size_t index = index_of(map, *first);
    for (; count > 0 && goes_on(map, index); index++, count--)
        *first += page_bytes(map);
    while (count > 0 && goes_on(map, index + count))
        count--;
    return count;
}

size_t rbi_map_widen(const struct rbi_map *map, char **first, size_t count)
{
    size_t index = index_of(map, *first);
    for (; goes_on(map, index); index--, count++)
        *first -= page_bytes(map);
    while (goes_on(map, index + count))
        count++;
    return count;
}

/* ---- mapping ---- */

rebatch_status rbi_map_reserve(struct rbi_map **out, struct rbi_vm *vm, size_t bytes)
{
    void *address;
    const size_t pages = bytes / vm->page_bytes;
    const rebatch_status status = rbi_device_reserve(vm->device, &address, bytes);
    if (status != REBATCH_OK)
        return status;
    struct rbi_map *map =
        rbi_heap_calloc(1, sizeof *map + pages * sizeof *map->chunks); /* mostly never touched */
    if (!map) {
        (void)rbi_device_unreserve(vm->device, address, bytes);
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for %zu bytes of addresses", bytes);
    }
    map->address = address;
    map->pages = pages;
    map->page_shift = (unsigned)__builtin_ctzll(vm->page_bytes);
    *out = map;
    return REBATCH_OK;
}

static rebatch_status map_at(struct rbi_vm *vm, struct rbi_map *map, char *at, rbi_physical chunk,
                             unsigned size)
{
    const rebatch_status status = rbi_call_map(vm, at, vm->page_bytes << size, chunk);
    if (status != REBATCH_OK)
        return status;
    rbi_physical *const slot = &map->chunks[index_of(map, at)];
    rbi_assert(slot[0] == 0 && index_of(map, at) + ((size_t)1 << size) <= map->pages);
    slot[0] = chunk;
    for (size_t i = 1; i < (size_t)1 << size; i++)
        slot[i] = RBI_CHUNK_GOES_ON;
    return REBATCH_OK;
}

/* Maps the newest spare chunk of a size. */
static rebatch_status map_chunk(struct rbi_vm *vm, struct rbi_map *map, char *at, unsigned size)
{
    const rebatch_status status = map_at(vm, map, at, rbi_spare_newest(vm, size), size);
    if (status == REBATCH_OK)
        rbi_spare_drop(vm, size);
    return status;
}

/* A window may have several holes, and a chunk is made for all of them: where it does not fit into
 * this one, smaller ones take its place. */
static rebatch_status map_host_chunk(size_t *pages, struct rbi_vm *vm, struct rbi_map *map,
                                     char *at, size_t left)
{
    rebatch_status status = REBATCH_OK;
    struct rbi_host_chunk *chunk = rbi_overflow_next(vm, left);
    if (!chunk) {
        status = rbi_overflow_break(vm, left);
        chunk = rbi_overflow_next(vm, left);
    }
    if (status == REBATCH_OK && !chunk)
        status = REBATCH_OOM;
    if (status == REBATCH_OK)
        status = map_at(vm, map, at, chunk->chunk, chunk->size);
    if (status != REBATCH_OK)
        return status;
    *pages = (size_t)1 << chunk->size;
    chunk->at = at;
    return REBATCH_OK;
}

/* Maps the largest spare chunk that fits into `left` pages; *pages are its pages. */
static rebatch_status map_next(size_t *pages, struct rbi_vm *vm, struct rbi_map *map, char *at,
                               size_t left)
{
    if (vm->spare_pages == 0)
        return map_host_chunk(pages, vm, map, at, left);
    unsigned size = rbi_spare_choose(vm, left);
    if ((size_t)1 << size > left) {
        const rebatch_status status = rbi_spare_break(vm, size);
        if (status != REBATCH_OK)
            return status;
        size = rbi_spare_choose(vm, left);
    }
    *pages = (size_t)1 << size;
    return map_chunk(vm, map, at, size);
}

static rebatch_status map_shared(size_t *pages, struct rbi_vm *vm, struct rbi_map *map, char *at,
                                 size_t left)
{
    unsigned size;
    const rebatch_status status = rbi_spare_make_shared(vm, left, &size);
    *pages = (size_t)1 << size;
    return status ? status : map_chunk(vm, map, at, size);
}

char *rbi_map_unmap(struct rbi_vm *vm, struct rbi_map *map, char *at, const char *to)
{
    while (at < to) {
        const size_t index = index_of(map, at);
        const size_t pages = chunk_pages(map, index);
        rbi_assert(map->chunks[index] != 0 && !goes_on(map, index));
        const bool is_asleep = map->chunks[index] == RBI_CHUNK_ASLEEP;
        if (!is_asleep && rbi_call_unmap(vm, at, pages * vm->page_bytes) != REBATCH_OK)
            break;
        struct rbi_host_chunk *const host = rbi_overflow_find(vm, at);
        if (is_asleep)
            vm->asleep.pages--;
        else if (host)
            host->at = NULL;
        else
            rbi_spare_put(vm, map->chunks[index], size_of(pages));
        memset(&map->chunks[index], 0, pages * sizeof *map->chunks);
        at += pages * vm->page_bytes;
    }
    return at;
}

size_t rbi_map_quarantine(struct rbi_vm *vm, const struct rbi_map *map, const char *at)
{
    const size_t bytes = rbi_map_chunk_pages(map, at) * vm->page_bytes;
    vm->quarantined_bytes += bytes;
    return bytes;
}

/* Unmaps what was mapped from `at` to `to`. True when a chunk stays, because the device did not
 * unmap it. */
static bool unwind(struct rbi_vm *vm, struct rbi_map *map, char *at, const char *to)
{
    bool quarantined = false;
    while ((at = rbi_map_unmap(vm, map, at, to)) < to) {
        at += rbi_map_quarantine(vm, map, at);
        quarantined = true;
    }
    return quarantined;
}

static rebatch_status fill(struct rbi_vm *vm, struct rbi_map *map, char *at, size_t bytes,
                           rebatch_status (*map_one)(size_t *pages, struct rbi_vm *vm,
                                                     struct rbi_map *map, char *at, size_t left),
                           bool *quarantined)
{
    rbi_assert(bytes % vm->page_bytes == 0);
    char *const begin = at;
    const char *const end = at + bytes;
    rebatch_status status = REBATCH_OK;
    size_t pieces = 0;
    for (; at < end; pieces++) {
        size_t pages = 0;
        status = map_one(&pages, vm, map, at, (size_t)(end - at) >> map->page_shift);
        if (status != REBATCH_OK)
            break;
        at += pages * vm->page_bytes;
    }
    if (status == REBATCH_OK)
        status = rbi_call_set_access(vm, begin, bytes, pieces);
    *quarantined = status != REBATCH_OK && unwind(vm, map, begin, at);
    return status;
}

rebatch_status rbi_map_fill(struct rbi_vm *vm, struct rbi_map *map, char *at, size_t bytes,
                            bool *quarantined)
{
    rbi_assert(bytes / vm->page_bytes <= vm->spare_pages + rbi_overflow_unmapped_pages(vm));
    return fill(vm, map, at, bytes, map_next, quarantined);
}

rebatch_status rbi_map_fill_shared(struct rbi_vm *vm, struct rbi_map *map, char *at, size_t bytes,
                                   bool *quarantined)
{
    vm->allocations++;
    return fill(vm, map, at, bytes, map_shared, quarantined);
}

rebatch_status rbi_map_set_access(struct rbi_vm *vm, const struct rbi_map *map)
{
    rebatch_status status = REBATCH_OK;
    for (size_t first = 0, end; first < map->pages && !status; first = end + 1) {
        for (end = first;
             end < map->pages && map->chunks[end] && map->chunks[end] != RBI_CHUNK_ASLEEP; end++)
            ;
        if (end > first)
            status = rbi_device_set_access(vm->device, map->address + first * vm->page_bytes,
                                           (end - first) * vm->page_bytes);
    }
    return status;
}

/* ---- the end ---- */

/* The chunk that begins with a page, if there is one; its pages. */
static size_t release_chunk(struct rbi_vm *vm, const struct rbi_map *map, size_t index)
{
    const rbi_physical chunk = map->chunks[index];
    if (chunk == 0 || chunk == RBI_CHUNK_ASLEEP)
        return 1;
    const size_t pages = chunk_pages(map, index);
    const size_t bytes = pages * vm->page_bytes;
    (void)rbi_device_unmap(vm->device, map->address + index * vm->page_bytes, bytes);
    struct rbi_host_chunk *const host =
        rbi_overflow_find(vm, map->address + index * vm->page_bytes);
    if (host)
        host->at = NULL;
    else
        (void)rbi_device_release_physical(vm->device, chunk, bytes);
    return pages;
}

void rbi_map_release(struct rbi_vm *vm, struct rbi_map *map, size_t first, size_t end)
{
    while (goes_on(map, first))
        first--;
    for (size_t i = first; i < end;) {
        const size_t pages = release_chunk(vm, map, i);
        memset(&map->chunks[i], 0, pages * sizeof *map->chunks);
        i += pages;
    }
}

void rbi_map_forget(struct rbi_map *map, size_t first, size_t end)
{
    while (goes_on(map, first))
        first--;
    while (goes_on(map, end))
        end++;
    memset(&map->chunks[first], 0, (end - first) * sizeof *map->chunks);
}

void rbi_map_destroy(struct rbi_vm *vm, struct rbi_map *map, bool unreserve)
{
    if (unreserve)
        (void)rbi_device_unreserve(vm->device, map->address, map->pages * vm->page_bytes);
    rbi_heap_free(map);
}
