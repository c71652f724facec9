/* Owns the tests of a probe that keeps its results in a file, and of predictions.
 * Must not know more of the library than its public headers say. Seeds: none. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "probe_common.h"
#include "unit/config_files.h"

TestSuite(probe_saved, .init = config_enter, .fini = config_leave);

#define NAME "results"

/* What events said. */
struct heard {
    uint32_t trials, warnings;
    char last[512];
};

static void hear(const rebatch_event *event, void *user)
{
    struct heard *heard = user;
    heard->trials += event->kind == REBATCH_EVENT_TRIAL;
    heard->warnings += event->kind == REBATCH_EVENT_PROBE_FILE;
    if (event->kind == REBATCH_EVENT_PROBE_FILE)
        (void)rebatch_event_format(heard->last, sizeof heard->last, event);
}

static rebatch_options listening(struct heard *heard)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    *heard = (struct heard){0};
    options.on_event = hear;
    options.on_event_user = heard;
    return options;
}

/* One process's life: open, probe with the file, close. */
static rebatch_probe_report probe(size_t capacity_bytes, const rebatch_options *session,
                                  size_t batch, const char *key)
{
    OPEN_WITH(bed_open_typical, bed, bed, capacity_bytes, session);
    OK(bed_probe(&bed, batch, &PROBE(.file = NAME, .key = key)));
    cr_assert_eq(rebatch_get_micro(bed.rb, batch), bed.report.size);
    const rebatch_probe_report report = bed.report;
    return report;
}

Test(probe_saved, a_saved_size_is_run_once_and_held)
{
    struct heard heard;
    const rebatch_options session = listening(&heard);
    const rebatch_probe_report first = probe(MIB(12), &session, 64, "typical");
    cr_assert_eq(first.saved, REBATCH_SAVED_ABSENT);
    cr_assert_eq(first.saved_size, 0);
    cr_assert_eq(heard.trials, first.microbatches);
    const rebatch_probe_report again = probe(MIB(12), &session, 64, "typical");
    cr_assert_eq(again.saved, REBATCH_SAVED_HELD);
    cr_assert_eq(again.saved_size, first.size);
    cr_assert_eq(again.size, first.size);
    cr_assert_eq(again.microbatches, 2, "one sample, and the size once");
    cr_assert_eq(again.ooms, 0);
    cr_assert_eq(heard.warnings, 0, "%s", heard.last);
    cr_assert_lt(again.microbatches, first.microbatches);
}

Test(probe_saved, without_a_file_there_is_none)
{
    OPEN_WITH(bed_open_typical, bed, bed, MIB(12), NULL);
    OK(bed_probe(&bed, 64, NULL));
    cr_assert_eq(bed.report.saved, REBATCH_SAVED_NONE);
    cr_assert_str_eq(rebatch_saved_size_text(bed.report.saved), "no file was given");
    cr_assert_str_eq(rebatch_saved_size_text((rebatch_saved_size)77), "no such answer");
}

