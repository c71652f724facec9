/* Owns how a cycle ends: what it gave out is laid into the ranges again, what still waits for other
 * streams too, as pending, and the trail has the calls that it served.
 * Must not know when one begins. */
#include <stdlib.h>

#include "pool/pool.h"

/* Periods after which a stream that has not come far enough is an exception. In the first ones
 * memory may not have been used before. */
#define LASTING 4
/* Where one has not, it is taken to lag by half as much again, and so many calls. */
#define LEAST_LAG_CALLS 8

/* ---- blocks ---- */

static int by_address(const void *a, const void *b)
{
    const struct rbi_block *const *left = a, *const *right = b;
    return ((*left)->address > (*right)->address) - ((*left)->address < (*right)->address);
}

static size_t collect_in_use(struct rbi_cycle *cycle)
{
    size_t count = 0;
    for (size_t i = 0; i < cycle->allocation_count; i++) {
        const struct rbi_cycle_call *call = &cycle->calls[cycle->allocations[i]];
        if (call->block && !rbi_cycle_is_old(call))
            cycle->in_use[count++] = call->block;
    }
    return count;
}

/* The block that a free left behind, with those of its uses that are not done; NULL: all are. */
static struct rbi_block *make_pending(rebatch_pool *pool, const struct rbi_cycle_use *use)
{
    const struct rbi_cycle *cycle = &pool->cycle;
    const struct rbi_cycle_call *from = &cycle->calls[cycle->calls[use->call].of];
    struct rbi_block *block = NULL;
    do {
        if (use->stream->done >= use->point)
            continue;
        if (!block)
            block = rbi_nodes_take(&pool->block_nodes);
        rbi_block_add_use(pool, block, use->stream);
        block->uses->until = use->point;
    } while (!use++->last);
    if (!block)
        return NULL;
    block->address = from->address;
    block->bytes = (size_t)rbi_cycle_units(from) * REBATCH_POOL_UNIT_BYTES;
    block->stream = from->stream;
    block->state = RBI_BLOCK_PENDING;
    block->birth = pool->births;
    block->freed_at = from->stream->frees;
    from->stream->free_bytes -= block->bytes;
    return block;
}

/* What waits has not been given out again, so it overlaps with nothing. */
static size_t collect_pending(rebatch_pool *pool, size_t count)
{
    struct rbi_cycle *cycle = &pool->cycle;
    for (size_t i = 0; i < cycle->use_count; i++) {
        const bool is_first = i == 0 || cycle->uses[i - 1].last;
        struct rbi_block *block = is_first ? make_pending(pool, &cycle->uses[i]) : NULL;
        if (!block)
            continue;
        block->next = pool->pending;
        pool->pending = block;
        cycle->in_use[count++] = block;
    }
    return count;
}

/* Lays a block into the free one around it: gives what is left behind it, or the block. Needs a
 * spare node, which it gives back where nothing is left in front. */
static struct rbi_block *lay(rebatch_pool *pool, struct rbi_block *around, struct rbi_block *block)
{
    const size_t before = (size_t)(block->address - around->address);
    const size_t behind = around->bytes - before - block->bytes;
    rbi_bin_remove(around);
    block->range = around->range;
    block->bins = around->bins;
    struct rbi_block *rest = behind ? rbi_block_cut(pool, around, behind, true) : NULL;
    around->bytes -= block->bytes;
    rbi_block_insert(block, around, true);
    if (before) {
        rbi_bin_add(around);
    } else {
        block->before = around->before;
        if (block->before)
            block->before->after = block;
        else
            block->range->first = block;
        rbi_block_discard(pool, around);
    }
    if (rest)
        rbi_bin_add(rest);
    rbi_pool_list_block(pool, block);
    return rest ? rest : block;
}

static bool lies_in(const struct rbi_block *block, const struct rbi_block *around)
{
    return block->address >= around->address && block->address < around->address + around->bytes;
}

