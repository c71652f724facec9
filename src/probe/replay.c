/* Owns what is run dry to judge a size: the trial, the steps after the probe, and those of a
 * session that begins anew with it. Must not know where the sizes come from. */
#include "probe/dry.h"

#include "device/device.h"

/* ---- a course of micro-batches ---- */

struct course {
    struct rbi_dry dry;
    const struct rbi_setting *setting;
    const struct rbi_plan *plan;
    rebatch_pool_stats stats; /* after the trial */
    bool begins_trimmed, has_retries, admits;
};

/* As a step's attempt begins: with its memory, where the session sees to that. */
static rebatch_status admit(const struct course *course, size_t count)
{
    if (!course->admits || course->setting->admits_above >= count)
        return REBATCH_OK;
    return rbi_pool_admit(course->dry.pool, rbi_model_need(course->dry.model, count),
                          course->setting->stream);
}

/* What the first update makes. */
static rebatch_status make_pieces(struct course *course)
{
    const struct rbi_setting *setting = course->setting;
    rebatch_pool *pool = course->dry.pool;
    rebatch_scope scope;
    void *made;
    rebatch_status status = rebatch_scope_begin(&scope, pool);
    for (size_t i = 0; i < setting->piece_count && !status; i++)
        status = rebatch_pool_alloc(&made, pool, setting->pieces[i].bytes, setting->stream, 0);
    if (!status)
        return rebatch_scope_commit(pool, scope);
    const rebatch_status undone = rebatch_scope_rollback(pool, scope);
    return undone ? undone : status;
}

/* An OOM is answered as the step's ladder does it: once, with the cache given back.
 *  @param count  0: the update */
static rebatch_status run_next(struct course *course, size_t count, bool may_fail)
{
    rebatch_status status = count ? admit(course, count) : REBATCH_OK;
    if (status)
        return status; /* what is refused is not tried again */
    status = count ? rbi_dry_run(&course->dry, count) : make_pieces(course);
    if (status != REBATCH_OOM || !may_fail || !course->has_retries)
        return status;
    status = rebatch_pool_trim(course->dry.pool, 0, NULL);
    if (!status && count)
        status = admit(course, count);
    if (status)
        return status;
    return count ? rbi_dry_run(&course->dry, count) : make_pieces(course);
}

/* The micro-batches of a step, as far as they differ: one leaves other pieces to the next than it
 * has found, and the last may be smaller. */
static rebatch_status run_step(struct course *course, bool may_fail)
{
    const size_t count = course->plan->count, batch = course->plan->batch;
    const size_t sizes[] = {count, batch / count > 1 ? count : 0, batch % count};
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes && !status; i++)
        if (sizes[i])
            status = run_next(course, sizes[i], may_fail);
    return status;
}

/* ---- in this session ---- */

static rebatch_status keep_latest(struct rbi_dry *dry)
{
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < dry->model->kept_count && !status; i++)
        status = rbi_dry_keep(dry, dry->model->kept[i].slot, dry->model->kept[i].address);
    return status;
}

/* What comes after the probe: a step, in which the memory that the first update takes is free, that
 * update, and a step after it. */
static rebatch_status run_training(struct course *course)
{
    const struct rbi_setting *setting = course->setting;
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < setting->piece_count && !status; i++)
        status = rebatch_pool_free(course->dry.pool, setting->pieces[i].address);
    if (!status)
        status = run_step(course, true);
    if (!status)
        status = run_next(course, 0, true);
    return status ? status : run_step(course, true);
}

static rebatch_status run_session(struct course *course)
{
    struct rbi_dry *dry = &course->dry;
    const struct rbi_plan *plan = course->plan;
    rebatch_status status = rbi_dry_open(dry, dry->model, course->setting->pool);
    if (!status)
        status = keep_latest(dry);
    if (!status && course->begins_trimmed)
        status = rebatch_pool_trim(dry->pool, 0, NULL);
    if (!status)
        status = rbi_dry_hold_outside(dry, plan->count);
    if (!status && plan->has_trial)
        status = rbi_pool_expect(dry->pool, rbi_model_need(dry->model, plan->count),
                                 course->setting->stream);
    if (!status && plan->has_trial)
        status = rbi_dry_run(dry, plan->count);
    if (!status)
        status = rebatch_pool_get_stats(&course->stats, dry->pool);
    return status || !plan->has_training ? status : run_training(course);
}

/* ---- in a session that begins with the size ---- */

/* Where steps have come before, the first trial adds only what it frees of what they have kept. */
static bool needs_first(const struct rbi_setting *setting)
{
    const struct rbi_trace *first = setting->first;
    for (size_t i = 0; i < first->event_count && setting->has_stepped; i++)
        if (first->events[i].kind == RBI_TRACE_FREE_OLDER)
            return true;
    return !setting->has_stepped;
}

/* A step of the smallest size has made what is made once, and the update its memory. */
static rebatch_status run_fresh(struct course *course)
{
    struct rbi_dry *dry = &course->dry;
    rebatch_status status = rbi_dry_open(dry, dry->model, course->setting->fresh);
    if (!status && needs_first(course->setting))
        status = rbi_dry_run_first(dry, course->setting->first);
    if (!status)
        status = make_pieces(course);
    if (!status)
        status = rbi_dry_hold_outside(dry, course->plan->count);
    if (!status)
        status = run_step(course, true);
    return status ? status : run_step(course, false);
}

