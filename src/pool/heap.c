/* Owns segments, the blocks that tile them, and the bins of free blocks.
 * Must not know scopes, tags or limits. */
#include "pool/pool.h"

/* ---- bins ---- */

static unsigned class_of(size_t bytes)
{
    return 63u - (unsigned)__builtin_clzll(bytes / REBATCH_POOL_UNIT_BYTES);
}

static void add_to_bin(struct rbi_block *block)
{
    struct rbi_pool_stream *stream = block->stream;
    const unsigned class = class_of(block->bytes);
    block->previous = NULL;
    block->next = stream->bins[class];
    if (block->next)
        block->next->previous = block;
    stream->bins[class] = block;
    stream->filled |= UINT64_C(1) << class;
    stream->free_bytes += block->bytes;
}

static void remove_from_bin(struct rbi_block *block)
{
    struct rbi_pool_stream *stream = block->stream;
    const unsigned class = class_of(block->bytes);
    if (block->previous)
        block->previous->next = block->next;
    else
        stream->bins[class] = block->next;
    if (block->next)
        block->next->previous = block->previous;
    if (!stream->bins[class])
        stream->filled &= ~(UINT64_C(1) << class);
    stream->free_bytes -= block->bytes;
    block->previous = block->next = NULL;
}

static bool is_better(const struct rbi_block *a, const struct rbi_block *b)
{
    if (a->bytes != b->bytes)
        return a->bytes < b->bytes;
    if (a->segment != b->segment)
        return a->segment->number < b->segment->number;
    return a->address < b->address;
}

struct rbi_block *rbi_pool_find_fit(const struct rbi_pool_stream *stream, size_t bytes,
                                    uint64_t ready)
{
    uint64_t classes = stream->filled & (UINT64_MAX << class_of(bytes));
    for (; classes != 0; classes &= classes - 1) {
        struct rbi_block *best = NULL;
        for (struct rbi_block *b = stream->bins[__builtin_ctzll(classes)]; b; b = b->next)
            if (b->bytes >= bytes && b->freed_at <= ready && (!best || is_better(b, best)))
                best = b;
        if (best)
            return best;
    }
    return NULL;
}

/* ---- blocks ---- */

static struct rbi_block *make_block(rebatch_pool *pool, struct rbi_segment *segment, char *address,
                                    size_t bytes, struct rbi_pool_stream *stream)
{
    struct rbi_block *block = rbi_nodes_take(&pool->block_nodes);
    block->segment = segment;
    block->address = address;
    block->bytes = bytes;
    block->stream = stream;
    stream->references++;
    return block;
}

static void discard_block(rebatch_pool *pool, struct rbi_block *block)
{
    block->stream->references--;
    rbi_nodes_put(&pool->block_nodes, block);
}

void rbi_pool_take_block(rebatch_pool *pool, struct rbi_block *block, size_t bytes,
                         struct rbi_pool_stream *stream)
{
    remove_from_bin(block);
    if (block->bytes > bytes) {
        struct rbi_block *rest = make_block(pool, block->segment, block->address + bytes,
                                            block->bytes - bytes, block->stream);
        rest->freed_at = block->freed_at;
        rest->before = block;
        rest->after = block->after;
        if (rest->after)
            rest->after->before = rest;
        block->after = rest;
        block->bytes = bytes;
        add_to_bin(rest);
    }
    block->segment->used_bytes += bytes;
    if (block->stream == stream)
        return;
    block->stream->references--;
    block->stream = stream;
    block->freed_at = 0; /* its old stream is done with it, and no other work has touched it */
    stream->references++;
}

/* Makes `left` and the free block after it one. */
static void merge(rebatch_pool *pool, struct rbi_block *left)
{
    struct rbi_block *right = left->after;
    left->bytes += right->bytes;
    if (left->freed_at < right->freed_at)
        left->freed_at = right->freed_at;
    left->after = right->after;
    if (left->after)
        left->after->before = left;
    discard_block(pool, right);
}

static bool can_merge(const struct rbi_block *a, const struct rbi_block *b)
{
    return a && b && a->state == RBI_BLOCK_FREE && b->state == RBI_BLOCK_FREE &&
           a->stream == b->stream;
}

struct rbi_block *rbi_pool_put_block(rebatch_pool *pool, struct rbi_block *block)
{
    block->state = RBI_BLOCK_FREE;
    block->segment->used_bytes -= block->bytes;
    if (can_merge(block, block->after)) {
        remove_from_bin(block->after);
        merge(pool, block);
    }
    if (can_merge(block->before, block)) {
        block = block->before;
        remove_from_bin(block);
        merge(pool, block);
    }
    add_to_bin(block);
    return block;
}

/* ---- segments ---- */

