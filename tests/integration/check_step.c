/* Owns the tests of rebatch_check() as a call: what it leaves, its bounds, what it refuses, and a
 * program that is checked as it is.
 * Must not know more of the library than its public headers say. */
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check_common.h"
#include "rig.h"

#define PARAMETERS 8
#define BATCH 24

/* What a trainer gets wrong. */
enum mistake { NONE, RNG_IS_NOT_GUARDED, NO_WEIGHT, COPES_WITH_AN_OOM };

struct trainer {
    struct check_run run;
    enum mistake mistake;
    rebatch_device *device;
    float *gradient; /* of the pool, PARAMETERS */
    double loss;
    float running; /* a mean over samples, in order */
    uint64_t rng;  /* a step of it for each sample */
    float *kept;   /* made when it is NULL */
    size_t retries;
};

static rebatch_status zero_grad(void *user)
{
    struct trainer *t = user;
    memset(t->gradient, 0, PARAMETERS * sizeof *t->gradient);
    t->loss = 0;
    return REBATCH_OK;
}

static void update_running(struct trainer *t, const rebatch_microbatch *mb)
{
    for (size_t i = 0; i < mb->count; i++)
        t->running += 0.1f * (check_input(mb->first + i, 0) - t->running);
}

/* Activations of a micro-batch. */
static void forward(struct trainer *t, const rebatch_microbatch *mb, float *hidden)
{
    for (size_t i = 0; i < mb->count; i++)
        hidden[i] = check_input(mb->first + i, 1) + check_random(&t->rng);
}

static void accumulate(struct trainer *t, const rebatch_microbatch *mb, const float *hidden,
                       const float *scale)
{
    const float weight = t->mistake == NO_WEIGHT ? 1 : 1 / (float)mb->batch;
    for (size_t i = 0; i < mb->count; i++)
        for (size_t p = 0; p < PARAMETERS; p++) {
            t->gradient[p] += weight * hidden[i] * check_input(mb->first + i, p) * scale[p];
            t->loss += (double)(weight * hidden[i]);
        }
}

/* Three allocations: what is kept, activations, scales. */
static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    float *hidden, *scale;
    rebatch_status status = REBATCH_OK;
    if (!t->kept)
        status = check_alloc(&t->kept, mb, PARAMETERS * sizeof(float));
    if (!status)
        status = check_alloc(&hidden, mb, mb->count * KIB(4));
    if (status)
        return status;
    for (size_t p = 0; p < PARAMETERS; p++)
        t->kept[p] = 1;
    update_running(t, mb);
    forward(t, mb, hidden);
    status = check_alloc(&scale, mb, KIB(16));
    if (status && t->mistake == COPES_WITH_AN_OOM) {
        t->retries++;
        status = check_alloc(&scale, mb, PARAMETERS * sizeof *scale);
    }
    if (status)
        return status;
    rebatch_mutating(t->run.rb);
    for (size_t p = 0; p < PARAMETERS; p++)
        scale[p] = t->kept[p];
    accumulate(t, mb, hidden, scale);
    status = rebatch_pool_free(mb->pool, scale);
    return status ? status : rebatch_pool_free(mb->pool, hidden);
}

static void trainer_open(struct trainer *t, enum mistake mistake, const rebatch_options *options)
{
    rebatch_options o = options ? *options : (rebatch_options)REBATCH_OPTIONS_INIT;
    void *gradient;
    *t = (struct trainer){.mistake = mistake, .rng = 7};
    o.log_level = REBATCH_LOG_DEBUG;
    open_on_host(&t->device, &t->run.rb, MIB(64), &o);
    OK(rebatch_pool_alloc(&gradient, rebatch_get_pool(t->run.rb), PARAMETERS * sizeof *t->gradient,
                          NULL, 0));
    t->gradient = gradient;
    memset(gradient, 0, PARAMETERS * sizeof *t->gradient);
    if (mistake != RNG_IS_NOT_GUARDED)
        OK(rebatch_guard(t->run.rb, &t->rng, sizeof t->rng, REBATCH_GUARD_HOST));
    OK(rebatch_guard(t->run.rb, &t->running, sizeof t->running, REBATCH_GUARD_HOST));
    OK(rebatch_guard(t->run.rb, &t->kept, sizeof t->kept, REBATCH_GUARD_HOST));
    OK(rebatch_watch(t->run.rb, "gradient", t->gradient, PARAMETERS * sizeof *t->gradient,
                     REBATCH_GUARD_DEVICE, REBATCH_F32));
    OK(rebatch_watch(t->run.rb, "loss", &t->loss, sizeof t->loss, REBATCH_GUARD_HOST, REBATCH_F64));
    OK(rebatch_watch(t->run.rb, "running mean", &t->running, sizeof t->running, REBATCH_GUARD_HOST,
                     REBATCH_F32));
}

