/* Owns the dry run: a size's calls on a pool like the live one, with nothing behind it.
 * Must not know where the sizes come from. */
#include "probe/probe.h"

#include "device/device.h"

/* ---- lists of blocks ---- */

/* Node numbers count from 1; 0 is none. */
struct list {
    uint32_t oldest, newest;
};

struct node {
    void *address;
    uint32_t older, newer;
};

struct dry {
    rebatch_device *device;
    rebatch_pool *pool;
    struct node *nodes; /* the first stands for none */
    uint32_t node_count, node_room;
    uint32_t spare;    /* a list by `newer` */
    struct list *made; /* of each slot of the model, by the micro-batch that runs */
    struct list *kept; /* and by the one before */
};

static bool push(struct dry *dry, struct list *list, void *address)
{
    uint32_t number = dry->spare;
    if (number) {
        dry->spare = dry->nodes[number].newer;
    } else {
        if (dry->node_count + 1 >= dry->node_room) {
            const uint32_t room = dry->node_room ? 2 * dry->node_room : 256;
            void *nodes = rbi_heap_resize(dry->nodes, room, sizeof *dry->nodes);
            if (!nodes)
                return false;
            dry->nodes = nodes;
            dry->node_room = room;
        }
        number = ++dry->node_count;
    }
    dry->nodes[number] = (struct node){address, list->newest, 0};
    if (list->newest)
        dry->nodes[list->newest].newer = number;
    else
        list->oldest = number;
    list->newest = number;
    return true;
}

/* NULL when the list is empty. */
static void *pop(struct dry *dry, struct list *list, bool is_oldest)
{
    const uint32_t number = is_oldest ? list->oldest : list->newest;
    if (number == 0)
        return NULL;
    struct node *node = &dry->nodes[number];
    if (node->older)
        dry->nodes[node->older].newer = node->newer;
    else
        list->oldest = node->newer;
    if (node->newer)
        dry->nodes[node->newer].older = node->older;
    else
        list->newest = node->older;
    node->newer = dry->spare;
    dry->spare = number;
    return node->address;
}

/* ---- a dry pool like the live one ---- */

static rebatch_status no_memory(void)
{
    return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a dry run");
}

static void close_dry(struct dry *dry)
{
    rebatch_pool_destroy(dry->pool);
    rebatch_device_close(dry->device);
    rbi_heap_free(dry->nodes);
    rbi_heap_free(dry->made);
    rbi_heap_free(dry->kept);
}

/* A copy of the pool has everything at the same addresses, so what the last micro-batch has kept is
 * known by them. */
static rebatch_status open_dry(struct dry *dry, const struct rbi_model *model,
                               const struct rbi_setting *setting)
{
    *dry = (struct dry){0};
    dry->made = rbi_heap_calloc((size_t)model->slots + 1, sizeof *dry->made);
    dry->kept = rbi_heap_calloc((size_t)model->slots + 1, sizeof *dry->kept);
    if (!dry->made || !dry->kept)
        return no_memory();
    for (size_t i = 0; i < model->kept_count; i++)
        if (!push(dry, &dry->kept[model->kept[i].slot], model->kept[i].address))
            return no_memory();
    const rebatch_status status = rbi_pool_clone(&dry->pool, &dry->device, setting->pool);
    return status ? status : rebatch_pool_reset_peaks(dry->pool);
}

/* ---- the dry run ---- */

static rebatch_status run_event(struct dry *dry, const struct rbi_model_event *event, size_t bytes)
{
    void *block;
    rebatch_status status;
    switch (event->kind) {
    case RBI_TRACE_ALLOC:
        status = rebatch_pool_alloc(&block, dry->pool, bytes, event->stream, 0);
        return status || push(dry, &dry->made[event->slot], block) ? status : no_memory();
    case RBI_TRACE_RESERVE:
        return rebatch_pool_reserve(dry->pool, bytes, event->stream);
    case RBI_TRACE_FREE:
        return rebatch_pool_free(dry->pool, pop(dry, &dry->made[event->slot], event->is_queued));
    case RBI_TRACE_FREE_PREVIOUS:
        return rebatch_pool_free(dry->pool, pop(dry, &dry->kept[event->slot], true));
    default:
        return REBATCH_OK;
    }
}

