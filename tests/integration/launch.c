/* Owns the tests of what a session does because the environment asks for it: a lower limit,
 * failures on purpose, a probe by cost. Must not know the library's inside. */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rebatch/rebatch.h"

#define MIB ((size_t)1 << 20)
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
    rebatch_status status = rebatch_reserve(rig->rb, 2 * mb->count * MIB);
    if (status)
        return status;
    rebatch_mutating(rig->rb);
    rig->counted += (unsigned)mb->count;
    status = rebatch_pool_alloc(&first, mb->pool, mb->count * MIB, mb->stream, 0);
    if (!status)
        status = rebatch_pool_alloc(&second, mb->pool, mb->count * MIB, mb->stream, 0);
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

static const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                     .zero_grad = zero_grad,
                                     .forward_backward = forward_backward,
                                     .optimizer_step = optimizer_step,
                                     .flags = REBATCH_DECLARES_MUTATION};

static void rig_open(struct rig *rig, const rebatch_options *options)
{
    *rig = (struct rig){.device = NULL};
    cr_assert_eq(rebatch_device_open_host(&rig->device, 64 * MIB, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_open(&rig->rb, rig->device, options), REBATCH_OK, "%s",
                 rebatch_last_error());
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
    struct rig rig;
    rebatch_step_report report;
    setenv("REBATCH_RUN_OOM_CHANCE", "100%", 1);
    rig_open(&rig, NULL);
    cr_assert_eq(rebatch_step(rig.rb, &ops, BATCH, &rig, &report), REBATCH_OK, "%s",
                 rebatch_last_error());
    cr_expect_eq(rig.counted, BATCH);
    cr_expect_eq(report.ooms, report.ooms_in[REBATCH_PHASE_FORWARD]);
    cr_expect_eq(report.ooms, 4 + BATCH, "16, 8, 4, 2, and each sample once");
    cr_expect_eq(report.micro_after, 1);
    rig_close(&rig);
}

/* As many fail as somebody asks for, and the step still ends. */
Test(launch, failures_on_purpose_do_not_count_as_attempts_in_vain)
{
    struct rig rig;
    rebatch_step_report report;
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.max_attempts = options.max_ooms_in_row = 2;
    setenv("REBATCH_RUN_OOM_CHANCE", "100%", 1);
    rig_open(&rig, &options);
    cr_assert_eq(rebatch_step(rig.rb, &ops, 300, &rig, &report), REBATCH_OK, "%s",
                 rebatch_last_error());
    cr_expect_eq(rig.counted, 300);
    cr_expect_gt(report.ooms, 300);
    rig_close(&rig);
}

static rebatch_status add_first(const rebatch_microbatch *mb, void *user)
{
    struct rig *rig = user;
    void *block;
    rig->counted += (unsigned)mb->count;
    const rebatch_status status = rebatch_pool_alloc(&block, mb->pool, MIB, mb->stream, 0);
    return status ? status : rebatch_pool_free(mb->pool, block);
}

/* Each failure runs the whole batch again, which hardly ever comes to its end by chance. */
Test(launch, nor_do_they_run_a_batch_again_for_ever)
{
    struct rig rig;
    rebatch_step_report report;
    rebatch_step_ops own = ops;
    rebatch_options options = REBATCH_OPTIONS_INIT;
    own.forward_backward = add_first;
    own.flags = 0;
    options.micro_start = 1;
    setenv("REBATCH_RUN_OOM_CHANCE", "50%", 1);
    rig_open(&rig, &options);
    cr_assert_eq(rebatch_step(rig.rb, &own, 300, &rig, &report), REBATCH_OK, "%s",
                 rebatch_last_error());
    cr_expect_eq(rig.counted, 300);
    cr_expect_eq(report.ooms_in[REBATCH_PHASE_BACKWARD], 16);
    rig_close(&rig);
}

Test(launch, a_failure_says_that_it_was_injected)
{
    struct rig rig;
    setenv("REBATCH_RUN_OOM", "1", 1);
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.on_oom = REBATCH_ON_OOM_STOP;
    options.max_attempts = 1;
    rig_open(&rig, &options);
    rebatch_step_report report;
    cr_assert_eq(rebatch_step(rig.rb, &ops, BATCH, &rig, &report), REBATCH_E_EXHAUSTED);
    cr_expect(strstr(rebatch_last_error(), "(the failure is injected)"), "%s",
              rebatch_last_error());
    cr_expect_eq(report.oom.asked_bytes, 2 * BATCH * MIB);
    cr_expect_str_eq(report.oom.tag, "reserve");
    rig_close(&rig);
}

/* What the program allocates itself, outside of steps, is no request. */
Test(launch, outside_of_steps_nothing_fails)
{
    struct rig rig;
    void *block;
    setenv("REBATCH_RUN_OOM_CHANCE", "1", 1);
    rig_open(&rig, NULL);
    for (int i = 0; i < 8; i++) {
        cr_assert_eq(rebatch_pool_alloc(&block, rebatch_get_pool(rig.rb), MIB, NULL, 0),
                     REBATCH_OK);
        cr_assert_eq(rebatch_pool_free(rebatch_get_pool(rig.rb), block), REBATCH_OK);
    }
    rig_close(&rig);
}

Test(launch, a_variable_that_cannot_be_read_opens_nothing)
{
    rebatch_device *device;
    rebatch *rb;
    cr_assert_eq(rebatch_device_open_host(&device, 64 * MIB, NULL), REBATCH_OK);
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
    struct rig rig;
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.pool.limit_bytes = options_bytes;
    setenv("REBATCH_MEMORY_LIMIT", variable, 1);
    rig_open(&rig, &options);
    void *block;
    rebatch_oom_report report;
    cr_assert_eq(rebatch_pool_alloc(&block, rebatch_get_pool(rig.rb), 128 * MIB, NULL, 0),
                 REBATCH_OOM);
    cr_assert_eq(rebatch_pool_last_oom(&report, rebatch_get_pool(rig.rb)), REBATCH_OK);
    cr_expect_eq(report.limit_bytes, bytes, "%s: %llu", variable,
                 (unsigned long long)report.limit_bytes);
    rig_close(&rig);
}

Test(launch, the_smaller_limit_holds)
{
    expect_limit(0, "8MiB", 8 * MIB);
    expect_limit(16 * MIB, "8MiB", 8 * MIB);
    expect_limit(4 * MIB, "8MiB", 4 * MIB);
    expect_limit(4 * MIB, "none", 4 * MIB);
    expect_limit(4 * MIB, "50%", 4 * MIB);
    expect_limit(0, "50%", 32 * MIB);
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
    expect_run_limit("8MiB", REBATCH_OK, 8 * MIB, 0);
    expect_run_limit("0x100000", REBATCH_OK, MIB, 0);
    expect_run_limit("12.5%", REBATCH_OK, 0, 125);
    expect_run_limit("none", REBATCH_OK, 0, 0);
    expect_run_limit("much", REBATCH_E_PARSE, 0, 0);
    cr_expect(strstr(rebatch_last_error(), "REBATCH_MEMORY_LIMIT: memory.limit is \"much\""));
    size_t bytes;
    cr_expect_eq(rebatch_config_run_limit(&bytes, NULL), REBATCH_E_INVALID);
    cr_expect_eq(rebatch_config_run_limit(NULL, &(uint32_t){0}), REBATCH_E_INVALID);
}

/* ---- a probe ---- */

/* Runs a program's first step in a process of its own, whose output is `text`; gives its status. */
static int run_probe(char *text, size_t room, const rebatch_step_ops *step)
{
    int out[2];
    cr_assert_eq(pipe(out), 0);
    const pid_t pid = fork();
    if (pid == 0) {
        struct rig rig;
        (void)dup2(out[1], STDOUT_FILENO);
        rig_open(&rig, NULL);
        _exit(rebatch_step(rig.rb, step, BATCH, &rig, NULL) == REBATCH_OK ? 98 : 99); /* refused */
    }
    close(out[1]);
    size_t length = 0;
    for (ssize_t got; (got = read(out[0], text + length, room - 1 - length)) > 0;)
        length += (size_t)got;
    text[length] = '\0';
    close(out[0]);
    int status;
    cr_assert_eq(waitpid(pid, &status, 0), pid);
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
    cr_assert_eq(run_probe(text, sizeof text, &by_cost), 0);
    cr_expect(strncmp(text, "batch   16 samples, cost 1600\n", 30) == 0, "%s", text);
    cr_expect(strstr(text, "\nlargest budget of cost: 400, in 4 accumulation steps; "), "%s", text);
    setenv("REBATCH_PROBE_ONLY", "json", 1);
    cr_assert_eq(run_probe(text, sizeof text, &by_cost), 0);
    cr_expect(strstr(text, "\"batch_cost\":1600,"), "%s", text);
    cr_assert_eq(run_probe(text, sizeof text, &ops), 0);
    cr_expect(strstr(text, "\"batch_cost\":null,") && strstr(text, "\"size\":4,"), "%s", text);
}

static rebatch_status resize(size_t micro_batch, void *user)
{
    void *buffer;
    return rebatch_pool_alloc(&buffer, rebatch_get_pool(((struct rig *)user)->rb),
                              micro_batch * MIB, NULL, 0);
}

/* A sample takes 1 MiB in a buffer of resize and 2 MiB in an attempt. */
Test(launch, a_step_with_resize_is_probed_with_its_buffers)
{
    static char text[16384];
    rebatch_step_ops with_buffers = ops;
    with_buffers.resize = resize;
    setenv("REBATCH_PROBE_ONLY", "json", 1);
    setenv("REBATCH_MEMORY_LIMIT", "10MiB", 1);
    cr_assert_eq(run_probe(text, sizeof text, &with_buffers), 0);
    cr_expect(strstr(text, "\"size\":3,"), "%s", text);
    cr_expect(strstr(text, "\"ooms\":0,"), "%s", text);
    cr_expect(strstr(text, "\"measured_peak_bytes\":9437184,"), "%s", text);
}

static rebatch_status refuse(const rebatch_microbatch *mb, void *user)
{
    (void)mb;
    (void)user;
    return (rebatch_status)1007;
}

Test(launch, a_callback_that_fails_is_no_size)
{
    static char text[4096];
    rebatch_step_ops failing = ops;
    failing.forward_backward = refuse;
    setenv("REBATCH_PROBE_ONLY", "1", 1);
    cr_assert_eq(run_probe(text, sizeof text, &failing), 1);
    cr_expect_str_eq(text, "");
    failing = ops;
    failing.zero_grad = NULL; /* no step at all: the program is told */
    cr_assert_eq(run_probe(text, sizeof text, &failing), 99);
}
