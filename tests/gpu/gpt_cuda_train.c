/* Owns the tests of training on a GPU: the same bits for every cut of the batch and every OOM, and
 * the host's curve. Must not know private headers of the library. */
#include <math.h>
#include <string.h>

#include "fault/fault_device.h"
#include "gpt_cuda_support.h"

/* 3 steps of 32, on a stream of its own as well. */
static void check_cuts(enum gpt_dtype dtype)
{
    static const size_t sizes[] = {1, 2, 3, 5, 8, 16, 32};
    struct run_options options = gpu_run();
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    options.train.batch = 32;
    options.train.config.dtype = dtype;
    run_whole(want, &options, 3);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        options.micro = sizes[i];
        run_whole(got, &options, 3);
        cr_assert_str_eq(got, want, "%s, micro-batch %zu", gpt_dtype_name(dtype), sizes[i]);
    }
    options.own_stream = true;
    run_whole(got, &options, 3);
    cr_assert_str_eq(got, want, "%s, on a stream of its own", gpt_dtype_name(dtype));
}

Test(gpt_cuda_train, the_cut_does_not_matter_in_fp32, .description = "seed 1, 3 steps of 32")
{
    check_cuts(GPT_FP32);
}

Test(gpt_cuda_train, the_cut_does_not_matter_in_bf16, .description = "seed 1, 3 steps of 32")
{
    check_cuts(GPT_BF16);
}

Test(gpt_cuda_train, the_cut_does_not_matter_in_fp16, .description = "seed 1, 3 steps of 32")
{
    check_cuts(GPT_FP16);
}

Test(gpt_cuda_train, the_demo_does_not_depend_on_the_cut, .description = "seed 1, 2 steps of 64")
{
    static const size_t sizes[] = {7, 16, 32};
    struct run_options options = gpu_run();
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    ASSERT_OK(gpt_train_options_init(&options.train, "demo"));
    run_whole(want, &options, 2);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        options.micro = sizes[i];
        run_whole(got, &options, 2);
        cr_assert_str_eq(got, want, "micro-batch %zu", sizes[i]);
    }
}

Test(gpt_cuda_train, the_hash_sees_the_seed, .description = "seeds 1 and 2")
{
    struct run_options options = gpu_run();
    char one[GPT_HASH_TEXT_BYTES], other[GPT_HASH_TEXT_BYTES];
    run_whole(one, &options, 1);
    options.train.seed = 2;
    run_whole(other, &options, 1);
    cr_assert_str_neq(one, other);
}

Test(gpt_cuda_train, the_curve_is_the_hosts, .description = "seed 1, 5 steps of 16, 20 evaluated")
{
    struct run_options options = gpu_run();
    struct run gpu, host;
    double gpu_held_out, host_held_out;
    run_open(&gpu, &options);
    options.on_gpu = false;
    run_open(&host, &options);
    run_steps(&gpu, 5);
    run_steps(&host, 5);
    for (size_t i = 0; i < 5; i++) {
        const double want = host.trainer->losses[i], got = gpu.trainer->losses[i];
        cr_assert(fabs(got - want) <= 1e-3 * want, "step %zu: loss %.6f, on the host %.6f", i, got,
                  want);
    }
    cr_assert_lt(gpu.trainer->losses[4], gpu.trainer->losses[0]);
    ASSERT_OK(gpt_trainer_evaluate(gpu.trainer, 20, &gpu_held_out));
    ASSERT_OK(gpt_trainer_evaluate(host.trainer, 20, &host_held_out));
    cr_assert(fabs(gpu_held_out - host_held_out) <= 1e-3 * host_held_out, "%.6f and %.6f",
              gpu_held_out, host_held_out);
    run_close(&gpu);
    run_close(&host);
}

/* Rounded to 8 or 11 bits, the curve is nearly that of fp32, and not that itself. */
Test(gpt_cuda_train, the_curve_in_16_bits_is_nearly_that_in_fp32, .description = "seed 1, 5 steps")
{
    struct run_options options = gpu_run();
    struct run runs[GPT_DTYPE_COUNT];
    for (size_t i = 0; i < GPT_DTYPE_COUNT; i++) {
        options.train.config.dtype = (enum gpt_dtype)i;
        run_open(&runs[i], &options);
        run_steps(&runs[i], 5);
    }
    for (size_t i = 1; i < GPT_DTYPE_COUNT; i++)
        for (size_t step = 0; step < 5; step++) {
            const double want = runs[GPT_FP32].trainer->losses[step];
            const double got = runs[i].trainer->losses[step];
            cr_assert(fabs(got - want) <= 1e-2 * want && got != want,
                      "%s, step %zu: loss %.6f, in fp32 %.6f", gpt_dtype_name((enum gpt_dtype)i),
                      step, got, want);
        }
    for (size_t i = 0; i < GPT_DTYPE_COUNT; i++)
        run_close(&runs[i]);
}

