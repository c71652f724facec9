/* Owns the memory model: two traces made into one whose sizes are functions of the micro-batch.
 * Must not know whether it fits. */
#include "probe/probe.h"

#include <string.h>

/* ---- lines ---- */

/* Sizes that code rounds up are rounded to powers of two, rarely to larger ones than this. */
#define LARGEST_UNIT ((size_t)1 << 21)

/* So many sizes are not multiples of one unit by chance, nor few of sizes that were rounded. */
#define LEAST_SIZES 3

static size_t common_unit(size_t a, size_t b)
{
    const size_t bits = a | b | LARGEST_UNIT;
    return bits & (~bits + 1);
}

/* Through two points. When the rise does not divide by the run, the sizes were rounded up to some
 * unit: the largest that divides both is the most that it can be. The same holds when all sizes
 * are multiples of one unit. What was rounded is less than a unit below either point, so a rise of
 * one unit more bounds it from above. `unit`: that of all sizes, 1: none. */
static struct rbi_line line_through(size_t low, size_t low_bytes, size_t high, size_t high_bytes,
                                    size_t unit)
{
    struct rbi_line line = {
        .count = high, .run = high - low, .bytes = (int64_t)high_bytes, .unit = 1};
    line.rise = (int64_t)high_bytes - (int64_t)low_bytes;
    if (line.rise % (int64_t)line.run != 0)
        line.unit = common_unit(low_bytes, high_bytes);
    else if (unit > 1)
        line.unit = unit;
    if (line.unit > 1 || line.rise % (int64_t)line.run != 0) {
        line.rise += (int64_t)line.unit;
    }
    return line;
}

/* Of every size of both traces, small ones too, of which there must be enough to tell. */
static size_t unit_of_all(const struct rbi_trace *low, const struct rbi_trace *high)
{
    size_t bits = LARGEST_UNIT, sizes = 0;
    for (size_t i = 0; i < low->event_count; i++)
        bits |= low->events[i].bytes;
    for (size_t i = 0; i < high->event_count; i++) {
        bits |= high->events[i].bytes;
        sizes += high->events[i].bytes != 0;
    }
    return sizes < LEAST_SIZES ? 1 : bits & (~bits + 1);
}

static struct rbi_line constant(size_t count, size_t bytes)
{
    return (struct rbi_line){.count = count, .run = 1, .bytes = (int64_t)bytes, .unit = 1};
}

/* More than any device has, so that it cannot be mistaken for a size. */
#define LARGEST_BYTES (SIZE_MAX / 4)

size_t rbi_line_at(const struct rbi_line *line, size_t count)
{
    int64_t distance, product;
    if (__builtin_sub_overflow(count, line->count, &distance) ||
        __builtin_mul_overflow(line->rise, distance, &product))
        return line->rise < 0 ? 0 : LARGEST_BYTES;
    const int64_t run = (int64_t)line->run;
    const int64_t quotient = product / run + (product % run > 0); /* rounded up */
    int64_t bytes;
    if (__builtin_add_overflow(line->bytes, quotient, &bytes))
        return LARGEST_BYTES;
    if (bytes <= 0)
        return 0;
    return rbi_min((size_t)(bytes - bytes % (int64_t)line->unit), LARGEST_BYTES);
}

/* ---- two traces in one form ---- */

/* Where the traces are compared, and which block of one is which of the model. */
struct alignment {
    size_t unit; /* of all sizes */
    const struct rbi_trace *low, *high;
    struct rbi_model *model;
    uint32_t *of_low, *of_high;     /* RBI_NO_BLOCK: not in the model */
    size_t *low_event, *high_event; /* of each event of the model */
};

static bool is_kept(const struct rbi_trace *trace, const struct rbi_trace_event *event)
{
    return event->kind == RBI_TRACE_ALLOC && !trace->is_freed[event->block];
}

/* What one micro-batch does and the next does not: a buffer made at first use, which then stays. */
static bool is_one_off(const struct rbi_trace *trace, const struct rbi_trace_event *event)
{
    return is_kept(trace, event) || event->kind == RBI_TRACE_FREE_PREVIOUS ||
           event->kind == RBI_TRACE_FREE_OLDER;
}

