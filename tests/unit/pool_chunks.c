/* Holds what chunks promise: physical memory in proportion to the request costs few calls of the
 * device, and a wholly free chunk goes wherever it is needed, or back. Seed 1 where a test
 * draws. */

#include "fault/fault_device.h"
#include "unit/pool_help.h"

/* Pages of the largest chunk of a pool that grows; of memory that will be used as a whole and comes
 * in such chunks; of the largest of a request as large; and of a device that has room for them. */
enum { CHUNK_SIZE = 5, CHUNK = 1 << CHUNK_SIZE, MUCH = 16 * CHUNK, DEVICE_PAGES = 65536 };
enum { TAKEN_SIZE = 4, TAKEN = 1 << TAKEN_SIZE, LARGEST = 1 << (RBI_CHUNK_SIZES - 1) };

/* A pool of a device that counts, or fails, calls. */
struct counted {
    rebatch_device *host, *device;
    rebatch_pool *pool;
};

static void open_counted(struct counted *c, size_t pages, const rebatch_pool_options *options)
{
    cr_assert_eq(rebatch_device_open_host(&c->host, pages * PAGE, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_device_open_fault(&c->device, c->host, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&c->pool, c->device, options), REBATCH_OK);
}

static void close_counted(struct counted *c)
{
    struct rig rig = {c->device, c->pool};
    rig_close(&rig);
    rebatch_device_close(c->host);
}

/* Counts calls of these kinds from now on; what they were is what this gives the next time. */
static uint64_t calls_of(struct counted *c, uint32_t kinds)
{
    uint64_t seen;
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    cr_assert_eq(rebatch_fault_counts(c->device, &seen, NULL), REBATCH_OK);
    plan.calls = kinds;
    cr_assert_eq(rebatch_fault_arm(c->device, &plan), REBATCH_OK);
    return seen;
}

static size_t chunks_held(const rebatch_pool *pool, unsigned size)
{
    return pool->vm.spare[size].held;
}

static void admit(rebatch_pool *pool, size_t pages)
{
    cr_assert_eq(rbi_pool_admit(pool, pages * PAGE, NULL), REBATCH_OK, "%s", rebatch_last_error());
    assert_valid(pool);
}

/* ---- the driver's calls ---- */

static rebatch_pool_stats stats_of_pool(rebatch_pool *pool)
{
    rebatch_pool_stats stats;
    cr_assert_eq(rebatch_pool_get_stats(&stats, pool), REBATCH_OK);
    return stats;
}

/* A block, its free, and the return of its memory, beside what a device counts of it. */
Test(pool_chunks, the_drivers_calls_are_counted_and_on_a_dry_device_priced)
{
    rebatch_device *dry, *device;
    rebatch_pool *pool;
    void *block;
    size_t released;
    cr_assert_eq(rebatch_device_open_dry(&dry, (size_t)1 << 34, 0), REBATCH_OK);
    cr_assert_eq(rebatch_device_open_fault(&device, dry, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&pool, device, NULL), REBATCH_OK);
    struct counted c = {dry, device, pool};
    (void)calls_of(&c, REBATCH_FAULT_CREATE);
    cr_assert_eq(rebatch_pool_alloc(&block, pool, (size_t)33 << 20, NULL, 0), REBATCH_OK);
    const rebatch_pool_stats taken = stats_of_pool(pool);
    const uint64_t chunks = calls_of(&c, REBATCH_FAULT_UNMAP);
    cr_assert_gt(chunks, 1);
    cr_expect_eq(taken.driver_creates, chunks);
    cr_expect_eq(taken.driver_maps, chunks);
    cr_expect_eq(taken.driver_pieces, chunks);
    cr_expect_geq(taken.driver_accesses, 1);
    cr_expect_eq(taken.driver_unmaps + taken.driver_releases, 0);
    const struct rbi_device_prices *price = rbi_device_prices_of(device);
    cr_assert_not_null(price);
    cr_expect_eq(taken.driver_ns, chunks * (price->create + price->map + price->access));
    cr_assert_eq(rebatch_pool_free(pool, block), REBATCH_OK);
    cr_assert_eq(rebatch_pool_trim(pool, 0, &released), REBATCH_OK);
    const rebatch_pool_stats given = stats_of_pool(pool);
    cr_expect_eq(given.driver_unmaps, calls_of(&c, REBATCH_FAULT_CREATE));
    cr_expect_eq(given.driver_releases, chunks);
    cr_expect_eq(given.driver_ns - taken.driver_ns,
                 given.driver_unmaps * price->unmap + chunks * price->release);
    close_counted(&c);
}

Test(pool_chunks, the_drivers_calls_take_the_time_that_they_take_on_another_device)
{
    struct counted c;
    void *block;
    open_counted(&c, MUCH, NULL);
    cr_assert_null(rbi_device_prices_of(c.device));
    cr_assert_eq(rebatch_pool_alloc(&block, c.pool, PAGE, NULL, 0), REBATCH_OK);
    cr_expect_gt(stats_of_pool(c.pool).driver_ns, 0);
    cr_assert_eq(rebatch_pool_free(c.pool, block), REBATCH_OK);
    close_counted(&c);
}

/* A quarter of the request, at most a 128th of the room and 16; or a 128th of what is held, at most
 * a 2,048th of the room and 32; or a 256th of a very large request. */
Test(pool_chunks, are_in_proportion_to_the_request_what_is_held_and_the_room)
{
    static const struct {
        size_t held, count, room, expected;
    } cases[] = {
        {0, 1, DEVICE_PAGES, 1},
        {0, 7, DEVICE_PAGES, 1},
        {0, 8, DEVICE_PAGES, 2},
        {0, 63, DEVICE_PAGES, 8},
        {0, 64, DEVICE_PAGES, TAKEN},
        {0, 64, 2047, 8},
        {0, 64, 255, 1},
        {0, 64, 256, 2},
        {0, 8191, DEVICE_PAGES, TAKEN},
        {0, 8192, DEVICE_PAGES, CHUNK},
        {0, 16384, DEVICE_PAGES, 64},
        {0, SIZE_MAX, SIZE_MAX, LARGEST},
        {SIZE_MAX, SIZE_MAX, SIZE_MAX, LARGEST},
        {255, 1, DEVICE_PAGES, 1},
        {256, 1, DEVICE_PAGES, 2},
        {4096, 1, DEVICE_PAGES, CHUNK},
        {65536, 1, DEVICE_PAGES, CHUNK},
        {4096, 1, 4095, 1},
        {4096, 1, 4096, 2},
        {4096, 100, 0, 1},
        {4096, 512, 0, 2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct rbi_vm vm = {.held_pages = cases[i].held};
        cr_assert_eq(rbi_vm_chunk(&vm, cases[i].count, cases[i].room), cases[i].expected,
                     "case %zu", i);
    }
    cr_assert_eq(rbi_vm_chunk_ahead(15), 1);
    cr_assert_eq(rbi_vm_chunk_ahead(100), 4);
    cr_assert_eq(rbi_vm_chunk_ahead(SIZE_MAX), LARGEST);
}

static void admit_much(rebatch_pool *pool)
{
    admit(pool, MUCH);
}

static void reserve_much(rebatch_pool *pool)
{
    cr_assert_eq(rebatch_pool_reserve(pool, MUCH * PAGE, NULL), REBATCH_OK);
}

/* However it is asked for ahead of its use. */
Test(pool_chunks, much_memory_costs_few_calls)
{
    static void (*const ask[])(rebatch_pool *) = {admit_much, reserve_much};
    for (size_t i = 0; i < sizeof ask / sizeof *ask; i++) {
        struct counted c;
        open_counted(&c, DEVICE_PAGES, NULL);
        (void)calls_of(&c, REBATCH_FAULT_CREATE | REBATCH_FAULT_MAP);
        ask[i](c.pool);
        cr_assert_eq(calls_of(&c, 0), 2 * MUCH / CHUNK);
        cr_assert_eq(chunks_held(c.pool, CHUNK_SIZE), MUCH / CHUNK);
        cr_assert_eq(stats_of(c.pool).reserved_bytes, MUCH * PAGE);
        close_counted(&c);
    }
}

Test(pool_chunks, are_given_back_as_a_whole)
{
    struct counted c;
    size_t released;
    open_counted(&c, DEVICE_PAGES, NULL);
    (void)calls_of(&c, REBATCH_FAULT_CREATE | REBATCH_FAULT_MAP);
    give(c.pool, take(c.pool, MUCH * PAGE));
    cr_assert_eq(calls_of(&c, REBATCH_FAULT_UNMAP | REBATCH_FAULT_RELEASE), 2 * MUCH / TAKEN);
    cr_assert_eq(rebatch_pool_trim(c.pool, 0, &released), REBATCH_OK);
    cr_assert_eq(released, MUCH * PAGE);
    cr_assert_eq(calls_of(&c, 0), 2 * MUCH / TAKEN);
    close_counted(&c);
}

/* A block of 38 GiB on a card of 140 GiB: to make and map a chunk takes the driver 25 to 60 us. */
Test(pool_chunks, a_block_of_38_gibibytes_takes_some_hundred_chunks)
{
    struct counted c;
    void *block;
    cr_assert_eq(rebatch_device_open_dry(&c.host, (size_t)140 << 30, 0), REBATCH_OK);
    cr_assert_eq(rebatch_device_open_fault(&c.device, c.host, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&c.pool, c.device, NULL), REBATCH_OK);
    (void)calls_of(&c, REBATCH_FAULT_CREATE);
    cr_assert_eq(rebatch_pool_alloc(&block, c.pool, (size_t)38 << 30, NULL, 0), REBATCH_OK);
    cr_assert_leq(calls_of(&c, 0), 320);
    assert_valid(c.pool);
    close_counted(&c);
}

/* Little memory comes in pages: larger chunks would keep much of it where it is. */
Test(pool_chunks, little_memory_comes_in_pages)
{
    struct counted c;
    open_counted(&c, DEVICE_PAGES, NULL);
    (void)calls_of(&c, REBATCH_FAULT_CREATE);
    admit(c.pool, 31);
    cr_assert_eq(calls_of(&c, 0), 31);
    cr_assert_eq(chunks_held(c.pool, 0), 31);
    close_counted(&c);
}

static unsigned largest_held(const rebatch_pool *pool, const size_t before[static RBI_CHUNK_SIZES])
{
    unsigned size = RBI_CHUNK_SIZES - 1;
    while (size > 0 && chunks_held(pool, size) == before[size])
        size--;
    return size;
}

/* Each chunk is at most a 128th of what there is when it is taken, so that the last of the memory
 * comes in pages; all of it can be had. */
Test(pool_chunks, get_smaller_as_the_room_does)
{
    enum { EACH = 128 };
    struct counted c;
    open_counted(&c, DEVICE_PAGES, NULL);
    for (size_t room = DEVICE_PAGES; room > 0; room -= EACH) {
        size_t before[RBI_CHUNK_SIZES];
        for (unsigned size = 0; size < RBI_CHUNK_SIZES; size++)
            before[size] = chunks_held(c.pool, size);
        (void)take(c.pool, EACH * PAGE);
        const unsigned largest = largest_held(c.pool, before);
        cr_assert(largest == 0 || (size_t)128 << largest <= room, "2^%u of %zu", largest, room);
    }
    cr_assert_eq(stats_of(c.pool).reserved_bytes, DEVICE_PAGES * PAGE);
    close_counted(&c);
}

/* A device that has no large chunk gives what it has in smaller ones. */
Test(pool_chunks, a_device_without_large_chunks_gives_smaller_ones)
{
    struct counted c;
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    open_counted(&c, DEVICE_PAGES, NULL);
    plan.calls = REBATCH_FAULT_CREATE;
    plan.nth = 1;
    plan.times = 2;
    cr_assert_eq(rebatch_fault_arm(c.device, &plan), REBATCH_OK);
    admit(c.pool, MUCH);
    cr_assert_eq(chunks_held(c.pool, 3), MUCH / 8);
    cr_assert_eq(stats_of(c.pool).reserved_bytes, MUCH * PAGE);
    close_counted(&c);
}

/* A pool that has so many pages in chunks, and may have a few more. */
static void open_tight(struct counted *c, size_t pages, size_t more)
{
    open_counted(c, DEVICE_PAGES, NULL);
    admit(c->pool, pages);
    cr_assert_gt(chunks_held(c->pool, CHUNK_SIZE), 0);
    cr_assert_eq(rebatch_pool_set_limit(c->pool, (pages + more) * PAGE), REBATCH_OK);
}

/* What is wholly free is moved as a whole where it fits, in pages elsewhere. */
Test(pool_chunks, free_chunks_go_where_they_are_needed)
{
    enum { EIGHTH = MUCH / 8 };
    struct counted c;
    open_tight(&c, MUCH, 20);
    void *blocks[8];
    for (int i = 0; i < 8; i++) /* the free block is taken from its end */
        blocks[i] = take(c.pool, MUCH / 8 * PAGE);
    for (int i = 0; i < 8; i += 2)
        give(c.pool, blocks[i]);
    char *large = take(c.pool, MUCH / 2 * PAGE);
    memset(large, 0x55, MUCH / 2 * PAGE);
    assert_valid(c.pool);
    cr_assert_gt(stats_of(c.pool).remaps, 0);
    give(c.pool, large);
    for (int i = 0; i < 20; i++) /* holes smaller than a chunk */
        memset(take(c.pool, 3 * PAGE + UNIT), i, 3 * PAGE);
    cr_assert_leq(stats_of(c.pool).reserved_bytes, (MUCH + 20) * PAGE);
    assert_valid(c.pool);
    close_counted(&c);
}

/* Blocks that are nearly large take the memory that is there for large ones. */
Test(pool_chunks, blocks_that_are_nearly_large_need_no_chunk_broken)
{
    struct counted c;
    open_counted(&c, DEVICE_PAGES, NULL);
    admit(c.pool, MUCH);
    give(c.pool, take(c.pool, 8 * PAGE));
    (void)calls_of(&c, REBATCH_FAULT_MAP | REBATCH_FAULT_UNMAP | REBATCH_FAULT_CREATE);
    for (int i = 0; i < 40; i++)
        (void)take(c.pool, 8 * PAGE - UNIT);
    cr_assert_eq(calls_of(&c, 0), 0);
    cr_assert_eq(stats_of(c.pool).remaps, 0);
    cr_assert_eq(stats_of(c.pool).reserved_bytes, MUCH * PAGE);
    assert_valid(c.pool);
    close_counted(&c);
}

/* What is free of a chunk in use can be had where it is, and nowhere else. */
Test(pool_chunks, what_is_free_of_a_chunk_in_use_stays)
{
    enum { CHUNKS = MUCH / CHUNK };
    struct counted c;
    open_tight(&c, MUCH, 2);
    void *halves[2 * CHUNKS], *whole;
    for (int i = 0; i < 2 * CHUNKS; i++)
        halves[i] = take(c.pool, CHUNK / 2 * PAGE);
    for (int i = 0; i < 2 * CHUNKS; i += 2)
        give(c.pool, halves[i]);
    cr_assert_eq(rebatch_pool_alloc(&whole, c.pool, CHUNK * PAGE, NULL, 0), REBATCH_OOM);
    assert_valid(c.pool);
    size_t released;
    cr_assert_eq(rebatch_pool_trim(c.pool, 0, &released), REBATCH_OK);
    cr_assert_eq(released, 0);
    halves[0] = take(c.pool, CHUNK / 2 * PAGE);
    give(c.pool, halves[3]);
    (void)take(c.pool, CHUNK * PAGE);
    assert_valid(c.pool);
    close_counted(&c);
}

/* A random life with memory taken ahead and given back; the largest request that is said to fit
 * does. Seed 1. */
Test(pool_chunks, a_life_with_chunks)
{
    struct counted c;
    uint64_t random = 1;
    enum { LIVE = 48 };
    void *blocks[LIVE] = {NULL};
    open_counted(&c, 8192, NULL);
    size_t large = 0;
    for (int n = 0; n < 20000; n++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        const size_t at = (random >> 33) % LIVE, kind = (random >> 40) % 100;
        const size_t bytes = (random >> 20) % (kind < 50 ? 8 * PAGE : 480 * PAGE) + 1;
        if (blocks[at])
            give(c.pool, blocks[at]);
        blocks[at] = NULL;
        if (kind < 3)
            (void)rbi_pool_admit(c.pool, (3000 + kind * 1400) * PAGE, NULL);
        else if (kind == 3)
            cr_assert_eq(rebatch_pool_trim(c.pool, bytes, NULL), REBATCH_OK);
        else if (rebatch_pool_alloc(&blocks[at], c.pool, bytes, NULL, 0) == REBATCH_OOM) {
            rebatch_oom_report report;
            cr_assert_eq(rebatch_pool_last_oom(&report, c.pool), REBATCH_OK);
            cr_assert_lt(report.would_fit_bytes, bytes + UNIT);
            if (report.would_fit_bytes)
                blocks[at] = take(c.pool, report.would_fit_bytes);
        }
        if (blocks[at])
            memset(blocks[at], (int)n, UNIT);
        large = rbi_max(large, chunks_held(c.pool, 2) + chunks_held(c.pool, 3));
        if (n % 16 == 0)
            assert_valid(c.pool);
    }
    cr_assert_gt(large, 32);
    close_counted(&c);
}

/* A call of the device that fails costs nothing but what was asked for, whichever it is. */
static void live_through(uint32_t kind, uint64_t nth, uint64_t times, uint64_t *seen)
{
    struct counted c;
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    open_tight(&c, MUCH, 20);
    plan.calls = kind;
    plan.nth = nth;
    plan.times = times;
    cr_assert_eq(rebatch_fault_arm(c.device, &plan), REBATCH_OK);
    void *blocks[9] = {NULL};
    (void)rebatch_pool_trim(c.pool, 0, NULL);
    (void)rbi_pool_admit(c.pool, MUCH * PAGE, NULL);
    assert_valid(c.pool);
    for (int i = 0; i < 8; i++)
        may_fail(rebatch_pool_alloc(&blocks[i], c.pool, MUCH / 8 * PAGE, NULL, 0));
    for (int i = 0; i < 8; i += 2)
        if (blocks[i])
            give(c.pool, blocks[i]);
    may_fail(rebatch_pool_alloc(&blocks[8], c.pool, MUCH / 2 * PAGE, NULL, 0));
    assert_valid(c.pool);
    if (blocks[8])
        give(c.pool, blocks[8]);
    (void)rebatch_pool_trim(c.pool, 0, NULL);
    assert_valid(c.pool);
    (void)rbi_pool_admit(c.pool, MUCH * PAGE, NULL);
    assert_valid(c.pool);
    cr_assert_eq(rebatch_fault_counts(c.device, seen, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_fault_arm(c.device, NULL), REBATCH_OK);
    void *more;
    if (kind != REBATCH_FAULT_UNMAP)
        cr_assert_eq(rebatch_pool_alloc(&more, c.pool, PAGE, NULL, 0), REBATCH_OK);
    close_counted(&c);
}

static void fail_every(uint32_t kind)
{
    uint64_t seen = 1;
    for (uint64_t nth = 1; nth <= seen; nth++) {
        uint64_t ignored;
        live_through(kind, nth, 1, &seen);
        live_through(kind, nth, REBATCH_FAULT_FOREVER, &ignored);
    }
    cr_assert_gt(seen, 0);
}

Test(pool_chunks, every_create_may_fail)
{
    fail_every(REBATCH_FAULT_CREATE);
}
Test(pool_chunks, every_map_may_fail)
{
    fail_every(REBATCH_FAULT_MAP);
}
Test(pool_chunks, every_access_may_fail)
{
    fail_every(REBATCH_FAULT_ACCESS);
}
Test(pool_chunks, every_unmap_may_fail)
{
    fail_every(REBATCH_FAULT_UNMAP);
}
Test(pool_chunks, every_release_may_fail)
{
    fail_every(REBATCH_FAULT_RELEASE);
}

/* What a copy predicts is what the pool does. */
Test(pool_chunks, a_copy_has_the_chunks_too)
{
    struct counted c;
    open_tight(&c, MUCH, 20);
    (void)take(c.pool, 5 * PAGE + UNIT);
    rebatch_pool *copy;
    rebatch_device *dry;
    cr_assert_eq(rbi_pool_clone(&copy, &dry, c.pool), REBATCH_OK, "%s", rebatch_last_error());
    assert_valid(copy);
    for (unsigned size = 0; size < RBI_CHUNK_SIZES; size++)
        cr_assert_eq(chunks_held(copy, size), chunks_held(c.pool, size));
    size_t ours, theirs;
    cr_assert_eq(rebatch_pool_trim(c.pool, 0, &ours), REBATCH_OK);
    cr_assert_eq(rebatch_pool_trim(copy, 0, &theirs), REBATCH_OK);
    cr_assert_eq(ours, theirs);
    rebatch_pool_destroy(copy);
    rebatch_device_close(dry);
    close_counted(&c);
}

/* ---- a pool that grows ---- */

/* What it holds, so that its chunks are of 8 pages, and what it may hold beyond its peak. */
enum { HELD = 1024, GROWTH = 8, SLACK = HELD / 32 };

static void open_holding(struct counted *c, size_t pages, const rebatch_pool_options *options)
{
    open_counted(c, pages, options);
    (void)take(c->pool, HELD * PAGE);
    (void)calls_of(c, REBATCH_FAULT_CREATE | REBATCH_FAULT_MAP);
}

/* Small requests cost few calls; what a block leaves of a chunk is the next one's, in each zone. */
Test(pool_chunks, a_pool_that_grows_takes_whole_chunks)
{
    struct counted c;
    open_holding(&c, DEVICE_PAGES, NULL);
    for (int i = 0; i < 2 * GROWTH; i++)
        memset(take(c.pool, PAGE), i, PAGE);
    cr_assert_eq(calls_of(&c, REBATCH_FAULT_CREATE), 2 * 2);
    cr_assert_eq(chunks_held(c.pool, 3), 2);
    for (int i = 0; i < 16; i++)
        memset(take(c.pool, PAGE + PAGE / 2), i, PAGE + PAGE / 2);
    cr_assert_eq(stats_of(c.pool).reserved_bytes, (HELD + 2 * GROWTH + 24) * PAGE);
    for (int i = 0; i < 64; i++)
        (void)take(c.pool, PAGE / 128);
    cr_assert_eq(stats_of(c.pool).reserved_bytes, (HELD + 2 * GROWTH + 32) * PAGE);
    assert_valid(c.pool);
    close_counted(&c);
}

static void assert_takes_single(size_t pages, const rebatch_pool_options *options)
{
    struct counted c;
    open_holding(&c, pages, options);
    for (int i = 0; i < 5; i++)
        (void)take(c.pool, PAGE);
    cr_assert_eq(stats_of(c.pool).reserved_bytes, (HELD + 5) * PAGE);
    close_counted(&c);
}

/* Where memory is short, or shall be left to others, it takes what it needs and no more. */
Test(pool_chunks, a_pool_that_grows_takes_what_it_needs_where_memory_is_short)
{
    rebatch_pool_options keeps = REBATCH_POOL_OPTIONS_INIT;
    assert_takes_single(HELD + 300, NULL);
    keeps.keep_room_permille = 990;
    assert_takes_single(DEVICE_PAGES, &keeps);
}

/* All there is can be had to the last page. */
Test(pool_chunks, a_pool_that_grows_has_all_the_memory)
{
    struct counted c;
    void *block;
    size_t count = 0;
    open_holding(&c, DEVICE_PAGES, NULL);
    while (rebatch_pool_alloc(&block, c.pool, PAGE, NULL, 0) == REBATCH_OK)
        count++;
    cr_assert_eq(count, DEVICE_PAGES - HELD);
    cr_assert_gt(chunks_held(c.pool, 3), 0);
    assert_valid(c.pool);
    close_counted(&c);
}

/* Seed 1. */
Test(pool_chunks, a_life_of_a_pool_that_grows)
{
    struct counted c;
    uint64_t random = 1;
    enum { LIVE = 96 };
    void *blocks[LIVE] = {NULL};
    open_holding(&c, DEVICE_PAGES, NULL);
    for (int n = 0; n < 20000; n++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        const size_t at = (random >> 33) % LIVE, kind = (random >> 40) % 100;
        const size_t most = kind < 30 ? PAGE / 32 : kind < 70 ? 8 * PAGE : 60 * PAGE;
        if (blocks[at])
            give(c.pool, blocks[at]);
        blocks[at] = NULL;
        if (kind == 98)
            cr_assert_eq(rebatch_pool_trim(c.pool, 0, NULL), REBATCH_OK);
        else if (rebatch_pool_alloc(&blocks[at], c.pool, (random >> 20) % most + 1, NULL, 0) ==
                 REBATCH_OK)
            memset(blocks[at], n, 1);
        if (n % 16 == 0)
            assert_valid(c.pool);
    }
    cr_assert_gt(chunks_held(c.pool, 3), 0);
    close_counted(&c);
}

/* A call that fails costs a pool that grows nothing but what was asked for. */
static uint64_t grow_through(uint32_t kind, uint64_t nth, uint64_t times)
{
    struct counted c;
    uint64_t seen;
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    open_holding(&c, DEVICE_PAGES, NULL);
    plan.calls = kind;
    plan.nth = nth;
    plan.times = times;
    cr_assert_eq(rebatch_fault_arm(c.device, &plan), REBATCH_OK);
    for (size_t i = 0; i < 6; i++) {
        void *block;
        may_fail(rebatch_pool_alloc(&block, c.pool, (i + 1) * PAGE + UNIT, NULL, 0));
        assert_valid(c.pool);
    }
    cr_assert_eq(rebatch_fault_counts(c.device, &seen, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_fault_arm(c.device, NULL), REBATCH_OK);
    (void)take(c.pool, PAGE);
    close_counted(&c);
    return seen;
}

Test(pool_chunks, every_call_of_a_pool_that_grows_may_fail)
{
    const uint32_t kinds[] = {REBATCH_FAULT_CREATE, REBATCH_FAULT_MAP, REBATCH_FAULT_ACCESS};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        uint64_t seen = 1;
        for (uint64_t nth = 1; nth <= seen; nth++) {
            seen = grow_through(kinds[i], nth, 1);
            (void)grow_through(kinds[i], nth, REBATCH_FAULT_FOREVER);
        }
        cr_assert_gt(seen, 1);
    }
}
