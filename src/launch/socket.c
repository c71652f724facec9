/* Owns the files of sockets: where they are, who may open them, and the removal of those that a
 * killed process left. Must not know what is said over them. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "launch/yield.h"

#define LOCK_TRIES 200 /* in two seconds */
#define LOCK_PAUSE_US 10000

static rebatch_status refuse(const char *path, const char *why)
{
    char shown[512];
    struct rbi_text t = {shown, sizeof shown, 0};
    rbi_text_add_path(&t, path);
    return rbi_error(REBATCH_E_IO, "%s: %s", shown, why);
}

rebatch_status rbi_socket_folder(char *out, size_t size, bool is_made)
{
    const char *const run = getenv("XDG_RUNTIME_DIR");
    struct stat there;
    struct rbi_text t = {out, size, 0};
    if (run && run[0] == '/' && stat(run, &there) == 0 && S_ISDIR(there.st_mode))
        rbi_text_add(&t, "%s/rebatch", run);
    else
        rbi_text_add(&t, "/tmp/rebatch-%u", (unsigned)geteuid());
    if (t.length >= size)
        return refuse(run, "a path of this length is too long for a folder of sockets");
    if (is_made && mkdir(out, 0700) && errno != EEXIST)
        return refuse(out, strerror(errno));
    if (lstat(out, &there))
        return refuse(out, strerror(errno));
    if (!S_ISDIR(there.st_mode) || there.st_uid != geteuid() || (there.st_mode & 022))
        return refuse(out, "expected a folder of this user, which no other one may write to");
    return REBATCH_OK;
}

static rebatch_status set_address(struct sockaddr_un *out, const char *path)
{
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    if (path[0] == '\0' || strlen(path) >= sizeof out->sun_path)
        return refuse(path[0] ? path : "\"\"",
                      "expected the path of a socket, which has 1 to 107 bytes");
    memcpy(out->sun_path, path, strlen(path));
    return REBATCH_OK;
}

/* Whoever makes or removes a socket in a folder holds this: in between one that listens not yet
 * would look like one that is left. REBATCH_E_IO: another process has held it for too long. *out is
 * -1 also where the folder cannot be locked. */
static rebatch_status lock_folder(int *out, const char *path)
{
    char folder[PATH_MAX] = ".";
    const char *const slash = strrchr(path, '/');
    if (slash)
        (void)snprintf(folder, sizeof folder, "%.*s", slash == path ? 1 : (int)(slash - path),
                       path);
    *out = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (int i = 0; *out >= 0 && flock(*out, LOCK_EX | LOCK_NB); i++) {
        if (errno == EWOULDBLOCK && i < LOCK_TRIES) {
            (void)usleep(LOCK_PAUSE_US);
            continue;
        }
        const bool is_held = errno == EWOULDBLOCK;
        (void)close(*out);
        *out = -1;
        if (is_held)
            return refuse(folder, "another process holds the lock of the folder (flock): expected "
                                  "it for a moment, not for two seconds");
    }
    return REBATCH_OK;
}

static void unlock_folder(int fd)
{
    if (fd < 0)
        return;
    (void)flock(fd, LOCK_UN); /* a child of fork() may have the descriptor too */
    (void)close(fd);
}

static int connect_to(const struct sockaddr_un *address, int flags)
{
    const struct timeval most = {.tv_sec = 2}; /* a full queue is waited for */
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | flags, 0);
    if (fd < 0)
        return -1;
    (void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &most, sizeof most);
    if (connect(fd, (const struct sockaddr *)address, sizeof *address) == 0)
        return fd;
    const int error = errno;
    (void)close(fd);
    errno = error;
    return -1;
}

/* Removes a socket whose process has gone, which refuses to connect. The folder is locked. */
static bool remove_left(const struct sockaddr_un *address)
{
    struct stat there;
    if (lstat(address->sun_path, &there) || !S_ISSOCK(there.st_mode))
        return false;
    const int fd = connect_to(address, SOCK_NONBLOCK);
    const bool is_left = fd < 0 && errno == ECONNREFUSED;
    if (fd >= 0)
        (void)close(fd);
    return is_left && unlink(address->sun_path) == 0;
}

