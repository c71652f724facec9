/** @file version.h
 *  The version of headers and library.
 *
 *  The three numbers stand here only: the Makefile and rebatch.pc read them from this file.
 *
 *  A struct that the library fills changes only with the shared library's soname: with the major
 *  version, and before 1.0 with the minor version. So a program never runs with a library whose
 *  structs differ from those that it was compiled with. Structs that the caller fills have a
 *  struct_size, and may grow with any version, but for rebatch_pool_options, which lies within
 *  rebatch_options. */
#ifndef REBATCH_VERSION_H
#define REBATCH_VERSION_H

#include "rebatch/status.h"

/** Major version; the number in the shared library's soname, before 1.0 together with the minor. */
#define REBATCH_VERSION_MAJOR 0
/** Minor version. */
#define REBATCH_VERSION_MINOR 2
/** Patch level. */
#define REBATCH_VERSION_PATCH 0

/** @cond internal */
#define REBATCH_VERSION_TEXT_(a, b, c) #a "." #b "." #c
#define REBATCH_VERSION_TEXT(a, b, c) REBATCH_VERSION_TEXT_(a, b, c)
/** @endcond */

/** The version of the headers as text: "0.2.0". */
#define REBATCH_VERSION                                                                            \
    REBATCH_VERSION_TEXT(REBATCH_VERSION_MAJOR, REBATCH_VERSION_MINOR, REBATCH_VERSION_PATCH)

#ifdef __cplusplus
extern "C" {
#endif

/** The version of the linked library, which may differ from REBATCH_VERSION. Thread-safe.
 *  @return a static string */
REBATCH_API const char *rebatch_version(void);

#ifdef __cplusplus
}
#endif
#endif
