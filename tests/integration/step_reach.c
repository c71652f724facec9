/* Owns the tests of how an OOM, or what looks like one, reaches rebatch.
 * Must not know more of the library than its public headers say. */
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#include "step_common.h"

static void open_warm(struct rig *rig)
{
    rig_open(rig, MIB(64), &OPTIONS(.micro_start = 8, .growth = REBATCH_OFF));
    rig->script.base_bytes = MIB(1);
    OK(rig_step(rig, 16));
}
#define OPEN_WARM(name)                                                                            \
    AUTO_CLOSE(rig, name);                                                                         \
    open_warm(&name)

/* ---- rebatch_escape() ---- */

Test(step_reach, escape_outside_a_callback_comes_back_with_an_error)
{
    OPEN_WARM(rig);
    rebatch_clear_error();
    cr_assert_eq(rebatch_escape(rig.rb, REBATCH_OOM), REBATCH_E_STATE);
    cr_assert_str_neq(rebatch_last_error(), "");
    cr_assert_eq(rebatch_escape(rig.rb, SCRIPT_STATUS), REBATCH_E_STATE);
    cr_assert_eq(rebatch_escape(NULL, REBATCH_OOM), REBATCH_E_STATE);
    OK(rig_step(&rig, 16));
}

static void *escape_there(void *user)
{
    rebatch *rb = user;
    return rebatch_escape(rb, REBATCH_OOM) == REBATCH_E_STATE ? user : NULL;
}

INSIDE(escape_in_another_thread)
{
    pthread_t thread;
    void *refused = NULL;
    cr_assert_eq(pthread_create(&thread, NULL, escape_there, s->rb), 0);
    cr_assert_eq(pthread_join(thread, &refused), 0);
    cr_assert_not_null(refused, "rebatch_escape() left a callback of another thread");
    return REBATCH_OK;
}

Test(step_reach, escape_in_a_thread_without_a_callback_comes_back_with_an_error)
{
    OPEN_WARM(rig);
    rig.script.inside = escape_in_another_thread;
    OK(rig_step(&rig, 16));
    cr_assert_eq(rig.report.ooms, 0);
}

INSIDE(escape_with_success)
{
    if (callback == SCRIPT_FORWARD)
        (void)rebatch_escape(s->rb, REBATCH_OK);
    return REBATCH_OK;
}

Test(step_reach, escape_with_ok_is_an_error_and_no_success)
{
    OPEN_WARM(rig);
    rig.script.inside = escape_with_success;
    cr_assert_eq(rig_step(&rig, 16), REBATCH_E_INVALID);
    cr_assert(strstr(rebatch_last_error(), "rebatch_escape"), "the text is: %s",
              rebatch_last_error());
    cr_assert_eq(script_calls(&rig.script, SCRIPT_FORWARD), 1);
    cr_assert_eq(script_calls(&rig.script, SCRIPT_UPDATE), 0);
}

Test(step_reach, escape_from_lighten_is_survived)
{
    OPEN_WARM(rig);
    rig.script.lighten_levels = 2;
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL)->times = SCRIPT_FOREVER;
    script_fail(&rig.script, SCRIPT_LIGHTEN, 1, SCRIPT_BEFORE, SCRIPT_ESCAPE)->times =
        SCRIPT_FOREVER;
    cr_assert_eq(rig_step(&rig, 16), REBATCH_E_EXHAUSTED);
}

/* What tries to leave a callback of the pool's: give_up and write. */
struct leaver {
    rebatch *rb;
    int refused;
};

static size_t leave_give_up(size_t wanted_bytes, void *user)
{
    struct leaver *leaver = user;
    (void)wanted_bytes;
    leaver->refused += rebatch_escape(leaver->rb, REBATCH_OOM) == REBATCH_E_STATE;
    return 0;
}

static rebatch_status leave_write(const void *data, size_t size, void *user)
{
    (void)data;
    (void)size;
    (void)leave_give_up(0, user);
    return REBATCH_OK;
}

INSIDE(ask_too_much)
{
    void *memory;
    if (callback == SCRIPT_FORWARD)
        cr_assert_eq(rebatch_pool_alloc(&memory, mb->pool, SCRIPT_IMPOSSIBLE_BYTES, s->stream, 0),
                     REBATCH_OOM);
    return REBATCH_OK;
}

