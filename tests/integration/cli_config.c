/* Owns the tests of the `rebatch` command: what it prints, where, and its exit status.
 * Must not know the library's inside: it runs the program that REBATCH_COMMAND names. */
#include <criterion/criterion.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli_common.h"
#include "config/settings.h"
#include "rebatch/rebatch.h"
#include "unit/config_files.h"

TestSuite(cli_config, .init = cli_enter, .fini = config_leave);

static struct run run(const char *arguments)
{
    return cli_run("", "", arguments);
}

static void expect(const char *arguments, int code, const char *out, const char *error)
{
    AUTO_DONE(r) = run(arguments);
    cr_expect(r.code == code, "'%s' ends with %d instead of %d", arguments, r.code, code);
    cr_expect(strcmp(r.out, out) == 0, "'%s' prints\n%s\ninstead of\n%s", arguments, r.out, out);
    cr_expect(strcmp(r.error, error) == 0, "'%s' complains\n%s\ninstead of\n%s", arguments, r.error,
              error);
}

/* The check of a file says that it is good, with that many settings from it, and then `more`. */
static void expect_good(const char *file, size_t in_file, const char *more)
{
    char arguments[64];
    char out[160];
    (void)snprintf(arguments, sizeof arguments, "config check %s", file);
    (void)snprintf(out, sizeof out, "%s: ok, %zu of %zu settings from the file%s\n", file, in_file,
                   (size_t)RBI_SETTING_COUNT, more);
    expect(arguments, 0, out, "");
}

Test(cli_config, version)
{
    expect("--version", 0, "rebatch " REBATCH_VERSION "\n", "");
    expect("-V", 0, "rebatch " REBATCH_VERSION "\n", "");
}

Test(cli_config, check)
{
    config_write("good.cfg", "memory = { limit = \"22GiB\"; headroom = \"1GiB\"; };\n");
    config_write("bad.cfg", "memory = {\n  limt = \"22GiB\";\n};\n");
    expect_good("good.cfg", 2, "");
    config_write("-odd.cfg", "memory = { limit = \"22GiB\"; };\n");
    struct run behind = run("config check -- -odd.cfg");
    cr_expect(behind.code == 0 && strncmp(behind.out, "-odd.cfg: ok", 12) == 0, "%s", behind.error);
    done(&behind);
    expect("config check bad.cfg", 1, "",
           "bad.cfg:2: memory.limt is not a setting; did you mean memory.limit?\n");
    expect("config check none.cfg", 1, "", "none.cfg cannot be read: No such file or directory\n");
    expect("config check ''", 1, "", "\"\" cannot be read: No such file or directory\n");
    setenv("REBATCH_MEMORY_LIMIT", "20GiB", 1);
    setenv("REBATCH_LOG_LEVEL", "debug", 1);
    expect_good("good.cfg", 1, ", 2 from the environment");
    setenv("REBATCH_LOG_LEVEL", "loud", 1);
    expect("config check good.cfg", 1, "",
           "REBATCH_LOG_LEVEL: log.level is \"loud\": expected text, \"auto\", \"quiet\", "
           "\"error\", \"warn\", "
           "\"info\" or \"debug\"\n");
}

Test(cli_config, a_check_lists_every_mistake)
{
    config_write("bad.cfg", "memory = { limit = \"1KiX\"; headrom = 3; };\n"
                            "batch = { largest = -1; };\nfoo = { a = 1; };\n");
    setenv("REBATCH_BATCH_STRT", "3", 1);
    expect(
        "config check bad.cfg", 1, "",
        "bad.cfg:1: memory.limit is \"1KiX\", which may mean 1KiB or 1KB: expected bytes such as "
        "1048576 or \"22GiB\", a share such as \"90%\" of the device's memory, or \"none\"\n"
        "bad.cfg:1: memory.headrom is not a setting; did you mean memory.headroom?\n"
        "bad.cfg:2: batch.largest is -1, a negative number: expected a whole number, 0 or more\n"
        "bad.cfg:3: foo is not a group: expected batch, memory, recovery, growth, probe, device "
        "or log\n"
        "REBATCH_BATCH_STRT is not a setting's variable; did you mean REBATCH_BATCH_START?\n");
}

