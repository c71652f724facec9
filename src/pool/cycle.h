/* What a pool does once its calls repeat: the same as in the period before (cycle.c).
 * Must not know how memory is found. */
#ifndef RBI_POOL_CYCLE_H
#define RBI_POOL_CYCLE_H

#include "pool/block.h"
#include "pool/trail.h"

/* READY: learnt; the next call of the fast path begins it, or finds that it cannot be. */
enum rbi_cycle_phase { RBI_CYCLE_NONE, RBI_CYCLE_LEARNS, RBI_CYCLE_READY, RBI_CYCLE_RUNS };

/* A call of a period: what it does, and what is needed of the one that allocated the block which it
 * is about, is in one half each, as a line of the cache may end between them.
 *   waits: units == RBI_CYCLE_WAITS + size, and of is the first of its waits */
struct rbi_cycle_call {
    struct rbi_block *block; /* what an allocation gave, as long as that is in use; USE of an older
                                block: that one */
    struct rbi_pool_stream *stream; /* of an allocation and a RESERVE; USE: the one that uses it */
    union {
        char *address;         /* where an allocation lies; USE of what is none of the period's */
        size_t reserved_bytes; /* RESERVE */
        size_t first_use;      /* FREE_USED: among the period's uses */
        uint64_t birth;        /* USE, as long as it is learnt: of an older block */
    };
    uint32_t units; /* an allocation's size; else one of those below */
    uint32_t of;    /* a free and a USE: the call that allocated it, or RBI_CYCLE_NOBODY */
};
_Static_assert(sizeof(struct rbi_cycle_call) == 32, "two of them are a line of the cache");
/* What a call is that does not allocate; of a block that other streams used the free is another. */
#define RBI_CYCLE_FREE UINT32_C(0)
#define RBI_CYCLE_RESERVE UINT32_MAX
#define RBI_CYCLE_USE (UINT32_MAX - 1)
#define RBI_CYCLE_FREE_USED (UINT32_MAX - 2)
/* It waits for what another stream may still do with its memory. */
#define RBI_CYCLE_WAITS (UINT32_C(1) << 31)
/* So that no size is taken for another, or for a call of another kind. */
#define RBI_CYCLE_UNITS_MOST (RBI_CYCLE_WAITS - 4)
#define RBI_CYCLE_NOBODY UINT32_MAX

static inline bool rbi_cycle_allocates(const struct rbi_cycle_call *call)
{
    return call->units != RBI_CYCLE_FREE && call->units < RBI_CYCLE_FREE_USED;
}
static inline bool rbi_cycle_frees(const struct rbi_cycle_call *call)
{
    return call->units == RBI_CYCLE_FREE || call->units == RBI_CYCLE_FREE_USED;
}
/* Of an allocation. */
static inline uint32_t rbi_cycle_units(const struct rbi_cycle_call *call)
{
    return call->units & ~RBI_CYCLE_WAITS;
}

/* A stream that used a block which the period frees, other than the block's own. Where its work
 * has come as far as at the last such free, the block's memory may be given out again:
 *   stream->done < point: that is not known yet, and the memory is nobody's */
struct rbi_cycle_use {
    struct rbi_pool_stream *stream;
    uint64_t point;
    uint32_t call;  /* that frees the block */
    uint32_t delay; /* so many calls later the first mark after it must stand; UINT32_MAX: nothing
                       waits for it */
    bool marks;     /* a mark is made then */
    bool last;      /* of that call */
};
/* Blocks freed after other streams had used them, and not given out again since: where there are
 * more at once a period is no cycle. */
#define RBI_CYCLE_PENDING_MOST 4096
/* What an allocation waits for. */
struct rbi_cycle_wait {
    uint32_t use;
    bool last; /* of that allocation */
};

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

/* Where the blocks of a period lay when they were last placed, and what calls it had: where the
 * same come again so do the places. */
