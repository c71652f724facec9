/* Holds what arena.h promises: addresses and blocks in use stay, what is lent serves others before
 * they fail, a claim maps it again or says OOM and loses nothing. Seeds: 1 to 40 in the random
 * test. */
#include <unistd.h>

#include "pool/interface.h"
#include "rebatch/arena.h"
#include "unit/awaited.h"
#include "unit/pool_help.h"

static rebatch_arena *open_arena(rebatch_pool *pool, rebatch_stream stream)
{
    rebatch_arena *arena;
    cr_assert_eq(rebatch_arena_create(&arena, pool), REBATCH_OK, "%s", rebatch_last_error());
    cr_assert_eq(rebatch_arena_open(arena, stream), REBATCH_OK, "%s", rebatch_last_error());
    assert_valid(pool);
    return arena;
}

static void *take_from(rebatch_arena *arena, size_t bytes, int value)
{
    void *block;
    cr_assert_eq(rebatch_arena_alloc(&block, arena, bytes, NULL, 0), REBATCH_OK, "%s",
                 rebatch_last_error());
    cr_assert(rebatch_arena_has(arena, block));
    memset(block, value, bytes);
    return block;
}

static void lend(rebatch_pool *pool, rebatch_arena *arena)
{
    cr_assert_eq(rebatch_arena_lend(arena), REBATCH_OK);
    assert_valid(pool);
}

static void claim(rebatch_pool *pool, rebatch_arena *arena)
{
    cr_assert_eq(rebatch_arena_claim(arena), REBATCH_OK, "%s", rebatch_last_error());
    assert_valid(pool);
    rebatch_arena_stats stats;
    cr_assert_eq(rebatch_arena_get_stats(&stats, arena), REBATCH_OK);
    cr_assert_eq(stats.taken_bytes, 0);
}

static rebatch_arena_stats arena_stats(rebatch_arena *arena)
{
    rebatch_arena_stats stats;
    cr_assert_eq(rebatch_arena_get_stats(&stats, arena), REBATCH_OK);
    return stats;
}

static size_t available(rebatch_pool *pool)
{
    size_t bytes;
    cr_assert_eq(rebatch_pool_available(&bytes, pool), REBATCH_OK);
    return bytes;
}

/* The largest request that would have succeeded instead of the last that failed. */
static size_t would_fit(rebatch_pool *pool)
{
    rebatch_oom_report oom;
    cr_assert_eq(rebatch_pool_last_oom(&oom, pool), REBATCH_OK);
    return (size_t)oom.would_fit_bytes;
}

/* Inputs, activations, gradients: the second are free at the end. */
struct graph {
    char *inputs, *activations, *gradients;
};
#define KEPT (PAGE + 100 * UNIT)

static struct graph capture(rebatch_pool *pool, rebatch_arena *arena, size_t activation_bytes)
{
    struct graph graph;
    graph.inputs = take_from(arena, KEPT, 1);
    graph.activations = take_from(arena, activation_bytes, 2);
    graph.gradients = take_from(arena, KEPT, 3);
    give(pool, graph.activations);
    return graph;
}

/* Writes all that it uses, and finds what is kept. */
static void replay(const struct graph *graph, size_t activation_bytes)
{
    assert_filled(graph->inputs, KEPT, 1);
    memset(graph->activations, 4, activation_bytes);
    assert_filled(graph->activations, activation_bytes, 4);
    assert_filled(graph->gradients, KEPT, 3);
}

static void drop(rebatch_pool *pool, rebatch_arena *arena, const struct graph *graph)
{
    rebatch_arena_destroy(arena);
    assert_valid(pool);
    give(pool, graph->inputs);
    give(pool, graph->gradients);
}

Test(pool_arena, what_is_lent_serves_what_would_be_an_oom)
{
    AUTO_RIG rig = rig_open(32, NULL);
    rebatch_arena *const arena = open_arena(rig.pool, NULL);
    const struct graph graph = capture(rig.pool, arena, 20 * PAGE);
    lend(rig.pool, arena);
    claim(rig.pool, arena);
    assert_oom(rig.pool, 15 * PAGE); /* free in the arena is nobody else's */
    const size_t fits = would_fit(rig.pool);
    assert_oom(rig.pool, fits + UNIT);
    give(rig.pool, take(rig.pool, fits));
    lend(rig.pool, arena);
    assert_oom(rig.pool, 32 * PAGE);
    give(rig.pool, take(rig.pool, would_fit(rig.pool)));
    void *const evaluation = take(rig.pool, 25 * PAGE);
    memset(evaluation, 5, 25 * PAGE);
    cr_assert(!rebatch_arena_has(arena, evaluation));
    cr_assert_gt(arena_stats(arena).taken_bytes, 14 * PAGE);
    give(rig.pool, evaluation);
    claim(rig.pool, arena);
    replay(&graph, 20 * PAGE);
    cr_assert_gt(arena_stats(arena).taken_total_bytes, 14 * PAGE);
    drop(rig.pool, arena, &graph);
}

