/* Owns the fault tests of a whole training: every device call and every host allocation failing,
 * once and for ever.
 * Must not know how the step recovers. */
#include <stdlib.h>

#include "base/base.h"
#include "fault/fault_common.h"
#include "fault/fault_device.h"
#include "integration/rig.h"

#define WIDTH 64
#define BATCH 24
#define STEPS 2
#define ACTIVATION_BYTES ((size_t)64 << 10)      /* a sample's */
#define CAPACITY_BYTES ((size_t)20 * (64 << 10)) /* 24 samples do not fit, 12 do */

/* ---- a small training, exact under any cut ---- */

struct trainer {
    rebatch_device *host, *device;
    bool on_default_stream;
    rebatch_stream stream;
    rebatch *rb;
    float *weights, *gradients, *running; /* running statistics: a device guard */
    float *moments;                       /* made by the first update: the pointer is guarded */
    uint64_t random;                      /* moves on with each sample: a host guard */
    float *buffer;                        /* of resize */
};

struct result {
    rebatch_status status; /* the first that was not OK */
    uint32_t ooms;
    float weights[WIDTH], running[WIDTH], moments[WIDTH];
    uint64_t random;
};

/* A switch that breaks the training, to show that the comparison would see it. */
static bool forget_guards;
/* Whether the noise is in a buffer that resize makes. */
static bool has_resize;

static rebatch_status allocate(struct trainer *t, float **out, size_t bytes)
{
    return rebatch_pool_alloc((void **)out, rebatch_get_pool(t->rb), bytes, t->stream, 0);
}

static rebatch_status zero_grad(void *user)
{
    struct trainer *t = user;
    const rebatch_status status = rebatch_stream_synchronize(t->device, t->stream);
    if (status)
        return status;
    rebatch_mutating(t->rb);
    memset(t->gradients, 0, WIDTH * sizeof(float));
    return REBATCH_OK;
}

static float next_float(uint64_t *random)
{
    *random = *random * 6364136223846793005u + 1442695040888963407u;
    return (float)(*random >> 40) / (float)(1 << 24);
}

/* Changes what is guarded first, and what is accumulated last. */
static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    rebatch_status status = rebatch_stream_synchronize(t->device, t->stream);
    if (status)
        return status;
    float *noise = NULL;
    float *work = NULL;
    const uint64_t began = t->random;
    for (size_t i = 0; i < mb->count; i++) {
        const float x = next_float(&t->random);
        for (size_t j = 0; j < WIDTH; j++)
            t->running[j] = 0.9f * t->running[j] + 0.1f * x * t->weights[j];
    }
    if (has_resize)
        noise = t->buffer;
    else
        status = allocate(t, &noise, mb->count * ACTIVATION_BYTES);
    if (!status)
        status = rebatch_reserve(t->rb, ACTIVATION_BYTES);
    if (status)
        return status;
    uint64_t random = began;
    for (size_t i = 0; i < mb->count; i++)
        noise[i] = next_float(&random);
    rebatch_mutating(t->rb);
    status = allocate(t, &work, ACTIVATION_BYTES);
    if (status)
        return status;
    for (size_t i = 0; i < mb->count; i++)
        for (size_t j = 0; j < WIDTH; j++) {
            work[j] = noise[i] * t->weights[j] + (float)(mb->first + i);
            t->gradients[j] += work[j] / (float)mb->batch;
        }
    status = rebatch_pool_free(mb->pool, work);
    return status || has_resize ? status : rebatch_pool_free(mb->pool, noise);
}

static rebatch_status resize(size_t micro_batch, void *user)
{
    struct trainer *t = user;
    return allocate(t, &t->buffer, micro_batch * ACTIVATION_BYTES);
}