Test(probe_saved, another_model_device_or_setting_has_its_own_size)
{
    const size_t size = probe(MIB(12), NULL, 64, "typical").size;
    cr_assert_eq(probe(MIB(12), NULL, 64, "another").saved, REBATCH_SAVED_ABSENT);
    cr_assert_eq(probe(MIB(13), NULL, 64, "typical").saved, REBATCH_SAVED_ABSENT);
    cr_assert_eq(probe(MIB(12), NULL, 63, "typical").saved, REBATCH_SAVED_ABSENT);
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.pool.headroom_bytes = MIB(1);
    cr_assert_eq(probe(MIB(12), &options, 64, "typical").saved, REBATCH_SAVED_ABSENT);
    options = (rebatch_options)REBATCH_OPTIONS_INIT;
    options.micro_smallest = 2;
    cr_assert_eq(probe(MIB(12), &options, 64, "typical").saved, REBATCH_SAVED_ABSENT);
    options = (rebatch_options)REBATCH_OPTIONS_INIT;
    options.micro_multiple_of = 2;
    cr_assert_eq(probe(MIB(12), &options, 64, "typical").saved, REBATCH_SAVED_ABSENT);
    options = (rebatch_options)REBATCH_OPTIONS_INIT;
    options.micro_allowed[0] = 8;
    cr_assert_eq(probe(MIB(12), &options, 64, "typical").saved, REBATCH_SAVED_ABSENT);
    options.micro_allowed[0] = 4;
    cr_assert_eq(probe(MIB(12), &options, 64, "typical").saved, REBATCH_SAVED_ABSENT);
    options = (rebatch_options)REBATCH_OPTIONS_INIT;
    options.pool.caching = REBATCH_OFF;
    cr_assert_eq(probe(MIB(12), &options, 64, "typical").saved, REBATCH_SAVED_ABSENT);
    options.pool.caching = REBATCH_ON; /* as the default is */
    cr_assert_eq(probe(MIB(12), &options, 64, "typical").saved_size, size);
    cr_assert_eq(probe(MIB(12), NULL, 64, "typical").saved_size, size);
}

/* Makes the file say another size of the same key: a co-tenant was there, or had gone. */
static void save_size_found_beside(size_t other_bytes)
{
    OPEN_WITH(bed_open_typical, bed, bed, MIB(16), NULL);
    void *other;
    OK(rebatch_pool_alloc(&other, rebatch_get_pool(bed.rb), other_bytes, NULL, 0));
    OK(bed_probe(&bed, 64, &PROBE(.file = NAME, .key = "typical")));
    OK(rebatch_pool_free(rebatch_get_pool(bed.rb), other));
}

Test(probe_saved, a_size_that_no_longer_fits_is_replaced)
{
    const size_t roomy = probe(MIB(16), NULL, 64, "typical").size;
    OPEN_WITH(bed_open_typical, bed, bed, MIB(16), NULL);
    void *other;
    OK(rebatch_pool_alloc(&other, rebatch_get_pool(bed.rb), MIB(4), NULL, 0));
    OK(bed_probe(&bed, 64, &PROBE(.file = NAME, .key = "typical")));
    cr_assert_eq(bed.report.saved, REBATCH_SAVED_REPLACED);
    cr_assert_eq(bed.report.saved_size, roomy);
    cr_assert_eq(bed.report.ooms, 1);
    cr_assert_lt(bed.report.size, roomy);
    cr_assert_gt(bed.report.size, roomy / 2);
    OK(rebatch_pool_free(rebatch_get_pool(bed.rb), other));
    const size_t smaller = bed.report.size;
    cr_assert_eq(probe(MIB(16), NULL, 64, "typical").saved_size, smaller,
                 "the entry is the new one");
}

Test(probe_saved, where_more_fits_than_was_saved_more_is_found)
{
    save_size_found_beside(MIB(6));
    const rebatch_probe_report report = probe(MIB(16), NULL, 64, "typical");
    cr_assert_eq(report.saved, REBATCH_SAVED_REPLACED);
    cr_assert_gt(report.size, report.saved_size);
    cr_assert_eq(report.ooms, 0);
    cr_assert_eq(unlink(NAME), 0);
    cr_assert_eq(probe(MIB(16), NULL, 64, "typical").size, report.size);
    cr_assert_eq(probe(MIB(16), NULL, 64, "typical").saved, REBATCH_SAVED_HELD);
}

