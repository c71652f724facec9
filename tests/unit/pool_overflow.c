/* Holds what is promised of host memory where allocations must not fail: they do not, the limit of
 * the device holds, contents keep their addresses on the way back, and a call that fails loses
 * nothing. Seeds: 1 to 20 in the random test. */
#include "fault/fault_device.h"
#include "unit/awaited.h"
#include "unit/pool_help.h"

/* A device of so many pages, and so many of the host beside it. */
static struct rig open_beside(size_t pages, size_t beside, const rebatch_pool_options *options)
{
    struct rig rig = {NULL, NULL};
    rebatch_host_options host = REBATCH_HOST_OPTIONS_INIT;
    host.overflow_bytes = beside * PAGE;
    cr_assert_eq(rebatch_device_open_host(&rig.device, pages * PAGE, &host), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&rig.pool, rig.device, options), REBATCH_OK);
    return rig;
}

static void allow(rebatch_pool *pool, bool may)
{
    cr_assert_eq(rebatch_pool_allow_overflow(pool, may), REBATCH_OK, "%s", rebatch_last_error());
    assert_valid(pool);
}

static void *take_filled(rebatch_pool *pool, size_t bytes, int value)
{
    void *block = take(pool, bytes);
    memset(block, value, bytes);
    return block;
}

Test(pool_overflow, host_memory_serves_what_must_not_fail)
{
    AUTO_RIG rig = open_beside(8, 100, NULL);
    void *const first = take_filled(rig.pool, 5 * PAGE, 1);
    assert_oom(rig.pool, 6 * PAGE);
    allow(rig.pool, true);
    void *const second = take_filled(rig.pool, 6 * PAGE, 2);
    cr_assert_eq(stats_of(rig.pool).overflow_bytes, 3 * PAGE); /* the device had three */
    cr_assert_eq(used_of(rig.device), 8 * PAGE);
    cr_assert_eq(rig.pool->stages[REBATCH_STAGE_OVERFLOW], 1);
    allow(rig.pool, false);
    assert_oom(rig.pool, PAGE);
    assert_filled(first, 5 * PAGE, 1);
    assert_filled(second, 6 * PAGE, 2);
    give(rig.pool, first);
    give(rig.pool, second);
}

Test(pool_overflow, pages_come_back_to_the_device_at_their_addresses)
{
    AUTO_RIG rig = open_beside(8, 100, NULL);
    void *const activations = take(rig.pool, 7 * PAGE);
    allow(rig.pool, true);
    void *const moments = take_filled(rig.pool, 5 * PAGE, 3);
    cr_assert_eq(stats_of(rig.pool).overflow_bytes, 4 * PAGE);
    give(rig.pool, activations);
    allow(rig.pool, false);
    cr_assert_eq(stats_of(rig.pool).overflow_bytes, 0);
    cr_assert_eq(stats_of(rig.pool).overflow_total_bytes, 4 * PAGE);
    cr_assert_leq(used_of(rig.device), 8 * PAGE);
    assert_filled(moments, 5 * PAGE, 3);
    give(rig.pool, moments);
    void *const whole = take_filled(rig.pool, 8 * PAGE, 4); /* no page was lost */
    give(rig.pool, whole);
}

/* Only as far as so much stays available. */
Test(pool_overflow, what_is_to_be_kept_stays_available)
{
    AUTO_RIG rig = open_beside(16, 100, NULL);
    void *const activations = take(rig.pool, 16 * PAGE);
    allow(rig.pool, true);
    void *const moments = take_filled(rig.pool, 12 * PAGE, 5);
    give(rig.pool, activations);
    cr_assert(rbi_pool_close_overflow(rig.pool));
    cr_assert_eq(rbi_pool_settle_overflow(rig.pool, 10 * PAGE), REBATCH_OK);
    assert_valid(rig.pool);
    size_t available;
    cr_assert_eq(rebatch_pool_available(&available, rig.pool), REBATCH_OK);
    cr_assert_geq(available, 10 * PAGE);
    const uint64_t left = stats_of(rig.pool).overflow_bytes;
    cr_assert(left > 0 && left < 12 * PAGE);
    allow(rig.pool, false);
    cr_assert_eq(stats_of(rig.pool).overflow_bytes, 0);
    assert_filled(moments, 12 * PAGE, 5);
    give(rig.pool, moments);
}

