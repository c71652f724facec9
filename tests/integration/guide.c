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
