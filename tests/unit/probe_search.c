/* Owns the tests of the search's bounds in time, of the choice of the fastest, and of memory
 * outside the pool: with trials and a clock that are made up. Must not know how the library runs a
 * trial. */
#include <criterion/criterion.h>

#include "pool/pool.h"
#include "probe/probe.h"

#define MIB(n) ((size_t)(n) << 20)
#define SECOND UINT64_C(1000000000)

/* ---- a made-up training ---- */

struct training {
    rebatch_device *device;
    rebatch_pool *pool;
    size_t each_bytes;                  /* of the pool */
    size_t outside_bytes, outside_each; /* of the device, for the time of a trial */
    size_t workspace_each;              /* and for good: made anew when a larger one is needed */
    void *workspace;
    size_t workspace_bytes;
    bool keeps; /* as much again till the next micro-batch has made its own */
    void *kept;
    uint64_t start_ns, each_ns;
    size_t flat;    /* samples that take no longer than one */
    size_t brittle; /* a size that runs only once */
    size_t brittle_runs;
    size_t unlucky; /* runs that fail though their memory is there */
    size_t ran;
    size_t sizes[32];
};

static uint64_t clock_ns;

static uint64_t now(void)
{
    return clock_ns;
}

static rebatch_status take_workspace(struct training *t, size_t count)
{
    const size_t bytes = t->workspace_each * count;
    void *made;
    if (bytes <= t->workspace_bytes)
        return REBATCH_OK;
    const rebatch_status status = rbi_device_alloc(t->device, &made, bytes);
    if (status)
        return status;
    if (t->workspace)
        (void)rbi_device_free(t->device, t->workspace, t->workspace_bytes);
    t->workspace = made;
    t->workspace_bytes = bytes;
    return REBATCH_OK;
}

static rebatch_status take_all(struct training *t, size_t count)
{
    void *block, *own = NULL;
    rebatch_status status = take_workspace(t, count);
    if (!status && t->keeps)
        status = rebatch_pool_alloc(&own, t->pool, t->each_bytes * count, NULL, 0);
    if (!status)
        status = rebatch_pool_alloc(&block, t->pool, t->each_bytes * count, NULL, 0);
    if (status)
        return status;
    (void)rebatch_pool_free(t->pool, t->kept);
    t->kept = own;
    return rebatch_pool_free(t->pool, block);
}

static rebatch_status take(struct training *t, size_t count)
{
    void *outside = NULL;
    const size_t bytes = (t->outside_bytes + t->outside_each * count) / 65536 * 65536;
    if (count == t->brittle && t->brittle_runs++ > 0)
        return REBATCH_OOM;
    if (t->unlucky > 0 && t->unlucky--)
        return REBATCH_OOM;
    rebatch_status status = bytes ? rbi_device_alloc(t->device, &outside, bytes) : REBATCH_OK;
    if (!status)
        status = take_all(t, count);
    if (outside)
        (void)rbi_device_free(t->device, outside, bytes);
    return status;
}

static rebatch_status trial(struct rbi_trace *trace, uint64_t *peak_bytes, void *user, size_t count,
                            const struct rbi_trace *before)
{
    struct training *t = user;
    rebatch_scope scope;
    t->sizes[t->ran++] = count;
    clock_ns += t->start_ns + t->each_ns * (count > t->flat ? count : t->flat);
    cr_assert_eq(rebatch_scope_begin(&scope, t->pool), REBATCH_OK);
    rbi_pool_mark_peak(t->pool);
    rbi_trace_begin(trace, t->pool, count);
    const rebatch_status status = take(t, count);
    cr_assert_eq(rbi_trace_end(trace, t->pool, before), REBATCH_OK);
    *peak_bytes = rbi_pool_peak_since_mark(t->pool);
    trace->is_whole = status == REBATCH_OK;
    trace->peak_bytes = t->each_bytes * count;
    cr_assert_eq(status ? rebatch_scope_rollback(t->pool, scope)
                        : rebatch_scope_commit(t->pool, scope),
                 REBATCH_OK);
    if (status)
        (void)rebatch_pool_trim(t->pool, 0, NULL);
    return status;
}

static size_t any_size(void *user, size_t size)
{
    (void)user;
    return size;
}

/* On a dry device of so much; sizes from 1 to 64. */
static struct rbi_search search_of(struct training *t, size_t capacity_bytes)
{
    cr_assert_eq(rebatch_device_open_dry(&t->device, capacity_bytes, 65536), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&t->pool, t->device, NULL), REBATCH_OK);
    return (struct rbi_search){.trial = trial,
                               .user = t,
                               .setting = {.pool = t->pool, .admits_above = SIZE_MAX},
                               .round = any_size,
                               .round_up = any_size,
                               .least = 1,
                               .most = 64,
                               .batch = 64,
                               .max_trials = 20,
                               .now = now};
}

