/* Owns reading a trace: gzip or plain text into operations, every mistake named with its line.
 * Must not know pools and devices. */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "cli/replay.h"

#define STREAMS_MOST 1024
#define LINE_BYTES 1024             /* comments may be longer, the other lines are at most 66 */
#define LINE_MOST ((size_t)1 << 20) /* of a comment: what never ends is no trace */
#define SHOWN_MOST 60               /* of a line in a message */
#define FIELDS_MOST 5               /* one more than any line has */
/* With this in use at once sums of live and reserved bytes fit into 64 bits, whatever the rounding
 * and the page. */
#define LIVE_MOST (UINT64_C(1) << 62) /* a multiple of REBATCH_POOL_UNIT_BYTES */
/* Gzip makes a thousand bytes of one, and a line takes more memory than it has bytes: text of more
 * than UNPACKED_FREE bytes is refused when it is over UNPACKED_TIMES as long as its file. Recorded
 * traces are four times as long. */
#define UNPACKED_FREE (UINT64_C(16) << 20)
#define UNPACKED_TIMES 100

struct field {
    const char *text; /* no zero byte behind it */
    size_t length;
};

struct reader {
    struct rbi_trace *trace;
    gzFile file;
    uint64_t line;         /* number of the line in `text`, from 1 */
    char text[LINE_BYTES]; /* with a zero byte behind it */
    size_t length;
    bool is_cut;         /* the line went on */
    uint64_t text_bytes; /* read so far */
    uint64_t next_check; /* of how much is unpacked, when this many are read */
    uint64_t live_most;

    struct rbi_replay_ids ids;
    size_t op_capacity;
    uint32_t *spare_slots; /* room for one a slot */
    size_t spare_count, slot_capacity;
    uint64_t streams[STREAMS_MOST]; /* their numbers in the file; [0] is the default stream's, 0 */
    uint64_t live_bytes, requested_bytes;
};

/* ---- messages ---- */

static bool refuse(const struct reader *reader, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static bool refuse(const struct reader *reader, const char *format, ...)
{
    fprintf(stderr, "%s:%" PRIu64 ": ", reader->trace->path, reader->line);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputs("\n", stderr);
    return false;
}

/* What stands there, in a form that a terminal can take. */
struct shown {
    char text[SHOWN_MOST + sizeof "..."];
};

static struct shown show(const char *text, size_t length)
{
    struct shown shown = {""};
    const size_t end = length < SHOWN_MOST ? length : SHOWN_MOST;
    for (size_t i = 0; i < end; i++)
        shown.text[i] = (char)(text[i] >= ' ' && text[i] <= '~' ? text[i] : '?');
    if (end < length)
        memcpy(shown.text + end, "...", sizeof "...");
    return shown;
}

static bool refuse_line(const struct reader *reader, const char *expected)
{
    return refuse(reader, "found '%s': expected %s", show(reader->text, reader->length).text,
                  expected);
}

static bool refuse_memory(const struct rbi_trace *trace)
{
    fprintf(stderr, "%s: no host memory to hold the trace\n", trace->path);
    return false;
}

/* ---- lines ---- */

enum next { NEXT_LINE, NEXT_END, NEXT_FAILED };

static enum next fail_read(const struct reader *reader)
{
    const int reason = errno;
    int code;
    (void)gzerror(reader->file, &code);
    if (code == Z_OK || code == Z_STREAM_END)
        return NEXT_END;
    const char *text = code == Z_BUF_ERROR    ? "the gzip data end too early"
                       : code == Z_DATA_ERROR ? "the gzip data are damaged"
                       : code == Z_MEM_ERROR  ? "no host memory to unpack it"
                                              : strerror(reason);
    fprintf(stderr, "%s: %s\n", reader->trace->path, text);
    return NEXT_FAILED;
}

/* Whether little gzip data have become much text. */
static bool is_inflated(struct reader *reader)
{
    if (reader->text_bytes <= reader->next_check)
        return false;
    reader->next_check = reader->text_bytes + UNPACKED_FREE / 16;
    if (gzdirect(reader->file))
        return false;
    const z_off_t packed = gzoffset(reader->file);
    if (packed >= 0 && reader->text_bytes / UNPACKED_TIMES <= (uint64_t)packed)
        return false;
    if (packed < 0)
        (void)refuse(reader,
                     "the gzip data of a pipe are %" PRIu64 " bytes of text so far: "
                     "expected at most %" PRIu64 ", a file, or a trace that is unpacked",
                     reader->text_bytes, UNPACKED_FREE);
    else
        (void)refuse(reader,
                     "%" PRIu64 " bytes of gzip data are %" PRIu64 " of text: expected at "
                     "most %d times as many, or a trace that is unpacked",
                     (uint64_t)packed, reader->text_bytes, UNPACKED_TIMES);
    return true;
}

static enum next read_line(struct reader *reader)
{
    reader->length = 0;
    reader->is_cut = false;
    reader->line++;
    errno = 0;
    int c;
    size_t bytes = 0;
    while ((c = gzgetc(reader->file)) != -1 && c != '\n') {
        if (++bytes > LINE_MOST) {
            (void)refuse(reader, "the line is longer than 1 MiB: expected a trace of lines");
            return NEXT_FAILED;
        }
        if (reader->length < sizeof reader->text - 1)
            reader->text[reader->length++] = (char)c;
        else
            reader->is_cut = true;
    }
    reader->text[reader->length] = '\0';
    reader->text_bytes += bytes + 1;
    if (is_inflated(reader))
        return NEXT_FAILED;
    const enum next next = c == -1 ? fail_read(reader) : NEXT_LINE;
    /* The last line may lack its end. */
    return next == NEXT_END && reader->length > 0 ? NEXT_LINE : next;
}

static bool is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\r';
}

