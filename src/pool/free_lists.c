/* Owns the blocks that tile ranges, the bins of free ones, and the quick lists.
 * Must not know scopes, tags, limits or how memory is mapped. */
#include "pool/pool.h"

/* ---- bins ---- */

/* Which blocks a search may have: of at least `bytes` and at most `most`, done up to `ready`. */
struct wanted {
    size_t bytes, most;
    uint64_t ready;
    bool isolated; /* those between two holes too */
};

static inline bool is_wanted(const struct rbi_block *block, const struct wanted *wanted)
{
    return block->bytes >= wanted->bytes && block->bytes <= wanted->most &&
           block->freed_at <= wanted->ready && (wanted->isolated || !rbi_block_is_isolated(block));
}

static inline bool is_better(const struct rbi_block *a, const struct rbi_block *b)
{
    return a->bytes < b->bytes || (a->bytes == b->bytes && rbi_block_precedes(a, b));
}

/* The best of the first RBI_POOL_LOOKS blocks of a bin, and of those behind them the first that
 * fits. */
static struct rbi_block *best_of(struct rbi_block *block, const struct wanted *wanted)
{
    struct rbi_block *best = NULL;
    for (unsigned looks = 0; block && (looks < RBI_POOL_LOOKS || !best);
         block = block->next, looks++)
        if (is_wanted(block, wanted) && (!best || is_better(block, best)))
            best = block;
    return best;
}

/* The best block of a zone. */
static struct rbi_block *find_in(const struct rbi_bins *bins, const struct wanted *wanted)
{
    for (unsigned bin = rbi_bin_of(wanted->bytes); (bin = rbi_bin_next(bins, bin)) < RBI_POOL_BINS;
         bin++) {
        struct rbi_block *best = best_of(bins->of[bin], wanted);
        if (best)
            return best;
    }
    return NULL;
}

struct rbi_block *rbi_pool_find_fit(const struct rbi_pool_stream *stream, size_t bytes,
                                    uint64_t ready, size_t max_split, unsigned zone)
{
    const struct wanted wanted = {bytes, bytes < max_split ? max_split : SIZE_MAX, ready,
                                  zone == RBI_ZONE_ANY || (zone & RBI_ZONE_ISOLATED)};
    if (!stream->has_zones)
        return find_in(&stream->bins[0], &wanted);
    if (zone != RBI_ZONE_ANY)
        return find_in(&stream->bins[zone & ~RBI_ZONE_ISOLATED], &wanted);
    struct rbi_block *best = NULL;
    for (unsigned i = 0; i < RBI_POOL_ZONES; i++) {
        struct rbi_block *block = find_in(&stream->bins[i], &wanted);
        if (block && (!best || is_better(block, best)))
            best = block;
    }
    return best;
}

/* The first block of the first bin from `bin` on. */
static struct rbi_block *first_from(const struct rbi_pool_stream *stream, unsigned bin)
{
    const unsigned next = rbi_bin_next(&stream->bins[0], bin);
    return next < RBI_POOL_BINS ? stream->bins[0].of[next] : NULL;
}

struct rbi_block *rbi_pool_first_free(const struct rbi_pool_stream *stream, size_t bytes)
{
    return first_from(stream, rbi_bin_of(bytes));
}

struct rbi_block *rbi_pool_next_free(const struct rbi_block *block)
{
    return block->next ? block->next : first_from(block->stream, block->bin + 1u);
}

/* The last bin before `end` that has blocks; RBI_POOL_BINS: there is none. */
static unsigned bin_before(const struct rbi_bins *bins, unsigned end)
{
    for (unsigned word = RBI_POOL_BIN_WORDS; word-- > 0;) {
        uint64_t here = bins->words[word];
        if (end < (word + 1) * 64)
            here &= end > word * 64 ? (UINT64_C(1) << end % 64) - 1 : 0;
        if (here)
            return word * 64 + 63u - (unsigned)__builtin_clzll(here);
    }
    return RBI_POOL_BINS;
}

