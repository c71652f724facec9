/* Owns the text of a settings file with what it includes, and where each of its lines came from.
 * Must not know settings.
 *
 * libconfig 1.5, which Debian 12 and Ubuntu 24.04 have, cannot be told how to open what is
 * included (config_set_include_func() is of 1.7), leaves the process when that is a folder, takes
 * 99999999999 for 1215752191, and stumbles over a comment that ends with the file. So it is given
 * one text, in which includes are replaced by what they name, comments are left out, and whole
 * numbers are written as it reads them. */
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "config/settings.h"

#define TEXT_MOST ((size_t)1 << 20)
#define INCLUDE_DEPTH_MOST 10
#define NAME_MOST 1023
#define STRING_(number) #number
#define STRING(number) STRING_(number)
/* What a word or a number is made of. */
#define RUN_BYTES "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_*+-."

/* A file that is being read. */
struct frame {
    unsigned depth;
    uint32_t file; /* index into source->files */
    uint32_t line;
};

static struct rbi_shown shown_here(const struct rbi_source *s, const struct frame *f)
{
    rbi_assert(f->file < s->file_count && f->depth <= INCLUDE_DEPTH_MOST);
    const struct rbi_place place = {s->files[f->file], f->line, NULL};
    return rbi_shown_place(&place);
}

static rebatch_status no_memory(const char *path)
{
    return rbi_error(REBATCH_E_HOST_OOM, "no host memory to read %s", rbi_shown_path(path).text);
}

/* Keeps a copy of the path for as long as the source lives. */
static rebatch_status add_file(struct rbi_source *s, const char *path)
{
    char **files = rbi_heap_resize(s->files, s->file_count + 1, sizeof *files);
    if (!files)
        return no_memory(path);
    s->files = files;
    const size_t length = strlen(path);
    char *copy = rbi_heap_calloc(length + 1, 1);
    if (!copy)
        return no_memory(path);
    memcpy(copy, path, length);
    s->files[s->file_count++] = copy;
    return REBATCH_OK;
}

/* Says that what follows in the text begins in line f->line of that file. */
static rebatch_status begin_part(struct rbi_source *s, const struct frame *f)
{
    struct rbi_source_part *parts = rbi_heap_resize(s->parts, s->part_count + 1, sizeof *parts);
    if (!parts)
        return no_memory(s->files[0]);
    s->parts = parts;
    s->parts[s->part_count++] = (struct rbi_source_part){s->line, f->file, f->line};
    return REBATCH_OK;
}

static rebatch_status emit(struct rbi_source *s, const char *text, size_t length)
{
    if (length >= TEXT_MOST - s->length)
        return rbi_error(REBATCH_E_IO,
                         "%s is larger than %zu bytes, with what it includes: expected a file of "
                         "settings",
                         rbi_shown_path(s->files[0]).text, TEXT_MOST);
    if (s->room - s->length <= length) {
        const size_t room = rbi_max(s->room * 2, s->length + length + 1);
        char *grown = rbi_heap_resize(s->text, room, 1);
        if (!grown)
            return no_memory(s->files[0]);
        s->text = grown;
        s->room = room;
    }
    rbi_assert(s->length + length < s->room && s->room <= TEXT_MOST * 2);
    memcpy(s->text + s->length, text, length);
    s->length += length;
    s->text[s->length] = '\0';
    for (size_t i = 0; i < length; i++)
        s->line += text[i] == '\n';
    return REBATCH_OK;
}

/* ---- tokens ---- */

static bool is_comment(const char *at)
{
    return *at == '#' || (at[0] == '/' && (at[1] == '/' || at[1] == '*'));
}

static const char *text_end(const char *at)
{
    for (at++; *at && *at != '"'; at++)
        at += at[0] == '\\' && at[1];
    return at + (*at == '"');
}

/* The end of the comment, text, word, number or other byte that begins at `at`. */
static const char *token_end(const char *at)
{
    if (is_comment(at) && at[1] == '*') {
        const char *end = strstr(at + 2, "*/");
        return end ? end + 2 : at + strlen(at);
    }
    if (is_comment(at))
        return at + strcspn(at, "\n");
    if (*at == '"')
        return text_end(at);
    return at + rbi_max(strspn(at, RUN_BYTES), 1);
}

/* Nothing but the ends of its lines. */
static rebatch_status emit_comment(struct rbi_source *s, const struct frame *f, const char *at,
                                   size_t length)
{
    if (at[1] == '*' && (length < 4 || memcmp(at + length - 2, "*/", 2) != 0))
        return rbi_error(REBATCH_E_PARSE,
                         "%s: the comment that begins here never ends: expected */",
                         shown_here(s, f).text);
    rebatch_status status = emit(s, " ", 1);
    for (size_t i = 0; i < length && !status; i++)
        if (at[i] == '\n')
            status = emit(s, "\n", 1);
    return status;
}

/* libconfig 1.5 cuts off what is beyond 32 bits where there is no L, and later ones read a leading
 * zero as octal. */
