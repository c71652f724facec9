/* Owns the tests of buffers together with a cost, of buffers that are made again between steps, and
 * of those of functions that return nothing. Seed of what is random: 31.
 * Must not know the library's inside. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rebatch/rebatch.h"

#define MIB ((size_t)1 << 20)
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

static void make_buffer(size_t micro_batch, void *user)
{
    struct trainer *t = user;
    t->resizes++;
    t->room = 0;
    t->buffer = rebatch_alloc_or_escape(t->rb, micro_batch * t->side * MIB);
    t->room = micro_batch;
}

static void clear(void *user)
{
    struct trainer *t = user;
    memset(t->ran, 0, sizeof t->ran);
    t->largest = 0;
}

static uint64_t cost(size_t first, size_t count, void *user)
{
    const struct trainer *t = user;
    size_t longest = 0;
    for (size_t i = first; i < first + count; i++)
        longest = t->lengths[i] > longest ? t->lengths[i] : longest;
    return count * longest;
}

static void train(size_t first, size_t count, void *user)
{
    struct trainer *t = user;
    size_t bytes = 0;
    cr_assert_leq(count, t->room, "%zu samples in a buffer for %zu", count, t->room);
    cr_assert_eq(rebatch_pool_block_bytes(&bytes, rebatch_get_pool(t->rb), t->buffer), REBATCH_OK,
                 "%s", rebatch_last_error());
    cr_assert_geq(bytes, count * t->side * MIB);
    void *const block =
        rebatch_alloc_or_escape(t->rb, (size_t)cost(first, count, t) * t->unit_bytes);
    rebatch_mutating(t->rb);
    for (size_t i = first; i < first + count; i++)
        t->ran[i]++;
    t->largest = count > t->largest ? count : t->largest;
    cr_assert_eq(rebatch_free(t->rb, block), REBATCH_OK);
}

static void update(void *user)
{
    struct trainer *t = user;
    rebatch_mutating(t->rb);
    for (size_t i = 0; i < t->batch; i++)
        cr_assert_eq(t->ran[i], 1, "sample %zu counted %u times", i, t->ran[i]);
    t->updates++;
}

static rebatch_status resize(size_t micro_batch, void *user)
{
    make_buffer(micro_batch, user);
    return REBATCH_OK;
}

static rebatch_status zero_grad(void *user)
{
    clear(user);
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    train(mb->first, mb->count, user);
    return REBATCH_OK;
}

static rebatch_status optimizer_step(void *user)
{
    update(user);
    return REBATCH_OK;
}

static void open_trainer(struct trainer *t, size_t capacity_bytes)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.grow_after = 2;
    memset(t, 0, sizeof *t);
    t->side = 1;
    t->batch = 32;
    for (size_t i = 0; i < MOST; i++)
        t->lengths[i] = 1;
    cr_assert_eq(rebatch_device_open_host(&t->device, capacity_bytes, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_open(&t->rb, t->device, &options), REBATCH_OK, "%s", rebatch_last_error());
}

static uint64_t live_bytes(const struct trainer *t)
{
    rebatch_pool_stats stats;
    cr_assert_eq(rebatch_pool_get_stats(&stats, rebatch_get_pool(t->rb)), REBATCH_OK);
    return stats.live_bytes;
}

static void close_trainer(struct trainer *t)
{
    rebatch_close(t->rb);
    rebatch_device_close(t->device);
}

static rebatch_step_report by_cost(struct trainer *t)
{
    const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                  .zero_grad = zero_grad,
                                  .forward_backward = forward_backward,
                                  .optimizer_step = optimizer_step,
                                  .flags = REBATCH_DECLARES_MUTATION,
                                  .cost = cost,
                                  .resize = resize};
    rebatch_step_report report;
    cr_assert_eq(rebatch_step(t->rb, &ops, t->batch, t, &report), REBATCH_OK, "%s",
                 rebatch_last_error());
    return report;
}

static rebatch_step_report plain(struct trainer *t)
{
    rebatch_step_report report;
    cr_assert_eq(rebatch_step_plain_resize(t->rb, t->batch, clear, train, update, make_buffer, t,
                                           REBATCH_DECLARES_MUTATION, &report),
                 REBATCH_OK, "%s", rebatch_last_error());
    return report;
}

/* ---- cost together with resize ---- */

