/* What the layers above call of a pool, beyond the public header.
 * Must not know the pool's structs. */
#ifndef RBI_POOL_INTERFACE_H
#define RBI_POOL_INTERFACE_H

#include "base/base.h"
#include "rebatch/pool.h"

#define RBI_POOL_TAGS 256 /* "untagged" included */
#define RBI_POOL_RESIDENTS 128

/* REBATCH_E_INVALID with its text when `pool` is NULL. */
rebatch_status rbi_pool_check(const rebatch_pool *pool);

/* ---- whose it is ---- */

/* From here on rebatch_pool_destroy() refuses, and names the call that destroys the pool; NULL: it
 * destroys again. The text is borrowed. */
void rbi_pool_set_destroyed_by(rebatch_pool *pool, const char *call);
/* A session begins to use a pool that is not its own, and ends: in between,
 * rebatch_pool_destroy() refuses. */
void rbi_pool_hold(rebatch_pool *pool);
void rbi_pool_let_go(rebatch_pool *pool);
/* Lowers the limit to that, where it is higher. */
void rbi_pool_lower_limit(rebatch_pool *pool, size_t limit_bytes, uint32_t limit_permille);
/* REBATCH_E_STATE, for `function`, within a pressure callback of the pool. */
rebatch_status rbi_pool_check_caller(const rebatch_pool *pool, const char *function);
bool rbi_pool_is_caching(const rebatch_pool *pool);
/* Whether it may wait for the device and call it now: no graph is captured. */
bool rbi_pool_may_wait(const rebatch_pool *pool);
/* The size of a block for `bytes`; 0 for 0. */
rebatch_status rbi_pool_check_size(size_t *rounded, const rebatch_pool *pool, size_t bytes);

/* The beginning of the block that has a range; NULL: it is not in the pool's memory. `what` is its
 * name. REBATCH_E_INVALID where the block is freed, or ends within the range. */
rebatch_status rbi_pool_find_block(const void **out, rebatch_pool *pool, const void *address,
                                   size_t bytes, const char *what);
bool rbi_pool_is_in_use(rebatch_pool *pool, const void *block);

/* ---- threads ---- */

/* What this thread does is of the pool's scopes, as if their own thread did it; until it joins
 * another pool's, or NULL. */
void rbi_pool_thread_join(const rebatch_pool *pool);
bool rbi_pool_thread_has_joined(const rebatch_pool *pool);
/* How many callbacks of pools this thread is within: pressure, and writing a snapshot. */
unsigned rbi_pool_callback_depth(void);

/* ---- scopes ---- */

/* What is inside a scope: blocks from a sequence number on; other threads' blocks are not where the
 * scope has an owner. */
struct rbi_extent {
    uint64_t first_sequence;
    bool leaves_out;
};
/* As rebatch_scope_begin(), for a scope that takes in what this thread does, and those that joined
 * it, and no other; or where it `observes`, for one that only counts: frees within it do not wait
 * for its end, and a rollback takes nothing back. And as rebatch_pool_mark(), with one turn of the
 * lock. */
rebatch_status rbi_scope_begin_phase(rebatch_scope *out, rebatch_pool *pool, bool observes,
                                     uint64_t key);
/* What went between pool and device since create, but for what rebatch_pool_trim() was asked to
 * give. */
struct rbi_pool_traffic {
    uint64_t taken_bytes, given_bytes;
};
struct rbi_scope_use {
    uint64_t live_before;    /* in use when it began */
    uint64_t peak_bytes;     /* that it added to that, at the most */
    bool keeps_blocks;       /* more is in use than when it began */
    uint64_t first_sequence; /* from which on blocks are inside it */
    struct rbi_pool_traffic traffic;
};
/* The calls of phases like the one that runs, or of `every` one, are others from now on: no plan
 * reserves memory for them. */
