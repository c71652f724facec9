/* Owns the text of a settings file with what it includes, and where each of its lines came from.
 * Must not know settings.
 *
 * libconfig is given the text, never a path, and only after a look at each token, because it
 * leaves the process when an included name is a folder, takes 99999999999 for 1215752191, and
 * says no more than "syntax error" about limit = 22GiB. What passes here means to libconfig what
 * it says. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "config/settings.h"

#define TEXT_MOST (1u << 20)
#define INCLUDE_DEPTH_MOST 10
#define BRACKET_DEPTH_MOST 16
#define NAME_BYTES 41
#define PATH_BYTES 4096

/* A file that is being looked at. */
struct frame {
    const struct frame *from; /* the one that includes it; NULL: the first */
    unsigned depth;
    uint32_t file; /* index into source->files */
    uint32_t line;
    char *text;
    size_t length, at;
};

/* What outlives a file's end. */
struct scan {
    struct rbi_source *source;
    char group[NAME_BYTES]; /* "" outside of any */
    char name[NAME_BYTES];  /* the last name before a '=' */
    char before; /* the last token: a punctuation mark, 'n' for a name, 'v' for a value */
    struct {
        char mark;
        struct rbi_source_line place;
    } brackets[BRACKET_DEPTH_MOST];
    size_t depth;
};

static struct rbi_place place_of(const struct scan *s, uint32_t file, uint32_t line)
{
    return (struct rbi_place){s->source->files[file], line, NULL};
}

static struct rbi_shown shown_here(const struct scan *s, const struct frame *f)
{
    const struct rbi_place place = place_of(s, f->file, f->line);
    return rbi_shown_place(&place);
}

static rebatch_status no_memory(const char *path)
{
    return rbi_error(REBATCH_E_HOST_OOM, "no host memory to read %s", rbi_shown_path(path).text);
}

/* ---- what is written ---- */

/* Room for one more in an array that doubles. */
static bool grow(void **array, size_t count, size_t *room, size_t size)
{
    if (count < *room)
        return true;
    const size_t wanted = rbi_max(*room * 2, 64);
    void *grown = rbi_heap_resize(*array, wanted, size);
    if (!grown)
        return false;
    *array = grown;
    *room = wanted;
    return true;
}

/* Says that what follows in the text is line f->line of that file. */
static rebatch_status begin_line(struct scan *s, const struct frame *f)
{
    struct rbi_source *source = s->source;
    void *lines = source->lines;
    if (!grow(&lines, source->line_count, &source->line_room, sizeof *source->lines))
        return no_memory(source->files[0]);
    source->lines = lines;
    source->lines[source->line_count++] = (struct rbi_source_line){f->file, f->line};
    return REBATCH_OK;
}

static rebatch_status too_large(const struct scan *s)
{
    return rbi_error(
        REBATCH_E_IO,
        "%s is larger than %u bytes, with what it includes: expected a file of settings",
        rbi_shown_path(s->source->files[0]).text, TEXT_MOST);
}

static rebatch_status emit(struct scan *s, const char *text, size_t length)
{
    struct rbi_source *source = s->source;
    if (length >= TEXT_MOST - source->length)
        return too_large(s);
    if (source->room - source->length <= length) {
        const size_t room = rbi_max(source->room * 2, source->length + length + 1);
        char *grown = rbi_heap_resize(source->text, room, 1);
        if (!grown)
            return no_memory(source->files[0]);
        source->text = grown;
        source->room = room;
    }
    memcpy(source->text + source->length, text, length);
    source->length += length;
    source->text[source->length] = '\0';
    return REBATCH_OK;
}

/* Ends the line of the text; the next one is f->line. */
static rebatch_status emit_newline(struct scan *s, const struct frame *f)
{
    const rebatch_status status = emit(s, "\n", 1);
    return status ? status : begin_line(s, f);
}

/* Passes `length` bytes on as they are. */
static rebatch_status pass(struct scan *s, struct frame *f, size_t length)
{
    const rebatch_status status = emit(s, f->text + f->at, length);
    f->at += length;
    return status;
}

static rebatch_status pass_newline(struct scan *s, struct frame *f)
{
    f->at++;
    f->line++;
    return emit_newline(s, f);
}

/* ---- what is read ---- */

