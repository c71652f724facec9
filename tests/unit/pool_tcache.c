/* Holds the rules of threads' caches: what a cache has is counted, found, taken back and refused as
 * if there were none. Threads run in the order that a test says (be_thread), but for the last test.
 * Seeds: 21, 22. */
#include "unit/lazy_device.h"
#include "unit/pool_help.h"

static struct rbi_tcache *cache_of(rebatch_pool *pool, uint64_t thread)
{
    return &pool->tcaches[thread % RBI_TCACHES];
}

static size_t lent(rebatch_pool *pool)
{
    size_t sum = 0;
    for (uint64_t i = 0; pool->tcaches && i < RBI_TCACHES; i++)
        sum += cache_of(pool, i)->lent;
    return sum;
}

/* A pool that threads have waited for, and the first of them; it has been half full, so that the
 * caches are not emptied for a new peak. */
static struct rig open_contended(size_t granules, const rebatch_pool_options *options)
{
    struct rig rig = rig_open(granules, options);
    contend(rig.pool);
    be_thread(1);
    give(rig.pool, take(rig.pool, granules / 2 * GRANULE));
    return rig;
}

static void take_many(rebatch_pool *pool, void **blocks, size_t count, size_t bytes)
{
    for (size_t i = 0; i < count; i++)
        blocks[i] = take(pool, bytes);
}

static void give_many(rebatch_pool *pool, void **blocks, size_t count)
{
    for (size_t i = 0; i < count; i++)
        give(pool, blocks[i]);
}

/* ---- when there are caches ---- */

Test(pool_tcache, threads_that_take_turns_have_none)
{
    struct rig rig = rig_open(32, NULL);
    contend(rig.pool);
    rig.pool->lock.waits = 0;
    for (uint64_t i = 0; i < 100; i++) {
        be_thread(1 + i % 3);
        give(rig.pool, take(rig.pool, KIB));
    }
    cr_assert_null(rig.pool->tcaches);
    cr_assert_eq(stats_of(rig.pool).live_peak_bytes, KIB);
    rig_close(&rig);
}

/* With its lock held by somebody, these would wait for ever. */
Test(pool_tcache, blocks_of_a_cache_need_no_lock, .timeout = 20)
{
    struct rig rig = open_contended(32, NULL);
    void *blocks[8];
    take_many(rig.pool, blocks, 8, KIB);
    cr_assert_eq(cache_of(rig.pool, 1)->lent, 15);
    rbi_lock_take(&rig.pool->lock);
    give(rig.pool, blocks[3]);
    cr_assert_eq(take(rig.pool, KIB - 100), blocks[3], "the last freed comes first");
    for (int i = 0; i < 7; i++)
        give(rig.pool, take(rig.pool, 600));
    rbi_lock_give(&rig.pool->lock);
    assert_valid(rig.pool);
    rig_close(&rig);
}

static void note_call(void *user, enum rbi_pool_call call, const void *address, size_t bytes,
                      rebatch_stream stream)
{
    (void)address;
    (void)bytes;
    (void)stream;
    ((int *)user)[call]++;
}

/* Whatever asks for more of a call than the fast path does has every call go its way. */
Test(pool_tcache, nothing_is_lent_where_more_is_asked_of_a_call)
{
    int calls[3] = {0};
    struct rig rig = open_contended(64, NULL);
    void *before = take(rig.pool, KIB);
    cr_assert_eq(lent(rig.pool), 1);
    rbi_pool_set_recorder(rig.pool, &(struct rbi_pool_recorder){note_call, calls});
    give(rig.pool, take(rig.pool, KIB));
    give(rig.pool, before);
    cr_assert(calls[RBI_POOL_ALLOC] == 1 && calls[RBI_POOL_FREE] == 2 && lent(rig.pool) == 0);
    rbi_pool_set_recorder(rig.pool, NULL);
    (void)take(rig.pool, RBI_TCACHE_BLOCK_MOST + 1);
    cr_assert_eq(lent(rig.pool), 0);
    (void)take(rig.pool, RBI_TCACHE_BLOCK_MOST);
    cr_assert_eq(lent(rig.pool), 1);
    rig_close(&rig);
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.events = 4;
    rig = open_contended(32, &options);
    give(rig.pool, take(rig.pool, KIB));
    cr_assert_null(rig.pool->tcaches);
    rig_close(&rig);
}

