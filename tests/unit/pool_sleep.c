/* Holds what is promised of a pool that sleeps: its memory is others', addresses and contents come
 * back, a wake that fails loses nothing, and whoever needs memory waits. Seeds: 1 to 200 in the
 * test of many cycles. */
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include "unit/pool_help.h"

static rebatch_tag tag_of(rebatch_pool *pool, const char *name)
{
    rebatch_tag tag;
    cr_assert_eq(rebatch_pool_tag(&tag, pool, name), REBATCH_OK);
    return tag;
}

/* A block whose every word is another. */
static uint64_t *take_numbered(rebatch_pool *pool, size_t bytes, uint64_t seed, rebatch_tag tag)
{
    void *block;
    cr_assert_eq(rebatch_pool_alloc(&block, pool, bytes, NULL, tag), REBATCH_OK, "%s",
                 rebatch_last_error());
    uint64_t *const words = block;
    for (size_t i = 0; i < bytes / 8; i++)
        words[i] = seed * 1000003 + i;
    return words;
}

static void assert_numbered(const uint64_t *words, size_t bytes, uint64_t seed)
{
    size_t i = 0;
    while (i < bytes / 8 && words[i] == seed * 1000003 + i)
        i++;
    cr_assert_eq(i, bytes / 8, "word %zu of %zu", i, bytes / 8);
}

static size_t device_free(rebatch_device *device)
{
    rebatch_memory_info info;
    cr_assert_eq(rebatch_device_memory(device, &info), REBATCH_OK);
    return info.free_bytes;
}

static rebatch_sleep_report put_to_sleep(rebatch_pool *pool, const rebatch_sleep_options *options)
{
    rebatch_sleep_report report;
    cr_assert_eq(rebatch_pool_sleep(pool, options, &report), REBATCH_OK, "%s",
                 rebatch_last_error());
    assert_valid(pool);
    return report;
}

static void wake(rebatch_pool *pool)
{
    cr_assert_eq(rebatch_pool_wake(pool), REBATCH_OK, "%s", rebatch_last_error());
    assert_valid(pool);
}

/* ---- what comes back ---- */

Test(pool_sleep, memory_goes_to_the_device_and_contents_come_back_to_the_same_addresses)
{
    AUTO_RIG rig = rig_open(1024, NULL);
    uint64_t *blocks[20];
    for (size_t i = 0; i < 20; i++)
        blocks[i] = take_numbered(rig.pool, (i * 37 + 1) * 4 * KIB, i, 0);
    give(rig.pool, take(rig.pool, 40 * PAGE));
    const uint64_t held = stats_of(rig.pool).reserved_bytes;
    const rebatch_sleep_report report = put_to_sleep(rig.pool, NULL);
    cr_assert_eq(report.released_bytes, held);
    cr_assert_eq(report.held_bytes, 0);
    cr_assert_eq(device_free(rig.device), 1024 * PAGE);
    cr_assert_eq(rig.pool->vm.asleep.pages * PAGE, report.copied_bytes);
    wake(rig.pool);
    for (size_t i = 0; i < 20; i++) {
        assert_numbered(blocks[i], (i * 37 + 1) * 4 * KIB, i);
        give(rig.pool, blocks[i]);
    }
}

