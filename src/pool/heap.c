/* Owns the blocks that tile ranges, the bins of free ones, and the quick lists.
 * Must not know scopes, tags, limits or how memory is mapped. */
#include "pool/pool.h"

/* How many blocks of a class are looked at: more find little better (bounded best fit). */
#define LOOKS 8

/* Of what most allocations and frees pass through the calls are inlined. */
#define HOT __attribute__((flatten))

/* ---- bins ---- */

static inline bool is_better(const struct rbi_block *a, const struct rbi_block *b)
{
    if (a->bytes != b->bytes)
        return a->bytes < b->bytes;
    if (a->range != b->range)
        return a->range->number < b->range->number;
    return a->address < b->address;
}

/* What a search is for. */
struct wanted {
    size_t bytes;
    uint64_t ready;
    size_t most; /* the largest block that may be had */
    unsigned zone;
};

static inline bool is_hole(const struct rbi_block *block)
{
    return block && block->state == RBI_BLOCK_HOLE;
}

/* A block between holes has no neighbour to lie beside: what is cut off of it would take up parts
 * of granules on both sides, so it is better unmapped and its granules used elsewhere. */
static inline bool is_afloat(const struct rbi_block *block)
{
    return is_hole(block->before) && is_hole(block->after);
}

static inline bool fits(const struct rbi_block *block, const struct wanted *wanted)
{
    if (wanted->zone == RBI_ZONE_ANY)
        return true;
    return block->zone == (wanted->zone & ~RBI_ZONE_AFLOAT) &&
           ((wanted->zone & RBI_ZONE_AFLOAT) || !is_afloat(block));
}

/* The best of the first `looks` blocks of a bin, and of those behind them the first that fits. */
static inline struct rbi_block *best_of(struct rbi_block *bin, const struct wanted *wanted)
{
    struct rbi_block *best = NULL;
    unsigned looks = 0;
    for (struct rbi_block *b = bin; b && (looks < LOOKS || !best); b = b->next, looks++)
        if (b->bytes >= wanted->bytes && (!best || is_better(b, best)) && fits(b, wanted) &&
            b->bytes <= wanted->most && b->freed_at <= wanted->ready)
            best = b;
    return best;
}

struct rbi_block *rbi_pool_find_fit(const struct rbi_pool_stream *stream, size_t bytes,
                                    uint64_t ready, size_t max_split, unsigned zone)
{
    const struct wanted wanted = {bytes, ready, bytes < max_split ? max_split : SIZE_MAX, zone};
    const struct rbi_place at = rbi_place_of(bytes);
    uint32_t columns = stream->columns[at.row] & (UINT32_MAX << at.column);
    uint64_t rows = stream->rows & (UINT64_MAX << at.row) & ~(UINT64_C(1) << at.row);
    for (unsigned row = at.row;;) {
        for (; columns != 0; columns &= columns - 1) {
            struct rbi_block *best = best_of(stream->bins[row][__builtin_ctz(columns)], &wanted);
            if (best)
                return best;
        }
        if (rows == 0)
            return NULL;
        row = (unsigned)__builtin_ctzll(rows);
        rows &= rows - 1;
        columns = stream->columns[row];
    }
}

/* The first block of the first bin from `at` on. */
static struct rbi_block *first_from(const struct rbi_pool_stream *stream, unsigned row,
                                    unsigned column)
{
    const uint32_t columns =
        column < RBI_POOL_COLUMNS ? stream->columns[row] & (UINT32_MAX << column) : 0;
    if (columns)
        return stream->bins[row][__builtin_ctz(columns)];
    const uint64_t rows = stream->rows & (UINT64_MAX << row) & ~(UINT64_C(1) << row);
    if (!rows)
        return NULL;
    row = (unsigned)__builtin_ctzll(rows);
    return stream->bins[row][__builtin_ctz(stream->columns[row])];
}

struct rbi_block *rbi_pool_first_free(const struct rbi_pool_stream *stream, size_t bytes)
{
    const struct rbi_place at = rbi_place_of(bytes);
    return first_from(stream, at.row, at.column);
}

struct rbi_block *rbi_pool_next_free(const struct rbi_block *block)
{
    if (block->next)
        return block->next;
    const struct rbi_place at = rbi_place_of(block->bytes);
    return first_from(block->stream, at.row, at.column + 1);
}

uint64_t rbi_pool_largest_hole(const rebatch_pool *pool)
{
    uint64_t largest = 0;
    for (const struct rbi_pool_stream *s = pool->first_stream; s; s = s->next) {
        for (unsigned i = 0; i < RBI_POOL_QUICK; i++)
            if (s->quick[i].newest)
                largest = rbi_max(largest, s->quick[i].bytes);
        for (const struct rbi_block *b = s->loose; b; b = b->next)
            largest = rbi_max(largest, b->bytes);
        if (s->rows == 0)
            continue;
        const unsigned row = 63u - (unsigned)__builtin_clzll(s->rows);
        const unsigned column = 31u - (unsigned)__builtin_clz(s->columns[row]);
        for (const struct rbi_block *b = s->bins[row][column]; b; b = b->next)
            largest = rbi_max(largest, b->bytes);
    }
    return largest;
}

/* ---- blocks ---- */

struct rbi_block *rbi_pool_make_block(rebatch_pool *pool, struct rbi_range *range, char *address,
                                      size_t bytes, struct rbi_pool_stream *stream)
{
    struct rbi_block *block = rbi_nodes_take_as_is(&pool->block_nodes);
    *block = (struct rbi_block){
        .range = range, .address = address, .bytes = bytes, .stream = stream, .zone = range->zone};
    stream->references++;
    return block;
}

