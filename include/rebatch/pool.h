/** @file pool.h
 *  The caching allocator, with scopes that roll back.
 *
 *  A pool caches the memory of one device. All its metadata is in host memory, and there is no
 *  global state: every call takes the pool. docs/pool.md describes how it works.
 *
 *  All calls are thread-safe, except that one thread opens and closes the scopes of a pool. A scope
 *  of rebatch_scope_begin() covers all threads: it records what any thread allocates and frees
 *  while it is open, and a rollback takes that back. The scope of a session's callback covers the
 *  callback's thread and the threads that joined it (rebatch_join()).
 *
 *  Words: a block is what one allocation returns; live memory is memory in blocks in use; reserved
 *  memory is memory that the pool holds from the device; a page is the smallest unit of physical
 *  memory that the device maps, 2 MiB on a GPU. */
#ifndef REBATCH_POOL_H
#define REBATCH_POOL_H

#include "rebatch/device.h"
#include "rebatch/status.h"

/** A caching allocator on one device. */
typedef struct rebatch_pool rebatch_pool;

/** Every pointer that the pool returns is a multiple of this many bytes. */
#define REBATCH_POOL_ALIGNMENT 256
/** The size of every block is rounded up to a multiple of this many bytes. */
#define REBATCH_POOL_UNIT_BYTES 512

/** What memory is used for: a number from rebatch_pool_tag(); 0: untagged. */
typedef uint16_t rebatch_tag;

/** A scope: all that was allocated since it began can be taken back together. 0: none. */
typedef uint32_t rebatch_scope;

/** Options of a pool. Zero means default. */
typedef struct rebatch_pool_options {
    size_t struct_size;      /**< sizeof(rebatch_pool_options) */
    size_t limit_bytes;      /**< the most memory that the pool may reserve, at least one page;
                                  0: no limit */
    uint32_t limit_permille; /**< the limit as a share of the device's memory, 1 to 1000; 0: none.
                                  With both limits set, the lower one applies */
    size_t headroom_bytes;   /**< memory left free on the device for libraries and the driver, at
                                  most all of it; 0: none */
    rebatch_toggle caching;  /**< REBATCH_OFF: every call goes to the device, for memory checkers;
                                  default on */
    uint32_t rounding_divisions; /**< block sizes are rounded up to one of this many steps between
                                      two powers of two; a power of two up to 256; 0: rounding to
                                      REBATCH_POOL_UNIT_BYTES only */
    uint32_t events; /**< how many of the latest allocations, frees, mappings, OOMs and rollbacks
                          are kept for snapshots; 0: none */
    uint32_t keep_room_permille; /**< when live memory has not risen for a while, the pool takes new
                                      memory instead of remapping free pages, while more than this
                                      share of the memory that it holds or can get stays free.
                                      Remapping costs device calls in every step, new memory costs
                                      them once. 1 to 1000; 0: 20; 1000: always remap */
    rebatch_toggle replay;       /**< where each repetition of a phase (rebatch_pool_mark()) would
                                      remap pages, or the pool holds much more than is in use at
                                      its peak, place the phase's allocations by a plan; needs
                                      virtual memory and caching; default on */
    rebatch_toggle overflow; /**< take host memory, mapped beside the device's, where an allocation
                                  must not fail (rebatch_pool_allow_overflow()) and there is no
                                  device memory; needs caching, and a device that can map it;
                                  default on */
    size_t overflow_bytes;   /**< the most host memory that the pool takes then; it never takes more
                                  than half of what the host has free; 0: that half */
    bool (*may_wait)(void *user); /**< asked before the pool waits for the device, or records or
                                       queries an event of its work, each of which would invalidate
                                       the capture of a graph. While it returns false, memory stays
                                       with its stream. It must not call rebatch; it is called from
                                       the thread that allocates or frees. The pool's end waits
                                       without asking. NULL: always true */
    void *may_wait_user;          /**< passed to may_wait */
} rebatch_pool_options;
/** Default options of a pool. */
#define REBATCH_POOL_OPTIONS_INIT                                                                  \
    {                                                                                              \
        sizeof(rebatch_pool_options), 0, 0, 0, REBATCH_DEFAULT, 0, 0, 0, REBATCH_DEFAULT,          \
            REBATCH_DEFAULT, 0, NULL, NULL                                                         \
    }

