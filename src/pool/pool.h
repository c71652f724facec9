/* The pool's structs and the seams between its files.
 * Must not know batches or training. */
#ifndef RBI_POOL_H
#define RBI_POOL_H

#include <string.h>

#include "base/base.h"
#include "device/device.h"
#include "pool/heap/heap.h"
#include "pool/lock.h"
#include "pool/plan.h"
#include "pool/view.h"
#include "pool/vm/vm.h"
#include "rebatch/arena.h"
#include "rebatch/sharing.h"

#define RBI_POOL_SCOPES 64
#define RBI_POOL_PRESSURES 16
#define RBI_PROGRESS_EVENTS 8
#define RBI_POOL_ONE_(name, text) +1
enum { RBI_POOL_STAGE_COUNT = 0 REBATCH_POOL_STAGES(RBI_POOL_ONE_) };

/* ---- streams ---- */

/* What one stream has in the pool. */
struct rbi_pool_stream {
    struct rbi_lists lists;       /* first: rbi_stream_of() */
    struct rbi_pool_stream *next; /* in order of first use */
    rebatch_stream stream;
    uint64_t pins; /* requests under way for it */
};

/* How far the device's work has come. `frees` numbers the frees of the whole pool. All work that
 * the device had at free `done` has completed: what was freed until then may leave its stream, for
 * another one, another address or the device. The events under way are a ring, from `first` on.
 *   done < events[first].point < the next one's < ... <= frees */
struct rbi_pool_progress {
    uint64_t frees, done;
    uint64_t due; /* the free with which an event is due; UINT64_MAX: nobody asks */
    uint32_t gap; /* frees from one event to the next */
    uint32_t first, count;
    struct {
        rbi_event handle; /* NULL: none yet, or none to be had */
        uint64_t point;
    } events[RBI_PROGRESS_EVENTS];
};

/* The stream that a block was allocated for, or was last free on. */
static inline struct rbi_pool_stream *rbi_stream_of(const struct rbi_block *block)
{
    return (struct rbi_pool_stream *)block->lists;
}

/* A range whose free memory is not the pool's, until it is lent (graph_arena.c). From its beginning
 * on it is blocks of `own`; among them, and behind them all, are addresses without memory.
 *   without memory == (held, of the lists of holes)
 *   range->is_kept == no part before the tail is without memory && not lent */
struct rebatch_arena {
    struct rbi_pool_stream own; /* its lists, and the stream that it is open for */
    struct rebatch_arena *next;
    rebatch_pool *pool;
    struct rbi_range *range;
    struct rbi_block *tail;       /* the addresses that were never used; NULL: there are no more */
    struct rbi_pool_stream *home; /* the pool's own of that stream, pinned; NULL: never opened */
    bool is_lost;                 /* an address could not be mapped again */
    uint64_t taken_total_bytes;
};

/* ---- scopes and tags ---- */

/* A scope holds the blocks with sequence >= first_sequence. A scope with an owner_thread leaves out
 * the blocks of other threads; what those threads allocate and free shifts live_at_begin. The peak
 * is that of the time in which this scope was the innermost; it is added to the parent's when it
 * ends. */
struct rbi_scope {
    rebatch_scope handle;
    uint64_t first_sequence;
    uint64_t live_at_begin;
    uint64_t live_most;         /* highest live_bytes of the whole pool */
    uint64_t owner_thread;      /* the thread whose calls it takes in, and of those that joined it;
                                   0: all threads' */
    bool is_phase;              /* a session's */
    bool observes;              /* it counts, and undoes nothing: frees do not wait for its end */
    struct rbi_block *deferred; /* freed inside, and not of it */
};

/* at_peak_bytes is up to date when peak_number == pool->peak_number; otherwise the tag has not
 * changed since the pool's last peak, and it is live_bytes. So a new peak costs nothing a tag. */
struct rbi_tag {
    char name[32];
    uint64_t live_bytes, peak_bytes, at_peak_bytes;
    uint64_t peak_number;
};

