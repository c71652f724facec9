/** @file pool.h
 *  The caching allocator: fast, undoable, and able to say who holds what.
 *
 *  All metadata is in host memory. There is no global state: every call takes the pool. All calls
 *  are safe from several threads, except that scopes are one stack a pool, so it is one thread that
 *  opens and closes them. A scope of rebatch_scope_begin() is of the pool, not of a thread: while
 *  it is open it takes in what any thread allocates and frees, and a rollback takes that back.
 *  Those of a session's callbacks are of the callback's thread, and of those that joined it
 *  (step.h). */
#ifndef REBATCH_POOL_H
#define REBATCH_POOL_H

#include "rebatch/device.h"
#include "rebatch/status.h"

typedef struct rebatch_pool rebatch_pool;

/** Every pointer that the pool gives is a multiple of this, and every block's size is rounded up to
 *  REBATCH_POOL_UNIT_BYTES. */
#define REBATCH_POOL_ALIGNMENT 256
#define REBATCH_POOL_UNIT_BYTES 512

/** What memory is for: a small number made by rebatch_pool_tag(); 0 is "untagged". */
typedef uint16_t rebatch_tag;

/** A scope: what was allocated since it began can be taken back as a whole. 0 is none. */
typedef uint32_t rebatch_scope;

/** Options of a pool. Zero means default. */
typedef struct rebatch_pool_options {
    size_t struct_size;      /**< sizeof(rebatch_pool_options) */
    size_t limit_bytes;      /**< most that is ever held from the device, at least one granule of
                                  it; 0: no limit of our own */
    uint32_t limit_permille; /**< the same as a share of the device's total, 1 to 1000; 0: none.
                                  When both are given the smaller one holds */
    size_t headroom_bytes;   /**< left free on the device for libraries and the driver, at most
                                  all of it; 0: none */
    rebatch_toggle caching;  /**< REBATCH_OFF: every call goes straight to the device, for memory
                                  checkers; default on */
    size_t ballast_bytes;    /**< kept from the device until it says OOM itself, then given back so
                                  that error paths can run; taken again when there is room; at
                                  most limit_bytes, and the device's total; 0: none */
    size_t max_split_bytes;  /**< free blocks larger than this are not split for requests that are
                                  smaller than it; 0: no such bound */
    uint32_t gc_threshold_permille; /**< above this share of the limit (of the device, without
                                         one) free memory that was not used for longest goes back
                                         to the device when the pool grows, 1 to 1000; 0: never */
    uint32_t rounding_divisions; /**< sizes are rounded up to this many steps an octave, a power of
                                      two up to 256; 0: to REBATCH_POOL_UNIT_BYTES alone */
    rebatch_toggle guard; /**< REBATCH_ON: each block ends where memory ends, so that an overrun
                               faults; costs a granule a block and device calls; default off */
    uint32_t events;      /**< how many of the last allocations, frees, mappings, OOMs and rollbacks
                               are kept for snapshots; 0: none */
    uint32_t keep_room_permille; /**< once live memory has not peaked for long, free granules are
                                      no longer moved to where they are needed, and fresh memory is
                                      taken instead, as long as more than this share of what the
                                      pool holds and could still have stays free: moving costs
                                      device calls again and again, fresh memory only once. 1 to
                                      1000; 0: 20; 1000: always moved */
    rebatch_toggle replay;       /**< serve phases that repeat (rebatch_pool_mark()) by a plan where
                                      memory is so short that pages would be moved in each; needs
                                      virtual memory and caching; default on */
} rebatch_pool_options;
#define REBATCH_POOL_OPTIONS_INIT                                                                  \
    {                                                                                              \
        sizeof(rebatch_pool_options), 0, 0, 0, REBATCH_DEFAULT, 0, 0, 0, 0, REBATCH_DEFAULT, 0, 0, \
            REBATCH_DEFAULT                                                                        \
    }

