/* Owns the tests of the contract's table: where an OOM strikes, what is undone, what runs again.
 * Must not know more of the library than its public headers say. */
#include <stdio.h>

#include "step_common.h"

/* A rig that has run one clean step of 16 samples, so that the cache holds memory: an OOM that is
 * not the pool's then finds something to release, and the same is tried once more. */
static void open_warm(struct rig *rig, const rebatch_options *options)
{
    rig_open(rig, MIB(64), options);
    rig->script.base_bytes = MIB(1);
    rig->script.zero_bytes = KIB(64);
    rig->script.update_bytes = KIB(64);
    OK(rig_step(rig, 16));
}

/* ---- zero_grad ---- */

static void zero_grad_fails_once(enum script_when when, enum script_manner manner)
{
    OPEN_WITH(open_warm, rig, rig, NULL);
    const uint64_t live_bytes = rig_live_bytes(&rig);
    script_fail(&rig.script, SCRIPT_ZERO, 1, when, manner);
    STEP(&rig, 16, REBATCH_OK, "z! z f0+16 u");
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_ZERO_GRAD], 1);
    cr_assert_eq(rig.report.redone_samples, 0);
    cr_assert_eq(rig_live_bytes(&rig), live_bytes);
}

Test(step_contract, oom_in_zero_grad_runs_zero_grad_again)
{
    zero_grad_fails_once(SCRIPT_BEFORE, SCRIPT_RETURN);
    zero_grad_fails_once(SCRIPT_WHILE, SCRIPT_RETURN);
    zero_grad_fails_once(SCRIPT_WHILE, SCRIPT_ESCAPE);
    zero_grad_fails_once(SCRIPT_WHILE, SCRIPT_SWALLOW);
}

/* ---- forward_backward ---- */

static void forward_fails_once(enum script_when when, const char *expected, rebatch_phase phase,
                               size_t redone)
{
    for (enum script_manner manner = SCRIPT_RETURN; manner <= SCRIPT_SWALLOW; manner++) {
        OPEN(rig, rig, MIB(64), &OPTIONS(.micro_start = 16, .growth = REBATCH_OFF));
        script_fail(&rig.script, SCRIPT_FORWARD, 3, when, manner);
        STEP(&rig, 64, REBATCH_OK, expected);
        cr_assert_eq(rig.report.ooms, 1, "manner %d", manner);
        cr_assert_eq(rig.report.ooms_in[phase], 1, "manner %d", manner);
        cr_assert_eq(rig.report.redone_samples, redone, "manner %d", manner);
    }
}

Test(step_contract, oom_in_forward_before_mutating_in_every_manner_redoes_those_samples_only)
{
    forward_fails_once(SCRIPT_BEFORE, "z f0+16 f16+16 f32+16! f32+8~1 f40+8~1 f48+8 f56+8 u",
                       REBATCH_PHASE_FORWARD, 16);
}

Test(step_contract, oom_in_forward_after_mutating_in_every_manner_redoes_the_batch_from_zero_grad)
{
    forward_fails_once(SCRIPT_WHILE,
                       "z f0+16 f16+16 f32+16! z f0+8~1 f8+8~1 f16+8~1 f24+8~1 f32+8~1 f40+8~1 "
                       "f48+8 f56+8 u",
                       REBATCH_PHASE_BACKWARD, 48);
}

Test(step_contract, oom_in_zero_grad_of_a_redone_batch_is_survived)
{
    OPEN_WITH(open_warm, rig, rig, &OPTIONS(.micro_start = 8, .growth = REBATCH_OFF));
    script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_WHILE, SCRIPT_POOL);
    script_fail(&rig.script, SCRIPT_ZERO, 2, SCRIPT_WHILE, SCRIPT_RETURN);
    STEP(&rig, 16, REBATCH_OK, "z f0+8 f8+8! z! z f0+4~1 f4+4~1 f8+4~1 f12+4~1 u");
}