/* With a single sample there is nothing to predict from: the size is run, and it is the one. */
Test(probe_saved, a_saved_size_of_one_is_held_without_an_oom)
{
    size_t capacity = MIB(4);
    rebatch_probe_report first = {0};
    while (first.size != 1) {
        (void)unlink(NAME);
        OPEN_WITH(bed_open_typical, bed, bed, capacity, NULL);
        const rebatch_status status = bed_probe(&bed, 64, &PROBE(.file = NAME, .key = "typical"));
        first = bed.report;
        cr_assert(status == REBATCH_OK || status == REBATCH_E_EXHAUSTED);
        cr_assert(status == REBATCH_OK, "no capacity fits just one");
        if (first.size != 1)
            capacity -= 65536;
    }
    const rebatch_probe_report again = probe(capacity, NULL, 64, "typical");
    cr_assert_eq(again.saved, REBATCH_SAVED_HELD);
    cr_assert_eq(again.size, 1);
    cr_assert_eq(again.ooms, 0);
}

Test(probe_saved, a_file_that_cannot_be_used_is_left_out_with_a_warning)
{
    struct heard heard;
    const rebatch_options session = listening(&heard);
    const size_t size = probe(MIB(12), NULL, 64, "typical").size;
    static const char foreign[] = "not mine\n";
    config_write(NAME, foreign);
    const rebatch_probe_report report = probe(MIB(12), &session, 64, "typical");
    cr_assert_eq(report.saved, REBATCH_SAVED_IGNORED);
    cr_assert_eq(report.saved_size, 0);
    cr_assert_eq(report.size, size);
    cr_assert_eq(heard.warnings, 2, "when it is read, and when nothing can be kept");
    cr_assert(strstr(heard.last, " " NAME " has no results of probes in it"), "%s", heard.last);
    cr_assert_str_eq(rebatch_last_error(), "", "a warning is no error");
    char *text = config_read(NAME);
    cr_assert_str_eq(text, foreign);
    free(text);
    cr_assert_eq(unlink(NAME), 0);
}

Test(probe_saved, damage_is_warned_of_and_mended)
{
    struct heard heard;
    const rebatch_options session = listening(&heard);
    const size_t size = probe(MIB(12), NULL, 64, "typical").size;
    char *text = config_read(NAME);
    char *digit = strchr(strchr(text, '\n'), ' ');
    cr_assert_not_null(digit);
    digit[1]++; /* of the size */
    config_write(NAME, text);
    free(text);
    rebatch_probe_report report = probe(MIB(12), &session, 64, "typical");
    cr_assert_eq(report.saved, REBATCH_SAVED_IGNORED);
    cr_assert_eq(report.size, size);
    cr_assert_eq(heard.warnings, 1);
    cr_assert(strstr(heard.last, "a damaged entry"), "%s", heard.last);
    report = probe(MIB(12), &session, 64, "typical");
    cr_assert_eq(report.saved, REBATCH_SAVED_HELD);
    cr_assert_eq(heard.warnings, 1);
}

Test(probe_saved, a_file_without_a_key_is_refused)
{
    char longest[257] = "";
    memset(longest, 'k', 256);
    static const char *const none[] = {NULL, ""};
    rebatch_probe_options options = REBATCH_PROBE_OPTIONS_INIT;
    OPEN_WITH(bed_open_typical, bed, bed, MIB(12), NULL);
    options.file = NAME;
    for (int i = 0; i < 3; i++) {
        options.key = i < 2 ? none[i] : longest;
        FAILS(bed_probe(&bed, 64, &options), REBATCH_E_INVALID, "expected 1 to 255");
    }
    cr_assert_eq(bed.load.ran, 0);
    longest[255] = '\0';
    OK(bed_probe(&bed, 64, &options));
}

Test(probe_saved, a_file_without_a_name_is_refused)
{
    OPEN_WITH(bed_open_typical, bed, bed, MIB(12), NULL);
    FAILS(bed_probe(&bed, 64, &PROBE(.file = "", .key = "typical")), REBATCH_E_INVALID,
          "file is \"\": expected a name");
    cr_assert_eq(bed.load.ran, 0);
}

Test(probe_saved, nothing_is_saved_when_nothing_fits)
{
    OPEN_WITH(bed_open_typical, bed, bed, MIB(1), NULL);
    cr_assert_eq(bed_probe(&bed, 64, &PROBE(.file = NAME, .key = "typical")), REBATCH_E_EXHAUSTED);
    cr_assert(access(NAME, F_OK) != 0);
}