Test(step_buffers, by_cost_they_are_for_the_most_samples_that_the_budget_allows)
{
    struct trainer t;
    open_trainer(&t, 20 * MIB);
    const rebatch_step_report first = by_cost(&t); /* 32 samples in 20 MiB: two halves */
    cr_expect_eq(first.cost_after, 16);
    cr_expect_eq(t.room, 16);
    for (size_t i = 0; i < t.batch; i++)
        t.lengths[i] = 4;
    cr_expect_eq(by_cost(&t).ooms, 0);
    cr_expect_eq(t.largest, 4);
    cr_expect_eq(t.room, 16); /* buffers serve fewer samples */
    close_trainer(&t);
}

Test(step_buffers, by_cost_attempts_and_buffers_share_the_memory)
{
    struct trainer t;
    open_trainer(&t, 20 * MIB);
    t.unit_bytes = MIB;
    const rebatch_step_report report = by_cost(&t); /* 2 MiB a sample: 8 of them */
    cr_expect_eq(report.cost_after, 8);
    cr_expect_eq(t.room, 8);
    cr_expect_eq(by_cost(&t).ooms, 0);
    close_trainer(&t);
}

Test(step_buffers, by_cost_an_update_that_needs_memory_makes_them_smaller)
{
    struct trainer t;
    open_trainer(&t, 34 * MIB);
    (void)by_cost(&t);
    cr_expect_eq(t.room, 32);
    void *other = NULL;
    cr_assert_eq(rebatch_remake_buffers(t.rb), REBATCH_OK);
    cr_assert_eq(rebatch_alloc(&other, t.rb, 20 * MIB), REBATCH_OK);
    const rebatch_step_report report = by_cost(&t);
    cr_expect_eq(t.room, 8);
    cr_expect_gt(report.ooms_in[REBATCH_PHASE_RESIZE], 0);
    close_trainer(&t);
}

Test(step_buffers, by_cost_every_sample_counts_once_whatever_the_lengths)
{
    uint64_t random = 31;
    struct trainer t;
    open_trainer(&t, 24 * MIB);
    t.unit_bytes = MIB / 4;
    for (int step = 0; step < 60; step++) {
        for (size_t i = 0; i < MOST; i++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            t.lengths[i] = (random >> 60) ? 1 + (random >> 40) % 4 : 16;
        }
        t.batch = 1 + (size_t)(random >> 33) % MOST;
        (void)by_cost(&t); /* which looks at the room, and at how often each counts */
    }
    cr_expect_eq(t.updates, 60);
    close_trainer(&t);
}

Test(step_buffers, by_cost_they_grow_with_the_budget)
{
    struct trainer t;
    void *other = NULL;
    open_trainer(&t, 40 * MIB);
    cr_assert_eq(rebatch_alloc(&other, t.rb, 24 * MIB), REBATCH_OK);
    (void)by_cost(&t);
    cr_expect_eq(t.room, 16);
    cr_assert_eq(rebatch_free(t.rb, other), REBATCH_OK);
    for (int step = 0; step < 6; step++)
        cr_expect_eq(by_cost(&t).ooms, 0);
    cr_expect_eq(t.room, 32);
    close_trainer(&t);
}

/* The cost of an image is its pixels, and so are its buffers. */
Test(step_buffers, by_cost_what_is_learned_holds_for_images_of_another_size)
{
    static const size_t sides[] = {4, 1, 2, 4};
    static const size_t rooms[] = {8, 32, 16, 8};
    struct trainer t;
    open_trainer(&t, 36 * MIB);
    for (size_t k = 0; k < 4; k++) {
        t.side = sides[k];
        for (size_t i = 0; i < MOST; i++)
            t.lengths[i] = sides[k];
        cr_assert_eq(rebatch_remake_buffers(t.rb), REBATCH_OK);
        const rebatch_step_report report = by_cost(&t);
        cr_expect_eq(report.ooms > 0, k == 0, "%zu OOMs at size %zu", (size_t)report.ooms, k);
        cr_expect_eq(t.room, rooms[k], "%zu at size %zu", t.room, k);
    }
    close_trainer(&t);
}

/* ---- buffers that are made again ---- */

Test(step_buffers, they_are_made_again_where_the_program_says_so)
{
    struct trainer t;
    open_trainer(&t, 40 * MIB);
    (void)plain(&t);
    (void)plain(&t);
    cr_expect_eq(t.resizes, 1);
    for (unsigned i = 0; i < 5; i++) {
        t.side = 1 + i % 2;
        cr_assert_eq(rebatch_remake_buffers(t.rb), REBATCH_OK);
        cr_expect_eq(live_bytes(&t), 0);
        cr_assert_eq(rebatch_remake_buffers(t.rb), REBATCH_OK); /* there are none */
        (void)plain(&t); /* which looks at the size of the buffers */
        cr_expect_eq(live_bytes(&t), t.room * t.side * MIB);
    }
    close_trainer(&t);
}

