/* Holds the search for memory: the order of its stages, what fails and how, and memory got ahead.
 * Seeds: 1 to 60 in the random test. */
#include "fault/fault_device.h"
#include "unit/pool_help.h"

/* A pool on a host device whose allocations can be made to fail. */
struct faulty {
    struct rig rig;
    rebatch_device *fault;
    rebatch_pool *pool;
};

static struct faulty faulty_open(size_t pages, const rebatch_pool_options *options)
{
    struct faulty f;
    f.rig = rig_open(pages, NULL);
    cr_assert_eq(rebatch_device_open_fault(&f.fault, f.rig.device, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&f.pool, f.fault, options), REBATCH_OK);
    return f;
}

static void faulty_arm(struct faulty *f, uint64_t nth, uint64_t times, rebatch_status status)
{
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    plan.nth = nth;
    plan.times = times;
    plan.status = status;
    cr_assert_eq(rebatch_fault_arm(f->fault, &plan), REBATCH_OK);
}

static void faulty_close(struct faulty *f)
{
    assert_valid(f->pool);
    rebatch_pool_destroy(f->pool);
    rebatch_device_close(f->fault);
    rig_close(&f->rig);
}

static rebatch_oom_report last_oom(rebatch_pool *pool)
{
    rebatch_oom_report report;
    cr_assert_eq(rebatch_pool_last_oom(&report, pool), REBATCH_OK);
    return report;
}

static rebatch_status try(rebatch_pool *pool, size_t bytes)
{
    void *pointer;
    return rebatch_pool_alloc(&pointer, pool, bytes, NULL, 0);
}

/* When fresh memory is refused the cache goes back to the device, and it is asked again. */
Test(pool_search, cached_memory_is_given_back_to_make_room_for_a_larger_piece)
{
    AUTO_RIG rig = rig_open_plain(16, NULL);
    void *a = take(rig.pool, 8 * PAGE);
    void *b = take(rig.pool, 6 * PAGE);
    give(rig.pool, a);
    give(rig.pool, b);
    void *large = take(rig.pool, 16 * PAGE);
    cr_assert_eq(stats_of(rig.pool).trims, 1);
    cr_assert_eq(stats_of(rig.pool).reserved_bytes, 16 * PAGE);
    cr_assert_eq(rig.pool->stages[REBATCH_STAGE_TRIM], 1);
    give(rig.pool, large);
}

/* With nothing cached there is nothing to give back: the device's OOM surfaces at once. */
Test(pool_search, an_oom_of_the_device_surfaces_at_once_when_nothing_is_cached)
{
    static const rebatch_toggle caching[] = {REBATCH_ON, REBATCH_OFF};
    for (int i = 0; i < 2; i++) {
        rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
        options.caching = caching[i];
        struct faulty f = faulty_open(64, &options);
        faulty_arm(&f, 1, REBATCH_FAULT_FOREVER, REBATCH_OOM);
        cr_assert_eq(try(f.pool, 2 * PAGE), REBATCH_OOM);
        cr_assert_eq(stats_of(f.pool).ooms, 1);
        cr_assert_eq(stats_of(f.pool).reserved_bytes, 0);
        faulty_arm(&f, 0, 0, REBATCH_OOM);
        cr_assert_eq(try(f.pool, 2 * PAGE), REBATCH_OK);
        faulty_close(&f);
    }
}

/* An error of the device that is no OOM passes through at once; nothing is trimmed, nobody is
 * asked. */
Test(pool_search, another_error_of_the_device_passes_through_unchanged)
{
    struct faulty f = faulty_open(64, NULL);
    void *cached;
    cr_assert_eq(rebatch_pool_alloc(&cached, f.pool, PAGE, NULL, 0), REBATCH_OK);
    give(f.pool, cached);
    static const rebatch_status errors[] = {REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST};
    for (int i = 0; i < 2; i++) {
        faulty_arm(&f, 1, 1, errors[i]);
        void *pointer = &f;
        cr_assert_eq(rebatch_pool_alloc(&pointer, f.pool, 8 * PAGE, NULL, 0), errors[i]);
        cr_assert_null(pointer);
        faulty_arm(&f, 1, 1, errors[i]);
        cr_assert_eq(rebatch_pool_reserve(f.pool, 8 * PAGE, NULL), errors[i]);
        faulty_arm(&f, 1, 1, errors[i]);
        cr_assert_eq(rbi_pool_admit(f.pool, 8 * PAGE, NULL), errors[i]);
    }
    cr_assert_eq(stats_of(f.pool).trims, 0);
    cr_assert_eq(stats_of(f.pool).ooms, 0);
    cr_assert_eq(rbi_pool_oom_count(f.pool), 0);
    cr_assert_eq(last_oom(f.pool).asked_bytes, 0);
    faulty_close(&f);
}