struct rbi_cycle_place {
    uint32_t units, of; /* as of the call */
    uint32_t offset;    /* of what it allocates, in units, within its stretch */
    uint16_t stretch;
    bool crosses; /* what it allocates is in use when a period begins */
};
#define RBI_CYCLE_STRETCHES 16
struct rbi_cycle_places {
    struct rbi_cycle_place *of; /* NULL: none were placed yet */
    size_t count;
    struct rbi_cycle_stretch {
        struct rbi_pool_stream *stream;
        uint64_t units;
        char *address; /* where it was last; NULL: nowhere yet */
    } stretches[RBI_CYCLE_STRETCHES];
    size_t stretch_count;
    uint64_t spare_calls;
    bool has_enough; /* memory, that no more is worth it for the sake of fewer marks */
};

/* While a cycle is learnt, each call is noted with the place that the search found for it. While it
 * runs, calls that are those of the cycle are served by it, and the blocks it gave out are in no
 * range's list, nor in the table: what they lie in is free there, and so is what was freed and
 * waits for other streams. Whoever looks at more than counts has the cycle left first
 * (rbi_pool_enter), which lays them there.
 *   runs: calls[i].block != NULL just for what is in use; next is the call that is expected
 *   learns: noted calls have been noted, of which allocation_count allocated
 *   uses are in the order of the calls that free */
struct rbi_cycle {
    uint8_t phase;               /* enum rbi_cycle_phase */
    struct rbi_cycle_call *next; /* runs */
    struct rbi_cycle_call *calls, *end;

    uint32_t *allocations;     /* the calls that allocate, in their order */
    struct rbi_block **in_use; /* what leaving sorts: as many as may be in use at once */
    size_t capacity;           /* calls that there is space for */
    size_t noted, allocation_count, live, most_live;
    struct rbi_cycle_old old[RBI_CYCLE_OLD];
    size_t old_count;
    bool reserves; /* memory is reserved in it */
    struct {       /* what placing it last came to: it takes long */
        size_t calls;
        uint64_t in_use_most, spare_calls, units;
    } placed;
    struct rbi_cycle_places places;
    uint64_t placed_births; /* births when blocks were last placed anew, or that was tried */
    uint64_t waited_births; /* births when streams were last waited for, to have places again */

    struct rbi_cycle_use *uses; /* NULL: none was ever learnt */
    struct rbi_cycle_wait *waits;
    size_t use_capacity, wait_capacity; /* how many there is space for */
    size_t use_count, wait_count;
    size_t use_calls, used_frees; /* of the period's calls */
    bool is_placed;               /* its blocks lie where they were placed, not as a search did */
    bool has_enough;              /* placed, with enough memory for few marks */
    bool hopes;                   /* it has not, but may have once the pool knows its needs */
    bool stays;                   /* its blocks are not to be placed where no memory is moved */
    bool lags;                    /* it runs no longer as a stream had not come far enough */
    uint64_t lead_calls;          /* marks stand so long before they are waited for */
    uint64_t spare_calls; /* blocks that others have used are left alone so long, if they are placed
                             anew; 0: streams do not lag */

    uint64_t first_birth;  /* of the period that is learnt */
    uint64_t live_bytes;   /* after the last call that was noted */
    size_t promised_bytes; /* pool->promised_bytes when the period began */
    uint64_t layout;       /* pool->layout when the period began */

    uint64_t moved, moved_most; /* periods in a row in which memory was moved */
    uint64_t turn;              /* the trail's count at which a period began; 0: not known */
    uint64_t doublings;         /* of the period, as one of them alone was none */
    uint64_t patience;          /* periods that pass before the next is learnt */
    uint64_t began;             /* births when it began to run */
    uint64_t periods;           /* whole ones that it has served since */
    uint64_t served;            /* allocations, up to when it was left last */
};

/* Whether its blocks were placed when it last ran, with as much memory as they will have. */
static inline bool rbi_cycle_has_memory(const struct rbi_cycle *cycle)
{
    return cycle->places.count != 0 && !cycle->hopes;
}

#endif
