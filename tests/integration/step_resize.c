/* Owns the tests of resize: the buffers of a micro-batch size are made when the size changes, and
 * those of the size before are gone by then. Must not know the library's inside. */
#include <stdio.h>
#include <stdlib.h>

#include "rig.h"

/* ---- a trainer whose buffers are made by resize: two of 1 MiB a sample in all ---- */

struct trainer {
    rebatch_device *device;
    rebatch *rb;
    void *buffers[2];      /* not guarded */
    size_t room;           /* their samples */
    size_t made_bytes;     /* by resize, for each sample */
    size_t attempt_bytes;  /* by forward_backward, for each sample */
    size_t update_bytes;   /* by optimizer_step, in all */
    size_t counted, batch; /* samples in the accumulator */
    rebatch_status fails;  /* what the next forward_backward returns */
    bool dirty;            /* having declared that it changes something */
    unsigned level;        /* of lighten */
    unsigned made_level;   /* at which the buffers were made */
    bool has_lighten, has_resized;
    bool frees; /* resize frees what it made before, as code does that is its own owner */
    char trace[512];
};

static void note(struct trainer *t, const char *what, size_t count)
{
    const size_t length = strlen(t->trace);
    (void)snprintf(t->trace + length, sizeof t->trace - length, "%s%s%zu", length ? " " : "", what,
                   count);
}

/* Once resize has been called the buffers are there in every callback. */
static void check_buffers(const struct trainer *t)
{
    rebatch_pool *pool = rebatch_get_pool(t->rb);
    for (size_t i = 0; i < 2 && t->has_resized; i++) {
        size_t bytes = 0;
        cr_assert_eq(rebatch_pool_block_bytes(&bytes, pool, t->buffers[i]), REBATCH_OK,
                     "buffer %zu is gone: %s; %s", i, rebatch_last_error(), t->trace);
        cr_assert_geq(bytes, t->room * t->made_bytes / 2 >> t->made_level);
    }
}

static rebatch_status zero_grad(void *user)
{
    struct trainer *t = user;
    check_buffers(t);
    t->counted = 0;
    return REBATCH_OK;
}

static rebatch_status resize(size_t micro_batch, void *user)
{
    struct trainer *t = user;
    note(t, "r", micro_batch);
    t->has_resized = true;
    t->room = 0;
    t->made_level = t->level;
    if (t->frees) /* nor does it matter whether their memory is there still */
        OK(rebatch_pool_trim(rebatch_get_pool(t->rb), 0, NULL));
    for (size_t i = 0; i < 2 && t->frees; i++)
        OK(rebatch_pool_free(rebatch_get_pool(t->rb), t->buffers[i]));
    for (size_t i = 0; i < 2; i++)
        if (rebatch_pool_alloc(&t->buffers[i], rebatch_get_pool(t->rb),
                               micro_batch * t->made_bytes / 2 >> t->level, NULL, 0))
            return REBATCH_OOM;
    t->room = micro_batch;
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    void *block = NULL;
    check_buffers(t);
    cr_assert_leq(mb->count, t->room, "%zu samples in buffers for %zu: %s", mb->count, t->room,
                  t->trace);
    if (t->attempt_bytes &&
        rebatch_pool_alloc(&block, mb->pool, mb->count * t->attempt_bytes, mb->stream, 0)) {
        note(t, "!", mb->count);
        return REBATCH_OOM;
    }
    note(t, mb->probing ? "t" : "f", mb->count);
    const rebatch_status fails = t->fails;
    t->fails = REBATCH_OK;
    if (fails && !t->dirty)
        return fails;
    rebatch_mutating(t->rb);
    t->counted += mb->count;
    return fails ? fails : rebatch_pool_free(mb->pool, block);
}

static rebatch_status optimizer_step(void *user)
{
    struct trainer *t = user;
    void *block = NULL;
    check_buffers(t);
    if (t->update_bytes &&
        rebatch_pool_alloc(&block, rebatch_get_pool(t->rb), t->update_bytes, NULL, 0)) {
        note(t, "!u", t->update_bytes / MIB(1));
        return REBATCH_OOM;
    }
    rebatch_mutating(t->rb);
    cr_assert_eq(t->counted, t->batch, "%zu of %zu samples", t->counted, t->batch);
    return rebatch_pool_free(rebatch_get_pool(t->rb), block);
}

