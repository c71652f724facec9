/* Owns the fault tests of the probe: every heap call and every device call failing, once and for
 * ever.
 * Must not know how a size is found. */
#include "base/base.h"
#include "fault/fault_common.h"
#include "fault/fault_device.h"
#include "integration/rig.h"

#define SAMPLE_BYTES ((size_t)96 << 10)
#define CAPACITY_BYTES ((size_t)40 * (64 << 10))
#define BATCH 32

/* ---- a small training ---- */

struct trainer {
    rebatch_device *host, *device;
    rebatch *rb;
    rebatch_stream stream;
    void *once;         /* made at first use */
    void *guarded_once; /* the same, with a guarded pointer */
    void *running;      /* guarded memory of the device */
    bool is_caching;
    double accumulated;
    uint64_t random; /* guarded */
};

static rebatch_status take(const struct trainer *t, void **out, size_t bytes)
{
    return rebatch_pool_alloc(out, rebatch_get_pool(t->rb), bytes, t->stream, 0);
}

static rebatch_status give(const struct trainer *t, void *block)
{
    return rebatch_pool_free(rebatch_get_pool(t->rb), block);
}

static rebatch_status zero_grad(void *user)
{
    struct trainer *t = user;
    rebatch_mutating(t->rb);
    t->accumulated = 0;
    return REBATCH_OK;
}

/* What was made is published at the end of the callback only. */
static rebatch_status take_once(const struct trainer *t, void **made, void *kept, size_t bytes)
{
    *made = kept;
    return kept ? REBATCH_OK : take(t, made, bytes);
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    void *once, *activations, *gradients, *pieces[BATCH] = {NULL};
    t->random = t->random * 6364136223846793005u + mb->count;
    rebatch_status status = take_once(t, &once, t->once, 5000);
    if (!status)
        status = take_once(t, &t->guarded_once, t->guarded_once, 3000);
    if (!status)
        status = rebatch_fill(t->device, t->running, (uint8_t)mb->count, 512, t->stream);
    if (!status)
        status = take(t, &activations, SAMPLE_BYTES * mb->count);
    for (size_t i = 0; i * 4 < mb->count && !status; i++)
        status = take(t, &pieces[i], 20000);
    for (size_t i = 0; i * 4 < mb->count && !status; i++)
        status = give(t, pieces[i]);
    if (!status)
        status = rebatch_reserve(t->rb, 700 * mb->count);
    if (status)
        return status;
    rebatch_mutating(t->rb);
    t->accumulated += (double)mb->count;
    status = take(t, &gradients, 700 * mb->count);
    if (!status)
        status = give(t, gradients);
    if (!status)
        status = give(t, activations);
    if (!status)
        t->once = once;
    return status;
}

static rebatch_status optimizer_step(void *user)
{
    struct trainer *t = user;
    rebatch_mutating(t->rb);
    return REBATCH_OK;
}

static const rebatch_step_ops ops =
    OPS(zero_grad, forward_backward, optimizer_step, .flags = REBATCH_DECLARES_MUTATION);

static void set_up(struct trainer *t, rebatch_toggle caching)
{
    *t = (struct trainer){.random = 1, .is_caching = caching == REBATCH_ON};
    fault_open(&t->host, &t->device, CAPACITY_BYTES);
    OK(rebatch_stream_create(&t->stream, t->device));
    OK(rebatch_open(&t->rb, t->device, &OPTIONS(.pool.caching = caching, .stream = t->stream)));
    OK(take(t, &t->running, 512));
    OK(rebatch_guard(t->rb, t->running, 512, REBATCH_GUARD_DEVICE));
    OK(rebatch_guard(t->rb, &t->random, sizeof t->random, REBATCH_GUARD_HOST));
    OK(rebatch_guard(t->rb, &t->guarded_once, sizeof t->guarded_once, REBATCH_GUARD_HOST));
}

static void tear_down(struct trainer *t)
{
    rebatch_close(t->rb);
    rebatch_stream_destroy(t->device, t->stream);
    fault_close(t->host, t->device);
}

static rebatch_status probe(struct trainer *t, rebatch_probe_report *report)
{
    rebatch_probe_options options = REBATCH_PROBE_OPTIONS_INIT;
    options.reserve_bytes = t->is_caching ? 100000 : 0; /* else in as many pages as pieces */
    return rebatch_probe(t->rb, &ops, BATCH, t, &options, report);
}

/* ---- what a failure leaves ---- */

/* What is live before the first trial, what is made once, and what a clean probe finds. */
struct expected {
    uint64_t before, once;
    size_t size;
};

