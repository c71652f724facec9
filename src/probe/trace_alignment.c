/* Owns the alignment of traces: which call of one is which of another, and which calls are a loop
 * that has more turns for more samples (docs/probe.md, "How sizes are fitted"). Must not know what
 * the sizes come to. */
#include "probe/trace_alignment.h"

#include <string.h>

/* The search is depth first: places where a loop may begin, and returns to one of them. */
#define FORKS_MOST 64
#define RETURNS_MOST 4096

/* Where a trace and the base are compared. */
struct place {
    struct rbi_form *form;
    size_t trace;
    size_t i, j; /* events of the trace, and of the base */
};

static const struct rbi_trace *trace_of(const struct place *at)
{
    return at->form->traces[at->trace];
}

/* ---- turns ---- */

bool rbi_trace_keeps(const struct rbi_trace *trace, const struct rbi_trace_event *event)
{
    return event->kind == RBI_TRACE_ALLOC && !trace->is_freed[event->block];
}

/* How an event of a turn compares with that of the first turn. */
enum likeness { UNLIKE, SMALLER, LIKE };

/* A free in a loop is of a block of the same turn, or of one of another loop. */
static enum likeness compare_frees(const struct rbi_form *form, size_t trace_at, size_t turn,
                                   size_t first, size_t offset)
{
    const struct rbi_trace *trace = form->traces[trace_at], *base = form->base;
    rbi_assert(turn + offset < trace->event_count && first + offset < base->event_count);
    const uint32_t own = trace->events[turn + offset].block;
    const uint32_t other = base->events[first + offset].block;
    for (size_t x = 0; x < offset; x++) {
        if (trace->events[turn + x].kind != RBI_TRACE_ALLOC)
            continue;
        const uint32_t own_first = trace->events[turn + x].block;
        if (own >= own_first && own - own_first == other - base->events[first + x].block)
            return LIKE;
        break;
    }
    const uint32_t slot = form->slots[trace_at][own];
    return slot != RBI_NO_BLOCK && slot == form->slots[form->base_at][other] ? LIKE : UNLIKE;
}

/* `turn`: the first event of the turn, in the trace; `first`: that of the base's first turn. */
static enum likeness compare(const struct rbi_form *form, size_t trace_at, size_t turn,
                             size_t first, size_t offset)
{
    const struct rbi_trace *trace = form->traces[trace_at], *base = form->base;
    const struct rbi_trace_event *own = &trace->events[turn + offset];
    const struct rbi_trace_event *other = &base->events[first + offset];
    if (own->kind != other->kind || own->stream != other->stream)
        return UNLIKE;
    switch (own->kind) {
    case RBI_TRACE_ALLOC:
        if (trace->is_whole && rbi_trace_keeps(trace, own) != rbi_trace_keeps(base, other))
            return UNLIKE;
        return own->bytes == other->bytes ? LIKE : own->bytes < other->bytes ? SMALLER : UNLIKE;
    case RBI_TRACE_RESERVE:
        return own->bytes == other->bytes ? LIKE : UNLIKE;
    case RBI_TRACE_FREE:
        return compare_frees(form, trace_at, turn, first, offset);
    default:
        return UNLIKE;
    }
}

/* Turns like those of the base that begin at `i` of a trace. */
static size_t count_turns(const struct rbi_form *form, size_t trace_at, size_t i,
                          const struct rbi_form_loop *loop)
{
    const struct rbi_trace *trace = form->traces[trace_at];
    const bool is_even =
        loop->sort == RBI_EVEN || (loop->sort == RBI_RAGGED_BUT_BASE && trace == form->base);
    rbi_assert(loop->period > 0);
    size_t turns = 0;
    for (; i + loop->period <= trace->event_count; i += loop->period) {
        enum likeness least = LIKE;
        for (size_t x = 0; x < loop->period && least; x++) {
            const enum likeness likeness = compare(form, trace_at, i, loop->first, x);
            least = likeness < least ? likeness : least;
        }
        if (least == UNLIKE || (least == SMALLER && is_even))
            break;
        turns++;
        if (least == SMALLER)
            break; /* only the last one is */
    }
    return turns;
}