/* What it leaves is what the next one finds as kept. */
static void end_microbatch(struct dry *dry, const struct rbi_model *model)
{
    for (uint32_t slot = 0; slot < model->slots; slot++)
        while (pop(dry, &dry->kept[slot], false))
            ;
    struct list *made = dry->made;
    dry->made = dry->kept;
    dry->kept = made;
}

static rebatch_status run_microbatch(struct rbi_forecast *out, struct dry *dry,
                                     const struct rbi_model *model, size_t count)
{
    struct rbi_cursor cursor = {.model = model, .count = count};
    const struct rbi_model_event *event;
    rebatch_scope scope;
    rebatch_status status = rebatch_scope_begin(&scope, dry->pool);
    while (!status && (event = rbi_model_next(&cursor)))
        status = run_event(dry, event, cursor.bytes);
    if (status == REBATCH_OOM)
        out->failing_bytes = cursor.bytes;
    if (status)
        return status;
    end_microbatch(dry, model);
    return rebatch_scope_commit(dry->pool, scope);
}

/* As a step's attempt begins: with its memory, where the session sees to that. */
static rebatch_status run_attempt(struct rbi_forecast *out, struct dry *dry,
                                  const struct rbi_model *model, const struct rbi_setting *setting,
                                  size_t count)
{
    rebatch_status status = REBATCH_OK;
    if (setting->admits_above < count)
        status = rbi_pool_admit(dry->pool, rbi_model_need(model, count), setting->stream);
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
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < setting->piece_count && !status; i++)
        status = rebatch_pool_free(dry->pool, setting->pieces[i].address);
    if (!status)
        status = run_step(out, dry, model, setting, count, batch);
    for (size_t i = 0; i < setting->piece_count && !status; i++)
        status = rebatch_pool_alloc(&made, dry->pool, setting->pieces[i].bytes, setting->stream, 0);
    return status ? status : run_step(out, dry, model, setting, count, batch);
}

/* What others will hold more than they do now. */
static rebatch_status outside_growth(size_t *out, const struct rbi_model *model,
                                     const struct rbi_setting *setting, size_t count)
{
    rebatch_memory_info info;
    rebatch_pool_stats stats;
    *out = 0;
    rebatch_status status = rebatch_device_memory(rebatch_pool_device(setting->pool), &info);
    if (!status)
        status = rebatch_pool_get_stats(&stats, setting->pool);
    if (status)
        return status;
    const size_t taken = info.total_bytes - rbi_min(info.free_bytes, info.total_bytes);
    const size_t wanted = (size_t)stats.reserved_bytes + rbi_line_at(&model->outside, count);
    *out = wanted > taken ? wanted - taken : 0;
    return REBATCH_OK;
}

static rebatch_status hold_outside(const struct dry *dry, const struct rbi_model *model,
                                   const struct rbi_setting *setting, size_t count)
{
    size_t growth;
    void *memory;
    const rebatch_status status = outside_growth(&growth, model, setting, count);
    return status || growth == 0 ? status : rbi_device_alloc(dry->device, &memory, growth);
}

static rebatch_status replay_events(struct rbi_forecast *out, const struct rbi_model *model,
                                    const struct rbi_setting *setting, const struct rbi_plan *plan)
{
    struct dry dry;
    rebatch_pool_stats stats = {0};
    rebatch_status status = open_dry(&dry, model, setting);
    if (!status && out->needs_trim)
        status = rebatch_pool_trim(dry.pool, 0, NULL);
    if (!status)
        status = hold_outside(&dry, model, setting, plan->count);
    if (!status && plan->has_trial)
        status = run_microbatch(out, &dry, model, plan->count);
    if (!status)
        status = rebatch_pool_get_stats(&stats, dry.pool);
    if (!status && plan->has_training)
        status = run_training(out, &dry, model, setting, plan->count, plan->batch);
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
    size_t available, growth;
    rebatch_status status = rebatch_pool_get_stats(&stats, setting->pool);
    if (!status)
        status = rebatch_pool_available(&available, setting->pool);
    if (!status)
        status = outside_growth(&growth, model, setting, count);
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
    const rebatch_status status = replay_events(out, model, setting, plan);
    if (status || out->fits)
        return status;
    /* The cache may be in pieces that this size has no use for. */
    out->needs_trim = true;
    return replay_events(out, model, setting, plan);
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
