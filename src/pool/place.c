/* Owns where the blocks of a period lie when they are placed all at once: each stream's in one
 * stretch of memory, as short as can be found, so that none has to be moved in any period.
 * Must not know how a period is learnt, or run.
 *
 * It is known who is in use when, so blocks can be placed in any order, each where nobody is who is
 * in use at the same time: the largest first (greedy by size; Pisarchyk and Lee, "Efficient Memory
 * Management for Deep Neural Net Inference", 2020), and where that is not good enough in two orders
 * more. What streams use of others' blocks is taken to be in use for a while after it is freed, so
 * that it is done when its memory is given out again, and few marks say so (place_apart.c). */
#include <stdlib.h>

#include "pool/place.h"

/* It takes a time that grows with the square of this, for each order: a third of a second. */
#define MOST_ITEMS 16384
/* It is good enough when less than this part is lost. */
#define LOST_PARTS 256
/* For the sake of fewer marks a part of the peak may be held beyond it, but no more than a part of
 * what there is beyond it, as others may want that; or where streams lag so much that more is
 * needed anyway, a part of the peak beyond that. */
#define HELD_PARTS 2
#define BEYOND_PARTS 8
#define APART_PARTS 8
/* Where that does not do, no more than this part of what is held is taken at once. */
#define FRESH_PARTS 4
/* Each try is with less than the one before, by this part of what there was to spare at least. */
#define APART_TRIES 4
#define LESS_PARTS 8

static int compare(uint32_t a, uint32_t b)
{
    return (a > b) - (a < b);
}

static int by_birth(const void *a, const void *b)
{
    const struct rbi_item *x = a, *y = b;
    return compare(y->of, x->of);
}

static int by_size(const void *a, const void *b)
{
    const struct rbi_item *x = a, *y = b;
    const int larger = compare(y->units, x->units);
    return larger ? larger : -by_birth(a, b);
}