Test(pool_overflow, what_was_freed_goes_back_to_the_host)
{
    AUTO_RIG rig = open_beside(8, 100, NULL);
    void *const first = take(rig.pool, 8 * PAGE);
    allow(rig.pool, true);
    void *const temporary = take_filled(rig.pool, 20 * PAGE, 6);
    cr_assert_eq(stats_of(rig.pool).overflow_bytes, 20 * PAGE);
    give(rig.pool, temporary);
    void *const again = take(rig.pool, 20 * PAGE); /* what is free serves first */
    cr_assert_eq(stats_of(rig.pool).overflow_total_bytes, 20 * PAGE);
    give(rig.pool, again);
    allow(rig.pool, false);
    cr_assert_eq(stats_of(rig.pool).overflow_bytes, 0);
    give(rig.pool, first);
}

struct reading {
    const void *from;
    unsigned char to[11 * PAGE];
};

static void read_all(void *user)
{
    struct reading *reading = user;
    memcpy(reading->to, reading->from, sizeof reading->to);
}

/* By a stream that the pool does not know of. */
Test(pool_overflow, what_is_read_goes_back_when_it_was_read)
{
    static struct reading reading;
    struct awaited work;
    AUTO_RIG rig = open_beside(8, 100, NULL);
    rebatch_stream reader;
    cr_assert_eq(rebatch_stream_create(&reader, rig.device), REBATCH_OK);
    allow(rig.pool, true);
    void *const block = take_filled(rig.pool, sizeof reading.to, 7);
    reading.from = block;
    awaited_enqueue(&work, rig.device, rig.device, reader);
    cr_assert_eq(rebatch_stream_call(rig.device, reader, read_all, &reading), REBATCH_OK);
    give(rig.pool, block);
    cr_assert(!work.is_done);
    allow(rig.pool, false);
    cr_assert_eq(stats_of(rig.pool).overflow_bytes, 0);
    cr_assert_eq(rebatch_stream_synchronize(rig.device, reader), REBATCH_OK);
    assert_filled(reading.to, sizeof reading.to, 7);
    rebatch_stream_destroy(rig.device, reader);
}

Test(pool_overflow, small_blocks_share_pages_of_the_host)
{
    AUTO_RIG rig = open_beside(4, 100, NULL);
    void *blocks[64];
    void *const first = take(rig.pool, 4 * PAGE);
    allow(rig.pool, true);
    for (int i = 0; i < 64; i++)
        blocks[i] = take_filled(rig.pool, PAGE / 64, i);
    cr_assert_eq(stats_of(rig.pool).overflow_bytes, PAGE);
    give(rig.pool, first);
    allow(rig.pool, false);
    cr_assert_eq(stats_of(rig.pool).overflow_bytes, 0);
    for (int i = 0; i < 64; i++)
        assert_filled(blocks[i], PAGE / 64, i);
    for (int i = 0; i < 64; i++)
        give(rig.pool, blocks[i]);
}

