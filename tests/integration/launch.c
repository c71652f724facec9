/* Owns the tests of what a session does because the environment asks for it: a lower limit,
 * failures on purpose, a probe by cost. Must not know the library's inside. */
#include <fcntl.h>
#include <stdlib.h>
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
    failing.zero_grad = NULL; /* no step at all: the program is told */
    cr_assert_eq(run_probe(text, sizeof text, failing), 99);
}
