/* A period's blocks as they are placed all at once (place.c, place_apart.c, place_again.c).
 * Must not know how a period is learnt, or run. */
#ifndef RBI_POOL_PLACE_H
#define RBI_POOL_PLACE_H

#include "pool/pool.h"

/* What call `of` allocates. In units, and in calls of the period: in use from `from` until before
 * `to`, which may be in the next period, up to where it was allocated in this. What is in use from
 * one period into the next has its place for itself. */
struct rbi_item {
    uint32_t units, offset;
    uint32_t from, to;
    uint32_t of;
    uint32_t end;   /* `to`, within the period, before it is left alone for longer */
    uint32_t freed; /* where other streams use it, the call that frees it: from there until `to` its
                       memory is left alone; else 0, as no call 0 frees what the period allocated */
};

/* What one stream has. */
struct rbi_stretch {
    struct rbi_pool_stream *stream;
    struct rbi_item *items;
    size_t count;
    struct rbi_item **used; /* those that other streams use */
    size_t used_count;
    bool wraps;           /* something is in use until the next period */
    uint64_t in_use_most; /* units */
    uint64_t units;       /* that they take as they are placed */
};

/* `in_use` has space for each call of the period. */
struct rbi_plan {
    struct rbi_item *items;
    const struct rbi_item **placed;
    struct rbi_item **used;
    int64_t *in_use;
    uint32_t period;
    uint32_t lead; /* marks stand so many calls before they are waited for */
    struct rbi_stretch stretches[RBI_CYCLE_STRETCHES];
    size_t count;
    uint64_t in_use_most; /* of all stretches, each by itself */
    bool has_enough;      /* memory, that no more is worth it */
    bool takes_fresh;     /* also such as nobody has, where there is plenty */
};

/* Finds in_use_most and wraps; in_use[i] is then what is in use with call i. */
void rbi_stretch_weigh(struct rbi_stretch *stretch, int64_t *in_use, uint32_t period);

/* Where other streams use more blocks than this, all are placed closely: for those that are left
 * alone for longer several tries may be needed, each of which takes a time that grows with the
 * square of all blocks. */
#define RBI_PLAN_APART_FREES 2048
/* And so they are in longer periods: a try goes through all calls for each stretch many times. */
#define RBI_PLAN_APART_CALLS RBI_TRAIL_CALLS_FIRST

/* Leaves what other streams have used alone for longer after it was freed, until the next of few
 * releases: each needs one mark, which says of all that was freed before it that it is done. As few
 * as there can be with most of what is in use at the period's peak, and with at most `units` more,
 * which go where they save most. */
void rbi_plan_move_apart(struct rbi_plan *plan, uint64_t units);

/* Keeps what was planned for when the same calls come again. False when the heap has no memory for
 * it. */
bool rbi_places_keep(struct rbi_cycle *cycle, const struct rbi_plan *plan);
/* Whether the period that was learnt has the calls that were placed last, and those places leave
 * what streams have used alone for long enough. */
bool rbi_places_are_for(const struct rbi_cycle *cycle);
/* Makes of each stretch one free block of its stream's again, where all of it is free, whoever has
 * had parts of it since. It may wait for the streams' work, once in a while. */
void rbi_places_gather(rebatch_pool *pool);

#endif
