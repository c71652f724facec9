/* Owns where the blocks of a period lie when they are placed all at once: in one stretch of memory,
 * as short as can be found, so that none has to be moved in any period.
 * Must not know how a period is learnt, or run.
 *
 * It is known who is in use when, so blocks can be placed in any order, each where nobody is who is
 * in use at the same time: the largest first (greedy by size; Pisarchyk and Lee, "Efficient Memory
 * Management for Deep Neural Net Inference", 2020), and where that is not good enough in two orders
 * more. */
#include <stdlib.h>

#include "pool/pool.h"

/* It takes a time that grows with the square of this, for each order: a third of a second. */
#define MOST_ITEMS 16384
/* It is good enough when less than this part is lost. */
#define LOST_PARTS 256

/* What call `of` allocates. In units, and in calls of the period: in use from `from` until before
 * `to`. What is in use from one period into the next has its place for itself. */
struct item {
    uint32_t units, offset;
    uint32_t from, to;
    uint32_t of;
};

static int compare(uint32_t a, uint32_t b)
{
    return (a > b) - (a < b);
}

static int by_birth(const void *a, const void *b)
{
    const struct item *x = a, *y = b;
    return compare(y->of, x->of);
}

static int by_size(const void *a, const void *b)
{
    const struct item *x = a, *y = b;
    const int larger = compare(y->units, x->units);
    return larger ? larger : -by_birth(a, b);
}

static int by_time_in_use(const void *a, const void *b)
{
    const struct item *x = a, *y = b;
    const int longer = compare(y->to - y->from, x->to - x->from);
    return longer ? longer : by_size(a, b);
}

/* Into the lowest gap, or into the smallest. */
struct order {
    int (*compare)(const void *a, const void *b);
    bool smallest_gap;
};
static const struct order orders[] = {{by_size, false}, {by_time_in_use, true}, {by_birth, true}};

static bool meet(const struct item *a, const struct item *b)
{
    return a->from < b->to && b->from < a->to;
}

static bool crosses(const struct rbi_cycle_call *call)
{
    return call->block != NULL;
}

/* What is freed within the period is in use until then; what crosses has an item of its own. */
static void collect(struct item *items, const struct rbi_cycle *cycle)
{
    size_t count = 0;
    for (size_t i = 0; i < cycle->noted; i++) {
        const struct rbi_cycle_call *const call = &cycle->calls[i];
        const uint32_t of = call->units ? (uint32_t)i : call->of;
        const uint32_t units = cycle->calls[of].units;
        if (call->units && crosses(call))
            items[count++] = (struct item){units, 0, 0, (uint32_t)cycle->noted, of};
        else if (!call->units && !crosses(&cycle->calls[of]))
            items[count++] = (struct item){units, 0, of, (uint32_t)i, of};
    }
}

/* Units that are in use at once at most. */
static uint64_t most_in_use(const struct rbi_cycle *cycle)
{
    uint64_t crossing = 0, in_use = 0, most = 0;
    for (size_t i = 0; i < cycle->noted; i++) {
        const struct rbi_cycle_call *const call = &cycle->calls[i];
        const struct rbi_cycle_call *const of = call->units ? call : &cycle->calls[call->of];
        if (crosses(of))
            crossing += call->units;
        else
            in_use += call->units ? call->units : -(uint64_t)of->units;
        most = rbi_max(most, in_use);
    }
    return crossing + most;
}

/* `placed` are in the order of their offsets. */
static uint32_t find_offset(const struct item **placed, size_t count, const struct item *item,
                            bool smallest_gap)
{
    uint32_t end = 0, best = 0, least = UINT32_MAX;
    for (size_t i = 0; i < count; i++) {
        const struct item *const other = placed[i];
        if (!meet(other, item))
            continue;
        const uint32_t gap = other->offset > end ? other->offset - end : 0;
        if (gap >= item->units && gap < least) {
            best = end;
            least = gap;
            if (!smallest_gap)
                break;
        }
        end = rbi_max(end, other->offset + other->units);
    }
    return least != UINT32_MAX ? best : end;
}

