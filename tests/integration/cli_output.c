/* Owns the tests of programs whose output cannot be written: the command, gpt and demo.
 * Must not know what they print. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli_common.h"
#include "unit/config_files.h"

TestSuite(cli_output, .init = cli_enter_with_text, .fini = config_leave);

/* Valgrind's own file would take the place of a stdout that is closed: there it is one that cannot
 * be written. */
static const char *closed(void)
{
    const char *stride = getenv("REBATCH_TEST_STRIDE");
    return stride && strcmp(stride, "40") == 0 ? "1</dev/null" : ">&-";
}

/* Ends with 1 and one sentence, whether the disk is full or stdout is closed. The reason is in it
 * where the last write is the one that failed. */
static void expect_complaint(const char *program, const char *name, const char *arguments)
{
    const struct {
        const char *way, *reason;
    } ways[] = {{">/dev/full", "No space left on device"},
                {closed(), "Bad file descriptor"},
                {"<&- >&-", "Bad file descriptor"}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        static char line[2 * PATH_MAX];
        char without[128], with[128];
        (void)snprintf(line, sizeof line, "%s %s", arguments, ways[i].way);
        (void)snprintf(without, sizeof without, "%s: cannot write the output\n", name);
        (void)snprintf(with, sizeof with, "%s: cannot write the output: %s\n", name,
                       ways[i].reason);
        AUTO_DONE(r) = cli_run_program(program, line);
        cr_expect_eq(r.code, 1, "%s %s ends with %d", name, line, r.code);
        cr_expect(strcmp(r.error, without) == 0 || strcmp(r.error, with) == 0, "%s %s: %s", name,
                  line, r.error);
    }
}

#define TRAINING "--preset tiny --data text --batch 4 --steps 2"

Test(cli_output, a_failed_write_is_said_and_is_the_exit_status)
{
    expect_complaint(cli_command, "rebatch", "--version");
    expect_complaint(cli_command, "rebatch", "help run");
    expect_complaint(cli_command, "rebatch", "config show");
    expect_complaint(cli_command, "rebatch", "config example");
    static char line[PATH_MAX + 64];
    (void)snprintf(line, sizeof line, "probe --json -- '%s'", cli_minimal);
    expect_complaint(cli_command, "rebatch", line);
    expect_complaint(cli_gpt, "gpt", "--help");
    expect_complaint(cli_gpt, "gpt", TRAINING);
    expect_complaint(cli_demo, "demo", "--help");
}

/* The training itself goes on: what it saves is whole, and nothing of the output is in it. */
Test(cli_output, what_is_saved_meanwhile_is_whole)
{
    char line[256];
    (void)snprintf(line, sizeof line, TRAINING " --save state --save-every 1 %s", closed());
    struct run lost = cli_run_program(cli_gpt, line);
    cr_expect_eq(lost.code, 1, "%s", lost.error);
    done(&lost);
    AUTO_DONE(whole) = cli_run_program(cli_gpt, TRAINING);
    AUTO_DONE(resumed) = cli_run_program(cli_gpt, "--resume state --data text");
    cr_assert(whole.code == 0 && resumed.code == 0, "%s", resumed.error);
    const char *const hash = strstr(whole.out, "sha256=");
    cr_assert_not_null(hash);
    cr_expect(strstr(resumed.out, hash), "%s", resumed.out);
}

/* Mistakes stay what they are where nothing was to be printed. */
Test(cli_output, without_output_nothing_is_lost)
{
    AUTO_DONE(r) = cli_run_program(cli_gpt, "--batch none >&-");
    cr_expect_eq(r.code, 2, "%s", r.error);
    cr_expect_str_eq(r.error, "gpt: --batch is \"none\": expected a number from 1\n");
    done(&r);
    r = cli_run_program(cli_command, "config >&-");
    cr_expect_eq(r.code, 2, "%s", r.error);
}

/* Said before anything trains. */
Test(cli_output, a_record_that_cannot_be_opened_is_named)
{
    AUTO_DONE(r) = cli_run_program(cli_demo, "--csv none/demo.csv");
    cr_expect_eq(r.code, 1, "%s", r.error);
    cr_expect_str_eq(r.error, "demo: failed: REBATCH_E_IO: cannot write none/demo.csv: No such "
                              "file or directory\n");
    cr_expect_str_empty(r.out);
}
