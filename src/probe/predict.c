/* Owns a session's memory model once it is made, and rebatch_predict(): what it says of any size,
 * in the pool as it is. Must not know how the model came about. */
#include "probe/probe.h"
#include "recover/interface.h"

/* ---- whose model ---- */

static uint64_t predict_need(void *user, size_t count)
{
    const struct rbi_model *model = user;
    return rbi_model_need(model, count);
}

const struct rbi_model *rbi_probe_model(const rebatch *rb)
{
    const struct rbi_memory_model *model = rbi_need_get_model(rb);
    return model && model->need == predict_need ? model->user : NULL;
}

/* As rebatch_step() will do it. */
struct rbi_setting rbi_probe_setting(const rebatch *rb, size_t least)
{
    return (struct rbi_setting){.pool = rebatch_get_pool(rb),
                                .stream = rbi_session_options(rb)->stream,
                                .admits_above = rbi_session_admits(rb) ? least : SIZE_MAX,
                                .has_stepped = rbi_session_has_updated(rb)};
}

/* ---- prediction ---- */

static rebatch_status check(const rebatch_prediction *out, const rebatch *rb, size_t size,
                            size_t batch)
{
    if (!out || !rb)
        return rbi_error(REBATCH_E_INVALID, "%s is NULL", out ? "rb" : "out");
    if (size == 0 || batch == 0)
        return rbi_error(REBATCH_E_INVALID, "%s is 0: expected at least 1 sample",
                         size ? "batch" : "size");
    const rebatch_status status = rbi_session_check_idle(rb, "rebatch_predict");
    if (status)
        return status;
    if (!rbi_probe_model(rb))
        return rbi_error(REBATCH_E_STATE, "there is no memory model of this session: expected a "
                                          "rebatch_probe() that has run two sizes");
    return REBATCH_OK;
}

/* A size that needs FAR_TOO_LARGE times the pool's limit is not run dry. */
#define FAR_TOO_LARGE 64

static rebatch_status read_limit(uint64_t *out, rebatch_pool *pool)
{
    rebatch_pool_stats stats;
    size_t available, limit;
    rebatch_status status = rebatch_pool_get_stats(&stats, pool);
    if (!status)
        status = rebatch_pool_available(&available, pool);
    if (!status)
        *out = rbi_add(available, (size_t)stats.live_bytes, &limit) ? limit : SIZE_MAX;
    return status;
}

/* The dry run's copy of the pool also holds what will be allocated before the step. */
static rebatch_status ask(rebatch_prediction *out, const struct rbi_model *model,
                          const struct rbi_setting *setting, size_t batch)
{
    struct rbi_forecast forecast;
    rebatch_status status = rbi_model_peak(&out->peak_bytes, model, out->size);
    out->failing_bytes = out->peak_bytes;
    if (status || out->peak_bytes / FAR_TOO_LARGE > out->limit_bytes)
        return status;
    status = rbi_forecast_run(&forecast, model, setting,
                              &(struct rbi_plan){out->size, true, true, batch});
    out->fits = forecast.fits;
    out->failing_bytes = forecast.fits ? 0 : forecast.failing_bytes;
    if (forecast.fits) {
        out->peak_bytes = forecast.peak_bytes;
        out->reserved_bytes = forecast.reserved_bytes;
    }
    return status;
}

/* Allocates what the next step will before its first micro-batch, as far as there is memory. */
static size_t hold_made(void **blocks, const rebatch *rb, const size_t *bytes, size_t most)
{
    const rebatch_stream stream = rbi_session_options(rb)->stream;
    size_t count = 0;
    while (count < most && rebatch_pool_alloc(&blocks[count], rebatch_get_pool(rb), bytes[count],
                                              stream, 0) == REBATCH_OK)
        count++;
    return count;
}