/* The first of the sorted blocks that does not lie before the range. */
static size_t first_in(const struct rbi_range *range, struct rbi_block *const *blocks, size_t count)
{
    size_t low = 0, high = count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (blocks[middle]->address < range->address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Whatever is free may have been used since. */
static void lay_into_range(rebatch_pool *pool, struct rbi_range *range, size_t count)
{
    const struct rbi_cycle *cycle = &pool->cycle;
    size_t next = first_in(range, cycle->in_use, count);
    for (struct rbi_block *b = range->first; b; b = b->after) {
        if (b->state != RBI_BLOCK_FREE || !b->stream->in_cycle)
            continue;
        b->freed_at = b->stream->frees;
        b->birth = pool->births;
        while (next < count && b->state == RBI_BLOCK_FREE && lies_in(cycle->in_use[next], b))
            b = lay(pool, b, cycle->in_use[next++]);
    }
}

/* ---- the trail ---- */

static uint32_t change_of_level(const struct rbi_cycle *cycle, const struct rbi_cycle_call *call)
{
    if (rbi_cycle_allocates(call))
        return rbi_cycle_units(call);
    return rbi_cycle_frees(call) ? -rbi_cycle_units(&cycle->calls[call->of]) : 0;
}

/* The trail goes on as if it had noted the calls that the cycle served; backwards, as the level is
 * known that they have led to. */
static void note_served(rebatch_pool *pool)
{
    struct rbi_cycle *cycle = &pool->cycle;
    struct rbi_trail *trail = &pool->trail;
    const size_t next = (size_t)(cycle->next - cycle->calls);
    uint32_t level = rbi_trail_level(pool->stats.live_bytes);
    trail->count += cycle->periods * cycle->noted + next;
    const uint64_t kept = rbi_min(trail->count - trail->seen, trail->mask + 1);
    for (size_t i = 1, call = next; i <= kept; i++) {
        call = (call ? call : cycle->noted) - 1;
        trail->levels[(trail->count - i) & trail->mask] = level;
        level -= change_of_level(cycle, &cycle->calls[call]);
    }
    trail->seen = trail->count;
    cycle->turn = trail->count - next;
}

/* ---- streams ---- */

static void let_go_of_streams(const struct rbi_cycle *cycle)
{
    for (size_t i = 0; i < cycle->noted; i++) {
        cycle->calls[i].stream->in_cycle = false;
        cycle->calls[i].stream->pins--;
    }
    for (size_t i = 0; i < cycle->use_count; i++)
        cycle->uses[i].stream->pins--;
}

/* It ran into work that was not done in its first periods, so it would again. Where a search found
 * its places, blocks that others use are placed apart in time next. Else marks are made earlier
 * then, and blocks left alone for longer; where a period is too short for that it is doubled. */
static void try_with_more_time(rebatch_pool *pool)
{
    struct rbi_cycle *cycle = &pool->cycle;
    if (!cycle->is_placed && !cycle->stays && rbi_cycle_may_be_placed(pool)) {
        cycle->patience = 0;
        return;
    }
    pool->lag_calls = rbi_max(pool->lag_calls, cycle->lead_calls);
    pool->lag_calls += pool->lag_calls / 2 + LEAST_LAG_CALLS;
    pool->lag_calls = rbi_min(pool->lag_calls, (uint64_t)RBI_TRAIL_CALLS);
    pool->lag_least = cycle->is_placed ? pool->lag_calls : 0;
    if (pool->lag_calls < cycle->noted) {
        cycle->patience = 0;
        return;
    }
    rbi_cycle_wait_longer(cycle);
    rbi_cycle_double(pool);
}

/* ---- all of it ---- */

void rbi_cycle_leave(rebatch_pool *pool)
{
    struct rbi_cycle *cycle = &pool->cycle;
    cycle->phase = RBI_CYCLE_NONE;
    rbi_quick_flush_all(pool);
    const size_t count = collect_pending(pool, collect_in_use(cycle));
    qsort(cycle->in_use, count, sizeof(struct rbi_block *), by_address);
    for (struct rbi_range *r = pool->first_range; r; r = r->next)
        lay_into_range(pool, r, count);
    let_go_of_streams(cycle);
    rbi_pool_catch_up_marks(pool);
    note_served(pool);
    cycle->served += pool->births - cycle->began;
    if (cycle->periods >= LASTING)
        pool->lag_least = 0;
    if (cycle->lags && cycle->periods < LASTING)
        try_with_more_time(pool);
    else if (cycle->periods > 0)
        cycle->patience = 0;
    else
        rbi_cycle_wait_longer(cycle);
    pool->trail.due = pool->trail.count + 1;
}
