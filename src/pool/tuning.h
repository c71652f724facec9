/* The pool's constants that trade one thing for another. Behind "halved" and "doubled" stands what
 * moved when each was tried: "smallest" is the smallest device in which a trace runs, of its peak;
 * ms are those of the driver's calls; "short" is bench/short, "events" bench/events at a lag, in
 * calls for 1,000 pairs on a warm pool (docs/benchmarks.md).
 * Includes nothing, so that every part of the pool may include it. */
#ifndef RBI_POOL_TUNING_H
#define RBI_POOL_TUNING_H

/* ---- chunks (vm): driver calls, for parts of chunks that blocks keep ---- */

/* A chunk is at most this part of the request. Halved: accumulation smallest 1.020 -> 1.032;
 * doubled: short, cap of 20 GiB, 91 -> 125 ms. */
#define RBI_CHUNK_PARTS_OF_REQUEST 4
/* And this part of what the device could still give. Halved: vit-checkpointed smallest 1.013 ->
 * 1.018; doubled: vit-checkpointed first pass at 1.10 157 -> 222 ms. */
#define RBI_CHUNK_PARTS_OF_ROOM 128
/* And at most this many pages. Halved: short, 64 samples with plenty, 191 -> 228 ms; doubled: churn
 * smallest 1.032 -> 1.045. */
#define RBI_CHUNK_ORDINARY_MOST 16
/* Where there is plenty, a pool that grows takes this part of what it holds at once. Halved:
 * vit-checkpointed 97.2 -> 96.4 % live / reserved; doubled: gpt2 first pass 69 -> 83 ms. */
#define RBI_CHUNK_PARTS_OF_HELD 128
/* Up to this part of the room. Halved: accumulation smallest 1.020 -> 1.027; doubled: two-streams
 * first pass at 1.02 139 -> 155 ms. */
#define RBI_CHUNK_PARTS_OF_PLENTY 2048
/* And at most this many pages. Halved: churn first pass 513 -> 729 ms; doubled: churn 94.5 -> 93.3
 * % live / reserved. */
#define RBI_CHUNK_GROWTH_MOST 32
/* A request of 16 GiB and more comes in some hundred chunks all the same. Halved: short, 64
 * samples with plenty, 193 -> 162 ms; doubled: nothing. */
#define RBI_CHUNK_PARTS_OF_HUGE 256
/* Memory that will be used as a whole comes in chunks of this part of it. Halved or doubled:
 * short, 1.01 of what 4 samples need, 43 -> 48 ms. */
#define RBI_CHUNK_PARTS_OF_AHEAD 16
/* log2 of the pages of the largest chunk of host memory: the driver takes some 6 ms for 32 MiB, a
 * bound on what is made too much. */
#define RBI_OVERFLOW_LARGEST 4

/* ---- when the pool is warm, and what it holds then (limits.c): memory, for driver calls ---- */

/* Live memory rises when it is this part above its highest. Halved: events at 100 90 -> 143;
 * doubled: events at 50 69 -> 129. */
#define RBI_WARM_RISE_PARTS 8
/* Warm after this many times the allocations at the last rise. Halved: events at 50 69 -> 109;
 * doubled: events at 100 90 -> 123. */
#define RBI_WARM_TIMES 8
/* And this many more. Halved: short, 1.01 of what 2 samples need, 52 -> 13 ms, events at 50 69 ->
 * 153; doubled: 69 -> 101. */
#define RBI_WARM_ALLOCATIONS 16384
/* A warm pool holds this part more than its peak rather than move pages. Halved: accumulation 97.6
 * -> 97.0 % live / reserved; doubled: gpt2 first pass 69 -> 100 ms. */
#define RBI_HELD_BEYOND_PEAK_PARTS 32
/* And this part of what it has moved since, so that a program whose calls never repeat pays with
 * memory in the end. Halved: events at 20 157 -> 95, with 68 for 75 %
 * live / reserved; doubled: at 100 90 -> 265. */
#define RBI_HELD_FOR_MOVED_PARTS 64
/* Beyond this part of the peak, and TOO_MUCH_PAGES, memory is held for nothing: it is planned for,
 * and given back once a plan serves. With a 16th and 16 pages a Step of a small model kept up to
 * 1.055 of its peak on GPUs, and 1.044 on the stand-in at lags of 1 and 3 ms, as the comparison of
 * two cuts takes fresh pages; with these 1.014 and 1.038. Halved: short 500, the first 8 steps of
 * all rows, 830 -> 751 ms; doubled: -> 810. No later step differs. */
#define RBI_TOO_MUCH_PARTS 32
/* A bound: a pool of a few pages does not plan for nothing, which takes host memory. */
#define RBI_TOO_MUCH_PAGES 4
/* Default of keep_room_permille. Halved: nothing; doubled: short, 16 samples in 1.05, 96 -> 108
 * ms. */
#define RBI_POOL_KEEP_ROOM 20

/* ---- where blocks lie (heap, placement.c, range.c, search.c): time, for parts of pages ---- */

/* How many blocks of a class are looked at: bounded best fit. Halved: accumulation third pass at
 * 1.02 0 -> 30 ms; doubled: nothing but events. */
#define RBI_POOL_LOOKS 8
/* How many holes are looked at for a window. Halved: churn smallest 1.0326 -> 1.0337; doubled:
 * churn first pass 513 -> 495 ms. */
