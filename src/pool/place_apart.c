/* Owns how long memory that other streams have used is left alone before it is given out again.
 * Must not know where it lies. */
#include <stdlib.h>

#include "pool/place.h"

/* Sums that are tried for each stretch, from none to all that there is to spare. */
#define SUMS 65
/* Where less than this part is free blocks do not lie next to each other without a loss. */
#define TIGHT_PARTS 16

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

/* ---- a lap ---- */

/* A period, call by call. What ends is held, until that is too much or one of it is to be allocated
 * again: then all of it is released. One mark says of all that was freed before it that it is done;
 * so what was freed before the mark of a release but ends a little later has none of its own. */
struct lap {
    struct rbi_item *const *held; /* the first; the others and those to come are behind it */
    size_t held_count;
    int64_t held_units;
    uint32_t again; /* the call that allocates one of them again; the period: none does */
    int64_t marked; /* with which the mark of the last release is made */
};

struct outcome {
    uint64_t limit; /* of what may be in use */
    uint64_t in_use_most;
    size_t releases;
};

static void hold(struct lap *lap)
{
    const struct rbi_item *const item = lap->held[lap->held_count++];
    lap->held_units += item->units;
    if (item->from >= item->end)
        lap->again = rbi_min(lap->again, item->from);
}

/* Whether the one that is to be held next, behind a release, was freed before its mark. */
static bool is_marked(const struct lap *lap)
{
    const struct rbi_item *const item = *lap->held;
    return (int64_t)item->end - (item->to - item->freed) < lap->marked;
}

/* Those that end with a call. */
static void hold_ending(struct lap *lap, struct rbi_item *const *end, uint32_t call)
{
    while (lap->held + lap->held_count != end && lap->held[lap->held_count]->end == call) {
        if (lap->held_count == 0 && is_marked(lap))
            lap->held++;
        else
            hold(lap);
    }
}

static void release(struct lap *lap, const struct rbi_plan *plan, uint32_t call, bool is_final)
{
    for (size_t i = 0; is_final && i < lap->held_count; i++)
        lap->held[i]->to += call - lap->held[i]->end;
    lap->held += lap->held_count;
    lap->held_count = 0;
    lap->held_units = 0;
    lap->again = plan->period;
    lap->marked = (int64_t)call - plan->lead;
}

/* With at most `limit` units in use, where that can be. The period begins and ends with a release,
 * so that little is in use from one into the next. Only a final lap changes the items. */
static struct outcome go_round(const struct rbi_stretch *stretch, const struct rbi_plan *plan,
                               uint64_t limit, bool is_final)
{
    struct rbi_item *const *const end = stretch->used + stretch->used_count;
    struct lap lap = {.held = stretch->used, .again = plan->period, .marked = -(int64_t)plan->lead};
    struct outcome outcome = {.limit = limit};
    for (uint32_t call = 0; call < plan->period; call++) {
        hold_ending(&lap, end, call);
        const bool is_full = plan->in_use[call] + lap.held_units > (int64_t)limit;
        if (lap.held_count != 0 && (is_full || call == lap.again)) {
            release(&lap, plan, call, is_final);
            outcome.releases++;
        }
        const int64_t in_use = plan->in_use[call] + lap.held_units;
        outcome.in_use_most = rbi_max(outcome.in_use_most, (uint64_t)in_use);
    }
    outcome.releases += lap.held_count != 0;
    release(&lap, plan, plan->period, is_final);
    return outcome;
}

/* ---- what each stretch may take ---- */

/* What comes of each sum for a stretch, and which of them it has. */
struct offer {
    struct outcome of[SUMS];
    size_t chosen;
};

static int by_end(const void *a, const void *b)
{
    const struct rbi_item *const x = *(struct rbi_item *const *)a;
    const struct rbi_item *const y = *(struct rbi_item *const *)b;
    if (x->end != y->end)
        return x->end < y->end ? -1 : 1;
    return (x->of > y->of) - (x->of < y->of);
}

