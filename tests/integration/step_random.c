/* Owns the exactly-once tests: random OOMs in every callback, in every manner, over many steps.
 * Must not know more of the library than its public headers say. */
#include "step_common.h"

#define STEPS_OF_A_TEST 6000

/* How often each end of a step came up, so that the tests are known to have seen them all. */
struct seen {
    unsigned ok, exhausted, torn, own;
    unsigned ooms_in[REBATCH_PHASE_COUNT];
    unsigned grown, lightened;
};

static bool one_in(uint64_t *random, size_t n)
{
    return below(random, n) == 0;
}

static rebatch_options random_options(uint64_t *random)
{
    rebatch_options o = REBATCH_OPTIONS_INIT;
    o.micro_start = below(random, 65);
    if (one_in(random, 3))
        o.micro_smallest = 1 + below(random, o.micro_start ? o.micro_start : 4);
    if (one_in(random, 3))
        o.micro_largest = (o.micro_start > o.micro_smallest ? o.micro_start : o.micro_smallest) +
                          1 + below(random, 70);
    if (one_in(random, 3))
        o.max_attempts = 1 + (uint32_t)below(random, 12);
    o.on_oom = one_in(random, 12) ? REBATCH_ON_OOM_STOP : REBATCH_ON_OOM_HALVE;
    o.pool.caching = one_in(random, 4) ? REBATCH_OFF : REBATCH_ON;
    o.admission = one_in(random, 3) ? REBATCH_OFF : REBATCH_ON;
    o.lighten = one_in(random, 4) ? REBATCH_OFF : REBATCH_ON;
    o.growth = one_in(random, 4) ? REBATCH_OFF : REBATCH_ON;
    o.grow_after = 1 + (uint32_t)below(random, 4);
    o.grow_wait_max = o.grow_after + (uint32_t)below(random, 16);
    return o;
}

static void random_script(struct rig *rig, uint64_t *random)
{
    struct script *s = &rig->script;
    rig->ops.flags = one_in(random, 2) ? REBATCH_DECLARES_MUTATION : 0;
    s->declares = rig->ops.flags || !one_in(random, 3);
    s->reserves = one_in(random, 2);
    s->zero_bytes = one_in(random, 2) ? below(random, KIB(64)) : 0;
    s->update_bytes = one_in(random, 2) ? below(random, KIB(64)) : 0;
    s->base_bytes = one_in(random, 2) ? below(random, KIB(512)) : 0;
    s->sample_bytes = one_in(random, 3) ? 0 : below(random, KIB(256));
    s->late_bytes = one_in(random, 2) ? below(random, KIB(512)) : 0;
    s->lighten_levels = (unsigned)below(random, 3);
}

static void random_faults(struct script *s, uint64_t *random)
{
    static const enum script_callback callbacks[] = {SCRIPT_FORWARD, SCRIPT_FORWARD, SCRIPT_FORWARD,
                                                     SCRIPT_FORWARD, SCRIPT_ZERO,    SCRIPT_UPDATE,
                                                     SCRIPT_LIGHTEN};
    static const enum script_manner manners[] = {SCRIPT_RETURN, SCRIPT_POOL, SCRIPT_ESCAPE,
                                                 SCRIPT_SWALLOW};
    size_t faults = 1 + below(random, 3);
    while (faults--) {
        const enum script_callback callback = callbacks[below(random, 7)];
        const uint32_t nth = 1 + (uint32_t)below(random, callback == SCRIPT_FORWARD ? 12 : 2);
        const enum script_when when = one_in(random, 2) ? SCRIPT_BEFORE : SCRIPT_WHILE;
        enum script_manner manner = manners[below(random, 4)];
        if (one_in(random, 15))
            manner = one_in(random, 2) ? SCRIPT_OWN : SCRIPT_OWN_ESCAPE;
        struct script_fault *fault = script_fail(s, callback, nth, when, manner);
        fault->times = one_in(random, 12) ? SCRIPT_FOREVER : 1 + (uint32_t)below(random, 3);
        if (one_in(random, 3))
            fault->more_than = below(random, 40);
    }
}

static void count(struct seen *seen, const struct rig *rig, rebatch_status status)
{
    seen->ok += status == REBATCH_OK;
    seen->exhausted += status == REBATCH_E_EXHAUSTED;
    seen->torn += status == REBATCH_E_TORN;
    seen->own += status == SCRIPT_STATUS;
    for (size_t i = 0; i < REBATCH_PHASE_COUNT; i++)
        seen->ooms_in[i] += rig->report.ooms_in[i];
    seen->grown += rig_event(rig, REBATCH_EVENT_GROW) != NULL;
    seen->lightened += rig_event(rig, REBATCH_EVENT_LIGHTEN) != NULL;
}

