/* Owns the tests of cutting by cost: where it cuts, what an OOM does to the budget, how it grows.
 * Seeds of what is random: 21 to 23.
 * Must not know more of the library than its public headers say. */
#include "step_common.h"

/* A rig whose samples need 64 KiB a unit of length: `length` each, unless that is 0. */
static void open_long(struct rig *rig, size_t capacity_bytes, const rebatch_options *options,
                      size_t *lengths, size_t length)
{
    for (size_t i = 0; i < SCRIPT_SAMPLES && length; i++)
        lengths[i] = length;
    rig_open(rig, capacity_bytes, options);
    rig->script.sample_bytes = KIB(64);
    rig->script.lengths = lengths;
}

/* ---- where it cuts ---- */

Test(step_cost, each_microbatch_stays_within_the_budget_and_the_limits)
{
    static const struct {
        const char *what;
        size_t start, largest, multiple;
        size_t length;            /* of each sample, but for */
        size_t at[2], lengths[2]; /* these */
        size_t batch;
        const char *trace;
        uint64_t cost; /* before and after the step; 0: no bound */
    } cases[] = {
        {.what = "4 x 2; with sample 9 in it 1 x 2, then 1 x 5",
         .start = 4,
         .length = 2,
         .at = {9},
         .lengths = {5},
         .batch = 16,
         .trace = "z f0+4 f4+4 f8+1 f9+1 f10+4 f14+2 u",
         .cost = 8},
        {.what = "without a start size the first budget has no bound",
         .length = 3,
         .batch = 40,
         .trace = "z f0+40 u"},
        {.what = "a sample beyond the budget runs alone",
         .start = 4,
         .length = 1,
         .at = {6},
         .lengths = {100},
         .batch = 12,
         .trace = "z f0+4 f4+2 f6+1 f7+4 f11+1 u",
         .cost = 4},
        {.what = "the limits on the size hold as well",
         .start = 8,
         .largest = 12,
         .multiple = 4,
         .length = 1,
         .at = {0, 25},
         .lengths = {7, 10},
         .batch = 39,
         .trace = "z f0+8 f8+12 f20+4 f24+4 f28+11 u",
         .cost = 56},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t lengths[SCRIPT_SAMPLES];
        OPEN_WITH(open_long, rig, rig, MIB(64),
                  &OPTIONS(.micro_start = cases[i].start, .micro_largest = cases[i].largest,
                           .micro_multiple_of = cases[i].multiple, .growth = REBATCH_OFF),
                  lengths, cases[i].length);
        for (size_t k = 0; k < 2; k++)
            if (cases[i].lengths[k])
                lengths[cases[i].at[k]] = cases[i].lengths[k];
        OK(rig_step(&rig, cases[i].batch));
        cr_assert_str_eq(script_trace(&rig.script), cases[i].trace, "%s: %s", cases[i].what,
                         script_trace(&rig.script));
        cr_assert_eq(rig.report.cost_before, cases[i].cost, "%s", cases[i].what);
        cr_assert_eq(rig.report.cost_after, cases[i].cost, "%s", cases[i].what);
    }
}

static struct {
    unsigned calls;
    size_t most; /* samples in one call */
} asked;

static uint64_t count_calls(size_t first, size_t count, void *user)
{
    asked.calls++;
    asked.most = count > asked.most ? count : asked.most;
    return script_cost(first, count, user);
}

Test(step_cost, the_cost_is_asked_for_little)
{
    size_t lengths[SCRIPT_SAMPLES];
    OPEN_WITH(open_long, rig, rig, MIB(64), &OPTIONS(.micro_start = 10), lengths, 1);
    rig.cost = count_calls;
    OK(rig_step(&rig, 500));
    cr_assert_eq(rig.report.microbatches, 50);
    cr_assert_leq(asked.calls, 20 * 50);
    cr_assert_leq(asked.most, 20);
}

/* ---- OOMs ---- */

Test(step_cost, an_oom_halves_the_cost_and_long_samples_leave_the_others_alone)
{
    size_t lengths[SCRIPT_SAMPLES];
    OPEN_WITH(open_long, rig, rig, MIB(2), NULL, lengths, 1); /* 32 units */
    lengths[10] = 16;
    OK(rig_step(&rig, 64));
    /* 64 x 16 = 1024, halved to 32; with sample 10 in it, 2 x 16 */
    cr_assert_eq(rig.report.cost_after, 32);
    cr_assert_eq(script_calls(&rig.script, SCRIPT_UPDATE), 1);
    STEP(&rig, 64, REBATCH_OK, "z f0+10 f10+2 f12+32 f44+20 u");
    cr_assert_eq(rig.report.ooms, 0);
}

Test(step_cost, a_long_sample_that_does_not_fit_alone_does_not_shrink_the_budget)
{
    size_t lengths[SCRIPT_SAMPLES];
    OPEN_WITH(open_long, rig, rig, MIB(2), &OPTIONS(.micro_start = 16), lengths, 1);
    lengths[20] = 100;
    cr_assert_eq(rig_step(&rig, 64), REBATCH_E_EXHAUSTED);
    cr_assert_eq(rig.report.cost_after, 16);
    lengths[20] = 1;
    STEP(&rig, 64, REBATCH_OK, "z f0+16 f16+16 f32+16 f48+16 u");
}