/* What of a session is resident. */
struct rbi_residents {
    uint64_t bytes; /* sum over the blocks with its number */
    uint64_t owner; /* of the resize that made them */
    bool is_open;
};

/* Where allocations must not fail (overflow.c). */
struct rbi_pool_overflow {
    bool is_on;        /* the device can, and the options let it */
    bool is_open;      /* allocations must not fail now */
    bool is_struck;    /* the next one finds nothing but host memory: it was to fail on purpose */
    size_t most_bytes; /* SIZE_MAX: no bound but the host's free memory */
};

/* While the pool sleeps, and before (sleep.c). */
struct rbi_pool_sleep {
    void (*on_wait)(void *user); /* told when the first call waits; then NULL */
    void *user;
    bool (*is_interrupted)(void *user); /* asked while a call waits */
    void *interrupt_user;
    uint64_t allowed_to; /* the thread that may sleep within a session's step; 0: none */
    /* What a sleep or a wake, which holds the lock while it copies, has found. */
    atomic_bool is_at_work;
    _Atomic(uint64_t) reserved_bytes, live_bytes, given_bytes;
};

struct rbi_pressure {
    size_t (*give_up)(size_t wanted_bytes, void *user);
    void *user;
};

/* Between calls:
 *   stats.live_bytes == sum of bytes over live and deferred blocks == sum of tags[].live_bytes
 *   allocations == sequence == stats.blocks + frees + stats.rolled_back_blocks
 *   quiet_bytes == least of the pool's peak, the mark's and the innermost scope's
 *   scopes[i].first_sequence <= scopes[i + 1].first_sequence <= sequence
 * Everything is under `lock`; a pressure callback runs without it. */
struct rebatch_pool {
    struct rbi_lock lock;
    _Atomic(uint32_t) is_asleep; /* 0 or 1, and a futex: memory is given away until a wake */
    rebatch_device *device;
    size_t page_bytes;

    /* From here to `tags` a copy of the pool has what the pool has (clone.c). */
    size_t limit_bytes; /* SIZE_MAX: none */
    uint32_t limit_permille;
    uint32_t keep_room_permille;
    uint32_t rounding_divisions;
    size_t headroom_bytes;
    size_t floor_bytes;
    size_t given_bytes;    /* the bound of rebatch_pool_give(); SIZE_MAX: none */
    size_t promised_bytes; /* of the last reserve, less what was allocated since */
    bool caching;
    bool is_over_limit;               /* more is reserved than the limit allows: it was lowered */
    bool has_space;                   /* pages are mapped into reserved addresses */
    size_t medium_bytes, large_bytes; /* where these zones begin; SIZE_MAX: there are none */
    uint64_t sequence;
    size_t depth;
    size_t undoing; /* of the open scopes, those that do not observe */
    uint32_t scope_serial;
    uint64_t owner_thread; /* the innermost scope's; 0 without one */
    size_t tag_count;
    uint64_t peak_number;
    /* Only what rbi_pool_get_stats() does not work out from other fields. */
    rebatch_pool_stats stats;
    uint64_t quiet_bytes; /* no peak is raised as long as live_bytes is not above it */
    uint64_t mark_peak_bytes;
    /* The highest peak that was more than an eighth above the last such, and sequence then: while
     * these stand the pool is taken to have seen what it will need. */
    uint64_t warm_peak_bytes, warm_sequence;
    uint64_t highest_live_bytes; /* since create, whatever the user resets */
    uint64_t moved_bytes; /* requests for which pages were moved though the device had room */
    struct rbi_scope scopes[RBI_POOL_SCOPES];
    struct rbi_tag tags[RBI_POOL_TAGS];

    struct rbi_pool_stream *last_stream; /* of the last allocation; at first `space` */
    struct rbi_pool_stream *first_stream;
    struct rbi_pool_stream *space; /* whose free blocks are the holes */
    struct rebatch_arena *first_arena;
    struct rbi_pool_progress progress;
    bool (*may_wait)(void *user);
    void *may_wait_user;
    size_t
        pressing; /* requests that are within a pressure callback, each with its nodes kept spare */
    struct rbi_block *pending;
    struct rbi_block by_sequence; /* where the ring of live and deferred blocks begins and ends */

