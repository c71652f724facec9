/* Holds what allocate and free promise: sizes, addresses, reuse, limits, and bad use.
 * Seeds: 1 to 4 where a test draws. */
#include <pthread.h>

#include "unit/pool_help.h"

/* Zero bytes are no failure: OK and NULL, and nothing is counted. */
Test(pool_alloc, zero_bytes_are_ok_and_null)
{
    AUTO_RIG rig = rig_open(16, NULL);
    void *pointer = &rig;
    cr_assert_eq(rebatch_pool_alloc(&pointer, rig.pool, 0, NULL, 0), REBATCH_OK);
    cr_assert_null(pointer);
    give(rig.pool, NULL);
    cr_assert_eq(stats_of(rig.pool).allocations, 0);
    cr_assert_eq(stats_of(rig.pool).frees, 0);
}

/* A pointer is a multiple of 256, a block a multiple of 512 bytes. */
Test(pool_alloc, blocks_are_aligned_and_rounded_up)
{
    AUTO_RIG rig = rig_open(64, NULL);
    static const size_t sizes[] = {1, 511, 512, 513, 1024, 65535, 65536, 65537, 300001};
    uint64_t live = 0;
    uint64_t requested = 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        char *pointer = take(rig.pool, sizes[i]);
        memset(pointer, 0x5a, sizes[i]);
        const size_t rounded = (sizes[i] + UNIT - 1) / UNIT * UNIT;
        size_t bytes;
        cr_assert_eq((uintptr_t)pointer % REBATCH_POOL_ALIGNMENT, 0);
        cr_assert_eq(rebatch_pool_block_bytes(&bytes, rig.pool, pointer), REBATCH_OK);
        cr_assert_eq(bytes, rounded);
        live += rounded;
        requested += sizes[i];
    }
    cr_assert_eq(stats_of(rig.pool).live_bytes, live);
    cr_assert_eq(stats_of(rig.pool).requested_bytes, requested);
}

/* Missing arguments are refused with a text, and outputs are cleared. */
Test(pool_alloc, missing_arguments_are_refused)
{
    AUTO_RIG rig = rig_open(16, NULL);
    void *pointer = &rig;
    size_t bytes = 1;
    rebatch_pool *pool = rig.pool;
    assert_refused(rebatch_pool_create(NULL, rig.device, NULL), REBATCH_E_INVALID, "out is NULL");
    assert_refused(rebatch_pool_create(&pool, NULL, NULL), REBATCH_E_INVALID, "device is NULL");
    cr_assert_null(pool);
    assert_refused(rebatch_pool_alloc(NULL, rig.pool, 1, NULL, 0), REBATCH_E_INVALID, "out is");
    assert_refused(rebatch_pool_alloc(&pointer, NULL, 1, NULL, 0), REBATCH_E_INVALID, "pool is");
    cr_assert_null(pointer);
    assert_refused(rebatch_pool_free(NULL, &rig), REBATCH_E_INVALID, "pool is NULL");
    assert_refused(rebatch_pool_use_on(NULL, &rig, NULL), REBATCH_E_INVALID, "pool is NULL");
    assert_refused(rebatch_pool_use_on(rig.pool, NULL, NULL), REBATCH_E_INVALID, "pointer is");
    assert_refused(rebatch_pool_block_bytes(NULL, rig.pool, &rig), REBATCH_E_INVALID, "bytes is");
    assert_refused(rebatch_pool_block_bytes(&bytes, rig.pool, NULL), REBATCH_E_INVALID, "pointer");
    cr_assert_eq(bytes, 0);
    assert_refused(rebatch_pool_reserve(NULL, 1, NULL), REBATCH_E_INVALID, "pool is NULL");
    assert_refused(rebatch_pool_trim(NULL, 0, NULL), REBATCH_E_INVALID, "pool is NULL");
    assert_refused(rebatch_pool_set_limit(NULL, 0), REBATCH_E_INVALID, "pool is NULL");
    assert_refused(rebatch_pool_available(NULL, rig.pool), REBATCH_E_INVALID, "bytes is NULL");
    assert_refused(rebatch_pool_available(&bytes, NULL), REBATCH_E_INVALID, "pool is NULL");
    assert_refused(rebatch_pool_add_pressure(rig.pool, NULL, NULL), REBATCH_E_INVALID, "give_up");
    assert_refused(rebatch_pool_add_pressure(NULL, NULL, NULL), REBATCH_E_INVALID, "pool is");
    assert_refused(rebatch_pool_reset_peaks(NULL), REBATCH_E_INVALID, "pool is NULL");
    assert_refused(rebatch_pool_get_stats(NULL, rig.pool), REBATCH_E_INVALID, "out is NULL");
    assert_refused(rbi_pool_admit(NULL, 1, NULL), REBATCH_E_INVALID, "pool is NULL");
    cr_assert_null(rebatch_pool_device(NULL));
    cr_assert_eq(rebatch_pool_device(rig.pool), rig.device);
    rebatch_pool_destroy(NULL);
}

