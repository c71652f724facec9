/* Owns the tests of rebatch_mutating(): who declares, who is taken to have mutated, what is learnt.
 * Must not know more of the library than its public headers say. */
#include "step_common.h"

/* Two micro-batches of 8 and a cache that holds something, without the flag. */
static void open_undeclared(struct rig *rig, bool declares)
{
    rig_open(rig, MIB(64), &OPTIONS(.micro_start = 8, .growth = REBATCH_OFF));
    rig->ops.flags = 0;
    rig->script.declares = declares;
    rig->script.base_bytes = MIB(1);
}

Test(step_declare, a_forward_that_never_declares_is_dirty_from_its_first_line)
{
    OPEN_WITH(open_undeclared, rig, rig, false);
    OK(rig_step(&rig, 16));
    script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_BEFORE, SCRIPT_POOL);
    STEP(&rig, 16, REBATCH_OK, "z f0+8 f8+8! z f0+4~1 f4+4~1 f8+4~1 f12+4~1 u");
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_BACKWARD], 1);
}

Test(step_declare, an_optimizer_that_never_declares_is_torn_by_any_oom)
{
    OPEN_WITH(open_undeclared, rig, rig, false);
    OK(rig_step(&rig, 16));
    script_fail(&rig.script, SCRIPT_UPDATE, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    STEP(&rig, 16, REBATCH_E_TORN, "z f0+8 f8+8 u!");
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_UPDATE], 1);
    cr_assert_str_eq(rebatch_last_error(),
                     "step 1: out of memory in optimizer_step, which does not declare when it "
                     "changes parameters: some may be new, some old; restore a checkpoint, and "
                     "declare it (REBATCH_DECLARES_MUTATION)");
}

Test(step_declare, an_optimizer_that_never_declares_is_torn_by_any_failure)
{
    OPEN_WITH(open_undeclared, rig, rig, false);
    OK(rig_step(&rig, 16));
    script_fail(&rig.script, SCRIPT_UPDATE, 1, SCRIPT_BEFORE, SCRIPT_OWN);
    cr_assert_eq(rig_step(&rig, 16), SCRIPT_STATUS);
    cr_assert(rig.report.torn);
    cr_assert_str_eq(rebatch_last_error(),
                     "step 1: optimizer_step returned 1007; optimizer_step does not declare when "
                     "it changes parameters: some may be new, some old; restore a checkpoint");
}

Test(step_declare, until_its_first_success_a_forward_is_taken_to_mutate_at_once)
{
    OPEN_WITH(open_undeclared, rig, rig, true);
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    STEP(&rig, 8, REBATCH_OK, "z f0+8! z f0+4~1 f4+4~1 u");
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_BACKWARD], 1);
}

Test(step_declare, that_a_forward_declares_is_learned_when_it_succeeds)
{
    OPEN_WITH(open_undeclared, rig, rig, true);
    script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_BEFORE, SCRIPT_POOL);
    STEP(&rig, 16, REBATCH_OK, "z f0+8 f8+8! f8+4~1 f12+4~1 u");
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_FORWARD], 1);
}

Test(step_declare, a_failed_attempt_teaches_nothing)
{
    OPEN_WITH(open_undeclared, rig, rig, true);
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_WHILE, SCRIPT_POOL);
    script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_BEFORE, SCRIPT_POOL);
    STEP(&rig, 8, REBATCH_OK, "z f0+8! z f0+4~1! z f0+2~2 f2+2~2 f4+2~1 f6+2~1 u");
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_BACKWARD], 2);
}

Test(step_declare, each_callback_is_learned_for_itself)
{
    OPEN_WITH(open_undeclared, rig, rig, true);
    script_fail(&rig.script, SCRIPT_UPDATE, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    cr_assert_eq(rig_step(&rig, 16), REBATCH_E_TORN, "the optimizer has not declared yet");
}

Test(step_declare, that_the_optimizer_declares_is_learned_when_it_succeeds)
{
    OPEN_WITH(open_undeclared, rig, rig, true);
    OK(rig_step(&rig, 16));
    script_fail(&rig.script, SCRIPT_UPDATE, 1, SCRIPT_BEFORE, SCRIPT_RETURN);
    STEP(&rig, 16, REBATCH_OK, "z f0+8 f8+8 u! u");
}

static rebatch_status (*real_forward)(const rebatch_microbatch *mb, void *user);

static rebatch_status another_forward(const rebatch_microbatch *mb, void *user)
{
    return real_forward(mb, user);
}

Test(step_declare, another_function_has_to_be_learned_anew)
{
    OPEN_WITH(open_undeclared, rig, rig, true);
    OK(rig_step(&rig, 8));
    real_forward = rig.ops.forward_backward;
    rig.ops.forward_backward = another_forward;
    rig.learned[SCRIPT_FORWARD] = false;
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    OK(rig_step(&rig, 8));
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_BACKWARD], 1);
}

Test(step_declare, with_the_flag_the_first_oom_costs_one_microbatch_already)
{
    OPEN_WITH(open_undeclared, rig, rig, true);
    rig.ops.flags = REBATCH_DECLARES_MUTATION;
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    STEP(&rig, 16, REBATCH_OK, "z f0+8! f0+4~1 f4+4~1 f8+4 f12+4 u");
}

Test(step_declare, mutating_outside_a_callback_says_nothing)
{
    OPEN_WITH(open_undeclared, rig, rig, true);
    rig.ops.flags = REBATCH_DECLARES_MUTATION;
    rebatch_mutating(NULL);
    cr_assert_str_eq(rebatch_last_error(), "rb is NULL");
    rebatch_mutating(rig.rb);
    cr_assert_str_eq(rebatch_last_error(), "rebatch_mutating() was called outside a callback");
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    OK(rig_step(&rig, 8));
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_FORWARD], 1);
}

