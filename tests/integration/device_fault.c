/* Owns the tests of the fault device: which call fails, with what, and plans that are wrong.
 * Must not know more of the library than its public headers say. */
#include "device/device.h"
#include "fault/fault_device.h"
#include "rig.h"

#define PAGE_BYTES ((size_t)65536)
#define MOST_CALLS 2000

struct pair {
    rebatch_device *host, *fault;
};

static void pair_open(struct pair *pair, const rebatch_fault_plan *plan)
{
    OK(rebatch_device_open_host(&pair->host, 16 * PAGE_BYTES, NULL));
    OK(rebatch_device_open_fault(&pair->fault, pair->host, plan));
}

static void pair_close(struct pair *pair)
{
    rebatch_device_close(pair->fault);
    rebatch_device_close(pair->host);
}

static rebatch_status copy_once(const struct pair *pair)
{
    char from[8] = "rebatch";
    char to[8] = "";
    const rebatch_status status = rebatch_copy(pair->fault, to, from, sizeof from, NULL);
    cr_assert_eq(memcmp(to, from, sizeof from) == 0, status == REBATCH_OK,
                 "a call that fails has no effect, one that passes has");
    return status;
}

static void expect_counts(const struct pair *pair, uint64_t seen, uint64_t failed)
{
    uint64_t s, f;
    OK(rebatch_fault_counts(pair->fault, &s, &f));
    cr_assert_eq(s, seen);
    cr_assert_eq(f, failed);
}

/* A plan for copies, which are the simplest calls to make. */
static rebatch_fault_plan copies(uint64_t nth, uint64_t times)
{
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    plan.calls = REBATCH_FAULT_COPY;
    plan.nth = nth;
    plan.times = times;
    plan.status = REBATCH_E_DEVICE;
    return plan;
}

/* ---- which call fails ---- */

Test(device_fault, a_plan_of_zeros_passes_everything_on)
{
    struct pair pair;
    const rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    for (int i = 0; i < 2; i++) {
        pair_open(&pair, i ? &plan : NULL);
        cr_assert_str_eq(rebatch_device_name(pair.fault), "fault(host)");
        for (int n = 0; n < 100; n++)
            OK(copy_once(&pair));
        rebatch_memory_info info;
        OK(rebatch_device_memory(pair.fault, &info));
        cr_assert_eq(info.total_bytes, 16 * PAGE_BYTES);
        expect_counts(&pair, 0, 0); /* copies are not among the counted calls */
        pair_close(&pair);
    }
}

Test(device_fault, the_nth_call_fails_so_many_times_in_a_row)
{
    static const struct {
        uint64_t nth, times, first, last;
    } cases[] = {{1, 0, 1, 1},  {1, 1, 1, 1},
                 {3, 0, 3, 3},  {3, 1, 3, 3},
                 {3, 4, 3, 6},  {5, REBATCH_FAULT_FOREVER, 5, UINT64_MAX},
                 {0, 9, 1, 0},  {1, REBATCH_FAULT_FOREVER, 1, UINT64_MAX},
                 {99, 5, 1, 0}, {2, UINT64_MAX - 1, 2, UINT64_MAX}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const rebatch_fault_plan plan = copies(cases[i].nth, cases[i].times);
        uint64_t failed = 0;
        OPEN(pair, pair, &plan);
        for (uint64_t n = 1; n <= 20; n++) {
            const bool due = cases[i].first <= n && n <= cases[i].last;
            cr_assert_eq(copy_once(&pair), due ? REBATCH_E_DEVICE : REBATCH_OK, "case %zu, call %d",
                         i, (int)n);
            failed += due;
            expect_counts(&pair, n, failed);
        }
    }
}

Test(device_fault, only_calls_of_the_kinds_in_the_plan_are_counted_and_fail)
{
    const rebatch_fault_plan plan = copies(2, 1);
    OPEN(pair, pair, &plan);
    char buffer[8];
    OK(copy_once(&pair));
    for (int i = 0; i < 5; i++)
        OK(rebatch_fill(pair.fault, buffer, 0, sizeof buffer, NULL));
    expect_counts(&pair, 1, 0);
    cr_assert_eq(copy_once(&pair), REBATCH_E_DEVICE);
}

static void do_nothing(void *user)
{
    (void)user;
}

/* Makes one call of each kind that has a public face of its own. */
static rebatch_status call_of(const struct pair *pair, uint32_t kind)
{
    char buffer[8];
    rebatch_stream stream;
    switch (kind) {
    case REBATCH_FAULT_COPY:
        return copy_once(pair);
    case REBATCH_FAULT_FILL:
        return rebatch_fill(pair->fault, buffer, 0, sizeof buffer, NULL);
    default: {
        const rebatch_status status = rebatch_stream_create(&stream, pair->fault);
        cr_assert_eq(stream == NULL, status != REBATCH_OK);
        rebatch_stream_destroy(pair->fault, stream);
        return status;
    }
    }
}