/* ---- the same bits with less memory ---- */

/* 3 steps of 16 at each level, in one micro-batch and in several. */
static void check_levels(enum gpt_dtype dtype)
{
    struct run_options options = gpu_run();
    struct run run;
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    options.train.config.dtype = dtype;
    run_whole(want, &options, 3);
    for (unsigned level = 0; level <= GPT_LIGHTEN_MOST; level++)
        for (options.micro = 3; options.micro <= 16; options.micro += 13) {
            run_open(&run, &options);
            ASSERT_OK(gpt_trainer_ops()->lighten(level, run.trainer));
            run_steps(&run, 3);
            run_hash(&run, got);
            cr_assert_str_eq(got, want, "%s, level %u, micro-batch %zu", gpt_dtype_name(dtype),
                             level, options.micro);
            run_close(&run);
        }
}

Test(gpt_cuda_train, no_level_changes_a_bit_in_fp32, .description = "seed 1, 3 steps of 16")
{
    check_levels(GPT_FP32);
}

Test(gpt_cuda_train, no_level_changes_a_bit_in_bf16, .description = "seed 1, 3 steps of 16")
{
    check_levels(GPT_BF16);
}

Test(gpt_cuda_train, no_level_changes_a_bit_in_fp16, .description = "seed 1, 3 steps of 16")
{
    check_levels(GPT_FP16);
}

Test(gpt_cuda_train, levels_change_between_steps, .description = "seed 1, 8 steps of 16, bf16")
{
    static const unsigned levels[] = {0, 3, 3, 2, 0, 3, 1, 2};
    enum { STEPS = sizeof levels / sizeof *levels };
    struct run_options options = gpu_run();
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    struct run run;
    options.train.config.dtype = GPT_BF16;
    run_whole(want, &options, STEPS);
    run_open(&run, &options);
    for (size_t i = 0; i < STEPS; i++) {
        ASSERT_OK(gpt_trainer_ops()->lighten(levels[i], run.trainer));
        run_steps(&run, 1);
    }
    run_hash(&run, got);
    run_close(&run);
    cr_assert_str_eq(got, want);
}

Test(gpt_cuda_train, the_formula_says_what_a_step_holds, .description = "seed 1, 2 steps of 16")
{
    struct run_options options = gpu_run();
    const uint64_t blocks = (options.train.config.layers + 1) * GPT_ACT_COUNT + 9;
    for (size_t dtype = 0; dtype < GPT_DTYPE_COUNT; dtype++)
        for (unsigned level = 0; level <= GPT_LIGHTEN_MOST; level++) {
            struct run run;
            rebatch_step_report report;
            options.train.config.dtype = (enum gpt_dtype)dtype;
            const struct gpt_memory memory = gpt_train_memory(&options.train, level);
            const uint64_t least = memory.persistent_bytes + 16 * memory.sample_bytes;
            run_open(&run, &options);
            ASSERT_OK(gpt_trainer_ops()->lighten(level, run.trainer));
            run_steps(&run, 1);
            ASSERT_OK(gpt_trainer_step(run.trainer, &report, NULL));
            cr_assert(report.peak_bytes >= least &&
                          report.peak_bytes < least + blocks * REBATCH_POOL_UNIT_BYTES,
                      "%s, level %u: %llu bytes, formula %llu",
                      gpt_dtype_name((enum gpt_dtype)dtype), level,
                      (unsigned long long)report.peak_bytes, (unsigned long long)least);
            run_close(&run);
        }
}

/* ---- loss scaling ---- */

/* A scale with which gradients overflow fp16 comes down by itself, a halving a skipped update; and
 * however the batch is cut. */
