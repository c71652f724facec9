/* Owns the tests of the limits on the micro-batch: multiples, the list of sizes, OOMs in a row.
 * rig_step() holds every cut against them. Seed of what is random: 11.
 * Must not know more of the library than its public headers say. */
#include "step_common.h"

/* Lets every micro-batch of more than `most` samples fail. */
static void build_wall(struct rig *rig, size_t most)
{
    script_fail(&rig->script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_RETURN)->more_than = most;
    rig->script.faults[0].times = SCRIPT_FOREVER;
}

/* ---- memory that micro-batches leave ---- */

static rebatch_status leaves(const rebatch_microbatch *mb, void *user)
{
    void *memory;
    rebatch_mutating((rebatch *)user);
    return rebatch_pool_alloc(&memory, mb->pool, mb->count * KIB(64), mb->stream, 0) ? REBATCH_OOM
                                                                                     : REBATCH_OK;
}

static rebatch_status leaves_before_it_declares(const rebatch_microbatch *mb, void *user)
{
    void *memory;
    if (rebatch_pool_alloc(&memory, mb->pool, mb->count * KIB(64), mb->stream, 0))
        return REBATCH_OOM;
    rebatch_mutating((rebatch *)user);
    return REBATCH_OK;
}

static rebatch_status does_nothing(void *user)
{
    rebatch_mutating((rebatch *)user);
    return REBATCH_OK;
}

/* One sample would fit, and 32 do not: more attempts would not help. */
Test(step_limits, micro_batches_that_free_nothing_are_named)
{
    rebatch_device *device;
    rebatch *rb;
    rebatch_step_ops ops = REBATCH_STEP_OPS_INIT;
    open_on_host(&device, &rb, MIB(1), NULL);
    ops.zero_grad = does_nothing;
    ops.forward_backward = leaves;
    ops.optimizer_step = does_nothing;
    ops.flags = REBATCH_DECLARES_MUTATION;
    FAILS(rebatch_step(rb, &ops, 32, rb, NULL), REBATCH_E_EXHAUSTED,
          "the micro-batches before it in the step had left 1.00 MiB allocated: free what");
    ops.forward_backward = leaves_before_it_declares;
    FAILS(rebatch_step(rb, &ops, 32, rb, NULL), REBATCH_E_EXHAUSTED,
          "the micro-batches before it in the step had left 1.00 MiB allocated: free what");
    rebatch_map_ops map = REBATCH_MAP_OPS_INIT;
    map.run = leaves_before_it_declares;
    FAILS(rebatch_map(rb, &map, 32, rb, NULL), REBATCH_E_EXHAUSTED,
          "the micro-batches before it in the map had left 1.00 MiB allocated: free what");
    rebatch_close(rb);
    rebatch_device_close(device);
}

/* ---- multiples ---- */

Test(step_limits, the_first_cut_is_a_multiple_and_the_rest_comes_last)
{
    OPEN(rig, rig, MIB(64), &OPTIONS(.micro_multiple_of = 8, .grow_after = 1));
    cr_assert_eq(rebatch_get_micro(rig.rb, 20), 16);
    STEP(&rig, 20, REBATCH_OK, "z f0+16 f16+4 u");
    STEP(&rig, 24, REBATCH_OK, "z f0+24 u");
}

Test(step_limits, halving_goes_to_a_multiple)
{
    OPEN(rig, rig, MIB(64), &OPTIONS(.micro_multiple_of = 6, .grow_after = 1));
    build_wall(&rig, 8);
    OK(rig_step(&rig, 44));
    cr_assert_str_eq(rig_events(&rig), "SHRINK(42->18) SHRINK(18->6) STEP");
    cr_assert_eq(rig.script.calls[rig.script.call_count - 2].count, 2, "the rest");
}

