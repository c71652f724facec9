/* Owns the tests of steps that are written in place, by REBATCH_STEP() and by the functions under
 * it. That all rules of a step's callbacks hold for the blocks, step_random sees to. Must not know
 * the library's inside. */
#include <stdio.h>
#include <stdlib.h>

#include "rig.h"

#define BATCH 24
#define STEPS 4

/* Each sample takes memory, draws a number, and moves the parameter by a sum in its order. */
struct trainer {
    rebatch_device *device;
    rebatch *rb;
    uint64_t random; /* guarded */
    double sum, parameter;
    void *moment;  /* guarded; allocated by the first update */
    int leaves_at; /* the block is left at this sample */
    int updates;
};

CLOSE_BOTH(trainer)

static void trainer_open(struct trainer *t, size_t capacity_bytes, const rebatch_options *options)
{
    *t = (struct trainer){.leaves_at = -1, .random = 1};
    open_on_host(&t->device, &t->rb, capacity_bytes, options);
    OK(rebatch_guard(t->rb, &t->random, sizeof t->random, REBATCH_GUARD_HOST));
    OK(rebatch_guard(t->rb, &t->moment, sizeof t->moment, REBATCH_GUARD_HOST));
}

static double draw(struct trainer *t)
{
    t->random = t->random * 6364136223846793005u + 1442695040888963407u;
    return (double)(t->random >> 40);
}

static void train_on(struct trainer *t, size_t first, size_t count)
{
    double *const drawn = rebatch_alloc_or_escape(t->rb, count * MIB(1));
    void *half;
    for (size_t i = 0; i < count; i++)
        drawn[i] = draw(t);
    half = rebatch_alloc_or_escape(t->rb, count * MIB(1) / 2);
    rebatch_mutating(t->rb);
    for (size_t i = 0; i < count; i++)
        t->sum = t->sum * 0.5 + drawn[i] + (double)(first + i);
    OK(rebatch_free(t->rb, half));
    OK(rebatch_free(t->rb, drawn));
}

static void update(struct trainer *t)
{
    if (!t->moment)
        t->moment = rebatch_alloc_or_escape(t->rb, MIB(1));
    rebatch_mutating(t->rb);
    t->parameter += t->sum;
    t->updates++;
}

static rebatch_status step(struct trainer *t, rebatch_step_report *report)
{
    REBATCH_STEP (t->rb, BATCH, part, REBATCH_DECLARES_MUTATION) {
        if (part.first == 0)
            t->sum = 0;
        train_on(t, part.first, part.count);
        if (t->leaves_at >= 0 && part.first + part.count > (size_t)t->leaves_at)
            break;
    }
    REBATCH_UPDATE (t->rb)
        update(t);
    return rebatch_step_end(t->rb, report);
}

/* One that returns out of its block. */
static int returns(struct trainer *t)
{
    REBATCH_STEP (t->rb, BATCH, part, REBATCH_DECLARES_MUTATION) {
        train_on(t, part.first, part.count);
        return (int)part.count;
    }
    return 0;
}

static double train(struct trainer *t, int steps)
{
    for (int i = 0; i < steps; i++)
        OK(step(t, NULL));
    return t->parameter;
}

Test(step_in_place, memory_for_eight_samples_gives_the_bits_of_memory_for_all)
{
    rebatch_step_report report;
    OPEN(trainer, much, MIB(64), NULL);
    OPEN(trainer, little, MIB(14), NULL);
    const double expected = train(&much, STEPS);
    OK(step(&little, &report));
    cr_expect_eq(report.micro, 6);
    cr_expect_gt(report.ooms, 0);
    cr_expect_eq(train(&little, STEPS - 1), expected);
    cr_expect_eq(little.updates, STEPS);
    cr_expect_eq(live_bytes_of(little.rb), MIB(1), "the moment, and nothing else");
}

/* All requests of the first two steps, in the blocks of samples and of the update. */
Test(step_in_place, a_request_that_fails_changes_no_bit)
{
    OPEN(trainer, plain, MIB(64), NULL);
    const double expected = train(&plain, STEPS);
    for (int nth = 1; nth <= 5; nth++) {
        char number[16];
        (void)snprintf(number, sizeof number, "%d", nth);
        (void)setenv("REBATCH_RUN_OOM", number, 1);
        OPEN(trainer, t, MIB(64), NULL);
        cr_expect_eq(train(&t, STEPS), expected, "request %d", nth);
    }
}

