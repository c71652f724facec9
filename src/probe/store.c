/* Owns the file of what probes have found, which libconfig reads and writes.
 * Must not know sessions, or how a size was found. */
#include <errno.h>
#include <inttypes.h>
#include <libconfig.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "probe/saved.h"

#define HEADER "# rebatch: what probes have found\n"
#define LIST "results"
#define BYTES_MOST ((size_t)1 << 20)

/* X(member of a result); an entry has them beside its key and a checksum. */
#define MEMBERS(X) X(size) X(peak_bytes) X(too_large) X(room_bytes)

/* FNV-1a of the key and the numbers. */
static uint64_t checksum(const char *key, const struct rbi_store_result *result)
{
    char numbers[128];
    struct rbi_text t = {numbers, sizeof numbers, 0};
#define ADD(member) rbi_text_add(&t, " %" PRIu64, result->member);
    MEMBERS(ADD)
    const char *const parts[] = {key, numbers};
    uint64_t sum = 0xcbf29ce484222325;
    for (size_t i = 0; i < 2; i++)
        for (const char *at = parts[i]; *at; at++)
            sum = (sum ^ (unsigned char)*at) * 0x100000001b3;
    return sum;
}

/* False when it is none, or damaged. */
static bool read_entry(struct rbi_store_result *out, const char **key,
                       const config_setting_t *entry)
{
    long long sum, number;
#define READ(member)                                                                               \
    if (!config_setting_lookup_int64(entry, #member, &number))                                     \
        return false;                                                                              \
    out->member = (uint64_t)number;
    MEMBERS(READ)
    return config_setting_lookup_string(entry, "key", key) &&
           config_setting_lookup_int64(entry, "sum", &sum) && (uint64_t)sum == checksum(*key, out);
}

/* Not by libconfig's config_write(), a name that a program may have for a function of its own. */
static void print_entry(FILE *stream, const char *key, const struct rbi_store_result *result)
{
    char text[8192];
    struct rbi_text t = {text, sizeof text, 0};
    rbi_text_add(&t, "{ key = \"");
    for (const char *c = key; *c; c++)
        rbi_text_add(&t, *c == '"' || *c == '\\' || (unsigned char)*c < ' ' ? "\\x%02x" : "%c",
                     (unsigned char)*c);
    rbi_text_add(&t, "\";");
#define PRINT(member) rbi_text_add(&t, " " #member " = %" PRId64 "L;", (int64_t)result->member);
    MEMBERS(PRINT)
    rbi_text_add(&t, " sum = %" PRId64 "L; }", (int64_t)checksum(key, result));
    rbi_assert(t.length < t.size);
    (void)fputs(text, stream);
}

/* The tree stays empty where there is no file, and where it begins otherwise than ours do. */
static rebatch_status read_tree(config_t *tree, const char *path)
{
    struct stat about;
    if (stat(path, &about) != 0)
        return errno == ENOENT
                   ? REBATCH_OK
                   : rbi_error(REBATCH_E_IO, "%.200s cannot be read: %s", path, strerror(errno));
    if (!S_ISREG(about.st_mode)) /* a pipe would be waited for */
        return rbi_error(REBATCH_E_IO, "%.200s is no regular file", path);
    char *text;
    size_t length;
    rebatch_status status = rbi_file_read(&text, &length, path, BYTES_MOST);
    if (status || length == 0) {
        rbi_heap_free(text);
        return status;
    }
    if (strncmp(text, HEADER, sizeof HEADER - 1) != 0)
        status = rbi_error(REBATCH_E_PARSE,
                           "%.200s has no results of probes in it: it is left alone", path);
    else if (!config_read_string(tree, text))
        status = rbi_error(REBATCH_E_PARSE, "%.200s:%d: %s: it is left alone", path,
                           config_error_line(tree), config_error_text(tree));
    rbi_heap_free(text);
    return status;
}

/* NULL: there is none. */
static const config_setting_t *list_of(const config_t *tree)
{
    const config_setting_t *list = config_lookup(tree, LIST);
    return list && config_setting_is_list(list) ? list : NULL;
}

rebatch_status rbi_store_find(struct rbi_store_result *out, const char *path, const char *key)
{
    config_t tree;
    *out = (struct rbi_store_result){0};
    config_init(&tree);
    rebatch_status status = read_tree(&tree, path);
    const config_setting_t *list = status ? NULL : list_of(&tree);
    const int count = list ? config_setting_length(list) : 0;
    for (int i = 0; i < count; i++) {
        const config_setting_t *entry = config_setting_get_elem(list, (unsigned)i);
        struct rbi_store_result result;
        const char *its_key;
        if (!read_entry(&result, &its_key, entry))
            status = rbi_error(REBATCH_E_PARSE, "%.200s:%u: a damaged entry is not believed", path,
                               config_setting_source_line(entry));
        else if (strcmp(its_key, key) == 0)
            *out = result;
    }
    config_destroy(&tree);
    return status;
}

/* Of the list what is good and of other keys, and the new entry last, so that the first are the
 * oldest. */
static void print_all(FILE *stream, const config_setting_t *list, const char *key,
                      const struct rbi_store_result *result)
{
    const int count = list ? config_setting_length(list) : 0;
    (void)fputs(HEADER LIST " = (\n", stream);
    for (int i = rbi_max(count, RBI_STORE_ENTRIES - 1) - (RBI_STORE_ENTRIES - 1); i < count; i++) {
        struct rbi_store_result other;
        const char *its_key;
        if (!read_entry(&other, &its_key, config_setting_get_elem(list, (unsigned)i)) ||
            strcmp(its_key, key) == 0)
            continue;
        print_entry(stream, its_key, &other);
        (void)fputs(",\n", stream);
    }
    print_entry(stream, key, result);
    (void)fputs("\n);\n", stream);
}

/* Writes beside the file and renames, so that whatever happens the old one is there or the new. */
static rebatch_status write_file(const char *path, const config_setting_t *list, const char *key,
                                 const struct rbi_store_result *result)
{
    char beside[PATH_MAX];
    (void)snprintf(beside, sizeof beside, "%s.XXXXXX", path);
    const int file = mkstemp(beside);
    FILE *stream = file < 0 ? NULL : fdopen(file, "w");
    if (stream) {
        print_all(stream, list, key, result);
        const bool is_written = fflush(stream) == 0 && !ferror(stream) && fsync(file) == 0;
        (void)fchmod(file, 0644);
        (void)fclose(stream);
        if (is_written && rename(beside, path) == 0)
            return REBATCH_OK;
    }
    const rebatch_status status =
        rbi_error(REBATCH_E_IO, "%.200s cannot be written: %s", path, strerror(errno));
    if (file >= 0)
        (void)unlink(beside);
    return status;
}

rebatch_status rbi_store_put(const char *path, const char *key,
                             const struct rbi_store_result *result)
{
    config_t tree;
    config_init(&tree);
    rebatch_status status = read_tree(&tree, path);
    if (!status)
        status = write_file(path, list_of(&tree), key, result);
    config_destroy(&tree);
    return status;
}
