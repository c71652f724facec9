/* Owns `rebatch run`: its options, and what came of the failures that it has injected.
 * Must not know the library's inside: public headers only. */
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/child.h"
#include "cli/command.h"
#include "rebatch/rebatch.h"

static const char help[] =
    "usage: rebatch run [OPTION]... -- PROGRAM [ARGUMENT]...\n"
    "\n"
    "Runs your own program, unchanged, under a memory cap and with failures on purpose, to test\n"
    "its recovery without a full GPU. A request is an allocation from the session's pool, or a\n"
    "rebatch_reserve(), that a callback makes in a step. Allocations from reserved memory are\n"
    "not requests. A request that fails returns REBATCH_OOM, as if there were no memory.\n"
    "\n"
    "  --limit SIZE          cap on the memory of the pool, for example 12GiB or 80%\n"
    "  --oom N               the N-th request fails\n"
    "  --oom-chance P        each request fails with this probability, for example 0.01 or 1%\n"
    "  --seed N              seed of --oom-chance: the same seed fails the same requests\n"
    "                        (default 1)\n"
    "  --shrink P%@step:N    from step N on, the limit is this share of the first limit. May be\n"
    "                        repeated: --shrink 50%@step:20 --shrink 100%@step:40\n"
    "  --help, -h            print this text\n"
    "\n"
    "At the end, a line on standard error says how many failures there were, how many the\n"
    "program survived, and what ran again.\n"
    "example: rebatch run --oom-chance 0.02 --shrink 50%@step:20 -- ./train\n"
    "Without this command, set the variables of docs/run.md.\n"
    "exit status: that of PROGRAM; a signal that ends PROGRAM also ends this command;\n"
    "1 PROGRAM never called rebatch_step(), 2 wrong usage, 126 PROGRAM is not executable,\n"
    "127 PROGRAM does not exist\n";

int rbi_run_help(int count, char **arguments)
{
    if (count > 0 && !rbi_command_is_help(arguments[0]))
        return rbi_command_refuse("help run");
    fputs(help, stdout);
    return RBI_EXIT_OK;
}

/* ---- options ---- */

/* Adds a share to those that were given before. */
static bool add_shrink(const char *share)
{
    char text[1024];
    const char *before = getenv("REBATCH_RUN_SHRINK");
    const int length =
        snprintf(text, sizeof text, "%s%s%s", before ? before : "", before ? "," : "", share);
    if (length >= 0 && (size_t)length < sizeof text)
        return rbi_child_set("REBATCH_RUN_SHRINK", text);
    fprintf(stderr, "rebatch: --shrink is given too often: expected at most 32 shares\n");
    return false;
}

/* Whether to go on; else *code is what to exit with. */
static bool read_request(char ***program, int count, char **arguments, int *code)
{
    static const char *const variables[] = {"REBATCH_MEMORY_LIMIT", "REBATCH_RUN_OOM",
                                            "REBATCH_RUN_OOM_CHANCE", "REBATCH_RUN_SEED"};
    enum { SHRINK = 4, HELP };
    static const struct option known[] = {{"limit", required_argument, NULL, 0},
                                          {"oom", required_argument, NULL, 1},
                                          {"oom-chance", required_argument, NULL, 2},
                                          {"seed", required_argument, NULL, 3},
                                          {"shrink", required_argument, NULL, SHRINK},
                                          {"help", no_argument, NULL, HELP},
                                          {NULL, 0, NULL, 0}};
    *code = RBI_EXIT_USAGE;
    for (int found; (found = getopt_long(count + 1, arguments - 1, "+:h", known, NULL)) != -1;) {
        if (found == '?' || found == ':') {
            rbi_command_refuse_option("run", found, arguments[optind - 2]);
            return false;
        }
        if (found == 'h' || found == HELP) {
            *code = rbi_run_help(0, NULL);
            return false;
        }
        if (found == SHRINK ? !add_shrink(optarg) : !rbi_child_set(variables[found], optarg))
            return false;
    }
    *program = rbi_child_find("run", optind - 1, count, arguments);
    if (*program && rebatch_config_check_run() != REBATCH_OK) {
        fprintf(stderr, "rebatch: %s\n", rebatch_last_error());
        return false;
    }
    return *program != NULL;
}

/* ---- what came of it ---- */

/* The last that each session said of itself. */
#define SESSIONS 64

struct summaries {
    struct {
        char key[64], text[320];
    } last[SESSIONS];
    size_t count;
};

/* "KEY SENTENCE" */
static bool on_message(void *user, const char *kind, const char *text)
{
    struct summaries *summaries = user;
    const size_t length = strcspn(text, " ");
    if (strcmp(kind, "run") != 0 || text[length] == '\0' || length >= sizeof summaries->last[0].key)
        return false;
    size_t at = 0;
    while (at < summaries->count && (strncmp(summaries->last[at].key, text, length) != 0 ||
                                     summaries->last[at].key[length] != '\0'))
        at++;
    if (at == SESSIONS)
        return false;
    summaries->count += at == summaries->count;
    (void)snprintf(summaries->last[at].key, sizeof summaries->last[at].key, "%.*s", (int)length,
                   text);
    (void)snprintf(summaries->last[at].text, sizeof summaries->last[at].text, "%.300s",
                   text + length + 1);
    return false;
}

/* Ends as the program did; its core file is enough. */
static int end_as(int status)
{
    if (!WIFSIGNALED(status))
        return WEXITSTATUS(status);
    const struct rlimit none = {0, 0};
    (void)fflush(stdout);
    (void)setrlimit(RLIMIT_CORE, &none);
    (void)signal(WTERMSIG(status), SIG_DFL);
    (void)raise(WTERMSIG(status));
    return 128 + WTERMSIG(status);
}

int rbi_run_main(int count, char **arguments)
{
    static struct summaries summaries;
    struct rbi_child_end end;
    char **program;
    int code;
    if (!read_request(&program, count, arguments, &code))
        return code;
    const struct rbi_child_listener listener = {on_message, &summaries};
    if (!rbi_child_run(&end, program, false, &listener))
        return RBI_EXIT_FAILED;
    if (end.exec_error)
        return rbi_child_refuse(program[0], end.exec_error);
    for (size_t i = 0; i < summaries.count; i++)
        fprintf(stderr, "rebatch run: %s\n", summaries.last[i].text);
    if (!end.has_stepped) {
        fprintf(stderr, "rebatch: %.200s %s %s\n", program[0], rbi_child_describe(end.status).text,
                end.status == 0 ? "and never called rebatch_step()"
                                : "before its first rebatch_step()");
        if (end.status == 0)
            return RBI_EXIT_FAILED;
    }
    return end_as(end.status);
}
