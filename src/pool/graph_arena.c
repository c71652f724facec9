/* Owns the arenas of captured graphs: their blocks, and which of their addresses have memory.
 * Must not know graphs, nor when memory is short.
 *
 * Blocks of an arena lie in a range of its own, and are of lists of its own. So no search finds its
 * free memory, and a free gives it back to it. What is lent, rbi_pool_harvest_all() unmaps. */
#include "pool/pool.h"

static rebatch_status check(const rebatch_arena *arena)
{
    return arena ? REBATCH_OK
                 : rbi_error(REBATCH_E_INVALID,
                             "arena is NULL: expected one from rebatch_arena_create()");
}

/* Addresses of an arena without memory. */
static bool is_bare(const struct rbi_block *block)
{
    return block->state == RBI_BLOCK_HELD;
}

/* Of those before the tail: what the pool took. */
static size_t taken_bytes(const rebatch_arena *arena)
{
    size_t bytes = 0;
    for (const struct rbi_block *b = arena->range->first; b && b != arena->tail; b = b->after)
        bytes += is_bare(b) ? b->bytes : 0;
    return bytes;
}

/* ---- its memory ---- */

/* Maps spare pages to the beginning of addresses without memory: it is a free block then. */
static rebatch_status map_front(struct rbi_block **out, rebatch_arena *arena,
                                struct rbi_block *bare, size_t bytes)
{
    rebatch_pool *const pool = arena->pool;
    bool quarantined;
    const rebatch_status status =
        rbi_map_fill(&pool->vm, arena->range->map, bare->address, bytes, &quarantined);
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

static rebatch_status gather(rebatch_pool *pool, const struct rbi_request *request, size_t bytes)
{
    struct rbi_mapping mapping = {.bytes = bytes, .stream = request->stream};
    return rbi_mapping_gather(pool, &mapping, bytes / pool->page_bytes);
}

static rebatch_status check_lost(const rebatch_arena *arena)
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
    rebatch_status status = check_lost(arena);
    if (status == REBATCH_OK)
        status = gather(pool, request, taken_bytes(arena));
    for (struct rbi_block *b = arena->range->first; b && b != arena->tail && !status;
         b = b->after) {
        struct rbi_block *const bare = b;
        if (is_bare(bare) && (status = map_front(&b, arena, bare, bare->bytes)) != REBATCH_OK)
            arena->is_lost = bare->state == RBI_BLOCK_LOST;
    }
    *out = status == REBATCH_OK ? arena->range->first : NULL;
    return status;
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

uint64_t rbi_arenas_free_bytes(const rebatch_pool *pool)
{
    uint64_t bytes = 0;
    for (const rebatch_arena *a = pool->first_arena; a; a = a->next)
        bytes += a->own.lists.free_bytes;
    return bytes;
}

uint64_t rbi_arenas_lent_bytes(const rebatch_pool *pool)
{
    size_t pages = 0;
    char *first;
    for (const rebatch_arena *a = pool->first_arena; a; a = a->next)
        for (const struct rbi_block *b = a->range->first; b && !a->range->is_kept; b = b->after)
            if (b->state == RBI_BLOCK_FREE)
                pages += rbi_block_own_pages(pool, b, &first);
    return (uint64_t)pages * pool->page_bytes;
}

/* ---- create, and destroy ---- */

/* A range for all that the device has, without memory: that of an arena before, or a new one. */
static rebatch_status find_range(struct rbi_range **out, rebatch_pool *pool)
{
    rebatch_memory_info info;
    struct rbi_range *range = pool->heap.first_range;
    rebatch_status status = rebatch_device_memory(pool->device, &info);
    const size_t bytes =
        rbi_min(info.total_bytes & ~(pool->page_bytes - 1), RBI_RESERVED_MOST * pool->page_bytes);
    while (range && (range->zone != RBI_ZONE_LARGE || range->bytes < bytes ||
                     range->first->state != RBI_BLOCK_HOLE || range->first->after))
        range = range->next;
    if (status == REBATCH_OK && !range && (status = rbi_pool_prepare(pool)) == REBATCH_OK &&
        (status = rbi_range_reserve(pool, bytes, RBI_ZONE_LARGE)) == REBATCH_OK)
        range = pool->heap.last_range;
    *out = range;
    return status;
}

static rebatch_status create_locked(rebatch_arena *arena, rebatch_pool *pool)
{
    const rebatch_status status = find_range(&arena->range, pool);
    if (status != REBATCH_OK)
        return status;
    arena->pool = pool;
    arena->tail = arena->range->first;
    rbi_lists_remove(arena->tail);
    arena->tail->state = RBI_BLOCK_HELD;
    arena->range->is_arena = arena->range->is_kept = true;
    arena->next = pool->first_arena;
    pool->first_arena = arena;
    return REBATCH_OK;
}

rebatch_status rebatch_arena_create(rebatch_arena **out, rebatch_pool *pool)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL: expected where to put the arena");
    *out = NULL;
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    if (!pool->has_space)
        return rbi_error(REBATCH_E_UNSUPPORTED,
                         "the pool has no virtual memory, or does not cache: expected both");
    rebatch_arena *const arena = rbi_heap_calloc(1, sizeof *arena);
    if (!arena)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for an arena");
    rbi_lock_take(&pool->lock);
    status = create_locked(arena, pool);
    rbi_pool_give_lock(pool);
    if (status == REBATCH_OK)
        *out = arena;
    else
        rbi_heap_free(arena);
    return status;
}

