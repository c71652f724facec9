/* Holds the rule for streams: where some read blocks that the pool was not told of, no memory
 * leaves the stream of its block before all work is done that the device had at the free.
 * The lazy device fails a test that takes memory from under work. Seeds: 1 to 20 in the plan's. */
#include "unit/lazy_device.h"
#include "unit/pool_help.h"

/* Blocks are of `owner`; `reader` is no stream that the pool ever sees. */
struct world {
    rebatch_device *device;
    rebatch_pool *pool;
    rebatch_stream owner, other, reader;
    bool may_wait;
    int turn; /* of two */
};

static bool may_wait(void *user)
{
    return ((struct world *)user)->may_wait;
}

static void open_world(struct world *w, size_t pages, bool has_events)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    w->may_wait = true;
    w->device = lazy_open(pages * PAGE, PAGE, true);
    lazy_set_events(has_events);
    options.may_wait = may_wait;
    options.may_wait_user = w;
    cr_assert_eq(rebatch_pool_create(&w->pool, w->device, &options), REBATCH_OK);
    cr_assert_eq(rebatch_stream_create(&w->owner, w->device), REBATCH_OK);
    cr_assert_eq(rebatch_stream_create(&w->other, w->device), REBATCH_OK);
    cr_assert_eq(rebatch_stream_create(&w->reader, w->device), REBATCH_OK);
}

static void close_world(struct world *w)
{
    assert_valid(w->pool);
    rebatch_pool_destroy(w->pool);
    rebatch_stream_destroy(w->device, w->owner);
    rebatch_stream_destroy(w->device, w->other);
    rebatch_stream_destroy(w->device, w->reader);
    lazy_close(w->device);
}

static void *take_checked(const struct world *w, size_t pages, rebatch_stream stream)
{
    void *block = take_on(w->pool, pages * PAGE, stream);
    lazy_check_fresh(stream, block, pages * PAGE);
    lazy_use(stream, block, pages * PAGE);
    return block;
}

/* A block that its own stream is done with, and that is read. */
static void *take_read(const struct world *w, size_t pages)
{
    void *block = take_checked(w, pages, w->owner);
    lazy_go_on(w->owner, 8);
    lazy_read(w->reader, w->owner, block, pages * PAGE);
    return block;
}

static bool is_read(void)
{
    return lazy_under_way() > 0;
}

static void finish_other_work(const struct world *w)
{
    lazy_go_on(w->owner, 8);
    lazy_go_on(w->other, 8);
}

/* For a loop: the world without events, where only a wait tells, then that with them;
 * each is closed when its turn is over. */
static bool next_world(struct world *w, size_t pages)
{
    if (w->turn > 0)
        close_world(w);
    if (w->turn < 2)
        open_world(w, pages, w->turn > 0);
    return w->turn++ < 2;
}

static bool has_events(const struct world *w)
{
    return w->turn == 2;
}

Test(pool_after_device, another_stream_gets_a_block_only_when_nobody_reads_it)
{
    for (struct world w[1] = {{0}}; next_world(w, 64);) {
        void *const block = take_read(w, 8);
        give(w->pool, block);
        void *const fresh = take_checked(w, 8, w->other);
        cr_assert_neq(fresh, block);
        lazy_go_on(w->reader, 8);
        finish_other_work(w);
        if (has_events(w))
            cr_assert_eq(take_checked(w, 8, w->other), block);
    }
}

Test(pool_after_device, its_own_stream_gets_it_at_once)
{
    for (struct world w[1] = {{0}}; next_world(w, 64);) {
        void *const block = take_read(w, 8);
        give(w->pool, block);
        cr_assert_eq(take_checked(w, 8, w->owner), block);
        cr_assert(is_read());
        lazy_go_on(w->reader, 8);
    }
}

/* The device is full, so the pool waits rather than fail. */
Test(pool_after_device, the_pool_waits_for_the_device_before_it_fails)
{
    for (struct world w[1] = {{0}}; next_world(w, 8);) {
        void *const block = take_read(w, 8);
        give(w->pool, block);
        cr_assert_eq(take_checked(w, 8, w->other), block);
    }
}

