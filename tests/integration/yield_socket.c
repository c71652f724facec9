/* Owns the tests of the socket over which a training is asked for memory: its lines, where it is,
 * and what becomes of both sides when one ends. Must not know the library's inside. */
#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>

#include "yield_common.h"

TestSuite(yield_socket, .init = enter, .fini = leave);

/* ---- lines ---- */

Test(yield_socket, rubbish_is_one_sentence_and_no_change)
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

Test(yield_socket, clients_that_send_nothing_hinder_nobody)
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

Test(yield_socket, a_client_that_sends_nothing_for_too_long_is_told)
{
    char text[512];
    OPEN(rig, rig, path);
    const int fd = connect_raw();
    wait_for_turns();
    clock_advance(3 * SECOND_NS);
    receive_raw(text, sizeof text, fd);
    cr_expect_str_eq(text, "no: a request must come within 2 seconds");
}

static uint64_t clock_ns(clockid_t id)
{
    struct timespec now;
    (void)clock_gettime(id, &now);
    return (uint64_t)now.tv_sec * SECOND_NS + (uint64_t)now.tv_nsec;
}

/* As who is refused is. */
static void *answer_before_a_request_comes(void *user)
{
    const int *const listener = user;
    for (int i = 0; i < 300; i++) {
        const int fd = accept(*listener, NULL, NULL);
        (void)!send(fd, "no: not you\n", 12, MSG_NOSIGNAL);
        (void)close(fd);
    }
    return NULL;
}

Test(yield_socket, an_answer_that_comes_before_the_request_is_sent_is_heard)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char text[512];
    pthread_t thread;
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memcpy(address.sun_path, path, sizeof path);
    cr_assert_eq(bind(listener, (struct sockaddr *)&address, sizeof address), 0);
    cr_assert_eq(listen(listener, 1), 0);
    cr_assert_eq(pthread_create(&thread, NULL, answer_before_a_request_comes, &listener), 0);
    for (int i = 0; i < 300; i++) {
        ASK(text, "wake");
        cr_expect_str_eq(text, "no: not you");
    }
    cr_assert_eq(pthread_join(thread, NULL), 0);
    (void)close(listener);
}

Test(yield_socket, without_descriptors_the_thread_does_not_spin)
{
    const struct timespec moment = {.tv_nsec = 500000000};
    struct rlimit before, few;
    uint64_t used_ns, passed_ns;
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
    used_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
    passed_ns = clock_ns(CLOCK_MONOTONIC);
    (void)nanosleep(&moment, NULL);
    used_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID) - used_ns;
    passed_ns = clock_ns(CLOCK_MONOTONIC) - passed_ns;
    while (count > 0)
        (void)close(fds[--count]);
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &before), 0);
    cr_expect_lt(used_ns, passed_ns / 5, "%llu of %llu ns", (unsigned long long)used_ns,
                 (unsigned long long)passed_ns);
    char text[512];
    cr_assert_eq(send(waits, "status\n", 7, 0), 7);
    cr_assert_gt(recv(waits, text, sizeof text, 0), 0);
    (void)close(waits);
}

/* ---- where the socket is ---- */

Test(yield_socket, a_socket_is_of_this_user_only_and_is_removed_at_the_end)
{
    struct stat there;
    {
        OPEN(rig, rig, path);
        cr_assert_eq(stat(path, &there), 0);
        cr_expect_eq(there.st_mode & 0777, 0600);
    }
    cr_expect_eq(stat(path, &there), -1);
}

