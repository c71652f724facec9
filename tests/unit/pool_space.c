/* Holds what pages promise: free ones are mapped where memory is needed before new ones are
 * made, nothing is lost when a call of the device fails. Seeds: 1 and 2 where a test draws. */

#include <sys/syscall.h>
#include <unistd.h>

#include "fault/fault_device.h"
#include "unit/pool_help.h"

static rebatch_pool_stats after_trim(rebatch_pool *pool)
{
    cr_assert_eq(rebatch_pool_trim(pool, 0, NULL), REBATCH_OK);
    return stats_of(pool);
}

/* Blocks of any size lie one behind the other: what is reserved is what is live, in pages. */
Test(pool_space, blocks_share_pages)
{
    struct rig rig = rig_open(64, NULL);
    char *last = NULL;
    for (int i = 0; i < 20; i++) {
        char *block = take(rig.pool, PAGE + 5 * UNIT);
        cr_assert(!last || block == last + PAGE + 5 * UNIT);
        last = block;
    }
    const rebatch_pool_stats stats = stats_of(rig.pool);
    cr_assert_eq(stats.reserved_bytes, (stats.live_bytes + PAGE - 1) / PAGE * PAGE);
    rig_close(&rig);
}

/* The same where nobody knows how much memory there will be: addresses do not come in pieces of one
 * request each, whose last pages nobody could share. */
Test(pool_space, blocks_share_pages_of_a_device_without_bounds)
{
    struct rig rig = {NULL, NULL};
    cr_assert_eq(rebatch_device_open_dry(&rig.device, REBATCH_UNLIMITED, PAGE), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&rig.pool, rig.device, NULL), REBATCH_OK);
    for (int i = 0; i < 20; i++)
        (void)take(rig.pool, PAGE + 5 * UNIT);
    const rebatch_pool_stats stats = stats_of(rig.pool);
    cr_assert_eq(stats.reserved_bytes, (stats.live_bytes + PAGE - 1) / PAGE * PAGE);
    rig_close(&rig);
}

/* Free pages in several places serve one large request; the device is not asked, and what is in
 * use keeps its content. */
Test(pool_space, free_pages_are_mapped_elsewhere_before_new_ones_are_made)
{
    struct rig rig = rig_open(16, NULL);
    char *blocks[8];
    for (int i = 0; i < 8; i++) {
        blocks[i] = take(rig.pool, 2 * PAGE);
        memset(blocks[i], i, 2 * PAGE);
    }
    for (int i = 0; i < 8; i += 2)
        give(rig.pool, blocks[i]);
    const uint64_t calls = stats_of(rig.pool).device_allocations;
    char *large = take(rig.pool, 8 * PAGE);
    memset(large, 0x55, 8 * PAGE);
    cr_assert_eq(stats_of(rig.pool).device_allocations, calls);
    cr_assert_eq(stats_of(rig.pool).remaps, 8);
    cr_assert_eq(stats_of(rig.pool).reserved_bytes, 16 * PAGE);
    cr_assert_eq(rig.pool->stages[REBATCH_STAGE_REMAP], 1);
    for (int i = 1; i < 8; i += 2)
        for (size_t at = 0; at < 2 * PAGE; at += 512)
            cr_assert_eq(blocks[i][at], i);
    rig_close(&rig);
}

/* Pages that another stream has freed and finished with are as good as one's own. */
Test(pool_space, pages_of_other_streams_are_remapped_once_they_are_done)
{
    struct rig rig = rig_open(16, NULL);
    rebatch_stream other;
    cr_assert_eq(rebatch_stream_create(&other, rig.device), REBATCH_OK);
    void *a = take(rig.pool, 8 * PAGE);
    void *b = take_on(rig.pool, 8 * PAGE, other);
    give(rig.pool, a);
    give(rig.pool, b);
    (void)take(rig.pool, 15 * PAGE + 1);
    cr_assert_eq(stats_of(rig.pool).reserved_bytes, 16 * PAGE);
    rig_close(&rig);
}

