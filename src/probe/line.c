/* Owns the functions that give an allocation's bytes for n samples. docs/probe.md, "How sizes are
 * fitted", has their formulas. Must not know what is allocated. */
#include <math.h>

#include "probe/probe.h"

/* The largest power of two that bytes are rounded up to (U). */
#define LARGEST_UNIT ((size_t)1 << 21)
/* The largest tile that samples are rounded up to (T). */
#define LARGEST_STEP 256
/* More than any device has, so that it cannot be mistaken for a size. */
#define LARGEST_BYTES (SIZE_MAX / 4)

static size_t up_to(size_t count, size_t step)
{
    size_t rounded;
    rbi_assert(step > 0);
    return rbi_add(count, step - 1, &rounded) ? rounded - rounded % step : count;
}

size_t rbi_line_at(const struct rbi_line *line, size_t count)
{
    rbi_assert(line->run > 0 && line->unit > 0);
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
    rbi_assert(point->count > 0);
    return (struct rbi_line){.count = point->count,
                             .run = point->count,
                             .step = 1,
                             .bytes = (int64_t)point->bytes,
                             .rise = (int64_t)point->bytes,
                             .unit = 1};
}

/* ---- exact size functions ---- */

static int64_t distance(size_t low, size_t high)
{
    return (int64_t)high - (int64_t)low;
}

/* a + r T ceil(n / T) with whole r, T = step. */
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

static bool fit_straight_steps(struct rbi_line *out, const struct rbi_points *points)
{
    for (size_t step = 2; step <= LARGEST_STEP; step *= 2)
        if (fit_straight(out, points, step))
            return true;
    return false;
}

/* ---- sizes that were rounded up ---- */

/* What is drawn for a size function: each has random numbers of its own. */
enum draw { OF_EACH, OF_PART, OF_ALONG, OF_ACROSS, OF_FIXED, OF_TILE, OF_CONSTANT };

/* Uniform in [0, 1) (SplitMix64). */
static double drawn(const struct rbi_points *points, enum draw what)
{
    uint64_t z = points->draw + (what + 1) * UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (double)((z ^ (z >> 31)) >> 11) / (double)(UINT64_C(1) << 53);
}

/* Whether the less likely function is drawn; never without drawing. */
static bool is_drawn(const struct rbi_points *points, enum draw what, double likelihood)
{
    return points->draw && drawn(points, what) < likelihood;
}

/* The middle of [least, most], or a random number of it. */
static size_t between(size_t least, size_t most, const struct rbi_points *points)
{
    return points->draw ? least + (size_t)((double)(most - least + 1) * drawn(points, OF_EACH))
                        : least + (most - least) / 2;
}

/* U ceil(r T ceil(n / T) / U) with whole r. Each size s of m = T ceil(n / T) samples gives
 * (s - U) / m < r <= s / m. The middle of what is common to all is taken, or a random number. */
static bool fit_proportion(struct rbi_line *out, const struct rbi_points *points, size_t unit,
                           size_t step)
{
    size_t least = 0, most = LARGEST_BYTES;
    for (size_t i = 0; i < points->count; i++) {
        const size_t samples = up_to(points->at[i].count, step);
        rbi_assert(samples > 0);
        const size_t bytes = points->at[i].bytes;
        if (bytes < unit)
            return false;
        most = rbi_min(most, bytes / samples);
        least = rbi_max(least, (bytes - unit) / samples + 1);
    }
    if (least > most)
        return false;
    const size_t each = between(least, most, points);
    const size_t samples = up_to(points->at[points->base].count, step);
    *out = (struct rbi_line){.count = samples,
                             .run = 1,
                             .step = step,
                             .bytes = (int64_t)(each * samples),
                             .rise = (int64_t)each,
                             .unit = unit,
                             .up = unit - 1};
    return true;
}

static bool fit_proportion_steps(struct rbi_line *out, const struct rbi_points *points, size_t unit)
{
    for (size_t step = 1; step <= LARGEST_STEP; step *= 2)
        if (fit_proportion(out, points, unit, step))
            return true;
    return false;
}

/* A line by its distance below the base point and its slope. What explains all sizes is a convex
 * polygon of such points. */
struct spot {
    double below, slope;
};
#define CORNERS_MOST (2 * RBI_POINTS_MOST + 6)
struct region {
    struct spot corners[CORNERS_MOST];
    size_t count;
};

static double beyond(const struct spot *spot, double a, double b, double most)
{
    return a * spot->below + b * spot->slope - most;
}

