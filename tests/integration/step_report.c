/* Owns the tests of what a step says: its report, its events, and their text.
 * Must not know more of the library than its public headers say. */
#include <stdio.h>

#include "step_common.h"
#include "unit/clock.h"

static void open_cut(struct rig *rig, size_t start)
{
    rig_open(rig, MIB(64), &OPTIONS(.micro_start = start, .growth = REBATCH_OFF));
}

/* ---- the report ---- */

Test(step_report, a_clean_step_reports_no_trouble)
{
    OPEN_WITH(open_cut, rig, rig, 8);
    rig.script.base_bytes = MIB(1);
    OK(rig_step(&rig, 20));
    const rebatch_step_report *report = &rig.report;
    cr_assert_eq(report->step, 0);
    OK(report->status);
    cr_assert_eq(report->microbatches, 3);
    cr_assert_eq(report->attempts, 3);
    cr_assert_eq(report->ooms, 0);
    cr_assert_eq(report->micro_before, 8);
    cr_assert_eq(report->micro_after, 8);
    cr_assert_eq(report->lighten_level, 0);
    cr_assert_eq(report->redone_samples, 0);
    cr_assert_eq(report->lost_ns, 0);
    cr_assert_eq(report->oom.asked_bytes, 0);
}

Test(step_report, the_peak_is_all_that_lived_at_once_in_this_step)
{
    OPEN_WITH(open_cut, rig, rig, 4);
    void *parameters;
    OK(rebatch_pool_alloc(&parameters, rebatch_get_pool(rig.rb), MIB(2), NULL, 0));
    rig.script.sample_bytes = MIB(1);
    rig.script.late_bytes = KIB(64);
    OK(rig_step(&rig, 8));
    cr_assert_eq(rig.report.peak_bytes, MIB(2) + 4 * MIB(1) + KIB(64));
    rig.script.sample_bytes = KIB(512);
    OK(rig_step(&rig, 8));
    cr_assert_eq(rig.report.peak_bytes, MIB(2) + 4 * KIB(512) + KIB(64),
                 "the peak of an earlier step");
}

Test(step_report, ooms_are_counted_by_where_they_struck)
{
    OPEN_WITH(open_cut, rig, rig, 8);
    rig.script.base_bytes = MIB(1);
    OK(rig_step(&rig, 16));
    script_fail(&rig.script, SCRIPT_ZERO, 1, SCRIPT_BEFORE, SCRIPT_RETURN);
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    script_fail(&rig.script, SCRIPT_FORWARD, 3, SCRIPT_WHILE, SCRIPT_POOL);
    script_fail(&rig.script, SCRIPT_UPDATE, 1, SCRIPT_BEFORE, SCRIPT_RETURN);
    OK(rig_step(&rig, 16));
    cr_assert_eq(rig.report.ooms, 4);
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_ZERO_GRAD], 1);
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_FORWARD], 1);
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_BACKWARD], 1);
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_OPTIMIZER], 1);
    cr_assert_str_eq(script_trace(&rig.script),
                     "z! z f0+8! f0+4~1 f4+4~1! z f0+2~2 f2+2~2 f4+2~2 f6+2~2 f8+2 f10+2 f12+2 "
                     "f14+2 u! u");
    cr_assert_eq(rig.report.redone_samples, 8 + 8);
    cr_assert_eq(rig.report.microbatches, 8);
    cr_assert_eq(rig.report.micro_before, 8);
    cr_assert_eq(rig.report.micro_after, 2);
    cr_assert_gt(rig.report.lost_ns, 0);
    cr_assert_lt(rig.report.lost_ns, UINT64_C(3600000000000), "more than an hour");
}

static rebatch_status take_five_ms(void *user)
{
    (void)user;
    clock_advance(5000000);
    return REBATCH_OK;
}

static rebatch_status take_five_ms_a_micro_batch(const rebatch_microbatch *mb, void *user)
{
    const size_t *largest = user;
    clock_advance(1);
    return mb->count > *largest ? REBATCH_OOM : take_five_ms(user);
}

/* The attempt that fails takes a nanosecond, and eight micro-batches take longer than two. Without
 * a step to compare with, the attempt's time is a lower bound. */
