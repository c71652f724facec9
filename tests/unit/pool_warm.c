/* Holds when a pool spends memory to save work: once its needs are known, blocks of other zones and
 * fresh pages are taken rather than free ones moved, as long as there is plenty, up to a 32nd
 * more than was live at its peak. */

#include "fault/fault_device.h"
#include "unit/pool_help.h"

enum { STEPS_WORTH = 20000 };

/* What stays live, in pages: a 32nd of it is what a large request needs. */
enum { WEIGHTS = 512 };

/* As many allocations as it takes for a pool to know its needs; live memory stays below its
 * peak. */
static void learn_needs(rebatch_pool *pool)
{
    for (int i = 0; i < STEPS_WORTH; i++)
        give(pool, take(pool, UNIT));
}

/* Live: the weights, two of each four pages, in pieces of two, and a unit; free as much in
 * pieces. */
static void scatter(rebatch_pool *pool)
{
    void *blocks[8];
    (void)take(pool, WEIGHTS * PAGE);
    for (int i = 0; i < 8; i++)
        blocks[i] = take(pool, 2 * PAGE);
    give(pool, take(pool, UNIT));
    for (int i = 0; i < 8; i += 2)
        give(pool, blocks[i]);
}

/* What four pieces in a row need: moved, where the answer is above 0. */
static uint64_t remaps_for_large(rebatch_pool *pool)
{
    const uint64_t before = stats_of(pool).remaps;
    (void)take(pool, 8 * PAGE);
    assert_valid(pool);
    return stats_of(pool).remaps - before;
}

Test(pool_warm, pages_are_moved_until_the_needs_are_known)
{
    struct rig rig = rig_open(1024, NULL);
    scatter(rig.pool);
    cr_assert_eq(remaps_for_large(rig.pool), 8);
    rig_close(&rig);
}

Test(pool_warm, then_fresh_memory_is_taken)
{
    struct rig rig = rig_open(1024, NULL);
    scatter(rig.pool);
    learn_needs(rig.pool);
    const uint64_t rungs = rig.pool->stages[REBATCH_STAGE_REMAP];
    const uint64_t reserved = stats_of(rig.pool).reserved_bytes;
    cr_assert_eq(remaps_for_large(rig.pool), 0);
    cr_assert_eq(rig.pool->stages[REBATCH_STAGE_REMAP], rungs);
    cr_assert_leq(stats_of(rig.pool).reserved_bytes, reserved + 8 * PAGE);
    cr_assert_gt(stats_of(rig.pool).reserved_bytes, reserved);
    rig_close(&rig);
}

/* A free block of 16 pages is of the zone of large ones, a request for two of another. */
static uint64_t remaps_for_medium(size_t device_pages)
{
    struct rig rig = rig_open(device_pages, NULL);
    give(rig.pool, take(rig.pool, 16 * PAGE));
    learn_needs(rig.pool);
    const rebatch_pool_stats before = stats_of(rig.pool);
    (void)take(rig.pool, 2 * PAGE);
    assert_valid(rig.pool);
    const rebatch_pool_stats after = stats_of(rig.pool);
    cr_assert_eq(after.reserved_bytes, before.reserved_bytes);
    rig_close(&rig);
    return after.remaps - before.remaps;
}

Test(pool_warm, then_blocks_of_other_zones_are_taken)
{
    cr_assert_eq(remaps_for_medium(18), 0);
}

/* 16 pages are the peak, and all there is. */
Test(pool_warm, so_they_are_where_there_is_no_more_than_the_peak)
{
    cr_assert_eq(remaps_for_medium(16), 0);
}

/* Two phases of other sizes each, of which one takes up what the other has left. */
Test(pool_warm, so_do_steps_of_other_sizes_in_little_memory)
{
    enum { FEW = 4, MANY = 24, STEPS = 1500 };
    struct rig rig = rig_open(FEW * 13 + 2, NULL);
    uint64_t calls = 0;
    for (int step = 0; step < STEPS; step++) {
        void *few[FEW], *many[MANY];
        if (step == STEPS - 100)
            calls = stats_of(rig.pool).device_allocations + stats_of(rig.pool).remaps;
        for (int i = 0; i < FEW; i++)
            few[i] = take(rig.pool, 12 * PAGE + UNIT);
        for (int i = 0; i < FEW; i++)
            give(rig.pool, few[i]);
        for (int i = 0; i < MANY; i++)
            many[i] = take(rig.pool, 2 * PAGE);
        for (int i = 0; i < MANY; i++)
            give(rig.pool, many[i]);
    }
    cr_assert_eq(stats_of(rig.pool).device_allocations + stats_of(rig.pool).remaps, calls);
    assert_valid(rig.pool);
    rig_close(&rig);
}

