/* Owns the tests of what a session does because the environment asks for it: a lower limit,
 * failures on purpose, a probe by cost. Must not know the library's inside. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rig.h"

#define BATCH 16

/* ---- a step that reserves what it needs before it changes anything ---- */

struct rig {
    rebatch_device *device;
    rebatch *rb;
    unsigned runs, counted;
};

static rebatch_status zero_grad(void *user)
{
    ((struct rig *)user)->counted = 0;
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct rig *rig = user;
    void *first, *second;
    rig->runs++;
    rebatch_status status = rebatch_reserve(rig->rb, 2 * mb->count * MIB(1));
    if (status)
        return status;
    rebatch_mutating(rig->rb);
    rig->counted += (unsigned)mb->count;
    status = rebatch_pool_alloc(&first, mb->pool, mb->count * MIB(1), mb->stream, 0);
    if (!status)
        status = rebatch_pool_alloc(&second, mb->pool, mb->count * MIB(1), mb->stream, 0);
    if (!status)
        status = rebatch_pool_free(mb->pool, second);
    return status ? status : rebatch_pool_free(mb->pool, first);
}

static rebatch_status optimizer_step(void *user)
{
    rebatch_mutating(((struct rig *)user)->rb);
    return REBATCH_OK;
}

static uint64_t cost(size_t first, size_t count, void *user)
{
    (void)first;
    (void)user;
    return 100 * count;
}

static const rebatch_step_ops ops =
    OPS(zero_grad, forward_backward, optimizer_step, .flags = REBATCH_DECLARES_MUTATION);

static void rig_open(struct rig *rig, const rebatch_options *options)
{
    *rig = (struct rig){.device = NULL};
    open_on_host(&rig->device, &rig->rb, MIB(64), options);
}

static void rig_close(struct rig *rig)
{
    rebatch_close(rig->rb);
    rebatch_device_close(rig->device);
}

/* ---- failures ---- */

/* Each request fails, but for those of an attempt that runs once more: that of a single sample. */
Test(launch, what_was_reserved_does_not_fail)
{
    rebatch_step_report report;
    setenv("REBATCH_RUN_OOM_CHANCE", "100%", 1);
    OPEN(rig, rig, NULL);
    OK(rebatch_step(rig.rb, &ops, BATCH, &rig, &report));
    cr_expect_eq(rig.counted, BATCH);
    cr_expect_eq(report.ooms, report.ooms_in[REBATCH_PHASE_FORWARD]);
    cr_expect_eq(report.ooms, 4 + BATCH, "16, 8, 4, 2, and each sample once");
    cr_expect_eq(report.micro_after, 1);
}

/* As many fail as somebody asks for, and the step still ends. */
Test(launch, failures_on_purpose_do_not_count_as_attempts_in_vain)
{
    rebatch_step_report report;
    setenv("REBATCH_RUN_OOM_CHANCE", "100%", 1);
    OPEN(rig, rig, &OPTIONS(.max_attempts = 2, .max_ooms_in_row = 2));
    OK(rebatch_step(rig.rb, &ops, 300, &rig, &report));
    cr_expect_eq(rig.counted, 300);
    cr_expect_gt(report.ooms, 300);
}

static rebatch_status add_first(const rebatch_microbatch *mb, void *user)
{
    struct rig *rig = user;
    void *block;
    rig->counted += (unsigned)mb->count;
    const rebatch_status status = rebatch_pool_alloc(&block, mb->pool, MIB(1), mb->stream, 0);
    return status ? status : rebatch_pool_free(mb->pool, block);
}

/* Each failure runs the whole batch again, which hardly ever comes to its end by chance. */
Test(launch, nor_do_they_run_a_batch_again_for_ever)
{
    rebatch_step_report report;
    rebatch_step_ops own = ops;
    own.forward_backward = add_first;
    own.flags = 0;
    setenv("REBATCH_RUN_OOM_CHANCE", "50%", 1);
    OPEN(rig, rig, &OPTIONS(.micro_start = 1));
    OK(rebatch_step(rig.rb, &own, 300, &rig, &report));
    cr_expect_eq(rig.counted, 300);
    cr_expect_eq(report.ooms_in[REBATCH_PHASE_BACKWARD], 16);
}