/* The last pages serve a request that begins in what a neighbour has left of one. */
Test(pool_space, a_request_begins_where_its_neighbour_left_off)
{
    struct rig rig = rig_open(8, NULL);
    char *first = take(rig.pool, 3 * PAGE + 3 * UNIT);
    char *rest = take(rig.pool, 5 * PAGE - 3 * UNIT);
    cr_assert_eq(rest, first + 3 * PAGE + 3 * UNIT);
    cr_assert_eq(stats_of(rig.pool).reserved_bytes, 8 * PAGE);
    rig_close(&rig);
}

/* Blocks of other sizes that outlive their neighbours in time do not keep pages that these were
 * in: small ones, and such as are a few pages long. */
Test(pool_space, blocks_of_other_sizes_keep_no_pages_of_large_ones)
{
    enum { PAIRS = 6 };
    static const size_t others[] = {UNIT, 3 * KIB, 2 * PAGE + UNIT, 3 * PAGE + 5 * UNIT};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        const size_t kept = (PAIRS * others[i] + PAGE - 1) / PAGE;
        const size_t pages = kept + 10 * PAIRS;
        struct rig rig = rig_open(pages, NULL);
        void *large[PAIRS];
        for (int n = 0; n < PAIRS; n++) {
            large[n] = take(rig.pool, 9 * PAGE + 7 * UNIT);
            (void)take(rig.pool, others[i]);
        }
        for (int n = 0; n < PAIRS; n++)
            give(rig.pool, large[n]);
        cr_assert_eq(after_trim(rig.pool).reserved_bytes, kept * PAGE);
        (void)take(rig.pool, (pages - kept) * PAGE);
        rig_close(&rig);
    }
}

/* A free block between two holes is not cut: both parts would keep a page each that they share
 * with nobody. It is taken apart, and the request lies beside a block in use. */
Test(pool_space, a_block_between_holes_is_not_cut)
{
    struct rig rig = rig_open(19, NULL);
    (void)take(rig.pool, UNIT);
    char *blocks[5];
    for (int i = 0; i < 5; i++)
        blocks[i] = take(rig.pool, 3 * PAGE);
    give(rig.pool, blocks[1]);
    give(rig.pool, blocks[3]);
    void *large = take(rig.pool, 8 * PAGE); /* made of both */
    give(rig.pool, blocks[2]);
    merge_freed(rig.pool);
    cr_assert_eq(take(rig.pool, PAGE + UNIT), blocks[0] + 3 * PAGE);
    cr_assert_eq(stats_of(rig.pool).reserved_bytes, 18 * PAGE);
    assert_valid(rig.pool);
    give(rig.pool, large);
    rig_close(&rig);
}

/* The pool does not say OOM while enough pages are free: random sizes up to a sixteenth of the
 * device, and at each OOM all but a few parts of pages are in use. */
Test(pool_space, an_oom_means_that_memory_is_gone)
{
    enum { BLOCKS = 200, PAGES = 512 };
    struct rig rig = {NULL, NULL};
    cr_assert_eq(rebatch_device_open_dry(&rig.device, PAGES * PAGE, PAGE), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&rig.pool, rig.device, NULL), REBATCH_OK);
    void *blocks[BLOCKS];
    size_t count = 0;
    uint64_t random = 1;
    int ooms = 0;
    for (int n = 0; n < 20000; n++) {
        const size_t bytes = draw(&random) % (PAGES / 16 * PAGE) + 1;
        void *block = NULL;
        if (count < BLOCKS && draw(&random) % 100 < 60) {
            if (rebatch_pool_alloc(&block, rig.pool, bytes, NULL, 0) == REBATCH_OK) {
                blocks[count++] = block;
                continue;
            }
            rebatch_oom_report report;
            cr_assert_eq(rebatch_pool_last_oom(&report, rig.pool), REBATCH_OK);
            cr_assert_lt(report.would_fit_bytes, bytes);
            /* Besides what would have fitted only parts of pages at blocks' ends are free. */
            cr_assert_geq(report.live_bytes + report.would_fit_bytes + 2 * PAGE * count,
                          PAGES * PAGE);
            cr_assert_eq(rebatch_pool_alloc(&block, rig.pool, report.would_fit_bytes, NULL, 0),
                         report.would_fit_bytes ? REBATCH_OK : REBATCH_OK, "%s",
                         rebatch_last_error());
            give(rig.pool, block);
            ooms++;
        }
        if (count > 0) {
            const size_t at = draw(&random) % count;
            give(rig.pool, blocks[at]);
            blocks[at] = blocks[--count];
        }
        if (n % 500 == 0)
            assert_valid(rig.pool);
    }
    cr_assert_gt(ooms, 50);
    rig_close(&rig);
}

