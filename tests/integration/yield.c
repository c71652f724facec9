/* Owns the tests of a training that is asked for memory over its socket: what it answers, what it
 * gives, and what becomes of both sides. Must not know the library's inside. */
#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "gpt_common.h"
#include "rebatch/sharing.h"

#define BATCH 16
#define WEIGHTS MIB(8)
#define SAMPLE MIB(2)

static char folder[] = "/tmp/rebatch-yield-XXXXXX", path[64];

static void enter(void)
{
    cr_assert(mkdtemp(folder));
    (void)snprintf(path, sizeof path, "%s/a.sock", folder);
    setenv("XDG_RUNTIME_DIR", folder, 1);
    unsetenv("REBATCH_YIELD");
}

static void leave(void)
{
    char command[80];
    (void)snprintf(command, sizeof command, "rm -rf %s", folder);
    cr_assert_eq(system(command), 0);
}

TestSuite(yield, .init = enter, .fini = leave, .timeout = 60);

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
    atomic_bool stops, holds;  /* holds: the micro-batch that runs goes on */
    atomic_bool in_microbatch;
};

static rebatch_status zero_grad(void *user)
{
    ((struct rig *)user)->counted = 0;
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct rig *rig = user;
    void *activations;
    if (rebatch_pool_alloc(&activations, mb->pool, mb->count * SAMPLE, mb->stream, 0))
        return REBATCH_OOM;
    rebatch_mutating(rig->rb);
    rig->counted += (unsigned)mb->count;
    rig->in_microbatch = true;
    while (rig->holds && rig->updates >= 3 && !rig->stops)
        usleep(1000);
    rig->in_microbatch = false;
    return rebatch_pool_free(mb->pool, activations);
}

static rebatch_status optimizer_step(void *user)
{
    struct rig *rig = user;
    rebatch_mutating(rig->rb);
    rig->updates++;
    rig->lost += rig->counted != BATCH;
    return REBATCH_OK;
}

/* Asked at a socket, or at none. */
static void rig_open(struct rig *rig, const char *socket_path)
{
    *rig = (struct rig){.ops = OPS(zero_grad, forward_backward, optimizer_step,
                                   .flags = REBATCH_DECLARES_MUTATION)};
    open_on_host(&rig->device, &rig->rb, MIB(64), &OPTIONS(.grow_after = 1));
    OK(rebatch_pool_alloc(&rig->weights, rebatch_get_pool(rig->rb), WEIGHTS, NULL, 0));
    if (socket_path)
        OK(rebatch_yield_to(rebatch_get_pool(rig->rb), socket_path));
}

static void *train(void *user)
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

static void rig_train(struct rig *rig)
{
    cr_assert_eq(pthread_create(&rig->thread, NULL, train, rig), 0);
    rig->has_thread = true;
    while (rig->updates < 3)
        usleep(1000);
}

static void rig_stop(struct rig *rig)
{
    rig->stops = true;
    if (rig->has_thread)
        cr_assert_eq(pthread_join(rig->thread, NULL), 0);
    rig->has_thread = false;
}

static void rig_close(struct rig *rig)
{
    rig_stop(rig);
    rebatch_close(rig->rb);
    rebatch_device_close(rig->device);
}

static void wait_for_micro(struct rig *rig, size_t micro)
{
    for (int i = 0; rig->micro != micro && i < 10000; i++)
        usleep(1000);
    cr_assert_eq(rig->micro, micro);
}

static uint64_t held_by(const struct rig *rig)
{
    return pool_stats_of(rebatch_get_pool(rig->rb)).reserved_bytes;
}

/* ---- who asks ---- */

#define ASK(text, request) OK(rebatch_ask(text, sizeof text, path, request))

static uint64_t number_in(const char *json, const char *name)
{
    char key[64];
    (void)snprintf(key, sizeof key, "\"%s\": ", name);
    HAS(json, key);
    return strtoull(strstr(json, key) + strlen(key), NULL, 10);
}

static int connect_raw(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memcpy(address.sun_path, path, sizeof path);
    cr_assert_eq(connect(fd, (struct sockaddr *)&address, sizeof address), 0, "%s",
                 strerror(errno));
    return fd;
}

/* ---- what it gives ---- */