/* As long as there is other memory. */
Test(pool_arena, what_is_lent_is_taken_last)
{
    AUTO_RIG rig = rig_open(64, NULL);
    rebatch_arena *const arena = open_arena(rig.pool, NULL);
    const struct graph graph = capture(rig.pool, arena, 20 * PAGE);
    lend(rig.pool, arena);
    void *const first = take(rig.pool, 10 * PAGE);
    give(rig.pool, first);
    void *const all = take(rig.pool, 33 * PAGE);
    cr_assert_eq(arena_stats(arena).taken_total_bytes, 0);
    void *const more = take(rig.pool, 10 * PAGE); /* the device has eight */
    cr_assert_geq(arena_stats(arena).taken_bytes, PAGE);
    cr_assert_leq(arena_stats(arena).taken_bytes, 4 * PAGE);
    give(rig.pool, all);
    give(rig.pool, more);
    claim(rig.pool, arena);
    replay(&graph, 20 * PAGE);
    drop(rig.pool, arena, &graph);
}

Test(pool_arena, a_claim_without_memory_is_an_oom_and_loses_nothing)
{
    AUTO_RIG rig = rig_open(32, NULL);
    rebatch_arena *const arena = open_arena(rig.pool, NULL);
    const struct graph graph = capture(rig.pool, arena, 20 * PAGE);
    lend(rig.pool, arena);
    void *const evaluation = take(rig.pool, 25 * PAGE);
    memset(evaluation, 5, 25 * PAGE);
    cr_assert_eq(rebatch_arena_claim(arena), REBATCH_OOM);
    assert_valid(rig.pool);
    cr_assert_eq(stats_of(rig.pool).ooms, 0);
    cr_assert_eq(rbi_pool_oom_count(rig.pool), 0);
    void *block;
    cr_assert_eq(rebatch_arena_alloc(&block, arena, UNIT, NULL, 0), REBATCH_E_STATE);
    cr_assert_null(block);
    assert_filled(evaluation, 25 * PAGE, 5);
    give(rig.pool, evaluation);
    claim(rig.pool, arena);
    replay(&graph, 20 * PAGE);
    drop(rig.pool, arena, &graph);
}

struct holder {
    rebatch_pool *pool;
    void *block;
};

static size_t free_held(size_t wanted_bytes, void *user)
{
    struct holder *const holder = user;
    void *const block = holder->block;
    holder->block = NULL;
    may_fail(rebatch_pool_free(holder->pool, block));
    return block ? wanted_bytes : 0;
}

Test(pool_arena, a_claim_asks_the_pressure_callbacks)
{
    AUTO_RIG rig = rig_open(32, NULL);
    rebatch_arena *const arena = open_arena(rig.pool, NULL);
    const struct graph graph = capture(rig.pool, arena, 20 * PAGE);
    lend(rig.pool, arena);
    struct holder holder = {rig.pool, take(rig.pool, 25 * PAGE)};
    cr_assert_eq(rebatch_pool_add_pressure(rig.pool, free_held, &holder), REBATCH_OK);
    claim(rig.pool, arena);
    cr_assert_null(holder.block);
    replay(&graph, 20 * PAGE);
    drop(rig.pool, arena, &graph);
}

