/* Holds a pool that sleeps and wakes when the heap or the device fails: at every call, once and for
 * ever, contents and addresses stay, and the pool wakes when the failure is over. Seeds: none. */
#include "fault/fault_common.h"
#include "fault/fault_device.h"
#include "unit/pool_help.h"

#define BLOCKS 5

struct sleeper {
    rebatch_device *host, *fault;
    rebatch_pool *pool;
    rebatch_tag kept;
    unsigned char *blocks[BLOCKS];
};

static const size_t sizes[BLOCKS] = {3 * PAGE, 9 * PAGE, 5 * KIB, 4 * PAGE + 512, PAGE};

static void build(struct sleeper *w)
{
    memset(w, 0, sizeof *w);
    fault_open(&w->host, &w->fault, 64 * PAGE);
    cr_assert_eq(rebatch_pool_create(&w->pool, w->fault, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_pool_tag(&w->kept, w->pool, "kept"), REBATCH_OK);
    for (size_t i = 0; i < BLOCKS; i++) {
        void *block;
        cr_assert_eq(rebatch_pool_alloc(&block, w->pool, sizes[i], NULL, i == 3 ? w->kept : 0),
                     REBATCH_OK);
        w->blocks[i] = memset(block, (int)(i + 65), sizes[i]);
    }
    give(w->pool, take(w->pool, 5 * PAGE));
}

/* Two cycles, the second with less kept; the pool may be awake or asleep afterwards. */
static void work(const struct sleeper *w)
{
    const rebatch_sleep_options keep = {
        .struct_size = sizeof keep, .keep = &w->kept, .keep_count = 1};
    may_fail(rebatch_pool_sleep(w->pool, &keep, NULL));
    assert_valid(w->pool);
    may_fail(rebatch_pool_wake(w->pool));
    assert_valid(w->pool);
    may_fail(rebatch_pool_sleep(w->pool, &keep, NULL));
    may_fail(rebatch_pool_sleep(w->pool, NULL, NULL));
    assert_valid(w->pool);
    may_fail(rebatch_pool_wake(w->pool));
    assert_valid(w->pool);
}

/* After the failures. */
static void tear_down(struct sleeper *w)
{
    rbi_heap_fail(0, 0);
    fault_arm(w->fault, NULL);
    cr_assert_eq(rebatch_pool_wake(w->pool), REBATCH_OK, "%s", rebatch_last_error());
    assert_valid(w->pool);
    for (size_t i = 0; i < BLOCKS; i++) {
        cr_assert(w->blocks[i][0] == i + 65 &&
                  memcmp(w->blocks[i], w->blocks[i] + 1, sizes[i] - 1) == 0);
        give(w->pool, w->blocks[i]);
    }
    assert_valid(w->pool);
    rebatch_pool_destroy(w->pool);
    fault_close(w->host, w->fault);
}

Test(sleep_faults, the_heap_fails_at_every_call)
{
    const int64_t live = rbi_heap_live();
    for (int forever = 0; forever < 2; forever++) {
        uint64_t calls = 0;
        for (uint64_t nth = 0; nth <= calls + 1; nth++) {
            struct sleeper w;
            build(&w);
            const uint64_t before = rbi_heap_calls();
            rbi_heap_fail(nth, forever ? UINT64_MAX : 1);
            work(&w);
            if (nth == 0)
                calls = rbi_heap_calls() - before;
            tear_down(&w);
            cr_assert_eq(rbi_heap_live(), live);
        }
        cr_assert_gt(calls, 1);
    }
}

static void fail_device(uint32_t kinds, rebatch_status status, bool forever)
{
    const int64_t live = rbi_heap_live();
    uint64_t seen = 1;
    for (uint64_t nth = 0; nth <= seen; nth++) {
        struct sleeper w;
        build(&w);
        const rebatch_fault_plan plan =
            fault_plan(kinds, status, nth, forever ? REBATCH_FAULT_FOREVER : 1);
        fault_arm(w.fault, &plan);
        work(&w);
        if (nth == 0)
            cr_assert_eq(rebatch_fault_counts(w.fault, &seen, NULL), REBATCH_OK);
        tear_down(&w);
        cr_assert_eq(rbi_heap_live(), live);
    }
    cr_assert_gt(seen, 1, "calls %u", (unsigned)kinds);
}

Test(sleep_faults, the_device_fails_at_every_call)
{
    static const uint32_t kinds[] = {
        REBATCH_FAULT_ANY,    REBATCH_FAULT_CREATE,
        REBATCH_FAULT_MAP,    REBATCH_FAULT_ACCESS,
        REBATCH_FAULT_UNMAP,  REBATCH_FAULT_RELEASE,
        REBATCH_FAULT_COPY,   REBATCH_FAULT_PIN,
        REBATCH_FAULT_STREAM, REBATCH_FAULT_ACCESS | REBATCH_FAULT_UNMAP};
    static const rebatch_status statuses[] = {REBATCH_OOM, REBATCH_E_DEVICE};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (size_t s = 0; s < sizeof statuses / sizeof *statuses; s++)
            for (int forever = 0; forever < 2; forever++)
                fail_device(kinds[k], statuses[s], forever);
}
