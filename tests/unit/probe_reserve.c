/* Owns the tests of the pieces that reserve_bytes are held in.
 * Must not know the search. */
#include <criterion/criterion.h>

#include "device/device.h"
#include "probe/probe.h"

enum { PAGE = 65536 };

struct bed {
    rebatch_device *device;
    struct rbi_setting setting;
};

/* A pool over a dry device in which blocks of so many bytes live. */
static struct bed bed_of(size_t pages, bool has_virtual_memory, const size_t *live, size_t count)
{
    struct bed bed = {.device = NULL};
    void *block;
    cr_assert_eq(rbi_device_open_dry(&bed.device, pages * PAGE, PAGE, has_virtual_memory),
                 REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&bed.setting.pool, bed.device, NULL), REBATCH_OK);
    for (size_t i = 0; i < count; i++)
        cr_assert_eq(rebatch_pool_alloc(&block, bed.setting.pool, live[i], NULL, 0), REBATCH_OK);
    return bed;
}

static void end(struct bed *bed)
{
    rbi_reserve_release(&bed->setting);
    rebatch_pool_destroy(bed->setting.pool);
    rebatch_device_close(bed->device);
}

static uint64_t live_of(const struct bed *bed)
{
    rebatch_pool_stats stats;
    cr_assert_eq(rebatch_pool_get_stats(&stats, bed->setting.pool), REBATCH_OK);
    return stats.live_bytes;
}

static void assert_blocks(size_t reserve_bytes, size_t count, const size_t *bytes)
{
    struct bed bed = bed_of(16, true, (size_t[]){100, 3001}, 2);
    cr_assert_eq(rbi_reserve_plan(&bed.setting, reserve_bytes), REBATCH_OK);
    cr_assert_eq(bed.setting.reserve_count, count, "%zu of %zu", bed.setting.reserve_count, count);
    for (size_t i = 0; i < count; i++)
        cr_assert_eq(bed.setting.reserve[i].bytes, bytes[i], "%zu: %zu", i,
                     bed.setting.reserve[i].bytes);
    end(&bed);
}

Test(probe_reserve, a_sum_that_was_rounded_up_tells_how_many_pieces_there_are)
{
    assert_blocks(2 * 512 + 2 * 3072, 4, (size_t[]){100, 100, 3001, 3001});
    assert_blocks(512 + 6144, 2, (size_t[]){200, 6002});
    assert_blocks(512 + 3072, 2, (size_t[]){100, 3001});
}

Test(probe_reserve, else_there_are_as_many_of_each_as_it_is_times_as_large)
{
    assert_blocks(2 * 3101, 4, (size_t[]){100, 100, 3001, 3001});
    assert_blocks(3101, 2, (size_t[]){100, 3001});
}

Test(probe_reserve, what_is_not_there_is_not_planned)
{
    struct bed bed = bed_of(16, true, (size_t[]){PAGE}, 1);
    cr_assert_eq(rbi_reserve_plan(&bed.setting, 15 * PAGE + 1), REBATCH_OOM);
    cr_assert_eq(bed.setting.reserve_count, 0);
    cr_assert_eq(rbi_reserve_hold(&bed.setting), REBATCH_OK);
    cr_assert_eq(live_of(&bed), PAGE);
    end(&bed);
}

Test(probe_reserve, what_is_planned_and_not_held_is_missing)
{
    struct bed bed = bed_of(16, true, (size_t[]){1000}, 1);
    cr_assert_eq(rbi_reserve_plan(&bed.setting, 2000), REBATCH_OK);
    cr_assert_eq(rbi_reserve_missing(&bed.setting), 2048);
    cr_assert_eq(live_of(&bed), 1024);
    cr_assert_eq(rbi_reserve_hold(&bed.setting), REBATCH_OK);
    cr_assert_eq(rbi_reserve_missing(&bed.setting), 0);
    cr_assert_eq(live_of(&bed), 3072);
    rbi_reserve_release(&bed.setting);
    cr_assert_eq(live_of(&bed), 1024);
    end(&bed);
}

/* Two pages live, three are cached in one piece, five are left: pieces of two leave one of the
 * cache and one of the device. */
Test(probe_reserve, a_cache_that_is_in_the_way_is_given_back)
{
    struct bed bed = bed_of(10, false, (size_t[]){2 * PAGE}, 1);
    void *cached;
    cr_assert_eq(rebatch_pool_alloc(&cached, bed.setting.pool, 3 * PAGE, NULL, 0), REBATCH_OK);
    cr_assert_eq(rebatch_pool_free(bed.setting.pool, cached), REBATCH_OK);
    cr_assert_eq(rbi_reserve_plan(&bed.setting, 8 * PAGE), REBATCH_OK);
    cr_assert_eq(bed.setting.reserve_count, 4);
    cr_assert_eq(rbi_reserve_hold(&bed.setting), REBATCH_OK);
    cr_assert_eq(live_of(&bed), 10 * PAGE);
    end(&bed);
}
