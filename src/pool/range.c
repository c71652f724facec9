/* Owns ranges of addresses, and what is free in them: reserve, unmap, trim, collect, give back.
 * Must not know what memory is asked for, or why. */
#include "pool/pool.h"

/* ---- plain allocations ---- */

rebatch_status rbi_range_alloc(struct rbi_block **out, rebatch_pool *pool, size_t bytes,
                               struct rbi_pool_stream *stream)
{
    *out = NULL;
    void *address;
    const rebatch_status status = rbi_vm_alloc(&address, &pool->vm, bytes);
    if (status != REBATCH_OK)
        return status;
    struct rbi_range *range =
        rbi_blocks_add_range(&pool->heap, address, bytes, &stream->lists, RBI_ZONE_LARGE);
    RBI_RECORD(pool, MAP, address, bytes, stream->stream, 0);
    rbi_lists_add(range->first);
    *out = range->first;
    return REBATCH_OK;
}

rebatch_status rbi_range_free(rebatch_pool *pool, struct rbi_range *range)
{
    rbi_assert(!range->map);
    for (const struct rbi_block *b = range->first; b; b = b->after) {
        const rebatch_status status = rbi_pool_await(pool, b->freed_at);
        if (status != REBATCH_OK)
            return status;
    }
    const rebatch_status status = rbi_vm_free(&pool->vm, range->address, range->bytes);
    if (status != REBATCH_OK)
        return status;
    RBI_RECORD(pool, UNMAP, range->address, range->bytes, NULL, 0);
    rbi_blocks_remove_range(&pool->heap, range);
    return REBATCH_OK;
}

/* ---- addresses ---- */

/* Several times what could ever be mapped: addresses cost next to nothing, and where they are
 * scarce blocks of all ages come to lie side by side, and what stays keeps parts of pages of
 * what goes. When blocks in use have cut them up so that no place is left for a large one, another
 * piece like it is reserved. */
static size_t choose_reservation(rebatch_pool *pool, size_t bytes)
{
    rebatch_memory_info info;
    if (rebatch_device_memory(pool->device, &info) != REBATCH_OK)
        return bytes;
    const size_t limit = rbi_min(info.total_bytes, rbi_pool_limit(pool, info.total_bytes));
    const size_t most = RBI_RESERVED_MOST * pool->page_bytes;
    const size_t mapped = rbi_min(limit, most);
    size_t wanted = rbi_max(mapped + mapped / 8, rbi_min(RBI_RESERVED_TIMES * mapped, most));
    if (!rbi_round_up(rbi_max(wanted, bytes), pool->page_bytes, &wanted))
        return bytes;
    return wanted;
}

rebatch_status rbi_range_reserve(rebatch_pool *pool, size_t bytes, uint8_t zone)
{
    rbi_assert(bytes > 0 && bytes % pool->page_bytes == 0 && zone < RBI_POOL_ZONES);
    struct rbi_map *map;
    const size_t wanted = choose_reservation(pool, bytes);
    rebatch_status status = rbi_map_reserve(&map, &pool->vm, wanted);
    if (status == REBATCH_OOM && wanted > bytes)
        status = rbi_map_reserve(&map, &pool->vm, bytes);
    if (status != REBATCH_OK)
        return status;
    const size_t reserved = map->pages * pool->page_bytes;
    struct rbi_range *range =
        rbi_blocks_add_range(&pool->heap, map->address, reserved, pool->heap.holes, zone);
    range->map = map;
    (void)rbi_block_put(&pool->heap, range->first);
    return REBATCH_OK;
}

/* ---- free pages ---- */

/* Cuts a block in no list before `at`, puts the part before it back, and gives the rest. */
static struct rbi_block *put_part(rebatch_pool *pool, struct rbi_block *block, const char *at)
{
    rbi_assert(at >= block->address && at < block->address + block->bytes);
    if (at == block->address)
        return block;
    struct rbi_block *rest = rbi_block_split(&pool->heap, block, (size_t)(at - block->address));
    (void)rbi_block_put(&pool->heap, block);
    return rest;
}

void rbi_block_lose(rebatch_pool *pool, struct rbi_block *block)
{
    rbi_assert(block->state == RBI_BLOCK_HELD);
    rbi_block_give(block, &pool->space->lists);
    block->state = RBI_BLOCK_LOST;
}

/* Unmaps `count` pages of a free block, from `first` on: what was unmapped becomes a hole. False
 * when the device did not unmap a piece; that one is quarantined. Needs three spare nodes. */
