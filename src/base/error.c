/* Owns the status table and the thread's error sentence.
 * Must not know what the errors are about. */
#include <stdarg.h>
#include <stdio.h>

#include "base/base.h"
#include "rebatch/version.h"

#define ERROR_BYTES 512

static _Thread_local char error_text[ERROR_BYTES];

rebatch_status rbi_error(rebatch_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(error_text, sizeof error_text, format, arguments);
    va_end(arguments);
    return status;
}

const char *rebatch_last_error(void)
{
    return error_text;
}

void rebatch_clear_error(void)
{
    error_text[0] = '\0';
}

const char *rebatch_status_name(rebatch_status status)
{
    switch (status) {
#define NAME_CASE(name, number, text)                                                              \
    case REBATCH_##name:                                                                           \
        return "REBATCH_" #name;
        REBATCH_STATUSES(NAME_CASE)
#undef NAME_CASE
    default:
        return status >= REBATCH_E_USER ? "REBATCH_E_USER" : "REBATCH_E_UNKNOWN";
    }
}

const char *rebatch_status_text(rebatch_status status)
{
    switch (status) {
#define TEXT_CASE(name, number, text)                                                              \
    case REBATCH_##name:                                                                           \
        return text;
        REBATCH_STATUSES(TEXT_CASE)
#undef TEXT_CASE
    default:
        return status >= REBATCH_E_USER ? "a status of the callback's own" : "no such status";
    }
}

const char *rebatch_version(void)
{
    return REBATCH_VERSION;
}
