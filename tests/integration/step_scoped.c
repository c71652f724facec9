/* Owns the tests of memory that ends with its micro-batch (REBATCH_SCOPED_MEMORY).
 * Must not know the library's inside. */
#include <pthread.h>
#include <stdlib.h>

#include "rig.h"

#define BATCH 64

/* Allocates in every call and frees nothing, but for what is older. */
struct trainer {
    rebatch *rb;
    size_t sum, parameter;
    void *last;  /* of the call before */
    void *older; /* from before the step */
    void *others;
    bool frees_late, has_thread;
};

static rebatch_status zero_grad(void *user)
{
    ((struct trainer *)user)->sum = 0;
    return REBATCH_OK;
}

static void *allocate_there(void *user)
{
    struct trainer *t = user;
    return rebatch_pool_alloc(&t->others, rebatch_get_pool(t->rb), MIB(1), NULL, 0) ? t : NULL;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    void *memory;
    if (t->frees_late && t->last)
        OK(rebatch_pool_free(mb->pool, t->last));
    for (int i = 0; i < 2; i++) {
        const rebatch_status status =
            rebatch_pool_alloc(&memory, mb->pool, mb->count * MIB(1) / 2, mb->stream, 0);
        if (status)
            return status;
    }
    if (t->older) {
        OK(rebatch_pool_free(mb->pool, t->older));
        t->older = NULL;
    }
    if (t->has_thread && !t->others) {
        pthread_t thread;
        void *failed;
        cr_assert_eq(pthread_create(&thread, NULL, allocate_there, t), 0);
        cr_assert_eq(pthread_join(thread, &failed), 0);
        cr_assert_null(failed);
    }
    t->last = memory;
    rebatch_mutating(t->rb);
    for (size_t i = 0; i < mb->count; i++)
        t->sum += mb->first + i;
    return REBATCH_OK;
}

static rebatch_status optimizer_step(void *user)
{
    struct trainer *t = user;
    rebatch_mutating(t->rb);
    t->parameter += t->sum;
    return REBATCH_OK;
}

static const rebatch_step_ops ops = OPS(zero_grad, forward_backward, optimizer_step,
                                        .flags = REBATCH_DECLARES_MUTATION | REBATCH_SCOPED_MEMORY);

static rebatch *open_with(const char *settings)
{
    rebatch *rb;
    OK(rebatch_open_default(&rb, settings));
    return rb;
}

static uint64_t live_bytes(const rebatch *rb)
{
    const rebatch_pool_stats stats = pool_stats_of(rebatch_get_pool(rb));
    return stats.live_bytes + stats.deferred_bytes;
}

Test(step_scoped, what_a_micro_batch_has_allocated_ends_with_it)
{
    for (int late = 0; late < 2; late++) {
        rebatch_step_report report;
        struct trainer t = {.rb = open_with("device.capacity = 24MiB"), .frees_late = late};
        for (size_t step = 1; step <= 3; step++) {
            OK(rebatch_step(t.rb, &ops, BATCH, &t, &report));
            cr_expect_eq(t.parameter, step * BATCH * (BATCH - 1) / 2);
            cr_expect_eq(live_bytes(t.rb), 0);
            cr_expect_eq(report.microbatches, 4);
            t.last = late ? t.last : NULL;
        }
        rebatch_close(t.rb);
    }
}

Test(step_scoped, what_is_older_or_another_threads_does_not)
{
    struct trainer t = {.rb = open_with("device.capacity = 24MiB"), .has_thread = true};
    void *kept;
    OK(rebatch_pool_alloc(&kept, rebatch_get_pool(t.rb), MIB(1), NULL, 0));
    OK(rebatch_pool_alloc(&t.older, rebatch_get_pool(t.rb), MIB(1), NULL, 0));
    OK(rebatch_step(t.rb, &ops, BATCH, &t, NULL));
    cr_expect_eq(t.parameter, BATCH * (BATCH - 1) / 2);
    cr_expect_eq(live_bytes(t.rb), MIB(2), "the kept one, and the other thread's");
    cr_expect_eq(rebatch_pool_free(rebatch_get_pool(t.rb), kept), REBATCH_OK);
    cr_expect_eq(rebatch_pool_free(rebatch_get_pool(t.rb), t.others), REBATCH_OK);
    cr_expect_eq(live_bytes(t.rb), 0);
    rebatch_close(t.rb);
}

/* ---- pointers to it ---- */

/* Allocates what is NULL, as a trainer does that keeps its activations. */
static rebatch_status run_kept(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    cr_expect_null(t->last, "a pointer to memory that was freed");
    const rebatch_status status =
        rebatch_pool_alloc(&t->last, mb->pool, mb->count * MIB(1), mb->stream, 0);
    if (!status)
        rebatch_mutating(t->rb);
    return status;
}