Test(yield, a_training_gives_half_and_goes_on_smaller_and_grows_back)
{
    char text[512];
    OPEN(rig, rig, path);
    rig_train(&rig);
    const uint64_t before = held_by(&rig);
    cr_assert_geq(before, WEIGHTS + BATCH * SAMPLE);
    ASK(text, "give 20MiB");
    cr_assert(strncmp(text, "ok: gave ", 9) == 0, "%s", text);
    cr_assert_leq(held_by(&rig), before - MIB(20));
    HAS(text, ", a step needs at least 10.0 MiB");
    wait_for_micro(&rig, 4);
    ASK(text, "status");
    cr_expect_eq(number_in(text, "held_bytes"), held_by(&rig));
    cr_expect_eq(number_in(text, "bound_bytes"), before - MIB(20));
    ASK(text, "give to 1GiB"); /* which takes back nothing that others were given */
    HAS(text, "ok: gave 0 B");
    ASK(text, "status");
    cr_expect_eq(number_in(text, "bound_bytes"), before - MIB(20));
    ASK(text, "wake");
    HAS(text, "ok: it may take memory again; holds ");
    wait_for_micro(&rig, BATCH);
    rig_stop(&rig);
    cr_expect_eq(rig.lost, 0);
}

Test(yield, a_training_keeps_what_a_step_needs)
{
    char text[512];
    OPEN(rig, rig, path);
    rig_train(&rig);
    ASK(text, "give to 1MiB");
    cr_assert(strncmp(text, "partly: gave ", 13) == 0, "%s", text);
    wait_for_micro(&rig, 1);
    const unsigned updates = rig.updates;
    while (rig.updates < updates + 3)
        usleep(1000);
    rig_stop(&rig);
    cr_expect_eq(rig.lost, 0);
    cr_expect_leq(held_by(&rig), WEIGHTS + SAMPLE);
}

/* What its smallest micro-batch needs beside its samples, no size that ran has told. */
static rebatch_status forward_with_base(const rebatch_microbatch *mb, void *user)
{
    void *base;
    if (rebatch_pool_alloc(&base, mb->pool, MIB(8), mb->stream, 0))
        return REBATCH_OOM;
    rebatch_status status = forward_backward(mb, user);
    return status ? status : rebatch_pool_free(mb->pool, base);
}

Test(yield, what_was_given_comes_back_before_a_training_ends_for_want_of_it)
{
    char text[512];
    OPEN(rig, rig, path);
    rig.ops.forward_backward = forward_with_base;
    rig_train(&rig);
    ASK(text, "give to 1MiB");
    wait_for_micro(&rig, 1);
    ASK(text, "status");
    cr_expect_geq(number_in(text, "bound_bytes"), WEIGHTS + MIB(8) + SAMPLE);
    rig_stop(&rig);
    cr_expect_eq(rig.lost, 0);
}

Test(yield, a_training_sleeps_with_its_contents_until_it_is_woken)
{
    char text[512];
    OPEN(rig, rig, path);
    memset(rig.weights, 7, WEIGHTS);
    rig_train(&rig);
    ASK(text, "sleep");
    HAS(text, "ok: asleep after ");
    HAS(text, "; holds 0 B, ");
    const unsigned updates = rig.updates;
    ASK(text, "status");
    HAS(text, "\"state\": \"asleep\"");
    ASK(text, "give 4MiB");
    cr_expect_str_eq(text, "no: it sleeps: expected wake");
    usleep(50000);
    cr_expect_eq(rig.updates, updates);
    ASK(text, "wake");
    HAS(text, "ok: it may take memory again");
    while (rig.updates < updates + 3)
        usleep(1000);
    rig_stop(&rig);
    cr_expect_eq(rig.lost, 0);
    for (size_t i = 0; i < WEIGHTS; i++)
        cr_assert_eq(((unsigned char *)rig.weights)[i], 7);
}