Test(pool_sleep, kept_blocks_stay_readable_and_dropped_ones_are_not_copied)
{
    AUTO_RIG rig = rig_open(256, NULL);
    const rebatch_tag kept = tag_of(rig.pool, "weights"), dropped = tag_of(rig.pool, "cache");
    uint64_t *const weights = take_numbered(rig.pool, 32 * PAGE, 1, kept);
    uint64_t *const cache = take_numbered(rig.pool, 64 * PAGE, 2, dropped);
    uint64_t *const moments = take_numbered(rig.pool, 48 * PAGE, 3, 0);
    rebatch_sleep_options options = REBATCH_SLEEP_OPTIONS_INIT;
    options.keep = &kept, options.keep_count = 1;
    options.drop = &dropped, options.drop_count = 1;
    const rebatch_sleep_report report = put_to_sleep(rig.pool, &options);
    cr_assert_eq(report.kept_bytes, 32 * PAGE);
    cr_assert_leq(report.held_bytes, 34 * PAGE, "%zu pages", (size_t)report.held_bytes / PAGE);
    cr_assert_leq(report.copied_bytes, 50 * PAGE);
    cr_assert_geq(report.released_bytes, 110 * PAGE);
    assert_numbered(weights, 32 * PAGE, 1);
    weights[5] = 77; /* what is kept may be used */
    wake(rig.pool);
    cr_assert_eq(weights[5], 77);
    weights[5] = UINT64_C(1000003) + 5;
    assert_numbered(weights, 32 * PAGE, 1);
    assert_numbered(moments, 48 * PAGE, 3);
    memset(cache, 1, 64 * PAGE);
    give(rig.pool, weights);
    give(rig.pool, cache);
    give(rig.pool, moments);
}

Test(pool_sleep, a_second_sleep_puts_more_to_sleep)
{
    AUTO_RIG rig = rig_open(256, NULL);
    const rebatch_tag kept = tag_of(rig.pool, "weights");
    uint64_t *const weights = take_numbered(rig.pool, 32 * PAGE, 1, kept);
    uint64_t *const others = take_numbered(rig.pool, 40 * PAGE, 2, 0);
    const rebatch_sleep_options options = {
        .struct_size = sizeof options, .keep = &kept, .keep_count = 1};
    (void)put_to_sleep(rig.pool, &options);
    weights[0] = 99;
    const rebatch_sleep_report second = put_to_sleep(rig.pool, &options);
    cr_assert_eq(second.released_bytes, 0);
    cr_assert_eq(put_to_sleep(rig.pool, NULL).held_bytes, 0);
    wake(rig.pool);
    cr_assert_eq(weights[0], 99);
    weights[0] = 1000003;
    assert_numbered(weights, 32 * PAGE, 1);
    assert_numbered(others, 40 * PAGE, 2);
    give(rig.pool, weights);
    give(rig.pool, others);
}

Test(pool_sleep, after_200_cycles_no_more_is_reserved_than_is_in_use)
{
    AUTO_RIG rig = rig_open(4096, NULL);
    uint64_t *blocks[60];
    size_t sizes[60];
    uint64_t seed = 1;
    for (size_t i = 0; i < 60; i++)
        blocks[i] = take_numbered(rig.pool, sizes[i] = (draw(&seed) % 640 + 8) * 8 * KIB, i, 0);
    for (unsigned cycle = 1; cycle <= 200; cycle++) {
        const size_t i = draw(&seed) % 60;
        give(rig.pool, blocks[i]);
        blocks[i] = take_numbered(rig.pool, sizes[i] = (draw(&seed) % 640 + 8) * 8 * KIB, i, 0);
        give(rig.pool, take(rig.pool, 300 * PAGE)); /* a step's activations */
        cr_assert_eq(put_to_sleep(rig.pool, NULL).held_bytes, 0);
        wake(rig.pool);
    }
    const rebatch_pool_stats stats = stats_of(rig.pool);
    cr_assert_leq((double)stats.reserved_bytes, 1.03 * (double)stats.live_bytes);
    for (size_t i = 0; i < 60; i++) {
        assert_numbered(blocks[i], sizes[i], i);
        give(rig.pool, blocks[i]);
    }
}

/* ---- less memory than before ---- */

Test(pool_sleep, a_wake_maps_what_is_in_use_and_no_more)
{
    AUTO_RIG rig = rig_open(256, NULL);
    uint64_t *const kept = take_numbered(rig.pool, 60 * PAGE, 1, 0);
    uint64_t *const freed = take_numbered(rig.pool, 100 * PAGE, 2, 0);
    (void)put_to_sleep(rig.pool, NULL);
    give(rig.pool, freed);
    assert_valid(rig.pool);
    cr_assert_eq(rebatch_device_set_capacity(rig.device, 62 * PAGE), REBATCH_OK);
    wake(rig.pool);
    assert_numbered(kept, 60 * PAGE, 1);
    cr_assert_leq(stats_of(rig.pool).reserved_bytes, 61 * PAGE);
    void *block;
    cr_assert_eq(rebatch_pool_alloc(&block, rig.pool, 4 * PAGE, NULL, 0), REBATCH_OOM);
    cr_assert_eq(rebatch_device_set_capacity(rig.device, 256 * PAGE), REBATCH_OK);
    give(rig.pool, take(rig.pool, 100 * PAGE));
    give(rig.pool, kept);
}

