/* Owns the search for the largest size, or the fastest: its trials, and the report.
 * Must not know how a trial runs, nor which size is next. */
#include "probe/probe.h"

#include <string.h>

/* ---- trials ---- */

static void drop_trace(struct rbi_search *s, size_t at)
{
    rbi_assert(at < s->whole_count);
    rbi_trace_release(&s->whole[at]);
    memmove(&s->whole[at], &s->whole[at + 1], (--s->whole_count - at) * sizeof *s->whole);
}

/* One for each size. If there are too many, the second smallest goes: the smallest and the largest
 * tell most. */
static void keep_trace(struct rbi_search *s, const struct rbi_trace *trace)
{
    if (s->whole_count)
        rbi_trace_pass_on(rbi_search_latest(s), trace);
    size_t at = 0;
    while (at < s->whole_count && s->whole[at].count < trace->count)
        at++;
    s->is_first_kept = s->whole_count == 0 || (s->is_first_kept && trace->count != s->least);
    if (at < s->whole_count && s->whole[at].count == trace->count)
        drop_trace(s, at);
    if (s->whole_count == RBI_TRACES_MOST) {
        drop_trace(s, 1);
        at -= at > 1;
    }
    rbi_assert(at <= s->whole_count && s->whole_count < RBI_TRACES_MOST);
    memmove(&s->whole[at + 1], &s->whole[at], (s->whole_count++ - at) * sizeof *s->whole);
    s->whole[at] = *trace;
    s->latest = trace->count;
    rbi_assert(at == 0 || s->whole[at - 1].count < trace->count);
    rbi_assert(at + 1 == s->whole_count || trace->count < s->whole[at + 1].count);
}

static void succeed(struct rbi_search *s, const struct rbi_trace *trace, uint64_t peak_bytes)
{
    const bool is_first = s->report.microbatches == 1;
    keep_trace(s, trace);
    rbi_search_latest(s)->live_bytes = peak_bytes;
    if (trace->count < s->fits)
        return; /* it ran to leave less behind */
    s->runs_of_fits = (trace->count == s->fits ? s->runs_of_fits : 0) + !is_first;
    s->fits = trace->count;
    s->report.size = trace->count;
    s->report.measured_peak_bytes = peak_bytes;
    if (s->predicted_bytes == 0)
        return;
    s->report.predicted_peak_bytes = s->predicted_bytes;
    s->report.confidence =
        s->predicted_bytes == peak_bytes ? REBATCH_CONFIDENCE_EXACT : REBATCH_CONFIDENCE_AFFINE;
}

/* A size that ran may fail once because of fragmentation, as the cache is returned after that. */
static void fail(struct rbi_search *s, size_t count)
{
    s->runs_of_fits = 0;
    if (count == s->fits && s->failed != count) {
        s->failed = count;
        return;
    }
    s->fails = count;
    if (s->fits < count)
        return;
    s->fits = rbi_search_ran_below(s, count);
    rbi_assert(s->fits < s->fails);
}

void rbi_search_note(struct rbi_search *s, size_t count, rebatch_status status,
                     const struct rbi_trace *trace, uint64_t peak_bytes)
{
    rbi_assert(count >= s->least || s->report.microbatches > 0);
    s->report.trials += count != s->tried;
    s->report.microbatches++;
    s->tried = count;
    s->is_model_made = false;
    if (status == REBATCH_OK) {
        succeed(s, trace, peak_bytes);
        return;
    }
    s->report.ooms++;
    fail(s, count);
    rbi_trace_release(&s->cut);
    s->cut = *trace;
}

static rebatch_status run_trial(struct rbi_search *s, struct rbi_trace *trace, uint64_t *peak_bytes,
                                size_t count)
{
    return s->trial(trace, peak_bytes, s->user, count, rbi_search_latest(s));
}

