/* Owns the tests of what a step undoes beyond the attempt that failed: what earlier callbacks of
 * the step have allocated and freed. And of what stays: what pressure callbacks and lighten do.
 * Must not know more of the library than its public headers say. */
#include <string.h>

#include <criterion/criterion.h>

#include "fault/fault_device.h"
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
        cr_assert_eq(rebatch_pool_free(p->pool, p->cache), REBATCH_OK);
    p->cache = cache;
    p->bytes = bytes;
    return REBATCH_OK;
}

static uint64_t deferred_bytes(rebatch_pool *pool)
{
    rebatch_pool_stats stats;
    cr_assert_eq(rebatch_pool_get_stats(&stats, pool), REBATCH_OK);
    return stats.deferred_bytes;
}

static rebatch_status use_cache(struct script *s, enum script_callback callback,
                                const rebatch_microbatch *mb)
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
        cr_assert_eq(make_cache(p, CACHE_BYTES), REBATCH_OK);
    cr_assert_eq(rebatch_guard(rig->rb, &p->cache, sizeof p->cache, REBATCH_GUARD_HOST),
                 REBATCH_OK);
    cr_assert_eq(rebatch_guard(rig->rb, &p->bytes, sizeof p->bytes, REBATCH_GUARD_HOST),
                 REBATCH_OK);
    rig->script.inside = use_cache;
    rig->script.inside_user = p;
    rig->script.base_bytes = CACHE_BYTES; /* it takes memory of this size that was freed */
}

static void open_cut(struct rig *rig, struct program *p, bool has_cache)
{
    rebatch_options o = REBATCH_OPTIONS_INIT;
    o.micro_start = 4;
    o.growth = REBATCH_OFF;
    open_program(rig, p, &o, has_cache);
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
    cr_assert_eq(rebatch_pool_block_bytes(&block, p->pool, p->cache), REBATCH_OK);
    cr_assert_eq(block, bytes);
    for (size_t i = 0; i < bytes; i++)
        cr_assert_eq(p->cache[i], 0x5a);
}

/* ---- the batch runs again ---- */

Test(step_undo, a_replaced_cache_is_back_when_the_batch_runs_again)
{
    struct program p = {.in[SCRIPT_FORWARD] = REPLACE};
    struct rig rig;
    open_cut(&rig, &p, true);
    script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_WHILE, SCRIPT_POOL);
    cr_assert_eq(rig_step(&rig, 8), REBATCH_OK);
    cr_assert_eq(rig.report.ooms, 1);
    check_cache(&rig, &p, 2 * CACHE_BYTES); /* replaced once, though that ran twice */
    rig_close(&rig);
}

Test(step_undo, a_cache_that_a_batch_makes_which_runs_again_is_made_once)
{
    static const enum script_callback makers[] = {SCRIPT_ZERO, SCRIPT_FORWARD};
    for (size_t i = 0; i < 2; i++) {
        struct program p = {.cache = NULL};
        p.in[makers[i]] = MAKE;
        struct rig rig;
        open_cut(&rig, &p, false);
        script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_WHILE, SCRIPT_POOL)->times = 2;
        cr_assert_eq(rig_step(&rig, 8), REBATCH_OK);
        cr_assert_eq(rig.report.ooms, 2);
        check_cache(&rig, &p, CACHE_BYTES);
        rig_close(&rig);
    }
}

Test(step_undo, samples_alone_that_run_again_leave_the_cache_of_those_before)
{
    struct program p = {.in[SCRIPT_FORWARD] = REPLACE};
    struct rig rig;
    open_cut(&rig, &p, true);
    script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_BEFORE, SCRIPT_POOL);
    cr_assert_eq(rig_step(&rig, 8), REBATCH_OK);
    check_cache(&rig, &p, 2 * CACHE_BYTES);
    rig_close(&rig);
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
        struct rig rig;
        open_cut(&rig, &p, before > 0);
        script_fail(&rig.script, ends[i / 2].callback, ends[i / 2].nth, ends[i / 2].when,
                    ends[i / 2].manner)
            ->times = SCRIPT_FOREVER;
        cr_assert_eq(rig_step(&rig, 8), ends[i / 2].status);
        check_cache(&rig, &p, before);
        rig_close(&rig);
    }
}