static rebatch_status lighten(unsigned level, void *user)
{
    struct trainer *t = user;
    if (level > 1)
        return REBATCH_E_UNSUPPORTED;
    note(t, "l", level);
    t->level = level;
    return REBATCH_OK;
}

static rebatch_step_ops ops_of(const struct trainer *t)
{
    return (rebatch_step_ops)OPS(zero_grad, forward_backward, optimizer_step,
                                 .lighten = t->has_lighten ? lighten : NULL,
                                 .flags = REBATCH_DECLARES_MUTATION, .resize = resize);
}

static void trainer_open(struct trainer *t, const rebatch_options *given, size_t limit_bytes)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    if (given)
        options = *given;
    if (!options.grow_after)
        options.grow_after = 2;
    memset(t, 0, sizeof *t);
    t->made_bytes = MIB(1);
    open_on_host(&t->device, &t->rb, limit_bytes, &options);
}

CLOSE_BOTH(trainer)

static rebatch_status run_step(struct trainer *t, size_t batch, rebatch_step_report *report)
{
    const rebatch_step_ops ops = ops_of(t);
    t->trace[0] = '\0';
    t->batch = batch;
    return rebatch_step(t->rb, &ops, batch, t, report);
}

static void expect_step(struct trainer *t, size_t batch, const char *trace)
{
    rebatch_step_report report;
    OK(run_step(t, batch, &report));
    cr_expect_str_eq(t->trace, trace);
}

/* ---- when it is called ---- */

Test(step_resize, it_is_called_before_the_first_attempt_and_when_the_size_changes)
{
    OPEN(trainer, t, &OPTIONS(.micro_start = 64), MIB(80));
    expect_step(&t, 128, "r64 f64 f64");
    expect_step(&t, 128, "f64 f64");
    cr_expect_eq(live_bytes_of(t.rb), MIB(64));
}

Test(step_resize, a_rest_and_a_smaller_batch_use_the_buffers_that_are_there)
{
    OPEN(trainer, t, &OPTIONS(.micro_start = 32), MIB(80));
    expect_step(&t, 72, "r32 f32 f32 f8");
    expect_step(&t, 20, "f20");
    expect_step(&t, 72, "f32 f32 f8");
}

Test(step_resize, a_larger_batch_has_larger_buffers)
{
    OPEN(trainer, t, NULL, MIB(80));
    expect_step(&t, 20, "r20 f20");
    expect_step(&t, 64, "r64 f64");
    expect_step(&t, 20, "f20");
}

/* The first two samples cost 8, the others 1. */
static uint64_t cost_of_two_long(size_t first, size_t count, void *user)
{
    (void)user;
    return count + 7 * (first < 2 ? (first + count < 2 ? count : 2 - first) : 0);
}

Test(step_resize, by_cost_buffers_are_made_for_the_most_samples_of_any_cut)
{
    OPEN(trainer, t, &OPTIONS(.micro_start = 1), MIB(80));
    rebatch_step_ops ops = ops_of(&t);
    ops.cost = cost_of_two_long;
    t.batch = 20;
    OK(rebatch_step(t.rb, &ops, 20, &t, NULL));
    cr_expect_str_eq(t.trace, "r8 f1 f1 f8 f8 f2");
}

/* ---- memory ---- */

Test(step_resize, the_buffers_of_the_old_size_are_gone_before_the_new_ones_are_made)
{
    OPEN(trainer, t, &OPTIONS(.micro_start = 64), MIB(80));
    expect_step(&t, 64, "r64 f64");
    t.fails = REBATCH_OOM;
    expect_step(&t, 64, "f64 r32 f32 f32");
    cr_expect_eq(live_bytes_of(t.rb), MIB(32));
    expect_step(&t, 64, "f32 f32");
    expect_step(&t, 64, "f32 f32");
    expect_step(&t, 64, "r64 f64"); /* 64 + 32 would be too much */
}

/* They are freed already, and the call is ignored. */
Test(step_resize, a_free_of_the_old_buffers_is_ignored)
{
    OPEN(trainer, t, NULL, MIB(80));
    t.frees = true;
    expect_step(&t, 4, "r4 f4");
    expect_step(&t, 8, "r8 f8");
    t.fails = REBATCH_OOM;
    expect_step(&t, 8, "f8 r4 f4 f4");
    cr_expect_eq(live_bytes_of(t.rb), MIB(4));
}

