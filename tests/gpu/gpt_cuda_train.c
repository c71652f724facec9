/* Owns the tests of training on a GPU: the same bits for every cut of the batch and every OOM, and
 * the host's curve. Must not know private headers of the library. */
#include <math.h>
#include <string.h>

#include "gpt_cuda_support.h"

Test(gpt_cuda_train, the_cut_of_the_batch_does_not_matter, .description = "seed 1, 3 steps of 16")
{
    static const size_t sizes[] = {1, 2, 3, 5, 8, 16};
    struct run_options options = tiny_run();
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    run_whole(want, &options, 3);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        options.micro = sizes[i];
        run_whole(got, &options, 3);
        cr_assert_str_eq(got, want, "micro-batch %zu", sizes[i]);
    }
    options.own_stream = true;
    run_whole(got, &options, 3);
    cr_assert_str_eq(got, want, "on a stream of its own");
}

Test(gpt_cuda_train, the_demo_does_not_depend_on_the_cut, .description = "seed 1, 2 steps of 64")
{
    static const size_t sizes[] = {7, 16, 32};
    struct run_options options = tiny_run();
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
    struct run_options options = tiny_run();
    char one[GPT_HASH_TEXT_BYTES], other[GPT_HASH_TEXT_BYTES];
    run_whole(one, &options, 1);
    options.train.seed = 2;
    run_whole(other, &options, 1);
    cr_assert_str_neq(one, other);
}

Test(gpt_cuda_train, the_curve_is_the_hosts, .description = "seed 1, 5 steps of 16, 20 evaluated")
{
    struct run_options options = tiny_run();
    struct run gpu, host;
    double gpu_held_out, host_held_out;
    run_open(&gpu, &options);
    options.is_host = true;
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

/* ---- the same bits through OOMs ---- */

static void arm(const struct run *run, uint64_t nth)
{
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    plan.nth = nth;
    ASSERT_OK(rebatch_fault_arm(run->device, &plan));
}

Test(gpt_cuda_train, an_oom_at_any_allocation_does_not_matter, .description = "seed 1, 2 steps")
{
    struct run_options options = tiny_run();
    struct run run;
    uint64_t count, failed;
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    options.uncached = true;
    run_open(&run, &options);
    arm(&run, 0);
    run_steps(&run, 2);
    ASSERT_OK(rebatch_fault_counts(run.device, &count, NULL));
    run_hash(&run, want);
    run_close(&run);
    cr_assert_gt(count, 50);
    for (uint64_t nth = 1; nth <= count; nth += 7) {
        run_open(&run, &options);
        arm(&run, nth);
        run_steps(&run, 2);
        ASSERT_OK(rebatch_fault_counts(run.device, NULL, &failed));
        cr_assert_eq(failed, 1);
        run_hash(&run, got);
        cr_assert_str_eq(got, want, "OOM at allocation %llu", (unsigned long long)nth);
        run_close(&run);
    }
}

Test(gpt_cuda_train, a_limit_of_half_the_peak_does_not_matter, .description = "seed 1, 3 steps")
{
    struct run_options options = tiny_run();
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
    options.limit = (size_t)stats.reserved_peak_bytes / 2;
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
    cr_assert_leq(stats.reserved_peak_bytes, options.limit);
}