static void trainer_close(struct trainer *t)
{
    rebatch_close(t->run.rb);
    rebatch_device_close(t->device);
}

Test(check_step, what_may_be_as_it_should_be_is_a_note)
{
    const rebatch_step_ops ops = check_step_ops(zero_grad, forward_backward);
    struct trainer t;
    rebatch_check_report report;
    trainer_open(&t, NO_WEIGHT, NULL);
    cr_expect_eq(rebatch_check(t.run.rb, &ops, BATCH, &t, NULL, &report), REBATCH_OK);
    const rebatch_finding *finding = check_find(&report, REBATCH_FINDING_WEIGHT, "");
    cr_expect(finding && !finding->is_mistake, "%s", check_texts(&report));
    trainer_close(&t);
    trainer_open(&t, COPES_WITH_AN_OOM, NULL);
    cr_expect_eq(rebatch_check(t.run.rb, &ops, BATCH, &t, NULL, &report), REBATCH_OK);
    finding = check_find(&report, REBATCH_FINDING_COPED, "");
    cr_expect(finding && !finding->is_mistake, "%s", check_texts(&report));
    cr_expect_gt(t.retries, 0);
    trainer_close(&t);
}

/* ---- no mistakes ---- */

static void check_is_clean(const rebatch_options *options, const rebatch_step_ops *ops)
{
    rebatch_check_report report;
    OPEN(trainer, t, NONE, options);
    cr_expect_eq(rebatch_check(t.run.rb, ops, BATCH, &t, NULL, &report), REBATCH_OK, "%s",
                 check_texts(&report));
    cr_expect_eq(report.mistakes, 0, "%s", check_texts(&report));
    cr_expect_eq(report.watched, 3);
    cr_expect_eq(report.micro, rebatch_get_micro(t.run.rb, BATCH));
    cr_expect_eq(report.ooms, report.allocations);
    cr_expect_lt(report.micro_smallest, report.micro);
}

static uint64_t cost(size_t first, size_t count, void *user)
{
    (void)first;
    (void)user;
    return count * 3;
}

Test(check_step, a_correct_step_has_no_findings)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch_step_ops ops = check_step_ops(zero_grad, forward_backward);
    check_is_clean(NULL, &ops);
    options.micro_multiple_of = 4;
    check_is_clean(&options, &ops);
    options.micro_allowed[0] = 8;
    options.micro_allowed[1] = 24;
    check_is_clean(&options, &ops);
    options = (rebatch_options)REBATCH_OPTIONS_INIT;
    options.on_oom = REBATCH_ON_OOM_STOP;
    check_is_clean(&options, &ops);
    ops.flags = 0;
    check_is_clean(NULL, &ops);
    ops.cost = cost;
    check_is_clean(NULL, &ops);
}

Test(check_step, more_samples_than_fit_are_checked_at_the_size_that_fits)
{
    const rebatch_step_ops ops = check_step_ops(zero_grad, forward_backward);
    rebatch_check_report report;
    OPEN(trainer, t, NONE, &OPTIONS(.pool.limit_bytes = KIB(64)));
    cr_expect_eq(rebatch_check(t.run.rb, &ops, BATCH, &t, NULL, &report), REBATCH_OK, "%s",
                 check_texts(&report));
    cr_expect_eq(report.mistakes, 0, "%s", check_texts(&report));
    cr_expect_lt(report.micro, BATCH);
    cr_expect_gt(report.ooms, 0);
}

