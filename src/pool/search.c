/* Owns the search for memory: the stages, their order, limit and headroom.
 * Must not know what the memory is for. */
#include "pool/pool.h"

rebatch_status rbi_pool_prepare(rebatch_pool *pool)
{
    /* Searches that are within a pressure callback keep what they were promised. */
    const size_t searches = pool->pressing + 1;
    if (rbi_blocks_prepare(&pool->heap, rbi_pool_search_nodes(pool)) &&
        rbi_nodes_prepare(&pool->heap.range_nodes, searches))
        return REBATCH_OK;
    return rbi_error(REBATCH_E_HOST_OOM, "the pool has no host memory for another block");
}

static void reach(rebatch_pool *pool, struct rbi_request *request, rebatch_pool_stage stage)
{
    rbi_assert((size_t)stage < RBI_POOL_STAGE_COUNT);
    request->stage = stage;
    pool->stages[stage]++;
}

static struct rbi_block *take(rebatch_pool *pool, const struct rbi_request *request,
                              struct rbi_block *block)
{
    rbi_assert(!block || block->bytes >= request->bytes);
    return block ? rbi_block_take_for(&pool->heap, block, request->bytes, &request->stream->lists)
                 : NULL;
}

/* What a stage has found. */
static rebatch_status found(struct rbi_block **out, struct rbi_block *block)
{
    *out = block;
    return block ? REBATCH_OK : REBATCH_OOM;
}

struct rbi_block *rbi_pool_take_own(rebatch_pool *pool, struct rbi_pool_stream *stream,
                                    size_t bytes)
{
    struct rbi_lists *const lists = &stream->lists;
    const unsigned zone = rbi_pool_zone(pool, bytes);
    rbi_lists_flush_large(&pool->heap, lists);
    struct rbi_block *block = rbi_lists_find(lists, bytes, UINT64_MAX, zone);
    if (!block && lists->small_bytes) {
        rbi_lists_flush(&pool->heap, lists);
        block = rbi_lists_find(lists, bytes, UINT64_MAX, zone);
    }
    return block ? rbi_block_take(&pool->heap, block, bytes) : NULL;
}

/* Of the stream's own free blocks: `zone` is the request's, or another. */
static struct rbi_block *find_own(const struct rbi_request *request, unsigned zone)
{
    return rbi_lists_find(&request->stream->lists, request->bytes, UINT64_MAX, zone);
}

static struct rbi_block *find_other(rebatch_pool *pool, const struct rbi_request *request,
                                    unsigned zone)
{
    struct rbi_block *best = NULL;
    for (struct rbi_pool_stream *s = pool->first_stream; s; s = s->next) {
        if (s == request->stream)
            continue;
        rbi_lists_flush(&pool->heap, &s->lists);
        struct rbi_block *block =
            rbi_lists_find(&s->lists, request->bytes, pool->progress.done, zone);
        if (block && (!best || block->bytes < best->bytes))
            best = block;
    }
    return best;
}

/* After streams have come further: blocks may have become free on any of them. */
static struct rbi_block *take_any(rebatch_pool *pool, const struct rbi_request *request)
{
    struct rbi_block *block = rbi_pool_take_own(pool, request->stream, request->bytes);
    return block ? block : take(pool, request, find_other(pool, request, request->zone));
}

/* ---- what was freed ---- */

static rebatch_status take_cached(struct rbi_block **out, rebatch_pool *pool,
                                  struct rbi_request *request)
{
    if (!pool->caching)
        return REBATCH_OOM;
    reach(pool, request, REBATCH_STAGE_CACHE);
    return found(out, rbi_pool_take_own(pool, request->stream, request->bytes));
}

/* What is done since the pool last looked. Where that is a pending block of its own stream which
 * serves a request, no more is asked. */
