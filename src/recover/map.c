/* Owns what a session learns of others than its steps: rebatch_map(), with sizes for each function,
 * and budgets of micro-batches that the program cuts. Must not know how samples are cut. */
#include "rebatch/probe.h"
#include "recover/recover.h"

/* What is known of one function, while it does not run. */
struct rbi_map {
    struct rbi_map *next;
    rebatch_status (*run)(const rebatch_microbatch *mb, void *user);
    const void *key; /* NULL: it is known by `run` */
    struct rbi_sizes sizes;
};

void rbi_maps_release(rebatch *rb)
{
    while (rb->maps) {
        struct rbi_map *const map = rb->maps;
        rb->maps = map->next;
        rbi_heap_free(map);
    }
}

void rbi_maps_forget(rebatch *rb)
{
    for (struct rbi_map *map = rb->maps; map; map = map->next)
        rbi_sizes_forget(&map->sizes);
}

static rebatch_status find(struct rbi_map **out, rebatch *rb, const rebatch_map_ops *ops)
{
    for (struct rbi_map *map = rb->maps; map; map = map->next)
        if (map->key == ops->key && (ops->key || map->run == ops->run)) {
            *out = map;
            return REBATCH_OK;
        }
    struct rbi_map *const map = rbi_heap_calloc(1, sizeof *map);
    if (!map)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for what is learned of a function");
    rbi_sizes_init(&map->sizes, &rb->options);
    map->sizes.micro = SIZE_MAX; /* micro_start is of training */
    map->run = ops->run;
    map->key = ops->key;
    map->next = rb->maps;
    rb->maps = *out = map;
    return REBATCH_OK;
}

static void swap_sizes(rebatch *rb, struct rbi_map *map)
{
    const struct rbi_sizes sizes = rb->sizes;
    rb->sizes = map->sizes;
    map->sizes = sizes;
}

static rebatch_status read_ops(rebatch_map_ops *out, const rebatch *rb,
                               const rebatch_map_ops *given)
{
    if (!rb || !given)
        return rbi_error(REBATCH_E_INVALID, "%s is NULL", rb ? "ops" : "rb");
    const rebatch_status status = rbi_session_check_idle(rb, "rebatch_map");
    if (status)
        return status;
    *out = (rebatch_map_ops)REBATCH_MAP_OPS_INIT;
    const rebatch_status read = rbi_options_copy(
        out, sizeof *out, RBI_SIZE_TO(rebatch_map_ops, largest), given, "rebatch_map_ops");
    if (read)
        return read;
    if (!out->run)
        return rbi_error(REBATCH_E_INVALID, "ops.run is NULL: expected a function");
    if (out->flags & ~(uint32_t)REBATCH_SCOPED_MEMORY)
        return rbi_error(REBATCH_E_INVALID,
                         "ops.flags is 0x%x: expected 0 or REBATCH_SCOPED_MEMORY", out->flags);
    if (out->flags && !rbi_is_on(rb->options.reclaim))
        return rbi_error(REBATCH_E_INVALID, "ops.flags has REBATCH_SCOPED_MEMORY and reclaim is "
                                            "off: expected one without the other");
    return REBATCH_OK;
}

static rebatch_status run(rebatch *rb)
{
    rbi_assert(rb->run.samples_callback == RBI_MAP);
    rebatch_status status = rbi_step_open_scope(rb);
    if (status)
        return status;
    status = rbi_samples_run(rb);
    if (status)
        (void)rbi_step_undo(rb);
    else
        rbi_scope_commit_all(rb->pool, rb->run.scope);
    rb->run.scope = 0;
    if (status && rb->buffers.is_new)
        rbi_resize_release(rb);
    return status;
}

rebatch_status rebatch_map(rebatch *rb, const rebatch_map_ops *ops, size_t count, void *user,
                           rebatch_step_report *report)
{
    rebatch_map_ops own;
    struct rbi_map *map = NULL;
    if (report)
        *report = (rebatch_step_report){0};
    rebatch_status status = read_ops(&own, rb, ops);
    if (!status && count > 0)
        status = find(&map, rb, &own);
    if (status || count == 0) {
        rbi_step_report_refused(report, rb, status);
        return status;
    }
    const rebatch_step_ops table = {.struct_size = sizeof table,
                                    .forward_backward = own.run,
                                    .flags = REBATCH_DECLARES_MUTATION | own.flags,
                                    .resize = own.resize};
    swap_sizes(rb, map);
    rbi_run_begin(rb, &(struct rbi_task){.ops = &table,
                                         .user = user,
                                         .batch = count,
                                         .most = own.largest ? own.largest : SIZE_MAX,
                                         .samples_callback = RBI_MAP});
    rbi_resize_begin_map(rb);
    status = run(rb);
    rbi_step_report(rb, status);
    rbi_step_end(rb);
    swap_sizes(rb, map);
    if (rb->launch.user)
        rb->launch.map_ended(rb->launch.user, &rb->run.report);
    if (report)
        *report = rb->run.report;
    return status;
}