Test(step_reach, escape_from_within_a_pressure_callback_comes_back_with_an_error)
{
    OPEN_WARM(rig);
    struct leaver leaver = {rig.rb, 0};
    OK(rebatch_pool_add_pressure(rebatch_get_pool(rig.rb), leave_give_up, &leaver));
    rig.script.inside = ask_too_much;
    OK(rig_step(&rig, 8));
    cr_assert_eq(leaver.refused, 1);
    rig.script.inside = NULL;
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_ESCAPE);
    OK(rig_step(&rig, 8));
    cr_assert_eq(rig.report.ooms, 1);
}

INSIDE(write_snapshot)
{
    if (callback == SCRIPT_FORWARD)
        OK(rebatch_pool_write_snapshot(mb->pool, REBATCH_SNAPSHOT_BLOCKS_CSV, leave_write,
                                       s->inside_user));
    return REBATCH_OK;
}

Test(step_reach, escape_while_a_snapshot_is_written_comes_back_with_an_error)
{
    (void)alarm(300);
    OPEN_WARM(rig);
    struct leaver leaver = {rig.rb, 0};
    script_inside(&rig.script, write_snapshot, &leaver);
    OK(rig_step(&rig, 8));
    cr_assert_eq(leaver.refused, 1);
    SAYS("rebatch_escape");
}

static size_t step_other(size_t wanted_bytes, void *user)
{
    (void)wanted_bytes;
    struct rig *other = user;
    OK(rig_step(other, 8));
    return 0;
}

Test(step_reach, a_step_of_another_session_within_a_pressure_callback_may_be_left)
{
    AUTO_CLOSE(rig, rig);
    AUTO_CLOSE(rig, other);
    open_warm(&rig);
    open_warm(&other);
    OK(rebatch_pool_add_pressure(rebatch_get_pool(rig.rb), step_other, &other));
    script_fail(&other.script, SCRIPT_FORWARD, 1, SCRIPT_WHILE, SCRIPT_ESCAPE);
    rig.script.inside = ask_too_much;
    OK(rig_step(&rig, 8));
    cr_assert_eq(other.report.ooms, 1);
}

/* ---- the device's last error ---- */

INSIDE(leave_last_error)
{
    if (callback == SCRIPT_FORWARD)
        OK(rebatch_fault_arm(s->device, &FAULTS(.calls = REBATCH_FAULT_LAST_ERROR, .nth = 1,
                                                .status = *(rebatch_status *)s->inside_user)));
    return REBATCH_OK;
}

Test(step_reach, a_swallowed_error_that_is_no_oom_passes_through)
{
    OPEN_WARM(rig);
    rebatch_status left = REBATCH_E_DEVICE;
    script_inside(&rig.script, leave_last_error, &left);
    STEP(&rig, 16, REBATCH_E_DEVICE, "z f0+8"); /* it answered OK */
    left = REBATCH_E_DEVICE_LOST;
    cr_assert_eq(rig_step(&rig, 16), REBATCH_E_DEVICE_LOST);
    rig.script.inside = NULL;
    OK(rig_step(&rig, 16));
}

INSIDE(fail_and_leave_last_error)
{
    if (callback != SCRIPT_FORWARD || mb->count < 8)
        return REBATCH_OK;
    (void)leave_last_error(s, callback, mb);
    return REBATCH_OOM;
}

Test(step_reach, no_stale_error_is_left_behind_by_an_oom)
{
    OPEN(rig, rig, MIB(64), NULL); /* nothing is cached, so the first rung is to halve */
    rebatch_status left = REBATCH_OOM;
    script_inside(&rig.script, fail_and_leave_last_error, &left);
    STEP(&rig, 8, REBATCH_OK, "z f0+8! f0+4~1 f4+4~1 u");
}

Test(step_reach, an_error_left_behind_overrides_the_oom_that_hid_it)
{
    OPEN_WARM(rig);
    rebatch_status left = REBATCH_E_DEVICE_LOST;
    script_inside(&rig.script, fail_and_leave_last_error, &left);
    STEP(&rig, 8, REBATCH_E_DEVICE_LOST, "z f0+8!");
}

/* ---- late device errors ---- */

