/* Owns the tests of buffers together with a cost, and of buffers that are made again between steps.
 * Seed of what is random: 31.
 * Must not know the library's inside. */
#include <stdio.h>
#include <stdlib.h>

#include "rig.h"

#define MOST 64

/* Buffers of `side` MiB a sample, made by resize; an attempt needs 1 MiB a unit of cost. */
struct trainer {
    rebatch_device *device;
    rebatch *rb;
    void *buffer;
    size_t room; /* its samples */
    size_t side; /* for which it was made is what the buffer's size tells */
    size_t unit_bytes;
    unsigned resizes;
    unsigned ran[MOST]; /* how often each sample counted */
    size_t lengths[MOST];
    size_t batch;
    unsigned updates;
    size_t largest; /* micro-batch */
};

static rebatch_status resize(size_t micro_batch, void *user)
{
    struct trainer *t = user;
    t->resizes++;
    t->room = 0;
    t->buffer = rebatch_alloc_or_escape(t->rb, micro_batch * t->side * MIB(1));
    t->room = micro_batch;
    return REBATCH_OK;
}

static rebatch_status zero_grad(void *user)
{
    struct trainer *t = user;
    memset(t->ran, 0, sizeof t->ran);
    t->largest = 0;
    return REBATCH_OK;
}

static uint64_t cost(size_t first, size_t count, void *user)
{
    const struct trainer *t = user;
    size_t longest = 0;
    for (size_t i = first; i < first + count; i++)
        longest = t->lengths[i] > longest ? t->lengths[i] : longest;
    return count * longest;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    const size_t first = mb->first, count = mb->count;
    size_t bytes = 0;
    cr_assert_leq(count, t->room, "%zu samples in a buffer for %zu", count, t->room);
    OK(rebatch_pool_block_bytes(&bytes, rebatch_get_pool(t->rb), t->buffer));
    cr_assert_geq(bytes, count * t->side * MIB(1));
    void *const block =
        rebatch_alloc_or_escape(t->rb, (size_t)cost(first, count, t) * t->unit_bytes);
    rebatch_mutating(t->rb);
    for (size_t i = first; i < first + count; i++)
        t->ran[i]++;
    t->largest = count > t->largest ? count : t->largest;
    return rebatch_free(t->rb, block);
}

static rebatch_status optimizer_step(void *user)
{
    struct trainer *t = user;
    rebatch_mutating(t->rb);
    for (size_t i = 0; i < t->batch; i++)
        cr_assert_eq(t->ran[i], 1, "sample %zu counted %u times", i, t->ran[i]);
    t->updates++;
    return REBATCH_OK;
}

static void trainer_open(struct trainer *t, size_t capacity_bytes)
{
    memset(t, 0, sizeof *t);
    t->side = 1;
    t->batch = 32;
    for (size_t i = 0; i < MOST; i++)
        t->lengths[i] = 1;
    open_on_host(&t->device, &t->rb, capacity_bytes, &OPTIONS(.grow_after = 2));
}

CLOSE_BOTH(trainer)

static rebatch_step_report step_with(struct trainer *t, rebatch_step_ops ops)
{
    rebatch_step_report report;
    ops.zero_grad = zero_grad;
    ops.optimizer_step = optimizer_step;
    ops.resize = resize;
    ops.flags = REBATCH_DECLARES_MUTATION;
    OK(rebatch_step(t->rb, &ops, t->batch, t, &report));
    return report;
}

static rebatch_step_report by_cost(struct trainer *t)
{
    return step_with(t, (rebatch_step_ops){.struct_size = sizeof(rebatch_step_ops),
                                           .forward_backward = forward_backward,
                                           .cost = cost});
}

static rebatch_step_report by_samples(struct trainer *t)
{
    return step_with(t, (rebatch_step_ops){.struct_size = sizeof(rebatch_step_ops),
                                           .forward_backward = forward_backward});
}

/* ---- cost together with resize ---- */

Test(step_buffers, by_cost_they_are_for_the_most_samples_that_the_budget_allows)
{
    OPEN(trainer, t, MIB(20));
    const rebatch_step_report first = by_cost(&t); /* 32 samples in 20 MiB: two halves */
    cr_expect_eq(first.cost_after, 16);
    cr_expect_eq(t.room, 16);
    for (size_t i = 0; i < t.batch; i++)
        t.lengths[i] = 4;
    cr_expect_eq(by_cost(&t).ooms, 0);
    cr_expect_eq(t.largest, 4);
    cr_expect_eq(t.room, 16); /* buffers serve fewer samples */
}

Test(step_buffers, by_cost_attempts_and_buffers_share_the_memory)
{
    OPEN(trainer, t, MIB(20));
    t.unit_bytes = MIB(1);
    const rebatch_step_report report = by_cost(&t); /* 2 MiB a sample: 8 of them */
    cr_expect_eq(report.cost_after, 8);
    cr_expect_eq(t.room, 8);
    cr_expect_eq(by_cost(&t).ooms, 0);
}

