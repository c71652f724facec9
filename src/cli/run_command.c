/* Owns `rebatch run`: its options, and what came of the run.
 * Must not know the library's inside: public headers only. */
#include <getopt.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/child.h"
#include "cli/command.h"
#include "rebatch/rebatch.h"

static const char help[] =
    "usage: rebatch run [OPTION]... -- PROGRAM [ARGUMENT]...\n"
    "\n"
    "Runs your own program, unchanged, under a memory cap and with failures on purpose, to test\n"
    "its recovery without a full GPU.\n"
    "\n"
    "A program that uses rebatch: a request is an allocation from the session's pool, or a\n"
    "rebatch_reserve(), that a callback makes in a step. Allocations from reserved memory are\n"
    "not requests. A request that fails returns REBATCH_OOM, as if there were no memory.\n"
    "\n"
    "Any other CUDA program: a request is an allocation of device memory. One that fails returns\n"
    "CUDA_ERROR_OUT_OF_MEMORY. The program loads librebatch_wrap.so (LD_PRELOAD).\n"
    "\n"
    "  --limit SIZE          cap on the memory of the pool, or of each device, for example 12GiB\n"
    "                        or 80%\n"
    "  --oom N               the N-th request fails\n"
    "  --oom-chance P        each request fails with this probability, for example 0.01 or 1%\n"
    "  --seed N              seed of --oom-chance: the same seed fails the same requests\n"
    "                        (default 1)\n"
    "  --shrink P%@step:N    from step N on, the limit is this share of the first limit. May be\n"
    "                        repeated: --shrink 50%@step:20 --shrink 100%@step:40. Only for\n"
    "                        programs that call rebatch_step()\n"
    "  --record FILE         write the program's CUDA allocations into a trace, for example\n"
    "                        x.trace, whose form is in docs/preload.md\n"
    "  --check               check the program's step for mistakes instead of training, print\n"
    "                        what was found, and end the program (docs/check.md)\n"
    "  --help, -h            print this text\n"
    "\n"
    "At the end, a line on standard error says how many failures there were, how many the\n"
    "program survived, and what ran again.\n"
    "example: rebatch run --oom-chance 0.02 --shrink 50%@step:20 -- ./train\n"
    "         rebatch run --limit 12GiB --record x.trace -- python3 train.py\n"
    "Without this command, set the variables of docs/run.md.\n"
    "exit status: that of PROGRAM; a signal that ends PROGRAM also ends this command;\n"
    "1 PROGRAM never called rebatch_step() and allocated no CUDA memory, or --oom or\n"
    "--oom-chance failed no request, 2 wrong usage, 126 PROGRAM is not executable,\n"
    "127 PROGRAM does not exist. With --check: 0 no mistakes, 3 nothing fits, 4 mistakes\n";

RBI_COMMAND_HELP(run, help)

/* ---- options ---- */

static const struct {
    const char *option, *variable;
} simple[] = {{"--limit", "REBATCH_MEMORY_LIMIT"},
              {"--oom", "REBATCH_RUN_OOM"},
              {"--oom-chance", "REBATCH_RUN_OOM_CHANCE"},
              {"--seed", "REBATCH_RUN_SEED"}};
enum { OOM = 1, OOM_CHANCE, SEED, SHRINK, RECORD, CHECK, HELP };

/* Adds a share to those that were given before. */
static bool add_shrink(const char *share)
{
    char text[1024];
    const char *before = getenv("REBATCH_RUN_SHRINK");
    const int length =
        snprintf(text, sizeof text, "%s%s%s", before ? before : "", before ? "," : "", share);
    if (length >= 0 && (size_t)length < sizeof text)
        return rbi_child_set_option("--shrink", "REBATCH_RUN_SHRINK", text);
    fprintf(stderr, "rebatch: --shrink is given too often: expected at most 32 shares\n");
    return false;
}

