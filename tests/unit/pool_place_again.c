/* Holds for which calls the places of the last time are good: the same, each of them. */
#include "pool/place.h"
#include "unit/pool_help.h"

enum { CALLS = 6 };

/* Two blocks of two streams, one of which is used by the other; a third is in use when the period
 * begins. */
struct bed {
    struct rbi_pool_stream streams[2];
    struct rbi_block block;
    struct rbi_cycle_call calls[CALLS];
    struct rbi_cycle cycle;
    struct rbi_item items[3];
    struct rbi_plan plan;
};

static void open_bed(struct bed *bed)
{
    *bed = (struct bed){.calls = {{.units = RBI_CYCLE_FREE, .of = 5, .stream = &bed->streams[0]},
                                  {.units = 3, .stream = &bed->streams[0]},
                                  {.units = 4, .stream = &bed->streams[1]},
                                  {.units = RBI_CYCLE_FREE_USED, .of = 1},
                                  {.units = RBI_CYCLE_FREE, .of = 2},
                                  {.units = 7, .stream = &bed->streams[0], .block = &bed->block}},
                        .items = {{.units = 3, .of = 1, .offset = 10},
                                  {.units = 7, .of = 5, .offset = 20},
                                  {.units = 4, .of = 2, .offset = 30}}};
    bed->cycle.calls = bed->calls;
    bed->cycle.noted = CALLS;
    bed->cycle.spare_calls = 8;
    bed->plan = (struct rbi_plan){.period = CALLS, .count = 2, .has_enough = true};
    bed->plan.stretches[0] = (struct rbi_stretch){
        .stream = &bed->streams[0], .items = bed->items, .count = 2, .units = 100};
    bed->plan.stretches[1] = (struct rbi_stretch){
        .stream = &bed->streams[1], .items = &bed->items[2], .count = 1, .units = 200};
}

Test(pool_place_again, what_was_planned_is_kept)
{
    struct bed bed;
    open_bed(&bed);
    cr_assert_not(rbi_places_are_for(&bed.cycle), "there are none");
    cr_assert(rbi_places_keep(&bed.cycle, &bed.plan));
    const struct rbi_cycle_places *const places = &bed.cycle.places;
    cr_assert(places->has_enough);
    cr_assert_eq(places->stretch_count, 2);
    cr_assert(places->stretches[1].stream == &bed.streams[1] && places->stretches[1].units == 200);
    cr_assert(places->of[1].offset == 10 && places->of[1].stretch == 0);
    cr_assert(places->of[5].offset == 20 && places->of[5].stretch == 0);
    cr_assert(places->of[2].offset == 30 && places->of[2].stretch == 1);
    cr_assert(rbi_places_are_for(&bed.cycle));
    rbi_heap_free(bed.cycle.places.of);
}

Test(pool_place_again, another_call_has_other_places)
{
    struct bed bed;
    open_bed(&bed);
    cr_assert(rbi_places_keep(&bed.cycle, &bed.plan));
    struct rbi_cycle *const cycle = &bed.cycle;
    const struct rbi_cycle_call calls[CALLS] = {bed.calls[0], bed.calls[1], bed.calls[2],
                                                bed.calls[3], bed.calls[4], bed.calls[5]};
    bed.calls[1].units++;
    cr_assert_not(rbi_places_are_for(cycle), "a size");
    bed.calls[1] = calls[1];
    bed.calls[1].stream = &bed.streams[1];
    cr_assert_not(rbi_places_are_for(cycle), "a stream");
    bed.calls[1] = calls[1];
    bed.calls[3].units = RBI_CYCLE_FREE;
    cr_assert_not(rbi_places_are_for(cycle), "nobody else uses it");
    bed.calls[3] = calls[3];
    bed.calls[4].of = 1;
    cr_assert_not(rbi_places_are_for(cycle), "another block is freed");
    bed.calls[4] = calls[4];
    bed.calls[5].block = NULL;
    cr_assert_not(rbi_places_are_for(cycle), "it is not in use any more");
    bed.calls[5] = calls[5];
    cycle->noted--;
    cr_assert_not(rbi_places_are_for(cycle), "a shorter period");
    cycle->noted++;
    cycle->lead_calls = 9;
    cr_assert_not(rbi_places_are_for(cycle), "streams lag by more");
    cycle->lead_calls = 8;
    cr_assert(rbi_places_are_for(cycle));
    rbi_heap_free(cycle->places.of);
}
