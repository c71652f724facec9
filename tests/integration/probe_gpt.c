/* Owns the test that a probe finds the reference model's largest micro-batch, and changes no bit.
 * Must not know more of the library than its public headers say. */
#include "gpt/error.h"
#include "integration/gpt_common.h"
#include "rig.h"

/* Whole steps at one size, the last without an OOM. */
static bool is_size_fit(const struct run_options *options, size_t micro)
{
    OPEN(run, run, options);
    rebatch_options session = REBATCH_OPTIONS_INIT;
    session.micro_start = session.micro_smallest = session.micro_largest = micro;
    session.on_oom = REBATCH_ON_OOM_STOP;
    gpt_trainer_destroy(run.trainer);
    rebatch_close(run.rb);
    ASSERT_OK(rebatch_open(&run.rb, run.device, &session));
    rebatch_step_report report = {0};
    rebatch_status status = gpt_trainer_create(&run.trainer, run.rb, &gpt_host_ops, run.stream,
                                               run.data, &options->train);
    for (int i = 0; i < 3 && !status; i++)
        status = gpt_trainer_step(run.trainer, &report, NULL);
    return !status && report.ooms == 0;
}

static size_t true_largest(const struct run_options *options)
{
    size_t micro = options->train.batch;
    while (micro > 0 && !is_size_fit(options, micro))
        micro--;
    return micro;
}

Test(probe_gpt, the_largest_microbatch_is_found_under_caps_and_no_bit_changes)
{
    char reference[GPT_HASH_TEXT_BYTES], hash[GPT_HASH_TEXT_BYTES];
    struct run_options options = tiny_run();
    run_whole(reference, &options, 2);
    struct run run;
    rebatch_pool_stats stats;
    run_open(&run, &options);
    run_steps(&run, 1);
    ASSERT_OK(rebatch_pool_get_stats(&stats, rebatch_get_pool(run.rb)));
    run_close(&run);
    for (size_t part = 5; part <= 9; part++) {
        rebatch_probe_report report;
        rebatch_probe_options probe = REBATCH_PROBE_OPTIONS_INIT;
        options.capacity_bytes = (size_t)stats.reserved_peak_bytes / 10 * part;
        run_open(&run, &options);
        const uint64_t floats = sizeof(float);
        for (size_t i = 0; i < gpt_block_count(&options.train.config); i++)
            probe.reserve_bytes += 2 * gpt_block_elements(&options.train.config, i) * floats;
        const rebatch_status status = rebatch_probe(run.rb, gpt_trainer_ops(), options.train.batch,
                                                    run.trainer, &probe, &report);
        OK(status);
        /* Never more than fits, and what fits in a 64th less memory: how blocks lie in a session
         * that begins with the size is not known to the page. */
        struct run_options less = options;
        less.capacity_bytes -= less.capacity_bytes / 64;
        const size_t largest = true_largest(&options), least = true_largest(&less);
        cr_assert(report.size <= largest && report.size >= least,
                  "%zu of 10: found %zu, %zu is true", part, report.size, largest);
        run_steps(&run, 2);
        run_hash(&run, hash);
        cr_assert_str_eq(hash, reference);
        run_close(&run);
    }
}