/* The same calls over and over cost no call of the device any more. */
Test(pool_warm, repeated_steps_end_without_device_calls)
{
    struct rig rig = rig_open(1024, NULL);
    uint64_t calls = 0;
    for (int step = 0; step < 3000; step++) {
        void *blocks[12];
        if (step == 2500)
            calls = stats_of(rig.pool).device_allocations + stats_of(rig.pool).remaps;
        for (size_t i = 0; i < 12; i++)
            blocks[i] = take(rig.pool, (i * 7 % 12 + 1) * PAGE + i * UNIT);
        for (size_t i = 0; i < 12; i += 2)
            give(rig.pool, blocks[i]);
        for (size_t i = 0; i < 12; i += 2)
            blocks[i] = take(rig.pool, (i * 5 % 12 + 1) * PAGE + i * UNIT);
        for (size_t i = 0; i < 12; i++)
            give(rig.pool, blocks[i]);
    }
    cr_assert_eq(stats_of(rig.pool).device_allocations + stats_of(rig.pool).remaps, calls);
    assert_valid(rig.pool);
    rig_close(&rig);
}

static rebatch_status (*ask_memory)(void *self, rebatch_memory_info *out);
static uint64_t questions;
static rebatch_status count_questions(void *self, rebatch_memory_info *out)
{
    questions++;
    return ask_memory(self, out);
}

/* Frees a few of many blocks and allocates as large ones again in another order, over and over. */
static void churn(rebatch_pool *pool, uint64_t random, int rounds)
{
    enum { LIVE = 256, FEW = 8 };
    void *blocks[LIVE];
    for (size_t k = 0; k < LIVE; k++)
        blocks[k] = take(pool, UNIT << k % 12);
    for (int i = 0; i < rounds; i++) {
        const size_t first = draw(&random) % LIVE, stride = 2 * (draw(&random) % LIVE) + 1;
        for (size_t n = 0; n < FEW; n++)
            give(pool, blocks[(first + n * stride) % LIVE]);
        for (size_t n = FEW; n-- > 0;) {
            const size_t k = (first + n * stride) % LIVE;
            blocks[k] = take(pool, UNIT << k % 12);
        }
    }
    for (size_t k = 0; k < LIVE; k++)
        give(pool, blocks[k]);
}

/* Nor does what repeats nothing, once everything lies where it is needed; not even the question
 * what the device has left, which takes a GPU microseconds. Seed 1. */
Test(pool_warm, a_warm_pool_does_not_ask_what_the_device_has_left)
{
    enum { ROUNDS = 12, CALLS = 6000 };
    static struct rbi_device_ops counting; /* each test is a process of its own */
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.replay = REBATCH_OFF;
    struct rig rig = rig_open(16384, &options);
    counting = *rig.device->ops;
    ask_memory = counting.memory;
    counting.memory = count_questions;
    rig.device->ops = &counting;
    for (int i = 0; i < ROUNDS; i++)
        churn(rig.pool, 1, CALLS);
    const uint64_t calls = stats_of(rig.pool).device_allocations + stats_of(rig.pool).remaps;
    questions = 0;
    churn(rig.pool, 1, CALLS);
    const uint64_t took = stats_of(rig.pool).device_allocations + stats_of(rig.pool).remaps;
    cr_assert_eq(took, calls);
    cr_assert_eq(questions, 0);
    rig_close(&rig);
}

/* Replaces blocks of any size by others, in no order; pages moved for that. */
static uint64_t replace(rebatch_pool *pool, void **blocks, size_t count, uint64_t *random)
{
    enum { CALLS = 20000, MOST = 32 };
    const uint64_t before = stats_of(pool).remaps;
    for (int i = 0; i < CALLS; i++) {
        void **block = &blocks[draw(random) % count];
        give(pool, *block);
        *block = take(pool, (draw(random) % (MOST * PAGE / UNIT) + 1) * UNIT);
    }
    return stats_of(pool).remaps - before;
}

/* A program whose calls never repeat pays with memory, in the end, rather than with moves for ever:
 * a part of what was moved is held beyond the peak. Seed 1. */
Test(pool_warm, calls_that_never_repeat_end_with_few_moves)
{
    enum { LIVE = 128, ROUNDS = 12 };
    void *blocks[LIVE] = {NULL};
    uint64_t random = 1, early = 0, late = 0;
    struct rig rig = rig_open(16384, NULL);
    (void)replace(rig.pool, blocks, LIVE, &random); /* until the needs are known */
    for (int i = 0; i < ROUNDS; i++) {
        late = replace(rig.pool, blocks, LIVE, &random);
        early = i == 0 ? late : early;
    }
    cr_assert_gt(early, 100);
    cr_assert_lt(late, early / 4, "%d pages, then %d", (int)early, (int)late);
    assert_valid(rig.pool);
    rig_close(&rig);
}