/* Free memory of one is what another needs. */
Test(pool_arena, one_arena_takes_what_another_has_lent)
{
    AUTO_RIG rig = rig_open(32, NULL);
    rebatch_arena *const first = open_arena(rig.pool, NULL);
    const struct graph one = capture(rig.pool, first, 20 * PAGE);
    rebatch_arena *const second = open_arena(rig.pool, NULL);
    void *block;
    cr_assert_eq(rebatch_arena_alloc(&block, second, 20 * PAGE, NULL, 0), REBATCH_OOM);
    assert_valid(rig.pool);
    lend(rig.pool, first);
    const struct graph two = capture(rig.pool, second, 20 * PAGE);
    lend(rig.pool, second);
    for (int i = 0; i < 3; i++) {
        claim(rig.pool, first);
        replay(&one, 20 * PAGE);
        lend(rig.pool, first);
        claim(rig.pool, second);
        replay(&two, 20 * PAGE);
        lend(rig.pool, second);
    }
    drop(rig.pool, first, &one);
    drop(rig.pool, second, &two);
}

Test(pool_arena, a_second_capture_uses_what_is_free)
{
    AUTO_RIG rig = rig_open(64, NULL);
    rebatch_arena *const arena = open_arena(rig.pool, NULL);
    const struct graph first = capture(rig.pool, arena, 20 * PAGE);
    lend(rig.pool, arena);
    void *const other = take(rig.pool, 50 * PAGE);
    give(rig.pool, other);
    cr_assert_eq(rebatch_arena_open(arena, NULL), REBATCH_OK);
    const uint64_t before = arena_stats(arena).bytes;
    const struct graph second = capture(rig.pool, arena, 15 * PAGE);
    cr_assert_leq(arena_stats(arena).bytes, before + PAGE);
    cr_assert_eq(arena_stats(arena).live_bytes, 4 * KEPT);
    replay(&first, 15 * PAGE);
    replay(&second, 15 * PAGE);
    drop(rig.pool, arena, &first);
    give(rig.pool, second.inputs);
    give(rig.pool, second.gradients);
}

Test(pool_arena, a_destroyed_arena_is_memory_of_the_pool)
{
    AUTO_RIG rig = rig_open(32, NULL);
    for (int i = 0; i < 5; i++) {
        rebatch_arena *const arena = open_arena(rig.pool, NULL);
        const struct graph graph = capture(rig.pool, arena, 20 * PAGE);
        lend(rig.pool, arena);
        if (i % 2)
            give(rig.pool, take(rig.pool, 25 * PAGE)); /* some of it is taken */
        rebatch_arena_destroy(arena);
        assert_valid(rig.pool);
        void *const rest = take(rig.pool, 26 * PAGE);
        assert_filled(graph.inputs, KEPT, 1);
        assert_filled(graph.gradients, KEPT, 3);
        give(rig.pool, graph.inputs);
        give(rig.pool, rest);
        give(rig.pool, graph.gradients);
        cr_assert_eq(rebatch_pool_trim(rig.pool, 0, NULL), REBATCH_OK);
        cr_assert_eq(used_of(rig.device), 0);
        assert_valid(rig.pool);
    }
    size_t ranges = 0;
    for (const struct rbi_range *r = rig.pool->heap.first_range; r; r = r->next)
        ranges++;
    cr_assert_leq(ranges, 3); /* addresses are used again */
}

/* What is free in an arena is nobody's, until it is lent. */
Test(pool_arena, available_memory_counts_what_is_lent)
{
    AUTO_RIG rig = rig_open(32, NULL);
    rebatch_arena *const arena = open_arena(rig.pool, NULL);
    const struct graph graph = capture(rig.pool, arena, 20 * PAGE);
    cr_assert_eq(stats_of(rig.pool).live_bytes, 2 * KEPT);
    cr_assert_eq(stats_of(rig.pool).reserved_bytes, arena_stats(arena).bytes);
    cr_assert_eq(arena_stats(arena).live_bytes, 2 * KEPT);
    const size_t before = available(rig.pool);
    cr_assert_eq(before, 32 * PAGE - arena_stats(arena).bytes);
    lend(rig.pool, arena);
    const size_t lent = available(rig.pool) - before;
    cr_assert(lent >= 19 * PAGE && lent <= 20 * PAGE);
    void *const all = take(rig.pool, available(rig.pool));
    cr_assert_eq(available(rig.pool), 0);
    give(rig.pool, all);
    claim(rig.pool, arena);
    cr_assert_eq(available(rig.pool), before);
    drop(rig.pool, arena, &graph);
}

