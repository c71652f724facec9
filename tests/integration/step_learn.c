/* Owns the tests of sessions that learn the micro-batch size from real micro-batches.
 * Must not know more of the library than its public headers say. */
#include "fault/fault_device.h"
#include "gpt/error.h"
#include "integration/gpt_common.h"
#include "integration/probe_common.h"
#include "integration/step_common.h"

/* Each random one states its seed. */
TestSuite(step_learn);

static rebatch_options learning(void)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.learn = REBATCH_ON;
    options.growth = REBATCH_OFF;
    return options;
}

static void bed_open_learning(struct bed *bed, size_t capacity_bytes, size_t moments_bytes)
{
    bed_open_typical(bed, capacity_bytes, &OPTIONS(.learn = REBATCH_ON, .growth = REBATCH_OFF));
    bed->load.moments_bytes = moments_bytes;
}

static rebatch_step_report bed_step(struct bed *bed, size_t batch)
{
    rebatch_step_report report;
    const uint32_t before = bed->load.ran;
    OK(rebatch_step(bed->rb, &bed->ops, batch, &bed->load, &report));
    cr_assert_eq(bed->load.ran - before, report.attempts);
    return report;
}

/* ---- the first step ---- */

Test(step_learn, nothing_runs_twice_and_nothing_is_thrown_away)
{
    for (size_t mib = 3; mib <= 20; mib++) {
        OPEN_WITH(bed_open_learning, bed, bed, MIB(mib), MIB(1));
        cr_assert_eq(rebatch_get_micro(bed.rb, 64), 1);
        size_t samples = 0;
        const rebatch_step_report report = bed_step(&bed, 64);
        cr_assert_eq(report.ooms, 0);
        cr_assert_eq(report.redone_samples, 0);
        cr_assert_eq(report.attempts, report.microbatches, "each run counts in the update");
        cr_assert_eq(bed.load.probing, 0);
        cr_assert_eq(bed.load.updated, 1);
        for (uint32_t i = 0; i < bed.load.ran; i++)
            samples += bed.load.sizes[i];
        cr_assert_eq(samples, 64);
        cr_assert(report.learned >= 2 && report.learned <= 5, "%zu MiB: learned from %u", mib,
                  report.learned);
    }
}

/* What it costs to know nothing: micro-batches on top of those of a step that knows. */
Test(step_learn, the_first_step_has_at_most_three_microbatches_more_than_a_later_one)
{
    for (size_t mib = 3; mib <= 20; mib++) {
        OPEN_WITH(bed_open_learning, bed, bed, MIB(mib), MIB(1));
        const rebatch_step_report first = bed_step(&bed, 64);
        rebatch_step_report later = first;
        for (int i = 0; i < 3; i++)
            later = bed_step(&bed, 64);
        cr_assert_eq(later.learned, 0, "%zu MiB: it still learns", mib);
        cr_assert_leq(first.microbatches, later.microbatches + 3, "%zu MiB: %u and %u", mib,
                      first.microbatches, later.microbatches);
    }
}

/* Memory costs time to be taken: none is for a size that makes the step no shorter. */
Test(step_learn, the_first_step_takes_no_more_than_its_microbatches_need)
{
    for (size_t mib = 3; mib <= 20; mib++) {
        OPEN_WITH(bed_open_typical, bed, bed, MIB(mib),
                  &OPTIONS(.learn = REBATCH_ON, .growth = REBATCH_OFF));
        (void)bed_step(&bed, 64);
        size_t left = 64, most = 0;
        for (uint32_t i = 0; i < bed.load.ran; i++) {
            const size_t size = bed.load.sizes[i];
            const size_t microbatches = (left - 1) / size + 1;
            if (i > 0 && size > most)
                cr_assert_eq(size, (left - 1) / microbatches + 1, "%zu MiB, %zu left", mib, left);
            if (i > 1 && size > most)
                cr_assert_gt((left - 1) / most + 1, microbatches + 2, "%zu MiB, %zu left", mib,
                             left);
            most = size > most ? size : most;
            left -= size;
        }
    }
}

