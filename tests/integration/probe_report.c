/* Owns the tests of what a probe reports, by its report and its events, and of predictions of all
 * sizes. Must not know more of the library than its public headers say. */
#include "probe_common.h"

enum { BATCH = 64, HEARD = 32 };

struct heard {
    size_t count;
    rebatch_event events[HEARD];
};

static void hear(const rebatch_event *event, void *user)
{
    struct heard *heard = user;
    if (event->kind == REBATCH_EVENT_TRIAL && heard->count < HEARD)
        heard->events[heard->count++] = *event;
}

static rebatch_options listening(struct heard *heard)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    *heard = (struct heard){0};
    options.on_event = hear;
    options.on_event_user = heard;
    return options;
}

/* ---- after a failure ---- */

/* All members but the status are 0, whatever stood there. */
static void assert_empty(const rebatch_probe_report *report, rebatch_status status)
{
    rebatch_probe_report expected;
    memset(&expected, 0, sizeof expected);
    expected.status = status;
    cr_assert_eq(report->status, expected.status);
    cr_assert_eq(report->size, 0);
    cr_assert_eq(report->predicted_size, 0);
    cr_assert_eq(report->predicted_peak_bytes, 0);
    cr_assert_eq(report->measured_peak_bytes, 0);
    cr_assert_eq(report->twice_bytes, 0);
    cr_assert_eq(report->available_bytes, 0);
    cr_assert_eq(report->trials, 0);
    cr_assert_eq(report->microbatches, 0);
    cr_assert_eq(report->ooms, 0);
    cr_assert_eq(report->confidence, REBATCH_CONFIDENCE_NONE);
    cr_assert_eq(report->oom.asked_bytes, 0);
    cr_assert_eq(report->saved, REBATCH_SAVED_NONE);
    cr_assert_eq(report->saved_size, 0);
    cr_assert_eq(report->largest_size, 0);
    cr_assert(report->samples_per_second == 0);
}

Test(probe_report, a_probe_that_is_refused_reports_its_status_alone)
{
    rebatch_probe_options options = REBATCH_PROBE_OPTIONS_INIT;
    OPEN_WITH(bed_open_typical, bed, bed, MIB(12), NULL);
    memset(&bed.report, 0x5a, sizeof bed.report);
    cr_assert_eq(bed_probe(&bed, 0, NULL), REBATCH_E_INVALID);
    assert_empty(&bed.report, REBATCH_E_INVALID);
    memset(&bed.report, 0x5a, sizeof bed.report);
    options.choose = (rebatch_probe_choice)2;
    cr_assert_eq(bed_probe(&bed, BATCH, &options), REBATCH_E_INVALID);
    assert_empty(&bed.report, REBATCH_E_INVALID);
    memset(&bed.report, 0x5a, sizeof bed.report);
    options.choose = REBATCH_PROBE_LARGEST;
    options.file = "";
    cr_assert_eq(bed_probe(&bed, BATCH, &options), REBATCH_E_INVALID);
    assert_empty(&bed.report, REBATCH_E_INVALID);
    cr_assert_eq(bed.load.zeroed, 0, "no callback ran");
}

/* ---- trials ---- */

Test(probe_report, each_trial_is_an_event_with_what_it_measured)
{
    for (size_t mib = 8; mib <= 40; mib += 8) {
        struct heard heard;
        const rebatch_options options = listening(&heard);
        size_t others = 0;
        OPEN_WITH(bed_open_typical, bed, bed, MIB(mib), &options);
        OK(bed_probe(&bed, BATCH, NULL));
        cr_assert_eq(heard.count, bed.load.ran);
        cr_assert_eq(bed.report.microbatches, bed.load.ran);
        for (size_t i = 0; i < heard.count; i++) {
            const rebatch_event *event = &heard.events[i];
            cr_assert_eq(event->count, bed.load.sizes[i]);
            cr_assert_eq(event->batch, BATCH);
            cr_assert_gt(event->peak_bytes, 0);
            cr_assert_eq(event->asked_bytes, 0);
            others += i == 0 || event->count != heard.events[i - 1].count;
            if (event->count == bed.report.size)
                cr_assert_eq(event->peak_bytes, bed.report.measured_peak_bytes);
        }
        cr_assert_eq(bed.report.trials, others);
        cr_assert_eq(bed.report.largest_size, bed.report.size);
        cr_assert_eq(bed.report.saved, REBATCH_SAVED_NONE);
    }
}