Test(step_cost, events_and_report_say_the_cost)
{
    size_t lengths[SCRIPT_SAMPLES];
    char text[512];
    OPEN_WITH(open_long, rig, rig, MIB(2), &OPTIONS(.micro_start = 16), lengths, 4);
    OK(rig_step(&rig, 32));
    const rebatch_event *event = rig_event(&rig, REBATCH_EVENT_SHRINK);
    cr_assert_not_null(event);
    cr_assert_eq(event->cost, 64);
    cr_assert_eq(event->cost_before, 64);
    cr_assert_eq(event->cost_after, 32);
    rebatch_event_format(text, sizeof text, event);
    cr_assert(strstr(text, "samples 0-15, cost 64, need at least 16.0 MiB") == NULL &&
                  strstr(text, "cost 64, need at least 4.00 MiB") &&
                  strstr(text, "; budget 64 -> 32"),
              "%s", text);
    cr_assert_eq(rig.report.cost_before, 64);
    cr_assert_eq(rig.report.cost_after, 32);
}

/* ---- what was learned goes by cost ---- */

Test(step_cost, admission_refuses_a_cost_that_is_known_not_to_fit)
{
    size_t lengths[SCRIPT_SAMPLES];
    OPEN_WITH(open_long, rig, rig, MIB(2),
              &OPTIONS(.micro_start = 32, .on_oom = REBATCH_ON_OOM_FIT), lengths, 1);
    lengths[40] = 8;
    OK(rig_step(&rig, 64));
    rig_set_capacity(&rig, MIB(1)); /* 16 units */
    OK(rig_step(&rig, 64));
    cr_assert_eq(rig.report.ooms, 1);
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_ADMISSION], 1);
    cr_assert_eq(rig.report.cost_after, 16);
    cr_assert_str_eq(script_trace(&rig.script), "z f0+16 f16+16 f32+8 f40+2 f42+16 f58+6 u");
}

Test(step_cost, growth_goes_by_cost)
{
    size_t lengths[SCRIPT_SAMPLES];
    OPEN_WITH(open_long, rig, rig, MIB(2), &OPTIONS(.micro_start = 2, .grow_after = 1), lengths,
              2); /* 32 units */
    size_t budget = 4;
    for (int i = 0; i < 12; i++) {
        OK(rig_step(&rig, 64));
        cr_assert_eq(rig.report.ooms, 0);
        cr_assert_leq(rig.report.cost_after, 2 * budget);
        budget = rig.report.cost_after;
    }
    cr_assert_eq(budget, 32, "%zu", budget);
}

Test(step_cost, a_failed_growth_returns_to_the_budget_before_it)
{
    size_t lengths[SCRIPT_SAMPLES];
    OPEN_WITH(open_long, rig, rig, MIB(2), &OPTIONS(.micro_start = 10, .grow_after = 1), lengths,
              2); /* 32 units */
    OK(rig_step(&rig, 64));
    cr_assert_eq(rig.report.cost_before, 20);
    cr_assert_eq(rig.report.cost_after, 32);
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL)->more_than = 10;
    OK(rig_step(&rig, 64));
    cr_assert_eq(rig.report.ooms, 1);
    cr_assert_eq(rig.report.cost_after, 20);
}

Test(step_cost, a_budget_that_cuts_nothing_does_not_grow)
{
    size_t lengths[SCRIPT_SAMPLES];
    OPEN_WITH(open_long, rig, rig, MIB(2), &OPTIONS(.micro_start = 8, .grow_after = 1), lengths, 1);
    OK(rig_step(&rig, 16));
    const uint64_t budget = rig.report.cost_after;
    cr_assert_eq(budget, 16);
    for (int i = 0; i < 10; i++)
        OK(rig_step(&rig, 5));
    cr_assert_eq(rig.report.cost_after, budget);
}

Test(step_cost, steps_with_and_without_cost_keep_their_own_sizes)
{
    size_t lengths[SCRIPT_SAMPLES];
    OPEN_WITH(open_long, rig, rig, MIB(1), &OPTIONS(.micro_start = 8, .growth = REBATCH_OFF),
              lengths, 4); /* 16 units */
    for (int i = 0; i < 3; i++) {
        rig.script.lengths = lengths;
        OK(rig_step(&rig, 16));
        cr_assert_eq(rig.report.cost_after, 16);
        rig.script.lengths = NULL;
        STEP(&rig, 16, REBATCH_OK, "z f0+8 f8+8 u");
        cr_assert_eq(rig.report.cost_after, 0);
        cr_assert_eq(rig.report.cost_before, 0);
    }
}

/* ---- the probe ---- */

