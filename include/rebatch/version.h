/** @file version.h
 *  The version, in this one place: the Makefile and rebatch.pc read it from here. */
#ifndef REBATCH_VERSION_H
#define REBATCH_VERSION_H

#include "rebatch/status.h"

#define REBATCH_VERSION_MAJOR 0
#define REBATCH_VERSION_MINOR 1
#define REBATCH_VERSION_PATCH 0

#define REBATCH_VERSION_TEXT_(a, b, c) #a "." #b "." #c
#define REBATCH_VERSION_TEXT(a, b, c) REBATCH_VERSION_TEXT_(a, b, c)
/** The version of the headers, as text: "0.1.0". */
#define REBATCH_VERSION                                                                            \
    REBATCH_VERSION_TEXT(REBATCH_VERSION_MAJOR, REBATCH_VERSION_MINOR, REBATCH_VERSION_PATCH)

#ifdef __cplusplus
extern "C" {
#endif

/** The version of the library that is linked, which may differ from REBATCH_VERSION.
 *  @return a string that is never freed. Any thread. */
REBATCH_API const char *rebatch_version(void);

#ifdef __cplusplus
}
#endif
#endif
