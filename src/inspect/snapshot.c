/* Owns the segments of a snapshot, and where it goes: a caller's function or a file.
 * Must not know in what form it is written. */
#include "inspect/inspect.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ---- where bytes go ---- */

static void flush(struct rbi_sink *sink)
{
    if (sink->length > 0 && sink->status == REBATCH_OK)
        sink->status = sink->write(sink->buffer, sink->length, sink->user);
    sink->length = 0;
}

void rbi_sink_put(struct rbi_sink *sink, const void *data, size_t size)
{
    const char *from = data;
    while (size > 0) {
        const size_t part = rbi_min(size, sizeof sink->buffer - sink->length);
        memcpy(sink->buffer + sink->length, from, part);
        sink->length += part;
        from += part;
        size -= part;
        if (sink->length == sizeof sink->buffer)
            flush(sink);
    }
}

void rbi_sink_print(struct rbi_sink *sink, const char *format, ...)
{
    char text[256];
    struct rbi_text t = {text, sizeof text, 0};
    va_list arguments;
    va_start(arguments, format);
    rbi_text_add_v(&t, format, arguments);
    va_end(arguments);
    rbi_sink_put(sink, text, rbi_min(t.length, sizeof text - 1));
}

/* ---- what is there ---- */

static void add_piece(struct rbi_segment *segment, const struct rbi_view_piece *piece)
{
    segment->count++;
    segment->bytes += piece->bytes;
    if (rbi_view_is_in_use(piece)) {
        segment->live_bytes += piece->bytes;
        segment->requested_bytes += piece->requested_bytes;
    } else if (piece->state == RBI_VIEW_PENDING) {
        segment->pending_bytes += piece->bytes;
    }
}

/* Of what is left of a range. */
static bool next_in_range(struct rbi_segment *segment, struct rbi_view_walk *walk)
{
    struct rbi_view_piece piece;
    *segment = (struct rbi_segment){.pieces = *walk};
    if (!rbi_view_next(&piece, walk))
        return false;
    segment->address = piece.address;
    for (;;) {
        add_piece(segment, &piece);
        struct rbi_view_walk ahead = *walk;
        if (!rbi_view_next(&piece, &ahead) || piece.address != segment->address + segment->bytes)
            return true;
        *walk = ahead;
    }
}

bool rbi_segment_next(struct rbi_segment *segment, struct rbi_view_walk *walk)
{
    for (; walk->range; rbi_view_next_range(walk))
        if (next_in_range(segment, walk))
            return true;
    return false;
}

int64_t rbi_snapshot_epoch_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000 - (int64_t)(rbi_now_ns() / 1000);
}

/* ---- writing ---- */

static void (*const forms[])(struct rbi_sink *sink, const rebatch_pool *pool) = {
    [REBATCH_SNAPSHOT_PICKLE] = rbi_snapshot_pickle,
    [REBATCH_SNAPSHOT_BLOCKS_CSV] = rbi_snapshot_blocks,
    [REBATCH_SNAPSHOT_EVENTS_CSV] = rbi_snapshot_events,
};

static rebatch_status check_format(const rebatch_pool *pool, rebatch_snapshot_format format)
{
    const rebatch_status status = rbi_pool_check(pool);
    if (status == REBATCH_OK && (unsigned)format >= sizeof forms / sizeof *forms)
        return rbi_error(REBATCH_E_INVALID, "format is %d: expected a rebatch_snapshot_format",
                         (int)format);
    return status;
}

rebatch_status rebatch_pool_write_snapshot(rebatch_pool *pool, rebatch_snapshot_format format,
                                           rebatch_status (*write)(const void *data, size_t size,
                                                                   void *user),
                                           void *user)
{
    const rebatch_status status = check_format(pool, format);
    if (status != REBATCH_OK)
        return status;
    if (!write)
        return rbi_error(REBATCH_E_INVALID, "write is NULL: expected where the snapshot goes");
    struct rbi_sink sink;
    sink.write = write;
    sink.user = user;
    sink.status = REBATCH_OK;
    sink.length = 0;
    rbi_view_open(pool);
    forms[format](&sink, pool);
    flush(&sink);
    rbi_view_close(pool);
    return sink.status;
}

struct file {
    const char *path;
    int descriptor;
};

static rebatch_status refuse_file(const struct file *file)
{
    return rbi_error(REBATCH_E_IO, "%s cannot be written: %s", file->path, strerror(errno));
}

static rebatch_status write_file(const void *data, size_t size, void *user)
{
    const struct file *file = user;
    for (const char *from = data; size > 0;) {
        const ssize_t written = write(file->descriptor, from, size);
        if (written < 0 && errno == EINTR)
            continue;
        if (written < 0)
            return refuse_file(file);
        from += written;
        size -= (size_t)written;
    }
    return REBATCH_OK;
}

rebatch_status rebatch_pool_save_snapshot(rebatch_pool *pool, rebatch_snapshot_format format,
                                          const char *path)
{
    rebatch_status status = check_format(pool, format);
    if (status != REBATCH_OK)
        return status;
    if (!path)
        return rbi_error(REBATCH_E_INVALID, "path is NULL: expected a file's name");
    struct file file = {path, open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)};
    if (file.descriptor < 0)
        return refuse_file(&file);
    status = rebatch_pool_write_snapshot(pool, format, write_file, &file);
    if (close(file.descriptor) != 0 && status == REBATCH_OK)
        status = refuse_file(&file);
    return status;
}
