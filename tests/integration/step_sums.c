/* Owns the tests of accumulators that zero_grad does not clear, and of leaving a step by the codes
 * of libraries. Must not know the library's inside. */
#include "rebatch/current.h"
#include "rig.h"

#define SUMS 16
#define BATCH 32

/* Gradients that keep a half of themselves from step to step, as momentum. */
struct trainer {
    rebatch_device *device;
    rebatch *rb;
    double *sums; /* host or device memory, which the host device's is */
    double weights[SUMS];
    int fails_before, fails_after; /* attempts that run out of memory, of rebatch_mutating() */
};

static void train(size_t first, size_t count, void *user)
{
    struct trainer *t = user;
    if (t->fails_before-- > 0)
        rebatch_escape(t->rb, REBATCH_OOM);
    rebatch_mutating(t->rb);
    for (size_t i = first; i < first + count; i++)
        for (size_t k = 0; k < SUMS; k++)
            t->sums[k] += (double)(i * k) - t->weights[k];
    if (t->fails_after-- > 0)
        rebatch_escape(t->rb, REBATCH_OOM);
}

static void update(void *user)
{
    struct trainer *t = user;
    rebatch_mutating(t->rb);
    for (size_t k = 0; k < SUMS; k++) {
        t->weights[k] += t->sums[k] / 64;
        t->sums[k] /= 2;
    }
}

static void run(struct trainer *t, rebatch_guard_kind kind, bool fails)
{
    static double host[SUMS];
    void *memory = host;
    rebatch_pool_stats before, after;
    memset(t, 0, sizeof *t);
    open_on_host(&t->device, &t->rb, (size_t)64 << 20, &(rebatch_options)REBATCH_OPTIONS_INIT);
    if (kind == REBATCH_GUARD_DEVICE)
        OK(rebatch_alloc(&memory, t->rb, sizeof host));
    t->sums = memset(memory, 0, sizeof host);
    OK(rebatch_pool_get_stats(&before, rebatch_get_pool(t->rb)));
    OK(rebatch_guard_sums(t->rb, t->sums, sizeof host, kind));
    OK(rebatch_pool_get_stats(&after, rebatch_get_pool(t->rb)));
    cr_expect_eq(after.live_bytes - before.live_bytes,
                 kind == REBATCH_GUARD_DEVICE ? REBATCH_POOL_UNIT_BYTES : 0,
                 "one copy of device memory");
    for (int step = 0; step < 6; step++) {
        rebatch_step_report report;
        t->fails_before = fails && step % 3 == 1;
        t->fails_after = fails && step % 3 == 2;
        OK(rebatch_step_plain(t->rb, BATCH, NULL, train, update, t, REBATCH_DECLARES_MUTATION,
                              &report));
        cr_expect_eq(report.ooms, fails && step % 3 > 0);
    }
    rebatch_close(t->rb);
    rebatch_device_close(t->device);
}

Test(step_sums, momentum_that_is_kept_in_the_sums_is_that_of_a_run_without_an_oom)
{
    static const rebatch_guard_kind kinds[] = {REBATCH_GUARD_HOST, REBATCH_GUARD_DEVICE};
    for (size_t i = 0; i < 2; i++) {
        struct trainer clean, failed;
        run(&clean, kinds[i], false);
        run(&failed, kinds[i], true);
        for (size_t k = 0; k < SUMS; k++)
            cr_expect_eq(failed.weights[k], clean.weights[k]);
    }
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    train(mb->first, mb->count, user);
    return REBATCH_OK;
}

Test(step_sums, a_probe_leaves_them_as_they_were)
{
    static double host[SUMS];
    const rebatch_step_ops ops =
        OPS(NULL, forward_backward, nothing_to_do, .flags = REBATCH_DECLARES_MUTATION);
    struct trainer t = {.sums = host};
    open_on_host(&t.device, &t.rb, (size_t)64 << 20, &(rebatch_options)REBATCH_OPTIONS_INIT);
    for (size_t k = 0; k < SUMS; k++)
        host[k] = (double)k;
    OK(rebatch_guard_sums(t.rb, host, sizeof host, REBATCH_GUARD_HOST));
    OK(rebatch_probe(t.rb, &ops, BATCH, &t, NULL, NULL));
    for (size_t k = 0; k < SUMS; k++)
        cr_expect_eq(host[k], (double)k);
    rebatch_close(t.rb);
    rebatch_device_close(t.device);
}

Test(step_sums, what_it_refuses)
{
    double sum = 0;
    cr_expect_eq(rebatch_guard_sums(NULL, &sum, sizeof sum, REBATCH_GUARD_HOST), REBATCH_E_INVALID);
}

/* ---- codes of libraries ---- */

struct code {
    void (*escape)(int code);
    int oom, other;
};

static const struct code *code;
static int left, came_back;

static void nothing(void *user)
{
    (void)user;
}

static void fail_once(size_t first, size_t count, void *user)
{
    (void)first, (void)user;
    code->escape(0);
    code->escape(code->other);
    came_back++;
    if (count == 2) {
        left++;
        code->escape(code->oom);
        cr_assert_fail("it came back from %d", code->oom);
    }
}

Test(step_escape, an_oom_of_a_library_leaves_the_step_and_no_other_code_does)
{
    /* CUBLAS_STATUS_ALLOC_FAILED and INVALID_VALUE, those of cuDNN 8 and 9 */
    static const struct code codes[] = {{rebatch_escape_on_cublas_oom, 3, 7},
                                        {rebatch_escape_on_cudnn_oom, 2, 3},
                                        {rebatch_escape_on_cudnn_oom, 4004, 2000},
                                        {rebatch_escape_on_oom, 2, 1}};
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) {
        rebatch_device *device;
        rebatch *rb;
        rebatch_step_report report;
        code = &codes[i];
        left = came_back = 0;
        code->escape(code->oom); /* no session */
        open_on_host(&device, &rb, (size_t)1 << 20, &(rebatch_options)REBATCH_OPTIONS_INIT);
        OK(rebatch_set_current(rb));
        code->escape(code->oom); /* no step */
        OK(rebatch_step_plain(rb, 2, nothing, fail_once, nothing, NULL, 0, &report));
        cr_expect_eq(report.ooms, 1);
        cr_expect_eq(left, 1);
        cr_expect_eq(came_back, 3);
        rebatch_close(rb);
        rebatch_device_close(device);
    }
}
