/* Statuses with a sentence, for the reference model: the library's own sentences come from
 * rebatch_last_error(). Must not know what failed. */
#ifndef GPT_ERROR_H
#define GPT_ERROR_H

#include "rebatch/status.h"

/* Sets this thread's sentence and gives `status` back: a fault is said once, where it is found. */
rebatch_status gpt_error(rebatch_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* The sentence of this thread's last failure, ours or the library's; "" when there was none. */
const char *gpt_last_error(void);

#endif