static rebatch_status optimizer_step(void *user)
{
    struct trainer *t = user;
    rebatch_status status = rebatch_stream_synchronize(t->device, t->stream);
    if (!status && !t->moments) {
        status = allocate(t, &t->moments, WIDTH * sizeof(float));
        if (!status)
            status = rebatch_fill(t->device, t->moments, 0, WIDTH * sizeof(float), t->stream);
    }
    if (!status)
        status = rebatch_stream_synchronize(t->device, t->stream);
    if (status)
        return status;
    rebatch_mutating(t->rb);
    for (size_t j = 0; j < WIDTH; j++) {
        t->moments[j] = 0.9f * t->moments[j] + t->gradients[j];
        t->weights[j] -= 0.001f * t->moments[j];
    }
    return REBATCH_OK;
}

static const rebatch_step_ops ops =
    OPS(zero_grad, forward_backward, optimizer_step, .flags = REBATCH_DECLARES_MUTATION);

static rebatch_status guard(struct trainer *t)
{
    if (forget_guards)
        return REBATCH_OK;
    rebatch_status status =
        rebatch_guard(t->rb, t->running, WIDTH * sizeof(float), REBATCH_GUARD_DEVICE);
    if (!status)
        status = rebatch_guard(t->rb, &t->moments, sizeof t->moments, REBATCH_GUARD_HOST);
    if (!status)
        status = rebatch_guard(t->rb, &t->random, sizeof t->random, REBATCH_GUARD_HOST);
    return status;
}

static rebatch_status set_up(struct trainer *t, const rebatch_options *options,
                             const rebatch_fault_plan *plan)
{
    rebatch_status status = rebatch_device_open_host(&t->host, CAPACITY_BYTES, NULL);
    if (!status)
        status = rebatch_device_open_fault(&t->device, t->host, plan);
    if (!status && !t->on_default_stream)
        status = rebatch_stream_create(&t->stream, t->device);
    rebatch_options o = *options;
    o.stream = t->stream;
    if (!status)
        status = rebatch_open(&t->rb, t->device, &o);
    if (!status)
        status = allocate(t, &t->weights, WIDTH * sizeof(float));
    if (!status)
        status = allocate(t, &t->gradients, WIDTH * sizeof(float));
    if (!status)
        status = allocate(t, &t->running, WIDTH * sizeof(float));
    if (!status)
        status = guard(t);
    for (size_t j = 0; j < WIDTH && !status; j++) {
        t->weights[j] = 1.0f / (float)(j + 1);
        t->running[j] = 0;
    }
    t->random = 99;
    return status;
}

/* A step that failed once is called again, as a program would that can help itself: everything but
 * a torn update counts as not having happened. */
static rebatch_status train(struct trainer *t, struct result *result, bool once)
{
    for (uint64_t step = 0; step < STEPS;) {
        rebatch_step_report report;
        rebatch_step_ops table = ops;
        table.resize = has_resize ? resize : NULL;
        const rebatch_status status = rebatch_step(t->rb, &table, BATCH, t, &report);
        cr_assert_eq(report.status, status);
        cr_assert_eq(report.step, step);
        result->ooms += report.ooms;
        cr_assert_neq(status, REBATCH_E_TORN, "nothing is allocated while updating");
        if (status && (!once || result->status))
            return status;
        if (status)
            result->status = status;
        else
            step++;
    }
    return rebatch_stream_synchronize(t->device, t->stream);
}

static void tear_down(struct trainer *t)
{
    rebatch_close(t->rb);
    rebatch_stream_destroy(t->device, t->stream);
    fault_close(t->host, t->device);
}

