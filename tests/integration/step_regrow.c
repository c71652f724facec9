/* Owns the tests of a promise: when memory has been there for long enough, micro-batches are as
 * large as the limits allow again, and no lighter level is left in force.
 * Must not know more of the library than its public headers say. */
#include "step_common.h"

#define SEEDS 60
#define SHORT_STEPS 40 /* with too little memory */
#define GROW_AFTER 2
#define GROW_WAIT_MAX 6
#define ENOUGH_BYTES MIB(512)

/* A training whose samples differ in length, up to forty times. */
struct training {
    struct rig rig;
    size_t lengths[SCRIPT_SAMPLES];
    size_t batch;
    bool varies_without_cost;
};

static size_t sum_of(const struct training *t, size_t first, size_t count)
{
    size_t sum = 0;
    for (size_t i = first; i < first + count; i++)
        sum += t->lengths[i];
    return sum;
}

/* Memory by the lengths of the samples, where the script's own is by their number. */
INSIDE(use_lengths)
{
    const struct training *t = s->inside_user;
    if (callback != SCRIPT_FORWARD)
        return REBATCH_OK;
    if (mb->probing) /* each trial is a first attempt */
        memset(s->tries, 0, sizeof s->tries);
    void *block;
    const size_t bytes = (sum_of(t, mb->first, mb->count) * KIB(16)) >> s->level;
    const rebatch_status status = rebatch_pool_alloc(&block, mb->pool, bytes, mb->stream, 0);
    return status ? status : rebatch_pool_free(mb->pool, block);
}

static uint64_t cost_of_lengths(size_t first, size_t count, void *user)
{
    const struct script *s = user;
    return sum_of(s->inside_user, first, count);
}

static void open_training(struct training *t, uint64_t seed, rebatch_options o, bool has_cost)
{
    uint64_t random = seed;
    size_t longest = 0;
    t->batch = 8 + below(&random, 56);
    for (size_t i = 0; i < SCRIPT_SAMPLES; i++) {
        t->lengths[i] = 1 + below(&random, below(&random, 4) ? 4 : 40);
        if (i < t->batch && t->lengths[i] > longest)
            longest = t->lengths[i];
    }
    const size_t least = longest * KIB(16), most = sum_of(t, 0, t->batch) * KIB(16);
    o.grow_after = GROW_AFTER;
    o.grow_wait_max = GROW_WAIT_MAX;
    rig_open(&t->rig, least + below(&random, most - least + 1) + KIB(256), &o);
    script_inside(&t->rig.script, use_lengths, t);
    t->rig.cost = has_cost ? cost_of_lengths : NULL;
}

/* Each doubling, and each level, waits for no longer than for a prediction to be overruled, and may
 * have to be done twice: a growth that fails is tried again. */
static unsigned most_steps(const struct training *t)
{
    unsigned doublings = 1;
    while (((size_t)1 << doublings) < t->batch)
        doublings++;
    return 2 * (doublings + t->rig.script.lighten_levels + 1) * (2 * GROW_WAIT_MAX + 1);
}

static void check_regrowth(struct training *t, uint64_t seed)
{
    rig_set_capacity(&t->rig, ENOUGH_BYTES);
    for (unsigned left = most_steps(t); left > 0; left--) {
        OK(rig_step(&t->rig, t->batch));
        if (t->rig.report.microbatches == 1 && t->rig.script.level == 0)
            return;
    }
    cr_assert_fail("seed %ju: %u micro-batches at level %u, and there is room for one at level 0",
                   (uintmax_t)seed, t->rig.report.microbatches, t->rig.script.level);
}

static void run_short(struct training *t)
{
    for (unsigned i = 0; i < SHORT_STEPS; i++)
        OK(rig_step(&t->rig, t->batch));
}

static void probe(struct training *t)
{
    struct script *s = &t->rig.script;
    rebatch_step_ops ops = t->rig.ops;
    ops.cost = t->rig.cost;
    s->batch = t->batch;
    s->is_probed = true;
    OK(rebatch_probe(t->rig.rb, &ops, t->batch, s, NULL, NULL));
    s->is_probed = false;
}

/* Over seeds 0 to 59: `with` sets the options, and what else there is. */
static void run_seeds(rebatch_options options, bool has_cost, bool has_probe)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        struct training t;
        rebatch_options o = options;
        open_training(&t, seed, o, has_cost);
        if (has_probe)
            probe(&t);
        run_short(&t);
        check_regrowth(&t, seed);
        rig_close(&t.rig);
    }
}

Test(step_regrow, when_memory_is_back_the_size_is_the_largest)
{
    run_seeds((rebatch_options)REBATCH_OPTIONS_INIT, false, false);
}

