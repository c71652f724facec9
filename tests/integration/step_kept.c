/* Owns the tests of callbacks that keep a buffer from one micro-batch to the next: what is held for
 * a size is not counted against it. Must not know the library's inside. */
#include <stdio.h>

#include "rig.h"

/* ---- a trainer that keeps its buffer, 1 MiB a sample, and makes a larger one when it must ---- */

struct trainer {
    rebatch_device *device;
    rebatch *rb;
    struct {
        void *memory;
        size_t room; /* samples */
    } buffer;        /* guarded */
    bool frees;      /* the update frees it */
    bool fails;      /* the next micro-batch says that it is out of memory */
    char trace[256]; /* the sizes that ran */
};

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    rebatch_status status = t->fails ? REBATCH_OOM : REBATCH_OK;
    t->fails = false;
    if (!status && t->buffer.room < mb->count) {
        status = rebatch_pool_free(mb->pool, t->buffer.memory);
        if (!status)
            status =
                rebatch_pool_alloc(&t->buffer.memory, mb->pool, mb->count * MIB(1), mb->stream, 0);
        t->buffer.room = status ? 0 : mb->count;
    }
    if (status)
        return status;
    (void)snprintf(t->trace + strlen(t->trace), sizeof t->trace - strlen(t->trace), " %zu",
                   mb->count);
    rebatch_mutating(t->rb);
    return REBATCH_OK;
}

static rebatch_status optimizer_step(void *user)
{
    struct trainer *t = user;
    rebatch_mutating(t->rb);
    if (!t->frees)
        return REBATCH_OK;
    const rebatch_status status = rebatch_pool_free(rebatch_get_pool(t->rb), t->buffer.memory);
    memset(&t->buffer, 0, sizeof t->buffer);
    return status;
}

static void trainer_open(struct trainer *t, size_t micro_start)
{
    memset(t, 0, sizeof *t);
    open_on_host(&t->device, &t->rb, MIB(80),
                 &OPTIONS(.micro_start = micro_start, .grow_after = 2));
    OK(rebatch_guard(t->rb, &t->buffer, sizeof t->buffer, REBATCH_GUARD_HOST));
}

CLOSE_BOTH(trainer)

/* The sizes that ran, and the OOMs. */
static void expect_step(struct trainer *t, size_t batch, const char *trace, uint32_t ooms)
{
    const rebatch_step_ops ops =
        OPS(nothing_to_do, forward_backward, optimizer_step, .flags = REBATCH_DECLARES_MUTATION);
    rebatch_step_report report;
    t->trace[0] = '\0';
    OK(rebatch_step(t->rb, &ops, batch, t, &report));
    cr_expect_str_eq(t->trace, trace);
    cr_expect_eq(report.ooms, ooms, "%u OOMs, not %u", report.ooms, ooms);
}

Test(step_kept, a_buffer_that_is_held_for_a_size_does_not_stand_in_its_way)
{
    OPEN(trainer, t, 64);
    for (int step = 0; step < 5; step++)
        expect_step(&t, 128, " 64 64", 0);
}

Test(step_kept, memory_that_a_kept_buffer_no_longer_holds_is_needed_again)
{
    OPEN(trainer, t, 64);
    t.frees = true;
    expect_step(&t, 128, " 64 64", 0);
    expect_step(&t, 128, " 64 64", 0);
    OK(rebatch_pool_set_limit(rebatch_get_pool(t.rb), MIB(40)));
    rebatch_step_report report;
    const rebatch_step_ops ops =
        OPS(nothing_to_do, forward_backward, optimizer_step, .flags = REBATCH_DECLARES_MUTATION);
    OK(rebatch_step(t.rb, &ops, 128, &t, &report));
    cr_expect_eq(report.ooms_in[REBATCH_PHASE_ADMISSION], 1, "it is known that 64 do not fit");
    cr_expect_eq(report.ooms, 1);
}

/* Micro-batches of 32 use the buffer of 64, and 64 fit only because it is there. */
Test(step_kept, growth_counts_what_is_held_for_the_larger_size)
{
    OPEN(trainer, t, 64);
    expect_step(&t, 64, " 64", 0);
    t.fails = true;
    expect_step(&t, 64, " 32 32", 1);
    expect_step(&t, 64, " 32 32", 0);
    expect_step(&t, 64, " 32 32", 0);
    expect_step(&t, 64, " 64", 0);
}

