/* The data path: what every allocation and free passes through, inline. All with the lock held.
 * Must not know how memory is found. Included by pool.h, which has the structs. */
#ifndef RBI_POOL_PATH_H
#define RBI_POOL_PATH_H

#ifndef RBI_POOL_H
#error "include pool/pool.h"
#endif

#define RBI_LIKELY(condition) __builtin_expect(!!(condition), 1)
#define RBI_UNLIKELY(condition) __builtin_expect(!!(condition), 0)

/* ---- bins ---- */

/* The first 32 classes are every size below 32 units; then each octave has 32 steps. Without a
 * branch, as sizes come in any order. */
static inline unsigned rbi_bin_of(size_t bytes)
{
    const size_t units = bytes / REBATCH_POOL_UNIT_BYTES;
    const unsigned log = 63u - (unsigned)__builtin_clzll(units | RBI_POOL_CLASSES);
    const unsigned shift = log - RBI_POOL_CLASS_BITS;
    return (shift << RBI_POOL_CLASS_BITS) + (unsigned)(units >> shift);
}

/* The first bin from `bin` on that has blocks; RBI_POOL_BINS: there is none. */
static inline unsigned rbi_bin_next(const struct rbi_bins *bins, unsigned bin)
{
    const unsigned word = bin / 64;
    const uint64_t here = bins->words[word] & (UINT64_MAX << bin % 64);
    if (here)
        return word * 64 + (unsigned)__builtin_ctzll(here);
    const uint64_t above = bins->filled & (UINT64_MAX << word) & ~(UINT64_C(1) << word);
    if (!above)
        return RBI_POOL_BINS;
    const unsigned next = (unsigned)__builtin_ctzll(above);
    return next * 64 + (unsigned)__builtin_ctzll(bins->words[next]);
}

/* Adding and removing do without branches, as what else a bin has is hardly to be foretold: where
 * there is no next block, what would be written to it goes nowhere. */
static inline void rbi_bin_point_back(struct rbi_bins *bins, struct rbi_block *next,
                                      struct rbi_block **link)
{
    struct rbi_block ***const at = next ? &next->link : &bins->nowhere;
    *at = link;
}

static inline void rbi_bin_add_to(struct rbi_block *block, unsigned bin)
{
    struct rbi_bins *const bins = block->bins;
    struct rbi_block **const head = &bins->of[bin];
    struct rbi_block *const next = *head;
    block->bin = (uint16_t)bin;
    block->link = head;
    block->next = next;
    rbi_bin_point_back(bins, next, &block->next);
    *head = block;
    bins->words[bin / 64] |= UINT64_C(1) << bin % 64;
    bins->filled |= UINT64_C(1) << bin / 64;
}

static inline void rbi_bin_add(struct rbi_block *block)
{
    rbi_bin_add_to(block, rbi_bin_of(block->bytes));
}

static inline void rbi_bin_remove(struct rbi_block *block)
{
    rbi_assert(*block->link == block);
    struct rbi_bins *const bins = block->bins;
    const unsigned bin = block->bin;
    struct rbi_block *const next = block->next;
    struct rbi_block **const link = block->link;
    *link = next;
    rbi_bin_point_back(bins, next, link);
    const uint64_t bin_empty = (link == &bins->of[bin]) & (next == NULL); /* nothing is read */
    const uint64_t word = bins->words[bin / 64] & ~(bin_empty << bin % 64);
    const uint64_t word_empty = word == 0;
    bins->words[bin / 64] = word;
    bins->filled &= ~(word_empty << bin / 64);
}

/* Its size has changed: often not so much that its class has. */
static inline void rbi_bin_update(struct rbi_block *block)
{
    const unsigned bin = rbi_bin_of(block->bytes);
    if (bin == block->bin)
        return;
    rbi_bin_remove(block);
    rbi_bin_add_to(block, bin);
}

static inline void rbi_pool_bin_add(struct rbi_block *block)
{
    rbi_bin_add(block);
    block->stream->free_bytes += block->bytes;
}

static inline void rbi_pool_bin_remove(struct rbi_block *block)
{
    rbi_assert(block->stream->free_bytes >= block->bytes);
    block->stream->free_bytes -= block->bytes;
    rbi_bin_remove(block);
}

/* ---- cutting and merging ---- */

/* Puts `part` in a block's place in front of it, or behind it. */
static inline void rbi_block_insert(struct rbi_block *part, struct rbi_block *block, bool behind)
{
    struct rbi_block *before = behind ? block : block->before;
    struct rbi_block *after = behind ? block->after : block;
    part->before = before;
    part->after = after;
    if (after)
        after->before = part;
    if (before)
        before->after = part;
    else
        block->range->first = part;
}