Test(step_learn, after_the_first_update_the_size_is_the_largest_that_fits)
{
    for (size_t mib = 4; mib <= 20; mib += 2) {
        OPEN_WITH(bed_open_learning, bed, bed, MIB(mib), MIB(1));
        const size_t largest = true_largest(&bed, MIB(mib), NULL, 64);
        for (int i = 0; i < 4; i++)
            cr_assert_eq(bed_step(&bed, 64).ooms, 0, "%zu MiB, step %d", mib, i);
        /* A pool that has learned may lay more than one that begins with the size. */
        cr_assert_geq(rebatch_get_micro(bed.rb, 64), largest, "%zu MiB: %zu, %zu is true", mib,
                      rebatch_get_micro(bed.rb, 64), largest);
    }
}

/* What the first micro-batch makes and keeps, and what the first update does. */
Test(step_learn, memory_that_appears_later_makes_the_size_smaller_without_an_oom)
{
    OPEN_WITH(bed_open_learning, bed, bed, MIB(16), MIB(6));
    const rebatch_step_report first = bed_step(&bed, 64);
    size_t most = 0;
    for (uint32_t i = 0; i < bed.load.ran; i++)
        most = bed.load.sizes[i] > most ? bed.load.sizes[i] : most;
    cr_assert_lt(first.micro_after, most, "the update has taken 6 MiB");
    for (int i = 0; i < 4; i++) {
        const rebatch_step_report later = bed_step(&bed, 64);
        cr_assert_eq(later.ooms, 0);
        cr_assert_leq(later.micro_after, first.micro_after);
    }
}

Test(step_learn, everything_fits_ends_with_the_whole_batch)
{
    OPEN_WITH(bed_open_learning, bed, bed, MIB(256), 0);
    const rebatch_step_report first = bed_step(&bed, 64);
    cr_assert_leq(first.microbatches, 3);
    const rebatch_step_report second = bed_step(&bed, 64);
    cr_assert_eq(second.microbatches, 1);
    cr_assert_eq(second.ooms + first.ooms, 0);
}

/* ---- batches ---- */

Test(step_learn, small_batches_teach_over_several_steps)
{
    for (size_t batch = 1; batch <= 4; batch++) {
        OPEN_WITH(bed_open_learning, bed, bed, MIB(12), 0);
        rebatch_step_report report = {0};
        for (int i = 0; i < 4; i++) {
            report = bed_step(&bed, batch);
            cr_assert_eq(report.ooms, 0);
        }
        cr_assert_eq(report.microbatches, 1, "a batch of %zu fits as one", batch);
        cr_assert_eq(report.learned, 0);
    }
}

Test(step_learn, a_larger_batch_is_learned_at_once)
{
    for (size_t small = 1; small <= 8; small++) {
        OPEN_WITH(bed_open_learning, bed, bed, MIB(12), 0);
        const size_t largest = true_largest(&bed, MIB(12), NULL, 128);
        for (int i = 0; i < 3; i++)
            (void)bed_step(&bed, small);
        const rebatch_step_report report = bed_step(&bed, 128);
        cr_assert_eq(report.ooms, 0);
        cr_assert_eq(report.micro_after, largest, "after batches of %zu", small);
        cr_assert_leq(report.microbatches, 128 / largest + 4);
    }
}

Test(step_learn, the_limits_on_the_size_hold)
{
    rebatch_options options = learning();
    struct rig rig;
    options.micro_multiple_of = 4;
    options.micro_largest = 40;
    rig_open(&rig, MIB(8), &options); /* rig_step() looks at every size */
    rig.script.base_bytes = KIB(64);
    rig.script.sample_bytes = KIB(300);
    for (int i = 0; i < 3; i++)
        OK(rig_step(&rig, 67));
    cr_assert_eq(rig.report.micro_after, 24, "%s", script_trace(&rig.script));
    rig_close(&rig);

    options = learning();
    memcpy(options.micro_allowed, (size_t[]){3, 7, 19, 50}, 4 * sizeof(size_t));
    rig_open(&rig, MIB(8), &options);
    rig.script.base_bytes = KIB(64);
    rig.script.sample_bytes = KIB(300);
    for (int i = 0; i < 3; i++)
        OK(rig_step(&rig, 67));
    cr_assert_eq(rig.report.micro_after, 19, "%s", script_trace(&rig.script));
    rig_close(&rig);
}