Test(step_limits, below_the_smallest_multiple_there_is_nothing)
{
    OPEN(rig, rig, MIB(64), &OPTIONS(.micro_multiple_of = 8, .grow_after = 1));
    build_wall(&rig, 7);
    STEP(&rig, 32, REBATCH_E_EXHAUSTED, "z f0+32! f0+16~1! f0+8~2!");
    SAYS("the smallest micro-batch allowed is 8");
}

/* Cut in two, it would have a part that is no multiple and is not the last. */
Test(step_limits, a_rest_that_fails_is_not_cut_below_the_multiple)
{
    OPEN(rig, rig, MIB(64), &OPTIONS(.micro_multiple_of = 4, .micro_start = 4, .grow_after = 1));
    script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_BEFORE, SCRIPT_RETURN)->times =
        SCRIPT_FOREVER;
    STEP(&rig, 7, REBATCH_E_EXHAUSTED, "z f0+4 f4+3!");
}

Test(step_limits, growth_goes_to_multiples_up_to_the_largest)
{
    static const size_t expected[] = {6, 12, 24, 36, 36};
    OPEN(rig, rig, MIB(64),
         &OPTIONS(.micro_multiple_of = 6, .micro_start = 6, .grow_after = 1, .micro_largest = 40));
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        cr_assert_eq(rebatch_get_micro(rig.rb, 64), expected[i], "before step %zu", i);
        OK(rig_step(&rig, 64));
    }
}

Test(step_limits, fit_goes_to_a_multiple)
{
    OPEN(rig, rig, MIB(64),
         &OPTIONS(.micro_multiple_of = 5, .micro_start = 5, .grow_after = 1,
                  .on_oom = REBATCH_ON_OOM_FIT));
    rig.script.sample_bytes = MIB(1);
    for (int i = 0; i < 4; i++)
        OK(rig_step(&rig, 40));
    cr_assert_eq(rebatch_get_micro(rig.rb, 40), 40);
    rig_set_capacity(&rig, MIB(28));
    OK(rig_step(&rig, 40));
    cr_assert_eq(rig.report.micro_after, 25);
}

/* ---- a list of sizes ---- */

Test(step_limits, only_sizes_of_the_list_are_used_in_any_order)
{
    OPEN(rig, rig, MIB(64), &OPTIONS(.micro_allowed = {64, 10, 6, 10}, .grow_after = 1));
    cr_assert_eq(rebatch_get_micro(rig.rb, 70), 64);
    build_wall(&rig, 8);
    OK(rig_step(&rig, 70));
    cr_assert_str_eq(rig_events(&rig), "SHRINK(64->10) SHRINK(10->6) STEP");
    rig.script.fault_count = 0;
    static const size_t expected[] = {10, 64, 64};
    for (size_t i = 0; i < 3; i++) {
        OK(rig_step(&rig, 70));
        cr_assert_eq(rebatch_get_micro(rig.rb, 70), expected[i]);
    }
}

Test(step_limits, list_multiple_smallest_and_largest_hold_together)
{
    OPEN(rig, rig, MIB(64),
         &OPTIONS(.micro_allowed = {4, 6, 12, 15, 24, 36}, .grow_after = 1, .micro_multiple_of = 12,
                  .micro_smallest = 13, .micro_largest = 30));
    cr_assert_eq(rebatch_get_micro(rig.rb, 50), 24);
    STEP(&rig, 50, REBATCH_OK, "z f0+24 f24+24 f48+2 u");
    build_wall(&rig, 10);
    STEP(&rig, 50, REBATCH_E_EXHAUSTED, "z f0+24!");
}

static void refuse(const rebatch_options *options, const char *sentence)
{
    rebatch_device *device;
    rebatch *rb;
    OK(rebatch_device_open_host(&device, MIB(1), NULL));
    cr_assert_eq(rebatch_open(&rb, device, options), REBATCH_E_INVALID, "expected: %s", sentence);
    cr_assert_null(rb);
    cr_assert_str_eq(rebatch_last_error(), sentence);
    rebatch_device_close(device);
}