/* The items that other streams use, in the order in which a lap comes by their ends. */
static void collect_used(struct rbi_stretch *stretch, const struct rbi_plan *plan)
{
    stretch->used = plan->used + (stretch->items - plan->items);
    stretch->used_count = 0;
    for (size_t i = 0; i < stretch->count; i++) {
        struct rbi_item *const item = &stretch->items[i];
        item->end = item->to % plan->period;
        if (item->freed != 0)
            stretch->used[stretch->used_count++] = item;
    }
    qsort(stretch->used, stretch->used_count, sizeof(struct rbi_item *), by_end);
}

/* From most of what is in use anyway up to `units` more than that. */
static uint64_t limit_of(const struct rbi_stretch *stretch, uint64_t units, size_t sum)
{
    const uint64_t tight = stretch->in_use_most / TIGHT_PARTS;
    return stretch->in_use_most - tight + (units + tight) * sum / (SUMS - 1);
}

static void make_offer(struct offer *offer, struct rbi_stretch *stretch,
                       const struct rbi_plan *plan, uint64_t units)
{
    collect_used(stretch, plan);
    rbi_stretch_weigh(stretch, plan->in_use, plan->period);
    for (size_t sum = 0; sum < SUMS; sum++)
        offer->of[sum] = go_round(stretch, plan, limit_of(stretch, units, sum), false);
    offer->chosen = 0;
}

/* Units that one sum takes more than the one that is chosen. */
static uint64_t price(const struct offer *offer, size_t sum)
{
    const uint64_t now = offer->of[offer->chosen].in_use_most;
    return offer->of[sum].in_use_most - rbi_min(offer->of[sum].in_use_most, now);
}

/* Releases that it saves. */
static uint64_t gain(const struct offer *offer, size_t sum)
{
    const size_t now = offer->of[offer->chosen].releases;
    return now - rbi_min(now, offer->of[sum].releases);
}

static bool is_better(const struct offer *a, size_t a_sum, const struct offer *b, size_t b_sum)
{
    return gain(a, a_sum) * (price(b, b_sum) + 1) > gain(b, b_sum) * (price(a, a_sum) + 1);
}

/* Takes the one that saves most for what it takes, of those that can be had. */
static bool take_best(struct offer *offers, size_t count, uint64_t *units)
{
    struct offer *best = NULL;
    size_t best_sum = 0;
    for (struct offer *offer = offers; offer < offers + count; offer++) {
        for (size_t sum = 0; sum < SUMS; sum++) {
            if (gain(offer, sum) == 0 || price(offer, sum) > *units ||
                (best && !is_better(offer, sum, best, best_sum)))
                continue;
            best = offer;
            best_sum = sum;
        }
    }
    if (!best)
        return false;
    *units -= price(best, best_sum);
    best->chosen = best_sum;
    return true;
}

static void take_offer(struct rbi_stretch *stretch, const struct offer *offer,
                       const struct rbi_plan *plan)
{
    rbi_stretch_weigh(stretch, plan->in_use, plan->period);
    (void)go_round(stretch, plan, offer->of[offer->chosen].limit, true);
    rbi_stretch_weigh(stretch, plan->in_use, plan->period);
}

bool rbi_cycle_may_be_apart(const struct rbi_cycle *cycle)
{
    return cycle->use_count != 0 && cycle->used_frees <= RBI_PLAN_APART_FREES &&
           cycle->noted <= RBI_PLAN_APART_CALLS;
}

void rbi_plan_move_apart(struct rbi_plan *plan, uint64_t units)
{
    struct offer offers[RBI_CYCLE_STRETCHES];
    uint64_t left = units;
    for (size_t i = 0; i < plan->count; i++)
        make_offer(&offers[i], &plan->stretches[i], plan, units);
    while (take_best(offers, plan->count, &left))
        ;
    plan->in_use_most = 0;
    for (size_t i = 0; i < plan->count; i++) {
        take_offer(&plan->stretches[i], &offers[i], plan);
        plan->in_use_most += plan->stretches[i].in_use_most;
    }
}