/* ---- out of memory while it learns ---- */

Test(step_learn, an_oom_in_any_microbatch_of_the_first_step_is_survived)
{
    static const enum script_manner manners[] = {SCRIPT_RETURN, SCRIPT_POOL, SCRIPT_ESCAPE,
                                                 SCRIPT_SWALLOW};
    for (uint32_t nth = 1; nth <= 6; nth++)
        for (int way = 0; way < 8; way++) {
            OPEN(rig, rig, MIB(8),
                 &OPTIONS(.learn = REBATCH_ON, .growth = REBATCH_OFF,
                          .on_oom = way & 1 ? REBATCH_ON_OOM_FIT : REBATCH_ON_OOM_HALVE));
            rig.script.sample_bytes = KIB(300);
            rig.ops.flags = nth % 2 ? REBATCH_DECLARES_MUTATION : 0;
            script_fail(&rig.script, SCRIPT_FORWARD, nth, way & 2 ? SCRIPT_WHILE : SCRIPT_BEFORE,
                        manners[way / 2])
                ->more_than = 1;
            for (int step = 0; step < 5; step++) {
                OK(rig_step(&rig, 64));
                rig.script.fault_count = 0;
            }
            cr_assert_eq(rig.report.learned, 0, "it never ends");
            cr_assert_geq(rig.report.micro_after, 5, "the %uth, way %d: %zu", nth, way,
                          rig.report.micro_after);
            cr_assert_eq(rig.report.ooms, 0);
        }
}

/* The callback's own wall: no model of the pool's memory sees it. */
Test(step_learn, a_prediction_that_does_not_hold_is_halved_and_then_learned_from)
{
    OPEN_WITH(bed_open_learning, bed, bed, MIB(20), 0);
    bed.load.wall = 11;
    rebatch_step_report report = bed_step(&bed, 64);
    cr_assert_gt(report.ooms, 0);
    for (int i = 0; i < 6; i++)
        report = bed_step(&bed, 64);
    cr_assert_eq(report.ooms, 0);
    cr_assert_eq(report.learned, 0);
    cr_assert(report.micro_after >= 8 && report.micro_after <= 11, "%zu", report.micro_after);
}

/* The fallback halves, but not to less than has run. */
Test(step_learn, a_size_that_failed_is_followed_by_no_smaller_one_than_has_run)
{
    for (size_t wall = 3; wall <= 30; wall++) {
        OPEN_WITH(bed_open_typical, bed, bed, MIB(20),
                  &OPTIONS(.learn = REBATCH_ON, .growth = REBATCH_OFF));
        bed.load.wall = wall;
        for (int i = 0; i < 4; i++)
            (void)bed_step(&bed, 64);
        size_t ran = 0, after_failures = 0;
        for (uint32_t i = 0; i + 1 < bed.load.ran && i + 1 < 64; i++) {
            const size_t size = bed.load.sizes[i], next = bed.load.sizes[i + 1];
            if (size <= wall) {
                ran = size > ran ? size : ran;
            } else {
                cr_assert_geq(next, ran, "a wall of %zu: %zu failed", wall, size);
                after_failures++;
            }
        }
        cr_assert_gt(after_failures, 0);
    }
}

Test(step_learn, allocations_without_a_law_are_learned_by_their_peak)
{
    for (size_t mib = 3; mib <= 12; mib++) {
        OPEN(bed, bed, MIB(mib), &OPTIONS(.learn = REBATCH_ON, .growth = REBATCH_OFF));
        bed.load.items[0] = (struct load_item){.fixed = 5000, .each = 30000};
        bed.load.item_count = 1;
        bed.load.bit_bytes = 60000;
        const size_t largest = true_largest(&bed, MIB(mib), NULL, 100);
        rebatch_step_report report = {0};
        for (int i = 0; i < 6; i++)
            report = bed_step(&bed, 100);
        cr_assert_eq(report.ooms + report.learned, 0);
        cr_assert(report.micro_after * 10 >= largest * 9 && report.micro_after <= largest,
                  "%zu MiB: %zu, %zu is true", mib, report.micro_after, largest);
    }
}

