/* Owns the test that a check and a map leave nothing behind, whatever call of the host heap or of
 * the device fails. */
#include "base/base.h"
#include "fault/fault_device.h"
#include "integration/rig.h"

struct trainer {
    rebatch_device *host, *device;
    rebatch *rb;
    double gradient, sum;
    float *pooled; /* a gradient without a name */
};

static rebatch_status zero_grad(void *user)
{
    struct trainer *t = user;
    t->gradient = 0;
    t->pooled[0] = 0;
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    void *memory;
    const rebatch_status status =
        rebatch_pool_alloc(&memory, mb->pool, mb->count * KIB(8), mb->stream, 0);
    if (status)
        return status;
    rebatch_mutating(t->rb);
    for (size_t i = 0; i < mb->count; i++)
        t->gradient += (double)(mb->first + i) / (double)mb->batch;
    t->pooled[0] += (float)mb->count / (float)mb->batch;
    return rebatch_pool_free(mb->pool, memory);
}

static rebatch_status optimizer_step(void *user)
{
    rebatch_mutating(((struct trainer *)user)->rb);
    return REBATCH_OK;
}

static rebatch_status evaluate(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    void *memory;
    const rebatch_status status =
        rebatch_pool_alloc(&memory, mb->pool, mb->count * KIB(8), mb->stream, 0);
    if (status)
        return status;
    for (size_t i = 0; i < mb->count; i++)
        t->sum += 1;
    return rebatch_pool_free(mb->pool, memory);
}

static void trainer_open(struct trainer *t)
{
    *t = (struct trainer){.sum = 0};
    OK(rebatch_device_open_host(&t->host, KIB(1024), NULL));
    OK(rebatch_device_open_fault(&t->device, t->host, NULL));
    OK(rebatch_open(&t->rb, t->device, &OPTIONS(.log_level = REBATCH_LOG_QUIET)));
    void *pooled;
    OK(rebatch_pool_alloc(&pooled, rebatch_get_pool(t->rb), sizeof *t->pooled, NULL, 0));
    t->pooled = pooled;
    t->pooled[0] = 0;
    OK(rebatch_guard(t->rb, &t->sum, sizeof t->sum, REBATCH_GUARD_HOST));
    OK(rebatch_watch(t->rb, "gradient", &t->gradient, sizeof t->gradient, REBATCH_GUARD_HOST,
                     REBATCH_F64));
}

static void trainer_close(struct trainer *t)
{
    rebatch_close(t->rb);
    rebatch_device_close(t->device);
    rebatch_device_close(t->host);
}

static rebatch_status check(struct trainer *t)
{
    const rebatch_step_ops ops =
        OPS(zero_grad, forward_backward, optimizer_step, .flags = REBATCH_DECLARES_MUTATION);
    return rebatch_check(t->rb, &ops, 8, t, NULL, NULL);
}

static rebatch_status map(struct trainer *t)
{
    const rebatch_map_ops ops = {.struct_size = sizeof ops, .run = evaluate};
    t->sum = 0;
    const rebatch_status status = rebatch_map(t->rb, &ops, 20, t, NULL);
    cr_assert_eq(t->sum, status ? 0 : 20);
    return status;
}

/* With the n-th call of the heap failing; 0: none. Gives how many calls there were. */
static uint64_t run_without(uint64_t nth, rebatch_status (*run)(struct trainer *))
{
    struct trainer t;
    const int64_t blocks = rbi_heap_live();
    trainer_open(&t);
    const uint64_t before = rbi_heap_calls();
    rbi_heap_fail(nth, 1);
    const rebatch_status status = run(&t);
    rbi_heap_fail(0, 0);
    const uint64_t calls = rbi_heap_calls() - before;
    cr_assert(status == REBATCH_OK || (nth && status == REBATCH_E_HOST_OOM), "call %ju: %s",
              (uintmax_t)nth, rebatch_last_error());
    cr_assert_eq(run(&t), REBATCH_OK, "after call %ju: %s", (uintmax_t)nth, rebatch_last_error());
    trainer_close(&t);
    cr_assert_eq(rbi_heap_live(), blocks, "call %ju leaks", (uintmax_t)nth);
    return calls;
}

static void every_heap_call_fails(rebatch_status (*run)(struct trainer *), uint64_t least)
{
    const uint64_t calls = run_without(0, run);
    cr_assert_geq(calls, least, "there are %ju calls only", (uintmax_t)calls);
    for (uint64_t nth = 1; nth <= calls && nth < 300; nth++)
        (void)run_without(nth, run);
}

Test(check_faults, every_heap_call_of_a_check_fails)
{
    every_heap_call_fails(check, 6);
}

Test(check_faults, every_heap_call_of_a_map_fails)
{
    every_heap_call_fails(map, 1);
}

/* A device that fails for good ends the check, and one that fails once is an OOM or an end. */
Test(check_faults, every_device_call_of_a_check_fails)
{
    for (uint64_t nth = 1; nth < 400; nth++) {
        AUTO_CLOSE(trainer, t);
        trainer_open(&t);
        OK(rebatch_fault_arm(t.device, &FAULTS(.calls = REBATCH_FAULT_ALLOC | REBATCH_FAULT_CREATE |
                                                        REBATCH_FAULT_MAP | REBATCH_FAULT_ACCESS |
                                                        REBATCH_FAULT_RESERVE,
                                               .nth = nth, .times = nth % 3 + 1)));
        (void)check(&t);
        OK(rebatch_fault_arm(t.device, NULL));
        cr_assert_eq(check(&t), REBATCH_OK, "after call %ju: %s", (uintmax_t)nth,
                     rebatch_last_error());
    }
}
