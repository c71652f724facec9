/* Owns the memory model of aligned traces: each call with its size function.
 * Must not know how traces were aligned. */
#include "probe/trace_alignment.h"

/* The allocation whose block a free releases; in a loop that of the first turn. */
static size_t source_of(const struct rbi_form *form, size_t event)
{
    const uint32_t slot = form->slots[form->base_at][form->base->events[event].block];
    for (size_t j = 0; j < form->base->event_count; j++)
        if (form->base->events[j].kind == RBI_TRACE_ALLOC && form->base->events[j].block == slot)
            return j;
    return event;
}

/* `from`: the event itself, or the allocation whose block it frees. */
static void set_lines(struct rbi_model_event *event, const struct rbi_form *form,
                      const struct rbi_turns *turns, size_t from)
{
    const struct rbi_form_loop *source = rbi_form_loop_around(form, from);
    const struct rbi_points points = rbi_form_points(form, source, from);
    event->line =
        source ? rbi_line_constant(form->base->events[from].bytes) : rbi_line_fit(&points);
    event->last = event->line;
    if (source && source->sort != RBI_EVEN)
        (void)rbi_form_fits_last(&event->last, form, source, turns, from);
}

/* Whether reserve number `reserves`, from 0, asks for the sum of what is allocated until the next
 * one, each in whole units or as asked for. */
static bool asks_for_rest(const struct rbi_trace *trace, size_t reserves, bool in_units)
{
    size_t i = 0, sum = 0;
    for (;; i++) {
        if (i == trace->event_count)
            return false;
        if (trace->events[i].kind == RBI_TRACE_RESERVE && reserves-- == 0)
            break;
    }
    const size_t asked = trace->events[i].bytes;
    for (i++; i < trace->event_count && trace->events[i].kind != RBI_TRACE_RESERVE; i++) {
        size_t bytes = trace->events[i].bytes;
        if (trace->events[i].kind != RBI_TRACE_ALLOC)
            continue;
        if ((in_units && !rbi_round_up(bytes, REBATCH_POOL_UNIT_BYTES, &bytes)) ||
            !rbi_add(sum, bytes, &sum))
            return false;
    }
    return sum == asked && sum > 0;
}

/* Of a reserve of the base; the other traces have as many before it. */
static enum rbi_rest rest_of(const struct rbi_form *form, size_t event)
{
    size_t before = 0;
    bool is_sum = true, is_sum_units = true;
    for (size_t j = 0; j < event; j++)
        before += form->base->events[j].kind == RBI_TRACE_RESERVE;
    for (size_t t = 0; t < form->trace_count; t++) {
        if (form->is_odd[t] || !form->traces[t]->is_whole)
            continue;
        is_sum = is_sum && asks_for_rest(form->traces[t], before, false);
        is_sum_units = is_sum_units && asks_for_rest(form->traces[t], before, true);
    }
    return is_sum_units ? RBI_REST_SUM_UNITS : is_sum ? RBI_REST_SUM : RBI_REST_NONE;
}

static void add_event(struct rbi_model *model, const struct rbi_form *form,
                      const struct rbi_form_loop *loop, const struct rbi_turns *turns, size_t j)
{
    const struct rbi_trace_event *event = &form->base->events[j];
    rbi_assert(model->event_count <= j); /* one each at the most */
    struct rbi_model_event *added = &model->events[model->event_count++];
    *added = (struct rbi_model_event){.kind = event->kind, .stream = event->stream};
    if (event->kind == RBI_TRACE_ALLOC || event->kind == RBI_TRACE_FREE)
        added->slot = form->slots[form->base_at][event->block];
    const size_t from = event->kind == RBI_TRACE_FREE ? source_of(form, j) : j;
    if (event->kind == RBI_TRACE_FREE && loop && rbi_form_loop_around(form, from) != loop) {
        rbi_assert(j + loop->period < form->base->event_count); /* it has two turns */
        const uint32_t second = form->base->events[j + loop->period].block;
        added->is_queued = event->block < second;
        added->is_last_first = !added->is_queued;
    }
    if (event->kind == RBI_TRACE_RESERVE && !loop)
        added->rest = rest_of(form, j);
    set_lines(added, form, turns, from);
    model->is_rough |= loop || added->line.run > 1 || added->line.residual > 0;
}

/* A free of a block that the micro-batch before left. False when the model does not have it. */
static bool add_previous(struct rbi_model *model, const struct rbi_form *form,
                         const struct rbi_trace_event *event)
{
    for (size_t t = 0; t < form->trace_count; t++) {
        const struct rbi_trace *trace = form->traces[t];
        if (!trace->is_whole || trace->count != form->base->before || form->is_odd[t] ||
            event->block >= trace->blocks || form->slots[t][event->block] == RBI_NO_BLOCK)
            continue;
        model->events[model->event_count++] =
            (struct rbi_model_event){.kind = RBI_TRACE_FREE_PREVIOUS,
                                     .slot = form->slots[t][event->block],
                                     .line = rbi_line_constant(0)};
        model->keeps = true;
        return true;
    }
    return false;
}

