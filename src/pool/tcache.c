/* Owns what threads have ahead of themselves: small blocks, lent by the pool to a few caches.
 * Must not know how memory is found. */
#include <string.h>

#include "pool/pool.h"

#define SMALLEST_CAPACITY 256
#define LARGEST_CAPACITY 65536
/* After so many refills for other streams, none for its own between them, a cache goes over to
 * another one. */
#define STRANGERS_MOST 32

static unsigned class_of(size_t bytes)
{
    return (unsigned)((bytes - 1) / REBATCH_POOL_UNIT_BYTES);
}

/* This thread's; NULL: there are none. */
static inline struct rbi_tcache *own_cache(rebatch_pool *pool)
{
    struct rbi_tcache *caches = atomic_load_explicit(&pool->tcaches, memory_order_acquire);
    return caches ? &caches[rbi_lock_thread % RBI_TCACHES] : NULL;
}

/* ---- the table: just the blocks that are lent ---- */

static size_t home_of(const struct rbi_tcache *cache, const void *address)
{
    /* Fibonacci hashing, as in rbi_table_home(). */
    const uint64_t unit = (uint64_t)(uintptr_t)address / REBATCH_POOL_ALIGNMENT;
    return (size_t)((unit * UINT64_C(0x9e3779b97f4a7c15)) >> 32) & (cache->capacity - 1);
}

/* Where the address stands, or would. */
static inline size_t slot_of(const struct rbi_tcache *cache, const void *address)
{
    size_t slot = home_of(cache, address);
    while (cache->entries[slot].address && cache->entries[slot].address != address)
        slot = (slot + 1) & (cache->capacity - 1);
    return slot;
}

struct rbi_block *rbi_tcache_find(const struct rbi_tcache *cache, const void *address)
{
    return cache->lent ? cache->entries[slot_of(cache, address)].block : NULL;
}

static void put(struct rbi_tcache *cache, struct rbi_block *block)
{
    cache->entries[slot_of(cache, block->address)] =
        (struct rbi_tcache_entry){block->address, block};
}

/* Moves entries behind it forward, so that none is cut off from its home. */
static void remove_from_table(struct rbi_tcache *cache, const struct rbi_block *block)
{
    const size_t mask = cache->capacity - 1;
    size_t gap = slot_of(cache, block->address);
    for (size_t slot = (gap + 1) & mask; cache->entries[slot].address; slot = (slot + 1) & mask) {
        const size_t home = home_of(cache, cache->entries[slot].address);
        if (((slot - home) & mask) < ((slot - gap) & mask))
            continue;
        cache->entries[gap] = cache->entries[slot];
        gap = slot;
    }
    cache->entries[gap] = (struct rbi_tcache_entry){NULL, NULL};
}

/* False when it has no space for one more, and the heap none for a larger one. */
static bool prepare_table(struct rbi_tcache *cache)
{
    if (2 * (cache->lent + 1) <= cache->capacity)
        return true;
    const struct rbi_tcache old = *cache;
    const size_t capacity = rbi_max(SMALLEST_CAPACITY, 2 * old.capacity);
    struct rbi_tcache_entry *entries =
        capacity <= LARGEST_CAPACITY ? rbi_heap_calloc(capacity, sizeof *entries) : NULL;
    if (!entries)
        return false;
    cache->entries = entries;
    cache->capacity = capacity;
    for (size_t i = 0; i < old.capacity; i++)
        if (old.entries[i].address)
            put(cache, old.entries[i].block);
    rbi_heap_free(old.entries);
    return true;
}

/* ---- in a cache; with its lock held ---- */

static inline void push_free(struct rbi_tcache *cache, struct rbi_block *block)
{
    struct rbi_block **const list = &cache->free[class_of(block->bytes)];
    block->taken = false;
    block->next = *list;
    *list = block;
    cache->free_bytes += block->bytes;
}

