/* Holds what a scope of one thread leaves to others: what those allocate and free is theirs.
 * Threads run in the order that a test says (be_thread). Seeds 1 to 20 for the random test. */
#include "unit/pool_help.h"

enum { DEVICE_PAGES = 2048 };

static bool is_in_use(rebatch_pool *pool, const void *pointer)
{
    size_t bytes;
    return rebatch_pool_block_bytes(&bytes, pool, pointer) == REBATCH_OK;
}

Test(pool_outside, blocks_of_other_threads_stay)
{
    AUTO_RIG rig = rig_open(64, NULL);
    const rebatch_scope scope = begin_own(rig.pool);
    void *own[2] = {take(rig.pool, 3 * KIB), NULL};
    be_thread(OTHER);
    void *other = take(rig.pool, 5 * KIB);
    be_thread(INSIDER);
    own[1] = take(rig.pool, 7 * KIB);
    rollback(rig.pool, scope);
    assert_valid(rig.pool);
    cr_assert_not(is_in_use(rig.pool, own[0]));
    cr_assert_not(is_in_use(rig.pool, own[1]));
    cr_assert(is_in_use(rig.pool, other));
    cr_assert_eq(stats_of(rig.pool).rolled_back_blocks, 2);
    give(rig.pool, other);
}

Test(pool_outside, what_other_threads_free_is_freed)
{
    for (int commits = 0; commits < 2; commits++) {
        AUTO_RIG rig = rig_open(64, NULL);
        void *older = take(rig.pool, 3 * KIB);
        const rebatch_scope scope = begin_own(rig.pool);
        void *inside = take(rig.pool, 3 * KIB);
        be_thread(OTHER);
        void *other = take(rig.pool, 3 * KIB);
        give(rig.pool, older);
        give(rig.pool, other);
        give(rig.pool, inside);
        cr_assert_eq(stats_of(rig.pool).live_bytes, 0);
        be_thread(INSIDER);
        if (commits)
            commit(rig.pool, scope);
        else
            rollback(rig.pool, scope);
        cr_assert_eq(stats_of(rig.pool).live_bytes, 0);
    }
}

/* A batch that was prepared beside an attempt is there again for the next one. */
Test(pool_outside, a_free_of_another_threads_block_is_undone)
{
    AUTO_RIG rig = rig_open(64, NULL);
    rebatch_scope scope = begin_own(rig.pool);
    be_thread(OTHER);
    void *batch = take(rig.pool, 3 * KIB);
    memset(batch, 0x5a, 3 * KIB);
    for (int attempt = 0; attempt < 2; attempt++) {
        be_thread(INSIDER);
        give(rig.pool, batch);
        cr_assert_eq(stats_of(rig.pool).deferred_bytes, 3 * KIB);
        void *next = take(rig.pool, 3 * KIB);
        cr_assert_neq(next, batch);
        memset(next, 0, 3 * KIB);
        rollback(rig.pool, scope);
        cr_assert(is_in_use(rig.pool, batch));
        cr_assert_eq(*(unsigned char *)batch, 0x5a);
        scope = begin_own(rig.pool);
    }
    give(rig.pool, batch);
    commit(rig.pool, scope);
    cr_assert_eq(stats_of(rig.pool).live_bytes, 0);
}

Test(pool_outside, a_thread_that_joined_is_inside)
{
    AUTO_RIG rig = rig_open(64, NULL);
    void *older = take(rig.pool, 3 * KIB);
    const rebatch_scope scope = begin_own(rig.pool);
    be_thread(OTHER);
    rbi_pool_joined = rig.pool;
    void *inside = take(rig.pool, 3 * KIB);
    give(rig.pool, older);
    rbi_pool_joined = NULL;
    void *other = take(rig.pool, 3 * KIB);
    be_thread(INSIDER);
    rollback(rig.pool, scope);
    cr_assert_not(is_in_use(rig.pool, inside));
    cr_assert(is_in_use(rig.pool, older));
    cr_assert(is_in_use(rig.pool, other));
    give(rig.pool, older);
    give(rig.pool, other);
}

