/* Owns phases: the recording of their calls, when one is planned, and the serving of planned ones.
 * Must not know how memory is found.
 *
 * A phase is planned only where pages are moved in each of its kind, or the pool holds much more
 * than was ever in use: elsewhere the pool finds the same places again by itself. Its calls are
 * then recorded, compared with those of the next phase of the same key, planned when they are the
 * same, and served by number from there on. The first call that differs ends that for this phase;
 * when it does so twice in a row, the calls are recorded anew. */
#include "pool/plan.h"

#include "pool/plan/layout.h"
#include "pool/pool.h"

#define CALLS_FIRST 256
/* A call has a number of 32 bits; a phase with more calls is not planned. */
#define CALLS_MOST ((size_t)1 << 20)

static uint64_t moved_pages(const rebatch_pool *pool)
{
    return pool->stats.remaps + pool->vm.given_bytes / pool->page_bytes;
}

static void forget(struct rbi_phase *phase)
{
    phase->count = 0;
    phase->allocations = 0;
    phase->arena_bytes = 0;
}

void rbi_plan_close(struct rbi_pool_plan *plan)
{
    for (size_t i = 0; i < RBI_PLAN_PHASES; i++)
        rbi_heap_free(plan->phases[i].calls);
}

/* ---- recording ---- */

static bool grow(struct rbi_phase *phase)
{
    const size_t capacity = phase->capacity ? 2 * phase->capacity : CALLS_FIRST;
    struct rbi_phase_call *calls =
        capacity <= CALLS_MOST ? rbi_heap_calloc(capacity, sizeof *calls) : NULL;
    if (!calls)
        return false;
    if (phase->count)
        memcpy(calls, phase->calls, phase->count * sizeof *calls);
    rbi_heap_free(phase->calls);
    phase->calls = calls;
    phase->capacity = capacity;
    return true;
}

static void record(struct rbi_pool_plan *plan, enum rbi_call_kind kind, uint32_t value)
{
    rbi_assert(plan->phase && plan->next <= plan->phase->count);
    struct rbi_phase *const phase = plan->phase;
    if (phase->count == phase->capacity && !grow(phase)) {
        plan->mode = RBI_PLAN_OFF;
        forget(phase);
        return;
    }
    phase->calls[phase->count++] = (struct rbi_phase_call){kind, value, 0};
    phase->allocations += kind != RBI_CALL_FREE;
    plan->next = phase->count;
}

static bool is_next(const struct rbi_pool_plan *plan, enum rbi_call_kind kind, uint32_t value)
{
    const struct rbi_phase *const phase = plan->phase;
    if (plan->next == phase->count)
        return false;
    const struct rbi_phase_call *const call = &phase->calls[plan->next];
    return call->kind == kind && call->value == value;
}

/* Of the calls noted the first `count` stay, without a plan. */
static void drop_plan(struct rbi_phase *phase, size_t count)
{
    phase->arena_bytes = 0;
    phase->misses = 0;
    phase->count = count;
    phase->allocations = 0;
    for (size_t i = 0; i < count; i++) {
        phase->calls[i].offset = 0;
        phase->allocations += phase->calls[i].kind != RBI_CALL_FREE;
    }
}

/* The calls from here on are others: they are recorded in place of those. */
static void record_from_here(struct rbi_pool_plan *plan)
{
    drop_plan(plan->phase, plan->next);
    plan->mode = RBI_PLAN_RECORDS;
}

/* A plan was of no use. The first time it may have been an exception, as what a program looks at in
 * its first steps is: the phases that follow are planned for at once. */
static void note_failure(struct rbi_phase *phase)
{
    if (phase->failures > 0)
        phase->rest = RBI_PLAN_REST_PHASES << (phase->failures - 1);
    phase->failures = rbi_min(phase->failures + 1, RBI_PLAN_DOUBLINGS_MOST);
    phase->served = 0; /* it has to prove itself again, which ends the row */
}

/* A call is another than the plan has. */
static void end_serving(rebatch_pool *pool)
{
    rbi_assert(pool->plan.phase);
    struct rbi_pool_plan *const plan = &pool->plan;
    rbi_plan_leave(pool);
    if (++plan->phase->misses == RBI_PLAN_MISSES_MOST) {
        drop_plan(plan->phase, plan->next);
        note_failure(plan->phase);
    }
}

