/* Owns the tests of `rebatch ask` and `rebatch top`. Must not know the library's inside. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "cli_common.h"
#include "rebatch/sharing.h"
#include "rig.h"
#include "unit/config_files.h"

static void enter(void)
{
    char here[PATH_MAX];
    (void)alarm(300);
    cli_enter();
    cr_assert(getcwd(here, sizeof here));
    setenv("XDG_RUNTIME_DIR", here, 1);
}

static void leave(void)
{
    cr_assert_eq(system("rm -rf rebatch"), 0);
    config_leave();
}

TestSuite(cli_ask, .init = enter, .fini = leave);

struct rig {
    rebatch_device *device;
    rebatch *rb;
};
CLOSE_BOTH(rig)

/* With 32 MiB that are cached, at a socket of its own. */
static void rig_open(struct rig *rig, const char *path)
{
    void *block;
    open_on_host(&rig->device, &rig->rb, MIB(64), NULL);
    OK(rebatch_pool_alloc(&block, rebatch_get_pool(rig->rb), MIB(32), NULL, 0));
    OK(rebatch_pool_free(rebatch_get_pool(rig->rb), block));
    OK(rebatch_yield_to(rebatch_get_pool(rig->rb), path));
}

/* Until the process has answered in the two seconds that a status has, on a busy machine. */
static struct run run_until(const char *verb, const char *arguments, const char *words)
{
    struct run r = cli_run("", verb, arguments);
    while (!strstr(r.out, words)) {
        done(&r);
        r = cli_run("", verb, arguments);
    }
    return r;
}

Test(cli_ask, it_prints_the_answer_and_says_by_its_status_whether_all_is_done)
{
    OPEN(rig, rig, "a.sock");
    AUTO_DONE(given) = cli_run("", "ask", "a.sock give 16MiB");
    cr_expect(given.code == 0 && strncmp(given.out, "ok: gave ", 9) == 0, "%s%s", given.out,
              given.error);
    AUTO_DONE(partly) = cli_run("", "ask", "a.sock give to 1MiB");
    cr_expect(partly.code == 0, "%s", partly.out);
    AUTO_DONE(refused) = cli_run("", "ask", "a.sock give 4G");
    cr_expect(refused.code == 1 && strncmp(refused.out, "no: ", 4) == 0, "%s", refused.out);
    AUTO_DONE(status) = run_until("ask", "a.sock status", "}");
    cr_expect(status.code == 0 && status.out[0] == '{', "%s", status.out);
}

Test(cli_ask, top_lists_trainings_by_the_number_of_their_processes)
{
    char arguments[64];
    AUTO_DONE(none) = cli_run("", "top", "--json");
    cr_expect_str_eq(none.out, "[]\n");
    OPEN(rig, rig, NULL);
    (void)snprintf(arguments, sizeof arguments, "\n%-9d", (int)getpid());
    AUTO_DONE(table) = run_until("top", "", arguments);
    (void)snprintf(arguments, sizeof arguments, "\n%-9d32.0 MiB  ?", (int)getpid());
    cr_expect(strstr(table.out, arguments), "%s is missing in %s", arguments, table.out);
    AUTO_DONE(json) = run_until("top", "--json", "}");
    cr_expect(strncmp(json.out, "[\n  {\"pid\": ", 12) == 0, "%s", json.out);
    (void)snprintf(arguments, sizeof arguments, "%d status", (int)getpid());
    AUTO_DONE(status) = run_until("ask", arguments, "}");
    cr_expect(status.code == 0 && status.out[0] == '{', "%s%s", status.out, status.error);
}

Test(cli_ask, help_and_wrong_usage)
{
    AUTO_DONE(ask) = cli_run("", "ask", "--help");
    cr_expect(ask.code == 0 && strstr(ask.out, "usage: rebatch ask SOCKET"), "%s", ask.out);
    AUTO_DONE(top) = cli_run("", "help", "top");
    cr_expect(top.code == 0 && strstr(top.out, "usage: rebatch top"), "%s", top.out);
    cli_expect_refused("", "ask", "a.sock", 2,
                       "usage: rebatch ask SOCKET status|give SIZE|give to SIZE|sleep|wake\n");
    cli_expect_refused("", "top", "all", 2, "usage: rebatch top [--json]\n");
    cli_expect_refused("", "ask", "./none.sock status", 1,
                       "rebatch: ./none.sock: No such file or directory\n");
}