/* When the one around it ends all threads are inside again, as outside of any. */
Test(pool_outside, a_scope_within_is_of_the_same_threads)
{
    AUTO_RIG rig = rig_open(64, NULL);
    const rebatch_scope around = begin_own(rig.pool);
    const rebatch_scope within = begin(rig.pool);
    be_thread(OTHER);
    void *others[2] = {take(rig.pool, 3 * KIB), take(rig.pool, 3 * KIB)};
    be_thread(INSIDER);
    give(rig.pool, others[0]);
    commit(rig.pool, within); /* waits for the one around it, too */
    cr_assert_eq(stats_of(rig.pool).deferred_bytes, 3 * KIB);
    void *own = take(rig.pool, 3 * KIB);
    rollback(rig.pool, around);
    cr_assert_not(is_in_use(rig.pool, own));
    cr_assert(is_in_use(rig.pool, others[0]));
    cr_assert(is_in_use(rig.pool, others[1]));
    const rebatch_scope any = begin(rig.pool);
    be_thread(OTHER);
    void *inside = take(rig.pool, 3 * KIB);
    rollback(rig.pool, any);
    cr_assert_not(is_in_use(rig.pool, inside));
    give(rig.pool, others[0]);
    give(rig.pool, others[1]);
}

static void count_block(void *user, const struct rbi_view_piece *block)
{
    (void)block;
    ++*(size_t *)user;
}

static size_t count_left(rebatch_pool *pool, const struct rbi_extent *extent)
{
    size_t count = 0;
    rbi_view_open(pool);
    rbi_view_each_live(pool, extent, count_block, &count);
    rbi_view_close(pool);
    return count;
}

Test(pool_outside, they_are_no_leak_of_the_scope)
{
    AUTO_RIG rig = rig_open(64, NULL);
    const rebatch_scope scope = begin_own(rig.pool);
    void *own = take(rig.pool, 3 * KIB);
    be_thread(OTHER);
    void *other = take(rig.pool, 5 * KIB);
    const uint64_t first = rbi_scope_first_sequence(rig.pool, scope);
    cr_assert_eq(count_left(rig.pool, &(struct rbi_extent){first, true}), 1);
    cr_assert_eq(count_left(rig.pool, &(struct rbi_extent){first, false}), 2);
    be_thread(INSIDER);
    commit(rig.pool, scope);
    give(rig.pool, own);
    give(rig.pool, other);
}

Test(pool_outside, a_copy_has_them_too)
{
    AUTO_RIG rig = rig_open(64, NULL);
    const rebatch_scope scope = begin_own(rig.pool);
    void *own = take(rig.pool, 3 * KIB);
    be_thread(OTHER);
    void *other = take(rig.pool, 5 * KIB);
    rebatch_device *device;
    rebatch_pool *copy;
    cr_assert_eq(rbi_pool_clone(&copy, &device, rig.pool), REBATCH_OK);
    rollback(copy, scope);
    cr_assert_not(is_in_use(copy, own));
    cr_assert(is_in_use(copy, other));
    rebatch_pool_destroy(copy);
    rebatch_device_close(device);
    be_thread(INSIDER);
    rollback(rig.pool, scope);
    give(rig.pool, other);
}

/* A scope of the program around all that takes in what any thread has done. */
Test(pool_outside, a_scope_around_takes_in_all_threads)
{
    AUTO_RIG rig = rig_open(64, NULL);
    const rebatch_scope around = begin(rig.pool);
    void *others[2];
    for (int i = 0; i < 2; i++) {
        const rebatch_scope scope = begin_own(rig.pool);
        be_thread(OTHER);
        others[i] = take(rig.pool, 3 * KIB);
        be_thread(INSIDER);
        commit(rig.pool, scope);
    }
    give(rig.pool, others[0]);
    cr_assert_eq(stats_of(rig.pool).deferred_bytes, 0);
    cr_assert_eq(stats_of(rig.pool).live_bytes, 3 * KIB);
    cr_assert_eq(stats_of(rig.pool).blocks, 1);
    const rebatch_scope scope = begin_own(rig.pool);
    give(rig.pool, others[1]);
    commit(rig.pool, scope);
    cr_assert_eq(stats_of(rig.pool).live_bytes, 0);
    be_thread(OTHER);
    void *last = take(rig.pool, 3 * KIB);
    be_thread(INSIDER);
    rollback(rig.pool, around);
    cr_assert_not(is_in_use(rig.pool, last));
}

