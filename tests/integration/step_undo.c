/* Owns the tests of what a step undoes beyond the attempt that failed: what earlier callbacks of
 * the step have allocated and freed. And of what stays: what pressure callbacks and lighten do.
 * Must not know more of the library than its public headers say. */
#include "step_common.h"

/* A program with a cache whose pointer and size are guarded. What a callback does with it is asked
 * for by name. */
enum cache_use { LEAVE, MAKE, REPLACE };

struct program {
    enum cache_use in[SCRIPT_CALLBACKS]; /* of the first micro-batch, for SCRIPT_FORWARD */
    char *cache;
    size_t bytes;
    char *spare; /* what the pressure callback gives up */
    rebatch_pool *pool;
    uint64_t deferred_in_update;
};

#define CACHE_BYTES KIB(64)
#define SPARE_BYTES MIB(8)

static rebatch_status make_cache(struct program *p, size_t bytes)
{
    void *cache;
    const rebatch_status status = rebatch_pool_alloc(&cache, p->pool, bytes, NULL, 0);
    if (status)
        return status;
    memset(cache, 0x5a, bytes);
    if (p->cache)
        OK(rebatch_pool_free(p->pool, p->cache));
    p->cache = cache;
    p->bytes = bytes;
    return REBATCH_OK;
}

static uint64_t deferred_bytes(rebatch_pool *pool)
{
    const rebatch_pool_stats stats = pool_stats_of(pool);
    return stats.deferred_bytes;
}

INSIDE(use_cache)
{
    struct program *p = s->inside_user;
    if (callback == SCRIPT_UPDATE)
        p->deferred_in_update = deferred_bytes(p->pool);
    if (mb && mb->first > 0)
        return REBATCH_OK;
    if (p->in[callback] == MAKE && !p->cache)
        return make_cache(p, CACHE_BYTES);
    if (p->in[callback] == REPLACE)
        return make_cache(p, p->bytes + CACHE_BYTES);
    return REBATCH_OK;
}

static void open_program(struct rig *rig, struct program *p, const rebatch_options *options,
                         bool has_cache)
{
    rig_open(rig, MIB(16), options);
    p->pool = rebatch_get_pool(rig->rb);
    p->bytes = 0;
    if (has_cache)
        OK(make_cache(p, CACHE_BYTES));
    OK(rebatch_guard(rig->rb, &p->cache, sizeof p->cache, REBATCH_GUARD_HOST));
    OK(rebatch_guard(rig->rb, &p->bytes, sizeof p->bytes, REBATCH_GUARD_HOST));
    script_inside(&rig->script, use_cache, p);
    rig->script.base_bytes = CACHE_BYTES; /* it takes memory of this size that was freed */
}

static void open_cut(struct rig *rig, struct program *p, bool has_cache)
{
    open_program(rig, p, &OPTIONS(.micro_start = 4, .growth = REBATCH_OFF), has_cache);
}

/* Whether the cache is a block of its size with its contents, and all that lives. */
static void check_cache(const struct rig *rig, const struct program *p, size_t bytes)
{
    size_t block = 0;
    cr_assert_eq(p->bytes, bytes);
    cr_assert_eq(rig_live_bytes(rig), bytes);
    cr_assert_eq(deferred_bytes(p->pool), 0);
    if (bytes == 0) {
        cr_assert_null(p->cache);
        return;
    }
    OK(rebatch_pool_block_bytes(&block, p->pool, p->cache));
    cr_assert_eq(block, bytes);
    for (size_t i = 0; i < bytes; i++)
        cr_assert_eq(p->cache[i], 0x5a);
}

/* ---- the batch runs again ---- */

Test(step_undo, a_replaced_cache_is_back_when_the_batch_runs_again)
{
    struct program p = {.in[SCRIPT_FORWARD] = REPLACE};
    OPEN_WITH(open_cut, rig, rig, &p, true);
    script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_WHILE, SCRIPT_POOL);
    OK(rig_step(&rig, 8));
    cr_assert_eq(rig.report.ooms, 1);
    check_cache(&rig, &p, 2 * CACHE_BYTES); /* replaced once, though that ran twice */
}

Test(step_undo, a_cache_that_a_batch_makes_which_runs_again_is_made_once)
{
    static const enum script_callback makers[] = {SCRIPT_ZERO, SCRIPT_FORWARD};
    for (size_t i = 0; i < 2; i++) {
        struct program p = {.cache = NULL};
        p.in[makers[i]] = MAKE;
        OPEN_WITH(open_cut, rig, rig, &p, false);
        script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_WHILE, SCRIPT_POOL)->times = 2;
        OK(rig_step(&rig, 8));
        cr_assert_eq(rig.report.ooms, 2);
        check_cache(&rig, &p, CACHE_BYTES);
    }
}

