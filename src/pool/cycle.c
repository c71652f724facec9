/* Owns a pool's cycle: when the next period is learnt, learning it, and beginning to run it.
 * Must not know how memory is found, nor how blocks are placed anew.
 *
 * Why a cycle is right. While its period was learnt no memory was mapped, unmapped or given to
 * another stream, and at its end just as much was in use as in the beginning, and at the same
 * places. So as long as the calls are those of the period, whatever a call was given then is free
 * now, and blocks that are in use at once do not overlap, as they did not then. Where memory was
 * moved, places are found anew for all of them (place.c), and of what is in use in the beginning
 * each keeps its own until it is freed. */
#include "pool/pool.h"

#define MOST_DOUBLINGS 2
#define MOST_PATIENCE 1024

/* ---- memory ---- */

void rbi_cycle_close(struct rbi_cycle *cycle)
{
    rbi_heap_free(cycle->calls);
    rbi_heap_free(cycle->allocations);
    rbi_heap_free(cycle->in_use);
    cycle->calls = NULL;
    cycle->allocations = NULL;
    cycle->in_use = NULL;
    cycle->capacity = 0;
}

/* Once, for the longest period that there can be: the heap gives memory that is not touched in
 * name only. */
static bool prepare_memory(struct rbi_cycle *cycle)
{
    const size_t calls = RBI_TRAIL_CALLS;
    if (cycle->capacity)
        return true;
    cycle->calls = rbi_heap_calloc(calls, sizeof *cycle->calls);
    cycle->allocations = rbi_heap_calloc(calls, sizeof *cycle->allocations);
    cycle->in_use = rbi_heap_calloc(calls, sizeof(struct rbi_block *));
    if (!cycle->calls || !cycle->allocations || !cycle->in_use) {
        rbi_cycle_close(cycle);
        return false;
    }
    cycle->capacity = calls;
    return true;
}

/* ---- learning ---- */

void rbi_cycle_wait_longer(struct rbi_cycle *cycle)
{
    cycle->patience = rbi_min(2 * cycle->patience + 1, (uint64_t)MOST_PATIENCE);
}

static void stop_learning(struct rbi_cycle *cycle)
{
    cycle->phase = RBI_CYCLE_NONE;
    rbi_cycle_wait_longer(cycle);
}

static bool may_learn(const rebatch_pool *pool)
{
    return pool->pressing == 0 && pool->fast_bytes != 0 && !pool->pending && pool->lock.biased;
}

static void begin_learning(rebatch_pool *pool, uint64_t live_bytes)
{
    struct rbi_cycle *cycle = &pool->cycle;
    if (!may_learn(pool) || !prepare_memory(cycle)) {
        rbi_cycle_wait_longer(cycle);
        return;
    }
    cycle->phase = RBI_CYCLE_LEARNS;
    cycle->stream = pool->last_stream;
    cycle->noted = cycle->allocation_count = cycle->live = cycle->most_live = cycle->old_count = 0;
    cycle->reserves = false;
    cycle->first_birth = pool->births;
    cycle->live_bytes = live_bytes;
    cycle->layout = pool->layout;
    cycle->promised_bytes = pool->promised_bytes;
}

/* A call that is noted. */
struct seen {
    struct rbi_block *block; /* in use now, or about to be no longer; NULL: of a reserve */
    bool freed;
    uint64_t live_bytes; /* after it */
    size_t reserved_bytes;
};

static bool learn_allocation(struct rbi_cycle *cycle, struct rbi_block *block)
{
    const size_t units = block->bytes / REBATCH_POOL_UNIT_BYTES;
    if (block->birth != cycle->first_birth + cycle->allocation_count || units >= RBI_CYCLE_RESERVE)
        return false;
    cycle->calls[cycle->noted] =
        (struct rbi_cycle_call){block->address, block, (uint32_t)units, 0, 0};
    cycle->allocations[cycle->allocation_count++] = (uint32_t)cycle->noted;
    cycle->most_live = rbi_max(cycle->most_live, ++cycle->live);
    return true;
}

static bool learn_free(struct rbi_cycle *cycle, const struct rbi_block *block)
{
    struct rbi_cycle_call *const call = &cycle->calls[cycle->noted];
    *call = (struct rbi_cycle_call){NULL, NULL, 0, 0, 0};
    if (block->birth < cycle->first_birth) {
        if (cycle->old_count == RBI_CYCLE_OLD)
            return false;
        cycle->old[cycle->old_count++] = (struct rbi_cycle_old){
            block->birth, block->address, block->bytes, (uint32_t)cycle->noted};
        return true;
    }
    call->of = cycle->allocations[block->birth - cycle->first_birth];
    cycle->calls[call->of].block = NULL;
    cycle->live--;
    return true;
}

static bool learn_reserve(struct rbi_cycle *cycle, size_t bytes)
{
    cycle->calls[cycle->noted] = (struct rbi_cycle_call){NULL, NULL, RBI_CYCLE_RESERVE, 0, bytes};
    cycle->reserves = true;
    return true;
}