Test(check_step, where_nothing_fits_it_says_so)
{
    const rebatch_step_ops ops = check_step_ops(zero_grad, forward_backward);
    rebatch_check_report report;
    void *rest;
    OPEN(trainer, t, NONE, &OPTIONS(.pool.limit_bytes = KIB(64)));
    OK(rebatch_pool_alloc(&rest, rebatch_get_pool(t.run.rb), KIB(60), NULL, 0));
    cr_expect_eq(rebatch_check(t.run.rb, &ops, BATCH, &t, NULL, &report), REBATCH_E_EXHAUSTED, "%s",
                 check_texts(&report));
}

Test(check_step, it_leaves_the_session_and_what_is_watched_as_they_were)
{
    const rebatch_step_ops ops = check_step_ops(zero_grad, forward_backward);
    struct trainer t, alone;
    rebatch_step_report report;
    rebatch_pool_stats before, after;
    trainer_open(&t, NONE, NULL);
    trainer_open(&alone, NONE, NULL);
    OK(rebatch_step(t.run.rb, &ops, BATCH, &t, NULL));
    OK(rebatch_step(alone.run.rb, &ops, BATCH, &alone, NULL));
    (void)rebatch_pool_get_stats(&before, rebatch_get_pool(t.run.rb));
    const float gradient = t.gradient[3], running = t.running;
    const uint64_t rng = t.rng;
    OK(rebatch_check(t.run.rb, &ops, BATCH, &t, NULL, NULL));
    (void)rebatch_pool_get_stats(&after, rebatch_get_pool(t.run.rb));
    cr_assert_eq(after.live_bytes, before.live_bytes);
    cr_assert_eq(t.gradient[3], gradient);
    cr_assert_eq(t.running, running);
    cr_assert_eq(t.rng, rng);
    OK(rebatch_step(t.run.rb, &ops, BATCH, &t, &report));
    OK(rebatch_step(alone.run.rb, &ops, BATCH, &alone, NULL));
    cr_assert_eq(report.step, 1);
    cr_assert_eq(report.micro_before, BATCH);
    cr_assert_eq(report.ooms, 0);
    cr_assert_eq(memcmp(t.gradient, alone.gradient, PARAMETERS * sizeof *t.gradient), 0);
    cr_assert_eq(t.run.updates, 2);
    trainer_close(&t);
    trainer_close(&alone);
}

Test(check_step, bounds_hold_and_nothing_watched_is_said)
{
    const rebatch_step_ops ops = check_step_ops(zero_grad, forward_backward);
    rebatch_check_options options = REBATCH_CHECK_OPTIONS_INIT;
    rebatch_check_report report;
    OPEN(trainer, t, NONE, NULL);
    options.most_ooms = 2;
    cr_expect_eq(rebatch_check(t.run.rb, &ops, BATCH, &t, &options, &report), REBATCH_OK);
    cr_expect_eq(report.ooms, 2);
    cr_expect_eq(report.allocations, 3);
    rebatch_close(t.run.rb);
    OK(rebatch_open(&t.run.rb, t.device, NULL));
    t.kept = NULL;
    OK(rebatch_guard(t.run.rb, &t.kept, sizeof t.kept, REBATCH_GUARD_HOST));
    float own[PARAMETERS];
    t.gradient = own;
    cr_expect_eq(rebatch_check(t.run.rb, &ops, BATCH, &t, NULL, &report), REBATCH_E_STATE);
    cr_expect_not_null(check_find(&report, REBATCH_FINDING_UNCOMPARED, ""), "%s",
                       check_texts(&report));
}

/* Every 50th sample that it sees is not dropped. */
static rebatch_status drop_most(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    rebatch_mutating(t->run.rb);
    for (size_t i = 0; i < mb->count; i++)
        if (++t->rng % 50 == 0)
            t->loss += (double)check_input(mb->first + i, 1) / (double)mb->batch;
    return REBATCH_OK;
}