Test(yield, no_micro_batch_that_runs_is_struck)
{
    char text[512];
    OPEN(rig, rig, path);
    rig_train(&rig);
    rig.holds = true;
    while (!rig.in_microbatch)
        usleep(1000);
    const uint64_t held = held_by(&rig);
    const int fd = connect_raw();
    cr_assert_eq(send(fd, "give 20MiB\n", 11, 0), 11);
    usleep(50000);
    ASK(text, "status");
    HAS(text, "\"bound_bytes\": null");
    cr_expect_eq(held_by(&rig), held);
    rig.holds = false;
    cr_assert_gt(recv(fd, text, sizeof text, 0), 0);
    cr_expect(strncmp(text, "ok: gave ", 9) == 0, "%s", text);
    (void)close(fd);
}

Test(yield, an_idle_process_gives_what_is_cached_at_once)
{
    char text[512];
    void *block;
    OPEN(rig, rig, NULL);
    rebatch_pool *pool = rebatch_get_pool(rig.rb);
    OK(rebatch_pool_alloc(&block, pool, MIB(32), NULL, 0));
    OK(rebatch_pool_free(pool, block));
    OK(rebatch_yield_to(pool, path));
    ASK(text, "give to 8MiB");
    cr_assert(strncmp(text, "ok: gave 32.0 MiB after ", 24) == 0, "%s", text);
    HAS(text, "what a step needs is not known");
    cr_expect_eq(held_by(&rig), WEIGHTS);
    ASK(text, "give 4MiB");
    HAS(text, "partly: gave 0 B after 0 ms, not in a step;");
    ASK(text, "sleep");
    cr_assert_str_eq(text, "no: not in a step, and it sleeps between two micro-batches");
}

Test(yield, a_training_that_pauses_is_bounded_when_its_next_step_begins)
{
    char text[512];
    rebatch_step_report report;
    OPEN(rig, rig, path);
    rig_train(&rig);
    rig_stop(&rig);
    ASK(text, "give 20MiB");
    HAS(text, "ok: gave "); /* all that its last step has left in the cache */
    HAS(text, ", not in a step: the next one is bounded");
    OK(rebatch_step(rig.rb, &rig.ops, BATCH, &rig, &report));
    cr_expect_eq(report.micro, 4);
    cr_expect_gt(rebatch_short_of_memory(rig.rb), 0);
    cr_expect_lt(rebatch_short_of_memory(rig.rb), 1);
}

static void *ask_for_four(void *text)
{
    OK(rebatch_ask(text, 512, path, "give 4MiB"));
    return NULL;
}

Test(yield, two_clients_at_once_are_both_answered)
{
    char texts[2][512];
    pthread_t threads[2];
    OPEN(rig, rig, path);
    rig_train(&rig);
    const uint64_t before = held_by(&rig);
    for (int i = 0; i < 2; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, ask_for_four, texts[i]), 0);
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(pthread_join(threads[i], NULL), 0);
        cr_expect(strncmp(texts[i], "ok: gave ", 9) == 0, "%s", texts[i]);
    }
    cr_expect_leq(held_by(&rig), before - MIB(8));
}

Test(yield, the_program_may_put_its_pool_to_sleep_itself)
{
    char text[512];
    OPEN(rig, rig, path);
    OK(rebatch_pool_sleep(rebatch_get_pool(rig.rb), NULL, NULL));
    ASK(text, "status");
    HAS(text, "\"state\": \"asleep\"");
    ASK(text, "give 4MiB");
    HAS(text, "no: it sleeps");
    ASK(text, "wake");
    HAS(text, "holds 8.00 MiB");
}

Test(yield, a_wake_by_the_program_ends_what_was_asked)
{
    char text[512];
    OPEN(rig, rig, path);
    rebatch_pool *const pool = rebatch_get_pool(rig.rb);
    rig_train(&rig);
    ASK(text, "give 20MiB");
    OK(rebatch_pool_wake(pool));
    ASK(text, "status");
    HAS(text, "\"bound_bytes\": null");
    wait_for_micro(&rig, BATCH);
    ASK(text, "sleep");
    OK(rebatch_pool_wake(pool));
    ASK(text, "status");
    HAS(text, "\"state\": \"training\"");
    while (held_by(&rig) < WEIGHTS + BATCH * SAMPLE) /* of which it can give */
        usleep(1000);
    ASK(text, "give 4MiB");
    HAS(text, "ok: ");
}

