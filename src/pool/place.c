/* Owns where the blocks of a period lie when they are placed all at once: each stream's in one
 * stretch of memory, as short as can be found, so that none has to be moved in any period.
 * Must not know how a period is learnt, or run.
 *
 * It is known who is in use when, so blocks can be placed in any order, each where nobody is who is
 * in use at the same time: the largest first (greedy by size; Pisarchyk and Lee, "Efficient Memory
 * Management for Deep Neural Net Inference", 2020), and where that is not good enough in two orders
 * more. Where streams lag, what they use of others' blocks is taken to be in use for a while after
 * it is freed, so that it is likely to be done when its memory is given out again. */
#include <stdlib.h>

#include "pool/pool.h"

/* It takes a time that grows with the square of this, for each order: a third of a second. */
#define MOST_ITEMS 16384
/* It is good enough when less than this part is lost. */
#define LOST_PARTS 256
/* Less time to spare than this part of a period is not worth a try. */
#define LEAST_SPARE_PARTS 128

/* What call `of` allocates. In units, and in calls of the period: in use from `from` until before
 * `to`, which may be in the next period, up to where it was allocated in this. What is in use from
 * one period into the next has its place for itself. */
struct item {
    uint32_t units, offset;
    uint32_t from, to;
    uint32_t of;
};

/* What one stream has. */
struct stretch {
    struct rbi_pool_stream *stream;
    struct item *items;
    size_t count;
    bool wraps;
    uint64_t in_use_most, units;
    struct rbi_block *block; /* where they lie, out of all lists */
};
#define MOST_STRETCHES 16

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

/* `period` is 0 where nothing is in use until the next one. */
static bool meet(const struct item *a, const struct item *b, uint32_t period)
{
    if (a->from < b->to && b->from < a->to)
        return true;
    return period != 0 && (b->from + period < a->to || a->from + period < b->to);
}

static bool crosses(const struct rbi_cycle_call *call)
{
    return call->block != NULL;
}

/* Before which call memory that was freed with a call is not to be given out again. */
static uint32_t end_of_use(const struct rbi_cycle *cycle, uint32_t of, uint32_t freed,
                           uint64_t spare_calls)
{
    const bool was_used = cycle->calls[freed].units == RBI_CYCLE_FREE_USED;
    const uint64_t calls = freed - of + (was_used ? spare_calls : 0);
    return of + (uint32_t)rbi_min(calls, (uint64_t)cycle->noted);
}

/* What is freed within the period is in use until then; what crosses has an item of its own. */
static size_t collect(struct item *items, const struct rbi_cycle *cycle,
                      const struct rbi_pool_stream *stream, uint64_t spare_calls)
{
    size_t count = 0;
    for (uint32_t i = 0; i < cycle->noted; i++) {
        const struct rbi_cycle_call *const call = &cycle->calls[i];
        if (call->stream != stream || (!rbi_cycle_allocates(call) && !rbi_cycle_frees(call)))
            continue;
        const bool frees = rbi_cycle_frees(call);
        const uint32_t of = frees ? call->of : i;
        const uint32_t units = cycle->calls[of].units;
        if (!frees && crosses(call))
            items[count++] = (struct item){units, 0, 0, (uint32_t)cycle->noted, of};
        else if (frees && !crosses(&cycle->calls[of]))
            items[count++] = (struct item){units, 0, of, end_of_use(cycle, of, i, spare_calls), of};
    }
    return count;
}

/* Units that are in use at once at most, and whether some are until the next period; `changes` has
 * space for each call. */
static void find_most(struct stretch *stretch, int64_t *changes, uint32_t period)
{
    int64_t in_use = 0, most;
    memset(changes, 0, period * sizeof *changes);
    stretch->wraps = false;
    for (size_t i = 0; i < stretch->count; i++) {
        const struct item *const item = &stretch->items[i];
        changes[item->from] += item->units;
        if (item->to > period)
            in_use += item->units;
        if (item->to != period)
            changes[item->to % period] -= item->units;
        stretch->wraps |= item->to > period;
    }
    most = in_use;
    for (uint32_t i = 0; i < period; i++)
        most = rbi_max(most, in_use += changes[i]);
    stretch->in_use_most = (uint64_t)most;
}

