/* What every allocation and free passes through, inline. All with the lock held.
 * Must not know how memory is found. Included by pool.h, which has the structs. */
#ifndef RBI_POOL_FAST_PATH_H
#define RBI_POOL_FAST_PATH_H

#ifndef RBI_POOL_H
#error "include pool/pool.h"
#endif

/* ---- the own free lists ---- */

/* What rbi_pool_take_own() mostly does: NULL where that is not all. */
static inline struct rbi_block *rbi_pool_take_own_fast(rebatch_pool *pool,
                                                       struct rbi_pool_stream *stream, size_t bytes)
{
    if (stream->lists.quick_filled[1])
        rbi_lists_flush_large(&pool->heap, &stream->lists);
    if (pool->promised_bytes != 0)
        return NULL; /* what was promised may come from any zone */
    const unsigned zone = rbi_pool_zone_of_size(pool, bytes);
    struct rbi_block *block = rbi_bins_best(&stream->lists.bins[zone], bytes);
    if (RBI_UNLIKELY(!block || rbi_block_is_isolated(block)))
        return NULL;
    return rbi_block_take(&pool->heap, block, bytes);
}

/* ---- the last step of a free ---- */

/* Makes a block that is in no list free: at once, or, where other streams use it, once the device
 * has done what it has to do now (streams.c). */
void rbi_pool_retire_slowly(rebatch_pool *pool, struct rbi_block *block);

static inline void rbi_pool_retire_block(rebatch_pool *pool, struct rbi_block *block)
{
    if (block->used || pool->progress.frees + 1 >= pool->progress.due) {
        rbi_pool_retire_slowly(pool, block);
        return;
    }
    block->freed_at = ++pool->progress.frees;
    block->sequence = pool->sequence;
    rbi_block_cache(&pool->heap, block);
}

/* ---- counting ---- */

/* To be called before a tag's live bytes change: see struct rbi_tag. */
static inline void rbi_tag_update_peak(const rebatch_pool *pool, struct rbi_tag *tag)
{
    if (RBI_LIKELY(tag->peak_number == pool->peak_number))
        return;
    tag->at_peak_bytes = tag->live_bytes;
    tag->peak_number = pool->peak_number;
}

static inline void rbi_raise(uint64_t *peak, uint64_t value)
{
    if (*peak < value)
        *peak = value;
}

/* Sets quiet_bytes, after a peak or the innermost scope has changed (statistics.c). */
void rbi_pool_set_quiet(rebatch_pool *pool);
/* Raises the peaks that live_bytes is above of. */
void rbi_pool_raise_peaks(rebatch_pool *pool);

/* True when a peak is to be raised. */
static inline bool rbi_pool_count_alloc(rebatch_pool *pool, const struct rbi_block *block)
{
    rebatch_pool_stats *stats = &pool->stats;
    struct rbi_tag *tag = &pool->tags[block->tag];
    const size_t bytes = block->bytes;
    rbi_tag_update_peak(pool, tag);
    tag->live_bytes += bytes;
    rbi_raise(&tag->peak_bytes, tag->live_bytes);
    stats->live_bytes += bytes;
    stats->blocks++;
    stats->requested_bytes += block->requested_bytes;
    rbi_raise(&stats->blocks_peak, stats->blocks);
    return stats->live_bytes > pool->quiet_bytes;
}

static inline void rbi_pool_count_free(rebatch_pool *pool, const struct rbi_block *block)
{
    rebatch_pool_stats *stats = &pool->stats;
    struct rbi_tag *tag = &pool->tags[block->tag];
    const size_t bytes = block->bytes;
    rbi_assert(tag->live_bytes >= bytes && stats->live_bytes >= bytes && stats->blocks > 0);
    rbi_tag_update_peak(pool, tag);
    tag->live_bytes -= bytes;
    stats->live_bytes -= bytes;
    stats->freed_total_bytes += bytes;
    stats->blocks--;
    stats->requested_bytes -= block->requested_bytes;
}

/* ---- in use ---- */

/* A block in no list is in use from here on; true when rbi_pool_raise_peaks() is to be called. */
static inline bool rbi_pool_use_block(rebatch_pool *pool, struct rbi_block *block, size_t bytes,
                                      rebatch_tag tag)
{
    const bool outside = rbi_pool_is_other_thread(pool, pool->owner_thread);
    struct rbi_block *const ring = &pool->by_sequence;
    struct rbi_block *const newest = ring->previous;
    rbi_assert(newest == ring || newest->sequence < pool->sequence);
    block->state = RBI_BLOCK_LIVE;
    block->late = false;
    block->outside = outside;
    block->resident = 0;
    block->requested_bytes = bytes;
    block->tag = tag;
    block->sequence = pool->sequence++;
    block->next = ring;
    block->previous = newest;
    newest->next = ring->previous = block;
    if (RBI_UNLIKELY(pool->promised_bytes != 0) && !outside)
        pool->promised_bytes -= rbi_min(pool->promised_bytes, block->bytes);
    if (RBI_UNLIKELY(outside))
        rbi_scope_pass_over(pool, block, true);
    return rbi_pool_count_alloc(pool, block);
}

static inline void rbi_pool_leave_use(struct rbi_block *block)
{
    rbi_assert(block->previous->next == block && block->next->previous == block);
    block->previous->next = block->next;
    block->next->previous = block->previous;
}

/* Is the innermost scope one that the block is not of? Then its free waits for the commit, if the
 * scope takes it in, and an open scope may be rolled back. */
static inline bool rbi_pool_has_younger_scope(const rebatch_pool *pool,
                                              const struct rbi_block *block)
{
    return pool->undoing && (block->sequence < pool->scopes[pool->depth - 1].first_sequence ||
                             (block->outside && pool->owner_thread != 0));
}

#endif
