/* Owns the way from the library to whoever started the program.
 * Must not know what is said. */
#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

#include "launch/launch.h"

/* A command that has gone is no reason to end a training: no SIGPIPE. */
bool rbi_report_send(const struct rbi_run *run, const char *text, size_t length)
{
    ssize_t sent = -1;
    if (run->settings.report < 0)
        return false;
    do
        sent = send(run->settings.report, text, length, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent == (ssize_t)length;
}

bool rbi_report_write(int fd, const char *text, size_t length)
{
    for (size_t done = 0; done < length;) {
        const ssize_t got = write(fd, text + done, length - done);
        if (got < 0 && errno != EINTR)
            return false;
        done += got > 0 ? (size_t)got : 0;
    }
    return true;
}
