/** @file arena.h
 *  Memory of CUDA graphs that is lent between replays.
 *
 *  A graph uses the same addresses in every replay. An arena is a part of a pool that serves the
 *  allocations of a capture, and keeps its addresses until it is destroyed. Between two replays
 *  most of them hold nothing: then the arena is lent, and when memory is short the pool takes pages
 *  from it, before a request fails. Before the next replay it is claimed, which maps other pages at
 *  the same addresses. Blocks in use are never taken: what a replay reads, and what it leaves.
 *
 *  @code
 *  rebatch_arena_create(&arena, pool);
 *  rebatch_arena_open(arena, stream);                    // before the capture begins
 *  cudaStreamBeginCapture(stream, mode);
 *  rebatch_arena_alloc(&block, arena, bytes, stream, 0); // and rebatch_pool_free()
 *  cudaStreamEndCapture(stream, &graph);
 *  for (;;) {
 *      if (rebatch_arena_claim(arena) != REBATCH_OK)     // no memory: run without the graph
 *          break;
 *      cudaGraphLaunch(executable, stream);
 *      rebatch_arena_lend(arena);
 *      update(), evaluate();                             // may use the arena's memory
 *  }
 *  @endcode
 *
 *  A replay while the arena is lent may find addresses without memory, which ends the process.
 *  Several graphs may share an arena: it is opened again for the next capture, and what is free by
 *  then is used again. Their replays must not overlap. Arenas need a device with virtual memory. */
#ifndef REBATCH_ARENA_H
#define REBATCH_ARENA_H

#include "rebatch/pool.h"

/** A part of a pool whose addresses belong to captured graphs. */
typedef struct rebatch_arena rebatch_arena;

/** What an arena holds. Append-only. */
typedef struct rebatch_arena_stats {
    uint64_t bytes;             /**< of addresses that its blocks have used, whole pages */
    uint64_t live_bytes;        /**< of them in blocks in use */
    uint64_t taken_bytes;       /**< of them without memory now: the pool took it */
    uint64_t taken_total_bytes; /**< taken since the arena was created */
} rebatch_arena_stats;

#ifdef __cplusplus
extern "C" {
#endif

/** Create an arena. It holds no memory yet. Thread-safe.
 *  @param[out] out  owned by the caller, release with rebatch_arena_destroy(); NULL on failure
 *  @param pool      borrowed; must outlive the arena
 *  @return REBATCH_OK; REBATCH_E_UNSUPPORTED when the pool has no virtual memory, or does not
 *          cache; REBATCH_OOM when there are no addresses; REBATCH_E_INVALID, REBATCH_E_HOST_OOM,
 *          REBATCH_E_DEVICE */
REBATCH_API rebatch_status rebatch_arena_create(rebatch_arena **out, rebatch_pool *pool);

/** Destroy an arena. Its memory and addresses are the pool's from here on, those of blocks in use
 *  when they are freed. Graphs that were captured in it must not be replayed any more.
 *  @param arena  NULL is allowed */
REBATCH_API void rebatch_arena_destroy(rebatch_arena *arena);

/** Claim an arena for a capture on a stream. Thread-safe.
 *  @param arena   the arena
 *  @param stream  the stream for which it serves allocations from here on
 *  @return as rebatch_arena_claim() */
REBATCH_API_CHECKED rebatch_status rebatch_arena_open(rebatch_arena *arena, rebatch_stream stream);

/** Allocate from an arena. The block is freed with rebatch_pool_free(), like any other of the pool;
 *  its memory then serves the arena again. It is in the pool's statistics and scopes. Thread-safe.
 *
 *  The search for memory creates, maps and unmaps pages, which are no operations of a stream and do
 *  not end a capture, where the thread's capture mode is relaxed. It waits for the device only if
 *  rebatch_pool_options.may_wait allows.
 *  @param[out] out  as for rebatch_pool_alloc()
 *  @param arena     the arena, not lent
 *  @param bytes     size of the block
 *  @param stream    the stream that the arena is open for
 *  @param tag       as for rebatch_pool_alloc()
 *  @return as rebatch_pool_alloc(); REBATCH_E_STATE when the arena is lent, or open for another
 *          stream */
REBATCH_API_CHECKED rebatch_status rebatch_arena_alloc(void **out, rebatch_arena *arena,
                                                       size_t bytes, rebatch_stream stream,
                                                       rebatch_tag tag);

/** Lend what is free in an arena, after the work that uses it has been enqueued. The pool takes
 *  such pages when the device's work up to here is done and other memory does not suffice, and
 *  gives them back to the device in a trim and for a lower limit. Thread-safe.
 *  @param arena  the arena; nothing happens if it is lent
 *  @return REBATCH_OK, REBATCH_E_INVALID; REBATCH_E_STATE for a shared one (sharing.h) */
REBATCH_API rebatch_status rebatch_arena_lend(rebatch_arena *arena);

/** Claim an arena: all its addresses have memory from here on, until it is lent. What was free has
 *  undefined contents. Waits for the device if the memory for it is still used. Thread-safe.
 *  @param arena  the arena; nothing happens if it is not lent
 *  @return REBATCH_OK; REBATCH_OOM when there is not the memory: the arena is still lent, and
 *          neither statistics nor rebatch_pool_last_oom() count it as a request that failed;
 *          REBATCH_E_DEVICE when the device failed while it was mapped; if an address cannot be
 *          mapped again, then so does each later call; REBATCH_E_STATE from within a pressure
 *          callback; REBATCH_E_INVALID, REBATCH_E_HOST_OOM, REBATCH_E_DEVICE_LOST */
REBATCH_API_CHECKED rebatch_status rebatch_arena_claim(rebatch_arena *arena);

/** Whether an address is one of an arena's. Thread-safe.
 *  @param arena    the arena
 *  @param address  any address
 *  @return false also when `arena` is NULL */
REBATCH_API bool rebatch_arena_has(const rebatch_arena *arena, const void *address);

/** What an arena holds. Thread-safe.
 *  @param[out] out  zeros on failure
 *  @param arena     the arena
 *  @return REBATCH_OK, REBATCH_E_INVALID */
REBATCH_API rebatch_status rebatch_arena_get_stats(rebatch_arena_stats *out, rebatch_arena *arena);

#ifdef __cplusplus
}
#endif
#endif
