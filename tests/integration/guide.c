/* Owns the tests of docs/guide.md: its trainer before and after, its check of CUDA's codes, and
 * that the document shows them as they are. Must not know the library's inside. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>

#include "cli_common.h"
#include "rig.h"
#include "unit/config_files.h"

TestSuite(guide, .init = cli_enter, .fini = config_leave);

/* Where the guide's programs are. */
static const char *program(const char *name)
{
    static char path[PATH_MAX];
    (void)snprintf(path, sizeof path, "%.*s/guide/%s",
                   (int)(strlen(cli_minimal) - strlen("/minimal")), cli_minimal, name);
    return path;
}

static struct run train(const char *options)
{
    static char line[2 * PATH_MAX];
    (void)snprintf(line, sizeof line, "%s -- '%s'", options, program("train"));
    return cli_run("", "run", line);
}

/* The losses and the weights, without what is said of micro-batches and events. */
static char *results(const struct run *r)
{
    char *const text = calloc(1, strlen(r->out) + 1);
    for (const char *line = r->out; *line; line += strcspn(line, "\n") + 1)
        if (*line != ' ')
            strncat(text, line, strcspn(line, ",\n") + 1)[strlen(text) - 1] = '\n';
    return text;
}

static void expect_same_results(const struct run *r, const char *expected, const char *what)
{
    char *const got = results(r);
    cr_expect_eq(r->code, 0, "%s: %s", what, r->error);
    cr_expect_str_eq(got, expected, "%s", what);
    free(got);
}

Test(guide, wrapped_it_computes_what_it_did_before)
{
    struct run before = cli_run_program(program("before"), "");
    struct run r = cli_run_program(program("train"), "");
    cr_assert(strstr(before.out, "\nweights "), "%s%s", before.out, before.error);
    expect_same_results(&r, before.out, "wrapped");
    done(&before);
    done(&r);
}

Test(guide, written_in_place_it_computes_what_it_did_before)
{
    AUTO_DONE(before) = cli_run_program(program("before"), "");
    AUTO_DONE(much) = cli_run_program(program("in_place"), "");
    expect_same_results(&much, before.out, "in place");
    (void)setenv("REBATCH_MEMORY_LIMIT", "3MiB", 1);
    AUTO_DONE(little) = cli_run_program(program("in_place"), "");
    cr_expect(strstr(little.error, "out of memory in forward_backward"), "%s", little.error);
    expect_same_results(&little, before.out, "in place, in 3 MiB");
}

/* In the first step, whose update makes the momentum, and in the second. */
Test(guide, a_request_that_fails_changes_no_bit)
{
    struct run before = cli_run_program(program("before"), "");
    for (int nth = 1; nth <= 10; nth++) {
        char options[32];
        (void)snprintf(options, sizeof options, "--oom %d", nth);
        AUTO_DONE(r) = train(options);
        expect_same_results(&r, before.out, options);
        cr_expect(strstr(r.error, "1 failure injected, 1 survived; "), "%s: %s", options, r.error);
        cr_expect(strstr(r.out, ": out of memory in "), "%s: %s", options, r.out);
    }
    done(&before);
}

Test(guide, little_memory_changes_no_bit)
{
    static const char *const options[] = {"--limit 4MiB", "--limit 2MiB", "--limit 1MiB",
                                          "--oom-chance 10% --seed 2",
                                          "--limit 4MiB --shrink 30%@step:2 --shrink 100%@step:4"};
    struct run before = cli_run_program(program("before"), "");
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        AUTO_DONE(r) = train(options[i]);
        expect_same_results(&r, before.out, options[i]);
        cr_expect(strstr(r.out, ": out of memory in "), "%s: %s", options[i], r.out);
    }
    done(&before);
}

Test(guide, too_little_memory_is_said)
{
    AUTO_DONE(r) = train("--limit 850KiB");
    cr_expect_eq(r.code, 1);
    HAS(r.error, "train: REBATCH_E_EXHAUSTED: step 0: ");
    HAS(r.error, "; limit 850 KiB, of which ");
}

/* ---- a check of CUDA's codes ---- */

static rebatch *session;
static rebatch_device *gpu;

/* As the guide shows it. */
static void check(int code) /* a cudaError_t */
{
    const rebatch_status status = rebatch_from_cuda(gpu, code);
    if (status == REBATCH_OOM)
        rebatch_escape(session, status); /* within a callback it does not return */
    if (status) {
        fprintf(stderr, "%s\n", rebatch_last_error());
        exit(1);
    }
}