/** Statistics: X(name, unit, what it is). Struct, summary and documents are made from this list. */
#define REBATCH_POOL_STATISTICS(X)                                                                 \
    X(live_bytes, "bytes", "in blocks that are in use")                                            \
    X(live_peak_bytes, "bytes", "most live at once")                                               \
    X(requested_bytes, "bytes", "asked for by the blocks in use, before rounding")                 \
    X(reserved_bytes, "bytes", "held from the device")                                             \
    X(reserved_peak_bytes, "bytes", "most reserved at once")                                       \
    X(deferred_bytes, "bytes", "of them, freed inside a scope: given back when it commits")        \
    X(blocks, "blocks", "in use")                                                                  \
    X(blocks_peak, "blocks", "most in use at once")                                                \
    X(allocations, "calls", "that gave a block")                                                   \
    X(frees, "calls", "that gave a block back")                                                    \
    X(allocated_total_bytes, "bytes", "given out since the pool was created")                      \
    X(freed_total_bytes, "bytes", "given back since the pool was created")                         \
    X(device_allocations, "calls", "to the device for memory")                                     \
    X(device_frees, "calls", "that gave memory back to the device")                                \
    X(trims, "calls", "that gave cached memory back to the device")                                \
    X(pressure_calls, "calls", "of pressure callbacks")                                            \
    X(ooms, "calls", "answered with REBATCH_OOM")                                                  \
    X(rollbacks, "scopes", "rolled back")                                                          \
    X(rolled_back_blocks, "blocks", "taken back by a rollback")                                    \
    X(late_frees, "calls", "to free a block that a rollback had taken back; ignored")              \
    X(remaps, "granules", "of free blocks, mapped elsewhere")                                      \
    X(quarantined_bytes, "bytes", "that the device did not unmap; never used again")               \
    X(collected_bytes, "bytes", "given back for exceeding the gc threshold")                       \
    X(ballast_drops, "times", "the ballast was given up")

typedef struct rebatch_pool_stats {
#define REBATCH_POOL_STAT_(name, unit, text) uint64_t name; /**< see the list */
    REBATCH_POOL_STATISTICS(REBATCH_POOL_STAT_)
#undef REBATCH_POOL_STAT_
} rebatch_pool_stats;

/** What a scope has seen since it began, scopes inside it included. */
typedef struct rebatch_scope_stats {
    int64_t live_bytes; /**< live now less live when it began */
    int64_t peak_bytes; /**< the highest that ever was: what the scope needs on top of the rest */
    uint64_t requested_bytes; /**< asked for in total, before rounding */
    uint64_t allocations;     /**< blocks given out in total */
    uint64_t largest_bytes;   /**< the largest block given out */
} rebatch_scope_stats;

/** How far the search for memory went before it gave up: X(name, what was tried). */
#define REBATCH_POOL_RUNGS(X)                                                                      \
    X(CACHE, "the pool's own free blocks")                                                         \
    X(OTHER_STREAMS, "free blocks of other streams whose work has completed")                      \
    X(REMAP, "pages of free blocks, mapped elsewhere")                                             \
    X(DEVICE, "fresh memory from the device")                                                      \
    X(WAIT, "frees that other streams have not reached yet")                                       \
    X(TRIM, "the device again, after giving cached memory back")                                   \
    X(PRESSURE, "the device again, after the pressure callbacks")

typedef enum rebatch_pool_rung {
#define REBATCH_POOL_RUNG_(name, text) REBATCH_RUNG_##name,
    REBATCH_POOL_RUNGS(REBATCH_POOL_RUNG_)
#undef REBATCH_POOL_RUNG_
} rebatch_pool_rung;

/** One tag's share. */
typedef struct rebatch_tag_usage {
    char name[32];          /**< the tag's name, cut if longer */
    uint64_t live_bytes;    /**< now */
    uint64_t peak_bytes;    /**< the most this tag ever had */
    uint64_t at_peak_bytes; /**< what it had when the pool as a whole was at its peak */
} rebatch_tag_usage;