/* Options out of range, and options of a newer header that are not zero, are refused. */
Test(pool_alloc, wrong_options_are_refused)
{
    AUTO_RIG rig = rig_open(16, NULL);
    rebatch_pool *pool;
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.limit_permille = 1001;
    assert_refused(rebatch_pool_create(&pool, rig.device, &options), REBATCH_E_INVALID, "1001");
    options = (rebatch_pool_options)REBATCH_POOL_OPTIONS_INIT;
    options.caching = (rebatch_toggle)7;
    assert_refused(rebatch_pool_create(&pool, rig.device, &options), REBATCH_E_INVALID, "is 7");
    options = (rebatch_pool_options)REBATCH_POOL_OPTIONS_INIT;
    options.replay = (rebatch_toggle)5;
    assert_refused(rebatch_pool_create(&pool, rig.device, &options), REBATCH_E_INVALID,
                   "replay is 5");
    struct {
        rebatch_pool_options known;
        uint64_t newer;
    } longer = {REBATCH_POOL_OPTIONS_INIT, 1};
    longer.known.struct_size = sizeof longer;
    assert_refused(rebatch_pool_create(&pool, rig.device, &longer.known), REBATCH_E_INVALID,
                   "not zero");
    cr_assert_null(pool);
}

/* Sizes with which no request could ever be served, or that could never be had, are refused. */
Test(pool_alloc, sizes_that_can_never_work_are_refused)
{
    AUTO_RIG rig = rig_open(16, NULL);
    rebatch_pool *pool;
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.limit_bytes = PAGE - 1;
    assert_refused(rebatch_pool_create(&pool, rig.device, &options), REBATCH_E_INVALID,
                   "limit_bytes is 65535: expected 0 or at least one page of 65536 bytes");
    cr_assert_null(pool);
    options = (rebatch_pool_options)REBATCH_POOL_OPTIONS_INIT;
    options.headroom_bytes = 16 * PAGE + 1;
    assert_refused(rebatch_pool_create(&pool, rig.device, &options), REBATCH_E_INVALID,
                   "headroom_bytes is 1048577: expected at most the 1048576 bytes of device host");
    options = (rebatch_pool_options)REBATCH_POOL_OPTIONS_INIT;
    options.limit_bytes = PAGE;
    options.headroom_bytes = 16 * PAGE;
    cr_assert_eq(rebatch_pool_create(&pool, rig.device, &options), REBATCH_OK);
    rebatch_pool_destroy(pool);
}

/* A size whose rounding overflows is invalid, for allocate, reserve and admit. */
Test(pool_alloc, a_size_that_cannot_be_rounded_is_invalid)
{
    AUTO_RIG rig = rig_open(16, NULL);
    static const size_t sizes[] = {SIZE_MAX, SIZE_MAX - 510, SIZE_MAX - 511, SIZE_MAX - 65534};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        void *pointer = &rig;
        assert_refused(rebatch_pool_alloc(&pointer, rig.pool, sizes[i], NULL, 0), REBATCH_E_INVALID,
                       "bytes is 18446744");
        cr_assert_null(pointer);
        assert_refused(rebatch_pool_reserve(rig.pool, sizes[i], NULL), REBATCH_E_INVALID, "bytes");
        assert_refused(rbi_pool_admit(rig.pool, sizes[i], NULL), REBATCH_E_INVALID, "bytes is");
    }
    /* The largest that can be rounded is merely too much. */
    void *pointer;
    cr_assert_eq(rebatch_pool_alloc(&pointer, rig.pool, SIZE_MAX - 65535, NULL, 0), REBATCH_OOM);
    cr_assert_eq(stats_of(rig.pool).device_allocations, 0);
}