    struct rbi_block_heap heap;
    struct rbi_vm vm;

    struct rbi_residents residents[RBI_POOL_RESIDENTS]; /* by number; the first is nobody's */
    unsigned resident_of;                               /* whose turn it is */
    struct rbi_old_buffers old_buffers;                 /* of the resize that runs */

    struct rbi_pressure pressures[RBI_POOL_PRESSURES];
    size_t pressure_count;
    struct rbi_pool_pressure_watch pressure_watch;

    uint64_t asked_back_bytes;             /* given back by rebatch_pool_trim() */
    uint64_t stages[RBI_POOL_STAGE_COUNT]; /* how often each was tried */
    rebatch_oom_report oom, own_oom; /* the latter of those that scopes take in, or without any */
    uint64_t own_ooms;
    struct rbi_event_log log;
    struct rbi_pool_recorder recorder;
    struct rbi_pool_fault fault;
    struct rbi_pool_fill fill;

    struct rbi_pool_plan plan;
    struct rbi_pool_overflow overflow;
    struct rbi_pool_sleep sleep;

    _Atomic(struct rbi_pool_task *) task; /* that waits for the thread that trains; NULL: none */

    const char *destroyed_by; /* the call that destroys it; NULL: rebatch_pool_destroy() */
    _Atomic(size_t) sessions; /* that use it, and it is not theirs */
};

static inline bool rbi_pool_is_asleep(const rebatch_pool *pool)
{
    return RBI_UNLIKELY(atomic_load_explicit(&pool->is_asleep, memory_order_relaxed) != 0);
}

/* In the order of the block's stream. One that other streams use is left alone, and what may be
 * asleep. */
static inline void rbi_pool_fill_block(const rebatch_pool *pool, const struct rbi_block *block,
                                       uint8_t value)
{
    if (RBI_UNLIKELY(pool->fill.is_on) && !block->used && !rbi_pool_is_asleep(pool))
        (void)rebatch_fill(pool->device, block->address, value, block->bytes,
                           rbi_stream_of(block)->stream);
}

/* Tells the recorder, if there is one. */
static inline void rbi_pool_tell(const rebatch_pool *pool, enum rbi_pool_call call,
                                 const void *address, size_t bytes, rebatch_stream stream)
{
    if (pool->recorder.on_call)
        pool->recorder.on_call(pool->recorder.user, call, address, bytes, stream);
}

/* The pool whose owner_thread this thread has joined; NULL: none's. */
extern _Thread_local const rebatch_pool *rbi_pool_joined __attribute__((tls_model("initial-exec")));
/* Whether this thread is none of those whose calls scopes take in. */
static inline bool rbi_pool_is_other_thread(const rebatch_pool *pool, uint64_t owner_thread)
{
    return __builtin_expect(owner_thread != 0, 0) && owner_thread != rbi_thread_number() &&
           rbi_pool_joined != pool;
}

/* What one thread was promised is not another's, beside the scope. */
static inline bool rbi_pool_is_beside_promise(const rebatch_pool *pool)
{
    return __builtin_expect(pool->promised_bytes != 0, 0) &&
           rbi_pool_is_other_thread(pool, pool->owner_thread);
}

/* Locks, and ends a plan, so that every block is in its range. */
static inline void rbi_pool_take_lock(rebatch_pool *pool)
{
    rbi_lock_take(&pool->lock);
    rbi_plan_leave(pool);
}

/* Ends a call of the pool. A check build (make CHECK=1) walks everything first, and aborts with the
 * equation that does not hold (tests/invariants). */
#ifdef RBI_CHECK
void rbi_pool_check_state(const rebatch_pool *pool);
#endif
static inline void rbi_pool_give_lock(rebatch_pool *pool)
{
#ifdef RBI_CHECK
    rbi_pool_check_state(pool);
#endif
    rbi_lock_give(&pool->lock);
}

/* ---- within a resize (old_buffers.c); all with the lock held ---- */