void rbi_pool_drop_plan(rebatch_pool *pool, bool every);
/* Ends the phase, as rebatch_pool_mark() of 0 does, and says what an open scope has used, with one
 * turn of the lock. Where the scope is not open, it has used nothing. */
void rbi_scope_end_phase(struct rbi_scope_use *out, rebatch_pool *pool, rebatch_scope scope);
/* The same, and then as rebatch_scope_commit(). */
rebatch_status rbi_scope_commit_phase(struct rbi_scope_use *out, rebatch_pool *pool,
                                      rebatch_scope scope);
/* The sequence from which on blocks are inside an open scope. */
uint64_t rbi_scope_first_sequence(rebatch_pool *pool, rebatch_scope scope);
/* As rebatch_scope_rollback(), for who knows of it by itself: the recorder is not told. */
rebatch_status rbi_scope_undo(rebatch_pool *pool, rebatch_scope scope);
/* Commits an open scope and those that are open within it. */
void rbi_scope_commit_all(rebatch_pool *pool, rebatch_scope scope);
/* Commits the innermost scope past the scopes of rbi_scope_begin_phase() around it: what was freed
 * in it is free now, and what was allocated in it stays when they are rolled back. */
rebatch_status rbi_scope_commit_finally(rebatch_pool *pool, rebatch_scope scope);
/* The same, and what was allocated in it is resident until it is freed: rbi_pool_free_resident()
 * takes all that is resident back, now, past such scopes. A later free of its addresses is
 * ignored. */
rebatch_status rbi_scope_commit_resident(rebatch_pool *pool, rebatch_scope scope);
void rbi_pool_free_resident(rebatch_pool *pool);
/* Around a resize, which makes what will be resident. What was taken back of its owner before, it
 * may free at any moment: that is ignored, as no block that it makes begins there, where the device
 * has pages. What it frees of older memory is free at once, also when it fails, but for blocks that
 * `is_guarded`, which runs with the lock held, so that it must not call the pool. */
struct rbi_block;
struct rbi_old_buffers {
    uint64_t owner; /* not 0 */
    bool (*is_guarded)(void *user, const void *address);
    void *user;
    size_t depth;            /* of scopes, when it begins; filled in, as is the next */
    struct rbi_block *aside; /* beginnings of blocks that are out of use till then */
};
/* @param[in,out] call  what to begin; then what ran around it, for the end */
void rbi_old_buffers_begin(rebatch_pool *pool, struct rbi_old_buffers *call);
/* Its blocks are resident, or it has failed and they are taken back. */
void rbi_old_buffers_end(rebatch_pool *pool, const struct rbi_old_buffers *outer, bool has_failed);
/* Whether a block in use that was allocated in an open scope begins at an address. */
bool rbi_scope_has(rebatch_pool *pool, rebatch_scope scope, const void *address);
/* Frees what was allocated in the innermost scope and is in use; a free of it comes late then. */
void rbi_scope_free_blocks(rebatch_pool *pool, rebatch_scope scope);
uint64_t rbi_pool_resident_bytes(rebatch_pool *pool);
/* Several sessions may have a pool. Each that makes blocks resident has a number of its own; 0:
 * there are no more. It is closed when nothing of it is resident. */
unsigned rbi_residents_open(rebatch_pool *pool);
void rbi_residents_close(rebatch_pool *pool, unsigned number);
/* Whose blocks the functions above are about from here on.
 * @return whose they were about before */
unsigned rbi_residents_enter(rebatch_pool *pool, unsigned number);
/* As rebatch_pool_available(), with what is resident. */
rebatch_status rbi_pool_available_resident(size_t *out, rebatch_pool *pool);
/* Where the free of the block at an address waits for such scopes, it waits for them no longer: it
 * is not undone, whatever becomes of them. */
void rbi_scope_free_waiting(rebatch_pool *pool, const void *address);
/* Of the frees that wait in an open scope for its commit, undoes those of the blocks that
 * `is_known`. It runs with the lock held, so it must not call the pool. */
