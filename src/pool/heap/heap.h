/* Blocks, the address ranges that they tile, and the free lists by which they are found.
 * Must not know the device, streams, scopes or limits. All with the pool's lock held.
 *
 * The layers above keep facts of their own in a block, such as its tag and its number. */
#ifndef RBI_POOL_HEAP_H
#define RBI_POOL_HEAP_H

#include "base/base.h"
#include "pool/heap/nodes.h"
#include "pool/heap/rolled_back.h"
#include "pool/tuning.h"
#include "rebatch/pool.h"

#define RBI_LIKELY(condition) __builtin_expect(!!(condition), 1)
#define RBI_UNLIKELY(condition) __builtin_expect(!!(condition), 0)

#define RBI_POOL_CLASS_BITS 5
#define RBI_POOL_CLASSES (1 << RBI_POOL_CLASS_BITS) /* an octave of units */
#define RBI_POOL_BIN_WORDS 28                       /* of 64 classes: two octaves each */
#define RBI_POOL_BINS (RBI_POOL_BIN_WORDS * 64)

struct rbi_bins;
struct rbi_lists;
struct rbi_map;
struct rbi_range;

enum rbi_block_state {
    RBI_BLOCK_FREE,     /* in a bin of its lists */
    RBI_BLOCK_QUICK,    /* free, and in a quick list of its lists: not yet merged */
    RBI_BLOCK_LIVE,     /* in use */
    RBI_BLOCK_DEFERRED, /* freed in a scope younger than it; counted as live till the commit */
    RBI_BLOCK_PENDING,  /* freed, but another stream's work may still use it */
    RBI_BLOCK_HELD,     /* for the moment out of all lists */
    RBI_BLOCK_HOLE,     /* addresses without memory, in a bin */
    RBI_BLOCK_LOST      /* quarantined: the device did not unmap it */
};

/* What is left of a page can only be used where it is, so one block keeps up to two pages from
 * where they are needed. Each size class has ranges of its own, so that a small long-lived block
 * does not pin a page among large ones, whose few ends leave few parts of pages. */
enum rbi_zone { RBI_ZONE_SMALL, RBI_ZONE_MEDIUM, RBI_ZONE_LARGE, RBI_ZONE_ANY };
#define RBI_POOL_ZONES 3
#define RBI_ZONE_ISOLATED 4u /* added for a search: also blocks between two holes */

/* A piece of a range; the first line of the cache holds all that a search and a merge look at.
 *   bytes % REBATCH_POOL_UNIT_BYTES == 0 && bytes > 0
 *   after == NULL || after->address == address + bytes && after->before == this
 *   free (or hole) && after free (or hole): after->lists != lists (else they would be one)
 *   in the pool's table == (live, deferred, quick or pending)
 *   live or deferred: previous->sequence < sequence < next->sequence
 *   free (or hole): *link == this, next == NULL || next->link == &next, bin == that of bytes
 *   bins == &lists->bins[lists->has_zones ? range->zone : 0]
 *   hole, lost: address and bytes are multiples of the page */
struct rbi_block {
    _Alignas(RBI_LINE_BYTES) char *address;
    size_t bytes;
    struct rbi_bins *bins;            /* of its lists and zone */
    struct rbi_block *before, *after; /* neighbours in the range */
    struct rbi_block *next; /* free, hole: its bin; quick: its list; pending: the pending list; live
                               and deferred: all by sequence, which is a ring */
    union {
        struct rbi_block **link;    /* free, hole: where it is pointed to from */
        struct rbi_block *previous; /* live, deferred */
    };
    uint16_t bin; /* free, hole: its place among the bins */
    rebatch_tag tag;
    uint8_t state;        /* enum rbi_block_state */
    bool late;            /* quick, pending: a rollback took it back, nobody has had it since */
    bool used;            /* other streams use it */
    uint8_t outside : 1;  /* live, deferred: of no scope */
    uint8_t resident : 7; /* live, deferred: whose; 0: see rbi_scope_commit_resident() */