/* REBATCH_OK also after an OOM: s->fits says whether it ran. */
static rebatch_status try_size(struct rbi_search *s, size_t count)
{
    struct rbi_trace trace = {0};
    uint64_t peak_bytes = 0;
    const rebatch_status status = run_trial(s, &trace, &peak_bytes, count);
    if (status && status != REBATCH_OOM) {
        rbi_trace_release(&trace);
        return status;
    }
    rbi_search_note(s, count, status, &trace, peak_bytes);
    if (status == REBATCH_OK)
        return REBATCH_OK;
    return rebatch_pool_trim(s->setting.pool, 0, NULL); /* as a step does then */
}

/* ---- the report ---- */

static rebatch_status finish(struct rbi_search *s)
{
    rebatch_probe_report *report = &s->report;
    report->predicted_size = s->fits;
    if (report->confidence == REBATCH_CONFIDENCE_NONE)
        report->confidence = REBATCH_CONFIDENCE_MEASURED;
    size_t available;
    rebatch_status status = rebatch_pool_available(&available, s->setting.pool);
    if (status)
        return status;
    report->available_bytes = available;
    if (s->whole_count < 2)
        return status;
    status = rbi_search_model(s);
    if (status)
        return status;
    size_t larger;
    status = rbi_forecast_largest(&larger, &s->model, &s->setting, s->fits + 1, s->most, s->batch);
    if (rbi_search_allowed(s, larger))
        report->predicted_size = rbi_search_allowed(s, larger);
    if (!status && s->fits <= SIZE_MAX / 2)
        status = rbi_model_peak(&report->twice_bytes, &s->model, 2 * s->fits);
    return status;
}

/* If what the last trial left is in the way of the first step, a smaller trial runs, which leaves
 * less. A cache that is in the way is returned. */
static rebatch_status ready_for_steps(struct rbi_search *s)
{
    struct rbi_forecast steps;
    rebatch_status status =
        rbi_search_forecast(&steps, s, &(struct rbi_plan){s->report.size, false, true, s->batch});
    const size_t small = status || steps.after == 0 ? 0 : s->round_up(s->limits, steps.after);
    if (small && small < s->fits && rbi_search_may_go_on(s)) {
        status = rbi_search_prepare(s, small);
        if (!status)
            status = try_size(s, small);
    }
    return !status && steps.needs_trim ? rebatch_pool_trim(s->setting.pool, 0, NULL) : status;
}

/* ---- the fastest ---- */

/* As fast as the best, within what measuring can tell. */
#define GOOD_ENOUGH 0.98

struct timed {
    size_t count;
    double rate; /* samples a second; 0: it did not run */
    uint64_t peak_bytes, predicted_bytes;
};

/* The best of RBI_TIMED_TURNS runs: the first may map memory, or allocate what stays. */
static rebatch_status time_size(struct timed *timed, struct rbi_search *s)
{
    rebatch_status status = rbi_search_prepare(s, timed->count);
    timed->predicted_bytes = s->predicted_bytes;
    s->report.trials++;
    for (int turn = 0; turn < RBI_TIMED_TURNS && !status && rbi_search_may_go_on(s); turn++) {
        struct rbi_trace trace = {0};
        const uint64_t began = s->now();
        s->report.microbatches++;
        status = run_trial(s, &trace, &timed->peak_bytes, timed->count);
        const uint64_t ns = s->now() - began;
        if (status == REBATCH_OOM) {
            s->report.ooms++;
            rbi_trace_release(&trace);
            timed->rate = 0;
            return REBATCH_OK;
        }
        const double rate = (double)timed->count * 1e9 / (double)rbi_max(ns, 1);
        if (!status && rate > timed->rate)
            timed->rate = rate;
        if (status)
            rbi_trace_release(&trace);
        else
            keep_trace(s, &trace);
        s->is_model_made = false;
    }
    return status;
}