/* Whether a new block, which is in no list, may begin where it does. Where it may not, its
 * beginning is out of use until the call is over, the rest is free, and another is to be found. */
bool rbi_old_buffers_pass(rebatch_pool *pool, struct rbi_block *block);
/* What a free is: that of an old buffer's address is late, and ignored; that of an `older` block
 * (NULL: it is none) is final, past the scopes, as the program overwrites its pointers. */
enum rbi_old_free { RBI_OLD_FREE_NONE, RBI_OLD_FREE_LATE, RBI_OLD_FREE_FINAL };
enum rbi_old_free rbi_old_buffers_free(rebatch_pool *pool, const char *pointer,
                                       const struct rbi_block *older);

/* ---- a pool that sleeps (sleep.c); with the lock held ---- */

/* Waits for the wake, without the lock. REBATCH_E_STATE: it was interrupted, nothing is locked. */
rebatch_status rbi_pool_await_wake(rebatch_pool *pool);
/* Locks, for a call that needs memory, unless it fails. */
static inline rebatch_status rbi_pool_take_lock_awake(rebatch_pool *pool)
{
    rbi_lock_take(&pool->lock);
    return rbi_pool_is_asleep(pool) ? rbi_pool_await_wake(pool) : REBATCH_OK;
}

/* ---- where free blocks are cut; all with the lock held ---- */

static inline unsigned rbi_pool_zone_of_size(const rebatch_pool *pool, size_t bytes)
{
    return (unsigned)(bytes >= pool->medium_bytes) + (unsigned)(bytes >= pool->large_bytes);
}

/* The zone that a request belongs to; ANY where there are no pages, and while memory is promised
 * by rebatch_pool_reserve(): all of it is for whatever comes. */
static inline unsigned rbi_pool_zone(const rebatch_pool *pool, size_t bytes)
{
    return pool->has_space && pool->promised_bytes == 0 ? rbi_pool_zone_of_size(pool, bytes)
                                                        : RBI_ZONE_ANY;
}

/* ---- ranges (range.c); all with the lock held ---- */

/* Lets a plain allocation of `bytes` become one free block of `stream`; needs one spare node of
 * each kind. */
rebatch_status rbi_range_alloc(struct rbi_block **out, rebatch_pool *pool, size_t bytes,
                               struct rbi_pool_stream *stream);
/* Gives a plain range without blocks in use back once the work on it is done. Where it cannot, it
 * stays. */
rebatch_status rbi_range_free(rebatch_pool *pool, struct rbi_range *range);
/* Reserves addresses for at least `bytes`; they become one hole. Needs spare nodes as above. */
rebatch_status rbi_range_reserve(rebatch_pool *pool, size_t bytes, uint8_t zone);
/* The whole pages of a block: where they begin, how many. */
static inline size_t rbi_block_whole_pages(const rebatch_pool *pool, const struct rbi_block *block,
                                           char **first)
{
    const size_t lead = -(size_t)(block->address - block->range->address) & (pool->page_bytes - 1);
    *first = block->address + lead;
    if (block->bytes < lead)
        return 0;
    return (block->bytes - lead) >> (unsigned)__builtin_ctzll(pool->page_bytes);
}
/* Of them those that can be unmapped, as no chunk reaches beyond the block. */
static inline size_t rbi_block_own_pages(const rebatch_pool *pool, const struct rbi_block *block,
                                         char **first)
{
    const size_t count = rbi_block_whole_pages(pool, block, first);
    return rbi_map_shrink(block->range->map, first, count);
}
/* A block in no list has memory that the device did not unmap: nobody gets it from now on. */
void rbi_block_lose(rebatch_pool *pool, struct rbi_block *block);
/* Of a block in no list nobody gets the beginning until rbi_block_put(): its first pages, unmapped,
 * so that their memory is of use elsewhere, where that can be done, else a unit. The rest is free.
 * Gives the beginning; NULL: it is lost. Needs three spare nodes. */
