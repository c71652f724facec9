/* Owns memory for a place: free pages unmapped from elsewhere, then fresh ones, mapped there.
 * Must not know requests or stages. */
#include "pool/pool.h"

static rebatch_status find_window(struct rbi_window *window, rebatch_pool *pool,
                                  const struct rbi_mapping *mapping)
{
    const size_t bytes = mapping->bytes;
    if (rbi_window_find(window, pool, bytes, mapping->stream, mapping->zone))
        return REBATCH_OK;
    size_t whole;
    if (!rbi_round_up(bytes, pool->page_bytes, &whole))
        return REBATCH_OOM;
    const rebatch_status status =
        rbi_range_reserve(pool, whole, rbi_min(mapping->zone, RBI_ZONE_LARGE));
    if (status != REBATCH_OK)
        return status;
    return rbi_window_find(window, pool, bytes, mapping->stream, mapping->zone) ? REBATCH_OK
                                                                                : REBATCH_OOM;
}

/* A window that is a hole alone, whole pages long: for what is to add to what is free. */
static rebatch_status find_hole(struct rbi_window *window, rebatch_pool *pool,
                                const struct rbi_mapping *mapping)
{
    rbi_assert(mapping->bytes % pool->page_bytes == 0);
    const size_t bytes = mapping->bytes;
    struct rbi_block *hole = rbi_lists_find(&pool->space->lists, bytes, UINT64_MAX, RBI_ZONE_ANY);
    rebatch_status status = REBATCH_OK;
    if (!hole && (status = rbi_range_reserve(pool, bytes, RBI_ZONE_LARGE)) == REBATCH_OK)
        hole = rbi_lists_find(&pool->space->lists, bytes, UINT64_MAX, RBI_ZONE_ANY);
    if (status == REBATCH_OK && !hole)
        status = REBATCH_OOM;
    *window = (struct rbi_window){hole, hole, bytes, bytes / pool->page_bytes, false};
    return status;
}

static rebatch_status create_lacking(rebatch_pool *pool, const struct rbi_mapping *mapping,
                                     size_t count, size_t room)
{
    rbi_assert(count > pool->vm.spare_pages);
    const size_t lacking = count - pool->vm.spare_pages;
    const size_t room_pages = room / pool->page_bytes;
    if (lacking > room_pages)
        return REBATCH_OOM;
    return rbi_vm_create(&pool->vm, lacking,
                         mapping->ahead ? rbi_vm_chunk_ahead(lacking)
                                        : rbi_vm_chunk(&pool->vm, lacking, room_pages));
}

/* Free pages, then fresh ones, and host memory for the rest: this must not fail. */
static rebatch_status gather_overflow(rebatch_pool *pool, size_t count)
{
    size_t room;
    rebatch_status status = rbi_pool_room(&room, pool, NULL);
    if (status != REBATCH_OK)
        return status;
    rbi_pool_harvest(pool, count, NULL);
    if (pool->vm.spare_pages >= count)
        return REBATCH_OK;
    const size_t fresh = rbi_min(count - pool->vm.spare_pages, room / pool->page_bytes);
    if (fresh)
        status = rbi_vm_create(&pool->vm, fresh, rbi_vm_chunk(&pool->vm, fresh, fresh));
    if (status != REBATCH_OK && status != REBATCH_OOM)
        return status;
    const size_t lacking = count - rbi_min(count, pool->vm.spare_pages);
    const size_t at_hand = rbi_overflow_pages_at_hand(&pool->vm, lacking);
    if (lacking - at_hand <= rbi_pool_overflow_room(pool) / pool->page_bytes)
        return rbi_overflow_make(&pool->vm, lacking);
    rbi_overflow_drop(&pool->vm); /* pieces that are too large */
    return lacking > rbi_pool_overflow_room(pool) / pool->page_bytes
               ? REBATCH_OOM
               : rbi_overflow_make(&pool->vm, lacking);
}