Test(cli_config, show)
{
    config_write("a.cfg", "memory = {\n  limit = \"22GiB\";\n};\n");
    setenv("REBATCH_BATCH_START", "64", 1);
    expect("config show a.cfg", 0,
           "batch = {\n"
           "    start           = 64;         # REBATCH_BATCH_START\n"
           "    learn           = false;      # default\n"
           "    smallest        = 1;          # default\n"
           "    largest         = 0;          # default\n"
           "    multiple_of     = 1;          # default\n"
           "    allowed         = \"any\";      # default\n"
           "};\n"
           "\n"
           "memory = {\n"
           "    limit           = \"22GiB\";    # a.cfg:2\n"
           "    headroom        = 0;          # default\n"
           "    floor           = 0;          # default\n"
           "    caching         = true;       # default\n"
           "    replay          = true;       # default\n"
           "    overflow        = true;       # default\n"
           "    overflow_limit  = 0;          # default\n"
           "    keep_room       = \"2%\";       # default\n"
           "    rounding        = 0;          # default\n"
           "    events          = 0;          # default\n"
           "    yield           = \"none\";     # default\n"
           "};\n"
           "\n"
           "recovery = {\n"
           "    on_oom          = \"auto\";     # default\n"
           "    admission       = true;       # default\n"
           "    lighten         = true;       # default\n"
           "    max_attempts    = 64;         # default\n"
           "    max_ooms_in_row = 0;          # default\n"
           "    oom_wait_ms     = 10000;      # default\n"
           "};\n"
           "\n"
           "growth = {\n"
           "    enabled         = true;       # default\n"
           "    after           = 16;         # default\n"
           "    wait_max        = 1024;       # default\n"
           "};\n"
           "\n"
           "probe = {\n"
           "    max_trials      = 0;          # default\n"
           "    max_seconds     = 0;          # default\n"
           "    choose          = \"largest\";  # default\n"
           "    file            = \"none\";     # default\n"
           "    key             = \"none\";     # default\n"
           "};\n"
           "\n"
           "device = {\n"
           "    kind            = \"host\";     # default\n"
           "    ordinal         = 0;          # default\n"
           "    capacity        = \"none\";     # default\n"
           "};\n"
           "\n"
           "log = {\n"
           "    level           = \"auto\";     # default\n"
           "    file            = \"none\";     # default\n"
           "    format          = \"text\";     # default\n"
           "};\n",
           "");
    expect("config show none.cfg", 1, "", "none.cfg cannot be read: No such file or directory\n");
}

/* What is shown is a file that sets the same. */
Test(cli_config, show_can_be_loaded)
{
    setenv("REBATCH_MEMORY_LIMIT", "12.5%", 1);
    setenv("REBATCH_MEMORY_HEADROOM", "99999999999", 1);
    AUTO_DONE(r) = run("config show");
    cr_assert(r.code == 0);
    config_write("shown.cfg", r.out);
    rebatch_config *variables;
    rebatch_config *file;
    cr_assert(rebatch_config_load(&variables, NULL) == REBATCH_OK);
    unsetenv("REBATCH_MEMORY_LIMIT");
    unsetenv("REBATCH_MEMORY_HEADROOM");
    cr_assert(rebatch_config_load(&file, "shown.cfg") == REBATCH_OK, "%s", rebatch_last_error());
    for (size_t i = 0; i < RBI_SETTING_COUNT; i++) {
        const char *key = rbi_settings[i].key;
        cr_expect(strcmp(config_value(variables, key, NULL), config_value(file, key, NULL)) == 0,
                  "%s", key);
    }
    rebatch_config_free(variables);
    rebatch_config_free(file);
}

