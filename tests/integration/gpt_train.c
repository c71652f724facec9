/* Owns the tests of training: the same bits for every cut of the batch and every OOM, and a loss
 * that falls. Must not know private headers of the library. */
#include <math.h>

#include "fault/fault_device.h"
#include "gpt/error.h"
#include "gpt/host.h"
#include "gpt_common.h"
#include "rig.h"

TestSuite(gpt_train);

/* ---- the same bits ---- */

Test(gpt_train, the_cut_of_the_batch_does_not_matter, .description = "seed 1, 3 steps of 16")
{
    static const size_t micros[] = {1, 2, 3, 5, 7, 8};
    struct run_options options = tiny_run();
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    cr_assert_gt(options.train.config.dropout, 0.0f);
    run_whole(want, &options, 3);
    for (size_t i = 0; i < sizeof micros / sizeof *micros; i += stride_of_cases(2)) {
        options.micro = micros[i];
        run_whole(got, &options, 3);
        cr_assert_str_eq(got, want, "micro-batches of %zu", micros[i]);
    }
}

Test(gpt_train, clipping_is_at_work_in_these_tests)
{
    const struct run_options options = tiny_run();
    struct gpt_step_result result;
    OPEN(run, run, &options);
    for (int i = 0; i < 3; i++) {
        ASSERT_OK(gpt_trainer_step(run.trainer, NULL, &result));
        cr_assert_gt(result.gradient_norm, options.train.clip);
    }
}

static void hash_with(char text[GPT_HASH_TEXT_BYTES], enum gpt_isa isa, size_t threads)
{
    const struct run_options options = tiny_run();
    OPEN(run, run, &options);
    cr_assert(gpt_isa_force(isa));
    ASSERT_OK(gpt_parallel_set_threads(threads));
    run_steps(&run, stride_of_cases(2) == 1 ? 2 : 1);
    run_hash(&run, text);
}

Test(gpt_train, threads_and_instruction_sets_do_not_matter, .description = "seed 1")
{
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    if (!gpt_isa_force(GPT_ISA_AVX2))
        cr_skip("this machine has no AVX2");
    hash_with(want, GPT_ISA_AVX2, 1);
    for (int isa = GPT_ISA_AVX2; isa <= GPT_ISA_AVX512; isa++)
        for (size_t threads = 1; threads <= 3; threads++) {
            if (!gpt_isa_force((enum gpt_isa)isa) || (isa == GPT_ISA_AVX2 && threads == 1))
                continue;
            hash_with(got, (enum gpt_isa)isa, threads);
            cr_assert_str_eq(got, want, "%zu threads, instruction set %d", threads, isa);
        }
}

Test(gpt_train, a_stream_of_its_own_does_not_matter, .description = "seed 1")
{
    struct run_options options = tiny_run();
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    run_whole(want, &options, 2);
    options.own_stream = true;
    options.micro = 5;
    run_whole(got, &options, 2);
    cr_assert_str_eq(got, want);
}

Test(gpt_train, the_hash_sees_everything, .description = "seeds 1 and 2")
{
    struct run_options options = tiny_run();
    char one[GPT_HASH_TEXT_BYTES], other[GPT_HASH_TEXT_BYTES];
    run_whole(one, &options, 1);
    run_whole(other, &options, 2);
    cr_assert_str_neq(one, other);
    options.train.seed = 2;
    run_whole(other, &options, 1);
    cr_assert_str_neq(one, other);
    options = tiny_run();
    options.train.clip = 0.4f; /* AdamW's first step hardly sees it, its moments do */
    run_whole(other, &options, 1);
    cr_assert_str_neq(one, other);
}

/* ---- the same bits through OOMs ---- */

static void arm(const struct run *run, uint64_t nth, uint64_t times)
{
    ASSERT_OK(rebatch_fault_arm(run->device, &FAULTS(.nth = nth, .times = times)));
}

static uint64_t allocations_of(const struct run_options *options, size_t steps)
{
    uint64_t seen;
    OPEN(run, run, options);
    arm(&run, 0, 0);
    run_steps(&run, steps);
    ASSERT_OK(rebatch_fault_counts(run.device, &seen, NULL));
    return seen;
}