static void end(struct training *t, struct rbi_search *search)
{
    rbi_search_release(search);
    if (t->workspace)
        (void)rbi_device_free(t->device, t->workspace, t->workspace_bytes);
    rebatch_pool_destroy(t->pool);
    rebatch_device_close(t->device);
}

/* ---- time ---- */

Test(probe_search, no_run_begins_after_max_seconds)
{
    for (uint64_t seconds = 1; seconds <= 30; seconds += 7) {
        struct training t = {.each_bytes = MIB(1), .start_ns = 8 * SECOND};
        struct rbi_search search = search_of(&t, MIB(40));
        search.max_ns = seconds * SECOND;
        clock_ns = 5 * SECOND;
        cr_assert_eq(rbi_search_run(&search), REBATCH_OK);
        cr_assert_eq(t.ran, seconds <= 8 ? 1 : seconds <= 16 ? 2 : 3);
        cr_assert_eq(search.report.microbatches, t.ran);
        cr_assert_eq(search.report.size, t.sizes[t.ran - 1]);
        end(&t, &search);
    }
}

Test(probe_search, without_max_seconds_time_does_not_matter)
{
    struct training t = {.each_bytes = MIB(1), .start_ns = 100000 * SECOND};
    struct rbi_search search = search_of(&t, MIB(40));
    cr_assert_eq(rbi_search_run(&search), REBATCH_OK);
    cr_assert_eq(search.report.size, 40);
    end(&t, &search);
}

/* ---- the fastest ---- */

static size_t fastest_of(struct training *t, double *rate)
{
    struct rbi_search search = search_of(t, MIB(40));
    search.is_fastest = true;
    cr_assert_eq(rbi_search_run(&search), REBATCH_OK);
    cr_assert_eq(search.report.largest_size, 40);
    cr_assert_eq(search.report.measured_peak_bytes, search.report.size * MIB(1));
    cr_assert_eq(search.report.predicted_peak_bytes, search.report.size * MIB(1));
    cr_assert_leq(search.report.microbatches, 3 + RBI_TIMED_RUNS);
    const size_t size = search.report.size;
    *rate = search.report.samples_per_second;
    end(t, &search);
    return size;
}

Test(probe_search, where_all_sizes_are_as_fast_the_smallest_measured_is_chosen)
{
    double rate;
    struct training t = {.each_bytes = MIB(1), .each_ns = SECOND / 100};
    cr_assert_eq(fastest_of(&t, &rate), 10);
    cr_assert_float_eq(rate, 100, 1e-6);
}

Test(probe_search, where_larger_is_faster_the_largest_is_chosen)
{
    double rate;
    struct training t = {.each_bytes = MIB(1), .each_ns = SECOND / 100, .start_ns = SECOND};
    cr_assert_eq(fastest_of(&t, &rate), 40);
}

Test(probe_search, the_smallest_size_that_keeps_the_device_busy_is_chosen)
{
    double rate;
    struct training t = {.each_bytes = MIB(1), .each_ns = SECOND / 100, .flat = 20};
    cr_assert_eq(fastest_of(&t, &rate), 20);
    t = (struct training){.each_bytes = MIB(1), .each_ns = SECOND / 100, .flat = 21};
    cr_assert_eq(fastest_of(&t, &rate), 30, "20 are 5 percent slower");
}

Test(probe_search, what_is_within_two_percent_is_fast_enough)
{
    double rate;
    struct training t = {.each_bytes = MIB(1), .each_ns = SECOND / 100, .start_ns = SECOND / 200};
    /* rates: 40 in 0.405 s, 30 in 0.305 s (0.4 % less), 20 in 0.205 s (1.2 %), 10 in 0.105 s (3.6
     * %) */
    cr_assert_eq(fastest_of(&t, &rate), 20);
    cr_assert_float_eq(rate, 20 / 0.205, 1e-6);
}

/* The largest, and three, two and one quarters of it, rounded down. */
Test(probe_search, the_sizes_that_are_measured_are_quarters_of_the_largest)
{
    for (size_t largest = 1; largest <= 43; largest++) {
        struct training t = {.each_bytes = MIB(1), .each_ns = SECOND / 100};
        struct rbi_search search = search_of(&t, largest * MIB(1));
        size_t runs[64] = {0};
        search.is_fastest = true;
        cr_assert_eq(rbi_search_run(&search), REBATCH_OK);
        cr_assert_eq(search.report.largest_size, largest);
        for (size_t i = 0; i < t.ran; i++)
            runs[t.sizes[i]]++;
        for (size_t quarters = 1; quarters <= 4; quarters++) {
            const size_t size = largest * quarters / 4 > 0 ? largest * quarters / 4 : 1;
            cr_assert_geq(runs[size], RBI_TIMED_TURNS, "%zu quarters of %zu", quarters, largest);
        }
        end(&t, &search);
    }
}