/* Blocks of all turns share the slots of the base's first turn. */
static void share_slots(const struct rbi_form *form, size_t trace_at, size_t i,
                        const struct rbi_form_loop *loop, size_t turns)
{
    const struct rbi_trace *trace = form->traces[trace_at];
    rbi_assert(i + turns * loop->period <= trace->event_count);
    for (size_t n = 0; n < turns * loop->period; n++) {
        const struct rbi_trace_event *other = &form->base->events[loop->first + n % loop->period];
        if (trace->events[i + n].kind == RBI_TRACE_ALLOC)
            form->slots[trace_at][trace->events[i + n].block] =
                form->slots[form->base_at][other->block];
    }
}

/* A block outside of loops has a slot of its own. */
static void share_base_slots(const struct rbi_form *form)
{
    for (uint32_t b = 0; b < form->base->blocks; b++)
        form->slots[form->base_at][b] = b;
    for (size_t i = 0; i < form->loop_count; i++) {
        const struct rbi_form_loop *loop = &form->loops[i];
        share_slots(form, form->base_at, loop->first, loop, loop->turns[form->base_at]);
    }
}

static void note_turns(struct place *at, struct rbi_form_loop *loop, size_t turns)
{
    const struct rbi_form *form = at->form;
    rbi_assert(turns > 0 && loop->period <= RBI_PERIOD_MOST);
    share_slots(form, at->trace, at->i, loop, turns);
    loop->turns[at->trace] = turns;
    const size_t last = at->i + (turns - 1) * loop->period;
    for (size_t x = 0; x < loop->period; x++) {
        loop->last[at->trace][x] = trace_of(at)->events[last + x].bytes;
        *rbi_form_bytes(form, loop->first + x, at->trace) = loop->last[at->trace][x];
    }
    at->i += turns * loop->period;
    at->j = loop->first + loop->turns[form->base_at] * loop->period;
}

static bool overlaps_loop(const struct rbi_form *form, size_t first, size_t end)
{
    for (size_t i = 0; i < form->loop_count; i++) {
        const struct rbi_form_loop *loop = &form->loops[i];
        if (first < loop->first + loop->period * loop->turns[form->base_at] && loop->first < end)
            return true;
    }
    return false;
}

/* A loop that begins here. False when the trace does not have fewer turns than the base, or more if
 * it has more samples. */
static bool make_loop(struct rbi_form_loop *out, const struct place *at, enum rbi_sort sort,
                      size_t period)
{
    const struct rbi_form *form = at->form;
    const bool is_larger = trace_of(at)->count > form->base->count;
    rbi_assert(period > 0 && period <= RBI_PERIOD_MOST);
    *out = (struct rbi_form_loop){.sort = sort, .first = at->j, .period = period};
    const size_t turns = count_turns(form, form->base_at, at->j, out);
    if (turns < 2 || form->loop_count == RBI_LOOPS_MOST ||
        overlaps_loop(form, at->j, at->j + turns * period))
        return false;
    const size_t own = count_turns(form, at->trace, at->i, out);
    if (own == 0 || (is_larger ? own <= turns : own >= turns))
        return false;
    out->turns[form->base_at] = turns;
    for (size_t x = 0; x < period; x++)
        out->last[form->base_at][x] = form->base->events[at->j + (turns - 1) * period + x].bytes;
    return true;
}

/* ---- one by one ---- */

/* A block that the next micro-batch frees is allocated by each, so it is not one-off. */
bool rbi_trace_is_one_off(const struct rbi_trace *trace, const struct rbi_trace_event *event)
{
    return (rbi_trace_keeps(trace, event) &&
            !(trace->has_next && trace->is_passed[event->block])) ||
           event->kind == RBI_TRACE_FREE_PREVIOUS || event->kind == RBI_TRACE_FREE_OLDER;
}

static bool is_same(const struct place *at, const struct rbi_trace_event *own,
                    const struct rbi_trace_event *other)
{
    const struct rbi_form *form = at->form;
    const struct rbi_trace *trace = trace_of(at);
    const bool is_last = at->i + 1 == trace->event_count;
    if (!trace->is_whole && is_last) /* the request that failed: of which kind is not known */
        return other->kind == RBI_TRACE_ALLOC || other->kind == RBI_TRACE_RESERVE;
    if (own->kind != other->kind || own->stream != other->stream)
        return false;
    switch (own->kind) {
    case RBI_TRACE_ALLOC:
        if (!trace->is_whole)
            return true;
        if (rbi_trace_keeps(trace, own) != rbi_trace_keeps(form->base, other))
            return false;
        return !rbi_trace_keeps(trace, own) || !trace->has_next || trace->is_passed[own->block];
    case RBI_TRACE_FREE:
        return form->slots[at->trace][own->block] == form->slots[form->base_at][other->block];
    default:
        return true;
    }
}

