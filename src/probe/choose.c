/* Owns which size a search runs next: the rules are a table in docs/probe.md, "How sizes are
 * fitted". Must not know how a trial runs. */
#include "probe/probe.h"

/* The largest size of at most `most` that is above what ran and fits by the model; 0: none. */
static rebatch_status predict(size_t *out, struct rbi_search *s, size_t most)
{
    *out = 0;
    const rebatch_status status = rbi_search_model(s);
    if (status)
        return status;
    return rbi_forecast_largest(out, &s->model, &s->setting, s->fits + 1, most, s->batch);
}

/* Rounding to powers of two shows only at sizes that are not multiples of them: the next size is at
 * an odd distance from the last, and no multiple of four. */
static size_t tell_apart(size_t count, size_t before)
{
    while (count > before + 1 && ((count - before) % 2 == 0 || count % 4 == 0))
        count--;
    return count;
}

/* After the first trial: the saved size if there is one, else the largest that fits if every
 * allocation is proportional, which is safe. If the saved size has just run, only a larger safe
 * size is tried. */
static rebatch_status choose_second(size_t *out, struct rbi_search *s)
{
    size_t safe;
    const rebatch_status status = predict(&safe, s, rbi_min(s->most, s->fails - 1));
    *out = 0;
    if (s->hint > s->fits && s->hint < s->fails) {
        *out = s->hint;
        return status;
    }
    if (s->hint == s->fits && safe == 0)
        return status;
    *out = safe == s->most
               ? safe
               : rbi_search_allowed_near(s, tell_apart(rbi_max(safe, s->fits + 1), s->fits));
    return status;
}

/* With two sizes and a rough model, a prediction of more than FAR times the larger size is not
 * tried, but half of it. */
#define FAR 4
static size_t not_too_far(const struct rbi_search *s, size_t predicted)
{
    rbi_assert(s->whole_count > 0);
    const size_t ran = s->whole[s->whole_count - 1].count;
    return s->whole_count != 2 || !s->model.is_rough || predicted / FAR < ran
               ? predicted
               : rbi_search_allowed_near(s, tell_apart(predicted / 2, s->fits));
}

/* Whether the largest size has run as it will in a step. If a micro-batch frees what the one before
 * left, and a step has several of this size, it must have run behind one of its own size. */
static bool is_verified(const struct rbi_search *s)
{
    rbi_assert(s->fits > 0);
    const bool follows_own = s->batch / s->fits > 1 || s->batch % s->fits == 0;
    if (s->fits >= s->batch && (s->runs_of_fits > 0 || s->setting.reserve_count == 0))
        return true; /* a step has only this one */
    const bool is_exact = s->report.confidence == REBATCH_CONFIDENCE_EXACT;
    return s->runs_of_fits >= (s->model.keeps && follows_own && !is_exact ? 2u : 1u);
}

/* Whether the largest size that ran also leaves room for whole steps: the memory of the first
 * update, or what a micro-batch leaves to the next, may be in the way. If not, the answer is below.
 * When no trial is left, the model is believed there, as a larger size has run. */
static rebatch_status judge_once(struct rbi_search *s)
{
    struct rbi_forecast steps;
    rebatch_status status =
        rbi_search_forecast(&steps, s, &(struct rbi_plan){s->fits, false, true, s->batch});
    if (status || steps.fits || s->fits == s->least)
        return status;
    s->fails = s->fits;
    s->runs_of_fits = 0;
    s->fits = rbi_max(rbi_search_ran_below(s, s->fails), s->least);
    if (rbi_search_may_go_on(s))
        return status;
    size_t size;
    status = predict(&size, s, s->fails - 1);
    s->fits = rbi_max(s->fits, s->round(s->limits, size));
    return status;
}

