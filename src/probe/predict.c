/* Owns rebatch_predict(): what a session's memory model says of any size, in the pool as it is.
 * Must not know how the model came about. */
#include "probe/probe.h"
#include "recover/recover.h"

static rebatch_status check(const rebatch_prediction *out, const rebatch *rb, size_t size,
                            size_t batch)
{
    if (!out || !rb)
        return rbi_error(REBATCH_E_INVALID, "%s is NULL", out ? "rb" : "out");
    if (size == 0 || batch == 0)
        return rbi_error(REBATCH_E_INVALID, "%s is 0: expected at least 1 sample",
                         size ? "batch" : "size");
    if (rb->ops)
        return rbi_error(REBATCH_E_STATE, "rebatch_predict() was called from within a callback");
    if (!rbi_probe_model(rb))
        return rbi_error(REBATCH_E_STATE, "there is no memory model of this session: expected a "
                                          "rebatch_probe() that has run two sizes");
    return REBATCH_OK;
}

/* What is not there yet and will be lives there in the dry pool. */
static rebatch_status add_reserve(struct rbi_setting *setting, size_t bytes)
{
    if (bytes == 0)
        return REBATCH_OK;
    const size_t count = setting->resident_count + 1;
    void *residents = rbi_heap_resize(setting->residents, count, sizeof *setting->residents);
    if (!residents)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a prediction");
    setting->residents = residents;
    setting->resident_room = count;
    setting->residents[setting->resident_count++] = (struct rbi_resident){NULL, bytes, NULL};
    return REBATCH_OK;
}

/* A pool so many times as large as the one there is would be run dry for nothing. */
#define FAR_TOO_LARGE 64

/* What lives now, and what the model adds, pieces not considered; SIZE_MAX when it does not fit. */
static rebatch_status add_up(uint64_t *out, const struct rbi_model *model,
                             const struct rbi_setting *setting, size_t size)
{
    size_t *sizes = rbi_heap_calloc((size_t)model->blocks + 1, sizeof *sizes);
    if (!sizes)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a prediction");
    size_t sum = rbi_model_need(model, size, sizes);
    for (size_t i = 0; i < setting->resident_count; i++)
        if (!rbi_add(sum, setting->residents[i].bytes, &sum))
            sum = SIZE_MAX;
    rbi_heap_free(sizes);
    *out = sum;
    return REBATCH_OK;
}

/* Whether it fits is asked of the memory there is; what it needs, where it does not, of a pool
 * without a limit. */
static rebatch_status ask(rebatch_prediction *out, const struct rbi_model *model,
                          struct rbi_setting *setting, size_t size, size_t batch)
{
    rebatch_status status = add_up(&out->peak_bytes, model, setting, size);
    out->reserved_bytes = out->failing_bytes = out->peak_bytes;
    if (status || out->peak_bytes / FAR_TOO_LARGE > out->limit_bytes)
        return status;
    struct rbi_forecast forecast;
    status = rbi_replay(&forecast, model, setting, size, batch);
    out->fits = forecast.fits;
    out->failing_bytes = forecast.failing_bytes;
    if (!status && !forecast.fits) {
        setting->room_bytes = SIZE_MAX;
        status = rbi_replay(&forecast, model, setting, size, batch);
    }
    out->peak_bytes = forecast.peak_bytes;
    out->reserved_bytes = forecast.reserved_bytes;
    return status;
}

static rebatch_status predict(rebatch_prediction *out, rebatch *rb, size_t batch,
                              size_t reserve_bytes)
{
    struct rbi_setting setting;
    rebatch_status status = rbi_setting_read(&setting, rb->pool, &rb->options.pool);
    size_t limit;
    if (!rbi_add(setting.reserved_bytes, setting.room_bytes, &limit))
        limit = SIZE_MAX;
    out->limit_bytes = limit;
    if (!status)
        status = add_reserve(&setting, reserve_bytes);
    if (!status)
        status = ask(out, rbi_probe_model(rb), &setting, out->size, batch);
    rbi_setting_release(&setting);
    return status;
}

rebatch_status rebatch_predict(rebatch_prediction *out, rebatch *rb, size_t size, size_t batch,
                               const rebatch_probe_options *options)
{
    rebatch_prediction prediction = {.size = size};
    rebatch_probe_options o = REBATCH_PROBE_OPTIONS_INIT;
    rebatch_status status = check(out, rb, size, batch);
    if (!status)
        status = rbi_options_copy(&o, sizeof o, options, "rebatch_probe_options");
    if (!status)
        status = predict(&prediction, rb, batch, o.reserve_bytes);
    if (out)
        *out = status ? (rebatch_prediction){0} : prediction;
    return status;
}