Test(gpt_train, an_oom_at_any_allocation_does_not_matter, .description = "seed 1, 2 steps of 4")
{
    const struct run_options options = short_run();
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    run_whole(want, &options, 2);
    const uint64_t count = allocations_of(&options, 2);
    cr_assert_gt(count, 50);
    for (uint64_t nth = 1; nth <= count; nth += stride_of_cases(17)) {
        OPEN(run, run, &options);
        arm(&run, nth, 1);
        run_steps(&run, 2);
        run_hash(&run, got);
        cr_assert_str_eq(got, want, "OOM at allocation %llu", (unsigned long long)nth);
        cr_assert_eq(run.trainer->samples_seen, 8, "OOM at allocation %llu",
                     (unsigned long long)nth);
    }
}

Test(gpt_train, memory_that_stays_away_ends_cleanly, .description = "seed 1, 2 steps of 4")
{
    const struct run_options options = short_run();
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    run_whole(want, &options, 2);
    const uint64_t count = allocations_of(&options, 2);
    for (uint64_t nth = 1; nth <= count; nth += stride_of_cases(17)) {
        rebatch_status status = REBATCH_OK;
        OPEN(run, run, &options);
        arm(&run, nth, REBATCH_FAULT_FOREVER);
        while (!status)
            status = gpt_trainer_step(run.trainer, NULL, NULL);
        cr_assert_eq(status, REBATCH_E_EXHAUSTED, "%s", rebatch_status_name(status));
        cr_assert_eq(run.trainer->samples_seen, 4 * run.trainer->updates);
        /* When there is memory again it goes on as if nothing had been. */
        ASSERT_OK(rebatch_fault_arm(run.device, NULL));
        run_steps(&run, 2 - run.trainer->updates);
        run_hash(&run, got);
        cr_assert_str_eq(got, want, "no memory from allocation %llu on", (unsigned long long)nth);
    }
}

Test(gpt_train, a_cap_does_not_matter, .description = "seed 1, 3 steps of 16")
{
    struct run_options options = tiny_run();
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    struct run run;
    rebatch_pool_stats stats;
    run_open(&run, &options);
    run_steps(&run, 3);
    run_hash(&run, want);
    ASSERT_OK(rebatch_pool_get_stats(&stats, rebatch_get_pool(run.rb)));
    run_close(&run);
    options.capacity_bytes = (size_t)stats.live_peak_bytes / 2;
    run_open(&run, &options);
    for (int i = 0; i < 3; i++) {
        rebatch_step_report report;
        ASSERT_OK(gpt_trainer_step(run.trainer, &report, NULL));
        cr_assert_gt(report.microbatches, 1);
        /* The model reserves before it accumulates. */
        cr_assert_eq(report.ooms_in[REBATCH_PHASE_BACKWARD], 0);
        cr_assert_eq(report.ooms_in[REBATCH_PHASE_UPDATE], 0);
    }
    run_hash(&run, got);
    run_close(&run);
    cr_assert_str_eq(got, want);
}

/* ---- learning ---- */

Test(gpt_train, the_loss_falls_on_real_text, .description = "seed 1")
{
    enum { STEPS = 20 };
    struct run_options options = tiny_run();
    options.train.clip = 1.0f;
    options.train.learning_rate = 5e-3f; /* of twice that it came up again on some texts */
    options.train.total_steps = STEPS;
    double before, after;
    OPEN(run, run, &options);
    ASSERT_OK(gpt_trainer_evaluate(run.trainer, 32, &before));
    run_steps(&run, STEPS);
    ASSERT_OK(gpt_trainer_evaluate(run.trainer, 32, &after));
    /* At first every byte is as likely as any other; text has no more than 100 different ones. */
    cr_assert_float_eq(run.trainer->losses[0], log(256.0), 0.2);
    cr_assert_float_eq(before, log(256.0), 0.2);
    cr_assert_lt(after, 4.0);
    cr_assert_lt(run.trainer->losses[STEPS - 1], 4.0);
    cr_assert_eq(run.trainer->loss_count, STEPS);
    cr_assert_eq(run.trainer->samples_seen, STEPS * 16);
}

/* ---- evaluation ---- */

Test(gpt_train, evaluation_fits_itself_to_memory, .description = "seed 1")
{
    struct run_options options = tiny_run();
    struct run run;
    rebatch_pool_stats stats, after;
    double want, got;
    run_open(&run, &options);
    ASSERT_OK(rebatch_pool_get_stats(&stats, rebatch_get_pool(run.rb)));
    const size_t base = (size_t)stats.reserved_bytes;
    ASSERT_OK(gpt_trainer_evaluate(run.trainer, 50, &want));
    run_close(&run);

    options.capacity_bytes = base + (1u << 20);
    run_open(&run, &options);
    ASSERT_OK(rebatch_pool_get_stats(&stats, rebatch_get_pool(run.rb)));
    ASSERT_OK(gpt_trainer_evaluate(run.trainer, 50, &got));
    ASSERT_OK(rebatch_pool_get_stats(&after, rebatch_get_pool(run.rb)));
    cr_assert_eq(got, want);
    cr_assert_gt(after.ooms, stats.ooms);
    cr_assert_eq(after.live_bytes, stats.live_bytes);
    run_close(&run);
}

