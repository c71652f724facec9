/* Owns where the blocks of a period were placed last, so that it is not worked out again.
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
