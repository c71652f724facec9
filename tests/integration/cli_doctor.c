/* Owns the tests of `rebatch doctor`. Must not know the library's inside. Machines with a GPU and
 * without one pass; tests/python/cuda/test_doctor.py has GPUs of several kinds. */
#include <criterion/criterion.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "cli_common.h"
#include "rebatch/version.h"
#include "unit/config_files.h"

TestSuite(cli_doctor, .init = cli_enter, .fini = config_leave);

Test(cli_doctor, it_says_what_there_is)
{
    AUTO_DONE(r) = cli_run("", "doctor", "");
    cr_assert_str_eq(r.error, "");
    cr_assert(strncmp(r.out, "rebatch       " REBATCH_VERSION "\n", 15) == 0, "%s", r.out);
    const char *const lines[] = {"\nsystem  ", "\nhost memory  ", "\nGPU  ", "\nNVML  "};
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        cr_expect(strstr(r.out, lines[i]), "%s is missing in %s", lines[i], r.out);
    cr_expect_eq(r.code, strstr(r.out, "\nnot here      no GPU can be used") ? 1 : 0, "%s", r.out);
}

Test(cli_doctor, it_shows_the_variables_and_the_mistake_in_one)
{
    AUTO_DONE(r) = cli_run("REBATCH_MEMORY_LIMIT=8GiB REBATCH_BATCH_STRAT=3", "doctor", "");
    cr_expect(strstr(r.out, "REBATCH_MEMORY_LIMIT=8GiB\n"), "%s", r.out);
    cr_expect(strstr(r.out, "\nnot here      a session: REBATCH_BATCH_STRAT is not a setting's "
                            "variable; did you mean REBATCH_BATCH_START?\n"),
              "%s", r.out);
}

Test(cli_doctor, it_shows_what_a_file_sets_and_a_mistake_in_what_a_run_asks_for)
{
    config_write("a.cfg", "memory = { limit = \"22GiB\"; };\n");
    AUTO_DONE(file) = cli_run("REBATCH_CONFIG=a.cfg", "doctor", "");
    cr_expect(strstr(file.out, "\n              memory.limit = \"22GiB\" (a.cfg:1)\n"), "%s",
              file.out);
    AUTO_DONE(run) = cli_run("REBATCH_RUN_OOM=x", "doctor", "");
    cr_expect(strstr(run.out, "\nnot here      a session: REBATCH_RUN_OOM "), "%s", run.out);
}

/* On one of tests/drivers, which are beside the command. */
static struct run run_on(const char *driver, const char *variables)
{
    static char setup[2 * PATH_MAX];
    (void)snprintf(setup, sizeof setup, "export LD_LIBRARY_PATH='%.*s/tests/drivers/%s' %s;",
                   (int)(strrchr(cli_command, '/') - cli_command), cli_command, driver, variables);
    return cli_run(setup, "doctor", "");
}

Test(cli_doctor, virtual_memory_that_the_driver_refuses_is_said_with_the_reason)
{
    AUTO_DONE(r) = run_on("gpu", "DRIVER_HAS=102 DRIVER_PAGE=2097152");
    cr_expect(strstr(r.out, " virtual memory no, "), "%s", r.out);
    cr_expect(strstr(r.out, "\nnot here      virtual memory of cuda:0 stand-in: "), "%s", r.out);
    AUTO_DONE(without) = run_on("gpu", "DRIVER_HAS=102");
    cr_expect(strstr(without.out, "\nnot here      no virtual memory, as on some vGPUs: "), "%s",
              without.out);
}

Test(cli_doctor, help_and_wrong_usage)
{
    AUTO_DONE(help) = cli_run("", "doctor", "--help");
    cr_expect(help.code == 0 && strstr(help.out, "usage: rebatch doctor\n"), "%s", help.out);
    cli_expect_refused("", "doctor", "more", 2, "usage: rebatch doctor\n");
}

Test(cli_doctor, the_limit_that_others_set_is_said_and_a_value_that_is_none)
{
    AUTO_DONE(r) = run_on("gpu", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=16M");
    cr_expect(strstr(r.out, "\n              limit 16.0 MiB, set by "
                            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT\n"),
              "%s", r.out);
    AUTO_DONE(wrong) = run_on("gpu", "CUDA_DEVICE_MEMORY_LIMIT_0=all");
    cr_expect(strstr(wrong.out, "\nnot here      CUDA_DEVICE_MEMORY_LIMIT_0 is \"all\": expected "),
              "%s", wrong.out);
    cr_expect(!strstr(wrong.out, " set by "), "%s", wrong.out);
}
