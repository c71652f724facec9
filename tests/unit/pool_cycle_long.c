/* Holds what a pool does with steps of very many calls, as those of a large model in many
 * micro-batches have: up to the longest period it learns them like any other. Seeds 1 and 2. */
#include "unit/pool_streams.h"

enum { LIVE = 16, PASSES = 9 };

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
    cr_assert_lt(play_until_cycle(&rig, RBI_TRAIL_PERIOD_MOST), PASSES);
    rig_close(&rig);
    rig = rig_open(DEVICE_GRANULES, NULL);
    cr_assert_eq(play_until_cycle(&rig, RBI_TRAIL_PERIOD_MOST + 2), PASSES);
    rig_close(&rig);
}

/* What is remembered grows by powers of two: around each of them there is no step that is too long
 * for the one and too short for the next. */
Test(pool_cycle_long, steps_of_any_length_are_one)
{
    static const int beyond[] = {-130, -64, -62, -16, -2, 0, 2};
    for (size_t calls = RBI_TRAIL_CALLS_FIRST; calls < RBI_TRAIL_CALLS; calls *= 2)
        for (size_t i = 0; i < sizeof beyond / sizeof *beyond; i++) {
            struct rig rig = rig_open(DEVICE_GRANULES, NULL);
            cr_assert_lt(play_until_cycle(&rig, calls + (size_t)beyond[i]), PASSES, "%zu%+d", calls,
                         beyond[i]);
            rig_close(&rig);
        }
}

/* The distance between two evaluations, with some hundred steps between, is no period as long as
 * the steps are. */
Test(pool_cycle_long, short_steps_are_served_whatever_comes_between)
{
    enum { STEP_CALLS = 400, STEPS = 350, EVALUATION = 600, SECOND = 650, ROUNDS = 60 };
    struct rig rig = rig_open(DEVICE_GRANULES, NULL);
    uint64_t random = 5;
    size_t steps = 0, served = 0;
    for (int round = 0; round < ROUNDS; round++) {
        for (size_t i = 0; i < STEPS - 5 + draw(&random) % 11; i++) {
            play_long(rig.pool, STEP_CALLS, 1);
            steps += round >= ROUNDS / 2;
            served += round >= ROUNDS / 2 && cycle_runs(&rig);
        }
        play_long(rig.pool, EVALUATION, 2);
        if (round % 5 == 0)
            play_long(rig.pool, SECOND, 3);
    }
    cr_assert_gt(rig.pool->trail.mask, RBI_TRAIL_CALLS_FIRST);
    cr_assert_gt(100 * served, 95 * steps, "%zu of %zu", served, steps);
    rig_close(&rig);
}

/* Where a block is handed from step to step, two of them are one period. */
Test(pool_cycle_long, two_long_steps_may_be_one_period)
{
    enum { LONG = 100000, STEPS = 24 };
    struct rig rig = rig_open(DEVICE_GRANULES, NULL);
    void *handed = NULL;
    int steps = 0;
    for (; steps < STEPS && !cycle_runs(&rig); steps++) {
        void *const next = take(rig.pool, 3 * GRANULE);
        give(rig.pool, handed);
        handed = next;
        play_long(rig.pool, LONG, 1);
    }
    cr_assert_lt(steps, STEPS);
    cr_assert_eq(rig.pool->trail.period, 2 * (LONG + 2));
    give(rig.pool, handed);
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
    cr_assert_leq(w.pool->block_nodes.made, (size_t)(3 * RBI_CYCLE_PENDING_MOST),
                  "only so many of them may be pending at once");
    close_world(&w);
}

/* Where a large block lay that four streams have used, each of many small ones waits for them. */
Test(pool_cycle_long, a_short_step_may_have_many_waits)
{
    enum { SMALL = 400, STEPS_MOST = 60, USERS = 4 };
    struct world w = open_bare_world(1, NULL);
    rebatch_stream users[USERS];
    void *blocks[SMALL];
    for (int i = 0; i < USERS; i++)
        cr_assert_eq(rebatch_stream_create(&users[i], w.device), REBATCH_OK);
    for (int step = 0; step < STEPS_MOST && !runs(&w); step++) {
        void *const large = take(w.pool, SMALL * 4 * UNIT);
        for (int i = 0; i < USERS; i++)
            cr_assert_eq(rebatch_pool_use_on(w.pool, large, users[i]), REBATCH_OK);
        give(w.pool, large);
        for (int i = 0; i < USERS; i++)
            lazy_go_on(users[i], 8);
        for (size_t i = 0; i < SMALL; i++)
            blocks[i] = take(w.pool, 4 * UNIT);
        for (size_t i = 0; i < SMALL; i++)
            give(w.pool, blocks[i]);
    }
    cr_assert(runs(&w));
    cr_assert_gt(w.pool->cycle.wait_count, w.pool->cycle.noted);
    for (int i = 0; i < USERS; i++)
        rebatch_stream_destroy(w.device, users[i]);
    close_world(&w);
}
