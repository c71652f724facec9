/* Owns the tests of the last resort: what is tried again where nothing smaller or lighter is left,
 * since others may give memory back.
 * Must not know more of the library than its public headers say. */
#include "step_common.h"

/* A session with one sample, for which another pool leaves too little memory. */
struct shared {
    rebatch_device *device;
    rebatch *rb;
    rebatch_pool *other;
    void *held;             /* of the other pool */
    uint32_t frees_at;      /* the RETRY event at which that is freed; 0: never */
    uint32_t retries;       /* such events */
    uint32_t waits;         /* of these, those that say of a wait */
    size_t sample_bytes;    /* that forward_backward needs */
    enum rebatch_phase out; /* ZERO_GRAD: that needs it */
};

static void give_back(const rebatch_event *event, void *user)
{
    struct shared *t = user;
    char line[512];
    if (event->kind != REBATCH_EVENT_RETRY)
        return;
    t->waits += event->text && strstr(event->text, " ms to wait)");
    (void)rebatch_event_format(line, sizeof line, event);
    HAS(line, "; tried once more");
    if (++t->retries == t->frees_at) {
        OK(rebatch_pool_free(t->other, t->held));
        OK(rebatch_pool_trim(t->other, 0, NULL));
    }
}

static rebatch_status use(const struct shared *t, bool is_due)
{
    void *memory;
    if (!is_due)
        return REBATCH_OK;
    const rebatch_status status =
        rebatch_pool_alloc(&memory, rebatch_get_pool(t->rb), t->sample_bytes, NULL, 0);
    return status ? status : rebatch_pool_free(rebatch_get_pool(t->rb), memory);
}

static rebatch_status zero_grad(void *user)
{
    const struct shared *t = user;
    return use(t, t->out == REBATCH_PHASE_ZERO_GRAD);
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    const struct shared *t = user;
    (void)mb;
    const rebatch_status status = use(t, t->out != REBATCH_PHASE_ZERO_GRAD);
    if (!status)
        rebatch_mutating(t->rb);
    return status;
}

static rebatch_status optimizer_step(void *user)
{
    const struct shared *t = user;
    rebatch_mutating(t->rb);
    return REBATCH_OK;
}

/* A device of 64 MiB, of which the other pool has 40. */
static void shared_open(struct shared *t, rebatch_options options, uint32_t frees_at)
{
    *t = (struct shared){
        .frees_at = frees_at, .sample_bytes = MIB(32), .out = REBATCH_PHASE_FORWARD};
    options.on_event = give_back;
    options.on_event_user = t;
    open_on_host(&t->device, &t->rb, MIB(64), &options);
    OK(rebatch_pool_create(&t->other, t->device, NULL));
    OK(rebatch_pool_alloc(&t->held, t->other, MIB(40), NULL, 0));
}

static void shared_close(struct shared *t)
{
    rebatch_close(t->rb);
    rebatch_pool_destroy(t->other);
    rebatch_device_close(t->device);
}

static rebatch_status step(struct shared *t)
{
    const rebatch_step_ops ops =
        OPS(zero_grad, forward_backward, optimizer_step, .flags = REBATCH_DECLARES_MUTATION);
    return rebatch_step(t->rb, &ops, 1, t, NULL);
}

/* Five tries at the most, before each of which but the first it waits. */
Test(step_waits, memory_that_others_hold_is_waited_for)
{
    static const enum rebatch_phase where[] = {REBATCH_PHASE_FORWARD, REBATCH_PHASE_ZERO_GRAD};
    for (size_t i = 0; i < 2; i++) {
        for (uint32_t frees_at = 1; frees_at <= 6; frees_at++) {
            OPEN(shared, t, OPTIONS(.oom_wait_ms = 40), frees_at);
            t.out = where[i];
            const bool is_late = frees_at > 5;
            cr_assert_eq(step(&t), is_late ? REBATCH_E_EXHAUSTED : REBATCH_OK, "freed at %u: %s",
                         frees_at, rebatch_last_error());
            cr_expect_eq(t.retries, is_late ? 5 : frees_at);
            cr_expect_eq(t.waits, t.retries - 1);
        }
    }
}

Test(step_waits, what_it_waits_is_time_that_is_lost)
{
    rebatch_step_report report;
    OPEN(shared, t, OPTIONS(.oom_wait_ms = 40), 0);
    const rebatch_step_ops ops =
        OPS(zero_grad, forward_backward, optimizer_step, .flags = REBATCH_DECLARES_MUTATION);
    cr_assert_eq(rebatch_step(t.rb, &ops, 1, &t, &report), REBATCH_E_EXHAUSTED);
    cr_expect_eq(report.ooms, 6);
    cr_expect_geq(report.lost_ns, 39000000u);
}

/* It would not fit without the others, or a limit of one's own is what is short, or "stop" says
 * it. */
Test(step_waits, what_others_cannot_give_is_not_waited_for)
{
    const struct {
        rebatch_options options;
        size_t sample_bytes;
    } rows[] = {
        {OPTIONS(.oom_wait_ms = 3600000), MIB(65)},
        {OPTIONS(.oom_wait_ms = 3600000, .pool.limit_bytes = MIB(16)), MIB(32)},
        {OPTIONS(.oom_wait_ms = 3600000, .on_oom = REBATCH_ON_OOM_STOP), MIB(32)},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        OPEN(shared, t, rows[i].options, 0);
        t.sample_bytes = rows[i].sample_bytes;
        cr_assert_eq(step(&t), REBATCH_E_EXHAUSTED, "row %zu", i);
        cr_expect_eq(t.retries, 0, "row %zu", i);
    }
}

/* An OOM of a language that counts references, whose exception says no size. */
Test(step_waits, what_nobody_knows_of_is_tried_once_more_at_once)
{
    for (uint32_t times = 1; times <= 2; times++) {
        OPEN(rig, rig, MIB(64), &OPTIONS(.oom_wait_ms = 3600000, .reclaim = REBATCH_OFF));
        script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_RETURN);
        rig.script.faults[0].times = times;
        STEP(&rig, 1, times == 1 ? REBATCH_OK : REBATCH_E_EXHAUSTED,
             times == 1 ? "z f0+1! f0+1~1 u" : "z f0+1! f0+1~1!");
    }
}

Test(step_waits, the_longest_wait_is_an_hour)
{
    rebatch_device *device;
    rebatch *rb;
    OK(rebatch_device_open_host(&device, MIB(1), 0));
    FAILS(rebatch_open(&rb, device, &OPTIONS(.oom_wait_ms = 3600001)), REBATCH_E_INVALID,
          "oom_wait_ms is 3600001: expected at most 3600000");
    rebatch_device_close(device);
}
