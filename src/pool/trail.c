/* Owns the pool's memory of its last calls: whether they repeat, and after how many.
 * Must not know what is done about it.
 *
 * A period is looked for by anchors: some levels are chosen by their value, so that the same calls
 * are anchors whenever they come. Where one is met again with the same calls before it, as many
 * calls may have passed as a period has. Anchors are kept for longer than calls, so they tell when
 * more calls are to be remembered. */
#include "pool/trail.h"

#include "base/base.h"
#include "pool/pool.h"

/* Shorter ones are served by the quick lists. */
#define LEAST_PERIOD 32
/* So many calls before must be the same already. */
#define LEAST_MATCH 16
#define ANCHOR_BITS 4 /* one level in 2^4 is chosen */
#define ANCHOR_CALLS 4
/* A longer period than this must have gone on as before for one of so many parts after it was
 * found: where some other step comes between many short ones, each time after about as many, the
 * distance between two of them looks like a period as soon as it ends. */
#define LONG_PERIOD (RBI_TRAIL_CALLS_FIRST / 2)
#define LONG_PARTS 8
/* Where no period was known for so many calls, they are searched in windows only: in some that are
 * long enough for the longest period to pass twice, and in shorter ones more often, as most periods
 * are short and one of those is to be found soon. */
#define PATIENCE (4 * RBI_TRAIL_CALLS)
#define WINDOW (2 * RBI_TRAIL_CALLS)
#define WINDOWS 8
#define SHORT_WINDOW (WINDOW / 8)
#define SHORT_WINDOWS 8

bool rbi_trail_open(struct rbi_trail *trail)
{
    *trail = (struct rbi_trail){.due = UINT64_MAX, .seen = ANCHOR_CALLS - 1};
    uint32_t *levels = rbi_heap_calloc(RBI_TRAIL_CALLS_FIRST, sizeof *levels);
    trail->anchors = rbi_heap_calloc(RBI_TRAIL_ANCHORS, sizeof *trail->anchors);
    trail->levels = levels && trail->anchors ? levels : &trail->none;
    if (trail->levels == &trail->none) {
        rbi_heap_free(levels);
        return false;
    }
    trail->mask = RBI_TRAIL_CALLS_FIRST - 1;
    trail->due = RBI_TRAIL_GAP;
    return true;
}

void rbi_trail_close(struct rbi_trail *trail)
{
    if (trail->mask != 0)
        rbi_heap_free(trail->levels);
    rbi_heap_free(trail->anchors);
    *trail = (struct rbi_trail){.due = UINT64_MAX};
    trail->levels = &trail->none;
}

static uint32_t level_of(const struct rbi_trail *trail, uint64_t call)
{
    return trail->levels[call & trail->mask];
}

static uint64_t hash_at(const struct rbi_trail *trail, uint64_t call)
{
    uint64_t hash = 0;
    for (unsigned i = 0; i < ANCHOR_CALLS; i++)
        hash = (hash ^ level_of(trail, call - i)) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ hash >> 32;
}

static bool is_chosen(uint32_t level)
{
    return level * UINT32_C(0x9e3779b9) >> (32 - ANCHOR_BITS) == 0;
}

/* A block that is taken and given back again and again leads to one level every other time: where
 * that is chosen, it would be an anchor all the time. */
static bool is_anchor(const struct rbi_trail *trail, uint64_t call)
{
    const uint32_t level = level_of(trail, call);
    return is_chosen(level) && level != level_of(trail, call - 2);
}

bool rbi_trail_widen(struct rbi_trail *trail, uint64_t period)
{
    size_t calls = trail->mask + 1;
    const uint64_t known = rbi_trail_remembered(trail);
    if (period > RBI_TRAIL_PERIOD_MOST)
        return false;
    while (calls - RBI_TRAIL_GAP < period)
        calls *= 2;
    if (calls == trail->mask + 1)
        return true;
    uint32_t *const levels = rbi_heap_calloc(calls, sizeof *levels);
    if (!levels)
        return false;
    for (uint64_t call = trail->count - known; call < trail->count; call++)
        levels[call & (calls - 1)] = level_of(trail, call);
    rbi_heap_free(trail->levels);
    trail->levels = levels;
    trail->mask = calls - 1;
    trail->first = trail->count - known;
    return true;
}