Test(step_learn, nothing_fits_is_exhausted_after_the_smallest)
{
    OPEN(rig, rig, MIB(8), &OPTIONS(.learn = REBATCH_ON, .growth = REBATCH_OFF));
    rig.script.sample_bytes = MIB(9);
    cr_assert_eq(rig_step(&rig, 64), REBATCH_E_EXHAUSTED);
    cr_assert_eq(rig.report.attempts, 1);
    rig.script.sample_bytes = KIB(300);
    for (int i = 0; i < 3; i++)
        OK(rig_step(&rig, 64));
}

Test(step_learn, a_torn_update_is_torn)
{
    OPEN(rig, rig, MIB(8), &OPTIONS(.learn = REBATCH_ON, .growth = REBATCH_OFF));
    rig.script.sample_bytes = KIB(300);
    script_fail(&rig.script, SCRIPT_UPDATE, 1, SCRIPT_WHILE, SCRIPT_RETURN);
    cr_assert_eq(rig_step(&rig, 64), REBATCH_E_TORN);
    script_restore(&rig.script);
    rig.script.fault_count = 0;
    for (int i = 0; i < 3; i++)
        OK(rig_step(&rig, 64));
    cr_assert_eq(rig.report.learned, 0);
    cr_assert_geq(rig.report.micro_after, 26);
}

/* Once it is over, memory that goes and comes is growth's business again. */
Test(step_learn, when_it_is_over_growth_goes_on)
{
    OPEN(rig, rig, MIB(8), &OPTIONS(.learn = REBATCH_ON, .growth = REBATCH_ON, .grow_after = 3));
    rig.script.sample_bytes = KIB(300);
    for (int i = 0; i < 3; i++)
        OK(rig_step(&rig, 64));
    const size_t size = rig.report.micro_after;
    rig_set_capacity(&rig, MIB(4));
    OK(rig_step(&rig, 64));
    cr_assert_lt(rig.report.micro_after, size);
    rig_set_capacity(&rig, MIB(8));
    for (int i = 0; i < 3; i++)
        OK(rig_step(&rig, 64));
    cr_assert_eq(rig.report.micro_after, size, "by the model that was learned");
}

/* Seed 31: faults of every kind and memory that comes and goes, from the first step on. */
Test(step_learn, every_sample_counts_once_under_random_ooms)
{
    uint64_t random = 31;
    unsigned ok = 0;
    for (int session = 0; session < 200; session++) {
        OPEN(rig, rig, MIB(24),
             &OPTIONS(.learn = REBATCH_ON, .growth = session % 2 ? REBATCH_ON : REBATCH_OFF,
                      .grow_after = 2,
                      .on_oom = session % 3 ? REBATCH_ON_OOM_HALVE : REBATCH_ON_OOM_FIT,
                      .micro_multiple_of = script_random(&random) % 3 ? 1 : 3,
                      .pool.caching = session % 5 ? REBATCH_ON : REBATCH_OFF));
        struct script *s = &rig.script;
        s->base_bytes = script_random(&random) % KIB(512);
        s->sample_bytes = script_random(&random) % KIB(300);
        s->late_bytes = script_random(&random) % KIB(200);
        s->reserves = session % 4 != 0;
        s->update_bytes = script_random(&random) % MIB(1);
        s->lighten_levels = (unsigned)(script_random(&random) % 3);
        rig.ops.flags = session % 7 ? REBATCH_DECLARES_MUTATION : 0;
        uint32_t learned = 0;
        for (int step = 0; step < 8; step++) {
            s->fault_count = 0;
            if (script_random(&random) % 3 == 0)
                rig_set_capacity(&rig, MIB(4) + script_random(&random) % MIB(24));
            if (script_random(&random) % 2)
                script_fail(s, SCRIPT_FORWARD, 1 + (uint32_t)(script_random(&random) % 6),
                            script_random(&random) % 2 ? SCRIPT_BEFORE : SCRIPT_WHILE,
                            (enum script_manner)(script_random(&random) % 4))
                    ->times = 1 + (uint32_t)(script_random(&random) % 3);
            const rebatch_status status = rig_step(&rig, 3 + script_random(&random) % 120);
            cr_assert(status == REBATCH_OK || status == REBATCH_E_EXHAUSTED, "%s: %s",
                      rebatch_status_name(status), rebatch_last_error());
            ok += status == REBATCH_OK;
            learned += rig.report.learned;
        }
        cr_assert_leq(learned, 8, "session %d learned from %u", session, learned);
    }
    cr_assert_gt(ok, 1200);
}

