/* Owns the dry run: a size's calls on a pool like the live one, with nothing behind it.
 * Must not know where the sizes come from. */
#include "probe/probe.h"

#include "device/device.h"

/* ---- the pool as it is ---- */

/* Runs with the pool's lock held. */
static void add_resident(void *user, const void *address, size_t bytes)
{
    struct rbi_setting *setting = user;
    if (setting->resident_count == setting->resident_room) {
        const size_t room = setting->resident_room ? 2 * setting->resident_room : 64;
        void *residents = rbi_heap_resize(setting->residents, room, sizeof *setting->residents);
        if (!residents) {
            setting->is_cut = true;
            return;
        }
        setting->residents = residents;
        setting->resident_room = room;
    }
    setting->residents[setting->resident_count++] = (struct rbi_resident){address, bytes, NULL};
}

rebatch_status rbi_setting_read(struct rbi_setting *out, rebatch_pool *pool,
                                const rebatch_pool_options *options)
{
    rebatch_device *device = rebatch_pool_device(pool);
    *out = (struct rbi_setting){.options = *options,
                                .granule_bytes = rbi_device_granule_bytes(device),
                                .has_virtual_memory = rbi_device_has_virtual_memory(device)};
    rebatch_pool_stats stats;
    size_t available = 0;
    rebatch_status status = rebatch_pool_trim(pool, 0, NULL);
    if (!status)
        status = rebatch_pool_get_stats(&stats, pool);
    if (!status)
        status = rebatch_pool_available(&available, pool);
    if (status)
        return status;
    out->reserved_bytes = (size_t)stats.reserved_bytes;
    out->room_bytes = available - (size_t)(stats.reserved_bytes - stats.live_bytes);
    rbi_pool_each_live(pool, add_resident, out);
    if (!out->is_cut)
        return REBATCH_OK;
    rbi_setting_release(out);
    return rbi_error(REBATCH_E_HOST_OOM, "no host memory to copy the state of a pool");
}

void rbi_setting_release(struct rbi_setting *setting)
{
    rbi_heap_free(setting->residents);
    *setting = (struct rbi_setting){0};
}

/* ---- a dry pool in that state ---- */

struct dry {
    rebatch_device *device;
    rebatch_pool *pool;
    void **blocks; /* of the micro-batch that runs */
    void **kept;   /* of the one before: what it left */
};

static void close_dry(struct dry *dry)
{
    rebatch_pool_destroy(dry->pool);
    rebatch_device_close(dry->device);
    rbi_heap_free(dry->blocks);
    rbi_heap_free(dry->kept);
}

/* Limits and headroom are in room_bytes already, so the dry pool has just one limit. */
static rebatch_status open_pool(struct dry *dry, const struct rbi_setting *setting)
{
    rebatch_pool_options options = setting->options;
    options.limit_bytes = 0;
    options.limit_permille = 0;
    options.headroom_bytes = 0;
    rebatch_status status = rbi_device_open_dry(
        &dry->device, REBATCH_UNLIMITED, setting->granule_bytes, setting->has_virtual_memory);
    if (!status)
        status = rebatch_pool_create(&dry->pool, dry->device, &options);
    for (size_t i = 0; i < setting->resident_count && !status; i++) {
        struct rbi_resident *resident = &setting->residents[i];
        status = rebatch_pool_alloc(&resident->dry, dry->pool, resident->bytes, NULL, 0);
    }
    size_t limit;
    if (!status && rbi_add(setting->reserved_bytes, setting->room_bytes, &limit) && limit)
        status = rebatch_pool_set_limit(dry->pool, limit);
    return status;
}

static void *resident_at(const struct rbi_setting *setting, const void *address)
{
    for (size_t i = setting->resident_count; address && i-- > 0;)
        if (setting->residents[i].address == address)
            return setting->residents[i].dry;
    return NULL;
}

static rebatch_status open_dry(struct dry *dry, const struct rbi_model *model,
                               const struct rbi_setting *setting)
{
    *dry = (struct dry){0};
    dry->blocks = rbi_heap_calloc((size_t)model->blocks + 1, sizeof *dry->blocks);
    dry->kept = rbi_heap_calloc((size_t)model->blocks + 1, sizeof *dry->kept);
    if (!dry->blocks || !dry->kept)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a dry run");
    const rebatch_status status = open_pool(dry, setting);
    for (size_t i = 0; i < model->event_count && !status; i++)
        if (model->events[i].kind == RBI_TRACE_ALLOC)
            dry->kept[model->events[i].block] = resident_at(setting, model->events[i].kept_at);
    return status;
}

/* ---- the dry run ---- */

static rebatch_status run_event(struct dry *dry, const struct rbi_model_event *event, size_t count)
{
    void *block;
    switch (event->kind) {
    case RBI_TRACE_ALLOC:
        return rebatch_pool_alloc(&dry->blocks[event->block], dry->pool,
                                  rbi_line_at(&event->line, count), NULL, 0);
    case RBI_TRACE_RESERVE:
        return rebatch_pool_reserve(dry->pool, rbi_line_at(&event->line, count), NULL);
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

/* The micro-batches of two steps, as far as they differ: one leaves other pieces to the next than
 * it has found, and the last of a step may be smaller. */
static rebatch_status run_steps(struct rbi_forecast *out, struct dry *dry,
                                const struct rbi_model *model, size_t count, size_t batch)
{
    const size_t rest = batch % count;
    const size_t sizes[] = {count, batch / count > 1 ? count : 0, rest,
                            count, batch / count > 1 ? count : 0, rest};
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes && !status; i++)
        if (sizes[i])
            status = run_microbatch(out, dry, model, sizes[i]);
    return status;
}

static rebatch_status replay_events(struct rbi_forecast *out, const struct rbi_model *model,
                                    const struct rbi_setting *setting, size_t count, size_t batch)
{
    struct dry dry;
    rebatch_pool_stats stats = {0};
    rebatch_status status = open_dry(&dry, model, setting);
    if (!status)
        status = batch > count ? run_steps(out, &dry, model, count, batch)
                               : run_microbatch(out, &dry, model, count);
    if (!status || status == REBATCH_OOM) {
        out->fits = !status;
        status = rebatch_pool_get_stats(&stats, dry.pool);
    }
    out->peak_bytes = stats.live_peak_bytes;
    out->reserved_bytes = stats.reserved_peak_bytes;
    close_dry(&dry);
    return status;
}

/* Only the peak is known as a whole, and not how its pieces lie: this share of the room is left
 * for what does not fit together. */
#define PIECES_SHARE 32

static void judge_peak(struct rbi_forecast *out, const struct rbi_model *model,
                       const struct rbi_setting *setting, size_t count)
{
    size_t need = rbi_line_at(&model->peak, count);
    for (size_t i = 0; i < setting->resident_count; i++)
        out->peak_bytes += setting->residents[i].bytes;
    out->peak_bytes += need;
    out->failing_bytes = need;
    out->reserved_bytes = out->peak_bytes;
    out->fits = need <= setting->room_bytes - setting->room_bytes / PIECES_SHARE;
}

rebatch_status rbi_replay(struct rbi_forecast *out, const struct rbi_model *model,
                          const struct rbi_setting *setting, size_t count, size_t batch)
{
    *out = (struct rbi_forecast){0};
    if (model->has_events)
        return replay_events(out, model, setting, count, batch);
    judge_peak(out, model, setting, count);
    return REBATCH_OK;
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
