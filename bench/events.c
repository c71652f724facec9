/* How often the pool makes, records, queries and waits for events of a device, for traces of
 * several streams, and whether a warm one calls the device for anything else. Calls are counted,
 * nothing is timed: the figures are the same on every machine.
 *
 * The device is a dry one, on which an event is done `lag` calls of the pool after it was
 * recorded: 0 is an idle GPU, a few tens one that has nothing to do but events, thousands one that
 * the program runs a step ahead of. */
#include <stdio.h>

#include "behind.h"
#include "replay/replay.h"

#define WARM_RUNS 40
#define PAGE_BYTES ((size_t)2 << 20)

static uint64_t others; /* calls of the device that are not for events */

#define COUNTED(name, parameters, ...)                                                             \
    static rebatch_status count_##name parameters                                                  \
    {                                                                                              \
        others++;                                                                                  \
        return behind.dry.name(__VA_ARGS__);                                                       \
    }
COUNTED(memory, (void *self, rebatch_memory_info *out), self, out)
COUNTED(reserve, (void *self, void **out, size_t bytes), self, out, bytes)
COUNTED(create, (void *self, rbi_physical *out, size_t bytes), self, out, bytes)
COUNTED(release, (void *self, rbi_physical physical, size_t bytes), self, physical, bytes)
COUNTED(map, (void *self, void *address, size_t bytes, rbi_physical physical), self, address, bytes,
        physical)
COUNTED(set_access, (void *self, void *address, size_t bytes), self, address, bytes)
COUNTED(unmap, (void *self, void *address, size_t bytes), self, address, bytes)

/* All work that was enqueued before the last record is done. */
static rebatch_status synchronize(void *self)
{
    (void)self;
    others++;
    return REBATCH_OK;
}

static void check(rebatch_status status)
{
    if (status == REBATCH_OK)
        return;
    fprintf(stderr, "bench-events: %s\n", rebatch_last_error());
    exit(1);
}

static rebatch_device *open_device(void)
{
    rebatch_device *device;
    check(behind_open(&device, (size_t)1 << 40, PAGE_BYTES));
    behind.ops.memory = count_memory;
    behind.ops.reserve = count_reserve;
    behind.ops.create = count_create;
    behind.ops.release = count_release;
    behind.ops.map = count_map;
    behind.ops.set_access = count_set_access;
    behind.ops.unmap = count_unmap;
    behind.ops.synchronize = synchronize;
    return device;
}

struct run {
    rebatch_pool *pool;
    rebatch_stream *streams;
    void **blocks;
};

static void play(const struct run *run, const struct trace *trace)
{
    for (size_t i = 0; i < trace->closed_count; i++, behind.now++) {
        const struct replay_op *op = &trace->ops[i];
        void **const block = &run->blocks[op->slot];
        if (op->kind == REPLAY_ALLOC)
            check(rebatch_pool_alloc(block, run->pool, op->bytes, run->streams[op->stream], 0));
        else if (op->kind == REPLAY_FREE)
            check(rebatch_pool_free(run->pool, *block));
        else if (*block)
            check(rebatch_pool_use_on(run->pool, *block, run->streams[op->stream]));
    }
}

/* What is live at most, as a share of what is reserved at most. */
static double utilisation(rebatch_pool *pool)
{
    rebatch_pool_stats stats;
    check(rebatch_pool_get_stats(&stats, pool));
    return 100.0 * (double)stats.live_peak_bytes / (double)stats.reserved_peak_bytes;
}

static double per_1000(uint64_t count, const struct trace *trace)
{
    return 1000.0 * (double)count / (double)trace->allocations;
}

static void measure(const struct trace *trace)
{
    rebatch_device *device = open_device();
    struct run run = {.streams = calloc(trace->streams, sizeof *run.streams),
                      .blocks = calloc(trace->slots, sizeof *run.blocks)};
    if (!run.streams || !run.blocks)
        check(REBATCH_E_HOST_OOM);
    for (uint32_t i = 1; i < trace->streams; i++)
        check(rebatch_stream_create(&run.streams[i], device));
    check(rebatch_pool_create(&run.pool, device, NULL));
    behind.calls = 0;
    play(&run, trace);
    printf("%8zu %10.1f %9.2f %%", (size_t)behind.lag, per_1000(behind.calls, trace),
           utilisation(run.pool));
    for (int i = 0; i < WARM_RUNS; i++)
        play(&run, trace);
    behind.calls = others = 0;
    for (int i = 0; i < WARM_RUNS; i++)
        play(&run, trace);
    printf(" %10.1f %9.2f %% %10.1f\n", per_1000(behind.calls, trace) / WARM_RUNS,
           utilisation(run.pool), per_1000(others, trace) / WARM_RUNS);
    rebatch_pool_destroy(run.pool);
    for (uint32_t i = 1; i < trace->streams; i++)
        rebatch_stream_destroy(device, run.streams[i]);
    rebatch_device_close(device);
    free(run.streams);
    free(run.blocks);
}

int main(int count, char **arguments)
{
    static const uint64_t lags[] = {0, 5, 20, 50, 100, 200, 500, 2000};
    for (int i = 1; i < count; i++) {
        struct trace trace;
        if (!trace_read(&trace, arguments[i], PAGE_BYTES))
            return 1;
        printf("%s: calls for events, 1,000 pairs of allocate and free; live / reserved\n"
               "     lag  first run  live/res.       warm  live/res.     others\n",
               arguments[i]);
        for (size_t n = 0; n < sizeof lags / sizeof *lags; n++) {
            behind.lag = lags[n];
            measure(&trace);
        }
        trace_free(&trace);
    }
    return 0;
}