Test(yield, a_bound_of_the_program_is_not_raised)
{
    char text[512];
    OPEN(rig, rig, path);
    rebatch_pool *const pool = rebatch_get_pool(rig.rb);
    rig_train(&rig);
    OK(rebatch_pool_give(pool, WEIGHTS + 8 * SAMPLE, NULL));
    wait_for_micro(&rig, 8);
    ASK(text, "give to 60MiB");
    usleep(50000);
    cr_expect_leq(rig.micro, 8);
    cr_expect_leq(held_by(&rig), WEIGHTS + 8 * SAMPLE);
}

Test(yield, a_wake_ends_what_the_next_step_would_have_given)
{
    char text[512];
    rebatch_step_report report;
    OPEN(rig, rig, path);
    rig_train(&rig);
    rig_stop(&rig);
    ASK(text, "give 20MiB");
    HAS(text, "the next one is bounded");
    ASK(text, "wake");
    OK(rebatch_step(rig.rb, &rig.ops, BATCH, &rig, &report));
    cr_expect_eq(report.micro, BATCH);
    ASK(text, "status");
    HAS(text, "\"bound_bytes\": null");
}

Test(yield, who_waits_for_memory_hears_of_a_wake)
{
    static const char *const requests[] = {"give 20MiB\n", "sleep\n"};
    char text[512];
    OPEN(rig, rig, path);
    rig_train(&rig);
    rig.holds = true;
    while (!rig.in_microbatch)
        usleep(1000);
    for (size_t i = 0; i < 2; i++) {
        const int fd = connect_raw();
        const size_t length = strlen(requests[i]);
        cr_assert_eq(send(fd, requests[i], length, 0), length);
        usleep(50000);
        ASK(text, "wake");
        HAS(text, "ok: ");
        memset(text, 0, sizeof text);
        cr_assert_gt(recv(fd, text, sizeof text - 1, 0), 0);
        cr_expect_str_eq(text, "no: a wake has come before it\n");
        (void)close(fd);
    }
    rig.holds = false;
    const unsigned updates = rig.updates;
    while (rig.updates < updates + 3)
        usleep(1000);
    cr_expect_eq(rig.micro, BATCH);
}

/* ---- short of memory ---- */

Test(yield, a_step_is_short_of_memory_when_that_has_made_it_smaller_and_no_option_has)
{
    rebatch_step_report report;
    OPEN(rig, rig, NULL);
    rebatch *chosen;
    OK(rebatch_open(&chosen, rig.device, &OPTIONS(.micro_start = 4, .growth = REBATCH_OFF)));
    rebatch *const whole = rig.rb;
    rig.rb = chosen;
    OK(rebatch_step(chosen, &rig.ops, BATCH, &rig, &report));
    cr_expect(report.micro == 4 && rebatch_short_of_memory(chosen) <= 0);
    rebatch_close(chosen);
    rig.rb = whole;
    OK(rebatch_pool_set_limit(rebatch_get_pool(whole), WEIGHTS + 8 * SAMPLE));
    OK(rebatch_step(whole, &rig.ops, BATCH, &rig, &report));
    cr_expect(report.micro == 8 && rebatch_short_of_memory(whole) > 0);
}

/* ---- the reference model ---- */

static void *ask_for_half(void *text)
{
    char status[1024];
    char request[64];
    ASK(status, "status");
    (void)snprintf(request, sizeof request, "give %llu",
                   (unsigned long long)number_in(status, "held_bytes") / 2);
    OK(rebatch_ask(text, 512, path, request));
    return NULL;
}

Test(yield, the_reference_model_has_the_same_bits, .description = "seed 1, 12 steps of 16")
{
    struct run_options options = tiny_run();
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES], text[512] = "";
    pthread_t thread;
    rebatch_step_report report;
    size_t least = BATCH;
    run_whole(want, &options, 12);
    OPEN(run, run, &options);
    OK(rebatch_yield_to(rebatch_get_pool(run.rb), path));
    run_steps(&run, 3);
    cr_assert_eq(pthread_create(&thread, NULL, ask_for_half, text), 0);
    for (int i = 3; i < 12; i++) {
        usleep(20000);
        ASSERT_OK(gpt_trainer_step(run.trainer, &report, NULL));
        least = report.micro < least ? report.micro : least;
    }
    cr_assert_eq(pthread_join(thread, NULL), 0);
    HAS(text, "gave ");
    cr_expect_lt(least, options.train.batch);
    run_hash(&run, got);
    cr_assert_str_eq(got, want);
}