enum { CUDA_SUCCESS = 0, CUDA_ERROR_MEMORY_ALLOCATION = 2, CUDA_ERROR_LAUNCH_FAILURE = 719 };

static int codes[3]; /* what the calls of one micro-batch answer, the first time */
static size_t trained, microbatches;

static rebatch_status zero_grad(void *user)
{
    (void)user;
    trained = 0;
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    (void)user;
    microbatches++;
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) {
        const int code = codes[i];
        codes[i] = CUDA_SUCCESS;
        check(code);
    }
    rebatch_mutating(session);
    trained += mb->count;
    return REBATCH_OK;
}

static rebatch_status optimizer_step(void *user)
{
    (void)user;
    rebatch_mutating(session);
    return REBATCH_OK;
}

static rebatch_status step(void)
{
    const rebatch_step_ops ops =
        OPS(zero_grad, forward_backward, optimizer_step, .flags = REBATCH_DECLARES_MUTATION);
    open_on_host(&gpu, &session, 1 << 20, NULL);
    const rebatch_status status = rebatch_step(session, &ops, 8, NULL, NULL);
    rebatch_close(session);
    rebatch_device_close(gpu);
    return status;
}

Test(guide, its_check_leaves_the_step_on_an_oom)
{
    codes[1] = CUDA_ERROR_MEMORY_ALLOCATION;
    cr_expect_eq(step(), REBATCH_OK);
    cr_expect_eq(trained, 8);
    cr_expect_gt(microbatches, 1);
}

Test(guide, its_check_ends_the_program_on_another_error, .exit_code = 1)
{
    codes[2] = CUDA_ERROR_LAUNCH_FAILURE;
    (void)step();
    cr_assert_fail("the program went on");
}

/* ---- a step written in place ---- */

struct network {
    int batch, room, inputs, updates;
    double sum, weight;
    char *buffer;
};

static void set_batch_network(struct network *net, int batch)
{
    net->batch = batch;
}

static void resize_network(struct network *net)
{
    net->buffer = rebatch_alloc_or_escape(rebatch_get_current(), (size_t)net->batch * KIB(64));
    net->room = net->batch;
}

static void get_next_batch(struct network *net, int first)
{
    cr_assert_leq(net->batch, net->room);
    net->inputs = first;
}

static void forward_network(struct network *net)
{
    memset(net->buffer, net->inputs, (size_t)net->batch * KIB(64));
}

static void backward_network(struct network *net)
{
    for (int i = 0; i < net->batch; i++)
        net->sum += net->inputs + i;
}

static void update_network(struct network *net)
{
    net->weight += net->sum;
    net->updates++;
}

/* As the guide shows it. */
static rebatch_status resize(size_t micro_batch, void *user)
{
    struct network *net = user;
    set_batch_network(net, (int)micro_batch);
    resize_network(net);
    return REBATCH_OK;
}

static rebatch_status train_network(struct network *net, int images)
{
    rebatch *rb = rebatch_get_current();
    rebatch_step_ops ops = REBATCH_STEP_OPS_INIT;
    ops.flags = REBATCH_DECLARES_MUTATION;
    ops.resize = resize;
    REBATCH_STEP_WITH (rb, &ops, images, net, part) {
        set_batch_network(net, (int)part.count);
        get_next_batch(net, (int)part.first);
        forward_network(net);
        rebatch_mutating(rb);
        backward_network(net);
    }
    REBATCH_UPDATE (rb) {
        rebatch_mutating(rb);
        update_network(net);
    }
    return rebatch_step_end(rb, NULL);
}

Test(guide, its_step_in_place_has_buffers_that_fit)
{
    struct network net = {0};
    open_on_host(&gpu, &session, MIB(1), NULL);
    OK(rebatch_set_current(session));
    for (int step = 1; step <= 3; step++) {
        net.sum = 0;
        OK(train_network(&net, 32));
        cr_expect_eq(net.sum, 31 * 32 / 2);
    }
    cr_expect_eq(net.updates, 3);
    cr_expect_eq(net.room, 16);
    rebatch_close(session);
    rebatch_device_close(gpu);
}

/* ---- the document ---- */

/* A suite without cli_enter(): it stays in the repository. */
Test(guide_document, shows_what_is_there)
{
    char line[PATH_MAX];
    const char *examples = getenv("REBATCH_EXAMPLES");
    cr_assert(examples, "REBATCH_EXAMPLES is not set: use make test");
    (void)snprintf(line, sizeof line, "scripts/test-guide '%s/..' 1>&2", examples);
    cr_expect_eq(system(line), 0);
}