Test(step_limits, a_list_of_one_size_leaves_no_other)
{
    for (int learns = 0; learns < 2; learns++) { /* begins with the smallest that is allowed */
        OPEN(rig, rig, MIB(64),
             &OPTIONS(.micro_allowed = {12}, .grow_after = 1,
                      .learn = learns ? REBATCH_ON : REBATCH_OFF));
        cr_assert_eq(rebatch_get_micro(rig.rb, 64), 12);
        STEP(&rig, 30, REBATCH_OK, "z f0+12 f12+12 f24+6 u");
        build_wall(&rig, 11);
        STEP(&rig, 30, REBATCH_E_EXHAUSTED, "z f0+12!");
    }
    refuse(&OPTIONS(.micro_allowed = {12}, .micro_start = 24),
           "micro_start is 24: expected a size of micro_allowed");
}

/* ---- all of it, by chance ---- */

static rebatch_options random_limits(uint64_t *random)
{
    rebatch_options o = REBATCH_OPTIONS_INIT;
    o.micro_multiple_of = below(random, 9);
    o.on_oom = below(random, 2) ? REBATCH_ON_OOM_FIT : REBATCH_ON_OOM_HALVE;
    o.grow_after = 1 + (uint32_t)below(random, 3);
    if (below(random, 2))
        o.micro_smallest = 1 + below(random, 10);
    if (below(random, 2))
        o.micro_largest = 20 + below(random, 40);
    if (below(random, 2))
        for (size_t i = below(random, REBATCH_ALLOWED_SIZES); i-- > 0;)
            o.micro_allowed[i] = 1 + below(random, 64);
    return o;
}

/* rig_step() checks that each micro-batch is allowed, and that every sample counts once. */
Test(step_limits, every_cut_honours_the_limits_under_random_ooms)
{
    uint64_t random = 11;
    unsigned shrunk = 0;
    unsigned grown = 0;
    for (unsigned session = 0; session < 200;) {
        const rebatch_options options = random_limits(&random);
        rebatch_device *device;
        rebatch *rb;
        OK(rebatch_device_open_host(&device, MIB(1), NULL));
        const bool possible = rebatch_open(&rb, device, &options) == REBATCH_OK;
        rebatch_close(rb);
        rebatch_device_close(device);
        if (!possible)
            continue;
        session++;
        OPEN(rig, rig, MIB(24), &options);
        rig.script.sample_bytes = KIB(128);
        for (int i = 0; i < 20; i++) {
            rig_set_capacity(&rig, MIB(1) + below(&random, MIB(12)));
            const rebatch_status status = rig_step(&rig, 64 + below(&random, 66));
            cr_assert(status == REBATCH_OK || status == REBATCH_E_EXHAUSTED, "%s",
                      rebatch_last_error());
            shrunk += rig_event(&rig, REBATCH_EVENT_SHRINK) != NULL;
            grown += rig_event(&rig, REBATCH_EVENT_GROW) != NULL;
        }
    }
    cr_assert_gt(shrunk, 500);
    cr_assert_gt(grown, 500);
}

/* ---- OOMs in a row ---- */

static void open_in_row(struct rig *rig, uint32_t most)
{
    rig_open(rig, MIB(64), &OPTIONS(.max_ooms_in_row = most, .growth = REBATCH_OFF));
}

Test(step_limits, too_many_ooms_in_a_row_end_the_step)
{
    OPEN_WITH(open_in_row, rig, rig, 3);
    build_wall(&rig, 1);
    cr_assert_eq(rig_step(&rig, 64), REBATCH_E_EXHAUSTED);
    cr_assert_eq(rig.report.ooms, 3);
    SAYS("gave up after 3 in a row: raise max_ooms_in_row");
    cr_assert_eq(rig_step(&rig, 64), REBATCH_E_EXHAUSTED, "each step counts anew");
    cr_assert_eq(rig.report.ooms, 3);
}

