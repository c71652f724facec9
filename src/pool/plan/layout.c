/* Owns the packing of lifetimes into addresses, a form of two-dimensional strip packing.
 * Must not know pools.
 *
 * It is known who is in use when, so blocks can be placed in any order, each where nobody is who is
 * in use at the same time: the largest first (greedy by size; Pisarchyk and Lee, "Efficient Memory
 * Management for Deep Neural Net Inference", 2020), and where that is not good enough in two orders
 * more. */
#include "pool/plan/layout.h"

#include <stdbool.h>
#include <stdlib.h>

/* A layout is good enough when it takes less than this part more than the most in use at once. */
#define LOST_PARTS 256

static int compare(uint32_t a, uint32_t b)
{
    return (a > b) - (a < b);
}

static int by_sequence(const void *a, const void *b)
{
    const struct rbi_lifetime *x = a, *y = b;
    return compare(y->from, x->from);
}

static int by_size(const void *a, const void *b)
{
    const struct rbi_lifetime *x = a, *y = b;
    const int larger = compare(y->units, x->units);
    return larger ? larger : -by_sequence(a, b);
}

static int by_time_in_use(const void *a, const void *b)
{
    const struct rbi_lifetime *x = a, *y = b;
    const int longer = compare(y->to - y->from, x->to - x->from);
    return longer ? longer : by_size(a, b);
}

/* Into the lowest gap, or into the smallest. */
struct order {
    int (*compare)(const void *a, const void *b);
    bool smallest_gap;
};
static const struct order orders[] = {
    {by_size, false}, {by_time_in_use, true}, {by_sequence, true}};

static bool meet(const struct rbi_lifetime *a, const struct rbi_lifetime *b)
{
    return a->from < b->to && b->from < a->to;
}

/* `placed` are in the order of their offsets. */
static uint32_t find_offset(const struct rbi_lifetime **placed, size_t count,
                            const struct rbi_lifetime *lifetime, bool smallest_gap)
{
    uint32_t end = 0, best = 0, least = UINT32_MAX;
    for (size_t i = 0; i < count; i++) {
        const struct rbi_lifetime *const other = placed[i];
        if (!meet(other, lifetime))
            continue;
        const uint32_t gap = other->offset > end ? other->offset - end : 0;
        if (gap >= lifetime->units && gap < least) {
            best = end;
            least = gap;
            if (!smallest_gap)
                break;
        }
        if (end < other->offset + other->units)
            end = other->offset + other->units;
    }
    return least != UINT32_MAX ? best : end;
}

static void insert(const struct rbi_lifetime **placed, size_t count,
                   const struct rbi_lifetime *lifetime)
{
    while (count > 0 && placed[count - 1]->offset > lifetime->offset) {
        placed[count] = placed[count - 1];
        count--;
    }
    placed[count] = lifetime;
}

static uint64_t pack_in_order(struct rbi_lifetime *lifetimes, const struct rbi_lifetime **placed,
                              size_t count, const struct order *order)
{
    uint64_t most = 0;
    qsort(lifetimes, count, sizeof *lifetimes, order->compare);
    for (size_t i = 0; i < count; i++) {
        lifetimes[i].offset = find_offset(placed, i, &lifetimes[i], order->smallest_gap);
        insert(placed, i, &lifetimes[i]);
        const uint64_t end = (uint64_t)lifetimes[i].offset + lifetimes[i].units;
        most = most < end ? end : most;
    }
    return most;
}

uint64_t rbi_layout_pack(struct rbi_lifetime *lifetimes, const struct rbi_lifetime **room,
                         size_t count, uint64_t in_use)
{
    const size_t all = sizeof orders / sizeof *orders;
    uint64_t least = UINT64_MAX, units = 0;
    size_t best = 0;
    for (size_t i = 0; i < all && least > in_use + in_use / LOST_PARTS; i++) {
        units = pack_in_order(lifetimes, room, count, &orders[i]);
        if (units < least) {
            least = units;
            best = i;
        }
    }
    return units == least ? least : pack_in_order(lifetimes, room, count, &orders[best]);
}