/* Whether the folder of a file is there. */
static bool has_folder(const char *path)
{
    struct stat there;
    char *const folder = strdup(path);
    bool is_there = folder != NULL;
    if (is_there) {
        *(strrchr(folder, '/') + 1) = '\0'; /* a whole path has one */
        is_there = stat(folder, &there) == 0 && S_ISDIR(there.st_mode);
    }
    free(folder);
    return is_there;
}

/* The trace's path is whole, since the program may change its folder. One of an earlier run goes:
 * each process of the program makes a file of its own. */
static bool set_record(const char *file)
{
    struct stat there;
    char *folder = file[0] == '/' ? strdup("") : getcwd(NULL, 0);
    char *path = NULL;
    bool is_set = folder && asprintf(&path, "%s%s%s", folder, file[0] == '/' ? "" : "/", file) >= 0;
    if (file[0] == '\0' || !is_set || !has_folder(path) ||
        (lstat(path, &there) == 0 && !S_ISREG(there.st_mode))) {
        fprintf(
            stderr,
            "rebatch: --record is '%.200s': expected the path of a file in a folder that exists\n",
            file);
        is_set = false;
    } else {
        (void)unlink(path);
        is_set = rbi_child_set("REBATCH_RUN_RECORD", path);
    }
    free(folder);
    free(path);
    return is_set;
}

static bool set_option(int option, const char *value)
{
    switch (option) {
    case SHRINK:
        return add_shrink(value);
    case RECORD:
        return set_record(value);
    case CHECK:
        return rbi_child_set("REBATCH_CHECK", "1");
    default:
        return rbi_child_set_option(simple[option].option, simple[option].variable, value);
    }
}

/* What would do nothing. `given` has a bit for each option. */
static bool serves(unsigned given)
{
    const bool has_check = given & 1u << CHECK;
    const bool has_seed = given & 1u << SEED;
    const char *beside = NULL;
    if (given & 1u << SHRINK)
        beside = "--shrink";
    if (given & 1u << OOM_CHANCE)
        beside = simple[OOM_CHANCE].option;
    if (given & 1u << OOM)
        beside = simple[OOM].option;
    if (has_check && beside)
        fprintf(stderr,
                "rebatch: %s does nothing with --check, which makes each allocation fail once: "
                "expected one of the two\n",
                beside);
    else if (has_seed && !getenv(simple[OOM_CHANCE].variable))
        fprintf(stderr, "rebatch: --seed does nothing without --oom-chance: expected both\n");
    else
        return true;
    return false;
}

/* Whether to go on; else *code is what to exit with. */
static bool read_request(char ***program, int count, char **arguments, int *code)
{
    static const struct option known[] = {{"limit", required_argument, NULL, 0},
                                          {"oom", required_argument, NULL, OOM},
                                          {"oom-chance", required_argument, NULL, OOM_CHANCE},
                                          {"seed", required_argument, NULL, SEED},
                                          {"shrink", required_argument, NULL, SHRINK},
                                          {"record", required_argument, NULL, RECORD},
                                          {"check", no_argument, NULL, CHECK},
                                          {"help", no_argument, NULL, HELP},
                                          {NULL, 0, NULL, 0}};
    unsigned given = 0;
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
        if (!set_option(found, optarg))
            return false;
        given |= 1u << found;
    }
    *program = rbi_child_find("run", optind - 1, count, arguments);
    return *program && rbi_child_check() && serves(given);
}

/* ---- what came of it ---- */

/* The last that each session said of itself. */
#define SESSIONS 64

struct summaries {
    struct {
        char key[64], text[4800];
    } last[SESSIONS];
    size_t count;
    bool has_begun; /* a step */
};

/* "KEY SENTENCE" */
static void on_message(void *user, const char *kind, const char *text)
{
    struct summaries *summaries = user;
    const size_t length = strcspn(text, " ");
    summaries->has_begun |= strcmp(kind, "begun") == 0;
    if (strcmp(kind, "run") != 0 || text[length] == '\0' || length >= sizeof summaries->last[0].key)
        return;
    size_t at = 0;
    while (at < summaries->count && (strncmp(summaries->last[at].key, text, length) != 0 ||
                                     summaries->last[at].key[length] != '\0'))
        at++;
    if (at == SESSIONS)
        return;
    summaries->count += at == summaries->count;
    (void)snprintf(summaries->last[at].key, sizeof summaries->last[at].key, "%.*s", (int)length,
                   text);
    (void)snprintf(summaries->last[at].text, sizeof summaries->last[at].text, "%s",
                   text + length + 1);
}

