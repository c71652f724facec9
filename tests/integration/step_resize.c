/* Owns the tests of resize: when buffers are made, that those of the size before are gone by then,
 * and that it may free them at any moment of the call. Seeds of what is random: 1 to 300.
 * Must not know the library's inside. */
#include <stdio.h>
#include <stdlib.h>

#include "rig.h"

#define BUFFERS 2
#define MOST 256
#define MARKS 8 /* of each buffer */

/* When resize frees what it made before. */
enum manner {
    FREES_NOTHING,
    FREES_FIRST,
    FREES_EACH_BEFORE, /* each before the new one is made */
    FREES_EACH_AFTER   /* each after the new one is made, as realloc() does */
};

struct trainer {
    rebatch_device *device;
    rebatch *rb;
    void *buffers[BUFFERS]; /* of a quarter, and of three quarters */
    size_t room;            /* their samples */
    size_t made_bytes;      /* by resize, for each sample */
    size_t attempt_bytes;   /* by an attempt, for each sample */
    size_t update_bytes;    /* by the update, in all */
    unsigned ran[MOST];     /* how often each sample counted */
    size_t batch;
    rebatch_status fails; /* what the next attempt returns */
    bool dirty;           /* having declared that it changes something */
    unsigned level;       /* of lighten */
    unsigned made_level;  /* at which the buffers were made */
    bool has_lighten, has_resized;
    enum manner manner;
    bool backwards;   /* the last buffer first */
    bool forgets;     /* the pointer is NULL once its buffer is freed */
    bool has_scratch; /* resize allocates a block, and frees it */
    size_t fails_in;  /* so does its so-manieth allocation, from 1, once an old buffer is freed */
    unsigned id;
    char trace[512];
};

static void note(struct trainer *t, const char *what, size_t count)
{
    const size_t length = strlen(t->trace);
    (void)snprintf(t->trace + length, sizeof t->trace - length, "%s%s%zu", length ? " " : "", what,
                   count);
}

static rebatch_pool *pool_of(const struct trainer *t)
{
    return rebatch_get_pool(t->rb);
}

static void give_back(const struct trainer *t, void *block)
{
    OK(rebatch_pool_free(pool_of(t), block));
}

static size_t bytes_of(const struct trainer *t, size_t samples, size_t i)
{
    return (samples * t->made_bytes >> t->made_level) / 4 * (i ? 3 : 1);
}

static uint64_t buffer_bytes(const struct trainer *t)
{
    return bytes_of(t, t->room, 0) + bytes_of(t, t->room, 1);
}

static void mark(void *block, size_t bytes, unsigned char value)
{
    for (size_t k = 0; k < MARKS; k++)
        ((unsigned char *)block)[bytes / MARKS * k] = value;
}

static void check_block(const struct trainer *t, void *block, size_t bytes, unsigned char value)
{
    size_t has = 0;
    cr_assert_eq(rebatch_pool_block_bytes(&has, pool_of(t), block), REBATCH_OK, "%s; %s",
                 rebatch_last_error(), t->trace);
    cr_assert_geq(has, bytes);
    for (size_t k = 0; k < MARKS; k++)
        cr_assert_eq(((unsigned char *)block)[bytes / MARKS * k], value, "overwritten: %s",
                     t->trace);
}

static unsigned char mark_of(const struct trainer *t, size_t i)
{
    return (unsigned char)(16 * t->id + i + 1);
}

/* Once resize has been called the buffers are there in every callback. */
static void check_buffers(const struct trainer *t)
{
    for (size_t i = 0; i < BUFFERS && t->has_resized; i++)
        check_block(t, t->buffers[i], bytes_of(t, t->room, i), mark_of(t, i));
}

/* NULL: out of memory. */
static void *take(const struct trainer *t, size_t bytes)
{
    void *block = NULL;
    return rebatch_pool_alloc(&block, pool_of(t), bytes, NULL, 0) ? NULL : block;
}

static rebatch_status make(struct trainer *t, size_t samples, size_t i)
{
    void *const old = t->buffers[i];
    if (t->manner == FREES_EACH_BEFORE)
        give_back(t, old);
    if (t->forgets && t->manner != FREES_EACH_AFTER)
        t->buffers[i] = NULL;
    const size_t bytes = bytes_of(t, samples, i);
    const bool fails = t->fails_in && --t->fails_in == 0;
    void *const block = fails ? NULL : take(t, bytes);
    if (!block)
        return REBATCH_OOM;
    mark(block, bytes, mark_of(t, i));
    if (t->manner == FREES_EACH_AFTER)
        give_back(t, old);
    t->buffers[i] = block;
    return REBATCH_OK;
}