/* The largest size, and three, two and one quarter of it. */
static size_t choose_timed(struct timed *timed, const struct rbi_search *s)
{
    static const size_t quarters[RBI_TIMED_SIZES] = {4, 3, 2, 1};
    size_t count = 0;
    for (size_t i = 0; i < RBI_TIMED_SIZES; i++) {
        size_t size = s->fits / 4 * quarters[i] + s->fits % 4 * quarters[i] / 4;
        size = s->round(s->limits, rbi_max(size, s->least));
        if (size == 0) /* the batch is smaller than every allowed size, and is not cut */
            size = s->fits;
        if (count == 0 || size < timed[count - 1].count)
            timed[count++] = (struct timed){.count = size};
    }
    rbi_assert(count > 0); /* what fits is above 0 */
    return count;
}

static rebatch_status choose_fastest(struct rbi_search *s)
{
    struct timed timed[RBI_TIMED_SIZES];
    const size_t count = choose_timed(timed, s);
    rebatch_status status = REBATCH_OK;
    double best = 0;
    for (size_t i = 0; i < count && !status && rbi_search_may_go_on(s); i++) {
        status = time_size(&timed[i], s);
        best = timed[i].rate > best ? timed[i].rate : best;
    }
    for (size_t i = 0; i < count && !status && best > 0; i++) {
        if (timed[i].rate < GOOD_ENOUGH * best)
            continue;
        s->report.size = timed[i].count; /* the last is the smallest */
        s->report.samples_per_second = timed[i].rate;
        s->report.measured_peak_bytes = timed[i].peak_bytes;
        s->report.predicted_peak_bytes = timed[i].predicted_bytes;
    }
    return status;
}

/* Not the last size that ran, if that left no room for steps. */
static void report_what_fits(struct rbi_search *s)
{
    rebatch_probe_report *report = &s->report;
    if (report->size != s->fits) {
        report->predicted_peak_bytes = 0;
        report->confidence = REBATCH_CONFIDENCE_MEASURED;
    }
    for (size_t i = 0; i < s->whole_count; i++)
        if (s->whole[i].count == s->fits)
            report->measured_peak_bytes = s->whole[i].live_bytes;
    report->size = report->largest_size = s->fits;
}

/* ---- the whole ---- */

static void set_bounds(struct rbi_search *s)
{
    s->fails = s->too_large ? s->too_large : SIZE_MAX;
}

void rbi_search_begin(struct rbi_search *s)
{
    set_bounds(s);
    s->began_ns = s->now();
}

/* Whether the size that failed would fit now, without the cache, that is without fragmentation. */
static bool was_in_pieces(const struct rbi_search *s)
{
    size_t available;
    return s->cut.peak_bytes && rbi_search_may_go_on(s) &&
           rebatch_pool_available(&available, s->setting.pool) == REBATCH_OK &&
           s->cut.peak_bytes <= available;
}

/* REBATCH_E_EXHAUSTED: not even the smallest fits. */
static rebatch_status run_sizes(struct rbi_search *s)
{
    size_t next;
    rebatch_status status = try_size(s, s->least);
    if (!status && s->fits == 0 && was_in_pieces(s)) {
        set_bounds(s);
        status = try_size(s, s->least);
    }
    if (!status && s->fits > 0)
        status = rbi_reserve_hold(&s->setting);
    while (!status && !(status = rbi_search_next(&next, s)) && next) {
        rbi_assert(next <= s->most);
        status = rbi_search_prepare(s, next);
        if (!status)
            status = try_size(s, next);
    }
    return !status && s->fits == 0 ? REBATCH_E_EXHAUSTED : status;
}

rebatch_status rbi_search_run(struct rbi_search *s)
{
    rbi_search_begin(s);
    rebatch_status status = run_sizes(s);
    if (status == REBATCH_E_EXHAUSTED)
        return status;
    if (!status)
        status = finish(s);
    report_what_fits(s);
    if (!status && s->is_fastest)
        status = choose_fastest(s);
    return status ? status : ready_for_steps(s);
}

void rbi_search_release(struct rbi_search *s)
{
    for (size_t i = 0; i < s->whole_count; i++)
        rbi_trace_release(&s->whole[i]);
    rbi_trace_release(&s->cut);
    rbi_model_release(&s->model);
    rebatch_pool_destroy(s->setting.fresh);
    rebatch_device_close(s->setting.fresh_device);
}