static rebatch_status take_done(struct rbi_block **out, rebatch_pool *pool,
                                struct rbi_request *request)
{
    const bool others = pool->pending || pool->first_stream->next;
    if (!pool->caching || !(others || pool->has_space))
        return REBATCH_OOM;
    if (others)
        reach(pool, request, REBATCH_STAGE_OTHER_STREAMS);
    const uint64_t done = pool->progress.done;
    rebatch_status status = rbi_pool_poll(pool);
    if (status == REBATCH_OK && others && pool->progress.done != done)
        *out = rbi_pool_take_own(pool, request->stream, request->bytes);
    if (status == REBATCH_OK)
        status = rbi_pool_poll_beyond(pool, !*out);
    if (status != REBATCH_OK || *out)
        return status;
    rbi_pool_flush_lists(pool);
    if (others && (*out = take_any(pool, request)))
        return REBATCH_OK;
    if (others && pool->progress.done < pool->progress.frees)
        rbi_pool_record_soon(pool);
    return REBATCH_OOM;
}

/* A block of any zone, rather than wait for work or fail. */
static rebatch_status take_anywhere(struct rbi_block **out, rebatch_pool *pool,
                                    struct rbi_request *request)
{
    if (!pool->caching || request->zone == RBI_ZONE_ANY)
        return REBATCH_OOM;
    struct rbi_block *block = find_own(request, RBI_ZONE_ANY);
    return found(out, take(pool, request, block ? block : find_other(pool, request, RBI_ZONE_ANY)));
}

/* ---- what is mapped, or fresh ---- */

/* How much a request of `bytes`, whole pages of them `rounded`, takes from a device without pages:
 * one that is much smaller than what the pool holds shares a segment with others, if there
 * is room for one. */
static size_t segment_bytes(const rebatch_pool *pool, size_t bytes, size_t rounded, size_t room)
{
    const size_t held = (size_t)rbi_vm_bytes(&pool->vm) / RBI_SHARED_PARTS_OF_HELD;
    const size_t shared =
        rbi_max(held & ~(pool->page_bytes - 1), RBI_SHARED_PAGES * pool->page_bytes);
    return pool->caching && bytes < shared / 2 && shared <= room ? shared : rounded;
}

/* Fresh memory of a device without pages. What does not fit limit and headroom is not asked
 * for. */
static rebatch_status take_plain(struct rbi_block **out, rebatch_pool *pool,
                                 struct rbi_request *request)
{
    reach(pool, request, REBATCH_STAGE_DEVICE);
    size_t room;
    rebatch_status status = rbi_pool_room(&room, pool, NULL);
    if (status != REBATCH_OK)
        return status;
    size_t bytes;
    if (!rbi_round_up(request->bytes, pool->page_bytes, &bytes) || bytes > room)
        return REBATCH_OOM;
    const size_t segment = segment_bytes(pool, request->bytes, bytes, room);
    struct rbi_block *block;
    status = rbi_range_alloc(&block, pool, segment, request->stream);
    if (status == REBATCH_OOM && segment > bytes)
        status = rbi_range_alloc(&block, pool, bytes, request->stream);
    *out = take(pool, request, block);
    return status;
}

/* What a window became: the request lies at the end where that joins it to its neighbour. */
static struct rbi_block *take_part(rebatch_pool *pool, const struct rbi_request *request,
                                   struct rbi_block *block, bool at_end)
{
    if (!block || !at_end || block->bytes == request->bytes)
        return take(pool, request, block);
    rbi_assert(block->bytes > request->bytes);
    rbi_lists_remove(block);
    struct rbi_block *end = rbi_block_split(&pool->heap, block, block->bytes - request->bytes);
    rbi_lists_add(block);
    end->state = RBI_BLOCK_HELD;
    return end;
}

/* A block between two holes, rather than fresh memory. */
static struct rbi_block *take_isolated(rebatch_pool *pool, const struct rbi_request *request)
{
    return request->zone == RBI_ZONE_ANY
               ? NULL
               : take(pool, request, find_own(request, request->zone | RBI_ZONE_ISOLATED));
}

static rebatch_status take_mapping(struct rbi_block **out, rebatch_pool *pool,
                                   const struct rbi_request *request, struct rbi_mapping *mapping)
{
    struct rbi_block *block = NULL;
    const rebatch_status status = rbi_mapping_run(&block, pool, mapping);
    *out = take_part(pool, request, block, mapping->at_end);
    return status;
}

