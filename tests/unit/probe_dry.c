/* Owns the tests of dry runs: what a micro-batch that runs out of memory leaves, and how steps will
 * use the pool.
 * Must not know the search. */
#include <criterion/criterion.h>

#include "device/device.h"
#include "probe/dry_run.h"
#include "recover/recover.h"

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

/* ---- the largest size ---- */

enum { BLOCKS = 12, SIZES_MOST = 60 };

/* A model of blocks whose sizes a seed draws, on a device without virtual memory: its pieces lie
 * otherwise at each size. */
struct drawn {
    rebatch_device *device;
    struct rbi_device_ops plain;
    rebatch_pool *pool;
    struct rbi_trace traces[2];
    struct rbi_model model;
    struct rbi_setting setting;
    void *live[BLOCKS];
    size_t each[BLOCKS], fixed[BLOCKS];
    bool is_short[BLOCKS];
};

static size_t next(uint64_t *state, size_t most)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (size_t)(*state >> 33) % most;
}

static void run_drawn(struct rbi_trace *trace, struct drawn *drawn, size_t count)
{
    void *blocks[BLOCKS];
    rbi_trace_begin(trace, drawn->pool, count);
    for (size_t i = 0; i < BLOCKS; i++) {
        cr_assert_eq(rebatch_pool_alloc(&blocks[i], drawn->pool,
                                        drawn->fixed[i] + drawn->each[i] * count, NULL, 0),
                     REBATCH_OK);
        if (drawn->is_short[i])
            cr_assert_eq(rebatch_pool_free(drawn->pool, blocks[i]), REBATCH_OK);
    }
    for (size_t i = BLOCKS; i-- > 0;)
        if (!drawn->is_short[i])
            cr_assert_eq(rebatch_pool_free(drawn->pool, blocks[i]), REBATCH_OK);
    cr_assert_eq(rbi_trace_end(trace, drawn->pool, NULL), REBATCH_OK);
    trace->is_whole = true;
}

static void open_drawn(struct drawn *drawn, uint64_t state)
{
    *drawn = (struct drawn){.device = NULL};
    cr_assert_eq(rebatch_device_open_dry(&drawn->device, KIB(14336 + next(&state, 6144)), KIB(64)),
                 REBATCH_OK);
    drawn->plain = *drawn->device->ops;
    drawn->plain.reserve = NULL;
    drawn->device->ops = &drawn->plain;
    cr_assert_eq(rebatch_pool_create(&drawn->pool, drawn->device, NULL), REBATCH_OK);
    for (size_t i = 0; i < BLOCKS; i++) {
        drawn->each[i] = 1 + next(&state, (size_t)1 << (12 + next(&state, 6)));
        drawn->fixed[i] = next(&state, 4) ? 0 : next(&state, KIB(512));
        drawn->is_short[i] = next(&state, 2) == 0;
    }
    for (size_t i = 0; i < BLOCKS; i++)
        cr_assert_eq(
            rebatch_pool_alloc(&drawn->live[i], drawn->pool, 1 + next(&state, KIB(1024)), NULL, 0),
            REBATCH_OK);
    for (size_t i = 0; i < BLOCKS; i += 2)
        cr_assert_eq(rebatch_pool_free(drawn->pool, drawn->live[i]), REBATCH_OK);
    run_drawn(&drawn->traces[0], drawn, 1);
    run_drawn(&drawn->traces[1], drawn, 10);
    cr_assert_eq(rbi_model_make(&drawn->model,
                                &(struct rbi_traces){.whole = {drawn->traces, drawn->traces + 1},
                                                     .count = 2,
                                                     .latest = &drawn->traces[1]}),
                 REBATCH_OK);
    drawn->model.pool = drawn->pool;
    drawn->setting =
        (struct rbi_setting){.pool = drawn->pool, .least = 1, .admits_above = SIZE_MAX};
}

static void close_drawn(struct drawn *drawn)
{
    rbi_model_release(&drawn->model);
    rbi_trace_release(&drawn->traces[0]);
    rbi_trace_release(&drawn->traces[1]);
    rebatch_pool_destroy(drawn->pool);
    rebatch_device_close(drawn->device);
}

