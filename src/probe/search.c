/* Owns the search for the largest size: which one is run next, and what is believed.
 * Must not know how a trial runs. */
#include "probe/probe.h"

/* ---- trials ---- */

/* The two largest that ran stay, by size. */
static void keep_trace(struct rbi_search *s, const struct rbi_trace *trace)
{
    if (trace->count == s->high.count) {
        rbi_trace_release(&s->high);
    } else if (trace->count > s->high.count) {
        rbi_trace_release(&s->low);
        s->low = s->high;
    }
    s->high = *trace;
}

/* The largest that ran is always the last: a search only goes up from what fits. */
static void succeed(struct rbi_search *s, const struct rbi_trace *trace, uint64_t peak_bytes)
{
    const bool is_first = s->report.microbatches == 1;
    keep_trace(s, trace);
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

/* REBATCH_OK also after an OOM: s->fits says whether it ran. */
static rebatch_status try_size(struct rbi_search *s, size_t count)
{
    struct rbi_trace trace = {0};
    uint64_t peak_bytes = 0;
    s->report.trials += count != s->tried;
    s->report.microbatches++;
    s->tried = count;
    const rebatch_status status =
        s->trial(&trace, &peak_bytes, s->user, count, s->high.count ? &s->high : NULL);
    if (status == REBATCH_OK) {
        succeed(s, &trace, peak_bytes);
        return REBATCH_OK;
    }
    if (status != REBATCH_OOM) {
        rbi_trace_release(&trace);
        return status;
    }
    s->report.ooms++;
    s->fails = count;
    rbi_trace_release(&s->cut);
    s->cut = trace;
    return REBATCH_OK;
}

/* ---- prediction ---- */

static rebatch_status make_model(struct rbi_search *s)
{
    rbi_model_release(&s->model);
    const bool has_cut = s->cut.count > s->high.count;
    const rebatch_status status =
        s->low.count == 0 ? rbi_model_scale(&s->model, &s->high)
                          : rbi_model_make(&s->model, &s->low, &s->high, has_cut ? &s->cut : NULL);
    s->model.pool = s->setting.pool;
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

/* After the first trial. What was found before is the best guess; where it is the size that has
 * just run, only a larger one that fits for certain is better. A size in proportion to what there
 * is fits for certain; half of that is enough to tell fixed from growing parts. An odd distance,
 * so that sizes that were rounded up to a power of two are not taken for straight lines. */
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
    if (safe == s->most) {
        *out = s->most;
        return status;
    }
    const size_t half = safe / 2;
    *out = half > s->fits ? half - (half - s->fits + 1) % 2 : s->fits + 1;
    *out = allowed_near(s, *out);
    return status;
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
    return s->runs_of_fits >= (keeps_memory(&s->model) ? 2u : 1u);
}

/* The next size, or 0 when the largest that ran is the answer. */
static rebatch_status choose_next(size_t *out, struct rbi_search *s)
{
    *out = 0;
    s->foretold_bytes = 0;
    size_t predicted = 0;
    rebatch_status status = REBATCH_OK;
    if (s->fits < s->most && s->fits + 1 < s->fails) {
        status = s->low.count ? predict(&predicted, s) : choose_second(&predicted, s);
        predicted = allowed_below(s, predicted);
        /* Twice wrong means that the model does not hold; between what ran and what did not, the
         * middle is then the best guess. */
        if (s->report.ooms >= 2 && predicted)
            predicted = allowed_near(s, s->fits + (s->fails - s->fits) / 2);
    }
    if (status)
        return status;
    *out = predicted ? predicted : is_verified(s) ? 0 : s->fits;
    if (*out == 0 || s->low.count == 0)
        return REBATCH_OK;
    struct rbi_forecast forecast;
    status = rbi_replay(&forecast, &s->model, &s->setting, *out, 0);
    s->foretold_bytes = forecast.peak_bytes;
    return status;
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
    if (s->low.count == 0)
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

rebatch_status rbi_search_run(struct rbi_search *s)
{
    s->fails = SIZE_MAX;
    rebatch_status status = try_size(s, s->least);
    if (!status && s->fits == 0)
        return REBATCH_E_EXHAUSTED;
    while (!status && s->report.microbatches < s->max_trials) {
        size_t next;
        status = choose_next(&next, s);
        if (status || next == 0)
            break;
        status = try_size(s, next);
    }
    return status ? status : finish(s);
}

void rbi_search_release(struct rbi_search *s)
{
    rbi_trace_release(&s->low);
    rbi_trace_release(&s->high);
    rbi_trace_release(&s->cut);
    rbi_model_release(&s->model);
}