/* A pointer that is not the start of a block in use is refused, and the text says why. */
Test(pool_alloc, a_wrong_pointer_is_refused_with_the_reason)
{
    struct rig rig = rig_open(64, NULL);
    struct rig other = rig_open(64, NULL);
    char *a = take(rig.pool, 4 * KIB);
    char *b = take(rig.pool, 4 * KIB);
    char *foreign = take(other.pool, 4 * KIB);
    int local = 0;
    assert_refused(rebatch_pool_free(rig.pool, &local), REBATCH_E_INVALID, "of this pool");
    assert_refused(rebatch_pool_free(rig.pool, foreign), REBATCH_E_INVALID, "of this pool");
    assert_refused(rebatch_pool_free(rig.pool, b + 512), REBATCH_E_INVALID, "512 bytes inside");
    assert_refused(rebatch_pool_free(rig.pool, b + 1), REBATCH_E_INVALID, "1 bytes inside");
    give(rig.pool, a);
    assert_refused(rebatch_pool_free(rig.pool, a), REBATCH_E_INVALID, "freed already");
    give(rig.pool, b);
    assert_refused(rebatch_pool_free(rig.pool, b), REBATCH_E_INVALID, "freed already");
    size_t bytes;
    assert_refused(rebatch_pool_block_bytes(&bytes, rig.pool, b), REBATCH_E_INVALID, "freed");
    assert_refused(rebatch_pool_use_on(rig.pool, b, NULL), REBATCH_E_INVALID, "freed already");
    cr_assert_eq(stats_of(rig.pool).frees, 2);
    rig_close(&rig);
    rig_close(&other);
}

/* A stream that the device does not have, or no longer has, is refused. */
Test(pool_alloc, a_stream_that_is_not_the_devices_is_refused)
{
    AUTO_RIG rig = rig_open(16, NULL);
    rebatch_stream stream;
    cr_assert_eq(rebatch_stream_create(&stream, rig.device), REBATCH_OK);
    void *pointer = take_on(rig.pool, 1, stream);
    give(rig.pool, pointer);
    rebatch_stream_destroy(rig.device, stream);
    assert_refused(rebatch_pool_alloc(&pointer, rig.pool, 1, stream, 0), REBATCH_E_INVALID,
                   "stream is");
    cr_assert_null(pointer);
    assert_refused(rebatch_pool_reserve(rig.pool, 1, stream), REBATCH_E_INVALID, "stream is");
    assert_refused(rbi_pool_admit(rig.pool, 1, stream), REBATCH_E_INVALID, "stream is");
    pointer = take(rig.pool, 1);
    assert_refused(rebatch_pool_use_on(rig.pool, pointer, stream), REBATCH_E_INVALID, "stream is");
}

/* A tag that was not made is refused. */
Test(pool_alloc, an_unknown_tag_is_refused)
{
    AUTO_RIG rig = rig_open(16, NULL);
    void *pointer = &rig;
    assert_refused(rebatch_pool_alloc(&pointer, rig.pool, 1, NULL, 1), REBATCH_E_INVALID,
                   "tag is 1");
    cr_assert_null(pointer);
}

/* A freed block is given out again without a call to the device. */
Test(pool_alloc, a_freed_block_is_given_out_again)
{
    AUTO_RIG rig = rig_open(64, NULL);
    void *first = take(rig.pool, 100 * KIB);
    give(rig.pool, first);
    const uint64_t calls = stats_of(rig.pool).device_allocations;
    cr_assert_eq(take(rig.pool, 100 * KIB), first);
    cr_assert_eq(stats_of(rig.pool).device_allocations, calls);
}

/* Just above the sizes that are kept unmerged. */
#define STEP (65 * UNIT)

/* The smallest hole that fits is taken, of equal ones that of the lowest address. */
Test(pool_alloc, the_best_fit_is_taken_and_ties_go_to_the_lowest_address)
{
    AUTO_RIG rig = rig_open(64, NULL);
    static const size_t units[] = {8, 1, 5, 1, 6, 1, 5, 1, 7, 1};
    char *blocks[10];
    char *all = take(rig.pool, 36 * STEP); /* so that the blocks lie one behind the other */
    give(rig.pool, all);
    for (int i = 0; i < 10; i++)
        blocks[i] = take(rig.pool, units[i] * STEP);
    for (int i = 8; i >= 0; i -= 2)
        give(rig.pool, blocks[i]);
    cr_assert_eq(take(rig.pool, 5 * STEP), blocks[2]);
    cr_assert_eq(take(rig.pool, 5 * STEP), blocks[6]);
    cr_assert_eq(take(rig.pool, 5 * STEP), blocks[4]);
    cr_assert_eq(take(rig.pool, 8 * STEP), blocks[0]);
    cr_assert_eq(take(rig.pool, 2 * STEP), blocks[8]);
    assert_valid(rig.pool);
}

/* Free blocks of small sizes are not merged as long as they are few, and are all the same there
 * for a request that nothing else serves: no memory is taken meanwhile. */