/* ---- micro-batches that the program cuts ---- */

/* Each sample of such a run is one unit of the cost. */
static uint64_t cost_of_units(size_t first, size_t count, void *user)
{
    (void)first;
    (void)user;
    return count;
}

/* What the line through other points says of it as well is no point of its own, lest points far
 * from it are given up. */
static void learn_run(rebatch *rb, size_t cost, uint64_t bytes)
{
    struct rbi_growth *const growth = &rb->sizes.growth;
    const size_t before = rb->sizes.budget;
    uint64_t known;
    if (bytes &&
        !(rbi_need_can_choose(rb) && rbi_need_predict_surely(&known, rb, cost) && known >= bytes))
        rbi_need_learn(rb, cost, bytes);
    rb->run.cut.by_budget = cost > before / 2;
    const bool searches = rbi_learn_is_on(&rb->sizes.learning) && rb->run.cut.by_budget;
    if (searches)
        growth->clean = growth->wait;
    rbi_growth_step_done(rb);
    if (searches && rb->sizes.budget == before)
        rb->sizes.learning.state = RBI_LEARN_OFF;
}

static void learn_oom(rebatch *rb, size_t cost, uint64_t need_bytes, uint64_t available_bytes)
{
    rebatch_event event = rbi_event_begin(rb, REBATCH_EVENT_SHRINK);
    event.phase = REBATCH_PHASE_FORWARD;
    event.cost = cost;
    event.needed_bytes = need_bytes;
    event.available_bytes = available_bytes;
    rb->run.ooms.failure = (struct rbi_failure){
        .phase = event.phase, .need_bytes = need_bytes, .available_bytes = available_bytes};
    rbi_need_learn_least(rb, cost, need_bytes);
    /* Else it was cut before the budget fell; unless that was long ago, or it has only risen. */
    if (cost <= rb->sizes.budget || rbi_learn_is_on(&rb->sizes.learning) ||
        rb->sizes.growth.clean >= rb->options.grow_after) {
        rbi_growth_set_back(rb, available_bytes);
        rb->sizes.learning.state = RBI_LEARN_OFF;
        rbi_size_set(rb, rbi_max(rbi_next_size(rb, RBI_AFTER_OOM, cost), 1));
    }
    rbi_event_end(&event, rb);
    rbi_event_emit(rb, &event);
}

rebatch_status rebatch_learn_cost(rebatch *rb, const void *key, size_t cost, rebatch_status result,
                                  size_t *budget)
{
    static const rebatch_step_ops units = {.struct_size = sizeof units, .cost = cost_of_units};
    struct rbi_map *map = NULL;
    rebatch_meter_reading read = {0};
    size_t available = SIZE_MAX;
    uint64_t known;
    if (!rb || !rbi_meter_is_set(rb))
        return rbi_error(REBATCH_E_INVALID, "rb is %s: expected a session with options.meter",
                         rb ? "a session without a meter" : "NULL");
    if (!budget || !*budget)
        return rbi_error(REBATCH_E_INVALID, "%s: expected at least 1",
                         budget ? "*budget is 0" : "budget is NULL");
    if (result && result != REBATCH_OOM)
        return rbi_error(REBATCH_E_INVALID, "result is %d: expected REBATCH_OK or REBATCH_OOM",
                         (int)result);
    rebatch_status status = rbi_session_check_idle(rb, "rebatch_learn_cost");
    if (!status)
        status = find(&map, rb, &(rebatch_map_ops){.key = key});
    if (status)
        return status;
    if (!map->sizes.has_budget && rbi_is_on(rb->options.learn))
        map->sizes.learning.state = RBI_LEARN_SEARCHES;
    if (!map->sizes.has_budget ||
        (rbi_learn_is_on(&map->sizes.learning) && *budget > map->sizes.budget))
        map->sizes.budget = *budget;
    map->sizes.has_budget = true;
    swap_sizes(rb, map);
    rbi_step_begin(rb, &units, rbi_max(cost, 1), NULL);
    (void)rb->meter.read(&read, rb->meter.user);
    (void)rbi_available(&available, rb);
    const uint64_t used = read.peak_bytes - rbi_min(read.peak_bytes, read.live_bytes);
    if (cost && result)
        learn_oom(rb, cost, read.asked_bytes ? used + read.asked_bytes : 0, available);
    else if (cost)
        learn_run(rb, cost, used);
    /* Less may be available. What ran far below does not tell that. */
    if (rbi_need_predict_surely(&known, rb, rb->sizes.budget / 2) &&
        !rbi_size_may_fit(rb, rb->sizes.budget, rb->lighten))
        rbi_size_set(rb, rbi_max(rbi_size_largest(rb, rb->sizes.budget - 1, available), 1));
    *budget = rb->sizes.budget;
    rbi_step_end(rb);
    swap_sizes(rb, map);
    return REBATCH_OK;
}