Test(launch, a_failure_says_that_it_was_injected)
{
    setenv("REBATCH_RUN_OOM", "1", 1);
    OPEN(rig, rig, &OPTIONS(.on_oom = REBATCH_ON_OOM_STOP, .max_attempts = 1));
    rebatch_step_report report;
    FAILS(rebatch_step(rig.rb, &ops, BATCH, &rig, &report), REBATCH_E_EXHAUSTED,
          "(the failure is injected)");
    cr_expect_eq(report.oom.asked_bytes, 2 * BATCH * MIB(1));
    cr_expect_str_eq(report.oom.tag, "reserve");
}

/* What the program allocates itself, outside of steps, is no request. */
Test(launch, outside_of_steps_nothing_fails)
{
    void *block;
    setenv("REBATCH_RUN_OOM_CHANCE", "1", 1);
    OPEN(rig, rig, NULL);
    for (int i = 0; i < 8; i++) {
        OK(rebatch_pool_alloc(&block, rebatch_get_pool(rig.rb), MIB(1), NULL, 0));
        OK(rebatch_pool_free(rebatch_get_pool(rig.rb), block));
    }
}

Test(launch, a_variable_that_cannot_be_read_opens_nothing)
{
    rebatch_device *device;
    rebatch *rb;
    OK(rebatch_device_open_host(&device, MIB(64), NULL));
    setenv("REBATCH_RUN_SEED", "seven", 1);
    cr_assert_eq(rebatch_open(&rb, device, NULL), REBATCH_E_PARSE);
    cr_expect_null(rb);
    cr_expect_str_eq(rebatch_last_error(),
                     "REBATCH_RUN_SEED is \"seven\": expected a whole number, 0 or more");
    rebatch_device_close(device);
}

/* ---- the limit ---- */

static void expect_limit(size_t options_bytes, const char *variable, uint64_t bytes)
{
    setenv("REBATCH_MEMORY_LIMIT", variable, 1);
    OPEN(rig, rig, &OPTIONS(.pool.limit_bytes = options_bytes));
    void *block;
    rebatch_oom_report report;
    cr_assert_eq(rebatch_pool_alloc(&block, rebatch_get_pool(rig.rb), MIB(128), NULL, 0),
                 REBATCH_OOM);
    OK(rebatch_pool_last_oom(&report, rebatch_get_pool(rig.rb)));
    cr_expect_eq(report.limit_bytes, bytes, "%s: %llu", variable,
                 (unsigned long long)report.limit_bytes);
}

Test(launch, the_smaller_limit_holds)
{
    expect_limit(0, "8MiB", MIB(8));
    expect_limit(MIB(16), "8MiB", MIB(8));
    expect_limit(MIB(4), "8MiB", MIB(4));
    expect_limit(MIB(4), "none", MIB(4));
    expect_limit(MIB(4), "50%", MIB(4));
    expect_limit(0, "50%", MIB(32));
}

static void expect_run_limit(const char *variable, rebatch_status status, size_t bytes,
                             uint32_t permille)
{
    size_t told_bytes = 7;
    uint32_t told_permille = 7;
    if (variable)
        setenv("REBATCH_MEMORY_LIMIT", variable, 1);
    cr_expect_eq(rebatch_config_run_limit(&told_bytes, &told_permille), status, "%s", variable);
    cr_expect(told_bytes == bytes && told_permille == permille, "%s: %zu, %u", variable, told_bytes,
              told_permille);
}

Test(launch, the_limit_of_the_variable_is_told_to_programs_with_a_pool_of_their_own)
{
    expect_run_limit(NULL, REBATCH_OK, 0, 0);
    expect_run_limit("8MiB", REBATCH_OK, MIB(8), 0);
    expect_run_limit("0x100000", REBATCH_OK, MIB(1), 0);
    expect_run_limit("12.5%", REBATCH_OK, 0, 125);
    expect_run_limit("none", REBATCH_OK, 0, 0);
    expect_run_limit("much", REBATCH_E_PARSE, 0, 0);
    SAYS("REBATCH_MEMORY_LIMIT: memory.limit is \"much\"");
    size_t bytes;
    cr_expect_eq(rebatch_config_run_limit(&bytes, NULL), REBATCH_E_INVALID);
    cr_expect_eq(rebatch_config_run_limit(NULL, &(uint32_t){0}), REBATCH_E_INVALID);
}