void rbi_scope_revive(rebatch_pool *pool, rebatch_scope scope,
                      bool (*is_known)(void *user, const void *address), void *user);

/* ---- memory ahead of its use ---- */

/* Makes sure that the stream's free blocks come to `bytes` in total, not in one piece: takes
 * only what is short from the device, after giving other streams' cache back if need be. An
 * answer of REBATCH_OOM leaves rebatch_pool_last_oom() and the statistics of OOMs alone. No
 * device call when the cache suffices. With caching off it only looks whether the device has the
 * room. */
rebatch_status rbi_pool_admit(rebatch_pool *pool, size_t bytes, rebatch_stream stream);
/* Gives cached memory back when somebody else has taken what should be free: less than the
 * headroom is left, or a cap was lowered below what is held. */
rebatch_status rbi_pool_keep_headroom(rebatch_pool *pool);

/* As rebatch_pool_allow_overflow(); to close it moves nothing. */
bool rbi_pool_open_overflow(rebatch_pool *pool);  /* whether it was open */
bool rbi_pool_close_overflow(rebatch_pool *pool); /* the same */
/* Moves what lies in host memory to the device, each page at its address, as long as `keep_bytes`
 * stay available there. It waits for all work of the device, where there is something to move. */
rebatch_status rbi_pool_settle_overflow(rebatch_pool *pool, size_t keep_bytes);
/* Of host memory: what is held, and what was ever taken. */
struct rbi_overflow_use {
    uint64_t bytes, total_bytes;
};
void rbi_pool_overflow_use(struct rbi_overflow_use *out, rebatch_pool *pool);

/* How much more it holds of the device than its limit, which was lowered, allows. */
uint64_t rbi_pool_over_limit(rebatch_pool *pool);

/* What bounds the pool now: its limit, or the device, where that has less left to give. */
struct rbi_pool_bound {
    bool is_limit;
    uint64_t bytes;         /* the limit, or the device's memory */
    uint64_t outside_bytes; /* of the device's memory: in use, and not held by the pool */
};
rebatch_status rbi_pool_get_bound(struct rbi_pool_bound *out, rebatch_pool *pool);

/* ---- what is asked from outside of the thread that trains (task.c) ---- */

/* What is to be done between two micro-batches, where the pool may sleep. `run` is called once,
 * without the lock, by the thread that trains; afterwards that waits until the pool is awake. */
struct rbi_pool_task {
    void (*run)(void *user);
    void *user;
};
/* Borrowed until it has run, or is withdrawn.
 *  @return false: another one waits */
bool rbi_pool_post_task(rebatch_pool *pool, struct rbi_pool_task *task);
/* @return false: it has begun to run, or has run */
bool rbi_pool_withdraw_task(rebatch_pool *pool, struct rbi_pool_task *task);
/* Between two micro-batches, by the thread that trains: an atomic load where nothing waits. Outside
 * of sessions rebatch_pool_mark() does it.
 * @return REBATCH_E_STATE: the task has put the pool to sleep, and the wait was interrupted */
rebatch_status rbi_pool_run_task(rebatch_pool *pool);
/* Returns when the pool is awake. REBATCH_E_STATE: the wait was interrupted. */
rebatch_status rbi_pool_wait_awake(rebatch_pool *pool);
/* Whether it sleeps now. Takes no lock. */
bool rbi_pool_sleeps(const rebatch_pool *pool);

/* What can be told of a pool at any time. */
struct rbi_pool_look {
    uint64_t reserved_bytes, live_bytes;
    uint64_t given_bytes; /* the bound of rebatch_pool_give(); SIZE_MAX: there is none */
    size_t page_bytes;
};
/* Does not wait for a sleep or a wake that runs: it is told of as it was before that. */
struct rbi_pool_look rbi_pool_look(rebatch_pool *pool);

/* ---- what it counts ---- */

