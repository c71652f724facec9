/* Owns the packing of lifetimes into addresses, a form of two-dimensional strip packing.
 * Must not know pools.
 *
 * It is known who is in use when, so blocks can be placed in any order, each where nobody is who is
 * in use at the same time: the largest first (greedy by size; Pisarchyk and Lee, "Efficient Memory
 * Management for Deep Neural Net Inference", 2020), and where that is not good enough in two orders
 * more. Where that is not enough either, the block that ends highest is placed first, and all are
 * placed again, some times over. */
#include "pool/plan/layout.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "pool/tuning.h"

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

/* Into the lowest gap, or into the smallest; `retries`: the block that ends highest is then placed
 * first. */
static const struct order {
    int (*compare)(const void *a, const void *b);
    bool smallest_gap, retries;
} orders[] = {
    {.compare = by_size},
    {.compare = by_sequence, .smallest_gap = true},
    {.compare = by_time_in_use, .smallest_gap = true, .retries = true},
};

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
        const uint32_t gap = other->tried > end ? other->tried - end : 0;
        if (gap >= lifetime->units && gap < least) {
            best = end;
            least = gap;
            if (!smallest_gap)
                break;
        }
        if (end < other->tried + other->units)
            end = other->tried + other->units;
    }
    return least != UINT32_MAX ? best : end;
}

static void insert(const struct rbi_lifetime **placed, size_t count,
                   const struct rbi_lifetime *lifetime)
{
    while (count > 0 && placed[count - 1]->tried > lifetime->tried) {
        placed[count] = placed[count - 1];
        count--;
    }
    placed[count] = lifetime;
}

/* In the order in which they stand; *highest is the one that ends highest. */
static uint64_t pack(struct rbi_lifetime *lifetimes, const struct rbi_lifetime **placed,
                     size_t count, bool smallest_gap, size_t *highest)
{
    uint64_t most = 0;
    *highest = 0;
    for (size_t i = 0; i < count; i++) {
        lifetimes[i].tried = find_offset(placed, i, &lifetimes[i], smallest_gap);
        insert(placed, i, &lifetimes[i]);
        const uint64_t end = (uint64_t)lifetimes[i].tried + lifetimes[i].units;
        if (most < end) {
            most = end;
            *highest = i;
        }
    }
    return most;
}

static void place_first(struct rbi_lifetime *lifetimes, size_t at)
{
    const struct rbi_lifetime first = lifetimes[at];
    memmove(&lifetimes[1], &lifetimes[0], at * sizeof *lifetimes);
    lifetimes[0] = first;
}

static void keep(struct rbi_lifetime *lifetimes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        lifetimes[i].offset = lifetimes[i].tried;
}

uint64_t rbi_layout_pack(struct rbi_lifetime *lifetimes, const struct rbi_lifetime **room,
                         size_t count, uint64_t in_use)
{
    const uint64_t enough = in_use + in_use / RBI_LAYOUT_LOST_PARTS;
    uint64_t least = UINT64_MAX;
    for (size_t k = 0; k < sizeof orders / sizeof *orders && least > enough; k++) {
        const bool retries = orders[k].retries && count <= RBI_LAYOUT_RETRIES_OF_BLOCKS;
        const size_t tries = retries ? 1 + RBI_LAYOUT_RETRIES : 1;
        size_t highest = 0;
        qsort(lifetimes, count, sizeof *lifetimes, orders[k].compare);
        for (size_t i = 0; i < tries && least > enough; i++) {
            place_first(lifetimes, highest);
            const uint64_t units = pack(lifetimes, room, count, orders[k].smallest_gap, &highest);
            if (units >= least)
                continue;
            least = units;
            keep(lifetimes, count);
        }
    }
    return least;
}
