/* Owns the tests of growth: when the micro-batch grows again, how far, and what a failure costs.
 * Must not know more of the library than its public headers say. */
#include <stdio.h>
#include <string.h>

#include "step_common.h"

/* Runs one step that shrinks a batch of 64 to micro-batches of 16, by faults that do not return. */
static void open_shrunk(struct rig *rig, const rebatch_options *options)
{
    rig_open(rig, MIB(128), options);
    rig->script.sample_bytes = KIB(64);
    script_fail(&rig->script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_RETURN)->more_than = 16;
    rig->script.faults[0].times = SCRIPT_FOREVER;
    OK(rig_step(rig, 64));
    cr_assert_eq(rebatch_get_micro(rig->rb, 64), 16);
    rig->script.fault_count = 0;
}

static void run_clean(struct rig *rig, uint32_t steps)
{
    while (steps--) {
        OK(rig_step(rig, 64));
        cr_assert_eq(rig->report.ooms, 0);
    }
}

Test(step_growth, after_grow_after_clean_steps_the_microbatch_doubles)
{
    static const uint32_t waits[][2] = {{1, 1}, {4, 4}, {0, 16}}; /* grow_after, clean steps */
    for (size_t i = 0; i < sizeof waits / sizeof *waits; i++) {
        OPEN_WITH(open_shrunk, rig, rig, &OPTIONS(.grow_after = waits[i][0]));
        run_clean(&rig, waits[i][1] - 1);
        cr_assert_eq(rebatch_get_micro(rig.rb, 64), 16, "wait %zu: it grew too early", i);
        run_clean(&rig, 1);
        cr_assert_eq(rebatch_get_micro(rig.rb, 64), 32, "wait %zu: it did not grow", i);
        cr_assert_str_eq(rig_events(&rig), "GROW(16->32) STEP");
        run_clean(&rig, 1);
        cr_assert_str_eq(script_trace(&rig.script), "z f0+32 f32+32 u");
    }
}

Test(step_growth, an_oom_begins_the_count_anew)
{
    OPEN_WITH(open_shrunk, rig, rig, &OPTIONS(.grow_after = 4));
    run_clean(&rig, 3);
    script_fail(&rig.script, SCRIPT_ZERO, 1, SCRIPT_BEFORE, SCRIPT_RETURN);
    OK(rig_step(&rig, 64));
    cr_assert_eq(rig.report.ooms, 1);
    rig.script.fault_count = 0;
    run_clean(&rig, 3);
    cr_assert_eq(rebatch_get_micro(rig.rb, 64), 16);
    run_clean(&rig, 1);
    cr_assert_eq(rebatch_get_micro(rig.rb, 64), 32);
}

Test(step_growth, it_stops_at_the_effective_batch)
{
    OPEN_WITH(open_shrunk, rig, rig, &OPTIONS(.grow_after = 1));
    run_clean(&rig, 10);
    cr_assert_eq(rebatch_get_micro(rig.rb, 64), 64);
    cr_assert_str_eq(script_trace(&rig.script), "z f0+64 u");
    cr_assert_str_eq(rig_events(&rig), "STEP", "it still grows");
}

Test(step_growth, it_stops_at_micro_largest)
{
    OPEN(rig, rig, MIB(64), &OPTIONS(.grow_after = 1, .micro_start = 8, .micro_largest = 24));
    size_t largest = 0;
    for (int i = 0; i < 12; i++) {
        OK(rig_step(&rig, 64));
        cr_assert_leq(rebatch_get_micro(rig.rb, 64), 24);
        largest = rebatch_get_micro(rig.rb, 64);
    }
    cr_assert_eq(largest, 24);
}

Test(step_growth, it_goes_beyond_the_start_size)
{
    OPEN(rig, rig, MIB(64), &OPTIONS(.grow_after = 2, .micro_start = 3));
    static const size_t expected[] = {3, 3, 6, 6, 12, 12, 20, 20, 20};
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        cr_assert_eq(rebatch_get_micro(rig.rb, 20), expected[i], "before step %zu", i);
        OK(rig_step(&rig, 20));
        const rebatch_event *event = rig_event(&rig, REBATCH_EVENT_GROW);
        cr_assert_eq(event != NULL, expected[i] != 20 && i % 2 == 1);
        if (event)
            cr_assert_eq(event->micro_after, expected[i + 1]);
    }
}

Test(step_growth, it_can_be_switched_off)
{
    OPEN_WITH(open_shrunk, rig, rig, &OPTIONS(.grow_after = 1, .growth = REBATCH_OFF));
    run_clean(&rig, 40);
    cr_assert_eq(rebatch_get_micro(rig.rb, 64), 16);
}

