/* Owns the status table and the thread's error sentence.
 * Must not know what the errors are about. */
#include <stdarg.h>
#include <stdio.h>

#include "base/base.h"
#include "rebatch/version.h"

#define ERROR_BYTES 512

static _Thread_local char error_text[ERROR_BYTES];
static _Thread_local rebatch_status error_status;
static _Thread_local uint64_t error_changes;

rebatch_status rbi_error(rebatch_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(error_text, sizeof error_text, format, arguments);
    va_end(arguments);
    error_status = status;
    error_changes++;
    return status;
}

const char *rebatch_last_error(void)
{
    return error_text;
}

void rebatch_clear_error(void)
{
    error_text[0] = '\0';
    error_status = REBATCH_OK;
    error_changes++;
}

rebatch_status rebatch_last_status(void)
{
    return error_status;
}

uint64_t rbi_error_changes(void)
{
    return error_changes;
}

/* Whether it is a callback's own; an int below 0 is not. */
static bool is_own(rebatch_status status)
{
    return status >= REBATCH_E_USER && status <= REBATCH_STATUS_MAX_;
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
        return is_own(status) ? "REBATCH_E_USER" : "REBATCH_E_UNKNOWN";
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
        return is_own(status) ? "a status of the callback's own" : "no such status";
    }
}

const char *rebatch_version(void)
{
    return REBATCH_VERSION;
}
