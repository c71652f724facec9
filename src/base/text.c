/* Owns the writing of texts for people into a caller's buffer.
 * Must not know what they say. */
#include <inttypes.h>
#include <stdio.h>

#include "base/base.h"

void rbi_text_add_v(struct rbi_text *t, const char *format, va_list arguments)
{
    char *at = t->length < t->size ? t->text + t->length : NULL;
    const size_t left = at ? t->size - t->length : 0;
    const int length = vsnprintf(at, left, format, arguments);
    if (length > 0)
        t->length += (size_t)length;
}

void rbi_text_add(struct rbi_text *t, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    rbi_text_add_v(t, format, arguments);
    va_end(arguments);
}

void rbi_text_add_bytes(struct rbi_text *t, uint64_t bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    if (bytes < 1024) {
        rbi_text_add(t, "%" PRIu64 " B", bytes);
        return;
    }
    double value = (double)bytes;
    size_t unit = 0;
    while (value >= 1023.5) { /* so that rounding never shows "1024 KiB" */
        value /= 1024;
        unit++;
    }
    rbi_text_add(t, "%.*f %s", value < 9.995 ? 2 : value < 99.95 ? 1 : 0, value, units[unit]);
}
