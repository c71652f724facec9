/* Owns the other end of the socket: a request to one process, and the list of all.
 * Must not know what is done there. */
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "launch/yield.h"
#include "rebatch/sharing.h"

static rebatch_status send_line(int fd, const char *request)
{
    char line[RBI_REQUEST_BYTES];
    const size_t length = strlen(request);
    memcpy(line, request, length);
    line[length] = '\n';
    if (send(fd, line, length + 1, MSG_NOSIGNAL) == (ssize_t)length + 1 ||
        errno == EPIPE) /* who is refused has the answer already */
        return REBATCH_OK;
    return rbi_error(REBATCH_E_IO, "the request cannot be sent: %s", strerror(errno));
}

/* Up to the newline, or a zero byte where there is no room for more. */
static rebatch_status receive_line(int fd, char *answer, size_t size)
{
    char next;
    ssize_t got;
    for (size_t length = 0; (got = recv(fd, &next, 1, 0)) > 0 || (got < 0 && errno == EINTR);) {
        if (got > 0 && next == '\n')
            return REBATCH_OK;
        if (got > 0 && length + 1 < size)
            answer[length++] = next;
        answer[length] = '\0';
    }
    answer[0] = '\0';
    return got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)
               ? rbi_error(REBATCH_E_IO, "no answer within 2 seconds")
               : rbi_error(REBATCH_E_IO, "the process has ended before it answered");
}

/* PID.sock for a number; *path may be `text`. */
static rebatch_status find_path(char *text, size_t size, const char **path)
{
    char folder[PATH_MAX];
    if ((*path)[0] == '\0' || (*path)[strspn(*path, "0123456789")] != '\0')
        return REBATCH_OK;
    const rebatch_status status = rbi_socket_folder(folder, sizeof folder, false);
    struct rbi_text t = {text, size, 0};
    rbi_text_add(&t, "%s/%s.sock", folder, *path);
    *path = text;
    return status;
}

rebatch_status rebatch_ask(char *answer, size_t size, const char *path, const char *request)
{
    static const struct timeval status_most = {.tv_sec = 2};
    char named[PATH_MAX + 32];
    int fd;
    if (answer && size)
        answer[0] = '\0';
    if (!answer || !size || !path || !request)
        return rbi_error(REBATCH_E_INVALID, "%s",
                         !answer ? "answer is NULL"
                         : !size ? "size is 0"
                         : !path ? "path is NULL"
                                 : "request is NULL");
    if (strlen(request) >= RBI_REQUEST_BYTES || strchr(request, '\n'))
        return rbi_error(REBATCH_E_INVALID, "the request is no line of at most 127 bytes");
    rebatch_status status = find_path(named, sizeof named, &path);
    if (!status)
        status = rbi_socket_connect(&fd, path);
    if (status)
        return status;
    if (strcmp(request, "status") == 0)
        (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &status_most, sizeof status_most);
    status = send_line(fd, request);
    if (!status)
        status = receive_line(fd, answer, size);
    (void)close(fd);
    return status;
}

/* ---- the list ---- */

/* What stands behind a name in an object that this library has written. */
static const char *find(const char *json, const char *name)
{
    char key[32];
    struct rbi_text t = {key, sizeof key, 0};
    rbi_text_add(&t, "\"%s\": ", name);
    const char *const at = strstr(json, key);
    return at ? at + t.length : "";
}

static void add_size(struct rbi_text *t, const char *json, const char *name)
{
    char shown[16] = "?";
    struct rbi_text size = {shown, sizeof shown, 0};
    const char *const at = find(json, name);
    if (at[0] >= '0' && at[0] <= '9')
        rbi_text_add_bytes(&size, strtoull(at, NULL, 10));
    rbi_text_add(t, "%-10s", shown);
}

/* A text up to its quote, or a number. */
static void add_plain(struct rbi_text *t, const char *json, const char *name, int width)
{
    const char *at = find(json, name);
    const bool is_text = at[0] == '"';
    at += is_text;
    rbi_text_add(t, "%-*.*s", width, (int)strcspn(at, is_text ? "\"" : ",}"), at);
}

static void add_row(struct rbi_text *t, const char *json)
{
    add_plain(t, json, "pid", 9);
    add_size(t, json, "held_bytes");
    add_size(t, json, "needs_bytes");
    add_size(t, json, "bound_bytes");
    add_plain(t, json, "micro", 8);
    add_plain(t, json, "samples_per_second", 12);
    add_plain(t, json, "state", 15);
    add_plain(t, json, "command", 0);
    rbi_text_add(t, "\n");
}

/* One that does not answer in time is left out of a table of those that do. */
static void add_process(struct rbi_text *t, const char *path, bool as_json, bool is_first)
{
    char answer[RBI_ANSWER_BYTES];
    if (rebatch_ask(answer, sizeof answer, path, "status") || answer[0] != '{')
        return;
    if (as_json)
        rbi_text_add(t, "%s\n  %s", is_first ? "" : ",", answer);
    else
        add_row(t, answer);
}

size_t rebatch_top_format(char *text, size_t size, bool as_json)
{
    char folder[PATH_MAX], path[PATH_MAX + 256];
    struct rbi_text t = {text, size, 0};
    if (size)
        text[0] = '\0';
    rbi_text_add(&t, as_json ? "["
                             : "PID      HELD      NEEDS     BOUND     MICRO   SAMPLES/S   STATE   "
                               "       COMMAND\n");
    const size_t empty = t.length;
    DIR *const files = rbi_socket_folder(folder, sizeof folder, false) ? NULL : opendir(folder);
    for (const struct dirent *file; files && (file = readdir(files));) {
        const size_t length = strlen(file->d_name);
        struct rbi_text p = {path, sizeof path, 0};
        rbi_text_add(&p, "%s/%s", folder, file->d_name);
        if (length > 5 && strcmp(file->d_name + length - 5, ".sock") == 0)
            add_process(&t, path, as_json, t.length == empty);
    }
    if (files)
        (void)closedir(files);
    if (as_json)
        rbi_text_add(&t, t.length == empty ? "]\n" : "\n]\n");
    return t.length;
}
