/* Owns the tests of what a check finds in optimizer_step, and of what it leaves.
 * Must not know more of the library than its public headers say. */
#include <signal.h>
#include <unistd.h>

#include "check_common.h"
#include "rig.h"

#define BATCH 12
#define PARAMETERS 8
#define BYTES (PARAMETERS * sizeof(float))

/* What optimizer_step gets wrong. */
enum mistake {
    NONE,
    CHANGES_BEFORE_IT_SAYS_SO,
    MOMENTS_ARE_NOT_GUARDED,
    READS_NEW_MEMORY,
    SWALLOWS_AN_OOM,
    COPES_WITH_AN_OOM,
    DIES_OF_AN_OOM,
    NEVER_SAYS_SO,
    DRAWS_NUMBERS /* which is none: they are of another source each time */
};

struct trainer {
    rebatch *rb;
    rebatch_device *device;
    enum mistake mistake;
    float *weights; /* of the pool, not watched */
    float *moments; /* made by the first update */
    float bias;     /* not watched either */
    float *also;    /* what change_in_silence() changes beside the bias */
    float gradient[PARAMETERS];
    size_t updates;
};

static rebatch_status zero_grad(void *user)
{
    struct trainer *t = user;
    memset(t->gradient, 0, BYTES);
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    float *hidden;
    const rebatch_status status = check_alloc(&hidden, mb, mb->count << 10);
    if (status)
        return status;
    rebatch_mutating(t->rb);
    for (size_t i = 0; i < mb->count; i++)
        for (size_t p = 0; p < PARAMETERS; p++)
            t->gradient[p] +=
                (t->weights[p] * check_input(mb->first + i, p) + t->bias) / (float)mb->batch;
    return rebatch_pool_free(mb->pool, hidden);
}

static rebatch_status make(struct trainer *t, float **out)
{
    void *memory = NULL;
    const rebatch_status status =
        rebatch_pool_alloc(&memory, rebatch_get_pool(t->rb), BYTES, NULL, 0);
    *out = memory;
    return status;
}

static rebatch_status make_moments(struct trainer *t)
{
    if (t->moments)
        return REBATCH_OK;
    const rebatch_status status = make(t, &t->moments);
    if (!status && t->mistake != READS_NEW_MEMORY)
        memset(t->moments, 0, BYTES);
    return status;
}

static void update(struct trainer *t, const float *scale)
{
    for (size_t p = 0; p < PARAMETERS; p++) {
        t->moments[p] = 0.9f * t->moments[p] + t->gradient[p];
        t->weights[p] -= 1e-3f * t->moments[p] * (scale ? 1 : 2);
    }
    t->updates++;
}

/* Two allocations: the moments, and memory that is gone when it ends. */
static rebatch_status optimizer_step(void *user)
{
    struct trainer *t = user;
    float *scale = NULL;
    if (t->mistake == CHANGES_BEFORE_IT_SAYS_SO)
        t->bias += 1e-3f;
    if (t->mistake == DRAWS_NUMBERS)
        t->bias += 1e-6f * (float)getpid();
    rebatch_status status = make_moments(t);
    if (!status)
        status = make(t, &scale);
    if (status && t->mistake == DIES_OF_AN_OOM)
        (void)raise(SIGKILL);
    const bool goes_on = scale == NULL && t->moments &&
                         (t->mistake == SWALLOWS_AN_OOM || t->mistake == COPES_WITH_AN_OOM);
    if (status && !goes_on)
        return status;
    if (t->mistake != NEVER_SAYS_SO)
        rebatch_mutating(t->rb);
    update(t, t->mistake == COPES_WITH_AN_OOM ? t->moments : scale);
    return scale ? rebatch_pool_free(rebatch_get_pool(t->rb), scale) : REBATCH_OK;
}

static void trainer_open(struct trainer *t, enum mistake mistake)
{
    *t = (struct trainer){.mistake = mistake};
    open_on_host(&t->device, &t->rb, MIB(8), &OPTIONS(.log_level = REBATCH_LOG_QUIET));
    OK(make(t, &t->weights));
    for (size_t p = 0; p < PARAMETERS; p++)
        t->weights[p] = check_input(3, p);
    if (mistake != MOMENTS_ARE_NOT_GUARDED)
        OK(rebatch_guard(t->rb, &t->moments, sizeof t->moments, REBATCH_GUARD_HOST));
    OK(rebatch_watch(t->rb, "gradient", t->gradient, BYTES, REBATCH_GUARD_HOST, REBATCH_F32));
}

static rebatch_status check(struct trainer *t, rebatch_check_report *report)
{
    rebatch_step_ops ops = check_step_ops(zero_grad, forward_backward);
    ops.optimizer_step = optimizer_step;
    return rebatch_check(t->rb, &ops, BATCH, t, NULL, report);
}

CLOSE_BOTH(trainer)

