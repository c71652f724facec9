/* Owns memory as a whole: what is held ahead of its use, given back, limited, or under pressure.
 * Must not know single blocks' lives. */
#include "pool/pool.h"

/* ---- ahead of its use ---- */

/* With caching off nothing is held: REBATCH_OOM when the device has not the room now. */
static rebatch_status look_for_room(rebatch_pool *pool, size_t bytes)
{
    size_t room;
    const rebatch_status status = rbi_pool_room(&room, pool, NULL);
    return status == REBATCH_OK && bytes > room ? REBATCH_OOM : status;
}

/* Why the guarantee holds. Let `left` be `bytes` less the rounded sizes allocated since. Claim:
 * there is always a free block of at least `left` that the stream can have before fresh memory
 * is given up. At first it is the piece found here. An allocation of s <= left takes either
 * another block, and the piece stays, or that one, and as blocks are cut to exactly s in one
 * place, left - s remain in one piece. A free only adds free memory, and merging makes no piece
 * smaller. An allocation for another stream takes the piece, or a part of it, on the stages
 * OTHER_STREAMS or WAIT, which come before TRIM; so none of these allocations gets as far as
 * giving memory back, and the piece stays in the pool. Nor does REMAP take it apart: it takes only
 * what is complete, and then OTHER_STREAMS has found the piece before. */
static rebatch_status hold_piece(rebatch_pool *pool, struct rbi_request *request)
{
    rbi_lists_flush(&pool->heap, &request->stream->lists);
    const size_t before = pool->promised_bytes;
    pool->promised_bytes = rbi_max(before, request->bytes);
    request->zone = RBI_ZONE_ANY; /* as of all requests from here on */
    if (rbi_lists_find(&request->stream->lists, request->bytes, UINT64_MAX, RBI_ZONE_ANY))
        return REBATCH_OK;
    struct rbi_block *block;
    const rebatch_status status = rbi_pool_search(&block, pool, request);
    if (status == REBATCH_OK)
        (void)rbi_block_put(&pool->heap, block);
    else
        pool->promised_bytes = before;
    return status;
}

/* Of a thread beside a scope that leaves it out: the memory is there now, and nothing is
 * promised. */
static rebatch_status look_for_piece(rebatch_pool *pool, struct rbi_request *request)
{
    struct rbi_block *block;
    request->beside = true;
    const rebatch_status status = rbi_pool_search(&block, pool, request);
    if (status == REBATCH_OK)
        (void)rbi_block_put(&pool->heap, block);
    return status;
}

static rebatch_status reserve_locked(rebatch_pool *pool, size_t bytes, size_t rounded,
                                     rebatch_stream stream)
{
    rbi_assert(rbi_lock_is_held(&pool->lock));
    struct rbi_request request;
    if (pool->plan.marked != 0)
        rbi_pool_begin_marked(pool);
    rebatch_status status = rbi_request_open(&request, pool, rounded, stream);
    if (status != REBATCH_OK)
        return status;
    request.ahead = true;
    if (!pool->caching) {
        request.stage = REBATCH_STAGE_DEVICE;
        status = look_for_room(pool, rounded);
    } else if (rbi_plan_reserve(pool, rounded, stream)) {
        pool->promised_bytes = rbi_max(pool->promised_bytes, rounded);
    } else {
        status = rbi_pool_is_other_thread(pool, pool->owner_thread) ? look_for_piece(pool, &request)
                                                                    : hold_piece(pool, &request);
    }
    if (status == REBATCH_OK)
        rbi_plan_note_reserve(pool, rounded, stream);
    if (status == REBATCH_OOM)
        status = rbi_pool_report_oom(pool, &request, bytes, "reserve");
    rbi_request_close(&request);
    return status;
}

rebatch_status rebatch_pool_reserve(rebatch_pool *pool, size_t bytes, rebatch_stream stream)
{
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK || bytes == 0)
        return status;
    size_t rounded = 0;
    if ((status = rbi_pool_check_size(&rounded, pool, bytes)) != REBATCH_OK ||
        (status = rbi_pool_check_stream(pool, stream)) != REBATCH_OK ||
        (status = rbi_pool_check_caller(pool, "rebatch_pool_reserve")) != REBATCH_OK ||
        (status = rbi_pool_take_lock_awake(pool)) != REBATCH_OK)
        return status;
    status = rbi_pool_inject_failure(pool, bytes, rounded, stream, "reserve");
    pool->overflow.is_struck = false;
    if (status == REBATCH_OK)
        status = reserve_locked(pool, bytes, rounded, stream);
    if (status == REBATCH_OK)
        rbi_pool_tell(pool, RBI_POOL_RESERVE, NULL, bytes, stream);
    rbi_pool_give_lock(pool);
    return status;
}

/* Takes what `stream` lacks of `bytes` from the device, or from free pages of other streams. */
static rebatch_status top_up(rebatch_pool *pool, size_t bytes, struct rbi_pool_stream *stream)
{
    if (stream->lists.free_bytes >= bytes)
        return REBATCH_OK;
    size_t shortage;
    if (!rbi_round_up(bytes - stream->lists.free_bytes, pool->page_bytes, &shortage))
        return REBATCH_OOM;
    rbi_pool_flush_lists(pool);
    struct rbi_block *block;
    return rbi_pool_grow(&block, pool, shortage, stream, stream);
}