static void lost_overrides(enum script_callback callback, enum script_when when,
                           const char *expected)
{
    OPEN_WARM(rig);
    const uint64_t live_bytes = rig_live_bytes(&rig);
    script_fail(&rig.script, callback, 1, when, SCRIPT_LOST);
    cr_assert_eq(rig_step(&rig, 16), REBATCH_E_DEVICE_LOST);
    cr_assert_str_eq(script_trace(&rig.script), expected);
    cr_assert_eq(rig.report.ooms, 0);
    cr_assert_eq(rig_live_bytes(&rig), live_bytes);
    rig_fail_device(&rig, 0, 0, REBATCH_OK);
}

Test(step_reach, a_late_device_error_overrides_the_verdict_oom)
{
    lost_overrides(SCRIPT_ZERO, SCRIPT_BEFORE, "z!");
    lost_overrides(SCRIPT_FORWARD, SCRIPT_BEFORE, "z f0+8!");
    lost_overrides(SCRIPT_FORWARD, SCRIPT_WHILE, "z f0+8!");
    lost_overrides(SCRIPT_UPDATE, SCRIPT_BEFORE, "z f0+8 f8+8 u!");
    lost_overrides(SCRIPT_UPDATE, SCRIPT_WHILE, "z f0+8 f8+8 u!");
}

/* ---- an OOM that the callback copes with ---- */

INSIDE(cope)
{
    void *workspace;
    cr_assert_eq(rebatch_pool_alloc(&workspace, rebatch_get_pool(s->rb), SCRIPT_IMPOSSIBLE_BYTES,
                                    s->stream, 0),
                 REBATCH_OOM);
    return REBATCH_OK;
}

Test(step_reach, an_optional_allocation_that_fails_is_no_oom)
{
    OPEN_WARM(rig);
    rig.script.inside = cope;
    STEP(&rig, 16, REBATCH_OK, "z f0+8 f8+8 u");
    cr_assert_eq(rig.report.ooms, 0);
    cr_assert_str_eq(rig_events(&rig), "SWALLOWED SWALLOWED SWALLOWED SWALLOWED STEP");
    cr_assert_eq(rebatch_get_micro(rig.rb, 16), 8);
}

Test(step_reach, the_report_names_the_last_oom_of_the_pool_even_one_that_was_coped_with)
{
    OPEN_WARM(rig);
    rig.script.inside = cope;
    OK(rig_step(&rig, 16));
    cr_assert_eq(rig.report.oom.asked_bytes, SCRIPT_IMPOSSIBLE_BYTES);
    rig.script.inside = NULL;
    OK(rig_step(&rig, 16));
    cr_assert_eq(rig.report.oom.asked_bytes, 0, "that OOM was of the step before");
}

/* ---- rebatch_reserve() that fails ---- */

INSIDE(reserve_too_much)
{
    if (callback != SCRIPT_FORWARD || mb->count < 8)
        return REBATCH_OK;
    return rebatch_reserve(s->rb, SCRIPT_IMPOSSIBLE_BYTES);
}

Test(step_reach, a_reserve_that_fails_is_an_oom_like_any_other)
{
    OPEN_WARM(rig);
    rig.script.inside = reserve_too_much;
    STEP(&rig, 16, REBATCH_OK, "z f0+8! f0+4~1 f4+4~1 f8+4 f12+4 u");
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_FORWARD], 1);
}

/* ---- calls from within a callback ---- */

INSIDE(step_within)
{
    struct rig *rig = s->inside_user;
    rebatch_step_report report;
    rebatch_clear_error();
    FAILS_WITH(
        rebatch_step(s->rb, &rig->ops, 4, s, &report), REBATCH_E_STATE,
        "rebatch_step() was called from within a callback, or while another thread is in a step");
    cr_assert_eq(report.status, REBATCH_E_STATE);
    static int state;
    cr_assert_eq(rebatch_guard(s->rb, &state, sizeof state, REBATCH_GUARD_HOST), REBATCH_E_STATE);
    return REBATCH_OK;
}

Test(step_reach, step_and_guard_within_a_callback_are_refused_and_change_nothing)
{
    OPEN_WARM(rig);
    script_inside(&rig.script, step_within, &rig);
    STEP(&rig, 16, REBATCH_OK, "z f0+8 f8+8 u");
}

INSIDE(close_within)
{
    rebatch_clear_error();
    rebatch_close(s->rb);
    cr_assert_str_eq(rebatch_last_error(), "rebatch_close() was called from within a callback, or "
                                           "while another thread is in a step");
    return REBATCH_OK;
}

