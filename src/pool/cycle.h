/* What a pool does once its calls repeat: the same as in the period before (cycle.c).
 * Must not know how memory is found. */
#ifndef RBI_POOL_CYCLE_H
#define RBI_POOL_CYCLE_H

#include "pool/block.h"

/* READY: learnt; the next call of the fast path begins it, or finds that it cannot be. */
enum rbi_cycle_phase { RBI_CYCLE_NONE, RBI_CYCLE_LEARNS, RBI_CYCLE_READY, RBI_CYCLE_RUNS };

/* A call of a period. */
struct rbi_cycle_call {
    char *address;           /* where an allocation lies */
    struct rbi_block *block; /* what it gave, as long as that is in use */
    uint32_t units;          /* its size; 0: a free; RBI_CYCLE_RESERVE */
    uint32_t of;             /* the call that allocated what a free gives back */
    size_t reserved_bytes;   /* of rebatch_pool_reserve() */
};
#define RBI_CYCLE_RESERVE UINT32_MAX
/* Whether what is in use of a call was given out before the calls were placed anew: it is in its
 * range still, until it is freed. */
static inline bool rbi_cycle_is_old(const struct rbi_cycle_call *call)
{
    return call->block->address != call->address;
}

/* What was allocated in the period before the one that is learnt, and freed in this. */
struct rbi_cycle_old {
    uint64_t birth;
    char *address;
    size_t bytes;
    uint32_t call; /* that freed it */
};
#define RBI_CYCLE_OLD 256
/* After so many periods in a row in which memory was moved one is learnt all the same, to be
 * placed; where that fails, after twice as many. */
#define RBI_CYCLE_MOVED 3

/* While a cycle is learnt, each call is noted with the place that the search found for it. While it
 * runs, calls that are those of the cycle are served by it, and the blocks it gave out are in no
 * range's list, nor in the table: what they lie in is free there. Whoever looks at more than counts
 * has the cycle left first (rbi_pool_enter), which lays them there.
 *   runs: calls[i].block != NULL just for what is in use; next is the call that is expected
 *   learns: noted calls have been noted, of which allocation_count allocated */
struct rbi_cycle {
    uint8_t phase;               /* enum rbi_cycle_phase */
    struct rbi_cycle_call *next; /* runs */
    struct rbi_cycle_call *calls, *end;
    struct rbi_pool_stream *stream; /* that all of it is on */

    uint32_t *allocations;     /* the calls that allocate, in their order */
    struct rbi_block **in_use; /* what leaving sorts: as many as may be in use at once */
    size_t capacity;           /* calls that there is space for */
    size_t noted, allocation_count, live, most_live;
    struct rbi_cycle_old old[RBI_CYCLE_OLD];
    size_t old_count;
    bool reserves; /* memory is reserved in it */
    struct {       /* what placing it last came to: it takes long */
        size_t calls;
        uint64_t in_use_most, units;
    } placed;
    uint64_t first_birth;  /* of the period that is learnt */
    uint64_t live_bytes;   /* after the last call that was noted */
    size_t promised_bytes; /* pool->promised_bytes when the period began */
    uint64_t layout;       /* pool->layout when the period began */

    uint64_t moved, moved_most; /* periods in a row in which memory was moved */
    uint64_t turn;              /* the trail's count at which a period began; 0: not known */
    uint64_t doublings;         /* of the period, as one of them alone did not end as it began */
    uint64_t patience;          /* periods that pass before the next is learnt */
    uint64_t began;             /* births when it began to run */
    uint64_t periods;           /* whole ones that it has served since */
    uint64_t served;            /* allocations, up to when it was left last */
};

#endif
