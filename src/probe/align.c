/* Owns the common form of traces: which call of one is which of another, and what is done in turns,
 * more of them for more samples.
 * Must not know what the sizes come to. */
#include "probe/probe.h"

#include <string.h>

/* Calls that make one turn, at the most. */
#define PERIOD_MOST 12
#define LOOPS_MOST 64
#define NOT_MET SIZE_MAX
/* Places where a loop may or may not begin, and how often the look for a form goes back to one. */
#define FORKS_MOST 64
#define RETURNS_MOST 4096

/* How the turns of a loop are alike. */
enum sort {
    EVEN,            /* all of one size */
    RAGGED,          /* the last may be smaller */
    RAGGED_BUT_BASE, /* but is not in the base */
    SORTS
};

/* What the base, the largest whole trace, does in turns. */
struct loop {
    enum sort sort;
    size_t first, period;          /* events of the base */
    size_t turns[RBI_POINTS_MOST]; /* of each trace; 0: as many as the base, one by one */
    size_t last[RBI_POINTS_MOST][PERIOD_MOST]; /* bytes of the last turn, where turns is not 0 */
};

/* `bytes` has one entry for each event of the base and trace; NOT_MET: the trace has no such
 * event. */
struct form {
    const struct rbi_trace *base;
    const struct rbi_trace *traces[RBI_POINTS_MOST]; /* by rising count; the base is one of them */
    size_t trace_count, base_at, latest_at;
    size_t unit; /* of all sizes */
    bool is_cautious;
    bool is_odd[RBI_POINTS_MOST]; /* not of the base's form */
    struct loop *loops;
    size_t loop_count;
    size_t *bytes;
    uint32_t *slots[RBI_POINTS_MOST]; /* of each block of a trace; RBI_NO_BLOCK: none of the base */
};

/* Where a trace and the base are compared. */
struct place {
    struct form *form;
    size_t trace;
    size_t i, j; /* events of the trace, and of the base */
};

static const struct rbi_trace *trace_of(const struct place *at)
{
    return at->form->traces[at->trace];
}

static size_t *bytes_at(const struct form *form, size_t event, size_t trace)
{
    return &form->bytes[event * RBI_POINTS_MOST + trace];
}

/* ---- turns ---- */

static bool is_kept(const struct rbi_trace *trace, const struct rbi_trace_event *event)
{
    return event->kind == RBI_TRACE_ALLOC && !trace->is_freed[event->block];
}

/* How an event of a later turn is like the one of the first. */
enum likeness { UNLIKE, SMALLER, LIKE };