/* Trains from nothing. @return whether it came to its end; then `result` is filled in. */
static bool run(struct result *result, rebatch_toggle caching, const rebatch_fault_plan *plan,
                bool once, uint64_t *failed)
{
    struct trainer t = {0};
    memset(result, 0, sizeof *result);
    const int64_t heap_live = rbi_heap_live();
    rebatch_clear_error();
    rebatch_status status = set_up(&t, &OPTIONS(.pool.caching = caching, .grow_after = 1), plan);
    if (!status)
        status = train(&t, result, once);
    if (status) {
        result->status = status;
        cr_assert_str_neq(rebatch_last_error(), "", "%s, but nothing is said",
                          rebatch_status_name(status));
    } else {
        memcpy(result->weights, t.weights, sizeof result->weights);
        memcpy(result->running, t.running, sizeof result->running);
        memcpy(result->moments, t.moments, sizeof result->moments);
        result->random = t.random;
    }
    if (failed && t.device) {
        OK(rebatch_fault_counts(t.device, NULL, failed));
        /* a device that cannot be waited for cannot be closed in peace either */
        fault_arm(t.device, NULL);
    }
    rbi_heap_fail(0, 0);
    tear_down(&t);
    cr_assert_eq(rbi_heap_live(), heap_live, "host memory leaked");
    return status == REBATCH_OK;
}

static bool same(const struct result *a, const struct result *b)
{
    return memcmp(a->weights, b->weights, sizeof a->weights) == 0 &&
           memcmp(a->running, b->running, sizeof a->running) == 0 &&
           memcmp(a->moments, b->moments, sizeof a->moments) == 0 && a->random == b->random;
}

static void run_undisturbed(struct result *result, rebatch_toggle caching)
{
    cr_assert(run(result, caching, NULL, false, NULL), "%s", rebatch_last_error());
    cr_assert_gt(result->ooms, 0, "the cap should not fit the first micro-batch");
    OK(result->status);
}

/* ---- the undisturbed run ---- */

Test(step_faults, the_training_is_the_same_with_and_without_caching)
{
    struct result on, off;
    run_undisturbed(&on, REBATCH_ON);
    run_undisturbed(&off, REBATCH_OFF);
    cr_assert(same(&on, &off));
}

Test(step_faults, without_guards_the_comparison_sees_the_difference)
{
    struct result guarded, unguarded;
    run_undisturbed(&guarded, REBATCH_ON);
    forget_guards = true;
    run_undisturbed(&unguarded, REBATCH_ON);
    cr_assert_not(same(&guarded, &unguarded));
}

/* ---- device calls ---- */

struct verdict {
    uint64_t indexes;  /* calls that were failed, one a run */
    uint64_t finished; /* of these, runs that came to their end */
};

/* Fails each call of the kinds in turn. A run that ends well has the same result; one that does not
 * says why, and leaks nothing either way. */
static struct verdict fail_every_index(uint32_t calls, rebatch_status status, uint64_t times,
                                       rebatch_toggle caching)
{
    /* An error that is found when the update has returned cannot make the update undone: there the
     * step is not called again. */
    const bool once = times == 1 && calls != REBATCH_FAULT_LAST_ERROR;
    struct result expected, result;
    run_undisturbed(&expected, caching);
    struct verdict verdict = {0};
    for (uint64_t nth = 1;; nth++) {
        cr_assert_lt(nth, 20000, "there is no end to the calls");
        const rebatch_fault_plan plan = fault_plan(calls, status, nth, times);
        uint64_t failed = 0;
        const bool finished = run(&result, caching, &plan, once, &failed);
        if (finished)
            cr_assert(same(&expected, &result), "call %ju failed, and the result is another",
                      (uintmax_t)nth);
        else
            cr_assert(result.status == status || result.status == REBATCH_E_EXHAUSTED,
                      "call %ju failed, and the training ended with %s", (uintmax_t)nth,
                      rebatch_status_name(result.status));
        if (failed == 0 && finished)
            return verdict;
        verdict.indexes++;
        verdict.finished += finished;
    }
}

/* Calls that take memory, whichever of them the pool makes. */
#define TAKING 0

Test(step_faults, every_device_allocation_fails_once)
{
    const struct verdict on = fail_every_index(TAKING, REBATCH_OOM, 1, REBATCH_ON);
    cr_assert_gt(on.finished, 0);
    const struct verdict off = fail_every_index(TAKING, REBATCH_OOM, 1, REBATCH_OFF);
    cr_assert_gt(off.indexes, 10);
    cr_assert_gt(off.finished, off.indexes / 2, "a passing fault should be survived");
}