rebatch_status rbi_mapping_gather(rebatch_pool *pool, struct rbi_mapping *mapping, size_t count)
{
    if (pool->vm.spare_pages >= count) {
        mapping->by_remap = true;
        return REBATCH_OK;
    }
    if (mapping->overflows)
        return gather_overflow(pool, count);
    size_t room = 0;
    const rebatch_status status = mapping->no_fresh ? REBATCH_OK : rbi_pool_room(&room, pool, NULL);
    if (status != REBATCH_OK)
        return status;
    if (mapping->no_remap) {
        const rebatch_status created = create_lacking(pool, mapping, count, room);
        if (created != REBATCH_OOM)
            return created;
    }
    /* What cannot succeed shall not take blocks apart. */
    const uint64_t cached = rbi_pool_cached(pool);
    if (count > (cached + room) / pool->page_bytes ||
        (mapping->in_line && count > rbi_pool_supply(pool) + room / pool->page_bytes))
        return REBATCH_OOM;
    rbi_pool_harvest(pool, count, mapping->spared);
    mapping->by_remap = pool->vm.spare_pages >= count;
    if (mapping->by_remap)
        return REBATCH_OK;
    if (mapping->no_fresh)
        return REBATCH_OOM;
    const rebatch_status created = create_lacking(pool, mapping, count, room);
    if (created != REBATCH_OOM || !pool->first_arena)
        return created;
    rbi_pool_harvest_all(pool, count - rbi_min(count, room / pool->page_bytes), NULL);
    return pool->vm.spare_pages >= count ? REBATCH_OK : create_lacking(pool, mapping, count, room);
}

rebatch_status rbi_mapping_fill(struct rbi_block **out, rebatch_pool *pool,
                                struct rbi_mapping *mapping, struct rbi_window *window)
{
    mapping->at_end = window->at_end;
    mapping->from_cache = window->pages == 0 && window->first == window->last &&
                          window->first->lists == &mapping->stream->lists;
    rbi_window_hold(pool, window);
    const rebatch_status status = rbi_mapping_gather(pool, mapping, window->pages);
    if (status != REBATCH_OK) {
        rbi_window_drop(pool, window);
        return status;
    }
    return rbi_window_map(out, pool, window, mapping->stream);
}

/* A pool that grows takes whole chunks, where others, and it itself, have plenty left. */
static void widen(struct rbi_window *window, rebatch_pool *pool, const struct rbi_mapping *mapping)
{
    size_t room;
    if (mapping->no_fresh || mapping->ahead || mapping->overflows ||
        pool->vm.spare_pages >= window->pages || rbi_pool_room(&room, pool, NULL) != REBATCH_OK)
        return;
    const size_t chunk = rbi_vm_chunk(&pool->vm, window->pages, room / pool->page_bytes);
    const size_t pages = (window->pages + chunk - 1) & ~(chunk - 1);
    if (pages > window->pages && rbi_pool_may_take(pool, pages * pool->page_bytes, room))
        rbi_window_widen(window, pool, pages);
}

rebatch_status rbi_mapping_run(struct rbi_block **out, rebatch_pool *pool,
                               struct rbi_mapping *mapping)
{
    struct rbi_window window;
    const rebatch_status status = find_window(&window, pool, mapping);
    if (status != REBATCH_OK)
        return status;
    widen(&window, pool, mapping);
    return rbi_mapping_fill(out, pool, mapping, &window);
}

rebatch_status rbi_pool_grow(struct rbi_block **out, rebatch_pool *pool, size_t bytes,
                             struct rbi_pool_stream *stream, const struct rbi_pool_stream *spared)
{
    *out = NULL;
    if (pool->has_space) {
        struct rbi_mapping mapping = {
            .bytes = bytes, .stream = stream, .spared = spared, .ahead = true};
        struct rbi_window window;
        const rebatch_status found = find_hole(&window, pool, &mapping);
        return found == REBATCH_OK ? rbi_mapping_fill(out, pool, &mapping, &window) : found;
    }
    size_t room;
    const rebatch_status status = rbi_pool_room(&room, pool, NULL);
    if (status != REBATCH_OK)
        return status;
    return bytes > room ? REBATCH_OOM : rbi_range_alloc(out, pool, bytes, stream);
}

/* What lies in one place already stays there, and the rest is moved to it. */
struct rbi_block *rbi_pool_line_up(rebatch_pool *pool, size_t bytes, struct rbi_pool_stream *stream)
{
    rbi_assert(pool->has_space && bytes > 0);
    struct rbi_mapping mapping = {.bytes = bytes,
                                  .stream = stream,
                                  .zone = rbi_pool_zone(pool, bytes),
                                  .ahead = true,
                                  .in_line = true};
    struct rbi_window window;
    struct rbi_block *block;
    size_t available;
    if (rbi_pool_count_available(&available, pool) == REBATCH_OK && bytes <= available &&
        rbi_nodes_prepare(&pool->heap.range_nodes, 1) && rbi_pool_await_all(pool) == REBATCH_OK &&
        find_window(&window, pool, &mapping) == REBATCH_OK &&
        rbi_mapping_fill(&block, pool, &mapping, &window) == REBATCH_OK)
        return block;
    return NULL;
}
