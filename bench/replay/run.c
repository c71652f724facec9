/* Owns running a trace against a pool on a dry device, and what is measured by it.
 * Must not know what a trace's file looks like, and how results are shown. */
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#include "../measure.h"
#include "rebatch/cuda.h"
#include "replay.h"

/* A timed sample runs a short trace as often as it takes to make this many pairs, or as many calls
 * of other kinds. */
#define SAMPLE_PAIRS 20000
/* Before that it runs so often: by then a pool knows what it needs, and whether it repeats. Of a
 * trace of more than WARM_OPS operations there are fewer, and THIRD of them at least. The number is
 * not one of seconds, because the figures of warm passes are to be the same on every machine. */
#define WARM_PASSES 16
#define WARM_OPS ((size_t)1 << 24)
#define THIRD 3
/* Samples end after so long: of a trace that takes seconds there are fewer, one at least. */
#define SAMPLES_MOST_S 10
#define REPORT_BYTES 4096
#define SNAPSHOT_EVENTS 100000

/* A pool with a device of its own, and the blocks and streams of the trace that runs on it. */
struct rig {
    rebatch_device *device;
    rebatch_pool *pool;
    rebatch_stream *streams;
    uint32_t stream_count;
    void **blocks; /* by slot */
};

static void close_rig(struct rig *rig)
{
    rebatch_pool_destroy(rig->pool);
    for (uint32_t i = 1; i < rig->stream_count; i++)
        rebatch_stream_destroy(rig->device, rig->streams[i]);
    free(rig->streams);
    free(rig->blocks);
    rebatch_device_close(rig->device);
}

static rebatch_status say_status(const struct trace *trace, rebatch_status status)
{
    if (status)
        fprintf(stderr, "%s: %s\n", trace->path, rebatch_last_error());
    return status;
}

static rebatch_status make_streams(struct rig *rig, uint32_t count)
{
    rebatch_status status = REBATCH_OK;
    for (rig->stream_count = 1; rig->stream_count < count && !status; rig->stream_count++)
        status = rebatch_stream_create(&rig->streams[rig->stream_count], rig->device);
    return status;
}

/* On failure the rig is closed and the reason said. */
static rebatch_status open_rig(struct rig *rig, const struct trace *trace,
                               const struct replay_settings *settings)
{
    *rig = (struct rig){.stream_count = 0};
    rig->streams = calloc(trace->streams, sizeof *rig->streams);
    rig->blocks = calloc(trace->slots, sizeof *rig->blocks);
    if (!rig->streams || !rig->blocks) {
        fprintf(stderr, "%s: no host memory to run the trace\n", trace->path);
        close_rig(rig);
        return REBATCH_E_HOST_OOM;
    }
    rebatch_status status =
        settings->is_cuda
            ? rebatch_device_open_cuda(&rig->device, NULL)
            : rebatch_device_open_dry(&rig->device, settings->capacity_bytes, settings->page_bytes);
    if (!status)
        status = make_streams(rig, trace->streams);
    if (!status)
        status = rebatch_pool_create(&rig->pool, rig->device, &settings->pool);
    if (say_status(trace, status))
        close_rig(rig);
    return status;
}

/* Runs the first `count` operations. On failure *at is the one that failed. */
static rebatch_status run_ops(size_t *at, struct rig *rig, const struct trace *trace, size_t count)
{
    rebatch_status status = REBATCH_OK;
    const struct replay_op *const ops = trace->ops;
    for (size_t i = 0; i < count; i++) {
        void **const block = &rig->blocks[ops[i].slot];
        switch (ops[i].kind) {
        case REPLAY_ALLOC:
            status =
                rebatch_pool_alloc(block, rig->pool, ops[i].bytes, rig->streams[ops[i].stream], 0);
            break;
        case REPLAY_FREE:
            status = rebatch_pool_free(rig->pool, *block);
            break;
        default: /* a block of no bytes has nothing to use */
            if (*block)
                status = rebatch_pool_use_on(rig->pool, *block, rig->streams[ops[i].stream]);
            break;
        }
        if (status != REBATCH_OK) {
            *at = i;
            return status;
        }
    }
    return REBATCH_OK;
}

