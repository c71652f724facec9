/* Holds what is given to others of a pool's memory: the bound beside the limit, and what other
 * threads ask of the one that trains. Seeds: none. */
#include "unit/pool_help.h"

static uint64_t reserved(rebatch_pool *pool)
{
    return stats_of(pool).reserved_bytes;
}

Test(pool_sharing, what_is_given_is_given_at_once_and_stays_given_until_the_wake)
{
    AUTO_RIG rig = rig_open(64, NULL);
    void *const kept = take(rig.pool, 4 * PAGE), *const freed = take(rig.pool, 20 * PAGE);
    give(rig.pool, freed);
    size_t released;
    cr_assert_eq(rebatch_pool_give(rig.pool, 8 * PAGE, &released), REBATCH_OK);
    cr_assert_eq(released, 16 * PAGE);
    cr_assert_eq(reserved(rig.pool), 8 * PAGE);
    void *block;
    cr_assert_eq(rebatch_pool_alloc(&block, rig.pool, 5 * PAGE, NULL, 0), REBATCH_OOM);
    rebatch_oom_report oom;
    cr_assert_eq(rebatch_pool_last_oom(&oom, rig.pool), REBATCH_OK);
    cr_assert_eq(oom.limit_bytes, 8 * PAGE);
    cr_assert_eq(rebatch_pool_wake(rig.pool), REBATCH_OK);
    give(rig.pool, take(rig.pool, 40 * PAGE));
    give(rig.pool, kept);
}

Test(pool_sharing, what_is_in_use_is_given_when_it_is_freed)
{
    AUTO_RIG rig = rig_open(64, NULL);
    void *const block = take(rig.pool, 20 * PAGE);
    size_t released = 1;
    cr_assert_eq(rebatch_pool_give(rig.pool, PAGE, &released), REBATCH_OK);
    cr_assert_eq(released, 0);
    give(rig.pool, block);
    cr_assert_leq(reserved(rig.pool), PAGE);
}

