/* Owns the tests of what a probe leaves behind, of what it refuses, and of what recovery does with
 * what was learned. Must not know more of the library than its public headers say. */
#include "probe_common.h"

Test(probe_state, accumulators_are_zero_and_nothing_was_updated)
{
    OPEN_WITH(bed_open_typical, bed, bed, MIB(12), NULL);
    OK(bed_probe(&bed, 64, NULL));
    cr_assert_eq(bed.load.accumulated, 0);
    cr_assert_eq(bed.load.zeroed, 2);
    cr_assert_eq(bed.load.updated, 0);
    cr_assert_eq(bed.load.probing, bed.load.ran);
    rebatch_step_report report;
    OK(rebatch_step(bed.rb, &bed.ops, 64, &bed.load, &report));
    cr_assert_eq(report.step, 0);
    cr_assert_eq(bed.load.probing + report.attempts, bed.load.ran);
}

Test(probe_state, guarded_state_is_restored)
{
    OPEN_WITH(bed_open_typical, bed, bed, MIB(12), NULL);
    bed.load.random = 42;
    OK(rebatch_guard(bed.rb, &bed.load.random, sizeof bed.load.random, REBATCH_GUARD_HOST));
    OK(bed_probe(&bed, 64, NULL));
    cr_assert_eq(bed.load.random, 42);
}

/* A pointer in guarded state is NULL again after each trial, so each makes the buffer anew: only
 * one may be there at a time, and none at the end. */
Test(probe_state, a_buffer_made_once_whose_pointer_is_guarded_does_not_leak)
{
    OPEN_WITH(bed_open_typical, bed, bed, MIB(12), NULL);
    const size_t largest = true_largest(&bed, MIB(12), NULL, 64);
    OK(rebatch_guard(bed.rb, bed.load.lazy, sizeof bed.load.lazy, REBATCH_GUARD_HOST));
    OK(bed_probe(&bed, 64, NULL));
    cr_assert_geq(bed.report.microbatches, 3);
    cr_assert_eq(bed.report.size, largest);
    cr_assert_eq(bed_live_bytes(&bed), 0);
    for (size_t i = 0; i < LOAD_ITEMS; i++)
        cr_assert_null(bed.load.lazy[i]);
    rebatch_step_report report;
    for (int i = 0; i < 2; i++)
        OK(rebatch_step(bed.rb, &bed.ops, 64, &bed.load, &report));
    cr_assert_eq(report.ooms, 0);
    cr_assert_eq(report.micro_after, largest);
    cr_assert_eq(bed_live_bytes(&bed), MIB(1));
}

Test(probe_state, an_oom_in_a_trial_leaves_nothing)
{
    OPEN_WITH(bed_open_typical, bed, bed, MIB(12), NULL);
    bed.load.answer = REBATCH_OOM;
    bed.load.answer_at = 3;
    bed.load.random = 7;
    OK(rebatch_guard(bed.rb, &bed.load.random, sizeof bed.load.random, REBATCH_GUARD_HOST));
    OK(bed_probe(&bed, 64, NULL));
    cr_assert_eq(bed.report.ooms, 1);
    cr_assert_eq(bed_live_bytes(&bed), MIB(1), "only what is made at first use stays");
    cr_assert_eq(bed.load.random, 7);
    cr_assert_eq(bed.load.accumulated, 0);
}

Test(probe_state, a_status_of_the_callback_is_passed_through)
{
    const rebatch_status own = (rebatch_status)(REBATCH_E_USER + 3);
    OPEN_WITH(bed_open_typical, bed, bed, MIB(12), NULL);
    bed.load.answer = own;
    bed.load.answer_at = 2;
    const size_t micro = rebatch_get_micro(bed.rb, 64);
    cr_assert_eq(bed_probe(&bed, 64, NULL), own);
    cr_assert_eq(bed.report.status, own);
    cr_assert_eq(bed.report.size, 0);
    cr_assert_eq(rebatch_get_micro(bed.rb, 64), micro);
    bed.load.answer_at = 0;
    OK(bed_probe(&bed, 64, NULL));
}

static rebatch_status probe_inside(const rebatch_microbatch *mb, void *user)
{
    struct bed *bed = user;
    (void)mb;
    return rebatch_probe(bed->rb, &bed->ops, 8, bed, NULL, NULL);
}

Test(probe_state, it_is_refused_within_a_callback)
{
    OPEN(bed, bed, MIB(12), NULL);
    bed.ops = (rebatch_step_ops)OPS(nothing_to_do, probe_inside, nothing_to_do, .flags = 0);
    FAILS(rebatch_step(bed.rb, &bed.ops, 8, &bed, NULL), REBATCH_E_STATE, "rebatch_probe()");
}

