/* Owns finding the command that was asked for, and the sentences about a wrong one.
 * Must not know which commands there are. */
#include "cli/command.h"

#include <getopt.h>
#include <stdio.h>
#include <string.h>

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

int rbi_command_print_help(const char *text, const char *usage, int count, char **arguments)
{
    if (count > 0 && !rbi_command_is_help(arguments[0]))
        return rbi_command_refuse(usage);
    fputs(text, stdout);
    return RBI_EXIT_OK;
}

void rbi_command_refuse_option(const char *command, int found, const char *given)
{
    const char letter[] = {'-', (char)optopt, '\0'};
    const bool exists = found == '?' && optopt > 0 && optopt <= ' ';
    if (exists)
        fprintf(stderr, "rebatch: %.60s has a value: expected none; see 'rebatch help %s'\n", given,
                command);
    else if (found == ':')
        fprintf(stderr, "rebatch: %.60s has no value; see 'rebatch help %s'\n", given, command);
    else
        fprintf(stderr, "rebatch: there is no option '%.60s'; see 'rebatch help %s'\n",
                optopt > ' ' ? letter : given, command);
}