static inline struct rbi_block *pop_free(struct rbi_tcache *cache, unsigned class)
{
    struct rbi_block *const block = cache->free[class];
    if (block) {
        cache->free[class] = block->next;
        cache->free_bytes -= block->bytes;
    }
    return block;
}

static inline void begin_use(struct rbi_tcache *cache, struct rbi_block *block, size_t bytes,
                             rebatch_tag tag)
{
    struct rbi_block *const ring = &cache->in_use;
    struct rbi_block *const newest = ring->previous;
    block->taken = true;
    block->late = false;
    block->requested_bytes = bytes;
    block->tag = tag;
    block->next = ring;
    block->previous = newest;
    newest->next = ring->previous = block;
}

bool rbi_tcache_alloc(void **out, rebatch_pool *pool, size_t bytes, rebatch_stream stream,
                      rebatch_tag tag)
{
    struct rbi_tcache *cache = own_cache(pool);
    if (!cache || bytes - 1 >= RBI_TCACHE_BLOCK_MOST || rbi_pool_is_pressing(pool))
        return false;
    struct rbi_block *block = NULL;
    rbi_lock_take(&cache->lock);
    if (cache->stream == stream && tag < cache->tag_count &&
        !rbi_pool_is_outside(pool, cache->insider))
        block = pop_free(cache, class_of(bytes));
    if (block) {
        cache->strangers = 0;
        begin_use(cache, block, bytes, tag);
        *out = block->address;
    }
    rbi_lock_give(&cache->lock);
    return block != NULL;
}

static void flush(rebatch_pool *pool, struct rbi_tcache *cache);

bool rbi_tcache_free(rebatch_pool *pool, const void *pointer)
{
    struct rbi_tcache *cache = own_cache(pool);
    if (!cache)
        return false;
    bool is_full = false;
    rbi_lock_take(&cache->lock);
    struct rbi_block *block = rbi_tcache_find(cache, pointer);
    if (block && block->taken) {
        rbi_pool_leave_use(block);
        cache->pairs++;
        cache->pair_bytes += block->bytes;
        cache->pair_requested_bytes += block->requested_bytes;
        push_free(cache, block);
        is_full = cache->free_bytes > cache->free_most;
    } else {
        block = NULL;
    }
    rbi_lock_give(&cache->lock);
    if (is_full)
        flush(pool, cache);
    return block != NULL;
}

/* ---- between pool and cache; with both locks held ---- */

static void lend(rebatch_pool *pool, struct rbi_tcache *cache, struct rbi_block *block)
{
    block->state = RBI_BLOCK_LENT;
    block->tcache = (uint8_t)(cache - atomic_load_explicit(&pool->tcaches, memory_order_relaxed));
    pool->stats.live_bytes += block->bytes;
    pool->stats.blocks++;
    rbi_raise(&pool->stats.blocks_peak, pool->stats.blocks);
    if (pool->depth)
        rbi_raise(&pool->scopes[pool->depth - 1].largest_bytes, block->bytes);
    put(cache, block);
    cache->lent++;
    cache->lent_of[class_of(block->bytes)]++;
}

static void count_pairs(rebatch_pool *pool, struct rbi_tcache *cache)
{
    pool->births += cache->pairs;
    pool->stats.freed_total_bytes += cache->pair_bytes;
    pool->requested_total_bytes += cache->pair_requested_bytes;
    pool->requested_given_bytes += cache->pair_requested_bytes;
    cache->pairs = cache->pair_bytes = cache->pair_requested_bytes = 0;
}

/* A block that is out of the cache's lists is in no list from here on. With the last one all is
 * counted: a cache that has none need not be folded. */
static void take_back(rebatch_pool *pool, struct rbi_tcache *cache, struct rbi_block *block)
{
    remove_from_table(cache, block);
    cache->lent--;
    cache->lent_of[class_of(block->bytes)]--;
    block->state = RBI_BLOCK_HELD;
    pool->stats.live_bytes -= block->bytes;
    pool->stats.blocks--;
    if (cache->lent == 0)
        count_pairs(pool, cache);
}