rebatch_status rbi_pool_grow(struct rbi_block **out, rebatch_pool *pool, size_t bytes,
                             struct rbi_pool_stream *stream)
{
    *out = NULL;
    void *address;
    pool->stats.device_allocations++;
    const rebatch_status status = rbi_device_alloc(pool->device, &address, bytes);
    if (status != REBATCH_OK)
        return status;
    struct rbi_segment *segment = rbi_nodes_take(&pool->segment_nodes);
    segment->address = address;
    segment->bytes = bytes;
    segment->number = pool->segments_made++;
    segment->previous = pool->last_segment;
    if (segment->previous)
        segment->previous->next = segment;
    else
        pool->first_segment = segment;
    pool->last_segment = segment;
    segment->first = make_block(pool, segment, address, bytes, stream);
    add_to_bin(segment->first);
    pool->device_taken_bytes += bytes;
    pool->stats.reserved_bytes += bytes;
    if (pool->stats.reserved_peak_bytes < pool->stats.reserved_bytes)
        pool->stats.reserved_peak_bytes = pool->stats.reserved_bytes;
    *out = segment->first;
    return REBATCH_OK;
}

static void unlink_segment(rebatch_pool *pool, struct rbi_segment *segment)
{
    if (segment->previous)
        segment->previous->next = segment->next;
    else
        pool->first_segment = segment->next;
    if (segment->next)
        segment->next->previous = segment->previous;
    else
        pool->last_segment = segment->previous;
    rbi_nodes_put(&pool->segment_nodes, segment);
}

rebatch_status rbi_pool_release_segment(rebatch_pool *pool, struct rbi_segment *segment)
{
    for (const struct rbi_block *b = segment->first; b; b = b->after) {
        const rebatch_status status = rbi_pool_await(pool, b->stream, b->freed_at);
        if (status != REBATCH_OK)
            return status;
    }
    const rebatch_status status = rbi_device_free(pool->device, segment->address, segment->bytes);
    if (status != REBATCH_OK)
        return status;
    pool->stats.device_frees++;
    pool->stats.reserved_bytes -= segment->bytes;
    pool->device_given_bytes += segment->bytes;
    for (struct rbi_block *b = segment->first; b;) {
        struct rbi_block *next = b->after;
        remove_from_bin(b);
        discard_block(pool, b);
        b = next;
    }
    unlink_segment(pool, segment);
    return REBATCH_OK;
}

static bool lies_wholly_with(const struct rbi_segment *segment,
                             const struct rbi_pool_stream *stream)
{
    return segment->first->stream == stream && !segment->first->after;
}

/* The free segment that brings the cache down by `excess` with the least beyond, else the
 * largest. */
static struct rbi_segment *choose_segment(const rebatch_pool *pool, uint64_t excess,
                                          const struct rbi_pool_stream *spared)
{
    struct rbi_segment *best = NULL;
    for (struct rbi_segment *s = pool->first_segment; s; s = s->next) {
        if (s->used_bytes != 0 || (spared && lies_wholly_with(s, spared)))
            continue;
        if (!best || (best->bytes < excess ? s->bytes > best->bytes
                                           : s->bytes >= excess && s->bytes < best->bytes))
            best = s;
    }
    return best;
}

rebatch_status rbi_pool_trim_segments(rebatch_pool *pool, size_t keep_bytes,
                                      const struct rbi_pool_stream *spared, size_t *released_bytes)
{
    *released_bytes = 0;
    for (;;) {
        const uint64_t cached = pool->stats.reserved_bytes - pool->stats.live_bytes;
        if (cached <= keep_bytes)
            break;
        struct rbi_segment *segment = choose_segment(pool, cached - keep_bytes, spared);
        if (!segment)
            break;
        const size_t bytes = segment->bytes;
        const rebatch_status status = rbi_pool_release_segment(pool, segment);
        if (status == REBATCH_OOM)
            break; /* the device had no memory to wait with: the segment stays cached */
        if (status != REBATCH_OK)
            return status;
        *released_bytes += bytes;
    }
    pool->stats.trims += *released_bytes > 0;
    return REBATCH_OK;
}

struct rbi_block *rbi_pool_block_around(const rebatch_pool *pool, const void *address)
{
    const uintptr_t wanted = (uintptr_t)address;
    for (const struct rbi_segment *s = pool->first_segment; s; s = s->next) {
        if (wanted < (uintptr_t)s->address || wanted - (uintptr_t)s->address >= s->bytes)
            continue;
        for (struct rbi_block *b = s->first; b; b = b->after)
            if (wanted - (uintptr_t)b->address < b->bytes)
                return b;
    }
    return NULL;
}

uint64_t rbi_pool_largest_hole(const rebatch_pool *pool)
{
    uint64_t largest = 0;
    for (const struct rbi_pool_stream *s = pool->first_stream; s; s = s->next) {
        if (s->filled == 0)
            continue;
        for (const struct rbi_block *b = s->bins[63 - __builtin_clzll(s->filled)]; b; b = b->next)
            largest = b->bytes > largest ? b->bytes : largest;
    }
    return largest;
}

void rbi_pool_destroy_segments(rebatch_pool *pool)
{
    for (const struct rbi_segment *s = pool->first_segment; s; s = s->next)
        (void)rbi_device_free(pool->device, s->address, s->bytes);
    pool->first_segment = pool->last_segment = NULL;
}