/* Cuts off where a * below + b * slope > most. */
static void clip(struct region *region, double a, double b, double most)
{
    struct region left = {.count = 0};
    for (size_t i = 0; i < region->count; i++) {
        const struct spot *from = &region->corners[i];
        const struct spot *to = &region->corners[(i + 1) % region->count];
        const double out_from = beyond(from, a, b, most), out_to = beyond(to, a, b, most);
        if (out_from <= 0 && left.count < CORNERS_MOST)
            left.corners[left.count++] = *from;
        if ((out_from < 0 && out_to > 0) || (out_from > 0 && out_to < 0)) {
            const double part = out_from / (out_from - out_to);
            if (left.count < CORNERS_MOST)
                left.corners[left.count++] =
                    (struct spot){from->below + part * (to->below - from->below),
                                  from->slope + part * (to->slope - from->slope)};
        }
    }
    *region = left;
}

static double cross_of(const struct spot *from, const struct spot *one, const struct spot *two)
{
    return (one->below - from->below) * (two->slope - from->slope) -
           (two->below - from->below) * (one->slope - from->slope);
}

/* The centre of gravity. */
static struct spot middle_of(const struct region *region)
{
    rbi_assert(region->count > 0);
    const struct spot origin = region->corners[0];
    struct spot sum = {0, 0}, mean = {0, 0};
    double area = 0;
    for (size_t i = 0; i < region->count; i++) {
        const struct spot *one = &region->corners[i];
        const struct spot *two = &region->corners[(i + 1) % region->count];
        const double cross = cross_of(&origin, one, two);
        area += cross;
        sum.below += cross * (one->below + two->below + origin.below) / 3;
        sum.slope += cross * (one->slope + two->slope + origin.slope) / 3;
        mean.below += one->below / (double)region->count;
        mean.slope += one->slope / (double)region->count;
    }
    return area != 0 ? (struct spot){sum.below / area, sum.slope / area} : mean;
}

/* A uniformly random point: a triangle is drawn by its area, then a point of it. */
static struct spot any_of(const struct region *region, const struct rbi_points *points)
{
    rbi_assert(region->count > 0);
    const struct spot *origin = &region->corners[0];
    double area = 0, along = drawn(points, OF_ALONG), across = drawn(points, OF_ACROSS);
    size_t i = 1;
    for (size_t k = 1; k + 1 < region->count; k++)
        area += fabs(cross_of(origin, &region->corners[k], &region->corners[k + 1]));
    double left = area * drawn(points, OF_PART);
    for (; i + 2 < region->count; i++) {
        left -= fabs(cross_of(origin, &region->corners[i], &region->corners[i + 1]));
        if (left < 0)
            break;
    }
    if (along + across > 1) {
        along = 1 - along;
        across = 1 - across;
    }
    const struct spot *one = &region->corners[i % region->count];
    const struct spot *two = &region->corners[(i + 1) % region->count];
    return (struct spot){origin->below + along * (one->below - origin->below) +
                             across * (two->below - origin->below),
                         origin->slope + along * (one->slope - origin->slope) +
                             across * (two->slope - origin->slope)};
}

/* A slope is a multiple of 1/PARTS bytes a sample. */
#define PARTS 1024

/* U ceil((a + r T ceil(n / T)) / U) with a, r >= 0: the unrounded line is less than U below each
 * size. The polygon's centre of gravity is taken, as the errors of many allocations cancel there,
 * or a random point. */
static bool fit_rounded(struct rbi_line *out, const struct rbi_points *points, size_t unit,
                        size_t step)
{
    const struct rbi_point *base = &points->at[points->base];
    const size_t base_count = up_to(base->count, step);
    rbi_assert(base_count > 0 && unit > 0);
    const double high = (double)base->bytes / (double)base_count;
    struct region region = {
        {{0, 0}, {(double)unit - 0.5, 0}, {(double)unit - 0.5, high}, {0, high}}, 4};
    clip(&region, 1, (double)base_count, (double)base->bytes);
    for (size_t i = 0; i < points->count; i++) {
        const double run = (double)distance(base_count, up_to(points->at[i].count, step));
        const double rise = (double)distance(base->bytes, points->at[i].bytes);
        clip(&region, -1, run, rise);
        clip(&region, 1, -run, (double)unit - 0.5 - rise);
    }
    if (region.count == 0)
        return false;
    const struct spot spot = points->draw ? any_of(&region, points) : middle_of(&region);
    *out = (struct rbi_line){.count = base_count,
                             .run = PARTS,
                             .step = step,
                             .bytes = (int64_t)base->bytes - (int64_t)spot.below,
                             .rise = (int64_t)(spot.slope * PARTS),
                             .unit = unit,
                             .up = unit - 1};
    return true;
}

