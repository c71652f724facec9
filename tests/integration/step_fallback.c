/* Owns the tests of the fallback: once more, smaller, lighter, and what is said when nothing is
 * left.
 * Must not know more of the library than its public headers say. */
#include <inttypes.h>
#include <stdio.h>

#include "step_common.h"

/* ---- once more ---- */

Test(step_fallback, a_passing_fault_is_tried_once_more_at_the_same_size_then_it_halves)
{
    static const struct rig_case cases[] = {
        {.what = "once more",
         .is_uncached = true,
         .sample_bytes = MIB(1),
         .device_ooms = 1,
         .batch = 16,
         .trace = "z f0+16! f0+16~1 u",
         .events = "RETRY STEP",
         .micro_after = 16},
        {.what = "once",
         .is_uncached = true,
         .sample_bytes = MIB(1),
         .device_ooms = 2,
         .batch = 16,
         .trace = "z f0+16! f0+16~1! f0+8~2 f8+8~2 u",
         .events = "RETRY SHRINK(16->8) STEP"},
        {.what = "and again at the smaller size",
         .is_uncached = true,
         .sample_bytes = MIB(1),
         .device_ooms = 3,
         .batch = 16,
         .trace = "z f0+16! f0+16~1! f0+8~2! f0+8~3 f8+8~2 u"},
        {.what = "and again after a success",
         .micro_start = 8,
         .sample_bytes = MIB(1), /* cached by each success, released by each OOM */
         .faults = {{.callback = SCRIPT_FORWARD, .nth = 2}, {.callback = SCRIPT_FORWARD, .nth = 4}},
         .batch = 24,
         .trace = "z f0+8 f8+8! f8+8~1 f16+8! f16+8~1 u"},
        {.what = "an OOM beside the pool, when the cache was released",
         .micro_start = 8,
         .sample_bytes = MIB(1),
         .faults = {{.callback = SCRIPT_FORWARD, .nth = 2}},
         .batch = 16,
         .trace = "z f0+8 f8+8! f8+8~1 u",
         .events = "RETRY STEP"},
        {.what = "not what could not fit",
         .capacity_bytes = MIB(6),
         .sample_bytes = MIB(1),
         .batch = 64,
         .trace = "z f0+64! f0+32~1! f0+16~2! f0+8~3! f0+4~4 f4+4~4 f8+4~3 f12+4~3 f16+4~2 "
                  "f20+4~2 f24+4~2 f28+4~2 f32+4~1 f36+4~1 f40+4~1 f44+4~1 f48+4~1 f52+4~1 "
                  "f56+4~1 f60+4~1 u",
         .events = "SHRINK(64->32) SHRINK(32->16) SHRINK(16->8) SHRINK(8->4) STEP"},
    };
    RIG_RUN_CASES(cases);
}

Test(step_fallback, once_more_is_possible_again_in_the_next_step)
{
    OPEN(rig, rig, MIB(64), &OPTIONS(.growth = REBATCH_OFF, .pool.caching = REBATCH_OFF));
    rig.script.sample_bytes = MIB(1);
    rig_fail_device(&rig, REBATCH_FAULT_ALLOC, 1, REBATCH_OOM);
    script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_BEFORE, SCRIPT_OWN);
    STEP(&rig, 8, SCRIPT_STATUS, "z f0+8! f0+8~1!");
    rig.script.fault_count = 0;
    rig_fail_device(&rig, REBATCH_FAULT_ALLOC, 1, REBATCH_OOM);
    STEP(&rig, 8, REBATCH_OK, "z f0+8! f0+8~1 u");
}