Test(step_growth, without_room_it_does_not_grow_and_costs_nothing)
{
    static const struct {
        size_t start, capacity_bytes, sample_bytes;
        unsigned levels;
        size_t micro; /* at the end */
        unsigned level;
    } cases[] = {{0, MIB(20), MIB(1), 0, 16, 0},
                 /* nor is a size tried that never ran, when smaller ones show that it cannot fit */
                 {4, MIB(12), MIB(1), 0, 8, 0},
                 /* a lighter level is kept */
                 {0, MIB(3), MIB(8), 3, 1, 2}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        OPEN(rig, rig, cases[i].capacity_bytes,
             &OPTIONS(.grow_after = 1, .micro_start = cases[i].start));
        rig.script.sample_bytes = cases[i].sample_bytes;
        rig.script.lighten_levels = cases[i].levels;
        OK(rig_step(&rig, 64));
        run_clean(&rig, 40); /* no OOM in any of them */
        cr_assert_eq(rebatch_get_micro(rig.rb, 64), cases[i].micro, "case %zu", i);
        cr_assert_eq(rig.report.lighten_level, cases[i].level, "case %zu", i);
    }
}

Test(step_growth, it_grows_again_when_the_room_comes_back)
{
    OPEN(rig, rig, MIB(80), &OPTIONS(.grow_after = 2));
    rig.script.sample_bytes = MIB(1);
    OK(rig_step(&rig, 64));
    cr_assert_eq(rebatch_get_micro(rig.rb, 64), 64);
    rig_set_capacity(&rig, MIB(20));
    OK(rig_step(&rig, 64));
    cr_assert_eq(rebatch_get_micro(rig.rb, 64), 16);
    run_clean(&rig, 10);
    rig_set_capacity(&rig, MIB(80));
    run_clean(&rig, 10);
    cr_assert_eq(rebatch_get_micro(rig.rb, 64), 64);
}

Test(step_growth, it_grows_again_after_a_wake_into_less)
{
    OPEN(rig, rig, MIB(88), &OPTIONS(.grow_after = 2));
    rebatch_pool *const pool = rebatch_get_pool(rig.rb);
    rig.script.sample_bytes = MIB(1);
    void *weights;
    OK(rebatch_pool_alloc(&weights, pool, MIB(8), NULL, 0));
    memset(weights, 0x2f, MIB(8));
    OK(rig_step(&rig, 64));
    cr_assert_eq(rebatch_get_micro(rig.rb, 64), 64);
    OK(rebatch_pool_sleep(pool, NULL, NULL));
    rig_set_capacity(&rig, MIB(28));
    OK(rebatch_pool_wake(pool));
    OK(rig_step(&rig, 64));
    cr_assert_eq(rebatch_get_micro(rig.rb, 64), 16);
    run_clean(&rig, 4);
    OK(rebatch_pool_sleep(pool, NULL, NULL));
    rig_set_capacity(&rig, MIB(88));
    OK(rebatch_pool_wake(pool));
    run_clean(&rig, 10);
    cr_assert_eq(rebatch_get_micro(rig.rb, 64), 64);
    cr_assert_eq(memcmp(weights, (char *)weights + 1, MIB(8) - 1), 0);
    OK(rebatch_pool_free(pool, weights));
}

/* Lets every growth beyond 16 samples fail for a reason that the pool does not see. */
static void build_wall(struct rig *rig)
{
    rig->script.sample_bytes = 0;
    script_fail(&rig->script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_RETURN)->more_than = 16;
    rig->script.faults[0].times = SCRIPT_FOREVER;
}

/* The clean steps between one failed growth and the next. */
static void expect_waits(struct rig *rig, const unsigned *expected, size_t failures)
{
    for (size_t failure = 0; failure < failures; failure++) {
        for (unsigned clean = 0; clean < expected[failure]; clean++) {
            OK(rig_step(rig, 64));
            cr_assert_eq(rig->report.ooms, 0, "failure %zu came after %u clean steps", failure,
                         clean);
        }
        OK(rig_step(rig, 64));
        cr_assert_gt(rig->report.ooms, 0, "there was no growth after %u clean steps",
                     expected[failure]);
        cr_assert_not_null(rig_event(rig, REBATCH_EVENT_GROWTH_FAILED));
        cr_assert_not_null(rig_event(rig, REBATCH_EVENT_SHRINK));
        cr_assert_eq(rebatch_get_micro(rig->rb, 64), 16);
    }
}

Test(step_growth, a_failed_growth_doubles_the_wait_up_to_the_longest)
{
    static const struct {
        uint32_t grow_after, longest; /* 0: the default, 16 and 1024 */
        unsigned waits[8];
        size_t failures;
    } cases[] = {{2, 8, {2, 4, 8, 8, 8}, 5},
                 {3, 7, {3, 6, 7, 7}, 4}, /* no doubling */
                 {0, 0, {16, 32, 64, 128, 256, 512, 1024, 1024}, 8}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        OPEN_WITH(open_shrunk, rig, rig,
                  &OPTIONS(.grow_after = cases[i].grow_after, .grow_wait_max = cases[i].longest));
        build_wall(&rig);
        expect_waits(&rig, cases[i].waits, cases[i].failures);
    }
}

