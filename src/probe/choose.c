/* Owns which size a search runs next.
 * Must not know how a trial runs. */
#include "probe/probe.h"

static rebatch_status predict(size_t *out, struct rbi_search *s)
{
    *out = 0;
    rbi_assert(s->fits < s->fails);
    rebatch_status status = rbi_search_model(s);
    if (!status)
        status = rbi_forecast_largest(out, &s->model, &s->setting, s->fits + 1,
                                      rbi_min(s->most, s->fails - 1), s->batch);
    return status;
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
    *out = safe == s->most
               ? safe
               : rbi_search_allowed_near(s, tell_apart(rbi_max(safe, s->fits + 1), s->fits));
    return status;
}

/* One more than a power of two begins a tile anew, whatever power of two the tile is: what is in
 * tiles is seen there, up to two thirds of the way. */
static size_t above_tiles(size_t predicted)
{
    size_t power = 1;
    while (2 * power + 1 <= predicted - predicted / 3)
        power *= 2;
    return power + 1;
}

/* What is not certain is not believed so much further than what ran. */
#define FAR 4
#define FAR_ROUGH 2
#define LEAST_TELLING 5
static size_t not_too_far(const struct rbi_search *s, size_t predicted)
{
    rbi_assert(s->whole_count > 0);
    const size_t ran = s->whole[s->whole_count - 1].count;
    if (s->whole_count != 2 || !s->model.is_rough || predicted / FAR < ran)
        return predicted;
    const size_t telling = above_tiles(predicted);
    return rbi_search_allowed_near(s, telling >= LEAST_TELLING && telling > s->fits + 1
                                          ? telling
                                          : tell_apart(predicted / FAR_ROUGH, s->fits));
}

/* Wrong once: where the model is not certain it was wrong by more than the last sample. Twice: it
 * does not hold, and between what ran and what did not the middle is the best guess. */
static size_t after_oom(const struct rbi_search *s, size_t predicted)
{
    rbi_assert(s->fits < s->fails);
    const size_t gap = s->fails - s->fits;
    if (s->whole_count == 1) /* a second size tells more than the first again */
        return rbi_search_allowed_near(s,
                                       tell_apart(rbi_min(predicted, s->fits + gap / 2), s->fits));
    if (s->report.ooms >= 2)
        return rbi_search_allowed_near(s, s->fits + gap / 2);
    return s->whole_count == 2 && s->model.is_rough
               ? rbi_search_allowed_near(s, rbi_min(predicted, s->fails - 1 - gap / 8))
               : predicted;
}

/* Whether the largest that ran has shown that it also runs in a step. Where a micro-batch frees
 * what the one before has left, and steps have several of the size, it must have followed one. */
static bool is_verified(const struct rbi_search *s)
{
    rbi_assert(s->fits > 0);
    const bool follows_own = s->batch / s->fits > 1 || s->batch % s->fits == 0;
    if (s->fits >= s->batch && (s->runs_of_fits > 0 || s->setting.piece_count == 0))
        return true; /* a step has only this one */
    const bool is_exact = s->report.confidence == REBATCH_CONFIDENCE_EXACT;
    return s->runs_of_fits >= (s->model.keeps && follows_own && !is_exact ? 2u : 1u);
}

/* One that ran may yet leave no room for the steps: where the memory of the first update lies, or
 * what a micro-batch leaves to the next, then is in the way. The largest that leaves it is next;
 * where nothing can be run any more it is believed, as a larger one has run. */
rebatch_status rbi_search_judge(struct rbi_search *s)
{
    struct rbi_forecast steps;
    rebatch_status status =
        rbi_search_forecast(&steps, s, &(struct rbi_plan){s->fits, false, true, s->batch});
    if (status || steps.fits || s->fits == s->least)
        return status;
    s->fails = s->fits;
    s->runs_of_fits = 0;
    size_t below = s->least;
    for (size_t i = 0; i < s->whole_count; i++)
        if (s->whole[i].count < s->fails)
            below = s->whole[i].count;
    s->fits = below;
    if (rbi_search_may_go_on(s))
        return status;
    size_t size;
    status =
        rbi_forecast_largest(&size, &s->model, &s->setting, s->fits + 1, s->fails - 1, s->batch);
    size = s->round(s->user, size);
    if (size > s->fits)
        s->fits = size;
    return status;
}

/* Readies the pool for a size, and says what it will need. */
rebatch_status rbi_search_prepare(struct rbi_search *s, size_t count)
{
    struct rbi_forecast trial;
    s->predicted_bytes = 0;
    rebatch_status status =
        rbi_search_forecast(&trial, s, &(struct rbi_plan){.count = count, .has_trial = true});
    if (status)
        return status;
    s->predicted_bytes = trial.peak_bytes; /* 0: not known yet */
    /* What others take more than they have must not find it in the cache: while they make it anew
     * it needs room beside what it was. */
    const bool is_outside_growing = s->whole_count > 1 && s->model.outside.rise > 0;
    if (s->whole_count > 1 && (trial.needs_trim || is_outside_growing))
        status = rebatch_pool_trim(s->setting.pool, 0, NULL);
    if (status || !trial.is_admitted || !s->is_model_made)
        return status;
    /* At once, in a few large chunks: what is missing then is made as it is asked for. */
    status = rbi_pool_admit(s->setting.pool, rbi_model_need(&s->model, count), s->setting.stream);
    return status == REBATCH_OOM ? REBATCH_OK : status;
}

/* Where a size fits only after a smaller one than ran last, that one is next. */
static rebatch_status begin_small(size_t *size, struct rbi_search *s)
{
    struct rbi_forecast whole;
    const rebatch_status status =
        rbi_search_forecast(&whole, s, &(struct rbi_plan){*size, true, true, s->batch});
    if (!status && whole.before)
        *size = s->round_up(s->user, whole.before);
    return status;
}

static size_t microbatches_of(size_t samples, size_t size)
{
    rbi_assert(samples > 0 && size > 0);
    return (samples - 1) / size + 1;
}

/* A size that is to run for the first time, or what is enough of it; 0: what ran is, as no more
 * micro-batches than these are saved. Another one costs little beside taking memory. */
#define FEW 2
static size_t enough_of(const struct rbi_search *s, size_t size)
{
    if (s->left == 0 || size == 0)
        return size;
    const size_t microbatches = microbatches_of(s->left, size);
    if (s->whole_count > 1 && microbatches_of(s->left, s->fits) <= microbatches + FEW)
        return 0;
    const size_t even = s->round_up(s->user, microbatches_of(s->left, microbatches));
    return even > s->fits ? rbi_min(even, size) : 0;
}

/* The next size, or 0 when the largest that ran is the answer. */
rebatch_status rbi_search_next(size_t *out, struct rbi_search *s)
{
    *out = 0;
    size_t predicted = 0;
    bool is_weighed = false;
    rebatch_status status = rbi_search_judge(s);
    if (!status && s->fits < s->most && s->fits + 1 < s->fails) {
        status = s->whole_count > 1 ? predict(&predicted, s) : choose_second(&predicted, s);
        predicted = rbi_search_allowed(s, predicted);
        if (!status && s->whole_count > 1)
            status = rbi_search_weigh(&predicted, &is_weighed, s);
        if (!status && predicted)
            predicted = not_too_far(s, predicted);
        if (!status && predicted && s->report.ooms && !is_weighed)
            predicted = after_oom(s, predicted);
    }
    if (status)
        return status;
    *out = predicted ? enough_of(s, predicted) : is_verified(s) ? 0 : s->fits;
    return *out && s->model.keeps && !s->setting.is_work ? begin_small(out, s) : REBATCH_OK;
}