/* A range whose unmap fails is quarantined: counted, never given out again, tried again at the
 * end. */
Test(pool_space, what_is_not_unmapped_is_quarantined)
{
    struct rig rig = rig_open(8, NULL);
    rebatch_device *fault;
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    plan.calls = REBATCH_FAULT_UNMAP;
    plan.nth = 2;
    plan.status = REBATCH_E_DEVICE;
    cr_assert_eq(rebatch_device_open_fault(&fault, rig.device, &plan), REBATCH_OK);
    rebatch_pool *pool;
    cr_assert_eq(rebatch_pool_create(&pool, fault, NULL), REBATCH_OK);
    give(pool, take(pool, 4 * PAGE));
    (void)rebatch_pool_trim(pool, 0, NULL);
    cr_assert_eq(stats_of(pool).quarantined_bytes, PAGE);
    assert_valid(pool);
    cr_assert_eq(after_trim(pool).reserved_bytes, PAGE);
    (void)take(pool, 7 * PAGE);
    void *pointer;
    cr_assert_eq(rebatch_pool_alloc(&pointer, pool, 1, NULL, 0), REBATCH_OOM);
    assert_valid(pool);
    rebatch_pool_destroy(pool);
    rebatch_device_close(fault);
    rig_close(&rig);
}

/* A mapping that fails at any page, or when it is opened, leaves everything as it was. */
Test(pool_space, a_mapping_that_fails_is_unwound)
{
    static const uint32_t kinds[] = {REBATCH_FAULT_CREATE, REBATCH_FAULT_MAP, REBATCH_FAULT_ACCESS};
    for (size_t k = 0; k < 3; k++) {
        for (uint64_t nth = 1; nth <= (k == 2 ? 1 : 6); nth++) {
            struct rig rig = rig_open(8, NULL);
            rebatch_device *fault;
            rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
            plan.calls = kinds[k];
            plan.nth = nth;
            plan.status = REBATCH_E_DEVICE;
            cr_assert_eq(rebatch_device_open_fault(&fault, rig.device, &plan), REBATCH_OK);
            rebatch_pool *pool;
            cr_assert_eq(rebatch_pool_create(&pool, fault, NULL), REBATCH_OK);
            void *pointer;
            cr_assert_eq(rebatch_pool_alloc(&pointer, pool, 6 * PAGE, NULL, 0), REBATCH_E_DEVICE);
            assert_valid(pool);
            cr_assert_eq(stats_of(pool).quarantined_bytes, 0);
            cr_assert_eq(stats_of(pool).live_bytes, 0);
            memset(take(pool, 8 * PAGE), 1, 8 * PAGE);
            rebatch_pool_destroy(pool);
            rebatch_device_close(fault);
            rig_close(&rig);
        }
    }
}

/* Sizes are rounded to steps of their octave; what was asked for is still known. */
Test(pool_space, sizes_are_rounded_to_steps_of_their_octave)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.rounding_divisions = 4;
    struct rig rig = rig_open(64, &options);
    static const size_t cases[][2] = {{600, 1024}, {5000, 5120}, {33000, 40960}, {65536, 65536}};
    for (size_t i = 0; i < 4; i++) {
        size_t bytes;
        cr_assert_eq(rebatch_pool_block_bytes(&bytes, rig.pool, take(rig.pool, cases[i][0])),
                     REBATCH_OK);
        cr_assert_eq(bytes, cases[i][1]);
    }
    cr_assert_eq(stats_of(rig.pool).requested_bytes, 600 + 5000 + 33000 + 65536);
    size_t of_nothing;
    cr_assert_eq(rbi_pool_check_size(&of_nothing, rig.pool, 0), REBATCH_OK);
    cr_assert_eq(of_nothing, 0);
    rig_close(&rig);
    rebatch_pool *pool;
    rig = rig_open(8, NULL);
    options.rounding_divisions = 3;
    assert_refused(rebatch_pool_create(&pool, rig.device, &options), REBATCH_E_INVALID, "is 3");
    options.rounding_divisions = 0;
    options.keep_room_permille = 1001;
    assert_refused(rebatch_pool_create(&pool, rig.device, &options), REBATCH_E_INVALID, "1001");
    rig_close(&rig);
}