static void match(struct place *at, const struct rbi_trace_event *own,
                  const struct rbi_trace_event *other)
{
    struct rbi_form *form = at->form;
    rbi_assert(at->i < trace_of(at)->event_count && at->j < form->base->event_count);
    if (own->kind == RBI_TRACE_ALLOC && other->kind == RBI_TRACE_ALLOC)
        form->slots[at->trace][own->block] = form->slots[form->base_at][other->block];
    *rbi_form_bytes(form, at->j, at->trace) = own->bytes;
    at->i++;
    at->j++;
}

/* One event of either, or both. False when they do not go on alike. */
static bool step_one(struct place *at)
{
    const struct rbi_form *form = at->form;
    const struct rbi_trace *trace = trace_of(at), *base = form->base;
    const struct rbi_trace_event *own = at->i < trace->event_count ? &trace->events[at->i] : NULL;
    const struct rbi_trace_event *other = at->j < base->event_count ? &base->events[at->j] : NULL;
    if (own && other && is_same(at, own, other)) {
        match(at, own, other);
    } else if (own && rbi_trace_is_one_off(trace, own)) {
        if (own->kind == RBI_TRACE_ALLOC)
            form->slots[at->trace][own->block] = RBI_NO_BLOCK;
        at->i++;
    } else if (other && rbi_trace_is_one_off(base, other)) {
        *rbi_form_bytes(form, at->j, at->trace) = RBI_NOT_MET;
        at->j++;
    } else {
        return false;
    }
    return true;
}

/* ---- the look for a form ---- */

/* All turns of a loop. False when there are none, or no size function explains them. */
static bool step_loop(struct place *at, struct rbi_form_loop *loop)
{
    const size_t turns = count_turns(at->form, at->trace, at->i, loop);
    const struct rbi_trace *trace = trace_of(at);
    struct rbi_turns function;
    if (turns == 0 || (!trace->is_whole && at->i + (turns + 1) * loop->period > trace->event_count))
        return false; /* or it was cut short among them */
    note_turns(at, loop, turns);
    return rbi_form_turns(&function, at->form, loop);
}

/* A place where a loop may begin, and what was tried there last. */
struct fork {
    size_t i, j, loop_count;
    enum rbi_sort sort;
    size_t period;
};

struct walk {
    struct place at;
    struct fork forks[FORKS_MOST];
    size_t fork_count, returns;
};

/* The next loop that may begin at a fork; false when there is no other. */
static bool next_loop(struct rbi_form_loop *out, struct fork *fork, const struct place *at)
{
    const enum likeness first = compare(at->form, at->trace, at->i, at->j, 0);
    if (first == UNLIKE)
        return false;
    for (;;) {
        if (fork->period++ == RBI_PERIOD_MOST) {
            fork->period = 0;
            if (++fork->sort == RBI_SORTS)
                return false;
            continue;
        }
        if ((first == LIKE || fork->sort != RBI_EVEN) &&
            make_loop(out, at, fork->sort, fork->period))
            return true;
    }
}

static void add_fork(struct walk *walk)
{
    struct rbi_form_loop loop;
    struct fork fork = {walk->at.i, walk->at.j, walk->at.form->loop_count, RBI_EVEN, 0};
    if (walk->fork_count == FORKS_MOST || !next_loop(&loop, &fork, &walk->at))
        return;
    fork.sort = RBI_EVEN;
    fork.period = 0;
    walk->forks[walk->fork_count++] = fork;
}

/* Goes back to the last place where something else may be tried, and does that. False when there is
 * none. */