struct holder {
    rebatch_pool *pool;
    void *block;
    size_t wanted_bytes;
    int calls;
    rebatch_status alloc_status;
};

static size_t let_go(size_t wanted_bytes, void *user)
{
    struct holder *holder = user;
    holder->wanted_bytes = wanted_bytes;
    holder->calls++;
    size_t bytes = 0;
    if (!holder->block || rebatch_pool_block_bytes(&bytes, holder->pool, holder->block))
        return 0;
    (void)rebatch_pool_free(holder->pool, holder->block);
    holder->block = NULL;
    return bytes;
}

/* Pressure callbacks free blocks, in the order in which they were registered, and no more of
 * them run than are needed. */
Test(pool_search, pressure_callbacks_free_until_there_is_enough)
{
    AUTO_RIG rig = rig_open(16, NULL);
    struct holder holders[3];
    for (int i = 0; i < 3; i++) {
        holders[i] = (struct holder){rig.pool, take(rig.pool, 4 * PAGE), 0, 0, REBATCH_OK};
        cr_assert_eq(rebatch_pool_add_pressure(rig.pool, let_go, &holders[i]), REBATCH_OK);
    }
    (void)take(rig.pool, 4 * PAGE);
    void *pointer = take(rig.pool, 8 * PAGE - 100);
    cr_assert_eq(holders[0].calls, 1);
    cr_assert_eq(holders[0].wanted_bytes, 8 * PAGE);
    cr_assert_eq(holders[1].calls, 1);
    cr_assert_eq(holders[2].calls, 0);
    cr_assert_eq(stats_of(rig.pool).pressure_calls, 2);
    cr_assert_eq(stats_of(rig.pool).ooms, 0);
    assert_valid(rig.pool);
    cr_assert_eq(try(rig.pool, 8 * PAGE), REBATCH_OOM);
    cr_assert_eq(last_oom(rig.pool).stage, REBATCH_STAGE_PRESSURE);
    cr_assert_eq(last_oom(rig.pool).would_fit_bytes, 4 * PAGE); /* the third gave its block up */
    give(rig.pool, pointer);
}

static void count_pressure(void *user, bool begins)
{
    ((int *)user)[begins]++;
}

/* A session hears of the pressure callbacks of its own callbacks, and of no others. */
Test(pool_search, pressure_within_a_scope_of_the_thread_is_told)
{
    AUTO_RIG rig = rig_open(16, NULL);
    struct holder holder = {rig.pool, take(rig.pool, 4 * PAGE), 0, 0, REBATCH_OK};
    int told[2] = {0, 0};
    cr_assert_eq(rebatch_pool_add_pressure(rig.pool, let_go, &holder), REBATCH_OK);
    rbi_pool_watch_pressure(rig.pool, &(struct rbi_pool_pressure_watch){count_pressure, told});
    cr_assert_eq(try(rig.pool, 20 * PAGE), REBATCH_OOM);
    cr_assert_eq(holder.calls, 1);
    cr_assert(told[0] == 0 && told[1] == 0);
    rebatch_scope scope;
    cr_assert_eq(rbi_scope_begin_phase(&scope, rig.pool, false, 0), REBATCH_OK);
    cr_assert_eq(try(rig.pool, 20 * PAGE), REBATCH_OOM);
    cr_assert_eq(holder.calls, 2);
    cr_assert(told[0] == 1 && told[1] == 1);
    cr_assert_eq(rebatch_scope_commit(rig.pool, scope), REBATCH_OK);
}

static size_t allocate(size_t wanted_bytes, void *user)
{
    struct holder *holder = user;
    void *pointer;
    holder->calls++;
    holder->alloc_status = rebatch_pool_alloc(&pointer, holder->pool, wanted_bytes, NULL, 0);
    return 1;
}