Test(pool_arena, a_lower_limit_takes_what_is_lent)
{
    AUTO_RIG rig = rig_open(64, NULL);
    rebatch_arena *const arena = open_arena(rig.pool, NULL);
    const struct graph graph = capture(rig.pool, arena, 20 * PAGE);
    lend(rig.pool, arena);
    cr_assert_eq(rebatch_pool_set_limit(rig.pool, 10 * PAGE), REBATCH_OK);
    cr_assert_leq(stats_of(rig.pool).reserved_bytes, 10 * PAGE);
    assert_valid(rig.pool);
    cr_assert_eq(rebatch_arena_claim(arena), REBATCH_OOM);
    cr_assert_leq(stats_of(rig.pool).reserved_bytes, 10 * PAGE);
    assert_filled(graph.inputs, KEPT, 1);
    cr_assert_eq(rebatch_pool_set_limit(rig.pool, 30 * PAGE), REBATCH_OK);
    claim(rig.pool, arena);
    replay(&graph, 20 * PAGE);
    /* With an arena that is not lent it holds as soon as that is. */
    cr_assert_eq(rebatch_pool_set_limit(rig.pool, 10 * PAGE), REBATCH_OK);
    cr_assert_gt(stats_of(rig.pool).reserved_bytes, 20 * PAGE);
    lend(rig.pool, arena);
    cr_assert_leq(stats_of(rig.pool).reserved_bytes, 10 * PAGE);
    drop(rig.pool, arena, &graph);
}

Test(pool_arena, a_trim_gives_what_is_lent_to_the_device)
{
    AUTO_RIG rig = rig_open(32, NULL);
    rebatch_arena *const arena = open_arena(rig.pool, NULL);
    const struct graph graph = capture(rig.pool, arena, 20 * PAGE);
    cr_assert_eq(rebatch_pool_trim(rig.pool, 0, NULL), REBATCH_OK);
    cr_assert_eq(used_of(rig.device), arena_stats(arena).bytes);
    lend(rig.pool, arena);
    cr_assert_eq(rebatch_pool_trim(rig.pool, 0, NULL), REBATCH_OK);
    cr_assert_leq(used_of(rig.device), 5 * PAGE);
    claim(rig.pool, arena);
    replay(&graph, 20 * PAGE);
    drop(rig.pool, arena, &graph);
}

/* The pool knows that all work is done that the device had at a free. */
static void await_all(rebatch_pool *pool)
{
    rbi_lock_take(&pool->lock);
    cr_assert_eq(rbi_pool_await_all(pool), REBATCH_OK);
    cr_assert_eq(pool->progress.done, pool->progress.frees);
    rbi_lock_give(&pool->lock);
}

/* A replay that still runs uses the arena, though the pool has had no free since. */
Test(pool_arena, memory_is_taken_when_the_replay_is_done)
{
    struct awaited replay;
    AUTO_RIG rig = rig_open(32, NULL);
    rebatch_stream stream;
    cr_assert_eq(rebatch_stream_create(&stream, rig.device), REBATCH_OK);
    rebatch_arena *const arena = open_arena(rig.pool, stream);
    void *block;
    cr_assert_eq(rebatch_arena_alloc(&block, arena, 20 * PAGE, NULL, 0), REBATCH_E_STATE);
    cr_assert_eq(rebatch_arena_alloc(&block, arena, 20 * PAGE, stream, 0), REBATCH_OK);
    give(rig.pool, block);
    void *const others = take(rig.pool, 10 * PAGE);
    await_all(rig.pool);
    awaited_enqueue(&replay, rig.device, rig.device, stream);
    lend(rig.pool, arena);
    cr_assert(!replay.is_done);
    void *const evaluation = take(rig.pool, 20 * PAGE);
    cr_assert(replay.is_done);
    give(rig.pool, evaluation);
    give(rig.pool, others);
    rebatch_arena_destroy(arena);
    assert_valid(rig.pool);
    rebatch_stream_destroy(rig.device, stream);
}

/* So does one that began after a block of two streams was freed: it is free before the replay is
 * done, and is not taken until then. */
