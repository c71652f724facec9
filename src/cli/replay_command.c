/* Owns `rebatch replay`: traces one after the other, and its help.
 * Must not know how a trace is read, run or printed. */
#include <stdio.h>

#include "cli/command.h"
#include "cli/replay.h"

static const char help[] =
    "usage: rebatch replay [OPTION...] TRACE...\n"
    "\n"
    "Runs recorded allocations against a pool on a device without memory, to try pool settings\n"
    "for any GPU on any machine. A trace is plain text or gzip, with lines of these forms:\n"
    "\n"
    "  a ID BYTES STREAM   allocate; stream 0 is the default stream\n"
    "  f ID                free\n"
    "  u ID STREAM         another stream uses the block too\n"
    "  # comment           'peak allocated N reserved M' in a comment are PyTorch's figures\n"
    "\n"
    "A trace may use up to 262144 pages at once, which are 512 GiB unless --page is given.\n"
    "\n"
    "options:\n"
    "  --capacity SIZE   memory of the device; default: as much as the trace needs\n"
    "  --device dry|cuda cuda: use the memory of the first GPU; default dry\n"
    "  --smallest        find the smallest capacity in which the trace runs twice on one pool, to\n"
    "                    one page\n"
    "  --limit SIZE|N%   limit of the pool; a share is one of the capacity\n"
    "  --headroom SIZE   memory that the pool leaves free on the device\n"
    "  --caching on|off  off: every call goes to the device\n"
    "  --replay on|off   off: the pool plans nothing, although the timed passes repeat. This\n"
    "                    shows the cost of calls that do not repeat\n"
    "  --keep-room N%, --rounding N, --fence on|off\n"
    "                    as in group memory of a settings file; see 'rebatch config example'\n"
    "  --page SIZE       page size of the device, a power of two; default 2MiB\n"
    "  --repeat N        number of timed samples for each trace, of which the median is printed;\n"
    "                    default 9\n"
    "  --snapshot FILE   write what the pool holds when live memory first peaks, or where the\n"
    "                    trace runs out of memory before, and the events up to then. FILE.pickle\n"
    "                    is for PyTorch's memory viewer, https://pytorch.org/memory_viz; FILE.csv\n"
    "                    has the blocks, and FILE.events.csv the events. For one trace\n"
    "  --events N        keep the last N events for the snapshot; default 100000\n"
    "  --json            print one JSON object for each trace, on one line, with exact figures\n"
    "  --help, -h        print this text\n"
    "\n"
    "columns:\n"
    "  requested     peak of the bytes requested\n"
    "  peak live     the same, with each block rounded up to 512 B; PyTorch's 'allocated' also\n"
    "                has the ends of blocks that it does not split off\n"
    "  reserved      peak of the bytes that the pool held from the device\n"
    "  utilisation   peak live / reserved\n"
    "  PyTorch       allocated / reserved of PyTorch's allocator, if the trace has them\n"
    "  ns/pair       time of an allocation and its free, on a pool that has run the trace\n"
    "                before; see --replay\n"
    "  device calls  calls to the device for memory in the first run\n"
    "  first ms      time of the driver's calls for memory in the first run, and\n"
    "  warm ms       in a run on a pool that has run the trace before; on a device without\n"
    "                memory by what each kind of call takes on an H100\n"
    "  largest hole  largest block that could still be allocated when live memory first\n"
    "                peaked, without reserving more\n"
    "  smallest      smallest capacity, and its ratio to peak live\n"
    "\n"
    "exit status: 0 every trace ran, 1 a trace could not be read or ran out of memory,\n"
    "2 wrong usage\n";

int rbi_replay_help(int count, char **arguments)
{
    if (count > 0 && !rbi_command_is_help(arguments[0]))
        return rbi_command_refuse("help replay");
    fputs(help, stdout);
    return RBI_EXIT_OK;
}

/* False when the trace could not be read or did not run. The first row brings the table's head. */
static bool replay(const char *path, const struct rbi_replay_settings *settings, bool *has_head)
{
    struct rbi_trace trace;
    struct rbi_replay_result result;
    if (!rbi_trace_read(&trace, path, settings->page_bytes))
        return false;
    const bool ok = rbi_replay_run(&result, &trace, settings);
    if (ok && !*has_head) {
        rbi_replay_print_head(settings);
        *has_head = true;
    }
    if (ok)
        rbi_replay_print_result(&trace, &result, settings);
    rbi_trace_free(&trace);
    return ok;
}

int rbi_replay_main(int count, char **arguments)
{
    struct rbi_replay_settings settings;
    if (!rbi_replay_settings_read(&settings, count, arguments))
        return RBI_EXIT_USAGE;
    if (settings.help)
        return rbi_replay_help(0, NULL);
    int code = RBI_EXIT_OK;
    bool has_head = false;
    for (size_t i = 0; i < settings.path_count; i++)
        if (!replay(settings.paths[i], &settings, &has_head))
            code = RBI_EXIT_FAILED;
    return code;
}