Test(step_resize, a_resize_that_fails_is_called_for_a_smaller_size)
{
    rebatch_step_report report;
    OPEN(trainer, t, NULL, MIB(40));
    OK(run_step(&t, 128, &report));
    cr_expect_str_eq(t.trace, "r128 r64 r32 f32 f32 f32 f32");
    cr_expect_eq(report.ooms, 2);
    cr_expect_eq(report.ooms_in[REBATCH_PHASE_RESIZE], 2);
    cr_expect_eq(report.attempts, 4);
    cr_expect_eq(report.redone_samples, 0);
    cr_expect_eq(live_bytes_of(t.rb), MIB(32),
                 "what the calls that failed allocated is taken back");
}

Test(step_resize, buffers_and_attempt_together_must_fit)
{
    OPEN(trainer, t, &OPTIONS(.micro_start = 64), MIB(100));
    t.attempt_bytes = MIB(1);
    expect_step(&t, 64, "r64 !64 r32 f32 f32");
    rebatch_step_report report; /* 128 MiB are known to be too much for 100 */
    for (int i = 0; i < 8; i++) {
        OK(run_step(&t, 64, &report));
        cr_expect_str_eq(t.trace, "f32 f32");
        cr_expect_eq(report.ooms, 0);
    }
}

/* What admission refuses it refuses with the buffers counted once. */
Test(step_resize, admission_counts_the_buffers_once)
{
    rebatch_step_report report;
    OPEN(trainer, t, &OPTIONS(.micro_start = 64), MIB(140));
    t.attempt_bytes = MIB(1);
    expect_step(&t, 128, "r64 f64 f64");
    expect_step(&t, 128, "f64 f64");
    OK(rebatch_pool_set_limit(rebatch_get_pool(t.rb), MIB(100)));
    OK(run_step(&t, 128, &report));
    cr_expect_str_eq(t.trace, "r32 f32 f32 f32 f32");
    cr_expect_eq(report.ooms_in[REBATCH_PHASE_ADMISSION], 1);
    cr_expect_eq(report.ooms, 1);
}

Test(step_resize, an_update_that_needs_memory_makes_the_buffers_smaller)
{
    rebatch_step_report report;
    OPEN(trainer, t, NULL, MIB(80));
    t.update_bytes = MIB(30);
    OK(run_step(&t, 64, &report));
    cr_expect_str_eq(t.trace, "r64 f64 !u30 r32");
    cr_expect_eq(report.ooms_in[REBATCH_PHASE_OPTIMIZER], 1);
    cr_expect_eq(report.redone_samples, 0);
    expect_step(&t, 64, "f32 f32");
}

/* The buffers of 32 stand in the way of a rest of 8, which fits with smaller ones. */
Test(step_resize, a_rest_that_does_not_fit_beside_large_buffers_has_smaller_ones)
{
    OPEN(trainer, t, &OPTIONS(.micro_start = 32, .growth = REBATCH_OFF), MIB(80));
    t.attempt_bytes = MIB(1);
    expect_step(&t, 32, "r32 f32");
    OK(rebatch_pool_set_limit(rebatch_get_pool(t.rb), MIB(36)));
    expect_step(&t, 8, "!8 r8 f8");
    expect_step(&t, 32, "r16 f16 f16");
}

/* ---- what is undone ---- */

Test(step_resize, a_batch_that_runs_again_keeps_its_buffers)
{
    OPEN(trainer, t, &OPTIONS(.micro_start = 32), MIB(80));
    expect_step(&t, 64, "r32 f32 f32");
    t.fails = REBATCH_OOM;
    t.dirty = true;
    expect_step(&t, 64, "f32 r16 f16 f16 f16 f16");
}