static bool bind_to(int fd, const struct sockaddr_un *address)
{
    return bind(fd, (const struct sockaddr *)address, sizeof *address) == 0;
}

/* The file has the mode that the descriptor has before. */
static rebatch_status bind_and_listen(int fd, const struct sockaddr_un *address)
{
    const char *const path = address->sun_path;
    struct stat there;
    bool is_bound = fchmod(fd, 0600) == 0 && bind_to(fd, address);
    if (!is_bound && errno == EADDRINUSE && remove_left(address))
        is_bound = bind_to(fd, address);
    if (!is_bound && errno == EADDRINUSE && lstat(path, &there) == 0)
        return refuse(path, S_ISSOCK(there.st_mode)
                                ? "another process answers there: a folder as the path gives "
                                  "each process a socket of its own"
                                : "there is a file that is no socket");
    if (is_bound && listen(fd, SOMAXCONN) == 0)
        return REBATCH_OK;
    return refuse(path, errno == ENOENT ? "expected a socket in a folder that is there"
                                        : strerror(errno));
}

/* PID.sock in a folder; what it is told from is whole, since the program may change its folder. */
static rebatch_status find_path(char *out, size_t size, const char *given)
{
    struct stat there;
    char folder[PATH_MAX];
    struct rbi_text t = {out, size, 0};
    if (!given) {
        const rebatch_status status = rbi_socket_folder(folder, sizeof folder, true);
        if (status)
            return status;
        given = folder;
    }
    if (given[0] && given[0] != '/') {
        char here[PATH_MAX];
        rbi_text_add(&t, "%s/", getcwd(here, sizeof here) ? here : ".");
    }
    rbi_text_add(&t, "%s", given);
    if (stat(given, &there) == 0 && S_ISDIR(there.st_mode))
        rbi_text_add(&t, "%s%d.sock", given[strlen(given) - 1] == '/' ? "" : "/", (int)getpid());
    return t.length < size ? REBATCH_OK : refuse(given, strerror(ENAMETOOLONG));
}

rebatch_status rbi_socket_listen(struct rbi_socket *out, const char *path)
{
    struct sockaddr_un address;
    struct stat made;
    int lock;
    out->fd = -1;
    rebatch_status status = find_path(out->path, sizeof out->path, path);
    if (!status)
        status = set_address(&address, out->path);
    if (!status)
        status = lock_folder(&lock, out->path);
    if (status)
        return status;
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    status = fd < 0 ? refuse(out->path, strerror(errno)) : bind_and_listen(fd, &address);
    if (!status && lstat(out->path, &made))
        status = refuse(out->path, strerror(errno));
    unlock_folder(lock);
    if (status) {
        if (fd >= 0)
            (void)close(fd);
        return status;
    }
    out->fd = fd;
    out->device = made.st_dev;
    out->inode = made.st_ino;
    return REBATCH_OK;
}

void rbi_socket_end(struct rbi_socket *own)
{
    struct stat there;
    int lock;
    if (own->fd < 0)
        return;
    if (!lock_folder(&lock, own->path) && lstat(own->path, &there) == 0 &&
        there.st_dev == own->device && there.st_ino == own->inode)
        (void)unlink(own->path);
    unlock_folder(lock);
    (void)close(own->fd);
    own->fd = -1;
}

rebatch_status rbi_socket_connect(int *fd, const char *path)
{
    struct sockaddr_un address;
    int lock;
    rebatch_status status = set_address(&address, path);
    if (status)
        return status;
    *fd = connect_to(&address, 0);
    if (*fd >= 0)
        return REBATCH_OK;
    if (errno != ECONNREFUSED)
        return refuse(path, strerror(errno));
    status = lock_folder(&lock, path);
    if (status)
        return status;
    const bool is_removed = remove_left(&address);
    unlock_folder(lock);
    return refuse(path, is_removed ? "its process has ended, so the socket is removed"
                                   : "expected the socket of a process, which listens there, or "
                                     "the PID that `rebatch top` shows");
}
