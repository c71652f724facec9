/* Owns the tests of what a probe finds, and of how little it runs for it.
 * Must not know more of the library than its public headers say. */
#include "probe_common.h"

/* Probes and compares with the truth. */
static void assert_finds_largest(struct bed *bed, size_t capacity_bytes,
                                 const rebatch_options *options, size_t batch,
                                 const rebatch_probe_options *probe)
{
    const size_t largest = true_largest(bed, capacity_bytes, options, batch);
    OK(bed_probe(bed, batch, probe));
    cr_assert_eq(bed->report.size, largest, "found %zu of %zu", bed->report.size, largest);
    cr_assert_eq(rebatch_get_micro(bed->rb, batch), largest);
}

Test(probe_find, the_largest_of_a_typical_step_in_three_runs_without_an_oom)
{
    OPEN_WITH(bed_open_typical, bed, bed, MIB(12), NULL);
    assert_finds_largest(&bed, MIB(12), NULL, 64, NULL);
    cr_assert_eq(bed.report.microbatches, 3);
    cr_assert_eq(bed.report.trials, 3);
    cr_assert_eq(bed.report.ooms, 0);
    cr_assert_eq(bed.report.oom.asked_bytes, 0);
    cr_assert_eq(bed.report.predicted_size, bed.report.size);
}

Test(probe_find, the_peak_is_predicted_to_the_byte)
{
    OPEN_WITH(bed_open_typical, bed, bed, MIB(16), NULL);
    OK(bed_probe(&bed, 64, NULL));
    cr_assert_eq(bed.report.confidence, REBATCH_CONFIDENCE_EXACT);
    cr_assert_eq(bed.report.predicted_peak_bytes, bed.report.measured_peak_bytes);
    cr_assert_gt(bed.report.twice_bytes, bed.report.available_bytes);
}

Test(probe_find, the_steps_after_it_run_at_the_size_and_settle_without_an_oom)
{
    rebatch_step_report report;
    OPEN_WITH(bed_open_typical, bed, bed, MIB(12), NULL);
    OK(bed_probe(&bed, 64, NULL));
    for (int i = 0; i < 3; i++) {
        OK(rebatch_step(bed.rb, &bed.ops, 64, &bed.load, &report));
        cr_assert_eq(report.micro_after, bed.report.size);
    }
    cr_assert_eq(report.ooms, 0);
}

Test(probe_find, everything_fits_gives_the_effective_batch_and_no_trial_above_it)
{
    OPEN_WITH(bed_open_typical, bed, bed, MIB(64), NULL);
    OK(bed_probe(&bed, 16, NULL));
    cr_assert_eq(bed.report.size, 16);
    cr_assert_eq(bed.report.microbatches, 2);
    cr_assert_eq(bed.report.confidence, REBATCH_CONFIDENCE_MEASURED);
    for (uint32_t i = 0; i < bed.load.ran; i++)
        cr_assert_leq(bed.load.sizes[i], 16);
}

Test(probe_find, nothing_fits_is_exhausted_after_one_try_at_the_smallest_size)
{
    OPEN_WITH(bed_open_typical, bed, bed, MIB(1), NULL);
    const size_t micro = rebatch_get_micro(bed.rb, 64);
    FAILS(bed_probe(&bed, 64, NULL), REBATCH_E_EXHAUSTED, "smallest micro-batch");
    cr_assert_eq(bed.load.ran, 1);
    cr_assert_eq(bed.load.sizes[0], 1);
    cr_assert_eq(bed.report.size, 0);
    cr_assert_eq(bed.report.status, REBATCH_E_EXHAUSTED);
    cr_assert_eq(bed.report.confidence, REBATCH_CONFIDENCE_NONE);
    cr_assert_gt(bed.report.oom.asked_bytes, 0);
    cr_assert_eq(rebatch_get_micro(bed.rb, 64), micro);
    cr_assert_eq(bed_live_bytes(&bed), 0);
}

Test(probe_find, the_limits_of_the_session_hold)
{
    OPEN_WITH(bed_open_typical, bed, bed, MIB(16),
              &OPTIONS(.micro_smallest = 3, .micro_largest = 9));
    OK(bed_probe(&bed, 64, NULL));
    cr_assert_eq(bed.report.size, 9);
    for (uint32_t i = 0; i < bed.load.ran; i++)
        cr_assert(3 <= bed.load.sizes[i] && bed.load.sizes[i] <= 9);
}

Test(probe_find, every_trial_is_of_a_size_that_the_limits_allow)
{
    for (size_t multiple = 2; multiple <= 7; multiple++) {
        struct bed bed;
        bed_open_typical(&bed, MIB(12), NULL);
        const size_t largest = true_largest(&bed, MIB(12), NULL, 64);
        bed_close(&bed);
        bed_open_typical(&bed, MIB(12), &OPTIONS(.micro_multiple_of = multiple));
        OK(bed_probe(&bed, 64, NULL));
        cr_assert_eq(bed.report.size, largest - largest % multiple);
        cr_assert_eq(bed.report.predicted_size, bed.report.size);
        for (uint32_t i = 0; i < bed.load.ran; i++)
            cr_assert_eq(bed.load.sizes[i] % multiple, 0);
        bed_close(&bed);
    }
}