Test(step_limits, a_microbatch_that_succeeds_ends_the_row)
{
    OPEN_WITH(open_in_row, rig, rig, 2);
    for (uint32_t nth = 1; nth <= 7; nth += 2)
        script_fail(&rig.script, SCRIPT_FORWARD, nth, SCRIPT_BEFORE, SCRIPT_RETURN);
    OK(rig_step(&rig, 64));
    cr_assert_eq(rig.report.ooms, 4);
}

/* zero_grad succeeds between an OOM while accumulating and the next; that ends no row. */
Test(step_limits, zero_grad_alone_ends_no_row)
{
    OPEN_WITH(open_in_row, rig, rig, 2);
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_WHILE, SCRIPT_RETURN)->times = 2;
    cr_assert_eq(rig_step(&rig, 64), REBATCH_E_EXHAUSTED);
    cr_assert_eq(rig.report.ooms, 2);
}

/* ---- what cannot be ---- */

Test(step_limits, a_multiple_or_a_list_above_the_batch_is_refused_at_once)
{
    struct rig rig;
    rebatch_step_report report;
    rig_open(&rig, MIB(64), &OPTIONS(.micro_multiple_of = 8, .grow_after = 1));
    FAILS_WITH(
        rebatch_step(rig.rb, &rig.ops, 7, &rig.script, &report), REBATCH_E_INVALID,
        "batch is 7 and micro_multiple_of is 8: expected at least one multiple in the batch");
    cr_assert_eq(rig.script.call_count, 0);
    OK(rig_step(&rig, 8));
    rig_close(&rig);

    rig_open(&rig, MIB(64), &OPTIONS(.micro_allowed = {32, 16}, .grow_after = 1));
    FAILS_WITH(rebatch_step(rig.rb, &rig.ops, 15, &rig.script, &report), REBATCH_E_INVALID,
               "batch is 15 and the smallest of micro_allowed is 16: expected an allowed size in "
               "the batch");
    cr_assert_eq(rebatch_probe(rig.rb, &rig.ops, 15, &rig.script, NULL, NULL), REBATCH_E_INVALID);
    cr_assert_eq(rig.script.call_count, 0);
    rig_close(&rig);
}

Test(step_limits, limits_that_cannot_hold_together_are_refused)
{
    refuse(&OPTIONS(.micro_multiple_of = 8, .micro_largest = 7),
           "micro_multiple_of is 8: expected a multiple of it from micro_smallest, 1, to "
           "micro_largest, 7");
    refuse(&OPTIONS(.micro_multiple_of = 8, .micro_smallest = 9, .micro_largest = 15),
           "micro_multiple_of is 8: expected a multiple of it from micro_smallest, 9, to "
           "micro_largest, 15");
    refuse(&OPTIONS(.micro_multiple_of = 8, .micro_start = 12),
           "micro_start is 12: expected a multiple of micro_multiple_of, 8");
    refuse(&OPTIONS(.micro_allowed = {8, 16}, .micro_start = 12),
           "micro_start is 12: expected a size of micro_allowed");
    refuse(&OPTIONS(.micro_allowed = {8, 16}, .micro_multiple_of = 3),
           "micro_allowed has no multiple of micro_multiple_of, 3, from micro_smallest, 1, on: "
           "expected one");
    refuse(&OPTIONS(.micro_allowed = {8, 16}, .micro_smallest = 17),
           "micro_allowed has no multiple of micro_multiple_of, 1, from micro_smallest, 17, on: "
           "expected one");
    refuse(&OPTIONS(.micro_allowed = {8, 0, 16}),
           "micro_allowed[2] is 16, after a 0 that ends the list");
    refuse(&OPTIONS(.max_ooms_in_row = 65537), "max_ooms_in_row is 65537: expected at most 65536");
    refuse(
        &OPTIONS(.micro_multiple_of = SIZE_MAX, .micro_smallest = 2, .micro_largest = SIZE_MAX - 1),
        "micro_multiple_of is 18446744073709551615: expected a multiple of it from "
        "micro_smallest, 2, to micro_largest, 18446744073709551614");
}

