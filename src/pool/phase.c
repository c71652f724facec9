/* Owns the marks at which phases begin, and the memory of a phase that a plan serves.
 * Must not know the plan's calls. */
#include "pool/pool.h"

/* Memory in one piece, out of all lists, with nodes enough to cut it up at any time; NULL: there is
 * none. */
static struct rbi_block *take_arena(rebatch_pool *pool, const struct rbi_phase *phase)
{
    const size_t bytes = phase->arena_bytes;
    if (!rbi_blocks_prepare(&pool->heap, 2 * phase->allocations + rbi_pool_search_nodes(pool) + 2))
        return NULL;
    struct rbi_pool_stream *const stream = rbi_pool_find_stream(pool, phase->stream);
    if (!stream || rbi_pool_prepare(pool) != REBATCH_OK)
        return NULL;
    rbi_pool_flush_lists(pool);
    struct rbi_block *block = rbi_lists_find(&stream->lists, bytes, UINT64_MAX, RBI_ZONE_ANY);
    if (!block && pool->has_space)
        block = rbi_pool_line_up(pool, bytes, stream);
    return block ? rbi_block_take(&pool->heap, block, bytes) : NULL;
}

/* Gives back what the pool holds beyond the needs of a plan, which serves now. */
static void give_back_unneeded(rebatch_pool *pool, const struct rbi_phase *phase)
{
    const size_t below_peak = (size_t)(pool->highest_live_bytes - pool->stats.live_bytes);
    size_t released;
    (void)rbi_pool_trim_cache(pool, rbi_max(phase->arena_bytes, below_peak), NULL, &released);
}

static void begin(rebatch_pool *pool, uint64_t key)
{
    rbi_assert(rbi_lock_is_held(&pool->lock));
    pool->plan.marked = 0;
    rbi_plan_end(pool);
    const struct rbi_phase *const planned =
        key != 0 && pool->plan.is_on ? rbi_plan_begin(pool, key) : NULL;
    if (planned && rbi_plan_serve_from(pool, take_arena(pool, planned)))
        give_back_unneeded(pool, planned);
}

void rbi_pool_begin_phase(rebatch_pool *pool, uint64_t key)
{
    pool->overflow.is_open = false;
    begin(pool, 0);
    if (pool->plan.is_on)
        pool->plan.marked = key;
}

/* Overflow ended at the mark; it may have been allowed since. */
void rbi_pool_begin_marked(rebatch_pool *pool)
{
    begin(pool, pool->plan.marked);
}

void rbi_pool_drop_plan(rebatch_pool *pool, bool every)
{
    rbi_pool_take_lock(pool);
    rbi_plan_drop(pool, every);
    rbi_pool_give_lock(pool);
}

rebatch_status rebatch_pool_mark(rebatch_pool *pool, uint64_t key)
{
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK || (status = rbi_pool_run_task(pool)) != REBATCH_OK ||
        (status = rbi_pool_take_lock_awake(pool)) != REBATCH_OK)
        return status;
    pool->promised_bytes = 0;
    pool->overflow.is_open = false;
    if (key == 0 || !pool->plan.is_on)
        begin(pool, key);
    else
        pool->plan.marked = key;
    rbi_pool_give_lock(pool);
    return REBATCH_OK;
}
