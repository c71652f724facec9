/* Owns what counts as rounding, and its measuring: docs/check.md, "Rounding", has the rules.
 * Must not know what is said of it. */
#include <math.h>

#include "check/check.h"

/* A difference of up to this many times the measured rounding is rounding. */
#define FAR 8
/* The bound where rounding could not be measured. */
#define MOST_UNMEASURED 0.02
/* Few samples may show nothing of TF32 and bfloat16, where a bit that float rounds otherwise makes
 * an operand another one now and then. */
#define LEAST_OF_NARROW 5e-4

/* A few outliers are rounding: at most FEW of the numbers (FEW_NARROW below float), each off by
 * less than GROSS. */
#define GROSS 0.1
#define FEW 0.02
#define FEW_NARROW 0.5
/* The share of numbers that differ by more than half of the root mean square: 0.53 and more if the
 * difference is spread over all numbers, 0.39 and less if it comes from a few activations. */
#define SPREAD 0.46
/* A result this much smaller than most is nothing but rounding. */
#define TINY 1e-4
/* So it is, or all its numbers may be mostly rounding. */
#define SMALL 0.03
/* Of few samples, most numbers differ by more than this part of themselves by a mistake alone; of
 * results of at least so many numbers. */
#define OTHER 0.25
#define LEAST_OF_FEW 8

/* A difference up to this never counts. */
static double floor_of(rebatch_number number)
{
    return number == REBATCH_F16 || number == REBATCH_BF16 ? 0.01 : 1e-4;
}

static bool is_of_bits(const struct rbi_check *c, const struct rbi_item *item)
{
    return c->options.exact == REBATCH_ON || item->number == REBATCH_BYTES;
}

bool rbi_rounding_is_all(const struct rbi_check *c, const struct rbi_item *item,
                         const struct rbi_difference *difference)
{
    return fmax(item->size, fabs(difference->is)) <= TINY * c->typical_size;
}

static bool is_small(const struct rbi_item *item, const struct rbi_difference *difference)
{
    return difference->largest <= floor_of(item->number);
}

enum rbi_verdict rbi_rounding_judge(const struct rbi_check *c, const struct rbi_item *item,
                                    const struct rbi_difference *difference)
{
    if (!difference->differs)
        return RBI_EQUAL;
    if (is_of_bits(c, item))
        return RBI_WRONG;
    if (c->options.tolerance > 0)
        return difference->largest <= c->options.tolerance ? RBI_ROUNDING : RBI_WRONG;
    return is_small(item, difference) ? RBI_ROUNDING : RBI_WRONG;
}

/* Whether few numbers differ by more than rounding. An activation close to 0 may be on either side
 * of a ReLU, which adds or removes one sample's part of some gradients. A mistake changes many
 * numbers, or some by more. */
static bool are_few(const struct rbi_check *c, const struct rbi_item *item,
                    const struct rbi_difference *difference, const char *was, const char *is)
{
    const struct rbi_noise *noise = &item->noise;
    const double least = floor_of(item->number);
    const double limit = fmax(least, FAR * noise->rms);
    const double most = FAR * noise->largest > least && !noise->is_of_few ? FEW_NARROW : FEW;
    const double gross = fmax(GROSS, 4.0 / (double)rbi_session_batch(c->rb));
    return difference->largest <= gross && rbi_values_share_beyond(item, was, is, limit) <= most &&
           rbi_values_share_beyond(item, was, is, difference->rms / 2) <= SPREAD;
}

enum rbi_verdict rbi_rounding_judge_cut(const struct rbi_check *c, const struct rbi_item *item,
                                        const struct rbi_difference *difference, const char *was,
                                        const char *is)
{
    const struct rbi_noise *noise = &item->noise;
    const enum rbi_verdict verdict = rbi_rounding_judge(c, item, difference);
    if (verdict != RBI_WRONG || is_of_bits(c, item) || c->options.tolerance > 0)
        return verdict;
    if (rbi_rounding_is_all(c, item, difference))
        return RBI_ROUNDING;
    if (!noise->is_measured)
        return difference->largest <= MOST_UNMEASURED ? RBI_UNSURE : RBI_WRONG;
    const double least = noise->is_of_few ? LEAST_OF_NARROW : 0;
    const bool is_near = difference->largest <= FAR * fmax(noise->largest, least) &&
                         difference->rms <= FAR * fmax(noise->rms, least);
    if (!is_near && !are_few(c, item, difference, was, is))
        return RBI_WRONG;
    return noise->is_of_few ? RBI_UNSURE : RBI_ROUNDING;
}

