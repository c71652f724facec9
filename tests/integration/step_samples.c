/* Owns the tests of how the effective batch is cut, and of what an attempt may allocate and free.
 * Must not know more of the library than its public headers say. */
#include <pthread.h>

#include "step_common.h"

static void open_cut(struct rig *rig, size_t start, size_t smallest, size_t largest)
{
    rig_open(rig, MIB(64),
             &OPTIONS(.micro_start = start, .micro_smallest = smallest, .micro_largest = largest,
                      .growth = REBATCH_OFF));
}

/* ---- cutting ---- */

Test(step_samples, the_batch_is_cut_by_the_sizes_and_what_is_left_comes_last)
{
    static const struct rig_case cases[] = {
        {.what = "without a start size the batch is one micro-batch",
         .batch = 37,
         .micro_before = 37,
         .trace = "z f0+37 u"},
        {.what = "a batch that does not divide has a smaller last one",
         .micro_start = 16,
         .batch = 70,
         .trace = "z f0+16 f16+16 f32+16 f48+16 f64+6 u"},
        {.what = "micro_largest is never exceeded",
         .micro_largest = 12,
         .batch = 40,
         .micro_before = 12,
         .trace = "z f0+12 f12+12 f24+12 f36+4 u"},
    };
    RIG_RUN_CASES(cases);
}

Test(step_samples, what_fails_is_halved_down_to_the_smallest)
{
    static const struct rig_case cases[] = {
        {.what = "odd sizes are halved downwards",
         .micro_start = 7,
         .faults = {{.callback = SCRIPT_FORWARD, .nth = 1, .times = 2, .manner = SCRIPT_POOL}},
         .batch = 7,
         .trace = "z f0+7! f0+3~1! f0+1~2 f1+1~2 f2+1~2 f3+1~1 f4+1~1 f5+1~1 f6+1~1 u"},
        {.what = "micro_smallest is undercut by the last micro-batch alone",
         .micro_start = 7,
         .micro_smallest = 4,
         .faults = {{.callback = SCRIPT_FORWARD, .nth = 1, .manner = SCRIPT_POOL}},
         .batch = 14,
         .trace = "z f0+7! f0+4~1 f4+4~1 f8+4 f12+2 u"},
        {.what = "a last one that fails is halved by its own size",
         .micro_start = 16,
         .faults = {{.callback = SCRIPT_FORWARD, .nth = 2, .manner = SCRIPT_POOL}},
         .batch = 22,
         .trace = "z f0+16 f16+6! f16+3~1 f19+3~1 u"},
    };
    RIG_RUN_CASES(cases);
}

Test(step_samples, a_batch_smaller_than_the_microbatch_is_one_microbatch)
{
    OPEN_WITH(open_cut, rig, rig, 16, 0, 0);
    cr_assert_eq(rebatch_get_micro(rig.rb, 5), 5);
    STEP(&rig, 5, REBATCH_OK, "z f0+5 u");
    STEP(&rig, 1, REBATCH_OK, "z f0+1 u");
    cr_assert_eq(rebatch_get_micro(rig.rb, 64), 16,
                 "a small batch changed the size for large ones");
}

Test(step_samples, every_start_size_and_batch_counts_every_sample_once)
{
    for (size_t start = 0; start <= 64; start++) {
        OPEN_WITH(open_cut, rig, rig, start, 0, 0);
        for (size_t batch = 1; batch <= 67; batch++)
            OK(rig_step(&rig, batch)); /* rig_step() checks the marks */
    }
}

Test(step_samples, the_attempt_number_is_how_often_the_samples_were_tried)
{
    static const struct rig_case cases[] = {
        {.what = "of those samples alone, then of the batch",
         .micro_start = 8,
         .faults =
             {{.callback = SCRIPT_FORWARD, .nth = 2, .manner = SCRIPT_POOL},
              {.callback = SCRIPT_FORWARD, .nth = 4, .when = SCRIPT_WHILE, .manner = SCRIPT_POOL}},
         .batch = 18,
         .trace = "z f0+8 f8+8! f8+4~1 f12+4~1! z f0+2~1 f2+2~1 f4+2~1 f6+2~1 f8+2~2 f10+2~2 "
                  "f12+2~2 f14+2~2 f16+2 u"},
        {.what = "it begins again with the next step",
         .micro_start = 8,
         .faults =
             {{.callback = SCRIPT_FORWARD, .nth = 1, .when = SCRIPT_WHILE, .manner = SCRIPT_POOL}},
         .batch = 8,
         .trace = "z f0+8! z f0+4~1 f4+4~1 u",
         .next_trace = "z f0+4 f4+4 u"},
    };
    RIG_RUN_CASES(cases);
}