Test(pool_sleep, a_wake_without_the_memory_loses_nothing_and_may_be_repeated)
{
    AUTO_RIG rig = rig_open(256, NULL);
    uint64_t *const block = take_numbered(rig.pool, 60 * PAGE, 1, 0);
    (void)put_to_sleep(rig.pool, NULL);
    cr_assert_eq(rebatch_device_set_capacity(rig.device, 59 * PAGE), REBATCH_OK);
    assert_refused(rebatch_pool_wake(rig.pool), REBATCH_OOM,
                   "the blocks in use need 3932160 bytes");
    assert_valid(rig.pool);
    cr_assert_eq(device_free(rig.device), 59 * PAGE);
    cr_assert_eq(rebatch_device_set_capacity(rig.device, 60 * PAGE), REBATCH_OK);
    wake(rig.pool);
    assert_numbered(block, 60 * PAGE, 1);
    give(rig.pool, block);
}

/* ---- the copies ---- */

Test(pool_sleep, the_host_keeps_half_of_what_it_has_free)
{
    const size_t host_bytes = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    const size_t pages = host_bytes / 2 / PAGE + 1; /* whatever others take or free meanwhile */
    AUTO_RIG rig = rig_open(pages + 64, NULL);
    void *const large = take(rig.pool, pages * PAGE); /* never touched */
    assert_refused(rebatch_pool_sleep(rig.pool, NULL, NULL), REBATCH_E_HOST_OOM,
                   "bytes of host memory for copies: expected at most half of what the host has");
    assert_valid(rig.pool);
    give(rig.pool, take(rig.pool, PAGE)); /* it is awake */
    give(rig.pool, large);
}

Test(pool_sleep, the_memory_of_the_copies_is_kept_for_the_next_sleep)
{
    AUTO_RIG rig = rig_open(128, NULL);
    uint64_t *const small = take_numbered(rig.pool, 30 * PAGE, 2, 0);
    (void)put_to_sleep(rig.pool, NULL);
    wake(rig.pool);
    cr_assert_eq(rig.pool->vm.asleep.copy_pages, 30);
    uint64_t *const more = take_numbered(rig.pool, 30 * PAGE, 3, 0);
    (void)put_to_sleep(rig.pool, NULL);
    wake(rig.pool);
    cr_assert_eq(rig.pool->vm.asleep.part_count, 2);
    assert_numbered(small, 30 * PAGE, 2);
    assert_numbered(more, 30 * PAGE, 3);
    give(rig.pool, small);
    give(rig.pool, more);
}

/* ---- who waits, and who does not ---- */

struct waiter {
    rebatch_pool *pool;
    rebatch_arena *arena;
    rebatch_status (*call)(struct waiter *waiter);
    _Atomic bool is_done;
    void *block;
};

static void *run_waiter(void *user)
{
    struct waiter *const waiter = user;
    cr_assert_eq(waiter->call(waiter), REBATCH_OK, "%s", rebatch_last_error());
    waiter->is_done = true;
    return NULL;
}

static rebatch_status call_alloc(struct waiter *waiter)
{
    return rebatch_pool_alloc(&waiter->block, waiter->pool, 3 * PAGE, NULL, 0);
}

static rebatch_status call_reserve(struct waiter *waiter)
{
    return rebatch_pool_reserve(waiter->pool, 3 * PAGE, NULL);
}

static rebatch_status call_admit(struct waiter *waiter)
{
    return rbi_pool_admit(waiter->pool, 3 * PAGE, NULL);
}