Test(step_report, what_is_lost_is_the_time_beyond_a_step_without_an_oom)
{
    OPEN_WITH(open_cut, rig, rig, 8);
    size_t largest = 8;
    clock_stop();
    const rebatch_step_ops ops =
        OPS(take_five_ms, take_five_ms_a_micro_batch, take_five_ms, .flags = 0);
    for (size_t i = 0; i < 3; i++)
        OK(rebatch_step(rig.rb, &ops, 16, &largest, &rig.report));
    cr_expect_eq(rig.report.lost_ns, 0);
    largest = 2;
    OK(rebatch_step(rig.rb, &ops, 16, &largest, &rig.report));
    cr_expect_eq(rig.report.ooms, 2);
    cr_expect_geq(rig.report.lost_ns, 15000000u);
    OK(rebatch_step(rig.rb, &ops, 24, &largest, &rig.report));
    largest = 1;
    OK(rebatch_step(rig.rb, &ops, 17, &largest, &rig.report));
    cr_expect_gt(rig.report.lost_ns, 0);
    cr_expect_lt(rig.report.lost_ns, 15000000u, "a step of as many samples is not known");
}

Test(step_report, the_last_oom_of_the_pool_is_in_it)
{
    OPEN_WITH(open_cut, rig, rig, 0);
    rebatch_tag tag;
    OK(rebatch_pool_tag(&tag, rebatch_get_pool(rig.rb), "held"));
    void *held;
    OK(rebatch_pool_alloc(&held, rebatch_get_pool(rig.rb), MIB(60), NULL, tag));
    rig.script.sample_bytes = MIB(3);
    OK(rig_step(&rig, 4));
    cr_assert_eq(rig.report.oom.asked_bytes, 2 * MIB(3), "the last one, not the first");
    cr_assert_eq(rig.report.oom.live_bytes, MIB(60));
    cr_assert_eq(rig.report.oom.device_total_bytes, MIB(64));
    OK(rig_step(&rig, 4));
    cr_assert_eq(rig.report.oom.asked_bytes, 0);
}

Test(step_report, it_is_filled_in_on_failure_and_may_be_null)
{
    OPEN_WITH(open_cut, rig, rig, 8);
    script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_BEFORE, SCRIPT_OWN);
    cr_assert_eq(rig_step(&rig, 16), SCRIPT_STATUS);
    cr_assert_eq(rig.report.status, SCRIPT_STATUS);
    cr_assert_eq(rig.report.attempts, 2);
    memset(&rig.report, 0xff, sizeof rig.report);
    cr_assert_eq(rebatch_step(rig.rb, &rig.ops, 0, &rig.script, &rig.report), REBATCH_E_INVALID);
    cr_assert_eq(rig.report.status, REBATCH_E_INVALID);
    cr_assert_eq(rig.report.attempts, 0);
    rig.script.fault_count = 0;
    rig.script.batch = 4;
    memset(rig.script.tries, 0, sizeof rig.script.tries);
    OK(rebatch_step(rig.rb, &rig.ops, 4, &rig.script, NULL));
}

/* ---- events ---- */

Test(step_report, an_event_says_what_happened)
{
    OPEN_WITH(open_cut, rig, rig, 8);
    OK(rig_step(&rig, 16));
    cr_assert_str_eq(rig_events(&rig), "STEP");
    cr_assert_eq(rig.events[0].step, 0);
    cr_assert_eq(rig.events[0].level, REBATCH_LOG_DEBUG);
    cr_assert_eq(rig.events[0].batch, 16);
    script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_WHILE, SCRIPT_POOL)->times = 2;
    OK(rig_step(&rig, 16));
    cr_assert_str_eq(rig_events(&rig), "SHRINK(8->4) SHRINK(4->2) STEP");
    cr_assert_eq(rig.events[2].micro_before, 8);
    cr_assert_eq(rig.events[2].micro_after, 2);
    /* z f0+8 f8+8! z f0+4! z f0+2 ... */
    const rebatch_event *first = &rig.events[0];
    cr_assert_eq(first->level, REBATCH_LOG_WARN);
    cr_assert_eq(first->step, 1);
    cr_assert_eq(first->phase, REBATCH_PHASE_BACKWARD);
    cr_assert_eq(first->attempt, 0);
    cr_assert_eq(first->first, 8);
    cr_assert_eq(first->count, 8);
    cr_assert_eq(first->batch, 16);
    cr_assert_eq(first->redone_samples, 16);
    cr_assert_eq(first->asked_bytes, SCRIPT_IMPOSSIBLE_BYTES);
    cr_assert_eq(first->available_bytes, MIB(64));
    cr_assert_gt(first->lost_ns, 0);
    const rebatch_event *second = &rig.events[1];
    cr_assert_eq(second->attempt, 1);
    cr_assert_eq(second->first, 0);
    cr_assert_eq(second->count, 4);
    cr_assert_eq(second->redone_samples, 4);
}