/* Gives free blocks, a list, back to their stream. That work may be enqueued which has used them is
 * noted once for all. */
static void give_back(rebatch_pool *pool, struct rbi_tcache *cache, struct rbi_block *block)
{
    const uint64_t point = block ? rbi_stream_note_free(pool, block->stream) : 0;
    while (block) {
        struct rbi_block *next = block->next;
        cache->free_bytes -= block->bytes;
        take_back(pool, cache, block);
        block->freed_at = point;
        block->birth = pool->births;
        rbi_pool_cache_block(pool, block);
        block = next;
    }
}

/* Makes a block in use a live one; no peak rises, as it has been counted as live before. */
static void make_live(rebatch_pool *pool, struct rbi_tcache *cache, struct rbi_block *block)
{
    rbi_pool_leave_use(block);
    take_back(pool, cache, block);
    (void)rbi_pool_use_block_of(pool, block, block->requested_bytes, block->tag, false);
}

static void fold(rebatch_pool *pool, struct rbi_tcache *cache)
{
    count_pairs(pool, cache);
    while (cache->in_use.next != &cache->in_use)
        make_live(pool, cache, cache->in_use.next);
    for (unsigned i = 0; i < RBI_TCACHE_CLASSES; i++) {
        struct rbi_block *list = cache->free[i];
        cache->free[i] = NULL;
        give_back(pool, cache, list);
    }
}

void rbi_tcaches_fold_slowly(rebatch_pool *pool)
{
    struct rbi_tcache *caches = atomic_load_explicit(&pool->tcaches, memory_order_relaxed);
    for (size_t i = 0; i < RBI_TCACHES; i++) {
        if (caches[i].lent == 0)
            continue;
        rbi_lock_take(&caches[i].lock);
        fold(pool, &caches[i]);
        rbi_lock_give(&caches[i].lock);
    }
    pool->lending = false;
}

/* Cuts the older half, rounded up, off a list. */
static struct rbi_block *cut_half(struct rbi_block **list)
{
    struct rbi_block **middle = list;
    for (const struct rbi_block *b = *list; b && b->next; b = b->next->next)
        middle = &(*middle)->next;
    struct rbi_block *older = *middle;
    *middle = NULL;
    return older;
}

/* Gives half of what is free back: the older half of each size, large ones first, as they are few
 * for their bytes. */
static void flush(rebatch_pool *pool, struct rbi_tcache *cache)
{
    rbi_lock_take(&pool->lock);
    rbi_lock_take(&cache->lock);
    const size_t enough = cache->free_most / 2;
    while (cache->free_bytes > enough)
        for (unsigned i = RBI_TCACHE_CLASSES; i-- > 0 && cache->free_bytes > enough;)
            give_back(pool, cache, cut_half(&cache->free[i]));
    rbi_lock_give(&cache->lock);
    rbi_lock_give(&pool->lock);
}

bool rbi_tcache_adopt(rebatch_pool *pool, struct rbi_block *block)
{
    struct rbi_tcache *cache =
        &atomic_load_explicit(&pool->tcaches, memory_order_relaxed)[block->tcache];
    rbi_lock_take(&cache->lock);
    const bool taken = block->taken;
    if (taken)
        make_live(pool, cache, block);
    rbi_lock_give(&cache->lock);
    return taken;
}

/* ---- refills; with the pool's lock held ---- */

static struct rbi_tcache *make_caches(rebatch_pool *pool)
{
    struct rbi_tcache *caches = rbi_heap_calloc_lines(RBI_TCACHES, sizeof *caches);
    if (!caches)
        return NULL;
    for (size_t i = 0; i < RBI_TCACHES; i++) {
        rbi_lock_init(&caches[i].lock);
        caches[i].in_use.next = caches[i].in_use.previous = &caches[i].in_use;
    }
    atomic_store_explicit(&pool->tcaches, caches, memory_order_release);
    return caches;
}

