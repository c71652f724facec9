/* Owns the memory model: what a size allocates, in which order, and the most of it at once.
 * Must not know whether it fits. */
#include "probe/probe.h"

static struct rbi_line fit(struct rbi_points *points)
{
    points->base = points->count - 1;
    return points->count == 1 ? rbi_line_scale(points->at) : rbi_line_fit(points);
}

static void fit_sums(struct rbi_model *model, const struct rbi_traces *traces)
{
    struct rbi_points peaks = {.count = 0}, outside = peaks;
    for (size_t t = 0; t < traces->count; t++) {
        const struct rbi_trace *trace = traces->whole[t];
        peaks.at[peaks.count++] = (struct rbi_point){trace->count, (size_t)trace->peak_bytes};
        outside.at[outside.count++] = (struct rbi_point){trace->count, trace->outside_bytes};
    }
    model->peak = fit(&peaks);
    model->outside = fit(&outside);
    model->outside_fixed = traces->whole[0]->outside_before;
    if (traces->count == 1) /* what others held before does not grow with the samples */
        model->outside.rise =
            (int64_t)(traces->whole[0]->outside_bytes - traces->whole[0]->outside_before);
}

static rebatch_status make_scaled(struct rbi_model *out, const struct rbi_trace *trace)
{
    out->slots = trace->blocks;
    out->events = rbi_heap_calloc(trace->event_count + 1, sizeof *out->events);
    if (!out->events)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a memory model");
    uint32_t made_at = 0;
    for (size_t i = 0; i < trace->event_count; i++) {
        const struct rbi_trace_event *event = &trace->events[i];
        if (rbi_trace_is_one_off(trace, event))
            continue;
        struct rbi_point point = {trace->count, event->bytes};
        if (event->kind == RBI_TRACE_FREE) {
            while (trace->events[made_at].kind != RBI_TRACE_ALLOC ||
                   trace->events[made_at].block != event->block)
                made_at = made_at + 1 < trace->event_count ? made_at + 1 : 0;
            point.bytes = trace->events[made_at].bytes;
        }
        rbi_assert(out->event_count < trace->event_count);
        out->events[out->event_count++] =
            (struct rbi_model_event){.kind = event->kind,
                                     .slot = event->kind == RBI_TRACE_RESERVE ? 0 : event->block,
                                     .line = rbi_line_scale(&point),
                                     .stream = event->stream};
    }
    out->has_events = true;
    return REBATCH_OK;
}

static void release_events(struct rbi_model *model)
{
    rbi_heap_free(model->events);
    rbi_heap_free(model->loops);
    rbi_heap_free(model->kept);
    rbi_heap_free(model->first);
}

static uint64_t most_at_once(const struct rbi_model *model, size_t count, bool with_reserves);

/* Traces may be alike by chance: the model is dropped if it says MUCH times what a size needed. */
#define MUCH 2
static bool is_refuted(const struct rbi_model *model, const struct rbi_traces *traces)
{
    for (size_t i = 0; i < traces->count && model->has_events; i++) {
        const struct rbi_trace *seen = traces->whole[i];
        if (seen->peak_bytes && most_at_once(model, seen->count, false) / MUCH > seen->peak_bytes)
            return true;
    }
    return false;
}

rebatch_status rbi_model_make(struct rbi_model *out, const struct rbi_traces *traces)
{
    rbi_assert(traces->count > 0 && traces->count <= RBI_TRACES_MOST);
    *out = (struct rbi_model){.slots = 0};
    fit_sums(out, traces);
    const rebatch_status status =
        traces->count == 1 ? make_scaled(out, traces->whole[0]) : rbi_model_build(out, traces);
    if (status) {
        rbi_model_release(out);
    } else if (is_refuted(out, traces)) {
        release_events(out);
        *out = (struct rbi_model){.slots = 0};
        fit_sums(out, traces);
    }
    return status;
}

void rbi_model_release(struct rbi_model *model)
{
    release_events(model);
    *model = (struct rbi_model){0};
}

/* ---- turn by turn ---- */

static size_t bytes_in_turn(const struct rbi_model_event *event, const struct rbi_model_loop *loop,
                            size_t count, size_t turn)
{
    const size_t turns = rbi_turns_at(&loop->turns, count);
    rbi_assert(turn < turns && loop->turns.step > 0);
    const size_t last = event->is_last_first ? 0 : turns - 1;
    if (!loop->is_ragged || turn != last)
        return rbi_line_at(&event->line, loop->turns.step);
    return rbi_line_at(&event->last, (count - 1) % loop->turns.step + 1);
}