Test(step_undo, samples_alone_that_run_again_leave_the_cache_of_those_before)
{
    struct program p = {.in[SCRIPT_FORWARD] = REPLACE};
    OPEN_WITH(open_cut, rig, rig, &p, true);
    script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_BEFORE, SCRIPT_POOL);
    OK(rig_step(&rig, 8));
    check_cache(&rig, &p, 2 * CACHE_BYTES);
}

/* ---- the step fails ---- */

Test(step_undo, a_step_that_fails_leaves_memory_as_it_was_before_zero_grad)
{
    static const struct {
        enum script_callback callback;
        uint32_t nth;
        enum script_when when;
        enum script_manner manner;
        rebatch_status status;
    } ends[] = {{SCRIPT_FORWARD, 2, SCRIPT_BEFORE, SCRIPT_OWN, SCRIPT_STATUS},
                {SCRIPT_FORWARD, 2, SCRIPT_WHILE, SCRIPT_OWN_ESCAPE, SCRIPT_STATUS},
                {SCRIPT_FORWARD, 2, SCRIPT_BEFORE, SCRIPT_POOL, REBATCH_E_EXHAUSTED},
                {SCRIPT_FORWARD, 2, SCRIPT_WHILE, SCRIPT_POOL, REBATCH_E_EXHAUSTED},
                {SCRIPT_UPDATE, 1, SCRIPT_BEFORE, SCRIPT_OWN, SCRIPT_STATUS},
                {SCRIPT_UPDATE, 1, SCRIPT_BEFORE, SCRIPT_POOL, REBATCH_E_EXHAUSTED}};
    static const enum cache_use uses[] = {MAKE, REPLACE};
    for (size_t i = 0; i < 2 * sizeof ends / sizeof *ends; i++) {
        struct program p = {.in[SCRIPT_FORWARD] = uses[i % 2]};
        const size_t before = uses[i % 2] == REPLACE ? CACHE_BYTES : 0;
        OPEN_WITH(open_cut, rig, rig, &p, before > 0);
        script_fail(&rig.script, ends[i / 2].callback, ends[i / 2].nth, ends[i / 2].when,
                    ends[i / 2].manner)
            ->times = SCRIPT_FOREVER;
        cr_assert_eq(rig_step(&rig, 8), ends[i / 2].status);
        check_cache(&rig, &p, before);
    }
}

Test(step_undo, a_torn_update_keeps_what_the_step_allocated_and_freed)
{
    struct program p = {.in[SCRIPT_FORWARD] = REPLACE};
    OPEN_WITH(open_cut, rig, rig, &p, true);
    script_fail(&rig.script, SCRIPT_UPDATE, 1, SCRIPT_WHILE, SCRIPT_POOL);
    cr_assert_eq(rig_step(&rig, 8), REBATCH_E_TORN);
    check_cache(&rig, &p, 2 * CACHE_BYTES);
}

Test(step_undo, what_a_step_frees_of_older_memory_is_free_when_its_update_has_succeeded)
{
    struct program p = {.in[SCRIPT_FORWARD] = REPLACE};
    OPEN_WITH(open_cut, rig, rig, &p, true);
    OK(rig_step(&rig, 8));
    cr_assert_eq(p.deferred_in_update, CACHE_BYTES);
    check_cache(&rig, &p, 2 * CACHE_BYTES);
}

/* ---- pressure ---- */

static size_t give_spare(size_t wanted_bytes, void *user)
{
    struct program *p = user;
    (void)wanted_bytes;
    if (!p->spare)
        return 0;
    OK(rebatch_pool_free(p->pool, p->spare));
    p->spare = NULL;
    return SPARE_BYTES;
}

static void open_with_spare(struct rig *rig, struct program *p)
{
    void *spare;
    open_program(rig, p, NULL, false);
    OK(rebatch_pool_alloc(&spare, p->pool, SPARE_BYTES, NULL, 0));
    p->spare = spare;
    OK(rebatch_guard(rig->rb, &p->spare, sizeof p->spare, REBATCH_GUARD_HOST));
    OK(rebatch_pool_add_pressure(p->pool, give_spare, p));
    rig->script.base_bytes = 0;
}

Test(step_undo, what_a_pressure_callback_frees_within_an_attempt_is_free_at_once)
{
    struct program p = {.in[SCRIPT_FORWARD] = LEAVE};
    OPEN_WITH(open_with_spare, rig, rig, &p);
    rig.script.sample_bytes = MIB(1);
    OK(rig_step(&rig, 12)); /* 12 MiB of 16, of which the spare has 8 */
    cr_assert_eq(rig.report.ooms, 0);
    cr_assert_null(p.spare);
    cr_assert_eq(rig_live_bytes(&rig), 0);
}

