/* Owns what peaks count: the pool's, the tags', and those of scopes, which leave out other threads.
 * Must not know how scopes begin and end. */
#include "pool/pool.h"

/* ---- the threads that a scope takes in ---- */

_Thread_local const rebatch_pool *rbi_pool_joined;

void rbi_pool_thread_join(const rebatch_pool *pool)
{
    rbi_pool_joined = pool;
}

bool rbi_pool_thread_has_joined(const rebatch_pool *pool)
{
    return rbi_pool_joined == pool;
}

/* ---- scopes ---- */

static bool is_of(const struct rbi_scope *scope, const struct rbi_block *block)
{
    return block->sequence >= scope->first_sequence && !block->outside;
}

/* Adds what `from` has seen to `to`, the scope around it. */
void rbi_scope_fold(struct rbi_scope *to, const struct rbi_scope *from)
{
    if (to->live_most < from->live_most && !(from->owner_thread != 0 && to->owner_thread == 0))
        to->live_most = from->live_most;
}

struct rbi_scope *rbi_scope_of_all(rebatch_pool *pool)
{
    size_t depth = pool->depth;
    while (depth > 0 && pool->scopes[depth - 1].owner_thread != 0)
        depth--;
    return depth ? &pool->scopes[depth - 1] : NULL;
}

/* What was in use when it began is now so much more, or less. */
static void shift(struct rbi_scope *scope, const struct rbi_block *block, bool begins)
{
    const uint64_t bytes = begins ? block->bytes : -(uint64_t)block->bytes;
    scope->live_at_begin += bytes;
    scope->live_most += bytes;
}

void rbi_scope_pass_over(rebatch_pool *pool, const struct rbi_block *block, bool begins)
{
    /* What counts in one and not in the one within it: until now they have seen the same. */
    for (size_t i = pool->depth; i-- > 1 && pool->scopes[i - 1].owner_thread != 0;)
        rbi_scope_fold(&pool->scopes[i - 1], &pool->scopes[i]);
    for (size_t i = pool->depth; i-- > 0;)
        if (pool->scopes[i].owner_thread != 0 && !is_of(&pool->scopes[i], block))
            shift(&pool->scopes[i], block, begins);
    rbi_pool_set_quiet(pool);
}

/* ---- the pool ---- */

void rbi_pool_set_quiet(rebatch_pool *pool)
{
    pool->quiet_bytes = rbi_min(pool->stats.live_peak_bytes, pool->mark_peak_bytes);
    if (pool->depth)
        pool->quiet_bytes = rbi_min(pool->quiet_bytes, pool->scopes[pool->depth - 1].live_most);
    struct rbi_scope *const all = pool->owner_thread ? rbi_scope_of_all(pool) : NULL;
    if (all)
        pool->quiet_bytes = rbi_min(pool->quiet_bytes, all->live_most);
}

/* A little more now and then is how all live memory varies. */
static void note_warm_peak(rebatch_pool *pool, uint64_t live)
{
    if (live <= pool->warm_peak_bytes + pool->warm_peak_bytes / RBI_WARM_RISE_PARTS)
        return;
    pool->warm_peak_bytes = live;
    pool->warm_sequence = pool->sequence;
}

void rbi_pool_raise_peaks(rebatch_pool *pool)
{
    const uint64_t live = pool->stats.live_bytes;
    rbi_raise(&pool->mark_peak_bytes, live);
    rbi_raise(&pool->highest_live_bytes, live);
    if (live > pool->stats.live_peak_bytes) {
        pool->stats.live_peak_bytes = live;
        pool->peak_number++;
        note_warm_peak(pool, live);
    }
    if (pool->depth)
        rbi_raise(&pool->scopes[pool->depth - 1].live_most, live);
    struct rbi_scope *const all = pool->owner_thread ? rbi_scope_of_all(pool) : NULL;
    if (all)
        rbi_raise(&all->live_most, live);
    rbi_pool_set_quiet(pool);
}
