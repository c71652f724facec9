/* Owns the tests of checks of a step with buffers that resize makes.
 * Must not know more of the library than its public headers say. */
#include "check_common.h"
#include "rig.h"

#define BATCH 24
#define BUFFERS 3

struct trainer {
    struct check_run run;
    rebatch_device *device;
    bool forgets; /* a buffer that an OOM has left out */
    bool has_resized;
    double *buffers[BUFFERS];
    double gradient;
};

static rebatch_status resize(size_t count, void *user)
{
    struct trainer *t = user;
    for (size_t i = 0; i < BUFFERS; i++) {
        const bool is_last = i == BUFFERS - 1;
        if (t->forgets && is_last && t->has_resized && !t->buffers[i])
            continue;
        t->buffers[i] = NULL;
        void *memory;
        const rebatch_status status =
            rebatch_pool_alloc(&memory, rebatch_get_pool(t->run.rb), count << 12, NULL, 0);
        if (status)
            return status;
        t->buffers[i] = memory;
    }
    t->has_resized = true;
    return REBATCH_OK;
}

static rebatch_status zero_grad(void *user)
{
    struct trainer *t = user;
    t->gradient = 0;
    return REBATCH_OK;
}

/* One allocation. */
static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    void *memory;
    const rebatch_status status =
        rebatch_pool_alloc(&memory, mb->pool, mb->count << 10, mb->stream, 0);
    if (status)
        return status;
    rebatch_mutating(t->run.rb);
    for (size_t i = 0; i < mb->count; i++)
        for (size_t k = 0; k < BUFFERS; k++)
            if (t->buffers[k]) {
                t->buffers[k][i << 9] = (double)check_input(mb->first + i, k);
                t->gradient += t->buffers[k][i << 9] / (double)mb->batch;
            }
    return rebatch_pool_free(mb->pool, memory);
}

static rebatch_status check(rebatch_check_report *report, bool forgets)
{
    static struct trainer t;
    rebatch_step_ops ops = check_step_ops(zero_grad, forward_backward);
    ops.resize = resize;
    t = (struct trainer){.forgets = forgets};
    open_on_host(&t.device, &t.run.rb, MIB(8), &OPTIONS(.log_level = REBATCH_LOG_QUIET));
    OK(rebatch_watch(t.run.rb, "gradient", &t.gradient, sizeof t.gradient, REBATCH_GUARD_HOST,
                     REBATCH_F64));
    const rebatch_status status = rebatch_check(t.run.rb, &ops, BATCH, &t, NULL, report);
    rebatch_close(t.run.rb);
    rebatch_device_close(t.device);
    return status;
}

Test(check_resize, each_allocation_of_resize_fails_once)
{
    rebatch_check_report report;
    cr_expect_eq(check(&report, false), REBATCH_OK, "%s", check_texts(&report));
    cr_expect_eq(report.allocations, BUFFERS + 1);
    cr_expect_eq(report.ooms, report.allocations, "%s", check_texts(&report));
    cr_expect_eq(check(&report, true), REBATCH_E_STATE, "%s", check_texts(&report));
    const rebatch_finding *const found = check_find(&report, REBATCH_FINDING_AFTER_OOM, "gradient");
    cr_expect(found && strstr(found->text, "after allocation 3 (96.0 KiB) of resize failed"), "%s",
              check_texts(&report));
}