/* Cuts `bytes` off the end of a block, or off its beginning: a new block, in no list and of the
 * same state. The old one is what is left; where it is in a bin, that is not updated. Needs one
 * spare node. */
static inline struct rbi_block *rbi_block_cut(rebatch_pool *pool, struct rbi_block *block,
                                              size_t bytes, bool off_end)
{
    rbi_assert(bytes > 0 && bytes < block->bytes);
    struct rbi_block *part = rbi_nodes_take_as_is(&pool->block_nodes);
    part->bytes = bytes;
    part->bins = block->bins;
    part->stream = block->stream;
    part->range = block->range;
    part->sequence = block->sequence;
    part->freed_at = block->freed_at;
    part->uses = NULL;
    part->state = block->state;
    part->late = part->used = false;
    block->bytes -= bytes;
    part->address = block->address + (off_end ? block->bytes : 0);
    block->address += off_end ? 0 : bytes;
    rbi_block_insert(part, block, off_end);
    return part;
}

static inline void rbi_block_discard(rebatch_pool *pool, struct rbi_block *block)
{
    rbi_nodes_put(&pool->block_nodes, block);
}

static inline void rbi_block_note_use(struct rbi_block *block, const struct rbi_block *other)
{
    block->freed_at = block->freed_at < other->freed_at ? other->freed_at : block->freed_at;
    block->sequence = block->sequence < other->sequence ? other->sequence : block->sequence;
}

/* Makes a block and the one after it one; in no list, or in a bin that is then updated. */
static inline void rbi_block_take_in_after(rebatch_pool *pool, struct rbi_block *left)
{
    struct rbi_block *right = left->after;
    rbi_assert(right->range == left->range && right->address == left->address + left->bytes);
    left->bytes += right->bytes;
    rbi_block_note_use(left, right);
    left->after = right->after;
    if (left->after)
        left->after->before = left;
    rbi_block_discard(pool, right);
}

/* The same the other way round: the one after it stays in its bin. */
static inline void rbi_block_give_in_to_after(rebatch_pool *pool, struct rbi_block *left)
{
    struct rbi_block *right = left->after;
    rbi_assert(right->range == left->range && right->address == left->address + left->bytes);
    right->address = left->address;
    right->bytes += left->bytes;
    rbi_block_note_use(right, left);
    right->before = left->before;
    if (right->before)
        right->before->after = right;
    else
        right->range->first = right;
    rbi_block_discard(pool, left);
}

static inline bool rbi_block_is_free_of(const struct rbi_block *block, uint8_t state,
                                        const struct rbi_bins *bins)
{
    return block && block->state == state && block->bins == bins;
}

/* Puts a block in no list into its bin, merged with its neighbours: gives the one that it is then
 * part of. */
static inline struct rbi_block *rbi_block_coalesce(rebatch_pool *pool, struct rbi_block *block,
                                                   uint8_t state)
{
    rbi_assert(state == RBI_BLOCK_FREE || state == RBI_BLOCK_HOLE);
    rbi_assert((state == RBI_BLOCK_HOLE) == (block->stream == pool->space));
    struct rbi_bins *const bins = block->bins;
    struct rbi_block *const before = block->before;
    struct rbi_block *const after = block->after;
    block->stream->free_bytes += block->bytes;
    const bool joins_after = rbi_block_is_free_of(after, state, bins);
    if (rbi_block_is_free_of(before, state, bins)) {
        if (joins_after) {
            rbi_bin_remove(after);
            rbi_block_take_in_after(pool, block);
        }
        rbi_block_take_in_after(pool, before);
        rbi_bin_update(before);
        return before;
    }
    if (joins_after) {
        rbi_block_give_in_to_after(pool, block);
        rbi_bin_update(after);
        return after;
    }
    block->state = state;
    rbi_bin_add(block);
    return block;
}

static inline bool rbi_block_is_hole(const struct rbi_block *block)
{
    return block && block->state == RBI_BLOCK_HOLE;
}

/* A block between holes has no neighbour to lie beside: what is cut off of it would take up parts
 * of pages on both sides, so it is better unmapped and its pages used elsewhere. */
static inline bool rbi_block_is_isolated(const struct rbi_block *block)
{
    return rbi_block_is_hole(block->before) && rbi_block_is_hole(block->after);
}

/* Of a block that is larger than asked for the end is taken where that leaves more pages whole:
 * what is left of a page can only be used where it is. */
