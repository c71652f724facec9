/* Work on independent items, spread over a few threads that wait for it.
 * Must not know what an item is. */
#ifndef GPT_PARALLEL_H
#define GPT_PARALLEL_H

#include <stddef.h>

#include "rebatch/status.h"

#define GPT_THREADS_DEFAULT_MOST 8 /* without GPT_THREADS, however many processors there are */
#define GPT_THREADS_MOST 64

/* Works on items [begin, end). */
typedef void (*gpt_range_function)(size_t begin, size_t end, const void *user);

/* Calls `function` for ranges that make up [0, count), of at least `grain` items each (the last may
 * be smaller), in no particular order and in several threads; returns when all have run. Which
 * thread runs an item and where ranges are cut must not matter to the results. Calls from within,
 * or beside another one, run in the calling thread alone. */
void gpt_parallel_for(size_t count, size_t grain, gpt_range_function function, const void *user);

/* Decides how many threads share the work, the calling one included, unless that is decided: the
 * environment's GPT_THREADS, else the processors that this process may use, at most
 * GPT_THREADS_DEFAULT_MOST. REBATCH_E_INVALID when GPT_THREADS is no number from 1 to
 * GPT_THREADS_MOST; work is then done without it. */
rebatch_status gpt_parallel_prepare(void);

/* How many there are. */
size_t gpt_parallel_threads(void);

/* Decides it anew: 1 to GPT_THREADS_MOST, or 0 for what gpt_parallel_prepare() would. Waits until
 * no work is running. */
rebatch_status gpt_parallel_set_threads(size_t threads);

#endif
