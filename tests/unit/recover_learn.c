/* Owns the tests that what was learned stays about the level that it was learned at, and that only
 * the first micro-batch takes memory eagerly. Must not know how memory is modelled. */
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