Test(yield_socket, a_path_that_is_no_place_for_a_socket_is_refused)
{
    char long_path[200];
    OPEN(rig, rig, NULL);
    rebatch_pool *pool = rebatch_get_pool(rig.rb);
    memset(long_path, 'x', sizeof long_path);
    long_path[0] = '/';
    long_path[sizeof long_path - 1] = '\0';
    FAILS(rebatch_yield_to(pool, long_path), REBATCH_E_IO, "1 to 107 bytes");
    FAILS(rebatch_yield_to(pool, ""), REBATCH_E_IO, "expected the path");
    FAILS(rebatch_yield_to(pool, "/nowhere/a.sock"), REBATCH_E_IO,
          "/nowhere/a.sock: expected a socket in a folder that is there");
    FILE *file = fopen(path, "w");
    (void)fclose(file);
    FAILS(rebatch_yield_to(pool, path), REBATCH_E_IO, "no socket");
    char text[512], pid[16];
    FAILS(rebatch_ask(text, sizeof text, path, "status"), REBATCH_E_IO,
          "expected the socket of a process, which listens there, or the PID");
    cr_expect_eq(access(path, F_OK), 0, "the file stays");
    OK(rebatch_yield_to(pool, folder));
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

Test(yield_socket, a_lock_of_the_folder_that_stays_held_lets_a_start_fail)
{
    OPEN(rig, rig, NULL);
    rebatch_pool *const pool = rebatch_get_pool(rig.rb);
    const int held = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    cr_assert(held >= 0 && flock(held, LOCK_EX) == 0);
    FAILS(rebatch_yield_to(pool, path), REBATCH_E_IO,
          "another process holds the lock of the folder");
    cr_expect_eq(access(path, F_OK), -1);
    cr_assert_eq(flock(held, LOCK_UN), 0);
    OK(rebatch_yield_to(pool, path));
    (void)close(held);
}

/* Until the child has closed its end of the pipe, or has ended. */
static void wait_for_end(const int ends[2])
{
    char none;
    (void)close(ends[1]);
    (void)!read(ends[0], &none, 1);
    (void)close(ends[0]);
}

Test(yield_socket, another_user_is_refused)
{
    char text[512];
    if (geteuid() != 0)
        cr_skip("only root can be another user");
    OPEN(rig, rig, path);
    cr_assert_eq(chmod(folder, 0755), 0);
    int ends[2];
    cr_assert_eq(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) {
        (void)close(ends[0]);
        if (setresuid(65534, 65534, 65534) ||
            rebatch_ask(text, sizeof text, path, "status") != REBATCH_E_IO ||
            !strstr(rebatch_last_error(), "Permission denied"))
            _exit(1);
        (void)close(ends[1]);
        while (access("/tmp", F_OK) == 0 && rebatch_ask(text, sizeof text, path, "status"))
            usleep(1000); /* until the file's mode is another one */
        _exit(strcmp(text, "no: only the process's own user and root may ask") ? 2 : 0);
    }
    wait_for_end(ends);
    cr_assert_eq(chmod(path, 0666), 0);
    int status;
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_expect_eq(status, 0);
}

Test(yield_socket, the_environment_and_a_setting_ask_for_a_socket)
{
    char text[512];
    setenv("REBATCH_YIELD", path, 1);
    {
        OPEN(rig, rig, NULL);
        ASK(text, "status");
    }
    static const char *const offs[] = {"", "0", "none", "false", "False"};
    cr_assert_eq(chdir(folder), 0);
    for (size_t i = 0; i < sizeof offs / sizeof *offs; i++) {
        setenv("REBATCH_YIELD", offs[i], 1);
        OPEN(rig, rig, NULL);
        cr_expect(access(offs[i], F_OK) && access("rebatch", F_OK), "\"%s\"", offs[i]);
    }
    char own[16];
    (void)snprintf(own, sizeof own, "%d", (int)getpid());
    setenv("REBATCH_YIELD", "true", 1);
    {
        OPEN(rig, rig, NULL);
        OK(rebatch_ask(text, sizeof text, own, "status"));
    }
    setenv("REBATCH_YIELD", "/nowhere/a.sock", 1);
    rebatch_device *device;
    rebatch *rb;
    OK(rebatch_device_open_host(&device, MIB(64), NULL));
    FAILS(rebatch_open(&rb, device, NULL), REBATCH_E_IO, "memory.yield: /nowhere/a.sock: ");
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
    int ends[2];
    cr_assert_eq(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) {
        struct rig rig;
        rig_open(&rig, path);
        rig_train(&rig);
        if (holds)
            rig_hold(&rig);
        (void)close(ends[0]);
        (void)close(ends[1]);
        for (;;)
            (void)pause();
    }
    wait_for_end(ends);
    return child;
}

Test(yield_socket, a_killed_owner_leaves_a_socket_that_whoever_comes_next_removes)
{
    char text[512];
    const size_t shared = count_of_shared_files();
    kill_process(start_owner(false));
    cr_assert_eq(access(path, F_OK), 0);
    FAILS(rebatch_ask(text, sizeof text, path, "status"), REBATCH_E_IO, "is removed");
    cr_assert_eq(access(path, F_OK), -1);

    kill_process(start_owner(false));
    const pid_t next = start_owner(false); /* at the same path */
    ASK(text, "give 4MiB");
    HAS(text, "ok: ");
    OPEN(rig, rig, NULL);
    FAILS(rebatch_yield_to(rebatch_get_pool(rig.rb), path), REBATCH_E_IO,
          "another process answers");
    kill_process(next);

    const pid_t asleep = start_owner(false);
    ASK(text, "sleep");
    HAS(text, "ok: ");
    kill_process(asleep);
    char own[80];
    (void)snprintf(own, sizeof own, "%s/rebatch", folder);
    cr_assert_eq(mkdir(own, 0700), 0);
    (void)snprintf(own, sizeof own, "%s/rebatch/1.sock", folder);
    cr_assert_eq(rename(path, own), 0);
    cr_assert_gt(rebatch_top_format(text, sizeof text, false), 0);
    cr_expect_eq(access(own, F_OK), -1);
    cr_expect_eq(count_of_shared_files(), shared);
}

Test(yield_socket, a_client_hears_that_the_owner_was_killed)
{
    char text[512];
    const pid_t owner = start_owner(true);
    const int silent = connect_raw(), waits = send_raw("give 1MiB\n");
    wait_for_turns();
    kill_process(owner);
    cr_expect_leq(recv(silent, text, sizeof text, 0), 0);
    cr_expect_leq(recv(waits, text, sizeof text, 0), 0);
}

/* When so many bytes of the line have been read. */
static void kill_client(size_t bytes)
{
    int ends[2];
    cr_assert_eq(pipe(ends), 0);
    const pid_t client = fork();
    if (client == 0) {
        const int fd = connect_raw();
        (void)!send(fd, "give 20MiB\n", bytes, 0);
        (void)close(ends[0]);
        (void)close(ends[1]);
        for (;;)
            (void)pause();
    }
    wait_for_end(ends);
    wait_for_turns();
    kill_process(client);
    wait_for_turns();
}

Test(yield_socket, a_killed_client_leaves_a_training_as_it_was)
{
    char text[512];
    OPEN(rig, rig, path);
    rig_train(&rig);
    rig_hold(&rig);
    kill_client(0);
    kill_client(4);
    kill_client(11); /* it waits for the end of the micro-batch */
    rig.holds = false;
    wait_for_updates(&rig, 3);
    ASK(text, "status");
    HAS(text, "\"bound_bytes\": null");
    cr_expect_eq(rig.micro, BATCH);
    ASK(text, "give 20MiB");
    HAS(text, "ok: ");
    rig_stop(&rig);
    cr_expect_eq(rig.lost, 0);
}

Test(yield_socket, a_child_of_fork_neither_answers_nor_removes_the_socket)
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
Test(yield_socket, a_runtime_folder_that_is_not_there_is_passed_over)
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
