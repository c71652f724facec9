/* Owns the tests that less memory at the price of time changes no bit: activations that are
 * computed again, and moments in pinned host memory.
 * Must not know private headers of the library. */
#include "fault/fault_device.h"
#include "gpt/error.h"
#include "gpt_common.h"
#include "rig.h"

TestSuite(gpt_lighten);

static void lighten(const struct run *run, unsigned level)
{
    ASSERT_OK(gpt_trainer_ops()->lighten(level, run->trainer));
}

/* Opens at a level, runs `steps`, hashes, closes. */
static void run_at(char text[GPT_HASH_TEXT_BYTES], const struct run_options *options,
                   unsigned level, size_t steps)
{
    OPEN(run, run, options);
    lighten(&run, level);
    run_steps(&run, steps);
    run_hash(&run, text);
}

Test(gpt_lighten, no_level_changes_a_bit, .description = "seed 1, 3 steps of 16")
{
    struct run_options options = tiny_run();
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    cr_assert_gt(options.train.config.dropout, 0.0f);
    run_whole(want, &options, 3);
    for (unsigned level = 0; level <= GPT_LIGHTEN_MOST; level++)
        for (options.micro = 3; options.micro <= 16; options.micro += 13) {
            run_at(got, &options, level, 3);
            cr_assert_str_eq(got, want, "level %u, micro-batch %zu", level, options.micro);
        }
}

Test(gpt_lighten, one_layer_and_many_are_no_different, .description = "seed 1, 2 steps of 16")
{
    struct run_options options = tiny_run();
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    for (size_t layers = 1; layers <= 5; layers += 4) {
        options.train.config.layers = layers;
        options.train.config.length = 8;
        run_whole(want, &options, 2);
        for (unsigned level = 1; level <= GPT_LIGHTEN_MOST; level++) {
            run_at(got, &options, level, 2);
            cr_assert_str_eq(got, want, "%zu layers, level %u", layers, level);
        }
    }
}

Test(gpt_lighten, levels_change_between_steps, .description = "seed 1, 8 steps of 16")
{
    static const unsigned levels[] = {0, 3, 3, 2, 0, 3, 1, 2};
    enum { STEPS = sizeof levels / sizeof *levels };
    const struct run_options options = tiny_run();
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    run_whole(want, &options, STEPS);
    OPEN(run, run, &options);
    for (size_t i = 0; i < STEPS; i++) {
        lighten(&run, levels[i]);
        run_steps(&run, 1);
        cr_assert_eq(run.trainer->pinned[0].count > 0, levels[i] == 3);
        cr_assert_eq(run.trainer->moments[0].count > 0, levels[i] != 3);
    }
    run_hash(&run, got);
    cr_assert_str_eq(got, want);
}

Test(gpt_lighten, each_level_needs_less, .description = "seed 1, 2 steps of 16")
{
    const struct run_options options = tiny_run();
    uint64_t before = UINT64_MAX;
    for (unsigned level = 0; level <= GPT_LIGHTEN_MOST; level++) {
        rebatch_step_report report;
        OPEN(run, run, &options);
        lighten(&run, level);
        run_steps(&run, 1);
        ASSERT_OK(gpt_trainer_step(run.trainer, &report, NULL));
        cr_assert_lt(report.peak_bytes, before, "level %u: %llu bytes", level,
                     (unsigned long long)report.peak_bytes);
        before = report.peak_bytes;
    }
}

Test(gpt_lighten, a_level_that_is_none_is_refused)
{
    const struct run_options options = tiny_run();
    OPEN(run, run, &options);
    ASSERT_ERROR(gpt_trainer_ops()->lighten(4, run.trainer), REBATCH_E_UNSUPPORTED,
                 "lighten level is 4: expected 0 to 3");
}

/* ---- through OOMs ---- */

static void arm(const struct run *run, uint32_t calls, uint64_t nth, uint64_t times)
{
    ASSERT_OK(rebatch_fault_arm(run->device, &FAULTS(.calls = calls, .nth = nth, .times = times)));
}

static void check_ooms(unsigned level)
{
    const struct run_options options = short_run();
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    struct run run;
    uint64_t count = 1;
    run_whole(want, &options, 2);
    for (uint64_t nth = 0; nth <= count; nth += stride_of_cases(17)) {
        run_open(&run, &options);
        lighten(&run, level);
        arm(&run, 0, nth, 1);
        run_steps(&run, 2);
        if (nth == 0)
            ASSERT_OK(rebatch_fault_counts(run.device, &count, NULL));
        run_hash(&run, got);
        cr_assert_str_eq(got, want, "level %u, OOM at allocation %llu", level,
                         (unsigned long long)nth);
        run_close(&run);
    }
    cr_assert_gt(count, 40);
}

Test(gpt_lighten, ooms_do_not_matter_at_level_1, .description = "seed 1, 2 steps of 4")
{
    check_ooms(1);
}

Test(gpt_lighten, ooms_do_not_matter_at_level_2, .description = "seed 1, 2 steps of 4")
{
    check_ooms(2);
}