/* ---- lines ---- */

Test(yield, rubbish_is_one_sentence_and_no_change)
{
    static const char *const lines[] = {"",
                                        "giv 4GiB",
                                        "give",
                                        "give ",
                                        "give -1",
                                        "give 4G",
                                        "give 50%",
                                        "give to",
                                        "give 4GiB now",
                                        "Status",
                                        "wake up",
                                        "\x01\xff",
                                        "give 99999999999999999999GiB"};
    char text[512];
    OPEN(rig, rig, path);
    const uint64_t held = held_by(&rig);
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        ASK(text, lines[i]);
        cr_expect(strncmp(text, "no: ", 4) == 0, "%s: %s", lines[i], text);
    }
    ASK(text, "give 4G");
    HAS(text, "4GiB");
    const int fd = connect_raw();
    char line[300];
    memset(line, 'x', sizeof line);
    cr_assert_eq(send(fd, line, sizeof line, MSG_NOSIGNAL), sizeof line);
    cr_assert_gt(recv(fd, text, sizeof text, 0), 0);
    HAS(text, "no: a request has at most 127 bytes\n");
    (void)close(fd);
    cr_expect_eq(held_by(&rig), held);
    memset(line, 'x', 128);
    line[128] = '\0';
    FAILS(rebatch_ask(text, sizeof text, path, line), REBATCH_E_INVALID, "127 bytes");
}

Test(yield, clients_that_send_nothing_hinder_nobody)
{
    char text[512];
    int fds[40];
    OPEN(rig, rig, path);
    for (size_t i = 0; i < 40; i++)
        fds[i] = connect_raw();
    ASK(text, "status");
    HAS(text, "\"state\": \"not in a step\"");
    for (size_t i = 0; i < 40; i++)
        (void)close(fds[i]);
}

Test(yield, without_descriptors_the_thread_does_not_spin)
{
    const struct timespec moment = {.tv_nsec = 500000000};
    struct rlimit before, few;
    struct timespec used, after;
    int fds[100], count = 0;
    OPEN(rig, rig, path);
    const int waits = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &before), 0);
    few = (struct rlimit){100, before.rlim_max};
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &few), 0);
    while (count < 100 && (fds[count] = dup(waits)) >= 0)
        count++;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, path, sizeof path);
    cr_assert_eq(connect(waits, (struct sockaddr *)&address, sizeof address), 0);
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    (void)nanosleep(&moment, NULL);
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    while (count > 0)
        (void)close(fds[--count]);
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &before), 0);
    const long used_ms =
        (after.tv_sec - used.tv_sec) * 1000 + (after.tv_nsec - used.tv_nsec) / 1000000;
    cr_expect_lt(used_ms, 100, "%ld ms", used_ms);
    char text[512];
    cr_assert_eq(send(waits, "status\n", 7, 0), 7);
    cr_assert_gt(recv(waits, text, sizeof text, 0), 0);
    (void)close(waits);
}

/* ---- where the socket is ---- */

Test(yield, a_socket_is_of_this_user_only_and_is_removed_at_the_end)
{
    struct stat there;
    {
        OPEN(rig, rig, path);
        cr_assert_eq(stat(path, &there), 0);
        cr_expect_eq(there.st_mode & 0777, 0600);
    }
    cr_expect_eq(stat(path, &there), -1);
}