/* A block of an arena that is no more becomes one of the pool's. */
static void pass_on(rebatch_pool *pool, struct rbi_block *block, struct rbi_lists *lists)
{
    const uint64_t freed_at = block->freed_at; /* or requested_bytes */
    const bool is_free = block->state == RBI_BLOCK_FREE;
    if (is_free)
        rbi_lists_remove(block);
    if (block->state != RBI_BLOCK_LOST && !is_bare(block)) {
        rbi_block_give(block, lists);
        block->freed_at = freed_at;
    }
    if (is_free || is_bare(block)) {
        block->state = RBI_BLOCK_HELD;
        (void)rbi_block_put(&pool->heap, block);
    }
}

/* What replays may still use waits for the work that there is. */
static void stamp(rebatch_arena *arena)
{
    rebatch_pool *const pool = arena->pool;
    rbi_lists_flush(&pool->heap, &arena->own.lists);
    const uint64_t point = ++pool->progress.frees;
    for (struct rbi_block *b = arena->range->first; b; b = b->after)
        if (b->state == RBI_BLOCK_FREE || b->state == RBI_BLOCK_PENDING)
            b->freed_at = point;
}

void rebatch_arena_destroy(rebatch_arena *arena)
{
    if (!arena)
        return;
    rebatch_pool *const pool = arena->pool;
    rbi_lock_take(&pool->lock);
    rebatch_arena **at = &pool->first_arena;
    while (*at != arena)
        at = &(*at)->next;
    *at = arena->next;
    stamp(arena);
    arena->range->is_arena = arena->range->is_kept = false;
    for (struct rbi_block *b = arena->range->first, *next; b; b = next) {
        next = b->after;
        pass_on(pool, b, arena->home ? &arena->home->lists : NULL);
    }
    if (arena->home)
        arena->home->pins--;
    rbi_heap_free(arena);
    rbi_pool_end_free(pool);
}

void rbi_arenas_destroy(rebatch_pool *pool)
{
    while (pool->first_arena) {
        rebatch_arena *const arena = pool->first_arena;
        pool->first_arena = arena->next;
        rbi_heap_free(arena);
    }
}

/* ---- lent, and claimed ---- */

rebatch_status rebatch_arena_lend(rebatch_arena *arena)
{
    const rebatch_status status = check(arena);
    if (status != REBATCH_OK)
        return status;
    rbi_lock_take(&arena->pool->lock);
    if (arena->range->is_kept)
        stamp(arena);
    arena->range->is_kept = false;
    rbi_pool_end_free(arena->pool);
    return REBATCH_OK;
}

