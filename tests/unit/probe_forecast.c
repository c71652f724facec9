/* Owns the tests of what a forecast says from two micro-batches: compared with a count of bytes by
 * hand, on a device with virtual memory, where pieces do not matter, and on one without.
 * Must not know the search. Seeds: none. */
#include <criterion/criterion.h>

#include "device/device.h"
#include "probe/probe.h"

#define MIB(n) ((size_t)(n) << 20)

enum { FIRST = 1, SECOND = 3, SIZES = 40 };

/* A training: `live` MiB are there, steps have left `older`. A micro-batch allocates `own` MiB a
 * sample, which the next one frees where `keeps` is set, then `work` a sample. */
struct training {
    size_t capacity, live, older, own, work;
    size_t fresh; /* more that lives in a session which begins anew */
    size_t moments;
    bool keeps;
};

struct bed {
    struct training is;
    rebatch_device *device;
    rebatch_pool *pool;
    void *kept, *older;
    struct rbi_trace traces[2];
    struct rbi_model model;
    struct rbi_setting setting;
};

static void *take(struct bed *bed, size_t mib)
{
    void *block;
    cr_assert_eq(rebatch_pool_alloc(&block, bed->pool, MIB(mib), NULL, 0), REBATCH_OK, "%s",
                 rebatch_last_error());
    return block;
}

static void give(struct bed *bed, void *block)
{
    cr_assert_eq(rebatch_pool_free(bed->pool, block), REBATCH_OK);
}

static void run(struct bed *bed, size_t i, size_t count)
{
    struct rbi_trace *trace = &bed->traces[i];
    rbi_trace_begin(trace, bed->pool, count);
    void *const own = take(bed, bed->is.own * count);
    if (bed->older)
        give(bed, bed->older);
    if (bed->kept)
        give(bed, bed->kept);
    bed->older = NULL;
    void *const work = take(bed, bed->is.work * count);
    give(bed, work);
    bed->kept = own;
    if (!bed->is.keeps) {
        give(bed, own);
        bed->kept = NULL;
    }
    cr_assert_eq(rbi_trace_end(trace, bed->pool, i ? bed->traces : NULL), REBATCH_OK);
    trace->is_whole = true;
    trace->peak_bytes = MIB((bed->is.own + bed->is.work) * count);
    if (i)
        rbi_trace_pass_on(bed->traces, trace);
}

/* Runs the two micro-batches. */
static void make_model(struct bed *bed)
{
    bed->setting.pool = bed->pool;
    bed->setting.least = FIRST;
    bed->setting.admits_above = SIZE_MAX;
    run(bed, 0, FIRST);
    run(bed, 1, SECOND);
    cr_assert_eq(
        rbi_model_make(&bed->model, &(struct rbi_traces){.whole = {bed->traces, bed->traces + 1},
                                                         .count = 2,
                                                         .latest = &bed->traces[1]}),
        REBATCH_OK);
    cr_assert(bed->model.has_events);
    bed->model.pool = bed->pool;
}

static void open_bed(struct bed *bed, const struct training *is)
{
    *bed = (struct bed){.is = *is};
    cr_assert_eq(rebatch_device_open_dry(&bed->device, MIB(is->capacity), 65536), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&bed->pool, bed->device, NULL), REBATCH_OK);
    if (is->live)
        (void)take(bed, is->live);
    if (is->older)
        bed->older = take(bed, is->older);
    if (is->fresh || is->older) {
        void *const more = is->fresh ? take(bed, is->fresh) : NULL;
        cr_assert_eq(rbi_pool_clone(&bed->setting.fresh, &bed->setting.fresh_device, bed->pool),
                     REBATCH_OK);
        if (more)
            give(bed, more);
        bed->setting.first = &bed->traces[0];
        bed->setting.has_stepped = is->older != 0;
    }
    make_model(bed);
    cr_assert_eq(bed->model.keeps, is->keeps);
    if (is->moments) {
        cr_assert_eq(rbi_reserve_plan(&bed->setting, MIB(is->moments)), REBATCH_OK);
        cr_assert_eq(rbi_reserve_hold(&bed->setting), REBATCH_OK);
    }
}