Test(gpt_lighten, ooms_do_not_matter_at_level_3, .description = "seed 1, 2 steps of 4")
{
    check_ooms(3);
}

/* Two steps under a cap, and what the report of the last says. */
static rebatch_status run_under(struct run_options *options, size_t cap,
                                char hash[GPT_HASH_TEXT_BYTES], rebatch_step_report *report)
{
    rebatch_status status = REBATCH_OK;
    options->capacity_bytes = cap;
    OPEN(run, run, options);
    for (size_t i = 0; i < 2 && !status; i++)
        status = gpt_trainer_step(run.trainer, report, NULL);
    run_hash(&run, hash);
    return status;
}

/* One sample does not fit as it is: with the room that a level needs, the fallback goes down to it.
 * The pool needs a few pages more than the formula says, and never as many as lie between two
 * levels. */
Test(gpt_lighten, the_fallback_reaches_every_level, .description = "seed 1, 2 steps of 2")
{
    const size_t page = 65536;
    struct run_options options = tiny_run();
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    rebatch_step_report report;
    options.train.batch = 2;
    options.train.config.layers = 8;
    options.micro = 1;
    run_whole(want, &options, 2);
    for (unsigned level = 0; level <= GPT_LIGHTEN_MOST; level++) {
        const struct gpt_memory memory = gpt_train_memory(&options.train, level);
        size_t cap = (size_t)(memory.persistent_bytes + memory.sample_bytes) / page * page;
        rebatch_status status = run_under(&options, cap, got, &report);
        cr_assert(status == REBATCH_E_EXHAUSTED || report.lighten_level > level,
                  "level %u fits in less than the formula says", level);
        do {
            cap += page;
            status = run_under(&options, cap, got, &report);
        } while (status == REBATCH_E_EXHAUSTED || (!status && report.lighten_level > level));
        cr_assert_eq(status, REBATCH_OK, "%s", gpt_last_error());
        cr_assert_eq(report.lighten_level, level);
        cr_assert_str_eq(got, want, "cap %zu, level %u", cap, level);
    }
}

/* ---- moments ---- */

Test(gpt_lighten, without_pinned_memory_there_is_no_third_level, .description = "seed 1, 2 steps")
{
    const struct run_options options = tiny_run();
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    uint64_t blocks = 2 * gpt_block_count(&options.train.config);
    run_whole(want, &options, 2);
    OPEN(run, run, &options);
    run_steps(&run, 1);
    for (uint64_t nth = 1; nth <= blocks; nth++) {
        arm(&run, REBATCH_FAULT_PIN, nth, 1);
        cr_assert_eq(gpt_trainer_ops()->lighten(3, run.trainer), REBATCH_OOM);
        cr_assert_eq(run.trainer->pinned[0].count, 0);
        cr_assert_gt(run.trainer->moments[0].count, 0);
    }
    ASSERT_OK(rebatch_fault_arm(run.device, NULL));
    run_steps(&run, 1);
    run_hash(&run, got);
    cr_assert_str_eq(got, want);
}

Test(gpt_lighten, without_room_the_moments_stay_pinned, .description = "seed 1, 2 steps of 4")
{
    const struct run_options options = short_run();
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    run_whole(want, &options, 2);
    OPEN(run, run, &options);
    lighten(&run, 3);
    run_steps(&run, 1);
    for (uint64_t nth = 1; nth <= 2 * gpt_block_count(&options.train.config); nth++) {
        arm(&run, 0, nth, 1);
        cr_assert_eq(gpt_trainer_ops()->lighten(2, run.trainer), REBATCH_OOM);
        cr_assert_gt(run.trainer->pinned[0].count, 0);
        cr_assert_eq(run.trainer->moments[0].count, 0);
    }
    ASSERT_OK(rebatch_fault_arm(run.device, NULL));
    run_steps(&run, 1);
    run_hash(&run, got);
    cr_assert_str_eq(got, want);
}

/* ---- memory ---- */

Test(gpt_lighten, the_formula_says_what_a_step_holds, .description = "seed 1, 2 steps of 16")
{
    struct run_options options = tiny_run();
    const size_t layers = options.train.config.layers;
    const uint64_t blocks = layers * GPT_ACT_COUNT + GPT_ACT_COUNT + 9;
    for (unsigned level = 0; level <= GPT_LIGHTEN_MOST; level++)
        for (options.micro = 1; options.micro <= 16; options.micro += 5) {
            const struct gpt_memory memory = gpt_train_memory(&options.train, level);
            const uint64_t least = memory.persistent_bytes + options.micro * memory.sample_bytes;
            rebatch_step_report report;
            OPEN(run, run, &options);
            lighten(&run, level);
            run_steps(&run, 1);
            ASSERT_OK(gpt_trainer_step(run.trainer, &report, NULL));
            cr_assert(report.peak_bytes >= least &&
                          report.peak_bytes < least + blocks * REBATCH_POOL_UNIT_BYTES,
                      "level %u, micro-batch %zu: %llu bytes, formula %llu", level, options.micro,
                      (unsigned long long)report.peak_bytes, (unsigned long long)least);
        }
}