enum rbi_verdict rbi_rounding_judge_few(const struct rbi_check *c, const struct rbi_item *item,
                                        const struct rbi_difference *difference, const char *was,
                                        const char *is)
{
    const enum rbi_verdict verdict = rbi_rounding_judge(c, item, difference);
    if (verdict != RBI_WRONG || is_of_bits(c, item))
        return verdict;
    const bool is_other = rbi_values_count(item) >= LEAST_OF_FEW &&
                          fmax(item->size, fabs(difference->is)) > SMALL * c->typical_size &&
                          rbi_values_share_other(item, was, is, OTHER) > 0.5;
    return is_other && c->options.tolerance <= 0 ? RBI_WRONG : RBI_EQUAL;
}

bool rbi_rounding_is_worth_measuring(const struct rbi_check *c, const struct rbi_item *item,
                                     const struct rbi_difference *difference)
{
    return difference->differs && !is_of_bits(c, item) && c->options.tolerance <= 0 &&
           isfinite(difference->largest) && !is_small(item, difference) &&
           !rbi_rounding_is_all(c, item, difference);
}

void rbi_rounding_note_sizes(struct rbi_check *c)
{
    size_t all = 0;
    for (size_t i = 0; i < c->items.count; i++) {
        struct rbi_item *const item = &c->items.list[i];
        const bool is_number = item->is_compared && item->number != REBATCH_BYTES;
        item->size = is_number ? rbi_values_largest(item, c->reference.copies[i]) : 0;
        all += item->size > 0;
    }
    for (size_t i = 0; i < c->items.count; i++) {
        const double size = c->items.list[i].size;
        size_t above = 0;
        for (size_t k = 0; k < c->items.count; k++)
            above += c->items.list[k].size >= size;
        if (size > c->typical_size && above * 2 >= all + 1)
            c->typical_size = size;
    }
}

/* ---- measuring ---- */

/* A batch that is 3, 5 or 7 times as large divides each sample's weight by that number. Sums are
 * then a 3rd, 5th or 7th but for rounding, which happens at other places. The cut is the same, so
 * mistakes that depend on the cut do not show here. */
static const size_t factors[] = {3, 5, 7};

/* A result that grows by more does not follow the batch's size. */
#define MOST_GROWTH 1.35
/* A result at most SMALL as large as most, with an error of at least NOTHING_BUT of its value, is
 * nothing but rounding: the gradient of a bias before a normalization. Others are off by at most
 * MOST_NOISE. */
#define NOTHING_BUT 0.5
#define MOST_NOISE 0.0125
/* More micro-batches round more, up to this many times as much. */
#define MOST_BY_CUTTING 16

static bool is_nothing_but(const struct rbi_check *c, const struct rbi_item *item,
                           const struct rbi_noise *noise, const char *was)
{
    return item->size <= SMALL * c->typical_size &&
           noise->rms >= NOTHING_BUT * rbi_values_rms(item, was);
}

static void learn(const struct rbi_check *c, struct rbi_item *item, const char *was, const char *is,
                  size_t factor)
{
    const struct rbi_noise *const most = &item->noise_uncut;
    rbi_assert(factor > 1);
    const double whole = rbi_values_growth(item, was, is) * (double)factor;
    const bool is_little = item->size <= SMALL * c->typical_size;
    if ((!is_little && !(fabs(whole) < MOST_GROWTH)) || fabs(whole - (double)factor) < 0.1)
        return;
    const double expected = is_little ? 1 : whole; /* the growth of noise means nothing */
    const struct rbi_difference difference =
        rbi_values_compare(item, was, is, expected / (double)factor);
    struct rbi_noise noise = {true, false, difference.largest * fabs(expected),
                              difference.rms * fabs(expected)};
    if (!isfinite(noise.largest))
        return;
    if (!is_nothing_but(c, item, &noise, was)) {
        noise.largest = fmin(noise.largest, MOST_NOISE);
        noise.rms = fmin(noise.rms, MOST_NOISE);
    }
    if (most->is_measured) {
        noise.largest = fmin(noise.largest, most->largest * MOST_BY_CUTTING);
        noise.rms = fmin(noise.rms, most->rms * MOST_BY_CUTTING);
    }
    item->noise.is_measured = true;
    item->noise.is_of_few = false;
    item->noise.largest = fmax(item->noise.largest, noise.largest);
    item->noise.rms = fmax(item->noise.rms, noise.rms);
}

/* A result that is nothing but rounding says nothing about others. */
static bool is_shared(const struct rbi_noise *noise)
{
    return noise->is_measured && noise->largest <= MOST_NOISE;
}

static double measure(const struct rbi_noise *noise, bool is_rms)
{
    return is_rms ? noise->rms : noise->largest;
}