/* What the accumulators hold after EXHAUSTED: the samples before the failed micro-batch, unless the
 * OOM struck while accumulating. */
static void check_exhausted(const struct rig *rig)
{
    const struct script *s = &rig->script;
    size_t done = 0;
    for (size_t i = 0; i < s->call_count; i++) {
        const struct script_call *call = &s->calls[i];
        if (call->callback == SCRIPT_ZERO && call->answer == REBATCH_OK)
            done = 0;
        if (call->callback == SCRIPT_ZERO && call->answer != REBATCH_OK)
            return; /* not even zeroed */
        if (call->callback == SCRIPT_FORWARD && call->answer == REBATCH_OK)
            done = call->first + call->count;
        const bool after = call->callback == SCRIPT_FORWARD && call->answer != REBATCH_OK &&
                           (call->mutated || !s->declares);
        if (after && (i + 1 == s->call_count || s->calls[i + 1].callback == SCRIPT_LIGHTEN))
            return; /* something in between */
    }
    cr_assert(script_holds(s, done), "after EXHAUSTED the accumulators do not hold %zu samples",
              done);
}

/* One session in two is mostly short of memory, the other mostly has faults; one in two has its
 * steps written in place. */
static void run_session(uint64_t *random, unsigned steps, struct seen *seen)
{
    const bool short_of_memory = one_in(random, 2);
    const rebatch_options options = random_options(random);
    OPEN(rig, rig, MIB(40), &options);
    random_script(&rig, random);
    rig.in_place = one_in(random, 2);
    while (steps--) {
        if (one_in(random, short_of_memory ? 2 : 20))
            rig_set_capacity(&rig, MIB(1) + below(random, one_in(random, 2) ? MIB(40) : MIB(10)));
        rig.script.fault_count = 0;
        if (short_of_memory ? one_in(random, 20) : !one_in(random, 4))
            random_faults(&rig.script, random);
        const rebatch_status status = rig_step(&rig, 1 + below(random, 130));
        cr_assert(status == REBATCH_OK || status == REBATCH_E_EXHAUSTED ||
                      status == REBATCH_E_TORN || status == SCRIPT_STATUS,
                  "%s: %s", rebatch_status_name(status), rebatch_last_error());
        if (status == REBATCH_E_EXHAUSTED)
            check_exhausted(&rig);
        if (status != REBATCH_OK)
            script_restore(&rig.script);
        count(seen, &rig, status);
    }
}

/* Sessions of 40 steps each. rig_step() holds every step against the contract's table. */
static void run_sessions(uint64_t seed)
{
    struct seen seen = {0};
    uint64_t random = seed;
    for (unsigned steps = 0; steps < STEPS_OF_A_TEST; steps += 40)
        run_session(&random, 40, &seen);
    /* That all of it came up is a property of the seeds. */
    cr_assert_gt(seen.ok, STEPS_OF_A_TEST / 2);
    cr_assert_gt(seen.exhausted, 100);
    cr_assert_gt(seen.torn, 50);
    cr_assert_gt(seen.own, 20);
    cr_assert_gt(seen.grown, 100);
    cr_assert_gt(seen.lightened, 20);
    for (size_t i = 0; i < REBATCH_PHASE_RESIZE; i++) /* step_resize has its own */
        cr_assert_gt(seen.ooms_in[i], 20, "too few OOMs in phase %zu", i);
}

Test(step_random, every_sample_counts_once_and_no_update_twice_seed_1)
{
    run_sessions(1);
}

Test(step_random, every_sample_counts_once_and_no_update_twice_seed_2)
{
    run_sessions(2);
}

Test(step_random, every_sample_counts_once_and_no_update_twice_seed_3)
{
    run_sessions(3);
}

Test(step_random, every_sample_counts_once_and_no_update_twice_seed_4)
{
    run_sessions(4);
}

/* Seed 5: every start size, with OOMs that come and go. */
Test(step_random, every_start_size_and_batch_under_random_ooms)
{
    uint64_t random = 5;
    for (size_t start = 0; start <= 64; start++) {
        OPEN(rig, rig, MIB(24), &OPTIONS(.micro_start = start, .grow_after = 2));
        for (size_t batch = 1; batch <= 130; batch += 1 + below(&random, 3)) {
            rig.script.fault_count = 0;
            script_fail(&rig.script, SCRIPT_FORWARD, 1 + (uint32_t)below(&random, 4),
                        one_in(&random, 2) ? SCRIPT_BEFORE : SCRIPT_WHILE, SCRIPT_RETURN)
                ->more_than = 1; /* so that the smallest size never fails */
            OK(rig_step(&rig, batch));
        }
    }
}