Test(pool_sharing, of_limit_and_bound_the_smaller_one_holds)
{
    const rebatch_pool_options options = {.struct_size = sizeof options, .limit_bytes = 16 * PAGE};
    AUTO_RIG rig = rig_open(64, &options);
    void *block;
    cr_assert_eq(rebatch_pool_give(rig.pool, 32 * PAGE, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_pool_alloc(&block, rig.pool, 17 * PAGE, NULL, 0), REBATCH_OOM);
    cr_assert_eq(rebatch_pool_set_limit(rig.pool, 0), REBATCH_OK);
    cr_assert_eq(rebatch_pool_alloc(&block, rig.pool, 33 * PAGE, NULL, 0), REBATCH_OOM);
    give(rig.pool, take(rig.pool, 32 * PAGE));
}

Test(pool_sharing, a_bound_below_a_page_is_refused)
{
    AUTO_RIG rig = rig_open(8, NULL);
    assert_refused(rebatch_pool_give(rig.pool, 100, NULL), REBATCH_E_INVALID,
                   "most_bytes is 100: expected at least one page of 65536 bytes");
    assert_refused(rebatch_pool_give(NULL, PAGE, NULL), REBATCH_E_INVALID, "pool is NULL");
    assert_refused(rebatch_pool_wake(NULL), REBATCH_E_INVALID, "pool is NULL");
}

/* ---- tasks ---- */

static void count(void *user)
{
    ++*(int *)user;
}

Test(pool_sharing, a_task_runs_once_at_the_next_mark)
{
    AUTO_RIG rig = rig_open(8, NULL);
    int runs = 0;
    struct rbi_pool_task task = {count, &runs}, other = task;
    cr_assert(rbi_pool_post_task(rig.pool, &task));
    cr_assert_not(rbi_pool_post_task(rig.pool, &other));
    cr_assert_eq(rebatch_pool_mark(rig.pool, 0), REBATCH_OK);
    cr_assert_eq(rebatch_pool_mark(rig.pool, 0), REBATCH_OK);
    cr_assert_eq(runs, 1);
    cr_assert_not(rbi_pool_withdraw_task(rig.pool, &task));
}

Test(pool_sharing, a_task_that_is_withdrawn_does_not_run)
{
    AUTO_RIG rig = rig_open(8, NULL);
    int runs = 0;
    struct rbi_pool_task task = {count, &runs};
    cr_assert(rbi_pool_post_task(rig.pool, &task));
    cr_assert(rbi_pool_withdraw_task(rig.pool, &task));
    cr_assert_eq(rebatch_pool_mark(rig.pool, 0), REBATCH_OK);
    cr_assert_eq(runs, 0);
}

/* ---- the floor ---- */

static struct rig open_with_floor(size_t pages)
{
    const struct rig rig = rig_open(128, NULL);
    cr_assert_eq(rebatch_pool_set_floor(rig.pool, pages * PAGE), REBATCH_OK);
    return rig;
}

Test(pool_sharing, a_floor_is_reserved_at_once_and_no_trim_goes_below_it)
{
    AUTO_RIG rig = open_with_floor(40);
    cr_assert_eq(reserved(rig.pool), 40 * PAGE);
    cr_assert_eq(rig.pool->vm.floor_pages, 40);
    size_t released;
    cr_assert_eq(rebatch_pool_trim(rig.pool, 0, &released), REBATCH_OK);
    cr_assert_eq(released, 0);
    void *const block = take(rig.pool, 30 * PAGE);
    cr_assert_eq(reserved(rig.pool), 40 * PAGE, "blocks lie in it");
    give(rig.pool, take(rig.pool, 70 * PAGE));
    for (size_t keep = 30; keep-- > 0;) {
        cr_assert_eq(rebatch_pool_trim(rig.pool, keep * PAGE, &released), REBATCH_OK);
        assert_valid(rig.pool);
        cr_assert_geq(reserved(rig.pool), 40 * PAGE);
    }
    cr_assert_leq(reserved(rig.pool), 56 * PAGE, "a chunk of 16 pages may have to stay whole");
    give(rig.pool, block);
    cr_assert_eq(rebatch_pool_trim(rig.pool, 0, &released), REBATCH_OK);
    cr_assert_geq(reserved(rig.pool), 40 * PAGE);
}

Test(pool_sharing, sleep_and_give_go_below_the_floor_and_the_wake_takes_it_again)
{
    AUTO_RIG rig = open_with_floor(40);
    void *const block = take(rig.pool, 10 * PAGE);
    size_t released;
    cr_assert_eq(rebatch_pool_give(rig.pool, 16 * PAGE, &released), REBATCH_OK);
    cr_assert_leq(reserved(rig.pool), 16 * PAGE);
    cr_assert_eq(rig.pool->vm.floor_pages, 16);
    cr_assert_eq(rebatch_pool_wake(rig.pool), REBATCH_OK);
    cr_assert_eq(reserved(rig.pool), 40 * PAGE);
    cr_assert_eq(rebatch_pool_sleep(rig.pool, NULL, NULL), REBATCH_OK);
    cr_assert_eq(reserved(rig.pool), 0);
    cr_assert_eq(rebatch_device_set_capacity(rig.device, 20 * PAGE), REBATCH_OK);
    cr_assert_eq(rebatch_pool_wake(rig.pool), REBATCH_OK, "the floor is no reason to fail");
    cr_assert_eq(reserved(rig.pool), 20 * PAGE, "what there is");
    assert_valid(rig.pool);
    give(rig.pool, block);
}

Test(pool_sharing, a_floor_that_cannot_hold_is_refused)
{
    AUTO_RIG rig = rig_open(32, NULL);
    assert_refused(rebatch_pool_set_floor(rig.pool, 40 * PAGE), REBATCH_OOM,
                   "floor_bytes is 2621440: expected at most what is free within limit and "
                   "headroom, which is 524288 bytes less");
    cr_assert_eq(rig.pool->vm.floor_pages, 0);
    cr_assert_eq(rebatch_pool_set_limit(rig.pool, 20 * PAGE), REBATCH_OK);
    assert_refused(rebatch_pool_set_floor(rig.pool, 21 * PAGE), REBATCH_E_INVALID,
                   "floor_bytes is 1376256: expected at most the limit of 1310720");
    assert_refused(rebatch_pool_set_floor(NULL, PAGE), REBATCH_E_INVALID, "pool is NULL");
    AUTO_RIG plain = rig_open_plain(32, NULL);
    assert_refused(rebatch_pool_set_floor(plain.pool, PAGE), REBATCH_E_UNSUPPORTED,
                   "floor_bytes is 65536: expected 0");
}

Test(pool_sharing, a_lower_limit_is_the_floor_too)
{
    AUTO_RIG rig = open_with_floor(40);
    cr_assert_eq(rebatch_pool_set_limit(rig.pool, 24 * PAGE), REBATCH_OK);
    cr_assert_leq(reserved(rig.pool), 24 * PAGE);
    assert_valid(rig.pool);
}
