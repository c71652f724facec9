/* Owns the tests of bad input to the step's calls: each is refused, said in a sentence, and changes
 * nothing.
 * Must not know more of the library than its public headers say. */
#include <stddef.h>

#include "step_common.h"

/* ---- rebatch_open() ---- */

static void refuse_options(const rebatch_options *options, const char *part, const char *other)
{
    rebatch_device *device;
    OK(rebatch_device_open_host(&device, MIB(64), NULL));
    rebatch *rb = (rebatch *)&device; /* anything but NULL */
    rebatch_clear_error();
    cr_assert_eq(rebatch_open(&rb, device, options), REBATCH_E_INVALID, "expected: %s", part);
    cr_assert_null(rb);
    SAYS(part);
    SAYS(other);
    cr_assert_eq(used_bytes_of(device), 0);
    rebatch_device_close(device);
}

Test(step_invalid, open_refuses_null)
{
    rebatch_device *device;
    OK(rebatch_device_open_host(&device, MIB(64), NULL));
    rebatch *rb = (rebatch *)&device;
    rebatch_clear_error();
    FAILS(rebatch_open(NULL, device, NULL), REBATCH_E_INVALID, "out");
    FAILS(rebatch_open(&rb, NULL, NULL), REBATCH_E_INVALID, "device");
    cr_assert_null(rb);
    rebatch_device_close(device);
}

Test(step_invalid, open_takes_null_options_as_defaults)
{
    rebatch_device *device;
    rebatch *rb;
    open_on_host(&device, &rb, MIB(64), NULL);
    cr_assert_eq(rebatch_get_micro(rb, 64), 64);
    rebatch_close(rb);
    rebatch_device_close(device);
}

Test(step_invalid, open_refuses_a_struct_size_that_is_none)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.struct_size = 0;
    refuse_options(&options, "struct_size", "0");
    options.struct_size = sizeof(size_t) - 1;
    refuse_options(&options, "struct_size", "7");
    options.struct_size = sizeof(rebatch_options *); /* of the pointer: all would be ignored */
    refuse_options(&options, "rebatch_options.struct_size is 8", "_INIT");
    options.struct_size = offsetof(rebatch_options, learn);
    refuse_options(&options, "struct_size", "at least");
    options.struct_size = (size_t)1 << 40;
    refuse_options(&options, "struct_size is 1099511627776", "at most");
}

Test(step_invalid, open_refuses_a_newer_struct_that_uses_what_is_new)
{
    struct {
        rebatch_options options;
        uint64_t added;
    } newer = {REBATCH_OPTIONS_INIT, 0};
    newer.options.struct_size = sizeof newer;
    rebatch_device *device;
    rebatch *rb;
    OK(rebatch_device_open_host(&device, MIB(64), NULL));
    cr_assert_eq(rebatch_open(&rb, device, &newer.options), REBATCH_OK, "its tail is zero: %s",
                 rebatch_last_error());
    rebatch_close(rb);
    rebatch_device_close(device);
    newer.added = 1;
    refuse_options(&newer.options, "rebatch_options", "zero");
}

Test(step_invalid, open_takes_pool_options_without_a_size_as_defaults)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.pool = (rebatch_pool_options){0};
    rebatch_device *device;
    rebatch *rb;
    open_on_host(&device, &rb, MIB(64), &options);
    rebatch_close(rb);
    rebatch_device_close(device);
}

Test(step_invalid, open_refuses_bad_pool_options)
{
    refuse_options(&OPTIONS(.pool.limit_permille = 1001), "limit_permille", "1001");
    refuse_options(&OPTIONS(.pool.caching = (rebatch_toggle)3), "caching", "3");
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.pool.struct_size = 3;
    refuse_options(&options, "struct_size", "3");
}

Test(step_invalid, open_refuses_sizes_that_contradict_each_other)
{
    refuse_options(&OPTIONS(.micro_smallest = 17, .micro_largest = 13), "17", "13");
    refuse_options(&OPTIONS(.micro_start = 5, .micro_smallest = 6), "5", "6");
    refuse_options(&OPTIONS(.micro_start = 15, .micro_largest = 14), "15", "14");
}

Test(step_invalid, open_refuses_switches_and_choices_that_do_not_exist)
{
    refuse_options(&OPTIONS(.admission = (rebatch_toggle)3), "admission", "3");
    refuse_options(&OPTIONS(.lighten = (rebatch_toggle)77), "lighten", "77");
    refuse_options(&OPTIONS(.growth = (rebatch_toggle)-1), "growth", "-1");
    refuse_options(&OPTIONS(.on_oom = (rebatch_on_oom)9), "on_oom", "9");
    refuse_options(&OPTIONS(.log_level = (rebatch_log_level)6), "log_level", "6");
}

Test(step_invalid, open_refuses_a_wait_that_is_longer_than_the_longest)
{
    refuse_options(&OPTIONS(.grow_after = 20, .grow_wait_max = 10), "20", "10");
}