static rebatch_status cannot_read(const struct scan *s, const struct frame *f, const char *path,
                                  const char *why)
{
    if (!f->from)
        return rbi_error(REBATCH_E_IO, "%s cannot be read: %s",
                         path[0] ? rbi_shown_path(path).text : "\"\"", why);
    return rbi_error(REBATCH_E_IO, "%s: the included %s cannot be read: %s",
                     shown_here(s, f->from).text, rbi_shown_path(path).text, why);
}

/* The whole of an open file, up to a byte more than is allowed. */
static rebatch_status read_open_file(const struct scan *s, struct frame *f, const char *path,
                                     int file)
{
    size_t room = 0;
    for (;;) {
        if (f->length == room) {
            room = rbi_max(room * 2, 4096);
            char *grown = rbi_heap_resize(f->text, room, 1);
            if (!grown)
                return no_memory(path);
            f->text = grown;
        }
        const size_t wanted = rbi_min(room - f->length, TEXT_MOST + 1 - f->length);
        const ssize_t got = read(file, f->text + f->length, wanted);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return cannot_read(s, f, path, strerror(errno));
        f->length += (size_t)got;
        if (f->length > TEXT_MOST)
            return too_large(s);
        if (got == 0)
            return REBATCH_OK;
    }
}

static rebatch_status read_file(const struct scan *s, struct frame *f, const char *path)
{
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return cannot_read(s, f, path, path[0] ? strerror(errno) : "the name is empty");
    const rebatch_status status = read_open_file(s, f, path, file);
    (void)close(file);
    if (status)
        return status;
    const char *zero = memchr(f->text, '\0', f->length);
    if (!zero)
        return REBATCH_OK;
    for (const char *c = f->text; c < zero; c++)
        f->line += *c == '\n';
    return rbi_error(REBATCH_E_PARSE, "%s: a zero byte: expected text", shown_here(s, f).text);
}

/* Keeps a copy of the path for as long as the source lives. */
static rebatch_status add_file(struct rbi_source *source, const char *path)
{
    char **files = rbi_heap_resize(source->files, source->file_count + 1, sizeof *files);
    if (!files)
        return no_memory(path);
    source->files = files;
    const size_t length = strlen(path);
    char *copy = rbi_heap_calloc(length + 1, 1);
    if (!copy)
        return no_memory(path);
    memcpy(copy, path, length);
    source->files[source->file_count++] = copy;
    return REBATCH_OK;
}

/* ---- tokens ---- */

static bool starts_with(const struct frame *f, const char *text)
{
    const size_t length = strlen(text);
    return f->length - f->at >= length && memcmp(f->text + f->at, text, length) == 0;
}

static bool is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\r' || c == '\f';
}