/* ---- counting ---- */

static rebatch_tag_usage usage_of(rebatch_pool *pool, rebatch_tag tag)
{
    rebatch_tag_usage usage;
    cr_assert_eq(rebatch_pool_get_tag_usage(&usage, pool, tag), REBATCH_OK);
    return usage;
}

Test(pool_tcache, what_is_done_in_caches_is_counted_when_somebody_looks)
{
    struct rig rig = open_contended(64, NULL);
    rebatch_tag tag;
    cr_assert_eq(rebatch_pool_tag(&tag, rig.pool, "mine"), REBATCH_OK);
    const rebatch_pool_stats before = stats_of(rig.pool);
    void *kept[2];
    for (uint64_t thread = 1; thread <= 2; thread++) {
        be_thread(thread);
        for (int i = 0; i < 100; i++)
            give(rig.pool, take(rig.pool, 700));
        cr_assert_eq(rebatch_pool_alloc(&kept[thread - 1], rig.pool, 1000, NULL, tag), REBATCH_OK);
    }
    cr_assert(cache_of(rig.pool, 1)->lent > 0 && cache_of(rig.pool, 2)->lent > 0);
    cr_assert_eq(usage_of(rig.pool, tag).live_bytes, 2 * KIB);
    const rebatch_pool_stats stats = stats_of(rig.pool);
    cr_assert_eq(lent(rig.pool), 0);
    cr_assert_eq(stats.allocations, before.allocations + 202);
    cr_assert_eq(stats.frees, before.frees + 200);
    cr_assert(stats.blocks == 2 && stats.live_bytes == 2 * KIB && stats.requested_bytes == 2000);
    cr_assert_eq(stats.freed_total_bytes, before.freed_total_bytes + 200 * KIB);
    cr_assert_eq(stats.allocated_total_bytes, before.allocated_total_bytes + 202 * KIB);
    cr_assert(stats.live_peak_bytes >= 2 * KIB);
    give_many(rig.pool, kept, 2);
    cr_assert_eq(usage_of(rig.pool, tag).live_bytes, 0);
    rig_close(&rig);
}

/* High by what is free in caches at most, and never low. */
Test(pool_tcache, peaks_are_never_low)
{
    struct rig rig = open_contended(256, NULL);
    cr_assert_eq(rebatch_pool_reset_peaks(rig.pool), REBATCH_OK);
    uint64_t random = 21, live = 0, peak = 0;
    void *blocks[200] = {NULL};
    for (int n = 0; n < 20000; n++) {
        const size_t k = (size_t)(draw(&random) % 200);
        be_thread(1 + k % 3);
        live -= blocks[k] ? KIB * (1 + k % 8) : 0;
        give(rig.pool, blocks[k]);
        blocks[k] = draw(&random) % 2 ? take(rig.pool, KIB * (1 + k % 8)) : NULL;
        live += blocks[k] ? KIB * (1 + k % 8) : 0;
        peak = rbi_max(peak, live);
    }
    const rebatch_pool_stats stats = stats_of(rig.pool);
    cr_assert_eq(stats.live_bytes, live);
    cr_assert(stats.live_peak_bytes >= peak);
    cr_assert(stats.live_peak_bytes <= peak + 3 * RBI_TCACHE_GRANULES_MOST * GRANULE);
    cr_assert_eq(rebatch_pool_reset_peaks(rig.pool), REBATCH_OK);
    cr_assert_eq(stats_of(rig.pool).live_peak_bytes, live);
    give_many(rig.pool, blocks, 200);
    rig_close(&rig);
}