/* ---- other ways to a size ---- */

Test(step_learn, by_cost_the_budget_doubles_while_there_is_room)
{
    static size_t lengths[64];
    uint64_t random = 32;
    for (size_t i = 0; i < 64; i++)
        lengths[i] = 1 + script_random(&random) % 20;
    OPEN(rig, rig, MIB(16), &OPTIONS(.learn = REBATCH_ON, .growth = REBATCH_OFF));
    rig.script.lengths = lengths;
    rig.script.sample_bytes = KIB(50);
    for (int i = 0; i < 4; i++) {
        OK(rig_step(&rig, 64));
        cr_assert_eq(rig.report.ooms - rig.report.ooms_in[REBATCH_PHASE_ADMISSION], 0);
    }
    cr_assert_geq(rig.report.cost_after * KIB(50), MIB(16) / 2);
    cr_assert_leq(rig.report.cost_after * KIB(50), MIB(16));
    OK(rig_step(&rig, 64));
    cr_assert_eq(rig.report.learned, 0, "there is no larger one to learn");
}

static void open_lengths(struct rig *rig, const rebatch_options *options, size_t *lengths)
{
    for (size_t i = 0; i < 64; i++)
        lengths[i] = 1;
    rig_open(rig, MIB(2), options);
    rig->script.lengths = lengths;
    rig->script.sample_bytes = KIB(64); /* 32 units fit */
}

Test(step_learn, by_cost_a_larger_batch_is_learned_as_well)
{
    size_t lengths[64];
    OPEN_WITH(open_lengths, rig, rig, &OPTIONS(.learn = REBATCH_ON, .growth = REBATCH_OFF),
              lengths);
    for (int i = 0; i < 4; i++)
        OK(rig_step(&rig, 8));
    cr_assert_eq(rig.report.microbatches, 1);
    for (int i = 0; i < 4; i++)
        OK(rig_step(&rig, 64));
    cr_assert_eq(rig.report.cost_after, 32);
    cr_assert_eq(rig.report.learned, 0);
}

/* The micro-batch of 16 samples makes 12 units that stay until the update: another one of 16 is
 * then known not to fit. */
INSIDE(keep_until_the_update)
{
    void **kept = s->inside_user;
    if (callback == SCRIPT_FORWARD && mb->count == 16 && !*kept)
        return rebatch_pool_alloc(kept, mb->pool, 12 * KIB(64), mb->stream, 0);
    return callback == SCRIPT_UPDATE ? rebatch_pool_free(rebatch_get_pool(s->rb), *kept)
                                     : REBATCH_OK;
}

Test(step_learn, by_cost_an_attempt_that_is_not_admitted_ends_it)
{
    size_t lengths[64];
    void *kept = NULL;
    OPEN_WITH(open_lengths, rig, rig, &OPTIONS(.learn = REBATCH_ON, .growth = REBATCH_OFF),
              lengths);
    script_inside(&rig.script, keep_until_the_update, &kept);
    OK(rig_step(&rig, 64));
    cr_assert_eq(rig.report.ooms, 1);
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_ADMISSION], 1);
    rig.script.inside = NULL;
    for (int i = 0; i < 3; i++) {
        cr_assert_eq(rig.report.cost_after, 11, "16 of 28 units that it needs, 20 are there");
        OK(rig_step(&rig, 64));
        cr_assert_eq(rig.report.learned, 0);
    }
}

/* A micro-batch of 30 samples or more does not fit, unlike what a line through smaller ones
 * says. */