#define RBI_WINDOW_LOOKS 64
/* Blocks below this part of a page are small. Halved: resnet50 98.7 -> 98.3 % live / reserved;
 * doubled: accumulation smallest 1.0200 -> 1.0224. */
#define RBI_ZONE_SMALL_PARTS 64
/* Blocks of this many pages are large. Halved: gpt2 smallest 1.0114 -> 1.0127; doubled:
 * accumulation smallest 1.0200 -> 1.0228. */
#define RBI_ZONE_LARGE_PAGES 8
/* A block between holes is cut all the same from this size on, as a plan's memory leaves it.
 * Without the bound short with memory taken has 88 ms instead of 26. */
#define RBI_ISOLATED_MOST_BYTES ((size_t)2 << 30)
/* The most pages that addresses are reserved for at once, 512 GiB on CUDA devices. A bound: no
 * trace comes near it. */
#define RBI_RESERVED_MOST ((size_t)1 << 18)
/* This many times what could be mapped. Halved: nothing; a quarter: churn smallest 1.0326 ->
 * 1.0341, vit-checkpointed third pass at 1.02 84 -> 99 ms, short, 64 samples with plenty, 95 -> 128
 * ms. */
#define RBI_RESERVED_TIMES 4
/* On a device without pages requests of less than half of this part of what the pool holds share
 * a segment of it. Halved: accumulation 95.6 -> 90.5 % live / reserved on such a device; doubled:
 * gpt2 91.1 -> 90.4, vit-checkpointed 88.9 -> 78.4 %. Without it gpt2 has 90.7, resnet50 87.6, and
 * accumulation 88.4 %. */
#define RBI_SHARED_PARTS_OF_HELD 16
/* And of at least this many pages. Halved: vit-checkpointed 88.9 -> 85.3 %; doubled: resnet50 92.2
 * -> 87.1 %. */
#define RBI_SHARED_PAGES 4

/* ---- quick lists, table and lock (heap, lock.c): time alone ---- */

/* Sizes of 1 to QUICK units have a quick list each; the larger ones share as many. Fixed: the
 * lists that have blocks are the bits of a word. */
#define RBI_POOL_QUICK 64
/* This many bytes of small blocks are kept unmerged by each stream. Halved: events at 50 69 ->
 * 98; doubled: nothing. */
#define RBI_POOL_SMALL_MOST ((size_t)4 << 20)
/* After this many requests that the lists of large sizes did not serve, blocks are merged as they
 * are freed. Halved: vit-checkpointed smallest 1.013 -> 1.015; doubled: its third pass at 1.02 84
 * -> 92 ms. */
#define RBI_POOL_MISSES 16
/* After this many of those the lists have another try. Halved: gpt2 third pass at 1.02 57 -> 81 ms;
 * doubled: vit-checkpointed smallest 1.013 -> 1.015. */
#define RBI_POOL_MERGES 1024
/* Heads of the table for each block: a bound on the length of lists, most of which have one block
 * at most. */
#define RBI_TABLE_HEADS_A_BLOCK 2
/* Tries of the lock before a system call: a bound, most holders are done before. */
#define RBI_LOCK_SPINS 256

/* ---- events (streams.c): driver calls, for memory that is not known to be free ---- */

/* Frees from one event to the next at first. Halved: events at 50 69 -> 205; doubled: 69 -> 133. */
#define RBI_EVENT_LEAST_GAP 12
/* And at most, each time twice as many. Halved: events at 100 90 -> 165; doubled: at 200 114 ->
 * 231. */
#define RBI_EVENT_MOST_GAP 512
/* The free of a block that other streams use counts as this many. Halved: events at 200 114 -> 210;
 * doubled: at 50 69 -> 134. */
#define RBI_EVENT_FREES_A_USE 16

/* ---- plans (plan.c, plan/layout.c): memory and time, for moved pages ---- */

/* A plan fails after more than MOVES_MOST phases in a row for which more than half as many pages
 * were moved as in a phase without it. Halved: short, 16 samples in 1.02, 108 -> 237 ms; doubled:
 * nothing. */
#define RBI_PLAN_MOVES_MOST 4
/* From the second plan that fails on the key is served without one for REST_PHASES phases, twice as
 * many each time, up to DOUBLINGS_MOST times, until one has served SERVED_ENOUGH phases. Bounds on
 * what plans for calls that do not repeat may cost, and on how often the host waits for an arena
 * that is not to be had: no trace moves when they are a quarter or four times as large. With a rest
 * after the first one, GPT-2 held 1.11 times what it used on a GPU from the comparison of two cuts
 * on, which moves pages in five steps; without it 1.004. */
#define RBI_PLAN_REST_PHASES 64
#define RBI_PLAN_SERVED_ENOUGH 8u
#define RBI_PLAN_DOUBLINGS_MOST 6
/* A plan is made anew after this many phases in a row with other calls: a bound, one may be an
 * exception. */
#define RBI_PLAN_MISSES_MOST 2
/* A layout is good enough when it takes less than this part more than the most in use at once. A
 * bound on the time of planning. */
#define RBI_LAYOUT_LOST_PARTS 256
/* How often the block that ends highest is placed first: vit-checkpointed takes 1.011 of its peak
 * instead of 1.022 with it, and with 16 no trace gains more. */
#define RBI_LAYOUT_RETRIES 16
/* For at most this many blocks, as the time of each grows with their square: a bound on the time of
 * planning. */
#define RBI_LAYOUT_RETRIES_OF_BLOCKS 5000

#endif
