/* Owns the dry run: a size's calls on a pool like the live one, with nothing behind it.
 * Must not know where the sizes come from. */
#include "probe/probe.h"

#include "device/device.h"

/* ---- a dry pool like the live one ---- */

struct dry {
    rebatch_device *device;
    rebatch_pool *pool;
    void **blocks; /* of the micro-batch that runs */
    void **kept;   /* of the one before: what it left */
    size_t *sizes; /* for rbi_model_need() */
};

static void close_dry(struct dry *dry)
{
    rebatch_pool_destroy(dry->pool);
    rebatch_device_close(dry->device);
    rbi_heap_free(dry->blocks);
    rbi_heap_free(dry->kept);
    rbi_heap_free(dry->sizes);
}

/* A copy of the pool has everything at the same addresses, so what the last micro-batch has kept is
 * known by them. */
static rebatch_status open_dry(struct dry *dry, const struct rbi_model *model,
                               const struct rbi_setting *setting)
{
    *dry = (struct dry){0};
    dry->blocks = rbi_heap_calloc((size_t)model->blocks + 1, sizeof *dry->blocks);
    dry->kept = rbi_heap_calloc((size_t)model->blocks + 1, sizeof *dry->kept);
    dry->sizes = rbi_heap_calloc((size_t)model->blocks + 1, sizeof *dry->sizes);
    if (!dry->blocks || !dry->kept || !dry->sizes)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a dry run");
    const rebatch_status status = rbi_pool_clone(&dry->pool, &dry->device, setting->pool);
    for (size_t i = 0; i < model->event_count && !status; i++)
        if (model->events[i].kind == RBI_TRACE_ALLOC)
            dry->kept[model->events[i].block] = model->events[i].kept_at;
    return status ? status : rebatch_pool_reset_peaks(dry->pool);
}

/* ---- the dry run ---- */

static rebatch_status run_event(struct dry *dry, const struct rbi_model_event *event, size_t count)
{
    void *block;
    switch (event->kind) {
    case RBI_TRACE_ALLOC:
        return rebatch_pool_alloc(&dry->blocks[event->block], dry->pool,
                                  rbi_line_at(&event->line, count), event->stream, 0);
    case RBI_TRACE_RESERVE:
        return rebatch_pool_reserve(dry->pool, rbi_line_at(&event->line, count), event->stream);
    case RBI_TRACE_FREE:
        block = dry->blocks[event->block];
        dry->blocks[event->block] = NULL;
        return rebatch_pool_free(dry->pool, block);
    case RBI_TRACE_FREE_PREVIOUS:
        block = dry->kept[event->block];
        dry->kept[event->block] = NULL;
        return rebatch_pool_free(dry->pool, block);
    default:
        return REBATCH_OK;
    }
}

static rebatch_status run_microbatch(struct rbi_forecast *out, struct dry *dry,
                                     const struct rbi_model *model, size_t count)
{
    rebatch_scope scope;
    rebatch_status status = rebatch_scope_begin(&scope, dry->pool);
    for (size_t i = 0; i < model->event_count && !status; i++) {
        const struct rbi_model_event *event = &model->events[i];
        status = run_event(dry, event, count);
        if (status == REBATCH_OOM) {
            out->failing_event = i;
            out->failing_bytes = rbi_line_at(&event->line, count);
        }
    }
    if (status)
        return status;
    void **blocks = dry->blocks; /* freed ones are NULL there */
    dry->blocks = dry->kept;
    dry->kept = blocks;
    return rebatch_scope_commit(dry->pool, scope);
}

/* As a step's attempt begins: with its memory, where the session sees to that. */
static rebatch_status run_attempt(struct rbi_forecast *out, struct dry *dry,
                                  const struct rbi_model *model, const struct rbi_setting *setting,
                                  size_t count)
{
    rebatch_status status = REBATCH_OK;
    if (setting->admits_above < count)
        status =
            rbi_pool_admit(dry->pool, rbi_model_need(model, count, dry->sizes), setting->stream);
    return status ? status : run_microbatch(out, dry, model, count);
}

/* The micro-batches of a step, as far as they differ: one leaves other pieces to the next than it
 * has found, and the last may be smaller. */
static rebatch_status run_step(struct rbi_forecast *out, struct dry *dry,
                               const struct rbi_model *model, const struct rbi_setting *setting,
                               size_t count, size_t batch)
{
    const size_t sizes[] = {count, batch / count > 1 ? count : 0, batch % count};
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes && !status; i++)
        if (sizes[i])
            status = run_attempt(out, dry, model, setting, sizes[i]);
    return status;
}

/* What comes after the probe: a step, in which the memory that the first update takes is still
 * free, that update, and a step after it. */
static rebatch_status run_training(struct rbi_forecast *out, struct dry *dry,
                                   const struct rbi_model *model, const struct rbi_setting *setting,
                                   size_t count, size_t batch)
{
    void *made;
    rebatch_status status = rebatch_pool_free(dry->pool, setting->reserve);
    if (!status)
        status = run_step(out, dry, model, setting, count, batch);
    if (!status)
        status = rebatch_pool_alloc(&made, dry->pool, setting->reserve_bytes, setting->stream, 0);
    return status ? status : run_step(out, dry, model, setting, count, batch);
}

static rebatch_status replay_events(struct rbi_forecast *out, const struct rbi_model *model,
                                    const struct rbi_setting *setting, size_t count, size_t batch)
{
    struct dry dry;
    rebatch_pool_stats stats = {0};
    rebatch_status status = open_dry(&dry, model, setting);
    if (!status)
        status = run_microbatch(out, &dry, model, count);
    if (!status)
        status = rebatch_pool_get_stats(&stats, dry.pool);
    if (!status && batch)
        status = run_training(out, &dry, model, setting, count, batch);
    out->fits = !status;
    out->peak_bytes = stats.live_peak_bytes;
    out->reserved_bytes = stats.reserved_peak_bytes;
    close_dry(&dry);
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
    size_t available;
    rebatch_status status = rebatch_pool_get_stats(&stats, setting->pool);
    if (!status)
        status = rebatch_pool_available(&available, setting->pool);
    if (status)
        return status;
    out->peak_bytes = stats.live_bytes + need;
    out->failing_bytes = need;
    out->reserved_bytes = out->peak_bytes;
    out->fits = need <= available - available / PIECES_SHARE;
    return REBATCH_OK;
}

rebatch_status rbi_replay(struct rbi_forecast *out, const struct rbi_model *model,
                          const struct rbi_setting *setting, size_t count, size_t batch)
{
    *out = (struct rbi_forecast){0};
    return model->has_events ? replay_events(out, model, setting, count, batch)
                             : judge_peak(out, model, setting, count);
}

rebatch_status rbi_replay_largest(size_t *out, const struct rbi_model *model,
                                  const struct rbi_setting *setting, size_t least, size_t most,
                                  size_t batch)
{
    *out = 0;
    /* fits < least means: none found yet; everything above `most` is known not to fit. */
    size_t fits = least - 1;
    size_t step = 1;
    rebatch_status status = REBATCH_OK;
    while (fits < most && !status) {
        const size_t gap = most - fits;
        const size_t count = fits + rbi_min(step, gap == 1 ? 1 : (gap + 1) / 2);
        struct rbi_forecast forecast;
        status = rbi_replay(&forecast, model, setting, count, batch);
        if (status)
            break;
        if (forecast.fits) {
            fits = count;
            step = step > SIZE_MAX / 2 ? step : 2 * step;
        } else {
            most = count - 1;
        }
    }
    if (!status && fits >= least)
        *out = fits;
    return status;
}