static rebatch_status resize(size_t micro_batch, void *user)
{
    struct trainer *t = user;
    note(t, "r", micro_batch);
    t->has_resized = true;
    t->room = 0;
    t->made_level = t->level;
    for (size_t i = 0; i < BUFFERS && t->manner == FREES_FIRST; i++)
        give_back(t, t->buffers[i]);
    if (t->has_scratch) {
        void *const scratch = take(t, MIB(1));
        if (!scratch)
            return REBATCH_OOM;
        give_back(t, scratch);
    }
    for (size_t k = 0; k < BUFFERS; k++)
        if (make(t, micro_batch, t->backwards ? BUFFERS - 1 - k : k))
            return REBATCH_OOM;
    t->room = micro_batch;
    return REBATCH_OK;
}

static rebatch_status zero_grad(void *user)
{
    struct trainer *t = user;
    check_buffers(t);
    memset(t->ran, 0, sizeof t->ran);
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    check_buffers(t);
    cr_assert_leq(mb->count, t->room, "%zu samples in buffers for %zu: %s", mb->count, t->room,
                  t->trace);
    void *const block = t->attempt_bytes ? take(t, mb->count * t->attempt_bytes) : NULL;
    const bool is_oom = t->attempt_bytes && !block;
    note(t, is_oom ? "!" : mb->probing ? "t" : "f", mb->count);
    if (is_oom)
        return REBATCH_OOM;
    const rebatch_status fails = t->fails;
    t->fails = REBATCH_OK;
    if (fails && !t->dirty)
        return fails;
    rebatch_mutating(t->rb);
    for (size_t i = mb->first; i < mb->first + mb->count; i++)
        t->ran[i]++;
    return fails ? fails : rebatch_pool_free(mb->pool, block);
}