struct rbi_block *rbi_pool_large_hole(const rebatch_pool *pool, unsigned zone)
{
    const struct rbi_bins *const bins = &pool->space->bins[0];
    for (unsigned bin = RBI_POOL_BINS; (bin = bin_before(bins, bin)) < RBI_POOL_BINS;)
        for (struct rbi_block *b = bins->of[bin]; b; b = b->next)
            if (b->range->zone == zone)
                return b;
    return NULL;
}

static uint64_t largest_in(const struct rbi_bins *bins)
{
    uint64_t largest = 0;
    const unsigned bin = bin_before(bins, RBI_POOL_BINS);
    if (bin == RBI_POOL_BINS)
        return 0;
    for (const struct rbi_block *b = bins->of[bin]; b; b = b->next)
        largest = rbi_max(largest, b->bytes);
    return largest;
}

uint64_t rbi_pool_largest_hole(const rebatch_pool *pool)
{
    uint64_t largest = 0;
    for (const struct rbi_pool_stream *s = pool->first_stream; s; s = s->next) {
        for (unsigned i = 0; i < 2 * RBI_POOL_QUICK; i++)
            if (s->quick[i].newest)
                largest = rbi_max(largest, s->quick[i].bytes);
        for (const struct rbi_block *b = s->loose; b; b = b->next)
            largest = rbi_max(largest, b->bytes);
        for (unsigned zone = 0; zone < RBI_POOL_ZONES; zone++)
            largest = rbi_max(largest, largest_in(&s->bins[zone]));
    }
    return largest;
}

/* ---- blocks ---- */

static struct rbi_bins *bins_for(struct rbi_pool_stream *stream, const struct rbi_range *range)
{
    return &stream->bins[stream->has_zones ? range->zone : 0];
}

/* What is known of blocks by their addresses is prepared first, so that it always does for all the
 * blocks that can be. */
bool rbi_pool_prepare_blocks(rebatch_pool *pool, size_t count)
{
    const size_t blocks = rbi_nodes_made_with(&pool->block_nodes, count);
    return rbi_table_prepare(&pool->table, blocks) && rbi_late_prepare(&pool->late, blocks) &&
           rbi_nodes_prepare(&pool->block_nodes, count);
}

struct rbi_block *rbi_pool_make_block(rebatch_pool *pool, struct rbi_range *range, char *address,
                                      size_t bytes, struct rbi_pool_stream *stream)
{
    struct rbi_block *block = rbi_nodes_take_as_is(&pool->block_nodes);
    *block = (struct rbi_block){.range = range,
                                .address = address,
                                .bytes = bytes,
                                .stream = stream,
                                .bins = bins_for(stream, range)};
    return block;
}

void rbi_pool_discard_block(rebatch_pool *pool, struct rbi_block *block)
{
    rbi_block_discard(pool, block);
}

void rbi_pool_give_to(rebatch_pool *pool, struct rbi_block *block, struct rbi_pool_stream *stream)
{
    if (block->stream == stream)
        return;
    pool->layout++;
    block->stream = stream;
    block->bins = bins_for(stream, block->range);
    block->freed_at = 0; /* its old stream is done with it, and no other work has touched it */
}

struct rbi_block *rbi_pool_split(rebatch_pool *pool, struct rbi_block *block, size_t bytes)
{
    return rbi_block_cut(pool, block, block->bytes - bytes, true);
}

void rbi_pool_join(rebatch_pool *pool, struct rbi_block *left)
{
    rbi_block_take_in_after(pool, left);
}

struct rbi_block *rbi_pool_take_block(rebatch_pool *pool, struct rbi_block *block, size_t bytes,
                                      struct rbi_pool_stream *stream)
{
    block = rbi_block_take(pool, block, bytes);
    rbi_pool_give_to(pool, block, stream);
    return block;
}

/* Merges the small quick blocks of one size, the smallest that is large enough: all others stay in
 * their lists, where the next requests find them. False when there is none. */