/* A call on the phase's stream. */
static void note(rebatch_pool *pool, enum rbi_call_kind kind, uint32_t value)
{
    struct rbi_pool_plan *const plan = &pool->plan;
    if (plan->mode != RBI_PLAN_RECORDS && is_next(plan, kind, value)) {
        plan->next++;
        return;
    }
    if (plan->mode == RBI_PLAN_SERVES)
        end_serving(pool);
    if (plan->mode == RBI_PLAN_COMPARES)
        record_from_here(plan);
    if (plan->mode == RBI_PLAN_RECORDS)
        record(plan, kind, value);
}

static bool is_of_phase(const rebatch_pool *pool, const struct rbi_block *block)
{
    return pool->plan.mode != RBI_PLAN_OFF && block->phase == pool->plan.serial;
}

/* A phase is of the stream of its first call. */
static void set_stream(struct rbi_pool_plan *plan, rebatch_stream stream)
{
    if (plan->next == 0 && plan->mode == RBI_PLAN_RECORDS)
        plan->phase->stream = stream;
}

void rbi_plan_note_alloc(rebatch_pool *pool, struct rbi_block *block)
{
    rbi_assert(pool->plan.phase && !block->planned);
    struct rbi_pool_plan *const plan = &pool->plan;
    block->phase = 0;
    set_stream(plan, rbi_stream_of(block)->stream);
    if (block->outside || rbi_stream_of(block)->stream != plan->phase->stream)
        return;
    block->phase = plan->serial;
    block->call = (uint32_t)plan->next & INT32_MAX;
    note(pool, RBI_CALL_ALLOC, (uint32_t)(block->bytes / REBATCH_POOL_UNIT_BYTES));
}

/* What other streams use may not be given out again when it is freed. */
void rbi_plan_note_use(rebatch_pool *pool, const struct rbi_block *block)
{
    struct rbi_pool_plan *const plan = &pool->plan;
    if (!is_of_phase(pool, block))
        return;
    if (plan->mode == RBI_PLAN_SERVES && block->planned)
        rbi_plan_leave(pool);
    if (plan->mode != RBI_PLAN_SERVES && plan->mode != RBI_PLAN_OFF)
        plan->phase->calls[block->call].offset = RBI_PLAN_ELSEWHERE;
}

void rbi_plan_note_free(rebatch_pool *pool, const struct rbi_block *block)
{
    if (is_of_phase(pool, block))
        note(pool, RBI_CALL_FREE, block->call);
}

void rbi_plan_discard(rebatch_pool *pool, struct rbi_block *block)
{
    rbi_assert(pool->plan.arena && pool->plan.arena_live_bytes >= block->bytes);
    pool->plan.arena_live_bytes -= block->bytes;
    rbi_table_remove(&pool->heap.table, block);
    if (block->late)
        rbi_late_add(&pool->heap.late, block->address);
    block->planned = false; /* of a node that is taken as it is */
    rbi_nodes_put(&pool->heap.block_nodes, block);
}

size_t rbi_plan_idle_bytes(const rebatch_pool *pool)
{
    const struct rbi_pool_plan *const plan = &pool->plan;
    return plan->arena ? plan->arena->bytes - plan->arena_live_bytes : 0;
}

/* ---- planning ---- */

/* What is noted of a call while its phase is planned.
 *
 * What is reserved stays in one piece until allocations have used it up, so that it is there
 * wherever the plan ends. The piece is a lifetime. The blocks that use it up lie in it one behind
 * the other, so that what is left of it is one piece at any time:
 *   units of the piece - units of the blocks in it >= units of the piece - units allocated since */
struct place {
    uint32_t piece;       /* of an allocation: 1 + the call that reserved its piece; 0: none */
    uint32_t in_piece;    /* of one in a piece: the units before it there */
    uint32_t end;         /* of a reserve: the call at which its piece ends; 0: it has none */
    uint32_t begins_with; /* units of the lifetime that begins */
    uint64_t ends_with;   /* units of those that end */
};

/* The reserved piece that is being used up; left is 0: there is none. */
struct piece {
    uint32_t call, left, taken;
};

static void allocate(struct place *places, struct piece *piece, uint32_t i,
                     const struct rbi_phase_call *call)
{
    if (call->value > piece->left) {
        places[piece->call].end = i;
        piece->left = 0;
        return;
    }
    piece->left -= call->value;
    if (call->offset != RBI_PLAN_ELSEWHERE) {
        places[i].piece = piece->call + 1;
        places[i].in_piece = piece->taken;
        piece->taken += call->value;
    }
    if (piece->left == 0)
        places[piece->call].end = i + 1;
}