Test(step_buffers, by_cost_an_update_that_needs_memory_makes_them_smaller)
{
    OPEN(trainer, t, MIB(34));
    (void)by_cost(&t);
    cr_expect_eq(t.room, 32);
    void *other = NULL;
    OK(rebatch_remake_buffers(t.rb));
    OK(rebatch_alloc(&other, t.rb, MIB(20)));
    const rebatch_step_report report = by_cost(&t);
    cr_expect_eq(t.room, 8);
    cr_expect_gt(report.ooms_in[REBATCH_PHASE_RESIZE], 0);
}

Test(step_buffers, by_cost_every_sample_counts_once_whatever_the_lengths)
{
    uint64_t random = 31;
    OPEN(trainer, t, MIB(24));
    t.unit_bytes = MIB(1) / 4;
    for (int step = 0; step < 60; step++) {
        for (size_t i = 0; i < MOST; i++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            t.lengths[i] = (random >> 60) ? 1 + (random >> 40) % 4 : 16;
        }
        t.batch = 1 + (size_t)(random >> 33) % MOST;
        (void)by_cost(&t); /* which looks at the room, and at how often each counts */
    }
    cr_expect_eq(t.updates, 60);
}

Test(step_buffers, by_cost_they_grow_with_the_budget)
{
    void *other = NULL;
    OPEN(trainer, t, MIB(40));
    OK(rebatch_alloc(&other, t.rb, MIB(24)));
    (void)by_cost(&t);
    cr_expect_eq(t.room, 16);
    OK(rebatch_free(t.rb, other));
    for (int step = 0; step < 6; step++)
        cr_expect_eq(by_cost(&t).ooms, 0);
    cr_expect_eq(t.room, 32);
}

/* The cost of an image is its pixels, and so are its buffers. */
Test(step_buffers, by_cost_what_is_learned_holds_for_images_of_another_size)
{
    static const size_t sides[] = {4, 1, 2, 4};
    static const size_t rooms[] = {8, 32, 16, 9}; /* the last by what the others have taught */
    OPEN(trainer, t, MIB(36));
    for (size_t k = 0; k < 4; k++) {
        t.side = sides[k];
        for (size_t i = 0; i < MOST; i++)
            t.lengths[i] = sides[k];
        OK(rebatch_remake_buffers(t.rb));
        const rebatch_step_report report = by_cost(&t);
        cr_expect_eq(report.ooms > 0, k == 0, "%zu OOMs at size %zu", (size_t)report.ooms, k);
        cr_expect_eq(t.room, rooms[k], "%zu at size %zu", t.room, k);
    }
}

/* ---- buffers that are made again ---- */

Test(step_buffers, they_are_made_again_where_the_program_says_so)
{
    OPEN(trainer, t, MIB(40));
    (void)by_samples(&t);
    (void)by_samples(&t);
    cr_expect_eq(t.resizes, 1);
    for (unsigned i = 0; i < 5; i++) {
        t.side = 1 + i % 2;
        OK(rebatch_remake_buffers(t.rb));
        cr_expect_eq(live_bytes_of(t.rb), 0);
        OK(rebatch_remake_buffers(t.rb)); /* there are none */
        (void)by_samples(&t);             /* which looks at the size of the buffers */
        cr_expect_eq(live_bytes_of(t.rb), t.room * t.side * MIB(1));
    }
}

/* 32 samples of 2 MiB do not fit; admission would refuse them by what 16 needed. */
Test(step_buffers, what_was_learned_of_the_memory_of_sizes_is_forgotten)
{
    OPEN(trainer, t, MIB(40));
    t.side = 2;
    (void)by_samples(&t);
    cr_expect_eq(t.room, 16);
    t.side = 1;
    OK(rebatch_remake_buffers(t.rb));
    for (int step = 0; step < 6; step++)
        cr_expect_eq(by_samples(&t).ooms, 0);
    cr_expect_eq(t.room, 32);
    t.side = 2; /* known of 32 is that 32 MiB do */
    OK(rebatch_remake_buffers(t.rb));
    cr_expect_eq(by_samples(&t).ooms_in[REBATCH_PHASE_ADMISSION], 0);
    cr_expect_eq(t.room, 16);
}

static rebatch_status remade;

static rebatch_status remake(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    remade = rebatch_remake_buffers(t->rb);
    return forward_backward(mb, user);
}

Test(step_buffers, within_a_step_they_are_not_made_again)
{
    OPEN(trainer, t, MIB(40));
    (void)step_with(&t, (rebatch_step_ops){.struct_size = sizeof(rebatch_step_ops),
                                           .forward_backward = remake});
    cr_expect_eq(remade, REBATCH_E_STATE);
    cr_expect_eq(rebatch_remake_buffers(NULL), REBATCH_E_INVALID);
}

Test(step_buffers, they_stay_from_step_to_step)
{
    OPEN(trainer, t, MIB(20));
    const rebatch_step_report report = by_samples(&t);
    cr_expect_eq(t.room, 16);
    cr_expect_eq(report.ooms, 1);
    cr_expect_eq(t.resizes, 2);
    (void)by_samples(&t);
    cr_expect_eq(t.resizes, 2);
    cr_expect_eq(live_bytes_of(t.rb), MIB(16));
}