static rebatch_status drop_all(const rebatch_microbatch *mb, void *user)
{
    (void)mb;
    struct trainer *t = user;
    rebatch_mutating(t->run.rb);
    return REBATCH_OK;
}

Test(check_step, a_batch_of_which_dropout_drops_all_is_no_mistake)
{
    rebatch_step_ops ops = check_step_ops(zero_grad, drop_most);
    rebatch_check_report report;
    OPEN(trainer, t, NONE, NULL);
    cr_expect_eq(rebatch_check(t.run.rb, &ops, 2, &t, NULL, &report), REBATCH_OK, "%s",
                 check_texts(&report));
    const rebatch_finding *found = check_find(&report, REBATCH_FINDING_UNWATCHED, "");
    cr_expect(found && strstr(found->text, "dropout may have dropped all of it"), "%s",
              check_texts(&report));
    ops.forward_backward = drop_all;
    cr_expect_eq(rebatch_check(t.run.rb, &ops, 2, &t, NULL, &report), REBATCH_E_STATE);
    cr_expect_not_null(check_find(&report, REBATCH_FINDING_UNCOMPARED, ""), "%s",
                       check_texts(&report));
}

Test(check_step, what_it_refuses)
{
    const rebatch_step_ops ops = check_step_ops(zero_grad, forward_backward);
    rebatch_check_options options = REBATCH_CHECK_OPTIONS_INIT;
    rebatch_check_report report;
    OPEN(trainer, t, NONE, NULL);
    cr_expect_eq(rebatch_check(NULL, &ops, BATCH, &t, NULL, &report), REBATCH_E_INVALID);
    cr_expect_eq(report.status, REBATCH_E_INVALID);
    cr_expect_eq(rebatch_check(t.run.rb, &ops, 0, &t, NULL, NULL), REBATCH_E_INVALID);
    options.tolerance = -1;
    cr_expect_eq(rebatch_check(t.run.rb, &ops, BATCH, &t, &options, NULL), REBATCH_E_INVALID);
    cr_expect_eq(rebatch_watch(t.run.rb, NULL, &t.loss, 8, REBATCH_GUARD_HOST, REBATCH_F64),
                 REBATCH_E_INVALID);
    cr_expect_eq(rebatch_watch(t.run.rb, "x", &t.loss, 7, REBATCH_GUARD_HOST, REBATCH_F64),
                 REBATCH_E_INVALID);
    cr_expect_eq(rebatch_watch(t.run.rb, "x", &t.loss, 8, (rebatch_guard_kind)3, REBATCH_F64),
                 REBATCH_E_INVALID);
}

/* ---- a program as it is ---- */

static void train_under_check(void *user)
{
    const rebatch_step_ops ops = check_step_ops(zero_grad, forward_backward);
    struct trainer t;
    (void)setenv("REBATCH_CHECK", "1", 1);
    trainer_open(&t, *(const enum mistake *)user, NULL);
    _exit(rebatch_step(t.run.rb, &ops, BATCH, &t, NULL) ? 98 : 99);
}