Test(step_regrow, after_learning_it_is)
{
    rebatch_options o = REBATCH_OPTIONS_INIT;
    o.learn = REBATCH_ON;
    run_seeds(o, false, false);
    run_seeds(o, true, false);
}

Test(step_regrow, after_a_probe_it_is)
{
    rebatch_options o = REBATCH_OPTIONS_INIT;
    run_seeds(o, false, true);
    o.on_oom = REBATCH_ON_OOM_FIT;
    run_seeds(o, false, true);
    run_seeds(o, true, true);
}

Test(step_regrow, with_a_cost_nothing_is_cut)
{
    run_seeds((rebatch_options)REBATCH_OPTIONS_INIT, true, false);
}

Test(step_regrow, every_lighter_level_is_left)
{
    for (int has_cost = 0; has_cost < 2; has_cost++)
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
            struct training t;
            open_training(&t, seed, (rebatch_options)REBATCH_OPTIONS_INIT, has_cost);
            t.rig.script.lighten_levels = 2;
            /* Out of memory whatever the size, until level 1 or 2 is in force. */
            script_fail(&t.rig.script, SCRIPT_ZERO, 1, SCRIPT_BEFORE, SCRIPT_RETURN)->times =
                1 + seed % 2;
            OK(rig_step(&t.rig, t.batch));
            cr_assert_eq(t.rig.script.level, 1 + seed % 2);
            t.rig.script.fault_count = 0;
            run_short(&t);
            check_regrowth(&t, seed);
            rig_close(&t.rig);
        }
}

/* A model of a time when a sample needed a thousand times as much. */
Test(step_regrow, a_prediction_that_is_wrong_for_good_is_overruled)
{
    for (int has_cost = 0; has_cost < 2; has_cost++) {
        size_t lengths[SCRIPT_SAMPLES];
        for (size_t i = 0; i < SCRIPT_SAMPLES; i++)
            lengths[i] = 1;
        OPEN(rig, rig, MIB(16), &OPTIONS(.grow_after = GROW_AFTER, .grow_wait_max = GROW_WAIT_MAX));
        rig.script.lengths = has_cost ? lengths : NULL;
        rig.script.sample_bytes = MIB(1);
        rig.script.is_probed = true;
        rig.script.batch = 64;
        rig.ops.cost = has_cost ? script_cost : NULL;
        rebatch_probe_report report;
        OK(rebatch_probe(rig.rb, &rig.ops, 64, &rig.script, NULL, &report));
        cr_assert_lt(report.size, 20);
        rig.script.is_probed = false;
        rig.script.sample_bytes = KIB(1);
        for (unsigned i = 0; i < 2 * GROW_WAIT_MAX; i++)
            OK(rig_step(&rig, 64));
        for (unsigned i = 0; i < 6 * (2 * GROW_WAIT_MAX); i++)
            OK(rig_step(&rig, 64));
        cr_assert_eq(rig.report.microbatches, 1, "with%s cost: still %u micro-batches",
                     has_cost ? "" : "out", rig.report.microbatches);
    }
}

/* ---- the limits on the way back ---- */

Test(step_regrow, a_rest_that_ran_lighter_does_not_lift_the_limits)
{
    static const size_t batches[] = {64, 3, 3, 64, 64};
    OPEN(rig, rig, MIB(16), &OPTIONS(.micro_smallest = 4, .micro_largest = 8, .grow_after = 1));
    rig.script.lighten_levels = 1;
    for (size_t i = 0; i < sizeof batches / sizeof *batches; i++) {
        rig.script.fault_count = 0;
        if (i == 1)
            script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_RETURN);
        OK(rig_step(&rig, batches[i])); /* which looks at every size */
        cr_assert_eq(rig.script.level, i == 1);
    }
    cr_assert_eq(rig.report.microbatches, 8);
}

Test(step_regrow, a_level_that_a_resumed_training_entered_is_left_when_there_is_room)
{
    cr_assert_eq(rebatch_set_lighten(NULL, 1), REBATCH_E_INVALID);
    OPEN(rig, rig, MIB(16), &OPTIONS(.grow_after = 1));
    rig.script.lighten_levels = 2;
    rig.script.level = 2; /* the program's own doing */
    OK(rebatch_set_lighten(rig.rb, 2));
    for (unsigned step = 0; step < 3; step++) {
        OK(rig_step(&rig, 2));
        cr_assert_eq(rig.script.level, step < 2 ? 1 - step : 0);
    }
    cr_assert_eq(rig.report.lighten_level, 0);
}
