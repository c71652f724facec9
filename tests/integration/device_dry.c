/* Owns the tests of the dry device that no other suite has. Must not know more of the library than
 * its public headers say. */
#include <string.h>

#include <criterion/criterion.h>

#include "rebatch/rebatch.h"

#define ASSERT_OK(call) cr_assert_eq((call), REBATCH_OK, "%s: %s", #call, rebatch_last_error())

/* Each is used once: they run out one day, and are not begun again. */
Test(device_dry, addresses_that_are_used_up_are_out_of_memory)
{
    const size_t piece = (size_t)1 << 60;
    for (int caching = 0; caching < 2; caching++) {
        rebatch_device *device;
        rebatch_pool *pool;
        rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
        options.caching = caching ? REBATCH_ON : REBATCH_OFF;
        ASSERT_OK(rebatch_device_open_dry(&device, REBATCH_UNLIMITED, piece));
        ASSERT_OK(rebatch_pool_create(&pool, device, &options));
        void *block, *last = NULL;
        rebatch_status status = REBATCH_OK;
        for (int i = 0; i < 9 && !status; i++) {
            status = rebatch_pool_alloc(&block, pool, piece, NULL, 0);
            if (status || caching)
                continue;
            cr_assert((char *)block > (char *)last);
            last = block;
            ASSERT_OK(rebatch_pool_free(pool, block));
        }
        cr_assert_eq(status, REBATCH_OOM, "%s", rebatch_status_name(status));
        rebatch_pool_destroy(pool);
        rebatch_device_close(device);
    }
}

static size_t used_of(rebatch_device *device)
{
    rebatch_memory_info info;
    ASSERT_OK(rebatch_device_memory(device, &info));
    return info.used_bytes;
}

Test(device_dry, what_is_freed_can_be_had_again)
{
    const size_t page = 4096;
    rebatch_device *device;
    rebatch_pool *pool;
    void *block;
    ASSERT_OK(rebatch_device_open_dry(&device, 4 * page, page));
    for (int i = 0; i < 3; i++) {
        ASSERT_OK(rebatch_pool_create(&pool, device, NULL));
        ASSERT_OK(rebatch_pool_alloc(&block, pool, 4 * page, NULL, 0));
        cr_assert_eq(used_of(device), 4 * page);
        rebatch_pool_destroy(pool);
        cr_assert_eq(used_of(device), 0);
    }
    rebatch_device_close(device);
}