INSIDE(fail_when_large)
{
    void *more = NULL;
    (void)s;
    return callback == SCRIPT_FORWARD && mb->count >= 30
               ? rebatch_pool_alloc(&more, mb->pool, MIB(2) + KIB(64), mb->stream, 0)
               : REBATCH_OK;
}

Test(step_learn, by_cost_an_oom_leads_to_a_budget_near_the_one_that_failed)
{
    size_t lengths[64];
    OPEN_WITH(open_lengths, rig, rig, &OPTIONS(.learn = REBATCH_ON, .growth = REBATCH_OFF),
              lengths);
    script_inside(&rig.script, fail_when_large, NULL);
    for (int i = 0; i < 4; i++)
        OK(rig_step(&rig, 64));
    cr_assert_geq(rig.report.cost_after, 26);
    cr_assert_lt(rig.report.cost_after, 30);
    cr_assert_eq(rig.report.ooms, 0);
}

Test(step_learn, a_probe_ends_it)
{
    OPEN_WITH(bed_open_learning, bed, bed, MIB(12), 0);
    OK(bed_probe(&bed, 64, NULL));
    const rebatch_step_report report = bed_step(&bed, 64);
    cr_assert_eq(report.micro_before, bed.report.size);
    cr_assert_eq(report.learned, 0);
}

Test(step_learn, what_was_learned_can_be_asked)
{
    rebatch_prediction prediction;
    OPEN_WITH(bed_open_learning, bed, bed, MIB(12), 0);
    cr_assert_eq(rebatch_predict(&prediction, bed.rb, 1, 64, NULL), REBATCH_E_STATE);
    for (int i = 0; i < 3; i++)
        (void)bed_step(&bed, 64);
    const size_t size = rebatch_get_micro(bed.rb, 64);
    OK(rebatch_predict(&prediction, bed.rb, size, 64, NULL));
    cr_assert(prediction.fits);
    OK(rebatch_predict(&prediction, bed.rb, size + 1, 64, NULL));
    cr_assert(!prediction.fits);
}

Test(step_learn, a_size_to_begin_with_is_refused_beside_it)
{
    rebatch_device *device;
    rebatch *rb;
    rebatch_options options = learning();
    options.micro_start = 8;
    OK(rebatch_device_open_host(&device, MIB(8), NULL));
    FAILS_WITH(rebatch_open(&rb, device, &options), REBATCH_E_INVALID,
               "learn is on and micro_start is 8: expected 0 with it");
    options.micro_start = 0;
    options.learn = (rebatch_toggle)7;
    FAILS(rebatch_open(&rb, device, &options), REBATCH_E_INVALID, "learn is 7");
    rebatch_device_close(device);
}

/* ---- the same bits ---- */

static void train(char hash[GPT_HASH_TEXT_BYTES], size_t capacity_bytes, uint64_t failing,
                  rebatch_step_report *first)
{
    struct run_options options = tiny_run();
    options.capacity_bytes = capacity_bytes;
    options.learns = first != NULL;
    OPEN(run, run, &options);
    if (failing)
        ASSERT_OK(rebatch_fault_arm(run.device, &FAULTS(.nth = failing, .times = 1)));
    rebatch_step_report report;
    for (int i = 0; i < 3; i++) {
        ASSERT_OK(gpt_trainer_step(run.trainer, &report, NULL));
        if (i == 0 && first)
            *first = report;
    }
    run_hash(&run, hash);
}

Test(step_learn, no_bit_changes, .description = "seed 1, 3 steps of 16")
{
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    train(want, 0, 0, NULL);
    for (size_t kib = 2304; kib <= 6144; kib += 256 * stride_of_cases(8)) {
        rebatch_step_report first;
        train(got, kib << 10, 0, &first);
        cr_assert_str_eq(got, want, "%zu KiB", kib);
        cr_assert_geq(first.learned, 2);
    }
}

Test(step_learn, no_bit_changes_when_memory_fails, .description = "seed 1, 3 steps of 16")
{
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    train(want, 0, 0, NULL);
    for (uint64_t nth = 1; nth <= 120; nth += 3 * stride_of_cases(8)) {
        rebatch_step_report first;
        train(got, 4 << 20, nth, &first);
        cr_assert_str_eq(got, want, "call %d", (int)nth);
    }
}