/* ---- a probe ---- */

static void run_step(void *user)
{
    struct rig rig;
    rig_open(&rig, NULL);
    _exit(rebatch_step(rig.rb, user, BATCH, &rig, NULL) == REBATCH_OK ? 98 : 99); /* refused */
}

/* Runs a program's first step in a process of its own, whose output is `text`; gives its status. */
static int run_probe(char *text, size_t room, rebatch_step_ops step)
{
    const int status = output_of(run_step, &step, STDOUT_FILENO, text, room);
    cr_assert(WIFEXITED(status));
    return WEXITSTATUS(status);
}

Test(launch, a_step_with_a_cost_is_probed_by_cost)
{
    static char text[16384];
    rebatch_step_ops by_cost = ops;
    by_cost.cost = cost;
    setenv("REBATCH_PROBE_ONLY", "1", 1);
    setenv("REBATCH_MEMORY_LIMIT", "9MiB", 1);
    cr_assert_eq(run_probe(text, sizeof text, by_cost), 0);
    cr_expect(strncmp(text, "batch   16 samples, cost 1600\n", 30) == 0, "%s", text);
    HAS(text, "\nlargest budget of cost: 400, in 4 accumulation steps; ");
    setenv("REBATCH_PROBE_ONLY", "json", 1);
    cr_assert_eq(run_probe(text, sizeof text, by_cost), 0);
    HAS(text, "\"batch_cost\":1600,");
    cr_assert_eq(run_probe(text, sizeof text, ops), 0);
    cr_expect(strstr(text, "\"batch_cost\":null,") && strstr(text, "\"size\":4,"), "%s", text);
}

static rebatch_status resize(size_t micro_batch, void *user)
{
    void *buffer;
    return rebatch_pool_alloc(&buffer, rebatch_get_pool(((struct rig *)user)->rb),
                              micro_batch * MIB(1), NULL, 0);
}

/* A sample takes 1 MiB in a buffer of resize and 2 MiB in an attempt. */
Test(launch, a_step_with_resize_is_probed_with_its_buffers)
{
    static char text[16384];
    rebatch_step_ops with_buffers = ops;
    with_buffers.resize = resize;
    setenv("REBATCH_PROBE_ONLY", "json", 1);
    setenv("REBATCH_MEMORY_LIMIT", "10MiB", 1);
    cr_assert_eq(run_probe(text, sizeof text, with_buffers), 0);
    HAS(text, "\"size\":3,");
    HAS(text, "\"ooms\":0,");
    HAS(text, "\"measured_peak_bytes\":9437184,");
}

static rebatch_status refuse(const rebatch_microbatch *mb, void *user)
{
    (void)mb;
    (void)user;
    return (rebatch_status)1007;
}

static rebatch_status refuse_with_own_sentence(const rebatch_microbatch *mb, void *user)
{
    (void)mb;
    (void)user;
    rebatch_clear_error(); /* the program keeps sentences of its own */
    return REBATCH_E_UNSUPPORTED;
}

Test(launch, a_callback_that_fails_is_no_size)
{
    static char text[4096];
    rebatch_step_ops failing = ops;
    failing.forward_backward = refuse;
    setenv("REBATCH_PROBE_ONLY", "1", 1);
    cr_assert_eq(run_probe(text, sizeof text, failing), 1);
    cr_expect_str_eq(text, "");
    setenv("REBATCH_PROBE_ONLY", "json", 1);
    cr_assert_eq(run_probe(text, sizeof text, failing), 1);
    HAS(text, "\"error\":\"step 0: forward_backward of sample 0 returned 1007\"");
    failing.forward_backward = refuse_with_own_sentence;
    cr_assert_eq(run_probe(text, sizeof text, failing), 1);
    HAS(text, "\"error\":\"a callback returned REBATCH_E_UNSUPPORTED\"");
    failing = ops;
    failing.optimizer_step = NULL; /* no step at all: the program is told */
    cr_assert_eq(run_probe(text, sizeof text, failing), 99);
}

/* ---- all that is said ---- */