Test(probe_report, a_trial_that_runs_out_of_memory_says_what_it_asked_for)
{
    struct heard heard;
    const rebatch_options options = listening(&heard);
    OPEN_WITH(bed_open_typical, bed, bed, MIB(1), &options);
    cr_assert_eq(bed_probe(&bed, BATCH, NULL), REBATCH_E_EXHAUSTED);
    cr_assert_eq(heard.count, 1);
    const rebatch_event *event = &heard.events[0];
    cr_assert_eq(event->count, 1);
    cr_assert_eq(event->peak_bytes, 0, "it did not run");
    cr_assert_eq(event->phase, REBATCH_PHASE_FORWARD);
    cr_assert_eq(event->asked_bytes, bed.report.oom.asked_bytes);
    cr_assert_gt(event->asked_bytes, 0);
    cr_assert_geq(event->needed_bytes, event->asked_bytes);
    cr_assert_gt(event->needed_bytes, event->available_bytes);
    cr_assert_eq(bed.report.ooms, 1);
    cr_assert_eq(bed.report.trials, 1);
    cr_assert_eq(bed.report.microbatches, 1);
}

/* ---- the end of the report ---- */

static rebatch_prediction predict(const struct bed *bed, size_t size)
{
    rebatch_prediction prediction;
    OK(rebatch_predict(&prediction, bed->rb, size, BATCH, NULL));
    return prediction;
}

Test(probe_report, what_is_said_of_other_sizes_is_known_from_two_on)
{
    for (uint32_t most = 1; most <= 4; most++) {
        size_t available;
        OPEN_WITH(bed_open_typical, bed, bed, MIB(12), NULL);
        OK(bed_probe(&bed, BATCH, &PROBE(.max_trials = most)));
        OK(rebatch_pool_available(&available, rebatch_get_pool(bed.rb)));
        cr_assert_eq(bed.report.available_bytes, available);
        cr_assert_eq(bed.report.twice_bytes > 0, most > 1, "%u trials", most);
        if (most > 1) {
            cr_assert_eq(bed.report.twice_bytes, predict(&bed, 2 * bed.report.size).peak_bytes);
            cr_assert_geq(bed.report.predicted_size, bed.report.size);
        } else {
            rebatch_prediction none;
            cr_assert_eq(bed.report.predicted_size, 1);
            cr_assert_eq(bed.report.confidence, REBATCH_CONFIDENCE_MEASURED);
            cr_assert_eq(rebatch_predict(&none, bed.rb, 2, BATCH, NULL), REBATCH_E_STATE);
        }
    }
}

/* Two trials leave a larger size to be tried: it is said, and it is the largest that fits. */
Test(probe_report, the_predicted_size_is_the_largest_although_no_run_was_left_for_it)
{
    OPEN_WITH(bed_open_typical, bed, bed, MIB(16), NULL);
    const size_t largest = true_largest(&bed, MIB(16), NULL, BATCH);
    OK(bed_probe(&bed, BATCH, &PROBE(.max_trials = 2)));
    cr_assert_lt(bed.report.size, largest);
    cr_assert_eq(bed.report.predicted_size, largest, "%zu, not %zu", bed.report.predicted_size,
                 largest);
}

/* ---- predictions ---- */

/* Whole steps of each size, tried one by one, against what is said of it. One more sample than runs
 * without an OOM may run once the cache was given back, as a step does it. */
static void assert_predictions(struct bed *bed, size_t capacity_bytes)
{
    const size_t largest = true_largest(bed, capacity_bytes, NULL, BATCH);
    OK(bed_probe(bed, BATCH, NULL));
    cr_assert_eq(bed->report.size, largest);
    for (size_t size = 1; size <= BATCH; size++) {
        const rebatch_prediction said = predict(bed, size);
        if (size != largest + 1)
            cr_assert_eq(said.fits, size <= largest, "%zu, where %zu is the largest", size,
                         largest);
        cr_assert_eq(said.failing_bytes == 0, said.fits);
        cr_assert_eq(said.reserved_bytes > 0, said.fits);
    }
}