Test(step_report, an_oom_beside_the_pool_has_no_asked_bytes)
{
    OPEN_WITH(open_cut, rig, rig, 8);
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_RETURN);
    OK(rig_step(&rig, 8));
    cr_assert_str_eq(rig_events(&rig), "SHRINK(8->4) STEP");
    cr_assert_eq(rig.events[0].asked_bytes, 0);
    cr_assert_eq(rig.report.oom.asked_bytes, 0);
}

Test(step_report, outside_forward_backward_an_event_names_no_samples)
{
    OPEN_WITH(open_cut, rig, rig, 8);
    script_fail(&rig.script, SCRIPT_UPDATE, 1, SCRIPT_WHILE, SCRIPT_POOL);
    cr_assert_eq(rig_step(&rig, 16), REBATCH_E_TORN);
    cr_assert_str_eq(rig_events(&rig), "TORN");
    cr_assert_eq(rig.events[0].level, REBATCH_LOG_ERROR);
    cr_assert_eq(rig.events[0].phase, REBATCH_PHASE_UPDATE);
    cr_assert_eq(rig.events[0].first, 0);
    cr_assert_eq(rig.events[0].count, 0);
    cr_assert_eq(rig.events[0].redone_samples, 0);
}

Test(step_report, exhausted_is_an_event_of_level_error)
{
    OPEN_WITH(open_cut, rig, rig, 1);
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    cr_assert_eq(rig_step(&rig, 4), REBATCH_E_EXHAUSTED);
    cr_assert_str_eq(rig_events(&rig), "EXHAUSTED");
    cr_assert_eq(rig.events[0].level, REBATCH_LOG_ERROR);
}

Test(step_report, a_failure_that_is_no_oom_is_no_event)
{
    OPEN_WITH(open_cut, rig, rig, 8);
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_OWN);
    cr_assert_eq(rig_step(&rig, 16), SCRIPT_STATUS);
    cr_assert_str_eq(rig_events(&rig), "");
}

struct count {
    size_t events[REBATCH_LOG_DEBUG + 1];
};

static void count_level(const rebatch_event *event, void *user)
{
    struct count *count = user;
    count->events[event->level]++;
}

/* At each level: a step with an OOM, a growth, clean steps, and an exhausted one. */
static void run_at_level(rebatch_log_level level, struct count *count)
{
    rebatch_device *device;
    rebatch *rb;
    OPEN(rig, rig, MIB(64), NULL); /* lends its script */
    device = rig.device;
    OK(rebatch_open(&rb, device,
                    &OPTIONS(.log_level = level, .on_event = count_level, .on_event_user = count,
                             .grow_after = 1)));
    struct script *s = &rig.script;
    s->rb = rb;
    s->batch = 8;
    script_fail(s, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_RETURN);
    OK(rebatch_step(rb, &rig.ops, 8, s, NULL));
    memset(s->tries, 0, sizeof s->tries);
    s->fault_count = 0;
    OK(rebatch_step(rb, &rig.ops, 8, s, NULL));
    memset(s->tries, 0, sizeof s->tries);
    script_fail(s, SCRIPT_UPDATE, 1, SCRIPT_WHILE, SCRIPT_POOL);
    cr_assert_eq(rebatch_step(rb, &rig.ops, 8, s, NULL), REBATCH_E_TORN);
    rebatch_close(rb);
    s->rb = rig.rb;
}

Test(step_report, events_above_the_log_level_are_not_reported)
{
    for (int level = REBATCH_LOG_QUIET; level <= REBATCH_LOG_DEBUG; level++) {
        struct count count = {0};
        run_at_level((rebatch_log_level)level, &count);
        for (int l = REBATCH_LOG_ERROR; l <= REBATCH_LOG_DEBUG; l++)
            cr_assert_eq(count.events[l] != 0, l <= level,
                         "at log level %d there were %zu events of level %d", level,
                         count.events[l], l);
    }
}

