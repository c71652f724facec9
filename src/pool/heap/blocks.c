/* Owns the blocks that tile ranges, the bins of free ones, and the quick lists.
 * Must not know scopes, tags, limits or how memory is mapped. */
#include "pool/heap/heap.h"

/* ---- bins ---- */

/* Which blocks a search may have: of at least `bytes`, done up to `ready`. */
struct wanted {
    size_t bytes;
    uint64_t ready;
    bool isolated; /* those between two holes too */
};

static inline bool is_wanted(const struct rbi_block *block, const struct wanted *wanted)
{
    return block->bytes >= wanted->bytes && block->freed_at <= wanted->ready &&
           (wanted->isolated || !rbi_block_is_isolated(block));
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

struct rbi_block *rbi_lists_find(const struct rbi_lists *lists, size_t bytes, uint64_t ready,
                                 unsigned zone)
{
    const struct wanted wanted = {bytes, ready, zone == RBI_ZONE_ANY || (zone & RBI_ZONE_ISOLATED)};
    if (!lists->has_zones)
        return find_in(&lists->bins[0], &wanted);
    if (zone != RBI_ZONE_ANY)
        return find_in(&lists->bins[zone & ~RBI_ZONE_ISOLATED], &wanted);
    struct rbi_block *best = NULL;
    for (unsigned i = 0; i < RBI_POOL_ZONES; i++) {
        struct rbi_block *block = find_in(&lists->bins[i], &wanted);
        if (block && (!best || is_better(block, best)))
            best = block;
    }
    return best;
}

/* The first block of the first bin from `bin` on. */
static struct rbi_block *first_from(const struct rbi_lists *lists, unsigned bin)
{
    const unsigned next = rbi_bin_next(&lists->bins[0], bin);
    return next < RBI_POOL_BINS ? lists->bins[0].of[next] : NULL;
}

struct rbi_block *rbi_lists_first(const struct rbi_lists *lists)
{
    return first_from(lists, 0);
}

struct rbi_block *rbi_lists_next(const struct rbi_block *block)
{
    return block->next ? block->next : first_from(block->lists, block->bin + 1u);
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

uint64_t rbi_lists_largest_bytes(const struct rbi_lists *lists)
{
    uint64_t largest = 0;
    for (unsigned i = 0; i < 2 * RBI_POOL_QUICK; i++)
        if (lists->quick[i].newest)
            largest = rbi_max(largest, lists->quick[i].bytes);
    for (unsigned zone = 0; zone < RBI_POOL_ZONES; zone++)
        largest = rbi_max(largest, largest_in(&lists->bins[zone]));
    return largest;
}

/* ---- blocks ---- */

static struct rbi_bins *bins_for(struct rbi_lists *lists, const struct rbi_range *range)
{
    return &lists->bins[lists->has_zones ? range->zone : 0];
}

/* What is known of blocks by their addresses is prepared first, so that it always does for all the
 * blocks that can be. */
bool rbi_blocks_prepare(struct rbi_block_heap *heap, size_t count)
{
    const size_t blocks = rbi_nodes_made_with(&heap->block_nodes, count);
    return rbi_table_prepare(&heap->table, blocks) && rbi_late_prepare(&heap->late, blocks) &&
           rbi_nodes_prepare(&heap->block_nodes, count);
}

struct rbi_block *rbi_block_make(struct rbi_block_heap *heap, struct rbi_range *range,
                                 char *address, size_t bytes, struct rbi_lists *lists)
{
    struct rbi_block *block = rbi_nodes_take_as_is(&heap->block_nodes);
    *block = (struct rbi_block){.range = range,
                                .address = address,
                                .bytes = bytes,
                                .lists = lists,
                                .bins = bins_for(lists, range)};
    return block;
}

void rbi_block_give(struct rbi_block *block, struct rbi_lists *lists)
{
    if (block->lists == lists)
        return;
    block->lists = lists;
    block->bins = bins_for(lists, block->range);
    block->freed_at = 0; /* its old lists is done with it, and no other work has touched it */
}

struct rbi_block *rbi_block_split(struct rbi_block_heap *heap, struct rbi_block *block,
                                  size_t bytes)
{
    return rbi_block_cut(heap, block, block->bytes - bytes, true);
}

struct rbi_block *rbi_block_take_for(struct rbi_block_heap *heap, struct rbi_block *block,
                                     size_t bytes, struct rbi_lists *lists)
{
    block = rbi_block_take(heap, block, bytes);
    rbi_block_give(block, lists);
    return block;
}

struct rbi_block *rbi_block_put(struct rbi_block_heap *heap, struct rbi_block *block)
{
    return rbi_block_coalesce(heap, block,
                              block->lists == heap->holes ? RBI_BLOCK_HOLE : RBI_BLOCK_FREE);
}

/* ---- quick lists ---- */

static void coalesce_list(struct rbi_block_heap *heap, struct rbi_block *block)
{
    while (block) {
        struct rbi_block *next = block->next;
        rbi_assert(block->state == RBI_BLOCK_QUICK);
        rbi_assert(block->lists->free_bytes >= block->bytes);
        block->lists->free_bytes -= block->bytes;
        rbi_block_merge(heap, block);
        block = next;
    }
}

static void flush_lists(struct rbi_block_heap *heap, struct rbi_lists *lists, unsigned which)
{
    for (uint64_t filled = lists->quick_filled[which]; filled; filled &= filled - 1) {
        struct rbi_quick *quick =
            &lists->quick[which * RBI_POOL_QUICK + (unsigned)__builtin_ctzll(filled)];
        struct rbi_block *block = quick->newest;
        quick->newest = NULL;
        coalesce_list(heap, block);
    }
    lists->quick_filled[which] = 0;
}

/* Why the lists of large sizes cost no memory: every request that is not served by a block of just
 * its size has all of them merged first (rbi_lists_flush_large), so it finds what it would find had
 * each been merged when it was freed; and one that is served leaves no rest. Those of small sizes
 * hold a bounded sum; when the bins have no block, all of them are merged before anything else is
 * tried. */
void rbi_lists_flush_large(struct rbi_block_heap *heap, struct rbi_lists *lists)
{
    flush_lists(heap, lists, 1);
}

void rbi_lists_flush(struct rbi_block_heap *heap, struct rbi_lists *lists)
{
    flush_lists(heap, lists, 0);
    lists->small_bytes = 0;
    rbi_lists_flush_large(heap, lists);
}

struct rbi_block *rbi_block_around(const struct rbi_block_heap *heap, const void *address)
{
    const uintptr_t wanted = (uintptr_t)address;
    for (const struct rbi_range *r = heap->first_range; r; r = r->next) {
        if (wanted < (uintptr_t)r->address || wanted - (uintptr_t)r->address >= r->bytes)
            continue;
        for (struct rbi_block *b = r->first; b; b = b->after)
            if (wanted - (uintptr_t)b->address < b->bytes)
                return b;
    }
    return NULL;
}

/* ---- ranges ---- */

struct rbi_range *rbi_blocks_add_empty(struct rbi_block_heap *heap, void *address, size_t bytes,
                                       uint8_t zone)
{
    struct rbi_range *range = rbi_nodes_take(&heap->range_nodes);
    range->address = address;
    range->bytes = bytes;
    range->zone = zone;
    range->number = heap->ranges_made++;
    range->previous = heap->last_range;
    if (range->previous)
        range->previous->next = range;
    else
        heap->first_range = range;
    heap->last_range = range;
    return range;
}

struct rbi_range *rbi_blocks_add_range(struct rbi_block_heap *heap, void *address, size_t bytes,
                                       struct rbi_lists *lists, uint8_t zone)
{
    struct rbi_range *range = rbi_blocks_add_empty(heap, address, bytes, zone);
    range->first = rbi_block_make(heap, range, address, bytes, lists);
    return range;
}

void rbi_blocks_remove_range(struct rbi_block_heap *heap, struct rbi_range *range)
{
    for (struct rbi_block *b = range->first; b;) {
        struct rbi_block *next = b->after;
        rbi_assert(b->state == RBI_BLOCK_FREE);
        rbi_lists_remove(b);
        rbi_block_discard(heap, b);
        b = next;
    }
    if (range->previous)
        range->previous->next = range->next;
    else
        heap->first_range = range->next;
    if (range->next)
        range->next->previous = range->previous;
    else
        heap->last_range = range->previous;
    rbi_nodes_put(&heap->range_nodes, range);
}

/* ---- the whole ---- */

bool rbi_blocks_open(struct rbi_block_heap *heap, size_t page_bytes, struct rbi_lists *holes)
{
    heap->page_bytes = page_bytes;
    heap->holes = holes;
    heap->block_nodes.node_bytes = sizeof(struct rbi_block);
    heap->range_nodes.node_bytes = sizeof(struct rbi_range);
    return rbi_table_prepare(&heap->table, 1) && rbi_late_prepare(&heap->late, 1);
}

void rbi_blocks_close(struct rbi_block_heap *heap)
{
    rbi_nodes_destroy(&heap->block_nodes);
    rbi_nodes_destroy(&heap->range_nodes);
    rbi_table_destroy(&heap->table);
    rbi_late_destroy(&heap->late);
}
