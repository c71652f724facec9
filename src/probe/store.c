/* Owns the file of what probes have found: a line of text for each result.
 * Must not know sessions, or how a size was found. */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "probe/saved.h"

#define HEADER "# rebatch: what probes have found\n"
#define BYTES_MOST ((size_t)1 << 20)
#define KEY_BYTES 8192

struct line {
    char *text; /* "CHECKSUM SIZE TOO_LARGE ROOM_BYTES KEY" */
    const char *key;
    struct rbi_store_result result;
};

/* Keys stand in the file without line breaks. */
static void write_key(char text[static KEY_BYTES], const char *key)
{
    struct rbi_text t = {text, KEY_BYTES, 0};
    for (const char *c = key; *c; c++)
        rbi_text_add(&t, *c == '\\' || (unsigned char)*c < ' ' ? "\\x%02x" : "%c",
                     (unsigned char)*c);
    rbi_assert(t.length < t.size);
}

/* FNV-1a of the rest of the line. */
static uint64_t checksum(const char *rest)
{
    uint64_t sum = 0xcbf29ce484222325;
    for (const char *at = rest; *at; at++)
        sum = (sum ^ (unsigned char)*at) * 0x100000001b3;
    return sum;
}

/* The next line of the text; false at its end. A damaged line has no key. */
static bool next_line(struct line *line, char **text)
{
    char *at;
    if (**text == '\0')
        return false;
    *line = (struct line){.text = *text};
    *text += strcspn(*text, "\n");
    if (**text)
        *(*text)++ = '\0';
    const uint64_t sum = strtoull(line->text, &at, 16);
    if (*at != ' ' || sum != checksum(at + 1))
        return true;
    line->result.size = strtoull(at, &at, 10);
    line->result.too_large = strtoull(at, &at, 10);
    line->result.room_bytes = strtoull(at, &at, 10);
    line->key = at + (*at == ' ');
    return true;
}

/* The lines after the first one: *lines is "" where there is no file. The heap's is *text. */
static rebatch_status read_lines(char **text, char **lines, const char *path)
{
    static char none[] = "";
    struct stat about;
    size_t length;
    *text = NULL;
    *lines = none;
    if (stat(path, &about) != 0)
        return errno == ENOENT
                   ? REBATCH_OK
                   : rbi_error(REBATCH_E_IO, "%.200s cannot be read: %s", path, strerror(errno));
    if (!S_ISREG(about.st_mode)) /* a pipe would be waited for */
        return rbi_error(REBATCH_E_IO, "%.200s is no regular file", path);
    const rebatch_status status = rbi_file_read(text, &length, path, BYTES_MOST);
    if (status || length == 0)
        return status;
    if (strncmp(*text, HEADER, sizeof HEADER - 1) != 0)
        return rbi_error(REBATCH_E_PARSE, "%.200s has no results of probes in it: it is left alone",
                         path);
    *lines = *text + sizeof HEADER - 1;
    return REBATCH_OK;
}

rebatch_status rbi_store_find(struct rbi_store_result *out, const char *path, const char *key)
{
    char own[KEY_BYTES], *text, *lines;
    struct line line;
    *out = (struct rbi_store_result){0};
    write_key(own, key);
    rebatch_status status = read_lines(&text, &lines, path);
    for (unsigned number = 2; next_line(&line, &lines); number++) {
        if (!line.key)
            status = rbi_error(REBATCH_E_PARSE, "%.200s:%u: a damaged entry is not believed", path,
                               number);
        else if (strcmp(line.key, own) == 0)
            *out = line.result;
    }
    rbi_heap_free(text);
    return status;
}

/* Of the lines what is good and of other keys, and the new one last, so that the first are the
 * oldest. */
static void print_all(FILE *stream, char *lines, const char *key,
                      const struct rbi_store_result *result)
{
    char rest[KEY_BYTES + 64] = "", sum[20] = "";
    size_t count = 1;
    struct line line;
    for (const char *at = lines; *at; at++)
        count += *at == '\n';
    (void)fputs(HEADER, stream);
    for (; next_line(&line, &lines); count--)
        if (count <= RBI_STORE_ENTRIES && line.key && strcmp(line.key, key) != 0) {
            (void)fputs(line.text, stream);
            (void)fputs("\n", stream);
        }
    rbi_text_add(&(struct rbi_text){rest, sizeof rest, 0}, "%" PRIu64 " %" PRIu64 " %" PRIu64 " %s",
                 result->size, result->too_large, result->room_bytes, key);
    rbi_text_add(&(struct rbi_text){sum, sizeof sum, 0}, "%016" PRIx64 " ", checksum(rest));
    (void)fputs(sum, stream);
    (void)fputs(rest, stream);
    (void)fputs("\n", stream);
}

/* Writes beside the file and renames, so that whatever happens the old one is there or the new. */
static rebatch_status write_file(const char *path, char *lines, const char *key,
                                 const struct rbi_store_result *result)
{
    char beside[PATH_MAX];
    (void)snprintf(beside, sizeof beside, "%s.XXXXXX", path);
    const int file = mkstemp(beside);
    FILE *stream = file < 0 ? NULL : fdopen(file, "w");
    if (stream) {
        print_all(stream, lines, key, result);
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
    char own[KEY_BYTES], *text, *lines;
    write_key(own, key);
    rebatch_status status = read_lines(&text, &lines, path);
    if (!status)
        status = write_file(path, lines, own, result);
    rbi_heap_free(text);
    return status;
}
