/** @file sharing.h
 *  Memory of a pool for others: sleep, give, wake, export.
 *
 *  A pool that sleeps gives its memory to the device's other users and keeps its addresses; one
 *  that gives lowers what it may hold. rebatch_pool_wake() ends both. docs/sharing.md shows a
 *  training beside a server.
 *
 *  @code
 *  rebatch_sleep_options options = REBATCH_SLEEP_OPTIONS_INIT;
 *  options.keep = &weights;                              // a tag of rebatch_pool_tag()
 *  options.keep_count = 1;
 *  rebatch_pool_sleep(pool, &options, NULL);             // between two steps
 *  serve(weights);
 *  while (rebatch_pool_wake(pool) == REBATCH_OOM)        // nothing is lost
 *      wait_for_others();
 *  @endcode */
#ifndef REBATCH_SHARING_H
#define REBATCH_SHARING_H

#include "rebatch/arena.h"
#include "rebatch/pool.h"

struct rebatch; /* step.h */

/** Options of a sleep. Zero means default. */
typedef struct rebatch_sleep_options {
    size_t struct_size;          /**< sizeof(rebatch_sleep_options) */
    const rebatch_tag *keep;     /**< blocks with these tags stay on the device, where they are */
    size_t keep_count;           /**< number of `keep` */
    const rebatch_tag *drop;     /**< blocks with these tags are not copied: their contents are
                                  undefined after the wake */
    size_t drop_count;           /**< number of `drop` */
    void (*on_wait)(void *user); /**< told once, in the first thread that has to wait for the wake;
                                      it may wake the pool. NULL: nobody is told */
    void *user;                  /**< passed to on_wait */
} rebatch_sleep_options;
/** Default options of a sleep: all contents are copied to host memory. */
#define REBATCH_SLEEP_OPTIONS_INIT                                                                 \
    {                                                                                              \
        sizeof(rebatch_sleep_options), NULL, 0, NULL, 0, NULL, NULL                                \
    }

/** What a sleep has done. Append-only. */
typedef struct rebatch_sleep_report {
    uint64_t released_bytes; /**< given back to the device */
    uint64_t copied_bytes;   /**< of them, copied to host memory: whole pages */
    uint64_t held_bytes;     /**< still held of the device */
    uint64_t kept_bytes;     /**< of them, in blocks of `keep`; the rest shares pages with them */
} rebatch_sleep_report;

/** A piece of memory that another process can map. */
typedef struct rebatch_export_piece {
    size_t offset; /**< where it lies, from the beginning of the export */
    size_t bytes;  /**< whole pages of the device */
    int fd;        /**< the memory, as a file descriptor that is closed on exec */
} rebatch_export_piece;

