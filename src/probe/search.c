/* Owns the search for the largest size: which one is run next, and what is believed.
 * Must not know how a trial runs. */
#include "probe/probe.h"

#include <string.h>

/* ---- trials ---- */

static void drop_trace(struct rbi_search *s, size_t at)
{
    rbi_trace_release(&s->whole[at]);
    memmove(&s->whole[at], &s->whole[at + 1], (--s->whole_count - at) * sizeof *s->whole);
}

static struct rbi_trace *latest_trace(struct rbi_search *s)
{
    for (size_t i = 0; i < s->whole_count; i++)
        if (s->whole[i].count == s->latest)
            return &s->whole[i];
    return NULL;
}

const struct rbi_trace *rbi_search_latest(const struct rbi_search *s)
{
    for (size_t i = 0; i < s->whole_count; i++)
        if (s->whole[i].count == s->latest)
            return &s->whole[i];
    return NULL;
}

/* One a size; the smallest and the largest tell most. */
static void keep_trace(struct rbi_search *s, const struct rbi_trace *trace)
{
    if (s->whole_count)
        rbi_trace_pass_on(latest_trace(s), trace);
    size_t at = 0;
    while (at < s->whole_count && s->whole[at].count < trace->count)
        at++;
    if (at < s->whole_count && s->whole[at].count == trace->count)
        drop_trace(s, at);
    if (s->whole_count == RBI_TRACES_MOST) {
        drop_trace(s, 1);
        at -= at > 1;
    }
    memmove(&s->whole[at + 1], &s->whole[at], (s->whole_count++ - at) * sizeof *s->whole);
    s->whole[at] = *trace;
    s->latest = trace->count;
}

static void succeed(struct rbi_search *s, const struct rbi_trace *trace, uint64_t peak_bytes)
{
    const bool is_first = s->report.microbatches == 1;
    keep_trace(s, trace);
    latest_trace(s)->live_bytes = peak_bytes;
    s->runs_of_fits = (trace->count == s->fits ? s->runs_of_fits : 0) + !is_first;
    s->fits = trace->count;
    s->report.size = trace->count;
    s->report.measured_peak_bytes = peak_bytes;
    if (s->foretold_bytes == 0)
        return;
    s->report.predicted_peak_bytes = s->foretold_bytes;
    s->report.confidence =
        s->foretold_bytes == peak_bytes ? REBATCH_CONFIDENCE_EXACT : REBATCH_CONFIDENCE_AFFINE;
}

/* The largest that ran does not fit after all: the one below it that did is the best known. */
static void give_up_fits(struct rbi_search *s)
{
    s->fails = s->fits;
    s->runs_of_fits = 0;
    size_t below = s->least < s->fails ? s->least : 0;
    for (size_t i = 0; i < s->whole_count; i++)
        if (s->whole[i].count < s->fails)
            below = s->whole[i].count;
    s->fits = below;
}

void rbi_search_note(struct rbi_search *s, size_t count, rebatch_status status,
                     const struct rbi_trace *trace, uint64_t peak_bytes)
{
    s->report.trials += count != s->tried;
    s->report.microbatches++;
    s->tried = count;
    s->is_model_made = false;
    if (status == REBATCH_OK) {
        succeed(s, trace, peak_bytes);
        return;
    }
    s->report.ooms++;
    while (s->fits >= count)
        give_up_fits(s);
    s->fails = count;
    rbi_trace_release(&s->cut);
    s->cut = *trace;
}

/* REBATCH_OK also after an OOM: s->fits says whether it ran. */
static rebatch_status try_size(struct rbi_search *s, size_t count)
{
    struct rbi_trace trace = {0};
    uint64_t peak_bytes = 0;
    const rebatch_status status = s->trial(&trace, &peak_bytes, s->user, count, latest_trace(s));
    if (status && status != REBATCH_OOM)
        rbi_trace_release(&trace);
    else
        rbi_search_note(s, count, status, &trace, peak_bytes);
    return status == REBATCH_OOM ? REBATCH_OK : status;
}

/* ---- prediction ---- */

/* Of all that was seen up to now. */
static rebatch_status make_model(struct rbi_search *s)
{
    if (s->is_model_made)
        return REBATCH_OK;
    rbi_model_release(&s->model);
    struct rbi_traces traces = {
        .count = s->whole_count, .latest = latest_trace(s), .cut = &s->cut, .is_cautious = false};
    for (size_t i = 0; i < s->whole_count; i++)
        traces.whole[i] = &s->whole[i];
    const rebatch_status status = rbi_model_make(&s->model, &traces);
    s->model.pool = s->setting.pool;
    s->is_model_made = status == REBATCH_OK;
    return status;
}

static rebatch_status predict(size_t *out, struct rbi_search *s)
{
    *out = 0;
    rebatch_status status = make_model(s);
    if (!status)
        status = rbi_replay_largest(out, &s->model, &s->setting, s->fits + 1,
                                    rbi_min(s->most, s->fails - 1), s->batch);
    return status;
}

/* ---- which size next ---- */

