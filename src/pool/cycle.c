/* Owns a pool's cycle: when the next period is learnt, learning it, and beginning to run it.
 * Must not know how memory is found, nor how blocks are placed anew.
 *
 * Why a cycle is right. While its period was learnt no memory was mapped, unmapped or given to
 * another stream, and at its end just as much was in use as in the beginning, and at the same
 * places. So as long as the calls are those of the period, whatever a call was given then is free
 * now, and blocks that are in use at once do not overlap, as they did not then. Each stream has
 * addresses of its own, so this holds for several as for one. Where memory was moved, or other
 * places are in use at the end, places are found anew for all of them (place.c), and of what is in
 * use in the beginning each keeps its own until it is freed.
 *
 * What is free now need not be done: another stream may have used it (rebatch_pool_use_on). That
 * is no longer a question of which blocks are pending, as the search has it, but of which free came
 * last before an allocation where it lies, which is the same in every period: the allocation waits
 * for the point to which the other stream's work had come then (cycle_waits.c). If it has not come
 * so far yet, the cycle is left, and what is not done is pending. */
#include "pool/pool.h"

#define MOST_DOUBLINGS 2
#define MOST_PATIENCE 1024
#define LEAST_SPACE 1024

/* ---- memory ---- */

static void free_calls(struct rbi_cycle *cycle)
{
    rbi_heap_free(cycle->calls);
    rbi_heap_free(cycle->allocations);
    rbi_heap_free(cycle->in_use);
    cycle->calls = NULL;
    cycle->allocations = NULL;
    cycle->in_use = NULL;
    cycle->capacity = 0;
}

static void free_uses(struct rbi_cycle *cycle)
{
    rbi_heap_free(cycle->uses);
    rbi_heap_free(cycle->waits);
    cycle->uses = NULL;
    cycle->waits = NULL;
    cycle->use_capacity = cycle->wait_capacity = 0;
}

void rbi_cycle_close(struct rbi_cycle *cycle)
{
    free_calls(cycle);
    free_uses(cycle);
    rbi_heap_free(cycle->places.of);
    cycle->places = (struct rbi_cycle_places){.of = NULL};
}

/* Periods differ little, or by as much as a micro-batch and a step: so space is made for the next
 * power of two. */
static size_t space_for(size_t period)
{
    size_t calls = LEAST_SPACE;
    while (calls < period)
        calls *= 2;
    return calls;
}

static bool prepare_calls(struct rbi_cycle *cycle, size_t period)
{
    if (period <= cycle->capacity)
        return true;
    const size_t calls = space_for(period);
    free_calls(cycle);
    cycle->calls = rbi_heap_calloc(calls, sizeof *cycle->calls);
    cycle->allocations = rbi_heap_calloc(calls, sizeof *cycle->allocations);
    cycle->in_use = rbi_heap_calloc(calls, sizeof(struct rbi_block *));
    if (cycle->calls && cycle->allocations && cycle->in_use)
        cycle->capacity = calls;
    else
        free_calls(cycle);
    return cycle->capacity != 0;
}

/* With the first use that is learnt: there are no more of them than calls, but for blocks that are
 * older than the period. */
static bool prepare_uses(struct rbi_cycle *cycle)
{
    if (cycle->use_count != 0 || cycle->capacity <= cycle->use_capacity)
        return cycle->use_count < cycle->use_capacity;
    free_uses(cycle);
    cycle->uses = rbi_heap_calloc(cycle->capacity, sizeof *cycle->uses);
    cycle->use_capacity = cycle->uses ? cycle->capacity : 0;
    return cycle->uses != NULL;
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
    return pool->pressing == 0 && pool->fast_bytes != 0 && !rbi_lock_is_contended(&pool->lock);
}