Test(pool_alloc, small_blocks_are_kept_unmerged_until_they_are_needed)
{
    AUTO_RIG rig = rig_open(16, NULL);
    void *blocks[32];
    for (int i = 0; i < 32; i++)
        blocks[i] = take(rig.pool, 32 * KIB);
    for (int i = 0; i < 32; i++)
        give(rig.pool, blocks[i]);
    cr_assert_eq(take(rig.pool, 32 * KIB), blocks[31]);
    give(rig.pool, blocks[31]);
    const uint64_t calls = stats_of(rig.pool).device_allocations;
    give(rig.pool, take(rig.pool, 16 * PAGE));
    cr_assert_eq(stats_of(rig.pool).device_allocations, calls);
}

/* What is kept so is bounded in bytes; beyond that blocks are merged as they are freed. */
Test(pool_alloc, small_blocks_that_are_kept_unmerged_are_bounded_in_bytes)
{
    enum { BLOCKS = 2 * (RBI_POOL_SMALL_MOST / (32 * 1024)) };
    AUTO_RIG rig = rig_open(2 * BLOCKS, NULL);
    static void *blocks[BLOCKS];
    for (int i = 0; i < BLOCKS; i++)
        blocks[i] = take(rig.pool, 32 * KIB);
    for (int i = 0; i < BLOCKS; i++) {
        give(rig.pool, blocks[i]);
        cr_assert_leq(rig.pool->first_stream->lists.small_bytes, RBI_POOL_SMALL_MOST);
    }
    cr_assert_eq(rig.pool->first_stream->lists.small_bytes, RBI_POOL_SMALL_MOST);
    assert_valid(rig.pool);
}

/* Of equal holes in two segments that of the older segment is taken, wherever the device put
 * them. */
Test(pool_alloc, ties_between_segments_go_to_the_older_one)
{
    AUTO_RIG rig = rig_open_plain(64, NULL);
    void *blocks[6];
    for (int i = 0; i < 6; i++)
        blocks[i] = take(rig.pool, 2 * PAGE);
    for (int i = 5; i >= 0; i--)
        give(rig.pool, blocks[(i * 5 + 2) % 6]);
    merge_freed(rig.pool);
    for (int i = 0; i < 6; i++)
        cr_assert_eq(take(rig.pool, 2 * PAGE), blocks[i]);
}

/* Free neighbours become one block at once, whatever the order of the frees. */
Test(pool_alloc, free_neighbours_merge_in_every_order)
{
    static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2},
                                     {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    AUTO_RIG rig = rig_open_plain(64, NULL);
    for (int o = 0; o < 6; o++) {
        char *wall = take(rig.pool, UNIT);
        void *blocks[3];
        for (int i = 0; i < 3; i++)
            blocks[i] = take(rig.pool, (size_t)(i + 1) * STEP);
        void *end = take(rig.pool, UNIT);
        for (int i = 0; i < 3; i++) {
            give(rig.pool, blocks[orders[o][i]]);
            assert_valid(rig.pool);
        }
        void *whole = take(rig.pool, 6 * STEP);
        cr_assert_eq(whole, blocks[0]);
        give(rig.pool, whole);
        give(rig.pool, wall);
        give(rig.pool, end);
        merge_freed(rig.pool);
    }
    cr_assert_eq(stats_of(rig.pool).device_allocations, 1);
}

/* Without virtual memory reserved stays close to live: small requests share a segment of four
 * pages, large ones get their own size in whole pages; when four are not to be had one will
 * do. */
Test(pool_alloc, segments_are_as_large_as_needed)
{
    AUTO_RIG rig = rig_open_plain(9, NULL);
    void *small = take(rig.pool, 1);
    cr_assert_eq(stats_of(rig.pool).reserved_bytes, 4 * PAGE);
    void *more = take(rig.pool, 10 * KIB);
    cr_assert_eq(stats_of(rig.pool).reserved_bytes, 4 * PAGE);
    void *large = take(rig.pool, 4 * PAGE - KIB);
    cr_assert_eq(stats_of(rig.pool).reserved_bytes, 8 * PAGE);
    void *rest = take(rig.pool, 4 * PAGE - 12 * KIB);
    (void)rest;
    void *last = take(rig.pool, PAGE - 1);
    cr_assert_eq(stats_of(rig.pool).reserved_bytes, 9 * PAGE);
    (void)small, (void)more, (void)large, (void)last;
}

/* What is much smaller than what the pool holds shares a segment of a 16th of it: a training that
 * needs many pieces of a few pages holds little beyond its peak. */
Test(pool_alloc, segments_grow_with_what_the_pool_holds)
{
    AUTO_RIG rig = rig_open_plain(200, NULL);
    void *held = take(rig.pool, 128 * PAGE);
    void *alone = take(rig.pool, 4 * PAGE);
    cr_assert_eq(stats_of(rig.pool).reserved_bytes, 132 * PAGE, "half of a 16th");
    void *first = take(rig.pool, 3 * PAGE);
    cr_assert_eq(stats_of(rig.pool).reserved_bytes, 140 * PAGE);
    void *second = take(rig.pool, 5 * PAGE);
    cr_assert_eq(stats_of(rig.pool).reserved_bytes, 140 * PAGE, "it lies in the same segment");
    (void)held, (void)alone, (void)first, (void)second;
}