static const struct {
    enum mistake mistake;
    rebatch_finding_kind kind;
    const char *name, *says;
} cases[] = {
    {CHANGES_BEFORE_IT_SAYS_SO, REBATCH_FINDING_AFTER_OOM, "gradient",
     "after allocation 1 (32 B) of optimizer_step failed, in that step or the next"},
    {MOMENTS_ARE_NOT_GUARDED, REBATCH_FINDING_AFTER_OOM, "gradient",
     "after allocation 2 (32 B) of optimizer_step failed, in that step or the next"},
    {READS_NEW_MEMORY, REBATCH_FINDING_UNINITIALIZED, "gradient",
     "where new memory is not 0 in optimizer_step"},
    {SWALLOWS_AN_OOM, REBATCH_FINDING_SWALLOWED, "gradient", "return the status of the allocation"},
    {NEVER_SAYS_SO, REBATCH_FINDING_EARLY, "",
     "optimizer_step changes block 0 (32 B) and never calls rebatch_mutating(), which "
     "REBATCH_DECLARES_MUTATION promises: call it before the first change"},
    {DIES_OF_AN_OOM, REBATCH_FINDING_FAILED, "", "the program ended by signal 9"},
};

Test(check_update, mistakes_of_optimizer_step_are_found)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rebatch_check_report report;
        OPEN(trainer, t, cases[i].mistake);
        cr_expect_eq(check(&t, &report), REBATCH_E_STATE, "%s", check_texts(&report));
        const rebatch_finding *const found = check_find(&report, cases[i].kind, cases[i].name);
        cr_expect(found && strstr(found->text, cases[i].says), "of mistake %d it says:\n%s",
                  (int)cases[i].mistake, check_texts(&report));
        cr_expect_eq(report.mistakes, 1, "%s", check_texts(&report));
    }
}

static rebatch_status change_in_silence(void *user)
{
    struct trainer *t = user;
    t->bias -= t->gradient[0];
    if (t->also)
        t->also[0] -= t->gradient[0];
    return REBATCH_OK;
}

static rebatch_status change_nothing(void *user)
{
    (void)user;
    return REBATCH_OK;
}

/* What is watched and what is guarded; where nothing is seen to change it may be right. */
Test(check_update, an_update_that_never_declares_is_told)
{
    for (int way = 0; way < 4; way++) {
        rebatch_check_report report;
        float own[PARAMETERS] = {0};
        rebatch_step_ops ops = check_step_ops(zero_grad, forward_backward);
        OPEN(trainer, t, NONE);
        ops.optimizer_step = way == 3 ? change_nothing : change_in_silence;
        t.also = way == 0 ? own : way == 1 ? t.gradient : NULL;
        OK(rebatch_watch(t.rb, "weights", own, sizeof own, REBATCH_GUARD_HOST, REBATCH_F32));
        cr_expect_eq(rebatch_check(t.rb, &ops, BATCH, &t, NULL, &report),
                     way < 2 ? REBATCH_E_STATE : REBATCH_OK, "%d: %s", way, check_texts(&report));
        cr_expect_eq(report.mistakes, way < 2, "%d: %s", way, check_texts(&report));
        HAS(report.findings[0].text, "never calls rebatch_mutating()");
        HAS(report.findings[0].text, way == 0   ? "changes \"weights\""
                                     : way == 1 ? "changes \"gradient\""
                                                : "changes nothing that was looked at");
        ops.flags = 0;
        cr_expect_eq(rebatch_check(t.rb, &ops, BATCH, &t, NULL, &report), REBATCH_OK, "%d: %s", way,
                     check_texts(&report));
    }
}

/* Its state is as it was, what is neither watched nor guarded too. */
Test(check_update, a_check_of_optimizer_step_leaves_the_program_as_it_was)
{
    static const enum mistake right[] = {NONE, COPES_WITH_AN_OOM};
    for (size_t i = 0; i < sizeof right / sizeof *right; i++) {
        rebatch_check_report report;
        OPEN(trainer, t, right[i]);
        cr_expect_eq(check(&t, &report), REBATCH_OK, "%s", check_texts(&report));
        cr_expect_null(report.not_looked_at, "%s", report.not_looked_at);
        cr_expect_eq(report.update_allocations, 2);
        cr_expect_eq(report.update_ooms, 2, "%s", check_texts(&report));
        cr_expect_eq(report.updates, 5);
        HAS(check_texts(&report), "at 2 of 2 of optimizer_step, ");
        cr_expect_eq(t.updates, 0);
        cr_expect_null(t.moments);
        for (size_t p = 0; p < PARAMETERS; p++)
            cr_expect_float_eq(t.weights[p], check_input(3, p), 0);
    }
}

static void expect_not_looked_at(struct trainer *t, const char *why)
{
    rebatch_check_report report;
    cr_expect_eq(check(t, &report), REBATCH_OK, "%s", check_texts(&report));
    cr_expect(report.not_looked_at && strstr(report.not_looked_at, why), "%s",
              check_texts(&report));
    HAS(check_texts(&report), "\nnot looked at   optimizer_step, ");
    cr_expect_eq(report.update_ooms, 0);
}

Test(check_update, where_optimizer_step_was_not_looked_at_the_report_says_so)
{
    struct trainer t;
    rebatch_stream stream;
    trainer_open(&t, DRAWS_NUMBERS);
    expect_not_looked_at(&t, "something else when they run again");
    trainer_close(&t);
    trainer_open(&t, NONE);
    OK(rebatch_stream_create(&stream, t.device));
    expect_not_looked_at(&t, "neither a GPU nor streams are copied with it");
    rebatch_stream_destroy(t.device, stream);
    trainer_close(&t);
}