static void begin_learning(rebatch_pool *pool, uint64_t live_bytes)
{
    struct rbi_cycle *cycle = &pool->cycle;
    if (!may_learn(pool) || !prepare_calls(cycle, pool->trail.period)) {
        rbi_cycle_wait_longer(cycle);
        return;
    }
    cycle->phase = RBI_CYCLE_LEARNS;
    cycle->noted = cycle->allocation_count = cycle->live = cycle->most_live = cycle->old_count = 0;
    cycle->use_count = cycle->use_calls = cycle->used_frees = cycle->wait_count = 0;
    cycle->reserves = false;
    cycle->first_birth = pool->births;
    cycle->live_bytes = live_bytes;
    cycle->layout = pool->layout;
    cycle->promised_bytes = pool->promised_bytes;
}

/* A call that is noted. */
struct seen {
    enum { ALLOCATED, FREED, USED, RESERVED } what;
    struct rbi_block *block;        /* in use now, or about to be no longer; NULL: of a reserve */
    struct rbi_pool_stream *stream; /* it is for; of a use, the one that uses the block */
    uint64_t live_bytes;            /* after it */
    size_t reserved_bytes;
};

static bool learn_allocation(struct rbi_cycle *cycle, struct rbi_cycle_call *call,
                             struct rbi_block *block)
{
    const size_t units = block->bytes / REBATCH_POOL_UNIT_BYTES;
    if (block->birth != cycle->first_birth + cycle->allocation_count ||
        units > RBI_CYCLE_UNITS_MOST)
        return false;
    call->address = block->address;
    call->block = block;
    call->units = (uint32_t)units;
    cycle->allocations[cycle->allocation_count++] = (uint32_t)cycle->noted;
    cycle->most_live = rbi_max(cycle->most_live, ++cycle->live);
    cycle->live_bytes += block->bytes;
    return true;
}

/* The streams that used a block which is freed now. */
static bool learn_uses(struct rbi_cycle *cycle, struct rbi_cycle_call *call,
                       const struct rbi_block *block)
{
    call->units = RBI_CYCLE_FREE_USED;
    call->first_use = cycle->use_count;
    for (const struct rbi_block_use *use = block->uses; use; use = use->next) {
        if (!prepare_uses(cycle))
            return false;
        cycle->uses[cycle->use_count++] = (struct rbi_cycle_use){.stream = use->stream,
                                                                 .call = (uint32_t)cycle->noted,
                                                                 .delay = UINT32_MAX,
                                                                 .last = use->next == NULL};
    }
    cycle->used_frees++;
    return true;
}

/* Of a block of this period: not one from a thread's cache, whose allocations were not seen. */
static bool is_learnt(const struct rbi_cycle *cycle, const struct rbi_block *block)
{
    return block->birth - cycle->first_birth < cycle->allocation_count;
}

static bool learn_free(struct rbi_cycle *cycle, struct rbi_cycle_call *call,
                       const struct rbi_block *block)
{
    cycle->live_bytes -= block->bytes;
    if (block->used && !learn_uses(cycle, call, block))
        return false;
    if (block->birth < cycle->first_birth) {
        if (cycle->old_count == RBI_CYCLE_OLD)
            return false;
        cycle->old[cycle->old_count++] = (struct rbi_cycle_old){
            block->birth, block->address, block->bytes, (uint32_t)cycle->noted};
        return true;
    }
    if (!is_learnt(cycle, block))
        return false;
    call->of = cycle->allocations[block->birth - cycle->first_birth];
    cycle->calls[call->of].block = NULL;
    cycle->live--;
    return true;
}

/* Whether the period frees an older block is seen at its end (find_used). */
static bool learn_use(struct rbi_cycle *cycle, struct rbi_cycle_call *call, struct rbi_block *block)
{
    call->units = RBI_CYCLE_USE;
    cycle->use_calls++;
    if (block->birth >= cycle->first_birth) {
        if (!is_learnt(cycle, block))
            return false;
        call->of = cycle->allocations[block->birth - cycle->first_birth];
        return true;
    }
    call->of = RBI_CYCLE_NOBODY;
    call->birth = block->birth;
    call->block = block;
    return true;
}