/* Finds the pieces, and the blocks that lie in them. A reserve of no more than is left of the one
 * before needs no piece of its own. */
static void find_pieces(struct place *places, const struct rbi_phase *phase)
{
    struct piece piece = {0};
    for (uint32_t i = 0; i < phase->count; i++) {
        const struct rbi_phase_call *const call = &phase->calls[i];
        if (call->kind == RBI_CALL_ALLOC && piece.left)
            allocate(places, &piece, i, call);
        if (call->kind != RBI_CALL_RESERVE || call->value <= piece.left)
            continue;
        if (piece.left)
            places[piece.call].end = i;
        piece = (struct piece){i, call->value, 0};
    }
    if (piece.left)
        places[piece.call].end = (uint32_t)phase->count;
}

static void add_lifetime(struct rbi_lifetime *lifetimes, size_t *count, struct place *places,
                         struct rbi_lifetime lifetime)
{
    rbi_assert(lifetime.from < lifetime.to && lifetime.units > 0);
    lifetimes[(*count)++] = lifetime;
    places[lifetime.from].begins_with = lifetime.units;
    places[lifetime.to].ends_with += lifetime.units;
}

/* Allocations that are freed within the phase, and used by its stream alone; and pieces, which stay
 * as long as blocks lie in them. */
static size_t collect(struct rbi_lifetime *lifetimes, struct place *places,
                      const struct rbi_phase *phase)
{
    size_t count = 0;
    const struct rbi_phase_call *const calls = phase->calls;
    find_pieces(places, phase);
    for (uint32_t i = 0; i < phase->count; i++) {
        if (calls[i].kind != RBI_CALL_FREE)
            continue;
        const uint32_t of = calls[i].value;
        const uint32_t piece = places[of].piece;
        if (piece)
            places[piece - 1].end = rbi_max(places[piece - 1].end, i);
        else if (calls[of].offset != RBI_PLAN_ELSEWHERE)
            add_lifetime(lifetimes, &count, places,
                         (struct rbi_lifetime){.units = calls[of].value, .from = of, .to = i});
    }
    for (uint32_t i = 0; i < phase->count; i++)
        if (places[i].end)
            add_lifetime(
                lifetimes, &count, places,
                (struct rbi_lifetime){.units = calls[i].value, .from = i, .to = places[i].end});
    return count;
}

/* The most units in use at once. */
static uint64_t most_in_use(const struct place *places, size_t calls)
{
    uint64_t units = 0, most = 0;
    for (size_t i = 0; i < calls; i++) {
        units += places[i].begins_with - places[i].ends_with;
        most = most < units ? units : most;
    }
    return most;
}

/* Offsets by call; the rest is served elsewhere. */
static void set_offsets(struct rbi_phase *phase, const struct place *places,
                        const struct rbi_lifetime *lifetimes, size_t count)
{
    struct rbi_phase_call *const calls = phase->calls;
    for (size_t i = 0; i < phase->count; i++)
        calls[i].offset = RBI_PLAN_ELSEWHERE;
    for (size_t i = 0; i < count; i++)
        calls[lifetimes[i].from].offset = lifetimes[i].offset;
    for (size_t i = 0; i < phase->count; i++) {
        if (calls[i].kind != RBI_CALL_FREE || !places[calls[i].value].piece)
            continue;
        const struct place *const block = &places[calls[i].value];
        calls[calls[i].value].offset = calls[block->piece - 1].offset + block->in_piece;
    }
}

static void make_plan(struct rbi_phase *phase, size_t page_bytes)
{
    const size_t most = phase->allocations;
    if (most == 0 || most > RBI_LAYOUT_MOST)
        return;
    struct rbi_lifetime *lifetimes = rbi_heap_calloc(most, sizeof *lifetimes);
    const struct rbi_lifetime **room = rbi_heap_calloc(most, sizeof *room);
    struct place *places = rbi_heap_calloc(phase->count + 1, sizeof *places);
    if (lifetimes && room && places) {
        const size_t count = collect(lifetimes, places, phase);
        const uint64_t units =
            rbi_layout_pack(lifetimes, room, count, most_in_use(places, phase->count));
        set_offsets(phase, places, lifetimes, count);
        if (!rbi_round_up((size_t)units * REBATCH_POOL_UNIT_BYTES, page_bytes, &phase->arena_bytes))
            phase->arena_bytes = 0;
        phase->served = 0;
    }
    rbi_heap_free(lifetimes);
    rbi_heap_free(room);
    rbi_heap_free(places);
}