Test(step_resize, a_step_that_fails_leaves_no_buffers_that_it_made)
{
    rebatch_step_report report;
    OPEN(trainer, t, NULL, MIB(80));
    t.made_bytes = MIB(100);
    cr_assert_eq(run_step(&t, 4, &report), REBATCH_E_EXHAUSTED);
    cr_expect_str_eq(t.trace, "r4 r2 r1");
    SAYS("out of memory in resize, which needs at least 100 MiB, with 80.0 MiB available");
    cr_expect_eq(live_bytes_of(t.rb), 0);
    t.made_bytes = MIB(1);
    t.has_resized = false;
    t.fails = REBATCH_E_USER;
    cr_assert_eq(run_step(&t, 4, &report), REBATCH_E_USER);
    cr_expect_eq(live_bytes_of(t.rb), 0);
    expect_step(&t, 4, "r1 f1 f1 f1 f1");
    t.fails = REBATCH_E_USER;
    cr_assert_eq(run_step(&t, 4, &report), REBATCH_E_USER);
    cr_expect_eq(live_bytes_of(t.rb), MIB(1), "those of before are there");
    expect_step(&t, 4, "f1 f1 f1 f1");
}

Test(step_resize, what_it_changes_in_guarded_state_stays)
{
    OPEN(trainer, t, &OPTIONS(.micro_start = 64), MIB(80));
    OK(rebatch_guard(t.rb, t.buffers, sizeof t.buffers, REBATCH_GUARD_HOST));
    OK(rebatch_guard(t.rb, &t.room, sizeof t.room, REBATCH_GUARD_HOST));
    expect_step(&t, 64, "r64 f64");
    t.fails = REBATCH_OOM;
    expect_step(&t, 64, "f64 r32 f32 f32");
    t.fails = REBATCH_OOM;
    t.dirty = true;
    OK(rebatch_pool_trim(rebatch_get_pool(t.rb), 0, NULL)); /* no retry */
    expect_step(&t, 64, "f32 r16 f16 f16 f16 f16");
    t.fails = REBATCH_E_USER;
    rebatch_step_report report;
    cr_assert_eq(run_step(&t, 64, &report), REBATCH_E_USER);
    expect_step(&t, 64, "f16 f16 f16 f16");
}

Test(step_resize, a_lighter_level_has_buffers_of_its_own)
{
    OPEN(trainer, t, &OPTIONS(.micro_smallest = 64, .growth = REBATCH_OFF), MIB(40));
    t.has_lighten = true;
    expect_step(&t, 64, "r64 l1 r64 f64");
    expect_step(&t, 64, "f64");
}

/* ---- who chooses the size ---- */

Test(step_resize, a_probe_finds_the_size_and_leaves_the_session_as_it_was)
{
    rebatch_probe_report report;
    OPEN(trainer, t, NULL, MIB(100));
    t.attempt_bytes = MIB(1);
    const rebatch_step_ops ops = ops_of(&t);
    OK(rebatch_probe(t.rb, &ops, 128, &t, NULL, &report));
    cr_expect_eq(report.size, 50);
    cr_expect_eq(report.ooms, 0, "%s", t.trace);
    rebatch_step_report step;
    OK(run_step(&t, 128, &step));
    cr_expect_str_eq(t.trace, "r50 f50 f50 f28");
    cr_expect_eq(step.ooms, 0);
    OK(rebatch_probe(t.rb, &ops, 128, &t, NULL, &report));
    cr_expect_eq(report.size, 50, "the buffers of the steps before do not count");
    expect_step(&t, 128, "r50 f50 f50 f28");
}

Test(step_resize, a_session_that_learns_counts_the_buffers)
{
    OPEN(trainer, t, &OPTIONS(.learn = REBATCH_ON), MIB(100));
    t.attempt_bytes = MIB(1);
    rebatch_step_report report;
    for (int i = 0; i < 4; i++) {
        OK(run_step(&t, 200, &report));
        cr_expect_eq(report.ooms, 0, "step %d: %s", i, t.trace);
    }
    cr_expect_str_eq(t.trace, "f50 f50 f50 f50");
}