static bool is_same(const struct alignment *a, const struct rbi_trace_event *low,
                    const struct rbi_trace_event *high)
{
    if (low->kind != high->kind)
        return false;
    switch (low->kind) {
    case RBI_TRACE_ALLOC:
        return is_kept(a->low, low) == is_kept(a->high, high);
    case RBI_TRACE_FREE:
        return a->of_low[low->block] == a->of_high[high->block];
    default:
        return true;
    }
}

static void add(struct alignment *a, size_t i, size_t j)
{
    const struct rbi_trace_event *low = i == SIZE_MAX ? NULL : &a->low->events[i];
    const struct rbi_trace_event *high = &a->high->events[j];
    struct rbi_model *model = a->model;
    struct rbi_model_event *event = &model->events[model->event_count];
    a->low_event[model->event_count] = i;
    a->high_event[model->event_count] = j;
    model->event_count++;
    *event =
        (struct rbi_model_event){.kind = high->kind, .block = high->block, .stream = high->stream};
    if (high->kind == RBI_TRACE_ALLOC) {
        event->block = model->blocks++;
        event->kept_at = is_kept(a->high, high) ? high->address : NULL;
        a->of_low[low->block] = a->of_high[high->block] = event->block;
    } else if (high->kind == RBI_TRACE_FREE) {
        event->block = a->of_high[high->block];
    }
    event->line =
        low ? line_through(a->low->count, low->bytes, a->high->count, high->bytes, a->unit)
            : constant(a->high->count, high->bytes);
}

/* False when the traces have no common form. One that was cut short by an OOM ends where it
 * ends. */
static bool align(struct alignment *a)
{
    size_t i = 0, j = 0;
    while (i < a->low->event_count || j < a->high->event_count) {
        const struct rbi_trace_event *low = i < a->low->event_count ? &a->low->events[i] : NULL;
        const struct rbi_trace_event *high = j < a->high->event_count ? &a->high->events[j] : NULL;
        if (low && high && is_same(a, low, high)) {
            if (high->kind != RBI_TRACE_FREE_OLDER)
                add(a, i, j);
            i++;
            j++;
        } else if (low && is_one_off(a->low, low)) {
            i++;
        } else if (high && is_one_off(a->high, high)) {
            if (high->kind == RBI_TRACE_FREE_PREVIOUS)
                add(a, SIZE_MAX, j);
            j++;
        } else {
            return false;
        }
    }
    return true;
}

/* A free of what the micro-batch before has kept: `low` was the one before `high`. Those whose
 * block is none of the model's are left out. */
static void resolve_previous(struct alignment *a)
{
    struct rbi_model *model = a->model;
    size_t kept = 0;
    for (size_t i = 0; i < model->event_count; i++) {
        struct rbi_model_event event = model->events[i];
        if (event.kind == RBI_TRACE_FREE_PREVIOUS) {
            event.block = event.block < a->low->blocks ? a->of_low[event.block] : RBI_NO_BLOCK;
            if (event.block == RBI_NO_BLOCK)
                continue;
        }
        a->low_event[kept] = a->low_event[i];
        a->high_event[kept] = a->high_event[i];
        model->events[kept++] = event;
    }
    model->event_count = kept;
}

/* ---- what a size that failed has shown ---- */

/* As far as it got, its sizes are better known than any line says. */
static void learn_from_cut(struct alignment *a, const struct rbi_trace *cut)
{
    size_t at = 0;
    for (size_t i = 0; i < a->model->event_count && at < cut->event_count; i++) {
        struct rbi_model_event *event = &a->model->events[i];
        const bool is_last = at + 1 == cut->event_count; /* the request that failed */
        const enum rbi_trace_kind kind = is_last ? event->kind : cut->events[at].kind;
        const struct rbi_trace_event *high = &a->high->events[a->high_event[i]];
        if (kind != event->kind)
            return;
        if (kind == RBI_TRACE_ALLOC || kind == RBI_TRACE_RESERVE)
            event->line = line_through(a->high->count, high->bytes, cut->count,
                                       cut->events[at].bytes, a->unit);
        at++;
    }
}

/* ---- the model ---- */

static bool open_alignment(struct alignment *a)
{
    const size_t most = a->high->event_count + 1;
    a->model->events = rbi_heap_calloc(most, sizeof *a->model->events);
    a->of_low = rbi_heap_calloc(a->low->event_count + 1, sizeof *a->of_low);
    a->of_high = rbi_heap_calloc(most, sizeof *a->of_high);
    a->low_event = rbi_heap_calloc(most, sizeof *a->low_event);
    a->high_event = rbi_heap_calloc(most, sizeof *a->high_event);
    if (!a->model->events || !a->of_low || !a->of_high || !a->low_event || !a->high_event)
        return false;
    memset(a->of_low, 0xff, (a->low->event_count + 1) * sizeof *a->of_low);
    memset(a->of_high, 0xff, most * sizeof *a->of_high);
    return true;
}

