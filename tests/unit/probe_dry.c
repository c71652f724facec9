/* Owns the tests of dry runs: what a micro-batch that runs out of memory leaves.
 * Must not know the search. */
#include <criterion/criterion.h>

#include "probe/dry.h"

#define KIB(n) ((size_t)(n) << 10)

/* A micro-batch that keeps its first block till the next one has made its own. */
static void *run(struct rbi_trace *trace, rebatch_pool *pool, size_t count, void *kept,
                 const struct rbi_trace *before)
{
    void *own, *block;
    rbi_trace_begin(trace, pool, count);
    cr_assert_eq(rebatch_pool_alloc(&own, pool, KIB(64) * count, NULL, 0), REBATCH_OK);
    if (kept)
        cr_assert_eq(rebatch_pool_free(pool, kept), REBATCH_OK);
    cr_assert_eq(rebatch_pool_alloc(&block, pool, KIB(128) * count, NULL, 0), REBATCH_OK);
    cr_assert_eq(rebatch_pool_free(pool, block), REBATCH_OK);
    cr_assert_eq(rbi_trace_end(trace, pool, before), REBATCH_OK);
    trace->is_whole = true;
    return own;
}

static uint64_t live_of(rebatch_pool *pool)
{
    rebatch_pool_stats stats;
    cr_assert_eq(rebatch_pool_get_stats(&stats, pool), REBATCH_OK);
    return stats.live_bytes;
}

Test(probe_dry, what_a_micro_batch_did_before_an_oom_is_taken_back)
{
    rebatch_device *device;
    rebatch_pool *pool;
    struct rbi_trace small, large;
    struct rbi_model model;
    struct rbi_dry dry;
    cr_assert_eq(rebatch_device_open_dry(&device, KIB(4096), 65536), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&pool, device, NULL), REBATCH_OK);
    void *kept = run(&small, pool, 1, NULL, NULL);
    kept = run(&large, pool, 9, kept, &small);
    rbi_trace_pass_on(&small, &large);
    cr_assert_eq(
        rbi_model_make(
            &model, &(struct rbi_traces){.whole = {&small, &large}, .count = 2, .latest = &large}),
        REBATCH_OK);
    cr_assert_eq(rbi_dry_open(&dry, &model, pool), REBATCH_OK);
    cr_assert_eq(model.kept_count, 1);
    cr_assert_eq(rbi_dry_keep(&dry, model.kept[0].slot, model.kept[0].address), REBATCH_OK);
    const uint64_t before = live_of(dry.pool);
    for (int i = 0; i < 3; i++) {
        cr_assert_eq(rbi_dry_run(&dry, 30), REBATCH_OOM);
        cr_assert_eq(live_of(dry.pool), before);
    }
    cr_assert_eq(rbi_dry_run(&dry, 12), REBATCH_OK, "%s", rebatch_last_error());
    cr_assert_eq(live_of(dry.pool), KIB(64) * 12, "what was kept before is freed");
    rbi_dry_close(&dry);
    rbi_model_release(&model);
    rbi_trace_release(&small);
    rbi_trace_release(&large);
    rebatch_pool_destroy(pool);
    rebatch_device_close(device);
}