Test(gpt_cuda_train, fp16_finds_its_loss_scale, .description = "seed 1, 30 steps of 16")
{
    struct run_options options = gpu_run();
    struct run run;
    struct gpt_step_result result;
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    options.train.config.dtype = GPT_FP16;
    options.train.loss_scale = 0x1p30f;
    options.train.learning_rate = 1e-2f;
    options.train.total_steps = 30;
    run_open(&run, &options);
    ASSERT_OK(gpt_trainer_step(run.trainer, NULL, &result));
    cr_assert(result.skipped && result.loss_scale == 0x1p30f);
    run_steps(&run, 29);
    cr_assert_gt(run.trainer->updates, 5);
    cr_assert_eq(run.trainer->updates + run.trainer->skipped, 30);
    cr_assert_eq(run.trainer->scaler.scale, ldexpf(1.0f, 30 - (int)run.trainer->skipped));
    cr_assert_lt(run.trainer->losses[29], run.trainer->losses[0]);
    run_hash(&run, want);
    run_close(&run);
    options.micro = 5;
    run_whole(got, &options, 30);
    cr_assert_str_eq(got, want);
}

Test(gpt_cuda_train, fp16_begins_with_the_usual_scale, .description = "seed 1, 5 steps of 16")
{
    struct run_options options = gpu_run();
    struct run run;
    options.train.config.dtype = GPT_FP16;
    run_open(&run, &options);
    cr_assert_eq(run.trainer->scaler.scale, 65536.0f);
    run_steps(&run, 5);
    cr_assert_eq(run.trainer->skipped, 0);
    cr_assert_eq(run.trainer->scaler.good, 5);
    run_close(&run);
}

/* ---- the same bits through OOMs ---- */

static void arm(const struct run *run, uint64_t nth)
{
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    plan.nth = nth;
    ASSERT_OK(rebatch_fault_arm(run->device, &plan));
}

/* At every 7th allocation of three steps, each in a run of its own. */
static void check_ooms(enum gpt_dtype dtype)
{
    struct run_options options = gpu_run();
    struct run run;
    uint64_t count, failed;
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    options.uncached = true;
    options.train.config.dtype = dtype;
    run_open(&run, &options);
    arm(&run, 0);
    run_steps(&run, 3);
    ASSERT_OK(rebatch_fault_counts(run.device, &count, NULL));
    run_hash(&run, want);
    run_close(&run);
    cr_assert_gt(count, 75);
    for (uint64_t nth = 1; nth <= count; nth += 7) {
        run_open(&run, &options);
        arm(&run, nth);
        run_steps(&run, 3);
        ASSERT_OK(rebatch_fault_counts(run.device, NULL, &failed));
        cr_assert_eq(failed, 1);
        run_hash(&run, got);
        cr_assert_str_eq(got, want, "%s, OOM at allocation %llu", gpt_dtype_name(dtype),
                         (unsigned long long)nth);
        run_close(&run);
    }
}

Test(gpt_cuda_train, ooms_do_not_matter_in_fp32, .description = "seed 1, 3 steps of 16")
{
    check_ooms(GPT_FP32);
}

Test(gpt_cuda_train, ooms_do_not_matter_in_bf16, .description = "seed 1, 3 steps of 16")
{
    check_ooms(GPT_BF16);
}

Test(gpt_cuda_train, ooms_do_not_matter_in_fp16, .description = "seed 1, 3 steps of 16")
{
    check_ooms(GPT_FP16);
}

Test(gpt_cuda_train, a_limit_of_half_the_peak_does_not_matter, .description = "seed 1, 3 steps")
{
    struct run_options options = gpu_run();
    struct run run;
    rebatch_pool_stats stats;
    rebatch_step_report report;
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    uint64_t ooms = 0;
    options.train.batch = 64; /* so that pieces of 2 MiB are small beside the limit */
    run_open(&run, &options);
    run_steps(&run, 3);
    ASSERT_OK(rebatch_pool_get_stats(&stats, rebatch_get_pool(run.rb)));
    run_hash(&run, want);
    run_close(&run);
    options.limit_bytes = (size_t)stats.reserved_peak_bytes / 2;
    run_open(&run, &options);
    for (size_t i = 0; i < 3; i++) {
        ASSERT_OK(gpt_trainer_step(run.trainer, &report, NULL));
        ooms += report.ooms;
    }
    ASSERT_OK(rebatch_pool_get_stats(&stats, rebatch_get_pool(run.rb)));
    run_hash(&run, got);
    run_close(&run);
    cr_assert_str_eq(got, want);
    cr_assert_gt(ooms, 0);
    cr_assert_leq(stats.reserved_peak_bytes, options.limit_bytes);
}
