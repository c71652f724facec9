/* What the tests of a training that is asked for memory share: the training, in a thread, and who
 * asks. Time stands but for what a test lets pass, so nothing runs out on a busy machine.
 * Must not know the library's inside. */
#ifndef YIELD_COMMON_H
#define YIELD_COMMON_H

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gpt_common.h"
#include "rebatch/sharing.h"
#include "unit/clock.h"

#define BATCH 16
#define WEIGHTS MIB(8)
#define SAMPLE MIB(2)

static char folder[] = "/tmp/rebatch-yield-XXXXXX", path[64];

/* An alarm, rather than a timeout of Criterion 2.4, which now and then loses the memory of one. */
static inline void enter(void)
{
    (void)alarm(300);
    cr_assert(mkdtemp(folder));
    (void)snprintf(path, sizeof path, "%s/a.sock", folder);
    setenv("XDG_RUNTIME_DIR", folder, 1);
    unsetenv("REBATCH_YIELD");
    clock_stop();
}

static inline void leave(void)
{
    char command[80];
    (void)snprintf(command, sizeof command, "rm -rf %s", folder);
    cr_assert_eq(system(command), 0);
}

/* ---- a training, in a thread of its own ---- */

struct rig {
    rebatch_device *device;
    rebatch *rb;
    rebatch_step_ops ops;
    void *weights;
    pthread_t thread;
    bool has_thread;
    unsigned counted;          /* samples of the update that comes */
    atomic_uint updates, lost; /* updates of another number of samples */
    atomic_size_t micro;       /* of the last step */
    atomic_bool stops, holds;  /* holds: the micro-batch that begins next goes on */
    atomic_bool is_held;       /* it has begun */
};

static inline rebatch_status zero_grad(void *user)
{
    ((struct rig *)user)->counted = 0;
    return REBATCH_OK;
}

static inline rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct rig *rig = user;
    void *activations;
    if (rebatch_pool_alloc(&activations, mb->pool, mb->count * SAMPLE, mb->stream, 0))
        return REBATCH_OOM;
    rebatch_mutating(rig->rb);
    rig->counted += (unsigned)mb->count;
    clock_advance(1000);
    while (rig->holds && rig->updates >= 3 && !rig->stops) {
        rig->is_held = true;
        usleep(1000);
    }
    rig->is_held = false;
    return rebatch_pool_free(mb->pool, activations);
}

static inline rebatch_status optimizer_step(void *user)
{
    struct rig *rig = user;
    rebatch_mutating(rig->rb);
    rig->updates++;
    rig->lost += rig->counted != BATCH;
    return REBATCH_OK;
}

/* On a device, or NULL: one of the host; asked at a socket, or at none. */
static inline void rig_open_on(struct rig *rig, rebatch_device *device, const char *socket_path)
{
    *rig = (struct rig){.device = device,
                        .ops = OPS(zero_grad, forward_backward, optimizer_step,
                                   .flags = REBATCH_DECLARES_MUTATION)};
    if (!device)
        OK(rebatch_device_open_host(&rig->device, MIB(64), NULL));
    OK(rebatch_open(&rig->rb, rig->device, &OPTIONS(.grow_after = 1)));
    OK(rebatch_pool_alloc(&rig->weights, rebatch_get_pool(rig->rb), WEIGHTS, NULL, 0));
    if (socket_path)
        OK(rebatch_yield_to(rebatch_get_pool(rig->rb), socket_path));
}

static inline void rig_open(struct rig *rig, const char *socket_path)
{
    rig_open_on(rig, NULL, socket_path);
}

static inline void *train(void *user)
{
    struct rig *rig = user;
    rebatch_step_report report;
    while (!rig->stops) {
        OK(rebatch_step(rig->rb, &rig->ops, BATCH, rig, &report));
        rig->micro = report.micro;
        usleep(500);
    }
    return NULL;
}

static inline void rig_train(struct rig *rig)
{
    cr_assert_eq(pthread_create(&rig->thread, NULL, train, rig), 0);
    rig->has_thread = true;
    while (rig->updates < 3)
        usleep(1000);
}

static inline void wait_for_updates(struct rig *rig, unsigned more)
{
    const unsigned updates = rig->updates;
    while (rig->updates < updates + more)
        usleep(1000);
}

/* Until it is in a micro-batch, which goes on. */
static inline void rig_hold(struct rig *rig)
{
    rig->holds = true;
    while (!rig->is_held)
        usleep(1000);
}

static inline void rig_stop(struct rig *rig)
{
    rig->stops = true;
    if (rig->has_thread)
        cr_assert_eq(pthread_join(rig->thread, NULL), 0);
    rig->has_thread = false;
}

static inline void rig_close(struct rig *rig)
{
    rig_stop(rig);
    rebatch_close(rig->rb);
    rebatch_device_close(rig->device);
}

static inline void wait_for_micro(struct rig *rig, size_t micro)
{
    while (rig->micro != micro)
        usleep(1000);
}

static inline uint64_t held_by(const struct rig *rig)
{
    return pool_stats_of(rebatch_get_pool(rig->rb)).reserved_bytes;
}

/* ---- who asks ---- */

#define ASK(text, request) OK(rebatch_ask(text, sizeof text, path, request))

static inline uint64_t number_in(const char *json, const char *name)
{
    char key[64];
    (void)snprintf(key, sizeof key, "\"%s\": ", name);
    HAS(json, key);
    return strtoull(strstr(json, key) + strlen(key), NULL, 10);
}

static inline int connect_raw(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memcpy(address.sun_path, path, sizeof path);
    cr_assert_eq(connect(fd, (struct sockaddr *)&address, sizeof address), 0, "%s",
                 strerror(errno));
    return fd;
}

/* Until the training's socket has read all that was sent before, and knows of all who have gone:
 * it takes in one client a turn, and looks at each in every turn. */
static inline void wait_for_turns(void)
{
    char text[1024];
    for (int i = 0; i < 3; i++)
        ASK(text, "status");
}

static inline int send_raw(const char *line)
{
    const int fd = connect_raw();
    cr_assert_eq(send(fd, line, strlen(line), 0), (ssize_t)strlen(line));
    return fd;
}

/* The answer to that, without its newline. */
static inline void receive_raw(char *text, size_t size, int fd)
{
    const ssize_t got = recv(fd, text, size - 1, 0);
    cr_assert_gt(got, 0);
    text[got - 1] = '\0';
    (void)close(fd);
}

/* As ASK(), of a training that pauses for longer than is waited for a step. */
static inline void ask_who_pauses(char *text, size_t size, const char *line)
{
    const int fd = send_raw(line);
    wait_for_turns();
    clock_advance(6 * SECOND_NS);
    receive_raw(text, size, fd);
}

/* ---- either side ends ---- */

static inline void kill_process(pid_t child)
{
    cr_assert_eq(kill(child, SIGKILL), 0);
    cr_assert_eq(waitpid(child, NULL, 0), child);
}

static inline size_t count_of_shared_files(void)
{
    size_t count = 0;
    DIR *files = opendir("/dev/shm");
    for (const struct dirent *file; files && (file = readdir(files));)
        count += strstr(file->d_name, "rebatch") != NULL;
    if (files)
        (void)closedir(files);
    return count;
}

#endif
