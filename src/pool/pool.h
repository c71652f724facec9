/* The pool's structs, the seams between its files, and what the layers above use beyond pool.h.
 * Must not know batches or training. */
#ifndef RBI_POOL_H
#define RBI_POOL_H

#include <pthread.h>

#include "base/base.h"
#include "device/device.h"
#include "rebatch/pool.h"

#define RBI_POOL_SCOPES 64
#define RBI_POOL_TAGS 256 /* "untagged" included */
#define RBI_POOL_PRESSURES 16
#define RBI_POOL_CLASSES 64 /* one an octave of units */
/* Rolled-back addresses that are remembered beyond those of the last rollback. */
#define RBI_POOL_LATE_MOST 65536

#define RBI_POOL_ONE_(name, text) +1
enum { RBI_POOL_RUNG_COUNT = 0 REBATCH_POOL_RUNGS(RBI_POOL_ONE_) };

struct rbi_segment;
struct rbi_pool_stream;

/* ---- what the structs are made of (nodes.c) ---- */

/* Nodes of one size, got from the heap in chunks and never given back before the end, so that calls
 * with a warm pool make no heap call. spare == nodes in the list `free`. */
struct rbi_nodes {
    void *free;   /* a list through each node's first word */
    void *chunks; /* a list through each chunk's first word */
    size_t spare;
    size_t node_bytes;
};
/* Makes sure of `count` spare nodes; false when the heap has none. */
bool rbi_nodes_prepare(struct rbi_nodes *nodes, size_t count);
/* A zeroed node; one must be spare. */
void *rbi_nodes_take(struct rbi_nodes *nodes);
void rbi_nodes_put(struct rbi_nodes *nodes, void *node);
void rbi_nodes_destroy(struct rbi_nodes *nodes);

/* ---- blocks ---- */

enum rbi_block_state {
    RBI_BLOCK_FREE,     /* in a bin of its stream */
    RBI_BLOCK_LIVE,     /* in use */
    RBI_BLOCK_DEFERRED, /* freed in a scope younger than it; counted as live till the commit */
    RBI_BLOCK_PENDING   /* freed, but another stream's work may still use it */
};

/* Another stream that uses a block, from rebatch_pool_use_on(). */
struct rbi_block_use {
    struct rbi_block_use *next;
    struct rbi_pool_stream *stream;
    uint64_t until; /* of a pending block: done when stream->done >= until */
};

/* A piece of a segment.
 *   bytes % REBATCH_POOL_UNIT_BYTES == 0 && bytes > 0
 *   after == NULL || after->address == address + bytes && after->before == this
 *   free && after free: after->stream != stream (else they would be one)
 *   live or deferred: table[address] == this, and previous->birth < birth < next->birth */
struct rbi_block {
    char *address;
    size_t bytes;
    size_t requested_bytes;
    struct rbi_segment *segment;
    struct rbi_pool_stream *stream;    /* the one it was allocated for, or was last free on */
    struct rbi_block *before, *after;  /* neighbours in the segment */
    struct rbi_block *previous, *next; /* free: its bin; live and deferred: all by birth;
                                           pending: the pending list (next only) */
    struct rbi_block *next_deferred;   /* deferred: the scope's list */
    struct rbi_block_use *uses;
    uint64_t birth;    /* number of the allocation; scopes compare it with their own beginning */
    uint64_t freed_at; /* free, pending: stream->frees then; 0: no work has touched it */
    rebatch_tag tag;
    uint8_t state; /* enum rbi_block_state */
};

/* One allocation of the device.
 *   sum of block->bytes == bytes
 *   used_bytes == sum of block->bytes over blocks that are not free */
struct rbi_segment {
    struct rbi_segment *previous, *next; /* in order of creation */
    char *address;
    size_t bytes;
    size_t used_bytes;
    struct rbi_block *first;
    uint64_t
        number; /* of its creation: ties between segments break by it, as the device's addresses
                        need not be the same in every run */
};

/* What one stream has in the pool. `frees` numbers the points in its work at which blocks were
 * freed; whatever was enqueued before point `done` has completed.
 *   done <= frees; in_flight: done < recorded <= frees
 *   free_bytes == sum of bytes over its free blocks; filled bit c == (bins[c] != NULL)
 *   references == blocks whose stream it is + uses that name it */