/* Times and addresses differ from run to run: what stands between these words is a tilde. */
static const char *masked(char *text)
{
    static const char *const marks[][2] = {{"ran in ", " s"},  {"\"seconds\":", ","},
                                           {"again, ", " ms"}, {"in all, ", " ms"},
                                           {"run ", " "},      {" ran again, ", " ms"}};
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++)
        for (char *at = text; (at = strstr(at, marks[i][0]));) {
            at += strlen(marks[i][0]);
            char *const end = strstr(at, marks[i][1]);
            if (!end || end == at || strspn(at, "0123456789.-xabcdef") < (size_t)(end - at))
                continue;
            *at = '~';
            memmove(at + 1, end, strlen(end) + 1);
        }
    return text;
}

/* What a program whose first step runs says on both of its outputs. */
static const char *probe_of(const char *form, const char *limit, bool by_cost, int code)
{
    static char text[32768];
    rebatch_step_ops step = ops;
    step.cost = by_cost ? cost : NULL;
    setenv("REBATCH_PROBE_ONLY", form, 1);
    setenv("REBATCH_MEMORY_LIMIT", limit, 1);
    cr_expect_eq(run_probe(text, sizeof text, step), code, "%s", text);
    return masked(text);
}

Test(launch, a_probe_is_a_table)
{
    cr_expect_str_eq(
        probe_of("1", "9MiB", false, 0),
        "batch   16 samples\n"
        "device  host, 64.0 MiB; 9.00 MiB for the pool\n\n"
        "micro-batch  steps   predicted    measured        room\n"
        "          1     16    2.00 MiB    2.00 MiB    7.00 MiB\n"
        "          2      8    4.00 MiB    4.00 MiB    5.00 MiB\n"
        "          4      4    8.00 MiB    8.00 MiB    1.00 MiB  largest\n"
        "          5      4    10.0 MiB           -   -1.00 MiB  does not fit\n"
        "          8      2    16.0 MiB           -   -7.00 MiB  does not fit\n"
        "         16      1    32.0 MiB           -   -23.0 MiB  does not fit\n\n"
        "largest micro-batch: 4, in 4 accumulation steps; it ran, and its memory was predicted to "
        "the byte\n"
        "3 micro-batches ran in ~ s, 0 of them out of memory\n");
    cr_expect_str_eq(
        probe_of("1", "none", false, 0),
        "batch   16 samples\n"
        "device  host, 64.0 MiB; 64.0 MiB for the pool\n\n"
        "micro-batch  steps   predicted    measured        room\n"
        "          1     16    2.00 MiB    2.00 MiB    62.0 MiB\n"
        "          2      8    4.00 MiB           -    60.0 MiB\n"
        "          4      4    8.00 MiB           -    56.0 MiB\n"
        "          8      2    16.0 MiB           -    48.0 MiB\n"
        "         16      1    32.0 MiB    32.0 MiB    32.0 MiB  largest\n"
        "         32      1    64.0 MiB           -         0 B\n\n"
        "largest micro-batch: 16, in 1 accumulation step; it ran; its memory was not predicted "
        "beforehand\n"
        "2 micro-batches ran in ~ s, 0 of them out of memory\n");
    cr_expect_str_eq(
        probe_of("1", "3MiB", true, 0),
        "batch   16 samples, cost 1600\n"
        "device  host, 64.0 MiB; 3.00 MiB for the pool\n\n"
        "     budget  steps   predicted    measured        room\n"
        "          1   1600           -           -           -\n"
        "          2    800           -           -           -\n"
        "          4    400           -           -           -\n"
        "          8    200           -           -           -\n"
        "         16    100           -           -           -\n"
        "         32     50           -           -           -\n"
        "         64     25           -           -           -\n"
        "        100     16           -    2.00 MiB    1.00 MiB\n"
        "        101     16           -           -           -\n"
        "        200      8           -      failed           -\n"
        "       1600      1           -           -           -\n\n"
        "largest budget of cost: 100, in 16 accumulation steps; it ran; its memory was not "
        "predicted beforehand\n"
        "3 micro-batches ran in ~ s, 1 of them out of memory\n");
}

#define NULLS "\"reserved_bytes\":null,\"failing_bytes\":null,\"measured_peak_bytes\":"

