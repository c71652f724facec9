/* A pool on a real GPU, looked into: snapshots add up, what is left is named, everything goes back.
 * Seed: 1. Contexts are made inside the tests, each of which is a process of its own. */
#include <criterion/criterion.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "invariants/invariants.h"
#include "pool/pool.h"
#include "rebatch/rebatch.h"

enum { BLOCKS = 200, CALLS = 5000 };
#define MIB ((size_t)1 << 20)

#define ASSERT_OK(call)                                                                            \
    do {                                                                                           \
        const rebatch_status status_ = (call);                                                     \
        cr_assert_eq(status_, REBATCH_OK, "%s: %s: %s", #call, rebatch_status_name(status_),       \
                     rebatch_last_error());                                                        \
    } while (0)

struct rig {
    rebatch_device *device;
    rebatch_pool *pool;
    rebatch_stream streams[2];
    rebatch_tag tags[3];
    void *blocks[BLOCKS];
    uint64_t random;
};

static uint64_t draw(struct rig *rig)
{
    rig->random = rig->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return rig->random >> 33;
}

static struct rig rig_open(void)
{
    struct rig rig = {.random = 1};
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.limit_bytes = 4096 * MIB;
    options.events = 100000;
    ASSERT_OK(rebatch_device_open_cuda(&rig.device, NULL));
    ASSERT_OK(rebatch_pool_create(&rig.pool, rig.device, &options));
    ASSERT_OK(rebatch_stream_create(&rig.streams[1], rig.device));
    ASSERT_OK(rebatch_pool_tag(&rig.tags[1], rig.pool, "weights"));
    ASSERT_OK(rebatch_pool_tag(&rig.tags[2], rig.pool, "activations"));
    return rig;
}

/* Blocks on two streams, of which some are used by both, with work on them and trims between. */
static void work(struct rig *rig)
{
    for (int n = 0; n < CALLS; n++) {
        const size_t at = draw(rig) % BLOCKS;
        const size_t bytes = draw(rig) % (n % 8 ? 200000 : 30 * MIB) + 1;
        const unsigned s = (unsigned)(draw(rig) % 2);
        ASSERT_OK(rebatch_pool_free(rig->pool, rig->blocks[at]));
        ASSERT_OK(rebatch_pool_alloc(&rig->blocks[at], rig->pool, bytes, rig->streams[s],
                                     rig->tags[n % 3]));
        ASSERT_OK(rebatch_fill(rig->device, rig->blocks[at], 1, bytes, rig->streams[s]));
        if (n % 11 == 0)
            ASSERT_OK(rebatch_pool_use_on(rig->pool, rig->blocks[at], rig->streams[!s]));
        if (n % 1000 == 999)
            ASSERT_OK(rebatch_pool_trim(rig->pool, 64 * MIB, NULL));
    }
}

struct text {
    char *bytes;
    size_t length;
};

static rebatch_status collect(const void *data, size_t size, void *user)
{
    struct text *text = user;
    text->bytes = realloc(text->bytes, text->length + size + 1);
    cr_assert_not_null(text->bytes);
    memcpy(text->bytes + text->length, data, size);
    text->length += size;
    text->bytes[text->length] = '\0';
    return REBATCH_OK;
}

/* The n-th field of a line, as a number. */
static uint64_t field(const char *line, int n)
{
    for (; n > 0; n--)
        line = strchr(line, ',') + 1;
    return strtoull(line, NULL, 0);
}

Test(pool_cuda, a_snapshot_adds_up_to_what_is_reserved)
{
    struct rig rig = rig_open();
    work(&rig);
    struct text text = {NULL, 0};
    ASSERT_OK(rebatch_pool_write_snapshot(rig.pool, REBATCH_SNAPSHOT_BLOCKS_CSV, collect, &text));
    uint64_t reserved = 0, requested = 0;
    for (const char *line = strchr(text.bytes, '\n') + 1; *line; line = strchr(line, '\n') + 1) {
        reserved += field(line, 3);
        requested += field(line, 4);
    }
    rebatch_pool_stats stats;
    ASSERT_OK(rebatch_pool_get_stats(&stats, rig.pool));
    cr_assert_eq(reserved, stats.reserved_bytes);
    cr_assert_eq(requested, stats.requested_bytes);
    cr_assert(rbi_pool_is_valid(rig.pool), "%s", rebatch_last_error());
    free(text.bytes);
    rebatch_pool_destroy(rig.pool);
    rebatch_memory_info memory;
    ASSERT_OK(rebatch_device_memory(rig.device, &memory));
    cr_assert_eq(memory.used_bytes, 0);
    rebatch_stream_destroy(rig.device, rig.streams[1]);
    rebatch_device_close(rig.device);
}