struct rbi_pool_stream {
    struct rbi_pool_stream *next; /* in order of first use */
    rebatch_stream stream;
    struct rbi_block *bins[RBI_POOL_CLASSES];
    uint64_t filled;
    uint64_t free_bytes;
    uint64_t references;
    uint64_t frees, done, recorded;
    rbi_event event; /* NULL: none yet, or none to be had */
    bool in_flight;  /* `event` stands at point `recorded` */
};

/* ---- pointer -> block (table.c) ---- */

struct rbi_table_entry {
    const char *address;     /* NULL: empty */
    struct rbi_block *block; /* NULL: a rollback took it back */
    uint64_t rollback;       /* which one */
};

/* Open addressing, linear probing; at most half full.
 *   used == entries that are not empty; late == entries without a block */
struct rbi_table {
    struct rbi_table_entry *entries;
    size_t capacity; /* a power of two, or 0 */
    size_t used, late;
    uint64_t rollback; /* number of the last one */
};
/* Makes sure that `count` more addresses can be put in; may forget old rollbacks. */
bool rbi_table_prepare(struct rbi_table *table, size_t count);
void rbi_table_put(struct rbi_table *table, struct rbi_block *block);
/* NULL when there is no such entry; the entry is valid until the next change. */
struct rbi_table_entry *rbi_table_find(const struct rbi_table *table, const void *address);
void rbi_table_remove(struct rbi_table *table, struct rbi_table_entry *entry);
/* Keeps the address as one that a rollback took back. */
void rbi_table_mark_late(struct rbi_table *table, struct rbi_table_entry *entry);

/* ---- scopes and tags ---- */

/* Blocks with birth >= first_birth are inside. Sums and the peak are those of the time in which
 * this scope was the innermost; they are added to the parent's when it ends. */
struct rbi_scope {
    rebatch_scope handle;
    uint64_t first_birth;
    uint64_t live_at_begin;
    uint64_t live_most; /* highest live_bytes of the whole pool */
    uint64_t requested_bytes, allocations, largest_bytes;
    struct rbi_block *deferred; /* freed inside, older than it: all birth < first_birth */
};

/* at_peak_bytes is up to date when peak_number == pool->peak_number; otherwise the tag has not
 * changed since the pool's last peak, and it is live_bytes. So a new peak costs nothing a tag. */
struct rbi_tag {
    char name[32];
    uint64_t live_bytes, peak_bytes, at_peak_bytes;
    uint64_t peak_number;
};

struct rbi_pressure {
    size_t (*give_up)(size_t wanted_bytes, void *user);
    void *user;
};

enum rbi_pool_call { RBI_POOL_ALLOC, RBI_POOL_FREE, RBI_POOL_RESERVE };

/* Told of every call that succeeded, with the sizes as they were asked for. It runs with the lock
 * held, so it must not call the pool. */
struct rbi_pool_recorder {
    void (*on_call)(void *user, enum rbi_pool_call call, const void *address, size_t bytes,
                    rebatch_stream stream); /* NULL: nobody listens */
    void *user;
};

/* Between calls:
 *   stats.live_bytes == sum of bytes over live and deferred blocks == sum of tags[].live_bytes
 *   stats.reserved_bytes == sum of segment->bytes
 *   stats.live_bytes == allocated_total_bytes - freed_total_bytes
 *   stats.blocks == allocations - frees - rolled_back_blocks == entries of the table with a block
 *   scopes[i].first_birth <= scopes[i + 1].first_birth <= births
 * Everything is under `lock`; a pressure callback runs without it. */
struct rebatch_pool {
    rebatch_device *device;
    size_t granule_bytes;
    size_t limit_bytes; /* SIZE_MAX: none */
    uint32_t limit_permille;
    size_t headroom_bytes;
    bool caching;
    pthread_mutex_t lock;

    struct rbi_nodes block_nodes, segment_nodes, use_nodes;
    size_t
        pressing; /* requests that are within a pressure callback, each with its nodes kept spare */
    struct rbi_segment *first_segment, *last_segment;
    uint64_t segments_made;
    struct rbi_pool_stream *first_stream;
    struct rbi_block *pending;
    struct rbi_table table;
    struct rbi_block *oldest, *newest; /* live and deferred blocks by birth */
    uint64_t births;