Test(step_contract, a_failed_attempt_gives_back_all_it_allocated)
{
    OPEN(rig, rig, MIB(64), &OPTIONS(.micro_start = 16, .growth = REBATCH_OFF));
    rig.script.base_bytes = MIB(1);
    rig.script.late_bytes = MIB(1);
    void *kept;
    OK(rebatch_pool_alloc(&kept, rebatch_get_pool(rig.rb), MIB(2), NULL, 0));
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    script_fail(&rig.script, SCRIPT_FORWARD, 3, SCRIPT_WHILE, SCRIPT_POOL);
    OK(rig_step(&rig, 16));
    cr_assert_eq(rig.report.ooms, 2);
    cr_assert_eq(rig_live_bytes(&rig), MIB(2));
}

/* ---- optimizer_step ---- */

static void update_fails_once_before(enum script_manner manner)
{
    OPEN_WITH(open_warm, rig, rig, NULL);
    const uint64_t live_bytes = rig_live_bytes(&rig);
    script_fail(&rig.script, SCRIPT_UPDATE, 1, SCRIPT_BEFORE, manner);
    STEP(&rig, 16, REBATCH_OK, "z f0+16 u! u");
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_OPTIMIZER], 1);
    cr_assert_eq(rig.report.redone_samples, 0);
    cr_assert_eq(rig_live_bytes(&rig), live_bytes);
}

Test(step_contract, oom_in_the_optimizer_before_mutating_repeats_the_update_alone)
{
    update_fails_once_before(SCRIPT_RETURN);
    update_fails_once_before(SCRIPT_ESCAPE);
    update_fails_once_before(SCRIPT_SWALLOW);
}

static void update_tears(enum script_manner manner)
{
    OPEN_WITH(open_warm, rig, rig, NULL);
    const uint64_t live_bytes = rig_live_bytes(&rig);
    script_fail(&rig.script, SCRIPT_UPDATE, 1, SCRIPT_WHILE, manner);
    STEP(&rig, 16, REBATCH_E_TORN, "z f0+16 u!");
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_UPDATE], 1);
    cr_assert_eq(rig.script.updates, 0);
    for (size_t i = 0; i < SCRIPT_PARAMETERS; i++)
        cr_assert_eq(rig.script.parameters[i], i < SCRIPT_PARAMETERS / 2 ? 2 : 1,
                     "parameter %zu was undone or went on", i);
    cr_assert(script_is_whole(&rig.script, 16), "the gradients were touched");
    cr_assert_eq(rig_live_bytes(&rig), live_bytes + KIB(64),
                 "what the update allocated is no longer there");
    cr_assert(strstr(rebatch_last_error(), "checkpoint"), "the text is: %s", rebatch_last_error());
}

Test(step_contract, oom_in_the_optimizer_after_mutating_is_torn_and_nothing_is_undone)
{
    update_tears(SCRIPT_RETURN);
    update_tears(SCRIPT_POOL);
    update_tears(SCRIPT_ESCAPE);
    update_tears(SCRIPT_SWALLOW);
}

Test(step_contract, a_torn_update_is_not_repeated_by_lightening_either)
{
    OPEN_WITH(open_warm, rig, rig, NULL);
    rig.script.lighten_levels = 3;
    script_fail(&rig.script, SCRIPT_UPDATE, 1, SCRIPT_WHILE, SCRIPT_POOL);
    STEP(&rig, 16, REBATCH_E_TORN, "z f0+16 u!");
}

/* ---- failures that are no OOM ---- */

static void own_failure_passes(enum script_callback callback, enum script_when when,
                               enum script_manner manner, const char *expected)
{
    OPEN_WITH(open_warm, rig, rig, &OPTIONS(.micro_start = 8, .growth = REBATCH_OFF));
    const uint64_t live_bytes = rig_live_bytes(&rig);
    script_fail(&rig.script, callback, 1, when, manner);
    cr_assert_eq(rig_step(&rig, 16), SCRIPT_STATUS);
    cr_assert_str_eq(script_trace(&rig.script), expected);
    cr_assert_eq(rig.report.ooms, 0);
    const bool torn = callback == SCRIPT_UPDATE && when == SCRIPT_WHILE;
    cr_assert_eq(rig_live_bytes(&rig), live_bytes + (torn ? KIB(64) : 0),
                 "the attempt's allocations are still there, or those of a torn update are not");
    cr_assert_eq(rebatch_get_micro(rig.rb, 16), 8);
    rig.script.fault_count = 0;
    script_restore(&rig.script);
    OK(rig_step(&rig, 16));
}

