/* Owns the library that a program is started with, librebatch_wrap.so: where it is, and how the
 * program comes to load it. Must not know what the library does. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/child.h"

#define LIBRARY "librebatch_wrap.so"

/* Beside the command, as after make, or in the folder of libraries beside the command's, as after
 * make install, or in one of its own there, as packages have it. LD_PRELOAD has no way to name a
 * path with a space or a colon. */
static bool find_library(char path[PATH_MAX])
{
    static const char *const places[] = {"/" LIBRARY, "/../lib/" LIBRARY,
                                         "/../lib/rebatch/" LIBRARY};
    char folder[PATH_MAX];
    const ssize_t length = readlink("/proc/self/exe", folder, sizeof folder - 1);
    if (length <= 0)
        return false;
    folder[length] = '\0';
    char *const slash = strrchr(folder, '/');
    if (!slash)
        return false;
    *slash = '\0';
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        char place[2 * PATH_MAX];
        (void)snprintf(place, sizeof place, "%s%s", folder, places[i]);
        if (realpath(place, path) && !strpbrk(path, " :"))
            return true;
    }
    return false;
}

/* Whether LD_PRELOAD names the library already, as in a `rebatch run` within another one. */
static bool is_named(const char *list, const char *path)
{
    const size_t length = strlen(path);
    for (const char *at = list; (at = strstr(at, path)); at += length)
        if ((at == list || strchr(" :", at[-1])) && strchr(" :", at[length]))
            return true;
    return false;
}

/* Its runtime as a shared library ends a program in which another one comes first. It needs to be
 * first only before what it takes itself, which the library does not. */
static bool allow_address_sanitizer(void)
{
    static const char option[] = "verify_asan_link_order=0";
    const char *const before = getenv("ASAN_OPTIONS");
    char *options;
    if (asprintf(&options, "%s%s%s", before ? before : "", before && before[0] ? ":" : "", option) <
        0)
        return false;
    const bool is_set =
        (before && strstr(before, option)) || rbi_child_set("ASAN_OPTIONS", options);
    free(options);
    return is_set;
}

bool rbi_child_preload(void)
{
    char path[PATH_MAX];
    const char *const before = getenv("LD_PRELOAD");
    if (!find_library(path) || !allow_address_sanitizer())
        return false;
    if (!before || before[0] == '\0')
        return rbi_child_set("LD_PRELOAD", path);
    if (is_named(before, path))
        return true;
    char *list;
    if (asprintf(&list, "%s:%s", before, path) < 0)
        return false;
    const bool is_set = rbi_child_set("LD_PRELOAD", list);
    free(list);
    return is_set;
}