    struct rbi_scope scopes[RBI_POOL_SCOPES];
    size_t depth;
    uint32_t scope_serial;

    struct rbi_tag tags[RBI_POOL_TAGS];
    size_t tag_count;
    uint64_t peak_number;

    struct rbi_pressure pressures[RBI_POOL_PRESSURES];
    size_t pressure_count;

    rebatch_pool_stats stats;
    uint64_t device_taken_bytes, device_given_bytes; /* since create */
    uint64_t rungs[RBI_POOL_RUNG_COUNT];             /* how often each was tried */
    uint64_t mark_peak_bytes;
    rebatch_oom_report oom;
    struct rbi_pool_recorder recorder;
};

/* Tells the recorder, if there is one. */
static inline void rbi_pool_tell(const rebatch_pool *pool, enum rbi_pool_call call,
                                 const void *address, size_t bytes, rebatch_stream stream)
{
    if (pool->recorder.on_call)
        pool->recorder.on_call(pool->recorder.user, call, address, bytes, stream);
}

/* REBATCH_E_INVALID with its text when `pool` is NULL. */
rebatch_status rbi_pool_check(const rebatch_pool *pool);

/* ---- segments, blocks, bins (heap.c); all with the lock held ---- */

/* A free block of at least `bytes` whose work is done up to point `ready`, the smallest, of
 * these the one of the oldest segment, then of the lowest address; NULL when there is none. */
struct rbi_block *rbi_pool_find_fit(const struct rbi_pool_stream *stream, size_t bytes,
                                    uint64_t ready);
/* Takes a free block, cut to `bytes`, out of its bin for `stream`; needs one spare node. */
void rbi_pool_take_block(rebatch_pool *pool, struct rbi_block *block, size_t bytes,
                         struct rbi_pool_stream *stream);
/* Puts a block that is in no list among the free ones of its stream; it merges with its neighbours.
 * Gives the block that it then is part of. */
struct rbi_block *rbi_pool_put_block(rebatch_pool *pool, struct rbi_block *block);
/* A new segment, `bytes` long, as one free block of `stream`; needs one spare node of each kind. */
rebatch_status rbi_pool_grow(struct rbi_block **out, rebatch_pool *pool, size_t bytes,
                             struct rbi_pool_stream *stream);
/* Gives a segment without blocks in use back once the work on it is done. Where it cannot, it
 * stays. */
rebatch_status rbi_pool_release_segment(rebatch_pool *pool, struct rbi_segment *segment);
/* Gives free segments back until at most `keep_bytes` are cached. Those that lie wholly with
 * `spared` (may be NULL) stay. */
rebatch_status rbi_pool_trim_segments(rebatch_pool *pool, size_t keep_bytes,
                                      const struct rbi_pool_stream *spared, size_t *released_bytes);
/* The segment and the block that `address` lies in; NULL when none. For messages: it walks. */
struct rbi_block *rbi_pool_block_around(const rebatch_pool *pool, const void *address);
uint64_t rbi_pool_largest_hole(const rebatch_pool *pool);
void rbi_pool_destroy_segments(rebatch_pool *pool);

/* ---- streams (streams.c); all with the lock held ---- */

/* NULL when the pool has not seen the stream, or, of open, when the heap has no memory. */
struct rbi_pool_stream *rbi_pool_find_stream(const rebatch_pool *pool, rebatch_stream stream);
struct rbi_pool_stream *rbi_pool_open_stream(rebatch_pool *pool, rebatch_stream stream);
/* Notes that what the stream has enqueued so far may use a block that is being freed: the number of
 * that point. */
uint64_t rbi_pool_note_free(rebatch_pool *pool, struct rbi_pool_stream *stream);
/* Makes a block that is in no list free: at once, or once the other streams that use it have
 * done what they have enqueued. */
void rbi_pool_retire_block(rebatch_pool *pool, struct rbi_block *block);
/* Waits until `stream` has done what it had enqueued before point `until`. */
rebatch_status rbi_pool_await(rebatch_pool *pool, struct rbi_pool_stream *stream, uint64_t until);
/* Looks how far the streams have come, without waiting, and frees the pending blocks that are
 * ready. */