/* A pressure callback that allocates is refused, not called without end. */
Test(pool_search, a_pressure_callback_must_not_allocate)
{
    AUTO_RIG rig = rig_open(8, NULL);
    struct holder holder = {rig.pool, NULL, 0, 0, REBATCH_OK};
    cr_assert_eq(rebatch_pool_add_pressure(rig.pool, allocate, &holder), REBATCH_OK);
    cr_assert_eq(try(rig.pool, 9 * PAGE), REBATCH_OOM);
    cr_assert_eq(holder.calls, 1);
    cr_assert_eq(holder.alloc_status, REBATCH_E_STATE);
    cr_assert_eq(try(rig.pool, 8 * PAGE), REBATCH_OK);
}

/* 16 pressure callbacks can be registered. */
Test(pool_search, sixteen_pressure_callbacks_can_be_registered)
{
    AUTO_RIG rig = rig_open(8, NULL);
    struct holder holder = {rig.pool, NULL, 0, 0, REBATCH_OK};
    for (int i = 0; i < 16; i++)
        cr_assert_eq(rebatch_pool_add_pressure(rig.pool, let_go, &holder), REBATCH_OK);
    assert_refused(rebatch_pool_add_pressure(rig.pool, let_go, &holder), REBATCH_E_UNSUPPORTED,
                   "16 pressure callbacks");
    cr_assert_eq(try(rig.pool, 9 * PAGE), REBATCH_OOM);
    cr_assert_eq(holder.calls, 16);
    /* They gave nothing, so there was nothing to search for again. */
    cr_assert_eq(rig.pool->stages[REBATCH_STAGE_DEVICE], 1);
}

/* The OOM report has the request, the figures of that moment and who holds most; the size that it
 * says would have fitted fits, and one unit more does not. */
Test(pool_search, the_oom_report_is_right)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.limit_bytes = 20 * PAGE;
    options.headroom_bytes = PAGE;
    AUTO_RIG rig = rig_open_plain(24, &options);
    rebatch_tag weights, activations;
    cr_assert_eq(rebatch_pool_tag(&weights, rig.pool, "weights"), REBATCH_OK);
    cr_assert_eq(rebatch_pool_tag(&activations, rig.pool, "activations"), REBATCH_OK);
    cr_assert_eq(last_oom(rig.pool).asked_bytes, 0);
    void *w, *a, *hole;
    cr_assert_eq(rebatch_pool_alloc(&w, rig.pool, 6 * PAGE, NULL, weights), REBATCH_OK);
    cr_assert_eq(rebatch_pool_alloc(&hole, rig.pool, 3 * PAGE, NULL, 0), REBATCH_OK);
    give(rig.pool, hole);
    cr_assert_eq(rebatch_pool_alloc(&a, rig.pool, UNIT, NULL, activations), REBATCH_OK);
    rebatch_clear_error();
    cr_assert_eq(rebatch_pool_alloc(&hole, rig.pool, 12 * PAGE + 1, NULL, activations),
                 REBATCH_OOM);
    const rebatch_oom_report report = last_oom(rig.pool);
    cr_assert_eq(report.asked_bytes, 12 * PAGE + 1);
    cr_assert_str_eq(report.tag, "activations");
    cr_assert_eq(report.stage, REBATCH_STAGE_DEVICE); /* nothing is wholly free */
    cr_assert_eq(report.limit_bytes, 20 * PAGE);
    cr_assert_eq(report.live_bytes, 6 * PAGE + UNIT);
    cr_assert_eq(report.reserved_bytes, 9 * PAGE);
    cr_assert_eq(report.device_total_bytes, 24 * PAGE);
    cr_assert_eq(report.device_free_bytes, 15 * PAGE);
    cr_assert_eq(report.room_bytes, 11 * PAGE);
    cr_assert_eq(report.largest_hole_bytes, 3 * PAGE - UNIT);
    cr_assert_eq(report.would_fit_bytes, 11 * PAGE);
    cr_assert_eq(report.tag_count, 2);
    cr_assert_str_eq(report.tags[0].name, "weights");
    cr_assert_eq(report.tags[0].live_bytes, 6 * PAGE);
    cr_assert_str_eq(report.tags[1].name, "activations");
    cr_assert(strstr(rebatch_last_error(), "asked for 768 KiB for activations: "));
    cr_assert(strstr(rebatch_last_error(), "960 KiB free on the device less 64.0 KiB headroom, "),
              "%s", rebatch_last_error());
    cr_assert(strstr(rebatch_last_error(), "1.25 MiB limit"));
    cr_assert_eq(stats_of(rig.pool).ooms, 1);
    cr_assert_eq(rbi_pool_oom_count(rig.pool), 1);
    cr_assert_eq(try(rig.pool, 11 * PAGE + 1), REBATCH_OOM);
    cr_assert_eq(try(rig.pool, 11 * PAGE), REBATCH_OK);
    cr_assert_eq(try(rig.pool, 3 * PAGE), REBATCH_OOM);
    cr_assert_eq(last_oom(rig.pool).would_fit_bytes, 3 * PAGE - UNIT);
    cr_assert_eq(try(rig.pool, 3 * PAGE - UNIT), REBATCH_OK);
}

