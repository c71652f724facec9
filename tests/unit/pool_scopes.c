/* Holds what scopes promise: undoing, waiting frees, late frees, statistics.
 * Seeds: none is drawn; pool_random.c does. */
#include "unit/pool_help.h"

/* A rollback takes back what was allocated inside and is still in use; the memory stays cached. */
Test(pool_scopes, a_rollback_takes_back_what_was_allocated_inside)
{
    AUTO_RIG rig = rig_open(64, NULL);
    void *older = take(rig.pool, KIB);
    const rebatch_scope scope = begin(rig.pool);
    (void)take(rig.pool, PAGE);
    give(rig.pool, take(rig.pool, 2 * KIB));
    (void)take(rig.pool, 3 * KIB);
    const uint64_t reserved = stats_of(rig.pool).reserved_bytes;
    rollback(rig.pool, scope);
    const rebatch_pool_stats stats = stats_of(rig.pool);
    cr_assert_eq(stats.live_bytes, KIB);
    cr_assert_eq(stats.blocks, 1);
    cr_assert_eq(stats.reserved_bytes, reserved);
    cr_assert_eq(stats.rollbacks, 1);
    cr_assert_eq(stats.rolled_back_blocks, 2);
    cr_assert_eq(stats.frees, 1);
    cr_assert_eq(stats.late_frees, 0);
    give(rig.pool, older);
}

struct told {
    size_t allocations, frees;
};

static void note_call(void *user, enum rbi_pool_call call, const void *address, size_t bytes,
                      rebatch_stream stream)
{
    struct told *const told = user;
    (void)stream;
    told->allocations += call == RBI_POOL_ALLOC && bytes;
    told->frees += call == RBI_POOL_FREE && address;
}

/* Whoever counts what lives by the calls, as probes and checks do, is told of a program's rollback:
 * that is within a callback, and not rebatch's doing. */
Test(pool_scopes, the_recorder_is_told_of_what_a_rollback_takes_back)
{
    AUTO_RIG rig = rig_open(64, NULL);
    struct told told = {0};
    rbi_pool_set_recorder(rig.pool, &(struct rbi_pool_recorder){note_call, &told});
    rebatch_scope scope = begin(rig.pool);
    (void)take(rig.pool, PAGE);
    give(rig.pool, take(rig.pool, 2 * KIB));
    (void)take(rig.pool, 3 * KIB);
    rollback(rig.pool, scope);
    cr_assert_eq(told.allocations, 3);
    cr_assert_eq(told.frees, 3, "%zu frees", told.frees);
    scope = begin(rig.pool);
    (void)take(rig.pool, PAGE);
    cr_assert_eq(rbi_scope_undo(rig.pool, scope), REBATCH_OK);
    cr_assert_eq(told.frees, 3);
    rbi_pool_set_recorder(rig.pool, NULL);
}

/* The free of an older block waits for the commit: until then nobody else gets the memory. */
Test(pool_scopes, the_free_of_an_older_block_waits_for_the_commit)
{
    AUTO_RIG rig = rig_open(64, NULL);
    char *older = take(rig.pool, 4 * KIB);
    memset(older, 0x77, 4 * KIB);
    const rebatch_scope scope = begin(rig.pool);
    give(rig.pool, older);
    cr_assert_eq(stats_of(rig.pool).deferred_bytes, 4 * KIB);
    cr_assert_eq(stats_of(rig.pool).live_bytes, 4 * KIB);
    cr_assert_eq(stats_of(rig.pool).frees, 0);
    for (int i = 0; i < 8; i++)
        memset(take(rig.pool, 4 * KIB), 0x11, 4 * KIB);
    for (size_t i = 0; i < 4 * KIB; i++)
        cr_assert_eq(older[i], 0x77);
    commit(rig.pool, scope);
    cr_assert_eq(stats_of(rig.pool).deferred_bytes, 0);
    cr_assert_eq(stats_of(rig.pool).frees, 1);
    cr_assert_eq(take(rig.pool, 4 * KIB), older);
}

/* A rollback forgets the frees of older blocks: they are in use as before, with their content. */
Test(pool_scopes, a_rollback_forgets_the_frees_of_older_blocks)
{
    AUTO_RIG rig = rig_open(64, NULL);
    char *older = take(rig.pool, 4 * KIB);
    memset(older, 0x77, 4 * KIB);
    const rebatch_scope scope = begin(rig.pool);
    give(rig.pool, older);
    rollback(rig.pool, scope);
    size_t bytes;
    cr_assert_eq(rebatch_pool_block_bytes(&bytes, rig.pool, older), REBATCH_OK);
    cr_assert_eq(older[4 * KIB - 1], 0x77);
    cr_assert_eq(stats_of(rig.pool).deferred_bytes, 0);
    give(rig.pool, older);
    cr_assert_eq(stats_of(rig.pool).live_bytes, 0);
}