static rebatch_status claim_locked(rebatch_arena *arena)
{
    rebatch_pool *const pool = arena->pool;
    const size_t bytes = taken_bytes(arena);
    rebatch_status status = check_lost(arena);
    if (status == REBATCH_OK && bytes == 0)
        arena->range->is_kept = true;
    if (status != REBATCH_OK || bytes == 0)
        return status;
    struct rbi_request request;
    struct rbi_block *ignored;
    status = rbi_request_open(&request, pool, bytes, arena->own.stream);
    if (status != REBATCH_OK)
        return status;
    request.arena = arena;
    request.claims = true;
    request.beside = pool->promised_bytes != 0;
    arena->range->is_kept = true; /* or it would take from itself */
    status = rbi_pool_search(&ignored, pool, &request);
    arena->range->is_kept = status == REBATCH_OK;
    if (status == REBATCH_OOM)
        status =
            rbi_error(status, "the pool took %zu bytes of the arena: expected as many free", bytes);
    rbi_request_close(&request);
    return status;
}

rebatch_status rebatch_arena_claim(rebatch_arena *arena)
{
    rebatch_status status = check(arena);
    if (status != REBATCH_OK ||
        (status = rbi_pool_check_caller(arena->pool, "rebatch_arena_claim")) != REBATCH_OK)
        return status;
    rbi_lock_take(&arena->pool->lock);
    status = claim_locked(arena);
    rbi_pool_give_lock(arena->pool);
    return status;
}

static rebatch_status open_locked(rebatch_arena *arena, rebatch_stream stream)
{
    rebatch_pool *const pool = arena->pool;
    struct rbi_pool_stream *const home = rbi_pool_open_stream(pool, stream);
    if (!home)
        return rbi_error(REBATCH_E_HOST_OOM, "the pool has no host memory for another stream");
    home->pins++; /* as long as blocks of the arena may become its own */
    const rebatch_status status = claim_locked(arena);
    struct rbi_pool_stream *const let_go = status == REBATCH_OK ? arena->home : home;
    if (let_go)
        let_go->pins--;
    if (status != REBATCH_OK)
        return status;
    arena->home = home;
    arena->own.stream = stream;
    return REBATCH_OK;
}

rebatch_status rebatch_arena_open(rebatch_arena *arena, rebatch_stream stream)
{
    rebatch_status status = check(arena);
    if (status != REBATCH_OK ||
        (status = rbi_pool_check_stream(arena->pool, stream)) != REBATCH_OK ||
        (status = rbi_pool_check_caller(arena->pool, "rebatch_arena_open")) != REBATCH_OK)
        return status;
    rbi_lock_take(&arena->pool->lock);
    status = open_locked(arena, stream);
    rbi_pool_give_lock(arena->pool);
    return status;
}

/* ---- its blocks ---- */

rebatch_status rebatch_arena_alloc(void **out, rebatch_arena *arena, size_t bytes,
                                   rebatch_stream stream, rebatch_tag tag)
{
    if (out)
        *out = NULL;
    const rebatch_status status = check(arena);
    return status == REBATCH_OK ? rbi_pool_alloc_from(out, arena->pool, arena, bytes, stream, tag)
                                : status;
}

bool rebatch_arena_has(const rebatch_arena *arena, const void *address)
{
    return arena && (uintptr_t)address >= (uintptr_t)arena->range->address &&
           (uintptr_t)address - (uintptr_t)arena->range->address < arena->range->bytes;
}

rebatch_status rebatch_arena_get_stats(rebatch_arena_stats *out, rebatch_arena *arena)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL: expected where to put the statistics");
    *out = (rebatch_arena_stats){0};
    const rebatch_status status = check(arena);
    if (status != REBATCH_OK)
        return status;
    rbi_lock_take(&arena->pool->lock);
    for (const struct rbi_block *b = arena->range->first; b && b != arena->tail; b = b->after) {
        out->bytes += b->bytes;
        out->taken_bytes += is_bare(b) ? b->bytes : 0;
        out->live_bytes +=
            b->state == RBI_BLOCK_LIVE || b->state == RBI_BLOCK_DEFERRED ? b->bytes : 0;
    }
    out->taken_total_bytes = arena->taken_total_bytes;
    rbi_pool_give_lock(arena->pool);
    return REBATCH_OK;
}