Test(step_faults, every_device_allocation_fails_for_ever)
{
    const struct verdict on =
        fail_every_index(TAKING, REBATCH_OOM, REBATCH_FAULT_FOREVER, REBATCH_ON);
    cr_assert_gt(on.indexes, 0);
    const struct verdict off =
        fail_every_index(TAKING, REBATCH_OOM, REBATCH_FAULT_FOREVER, REBATCH_OFF);
    cr_assert_gt(off.indexes, 10);
}

/* Two at once are more than "once more at the same size" can answer. */
Test(step_faults, two_device_allocations_in_a_row_fail)
{
    const struct verdict off = fail_every_index(TAKING, REBATCH_OOM, 2, REBATCH_OFF);
    cr_assert_gt(off.finished, 0);
    (void)fail_every_index(TAKING, REBATCH_OOM, 2, REBATCH_ON);
}

/* What stands between physical memory and its use: to a device without it these never come up. */
Test(step_faults, every_call_on_virtual_memory_fails_once_and_for_ever)
{
    static const uint32_t kinds[] = {REBATCH_FAULT_RESERVE, REBATCH_FAULT_CREATE, REBATCH_FAULT_MAP,
                                     REBATCH_FAULT_ACCESS, REBATCH_FAULT_UNMAP};
    static const rebatch_status statuses[] = {REBATCH_OOM, REBATCH_E_DEVICE};
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++)
        for (size_t s = 0; s < 2; s++) {
            (void)fail_every_index(kinds[k], statuses[s], 1, REBATCH_ON);
            (void)fail_every_index(kinds[k], statuses[s], REBATCH_FAULT_FOREVER, REBATCH_ON);
        }
}

static void fail_other_calls(uint32_t calls, uint64_t at_least)
{
    static const rebatch_toggle caching[] = {REBATCH_ON, REBATCH_OFF};
    for (size_t i = 0; i < 2; i++) {
        const struct verdict once = fail_every_index(calls, REBATCH_E_DEVICE, 1, caching[i]);
        cr_assert_geq(once.indexes, at_least, "calls of kinds %#x", calls);
        (void)fail_every_index(calls, REBATCH_E_DEVICE, REBATCH_FAULT_FOREVER, caching[i]);
    }
}

Test(step_faults, every_other_call_fails_once_and_for_ever)
{
    fail_other_calls(REBATCH_FAULT_COPY, 8); /* of guards */
    fail_other_calls(REBATCH_FAULT_FILL, 1);
    fail_other_calls(REBATCH_FAULT_STREAM, 8);
    fail_other_calls(REBATCH_FAULT_EVENT, 0);
    fail_other_calls(REBATCH_FAULT_LAST_ERROR, 8);
}

/* ---- host memory ---- */

static void fail_host_memory(uint64_t times, rebatch_toggle caching)
{
    struct result expected, result;
    run_undisturbed(&expected, caching);
    const uint64_t before = rbi_heap_calls();
    run_undisturbed(&expected, caching);
    const uint64_t calls = rbi_heap_calls() - before;
    cr_assert_gt(calls, 5);
    for (uint64_t nth = 1; nth <= calls; nth++) {
        rbi_heap_fail(nth, times);
        if (run(&result, caching, NULL, times == 1, NULL))
            cr_assert(same(&expected, &result), "host allocation %ju failed", (uintmax_t)nth);
        else
            cr_assert_eq(result.status, REBATCH_E_HOST_OOM, "host allocation %ju failed: %s",
                         (uintmax_t)nth, rebatch_status_name(result.status));
    }
}