Test(yield, a_path_that_is_no_place_for_a_socket_is_refused)
{
    char long_path[200];
    OPEN(rig, rig, NULL);
    rebatch_pool *pool = rebatch_get_pool(rig.rb);
    memset(long_path, 'x', sizeof long_path);
    long_path[0] = '/';
    long_path[sizeof long_path - 1] = '\0';
    FAILS(rebatch_yield_to(pool, long_path), REBATCH_E_IO, "at most 107 bytes");
    FAILS(rebatch_yield_to(pool, ""), REBATCH_E_IO, "expected the path");
    FAILS(rebatch_yield_to(pool, "/nowhere/a.sock"), REBATCH_E_IO, "No such file");
    FILE *file = fopen(path, "w");
    (void)fclose(file);
    FAILS(rebatch_yield_to(pool, path), REBATCH_E_IO, "no socket");
    cr_expect_eq(access(path, F_OK), 0, "the file stays");
    OK(rebatch_yield_to(pool, folder));
    char text[512], pid[16];
    (void)snprintf(path, sizeof path, "%s/%d.sock", folder, (int)getpid());
    ASK(text, "status");
    OK(rebatch_yield_to(pool, NULL)); /* replaces it */
    cr_expect_eq(access(path, F_OK), -1);
    (void)snprintf(pid, sizeof pid, "%d", (int)getpid());
    OK(rebatch_ask(text, sizeof text, pid, "status"));
    static char list[4096];
    (void)rebatch_top_format(list, sizeof list, true);
    HAS(list, text);
    (void)rebatch_top_format(list, sizeof list, false);
    HAS(list, pid);
}

Test(yield, another_user_is_refused)
{
    char text[512];
    if (geteuid() != 0)
        cr_skip("only root can be another user");
    OPEN(rig, rig, path);
    cr_assert_eq(chmod(folder, 0755), 0);
    const pid_t child = fork();
    if (child == 0) {
        if (setresuid(65534, 65534, 65534) ||
            rebatch_ask(text, sizeof text, path, "status") != REBATCH_E_IO ||
            !strstr(rebatch_last_error(), "Permission denied"))
            _exit(1);
        while (access("/tmp", F_OK) == 0 && rebatch_ask(text, sizeof text, path, "status"))
            usleep(1000); /* until the file's mode is another one */
        _exit(strcmp(text, "no: only the process's own user and root may ask") ? 2 : 0);
    }
    usleep(100000);
    cr_assert_eq(chmod(path, 0666), 0);
    int status;
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_expect_eq(status, 0);
}

Test(yield, the_environment_and_a_setting_ask_for_a_socket)
{
    char text[512];
    setenv("REBATCH_YIELD", path, 1);
    {
        OPEN(rig, rig, NULL);
        ASK(text, "status");
    }
    setenv("REBATCH_YIELD", "/nowhere/a.sock", 1);
    rebatch_device *device;
    rebatch *rb;
    OK(rebatch_device_open_host(&device, MIB(64), NULL));
    FAILS(rebatch_open(&rb, device, NULL), REBATCH_E_IO, "/nowhere/a.sock");
    rebatch_device_close(device);
    unsetenv("REBATCH_YIELD");
    (void)snprintf(text, sizeof text, "device.kind = host; memory.yield = %s", path);
    OK(rebatch_open_default(&rb, text));
    ASK(text, "status");
    rebatch_close(rb);
}

/* ---- either side ends ---- */

/* A process with a training that trains, or holds in a micro-batch. */
static pid_t start_owner(bool holds)
{
    const pid_t child = fork();
    if (child == 0) {
        struct rig rig;
        rig_open(&rig, path);
        rig.holds = holds; /* from the fourth step on */
        rig_train(&rig);
        for (;;)
            (void)pause();
    }
    char text[512];
    for (int i = 0; i < 5000; i++) {
        if (rebatch_ask(text, sizeof text, path, "status") == REBATCH_OK &&
            number_in(text, "steps") >= 3)
            return child;
        usleep(2000);
    }
    cr_assert_fail("the training did not begin: %s", rebatch_last_error());
    return child;
}

static void kill_owner(pid_t child)
{
    cr_assert_eq(kill(child, SIGKILL), 0);
    cr_assert_eq(waitpid(child, NULL, 0), child);
}

static size_t count_of_shared_files(void)
{
    size_t count = 0;
    DIR *files = opendir("/dev/shm");
    for (const struct dirent *file; files && (file = readdir(files));)
        count += strstr(file->d_name, "rebatch") != NULL;
    if (files)
        (void)closedir(files);
    return count;
}

