/* The parts of a socket by which somebody asks for memory.
 * Must not know how memory is given. */
#ifndef RBI_YIELD_H
#define RBI_YIELD_H

#include <limits.h>
#include <pthread.h>
#include <sys/types.h>

#include "config/settings.h"
#include "recover/interface.h"

/* The longest request, newline included, and the longest answer, zero byte included. */
#define RBI_REQUEST_BYTES 128
#define RBI_ANSWER_BYTES 1024

/* ---- where sockets are (socket.c) ---- */

struct rbi_socket {
    int fd; /* -1: there is none */
    char path[PATH_MAX];
    dev_t device; /* of the file, so that no other one is removed */
    ino_t inode;
};

/* The folder of this user. REBATCH_E_IO when it is another's, or may be written by others; where
 * `is_made`, when it cannot be made. */
rebatch_status rbi_socket_folder(char *out, size_t size, bool is_made);
/* Listens at `path` as rebatch_yield_to() says. REBATCH_E_IO. */
rebatch_status rbi_socket_listen(struct rbi_socket *out, const char *path);
/* Closes it, and removes its file if that is still its own. */
void rbi_socket_end(struct rbi_socket *own);
/* REBATCH_E_IO where nobody answers; a file that a killed process left is removed. */
rebatch_status rbi_socket_connect(int *fd, const char *path);

/* ---- requests (yield.c) ---- */

/* The session's environment, or its settings unless they are NULL, may ask for a socket. */
rebatch_status rbi_yield_open(const rebatch *rb, const rebatch_config *config);

/* ---- who asks (clients.c) ---- */

/* One who has connected, and has one request. */
struct rbi_client {
    int fd; /* -1: none */
    size_t length;
    uint64_t since_ns; /* when it came */
    bool is_read;      /* the request is there, without its newline */
    char line[RBI_REQUEST_BYTES];
};

/* What answers, in the thread of the socket. */
struct rbi_answerer {
    /* A request, which it answers now or later: it is called at each turn until then. */
    void (*answer)(struct rbi_client *client);
    /* It has gone before it was answered. */
    void (*gone)(struct rbi_client *client);
};

/* Serves, in a thread of its own, until rbi_clients_end(). Each borrows what it is given. */
rebatch_status rbi_clients_begin(const struct rbi_socket *own, const struct rbi_answerer *answerer);
void rbi_clients_end(void);
/* The same in a child of fork(), which has the descriptors and not the thread. */
void rbi_clients_forget(void);
/* There may be something to answer. Any thread may call it. */
void rbi_clients_ring(void);
/* Sends the line, which it ends with a newline, and the client is done. */
void rbi_client_end(struct rbi_client *client, struct rbi_text *answer);
void rbi_client_refuse(struct rbi_client *client, const char *why);
/* A thread that gets none of the program's signals. An error number. */
int rbi_thread_start(pthread_t *out, void *(*run)(void *user));

#endif