Test(step_scoped, guarded_pointers_to_it_become_null)
{
    rebatch_step_ops kept = ops;
    struct trainer t = {.rb = open_with("device.capacity = 24MiB")};
    kept.forward_backward = run_kept;
    OK(rebatch_pool_alloc(&t.older, rebatch_get_pool(t.rb), MIB(1), NULL, 0));
    OK(rebatch_guard(t.rb, &t.last, sizeof t.last, REBATCH_GUARD_HOST));
    OK(rebatch_guard(t.rb, &t.older, sizeof t.older, REBATCH_GUARD_HOST));
    for (int step = 0; step < 3; step++) {
        OK(rebatch_step(t.rb, &kept, BATCH, &t, NULL));
        cr_expect_null(t.last);
    }
    cr_expect_not_null(t.older);
    cr_expect_eq(live_bytes(t.rb), MIB(1));
    rebatch_close(t.rb);
}

static rebatch_status evaluate(const rebatch_microbatch *samples, void *user)
{
    return forward_backward(samples, user);
}

Test(step_scoped, a_map_may_have_it_and_nothing_else)
{
    rebatch_step_report report;
    rebatch_map_ops map = REBATCH_MAP_OPS_INIT;
    struct trainer t = {.rb = open_with("device.capacity = 24MiB")};
    map.run = evaluate;
    map.flags = REBATCH_SCOPED_MEMORY;
    OK(rebatch_map(t.rb, &map, BATCH, &t, &report));
    cr_expect_eq(t.sum, BATCH * (BATCH - 1) / 2);
    cr_expect_eq(live_bytes(t.rb), 0);
    map.flags = REBATCH_DECLARES_MUTATION;
    cr_expect_eq(rebatch_map(t.rb, &map, BATCH, &t, &report), REBATCH_E_INVALID);
    rebatch_close(t.rb);
}

/* What is held after a micro-batch would be counted twice. */
Test(step_scoped, probes_and_learning_find_the_largest_size)
{
    const char *const settings[] = {"device.capacity = 24MiB",
                                    "device.capacity = 24MiB; batch.learn = true"};
    for (size_t i = 0; i < 2; i++) {
        rebatch_step_report report;
        rebatch_probe_report probe = {0};
        struct trainer t = {.rb = open_with(settings[i])};
        if (i == 0)
            OK(rebatch_probe(t.rb, &ops, BATCH, &t, NULL, &probe));
        for (int step = 0; step < 3; step++)
            OK(rebatch_step(t.rb, &ops, BATCH, &t, &report));
        cr_expect_eq(report.micro, 24, "%zu", report.micro);
        cr_expect_eq(report.ooms, 0);
        rebatch_close(t.rb);
    }
}

Test(step_scoped, it_needs_memory_to_be_taken_back)
{
    rebatch_map_ops map = REBATCH_MAP_OPS_INIT;
    rebatch_device *device;
    struct trainer t = {0};
    map.run = evaluate;
    map.flags = REBATCH_SCOPED_MEMORY;
    open_on_host(&device, &t.rb, MIB(24), &OPTIONS(.reclaim = REBATCH_OFF));
    cr_expect_eq(rebatch_step(t.rb, &ops, BATCH, &t, NULL), REBATCH_E_INVALID);
    cr_expect_eq(rebatch_map(t.rb, &map, BATCH, &t, NULL), REBATCH_E_INVALID);
    rebatch_close(t.rb);
    rebatch_device_close(device);
}

/* ---- the batch that runs ---- */

static rebatch_status ask(const rebatch_microbatch *mb, void *user)
{
    cr_expect_eq(rebatch_get_batch(((struct trainer *)user)->rb, 7), mb->batch);
    return forward_backward(mb, user);
}

Test(step_scoped, a_callback_can_ask_for_its_batch)
{
    rebatch_step_ops asking = ops;
    rebatch_map_ops map = REBATCH_MAP_OPS_INIT;
    struct trainer t = {.rb = open_with("device.capacity = 24MiB")};
    asking.forward_backward = map.run = ask;
    map.flags = REBATCH_SCOPED_MEMORY;
    cr_expect_eq(rebatch_step(t.rb, &asking, BATCH, &t, NULL), REBATCH_OK);
    cr_expect_eq(rebatch_map(t.rb, &map, 3 * BATCH, &t, NULL), REBATCH_OK);
    cr_expect_eq(rebatch_get_batch(t.rb, 7), 7);
    cr_expect_eq(rebatch_get_batch(NULL, 7), 7);
    rebatch_close(t.rb);
}
