/* Owns the functions that give an allocation's bytes, and the turns of a loop, for n samples.
 * docs/probe.md, "How sizes are fitted", has their formulas. Must not know what is allocated. */
#include "probe/probe.h"

/* More than any device has, so that it cannot be mistaken for a size. */
#define LARGEST_BYTES (SIZE_MAX / 4)

size_t rbi_line_at(const struct rbi_line *line, size_t count)
{
    rbi_assert(line->run > 0);
    int64_t distance, product, bytes;
    if (__builtin_sub_overflow(count, line->count, &distance) ||
        __builtin_mul_overflow(line->rise, distance, &product))
        return line->rise < 0 ? 0 : LARGEST_BYTES;
    const int64_t run = (int64_t)line->run;
    const int64_t quotient = product / run + (product % run > 0); /* rounded up */
    if (__builtin_add_overflow(line->bytes, quotient, &bytes) ||
        __builtin_add_overflow(bytes, distance ? line->residual : 0, &bytes))
        return LARGEST_BYTES;
    return bytes <= 0 ? 0 : rbi_min((size_t)bytes, LARGEST_BYTES);
}

struct rbi_line rbi_line_constant(size_t bytes)
{
    return (struct rbi_line){.run = 1, .bytes = (int64_t)bytes};
}

struct rbi_line rbi_line_scale(const struct rbi_point *point)
{
    rbi_assert(point->count > 0);
    return (struct rbi_line){.count = point->count,
                             .run = point->count,
                             .bytes = (int64_t)point->bytes,
                             .rise = (int64_t)point->bytes};
}

static int64_t rise_of(size_t low, size_t high)
{
    return (int64_t)high - (int64_t)low;
}

/* Through the last point and one before it. */
static struct rbi_line line_from(const struct rbi_points *points, size_t first)
{
    const struct rbi_point *low = &points->at[first], *high = &points->at[points->count - 1];
    rbi_assert(high->count > low->count);
    const int64_t rise = rise_of(low->bytes, high->bytes), run = rise_of(low->count, high->count);
    const bool is_whole = rise % run == 0;
    return (struct rbi_line){.count = points->at[points->base].count,
                             .run = is_whole ? 1 : (size_t)run,
                             .bytes = (int64_t)points->at[points->base].bytes,
                             .rise = is_whole ? rise / run : rise};
}

struct rbi_line rbi_line_fit(const struct rbi_points *points)
{
    rbi_assert(points->base < points->count);
    if (points->count == 1)
        return rbi_line_constant(points->at[0].bytes);
    const struct rbi_line whole = line_from(points, 0), end = line_from(points, points->count - 2);
    const bool is_steeper =
        (double)end.rise / (double)end.run > (double)whole.rise / (double)whole.run;
    struct rbi_line line = is_steeper ? end : whole;
    for (size_t i = 0; i < points->count; i++) {
        const size_t bytes = rbi_line_at(&line, points->at[i].count);
        if (i != points->base && points->at[i].bytes > bytes)
            line.residual += points->at[i].bytes - bytes;
    }
    return line;
}

/* ---- turns ---- */

size_t rbi_turns_at(const struct rbi_turns *turns, size_t count)
{
    int64_t done;
    const size_t whole = turns->step ? count / turns->step + (count % turns->step != 0) : 0;
    if (__builtin_add_overflow((int64_t)rbi_min(whole, (size_t)INT64_MAX), turns->fixed, &done))
        return SIZE_MAX;
    return done > 0 ? (size_t)done : 0;
}

bool rbi_turns_explain(struct rbi_turns *out, size_t step, const struct rbi_point *points,
                       size_t count)
{
    *out = (struct rbi_turns){.step = step};
    const size_t first = rbi_turns_at(out, points[0].count);
    out->fixed = rise_of(first, points[0].bytes);
    for (size_t i = 1; i < count; i++)
        if (rbi_turns_at(out, points[i].count) != points[i].bytes)
            return false;
    return true;
}