static bool go_back(struct walk *walk)
{
    struct rbi_form *form = walk->at.form;
    while (walk->fork_count > 0 && walk->returns++ < RETURNS_MOST) {
        struct fork *fork = &walk->forks[walk->fork_count - 1];
        struct rbi_form_loop *loop = &form->loops[fork->loop_count];
        walk->at.i = fork->i;
        walk->at.j = fork->j;
        form->loop_count = fork->loop_count;
        share_base_slots(form);
        for (size_t j = fork->j; j < form->base->event_count; j++)
            *rbi_form_bytes(form, j, walk->at.trace) = RBI_NOT_MET;
        if (!next_loop(loop, fork, &walk->at)) {
            walk->fork_count--;
            continue;
        }
        form->loop_count++;
        rbi_assert(form->loop_count <= RBI_LOOPS_MOST);
        share_base_slots(form);
        if (step_loop(&walk->at, loop))
            return true;
    }
    return false;
}

/* False when they cannot be aligned. A trace that was cut short ends early. */
static bool align(struct rbi_form *form, size_t trace_at)
{
    struct walk walk = {.at = {form, trace_at, 0, 0}};
    struct place *at = &walk.at;
    const struct rbi_trace *trace = trace_of(at), *base = form->base;
    while (at->i < trace->event_count || at->j < base->event_count) {
        const bool has_both = at->i < trace->event_count && at->j < base->event_count;
        if (!trace->is_whole && !has_both)
            return true;
        struct rbi_form_loop *loop = has_both ? rbi_form_loop_at(form, at->j) : NULL;
        bool goes_on;
        if (loop) {
            goes_on = step_loop(at, loop);
        } else {
            if (has_both && trace->is_whole)
                add_fork(&walk);
            goes_on = step_one(at);
        }
        if (!goes_on && !trace->is_whole)
            return true;
        if (!goes_on && !go_back(&walk))
            return false;
    }
    return true;
}

static void forget(struct rbi_form *form, size_t trace_at)
{
    for (size_t j = 0; j < form->base->event_count; j++)
        *rbi_form_bytes(form, j, trace_at) = RBI_NOT_MET;
    memset(form->slots[trace_at], 0xff,
           (form->traces[trace_at]->blocks + 1) * sizeof *form->slots[trace_at]);
}

/* The smallest first: it differs most from the base, so it shows the loops.
 * False when one cannot be aligned. */
static bool align_rest(struct rbi_form *form)
{
    form->loop_count = 0;
    for (size_t t = 0; t < form->trace_count; t++)
        forget(form, t);
    share_base_slots(form);
    for (size_t j = 0; j < form->base->event_count; j++)
        *rbi_form_bytes(form, j, form->base_at) = form->base->events[j].bytes;
    for (size_t t = 0; t < form->trace_count; t++) {
        if (t == form->base_at || form->is_odd[t] || align(form, t))
            continue;
        form->is_odd[t] = true;
        return false;
    }
    return true;
}

/* Whether a whole trace beside the base has its form; those that have not are left out. */
bool rbi_form_align(struct rbi_form *form)
{
    bool is_met = false;
    while (!align_rest(form))
        ;
    for (size_t t = 0; t < form->trace_count; t++)
        is_met |= t != form->base_at && !form->is_odd[t] && form->traces[t]->is_whole;
    return is_met;
}

bool rbi_form_open(struct rbi_form *form, const struct rbi_traces *traces)
{
    rbi_assert(traces->count > 0 &&
               traces->count < RBI_POINTS_MOST); /* one that was cut joins them */
    for (size_t t = 0; t < traces->count; t++)
        if ((form->traces[form->trace_count++] = traces->whole[t]) == traces->latest)
            form->latest_at = t;
    form->base_at = form->trace_count - 1;
    form->base = form->traces[form->base_at];
    if (traces->cut && traces->cut->event_count && traces->cut->count > form->base->count)
        form->traces[form->trace_count++] = traces->cut;
    form->bytes =
        rbi_heap_calloc(form->base->event_count + 1, RBI_POINTS_MOST * sizeof *form->bytes);
    form->loops = rbi_heap_calloc(RBI_LOOPS_MOST + 1, sizeof *form->loops);
    bool has_memory = form->bytes && form->loops;
    for (size_t t = 0; t < form->trace_count && has_memory; t++) {
        form->slots[t] = rbi_heap_calloc(form->traces[t]->blocks + 1, sizeof *form->slots[t]);
        has_memory = form->slots[t] != NULL;
    }
    return has_memory;
}

void rbi_form_close(struct rbi_form *form)
{
    rbi_heap_free(form->bytes);
    rbi_heap_free(form->loops);
    for (size_t t = 0; t < form->trace_count; t++)
        rbi_heap_free(form->slots[t]);
}
