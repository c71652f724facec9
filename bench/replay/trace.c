/* Owns reading a trace: gzip or plain text into operations, each mistake with its line.
 * Must not know pools and devices. */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "replay.h"

#define STREAMS_MOST 1024
#define LINE_BYTES 1024 /* comments may be longer, the other lines are at most 66 */
/* With this in use at once sums of live and reserved bytes fit into 64 bits, whatever the rounding
 * and the page. */
#define LIVE_MOST (UINT64_C(1) << 62) /* a multiple of REBATCH_POOL_UNIT_BYTES */

struct reader {
    struct trace *trace;
    gzFile file;
    uint64_t line; /* number of the line in `text`, from 1 */
    char text[LINE_BYTES];
    uint64_t live_most;

    struct replay_ids ids;
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

static bool refuse_memory(const struct trace *trace)
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

static enum next read_line(struct reader *reader)
{
    reader->line++;
    errno = 0;
    if (!gzgets(reader->file, reader->text, sizeof reader->text))
        return fail_read(reader);
    if (!strchr(reader->text, '\n')) /* the rest of a long comment */
        for (int c = 0; c != -1 && c != '\n';)
            c = gzgetc(reader->file);
    return NEXT_LINE;
}

/* ---- operations ---- */

static bool add_op(struct reader *reader, struct replay_op op)
{
    struct trace *trace = reader->trace;
    if (trace->closed_count == reader->op_capacity) {
        const size_t capacity = reader->op_capacity ? 2 * reader->op_capacity : 4096;
        struct replay_op *ops = reallocarray(trace->ops, capacity, sizeof *ops);
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
    struct trace *trace = reader->trace;
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
    struct trace *trace = reader->trace;
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
    struct trace *trace = reader->trace;
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

static bool read_alloc(struct reader *reader, uint64_t id, uint64_t bytes, uint64_t stream)
{
    struct replay_op op = {bytes, 0, 0, REPLAY_ALLOC};
    if (!find_stream(&op.stream, reader, stream))
        return false;
    if (bytes > reader->live_most || rounded(bytes) > reader->live_most - reader->live_bytes)
        return refuse(reader,
                      "BYTES is %" PRIu64 " on top of the %" PRIu64
                      " that are in use: expected no more than %" PRIu64
                      " in all, %d pages (--page)",
                      bytes, reader->live_bytes, reader->live_most, REPLAY_PAGES_MOST);
    struct replay_id *entry = replay_ids_find(&reader->ids, id);
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
    *entry = (struct replay_id){id, reader->line, bytes, op.slot, true};
    if (!add_op(reader, op))
        return false;
    count_alloc(reader, bytes);
    return true;
}

/* The entry of an ID that must be in use. */
static struct replay_id *find_block(struct reader *reader, uint64_t id)
{
    struct replay_id *entry = replay_ids_find(&reader->ids, id);
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

static bool read_free(struct reader *reader, uint64_t id)
{
    struct replay_id *entry = find_block(reader, id);
    if (!entry)
        return false;
    entry->in_use = false;
    entry->line = reader->line;
    reader->live_bytes -= rounded(entry->bytes);
    reader->requested_bytes -= entry->bytes;
    reader->spare_slots[reader->spare_count++] = entry->slot;
    return add_op(reader, (struct replay_op){0, entry->slot, 0, REPLAY_FREE});
}

static bool read_use(struct reader *reader, uint64_t id, uint64_t stream)
{
    const struct replay_id *entry = find_block(reader, id);
    struct replay_op op = {0, 0, 0, REPLAY_USE};
    if (!entry || !find_stream(&op.stream, reader, stream))
        return false;
    op.slot = entry->slot;
    return add_op(reader, op);
}

/* ---- the file ---- */

/* "… peak allocated N reserved M …": PyTorch's own figures, in a comment. */
static void read_torch(struct trace *trace, const char *comment)
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
    const char *const text = reader->text + strspn(reader->text, " \t\r\n");
    const bool is_comment = *text == '#';
    uint64_t id, second, third;
    int end = 0; /* of what was read, when the line is whole */
    if (is_comment)
        read_torch(reader->trace, text);
    if (is_comment || *text == '\0')
        return true;
    if (sscanf(text, "a %" SCNu64 " %" SCNu64 " %" SCNu64 " %n", &id, &second, &third, &end) == 3 &&
        end && !text[end])
        return read_alloc(reader, id, second, third);
    if (sscanf(text, "f %" SCNu64 " %n", &id, &end) == 1 && end && !text[end])
        return read_free(reader, id);
    if (sscanf(text, "u %" SCNu64 " %" SCNu64 " %n", &id, &second, &end) == 2 && end && !text[end])
        return read_use(reader, id, second);
    return refuse(reader,
                  "found '%.*s': expected 'a ID BYTES STREAM', 'f ID', 'u ID STREAM' or "
                  "'# comment'",
                  (int)strcspn(text, "\r\n"), text);
}

/* Frees for what is still in use, so that the trace can be run again. */
static bool close_trace(struct reader *reader)
{
    struct trace *trace = reader->trace;
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
            ok = add_op(reader, (struct replay_op){0, slot, 0, REPLAY_FREE});
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

bool trace_read(struct trace *trace, const char *path, uint64_t page_bytes)
{
    *trace = (struct trace){.path = path, .streams = 1};
    struct reader *reader = calloc(1, sizeof *reader);
    if (!reader)
        return refuse_memory(trace);
    reader->trace = trace;
    reader->live_most =
        page_bytes > LIVE_MOST / REPLAY_PAGES_MOST ? LIVE_MOST : page_bytes * REPLAY_PAGES_MOST;
    errno = 0;
    reader->file = gzopen(path, "rb");
    bool ok = reader->file != NULL;
    if (ok) {
        ok = read_file(reader);
        (void)gzclose_r(reader->file); /* what it could say was found while reading */
    } else {
        fprintf(stderr, "%s: %s\n", path, errno ? strerror(errno) : "no host memory to open it");
    }
    replay_ids_free(&reader->ids);
    free(reader->spare_slots);
    free(reader);
    if (!ok)
        trace_free(trace);
    return ok;
}

void trace_free(struct trace *trace)
{
    free(trace->ops);
    free(trace->lines);
    trace->ops = NULL;
    trace->lines = NULL;
}