Test(probe_search, max_trials_bounds_what_is_measured)
{
    struct training t = {.each_bytes = MIB(1), .each_ns = SECOND / 100};
    struct rbi_search search = search_of(&t, MIB(40));
    search.is_fastest = true;
    search.max_trials = 6;
    cr_assert_eq(rbi_search_run(&search), REBATCH_OK);
    cr_assert_eq(t.ran, 6);
    cr_assert_eq(search.report.largest_size, 40);
    cr_assert_geq(search.report.size, 30);
    end(&t, &search);
}

/* ---- memory outside the pool ---- */

Test(probe_search, a_workspace_outside_the_pool_is_left_room_for)
{
    struct training t = {.each_bytes = MIB(1), .outside_bytes = MIB(10)};
    struct rbi_search search = search_of(&t, MIB(40));
    cr_assert_eq(rbi_search_run(&search), REBATCH_OK);
    cr_assert_eq(search.report.size, 30);
    cr_assert_eq(search.report.ooms, 0);
    end(&t, &search);
}

Test(probe_search, a_workspace_that_grows_with_the_samples_is_foretold)
{
    struct training t = {.each_bytes = MIB(1), .outside_each = MIB(1) / 2};
    struct rbi_search search = search_of(&t, MIB(40));
    cr_assert_eq(rbi_search_run(&search), REBATCH_OK);
    cr_assert_eq(search.report.size, 26, "26 and 13 MiB; found %zu", search.report.size);
    cr_assert_eq(search.report.ooms, 0);
    end(&t, &search);
}

/* After 20 samples 20 MiB are left for a larger workspace, until the one that there is goes. */
Test(probe_search, a_workspace_that_is_made_anew_finds_room_beside_the_one_before)
{
    struct training t = {.each_bytes = MIB(1) / 8, .workspace_each = MIB(1)};
    struct rbi_search search = search_of(&t, MIB(40));
    search.hint = 20;
    cr_assert_eq(rbi_search_run(&search), REBATCH_OK);
    cr_assert_eq(search.report.ooms, 0);
    cr_assert_eq(search.report.size, 20, "found %zu", search.report.size);
    end(&t, &search);
}

/* 32 samples need 32 MiB of the pool and 8 outside. While those are made the 2.5 MiB that 10
 * samples have left are there as well, but nothing of the pool's yet: that is not taken ahead. */
Test(probe_search, what_a_trial_needs_is_not_taken_ahead_where_a_workspace_is_made_anew)
{
    struct training t = {.each_bytes = MIB(1), .workspace_each = MIB(1) / 4};
    struct rbi_search search = search_of(&t, MIB(41));
    search.hint = 10;
    cr_assert_eq(rbi_search_run(&search), REBATCH_OK);
    cr_assert_eq(search.report.ooms, 0);
    cr_assert_eq(search.report.size, 32, "found %zu", search.report.size);
    end(&t, &search);
}

/* ---- what a micro-batch leaves to the next ---- */

/* A step of 64 has two micro-batches of 31 and one of 2. The second finds what the first has left,
 * and what the step before has left is there until the step ends: 2 + 31 + 2 * 31 MiB. What a trial
 * of 31 leaves to the first step is too much. */
Test(probe_search, where_a_trial_leaves_too_much_a_smaller_one_comes_last)
{
    struct training t = {.each_bytes = MIB(1), .keeps = true};
    struct rbi_search search = search_of(&t, MIB(100));
    search.hint = 30;
    cr_assert_eq(rbi_search_run(&search), REBATCH_OK);
    cr_assert_eq(search.report.size, 31, "found %zu", search.report.size);
    cr_assert_eq(search.report.ooms, 0);
    cr_assert_eq(t.sizes[t.ran - 1], 2, "the steps find what the rest leaves");
    cr_assert_eq(search.report.microbatches, t.ran);
    for (int i = 0; i < 6; i++)
        cr_assert_eq(take(&t, i % 3 == 2 ? 2 : 31), REBATCH_OK);
    end(&t, &search);
}

/* A step of 64 has three micro-batches of 20 and one of 4, each of which finds what the one before
 * has left, and the 4 of the step before: that is exactly as foretold, so that one run shows it. */