/* ---- a trainer whose sums of gradients are made anew in each step ---- */

#define SUMS (MIB(24))

struct summing {
    rebatch *rb;
    void *sums;       /* guarded */
    void *others;     /* guarded: what zero_grad makes for itself */
    bool makes_ahead; /* zero_grad makes the sums; else the first micro-batch does */
    bool makes_others;
};

static rebatch_status make(void **out, rebatch_pool *pool)
{
    return *out ? REBATCH_OK : rebatch_pool_alloc(out, pool, SUMS, NULL, 0);
}

static rebatch_status drop(void **block, rebatch_pool *pool)
{
    const rebatch_status status = rebatch_pool_free(pool, *block);
    *block = NULL;
    return status;
}

static rebatch_status begin_sums(void *user)
{
    struct summing *t = user;
    rebatch_pool *pool = rebatch_get_pool(t->rb);
    rebatch_status status = drop(&t->sums, pool);
    if (!status && t->makes_others)
        status = drop(&t->others, pool);
    if (!status && t->makes_others)
        status = make(&t->others, pool);
    return status || !t->makes_ahead ? status : make(&t->sums, pool);
}

/* Needs 1 MiB a sample beside the sums. */
static rebatch_status add_to_sums(const rebatch_microbatch *mb, void *user)
{
    struct summing *t = user;
    void *activations = NULL;
    rebatch_status status = make(&t->sums, mb->pool);
    if (!status)
        status = rebatch_pool_alloc(&activations, mb->pool, mb->count * MIB(1), mb->stream, 0);
    if (status)
        return status;
    rebatch_mutating(t->rb);
    return rebatch_pool_free(mb->pool, activations);
}

static rebatch_status update_by_sums(void *user)
{
    rebatch_mutating(((struct summing *)user)->rb);
    return REBATCH_OK;
}

static rebatch_step_report run_summing(struct summing *t)
{
    const rebatch_step_ops ops =
        OPS(begin_sums, add_to_sums, update_by_sums, .flags = REBATCH_DECLARES_MUTATION);
    rebatch_step_report report;
    OK(rebatch_step(t->rb, &ops, 64, t, &report));
    return report;
}

static void open_summing(struct summing *t, rebatch_device **device)
{
    OK(rebatch_device_open_host(device, MIB(160), NULL));
    OK(rebatch_open(&t->rb, *device, &OPTIONS(.micro_start = 32)));
    OK(rebatch_guard(t->rb, &t->sums, 2 * sizeof t->sums, REBATCH_GUARD_HOST));
}

/* 32 samples fit beside the sums and those of the step before, which are in use until the step has
 * ended, whoever makes the sums. */
Test(step_kept, what_zero_grad_makes_in_place_of_a_kept_buffer_is_held_too)
{
    struct summing t = {0};
    rebatch_device *device;
    open_summing(&t, &device);
    for (int step = 0; step < 6; step++) {
        cr_assert_eq(run_summing(&t).ooms, 0, "step %d", step);
        OK(rebatch_pool_set_limit(rebatch_get_pool(t.rb), 2 * SUMS + MIB(36)));
        t.makes_ahead = true;
    }
    rebatch_close(t.rb);
    rebatch_device_close(device);
}

Test(step_kept, what_zero_grad_makes_for_itself_holds_nothing)
{
    struct summing t = {.makes_others = true};
    rebatch_device *device;
    open_summing(&t, &device);
    cr_assert_eq(run_summing(&t).ooms, 0);
    cr_assert_eq(run_summing(&t).ooms, 0);
    OK(rebatch_pool_set_limit(rebatch_get_pool(t.rb), 4 * SUMS + MIB(28)));
    const rebatch_step_report report = run_summing(&t);
    cr_assert_eq(report.ooms, 1);
    cr_assert_eq(report.ooms_in[REBATCH_PHASE_ADMISSION], 1, "others, sums and 32 MiB are known");
    rebatch_close(t.rb);
    rebatch_device_close(device);
}