static void close_bed(struct bed *bed)
{
    rbi_reserve_release(&bed->setting);
    rbi_model_release(&bed->model);
    rbi_trace_release(&bed->traces[0]);
    rbi_trace_release(&bed->traces[1]);
    rebatch_pool_destroy(bed->setting.fresh);
    rebatch_device_close(bed->setting.fresh_device);
    rebatch_pool_destroy(bed->pool);
    rebatch_device_close(bed->device);
}

static struct rbi_forecast forecast(const struct bed *bed, const struct rbi_plan *plan)
{
    struct rbi_forecast said;
    cr_assert_eq(rbi_forecast_run(&said, &bed->model, &bed->setting, plan), REBATCH_OK, "%s",
                 rebatch_last_error());
    return said;
}

/* ---- the same by hand ---- */

struct account {
    const struct training *is;
    size_t held, kept; /* MiB */
    size_t freed;      /* of before the step, which may yet be taken back */
    size_t peak;
    bool fits;
};

/* What the one before has kept lives to the end of the attempt, which may yet be taken back. */
static void account_run(struct account *a, size_t count)
{
    const size_t own = a->is->own * count;
    const size_t most = a->held + a->freed + a->kept + own + a->is->work * count;
    a->peak = most > a->peak ? most : a->peak;
    a->fits &= most <= a->is->capacity;
    a->kept = a->is->keeps ? own : 0;
}

/* `made`: by the update. */
static void account_step(struct account *a, size_t count, size_t batch, size_t made)
{
    const size_t before = a->kept;
    for (size_t left = batch; left > 0; left -= left < count ? left : count) {
        account_run(a, left < count ? left : count);
        a->freed = before;
    }
    a->held += made;
    a->fits &= a->held + a->freed + a->kept <= a->is->capacity;
    a->freed = 0;
}

/* The trial, between smaller ones of `before` and `after` samples where these are not 0; then a
 * step, the update, and a step. */
static struct account account_of(const struct bed *bed, const struct rbi_plan *plan, size_t before,
                                 size_t after)
{
    struct account a = {.is = &bed->is,
                        .held = bed->is.live + bed->is.moments,
                        .kept = bed->is.keeps ? bed->is.own * SECOND : 0,
                        .fits = true};
    if (before)
        account_run(&a, before);
    a.peak = 0;
    if (plan->has_trial)
        account_run(&a, plan->count);
    const size_t peak = a.peak;
    if (after)
        account_run(&a, after);
    if (plan->has_training) {
        a.held -= bed->is.moments;
        account_step(&a, plan->count, plan->batch, bed->is.moments);
        account_step(&a, plan->count, plan->batch, 0);
    }
    a.peak = peak;
    return a;
}

/* In a session that begins with the size, and has the moments after a micro-batch of the least. */
static bool account_fresh(const struct bed *bed, const struct rbi_plan *plan)
{
    struct account a = {.is = &bed->is,
                        .held = bed->is.live + bed->is.fresh + bed->is.moments,
                        .kept = bed->is.older ? bed->is.older : 0,
                        .fits = true};
    if (!bed->is.older && bed->is.keeps)
        a.kept = bed->is.own * FIRST;
    account_step(&a, plan->count, plan->batch, 0);
    account_step(&a, plan->count, plan->batch, 0);
    return a.fits;
}

