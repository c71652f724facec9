/* Owns how the tests run the command. Must not know what it does. */
#include "cli_common.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>

#include "unit/config_files.h"

char cli_command[PATH_MAX];

void cli_enter(void)
{
    const char *path = getenv("REBATCH_COMMAND");
    cr_assert(path != NULL, "REBATCH_COMMAND does not name the command: use make test");
    cr_assert(realpath(path, cli_command) != NULL, "%s is not there", path);
    config_enter();
}

struct run cli_run(const char *setup, const char *verb, const char *arguments)
{
    static char line[4 * PATH_MAX];
    config_write("out", "");
    config_write("error", "");
    (void)snprintf(line, sizeof line, "exec 2>error >out; %s exec '%s' %s %s", setup, cli_command,
                   verb, arguments);
    const int status = system(line);
    cr_assert(WIFEXITED(status), "%s", arguments);
    return (struct run){WEXITSTATUS(status), config_read("out"), config_read("error")};
}

void done(struct run *r)
{
    free(r->out);
    free(r->error);
}