Test(pool_arena, memory_of_two_streams_is_taken_when_the_replay_is_done)
{
    struct awaited replay;
    AUTO_RIG rig = rig_open(32, NULL);
    rebatch_stream stream, side;
    cr_assert_eq(rebatch_stream_create(&stream, rig.device), REBATCH_OK);
    cr_assert_eq(rebatch_stream_create(&side, rig.device), REBATCH_OK);
    rebatch_arena *const arena = open_arena(rig.pool, stream);
    void *block, *kept;
    cr_assert_eq(rebatch_arena_alloc(&block, arena, 20 * PAGE, stream, 0), REBATCH_OK);
    cr_assert_eq(rebatch_arena_alloc(&kept, arena, PAGE, stream, 0), REBATCH_OK);
    cr_assert_eq(rebatch_pool_use_on(rig.pool, block, side), REBATCH_OK);
    give(rig.pool, block);
    cr_assert_eq(rbi_device_synchronize(rig.device), REBATCH_OK);
    awaited_enqueue(&replay, rig.device, rig.device, stream);
    lend(rig.pool, arena);
    cr_assert(!replay.is_done);
    void *const evaluation = take(rig.pool, 20 * PAGE);
    cr_assert(replay.is_done);
    give(rig.pool, evaluation);
    give(rig.pool, kept);
    rebatch_arena_destroy(arena);
    rebatch_stream_destroy(rig.device, stream);
    rebatch_stream_destroy(rig.device, side);
}

static bool never(void *user)
{
    ++*(int *)user;
    return false;
}

/* While a graph is captured the pool must not wait: it takes what there is without. */
Test(pool_arena, a_capture_waits_for_nothing)
{
    int asked = 0;
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.may_wait = never;
    options.may_wait_user = &asked;
    AUTO_RIG rig = rig_open(32, &options);
    rebatch_arena *const first = open_arena(rig.pool, NULL);
    const struct graph graph = capture(rig.pool, first, 20 * PAGE);
    lend(rig.pool, first);
    rebatch_arena *const second = open_arena(rig.pool, NULL);
    void *block;
    cr_assert_eq(rebatch_arena_alloc(&block, second, 20 * PAGE, NULL, 0), REBATCH_OOM);
    assert_valid(rig.pool);
    cr_assert_gt(asked, 0);
    cr_assert_eq(arena_stats(first).taken_total_bytes, 0);
    for (int i = 0; i < 3; i++) {
        block = take_from(second, 5 * PAGE, 7);
        give(rig.pool, block); /* and the next capture's call has it at once */
    }
    cr_assert_eq(arena_stats(second).bytes, 5 * PAGE);
    rebatch_arena_destroy(second);
    drop(rig.pool, first, &graph);
}

static bool is_set(void *user)
{
    return *(const bool *)user;
}

/* Blocks that another stream of the capture uses are not given out again in it. */
Test(pool_arena, a_block_of_two_streams_waits)
{
    bool may_wait = false;
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.may_wait = is_set;
    options.may_wait_user = &may_wait;
    AUTO_RIG rig = rig_open(32, &options);
    rebatch_stream side;
    cr_assert_eq(rebatch_stream_create(&side, rig.device), REBATCH_OK);
    rebatch_arena *const arena = open_arena(rig.pool, NULL);
    void *const block = take_from(arena, 4 * PAGE, 1);
    cr_assert_eq(rebatch_pool_use_on(rig.pool, block, side), REBATCH_OK);
    give(rig.pool, block);
    void *const next = take_from(arena, 4 * PAGE, 2);
    cr_assert_neq(next, block);
    may_wait = true; /* the capture has ended */
    lend(rig.pool, arena);
    give(rig.pool, take(rig.pool, 28 * PAGE)); /* and then they are free like any other */
    claim(rig.pool, arena);
    memset(block, 3, 4 * PAGE);
    assert_filled(next, 4 * PAGE, 2);
    give(rig.pool, next);
    rebatch_arena_destroy(arena);
    rebatch_stream_destroy(rig.device, side);
}

Test(pool_arena, a_rollback_takes_a_captures_blocks_back)
{
    AUTO_RIG rig = rig_open(32, NULL);
    rebatch_arena *const arena = open_arena(rig.pool, NULL);
    void *const older = take_from(arena, 3 * PAGE, 1);
    const rebatch_scope scope = begin(rig.pool);
    give(rig.pool, older);
    void *const block = take_from(arena, 10 * PAGE, 2);
    rollback(rig.pool, scope);
    assert_filled(older, 3 * PAGE, 1);
    cr_assert_eq(arena_stats(arena).live_bytes, 3 * PAGE);
    give(rig.pool, block); /* late */
    cr_assert_eq(take_from(arena, 10 * PAGE, 2), block);
    give(rig.pool, block);
    give(rig.pool, older);
    rebatch_arena_destroy(arena);
}

