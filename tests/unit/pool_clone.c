/* Owns the tests of a pool's copy: the same calls find the same addresses.
 * Must not know what copies are for. */
#include "unit/lazy_device.h"
#include "unit/pool_help.h"

#define CALLS 400
#define LIVE_MOST 96

/* A block in use, in both pools. */
struct pair {
    void *here, *there;
};

/* Of a hole, the name of its stream is the pool's own. */
static rebatch_stream stream_name(const struct rbi_block *block)
{
    return block->state == RBI_BLOCK_HOLE ? NULL : rbi_stream_of(block)->stream;
}

/* New ranges are at other addresses: what must be the same is the range and the place in it. */
static void assert_same_block(const struct rbi_block *here, const struct rbi_block *there)
{
    cr_assert_eq(here->range->number, there->range->number);
    cr_assert_eq(here->address - here->range->address, there->address - there->range->address);
    cr_assert_eq(here->bytes, there->bytes);
    cr_assert_eq(here->state, there->state);
    cr_assert_eq(here->freed_at, there->freed_at);
    cr_assert_eq(here->sequence, there->sequence);
    cr_assert_eq(stream_name(here), stream_name(there));
}

static void assert_same_place(rebatch_pool *pool, rebatch_pool *copy, struct pair pair)
{
    assert_same_block(rbi_block_around(&pool->heap, pair.here),
                      rbi_block_around(&copy->heap, pair.there));
}

static void assert_same_layout(rebatch_pool *pool, rebatch_pool *copy)
{
    merge_freed(pool);
    merge_freed(copy);
    const struct rbi_range *theirs = copy->heap.first_range;
    for (const struct rbi_range *r = pool->heap.first_range; r;
         r = r->next, theirs = theirs->next) {
        const struct rbi_block *there = theirs->first;
        for (const struct rbi_block *b = r->first; b; b = b->after, there = there->after)
            assert_same_block(b, there);
        cr_assert_null(there);
    }
    cr_assert_null(theirs);
}

static size_t draw_bytes(uint64_t *state)
{
    return 1 + (size_t)(draw(state) % (PAGE << draw(state) % 4));
}

/* One random call on both pools, which must answer alike. */
static void call_both(rebatch_pool *pool, rebatch_pool *copy, struct pair *blocks, size_t *count,
                      uint64_t *state)
{
    const uint64_t choice = draw(state) % 16;
    if (choice < 7 && *count > 0) {
        const size_t i = (size_t)(draw(state) % *count);
        give(pool, blocks[i].here);
        give(copy, blocks[i].there);
        blocks[i] = blocks[--*count];
    } else if (choice == 7) {
        const size_t bytes = 4 * draw_bytes(state);
        cr_assert_eq(rebatch_pool_reserve(pool, bytes, NULL),
                     rebatch_pool_reserve(copy, bytes, NULL));
    } else if (*count < LIVE_MOST) {
        const size_t bytes = draw_bytes(state);
        struct pair *pair = &blocks[*count];
        const rebatch_status status = rebatch_pool_alloc(&pair->here, pool, bytes, NULL, 0);
        cr_assert_eq(rebatch_pool_alloc(&pair->there, copy, bytes, NULL, 0), status);
        if (status == REBATCH_OK)
            assert_same_place(pool, copy, blocks[(*count)++]);
        else
            cr_assert_eq(status, REBATCH_OOM);
    }
}

/* Allocates and frees at random, on both streams. */
static size_t make_untidy(rebatch_pool *pool, struct pair *blocks, rebatch_stream other,
                          uint64_t *state)
{
    size_t count = 0;
    for (int i = 0; i < CALLS; i++) {
        void *block;
        if (draw(state) % 2 && count > 0)
            give(pool, blocks[--count].here);
        else if (count < LIVE_MOST &&
                 rebatch_pool_alloc(&block, pool, draw_bytes(state), draw(state) % 4 ? NULL : other,
                                    0) == REBATCH_OK)
            blocks[count++] = (struct pair){block, block};
    }
    return count;
}

/* Makes a pool untidy, copies it within a scope, and goes on with both. Not with two streams: when
 * a pool notices that the work on another one is done depends on time. */