/* What its peak was, and what is left, are what its own threads did. */
Test(pool_outside, they_do_not_count_in_the_scope)
{
    AUTO_RIG rig = rig_open(64, NULL);
    void *older = take(rig.pool, 40 * KIB);
    const rebatch_scope scope = begin_own(rig.pool);
    const rebatch_scope within = begin(rig.pool);
    give(rig.pool, take(rig.pool, 10 * KIB));
    void *own = take(rig.pool, 4 * KIB);
    be_thread(OTHER);
    void *others[2] = {take(rig.pool, 100 * KIB), take(rig.pool, 50 * KIB)};
    give(rig.pool, others[0]);
    give(rig.pool, older);
    be_thread(INSIDER);
    void *last = take(rig.pool, 8 * KIB);
    commit(rig.pool, within);
    const struct scope_stats stats = scope_stats(rig.pool, scope);
    cr_assert_eq(stats.live_bytes, 12 * KIB);
    cr_assert_eq(stats.peak_bytes, 12 * KIB);
    commit(rig.pool, scope);
    give(rig.pool, own);
    give(rig.pool, last);
    give(rig.pool, others[1]);
}

/* One of the program around it counts what all do, also while it is open. */
Test(pool_outside, a_scope_around_counts_all_threads)
{
    AUTO_RIG rig = rig_open(64, NULL);
    const rebatch_scope around = begin(rig.pool);
    const rebatch_scope scope = begin_own(rig.pool);
    give(rig.pool, take(rig.pool, 50 * KIB));
    be_thread(OTHER);
    give(rig.pool, take(rig.pool, 100 * KIB));
    be_thread(INSIDER);
    for (int ended = 0; ended < 2; ended++) {
        cr_assert_eq(scope_stats(rig.pool, around).peak_bytes, 100 * KIB);
        if (ended == 0) {
            cr_assert_eq(scope_stats(rig.pool, scope).peak_bytes, 50 * KIB);
            commit(rig.pool, scope);
        }
    }
    commit(rig.pool, around);
}

/* A block of the outer one that another thread frees is none of the inner: what both have seen up
 * to then is noted in each. */
Test(pool_outside, nested_scopes_keep_their_peaks)
{
    AUTO_RIG rig = rig_open(64, NULL);
    const rebatch_scope scope = begin_own(rig.pool);
    void *block = take(rig.pool, 10 * KIB);
    const rebatch_scope within = begin(rig.pool);
    give(rig.pool, take(rig.pool, 5 * KIB));
    be_thread(OTHER);
    give(rig.pool, block);
    be_thread(INSIDER);
    commit(rig.pool, within);
    cr_assert_eq(scope_stats(rig.pool, scope).peak_bytes, 15 * KIB);
    commit(rig.pool, scope);
}

Test(pool_outside, their_failures_are_not_the_scopes)
{
    AUTO_RIG rig = rig_open(64, NULL);
    void *pointer;
    rebatch_oom_report report;
    const rebatch_scope scope = begin_own(rig.pool);
    be_thread(OTHER);
    cr_assert_eq(rebatch_pool_alloc(&pointer, rig.pool, 65 * PAGE, NULL, 0), REBATCH_OOM);
    cr_assert_eq(rbi_pool_oom_count(rig.pool), 0);
    be_thread(INSIDER);
    cr_assert_eq(rebatch_pool_alloc(&pointer, rig.pool, 66 * PAGE, NULL, 0), REBATCH_OOM);
    be_thread(OTHER);
    cr_assert_eq(rebatch_pool_alloc(&pointer, rig.pool, 67 * PAGE, NULL, 0), REBATCH_OOM);
    cr_assert_eq(rbi_pool_oom_count(rig.pool), 1);
    rbi_pool_last_own_oom(&report, rig.pool);
    cr_assert_eq(report.asked_bytes, 66 * PAGE);
    cr_assert_eq(rebatch_pool_last_oom(&report, rig.pool), REBATCH_OK);
    cr_assert_eq(report.asked_bytes, 67 * PAGE);
    cr_assert_eq(stats_of(rig.pool).ooms, 3);
    be_thread(INSIDER);
    rollback(rig.pool, scope);
}