/* Free pages from elsewhere, then a block between two holes, then fresh pages. */
static rebatch_status take_pages(struct rbi_block **out, rebatch_pool *pool,
                                 const struct rbi_request *request, struct rbi_mapping *mapping)
{
    mapping->no_fresh = true;
    rebatch_status status =
        mapping->no_remap ? REBATCH_OOM : take_mapping(out, pool, request, mapping);
    mapping->no_fresh = false;
    if (status == REBATCH_OOM && (*out = take_isolated(pool, request))) {
        mapping->from_cache = true;
        return REBATCH_OK;
    }
    return status == REBATCH_OOM ? take_mapping(out, pool, request, mapping) : status;
}

/* Where the pool knows its needs it had plenty last time: then a block between two holes comes
 * first, as the device need not be asked what it has left, which takes it microseconds. */
static rebatch_status take_mapped(struct rbi_block **out, rebatch_pool *pool,
                                  struct rbi_request *request)
{
    const rebatch_pool_stage before = request->stage;
    request->stage = REBATCH_STAGE_CACHE;
    if (rbi_pool_knows_needs(pool) && (*out = take_isolated(pool, request)))
        return REBATCH_OK;
    const struct rbi_policy policy = rbi_pool_find_policy(pool, request->bytes);
    if (!policy.fresh_first && policy.any_zone && !take_anywhere(out, pool, request))
        return REBATCH_OK;
    request->stage = before;
    struct rbi_mapping mapping = {.bytes = request->bytes,
                                  .stream = request->stream,
                                  .zone = request->zone,
                                  .ahead = request->ahead,
                                  .no_remap = policy.fresh_first};
    const rebatch_status status = take_pages(out, pool, request, &mapping);
    if (mapping.from_cache && *out)
        request->stage = REBATCH_STAGE_CACHE;
    else
        reach(pool, request, mapping.by_remap ? REBATCH_STAGE_REMAP : REBATCH_STAGE_DEVICE);
    return status;
}

static rebatch_status take_new(struct rbi_block **out, rebatch_pool *pool,
                               struct rbi_request *request)
{
    return pool->has_space ? take_mapped(out, pool, request) : take_plain(out, pool, request);
}

static rebatch_status take_after_wait(struct rbi_block **out, rebatch_pool *pool,
                                      struct rbi_request *request)
{
    /* Pages of the stream's own free blocks are of use elsewhere once its work is done. */
    if (!rbi_pool_has_waiting(pool, pool->has_space ? NULL : request->stream))
        return REBATCH_OOM;
    reach(pool, request, REBATCH_STAGE_WAIT);
    const rebatch_status status = rbi_pool_await_all(pool);
    if (status != REBATCH_OK)
        return status;
    if (pool->caching && (*out = take_any(pool, request)))
        return REBATCH_OK;
    /* Pages that could not be moved before can be now: they are tried once more for a place in the
     * request's own zone, which take_best() does not keep to. */
    return pool->has_space ? take_new(out, pool, request) : REBATCH_OOM;
}

static rebatch_status take_after_trim(struct rbi_block **out, rebatch_pool *pool,
                                      struct rbi_request *request)
{
    size_t released = 0;
    rebatch_status status =
        pool->has_space ? REBATCH_OOM : rbi_pool_trim_cache(pool, 0, NULL, &released);
    if (status != REBATCH_OK || released == 0)
        return status == REBATCH_OK ? REBATCH_OOM : status;
    status = take_new(out, pool, request);
    reach(pool, request, REBATCH_STAGE_TRIM);
    return status;
}