/* A request beyond the limit never reaches the device; one up to it is served. */
Test(pool_alloc, a_request_beyond_the_limit_never_reaches_the_device)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.limit_bytes = 8 * PAGE;
    AUTO_RIG rig = rig_open(64, &options);
    void *pointer;
    cr_assert_eq(rebatch_pool_alloc(&pointer, rig.pool, 8 * PAGE + 1, NULL, 0), REBATCH_OOM);
    cr_assert_eq(stats_of(rig.pool).device_allocations, 0);
    pointer = take(rig.pool, 8 * PAGE);
    cr_assert_eq(rebatch_pool_alloc(&pointer, rig.pool, 1, NULL, 0), REBATCH_OOM);
    cr_assert_eq(stats_of(rig.pool).device_allocations, 1);
}

/* A share of the device is a limit too, and of two limits the smaller one holds. */
Test(pool_alloc, the_smaller_of_both_limits_holds)
{
    static const struct {
        size_t pages;
        uint32_t permille;
        size_t fits;
    } cases[] = {{0, 250, 16}, {8, 250, 8}, {32, 250, 16}, {0, 1000, 64}, {0, 0, 64}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
        options.limit_bytes = cases[i].pages * PAGE;
        options.limit_permille = cases[i].permille;
        AUTO_RIG rig = rig_open(64, &options);
        void *pointer;
        cr_assert_eq(rebatch_pool_alloc(&pointer, rig.pool, cases[i].fits * PAGE + 1, NULL, 0),
                     REBATCH_OOM);
        cr_assert_eq(rebatch_pool_alloc(&pointer, rig.pool, cases[i].fits * PAGE, NULL, 0),
                     REBATCH_OK);
    }
}

/* The headroom is left free on the device. */
Test(pool_alloc, the_headroom_stays_free)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.headroom_bytes = 4 * PAGE - 1; /* which leaves no part of a page either */
    AUTO_RIG rig = rig_open(16, &options);
    void *pointer;
    cr_assert_eq(rebatch_pool_alloc(&pointer, rig.pool, 13 * PAGE, NULL, 0), REBATCH_OOM);
    pointer = take(rig.pool, 12 * PAGE);
    size_t bytes;
    cr_assert_eq(rebatch_pool_available(&bytes, rig.pool), REBATCH_OK);
    cr_assert_eq(bytes, 0);
}

/* Trim gives whole free segments back until no more than asked are left, and no more than
 * needed. */
Test(pool_alloc, trim_gives_back_what_is_beyond_the_rest_to_keep)
{
    AUTO_RIG rig = rig_open_plain(64, NULL);
    void *blocks[4];
    for (size_t i = 0; i < 4; i++)
        blocks[i] = take(rig.pool, (i + 2) * PAGE); /* 2, 3, 4, 5 */
    for (size_t i = 1; i < 4; i++)
        give(rig.pool, blocks[i]);
    size_t released = 1;
    cr_assert_eq(rebatch_pool_trim(rig.pool, 12 * PAGE, &released), REBATCH_OK);
    cr_assert_eq(released, 0);
    cr_assert_eq(rebatch_pool_trim(rig.pool, 9 * PAGE, &released), REBATCH_OK);
    cr_assert_eq(released, 3 * PAGE);
    cr_assert_eq(rebatch_pool_trim(rig.pool, 0, &released), REBATCH_OK);
    cr_assert_eq(released, 9 * PAGE);
    cr_assert_eq(stats_of(rig.pool).reserved_bytes, 2 * PAGE);
    cr_assert_eq(stats_of(rig.pool).trims, 2);
    cr_assert_eq(rebatch_pool_trim(rig.pool, 0, NULL), REBATCH_OK);
    cr_assert_eq(stats_of(rig.pool).trims, 2);
}

/* A limit below what is reserved trims what it can, and holds from then on; 0 takes it away. */
Test(pool_alloc, a_lower_limit_trims)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.limit_permille = 500;
    AUTO_RIG rig = rig_open(64, &options);
    void *live = take(rig.pool, 4 * PAGE);
    void *cached = take(rig.pool, 8 * PAGE);
    give(rig.pool, cached);
    cr_assert_eq(rebatch_pool_set_limit(rig.pool, 2 * PAGE), REBATCH_OK);
    cr_assert_eq(stats_of(rig.pool).reserved_bytes, 4 * PAGE);
    void *pointer;
    cr_assert_eq(rebatch_pool_alloc(&pointer, rig.pool, 1, NULL, 0), REBATCH_OOM);
    cr_assert_eq(rebatch_pool_set_limit(rig.pool, 0), REBATCH_OK);
    pointer = take(rig.pool, 60 * PAGE);
    give(rig.pool, live);
}