/* What it prints, and its exit status. */
static int check_as_it_is(enum mistake mistake, char *text, size_t size)
{
    const int status = output_of(train_under_check, &mistake, STDOUT_FILENO, text, size);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

Test(check_step, a_program_is_checked_as_it_is_and_ends)
{
    char text[8192];
    cr_assert_eq(check_as_it_is(NONE, text, sizeof text), 0, "%s", text);
    cr_assert(strncmp(text, "no mistakes: ", 13) == 0, "%s", text);
    cr_assert_eq(check_as_it_is(RNG_IS_NOT_GUARDED, text, sizeof text), 4, "%s", text);
    cr_assert(strncmp(text, "not_repeatable  \"gradient\"", 26) == 0, "%s", text);
    HAS(text, "1 mistake: ");
}

static rebatch_status update_in_silence(void *user)
{
    struct trainer *t = user;
    t->running = 0;
    return REBATCH_OK;
}

/* With a stream, as with a GPU, optimizer_step cannot run in copies of the process. */
static void train_with_stream_under_check(void *user)
{
    rebatch_step_ops ops = check_step_ops(zero_grad, forward_backward);
    struct trainer t;
    rebatch_stream stream;
    const bool declares = *(const bool *)user;
    (void)setenv("REBATCH_CHECK", "1", 1);
    if (!declares)
        ops.optimizer_step = update_in_silence;
    trainer_open(&t, NONE, NULL);
    OK(rebatch_stream_create(&stream, t.device));
    _exit(rebatch_step(t.run.rb, &ops, BATCH, &t, NULL) ? 98 : 99);
}

Test(check_step, an_update_that_never_declares_is_told_where_no_copy_can_run)
{
    for (int declares = 0; declares < 2; declares++) {
        char text[8192];
        bool is_declared = declares;
        const int status = output_of(train_with_stream_under_check, &is_declared, STDOUT_FILENO,
                                     text, sizeof text);
        cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s", text);
        cr_expect_eq(strstr(text, "optimizer_step never calls rebatch_mutating()") != NULL,
                     !declares, "%s", text);
    }
}

/* ---- host memory that work of a stream changes ---- */

struct late_sum {
    struct check_run run;
    rebatch_device *device;
    rebatch_stream stream;
    double loss;
};

static void clear_late(void *user)
{
    (void)usleep(1000);
    ((struct late_sum *)user)->loss = 0;
}

static void add_late(void *user)
{
    (void)usleep(1000);
    ((struct late_sum *)user)->loss += 1.0 / BATCH;
}

static rebatch_status clear_on_stream(void *user)
{
    struct late_sum *t = user;
    return rebatch_stream_call(t->device, t->stream, clear_late, t);
}

static rebatch_status add_on_stream(const rebatch_microbatch *mb, void *user)
{
    struct late_sum *t = user;
    float *memory;
    rebatch_status status = check_alloc(&memory, mb, mb->count * KIB(4));
    if (status)
        return status;
    rebatch_mutating(t->run.rb);
    for (size_t i = 0; i < mb->count && !status; i++)
        status = rebatch_stream_call(t->device, t->stream, add_late, t);
    return status ? status : rebatch_pool_free(mb->pool, memory);
}

Test(check_step, what_a_stream_changes_in_host_memory_is_waited_for)
{
    const rebatch_step_ops ops = check_step_ops(clear_on_stream, add_on_stream);
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch_check_report report;
    struct late_sum t = {.loss = 0};
    OK(rebatch_device_open_host(&t.device, MIB(4), NULL));
    OK(rebatch_stream_create(&t.stream, t.device));
    options.stream = t.stream;
    OK(rebatch_open(&t.run.rb, t.device, &options));
    OK(rebatch_watch(t.run.rb, "loss", &t.loss, sizeof t.loss, REBATCH_GUARD_HOST, REBATCH_F64));
    OK(rebatch_check(t.run.rb, &ops, BATCH, &t, NULL, &report));
    cr_expect_eq(report.mistakes, 0, "%s", check_texts(&report));
    cr_expect_eq(t.loss, 0);
    rebatch_close(t.run.rb);
    rebatch_stream_destroy(t.device, t.stream);
    rebatch_device_close(t.device);
}

Test(check_step, what_is_watched_and_freed_is_told)
{
    const rebatch_step_ops ops = check_step_ops(zero_grad, forward_backward);
    struct trainer t;
    rebatch_check_report report;
    void *freed;
    size_t released;
    trainer_open(&t, NONE, NULL);
    rebatch_pool *const pool = rebatch_get_pool(t.run.rb);
    OK(rebatch_pool_alloc(&freed, pool, MIB(4), NULL, 0));
    OK(rebatch_watch(t.run.rb, "old", freed, MIB(4), REBATCH_GUARD_DEVICE, REBATCH_F32));
    OK(rebatch_pool_free(pool, freed));
    OK(rebatch_pool_trim(pool, 0, &released));
    FAILS(rebatch_check(t.run.rb, &ops, BATCH, &t, NULL, &report), REBATCH_E_INVALID,
          "what is watched as \"old\" is");
    SAYS("which has been freed already: expected memory in use");
    trainer_close(&t);
}