Test(step_undo, and_stays_freed_when_the_attempt_or_the_batch_is_undone)
{
    static const enum script_when whens[] = {SCRIPT_BEFORE, SCRIPT_WHILE};
    for (size_t i = 0; i < 2; i++) {
        struct program p = {.in[SCRIPT_FORWARD] = LEAVE};
        OPEN_WITH(open_with_spare, rig, rig, &p);
        rig.script.sample_bytes = MIB(1);
        script_fail(&rig.script, SCRIPT_FORWARD, 1, whens[i], SCRIPT_RETURN);
        OK(rig_step(&rig, 12));
        cr_assert_eq(rig.report.ooms, 1);
        cr_assert_null(p.spare, "a guard has put back the pointer to memory that was given up");
        cr_assert_eq(rig_live_bytes(&rig), 0);
    }
}

/* ---- lighten ---- */

/* Level 1 has the cache in another, smaller block. */
INSIDE(shrink_cache)
{
    struct program *p = s->inside_user;
    return callback == SCRIPT_LIGHTEN ? make_cache(p, CACHE_BYTES / 2) : REBATCH_OK;
}

static void open_light(struct rig *rig, struct program *p)
{
    open_program(rig, p, &OPTIONS(.micro_start = 4, .micro_smallest = 4, .growth = REBATCH_OFF),
                 true);
    rig->script.inside = shrink_cache;
    rig->script.lighten_levels = 1;
    rig->ops.lighten = script_ops().lighten;
}

Test(step_undo, what_lighten_moved_stays_when_samples_or_the_batch_run_again)
{
    static const enum script_when whens[] = {SCRIPT_BEFORE, SCRIPT_WHILE};
    for (size_t i = 0; i < 2; i++) {
        struct program p = {.cache = NULL};
        OPEN_WITH(open_light, rig, rig, &p);
        script_fail(&rig.script, SCRIPT_FORWARD, 2, whens[i], SCRIPT_POOL)->times = 2;
        cr_assert_eq(rig_step(&rig, 8), REBATCH_E_EXHAUSTED); /* the second time at level 1 */
        cr_assert_eq(rig.script.level, 1);
        check_cache(&rig, &p, CACHE_BYTES / 2);
        rig.script.fault_count = 0;
        OK(rig_step(&rig, 8));
        check_cache(&rig, &p, CACHE_BYTES / 2);
    }
}

Test(step_undo, a_lighten_that_fails_changes_nothing)
{
    struct program p = {.cache = NULL};
    OPEN_WITH(open_light, rig, rig, &p);
    rig.script.lighten_levels = 0;
    script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_BEFORE, SCRIPT_POOL);
    cr_assert_eq(rig_step(&rig, 8), REBATCH_E_EXHAUSTED);
    check_cache(&rig, &p, CACHE_BYTES);
}

/* Leaves an error behind that nobody has looked at. */
INSIDE(lighten_and_fail_late)
{
    if (callback == SCRIPT_LIGHTEN)
        script_arm(s, REBATCH_FAULT_LAST_ERROR, 1, *(rebatch_status *)s->inside_user);
    return REBATCH_OK;
}

Test(step_undo, a_level_is_in_force_once_lighten_has_answered_ok_whatever_shows_late)
{
    static const rebatch_status errors[] = {REBATCH_E_DEVICE, REBATCH_OOM};
    for (size_t i = 0; i < 2; i++) {
        rebatch_status error = errors[i];
        OPEN(rig, rig, MIB(16), &OPTIONS(.micro_smallest = 8));
        rig.script.lighten_levels = 1;
        rig.ops.lighten = script_ops().lighten;
        script_inside(&rig.script, lighten_and_fail_late, &error);
        script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL);
        cr_assert_eq(rig_step(&rig, 8), error == REBATCH_OOM ? REBATCH_OK : error);
        cr_assert_eq(rig.script.level, 1);
        cr_assert_eq(rig.report.lighten_level, 1);
        if (error != REBATCH_OOM)
            SAYS("lighten to level 1");
        rig.script.fault_count = 0;
        OK(rig_step(&rig, 8));
    }
}

/* ---- a probe ---- */

static void check_probe(const struct program *wanted, size_t bytes)
{
    struct program p = *wanted;
    OPEN_WITH(open_program, rig, rig, &p, NULL, p.bytes > 0);
    rig.script.sample_bytes = KIB(100);
    rig.script.batch = 64;
    rig.script.is_probed = true;
    OK(rebatch_probe(rig.rb, &rig.ops, 64, &rig.script, NULL, NULL));
    check_cache(&rig, &p, bytes);
}

Test(step_undo, a_probe_leaves_a_cache_that_its_callbacks_replace_as_it_was)
{
    check_probe(&(struct program){.in[SCRIPT_FORWARD] = REPLACE, .bytes = CACHE_BYTES},
                CACHE_BYTES);
    check_probe(&(struct program){.in[SCRIPT_ZERO] = REPLACE, .bytes = CACHE_BYTES}, CACHE_BYTES);
    check_probe(&(struct program){.in[SCRIPT_FORWARD] = MAKE}, 0);
    check_probe(&(struct program){.in[SCRIPT_ZERO] = MAKE}, 0);
}