Test(step_declare, mutating_in_one_callback_says_nothing_about_the_next)
{
    OPEN_WITH(open_undeclared, rig, rig, true);
    rig.ops.flags = REBATCH_DECLARES_MUTATION;
    OK(rig_step(&rig, 16));
    script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_BEFORE, SCRIPT_POOL);
    script_fail(&rig.script, SCRIPT_UPDATE, 1, SCRIPT_BEFORE, SCRIPT_RETURN);
    STEP(&rig, 16, REBATCH_OK, "z f0+8 f8+8! f8+4~1 f12+4~1 u! u");
}

/* ---- a promise that is not kept ---- */

/* A script that declares nothing, with the flag. */
static void open_liar(struct rig *rig)
{
    open_undeclared(rig, false);
    rig->ops.flags = REBATCH_DECLARES_MUTATION;
}

Test(step_declare, a_forward_that_breaks_its_promise_ends_the_step)
{
    AUTO_CLOSE(rig, rig);
    open_liar(&rig);
    STEP(&rig, 16, REBATCH_E_STATE, "z f0+8");
    cr_assert_str_eq(rebatch_last_error(),
                     "step 0: forward_backward of samples 0-7 returned without rebatch_mutating(), "
                     "which REBATCH_DECLARES_MUTATION promises");
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_WHILE, SCRIPT_POOL);
    cr_assert_eq(rig_step(&rig, 1), REBATCH_E_EXHAUSTED);
    rig.script.fault_count = 0;
    FAILS(rig_step(&rig, 1), REBATCH_E_STATE, " of sample 0 ");
    cr_assert_not(rig.report.torn);
    rig.script.declares = true;
    OK(rig_step(&rig, 16));
}

/* Declares in some callbacks only. */
INSIDE(declare_in)
{
    const bool *declares = s->inside_user;
    s->declares = declares[callback];
    return REBATCH_OK;
}

static void open_declaring_in(struct rig *rig, bool *declares)
{
    open_liar(rig);
    script_inside(&rig->script, declare_in, declares);
}

Test(step_declare, zero_grad_need_not_declare)
{
    static bool declares[SCRIPT_CALLBACKS] = {[SCRIPT_FORWARD] = true, [SCRIPT_UPDATE] = true};
    OPEN_WITH(open_declaring_in, rig, rig, declares);
    OK(rig_step(&rig, 16));
    cr_assert_str_eq(rig_events(&rig), "STEP");
}

Test(step_declare, a_forward_that_has_declared_may_contribute_nothing)
{
    static bool declares[SCRIPT_CALLBACKS] = {[SCRIPT_FORWARD] = true, [SCRIPT_UPDATE] = true};
    OPEN_WITH(open_declaring_in, rig, rig, declares);
    OK(rig_step(&rig, 16));
    declares[SCRIPT_FORWARD] = false;
    OK(rig_step(&rig, 16));
}

/* As of a model that trains two parts in turn. */
Test(step_declare, nor_need_another_forward_of_the_session)
{
    static bool declares[SCRIPT_CALLBACKS] = {[SCRIPT_FORWARD] = true, [SCRIPT_UPDATE] = true};
    OPEN_WITH(open_declaring_in, rig, rig, declares);
    OK(rig_step(&rig, 16));
    real_forward = rig.ops.forward_backward;
    rig.ops.forward_backward = another_forward;
    OK(rig_step(&rig, 16));
    rig.ops.forward_backward = real_forward;
    declares[SCRIPT_FORWARD] = false;
    OK(rig_step(&rig, 16));
}

Test(step_declare, an_update_without_a_declaration_is_an_event_once)
{
    static bool declares[SCRIPT_CALLBACKS] = {[SCRIPT_FORWARD] = true};
    char text[256];
    OPEN_WITH(open_declaring_in, rig, rig, declares);
    OK(rig_step(&rig, 16));
    cr_assert_str_eq(rig_events(&rig), "UNDECLARED STEP");
    cr_assert_eq(rig.events[0].level, REBATCH_LOG_WARN);
    (void)rebatch_event_format(text, sizeof text, &rig.events[0]);
    cr_assert_str_eq(text,
                     "step 0: optimizer_step returned without calling rebatch_mutating(), which "
                     "REBATCH_DECLARES_MUTATION promises: correct only if it changed nothing");
    OK(rig_step(&rig, 16));
    cr_assert_str_eq(rig_events(&rig), "STEP");
}

Test(step_declare, an_update_may_be_skipped_once_it_has_declared)
{
    static bool declares[SCRIPT_CALLBACKS] = {[SCRIPT_FORWARD] = true, [SCRIPT_UPDATE] = true};
    OPEN_WITH(open_declaring_in, rig, rig, declares);
    OK(rig_step(&rig, 16));
    declares[SCRIPT_UPDATE] = false;
    OK(rig_step(&rig, 16));
    cr_assert_str_eq(rig_events(&rig), "STEP");
}

Test(step_declare, a_trial_need_not_declare)
{
    rebatch_probe_report report;
    AUTO_CLOSE(rig, rig);
    open_liar(&rig);
    rig.script.is_probed = true;
    rig.script.batch = 16;
    OK(rebatch_probe(rig.rb, &rig.ops, 16, &rig.script, NULL, &report));
    rig.script.is_probed = false;
    cr_assert_eq(rig_step(&rig, 16), REBATCH_E_STATE);
}