    uint64_t sequence; /* number of the allocation; scopes compare it with their own beginning. When
                       not in use: pool->sequence when it was freed last */
    union {
        size_t requested_bytes; /* live, deferred */
        uint64_t freed_at;      /* otherwise when it was freed; 0: no work has touched it */
    };
    struct rbi_lists *lists; /* whose it is, in use or free */
    struct rbi_range *range;
    struct rbi_block *next_deferred; /* deferred: the scope's list */
    struct rbi_block *same_home;     /* in the table: its list there */
    uint32_t phase;                  /* of a plan, the one in which it was allocated */
    uint32_t call;                   /* and by which of its calls */
    bool planned; /* live, deferred: it lies in the plan's arena, and not in its range */
};
_Static_assert(sizeof(struct rbi_block) == 128, "two lines of the cache");

/* An address range, tiled by blocks: reserved addresses with memory mapped to some, or one plain
 * allocation of the device.
 *   sum of block->bytes == bytes
 *   map == NULL || memory is mapped just where blocks other than holes lie */
struct rbi_range {
    struct rbi_range *previous, *next; /* in order of creation */
    char *address;
    size_t bytes;
    struct rbi_block *first;
    struct rbi_map *map; /* NULL: a plain allocation */
    uint8_t zone;        /* enum rbi_zone: for which blocks it is */
    bool is_arena;       /* nobody else has blocks at its addresses (graph_arena.c) */
    bool is_kept;        /* nor may its free memory be used elsewhere */
    bool is_shared;      /* nor moved: other processes may have it (export.c) */
    uint64_t number;     /* of its creation: ties between ranges break by it, as the device's
                            addresses need not be the same in every run */
};

/* Free blocks by class, those of one class the last freed first.
 *   words[i / 64] bit i % 64 == (of[i] != NULL); filled bit w == (words[w] != 0) */
struct rbi_bins {
    uint64_t filled;
    uint64_t words[RBI_POOL_BIN_WORDS];
    struct rbi_block *of[RBI_POOL_BINS];
    struct rbi_block **nowhere; /* written in a next block's place where there is none */
};

/* Free blocks of one size, the last freed first. */
struct rbi_quick {
    size_t bytes;
    struct rbi_block *newest;
};

#include "pool/heap/table.h" /* which links blocks */

/* The free blocks of one owner: those that one stream may have, or the holes.
 *   free_bytes == sum of bytes over its free and quick blocks
 *   quick_filled[i / 64] bit i % 64 == (quick[i].newest != NULL); of the first RBI_POOL_QUICK
 *   list i has the blocks of i + 1 units: small_bytes is their sum */
struct rbi_lists {
    uint64_t free_bytes;
    uint64_t small_bytes;
    uint64_t quick_filled[2];
    uint32_t misses; /* requests since the quick lists served one, up to RBI_POOL_MISSES */
    uint32_t merged; /* frees merged at once since then */
    bool has_zones;  /* false: all its blocks are in the first one's bins */
    struct rbi_quick quick[2 * RBI_POOL_QUICK];
    struct rbi_bins bins[RBI_POOL_ZONES];
};

/* All blocks, free or in use.
 *   holes: the lists of addresses without memory */
struct rbi_block_heap {
    size_t page_bytes;
    struct rbi_nodes block_nodes, range_nodes;
    struct rbi_range *first_range, *last_range;
    uint64_t ranges_made;
    struct rbi_lists *holes;
    struct rbi_table table; /* of the blocks that have been given out, and are not merged yet */
    struct rbi_late late;
};

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
    rbi_assert(bin < RBI_POOL_BINS && block->bytes > 0);
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

static inline void rbi_lists_add(struct rbi_block *block)
{
    rbi_bin_add(block);
    block->lists->free_bytes += block->bytes;
}

static inline void rbi_lists_remove(struct rbi_block *block)
{
    rbi_assert(block->lists->free_bytes >= block->bytes);
    block->lists->free_bytes -= block->bytes;
    rbi_bin_remove(block);
}

/* ---- cutting and merging ---- */