/** What a snapshot is written as. */
typedef enum rebatch_snapshot_format {
    REBATCH_SNAPSHOT_PICKLE = 0,     /**< for PyTorch's memory viewer: blocks and events */
    REBATCH_SNAPSHOT_BLOCKS_CSV = 1, /**< a line a block; their bytes add up to reserved_bytes */
    REBATCH_SNAPSHOT_EVENTS_CSV = 2  /**< a line an event, the oldest first */
} rebatch_snapshot_format;

/** How many tags an OOM report names. */
#define REBATCH_OOM_TAGS 6

/** Why a request failed. */
typedef struct rebatch_oom_report {
    uint64_t asked_bytes;    /**< the request; 0: there was no OOM yet */
    char tag[32];            /**< its tag */
    rebatch_pool_rung rung;  /**< the last rung tried */
    uint64_t limit_bytes;    /**< the pool's limit, UINT64_MAX when there is none */
    uint64_t live_bytes;     /**< in use then */
    uint64_t reserved_bytes; /**< held from the device then */
    uint64_t room_bytes;     /**< what the device could still give within limit and headroom */
    uint64_t device_total_bytes;
    uint64_t device_free_bytes;
    uint64_t largest_hole_bytes; /**< the largest free block in the pool */
    uint64_t would_fit_bytes;    /**< the largest request that would have been served */
    uint32_t tag_count;          /**< how many of `tags` are filled */
    rebatch_tag_usage tags[REBATCH_OOM_TAGS]; /**< who held most, largest first */
} rebatch_oom_report;

/** How many blocks and tags a leak report names. */
#define REBATCH_LEAK_BLOCKS 8
#define REBATCH_LEAK_TAGS 6

/** A tag's part of what is left. */
typedef struct rebatch_leak_tag {
    char name[32];
    uint64_t blocks;
    uint64_t live_bytes;
} rebatch_leak_tag;

/** A block that is left. */
typedef struct rebatch_leak_block {
    const void *address;
    uint64_t bytes;
    uint64_t allocation; /**< its number among the pool's allocations, from 0: the same calls give
                              the same number, so a breakpoint can wait for it */
    char tag[32];
} rebatch_leak_block;

/** What was allocated inside a scope and is still in use. */
typedef struct rebatch_leak_report {
    uint64_t blocks;                                 /**< all of them */
    uint64_t live_bytes;                             /**< in them */
    uint64_t requested_bytes;                        /**< asked for by them, before rounding */
    uint32_t tag_count;                              /**< how many of `tags` are filled */
    uint32_t block_count;                            /**< how many of `largest` are filled */
    rebatch_leak_tag tags[REBATCH_LEAK_TAGS];        /**< who holds most, largest first */
    rebatch_leak_block largest[REBATCH_LEAK_BLOCKS]; /**< largest first, then oldest */
} rebatch_leak_report;

