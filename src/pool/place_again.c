/* Owns where the blocks of a period were placed last, so that it is not worked out again, and that
 * the memory there is had again.
 * Must not know how places are found. */
#include "pool/place.h"

static struct rbi_cycle_place describe(const struct rbi_cycle_call *call)
{
    const bool allocates = rbi_cycle_allocates(call);
    return (struct rbi_cycle_place){.units = call->units,
                                    .of = allocates ? 0 : call->of,
                                    .crosses = allocates && call->block != NULL};
}

static void keep_offsets(struct rbi_cycle_places *places, const struct rbi_plan *plan)
{
    places->stretch_count = plan->count;
    for (size_t i = 0; i < plan->count; i++) {
        const struct rbi_stretch *const stretch = &plan->stretches[i];
        places->stretches[i].stream = stretch->stream;
        places->stretches[i].units = stretch->units;
        for (size_t n = 0; n < stretch->count; n++) {
            const struct rbi_item *const item = &stretch->items[n];
            places->of[item->of].offset = item->offset;
            places->of[item->of].stretch = (uint16_t)i;
        }
    }
}

bool rbi_places_keep(struct rbi_cycle *cycle, const struct rbi_plan *plan)
{
    struct rbi_cycle_places *const places = &cycle->places;
    struct rbi_cycle_place *const of = rbi_heap_calloc(cycle->noted, sizeof *of);
    if (!of)
        return false;
    rbi_heap_free(places->of);
    *places = (struct rbi_cycle_places){.of = of,
                                        .count = cycle->noted,
                                        .spare_calls = cycle->spare_calls,
                                        .has_enough = plan->has_enough};
    for (size_t i = 0; i < cycle->noted; i++)
        of[i] = describe(&cycle->calls[i]);
    keep_offsets(places, plan);
    return true;
}

static bool is_same(const struct rbi_cycle_places *places, size_t i,
                    const struct rbi_cycle_call *call)
{
    const struct rbi_cycle_place *const place = &places->of[i];
    const struct rbi_cycle_place now = describe(call);
    if (place->units != now.units || place->of != now.of || place->crosses != now.crosses)
        return false;
    return !rbi_cycle_allocates(call) || places->stretches[place->stretch].stream == call->stream;
}

bool rbi_places_are_for(const struct rbi_cycle *cycle)
{
    const struct rbi_cycle_places *const places = &cycle->places;
    if (!places->of || places->count != cycle->noted || places->spare_calls < cycle->lead_calls)
        return false;
    size_t same = 0;
    while (same < cycle->noted && is_same(places, same, &cycle->calls[same]))
        same++;
    return same == cycle->noted;
}

/* ---- their memory ---- */

/* The streams' work is waited for at most once in so many periods. */
#define WAIT_PERIODS 16

/* Of a stretch that has an address. */
static char *end_of(const rebatch_pool *pool, const struct rbi_cycle_stretch *stretch)
{
    size_t bytes = (size_t)stretch->units * REBATCH_POOL_UNIT_BYTES;
    (void)rbi_round_up(bytes, pool->granule_bytes, &bytes);
    return stretch->address + bytes;
}

static struct rbi_block *first_of(const rebatch_pool *pool, const struct rbi_cycle_stretch *stretch)
{
    return stretch->address ? rbi_pool_block_around(pool, stretch->address) : NULL;
}

static bool is_unused(const struct rbi_block *block, const struct rbi_cycle_stretch *stretch)
{
    (void)stretch;
    return block->state == RBI_BLOCK_FREE || block->state == RBI_BLOCK_PENDING;
}

static bool is_done(const struct rbi_block *block, const struct rbi_cycle_stretch *stretch)
{
    return block->state == RBI_BLOCK_FREE &&
           (block->stream == stretch->stream || block->freed_at <= block->stream->done);
}

static bool is_own(const struct rbi_block *block, const struct rbi_cycle_stretch *stretch)
{
    return block->state == RBI_BLOCK_FREE && block->stream == stretch->stream;
}

/* Whether a stretch consists of such blocks. */
static bool consists_of(const rebatch_pool *pool, const struct rbi_cycle_stretch *stretch,
                        bool (*is)(const struct rbi_block *, const struct rbi_cycle_stretch *))
{
    for (const struct rbi_block *block = first_of(pool, stretch); block && is(block, stretch);
         block = block->after)
        if (block->address + block->bytes >= end_of(pool, stretch))
            return true;
    return false;
}

static bool all_consist_of(const rebatch_pool *pool,
                           bool (*is)(const struct rbi_block *, const struct rbi_cycle_stretch *))
{
    const struct rbi_cycle_places *const places = &pool->cycle.places;
    for (size_t i = 0; i < places->stretch_count; i++)
        if (!consists_of(pool, &places->stretches[i], is))
            return false;
    return true;
}

/* What of a free block lies in the stretch becomes its stream's. Gives the block behind it. */
static struct rbi_block *give_part(rebatch_pool *pool, struct rbi_block *block,
                                   const struct rbi_cycle_stretch *stretch)
{
    char *const from = stretch->address, *const to = end_of(pool, stretch);
    if (block->stream == stretch->stream)
        return block->after;
    rbi_pool_bin_remove(block);
    if (block->address < from) {
        struct rbi_block *const part = rbi_pool_split(pool, block, (size_t)(from - block->address));
        rbi_pool_bin_add(block);
        block = part;
    }
    if (block->address + block->bytes > to)
        rbi_pool_bin_add(rbi_pool_split(pool, block, (size_t)(to - block->address)));
    rbi_pool_give_to(pool, block, stretch->stream);
    return rbi_pool_put_block(pool, block)->after;
}

static void gather(rebatch_pool *pool, const struct rbi_cycle_stretch *stretch)
{
    struct rbi_block *block = first_of(pool, stretch);
    while (block && block->address < end_of(pool, stretch) && rbi_pool_prepare_blocks(pool, 2))
        block = give_part(pool, block, stretch);
}

/* Whoever has had parts of it since has freed them: whether they are done is asked, and waited for
 * now and then. */
static bool settle(rebatch_pool *pool)
{
    struct rbi_cycle *const cycle = &pool->cycle;
    if (rbi_pool_poll_streams(pool) != REBATCH_OK)
        return false;
    if (all_consist_of(pool, is_done))
        return true;
    if (pool->births - cycle->waited_births < WAIT_PERIODS * cycle->allocation_count)
        return false;
    cycle->waited_births = pool->births;
    return rbi_pool_await_streams(pool) == REBATCH_OK;
}

void rbi_places_gather(rebatch_pool *pool)
{
    const struct rbi_cycle_places *const places = &pool->cycle.places;
    if (all_consist_of(pool, is_own) || !all_consist_of(pool, is_unused) || !settle(pool))
        return;
    for (size_t i = 0; i < places->stretch_count; i++)
        gather(pool, &places->stretches[i]);
}