/* What was reserved is there for ordinary allocations, whatever an arena takes. */
Test(pool_arena, a_reservation_is_not_the_arenas)
{
    AUTO_RIG rig = rig_open(32, NULL);
    rebatch_arena *const arena = open_arena(rig.pool, NULL);
    cr_assert_eq(rebatch_pool_reserve(rig.pool, 20 * PAGE, NULL), REBATCH_OK);
    void *const block = take_from(arena, 12 * PAGE, 1), *none;
    cr_assert_eq(rebatch_arena_alloc(&none, arena, PAGE, NULL, 0), REBATCH_OOM);
    assert_valid(rig.pool);
    void *const reserved = take(rig.pool, 20 * PAGE);
    give(rig.pool, reserved);
    give(rig.pool, block);
    rebatch_arena_destroy(arena);
}

Test(pool_arena, a_reservation_is_not_a_claims)
{
    AUTO_RIG rig = rig_open(32, NULL);
    rebatch_arena *const arena = open_arena(rig.pool, NULL);
    const struct graph graph = capture(rig.pool, arena, 20 * PAGE);
    lend(rig.pool, arena);
    cr_assert_eq(rebatch_pool_reserve(rig.pool, 15 * PAGE, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_arena_claim(arena), REBATCH_OOM);
    assert_valid(rig.pool);
    void *const reserved = take(rig.pool, 15 * PAGE);
    give(rig.pool, reserved);
    claim(rig.pool, arena);
    replay(&graph, 20 * PAGE);
    drop(rig.pool, arena, &graph);
}

/* Before new memory, what is free in the pool and no longer used. */
Test(pool_arena, a_claim_takes_free_pages_first)
{
    AUTO_RIG rig = rig_open(64, NULL);
    rebatch_arena *const arena = open_arena(rig.pool, NULL);
    const struct graph graph = capture(rig.pool, arena, 20 * PAGE);
    lend(rig.pool, arena);
    void *const evaluation = take(rig.pool, 55 * PAGE);
    give(rig.pool, evaluation);
    cr_assert_eq(rebatch_pool_trim(rig.pool, 15 * PAGE, NULL), REBATCH_OK);
    const uint64_t reserved = stats_of(rig.pool).reserved_bytes;
    give(rig.pool, take(rig.pool, 10 * PAGE));
    cr_assert_eq(rbi_device_synchronize(rig.device), REBATCH_OK);
    claim(rig.pool, arena);
    cr_assert_leq(stats_of(rig.pool).reserved_bytes, reserved + 10 * PAGE);
    replay(&graph, 20 * PAGE);
    drop(rig.pool, arena, &graph);
}

Test(pool_arena, admission_counts_what_is_lent)
{
    AUTO_RIG rig = rig_open(32, NULL);
    rebatch_arena *const arena = open_arena(rig.pool, NULL);
    const struct graph graph = capture(rig.pool, arena, 20 * PAGE);
    cr_assert_eq(rbi_pool_admit(rig.pool, 25 * PAGE, NULL), REBATCH_OOM);
    lend(rig.pool, arena);
    cr_assert_eq(rbi_pool_admit(rig.pool, 25 * PAGE, NULL), REBATCH_OK);
    assert_valid(rig.pool);
    claim(rig.pool, arena);
    drop(rig.pool, arena, &graph);
}

/* Phases are planned for what the pool holds itself, and are made of its own calls. */
Test(pool_arena, plans_are_not_of_arenas)
{
    AUTO_RIG rig = rig_open(64, NULL);
    rebatch_arena *const first = open_arena(rig.pool, NULL);
    const struct graph one = capture(rig.pool, first, 20 * PAGE);
    rebatch_arena *const second = open_arena(rig.pool, NULL);
    cr_assert_eq(rebatch_pool_mark(rig.pool, 7), REBATCH_OK);
    const struct graph two = capture(rig.pool, second, 20 * PAGE);
    cr_assert_eq(rig.pool->plan.marked, 7);
    cr_assert(!rbi_pool_holds_too_much(rig.pool));
    cr_assert(rbi_pool_may_take(rig.pool, PAGE, 10 * PAGE));
    give(rig.pool, take(rig.pool, PAGE));
    cr_assert_eq(rig.pool->plan.marked, 0);
    drop(rig.pool, first, &one);
    drop(rig.pool, second, &two);
}

/* With an update that must not fail, what is lent serves it before the host's memory does, and
 * comes back as device memory. */
Test(pool_arena, what_is_lent_comes_before_host_memory)
{
    rebatch_host_options host = REBATCH_HOST_OPTIONS_INIT;
    host.overflow_bytes = 100 * PAGE;
    AUTO_RIG rig = {NULL, NULL};
    cr_assert_eq(rebatch_device_open_host(&rig.device, 32 * PAGE, &host), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&rig.pool, rig.device, NULL), REBATCH_OK);
    rebatch_arena *const arena = open_arena(rig.pool, NULL);
    const struct graph graph = capture(rig.pool, arena, 20 * PAGE);
    lend(rig.pool, arena);
    cr_assert_eq(rebatch_pool_allow_overflow(rig.pool, true), REBATCH_OK);
    void *const moments = take(rig.pool, 27 * PAGE);
    memset(moments, 6, 27 * PAGE);
    cr_assert_eq(stats_of(rig.pool).overflow_bytes, 0);
    void *const more = take(rig.pool, 8 * PAGE);
    memset(more, 7, 8 * PAGE);
    cr_assert_gt(stats_of(rig.pool).overflow_bytes, 0);
    cr_assert_eq(rebatch_arena_claim(arena), REBATCH_OOM); /* it takes none of the host's */
    cr_assert_eq(rebatch_pool_allow_overflow(rig.pool, false), REBATCH_OK);
    give(rig.pool, moments);
    claim(rig.pool, arena);
    lend(rig.pool, arena);
    cr_assert_eq(rebatch_pool_allow_overflow(rig.pool, false), REBATCH_OK);
    cr_assert_eq(stats_of(rig.pool).overflow_bytes, 0);
    assert_filled(more, 8 * PAGE, 7);
    claim(rig.pool, arena);
    replay(&graph, 20 * PAGE);
    give(rig.pool, more);
    drop(rig.pool, arena, &graph);
}