static bool unmap_part(rebatch_pool *pool, struct rbi_block *block, char *first, size_t count)
{
    const char *const end = first + count * pool->page_bytes;
    rbi_assert(block->state == RBI_BLOCK_FREE && block->freed_at <= pool->progress.done);
    rbi_assert(first >= block->address && end <= block->address + block->bytes);
    rbi_lists_remove(block);
    block->state = RBI_BLOCK_HELD;
    struct rbi_map *const map = block->range->map;
    const char *const stop = rbi_map_unmap(&pool->vm, map, first, end);
    struct rbi_pool_stream *stream = rbi_stream_of(block);
    const uint64_t freed_at = block->freed_at;
    block = put_part(pool, block, first);
    if (stop > first) {
        RBI_RECORD(pool, UNMAP, first, (size_t)(stop - first), stream->stream, 0);
        struct rbi_block *rest = stop < block->address + block->bytes
                                     ? rbi_block_split(&pool->heap, block, (size_t)(stop - first))
                                     : NULL;
        rbi_block_give(block, &pool->space->lists);
        if (!block->range->is_arena) /* whose addresses stay its own */
            (void)rbi_block_put(&pool->heap, block);
        block = rest;
    }
    if (stop < end) {
        struct rbi_block *rest = NULL;
        const size_t chunk = rbi_map_quarantine(&pool->vm, map, stop);
        if (block->bytes > chunk)
            rest = rbi_block_split(&pool->heap, block, chunk);
        rbi_block_lose(pool, block);
        block = rest;
    }
    if (block) {
        block->freed_at = freed_at;
        (void)rbi_block_put(&pool->heap, block);
    }
    return stop == end;
}

struct rbi_block *rbi_block_hold_front(rebatch_pool *pool, struct rbi_block *block)
{
    rbi_assert(block->state == RBI_BLOCK_HELD);
    char *const address = block->address, *first;
    block = rbi_block_put(&pool->heap, block); /* chunks reach beyond it */
    rbi_lists_remove(block);
    block->state = RBI_BLOCK_HELD;
    (void)rbi_pool_await(pool, block->freed_at);
    block = put_part(pool, block, address);
    size_t bytes = REBATCH_POOL_UNIT_BYTES;
    bool is_lost = false;
    const bool is_unmapped = pool->has_space && rbi_block_own_pages(pool, block, &first) > 0 &&
                             first == address && block->freed_at <= pool->progress.done;
    if (is_unmapped) {
        struct rbi_map *const map = block->range->map;
        bytes = rbi_map_widen(map, &first, 1) * pool->page_bytes;
        RBI_RECORD(pool, UNMAP, first, bytes, rbi_stream_of(block)->stream, 0);
        is_lost = rbi_map_unmap(&pool->vm, map, first, first + bytes) == first;
        if (is_lost)
            bytes = rbi_map_quarantine(&pool->vm, map, first);
        pool->stats.remaps += is_lost ? 0 : bytes / pool->page_bytes;
    }
    if (bytes < block->bytes)
        (void)rbi_block_put(&pool->heap, rbi_block_split(&pool->heap, block, bytes));
    if (is_lost)
        rbi_block_lose(pool, block);
    else if (is_unmapped)
        rbi_block_give(block, &pool->space->lists);
    return is_lost ? NULL : block;
}

/* Unmaps `most` of a block's wholly free pages, or as many as there are, those next to a hole if
 * there is one; more where a larger piece is among them. False when no more can be done. */
static bool harvest_block(rebatch_pool *pool, struct rbi_block *block, size_t most)
{
    char *first;
    const size_t whole = rbi_block_own_pages(pool, block, &first);
    if (whole == 0 || block->freed_at > pool->progress.done)
        return true;
    if (!rbi_blocks_prepare(&pool->heap, rbi_pool_search_nodes(pool) + 3))
        return false;
    size_t count = rbi_min(whole, most);
    if (!block->before || block->before->state != RBI_BLOCK_HOLE)
        first += (whole - count) * pool->page_bytes;
    count = rbi_map_widen(block->range->map, &first, count);
    return unmap_part(pool, block, first, count);
}

void rbi_pool_unmap_free(rebatch_pool *pool, struct rbi_range *range, char *at, size_t pages)
{
    const char *const end = at + pages * pool->page_bytes;
    struct rbi_block *block = range->first;
    while (block && block->address + block->bytes <= at)
        block = block->after;
    if (block && block->state == RBI_BLOCK_FREE && block->address <= at &&
        block->address + block->bytes >= end && block->freed_at <= pool->progress.done &&
        rbi_blocks_prepare(&pool->heap, rbi_pool_search_nodes(pool) + 3))
        (void)unmap_part(pool, block, at, pages);
}