Test(step_in_place, a_block_that_is_left_ends_the_step_and_undoes_it)
{
    OPEN(trainer, t, MIB(64), &OPTIONS(.micro_start = 8, .growth = REBATCH_OFF));
    OPEN(trainer, other, MIB(64), NULL);
    t.leaves_at = 12;
    FAILS(step(&t, NULL), REBATCH_E_STATE,
          "step 0: a block was left by break, return, goto or an exception");
    cr_expect_eq(t.updates, 0);
    cr_expect_eq(t.random, 1, "it is guarded");
    cr_expect_eq(live_bytes_of(t.rb), 0);
    t.leaves_at = -1;
    cr_expect_eq(train(&t, 2), train(&other, 2));

    const uint64_t random = t.random;
    cr_expect_eq(returns(&t), 8);
    SAYS("step 2: a block was left by break, return, goto or an exception");
    FAILS(rebatch_step_end(t.rb, NULL), REBATCH_E_STATE, "step 2: a block was left by break");
    cr_expect_eq(t.random, random);
    cr_expect_not(rebatch_can_escape(t.rb), "its frame is gone");
    cr_expect_eq(train(&t, 1), train(&other, 1));
}

static rebatch_status step_whose_update_fails(struct trainer *t, rebatch_status status, bool late)
{
    REBATCH_STEP (t->rb, BATCH, part, REBATCH_DECLARES_MUTATION) {
        if (part.first == 0)
            t->sum = 0;
        train_on(t, part.first, part.count);
    }
    REBATCH_UPDATE (t->rb) {
        if (late)
            update(t);
        OK(rebatch_escape(t->rb, status));
    }
    return rebatch_step_end(t->rb, NULL);
}

Test(step_in_place, an_update_that_fails_is_undone_or_torn)
{
    OPEN(trainer, t, MIB(64), NULL);
    FAILS(step_whose_update_fails(&t, REBATCH_E_USER, false), REBATCH_E_USER,
          "step 0: optimizer_step returned 1000");
    cr_expect_eq(t.random, 1);
    cr_expect_eq(live_bytes_of(t.rb), 0);
    cr_expect_eq(step_whose_update_fails(&t, REBATCH_OOM, false), REBATCH_E_EXHAUSTED);
    cr_expect_eq(t.random, 1);
    cr_expect_eq(step_whose_update_fails(&t, REBATCH_OOM, true), REBATCH_E_TORN);
    cr_expect_eq(t.updates, 1);
}

/* Its gradients stay, and the update is the program's. */
Test(step_in_place, a_step_without_an_update_is_done_when_all_samples_are_in)
{
    rebatch_step_report report;
    OPEN(trainer, t, MIB(14), NULL);
    REBATCH_STEP (t.rb, BATCH, part, REBATCH_DECLARES_MUTATION)
        train_on(&t, part.first, part.count);
    OK(rebatch_step_end(t.rb, &report));
    cr_expect_eq(report.microbatches, 4);
    cr_expect_eq(t.updates, 0);
    OK(step(&t, &report));
    cr_expect_eq(report.step, 1);
}

/* ---- what is refused ---- */

static rebatch_status lasts(const rebatch_microbatch *mb, void *user)
{
    (void)mb;
    (void)user;
    return REBATCH_OK;
}