static void compare(const rebatch_pool_options *options, bool plain, bool two, uint64_t seed)
{
    struct rig rig = plain ? rig_open_plain(200, options) : rig_open(200, options);
    rebatch_stream other = NULL;
    struct pair blocks[LIVE_MOST];
    uint64_t state = seed;
    if (two)
        cr_assert_eq(rebatch_stream_create(&other, rig.device), REBATCH_OK);
    size_t count = make_untidy(rig.pool, blocks, other, &state);
    const rebatch_scope scope = begin(rig.pool);
    if (count > 0)
        give(rig.pool, blocks[--count].here); /* waits for the commit */
    rebatch_device *dry;
    rebatch_pool *copy;
    cr_assert_eq(rbi_pool_clone(&copy, &dry, rig.pool), REBATCH_OK, "%s", rebatch_last_error());
    assert_valid(copy);
    assert_valid(rig.pool);
    assert_same_layout(rig.pool, copy);
    cr_assert_eq(copy->warm_peak_bytes, rig.pool->warm_peak_bytes);
    cr_assert_eq(copy->warm_sequence, rig.pool->warm_sequence);
    size_t here, there;
    cr_assert_eq(rebatch_pool_available(&here, rig.pool), REBATCH_OK);
    cr_assert_eq(rebatch_pool_available(&there, copy), REBATCH_OK);
    cr_assert_eq(here, there);
    cr_assert_eq(rebatch_scope_commit(rig.pool, scope), REBATCH_OK);
    cr_assert_eq(rebatch_scope_commit(copy, scope), REBATCH_OK);
    for (int i = 0; i < CALLS && !two; i++)
        call_both(rig.pool, copy, blocks, &count, &state);
    assert_same_layout(rig.pool, copy);
    cr_assert_eq(stats_of(rig.pool).live_bytes, stats_of(copy).live_bytes);
    cr_assert_eq(stats_of(rig.pool).reserved_bytes, stats_of(copy).reserved_bytes);
    cr_assert_eq(stats_of(rig.pool).ooms, stats_of(copy).ooms);
    assert_valid(copy);
    rebatch_pool_destroy(copy);
    rebatch_device_close(dry);
    while (count > 0)
        give(rig.pool, blocks[--count].here);
    rebatch_stream_destroy(rig.device, other);
    rig_close(&rig);
}

Test(pool_clone, the_same_calls_find_the_same_addresses)
{
    const rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    for (uint64_t seed = 1; seed <= 40; seed++)
        compare(&options, false, seed % 4 == 0, seed);
}

Test(pool_clone, options_and_limits_are_the_pools)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.limit_permille = 700;
    options.headroom_bytes = 3 * PAGE;
    options.rounding_divisions = 8;
    for (uint64_t seed = 100; seed <= 120; seed++)
        compare(&options, false, seed % 4 == 0, seed);
}

Test(pool_clone, a_device_without_virtual_memory_has_the_same_room)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    compare(&options, true, false, 7);
    options.caching = REBATCH_OFF;
    compare(&options, true, false, 8);
}

Test(pool_clone, what_others_hold_is_held_of_the_copys_device)
{
    struct rig rig = rig_open(32, NULL);
    void *theirs;
    cr_assert_eq(rbi_device_alloc(rig.device, &theirs, 5 * PAGE), REBATCH_OK);
    void *block = take(rig.pool, 3 * PAGE);
    rebatch_device *dry;
    rebatch_pool *copy;
    size_t room;
    cr_assert_eq(rbi_pool_clone(&copy, &dry, rig.pool), REBATCH_OK);
    cr_assert_eq(rebatch_pool_available(&room, copy), REBATCH_OK);
    cr_assert_eq(room, 24 * PAGE);
    give(copy, block);
    rebatch_pool_destroy(copy);
    rebatch_device_close(dry);
    cr_assert_eq(rebatch_device_set_capacity(rig.device, 6 * PAGE), REBATCH_OK);
    cr_assert_eq(rbi_pool_clone(&copy, &dry, rig.pool), REBATCH_OK, "%s", rebatch_last_error());
    cr_assert_eq(rebatch_pool_available(&room, copy), REBATCH_OK);
    cr_assert_eq(room, 0, "a cap below what is held");
    rebatch_pool_destroy(copy);
    rebatch_device_close(dry);
    give(rig.pool, block);
    cr_assert_eq(rbi_device_free(rig.device, theirs, 5 * PAGE), REBATCH_OK);
    rig_close(&rig);
}

static void copy_and_drop(rebatch_pool *pool)
{
    rebatch_device *dry;
    rebatch_pool *copy;
    cr_assert_eq(rbi_pool_clone(&copy, &dry, pool), REBATCH_OK, "%s", rebatch_last_error());
    assert_valid(copy);
    cr_assert_null(copy->pending);
    rebatch_pool_destroy(copy);
    rebatch_device_close(dry);
}