Test(pool_after_device, pages_move_only_when_nobody_reads_them)
{
    for (struct world w[1] = {{0}}; next_world(w, 9);) {
        void *const block = take_read(w, 4);
        void *const between = take_checked(w, 1, w->owner);
        give(w->pool, block);
        void *const large = take_checked(w, 8, w->owner); /* four of its pages are the block's */
        cr_assert_neq(large, block);
        give(w->pool, between);
    }
}

Test(pool_after_device, a_trim_waits_for_the_device)
{
    for (struct world w[1] = {{0}}; next_world(w, 64);) {
        size_t released;
        give(w->pool, take_read(w, 8));
        cr_assert_eq(rebatch_pool_trim(w->pool, 0, &released), REBATCH_OK);
        cr_assert_eq(released, 8 * PAGE);
        cr_assert_not(is_read());
    }
}

Test(pool_after_device, so_does_a_limit_that_is_lowered)
{
    for (struct world w[1] = {{0}}; next_world(w, 64);) {
        give(w->pool, take_read(w, 8));
        cr_assert_eq(rebatch_pool_set_limit(w->pool, PAGE), REBATCH_OK);
        cr_assert_leq(stats_of(w->pool).reserved_bytes, PAGE);
    }
}

Test(pool_after_device, what_a_rollback_takes_back_stays_with_its_stream)
{
    for (struct world w[1] = {{0}}; next_world(w, 64);) {
        const rebatch_scope scope = begin(w->pool);
        void *const block = take_read(w, 8);
        rollback(w->pool, scope);
        cr_assert_neq(take_checked(w, 8, w->other), block);
        cr_assert_eq(take_checked(w, 8, w->owner), block);
        lazy_go_on(w->reader, 8);
    }
}

Test(pool_after_device, admission_and_reservation_wait_for_the_device)
{
    for (struct world w[1] = {{0}}; next_world(w, 10);) {
        void *const block = take_read(w, 8);
        give(w->pool, block);
        cr_assert_eq(rbi_pool_admit(w->pool, 8 * PAGE, w->other), REBATCH_OK);
        cr_assert_eq(rebatch_pool_reserve(w->pool, 8 * PAGE, w->other), REBATCH_OK);
        (void)take_checked(w, 8, w->other);
    }
}

Test(pool_after_device, a_block_of_a_destroyed_stream_may_still_be_read)
{
    for (struct world w[1] = {{0}}; next_world(w, 64);) {
        void *const block = take_read(w, 8);
        give(w->pool, block);
        rebatch_stream_destroy(w->device, w->owner);
        cr_assert_neq(take_checked(w, 8, w->other), block);
        lazy_go_on(w->reader, 8);
        cr_assert_eq(rebatch_stream_create(&w->owner, w->device), REBATCH_OK);
    }
}

/* Not even its own stream gets it before. */
Test(pool_after_device, a_declared_use_ends_with_all_work)
{
    for (struct world w[1] = {{0}}; next_world(w, 64);) {
        void *const unrelated = take_read(w, 2);
        void *const block = take_checked(w, 8, w->owner);
        cr_assert_eq(rebatch_pool_use_on(w->pool, block, w->other), REBATCH_OK);
        lazy_use(w->other, block, 8 * PAGE);
        give(w->pool, block);
        finish_other_work(w);
        cr_assert_neq(take_checked(w, 8, w->owner), block);
        cr_assert(is_read());
        lazy_go_on(w->reader, 8);
        finish_other_work(w);
        if (has_events(w))
            cr_assert_eq(take_checked(w, 8, w->owner), block);
        give(w->pool, unrelated);
    }
}

Test(pool_after_device, where_it_must_not_wait_memory_stays_with_its_stream)
{
    for (struct world w[1] = {{0}}; next_world(w, 9);) {
        void *const block = take_read(w, 4), *pointer;
        (void)take_checked(w, 1, w->owner);
        give(w->pool, block);
        w->may_wait = false;
        const uint64_t calls = lazy_event_calls();
        cr_assert_eq(rebatch_pool_alloc(&pointer, w->pool, 8 * PAGE, w->owner, 0), REBATCH_OOM);
        cr_assert_eq(rebatch_pool_alloc(&pointer, w->pool, 6 * PAGE, w->other, 0), REBATCH_OOM);
        cr_assert_eq(rebatch_pool_trim(w->pool, 0, NULL), REBATCH_OK);
        cr_assert_eq(lazy_event_calls(), calls);
        cr_assert(is_read());
        cr_assert_eq(take_checked(w, 4, w->owner), block); /* its own is there all the same */
        give(w->pool, block);
        w->may_wait = true;
        (void)take_checked(w, 8, w->owner);
    }
}

