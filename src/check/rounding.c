/* Owns what counts as rounding, and its measuring: docs/check.md, "Rounding", has the rules.
 * Must not know what is said of it. */
#include <math.h>

#include "check/check.h"

/* Of results of other micro-batches: up to this many times the measured rounding is rounding. */
#define FAR 8
/* The bound where rounding could not be measured. */
#define UNMEASURED 0.008
/* An activation close to 0 may be on either side of a ReLU, which adds or removes one sample's part
 * of some gradients: so few of the numbers may be beyond the bound, each by less than GROSS or four
 * samples' part. */
#define FEW 0.02
#define GROSS 0.1
/* A result this much smaller than most is nothing but rounding: the gradient of a bias before a
 * normalization. So is one SMALL as large, where half of its value is rounding. */
#define TINY 1e-4
#define SMALL 0.03
/* Of few samples, most numbers differ by more than this part of themselves by a mistake alone. */
#define OTHER 0.25
/* Fewer numbers say nothing by themselves. */
#define LEAST_NUMBERS 8

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
    return isinf(item->noise) || fmax(item->size, fabs(difference->is)) <= TINY * c->typical_size;
}

bool rbi_rounding_is_worth_measuring(const struct rbi_check *c, const struct rbi_item *item,
                                     const struct rbi_difference *difference)
{
    return difference->differs && !is_of_bits(c, item) && c->options.tolerance <= 0 &&
           isfinite(difference->largest) && difference->largest > floor_of(item->number) &&
           !rbi_rounding_is_all(c, item, difference);
}

static bool is_other(const struct rbi_check *c, const struct rbi_item *item,
                     const struct rbi_difference *difference, const char *was, const char *is)
{
    return rbi_values_count(item) >= LEAST_NUMBERS &&
           fmax(item->size, fabs(difference->is)) > SMALL * c->typical_size &&
           rbi_values_share_beyond(item, was, is, 0, OTHER) > 0.5;
}

static bool is_far(const struct rbi_check *c, const struct rbi_item *item,
                   const struct rbi_difference *difference, const char *was, const char *is)
{
    const double measured = c->is_measured ? FAR * item->noise : UNMEASURED;
    const double bound = fmax(measured, floor_of(item->number));
    const double gross = fmax(GROSS, 4.0 / (double)rbi_session_batch(c->rb));
    return difference->largest > fmax(bound, gross) ||
           rbi_values_share_beyond(item, was, is, bound, 0) > FEW;
}

/* In the order of the table in docs/check.md. */
enum rbi_verdict rbi_rounding_judge(const struct rbi_check *c, const struct rbi_item *item,
                                    const struct rbi_difference *difference, enum rbi_order order,
                                    const char *was, const char *is)
{
    const double tolerance = c->options.tolerance;
    if (!difference->differs)
        return RBI_EQUAL;
    if (is_of_bits(c, item))
        return RBI_WRONG;
    if (difference->largest <= (tolerance > 0 ? tolerance : floor_of(item->number)))
        return RBI_ROUNDING;
    if (order == RBI_FEW_SAMPLES)
        return tolerance <= 0 && is_other(c, item, difference, was, is) ? RBI_WRONG : RBI_EQUAL;
    if (order == RBI_SAME_ORDER || tolerance > 0)
        return RBI_WRONG;
    if (rbi_rounding_is_all(c, item, difference))
        return RBI_ROUNDING;
    if (is_far(c, item, difference, was, is))
        return RBI_WRONG;
    return c->is_measured ? RBI_ROUNDING : RBI_UNSURE;
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

/* A batch that is so many times as large divides each sample's weight by that number. Sums are then
 * a 3rd but for rounding, which happens at other places. The cut is the same, so mistakes that
 * depend on the cut do not show here. */
#define TIMES 3
/* How far the growth of a result that follows the batch's size may be from that, as a part. */
#define MOST_GROWTH 0.35
/* What is measured counts up to this part of the largest value, and of other micro-batches than the
 * first run's up to so many times what it is of these. */
#define MOST_NOISE 0.0125
#define MOST_BY_CUTTING 16

static void learn(struct rbi_check *c, struct rbi_item *item, const char *was, const char *is)
{
    const double grown = rbi_values_growth(item, was, is);
    const bool is_small = item->size <= SMALL * c->typical_size; /* its growth means nothing */
    const double noise = rbi_values_compare(item, was, is, is_small ? 1.0 / TIMES : grown).rms;
    const double most = c->is_uncut_measured ? MOST_BY_CUTTING * item->noise_uncut : MOST_NOISE;
    if (is_small && noise > 0.5 * rbi_values_rms(item, was))
        item->noise = INFINITY;
    if (is_small || !(fabs(TIMES * grown - 1) < MOST_GROWTH) || !isfinite(noise))
        return;
    item->noise = fmax(item->noise, fmin(noise, most));
    c->is_measured = true;
}

/* What shows too little has as much as the others: few numbers, and the forward pass alone. */
static void share(struct rbi_check *c)
{
    double most = 0;
    for (size_t i = 0; i < c->items.count; i++)
        if (isfinite(c->items.list[i].noise))
            most = fmax(most, c->items.list[i].noise);
    for (size_t i = 0; i < c->items.count; i++) {
        struct rbi_item *const item = &c->items.list[i];
        if (rbi_values_count(item) < LEAST_NUMBERS || item->noise <= 0)
            item->noise = fmax(item->noise, most);
        if (!c->is_uncut_measured)
            item->noise_uncut = item->noise;
    }
    c->is_uncut_measured = true;
}

rebatch_status rbi_rounding_measure(struct rbi_check *c, const struct rbi_parts *parts,
                                    const struct rbi_values *was)
{
    if (!rbi_check_has_time(c))
        return REBATCH_OK;
    const size_t batch = rbi_session_batch(c->rb);
    const rebatch_status status = rbi_check_run_parts(c, parts, TIMES * batch, &c->other);
    for (size_t i = 0; i < c->items.count && !status; i++)
        if (c->items.list[i].is_compared)
            learn(c, &c->items.list[i], was->copies[i], c->other.copies[i]);
    share(c);
    const rebatch_status undone = rbi_check_undo(c);
    return rbi_check_is_fatal(status) && !undone ? status : undone;
}
