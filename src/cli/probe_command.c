/* Owns `rebatch probe`: its options, and what the library in the program has found.
 * Must not know the library's inside: public headers only. */
#include <getopt.h>
#include <stdio.h>

#include "cli/child.h"
#include "cli/command.h"
#include "rebatch/rebatch.h"

static const char help[] =
    "usage: rebatch probe [OPTION]... -- PROGRAM [ARGUMENT]...\n"
    "\n"
    "Finds the largest micro-batch of your own program that fits. PROGRAM runs unchanged up to\n"
    "its first rebatch_step(), or rebatch_probe() if it calls that first. There the probe runs\n"
    "two or three small micro-batches, predicts the memory of every size from them, and runs\n"
    "the largest size that should fit. Then it ends the program: nothing is trained. What the\n"
    "program prints goes to standard error.\n"
    "\n"
    "  --limit SIZE   cap on the memory of the pool, for example 12GiB or 80%\n"
    "  --json         print one JSON object instead of the table\n"
    "  --help, -h     print this text\n"
    "\n"
    "example: rebatch probe --limit 12GiB -- ./train --epochs 3\n"
    "Without this command, set REBATCH_PROBE_ONLY=1, or =json: REBATCH_PROBE_ONLY=1 ./train\n"
    "exit status: 0 a size was found, 1 failure, 2 wrong usage, 3 nothing fits,\n"
    "126 PROGRAM is not executable, 127 PROGRAM does not exist\n";

RBI_COMMAND_HELP(probe, help)

/* ---- options ---- */

struct request {
    const char *limit;
    bool json;
    char **program;
};

/* Whether to go on; else *code is what to exit with. */
static bool read_request(struct request *request, int count, char **arguments, int *code)
{
    enum { LIMIT, JSON, HELP };
    static const struct option known[] = {{"limit", required_argument, NULL, LIMIT},
                                          {"json", no_argument, NULL, JSON},
                                          {"help", no_argument, NULL, HELP},
                                          {NULL, 0, NULL, 0}};
    *request = (struct request){.json = false};
    *code = RBI_EXIT_USAGE;
    for (int found; (found = getopt_long(count + 1, arguments - 1, "+:h", known, NULL)) != -1;) {
        if (found == '?' || found == ':') {
            rbi_command_refuse_option("probe", found, arguments[optind - 2]);
            return false;
        }
        if (found == 'h' || found == HELP) {
            *code = rbi_probe_help(0, NULL);
            return false;
        }
        request->json |= found == JSON;
        if (found == LIMIT)
            request->limit = optarg;
    }
    request->program = rbi_child_find("probe", optind - 1, count, arguments);
    return request->program != NULL;
}

/* The variables by which the library knows. */
static bool ask(const struct request *request)
{
    if (request->limit && !rbi_child_set_option("--limit", "REBATCH_MEMORY_LIMIT", request->limit))
        return false;
    return rbi_child_set("REBATCH_PROBE_ONLY", request->json ? "json" : "1") && rbi_child_check();
}

int rbi_probe_main(int count, char **arguments)
{
    struct request request;
    struct rbi_child_end end;
    int code;
    if (!read_request(&request, count, arguments, &code))
        return code;
    if (!ask(&request))
        return RBI_EXIT_USAGE;
    if (!rbi_child_run(&end, request.program, true, NULL))
        return RBI_EXIT_FAILED;
    if (end.exec_error)
        return rbi_child_refuse(request.program[0], end.exec_error);
    if (end.has_answer)
        return end.answer;
    fprintf(stderr, "rebatch: %.200s %s %s\n", request.program[0],
            rbi_child_describe(end.status).text,
            end.has_stepped   ? "and never finished its probe"
            : end.status == 0 ? "and never called rebatch_step()"
                              : "before its first rebatch_step()");
    return RBI_EXIT_FAILED;
}