static rebatch_status call_mark(struct waiter *waiter)
{
    return rebatch_pool_mark(waiter->pool, 1);
}

static rebatch_status call_begin(struct waiter *waiter)
{
    rebatch_scope scope;
    const rebatch_status status = rbi_scope_begin_phase(&scope, waiter->pool, false, 1);
    return status ? status : rebatch_scope_commit(waiter->pool, scope);
}

static rebatch_status call_claim(struct waiter *waiter)
{
    return rebatch_arena_claim(waiter->arena);
}

static rebatch_status (*const calls[])(struct waiter *) = {call_alloc, call_reserve, call_admit,
                                                           call_mark,  call_begin,   call_claim};
enum { CALLS = sizeof calls / sizeof *calls };

static _Atomic int told;

static void count_wait(void *user)
{
    (void)user;
    told++;
}

Test(pool_sleep, whoever_needs_memory_waits_for_the_wake_and_one_of_them_tells)
{
    AUTO_RIG rig = rig_open(256, NULL);
    rebatch_arena *arena;
    cr_assert_eq(rebatch_arena_create(&arena, rig.pool), REBATCH_OK);
    cr_assert_eq(rebatch_arena_open(arena, NULL), REBATCH_OK);
    uint64_t *const block = take_numbered(rig.pool, 8 * PAGE, 1, 0);
    cr_assert_eq(rebatch_arena_lend(arena), REBATCH_OK);
    const rebatch_sleep_options options = {.struct_size = sizeof options, .on_wait = count_wait};
    (void)put_to_sleep(rig.pool, &options);
    struct waiter waiters[CALLS];
    pthread_t threads[CALLS];
    for (size_t i = 0; i < CALLS; i++) {
        waiters[i] = (struct waiter){.pool = rig.pool, .arena = arena, .call = calls[i]};
        cr_assert_eq(pthread_create(&threads[i], NULL, run_waiter, &waiters[i]), 0);
    }
    const struct timespec moment = {.tv_nsec = 50000000};
    while (told == 0)
        (void)sched_yield();
    nanosleep(&moment, NULL); /* in which those that do not wait would end */
    for (size_t i = 0; i < CALLS; i++)
        cr_assert_not(waiters[i].is_done, "call %zu did not wait", i);
    cr_assert_eq(told, 1);
    wake(rig.pool);
    for (size_t i = 0; i < CALLS; i++)
        cr_assert_eq(pthread_join(threads[i], NULL), 0);
    assert_numbered(block, 8 * PAGE, 1);
    give(rig.pool, block);
    give(rig.pool, waiters[0].block);
    rebatch_arena_destroy(arena);
}

static void wake_up(void *user)
{
    wake(user);
}

Test(pool_sleep, who_is_told_may_wake_the_pool)
{
    AUTO_RIG rig = rig_open(64, NULL);
    const rebatch_sleep_options options = {
        .struct_size = sizeof options, .on_wait = wake_up, .user = rig.pool};
    (void)put_to_sleep(rig.pool, &options);
    give(rig.pool, take(rig.pool, PAGE));
}

static bool is_interrupted(void *user)
{
    ++*(int *)user;
    return true;
}

Test(pool_sleep, a_wait_that_is_interrupted_wakes_the_pool)
{
    int asked = 0;
    AUTO_RIG rig = rig_open(64, NULL);
    uint64_t *const block = take_numbered(rig.pool, 8 * PAGE, 1, 0);
    cr_assert_eq(rebatch_pool_set_interrupt(rig.pool, is_interrupted, &asked), REBATCH_OK);
    give(rig.pool, take(rig.pool, PAGE));
    cr_assert_eq(asked, 0);
    (void)put_to_sleep(rig.pool, NULL);
    give(rig.pool, take(rig.pool, PAGE));
    cr_assert_eq(asked, 1);
    assert_numbered(block, 8 * PAGE, 1);
    cr_assert_eq(rebatch_pool_set_interrupt(NULL, is_interrupted, &asked), REBATCH_E_INVALID);
}

