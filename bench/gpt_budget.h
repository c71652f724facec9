/* Where the time of a step goes: a table of operations that runs another one's and notes when each
 * began and ended on the device. Must not know what the operations do. */
#ifndef REBATCH_BENCH_GPT_BUDGET_H
#define REBATCH_BENCH_GPT_BUDGET_H

#include "gpt/ops.h"

/* The operations of a GPU, timed. There is one such table; it is for one thread. */
const struct gpt_ops *budget_ops(const struct gpt_ops *inner);

/* Forgets what was noted. */
void budget_clear(void);

/* Waits for the device and prints the time of each kind of operation since budget_clear(), longest
 * first, divided by `steps`.
 *  @param tokens  of a step */
void budget_print(size_t steps, size_t tokens);

#endif
