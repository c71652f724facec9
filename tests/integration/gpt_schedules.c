/* The same bits under thousands of random schedules of OOMs, caps and sizes: a real model, tiny, so
 * that a schedule takes milliseconds. Public headers only. */
#include <stdlib.h>

#include "fault/fault_device.h"
#include "gpt/error.h"
#include "integration/gpt_common.h"
#include "rig.h"

enum { STEPS = 2, BATCH_MOST = 130, SCHEDULES_A_BATCH = 8 };

/* One layer, 4 tokens a sample: two steps of a hundred samples are a few milliseconds. */
static struct run_options schedule_run(size_t batch)
{
    struct run_options options = tiny_run();
    options.train.config.layers = 1;
    options.train.config.length = 4;
    options.train.batch = batch;
    return options;
}

static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static size_t between(size_t low, size_t high, uint64_t *state)
{
    return low + (size_t)(next(state) % (high - low + 1));
}

/* What the reference run of a batch left behind. */
struct reference {
    char hash[GPT_HASH_TEXT_BYTES];
    uint64_t allocations; /* of the device, with every one going there */
    size_t live_peak_bytes;
};

static struct reference reference_of(size_t batch)
{
    struct reference reference;
    struct run_options options = schedule_run(batch);
    options.uncached = true;
    rebatch_pool_stats stats;
    OPEN(run, run, &options);
    ASSERT_OK(rebatch_fault_arm(run.device, NULL));
    run_steps(&run, STEPS);
    run_hash(&run, reference.hash);
    ASSERT_OK(rebatch_fault_counts(run.device, &reference.allocations, NULL));
    ASSERT_OK(rebatch_pool_get_stats(&stats, rebatch_get_pool(run.rb)));
    reference.live_peak_bytes = (size_t)stats.live_peak_bytes;
    return reference;
}

/* What happened over all schedules, so that a test that no longer strikes anything is noticed. */
struct tally {
    unsigned schedules, exhausted, ooms, shrunk;
};

/* Draws a schedule: which calls fail, and how the room changes on the way. */
static void draw(struct run_options *options, rebatch_fault_plan *plan, rebatch_fault_room rooms[3],
                 const struct reference *reference, uint64_t *state)
{
    options->micro = between(0, options->train.batch, state);
    options->uncached = next(state) % 2;
    plan->nth = between(1, (size_t)reference->allocations, state);
    plan->times = next(state) % 8 ? between(1, 6, state) : REBATCH_FAULT_FOREVER;
    plan->permille = next(state) % 2 ? (uint32_t)between(1, 30, state) : 0;
    plan->seed = next(state);
    if (next(state) % 2) {
        plan->rooms = rooms;
        plan->room_count = 3;
        for (size_t i = 0; i < 3; i++)
            rooms[i] = (rebatch_fault_room){
                .at_call = i * reference->allocations / 3 + 1,
                .capacity_bytes =
                    between(reference->live_peak_bytes / 4, reference->live_peak_bytes * 2, state)};
    }
}

/* Runs the schedule to its end, then, if it ended in exhaustion, on with all the memory there
 * is. */
static void run_schedule(size_t batch, const struct reference *reference, uint64_t seed,
                         struct tally *tally)
{
    uint64_t state = seed;
    struct run_options options = schedule_run(batch);
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    rebatch_fault_room rooms[3];
    draw(&options, &plan, rooms, reference, &state);

    char got[GPT_HASH_TEXT_BYTES];
    OPEN(run, run, &options);
    ASSERT_OK(rebatch_fault_arm(run.device, &plan));
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < STEPS && !status; i++) {
        rebatch_step_report report;
        status = gpt_trainer_step(run.trainer, &report, NULL);
        tally->ooms += report.ooms;
        tally->shrunk += report.micro_after < report.micro_before;
    }
    tally->schedules++;
    if (status) {
        cr_assert_eq(status, REBATCH_E_EXHAUSTED, "batch %zu seed %llu: %s", batch,
                     (unsigned long long)seed, gpt_last_error());
        tally->exhausted++;
        ASSERT_OK(rebatch_fault_arm(run.device, NULL));
        ASSERT_OK(rebatch_device_set_capacity(run.device, REBATCH_UNLIMITED));
        run_steps(&run, STEPS - (size_t)run.trainer->updates);
    }
    run_hash(&run, got);
    cr_assert_str_eq(got, reference->hash, "batch %zu seed %llu", batch, (unsigned long long)seed);
}

/* A slower kind of run (valgrind, a sanitizer) may take every n-th batch only. */
static size_t stride(void)
{
    const char *text = getenv("REBATCH_TEST_STRIDE");
    const long value = text ? strtol(text, NULL, 10) : 1;
    return value > 1 ? (size_t)value : 1;
}

static void run_batches(size_t first, size_t last)
{
    struct tally tally = {0};
    setenv("GPT_THREADS", "1", 1);
    for (size_t batch = first; batch <= last; batch += stride()) {
        const struct reference reference = reference_of(batch);
        for (uint64_t i = 0; i < SCHEDULES_A_BATCH; i++)
            run_schedule(batch, &reference, batch * 1000 + i, &tally);
    }
    cr_assert_gt(tally.ooms, 0);
    if (stride() > 1)
        return; /* too few schedules for shares of them */
    cr_assert_gt(tally.ooms, tally.schedules, "%u OOMs in %u schedules", tally.ooms,
                 tally.schedules);
    cr_assert_gt(tally.shrunk, tally.schedules / 4);
    cr_assert_gt(tally.exhausted, 0);
    cr_assert_lt(tally.exhausted, tally.schedules / 2);
}

Test(gpt_schedules, random_ooms_do_not_matter_1, .description = "seeds: batch * 1000 + 0 to 7")
{
    run_batches(1, 65);
}

Test(gpt_schedules, random_ooms_do_not_matter_2, .description = "seeds: batch * 1000 + 0 to 7")
{
    run_batches(66, 105);
}

Test(gpt_schedules, random_ooms_do_not_matter_3, .description = "seeds: batch * 1000 + 0 to 7")
{
    run_batches(106, BATCH_MOST);
}

Test(gpt_schedules, every_start_size_does_not_matter, .description = "seed 1, sizes 1 to 64 of 64")
{
    setenv("GPT_THREADS", "1", 1);
    struct run_options options = schedule_run(64);
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    run_whole(want, &options, STEPS);
    for (size_t micro = 1; micro <= 64; micro += stride()) {
        options.micro = micro;
        run_whole(got, &options, STEPS);
        cr_assert_str_eq(got, want, "micro-batch %zu", micro);
    }
}