/** Statistics: X(name, unit, what is counted). */
#define REBATCH_POOL_STATISTICS(X)                                                                 \
    X(live_bytes, "bytes", "in blocks in use")                                                     \
    X(live_peak_bytes, "bytes", "in blocks in use, highest value")                                 \
    X(requested_bytes, "bytes", "requested for the blocks in use, before rounding")                \
    X(reserved_bytes, "bytes", "held from the device")                                             \
    X(reserved_peak_bytes, "bytes", "held from the device, highest value")                         \
    X(deferred_bytes, "bytes", "of live_bytes freed inside a scope: in use until it commits")      \
    X(blocks, "blocks", "in use")                                                                  \
    X(blocks_peak, "blocks", "in use, highest value")                                              \
    X(allocations, "calls", "that returned a block")                                               \
    X(frees, "calls", "that freed a block")                                                        \
    X(allocated_total_bytes, "bytes", "allocated since the pool was created")                      \
    X(freed_total_bytes, "bytes", "freed since the pool was created")                              \
    X(device_allocations, "calls", "to the device for memory")                                     \
    X(device_frees, "calls", "that returned memory to the device")                                 \
    X(trims, "calls", "that returned cached memory to the device")                                 \
    X(pressure_calls, "calls", "of pressure callbacks")                                            \
    X(ooms, "calls", "that failed with REBATCH_OOM")                                               \
    X(rollbacks, "scopes", "rolled back")                                                          \
    X(rolled_back_blocks, "blocks", "taken back by rollbacks")                                     \
    X(late_frees, "calls", "to free a block that a rollback had taken back; ignored")              \
    X(remaps, "pages", "of free blocks mapped to another address")                                 \
    X(quarantined_bytes, "bytes", "that the device did not unmap; never used again")               \
    X(driver_creates, "calls", "that made physical memory")                                        \
    X(driver_maps, "calls", "that mapped a piece of physical memory")                              \
    X(driver_accesses, "calls", "that made mapped memory accessible")                              \
    X(driver_unmaps, "calls", "that unmapped a piece")                                             \
    X(driver_releases, "calls", "that returned a piece of physical memory")                        \
    X(driver_pieces, "pieces", "made accessible by driver_accesses")                               \
    X(driver_ns, "ns", "in these calls; priced on a dry device")                                   \
    X(overflow_bytes, "bytes", "of reserved_bytes that lie in host memory")                        \
    X(overflow_peak_bytes, "bytes", "of host memory, highest value")                               \
    X(overflow_total_bytes, "bytes", "of host memory taken since the pool was created")            \
    X(phases, "phases", "marked (rebatch_pool_mark()) and ended, with replay on")                  \
    X(planned_phases, "phases", "of these that a plan served to their end")

/** Statistics of a pool. */
typedef struct rebatch_pool_stats {
#define REBATCH_POOL_STAT_(name, unit, text) uint64_t name;
    REBATCH_POOL_STATISTICS(REBATCH_POOL_STAT_)
#undef REBATCH_POOL_STAT_
} rebatch_pool_stats;

/** The stages of the search for memory, in order: X(name, where the pool looks). */
#define REBATCH_POOL_STAGES(X)                                                                     \
    X(CACHE, "the pool's own free blocks")                                                         \
    X(OTHER_STREAMS, "free blocks of other streams whose work has completed")                      \
    X(REMAP, "pages of free blocks, mapped elsewhere")                                             \
    X(DEVICE, "new memory from the device")                                                        \
    X(WAIT, "freed blocks, after waiting for the streams that use them")                           \
    X(TRIM, "the device again, after returning cached memory to it")                               \
    X(PRESSURE, "the device again, after the pressure callbacks")                                  \
    X(OVERFLOW, "host memory, for an allocation that must not fail")

/** A stage of the search for memory. */
typedef enum rebatch_pool_stage {
#define REBATCH_POOL_STAGE_(name, text) REBATCH_STAGE_##name,
    REBATCH_POOL_STAGES(REBATCH_POOL_STAGE_)
#undef REBATCH_POOL_STAGE_
} rebatch_pool_stage;

/** The memory of one tag. */
typedef struct rebatch_tag_usage {
    char name[32];          /**< name of the tag, truncated if longer */
    uint64_t live_bytes;    /**< live memory now */
    uint64_t peak_bytes;    /**< highest live memory of this tag */
    uint64_t at_peak_bytes; /**< live memory of this tag when the pool was at its peak */
} rebatch_tag_usage;