Test(launch, a_probe_is_an_object)
{
    cr_expect_str_eq(
        probe_of("json", "3MiB", false, 0),
        "{\"status\":\"REBATCH_OK\",\"error\":\"\",\"batch\":16,\"batch_cost\":null,"
        "\"device\":\"host\",\"device_bytes\":67108864,\"limit_bytes\":3145728,\"size\":1,"
        "\"predicted_peak_bytes\":null,\"measured_peak_bytes\":2097152,"
        "\"available_bytes\":3145728,\"twice\":2,\"twice_bytes\":null,"
        "\"confidence\":\"MEASURED\",\"saved\":\"NONE\",\"saved_size\":0,\"trials\":3,"
        "\"microbatches\":3,\"ooms\":1,\"oom_asked_bytes\":4194304,\"seconds\":~,\"sizes\":["
        "{\"size\":1,\"steps\":16,\"predicted_peak_bytes\":null," NULLS
        "2097152,\"ran\":true,\"fits\":true},"
        "{\"size\":2,\"steps\":8,\"predicted_peak_bytes\":null," NULLS
        "null,\"ran\":false,\"fits\":false},"
        "{\"size\":16,\"steps\":1,\"predicted_peak_bytes\":null," NULLS
        "null,\"ran\":null,\"fits\":null}]}\n");
    const char *const text = probe_of("json", "9MiB", true, 0);
    HAS(text, "\"batch_cost\":1600,\"device\"");
    HAS(text, "\"size\":400,\"predicted_peak_bytes\":null,\"measured_peak_bytes\":8388608,"
              "\"available_bytes\":9437184,\"twice\":800,\"twice_bytes\":16777216,"
              "\"confidence\":\"MEASURED\"");
    HAS(text, "{\"size\":800,\"steps\":2,\"predicted_peak_bytes\":16777216,"
              "\"reserved_bytes\":null,\"failing_bytes\":16777216,");
    HAS(probe_of("json", "1MiB", false, 3),
        "{\"status\":\"REBATCH_E_EXHAUSTED\",\"error\":\"nothing fits: out of memory in "
        "forward_backward of the smallest micro-batch, which needs 2.00 MiB, with 1.00 MiB "
        "available: free memory, or raise the limit\",\"batch\":16,");
    cr_expect_str_eq(probe_of("1", "1MiB", false, 3), "");
}

/* ---- what a command is told ---- */

/* Makes this process's sessions tell the socket. */
static int open_report(void)
{
    static char text[64];
    int ends[2];
    struct stat about;
    cr_assert_eq(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);
    cr_assert_eq(dup2(ends[1], 0), 0); /* the least descriptor that there is */
    cr_assert_eq(fstat(0, &about), 0);
    (void)snprintf(text, sizeof text, "0:%llu", (unsigned long long)about.st_ino);
    setenv("REBATCH_REPORT_FD", text, 1);
    return ends[0];
}

/* All messages so far, a line each. */
static const char *read_report(int socket)
{
    static char text[65536];
    size_t length = 0;
    for (ssize_t got; (got = recv(socket, text + length, 16384, MSG_DONTWAIT)) > 0;) {
        length += (size_t)got;
        text[length++] = '\n';
    }
    text[length] = '\0';
    return masked(text);
}

static rebatch_status map_samples(const rebatch_microbatch *mb, void *user)
{
    void *block;
    (void)user;
    const rebatch_status status =
        rebatch_pool_alloc(&block, mb->pool, mb->count * MIB(1), mb->stream, 0);
    return status ? status : rebatch_pool_free(mb->pool, block);
}

Test(launch, each_step_is_told_with_what_was_injected)
{
    const rebatch_map_ops map = {.struct_size = sizeof map, .run = map_samples};
    const int socket = open_report();
    setenv("REBATCH_RUN_OOM", "2", 1);
    OPEN(rig, rig, NULL);
    OK(rebatch_map(rig.rb, &map, 4, &rig, NULL));
    cr_expect_str_eq(read_report(socket), "", "a map is no training");
    OK(rebatch_step(rig.rb, &ops, BATCH, &rig, NULL));
    cr_expect_str_eq(read_report(socket),
                     "begun 0\n"
                     "run ~ 0 failures injected, 0 survived (callbacks made 1 requests); 0 OOMs in "
                     "all, 0.0% of the samples ran again, ~ ms lost; 1 step\n");
    OK(rebatch_step(rig.rb, &ops, BATCH, &rig, NULL));
    cr_expect_str_eq(read_report(socket),
                     "run ~ 1 failure injected, 0 survived; 0 OOMs in all, 0.0% of the samples ran "
                     "again, ~ ms lost; 1 step\n"
                     "run ~ 1 failure injected, 1 survived; 1 OOM in all, 50.0% of the samples ran "
                     "again, ~ ms lost; 2 steps\n");
    OK(rebatch_pool_set_limit(rebatch_get_pool(rig.rb), MIB(2)));
    OK(rebatch_map(rig.rb, &map, 4, &rig, NULL));
    cr_expect_str_eq(
        read_report(socket),
        "run ~ 1 failure injected, 1 survived; 2 OOMs in all, 50.0% of the samples ran "
        "again, ~ ms lost; 2 steps\n");
    (void)!rebatch_step(rig.rb, &ops, BATCH, &rig, NULL);
    HAS(read_report(socket), "1 failure injected, 1 survived; ");
}