/* A copy finds what the pool would: the same addresses, the same end of memory. */
Test(pool_arena, a_copy_of_the_pool_has_its_arenas)
{
    AUTO_RIG rig = rig_open(32, NULL);
    rebatch_arena *const arena = open_arena(rig.pool, NULL);
    const struct graph graph = capture(rig.pool, arena, 20 * PAGE);
    for (int lent = 0; lent < 2; lent++) {
        rebatch_device *dry;
        rebatch_pool *copy;
        cr_assert_eq(rbi_pool_clone(&copy, &dry, rig.pool), REBATCH_OK, "%s", rebatch_last_error());
        assert_valid(copy);
        void *block;
        cr_assert_eq(available(copy), available(rig.pool));
        cr_assert_eq(rebatch_pool_alloc(&block, copy, 25 * PAGE, NULL, 0),
                     lent ? REBATCH_OK : REBATCH_OOM);
        assert_valid(copy);
        cr_assert_eq(rebatch_pool_free(copy, graph.inputs), REBATCH_OK);
        rebatch_pool_destroy(copy);
        rebatch_device_close(dry);
        lend(rig.pool, arena);
    }
    drop(rig.pool, arena, &graph);
}

/* A pool goes with its arenas. */
Test(pool_arena, the_pools_end_is_that_of_its_arenas)
{
    const int64_t live = rbi_heap_live();
    {
        AUTO_RIG rig = rig_open(32, NULL);
        rebatch_arena *const arena = open_arena(rig.pool, NULL);
        (void)capture(rig.pool, arena, 20 * PAGE);
        lend(rig.pool, arena);
        give(rig.pool, take(rig.pool, 25 * PAGE));
    }
    cr_assert_eq(rbi_heap_live(), live);
}

Test(pool_arena, arguments_are_checked)
{
    AUTO_RIG rig = rig_open_plain(8, NULL);
    rebatch_arena *arena;
    rebatch_arena_stats stats;
    void *block;
    cr_assert_eq(rebatch_arena_create(&arena, rig.pool), REBATCH_E_UNSUPPORTED);
    cr_assert_null(arena);
    cr_assert_eq(rebatch_arena_create(NULL, rig.pool), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_arena_create(&arena, NULL), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_arena_open(NULL, NULL), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_arena_alloc(&block, NULL, 1, NULL, 0), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_arena_lend(NULL), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_arena_claim(NULL), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_arena_get_stats(&stats, NULL), REBATCH_E_INVALID);
    cr_assert(!rebatch_arena_has(NULL, &stats));
    rebatch_arena_destroy(NULL);
}

