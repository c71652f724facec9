/* Owns the tests of the lines in which a session says what happened: on standard error and in a
 * file, as text and as JSON. Must not know the library's inside. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "rig.h"

#define BATCH 64

static char folder[] = "/tmp/rebatch-log-XXXXXX";
static char text[1 << 16];

static void enter(void)
{
    unsetenv("REBATCH_LOG_LEVEL");
    cr_assert_not_null(mkdtemp(folder));
    cr_assert_eq(chdir(folder), 0);
}

static void leave(void)
{
    (void)unlink("log");
    (void)unlink("stderr");
    cr_assert_eq(chdir("/"), 0);
    (void)rmdir(folder);
}

TestSuite(step_log, .init = enter, .fini = leave);

/* ---- a step that needs 1 MiB a sample ---- */

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    void *block;
    if (rebatch_pool_alloc(&block, mb->pool, mb->count * MIB(1), mb->stream, 0))
        return REBATCH_OOM;
    rebatch_mutating(*(rebatch **)user);
    return rebatch_pool_free(mb->pool, block);
}

/* Runs steps in 40 MiB: the first halves its micro-batch. What they write to standard error is in
 * the file "stderr". */
static void train(const rebatch_options *options, unsigned steps)
{
    const rebatch_step_ops ops =
        OPS(nothing_to_do, forward_backward, nothing_to_do, .flags = REBATCH_DECLARES_MUTATION);
    rebatch_device *device;
    rebatch *rb;
    OK(rebatch_device_open_host(&device, MIB(40), NULL));
    const int before = dup(STDERR_FILENO);
    const int file = open("stderr", O_WRONLY | O_CREAT | O_TRUNC, 0600);
    cr_assert_eq(dup2(file, STDERR_FILENO), STDERR_FILENO);
    rebatch_status status = rebatch_open(&rb, device, options);
    for (unsigned i = 0; i < steps && !status; i++)
        status = rebatch_step(rb, &ops, BATCH, &rb, NULL);
    (void)dup2(before, STDERR_FILENO);
    OK(status);
    (void)close(before);
    (void)close(file);
    rebatch_close(rb);
    rebatch_device_close(device);
}

static const char *read_file(const char *name)
{
    FILE *file = fopen(name, "r");
    cr_assert_not_null(file, "%s is not there", name);
    text[fread(text, 1, sizeof text - 1, file)] = '\0';
    (void)fclose(file);
    return text;
}

static unsigned lines(const char *of)
{
    unsigned count = 0;
    for (; *of; of++)
        count += *of == '\n';
    return count;
}

static void expect_begin(const char *of, const char *begin)
{
    cr_expect_eq(strncmp(of, begin, strlen(begin)), 0, "\"%s\" does not begin with \"%s\"", of,
                 begin);
}

/* ---- standard error ---- */

#define OOM                                                                                        \
    "step 0: out of memory in forward_backward, before accumulating: samples 0-63 need at "        \
    "least 64.0 MiB, there is 40.0 MiB; micro-batch 64 -> 32; 64 samples again; the attempt took "

Test(step_log, without_a_callback_warnings_go_to_standard_error)
{
    train(NULL, 3);
    expect_begin(read_file("stderr"), "rebatch: " OOM);
    const char *second = strchr(text, '\n') + 1;
    cr_expect_str_eq(second, "rebatch: step 0: optimizer_step returned without calling "
                             "rebatch_mutating(), which REBATCH_DECLARES_MUTATION promises: "
                             "correct only if it changed nothing\n");
}

Test(step_log, the_level_is_the_options_or_the_settings)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.log_level = REBATCH_LOG_QUIET;
    train(&options, 3);
    cr_expect_str_eq(read_file("stderr"), "");
    options.log_level = REBATCH_LOG_DEBUG;
    train(&options, 3);
    cr_expect_eq(lines(read_file("stderr")), 5, "%s", text);
    HAS(text, "rebatch: step 2: step done\n");
    setenv("REBATCH_LOG_LEVEL", "quiet", 1);
    train(NULL, 3);
    cr_expect_str_eq(read_file("stderr"), "");
    train(&options, 3);
    cr_expect_eq(lines(read_file("stderr")), 5, "%s", text);
    options.log_level = REBATCH_LOG_DEFAULT;
    train(&options, 3);
    cr_expect_str_eq(read_file("stderr"), "");
    setenv("REBATCH_LOG_LEVEL", "auto", 1);
    train(NULL, 3);
    cr_expect_eq(lines(read_file("stderr")), 2, "%s", text);
}

static void count_event(const rebatch_event *event, void *user)
{
    (void)event;
    ++*(unsigned *)user;
}

Test(step_log, a_callback_takes_the_place_of_standard_error)
{
    unsigned events = 0;
    train(&OPTIONS(.on_event = count_event, .on_event_user = &events), 3);
    cr_expect_str_eq(read_file("stderr"), "");
    cr_expect_eq(events, 2);
}

/* `./train 2>&1 | head -n 0` */
Test(step_log, nobody_who_reads_is_no_reason_to_end)
{
    int ends[2];
    cr_assert_eq(pipe(ends), 0);
    (void)close(ends[0]);
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", ends[1]);
    const int before = dup(STDERR_FILENO);
    rebatch_device *device;
    rebatch *rb;
    const rebatch_step_ops ops = OPS(nothing_to_do, forward_backward, nothing_to_do, .flags = 0);
    open_on_host(&device, &rb, MIB(70), &OPTIONS(.log_level = REBATCH_LOG_DEBUG));
    (void)dup2(ends[1], STDERR_FILENO);
    const rebatch_status status = rebatch_step(rb, &ops, BATCH, &rb, NULL);
    (void)dup2(before, STDERR_FILENO);
    cr_expect_eq(status, REBATCH_OK);
    sigset_t pending;
    cr_assert_eq(sigpending(&pending), 0);
    cr_expect_eq(sigismember(&pending, SIGPIPE), 0);
    rebatch_close(rb);
    rebatch_device_close(device);
}