/* ---- anything ---- */

static size_t draw_bytes(uint64_t *random)
{
    const size_t most = draw(random) % 4 == 0 ? 40 * PAGE : PAGE;
    return 1 + draw(random) % most;
}

/* What a naive model knows of a block. */
struct known {
    unsigned char *block;
    size_t bytes;
    unsigned char mark;
    size_t depth; /* of scopes when the owner_thread allocated it; 0: before, or another thread's */
    size_t freed; /* its free waits for the end of so many scopes; 0: for none */
};

enum { MOST = 200, DEPTH = 4 };

struct model {
    struct known known[MOST];
    size_t count;
    rebatch_scope scopes[DEPTH];
    size_t depth;
};

static void forget(struct model *m, size_t i)
{
    m->known[i] = m->known[--m->count];
}

static void model_free(struct model *m, rebatch_pool *pool, size_t i, bool is_inside)
{
    struct known *const k = &m->known[i];
    if (k->freed)
        return;
    cr_assert_eq(*k->block, k->mark);
    cr_assert_eq(k->block[k->bytes - 1], k->mark);
    give(pool, k->block);
    if (is_inside && k->depth < m->depth)
        k->freed = m->depth;
    else
        forget(m, i);
}

static void model_end(struct model *m, rebatch_pool *pool, bool commits)
{
    be_thread(INSIDER);
    if (commits)
        commit(pool, m->scopes[m->depth - 1]);
    else
        rollback(pool, m->scopes[m->depth - 1]);
    m->depth--;
    for (size_t i = m->count; i-- > 0;) {
        struct known *const k = &m->known[i];
        const bool was_inside = k->depth > m->depth;
        if (!commits) {
            k->freed = k->freed > m->depth ? 0 : k->freed;
            if (was_inside)
                forget(m, i);
            continue;
        }
        k->depth = k->depth > m->depth ? m->depth : k->depth;
        if (k->freed > m->depth)
            k->freed = k->depth < m->depth ? m->depth : 0;
        if (k->freed == 0 && !is_in_use(pool, k->block))
            forget(m, i);
    }
}

static void model_call(struct model *m, rebatch_pool *pool, uint64_t *random)
{
    const bool is_inside = draw(random) % 2 != 0;
    be_thread(is_inside ? INSIDER : OTHER);
    const uint64_t what = draw(random) % 16;
    if (what == 0 && m->depth < DEPTH) {
        m->scopes[m->depth] = m->depth == 0 ? begin_own(pool) : begin(pool);
        m->depth++;
    } else if (what == 1 && m->depth > 0) {
        model_end(m, pool, draw(random) % 2 != 0);
    } else if (what < 9 && m->count < MOST) {
        const size_t bytes = draw(random) % 3 == 0 ? draw_bytes(random) : 1 + draw(random) % KIB;
        unsigned char *const block = take(pool, bytes);
        const unsigned char mark = (unsigned char)draw(random);
        *block = block[bytes - 1] = mark;
        m->known[m->count++] = (struct known){block, bytes, mark, is_inside ? m->depth : 0, 0};
    } else if (m->count > 0) {
        model_free(m, pool, draw(random) % m->count, is_inside);
    }
}

Test(pool_outside, any_calls_of_any_threads)
{
    enum { CALLS = 20000 };
    for (uint64_t seed = 1; seed <= 20; seed++) {
        AUTO_RIG rig = rig_open(DEVICE_PAGES, NULL);
        static struct model m;
        m = (struct model){.count = 0};
        uint64_t random = seed;
        for (int i = 0; i < CALLS; i++) {
            model_call(&m, rig.pool, &random);
            if (i % 1000 == 0)
                assert_valid(rig.pool);
        }
        while (m.depth > 0)
            model_end(&m, rig.pool, true);
        while (m.count > 0)
            model_free(&m, rig.pool, 0, false);
        cr_assert_eq(stats_of(rig.pool).live_bytes, 0);
    }
}