struct rbi_block *rbi_block_hold_front(rebatch_pool *pool, struct rbi_block *block);
/* All free blocks become the stream's; all work must be done. */
void rbi_pool_adopt(rebatch_pool *pool, struct rbi_pool_stream *stream);
/* Unmaps wholly free pages whose work is done, until `wanted` are spare or there are no more.
 * Those of `spared` (may be NULL) stay. */
void rbi_pool_harvest(rebatch_pool *pool, size_t wanted, const struct rbi_pool_stream *spared);
/* The same, and then those that arenas have lent. */
void rbi_pool_harvest_all(rebatch_pool *pool, size_t wanted, const struct rbi_pool_stream *spared);
/* Unmaps pages of whole chunks, if one free block has them all and its work is done. */
void rbi_pool_unmap_free(rebatch_pool *pool, struct rbi_range *range, char *at, size_t pages);
/* Gives free memory back until at most `keep_bytes` are cached. What lies wholly with `spared`
 * (may be NULL) stays. */
rebatch_status rbi_pool_trim_cache(rebatch_pool *pool, size_t keep_bytes,
                                   const struct rbi_pool_stream *spared, size_t *released_bytes);
void rbi_pool_destroy_ranges(rebatch_pool *pool);

/* ---- windows (placement.c); all with the lock held ---- */

/* Addresses for a request: the blocks first to last, free ones and holes, one behind the other.
 * What is served lies at the beginning, or at the end. */
struct rbi_window {
    struct rbi_block *first, *last;
    size_t bytes; /* to be had of them */
    size_t pages; /* that must be mapped for that */
    bool at_end;
};
/* A window of `bytes` for `stream` in a range of `zone`, by a bounded look; false when there are no
 * addresses. */
bool rbi_window_find(struct rbi_window *window, rebatch_pool *pool, size_t bytes,
                     struct rbi_pool_stream *stream, unsigned zone);
/* Lets the window reach further, so that `pages` are mapped for it, where all that must be
 * mapped lies at its far end and there are the addresses. Else it stays as it is. */
void rbi_window_widen(struct rbi_window *window, const rebatch_pool *pool, size_t pages);
/* The window that needs fewest pages in all; all work must be done and all free blocks be of
 * one stream. False when those that are free and `room` pages do not suffice. */
bool rbi_window_find_best(struct rbi_window *window, const rebatch_pool *pool, size_t bytes,
                          size_t room);
/* Wholly free pages that are there, mapped or spare; those of blocks that are held do not count. */
size_t rbi_pool_supply(const rebatch_pool *pool);
/* The most bytes for which rbi_window_find_best() would say yes. */
uint64_t rbi_window_most(const rebatch_pool *pool, size_t room);
/* Takes the window's blocks out of their bins, so that nothing else has them, cuts off what is
 * beyond need, and puts them back. Needs two spare nodes. */
void rbi_window_hold(rebatch_pool *pool, struct rbi_window *window);
void rbi_window_drop(rebatch_pool *pool, struct rbi_window *window);
/* Maps a held window, with pages that are spare: it becomes one free block of `stream`. Where it
 * cannot, the window is dropped. */
rebatch_status rbi_window_map(struct rbi_block **out, rebatch_pool *pool, struct rbi_window *window,
                              struct rbi_pool_stream *stream);
/* ---- limits (limits.c); all with the lock held ---- */

/* What the device could give now, in whole pages, within limit and headroom; `info` may be
 * NULL. */
rebatch_status rbi_pool_room(size_t *room, rebatch_pool *pool, rebatch_memory_info *info);
/* What is reserved, but for free memory of arenas. */
uint64_t rbi_pool_own_bytes(const rebatch_pool *pool);
/* What is free in the pool, and in arenas that are lent. */
uint64_t rbi_pool_cached(const rebatch_pool *pool);
/* The same, and what the device could give. */
rebatch_status rbi_pool_count_available(size_t *bytes, rebatch_pool *pool);
/* What the host could give, in whole pages. */
size_t rbi_pool_overflow_room(const rebatch_pool *pool);
size_t rbi_pool_limit(const rebatch_pool *pool, size_t device_total_bytes);
/* The floor that holds now, after what it depends on has changed. */
void rbi_pool_set_floor(rebatch_pool *pool);
/* Takes what is missing of the floor, or what the device has of that: *missing_bytes are left. */
rebatch_status rbi_pool_take_floor(size_t *missing_bytes, rebatch_pool *pool);
/* What a pool may spend to save calls of the device. Until it has seen what it needs, and where
 * memory is scarce, free pages are moved to where they are needed; but every move costs calls, in
 * every step again. */