Test(yield, a_killed_owner_leaves_a_socket_that_whoever_comes_next_removes)
{
    char text[512];
    const size_t shared = count_of_shared_files();
    kill_owner(start_owner(false));
    cr_assert_eq(access(path, F_OK), 0);
    FAILS(rebatch_ask(text, sizeof text, path, "status"), REBATCH_E_IO, "is removed");
    cr_assert_eq(access(path, F_OK), -1);

    kill_owner(start_owner(false));
    const pid_t next = start_owner(false); /* at the same path */
    ASK(text, "give 4MiB");
    HAS(text, "ok: ");
    OPEN(rig, rig, NULL);
    FAILS(rebatch_yield_to(rebatch_get_pool(rig.rb), path), REBATCH_E_IO,
          "another process answers");
    kill_owner(next);

    const pid_t asleep = start_owner(false);
    ASK(text, "sleep");
    HAS(text, "ok: ");
    kill_owner(asleep);
    char own[80];
    (void)snprintf(own, sizeof own, "%s/rebatch", folder);
    cr_assert_eq(mkdir(own, 0700), 0);
    (void)snprintf(own, sizeof own, "%s/rebatch/1.sock", folder);
    cr_assert_eq(rename(path, own), 0);
    cr_assert_gt(rebatch_top_format(text, sizeof text, false), 0);
    cr_expect_eq(access(own, F_OK), -1);
    cr_expect_eq(count_of_shared_files(), shared);
}

Test(yield, a_client_hears_that_the_owner_was_killed)
{
    char text[512];
    const pid_t owner = start_owner(true);
    const int silent = connect_raw();
    int waits = -1;
    do { /* until the micro-batch runs that holds, before which it is answered */
        (void)close(waits);
        waits = connect_raw();
        cr_assert_eq(send(waits, "give 1MiB\n", 10, 0), 10);
    } while (poll(&(struct pollfd){.fd = waits, .events = POLLIN}, 1, 200) > 0);
    kill_owner(owner);
    cr_expect_leq(recv(silent, text, sizeof text, 0), 0);
    cr_expect_leq(recv(waits, text, sizeof text, 0), 0);
}

/* After so many bytes of the line, and `ms` later. */
static void kill_client(size_t bytes, unsigned ms)
{
    const pid_t client = fork();
    if (client == 0) {
        const int fd = connect_raw();
        if (send(fd, "give 20MiB\n", bytes, 0) == (ssize_t)bytes)
            (void)pause();
        _exit(0);
    }
    usleep(ms * 1000);
    kill_owner(client);
}

Test(yield, a_killed_client_leaves_a_training_as_it_was)
{
    char text[512];
    OPEN(rig, rig, path);
    rig_train(&rig);
    rig.holds = true;
    while (!rig.in_microbatch)
        usleep(1000);
    kill_client(0, 20);
    kill_client(4, 20);
    kill_client(11, 20); /* it waits for the end of the micro-batch */
    usleep(200000);
    rig.holds = false;
    const unsigned updates = rig.updates;
    while (rig.updates < updates + 3)
        usleep(1000);
    ASK(text, "status");
    HAS(text, "\"bound_bytes\": null");
    cr_expect_eq(rig.micro, BATCH);
    ASK(text, "give 20MiB");
    HAS(text, "ok: ");
    rig_stop(&rig);
    cr_expect_eq(rig.lost, 0);
}

Test(yield, a_child_of_fork_neither_answers_nor_removes_the_socket)
{
    char text[512];
    OPEN(rig, rig, path);
    rig_train(&rig);
    const pid_t child = fork();
    if (child == 0)
        exit(0); /* with what runs at exit */
    int status;
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert_eq(status, 0);
    ASK(text, "give 4MiB");
    HAS(text, "ok: ");
}

/* As in a job of Slurm, which inherits the variable of the host that it came from. */
Test(yield, a_runtime_folder_that_is_not_there_is_passed_over)
{
    char expected[64], answered[512];
    setenv("XDG_RUNTIME_DIR", "/tmp/rebatch-no-such-folder", 1);
    OPEN(rig, rig, NULL);
    OK(rebatch_yield_to(rebatch_get_pool(rig.rb), NULL));
    (void)snprintf(expected, sizeof expected, "/tmp/rebatch-%u/%d.sock", (unsigned)geteuid(),
                   (int)getpid());
    OK(rebatch_ask(answered, sizeof answered, expected, "status"));
    cr_expect(strstr(answered, "\"state\""), "%s", answered);
}