Test(step_in_place, calls_in_another_order_are_refused)
{
    OPEN(trainer, t, MIB(64), &OPTIONS(.micro_start = 8));
    FAILS(rebatch_step_end(t.rb, NULL), REBATCH_E_STATE, "expected rebatch_step_begin()");
    FAILS(rebatch_step_end(NULL, NULL), REBATCH_E_INVALID, "rb is NULL");
    cr_expect_null(rebatch_step_next(t.rb, REBATCH_OK));
    cr_expect_not(rebatch_step_updates(t.rb, REBATCH_OK));

    FAILS(rebatch_step_begin(t.rb, NULL, 0, NULL), REBATCH_E_INVALID, "batch is 0");
    FAILS(rebatch_step_end(t.rb, NULL), REBATCH_E_INVALID, "batch is 0");

    OK(rebatch_step_begin(t.rb, NULL, BATCH, NULL));
    FAILS(rebatch_step_begin(t.rb, NULL, BATCH, NULL), REBATCH_E_STATE,
          "before the last step had ended: expected rebatch_step_end()");
    cr_expect_not_null(rebatch_step_next(t.rb, REBATCH_OK));
    FAILS(rebatch_escape(t.rb, REBATCH_OOM), REBATCH_E_STATE, "expected REBATCH_STEP()");
    FAILS(rebatch_step_begin(t.rb, NULL, BATCH, NULL), REBATCH_E_STATE, "from within a callback");
    cr_expect_not(rebatch_step_updates(t.rb, REBATCH_OK));
    FAILS(rebatch_step_end(t.rb, NULL), REBATCH_E_STATE, "before all samples had run");

    OK(rebatch_step_begin(t.rb, NULL, BATCH, NULL));
    FAILS(rebatch_step_end(t.rb, NULL), REBATCH_E_STATE, "before the step was done");
}

Test(step_in_place, a_step_whose_end_is_left_out_is_told_by_the_next_one)
{
    OPEN(trainer, t, MIB(64), &OPTIONS(.micro_start = 8));
    REBATCH_STEP (t.rb, BATCH, part, 0)
        break;
    REBATCH_STEP (t.rb, BATCH, part, 0)
        cr_expect(false, "a step began after one whose failure nobody has heard of");
    FAILS(rebatch_step_end(t.rb, NULL), REBATCH_E_STATE, "step 0: a block was left by break");
    OK(rebatch_step_begin(t.rb, NULL, BATCH, NULL));
    FAILS(rebatch_step_end(t.rb, NULL), REBATCH_E_STATE, "before the step was done");
}

/* The update is a block, the program's own, or a callback. */
enum update_form { IN_A_BLOCK, BELOW, BY_CALLBACK };

static rebatch_status update_of(void *user)
{
    update((struct trainer *)user);
    return REBATCH_OK;
}

static double trained_by(enum update_form form, bool says_end)
{
    rebatch_step_ops ops = REBATCH_STEP_OPS_INIT;
    OPEN(trainer, t, MIB(24), NULL);
    ops.flags = REBATCH_DECLARES_MUTATION;
    ops.optimizer_step = form == BY_CALLBACK ? update_of : NULL;
    for (int i = 0; i < STEPS; i++) {
        REBATCH_STEP_WITH (t.rb, &ops, BATCH, &t, part) {
            if (part.first == 0)
                t.sum = 0;
            train_on(&t, part.first, part.count);
        }
        if (form == IN_A_BLOCK) {
            REBATCH_UPDATE (t.rb)
                update(&t);
        }
        if (says_end || i + 1 == STEPS)
            OK(rebatch_step_end(t.rb, NULL));
        if (form == BELOW)
            t.parameter += t.sum;
    }
    return t.parameter;
}

Test(step_in_place, steps_that_are_done_need_no_end)
{
    for (int form = IN_A_BLOCK; form <= BY_CALLBACK; form++) {
        const double parameter = trained_by((enum update_form)form, true);
        cr_expect_neq(parameter, 0);
        cr_expect_eq(trained_by((enum update_form)form, false), parameter, "form %d", form);
    }
}

Test(step_in_place, what_needs_callbacks_is_refused)
{
    rebatch_step_ops ops = REBATCH_STEP_OPS_INIT;
    OPEN(trainer, t, MIB(64), NULL);
    ops.forward_backward = lasts;
    FAILS(rebatch_step_begin(t.rb, &ops, BATCH, NULL), REBATCH_E_INVALID,
          "ops.forward_backward is set: expected NULL");
}

static void check_it(void *user)
{
    struct trainer t;
    (void)user;
    (void)setenv("REBATCH_CHECK", "1", 1);
    trainer_open(&t, MIB(64), NULL);
    (void)step(&t, NULL);
}

Test(step_in_place, a_check_says_that_it_needs_callbacks)
{
    char text[4096];
    cr_expect_neq(output_of(check_it, NULL, 1, text, sizeof text), 0);
    HAS(text, "REBATCH_E_UNSUPPORTED");
    HAS(text, "written in place, so its blocks cannot be called");
}