static void add_kept(struct rbi_model *model, const struct rbi_form *form)
{
    const struct rbi_trace *latest = form->traces[form->latest_at];
    for (size_t i = 0; i < latest->event_count; i++) {
        const struct rbi_trace_event *event = &latest->events[i];
        const uint32_t slot = rbi_trace_keeps(latest, event)
                                  ? form->slots[form->latest_at][event->block]
                                  : RBI_NO_BLOCK;
        if (slot != RBI_NO_BLOCK)
            model->kept[model->kept_count++] = (struct rbi_kept){slot, event->address};
    }
    rbi_assert(model->kept_count <= latest->blocks);
    const struct rbi_trace *first = form->traces[0];
    for (uint32_t block = 0; block < first->blocks; block++)
        if (!first->is_freed[block] && form->slots[0][block] != RBI_NO_BLOCK)
            model->first[model->first_count++] =
                (struct rbi_kept_first){form->slots[0][block], block};
}

/* Whether another trace has the event too; else it happens once. */
static bool is_met(const struct rbi_form *form, size_t event)
{
    for (size_t t = 0; t < form->trace_count; t++)
        if (t != form->base_at && form->traces[t]->is_whole &&
            *rbi_form_bytes(form, event, t) != RBI_NOT_MET)
            return true;
    return false;
}

/* Two sizes this near lie on a line whatever their function is. */
#define NEAR 8
static bool is_too_near(const struct rbi_form *form)
{
    const size_t first = form->traces[0]->count;
    rbi_assert(first <= form->base->count);
    return form->trace_count == 2 && form->base->count - first < NEAR;
}

/* Whether the last turn may be smaller: of its own allocations, or of those that it frees. */
static bool is_ragged(const struct rbi_form *form, const struct rbi_form_loop *loop)
{
    for (size_t j = loop->first; j < loop->first + loop->period; j++) {
        const bool is_free = form->base->events[j].kind == RBI_TRACE_FREE;
        const struct rbi_form_loop *source =
            rbi_form_loop_around(form, is_free ? source_of(form, j) : j);
        if (source && source->sort != RBI_EVEN)
            return true;
    }
    return false;
}

/* False when no size function explains what is done in turns. */
static bool build(struct rbi_model *model, struct rbi_form *form)
{
    for (size_t j = 0; j < form->base->event_count;) {
        const struct rbi_trace_event *event = &form->base->events[j];
        const struct rbi_form_loop *loop = rbi_form_loop_at(form, j);
        struct rbi_turns turns = {0, 1};
        if (loop) {
            if (!rbi_form_turns(&turns, form, loop))
                return false;
            rbi_assert(model->loop_count < RBI_LOOPS_MOST);
            model->loops[model->loop_count++] = (struct rbi_model_loop){
                model->event_count, loop->period, turns, is_ragged(form, loop)};
            for (size_t x = 0; x < loop->period; x++)
                add_event(model, form, loop, &turns, j + x);
            j += loop->period * loop->turns[form->base_at];
            continue;
        }
        if (event->kind == RBI_TRACE_FREE_PREVIOUS)
            (void)add_previous(model, form, event);
        else if (event->kind != RBI_TRACE_FREE_OLDER && is_met(form, j))
            add_event(model, form, NULL, &turns, j);
        j++;
    }
    add_kept(model, form);
    model->is_rough |= is_too_near(form);
    return true;
}

rebatch_status rbi_model_build(struct rbi_model *out, const struct rbi_traces *traces)
{
    struct rbi_form form = {0};
    const bool is_open = rbi_form_open(&form, traces);
    const size_t most = is_open ? form.base->event_count + 1 : 1;
    out->events = rbi_heap_calloc(most, sizeof *out->events);
    out->loops = rbi_heap_calloc(RBI_LOOPS_MOST, sizeof *out->loops);
    out->kept =
        rbi_heap_calloc(is_open ? form.traces[form.latest_at]->blocks + 1 : 1, sizeof *out->kept);
    out->first = rbi_heap_calloc(is_open ? form.traces[0]->blocks + 1 : 1, sizeof *out->first);
    const bool has_memory = is_open && out->events && out->loops && out->kept && out->first;
    if (has_memory) {
        out->slots = form.base->blocks;
        out->has_events = rbi_form_align(&form) && build(out, &form);
    }
    rbi_form_close(&form);
    return has_memory ? REBATCH_OK
                      : rbi_error(REBATCH_E_HOST_OOM, "no host memory for a memory model");
}