Test(step_report, the_default_log_level_is_info)
{
    struct count by_default = {0};
    struct count info = {0};
    run_at_level(REBATCH_LOG_DEFAULT, &by_default);
    run_at_level(REBATCH_LOG_INFO, &info);
    cr_assert_eq(memcmp(&by_default, &info, sizeof info), 0);
    cr_assert_gt(info.events[REBATCH_LOG_INFO], 0);
}

/* ---- text ---- */

static void check_line(const rebatch_event *event, const char *number, const char *other)
{
    char text[1024];
    const size_t length = rebatch_event_format(text, sizeof text, event);
    cr_assert_lt(length, sizeof text);
    cr_assert_eq(strlen(text), length);
    cr_assert_gt(length, 0);
    cr_assert_null(strchr(text, '\n'), "%s", text);
    HAS(text, number);
    HAS(text, other);
    cr_assert_eq(rebatch_event_format(NULL, 0, event), length);
    for (size_t size = 1; size <= length + 1; size++) {
        char cut[1024];
        memset(cut, 'x', sizeof cut);
        cr_assert_eq(rebatch_event_format(cut, size, event), length);
        cr_assert_eq(strlen(cut), size - 1);
        cr_assert_eq(memcmp(cut, text, size - 1), 0);
        cr_assert_eq(cut[size], 'x', "it wrote beyond %zu bytes", size);
    }
}

Test(step_report, an_event_is_one_line_of_text_cut_to_any_size)
{
    rebatch_event event = {.step = 4711,
                           .phase = REBATCH_PHASE_BACKWARD,
                           .attempt = 2,
                           .first = 96,
                           .count = 32,
                           .batch = 128,
                           .micro_before = 32,
                           .micro_after = 16,
                           .lighten_before = 1,
                           .lighten_after = 2,
                           .redone_samples = 128,
                           .lost_ns = 123456789,
                           .asked_bytes = MIB(5),
                           .available_bytes = MIB(3)};
    static const rebatch_event_kind ooms[] = {REBATCH_EVENT_RETRY, REBATCH_EVENT_SHRINK,
                                              REBATCH_EVENT_LIGHTEN, REBATCH_EVENT_EXHAUSTED,
                                              REBATCH_EVENT_TORN};
    for (size_t i = 0; i < sizeof ooms / sizeof ooms[0]; i++) {
        event.kind = ooms[i];
        check_line(&event, "4711", "forward_backward, while accumulating");
    }
    static const rebatch_event_kind others[] = {REBATCH_EVENT_STEP, REBATCH_EVENT_GROW,
                                                REBATCH_EVENT_GROWTH_FAILED};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        event.kind = others[i];
        check_line(&event, "4711", "");
    }
    event.kind = REBATCH_EVENT_SHRINK;
    check_line(&event, "32", "16");
    check_line(&event, "96", "128");
}

Test(step_report, one_sample_is_a_sample)
{
    char text[512];
    OPEN_WITH(open_cut, rig, rig, 2);
    script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_BEFORE, SCRIPT_POOL)->times = 2;
    STEP(&rig, 4, REBATCH_E_EXHAUSTED, "z f0+2 f2+2! f2+1~1!");
    (void)rebatch_event_format(text, sizeof text, &rig.events[0]);
    HAS(text, "in forward_backward, before accumulating: samples 2-3 need at least ");
    HAS(text, "; 2 samples again; the attempt took ");
    (void)rebatch_event_format(text, sizeof text, &rig.events[1]);
    HAS(text, "in forward_backward, before accumulating: sample 2 needs at least ");
    cr_assert(strstr(rebatch_last_error(),
                     "step 0: out of memory in forward_backward of 1 sample, "
                     "before accumulating, which needs at least ") == rebatch_last_error(),
              "%s", rebatch_last_error());
    rebatch_event event = {.kind = REBATCH_EVENT_SHRINK, .redone_samples = 1};
    (void)rebatch_event_format(text, sizeof text, &event);
    HAS(text, "; 1 sample again; the attempt took 0.0 ms");
}

Test(step_report, every_phase_has_its_words)
{
    static const char *const words[] = {
#define WORDS(name, text) text,
        REBATCH_PHASES(WORDS)
#undef WORDS
    };
    for (int phase = 0; phase < REBATCH_PHASE_COUNT; phase++) {
        const rebatch_event event = {.kind = REBATCH_EVENT_RETRY, .phase = (rebatch_phase)phase};
        check_line(&event, "", phase == REBATCH_PHASE_ADMISSION ? "not started" : words[phase]);
    }
}
