/* What sleep and wake of a pool cost, in milliseconds for each GiB in use: in the first cycle, in
 * which memory for copies is pinned, and in later ones; of a tag in `drop`, and with a copy, where
 * the host has the memory for one.
 *
 *   sleep [GIB]    on GPU 0 with GIB in use, default 8. Without a GPU, on a dry device: the time of
 *                  the driver's calls at the prices that they have on an H100, and no copies */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "rebatch/rebatch.h"

#define GIB ((size_t)1 << 30)
enum { CYCLES = 20 };

static void check(rebatch_status status)
{
    if (status == REBATCH_OK)
        return;
    fprintf(stderr, "bench-sleep: %s\n", rebatch_last_error());
    exit(1);
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static double driver_seconds(rebatch_pool *pool)
{
    rebatch_pool_stats stats;
    check(rebatch_pool_get_stats(&stats, pool));
    return 1e-9 * (double)stats.driver_ns;
}

/* Weights and moments of many sizes, as a model has them. */
static void fill(rebatch_pool *pool, size_t bytes, rebatch_tag tag)
{
    for (size_t size = 96 << 10; bytes >= size;) {
        void *block;
        check(rebatch_pool_alloc(&block, pool, size, NULL, tag));
        bytes -= size;
        size = size >= 144 << 20 || size * 3 / 2 > bytes ? 96 << 10 : size * 3 / 2;
    }
}

static void run(rebatch_device *device, size_t gib, bool drops, bool is_gpu)
{
    rebatch_pool *pool;
    rebatch_tag tag;
    double first = 0, later = 0;
    check(rebatch_pool_create(&pool, device, NULL));
    check(rebatch_pool_tag(&tag, pool, "training"));
    fill(pool, gib * GIB, tag);
    rebatch_sleep_options options = REBATCH_SLEEP_OPTIONS_INIT;
    options.drop = &tag;
    options.drop_count = drops;
    rebatch_sleep_report report;
    for (int cycle = 0; cycle < CYCLES; cycle++) {
        const double began = is_gpu ? seconds() : driver_seconds(pool);
        const rebatch_status status = rebatch_pool_sleep(pool, &options, &report);
        if (status == REBATCH_E_HOST_OOM) {
            printf("with copy: %s\n", rebatch_last_error());
            rebatch_pool_destroy(pool);
            return;
        }
        check(status);
        check(rebatch_pool_wake(pool));
        const double ended = is_gpu ? seconds() : driver_seconds(pool);
        *(cycle ? &later : &first) += 1000 * (ended - began) / (double)gib;
    }
    rebatch_pool_stats stats;
    check(rebatch_pool_get_stats(&stats, pool));
    printf("%-12s %12.2f %12.2f %15.1f %% %18.3f\n", drops ? "without copy" : "with copy", first,
           later / (CYCLES - 1),
           100 * (double)report.released_bytes /
               (double)(report.released_bytes + report.held_bytes),
           (double)stats.reserved_bytes / (double)stats.live_bytes);
    rebatch_pool_destroy(pool);
}

int main(int argc, char **argv)
{
    const size_t gib = argc > 1 ? strtoul(argv[1], NULL, 10) : 8;
    rebatch_device *device;
    const bool is_gpu = rebatch_device_open_cuda(&device, NULL) == REBATCH_OK;
    if (!is_gpu)
        check(rebatch_device_open_dry(&device, 2 * gib * GIB, 0));
    printf("%zu GiB in use on %s\n%-12s %12s %12s %17s %18s\n", gib,
           is_gpu ? rebatch_device_name(device) : "a dry device, at the prices of an H100",
           "ms a GiB", "first cycle", "later ones", "freed by sleep", "reserved / in use");
    if (is_gpu)
        run(device, gib, false, is_gpu);
    run(device, gib, true, is_gpu);
    rebatch_device_close(device);
    return 0;
}