static void assert_as_counted(const struct bed *bed, const struct rbi_plan *plan)
{
    const struct rbi_forecast said = forecast(bed, plan);
    struct account truth = account_of(bed, plan, said.before, said.after);
    if (plan->has_training && bed->setting.fresh)
        truth.fits &= account_fresh(bed, plan);
    cr_assert_eq(said.fits, truth.fits, "%zu of %zu: %d, by hand %d", plan->count, plan->batch,
                 said.fits, truth.fits);
    if (!said.fits)
        return;
    cr_assert_eq(said.reserved_bytes >= said.peak_bytes, true);
    if (plan->has_trial)
        cr_assert_eq(said.peak_bytes, MIB(truth.peak), "%zu of %zu: %zu MiB, by hand %zu",
                     plan->count, plan->batch, (size_t)said.peak_bytes >> 20, truth.peak);
}

/* Every size, of batches that are multiples of it and such that are not. */
static size_t assert_all(const struct training *is)
{
    struct bed bed;
    size_t fits = 0;
    open_bed(&bed, is);
    for (size_t batch = 1; batch <= SIZES; batch += 3)
        for (size_t count = 1; count <= batch; count++) {
            for (int with = 1; with <= 3; with++)
                assert_as_counted(&bed, &(struct rbi_plan){count, with & 1, with & 2, batch});
            fits += forecast(&bed, &(struct rbi_plan){count, true, true, batch}).fits;
        }
    close_bed(&bed);
    return fits;
}

Test(probe_forecast, what_ends_with_the_micro_batch)
{
    cr_assert_gt(assert_all(&(struct training){.capacity = 40, .live = 3, .own = 1, .work = 2}), 9);
    cr_assert_gt(assert_all(&(struct training){.capacity = 41, .own = 2, .work = 1}), 9);
}

Test(probe_forecast, what_is_left_to_the_next_micro_batch_counts_beside_its_own)
{
    for (size_t capacity = 20; capacity <= 60; capacity += 8)
        cr_assert_gt(assert_all(&(struct training){
                         .capacity = capacity, .live = 2, .own = 1, .work = 1, .keeps = true}),
                     9);
    cr_assert_gt(assert_all(&(struct training){.capacity = 50, .own = 2, .work = 1, .keeps = true}),
                 9);
}

/* As much as what lives, or twice as much: then the pieces are of whole MiB. */
Test(probe_forecast, the_first_update_has_room)
{
    for (size_t times = 1; times <= 2; times++) {
        cr_assert_gt(assert_all(&(struct training){
                         .capacity = 40, .live = 4, .own = 1, .work = 1, .moments = 4 * times}),
                     9);
        cr_assert_gt(assert_all(&(struct training){.capacity = 40,
                                                   .live = 4,
                                                   .own = 1,
                                                   .work = 1,
                                                   .moments = (4 + SECOND) * times,
                                                   .keeps = true}),
                     9);
    }
}

Test(probe_forecast, a_session_that_begins_anew_has_room)
{
    for (int keeps = 0; keeps < 2; keeps++)
        cr_assert_gt(
            assert_all(&(struct training){
                .capacity = 40, .live = 4, .fresh = 9, .own = 1, .work = 1, .keeps = keeps != 0}),
            9);
}

/* What steps before have left is freed by the first micro-batch, and lives until the step ends,
 * which can take that back: the second micro-batch does not have its room. */
Test(probe_forecast, what_older_steps_have_left_goes_with_the_step)
{
    struct bed bed;
    open_bed(&bed, &(struct training){
                       .capacity = 50, .live = 2, .older = 20, .own = 1, .work = 1, .keeps = true});
    /* The first micro-batch has 2 + 20 + 2 * count, the second 2 + 20 + 3 * count. */
    for (size_t count = 4; count <= 30; count++) {
        const struct rbi_plan plan = {count, false, true, 4 * count};
        cr_assert_eq(forecast(&bed, &plan).fits, 22 + 3 * count <= 50, "%zu", count);
    }
    close_bed(&bed);
}

/* A step of one micro-batch and a rest: the rest comes between, in trials as in steps, while there
 * are runs left for it. */
