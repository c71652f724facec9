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
char cli_replay[PATH_MAX];

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
    unsetenv("REBATCH_LOG_LEVEL"); /* which keeps the other tests' sessions quiet */
    find(cli_command, "REBATCH_COMMAND", "");
    find(cli_gpt, "REBATCH_GPT", "");
    find(cli_demo, "REBATCH_EXAMPLES", "/gpt/demo");
    find(cli_replay, "REBATCH_REPLAY", "");
    find(cli_minimal, "REBATCH_EXAMPLES", "/minimal");
    config_enter();
}

void cli_enter_with_text(void)
{
    char text[4096 + 1];
    cli_enter();
    for (size_t i = 0; i < sizeof text - 1; i++)
        text[i] = (char)('a' + (i * i + i / 7) % 26);
    text[sizeof text - 1] = '\0';
    config_write("text", text);
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
    r->out = r->error = NULL; /* AUTO_DONE() may come after it */
}

void cli_expect_refused(const char *setup, const char *verb, const char *arguments, int code,
                        const char *words)
{
    struct run r = cli_run(setup, verb, arguments);
    cr_expect(r.code == code, "'%s' ends with %d instead of %d", arguments, r.code, code);
    cr_expect(r.out[0] == '\0', "'%s' prints %s", arguments, r.out);
    cr_expect_str_eq(r.error, words, "'%s' complains\n%s\nnot\n%s", arguments, r.error, words);
    done(&r);
}

static void expect_silence(const char *setup, const char *verb, const char *arguments, int code,
                           const char *words, const char *more)
{
    char all[512];
    (void)snprintf(all, sizeof all, "%s%s\n", words, more);
    cli_expect_refused(setup, verb, arguments, code, all);
}

void cli_expect_programs_refused(const char *setup, const char *verb, int code, const char *never,
                                 const char *before)
{
    config_write("plain", "no program\n");
    cli_expect_refused(setup, verb, "-- ./none", 127,
                       "rebatch: ./none cannot be run: No such file or directory\n");
    cli_expect_refused(setup, verb, "-- ./plain", 126,
                       "rebatch: ./plain cannot be run: Permission denied\n");
    expect_silence(setup, verb, "-- true", 1,
                   "rebatch: true ended with status 0 and never called rebatch_step()", never);
    expect_silence(setup, verb, "-- sh -c 'exit 7'", code,
                   "rebatch: sh ended with status 7 before its first rebatch_step()", before);
}