/* Says where in the trace a run ended, and why. */
static void say_failure(const struct trace *trace, struct rig *rig, size_t at,
                        rebatch_status status)
{
    if (status != REBATCH_OOM) {
        fprintf(stderr, "%s:%" PRIu64 ": %s\n", trace->path, trace->lines[at],
                rebatch_last_error());
        return;
    }
    char text[REPORT_BYTES] = "";
    rebatch_oom_report report;
    if (rebatch_pool_last_oom(&report, rig->pool) == REBATCH_OK)
        (void)rebatch_oom_format(text, sizeof text, &report);
    fprintf(stderr, "%s:%" PRIu64 ": the trace runs out of memory, after %zu of %zu operations\n%s",
            trace->path, trace->lines[at], at, trace->op_count, text);
}

/* ---- the first run ---- */

/* Where memory is mapped, `driver_...` are all calls for it; where not, there are none of these. */
static rebatch_status read_figures(struct replay_result *result, struct rig *rig)
{
    const rebatch_pool_stats *const stats = &result->first;
    const rebatch_status status = rebatch_pool_get_stats(&result->first, rig->pool);
    const uint64_t mapped = stats->driver_creates + stats->driver_maps + stats->driver_accesses +
                            stats->driver_unmaps + stats->driver_releases;
    result->pool_live_bytes = stats->live_peak_bytes;
    result->peak_reserved_bytes = stats->reserved_peak_bytes;
    result->device_calls = mapped ? mapped : stats->device_allocations + stats->device_frees;
    return status;
}

static bool run_once(struct replay_result *result, const struct trace *trace,
                     const struct replay_settings *settings)
{
    struct rig rig;
    if (open_rig(&rig, trace, settings))
        return false;
    size_t at;
    rebatch_status status = run_ops(&at, &rig, trace, trace->op_count);
    if (status)
        say_failure(trace, &rig, at, status);
    else
        status = say_status(trace, read_figures(result, &rig));
    close_rig(&rig);
    return status == REBATCH_OK;
}

/* ---- the largest hole ---- */

/* Whether `bytes` can be had at the peak with what is reserved there. */
static rebatch_status try_hole(const struct trace *trace, const struct replay_settings *settings,
                               uint64_t *waste, uint64_t bytes)
{
    struct rig rig;
    rebatch_status status = open_rig(&rig, trace, settings);
    if (status)
        return status;
    size_t at;
    rebatch_pool_stats stats;
    status = run_ops(&at, &rig, trace, trace->peak_op + 1);
    if (!status)
        status = rebatch_pool_get_stats(&stats, rig.pool);
    if (!status)
        *waste = stats.reserved_bytes - stats.live_bytes;
    if (!status && bytes > 0) {
        void *block;
        const uint16_t stream = trace->ops[trace->peak_op].stream;
        status = rebatch_pool_set_limit(rig.pool, stats.reserved_bytes);
        if (!status)
            status = rebatch_pool_alloc(&block, rig.pool, bytes, rig.streams[stream], 0);
    }
    if (status != REBATCH_OOM)
        (void)say_status(trace, status);
    close_rig(&rig);
    return status;
}

/* Bisects between what is certain, nothing, and all that is reserved and not live. */
static bool find_largest_hole(struct replay_result *result, const struct trace *trace,
                              const struct replay_settings *settings)
{
    uint64_t waste;
    rebatch_status status = try_hole(trace, settings, &waste, 0);
    uint64_t fits = 0;
    uint64_t too_large = status ? 1 : waste / REBATCH_POOL_UNIT_BYTES + 1;
    for (uint64_t units = too_large - 1; fits + 1 < too_large;
         units = fits + (too_large - fits) / 2) {
        status = try_hole(trace, settings, &waste, units * REBATCH_POOL_UNIT_BYTES);
        if (status == REBATCH_OOM)
            too_large = units;
        else if (status)
            return false;
        else
            fits = units;
    }
    result->largest_hole_bytes = fits * REBATCH_POOL_UNIT_BYTES;
    return status == REBATCH_OK || status == REBATCH_OOM;
}

/* ---- the smallest capacity ---- */