Test(step_growth, a_growth_that_held_ends_the_longer_wait)
{
    OPEN_WITH(open_shrunk, rig, rig, &OPTIONS(.grow_after = 2, .grow_wait_max = 64));
    build_wall(&rig);
    expect_waits(&rig, (const unsigned[]){2, 4}, 2);
    rig.script.fault_count = 0; /* the wall is gone; the wait is 8 */
    run_clean(&rig, 8);
    cr_assert_eq(rebatch_get_micro(rig.rb, 64), 32);
    run_clean(&rig, 8);
    cr_assert_eq(rebatch_get_micro(rig.rb, 64), 64);
    run_clean(&rig, 8); /* that held as well */
    build_wall(&rig);
    OK(rig_step(&rig, 64));
    cr_assert_eq(rebatch_get_micro(rig.rb, 64), 16);
    expect_waits(&rig, (const unsigned[]){2}, 1);
}

Test(step_growth, an_oom_that_no_growth_brought_about_is_no_failed_growth)
{
    OPEN_WITH(open_shrunk, rig, rig, &OPTIONS(.grow_after = 2, .grow_wait_max = 64));
    script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_BEFORE, SCRIPT_POOL);
    OK(rig_step(&rig, 64));
    cr_assert_eq(rig.report.ooms, 1);
    cr_assert_null(rig_event(&rig, REBATCH_EVENT_GROWTH_FAILED));
}

/* From 12 samples to 16, which fail: half of that is less than what ran. `manner` and `calls` say
 * how often they are tried. */
static void fall_back(enum script_manner manner, const char *calls)
{
    OPEN(rig, rig, MIB(64),
         &OPTIONS(.grow_after = 1, .micro_start = 12, .micro_allowed[0] = 8, .micro_allowed[1] = 12,
                  .micro_allowed[2] = 16));
    rig.script.base_bytes = MIB(1);
    run_clean(&rig, 1);
    cr_assert_eq(rebatch_get_micro(rig.rb, 64), 16);
    build_wall(&rig);
    rig.script.faults[0].more_than = 12;
    rig.script.faults[0].manner = manner;
    OK(rig_step(&rig, 60));
    cr_assert_str_eq(script_trace(&rig.script), calls);
    cr_assert_eq(rebatch_get_micro(rig.rb, 64), 12);
}

Test(step_growth, a_failed_growth_returns_to_the_size_before_it)
{
    static const char calls[] = "z f0+16! f0+12~1 f12+12~1 f24+12 f36+12 f48+12 u";
    fall_back(SCRIPT_POOL, calls);
    /* Not once more, though something was released: that size is known to fit. */
    fall_back(SCRIPT_RETURN, calls);
}

Test(step_growth, when_that_size_fails_too_the_next_is_half_of_it)
{
    OPEN_WITH(open_shrunk, rig, rig, &OPTIONS(.grow_after = 1));
    run_clean(&rig, 1);
    cr_assert_eq(rebatch_get_micro(rig.rb, 64), 32);
    build_wall(&rig);
    rig.script.faults[0].more_than = 8;
    rig.script.faults[0].manner = SCRIPT_POOL;
    STEP(&rig, 64, REBATCH_OK,
         "z f0+32! f0+16~1! f0+8~2 f8+8~2 f16+8~1 f24+8~1 "
         "f32+8 f40+8 f48+8 f56+8 u");
}

Test(step_growth, a_lighter_level_is_left_again)
{
    OPEN(rig, rig, MIB(3), &OPTIONS(.grow_after = 1));
    rig.script.sample_bytes = MIB(8);
    rig.script.lighten_levels = 3;
    OK(rig_step(&rig, 4));
    cr_assert_eq(rig.report.lighten_level, 2);
    cr_assert_eq(rebatch_get_micro(rig.rb, 4), 1);
    rig_set_capacity(&rig, MIB(64));
    unsigned level = 2;
    for (int i = 0; i < 12; i++) {
        OK(rig_step(&rig, 4));
        cr_assert_eq(rig.report.ooms, 0);
        cr_assert(rig.script.level == level || rig.script.level + 1 == level,
                  "from level %u to level %u", level, rig.script.level);
        char left[32];
        (void)snprintf(left, sizeof left, "GROW(l%u->l%u)", level, rig.script.level);
        cr_assert_eq(strstr(rig_events(&rig), left) != NULL, rig.script.level != level, "%s",
                     rig_events(&rig));
        level = rig.script.level;
    }
    cr_assert_eq(level, 0);
    cr_assert_eq(rebatch_get_micro(rig.rb, 4), 4);
    cr_assert_str_eq(script_trace(&rig.script), "z f0+4 u");
}

Test(step_growth, small_batches_in_between_do_not_grow_beyond_what_they_showed)
{
    OPEN(rig, rig, MIB(20), &OPTIONS(.grow_after = 1));
    rig.script.sample_bytes = MIB(1);
    OK(rig_step(&rig, 64));
    for (int i = 0; i < 40; i++) {
        OK(rig_step(&rig, i % 2 ? 64 : 5));
        cr_assert_eq(rig.report.ooms, 0);
    }
    cr_assert_eq(rebatch_get_micro(rig.rb, 64), 16);
}