Test(step_undo, a_torn_update_keeps_what_the_step_allocated_and_freed)
{
    struct program p = {.in[SCRIPT_FORWARD] = REPLACE};
    struct rig rig;
    open_cut(&rig, &p, true);
    script_fail(&rig.script, SCRIPT_UPDATE, 1, SCRIPT_WHILE, SCRIPT_POOL);
    cr_assert_eq(rig_step(&rig, 8), REBATCH_E_TORN);
    check_cache(&rig, &p, 2 * CACHE_BYTES);
    rig_close(&rig);
}

Test(step_undo, what_a_step_frees_of_older_memory_is_free_when_its_update_has_succeeded)
{
    struct program p = {.in[SCRIPT_FORWARD] = REPLACE};
    struct rig rig;
    open_cut(&rig, &p, true);
    cr_assert_eq(rig_step(&rig, 8), REBATCH_OK);
    cr_assert_eq(p.deferred_in_update, CACHE_BYTES);
    check_cache(&rig, &p, 2 * CACHE_BYTES);
    rig_close(&rig);
}

/* ---- pressure ---- */

static size_t give_spare(size_t wanted_bytes, void *user)
{
    struct program *p = user;
    (void)wanted_bytes;
    if (!p->spare)
        return 0;
    cr_assert_eq(rebatch_pool_free(p->pool, p->spare), REBATCH_OK);
    p->spare = NULL;
    return SPARE_BYTES;
}

static void open_with_spare(struct rig *rig, struct program *p)
{
    rebatch_options o = REBATCH_OPTIONS_INIT;
    void *spare;
    open_program(rig, p, &o, false);
    cr_assert_eq(rebatch_pool_alloc(&spare, p->pool, SPARE_BYTES, NULL, 0), REBATCH_OK);
    p->spare = spare;
    cr_assert_eq(rebatch_guard(rig->rb, &p->spare, sizeof p->spare, REBATCH_GUARD_HOST),
                 REBATCH_OK);
    cr_assert_eq(rebatch_pool_add_pressure(p->pool, give_spare, p), REBATCH_OK);
    rig->script.base_bytes = 0;
}

Test(step_undo, what_a_pressure_callback_frees_within_an_attempt_is_free_at_once)
{
    struct program p = {.in[SCRIPT_FORWARD] = LEAVE};
    struct rig rig;
    open_with_spare(&rig, &p);
    rig.script.sample_bytes = MIB(1);
    cr_assert_eq(rig_step(&rig, 12), REBATCH_OK); /* 12 MiB of 16, of which the spare has 8 */
    cr_assert_eq(rig.report.ooms, 0);
    cr_assert_null(p.spare);
    cr_assert_eq(rig_live_bytes(&rig), 0);
    rig_close(&rig);
}

Test(step_undo, and_stays_freed_when_the_attempt_or_the_batch_is_undone)
{
    static const enum script_when whens[] = {SCRIPT_BEFORE, SCRIPT_WHILE};
    for (size_t i = 0; i < 2; i++) {
        struct program p = {.in[SCRIPT_FORWARD] = LEAVE};
        struct rig rig;
        open_with_spare(&rig, &p);
        rig.script.sample_bytes = MIB(1);
        script_fail(&rig.script, SCRIPT_FORWARD, 1, whens[i], SCRIPT_RETURN);
        cr_assert_eq(rig_step(&rig, 12), REBATCH_OK);
        cr_assert_eq(rig.report.ooms, 1);
        cr_assert_null(p.spare, "a guard has put back the pointer to memory that was given up");
        cr_assert_eq(rig_live_bytes(&rig), 0);
        rig_close(&rig);
    }
}

/* ---- lighten ---- */

/* Level 1 has the cache in another, smaller block. */
static rebatch_status shrink_cache(struct script *s, enum script_callback callback,
                                   const rebatch_microbatch *mb)
{
    (void)mb;
    struct program *p = s->inside_user;
    return callback == SCRIPT_LIGHTEN ? make_cache(p, CACHE_BYTES / 2) : REBATCH_OK;
}

static void open_light(struct rig *rig, struct program *p)
{
    rebatch_options o = REBATCH_OPTIONS_INIT;
    o.micro_start = 4;
    o.micro_smallest = 4;
    o.growth = REBATCH_OFF;
    open_program(rig, p, &o, true);
    rig->script.inside = shrink_cache;
    rig->script.lighten_levels = 1;
    rig->ops.lighten = script_ops().lighten;
}