/* All work is done: every free page counts, and the place that needs fewest is looked for. */
static rebatch_status take_best(struct rbi_block **out, rebatch_pool *pool,
                                struct rbi_request *request)
{
    if (!pool->has_space || rbi_pool_has_waiting(pool, NULL))
        return REBATCH_OOM;
    size_t room;
    rebatch_status status = rbi_pool_room(&room, pool, NULL);
    if (status != REBATCH_OK)
        return status;
    rbi_pool_adopt(pool, request->stream);
    struct rbi_block *block = find_own(request, RBI_ZONE_ANY);
    struct rbi_window window = {NULL, NULL, 0, 0, false};
    if (!block && rbi_window_find_best(&window, pool, request->bytes, room / pool->page_bytes)) {
        struct rbi_mapping mapping = {.bytes = request->bytes, .stream = request->stream};
        reach(pool, request, REBATCH_STAGE_REMAP);
        status = rbi_mapping_fill(&block, pool, &mapping, &window);
    }
    *out = take_part(pool, request, block, window.at_end);
    return *out || status != REBATCH_OK ? status : REBATCH_OOM;
}

/* Every stage below the pressure callbacks, in this order, each once. One gives REBATCH_OOM where
 * it has no memory, or is not for this pool: the next one is tried. All are run again after a
 * plan's end and after a callback that freed memory, as any stage may find what that left. */
static rebatch_status (*const stages[])(struct rbi_block **out, rebatch_pool *pool,
                                        struct rbi_request *request) = {
    take_cached, take_done, take_new, take_anywhere, take_after_wait, take_after_trim, take_best,
};

static rebatch_status run_stages(struct rbi_block **out, rebatch_pool *pool,
                                 struct rbi_request *request)
{
    if (request->arena)
        return rbi_arena_search(out, pool, request);
    rebatch_status status = REBATCH_OOM;
    for (size_t i = 0; i < sizeof stages / sizeof *stages && status == REBATCH_OOM; i++)
        status = stages[i](out, pool, request);
    return status;
}

/* ---- the search ---- */

/* The smallest free block that what is promised fits in, cut to that and out of all lists; NULL:
 * there is none. Needs a spare node. */
static struct rbi_block *set_promised_aside(rebatch_pool *pool)
{
    rbi_assert(pool->promised_bytes > 0);
    struct rbi_block *best = NULL;
    rbi_pool_flush_lists(pool);
    for (struct rbi_pool_stream *s = pool->first_stream; s; s = s->next) {
        struct rbi_block *block =
            rbi_lists_find(&s->lists, pool->promised_bytes, UINT64_MAX, RBI_ZONE_ANY);
        if (block && (!best || block->bytes < best->bytes))
            best = block;
    }
    return best ? rbi_block_take(&pool->heap, best, pool->promised_bytes) : NULL;
}

/* For threads without the reservation: searches with the reserved piece hidden. Nodes are for both
 * searches, what waits in callbacks keeps its own, and for the rest of the piece. */
static rebatch_status run_stages_beside(struct rbi_block **out, rebatch_pool *pool,
                                        struct rbi_request *request)
{
    if (!request->beside || pool->promised_bytes <= rbi_plan_idle_bytes(pool))
        return run_stages(out, pool, request);
    if (!rbi_blocks_prepare(&pool->heap, 3 * rbi_pool_search_nodes(pool) + 1) ||
        !rbi_nodes_prepare(&pool->heap.range_nodes, 2 * (pool->pressing + 1)))
        return rbi_error(REBATCH_E_HOST_OOM, "the pool has no host memory for another block");
    struct rbi_request promised = *request;
    promised.bytes = pool->promised_bytes;
    promised.arena = NULL;
    struct rbi_block *aside = set_promised_aside(pool);
    rebatch_status status = aside ? REBATCH_OK : run_stages(&aside, pool, &promised);
    if (status == REBATCH_OK)
        status = run_stages(out, pool, request);
    if (aside)
        (void)rbi_block_put(&pool->heap, aside);
    return status;
}

rebatch_status rbi_request_open(struct rbi_request *request, rebatch_pool *pool, size_t bytes,
                                rebatch_stream stream)
{
    rbi_assert(rbi_lock_is_held(&pool->lock));
    rbi_assert(bytes > 0 && bytes % REBATCH_POOL_UNIT_BYTES == 0);
    const rebatch_status status = rbi_pool_prepare(pool);
    if (status != REBATCH_OK)
        return status;
    *request = (struct rbi_request){.bytes = bytes,
                                    .stream = rbi_pool_open_stream(pool, stream),
                                    .zone = rbi_pool_zone(pool, bytes)};
    if (!request->stream)
        return rbi_error(REBATCH_E_HOST_OOM, "the pool has no host memory for another stream");
    request->stream->pins++;
    return REBATCH_OK;
}