Test(probe_report, a_size_is_predicted_to_fit_when_it_does)
{
    for (size_t mib = 10; mib <= 20; mib += 5) {
        OPEN_WITH(bed_open_typical, bed, bed, MIB(mib), NULL);
        assert_predictions(&bed, MIB(mib));
    }
}

/* The pointer of a buffer is guarded, so that the probe gives the buffer back and the next step
 * makes it again. */
Test(probe_report, a_prediction_counts_what_the_next_step_makes_again)
{
    OPEN_WITH(bed_open_typical, bed, bed, MIB(12), NULL);
    for (size_t i = 0; i < bed.load.item_count; i++)
        if (bed.load.items[i].is_lazy)
            bed.load.items[i].fixed = MIB(3);
    OK(rebatch_guard(bed.rb, bed.load.lazy, sizeof bed.load.lazy, REBATCH_GUARD_HOST));
    assert_predictions(&bed, MIB(12));
    cr_assert_eq(bed_live_bytes(&bed), 0);
}

/* 1 MiB a sample in two buffers, which resize makes. */
struct buffered {
    rebatch *rb;
    void *buffers[2];
};

static rebatch_status make_buffers(size_t count, void *user)
{
    struct buffered *b = user;
    rebatch_status status = REBATCH_OK;
    for (int i = 0; i < 2 && !status; i++)
        status = rebatch_pool_alloc(&b->buffers[i], rebatch_get_pool(b->rb), count << 19, NULL, 0);
    return status;
}

static rebatch_status do_nothing(void *user)
{
    return user ? REBATCH_OK : REBATCH_E_INVALID;
}

static rebatch_status compute(const rebatch_microbatch *mb, void *user)
{
    return mb->count > 0 && user ? REBATCH_OK : REBATCH_E_INVALID;
}

static void assert_buffers_count_once(rebatch *rb)
{
    for (size_t size = 1; size <= 40; size++) {
        rebatch_prediction said;
        OK(rebatch_predict(&said, rb, size, BATCH, NULL));
        cr_assert_eq(said.peak_bytes, MIB(size), "%zu", size);
        cr_assert_eq(said.fits, size <= 20, "%zu", size);
    }
}

/* The buffers that are there, of the smallest size or of the one that runs, are not in addition. */
Test(probe_report, buffers_of_resize_count_once_in_a_prediction)
{
    struct buffered b = {0};
    rebatch_probe_report report;
    rebatch_step_ops ops = OPS(do_nothing, compute, do_nothing, .resize = make_buffers);
    OK(rebatch_open_default(&b.rb, "device.kind = host; device.capacity = 64MiB; "
                                   "memory.limit = 20MiB"));
    OK(rebatch_probe(b.rb, &ops, BATCH, &b, NULL, &report));
    cr_assert_eq(report.size, 20);
    cr_assert_eq(report.twice_bytes, MIB(40));
    assert_buffers_count_once(b.rb);
    OK(rebatch_step(b.rb, &ops, BATCH, &b, NULL));
    assert_buffers_count_once(b.rb);
    rebatch_close(b.rb);
}

/* ---- words ---- */

Test(probe_report, every_answer_has_its_words)
{
    for (int i = 0; i <= REBATCH_CONFIDENCE_EXACT; i++)
        for (int j = 0; j < i; j++)
            cr_assert_str_neq(rebatch_confidence_text((rebatch_confidence)i),
                              rebatch_confidence_text((rebatch_confidence)j));
    cr_assert_str_eq(rebatch_confidence_text(REBATCH_CONFIDENCE_EXACT),
                     "it ran, and its memory was predicted to the byte");
    cr_assert_str_eq(rebatch_confidence_text(REBATCH_CONFIDENCE_EXACT + 1), "no such confidence");
    cr_assert_str_eq(rebatch_saved_size_text(REBATCH_SAVED_NONE), "no file was given");
    cr_assert_str_eq(rebatch_saved_size_text(REBATCH_SAVED_IGNORED), "the file cannot be used");
    cr_assert_str_eq(rebatch_saved_size_text(REBATCH_SAVED_IGNORED + 1), "no such answer");
    cr_assert_str_eq(rebatch_saved_size_text((rebatch_saved_size)-1), "no such answer");
}