Test(step_faults, every_host_allocation_fails_once_and_for_ever)
{
    fail_host_memory(1, REBATCH_ON);
    fail_host_memory(1, REBATCH_OFF);
    fail_host_memory(UINT64_MAX, REBATCH_ON);
    fail_host_memory(UINT64_MAX, REBATCH_OFF);
}

/* ---- resize ---- */

Test(step_faults, with_resize_every_call_that_takes_memory_fails)
{
    has_resize = true;
    const struct verdict once = fail_every_index(TAKING, REBATCH_OOM, 1, REBATCH_OFF);
    cr_assert_gt(once.indexes, 10);
    cr_assert_gt(once.finished, once.indexes / 2, "a passing fault should be survived");
    (void)fail_every_index(TAKING, REBATCH_OOM, REBATCH_FAULT_FOREVER, REBATCH_ON);
    fail_host_memory(1, REBATCH_ON);
    fail_host_memory(UINT64_MAX, REBATCH_OFF);
}

Test(step_faults, with_resize_every_look_at_stream_and_error_fails)
{
    has_resize = true;
    fail_other_calls(REBATCH_FAULT_STREAM, 8);
    fail_other_calls(REBATCH_FAULT_LAST_ERROR, 8);
}

/* ---- the steady state ---- */

Test(step_faults, a_clean_step_takes_nothing_from_the_heap)
{
    /* on the default stream: the queue of another stream is the host device's own affair */
    struct trainer t = {.on_default_stream = true};
    OK(set_up(&t, &OPTIONS(.micro_start = 4, .growth = REBATCH_OFF), NULL));
    OK(rebatch_step(t.rb, &ops, BATCH, &t, NULL));
    OK(rebatch_step(t.rb, &ops, BATCH, &t, NULL));
    const uint64_t calls = rbi_heap_calls();
    for (int i = 0; i < 20; i++)
        OK(rebatch_step(t.rb, &ops, BATCH, &t, NULL));
    cr_assert_eq(rbi_heap_calls(), calls);
    tear_down(&t);
}

/* Also one that the environment asks something of. */
Test(step_faults, a_session_that_does_not_open_leaves_nothing)
{
    rebatch_device *device;
    rebatch *rb = NULL;
    uint64_t failures = 0;
    (void)setenv("REBATCH_RUN_OOM", "3", 1);
    OK(rebatch_device_open_host(&device, CAPACITY_BYTES, NULL));
    const int64_t live = rbi_heap_live();
    for (uint64_t nth = 1; !rb; nth++) {
        rbi_heap_fail(nth, 1);
        const rebatch_status status = rebatch_open(&rb, device, NULL);
        rbi_heap_fail(0, 0);
        cr_assert_eq(status == REBATCH_OK, rb != NULL);
        failures += status != REBATCH_OK;
        cr_assert(rb || rbi_heap_live() == live, "heap call %d", (int)nth);
    }
    cr_assert_gt(failures, 3);
    rebatch_close(rb);
    rebatch_device_close(device);
}

Test(step_faults, a_step_that_recovers_takes_nothing_from_the_heap)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.grow_after = 1; /* grows and shrinks by turns */
    struct trainer t = {.on_default_stream = true};
    OK(set_up(&t, &options, NULL));
    rebatch_step_report report;
    uint64_t calls = 0;
    uint32_t ooms = 0;
    for (int i = 0; i < 40; i++) {
        if (i == 20) { /* each size has run, for which the pool keeps lists */
            calls = rbi_heap_calls();
            ooms = 0;
        }
        const rebatch_fault_plan plan = /* an OOM that forward swallowed */
            fault_plan(REBATCH_FAULT_LAST_ERROR, REBATCH_OOM, 2, 1);
        fault_arm(t.device, &plan);
        OK(rebatch_step(t.rb, &ops, BATCH, &t, &report));
        ooms += report.ooms;
    }
    cr_assert_geq(ooms, 20);
    cr_assert_eq(rbi_heap_calls(), calls, "what runs while an OOM is handled allocates nothing");
    tear_down(&t);
}