/* While a pool fills, the caches are looked into so often that tags know who holds what. */
Test(pool_tcache, who_holds_what_at_the_peak_is_known_but_for_a_small_part)
{
    struct rig rig = rig_open(512, NULL);
    contend(rig.pool);
    rebatch_tag tags[2];
    cr_assert_eq(rebatch_pool_tag(&tags[0], rig.pool, "a"), REBATCH_OK);
    cr_assert_eq(rebatch_pool_tag(&tags[1], rig.pool, "b"), REBATCH_OK);
    void *blocks[3000];
    for (size_t i = 0; i < 3000; i++) {
        be_thread(1 + i % 2);
        cr_assert_eq(rebatch_pool_alloc(&blocks[i], rig.pool, 4 * KIB, NULL, tags[i % 2]),
                     REBATCH_OK);
    }
    for (size_t i = 0; i < 3000; i++) {
        be_thread(1 + i % 2);
        give(rig.pool, blocks[i]);
    }
    const uint64_t peak = stats_of(rig.pool).live_peak_bytes;
    for (int i = 0; i < 2; i++) {
        cr_assert(usage_of(rig.pool, tags[i]).peak_bytes + 256 * KIB >= 6000 * KIB);
        cr_assert(usage_of(rig.pool, tags[i]).peak_bytes <= 6000 * KIB);
        cr_assert(usage_of(rig.pool, tags[i]).at_peak_bytes + 256 * KIB >= peak / 2);
    }
    rig_close(&rig);
}

/* ---- scopes ---- */

Test(pool_tcache, a_rollback_takes_back_what_caches_gave_out)
{
    struct rig rig = open_contended(64, NULL);
    void *older[3], *inside[3][10];
    for (uint64_t t = 0; t < 3; t++) {
        be_thread(1 + t);
        older[t] = take(rig.pool, KIB);
    }
    const rebatch_scope scope = begin(rig.pool);
    for (uint64_t t = 0; t < 3; t++) {
        be_thread(1 + t);
        take_many(rig.pool, inside[t], 10, KIB);
        give(rig.pool, inside[t][9]);
        give(rig.pool, older[t]); /* waits for the scope's end */
    }
    cr_assert_eq(lent(rig.pool), 3 * 15);
    cr_assert_eq(rebatch_scope_rollback(rig.pool, scope), REBATCH_OK);
    cr_assert_eq(lent(rig.pool), 0);
    rebatch_pool_stats stats = stats_of(rig.pool);
    cr_assert(stats.rolled_back_blocks == 27 && stats.blocks == 3 && stats.live_bytes == 3 * KIB);
    assert_valid(rig.pool);
    for (uint64_t t = 0; t < 3; t++) {
        be_thread(3 - t);
        give_many(rig.pool, inside[t], 9); /* too late */
        give(rig.pool, older[t]);
    }
    stats = stats_of(rig.pool);
    cr_assert(stats.late_frees == 27 && stats.blocks == 0 && stats.frees == 7);
    rig_close(&rig);
}

/* A block that is lent ahead is not given out yet. */
Test(pool_tcache, late_frees_are_ignored_until_the_address_is_given_out_again)
{
    struct rig rig = open_contended(64, NULL);
    void *late[16], *again[16];
    const rebatch_scope scope = begin(rig.pool);
    take_many(rig.pool, late, 16, KIB);
    cr_assert_eq(rebatch_scope_rollback(rig.pool, scope), REBATCH_OK);
    for (int merged = 0; merged < 2; merged++) {
        const uint64_t before = stats_of(rig.pool).late_frees;
        if (merged)
            settle(rig.pool);
        take_many(rig.pool, again, 5, KIB);
        cr_assert(lent(rig.pool) > 5);
        size_t ignored = 0;
        for (size_t i = 0; i < 16; i++) {
            bool is_again = false;
            for (size_t j = 0; j < 5; j++)
                is_again = is_again || late[i] == again[j];
            if (!is_again) {
                give(rig.pool, late[i]);
                ignored++;
            }
        }
        cr_assert_eq(ignored, 11);
        cr_assert_eq(stats_of(rig.pool).late_frees, before + ignored);
        const rebatch_scope undo = begin(rig.pool);
        give_many(rig.pool, again, 5);
        cr_assert_eq(rebatch_scope_commit(rig.pool, undo), REBATCH_OK);
        cr_assert_eq(stats_of(rig.pool).blocks, 0);
        for (size_t j = 0; j < 5; j++) /* these have been given out and freed: no late ones */
            assert_refused(rebatch_pool_free(rig.pool, again[j]), REBATCH_E_INVALID,
                           "freed already");
        const rebatch_scope redo = begin(rig.pool);
        for (size_t j = 0; j < 16; j++)
            late[j] = take(rig.pool, KIB);
        cr_assert_eq(rebatch_scope_rollback(rig.pool, redo), REBATCH_OK);
    }
    rig_close(&rig);
}