Test(pool_sleep, a_wait_that_is_interrupted_and_cannot_wake_ends_with_a_status)
{
    int asked = 0;
    AUTO_RIG rig = rig_open(256, NULL);
    rebatch_arena *arena;
    cr_assert_eq(rebatch_arena_create(&arena, rig.pool), REBATCH_OK);
    cr_assert_eq(rebatch_arena_open(arena, NULL), REBATCH_OK);
    uint64_t *const block = take_numbered(rig.pool, 8 * PAGE, 1, 0);
    cr_assert_eq(rebatch_arena_lend(arena), REBATCH_OK);
    cr_assert_eq(rebatch_pool_set_interrupt(rig.pool, is_interrupted, &asked), REBATCH_OK);
    (void)put_to_sleep(rig.pool, NULL);
    cr_assert_eq(rebatch_pool_set_limit(rig.pool, PAGE), REBATCH_OK);
    for (size_t i = 0; i < CALLS; i++) {
        struct waiter waiter = {.pool = rig.pool, .arena = arena};
        cr_assert_eq(calls[i](&waiter), REBATCH_E_STATE, "call %zu", i);
        cr_assert(strstr(rebatch_last_error(), "interrupted while the pool sleeps: the blocks in "
                                               "use need "));
        cr_assert_null(waiter.block);
        assert_valid(rig.pool);
    }
    cr_assert_eq(asked, CALLS);
    cr_assert_eq(rebatch_pool_set_limit(rig.pool, 0), REBATCH_OK);
    wake(rig.pool);
    assert_numbered(block, 8 * PAGE, 1);
    rebatch_arena_destroy(arena);
}

Test(pool_sleep, frees_and_what_gives_memory_back_work_meanwhile)
{
    AUTO_RIG rig = rig_open(256, NULL);
    uint64_t *blocks[12];
    for (size_t i = 0; i < 12; i++)
        blocks[i] = take_numbered(rig.pool, (i + 1) * 9 * KIB * 16, i, 0);
    const rebatch_scope scope = begin(rig.pool);
    void *const within = take(rig.pool, 7 * PAGE);
    give(rig.pool, blocks[3]);
    (void)put_to_sleep(rig.pool, NULL);
    for (size_t i = 0; i < 12; i += 2)
        give(rig.pool, blocks[i]);
    assert_valid(rig.pool);
    size_t released, available;
    cr_assert_eq(rebatch_pool_available(&available, rig.pool), REBATCH_OK);
    cr_assert_leq(available, 256 * PAGE);
    cr_assert_eq(rebatch_pool_trim(rig.pool, 0, &released), REBATCH_OK);
    cr_assert_eq(rebatch_pool_set_limit(rig.pool, 220 * PAGE), REBATCH_OK);
    cr_assert_eq(rebatch_pool_allow_overflow(rig.pool, false), REBATCH_OK);
    assert_valid(rig.pool);
    rollback(rig.pool, scope);
    wake(rig.pool);
    for (size_t i = 0; i < 12; i++)
        assert_numbered(blocks[i], (i + 1) * 9 * KIB * 16, i);
    for (size_t i = 0; i < 12; i++)
        give(rig.pool, blocks[i]);
    give(rig.pool, within); /* late */
}

Test(pool_sleep, a_pool_that_sleeps_is_destroyed)
{
    AUTO_RIG rig = rig_open(64, NULL);
    (void)take_numbered(rig.pool, 8 * PAGE, 1, 0);
    (void)put_to_sleep(rig.pool, NULL);
}

