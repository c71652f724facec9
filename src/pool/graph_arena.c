/* Owns the arenas of captured graphs: when their memory is theirs, and when it is lent.
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

static rebatch_status create_locked(rebatch_arena *arena, rebatch_pool *pool, bool is_shared)
{
    rebatch_status status = is_shared ? rbi_vm_try_export(&pool->vm) : REBATCH_OK;
    if (status == REBATCH_OK)
        status = find_range(&arena->range, pool);
    if (status != REBATCH_OK)
        return status;
    arena->pool = pool;
    arena->tail = arena->range->first;
    rbi_lists_remove(arena->tail);
    arena->tail->state = RBI_BLOCK_HELD;
    arena->range->is_arena = arena->range->is_kept = true;
    arena->range->is_shared = is_shared;
    arena->next = pool->first_arena;
    pool->first_arena = arena;
    return REBATCH_OK;
}

rebatch_status rbi_arena_create(rebatch_arena **out, rebatch_pool *pool, bool is_shared)
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
    status = create_locked(arena, pool, is_shared);
    rbi_pool_give_lock(pool);
    if (status == REBATCH_OK)
        *out = arena;
    else
        rbi_heap_free(arena);
    return status;
}

rebatch_status rebatch_arena_create(rebatch_arena **out, rebatch_pool *pool)
{
    return rbi_arena_create(out, pool, false);
}

/* A block of an arena that is no more becomes one of the pool's. */
static void pass_on(rebatch_pool *pool, struct rbi_block *block, struct rbi_lists *lists)
{
    const uint64_t freed_at = block->freed_at; /* or requested_bytes */
    const bool is_free = block->state == RBI_BLOCK_FREE;
    if (is_free)
        rbi_lists_remove(block);
    if (block->state != RBI_BLOCK_LOST && !rbi_block_is_bare(block)) {
        rbi_block_give(block, lists);
        block->freed_at = freed_at;
    }
    if (is_free || rbi_block_is_bare(block)) {
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
    arena->range->is_arena = arena->range->is_kept = arena->range->is_shared = false;
    for (struct rbi_block *b = arena->range->first, *next; b; b = next) {
        next = b->after;
        pass_on(pool, b, arena->home ? &arena->home->lists : NULL);
    }
    if (arena->home)
        arena->home->pins--;
    rbi_heap_free(arena);
    rbi_pool_end_free(pool);
}

/* ---- lent, and claimed ---- */

rebatch_status rebatch_arena_lend(rebatch_arena *arena)
{
    const rebatch_status status = check(arena);
    if (status != REBATCH_OK)
        return status;
    if (arena->range->is_shared)
        return rbi_error(REBATCH_E_STATE, "the arena is shared with other processes: expected one "
                                          "of rebatch_arena_create()");
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
    const size_t bytes = rbi_arena_taken_bytes(arena);
    rebatch_status status = rbi_arena_check_lost(arena);
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
        (status = rbi_pool_check_caller(arena->pool, "rebatch_arena_claim")) != REBATCH_OK ||
        (status = rbi_pool_take_lock_awake(arena->pool)) != REBATCH_OK)
        return status;
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
        (status = rbi_pool_check_caller(arena->pool, "rebatch_arena_open")) != REBATCH_OK ||
        (status = rbi_pool_take_lock_awake(arena->pool)) != REBATCH_OK)
        return status;
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
        out->taken_bytes += rbi_block_is_bare(b) ? b->bytes : 0;
        out->live_bytes +=
            b->state == RBI_BLOCK_LIVE || b->state == RBI_BLOCK_DEFERRED ? b->bytes : 0;
    }
    out->taken_total_bytes = arena->taken_total_bytes;
    rbi_pool_give_lock(arena->pool);
    return REBATCH_OK;
}