/* The line through the last two points, plus the largest distance of a point above it. */
static struct rbi_line fit_piece(const struct rbi_points *points)
{
    rbi_assert(points->count > 1); /* one point is on a line that does not rise */
    const struct rbi_point *high = &points->at[points->count - 1], *low = high - 1;
    rbi_assert(high->count > low->count);
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

/* ---- which size function ---- */

/* Sizes that are not all multiples of this were not rounded. */
#define LEAST_UNIT 256

static size_t common_divisor(size_t a, size_t b)
{
    while (b) {
        const size_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

size_t rbi_points_unit(const struct rbi_points *points)
{
    size_t unit = 0;
    for (size_t i = 0; i < points->count; i++)
        unit = common_divisor(unit, points->at[i].bytes);
    return rbi_max(unit, 1);
}

/* A constant multiple of this or more may be less than one unit. */
#define LEAST_LARGE_UNIT 65536

/* Two points always lie on a line: it is believed only if its slope is a multiple of the unit. */
static bool is_credible(const struct rbi_line *straight, const struct rbi_points *points,
                        size_t unit)
{
    return points->count != 2 || unit == 1 || straight->rise % (int64_t)unit == 0;
}

/* The probability that a proportional size also has a fixed part. */
#define FIXED_TOO 0.25

static bool fit_with_unit(struct rbi_line *out, const struct rbi_points *points, size_t unit)
{
    if (points->count > 2 && is_drawn(points, OF_FIXED, FIXED_TOO) &&
        fit_rounded(out, points, unit, 1))
        return true;
    if (fit_proportion_steps(out, points, unit) || fit_rounded(out, points, unit, 1))
        return true;
    for (size_t step = 2; step <= LARGEST_STEP && points->count > 2; step *= 2)
        if (fit_rounded(out, points, unit, step))
            return true;
    return false;
}

/* The probabilities that a constant size is constant for a tile, if other sizes have tiles, and
 * that it is less than one unit. */
#define TILE_TOO 0.5
#define PART_OF_UNIT 0.25

static void draw_constant(struct rbi_line *out, const struct rbi_points *points, size_t power)
{
    if (points->count > 1 && points->tile && is_drawn(points, OF_TILE, TILE_TOO) &&
        fit_proportion(out, points, 1, points->tile))
        return;
    if (power >= LEAST_LARGE_UNIT && is_drawn(points, OF_CONSTANT, PART_OF_UNIT))
        (void)fit_rounded(out, points, power, 1);
}

/* The probability that small multiples of LEAST_TILE_UNIT or more come from a unit, not tiles. */
#define UNIT_NOT_TILE 0.5
#define LEAST_TILE_UNIT 4096

static bool draw_unit(struct rbi_line *out, const struct rbi_points *points, size_t power)
{
    return power >= LEAST_TILE_UNIT && is_drawn(points, OF_TILE, UNIT_NOT_TILE) &&
           !fit_proportion(out, points, 1, 1) && fit_with_unit(out, points, power);
}

struct rbi_line rbi_line_fit(const struct rbi_points *points)
{
    struct rbi_line line;
    rbi_assert(points->base < points->count);
    const size_t common = rbi_points_unit(points);
    const size_t power = rbi_min(common & (~common + 1), LARGEST_UNIT);
    const size_t unit = points->unit > 1 ? points->unit : power >= LEAST_UNIT ? power : 1;
    const bool is_straight = fit_straight(&line, points, 1);
    if (is_straight && line.rise == 0) {
        draw_constant(&line, points, power);
        return line;
    }
    const bool is_exact = is_straight && is_credible(&line, points, unit);
    if (!is_exact && draw_unit(&line, points, power))
        return line;
    if (fit_proportion_steps(&line, points, 1) || (is_exact && fit_straight(&line, points, 1)))
        return line;
    if (unit == 1 && points->count > 2 && fit_straight_steps(&line, points))
        return line;
    /* Three sizes hardly have a common divisor of three or five units by chance. */
    const bool is_telling = points->count > 2 && power >= LEAST_UNIT && points->unit <= 1;
    const size_t units[] = {is_telling ? common : unit > 1 ? unit : power, power, common};
    for (size_t i = 0; i < sizeof units / sizeof *units; i++)
        if (units[i] <= 2 * LARGEST_UNIT && fit_with_unit(&line, points, units[i]))
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