/* Large free blocks first: each that is taken apart leaves parts of pages at its ends, so the
 * fewer the better. A block that is put back while the walk is on is met again at most in a class
 * below, when it has nothing left to give. False when there is no need to go on. */
static bool harvest_bins(rebatch_pool *pool, const struct rbi_bins *bins, size_t wanted)
{
    const unsigned least = rbi_bin_of(pool->page_bytes);
    for (unsigned bin = RBI_POOL_BINS; bin-- > least;) {
        const uint64_t up_to = bins->words[bin / 64] << (63 - bin % 64);
        if (up_to == 0) {
            bin -= bin % 64;
            continue;
        }
        bin -= (unsigned)__builtin_clzll(up_to);
        if (bin < least)
            return true;
        struct rbi_block *next;
        for (struct rbi_block *b = bins->of[bin]; b; b = next) {
            if (pool->vm.spare_pages >= wanted)
                return false;
            next = b->next;
            const size_t before = pool->vm.spare_pages;
            const bool more = harvest_block(pool, b, wanted - before);
            pool->stats.remaps += pool->vm.spare_pages - before;
            if (!more)
                return false;
        }
    }
    return true;
}

void rbi_pool_harvest(rebatch_pool *pool, size_t wanted, const struct rbi_pool_stream *spared)
{
    for (struct rbi_pool_stream *s = pool->first_stream; s; s = s->next)
        for (unsigned zone = 0; zone < RBI_POOL_ZONES && s != spared; zone++)
            if (!harvest_bins(pool, &s->lists.bins[zone], wanted))
                return;
}

void rbi_pool_harvest_all(rebatch_pool *pool, size_t wanted, const struct rbi_pool_stream *spared)
{
    rbi_pool_harvest(pool, wanted, spared);
    for (rebatch_arena *a = pool->first_arena; a && pool->vm.spare_pages < wanted; a = a->next) {
        const size_t before = pool->vm.spare_pages;
        if (a->range->is_kept)
            continue;
        rbi_lists_flush(&pool->heap, &a->own.lists);
        (void)harvest_bins(pool, &a->own.lists.bins[0], wanted);
        a->taken_total_bytes += (pool->vm.spare_pages - before) * pool->page_bytes;
    }
}

/* ---- giving back ---- */

void rbi_pool_adopt(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    rbi_assert(rbi_lock_is_held(&pool->lock));
    rbi_assert(!pool->pending);
    rbi_pool_flush_lists(pool);
    for (struct rbi_range *r = pool->heap.first_range; r; r = r->next) {
        for (struct rbi_block *b = r->first; b && !r->is_arena; b = b->after) {
            if (b->state != RBI_BLOCK_FREE || b->lists == &stream->lists)
                continue;
            rbi_lists_remove(b);
            rbi_block_give(b, &stream->lists);
            b = rbi_block_put(&pool->heap, b);
        }
    }
}

static bool lies_wholly_with(const struct rbi_range *range, const struct rbi_pool_stream *stream)
{
    return range->first->lists == &stream->lists && !range->first->after;
}

static bool is_free(const struct rbi_range *range)
{
    for (const struct rbi_block *b = range->first; b; b = b->after)
        if (b->state != RBI_BLOCK_FREE)
            return false;
    return true;
}

/* The free plain range that brings the cache down by `excess` with the least beyond, else the
 * largest. */
static struct rbi_range *choose_range(const rebatch_pool *pool, uint64_t excess,
                                      const struct rbi_pool_stream *spared)
{
    struct rbi_range *best = NULL;
    for (struct rbi_range *r = pool->heap.first_range; r; r = r->next) {
        if (!is_free(r) || (spared && lies_wholly_with(r, spared)))
            continue;
        if (!best || (best->bytes < excess ? r->bytes > best->bytes
                                           : r->bytes >= excess && r->bytes < best->bytes))
            best = r;
    }
    return best;
}

static rebatch_status trim_ranges(rebatch_pool *pool, size_t keep_bytes,
                                  const struct rbi_pool_stream *spared, size_t *released_bytes)
{
    for (;;) {
        const uint64_t cached = rbi_vm_bytes(&pool->vm) - pool->stats.live_bytes;
        if (cached <= keep_bytes)
            return REBATCH_OK;
        struct rbi_range *range = choose_range(pool, cached - keep_bytes, spared);
        if (!range)
            return REBATCH_OK;
        const size_t bytes = range->bytes;
        const rebatch_status status = rbi_range_free(pool, range);
        if (status == REBATCH_OOM)
            return REBATCH_OK; /* the device had no memory to wait with: the range stays cached */
        if (status != REBATCH_OK)
            return status;
        *released_bytes += bytes;
    }
}