/* A second free of a block whose free waits is a double free, and its size cannot be asked. */
Test(pool_scopes, freeing_a_waiting_block_again_is_refused)
{
    AUTO_RIG rig = rig_open(64, NULL);
    void *older = take(rig.pool, KIB);
    const rebatch_scope scope = begin(rig.pool);
    give(rig.pool, older);
    size_t bytes;
    assert_refused(rebatch_pool_free(rig.pool, older), REBATCH_E_INVALID, "freed already");
    assert_refused(rebatch_pool_block_bytes(&bytes, rig.pool, older), REBATCH_E_INVALID, "freed");
    assert_refused(rebatch_pool_use_on(rig.pool, older, NULL), REBATCH_E_INVALID, "freed already");
    commit(rig.pool, scope);
}

/* A block that was allocated in the scope and is freed in it is free at once. */
Test(pool_scopes, a_block_of_the_scope_itself_is_freed_at_once)
{
    AUTO_RIG rig = rig_open(64, NULL);
    const rebatch_scope scope = begin(rig.pool);
    void *inside = take(rig.pool, KIB);
    give(rig.pool, inside);
    cr_assert_eq(stats_of(rig.pool).deferred_bytes, 0);
    cr_assert_eq(take(rig.pool, KIB), inside);
    commit(rig.pool, scope);
    cr_assert_eq(stats_of(rig.pool).blocks, 1);
}

/* What a committed scope allocated belongs to the scope around it, and goes when that is undone. */
Test(pool_scopes, a_commit_hands_the_blocks_to_the_scope_around)
{
    AUTO_RIG rig = rig_open(64, NULL);
    const rebatch_scope outer = begin(rig.pool);
    const rebatch_scope inner = begin(rig.pool);
    void *block = take(rig.pool, KIB);
    commit(rig.pool, inner);
    cr_assert_eq(stats_of(rig.pool).blocks, 1);
    rollback(rig.pool, outer);
    cr_assert_eq(stats_of(rig.pool).blocks, 0);
    give(rig.pool, block);
    cr_assert_eq(stats_of(rig.pool).late_frees, 1);
}

/* At a commit a free that waits is carried out when the block is no older than the scope around,
 * and waits on there when it is. */
Test(pool_scopes, a_free_waits_on_in_the_scope_around_for_a_block_older_than_that)
{
    AUTO_RIG rig = rig_open(64, NULL);
    void *oldest = take(rig.pool, KIB);
    const rebatch_scope outer = begin(rig.pool);
    void *between = take(rig.pool, KIB);
    const rebatch_scope inner = begin(rig.pool);
    give(rig.pool, oldest);
    give(rig.pool, between);
    cr_assert_eq(stats_of(rig.pool).deferred_bytes, 2 * KIB);
    commit(rig.pool, inner);
    cr_assert_eq(stats_of(rig.pool).deferred_bytes, KIB);
    cr_assert_eq(stats_of(rig.pool).frees, 1);
    assert_refused(rebatch_pool_free(rig.pool, oldest), REBATCH_E_INVALID, "freed already");
    assert_refused(rebatch_pool_free(rig.pool, between), REBATCH_E_INVALID, "freed already");
    rollback(rig.pool, outer);
    give(rig.pool, oldest);
    cr_assert_eq(stats_of(rig.pool).live_bytes, 0);
}

/* Rolling back an outer scope rolls back those inside first. */
Test(pool_scopes, a_rollback_of_an_outer_scope_rolls_back_the_inner_ones)
{
    AUTO_RIG rig = rig_open(64, NULL);
    void *oldest = take(rig.pool, KIB);
    const rebatch_scope outer = begin(rig.pool);
    void *between = take(rig.pool, KIB);
    const rebatch_scope inner = begin(rig.pool);
    (void)take(rig.pool, KIB);
    give(rig.pool, between);
    give(rig.pool, oldest);
    rollback(rig.pool, outer);
    cr_assert_eq(stats_of(rig.pool).blocks, 1);
    cr_assert_eq(stats_of(rig.pool).rollbacks, 2);
    cr_assert_eq(stats_of(rig.pool).rolled_back_blocks, 2);
    assert_refused(rebatch_scope_commit(rig.pool, inner), REBATCH_E_INVALID, "scope is");
    assert_refused(rebatch_scope_commit(rig.pool, outer), REBATCH_E_INVALID, "scope is");
    give(rig.pool,
         between); /* its free was forgotten with the inner scope, then it was taken back */
    cr_assert_eq(stats_of(rig.pool).late_frees, 1);
    give(rig.pool, oldest);
}

