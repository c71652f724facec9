/* The pool's constants that trade one thing for another, with what moves when one is halved or
 * doubled: "smallest" is the smallest device in which a trace runs, of its peak, and ms are those
 * of the driver (docs/benchmarks.md). Bounds that are promised stand in tests besides.
 * Includes nothing, so that every part of the pool may include it. */
#ifndef RBI_POOL_TUNING_H
#define RBI_POOL_TUNING_H

/* ---- chunks (vm): driver calls, for parts of chunks that blocks keep ---- */

/* A chunk is at most this part of the request. */
#define RBI_CHUNK_PARTS_OF_REQUEST 4
/* And at most this part of what the device could still give. */
#define RBI_CHUNK_PARTS_OF_ROOM 128
/* And at most so many pages. */
#define RBI_CHUNK_ORDINARY_MOST 16
/* Where there is plenty, a pool that grows takes this part of what it holds at once. */
#define RBI_CHUNK_PARTS_OF_HELD 128
/* Up to this part of the room. */
#define RBI_CHUNK_PARTS_OF_PLENTY 2048
/* And so many pages. */
#define RBI_CHUNK_GROWTH_MOST 32
/* A request of 16 GiB and more comes in at most so many chunks all the same. */
#define RBI_CHUNK_PARTS_OF_HUGE 256
/* Memory that will be used as a whole comes in chunks of this part of it. */
#define RBI_CHUNK_PARTS_OF_AHEAD 16
/* log2 of the pages of the largest chunk of host memory, which takes the driver some 6 ms. */
#define RBI_OVERFLOW_LARGEST 4

/* ---- when the pool is warm, and what it holds then (limits.c): memory, for driver calls ---- */

/* Live memory rises when it is this part above its highest. */
#define RBI_WARM_RISE_PARTS 8
/* Warm after so many times the allocations at the last rise, and so many more. */
#define RBI_WARM_TIMES 8
#define RBI_WARM_ALLOCATIONS 16384
/* A warm pool holds this part more than its peak rather than move pages. */
#define RBI_HELD_BEYOND_PEAK_PARTS 32
/* And this part of what it has moved since, so that a program whose calls never repeat pays with
 * memory in the end. */
#define RBI_HELD_FOR_MOVED_PARTS 64
/* Of what is free at most this part lies in parts of pages. */
#define RBI_PARTS_OF_PAGES 32
/* Beyond this part of the peak, and so many pages, memory is held for nothing. */
#define RBI_TOO_MUCH_PARTS 16
#define RBI_TOO_MUCH_PAGES 16
/* Default of keep_room_permille. */
#define RBI_POOL_KEEP_ROOM 20

/* ---- where blocks lie (heap, placement.c, range.c, search.c): time, for parts of pages ---- */

/* How many blocks of a class are looked at: bounded best fit. */
#define RBI_POOL_LOOKS 8
/* How many holes are looked at for a window. */
#define RBI_WINDOW_LOOKS 64
/* Blocks below this part of a page are small. */
#define RBI_ZONE_SMALL_PARTS 64
/* Blocks of so many pages are large. */
#define RBI_ZONE_LARGE_PAGES 8
/* A block between holes is cut all the same from this size on, as a plan's memory leaves it. */
#define RBI_ISOLATED_MOST_BYTES ((size_t)2 << 30)
/* The most pages that addresses are reserved for at once, 512 GiB on CUDA devices, and how often
 * what could be mapped. */
#define RBI_RESERVED_MOST ((size_t)1 << 18)
#define RBI_RESERVED_TIMES 4
/* On a device without pages requests of less than one share a segment of so many. */
#define RBI_SHARED_PAGES 4

/* ---- quick lists, table and lock (heap, lock.c): time alone ---- */

/* Sizes of 1 to so many units have a quick list each; the larger ones share as many. */
#define RBI_POOL_QUICK 64
/* So many bytes of small blocks are kept unmerged by each stream. */
#define RBI_POOL_SMALL_MOST ((size_t)4 << 20)
/* After so many requests that the lists of large sizes did not serve, blocks are merged as they are
 * freed; after so many of those the lists have another try. */
#define RBI_POOL_MISSES 16
#define RBI_POOL_MERGES 1024
/* Heads of the table for each block, so that most lists have one block at most. */
#define RBI_TABLE_HEADS_A_BLOCK 2
/* Tries of the lock before a system call: most holders are done before. */
#define RBI_LOCK_SPINS 256

/* ---- events of streams (streams.c): driver calls, for memory that is not known to be free ---- */

/* Frees from one event to the next: at first, and at most, each time twice as many. */
#define RBI_MARK_LEAST_GAP 16
#define RBI_MARK_MOST_GAP 512
/* The free of a block that other streams use counts as so many. */
#define RBI_MARK_FREES_A_USE 16

/* ---- plans (plan/, mark.c): memory and time, for moved pages ---- */

/* After so many plans in a row for which pages were moved the key rests for so many phases. */
#define RBI_PLAN_MOVES_MOST 4
#define RBI_PLAN_REST_PHASES 64
/* So many phases in a row with other calls are planned anew; one may be an exception. */
#define RBI_PLAN_MISSES_MOST 2
/* A plan has proved itself after so many phases; one that is dropped before lets its key rest,
 * twice as long each time, up to so often. */
#define RBI_PLAN_SERVED_ENOUGH 8u
#define RBI_PLAN_DOUBLINGS_MOST 6
/* What a proved plan needs, and this part more, stays. */
#define RBI_PLAN_KEPT_BESIDE_PARTS 64
/* A layout is good enough when it takes less than this part more than the most in use at once. */
#define RBI_LAYOUT_LOST_PARTS 256
/* How often the block that ends highest is placed first: so often, of so many blocks; of more less
 * often, since the time of each grows with their square. */
#define RBI_LAYOUT_TRIES_MOST 16
#define RBI_LAYOUT_TRIES_OF_BLOCKS 5000

#endif