/* Puts `part` in a block's place in front of it, or behind it. */
static inline void rbi_block_insert(struct rbi_block *part, struct rbi_block *block, bool behind)
{
    rbi_assert(part->range == block->range && part != block);
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
static inline struct rbi_block *rbi_block_cut(struct rbi_block_heap *heap, struct rbi_block *block,
                                              size_t bytes, bool off_end)
{
    rbi_assert(bytes > 0 && bytes < block->bytes);
    struct rbi_block *part = rbi_nodes_take_as_is(&heap->block_nodes);
    part->bytes = bytes;
    part->bins = block->bins;
    part->lists = block->lists;
    part->range = block->range;
    part->sequence = block->sequence;
    part->freed_at = block->freed_at;
    part->state = block->state;
    part->late = part->used = false;
    block->bytes -= bytes;
    part->address = block->address + (off_end ? block->bytes : 0);
    block->address += off_end ? 0 : bytes;
    rbi_block_insert(part, block, off_end);
    return part;
}

static inline void rbi_block_discard(struct rbi_block_heap *heap, struct rbi_block *block)
{
    rbi_nodes_put(&heap->block_nodes, block);
}

static inline void rbi_block_note_use(struct rbi_block *block, const struct rbi_block *other)
{
    block->freed_at = block->freed_at < other->freed_at ? other->freed_at : block->freed_at;
    block->sequence = block->sequence < other->sequence ? other->sequence : block->sequence;
}

/* Makes a block and the one after it one; in no list, or in a bin that is then updated. */
static inline void rbi_block_take_in_after(struct rbi_block_heap *heap, struct rbi_block *left)
{
    struct rbi_block *right = left->after;
    rbi_assert(right->range == left->range && right->address == left->address + left->bytes);
    left->bytes += right->bytes;
    rbi_block_note_use(left, right);
    left->after = right->after;
    if (left->after)
        left->after->before = left;
    rbi_block_discard(heap, right);
}

/* The same the other way round: the one after it stays in its bin. */
static inline void rbi_block_give_in_to_after(struct rbi_block_heap *heap, struct rbi_block *left)
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
    rbi_block_discard(heap, left);
}

static inline bool rbi_block_is_free_of(const struct rbi_block *block, uint8_t state,
                                        const struct rbi_bins *bins)
{
    return block && block->state == state && block->bins == bins;
}

/* Puts a block in no list into its bin, merged with its neighbours: gives the one that it is then
 * part of. */