/* Of a step that adds before it fails, samples run again. */
Test(launch, a_batch_that_runs_again_is_told)
{
    const int socket = open_report();
    rebatch_step_ops own = ops;
    own.forward_backward = add_first;
    own.flags = 0;
    setenv("REBATCH_RUN_OOM", "3", 1);
    OPEN(rig, rig, &OPTIONS(.micro_start = 4));
    OK(rebatch_step(rig.rb, &own, BATCH, &rig, NULL));
    HAS(read_report(socket), "\nrun ~ 1 failure injected, 1 survived; 1 OOM in all, 75.0% of the "
                             "samples ran again, ~ ms lost; 1 step\n");
}

static void train(void *user)
{
    const rebatch_status failed = *(const rebatch_status *)user;
    struct rig rig;
    rebatch_step_ops step = ops;
    rig_open(&rig, NULL);
    if (failed)
        step.forward_backward = refuse;
    for (int i = 0; i < 3; i++)
        (void)!rebatch_step(rig.rb, &step, BATCH, &rig, NULL);
    rig_close(&rig);
}

/* Without a command it is said when the session is closed. */
Test(launch, what_was_injected_is_said_at_the_end)
{
    static const struct {
        const char *variable, *value;
        rebatch_status failed;
        const char *said;
    } rows[] = {
        {"REBATCH_RUN_OOM", "1", 0,
         "rebatch run: 1 failure injected, 1 survived; 1 OOM in all, 33.3% of the samples ran "
         "again, ~ ms lost; 3 steps\n"},
        {"REBATCH_RUN_OOM", "99", 0,
         "rebatch run: 0 failures injected, 0 survived (callbacks made 3 requests); 0 OOMs in all, "
         "0.0% of the samples ran again, ~ ms lost; 3 steps\n"},
        {"REBATCH_RUN_OOM_CHANCE", "100%", 0,
         "rebatch run: 52 failures injected, 52 survived; 52 OOMs in all, 162.5% of the samples "
         "ran "
         "again, ~ ms lost; 3 steps\n"},
        {"REBATCH_RUN_OOM_CHANCE", "0.0001%", 0,
         "rebatch run: 0 failures injected, 0 survived (callbacks made 3 requests); 0 OOMs in all, "
         "0.0% of the samples ran again, ~ ms lost; 3 steps\n"},
        {"REBATCH_RUN_SHRINK", "25%@step:1", 0,
         "rebatch run: 0 failures injected, 0 survived; 1 OOM in all, 0.0% of the samples ran "
         "again, ~ ms lost; 3 steps\n"},
        {"REBATCH_RUN_OOM", "1", 1,
         "rebatch run: 0 failures injected, 0 survived (callbacks made 0 requests); 0 OOMs in all, "
         "~ ms lost; no step was completed\n"},
        {"REBATCH_RUN_SEED", "3", 0, ""},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        static char text[4096];
        rebatch_status failed = rows[i].failed;
        setenv(rows[i].variable, rows[i].value, 1);
        (void)output_of(train, &failed, STDERR_FILENO, text, sizeof text);
        cr_expect_str_eq(masked(text), rows[i].said, "%s %s: %s", rows[i].variable, rows[i].value,
                         text);
        unsetenv(rows[i].variable);
    }
}