/* Whoever looks ahead does not hold the device up: what a stream frees is its own. A block that
 * another stream used is free only when the device is done with it. */
Test(pool_clone, work_is_waited_for_only_where_blocks_wait_for_it)
{
    rebatch_device *device = lazy_open(64 * PAGE, PAGE, true);
    rebatch_stream other;
    rebatch_pool *pool;
    cr_assert_eq(rebatch_pool_create(&pool, device, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_stream_create(&other, device), REBATCH_OK);
    void *block = take(pool, 4 * PAGE);
    lazy_use(NULL, block, 4 * PAGE);
    give(pool, block);
    copy_and_drop(pool);
    cr_assert_lt(pool->progress.done, pool->progress.frees);
    block = take(pool, 4 * PAGE);
    lazy_use(other, block, 4 * PAGE);
    cr_assert_eq(rebatch_pool_use_on(pool, block, other), REBATCH_OK);
    give(pool, block);
    cr_assert_not_null(pool->pending);
    copy_and_drop(pool);
    cr_assert_eq(pool->progress.done, pool->progress.frees);
    cr_assert_null(pool->pending);
    rebatch_pool_destroy(pool);
    rebatch_stream_destroy(device, other);
    lazy_close(device);
}

Test(pool_clone, without_host_memory_it_says_so_and_leaves_nothing)
{
    struct rig rig = rig_open(32, NULL);
    void *block = take(rig.pool, 3 * PAGE);
    rebatch_device *dry;
    rebatch_pool *copy;
    const int64_t before = rbi_heap_live();
    rebatch_status status = REBATCH_E_HOST_OOM;
    for (uint64_t nth = 1; status; nth++) {
        rbi_heap_fail(nth, 1);
        status = rbi_pool_clone(&copy, &dry, rig.pool);
        rbi_heap_fail(0, 0);
        cr_assert_eq(status, status ? REBATCH_E_HOST_OOM : REBATCH_OK);
        if (status)
            cr_assert(!copy && !dry);
        cr_assert(status == REBATCH_OK || rbi_heap_live() == before, "call %d", (int)nth);
        cr_assert_lt(nth, 100);
    }
    rebatch_pool_destroy(copy);
    rebatch_device_close(dry);
    give(rig.pool, block);
    rig_close(&rig);
}

/* A dry device counts its addresses up, and the copy's begins below those of the pool's blocks. */
Test(pool_clone, the_copy_of_a_pool_on_a_dry_device_gives_out_no_address_of_the_pool)
{
    enum { BLOCKS = 24 };
    static struct rbi_device_ops plain; /* each test is a process of its own */
    for (int is_plain = 0; is_plain < 2; is_plain++) {
        rebatch_device *device, *dry;
        rebatch_pool *pool, *copy;
        char *blocks[BLOCKS];
        cr_assert_eq(rebatch_device_open_dry(&device, REBATCH_UNLIMITED, PAGE), REBATCH_OK);
        if (is_plain) {
            plain = *device->ops;
            plain.reserve = NULL;
            device->ops = &plain;
        }
        cr_assert_eq(rebatch_pool_create(&pool, device, NULL), REBATCH_OK);
        for (size_t i = 0; i < BLOCKS; i++)
            blocks[i] = take(pool, (i + 1) * PAGE);
        for (size_t i = 0; i < BLOCKS; i += 2)
            give(pool, blocks[i]);
        cr_assert_eq(rebatch_pool_trim(pool, 0, NULL), REBATCH_OK);
        cr_assert_eq(rbi_pool_clone(&copy, &dry, pool), REBATCH_OK);
        for (size_t n = 1; n <= BLOCKS; n++) {
            const char *fresh = take(copy, n * PAGE);
            for (size_t i = 1; i < BLOCKS; i += 2)
                cr_assert(fresh + n * PAGE <= blocks[i] || blocks[i] + (i + 1) * PAGE <= fresh,
                          "the %zu. of the copy is block %zu of the pool", n, i);
        }
        assert_valid(copy);
        rebatch_pool_destroy(copy);
        rebatch_device_close(dry);
        for (size_t i = 1; i < BLOCKS; i += 2)
            give(pool, blocks[i]);
        rebatch_pool_destroy(pool);
        rebatch_device_close(device);
    }
}