/* ---- the last micro-batch ---- */

/* Cuts of a batch whose micro-batches have at most `largest` samples. */
struct cut {
    size_t smallest, multiple, allowed[2], largest, batch;
    const char *trace;
};

static void expect_cuts(const struct cut *cuts, size_t count)
{
    for (const struct cut *c = cuts; c < cuts + count; c++) {
        OPEN(rig, rig, MIB(64),
             &OPTIONS(.micro_smallest = c->smallest, .micro_multiple_of = c->multiple,
                      .micro_allowed = {c->allowed[0], c->allowed[1]}, .micro_largest = c->largest,
                      .growth = REBATCH_OFF));
        STEP(&rig, c->batch, REBATCH_OK, c->trace);
    }
}
#define EXPECT_CUTS(cuts) expect_cuts(cuts, sizeof(cuts) / sizeof *(cuts))

Test(step_limits, a_rest_below_the_smallest_size_makes_all_micro_batches_smaller)
{
    static const struct cut cuts[] = {
        {0, 0, {0}, 16, 33, "z f0+16 f16+16 f32+1 u"},
        {2, 0, {0}, 16, 33, "z f0+11 f11+11 f22+11 u"},
        {2, 0, {0}, 16, 34, "z f0+16 f16+16 f32+2 u"},
        {2, 0, {0}, 2, 3, "z f0+2 f2+1 u"}, /* no other cut exists */
        {2, 0, {0}, 2, 1, "z f0+1 u"},
        {8, 0, {0}, 16, 35, "z f0+12 f12+12 f24+11 u"},
        {8, 4, {0}, 16, 36, "z f0+12 f12+12 f24+12 u"},
        {8, 4, {0}, 16, 33, "z f0+12 f12+12 f24+9 u"}, /* 33 is no multiple of 4 */
    };
    EXPECT_CUTS(cuts);
}

Test(step_limits, a_rest_that_is_not_in_the_list_makes_all_micro_batches_smaller)
{
    static const struct cut cuts[] = {
        {0, 0, {33, 11}, 32, 33, "z f0+11 f11+11 f22+11 u"},
        {0, 0, {16, 12}, 16, 36, "z f0+12 f12+12 f24+12 u"},
        {0, 0, {16, 12}, 16, 33, "z f0+16 f16+16 f32+1 u"}, /* no cut is of these sizes */
    };
    EXPECT_CUTS(cuts);
}

/* Where one size does not do, the last samples are cut again. */
Test(step_limits, a_rest_that_is_not_in_the_list_is_cut_into_sizes_of_it)
{
    static const struct cut cuts[] = {
        {0, 0, {2, 7}, 7, 17, "z f0+7 f7+2 f9+2 f11+2 f13+2 f15+2 u"},
        {0, 0, {4, 15}, 15, 39, "z f0+15 f15+4 f19+4 f23+4 f27+4 f31+4 f35+4 u"},
    };
    EXPECT_CUTS(cuts);
}

/* After an OOM what is left is cut anew. */
Test(step_limits, no_last_micro_batch_is_below_the_smallest_size_after_an_oom)
{
    for (size_t smallest = 2; smallest <= 5; smallest++) {
        for (size_t batch = 40; batch <= 80; batch++) {
            OPEN(rig, rig, MIB(64), &OPTIONS(.micro_smallest = smallest, .micro_start = 16));
            script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_BEFORE, SCRIPT_POOL);
            OK(rig_step(&rig, batch));
            cr_assert_eq(rig.report.ooms, 1);
            for (size_t i = 0; i < rig.script.call_count; i++)
                cr_assert(rig.script.calls[i].callback != SCRIPT_FORWARD ||
                              rig.script.calls[i].count >= smallest,
                          "smallest %zu: %s", smallest, script_trace(&rig.script));
        }
    }
}