static void print(const struct summaries *summaries)
{
    for (size_t i = 0; i < summaries->count; i++)
        if (summaries->last[i].text[0])
            fprintf(stderr, "rebatch run: %s\n", summaries->last[i].text);
}

/* A program of which nothing was heard. */
static void explain_silence(const char *program, int status, bool has_library)
{
    fprintf(stderr, "rebatch: %.200s %s %s%s\n", program, rbi_child_describe(status).text,
            status == 0 ? "and never called rebatch_step()" : "before its first rebatch_step()",
            !has_library  ? ""
            : status == 0 ? ", nor did it allocate CUDA memory"
                          : " or allocation of CUDA memory");
    if (!has_library)
        fprintf(stderr, "rebatch: there is no librebatch_wrap.so beside this command or in "
                        "../lib: only programs that use rebatch were looked at\n");
}

/* A program that has begun a step and was not heard of again. */
static void explain_end(const char *program, int status, const struct summaries *summaries)
{
    const char *const check = getenv("REBATCH_CHECK");
    if (summaries->has_begun && summaries->count == 0 && status != 0)
        fprintf(stderr, "rebatch: %.200s %s within its first %s\n", program,
                rbi_child_describe(status).text,
                check && check[0] == '1' ? "step, which was being checked" : "step");
}

/* 0 is the same as an unset variable. */
static bool is_asked(const char *variable)
{
    const char *const value = getenv(variable);
    return value && strtod(value, NULL) > 0;
}

/* Whether requests were to fail, and none did. Each sentence begins with how many failed. */
static bool has_failed_nothing(const struct summaries *summaries)
{
    uint64_t failed = 0;
    for (size_t i = 0; i < summaries->count; i++)
        failed += strtoull(summaries->last[i].text, NULL, 10);
    return failed == 0 && (is_asked("REBATCH_RUN_OOM") || is_asked("REBATCH_RUN_OOM_CHANCE"));
}

/* A trace is made with the first allocation. */
static void explain_record(void)
{
    const char *const path = getenv("REBATCH_RUN_RECORD");
    struct stat there;
    if (path && stat(path, &there) != 0)
        fprintf(stderr,
                "rebatch: --record wrote no trace to %.1000s: the program called none of "
                "CUDA's functions for memory; those of rebatch are not recorded\n",
                path);
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
    const bool has_library = rbi_child_preload();
    if (!has_library && getenv("REBATCH_RUN_RECORD")) {
        fprintf(stderr, "rebatch: --record needs librebatch_wrap.so, which is not beside this "
                        "command, nor in ../lib\n");
        return RBI_EXIT_FAILED;
    }
    const struct rbi_child_listener listener = {on_message, &summaries};
    if (!rbi_child_run(&end, program, false, &listener))
        return RBI_EXIT_FAILED;
    if (end.exec_error)
        return rbi_child_refuse(program[0], end.exec_error);
    if (end.has_answer)
        return end.answer;
    print(&summaries);
    explain_end(program[0], end.status, &summaries);
    explain_record();
    if (!end.has_stepped) {
        explain_silence(program[0], end.status, has_library);
        if (end.status == 0)
            return RBI_EXIT_FAILED;
    }
    if (end.status == 0 && has_failed_nothing(&summaries)) {
        fprintf(stderr,
                "rebatch: %.200s ended before a request failed, so nothing was tested: expected a "
                "smaller --oom, a larger --oom-chance, or a program that allocates from rebatch's "
                "pool or by CUDA, as PyTorch on a CPU does not\n",
                program[0]);
        return RBI_EXIT_FAILED;
    }
    return end_as(end.status);
}