Test(step_cost, a_probe_finds_a_budget)
{
    size_t lengths[SCRIPT_SAMPLES];
    uint64_t random = 21;
    for (size_t i = 0; i < SCRIPT_SAMPLES; i++)
        lengths[i] = 1 + below(&random, 7);
    rebatch_probe_report report;
    rebatch_step_ops ops = script_ops();
    ops.lighten = NULL;
    ops.cost = script_cost;
    OPEN_WITH(open_long, rig, rig, MIB(4), NULL, lengths, 0); /* 64 units */
    rig.script.batch = 128;
    rig.script.is_probed = true;
    OK(rebatch_probe(rig.rb, &ops, 128, &rig.script, NULL, &report));
    rig.script.is_probed = false;
    cr_assert_eq(report.ooms, 0);
    cr_assert(56 < report.size && report.size <= 64, "%zu", report.size);
    for (int i = 0; i < 10; i++) {
        OK(rig_step(&rig, 128));
        cr_assert_eq(rig.report.ooms, 0);
        cr_assert_geq(rig.report.cost_after, report.size);
        cr_assert_leq(rig.report.microbatches, 18);
    }
}

/* ---- all of it, by chance ---- */

static rebatch_options random_options(uint64_t *random)
{
    rebatch_options o = REBATCH_OPTIONS_INIT;
    o.micro_multiple_of = below(random, 3) ? 0 : 1 + below(random, 5);
    o.micro_start = below(random, 2) ? o.micro_multiple_of * (1 + below(random, 8)) : 0;
    o.on_oom = below(random, 2) ? REBATCH_ON_OOM_FIT : REBATCH_ON_OOM_HALVE;
    o.admission = below(random, 3) ? REBATCH_ON : REBATCH_OFF;
    o.grow_after = 1 + (uint32_t)below(random, 4);
    return o;
}

static void random_lengths(size_t *lengths, uint64_t *random)
{
    for (size_t i = 0; i < SCRIPT_SAMPLES; i++) {
        lengths[i] = 1 + below(random, 8);
        if (below(random, 20) == 0)
            lengths[i] = below(random, 64); /* 0 too */
    }
}

/* Room comes and goes, callbacks fail before and after mutating; rig_step() holds every step
 * against the contract. */
static void run_sessions(uint64_t seed)
{
    size_t lengths[SCRIPT_SAMPLES];
    uint64_t random = seed;
    unsigned ok = 0;
    unsigned ooms = 0;
    unsigned grown = 0;
    for (unsigned session = 0; session < 60; session++) {
        const rebatch_options options = random_options(&random);
        OPEN_WITH(open_long, rig, rig, MIB(16), &options, lengths, 0);
        rig.script.late_bytes = below(&random, 2) ? below(&random, KIB(512)) : 0;
        rig.script.reserves = below(&random, 2);
        for (int step = 0; step < 50; step++) {
            random_lengths(lengths, &random);
            if (below(&random, 6) == 0)
                rig_set_capacity(&rig, MIB(1) + below(&random, MIB(8)));
            rig.script.fault_count = 0;
            if (below(&random, 6) == 0)
                script_fail(&rig.script, SCRIPT_FORWARD, 1 + (uint32_t)below(&random, 9),
                            below(&random, 2) ? SCRIPT_BEFORE : SCRIPT_WHILE, SCRIPT_RETURN);
            const rebatch_status status = rig_step(&rig, 5 + below(&random, 126));
            cr_assert(status == REBATCH_OK || status == REBATCH_E_EXHAUSTED, "%s",
                      rebatch_last_error());
            ok += status == REBATCH_OK;
            ooms += rig.report.ooms;
            grown += rig_event(&rig, REBATCH_EVENT_GROW) != NULL;
        }
    }
    cr_assert_gt(ok, 1500);
    cr_assert_gt(ooms, 1000);
    cr_assert_gt(grown, 100);
}

Test(step_cost, every_sample_counts_once_seed_22)
{
    run_sessions(22);
}

Test(step_cost, every_sample_counts_once_seed_23)
{
    run_sessions(23);
}

/* A cost that falls, rises and says nothing true: OOMs, but never a wrong result. */
static uint64_t nonsense(size_t first, size_t count, void *user)
{
    (void)user;
    uint64_t state = first * 1000 + count;
    return script_random(&state) % 64;
}

Test(step_cost, a_wrong_cost_never_gives_a_wrong_result)
{
    size_t lengths[SCRIPT_SAMPLES];
    uint64_t random = 24;
    for (int session = 0; session < 40; session++) {
        const rebatch_options options = random_options(&random);
        OPEN_WITH(open_long, rig, rig, MIB(16), &options, lengths, 0);
        rig.cost = nonsense;
        for (int step = 0; step < 30; step++) {
            random_lengths(lengths, &random);
            rig_set_capacity(&rig, MIB(1) + below(&random, MIB(8)));
            const rebatch_status status = rig_step(&rig, 5 + below(&random, 60));
            cr_assert(status == REBATCH_OK || status == REBATCH_E_EXHAUSTED);
        }
    }
}