Test(probe_search, what_is_foretold_exactly_is_run_once)
{
    struct training t = {.each_bytes = MIB(1), .keeps = true};
    struct rbi_search search = search_of(&t, MIB(64));
    size_t runs = 0;
    cr_assert_eq(rbi_search_run(&search), REBATCH_OK);
    cr_assert_eq(search.report.size, 20, "found %zu", search.report.size);
    cr_assert_eq(search.report.confidence, REBATCH_CONFIDENCE_EXACT);
    for (size_t i = 0; i < t.ran; i++)
        runs += t.sizes[i] == 20;
    cr_assert_eq(runs, 1);
    end(&t, &search);
}

Test(probe_search, without_runs_for_it_the_size_must_follow_what_there_is)
{
    struct training t = {.each_bytes = MIB(1), .keeps = true};
    struct rbi_search search = search_of(&t, MIB(100));
    search.hint = 30;
    search.max_trials = 3;
    cr_assert_eq(rbi_search_run(&search), REBATCH_OK);
    cr_assert_leq(t.ran, 3);
    cr_assert_eq(search.report.ooms, 0);
    cr_assert_eq(take(&t, search.report.size), REBATCH_OK);
    end(&t, &search);
}

/* ---- what is believed ---- */

Test(probe_search, a_first_run_that_fails_where_its_memory_is_there_runs_once_more)
{
    struct training t = {.each_bytes = MIB(1), .unlucky = 1};
    struct rbi_search search = search_of(&t, MIB(40));
    cr_assert_eq(rbi_search_run(&search), REBATCH_OK);
    cr_assert_eq(search.report.size, 40);
    cr_assert_eq(search.report.ooms, 1);
    end(&t, &search);
    t = (struct training){.each_bytes = MIB(1), .unlucky = 1};
    search = search_of(&t, MIB(1));
    cr_assert_eq(rbi_search_run(&search), REBATCH_OK, "it is there exactly");
    cr_assert_eq(search.report.size, 1);
    end(&t, &search);
    t = (struct training){.each_bytes = MIB(1), .unlucky = 2};
    search = search_of(&t, MIB(40));
    cr_assert_eq(rbi_search_run(&search), REBATCH_E_EXHAUSTED);
    cr_assert_eq(t.ran, 2);
    end(&t, &search);
}

Test(probe_search, a_size_that_fails_when_it_is_run_again_is_not_the_answer)
{
    struct training t = {.each_bytes = MIB(1), .brittle = 1};
    struct rbi_search search = search_of(&t, MIB(1));
    cr_assert_eq(rbi_search_run(&search), REBATCH_E_EXHAUSTED);
    cr_assert_eq(t.brittle_runs, 3, "once more after the cache was given back");
    end(&t, &search);
}

/* Of 40 MiB there are 31 in a session that begins anew. */
static void search_anew(struct training *t, struct rbi_search *search)
{
    void *block;
    *search = search_of(t, MIB(40));
    cr_assert_eq(rebatch_pool_alloc(&block, t->pool, MIB(9), NULL, 0), REBATCH_OK);
    cr_assert_eq(rbi_pool_clone(&search->setting.fresh, &search->setting.fresh_device, t->pool),
                 REBATCH_OK);
    cr_assert_eq(rebatch_pool_free(t->pool, block), REBATCH_OK);
}

Test(probe_search, a_session_that_begins_anew_must_have_room_for_the_size_too)
{
    struct training t = {.each_bytes = MIB(1)};
    struct rbi_search search;
    search_anew(&t, &search);
    cr_assert_eq(rbi_search_run(&search), REBATCH_OK);
    cr_assert_eq(search.report.size, 31, "found %zu", search.report.size);
    cr_assert_eq(search.report.ooms, 0);
    end(&t, &search);
}

/* 36 samples run, and leave no room for steps. */
Test(probe_search, what_leaves_room_for_the_steps_is_run_or_believed_when_no_run_is_left)
{
    for (uint32_t runs = 2; runs <= 4; runs++) {
        struct training t = {.each_bytes = MIB(1)};
        struct rbi_search search;
        search_anew(&t, &search);
        search.hint = 36;
        search.max_trials = runs;
        cr_assert_eq(rbi_search_run(&search), REBATCH_OK);
        cr_assert_eq(t.sizes[1], 36);
        cr_assert_eq(search.report.size, 31, "with %u runs %zu", runs, search.report.size);
        cr_assert_eq(t.ran, runs < 3 ? 2 : 3);
        cr_assert_eq(search.report.predicted_peak_bytes, runs < 3 ? 0 : 31 * MIB(1));
        end(&t, &search);
    }
}
