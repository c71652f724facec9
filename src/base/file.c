/* Owns the reading of whole files, and writing all of a text.
 * Must not know what is in them. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"

#define ROOM_FIRST 4096
/* How long a pipe may be without anybody who writes to it. */
#define WRITER_MS 1000

/* A sentence about a file: what is wrong, and why if that is known. */
static rebatch_status say(rebatch_status status, const char *path, const char *what,
                          const char *why)
{
    char shown[160];
    struct rbi_text t = {shown, sizeof shown, 0};
    rbi_text_add_path(&t, path[0] ? path : "\"\"");
    return rbi_error(status, "%s %s%s", shown, what, why);
}

static bool is_pipe(int file)
{
    struct stat about;
    return fstat(file, &about) == 0 && S_ISFIFO(about.st_mode);
}

/* As read(), of a file that is opened not to wait: of a pipe that nobody has opened to write there
 * may never be anything to read. A writer may take its time. */
static ssize_t read_some(int file, char *to, size_t room)
{
    struct pollfd data = {.fd = file, .events = POLLIN};
    ssize_t got = read(file, to, room);
    if (got == 0 && is_pipe(file) && poll(&data, 1, WRITER_MS) >= 0)
        got = read(file, to, room);
    while (got < 0 && (errno == EAGAIN || errno == EINTR)) {
        (void)poll(&data, 1, -1);
        got = read(file, to, room);
    }
    return got;
}

static rebatch_status read_open_file(char **bytes, size_t *length, int file, const char *path,
                                     size_t most)
{
    for (size_t room = 0;;) {
        if (*length + 1 >= room) { /* a zero byte follows */
            room = rbi_max(2 * room, ROOM_FIRST);
            char *grown = rbi_heap_resize(*bytes, room, 1);
            if (!grown)
                return say(REBATCH_E_HOST_OOM, path, "cannot be read: ", "no host memory");
            *bytes = grown;
        }
        const ssize_t got = read_some(file, *bytes + *length, room - 1 - *length);
        if (got < 0)
            return say(REBATCH_E_IO, path, "cannot be read: ", strerror(errno));
        if (got == 0 && *length == 0 && is_pipe(file))
            return say(REBATCH_E_IO, path, "cannot be read: ", "nobody writes to this pipe");
        *length += (size_t)got;
        (*bytes)[*length] = '\0';
        if (*length > most)
            return rbi_error(REBATCH_E_IO, "%.200s is larger than %zu bytes", path, most);
        if (got == 0)
            return REBATCH_OK;
    }
}

rebatch_status rbi_file_read(char **bytes, size_t *length, const char *path, size_t most)
{
    *bytes = NULL;
    *length = 0;
    const int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0)
        return say(REBATCH_E_IO, path, "cannot be read: ", strerror(errno));
    const rebatch_status status = read_open_file(bytes, length, file, path, most);
    (void)close(file);
    if (!status)
        return REBATCH_OK;
    rbi_heap_free(*bytes);
    *bytes = NULL;
    return status;
}

bool rbi_write_all(int fd, const char *text, size_t length)
{
    for (size_t done = 0; done < length;) {
        const ssize_t got = write(fd, text + done, length - done);
        if (got < 0 && errno != EINTR)
            return false;
        done += got > 0 ? (size_t)got : 0;
    }
    return true;
}
