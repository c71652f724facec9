/* Holds what large pieces promise: memory taken ahead of its use costs few calls of the device, and
 * what is wholly free of it goes wherever it is needed, or back. Seed 1 where a test draws. */

#include "unit/pool_help.h"

/* A piece is a thirty-second of what is asked for, as there is plenty. */
enum { PIECE = 32, AHEAD = 40 * PIECE, EIGHTH = AHEAD / 8, DEVICE_GRANULES = 4096 };

/* The last of a device, which comes in single granules. */
enum { SINGLES = 127 };

/* A pool of a device that counts, or fails, calls. */
struct counted {
    rebatch_device *host, *device;
    rebatch_pool *pool;
};

static void open_counted(struct counted *c, size_t granules, const rebatch_pool_options *options)
{
    cr_assert_eq(rebatch_device_open_host(&c->host, granules * GRANULE, NULL), REBATCH_OK);
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

static size_t pieces_held(const rebatch_pool *pool, unsigned size)
{
    return pool->spare[size].held;
}

static void admit(rebatch_pool *pool, size_t granules)
{
    cr_assert_eq(rbi_pool_admit(pool, granules * GRANULE, NULL), REBATCH_OK, "%s",
                 rebatch_last_error());
    assert_valid(pool);
}

Test(pool_pieces, memory_ahead_of_its_use_costs_few_calls)
{
    struct counted c;
    const uint32_t kinds = REBATCH_FAULT_CREATE | REBATCH_FAULT_MAP;
    open_counted(&c, DEVICE_GRANULES, NULL);
    (void)calls_of(&c, kinds);
    admit(c.pool, AHEAD);
    cr_assert_eq(calls_of(&c, REBATCH_FAULT_UNMAP | REBATCH_FAULT_RELEASE), 2 * AHEAD / PIECE);
    cr_assert_eq(stats_of(c.pool).reserved_bytes, AHEAD * GRANULE);
    size_t released;
    cr_assert_eq(rebatch_pool_trim(c.pool, 0, &released), REBATCH_OK);
    cr_assert_eq(released, AHEAD * GRANULE);
    cr_assert_eq(calls_of(&c, 0), 2 * AHEAD / PIECE);
    close_counted(&c);
}

/* Where there is 256 times as much, an eighth of a request is one piece. */
Test(pool_pieces, where_there_is_plenty_few_pieces_do)
{
    struct counted c;
    open_counted(&c, 4 * DEVICE_GRANULES, NULL);
    (void)calls_of(&c, REBATCH_FAULT_CREATE);
    admit(c.pool, 8 * PIECE);
    cr_assert_eq(calls_of(&c, 0), 8);
    cr_assert_eq(pieces_held(c.pool, 5), 8);
    close_counted(&c);
}

/* The largest piece has 512 granules. */
Test(pool_pieces, the_largest_piece_is_a_gibibyte)
{
    enum { LARGEST = 1 << (RBI_PIECE_SIZES - 1) };
    struct counted c;
    const size_t granules = 3 * LARGEST * (size_t)64, asked = granules / 3;
    cr_assert_eq(rebatch_device_open_dry(&c.host, granules * ((size_t)2 << 20), 0), REBATCH_OK);
    cr_assert_eq(rebatch_device_open_fault(&c.device, c.host, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&c.pool, c.device, NULL), REBATCH_OK);
    (void)calls_of(&c, REBATCH_FAULT_CREATE);
    cr_assert_eq(rbi_pool_admit(c.pool, asked << 21, NULL), REBATCH_OK);
    cr_assert_eq(calls_of(&c, 0), asked / LARGEST);
    cr_assert_eq(LARGEST, 512);
    assert_valid(c.pool);
    close_counted(&c);
}

/* So does what a callback reserves. */
Test(pool_pieces, what_is_reserved_comes_in_pieces)
{
    struct counted c;
    open_counted(&c, DEVICE_GRANULES, NULL);
    (void)calls_of(&c, REBATCH_FAULT_CREATE);
    cr_assert_eq(rebatch_pool_reserve(c.pool, AHEAD * GRANULE, NULL), REBATCH_OK);
    cr_assert_eq(calls_of(&c, 0), AHEAD / PIECE);
    (void)take(c.pool, AHEAD * GRANULE);
    close_counted(&c);
}

static void expect(rebatch_pool *pool, size_t granules)
{
    cr_assert_eq(rbi_pool_expect(pool, granules * GRANULE, NULL), REBATCH_OK, "%s",
                 rebatch_last_error());
    assert_valid(pool);
}

/* As it is asked for and no sooner, one piece behind the other; also where it is known that an
 * attempt needs it. What is not large comes in granules. */
Test(pool_pieces, what_is_expected_comes_in_pieces_when_it_is_used)
{
    struct counted c;
    open_counted(&c, DEVICE_GRANULES, NULL);
    expect(c.pool, AHEAD);
    admit(c.pool, AHEAD);
    cr_assert_eq(stats_of(c.pool).reserved_bytes, 0);
    char *const first = take(c.pool, 20 * GRANULE);
    cr_assert_eq(stats_of(c.pool).reserved_bytes, PIECE * GRANULE);
    char *const second = take(c.pool, 20 * GRANULE);
    cr_assert_eq(pieces_held(c.pool, 5), 2);
    cr_assert_eq(second, first + 20 * GRANULE);
    memset(first, 1, 40 * GRANULE);
    (void)take(c.pool, GRANULE / 2);
    cr_assert_eq(pieces_held(c.pool, 0), 1);
    (void)take(c.pool, (AHEAD - 40) * GRANULE);
    cr_assert_eq(pieces_held(c.pool, 5), AHEAD / PIECE);
    (void)take(c.pool, 20 * GRANULE);
    cr_assert_eq(pieces_held(c.pool, 0), 21, "no more was expected");
    cr_assert_eq(stats_of(c.pool).reserved_bytes, (AHEAD + 21) * GRANULE);
    assert_valid(c.pool);
    close_counted(&c);
}

/* What was not used when it ends is not taken at all, nor what would not come in large pieces. */
Test(pool_pieces, what_is_expected_no_more_comes_in_granules)
{
    struct counted c;
    open_counted(&c, DEVICE_GRANULES, NULL);
    expect(c.pool, AHEAD);
    expect(c.pool, 0);
    (void)take(c.pool, 20 * GRANULE);
    cr_assert_eq(pieces_held(c.pool, 0), 20);
    expect(c.pool, 63);
    (void)take(c.pool, 20 * GRANULE);
    cr_assert_eq(pieces_held(c.pool, 0), 40);
    admit(c.pool, 63);
    cr_assert_eq(stats_of(c.pool).reserved_bytes, (40 + 63) * GRANULE);
    close_counted(&c);
}

/* More than there is may be expected: all of it can be had, to the last granule. */
Test(pool_pieces, what_is_expected_in_vain_is_in_nobodys_way)
{
    struct counted c;
    open_counted(&c, DEVICE_GRANULES, NULL);
    expect(c.pool, 5 * DEVICE_GRANULES);
    for (size_t i = 0; i < DEVICE_GRANULES / 16; i++)
        (void)take(c.pool, 16 * GRANULE);
    cr_assert_eq(stats_of(c.pool).reserved_bytes, DEVICE_GRANULES * GRANULE);
    cr_assert_geq(pieces_held(c.pool, 0), SINGLES);
    cr_assert_eq(stats_of(c.pool).ooms, 0);
    assert_valid(c.pool);
    close_counted(&c);
}

static void take_of_expected(uint32_t kinds, uint64_t nth, uint64_t times)
{
    struct counted c;
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    open_counted(&c, DEVICE_GRANULES, NULL);
    expect(c.pool, AHEAD);
    plan.calls = kinds;
    plan.nth = nth;
    plan.times = times;
    cr_assert_eq(rebatch_fault_arm(c.device, &plan), REBATCH_OK);
    for (int i = 0; i < 4; i++) {
        void *block;
        const rebatch_status status = rebatch_pool_alloc(&block, c.pool, 40 * GRANULE, NULL, 0);
        cr_assert(status == REBATCH_OK || status == REBATCH_OOM, "%s", rebatch_last_error());
        assert_valid(c.pool);
    }
    plan = (rebatch_fault_plan)REBATCH_FAULT_PLAN_INIT;
    cr_assert_eq(rebatch_fault_arm(c.device, &plan), REBATCH_OK);
    (void)take(c.pool, 40 * GRANULE);
    close_counted(&c);
}

Test(pool_pieces, every_call_for_what_is_expected_may_fail)
{
    const uint32_t kinds[] = {REBATCH_FAULT_CREATE, REBATCH_FAULT_MAP, REBATCH_FAULT_ACCESS};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (uint64_t nth = 1; nth <= 8; nth++) {
            take_of_expected(kinds[k], nth, 1);
            take_of_expected(kinds[k], nth, REBATCH_FAULT_FOREVER);
        }
}

/* Little memory comes in granules: larger pieces would keep much of it where it is. */
Test(pool_pieces, little_memory_comes_in_granules)
{
    struct counted c;
    open_counted(&c, DEVICE_GRANULES, NULL);
    (void)calls_of(&c, REBATCH_FAULT_CREATE);
    admit(c.pool, 63);
    cr_assert_eq(calls_of(&c, 0), 63);
    cr_assert_eq(pieces_held(c.pool, 0), 63);
    close_counted(&c);
}

/* Each piece is at most a 64th of what there is when it is taken, so that they get smaller, and the
 * last of the memory comes in granules. */
Test(pool_pieces, pieces_get_smaller_as_the_room_does)
{
    struct counted c;
    open_counted(&c, DEVICE_GRANULES, NULL);
    admit(c.pool, DEVICE_GRANULES);
    size_t room = DEVICE_GRANULES;
    for (unsigned size = RBI_PIECE_SIZES; size-- > 1;)
        for (size_t i = 0; i < pieces_held(c.pool, size); i++) {
            cr_assert_leq((size_t)64 << size, room);
            room -= (size_t)1 << size;
        }
    cr_assert_leq(room, SINGLES + 1);
    cr_assert_eq(pieces_held(c.pool, 0), room);
    close_counted(&c);
}

/* A device that has no large piece gives what it has in smaller ones. */
Test(pool_pieces, a_device_without_large_pieces_gives_smaller_ones)
{
    struct counted c;
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    open_counted(&c, DEVICE_GRANULES, NULL);
    plan.calls = REBATCH_FAULT_CREATE;
    plan.nth = 1;
    plan.times = 2;
    cr_assert_eq(rebatch_fault_arm(c.device, &plan), REBATCH_OK);
    admit(c.pool, AHEAD);
    cr_assert_eq(pieces_held(c.pool, 3), AHEAD / 8);
    cr_assert_eq(stats_of(c.pool).reserved_bytes, AHEAD * GRANULE);
    close_counted(&c);
}

/* What is wholly free is moved as a whole where it fits, in granules elsewhere. */
Test(pool_pieces, free_pieces_go_where_they_are_needed)
{
    struct counted c;
    open_counted(&c, AHEAD + 400, NULL);
    admit(c.pool, AHEAD);
    void *blocks[8];
    for (int i = 0; i < 8; i++) /* the free block is taken from its end */
        blocks[i] = take(c.pool, EIGHTH * GRANULE);
    for (int i = 0; i < 8; i += 2)
        give(c.pool, blocks[i]);
    char *large = take(c.pool, 4 * EIGHTH * GRANULE);
    memset(large, 0x55, 4 * EIGHTH * GRANULE);
    assert_valid(c.pool);
    cr_assert_gt(stats_of(c.pool).remaps, 0);
    cr_assert_leq(stats_of(c.pool).reserved_bytes, (AHEAD + 400) * GRANULE);
    for (int i = 0; i < 20; i++) /* pieces smaller than a chunk */
        memset(take(c.pool, 3 * GRANULE + UNIT), i, 3 * GRANULE);
    assert_valid(c.pool);
    close_counted(&c);
}

/* The last micro-batch of a step is smaller, and so are its blocks. */
Test(pool_pieces, blocks_that_are_nearly_large_need_no_piece_broken)
{
    struct counted c;
    open_counted(&c, DEVICE_GRANULES, NULL);
    admit(c.pool, AHEAD);
    give(c.pool, take(c.pool, 8 * GRANULE));
    (void)calls_of(&c, REBATCH_FAULT_MAP | REBATCH_FAULT_UNMAP | REBATCH_FAULT_CREATE);
    for (int i = 0; i < 40; i++)
        (void)take(c.pool, 8 * GRANULE - UNIT);
    cr_assert_eq(calls_of(&c, 0), 0);
    cr_assert_eq(stats_of(c.pool).remaps, 0);
    cr_assert_eq(stats_of(c.pool).reserved_bytes, AHEAD * GRANULE);
    assert_valid(c.pool);
    close_counted(&c);
}

/* What is free of a piece in use can be had where it is, and nowhere else. */
Test(pool_pieces, what_is_free_of_a_piece_in_use_stays)
{
    enum { PIECES = 32 };
    struct counted c;
    open_counted(&c, DEVICE_GRANULES, NULL);
    admit(c.pool, PIECES * PIECE);
    cr_assert_eq(pieces_held(c.pool, 5), PIECES);
    cr_assert_eq(rebatch_pool_set_limit(c.pool, (PIECES * PIECE + 2) * GRANULE), REBATCH_OK);
    void *halves[2 * PIECES], *whole;
    for (int i = 0; i < 2 * PIECES; i++)
        halves[i] = take(c.pool, PIECE / 2 * GRANULE);
    for (int i = 0; i < 2 * PIECES; i += 2)
        give(c.pool, halves[i]);
    cr_assert_eq(rebatch_pool_alloc(&whole, c.pool, PIECE * GRANULE, NULL, 0), REBATCH_OOM);
    assert_valid(c.pool);
    size_t released;
    cr_assert_eq(rebatch_pool_trim(c.pool, 0, &released), REBATCH_OK);
    cr_assert_eq(released, 0);
    halves[0] = take(c.pool, PIECE / 2 * GRANULE);
    give(c.pool, halves[3]);
    (void)take(c.pool, PIECE * GRANULE);
    assert_valid(c.pool);
    close_counted(&c);
}

/* A random life with memory taken ahead and given back; the largest request that is said to fit
 * does. Seed 1. */
Test(pool_pieces, a_life_with_pieces)
{
    struct counted c;
    uint64_t random = 1;
    enum { LIVE = 48 };
    void *blocks[LIVE] = {NULL};
    open_counted(&c, DEVICE_GRANULES, NULL);
    size_t large = 0;
    for (int n = 0; n < 20000; n++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        const size_t at = (random >> 33) % LIVE, kind = (random >> 40) % 100;
        const size_t bytes = (random >> 20) % (kind < 50 ? 8 * GRANULE : 240 * GRANULE) + 1;
        if (blocks[at])
            give(c.pool, blocks[at]);
        blocks[at] = NULL;
        if (kind < 3)
            (void)rbi_pool_admit(c.pool, (1500 + kind * 700) * GRANULE, NULL);
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
        large = rbi_max(large, pieces_held(c.pool, 4) + pieces_held(c.pool, 5));
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
    open_counted(&c, AHEAD + 400, NULL);
    plan.calls = kind;
    plan.nth = nth;
    plan.times = times;
    cr_assert_eq(rebatch_fault_arm(c.device, &plan), REBATCH_OK);
    void *blocks[9] = {NULL};
    (void)rbi_pool_admit(c.pool, AHEAD * GRANULE, NULL);
    assert_valid(c.pool);
    for (int i = 0; i < 8; i++)
        (void)rebatch_pool_alloc(&blocks[i], c.pool, EIGHTH * GRANULE, NULL, 0);
    for (int i = 0; i < 8; i += 2)
        if (blocks[i])
            give(c.pool, blocks[i]);
    (void)rebatch_pool_alloc(&blocks[8], c.pool, 4 * EIGHTH * GRANULE, NULL, 0);
    assert_valid(c.pool);
    if (blocks[8])
        give(c.pool, blocks[8]);
    (void)rebatch_pool_trim(c.pool, 0, NULL);
    assert_valid(c.pool);
    (void)rbi_pool_admit(c.pool, AHEAD * GRANULE, NULL);
    assert_valid(c.pool);
    cr_assert_eq(rebatch_fault_counts(c.device, seen, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_fault_arm(c.device, NULL), REBATCH_OK);
    void *more;
    if (kind != REBATCH_FAULT_UNMAP)
        cr_assert_eq(rebatch_pool_alloc(&more, c.pool, GRANULE, NULL, 0), REBATCH_OK);
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

Test(pool_pieces, every_create_may_fail)
{
    fail_every(REBATCH_FAULT_CREATE);
}
Test(pool_pieces, every_map_may_fail)
{
    fail_every(REBATCH_FAULT_MAP);
}
Test(pool_pieces, every_access_may_fail)
{
    fail_every(REBATCH_FAULT_ACCESS);
}
Test(pool_pieces, every_unmap_may_fail)
{
    fail_every(REBATCH_FAULT_UNMAP);
}
Test(pool_pieces, every_release_may_fail)
{
    fail_every(REBATCH_FAULT_RELEASE);
}

/* What a copy predicts is what the pool does. */
Test(pool_pieces, a_copy_has_the_pieces_too)
{
    struct counted c;
    open_counted(&c, AHEAD + 400, NULL);
    admit(c.pool, AHEAD);
    (void)take(c.pool, 5 * GRANULE + UNIT);
    rebatch_pool *copy;
    rebatch_device *dry;
    cr_assert_eq(rbi_pool_clone(&copy, &dry, c.pool), REBATCH_OK, "%s", rebatch_last_error());
    assert_valid(copy);
    for (unsigned size = 0; size < RBI_PIECE_SIZES; size++)
        cr_assert_eq(pieces_held(copy, size), pieces_held(c.pool, size));
    size_t ours, theirs;
    cr_assert_eq(rebatch_pool_trim(c.pool, 0, &ours), REBATCH_OK);
    cr_assert_eq(rebatch_pool_trim(copy, 0, &theirs), REBATCH_OK);
    cr_assert_eq(ours, theirs);
    rebatch_pool_destroy(copy);
    rebatch_device_close(dry);
    close_counted(&c);
}

/* ---- a pool that is to grow ---- */

/* What it holds, so that pieces of it are of 8 granules. */
enum { HELD = 1024, GROWTH = 8 };

static void open_eager(struct counted *c, size_t granules, const rebatch_pool_options *options)
{
    open_counted(c, granules, options);
    (void)take(c->pool, HELD * GRANULE);
    rbi_pool_set_eager(c->pool, true);
    (void)calls_of(c, REBATCH_FAULT_CREATE | REBATCH_FAULT_MAP);
}

/* Its small requests cost few calls, and none of its memory lies idle when they are many. */
Test(pool_pieces, a_pool_that_is_to_grow_takes_whole_pieces)
{
    struct counted c;
    open_eager(&c, DEVICE_GRANULES, NULL);
    for (int i = 0; i < 8 * GROWTH; i++)
        memset(take(c.pool, GRANULE), i, GRANULE);
    cr_assert_eq(calls_of(&c, REBATCH_FAULT_CREATE), 2 * 8);
    cr_assert_eq(pieces_held(c.pool, 3), 8);
    cr_assert_eq(stats_of(c.pool).reserved_bytes, (HELD + 8 * GROWTH) * GRANULE);
    memset(take(c.pool, 9 * GRANULE), 1, 9 * GRANULE);
    cr_assert_eq(calls_of(&c, REBATCH_FAULT_CREATE), 2);
    cr_assert_eq(pieces_held(c.pool, 3), 10);
    rbi_pool_set_eager(c.pool, false);
    (void)take(c.pool, 8 * GRANULE);
    cr_assert_eq(calls_of(&c, 0), 1, "7 granules were left of the pieces");
    assert_valid(c.pool);
    close_counted(&c);
}

/* The smaller zones have pieces of their own; what a block leaves of one is for the next. */
Test(pool_pieces, what_is_left_of_a_piece_is_for_the_next_request)
{
    struct counted c;
    open_eager(&c, DEVICE_GRANULES, NULL);
    for (int i = 0; i < 16; i++)
        memset(take(c.pool, GRANULE + GRANULE / 2), i, GRANULE + GRANULE / 2);
    cr_assert_eq(stats_of(c.pool).reserved_bytes, (HELD + 24) * GRANULE);
    for (int i = 0; i < 64; i++)
        (void)take(c.pool, GRANULE / 128);
    cr_assert_eq(stats_of(c.pool).reserved_bytes, (HELD + 32) * GRANULE);
    cr_assert_eq(pieces_held(c.pool, 3), 4);
    assert_valid(c.pool);
    close_counted(&c);
}

static void assert_takes_single(size_t granules, const rebatch_pool_options *options)
{
    struct counted c;
    open_eager(&c, granules, options);
    for (int i = 0; i < 5; i++)
        (void)take(c.pool, GRANULE);
    cr_assert_eq(stats_of(c.pool).reserved_bytes, (HELD + 5) * GRANULE);
    cr_assert_eq(pieces_held(c.pool, 0), HELD + 5);
    close_counted(&c);
}

/* Where memory is short, or shall be left to others, it takes what it needs and no more. */
Test(pool_pieces, a_pool_that_is_to_grow_takes_nothing_ahead_without_plenty)
{
    rebatch_pool_options keeps = REBATCH_POOL_OPTIONS_INIT, collects = REBATCH_POOL_OPTIONS_INIT;
    assert_takes_single(HELD + 300, NULL);
    keeps.keep_room_permille = 900;
    assert_takes_single(DEVICE_GRANULES, &keeps);
    collects.gc_threshold_permille = 200;
    assert_takes_single(DEVICE_GRANULES, &collects);
}

/* All there is can be had to the last granule. */
Test(pool_pieces, a_pool_that_is_to_grow_has_all_the_memory)
{
    struct counted c;
    void *block;
    size_t count = 0;
    open_eager(&c, DEVICE_GRANULES, NULL);
    while (rebatch_pool_alloc(&block, c.pool, GRANULE, NULL, 0) == REBATCH_OK)
        count++;
    cr_assert_eq(count, DEVICE_GRANULES - HELD);
    cr_assert_gt(pieces_held(c.pool, 3), 0);
    assert_valid(c.pool);
    close_counted(&c);
}

/* The same random life, growing and not. Seed 1. */
Test(pool_pieces, a_life_of_a_pool_that_is_to_grow)
{
    struct counted c;
    uint64_t random = 1;
    enum { LIVE = 96 };
    void *blocks[LIVE] = {NULL};
    open_eager(&c, DEVICE_GRANULES, NULL);
    for (int n = 0; n < 20000; n++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        const size_t at = (random >> 33) % LIVE, kind = (random >> 40) % 100;
        const size_t most = kind < 30 ? GRANULE / 32 : kind < 70 ? 8 * GRANULE : 60 * GRANULE;
        if (blocks[at])
            give(c.pool, blocks[at]);
        blocks[at] = NULL;
        if (kind == 99)
            rbi_pool_set_eager(c.pool, random >> 63);
        else if (kind == 98)
            cr_assert_eq(rebatch_pool_trim(c.pool, 0, NULL), REBATCH_OK);
        else if (rebatch_pool_alloc(&blocks[at], c.pool, (random >> 20) % most + 1, NULL, 0) ==
                 REBATCH_OK)
            memset(blocks[at], n, 1);
        if (n % 16 == 0)
            assert_valid(c.pool);
    }
    cr_assert_gt(pieces_held(c.pool, 3), 0);
    close_counted(&c);
}

/* A call that fails costs a pool that is to grow nothing but what was asked for. */
static uint64_t grow_through(uint32_t kind, uint64_t nth, uint64_t times)
{
    struct counted c;
    uint64_t seen;
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    open_eager(&c, DEVICE_GRANULES, NULL);
    plan.calls = kind;
    plan.nth = nth;
    plan.times = times;
    cr_assert_eq(rebatch_fault_arm(c.device, &plan), REBATCH_OK);
    for (size_t i = 0; i < 6; i++) {
        void *block;
        (void)rebatch_pool_alloc(&block, c.pool, (i + 1) * GRANULE + UNIT, NULL, 0);
        assert_valid(c.pool);
    }
    cr_assert_eq(rebatch_fault_counts(c.device, &seen, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_fault_arm(c.device, NULL), REBATCH_OK);
    (void)take(c.pool, GRANULE);
    close_counted(&c);
    return seen;
}

Test(pool_pieces, every_call_of_a_pool_that_is_to_grow_may_fail)
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
