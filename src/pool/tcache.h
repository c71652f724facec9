/* What a thread has ahead of itself: small blocks that it allocates and frees without the pool's
 * lock (tcache.c). Must not know how memory is found. Included by pool.h. */
#ifndef RBI_POOL_TCACHE_H
#define RBI_POOL_TCACHE_H

#include "pool/block.h"
#include "pool/lock.h"

#define RBI_TCACHES 16
#define RBI_TCACHE_CLASSES RBI_POOL_QUICK /* one a unit, as the quick lists of small sizes */
#define RBI_TCACHE_BLOCK_MOST ((size_t)RBI_TCACHE_CLASSES * REBATCH_POOL_UNIT_BYTES)
/* Most bytes free in a cache; less where that would be more than so many granules, or more than
 * such a part of the limit. */
#define RBI_TCACHE_FREE_MOST ((size_t)8 << 20)
#define RBI_TCACHE_GRANULES_MOST 16
#define RBI_TCACHE_LIMIT_PARTS 64
/* Most blocks, and bytes, that are lent at once beyond the one that is asked for. */
#define RBI_TCACHE_AHEAD_BLOCKS 16
#define RBI_TCACHE_AHEAD_BYTES ((size_t)64 << 10)

struct rbi_tcache_entry {
    const char *address; /* NULL: empty */
    struct rbi_block *block;
};

/* There are caches where threads wait for the pool's lock; what uses a pool by turns needs none,
 * keeps exact peaks, and has cycles. They are a fixed few, and a thread uses the one that its
 * number falls on: so nothing need be done when a thread ends.
 *
 * The pool lends blocks to a cache: they are of one stream, they stay in the pool's table in the
 * state LENT, and count as live there, in stats.live_bytes and stats.blocks, whether the cache has
 * them free or in use; the peaks can thus be high by what is free in caches, and never low. All
 * else, births, tags, totals, is counted when the caches are folded: then blocks in use become live
 * ones, in the order of their allocation, and free ones go back to their stream. Whoever looks at
 * the pool as a whole folds first (rbi_pool_enter). Scopes do, so a block in a cache was always
 * allocated inside the innermost scope, and none is lent under conditions that have changed.
 *
 * Locks: the pool's first, then a cache's; with a cache's none is waited for. What a cache may read
 * and write of a lent block is next, previous, tag, late, taken and requested_bytes.
 *   lent == blocks in the table == sum of lent_of == those in the ring in_use + those in free
 *   lent_of[i], free[i]: of i + 1 units
 *   free_bytes == sum of bytes over free
 *   lent == 0, or all are of stream; lent == 0: pairs == 0 */
struct rbi_tcache {
    _Alignas(RBI_LINE_BYTES) struct rbi_lock lock;
    uint32_t strangers; /* refills for other streams since a request for its own */
    rebatch_stream stream;
    size_t tag_count; /* of the pool, at the last refill; and so is */
    uint64_t insider; /* who else may not have its blocks */
    size_t free_bytes, free_most;
    struct rbi_tcache_entry *entries; /* open addressing, linear probing, at most half full */
    size_t capacity;                  /* a power of two, or 0 */
    size_t lent;
    /* Of the allocations whose blocks came back, since the last fold. */
    uint64_t pairs, pair_bytes, pair_requested_bytes;
    struct rbi_block *free[RBI_TCACHE_CLASSES]; /* the last freed first */
    uint32_t lent_of[RBI_TCACHE_CLASSES];
    struct rbi_block in_use; /* where the ring of blocks in use begins and ends */
};

/* Without the pool's lock. False: not from this thread's cache, so the pool must be asked; nothing
 * has changed. */
bool rbi_tcache_alloc(void **out, rebatch_pool *pool, size_t bytes, rebatch_stream stream,
                      rebatch_tag tag);
bool rbi_tcache_free(rebatch_pool *pool, const void *pointer);

/* The lent block that begins at an address, NULL when there is none; with the cache's lock held. */
struct rbi_block *rbi_tcache_find(const struct rbi_tcache *cache, const void *address);

/* ---- with the pool's lock held ---- */

/* Lends a listed block that is in no list to this thread's cache, in use there, and some more of
 * its size that are free. False: it cannot; nothing has changed. */
bool rbi_tcache_lend(rebatch_pool *pool, struct rbi_block *block, size_t bytes, rebatch_tag tag);
/* Makes a lent block that is in use a live one like others. False: it is free in its cache. */
bool rbi_tcache_adopt(rebatch_pool *pool, struct rbi_block *block);
/* Takes all blocks back. */
void rbi_tcaches_fold_slowly(rebatch_pool *pool);
void rbi_tcaches_destroy(rebatch_pool *pool);

#endif