/* Twice on one pool, as a training runs its steps: what the first pass leaves behind must not keep
 * the second from running. */
static rebatch_status try_capacity(const struct trace *trace,
                                   const struct replay_settings *settings, uint64_t capacity_bytes)
{
    struct replay_settings small = *settings;
    small.capacity_bytes = capacity_bytes;
    struct rig rig;
    rebatch_status status = open_rig(&rig, trace, &small);
    if (status)
        return status;
    size_t at = 0;
    for (int pass = 0; pass < 2 && !status; pass++) {
        (void)rebatch_pool_mark(rig.pool, 1);
        status = run_ops(&at, &rig, trace, trace->closed_count);
    }
    if (status && status != REBATCH_OOM)
        (void)say_status(trace, status);
    close_rig(&rig);
    return status;
}

/* A number of pages in which the trace runs, near what it reserved with all the room it wanted;
 * *fails is moved up to the largest that failed. 0 when something else than memory failed. */
static uint64_t find_enough(uint64_t *fails, const struct replay_result *result,
                            const struct trace *trace, const struct replay_settings *settings)
{
    const uint64_t page = settings->page_bytes;
    const uint64_t most = settings->capacity_bytes / page; /* known to be enough */
    uint64_t enough = (result->peak_reserved_bytes + settings->pool.headroom_bytes) / page + 1;
    for (uint64_t step = 1;; step *= 2) {
        if (enough >= most)
            return most;
        const rebatch_status status = try_capacity(trace, settings, enough * page);
        if (status != REBATCH_OOM)
            return status ? 0 : enough;
        *fails = enough;
        enough += step;
    }
}

static bool find_smallest(struct replay_result *result, const struct trace *trace,
                          const struct replay_settings *settings)
{
    const uint64_t page = settings->page_bytes;
    /* What is live at once must be there at once. */
    uint64_t fails = trace->peak_live_bytes > 0 ? (trace->peak_live_bytes - 1) / page : 0;
    uint64_t runs = find_enough(&fails, result, trace, settings);
    while (runs > fails + 1) {
        const uint64_t middle = fails + (runs - fails) / 2;
        const rebatch_status status = try_capacity(trace, settings, middle * page);
        if (status && status != REBATCH_OOM)
            return false;
        *(status ? &fails : &runs) = middle;
    }
    result->smallest_capacity_bytes = runs * page;
    return runs > 0;
}

/* ---- time ---- */

/* Runs the trace and the frees at its end, `times` over: nanoseconds a pair. */
static rebatch_status sample(double *ns_per_pair, struct rig *rig, const struct trace *trace,
                             size_t times)
{
    size_t at;
    rebatch_status status = REBATCH_OK;
    const double began = measure_seconds();
    for (size_t i = 0; i < times && !status; i++) {
        (void)rebatch_pool_mark(rig->pool, 1); /* each repetition is a phase */
        status = run_ops(&at, rig, trace, trace->closed_count);
    }
    (void)rebatch_pool_mark(rig->pool, 0);
    *ns_per_pair = 1e9 * (measure_seconds() - began) / ((double)times * (double)trace->allocations);
    return status;
}

/* In the driver's calls since the pool was made; 0 where that cannot be known. */
static uint64_t driver_ns(const struct rig *rig)
{
    rebatch_pool_stats stats;
    return rebatch_pool_get_stats(&stats, rig->pool) == REBATCH_OK ? stats.driver_ns : 0;
}

static rebatch_status warm_up(uint64_t *third_ns, struct rig *rig, const struct trace *trace)
{
    double ns_per_pair;
    rebatch_status status = REBATCH_OK;
    uint64_t before = 0;
    for (size_t i = 1; i <= WARM_PASSES && !status; i++) {
        if (i > THIRD && i * trace->closed_count > WARM_OPS)
            break;
        status = sample(&ns_per_pair, rig, trace, 1);
        const uint64_t after = driver_ns(rig);
        if (i == THIRD)
            *third_ns = after - before;
        before = after;
    }
    return status;
}

/* All samples on one pool, which has run the trace before, as a training runs its steps; *taken is
 * how many. */
