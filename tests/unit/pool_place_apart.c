/* Holds how long memory that other streams have used is left alone: until the next of as few
 * releases as memory allows, and nobody else pays for it. Seeds 1 to 200 where a test draws. */
#include "pool/place.h"
#include "unit/pool_help.h"

enum { PERIOD = 300, ITEMS = 120, STRETCHES = 3 };

/* A period that is made up. */
struct bed {
    struct rbi_item items[ITEMS], before[ITEMS];
    struct rbi_item *used[ITEMS];
    int64_t in_use[PERIOD];
    struct rbi_plan plan;
};

static void open_bed(struct bed *bed)
{
    memset(bed, 0, sizeof *bed);
    bed->plan = (struct rbi_plan){
        .items = bed->items, .used = bed->used, .in_use = bed->in_use, .period = PERIOD};
}

/* `items` more are the next stretch. */
static void add_stretch(struct bed *bed, size_t items)
{
    struct rbi_plan *const plan = &bed->plan;
    struct rbi_stretch *const stretch = &plan->stretches[plan->count];
    const struct rbi_stretch *const last = stretch - 1;
    stretch->items = plan->count ? last->items + last->count : bed->items;
    stretch->count = items;
    rbi_stretch_weigh(stretch, bed->in_use, PERIOD);
    plan->in_use_most += stretch->in_use_most;
    plan->count++;
    memcpy(bed->before, bed->items, sizeof bed->items);
}

static size_t item_count(const struct bed *bed)
{
    size_t count = 0;
    for (size_t i = 0; i < bed->plan.count; i++)
        count += bed->plan.stretches[i].count;
    return count;
}

/* Some are used by other streams, some are in use until the next period. */
static void draw_items(struct bed *bed, uint64_t *random)
{
    for (size_t i = 0; i < ITEMS; i++) {
        const uint32_t from = (uint32_t)(draw(random) % (PERIOD - 1));
        const uint32_t freed = from + 1 + (uint32_t)(draw(random) % (PERIOD - 1 - from));
        const bool crosses = draw(random) % 10 == 0;
        bed->items[i] = (struct rbi_item){.units = 1 + (uint32_t)(draw(random) % 50),
                                          .from = crosses ? 0 : from,
                                          .to = crosses ? PERIOD : freed,
                                          .freed = !crosses && draw(random) % 3 == 0 ? freed : 0};
    }
}

static void draw_bed(struct bed *bed, uint64_t seed)
{
    uint64_t random = seed;
    open_bed(bed);
    draw_items(bed, &random);
    for (size_t i = 0; i < STRETCHES; i++)
        add_stretch(bed, ITEMS / STRETCHES);
}

/* What is in use with a call, each item by itself. */
static uint64_t in_use_at(const struct rbi_stretch *stretch, uint32_t call)
{
    uint64_t units = 0;
    for (size_t i = 0; i < stretch->count; i++) {
        const struct rbi_item *const item = &stretch->items[i];
        const bool here = item->from <= call && call < item->to;
        units += here || call + PERIOD < item->to ? item->units : 0;
    }
    return units;
}

static uint64_t most_in_use(const struct rbi_stretch *stretch)
{
    uint64_t most = 0;
    for (uint32_t call = 0; call < PERIOD; call++)
        most = rbi_max(most, in_use_at(stretch, call));
    return most;
}

/* Nothing but the end of what other streams use has changed: it is later, and not beyond its next
 * allocation. */
static void check_items(const struct bed *bed)
{
    for (size_t i = 0; i < item_count(bed); i++) {
        const struct rbi_item *const item = &bed->items[i], *const before = &bed->before[i];
        cr_assert_eq(item->from, before->from);
        cr_assert_geq(item->to, before->to);
        cr_assert(item->freed || item->to == before->to);
        cr_assert_leq(item->to - item->from, PERIOD);
    }
}

static void check_sums(const struct bed *bed)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < bed->plan.count; i++) {
        const struct rbi_stretch *const stretch = &bed->plan.stretches[i];
        cr_assert_eq(stretch->in_use_most, most_in_use(stretch));
        sum += stretch->in_use_most;
    }
    cr_assert_eq(bed->plan.in_use_most, sum);
}

/* By how many calls all of them are longer in use. */
static uint64_t gained(const struct bed *bed)
{
    uint64_t calls = 0;
    for (size_t i = 0; i < item_count(bed); i++)
        calls += bed->items[i].to - bed->before[i].to;
    return calls;
}

Test(pool_place_apart, off_its_peak_a_stream_leaves_memory_alone_at_no_cost)
{
    static struct bed bed;
    uint64_t calls = 0;
    for (uint64_t seed = 1; seed <= 200; seed++) {
        draw_bed(&bed, seed);
        const uint64_t most = bed.plan.in_use_most;
        rbi_plan_move_apart(&bed.plan, 0);
        check_items(&bed);
        check_sums(&bed);
        cr_assert_eq(bed.plan.in_use_most, most);
        calls += gained(&bed);
    }
    cr_assert_gt(calls, 200 * PERIOD);
}