static rebatch_status predict_with_reserve(rebatch_prediction *out, rebatch *rb, size_t batch,
                                           size_t reserve_bytes)
{
    const bool by_cost = rbi_need_get_model(rb)->by_cost;
    const size_t least = by_cost ? 0 : rbi_round_size_up(rbi_session_options(rb), 1);
    struct rbi_setting setting = rbi_probe_setting(rb, least);
    rebatch_status status = read_limit(&out->limit_bytes, setting.pool);
    if (!status)
        status = rbi_reserve_plan(&setting, reserve_bytes);
    if (!status)
        status = rbi_reserve_hold(&setting);
    if (status == REBATCH_OOM) {
        out->failing_bytes = reserve_bytes;
        status = rbi_model_peak(&out->peak_bytes, rbi_probe_model(rb), out->size);
        out->peak_bytes += reserve_bytes;
        rbi_reserve_release(&setting);
        return status;
    }
    if (!status)
        status = ask(out, rbi_probe_model(rb), &setting, batch);
    rbi_reserve_release(&setting);
    return status;
}

/* Each size's model has the buffers of resize, so those in use now are left out. */
static rebatch_status predict(rebatch_prediction *out, rebatch *rb, size_t batch,
                              size_t reserve_bytes)
{
    void *made[RBI_MADE_MOST];
    const size_t *bytes;
    const size_t all = rbi_need_get_made(&bytes, rb);
    const unsigned turn = rbi_residents_enter(rebatch_get_pool(rb), rbi_session_buffers(rb));
    size_t count = hold_made(made, rb, bytes, all);
    const rebatch_status status = predict_with_reserve(out, rb, batch, reserve_bytes);
    (void)rbi_residents_enter(rebatch_get_pool(rb), turn);
    if (count < all)
        out->fits = false;
    while (count > 0)
        (void)rebatch_pool_free(rebatch_get_pool(rb), made[--count]);
    return status;
}

/* For the session; true when it cannot be told. */
static bool predict_fits(void *user, rebatch *rb, size_t size)
{
    rebatch_prediction prediction = {.size = size};
    (void)user; /* the session's model */
    if (predict(&prediction, rb, rbi_size_of(rb, 0, rbi_session_batch(rb)), 0) == REBATCH_OK)
        return prediction.fits;
    rebatch_clear_error(); /* of a step that has succeeded */
    return true;
}

/* ---- handing over ---- */

static void destroy_model(void *user)
{
    rbi_model_release(user);
    rbi_heap_free(user);
}

void rbi_probe_lend(rebatch *rb, struct rbi_model *model)
{
    rbi_need_set_model(rb, &(struct rbi_memory_model){.need = predict_need,
                                                      .user = model,
                                                      .lighten = rbi_session_level(rb),
                                                      .by_cost = rbi_session_is_by_cost(rb)});
}

rebatch_status rbi_probe_hand_over(rebatch *rb, struct rbi_model *model, unsigned lighten,
                                   bool by_cost)
{
    struct rbi_model *own = rbi_heap_calloc(1, sizeof *own);
    if (!own)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a memory model");
    *own = *model;
    *model = (struct rbi_model){0};
    rbi_need_set_model(rb, &(struct rbi_memory_model){.need = predict_need,
                                                      .destroy = destroy_model,
                                                      .user = own,
                                                      .lighten = lighten,
                                                      .by_cost = by_cost,
                                                      .fits = predict_fits});
    return REBATCH_OK;
}

/* ---- the public call ---- */

rebatch_status rebatch_predict(rebatch_prediction *out, rebatch *rb, size_t size, size_t batch,
                               const rebatch_probe_options *options)
{
    rebatch_prediction prediction = {.size = size};
    rebatch_probe_options o = REBATCH_PROBE_OPTIONS_INIT;
    rebatch_status status = check(out, rb, size, batch);
    if (!status)
        status = rbi_options_copy(&o, sizeof o, RBI_SIZE_TO(rebatch_probe_options, choose), options,
                                  "rebatch_probe_options");
    if (!status)
        status = predict(&prediction, rb, batch, o.reserve_bytes);
    if (out)
        *out = status ? (rebatch_prediction){0} : prediction;
    return status;
}