static struct expected undisturbed(rebatch_toggle caching)
{
    struct trainer t;
    struct expected expected;
    rebatch_probe_report report;
    set_up(&t, caching);
    expected.before = live_bytes_of(t.rb);
    OK(probe(&t, &report));
    expected.once = live_bytes_of(t.rb) - expected.before;
    expected.size = report.size;
    cr_assert(2 < report.size && report.size < BATCH);
    tear_down(&t);
    return expected;
}

/* The session is as it was, and works. Where the device was down when guarded state was put back,
 * it is not. */
static void assert_usable(struct trainer *t, const struct expected *expected, rebatch_status status,
                          bool has_guards)
{
    rebatch_probe_report report;
    rebatch_step_report step;
    cr_assert_eq(live_bytes_of(t->rb), expected->before + (t->once ? expected->once : 0),
                 "after %s: %ju live, %ju before, %ju once, %d", rebatch_status_name(status),
                 (uintmax_t)live_bytes_of(t->rb), (uintmax_t)expected->before,
                 (uintmax_t)expected->once, t->once != NULL);
    if (has_guards)
        cr_assert(t->random == 1 && !t->guarded_once, "%s", rebatch_status_name(status));
    t->guarded_once = NULL;
    cr_assert_eq(probe(t, &report), REBATCH_OK, "after %s: %s", rebatch_status_name(status),
                 rebatch_last_error());
    cr_assert(report.size <= expected->size && report.size + 1 >= expected->size,
              "after %s: %zu of %zu", rebatch_status_name(status), report.size, expected->size);
    cr_assert_eq(t->accumulated, 0);
    OK(rebatch_step(t->rb, &ops, BATCH, t, &step));
    OK(rebatch_step(t->rb, &ops, BATCH, t, &step));
    cr_assert_eq(t->accumulated, BATCH);
}

/* ---- device calls ---- */

static void fail_device(uint32_t calls, rebatch_status failure, uint64_t times,
                        rebatch_toggle caching)
{
    const struct expected expected = undisturbed(caching);
    for (uint64_t nth = 1, failed = 1; failed > 0; nth++) {
        struct trainer t;
        rebatch_probe_report report;
        const rebatch_fault_plan plan = fault_plan(calls, failure, nth, times);
        set_up(&t, caching);
        fault_arm(t.device, &plan);
        const rebatch_status status = probe(&t, &report);
        OK(rebatch_fault_counts(t.device, NULL, &failed));
        fault_arm(t.device, NULL);
        cr_assert(status == REBATCH_OK || status == failure || status == REBATCH_E_EXHAUSTED,
                  "call %d: %s", (int)nth, rebatch_status_name(status));
        cr_assert_eq(report.status, status);
        cr_assert_leq(report.size, expected.size);
        cr_assert((report.size > 0) == (status == REBATCH_OK));
        /* The callback had succeeded, and published what was then taken back. */
        if (calls == REBATCH_FAULT_LAST_ERROR && live_bytes_of(t.rb) == expected.before)
            t.once = NULL;
        assert_usable(&t, &expected, status, !(calls & REBATCH_FAULT_COPY));
        tear_down(&t);
        cr_assert_lt(nth, 3000, "there is no end to the calls");
    }
}

Test(probe_faults, every_device_call_fails)
{
    for (size_t i = 0; i < FAULT_KINDS; i++)
        for (rebatch_toggle caching = REBATCH_ON; caching <= REBATCH_OFF; caching++) {
            fail_device(fault_kinds[i].calls, fault_kinds[i].status, 1, caching);
            fail_device(fault_kinds[i].calls, fault_kinds[i].status, REBATCH_FAULT_FOREVER,
                        caching);
        }
}

/* ---- host memory ---- */

static void fail_heap(uint64_t times, rebatch_toggle caching)
{
    const struct expected expected = undisturbed(caching);
    for (uint64_t nth = 1;; nth++) {
        struct trainer t;
        rebatch_probe_report report;
        set_up(&t, caching);
        const uint64_t calls = rbi_heap_calls();
        rbi_heap_fail(nth, times);
        const rebatch_status status = probe(&t, &report);
        rbi_heap_fail(0, 0);
        const bool is_last = rbi_heap_calls() - calls < nth;
        cr_assert(status == REBATCH_OK || status == REBATCH_E_HOST_OOM, "call %d: %s", (int)nth,
                  rebatch_status_name(status));
        assert_usable(&t, &expected, status, true);
        tear_down(&t);
        if (status == REBATCH_OK && is_last)
            return;
        cr_assert_lt(nth, 20000, "there is no end to the calls");
        nth += nth > 200 ? nth / 16 : 0; /* dry runs all make the same calls */
    }
}

Test(probe_faults, every_heap_call_fails_once_and_for_ever)
{
    fail_heap(1, REBATCH_ON);
    fail_heap(1, REBATCH_OFF);
    fail_heap(UINT64_MAX, REBATCH_ON);
    fail_heap(UINT64_MAX, REBATCH_OFF);
}