struct rbi_policy {
    bool fresh_first; /* fresh memory, which costs calls once, before free pages are moved */
    bool any_zone;    /* else blocks of other zones before that */
};
struct rbi_policy rbi_pool_find_policy(rebatch_pool *pool, size_t bytes);
/* Whether the pool has seen what it will need: it has made RBI_WARM_TIMES the allocations of the
 * last rise of live memory, and RBI_WARM_ALLOCATIONS more. */
bool rbi_pool_knows_needs(const rebatch_pool *pool);
/* Whether much of what the pool holds was never in use at once: places that are found while the
 * device is behind are fresh ones, as pages that its work may still use cannot be moved. */
bool rbi_pool_holds_too_much(const rebatch_pool *pool);
/* Whether `bytes` more leave others, and the pool itself, what should be kept. */
bool rbi_pool_may_take(const rebatch_pool *pool, size_t bytes, size_t room);

/* ---- memory for a place (mapping.c); all with the lock held ---- */

/* What is to be mapped, and by which means. */
struct rbi_mapping {
    size_t bytes;
    struct rbi_pool_stream *stream;
    unsigned zone;                        /* of the ranges that it may lie in: of enum rbi_zone */
    const struct rbi_pool_stream *spared; /* keeps its free pages; may be NULL */
    bool no_fresh;                        /* free pages only */
    bool no_remap;                        /* fresh ones before free ones */
    bool ahead;                           /* it will be used as a whole */
    bool in_line;                         /* all work is done, and every free page counts */
    bool overflows;                       /* host memory for what the device has not */
    bool by_remap;                        /* out: no fresh memory was needed */
    bool from_cache;                      /* out: nothing was mapped for it */
    bool at_end;                          /* out: what is served is at the end of what was found */
};

/* Makes sure of `count` spare pages: free ones unmapped from elsewhere, then fresh ones, then lent
 * ones. */
rebatch_status rbi_mapping_gather(rebatch_pool *pool, struct rbi_mapping *mapping, size_t count);
/* A place in the request's zone, mapped. */
rebatch_status rbi_mapping_run(struct rbi_block **out, rebatch_pool *pool,
                               struct rbi_mapping *mapping);
/* Fills a window with memory. */
rebatch_status rbi_mapping_fill(struct rbi_block **out, rebatch_pool *pool,
                                struct rbi_mapping *mapping, struct rbi_window *window);
/* `bytes` more for the stream, in one free block: free pages first, not those of `spared`, then
 * fresh memory. */
rebatch_status rbi_pool_grow(struct rbi_block **out, rebatch_pool *pool, size_t bytes,
                             struct rbi_pool_stream *stream, const struct rbi_pool_stream *spared);
/* Free pages in a row, for `stream`: moved there, and fresh ones for those that cannot be. Gives
 * the free block that they are; NULL: there are not enough, and nothing was moved. */
struct rbi_block *rbi_pool_line_up(rebatch_pool *pool, size_t bytes,
                                   struct rbi_pool_stream *stream);

/* ---- host memory where the device has none (overflow.c); all with the lock held ---- */

/* Whether the calling thread's allocations must not fail, and host memory may be had for them. */
bool rbi_overflow_is_open(const rebatch_pool *pool);

/* ---- streams (streams.c); all with the lock held ---- */

/* NULL when the pool has not seen the stream, or, of open, when the heap has no memory. */
struct rbi_pool_stream *rbi_pool_find_stream(const rebatch_pool *pool, rebatch_stream stream);
struct rbi_pool_stream *rbi_pool_open_stream(rebatch_pool *pool, rebatch_stream stream);
/* Memory is asked for by streams other than the one that freed it: frees get events, the next one
 * first. */