/* The callback's own wall: the model of the pool's memory says each time that more fits. */
static rebatch_probe_report probe_at_wall(size_t wall, size_t other_bytes)
{
    void *other;
    OPEN_WITH(bed_open_typical, bed, bed, MIB(20), NULL);
    bed.load.wall = wall;
    OK(rebatch_pool_alloc(&other, rebatch_get_pool(bed.rb), other_bytes, NULL, 0));
    OK(bed_probe(&bed, 64, &PROBE(.file = NAME, .key = "walled", .max_trials = 12)));
    OK(rebatch_pool_free(rebatch_get_pool(bed.rb), other));
    const rebatch_probe_report report = bed.report;
    return report;
}

Test(probe_saved, what_was_too_large_is_not_run_again)
{
    const rebatch_probe_report first = probe_at_wall(11, 0);
    cr_assert_eq(first.size, 11);
    cr_assert_gt(first.ooms, 0);
    const rebatch_probe_report again = probe_at_wall(11, 0);
    cr_assert_eq(again.saved, REBATCH_SAVED_HELD);
    cr_assert_eq(again.size, 11);
    cr_assert_eq(again.ooms, 0, "12 were run once");
    cr_assert_eq(again.microbatches, 2);
    const rebatch_probe_report less = probe_at_wall(11, MIB(2));
    cr_assert_eq(less.ooms, 0, "with less memory it does not fit either");
    cr_assert_eq(less.size, 11);
}

Test(probe_saved, with_more_room_what_was_too_large_is_run)
{
    const rebatch_probe_report first = probe_at_wall(11, MIB(2));
    cr_assert_eq(first.size, 11);
    const rebatch_probe_report more = probe_at_wall(0, 0);
    cr_assert_eq(more.saved, REBATCH_SAVED_REPLACED);
    cr_assert_gt(more.size, 11);
    cr_assert_eq(more.ooms, 0);
}

/* ---- predictions ---- */

static rebatch_prediction predict(struct bed *bed, size_t size, size_t batch)
{
    rebatch_prediction prediction;
    OK(rebatch_predict(&prediction, bed->rb, size, batch, NULL));
    cr_assert_eq(prediction.size, size);
    return prediction;
}

Test(probe_saved, a_prediction_says_what_the_probe_said_and_no_callback_runs)
{
    OPEN_WITH(bed_open_typical, bed, bed, MIB(12), NULL);
    OK(bed_probe(&bed, 64, NULL));
    const uint32_t ran = bed.load.ran;
    const rebatch_prediction fits = predict(&bed, bed.report.size, 64);
    cr_assert(fits.fits);
    cr_assert_eq(fits.peak_bytes, bed.report.measured_peak_bytes);
    cr_assert_eq(fits.failing_bytes, 0);
    cr_assert_leq(fits.peak_bytes, fits.reserved_bytes);
    cr_assert_leq(fits.reserved_bytes, fits.limit_bytes);
    cr_assert_eq(fits.limit_bytes, MIB(12));
    const rebatch_prediction larger = predict(&bed, bed.report.predicted_size + 1, 64);
    cr_assert(!larger.fits);
    cr_assert_gt(larger.failing_bytes, 0);
    cr_assert_gt(larger.peak_bytes, fits.peak_bytes);
    cr_assert_eq(predict(&bed, 2 * bed.report.size, 1).peak_bytes, bed.report.twice_bytes);
    cr_assert_eq(bed.load.ran, ran);
}