/* A reserve's bytes are those of its own size function. */
static const struct rbi_model_event *next_event(struct rbi_cursor *at)
{
    const struct rbi_model *model = at->model;
    rbi_assert(at->count > 0 && at->event <= model->event_count);
    while (at->loop < model->loop_count && at->event >= model->loops[at->loop].first) {
        const struct rbi_model_loop *loop = &model->loops[at->loop];
        if (at->event == loop->first + loop->length) {
            at->event = loop->first;
            at->turn++;
        }
        if (at->turn < rbi_turns_at(&loop->turns, at->count)) {
            const struct rbi_model_event *event = &model->events[at->event++];
            at->bytes = bytes_in_turn(event, loop, at->count, at->turn);
            return event;
        }
        at->event = loop->first + loop->length;
        at->turn = 0;
        at->loop++;
    }
    if (at->event == model->event_count)
        return NULL;
    const struct rbi_model_event *event = &model->events[at->event++];
    at->bytes = rbi_line_at(&event->line, at->count);
    return event;
}

static size_t in_units(size_t bytes)
{
    size_t whole;
    return rbi_round_up(bytes, REBATCH_POOL_UNIT_BYTES, &whole) ? whole : bytes;
}

/* The sum of what is allocated until the next reserve. */
static size_t bytes_of_rest(const struct rbi_cursor *reserve, enum rbi_rest which)
{
    struct rbi_cursor at = *reserve;
    const struct rbi_model_event *event;
    size_t sum = 0;
    while ((event = next_event(&at)) && event->kind != RBI_TRACE_RESERVE)
        if (event->kind == RBI_TRACE_ALLOC &&
            !rbi_add(sum, which == RBI_REST_SUM_UNITS ? in_units(at.bytes) : at.bytes, &sum))
            return SIZE_MAX;
    return sum;
}

const struct rbi_model_event *rbi_model_next(struct rbi_cursor *at)
{
    const struct rbi_model_event *event = next_event(at);
    if (event && event->rest)
        at->bytes = bytes_of_rest(at, event->rest);
    return event;
}

/* ---- the most at once ---- */

static uint64_t rounded(const struct rbi_model *model, size_t bytes)
{
    size_t whole;
    const bool is_rounded = model->pool
                                ? rbi_pool_check_size(&whole, model->pool, bytes) == REBATCH_OK
                                : rbi_round_up(bytes, REBATCH_POOL_UNIT_BYTES, &whole);
    return is_rounded ? whole : bytes;
}

/* On top of what lives; what is reserved for later counts only in what is needed. */
static uint64_t most_at_once(const struct rbi_model *model, size_t count, bool with_reserves)
{
    if (!model->has_events)
        return rounded(model, rbi_line_at(&model->peak, count));
    struct rbi_cursor cursor = {.model = model, .count = count};
    const struct rbi_model_event *event;
    uint64_t live = 0, peak = 0;
    while ((event = rbi_model_next(&cursor))) {
        const uint64_t bytes = rounded(model, cursor.bytes);
        uint64_t at_once = live;
        if (event->kind == RBI_TRACE_ALLOC)
            at_once = live += bytes;
        else if (event->kind == RBI_TRACE_RESERVE && with_reserves)
            at_once = live + bytes;
        else if (event->kind == RBI_TRACE_FREE)
            live -= rbi_min(live, bytes);
        peak = rbi_max(peak, at_once);
    }
    return peak;
}

uint64_t rbi_model_need(const struct rbi_model *model, size_t count)
{
    return most_at_once(model, count, true);
}

rebatch_status rbi_live_beside(uint64_t *out, rebatch_pool *pool)
{
    rebatch_pool_stats stats;
    const rebatch_status status = rebatch_pool_get_stats(&stats, pool);
    *out = status ? 0 : stats.live_bytes - rbi_pool_resident_bytes(pool);
    return status;
}

rebatch_status rbi_model_peak(uint64_t *out, const struct rbi_model *model, size_t count)
{
    const rebatch_status status = rbi_live_beside(out, model->pool);
    *out += status ? 0 : most_at_once(model, count, false);
    return status;
}
