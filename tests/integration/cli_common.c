/* Owns how the tests run the command. Must not know what it does. */
#include "cli_common.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>

#include "unit/config_files.h"

char cli_command[PATH_MAX];
char cli_gpt[PATH_MAX];
char cli_demo[PATH_MAX], cli_minimal[PATH_MAX];

/* What a variable names, or a file in the folder that it names. */
static void find(char found[PATH_MAX], const char *variable, const char *file)
{
    char path[PATH_MAX];
    const char *value = getenv(variable);
    cr_assert(value != NULL, "%s is not set: use make test", variable);
    (void)snprintf(path, sizeof path, "%s%s", value, file);
    cr_assert(realpath(path, found) != NULL, "%s is not there", path);
}

void cli_enter(void)
{
    find(cli_command, "REBATCH_COMMAND", "");
    find(cli_gpt, "REBATCH_GPT", "");
    find(cli_demo, "REBATCH_EXAMPLES", "/gpt/demo");
    find(cli_minimal, "REBATCH_EXAMPLES", "/minimal");
    config_enter();
}

static struct run run_line(const char *line)
{
    config_write("out", "");
    config_write("error", "");
    const int status = system(line);
    cr_assert(WIFEXITED(status), "%s", line);
    return (struct run){WEXITSTATUS(status), config_read("out"), config_read("error")};
}

struct run cli_run(const char *setup, const char *verb, const char *arguments)
{
    static char line[4 * PATH_MAX];
    (void)snprintf(line, sizeof line, "exec 2>error >out; %s exec '%s' %s %s", setup, cli_command,
                   verb, arguments);
    return run_line(line);
}

struct run cli_run_program(const char *program, const char *arguments)
{
    static char line[4 * PATH_MAX];
    (void)snprintf(line, sizeof line, "exec 2>error >out; exec '%s' %s", program, arguments);
    return run_line(line);
}

void done(struct run *r)
{
    free(r->out);
    free(r->error);
}