Test(step_contract, a_failure_that_is_no_oom_passes_through_unchanged)
{
    static const enum script_manner manners[] = {SCRIPT_OWN, SCRIPT_OWN_ESCAPE};
    for (size_t i = 0; i < 2; i++) {
        for (int when = SCRIPT_BEFORE; when <= SCRIPT_WHILE; when++) {
            own_failure_passes(SCRIPT_ZERO, when, manners[i], "z!");
            own_failure_passes(SCRIPT_FORWARD, when, manners[i], "z f0+8!");
            own_failure_passes(SCRIPT_UPDATE, when, manners[i], "z f0+8 f8+8 u!");
        }
    }
}

/* Allocates, as whoever makes its moments at the first update. */
INSIDE(make_moments)
{
    void **moments = s->inside_user;
    return callback == SCRIPT_UPDATE
               ? rebatch_pool_alloc(moments, rebatch_get_pool(s->rb), KIB(8), s->stream, 0)
               : REBATCH_OK;
}

Test(step_contract, an_update_that_had_begun_and_fails_is_torn_whatever_it_answers)
{
    static const enum script_manner manners[] = {SCRIPT_OWN, SCRIPT_OWN_ESCAPE, SCRIPT_LOST};
    for (size_t i = 0; i < 3; i++) {
        const rebatch_status expected =
            manners[i] == SCRIPT_LOST ? REBATCH_E_DEVICE_LOST : SCRIPT_STATUS;
        OPEN_WITH(open_warm, rig, rig, NULL);
        const uint64_t live_bytes = rig_live_bytes(&rig);
        void *moments = NULL;
        size_t bytes;
        script_inside(&rig.script, make_moments, &moments);
        script_fail(&rig.script, SCRIPT_UPDATE, 1, SCRIPT_WHILE, manners[i]);
        STEP(&rig, 16, expected, "z f0+16 u!");
        cr_assert(rig.report.torn);
        cr_assert_eq(rig.report.status, expected);
        cr_assert_eq(rebatch_pool_block_bytes(&bytes, rebatch_get_pool(rig.rb), moments),
                     REBATCH_OK, "a pointer to it may be in use");
        cr_assert_eq(rig_live_bytes(&rig), live_bytes + KIB(8) + KIB(64));
        for (size_t k = 0; k < SCRIPT_PARAMETERS; k++)
            cr_assert_eq(rig.script.parameters[k], k < SCRIPT_PARAMETERS / 2 ? 2 : 1);
        cr_assert(strstr(rebatch_last_error(),
                         "; optimizer_step had begun to change parameters: some are new, "
                         "some old; restore a checkpoint"),
                  "the text is: %s", rebatch_last_error());
        rig_fail_device(&rig, 0, 0, REBATCH_OK);
    }
}

INSIDE(open_a_scope)
{
    rebatch_scope scope;
    return callback == SCRIPT_UPDATE ? rebatch_scope_begin(&scope, rebatch_get_pool(s->rb))
                                     : REBATCH_OK;
}

