/* Numbers from the command line. Must not know what they are for. */
#ifndef GPT_PARSE_H
#define GPT_PARSE_H

#include <stdbool.h>
#include <stddef.h>

/* What option `name` says; false, with a sentence on standard error, when that is no number or too
 * small. */
bool gpt_parse_count(size_t *out, const char *name, const char *text, size_t least);
bool gpt_parse_float(float *out, const char *name, const char *text);

#endif