static size_t split(struct field fields[FIELDS_MOST], const struct reader *reader)
{
    size_t count = 0;
    const char *at = reader->text;
    const char *const end = at + reader->length;
    while (count < FIELDS_MOST) {
        while (at < end && is_blank(*at))
            at++;
        if (at == end)
            break;
        fields[count].text = at;
        while (at < end && !is_blank(*at))
            at++;
        fields[count].length = (size_t)(at - fields[count].text);
        count++;
    }
    return count;
}

static bool read_number(uint64_t *out, const struct reader *reader, const char *name,
                        struct field field)
{
    *out = 0;
    bool fits = true;
    for (size_t i = 0; i < field.length; i++) {
        const char c = field.text[i];
        if (c < '0' || c > '9')
            return refuse(reader, "%s is '%s': expected a whole number", name,
                          show(field.text, field.length).text);
        fits = fits && !__builtin_mul_overflow(*out, 10, out) &&
               !__builtin_add_overflow(*out, (uint64_t)(c - '0'), out);
    }
    return fits || refuse(reader, "%s is %s: expected at most %" PRIu64, name,
                          show(field.text, field.length).text, UINT64_MAX);
}

/* ---- operations ---- */

static bool add_op(struct reader *reader, struct rbi_replay_op op)
{
    struct rbi_trace *trace = reader->trace;
    if (trace->closed_count == reader->op_capacity) {
        const size_t capacity = reader->op_capacity ? 2 * reader->op_capacity : 4096;
        struct rbi_replay_op *ops = reallocarray(trace->ops, capacity, sizeof *ops);
        if (ops)
            trace->ops = ops;
        uint64_t *lines = reallocarray(trace->lines, capacity, sizeof *lines);
        if (lines)
            trace->lines = lines;
        if (!ops || !lines)
            return refuse_memory(trace);
        reader->op_capacity = capacity;
    }
    trace->lines[trace->closed_count] = reader->line;
    trace->ops[trace->closed_count++] = op;
    return true;
}

/* The number of a stream among those of this trace. */
static bool find_stream(uint16_t *out, struct reader *reader, uint64_t number)
{
    struct rbi_trace *trace = reader->trace;
    uint32_t i = 0;
    while (i < trace->streams && reader->streams[i] != number)
        i++;
    if (i == STREAMS_MOST)
        return refuse(reader, "STREAM is %" PRIu64 ": expected at most %d different ones", number,
                      STREAMS_MOST);
    if (i == trace->streams)
        reader->streams[trace->streams++] = number;
    *out = (uint16_t)i;
    return true;
}

static bool take_slot(uint32_t *out, struct reader *reader)
{
    struct rbi_trace *trace = reader->trace;
    if (reader->spare_count > 0) {
        *out = reader->spare_slots[--reader->spare_count];
        return true;
    }
    if (trace->slots == UINT32_MAX)
        return refuse(reader, "more than %" PRIu32 " blocks are in use", UINT32_MAX);
    if (trace->slots == reader->slot_capacity) {
        const size_t capacity = reader->slot_capacity ? 2 * reader->slot_capacity : 1024;
        uint32_t *slots = reallocarray(reader->spare_slots, capacity, sizeof *slots);
        if (!slots)
            return refuse_memory(trace);
        reader->spare_slots = slots;
        reader->slot_capacity = capacity;
    }
    *out = trace->slots++;
    return true;
}

