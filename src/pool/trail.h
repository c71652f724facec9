/* The pool's memory of its last calls, and whether they repeat (trail.c).
 * Must not know what is done about it. */
#ifndef RBI_POOL_TRAIL_H
#define RBI_POOL_TRAIL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "rebatch/pool.h"

/* How many calls are remembered at first, and at most, which is enough for the step of a large
 * model in many micro-batches. Powers of two. */
#define RBI_TRAIL_CALLS_FIRST ((size_t)1 << 17)
#define RBI_TRAIL_CALLS ((size_t)1 << 20)
/* Calls from one search for a period to the next: until then the calls of the period before must be
 * remembered. */
#define RBI_TRAIL_GAP 64
#define RBI_TRAIL_PERIOD_MOST (RBI_TRAIL_CALLS - RBI_TRAIL_GAP)
#define RBI_TRAIL_ANCHORS 8192

/* Where the calls last looked as this hash says. */
struct rbi_anchor {
    uint64_t hash, at;
};

/* A call is remembered by its level: what was live after it, in units, modulo 2^32. A training step
 * that repeats goes through the same levels again; where something is kept for good it does not,
 * and is no period.
 *   levels[i & mask], count - mask <= i < count, first <= i, is that of call i
 *   period != 0: levels of calls i and i - period are the same for since <= i < seen
 *   mask == 0: nothing is remembered */
struct rbi_trail {
    struct rbi_anchor *anchors;
    uint64_t first;  /* no call before it is remembered */
    uint64_t period; /* calls; 0: none known */
    uint64_t since;
    uint64_t retry; /* the count from which a shorter period is tried */
    uint64_t seen;  /* the calls before it have been looked at */
    uint64_t known; /* the count when there last was a period */
    uint32_t none;  /* what `levels` is where nothing is remembered */
    /* Of every call: */
    uint32_t *levels;
    size_t mask;
    uint64_t count; /* calls so far */
    uint64_t due;   /* the count at which the trail is looked at again */
};
/* False when the heap has no memory for it: then nothing is remembered. */
bool rbi_trail_open(struct rbi_trail *trail);
void rbi_trail_close(struct rbi_trail *trail);
/* Looks at the calls since the last look: whether they go on as they were, and if no period is
 * known, whether there is one. False when there was one, and there is none now. */
bool rbi_trail_look(struct rbi_trail *trail);
/* Remembers as many calls as such a period needs from now on; those before are as they were. False
 * where it is too long, or the heap has no memory for it. */
bool rbi_trail_widen(struct rbi_trail *trail, uint64_t period);
/* How many of the last calls are remembered. */
static inline uint64_t rbi_trail_remembered(const struct rbi_trail *trail)
{
    const uint64_t calls = trail->count - trail->first;
    return calls < trail->mask + 1 ? calls : trail->mask + 1;
}
/* Whether two whole periods are known to be the same. */
static inline bool rbi_trail_repeats(const struct rbi_trail *trail)
{
    return trail->period != 0 && trail->count - trail->since >= trail->period;
}
/* The count after the call of the last period with the lowest level: there a period begins, as
 * least of one period is in use in the next. */
uint64_t rbi_trail_turn(const struct rbi_trail *trail);

static inline uint32_t rbi_trail_level(uint64_t live_bytes)
{
    return (uint32_t)(live_bytes / REBATCH_POOL_UNIT_BYTES);
}

/* Notes a call; false when the trail is to be looked at. */
static inline bool rbi_trail_add(struct rbi_trail *trail, uint32_t level)
{
    const uint64_t at = trail->count++;
    trail->levels[at & trail->mask] = level;
    return at + 1 < trail->due;
}

#endif