Test(step_invalid, open_refuses_a_stream_of_another_device)
{
    rebatch_device *other;
    rebatch_options options = REBATCH_OPTIONS_INIT;
    OK(rebatch_device_open_host(&other, MIB(64), NULL));
    OK(rebatch_stream_create(&options.stream, other));
    refuse_options(&options, "stream", "");
    rebatch_stream_destroy(other, options.stream);
    rebatch_device_close(other);
}

/* ---- rebatch_step() ---- */

static void refuse_step(struct rig *rig, const rebatch_step_ops *ops, size_t batch,
                        const char *part)
{
    rig->script.call_count = 0;
    rebatch_clear_error();
    rebatch_step_report report;
    memset(&report, 0xff, sizeof report);
    cr_assert_eq(rebatch_step(rig->rb, ops, batch, &rig->script, &report), REBATCH_E_INVALID);
    SAYS(part);
    cr_assert_eq(report.status, REBATCH_E_INVALID);
    cr_assert_eq(report.attempts, 0);
    cr_assert_eq(report.ooms, 0);
    cr_assert_eq(rig->script.call_count, 0, "a callback ran");
}

Test(step_invalid, step_refuses_null_and_an_empty_batch)
{
    OPEN(rig, rig, MIB(64), NULL);
    rebatch_clear_error();
    FAILS(rebatch_step(NULL, &rig.ops, 4, NULL, NULL), REBATCH_E_INVALID, "rb");
    refuse_step(&rig, NULL, 4, "ops");
    refuse_step(&rig, &rig.ops, 0, "batch");
    OK(rig_step(&rig, 4));
}

Test(step_invalid, step_refuses_missing_callbacks_by_name)
{
    OPEN(rig, rig, MIB(64), NULL);
    rebatch_step_ops ops = rig.ops;
    ops.forward_backward = NULL;
    refuse_step(&rig, &ops, 4, "forward_backward");
    ops = rig.ops;
    ops.optimizer_step = NULL;
    refuse_step(&rig, &ops, 4, "optimizer_step");
    ops = rig.ops;
    ops.lighten = NULL; /* optional */
    rig.script.batch = 4;
    OK(rebatch_step(rig.rb, &ops, 4, &rig.script, NULL));
}

Test(step_invalid, step_refuses_a_struct_size_that_is_none)
{
    OPEN(rig, rig, MIB(64), NULL);
    rebatch_step_ops ops = rig.ops;
    ops.struct_size = 0;
    refuse_step(&rig, &ops, 4, "struct_size");
    ops.struct_size = sizeof(size_t);
    refuse_step(&rig, &ops, 4, "rebatch_step_ops.struct_size is 8: expected sizeof");
    ops.struct_size = offsetof(rebatch_step_ops, lighten);
    refuse_step(&rig, &ops, 4, "at least");
    ops.struct_size = SIZE_MAX;
    refuse_step(&rig, &ops, 4, "at most");
}

Test(step_invalid, the_macro_gives_a_table_without_callbacks)
{
    rebatch_step_ops ops = REBATCH_STEP_OPS_INIT;
    OPEN(rig, rig, MIB(64), NULL);
    refuse_step(&rig, &ops, 4, "forward_backward");
    ops.zero_grad = rig.ops.zero_grad;
    ops.forward_backward = rig.ops.forward_backward;
    ops.optimizer_step = rig.ops.optimizer_step;
    rig.script.batch = 4;
    OK(rebatch_step(rig.rb, &ops, 4, &rig.script, NULL));
}

Test(step_invalid, step_takes_a_newer_struct_whose_tail_is_zero_and_refuses_any_other)
{
    struct {
        rebatch_step_ops ops;
        void *added;
    } newer;
    OPEN(rig, rig, MIB(64), NULL);
    memset(&newer, 0, sizeof newer);
    newer.ops = rig.ops;
    newer.ops.struct_size = sizeof newer;
    rig.script.batch = 4;
    cr_assert_eq(rebatch_step(rig.rb, &newer.ops, 4, &rig.script, NULL), REBATCH_OK,
                 "its tail is zero: %s", rebatch_last_error());
    newer.added = &rig;
    refuse_step(&rig, &newer.ops, 4, "rebatch_step_ops");
}

Test(step_invalid, step_refuses_flags_that_it_does_not_know)
{
    OPEN(rig, rig, MIB(64), NULL);
    rebatch_step_ops ops = rig.ops;
    ops.flags = 0x10;
    refuse_step(&rig, &ops, 4, "flags");
}

/* ---- the small ones ---- */

Test(step_invalid, the_small_calls_take_null)
{
    rebatch_close(NULL);
    rebatch_mutating(NULL);
    cr_assert_null(rebatch_get_pool(NULL));
    cr_assert_eq(rebatch_get_micro(NULL, 64), 0);
    char text[8] = "x";
    cr_assert_eq(rebatch_event_format(text, sizeof text, NULL), 0);
    cr_assert_str_eq(text, "");
}