static rebatch_status optimizer_step(void *user)
{
    struct trainer *t = user;
    check_buffers(t);
    void *const block = t->update_bytes ? take(t, t->update_bytes) : NULL;
    if (t->update_bytes && !block) {
        note(t, "!u", t->update_bytes / MIB(1));
        return REBATCH_OOM;
    }
    rebatch_mutating(t->rb);
    for (size_t i = 0; i < t->batch; i++)
        cr_assert_eq(t->ran[i], 1, "sample %zu counted %u times", i, t->ran[i]);
    return rebatch_pool_free(pool_of(t), block);
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
    *t = (struct trainer){.made_bytes = MIB(1)};
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
    OK(run_step(t, batch, NULL));
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
    OK(rebatch_pool_set_limit(pool_of(&t), MIB(100)));
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
    OK(rebatch_pool_set_limit(pool_of(&t), MIB(36)));
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
    OK(rebatch_pool_trim(pool_of(&t), 0, NULL)); /* no retry */
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
    OK(rebatch_pool_set_limit(pool_of(&t), MIB(61)));
    expect_step(&t, 100, "r30 f30 f30 f30 f10");
    OK(rebatch_pool_set_limit(pool_of(&t), MIB(100)));
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
        OK(rebatch_pool_set_limit(pool_of(&t), limit_bytes));
        t.dirty = i % 2;
        const bool fails = i % 4 == 1;
        t.fails = fails ? REBATCH_OOM : REBATCH_OK;
        const rebatch_status status = run_step(&t, 1 + (seed * 13 + i * 17) % 90, &report);
        const uint64_t live = live_bytes_of(t.rb);
        cr_assert(status == REBATCH_OK || (fails && status == REBATCH_E_EXHAUSTED),
                  "seed %u, step %u: %s: %s", seed, i, rebatch_last_error(), t.trace);
        cr_assert(live == buffer_bytes(&t) || (status && live == 0),
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
    OK(rebatch_pool_set_limit(pool_of(&t), MIB(20)));
    OK(run_step(&t, 32, &report));
    cr_expect_str_eq(t.trace, "r16 f16 f16");
    cr_expect_eq(report.micro_before, 32);
    cr_expect_eq(report.micro_after, 16);
    cr_expect_eq(report.ooms_in[REBATCH_PHASE_RESIZE], 1);
    cr_expect_leq(live_bytes_of(t.rb), MIB(20));
    for (int i = 0; i < 4; i++)
        expect_step(&t, 32, "f16 f16");
    OK(rebatch_pool_set_limit(pool_of(&t), 0));
    for (int i = 0; i < 4 && t.room < 32; i++)
        OK(run_step(&t, 32, &report));
    cr_expect_eq(t.room, 32);
}

/* Where nothing smaller is allowed, the step runs as it did. */
Test(step_resize, a_limit_below_the_smallest_buffers_leaves_them)
{
    OPEN(trainer, t, &OPTIONS(.micro_smallest = 32), MIB(100));
    expect_step(&t, 32, "r32 f32");
    OK(rebatch_pool_set_limit(pool_of(&t), MIB(20)));
    expect_step(&t, 32, "f32");
}

/* ---- old buffers are freed at any moment of resize ---- */

/* The size falls after an OOM and rises with the batch, back and forth. */
static void resize_often(struct trainer *t)
{
    static const size_t batches[] = {4, 16, 8, 32, 32, 16, 64};
    for (size_t i = 0; i < sizeof batches / sizeof *batches; i++) {
        t->fails = i % 2 ? REBATCH_OOM : REBATCH_OK;
        t->fails_in = i % 3 ? i % 3 + 1 : 0;
        OK(run_step(t, batches[i], NULL));
        cr_expect_eq(live_bytes_of(t->rb), buffer_bytes(t), "%zu samples: %s", t->room, t->trace);
    }
}

/* In each manner, the first buffer first or the last; with pointers that are guarded; and with a
 * block of the call itself, which is free once it is freed. */
Test(step_resize, old_buffers_may_be_freed_at_any_moment)
{
    for (int way = 0; way < 32; way++) {
        OPEN(trainer, t, &OPTIONS(.grow_after = 100), MIB(400));
        t.manner = (enum manner)(way / 2 % 4);
        t.backwards = way % 2;
        t.has_scratch = way / 8 % 2;
        if (way / 16)
            OK(rebatch_guard(t.rb, t.buffers, sizeof t.buffers, REBATCH_GUARD_HOST));
        resize_often(&t);
    }
}

/* Their addresses cost no memory: the device has what one size needs. */
Test(step_resize, new_buffers_have_all_the_memory_of_old_ones)
{
    OPEN(trainer, t, NULL, MIB(16));
    t.manner = FREES_EACH_AFTER;
    for (int i = 0; i < 5; i++) {
        expect_step(&t, 16, "r16 f16");
        OK(rebatch_remake_buffers(t.rb));
    }
}

/* There the device gives addresses out as it likes. */
Test(step_resize, without_caching_old_buffers_are_freed_first_or_not_at_all)
{
    for (int manner = FREES_NOTHING; manner <= FREES_FIRST; manner++) {
        OPEN(trainer, t, &OPTIONS(.pool.caching = REBATCH_OFF), MIB(400));
        t.manner = (enum manner)manner;
        t.has_scratch = true;
        for (size_t batch = 4; batch <= 64; batch *= 2) {
            OK(run_step(&t, batch, NULL));
            cr_expect_eq(live_bytes_of(t.rb), buffer_bytes(&t), "%s", t.trace);
        }
    }
}

/* A step that fails takes the buffers back that it made; the program then has their memory. */
Test(step_resize, a_block_of_the_program_at_an_old_address_is_left_alone)
{
    OPEN(trainer, t, NULL, MIB(400));
    t.manner = FREES_FIRST;
    t.fails = REBATCH_E_USER;
    cr_assert_eq(run_step(&t, 8, NULL), REBATCH_E_USER);
    cr_assert_eq(live_bytes_of(t.rb), 0);
    void *const other = take(&t, bytes_of(&t, 8, 0));
    cr_assert(other == t.buffers[0], "the test needs an address that is given out again");
    mark(other, MIB(1), 200);
    t.has_resized = false;
    expect_step(&t, 8, "r8 f8");
    check_block(&t, other, MIB(1), 200);
}

/* Each has its buffers taken back for the other's. */
Test(step_resize, two_trainers_leave_each_others_buffers_and_blocks_alone)
{
    OPEN(trainer, first, &OPTIONS(.grow_after = 100), MIB(400));
    struct trainer second = {.rb = first.rb, .made_bytes = MIB(1), .id = 1};
    first.manner = second.manner = FREES_EACH_AFTER;
    void *other = NULL;
    for (unsigned i = 0; i < 8; i++) {
        OK(run_step(i % 2 ? &second : &first, 4 << i % 3, NULL));
        if (i == 3) { /* at an address that the other one still holds */
            other = take(&second, MIB(1));
            mark(other, MIB(1), 200);
        }
    }
    check_block(&second, other, MIB(1), 200);
    cr_expect_eq(live_bytes_of(first.rb), MIB(1) + buffer_bytes(&second));
}

/* What is new is freed as ever, and made again. */
static rebatch_status resize_twice(size_t samples, void *user)
{
    struct trainer *const t = user;
    t->room = samples;
    give_back(t, t->buffers[0]);
    void *const block = take(t, samples * MIB(1));
    if (!block)
        return REBATCH_OOM;
    give_back(t, block);
    t->buffers[0] = take(t, samples * MIB(1));
    return t->buffers[0] ? REBATCH_OK : REBATCH_OOM;
}

Test(step_resize, a_new_block_is_freed_though_an_old_one_was)
{
    OPEN(trainer, t, NULL, MIB(400));
    rebatch_step_ops ops = ops_of(&t);
    ops.resize = resize_twice;
    for (t.batch = 4; t.batch <= 32; t.batch *= 2) {
        OK(rebatch_step(t.rb, &ops, t.batch, &t, NULL));
        cr_expect_eq(live_bytes_of(t.rb), t.batch * MIB(1));
    }
}

/* ---- buffers of before the first step ---- */

static void make_before(struct trainer *t, size_t samples)
{
    for (size_t i = 0; i < BUFFERS; i++) {
        t->buffers[i] = take(t, bytes_of(t, samples, i));
        mark(t->buffers[i], bytes_of(t, samples, i), mark_of(t, i));
    }
    t->room = samples;
    t->has_resized = true;
}

/* Their memory is free at once, and stays so when the new ones do not fit, as nobody knows the old
 * address any more. */
Test(step_resize, buffers_made_before_the_first_step_may_be_freed)
{
    for (int way = 2; way < 8; way++) {
        OPEN(trainer, t, &OPTIONS(.grow_after = 100), MIB(6));
        t.manner = (enum manner)(way / 2);
        t.backwards = way % 2;
        make_before(&t, 1);
        OK(run_step(&t, 64, NULL));
        cr_expect_eq(t.room, 4);
        cr_expect_eq(live_bytes_of(t.rb), buffer_bytes(&t), "way %d: %s", way, t.trace);
        resize_often(&t);
    }
}

/* A constructor's, of the whole batch: those of the step have their memory. */
Test(step_resize, the_first_step_has_the_memory_of_those_made_before)
{
    OPEN(trainer, t, NULL, MIB(16));
    t.manner = FREES_EACH_BEFORE;
    make_before(&t, 16);
    expect_step(&t, 16, "r16 f16");
}

/* A resize that fails leaves old pointers and new ones, NULL where it had come to, or none for the
 * buffers that it had not; also one that fails again, at another buffer. */
Test(step_resize, one_that_failed_may_free_all_that_it_has)
{
    for (int way = 0; way < 8 * 27; way++)
        for (int manner = FREES_FIRST; manner <= FREES_EACH_AFTER; manner++) {
            OPEN(trainer, t, &OPTIONS(.grow_after = 100), MIB(16));
            t.manner = (enum manner)manner;
            t.backwards = way % 2;
            t.forgets = way / 2 % 2;
            if (way / 4 % 2)
                make_before(&t, 1);
            for (int i = 0, left = way / 8; i < 3; i++, left /= 3) {
                t.fails_in = (size_t)left % 3;
                OK(run_step(&t, (size_t)i + 2, NULL));
                cr_expect_eq(live_bytes_of(t.rb), buffer_bytes(&t), "way %d: %s", way, t.trace);
            }
        }
}

static void fail_after_the_first_buffer(struct trainer *t)
{
    t->manner = FREES_EACH_BEFORE;
    t->fails_in = 2;
    make_before(t, 1);
    cr_assert_eq(run_step(t, 8, NULL), REBATCH_E_EXHAUSTED);
}

/* So it is where resize fails for good; and a later step makes all of them. */
Test(step_resize, what_it_frees_stays_freed_when_it_fails)
{
    OPEN(trainer, t, &OPTIONS(.max_attempts = 1), MIB(400));
    fail_after_the_first_buffer(&t);
    cr_expect_eq(live_bytes_of(t.rb), 0);
    t.has_resized = false;
    expect_step(&t, 8, "r8 f8");
    cr_expect_eq(live_bytes_of(t.rb), buffer_bytes(&t));
}

/* A pointer that a guard puts back points to memory. */
Test(step_resize, what_a_guarded_pointer_points_to_is_back_when_it_fails)
{
    OPEN(trainer, t, &OPTIONS(.max_attempts = 1), MIB(400));
    OK(rebatch_guard(t.rb, t.buffers, sizeof t.buffers, REBATCH_GUARD_HOST));
    fail_after_the_first_buffer(&t);
    t.room = 1;
    check_buffers(&t);
    expect_step(&t, 8, "r8 f8");
    cr_expect_eq(live_bytes_of(t.rb), buffer_bytes(&t));
}
