/* Owns the tests of rebatch_mutating(): who declares, who is taken to have mutated, what is learnt.
 * Must not know more of the library than its public headers say. */
#include <criterion/criterion.h>

#include "step_common.h"

/* Two micro-batches of 8 and a cache that holds something, without the flag. */
static void open_undeclared(struct rig *rig, bool declares)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.micro_start = 8;
    options.growth = REBATCH_OFF;
    rig_open(rig, MIB(64), &options);
    rig->ops.flags = 0;
    rig->script.declares = declares;
    rig->script.base_bytes = MIB(1);
}

Test(step_declare, a_forward_that_never_declares_is_dirty_from_its_first_line)
{
    struct rig rig;
    open_undeclared(&rig, false);
    cr_assert_eq(rig_step(&rig, 16), REBATCH_OK);
    script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_BEFORE, SCRIPT_POOL);
    cr_assert_eq(rig_step(&rig, 16), REBATCH_OK);
    cr_assert_str_eq(script_trace(&rig.script), "z f0+8 f8+8! z f0+4~1 f4+4~1 f8+4~1 f12+4~1 u");
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_BACKWARD], 1);
    rig_close(&rig);
}

Test(step_declare, an_optimizer_that_never_declares_is_torn_by_any_oom)
{
    struct rig rig;
    open_undeclared(&rig, false);
    cr_assert_eq(rig_step(&rig, 16), REBATCH_OK);
    script_fail(&rig.script, SCRIPT_UPDATE, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    cr_assert_eq(rig_step(&rig, 16), REBATCH_E_TORN);
    cr_assert_str_eq(script_trace(&rig.script), "z f0+8 f8+8 u!");
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_UPDATE], 1);
    rig_close(&rig);
}

Test(step_declare, until_its_first_success_a_forward_is_taken_to_mutate_at_once)
{
    struct rig rig;
    open_undeclared(&rig, true);
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    cr_assert_eq(rig_step(&rig, 8), REBATCH_OK);
    cr_assert_str_eq(script_trace(&rig.script), "z f0+8! z f0+4~1 f4+4~1 u");
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_BACKWARD], 1);
    rig_close(&rig);
}

Test(step_declare, that_a_forward_declares_is_learned_when_it_succeeds)
{
    struct rig rig;
    open_undeclared(&rig, true);
    script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_BEFORE, SCRIPT_POOL);
    cr_assert_eq(rig_step(&rig, 16), REBATCH_OK);
    cr_assert_str_eq(script_trace(&rig.script), "z f0+8 f8+8! f8+4~1 f12+4~1 u");
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_FORWARD], 1);
    rig_close(&rig);
}

Test(step_declare, a_failed_attempt_teaches_nothing)
{
    struct rig rig;
    open_undeclared(&rig, true);
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_WHILE, SCRIPT_POOL);
    script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_BEFORE, SCRIPT_POOL);
    cr_assert_eq(rig_step(&rig, 8), REBATCH_OK);
    cr_assert_str_eq(script_trace(&rig.script),
                     "z f0+8! z f0+4~1! z f0+2~2 f2+2~2 f4+2~1 f6+2~1 u");
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_BACKWARD], 2);
    rig_close(&rig);
}

Test(step_declare, each_callback_is_learned_for_itself)
{
    struct rig rig;
    open_undeclared(&rig, true);
    script_fail(&rig.script, SCRIPT_UPDATE, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    cr_assert_eq(rig_step(&rig, 16), REBATCH_E_TORN, "the optimizer has not declared yet");
    rig_close(&rig);
}

Test(step_declare, that_the_optimizer_declares_is_learned_when_it_succeeds)
{
    struct rig rig;
    open_undeclared(&rig, true);
    cr_assert_eq(rig_step(&rig, 16), REBATCH_OK);
    script_fail(&rig.script, SCRIPT_UPDATE, 1, SCRIPT_BEFORE, SCRIPT_RETURN);
    cr_assert_eq(rig_step(&rig, 16), REBATCH_OK);
    cr_assert_str_eq(script_trace(&rig.script), "z f0+8 f8+8 u! u");
    rig_close(&rig);
}

static rebatch_status (*real_forward)(const rebatch_microbatch *mb, void *user);

static rebatch_status another_forward(const rebatch_microbatch *mb, void *user)
{
    return real_forward(mb, user);
}

Test(step_declare, another_function_has_to_be_learned_anew)
{
    struct rig rig;
    open_undeclared(&rig, true);
    cr_assert_eq(rig_step(&rig, 8), REBATCH_OK);
    real_forward = rig.ops.forward_backward;
    rig.ops.forward_backward = another_forward;
    rig.learned[SCRIPT_FORWARD] = false;
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    cr_assert_eq(rig_step(&rig, 8), REBATCH_OK);
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_BACKWARD], 1);
    rig_close(&rig);
}

Test(step_declare, with_the_flag_the_first_oom_costs_one_microbatch_already)
{
    struct rig rig;
    open_undeclared(&rig, true);
    rig.ops.flags = REBATCH_DECLARES_MUTATION;
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    cr_assert_eq(rig_step(&rig, 16), REBATCH_OK);
    cr_assert_str_eq(script_trace(&rig.script), "z f0+8! f0+4~1 f4+4~1 f8+4 f12+4 u");
    rig_close(&rig);
}

Test(step_declare, mutating_outside_a_callback_says_nothing)
{
    struct rig rig;
    open_undeclared(&rig, true);
    rig.ops.flags = REBATCH_DECLARES_MUTATION;
    rebatch_mutating(NULL);
    rebatch_mutating(rig.rb);
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    cr_assert_eq(rig_step(&rig, 8), REBATCH_OK);
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_FORWARD], 1);
    rig_close(&rig);
}

Test(step_declare, mutating_in_one_callback_says_nothing_about_the_next)
{
    struct rig rig;
    open_undeclared(&rig, true);
    rig.ops.flags = REBATCH_DECLARES_MUTATION;
    cr_assert_eq(rig_step(&rig, 16), REBATCH_OK);
    script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_BEFORE, SCRIPT_POOL);
    script_fail(&rig.script, SCRIPT_UPDATE, 1, SCRIPT_BEFORE, SCRIPT_RETURN);
    cr_assert_eq(rig_step(&rig, 16), REBATCH_OK);
    cr_assert_str_eq(script_trace(&rig.script), "z f0+8 f8+8! f8+4~1 f12+4~1 u! u");
    rig_close(&rig);
}