Test(probe_find, a_list_of_sizes_holds)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    const size_t list[] = {3, 8, 17, 64};
    memcpy(options.micro_allowed, list, sizeof list);
    OPEN_WITH(bed_open_typical, bed, bed, MIB(12), &options);
    OK(bed_probe(&bed, 64, NULL));
    cr_assert_eq(bed.report.size, 17);
    for (uint32_t i = 0; i < bed.load.ran; i++)
        cr_assert(bed.load.sizes[i] == 3 || bed.load.sizes[i] == 8 || bed.load.sizes[i] == 17);
}

Test(probe_find, max_trials_bounds_what_runs)
{
    for (uint32_t most = 1; most <= 3; most++) {
        OPEN_WITH(bed_open_typical, bed, bed, MIB(12), NULL);
        OK(bed_probe(&bed, 64, &PROBE(.max_trials = most)));
        cr_assert_eq(bed.load.ran, most);
        cr_assert_geq(bed.report.size, 1);
    }
}

Test(probe_find, memory_that_the_first_update_takes_is_left_when_it_is_stated)
{
    rebatch_step_report report;
    rebatch_probe_options options = REBATCH_PROBE_OPTIONS_INIT;
    OPEN_WITH(bed_open_typical, bed, bed, MIB(16), NULL);
    options.reserve_bytes = bed.load.moments_bytes = MIB(4);
    assert_finds_largest(&bed, MIB(16), NULL, 64, &options);
    for (int i = 0; i < 3; i++)
        OK(rebatch_step(bed.rb, &bed.ops, 64, &bed.load, &report));
    cr_assert_eq(report.ooms, 0);
    cr_assert_eq(report.micro_after, bed.report.size);
}

Test(probe_find, reserve_bytes_that_do_not_fit_are_exhausted)
{
    OPEN_WITH(bed_open_typical, bed, bed, MIB(16), NULL);
    FAILS(bed_probe(&bed, 64, &PROBE(.reserve_bytes = MIB(64))), REBATCH_E_EXHAUSTED,
          "reserve_bytes");
    cr_assert_eq(bed.load.ran, 0);
}

Test(probe_find, the_largest_of_a_step_that_works_in_pieces)
{
    static const size_t chunks[] = {1, 3, 4, 8, 16};
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
        OPEN_WITH(bed_open_typical, bed, bed, MIB(16), NULL);
        bed.load.chunk = chunks[i];
        assert_finds_largest(&bed, MIB(16), NULL, 64, NULL);
        cr_assert_leq(bed.report.microbatches, 5);
    }
}

/* Only the peak is known then, and not how its pieces lie: a 32nd of the memory is left for that,
 * and at least nine tenths of the largest size are found. */
Test(probe_find, calls_without_a_common_form_are_found_by_their_peak)
{
    for (size_t mib = 12; mib <= 24; mib += 2) {
        OPEN_WITH(bed_open_typical, bed, bed, MIB(mib), NULL);
        bed.load.bit_bytes = 20011;
        const size_t largest = true_largest(&bed, MIB(mib), NULL, 128);
        OK(bed_probe(&bed, 128, NULL));
        cr_assert(bed.report.size <= largest && bed.report.size * 10 >= largest * 9,
                  "%zu MiB: found %zu of %zu", mib, bed.report.size, largest);
        cr_assert_leq(bed.report.microbatches, 5);
    }
}

Test(probe_find, the_same_session_gives_the_same_report)
{
    rebatch_probe_report first;
    for (int i = 0; i < 2; i++) {
        OPEN_WITH(bed_open_typical, bed, bed, MIB(12), NULL);
        OK(bed_probe(&bed, 64, NULL));
        if (i == 0)
            first = bed.report;
        cr_assert_eq(bed.report.size, first.size);
        cr_assert_eq(bed.report.predicted_peak_bytes, first.predicted_peak_bytes);
        cr_assert_eq(bed.report.twice_bytes, first.twice_bytes);
    }
}

/* Of a batch that is smaller than every allowed size there is one size, the batch. */
Test(probe_find, the_fastest_of_a_batch_below_the_smallest_size_is_the_batch)
{
    for (size_t batch = 1; batch <= 7; batch++) {
        OPEN_WITH(bed_open_typical, bed, bed, MIB(16), &OPTIONS(.micro_smallest = 8));
        OK(bed_probe(&bed, batch, &PROBE(.choose = REBATCH_PROBE_FASTEST)));
        cr_assert_eq(bed.report.size, batch);
    }
}