static rebatch_status sample_warm(double *samples, unsigned *taken, struct replay_result *result,
                                  const struct trace *trace, const struct replay_settings *settings)
{
    *taken = 0;
    struct rig rig;
    rebatch_status status = open_rig(&rig, trace, settings);
    if (status)
        return status;
    const size_t times = 2 * SAMPLE_PAIRS / trace->closed_count + 1;
    status = warm_up(&result->third_driver_ns, &rig, trace);
    const uint64_t before = driver_ns(&rig);
    if (!status)
        status = sample(&samples[0], &rig, trace, 1);
    result->warm_driver_ns = driver_ns(&rig) - before;
    const double began = measure_seconds();
    while (*taken < settings->repeat && !status && measure_seconds() - began < SAMPLES_MOST_S)
        status = sample(&samples[(*taken)++], &rig, trace, times);
    if (status != REBATCH_OOM)
        (void)say_status(trace, status);
    close_rig(&rig);
    return status;
}

/* Each sample on a pool of its own. */
static rebatch_status sample_fresh(double *samples, unsigned *taken, const struct trace *trace,
                                   const struct replay_settings *settings)
{
    *taken = 0;
    rebatch_status status = REBATCH_OK;
    const double began = measure_seconds();
    while (*taken < settings->repeat && !status && measure_seconds() - began < SAMPLES_MOST_S) {
        struct rig rig;
        status = open_rig(&rig, trace, settings);
        if (status)
            break;
        status = say_status(trace, sample(&samples[(*taken)++], &rig, trace, 1));
        close_rig(&rig);
    }
    return status;
}

static bool measure_time(struct replay_result *result, const struct trace *trace,
                         const struct replay_settings *settings)
{
    double *samples = calloc(settings->repeat, sizeof *samples);
    if (!samples) {
        fprintf(stderr, "%s: no host memory to time it\n", trace->path);
        return false;
    }
    unsigned taken;
    rebatch_status status = sample_warm(samples, &taken, result, trace, settings);
    if (status == REBATCH_OOM) {
        fprintf(stderr,
                "%s: runs once, but not again on the same pool in this capacity: timed on new "
                "pools\n",
                trace->path);
        status = sample_fresh(samples, &taken, trace, settings);
    }
    result->ns_per_pair = measure_median(samples, taken);
    free(samples);
    return status == REBATCH_OK;
}

/* ---- the snapshot ---- */

static rebatch_status save_table(rebatch_pool *pool, rebatch_snapshot_format format,
                                 const char *name, const char *ending)
{
    char path[PATH_MAX];
    (void)snprintf(path, sizeof path, "%s%s", name, ending);
    const rebatch_status status = rebatch_pool_save_snapshot(pool, format, path);
    if (status)
        fprintf(stderr, "%s\n", rebatch_last_error());
    return status;
}

/* Where most is live for the first time, which is what people look for; where memory runs out, if
 * that comes before. */
static bool take_snapshot(const struct trace *trace, const struct replay_settings *settings)
{
    struct replay_settings recorded = *settings;
    recorded.pool.events = SNAPSHOT_EVENTS;
    struct rig rig;
    if (open_rig(&rig, trace, &recorded))
        return false;
    size_t at;
    rebatch_status status = run_ops(&at, &rig, trace, trace->peak_op + 1);
    if (status && status != REBATCH_OOM)
        say_failure(trace, &rig, at, status);
    else
        status = save_table(rig.pool, REBATCH_SNAPSHOT_BLOCKS_CSV, settings->snapshot, ".csv");
    if (!status)
        status =
            save_table(rig.pool, REBATCH_SNAPSHOT_EVENTS_CSV, settings->snapshot, ".events.csv");
    close_rig(&rig);
    return status == REBATCH_OK;
}

bool replay_run(struct replay_result *result, const struct trace *trace,
                const struct replay_settings *settings)
{
    *result = (struct replay_result){.ns_per_pair = 0};
    if (settings->snapshot && !take_snapshot(trace, settings))
        return false;
    return run_once(result, trace, settings) && find_largest_hole(result, trace, settings) &&
           (!settings->smallest || find_smallest(result, trace, settings)) &&
           measure_time(result, trace, settings);
}