Test(step_samples, the_step_number_counts_updates_and_begins_at_zero)
{
    OPEN_WITH(open_cut, rig, rig, 8, 0, 0);
    for (uint64_t step = 0; step < 5; step++) {
        OK(rig_step(&rig, 8));
        cr_assert_eq(rig.report.step, step);
        cr_assert_eq(rig.script.calls[1].step, step);
        cr_assert_eq(rig.script.parameters[0], step + 1);
    }
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_OWN);
    cr_assert_eq(rig_step(&rig, 8), SCRIPT_STATUS);
    cr_assert_eq(rig.report.step, 5);
    rig.script.fault_count = 0;
    OK(rig_step(&rig, 8));
    cr_assert_eq(rig.report.step, 5);
}

Test(step_samples, sessions_on_one_device_do_not_disturb_each_other)
{
    OPEN_WITH(open_cut, rig, rig, 8, 0, 0);
    rebatch *other;
    OK(rebatch_open(&other, rig.device, NULL));
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    OK(rig_step(&rig, 8));
    cr_assert_eq(rebatch_get_micro(rig.rb, 8), 4);
    cr_assert_eq(rebatch_get_micro(other, 8), 8);
    rebatch_close(other);
}

/* ---- two threads ---- */

#define THREAD_STEPS 200

struct tenant {
    rebatch_device *device;
    struct script script;
    int done; /* steps in which every sample counted once, in one update */
};

static void *train_there(void *user)
{
    struct tenant *tenant = user;
    struct script *s = &tenant->script;
    const rebatch_step_ops ops = script_ops();
    if (rebatch_open(&s->rb, tenant->device, &OPTIONS(.grow_after = 2)) != REBATCH_OK)
        return NULL;
    for (int i = 0; i < THREAD_STEPS; i++) {
        memset(s->tries, 0, sizeof s->tries);
        s->call_count = 0;
        s->updates = 0;
        if (rebatch_step(s->rb, &ops, s->batch, s, NULL) != REBATCH_OK)
            break;
        tenant->done += s->whole_at_update && s->updates == 1;
        (void)rebatch_pool_trim(rebatch_get_pool(s->rb), 0, NULL); /* room for the other */
    }
    rebatch_close(s->rb);
    return NULL;
}

/* Each is the other's co-tenant: both at once do not fit as a whole, one sample each always does.
 * */
Test(step_samples, two_sessions_in_two_threads_share_a_device_too_small_for_both)
{
    static struct tenant tenants[2];
    rebatch_device *device;
    pthread_t threads[2];
    OK(rebatch_device_open_host(&device, MIB(10), NULL));
    for (size_t i = 0; i < 2; i++) {
        tenants[i].device = device;
        tenants[i].script.batch = 8;
        tenants[i].script.declares = true;
        tenants[i].script.sample_bytes = MIB(1);
        cr_assert_eq(pthread_create(&threads[i], NULL, train_there, &tenants[i]), 0);
    }
    for (size_t i = 0; i < 2; i++)
        cr_assert_eq(pthread_join(threads[i], NULL), 0);
    cr_assert_eq(used_bytes_of(device), 0);
    for (size_t i = 0; i < 2; i++)
        cr_assert_eq(tenants[i].done, THREAD_STEPS, "session %zu did %d steps", i, tenants[i].done);
    rebatch_device_close(device);
}

/* ---- what an attempt allocates and frees ---- */

struct memory {
    char *block;    /* allocated before the step or inside */
    bool frees;     /* inside frees it */
    bool allocates; /* inside allocates it and keeps it */
    rebatch_status late_free;
};