/* The most bytes live since the mark; the public peaks are left alone. Gives what is live now. */
uint64_t rbi_pool_mark_peak(rebatch_pool *pool);
uint64_t rbi_pool_peak_since_mark(rebatch_pool *pool);
void rbi_pool_read_traffic(struct rbi_pool_traffic *out, rebatch_pool *pool);
/* How often a request failed, but for those of threads that a scope left out. Without the lock: it
 * may be read while other threads allocate. */
uint64_t rbi_pool_oom_count(const rebatch_pool *pool);
/* Why the last of them did. */
void rbi_pool_last_own_oom(rebatch_oom_report *out, rebatch_pool *pool);
/* How many blocks were ever allocated. */
uint64_t rbi_pool_allocations(rebatch_pool *pool);
/* Bytes of the blocks with a sequence in [from, to) that are in use, but for those that scopes left
 * out. Looks at each block that was allocated since. */
uint64_t rbi_pool_live_between(rebatch_pool *pool, uint64_t from, uint64_t to);
/* What it holds of the device. Takes no lock: a recorder may ask. */
uint64_t rbi_pool_reserved_bytes(const rebatch_pool *pool);

/* ---- who is told, and who interferes ---- */

enum rbi_pool_call { RBI_POOL_ALLOC, RBI_POOL_FREE, RBI_POOL_RESERVE };

/* Told when a pressure callback begins, and when it has returned, in the thread that runs it and
 * without the lock. Not of threads that the open scopes leave out. */
struct rbi_pool_pressure_watch {
    void (*on_pressure)(void *user, bool begins); /* NULL: nobody is told */
    void *user;
};

/* Asked before memory is looked for whether the request of so many bytes is to fail as if there
 * were none. It runs with the lock held, so it must not call the pool. */
struct rbi_pool_fault {
    bool (*strikes)(void *user, size_t bytes); /* NULL: none does */
    void *user;
};

/* Told of every call that succeeded, with the sizes as they were asked for. It runs with the lock
 * held, so it must not call the pool. */
struct rbi_pool_recorder {
    void (*on_call)(void *user, enum rbi_pool_call call, const void *address, size_t bytes,
                    rebatch_stream stream); /* NULL: nobody listens */
    void *user;
};

/* With what memory is filled, by work of its stream, so that who reads it gets the same every time.
 * Of 0xff it is no number: NaN as float, double and bfloat16. */
struct rbi_pool_fill {
    bool is_on;
    uint8_t freed;     /* what is freed, or taken back by a rollback */
    uint8_t allocated; /* what is new */
    bool pads; /* requests that may be made to fail get a block of more bytes than they ask for */
};
/* Devices without contents are left alone. */
void rbi_pool_set_fill(rebatch_pool *pool, const struct rbi_pool_fill *fill);
/* Sets who is told of the calls; NULL: nobody. */
void rbi_pool_set_recorder(rebatch_pool *pool, const struct rbi_pool_recorder *recorder);
/* @return who was told before */
struct rbi_pool_pressure_watch rbi_pool_watch_pressure(rebatch_pool *pool,
                                                       const struct rbi_pool_pressure_watch *watch);
/* Sets who makes requests fail, of the threads that scopes take in; what rebatch_pool_reserve() has
 * promised does not.
 *  @return who did before */
struct rbi_pool_fault rbi_pool_set_fault(rebatch_pool *pool, const struct rbi_pool_fault *fault);

/* ---- copies ---- */

/* Copies the pool as it is once all work on its streams is done, over a dry device of its own:
 * options, blocks, holes, pages and what others hold of the device, each where and as it is, so
 * that the same calls find the same addresses. It waits for that work only where blocks that
 * several streams use were freed. Pressure callbacks, the recorder, the last events and what is
 * resident of the session whose turn it is are not in the copy; streams are known by the same
 * handles.
 *  @return REBATCH_OK; REBATCH_E_HOST_OOM, or what the device says: both are NULL then */
rebatch_status rbi_pool_clone(rebatch_pool **out, rebatch_device **dry, rebatch_pool *pool);

#endif