static bool learn_reserve(struct rbi_cycle *cycle, struct rbi_cycle_call *call, size_t bytes)
{
    call->units = RBI_CYCLE_RESERVE;
    call->reserved_bytes = bytes;
    cycle->reserves = true;
    return true;
}

static bool learn_call(struct rbi_cycle *cycle, struct rbi_cycle_call *call,
                       const struct seen *seen)
{
    switch (seen->what) {
    case ALLOCATED:
        return learn_allocation(cycle, call, seen->block);
    case FREED:
        return learn_free(cycle, call, seen->block);
    case USED:
        return learn_use(cycle, call, seen->block);
    case RESERVED:
        return learn_reserve(cycle, call, seen->reserved_bytes);
    }
    return false;
}

/* Calls that were not noted show in the bytes in use. */
static bool learn(struct rbi_cycle *cycle, const struct seen *seen)
{
    if (cycle->noted == cycle->capacity)
        return false;
    struct rbi_cycle_call *const call = &cycle->calls[cycle->noted];
    *call = (struct rbi_cycle_call){.stream = seen->stream};
    const bool noted = learn_call(cycle, call, seen);
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
        if (!call->block || call->block->state != RBI_BLOCK_LIVE ||
            call->block->bytes != old->bytes || call->stream != cycle->calls[old->call].stream ||
            of < old->call)
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

/* The call that frees an older block; NULL: the period does not. */
static const struct rbi_cycle_call *find_free_of(const struct rbi_cycle *cycle, uint64_t birth)
{
    for (size_t i = 0; i < cycle->old_count; i++)
        if (cycle->old[i].birth == birth)
            return &cycle->calls[cycle->old[i].call];
    return NULL;
}

/* Uses of older blocks are of those that this period leaves in their place, or of blocks that are
 * in use all the time: then they say nothing new from now on. The ring is closed. */
static bool find_used(struct rbi_cycle *cycle)
{
    for (size_t i = 0; cycle->use_calls && i < cycle->noted; i++) {
        struct rbi_cycle_call *const call = &cycle->calls[i];
        if (call->units != RBI_CYCLE_USE || call->of != RBI_CYCLE_NOBODY)
            continue;
        const struct rbi_cycle_call *const free = find_free_of(cycle, call->birth);
        const struct rbi_block *const block = call->block;
        if (free)
            call->of = free->of;
        else if (block->state == RBI_BLOCK_LIVE && block->birth == call->birth)
            call->address = block->address;
        else
            return false;
        call->block = NULL;
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
    block->uses = NULL;
    block->used = false;
    (void)rbi_block_settle(pool, block, RBI_BLOCK_FREE);
    block->stream->free_bytes -= lifted->bytes; /* it was not freed */
    return lifted;
}

/* All that a cycle gives out has nodes, and so has what will be pending when it is left; each may
 * leave a rest behind it when it is laid into a free block. */
static bool prepare_nodes(rebatch_pool *pool)
{
    const struct rbi_cycle *cycle = &pool->cycle;
    const size_t pending = rbi_min(cycle->used_frees, (size_t)RBI_CYCLE_PENDING_MOST);
    const size_t blocks = cycle->most_live + cycle->old_count + pending;
    return rbi_pool_prepare_blocks(pool, 2 * blocks + rbi_pool_promised(pool)) &&
           rbi_nodes_prepare(&pool->use_nodes, cycle->use_calls + cycle->use_count);
}

/* What is promised by a reserve must not wait for another stream. */
static bool can_run(rebatch_pool *pool)
{
    const struct rbi_cycle *cycle = &pool->cycle;
    return pool->births == cycle->first_birth + cycle->allocation_count &&
           pool->stats.live_bytes == cycle->live_bytes &&
           pool->promised_bytes == cycle->promised_bytes && cycle->live == cycle->old_count &&
           may_learn(pool) && cycle->allocation_count > 0 &&
           !(cycle->reserves && cycle->use_count) && prepare_nodes(pool);
}

/* The block that a free of the period made pending is held, if it is so still: the uses of the free
 * have their points from it, and marks, lest it take the next ones of the streams to know of
 * them. */
static void adopt(rebatch_pool *pool, const struct rbi_cycle_call *freed)
{
    const struct rbi_cycle_call *const from = &pool->cycle.calls[freed->of];
    struct rbi_block *const block = rbi_table_find(&pool->table, from->address);
    if (!block || block->state != RBI_BLOCK_PENDING || block->stream != from->stream)
        return;
    struct rbi_cycle_use *own = &pool->cycle.uses[freed->first_use];
    for (const struct rbi_block_use *use = block->uses; use; use = use->next, own++) {
        own->point = use->until;
        rbi_stream_mark(pool, use->stream);
    }
    block->state = RBI_BLOCK_HELD;
}

/* What is pending becomes free, as all that a cycle waits for, but for what is from before, and
 * lies where none of the period's calls ever was. The last free comes first: it is the one that
 * made pending what lies where several of them were. */
static void adopt_pending(rebatch_pool *pool)
{
    const struct rbi_cycle *const cycle = &pool->cycle;
    for (size_t i = cycle->use_count; i-- > 0;)
        if (cycle->uses[i].last)
            adopt(pool, &cycle->calls[cycle->uses[i].call]);
    for (struct rbi_block **at = &pool->pending; *at;) {
        struct rbi_block *const block = *at;
        if (block->state == RBI_BLOCK_PENDING) {
            at = &block->next;
            continue;
        }
        *at = block->next;
        rbi_pool_end_pending(pool, block);
    }
}

/* Its streams are not recycled while it runs; those that it allocates for are known by that. */
static void hold_streams(struct rbi_cycle *cycle)
{
    for (size_t i = 0; i < cycle->allocation_count; i++)
        cycle->calls[cycle->allocations[i]].stream->in_cycle = true;
    for (size_t i = 0; i < cycle->noted; i++)
        cycle->calls[i].stream->pins++;
    for (size_t i = 0; i < cycle->use_count; i++)
        cycle->uses[i].stream->pins++;
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

/* Fewer uses than this part of a period's calls are worth no places of their own. */
#define FEW_USES_PARTS 128

/* Marks stand for a little longer than streams lag; places are chosen with more to spare, so that
 * they are good for a while. */
static void choose_spare_calls(rebatch_pool *pool)
{
    struct rbi_cycle *cycle = &pool->cycle;
    const uint64_t lag = pool->lag_calls, most = cycle->noted;
    cycle->lead_calls = rbi_min(lag + lag / 32 + (lag > 0), most);
    cycle->spare_calls = rbi_min(rbi_max(lag + lag / 4 * 3, cycle->lead_calls), most);
}

/* Where many blocks are used by other streams, they are placed for the sake of fewer marks. What
 * could not be had is not tried again until the calls go another way. */
static bool has_many_uses(const rebatch_pool *pool)
{
    const struct rbi_cycle *cycle = &pool->cycle;
    return cycle->use_count > cycle->noted / FEW_USES_PARTS && rbi_cycle_may_be_apart(cycle) &&
           rbi_cycle_may_be_placed(pool);
}

static bool wants_places(const rebatch_pool *pool, bool moved)
{
    const struct rbi_cycle *cycle = &pool->cycle;
    const bool may_wait = cycle->use_count != 0 && cycle->spare_calls != 0;
    return moved ||
           ((has_many_uses(pool) || may_wait) && (!cycle->stays || rbi_cycle_is_outdated(pool)));
}

/* The places of a period in which memory was moved are gone, and those of one that does not end as
 * it began are not those of the next: others are found then. */
static bool begin_running(rebatch_pool *pool)
{
    struct rbi_cycle *cycle = &pool->cycle;
    const bool moved = pool->layout != cycle->layout;
    if (!close_ring(cycle) || !can_run(pool) || !find_used(cycle))
        return false;
    const bool has_places = !moved && ends_as_it_began(cycle);
    rbi_quick_flush_all(pool);
    choose_spare_calls(pool);
    const uint64_t layout = pool->layout;
    const bool is_placed = wants_places(pool, moved) && rbi_cycle_place(pool, moved, has_places);
    cycle->has_enough = is_placed && cycle->places.has_enough;
    /* As long as needs are not known there is no fresh memory for it. */
    cycle->hopes = has_many_uses(pool) && !cycle->has_enough && !rbi_pool_knows_needs(pool);
    if (!is_placed && (!has_places || pool->layout != layout))
        return false;
    if (!rbi_cycle_plan_waits(pool, cycle) || !prepare_nodes(pool)) { /* placing may take some */
        cycle->stays = is_placed; /* with the places that a search finds there may be fewer waits */
        cycle->places.count = 0;
        return false;
    }
    if (!is_placed) {
        adopt_pending(pool);
        lift_all(pool);
    }
    hold_streams(cycle);
    cycle->end = cycle->calls + cycle->noted;
    cycle->next = cycle->calls;
    cycle->began = pool->births;
    cycle->periods = 0;
    cycle->moved = cycle->moved_most = 0;
    cycle->lags = false;
    cycle->is_placed = is_placed;
    cycle->phase = RBI_CYCLE_RUNS;
    return true;
}

/* ---- following the trail ---- */

void rbi_cycle_double(rebatch_pool *pool)
{
    struct rbi_cycle *cycle = &pool->cycle;
    struct rbi_trail *trail = &pool->trail;
    const uint64_t twice = 2 * trail->period;
    if (cycle->doublings == MOST_DOUBLINGS || !rbi_trail_widen(trail, twice) ||
        rbi_trail_remembered(trail) < twice)
        return;
    cycle->doublings++;
    cycle->patience = 0;
    trail->since += trail->period;
    trail->period *= 2;
}

void rbi_cycle_begin(rebatch_pool *pool)
{
    struct rbi_cycle *cycle = &pool->cycle;
    rbi_tcaches_fold(pool); /* what caches give back must not meet a cycle that runs */
    const bool moved = pool->layout != cycle->layout;
    cycle->phase = RBI_CYCLE_NONE;
    if (begin_running(pool))
        return;
    if (!moved)
        rbi_cycle_wait_longer(cycle);
    else
        cycle->moved_most = rbi_min(2 * cycle->moved, (uint64_t)MOST_PATIENCE);
    cycle->moved = 0;
    if (!close_ring(cycle) || (!moved && !ends_as_it_began(cycle)))
        rbi_cycle_double(pool);
    cycle->layout = pool->layout;
}

static void lose(struct rbi_cycle *cycle)
{
    cycle->stays = false;
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
    look(pool, &(struct seen){.what = freed ? FREED : ALLOCATED,
                              .block = block,
                              .stream = block->stream,
                              .live_bytes = live_bytes});
}

/* What leaves as much in use as there was. */
static void note_at_level(rebatch_pool *pool, struct seen *seen)
{
    seen->live_bytes = pool->stats.live_bytes;
    if (!rbi_trail_add(&pool->trail, rbi_trail_level(seen->live_bytes)))
        look(pool, seen);
}

void rbi_cycle_note_use(rebatch_pool *pool, struct rbi_block *block, struct rbi_pool_stream *stream)
{
    note_at_level(pool, &(struct seen){.what = USED, .block = block, .stream = stream});
}

void rbi_cycle_note_reserve(rebatch_pool *pool, size_t bytes, struct rbi_pool_stream *stream)
{
    note_at_level(pool,
                  &(struct seen){.what = RESERVED, .stream = stream, .reserved_bytes = bytes});
}