Test(probe_forecast, the_rest_of_the_batch_comes_between_as_long_as_there_are_runs)
{
    static const struct training is = {
        .capacity = 50, .live = 0, .own = 1, .work = 1, .keeps = true};
    size_t before = 0, after = 0;
    for (uint32_t runs = 0; runs <= 4; runs++) {
        struct bed bed;
        open_bed(&bed, &is);
        bed.setting.runs_left = runs;
        for (size_t batch = 2; batch <= SIZES; batch++)
            for (size_t count = 2; count < batch; count++) {
                for (int trial = 0; trial < 2; trial++) {
                    const struct rbi_plan plan = {count, trial != 0, true, batch};
                    const struct rbi_forecast said = forecast(&bed, &plan);
                    const size_t rest = batch % count, small = rest > 1 ? rest : 2;
                    const bool may = rest && small < count;
                    const bool fits = account_of(&bed, &plan, 0, 0).fits;
                    const bool fits_after = account_of(&bed, &plan, 0, small).fits;
                    const bool fits_before = account_of(&bed, &plan, small, small).fits;
                    const size_t expected_after =
                        !fits && may && runs >= 1u + (unsigned)trial ? small : 0;
                    const size_t expected_before =
                        expected_after && !fits_after && trial && runs > 2 ? small : 0;
                    cr_assert_eq(said.after, expected_after, "%zu of %zu: %zu", count, batch,
                                 said.after);
                    cr_assert_eq(said.before, expected_before, "%zu of %zu", count, batch);
                    cr_assert_eq(said.fits, expected_before  ? fits_before
                                            : expected_after ? fits_after
                                                             : fits);
                    after += said.fits && said.after;
                    before += said.fits && said.before;
                }
            }
        close_bed(&bed);
    }
    cr_assert_gt(after, 0);
    cr_assert_gt(before, 0);
}

Test(probe_forecast, what_does_not_fit_says_which_request_fails)
{
    struct bed bed;
    open_bed(&bed, &(struct training){.capacity = 40, .live = 4, .own = 1, .work = 2});
    const struct rbi_forecast most = forecast(&bed, &(struct rbi_plan){12, true, true, 64});
    cr_assert(most.fits);
    cr_assert_eq(most.peak_bytes, MIB(40));
    cr_assert_eq(most.reserved_bytes, MIB(40));
    cr_assert(most.is_admitted);
    cr_assert_not(most.needs_trim);
    cr_assert_eq(forecast(&bed, &(struct rbi_plan){13, true, true, 64}).failing_bytes, MIB(26));
    cr_assert_eq(forecast(&bed, &(struct rbi_plan){37, true, true, 64}).failing_bytes, MIB(37));
    close_bed(&bed);
}

/* ---- pieces ---- */

/* Without virtual memory: of 3 samples a piece of 3 MiB and one of 9 are cached. The 4 MiB of 4
 * samples lie in the second, so that it cannot be given back for the 12 that come after. */
static void open_pieces(struct bed *bed, const struct training *is)
{
    *bed = (struct bed){.is = *is};
    cr_assert_eq(rbi_device_open_dry(&bed->device, MIB(is->capacity), 65536, false), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&bed->pool, bed->device, NULL), REBATCH_OK);
    make_model(bed);
}

Test(probe_forecast, a_cache_that_is_in_the_way_is_given_back_as_a_step_does)
{
    struct bed bed;
    rebatch_pool_stats before, after;
    open_pieces(&bed, &(struct training){.capacity = 16, .own = 1, .work = 3});
    cr_assert_eq(rebatch_pool_get_stats(&before, bed.pool), REBATCH_OK);
    cr_assert_gt(before.reserved_bytes, 0, "something is cached");
    const struct rbi_forecast small = forecast(&bed, &(struct rbi_plan){3, true, true, 12});
    cr_assert(small.fits);
    cr_assert_not(small.needs_trim);
    const struct rbi_forecast large = forecast(&bed, &(struct rbi_plan){4, true, true, 12});
    cr_assert(large.fits);
    cr_assert(large.needs_trim);
    cr_assert(large.is_admitted, "its memory is there beforehand then");
    cr_assert_eq(large.peak_bytes, MIB(16));
    cr_assert_not(forecast(&bed, &(struct rbi_plan){5, true, true, 12}).fits);
    cr_assert_eq(rebatch_pool_get_stats(&after, bed.pool), REBATCH_OK);
    cr_assert_eq(after.reserved_bytes, before.reserved_bytes, "it was only foretold");
    close_bed(&bed);
}

