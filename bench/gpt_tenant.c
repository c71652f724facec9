/* Another user of the GPU, in a process of its own: does as it is told, line by line.
 *     leave MIB      holds so much that MIB are free
 *     take PERMILLE  holds that share of what is free, besides
 *     drop           gives all back
 * Each is answered with the MiB it holds. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rebatch/rebatch.h"

#define MIB ((size_t)1 << 20)
/* Memory of a GPU comes in pieces of this. */
#define PIECE (2 * MIB)

static rebatch_status make_pool(rebatch_pool **out, rebatch_device *device)
{
    rebatch_pool_options uncached = REBATCH_POOL_OPTIONS_INIT;
    uncached.caching = REBATCH_OFF;
    return rebatch_pool_create(out, device, &uncached);
}

/* In as large pieces as the driver gives. */
static rebatch_status hold(rebatch_pool *pool, size_t bytes)
{
    size_t piece = bytes;
    while (bytes >= PIECE) {
        void *unused;
        piece = (piece < bytes ? piece : bytes) / PIECE * PIECE;
        if (piece == 0)
            return REBATCH_OOM;
        const rebatch_status status = rebatch_pool_alloc(&unused, pool, piece, NULL, 0);
        if (status == REBATCH_OOM)
            piece /= 2;
        else if (status)
            return status;
        else
            bytes -= piece;
    }
    return REBATCH_OK;
}

static rebatch_status obey(rebatch_pool **pool, rebatch_device *device, const char *line)
{
    rebatch_memory_info memory;
    size_t amount = 0;
    rebatch_status status = rebatch_device_memory(device, &memory);
    if (status)
        return status;
    if (sscanf(line, "leave %zu", &amount) == 1) {
        const size_t left = amount * MIB;
        return hold(*pool, memory.free_bytes > left ? memory.free_bytes - left : 0);
    }
    if (sscanf(line, "take %zu", &amount) == 1 && amount <= 1000)
        return hold(*pool, memory.free_bytes / 1000 * amount);
    if (strcmp(line, "drop\n") != 0) {
        fprintf(stderr, "tenant: %sexpected leave MIB, take PERMILLE or drop\n", line);
        return REBATCH_E_INVALID;
    }
    rebatch_pool_destroy(*pool);
    return make_pool(pool, device);
}

int main(void)
{
    rebatch_device *device;
    rebatch_pool *pool = NULL;
    rebatch_pool_stats stats;
    char line[64];
    rebatch_status status = rebatch_device_open_cuda(&device, NULL);
    if (!status)
        status = make_pool(&pool, device);
    while (!status && fgets(line, sizeof line, stdin)) {
        status = obey(&pool, device, line);
        if (!status)
            status = rebatch_pool_get_stats(&stats, pool);
        if (!status) {
            printf("%.0f\n", (double)stats.reserved_bytes / (double)MIB);
            fflush(stdout);
        }
    }
    if (status)
        fprintf(stderr, "tenant: %s: %s\n", rebatch_status_name(status), rebatch_last_error());
    rebatch_pool_destroy(pool);
    rebatch_device_close(device);
    return status ? 1 : 0;
}