Test(step_resize, fit_and_growth_go_by_buffers_and_attempt)
{
    rebatch_probe_report probe;
    OPEN(trainer, t, &OPTIONS(.on_oom = REBATCH_ON_OOM_FIT), MIB(100));
    t.attempt_bytes = MIB(1);
    const rebatch_step_ops ops = ops_of(&t);
    OK(rebatch_probe(t.rb, &ops, 100, &t, NULL, &probe));
    expect_step(&t, 100, "r50 f50 f50");
    OK(rebatch_pool_set_limit(rebatch_get_pool(t.rb), MIB(61)));
    expect_step(&t, 100, "r30 f30 f30 f30 f10");
    OK(rebatch_pool_set_limit(rebatch_get_pool(t.rb), MIB(100)));
    expect_step(&t, 100, "f30 f30 f30 f10");
    expect_step(&t, 100, "f30 f30 f30 f10");
    expect_step(&t, 100, "r50 f50 f50");
}

/* ---- under OOMs at random ---- */

/* The callbacks look after their buffers, and after the samples. Limits from 20 to 100 MiB. */
static void train_at_random(unsigned seed, bool learns)
{
    rebatch_step_report report;
    char text[16];
    (void)snprintf(text, sizeof text, "%u", seed);
    setenv("REBATCH_RUN_SEED", text, 1);
    OPEN(trainer, t, &OPTIONS(.learn = learns ? REBATCH_ON : REBATCH_OFF, .grow_after = 1),
         MIB(100));
    t.attempt_bytes = seed % 3 * MIB(1) / 2;
    t.update_bytes = seed % 5 * MIB(1);
    t.has_lighten = seed % 2;
    for (unsigned i = 0; i < 12; i++) {
        const size_t limit_bytes = (20 + (seed * 7 + i * 31) % 81) * MIB(1);
        OK(rebatch_pool_set_limit(rebatch_get_pool(t.rb), limit_bytes));
        t.dirty = i % 2;
        const bool fails = i % 4 == 1;
        t.fails = fails ? REBATCH_OOM : REBATCH_OK;
        const rebatch_status status = run_step(&t, 1 + (seed * 13 + i * 17) % 90, &report);
        const uint64_t live = live_bytes_of(t.rb);
        cr_assert(status == REBATCH_OK || (fails && status == REBATCH_E_EXHAUSTED),
                  "seed %u, step %u: %s: %s", seed, i, rebatch_last_error(), t.trace);
        cr_assert(live == (t.room * MIB(1) / 2 >> t.made_level) * 2 || (status && live == 0),
                  "seed %u, step %u: %ju bytes are live: %s", seed, i, (uintmax_t)live, t.trace);
        t.has_resized &= live > 0;
    }
}

Test(step_resize, buffers_are_there_and_every_sample_counts_once_under_random_ooms)
{
    setenv("REBATCH_RUN_OOM_CHANCE", "10%", 1);
    for (unsigned seed = 1; seed <= 300; seed++)
        train_at_random(seed, seed % 4 == 0);
}

/* ---- a limit that moves ---- */

/* The buffers hold what the limit is less; nothing asks for memory, so no OOM would tell. */
Test(step_resize, a_lower_limit_makes_the_buffers_smaller_and_a_higher_one_larger_again)
{
    rebatch_step_report report;
    OPEN(trainer, t, NULL, MIB(100));
    expect_step(&t, 32, "r32 f32");
    OK(rebatch_pool_set_limit(rebatch_get_pool(t.rb), MIB(20)));
    OK(run_step(&t, 32, &report));
    cr_expect_str_eq(t.trace, "r16 f16 f16");
    cr_expect_eq(report.micro_before, 32);
    cr_expect_eq(report.micro_after, 16);
    cr_expect_eq(report.ooms_in[REBATCH_PHASE_RESIZE], 1);
    cr_expect_leq(live_bytes_of(t.rb), MIB(20));
    for (int i = 0; i < 4; i++)
        expect_step(&t, 32, "f16 f16");
    OK(rebatch_pool_set_limit(rebatch_get_pool(t.rb), 0));
    for (int i = 0; i < 4 && t.room < 32; i++)
        OK(run_step(&t, 32, &report));
    cr_expect_eq(t.room, 32);
}

/* Where nothing smaller is allowed, the step runs as it did. */
Test(step_resize, a_limit_below_the_smallest_buffers_leaves_them)
{
    OPEN(trainer, t, &OPTIONS(.micro_smallest = 32), MIB(100));
    expect_step(&t, 32, "r32 f32");
    OK(rebatch_pool_set_limit(rebatch_get_pool(t.rb), MIB(20)));
    expect_step(&t, 32, "f32");
}