static inline struct rbi_block *rbi_block_coalesce(struct rbi_block_heap *heap,
                                                   struct rbi_block *block, uint8_t state)
{
    rbi_assert(state == RBI_BLOCK_FREE || state == RBI_BLOCK_HOLE);
    rbi_assert((state == RBI_BLOCK_HOLE) == (block->lists == heap->holes));
    struct rbi_bins *const bins = block->bins;
    struct rbi_block *const before = block->before;
    struct rbi_block *const after = block->after;
    block->lists->free_bytes += block->bytes;
    const bool joins_after = rbi_block_is_free_of(after, state, bins);
    if (rbi_block_is_free_of(before, state, bins)) {
        if (joins_after) {
            rbi_bin_remove(after);
            rbi_block_take_in_after(heap, block);
        }
        rbi_block_take_in_after(heap, before);
        rbi_bin_update(before);
        return before;
    }
    if (joins_after) {
        rbi_block_give_in_to_after(heap, block);
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
 * of pages on both sides, so it is better unmapped and its pages used elsewhere. For a very large
 * one two parts of pages are little beside what moving it costs. */
static inline bool rbi_block_is_isolated(const struct rbi_block *block)
{
    return block->bytes < RBI_ISOLATED_MOST_BYTES && rbi_block_is_hole(block->before) &&
           rbi_block_is_hole(block->after);
}

/* Of a block that is larger than asked for the end is taken where that leaves more pages whole:
 * what is left of a page can only be used where it is. */
static inline bool rbi_block_leaves_more_from_end(const struct rbi_block_heap *heap,
                                                  const struct rbi_block *block, size_t bytes)
{
    const size_t mask = heap->page_bytes - 1;
    const size_t first = (size_t)(block->address - block->range->address);
    const size_t last = first + block->bytes;
    const size_t from_start = (last & ~mask) - ((first + bytes + mask) & ~mask);
    const size_t from_end = ((last - bytes) & ~mask) - ((first + mask) & ~mask);
    return (ptrdiff_t)from_end > (ptrdiff_t)from_start;
}

/* Beside a hole it is cut at the other end. */
static inline bool rbi_block_gives_end(const struct rbi_block_heap *heap,
                                       const struct rbi_block *block, size_t bytes)
{
    const bool hole_before = rbi_block_is_hole(block->before);
    if (hole_before != rbi_block_is_hole(block->after))
        return hole_before;
    return block->bytes - bytes >= heap->page_bytes &&
           rbi_block_leaves_more_from_end(heap, block, bytes);
}

/* Takes `bytes` of a block out of its bin; of its lists still. Needs one spare node. */
static inline struct rbi_block *rbi_block_take(struct rbi_block_heap *heap, struct rbi_block *block,
                                               size_t bytes)
{
    rbi_assert(block->state == RBI_BLOCK_FREE || block->state == RBI_BLOCK_HOLE);
    rbi_assert(bytes > 0 && bytes <= block->bytes && block->lists->free_bytes >= bytes);
    const size_t rest = block->bytes - bytes;
    block->lists->free_bytes -= bytes;
    if (rest == 0) {
        rbi_bin_remove(block);
    } else {
        const bool off_end = rbi_block_gives_end(heap, block, bytes);
        struct rbi_block *part = rbi_block_cut(heap, block, bytes, off_end);
        rbi_bin_update(block);
        block = part;
    }
    block->state = RBI_BLOCK_HELD;
    return block;
}

/* ---- the search ---- */

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

/* rbi_lists_find() where all blocks may be had. */
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

static inline struct rbi_block *rbi_quick_pop_from(struct rbi_lists *lists, unsigned slot,
                                                   size_t bytes)
{
    struct rbi_quick *quick = &lists->quick[slot];
    struct rbi_block *block = quick->newest;
    if (!block || quick->bytes != bytes)
        return NULL;
    rbi_assert(block->state == RBI_BLOCK_QUICK && block->bytes == bytes && block->lists == lists);
    rbi_assert(lists->free_bytes >= bytes);
    quick->newest = block->next;
    const uint64_t empty = quick->newest == NULL;
    lists->quick_filled[slot / 64] &= ~(empty << slot % 64);
    lists->free_bytes -= bytes;
    if (slot < RBI_POOL_QUICK)
        lists->small_bytes -= bytes;
    else
        lists->misses = 0;
    return block;
}

/* A block of exactly `bytes` that was freed before; NULL: none. Whether it is small comes first:
 * that is known before anything is read, so a wrong guess of the processor's is found early. */
static inline struct rbi_block *rbi_quick_pop(struct rbi_lists *lists, size_t bytes)
{
    if (rbi_quick_is_small(bytes))
        return rbi_quick_pop_from(lists, rbi_quick_slot(bytes), bytes);
    return lists->quick_filled[1] ? rbi_quick_pop_from(lists, rbi_quick_slot(bytes), bytes) : NULL;
}

static inline void rbi_quick_push(struct rbi_block *block)
{
    struct rbi_lists *lists = block->lists;
    const unsigned slot = rbi_quick_slot(block->bytes);
    struct rbi_quick *quick = &lists->quick[slot];
    block->state = RBI_BLOCK_QUICK;
    lists->free_bytes += block->bytes;
    if (slot < RBI_POOL_QUICK) {
        lists->small_bytes += block->bytes;
    }
    rbi_assert(!quick->newest || quick->bytes == block->bytes);
    block->next = quick->newest;
    quick->newest = block;
    quick->bytes = block->bytes;
    lists->quick_filled[slot / 64] |= UINT64_C(1) << slot % 64;
}

/* Is it in the table? */
static inline bool rbi_block_is_listed(const struct rbi_block *block)
{
    return block->state >= RBI_BLOCK_QUICK && block->state <= RBI_BLOCK_PENDING;
}

/* A block can be found by its address from here on. */
static inline void rbi_block_list(struct rbi_block_heap *heap, struct rbi_block *block)
{
    if (RBI_UNLIKELY(heap->late.count != 0))
        rbi_late_remove(&heap->late, block->address);
    rbi_table_put(&heap->table, block);
}

/* Merges a block in no list that is still in the table with its neighbours. */
static inline void rbi_block_merge(struct rbi_block_heap *heap, struct rbi_block *block)
{
    rbi_table_remove(&heap->table, block);
    if (RBI_UNLIKELY(block->late)) {
        rbi_late_add(&heap->late, block->address);
        block->late = false;
    }
    (void)rbi_block_coalesce(heap, block, RBI_BLOCK_FREE);
}

/* Whether a block goes into a quick list when it is freed, where no other size has the list. Late
 * blocks are not merged as they are rolled back, for that takes one line of the cache a block
 * instead of several. */
static inline bool rbi_block_wants_quick(const struct rbi_block *block)
{
    const struct rbi_lists *lists = block->lists;
    if (rbi_quick_is_small(block->bytes))
        return lists->small_bytes + block->bytes <= RBI_POOL_SMALL_MOST || block->late;
    const struct rbi_quick *quick = &lists->quick[rbi_quick_slot(block->bytes)];
    return (lists->misses < RBI_POOL_MISSES || block->late) &&
           (!quick->newest || quick->bytes == block->bytes);
}

/* The last step of a free where no other stream is in the way. */
static inline void rbi_block_cache(struct rbi_block_heap *heap, struct rbi_block *block)
{
    struct rbi_lists *const lists = block->lists;
    if (rbi_block_wants_quick(block)) {
        rbi_quick_push(block);
        return;
    }
    if (++lists->merged == RBI_POOL_MERGES)
        lists->misses = lists->merged = 0;
    rbi_block_merge(heap, block);
}

/* ---- finding free blocks (blocks.c) ---- */

/* A free block of at least `bytes` that was freed no later than `ready`. Looks at up to eight of
 * the smallest class that can have one and of the next, and takes of those the smallest, of these
 * the one of the oldest range, then of the lowest address. NULL only when there is none. `zone` is
 * of enum rbi_zone. */
struct rbi_block *rbi_lists_find(const struct rbi_lists *lists, size_t bytes, uint64_t ready,
                                 unsigned zone);
/* The blocks of the first zone's bins, in the order of their classes; NULL at the end. */
struct rbi_block *rbi_lists_first(const struct rbi_lists *lists);
struct rbi_block *rbi_lists_next(const struct rbi_block *block);
uint64_t rbi_lists_largest_bytes(const struct rbi_lists *lists);
/* Merges quick blocks with their neighbours: those of large sizes, or all. */
void rbi_lists_flush_large(struct rbi_block_heap *heap, struct rbi_lists *lists);
void rbi_lists_flush(struct rbi_block_heap *heap, struct rbi_lists *lists);

/* ---- blocks and ranges (blocks.c) ---- */

/* False when the host has no memory. Close it in any case. */
bool rbi_blocks_open(struct rbi_block_heap *heap, size_t page_bytes, struct rbi_lists *holes);
void rbi_blocks_close(struct rbi_block_heap *heap);
/* Makes sure of `count` spare nodes for blocks; false when the host has no memory for them. */
bool rbi_blocks_prepare(struct rbi_block_heap *heap, size_t count);
/* Adds a range that is one block, in no list. Needs a spare node of each kind. */
struct rbi_range *rbi_blocks_add_range(struct rbi_block_heap *heap, void *address, size_t bytes,
                                       struct rbi_lists *lists, uint8_t zone);
/* The same without the block. */
struct rbi_range *rbi_blocks_add_empty(struct rbi_block_heap *heap, void *address, size_t bytes,
                                       uint8_t zone);
/* Removes a range whose blocks are all free. */
void rbi_blocks_remove_range(struct rbi_block_heap *heap, struct rbi_range *range);
/* A node for a part of `range`, in no list. */
struct rbi_block *rbi_block_make(struct rbi_block_heap *heap, struct rbi_range *range,
                                 char *address, size_t bytes, struct rbi_lists *lists);
/* Cuts a block that is in no list; gives the part behind `bytes`, which is in none either and of
 * the same state. Needs one spare node. */
struct rbi_block *rbi_block_split(struct rbi_block_heap *heap, struct rbi_block *block,
                                  size_t bytes);
/* A block in no list changes hands. */
void rbi_block_give(struct rbi_block *block, struct rbi_lists *lists);
/* Takes `bytes` of a free block out of its bin for `lists`; needs one spare node. */
struct rbi_block *rbi_block_take_for(struct rbi_block_heap *heap, struct rbi_block *block,
                                     size_t bytes, struct rbi_lists *lists);
/* Puts a block that is in no list among the free ones of its lists; it merges with its neighbours.
 * Gives the block that it then is part of. */
struct rbi_block *rbi_block_put(struct rbi_block_heap *heap, struct rbi_block *block);
/* The block that `address` lies in; NULL when none. For messages: it walks. */
struct rbi_block *rbi_block_around(const struct rbi_block_heap *heap, const void *address);

#endif