Test(step_reach, close_within_a_callback_is_refused)
{
    OPEN_WARM(rig);
    rig.script.inside = close_within;
    STEP(&rig, 16, REBATCH_OK, "z f0+8 f8+8 u");
}

INSIDE(step_of_another)
{
    struct rig *other = s->inside_user;
    if (callback == SCRIPT_FORWARD)
        OK(rig_step(other, 8));
    return REBATCH_OK;
}

Test(step_reach, another_session_may_step_within_a_callback)
{
    AUTO_CLOSE(rig, rig);
    AUTO_CLOSE(rig, other);
    open_warm(&rig);
    open_warm(&other);
    script_fail(&other.script, SCRIPT_FORWARD, 1, SCRIPT_WHILE, SCRIPT_ESCAPE);
    script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_WHILE, SCRIPT_ESCAPE);
    script_inside(&rig.script, step_of_another, &other);
    OK(rig_step(&rig, 16));
    cr_assert_eq(rig.report.ooms, 1);
}

/* ---- work that is still on the stream ---- */

struct pending {
    void *block;
    atomic_int done;
};

static void use_late(void *user)
{
    struct pending *pending = user;
    const struct timespec some_time = {.tv_nsec = 3000000};
    (void)nanosleep(&some_time, NULL);
    memset(pending->block, 7, KIB(64));
    atomic_fetch_add(&pending->done, 1);
}

/* Leaves work on the stream that uses a block of the attempt. */
INSIDE(enqueue_late_use)
{
    struct pending *pending = s->inside_user;
    if (callback != SCRIPT_FORWARD || mb->first)
        return REBATCH_OK;
    OK(rebatch_pool_alloc(&pending->block, mb->pool, KIB(64), mb->stream, 0));
    return rebatch_stream_call(s->device, s->stream, use_late, pending);
}

static void take_back_under_work(rebatch_toggle caching, enum script_manner manner,
                                 rebatch_status expected, int uses)
{
    struct rig rig;
    rig_open_on_stream(&rig, MIB(64), &OPTIONS(.pool.caching = caching));
    struct pending pending = {0};
    script_inside(&rig.script, enqueue_late_use, &pending);
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, manner);
    cr_assert_eq(rig_step(&rig, 8), expected);
    rig_close(&rig); /* with the work of the last attempt still on the stream */
    cr_assert_eq(atomic_load(&pending.done), uses);
}

Test(step_reach, work_still_on_the_stream_may_use_what_is_taken_back)
{
    take_back_under_work(REBATCH_ON, SCRIPT_POOL, REBATCH_OK, 2);
    take_back_under_work(REBATCH_ON, SCRIPT_OWN, SCRIPT_STATUS, 1);
    take_back_under_work(REBATCH_OFF, SCRIPT_POOL, REBATCH_OK, 2);
    take_back_under_work(REBATCH_OFF, SCRIPT_OWN, SCRIPT_STATUS, 1);
}

/* ---- what goes away too early ---- */

Test(step_reach, a_session_keeps_its_pool_and_its_device)
{
    (void)alarm(300);
    rebatch_device *device;
    rebatch *rb;
    rebatch_pool *pool;
    open_on_host(&device, &rb, MIB(64), NULL);
    OK(rebatch_pool_create(&pool, device, NULL));
    rebatch_pool_destroy(rebatch_get_pool(rb));
    SAYS("expected rebatch_close()");
    rebatch_device_close(device);
    SAYS("what is open on it is 2");
    void *block;
    OK(rebatch_pool_alloc(&block, rebatch_get_pool(rb), MIB(1), NULL, 0));
    rebatch_pool_destroy(pool);
    rebatch_close(rb);
    rebatch_clear_error();
    rebatch_device_close(device);
    cr_assert_str_eq(rebatch_last_error(), "");
}

static size_t close_it(size_t wanted_bytes, void *user)
{
    (void)wanted_bytes;
    rebatch_close(user);
    return 0;
}

Test(step_reach, a_session_is_not_closed_from_its_pools_callback)
{
    OPEN(rig, rig, MIB(64), NULL);
    rebatch_pool *const pool = rebatch_get_pool(rig.rb);
    void *none;
    OK(rebatch_pool_add_pressure(pool, close_it, rig.rb));
    cr_assert_eq(rebatch_pool_alloc(&none, pool, (size_t)1 << 40, NULL, 0), REBATCH_OOM);
    OK(rig_step(&rig, 8));
}
