/* Owns the dry runs that judge a size: the trial, the steps after the probe, and those of a new
 * session that begins with the size. Must not know where the sizes come from. */
#include "probe/dry_run.h"

#include "device/device.h"

/* ---- a course of micro-batches ---- */

/* What is done so that a size fits, each in addition to those before it. TRIM: the cache is
 * returned. RETRY: a micro-batch of a step that runs out of memory runs once more, as the fallback
 * does. SMALL: a smaller micro-batch runs after the trial, and before it. */
enum effort { AS_IS, TRIM, RETRY, SMALL_AFTER, SMALL_BEFORE };

struct course {
    struct rbi_dry dry;
    const struct rbi_setting *setting;
    const struct rbi_plan *plan;
    rebatch_pool_stats stats; /* after the trial */
    enum effort effort;
    bool admits;
};

/* An attempt begins with its memory where the session has admission. */
static rebatch_status admit(const struct course *course, size_t count)
{
    if (!course->admits || course->setting->admits_above >= count)
        return REBATCH_OK;
    return rbi_pool_admit(course->dry.pool, rbi_model_need(course->dry.model, count),
                          course->setting->stream);
}

/* What the first update allocates. */
static rebatch_status make_reserve(struct course *course)
{
    const struct rbi_setting *setting = course->setting;
    rebatch_pool *pool = course->dry.pool;
    rebatch_scope scope;
    void *made;
    rebatch_status status = rebatch_scope_begin(&scope, pool);
    for (size_t i = 0; i < setting->reserve_count && !status; i++)
        status = rebatch_pool_alloc(&made, pool, setting->reserve[i].bytes, setting->stream, 0);
    if (!status)
        return rebatch_scope_commit(pool, scope);
    const rebatch_status undone = rebatch_scope_rollback(pool, scope);
    return undone ? undone : status;
}

/* After an OOM once more without the cache, as the step's fallback does.
 *  @param count  0: the update */
static rebatch_status run_next(struct course *course, size_t count, bool may_fail)
{
    rebatch_status status = count ? admit(course, count) : REBATCH_OK;
    if (status)
        return status; /* admission refused it: no second try */
    status = count ? rbi_dry_run(&course->dry, count) : make_reserve(course);
    if (status != REBATCH_OOM || !may_fail || course->effort < RETRY)
        return status;
    status = rebatch_pool_trim(course->dry.pool, 0, NULL);
    if (status)
        return status;
    return count ? rbi_dry_run(&course->dry, count) : make_reserve(course);
}

/* The micro-batches of a step, as far as they differ: the first ones find other holes in the cache
 * than they leave, and the last may be smaller. */
#define ALIKE_MOST 4
static rebatch_status run_microbatches(struct course *course, bool may_fail)
{
    const size_t count = course->plan->count, batch = course->plan->batch;
    rbi_assert(count > 0 && batch > 0);
    const size_t whole = rbi_min(batch / count, ALIKE_MOST);
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < whole && !status; i++)
        status = run_next(course, count, may_fail);
    return status || batch % count == 0 ? status : run_next(course, batch % count, may_fail);
}

/* A step can be undone until its end: memory of before that it frees stays in use so long. */
static rebatch_status run_step(struct course *course, bool may_fail, bool has_reserve)
{
    rebatch_scope scope;
    rebatch_status status = rebatch_scope_begin(&scope, course->dry.pool);
    if (!status)
        status = run_microbatches(course, may_fail);
    if (!status && has_reserve)
        status = run_next(course, 0, true);
    return status ? status : rebatch_scope_commit(course->dry.pool, scope);
}

/* ---- in this session ---- */

static rebatch_status keep_latest(struct rbi_dry *dry)
{
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < dry->model->kept_count && !status; i++)
        status = rbi_dry_keep(dry, dry->model->kept[i].slot, dry->model->kept[i].address);
    return status;
}

/* After the probe: a step with the reserve free, the first update, another step. */
static rebatch_status run_training(struct course *course)
{
    const struct rbi_setting *setting = course->setting;
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < setting->reserve_count && !status; i++)
        status = rebatch_pool_free(course->dry.pool, setting->reserve[i].address);
    if (!status)
        status = run_step(course, true, true);
    return status ? status : run_step(course, true, false);
}

/* A step begins with what the smaller last micro-batch of the step before left. If a trial leaves
 * more than that, a smaller one runs after it. 0: the last micro-batch is no smaller. */
static size_t small_of(const struct rbi_setting *setting, const struct rbi_plan *plan)
{
    rbi_assert(plan->count > 0);
    const size_t rest = plan->batch % plan->count;
    if (rest == 0)
        return 0;
    const size_t small = rbi_max(rest, setting->least + 1); /* the first trial stays as it was */
    return small < plan->count ? small : 0;
}

static rebatch_status run_session(struct course *course)
{
    struct rbi_dry *dry = &course->dry;
    const struct rbi_plan *plan = course->plan;
    rebatch_status status = rbi_dry_open(dry, dry->model, course->setting->pool);
    if (!status)
        status = keep_latest(dry);
    if (!status && course->effort >= TRIM)
        status = rebatch_pool_trim(dry->pool, 0, NULL);
    if (!status && course->effort >= SMALL_BEFORE)
        status = rbi_dry_run(dry, small_of(course->setting, plan));
    if (!status)
        status = rbi_dry_hold_outside(dry, plan->count);
    if (!status && plan->has_trial && course->effort < RETRY && dry->model->outside.rise <= 0)
        status = rbi_pool_admit(dry->pool, rbi_model_need(dry->model, plan->count),
                                course->setting->stream);
    if (!status && plan->has_trial)
        status = rbi_dry_run(dry, plan->count);
    if (!status)
        status = rebatch_pool_get_stats(&course->stats, dry->pool);
    if (!status && course->effort >= SMALL_AFTER)
        status = rbi_dry_run(dry, small_of(course->setting, plan));
    return status || !plan->has_training ? status : run_training(course);
}