/* Is it, or does it become, a cache for blocks of this stream? */
static bool is_for(rebatch_pool *pool, struct rbi_tcache *cache, rebatch_stream stream)
{
    if (cache->lent && cache->stream != stream) {
        if (++cache->strangers < STRANGERS_MOST)
            return false;
        fold(pool, cache);
    }
    cache->strangers = 0;
    cache->stream = stream;
    return true;
}

static size_t free_most(const rebatch_pool *pool)
{
    const size_t most =
        rbi_min(RBI_TCACHE_FREE_MOST, RBI_TCACHE_GRANULES_MOST * pool->granule_bytes);
    return rbi_min(most, pool->limit_bytes / RBI_TCACHE_LIMIT_PARTS);
}

/* One more block of that size that is free as it is, or can be cut without merging others first:
 * NULL when there is none. */
static struct rbi_block *find_more(rebatch_pool *pool, struct rbi_pool_stream *stream, size_t bytes)
{
    struct rbi_block *block = rbi_quick_pop(stream, bytes);
    if (block)
        return block;
    if (pool->block_nodes.spare < rbi_pool_promised(pool) || stream->quick_filled[1] ||
        stream->loose)
        return NULL;
    block = rbi_pool_take_own_fast(pool, stream, bytes);
    if (block) {
        /* What a rollback took back stays known until somebody has the address again. */
        block->late = rbi_late_has(&pool->late, block->address);
        rbi_pool_list_block(pool, block);
    }
    return block;
}

/* As many more as are lent of that size: a size that is not much used costs little. */
static void lend_ahead(rebatch_pool *pool, struct rbi_tcache *cache, struct rbi_pool_stream *stream,
                       size_t bytes)
{
    size_t count = rbi_min(cache->lent_of[class_of(bytes)] - 1u, RBI_TCACHE_AHEAD_BLOCKS);
    count = rbi_min(count, RBI_TCACHE_AHEAD_BYTES / bytes);
    for (; count > 0 && cache->free_bytes + bytes <= cache->free_most; count--) {
        struct rbi_block *block = prepare_table(cache) ? find_more(pool, stream, bytes) : NULL;
        if (!block)
            return;
        lend(pool, cache, block);
        push_free(cache, block);
    }
}

static bool refill(rebatch_pool *pool, struct rbi_tcache *cache, struct rbi_block *block,
                   size_t bytes, rebatch_tag tag)
{
    if (!is_for(pool, cache, block->stream->stream))
        return false;
    if (!prepare_table(cache)) {
        fold(pool, cache); /* its blocks in use are many: they are live ones from now on */
        if (cache->capacity == 0)
            return false;
    }
    cache->tag_count = pool->tag_count;
    cache->insider = pool->insider;
    cache->free_most = free_most(pool);
    pool->lending = true;
    lend(pool, cache, block);
    begin_use(cache, block, bytes, tag);
    lend_ahead(pool, cache, block->stream, block->bytes);
    return true;
}

bool rbi_tcache_lend(rebatch_pool *pool, struct rbi_block *block, size_t bytes, rebatch_tag tag)
{
    struct rbi_tcache *cache = own_cache(pool);
    if (!cache) {
        if (!make_caches(pool))
            return false;
        cache = own_cache(pool);
    }
    rbi_lock_take(&cache->lock);
    const bool lent = refill(pool, cache, block, bytes, tag);
    rbi_lock_give(&cache->lock);
    if (lent && pool->stats.live_bytes > pool->quiet_bytes)
        rbi_pool_raise_peaks(pool);
    return lent;
}

void rbi_tcaches_destroy(rebatch_pool *pool)
{
    struct rbi_tcache *caches = atomic_load_explicit(&pool->tcaches, memory_order_relaxed);
    for (size_t i = 0; caches && i < RBI_TCACHES; i++)
        rbi_heap_free(caches[i].entries);
    rbi_heap_free(caches);
}
