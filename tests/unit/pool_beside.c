/* Holds what was promised to a scope's own thread against what other threads do beside it. Threads
 * run in the order that a test says (be_thread). */
#include "unit/pool_help.h"

static void reserve(rebatch_pool *pool, size_t pages)
{
    cr_assert_eq(rebatch_pool_reserve(pool, pages * PAGE, NULL), REBATCH_OK);
}

static void assert_refused_to_other(rebatch_pool *pool, size_t pages)
{
    void *none;
    be_thread(OTHER);
    cr_assert_eq(rebatch_pool_alloc(&none, pool, pages * PAGE, NULL, 0), REBATCH_OOM);
    be_thread(INSIDER);
}

Test(pool_beside, what_was_promised_is_not_theirs)
{
    AUTO_RIG rig = rig_open(64, NULL);
    give(rig.pool, take(rig.pool, 20 * PAGE));
    const rebatch_scope scope = begin_own(rig.pool);
    reserve(rig.pool, 40);
    be_thread(OTHER);
    void *others[2] = {take(rig.pool, 10 * PAGE), take(rig.pool, KIB)};
    assert_refused_to_other(rig.pool, 20);
    (void)take(rig.pool, 30 * PAGE);
    assert_refused_to_other(rig.pool, 20);
    (void)take(rig.pool, 10 * PAGE);
    rollback(rig.pool, scope);
    give(rig.pool, others[0]);
    give(rig.pool, others[1]);
}

/* A request of theirs that fails has looked everywhere else, and given nothing of it back. */
Test(pool_beside, their_failures_leave_it_whole)
{
    AUTO_RIG rig = rig_open_plain(64, NULL);
    const rebatch_scope scope = begin_own(rig.pool);
    reserve(rig.pool, 60);
    assert_refused_to_other(rig.pool, 10);
    for (int i = 0; i < 40; i++)
        (void)take(rig.pool, 3 * PAGE / 2);
    rollback(rig.pool, scope);
}

/* What is free elsewhere they have, though not in one piece with it. */
Test(pool_beside, they_have_what_is_free_elsewhere)
{
    AUTO_RIG rig = rig_open_plain(64, NULL);
    void *blocks[2] = {take(rig.pool, 20 * PAGE), take(rig.pool, 40 * PAGE)};
    give(rig.pool, blocks[0]);
    give(rig.pool, blocks[1]);
    const rebatch_scope scope = begin_own(rig.pool);
    reserve(rig.pool, 40);
    be_thread(OTHER);
    void *other = take(rig.pool, 10 * PAGE);
    be_thread(INSIDER);
    (void)take(rig.pool, 40 * PAGE);
    rollback(rig.pool, scope);
    give(rig.pool, other);
}

/* What other threads reserve is there at that moment; nothing is promised to them. */
Test(pool_beside, what_they_reserve_is_not_kept)
{
    AUTO_RIG rig = rig_open(64, NULL);
    const rebatch_scope scope = begin_own(rig.pool);
    be_thread(OTHER);
    reserve(rig.pool, 40);
    cr_assert_eq(rig.pool->promised_bytes, 0);
    void *other = take(rig.pool, 40 * PAGE);
    cr_assert_eq(rebatch_pool_reserve(rig.pool, 40 * PAGE, NULL), REBATCH_OOM);
    be_thread(INSIDER);
    rollback(rig.pool, scope);
    give(rig.pool, other);
}

/* While callbacks for another thread's request run, the owner_thread goes on. */
struct meanwhile {
    rebatch_pool *pool;
    size_t takes, reserves; /* pages */
};

static size_t let_insider_go_on(size_t wanted_bytes, void *user)
{
    const struct meanwhile *meanwhile = user;
    const rebatch_pool *const pressing = rbi_pool_pressing;
    (void)wanted_bytes;
    rbi_pool_pressing = NULL;
    be_thread(INSIDER);
    if (meanwhile->takes)
        (void)take(meanwhile->pool, meanwhile->takes * PAGE);
    if (meanwhile->reserves)
        reserve(meanwhile->pool, meanwhile->reserves);
    be_thread(OTHER);
    rbi_pool_pressing = pressing;
    return 0;
}

Test(pool_beside, it_is_what_the_insider_made_of_it_meanwhile)
{
    const struct meanwhile cases[] = {{.takes = 40}, {.reserves = 50}};
    for (size_t i = 0; i < 2; i++) {
        AUTO_RIG rig = rig_open(64, NULL);
        struct meanwhile meanwhile = cases[i];
        meanwhile.pool = rig.pool;
        cr_assert_eq(rebatch_pool_add_pressure(rig.pool, let_insider_go_on, &meanwhile),
                     REBATCH_OK);
        const rebatch_scope scope = begin_own(rig.pool);
        reserve(rig.pool, 40);
        assert_refused_to_other(rig.pool, 30);
        cr_assert_eq(rig.pool->promised_bytes, meanwhile.reserves * PAGE);
        if (meanwhile.reserves)
            (void)take(rig.pool, meanwhile.reserves * PAGE);
        rollback(rig.pool, scope);
    }
}