/* 32 samples of 2 MiB do not fit; admission would refuse them by what 16 needed. */
Test(step_buffers, what_was_learned_of_the_memory_of_sizes_is_forgotten)
{
    struct trainer t;
    open_trainer(&t, 40 * MIB);
    t.side = 2;
    (void)plain(&t);
    cr_expect_eq(t.room, 16);
    t.side = 1;
    cr_assert_eq(rebatch_remake_buffers(t.rb), REBATCH_OK);
    for (int step = 0; step < 6; step++)
        cr_expect_eq(plain(&t).ooms, 0);
    cr_expect_eq(t.room, 32);
    t.side = 2; /* known of 32 is that 32 MiB do */
    cr_assert_eq(rebatch_remake_buffers(t.rb), REBATCH_OK);
    cr_expect_eq(plain(&t).ooms_in[REBATCH_PHASE_ADMISSION], 0);
    cr_expect_eq(t.room, 16);
    close_trainer(&t);
}

static rebatch_status remade;

static void remake(size_t first, size_t count, void *user)
{
    struct trainer *t = user;
    remade = rebatch_remake_buffers(t->rb);
    train(first, count, user);
}

Test(step_buffers, within_a_step_they_are_not_made_again)
{
    struct trainer t;
    open_trainer(&t, 40 * MIB);
    cr_assert_eq(rebatch_step_plain_resize(t.rb, t.batch, clear, remake, update, make_buffer, &t,
                                           REBATCH_DECLARES_MUTATION, NULL),
                 REBATCH_OK, "%s", rebatch_last_error());
    cr_expect_eq(remade, REBATCH_E_STATE);
    cr_expect_eq(rebatch_remake_buffers(NULL), REBATCH_E_INVALID);
    close_trainer(&t);
}

/* ---- functions that return nothing ---- */

static void make_other(size_t micro_batch, void *user)
{
    make_buffer(micro_batch, user);
}

Test(step_buffers, of_plain_functions_they_stay_from_step_to_step)
{
    struct trainer t;
    open_trainer(&t, 20 * MIB);
    const rebatch_step_report report = plain(&t);
    cr_expect_eq(t.room, 16);
    cr_expect_eq(report.ooms, 1);
    cr_expect_eq(t.resizes, 2);
    (void)plain(&t);
    cr_expect_eq(t.resizes, 2);
    cr_expect_eq(live_bytes(&t), 16 * MIB);
    close_trainer(&t);
}

Test(step_buffers, of_other_plain_functions_they_are_others)
{
    struct trainer t;
    open_trainer(&t, 40 * MIB);
    for (int i = 0; i < 3; i++) {
        (void)plain(&t);
        cr_assert_eq(rebatch_step_plain_resize(t.rb, t.batch, clear, train, update, make_other, &t,
                                               REBATCH_DECLARES_MUTATION, NULL),
                     REBATCH_OK, "%s", rebatch_last_error());
        cr_assert_eq(rebatch_step_plain(t.rb, t.batch, clear, train, update, &t,
                                        REBATCH_DECLARES_MUTATION, NULL),
                     REBATCH_OK, "%s", rebatch_last_error()); /* in what is there */
    }
    cr_expect_eq(t.resizes, 6);
    cr_expect_eq(live_bytes(&t), 32 * MIB);
    close_trainer(&t);
}

static rebatch_status within;

static void train_within(size_t first, size_t count, void *user)
{
    struct trainer *t = user;
    struct trainer other = *t;
    within = rebatch_step_plain_resize(t->rb, 1, clear, train, update, make_other, &other, 0, NULL);
    train(first, count, user);
}

Test(step_buffers, a_plain_step_within_one_is_refused_and_changes_nothing)
{
    struct trainer t;
    open_trainer(&t, 40 * MIB);
    cr_assert_eq(rebatch_step_plain_resize(t.rb, t.batch, clear, train_within, update, make_buffer,
                                           &t, REBATCH_DECLARES_MUTATION, NULL),
                 REBATCH_OK, "%s", rebatch_last_error());
    cr_expect_eq(within, REBATCH_E_STATE);
    cr_expect_eq(t.updates, 1);
    close_trainer(&t);
}
