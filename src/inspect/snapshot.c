/* Owns where a snapshot goes: to a caller's function or into a file.
 * Must not know in what form it is written. */
#include "inspect/inspect.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

static void (*const forms[])(struct rbi_sink *sink, const rebatch_pool *pool) = {
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
    rbi_sink_flush(&sink);
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
