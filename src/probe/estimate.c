/* Owns what a search knows of sizes: the model of what was seen, and which sizes may be tried.
 * Must not know how a trial runs, or which size is next. */
#include "probe/probe.h"

struct rbi_trace *rbi_search_latest(struct rbi_search *s)
{
    for (size_t i = 0; i < s->whole_count; i++)
        if (s->whole[i].count == s->latest)
            return &s->whole[i];
    return NULL;
}

/* ---- the model ---- */

static struct rbi_traces traces_of(struct rbi_search *s)
{
    struct rbi_traces traces = {
        .count = s->whole_count, .latest = rbi_search_latest(s), .cut = &s->cut};
    for (size_t i = 0; i < s->whole_count; i++)
        traces.whole[i] = &s->whole[i];
    return traces;
}

rebatch_status rbi_search_make(struct rbi_model *out, struct rbi_search *s)
{
    const struct rbi_traces traces = traces_of(s);
    rbi_assert(traces.count > 0 && traces.latest);
    const rebatch_status status = rbi_model_make(out, &traces);
    out->pool = s->setting.pool;
    return status;
}

/* Of all that was seen up to now. */
rebatch_status rbi_search_model(struct rbi_search *s)
{
    if (s->is_model_made)
        return REBATCH_OK;
    rbi_model_release(&s->model);
    const rebatch_status status = rbi_search_make(&s->model, s);
    s->setting.first =
        s->whole_count && s->whole[0].count == s->least && s->is_first_kept ? &s->whole[0] : NULL;
    s->is_model_made = status == REBATCH_OK;
    s->setting.least = s->least;
    s->setting.runs_left = s->max_trials - rbi_min(s->max_trials, s->report.microbatches);
    return status;
}

/* What a size does now, as far as that is known. */
rebatch_status rbi_search_forecast(struct rbi_forecast *out, struct rbi_search *s,
                                   const struct rbi_plan *plan)
{
    *out = (struct rbi_forecast){.fits = true, .is_admitted = true};
    if (s->whole_count < 2)
        return REBATCH_OK;
    const rebatch_status status = rbi_search_model(s);
    return status ? status : rbi_forecast_run(out, &s->model, &s->setting, plan);
}

/* ---- sizes ---- */

bool rbi_search_may_go_on(const struct rbi_search *s)
{
    return s->report.microbatches < s->max_trials &&
           (s->max_ns == 0 || s->now() - s->began_ns < s->max_ns);
}

size_t rbi_search_allowed(const struct rbi_search *s, size_t size)
{
    const size_t allowed = s->round(s->user, size);
    return allowed > s->fits ? allowed : 0;
}

size_t rbi_search_allowed_near(const struct rbi_search *s, size_t size)
{
    const size_t below = rbi_search_allowed(s, size);
    const size_t next = s->round_up(s->user, s->fits + 1);
    return below ? below : next < s->fails && next <= s->most ? next : 0;
}