Test(pool_tcache, a_commit_carries_out_frees_of_older_blocks)
{
    struct rig rig = open_contended(64, NULL);
    void *older = take(rig.pool, KIB), *inside[4];
    const rebatch_scope scope = begin(rig.pool);
    take_many(rig.pool, inside, 4, KIB);
    be_thread(2);
    give(rig.pool, older);
    rebatch_scope_stats stats;
    cr_assert_eq(rebatch_scope_get_stats(&stats, rig.pool, scope), REBATCH_OK);
    cr_assert(stats.allocations == 4 && stats.live_bytes == 4 * KIB);
    cr_assert(stats.requested_bytes == 4 * KIB && stats.largest_bytes == KIB);
    cr_assert(stats.peak_bytes >= (int64_t)(4 * KIB));
    cr_assert_eq(stats_of(rig.pool).deferred_bytes, KIB);
    cr_assert_eq(rebatch_scope_commit(rig.pool, scope), REBATCH_OK);
    cr_assert_eq(stats_of(rig.pool).blocks, 4);
    give_many(rig.pool, inside, 4);
    rig_close(&rig);
}

static void add_up(void *user, const void *address, size_t bytes)
{
    cr_assert_not_null(address);
    *(size_t *)user += bytes;
}

Test(pool_tcache, a_leak_report_names_what_caches_gave_out)
{
    struct rig rig = open_contended(64, NULL);
    void *older = take(rig.pool, KIB), *blocks[3];
    const rebatch_scope scope = begin(rig.pool);
    const uint64_t births = rbi_pool_births(rig.pool);
    take_many(rig.pool, blocks, 3, 2 * KIB);
    be_thread(2);
    void *other = take(rig.pool, 3 * KIB);
    rebatch_leak_report report;
    cr_assert_eq(rebatch_scope_get_leaks(&report, rig.pool, scope), REBATCH_OK);
    cr_assert(report.blocks == 4 && report.live_bytes == 9 * KIB);
    cr_assert_eq(report.largest[0].address, other);
    for (size_t i = 0; i < 3; i++)
        cr_assert(report.largest[1 + i].address == blocks[i], "in the order of their allocation");
    size_t bytes = 0;
    rbi_pool_each_live(rig.pool, &(struct rbi_extent){births, false}, add_up, &bytes);
    cr_assert_eq(bytes, 9 * KIB);
    cr_assert_eq(rebatch_scope_commit(rig.pool, scope), REBATCH_OK);
    give(rig.pool, older);
    rig_close(&rig);
}

/* ---- wrong frees, and those of other threads ---- */

Test(pool_tcache, a_wrong_pointer_is_refused_with_the_reason)
{
    struct rig rig = open_contended(64, NULL);
    for (uint64_t thread = 1; thread <= 2; thread++) {
        be_thread(1);
        char *block = take(rig.pool, 2 * KIB), *freed = take(rig.pool, 2 * KIB);
        give(rig.pool, freed);
        be_thread(thread);
        assert_refused(rebatch_pool_free(rig.pool, freed), REBATCH_E_INVALID, "freed already");
        assert_refused(rebatch_pool_use_on(rig.pool, freed, NULL), REBATCH_E_INVALID, "freed");
        be_thread(1);
        char *again = take(rig.pool, 2 * KIB);
        be_thread(thread);
        assert_refused(rebatch_pool_free(rig.pool, block + 1), REBATCH_E_INVALID, "1 bytes inside");
        assert_refused(rebatch_pool_free(rig.pool, &rig), REBATCH_E_INVALID, "of this pool");
        give(rig.pool, again);
        give(rig.pool, block);
        assert_valid(rig.pool);
    }
    cr_assert_eq(stats_of(rig.pool).blocks, 0);
    rig_close(&rig);
}

