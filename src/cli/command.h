/* What the files of the `rebatch` command share. Must not know the library's inside. */
#ifndef RBI_CLI_COMMAND_H
#define RBI_CLI_COMMAND_H

#include <stdbool.h>
#include <stddef.h>

enum { RBI_EXIT_OK = 0, RBI_EXIT_FAILED = 1, RBI_EXIT_USAGE = 2 };

/* A command: `run` takes what follows its name and gives the exit status. */
struct rbi_command {
    const char *name;
    int (*run)(int count, char **arguments);
};

/* Runs the command that the first of `count` arguments, at least 1, names; `what` is for the
 * sentence about a name that none has. */
int rbi_command_run(const char *what, const struct rbi_command *commands, size_t command_count,
                    int count, char **arguments);
/* Whether it asks for help: --help or -h. */
bool rbi_command_is_help(const char *argument);
/* Says how a command is used, and gives RBI_EXIT_USAGE. */
int rbi_command_refuse(const char *usage);
/* Prints a help, which has no arguments; `usage` is what is said of others. An exit status. */
int rbi_command_print_help(const char *text, const char *usage, int count, char **arguments);
/* Makes the function that does it for a command. */
#define RBI_COMMAND_HELP(name, text)                                                               \
    int rbi_##name##_help(int count, char **arguments)                                             \
    {                                                                                              \
        return rbi_command_print_help(text, "help " #name, count, arguments);                      \
    }

/* Says which option getopt_long() did not take: ':' is one without its value. Long options have
 * values below ' '. `command` is whose
 * help has those that there are. */
void rbi_command_refuse_option(const char *command, int found, const char *given);

/* ---- a user's program (fit_command.c, probe_command.c, run_command.c) ---- */

int rbi_fit_main(int count, char **arguments);
int rbi_fit_help(int count, char **arguments);
int rbi_probe_main(int count, char **arguments);
int rbi_probe_help(int count, char **arguments);
int rbi_run_main(int count, char **arguments);
int rbi_run_help(int count, char **arguments);

/* ---- this machine (doctor_command.c) ---- */

int rbi_doctor_main(int count, char **arguments);
int rbi_doctor_help(int count, char **arguments);

/* ---- trainings that run (ask_command.c) ---- */

int rbi_ask_main(int count, char **arguments);
int rbi_ask_help(int count, char **arguments);
int rbi_top_main(int count, char **arguments);
int rbi_top_help(int count, char **arguments);

/* ---- settings (config_command.c) ---- */

int rbi_config_main(int count, char **arguments);
int rbi_config_help(int count, char **arguments);

#endif