void rbi_pool_discard_block(rebatch_pool *pool, struct rbi_block *block)
{
    if (block->listed)
        rbi_table_remove(&pool->table, rbi_table_find(&pool->table, block->address));
    block->stream->references--;
    rbi_nodes_put(&pool->block_nodes, block);
}

void rbi_pool_give_to(struct rbi_block *block, struct rbi_pool_stream *stream)
{
    if (block->stream == stream)
        return;
    block->stream->references--;
    block->stream = stream;
    block->freed_at = 0; /* its old stream is done with it, and no other work has touched it */
    stream->references++;
}

struct rbi_block *rbi_pool_split(rebatch_pool *pool, struct rbi_block *block, size_t bytes)
{
    struct rbi_block *rest = rbi_pool_make_block(pool, block->range, block->address + bytes,
                                                 block->bytes - bytes, block->stream);
    rest->state = block->state;
    rest->freed_at = block->freed_at;
    rest->birth = block->birth;
    rest->before = block;
    rest->after = block->after;
    if (rest->after)
        rest->after->before = rest;
    block->after = rest;
    block->bytes = bytes;
    return rest;
}

/* Of a block that is larger than asked for the end is taken where that leaves more granules whole:
 * what is left of a granule can only be used where it is. */
static bool leaves_more_from_end(const rebatch_pool *pool, const struct rbi_block *block,
                                 size_t bytes)
{
    const size_t mask = pool->granule_bytes - 1;
    const size_t first = (size_t)(block->address - block->range->address);
    const size_t last = first + block->bytes;
    const size_t from_start = (last & ~mask) - ((first + bytes + mask) & ~mask);
    const size_t from_end = ((last - bytes) & ~mask) - ((first + mask) & ~mask);
    return (ptrdiff_t)from_end > (ptrdiff_t)from_start;
}

static bool takes_end(const rebatch_pool *pool, const struct rbi_block *block, size_t bytes)
{
    const bool hole_before = is_hole(block->before);
    if (hole_before != is_hole(block->after))
        return hole_before;
    return block->bytes - bytes >= pool->granule_bytes && leaves_more_from_end(pool, block, bytes);
}

struct rbi_block *rbi_pool_take_block(rebatch_pool *pool, struct rbi_block *block, size_t bytes,
                                      struct rbi_pool_stream *stream)
{
    rbi_pool_bin_remove(block);
    if (block->bytes > bytes) {
        const size_t rest = block->bytes - bytes;
        if (takes_end(pool, block, bytes)) {
            struct rbi_block *end = rbi_pool_split(pool, block, rest);
            rbi_pool_bin_add(block);
            block = end;
        } else {
            rbi_pool_bin_add(rbi_pool_split(pool, block, bytes));
        }
    }
    block->state = RBI_BLOCK_HELD;
    rbi_pool_give_to(block, stream);
    return block;
}

HOT struct rbi_block *rbi_pool_take_own(rebatch_pool *pool, struct rbi_pool_stream *stream,
                                        size_t bytes)
{
    rbi_quick_flush(pool, stream);
    struct rbi_block *block = rbi_pool_find_fit(stream, bytes, UINT64_MAX, pool->max_split_bytes,
                                                rbi_pool_zone(pool, bytes));
    return block ? rbi_pool_take_block(pool, block, bytes, stream) : NULL;
}

void rbi_pool_join(rebatch_pool *pool, struct rbi_block *left)
{
    struct rbi_block *right = left->after;
    left->bytes += right->bytes;
    left->freed_at = left->freed_at < right->freed_at ? right->freed_at : left->freed_at;
    left->birth = left->birth < right->birth ? right->birth : left->birth;
    left->after = right->after;
    if (left->after)
        left->after->before = left;
    rbi_pool_discard_block(pool, right);
}

static inline bool can_join(const struct rbi_block *a, const struct rbi_block *b)
{
    return a && b && a->state == b->state && a->stream == b->stream;
}

struct rbi_block *rbi_pool_put_block(rebatch_pool *pool, struct rbi_block *block)
{
    block->state = block->stream == pool->space ? RBI_BLOCK_HOLE : RBI_BLOCK_FREE;
    if (can_join(block, block->after)) {
        rbi_pool_bin_remove(block->after);
        rbi_pool_join(pool, block);
    }
    if (can_join(block->before, block)) {
        block = block->before;
        rbi_pool_bin_remove(block);
        rbi_pool_join(pool, block);
    }
    rbi_pool_bin_add(block);
    return block;
}

/* ---- quick lists ---- */

HOT void rbi_pool_settle_block(rebatch_pool *pool, struct rbi_block *block)
{
    if (__builtin_expect(block->late, 0)) {
        rbi_table_mark_late(&pool->table, rbi_table_find(&pool->table, block->address));
        block->late = block->listed = false;
    }
    (void)rbi_pool_put_block(pool, block);
}

static void settle_list(rebatch_pool *pool, struct rbi_block *block)
{
    while (block) {
        struct rbi_block *next = block->next;
        block->stream->free_bytes -= block->bytes;
        rbi_pool_settle_block(pool, block);
        block = next;
    }
}

/* Why quick lists cost no memory: every request that is not served by a block of just its size has
 * all of them merged first (rbi_quick_flush), so it finds what it would find had each been merged
 * when it was freed; and one that is served leaves no rest. */
void rbi_quick_flush_slowly(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    for (; stream->quick_filled; stream->quick_filled &= stream->quick_filled - 1) {
        struct rbi_quick *quick = &stream->quick[__builtin_ctzll(stream->quick_filled)];
        struct rbi_block *block = quick->newest;
        quick->newest = NULL;
        settle_list(pool, block);
    }
    struct rbi_block *block = stream->loose;
    stream->loose = NULL;
    settle_list(pool, block);
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