/* One block only: a consumer does not empty the producer's cache. */
Test(pool_tcache, another_thread_frees_a_block_by_itself)
{
    struct rig rig = open_contended(64, NULL);
    void *blocks[8];
    take_many(rig.pool, blocks, 8, KIB);
    const size_t before = lent(rig.pool);
    be_thread(2);
    give(rig.pool, blocks[2]);
    give(rig.pool, blocks[5]);
    cr_assert_eq(lent(rig.pool), before - 2);
    size_t bytes;
    cr_assert_eq(rebatch_pool_block_bytes(&bytes, rig.pool, blocks[0]), REBATCH_OK);
    cr_assert(bytes == KIB && lent(rig.pool) == before - 3);
    be_thread(1);
    assert_refused(rebatch_pool_free(rig.pool, blocks[2]), REBATCH_E_INVALID, "freed already");
    cr_assert_eq(stats_of(rig.pool).blocks, 6);
    rig_close(&rig);
}

/* Numbers of threads that fall together share a cache. */
Test(pool_tcache, threads_may_share_a_cache)
{
    struct rig rig = open_contended(64, NULL);
    void *blocks[8];
    take_many(rig.pool, blocks, 8, KIB);
    be_thread(1 + RBI_TCACHES);
    const size_t before = lent(rig.pool);
    give_many(rig.pool, blocks, 8);
    cr_assert_eq(lent(rig.pool), before);
    cr_assert_eq(stats_of(rig.pool).blocks, 0);
    rig_close(&rig);
}

/* ---- bounds and pressure ---- */

static void check_bound(rebatch_pool *pool, size_t most)
{
    struct rbi_tcache *cache = cache_of(pool, 1);
    cr_assert_eq(cache->free_most, most);
    uint64_t random = 22;
    static void *blocks[3000];
    for (size_t i = 0; i < 3000; i++)
        blocks[i] = take(pool, 1 + (size_t)(draw(&random) % RBI_TCACHE_BLOCK_MOST));
    size_t largest = 0;
    for (size_t i = 0; i < 3000; i++) {
        give(pool, blocks[i]);
        cr_assert(cache->free_bytes <= most);
        largest = rbi_max(largest, cache->free_bytes);
    }
    cr_assert(largest > most / 2);
    assert_valid(pool);
}

Test(pool_tcache, what_is_free_in_a_cache_is_bounded_in_bytes)
{
    struct rig rig = open_contended(2000, NULL);
    give(rig.pool, take(rig.pool, KIB));
    check_bound(rig.pool, RBI_TCACHE_GRANULES_MOST * GRANULE);
    rig_close(&rig);
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.limit_bytes = 1500 * GRANULE;
    rig = open_contended(2000, &options);
    give(rig.pool, take(rig.pool, KIB));
    check_bound(rig.pool, RBI_TCACHE_GRANULES_MOST * GRANULE);
    cr_assert_eq(rebatch_pool_set_limit(rig.pool, 20 * GRANULE), REBATCH_OK);
    give(rig.pool, take(rig.pool, KIB));
    cr_assert_eq(cache_of(rig.pool, 1)->free_most, 20 * GRANULE / RBI_TCACHE_LIMIT_PARTS);
    rig_close(&rig);
}

/* All memory is free, and all of it in caches of other threads. */
Test(pool_tcache, no_request_fails_while_caches_have_memory)
{
    enum { GRANULES = 8, COUNT = GRANULES * 2 };
    for (int plain = 0; plain < 2; plain++) {
        struct rig rig = plain ? rig_open_plain(GRANULES, NULL) : rig_open(GRANULES, NULL);
        contend(rig.pool);
        void *blocks[COUNT];
        for (size_t i = 0; i < COUNT; i++) {
            be_thread(1 + i % 4);
            blocks[i] = take(rig.pool, GRANULE / 2);
        }
        be_thread(9);
        void *none;
        cr_assert_eq(rebatch_pool_alloc(&none, rig.pool, KIB, NULL, 0), REBATCH_OOM);
        cr_assert_eq(lent(rig.pool), 0);
        for (size_t i = 0; i < COUNT; i++) {
            be_thread(1 + i % 4);
            give(rig.pool, blocks[i]);
            blocks[i] = take(rig.pool, GRANULE / 2);
        }
        for (size_t i = 0; i < COUNT; i++) {
            be_thread(1 + i % 4);
            give(rig.pool, blocks[i]);
        }
        cr_assert_eq(lent(rig.pool), COUNT);
        be_thread(9);
        give(rig.pool, take(rig.pool, plain ? 4 * GRANULE : GRANULES * GRANULE));
        rig_close(&rig);
    }
}