/* Memory may have changed since a size ran, so all sizes that ran are judged. */
static rebatch_status judge(struct rbi_search *s)
{
    rebatch_status status = REBATCH_OK;
    for (size_t fits = 0; fits != s->fits && !status;) {
        fits = s->fits;
        status = judge_once(s);
    }
    return status;
}

rebatch_status rbi_search_prepare(struct rbi_search *s, size_t count)
{
    struct rbi_forecast trial;
    s->predicted_bytes = 0;
    rebatch_status status =
        rbi_search_forecast(&trial, s, &(struct rbi_plan){.count = count, .has_trial = true});
    if (status)
        return status;
    s->predicted_bytes = trial.peak_bytes; /* 0: not known yet */
    /* Memory outside the pool that grows needs room for the old and the new allocation, which the
     * cache may hold. */
    const bool is_outside_growing = s->whole_count > 1 && s->model.outside.rise > 0;
    if (s->whole_count > 1 && (trial.needs_trim || is_outside_growing))
        status = rebatch_pool_trim(s->setting.pool, 0, NULL);
    if (status || !trial.is_admitted || !s->is_model_made)
        return status;
    /* Taken at once it is in a few large chunks. What cannot be had then is taken on request. */
    status = rbi_pool_admit(s->setting.pool, rbi_model_need(&s->model, count), s->setting.stream);
    return status == REBATCH_OOM ? REBATCH_OK : status;
}

/* If the size fits only after a smaller one, the smaller one is next. */
static rebatch_status begin_small(size_t *size, struct rbi_search *s)
{
    struct rbi_forecast whole;
    const rebatch_status status =
        rbi_search_forecast(&whole, s, &(struct rbi_plan){*size, true, true, s->batch});
    if (!status && whole.before)
        *size = s->round_up(s->limits, whole.before);
    return status;
}

static size_t microbatches_of(size_t samples, size_t size)
{
    rbi_assert(samples > 0 && size > 0);
    return (samples - 1) / size + 1;
}

/* The smallest size that needs as few micro-batches for the samples that are left; 0: the largest
 * that ran needs at most FEW more, which costs less than taking memory for another size. */
#define FEW 2
static size_t enough_of(const struct rbi_search *s, size_t size)
{
    if (s->left == 0 || size == 0)
        return size;
    const size_t microbatches = microbatches_of(s->left, size);
    if (s->whole_count > 1 && microbatches_of(s->left, s->fits) <= microbatches + FEW)
        return 0;
    const size_t even = s->round_up(s->limits, microbatches_of(s->left, microbatches));
    return even > s->fits ? rbi_min(even, size) : 0;
}

/* Above what ran and below what failed; 0: none. */
static rebatch_status choose_larger(size_t *out, struct rbi_search *s)
{
    rebatch_status status = s->whole_count > 1 ? predict(out, s, rbi_min(s->most, s->fails - 1))
                                               : choose_second(out, s);
    *out = rbi_search_allowed(s, *out);
    if (!status && *out)
        *out = not_too_far(s, *out);
    /* There is no model yet, or a second OOM says that it is wrong: the middle. */
    if (!status && *out && s->report.ooms > (s->whole_count > 1))
        *out = rbi_search_allowed_near(s, rbi_min(*out, s->fits + (s->fails - s->fits) / 2));
    return status;
}

rebatch_status rbi_search_next(size_t *out, struct rbi_search *s)
{
    size_t larger = 0;
    *out = s->report.microbatches == 0 ? s->least : 0;
    if (s->report.microbatches == 0 || s->fits == 0)
        return REBATCH_OK;
    rebatch_status status = judge(s);
    if (status || !rbi_search_may_go_on(s))
        return status;
    if (s->fits < s->most && s->fits + 1 < s->fails)
        status = choose_larger(&larger, s);
    if (status)
        return status;
    *out = larger ? enough_of(s, larger) : is_verified(s) ? 0 : s->fits;
    return *out && s->model.keeps && !s->setting.is_work ? begin_small(out, s) : REBATCH_OK;
}