Test(device_fault, every_kind_fails_with_the_plans_status_and_any_is_all_of_them)
{
    static const uint32_t kinds[] = {REBATCH_FAULT_COPY, REBATCH_FAULT_FILL, REBATCH_FAULT_STREAM};
    OPEN(pair, pair, NULL);
    for (size_t i = 0; i < 3; i++) {
        rebatch_fault_plan plan = copies(1, 1);
        for (int any = 0; any < 2; any++) {
            plan.calls = any ? (uint32_t)REBATCH_FAULT_ANY : kinds[i];
            plan.status = REBATCH_E_DEVICE_LOST;
            OK(rebatch_fault_arm(pair.fault, &plan));
            cr_assert_eq(call_of(&pair, kinds[i]), REBATCH_E_DEVICE_LOST);
            OK(call_of(&pair, kinds[i]));
        }
    }
    rebatch_fault_plan plan = copies(1, REBATCH_FAULT_FOREVER);
    plan.calls = REBATCH_FAULT_STREAM;
    OK(rebatch_fault_arm(pair.fault, &plan));
    cr_assert_eq(rebatch_stream_synchronize(pair.fault, NULL), REBATCH_E_DEVICE);
    cr_assert_eq(rbi_device_synchronize(pair.fault), REBATCH_E_DEVICE);
    cr_assert_eq(rebatch_stream_call(pair.fault, NULL, do_nothing, NULL), REBATCH_E_DEVICE);
}

Test(device_fault, by_default_allocations_fail_with_oom)
{
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    plan.nth = 2;
    OPEN(pair, pair, &plan);
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.caching = REBATCH_OFF;
    rebatch_pool *pool;
    void *block;
    OK(rebatch_pool_create(&pool, pair.fault, &options));
    OK(rebatch_pool_alloc(&block, pool, 1, NULL, 0));
    OK(rebatch_pool_free(pool, block));
    plan.nth = 1;
    plan.times = REBATCH_FAULT_FOREVER;
    OK(rebatch_fault_arm(pair.fault, &plan));
    cr_assert_eq(rebatch_pool_alloc(&block, pool, 1, NULL, 0), REBATCH_OOM);
    uint64_t seen, failed;
    OK(rebatch_fault_counts(pair.fault, &seen, &failed));
    cr_assert_geq(seen, 1);
    cr_assert_eq(seen, failed);
    rebatch_pool_destroy(pool);
}

Test(device_fault, a_failing_call_says_that_it_was_planned)
{
    const rebatch_fault_plan plan = copies(3, 1);
    OPEN(pair, pair, &plan);
    OK(copy_once(&pair));
    OK(copy_once(&pair));
    rebatch_clear_error();
    cr_assert_eq(copy_once(&pair), REBATCH_E_DEVICE);
    SAYS("3");
    SAYS("copy memory");
}

Test(device_fault, arming_starts_the_counts_again)
{
    const rebatch_fault_plan plan = copies(2, 1);
    OPEN(pair, pair, &plan);
    for (int i = 0; i < 3; i++) {
        OK(copy_once(&pair));
        cr_assert_eq(copy_once(&pair), REBATCH_E_DEVICE);
        expect_counts(&pair, 2, 1);
        OK(rebatch_fault_arm(pair.fault, &plan));
        expect_counts(&pair, 0, 0);
    }
    OK(rebatch_fault_arm(pair.fault, NULL));
    for (int i = 0; i < 5; i++)
        OK(copy_once(&pair));
}

/* ---- by chance ---- */

static size_t fail_by_chance(uint32_t permille, uint64_t seed, bool pattern[MOST_CALLS])
{
    rebatch_fault_plan plan = copies(0, 0);
    plan.permille = permille;
    plan.seed = seed;
    OPEN(pair, pair, &plan);
    size_t failed = 0;
    for (size_t i = 0; i < MOST_CALLS; i++) {
        pattern[i] = copy_once(&pair) != REBATCH_OK;
        failed += pattern[i];
    }
    expect_counts(&pair, MOST_CALLS, failed);
    return failed;
}

