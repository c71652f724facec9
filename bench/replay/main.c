/* Owns the replay of traces: one after the other, and the help.
 * Must not know how a trace is read, run or printed. */
#include <stdio.h>

#include "output.h"
#include "replay.h"

static const char help[] =
    "usage: replay [OPTION...] TRACE...\n"
    "\n"
    "Runs recorded allocations (rebatch run --record) against a pool on a device without memory,\n"
    "to try pool settings for any GPU on any machine. docs/preload.md has the form of a trace,\n"
    "which may be gzip. A trace may use up to 262144 pages at once, 512 GiB unless --page is "
    "given.\n"
    "\n"
    "  --capacity SIZE   memory of the device; default: as much as the trace needs\n"
    "  --device dry|cuda cuda: the memory of the first GPU; default dry\n"
    "  --page SIZE       page size of the device, a power of two; default 2MiB\n"
    "  --limit SIZE|N%, --headroom SIZE, --caching on|off, --replay on|off, --keep-room N%,\n"
    "  --rounding N      of the pool, as in group memory of a settings file\n"
    "  --smallest        find the smallest capacity in which the trace runs twice on one pool\n"
    "  --repeat N        timed samples a trace, of which the median is printed; default 9\n"
    "  --snapshot NAME   write the blocks at the first peak, or where memory runs out before it,\n"
    "                    to NAME.csv, and the last events to NAME.events.csv\n"
    "  --json            one JSON object for each trace, on one line, with exact figures\n"
    "\n"
    "columns:\n"
    "  requested     peak of the bytes requested\n"
    "  peak live     the same, each block rounded up to 512 B\n"
    "  reserved      peak of the bytes that the pool held from the device\n"
    "  utilisation   peak live / reserved\n"
    "  PyTorch       allocated / reserved of PyTorch's allocator, if the trace has them\n"
    "  ns/pair       time of an allocation and its free, on a pool that has run the trace before\n"
    "  device calls  calls to the device for memory in the first run\n"
    "  first ms      time of these calls in the first run, and\n"
    "  warm ms       in a run on a pool that has run the trace before; on a device without memory\n"
    "                by what each kind of call takes on an H100\n"
    "  largest hole  largest block that can be allocated when live memory first peaks, without\n"
    "                reserving more\n"
    "  smallest      smallest capacity, and its ratio to peak live\n"
    "\n"
    "exit status: 0 every trace ran, 1 a trace could not be read or ran out of memory, 2 wrong\n"
    "usage\n";

/* False when the trace could not be read or did not run. The first row brings the table's head. */
static bool replay(const char *path, const struct replay_settings *settings, bool *has_head)
{
    struct trace trace;
    struct replay_result result;
    if (!trace_read(&trace, path, settings->page_bytes))
        return false;
    const bool ok = replay_run(&result, &trace, settings);
    if (ok && !*has_head) {
        replay_print_head(settings);
        *has_head = true;
    }
    if (ok)
        replay_print_result(&trace, &result, settings);
    trace_free(&trace);
    return ok;
}

int main(int count, char **arguments)
{
    struct replay_settings settings;
    output_begin();
    if (!replay_settings_read(&settings, count, arguments))
        return 2;
    if (settings.help) {
        fputs(help, stdout);
        return output_end("replay", 0);
    }
    int code = 0;
    bool has_head = false;
    for (size_t i = 0; i < settings.path_count; i++)
        if (!replay(settings.paths[i], &settings, &has_head))
            code = 1;
    return output_end("replay", code);
}