INSIDE(use_memory)
{
    struct memory *memory = s->inside_user;
    if (callback != SCRIPT_FORWARD)
        return REBATCH_OK;
    if (memory->frees) {
        OK(rebatch_pool_free(mb->pool, memory->block));
        memory->frees = false;
    }
    if (memory->allocates) {
        memory->allocates = false;
        return rebatch_pool_alloc((void **)&memory->block, mb->pool, KIB(4), mb->stream, 0);
    }
    return REBATCH_OK;
}

Test(step_samples, a_block_that_a_failed_attempt_freed_is_still_there)
{
    OPEN_WITH(open_cut, rig, rig, 8, 0, 0);
    struct memory memory = {.frees = true};
    script_inside(&rig.script, use_memory, &memory);
    rig.script.base_bytes = KIB(4); /* of the same size, so that it would take the freed block */
    rebatch_pool *pool = rebatch_get_pool(rig.rb);
    OK(rebatch_pool_alloc((void **)&memory.block, pool, KIB(4), NULL, 0));
    memset(memory.block, 0x5a, KIB(4));
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_WHILE, SCRIPT_POOL);
    OK(rig_step(&rig, 8));
    cr_assert_eq(rig.report.ooms, 1);
    size_t bytes;
    OK(rebatch_pool_block_bytes(&bytes, pool, memory.block));
    cr_assert_eq(bytes, KIB(4));
    for (size_t i = 0; i < KIB(4); i++)
        cr_assert_eq(memory.block[i], 0x5a);
    OK(rebatch_pool_free(pool, memory.block));
    cr_assert_eq(rig_live_bytes(&rig), 0);
}

Test(step_samples, a_block_that_a_successful_attempt_freed_is_gone)
{
    OPEN_WITH(open_cut, rig, rig, 8, 0, 0);
    struct memory memory = {.frees = true};
    script_inside(&rig.script, use_memory, &memory);
    rebatch_pool *pool = rebatch_get_pool(rig.rb);
    OK(rebatch_pool_alloc((void **)&memory.block, pool, KIB(4), NULL, 0));
    OK(rig_step(&rig, 8));
    cr_assert_eq(rig_live_bytes(&rig), 0);
}

Test(step_samples, what_a_successful_attempt_keeps_stays)
{
    OPEN_WITH(open_cut, rig, rig, 8, 0, 0);
    struct memory memory = {.allocates = true};
    script_inside(&rig.script, use_memory, &memory);
    OK(rig_step(&rig, 8));
    cr_assert_eq(rig_live_bytes(&rig), KIB(4));
    memset(memory.block, 1, KIB(4));
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_WHILE, SCRIPT_POOL);
    OK(rig_step(&rig, 8));
    cr_assert_eq(rig_live_bytes(&rig), KIB(4));
    OK(rebatch_pool_free(rebatch_get_pool(rig.rb), memory.block));
}

Test(step_samples, a_late_free_of_what_was_taken_back_is_ignored_and_counted)
{
    OPEN_WITH(open_cut, rig, rig, 8, 0, 0);
    struct memory memory = {.allocates = true};
    script_inside(&rig.script, use_memory, &memory);
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_RETURN)->times =
        SCRIPT_FOREVER;
    cr_assert_eq(rig_step(&rig, 1), REBATCH_E_EXHAUSTED);
    cr_assert_eq(rig_live_bytes(&rig), 0);
    rebatch_pool *pool = rebatch_get_pool(rig.rb);
    OK(rebatch_pool_free(pool, memory.block));
    const rebatch_pool_stats stats = pool_stats_of(pool);
    cr_assert_eq(stats.late_frees, 1);
    cr_assert_eq(stats.live_bytes, 0);
}

/* ---- scopes of the caller's ---- */

Test(step_samples, a_step_may_run_inside_a_scope_of_the_callers)
{
    OPEN_WITH(open_cut, rig, rig, 8, 0, 0);
    rebatch_pool *pool = rebatch_get_pool(rig.rb);
    rebatch_scope scope;
    struct memory memory = {.allocates = true};
    OK(rebatch_scope_begin(&scope, pool));
    script_inside(&rig.script, use_memory, &memory);
    script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_WHILE, SCRIPT_POOL);
    OK(rig_step(&rig, 16));
    cr_assert_eq(rig_live_bytes(&rig), 0); /* of a micro-batch that ran again with the batch */
    memory.allocates = true;
    rig.script.fault_count = 0;
    OK(rig_step(&rig, 16));
    cr_assert_eq(rig_live_bytes(&rig), KIB(4));
    OK(rebatch_scope_rollback(pool, scope));
    cr_assert_eq(rig_live_bytes(&rig), 0);
}

