/* Owns the tests that what was learned stays about the level that it was learned at, and that only
 * the first micro-batch takes memory eagerly. Must not know how memory is modelled. */
#include <criterion/criterion.h>

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
    cr_assert_not_null(t.rb->oracle.need);
    cr_assert_eq(t.rb->oracle.lighten, 0);
    cr_assert_geq(t.rb->oracle.need(t.rb->oracle.user, 10), 10 * KIB(96));
    cr_assert(!rbi_need_has_oracle(t.rb, 1) && rbi_need_has_oracle(t.rb, 0));
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
    const struct rbi_teacher *teacher = &t.rb->learning.teacher;
    for (uint32_t learned = report.learned; learned < LESSONS; learned++) {
        cr_assert_eq(teacher->next(&size, teacher->user, UPPER, UPPER, 0), REBATCH_OK);
        cr_assert_gt(size, 0, "after %u", learned);
        teacher->failed(teacher->user, UPPER - learned);
    }
    cr_assert_eq(teacher->next(&size, teacher->user, UPPER, UPPER, 0), REBATCH_OK);
    cr_assert_eq(size, 0, "it goes on after %d", LESSONS);
    rebatch_close(t.rb);
    rebatch_device_close(device);
}

/* ---- the memory of the first micro-batch ---- */

enum { GRANULE_KIB = 64, WEIGHTS = 1024, BATCH = 16, SMALL = 40, SEEN_MOST = 64 };

struct growing {
    rebatch *rb;
    size_t batch;
    uint32_t ooms_left;        /* micro-batches that answer REBATCH_OOM first */
    bool was_eager[SEEN_MOST]; /* in each micro-batch */
    size_t seen;
    size_t held_pieces; /* of several granules, after the first one */
};

static rebatch_status growing_nothing(void *user)
{
    const struct growing *g = user;
    rebatch_mutating(g->rb);
    cr_assert_not(rebatch_get_pool(g->rb)->eager);
    cr_assert_eq(rebatch_get_pool(g->rb)->expected.left, 0);
    return REBATCH_OK;
}

/* A granule for each of many small blocks of every sample. */
static rebatch_status growing_run(const rebatch_microbatch *mb, void *user)
{
    struct growing *g = user;
    void *blocks[SMALL];
    if (g->seen < SEEN_MOST)
        g->was_eager[g->seen++] = mb->pool->eager;
    if (g->ooms_left && g->ooms_left--)
        return REBATCH_OOM;
    for (size_t i = 0; i < SMALL; i++) {
        const rebatch_status status =
            rebatch_pool_alloc(&blocks[i], mb->pool, mb->count * KIB(GRANULE_KIB), mb->stream, 0);
        if (status)
            return status;
    }
    for (unsigned size = 1; g->seen == 1 && size < RBI_PIECE_SIZES; size++)
        g->held_pieces += mb->pool->spare[size].held;
    rebatch_mutating(g->rb);
    for (size_t i = 0; i < SMALL; i++)
        (void)rebatch_pool_free(mb->pool, blocks[i]);
    return REBATCH_OK;
}

static void run_growing(struct growing *g, rebatch_status expected)
{
    const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                  .zero_grad = growing_nothing,
                                  .forward_backward = growing_run,
                                  .optimizer_step = growing_nothing,
                                  .flags = REBATCH_DECLARES_MUTATION};
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch_device *device;
    rebatch_step_report report;
    void *weights;
    options.learn = REBATCH_ON;
    cr_assert_eq(rebatch_device_open_host(&device, 8 * WEIGHTS * KIB(GRANULE_KIB), NULL),
                 REBATCH_OK);
    cr_assert_eq(rebatch_open(&g->rb, device, &options), REBATCH_OK);
    cr_assert_eq(
        rebatch_pool_alloc(&weights, rebatch_get_pool(g->rb), WEIGHTS * KIB(GRANULE_KIB), NULL, 0),
        REBATCH_OK);
    cr_assert_eq(rebatch_step(g->rb, &ops, g->batch, g, &report), expected, "%s",
                 rebatch_last_error());
    cr_assert_not(rebatch_get_pool(g->rb)->eager);
    cr_assert_eq(rebatch_get_pool(g->rb)->expected.left, 0);
    rebatch_close(g->rb);
    rebatch_device_close(device);
}

static void assert_eager_at_first_only(const struct growing *g)
{
    cr_assert_gt(g->seen, 1);
    for (size_t i = 0; i < g->seen; i++)
        cr_assert_eq(g->was_eager[i], i == 0, "micro-batch %zu", i);
}

Test(recover_learn, the_first_microbatch_takes_memory_in_pieces)
{
    struct growing g = {.batch = BATCH};
    run_growing(&g, REBATCH_OK);
    assert_eager_at_first_only(&g);
    cr_assert_eq(g.held_pieces, (SMALL + WEIGHTS / 64 - 1) / (WEIGHTS / 64));
}

/* There is none to follow that could need more. */
Test(recover_learn, a_lone_sample_takes_what_it_needs)
{
    struct growing g = {.batch = 1};
    run_growing(&g, REBATCH_OK);
    cr_assert_eq(g.seen, 1);
    cr_assert_not(g.was_eager[0]);
    cr_assert_eq(g.held_pieces, 0);
}

/* The smallest size that fails has nothing below it. */
Test(recover_learn, an_oom_ends_the_taking_ahead)
{
    struct growing g = {.batch = BATCH, .ooms_left = 1};
    run_growing(&g, REBATCH_E_EXHAUSTED);
    cr_assert(g.was_eager[0]);
}