Test(pool_overflow, there_is_no_more_than_the_host_and_the_options_give)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.overflow_bytes = 4 * PAGE;
    struct rig rig = open_beside(4, 100, &options);
    allow(rig.pool, true);
    (void)take(rig.pool, 4 * PAGE);
    assert_oom(rig.pool, 5 * PAGE);
    rebatch_oom_report report;
    cr_assert_eq(rebatch_pool_last_oom(&report, rig.pool), REBATCH_OK);
    cr_assert_eq(report.stage, REBATCH_STAGE_OVERFLOW);
    (void)take(rig.pool, 4 * PAGE);
    assert_oom(rig.pool, PAGE);
    rig_close(&rig);
    rig = open_beside(4, 2, NULL);
    allow(rig.pool, true);
    assert_oom(rig.pool, 7 * PAGE);
    (void)take(rig.pool, 6 * PAGE);
    rig_close(&rig);
    options = (rebatch_pool_options)REBATCH_POOL_OPTIONS_INIT;
    options.overflow = REBATCH_OFF;
    rig = open_beside(4, 100, &options);
    allow(rig.pool, true);
    assert_oom(rig.pool, 5 * PAGE);
    rig_close(&rig);
    options.overflow = (rebatch_toggle)7;
    rebatch_pool *none;
    rebatch_device *device;
    cr_assert_eq(rebatch_device_open_host(&device, PAGE, NULL), REBATCH_OK);
    assert_refused(rebatch_pool_create(&none, device, &options), REBATCH_E_INVALID, "overflow");
    rebatch_device_close(device);
    assert_refused(rebatch_pool_allow_overflow(NULL, true), REBATCH_E_INVALID, "pool");
}

/* Free pages that the pool holds in chunks, each larger than the hole that the request needs: a
 * chunk is made again in pieces, and the device has no memory for these any more. */
Test(pool_overflow, a_chunk_that_the_device_does_not_give_again_is_the_hosts)
{
    for (size_t chunks = 0; chunks < 8; chunks++) {
        for (size_t left = 8; left <= 128; left += 40) { /* pages that the device still has */
            AUTO_RIG rig = open_beside(128, 100, NULL);
            void *blocks[16];
            cr_assert_eq(rebatch_pool_reserve(rig.pool, 128 * PAGE, NULL), REBATCH_OK);
            for (size_t i = 0; i < 16; i++)
                blocks[i] = take_filled(rig.pool, 8 * PAGE, (int)i);
            for (size_t i = 0; i <= chunks; i++)
                give(rig.pool, blocks[i ? 2 * i - 1 : 15]);
            cr_assert_eq(rebatch_device_set_capacity(rig.device, left * PAGE), REBATCH_OK);
            assert_oom(rig.pool, 100 * PAGE);
            allow(rig.pool, true);
            give(rig.pool, take_filled(rig.pool, 9 * PAGE, 99)); /* of which 8 are free in a row */
            assert_filled(blocks[0], 8 * PAGE, 0);
        }
    }
}

/* A phase that begins ends it: an optimizer's step that raised has never said that it is over. */
Test(pool_overflow, the_next_phase_ends_it)
{
    AUTO_RIG rig = open_beside(4, 100, NULL);
    allow(rig.pool, true);
    cr_assert_eq(rebatch_pool_mark(rig.pool, 7), REBATCH_OK);
    assert_oom(rig.pool, 5 * PAGE);
}

static rebatch_status call_after_mark(struct rig *rig, char call, void *older)
{
    void *block;
    size_t released;
    switch (call) {
    case 'a':
        return rebatch_pool_alloc(&block, rig->pool, 5 * PAGE, NULL, 0);
    case 'p':
        return rebatch_pool_alloc(&block, rig->pool, PAGE, NULL, 0);
    case 'r':
        return rebatch_pool_reserve(rig->pool, PAGE, NULL);
    case 't':
        return rebatch_pool_trim(rig->pool, 0, &released);
    case 'l':
        return rebatch_pool_set_limit(rig->pool, 4 * PAGE);
    default:
        return rebatch_pool_free(rig->pool, older);
    }
}

/* However the phase of the mark begins, which it does with the first call after it. */
Test(pool_overflow, allowed_after_a_mark_it_lasts)
{
    static const char *const firsts[] = {"a", "pa", "ra", "ta", "la", "fa"};
    for (uint64_t key = 0; key < 3; key++) {
        for (size_t i = 0; i < sizeof firsts / sizeof *firsts; i++) {
            AUTO_RIG rig = open_beside(4, 100, NULL);
            void *const older = take(rig.pool, PAGE);
            cr_assert_eq(rebatch_pool_mark(rig.pool, key), REBATCH_OK);
            allow(rig.pool, true);
            for (const char *call = firsts[i]; *call; call++)
                cr_assert_eq(call_after_mark(&rig, *call, older), REBATCH_OK, "key %d, %s: %s",
                             (int)key, firsts[i], rebatch_last_error());
            cr_assert_eq(rebatch_pool_mark(rig.pool, key), REBATCH_OK);
            assert_oom(rig.pool, PAGE);
        }
    }
}