INSIDE(leave_a_scope_open)
{
    rebatch_scope scope;
    void *block;
    rebatch_pool *pool = rebatch_get_pool(s->rb);
    if (callback != *(enum script_callback *)s->inside_user)
        return REBATCH_OK;
    OK(rebatch_scope_begin(&scope, pool));
    return rebatch_pool_alloc(&block, pool, KIB(4), s->stream, 0);
}

/* Whether a scope is open shows in the free of an older block: it waits. */
static void expect_no_open_scope(struct rig *rig)
{
    rebatch_pool *pool = rebatch_get_pool(rig->rb);
    const uint64_t live_bytes = rig_live_bytes(rig);
    rebatch_scope scope;
    rebatch_pool_stats stats;
    void *block;
    OK(rebatch_pool_alloc(&block, pool, KIB(4), NULL, 0));
    OK(rebatch_scope_begin(&scope, pool));
    OK(rebatch_pool_free(pool, block));
    OK(rebatch_scope_commit(pool, scope));
    OK(rebatch_pool_get_stats(&stats, pool));
    cr_assert_eq(stats.deferred_bytes, 0);
    cr_assert_eq(stats.live_bytes, live_bytes);
}

Test(step_samples, scopes_that_a_failed_callback_left_open_are_closed)
{
    static const struct {
        enum script_callback callback;
        enum script_when when;
        rebatch_status expected;
    } cases[] = {{SCRIPT_ZERO, SCRIPT_WHILE, REBATCH_E_EXHAUSTED},
                 {SCRIPT_FORWARD, SCRIPT_BEFORE, REBATCH_E_EXHAUSTED},
                 {SCRIPT_FORWARD, SCRIPT_WHILE, REBATCH_E_EXHAUSTED},
                 {SCRIPT_UPDATE, SCRIPT_BEFORE, REBATCH_E_EXHAUSTED},
                 {SCRIPT_UPDATE, SCRIPT_WHILE, REBATCH_E_TORN}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        enum script_callback callback = cases[i].callback;
        OPEN_WITH(open_cut, rig, rig, 8, 0, 0);
        script_inside(&rig.script, leave_a_scope_open, &callback);
        script_fail(&rig.script, callback, 1, cases[i].when, SCRIPT_POOL)->times = SCRIPT_FOREVER;
        cr_assert_eq(rig_step(&rig, 8), cases[i].expected);
        expect_no_open_scope(&rig);
        rig.script.fault_count = 0;
        rig.script.inside = NULL;
        script_restore(&rig.script);
        for (int n = 0; n < 70; n++) /* more than there can be open scopes */
            OK(rig_step(&rig, 8));
    }
}

Test(step_samples, a_scope_that_a_successful_callback_left_open_is_said)
{
    enum script_callback callback = SCRIPT_FORWARD;
    OPEN_WITH(open_cut, rig, rig, 8, 0, 0);
    script_inside(&rig.script, leave_a_scope_open, &callback);
    FAILS(rig_step(&rig, 8), REBATCH_E_STATE, "scope");
    expect_no_open_scope(&rig);
    rig.script.inside = NULL;
    OK(rig_step(&rig, 8));
}

/* ---- sizes that no script can hold ---- */

static rebatch_status see_all(const rebatch_microbatch *mb, void *user)
{
    *(rebatch_microbatch *)user = *mb;
    return SCRIPT_STATUS;
}

Test(step_samples, the_largest_batch_there_is_is_cut_without_overflow)
{
    OPEN_WITH(open_cut, rig, rig, 0, 0, 0);
    const rebatch_step_ops ops =
        OPS(nothing_to_do, see_all, nothing_to_do, .flags = REBATCH_DECLARES_MUTATION);
    rebatch_microbatch seen = {0};
    cr_assert_eq(rebatch_step(rig.rb, &ops, SIZE_MAX, &seen, NULL), SCRIPT_STATUS);
    cr_assert_eq(seen.first, 0);
    cr_assert_eq(seen.count, SIZE_MAX);
    cr_assert_eq(seen.batch, SIZE_MAX);
}
