/* Holds what happens to a step that repeats where memory is so short that granules would be moved
 * in each: its blocks are placed anew, all at once, and from then on nothing is moved. Seeds 1 to
 * 5. */
#include "unit/pool_help.h"
#include "unit/pool_script.h"

/* The device has what is in use at most, and a tenth. */
static size_t tight_granules(const struct script *script)
{
    size_t in_use = 0, most = 0, bytes[STEP];
    for (size_t i = 0; i < script->count; i++) {
        const struct call *call = &script->calls[i];
        if (call->bytes)
            in_use += bytes[call->of] = (call->bytes + UNIT - 1) / UNIT * UNIT;
        else
            in_use -= bytes[call->of];
        most = rbi_max(most, in_use);
    }
    return (most + most / 10) / GRANULE + 2;
}

static struct run open_tight(const struct script *script)
{
    return (struct run){.rig = rig_open(tight_granules(script), NULL)};
}

static uint64_t remaps_of(const struct run *run)
{
    return stats_of(run->rig.pool).remaps;
}

/* Steps after which it runs, if it does. */
static int play_until_it_runs(struct run *run, const struct script *script)
{
    int steps = 0;
    while (steps < AGAIN && !runs(run)) {
        play(run, script, 0, script->count);
        steps++;
    }
    return steps;
}

Test(pool_place, a_step_that_moves_granules_is_placed_anew)
{
    for (uint64_t seed = 1; seed <= 5; seed++) {
        const struct script script = write_script(seed);
        struct run run = open_tight(&script);
        play_times(&run, &script, 2);
        const uint64_t before = remaps_of(&run);
        play(&run, &script, 0, script.count);
        cr_assert_gt(remaps_of(&run), before, "memory is not short");
        (void)play_until_it_runs(&run, &script);
        cr_assert(runs(&run), "seed %d", (int)seed);
        const rebatch_pool_stats stats = stats_of(run.rig.pool);
        play_times(&run, &script, 5);
        cr_assert(runs(&run));
        cr_assert_eq(remaps_of(&run), stats.remaps);
        cr_assert_eq(stats_of(run.rig.pool).device_allocations, stats.device_allocations);
        assert_valid(run.rig.pool);
        close_run(&run);
    }
}

/* Where it is left the blocks are at their new places, and memory is moved again where it must. */
Test(pool_place, it_is_left_at_any_call)
{
    const struct script script = write_script(1);
    const size_t bytes = strange_bytes(&script);
    struct run run = open_tight(&script);
    for (size_t at = 0; at < script.count; at += 7) {
        (void)play_until_it_runs(&run, &script);
        play(&run, &script, 0, at);
        give(run.rig.pool, take(run.rig.pool, bytes));
        assert_valid(run.rig.pool);
        play(&run, &script, at, script.count);
        play_times(&run, &script, 2);
        assert_valid(run.rig.pool);
    }
    close_run(&run);
}

Test(pool_place, what_crosses_into_the_next_step_stays_where_it_is)
{
    const struct script script = write_script(2);
    struct run run = {.rig = rig_open(tight_granules(&script) + 2, NULL)};
    unsigned char *loss = play_with_loss(&run, &script, 8 * AGAIN);
    cr_assert(runs(&run));
    assert_valid(run.rig.pool);
    cr_assert_eq(*loss, (unsigned char)(8 * AGAIN - 1));
    give(run.rig.pool, loss);
    close_run(&run);
}

/* What is promised by a reserve is one piece, which a placed period need not leave. */
Test(pool_place, a_step_that_reserves_is_not_placed)
{
    const struct script script = write_script(3);
    struct run run = open_tight(&script);
    for (int i = 0; i < AGAIN; i++) {
        cr_assert_eq(rebatch_pool_reserve(run.rig.pool, GRANULE, NULL), REBATCH_OK);
        const uint64_t before = remaps_of(&run);
        play(&run, &script, 0, script.count);
        cr_assert(!runs(&run) || remaps_of(&run) == before);
    }
    assert_valid(run.rig.pool);
    close_run(&run);
}

/* Every call of the device that it takes to line memory up may fail: nothing is lost, and the next
 * try finds it all. */
Test(pool_place, lining_up_may_fail_at_any_call)
{
    enum { PIECES = 12 };
    for (uint64_t nth = 1;; nth++) {
        rebatch_device *host, *device;
        rebatch_pool *pool;
        cr_assert_eq(rebatch_device_open_host(&host, 4 * PIECES * GRANULE, NULL), REBATCH_OK);
        cr_assert_eq(rebatch_device_open_fault(&device, host, NULL), REBATCH_OK);
        cr_assert_eq(rebatch_pool_create(&pool, device, NULL), REBATCH_OK);
        void *blocks[2 * PIECES];
        for (int i = 0; i < 2 * PIECES; i++)
            blocks[i] = take(pool, 2 * GRANULE);
        for (int i = 0; i < 2 * PIECES; i += 2)
            give(pool, blocks[i]);
        settle(pool);
        rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
        plan.calls =
            REBATCH_FAULT_RESERVE | REBATCH_FAULT_CREATE | REBATCH_FAULT_MAP | REBATCH_FAULT_ACCESS;
        plan.nth = nth;
        cr_assert_eq(rebatch_fault_arm(device, &plan), REBATCH_OK);
        const bool failed = !rbi_pool_line_up(pool, 2 * PIECES * GRANULE, pool->first_stream, true);
        plan.nth = 0;
        cr_assert_eq(rebatch_fault_arm(device, &plan), REBATCH_OK);
        assert_valid(pool);
        cr_assert_neq(rbi_pool_line_up(pool, 2 * PIECES * GRANULE, pool->first_stream, true), NULL);
        assert_valid(pool);
        rebatch_pool_destroy(pool);
        rebatch_memory_info info;
        cr_assert_eq(rebatch_device_memory(device, &info), REBATCH_OK);
        cr_assert_eq(info.used_bytes, 0);
        rebatch_device_close(device);
        rebatch_device_close(host);
        if (!failed) {
            cr_assert_gt(nth, PIECES);
            break;
        }
    }
}