/* The largest allowed size of at most `size` that is above what ran; 0: none. */
static size_t allowed_below(const struct rbi_search *s, size_t size)
{
    const size_t allowed = s->round(s->user, size);
    return allowed > s->fits ? allowed : 0;
}

/* The same, or else the smallest that may be tried at all. */
static size_t allowed_near(const struct rbi_search *s, size_t size)
{
    const size_t below = allowed_below(s, size);
    const size_t next = s->round_up(s->user, s->fits + 1);
    return below ? below : next < s->fails && next <= s->most ? next : 0;
}

/* At an odd distance from what ran before, and no multiple of four, sizes and samples that were
 * rounded up to powers of two show that they were. */
static size_t tell_apart(size_t count, size_t before)
{
    while (count > before + 1 && ((count - before) % 2 == 0 || count % 4 == 0))
        count--;
    return count;
}

/* After the first trial. What was found before is the best guess; where it is the size that has
 * just run, only a larger one that fits for certain is better. A size in proportion to what there
 * is fits for certain. */
static rebatch_status choose_second(size_t *out, struct rbi_search *s)
{
    size_t safe;
    const rebatch_status status = predict(&safe, s);
    *out = 0;
    if (s->hint > s->fits && s->hint < s->fails) {
        *out = s->hint;
        return status;
    }
    if (s->hint == s->fits && safe == 0)
        return status;
    *out =
        safe == s->most ? safe : allowed_near(s, tell_apart(rbi_max(safe, s->fits + 1), s->fits));
    return status;
}

/* What is not certain is not believed so much further than what ran. */
#define FAR 4
#define FAR_ROUGH 2
static size_t not_too_far(const struct rbi_search *s, size_t predicted)
{
    const size_t ran = s->whole[s->whole_count - 1].count;
    if (s->whole_count != 2 || !s->model.is_rough || predicted / FAR < ran)
        return predicted;
    return allowed_near(s, tell_apart(predicted / FAR_ROUGH, s->fits));
}

/* Wrong once: where the model is not certain it was wrong by more than the last sample. Twice: it
 * does not hold, and between what ran and what did not the middle is the best guess. */
static size_t after_oom(const struct rbi_search *s, size_t predicted)
{
    const size_t gap = s->fails - s->fits;
    if (s->report.ooms >= 2)
        return allowed_near(s, s->fits + gap / 2);
    return s->whole_count == 2 && s->model.is_rough
               ? allowed_near(s, rbi_min(predicted, s->fails - 1 - gap / 8))
               : predicted;
}

static bool keeps_memory(const struct rbi_model *model)
{
    for (size_t i = 0; i < model->event_count; i++)
        if (model->events[i].kind == RBI_TRACE_FREE_PREVIOUS)
            return true;
    return false;
}

/* Whether the largest that ran has shown that it also runs in a step. Where a micro-batch frees
 * what the one before has left, it must have followed one of its own size. */
static bool is_verified(const struct rbi_search *s)
{
    if (s->fits >= s->batch)
        return true; /* a step has only this one */
    const bool is_exact = s->report.confidence == REBATCH_CONFIDENCE_EXACT;
    return s->runs_of_fits >= (keeps_memory(&s->model) && !is_exact ? 2u : 1u);
}

/* What a size does now, as far as that is known. */
static rebatch_status forecast(struct rbi_forecast *out, struct rbi_search *s,
                               const struct rbi_plan *plan)
{
    *out = (struct rbi_forecast){.fits = true};
    if (s->whole_count < 2)
        return REBATCH_OK;
    const rebatch_status status = make_model(s);
    return status ? status : rbi_replay(out, &s->model, &s->setting, plan);
}

/* One that ran may yet leave no room for the steps: where the memory of the first update lies, or
 * what a micro-batch leaves to the next, then is in the way. A smaller one is looked for. */
static rebatch_status judge_fits(struct rbi_search *s)
{
    for (;;) {
        struct rbi_forecast steps;
        const rebatch_status status =
            forecast(&steps, s, &(struct rbi_plan){s->fits, false, true, s->batch});
        if (status || steps.fits || s->fits <= s->least)
            return status;
        give_up_fits(s);
    }
}

/* Readies the pool for a size, and says what it will need. */
static rebatch_status prepare(struct rbi_search *s, size_t count)
{
    struct rbi_forecast trial;
    s->foretold_bytes = 0;
    const rebatch_status status =
        forecast(&trial, s, &(struct rbi_plan){.count = count, .has_trial = true});
    if (status || s->whole_count < 2)
        return status;
    s->foretold_bytes = trial.peak_bytes;
    /* What others take more than they have must not find it in the cache. */
    return trial.needs_trim || s->model.outside.rise > 0
               ? rebatch_pool_trim(s->setting.pool, 0, NULL)
               : REBATCH_OK;
}