/* Sizes from 1 up, on a device with room: what is predicted is what a step measures. */
Test(probe_saved, predicted_peaks_are_the_measured_ones)
{
    for (size_t size = 1; size <= 64; size += 7) {
        struct bed bed;
        rebatch_options options = REBATCH_OPTIONS_INIT;
        rebatch_step_report report;
        bed_open_typical(&bed, MIB(12), &options);
        OK(bed_probe(&bed, 64, NULL));
        const rebatch_prediction prediction = predict(&bed, size, 64);
        bed_close(&bed);
        options.micro_largest = size;
        bed_open_typical(&bed, MIB(200), &options);
        bed.load.moments_bytes = 1;
        OK(rebatch_step(bed.rb, &bed.ops, 64, &bed.load, NULL));
        OK(rebatch_step(bed.rb, &bed.ops, 64, &bed.load, &report));
        cr_assert_eq(prediction.peak_bytes + REBATCH_POOL_UNIT_BYTES, report.peak_bytes,
                     "size %zu: %zu predicted, %zu measured with a byte of moments", size,
                     (size_t)prediction.peak_bytes, (size_t)report.peak_bytes);
        bed_close(&bed);
    }
}

Test(probe_saved, a_prediction_counts_what_will_be_there)
{
    rebatch_prediction prediction;
    rebatch_probe_options options = REBATCH_PROBE_OPTIONS_INIT;
    OPEN_WITH(bed_open_typical, bed, bed, MIB(12), NULL);
    options.reserve_bytes = MIB(3);
    OK(bed_probe(&bed, 64, &options));
    const size_t size = bed.report.size;
    OK(rebatch_predict(&prediction, bed.rb, size, 64, &options));
    cr_assert(prediction.fits);
    cr_assert_eq(prediction.peak_bytes, bed.report.measured_peak_bytes);
    OK(rebatch_predict(&prediction, bed.rb, bed.report.predicted_size + 1, 64, &options));
    cr_assert(!prediction.fits);
    cr_assert(predict(&bed, bed.report.predicted_size + 1, 64).fits, "without it there is room");
    options.reserve_bytes = MIB(100);
    OK(rebatch_predict(&prediction, bed.rb, 1, 64, &options));
    cr_assert(!prediction.fits);
}

Test(probe_saved, a_prediction_without_a_model_or_with_bad_arguments_is_refused)
{
    rebatch_prediction prediction = {.size = 9};
    OPEN_WITH(bed_open_typical, bed, bed, MIB(12), NULL);
    cr_assert_eq(rebatch_predict(&prediction, bed.rb, 4, 64, NULL), REBATCH_E_STATE);
    cr_assert_eq(prediction.size, 0);
    SAYS("rebatch_probe()");
    OK(bed_probe(&bed, 64, NULL));
    cr_assert_eq(rebatch_predict(NULL, bed.rb, 4, 64, NULL), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_predict(&prediction, NULL, 4, 64, NULL), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_predict(&prediction, bed.rb, 0, 64, NULL), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_predict(&prediction, bed.rb, 4, 0, NULL), REBATCH_E_INVALID);
    OK(rebatch_predict(&prediction, bed.rb, SIZE_MAX, 64, NULL));
    cr_assert(!prediction.fits);
    for (size_t size = 64; size <= (size_t)1 << 40; size *= 2) {
        OK(rebatch_predict(&prediction, bed.rb, size, 64, NULL));
        cr_assert(!prediction.fits && prediction.failing_bytes > 0);
        cr_assert_gt(prediction.peak_bytes, size * 100000);
    }
}

/* ---- step numbers ---- */

Test(probe_saved, a_resumed_session_goes_on_counting)
{
    rebatch_step_report report;
    OPEN_WITH(bed_open_typical, bed, bed, MIB(12), NULL);
    cr_assert_eq(rebatch_set_step(NULL, 1), REBATCH_E_INVALID);
    OK(rebatch_set_step(bed.rb, 41));
    OK(rebatch_step(bed.rb, &bed.ops, 8, &bed.load, &report));
    cr_assert_eq(report.step, 41);
    OK(rebatch_step(bed.rb, &bed.ops, 8, &bed.load, &report));
    cr_assert_eq(report.step, 42);
}