#ifdef __cplusplus
extern "C" {
#endif

/** Create a caching pool on `device`.
 *  @param[out] out    owned by the caller, release with rebatch_pool_destroy(); NULL on failure
 *  @param device      borrowed; must outlive the pool
 *  @param options     copied; NULL means defaults
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_HOST_OOM, REBATCH_E_DEVICE;
 *          REBATCH_E_UNSUPPORTED when guard is on, and caching is off or the device has no virtual
 *          memory. Any thread. */
REBATCH_API rebatch_status rebatch_pool_create(rebatch_pool **out, rebatch_device *device,
                                               const rebatch_pool_options *options);

/** Wait for the streams, give everything back to the device, blocks in use included, and release
 *  the pool. Of a stream that cannot be waited for, memory that its work may still use stays mapped
 *  and counts as used on the device for good: it is never taken from under running work. NULL is
 *  allowed. No other thread may be using the pool. A session's pool stays, and so does one whose
 *  pressure callback this is called from; rebatch_last_error() says so. */
REBATCH_API void rebatch_pool_destroy(rebatch_pool *pool);

/** The device that the pool was created on; borrowed. Any thread. */
REBATCH_API rebatch_device *rebatch_pool_device(const rebatch_pool *pool);

/** Allocate device memory. It belongs to `stream`: work enqueued there may use it at once.
 *  @param[out] out  256-byte aligned; NULL on failure and when `bytes` is 0 (which is no failure)
 *  @param stream    the stream that will use it; others: rebatch_pool_use_on()
 *  @param tag       what it is for, from rebatch_pool_tag(); 0: untagged
 *  @return REBATCH_OK; REBATCH_OOM when the ladder found no memory (rebatch_pool_last_oom() says
 *          why); REBATCH_E_INVALID; REBATCH_E_STATE from within a pressure callback;
 *          REBATCH_E_HOST_OOM; REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST. Any thread. */
REBATCH_API rebatch_status rebatch_pool_alloc(void **out, rebatch_pool *pool, size_t bytes,
                                              rebatch_stream stream, rebatch_tag tag);

/** Give a block back. Work already enqueued on its stream may still use it. A block that is older
 *  than the innermost open scope stays as it is until that scope commits, so that a rollback finds
 *  it untouched; unless a pressure callback frees it.
 *  @param pointer  from rebatch_pool_alloc(); NULL is allowed. A block that a rollback has already
 *                  taken back is ignored and counted (late_frees) until its address is given out
 *                  again; remembered are those of the last rollback, and the latest 32,768
 *  @return REBATCH_OK; REBATCH_E_INVALID for a pointer that is not the start of a block of this
 *          pool, or one freed already. Any thread. */
REBATCH_API rebatch_status rebatch_pool_free(rebatch_pool *pool, void *pointer);

/** Say that another stream uses a block too: after it is freed it is not given out again before the
 *  work that `stream` has then enqueued is done.
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_HOST_OOM. Any thread. */
REBATCH_API rebatch_status rebatch_pool_use_on(rebatch_pool *pool, void *pointer,
                                               rebatch_stream stream);

/** The size of a block: what was asked for, rounded up.
 *  @param[out] bytes  0 on failure
 *  @return REBATCH_OK; REBATCH_E_INVALID for a pointer that is not the start of a block in use. Any
 *          thread. */
REBATCH_API rebatch_status rebatch_pool_block_bytes(size_t *bytes, rebatch_pool *pool,
                                                    const void *pointer);

/** Hold at least `bytes` bytes in the cache, in one piece: the allocations that follow cannot fail
 *  as long as their sizes, each rounded up by itself, add up to no more (rebatch_reserve() says how
 *  sizes are rounded). With caching off nothing can be held; the call then only looks whether the
 *  device has the room, and so it does in a thread beside a session's callback (rebatch_join()), to
 *  which nothing is promised. With guard on it does nothing.
 *  @return as rebatch_pool_alloc(). Any thread. */
REBATCH_API rebatch_status rebatch_pool_reserve(rebatch_pool *pool, size_t bytes,
                                                rebatch_stream stream);

/** Give cached memory back to the device until at most `keep_bytes` of it are left, or as near as
 *  free memory allows.
 *  @param[out] released_bytes  may be NULL
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST. Any thread. */
REBATCH_API rebatch_status rebatch_pool_trim(rebatch_pool *pool, size_t keep_bytes,
                                             size_t *released_bytes);

/** Change the limit while the pool is in use. A limit below what is reserved trims what it can.
 *  @param limit_bytes  0: no limit
 *  @return REBATCH_OK, REBATCH_E_INVALID. Any thread. */
REBATCH_API rebatch_status rebatch_pool_set_limit(rebatch_pool *pool, size_t limit_bytes);

/** What could still be allocated in total, if it came in the right pieces: free blocks, and the
 *  room that the device has within limit and headroom.
 *  @param[out] bytes  0 on failure
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST. Any thread. */
REBATCH_API rebatch_status rebatch_pool_available(size_t *bytes, rebatch_pool *pool);

/** Register a function that is called when memory is short, before an allocation fails: it may free
 *  blocks of this pool (in this thread) and says how many bytes it gave up. It must not allocate.
 *  What it frees is free at once, and no rollback of a scope that is open then brings it back.
 *  @param user  handed to `give_up`; borrowed until the pool is destroyed
 *  @return REBATCH_OK, REBATCH_E_INVALID; REBATCH_E_UNSUPPORTED when 16 are registered. Any thread.
 *          */
REBATCH_API rebatch_status rebatch_pool_add_pressure(
    rebatch_pool *pool, size_t (*give_up)(size_t wanted_bytes, void *user), void *user);

/** The number of a tag; the same name gives the same number.
 *  @param[out] out  0 on failure
 *  @param name      copied; at most 31 bytes count
 *  @return REBATCH_OK; REBATCH_E_INVALID; REBATCH_E_UNSUPPORTED when 255 tags exist. Any thread. */
REBATCH_API rebatch_status rebatch_pool_tag(rebatch_tag *out, rebatch_pool *pool, const char *name);

/** Say that a phase of the program begins, and that the one before has ended: a micro-batch or an
 *  update, for example. Sessions do this by themselves. Where memory is so short that pages had to
 *  be moved in three phases with the same key in a row, and the last two of them made the same
 *  calls, the pool works out a layout for these, and serves the next phases with this key from one
 *  arena: no page is moved in them any more. The first call that differs ends that for its phase,
 *  and the pool serves what follows like any other call. So it does allocations on other streams
 *  than that of the phase's first one, and those that outlive the phase or that other streams use.
 *  @param key  what the phase is, its size for example; 0: no phase. The last 16 keys are known
 *  @return REBATCH_OK, REBATCH_E_INVALID. Any thread; a phase has the calls of all threads, but for
 *          those that an open scope of a session's callback leaves out. */
REBATCH_API rebatch_status rebatch_pool_mark(rebatch_pool *pool, uint64_t key);

/** Open a scope inside the innermost open one.
 *  @param[out] out  0 on failure
 *  @return REBATCH_OK; REBATCH_E_INVALID; REBATCH_E_UNSUPPORTED when 64 are open. */
REBATCH_API rebatch_status rebatch_scope_begin(rebatch_scope *out, rebatch_pool *pool);

/** Keep what the scope allocated: it now belongs to the scope around it. Frees of older blocks that
 *  were made inside are carried out, or wait on in the scope around it when the block is older than
 *  that too.
 *  @return REBATCH_OK; REBATCH_E_INVALID when `scope` is not the innermost open one: nothing
 *          changed. */
REBATCH_API rebatch_status rebatch_scope_commit(rebatch_pool *pool, rebatch_scope scope);

/** Take back everything that was allocated inside and is still in use, and forget the frees of
 *  older blocks. Scopes that are still open inside are rolled back first. The memory stays in the
 *  cache.
 *  @return REBATCH_OK; REBATCH_E_INVALID when `scope` is not open: nothing changed. */
REBATCH_API rebatch_status rebatch_scope_rollback(rebatch_pool *pool, rebatch_scope scope);

/** What an open scope has seen.
 *  @return REBATCH_OK; REBATCH_E_INVALID when `scope` is not open. Any thread. */
REBATCH_API rebatch_status rebatch_scope_get_stats(rebatch_scope_stats *out, rebatch_pool *pool,
                                                   rebatch_scope scope);

/** What was allocated inside an open scope and is still in use: to be asked before a commit, or
 *  before the pool is destroyed, when nothing should be left.
 *  @param[out] out  zeroed on failure
 *  @param scope     0: since the pool was created
 *  @return REBATCH_OK; REBATCH_E_INVALID when `scope` is not open. Any thread. */
REBATCH_API rebatch_status rebatch_scope_get_leaks(rebatch_leak_report *out, rebatch_pool *pool,
                                                   rebatch_scope scope);

/** Read the statistics. They are exact. Any thread.
 *  @return REBATCH_OK, REBATCH_E_INVALID. */
REBATCH_API rebatch_status rebatch_pool_get_stats(rebatch_pool_stats *out, rebatch_pool *pool);

/** Set the peaks to what is there now, those of tags included. Any thread.
 *  @return REBATCH_OK, REBATCH_E_INVALID. */
REBATCH_API rebatch_status rebatch_pool_reset_peaks(rebatch_pool *pool);

/** One tag's share. Any thread.
 *  @return REBATCH_OK; REBATCH_E_INVALID for a tag that does not exist. */
REBATCH_API rebatch_status rebatch_pool_get_tag_usage(rebatch_tag_usage *out, rebatch_pool *pool,
                                                      rebatch_tag tag);

/** Why the last request that failed did. Any thread.
 *  @param[out] out  zeroed when none failed yet
 *  @return REBATCH_OK, REBATCH_E_INVALID. */
REBATCH_API rebatch_status rebatch_pool_last_oom(rebatch_oom_report *out, rebatch_pool *pool);

/** Write the statistics and the tags as a table, for people.
 *  @param text  may be NULL when `size` is 0; else ends in a zero byte, cut if too small
 *  @return the length of the whole text without its zero byte, as snprintf does; 0 when `pool` is
 *          NULL. Any thread. */
REBATCH_API size_t rebatch_pool_format_summary(char *text, size_t size, rebatch_pool *pool);

/** Write an OOM report in a few lines: what was asked, what was free, who holds what, what would
 *  have fitted.
 *  @return as rebatch_pool_format_summary(). Any thread. */
REBATCH_API size_t rebatch_oom_format(char *text, size_t size, const rebatch_oom_report *report);

/** Write a leak report in a few lines: how much is left, of which tags, and the largest blocks.
 *  @return as rebatch_pool_format_summary(). Any thread. */
REBATCH_API size_t rebatch_leak_format(char *text, size_t size, const rebatch_leak_report *report);

/** Write what the pool holds, block by block, and the last events, of which it keeps as many as
 *  rebatch_pool_options.events says. Nothing changes in the pool, and no memory is allocated, so it
 *  may be called when there is none.
 *
 *  The pickle is the dictionary that torch.cuda.memory._snapshot() gives: "segments" and
 *  "device_traces", with a block's tag where PyTorch has the frames of who allocated it. So
 *  https://pytorch.org/memory_viz and `python -m torch.cuda._memory_viz` show it. All statistics
 *  and tags are in it under "rebatch". docs/snapshot.md has the layouts.
 *  @param write  is given the bytes in order, in pieces of at most 4096. It runs with the pool's
 *                lock held, so it must not call the pool. Another answer than REBATCH_OK ends the
 *                writing
 *  @param user   handed to `write`
 *  @return REBATCH_OK; REBATCH_E_INVALID; what `write` answered. Any thread. */
REBATCH_API rebatch_status rebatch_pool_write_snapshot(
    rebatch_pool *pool, rebatch_snapshot_format format,
    rebatch_status (*write)(const void *data, size_t size, void *user), void *user);

/** The same into a file, which is created or replaced.
 *  @return as above; REBATCH_E_IO when the file cannot be written: it may then have a part. Any
 *          thread. */
REBATCH_API rebatch_status rebatch_pool_save_snapshot(rebatch_pool *pool,
                                                      rebatch_snapshot_format format,
                                                      const char *path);

#ifdef __cplusplus
}
#endif
#endif