void rbi_pool_record_soon(rebatch_pool *pool);
/* Looks how far the device has come, without waiting, and frees the pending blocks that are
 * ready. */
rebatch_status rbi_pool_poll(rebatch_pool *pool);
/* Where all events have been reached, what was freed after them may be done as well: it gets an
 * event, and is looked at where anybody asks. */
rebatch_status rbi_pool_poll_beyond(rebatch_pool *pool, bool asks);
/* Waits until all work is done that the device had at a free. REBATCH_OOM: it cannot be waited for
 * now. */
rebatch_status rbi_pool_await(rebatch_pool *pool, uint64_t until);
/* The same for all frees so far; pending blocks are freed. What cannot be waited for is left. */
rebatch_status rbi_pool_await_all(rebatch_pool *pool);
/* Has waiting a point? */
bool rbi_pool_has_waiting(const rebatch_pool *pool, const struct rbi_pool_stream *except);
void rbi_pool_destroy_streams(rebatch_pool *pool);
/* Merges the quick blocks of all streams with their neighbours. */
void rbi_pool_flush_lists(rebatch_pool *pool);
/* Bytes of the largest free block. */
uint64_t rbi_pool_largest_free(const rebatch_pool *pool);

/* ---- the search (search.c); with the lock held, but not during pressure callbacks ---- */

struct rbi_request {
    size_t bytes; /* rounded */
    struct rbi_pool_stream *stream;
    unsigned zone;            /* of enum rbi_zone: which free blocks it is served from at first */
    rebatch_pool_stage stage; /* out: the last one tried */
    bool ahead;               /* of its use, and used as a whole */
    bool beside;              /* what is promised is not for it */
    bool strikes;             /* it is to find nothing but host memory */
    rebatch_arena *arena;     /* whose addresses it is for; NULL: of none */
    bool claims;              /* for those that lack memory: `bytes` in all */
};
/* What the heap must give before a search, so that the search itself needs little of it. */
rebatch_status rbi_pool_prepare(rebatch_pool *pool);
/* The block nodes that must stay spare for searches under way. One needs them for a new range, a
 * window's rest, and the block's rest. */
#define RBI_POOL_SEARCH_NODES 3
static inline size_t rbi_pool_search_nodes(const rebatch_pool *pool)
{
    return RBI_POOL_SEARCH_NODES * (pool->pressing + 1);
}
/* Readies a search: what it needs of the heap, and its stream, which is kept from being recycled
 * by a reference until rbi_request_close(). */
rebatch_status rbi_request_open(struct rbi_request *request, rebatch_pool *pool, size_t bytes,
                                rebatch_stream stream);
void rbi_request_close(struct rbi_request *request);
/* Takes a block of the stream's own free ones; NULL: none. Needs one spare node. */
struct rbi_block *rbi_pool_take_own(rebatch_pool *pool, struct rbi_pool_stream *stream,
                                    size_t bytes);
/* Finds a block of exactly request->bytes; it is in no list yet. */
rebatch_status rbi_pool_search(struct rbi_block **out, rebatch_pool *pool,
                               struct rbi_request *request);
/* ---- arenas (arena_memory.c) ---- */

/* Finds a block for a request of an arena, or maps what was taken: then *out is a free one. */
rebatch_status rbi_arena_search(struct rbi_block **out, rebatch_pool *pool,
                                const struct rbi_request *request);
/* Addresses of an arena without memory. */
static inline bool rbi_block_is_bare(const struct rbi_block *block)
{
    return block->state == RBI_BLOCK_HELD;
}
/* Of those before the tail: what the pool took. */
rebatch_status rbi_arena_create(rebatch_arena **out, rebatch_pool *pool, bool is_shared);
size_t rbi_arena_taken_bytes(const rebatch_arena *arena);
rebatch_status rbi_arena_check_lost(const rebatch_arena *arena);

