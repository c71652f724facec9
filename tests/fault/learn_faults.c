/* Owns the fault tests of sessions that learn: every heap call and every device call failing in the
 * first steps, once and for ever.
 * Must not know how a size is found. */
#include "base/base.h"
#include "fault/fault_common.h"
#include "fault/fault_device.h"
#include "integration/rig.h"
#include "recover/recover.h"

#define SAMPLE_BYTES ((size_t)96 << 10)
#define CAPACITY_BYTES ((size_t)40 * (64 << 10))
#define BATCH 32
#define SMALL_BATCH 4
#define STEPS 3

struct trainer {
    rebatch_device *host, *device;
    rebatch *rb;
    size_t batch;
    void *moments;
    uint32_t marks[BATCH]; /* how often each sample is in the accumulators */
    uint32_t updates;
};

static rebatch_status take(const struct trainer *t, void **out, size_t bytes)
{
    return rebatch_pool_alloc(out, rebatch_get_pool(t->rb), bytes, NULL, 0);
}

static rebatch_status zero_grad(void *user)
{
    struct trainer *t = user;
    rebatch_mutating(t->rb);
    for (size_t i = 0; i < BATCH; i++)
        t->marks[i] = 0;
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    void *activations;
    rebatch_status status = take(t, &activations, SAMPLE_BYTES * mb->count);
    if (status)
        return status;
    rebatch_mutating(t->rb);
    for (size_t i = mb->first; i < mb->first + mb->count; i++)
        t->marks[i]++;
    return rebatch_pool_free(mb->pool, activations);
}

static rebatch_status optimizer_step(void *user)
{
    struct trainer *t = user;
    void *moments = t->moments;
    if (!moments) {
        const rebatch_status status = take(t, &moments, 200000);
        if (status)
            return status;
    }
    rebatch_mutating(t->rb);
    t->moments = moments;
    t->updates++;
    for (size_t i = 0; i < t->batch; i++)
        cr_assert_eq(t->marks[i], 1, "sample %zu counts %u times", i, t->marks[i]);
    return REBATCH_OK;
}

static const rebatch_step_ops ops =
    OPS(zero_grad, forward_backward, optimizer_step, .flags = REBATCH_DECLARES_MUTATION);

static void set_up(struct trainer *t, rebatch_toggle growth)
{
    *t = (struct trainer){.batch = BATCH};
    fault_open(&t->host, &t->device, CAPACITY_BYTES);
    OK(rebatch_open(&t->rb, t->device,
                    &OPTIONS(.learn = REBATCH_ON, .growth = growth, .grow_after = 1)));
}

/* Whatever happened, the session goes on, and nothing has leaked. */
static void tear_down(struct trainer *t)
{
    rebatch_step_report report;
    for (int i = 0; i < 8; i++)
        OK(rebatch_step(t->rb, &ops, BATCH, t, &report));
    cr_assert_eq(report.ooms, 0);
    cr_assert_geq(report.micro_after, 13, "%zu of 26 that fit", report.micro_after);
    rebatch_close(t->rb);
    fault_close(t->host, t->device);
}

static void check(rebatch_status status, rebatch_status failure, uint64_t nth)
{
    cr_assert(status == REBATCH_OK || status == failure || status == REBATCH_E_EXHAUSTED,
              "call %d: %s: %s", (int)nth, rebatch_status_name(status), rebatch_last_error());
}

/* ---- host memory ---- */

/* What the pool itself needs may fail a step; what learning needs may not: not to record what is
 * allocated, nor to make a model of it, nor to copy the pool for a dry run. */
static void check_blame(rebatch_status status)
{
    static const char *const needs[] = {"record", "model", "copy", "dry run", "learn"};
    for (size_t i = 0; i < sizeof needs / sizeof *needs && status; i++)
        cr_assert(!strstr(rebatch_last_error(), needs[i]), "%s", rebatch_last_error());
}

static void fail_heap(uint64_t times)
{
    for (uint64_t nth = 1, made = UINT64_MAX; nth <= made; nth++) {
        struct trainer t;
        set_up(&t, REBATCH_ON);
        const uint64_t calls = rbi_heap_calls();
        rbi_heap_fail(nth, times);
        for (int i = 0; i < STEPS; i++) {
            const rebatch_status status = rebatch_step(t.rb, &ops, BATCH, &t, NULL);
            check(status, REBATCH_E_HOST_OOM, nth);
            check_blame(status);
        }
        rbi_heap_fail(0, 0);
        if (times > 1 && rbi_heap_calls() - calls < nth)
            made = nth;
        if (times == 1)
            made = rbi_heap_calls() - calls;
        tear_down(&t);
        cr_assert_lt(nth, 20000, "there is no end to the calls");
        nth += nth > 300 ? nth / 16 : 0; /* dry runs all make the same calls */
    }
}

Test(learn_faults, every_heap_call_fails)
{
    fail_heap(1);
    fail_heap(UINT64_MAX);
}

/* Whichever call fails in the first step, of a few samples, and whether or not there is a model of
 * memory after it: sizes for a larger batch are learned, and growth has no part in it. */
Test(learn_faults, after_any_heap_call_has_failed_a_larger_batch_is_learned)
{
    bool was_without_model = false;
    for (uint64_t nth = 1, made = UINT64_MAX; nth <= made; nth++) {
        struct trainer t;
        rebatch_step_report report = {0};
        set_up(&t, REBATCH_OFF);
        t.batch = SMALL_BATCH;
        const uint64_t calls = rbi_heap_calls();
        rbi_heap_fail(nth, 1);
        check(rebatch_step(t.rb, &ops, t.batch, &t, NULL), REBATCH_E_HOST_OOM, nth);
        rbi_heap_fail(0, 0);
        made = rbi_heap_calls() - calls;
        for (int i = 0; i < STEPS; i++)
            OK(rebatch_step(t.rb, &ops, t.batch, &t, &report));
        cr_assert_eq(report.microbatches, 1);
        was_without_model |= t.rb->sizes.model.need == NULL;
        t.batch = BATCH;
        tear_down(&t);
    }
    cr_assert(was_without_model);
}

/* ---- device calls ---- */

static void fail_device(uint32_t calls, rebatch_status failure, uint64_t times)
{
    for (uint64_t nth = 1, failed = 1; failed > 0; nth++) {
        struct trainer t;
        const rebatch_fault_plan plan = fault_plan(calls, failure, nth, times);
        set_up(&t, REBATCH_ON);
        fault_arm(t.device, &plan);
        for (int i = 0; i < STEPS; i++)
            check(rebatch_step(t.rb, &ops, BATCH, &t, NULL), failure, nth);
        OK(rebatch_fault_counts(t.device, NULL, &failed));
        fault_arm(t.device, NULL);
        tear_down(&t);
        cr_assert_lt(nth, 3000, "there is no end to the calls");
    }
}

Test(learn_faults, every_device_call_fails)
{
    for (size_t i = 0; i < FAULT_KINDS; i++) {
        fail_device(fault_kinds[i].calls, fault_kinds[i].status, 1);
        fail_device(fault_kinds[i].calls, fault_kinds[i].status, REBATCH_FAULT_FOREVER);
    }
}
