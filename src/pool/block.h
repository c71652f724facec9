/* Blocks, the ranges they tile, and what one stream has of them.
 * Must not know how they are found. */
#ifndef RBI_POOL_BLOCK_H
#define RBI_POOL_BLOCK_H

#include "device/device.h"
#include "rebatch/pool.h"

#define RBI_POOL_CLASS_BITS 5
#define RBI_POOL_CLASSES (1 << RBI_POOL_CLASS_BITS) /* an octave of units */
#define RBI_POOL_BIN_WORDS 28                       /* of 64 classes: two octaves each */
#define RBI_POOL_BINS (RBI_POOL_BIN_WORDS * 64)
#define RBI_POOL_QUICK 64 /* quick lists of small sizes; as many more */

struct rbi_bins;
struct rbi_map;
struct rbi_range;
struct rbi_pool_stream;

enum rbi_block_state {
    RBI_BLOCK_FREE,     /* in a bin of its stream */
    RBI_BLOCK_QUICK,    /* free, and in a quick list of its stream: not yet merged */
    RBI_BLOCK_LIVE,     /* in use */
    RBI_BLOCK_DEFERRED, /* freed in a scope younger than it; counted as live till the commit */
    RBI_BLOCK_PENDING,  /* freed, but another stream's work may still use it */
    RBI_BLOCK_HELD,     /* for the moment out of all lists */
    RBI_BLOCK_HOLE,     /* addresses without memory, in a bin of pool->space */
    RBI_BLOCK_GUARD,    /* the gap behind a block in use of a guarding pool */
    RBI_BLOCK_LOST      /* quarantined: the device did not unmap it */
};

/* What is left of a page can only be used where it is, so one block keeps up to two pages
 * from where they are needed. Blocks of like sizes lie among themselves: a small one that outlives
 * large neighbours would keep a page for itself, and where large ones are there are only a few
 * ends of blocks to leave parts of pages. */
enum rbi_zone { RBI_ZONE_SMALL, RBI_ZONE_MEDIUM, RBI_ZONE_LARGE, RBI_ZONE_ANY };
#define RBI_POOL_ZONES 3
#define RBI_ZONE_ISOLATED 4u    /* added for a search: also blocks between two holes */
#define RBI_ZONE_SMALL_PARTS 64 /* small: less than this part of a page */
#define RBI_ZONE_LARGE_PAGES 8  /* large: at least so many pages */

/* Another stream that uses a block, from rebatch_pool_use_on(). */
struct rbi_block_use {
    struct rbi_block_use *next;
    struct rbi_pool_stream *stream;
    uint64_t until; /* of a pending block: done when stream->done >= until */
};

/* A piece of a range; the first line of the cache holds all that a search and a merge look at.
 *   bytes % REBATCH_POOL_UNIT_BYTES == 0 && bytes > 0
 *   after == NULL || after->address == address + bytes && after->before == this
 *   free (or hole) && after free (or hole): after->stream != stream (else they would be one)
 *   in the pool's table == (live, deferred, quick or pending)
 *   live or deferred: previous->sequence < sequence < next->sequence
 *   free (or hole): *link == this, next == NULL || next->link == &next, bin == that of bytes
 *   used == (uses != NULL); bins == &stream->bins[stream->has_zones ? range->zone : 0]
 *   hole, lost: address and bytes are multiples of the page */
struct rbi_block {
    _Alignas(RBI_LINE_BYTES) char *address;
    size_t bytes;
    struct rbi_bins *bins;            /* of its stream and zone */
    struct rbi_block *before, *after; /* neighbours in the range */
    struct rbi_block *next; /* free, hole: its bin; quick: its list; pending: the pending list; live
                               and deferred: all by sequence, which is a ring */
    union {
        struct rbi_block **link;    /* free, hole: where it is pointed to from */
        struct rbi_block *previous; /* live, deferred */
    };
    uint16_t bin; /* free, hole: its place among the bins */
    rebatch_tag tag;
    uint8_t state; /* enum rbi_block_state */
    bool late;     /* quick, pending: a rollback took it back, nobody has had it since */
    bool used;     /* other streams use it */
    bool outside;  /* live, deferred: of no scope */

    uint64_t sequence; /* number of the allocation; scopes compare it with their own beginning. When
                       not in use: pool->sequence when it was freed last */
    union {
        size_t requested_bytes; /* live, deferred */
        uint64_t freed_at;      /* otherwise stream->frees then; 0: no work has touched it */
    };
    struct rbi_pool_stream *stream; /* the one it was allocated for, or was last free on */
    struct rbi_range *range;
    struct rbi_block_use *uses;
    struct rbi_block *next_deferred; /* deferred: the scope's list */
    struct rbi_block *same_home;     /* in the table: its list there */
    uint32_t phase;                  /* of a plan, the one in which it was allocated */
    uint32_t call : 31;              /* and by which of its calls */
    uint32_t planned : 1; /* live, deferred: it lies in the plan's arena, and not in its range */
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

/* An event that stands at a point of a stream's work. */
struct rbi_mark {
    rbi_event event; /* NULL: none yet, or none to be had */
    uint64_t point;
};
#define RBI_STREAM_MARKS 8

/* What one stream has in the pool. `frees` numbers the points in its work at which blocks were
 * freed; whatever was enqueued before point `done` has completed. The marks under way are a ring,
 * from first_mark on.
 *   done < marks[first_mark].point < the next one's < ... <= frees
 *   free_bytes == sum of bytes over its free and quick blocks
 *   quick_filled[i / 64] bit i % 64 == (quick[i].newest != NULL); of the first RBI_POOL_QUICK
 *   list i
 *   has the blocks of i + 1 units: small_bytes is their sum
 *   pins == requests under way for it + uses that name it */
struct rbi_pool_stream {
    struct rbi_pool_stream *next; /* in order of first use */
    rebatch_stream stream;
    uint64_t free_bytes;
    uint64_t small_bytes;
    uint64_t quick_filled[2];
    struct rbi_block *loose; /* quick blocks of which another size has the list */
    uint32_t misses;         /* requests since the quick lists served one, up to RBI_POOL_MISSES */
    uint32_t merged;         /* frees merged at once since then */
    uint64_t frees, done;
    uint64_t next_mark; /* the free with which a mark is due; UINT64_MAX: nobody asks */
    uint64_t pins;
    uint64_t looked;   /* pool->looks when it was last looked at */
    uint32_t mark_gap; /* frees from one mark to the next */
    uint32_t first_mark, mark_count;
    bool has_zones; /* false: all its blocks are in the first one's bins */
    struct rbi_mark marks[RBI_STREAM_MARKS];
    struct rbi_quick quick[2 * RBI_POOL_QUICK];
    struct rbi_bins bins[RBI_POOL_ZONES];
};

#endif