/* What is held beyond the peak has an end, however much there is: then pages are moved again. */
Test(pool_warm, no_more_is_held_than_a_32nd_beyond_the_peak)
{
    struct rig rig = rig_open(16 * WEIGHTS, NULL);
    enum { RUN = 16 }; /* longer than a chunk */
    void *blocks[WEIGHTS];
    (void)take(rig.pool, WEIGHTS * PAGE);
    for (int i = 0; i < WEIGHTS; i++)
        blocks[i] = take(rig.pool, PAGE);
    for (int i = 0; i < WEIGHTS; i++)
        if (i / RUN % 2 == 0)
            give(rig.pool, blocks[i]);
    learn_needs(rig.pool);
    for (int i = 0; i < WEIGHTS / 64; i++)
        (void)take(rig.pool, 32 * PAGE);
    const rebatch_pool_stats stats = stats_of(rig.pool);
    cr_assert_gt(stats.remaps, 0);
    cr_assert_gt(stats.reserved_bytes, stats.live_peak_bytes);
    cr_assert_leq(stats.reserved_bytes,
                  stats.live_peak_bytes + stats.live_peak_bytes / 32 + rig.pool->moved_bytes / 64);
    assert_valid(rig.pool);
    rig_close(&rig);
}

/* A new peak, and what a pool needs is not known any more. */
Test(pool_warm, after_a_new_peak_pages_are_moved_again)
{
    struct rig rig = rig_open(1024, NULL);
    learn_needs(rig.pool);
    scatter(rig.pool);
    cr_assert_eq(remaps_for_large(rig.pool), 8);
    rig_close(&rig);
}

/* All but 24 are held, and 8 more would leave 16 of 553: 29 permille. */
Test(pool_warm, the_room_to_keep_is_kept)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    static const struct {
        uint32_t keep_room_permille;
        uint64_t remaps;
    } cases[] = {{20, 0}, {40, 8}, {1000, 8}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        options.keep_room_permille = cases[i].keep_room_permille;
        struct rig rig = rig_open(WEIGHTS + 17 + 24, &options);
        scatter(rig.pool);
        learn_needs(rig.pool);
        cr_expect_eq(remaps_for_large(rig.pool), cases[i].remaps, "keep_room_permille %u",
                     (unsigned)options.keep_room_permille);
        rig_close(&rig);
    }
}

/* A limit of our own counts as the device's memory does. */
Test(pool_warm, the_room_is_that_within_the_limit)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.limit_bytes = (WEIGHTS + 24) * PAGE;
    struct rig rig = rig_open(1024, &options);
    scatter(rig.pool);
    learn_needs(rig.pool);
    cr_assert_eq(remaps_for_large(rig.pool), 8);
    rig_close(&rig);
}

/* Where the device has no more after all, free pages are moved as ever. */
Test(pool_warm, a_device_that_has_no_more_costs_nothing_but_the_question)
{
    struct rig rig = rig_open(1024, NULL);
    rebatch_device *fault;
    rebatch_pool *pool;
    cr_assert_eq(rebatch_device_open_fault(&fault, rig.device, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&pool, fault, NULL), REBATCH_OK);
    scatter(pool);
    learn_needs(pool);
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    plan.calls = REBATCH_FAULT_CREATE;
    plan.nth = 1;
    plan.times = REBATCH_FAULT_FOREVER;
    cr_assert_eq(rebatch_fault_arm(fault, &plan), REBATCH_OK);
    cr_assert_eq(remaps_for_large(pool), 8);
    rebatch_pool_destroy(pool);
    rebatch_device_close(fault);
    rig_close(&rig);
}

/* What a pool's copy predicts is what the pool does. */
Test(pool_warm, a_copy_knows_the_needs_too)
{
    struct rig rig = rig_open(1024, NULL);
    scatter(rig.pool);
    learn_needs(rig.pool);
    rebatch_pool *copy;
    rebatch_device *dry;
    cr_assert_eq(rbi_pool_clone(&copy, &dry, rig.pool), REBATCH_OK);
    cr_assert_eq(remaps_for_large(copy), 0);
    rebatch_pool_destroy(copy);
    rebatch_device_close(dry);
    rig_close(&rig);
}

Test(pool_warm, keep_room_is_a_share)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.keep_room_permille = 1001;
    struct rig rig = rig_open(8, NULL);
    rebatch_pool *pool;
    assert_refused(rebatch_pool_create(&pool, rig.device, &options), REBATCH_E_INVALID,
                   "keep_room_permille is 1001");
    rig_close(&rig);
}