static bool coalesce_one_size(rebatch_pool *pool, struct rbi_pool_stream *stream, size_t bytes)
{
    if (!rbi_quick_is_small(bytes))
        return false;
    const uint64_t enough = stream->quick_filled[0] & UINT64_MAX << rbi_quick_slot(bytes);
    if (!enough)
        return false;
    const size_t units = (size_t)__builtin_ctzll(enough) + 1;
    struct rbi_block *block;
    while ((block = rbi_quick_pop(stream, units * REBATCH_POOL_UNIT_BYTES)) != NULL)
        rbi_pool_coalesce_block(pool, block);
    return true;
}

struct rbi_block *rbi_pool_take_own(rebatch_pool *pool, struct rbi_pool_stream *stream,
                                    size_t bytes)
{
    const size_t most = rbi_pool_split_most(pool);
    const unsigned zone = rbi_pool_zone(pool, bytes);
    rbi_quick_flush_large(pool, stream);
    struct rbi_block *block = rbi_pool_find_fit(stream, bytes, UINT64_MAX, most, zone);
    while (!block && zone == RBI_ZONE_SMALL && coalesce_one_size(pool, stream, bytes))
        block = rbi_pool_find_fit(stream, bytes, UINT64_MAX, most, zone);
    if (!block && stream->small_bytes) {
        rbi_quick_flush(pool, stream);
        block = rbi_pool_find_fit(stream, bytes, UINT64_MAX, most, zone);
    }
    if (!block || (zone != RBI_ZONE_ANY && rbi_pool_wants_care(pool, block, bytes)))
        return NULL;
    return rbi_block_take(pool, block, bytes);
}

struct rbi_block *rbi_pool_put_block(rebatch_pool *pool, struct rbi_block *block)
{
    return rbi_block_coalesce(pool, block,
                              block->stream == pool->space ? RBI_BLOCK_HOLE : RBI_BLOCK_FREE);
}

/* ---- quick lists ---- */

static void coalesce_list(rebatch_pool *pool, struct rbi_block *block)
{
    while (block) {
        struct rbi_block *next = block->next;
        block->stream->free_bytes -= block->bytes;
        rbi_pool_coalesce_block(pool, block);
        block = next;
    }
}

static void flush_lists(rebatch_pool *pool, struct rbi_pool_stream *stream, unsigned which)
{
    for (uint64_t filled = stream->quick_filled[which]; filled; filled &= filled - 1) {
        struct rbi_quick *quick =
            &stream->quick[which * RBI_POOL_QUICK + (unsigned)__builtin_ctzll(filled)];
        struct rbi_block *block = quick->newest;
        quick->newest = NULL;
        coalesce_list(pool, block);
    }
    stream->quick_filled[which] = 0;
}

/* Why the lists of large sizes cost no memory: every request that is not served by a block of just
 * its size has all of them merged first (rbi_quick_flush_large), so it finds what it would find had
 * each been merged when it was freed; and one that is served leaves no rest. Those of small sizes
 * hold a bounded sum; when the bins have no block, those of one size that is large enough are
 * merged, and all of them before anything else is tried. */
void rbi_quick_flush_large(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    flush_lists(pool, stream, 1);
    struct rbi_block *block = stream->loose;
    stream->loose = NULL;
    coalesce_list(pool, block);
}

void rbi_quick_flush(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    flush_lists(pool, stream, 0);
    stream->small_bytes = 0;
    rbi_quick_flush_large(pool, stream);
}

void rbi_quick_flush_all(rebatch_pool *pool)
{
    for (struct rbi_pool_stream *s = pool->first_stream; s; s = s->next)
        rbi_quick_flush(pool, s);
}

struct rbi_block *rbi_pool_block_around(const rebatch_pool *pool, const void *address)
{
    const uintptr_t wanted = (uintptr_t)address;
    for (const struct rbi_range *r = pool->first_range; r; r = r->next) {
        if (wanted < (uintptr_t)r->address || wanted - (uintptr_t)r->address >= r->bytes)
            continue;
        for (struct rbi_block *b = r->first; b; b = b->after)
            if (wanted - (uintptr_t)b->address < b->bytes)
                return b;
    }
    return NULL;
}
