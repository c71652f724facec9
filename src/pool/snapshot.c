/* Owns the walk over what the pool holds, and where a snapshot goes: a caller's function or a file.
 * Must not know in what form it is written. */
#include "pool/snapshot.h"

#include <errno.h>
#include <fcntl.h>
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

struct rbi_pieces rbi_pieces_of(const rebatch_pool *pool, const struct rbi_range *range)
{
    return (struct rbi_pieces){range, pool->granule_bytes, range->first, range->address};
}

static void step_to(struct rbi_pieces *pieces, const struct rbi_block *block)
{
    pieces->block = block;
    pieces->at = block ? block->address : NULL;
}

/* Moves to the end of the granule, or of the block where that is before it; says whether the
 * granule is there. */
static bool pass_granule(struct rbi_pieces *pieces)
{
    const struct rbi_range *range = pieces->range;
    const size_t number = (size_t)(pieces->at - range->address) / pieces->granule_bytes;
    const size_t end = (number + 1) * pieces->granule_bytes;
    const size_t block_end =
        (size_t)(pieces->block->address - range->address) + pieces->block->bytes;
    pieces->at = range->address + rbi_min(end, block_end);
    return range->granules[number] != 0;
}

/* A piece of a block that has granules at some of its addresses. */
static bool next_part(struct rbi_piece *piece, struct rbi_pieces *pieces)
{
    const char *const end = pieces->block->address + pieces->block->bytes;
    *piece = (struct rbi_piece){pieces->block, pieces->at, 0};
    while (pieces->at < end) {
        const char *const from = pieces->at;
        if (pass_granule(pieces)) {
            piece->bytes += (size_t)(pieces->at - from);
        } else if (piece->bytes > 0) {
            pieces->at = from;
            break;
        } else {
            piece->address = pieces->at;
        }
    }
    if (pieces->at == end)
        step_to(pieces, pieces->block->after);
    return piece->bytes > 0;
}

bool rbi_pieces_next(struct rbi_piece *piece, struct rbi_pieces *pieces)
{
    while (pieces->block) {
        const struct rbi_block *const block = pieces->block;
        const bool gap = block->state == RBI_BLOCK_HOLE || block->state == RBI_BLOCK_GUARD;
        const bool torn = block->state == RBI_BLOCK_LOST || block->state == RBI_BLOCK_HELD;
        if (pieces->range->granules && torn) {
            if (next_part(piece, pieces))
                return true;
            continue;
        }
        step_to(pieces, block->after);
        if (gap)
            continue;
        *piece = (struct rbi_piece){block, block->address, block->bytes};
        return true;
    }
    return false;
}

static void add_piece(struct rbi_segment *segment, const struct rbi_piece *piece)
{
    segment->count++;
    segment->bytes += piece->bytes;
    if (rbi_piece_is_live(piece)) {
        segment->live_bytes += piece->bytes;
        segment->requested_bytes += piece->block->requested_bytes;
    } else if (piece->block->state == RBI_BLOCK_PENDING) {
        segment->pending_bytes += piece->bytes;
    }
}

bool rbi_segment_next(struct rbi_segment *segment, struct rbi_pieces *pieces)
{
    struct rbi_piece piece;
    *segment = (struct rbi_segment){.pieces = *pieces};
    if (!rbi_pieces_next(&piece, pieces))
        return false;
    segment->address = piece.address;
    for (;;) {
        add_piece(segment, &piece);
        struct rbi_pieces ahead = *pieces;
        if (!rbi_pieces_next(&piece, &ahead) || piece.address != segment->address + segment->bytes)
            return true;
        *pieces = ahead;
    }
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
    rbi_pool_take_lock(pool);
    rbi_pool_callbacks++;
    forms[format](&sink, pool);
    flush(&sink);
    rbi_pool_callbacks--;
    rbi_lock_give(&pool->lock);
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