Test(pool_sleep, a_claimed_arena_has_all_its_addresses_after_the_wake)
{
    AUTO_RIG rig = rig_open(256, NULL);
    rebatch_arena *arena;
    void *freed, *kept;
    cr_assert_eq(rebatch_arena_create(&arena, rig.pool), REBATCH_OK);
    cr_assert_eq(rebatch_arena_open(arena, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_arena_alloc(&freed, arena, 20 * PAGE, NULL, 0), REBATCH_OK);
    cr_assert_eq(rebatch_arena_alloc(&kept, arena, 3 * PAGE, NULL, 0), REBATCH_OK);
    memset(kept, 0x42, 3 * PAGE);
    give(rig.pool, freed);
    const rebatch_sleep_report report = put_to_sleep(rig.pool, NULL);
    cr_assert_eq(report.held_bytes, 0);
    cr_assert_leq(report.copied_bytes, 4 * PAGE, "what is free in it is not copied");
    wake(rig.pool);
    memset(freed, 1, 20 * PAGE); /* as a replay does */
    cr_assert_eq(((unsigned char *)kept)[3 * PAGE - 1], 0x42);
    cr_assert_eq(rebatch_arena_lend(arena), REBATCH_OK);
    cr_assert_eq(put_to_sleep(rig.pool, NULL).held_bytes, 0);
    wake(rig.pool);
    rebatch_arena_stats stats;
    cr_assert_eq(rebatch_arena_get_stats(&stats, arena), REBATCH_OK);
    cr_assert_eq(stats.taken_bytes, 20 * PAGE, "what was lent is not mapped before it is claimed");
    cr_assert_eq(rebatch_arena_claim(arena), REBATCH_OK);
    cr_assert_eq(((unsigned char *)kept)[0], 0x42);
    give(rig.pool, kept);
    rebatch_arena_destroy(arena);
}

/* ---- who may not ---- */

static bool says_no(void *user)
{
    return *(bool *)user;
}

static size_t try_to_sleep(size_t wanted_bytes, void *user)
{
    (void)wanted_bytes;
    assert_refused(rebatch_pool_sleep(user, NULL, NULL), REBATCH_E_STATE, "pressure callback");
    assert_refused(rebatch_pool_wake(user), REBATCH_E_STATE, "pressure callback");
    return 0;
}

/* ---- who looks on while it copies ---- */

static struct {
    rebatch_pool *pool;
    struct rbi_device_ops ops;
    rebatch_status (*copy)(void *self, void *to, const void *from, size_t bytes, rebatch_stream);
    struct rbi_pool_look seen;
} watched;

static rebatch_status look_and_copy(void *self, void *to, const void *from, size_t bytes,
                                    rebatch_stream stream)
{
    watched.seen = rbi_pool_look(watched.pool);
    return watched.copy(self, to, from, bytes, stream);
}

Test(pool_sleep, a_look_waits_for_neither_a_sleep_nor_a_wake)
{
    AUTO_RIG rig = rig_open(64, NULL);
    void *const block = take(rig.pool, 4 * PAGE);
    const struct rbi_pool_look before = rbi_pool_look(rig.pool);
    cr_assert(before.live_bytes == 4 * PAGE && before.given_bytes == SIZE_MAX);
    watched.pool = rig.pool;
    watched.ops = *rig.device->ops;
    watched.copy = watched.ops.copy;
    watched.ops.copy = look_and_copy;
    rig.device->ops = &watched.ops;
    cr_assert_eq(rebatch_pool_sleep(rig.pool, NULL, NULL), REBATCH_OK);
    cr_expect_eq(watched.seen.reserved_bytes, before.reserved_bytes);
    cr_expect_eq(watched.seen.live_bytes, 4 * PAGE);
    watched.seen = before;
    cr_assert_eq(rebatch_pool_wake(rig.pool), REBATCH_OK);
    cr_expect_eq(watched.seen.reserved_bytes, 0);
    cr_expect_eq(rbi_pool_look(rig.pool).reserved_bytes, stats_of(rig.pool).reserved_bytes);
    give(rig.pool, block);
}

Test(pool_sleep, a_pool_that_sleeps_is_not_woken_while_a_graph_is_captured)
{
    bool may_wait = true;
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.may_wait = says_no;
    options.may_wait_user = &may_wait;
    AUTO_RIG rig = rig_open(64, &options);
    void *const block = take(rig.pool, 4 * PAGE);
    cr_assert_eq(rebatch_pool_give(rig.pool, 8 * PAGE, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_pool_sleep(rig.pool, NULL, NULL), REBATCH_OK);
    may_wait = false;
    assert_refused(rebatch_pool_wake(rig.pool), REBATCH_E_STATE,
                   "a graph is being captured: expected rebatch_pool_wake() after it");
    cr_expect(rbi_pool_sleeps(rig.pool) && rbi_pool_look(rig.pool).given_bytes == 8 * PAGE);
    may_wait = true;
    cr_assert_eq(rebatch_pool_wake(rig.pool), REBATCH_OK);
    cr_assert_eq(rebatch_pool_give(rig.pool, 8 * PAGE, NULL), REBATCH_OK);
    may_wait = false;
    cr_assert_eq(rebatch_pool_wake(rig.pool), REBATCH_OK, "of a pool that does not sleep");
    cr_expect_eq(rbi_pool_look(rig.pool).given_bytes, SIZE_MAX);
    may_wait = true;
    give(rig.pool, block);
}

Test(pool_sleep, refuses_where_memory_is_at_work_and_wrong_arguments)
{
    bool may_wait = false;
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.may_wait = says_no;
    options.may_wait_user = &may_wait;
    AUTO_RIG rig = rig_open(64, &options);
    assert_refused(rebatch_pool_sleep(rig.pool, NULL, NULL), REBATCH_E_STATE,
                   "a graph is being captured");
    may_wait = true;
    const rebatch_scope scope = begin_own(rig.pool);
    assert_refused(rebatch_pool_sleep(rig.pool, NULL, NULL), REBATCH_E_STATE,
                   "a session's step is running");
    commit(rig.pool, scope);
    void *block;
    cr_assert_eq(rebatch_pool_add_pressure(rig.pool, try_to_sleep, rig.pool), REBATCH_OK);
    cr_assert_eq(rebatch_pool_alloc(&block, rig.pool, 65 * PAGE, NULL, 0), REBATCH_OOM);
    const rebatch_tag tag = tag_of(rig.pool, "both"), unknown = 9;
    rebatch_sleep_options both = {.struct_size = sizeof both, .keep = &tag, .keep_count = 1};
    both.drop = &tag, both.drop_count = 1;
    assert_refused(rebatch_pool_sleep(rig.pool, &both, NULL), REBATCH_E_INVALID,
                   "tag \"both\" is in `keep` and in `drop`");
    both.drop = &unknown;
    assert_refused(rebatch_pool_sleep(rig.pool, &both, NULL), REBATCH_E_INVALID,
                   "drop has tag 9: expected one from rebatch_pool_tag(), 0 to 1");
    both.drop = NULL;
    assert_refused(rebatch_pool_sleep(rig.pool, &both, NULL), REBATCH_E_INVALID, "drop is NULL");
    assert_refused(rebatch_pool_sleep(NULL, NULL, NULL), REBATCH_E_INVALID, "pool is NULL");
    assert_valid(rig.pool);
}

static void sleep_and_wake(void *user)
{
    (void)put_to_sleep(user, NULL);
    wake(user);
}

Test(pool_sleep, a_task_may_sleep_within_a_session_s_step)
{
    AUTO_RIG rig = rig_open(64, NULL);
    uint64_t *const block = take_numbered(rig.pool, 8 * PAGE, 1, 0);
    const rebatch_scope scope = begin_own(rig.pool);
    struct rbi_pool_task task = {sleep_and_wake, rig.pool};
    cr_assert(rbi_pool_post_task(rig.pool, &task));
    rbi_pool_run_task(rig.pool);
    cr_assert_not(rbi_pool_withdraw_task(rig.pool, &task), "it has run");
    assert_refused(rebatch_pool_sleep(rig.pool, NULL, NULL), REBATCH_E_STATE, "a session's step");
    commit(rig.pool, scope);
    assert_numbered(block, 8 * PAGE, 1);
    give(rig.pool, block);
}

Test(pool_sleep, needs_virtual_memory)
{
    AUTO_RIG rig = rig_open_plain(64, NULL);
    assert_refused(rebatch_pool_sleep(rig.pool, NULL, NULL), REBATCH_E_UNSUPPORTED,
                   "no virtual memory");
}