/* A size that fits only when an attempt runs once more, with the cache given back, as a step does
 * it. What is to run as work must fit without. */
Test(probe_forecast, what_a_step_would_run_once_more_fits_and_is_no_work)
{
    size_t again = 0;
    for (size_t i = 0; i < 3 * 24; i++) {
        struct bed bed;
        open_pieces(&bed, &(struct training){.capacity = 16 + i / 3,
                                             .own = 1 + i % 3 / 2,
                                             .work = 3 - i % 3,
                                             .keeps = i % 2 != 0});
        for (size_t batch = 2; batch <= 16; batch++)
            for (size_t count = 1; count <= batch; count++) {
                const struct rbi_plan plan = {count, true, true, batch};
                bed.setting.is_work = false;
                const struct rbi_forecast said = forecast(&bed, &plan);
                bed.setting.is_work = true;
                const bool is_work = forecast(&bed, &plan).fits;
                cr_assert_eq(is_work, said.fits && said.is_admitted, "%zu of %zu", count, batch);
                again += said.fits && !said.is_admitted;
            }
        close_bed(&bed);
    }
    cr_assert_gt(again, 100);
}

/* ---- where only the peak is known ---- */

Test(probe_forecast, without_a_common_form_a_part_of_the_room_is_left)
{
    struct bed bed;
    open_bed(&bed, &(struct training){.capacity = 64, .live = 16, .own = 1, .work = 1});
    bed.model.has_events = false;
    const size_t available = MIB(48);
    for (size_t count = 1; count <= 40; count++) {
        const struct rbi_forecast said = forecast(&bed, &(struct rbi_plan){count, true, true, 64});
        cr_assert_eq(said.fits, MIB(2 * count) <= available - available / 32, "%zu", count);
        cr_assert_eq(said.peak_bytes, MIB(16 + 2 * count));
        cr_assert_eq(said.reserved_bytes, said.peak_bytes);
        cr_assert_eq(said.failing_bytes, MIB(2 * count));
    }
    /* Others will hold 1 MiB a sample of the device. */
    bed.model.outside = (struct rbi_line){.count = 1, .run = 1, .bytes = 1 << 20, .rise = 1 << 20};
    for (size_t count = 1; count <= 40; count++) {
        const size_t left = available - MIB(count);
        cr_assert_eq(forecast(&bed, &(struct rbi_plan){count, true, true, 64}).fits,
                     MIB(2 * count) <= left - left / 32, "%zu", count);
    }
    close_bed(&bed);
}

/* ---- the largest ---- */

Test(probe_forecast, the_largest_within_any_bounds_is_found)
{
    for (size_t capacity = 8; capacity <= 40; capacity += 4) {
        struct bed bed;
        open_bed(&bed, &(struct training){.capacity = capacity, .own = 1, .work = 1});
        const size_t truth = capacity / 2;
        for (size_t least = 1; least <= 14; least += 3)
            for (size_t most = least; most <= 24; most += 5) {
                const size_t expected = truth < least ? 0 : truth < most ? truth : most;
                size_t found = 99;
                cr_assert_eq(
                    rbi_forecast_largest(&found, &bed.model, &bed.setting, least, most, 24),
                    REBATCH_OK);
                cr_assert_eq(found, expected, "%zu in [%zu, %zu]: %zu", truth, least, most, found);
            }
        size_t found = 99;
        cr_assert_eq(rbi_forecast_largest(&found, &bed.model, &bed.setting, 5, 4, 24), REBATCH_OK);
        cr_assert_eq(found, 0, "there is no size between");
        close_bed(&bed);
    }
}