/* How many of the last calls, up to a period of them, are those of a period before. */
static uint64_t count_matching(const struct rbi_trail *trail, uint64_t period)
{
    const uint64_t known = rbi_trail_remembered(trail);
    const uint64_t most = rbi_min(period, known > period ? known - period : 0);
    uint64_t same = 0;
    while (same < most && level_of(trail, trail->count - 1 - same) ==
                              level_of(trail, trail->count - 1 - same - period))
        same++;
    return same;
}

/* Where calls went another way once, what came after it seems to have the distance to the time
 * before as its period, until a shorter one has passed twice. A shorter one is tried again after as
 * many calls as were compared in vain, so that a call costs no more than one comparison. */
static void try_period(struct rbi_trail *trail, uint64_t period)
{
    const bool known = trail->period != 0;
    if (period < LEAST_PERIOD ||
        (known && (period >= trail->period || trail->count < trail->retry)) ||
        !rbi_trail_widen(trail, period))
        return;
    const uint64_t same = count_matching(trail, period);
    trail->retry = trail->count + (known ? same : 0);
    if (same < (known ? period : LEAST_MATCH))
        return;
    const uint64_t most = period > LONG_PERIOD ? period - period / LONG_PARTS : period;
    trail->period = period;
    trail->since = trail->count - rbi_min(same, most);
}

/* The first call since the last look that is not that of a period before; the count: there is
 * none. */
static uint64_t find_other(const struct rbi_trail *trail)
{
    uint64_t call = trail->seen;
    while (call < trail->count && level_of(trail, call) == level_of(trail, call - trail->period))
        call++;
    return call;
}

/* Where an anchor is met again there may be a period. */
static void set_anchor(struct rbi_trail *trail, uint64_t call)
{
    const uint64_t hash = hash_at(trail, call);
    struct rbi_anchor *anchor = &trail->anchors[hash % RBI_TRAIL_ANCHORS];
    if (anchor->hash == hash && !rbi_trail_repeats(trail))
        try_period(trail, call - anchor->at);
    *anchor = (struct rbi_anchor){hash, call};
}

static bool is_worth_a_search(const struct rbi_trail *trail)
{
    if (rbi_trail_repeats(trail))
        return false;
    return trail->count - trail->known < PATIENCE || trail->count / WINDOW % WINDOWS == 0 ||
           trail->count / SHORT_WINDOW % SHORT_WINDOWS == 0;
}

static void search(struct rbi_trail *trail)
{
    const bool searches = is_worth_a_search(trail);
    for (; searches && trail->seen < trail->count; trail->seen++)
        if (is_anchor(trail, trail->seen))
            set_anchor(trail, trail->seen);
    trail->seen = trail->count;
    if (rbi_trail_repeats(trail))
        trail->known = trail->count;
}

/* Where a period was lost is an anchor too: if it is part of a longer one, as a micro-batch is of a
 * step, it is lost there every time. */
bool rbi_trail_look(struct rbi_trail *trail)
{
    const uint64_t other = trail->period ? find_other(trail) : trail->count;
    const bool is_lost = other < trail->count;
    if (is_lost) {
        trail->period = 0;
        set_anchor(trail, other);
    }
    search(trail);
    trail->due = trail->count + RBI_TRAIL_GAP;
    return !is_lost;
}

uint64_t rbi_trail_turn(const struct rbi_trail *trail)
{
    uint64_t lowest = trail->count - 1;
    for (uint64_t call = trail->count - trail->period; call < trail->count; call++)
        if (level_of(trail, call) < level_of(trail, lowest))
            lowest = call;
    return lowest + 1;
}
