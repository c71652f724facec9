/* Phases whose calls repeat, and the plan by which one is served: its blocks lie in one arena, so
 * that no page has to be moved for them.
 * Must not know how memory is found, nor what a phase is to who marks it. */
#ifndef RBI_PLAN_H
#define RBI_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "rebatch/pool.h"

struct rbi_block;
struct rbi_pool_stream;

#define RBI_PLAN_PHASES 16
/* An allocation that is not the plan's: the pool serves it as any other. */
#define RBI_PLAN_ELSEWHERE UINT32_MAX

enum rbi_call_kind { RBI_CALL_ALLOC, RBI_CALL_RESERVE, RBI_CALL_FREE };

/* A call of a phase on its stream. */
struct rbi_phase_call {
    enum rbi_call_kind kind;
    uint32_t value;  /* its units; of a free: the call that allocated */
    uint32_t offset; /* where memory is planned, in units: in the arena, or RBI_PLAN_ELSEWHERE */
};

/* What is known of the phases with one key. */
struct rbi_phase {
    uint64_t key; /* 0: the entry is empty */
    uint64_t used;
    rebatch_stream stream; /* of its first allocation */
    struct rbi_phase_call *calls;
    size_t count, capacity;
    size_t allocations; /* and reserves */
    size_t arena_bytes; /* 0: there is no plan */
    uint32_t moves;     /* plans in a row whose arena moved many pages, or was not to be had */
    uint64_t moved_unplanned; /* pages, in the last phase that no plan served */
    uint32_t rest;            /* phases of the key that are not looked at */
    uint32_t misses;          /* phases in a row that the plan did not serve to their end */
    bool is_needed;           /* in the last one pages were moved, or the pool held too much */
    uint32_t served;          /* phases that the plan has served to their end */
    uint32_t failures;        /* plans in a row of which none has proved itself */
};

enum rbi_plan_mode {
    RBI_PLAN_OFF,      /* nothing is noted */
    RBI_PLAN_RECORDS,  /* calls are noted */
    RBI_PLAN_COMPARES, /* they are the same as those noted before, so far */
    RBI_PLAN_SERVES    /* so they are, and the plan serves them */
};

/* serves == (arena != NULL); arena_live_bytes == sum of bytes over blocks in use in the arena */
struct rbi_pool_plan {
    struct rbi_phase phases[RBI_PLAN_PHASES];
    struct rbi_phase *phase; /* that runs; NULL: none */
    enum rbi_plan_mode mode;
    uint64_t marked; /* the key of the phase that begins with the next allocation; 0: none */
    bool is_on;
    bool has_woken;   /* since the last arena: the next one is made anew */
    size_t next;      /* the call that comes next */
    uint32_t serial;  /* of the phase that runs: blocks have it, with the number of their call */
    uint64_t marks;   /* so far */
    uint32_t settled; /* how often the pool has looked for what plans do not need */
    struct rbi_phase *settled_by; /* gave memory back, and has not begun again; else NULL */
    uint64_t settled_bytes;       /* held when it had begun again; 0: never */
    uint64_t first_sequence;
    uint64_t moved; /* pages that had been moved when it began */
    struct rbi_block *arena;
    size_t arena_live_bytes;
};

void rbi_plan_close(struct rbi_pool_plan *plan);

/* ---- with the pool's lock held ---- */

/* The phase that runs, if any, ends. */
void rbi_plan_end(rebatch_pool *pool);
/* A phase with `key` begins. Returns the phase where it is planned: an arena is to be taken for it,
 * and rbi_plan_serve_from() called. */
const struct rbi_phase *rbi_plan_begin(rebatch_pool *pool, uint64_t key);
/* The arena is a block in no list, with `2 * allocations` spare nodes for blocks; NULL: there was
 * no memory. Returns whether the plan has proved itself, so that the pool is to give back what it
 * holds beyond the plan's needs. */
bool rbi_plan_serve_from(rebatch_pool *pool, struct rbi_block *arena);
/* Serves an allocation, or NULL: the pool has to. */
struct rbi_block *rbi_plan_serve(rebatch_pool *pool, size_t bytes, rebatch_stream stream);
/* A block is in use, which rbi_plan_serve() did not serve; another stream is to use it; it is about
 * to be free. */
void rbi_plan_note_alloc(rebatch_pool *pool, struct rbi_block *block);
void rbi_plan_note_use(rebatch_pool *pool, const struct rbi_block *block);
void rbi_plan_note_free(rebatch_pool *pool, const struct rbi_block *block);
/* A block of the arena is free, and in no list any more. */
void rbi_plan_discard(rebatch_pool *pool, struct rbi_block *block);
/* The arena has a piece for memory that is reserved, of which what is not used up yet is one piece
 * wherever serving ends.
 * rbi_plan_reserve() says whether it has; rbi_plan_note_reserve() notes what the pool served. */
bool rbi_plan_reserve(rebatch_pool *pool, size_t bytes, rebatch_stream stream);
void rbi_plan_note_reserve(rebatch_pool *pool, size_t bytes, rebatch_stream stream);
/* What of the arena is not in use; 0 where nothing is served. */
size_t rbi_plan_idle_bytes(const rebatch_pool *pool);
/* Ends the serving of this phase: its blocks are laid into the pool's range like any others. */
void rbi_plan_leave(rebatch_pool *pool);
/* The same, and phases with its key, or `every` one, have no plan until their calls have repeated
 * again. */
void rbi_plan_drop(rebatch_pool *pool, bool every);

/* Cuts an arena up into its blocks in use, which begin with `first_sequence`, and what is free
 * (arena.c). */
void rbi_plan_cut_up(rebatch_pool *pool, struct rbi_block *arena, uint64_t first_sequence);

#endif
