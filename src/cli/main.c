/* Owns the `rebatch` command: the table of its commands, and help.
 * Must not know the library's inside: public headers only. */
#include <stdio.h>

#include "cli/command.h"
#include "output.h"
#include "rebatch/version.h"

static const char main_help[] =
    "rebatch: training steps that survive running out of GPU memory\n"
    "\n"
    "usage:\n"
    "  rebatch probe [OPTION]... -- PROGRAM [ARGUMENT]...\n"
    "                                     find the largest micro-batch of a program that fits\n"
    "  rebatch fit --gpu CARD -- PROGRAM [ARGUMENT]...\n"
    "                                     the same on a machine without a GPU, for a named card\n"
    "  rebatch run [OPTION]... -- PROGRAM [ARGUMENT]...\n"
    "                                     run a program under a cap, with failures on purpose\n"
    "  rebatch ask SOCKET REQUEST         ask a training that runs for memory\n"
    "  rebatch top [--json]               list this user's trainings, and what they hold\n"
    "  rebatch doctor                     print versions, GPUs, and what would not work here\n"
    "  rebatch config check FILE          look for mistakes in a settings file\n"
    "  rebatch config show [FILE]         print every setting, and where its value comes from\n"
    "  rebatch config example             print a settings file with every default, and comments\n"
    "  rebatch help COMMAND               more about one of these\n"
    "  rebatch --version                  print the version\n"
    "\n"
    "exit status: 0 success, 1 failure, 2 wrong usage, 3 nothing fits, 4 mistakes\n"
    "(`run --check`); otherwise `run` exits with the status of the program\n";

static int run_help(int count, char **arguments)
{
    static const struct rbi_command topics[] = {
        {"ask", rbi_ask_help}, {"config", rbi_config_help}, {"doctor", rbi_doctor_help},
        {"fit", rbi_fit_help}, {"probe", rbi_probe_help},   {"run", rbi_run_help},
        {"top", rbi_top_help},
    };
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
        {"ask", rbi_ask_main}, {"config", rbi_config_main}, {"doctor", rbi_doctor_main},
        {"fit", rbi_fit_main}, {"probe", rbi_probe_main},   {"run", rbi_run_main},
        {"top", rbi_top_main}, {"help", run_help},          {"--help", run_help},
        {"-h", run_help},      {"--version", run_version},  {"-V", run_version},
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
