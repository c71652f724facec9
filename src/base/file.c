/* Owns small files that several processes read and replace: whole or not at all.
 * Must not know what is in them. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"

/* ---- the seam: every system call goes through here ---- */

static struct rbi_countdown failure;
static atomic_uint_fast64_t calls;

void rbi_file_fail(uint64_t nth, uint64_t times)
{
    rbi_countdown_set(&failure, nth, times);
}

uint64_t rbi_file_calls(void)
{
    return atomic_load(&calls);
}

static bool fails_now(void)
{
    atomic_fetch_add(&calls, 1);
    if (!rbi_countdown_strikes(&failure))
        return false;
    errno = EIO;
    return true;
}

#define IO(call) (fails_now() ? -1 : (call))

static rebatch_status say(const char *path, const char *what)
{
    return rbi_error(REBATCH_E_IO, "%.200s cannot be %s: %s", path, what, strerror(errno));
}

/* A descriptor is given up whatever close() says; the disk was asked by fsync(). */
static void close_file(int file)
{
    if (file >= 0)
        (void)close(file);
}

/* ---- reading ---- */

/* A folder, a pipe or a device would be read for ever, or replaced by a file. */
static rebatch_status look_at(struct stat *about, int file, const char *path)
{
    if (IO(fstat(file, about)) != 0)
        return say(path, "looked at");
    if (!S_ISREG(about->st_mode))
        return rbi_error(REBATCH_E_IO, "%.200s is no regular file", path);
    return REBATCH_OK;
}

static rebatch_status read_all(char *bytes, size_t *length, size_t room, int file, const char *path)
{
    while (*length < room) {
        const ssize_t got = IO(read(file, bytes + *length, room - *length));
        if (got < 0 && errno != EINTR)
            return say(path, "read");
        if (got == 0)
            return REBATCH_OK;
        *length += got > 0 ? (size_t)got : 0;
    }
    return rbi_error(REBATCH_E_IO, "%.200s was changed while it was read", path);
}

static rebatch_status read_file(char **bytes, size_t *length, int file, const char *path,
                                size_t most)
{
    struct stat about;
    rebatch_status status = look_at(&about, file, path);
    if (status)
        return status;
    const size_t room = (size_t)about.st_size + 1;
    if (room > most)
        return rbi_error(REBATCH_E_IO, "%.200s is larger than %zu bytes", path, most);
    *bytes = rbi_heap_calloc(room + 1, 1);
    if (!*bytes)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory to read %.200s", path);
    status = read_all(*bytes, length, room, file, path);
    if (!status)
        return REBATCH_OK;
    rbi_heap_free(*bytes);
    *bytes = NULL;
    *length = 0;
    return status;
}

rebatch_status rbi_file_read(char **bytes, size_t *length, const char *path, size_t most)
{
    *bytes = NULL;
    *length = 0;
    const int file = IO(open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (file < 0 && errno == ENOENT) {
        *bytes = rbi_heap_calloc(1, 1);
        return *bytes ? REBATCH_OK
                      : rbi_error(REBATCH_E_HOST_OOM, "no host memory to read %.200s", path);
    }
    if (file < 0)
        return say(path, "opened");
    const rebatch_status status = read_file(bytes, length, file, path, most);
    close_file(file);
    return status;
}

/* ---- the lock ---- */

#define LOCK_LOOK_NS 2000000

/* One try. REBATCH_OK with *lock -1: somebody else has it, or has replaced the file meanwhile. */
static rebatch_status try_lock(int *lock, const char *path)
{
    struct stat ours, theirs;
    *lock = -1;
    const int file = IO(open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666));
    if (file < 0)
        return say(path, "opened");
    rebatch_status status = look_at(&ours, file, path);
    if (!status && IO(flock(file, LOCK_EX | LOCK_NB)) != 0) {
        if (errno != EWOULDBLOCK && errno != EINTR)
            status = say(path, "locked");
    } else if (!status && IO(stat(path, &theirs)) != 0) {
        if (errno != ENOENT)
            status = say(path, "looked at");
    } else if (!status && ours.st_dev == theirs.st_dev && ours.st_ino == theirs.st_ino) {
        *lock = file;
    }
    if (*lock < 0)
        close_file(file);
    return status;
}

rebatch_status rbi_file_lock(int *lock, const char *path, uint64_t patience_ns)
{
    const uint64_t began = rbi_now_ns();
    for (;;) {
        const rebatch_status status = try_lock(lock, path);
        if (status || *lock >= 0)
            return status;
        if (rbi_now_ns() - began >= patience_ns)
            return rbi_error(REBATCH_E_IO, "%.200s is locked by another process", path);
        (void)nanosleep(&(struct timespec){0, LOCK_LOOK_NS}, NULL);
    }
}

void rbi_file_unlock(int lock)
{
    close_file(lock);
}

/* ---- replacing ---- */

static rebatch_status write_all(int file, const char *path, const char *bytes, size_t length)
{
    for (size_t done = 0; done < length;) {
        const ssize_t put = IO(write(file, bytes + done, length - done));
        if (put < 0 && errno != EINTR)
            return say(path, "written");
        done += put > 0 ? (size_t)put : 0;
    }
    return IO(fsync(file)) == 0 ? REBATCH_OK : say(path, "written");
}

/* Who holds the lock is the only one that writes there, so what is there was left by a crash. */
static rebatch_status write_beside(const char *beside, int lock, const char *bytes, size_t length)
{
    struct stat about;
    rebatch_status status = look_at(&about, lock, beside);
    if (status)
        return status;
    if (IO(unlink(beside)) != 0 && errno != ENOENT)
        return say(beside, "removed");
    const int file = IO(open(beside, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (file < 0)
        return say(beside, "made");
    if (IO(fchmod(file, about.st_mode & 0777)) != 0)
        status = say(beside, "given its mode");
    if (!status)
        status = write_all(file, beside, bytes, length);
    close_file(file);
    return status;
}

static rebatch_status keep_old(const char *path, const char *keep_as)
{
    if (IO(unlink(keep_as)) != 0 && errno != ENOENT)
        return say(keep_as, "removed");
    return IO(link(path, keep_as)) == 0 ? REBATCH_OK : say(keep_as, "made");
}

/* That a name now means another file is on the disk when its folder is. The file itself is good
 * either way, so that this cannot be done is no failure. */
static void sync_folder(const char *path)
{
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/');
    const size_t length = slash ? (size_t)(slash - path) + 1 : 0;
    if (length >= sizeof folder)
        return;
    memcpy(folder, path, length);
    memcpy(folder + length, ".", 2);
    const int opened = IO(open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (opened >= 0)
        (void)IO(fsync(opened));
    close_file(opened);
}

rebatch_status rbi_file_replace(const char *path, int lock, const char *bytes, size_t length,
                                const char *keep_as)
{
    char beside[PATH_MAX];
    const int beside_length = snprintf(beside, sizeof beside, "%s.new", path);
    if (beside_length < 0 || (size_t)beside_length >= sizeof beside)
        return rbi_error(REBATCH_E_IO, "%.200s...: the name is too long", path);
    rebatch_status status = write_beside(beside, lock, bytes, length);
    if (!status && keep_as)
        status = keep_old(path, keep_as);
    if (!status && IO(rename(beside, path)) != 0)
        status = say(path, "replaced");
    if (status)
        (void)unlink(beside);
    else
        sync_folder(path);
    return status;
}
