/* Owns the reference model's error sentence, one a thread.
 * Must not know what failed. */
#include "gpt/error.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char sentence[512];

rebatch_status gpt_error(rebatch_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    rebatch_clear_error(); /* so that whichever is not empty is the later one */
    return status;
}

const char *gpt_last_error(void)
{
    const char *theirs = rebatch_last_error();
    return theirs[0] ? theirs : sentence;
}