/* The next size, or 0 when the largest that ran is the answer. */
static rebatch_status choose_next(size_t *out, struct rbi_search *s)
{
    *out = 0;
    size_t predicted = 0;
    rebatch_status status = judge_fits(s);
    if (!status && s->fits < s->most && s->fits + 1 < s->fails) {
        status = s->whole_count > 1 ? predict(&predicted, s) : choose_second(&predicted, s);
        predicted = allowed_below(s, predicted);
        if (!status && predicted)
            predicted = not_too_far(s, predicted);
        if (!status && predicted && s->report.ooms)
            predicted = after_oom(s, predicted);
    }
    if (status)
        return status;
    *out = predicted ? predicted : is_verified(s) ? 0 : s->fits;
    return *out ? prepare(s, *out) : REBATCH_OK;
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
    status = make_model(s);
    if (status)
        return status;
    size_t larger;
    status = rbi_replay_largest(&larger, &s->model, &s->setting, s->fits + 1, s->most, s->batch);
    if (allowed_below(s, larger))
        report->predicted_size = allowed_below(s, larger);
    if (!status && s->fits <= SIZE_MAX / 2)
        status = rbi_model_peak(&report->twice_bytes, &s->model, 2 * s->fits);
    return status;
}

/* A cache in pieces that the size found has no use for is given back. */
static rebatch_status ready_for_steps(struct rbi_search *s)
{
    struct rbi_forecast steps;
    const rebatch_status status =
        forecast(&steps, s, &(struct rbi_plan){s->report.size, false, true, s->batch});
    return !status && steps.needs_trim ? rebatch_pool_trim(s->setting.pool, 0, NULL) : status;
}

/* ---- the fastest ---- */

/* As fast as the best, but for what measuring is uncertain about. */
#define GOOD_ENOUGH 0.98

struct timed {
    size_t count;
    double rate; /* samples a second; 0: it did not run */
    uint64_t peak_bytes, foretold_bytes;
};

static bool may_go_on(const struct rbi_search *s)
{
    return s->report.microbatches < s->max_trials &&
           (s->max_ns == 0 || s->now() - s->began_ns < s->max_ns);
}

/* The better of some runs: the first may have to map memory, or make what is made once. */
static rebatch_status time_size(struct timed *timed, struct rbi_search *s)
{
    rebatch_status status = prepare(s, timed->count);
    timed->foretold_bytes = s->foretold_bytes;
    s->report.trials++;
    for (int turn = 0; turn < RBI_TIMED_TURNS && !status && may_go_on(s); turn++) {
        struct rbi_trace trace = {0};
        const uint64_t began = s->now();
        s->report.microbatches++;
        status = s->trial(&trace, &timed->peak_bytes, s->user, timed->count, latest_trace(s));
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

/* The largest, and fewer quarters of it. */
static size_t choose_timed(struct timed *timed, const struct rbi_search *s)
{
    static const size_t quarters[RBI_TIMED_SIZES] = {4, 3, 2, 1};
    size_t count = 0;
    for (size_t i = 0; i < RBI_TIMED_SIZES; i++) {
        size_t size = s->fits / 4 * quarters[i] + s->fits % 4 * quarters[i] / 4;
        size = s->round(s->user, rbi_max(size, s->least));
        if (count == 0 || size < timed[count - 1].count)
            timed[count++] = (struct timed){.count = size};
    }
    return count;
}

static rebatch_status choose_fastest(struct rbi_search *s)
{
    struct timed timed[RBI_TIMED_SIZES];
    const size_t count = choose_timed(timed, s);
    rebatch_status status = REBATCH_OK;
    double best = 0;
    for (size_t i = 0; i < count && !status && may_go_on(s); i++) {
        status = time_size(&timed[i], s);
        best = timed[i].rate > best ? timed[i].rate : best;
    }
    for (size_t i = 0; i < count && !status && best > 0; i++) {
        if (timed[i].rate < GOOD_ENOUGH * best)
            continue;
        s->report.size = timed[i].count; /* the last is the smallest */
        s->report.samples_per_second = timed[i].rate;
        s->report.measured_peak_bytes = timed[i].peak_bytes;
        s->report.predicted_peak_bytes = timed[i].foretold_bytes;
    }
    return status;
}

/* The size found may be another than the last that ran: where that left no room for the steps. */
static void settle_report(struct rbi_search *s)
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

void rbi_search_begin(struct rbi_search *s)
{
    s->fails = s->too_large ? s->too_large : SIZE_MAX;
    s->began_ns = s->now();
}

rebatch_status rbi_search_next(size_t *out, struct rbi_search *s)
{
    *out = s->report.microbatches == 0 ? s->least : 0;
    if (s->report.microbatches == 0 || s->fits == 0)
        return REBATCH_OK;
    const rebatch_status status = s->whole_count > 1 ? make_model(s) : REBATCH_OK;
    return status || !may_go_on(s) ? status : choose_next(out, s);
}

rebatch_status rbi_search_run(struct rbi_search *s)
{
    rbi_search_begin(s);
    rebatch_status status = try_size(s, s->least);
    if (!status && s->fits == 0)
        return REBATCH_E_EXHAUSTED;
    while (!status && may_go_on(s)) {
        size_t next;
        status = choose_next(&next, s);
        if (status || next == 0)
            break;
        status = try_size(s, next);
    }
    if (!status)
        status = finish(s);
    settle_report(s);
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
}