static inline bool rbi_block_leaves_more_from_end(const rebatch_pool *pool,
                                                  const struct rbi_block *block, size_t bytes)
{
    const size_t mask = pool->page_bytes - 1;
    const size_t first = (size_t)(block->address - block->range->address);
    const size_t last = first + block->bytes;
    const size_t from_start = (last & ~mask) - ((first + bytes + mask) & ~mask);
    const size_t from_end = ((last - bytes) & ~mask) - ((first + mask) & ~mask);
    return (ptrdiff_t)from_end > (ptrdiff_t)from_start;
}

/* Beside a hole it is cut at the other end. */
static inline bool rbi_block_gives_end(const rebatch_pool *pool, const struct rbi_block *block,
                                       size_t bytes)
{
    const bool hole_before = rbi_block_is_hole(block->before);
    if (hole_before != rbi_block_is_hole(block->after))
        return hole_before;
    return block->bytes - bytes >= pool->page_bytes &&
           rbi_block_leaves_more_from_end(pool, block, bytes);
}

/* Takes `bytes` of a block out of its bin; of its stream still. Needs one spare node. */
static inline struct rbi_block *rbi_block_take(rebatch_pool *pool, struct rbi_block *block,
                                               size_t bytes)
{
    rbi_assert(block->state == RBI_BLOCK_FREE || block->state == RBI_BLOCK_HOLE);
    rbi_assert(bytes > 0 && bytes <= block->bytes && block->stream->free_bytes >= bytes);
    const size_t rest = block->bytes - bytes;
    block->stream->free_bytes -= bytes;
    if (rest == 0) {
        rbi_bin_remove(block);
    } else {
        const bool off_end = rbi_block_gives_end(pool, block, bytes);
        struct rbi_block *part = rbi_block_cut(pool, block, bytes, off_end);
        rbi_bin_update(block);
        block = part;
    }
    block->state = RBI_BLOCK_HELD;
    return block;
}

/* ---- the search ---- */

/* How many blocks of a class are looked at: more find little better (bounded best fit). */
#define RBI_POOL_LOOKS 8

/* Of two blocks of one size: the one of the older range, then of the lower address. */
static inline bool rbi_block_precedes(const struct rbi_block *a, const struct rbi_block *b)
{
    return a->range == b->range ? a->address < b->address : a->range->number < b->range->number;
}

/* The best of the first blocks of a bin that is not empty, and of those behind them the first that
 * fits; of a class above the request's all do. */
static inline struct rbi_block *rbi_bin_best(struct rbi_block *block, size_t bytes)
{
    struct rbi_block *best = NULL;
    size_t least = SIZE_MAX;
    unsigned looks = RBI_POOL_LOOKS;
    do {
        if (block->bytes >= bytes && block->bytes <= least &&
            (block->bytes < least || rbi_block_precedes(block, best))) {
            best = block;
            least = block->bytes;
        }
        block = block->next;
    } while (block && (--looks != 0 || !best));
    return best;
}

/* rbi_pool_find_fit() where all blocks may be had. */
static inline struct rbi_block *rbi_bins_best(const struct rbi_bins *bins, size_t bytes)
{
    unsigned bin = rbi_bin_of(bytes);
    struct rbi_block *block = bins->of[bin];
    if (block && (block = rbi_bin_best(block, bytes)) != NULL)
        return block;
    bin = rbi_bin_next(bins, bin + 1);
    return bin < RBI_POOL_BINS ? rbi_bin_best(bins->of[bin], 0) : NULL;
}

/* ---- quick lists ---- */

static inline size_t rbi_round_to_unit(size_t bytes)
{
    return (bytes + REBATCH_POOL_UNIT_BYTES - 1) & ~(size_t)(REBATCH_POOL_UNIT_BYTES - 1);
}

/* Small sizes, of which there are many, have a list each; the others share as many. */
static inline bool rbi_quick_is_small(size_t bytes)
{
    return bytes <= RBI_POOL_QUICK * REBATCH_POOL_UNIT_BYTES;
}
static inline unsigned rbi_quick_slot(size_t bytes)
{
    const size_t units = bytes / REBATCH_POOL_UNIT_BYTES;
    if (rbi_quick_is_small(bytes))
        return (unsigned)units - 1;
    return RBI_POOL_QUICK + (unsigned)((units * UINT64_C(0x9e3779b97f4a7c15)) >> 58);
}

static inline struct rbi_block *rbi_quick_pop_from(struct rbi_pool_stream *stream, unsigned slot,
                                                   size_t bytes)
{
    struct rbi_quick *quick = &stream->quick[slot];
    struct rbi_block *block = quick->newest;
    if (!block || quick->bytes != bytes)
        return NULL;
    quick->newest = block->next;
    const uint64_t empty = quick->newest == NULL;
    stream->quick_filled[slot / 64] &= ~(empty << slot % 64);
    stream->free_bytes -= bytes;
    if (slot < RBI_POOL_QUICK)
        stream->small_bytes -= bytes;
    else
        stream->misses = 0;
    return block;
}