Test(step_fallback, a_limit_or_headroom_of_the_pool_is_as_good_as_a_cap)
{
    static const rebatch_pool_options limits[] = {
        {.limit_bytes = MIB(6)},
        {.limit_permille = 94}, /* of 64 MiB: a little more than 6 */
        {.headroom_bytes = MIB(58)},
    };
    for (size_t i = 0; i < 3; i++) {
        rebatch_options options = OPTIONS(.growth = REBATCH_OFF);
        options.pool = limits[i];
        options.pool.struct_size = sizeof options.pool;
        OPEN(rig, rig, MIB(64), &options);
        rig.script.sample_bytes = MIB(1);
        cr_assert_eq(rig_step(&rig, 16), REBATCH_OK, "case %zu: %s", i, rebatch_last_error());
        cr_assert_eq(rebatch_get_micro(rig.rb, 16), 4);
        cr_assert_leq(rig_used_bytes(&rig), MIB(6) + KIB(64));
    }
}

/* Memory that is there, but cached in pieces of the wrong size. */
Test(step_fallback, fragmentation_of_the_cache_never_exhausts_a_step_that_fits_empty)
{
    OPEN(rig, rig, MIB(6), &OPTIONS(.growth = REBATCH_OFF, .admission = REBATCH_OFF));
    rig.script.sample_bytes = KIB(512);
    rig.script.late_bytes = MIB(2) + KIB(512);
    rig.script.reserves = true;
    for (int i = 0; i < 20; i++) {
        rig_set_capacity(&rig, MIB(i % 2 ? 4 : 6));
        cr_assert_eq(rig_step(&rig, 9), REBATCH_OK, "step %d: %s: %s", i, rebatch_last_error(),
                     script_trace(&rig.script));
    }
}

/* ---- smaller ---- */

Test(step_fallback, the_smaller_size_is_kept_for_the_following_steps)
{
    OPEN(rig, rig, MIB(6), &OPTIONS(.growth = REBATCH_OFF));
    rig.script.sample_bytes = MIB(1);
    OK(rig_step(&rig, 16));
    cr_assert_eq(rig.report.micro_before, 16);
    cr_assert_eq(rig.report.micro_after, 4);
    for (int i = 0; i < 40; i++) {
        STEP(&rig, 16, REBATCH_OK, "z f0+4 f4+4 f8+4 f12+4 u");
    }
}

Test(step_fallback, where_nothing_smaller_is_allowed_it_ends_and_names_the_option)
{
    static const struct rig_case cases[] = {
        {.what = "at the first OOM",
         .on_oom = REBATCH_ON_OOM_STOP,
         .capacity_bytes = MIB(6),
         .sample_bytes = MIB(1),
         .lighten_levels = 3,
         .batch = 16,
         .status = REBATCH_E_EXHAUSTED,
         .trace = "z f0+16!",
         .events = "EXHAUSTED",
         .error = "on_oom",
         .micro_after = 16},
        {.what = "at micro_smallest",
         .micro_smallest = 4,
         .capacity_bytes = MIB(3),
         .sample_bytes = MIB(1),
         .batch = 16,
         .status = REBATCH_E_EXHAUSTED,
         .trace = "z f0+16! f0+8~1! f0+4~2!",
         .error = "the smallest micro-batch allowed is 4"},
    };
    RIG_RUN_CASES(cases);
}

/* ---- lighter ---- */

