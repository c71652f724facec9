/* Owns the functions of the samples that sizes are taken for.
 * Must not know what the sizes are of. */
#include "probe/probe.h"

/* Sizes that code rounds up are rounded to powers of two, rarely to larger ones than this. */
#define LARGEST_UNIT ((size_t)1 << 21)
/* And samples to tiles of so many at the most. */
#define LARGEST_STEP 256
/* More than any device has, so that it cannot be mistaken for a size. */
#define LARGEST_BYTES (SIZE_MAX / 4)

static size_t up_to(size_t count, size_t step)
{
    size_t rounded;
    return rbi_add(count, step - 1, &rounded) ? rounded - rounded % step : count;
}

size_t rbi_line_at(const struct rbi_line *line, size_t count)
{
    const size_t at = line->step > 1 ? up_to(count, line->step) : count;
    int64_t distance, product;
    if (__builtin_sub_overflow(at, line->count, &distance) ||
        __builtin_mul_overflow(line->rise, distance, &product))
        return line->rise < 0 ? 0 : LARGEST_BYTES;
    const int64_t run = (int64_t)line->run;
    const int64_t quotient = product / run + (product % run > 0); /* rounded up */
    const size_t more = distance ? line->up + line->residual : line->up;
    int64_t bytes;
    if (__builtin_add_overflow(line->bytes, quotient, &bytes) ||
        __builtin_add_overflow(bytes, more, &bytes))
        return LARGEST_BYTES;
    if (bytes <= 0)
        return 0;
    return rbi_min((size_t)(bytes - bytes % (int64_t)line->unit), LARGEST_BYTES);
}

struct rbi_line rbi_line_scale(const struct rbi_point *point)
{
    return (struct rbi_line){.count = point->count,
                             .run = point->count,
                             .step = 1,
                             .bytes = (int64_t)point->bytes,
                             .rise = (int64_t)point->bytes,
                             .unit = 1};
}

/* ---- hypotheses ---- */

/* In which a slope is stated that is no whole number of bytes a sample. */
#define PARTS 1024

static double lesser(double a, double b)
{
    return a < b ? a : b;
}

static int64_t distance(size_t low, size_t high)
{
    return (int64_t)high - (int64_t)low;
}

/* Whether whole bytes a sample explain all points, with samples in steps. */
static bool fit_straight(struct rbi_line *out, const struct rbi_points *given, size_t step)
{
    const struct rbi_point *points = given->at;
    const size_t count = given->count, base = given->base;
    int64_t slope = 0;
    bool has_slope = false;
    for (size_t i = 1; i < count; i++) {
        const int64_t run =
            distance(up_to(points[i - 1].count, step), up_to(points[i].count, step));
        const int64_t rise = distance(points[i - 1].bytes, points[i].bytes);
        if (run == 0 && rise != 0)
            return false;
        if (run == 0)
            continue;
        if (rise % run != 0 || (has_slope && rise / run != slope))
            return false;
        slope = rise / run;
        has_slope = true;
    }
    *out = (struct rbi_line){.count = up_to(points[base].count, step),
                             .run = 1,
                             .step = step,
                             .bytes = (int64_t)points[base].bytes,
                             .rise = slope,
                             .unit = 1};
    return true;
}

/* Sizes that were rounded up to a unit lie less than one above a line, so that between two points
 * it rises by what they differ, a unit more or less; and no line begins below zero. What is left of
 * that over all pairs is taken in the middle, and rounded to the nearest: one size may come out a
 * unit too small or too large, but the errors of many do not add up as those of a bound would.
 * False when nothing is left. */
static bool fit_rounded(struct rbi_line *out, const struct rbi_points *points, size_t unit)
{
    double least = 0, most = (double)points->at[0].bytes / (double)points->at[0].count;
    for (size_t i = 0; i < points->count; i++) {
        const struct rbi_point *low = &points->at[i];
        most = lesser(most, (double)low->bytes / (double)low->count);
        for (size_t k = i + 1; k < points->count; k++) {
            const double run = (double)distance(low->count, points->at[k].count);
            const double rise = (double)distance(low->bytes, points->at[k].bytes);
            most = lesser(most, (rise + (double)unit) / run);
            least = -lesser(-least, -(rise - (double)unit) / run);
        }
    }
    const double slope = points->is_cautious ? most : (least + most) / 2;
    *out = (struct rbi_line){.count = points->at[points->base].count,
                             .run = PARTS,
                             .step = 1,
                             .bytes = (int64_t)points->at[points->base].bytes,
                             .rise = (int64_t)(slope * PARTS),
                             .unit = unit,
                             .up = points->is_cautious ? unit - 1 : unit / 2};
    return least <= most;
}

/* Through the last two points, and above those that are above it. */
static struct rbi_line fit_piece(const struct rbi_points *points)
{
    const struct rbi_point *high = &points->at[points->count - 1], *low = high - 1;
    struct rbi_line line = {.count = points->at[points->base].count,
                            .run = high->count - low->count,
                            .step = 1,
                            .bytes = (int64_t)points->at[points->base].bytes,
                            .rise = distance(low->bytes, high->bytes),
                            .unit = 1};
    size_t residual = 0;
    for (size_t i = 0; i < points->count; i++) {
        const size_t bytes = rbi_line_at(&line, points->at[i].count);
        if (i != points->base && points->at[i].bytes > bytes)
            residual = rbi_max(residual, points->at[i].bytes - bytes);
    }
    line.residual = residual;
    return line;
}

static size_t unit_of(const struct rbi_points *points)
{
    size_t bits = LARGEST_UNIT;
    for (size_t i = 0; i < points->count; i++)
        bits |= points->at[i].bytes;
    return bits & (~bits + 1);
}

/* Samples in steps. From two points only those that go through zero are seen. */
static bool fit_steps(struct rbi_line *out, const struct rbi_points *points)
{
    const struct rbi_point *at = points->at;
    for (size_t step = 2; step <= LARGEST_STEP; step *= 2) {
        const size_t first = up_to(at[0].count, step);
        const bool is_through_zero = at[0].bytes % first == 0 && at[0].bytes > 0 &&
                                     at[0].bytes / first * up_to(at[1].count, step) == at[1].bytes;
        if ((points->count > 2 || is_through_zero) && fit_straight(out, points, step))
            return true;
    }
    return false;
}

/* Sizes that are no multiples of so much were not rounded to a unit. */
#define LEAST_UNIT 256

struct rbi_line rbi_line_fit(const struct rbi_points *points)
{
    struct rbi_line line;
    const bool is_straight = fit_straight(&line, points, 1);
    /* Two points are always on a line: the unit of all other sizes tells more. */
    if (is_straight && (points->count != 2 || points->unit == 1 || line.rise == 0))
        return line;
    const size_t unit = is_straight ? points->unit : unit_of(points);
    if (unit < LEAST_UNIT && fit_steps(&line, points))
        return line;
    if (fit_rounded(&line, points, unit) || fit_steps(&line, points))
        return line;
    return fit_piece(points);
}

struct rbi_line rbi_line_constant(size_t bytes)
{
    return (struct rbi_line){.run = 1, .step = 1, .bytes = (int64_t)bytes, .unit = 1};
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
    out->fixed = distance(first, points[0].bytes);
    for (size_t i = 1; i < count; i++)
        if (rbi_turns_at(out, points[i].count) != points[i].bytes)
            return false;
    return true;
}