/* A block of exactly `bytes` that was freed before; NULL: none. Whether it is small comes first:
 * that is known before anything is read, so a wrong guess of the processor's is found early. */
static inline struct rbi_block *rbi_quick_pop(struct rbi_pool_stream *stream, size_t bytes)
{
    if (rbi_quick_is_small(bytes))
        return rbi_quick_pop_from(stream, rbi_quick_slot(bytes), bytes);
    return stream->quick_filled[1] ? rbi_quick_pop_from(stream, rbi_quick_slot(bytes), bytes)
                                   : NULL;
}

static inline void rbi_quick_push(struct rbi_block *block)
{
    struct rbi_pool_stream *stream = block->stream;
    const unsigned slot = rbi_quick_slot(block->bytes);
    struct rbi_quick *quick = &stream->quick[slot];
    block->state = RBI_BLOCK_QUICK;
    stream->free_bytes += block->bytes;
    if (slot < RBI_POOL_QUICK) {
        stream->small_bytes += block->bytes;
    } else if (quick->newest && quick->bytes != block->bytes) {
        block->next = stream->loose;
        stream->loose = block;
        return;
    }
    block->next = quick->newest;
    quick->newest = block;
    quick->bytes = block->bytes;
    stream->quick_filled[slot / 64] |= UINT64_C(1) << slot % 64;
}

/* Is it in the table? */
static inline bool rbi_block_is_listed(const struct rbi_block *block)
{
    return block->state >= RBI_BLOCK_QUICK && block->state <= RBI_BLOCK_PENDING;
}

/* A block can be found by its address from here on. */
static inline void rbi_pool_list_block(rebatch_pool *pool, struct rbi_block *block)
{
    if (RBI_UNLIKELY(pool->late.count != 0))
        rbi_late_remove(&pool->late, block->address);
    rbi_table_put(&pool->table, block);
}

/* Merges a block in no list that is still in the table with its neighbours. */
static inline void rbi_pool_coalesce_block(rebatch_pool *pool, struct rbi_block *block)
{
    rbi_table_remove(&pool->table, block);
    if (RBI_UNLIKELY(block->late)) {
        rbi_late_add(&pool->late, block->address);
        block->late = false;
    }
    (void)rbi_block_coalesce(pool, block, RBI_BLOCK_FREE);
}

/* Merges the stream's quick blocks of large sizes with their neighbours; or all. */
void rbi_quick_flush_large(rebatch_pool *pool, struct rbi_pool_stream *stream);
void rbi_quick_flush(rebatch_pool *pool, struct rbi_pool_stream *stream);
void rbi_quick_flush_all(rebatch_pool *pool);

/* A block is not to be cut for a request before other places were looked at. */
static inline bool rbi_pool_wants_care(const rebatch_pool *pool, const struct rbi_block *block,
                                       size_t bytes)
{
    return bytes >= pool->care_bytes && block->bytes != bytes;
}

/* What rbi_pool_take_own() mostly does: NULL where that is not all. */
static inline struct rbi_block *rbi_pool_take_own_fast(rebatch_pool *pool,
                                                       struct rbi_pool_stream *stream, size_t bytes)
{
    if (stream->quick_filled[1] || stream->loose)
        rbi_quick_flush_large(pool, stream);
    if (pool->max_split_bytes != SIZE_MAX || pool->promised_bytes != 0)
        return NULL; /* what was promised may come from any zone */
    const unsigned zone =
        (unsigned)(bytes >= pool->medium_bytes) + (unsigned)(bytes >= pool->large_bytes);
    struct rbi_block *block = rbi_bins_best(&stream->bins[zone], bytes);
    if (RBI_UNLIKELY(!block || rbi_block_is_isolated(block) ||
                     rbi_pool_wants_care(pool, block, bytes)))
        return NULL;
    return rbi_block_take(pool, block, bytes);
}

/* ---- the last step of a free ---- */

/* Makes a block that is in no list free: at once, or once the other streams that use it have
 * done what they have enqueued (streams.c). */
void rbi_pool_retire_slowly(rebatch_pool *pool, struct rbi_block *block);

/* Whether a block goes into a quick list when it is freed. Late blocks are not merged as they are
 * rolled back, for that takes one line of the cache a block instead of several. */
