/* Owns the trace of a program's allocations: the file, its lines, the numbers in them.
 * Must not know who allocates.
 *
 * Each line is written at once, so the file of a program that crashes is whole. docs/preload.md
 * has its form. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "launch/launch.h"
#include "preload/preload.h"
#include "rebatch/version.h"

/* ---- the file ---- */

static void complain(struct rbi_record *record, const char *what, int reason)
{
    char text[4400];
    struct rbi_text t = {text, sizeof text, 0};
    rbi_text_add(&t, "rebatch: the trace %s %s: %s\n", record->name, what, strerror(reason));
    (void)rbi_write_all(STDERR_FILENO, text, rbi_min(t.length, sizeof text - 1));
    record->has_failed = true;
}

static void put(struct rbi_record *record, const struct rbi_text *line)
{
    if (!record->has_failed && !rbi_write_all(record->fd, line->text, line->length))
        complain(record, "cannot be written", errno);
}

/* A file that exists is that of another process of the program, or of an earlier run. */
static bool open_file(struct rbi_record *record)
{
    const int flags = O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC;
    struct rbi_text name = {record->name, sizeof record->name, 0};
    rbi_text_add(&name, "%s", record->path);
    record->fd = open(record->name, flags, 0666);
    if (record->fd < 0 && errno == EEXIST) {
        rbi_text_add(&name, ".%ld", (long)getpid());
        record->fd = open(record->name, flags, 0666);
    }
    record->is_open = record->fd >= 0;
    if (!record->is_open)
        complain(record, "cannot be made", errno);
    return record->is_open;
}

static void begin(struct rbi_record *record, int device)
{
    char text[256];
    struct rbi_text line = {text, sizeof text, 0};
    record->device = device;
    rbi_text_add(&line, "# rebatch %s, ", REBATCH_VERSION);
    rbi_text_add_shown(&line, program_invocation_short_name, strlen(program_invocation_short_name),
                       100);
    rbi_text_add(&line, ", device %d\n", device);
    put(record, &line);
}

/* Whether allocations of this device are written: a trace has one device. */
static bool takes(struct rbi_record *record, int device)
{
    char text[64];
    struct rbi_text line = {text, sizeof text, 0};
    if (!record->path || record->has_failed)
        return false;
    if (!record->is_open) {
        if (!open_file(record))
            return false;
        begin(record, device);
    }
    if (device != record->device && !record->has_another) {
        rbi_text_add(&line, "# device %d is not recorded\n", device);
        put(record, &line);
        record->has_another = true;
    }
    return device == record->device;
}

/* ---- lines ---- */

/* Streams have numbers in the order in which they are seen. Those that are too many for a replay
 * share the last one. */
static size_t number_of(struct rbi_record *record, cu_stream stream)
{
    size_t at = 0;
    if (!stream)
        return 0;
    while (at < record->stream_count && record->streams[at] != stream)
        at++;
    if (at == RBI_RECORD_STREAMS)
        return RBI_RECORD_STREAMS;
    if (at == record->stream_count)
        record->streams[record->stream_count++] = stream;
    return at + 1;
}

uint64_t rbi_record_alloc(struct rbi_record *record, const struct rbi_holding *holding)
{
    char text[96];
    struct rbi_text line = {text, sizeof text, 0};
    if (!takes(record, holding->device))
        return 0;
    record->last_id++;
    rbi_text_add(&line, "a %" PRIu64 " %" PRIu64 " %zu\n", record->last_id, holding->bytes,
                 number_of(record, holding->stream));
    put(record, &line);
    return record->last_id;
}

void rbi_record_free(struct rbi_record *record, const struct rbi_holding *holding,
                     const cu_stream *stream)
{
    char text[96];
    struct rbi_text line = {text, sizeof text, 0};
    if (!holding->id)
        return;
    if (stream && *stream != holding->stream)
        rbi_text_add(&line, "u %" PRIu64 " %zu\n", holding->id, number_of(record, *stream));
    rbi_text_add(&line, "f %" PRIu64 "\n", holding->id);
    put(record, &line);
}

void rbi_record_oom(struct rbi_record *record, int device, uint64_t bytes)
{
    char text[64];
    struct rbi_text line = {text, sizeof text, 0};
    if (!takes(record, device))
        return;
    rbi_text_add(&line, "# out of memory: %" PRIu64 " bytes\n", bytes);
    put(record, &line);
}