/** The format of a snapshot. */
typedef enum rebatch_snapshot_format {
    REBATCH_SNAPSHOT_BLOCKS_CSV = 0, /**< one line for each block; the sum of their bytes is
                                          reserved_bytes, and what is asleep */
    REBATCH_SNAPSHOT_EVENTS_CSV = 1  /**< one line for each event, oldest first */
} rebatch_snapshot_format;

/** The number of tags in an OOM report. */
#define REBATCH_OOM_TAGS 6

/** Why a request failed: the pool and the device at that moment. */
typedef struct rebatch_oom_report {
    uint64_t asked_bytes;        /**< size of the request; 0: no request has failed */
    char tag[32];                /**< tag of the request */
    rebatch_pool_stage stage;    /**< the last stage of the search */
    uint64_t limit_bytes;        /**< the pool's limit; UINT64_MAX: none */
    uint64_t live_bytes;         /**< live memory */
    uint64_t reserved_bytes;     /**< reserved memory */
    uint64_t room_bytes;         /**< what the device could still give within limit and headroom */
    uint64_t device_total_bytes; /**< memory of the device */
    uint64_t device_free_bytes;  /**< free memory of the device */
    uint64_t largest_hole_bytes; /**< the largest free block in the pool */
    uint64_t would_fit_bytes;    /**< the largest request that would have succeeded */
    uint32_t tag_count;          /**< number of `tags` */
    rebatch_tag_usage tags[REBATCH_OOM_TAGS]; /**< the tags with most live memory, largest first */
} rebatch_oom_report;