/* A free of what a rollback took back is ignored and counted, until the address is given out
 * again. */
Test(pool_scopes, late_frees_are_ignored_until_the_address_is_given_out_again)
{
    AUTO_RIG rig = rig_open(64, NULL);
    rebatch_scope scope = begin(rig.pool);
    void *first = take(rig.pool, 33 * KIB);
    void *second = take(rig.pool, 33 * KIB);
    rollback(rig.pool, scope);
    give(rig.pool, first);
    give(rig.pool, first);
    give(rig.pool, second);
    cr_assert_eq(stats_of(rig.pool).late_frees, 3);
    cr_assert_eq(stats_of(rig.pool).frees, 0);
    void *again = take(rig.pool, 2 * 33 * KIB); /* begins where the first did, covers the second */
    cr_assert_eq(again, first);
    give(rig.pool, second);
    cr_assert_eq(stats_of(rig.pool).late_frees, 4);
    give(rig.pool, first);
    cr_assert_eq(stats_of(rig.pool).frees, 1);
    assert_refused(rebatch_pool_free(rig.pool, first), REBATCH_E_INVALID, "freed already");
    /* Memory that went back to the device in between changes nothing. */
    scope = begin(rig.pool);
    first = take(rig.pool, 8 * PAGE);
    rollback(rig.pool, scope);
    cr_assert_eq(rebatch_pool_trim(rig.pool, 0, NULL), REBATCH_OK);
    give(rig.pool, first);
    cr_assert_eq(stats_of(rig.pool).late_frees, 5);
}

/* Scopes are of the pool: who is no part of what may be taken back has a pool of its own. */
Test(pool_scopes, a_scope_takes_in_what_other_threads_do)
{
    AUTO_RIG rig = rig_open(64, NULL);
    void *older = take(rig.pool, 3 * KIB);
    const rebatch_scope scope = begin(rig.pool);
    be_thread(77);
    void *inside = take(rig.pool, 3 * KIB);
    give(rig.pool, older);
    be_thread(78);
    rollback(rig.pool, scope);
    assert_refused(rebatch_pool_use_on(rig.pool, inside, NULL), REBATCH_E_INVALID, "took back");
    size_t bytes;
    cr_assert_eq(rebatch_pool_block_bytes(&bytes, rig.pool, older), REBATCH_OK);
    give(rig.pool, older);
    cr_assert_eq(stats_of(rig.pool).live_bytes, 0);
}

/* Whoever still uses a block that was taken back is told so. */
Test(pool_scopes, a_block_that_a_rollback_took_back_cannot_be_used)
{
    AUTO_RIG rig = rig_open(64, NULL);
    size_t bytes = 1;
    for (int merged = 0; merged < 2; merged++) {
        const rebatch_scope scope = begin(rig.pool);
        void *block = take(rig.pool, 3 * KIB);
        cr_assert_eq(rebatch_scope_rollback(rig.pool, scope), REBATCH_OK);
        if (merged)
            merge_freed(rig.pool);
        assert_refused(rebatch_pool_use_on(rig.pool, block, NULL), REBATCH_E_INVALID,
                       "which a rollback took back: expected a block in use");
        assert_refused(rebatch_pool_block_bytes(&bytes, rig.pool, block), REBATCH_E_INVALID,
                       "which a rollback took back");
        cr_assert_eq(bytes, 0);
        cr_assert_eq(take(rig.pool, 3 * KIB), block);
        cr_assert_eq(rebatch_pool_block_bytes(&bytes, rig.pool, block), REBATCH_OK);
        give(rig.pool, block);
        assert_refused(rebatch_pool_use_on(rig.pool, block, NULL), REBATCH_E_INVALID,
                       "freed already");
    }
}

