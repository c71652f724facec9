/* Owns what a cycle that runs does where a call is not as most are.
 * Must not know how it was learnt, nor how it ends. */
#include "pool/pool.h"

/* ---- allocations that wait ---- */

/* By what is known, else by one question to each stream that has not come far enough. */
static bool is_done(rebatch_pool *pool, const struct rbi_cycle_call *call)
{
    struct rbi_cycle *const cycle = &pool->cycle;
    const struct rbi_cycle_wait *wait = &cycle->waits[call->of];
    for (;; wait++) {
        const struct rbi_cycle_use *const use = &cycle->uses[wait->use];
        if (!rbi_stream_has_come(pool, use->stream, use->point)) {
            cycle->lags = true;
            return false;
        }
        if (wait->last)
            return true;
    }
}

struct rbi_block *rbi_cycle_take_when_done(rebatch_pool *pool, size_t bytes, rebatch_stream stream)
{
    const struct rbi_cycle_call *const call = pool->cycle.next;
    if (rbi_cycle_is_outdated(pool))
        return NULL;
    if (!rbi_cycle_allocates(call) || call->stream->stream != stream ||
        (size_t)rbi_cycle_units(call) * REBATCH_POOL_UNIT_BYTES != bytes)
        return NULL;
    return is_done(pool, call) ? rbi_cycle_hand_out(pool, bytes) : NULL;
}

/* ---- blocks that other streams use ---- */

static bool has_user(const struct rbi_block *block, const struct rbi_pool_stream *stream)
{
    const struct rbi_block_use *use = block->uses;
    while (use && use->stream != stream)
        use = use->next;
    return use != NULL || block->stream == stream;
}

bool rbi_cycle_use(rebatch_pool *pool, const void *pointer, rebatch_stream stream)
{
    struct rbi_cycle *const cycle = &pool->cycle;
    if (!rbi_cycle_runs(pool))
        return false;
    const struct rbi_cycle_call *const call = cycle->next;
    if (call->units != RBI_CYCLE_USE || call->stream->stream != stream)
        return false;
    if (call->of == RBI_CYCLE_NOBODY && call->address != pointer)
        return false;
    if (call->of != RBI_CYCLE_NOBODY) {
        struct rbi_block *const block = cycle->calls[call->of].block;
        if (block->address != pointer)
            return false;
        if (!has_user(block, call->stream))
            rbi_block_add_use(pool, block, call->stream);
    }
    rbi_cycle_go_on(cycle);
    return true;
}

/* Whether they are the streams that used it when the period was learnt. */
static bool are_users_known(const struct rbi_block *block, const struct rbi_cycle_use *known)
{
    for (const struct rbi_block_use *use = block->uses; use; use = use->next, known++)
        if (use->stream != known->stream || known->last != (use->next == NULL))
            return false;
    return block->used;
}

/* What was placed anew is waited for by marks that are planned here too. */
static bool give_old_with_marks(rebatch_pool *pool, struct rbi_cycle_call *from,
                                const struct rbi_cycle_use *use)
{
    (void)rbi_cycle_give_old(pool, from);
    do
        if (use->marks)
            rbi_stream_mark(pool, use->stream);
    while (!use++->last);
    return true;
}

bool rbi_cycle_give_used(rebatch_pool *pool, const void *pointer)
{
    struct rbi_cycle *const cycle = &pool->cycle;
    const struct rbi_cycle_call *const call = cycle->next;
    if (call->units != RBI_CYCLE_FREE_USED)
        return false;
    struct rbi_cycle_call *const from = &cycle->calls[call->of];
    struct rbi_block *const block = from->block;
    struct rbi_cycle_use *use = &cycle->uses[call->first_use];
    if (block->address != pointer || rbi_pool_has_younger_scope(pool, block))
        return false;
    if (rbi_cycle_is_old(from))
        return give_old_with_marks(pool, from, use);
    if (!are_users_known(block, use))
        return false;
    do
        use->point = rbi_stream_note_point(pool, use->stream, use->marks);
    while (!use++->last);
    rbi_block_end_uses(pool, block);
    rbi_cycle_take_back(pool, from, block);
    return true;
}

uint64_t rbi_cycle_waiting_bytes(const rebatch_pool *pool, const struct rbi_pool_stream *stream)
{
    const struct rbi_cycle *const cycle = &pool->cycle;
    uint64_t bytes = 0;
    bool waits = false;
    if (cycle->phase != RBI_CYCLE_RUNS)
        return 0;
    for (size_t i = 0; i < cycle->use_count; i++) {
        const struct rbi_cycle_use *const use = &cycle->uses[i];
        waits = waits || use->stream->done < use->point;
        if (!use->last)
            continue;
        const struct rbi_cycle_call *const from = &cycle->calls[cycle->calls[use->call].of];
        if (waits && from->stream == stream)
            bytes += (uint64_t)rbi_cycle_units(from) * REBATCH_POOL_UNIT_BYTES;
        waits = false;
    }
    return bytes;
}

/* ---- what was placed anew ---- */

bool rbi_cycle_give_old(rebatch_pool *pool, struct rbi_cycle_call *from)
{
    struct rbi_block *const block = from->block;
    rbi_cycle_go_on(&pool->cycle);
    from->block = NULL;
    rbi_pool_count_free(pool, block);
    rbi_pool_leave_use(block);
    if (block->used) {
        rbi_pool_retire_slowly(pool, block);
        return true;
    }
    rbi_pool_note_free(pool, block);
    rbi_pool_settle_block(pool, block);
    return true;
}

/* ---- reserves ---- */

bool rbi_cycle_reserve(rebatch_pool *pool, size_t bytes, rebatch_stream stream)
{
    struct rbi_cycle *const cycle = &pool->cycle;
    if (!rbi_cycle_runs(pool))
        return false;
    const struct rbi_cycle_call *const call = cycle->next;
    if (call->units != RBI_CYCLE_RESERVE || call->reserved_bytes != bytes ||
        call->stream->stream != stream)
        return false;
    pool->promised_bytes = rbi_max(pool->promised_bytes, bytes);
    rbi_cycle_go_on(cycle);
    return true;
}
