/* Owns the tests of kill -9 at every point of the protocol: the training, or who asks, is killed
 * at each call of the device that a request leads to, while that call is held. Seeds: none. */
#include <poll.h>
#include <sys/mman.h>

#include "device/device.h"
#include "integration/yield_common.h"

TestSuite(yield_kill, .init = enter, .fini = leave);

/* Of both processes: the training holds at its call number `nth` from the moment that is set. In a
 * wake those of the thread that trains, which goes on before the answer comes, do not count. */
static struct {
    atomic_uint nth, calls; /* nth 0: none is held, and none counts */
    atomic_bool is_wake;
    atomic_bool is_held, is_answered;
} * hold;

static struct rbi_device_ops inner, held;
static pthread_t trainer;

static void count(void)
{
    if (!hold->nth || (hold->is_wake && pthread_equal(pthread_self(), trainer)) ||
        ++hold->calls != hold->nth)
        return;
    hold->is_held = true;
    while (hold->nth)
        usleep(1000);
    hold->is_held = false;
}

#define HELD(name, parameters, ...)                                                                \
    static rebatch_status name##_held parameters                                                   \
    {                                                                                              \
        count();                                                                                   \
        return inner.name(__VA_ARGS__);                                                            \
    }
HELD(copy, (void *self, void *to, const void *from, size_t bytes, rebatch_stream stream), self, to,
     from, bytes, stream)
HELD(synchronize, (void *self), self)
HELD(pinned_alloc, (void *self, void **out, size_t bytes), self, out, bytes)
HELD(create, (void *self, rbi_physical *out, size_t bytes), self, out, bytes)
HELD(release, (void *self, rbi_physical physical, size_t bytes), self, physical, bytes)
HELD(map, (void *self, void *address, size_t bytes, rbi_physical physical), self, address, bytes,
     physical)
HELD(set_access, (void *self, void *address, size_t bytes), self, address, bytes)
HELD(unmap, (void *self, void *address, size_t bytes), self, address, bytes)

static void open_held(struct rig *rig)
{
    rig_open(rig, path);
    held = inner = *rig->device->ops;
#define HOLD(name) held.name = inner.name ? name##_held : NULL
    HOLD(copy);
    HOLD(synchronize);
    HOLD(pinned_alloc);
    HOLD(create);
    HOLD(release);
    HOLD(map);
    HOLD(set_access);
    HOLD(unmap);
    rig->device->ops = &held;
    rig_train(rig);
    trainer = rig->thread;
}

/* A request, and what is asked before it. */
static const struct {
    const char *before, *line;
} requests[] = {{NULL, "give 20MiB"}, {NULL, "sleep"}, {"sleep", "wake"}};
#define REQUESTS (sizeof requests / sizeof *requests)

static void share_hold(void)
{
    hold = mmap(NULL, sizeof *hold, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq(hold, MAP_FAILED);
}

/* The next call with that number is held. */
static void arm(unsigned nth, bool is_wake)
{
    hold->is_held = hold->is_answered = false;
    hold->is_wake = is_wake;
    hold->calls = 0;
    hold->nth = nth;
}

/* Whether the call is held; else `fd` has the answer, and there is none with that number. */
static bool wait_for_hold(int fd)
{
    struct pollfd answer = {.fd = fd, .events = POLLIN};
    while (!hold->is_held)
        if (poll(&answer, 1, 1) > 0)
            return false;
    return true;
}

static pid_t start_held_owner(const char *before)
{
    char text[512];
    int ends[2];
    cr_assert_eq(pipe(ends), 0);
    arm(0, false);
    const pid_t child = fork();
    if (child == 0) {
        struct rig rig;
        open_held(&rig);
        (void)!write(ends[1], "", 1);
        for (;;)
            (void)pause();
    }
    (void)close(ends[1]);
    cr_assert_eq(read(ends[0], text, 1), 1);
    (void)close(ends[0]);
    if (before)
        ASK(text, before);
    return child;
}

Test(yield_kill, of_a_training_at_every_call_of_the_device)
{
    char text[512];
    const size_t shared = count_of_shared_files();
    share_hold();
    for (size_t i = 0; i < REQUESTS; i++) {
        bool was_held = true;
        unsigned nth;
        for (nth = 1; was_held; nth++) {
            const pid_t owner = start_held_owner(requests[i].before);
            arm(nth, requests[i].before != NULL);
            const int fd = send_raw(requests[i].line);
            cr_assert_eq(shutdown(fd, SHUT_WR), 0);
            was_held = wait_for_hold(fd);
            kill_process(owner);
            if (was_held)
                cr_expect_leq(recv(fd, text, sizeof text, 0), 0, "%s", requests[i].line);
            (void)close(fd);
            if (nth % 2) /* else the next start removes it */
                FAILS(rebatch_ask(text, sizeof text, path, "status"), REBATCH_E_IO, "is removed");
        }
        cr_expect_gt(nth, 3, "%s has no calls", requests[i].line);
        cr_expect_eq(count_of_shared_files(), shared);
    }
}

/* The child asserts nothing: what it sent would be the parent's. */
static pid_t start_client(const char *line)
{
    char text[512];
    const pid_t child = fork();
    if (child == 0) {
        (void)!rebatch_ask(text, sizeof text, path, line);
        hold->is_answered = true;
        for (;;)
            (void)pause();
    }
    return child;
}

/* As if it had not asked, but for a wake, which is done. In a sleep and a wake the training's
 * socket answers. */
Test(yield_kill, of_a_client_at_every_call_of_the_device)
{
    char text[512];
    share_hold();
    AUTO_CLOSE(rig, rig);
    open_held(&rig);
    for (size_t i = 0; i < REQUESTS; i++) {
        bool was_held = true;
        unsigned nth;
        for (nth = 1; was_held; nth++) {
            if (requests[i].before)
                ASK(text, requests[i].before);
            arm(nth, requests[i].before != NULL);
            const pid_t client = start_client(requests[i].line);
            while (!hold->is_held && !hold->is_answered)
                usleep(1000);
            was_held = !hold->is_answered;
            if (was_held && i > 0)
                wait_for_turns();
            kill_process(client);
            if (was_held && i > 0)
                wait_for_turns();
            arm(0, false);
            if (was_held)
                wait_for_updates(&rig, 3);
            ASK(text, "wake");
            HAS(text, "ok: ");
            wait_for_micro(&rig, BATCH);
        }
        cr_expect_gt(nth, 3, "%s has no calls", requests[i].line);
    }
    rig_stop(&rig);
    cr_expect_eq(rig.lost, 0);
}
