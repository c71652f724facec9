/* Owns what the machine says of its memory, and the control group in which the process runs.
 * Must not know what the memory is for. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"

#define PATH_BYTES 1024 /* of a control group; the stacks of threads may be small */

/* Without the host heap: it is asked while an OOM is handled. Text that is longer is cut. */
static bool read_text(char *text, size_t size, const char *path)
{
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return false;
    const ssize_t length = read(file, text, size - 1);
    (void)close(file);
    text[length > 0 ? length : 0] = '\0';
    return length > 0;
}

/* The number behind a label; UINT64_MAX: none, as where the file says "max". */
static uint64_t number_in(const char *folder, const char *file, const char *label)
{
    char path[PATH_BYTES + 64], text[2048];
    (void)snprintf(path, sizeof path, "%s/%s", folder, file);
    const char *const found = read_text(text, sizeof text, path) ? strstr(text, label) : NULL;
    const char *digits = found ? found + strlen(label) : "";
    digits += strspn(digits, " ");
    return *digits >= '0' && *digits <= '9' ? strtoull(digits, NULL, 10) : UINT64_MAX;
}

/* Version 2 has one tree, version 1 one for memory. */
static const struct {
    const char *line, *tree, *limit, *used, *cache;
} versions[] = {
    {":memory:/", "/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
     "\ntotal_inactive_file "},
    {"0::/", "", "memory.max", "memory.current", "\ninactive_file "},
};

/* What a group may still take; its files in memory are given up for that. */
static uint64_t group_free(const char *folder, size_t version)
{
    const uint64_t limit = number_in(folder, versions[version].limit, "");
    const uint64_t used = number_in(folder, versions[version].used, "");
    const uint64_t cache = number_in(folder, "memory.stat", versions[version].cache);
    if (limit == UINT64_MAX || used == UINT64_MAX)
        return UINT64_MAX;
    const uint64_t taken = cache < used ? used - cache : used;
    return taken < limit ? limit - taken : 0;
}

/* The group is in groups that may have limits too. In a container without a namespace of groups its
 * path leads nowhere: then the root, which is the container's. */
uint64_t rbi_cgroup_free_bytes(const char *root, const char *self)
{
    char text[2048], folder[PATH_BYTES];
    uint64_t least = UINT64_MAX;
    if (!read_text(text, sizeof text, self))
        return least;
    for (size_t version = 0; version < sizeof versions / sizeof *versions; version++) {
        const char *const line = strstr(text, versions[version].line);
        if (!line)
            continue;
        const char *const path = line + strlen(versions[version].line) - 1;
        const int top = snprintf(folder, sizeof folder, "%s%s", root, versions[version].tree);
        const int length = (int)strcspn(path, "\n");
        if (top < 0 || top + length >= (int)sizeof folder)
            continue;
        (void)snprintf(folder + top, sizeof folder - (size_t)top, "%.*s", length, path);
        for (char *end = folder + top + length; end; end = strrchr(folder + top, '/')) {
            *end = '\0';
            least = rbi_min(least, group_free(folder, version));
        }
    }
    return least;
}

size_t rbi_host_free_bytes(void)
{
    const uint64_t kib = number_in("/proc", "meminfo", "MemAvailable:");
    const uint64_t machine = kib == UINT64_MAX ? 0 : kib << 10;
    return (size_t)rbi_min(machine, rbi_cgroup_free_bytes("/sys/fs/cgroup", "/proc/self/cgroup"));
}