static inline bool rbi_pool_wants_quick(const struct rbi_block *block)
{
    const struct rbi_pool_stream *stream = block->stream;
    if (rbi_quick_is_small(block->bytes))
        return stream->small_bytes + block->bytes <= RBI_POOL_SMALL_MOST || block->late;
    return stream->misses < RBI_POOL_MISSES || block->late;
}

/* For one that does not. */
static inline void rbi_pool_merge_block(rebatch_pool *pool, struct rbi_block *block)
{
    struct rbi_pool_stream *stream = block->stream;
    if (++stream->merged == RBI_POOL_MERGES)
        stream->misses = stream->merged = 0;
    rbi_pool_coalesce_block(pool, block);
}

/* Its last step where no other stream is in the way. */
static inline void rbi_pool_cache_block(rebatch_pool *pool, struct rbi_block *block)
{
    if (rbi_pool_wants_quick(block))
        rbi_quick_push(block);
    else
        rbi_pool_merge_block(pool, block);
}

/* No other stream has to be waited for, and no mark is due. */
static inline bool rbi_pool_retires_at_once(const struct rbi_block *block)
{
    return !block->used && block->stream->frees + 1 < block->stream->next_mark;
}

static inline void rbi_pool_note_free(const rebatch_pool *pool, struct rbi_block *block)
{
    block->freed_at = ++block->stream->frees;
    block->sequence = pool->sequence;
}

static inline void rbi_pool_retire_block(rebatch_pool *pool, struct rbi_block *block)
{
    if (pool->guard || !rbi_pool_retires_at_once(block)) {
        rbi_pool_retire_slowly(pool, block);
        return;
    }
    rbi_pool_note_free(pool, block);
    rbi_pool_cache_block(pool, block);
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
    pool->requested_total_bytes += block->requested_bytes;
    rbi_raise(&stats->blocks_peak, stats->blocks);
    if (pool->depth && !block->outside)
        rbi_raise(&pool->scopes[pool->depth - 1].largest_bytes, bytes);
    return stats->live_bytes > pool->quiet_bytes;
}

static inline void rbi_pool_count_free(rebatch_pool *pool, const struct rbi_block *block)
{
    rebatch_pool_stats *stats = &pool->stats;
    struct rbi_tag *tag = &pool->tags[block->tag];
    const size_t bytes = block->bytes;
    rbi_tag_update_peak(pool, tag);
    tag->live_bytes -= bytes;
    stats->live_bytes -= bytes;
    stats->freed_total_bytes += bytes;
    stats->blocks--;
    pool->requested_given_bytes += block->requested_bytes;
}

/* ---- in use ---- */

/* A block in no list is in use from here on; true when rbi_pool_raise_peaks() is to be called. */
static inline bool rbi_pool_use_block_of(rebatch_pool *pool, struct rbi_block *block, size_t bytes,
                                         rebatch_tag tag, bool outside)
{
    struct rbi_block *const ring = &pool->by_sequence;
    struct rbi_block *const newest = ring->previous;
    block->state = RBI_BLOCK_LIVE;
    block->late = false;
    block->outside = outside;
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

/* By this thread. */
static inline bool rbi_pool_use_block(rebatch_pool *pool, struct rbi_block *block, size_t bytes,
                                      rebatch_tag tag)
{
    return rbi_pool_use_block_of(pool, block, bytes, tag,
                                 rbi_pool_is_other_thread(pool, pool->owner_thread));
}

static inline void rbi_pool_leave_use(struct rbi_block *block)
{
    block->previous->next = block->next;
    block->next->previous = block->previous;
}

/* From now on that stream uses the block too. Needs a spare node. */
static inline void rbi_block_add_use(rebatch_pool *pool, struct rbi_block *block,
                                     struct rbi_pool_stream *stream)
{
    struct rbi_block_use *use = rbi_nodes_take_as_is(&pool->use_nodes);
    *use = (struct rbi_block_use){.next = block->uses, .stream = stream};
    block->uses = use;
    block->used = true;
    stream->pins++;
}

static inline void rbi_block_end_uses(rebatch_pool *pool, struct rbi_block *block)
{
    while (block->uses) {
        struct rbi_block_use *use = block->uses;
        block->uses = use->next;
        use->stream->pins--;
        rbi_nodes_put(&pool->use_nodes, use);
    }
    block->used = false;
}

/* Is the innermost scope one that the block is not of? Then its free waits for the commit, if the
 * scope takes it in. */
static inline bool rbi_pool_has_younger_scope(const rebatch_pool *pool,
                                              const struct rbi_block *block)
{
    return pool->depth && (block->sequence < pool->scopes[pool->depth - 1].first_sequence ||
                           (block->outside && pool->owner_thread != 0));
}

#endif
