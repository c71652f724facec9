/* Owns which sizes and numbers of turns aligned traces have, and which functions they follow.
 * Must not know how traces were aligned. */
#include "probe/trace_alignment.h"

struct rbi_form_loop *rbi_form_loop_at(const struct rbi_form *form, size_t first)
{
    for (size_t i = 0; i < form->loop_count; i++)
        if (form->loops[i].first == first)
            return &form->loops[i];
    return NULL;
}

/* The loop that an event of a first turn is in; NULL: none. */
const struct rbi_form_loop *rbi_form_loop_around(const struct rbi_form *form, size_t event)
{
    for (size_t i = 0; i < form->loop_count; i++)
        if (form->loops[i].first <= event && event < form->loops[i].first + form->loops[i].period)
            return &form->loops[i];
    return NULL;
}

/* The sizes that are known of an event, in a loop those of the last turn, and which of them is the
 * base's. */
struct rbi_points rbi_form_points(const struct rbi_form *form, const struct rbi_form_loop *loop,
                                  size_t event)
{
    struct rbi_points points = {.count = 0};
    for (size_t t = 0; t < form->trace_count; t++) {
        size_t bytes = *rbi_form_bytes(form, event, t);
        if (bytes == RBI_NOT_MET)
            continue;
        if (loop && loop->turns[t])
            bytes = loop->last[t][event - loop->first];
        else if (loop)
            bytes =
                *rbi_form_bytes(form, event + (loop->turns[form->base_at] - 1) * loop->period, t);
        if (t == form->base_at)
            points.base = points.count;
        rbi_assert(points.count < RBI_POINTS_MOST);
        points.at[points.count++] = (struct rbi_point){form->traces[t]->count, bytes};
    }
    return points;
}

static size_t turns_of(struct rbi_point *points, const struct rbi_form *form,
                       const struct rbi_form_loop *loop)
{
    size_t count = 0;
    for (size_t t = 0; t < form->trace_count; t++) {
        const size_t turns = loop->turns[t] ? loop->turns[t] : loop->turns[form->base_at];
        if (*rbi_form_bytes(form, loop->first, t) != RBI_NOT_MET)
            points[count++] = (struct rbi_point){form->traces[t]->count, turns};
    }
    return count;
}

/* Samples that are left for the last turn. */
static size_t left_for_last(const struct rbi_turns *turns, size_t count)
{
    rbi_assert(count > 0 && turns->step > 0);
    return (count - 1) % turns->step + 1;
}

/* Whether the sizes of the last turns are in proportion to the samples that are left for them. */
bool rbi_form_fits_last(struct rbi_line *out, const struct rbi_form *form,
                        const struct rbi_form_loop *loop, const struct rbi_turns *turns,
                        size_t event)
{
    const struct rbi_point full = {turns->step, form->base->events[event].bytes};
    const struct rbi_points points = rbi_form_points(form, loop, event);
    *out = rbi_line_scale(&full);
    for (size_t k = 0; k < points.count; k++) {
        const struct rbi_point *last = &points.at[k];
        if (rbi_line_at(out, left_for_last(turns, last->count)) != last->bytes)
            return false;
    }
    return true;
}

static bool explains(struct rbi_turns *turns, const struct rbi_form *form,
                     const struct rbi_form_loop *loop, size_t step, const struct rbi_point *points,
                     size_t count)
{
    struct rbi_line line;
    bool fits = rbi_turns_explain(turns, step, points, count);
    for (size_t x = 0; x < loop->period && fits && loop->sort != RBI_EVEN; x++)
        if (form->base->events[loop->first + x].kind == RBI_TRACE_ALLOC)
            fits = rbi_form_fits_last(&line, form, loop, turns, loop->first + x);
    return fits;
}

/* The smallest N samples a turn that explain all traces; a power of two if one does. */
bool rbi_form_turns(struct rbi_turns *out, const struct rbi_form *form,
                    const struct rbi_form_loop *loop)
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