/* ---- serving ---- */

struct rbi_block *rbi_plan_serve(rebatch_pool *pool, size_t bytes, rebatch_stream stream)
{
    struct rbi_pool_plan *const plan = &pool->plan;
    const size_t units = bytes / REBATCH_POOL_UNIT_BYTES;
    rbi_assert(plan->mode == RBI_PLAN_SERVES && plan->arena && plan->phase);
    if (stream != plan->phase->stream || rbi_pool_is_other_thread(pool, pool->owner_thread))
        return NULL;
    if (units > UINT32_MAX || !is_next(plan, RBI_CALL_ALLOC, (uint32_t)units)) {
        end_serving(pool);
        return NULL;
    }
    const struct rbi_phase_call *const call = &plan->phase->calls[plan->next];
    if (call->offset == RBI_PLAN_ELSEWHERE ||
        pool->heap.block_nodes.spare < rbi_pool_search_nodes(pool))
        return NULL;
    rbi_assert((size_t)call->offset * REBATCH_POOL_UNIT_BYTES + bytes <= plan->arena->bytes);
    struct rbi_block *const block = rbi_nodes_take(&pool->heap.block_nodes);
    block->address = plan->arena->address + (size_t)call->offset * REBATCH_POOL_UNIT_BYTES;
    block->bytes = bytes;
    block->lists = plan->arena->lists;
    block->bins = plan->arena->bins;
    block->range = plan->arena->range;
    block->planned = true;
    block->phase = plan->serial;
    block->call = (uint32_t)plan->next++ & INT32_MAX;
    plan->arena_live_bytes += bytes;
    rbi_block_list(&pool->heap, block);
    return block;
}

bool rbi_plan_reserve(rebatch_pool *pool, size_t bytes, rebatch_stream stream)
{
    struct rbi_pool_plan *const plan = &pool->plan;
    if (plan->mode != RBI_PLAN_SERVES || stream != plan->phase->stream ||
        rbi_pool_is_other_thread(pool, pool->owner_thread))
        return false;
    if (is_next(plan, RBI_CALL_RESERVE, (uint32_t)(bytes / REBATCH_POOL_UNIT_BYTES))) {
        plan->next++;
        return true;
    }
    end_serving(pool);
    return false;
}

void rbi_plan_note_reserve(rebatch_pool *pool, size_t bytes, rebatch_stream stream)
{
    struct rbi_pool_plan *const plan = &pool->plan;
    if (plan->mode == RBI_PLAN_OFF || plan->mode == RBI_PLAN_SERVES ||
        rbi_pool_is_other_thread(pool, pool->owner_thread))
        return;
    set_stream(plan, stream);
    if (stream != plan->phase->stream)
        return;
    note(pool, RBI_CALL_RESERVE, (uint32_t)(bytes / REBATCH_POOL_UNIT_BYTES));
}

void rbi_plan_leave(rebatch_pool *pool)
{
    struct rbi_pool_plan *const plan = &pool->plan;
    struct rbi_block *const arena = plan->arena;
    if (plan->mode != RBI_PLAN_SERVES)
        return;
    plan->mode = RBI_PLAN_OFF;
    plan->arena = NULL;
    rbi_plan_cut_up(pool, arena, plan->first_sequence);
}

void rbi_plan_drop(rebatch_pool *pool, bool every)
{
    struct rbi_pool_plan *const plan = &pool->plan;
    rbi_plan_leave(pool);
    plan->mode = RBI_PLAN_OFF;
    for (size_t i = 0; i < RBI_PLAN_PHASES; i++)
        if (every || &plan->phases[i] == plan->phase)
            drop_plan(&plan->phases[i], 0);
}

/* ---- the phases ---- */

static struct rbi_phase *find_phase(struct rbi_pool_plan *plan, uint64_t key)
{
    struct rbi_phase *oldest = &plan->phases[0];
    for (size_t i = 0; i < RBI_PLAN_PHASES; i++) {
        struct rbi_phase *const phase = &plan->phases[i];
        if (phase->key == key)
            return phase;
        if (phase->used < oldest->used)
            oldest = phase;
    }
    forget(oldest);
    oldest->key = key;
    oldest->moves = oldest->rest = 0;
    oldest->misses = oldest->failures = 0;
    oldest->is_needed = false;
    return oldest;
}

