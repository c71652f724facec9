/* Owns the reading of numbers from the command line. Must not know what they are for. */
#include "gpt/parse.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

bool gpt_parse_count(size_t *out, const char *name, const char *text, size_t least)
{
    char *end;
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    if (text[0] >= '0' && text[0] <= '9' && *end == '\0' && errno == 0 && value >= least &&
        value <= SIZE_MAX) {
        *out = (size_t)value;
        return true;
    }
    fprintf(stderr, "gpt: --%s is \"%s\": expected a number from %zu\n", name, text, least);
    return false;
}

bool gpt_parse_float(float *out, const char *name, const char *text)
{
    char *end;
    errno = 0;
    const float value = strtof(text, &end);
    if (end != text && *end == '\0' && errno == 0) {
        *out = value;
        return true;
    }
    fprintf(stderr, "gpt: --%s is \"%s\": expected a number\n", name, text);
    return false;
}