/* fits[size]; gives the largest. */
static size_t try_all(bool *fits, const struct drawn *drawn)
{
    size_t largest = 0;
    for (size_t size = 11; size <= SIZES_MOST; size++) {
        struct rbi_forecast forecast;
        cr_assert_eq(rbi_forecast_run(&forecast, &drawn->model, &drawn->setting,
                                      &(struct rbi_plan){size, true, true, SIZES_MOST}),
                     REBATCH_OK);
        fits[size] = forecast.fits;
        largest = forecast.fits ? size : largest;
    }
    return largest;
}

/* Because of fragmentation a size may fit above one that does not: then one of those is found. */
Test(probe_dry, the_largest_size_is_found_where_all_below_it_fit)
{
    size_t without_gap = 0;
    for (uint64_t seed = 1; seed <= 600; seed++) {
        struct drawn drawn;
        bool fits[SIZES_MOST + 1] = {false};
        size_t found, gap = 11;
        open_drawn(&drawn, seed * 7919);
        const size_t largest = try_all(fits, &drawn);
        cr_assert_eq(
            rbi_forecast_largest(&found, &drawn.model, &drawn.setting, 11, SIZES_MOST, SIZES_MOST),
            REBATCH_OK);
        while (gap < largest && fits[gap])
            gap++;
        cr_assert(found == 0 || fits[found], "seed %d: %zu does not fit", (int)seed, found);
        if (gap >= largest) {
            without_gap++;
            cr_assert_eq(found, largest, "seed %d: %zu of %zu", (int)seed, found, largest);
        }
        close_drawn(&drawn);
    }
    cr_assert_gt(without_gap, 550, "%zu without a gap", without_gap);
}

/* ---- as steps will do it ---- */

static rebatch_status nothing(void *user)
{
    (void)user;
    return REBATCH_OK;
}

static rebatch_status run_nothing(const rebatch_microbatch *mb, void *user)
{
    (void)mb;
    return nothing(user);
}

/* Steps ask for the whole memory of an attempt beforehand unless admission is off, an OOM stops the
 * step or nothing is cached; the smallest size they always try. Steps before the probe have made
 * what is made once. */
Test(probe_dry, memory_is_asked_for_as_steps_do_and_what_steps_made_is_there)
{
    static const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                         .zero_grad = nothing,
                                         .forward_backward = run_nothing,
                                         .optimizer_step = nothing};
    static const struct {
        rebatch_toggle admission, caching;
        rebatch_on_oom on_oom;
        bool admits;
    } cases[] = {
        {REBATCH_DEFAULT, REBATCH_DEFAULT, REBATCH_ON_OOM_HALVE, true},
        {REBATCH_ON, REBATCH_ON, REBATCH_ON_OOM_FIT, true},
        {REBATCH_OFF, REBATCH_ON, REBATCH_ON_OOM_HALVE, false},
        {REBATCH_ON, REBATCH_ON, REBATCH_ON_OOM_STOP, false},
        {REBATCH_ON, REBATCH_OFF, REBATCH_ON_OOM_HALVE, false},
    };
    rebatch_device *device;
    cr_assert_eq(rebatch_device_open_host(&device, KIB(4096), NULL), REBATCH_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rebatch *rb;
        rebatch_options options = REBATCH_OPTIONS_INIT;
        options.admission = cases[i].admission;
        options.on_oom = cases[i].on_oom;
        options.pool.caching = cases[i].caching;
        cr_assert_eq(rebatch_open(&rb, device, &options), REBATCH_OK);
        struct rbi_setting setting = rbi_probe_setting(rb, 3);
        cr_assert_eq(setting.pool, rebatch_get_pool(rb));
        cr_assert_eq(setting.admits_above, cases[i].admits ? 3 : SIZE_MAX, "case %zu", i);
        cr_assert_not(setting.has_stepped);
        cr_assert_eq(rebatch_step(rb, &ops, 1, NULL, NULL), REBATCH_OK);
        setting = rbi_probe_setting(rb, 3);
        cr_assert(setting.has_stepped);
        rebatch_close(rb);
    }
    rebatch_device_close(device);
}