/* The value that half of what was measured is not above, by one of the two measures. */
static double median(const struct rbi_items *items, bool is_rms)
{
    double found = 0;
    size_t all = 0;
    for (size_t i = 0; i < items->count; i++)
        all += is_shared(&items->list[i].noise);
    for (size_t i = 0; i < items->count; i++) {
        const struct rbi_noise *noise = &items->list[i].noise;
        const double value = measure(noise, is_rms);
        size_t below = 0;
        for (size_t k = 0; k < items->count; k++)
            below +=
                is_shared(&items->list[k].noise) && measure(&items->list[k].noise, is_rms) <= value;
        if (is_shared(noise) && below * 2 >= all + 1 && (found <= 0 || value < found))
            found = value;
    }
    return found;
}

/* Results of few numbers, and of the forward pass alone such as a loss, show too little: each has
 * at least the median. */
static void share(struct rbi_items *items)
{
    bool is_any = false, is_of_few = false;
    for (size_t i = 0; i < items->count; i++) {
        is_any |= items->list[i].noise.is_measured;
        is_of_few |= items->list[i].noise.is_of_few;
    }
    const double largest = median(items, false), rms = median(items, true);
    for (size_t i = 0; i < items->count && is_any; i++) {
        struct rbi_noise *const noise = &items->list[i].noise;
        noise->is_measured = true;
        noise->is_of_few = is_of_few;
        noise->largest = fmax(noise->largest, largest);
        noise->rms = fmax(noise->rms, rms);
    }
}

static void learn_all(struct rbi_check *c, const struct rbi_values *was, size_t factor)
{
    for (size_t i = 0; i < c->items.count; i++) {
        struct rbi_item *const item = &c->items.list[i];
        if (item->is_compared)
            learn(c, item, was->copies[i], c->other.copies[i], factor);
    }
}

/* Roundings of samples add up by the root of their number, and so do those of micro-batches. More
 * than what leads to MOST_UNMEASURED may be a mistake's, and is no measure. */
void rbi_rounding_measure_few(struct rbi_check *c, size_t samples)
{
    const double more = sqrt((double)rbi_session_batch(c->rb) / (double)samples);
    for (size_t i = 0; i < c->items.count; i++) {
        struct rbi_item *const item = &c->items.list[i];
        const char *const was = c->other.copies[i];
        if (!item->is_compared || item->size <= 0 || rbi_values_count(item) < LEAST_OF_FEW)
            continue;
        const struct rbi_difference difference = rbi_values_compare(item, was, c->now.copies[i], 1);
        const double by = fmax(1, more * rbi_values_largest(item, was) / item->size);
        struct rbi_noise noise = {true, true, difference.largest * by, difference.rms * by};
        const double most = MOST_UNMEASURED / FAR;
        if (!isfinite(noise.rms))
            continue;
        if (noise.rms <= most)
            noise.largest = fmin(noise.largest, most);
        if (noise.rms <= most || is_nothing_but(c, item, &noise, was))
            item->noise_few = noise;
    }
}

static void take_few(struct rbi_items *items, size_t parts)
{
    const double by = sqrt((double)parts);
    for (size_t i = 0; i < items->count; i++) {
        struct rbi_noise noise = items->list[i].noise_few;
        const double most = fmax(MOST_UNMEASURED / FAR, noise.largest);
        noise.largest = fmin(noise.largest * by, most);
        noise.rms = fmin(noise.rms * by, most);
        items->list[i].noise = noise;
    }
}

/* Whether results follow the batch. */
static bool is_any_learned(const struct rbi_check *c)
{
    for (size_t i = 0; i < c->items.count; i++) {
        const struct rbi_item *const item = &c->items.list[i];
        if (item->noise.is_measured && !item->noise.is_of_few &&
            item->size > SMALL * c->typical_size)
            return true;
    }
    return false;
}

rebatch_status rbi_rounding_measure(struct rbi_check *c, const struct rbi_parts *parts,
                                    const struct rbi_values *was)
{
    rebatch_status status = REBATCH_OK;
    const size_t batch = rbi_session_batch(c->rb);
    for (size_t k = 0; k < sizeof factors / sizeof *factors && rbi_check_has_time(c); k++) {
        status = rbi_check_run_parts(c, parts, factors[k] * batch, &c->other);
        if (!status)
            learn_all(c, was, factors[k]);
        const rebatch_status undone = rbi_check_undo(c);
        if (rbi_check_is_fatal(status) || undone)
            return undone ? undone : status;
        if (status || !is_any_learned(c))
            break; /* the program does not run so, or does not follow the batch */
    }
    if (!is_any_learned(c))
        take_few(&c->items, parts->count);
    share(&c->items);
    for (size_t i = 0; i < c->items.count && parts == &c->whole; i++)
        c->items.list[i].noise_uncut = c->items.list[i].noise;
    return REBATCH_OK;
}
