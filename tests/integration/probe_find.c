/* Owns the tests of what a probe finds, and of how little it runs for it.
 * Must not know more of the library than its public headers say. */
#include <string.h>

#include <criterion/criterion.h>

#include "probe_common.h"

#define MIB(n) ((size_t)(n) << 20)

/* Probes and compares with the truth. */
static void assert_finds_largest(struct bed *bed, size_t capacity_bytes,
                                 const rebatch_options *options, size_t batch,
                                 const rebatch_probe_options *probe)
{
    const size_t largest = true_largest(bed, capacity_bytes, options, batch);
    cr_assert_eq(bed_probe(bed, batch, probe), REBATCH_OK, "%s", rebatch_last_error());
    cr_assert_eq(bed->report.size, largest, "found %zu of %zu", bed->report.size, largest);
    cr_assert_eq(rebatch_get_micro(bed->rb, batch), largest);
}

Test(probe_find, the_largest_of_a_typical_step_in_three_runs_without_an_oom)
{
    struct bed bed;
    bed_open_typical(&bed, MIB(12), NULL);
    assert_finds_largest(&bed, MIB(12), NULL, 64, NULL);
    cr_assert_eq(bed.report.microbatches, 3);
    cr_assert_eq(bed.report.trials, 3);
    cr_assert_eq(bed.report.ooms, 0);
    cr_assert_eq(bed.report.oom.asked_bytes, 0);
    cr_assert_eq(bed.report.predicted_size, bed.report.size);
    bed_close(&bed);
}

Test(probe_find, the_peak_is_predicted_to_the_byte)
{
    struct bed bed;
    bed_open_typical(&bed, MIB(16), NULL);
    cr_assert_eq(bed_probe(&bed, 64, NULL), REBATCH_OK);
    cr_assert_eq(bed.report.confidence, REBATCH_CONFIDENCE_EXACT);
    cr_assert_eq(bed.report.predicted_peak_bytes, bed.report.measured_peak_bytes);
    cr_assert_gt(bed.report.twice_bytes, bed.report.available_bytes);
    bed_close(&bed);
}
