/* Owns which addresses of an arena have memory.
 * Must not know when an arena is lent. */
#include "pool/pool.h"

size_t rbi_arena_taken_bytes(const rebatch_arena *arena)
{
    size_t bytes = 0;
    for (const struct rbi_block *b = arena->range->first; b && b != arena->tail; b = b->after)
        bytes += rbi_block_is_bare(b) ? b->bytes : 0;
    return bytes;
}

/* Maps spare pages to the beginning of addresses without memory: it is a free block then. */
static rebatch_status map_front(struct rbi_block **out, rebatch_arena *arena,
                                struct rbi_block *bare, size_t bytes)
{
    rebatch_pool *const pool = arena->pool;
    bool quarantined;
    const rebatch_status status = (arena->range->is_shared ? rbi_map_fill_shared : rbi_map_fill)(
        &pool->vm, arena->range->map, bare->address, bytes, &quarantined);
    if (status != REBATCH_OK && !quarantined)
        return status;
    if (bytes < bare->bytes)
        bare = rbi_block_cut(&pool->heap, bare, bytes, false);
    else if (bare == arena->tail)
        arena->tail = NULL;
    if (quarantined) {
        rbi_block_lose(pool, bare);
        return status;
    }
    RBI_RECORD(pool, MAP, bare->address, bytes, arena->own.stream, 0);
    rbi_block_give(bare, &arena->own.lists);
    *out = rbi_block_put(&pool->heap, bare);
    return REBATCH_OK;
}

/* Room on the device for new chunks: what is cached makes it. */
static rebatch_status make_room(rebatch_pool *pool, size_t bytes)
{
    size_t room, released;
    rebatch_status status = rbi_pool_room(&room, pool, NULL);
    const size_t cached = (size_t)rbi_pool_cached(pool);
    if (status != REBATCH_OK || bytes <= room)
        return status;
    if (bytes - room > cached - rbi_min(cached, pool->promised_bytes))
        return REBATCH_OOM;
    pool->vm.floor_pages = 0; /* what is given back is taken again at once */
    status = rbi_pool_trim_cache(pool, cached - (bytes - room), NULL, &released);
    rbi_pool_set_floor(pool);
    if (status == REBATCH_OK)
        status = rbi_pool_room(&room, pool, NULL);
    return status == REBATCH_OK && bytes > room ? REBATCH_OOM : status;
}

static rebatch_status gather(rebatch_pool *pool, const struct rbi_request *request, size_t bytes)
{
    if (request->arena->range->is_shared)
        return make_room(pool, bytes);
    struct rbi_mapping mapping = {.bytes = bytes, .stream = request->stream};
    return rbi_mapping_gather(pool, &mapping, bytes / pool->page_bytes);
}

rebatch_status rbi_arena_check_lost(const rebatch_arena *arena)
{
    return arena->is_lost
               ? rbi_error(REBATCH_E_DEVICE, "an address of the arena could not be mapped again: "
                                             "expected rebatch_arena_destroy()")
               : REBATCH_OK;
}

static rebatch_status map_taken(struct rbi_block **out, rebatch_pool *pool,
                                const struct rbi_request *request)
{
    rebatch_arena *const arena = request->arena;
    rebatch_status status = rbi_arena_check_lost(arena);
    if (status == REBATCH_OK)
        status = gather(pool, request, rbi_arena_taken_bytes(arena));
    for (struct rbi_block *b = arena->range->first; b && b != arena->tail && !status;
         b = b->after) {
        struct rbi_block *const bare = b;
        if (rbi_block_is_bare(bare) &&
            (status = map_front(&b, arena, bare, bare->bytes)) != REBATCH_OK)
            arena->is_lost = bare->state == RBI_BLOCK_LOST;
    }
    *out = status == REBATCH_OK ? arena->range->first : NULL;
    return status;
}

/* Few large pieces are exported rather than many small ones, where there is room. */
#define SHARED_PARTS 8
#define SHARED_LEAST_PAGES 16

static size_t grow_ahead(rebatch_pool *pool, const rebatch_arena *arena, size_t bytes)
{
    size_t room;
    const size_t held = (size_t)(arena->tail->address - arena->range->address);
    const size_t part = held / SHARED_PARTS & ~(pool->page_bytes - 1);
    const size_t most = rbi_min(rbi_max(part, SHARED_LEAST_PAGES * pool->page_bytes),
                                pool->page_bytes << (RBI_CHUNK_SIZES - 1));
    if (!arena->range->is_shared || most <= bytes || most > arena->tail->bytes ||
        rbi_pool_room(&room, pool, NULL) != REBATCH_OK || most > room)
        return bytes;
    return most;
}

/* A free block at the end of what is mapped is a part of what is asked for. */
static rebatch_status take_or_grow(struct rbi_block **out, rebatch_pool *pool,
                                   const struct rbi_request *request)
{
    rebatch_arena *const arena = request->arena;
    struct rbi_lists *const lists = &arena->own.lists;
    rbi_lists_flush(&pool->heap, lists);
    struct rbi_block *block = rbi_lists_find(lists, request->bytes, UINT64_MAX, RBI_ZONE_ANY);
    if (!block) {
        const struct rbi_block *const last = arena->tail ? arena->tail->before : NULL;
        const size_t there = last && last->state == RBI_BLOCK_FREE ? last->bytes : 0;
        size_t bytes;
        if (!rbi_round_up(request->bytes - there, pool->page_bytes, &bytes) || !arena->tail ||
            bytes > arena->tail->bytes)
            return REBATCH_OOM;
        bytes = grow_ahead(pool, arena, bytes);
        rebatch_status status = gather(pool, request, bytes);
        if (status == REBATCH_OK)
            status = map_front(&block, arena, arena->tail, bytes);
        if (status != REBATCH_OK)
            return status;
    }
    *out = rbi_block_take(&pool->heap, block, request->bytes);
    return REBATCH_OK;
}

static rebatch_status check_open(const struct rbi_request *request)
{
    const rebatch_arena *const arena = request->arena;
    if (!arena->range->is_kept)
        return rbi_error(REBATCH_E_STATE,
                         "the arena is lent: expected rebatch_arena_claim() before an allocation");
    if (arena->home != request->stream)
        return rbi_error(REBATCH_E_STATE,
                         "the arena is open for %s stream: expected "
                         "rebatch_arena_open() before an allocation",
                         arena->home ? "another" : "no");
    return REBATCH_OK;
}

rebatch_status rbi_arena_search(struct rbi_block **out, rebatch_pool *pool,
                                const struct rbi_request *request)
{
    rebatch_status (*const find)(struct rbi_block **, rebatch_pool *, const struct rbi_request *) =
        request->claims ? map_taken : take_or_grow;
    rebatch_status status = request->claims ? REBATCH_OK : check_open(request);
    if (status == REBATCH_OK)
        status = rbi_pool_poll(pool);
    if (status == REBATCH_OK)
        status = rbi_pool_poll_beyond(pool, true);
    rbi_pool_flush_lists(pool);
    if (status == REBATCH_OK)
        status = find(out, pool, request);
    if (status != REBATCH_OOM || !rbi_pool_has_waiting(pool, NULL))
        return status;
    status = rbi_pool_await_all(pool);
    return status == REBATCH_OK ? find(out, pool, request) : status;
}