/* What other streams have free, in parts of pages once their cache was given back. */
static size_t free_of_others(const rebatch_pool *pool, const struct rbi_pool_stream *stream)
{
    uint64_t sum = 0;
    for (const struct rbi_pool_stream *s = pool->first_stream; s; s = s->next)
        sum += s == stream ? 0 : s->lists.free_bytes;
    return (size_t)sum;
}

static rebatch_status admit_locked(rebatch_pool *pool, size_t bytes, rebatch_stream stream)
{
    rbi_assert(rbi_lock_is_held(&pool->lock));
    if (!pool->caching)
        return look_for_room(pool, bytes);
    const struct rbi_pool_stream *known = rbi_pool_find_stream(pool, stream);
    if (known && known->lists.free_bytes >= bytes)
        return REBATCH_OK;
    struct rbi_request request;
    rebatch_status status = rbi_request_open(&request, pool, bytes, stream);
    if (status != REBATCH_OK)
        return status;
    if (pool->has_space && (status = rbi_pool_poll(pool)) == REBATCH_OK)
        status = rbi_pool_poll_beyond(pool, true);
    if (status == REBATCH_OK)
        status = top_up(pool, bytes, request.stream);
    if (status == REBATCH_OOM && (status = rbi_pool_await_all(pool)) == REBATCH_OK)
        status = top_up(pool, bytes, request.stream); /* of pages that work had still in use */
    if (status == REBATCH_OOM) {
        size_t released;
        status = rbi_pool_trim_cache(pool, 0, request.stream, &released);
        if (status == REBATCH_OK)
            status = top_up(pool, bytes, request.stream);
    }
    if (status == REBATCH_OOM) {
        /* The attempt may work on those streams too; and where it does not, a request that finds
         * nothing else takes their free blocks. */
        const size_t others = free_of_others(pool, request.stream);
        status = top_up(pool, bytes - rbi_min(bytes, others), request.stream);
    }
    rbi_request_close(&request);
    return status;
}

static rebatch_status check_sum(size_t *rounded, const rebatch_pool *pool, size_t bytes)
{
    size_t whole;
    if (rbi_round_up(bytes, REBATCH_POOL_UNIT_BYTES, rounded) &&
        rbi_round_up(*rounded, pool->page_bytes, &whole))
        return REBATCH_OK;
    return rbi_error(REBATCH_E_INVALID,
                     "bytes is %zu: expected a sum that can be rounded up to %zu bytes", bytes,
                     pool->page_bytes);
}

rebatch_status rbi_pool_admit(rebatch_pool *pool, size_t bytes, rebatch_stream stream)
{
    rebatch_status status = rbi_pool_check(pool);
    size_t rounded = 0; /* a sum of blocks, which are rounded up already */
    if (status != REBATCH_OK || (status = check_sum(&rounded, pool, bytes)) != REBATCH_OK ||
        (status = rbi_pool_check_stream(pool, stream)) != REBATCH_OK || rounded == 0 ||
        (status = rbi_pool_take_lock_awake(pool)) != REBATCH_OK)
        return status;
    status = admit_locked(pool, rounded, stream);
    rbi_pool_give_lock(pool);
    return status;
}

bool rbi_pool_is_caching(const rebatch_pool *pool)
{
    return pool->caching;
}

/* ---- what is cached, and to be had ---- */

rebatch_status rebatch_pool_trim(rebatch_pool *pool, size_t keep_bytes, size_t *released_bytes)
{
    if (released_bytes)
        *released_bytes = 0;
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    size_t released = 0;
    rbi_pool_take_lock(pool);
    if (pool->pending)
        status = rbi_pool_await_all(pool);
    if (status == REBATCH_OK)
        status = rbi_pool_trim_cache(pool, keep_bytes, NULL, &released);
    pool->asked_back_bytes += released;
    rbi_pool_give_lock(pool);
    if (released_bytes)
        *released_bytes = released;
    return status;
}

rebatch_status rebatch_pool_available(size_t *bytes, rebatch_pool *pool)
{
    if (!bytes)
        return rbi_error(REBATCH_E_INVALID, "bytes is NULL: expected where to put the sum");
    *bytes = 0;
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    rbi_lock_take(&pool->lock);
    status = rbi_pool_count_available(bytes, pool);
    rbi_pool_give_lock(pool);
    return status;
}

rebatch_status rebatch_pool_add_pressure(rebatch_pool *pool,
                                         size_t (*give_up)(size_t wanted_bytes, void *user),
                                         void *user)
{
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    if (!give_up)
        return rbi_error(REBATCH_E_INVALID, "give_up is NULL: expected a function");
    rbi_lock_take(&pool->lock);
    if (pool->pressure_count < RBI_POOL_PRESSURES)
        pool->pressures[pool->pressure_count++] = (struct rbi_pressure){give_up, user};
    else
        status =
            rbi_error(REBATCH_E_UNSUPPORTED,
                      "%d pressure callbacks are registered: expected no more", RBI_POOL_PRESSURES);
    rbi_pool_give_lock(pool);
    return status;
}