static size_t get_events(struct rbi_pool_event *out, size_t most, const rebatch_pool *pool)
{
    const struct rbi_event_log *log = &pool->log;
    const size_t count = rbi_min((size_t)(log->count - rbi_event_log_first(log)), most);
    for (size_t i = 0; i < count; i++)
        out[i] = *rbi_event_log_at(log, log->count - count + i);
    return count;
}

/* The last events are kept in order, as many as asked for; none unless asked. */
Test(pool_space, the_last_events_are_kept)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.events = 4;
    struct rig rig = rig_open(16, &options);
    struct rbi_pool_event events[8];
    const rebatch_scope scope = begin(rig.pool);
    void *a = take(rig.pool, KIB);
    void *b = take(rig.pool, KIB);
    give(rig.pool, a);
    cr_assert_eq(rebatch_scope_rollback(rig.pool, scope), REBATCH_OK);
    void *pointer;
    cr_assert_eq(rebatch_pool_alloc(&pointer, rig.pool, 17 * PAGE, NULL, 0), REBATCH_OOM);
    cr_assert_eq(get_events(events, 8, rig.pool), 4);
    static const uint8_t kinds[] = {RBI_POOL_EVENT_FREE, RBI_POOL_EVENT_FREE,
                                    RBI_POOL_EVENT_ROLLBACK, RBI_POOL_EVENT_OOM};
    for (size_t i = 0; i < 4; i++) {
        cr_assert_eq(events[i].kind, kinds[i]);
        cr_assert(i == 0 || events[i].number == events[i - 1].number + 1);
    }
    cr_assert_eq(events[1].address, b);
    cr_assert_eq(events[3].bytes, 17 * PAGE);
    cr_assert_eq(get_events(events, 1, rig.pool), 1);
    cr_assert_eq(events[0].kind, RBI_POOL_EVENT_OOM);
    rig_close(&rig);
    rig = rig_open(16, NULL);
    give(rig.pool, take(rig.pool, KIB));
    cr_assert_eq(get_events(events, 8, rig.pool), 0);
    rig_close(&rig);
}

/* ---- places ---- */

/* Two free places between blocks in use: one of two and a half pages, at a page's beginning,
 * and one of two, which begins and ends in the middle of a page. */
struct places {
    char *wide, *tight;
};
static struct places make_places(rebatch_pool *pool)
{
    const size_t half = PAGE / 2;
    struct places places;
    places.wide = take(pool, 5 * half);
    (void)take(pool, 2 * half);
    places.tight = take(pool, 4 * half);
    (void)take(pool, 2 * half);
    give(pool, places.wide);
    give(pool, places.tight);
    return places;
}

/* The smallest free block that is large enough, and nothing is mapped for it: in the beginning, and
 * where memory is short too. */
Test(pool_space, a_block_goes_where_it_fits_best)
{
    struct rig rig = rig_open(64, NULL);
    for (int is_short = 0; is_short < 2; is_short++) {
        const struct places places = make_places(rig.pool);
        if (is_short)
            cr_assert_eq(rebatch_pool_set_limit(rig.pool, stats_of(rig.pool).reserved_bytes),
                         REBATCH_OK);
        const uint64_t calls = stats_of(rig.pool).driver_maps;
        cr_assert_eq((char *)take(rig.pool, 3 * PAGE / 2), places.tight);
        cr_assert_eq(stats_of(rig.pool).driver_maps, calls);
        (void)take(rig.pool, PAGE / 2);
        (void)take(rig.pool, 5 * PAGE / 2);
        assert_valid(rig.pool);
    }
    rig_close(&rig);
}