/* A free in turns is of what the same turn has made, or of a list that other turns have filled. */
static enum likeness compare_frees(const struct form *form, size_t trace_at, size_t turn,
                                   size_t first, size_t offset)
{
    const struct rbi_trace *trace = form->traces[trace_at], *base = form->base;
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
static enum likeness compare(const struct form *form, size_t trace_at, size_t turn, size_t first,
                             size_t offset)
{
    const struct rbi_trace *trace = form->traces[trace_at], *base = form->base;
    const struct rbi_trace_event *own = &trace->events[turn + offset];
    const struct rbi_trace_event *other = &base->events[first + offset];
    if (own->kind != other->kind || own->stream != other->stream)
        return UNLIKE;
    switch (own->kind) {
    case RBI_TRACE_ALLOC:
        if (trace->is_whole && is_kept(trace, own) != is_kept(base, other))
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
static size_t count_turns(const struct form *form, size_t trace_at, size_t i,
                          const struct loop *loop)
{
    const struct rbi_trace *trace = form->traces[trace_at];
    const bool is_even =
        loop->sort == EVEN || (loop->sort == RAGGED_BUT_BASE && trace == form->base);
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

/* The lists that what is made in turns goes to are those of the base's first turn. */
static void share_slots(const struct form *form, size_t trace_at, size_t i, const struct loop *loop,
                        size_t turns)
{
    const struct rbi_trace *trace = form->traces[trace_at];
    for (size_t n = 0; n < turns * loop->period; n++) {
        const struct rbi_trace_event *other = &form->base->events[loop->first + n % loop->period];
        if (trace->events[i + n].kind == RBI_TRACE_ALLOC)
            form->slots[trace_at][trace->events[i + n].block] =
                form->slots[form->base_at][other->block];
    }
}

/* Of the loops that there are: each other block has a list of its own. */
static void share_base_slots(const struct form *form)
{
    for (uint32_t b = 0; b < form->base->blocks; b++)
        form->slots[form->base_at][b] = b;
    for (size_t i = 0; i < form->loop_count; i++) {
        const struct loop *loop = &form->loops[i];
        share_slots(form, form->base_at, loop->first, loop, loop->turns[form->base_at]);
    }
}

static void note_turns(struct place *at, struct loop *loop, size_t turns)
{
    const struct form *form = at->form;
    share_slots(form, at->trace, at->i, loop, turns);
    loop->turns[at->trace] = turns;
    const size_t last = at->i + (turns - 1) * loop->period;
    for (size_t x = 0; x < loop->period; x++) {
        loop->last[at->trace][x] = trace_of(at)->events[last + x].bytes;
        *bytes_at(form, loop->first + x, at->trace) = loop->last[at->trace][x];
    }
    at->i += turns * loop->period;
    at->j = loop->first + loop->turns[form->base_at] * loop->period;
}

static struct loop *loop_at(const struct form *form, size_t first)
{
    for (size_t i = 0; i < form->loop_count; i++)
        if (form->loops[i].first == first)
            return &form->loops[i];
    return NULL;
}

static bool overlaps_loop(const struct form *form, size_t first, size_t end)
{
    for (size_t i = 0; i < form->loop_count; i++) {
        const struct loop *loop = &form->loops[i];
        if (first < loop->first + loop->period * loop->turns[form->base_at] && loop->first < end)
            return true;
    }
    return false;
}

/* What the trace does in fewer turns than the base, or, when it is of more samples, in more. False
 * when it is not so. */
static bool make_loop(struct loop *out, const struct place *at, enum sort sort, size_t period)
{
    const struct form *form = at->form;
    const bool is_larger = trace_of(at)->count > form->base->count;
    *out = (struct loop){.sort = sort, .first = at->j, .period = period};
    const size_t turns = count_turns(form, form->base_at, at->j, out);
    if (turns < 2 || form->loop_count == LOOPS_MOST ||
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

/* What is passed on to the next micro-batch, which frees it, is done by every one. */
bool rbi_trace_is_one_off(const struct rbi_trace *trace, const struct rbi_trace_event *event)
{
    return (is_kept(trace, event) && !(trace->has_next && trace->is_passed[event->block])) ||
           event->kind == RBI_TRACE_FREE_PREVIOUS || event->kind == RBI_TRACE_FREE_OLDER;
}

static bool is_same(const struct place *at, const struct rbi_trace_event *own,
                    const struct rbi_trace_event *other)
{
    const struct form *form = at->form;
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
        if (is_kept(trace, own) != is_kept(form->base, other))
            return false;
        return !is_kept(trace, own) || !trace->has_next || trace->is_passed[own->block];
    case RBI_TRACE_FREE:
        return form->slots[at->trace][own->block] == form->slots[form->base_at][other->block];
    default:
        return true;
    }
}

static void match(struct place *at, const struct rbi_trace_event *own,
                  const struct rbi_trace_event *other)
{
    struct form *form = at->form;
    if (own->kind == RBI_TRACE_ALLOC && other->kind == RBI_TRACE_ALLOC)
        form->slots[at->trace][own->block] = form->slots[form->base_at][other->block];
    *bytes_at(form, at->j, at->trace) = own->bytes;
    at->i++;
    at->j++;
}

/* One event of either, or both. False when they do not go on alike. */
static bool step_one(struct place *at)
{
    const struct form *form = at->form;
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
        *bytes_at(form, at->j, at->trace) = NOT_MET;
        at->j++;
    } else {
        return false;
    }
    return true;
}

/* ---- laws of turns ---- */

/* The sizes that are known of an event, in a loop those of the last turn, and which of them is the
 * base's. */
static struct rbi_points points_of(const struct form *form, const struct loop *loop, size_t event)
{
    struct rbi_points points = {.unit = form->unit, .is_cautious = form->is_cautious};
    for (size_t t = 0; t < form->trace_count; t++) {
        size_t bytes = *bytes_at(form, event, t);
        if (bytes == NOT_MET)
            continue;
        if (loop && loop->turns[t])
            bytes = loop->last[t][event - loop->first];
        else if (loop)
            bytes = *bytes_at(form, event + (loop->turns[form->base_at] - 1) * loop->period, t);
        if (t == form->base_at)
            points.base = points.count;
        points.at[points.count++] = (struct rbi_point){form->traces[t]->count, bytes};
    }
    return points;
}

static size_t turns_of(struct rbi_point *points, const struct form *form, const struct loop *loop)
{
    size_t count = 0;
    for (size_t t = 0; t < form->trace_count; t++) {
        const size_t turns = loop->turns[t] ? loop->turns[t] : loop->turns[form->base_at];
        if (*bytes_at(form, loop->first, t) != NOT_MET)
            points[count++] = (struct rbi_point){form->traces[t]->count, turns};
    }
    return count;
}

/* Samples that are left for the last turn. */
static size_t left_for_last(const struct rbi_turns *turns, size_t count)
{
    return (count - 1) % turns->step + 1;
}

/* Whether the sizes of the last turns are in proportion to the samples that are left for them. */
static bool fits_last(struct rbi_line *out, const struct form *form, const struct loop *loop,
                      const struct rbi_turns *turns, size_t event)
{
    const struct rbi_point full = {turns->step, form->base->events[event].bytes};
    const struct rbi_points points = points_of(form, loop, event);
    *out = rbi_line_scale(&full);
    for (size_t k = 0; k < points.count; k++) {
        const struct rbi_point *last = &points.at[k];
        if (rbi_line_at(out, left_for_last(turns, last->count)) != last->bytes)
            return false;
    }
    return true;
}

static bool explains(struct rbi_turns *turns, const struct form *form, const struct loop *loop,
                     size_t step, const struct rbi_point *points, size_t count)
{
    struct rbi_line line;
    bool fits = rbi_turns_explain(turns, step, points, count);
    for (size_t x = 0; x < loop->period && fits && loop->sort != EVEN; x++)
        if (form->base->events[loop->first + x].kind == RBI_TRACE_ALLOC)
            fits = fits_last(&line, form, loop, turns, loop->first + x);
    return fits;
}

/* Code works in pieces of powers of two more often than of other sizes; of the sizes that explain
 * what was seen the smallest makes most pieces. */
static bool choose_turns(struct rbi_turns *out, const struct form *form, const struct loop *loop)
{
    struct rbi_point points[RBI_POINTS_MOST];
    const size_t count = turns_of(points, form, loop);
    bool is_found = false;
    for (size_t step = 1; step <= form->base->count; step++) {
        struct rbi_turns turns;
        if ((is_found && !rbi_is_power_of_two(step)) ||
            !explains(&turns, form, loop, step, points, count))
            continue;
        *out = turns;
        is_found = true;
        if (rbi_is_power_of_two(step))
            break;
    }
    return is_found;
}

/* ---- the look for a form ---- */

/* All turns of a loop. False when there are none, or there is no law in them. */
static bool step_loop(struct place *at, struct loop *loop)
{
    const size_t turns = count_turns(at->form, at->trace, at->i, loop);
    const struct rbi_trace *trace = trace_of(at);
    struct rbi_turns law;
    if (turns == 0 || (!trace->is_whole && at->i + (turns + 1) * loop->period > trace->event_count))
        return false; /* or it was cut short among them */
    note_turns(at, loop, turns);
    return choose_turns(&law, at->form, loop);
}

/* A place where a loop may begin, and what was tried there last. */
struct fork {
    size_t i, j, loop_count;
    enum sort sort;
    size_t period;
};

struct walk {
    struct place at;
    struct fork forks[FORKS_MOST];
    size_t fork_count, returns;
};

/* The next loop that may begin at a fork; false when there is no other. */
static bool next_loop(struct loop *out, struct fork *fork, const struct place *at)
{
    const enum likeness first = compare(at->form, at->trace, at->i, at->j, 0);
    if (first == UNLIKE)
        return false;
    for (;;) {
        if (fork->period++ == PERIOD_MOST) {
            fork->period = 0;
            if (++fork->sort == SORTS)
                return false;
            continue;
        }
        if ((first == LIKE || fork->sort != EVEN) && make_loop(out, at, fork->sort, fork->period))
            return true;
    }
}

static void add_fork(struct walk *walk)
{
    struct loop loop;
    struct fork fork = {walk->at.i, walk->at.j, walk->at.form->loop_count, EVEN, 0};
    if (walk->fork_count == FORKS_MOST || !next_loop(&loop, &fork, &walk->at))
        return;
    fork.sort = EVEN;
    fork.period = 0;
    walk->forks[walk->fork_count++] = fork;
}

/* Goes back to the last place where something else may be tried, and does that. False when there is
 * none. */
static bool go_back(struct walk *walk)
{
    struct form *form = walk->at.form;
    while (walk->fork_count > 0 && walk->returns++ < RETURNS_MOST) {
        struct fork *fork = &walk->forks[walk->fork_count - 1];
        struct loop *loop = &form->loops[fork->loop_count];
        walk->at.i = fork->i;
        walk->at.j = fork->j;
        form->loop_count = fork->loop_count;
        share_base_slots(form);
        for (size_t j = fork->j; j < form->base->event_count; j++)
            *bytes_at(form, j, walk->at.trace) = NOT_MET;
        if (!next_loop(loop, fork, &walk->at)) {
            walk->fork_count--;
            continue;
        }
        form->loop_count++;
        share_base_slots(form);
        if (step_loop(&walk->at, loop))
            return true;
    }
    return false;
}

/* False when they have no common form. One that was cut short ends where it ends. */
static bool align(struct form *form, size_t trace_at)
{
    struct walk walk = {.at = {form, trace_at, 0, 0}};
    struct place *at = &walk.at;
    const struct rbi_trace *trace = trace_of(at), *base = form->base;
    while (at->i < trace->event_count || at->j < base->event_count) {
        const bool has_both = at->i < trace->event_count && at->j < base->event_count;
        if (!trace->is_whole && !has_both)
            return true;
        struct loop *loop = has_both ? loop_at(form, at->j) : NULL;
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

static void forget(struct form *form, size_t trace_at)
{
    for (size_t j = 0; j < form->base->event_count; j++)
        *bytes_at(form, j, trace_at) = NOT_MET;
    memset(form->slots[trace_at], 0xff,
           (form->traces[trace_at]->blocks + 1) * sizeof *form->slots[trace_at]);
}

/* The smallest first: it is the least like the base, and so tells first what is done in turns.
 * False when one turned out to be odd. */
static bool align_rest(struct form *form)
{
    form->loop_count = 0;
    for (size_t t = 0; t < form->trace_count; t++)
        forget(form, t);
    share_base_slots(form);
    for (size_t j = 0; j < form->base->event_count; j++)
        *bytes_at(form, j, form->base_at) = form->base->events[j].bytes;
    for (size_t t = 0; t < form->trace_count; t++) {
        if (t == form->base_at || form->is_odd[t] || align(form, t))
            continue;
        form->is_odd[t] = true;
        return false;
    }
    return true;
}

/* Whether a whole trace beside the base has its form; those that have not are left out. */
static bool align_all(struct form *form)
{
    bool is_met = false;
    while (!align_rest(form))
        ;
    for (size_t t = 0; t < form->trace_count; t++)
        is_met |= t != form->base_at && !form->is_odd[t] && form->traces[t]->is_whole;
    return is_met;
}

static bool open_form(struct form *form, const struct rbi_traces *traces)
{
    for (size_t t = 0; t < traces->count; t++)
        if ((form->traces[form->trace_count++] = traces->whole[t]) == traces->latest)
            form->latest_at = t;
    form->base_at = form->trace_count - 1;
    form->base = form->traces[form->base_at];
    if (traces->cut && traces->cut->event_count && traces->cut->count > form->base->count)
        form->traces[form->trace_count++] = traces->cut;
    form->bytes =
        rbi_heap_calloc(form->base->event_count + 1, RBI_POINTS_MOST * sizeof *form->bytes);
    form->loops = rbi_heap_calloc(LOOPS_MOST + 1, sizeof *form->loops);
    bool has_memory = form->bytes && form->loops;
    for (size_t t = 0; t < form->trace_count && has_memory; t++) {
        form->slots[t] = rbi_heap_calloc(form->traces[t]->blocks + 1, sizeof *form->slots[t]);
        has_memory = form->slots[t] != NULL;
    }
    return has_memory;
}

static void close_form(struct form *form)
{
    rbi_heap_free(form->bytes);
    rbi_heap_free(form->loops);
    for (size_t t = 0; t < form->trace_count; t++)
        rbi_heap_free(form->slots[t]);
}

/* ---- the model ---- */

/* The allocation that a free takes back; the last of a list that is filled in turns. */
static size_t source_of(const struct form *form, size_t event)
{
    const uint32_t slot = form->slots[form->base_at][form->base->events[event].block];
    for (size_t j = 0; j < form->base->event_count; j++)
        if (form->base->events[j].kind == RBI_TRACE_ALLOC && form->base->events[j].block == slot)
            return j;
    return event;
}

/* The loop that an event of a first turn is in; NULL: none. */
static const struct loop *loop_around(const struct form *form, size_t event)
{
    for (size_t i = 0; i < form->loop_count; i++)
        if (form->loops[i].first <= event && event < form->loops[i].first + form->loops[i].period)
            return &form->loops[i];
    return NULL;
}

/* `from`: the allocation, of a free that which it takes back. */
static void set_lines(struct rbi_model_event *event, const struct form *form,
                      const struct rbi_turns *turns, size_t from)
{
    const struct loop *source = loop_around(form, from);
    const struct rbi_points points = points_of(form, source, from);
    event->line =
        source ? rbi_line_constant(form->base->events[from].bytes) : rbi_line_fit(&points);
    event->last = event->line;
    if (source && source->sort != EVEN)
        (void)fits_last(&event->last, form, source, turns, from);
}

static void add_event(struct rbi_model *model, const struct form *form, const struct loop *loop,
                      const struct rbi_turns *turns, size_t j)
{
    const struct rbi_trace_event *event = &form->base->events[j];
    struct rbi_model_event *added = &model->events[model->event_count++];
    *added = (struct rbi_model_event){.kind = event->kind, .stream = event->stream};
    if (event->kind == RBI_TRACE_ALLOC || event->kind == RBI_TRACE_FREE)
        added->slot = form->slots[form->base_at][event->block];
    const size_t from = event->kind == RBI_TRACE_FREE ? source_of(form, j) : j;
    if (event->kind == RBI_TRACE_FREE && loop && loop_around(form, from) != loop) {
        const uint32_t second = form->base->events[j + loop->period].block;
        added->is_queued = event->block < second;
        added->is_last_first = !added->is_queued;
    }
    set_lines(added, form, turns, from);
    model->is_rough |= loop || added->line.step > 1 || added->line.run > 1;
}

/* A free of what the micro-batch before has kept. False when that is none of the model's. */
static bool add_previous(struct rbi_model *model, const struct form *form,
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
        return true;
    }
    return false;
}

/* Of every size, small ones too, of which there must be enough to tell: so many are not multiples
 * of one unit by chance. */
#define LEAST_SIZES 3
static size_t unit_of_all(const struct rbi_traces *traces)
{
    size_t bits = (size_t)1 << 21, sizes = 0;
    for (size_t t = 0; t < traces->count; t++) {
        sizes = 0;
        for (size_t i = 0; i < traces->whole[t]->event_count; i++) {
            bits |= traces->whole[t]->events[i].bytes;
            sizes += traces->whole[t]->events[i].bytes != 0;
        }
    }
    return sizes < LEAST_SIZES ? 1 : bits & (~bits + 1);
}

static void add_kept(struct rbi_model *model, const struct form *form)
{
    const struct rbi_trace *latest = form->traces[form->latest_at];
    for (size_t i = 0; i < latest->event_count; i++) {
        const struct rbi_trace_event *event = &latest->events[i];
        const uint32_t slot =
            is_kept(latest, event) ? form->slots[form->latest_at][event->block] : RBI_NO_BLOCK;
        if (slot != RBI_NO_BLOCK)
            model->kept[model->kept_count++] = (struct rbi_kept){slot, event->address};
    }
}

/* An event of the base that no other trace has was done once. */
static bool is_met(const struct form *form, size_t event)
{
    for (size_t t = 0; t < form->trace_count; t++)
        if (t != form->base_at && form->traces[t]->is_whole && *bytes_at(form, event, t) != NOT_MET)
            return true;
    return false;
}

/* Through two points that are near each other goes a line whatever the law is. */
#define NEAR 8
static bool is_too_near(const struct form *form)
{
    const size_t first = form->traces[0]->count;
    return form->trace_count == 2 && form->base->count - first < NEAR;
}

/* False when what is done in turns has no law. */
static bool emit(struct rbi_model *model, struct form *form)
{
    for (size_t j = 0; j < form->base->event_count;) {
        const struct rbi_trace_event *event = &form->base->events[j];
        const struct loop *loop = loop_at(form, j);
        struct rbi_turns turns = {0, 1};
        if (loop) {
            if (!choose_turns(&turns, form, loop))
                return false;
            model->loops[model->loop_count++] = (struct rbi_model_loop){
                model->event_count, loop->period, turns, loop->sort != EVEN};
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

rebatch_status rbi_model_align(struct rbi_model *out, const struct rbi_traces *traces)
{
    struct form form = {.unit = unit_of_all(traces), .is_cautious = traces->is_cautious};
    const bool is_open = open_form(&form, traces);
    const size_t most = is_open ? form.base->event_count + 1 : 1;
    out->events = rbi_heap_calloc(most, sizeof *out->events);
    out->loops = rbi_heap_calloc(LOOPS_MOST, sizeof *out->loops);
    out->kept =
        rbi_heap_calloc(is_open ? form.traces[form.latest_at]->blocks + 1 : 1, sizeof *out->kept);
    const bool has_memory = is_open && out->events && out->loops && out->kept;
    if (has_memory) {
        out->slots = form.base->blocks;
        out->has_events = align_all(&form) && emit(out, &form);
    }
    close_form(&form);
    return has_memory ? REBATCH_OK
                      : rbi_error(REBATCH_E_HOST_OOM, "no host memory for a memory model");
}