Test(probe_state, bad_arguments_are_refused)
{
    rebatch_probe_report report;
    rebatch_probe_options options = REBATCH_PROBE_OPTIONS_INIT;
    OPEN_WITH(bed_open_typical, bed, bed, MIB(12), NULL);
    cr_assert_eq(rebatch_probe(NULL, &bed.ops, 8, &bed.load, NULL, &report), REBATCH_E_INVALID);
    cr_assert_eq(report.status, REBATCH_E_INVALID);
    cr_assert_eq(rebatch_probe(bed.rb, NULL, 8, &bed.load, NULL, NULL), REBATCH_E_INVALID);
    cr_assert_eq(bed_probe(&bed, 0, NULL), REBATCH_E_INVALID);
    options.choose = (rebatch_probe_choice)7;
    FAILS(bed_probe(&bed, 8, &options), REBATCH_E_INVALID, "REBATCH_PROBE_FASTEST");
    options.choose = REBATCH_PROBE_LARGEST;
    options.struct_size = 3;
    cr_assert_eq(bed_probe(&bed, 8, &options), REBATCH_E_INVALID);
    cr_assert_eq(bed.load.zeroed, 0);
    cr_assert_str_eq(rebatch_confidence_text((rebatch_confidence)99), "no such confidence");
}

/* ---- on_oom = fit ---- */

static void expect_fit(rebatch_on_oom on_oom)
{
    rebatch_step_report report;
    OPEN_WITH(bed_open_typical, bed, bed, MIB(16), &OPTIONS(.on_oom = on_oom));
    OK(bed_probe(&bed, 64, NULL));
    OK(rebatch_pool_trim(rebatch_get_pool(bed.rb), 0, NULL));
    OK(rebatch_device_set_capacity(bed.device, MIB(12)));
    OK(rebatch_step(bed.rb, &bed.ops, 64, &bed.load, &report));
    if (on_oom == REBATCH_ON_OOM_HALVE)
        cr_assert_eq(report.micro_after, bed.report.size / 2);
    else
        cr_assert_gt(report.micro_after, bed.report.size / 2 + 2);
    cr_assert_lt(report.micro_after, bed.report.size);
}

Test(probe_state, fit_goes_to_the_largest_that_the_model_says_fits)
{
    expect_fit(REBATCH_ON_OOM_FIT);
}

Test(probe_state, with_a_model_fit_is_the_default)
{
    expect_fit(REBATCH_ON_OOM_DEFAULT);
    expect_fit(REBATCH_ON_OOM_HALVE);
}

/* ---- growth by prediction ---- */

static void take_room(struct bed *bed, size_t capacity_bytes)
{
    OK(rebatch_pool_trim(rebatch_get_pool(bed->rb), 0, NULL));
    OK(rebatch_device_set_capacity(bed->device, capacity_bytes));
}

Test(probe_state, growth_goes_at_once_to_the_largest_that_the_model_says_fits)
{
    rebatch_step_report report;
    OPEN_WITH(bed_open_typical, bed, bed, MIB(16),
              &OPTIONS(.on_oom = REBATCH_ON_OOM_FIT, .grow_after = 3));
    OK(bed_probe(&bed, 64, NULL));
    cr_assert(bed.report.size > 20 && bed.report.size < 64);
    take_room(&bed, MIB(4));
    OK(rebatch_step(bed.rb, &bed.ops, 64, &bed.load, &report));
    cr_assert_lt(report.micro_after, bed.report.size / 3);
    const size_t small = report.micro_after;
    take_room(&bed, MIB(16));
    for (int i = 0; i < 3; i++) {
        cr_assert_eq(rebatch_get_micro(bed.rb, 64), small);
        OK(rebatch_step(bed.rb, &bed.ops, 64, &bed.load, &report));
        cr_assert_eq(report.ooms, 0);
    }
    cr_assert_eq(rebatch_get_micro(bed.rb, 64), bed.report.size, "grown to %zu of %zu",
                 rebatch_get_micro(bed.rb, 64), bed.report.size);
    for (int i = 0; i < 10; i++) {
        OK(rebatch_step(bed.rb, &bed.ops, 64, &bed.load, &report));
        cr_assert_eq(report.ooms, 0);
        cr_assert_eq(report.micro_after, bed.report.size, "there is room for no more");
    }
}

/* The model is wrong by what the callback takes beside the pool: after each failure it goes halfway
 * to what failed, and waits twice as long. */