static void close_alignment(struct alignment *a)
{
    rbi_heap_free(a->of_low);
    rbi_heap_free(a->of_high);
    rbi_heap_free(a->low_event);
    rbi_heap_free(a->high_event);
}

rebatch_status rbi_model_make(struct rbi_model *out, const struct rbi_trace *low,
                              const struct rbi_trace *high, const struct rbi_trace *cut)
{
    *out = (struct rbi_model){.most_known = high->count};
    out->peak = line_through(low->count, low->peak_bytes, high->count, high->peak_bytes, 1);
    struct alignment a = {.unit = unit_of_all(low, high), .low = low, .high = high, .model = out};
    if (!open_alignment(&a)) {
        close_alignment(&a);
        rbi_model_release(out);
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a memory model");
    }
    out->has_events = align(&a);
    if (out->has_events) {
        resolve_previous(&a);
        if (cut)
            learn_from_cut(&a, cut);
    }
    close_alignment(&a);
    return REBATCH_OK;
}

rebatch_status rbi_model_scale(struct rbi_model *out, const struct rbi_trace *trace)
{
    *out = (struct rbi_model){.most_known = trace->count, .has_events = true};
    out->blocks = trace->blocks;
    out->events = rbi_heap_calloc(trace->event_count + 1, sizeof *out->events);
    if (!out->events)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a memory model");
    for (size_t i = 0; i < trace->event_count; i++) {
        const struct rbi_trace_event *event = &trace->events[i];
        if (is_one_off(trace, event))
            continue;
        const int64_t bytes = (int64_t)event->bytes;
        out->events[out->event_count++] =
            (struct rbi_model_event){event->kind,
                                     event->block,
                                     {trace->count, trace->count, bytes, bytes, 1},
                                     event->stream,
                                     NULL};
    }
    return REBATCH_OK;
}

void rbi_model_release(struct rbi_model *model)
{
    rbi_heap_free(model->events);
    *model = (struct rbi_model){0};
}

static uint64_t rounded(const struct rbi_model *model, size_t bytes)
{
    size_t whole;
    const bool is_rounded = model->pool
                                ? rbi_pool_check_size(&whole, model->pool, bytes) == REBATCH_OK
                                : rbi_round_up(bytes, REBATCH_POOL_UNIT_BYTES, &whole);
    return is_rounded ? whole : bytes;
}

/* On top of what lives; what is reserved for later counts only in what is needed. */
static uint64_t most_at_once(const struct rbi_model *model, size_t count, size_t *sizes,
                             bool with_reserves)
{
    if (!model->has_events)
        return rounded(model, rbi_line_at(&model->peak, count));
    uint64_t live = 0, peak = 0;
    for (size_t i = 0; i < model->event_count; i++) {
        const struct rbi_model_event *event = &model->events[i];
        uint64_t at_once = live;
        if (event->kind == RBI_TRACE_ALLOC) {
            sizes[event->block] = rounded(model, rbi_line_at(&event->line, count));
            at_once = live += sizes[event->block];
        } else if (event->kind == RBI_TRACE_RESERVE && with_reserves) {
            at_once = live + rounded(model, rbi_line_at(&event->line, count));
        } else if (event->kind == RBI_TRACE_FREE) {
            live -= sizes[event->block];
        }
        if (peak < at_once)
            peak = at_once;
    }
    return peak;
}

uint64_t rbi_model_need(const struct rbi_model *model, size_t count, size_t *sizes)
{
    return most_at_once(model, count, sizes, true);
}

rebatch_status rbi_model_peak(uint64_t *out, const struct rbi_model *model, size_t count)
{
    rebatch_pool_stats stats;
    size_t *sizes = rbi_heap_calloc((size_t)model->blocks + 1, sizeof *sizes);
    if (!sizes)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory to foretell a peak");
    const rebatch_status status = rebatch_pool_get_stats(&stats, model->pool);
    *out = stats.live_bytes + most_at_once(model, count, sizes, false);
    rbi_heap_free(sizes);
    return status;
}
