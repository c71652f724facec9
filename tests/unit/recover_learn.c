/* Owns the tests that what was learned stays about the level that it was learned at, how long
 * learning takes, and how its samples are cut. Must not know how memory is modelled. */
#include <criterion/criterion.h>

#include "pool/pool.h"
#include "rebatch/rebatch.h"
#include "recover/recover.h"

#define KIB(n) ((size_t)(n) << 10)

struct trainer {
    rebatch *rb;
    unsigned level;
    uint32_t ran; /* from the third on it answers REBATCH_OOM until it is lighter */
};

static rebatch_status nothing(void *user)
{
    const struct trainer *t = user;
    rebatch_mutating(t->rb);
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    void *block;
    if (++t->ran > 2 && t->level == 0)
        return REBATCH_OOM;
    const rebatch_status status =
        rebatch_pool_alloc(&block, mb->pool, mb->count * (KIB(96) >> t->level), mb->stream, 0);
    if (status)
        return status;
    rebatch_mutating(t->rb);
    return rebatch_pool_free(mb->pool, block);
}

static rebatch_status lighten(unsigned level, void *user)
{
    struct trainer *t = user;
    t->level = level;
    return level <= 1 ? REBATCH_OK : REBATCH_E_UNSUPPORTED;
}

/* Two sizes are learned from, then nothing fits until it is lighter. */
Test(recover_learn, a_model_stays_about_its_level)
{
    const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                  .zero_grad = nothing,
                                  .forward_backward = forward_backward,
                                  .optimizer_step = nothing,
                                  .lighten = lighten,
                                  .flags = REBATCH_DECLARES_MUTATION};
    struct trainer t = {.level = 0};
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch_device *device;
    rebatch_step_report report;
    options.learn = REBATCH_ON;
    cr_assert_eq(rebatch_device_open_host(&device, KIB(4096), NULL), REBATCH_OK);
    cr_assert_eq(rebatch_open(&t.rb, device, &options), REBATCH_OK);
    cr_assert_eq(rebatch_step(t.rb, &ops, 64, &t, &report), REBATCH_OK, "%s", rebatch_last_error());
    cr_assert_eq(t.rb->lighten, 1);
    cr_assert_not_null(t.rb->sizes.model.need);
    cr_assert_eq(t.rb->sizes.model.lighten, 0);
    cr_assert_geq(t.rb->sizes.model.need(t.rb->sizes.model.user, 10), 10 * KIB(96));
    cr_assert(!rbi_need_has_model(t.rb, 1) && rbi_need_has_model(t.rb, 0));
    rebatch_close(t.rb);
    rebatch_device_close(device);
}

/* ---- how long it takes ---- */

static rebatch_status run_small(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    void *block;
    const rebatch_status status =
        rebatch_pool_alloc(&block, mb->pool, mb->count * KIB(16), mb->stream, 0);
    if (status)
        return status;
    rebatch_mutating(t->rb);
    return rebatch_pool_free(mb->pool, block);
}

/* A whole batch of 4 has run, and sizes of a larger one fail: another is named after each, until
 * eight micro-batches were learned from. */
Test(recover_learn, it_learns_from_eight_microbatches_at_the_most)
{
    enum { LESSONS = 8, BATCH_SEEN = 4, UPPER = 64 };
    const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                  .zero_grad = nothing,
                                  .forward_backward = run_small,
                                  .optimizer_step = nothing,
                                  .flags = REBATCH_DECLARES_MUTATION};
    struct trainer t = {.level = 0};
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch_device *device;
    rebatch_step_report report;
    size_t size = 0;
    options.learn = REBATCH_ON;
    cr_assert_eq(rebatch_device_open_host(&device, KIB(4096), NULL), REBATCH_OK);
    cr_assert_eq(rebatch_open(&t.rb, device, &options), REBATCH_OK);
    cr_assert_eq(rebatch_step(t.rb, &ops, BATCH_SEEN, &t, &report), REBATCH_OK);
    cr_assert_gt(report.learned, 0);
    const struct rbi_tuner *tuner = &t.rb->sizes.learning.tuner;
    for (uint32_t learned = report.learned; learned < LESSONS; learned++) {
        cr_assert_eq(tuner->next(&size, tuner->user, UPPER, UPPER, 0), REBATCH_OK);
        cr_assert_gt(size, 0, "after %u", learned);
        tuner->failed(tuner->user, UPPER - learned);
    }
    cr_assert_eq(tuner->next(&size, tuner->user, UPPER, UPPER, 0), REBATCH_OK);
    cr_assert_eq(size, 0, "it goes on after %d", LESSONS);
    rebatch_close(t.rb);
    rebatch_device_close(device);
}

