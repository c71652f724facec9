/* Owns `rebatch replay`: traces one after the other, and its help.
 * Must not know how a trace is read, run or printed. */
#include <stdio.h>

#include "cli/command.h"
#include "cli/replay.h"

static const char help[] =
    "usage: rebatch replay [OPTION...] TRACE...\n"
    "\n"
    "Runs recorded allocations against a pool on a device without memory, so that any pool "
    "setting\n"
    "can be tried for any card on any machine. A trace is gzip or plain text, a line each:\n"
    "\n"
    "  a ID BYTES STREAM   allocate; stream 0 is the default one\n"
    "  f ID                free\n"
    "  u ID STREAM         another stream uses the block too\n"
    "  # comment           'peak allocated N reserved M' in it are PyTorch's own figures\n"
    "\n"
    "It may have 262144 granules in use at once, 512 GiB unless --page says otherwise.\n"
    "\n"
    "options:\n"
    "  --capacity SIZE   the device's memory; without it there is as much as the trace takes\n"
    "  --device dry|cuda cuda: on the first GPU's memory; dry unless given\n"
    "  --smallest        look for the smallest capacity in which the trace runs, to one granule\n"
    "  --limit SIZE|N%   the pool's limit; a share is one of the capacity\n"
    "  --headroom SIZE   what the pool leaves free on the device\n"
    "  --caching on|off  off: every call goes to the device\n"
    "  --replay on|off   off: no plan is made for the passes that are timed, which repeat: this\n"
    "                    shows what calls cost that do not\n"
    "  --ballast SIZE, --max-split SIZE, --gc-threshold N%, --keep-room N%,\n"
    "  --rounding N, --guard on|off\n"
    "                    as in group memory of a settings file; see 'rebatch config example'\n"
    "  --page SIZE    of the device's memory, a power of two; 2MiB unless given\n"
    "  --repeat N        timed samples a trace, of which the median is shown; 9 unless given\n"
    "  --snapshot FILE   what the pool holds when live memory first peaks, or where it runs out\n"
    "                    before that, and the events up to then. FILE.pickle is for PyTorch's\n"
    "                    memory viewer, https://pytorch.org/memory_viz; FILE.csv has the blocks,\n"
    "                    and then FILE.events.csv the events. For one trace\n"
    "  --events N        the most events in it, the last ones; 100000 unless given\n"
    "  --json            one object a trace, each on a line of its own, with exact figures\n"
    "\n"
    "columns:\n"
    "  requested     most bytes asked for at once\n"
    "  peak live     the same, each block rounded up to 512 B; PyTorch's 'allocated' is this,\n"
    "                and what it leaves on the end of a block because it is not worth a cut\n"
    "  reserved      most bytes that the pool held from the device\n"
    "  utilisation   peak live / reserved\n"
    "  PyTorch       the same of PyTorch's allocator: allocated / reserved, where the trace says "
    "it\n"
    "  ns/pair       an allocation and its free, on a pool that has run the trace before; see\n"
    "                --replay\n"
    "  device calls  for memory, in the first run\n"
    "  largest hole  what could still be allocated in one piece when live memory first peaked,\n"
    "                without reserving more\n"
    "  smallest      capacity, and its ratio to peak live\n"
    "\n"
    "exit status: 0 every trace ran, 1 one could not be read or ran out of memory, 2 wrong usage\n";

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
    if (!rbi_trace_read(&trace, path, settings->granule_bytes))
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