/* Frees in any manner: one by one, by a commit, by a rollback. */
static void lower_and_free(struct rig *rig, int manner)
{
    enum { BLOCKS = 12, LIMIT = 3, BLOCK = 4 * PAGE }; /* a plain device has one for each */
    void *blocks[BLOCKS];
    rebatch_scope scope = 0;
    if (manner == 2)
        cr_assert_eq(rebatch_scope_begin(&scope, rig->pool), REBATCH_OK);
    for (size_t i = 0; i < BLOCKS; i++)
        blocks[i] = take(rig->pool, BLOCK);
    cr_assert_eq(rebatch_pool_set_limit(rig->pool, LIMIT * BLOCK), REBATCH_OK);
    cr_assert_eq(stats_of(rig->pool).reserved_bytes, BLOCKS * BLOCK, "all of it is in use");
    if (manner == 1)
        cr_assert_eq(rebatch_scope_begin(&scope, rig->pool), REBATCH_OK);
    for (size_t i = 0; i < BLOCKS && manner < 2; i++) {
        give(rig->pool, blocks[i]);
        const size_t left = manner == 0 ? rbi_max(BLOCKS - 1 - i, LIMIT) : BLOCKS;
        cr_expect_eq(stats_of(rig->pool).reserved_bytes, left * BLOCK, "after %zu frees", i + 1);
    }
    if (manner == 1)
        cr_assert_eq(rebatch_scope_commit(rig->pool, scope), REBATCH_OK);
    if (manner == 2)
        cr_assert_eq(rebatch_scope_rollback(rig->pool, scope), REBATCH_OK);
    cr_expect_eq(stats_of(rig->pool).reserved_bytes, LIMIT * BLOCK);
    give(rig->pool, take(rig->pool, LIMIT * BLOCK));
    cr_expect_eq(stats_of(rig->pool).reserved_bytes, LIMIT * BLOCK, "within it memory is cached");
}

Test(pool_alloc, a_lower_limit_applies_to_memory_in_use_when_it_is_freed)
{
    for (int manner = 0; manner < 3; manner++) {
        struct rig rig = rig_open(64, NULL);
        lower_and_free(&rig, manner);
        rig_close(&rig);
        rig = rig_open_plain(64, NULL);
        lower_and_free(&rig, manner);
        rig_close(&rig);
    }
}

/* What was promised is there, whatever is freed under a lower limit. */
Test(pool_alloc, a_lower_limit_leaves_what_is_reserved)
{
    AUTO_RIG rig = rig_open(64, NULL);
    void *live = take(rig.pool, 8 * PAGE);
    cr_assert_eq(rebatch_pool_reserve(rig.pool, 4 * PAGE, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_pool_set_limit(rig.pool, PAGE), REBATCH_OK);
    give(rig.pool, live);
    give(rig.pool, take(rig.pool, 4 * PAGE));
    cr_expect_eq(stats_of(rig.pool).reserved_bytes, PAGE);
}

/* What is available: free blocks, and the room within limit and headroom. */
Test(pool_alloc, available_is_free_blocks_and_room)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.limit_bytes = 20 * PAGE;
    struct rig rig = rig_open(64, &options);
    size_t bytes;
    cr_assert_eq(rebatch_pool_available(&bytes, rig.pool), REBATCH_OK);
    cr_assert_eq(bytes, 20 * PAGE);
    void *a = take(rig.pool, 8 * PAGE);
    (void)take(rig.pool, 2 * PAGE + 1);
    give(rig.pool, a);
    cr_assert_eq(rebatch_pool_available(&bytes, rig.pool), REBATCH_OK);
    cr_assert_eq(bytes, 18 * PAGE - UNIT);
    rig_close(&rig);

    /* A device without a cap has more than can be counted, or less than that; never a wrapped
     * sum. */
    cr_assert_eq(rebatch_device_open_host(&rig.device, REBATCH_UNLIMITED, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&rig.pool, rig.device, NULL), REBATCH_OK);
    a = take(rig.pool, 8 * PAGE);
    give(rig.pool, a);
    cr_assert_eq(rebatch_pool_available(&bytes, rig.pool), REBATCH_OK);
    cr_assert_geq(bytes, 8 * PAGE);
    rig_close(&rig);
}