/* Seeds 0, 1, 2 and 3. */
Test(device_fault, chance_is_repeated_by_its_seed)
{
    static bool a[MOST_CALLS], b[MOST_CALLS];
    for (uint64_t seed = 0; seed < 3; seed++) {
        const size_t failed = fail_by_chance(250, seed, a);
        cr_assert(MOST_CALLS / 5 < failed && failed < MOST_CALLS * 3 / 10,
                  "%zu of %d failed, expected about a quarter", failed, MOST_CALLS);
        (void)fail_by_chance(250, seed, b);
        cr_assert_eq(memcmp(a, b, sizeof a), 0, "seed %d is not repeated", (int)seed);
        (void)fail_by_chance(250, seed + 1, b);
        cr_assert_neq(memcmp(a, b, sizeof a), 0, "seeds %d and %d are the same", (int)seed,
                      (int)seed + 1);
    }
    cr_assert_eq(fail_by_chance(0, 1, a), 0);
    cr_assert_eq(fail_by_chance(1000, 1, a), MOST_CALLS);
}

Test(device_fault, chance_comes_besides_the_number)
{
    rebatch_fault_plan plan = copies(1, 1);
    plan.permille = 1000;
    OPEN(pair, pair, &plan);
    for (int i = 0; i < 10; i++)
        cr_assert_eq(copy_once(&pair), REBATCH_E_DEVICE);
    expect_counts(&pair, 10, 10);
}

/* ---- rooms ---- */

static size_t capacity_of(rebatch_device *device)
{
    rebatch_memory_info info;
    OK(rebatch_device_memory(device, &info));
    return info.total_bytes;
}

Test(device_fault, rooms_change_the_capacity_at_their_calls)
{
    rebatch_fault_room rooms[] = {
        {2, 8 * PAGE_BYTES}, {4, 4 * PAGE_BYTES}, {4, 5 * PAGE_BYTES}, {6, 32 * PAGE_BYTES}};
    static const size_t expected[] = {16, 8, 8, 5, 5, 32, 32};
    rebatch_fault_plan plan = copies(0, 0);
    plan.rooms = rooms;
    plan.room_count = 4;
    OPEN(pair, pair, &plan);
    memset(rooms, 0xff, sizeof rooms); /* the plan is copied */
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        OK(copy_once(&pair));
        cr_assert_eq(capacity_of(pair.fault), expected[i] * PAGE_BYTES, "after call %zu", i + 1);
        cr_assert_eq(capacity_of(pair.host), expected[i] * PAGE_BYTES);
    }
}

Test(device_fault, a_room_holds_for_the_very_call_that_brings_it)
{
    const rebatch_fault_room rooms[] = {{2, 1 * PAGE_BYTES}};
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT; /* counts allocations */
    plan.rooms = rooms;
    plan.room_count = 1;
    OPEN(pair, pair, &plan);
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.caching = REBATCH_OFF;
    rebatch_pool *pool;
    void *first, *second;
    OK(rebatch_pool_create(&pool, pair.fault, &options));
    OK(rebatch_pool_alloc(&first, pool, PAGE_BYTES, NULL, 0));
    cr_assert_eq(rebatch_pool_alloc(&second, pool, PAGE_BYTES, NULL, 0), REBATCH_OOM);
    OK(rebatch_pool_free(pool, first));
    OK(rebatch_pool_alloc(&second, pool, PAGE_BYTES, NULL, 0));
    rebatch_pool_destroy(pool);
}

Test(device_fault, setting_its_capacity_sets_the_inner_devices)
{
    OPEN(pair, pair, NULL);
    OK(rebatch_device_set_capacity(pair.fault, 3 * PAGE_BYTES));
    cr_assert_eq(capacity_of(pair.host), 3 * PAGE_BYTES);
    cr_assert_eq(rebatch_device_set_capacity(pair.fault, 0), REBATCH_E_INVALID);
    cr_assert_eq(capacity_of(pair.host), 3 * PAGE_BYTES);
}

Test(device_fault, fault_devices_nest)
{
    rebatch_device *outer;
    const rebatch_fault_plan second = copies(2, 1);
    const rebatch_fault_plan first = copies(1, 1);
    OPEN(pair, pair, &second);
    OK(rebatch_device_open_fault(&outer, pair.fault, &first));
    char from[8] = "rebatch";
    char to[8];
    cr_assert_eq(rebatch_copy(outer, to, from, 8, NULL), REBATCH_E_DEVICE); /* outer: its 1st */
    OK(rebatch_copy(outer, to, from, 8, NULL));
    cr_assert_eq(rebatch_copy(outer, to, from, 8, NULL), REBATCH_E_DEVICE); /* inner: its 2nd */
    OK(rebatch_copy(outer, to, from, 8, NULL));
    rebatch_device_close(outer);
}

Test(device_fault, the_inner_device_stays_open_while_it_is_used)
{
    OPEN(pair, pair, NULL);
    rebatch_clear_error();
    rebatch_device_close(pair.host);
    SAYS("device host stays open: what is open on it is 1, expected 0");
    OK(copy_once(&pair));
}