/* ---- what is left after it ---- */

/* A tuner that has found a size, and wants the first micro-batch of the second step to be of it. */
struct found {
    size_t size;
    uint32_t asked;  /* how often next() was called */
    uint32_t answer; /* the call that is answered with the size */
};

static rebatch_status next_size(size_t *out, void *user, size_t upper, size_t batch, size_t left)
{
    struct found *found = user;
    (void)upper;
    (void)batch;
    (void)left;
    *out = ++found->asked == found->answer ? found->size : 0;
    return REBATCH_OK;
}

static rebatch_status prepare_nothing(void *user, size_t size)
{
    (void)user;
    (void)size;
    return REBATCH_OK;
}

static void begin_nothing(void *user, size_t count)
{
    (void)user;
    (void)count;
}

static rebatch_status end_nothing(void *user, size_t count, rebatch_status status)
{
    (void)user;
    (void)count;
    (void)status;
    return REBATCH_OK;
}

static size_t size_found(const void *user)
{
    return ((const struct found *)user)->size;
}

static bool is_never_done(const void *user, size_t upper)
{
    (void)user;
    (void)upper;
    return false;
}

static void destroy_nothing(void *user)
{
    (void)user;
}

struct cuts {
    rebatch *rb;
    size_t counts[8];
    size_t count;
};

static rebatch_status mutate(void *user)
{
    const struct cuts *cuts = user;
    rebatch_mutating(cuts->rb);
    return REBATCH_OK;
}

static rebatch_status note_cut(const rebatch_microbatch *mb, void *user)
{
    struct cuts *cuts = user;
    cr_assert_lt(cuts->count, sizeof cuts->counts / sizeof *cuts->counts);
    cuts->counts[cuts->count++] = mb->count;
    rebatch_mutating(cuts->rb);
    return REBATCH_OK;
}

/* 32 samples end with a whole micro-batch of 16, so nothing of them is cut evenly. The next step
 * learns from a micro-batch of 16, and leaves 33 samples. */
Test(recover_learn, what_is_left_after_learning_is_cut_anew)
{
    const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                  .zero_grad = mutate,
                                  .forward_backward = note_cut,
                                  .optimizer_step = mutate,
                                  .flags = REBATCH_DECLARES_MUTATION};
    struct found found = {.size = 16, .answer = 3};
    const struct rbi_tuner tuner = {next_size,     prepare_nothing, begin_nothing,
                                    end_nothing,   begin_nothing,   size_found,
                                    is_never_done, destroy_nothing, &found};
    struct cuts cuts = {.count = 0};
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch_device *device;
    options.micro_smallest = 2;
    options.growth = REBATCH_OFF;
    cr_assert_eq(rebatch_device_open_host(&device, KIB(4096), NULL), REBATCH_OK);
    cr_assert_eq(rebatch_open(&cuts.rb, device, &options), REBATCH_OK);
    rbi_learn_start(cuts.rb, &tuner);
    cr_assert_eq(rebatch_step(cuts.rb, &ops, 32, &cuts, NULL), REBATCH_OK);
    cr_assert_eq(cuts.count, 2);
    cuts.count = 0;
    cr_assert_eq(rebatch_step(cuts.rb, &ops, 16 + 33, &cuts, NULL), REBATCH_OK);
    cr_assert_eq(cuts.count, 4, "%zu", cuts.count);
    for (size_t i = 0; i < cuts.count; i++)
        cr_expect_eq(cuts.counts[i], i == 0 ? 16 : 11, "[%zu] is %zu", i, cuts.counts[i]);
    rebatch_close(cuts.rb);
    rebatch_device_close(device);
}