/* `placed` are in the order of their offsets. */
static uint32_t find_offset(const struct item **placed, size_t count, const struct item *item,
                            uint32_t period, bool smallest_gap)
{
    uint32_t end = 0, best = 0, least = UINT32_MAX;
    for (size_t i = 0; i < count; i++) {
        const struct item *const other = placed[i];
        if (!meet(other, item, period))
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
                               uint32_t period, const struct order *order)
{
    uint64_t most = 0;
    qsort(items, count, sizeof *items, order->compare);
    for (size_t i = 0; i < count; i++) {
        items[i].offset = find_offset(placed, i, &items[i], period, order->smallest_gap);
        insert(placed, i, &items[i]);
        most = rbi_max(most, (uint64_t)items[i].offset + items[i].units);
    }
    return most;
}

/* The same in the best of the orders. */
static uint64_t place_all(struct stretch *stretch, const struct item **placed, uint32_t period)
{
    const uint64_t in_use_most = stretch->in_use_most;
    const uint32_t ring = stretch->wraps ? period : 0;
    const size_t all = sizeof orders / sizeof *orders;
    struct item *const items = stretch->items;
    const size_t count = stretch->count;
    uint64_t least = UINT64_MAX, units = 0;
    size_t best = 0;
    for (size_t i = 0; i < all; i++) {
        units = place_in_order(items, placed, count, ring, &orders[i]);
        if (units < least) {
            least = units;
            best = i;
        }
        if (least <= in_use_most + in_use_most / LOST_PARTS)
            break;
    }
    return units == least ? least : place_in_order(items, placed, count, ring, &orders[best]);
}

/* ---- memory for them ---- */

/* All that a period is placed with. */
struct plan {
    struct item *items;
    const struct item **placed;
    int64_t *changes;
    struct stretch stretches[MOST_STRETCHES];
    size_t count;
    uint64_t spare_calls;
    uint64_t in_use_most; /* of all streams, each by itself */
};

/* A free block of the stream's own that is large enough, or free granules that are gathered in a
 * row; memory that nobody has is taken only where there is plenty. It is out of all lists, so that
 * the next stretch is not made of it. */
static bool find_memory(rebatch_pool *pool, struct stretch *stretch)
{
    size_t bytes;
    if (!rbi_round_up((size_t)stretch->units * REBATCH_POOL_UNIT_BYTES, pool->granule_bytes,
                      &bytes))
        return false;
    struct rbi_block *block =
        rbi_pool_find_fit(stretch->stream, bytes, UINT64_MAX, SIZE_MAX, RBI_ZONE_ANY);
    if (!block)
        block = rbi_pool_line_up(pool, bytes, stretch->stream);
    if (block)
        stretch->block = rbi_block_take(pool, block, bytes);
    return block != NULL;
}

static void assign(rebatch_pool *pool, const struct stretch *stretch)
{
    for (size_t i = 0; i < stretch->count; i++)
        pool->cycle.calls[stretch->items[i].of].address =
            stretch->block->address + (size_t)stretch->items[i].offset * REBATCH_POOL_UNIT_BYTES;
}

static bool find_memory_for_all(rebatch_pool *pool, struct plan *plan)
{
    size_t found = 0;
    while (found < plan->count && find_memory(pool, &plan->stretches[found]))
        found++;
    for (size_t i = 0; i < found; i++) {
        if (found == plan->count)
            assign(pool, &plan->stretches[i]);
        (void)rbi_pool_put_block(pool, plan->stretches[i].block);
    }
    return found == plan->count;
}

/* ---- all of it ---- */

/* The streams that the period allocates for, and what each has of the items. */
static bool collect_all(rebatch_pool *pool, struct plan *plan, uint64_t spare_calls)
{
    const struct rbi_cycle *cycle = &pool->cycle;
    struct item *items = plan->items;
    plan->count = 0;
    plan->in_use_most = 0;
    plan->spare_calls = spare_calls;
    for (struct rbi_pool_stream *s = pool->first_stream; s; s = s->next) {
        const size_t own = collect(items, cycle, s, spare_calls);
        if (own == 0)
            continue;
        if (plan->count == MOST_STRETCHES)
            return false;
        struct stretch *const stretch = &plan->stretches[plan->count++];
        *stretch = (struct stretch){.stream = s, .items = items, .count = own};
        find_most(stretch, plan->changes, (uint32_t)cycle->noted);
        plan->in_use_most += stretch->in_use_most;
        items += own;
    }
    return true;
}

static size_t cached_bytes(const rebatch_pool *pool)
{
    return (size_t)(pool->stats.reserved_bytes - pool->stats.live_bytes);
}

/* What was found for the same period before is not worked out again where that is too much. */
static uint64_t least_units(const struct rbi_cycle *cycle, const struct plan *plan)
{
    const bool is_known = cycle->placed.calls == cycle->noted &&
                          cycle->placed.in_use_most == plan->in_use_most &&
                          cycle->placed.spare_calls == plan->spare_calls;
    return is_known ? cycle->placed.units : plan->in_use_most;
}

/* As much time to spare as what is cached allows, as that costs nothing; at least what streams were
 * seen to need, for which more memory may be taken. */
static bool choose_spare_calls(rebatch_pool *pool, struct plan *plan)
{
    const struct rbi_cycle *cycle = &pool->cycle;
    uint64_t spare_calls = cycle->use_count ? cycle->noted / 2 : 0;
    for (; spare_calls > rbi_max(cycle->spare_calls, cycle->noted / LEAST_SPARE_PARTS);
         spare_calls /= 2) {
        if (!collect_all(pool, plan, spare_calls))
            return false;
        if (least_units(cycle, plan) * REBATCH_POOL_UNIT_BYTES <= cached_bytes(pool))
            return true;
    }
    return collect_all(pool, plan, cycle->spare_calls) &&
           rbi_pool_may_line_up(pool, least_units(cycle, plan) * REBATCH_POOL_UNIT_BYTES);
}

static bool place_items(rebatch_pool *pool, struct plan *plan)
{
    struct rbi_cycle *cycle = &pool->cycle;
    if (!choose_spare_calls(pool, plan))
        return false;
    uint64_t units = 0;
    for (size_t i = 0; i < plan->count; i++) {
        struct stretch *const stretch = &plan->stretches[i];
        stretch->units = place_all(stretch, plan->placed, (uint32_t)cycle->noted);
        units += stretch->units;
    }
    cycle->placed.calls = cycle->noted;
    cycle->placed.in_use_most = plan->in_use_most;
    cycle->placed.spare_calls = plan->spare_calls;
    cycle->placed.units = units;
    return find_memory_for_all(pool, plan);
}

bool rbi_cycle_place(rebatch_pool *pool)
{
    struct rbi_cycle *cycle = &pool->cycle;
    const size_t count = cycle->allocation_count;
    if (!pool->has_space || count > MOST_ITEMS || cycle->reserves)
        return false;
    struct plan plan = {.items = rbi_heap_calloc(count, sizeof *plan.items),
                        .placed = rbi_heap_calloc(count, sizeof(struct item *)),
                        .changes = rbi_heap_calloc(cycle->noted, sizeof *plan.changes)};
    const bool is_placed = plan.items && plan.placed && plan.changes && place_items(pool, &plan);
    rbi_heap_free(plan.items);
    rbi_heap_free(plan.placed);
    rbi_heap_free(plan.changes);
    return is_placed;
}