void rbi_plan_end(rebatch_pool *pool)
{
    struct rbi_pool_plan *const plan = &pool->plan;
    struct rbi_phase *const phase = plan->phase;
    pool->promised_bytes = 0; /* what was reserved, was for the phase */
    if (!phase)
        return;
    pool->stats.phases++;
    const uint64_t moved = moved_pages(pool) - plan->moved;
    const bool is_needed = moved != 0 || rbi_pool_holds_too_much(pool);
    if (plan->mode == RBI_PLAN_SERVES) {
        pool->stats.planned_phases++;
        phase->misses = 0;
        phase->served += phase->served < UINT32_MAX;
        if (phase->served == RBI_PLAN_SERVED_ENOUGH)
            phase->failures = 0;
        rbi_plan_leave(pool);
    } else {
        phase->is_needed = is_needed;
        phase->moved_unplanned = moved;
        if (plan->mode == RBI_PLAN_COMPARES && plan->next < phase->count)
            record_from_here(plan);
        else if (plan->mode == RBI_PLAN_COMPARES && is_needed)
            make_plan(phase, pool->page_bytes);
    }
    plan->mode = RBI_PLAN_OFF;
    plan->phase = NULL;
}

static enum rbi_plan_mode mode_for(struct rbi_phase *phase)
{
    if (phase->rest > 0) {
        phase->rest--;
        return RBI_PLAN_OFF;
    }
    if (phase->arena_bytes)
        return RBI_PLAN_SERVES;
    if (!phase->is_needed)
        return RBI_PLAN_OFF;
    return phase->count ? RBI_PLAN_COMPARES : RBI_PLAN_RECORDS;
}

const struct rbi_phase *rbi_plan_begin(rebatch_pool *pool, uint64_t key)
{
    rbi_assert(rbi_lock_is_held(&pool->lock));
    rbi_assert(!pool->plan.phase && !pool->plan.arena);
    struct rbi_pool_plan *const plan = &pool->plan;
    struct rbi_phase *const phase = find_phase(plan, key);
    plan->serial++;
    phase->used = ++plan->marks;
    plan->phase = phase;
    plan->next = 0;
    plan->first_sequence = pool->sequence;
    plan->moved = moved_pages(pool);
    const enum rbi_plan_mode mode = mode_for(phase);
    plan->mode = mode == RBI_PLAN_SERVES ? RBI_PLAN_OFF : mode;
    return mode == RBI_PLAN_SERVES ? phase : NULL;
}

/* After 8, 16, 32 ... phases. What was taken again in the phases that followed the last time is
 * needed. */
static bool is_to_settle(rebatch_pool *pool, struct rbi_phase *phase)
{
    struct rbi_pool_plan *const plan = &pool->plan;
    if (phase->served != RBI_PLAN_SERVED_ENOUGH << plan->settled)
        return false;
    plan->settled += plan->settled < RBI_PLAN_DOUBLINGS_MOST;
    if (!rbi_pool_holds_too_much(pool) || rbi_vm_bytes(&pool->vm) <= plan->settled_bytes)
        return false;
    plan->settled_by = phase;
    return true;
}

bool rbi_plan_serve_from(rebatch_pool *pool, struct rbi_block *arena)
{
    rbi_assert(pool->plan.phase && (!arena || arena->state == RBI_BLOCK_HELD));
    struct rbi_pool_plan *const plan = &pool->plan;
    struct rbi_phase *const phase = plan->phase;
    const uint64_t moved = moved_pages(pool) - plan->moved;
    if (!plan->has_woken)
        phase->moves = arena && moved <= phase->moved_unplanned / 2 ? 0 : phase->moves + 1;
    plan->has_woken = false;
    if (phase->moves > RBI_PLAN_MOVES_MOST) {
        phase->moves = 0;
        note_failure(phase);
    }
    plan->arena = arena;
    plan->arena_live_bytes = 0;
    plan->mode = arena ? RBI_PLAN_SERVES : RBI_PLAN_OFF;
    if (phase == plan->settled_by) {
        plan->settled_bytes = rbi_vm_bytes(&pool->vm);
        plan->settled_by = NULL;
    }
    return arena && is_to_settle(pool, phase);
}