Test(step_fallback, at_the_smallest_size_it_lightens_level_by_level)
{
    static const struct rig_case cases[] = {
        {.what = "to the first level that fits, which stays",
         .capacity_bytes = MIB(3),
         .sample_bytes = MIB(8),
         .lighten_levels = 3,
         .batch = 2,
         .trace = "z f0+2! f0+1~1! l1 f0+1~2! l2 f0+1~3 f1+1~1 u",
         .events = "SHRINK(2->1) LIGHTEN(l0->l1) LIGHTEN(l1->l2) STEP",
         .lighten_level = 2,
         .next_trace = "z f0+1 f1+1 u"},
        {.what = "until no level is left",
         .capacity_bytes = MIB(3),
         .sample_bytes = MIB(64),
         .lighten_levels = 2,
         .batch = 1,
         .status = REBATCH_E_EXHAUSTED,
         .trace = "z f0+1! l1 f0+1~1! l2 f0+1~2! l3!",
         .lighten_level = 2},
        {.what = "unless it is switched off",
         .never_lightens = true,
         .capacity_bytes = MIB(3),
         .sample_bytes = MIB(4),
         .lighten_levels = 2,
         .batch = 1,
         .status = REBATCH_E_EXHAUSTED,
         .trace = "z f0+1!"},
        {.what = "after mutating the batch is redone",
         .micro_start = 1,
         .lighten_levels = 1,
         .faults =
             {{.callback = SCRIPT_FORWARD, .nth = 2, .when = SCRIPT_WHILE, .manner = SCRIPT_POOL}},
         .batch = 2,
         .trace = "z f0+1 f1+1! l1 z f0+1~1 f1+1~1 u",
         .lighten_level = 1},
        {.what = "for an OOM in the optimizer too",
         .lighten_levels = 1,
         .faults = {{.callback = SCRIPT_UPDATE, .nth = 1, .manner = SCRIPT_POOL}},
         .batch = 2,
         .trace = "z f0+2 u! l1 u",
         .lighten_level = 1},
        {.what = "a failure of lighten that is no OOM passes through",
         .capacity_bytes = MIB(3),
         .sample_bytes = MIB(4),
         .lighten_levels = 2,
         .faults = {{.callback = SCRIPT_LIGHTEN, .nth = 1, .manner = SCRIPT_OWN}},
         .batch = 1,
         .status = SCRIPT_STATUS},
    };
    RIG_RUN_CASES(cases);
}

Test(step_fallback, exhausted_names_what_failed_before_lightening_was_tried_in_vain)
{
    OPEN(rig, rig, MIB(3), &OPTIONS(.growth = REBATCH_OFF));
    rig.script.sample_bytes = MIB(4);
    rig.script.lighten_levels = 2;
    script_fail(&rig.script, SCRIPT_LIGHTEN, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    STEP(&rig, 1, REBATCH_E_EXHAUSTED, "z f0+1! l1!");
    SAYS("forward_backward of 1 sample, before accumulating");
    SAYS("4.00 MiB");
    cr_assert_eq(rig.report.ooms, 1);
    cr_assert_eq(rig_event(&rig, REBATCH_EVENT_EXHAUSTED)->asked_bytes, MIB(4));
}

/* ---- nothing left ---- */

Test(step_fallback, exhausted_says_what_was_needed_and_what_would_help)
{
    OPEN(rig, rig, MIB(3), &OPTIONS(.growth = REBATCH_OFF));
    rig.script.sample_bytes = MIB(1);
    OK(rig_step(&rig, 2));
    rig.script.sample_bytes = MIB(5);
    cr_assert_eq(rig_step(&rig, 2), REBATCH_E_EXHAUSTED);
    SAYS("step 1");
    SAYS("forward_backward of 1 sample, before accumulating");
    SAYS("5.00 MiB");
    SAYS("3.00 MiB");
    SAYS("free memory");
    SAYS("limit");
    const rebatch_oom_report *oom = &rig.report.oom;
    cr_assert_eq(oom->asked_bytes, MIB(5));
    cr_assert_eq(oom->device_total_bytes, MIB(3));
    cr_assert_leq(oom->would_fit_bytes, MIB(3));
}

/* Undoing the step must not take the sentence's place. */
Test(step_fallback, exhausted_while_accumulating_says_the_same)
{
    OPEN(rig, rig, MIB(3), &OPTIONS(.growth = REBATCH_OFF));
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_WHILE, SCRIPT_POOL)->times = 64;
    cr_assert_eq(rig_step(&rig, 1), REBATCH_E_EXHAUSTED);
    SAYS("step 0: out of memory in forward_backward of 1 sample, while accumulating");
}