static uint64_t rounded(uint64_t bytes)
{
    return (bytes + (REBATCH_POOL_UNIT_BYTES - 1)) & ~(uint64_t)(REBATCH_POOL_UNIT_BYTES - 1);
}

static void count_alloc(struct reader *reader, uint64_t bytes)
{
    struct rbi_trace *trace = reader->trace;
    trace->allocations++;
    reader->live_bytes += rounded(bytes);
    reader->requested_bytes += bytes;
    if (reader->requested_bytes > trace->peak_requested_bytes)
        trace->peak_requested_bytes = reader->requested_bytes;
    if (reader->live_bytes > trace->peak_live_bytes) {
        trace->peak_live_bytes = reader->live_bytes;
        trace->peak_op = trace->closed_count - 1;
    }
}

static bool read_alloc(struct reader *reader, const struct field *fields)
{
    uint64_t id, bytes, number;
    struct rbi_replay_op op = {0, 0, 0, RBI_REPLAY_ALLOC};
    if (!read_number(&id, reader, "ID", fields[1]) ||
        !read_number(&bytes, reader, "BYTES", fields[2]) ||
        !read_number(&number, reader, "STREAM", fields[3]) ||
        !find_stream(&op.stream, reader, number))
        return false;
    if (bytes > reader->live_most || rounded(bytes) > reader->live_most - reader->live_bytes)
        return refuse(reader,
                      "BYTES is %" PRIu64 " on top of the %" PRIu64
                      " that are in use: expected no more than %" PRIu64
                      " in all, %d pages (--page)",
                      bytes, reader->live_bytes, reader->live_most, RBI_REPLAY_PAGES_MOST);
    struct rbi_replay_id *entry = rbi_replay_ids_find(&reader->ids, id);
    if (!entry)
        return refuse_memory(reader->trace);
    if (entry->in_use)
        return refuse(reader,
                      "ID %" PRIu64 " is in use since line %" PRIu64
                      ": expected one that is new or was freed",
                      id, entry->line);
    if (!take_slot(&op.slot, reader))
        return false;
    reader->ids.used += entry->line == 0;
    *entry = (struct rbi_replay_id){id, reader->line, bytes, op.slot, true};
    op.bytes = bytes;
    if (!add_op(reader, op))
        return false;
    count_alloc(reader, bytes);
    return true;
}

/* The entry of an ID that must be in use. */
static struct rbi_replay_id *find_block(struct reader *reader, struct field field)
{
    uint64_t id;
    if (!read_number(&id, reader, "ID", field))
        return NULL;
    struct rbi_replay_id *entry = rbi_replay_ids_find(&reader->ids, id);
    if (!entry)
        (void)refuse_memory(reader->trace);
    else if (entry->line == 0)
        (void)refuse(reader, "ID %" PRIu64 " is unknown: expected one that is in use", id);
    else if (!entry->in_use)
        (void)refuse(reader,
                     "ID %" PRIu64 " was freed on line %" PRIu64 ": expected one that is in use",
                     id, entry->line);
    else
        return entry;
    return NULL;
}

static bool read_free(struct reader *reader, const struct field *fields)
{
    struct rbi_replay_id *entry = find_block(reader, fields[1]);
    if (!entry)
        return false;
    entry->in_use = false;
    entry->line = reader->line;
    reader->live_bytes -= rounded(entry->bytes);
    reader->requested_bytes -= entry->bytes;
    reader->spare_slots[reader->spare_count++] = entry->slot;
    return add_op(reader, (struct rbi_replay_op){0, entry->slot, 0, RBI_REPLAY_FREE});
}

static bool read_use(struct reader *reader, const struct field *fields)
{
    const struct rbi_replay_id *entry = find_block(reader, fields[1]);
    uint64_t number;
    struct rbi_replay_op op = {0, 0, 0, RBI_REPLAY_USE};
    if (!entry || !read_number(&number, reader, "STREAM", fields[2]) ||
        !find_stream(&op.stream, reader, number))
        return false;
    op.slot = entry->slot;
    return add_op(reader, op);
}

