/* Owns how long memory that other streams have used is left alone before it is given out again.
 * Must not know where it lies. */
#include "pool/place.h"

/* The first round asks for this part of a period, each other for an eighth more. */
#define FIRST_PARTS 128
#define ROUND_PARTS 8
/* Where less than this part is free blocks do not lie next to each other without a loss. */
#define TIGHT_PARTS 16
/* Memory to spare is given out in so many parts. */
#define PARTS 16

/* ---- what is in use when ---- */

void rbi_stretch_weigh(struct rbi_stretch *stretch, int64_t *in_use, uint32_t period)
{
    int64_t now = 0, most = 0;
    memset(in_use, 0, period * sizeof *in_use);
    stretch->wraps = false;
    for (size_t i = 0; i < stretch->count; i++) {
        const struct rbi_item *const item = &stretch->items[i];
        in_use[item->from] += item->units;
        if (item->to > period)
            now += item->units;
        if (item->to != period)
            in_use[item->to % period] -= item->units;
        stretch->wraps |= item->to > period;
    }
    for (uint32_t i = 0; i < period; i++)
        most = rbi_max(most, in_use[i] = now += in_use[i]);
    stretch->in_use_most = (uint64_t)most;
}

/* Calls [from, to) within one period. */
static bool has_room_between(const int64_t *in_use, uint32_t from, uint32_t to, int64_t most)
{
    int64_t highest = 0;
    for (uint32_t i = from; i < to; i++)
        highest = rbi_max(highest, in_use[i]);
    return highest <= most;
}

static void add_between(int64_t *in_use, uint32_t from, uint32_t to, int64_t units)
{
    for (uint32_t i = from; i < to; i++)
        in_use[i] += units;
}

/* The item is in use until `to` instead, if that leaves no more than `most` in use. What is at and
 * behind the period's end is at the beginning of the next. */
static bool extend(struct rbi_item *item, uint32_t to, int64_t *in_use, uint32_t period,
                   uint64_t most)
{
    const uint32_t here = rbi_min(item->to, period), here_end = rbi_min(to, period);
    const uint32_t next = rbi_max(item->to, period) - period;
    const uint32_t next_end = rbi_max(to, period) - period;
    if (most < item->units)
        return false;
    const int64_t left = (int64_t)(most - item->units);
    if (!has_room_between(in_use, here, here_end, left) ||
        !has_room_between(in_use, next, next_end, left))
        return false;
    add_between(in_use, here, here_end, item->units);
    add_between(in_use, next, next_end, item->units);
    item->to = to;
    return true;
}

/* ---- moving apart ---- */

/* So many calls after it was freed, and before it is allocated again. */
static uint32_t goal_of(const struct rbi_item *item, uint32_t calls, uint32_t period)
{
    return rbi_min(item->freed + calls, item->from + period);
}

/* One round. Where hardly any item has room it is undone: blocks of one size lie next to each other
 * without a loss as long as all of them are left alone equally long. */
static bool try_all(struct rbi_stretch *stretch, uint32_t calls, int64_t *in_use, uint32_t period,
                    uint64_t most)
{
    size_t wanted = 0, extended = 0;
    for (size_t i = 0; i < stretch->count; i++) {
        struct rbi_item *const item = &stretch->items[i];
        const uint32_t goal = goal_of(item, calls, period);
        item->was_to = item->to;
        if (item->freed == 0 || item->to >= goal)
            continue;
        wanted++;
        extended += extend(item, goal, in_use, period, most);
    }
    if (2 * extended >= wanted)
        return true;
    for (size_t i = 0; i < stretch->count; i++)
        stretch->items[i].to = stretch->items[i].was_to;
    return false;
}

/* With at most `most` units in use. */
static void fill(struct rbi_stretch *stretch, const struct rbi_plan *plan, uint64_t most)
{
    const uint32_t last = plan->period / 2;
    uint32_t calls = plan->period / FIRST_PARTS + 1;
    rbi_stretch_weigh(stretch, plan->in_use, plan->period);
    while (calls < last && try_all(stretch, calls, plan->in_use, plan->period, most))
        calls += calls / ROUND_PARTS + 1;
    if (calls >= last)
        (void)try_all(stretch, last, plan->in_use, plan->period, most);
    rbi_stretch_weigh(stretch, plan->in_use, plan->period);
}

/* How many items would be left alone for longer if there were more memory. */
static size_t count_short(const struct rbi_stretch *stretch, uint32_t period)
{
    size_t count = 0;
    for (size_t i = 0; i < stretch->count; i++) {
        const struct rbi_item *const item = &stretch->items[i];
        count += item->freed != 0 && item->to < goal_of(item, period / 2, period);
    }
    return count;
}

static size_t neediest(const struct rbi_plan *plan)
{
    size_t best = plan->count, most = 0;
    for (size_t i = 0; i < plan->count; i++) {
        const size_t count = count_short(&plan->stretches[i], plan->period);
        if (count > most) {
            best = i;
            most = count;
        }
    }
    return best;
}

bool rbi_cycle_may_be_apart(const struct rbi_cycle *cycle)
{
    return cycle->use_count != 0 && cycle->used_frees <= RBI_PLAN_APART_FREES &&
           (uint64_t)cycle->used_frees * cycle->noted <= RBI_PLAN_APART_CALLS;
}

void rbi_plan_move_apart(struct rbi_plan *plan, uint64_t units)
{
    uint64_t most[RBI_CYCLE_STRETCHES];
    for (size_t i = 0; i < plan->count; i++) {
        most[i] = plan->stretches[i].in_use_most;
        fill(&plan->stretches[i], plan, most[i] - most[i] / TIGHT_PARTS);
    }
    for (unsigned part = 0; part < PARTS && units >= PARTS; part++) {
        const size_t i = neediest(plan);
        if (i == plan->count)
            break;
        most[i] += units / PARTS;
        fill(&plan->stretches[i], plan, most[i]);
    }
    plan->in_use_most = 0;
    for (size_t i = 0; i < plan->count; i++)
        plan->in_use_most += plan->stretches[i].in_use_most;
}