static bool learn_block(struct rbi_cycle *cycle, const struct seen *seen)
{
    const uint64_t bytes = seen->block->bytes;
    cycle->live_bytes += seen->freed ? -bytes : bytes;
    if (seen->block->stream != cycle->stream || seen->block->used)
        return false;
    return seen->freed ? learn_free(cycle, seen->block) : learn_allocation(cycle, seen->block);
}

/* Calls that were not noted show in the bytes in use. */
static bool learn(struct rbi_cycle *cycle, const struct seen *seen)
{
    if (cycle->noted == cycle->capacity)
        return false;
    const bool noted =
        seen->block ? learn_block(cycle, seen) : learn_reserve(cycle, seen->reserved_bytes);
    cycle->noted++;
    return noted && cycle->live_bytes == seen->live_bytes;
}

/* ---- beginning to run ---- */

/* Where an old block was freed, the one is from now on that this period leaves in its place: false
 * where that is not the same allocation of the period, or was made before the old one was freed, as
 * then there are two of them at once. */
static bool close_ring(struct rbi_cycle *cycle)
{
    const uint64_t first_old = cycle->first_birth - cycle->allocation_count;
    for (size_t i = 0; i < cycle->old_count; i++) {
        const struct rbi_cycle_old *old = &cycle->old[i];
        if (cycle->first_birth < cycle->allocation_count || old->birth < first_old)
            return false;
        const uint32_t of = cycle->allocations[old->birth - first_old];
        const struct rbi_cycle_call *call = &cycle->calls[of];
        if (!call->block || call->block->state != RBI_BLOCK_LIVE || call->block->used ||
            call->block->bytes != old->bytes || of < old->call)
            return false;
        cycle->calls[old->call].of = of;
    }
    return true;
}

/* Whether what this period leaves lies where the old blocks did; the ring is closed. */
static bool ends_as_it_began(const struct rbi_cycle *cycle)
{
    for (size_t i = 0; i < cycle->old_count; i++) {
        const struct rbi_cycle_old *old = &cycle->old[i];
        if (cycle->calls[cycle->calls[old->call].of].address != old->address)
            return false;
    }
    return true;
}

/* Takes a block in use out of its range; another one stands for it among those in use, and where it
 * lies is free. Needs a spare node. */
static struct rbi_block *lift(rebatch_pool *pool, struct rbi_block *block)
{
    struct rbi_block *lifted = rbi_nodes_take_as_is(&pool->block_nodes);
    *lifted = *block;
    lifted->previous->next = lifted->next->previous = lifted;
    rbi_table_remove(&pool->table, block);
    (void)rbi_block_settle(pool, block, RBI_BLOCK_FREE);
    block->stream->free_bytes -= lifted->bytes; /* it was not freed */
    return lifted;
}

/* All that a cycle gives out has nodes, and each may leave a rest behind it when it is laid into a
 * free block. */
static bool can_run(rebatch_pool *pool)
{
    const struct rbi_cycle *cycle = &pool->cycle;
    return pool->births == cycle->first_birth + cycle->allocation_count &&
           pool->stats.live_bytes == cycle->live_bytes &&
           pool->promised_bytes == cycle->promised_bytes && cycle->live == cycle->old_count &&
           may_learn(pool) && pool->last_stream == cycle->stream && cycle->allocation_count > 0 &&
           rbi_pool_prepare_blocks(pool, 2 * (cycle->most_live + cycle->old_count) +
                                             rbi_pool_promised(pool));
}

static void lift_all(rebatch_pool *pool)
{
    struct rbi_cycle *cycle = &pool->cycle;
    for (size_t i = 0; i < cycle->allocation_count; i++) {
        struct rbi_cycle_call *call = &cycle->calls[cycle->allocations[i]];
        if (call->block)
            call->block = lift(pool, call->block);
    }
}

/* The places of a period in which memory was moved are gone: others are found then. */
static bool begin_running(rebatch_pool *pool)
{
    struct rbi_cycle *cycle = &pool->cycle;
    const bool moved = pool->layout != cycle->layout;
    if (!close_ring(cycle) || !can_run(pool) || (!moved && !ends_as_it_began(cycle)))
        return false;
    rbi_quick_flush_all(pool);
    if (!moved)
        lift_all(pool);
    else if (!rbi_cycle_place(pool))
        return false;
    cycle->end = cycle->calls + cycle->noted;
    cycle->next = cycle->calls;
    cycle->began = pool->births;
    cycle->periods = 0;
    cycle->moved = cycle->moved_most = 0;
    cycle->phase = RBI_CYCLE_RUNS;
    return true;
}

/* ---- following the trail ---- */