/* ---- judgement ---- */

/* As the cache is; where it is in pieces that this size has no use for, after it was given back;
 * and where the session's ladder has to do that once more on the way. */
static rebatch_status replay_session(struct rbi_forecast *out, const struct rbi_model *model,
                                     const struct rbi_setting *setting, const struct rbi_plan *plan)
{
    rebatch_status status = REBATCH_OOM;
    for (int way = 0; way < (setting->is_work ? 2 : 3) && status == REBATCH_OOM; way++) {
        struct course course = {.setting = setting,
                                .plan = plan,
                                .begins_trimmed = way > 0,
                                .has_retries = way > 1,
                                .admits = true};
        course.dry.model = model;
        status = run_session(&course);
        rbi_dry_close(&course.dry);
        out->fits = status == REBATCH_OK;
        out->peak_bytes = course.stats.live_peak_bytes;
        out->reserved_bytes = course.stats.reserved_peak_bytes;
        out->failing_bytes = course.dry.failing_bytes;
        out->needs_trim = way > 0;
    }
    return status == REBATCH_OOM ? REBATCH_OK : status;
}

static rebatch_status replay_fresh(bool *fits, const struct rbi_model *model,
                                   const struct rbi_setting *setting, const struct rbi_plan *plan)
{
    struct course course = {.setting = setting, .plan = plan, .has_retries = true};
    course.dry.model = model;
    const rebatch_status status = run_fresh(&course);
    rbi_dry_close(&course.dry);
    *fits = status == REBATCH_OK;
    return status == REBATCH_OOM ? REBATCH_OK : status;
}

/* Only the peak is known as a whole, and not how its pieces lie: this share of the room is left
 * for what does not fit together. */
#define PIECES_SHARE 32

static rebatch_status judge_peak(struct rbi_forecast *out, const struct rbi_model *model,
                                 const struct rbi_setting *setting, size_t count)
{
    const size_t need = rbi_line_at(&model->peak, count);
    rebatch_pool_stats stats;
    size_t available, growth;
    rebatch_status status = rebatch_pool_get_stats(&stats, setting->pool);
    if (!status)
        status = rebatch_pool_available(&available, setting->pool);
    if (!status)
        status = rbi_outside_growth(&growth, model, setting->pool, count);
    if (status)
        return status;
    available -= rbi_min(available, growth);
    out->peak_bytes = stats.live_bytes + need;
    out->failing_bytes = need;
    out->reserved_bytes = out->peak_bytes;
    out->fits = need <= available - available / PIECES_SHARE;
    return REBATCH_OK;
}

rebatch_status rbi_replay(struct rbi_forecast *out, const struct rbi_model *model,
                          const struct rbi_setting *setting, const struct rbi_plan *plan)
{
    *out = (struct rbi_forecast){0};
    if (!model->has_events)
        return judge_peak(out, model, setting, plan->count);
    const rebatch_status status = replay_session(out, model, setting, plan);
    if (status || !out->fits || !plan->has_training || !setting->fresh || !setting->first)
        return status;
    return replay_fresh(&out->fits, model, setting, plan);
}

/* The largest size whose bytes alone, in pieces or not, would find room: a place to begin at, as it
 * takes no dry run. */
static rebatch_status guess_largest(size_t *out, const struct rbi_model *model,
                                    const struct rbi_setting *setting, size_t least, size_t most)
{
    size_t available;
    const rebatch_status status = rebatch_pool_available(&available, setting->pool);
    while (least < most && !status) {
        const size_t middle = least + (most - least + 1) / 2;
        if (rbi_model_need(model, middle) <= available)
            least = middle;
        else
            most = middle - 1;
    }
    *out = least;
    return status;
}

rebatch_status rbi_replay_largest(size_t *out, const struct rbi_model *model,
                                  const struct rbi_setting *setting, size_t least, size_t most,
                                  size_t batch)
{
    *out = 0;
    if (least > most)
        return REBATCH_OK;
    /* fits < least means: none found yet; everything above `most` is known not to fit. From the
     * guess on steps double, up or down, until there is one of either kind. */
    size_t fits = least - 1, fails = most + 1, step = 1, count;
    rebatch_status status = guess_largest(&count, model, setting, least, most);
    while (!status) {
        struct rbi_forecast forecast;
        status =
            rbi_replay(&forecast, model, setting, &(struct rbi_plan){count, true, true, batch});
        if (status)
            break;
        if (forecast.fits)
            fits = count;
        else
            fails = count;
        if (fits + 1 >= fails)
            break;
        const size_t middle = fits + (fails - fits) / 2;
        count = fails > most   ? rbi_min(fits + step, most)
                : fits < least ? rbi_max(fails - rbi_min(step, fails - least), least)
                               : middle;
        step = step > SIZE_MAX / 2 ? step : 2 * step;
    }
    if (!status && fits >= least)
        *out = fits;
    return status;
}