rebatch_status rbi_pool_poll_streams(rebatch_pool *pool);
/* The same after waiting for all of them. */
rebatch_status rbi_pool_await_streams(rebatch_pool *pool);
/* Has waiting a point? */
bool rbi_pool_has_waiting(const rebatch_pool *pool, const struct rbi_pool_stream *except);
void rbi_pool_destroy_streams(rebatch_pool *pool);

/* ---- the ladder (ladder.c); with the lock held, but not during pressure callbacks ---- */

struct rbi_request {
    size_t bytes; /* rounded */
    struct rbi_pool_stream *stream;
    rebatch_pool_rung rung; /* out: the last one tried */
};
/* What the heap must give before a search, so that the search itself needs nothing of it. */
rebatch_status rbi_pool_prepare(rebatch_pool *pool);
/* Finds a block of exactly request->bytes; it is in no list yet. */
rebatch_status rbi_pool_search(struct rbi_block **out, rebatch_pool *pool,
                               struct rbi_request *request);
/* What the device could give now, in whole granules, within limit and headroom; `info` may be
 * NULL. */
rebatch_status rbi_pool_room(size_t *room, rebatch_pool *pool, rebatch_memory_info *info);
size_t rbi_pool_limit(const rebatch_pool *pool, size_t device_total_bytes);
/* True in a thread that is within a pressure callback of `pool`. */
bool rbi_pool_is_pressing(const rebatch_pool *pool);

/* ---- block life (pool.c) ---- */

/* Takes a live or deferred block out of use. */
void rbi_pool_drop_block(rebatch_pool *pool, struct rbi_block *block, bool rolled_back);

/* ---- counting (tags.c), scopes (scope.c), reports (report.c); with the lock held ---- */

void rbi_pool_count_alloc(rebatch_pool *pool, const struct rbi_block *block);
void rbi_pool_count_free(rebatch_pool *pool, const struct rbi_block *block, bool rolled_back);
/* Was the innermost scope opened after the block was allocated? Then its free waits for the
 * commit. */
bool rbi_pool_has_younger_scope(const rebatch_pool *pool, const struct rbi_block *block);
void rbi_pool_defer_free(rebatch_pool *pool, struct rbi_block *block);
void rbi_tags_init(rebatch_pool *pool);
/* Fills in the last OOM report, counts, and sets the thread's error text. Gives REBATCH_OOM. */
rebatch_status rbi_pool_report_oom(rebatch_pool *pool, const struct rbi_request *request,
                                   size_t asked_bytes, const char *tag);
void rbi_tag_get_usage(const rebatch_pool *pool, size_t tag, rebatch_tag_usage *out);

/* ---- for the layers above ---- */

/* Makes sure that the stream's free blocks come to `bytes` in total, not in one piece: takes
 * only what is short from the device, after giving other streams' cache back if need be. An
 * answer of REBATCH_OOM leaves rebatch_pool_last_oom() and the statistics of OOMs alone. No
 * device call when the cache suffices. With caching off it only looks whether the device has the
 * room. */
rebatch_status rbi_pool_admit(rebatch_pool *pool, size_t bytes, rebatch_stream stream);
/* Gives cached memory back when somebody else has taken what should be free: less than the
 * headroom is left, or a cap was lowered below what is held. */
rebatch_status rbi_pool_keep_headroom(rebatch_pool *pool);
bool rbi_pool_is_caching(const rebatch_pool *pool);
/* The most bytes live since the mark; the public peaks are left alone. */
void rbi_pool_mark(rebatch_pool *pool);
uint64_t rbi_pool_peak_since_mark(rebatch_pool *pool);
/* stats.ooms without the lock: may be read while other threads allocate. */
uint64_t rbi_pool_oom_count(const rebatch_pool *pool);
/* Sets who is told of the calls; NULL: nobody. */
void rbi_pool_set_recorder(rebatch_pool *pool, const struct rbi_pool_recorder *recorder);
/* Shows every block in use, oldest first. It runs with the lock held, as the recorder does. */
void rbi_pool_each_live(rebatch_pool *pool,
                        void (*show)(void *user, const void *address, size_t bytes), void *user);
/* Walks everything and checks the equations above; false, with the error text set, when one does
 * not hold. For tests. */
bool rbi_pool_is_valid(rebatch_pool *pool);

#endif
