/* Holds what a pool does with steps of very many calls, as those of a large model in many
 * micro-batches have: up to the longest period it learns them like any other. Seeds 1 and 2. */
#include "unit/pool_streams.h"

enum { LIVE = 16, PASSES = 7 };

/* A step of `calls` calls, an even number: each but the first and the last LIVE gives back one of
 * LIVE blocks and takes another for it. Each block is marked as its. */
static void play_long(rebatch_pool *pool, size_t calls, uint64_t seed)
{
    unsigned char *blocks[LIVE] = {NULL};
    uint64_t random = seed;
    for (size_t i = 0; i < calls / 2; i++) {
        const size_t at = i < LIVE ? i : draw(&random) % LIVE;
        if (blocks[at]) {
            cr_assert_eq(*blocks[at], (unsigned char)at);
            give(pool, blocks[at]);
        }
        blocks[at] = take(pool, 1 + draw(&random) % (64 * UNIT));
        *blocks[at] = (unsigned char)at;
    }
    for (size_t at = 0; at < LIVE; at++)
        give(pool, blocks[at]);
}

static bool cycle_runs(const struct rig *rig)
{
    return rig->pool->cycle.phase == RBI_CYCLE_RUNS;
}

/* How many steps pass before a cycle runs; PASSES: none does. */
static int play_until_cycle(struct rig *rig, size_t calls)
{
    int passes = 0;
    while (passes < PASSES && !cycle_runs(rig)) {
        play_long(rig->pool, calls, 1);
        passes++;
    }
    return passes;
}

Test(pool_cycle_long, a_step_of_three_hundred_thousand_calls_is_one)
{
    enum { LONG = 300000 };
    struct rig rig = rig_open(DEVICE_GRANULES, NULL);
    cr_assert_lt(play_until_cycle(&rig, LONG), PASSES);
    const uint64_t made = rig.pool->block_nodes.made, periods = rig.pool->cycle.periods;
    play_long(rig.pool, LONG, 1);
    cr_assert(cycle_runs(&rig));
    cr_assert_eq(rig.pool->trail.period, LONG);
    cr_assert_eq(rig.pool->cycle.periods, periods + 1);
    cr_assert_eq(rig.pool->block_nodes.made, made);
    play_long(rig.pool, LONG, 2); /* another step */
    assert_valid(rig.pool);
    cr_assert_lt(play_until_cycle(&rig, LONG), PASSES);
    rig_close(&rig);
}

Test(pool_cycle_long, the_longest_step_is_one_and_a_longer_is_none)
{
    struct rig rig = rig_open(DEVICE_GRANULES, NULL);
    cr_assert_lt(play_until_cycle(&rig, RBI_TRAIL_CALLS - 64), PASSES);
    rig_close(&rig);
    rig = rig_open(DEVICE_GRANULES, NULL);
    cr_assert_eq(play_until_cycle(&rig, RBI_TRAIL_CALLS + 2), PASSES);
    rig_close(&rig);
}

/* Who has short steps does not pay for long ones. */
Test(pool_cycle_long, it_takes_as_much_host_memory_as_its_step_is_long)
{
    enum { SHORT = 1000, LONG = 200000 };
    struct rig rig = rig_open(DEVICE_GRANULES, NULL);
    for (int i = 0; i < 400; i++)
        play_long(rig.pool, SHORT, 1);
    cr_assert(cycle_runs(&rig));
    cr_assert_leq(rig.pool->cycle.capacity, 2 * SHORT);
    cr_assert_eq(rig.pool->trail.mask, RBI_TRAIL_CALLS_FIRST - 1);
    cr_assert_lt(play_until_cycle(&rig, LONG), 1); /* the short one runs until it is called */
    for (int i = 0; i < PASSES; i++)
        play_long(rig.pool, LONG, 1);
    cr_assert(cycle_runs(&rig));
    cr_assert_eq(rig.pool->trail.period, LONG);
    cr_assert_leq(rig.pool->cycle.capacity, 2 * LONG);
    rig_close(&rig);
}

/* Without it steps are as good as ever, and shorter ones are learnt. */
Test(pool_cycle_long, without_host_memory_for_it_there_is_none)
{
    enum { SHORT = 1000, LONG = 200000 };
    struct rig rig = rig_open(DEVICE_GRANULES, NULL);
    play_long(rig.pool, LONG, 1); /* all nodes are made */
    rbi_heap_fail(1, UINT64_MAX);
    cr_assert_eq(play_until_cycle(&rig, LONG), PASSES);
    rbi_heap_fail(0, 0);
    cr_assert_eq(rig.pool->trail.mask, RBI_TRAIL_CALLS_FIRST - 1);
    for (int i = 0; i < 4000 && !cycle_runs(&rig); i++)
        play_long(rig.pool, SHORT, 1);
    cr_assert(cycle_runs(&rig));
    rig_close(&rig);
}

/* Each block is used by another stream. */
static void play_used(struct world *w, size_t blocks)
{
    for (size_t i = 0; i < blocks; i++) {
        void *const block = take_on(w->pool, (1 + i % 7) * UNIT, w->streams[1]);
        cr_assert_eq(rebatch_pool_use_on(w->pool, block, NULL), REBATCH_OK);
        give(w->pool, block);
    }
    finish_work(w);
}

Test(pool_cycle_long, with_seventy_thousand_uses_it_runs_as_well)
{
    enum { USES = 70001, STEPS = 8 }; /* not a multiple of seven, so that no shorter one repeats */
    struct world w = open_bare_world(1, NULL);
    for (int i = 0; i < STEPS; i++) {
        void *const large = take_on(w.pool, 512 * GRANULE, w.streams[1]);
        play_used(&w, USES);
        give(w.pool, large);
    }
    cr_assert(runs(&w));
    cr_assert_geq(w.pool->cycle.use_count, (size_t)USES);
    close_world(&w);
}
