/* Owns the writing of texts for people into a caller's buffer.
 * Must not know what they say. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

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

/* How many bytes the character at `at` has, of `left`; 0 for a control character and for what is no
 * UTF-8 (RFC 3629). */
static size_t printable(const unsigned char *at, size_t left)
{
    if (at[0] < 0x80)
        return at[0] >= 0x20 && at[0] != 0x7f;
    const size_t length = at[0] >= 0xf0 ? 4 : at[0] >= 0xe0 ? 3 : 2;
    if (at[0] < 0xc2 || at[0] > 0xf4 || length > left)
        return 0;
    for (size_t i = 1; i < length; i++)
        if ((at[i] & 0xc0) != 0x80)
            return 0;
    /* By the first two bytes: control characters, too long a form, surrogates, too large. */
    const bool is_none = (at[0] == 0xc2 && at[1] < 0xa0) || (at[0] == 0xe0 && at[1] < 0xa0) ||
                         (at[0] == 0xed && at[1] >= 0xa0) || (at[0] == 0xf0 && at[1] < 0x90) ||
                         (at[0] == 0xf4 && at[1] >= 0x90);
    return is_none ? 0 : length;
}

void rbi_text_add_shown(struct rbi_text *t, const char *text, size_t length, size_t most)
{
    const size_t end = t->length + most;
    for (size_t i = 0; i < length;) {
        const unsigned char *at = (const unsigned char *)text + i;
        const size_t bytes = printable(at, length - i);
        if (t->length + (bytes ? bytes : sizeof "\\xNN" - 1) > end) {
            rbi_text_add(t, "...");
            return;
        }
        if (bytes)
            rbi_text_add(t, "%.*s", (int)bytes, text + i);
        else
            rbi_text_add(t, "\\x%02x", at[0]);
        i += bytes ? bytes : 1;
    }
}

void rbi_text_add_path(struct rbi_text *t, const char *path)
{
    const size_t length = strlen(path);
    const size_t most = 120; /* the end of a path says more than its beginning */
    size_t from = length > most ? length - most : 0;
    while (from > 0 && ((unsigned char)path[from] & 0xc0) == 0x80)
        from++;
    rbi_text_add(t, "%s", from > 0 ? "..." : "");
    rbi_text_add_shown(t, path + from, length - from, most);
}

void rbi_text_add_json(struct rbi_text *t, const char *text)
{
    const size_t length = strlen(text);
    rbi_text_add(t, "\"");
    for (size_t i = 0; i < length;) {
        const unsigned char *at = (const unsigned char *)text + i;
        const size_t bytes = printable(at, length - i);
        if (*at == '"' || *at == '\\')
            rbi_text_add(t, "\\%c", *at);
        else if (bytes)
            rbi_text_add(t, "%.*s", (int)bytes, text + i);
        else
            rbi_text_add(t, "\\u%04x", *at < 0x80 ? *at : 0xfffdu);
        i += bytes ? bytes : 1;
    }
    rbi_text_add(t, "\"");
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