Test(step_fallback, the_oom_report_names_who_holds_memory)
{
    OPEN(rig, rig, MIB(8), &OPTIONS(.growth = REBATCH_OFF));
    rebatch_tag tag;
    void *parameters;
    rebatch_pool *pool = rebatch_get_pool(rig.rb);
    OK(rebatch_pool_tag(&tag, pool, "parameters"));
    OK(rebatch_pool_alloc(&parameters, pool, MIB(5), NULL, tag));
    rig.script.sample_bytes = MIB(4);
    cr_assert_eq(rig_step(&rig, 1), REBATCH_E_EXHAUSTED);
    cr_assert_geq(rig.report.oom.tag_count, 1);
    cr_assert_str_eq(rig.report.oom.tags[0].name, "parameters");
    cr_assert_eq(rig.report.oom.tags[0].live_bytes, MIB(5));
    char text[4096];
    cr_assert_lt(rebatch_oom_format(text, sizeof text, &rig.report.oom), sizeof text);
    HAS(text, "parameters");
}

Test(step_fallback, max_attempts_bounds_what_runs_in_vain)
{
    for (uint32_t most = 1; most <= 7; most++) {
        OPEN(rig, rig, MIB(64), &OPTIONS(.growth = REBATCH_OFF, .max_attempts = most));
        script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL)->times =
            SCRIPT_FOREVER;
        cr_assert_eq(rig_step(&rig, 128), REBATCH_E_EXHAUSTED);
        cr_assert_eq(rig.report.attempts, most);
        SAYS("max_attempts");
    }
}

Test(step_fallback, max_attempts_counts_all_callbacks_of_the_step)
{
    OPEN(rig, rig, MIB(64), &OPTIONS(.growth = REBATCH_OFF, .max_attempts = 3, .micro_start = 8));
    rig.script.base_bytes = MIB(1);
    rig.script.lighten_levels = 8;
    script_fail(&rig.script, SCRIPT_ZERO, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    script_fail(&rig.script, SCRIPT_UPDATE, 1, SCRIPT_BEFORE, SCRIPT_POOL)->times = 9;
    cr_assert_eq(rig_step(&rig, 8), REBATCH_E_EXHAUSTED);
    cr_assert_eq(rig.report.ooms, 3);
    cr_assert_eq(script_calls(&rig.script, SCRIPT_UPDATE), 1);
}

Test(step_fallback, max_attempts_is_of_one_step)
{
    OPEN(rig, rig, MIB(64), &OPTIONS(.growth = REBATCH_OFF, .max_attempts = 2));
    for (size_t batch = 512; batch > 1; batch /= 2) { /* one OOM a step, eight steps */
        script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL);
        OK(rig_step(&rig, batch));
        cr_assert_eq(rig.report.ooms, 1);
        rig.script.fault_count = 0;
    }
}

Test(step_fallback, by_default_it_gives_up_after_64)
{
    OPEN(rig, rig, MIB(64), &OPTIONS(.growth = REBATCH_OFF));
    rig.script.lighten_levels = 1000;
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL)->times = SCRIPT_FOREVER;
    cr_assert_eq(rig_step(&rig, 4), REBATCH_E_EXHAUSTED);
    cr_assert_eq(rig.report.attempts, 64);
}

Test(step_fallback, zero_grad_that_always_fails_is_exhausted)
{
    OPEN(rig, rig, MIB(64), NULL);
    rig.script.base_bytes = MIB(1);
    OK(rig_step(&rig, 4));
    script_fail(&rig.script, SCRIPT_ZERO, 1, SCRIPT_BEFORE, SCRIPT_RETURN)->times = SCRIPT_FOREVER;
    cr_assert_eq(rig_step(&rig, 4), REBATCH_E_EXHAUSTED);
    cr_assert_eq(script_calls(&rig.script, SCRIPT_FORWARD), 0);
    SAYS("out of memory in zero_grad");
}
