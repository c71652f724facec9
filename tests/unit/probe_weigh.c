/* Owns the tests of what is tried where more than one model explains what ran: sizes rounded up to
 * units, and samples to tiles, on a dry device. Must not know how a size function is drawn. */
#include <criterion/criterion.h>

#include "probe/probe.h"

#define MIB(n) ((size_t)(n) << 20)
#define KIB(n) ((size_t)(n) << 10)
enum { BLOCKS_MOST = 6, SIZES_MOST = 120 };

/* A micro-batch: blocks of so much and so much a sample, samples rounded up to a tile, sizes to a
 * unit. */
struct block {
    size_t fixed, each, tile, unit;
};

struct training {
    rebatch_device *device;
    rebatch_pool *pool;
    struct block blocks[BLOCKS_MOST];
    size_t block_count, ran, sizes[16];
};

static size_t round_to(size_t value, size_t unit)
{
    return unit > 1 ? (value + unit - 1) / unit * unit : value;
}

static size_t bytes_of(const struct block *block, size_t count)
{
    return round_to(block->fixed + block->each * round_to(count, block->tile), block->unit);
}

static rebatch_status take(struct training *t, size_t count)
{
    void *made[BLOCKS_MOST];
    rebatch_status status = REBATCH_OK;
    size_t i = 0;
    for (; i < t->block_count && !status; i++)
        status = rebatch_pool_alloc(&made[i], t->pool, bytes_of(&t->blocks[i], count), NULL, 0);
    while (!status && i-- > 0)
        status = rebatch_pool_free(t->pool, made[i]);
    return status; /* what a failed one has made goes with its scope, or its pool */
}

static rebatch_status trial(struct rbi_trace *trace, uint64_t *peak_bytes, void *user, size_t count,
                            const struct rbi_trace *before)
{
    struct training *t = user;
    rebatch_scope scope;
    t->sizes[t->ran++] = count;
    cr_assert_eq(rebatch_scope_begin(&scope, t->pool), REBATCH_OK);
    rbi_pool_mark_peak(t->pool);
    rbi_trace_begin(trace, t->pool, count);
    const rebatch_status status = take(t, count);
    cr_assert_eq(rbi_trace_end(trace, t->pool, before), REBATCH_OK);
    *peak_bytes = rbi_pool_peak_since_mark(t->pool);
    trace->is_whole = status == REBATCH_OK;
    trace->peak_bytes = *peak_bytes;
    cr_assert_eq(status ? rebatch_scope_rollback(t->pool, scope)
                        : rebatch_scope_commit(t->pool, scope),
                 REBATCH_OK);
    return status;
}

static size_t any_size(void *user, size_t size)
{
    (void)user;
    return size;
}

static uint64_t no_time(void)
{
    return 0;
}

static void open_pool(struct training *t, size_t capacity_bytes)
{
    cr_assert_eq(rebatch_device_open_dry(&t->device, capacity_bytes, KIB(64)), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&t->pool, t->device, NULL), REBATCH_OK);
}

static void close_pool(struct training *t)
{
    rebatch_pool_destroy(t->pool);
    rebatch_device_close(t->device);
}

/* The largest size that runs twice after one sample. */
static size_t truth_of(const struct training *given, size_t capacity_bytes)
{
    size_t count = SIZES_MOST;
    for (; count > 0; count--) {
        struct training t = *given;
        open_pool(&t, capacity_bytes);
        const bool runs = take(&t, 1) == REBATCH_OK && take(&t, count) == REBATCH_OK &&
                          take(&t, count) == REBATCH_OK;
        close_pool(&t);
        if (runs)
            break;
    }
    return count;
}

static rebatch_probe_report probe(struct training *t, size_t capacity_bytes, uint32_t runs)
{
    open_pool(t, capacity_bytes);
    struct rbi_search search = {.trial = trial,
                                .user = t,
                                .setting = {.pool = t->pool, .admits_above = SIZE_MAX},
                                .round = any_size,
                                .round_up = any_size,
                                .least = 1,
                                .most = SIZES_MOST,
                                .batch = SIZES_MOST,
                                .max_trials = runs,
                                .now = no_time};
    cr_assert_eq(rbi_search_run(&search), REBATCH_OK);
    const rebatch_probe_report report = search.report;
    rbi_search_release(&search);
    close_pool(t);
    return report;
}

/* 2 MiB at each size that ran may be as much at all, or less than a unit. Where it is less, a
 * size that fits by all but few models runs into an OOM: then those few are believed, and not that
 * one sample less will do. */
Test(probe_weigh, an_oom_refutes_the_models_by_which_the_size_fits)
{
    size_t ooms = 0, again = 0, exact = 0, cases = 0;
    for (size_t each = 14000; each < 31000; each += 500, cases++) {
        struct training t = {
            .blocks = {{MIB(1), KIB(80), 1, 1}, {0, each, 1, MIB(2)}, {0, 1531, 1, 256}},
            .block_count = 3};
        const size_t capacity = MIB(3) + KIB(82) * 118 + KIB(64);
        const size_t truth = truth_of(&t, capacity);
        const rebatch_probe_report report = probe(&t, capacity, 8);
        cr_assert_leq(report.size, truth);
        exact += report.size == truth;
        ooms += report.ooms > 0;
        again += report.ooms > 1;
    }
    cr_assert_gt(ooms, 0);
    cr_assert_leq(again, cases / 3, "%zu of %zu", again, cases);
    cr_assert_geq(exact, cases - cases / 4, "%zu of %zu", exact, cases);
}

/* Each with other blocks, which may or may not take one more unit at the largest size. */
Test(probe_weigh, sizes_that_were_rounded_up_seldom_keep_it_from_the_largest)
{
    size_t exact = 0, ooms = 0, cases = 0;
    for (size_t each = 20011; each < 300000; each += 9973)
        for (size_t aim = 20; aim < 110; aim += 17) {
            struct training t = {.blocks = {{0, each, 1, KIB(64)},
                                            {KIB(300), each / 3, 1, KIB(64)},
                                            {0, each / 7, 1, KIB(4)},
                                            {MIB(1), each / 11, 1, KIB(64)},
                                            {0, 3 * each / 5, 1, 256}},
                                 .block_count = 5};
            size_t capacity = KIB(64) + 7919 * aim * aim % (2 * each);
            for (size_t i = 0; i < t.block_count; i++)
                capacity += round_to(bytes_of(&t.blocks[i], aim), REBATCH_POOL_UNIT_BYTES);
            const size_t truth = truth_of(&t, capacity);
            const rebatch_probe_report report = probe(&t, capacity, 5);
            cr_assert_leq(report.size, truth);
            cr_assert_leq(report.microbatches, 5);
            exact += report.size == truth;
            ooms += report.ooms;
            cases++;
        }
    cr_assert_geq(exact, cases - cases / 8, "%zu of %zu", exact, cases);
    cr_assert_leq(ooms, cases / 5, "%zu of %zu", ooms, cases);
}
