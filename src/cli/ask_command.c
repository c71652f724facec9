/* Owns `rebatch ask` and `rebatch top`: a request to a training, and the list of this user's.
 * Must not know the library's inside: public headers only. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/command.h"
#include "rebatch/sharing.h"

static const char ask_help[] =
    "usage: rebatch ask SOCKET REQUEST\n"
    "\n"
    "Asks a training with a socket (REBATCH_YIELD, rebatch.yield_to) for memory, and prints its\n"
    "answer. SOCKET is a path, or the PID that `rebatch top` shows. REQUEST is one of these:\n"
    "\n"
    "  status           one object of JSON: what it holds, what a step needs at least, its speed\n"
    "  give 4GiB        give so much of what it holds: its micro-batches become smaller\n"
    "  give to 12GiB    the same, until it holds so much\n"
    "  sleep            copy everything to host memory, free the GPU's, and wait for wake\n"
    "  wake             end the sleep, and the bound of give: micro-batches grow back\n"
    "\n"
    "A training gives no more than leaves what a step needs. What is cached comes at once, the "
    "rest\n"
    "before its next micro-batch.\n"
    "exit status: 0 all that was asked is done, 1 a part of it, or nothing, or nobody answers,\n"
    "2 wrong usage\n";

static const char top_help[] =
    "usage: rebatch top [--json]\n"
    "\n"
    "Lists this user's trainings with a socket in $XDG_RUNTIME_DIR/rebatch, or in\n"
    "/tmp/rebatch-UID where that variable is not set (REBATCH_YIELD=1): what each holds of its\n"
    "GPU, needs at least for a step, and may hold at most since a give, its micro-batch and "
    "speed.\n"
    "\n"
    "  --json           an array of what they answer to `rebatch ask PID status`\n"
    "exit status: 0 the list is printed, 2 wrong usage\n";

RBI_COMMAND_HELP(ask, ask_help)
RBI_COMMAND_HELP(top, top_help)

/* The words of a request as one line. */
static bool join(char *line, size_t size, int count, char **words)
{
    size_t length = 0;
    line[0] = '\0';
    for (int i = 0; i < count && length < size; i++)
        length += (size_t)snprintf(line + length, size - length, "%s%s", i ? " " : "", words[i]);
    return length < size;
}

int rbi_ask_main(int count, char **arguments)
{
    char request[128], answer[1024];
    if (count > 0 && rbi_command_is_help(arguments[0]))
        return rbi_ask_help(0, NULL);
    if (count < 2 || !join(request, sizeof request, count - 1, arguments + 1))
        return rbi_command_refuse("ask SOCKET status|give SIZE|give to SIZE|sleep|wake");
    if (rebatch_ask(answer, sizeof answer, arguments[0], request)) {
        fprintf(stderr, "rebatch: %s\n", rebatch_last_error());
        return RBI_EXIT_FAILED;
    }
    puts(answer);
    return answer[0] == '{' || strncmp(answer, "ok: ", 4) == 0 ? RBI_EXIT_OK : RBI_EXIT_FAILED;
}

int rbi_top_main(int count, char **arguments)
{
    const bool as_json = count == 1 && strcmp(arguments[0], "--json") == 0;
    if (count == 1 && rbi_command_is_help(arguments[0]))
        return rbi_top_help(0, NULL);
    if (count > 0 && !as_json)
        return rbi_command_refuse("top [--json]");
    static char text[1 << 18];
    (void)rebatch_top_format(text, sizeof text, as_json);
    fputs(text, stdout);
    return RBI_EXIT_OK;
}