/* With caching off every call goes straight to the device; scopes, tags and statistics still
 * work. */
Test(pool_alloc, with_caching_off_nothing_is_kept)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.caching = REBATCH_OFF;
    AUTO_RIG rig = rig_open(64, &options);
    rebatch_tag tag;
    cr_assert_not(rbi_pool_is_caching(rig.pool));
    cr_assert_eq(rebatch_pool_tag(&tag, rig.pool, "weights"), REBATCH_OK);
    for (uint64_t i = 1; i <= 3; i++) {
        void *pointer;
        cr_assert_eq(rebatch_pool_alloc(&pointer, rig.pool, 100, NULL, tag), REBATCH_OK);
        cr_assert_eq(stats_of(rig.pool).reserved_bytes, PAGE);
        cr_assert_eq(stats_of(rig.pool).device_allocations, i);
        give(rig.pool, pointer);
        cr_assert_eq(stats_of(rig.pool).device_frees, i);
        cr_assert_eq(stats_of(rig.pool).reserved_bytes, 0);
    }
    void *old = take(rig.pool, PAGE);
    const rebatch_scope scope = begin(rig.pool);
    void *inside = take(rig.pool, PAGE);
    give(rig.pool, old);
    cr_assert_eq(stats_of(rig.pool).deferred_bytes, PAGE);
    cr_assert_eq(rebatch_scope_rollback(rig.pool, scope), REBATCH_OK);
    cr_assert_eq(stats_of(rig.pool).reserved_bytes, PAGE);
    give(rig.pool, inside); /* late */
    give(rig.pool, old);
    cr_assert_eq(stats_of(rig.pool).reserved_bytes, 0);
    cr_assert_eq(stats_of(rig.pool).late_frees, 1);
}

/* Destroying gives everything back, blocks in use and open scopes included, and leaks nothing. */
Test(pool_alloc, destroy_gives_everything_back)
{
    const int64_t before = rbi_heap_live();
    struct rig rig = rig_open(64, NULL);
    rebatch_stream stream;
    cr_assert_eq(rebatch_stream_create(&stream, rig.device), REBATCH_OK);
    (void)take(rig.pool, PAGE);
    (void)begin(rig.pool);
    void *shared = take_on(rig.pool, PAGE, stream);
    cr_assert_eq(rebatch_pool_use_on(rig.pool, shared, NULL), REBATCH_OK);
    (void)take(rig.pool, 1);
    rebatch_pool_destroy(rig.pool);
    rebatch_memory_info info;
    cr_assert_eq(rebatch_device_memory(rig.device, &info), REBATCH_OK);
    cr_assert_eq(info.used_bytes, 0);
    rebatch_stream_destroy(rig.device, stream);
    rebatch_device_close(rig.device);
    cr_assert_eq(rbi_heap_live(), before);
}

static void one_round(rebatch_pool *pool, bool commit)
{
    void *blocks[100];
    void *older = take(pool, KIB);
    const rebatch_scope scope = begin(pool);
    for (size_t i = 0; i < 100; i++)
        blocks[i] = take(pool, (i + 1) * KIB);
    for (size_t i = 0; i < 100; i += 2)
        give(pool, blocks[i]);
    if (commit) {
        give(pool, older);
        cr_assert_eq(rebatch_scope_commit(pool, scope), REBATCH_OK);
        for (size_t i = 1; i < 100; i += 2)
            give(pool, blocks[i]);
    } else {
        cr_assert_eq(rebatch_scope_rollback(pool, scope), REBATCH_OK);
        give(pool, older);
    }
}

/* With a warm cache neither allocate, free, begin, commit nor rollback makes a heap call. */
Test(pool_alloc, warm_calls_make_no_heap_call)
{
    AUTO_RIG rig = rig_open(512, NULL);
    for (int i = 0; i < 40; i++)
        one_round(rig.pool, i % 2);
    const uint64_t calls = rbi_heap_calls();
    for (int i = 0; i < 20; i++)
        one_round(rig.pool, i % 2);
    cr_assert_eq(rbi_heap_calls(), calls);
    cr_assert_eq(stats_of(rig.pool).live_bytes, 0);
}

/* Where a pointer lies: its segment's number, and how far in. */
static uint64_t place_of(rebatch_pool *pool, const void *pointer)
{
    const struct rbi_block *block = rbi_block_around(&pool->heap, pointer);
    cr_assert_not_null(block);
    return block->range->number << 32 | (uint64_t)(block->address - block->range->address);
}

/* The same calls give the same addresses, relative to the segments, wherever the device put
 * them. */
