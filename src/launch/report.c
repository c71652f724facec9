/* Owns the way from the library to whoever started the program, and the end of a program that runs
 * for a probe or a check only. Must not know what is said.
 *
 * It is the one place of the library that ends the process. No status would do: a program that was
 * not written for this says that its step failed and ends with a status of its own, or goes on
 * training; and whoever set the variable asked for a probe or a check only. Nothing that
 * the program registered to run at its end runs (_exit), for its other threads are at work still;
 * what it has printed is written. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
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

/* Some 250 bytes a row of the longest table. */
#define MESSAGE_BYTES (80 * 1024)

_Noreturn void rbi_report_end(const struct rbi_run *run, int code, const char *complaint,
                              const char *text)
{
    static char message[MESSAGE_BYTES]; /* the process ends here: there is one */
    struct rbi_text t = {message, sizeof message, 0};
    (void)fflush(NULL);
    /* "answer CODE LENGTH", then what is for stderr, of that length, and for stdout */
    rbi_text_add(&t, "answer %d %zu\n%s%s", code, strlen(complaint), complaint, text);
    if (rbi_report_send(run, message, rbi_min(t.length, sizeof message - 1)))
        _exit(code);
    const bool is_written = rbi_write_all(STDOUT_FILENO, text, strlen(text));
    (void)rbi_write_all(STDERR_FILENO, complaint, strlen(complaint));
    if (!is_written)
        (void)rbi_write_all(STDERR_FILENO, "rebatch: cannot write the output\n", 33);
    _exit(is_written ? code : 1);
}