/* A share of what the limit was at first, or the device without one. */
Test(launch, the_limit_shrinks_and_comes_back_at_its_steps)
{
    static const struct {
        const char *limit;
        size_t options_bytes;
        uint64_t expected[5];
    } rows[] = {
        {"none", 0, {MIB(64), MIB(32), MIB(32), MIB(16), MIB(64)}},
        {"32MiB", 0, {MIB(32), MIB(16), MIB(16), MIB(8), MIB(32)}},
        {"50%", 0, {MIB(32), MIB(16), MIB(16), MIB(8), MIB(32)}},
        {"none", MIB(48), {MIB(48), MIB(24), MIB(24), MIB(12), MIB(48)}},
    };
    setenv("REBATCH_RUN_SHRINK", "50%@step:1,25%@step:3,100%@step:4", 1);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        setenv("REBATCH_MEMORY_LIMIT", rows[i].limit, 1);
        OPEN(rig, rig, &OPTIONS(.pool.limit_bytes = rows[i].options_bytes));
        for (int step = 0; step < 5; step++) {
            size_t available;
            OK(rebatch_step(rig.rb, &ops, 2, &rig, NULL));
            OK(rebatch_pool_trim(rebatch_get_pool(rig.rb), 0, NULL));
            OK(rebatch_pool_available(&available, rebatch_get_pool(rig.rb)));
            cr_expect_eq(available, rows[i].expected[step], "row %zu, step %d: %zu", i, step,
                         available);
        }
    }
}

static void print_ooms(void *user)
{
    struct rig rig;
    rig_open(&rig, user);
    OK(rebatch_pool_set_limit(rebatch_get_pool(rig.rb), MIB(4)));
    (void)!rebatch_step(rig.rb, &ops, 4, &rig, NULL);
    rig_close(&rig);
}

static void swallow(const rebatch_event *event, void *user)
{
    (void)event;
    (void)user;
}

/* The person who starts a program sets the level where the program has none, and no listener. */
Test(launch, the_level_of_the_variable_holds_where_the_program_has_none)
{
    static const struct {
        const char *variable;
        rebatch_log_level level;
        bool listens, is_said;
    } rows[] = {
        {"warn", REBATCH_LOG_DEFAULT, false, true}, {"quiet", REBATCH_LOG_DEFAULT, false, false},
        {"quiet", REBATCH_LOG_WARN, false, true},   {"warn", REBATCH_LOG_QUIET, false, false},
        {"warn", REBATCH_LOG_DEFAULT, true, false},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        static char text[8192];
        rebatch_options options =
            OPTIONS(.log_level = rows[i].level, .on_event = rows[i].listens ? swallow : NULL);
        setenv("REBATCH_LOG_LEVEL", rows[i].variable, 1);
        (void)output_of(print_ooms, &options, STDERR_FILENO, text, sizeof text);
        cr_expect_eq(strstr(text, "rebatch: step 0: out of memory") != NULL, rows[i].is_said,
                     "row %zu: %s", i, text);
    }
}

static void ask(void *user)
{
    run_step(user);
}

/* Begun, and the answer: its code, the length of the complaint, that, and the text. */
Test(launch, a_probe_and_a_check_answer_a_command)
{
    static const struct {
        const char *variable, *limit, *first;
        int code;
    } rows[] = {
        {"REBATCH_PROBE_ONLY", "9MiB", "begun 0\nanswer 0 0\nbatch   16 samples\n", 0},
        {"REBATCH_PROBE_ONLY", "1MiB", "begun 0\nanswer 3 ", 3},
        {"REBATCH_CHECK", "none", "begun 0\nanswer 4 0\nuncompared  ", 4},
    };
    const int socket = open_report();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        static char output[1024];
        rebatch_step_ops step = ops;
        char answer[32];
        setenv(rows[i].variable, "1", 1);
        setenv("REBATCH_MEMORY_LIMIT", rows[i].limit, 1);
        const int status = output_of(ask, &step, STDOUT_FILENO, output, sizeof output);
        cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == rows[i].code, "row %zu: %d", i,
                  status);
        cr_expect_str_empty(output);
        const char *const said = read_report(socket);
        cr_expect_eq(strncmp(said, rows[i].first, strlen(rows[i].first)), 0, "row %zu: %s", i,
                     said);
        (void)snprintf(answer, sizeof answer, "\nanswer %d ", rows[i].code);
        HAS(said, answer);
        unsetenv(rows[i].variable);
    }
}
