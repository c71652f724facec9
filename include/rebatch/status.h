/** @file status.h
 *  What a call answers, and the sentence behind it. */
#ifndef REBATCH_STATUS_H
#define REBATCH_STATUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define REBATCH_API __attribute__((visibility("default")))
#else
#define REBATCH_API
#endif

/** Every status: X(name, number, what it means). Numbers never change; new ones are appended. */
#define REBATCH_STATUSES(X)                                                                        \
    X(OK, 0, "success")                                                                            \
    X(OOM, 1, "out of device memory")                                                              \
    X(E_INVALID, 2, "an argument is wrong")                                                        \
    X(E_STATE, 3, "the call is not allowed at this point")                                         \
    X(E_HOST_OOM, 4, "out of host memory")                                                         \
    X(E_EXHAUSTED, 5, "out of device memory, and nothing is left to try")                          \
    X(E_TORN, 6, "the optimizer ran out of memory after it had begun to change parameters")        \
    X(E_DEVICE, 7, "the device reported an error")                                                 \
    X(E_DEVICE_LOST, 8, "the device is lost; the process must be restarted")                       \
    X(E_NO_DEVICE, 9, "there is no such device")                                                   \
    X(E_UNSUPPORTED, 10, "not supported here")                                                     \
    X(E_IO, 11, "a file could not be read or written")                                             \
    X(E_PARSE, 12, "a file has a mistake in it")

/** The answer of every call that can fail. A callback may also answer with a number of its own
 *  from REBATCH_E_USER to the largest int: it is passed through unchanged. Any other number, those
 *  below 0 too, is none. */
typedef enum rebatch_status {
#define REBATCH_STATUS_ENUM_(name, number, text) REBATCH_##name = number,
    REBATCH_STATUSES(REBATCH_STATUS_ENUM_)
#undef REBATCH_STATUS_ENUM_
        REBATCH_E_USER = 1000, /**< the first number that is free for callbacks */
    REBATCH_STATUS_MAX_ = 0x7fffffff
} rebatch_status;

/** Off, on, or whatever the default is: zero means default in every options struct. */
typedef enum rebatch_toggle { REBATCH_DEFAULT = 0, REBATCH_ON = 1, REBATCH_OFF = 2 } rebatch_toggle;

#ifdef __cplusplus
extern "C" {
#endif

/** The name of a status as it stands in C, for example "REBATCH_E_TORN".
 *  @return a string that is never freed; "REBATCH_E_USER" for a callback's own number,
 *          "REBATCH_E_UNKNOWN" for a number that is none. Any thread. */
REBATCH_API const char *rebatch_status_name(rebatch_status status);

/** What a status means, in a few words.
 *  @return a string that is never freed. Any thread. */
REBATCH_API const char *rebatch_status_text(rebatch_status status);

/** One sentence about the last call of this thread that failed: the value, what was expected and
 *  where. When a callback ended a step it is the sentence behind the status that it answered, or
 *  says which callback answered what; one that calls rebatch_clear_error() before it answers leaves
 *  none, for a sentence of its own elsewhere. It stays until the next failure of this thread or
 *  rebatch_clear_error().
 *  @return a string owned by the library, "" when nothing failed yet; valid until then. */
REBATCH_API const char *rebatch_last_error(void);

/** Forget this thread's last error. */
REBATCH_API void rebatch_clear_error(void);

#ifdef __cplusplus
}
#endif
#endif
