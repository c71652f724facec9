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

/* How many threads share the work, the calling one included. */
size_t gpt_parallel_threads(void);

/* Changes that number, from 1 to GPT_THREADS_MOST; 0 goes back to the default: the environment's
 * GPT_THREADS, else the processors that this process may use, at most GPT_THREADS_DEFAULT_MOST.
 * REBATCH_E_INVALID when the number, or GPT_THREADS, is none; REBATCH_E_STATE while work runs. */
rebatch_status gpt_parallel_set_threads(size_t threads);

#endif