/* As while a graph is captured. Two streams share memory, so frees get events otherwise. */
Test(pool_after_device, where_it_must_not_wait_no_event_is_recorded_or_asked)
{
    struct world w;
    open_world(&w, 64, true);
    give(w.pool, take_checked(&w, 8, w.owner));
    void *const used = take_checked(&w, 4, w.other);
    cr_assert_gt(w.pool->progress.count, 0);
    cr_assert_eq(rebatch_pool_use_on(w.pool, used, w.owner), REBATCH_OK);
    w.may_wait = false;
    const uint64_t calls = lazy_event_calls();
    give(w.pool, used);
    finish_other_work(&w);
    for (int i = 0; i < 100; i++)
        give(w.pool, take_checked(&w, 2, w.owner));
    cr_assert_neq(take_checked(&w, 4, w.other), used);
    cr_assert_eq(lazy_event_calls(), calls);
    w.may_wait = true;
    finish_other_work(&w);
    cr_assert_eq(take_checked(&w, 4, w.other), used);
    cr_assert_gt(lazy_event_calls(), calls);
    close_world(&w);
}

/* Blocks in use, freed ones, and one that another stream uses besides. */
Test(pool_after_device, the_end_of_the_pool_waits_all_the_same)
{
    for (struct world w[1] = {{0}}; next_world(w, 64);) {
        void *const blocks[] = {take_read(w, 4), take_read(w, 4), take_checked(w, 8, w->other)};
        cr_assert_eq(rebatch_pool_use_on(w->pool, blocks[2], w->owner), REBATCH_OK);
        lazy_use(w->owner, blocks[2], 8 * PAGE);
        give(w->pool, blocks[1]);
        give(w->pool, blocks[2]);
        w->may_wait = false;
        rebatch_memory_info info;
        rebatch_pool_destroy(w->pool);
        cr_assert_eq(rebatch_device_memory(w->device, &info), REBATCH_OK);
        cr_assert_eq(info.used_bytes, 0);
        cr_assert_eq(rebatch_pool_create(&w->pool, w->device, NULL), REBATCH_OK);
    }
}

/* Each block is read until a share of the work goes on. */
static void run_phase(struct world *w, uint64_t seed, uint64_t lag)
{
    enum { BLOCKS = 40, OPEN = 6 };
    void *open[OPEN] = {NULL};
    uint64_t random = seed;
    cr_assert_eq(rebatch_pool_mark(w->pool, 1), REBATCH_OK);
    for (int i = 0; i < BLOCKS; i++) {
        const size_t at = draw(&random) % OPEN, pages = 1 + draw(&random) % 6;
        if (open[at])
            give(w->pool, open[at]);
        open[at] = take_checked(w, pages, w->owner);
        lazy_read(w->reader, w->owner, open[at], pages * PAGE);
        lazy_go_on(w->owner, (unsigned)(lag % 9));
        lazy_go_on(w->reader, (unsigned)(lag / 9 % 9));
    }
    for (int i = 0; i < OPEN; i++)
        if (open[i])
            give(w->pool, open[i]);
}

Test(pool_after_device, an_arena_is_laid_where_nobody_reads)
{
    uint64_t planned = 0;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        struct world w;
        open_world(&w, 40, seed % 2);
        for (uint64_t phase = 0; phase < 30; phase++)
            run_phase(&w, seed, seed * 7 + phase);
        planned += stats_of(w.pool).planned_phases;
        lazy_go_on(w.reader, 8);
        close_world(&w);
    }
    cr_assert_gt(planned, 100, "%ju phases were planned", (uintmax_t)planned);
}

/* Nor does it wait. */
Test(pool_after_device, what_a_stream_finds_by_itself_costs_no_call)
{
    struct world w;
    open_world(&w, 64, true);
    for (int i = 0; i < 100; i++)
        give(w.pool, take_checked(&w, 8, w.owner));
    const uint64_t calls = lazy_event_calls();
    for (int i = 0; i < 1000; i++)
        give(w.pool, take_checked(&w, 8, w.owner));
    cr_assert_eq(lazy_event_calls(), calls);
    close_world(&w);
}
