/** @file status.h
 *  Status codes, and the message of the last error. */
#ifndef REBATCH_STATUS_H
#define REBATCH_STATUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** Exports a function from the shared library. */
#if defined(__GNUC__)
#define REBATCH_API __attribute__((visibility("default")))
#else
#define REBATCH_API
#endif

/** The same for a function whose status must not be ignored: its result is not there, a step did
 *  not happen, or a state is not guarded. The compiler warns. */
#if defined(__GNUC__)
#define REBATCH_API_CHECKED REBATCH_API __attribute__((warn_unused_result))
#else
#define REBATCH_API_CHECKED REBATCH_API
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
    X(E_PARSE, 12, "a file or a variable of the environment has a mistake in it")                  \
    X(E_PEER, 13, "another rank failed or is missing")

/** The result of a call that can fail. A callback may also return a number of its own, from
 *  REBATCH_E_USER to INT_MAX: rebatch_step() passes it through unchanged. Any other number,
 *  negative ones included, is not a status. */
typedef enum rebatch_status {
#define REBATCH_STATUS_ENUM_(name, number, text) REBATCH_##name = number,
    REBATCH_STATUSES(REBATCH_STATUS_ENUM_)
#undef REBATCH_STATUS_ENUM_
        REBATCH_E_USER = 1000, /**< the first number that is free for callbacks */
    REBATCH_STATUS_MAX_ = 0x7fffffff
} rebatch_status;

/** A switch in an options struct: zero selects the default. */
typedef enum rebatch_toggle {
    REBATCH_DEFAULT = 0, /**< the option's default */
    REBATCH_ON = 1,      /**< on */
    REBATCH_OFF = 2      /**< off */
} rebatch_toggle;

#ifdef __cplusplus
extern "C" {
#endif

/** The name of a status as C has it, for example "REBATCH_E_TORN". Thread-safe.
 *  @param status  any number
 *  @return a static string; "REBATCH_E_USER" for a callback's own number, "REBATCH_E_UNKNOWN" for a
 *          number that is not a status */
REBATCH_API const char *rebatch_status_name(rebatch_status status);

/** The meaning of a status in a few words. Thread-safe.
 *  @param status  any number
 *  @return a static string */
REBATCH_API const char *rebatch_status_text(rebatch_status status);

/** The error message of the last call that failed in this thread: one sentence with the wrong
 *  value, what was expected, and where.
 *
 *  When a callback ends a step, the message is the one that the callback's own failed call left,
 *  if that call had the status that the callback returned; otherwise it names the callback and the
 *  status. A callback that reports its errors elsewhere calls rebatch_clear_error() before it
 *  returns; the message then stays empty.
 *  @return a string owned by the library, valid until the next failed call of this thread or
 *          rebatch_clear_error(); "" when no call has failed */
REBATCH_API const char *rebatch_last_error(void);

/** The status of the call that left rebatch_last_error(), in this thread.
 *  @return the status; REBATCH_OK when no call has failed, and after rebatch_clear_error() */
REBATCH_API rebatch_status rebatch_last_status(void);

/** Clear this thread's error message. */
REBATCH_API void rebatch_clear_error(void);

#ifdef __cplusplus
}
#endif
#endif
