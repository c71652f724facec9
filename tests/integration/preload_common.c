/* Owns how tests run programs with librebatch_wrap.so. Must not know what is expected of them. */
#include "preload_common.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

#include "unit/config_files.h"

static char folder[PATH_MAX];

void preload_enter(void)
{
    const char *const named = getenv("REBATCH_PRELOAD");
    if (!named)
        cr_skip_test("nothing can be preloaded in this build");
    cr_assert_not_null(realpath(named, folder), "%s is not there", named);
    cli_enter();
}

/* What every run sets. */
static const char *setup(const char *variables)
{
    static char text[4 * PATH_MAX];
    (void)snprintf(
        text, sizeof text,
        "rm -f log; export TESTS='%s' WRAP='%s/../../librebatch_wrap.so' DRIVER_LOG=log; "
        "WRAP=$(realpath \"$WRAP\"); "
        "export LD_LIBRARY_PATH=\"$TESTS/../drivers/gpu:$TESTS\" %s;",
        folder, folder, variables);
    return text;
}

struct run preload_run_with(const char *variables, const char *options, const char *program,
                            const char *arguments)
{
    static char line[2 * PATH_MAX];
    (void)snprintf(line, sizeof line, "%s -- %s %s", options, program, arguments);
    return cli_run(setup(variables), "run", line);
}

struct run preload_run(const char *options, const char *program, const char *arguments)
{
    char path[PATH_MAX];
    (void)snprintf(path, sizeof path, "\"$TESTS\"/%s", program);
    return preload_run_with("", options, path, arguments);
}

struct run preload_run_shell(const char *options, const char *line)
{
    char arguments[PATH_MAX];
    (void)snprintf(arguments, sizeof arguments, "-c '%s'", line);
    return preload_run_with("", options, "sh", arguments);
}

struct run preload_run_plain(const char *variables, const char *program, const char *arguments)
{
    static char line[8 * PATH_MAX];
    (void)snprintf(line, sizeof line, "%s exec timeout 99 \"$TESTS\"/%s %s; true", setup(variables),
                   program, arguments);
    return cli_run(line, "", "");
}