static void tear_with_a_scope_open(enum script_manner manner, rebatch_status expected)
{
    OPEN_WITH(open_warm, rig, rig, NULL);
    rig.script.inside = open_a_scope;
    if (expected != REBATCH_E_STATE)
        script_fail(&rig.script, SCRIPT_UPDATE, 1, SCRIPT_WHILE, manner);
    rig.script.batch = 16;
    memset(rig.script.tries, 0, sizeof rig.script.tries);
    cr_assert_eq(rebatch_step(rig.rb, &rig.ops, 16, &rig.script, &rig.report), expected);
    cr_assert(rig.report.torn);
    rebatch_pool *pool = rebatch_get_pool(rig.rb);
    for (int i = 0; i < 3; i++) { /* none is left open */
        rebatch_scope scope;
        OK(rebatch_scope_begin(&scope, pool));
        cr_assert_eq(scope & 63, 0, "scope %u is not the outermost", (unsigned)scope);
        OK(rebatch_scope_commit(pool, scope));
    }
}

Test(step_contract, an_update_with_a_scope_of_its_own_still_open_is_torn)
{
    tear_with_a_scope_open(SCRIPT_RETURN, REBATCH_E_STATE); /* it answered REBATCH_OK */
    tear_with_a_scope_open(SCRIPT_RETURN, REBATCH_E_TORN);
    tear_with_a_scope_open(SCRIPT_OWN_ESCAPE, SCRIPT_STATUS);
}

Test(step_contract, a_failure_before_the_update_is_a_step_that_did_not_happen)
{
    static const enum script_callback callbacks[] = {SCRIPT_ZERO, SCRIPT_FORWARD, SCRIPT_UPDATE};
    for (size_t i = 0; i < 3; i++) {
        OPEN_WITH(open_warm, rig, rig, NULL);
        const uint64_t live_bytes = rig_live_bytes(&rig);
        const enum script_when when = i < 2 ? SCRIPT_WHILE : SCRIPT_BEFORE;
        script_fail(&rig.script, callbacks[i], 1, when, SCRIPT_OWN);
        cr_assert_eq(rig_step(&rig, 16), SCRIPT_STATUS);
        cr_assert_not(rig.report.torn);
        cr_assert_eq(rig_live_bytes(&rig), live_bytes);
        for (size_t k = 0; k < SCRIPT_PARAMETERS; k++)
            cr_assert_eq(rig.script.parameters[k], 1);
        rig.script.fault_count = 0;
        OK(rig_step(&rig, 16)); /* every sample counts once */
        cr_assert_eq(rig.report.step, 1);
    }
}

INSIDE(answer_that)
{
    const rebatch_status *answer = s->inside_user;
    return callback == SCRIPT_FORWARD ? *answer : REBATCH_OK;
}

static bool is_nobodys(rebatch_status answer)
{
    return answer == REBATCH_E_EXHAUSTED || answer == REBATCH_E_TORN ||
           strcmp(rebatch_status_name(answer), "REBATCH_E_UNKNOWN") == 0;
}

Test(step_contract, every_status_but_oom_passes_through_and_is_not_tried_again)
{
    OPEN(rig, rig, MIB(64), NULL);
    rig.script.inside = answer_that;
    for (int number = 0; number <= 1100; number++) {
        rebatch_status answer = (rebatch_status)number;
        if (answer == REBATCH_OK || answer == REBATCH_OOM || is_nobodys(answer))
            continue;
        rig.script.inside_user = &answer;
        STEP(&rig, 4, answer, "z f0+4!");
    }
    rig.script.inside = NULL;
    OK(rig_step(&rig, 4));
}

static void expect_text(struct rig *rig, int number, rebatch_status expected, const char *text)
{
    rebatch_status answer = (rebatch_status)number;
    script_inside(&rig->script, answer_that, &answer);
    cr_assert_eq(rebatch_open(NULL, NULL, NULL), REBATCH_E_INVALID); /* an unrelated sentence */
    rig->script.batch = 4;
    memset(rig->script.tries, 0, sizeof rig->script.tries);
    rig->script.call_count = 0;
    cr_assert_eq(rebatch_step(rig->rb, &rig->ops, 4, &rig->script, NULL), expected);
    cr_assert_str_eq(rebatch_last_error(), text);
}