/* An allocation from an arena (alloc.c). */
rebatch_status rbi_pool_alloc_from(void **out, rebatch_pool *pool, rebatch_arena *arena,
                                   size_t bytes, rebatch_stream stream, rebatch_tag tag)
    __attribute__((nonnull(3)));

/* ---- checks of arguments (arguments.c) ---- */

bool rbi_pool_round_size(size_t *rounded, const rebatch_pool *pool, size_t bytes);
rebatch_status rbi_pool_check_stream(const rebatch_pool *pool, rebatch_stream stream);
/* True in a thread that is within a pressure callback of `pool`. */
extern _Thread_local const rebatch_pool *rbi_pool_pressing
    __attribute__((tls_model("initial-exec")));
static inline bool rbi_pool_is_pressing(const rebatch_pool *pool)
{
    return rbi_pool_pressing == pool;
}

/* How many callbacks of pools this thread is within: pressure, and writing a snapshot. */
extern _Thread_local unsigned rbi_pool_callbacks;

/* ---- a limit that was lowered (lower.c); with the lock held ---- */

/* Gives cached memory back as long as more is reserved than the limit allows. */
void rbi_pool_keep_limit(rebatch_pool *pool);
/* What every call that frees ends with. */
static inline void rbi_pool_end_free(rebatch_pool *pool)
{
    if (RBI_UNLIKELY(pool->is_over_limit))
        rbi_pool_keep_limit(pool);
    rbi_pool_give_lock(pool);
}

/* ---- the end of a block (free.c) ---- */

/* Takes a live or deferred block out of use. */
void rbi_pool_drop_block(rebatch_pool *pool, struct rbi_block *block, bool rolled_back);
/* ---- counting (statistics.c), scopes (scope.c), reports (oom.c); with the lock held ---- */

/* The calling thread is outside: a block, which scopes may leave out, is about to be counted as in
 * use, or no longer. */
void rbi_scope_pass_over(rebatch_pool *pool, const struct rbi_block *block, bool begins);
/* The innermost scope that takes in what all threads do; NULL: none does. */
struct rbi_scope *rbi_scope_of_all(rebatch_pool *pool);
/* The free of a block waits for the commit of a scope. */
void rbi_scope_push_deferred(struct rbi_scope *scope, struct rbi_block *block);
/* Adds what `from` has seen to `to`, the scope around it. */
void rbi_scope_fold(struct rbi_scope *to, const struct rbi_scope *from);
struct rbi_pool_traffic rbi_pool_traffic(const rebatch_pool *pool);
/* The phase that runs ends, and one with `key` begins with the next allocation; 0: none does
 * (phase.c). */
void rbi_pool_begin_phase(rebatch_pool *pool, uint64_t key);
/* The phase that was announced begins. Before an allocation or a reserve. */
void rbi_pool_begin_marked(rebatch_pool *pool);
void rbi_tags_init(rebatch_pool *pool);
/* Fills in the last OOM report, counts, and sets the thread's error text. Gives REBATCH_OOM. */
rebatch_status rbi_pool_report_oom(rebatch_pool *pool, const struct rbi_request *request,
                                   size_t asked_bytes, const char *tag);
/* ---- events (event_log.c) ---- */

/* One word of test where nothing is recorded. */
#define RBI_RECORD(pool, kind, address, bytes, stream, tag)                                        \
    do {                                                                                           \
        if (__builtin_expect((pool)->log.events != NULL, 0))                                       \
            rbi_event_log_add(&(pool)->log, RBI_POOL_EVENT_##kind, address, bytes, stream, tag);   \
    } while (0)

#include "pool/fast_path.h"

/* ---- failures on purpose (pool.c, oom.c) ---- */

/* The size of a block for `bytes`: `rounded`, or more where blocks are padded. */
size_t rbi_pool_pad(const rebatch_pool *pool, size_t bytes, size_t rounded);
/* REBATCH_OOM, with its report, when a request is to fail; with the lock held. Where it must not,
 * REBATCH_OK and overflow.is_struck. */
rebatch_status rbi_pool_inject_failure(rebatch_pool *pool, size_t bytes, size_t rounded,
                                       rebatch_stream stream, const char *tag);

#endif
