/* Owns the thread of the socket: who connects, the line of each, and how long one may take.
 * Must not know what a line asks for. */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "launch/yield.h"

#define CLIENTS 64
#define LINE_NS UINT64_C(2000000000)  /* that a client has for its line */
#define TURN_MS 100                   /* between two looks at requests that are not answered */
#define STACK_BYTES ((size_t)1 << 20) /* on which the driver runs too, in a wake and a trim */

static struct {
    pthread_t thread;
    bool runs;
    atomic_bool ends;
    int listener, bell; /* bell: ends a wait */
    const struct rbi_answerer *answerer;
    struct rbi_client clients[CLIENTS];
} all = {.bell = -1};

void rbi_client_end(struct rbi_client *client, struct rbi_text *answer)
{
    const size_t length = rbi_min(answer->length, answer->size - 1);
    answer->text[length] = '\n'; /* in place of the zero byte */
    (void)send(client->fd, answer->text, length + 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    (void)close(client->fd);
    client->fd = -1;
}

void rbi_client_refuse(struct rbi_client *client, const char *why)
{
    char text[RBI_ANSWER_BYTES];
    struct rbi_text t = {text, sizeof text, 0};
    rbi_text_add(&t, "no: %s", why);
    rbi_client_end(client, &t);
}

static bool is_allowed(int fd)
{
    struct ucred peer;
    socklen_t size = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
           (peer.uid == geteuid() || peer.uid == 0);
}

static void take_in(void)
{
    struct rbi_client client = {.fd =
                                    accept4(all.listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK),
                                .since_ns = rbi_now_ns()};
    size_t free_at = 0;
    while (free_at < CLIENTS && all.clients[free_at].fd >= 0)
        free_at++;
    if (client.fd < 0) {
        if (errno != EAGAIN) /* no descriptor is left, and the client still waits */
            (void)poll(&(struct pollfd){.fd = all.bell, .events = POLLIN}, 1, TURN_MS);
        return;
    }
    if (!is_allowed(client.fd))
        rbi_client_refuse(&client, "only the process's own user and root may ask");
    else if (free_at == CLIENTS)
        rbi_client_refuse(&client, "too many others ask");
    else
        all.clients[free_at] = client;
}

/* It ends with a newline, or with the client's last byte. */
static void read_line(struct rbi_client *client)
{
    const size_t room = sizeof client->line - client->length;
    const ssize_t got = recv(client->fd, client->line + client->length, room, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    client->length += got > 0 ? (size_t)got : 0;
    const char *const end = memchr(client->line, '\n', client->length);
    if (end)
        client->length = (size_t)(end - client->line);
    else if (client->length == sizeof client->line)
        rbi_client_refuse(client, "a request has at most 127 bytes");
    else if (got > 0)
        return;
    client->is_read = true;
    client->line[rbi_min(client->length, sizeof client->line - 1)] = '\0';
}

static void look_after(struct rbi_client *client, short events)
{
    if (client->is_read && (events & (POLLHUP | POLLERR))) {
        all.answerer->gone(client);
        (void)close(client->fd);
        client->fd = -1;
    } else if (!client->is_read && events) {
        read_line(client);
    } else if (!client->is_read && rbi_now_ns() - client->since_ns > LINE_NS) {
        rbi_client_refuse(client, "a request must come within 2 seconds");
    }
    if (client->fd >= 0 && client->is_read)
        all.answerer->answer(client);
}

static void *serve(void *unused)
{
    (void)unused;
    while (!atomic_load(&all.ends)) {
        struct pollfd fds[2 + CLIENTS] = {{.fd = all.bell, .events = POLLIN},
                                          {.fd = all.listener, .events = POLLIN}};
        int timeout_ms = -1;
        uint64_t rings;
        for (size_t i = 0; i < CLIENTS; i++) {
            const struct rbi_client *const client = &all.clients[i];
            fds[2 + i] = (struct pollfd){.fd = client->fd, .events = client->is_read ? 0 : POLLIN};
            if (client->fd >= 0)
                timeout_ms = TURN_MS;
        }
        (void)poll(fds, 2 + CLIENTS, timeout_ms);
        if (fds[0].revents)
            (void)!read(all.bell, &rings, sizeof rings);
        for (size_t i = 0; i < CLIENTS; i++)
            if (all.clients[i].fd >= 0)
                look_after(&all.clients[i], fds[2 + i].revents);
        if (fds[1].revents)
            take_in();
    }
    for (size_t i = 0; i < CLIENTS; i++)
        if (all.clients[i].fd >= 0)
            rbi_client_refuse(&all.clients[i], "the training ends");
    return NULL;
}

void rbi_clients_ring(void)
{
    const uint64_t one = 1;
    (void)!write(all.bell, &one, sizeof one);
}

int rbi_thread_start(pthread_t *out, void *(*run)(void *user))
{
    pthread_attr_t attributes;
    sigset_t every, before;
    (void)sigfillset(&every);
    (void)pthread_attr_init(&attributes);
    (void)pthread_attr_setstacksize(&attributes, STACK_BYTES);
    (void)pthread_sigmask(SIG_SETMASK, &every, &before);
    const int error = pthread_create(out, &attributes, run, NULL);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    (void)pthread_attr_destroy(&attributes);
    return error;
}

rebatch_status rbi_clients_begin(const struct rbi_socket *own, const struct rbi_answerer *answerer)
{
    rbi_assert(!all.runs);
    all.listener = own->fd;
    all.answerer = answerer;
    for (size_t i = 0; i < CLIENTS; i++)
        all.clients[i].fd = -1;
    atomic_store(&all.ends, false);
    all.bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    const int error = all.bell < 0 ? errno : rbi_thread_start(&all.thread, serve);
    all.runs = error == 0;
    if (all.runs)
        return REBATCH_OK;
    rbi_clients_forget();
    return rbi_error(REBATCH_E_IO, "no thread for the socket of requests: %s", strerror(error));
}

void rbi_clients_end(void)
{
    if (!all.runs)
        return;
    atomic_store(&all.ends, true);
    rbi_clients_ring();
    (void)pthread_join(all.thread, NULL);
    rbi_clients_forget();
}

void rbi_clients_forget(void)
{
    for (size_t i = 0; all.runs && i < CLIENTS; i++)
        if (all.clients[i].fd >= 0)
            (void)close(all.clients[i].fd);
    all.runs = false;
    if (all.bell >= 0)
        (void)close(all.bell);
    all.bell = -1;
}
