/* Owns what a result gains with each micro-batch: differences between cuts that grow in proportion
 * to the number of micro-batches, which rounding does not.
 * Must not know which cuts are run. */
#include <float.h>
#include <math.h>

#include "check/check.h"

/* Cut j has c[j] micro-batches more than the first run, and differs from it by d[j]. A term T that
 * is added once a micro-batch makes d[j] = c[j] T + e[j], where e is rounding. What rounds in more
 * places rounds by the root of their number, so cut j is weighted by 1/c[j]: the least squares are
 *     T = sum d / sum c,   share of T in all = |sum d|^2 / sum c / sum(|d[j]|^2 / c[j]),
 * and e has the rest. Of rounding alone, T has about one cut's share. */

/* e has no more than this of all, of which rounding leaves four times as much and more; and less
 * where so few numbers could be so by chance. */
#define MOST_REST 0.1
#define CHANCE 1e-9
/* Results of few samples have few roundings of their own. */
#define ROUNDINGS_A_SAMPLE 4
/* Of a difference by less, in units of the last place of the largest value, nothing is said. */
#define LEAST_UNITS 64
#define LEAST_UNITS_NARROW 4
/* Where the first run's own rounding is all that differs, T has this share at most. */
#define MOST_ALIKE 0.8

void rbi_trend_release(struct rbi_trend *trend)
{
    for (size_t i = 0; i < trend->count; i++)
        rbi_heap_free(trend->list[i].sums);
    rbi_heap_free(trend->list);
    *trend = (struct rbi_trend){.cuts = 0};
}

static bool make(struct rbi_trend *trend, const struct rbi_items *items)
{
    if (trend->list)
        return true;
    trend->list = rbi_heap_calloc(rbi_max(items->count, 1), sizeof *trend->list);
    for (; trend->list && trend->count < items->count; trend->count++) {
        const size_t numbers = rbi_values_count(&items->list[trend->count]);
        struct rbi_trend_item *const item = &trend->list[trend->count];
        if (!(item->sums = rbi_heap_calloc(rbi_max(numbers, 1), sizeof *item->sums)))
            return false;
    }
    return trend->list != NULL;
}

rebatch_status rbi_trend_add(struct rbi_check *c, const struct rbi_parts *parts)
{
    struct rbi_trend *const trend = &c->trend;
    if (parts->count <= c->whole.count)
        return REBATCH_OK;
    if (!make(trend, &c->items))
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a check");
    rbi_assert(trend->count == c->items.count);
    const double more = (double)(parts->count - c->whole.count);
    for (size_t i = 0; i < trend->count; i++)
        trend->list[i].squares +=
            rbi_values_add_difference(trend->list[i].sums, &c->items.list[i],
                                      c->reference.copies[i], c->now.copies[i]) /
            more;
    trend->cuts++;
    trend->more += more;
    trend->inverse += 1 / more;
    return REBATCH_OK;
}

/* The smallest largest difference that is looked at, as a part of the largest value. */
static double least_of(rebatch_number number)
{
    switch (number) {
    case REBATCH_F64:
        return LEAST_UNITS * DBL_EPSILON;
    case REBATCH_F32:
        return LEAST_UNITS * (double)FLT_EPSILON;
    case REBATCH_F16:
        return LEAST_UNITS_NARROW * 0x1p-10;
    default:
        return LEAST_UNITS_NARROW * 0x1p-7;
    }
}

static double most_rest(const struct rbi_check *c, size_t numbers)
{
    rbi_assert(c->trend.cuts > 1);
    const size_t most = ROUNDINGS_A_SAMPLE * rbi_session_batch(c->rb);
    const double freedom = (double)rbi_min(numbers, most) * (double)(c->trend.cuts - 1);
    return fmin(MOST_REST, pow(CHANCE, 2 / freedom));
}

bool rbi_trend_find(struct rbi_difference *out, const struct rbi_check *c, size_t at)
{
    const struct rbi_trend *const trend = &c->trend;
    const struct rbi_item *const item = &c->items.list[at];
    const size_t numbers = rbi_values_count(item);
    const double shift = (double)trend->cuts * (double)trend->cuts / trend->more / trend->inverse;
    if (trend->cuts < 3 || shift > MOST_ALIKE || at >= trend->count ||
        item->number == REBATCH_BYTES || c->options.tolerance > 0)
        return false;
    const struct rbi_trend_item *const sums = &trend->list[at];
    double squares = 0;
    *out = (struct rbi_difference){.differs = true};
    for (size_t i = 0; i < numbers; i++) {
        const double sum = (double)sums->sums[i];
        squares += sum * sum;
        if (fabs(sum) > fabs(out->is)) {
            out->at = i;
            out->is = sum;
        }
    }
    const double rest = 1 - squares / trend->more / sums->squares;
    out->is /= trend->more;
    out->largest = fabs(out->is) / item->size;
    return rest <= most_rest(c, numbers) && out->largest * trend->more >= least_of(item->number);
}