static int by_time_in_use(const void *a, const void *b)
{
    const struct rbi_item *x = a, *y = b;
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
static bool meet(const struct rbi_item *a, const struct rbi_item *b, uint32_t period)
{
    if (a->from < b->to && b->from < a->to)
        return true;
    return period != 0 && (b->from + period < a->to || a->from + period < b->to);
}

static bool crosses(const struct rbi_cycle_call *call)
{
    return call->block != NULL;
}

/* Of a block that is freed within the period; `spare_calls` are those for which it is left alone
 * where other streams used it. */
static struct rbi_item make_item(const struct rbi_cycle *cycle, uint32_t of, uint32_t freed)
{
    const bool was_used = cycle->calls[freed].units == RBI_CYCLE_FREE_USED;
    const uint64_t calls = freed - of + (was_used ? cycle->spare_calls : 0);
    return (struct rbi_item){.units = rbi_cycle_units(&cycle->calls[of]),
                             .from = of,
                             .to = of + (uint32_t)rbi_min(calls, (uint64_t)cycle->noted),
                             .of = of,
                             .freed = was_used ? freed : 0};
}

/* What is freed within the period is in use until then; what crosses has an item of its own. */
static size_t collect(struct rbi_item *items, const struct rbi_cycle *cycle,
                      const struct rbi_pool_stream *stream)
{
    size_t count = 0;
    for (uint32_t i = 0; i < cycle->noted; i++) {
        const struct rbi_cycle_call *const call = &cycle->calls[i];
        if (call->stream != stream)
            continue;
        if (rbi_cycle_allocates(call) && crosses(call))
            items[count++] = (struct rbi_item){
                .units = rbi_cycle_units(call), .to = (uint32_t)cycle->noted, .of = i};
        else if (rbi_cycle_frees(call) && !crosses(&cycle->calls[call->of]))
            items[count++] = make_item(cycle, call->of, i);
    }
    return count;
}

/* `placed` are in the order of their offsets. */
static uint32_t find_offset(const struct rbi_item **placed, size_t count,
                            const struct rbi_item *item, uint32_t period, bool smallest_gap)
{
    uint32_t end = 0, best = 0, least = UINT32_MAX;
    for (size_t i = 0; i < count; i++) {
        const struct rbi_item *const other = placed[i];
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

static void insert(const struct rbi_item **placed, size_t count, const struct rbi_item *item)
{
    while (count > 0 && placed[count - 1]->offset > item->offset) {
        placed[count] = placed[count - 1];
        count--;
    }
    placed[count] = item;
}

/* Units that all of them take. */
static uint64_t place_in_order(struct rbi_item *items, const struct rbi_item **placed, size_t count,
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
static uint64_t place_all(struct rbi_stretch *stretch, const struct rbi_item **placed,
                          uint32_t period)
{
    const uint64_t in_use_most = stretch->in_use_most;
    const uint32_t ring = stretch->wraps ? period : 0;
    const size_t all = sizeof orders / sizeof *orders;
    struct rbi_item *const items = stretch->items;
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

/* What a stretch may be made of, beside a free block of the stream's own that is large enough. */
enum source {
    NOTHING_ELSE,
    FREE_GRANULES, /* which are gathered in a row */
    FRESH_MEMORY   /* where there is plenty, and those */
};

static struct rbi_block *find_memory(rebatch_pool *pool, uint64_t units,
                                     struct rbi_pool_stream *stream, enum source source)
{
    size_t bytes;
    if (!rbi_round_up((size_t)units * REBATCH_POOL_UNIT_BYTES, pool->granule_bytes, &bytes))
        return NULL;
    struct rbi_block *block = rbi_pool_find_fit(stream, bytes, UINT64_MAX, SIZE_MAX, RBI_ZONE_ANY);
    if (!block && source != NOTHING_ELSE)
        block = rbi_pool_line_up(pool, bytes, stream, source == FRESH_MEMORY);
    return block ? rbi_block_take(pool, block, bytes) : NULL;
}

static void assign(struct rbi_cycle *cycle, struct rbi_block *const *stretches)
{
    for (size_t i = 0; i < cycle->allocation_count; i++) {
        const uint32_t of = cycle->allocations[i];
        const struct rbi_cycle_place *const place = &cycle->places.of[of];
        cycle->calls[of].address =
            stretches[place->stretch]->address + (size_t)place->offset * REBATCH_POOL_UNIT_BYTES;
    }
}

/* Each stretch is out of all lists until all are found, so that none is made of another. */
static bool take_places(rebatch_pool *pool, enum source source)
{
    struct rbi_cycle_places *const places = &pool->cycle.places;
    struct rbi_block *found[RBI_CYCLE_STRETCHES];
    size_t count = 0;
    rbi_places_gather(pool);
    while (count < places->stretch_count &&
           (found[count] = find_memory(pool, places->stretches[count].units,
                                       places->stretches[count].stream, source)) != NULL)
        count++;
    if (count == places->stretch_count)
        assign(&pool->cycle, found);
    for (size_t i = 0; i < count; i++) {
        places->stretches[i].address = found[i]->address;
        (void)rbi_pool_put_block(pool, found[i]);
    }
    return count == places->stretch_count;
}

static bool keep_and_take(rebatch_pool *pool, const struct rbi_plan *plan)
{
    struct rbi_cycle *cycle = &pool->cycle;
    if (rbi_places_keep(cycle, plan) &&
        take_places(pool, plan->takes_fresh ? FRESH_MEMORY : FREE_GRANULES))
        return true;
    cycle->places.count = 0;
    return false;
}

/* ---- all of it ---- */

/* The streams that the period allocates for, and what each has of the items. */
static bool collect_all(rebatch_pool *pool, struct rbi_plan *plan)
{
    struct rbi_item *items = plan->items;
    plan->count = 0;
    plan->in_use_most = 0;
    for (struct rbi_pool_stream *s = pool->first_stream; s; s = s->next) {
        const size_t own = collect(items, &pool->cycle, s);
        if (own == 0)
            continue;
        if (plan->count == RBI_CYCLE_STRETCHES)
            return false;
        struct rbi_stretch *const stretch = &plan->stretches[plan->count++];
        *stretch = (struct rbi_stretch){.stream = s, .items = items, .count = own};
        rbi_stretch_weigh(stretch, plan->in_use, plan->period);
        plan->in_use_most += stretch->in_use_most;
        items += own;
    }
    return true;
}

/* Units that all of them take. */
static uint64_t place_each(struct rbi_plan *plan)
{
    uint64_t units = 0;
    for (size_t i = 0; i < plan->count; i++) {
        struct rbi_stretch *const stretch = &plan->stretches[i];
        stretch->units = place_all(stretch, plan->placed, plan->period);
        units += stretch->units;
    }
    return units;
}

static uint64_t cached_bytes(const rebatch_pool *pool)
{
    return pool->stats.reserved_bytes - pool->stats.live_bytes;
}

/* What they may take so that there are fewer marks: more than what is cached only where there is
 * plenty. */
static uint64_t most_bytes_apart(rebatch_pool *pool, struct rbi_plan *plan)
{
    const uint64_t peak = pool->stats.live_peak_bytes, live = pool->stats.live_bytes;
    const uint64_t least = plan->in_use_most * REBATCH_POOL_UNIT_BYTES;
    const uint64_t more =
        rbi_min(peak / HELD_PARTS, rbi_pool_bytes_beyond_peak(pool) / BEYOND_PARTS);
    const uint64_t enough = rbi_max(peak + more - rbi_min(live, peak), least + peak / APART_PARTS);
    const uint64_t cached = cached_bytes(pool);
    plan->has_enough = rbi_pool_may_line_up(pool, (size_t)enough);
    plan->takes_fresh = plan->has_enough && enough > cached;
    return plan->has_enough ? enough : rbi_min(enough, cached);
}

/* With as much time as memory allows before what other streams have used is given out again. Where
 * too much is lost between blocks, the next try is with that much less, and some. */
static bool place_apart(rebatch_pool *pool, struct rbi_plan *plan)
{
    uint64_t lost = 0;
    for (unsigned tries = 0; tries < APART_TRIES; tries++) {
        if (!collect_all(pool, plan))
            return false;
        const uint64_t most = most_bytes_apart(pool, plan) / REBATCH_POOL_UNIT_BYTES;
        if (plan->in_use_most + lost > most)
            return false;
        const uint64_t spare = most - plan->in_use_most - lost;
        rbi_plan_move_apart(plan, spare);
        const uint64_t units = place_each(plan);
        if (units <= most)
            return keep_and_take(pool, plan);
        lost += units - most + spare / LESS_PARTS;
    }
    return false;
}

/* What was found for the same period before is not worked out again where that is too much. */
static bool place_closely(rebatch_pool *pool, struct rbi_plan *plan)
{
    struct rbi_cycle *cycle = &pool->cycle;
    if (!collect_all(pool, plan))
        return false;
    const bool is_known = cycle->placed.calls == cycle->noted &&
                          cycle->placed.in_use_most == plan->in_use_most &&
                          cycle->placed.spare_calls == cycle->spare_calls;
    const uint64_t least = is_known ? cycle->placed.units : plan->in_use_most;
    const uint64_t bytes = least * REBATCH_POOL_UNIT_BYTES;
    if (bytes > cached_bytes(pool) + pool->stats.reserved_bytes / FRESH_PARTS ||
        !rbi_pool_may_line_up(pool, (size_t)bytes))
        return false;
    cycle->placed.calls = cycle->noted;
    cycle->placed.in_use_most = plan->in_use_most;
    cycle->placed.spare_calls = cycle->spare_calls;
    cycle->placed.units = place_each(plan);
    plan->takes_fresh = true;
    plan->has_enough = false;
    return keep_and_take(pool, plan);
}

static bool place_items(rebatch_pool *pool, struct rbi_plan *plan)
{
    return (rbi_cycle_may_be_apart(&pool->cycle) && place_apart(pool, plan)) ||
           place_closely(pool, plan);
}

static bool place_anew(rebatch_pool *pool)
{
    struct rbi_cycle *cycle = &pool->cycle;
    const size_t count = cycle->allocation_count;
    struct rbi_plan plan = {.items = rbi_heap_calloc(count, sizeof *plan.items),
                            .placed = rbi_heap_calloc(count, sizeof(struct rbi_item *)),
                            .used = rbi_heap_calloc(count, sizeof(struct rbi_item *)),
                            .in_use = rbi_heap_calloc(cycle->noted, sizeof *plan.in_use),
                            .period = (uint32_t)cycle->noted,
                            .lead = (uint32_t)cycle->lead_calls};
    const bool is_placed =
        plan.items && plan.placed && plan.used && plan.in_use && place_items(pool, &plan);
    rbi_heap_free(plan.items);
    rbi_heap_free(plan.used);
    rbi_heap_free(plan.placed);
    rbi_heap_free(plan.in_use);
    return is_placed;
}

/* Where it need not be it is done for the sake of fewer marks, and seldom: for other calls than the
 * last only when the pool has made as many allocations again. */
static bool may_place_anew(const rebatch_pool *pool, bool must_be)
{
    const struct rbi_cycle *cycle = &pool->cycle;
    return must_be || cycle->lead_calls > cycle->places.spare_calls ||
           rbi_cycle_is_outdated(pool) || pool->births >= 2 * cycle->placed_births;
}

bool rbi_cycle_may_be_placed(const rebatch_pool *pool)
{
    const struct rbi_cycle *cycle = &pool->cycle;
    return pool->has_space && cycle->allocation_count <= MOST_ITEMS && !cycle->reserves;
}

bool rbi_cycle_place(rebatch_pool *pool, bool moved, bool has_places)
{
    struct rbi_cycle *cycle = &pool->cycle;
    if (!rbi_cycle_may_be_placed(pool))
        return false;
    const bool is_short = moved && !rbi_pool_is_plentiful(pool);
    const bool must_be = is_short || cycle->lags || (!moved && !has_places);
    const bool are_known = !rbi_cycle_is_outdated(pool) && rbi_places_are_for(cycle);
    /* What is lined up was the memory of other sizes, which would take fresh memory for it where
     * there is plenty: so not without need. */
    if (are_known && take_places(pool, must_be ? FREE_GRANULES : NOTHING_ELSE))
        return true;
    if (are_known ? !must_be : !may_place_anew(pool, must_be))
        return false;
    const uint64_t layout = pool->layout;
    const bool is_placed = place_anew(pool);
    cycle->placed_births = pool->births;
    cycle->stays = !is_placed && (rbi_pool_knows_needs(pool) || pool->layout != layout);
    return is_placed;
}