static rebatch_status trim_pages(rebatch_pool *pool, size_t keep_bytes,
                                 const struct rbi_pool_stream *spared, size_t *released_bytes)
{
    const uint64_t cached = rbi_pool_cached(pool);
    if (cached <= keep_bytes)
        return REBATCH_OK;
    rebatch_status status = REBATCH_OK;
    if (rbi_pool_has_waiting(pool, NULL))
        status = rbi_pool_await_all(pool);
    if (status != REBATCH_OK)
        return status;
    if (!spared && !rbi_pool_has_waiting(pool, NULL))
        rbi_pool_adopt(pool, pool->first_stream); /* pages that two streams share are free too */
    const size_t unneeded = rbi_vm_pages_for(&pool->vm, (size_t)(cached - keep_bytes));
    const size_t above_floor =
        pool->vm.held_pages - rbi_min(pool->vm.held_pages, pool->vm.floor_pages);
    const size_t excess = pool->vm.floor_pages ? rbi_min(unneeded, above_floor) : unneeded;
    const uint64_t remaps = pool->stats.remaps;
    rbi_pool_harvest_all(pool, excess, spared);
    pool->stats.remaps = remaps; /* they are not mapped elsewhere */
    const size_t keep = pool->vm.spare_pages > excess ? pool->vm.spare_pages - excess : 0;
    *released_bytes = rbi_vm_release(&pool->vm, keep) * pool->page_bytes;
    return REBATCH_OK;
}

rebatch_status rbi_pool_trim_cache(rebatch_pool *pool, size_t keep_bytes,
                                   const struct rbi_pool_stream *spared, size_t *released_bytes)
{
    rbi_assert(rbi_lock_is_held(&pool->lock));
    *released_bytes = 0;
    rbi_pool_flush_lists(pool);
    const rebatch_status status = pool->has_space
                                      ? trim_pages(pool, keep_bytes, spared, released_bytes)
                                      : trim_ranges(pool, keep_bytes, spared, released_bytes);
    pool->stats.trims += *released_bytes > 0;
    return status;
}

/* ---- the end ---- */

/* Whether work that could not be waited for may still use a block. */
static bool may_be_used(const rebatch_pool *pool, const struct rbi_block *block)
{
    if (block->state == RBI_BLOCK_HOLE || block->state == RBI_BLOCK_LOST)
        return false;
    const bool live = block->state == RBI_BLOCK_LIVE || block->state == RBI_BLOCK_DEFERRED;
    return pool->progress.done < (live ? pool->progress.frees : block->freed_at);
}

/* Forgets the pages that may still be used, so that they stay as they are; whether there are
 * any. */
static bool leave_used(const rebatch_pool *pool, struct rbi_range *range)
{
    bool any = false;
    for (const struct rbi_block *b = range->first; b; b = b->after) {
        if (!may_be_used(pool, b))
            continue;
        any = true;
        const size_t offset = (size_t)(b->address - range->address);
        const size_t end = (offset + b->bytes + pool->page_bytes - 1) / pool->page_bytes;
        if (range->map)
            rbi_map_forget(range->map, offset / pool->page_bytes, end);
    }
    return any;
}

/* Quarantined pages are tried once more. Of most ranges most is holes. */
static void destroy_map(rebatch_pool *pool, struct rbi_range *range)
{
    rbi_assert(range->map);
    const bool leave = leave_used(pool, range);
    for (const struct rbi_block *b = range->first; b; b = b->after) {
        if (b->lists == pool->heap.holes && b->state != RBI_BLOCK_LOST)
            continue;
        const size_t offset = (size_t)(b->address - range->address);
        rbi_map_release(&pool->vm, range->map, offset / pool->page_bytes,
                        rbi_vm_pages_for(&pool->vm, offset + b->bytes));
    }
    rbi_map_destroy(&pool->vm, range->map, !leave);
}

void rbi_pool_destroy_ranges(rebatch_pool *pool)
{
    for (struct rbi_range *r = pool->heap.first_range; r; r = r->next) {
        if (r->map)
            destroy_map(pool, r);
        else if (!leave_used(pool, r))
            (void)rbi_vm_free(&pool->vm, r->address, r->bytes);
    }
    pool->heap.first_range = pool->heap.last_range = NULL;
    rbi_overflow_close(&pool->vm);
    rbi_asleep_close(&pool->vm);
    rbi_vm_destroy(&pool->vm);
}