Test(pool_tcache, trim_and_limit_reach_what_caches_have)
{
    struct rig rig = open_contended(16, NULL);
    void *blocks[32];
    take_many(rig.pool, blocks, 32, 16 * KIB);
    give_many(rig.pool, blocks, 32);
    cr_assert(lent(rig.pool) > 0);
    size_t bytes;
    cr_assert_eq(rebatch_pool_available(&bytes, rig.pool), REBATCH_OK);
    cr_assert_eq(bytes, 16 * GRANULE);
    take_many(rig.pool, blocks, 32, 16 * KIB);
    give_many(rig.pool, blocks, 32);
    cr_assert_eq(rebatch_pool_trim(rig.pool, 0, &bytes), REBATCH_OK);
    cr_assert(bytes >= 8 * GRANULE);
    cr_assert(stats_of(rig.pool).reserved_bytes == 0);
    take_many(rig.pool, blocks, 32, 16 * KIB);
    give_many(rig.pool, blocks, 32);
    cr_assert_eq(rebatch_pool_set_limit(rig.pool, 4 * GRANULE), REBATCH_OK);
    cr_assert(stats_of(rig.pool).reserved_bytes <= 4 * GRANULE);
    rig_close(&rig);
}

/* What the pool promised is served, though another thread has small blocks of it. */
Test(pool_tcache, a_promise_holds)
{
    struct rig rig = open_contended(8, NULL);
    void *blocks[16];
    be_thread(2);
    take_many(rig.pool, blocks, 16, 16 * KIB);
    give_many(rig.pool, blocks, 16);
    be_thread(1);
    cr_assert_eq(rebatch_pool_reserve(rig.pool, 8 * GRANULE, NULL), REBATCH_OK);
    for (uint64_t i = 0; i < 128; i++) {
        be_thread(1 + i % 3);
        (void)take(rig.pool, 4 * KIB);
    }
    rig_close(&rig);
}

struct pressed {
    rebatch_pool *pool;
    void *blocks[32];
    size_t count;
    uint64_t as;
};

static size_t give_up_four(size_t wanted_bytes, void *user)
{
    struct pressed *p = user;
    void *none;
    (void)wanted_bytes;
    assert_refused(rebatch_pool_alloc(&none, p->pool, KIB, NULL, 0), REBATCH_E_STATE, "pressure");
    for (int i = 0; i < 4 && p->count > 0; i++)
        give(p->pool, p->blocks[--p->count]);
    if (p->as) { /* meanwhile another thread is at work */
        rbi_pool_pressing = NULL;
        const uint64_t self = rbi_lock_thread;
        be_thread(p->as);
        while (p->count > 16)
            give(p->pool, p->blocks[--p->count]);
        be_thread(self);
        rbi_pool_pressing = p->pool;
    }
    return 0;
}

/* The callback says that it gave up nothing: it is seen that something was freed all the same. */
Test(pool_tcache, what_a_pressure_callback_frees_is_found)
{
    for (uint64_t as = 0; as < 2; as++) {
        struct rig rig = open_contended(8, NULL);
        struct pressed pressed = {rig.pool, {NULL}, 32, as};
        take_many(rig.pool, pressed.blocks, 32, 16 * KIB);
        cr_assert(lent(rig.pool) > 0);
        cr_assert_eq(rebatch_pool_add_pressure(rig.pool, give_up_four, &pressed), REBATCH_OK);
        void *block = take(rig.pool, GRANULE);
        cr_assert_eq(pressed.count, as ? 16 : 28);
        give(rig.pool, block);
        give_many(rig.pool, pressed.blocks, pressed.count);
        rig_close(&rig);
    }
}