Test(step_contract, what_no_callback_may_answer_is_a_state_error)
{
    static const int numbers[] = {14, 500, 999, -1, -2147483647};
    OPEN(rig, rig, MIB(64), NULL);
    expect_text(
        &rig, REBATCH_E_EXHAUSTED, REBATCH_E_STATE,
        "step 0: forward_backward of samples 0-3 returned REBATCH_E_EXHAUSTED, which only "
        "rebatch_step() returns: expected another status, or a number from REBATCH_E_USER on");
    expect_text(&rig, REBATCH_E_TORN, REBATCH_E_STATE,
                "step 0: forward_backward of samples 0-3 returned REBATCH_E_TORN, which only "
                "rebatch_step() returns: expected another status, or a number from REBATCH_E_USER "
                "on");
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        char text[256];
        (void)snprintf(text, sizeof text,
                       "step 0: forward_backward of samples 0-3 returned %d, which is no status: "
                       "expected one, or a number from REBATCH_E_USER, 1000, on",
                       numbers[i]);
        expect_text(&rig, numbers[i], REBATCH_E_STATE, text);
    }
}

Test(step_contract, the_sentence_says_which_callback_answered_what)
{
    OPEN(rig, rig, MIB(64), NULL);
    expect_text(&rig, REBATCH_E_USER + 7, SCRIPT_STATUS,
                "step 0: forward_backward of samples 0-3 returned 1007");
    expect_text(&rig, REBATCH_E_IO, REBATCH_E_IO,
                "step 0: forward_backward of samples 0-3 returned REBATCH_E_IO");
    rig.script.inside = NULL;
    script_fail(&rig.script, SCRIPT_ZERO, 1, SCRIPT_WHILE, SCRIPT_OWN_ESCAPE);
    cr_assert_eq(rig_step(&rig, 4), SCRIPT_STATUS);
    cr_assert_str_eq(rebatch_last_error(), "step 0: zero_grad returned 1007");
    rig.script.fault_count = 0;
    script_fail(&rig.script, SCRIPT_UPDATE, 1, SCRIPT_BEFORE, SCRIPT_OWN);
    cr_assert_eq(rig_step(&rig, 4), SCRIPT_STATUS);
    cr_assert_str_eq(rebatch_last_error(), "step 0: optimizer_step returned 1007");
    rig.script.fault_count = 0;
    script_fail(&rig.script, SCRIPT_UPDATE, 1, SCRIPT_WHILE, SCRIPT_OWN);
    cr_assert_eq(rig_step(&rig, 4), SCRIPT_STATUS);
    cr_assert_str_eq(rebatch_last_error(),
                     "step 0: optimizer_step returned 1007; optimizer_step had begun to change "
                     "parameters: some are new, some old; restore a checkpoint");
    script_restore(&rig.script);
    rig.script.fault_count = 0;
    rig.script.lighten_levels = 1;
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    script_fail(&rig.script, SCRIPT_LIGHTEN, 1, SCRIPT_BEFORE, SCRIPT_OWN);
    cr_assert_eq(rig_step(&rig, 1), SCRIPT_STATUS);
    cr_assert(strstr(rebatch_last_error(), "step 0: lighten to level 1 returned 1007") ==
                  rebatch_last_error(),
              "the text is: %s", rebatch_last_error());
}

/* A call of the library fails in the callback, which answers that status or another. */
INSIDE(fail_inside)
{
    const rebatch_status *answer = s->inside_user;
    if (callback != SCRIPT_FORWARD)
        return REBATCH_OK;
    cr_assert_eq(rebatch_open(NULL, NULL, NULL), REBATCH_E_INVALID);
    if (*answer == REBATCH_E_IO)
        rebatch_clear_error();
    return *answer;
}

Test(step_contract, a_sentence_of_the_callbacks_own_call_stays)
{
    rebatch_status answer = REBATCH_E_INVALID;
    OPEN(rig, rig, MIB(64), NULL);
    script_inside(&rig.script, fail_inside, &answer);
    FAILS_WITH(rig_step(&rig, 4), REBATCH_E_INVALID, "out is NULL");
    answer = SCRIPT_STATUS;
    cr_assert_eq(rig_step(&rig, 1), SCRIPT_STATUS);
    cr_assert_str_eq(rebatch_last_error(), "step 0: forward_backward of sample 0 returned 1007; "
                                           "the last failure within it: out is NULL");
}