/* Two periods are learnt as one where one did not end as it began. */
static void double_period(rebatch_pool *pool)
{
    struct rbi_cycle *cycle = &pool->cycle;
    struct rbi_trail *trail = &pool->trail;
    if (cycle->doublings == MOST_DOUBLINGS || 2 * trail->period > trail->mask)
        return;
    cycle->doublings++;
    cycle->patience = 0;
    trail->since += trail->period;
    trail->period *= 2;
}

void rbi_cycle_begin(rebatch_pool *pool)
{
    struct rbi_cycle *cycle = &pool->cycle;
    cycle->phase = RBI_CYCLE_NONE;
    if (begin_running(pool))
        return;
    const bool moved = pool->layout != cycle->layout;
    if (!moved)
        rbi_cycle_wait_longer(cycle);
    else
        cycle->moved_most = rbi_min(2 * cycle->moved, (uint64_t)MOST_PATIENCE);
    cycle->moved = 0;
    if (!close_ring(cycle) || (!moved && !ends_as_it_began(cycle)))
        double_period(pool);
    cycle->layout = pool->layout;
}

static void lose(struct rbi_cycle *cycle)
{
    cycle->phase = RBI_CYCLE_NONE;
    cycle->turn = 0;
    cycle->doublings = 0;
}

/* Where the next period to be learnt begins. */
static uint64_t next_turn(const struct rbi_cycle *cycle, const struct rbi_trail *trail)
{
    uint64_t turn = cycle->turn + cycle->patience * trail->period;
    if (turn < trail->count)
        turn += (trail->count - turn + trail->period - 1) / trail->period * trail->period;
    return turn;
}

static void follow(rebatch_pool *pool, uint64_t live_bytes)
{
    struct rbi_cycle *cycle = &pool->cycle;
    struct rbi_trail *trail = &pool->trail;
    if (cycle->phase == RBI_CYCLE_LEARNS && cycle->noted == trail->period) {
        cycle->phase = RBI_CYCLE_READY;
        cycle->turn = trail->count;
    }
    if (cycle->phase != RBI_CYCLE_NONE || !rbi_trail_repeats(trail))
        return;
    if (cycle->turn == 0)
        cycle->turn = rbi_trail_turn(trail);
    uint64_t turn = next_turn(cycle, trail);
    if (turn == trail->count) {
        cycle->moved = cycle->layout == pool->layout ? 0 : cycle->moved + 1;
        cycle->layout = pool->layout;
        if (cycle->moved == 0 || cycle->moved >= rbi_max(cycle->moved_most, RBI_CYCLE_MOVED)) {
            begin_learning(pool, live_bytes);
            return;
        }
        cycle->turn = turn;
        turn += trail->period;
    }
    if (trail->due > turn)
        trail->due = turn;
}

/* What there is to do about a call that was noted. */
static void look(rebatch_pool *pool, const struct seen *seen)
{
    struct rbi_cycle *cycle = &pool->cycle;
    if (cycle->phase == RBI_CYCLE_READY)
        cycle->phase = RBI_CYCLE_NONE; /* by another way than the fast path */
    if (!rbi_trail_look(&pool->trail))
        lose(cycle);
    else if (cycle->phase == RBI_CYCLE_LEARNS && !learn(cycle, seen))
        stop_learning(cycle);
    if (pool->trail.period != 0)
        follow(pool, seen->live_bytes);
    if (cycle->phase == RBI_CYCLE_LEARNS)
        pool->trail.due = 0;
}

void rbi_cycle_look(rebatch_pool *pool, struct rbi_block *block, uint64_t live_bytes, bool freed)
{
    look(pool, &(struct seen){block, freed, live_bytes, 0});
}

/* ---- old blocks ---- */

void rbi_cycle_give_old(rebatch_pool *pool, struct rbi_block *block)
{
    rbi_pool_count_free(pool, block);
    rbi_pool_leave_use(block);
    rbi_pool_note_free(pool, block);
    rbi_pool_settle_block(pool, block);
}

/* ---- reserves ---- */

void rbi_cycle_note_reserve(rebatch_pool *pool, size_t bytes, const struct rbi_pool_stream *stream)
{
    const uint64_t live_bytes = pool->stats.live_bytes;
    if (pool->cycle.phase == RBI_CYCLE_LEARNS && stream != pool->cycle.stream)
        stop_learning(&pool->cycle);
    if (!rbi_trail_add(&pool->trail, rbi_trail_level(live_bytes)))
        look(pool, &(struct seen){NULL, false, live_bytes, bytes});
}

bool rbi_cycle_reserve(rebatch_pool *pool, size_t bytes, rebatch_stream stream)
{
    struct rbi_cycle *cycle = &pool->cycle;
    if (!rbi_cycle_runs(pool) || cycle->next->units != RBI_CYCLE_RESERVE ||
        cycle->next->reserved_bytes != bytes || cycle->stream->stream != stream)
        return false;
    pool->promised_bytes = rbi_max(pool->promised_bytes, bytes);
    rbi_cycle_go_on(cycle);
    return true;
}