Test(pool_alloc, the_same_calls_give_the_same_addresses)
{
    struct rig rigs[2] = {rig_open(1024, NULL), rig_open(1024, NULL)};
    void *blocks[2][64] = {{NULL}};
    uint64_t random = 1;
    for (int n = 0; n < 5000; n++) {
        const size_t at = draw(&random) % 64;
        const size_t bytes =
            draw(&random) % 4 ? draw(&random) % (4 * KIB) + 1 : draw(&random) % (8 * PAGE) + 1;
        for (int r = 0; r < 2; r++) {
            give(rigs[r].pool, blocks[r][at]);
            blocks[r][at] = take(rigs[r].pool, bytes);
        }
        cr_assert_eq(place_of(rigs[0].pool, blocks[0][at]), place_of(rigs[1].pool, blocks[1][at]));
    }
    rig_close(&rigs[0]);
    rig_close(&rigs[1]);
}

/* Address ranges, physical memory and blocks come and go; what notes them is used again. */
Test(pool_alloc, host_memory_does_not_grow_with_what_comes_and_goes)
{
    enum { WARM_ROUND = 3, ROUNDS = 100, BLOCKS = 8 };
    struct rig rigs[] = {rig_open(256, NULL), rig_open_plain(256, NULL)};
    for (size_t r = 0; r < sizeof rigs / sizeof *rigs; r++) {
        int64_t warm = 0;
        for (int round = 0; round < ROUNDS; round++) {
            uint64_t random = 4;
            void *blocks[BLOCKS];
            for (size_t i = 0; i < BLOCKS; i++)
                blocks[i] = take(rigs[r].pool, draw(&random) % (24 * PAGE) + 1);
            for (size_t i = 0; i < BLOCKS; i++)
                give(rigs[r].pool, blocks[i]);
            cr_assert_eq(rebatch_pool_trim(rigs[r].pool, 0, NULL), REBATCH_OK);
            if (round == WARM_ROUND)
                warm = rbi_heap_live();
        }
        cr_assert_eq(rbi_heap_live(), warm, "%s: %jd and then %jd chunks", r ? "plain" : "mapped",
                     (intmax_t)warm, (intmax_t)rbi_heap_live());
        rig_close(&rigs[r]);
    }
}

/* A block of many pages and blocks of one each are cached: large pieces and small ones. */
Test(pool_alloc, a_trim_leaves_what_it_is_told_to)
{
    enum { LARGE = 512, SMALL = 40 };
    for (size_t keep = 0; keep <= LARGE + SMALL; keep += 7) {
        AUTO_RIG rig = rig_open(1024, NULL);
        void *blocks[SMALL + 1];
        for (size_t i = 0; i < SMALL; i++)
            blocks[i] = take(rig.pool, PAGE);
        blocks[SMALL] = take(rig.pool, LARGE * PAGE);
        for (size_t i = 0; i <= SMALL; i++)
            give(rig.pool, blocks[i]);
        const uint64_t before = stats_of(rig.pool).reserved_bytes;
        size_t released;
        cr_assert_eq(rebatch_pool_trim(rig.pool, keep * PAGE, &released), REBATCH_OK);
        const uint64_t left = stats_of(rig.pool).reserved_bytes;
        cr_assert_eq(released, before - left);
        cr_assert_eq(left, keep * PAGE, "%zu pages of %zu", (size_t)(left / PAGE), keep);
    }
}

static void *churn(void *argument)
{
    rebatch_pool *pool = argument;
    uint64_t random = 2 + (uint64_t)(uintptr_t)pthread_self() % 2;
    void *blocks[16] = {NULL};
    for (int n = 0; n < 3000; n++) {
        const size_t at = draw(&random) % 16;
        if (rebatch_pool_free(pool, blocks[at]) != REBATCH_OK)
            return pool;
        const size_t bytes = draw(&random) % (32 * KIB) + 1;
        if (rebatch_pool_alloc(&blocks[at], pool, bytes, NULL, 0) != REBATCH_OK)
            return pool;
        memset(blocks[at], (int)at, bytes);
    }
    for (size_t i = 0; i < 16; i++)
        if (rebatch_pool_free(pool, blocks[i]) != REBATCH_OK)
            return pool;
    return NULL;
}

/* Several threads may allocate and free at once. */
Test(pool_alloc, threads_may_share_a_pool)
{
    AUTO_RIG rig = rig_open(256, NULL);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, churn, rig.pool), 0);
    for (int i = 0; i < 4; i++) {
        void *failed;
        cr_assert_eq(pthread_join(threads[i], &failed), 0);
        cr_assert_null(failed);
    }
    cr_assert_eq(stats_of(rig.pool).live_bytes, 0);
    cr_assert_eq(stats_of(rig.pool).allocations, 4 * 3000);
}
