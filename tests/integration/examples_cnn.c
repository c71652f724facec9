/* Owns the test of examples/separable_cnn.c: the same bits in much memory and in little.
 * Must not know the library's inside. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli_common.h"
#include "unit/config_files.h"

TestSuite(examples_cnn, .init = cli_enter, .fini = config_leave);

static const char *program(void)
{
    static char path[PATH_MAX];
    (void)snprintf(path, sizeof path, "%.*s/separable_cnn",
                   (int)(strlen(cli_minimal) - strlen("/minimal")), cli_minimal);
    return path;
}

/* The number behind `words` in the line of an epoch. */
static double in_epoch(const struct run *r, int epoch, const char *words)
{
    char line[16];
    (void)snprintf(line, sizeof line, "epoch %d: ", epoch);
    const char *at = strstr(r->out, line);
    at = at ? strstr(at, words) : NULL;
    cr_assert_not_null(at, "no %s%s in: %s%s", line, words, r->out, r->error);
    return strtod(at + strlen(words), NULL);
}

static const char *weights(const struct run *r)
{
    const char *at = strstr(r->out, "\nweights ");
    cr_assert_not_null(at, "%s%s", r->out, r->error);
    return at;
}

Test(examples_cnn, learns)
{
    struct run r = cli_run_program(program(), "");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect_lt(in_epoch(&r, 5, "loss "), 0.5 * in_epoch(&r, 0, "loss "), "%s", r.out);
    cr_expect_gt(in_epoch(&r, 5, "accuracy "), 80, "%s", r.out);
    cr_expect_gt(in_epoch(&r, 5, "held out "), 80, "%s", r.out);
    done(&r);
}

/* Down to micro-batches of one group. With 5 MiB an OOM comes behind a forward pass, which has
 * changed the running statistics. */
Test(examples_cnn, a_limit_changes_no_bit)
{
    static const char *const limits[] = {"5", "3", "1"};
    struct run free = cli_run_program(program(), "");
    cr_assert_eq(free.code, 0, "%s", free.error);
    cr_assert_eq(in_epoch(&free, 0, "micro-batch "), 128);
    double before = 128;
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        struct run limited = cli_run_program(program(), limits[i]);
        cr_assert_eq(limited.code, 0, "%s MiB: %s", limits[i], limited.error);
        const double micro = in_epoch(&limited, 0, "micro-batch ");
        cr_expect_lt(micro, before, "%s MiB: %s", limits[i], limited.out);
        cr_expect_str_eq(weights(&limited), weights(&free), "%s MiB", limits[i]);
        before = micro;
        done(&limited);
    }
    cr_expect_eq(before, 8);
    done(&free);
}

Test(examples_cnn, has_no_mistakes)
{
    char line[2 * PATH_MAX];
    (void)snprintf(line, sizeof line, "--check -- '%s'", program());
    AUTO_DONE(r) = cli_run("", "run", line);
    cr_expect_eq(r.code, 0, "%s%s", r.out, r.error);
    cr_expect(strstr(r.out, "no mistakes: ") && !strstr(r.out, "note "), "%s%s", r.out, r.error);
    cr_expect(strstr(r.out, "compared 3 names"), "%s", r.out);
}