#ifdef __cplusplus
extern "C" {
#endif

/** Give a pool's memory to others until rebatch_pool_wake(). The call waits for all work of the
 *  device. It then copies the blocks in use to host memory, but for those of `keep` and `drop`, and
 *  gives all pages back that hold no block of `keep`. All addresses stay. No work may be enqueued
 *  that uses memory of the pool, but for blocks of `keep`, until the wake.
 *
 *  While the pool sleeps, an allocation, a reserve, a claim of an arena, a mark and a session's
 *  callback wait for the wake; a free works. Memory that rebatch_pool_reserve() holds is released.
 *  A second sleep puts more to sleep; what sleeps already stays asleep. The copy is in pinned host
 *  memory, at most half of what the host has free. It is kept for the next sleep, unless the host
 *  then has less free than twice the copy.
 *  @param pool         the pool
 *  @param options      copied; NULL: defaults
 *  @param[out] report  zeros on failure; may be NULL
 *  @return REBATCH_OK; REBATCH_E_HOST_OOM when the host has no memory for the copy;
 *          REBATCH_E_STATE within a session's step and a pressure callback, and while a graph is
 *          captured; REBATCH_E_UNSUPPORTED when the pool has no virtual memory, or does not cache;
 *          REBATCH_E_INVALID, REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST. On failure no block is
 *          asleep that was not before; cached memory may have been given back */
REBATCH_API_CHECKED rebatch_status rebatch_pool_sleep(rebatch_pool *pool,
                                                      const rebatch_sleep_options *options,
                                                      rebatch_sleep_report *report);

/** Lower what the pool may hold, until rebatch_pool_wake(): a bound beside the limit, of which the
 *  smaller one holds. The pool gives cached memory back at once, and the rest when it is freed, as
 *  after rebatch_pool_set_limit(). Thread-safe.
 *  @param pool                 the pool
 *  @param most_bytes           the most memory that the pool may hold, at least one page. A second
 *                              call replaces the bound of the first
 *  @param[out] released_bytes  given back to the device by this call; may be NULL
 *  @return REBATCH_OK, REBATCH_E_INVALID */
REBATCH_API rebatch_status rebatch_pool_give(rebatch_pool *pool, size_t most_bytes,
                                             size_t *released_bytes);

/** Reserve memory that the pool gives back only while it sleeps or has given: neither a trim nor a
 *  plan goes below the floor, so that nobody else takes it between two phases. What is missing of
 *  it is taken at once, and after a wake as far as the device has it. Thread-safe.
 *  @param pool         the pool
 *  @param floor_bytes  at most the limit; 0: no floor
 *  @return REBATCH_OK; REBATCH_OOM when the device does not have it: the floor is as before;
 *          REBATCH_E_UNSUPPORTED when the pool has no virtual memory, or does not cache;
 *          REBATCH_E_INVALID, REBATCH_E_HOST_OOM, REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST */
REBATCH_API rebatch_status rebatch_pool_set_floor(rebatch_pool *pool, size_t floor_bytes);

/** End a sleep, and the bound of rebatch_pool_give(). Memory is mapped at all addresses of blocks
 *  in use, and nowhere else; what was copied is copied back. So a wake succeeds with less memory
 *  than there was, as long as it suffices for the blocks in use. Threads that wait go on. On a pool
 *  that does not sleep only the bound ends. Thread-safe.
 *  @param pool  the pool
 *  @return REBATCH_OK; REBATCH_OOM when there is not the memory: the pool still sleeps, nothing is
 *          lost, and the call may be repeated; so it may after REBATCH_E_DEVICE; REBATCH_E_STATE
 *          within a pressure callback, and of a pool that sleeps while a graph is captured;
 *          REBATCH_E_INVALID, REBATCH_E_DEVICE_LOST */
REBATCH_API_CHECKED rebatch_status rebatch_pool_wake(rebatch_pool *pool);

/** Let waits for a wake be interrupted, for example by Ctrl-C. `is_interrupted` is asked ten times
 *  a second in each thread that waits. Once it says so, that thread calls rebatch_pool_wake(), and
 *  its call goes on. Where the device lacks the memory, the call returns REBATCH_E_STATE and the
 *  pool sleeps on. A session's step then fails: guarded state stays as it is, since it sleeps too.
 *  Thread-safe.
 *  @param pool            the pool
 *  @param is_interrupted  returns soon, and calls nothing of the pool; NULL: waits last until a
 *                         wake
 *  @param user            passed to it
 *  @return REBATCH_OK, REBATCH_E_INVALID */
REBATCH_API rebatch_status rebatch_pool_set_interrupt(rebatch_pool *pool,
                                                      bool (*is_interrupted)(void *user),
                                                      void *user);

/** Answer requests for a pool's memory on a Unix socket, which only this user and root may use: a
 *  line each of `status`, `give 4GiB`, `give to 12GiB`, `sleep` and `wake` (docs/sharing.md). A
 *  thread answers `status` and `wake`, and outside of steps gives back what is cached. A session of
 *  the pool gives what is in use between two micro-batches, which then become smaller, and sleeps
 *  there. The environment variable REBATCH_YIELD and the setting memory.yield do this in
 *  rebatch_open(). A process has one such socket: another call replaces it, and ends what was asked
 *  there.
 *  @param pool  borrowed until the next call of this function; where it is a session's own, until
 *               rebatch_close(); NULL: only the socket that is there is removed
 *  @param path  of the socket, at most 107 bytes. One that a killed process left there is replaced.
 *               A folder: PID.sock in it; NULL: the same in the folder of rebatch_top_format(),
 *               which is made. The socket is removed when the process exits
 *  @return REBATCH_OK; REBATCH_E_IO when there can be no socket, or a process answers there
 *          already: rebatch_last_error() says why, and the process has none */
REBATCH_API rebatch_status rebatch_yield_to(rebatch_pool *pool, const char *path);

/** Ask a process with rebatch_yield_to(), and wait for its answer: for `status` at most two
 *  seconds. A socket that a killed process left is removed. Thread-safe.
 *  @param[out] answer  a line without its newline, zero-terminated and cut to `size` bytes: an
 *                      object of JSON for `status`; else a sentence that begins with "ok: " where
 *                      all that was asked is done, with "partly: " or with "no: "
 *  @param size         at least 1
 *  @param path         the socket; a number: the process of that id, in the folder of
 *                      rebatch_top_format()
 *  @param request      a line of at most 127 bytes
 *  @return REBATCH_OK; REBATCH_E_IO when nobody answers: rebatch_last_error() says why, and the
 *          answer is empty; REBATCH_E_INVALID */
REBATCH_API rebatch_status rebatch_ask(char *answer, size_t size, const char *path,
                                       const char *request);

/** How much of the last minute of steps memory cut smaller: an average over time whose weights fall
 *  to 1/e in a minute, as avg60 of Linux's pressure stall information.
 *  @param rb  the session
 *  @return from 0 to 1; 0 when `rb` is NULL, and before the first step has ended */
REBATCH_API double rebatch_short_of_memory(const struct rebatch *rb);

/** Write what the processes of this user answer to `status` that have a socket in the folder
 *  $XDG_RUNTIME_DIR/rebatch, or /tmp/rebatch-UID where that variable names no folder: a table, or
 *  an array of JSON. Sockets that killed processes left are removed. Thread-safe.
 *  @param[out] text  zero-terminated, truncated to `size` bytes; may be NULL when `size` is 0
 *  @param size       size of `text` in bytes
 *  @param as_json    false: a table
 *  @return length of the whole text without the terminating zero, as snprintf() returns */
REBATCH_API size_t rebatch_top_format(char *text, size_t size, bool as_json);

/* ---- memory for another process ---- */

/** Create an arena whose memory other processes can map. Its pages are created for it alone, in
 *  pieces of at least an eighth of what it holds: no page has a block of anybody else. It is used
 *  like any other arena, without a graph too, but never lent: its pages stay where they are, also
 *  in a sleep, after a trim and under a lower limit. Tries first whether the driver exports a page.
 *  Thread-safe.
 *  @param[out] out  owned by the caller, release with rebatch_arena_destroy() after the readers'
 *                   end; NULL on failure
 *  @param pool      borrowed; must outlive the arena
 *  @return as rebatch_arena_create(); REBATCH_E_UNSUPPORTED also where device or driver give no
 *          file descriptors for memory, as in some containers */
REBATCH_API rebatch_status rebatch_arena_create_shared(rebatch_arena **out, rebatch_pool *pool);

/** Export the memory of a shared arena. A block at address p lies at `p - *begin` of it. What
 *  the arena takes from the device later is in the next export. A reader sees what is written from
 *  then on without a call of this library: both processes agree when to write and when to read.
 *  Thread-safe.
 *  @param[out] begin   the first address; NULL on failure
 *  @param[out] pieces  in order of their offsets; the caller closes each `fd`, at once if it likes:
 *                      the memory does not depend on it. May be NULL if room is 0
 *  @param room         how many fit
 *  @param[out] count   how many there are, also when they do not fit; 0 on any other failure
 *  @param arena        of rebatch_arena_create_shared()
 *  @return REBATCH_OK; REBATCH_E_INVALID, also where they do not fit; REBATCH_E_STATE for another
 *          arena; REBATCH_E_UNSUPPORTED, REBATCH_E_DEVICE. On failure no descriptor is open */
REBATCH_API rebatch_status rebatch_arena_export(const void **begin, rebatch_export_piece *pieces,
                                                size_t room, size_t *count, rebatch_arena *arena);

/** Map what another process has exported, at addresses of this one, to be read: where the driver
 *  allows that, a write ends this process and not the weights of the other. The memory exists until
 *  both have let go of it, also when the other process ends. It does not count as used by this
 *  device. Thread-safe.
 *  @param[out] out  the first address; NULL on failure
 *  @param device    borrowed; the GPU that the memory lies on, or a host device for a host device's
 *  @param pieces    as rebatch_arena_export() gave them, with descriptors of this process. The
 *                   caller closes them at any time after the call
 *  @param count     how many, at least one
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_UNSUPPORTED, REBATCH_OOM, REBATCH_E_HOST_OOM,
 *          REBATCH_E_DEVICE */
REBATCH_API rebatch_status rebatch_export_map(void **out, rebatch_device *device,
                                              const rebatch_export_piece *pieces, size_t count);

/** Unmap it, after this process's work on it.
 *  @param device   of rebatch_export_map()
 *  @param address  what it gave; NULL is allowed
 *  @param pieces   the same, whose descriptors are not used
 *  @param count    the same
 *  @return REBATCH_OK, REBATCH_E_DEVICE; REBATCH_E_INVALID also for other pieces than were mapped,
 *          and for an address where nothing is mapped any more: nothing changed */
REBATCH_API rebatch_status rebatch_export_unmap(rebatch_device *device, void *address,
                                                const rebatch_export_piece *pieces, size_t count);

#ifdef __cplusplus
}
#endif
#endif