/* ---- a file ---- */

Test(step_log, a_file_takes_the_place_of_standard_error_and_is_appended_to)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    char path[] = "log";
    unsigned events = 0;
    options.log_file = path;
    train(&options, 3);
    cr_expect_str_eq(read_file("stderr"), "");
    cr_expect_eq(lines(read_file("log")), 2, "%s", text);
    cr_expect_eq(text[10], 'T');
    cr_expect_eq(text[23], 'Z');
    expect_begin(text + 24, " warn  " OOM);
    options.on_event = count_event;
    options.on_event_user = &events;
    train(&options, 3);
    cr_expect_eq(lines(read_file("log")), 4, "%s", text);
    cr_expect_eq(events, 2);
}

Test(step_log, a_file_that_cannot_be_written_opens_nothing)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch_device *device;
    rebatch *rb;
    OK(rebatch_device_open_host(&device, MIB(40), NULL));
    options.log_file = "no/such/folder";
    cr_expect_eq(rebatch_open(&rb, device, &options), REBATCH_E_IO);
    cr_expect_null(rb);
    cr_expect_str_eq(rebatch_last_error(), "the log file no/such/folder cannot be opened: No such "
                                           "file or directory");
    options.log_file = NULL;
    options.log_format = (rebatch_log_format)2;
    cr_expect_eq(rebatch_open(&rb, device, &options), REBATCH_E_INVALID);
    rebatch_device_close(device);
}

/* ---- JSON ---- */

#define NUMBERS                                                                                    \
    "\"attempt\":0,\"first\":0,\"count\":64,\"batch\":64,\"micro_before\":64,\"micro_after\":32,"  \
    "\"lighten_before\":0,\"lighten_after\":0,\"redone_samples\":64,\"lost_ns\":"
#define BYTES                                                                                      \
    "\"asked_bytes\":67108864,\"needed_bytes\":67108864,\"available_bytes\":41943040,"             \
    "\"peak_bytes\":0,\"cost\":0,\"cost_before\":0,\"cost_after\":0,\"text\":\"" OOM

Test(step_log, each_event_is_one_json_object_a_line)
{
    setenv("REBATCH_LOG_FILE", "log", 1);
    setenv("REBATCH_LOG_FORMAT", "json", 1);
    setenv("REBATCH_LOG_LEVEL", "debug", 1);
    train(NULL, 2);
    read_file("log");
    cr_expect_eq(lines(text), 4, "%s", text);
    expect_begin(text, "{\"time\":\"20");
    const char *after = strstr(text, "Z\",");
    cr_assert_not_null(after);
    expect_begin(after, "Z\",\"event\":\"shrink\",\"level\":\"warn\",\"step\":0,\"phase\":"
                        "\"forward_backward, before accumulating\"," NUMBERS);
    HAS(after, BYTES);
    const char *done = strstr(after, "\"event\":\"step\",\"level\":\"debug\",\"step\":1,"
                                     "\"phase\":null,");
    cr_assert_not_null(done, "%s", after);
    HAS(done, "\"peak_bytes\":33554432,");
    cr_expect_str_eq(strstr(done, "\"text\""), "\"text\":\"step 1: step done\"}\n");
}

/* ---- sentences ---- */

Test(step_log, sizes_that_read_the_same_are_told_apart)
{
    char line[256];
    rebatch_event event = {.kind = REBATCH_EVENT_SHRINK,
                           .phase = REBATCH_PHASE_FORWARD,
                           .count = 8,
                           .micro_before = 8,
                           .micro_after = 4,
                           .needed_bytes = MIB(3) / 2 + 2048,
                           .available_bytes = MIB(3) / 2};
    (void)rebatch_event_format(line, sizeof line, &event);
    cr_expect_str_eq(line,
                     "step 0: out of memory in forward_backward, before accumulating: samples "
                     "0-7 need at least 1.50 MiB, there is 2.00 KiB less; micro-batch 8 -> 4");
    event.available_bytes = MIB(1);
    (void)rebatch_event_format(line, sizeof line, &event);
    HAS(line, " 1.50 MiB, there is 1.00 MiB;");
}

/* What is needed is known up to the request that failed. */
Test(step_log, a_need_that_would_fit_now_is_what_was_needed_so_far)
{
    char line[256];
    rebatch_event event = {.kind = REBATCH_EVENT_RETRY,
                           .phase = REBATCH_PHASE_FORWARD,
                           .count = 1,
                           .needed_bytes = MIB(2),
                           .available_bytes = MIB(2)};
    (void)rebatch_event_format(line, sizeof line, &event);
    cr_expect_str_eq(line,
                     "step 0: out of memory in forward_backward, before accumulating: sample 0 "
                     "needed 2.00 MiB so far, there is 2.00 MiB now; tried once more");
    event.phase = REBATCH_PHASE_OPTIMIZER;
    event.available_bytes = MIB(3);
    event.count = 0;
    (void)rebatch_event_format(line, sizeof line, &event);
    cr_expect_str_eq(line, "step 0: out of memory in optimizer_step, before updating: needed "
                           "2.00 MiB so far, there is 3.00 MiB now; tried once more");
    event.kind = REBATCH_EVENT_TRIAL;
    event.count = 4;
    (void)rebatch_event_format(line, sizeof line, &event);
    cr_expect_str_eq(line, "step 0: a probe's trial of 4 samples ran out of memory: it needed 2.00 "
                           "MiB so far, there is 3.00 MiB now");
}