/* Only the innermost open scope can be committed; a stale, foreign or zero handle is refused. */
Test(pool_scopes, a_handle_that_is_not_open_is_refused)
{
    AUTO_RIG rig = rig_open(64, NULL);
    assert_refused(rebatch_scope_commit(rig.pool, 0), REBATCH_E_INVALID, "scope is 0");
    assert_refused(rebatch_scope_rollback(rig.pool, 0), REBATCH_E_INVALID, "scope is 0");
    const rebatch_scope outer = begin(rig.pool);
    const rebatch_scope inner = begin(rig.pool);
    assert_refused(rebatch_scope_commit(rig.pool, outer), REBATCH_E_INVALID, "innermost");
    commit(rig.pool, inner);
    const rebatch_scope next = begin(rig.pool);
    cr_assert_neq(next, inner);
    assert_refused(rebatch_scope_commit(rig.pool, inner), REBATCH_E_INVALID, "scope is");
    assert_refused(rebatch_scope_rollback(rig.pool, inner), REBATCH_E_INVALID, "scope is");
    assert_refused(rebatch_scope_begin(NULL, rig.pool), REBATCH_E_INVALID, "out is NULL");
    rebatch_scope scope = 1;
    assert_refused(rebatch_scope_begin(&scope, NULL), REBATCH_E_INVALID, "pool is NULL");
    cr_assert_eq(scope, 0);
    commit(rig.pool, next);
    commit(rig.pool, outer);
}

/* 64 scopes can be open, not 65. */
Test(pool_scopes, sixty_four_scopes_can_be_open)
{
    AUTO_RIG rig = rig_open(64, NULL);
    rebatch_scope first = 0;
    for (int i = 0; i < 64; i++) {
        const rebatch_scope scope = begin(rig.pool);
        first = first ? first : scope;
        (void)take(rig.pool, KIB);
    }
    rebatch_scope scope = 1;
    assert_refused(rebatch_scope_begin(&scope, rig.pool), REBATCH_E_UNSUPPORTED, "64 scopes");
    cr_assert_eq(scope, 0);
    rollback(rig.pool, first);
    cr_assert_eq(stats_of(rig.pool).rolled_back_blocks, 64);
    scope = begin(rig.pool);
    commit(rig.pool, scope);
}

/* A scope's live bytes are those now less those at its beginning, its peak the most that was; what
 * scopes inside did counts, undone or not. */
Test(pool_scopes, statistics_of_nested_scopes_are_exact)
{
    AUTO_RIG rig = rig_open(64, NULL);
    void *older = take(rig.pool, 7 * KIB);
    const rebatch_scope outer = begin(rig.pool);
    void *a = take(rig.pool, 4 * KIB);
    const rebatch_scope inner = begin(rig.pool);
    void *b = take(rig.pool, 10 * KIB - 100);
    struct scope_stats in = scope_stats(rig.pool, inner);
    struct scope_stats out = scope_stats(rig.pool, outer);
    cr_assert_eq(in.live_bytes, 10 * (int64_t)KIB);
    cr_assert_eq(in.peak_bytes, 10 * (int64_t)KIB);
    cr_assert_eq(out.live_bytes, 14 * (int64_t)KIB);
    cr_assert_eq(out.peak_bytes, 14 * (int64_t)KIB);
    give(rig.pool, b);
    give(rig.pool, older); /* waits: the memory is not there for others */
    in = scope_stats(rig.pool, inner);
    cr_assert_eq(in.live_bytes, 0);
    cr_assert_eq(in.peak_bytes, 10 * (int64_t)KIB);
    rollback(rig.pool, inner);
    out = scope_stats(rig.pool, outer);
    cr_assert_eq(out.live_bytes, 4 * (int64_t)KIB);
    cr_assert_eq(out.peak_bytes, 14 * (int64_t)KIB);
    give(rig.pool, a);
    give(rig.pool, take(rig.pool, 12 * KIB));
    cr_assert_eq(scope_stats(rig.pool, outer).peak_bytes, 14 * (int64_t)KIB);
    commit(rig.pool, outer);
    give(rig.pool, older);
}

/* Rollback and commit need nothing of the heap. */
Test(pool_scopes, undoing_and_keeping_need_no_heap)
{
    AUTO_RIG rig = rig_open(512, NULL);
    void *older[40];
    for (size_t i = 0; i < 40; i++)
        older[i] = take(rig.pool, (i + 1) * KIB);
    const rebatch_scope outer = begin(rig.pool);
    const rebatch_scope inner = begin(rig.pool);
    for (size_t i = 0; i < 100; i++)
        (void)take(rig.pool, (i + 1) * KIB);
    rbi_heap_fail(1, UINT64_MAX);
    for (size_t i = 0; i < 40; i++)
        give(rig.pool, older[i]);
    rollback(rig.pool, inner);
    for (size_t i = 0; i < 40; i++)
        give(rig.pool, older[i]);
    commit(rig.pool, outer);
    rbi_heap_fail(0, 0);
    cr_assert_eq(stats_of(rig.pool).live_bytes, 0);
    cr_assert_eq(stats_of(rig.pool).frees, 40);
}