Test(pool_place_apart, no_more_memory_is_taken_than_there_is_to_spare)
{
    static struct bed bed;
    for (uint64_t seed = 1; seed <= 200; seed++) {
        uint64_t last = 0;
        for (uint64_t units = 0; units <= 4000; units += 1000) {
            draw_bed(&bed, seed);
            const uint64_t most = bed.plan.in_use_most;
            rbi_plan_move_apart(&bed.plan, units);
            check_items(&bed);
            check_sums(&bed);
            cr_assert_leq(bed.plan.in_use_most, most + units);
            cr_assert(units == 0 || gained(&bed) >= last / 2, "%zu, %zu", (size_t)gained(&bed),
                      (size_t)last);
            last = gained(&bed);
        }
    }
}

enum { BUFFERS = PERIOD / 10, UNITS = 8 };

/* One after the other, each of which another stream uses. */
static void add_buffers(struct bed *bed)
{
    for (uint32_t i = 0; i < BUFFERS; i++)
        bed->items[i] = (struct rbi_item){
            .units = UNITS, .from = 10 * i, .to = 10 * i + 5, .freed = 10 * i + 5};
}

/* How many calls there are with which any of the items that are left alone end. */
static size_t count_releases(const struct bed *bed)
{
    bool ends[PERIOD] = {false};
    size_t count = 0;
    for (size_t i = 0; i < item_count(bed); i++)
        if (bed->items[i].freed)
            ends[bed->items[i].to % PERIOD] = true;
    for (size_t i = 0; i < PERIOD; i++)
        count += ends[i];
    return count;
}

/* As many as there is memory for, and those of one release end together. */
Test(pool_place_apart, what_is_freed_waits_for_the_next_release)
{
    enum { HELD = 4 };
    static struct bed bed;
    open_bed(&bed);
    add_buffers(&bed);
    add_stretch(&bed, BUFFERS);
    cr_assert_eq(bed.plan.in_use_most, UNITS);
    rbi_plan_move_apart(&bed.plan, HELD * UNITS);
    cr_assert_eq(bed.plan.in_use_most, (1 + HELD) * UNITS);
    cr_assert_eq(count_releases(&bed), BUFFERS / (HELD + 1));
}

/* They are left alone for 20 calls anyway, of which a mark needs 10: so those that are freed before
 * the mark of a release, and end behind it, need no other. */
Test(pool_place_apart, what_ends_soon_after_a_release_needs_no_mark_of_its_own)
{
    enum { SPARE = 20, LEAD = 10, HELD = 4 };
    static struct bed bed;
    open_bed(&bed);
    bed.plan.lead = LEAD;
    add_buffers(&bed);
    for (uint32_t i = 0; i < BUFFERS; i++)
        bed.items[i].to += SPARE;
    add_stretch(&bed, BUFFERS);
    const uint64_t most = bed.plan.in_use_most;
    rbi_plan_move_apart(&bed.plan, HELD * UNITS);
    check_items(&bed);
    cr_assert_eq(bed.plan.in_use_most, most + HELD * UNITS);
    int64_t mark = -1;
    size_t marks = 0;
    for (uint32_t i = 0; i < BUFFERS; i++) {
        const struct rbi_item *const item = &bed.items[i];
        if (item->freed < mark)
            continue;
        mark = (int64_t)item->to - LEAD;
        marks++;
    }
    cr_assert_leq(marks, (BUFFERS + HELD) / (HELD + 1), "%zu", marks);
}

/* What is to be allocated again is released by then, and with it all else that is held. */
Test(pool_place_apart, nothing_is_held_beyond_its_next_allocation)
{
    static struct bed bed;
    open_bed(&bed);
    bed.plan.lead = 30;
    bed.items[0] = (struct rbi_item){.units = UNITS, .from = 100, .to = PERIOD + 20, .freed = 290};
    bed.items[1] = (struct rbi_item){.units = UNITS, .from = 30, .to = 40, .freed = 40};
    add_stretch(&bed, 2);
    rbi_plan_move_apart(&bed.plan, 100 * UNITS);
    cr_assert_eq(bed.items[0].to, PERIOD + 100);
    cr_assert_eq(bed.items[1].to, 100);
}

/* Memory to spare goes to the stream in which it does most. */
Test(pool_place_apart, memory_goes_where_most_is_won_by_it)
{
    static struct bed bed;
    open_bed(&bed);
    add_buffers(&bed);
    for (uint32_t i = BUFFERS; i < BUFFERS + 2; i++)
        bed.items[i] = (struct rbi_item){.units = UNITS, .from = 1, .to = 50, .freed = 50};
    add_stretch(&bed, BUFFERS);
    add_stretch(&bed, 2);
    rbi_plan_move_apart(&bed.plan, 4 * UNITS);
    cr_assert_gt(bed.plan.stretches[0].in_use_most, UNITS);
    cr_assert_eq(bed.plan.stretches[1].in_use_most, 2 * UNITS);
}
