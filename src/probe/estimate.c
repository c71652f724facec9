/* Owns what a search knows of sizes: its model of what was seen, and which sizes are allowed. Must
 * not know which size runs next. */
#include "probe/probe.h"

/* ---- the model of what was seen ---- */

struct rbi_trace *rbi_search_latest(struct rbi_search *s)
{
    for (size_t i = 0; i < s->whole_count; i++)
        if (s->whole[i].count == s->latest)
            return &s->whole[i];
    return NULL;
}

static rebatch_status make_model(struct rbi_model *out, struct rbi_search *s)
{
    struct rbi_traces traces = {
        .count = s->whole_count, .latest = rbi_search_latest(s), .cut = &s->cut};
    rbi_assert(traces.count > 0 && traces.latest);
    for (size_t i = 0; i < s->whole_count; i++)
        traces.whole[i] = &s->whole[i];
    const rebatch_status status = rbi_model_make(out, &traces);
    out->pool = s->setting.pool;
    return status;
}

rebatch_status rbi_search_model(struct rbi_search *s)
{
    if (s->is_model_made)
        return REBATCH_OK;
    rbi_model_release(&s->model);
    const rebatch_status status = make_model(&s->model, s);
    s->setting.first =
        s->whole_count && s->whole[0].count == s->least && s->is_first_kept ? &s->whole[0] : NULL;
    s->is_model_made = status == REBATCH_OK;
    s->setting.least = s->least;
    s->setting.runs_left = s->max_trials - rbi_min(s->max_trials, s->report.microbatches);
    return status;
}

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
    const size_t allowed = s->round(s->limits, size);
    return allowed > s->fits ? allowed : 0;
}

size_t rbi_search_allowed_near(const struct rbi_search *s, size_t size)
{
    const size_t below = rbi_search_allowed(s, size), next = s->round_up(s->limits, s->fits + 1);
    return below ? below : next < s->fails && next <= s->most ? next : 0;
}

size_t rbi_search_ran_below(const struct rbi_search *s, size_t count)
{
    size_t below = 0;
    for (size_t i = 0; i < s->whole_count && s->whole[i].count < count; i++)
        below = s->whole[i].count;
    return below;
}