Test(step_undo, what_lighten_moved_stays_when_samples_or_the_batch_run_again)
{
    static const enum script_when whens[] = {SCRIPT_BEFORE, SCRIPT_WHILE};
    for (size_t i = 0; i < 2; i++) {
        struct program p = {.cache = NULL};
        struct rig rig;
        open_light(&rig, &p);
        script_fail(&rig.script, SCRIPT_FORWARD, 2, whens[i], SCRIPT_POOL)->times = 2;
        cr_assert_eq(rig_step(&rig, 8), REBATCH_E_EXHAUSTED); /* the second time at level 1 */
        cr_assert_eq(rig.script.level, 1);
        check_cache(&rig, &p, CACHE_BYTES / 2);
        rig.script.fault_count = 0;
        cr_assert_eq(rig_step(&rig, 8), REBATCH_OK);
        check_cache(&rig, &p, CACHE_BYTES / 2);
        rig_close(&rig);
    }
}

Test(step_undo, a_lighten_that_fails_changes_nothing)
{
    struct program p = {.cache = NULL};
    struct rig rig;
    open_light(&rig, &p);
    rig.script.lighten_levels = 0;
    script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_BEFORE, SCRIPT_POOL);
    cr_assert_eq(rig_step(&rig, 8), REBATCH_E_EXHAUSTED);
    check_cache(&rig, &p, CACHE_BYTES);
    rig_close(&rig);
}

/* Leaves an error behind that nobody has looked at. */
static rebatch_status lighten_and_fail_late(struct script *s, enum script_callback callback,
                                            const rebatch_microbatch *mb)
{
    if (callback == SCRIPT_LIGHTEN)
        script_arm(s, REBATCH_FAULT_LAST_ERROR, 1, *(rebatch_status *)s->inside_user);
    (void)mb;
    return REBATCH_OK;
}

Test(step_undo, a_level_is_in_force_once_lighten_has_answered_ok_whatever_shows_late)
{
    static const rebatch_status errors[] = {REBATCH_E_DEVICE, REBATCH_OOM};
    for (size_t i = 0; i < 2; i++) {
        rebatch_status error = errors[i];
        rebatch_options o = REBATCH_OPTIONS_INIT;
        struct rig rig;
        o.micro_smallest = 8;
        rig_open(&rig, MIB(16), &o);
        rig.script.lighten_levels = 1;
        rig.ops.lighten = script_ops().lighten;
        rig.script.inside = lighten_and_fail_late;
        rig.script.inside_user = &error;
        script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL);
        cr_assert_eq(rig_step(&rig, 8), error == REBATCH_OOM ? REBATCH_OK : error);
        cr_assert_eq(rig.script.level, 1);
        cr_assert_eq(rig.report.lighten_level, 1);
        if (error != REBATCH_OOM)
            cr_assert(strstr(rebatch_last_error(), "lighten to level 1"), "%s",
                      rebatch_last_error());
        rig.script.fault_count = 0;
        cr_assert_eq(rig_step(&rig, 8), REBATCH_OK);
        rig_close(&rig);
    }
}

/* ---- a probe ---- */

static void check_probe(const struct program *wanted, size_t bytes)
{
    struct program p = *wanted;
    rebatch_options o = REBATCH_OPTIONS_INIT;
    struct rig rig;
    open_program(&rig, &p, &o, p.bytes > 0);
    rig.script.sample_bytes = KIB(100);
    rig.script.batch = 64;
    rig.script.is_probed = true;
    cr_assert_eq(rebatch_probe(rig.rb, &rig.ops, 64, &rig.script, NULL, NULL), REBATCH_OK, "%s",
                 rebatch_last_error());
    check_cache(&rig, &p, bytes);
    rig_close(&rig);
}

Test(step_undo, a_probe_leaves_a_cache_that_its_callbacks_replace_as_it_was)
{
    check_probe(&(struct program){.in[SCRIPT_FORWARD] = REPLACE, .bytes = CACHE_BYTES},
                CACHE_BYTES);
    check_probe(&(struct program){.in[SCRIPT_ZERO] = REPLACE, .bytes = CACHE_BYTES}, CACHE_BYTES);
    check_probe(&(struct program){.in[SCRIPT_FORWARD] = MAKE}, 0);
    check_probe(&(struct program){.in[SCRIPT_ZERO] = MAKE}, 0);
}