/* Gives up nothing, while another thread fills its cache. */
static size_t meanwhile(size_t wanted_bytes, void *user)
{
    void *blocks[8];
    (void)wanted_bytes;
    rbi_pool_pressing = NULL;
    be_thread(2);
    take_many(user, blocks, 8, KIB);
    give_many(user, blocks, 8);
    cr_assert(lent(user) > 0);
    be_thread(1);
    rbi_pool_pressing = user;
    return 0;
}

Test(pool_tcache, an_oom_report_counts_what_is_in_use)
{
    struct rig rig = open_contended(8, NULL);
    (void)take(rig.pool, GRANULE);
    void *block;
    rebatch_oom_report report;
    cr_assert_eq(rebatch_pool_add_pressure(rig.pool, meanwhile, rig.pool), REBATCH_OK);
    cr_assert_eq(rebatch_pool_alloc(&block, rig.pool, 8 * GRANULE, NULL, 0), REBATCH_OOM);
    cr_assert_eq(rebatch_pool_last_oom(&report, rig.pool), REBATCH_OK);
    cr_assert(report.live_bytes == GRANULE && report.would_fit_bytes == 7 * GRANULE);
    rig_close(&rig);
}

/* ---- streams ---- */

/* A cache serves one stream, and goes over to another one when its thread has. */
Test(pool_tcache, a_cache_is_of_one_stream)
{
    struct rig rig = open_contended(64, NULL);
    rebatch_stream stream;
    cr_assert_eq(rebatch_stream_create(&stream, rig.device), REBATCH_OK);
    void *blocks[100];
    take_many(rig.pool, blocks, 8, KIB);
    for (size_t i = 8; i < 20; i++)
        blocks[i] = take_on(rig.pool, KIB, stream);
    cr_assert_eq(cache_of(rig.pool, 1)->stream, NULL);
    cr_assert_eq(cache_of(rig.pool, 1)->lent, 15);
    for (size_t i = 20; i < 100; i++)
        blocks[i] = take_on(rig.pool, KIB, stream);
    cr_assert_eq(cache_of(rig.pool, 1)->stream, stream);
    assert_valid(rig.pool);
    give_many(rig.pool, blocks, 100);
    cr_assert_eq(stats_of(rig.pool).blocks, 0);
    rebatch_pool_destroy(rig.pool);
    rebatch_stream_destroy(rig.device, stream);
    rebatch_device_close(rig.device);
}

/* Work that used a block before it came into a cache's list is waited for by other streams. */
Test(pool_tcache, other_streams_wait_for_what_comes_from_a_cache)
{
    rebatch_device *device = lazy_open(4 * GRANULE, GRANULE, true);
    rebatch_pool *pool;
    rebatch_stream other;
    cr_assert_eq(rebatch_pool_create(&pool, device, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_stream_create(&other, device), REBATCH_OK);
    contend(pool);
    void *blocks[16];
    be_thread(1);
    for (int round = 0; round < 2; round++) {
        for (size_t i = 0; i < 16; i++) {
            blocks[i] = take(pool, 16 * KIB);
            lazy_use(NULL, blocks[i], 16 * KIB);
        }
        give_many(pool, blocks, 16);
    }
    cr_assert(lent(pool) > 0);
    be_thread(2);
    for (size_t i = 0; i < 4; i++) { /* the device says if work was not waited for */
        void *block = take_on(pool, GRANULE, other);
        lazy_check_fresh(other, block, GRANULE);
    }
    assert_valid(pool);
    rebatch_pool_destroy(pool);
    rebatch_stream_destroy(device, other);
    lazy_close(device);
}

/* ---- many blocks, and no host memory ---- */

/* More than a cache's table holds at its largest: the older ones become like others. */
Test(pool_tcache, any_number_of_blocks_may_be_in_use)
{
    enum { COUNT = 40000 };
    rebatch_device *device;
    rebatch_pool *pool;
    cr_assert_eq(rebatch_device_open_dry(&device, REBATCH_UNLIMITED, GRANULE), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&pool, device, NULL), REBATCH_OK);
    contend(pool);
    be_thread(1);
    static void *blocks[COUNT];
    void *large = take(pool, COUNT * KIB); /* so that no peak rises with the small ones */
    give(pool, large);
    size_t most = 0;
    for (size_t i = 0; i < COUNT; i++) {
        blocks[i] = take(pool, 1 + i % UNIT);
        most = rbi_max(most, lent(pool));
    }
    cr_assert(most > 30000 && lent(pool) < COUNT);
    for (size_t i = 0; i < COUNT; i += 2)
        give(pool, blocks[i]);
    assert_valid(pool);
    cr_assert_eq(stats_of(pool).blocks, COUNT / 2);
    for (size_t i = 1; i < COUNT; i += 2)
        give(pool, blocks[i]);
    assert_valid(pool);
    cr_assert_eq(stats_of(pool).live_bytes, 0);
    rebatch_pool_destroy(pool);
    rebatch_device_close(device);
}