static void insert(const struct item **placed, size_t count, const struct item *item)
{
    while (count > 0 && placed[count - 1]->offset > item->offset) {
        placed[count] = placed[count - 1];
        count--;
    }
    placed[count] = item;
}

/* Units that all of them take. */
static uint64_t place_in_order(struct item *items, const struct item **placed, size_t count,
                               const struct order *order)
{
    uint64_t most = 0;
    qsort(items, count, sizeof *items, order->compare);
    for (size_t i = 0; i < count; i++) {
        items[i].offset = find_offset(placed, i, &items[i], order->smallest_gap);
        insert(placed, i, &items[i]);
        most = rbi_max(most, (uint64_t)items[i].offset + items[i].units);
    }
    return most;
}

/* The same in the best of the orders. */
static uint64_t place_all(struct item *items, const struct item **placed, size_t count,
                          uint64_t in_use_most)
{
    const size_t all = sizeof orders / sizeof *orders;
    uint64_t least = UINT64_MAX, units = 0;
    size_t best = 0;
    for (size_t i = 0; i < all; i++) {
        units = place_in_order(items, placed, count, &orders[i]);
        if (units < least) {
            least = units;
            best = i;
        }
        if (least <= in_use_most + in_use_most / LOST_PARTS)
            break;
    }
    return units == least ? least : place_in_order(items, placed, count, &orders[best]);
}

/* What was found for the same period before is not worked out again where that is too much. */
static bool may_fit(rebatch_pool *pool, uint64_t in_use_most)
{
    const struct rbi_cycle *cycle = &pool->cycle;
    const bool is_known =
        cycle->placed.calls == cycle->noted && cycle->placed.in_use_most == in_use_most;
    const uint64_t units = is_known ? cycle->placed.units : in_use_most;
    return rbi_pool_may_line_up(pool, (size_t)units * REBATCH_POOL_UNIT_BYTES);
}

/* Gathers free granules in a row; memory that nobody has is taken only where there is plenty. */
static char *find_memory(rebatch_pool *pool, uint64_t units)
{
    size_t bytes;
    if (!rbi_round_up((size_t)units * REBATCH_POOL_UNIT_BYTES, pool->granule_bytes, &bytes))
        return NULL;
    return rbi_pool_line_up(pool, bytes, pool->cycle.calls[pool->cycle.allocations[0]].stream);
}

/* Where the blocks begin; NULL: nowhere. */
static char *place_items(rebatch_pool *pool, struct item *items, const struct item **placed)
{
    struct rbi_cycle *cycle = &pool->cycle;
    const uint64_t in_use_most = most_in_use(cycle);
    if (!may_fit(pool, in_use_most))
        return NULL;
    collect(items, cycle);
    const uint64_t units = place_all(items, placed, cycle->allocation_count, in_use_most);
    cycle->placed.calls = cycle->noted;
    cycle->placed.in_use_most = in_use_most;
    cycle->placed.units = units;
    return find_memory(pool, units);
}

bool rbi_cycle_place(rebatch_pool *pool)
{
    struct rbi_cycle *cycle = &pool->cycle;
    const size_t count = cycle->allocation_count;
    if (!pool->has_space || count > MOST_ITEMS || cycle->reserves || cycle->is_several ||
        cycle->use_calls || cycle->use_count || pool->pending)
        return false;
    struct item *items = rbi_heap_calloc(count, sizeof *items);
    const struct item **placed = rbi_heap_calloc(count, sizeof(struct item *));
    char *const base = items && placed ? place_items(pool, items, placed) : NULL;
    for (size_t i = 0; base && i < count; i++)
        cycle->calls[items[i].of].address =
            base + (size_t)items[i].offset * REBATCH_POOL_UNIT_BYTES;
    rbi_heap_free(items);
    rbi_heap_free(placed);
    return base != NULL;
}