/* A reserve leaves no trace but the cache, and what is there is not asked for again. */
Test(pool_search, a_reserve_changes_nothing_but_the_cache)
{
    AUTO_RIG rig = rig_open(64, NULL);
    cr_assert_eq(rebatch_pool_reserve(rig.pool, 0, NULL), REBATCH_OK);
    cr_assert_eq(stats_of(rig.pool).reserved_bytes, 0);
    cr_assert_eq(rebatch_pool_reserve(rig.pool, 8 * PAGE - 1, NULL), REBATCH_OK);
    cr_assert_eq(stats_of(rig.pool).reserved_bytes, 8 * PAGE);
    cr_assert_eq(stats_of(rig.pool).live_peak_bytes, 0);
    cr_assert_eq(stats_of(rig.pool).allocations, 0);
    cr_assert_eq(rebatch_pool_reserve(rig.pool, 8 * PAGE, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_pool_reserve(rig.pool, 1, NULL), REBATCH_OK);
    cr_assert_eq(stats_of(rig.pool).device_allocations, 1);
    (void)take(rig.pool, UNIT);
    cr_assert_eq(rebatch_pool_reserve(rig.pool, 8 * PAGE, NULL), REBATCH_OK);
    cr_assert_eq(stats_of(rig.pool).device_allocations, 2);
    assert_valid(rig.pool);
}

/* A reserve goes through the same search: it takes other streams' blocks, trims, and asks for
 * pressure; when all is in vain it reports the OOM as an allocation does. */
Test(pool_search, a_reserve_goes_through_the_search)
{
    AUTO_RIG rig = rig_open_plain(16, NULL);
    rebatch_stream other;
    cr_assert_eq(rebatch_stream_create(&other, rig.device), REBATCH_OK);
    void *a = take(rig.pool, 8 * PAGE);
    void *b = take_on(rig.pool, 8 * PAGE, other);
    give(rig.pool, a);
    give(rig.pool, b);
    cr_assert_eq(rebatch_pool_reserve(rig.pool, 12 * PAGE, NULL), REBATCH_OK);
    cr_assert_eq(stats_of(rig.pool).trims, 1);
    cr_assert_eq(rebatch_pool_reserve(rig.pool, 12 * PAGE, other), REBATCH_OK);
    cr_assert_eq(stats_of(rig.pool).device_allocations, 3); /* the same piece, handed over */
    cr_assert_eq(rebatch_pool_reserve(rig.pool, 17 * PAGE, NULL), REBATCH_OOM);
    cr_assert_eq(last_oom(rig.pool).asked_bytes, 17 * PAGE);
    cr_assert_str_eq(last_oom(rig.pool).tag, "reserve");
    struct holder holder = {rig.pool, take(rig.pool, 16 * PAGE), 0, 0, REBATCH_OK};
    cr_assert_eq(rebatch_pool_add_pressure(rig.pool, let_go, &holder), REBATCH_OK);
    cr_assert_eq(rebatch_pool_reserve(rig.pool, 10 * PAGE, NULL), REBATCH_OK);
    cr_assert_eq(holder.calls, 1);
    cr_assert_eq(stats_of(rig.pool).live_bytes, 0);
}

/* With caching off a reserve only looks for room. */
Test(pool_search, with_caching_off_a_reserve_only_looks)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.caching = REBATCH_OFF;
    options.limit_bytes = 8 * PAGE;
    AUTO_RIG rig = rig_open(64, &options);
    cr_assert_eq(rebatch_pool_reserve(rig.pool, 8 * PAGE, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_pool_reserve(rig.pool, 8 * PAGE + 1, NULL), REBATCH_OOM);
    cr_assert_eq(stats_of(rig.pool).device_allocations, 0);
    cr_assert_eq(rbi_pool_admit(rig.pool, 8 * PAGE, NULL), REBATCH_OK);
    cr_assert_eq(rbi_pool_admit(rig.pool, 8 * PAGE + 1, NULL), REBATCH_OOM);
    cr_assert_eq(stats_of(rig.pool).device_allocations, 0);
    cr_assert_eq(stats_of(rig.pool).ooms, 1);
}

/* Fills a pool with blocks of both streams, with holes between them. */
static size_t litter(struct faulty *f, void **blocks, size_t most, rebatch_stream second,
                     uint64_t *random)
{
    size_t count = 0;
    for (size_t i = 0; i < most; i++) {
        const size_t bytes = draw(random) % (draw(random) % 4 ? 4 * KIB : 3 * PAGE) + 1;
        if (rebatch_pool_alloc(&blocks[count], f->pool, bytes, draw(random) % 3 ? NULL : second,
                               0) == REBATCH_OK)
            count++;
    }
    for (size_t i = 0; i < count; i++)
        if (draw(random) % 2) {
            give(f->pool, blocks[i]);
            blocks[i--] = blocks[--count];
        }
    return count;
}

/* After a reserve, allocations whose rounded sizes add up to no more cannot fail, whatever is
 * freed between them, in scopes or not, on either stream, and although the device gives nothing
 * any more. */
Test(pool_search, what_was_reserved_cannot_fail)
{
    enum { MOST = 60 };
    for (uint64_t seed = 1; seed <= 60; seed++) {
        uint64_t random = seed;
        struct faulty f = faulty_open(64, NULL);
        rebatch_stream second;
        cr_assert_eq(rebatch_stream_create(&second, f.fault), REBATCH_OK);
        void *blocks[MOST];
        size_t count = litter(&f, blocks, MOST, second, &random);
        size_t left = draw(&random) % (16 * PAGE) + 1;
        if (rebatch_pool_reserve(f.pool, left, NULL) != REBATCH_OK)
            left = 0;
        faulty_arm(&f, 1, REBATCH_FAULT_FOREVER, REBATCH_OOM);
        rebatch_scope scope = 0;
        while (left >= UNIT) {
            const size_t most = draw(&random) % 8 ? rbi_min(left, 8 * KIB) : left;
            const size_t bytes = (draw(&random) % most + UNIT) / UNIT * UNIT;
            if (bytes > left)
                continue;
            (void)take_on(f.pool, bytes - draw(&random) % UNIT, draw(&random) % 8 ? NULL : second);
            left -= bytes;
            if (count > 0 && draw(&random) % 2)
                give(f.pool, blocks[--count]);
            if (draw(&random) % 16 == 0) {
                if (scope)
                    cr_assert_eq(draw(&random) % 2 ? rebatch_scope_commit(f.pool, scope)
                                                   : rebatch_scope_rollback(f.pool, scope),
                                 REBATCH_OK);
                scope = scope ? 0 : begin(f.pool);
            }
            assert_valid(f.pool);
        }
        faulty_close(&f);
    }
}

/* Admission makes sure of a total: it takes only what is short from the device, nothing when the
 * cache suffices, and its failure is no OOM of the pool's. */
Test(pool_search, admission_takes_only_what_is_short)
{
    AUTO_RIG rig = rig_open(16, NULL);
    void *a = take(rig.pool, 4 * PAGE);
    void *b = take(rig.pool, 4 * PAGE);
    give(rig.pool, a);
    give(rig.pool, b);
    cr_assert_eq(rbi_pool_admit(rig.pool, 8 * PAGE, NULL), REBATCH_OK);
    cr_assert_eq(stats_of(rig.pool).device_allocations, 2);
    cr_assert_eq(rbi_pool_admit(rig.pool, 9 * PAGE + 1, NULL), REBATCH_OK);
    cr_assert_eq(stats_of(rig.pool).reserved_bytes, 10 * PAGE);
    cr_assert_eq(rbi_pool_admit(rig.pool, 16 * PAGE + 1, NULL), REBATCH_OOM);
    cr_assert_eq(stats_of(rig.pool).ooms, 0);
    cr_assert_eq(last_oom(rig.pool).asked_bytes, 0);
    cr_assert_eq(stats_of(rig.pool).live_peak_bytes, 8 * PAGE);
    cr_assert_eq(rbi_pool_admit(rig.pool, 16 * PAGE, NULL), REBATCH_OK);
    assert_valid(rig.pool);
}

/* What another stream has free in pages that it has in use cannot go back, but serves: its own
 * requests, and those that find nothing else. */
Test(pool_search, admission_counts_what_other_streams_cannot_give_back)
{
    AUTO_RIG rig = rig_open(16, NULL);
    rebatch_stream other;
    cr_assert_eq(rebatch_stream_create(&other, rig.device), REBATCH_OK);
    void *block = take_on(rig.pool, PAGE / 2, other);
    const size_t own = 15 * PAGE, beside = PAGE / 2;
    cr_assert_eq(rbi_pool_admit(rig.pool, own + beside + REBATCH_POOL_UNIT_BYTES, NULL),
                 REBATCH_OOM);
    cr_assert_eq(rbi_pool_admit(rig.pool, own + beside, NULL), REBATCH_OK);
    cr_assert_eq(stats_of(rig.pool).reserved_bytes, 16 * PAGE);
    void *large = take(rig.pool, own), *small = take(rig.pool, beside);
    cr_assert_eq(stats_of(rig.pool).ooms, 0);
    give(rig.pool, large);
    give(rig.pool, small);
    give(rig.pool, block);
    assert_valid(rig.pool);
    rebatch_stream_destroy(rig.device, other);
}

/* Admission gives other streams' cache back when it must, and keeps its own. */
Test(pool_search, admission_trims_the_cache_of_other_streams)
{
    AUTO_RIG rig = rig_open_plain(16, NULL);
    rebatch_stream other;
    cr_assert_eq(rebatch_stream_create(&other, rig.device), REBATCH_OK);
    void *a = take(rig.pool, 8 * PAGE);
    void *b = take_on(rig.pool, 8 * PAGE, other);
    give(rig.pool, a);
    give(rig.pool, b);
    cr_assert_eq(rbi_pool_admit(rig.pool, 12 * PAGE, NULL), REBATCH_OK);
    cr_assert_eq(stats_of(rig.pool).device_frees, 1);
    cr_assert_eq(stats_of(rig.pool).reserved_bytes, 12 * PAGE);
    cr_assert_eq(take(rig.pool, 8 * PAGE), a);
}

/* The mark sees the most live bytes since it was set, and leaves the public peaks alone. */
Test(pool_search, the_mark_sees_the_peak_since_it_was_set)
{
    AUTO_RIG rig = rig_open(64, NULL);
    give(rig.pool, take(rig.pool, 8 * KIB));
    void *kept = take(rig.pool, KIB);
    rbi_pool_mark_peak(rig.pool);
    cr_assert_eq(rbi_pool_peak_since_mark(rig.pool), KIB);
    give(rig.pool, take(rig.pool, 4 * KIB));
    give(rig.pool, kept);
    cr_assert_eq(rbi_pool_peak_since_mark(rig.pool), 5 * KIB);
    cr_assert_eq(stats_of(rig.pool).live_peak_bytes, 8 * KIB);
}

static size_t destroy_it(size_t wanted_bytes, void *user)
{
    (void)wanted_bytes;
    assert_refused((rebatch_pool_destroy(user), REBATCH_OK), REBATCH_OK, "pressure callback");
    return 0;
}

Test(pool_search, a_pool_is_not_destroyed_from_its_own_callback)
{
    AUTO_RIG rig = rig_open(4, NULL);
    void *none;
    cr_assert_eq(rebatch_pool_add_pressure(rig.pool, destroy_it, rig.pool), REBATCH_OK);
    cr_assert_eq(rebatch_pool_alloc(&none, rig.pool, 8 * PAGE, NULL, 0), REBATCH_OOM);
    give(rig.pool, take(rig.pool, PAGE));
    assert_valid(rig.pool);
}