/* ---- in a session that begins with the size ---- */

/* The blocks that steps before the probe kept: its first trial freed them, in the order in which
 * each micro-batch frees what the one before kept. */
static rebatch_status keep_older(struct course *course)
{
    const struct rbi_model *model = course->dry.model;
    const struct rbi_trace *first = course->setting->first;
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0, k = 0; i < first->event_count && !status; i++) {
        if (first->events[i].kind != RBI_TRACE_FREE_OLDER)
            continue;
        while (k < model->event_count && model->events[k].kind != RBI_TRACE_FREE_PREVIOUS)
            k++;
        if (k == model->event_count)
            break;
        status = rbi_dry_keep(&course->dry, model->events[k++].slot, first->events[i].address);
    }
    return status;
}

/* Before it a step of the smallest size allocated what is allocated once, and the update its
 * memory. */
static rebatch_status run_fresh(struct course *course)
{
    struct rbi_dry *dry = &course->dry;
    rebatch_status status = rbi_dry_open(dry, dry->model, course->setting->fresh);
    if (!status)
        status = course->setting->has_stepped ? keep_older(course)
                                              : rbi_dry_run_first(dry, course->setting->first);
    if (!status)
        status = make_reserve(course);
    if (!status)
        status = rbi_dry_hold_outside(dry, course->plan->count);
    if (!status)
        status = run_step(course, true, false);
    return status ? status : run_step(course, false, false);
}

/* ---- judgement ---- */

/* SMALL needs further trials. */
static enum effort most_effort(const struct rbi_model *model, const struct rbi_setting *setting,
                               const struct rbi_plan *plan)
{
    if (setting->is_work)
        return TRIM;
    if (!model->keeps || !plan->has_training || small_of(setting, plan) == 0 ||
        setting->runs_left < plan->has_trial + 1U)
        return RETRY;
    return plan->has_trial && setting->runs_left > 2 ? SMALL_BEFORE : SMALL_AFTER;
}

static rebatch_status replay_session(struct rbi_forecast *out, const struct rbi_model *model,
                                     const struct rbi_setting *setting, const struct rbi_plan *plan)
{
    rebatch_status status = REBATCH_OOM;
    const enum effort most = most_effort(model, setting, plan);
    for (enum effort effort = AS_IS; effort <= most && status == REBATCH_OOM; effort++) {
        struct course course = {.setting = setting, .plan = plan, .effort = effort, .admits = true};
        course.dry.model = model;
        status = run_session(&course);
        rbi_dry_close(&course.dry);
        out->fits = status == REBATCH_OK;
        out->peak_bytes = course.stats.live_peak_bytes;
        out->reserved_bytes = course.stats.reserved_peak_bytes;
        out->failing_bytes = course.dry.failing_bytes;
        out->needs_trim = effort >= TRIM;
        out->is_admitted = effort < RETRY && model->outside.rise <= 0;
        out->after = effort >= SMALL_AFTER ? small_of(setting, plan) : 0;
        out->before = effort >= SMALL_BEFORE ? small_of(setting, plan) : 0;
    }
    return status == REBATCH_OOM ? REBATCH_OK : status;
}

static rebatch_status replay_fresh(bool *fits, const struct rbi_model *model,
                                   const struct rbi_setting *setting, const struct rbi_plan *plan)
{
    struct course course = {.setting = setting, .plan = plan, .effort = RETRY};
    course.dry.model = model;
    const rebatch_status status = run_fresh(&course);
    rbi_dry_close(&course.dry);
    *fits = status == REBATCH_OK;
    return status == REBATCH_OOM ? REBATCH_OK : status;
}

/* Without events fragmentation is unknown: this share of the memory stays free for it. */
#define PIECES_SHARE 32

static rebatch_status judge_peak(struct rbi_forecast *out, const struct rbi_model *model,
                                 const struct rbi_setting *setting, size_t count)
{
    const size_t need = rbi_line_at(&model->peak, count);
    size_t available, growth;
    rebatch_status status = rbi_live_beside(&out->peak_bytes, setting->pool);
    if (!status)
        status = rbi_pool_available_resident(&available, setting->pool);
    if (!status)
        status = rbi_outside_growth(&growth, model, setting->pool, count);
    if (status)
        return status;
    available -= rbi_min(available, growth);
    out->peak_bytes += need;
    out->failing_bytes = need;
    out->reserved_bytes = out->peak_bytes;
    out->fits = need <= available - available / PIECES_SHARE;
    return REBATCH_OK;
}

rebatch_status rbi_forecast_run(struct rbi_forecast *out, const struct rbi_model *model,
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

/* The largest size whose bytes fit, fragmentation aside: where the search begins, as this needs no
 * dry run. */
static rebatch_status guess_largest(size_t *out, const struct rbi_model *model,
                                    const struct rbi_setting *setting, size_t least, size_t most)
{
    size_t available;
    const rebatch_status status = rbi_pool_available_resident(&available, setting->pool);
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

rebatch_status rbi_forecast_largest(size_t *out, const struct rbi_model *model,
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
        status = rbi_forecast_run(&forecast, model, setting,
                                  &(struct rbi_plan){count, true, true, batch});
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