Test(gpt_train, evaluation_without_memory_says_so, .description = "seed 1")
{
    const struct run_options options = short_run();
    rebatch_pool_stats before, after;
    double loss;
    OPEN(run, run, &options);
    ASSERT_OK(rebatch_pool_get_stats(&before, rebatch_get_pool(run.rb)));
    arm(&run, 1, REBATCH_FAULT_FOREVER);
    cr_assert_eq(gpt_trainer_evaluate(run.trainer, 8, &loss), REBATCH_OOM);
    ASSERT_OK(rebatch_pool_get_stats(&after, rebatch_get_pool(run.rb)));
    cr_assert_eq(after.live_bytes, before.live_bytes);
    ASSERT_ERROR(gpt_trainer_evaluate(run.trainer, 0, &loss), REBATCH_E_INVALID,
                 "0 samples to evaluate");
}

Test(gpt_train, evaluation_changes_nothing, .description = "seed 1")
{
    const struct run_options options = tiny_run();
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    double loss;
    run_whole(want, &options, 2);
    OPEN(run, run, &options);
    ASSERT_OK(gpt_trainer_evaluate(run.trainer, 5, &loss));
    run_steps(&run, 1);
    ASSERT_OK(gpt_trainer_evaluate(run.trainer, 5, &loss));
    run_steps(&run, 1);
    run_hash(&run, got);
    cr_assert_str_eq(got, want);
}

/* ---- bad options ---- */

static void check_refused(const struct run *run, const struct gpt_train_options *options,
                          const char *words)
{
    struct gpt_trainer *trainer;
    ASSERT_ERROR(gpt_trainer_create(&trainer, run->rb, &gpt_host_ops, NULL, run->data, options),
                 REBATCH_E_INVALID, words);
    cr_assert_null(trainer);
}

Test(gpt_train, refuses_bad_options)
{
    const struct run_options options = tiny_run();
    struct gpt_train_options bad = options.train;
    OPEN(run, run, &options);
    bad.batch = 0;
    check_refused(&run, &bad, "batch is 0: expected 1 to");
    bad = options.train;
    bad.learning_rate = -1.0f;
    check_refused(&run, &bad, "learning_rate is -1");
    bad = options.train;
    bad.beta2 = 1.0f;
    check_refused(&run, &bad, "beta2 is 1");
    bad = options.train;
    bad.clip = NAN;
    check_refused(&run, &bad, "clip is nan");
    bad = options.train;
    bad.config.heads = 0;
    check_refused(&run, &bad, "heads is 0");
    ASSERT_ERROR(gpt_train_options_init(&bad, ""), REBATCH_E_INVALID, "preset is \"\"");
}

Test(gpt_train, refuses_a_stream_that_is_not_the_session_s)
{
    struct run_options options = tiny_run();
    struct gpt_trainer *trainer;
    options.own_stream = true;
    OPEN(run, run, &options);
    ASSERT_OK(gpt_trainer_create(&trainer, run.rb, &gpt_host_ops, NULL, run.data, &options.train));
    ASSERT_ERROR(gpt_trainer_step(trainer, NULL, NULL), REBATCH_E_INVALID,
                 "the trainer's stream is not the session's");
    gpt_trainer_destroy(run.trainer);
    run.trainer = trainer;
}

Test(gpt_train, parameters_that_do_not_fit_are_an_oom)
{
    const struct run_options options = tiny_run();
    rebatch_device *device;
    rebatch *rb;
    struct gpt_trainer *trainer;
    ASSERT_OK(rebatch_device_open_host(&device, 256 << 10, NULL));
    ASSERT_OK(rebatch_open(&rb, device, NULL));
    struct gpt_data *data = open_text(options.train.config.length);
    cr_assert_eq(gpt_trainer_create(&trainer, rb, &gpt_host_ops, NULL, data, &options.train),
                 REBATCH_OOM);
    cr_assert_null(trainer);
    gpt_data_close(data);
    rebatch_close(rb);
    rebatch_device_close(device);
}