void rbi_request_close(struct rbi_request *request)
{
    rbi_assert(request->stream->pins > 0);
    request->stream->pins--;
}

/* Whether the innermost open scope has what the thread that runs allocates and frees. */
static bool is_in_scope(const rebatch_pool *pool)
{
    if (pool->owner_thread == 0)
        return pool->depth > pool->undoing; /* a scope that only observes is every thread's */
    return !rbi_pool_is_other_thread(pool, pool->owner_thread);
}

/* Has one callback give up memory; true when it did. It runs without the lock, so that it can
 * free. */
static bool press(rebatch_pool *pool, const struct rbi_pressure *pressure, size_t wanted_bytes)
{
    rbi_assert(rbi_lock_is_held(&pool->lock));
    const uint64_t freed = pool->stats.freed_total_bytes;
    const bool is_watched = pool->pressure_watch.on_pressure && is_in_scope(pool);
    const struct rbi_pool_pressure_watch watch = pool->pressure_watch;
    pool->stats.pressure_calls++;
    pool->pressing++;
    rbi_pool_give_lock(pool);
    const rebatch_pool *outer = rbi_pool_pressing;
    rbi_pool_pressing = pool;
    rbi_pool_callbacks++;
    if (is_watched)
        watch.on_pressure(watch.user, true);
    const size_t given = pressure->give_up(wanted_bytes, pressure->user);
    if (is_watched)
        watch.on_pressure(watch.user, false);
    rbi_pool_callbacks--;
    rbi_pool_pressing = outer;
    rbi_pool_take_lock(pool);
    rbi_assert(pool->pressing > 0);
    pool->pressing--;
    return given > 0 || pool->stats.freed_total_bytes != freed;
}

/* Host memory for what the device has not, where a failure could not be undone. A chunk that is too
 * large for a hole is made again in pieces, which the device may refuse by then: the host has them,
 * and each time that this fails the pool holds less of the device. */
static rebatch_status take_overflow(struct rbi_block **out, rebatch_pool *pool,
                                    struct rbi_request *request)
{
    uint64_t before;
    rebatch_status status;
    reach(pool, request, REBATCH_STAGE_OVERFLOW);
    do {
        struct rbi_mapping mapping = {.bytes = request->bytes,
                                      .stream = request->stream,
                                      .zone = request->zone,
                                      .overflows = true};
        before = rbi_vm_device_bytes(&pool->vm);
        status = rbi_pool_prepare(pool);
        if (status == REBATCH_OK)
            status = take_mapping(out, pool, request, &mapping);
    } while (status == REBATCH_OOM && rbi_vm_device_bytes(&pool->vm) < before);
    return status;
}

rebatch_status rbi_pool_search(struct rbi_block **out, rebatch_pool *pool,
                               struct rbi_request *request)
{
    *out = NULL;
    rebatch_status status = request->strikes ? REBATCH_OOM : run_stages_beside(out, pool, request);
    if (status == REBATCH_OOM && pool->plan.mode == RBI_PLAN_SERVES) {
        rbi_plan_leave(pool); /* what the arena does not use may do */
        status = run_stages_beside(out, pool, request);
    }
    rbi_assert((status == REBATCH_OK) == (*out != NULL));
    for (size_t i = 0; status == REBATCH_OOM && i < pool->pressure_count && !request->strikes;
         i++) {
        const struct rbi_pressure pressure = pool->pressures[i];
        reach(pool, request, REBATCH_STAGE_PRESSURE);
        if (!press(pool, &pressure, request->bytes))
            continue;
        status = run_stages_beside(out, pool, request);
        request->stage = REBATCH_STAGE_PRESSURE;
    }
    if (status == REBATCH_OOM && !request->beside && !request->arena && rbi_overflow_is_open(pool))
        status = take_overflow(out, pool, request);
    return status;
}