/* Threads that the open scope leaves out may fail. */
Test(pool_overflow, it_is_for_the_callbacks_threads_alone)
{
    AUTO_RIG rig = open_beside(4, 100, NULL);
    const rebatch_scope scope = begin_own(rig.pool);
    allow(rig.pool, true);
    be_thread(OTHER);
    assert_oom(rig.pool, 5 * PAGE);
    be_thread(INSIDER);
    give(rig.pool, take(rig.pool, 5 * PAGE));
    rollback(rig.pool, scope);
    allow(rig.pool, false);
}

/* What a prediction is made on does not count the host's memory as the device's. */
Test(pool_overflow, a_copy_of_the_pool_has_it_too)
{
    AUTO_RIG rig = open_beside(8, 100, NULL);
    void *const first = take(rig.pool, 6 * PAGE);
    allow(rig.pool, true);
    void *const second = take(rig.pool, 7 * PAGE);
    rebatch_pool *copy;
    rebatch_device *dry;
    cr_assert_eq(rbi_pool_clone(&copy, &dry, rig.pool), REBATCH_OK, "%s", rebatch_last_error());
    assert_valid(copy);
    cr_assert_eq(stats_of(copy).overflow_bytes, 5 * PAGE);
    assert_oom(copy, PAGE);
    cr_assert_eq(rebatch_pool_free(copy, first), REBATCH_OK);
    (void)take(copy, 6 * PAGE);
    assert_oom(copy, PAGE);
    assert_valid(copy);
    rebatch_pool_destroy(copy);
    rebatch_device_close(dry);
    give(rig.pool, second);
}

/* ---- calls that fail ---- */

struct world {
    rebatch_device *host, *fault;
    rebatch_pool *pool;
};

static void open_world(struct world *w)
{
    rebatch_host_options host = REBATCH_HOST_OPTIONS_INIT;
    host.overflow_bytes = 100 * PAGE;
    cr_assert_eq(rebatch_device_open_host(&w->host, 8 * PAGE, &host), REBATCH_OK);
    cr_assert_eq(rebatch_device_open_fault(&w->fault, w->host, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&w->pool, w->fault, NULL), REBATCH_OK);
}

/* An update that takes host memory, and its way back, while calls fail. Gives whether one did. */
static bool run_failing(uint32_t calls, uint64_t nth, uint64_t times)
{
    struct world w;
    open_world(&w);
    void *const activations = take(w.pool, 7 * PAGE);
    allow(w.pool, true);
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    plan.calls = calls;
    plan.nth = nth;
    plan.times = times;
    cr_assert_eq(rebatch_fault_arm(w.fault, &plan), REBATCH_OK);
    void *moments;
    const size_t bytes = 5 * PAGE;
    if (rebatch_pool_alloc(&moments, w.pool, bytes, NULL, 0) == REBATCH_OK)
        memset(moments, 0x5a, bytes);
    assert_valid(w.pool);
    may_fail(rebatch_pool_free(w.pool, activations));
    may_fail(rebatch_pool_allow_overflow(w.pool, false));
    assert_valid(w.pool);
    if (moments)
        assert_filled(moments, bytes, 0x5a);
    uint64_t failed;
    cr_assert_eq(rebatch_fault_counts(w.fault, NULL, &failed), REBATCH_OK);
    cr_assert_eq(rebatch_fault_arm(w.fault, NULL), REBATCH_OK);
    allow(w.pool, false);
    const bool lost = stats_of(w.pool).quarantined_bytes > 0;
    cr_assert(lost || stats_of(w.pool).overflow_bytes == 0);
    if (moments)
        assert_filled(moments, bytes, 0x5a);
    rebatch_pool_destroy(w.pool);
    rebatch_device_close(w.fault);
    rebatch_device_close(w.host);
    return failed > 0;
}

