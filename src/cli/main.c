/* Owns the `rebatch` command: finding what was asked for, and help.
 * Must not know the library's inside: public headers only. */
#include <getopt.h>
#include <stdio.h>
#include <string.h>

#include "cli/command.h"
#include "cli/replay.h"
#include "output.h"
#include "rebatch/version.h"

static const char main_help[] =
    "rebatch: training steps that survive running out of GPU memory\n"
    "\n"
    "usage:\n"
    "  rebatch probe [OPTION]... -- PROGRAM [ARGUMENT]...\n"
    "                                     find the largest micro-batch of a program that fits\n"
    "  rebatch run [OPTION]... -- PROGRAM [ARGUMENT]...\n"
    "                                     run a program under a cap, with failures on purpose\n"
    "  rebatch replay [OPTION]... TRACE   run recorded allocations against the pool\n"
    "  rebatch config check FILE          look for mistakes in a settings file\n"
    "  rebatch config show [FILE]         print every setting, and where its value comes from\n"
    "  rebatch config example             print a settings file with every default, and comments\n"
    "  rebatch config reference           print the table of settings, in Markdown\n"
    "  rebatch help COMMAND               more about probe, run, replay or config\n"
    "  rebatch --version                  print the version\n"
    "\n"
    "exit status: 0 success, 1 failure, 2 wrong usage, 3 nothing fits; `run` exits with the\n"
    "status of the program\n";

/* ---- finding the command ---- */

/* Whether one character more, less, other, or swapped with its neighbour makes `b` of `a`, or
 * `a` is how `b` begins. */
static bool is_near(const char *a, const char *b)
{
    size_t from = 0;
    while (a[from] && a[from] == b[from])
        from++;
    if (a[from] == '\0' && from > 0)
        return true;
    size_t a_end = strlen(a);
    size_t b_end = strlen(b);
    while (a_end > from && b_end > from && a[a_end - 1] == b[b_end - 1]) {
        a_end--;
        b_end--;
    }
    const size_t a_left = a_end - from;
    const size_t b_left = b_end - from;
    if (a_left <= 1 && b_left <= 1)
        return true;
    return a_left == 2 && b_left == 2 && a[from] == b[from + 1] && a[from + 1] == b[from];
}

int rbi_command_run(const char *what, const struct rbi_command *commands, size_t command_count,
                    int count, char **arguments)
{
    for (size_t i = 0; i < command_count; i++)
        if (strcmp(arguments[0], commands[i].name) == 0)
            return commands[i].run(count - 1, arguments + 1);
    const char *near = NULL;
    for (size_t i = 0; i < command_count && !near; i++)
        if (strlen(commands[i].name) > 2 && is_near(arguments[0], commands[i].name))
            near = commands[i].name;
    if (near)
        fprintf(stderr, "rebatch: there is no %s '%.60s'; did you mean '%s'?\n", what, arguments[0],
                near);
    else
        fprintf(stderr, "rebatch: there is no %s '%.60s'; see 'rebatch --help'\n", what,
                arguments[0]);
    return RBI_EXIT_USAGE;
}

bool rbi_command_is_help(const char *argument)
{
    return strcmp(argument, "--help") == 0 || strcmp(argument, "-h") == 0;
}

int rbi_command_refuse(const char *usage)
{
    fprintf(stderr, "usage: rebatch %s\n", usage);
    return RBI_EXIT_USAGE;
}

void rbi_command_refuse_option(const char *command, int found, const char *given)
{
    const char letter[] = {'-', (char)optopt, '\0'};
    if (found == ':')
        fprintf(stderr, "rebatch: %.60s has no value; see 'rebatch help %s'\n", given, command);
    else
        fprintf(stderr, "rebatch: there is no option '%.60s'; see 'rebatch help %s'\n",
                optopt > ' ' ? letter : given, command);
}

/* ---- commands ---- */

static int run_help(int count, char **arguments)
{
    static const struct rbi_command topics[] = {{"config", rbi_config_help},
                                                {"probe", rbi_probe_help},
                                                {"replay", rbi_replay_help},
                                                {"run", rbi_run_help}};
    if (count > 0 && !rbi_command_is_help(arguments[0]))
        return rbi_command_run("help on", topics, sizeof topics / sizeof *topics, count, arguments);
    fputs(main_help, stdout);
    return RBI_EXIT_OK;
}

static int run_version(int count, char **arguments)
{
    (void)arguments;
    if (count > 0)
        return rbi_command_refuse("--version");
    printf("rebatch %s\n", rebatch_version());
    return RBI_EXIT_OK;
}

int main(int count, char **arguments)
{
    static const struct rbi_command commands[] = {
        {"config", rbi_config_main},
        {"probe", rbi_probe_main},
        {"replay", rbi_replay_main},
        {"run", rbi_run_main},
        {"help", run_help},
        {"--help", run_help},
        {"-h", run_help},
        {"--version", run_version},
        {"-V", run_version},
    };
    output_begin();
    if (count < 2) {
        fputs(main_help, stderr);
        return RBI_EXIT_USAGE;
    }
    return output_end("rebatch",
                      rbi_command_run("command", commands, sizeof commands / sizeof *commands,
                                      count - 1, arguments + 1));
}