/* ---- any calls in any order ---- */

struct model {
    rebatch_pool *pool;
    rebatch_arena *arenas[2];
    struct piece {
        unsigned char *at;
        size_t bytes;
        int value, arena; /* -1: of the pool */
    } pieces[64];
    size_t count;
    bool is_lent[2];
    int next;
    uint64_t random;
};

static size_t draw_below(struct model *m, size_t below)
{
    return (size_t)draw(&m->random) % below;
}

static void add_piece(struct model *m)
{
    const size_t most = draw_below(m, 8) ? 3 * PAGE : 12 * PAGE;
    struct piece piece = {NULL, 1 + draw_below(m, most), ++m->next % 250,
                          (int)draw_below(m, 3) - 1};
    if (m->count == 64 || (piece.arena >= 0 && m->is_lent[piece.arena]))
        return;
    void *at;
    const rebatch_status status =
        piece.arena < 0 ? rebatch_pool_alloc(&at, m->pool, piece.bytes, NULL, 0)
                        : rebatch_arena_alloc(&at, m->arenas[piece.arena], piece.bytes, NULL, 0);
    cr_assert(status == REBATCH_OK || status == REBATCH_OOM, "%s", rebatch_last_error());
    if (status != REBATCH_OK)
        return;
    for (int i = 0; i < 2; i++)
        cr_assert_eq(rebatch_arena_has(m->arenas[i], at), piece.arena == i);
    piece.at = at;
    memset(at, piece.value, piece.bytes);
    m->pieces[m->count++] = piece;
}

static void free_piece(struct model *m)
{
    if (m->count == 0)
        return;
    struct piece *const piece = &m->pieces[draw_below(m, m->count)];
    assert_filled(piece->at, piece->bytes, piece->value);
    give(m->pool, piece->at);
    *piece = m->pieces[--m->count];
}

static void pass_on(struct model *m)
{
    const size_t i = draw_below(m, 2);
    if (draw_below(m, 2)) {
        cr_assert_eq(rebatch_arena_lend(m->arenas[i]), REBATCH_OK);
        m->is_lent[i] = true;
        return;
    }
    const rebatch_status status = rebatch_arena_claim(m->arenas[i]);
    cr_assert(status == REBATCH_OK || status == REBATCH_OOM, "%s", rebatch_last_error());
    m->is_lent[i] = m->is_lent[i] && status != REBATCH_OK;
    if (!m->is_lent[i])
        cr_assert_eq(arena_stats(m->arenas[i]).taken_bytes, 0);
}

static void renew(struct model *m)
{
    const int i = (int)draw_below(m, 2);
    rebatch_arena_destroy(m->arenas[i]);
    for (size_t k = 0; k < m->count; k++)
        if (m->pieces[k].arena == i)
            m->pieces[k].arena = -1;
    m->arenas[i] = open_arena(m->pool, NULL);
    m->is_lent[i] = false;
}

Test(pool_arena, any_calls_in_any_order)
{
    (void)alarm(300);
    for (uint64_t seed = 1; seed <= 40; seed++) {
        AUTO_RIG rig = rig_open(40, NULL);
        struct model m = {.pool = rig.pool, .random = seed};
        m.arenas[0] = open_arena(rig.pool, NULL);
        m.arenas[1] = open_arena(rig.pool, NULL);
        for (int i = 0; i < 600; i++) {
            const size_t what = draw_below(&m, 100);
            if (what < 45)
                add_piece(&m);
            else if (what < 85)
                free_piece(&m);
            else if (what < 97)
                pass_on(&m);
            else if (what < 98)
                renew(&m);
            else if (what < 99)
                may_fail(rebatch_pool_trim(rig.pool, draw_below(&m, 10) * PAGE, NULL));
            else
                cr_assert_eq(rebatch_pool_set_limit(rig.pool, draw_below(&m, 2) ? 0 : 30 * PAGE),
                             REBATCH_OK);
            if (i % 20 == 0)
                assert_valid(rig.pool);
        }
        while (m.count)
            free_piece(&m);
        rebatch_arena_destroy(m.arenas[0]);
        rebatch_arena_destroy(m.arenas[1]);
        cr_assert_eq(rebatch_pool_set_limit(rig.pool, 0), REBATCH_OK);
        give(rig.pool, take(rig.pool, 40 * PAGE)); /* no page was lost */
    }
}