Test(pool_overflow, every_call_may_fail)
{
    static const uint32_t kinds[] = {
        REBATCH_FAULT_OVERFLOW, REBATCH_FAULT_CREATE, REBATCH_FAULT_ACCESS,
        REBATCH_FAULT_RELEASE,  REBATCH_FAULT_COPY,   REBATCH_FAULT_STREAM,
        REBATCH_FAULT_RESERVE,  REBATCH_FAULT_UNMAP,  REBATCH_FAULT_MAP};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        uint64_t nth = 1;
        while (run_failing(kinds[k], nth, 1))
            nth++;
        cr_assert_gt(nth, 1, "no call of kind 0x%x", kinds[k]);
    }
    for (uint64_t nth = 1;
         run_failing(REBATCH_FAULT_OVERFLOW | REBATCH_FAULT_COPY, nth, REBATCH_FAULT_FOREVER);
         nth++)
        ;
}

/* ---- any calls ---- */

#define BLOCKS 24

struct block {
    void *at;
    size_t bytes;
    int value;
};

static void act(rebatch_pool *pool, struct block *block, uint64_t *random, bool must)
{
    if (block->at) {
        assert_filled(block->at, block->bytes, block->value);
        give(pool, block->at);
        block->at = NULL;
        return;
    }
    block->bytes = 1 + (size_t)(draw(random) % (PAGE << draw(random) % 3));
    block->value = (int)(draw(random) & 0xff);
    const rebatch_status status = rebatch_pool_alloc(&block->at, pool, block->bytes, NULL, 0);
    cr_assert(status == REBATCH_OK || (!must && status == REBATCH_OOM));
    if (block->at)
        memset(block->at, block->value, block->bytes);
}

Test(pool_overflow, any_calls_keep_contents)
{
    for (uint64_t seed = 1; seed <= 20; seed++) {
        AUTO_RIG rig = open_beside(12, 200, NULL);
        struct block blocks[BLOCKS] = {{NULL, 0, 0}};
        uint64_t random = seed, most = 0;
        for (int i = 0; i < 400; i++) {
            const bool must = i / 40 % 2;
            if (i % 40 == 0 && draw(&random) % 4) {
                allow(rig.pool, must);
            } else if (i % 40 == 0) {
                (void)rbi_pool_close_overflow(rig.pool);
                cr_assert_eq(rbi_pool_settle_overflow(rig.pool, PAGE * (draw(&random) % 8)),
                             REBATCH_OK);
            }
            act(rig.pool, &blocks[draw(&random) % BLOCKS], &random, rig.pool->overflow.is_open);
            assert_valid(rig.pool);
            cr_assert_leq(used_of(rig.device), 12 * PAGE);
            most = rbi_max(most, stats_of(rig.pool).overflow_bytes);
        }
        cr_assert_gt(most, 0);
    }
}

Test(pool_overflow, host_memory_keeps_its_contents_in_a_sleep)
{
    AUTO_RIG rig = open_beside(8, 100, NULL);
    void *const first = take_filled(rig.pool, 5 * PAGE, 1);
    allow(rig.pool, true);
    void *const second = take_filled(rig.pool, 6 * PAGE, 2);
    const uint64_t host = stats_of(rig.pool).overflow_bytes;
    cr_assert_gt(host, 0);
    cr_assert_eq(rebatch_pool_sleep(rig.pool, NULL, NULL), REBATCH_OK, "%s", rebatch_last_error());
    assert_valid(rig.pool);
    cr_assert_eq(used_of(rig.device), 0);
    cr_expect_eq(stats_of(rig.pool).overflow_bytes, host);
    cr_assert_eq(rebatch_pool_wake(rig.pool), REBATCH_OK, "%s", rebatch_last_error());
    assert_valid(rig.pool);
    assert_filled(first, 5 * PAGE, 1);
    assert_filled(second, 6 * PAGE, 2);
    give(rig.pool, first);
    give(rig.pool, second);
}