static bool is_letter(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* Whether `c` goes on a run that began as a word or a number: everything that people write in one,
 * "22GiB", "90%", "1e-5", so that an error can show all of it. */
static bool is_run(char c)
{
    return is_letter(c) || is_digit(c) || (c != '\0' && strchr("_*-+.%", c));
}

static size_t run_length(const struct frame *f)
{
    size_t length = 0;
    while (f->at + length < f->length && is_run(f->text[f->at + length]))
        length++;
    return length;
}

/* Whether a value may come next. */
static bool is_value_next(const struct scan *s)
{
    const char inner = s->depth > 0 ? s->brackets[s->depth - 1].mark : '\0';
    const bool in_list = inner == '(' || inner == '[';
    return s->before == '=' || s->before == ':' || s->before == '(' || s->before == '[' ||
           (s->before == ',' && in_list);
}

/* 'FILE:LINE: group.name is VALUE', for error texts about the run of `length` bytes. */
static struct rbi_text begin_error(char *text, size_t size, const struct scan *s,
                                   const struct frame *f, size_t length)
{
    struct rbi_text t = {text, size, 0};
    rbi_text_add(&t, "%s: ", shown_here(s, f).text);
    if (is_value_next(s) && s->name[0])
        rbi_text_add(&t, "%s%s%s is ", s->group, s->group[0] ? "." : "", s->name);
    rbi_text_add(&t, "%s", rbi_shown_text(f->text + f->at, length).text);
    return t;
}

static rebatch_status refuse_run(const struct scan *s, const struct frame *f, size_t length)
{
    char text[400];
    struct rbi_text t = begin_error(text, sizeof text, s, f, length);
    rbi_text_add(&t, ": expected a number, true or false, or quotes around it: \"%s\"",
                 rbi_shown_text(f->text + f->at, length).text);
    return rbi_error(REBATCH_E_PARSE, "%s", text);
}

/* An integer is written anew: libconfig 1.5 cuts off what is beyond 32 bits where there is no L,
 * and later ones read a leading zero as octal. */
static rebatch_status emit_integer(struct scan *s, int64_t number)
{
    char text[32];
    struct rbi_text t = {text, sizeof text, 0};
    const bool is_long = number < INT32_MIN || number > INT32_MAX;
    rbi_text_add(&t, "%" PRId64 "%s", number, is_long ? "L" : "");
    return emit(s, text, t.length);
}

static rebatch_status scan_number(struct scan *s, struct frame *f)
{
    const size_t length = run_length(f);
    const char *text = f->text + f->at;
    int64_t number = 0;
    const enum rbi_integer integer = rbi_integer_parse(text, length, &number);
    if (integer == RBI_INTEGER_TOO_LARGE) {
        char error[400];
        struct rbi_text t = begin_error(error, sizeof error, s, f, length);
        rbi_text_add(&t, ": expected a number from %" PRId64 " to %" PRId64, INT64_MIN, INT64_MAX);
        return rbi_error(REBATCH_E_PARSE, "%s", error);
    }
    if (integer == RBI_INTEGER_NONE && !rbi_is_float(text, length))
        return refuse_run(s, f, length);
    s->before = 'v';
    if (integer == RBI_INTEGER_NONE)
        return pass(s, f, length);
    f->at += length;
    return emit_integer(s, number);
}

/* Keys are written as group and name everywhere but in the file, so this is an easy slip. */
static rebatch_status refuse_dot(const struct scan *s, const struct frame *f, size_t group,
                                 size_t length)
{
    const char *text = f->text + f->at;
    return rbi_error(REBATCH_E_PARSE, "%s: %s is not a name: expected %s = { %s = VALUE; };",
                     shown_here(s, f).text, rbi_shown_text(text, length).text,
                     rbi_shown_text(text, group).text,
                     rbi_shown_text(text + group + 1, length - group - 1).text);
}

static rebatch_status scan_word(struct scan *s, struct frame *f)
{
    const size_t length = run_length(f);
    const char *text = f->text + f->at;
    const char *dot = memchr(text, '.', length);
    if (is_value_next(s)) {
        const bool is_boolean = (length == 4 && strncasecmp(text, "true", 4) == 0) ||
                                (length == 5 && strncasecmp(text, "false", 5) == 0);
        if (!is_boolean)
            return refuse_run(s, f, length);
        s->before = 'v';
    } else if (dot) {
        return refuse_dot(s, f, (size_t)(dot - text), length);
    } else {
        const size_t kept = rbi_min(length, sizeof s->name - 1);
        memcpy(s->name, text, kept);
        s->name[kept] = '\0';
        s->before = 'n';
    }
    return pass(s, f, length);
}

static rebatch_status scan_text(struct scan *s, struct frame *f)
{
    /* libconfig 1.5 loses the memory of text that is where none may be. */
    if (!is_value_next(s) && s->before != 't')
        return rbi_error(REBATCH_E_PARSE, "%s: unexpected text: expected KEY = VALUE;",
                         shown_here(s, f).text);
    const struct frame begin = *f;
    rebatch_status status = pass(s, f, 1);
    while (!status && f->at < f->length) {
        const char c = f->text[f->at];
        if (c == '"') {
            s->before = 't';
            return pass(s, f, 1);
        }
        if (c == '\n') {
            status = pass_newline(s, f);
            continue;
        }
        if (starts_with(f, "\\x00") || starts_with(f, "\\X00"))
            return rbi_error(REBATCH_E_PARSE, "%s: a zero byte in the text: expected text",
                             shown_here(s, f).text);
        status = pass(s, f, starts_with(f, "\\\"") || starts_with(f, "\\\\") ? 2 : 1);
    }
    return status ? status
                  : rbi_error(REBATCH_E_PARSE,
                              "%s: the text that begins here never ends: expected a closing quote",
                              shown_here(s, &begin).text);
}

/* Comments are not passed on: libconfig 1.5 stumbles over one that ends with the file. */
static rebatch_status scan_comment(struct scan *s, struct frame *f)
{
    if (!starts_with(f, "/*")) {
        while (f->at < f->length && f->text[f->at] != '\n')
            f->at++;
        return REBATCH_OK;
    }
    const struct frame begin = *f;
    rebatch_status status = emit(s, " ", 1);
    f->at += 2;
    while (!status && f->at < f->length) {
        if (starts_with(f, "*/")) {
            f->at += 2;
            return REBATCH_OK;
        }
        if (f->text[f->at] == '\n')
            status = pass_newline(s, f);
        else
            f->at++;
    }
    return status ? status
                  : rbi_error(REBATCH_E_PARSE,
                              "%s: the comment that begins here never ends: expected */",
                              shown_here(s, &begin).text);
}

static rebatch_status open_bracket(struct scan *s, struct frame *f, char mark)
{
    if (s->depth == BRACKET_DEPTH_MOST)
        return rbi_error(REBATCH_E_PARSE,
                         "%s: %c is nested deeper than %d: expected settings inside a group",
                         shown_here(s, f).text, mark, BRACKET_DEPTH_MOST);
    if (s->depth == 0 && mark == '{') {
        memcpy(s->group, s->name, sizeof s->group);
        s->name[0] = '\0';
    }
    s->brackets[s->depth].mark = mark;
    s->brackets[s->depth].place = (struct rbi_source_line){f->file, f->line};
    s->depth++;
    return REBATCH_OK;
}

static rebatch_status close_bracket(struct scan *s, struct frame *f, char mark)
{
    const char wanted = mark == '}' ? '{' : mark == ')' ? '(' : '[';
    if (s->depth == 0)
        return rbi_error(REBATCH_E_PARSE, "%s: %c closes nothing: expected a %c before it",
                         shown_here(s, f).text, mark, wanted);
    s->depth--;
    const char open = s->brackets[s->depth].mark;
    if (open != wanted) {
        const struct rbi_source_line *at = &s->brackets[s->depth].place;
        const struct rbi_place place = place_of(s, at->file, at->line);
        return rbi_error(REBATCH_E_PARSE, "%s: %c does not close the %c of %s",
                         shown_here(s, f).text, mark, open, rbi_shown_place(&place).text);
    }
    if (s->depth == 0) {
        s->group[0] = '\0';
        s->name[0] = '\0';
    }
    return REBATCH_OK;
}

static rebatch_status scan_mark(struct scan *s, struct frame *f)
{
    const char mark = f->text[f->at];
    rebatch_status status = REBATCH_OK;
    if (strchr("{([", mark))
        status = open_bracket(s, f, mark);
    else if (strchr("})]", mark))
        status = close_bracket(s, f, mark);
    if (status)
        return status;
    s->before = strchr("})]", mark) ? 'v' : mark;
    return pass(s, f, 1);
}

static rebatch_status scan_file(struct scan *s, const char *path, const struct frame *from);

/* Writes the path of a file that is named in `f`: a relative one starts where `f` is. */
static bool join_path(struct rbi_text *t, const struct scan *s, const struct frame *f,
                      const char *name)
{
    const char *here = s->source->files[f->file];
    const char *slash = strrchr(here, '/');
    if (name[0] != '/' && slash)
        rbi_text_add(t, "%.*s", (int)(slash - here) + 1, here);
    rbi_text_add(t, "%s", name);
    return t->length < t->size;
}

/* Reads the name in quotes; false when there is none that ends in this line. */
static bool read_name(struct frame *f, struct rbi_text *t)
{
    while (f->at < f->length && is_blank(f->text[f->at]))
        f->at++;
    if (f->at == f->length || f->text[f->at] != '"')
        return false;
    for (f->at++; f->at < f->length && f->text[f->at] != '\n'; f->at++) {
        if (f->text[f->at] == '"') {
            f->at++;
            return t->length > 0 && t->length < t->size;
        }
        if (starts_with(f, "\\\"") || starts_with(f, "\\\\"))
            f->at++;
        rbi_text_add(t, "%c", f->text[f->at]);
    }
    return false;
}

static rebatch_status scan_include(struct scan *s, struct frame *f)
{
    size_t begin = f->at;
    while (begin > 0 && is_blank(f->text[begin - 1]))
        begin--;
    const bool leads = begin == 0 || f->text[begin - 1] == '\n';
    if (!leads || !starts_with(f, "@include"))
        return rbi_error(REBATCH_E_PARSE,
                         "%s: unexpected @: expected @include \"FILE\" in a line of its own",
                         shown_here(s, f).text);
    f->at += strlen("@include");
    char name[PATH_BYTES] = "";
    struct rbi_text name_text = {name, sizeof name, 0};
    char path[PATH_BYTES] = "";
    struct rbi_text path_text = {path, sizeof path, 0};
    if (!read_name(f, &name_text) || !join_path(&path_text, s, f, name))
        return rbi_error(REBATCH_E_PARSE, "%s: @include without a file: expected @include \"FILE\"",
                         shown_here(s, f).text);
    if (f->depth == INCLUDE_DEPTH_MOST)
        return rbi_error(
            REBATCH_E_PARSE,
            "%s: @include \"%s\" is nested deeper than %d: does a file include itself?",
            shown_here(s, f).text, rbi_shown_text(name, strlen(name)).text, INCLUDE_DEPTH_MOST);
    const rebatch_status status = scan_file(s, path, f);
    return status ? status : emit_newline(s, f);
}

static rebatch_status refuse_byte(const struct scan *s, const struct frame *f)
{
    const unsigned char c = (unsigned char)f->text[f->at];
    const char *expected = "expected GROUP = { KEY = VALUE; };";
    if (c > 0x20 && c < 0x7f)
        return rbi_error(REBATCH_E_PARSE, "%s: unexpected %c: %s", shown_here(s, f).text, c,
                         expected);
    return rbi_error(REBATCH_E_PARSE, "%s: unexpected byte 0x%02x: %s", shown_here(s, f).text, c,
                     expected);
}

static rebatch_status scan_token(struct scan *s, struct frame *f)
{
    const char c = f->text[f->at];
    if (c == '\n')
        return pass_newline(s, f);
    if (is_blank(c))
        return pass(s, f, 1);
    if (c == '#' || starts_with(f, "//") || starts_with(f, "/*"))
        return scan_comment(s, f);
    if (c == '"')
        return scan_text(s, f);
    if (c == '@')
        return scan_include(s, f);
    if (is_letter(c) || c == '*')
        return scan_word(s, f);
    if (is_digit(c) || c == '+' || c == '-' || c == '.')
        return scan_number(s, f);
    return strchr("=:,;{}()[]", c) ? scan_mark(s, f) : refuse_byte(s, f);
}

/* ---- files ---- */

static rebatch_status scan_file(struct scan *s, const char *path, const struct frame *from)
{
    struct frame f = {.from = from, .line = 1, .depth = from ? from->depth + 1 : 0};
    rebatch_status status = add_file(s->source, path);
    if (status)
        return status;
    f.file = (uint32_t)(s->source->file_count - 1);
    status = read_file(s, &f, path);
    if (!status && from)
        status = emit(s, "\n", 1);
    if (!status)
        status = begin_line(s, &f);
    if (!status && starts_with(&f, "\xef\xbb\xbf"))
        f.at = 3; /* the mark that some editors put before UTF-8 */
    while (!status && f.at < f.length)
        status = scan_token(s, &f);
    rbi_heap_free(f.text);
    return status;
}

rebatch_status rbi_source_read(struct rbi_source *source, const char *path)
{
    *source = (struct rbi_source){0};
    struct scan s = {.source = source};
    rebatch_status status = scan_file(&s, path, NULL);
    if (!status)
        status = emit(&s, "\n", 1);
    if (status || s.depth == 0)
        return status;
    const struct rbi_source_line *at = &s.brackets[s.depth - 1].place;
    const struct rbi_place place = place_of(&s, at->file, at->line);
    return rbi_error(REBATCH_E_PARSE, "%s: this %c is never closed", rbi_shown_place(&place).text,
                     s.brackets[s.depth - 1].mark);
}

void rbi_source_free(struct rbi_source *source)
{
    for (size_t i = 0; i < source->file_count; i++)
        rbi_heap_free(source->files[i]);
    rbi_heap_free(source->files);
    rbi_heap_free(source->lines);
    rbi_heap_free(source->text);
    *source = (struct rbi_source){0};
}

struct rbi_place rbi_source_place(const struct rbi_source *source, unsigned line)
{
    const size_t last = source->line_count - 1;
    const struct rbi_source_line *at = &source->lines[line == 0 ? 0 : rbi_min(line - 1, last)];
    return (struct rbi_place){source->files[at->file], at->line, NULL};
}