Test(step_contract, a_sentence_that_the_callback_cleared_is_not_replaced)
{
    rebatch_status answer = REBATCH_E_IO;
    OPEN(rig, rig, MIB(64), NULL);
    script_inside(&rig.script, fail_inside, &answer);
    FAILS_WITH(rig_step(&rig, 4), REBATCH_E_IO, "");
}

/* ---- after EXHAUSTED ---- */

Test(step_contract, exhausted_before_mutating_keeps_what_was_accumulated)
{
    OPEN(rig, rig, MIB(64), &OPTIONS(.micro_start = 4, .growth = REBATCH_OFF));
    script_fail(&rig.script, SCRIPT_FORWARD, 3, SCRIPT_BEFORE, SCRIPT_POOL)->times = SCRIPT_FOREVER;
    STEP(&rig, 16, REBATCH_E_EXHAUSTED, "z f0+4 f4+4 f8+4! f8+2~1! f8+1~2!");
    cr_assert(script_holds(&rig.script, 8));
}

Test(step_contract, exhausted_while_accumulating_is_cleared_by_the_next_step)
{
    OPEN(rig, rig, MIB(64), &OPTIONS(.micro_start = 4, .growth = REBATCH_OFF));
    script_fail(&rig.script, SCRIPT_FORWARD, 3, SCRIPT_WHILE, SCRIPT_POOL)->times = SCRIPT_FOREVER;
    cr_assert_eq(rig_step(&rig, 16), REBATCH_E_EXHAUSTED);
    rig.script.fault_count = 0;
    OK(rig_step(&rig, 16));
}

Test(step_contract, exhausted_in_the_optimizer_keeps_the_gradients)
{
    OPEN(rig, rig, MIB(64), NULL);
    script_fail(&rig.script, SCRIPT_UPDATE, 1, SCRIPT_BEFORE, SCRIPT_POOL)->times = SCRIPT_FOREVER;
    cr_assert_eq(rig_step(&rig, 16), REBATCH_E_EXHAUSTED);
    cr_assert(script_is_whole(&rig.script, 16));
    cr_assert_eq(script_calls(&rig.script, SCRIPT_FORWARD), 1);
}

Test(step_contract, exhausted_leaves_nothing_allocated_and_close_gives_everything_back)
{
    const enum script_callback callbacks[] = {SCRIPT_ZERO, SCRIPT_FORWARD, SCRIPT_UPDATE};
    for (size_t i = 0; i < 3; i++) {
        struct rig rig;
        open_warm(&rig, NULL);
        rig.script.late_bytes = MIB(1);
        const uint64_t live_bytes = rig_live_bytes(&rig);
        script_fail(&rig.script, callbacks[i], 1, SCRIPT_BEFORE, SCRIPT_POOL)->times =
            SCRIPT_FOREVER;
        cr_assert_eq(rig_step(&rig, 16), REBATCH_E_EXHAUSTED);
        cr_assert_eq(rig_live_bytes(&rig), live_bytes);
        rig_close(&rig); /* asserts that the device has it all back */
    }
}

Test(step_contract, the_step_after_exhausted_has_the_same_number_and_succeeds)
{
    OPEN(rig, rig, MIB(64), NULL);
    rig.script.sample_bytes = MIB(1);
    OK(rig_step(&rig, 4));
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL)->times = SCRIPT_FOREVER;
    cr_assert_eq(rig_step(&rig, 4), REBATCH_E_EXHAUSTED);
    cr_assert_eq(rig_step(&rig, 4), REBATCH_E_EXHAUSTED);
    rig.script.fault_count = 0;
    OK(rig_step(&rig, 4));
    cr_assert_eq(rig.report.step, 1);
    cr_assert_eq(rig.script.calls[1].step, 1);
}