/* Without host memory for a cache, or a larger table, calls go the pool's way. */
Test(pool_tcache, every_heap_call_fails)
{
    for (uint64_t nth = 1; nth < 40; nth++) {
        struct rig rig = open_contended(64, NULL);
        void *blocks[600];
        size_t count = 0;
        rbi_heap_fail(nth, nth % 2 ? 1 : UINT64_MAX);
        for (size_t i = 0; i < 600; i++) {
            be_thread(1 + i % 2);
            const rebatch_status status =
                rebatch_pool_alloc(&blocks[count], rig.pool, KIB, NULL, 0);
            cr_assert(status == REBATCH_OK || status == REBATCH_E_HOST_OOM);
            count += status == REBATCH_OK;
        }
        rbi_heap_fail(0, 0);
        assert_valid(rig.pool);
        cr_assert_eq(stats_of(rig.pool).blocks, count);
        give_many(rig.pool, blocks, count);
        cr_assert_eq(stats_of(rig.pool).live_bytes, 0);
        rig_close(&rig);
    }
}

Test(pool_tcache, a_pool_may_go_while_caches_have_blocks)
{
    const int64_t live = rbi_heap_live();
    struct rig rig = open_contended(64, NULL);
    for (uint64_t i = 0; i < 40; i++) {
        be_thread(1 + i % 4);
        void *block = take(rig.pool, KIB);
        if (i % 2)
            give(rig.pool, block);
    }
    cr_assert(lent(rig.pool) > 0);
    rebatch_pool_destroy(rig.pool);
    rebatch_memory_info info;
    cr_assert_eq(rebatch_device_memory(rig.device, &info), REBATCH_OK);
    cr_assert_eq(info.used_bytes, 0);
    rebatch_device_close(rig.device);
    cr_assert_eq(rbi_heap_live(), live);
}

/* ---- real threads ---- */

static void *churn(void *user)
{
    rebatch_pool *pool = user;
    void *blocks[64] = {NULL};
    for (size_t i = 0; i < 20000; i++) {
        const size_t k = i * 7 % 64;
        if (blocks[k] && rebatch_pool_free(pool, blocks[k]))
            return pool;
        if (rebatch_pool_alloc(&blocks[k], pool, 512 + 512 * (i * 13 % 64), NULL, 0))
            return pool;
        memset(blocks[k], (int)i, 512);
    }
    for (size_t k = 0; k < 64; k++)
        if (rebatch_pool_free(pool, blocks[k]))
            return pool;
    return NULL;
}

Test(pool_tcache, threads_run_at_once)
{
    struct rig rig = rig_open(400, NULL);
    contend(rig.pool);
    pthread_t threads[4];
    void *failed;
    for (int i = 0; i < 4; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, churn, rig.pool), 0);
    for (int i = 0; i < 200; i++) {
        const rebatch_pool_stats stats = stats_of(rig.pool);
        cr_assert(stats.live_bytes <= stats.reserved_bytes && stats.blocks <= 4 * 64);
        if (i % 16 == 0)
            assert_valid(rig.pool);
    }
    for (int i = 0; i < 4; i++) {
        cr_assert_eq(pthread_join(threads[i], &failed), 0);
        cr_assert_null(failed);
    }
    const rebatch_pool_stats stats = stats_of(rig.pool);
    cr_assert(stats.allocations == 80000 && stats.frees == 80000 && stats.live_bytes == 0);
    rig_close(&rig);
}