/* ---- the file ---- */

/* "… peak allocated N reserved M …": PyTorch's own figures, in a comment. */
static void read_torch(struct rbi_trace *trace, const char *comment)
{
    uint64_t allocated, reserved;
    const char *at = strstr(comment, "peak allocated ");
    if (at && trace->torch_reserved_bytes == 0 &&
        sscanf(at, "peak allocated %" SCNu64 " reserved %" SCNu64, &allocated, &reserved) == 2 &&
        allocated <= reserved) {
        trace->torch_allocated_bytes = allocated;
        trace->torch_reserved_bytes = reserved;
    }
}

static bool read_op(struct reader *reader)
{
    static const struct {
        const char *form;
        size_t fields;
        bool (*read)(struct reader *reader, const struct field *fields);
    } forms[] = {
        {"a ID BYTES STREAM", 4, read_alloc},
        {"f ID", 2, read_free},
        {"u ID STREAM", 3, read_use},
    };
    struct field fields[FIELDS_MOST];
    const size_t count = split(fields, reader);
    if (count == 0)
        return true;
    if (fields[0].text[0] == '#') {
        read_torch(reader->trace, reader->text);
        return true;
    }
    if (reader->is_cut)
        return refuse(reader, "the line is longer than %d bytes: expected 'a ID BYTES STREAM'",
                      LINE_BYTES - 1);
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        if (fields[0].length != 1 || fields[0].text[0] != forms[i].form[0])
            continue;
        if (count == forms[i].fields)
            return forms[i].read(reader, fields);
        char expected[32];
        snprintf(expected, sizeof expected, "'%s'", forms[i].form);
        return refuse_line(reader, expected);
    }
    return refuse_line(reader, "'a ID BYTES STREAM', 'f ID', 'u ID STREAM' or '# comment'");
}

/* Frees for what is still in use, so that the trace can be run again. */
static bool close_trace(struct reader *reader)
{
    struct rbi_trace *trace = reader->trace;
    trace->op_count = trace->closed_count;
    if (trace->allocations == 0) {
        fprintf(stderr, "%s: no allocation in it: expected lines 'a ID BYTES STREAM'\n",
                trace->path);
        return false;
    }
    bool *is_spare = calloc(trace->slots, sizeof *is_spare);
    if (!is_spare)
        return refuse_memory(trace);
    for (size_t i = 0; i < reader->spare_count; i++)
        is_spare[reader->spare_slots[i]] = true;
    bool ok = true;
    for (uint32_t slot = 0; slot < trace->slots && ok; slot++)
        if (!is_spare[slot])
            ok = add_op(reader, (struct rbi_replay_op){0, slot, 0, RBI_REPLAY_FREE});
    free(is_spare);
    return ok;
}

static bool read_file(struct reader *reader)
{
    enum next next;
    while ((next = read_line(reader)) == NEXT_LINE)
        if (!read_op(reader))
            return false;
    return next == NEXT_END && close_trace(reader);
}

bool rbi_trace_read(struct rbi_trace *trace, const char *path, uint64_t page_bytes)
{
    *trace = (struct rbi_trace){.path = path, .streams = 1};
    struct reader *reader = calloc(1, sizeof *reader);
    if (!reader)
        return refuse_memory(trace);
    reader->trace = trace;
    reader->next_check = UNPACKED_FREE;
    reader->live_most = page_bytes > LIVE_MOST / RBI_REPLAY_PAGES_MOST
                            ? LIVE_MOST
                            : page_bytes * RBI_REPLAY_PAGES_MOST;
    errno = 0;
    reader->file = gzopen(path, "rb");
    bool ok = reader->file != NULL;
    if (ok) {
        (void)gzbuffer(reader->file, 1 << 16); /* a smaller one serves too */
        ok = read_file(reader);
        (void)gzclose_r(reader->file); /* what it could say was found while reading */
    } else {
        fprintf(stderr, "%s: %s\n", path, errno ? strerror(errno) : "no host memory to open it");
    }
    rbi_replay_ids_free(&reader->ids);
    free(reader->spare_slots);
    free(reader);
    if (!ok)
        rbi_trace_free(trace);
    return ok;
}

void rbi_trace_free(struct rbi_trace *trace)
{
    free(trace->ops);
    free(trace->lines);
    trace->ops = NULL;
    trace->lines = NULL;
}