Test(probe_state, a_predicted_growth_that_fails_goes_halfway_next_time)
{
    rebatch_step_report report;
    OPEN_WITH(bed_open_typical, bed, bed, MIB(16),
              &OPTIONS(.on_oom = REBATCH_ON_OOM_FIT, .grow_after = 2));
    OK(bed_probe(&bed, 64, NULL));
    const size_t found = bed.report.size;
    take_room(&bed, MIB(4));
    OK(rebatch_step(bed.rb, &bed.ops, 64, &bed.load, &report));
    const size_t small = report.micro_after;
    take_room(&bed, MIB(16));
    bed.load.wall = found - 3; /* from here on larger ones fail */
    uint32_t failed = 0;
    for (int i = 0; i < 200; i++) {
        OK(rebatch_step(bed.rb, &bed.ops, 64, &bed.load, &report));
        failed += report.ooms > 0;
    }
    cr_assert_gt(failed, 0);
    cr_assert_leq(failed, 6, "%u growths failed", failed);
    cr_assert_gt(rebatch_get_micro(bed.rb, 64), small);
}

/* What is left would do for the bytes of one sample more, and not for its pieces. */
Test(probe_state, growth_asks_what_a_prediction_says)
{
    static const struct load_item items[] = {
        {.each = 8192}, {.each = 4096}, {.each = 16640, .is_late = true}};
    unsigned refused = 0;
    for (size_t kib = 192; kib <= 2048; kib += 64) {
        OPEN(bed, bed, kib << 10, &OPTIONS(.grow_after = 1));
        memcpy(bed.load.items, items, sizeof items);
        bed.load.item_count = sizeof items / sizeof *items;
        bed.load.moments_bytes = 16640;
        void *weights[2];
        for (size_t i = 0; i < 2; i++)
            OK(rebatch_pool_alloc(&weights[i], rebatch_get_pool(bed.rb), 16640 + 8 * i, NULL, 0));
        OK(bed_probe(&bed, 96, &PROBE(.reserve_bytes = 16640)));
        for (int i = 0; i < 8; i++) {
            rebatch_prediction next;
            rebatch_step_report report;
            OK(rebatch_step(bed.rb, &bed.ops, 96, &bed.load, &report));
            cr_assert_eq(report.ooms, 0, "step %d of %zu KiB: %zu samples, found were %zu", i, kib,
                         report.micro_before, bed.report.size);
            OK(rebatch_predict(&next, bed.rb, report.micro_after + 1, 96, NULL));
            refused += !next.fits;
        }
        cr_assert_geq(rebatch_get_micro(bed.rb, 96), bed.report.size);
    }
    cr_assert_gt(refused, 0);
}

/* A prediction that is wrong by little costs little; after two the next is half. */
Test(probe_state, fit_goes_a_little_lower_once_and_then_halves)
{
    size_t predicted = 0;
    for (size_t off = 0; off <= 20; off += off ? 19 : 1) {
        rebatch_step_report report;
        OPEN_WITH(bed_open_typical, bed, bed, MIB(24), &OPTIONS(.on_oom = REBATCH_ON_OOM_FIT));
        OK(bed_probe(&bed, 64, NULL));
        take_room(&bed, MIB(16));
        bed.load.wall = off ? predicted - off : 0;
        OK(rebatch_step(bed.rb, &bed.ops, 64, &bed.load, &report));
        if (off == 0)
            predicted = report.micro_after;
        const size_t lower = predicted - (predicted / 16 > 1 ? predicted / 16 : 1);
        const size_t expected = off == 0 ? predicted : off == 1 ? lower : lower / 2;
        cr_assert_eq(report.micro_after, expected, "%zu instead of %zu of %zu", report.micro_after,
                     expected, predicted);
        cr_assert_gt(predicted, 40);
    }
}

Test(probe_state, fit_halves_where_nothing_is_known)
{
    rebatch_step_report report;
    OPEN_WITH(bed_open_typical, bed, bed, MIB(16), &OPTIONS(.on_oom = REBATCH_ON_OOM_FIT));
    OK(rebatch_step(bed.rb, &bed.ops, 64, &bed.load, &report));
    cr_assert_eq(report.micro_after, 32);
}

Test(probe_state, an_on_oom_that_is_none_is_refused)
{
    rebatch_device *device;
    rebatch *rb;
    OK(rebatch_device_open_host(&device, MIB(1), NULL));
    cr_assert_eq(
        rebatch_open(&rb, device, &OPTIONS(.on_oom = (rebatch_on_oom)(REBATCH_ON_OOM_FIT + 1))),
        REBATCH_E_INVALID);
    rebatch_device_close(device);
}