#ifdef __cplusplus
extern "C" {
#endif

/** Create a pool. Thread-safe.
 *  @param[out] out  owned by the caller, release with rebatch_pool_destroy(); NULL on failure
 *  @param device    borrowed; must outlive the pool
 *  @param options   copied; NULL: defaults
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_HOST_OOM, REBATCH_E_DEVICE */
REBATCH_API rebatch_status rebatch_pool_create(rebatch_pool **out, rebatch_device *device,
                                               const rebatch_pool_options *options);

/** Wait for the streams, return all memory to the device, blocks in use included, and release
 *  the pool. If the device cannot be waited for, memory that its work may still use stays mapped,
 *  and counts as used on the device. Do not call it while a graph is captured: may_wait
 *  is not asked, and the wait invalidates the capture. No other thread may use the pool. The
 *  call is refused for a session's pool, and for a pool whose pressure callback is running:
 *  rebatch_last_error() says so.
 *  @param pool  NULL is allowed */
REBATCH_API void rebatch_pool_destroy(rebatch_pool *pool);

/** The device of a pool. Thread-safe.
 *  @param pool  any pool
 *  @return borrowed */
REBATCH_API rebatch_device *rebatch_pool_device(const rebatch_pool *pool);

/** Allocate device memory. Thread-safe.
 *  @param[out] out  aligned to 256 bytes, contents undefined; NULL on failure, and when `bytes` is
 *                   0 (which succeeds)
 *  @param pool      the pool
 *  @param bytes     size of the block
 *  @param stream    the stream that will use the block: work enqueued there may use it immediately,
 *                   and so may the next block there once it is freed. Another stream may use it if
 *                   this one waits for that before it uses the memory again; else see
 *                   rebatch_pool_use_on()
 *  @param tag       what the block is used for, from rebatch_pool_tag(); 0: untagged
 *  @return REBATCH_OK; REBATCH_OOM when no stage of the search found memory:
 *          rebatch_pool_last_oom() has the details; REBATCH_E_STATE from within a pressure
 *          callback; REBATCH_E_INVALID, REBATCH_E_HOST_OOM, REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST
 */
REBATCH_API_CHECKED rebatch_status rebatch_pool_alloc(void **out, rebatch_pool *pool, size_t bytes,
                                                      rebatch_stream stream, rebatch_tag tag);

/** Say that allocations must not fail from here on, because what they serve cannot be undone: an
 *  optimizer's step that has begun to change parameters. Where the search finds no memory, it takes
 *  pinned host memory, mapped beside the device's: kernels run on it unchanged, more slowly. A
 *  session says so by itself in optimizer_step after rebatch_mutating(). Thread-safe.
 *  @param pool  the pool
 *  @param may   false: allocations may fail again, and what lies in host memory is moved to the
 *               device, each page at its address, as far as there is room; this waits for all work
 *               of the device
 *  @return REBATCH_OK, also where overflow is off or the device cannot map host memory: then
 *          allocations fail as before; REBATCH_E_INVALID, REBATCH_E_DEVICE,
 *          REBATCH_E_DEVICE_LOST */
REBATCH_API rebatch_status rebatch_pool_allow_overflow(rebatch_pool *pool, bool may);

/** How much host memory such allocations could take now. Thread-safe.
 *  @param pool  the pool
 *  @return bytes; 0 where overflow is off, or the device cannot map host memory */
REBATCH_API size_t rebatch_pool_overflow_room(rebatch_pool *pool);

/** Free a block. Work already enqueued on its stream may still use it. A block that is older than
 *  the innermost open scope stays in use until that scope commits, so that a rollback finds it
 *  unchanged; a block freed by a pressure callback is free immediately. Thread-safe.
 *  @param pool     the pool of the block
 *  @param pointer  from rebatch_pool_alloc(); NULL is allowed. The free of a block that a rollback
 *                  has taken back is ignored and counted (late_frees) until the address is
 *                  allocated again. The pool remembers the blocks of the last rollback, and the
 *                  latest 32,768 blocks of all rollbacks
 *  @return REBATCH_OK; REBATCH_E_INVALID for a pointer that is not the start of a block of this
 *          pool, or whose block is already free */
REBATCH_API rebatch_status rebatch_pool_free(rebatch_pool *pool, void *pointer);

/** Declare that another stream uses a block too. When the block is freed, no stream reuses it
 *  before all work that the device has by then is done. Thread-safe.
 *  @param pool     the pool of the block
 *  @param pointer  the start of a block in use
 *  @param stream   a stream of the pool's device
 *  @return REBATCH_OK, REBATCH_E_INVALID */
REBATCH_API rebatch_status rebatch_pool_use_on(rebatch_pool *pool, void *pointer,
                                               rebatch_stream stream);

/** The size of a block: the requested size, rounded up. Thread-safe.
 *  @param[out] bytes  0 on failure
 *  @param pool        the pool of the block
 *  @param pointer     the start of a block
 *  @return REBATCH_OK; REBATCH_E_INVALID for a pointer that is not the start of a block in use */
REBATCH_API rebatch_status rebatch_pool_block_bytes(size_t *bytes, rebatch_pool *pool,
                                                    const void *pointer);

/** Reserve memory: the pool then holds at least `bytes` bytes in one contiguous free piece.
 *  Allocations whose sizes, each rounded up, add up to at most `bytes` cannot fail afterwards;
 *  rebatch_reserve() describes the rounding. Thread-safe.
 *
 *  The call only checks whether the device has the memory now, and guarantees nothing, when caching
 *  is off, and in a thread that runs concurrently with a session's callback without having joined
 *  it (rebatch_join()). rebatch_pool_mark() releases the reservation, and so do the beginning and
 *  the end of a session's callback.
 *  @param pool    the pool
 *  @param bytes   sum of the rounded sizes
 *  @param stream  the stream of the allocations
 *  @return as rebatch_pool_alloc() */
REBATCH_API_CHECKED rebatch_status rebatch_pool_reserve(rebatch_pool *pool, size_t bytes,
                                                        rebatch_stream stream);

/** Return cached memory to the device until at most `keep_bytes` of it are left, or as little as
 *  the blocks in use allow. Thread-safe.
 *  @param pool                 the pool
 *  @param keep_bytes           cached memory to keep; what the floor needs is kept too
 *  @param[out] released_bytes  memory returned; may be NULL
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST */
REBATCH_API rebatch_status rebatch_pool_trim(rebatch_pool *pool, size_t keep_bytes,
                                             size_t *released_bytes);

/** Change the limit while the pool is in use. With a limit below the reserved memory, the pool
 *  returns as much cached memory to the device as it can, and what is in use when it is freed,
 *  until the limit holds; such a free waits for the streams' work. Thread-safe.
 *  @param pool         the pool
 *  @param limit_bytes  the most memory that the pool may reserve; 0: no limit. Below the floor
 *                      (rebatch_pool_set_floor()) it is the floor too
 *  @return REBATCH_OK, REBATCH_E_INVALID */
REBATCH_API rebatch_status rebatch_pool_set_limit(rebatch_pool *pool, size_t limit_bytes);

/** Let kernels of another GPU read and write the memory of a pool, what it holds now and what it
 *  will hold. Copies between GPUs need no such permission. It cannot be taken back. Thread-safe.
 *  @param pool     a pool on a CUDA device
 *  @param ordinal  the other GPU, as CUDA counts
 *  @return REBATCH_OK, also for the pool's own GPU; REBATCH_E_UNSUPPORTED when the pool is on
 *          another kind of device, or the GPUs cannot reach each other's memory; REBATCH_E_INVALID,
 *          REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST */
REBATCH_API rebatch_status rebatch_pool_allow_peer(rebatch_pool *pool, int ordinal);

/** How many bytes could still be allocated in total, in blocks of suitable sizes: the free blocks,
 *  and what the device can give within limit and headroom. Thread-safe.
 *  @param[out] bytes  0 on failure
 *  @param pool        the pool
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST */
REBATCH_API rebatch_status rebatch_pool_available(size_t *bytes, rebatch_pool *pool);

/** Register a pressure callback: the pool calls it when memory is short, before an allocation
 *  fails. What the callback frees is free immediately, and no rollback brings it back. Thread-safe.
 *  @param pool     the pool
 *  @param give_up  frees blocks of this pool, in the thread in which it is called, and returns how
 *                  many bytes it freed; it must not allocate from the pool
 *  @param user     passed to `give_up`; borrowed until the pool is destroyed
 *  @return REBATCH_OK, REBATCH_E_INVALID; REBATCH_E_UNSUPPORTED when 16 are registered */
REBATCH_API rebatch_status rebatch_pool_add_pressure(
    rebatch_pool *pool, size_t (*give_up)(size_t wanted_bytes, void *user), void *user);

/** The number of a tag. The same name gives the same number. Thread-safe.
 *  @param[out] out  0 on failure
 *  @param pool      the pool
 *  @param name      copied; its first 31 bytes count
 *  @return REBATCH_OK, REBATCH_E_INVALID; REBATCH_E_UNSUPPORTED when there are 255 tags */
REBATCH_API rebatch_status rebatch_pool_tag(rebatch_tag *out, rebatch_pool *pool, const char *name);

/** Mark the beginning of a phase of the program, for example of a micro-batch or an update, and the
 *  end of the phase before. The phase begins with the first allocation or reserve after the call:
 *  what is freed until then, as gradients are at the beginning of a loop, is freed in the phase
 *  before, and so does not outlive that. A session marks its callbacks itself. Thread-safe.
 *
 *  The pool plans a phase when three consecutive phases with the same key lacked room: in each, the
 *  pool moved pages, or held over a 32nd, and four pages, more than was ever in use. It plans if
 *  the last two of them made the same calls. The pool then serves the next phases with this key
 *  from one arena, in which no page is moved, and returns to the device what it holds beyond its
 *  needs. The first call that differs ends the plan for its phase. That call and those after it are
 *  served as without a plan, and so are allocations on other streams than that of the phase's first
 *  allocation, blocks that are used by other streams, and blocks that outlive the phase.
 *  @param pool  the pool. A phase has the calls of all threads, except of those that the open scope
 *               of a session's callback does not cover
 *  @param key   identifies the kind of phase, for example by its size; 0: no phase begins. The pool
 *               remembers the last 16 keys
 *  @return REBATCH_OK, REBATCH_E_INVALID */
REBATCH_API rebatch_status rebatch_pool_mark(rebatch_pool *pool, uint64_t key);

/** Open a scope inside the innermost open one.
 *  @param[out] out  0 on failure
 *  @param pool      the pool
 *  @return REBATCH_OK, REBATCH_E_INVALID; REBATCH_E_UNSUPPORTED when 64 scopes are open */
REBATCH_API rebatch_status rebatch_scope_begin(rebatch_scope *out, rebatch_pool *pool);

/** Close a scope and keep what was allocated inside: it then belongs to the enclosing scope. Blocks
 *  freed inside that are older than the scope become free now; if they are older than the enclosing
 *  scope too, they become free when that commits.
 *  @param pool   the pool
 *  @param scope  the innermost open scope
 *  @return REBATCH_OK; REBATCH_E_INVALID when `scope` is not the innermost open one: nothing
 *          changed */
REBATCH_API rebatch_status rebatch_scope_commit(rebatch_pool *pool, rebatch_scope scope);

/** Close a scope and take back what was allocated inside and is still in use. Blocks freed inside
 *  that are older than the scope stay in use. Open scopes inside it are rolled back first. The
 *  memory stays in the pool's cache.
 *  @param pool   the pool
 *  @param scope  an open scope
 *  @return REBATCH_OK; REBATCH_E_INVALID when `scope` is not open: nothing changed */
REBATCH_API rebatch_status rebatch_scope_rollback(rebatch_pool *pool, rebatch_scope scope);

/** Read the statistics, which are exact. Thread-safe.
 *  @param[out] out  the statistics
 *  @param pool      the pool
 *  @return REBATCH_OK, REBATCH_E_INVALID */
REBATCH_API rebatch_status rebatch_pool_get_stats(rebatch_pool_stats *out, rebatch_pool *pool);

/** Reset the highest values of pool and tags to the current values. Thread-safe.
 *  @param pool  the pool
 *  @return REBATCH_OK, REBATCH_E_INVALID */
REBATCH_API rebatch_status rebatch_pool_reset_peaks(rebatch_pool *pool);

/** The memory of one tag. Thread-safe.
 *  @param[out] out  the tag's memory
 *  @param pool      the pool
 *  @param tag       from rebatch_pool_tag(), or 0
 *  @return REBATCH_OK; REBATCH_E_INVALID for a tag that does not exist */
REBATCH_API rebatch_status rebatch_pool_get_tag_usage(rebatch_tag_usage *out, rebatch_pool *pool,
                                                      rebatch_tag tag);

/** Why the last request that failed did so. Thread-safe.
 *  @param[out] out  zeroed when no request has failed
 *  @param pool      the pool
 *  @return REBATCH_OK, REBATCH_E_INVALID */
REBATCH_API rebatch_status rebatch_pool_last_oom(rebatch_oom_report *out, rebatch_pool *pool);

/** Write statistics and tags as a table of text. Thread-safe.
 *  @param[out] text  zero-terminated, truncated to `size` bytes; may be NULL when `size` is 0
 *  @param size       size of `text` in bytes
 *  @param pool       the pool
 *  @return length of the whole text without the terminating zero, as snprintf() returns; 0 when
 *          `pool` is NULL */
REBATCH_API size_t rebatch_pool_format_summary(char *text, size_t size, rebatch_pool *pool);

/** Write an OOM report as a few lines of text: what was requested, what was free, which tags hold
 *  most, and which request would have succeeded. Thread-safe.
 *  @param[out] text  as for rebatch_pool_format_summary()
 *  @param size       size of `text` in bytes
 *  @param report     the report
 *  @return as rebatch_pool_format_summary() */
REBATCH_API size_t rebatch_oom_format(char *text, size_t size, const rebatch_oom_report *report);

/** Write a snapshot: every block of the pool, and the latest events, as many as
 *  rebatch_pool_options.events says. The call changes no block and allocates no memory: it works
 *  when memory has run out. It ends the plan of the phase. Thread-safe.
 *
 *  docs/snapshot.md describes the formats, and how PyTorch's memory viewer displays them.
 *  @param pool    the pool
 *  @param format  blocks or events
 *  @param write   receives the bytes in order, at most 4096 in each call. It runs with the pool's
 *                 lock held and must not call the pool. Any status but REBATCH_OK ends the snapshot
 *  @param user    passed to `write`
 *  @return REBATCH_OK, REBATCH_E_INVALID; the status that `write` returned */
REBATCH_API rebatch_status rebatch_pool_write_snapshot(
    rebatch_pool *pool, rebatch_snapshot_format format,
    rebatch_status (*write)(const void *data, size_t size, void *user), void *user);

/** Write a snapshot to a file, as rebatch_pool_write_snapshot() does. Thread-safe.
 *  @param pool    the pool
 *  @param format  blocks or events
 *  @param path    the file; an existing one is overwritten
 *  @return REBATCH_OK, REBATCH_E_INVALID; REBATCH_E_IO when the file cannot be written: it may then
 *          be incomplete */
REBATCH_API rebatch_status rebatch_pool_save_snapshot(rebatch_pool *pool,
                                                      rebatch_snapshot_format format,
                                                      const char *path);

#ifdef __cplusplus
}
#endif
#endif
