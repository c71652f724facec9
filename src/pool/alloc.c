/* Owns an allocation from the call to the block in use.
 * Must not know how memory is found. */
#include "pool/pool.h"

/* ---- finding a block ---- */

static rebatch_status alloc_by_search(struct rbi_block **out, rebatch_pool *pool,
                                      rebatch_arena *arena, size_t bytes, size_t rounded,
                                      rebatch_stream stream, rebatch_tag tag)
{
    struct rbi_request request;
    rebatch_status status = rbi_request_open(&request, pool, rounded, stream);
    if (status != REBATCH_OK)
        return status;
    request.arena = arena;
    request.beside = arena ? pool->promised_bytes != 0 : rbi_pool_is_beside_promise(pool);
    request.strikes = pool->overflow.is_struck && !arena;
    pool->overflow.is_struck = false;
    status = rbi_pool_search(out, pool, &request);
    if (status == REBATCH_OK)
        rbi_block_list(&pool->heap, *out);
    if (status == REBATCH_OOM)
        status = rbi_pool_report_oom(pool, &request, bytes, pool->tags[tag].name);
    rbi_request_close(&request);
    return status;
}

/* The first stage of the search without a request: NULL when it finds nothing, or might need host
 * memory first. */
static inline struct rbi_block *take_cached(rebatch_pool *pool, struct rbi_pool_stream *stream,
                                            size_t rounded)
{
    if (pool->heap.block_nodes.spare < rbi_pool_search_nodes(pool) || pool->heap.late.crowded ||
        rbi_pool_is_beside_promise(pool))
        return NULL;
    if (stream->lists.misses < RBI_POOL_MISSES)
        stream->lists.misses++;
    struct rbi_block *block = rbi_pool_take_own_fast(pool, stream, rounded);
    if (!block && !(block = rbi_pool_take_own(pool, stream, rounded)))
        return NULL;
    pool->stages[REBATCH_STAGE_CACHE]++;
    rbi_block_list(&pool->heap, block);
    return block;
}

static rebatch_status find_block(struct rbi_block **out, rebatch_pool *pool, size_t bytes,
                                 size_t rounded, rebatch_stream stream, rebatch_tag tag)
{
    if (RBI_UNLIKELY(pool->plan.mode == RBI_PLAN_SERVES) &&
        (*out = rbi_plan_serve(pool, rounded, stream)) != NULL)
        return REBATCH_OK;
    struct rbi_pool_stream *const known = rbi_pool_find_stream(pool, stream);
    if (RBI_LIKELY(known != NULL)) {
        pool->last_stream = known;
        *out = rbi_quick_pop(&known->lists, rounded);
        if (RBI_LIKELY(*out != NULL))
            return REBATCH_OK;
        if (pool->caching && (*out = take_cached(pool, known, rounded)) != NULL)
            return REBATCH_OK;
    }
    return alloc_by_search(out, pool, NULL, bytes, rounded, stream, tag);
}

/* ---- the call ---- */

/* What is wrong with the arguments of a call that rebatch_pool_alloc() does not go on with. */
static __attribute__((cold, noinline)) rebatch_status refuse(void **out, const rebatch_pool *pool,
                                                             size_t bytes, rebatch_stream stream)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL: expected where to put the pointer");
    *out = NULL;
    size_t rounded;
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK || bytes == 0)
        return status;
    if ((status = rbi_pool_check_size(&rounded, pool, bytes)) != REBATCH_OK ||
        (status = rbi_pool_check_stream(pool, stream)) != REBATCH_OK)
        return status;
    return rbi_pool_check_caller(pool, "rebatch_pool_alloc");
}

/* Once without an arena, which costs an ordinary allocation nothing, and once with one. */
static inline __attribute__((always_inline)) rebatch_status
alloc_locked(void **out, rebatch_pool *pool, rebatch_arena *arena, size_t bytes, size_t rounded,
             rebatch_stream stream, rebatch_tag tag)
{
    rbi_assert(rbi_lock_is_held(&pool->lock));
    if (RBI_UNLIKELY(tag >= pool->tag_count))
        return rbi_error(REBATCH_E_INVALID,
                         "tag is %u: expected one from rebatch_pool_tag(), 0 to %zu", (unsigned)tag,
                         pool->tag_count - 1);
    struct rbi_block *block;
    rebatch_status status = REBATCH_OK;
    if (RBI_UNLIKELY(pool->plan.marked != 0) && !arena)
        rbi_pool_begin_marked(pool);
    if (RBI_UNLIKELY(pool->fault.strikes != NULL)) {
        rounded = rbi_pool_pad(pool, bytes, rounded);
        status = rbi_pool_inject_failure(pool, bytes, rounded, stream, pool->tags[tag].name);
    }
    do {
        if (status == REBATCH_OK)
            status = RBI_UNLIKELY(pool->overflow.is_struck || arena)
                         ? alloc_by_search(&block, pool, arena, bytes, rounded, stream, tag)
                         : find_block(&block, pool, bytes, rounded, stream, tag);
    } while (RBI_UNLIKELY(pool->heap.late.owner != 0) && status == REBATCH_OK && !arena &&
             !rbi_old_buffers_pass(pool, block));
    if (RBI_UNLIKELY(status != REBATCH_OK))
        return status;
    rbi_assert(block->bytes == rounded && rbi_stream_of(block)->stream == stream);
    const size_t promised = pool->promised_bytes;
    if (RBI_UNLIKELY(rbi_pool_use_block(pool, block, bytes, tag)))
        rbi_pool_raise_peaks(pool);
    if (arena) {
        block->phase = 0; /* a plan serves no capture, and what was promised is not for it */
        pool->promised_bytes = promised;
    } else if (RBI_UNLIKELY(pool->plan.mode != RBI_PLAN_OFF) && !block->planned) {
        rbi_plan_note_alloc(pool, block);
    }
    RBI_RECORD(pool, ALLOC, block->address, block->bytes, rbi_stream_of(block)->stream, tag);
    *out = block->address;
    rbi_pool_fill_block(pool, block, pool->fill.allocated);
    rbi_pool_tell(pool, RBI_POOL_ALLOC, *out, bytes, stream);
    return REBATCH_OK;
}

static inline __attribute__((always_inline)) rebatch_status
alloc_from(void **out, rebatch_pool *pool, rebatch_arena *arena, size_t bytes,
           rebatch_stream stream, rebatch_tag tag)
{
    size_t rounded;
    if (RBI_UNLIKELY(!out || !pool || bytes == 0 || !rbi_pool_round_size(&rounded, pool, bytes) ||
                     rounded > SIZE_MAX - (pool->page_bytes - 1) ||
                     (stream && !rbi_device_stream_is_valid(pool->device, stream)) ||
                     rbi_pool_is_pressing(pool)))
        return refuse(out, pool, bytes, stream);
    *out = NULL;
    rebatch_status status = rbi_pool_take_lock_awake(pool);
    if (RBI_UNLIKELY(status != REBATCH_OK))
        return status;
    status = alloc_locked(out, pool, arena, bytes, rounded, stream, tag);
    rbi_pool_give_lock(pool);
    return status;
}

rebatch_status rebatch_pool_alloc(void **out, rebatch_pool *pool, size_t bytes,
                                  rebatch_stream stream, rebatch_tag tag)
{
    return alloc_from(out, pool, NULL, bytes, stream, tag);
}

rebatch_status rbi_pool_alloc_from(void **out, rebatch_pool *pool, rebatch_arena *arena,
                                   size_t bytes, rebatch_stream stream, rebatch_tag tag)
{
    return alloc_from(out, pool, arena, bytes, stream, tag);
}