static rebatch_status emit_run(struct rbi_source *s, const struct frame *f, const char *at,
                               size_t length)
{
    int64_t number;
    const enum rbi_integer integer = rbi_integer_parse(at, length, &number);
    if (integer == RBI_INTEGER_NONE)
        return emit(s, at, length);
    if (integer == RBI_INTEGER_TOO_LARGE)
        return rbi_error(REBATCH_E_PARSE, "%s: %s: expected a number from %" PRId64 " to %" PRId64,
                         shown_here(s, f).text, rbi_shown_text(at, length).text, INT64_MIN,
                         INT64_MAX);
    char text[32];
    struct rbi_text t = {text, sizeof text, 0};
    const bool is_long = number < INT32_MIN || number > INT32_MAX;
    rbi_text_add(&t, "%" PRId64 "%s", number, is_long ? "L" : "");
    return emit(s, text, t.length);
}

static rebatch_status read_file(struct rbi_source *s, const char *path, unsigned depth);

/* What the line names, in its place; *end is moved behind the name. A relative path starts where
 * the including file is. */
static rebatch_status include(struct rbi_source *s, const struct frame *f, const char *at,
                              const char **end)
{
    char name[NAME_MOST + 1], path[PATH_MAX];
    int length = 0;
    if (sscanf(at, "@include%*[ \t]\"%" STRING(NAME_MOST) "[^\"\n]\"%n", name, &length) != 1 ||
        length == 0)
        return rbi_error(REBATCH_E_PARSE, "%s: @ without a file: expected @include \"FILE\"",
                         shown_here(s, f).text);
    *end = at + length;
    if (f->depth == INCLUDE_DEPTH_MOST)
        return rbi_error(
            REBATCH_E_PARSE,
            "%s: @include \"%s\" is nested deeper than %d: does a file include itself?",
            shown_here(s, f).text, rbi_shown_text(name, strlen(name)).text, INCLUDE_DEPTH_MOST);
    const char *here = s->files[f->file];
    const char *slash = name[0] == '/' ? NULL : strrchr(here, '/');
    struct rbi_text t = {path, sizeof path, 0};
    rbi_text_add(&t, "%.*s%s", slash ? (int)(slash - here) + 1 : 0, here, name);
    rebatch_status status = read_file(s, path, f->depth + 1);
    if (!status)
        status = emit(s, "\n", 1);
    return status ? status : begin_part(s, f);
}

static rebatch_status scan(struct rbi_source *s, struct frame *f, const char *text)
{
    rebatch_status status = begin_part(s, f);
    for (const char *at = text, *end; *at && !status; at = end) {
        end = token_end(at);
        const size_t length = (size_t)(end - at);
        if (*at == '@')
            status = include(s, f, at, &end);
        else if (is_comment(at))
            status = emit_comment(s, f, at, length);
        else if (*at == '"')
            status = emit(s, at, length);
        else
            status = emit_run(s, f, at, length);
        for (; at < end; at++)
            f->line += *at == '\n';
    }
    return status;
}

/* ---- files ---- */

/* Says where a file is included that cannot be read. */
static rebatch_status read_bytes(struct rbi_source *s, char **bytes, const char *path)
{
    size_t length;
    const rebatch_status status = rbi_file_read(bytes, &length, path, TEXT_MOST);
    if (!status && memchr(*bytes, '\0', length))
        return rbi_error(REBATCH_E_PARSE, "%s has a zero byte: expected text",
                         rbi_shown_path(path).text);
    if (!status || s->part_count == 0)
        return status;
    char why[320];
    struct rbi_text t = {why, sizeof why, 0};
    const struct rbi_place place = rbi_source_place(s, s->line);
    rbi_text_add(&t, "%s", rebatch_last_error());
    return rbi_error(status, "%s: %s", rbi_shown_place(&place).text, why);
}

static rebatch_status read_file(struct rbi_source *s, const char *path, unsigned depth)
{
    char *bytes;
    rebatch_status status = read_bytes(s, &bytes, path);
    if (!status && depth > 0)
        status = emit(s, "\n", 1);
    if (!status)
        status = add_file(s, path);
    if (!status) {
        struct frame f = {depth, (uint32_t)(s->file_count - 1), 1};
        const bool has_mark = strncmp(bytes, "\xef\xbb\xbf", 3) == 0; /* before UTF-8 */
        status = scan(s, &f, bytes + (has_mark ? 3 : 0));
    }
    rbi_heap_free(bytes);
    return status;
}

rebatch_status rbi_source_read(struct rbi_source *source, const char *path)
{
    *source = (struct rbi_source){.line = 1};
    const rebatch_status status = read_file(source, path, 0);
    return status ? status : emit(source, "\n", 1);
}

void rbi_source_free(struct rbi_source *source)
{
    for (size_t i = 0; i < source->file_count; i++)
        rbi_heap_free(source->files[i]);
    rbi_heap_free(source->files);
    rbi_heap_free(source->parts);
    rbi_heap_free(source->text);
    *source = (struct rbi_source){0};
}

struct rbi_place rbi_source_place(const struct rbi_source *source, unsigned line)
{
    const struct rbi_source_part *part = source->parts;
    while (part + 1 < source->parts + source->part_count && part[1].first <= line)
        part++;
    return (struct rbi_place){source->files[part->file], part->line + (line - part->first), NULL};
}