Test(cli_config, example)
{
    static char text[65536];
    struct rbi_text t = {text, sizeof text, 0};
    rbi_config_add_example(&t);
    expect("config example", 0, text, "");
    config_write("example.cfg", text);
    expect_good("example.cfg", RBI_SETTING_COUNT, "");
}

Test(cli_config, help)
{
    AUTO_DONE(none) = run("");
    cr_expect(none.code == 2 && none.out[0] == '\0');
    static const char *const ways[] = {"--help", "-h", "help"};
    for (size_t i = 0; i < 3; i++)
        expect(ways[i], 0, none.error, "");
    cr_expect(strstr(none.error, "rebatch config check FILE") != NULL);
    AUTO_DONE(config) = run("help config");
    cr_expect(config.code == 0 && strstr(config.out, "REBATCH_GROUP_KEY") != NULL);
    expect("config --help", 0, config.out, "");
    expect("config -h", 0, config.out, "");
    expect("config check --help", 0, config.out, "");
    expect("config show -h", 0, config.out, "");
    expect("config show a.cfg --help", 0, config.out, "");
    expect("help -h", 0, none.error, "");
    expect("help config -h", 0, config.out, "");
}

Test(cli_config, wrong_usage)
{
    static const struct {
        const char *arguments, *error;
    } list[] = {
        {"confg", "rebatch: there is no command 'confg'; did you mean 'config'?\n"},
        {"conifg", "rebatch: there is no command 'conifg'; did you mean 'config'?\n"},
        {"--versio", "rebatch: there is no command '--versio'; did you mean '--version'?\n"},
        {"train", "rebatch: there is no command 'train'; see 'rebatch --help'\n"},
        {"''", "rebatch: there is no command ''; see 'rebatch --help'\n"},
        {"config chek a", "rebatch: there is no config command 'chek'; did you mean 'check'?\n"},
        {"config shwo", "rebatch: there is no config command 'shwo'; did you mean 'show'?\n"},
        {"config exam", "rebatch: there is no config command 'exam'; did you mean 'example'?\n"},
        {"config set", "rebatch: there is no config command 'set'; see 'rebatch --help'\n"},
        {"help confi", "rebatch: there is no help on 'confi'; did you mean 'config'?\n"},
        {"-V a", "usage: rebatch --version\n"},
        {"-x", "rebatch: there is no command '-x'; see 'rebatch --help'\n"},
        {"config show --bogus",
         "rebatch: there is no option '--bogus'; see 'rebatch help config'\n"},
        {"config check -q a.cfg", "rebatch: there is no option '-q'; see 'rebatch help config'\n"},
        {"config", "usage: rebatch config check FILE | show [FILE] | example\n"},
        {"config check", "usage: rebatch config check FILE\n"},
        {"config check a b", "usage: rebatch config check FILE\n"},
        {"config show a b", "usage: rebatch config show [FILE]\n"},
        {"config example a", "usage: rebatch config example\n"},
        {"help config a", "usage: rebatch help config\n"},
        {"--version a", "usage: rebatch --version\n"},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        expect(list[i].arguments, 2, "", list[i].error);
}

Test(cli_config, a_full_disk)
{
    static const char *const ways[] = {"config show >/dev/full", "config example >/dev/full",
                                       "--version >/dev/full", "--help >/dev/full"};
    static const char complaint[] = "rebatch: cannot write the output";
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        AUTO_DONE(full) = run(ways[i]);
        cr_expect(full.code == 1, "'%s' ends with %d", ways[i], full.code);
        cr_expect(strncmp(full.error, complaint, strlen(complaint)) == 0, "%s", full.error);
    }
    expect("--version >/dev/full", 1, "",
           "rebatch: cannot write the output: No space left on device\n");
    expect("--version 1</dev/null", 1, "",
           "rebatch: cannot write the output: Bad file descriptor\n");
}
