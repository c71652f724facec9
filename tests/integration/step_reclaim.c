/* Owns the tests of sessions that take nothing back (reclaim off), of sessions on a pool that is
 * there, and of state that functions guard.
 * Must not know more of the library than its public headers say. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

#include "rebatch/rebatch.h"

#define MIB(n) ((size_t)(n) << 20)

/* A program that counts references: it frees what it has allocated itself. */
struct program {
    rebatch_device *device;
    rebatch_pool *pool;
    rebatch *rb;
    size_t sample_bytes;
    size_t fits;     /* micro-batches of more samples hold on to a block and run out of memory */
    void *held;      /* that block */
    void *gradients; /* freed and made anew by zero_grad */
    size_t gradient_bytes;
    bool dirties;   /* calls rebatch_mutating() before the OOM */
    bool in_thread; /* allocates in another thread, as autograd does */
    size_t calls, zeros, updates;
    double sum; /* guarded by functions */
    double saved[2];
    size_t saves[2], restores[2];
    rebatch_status save_status;
};

static rebatch_status zero_grad(void *user)
{
    struct program *p = user;
    p->zeros++;
    (void)rebatch_pool_free(p->pool, p->gradients);
    p->gradients = NULL;
    return p->gradient_bytes
               ? rebatch_pool_alloc(&p->gradients, p->pool, p->gradient_bytes, NULL, 0)
               : REBATCH_OK;
}

struct request {
    struct program *p;
    size_t bytes;
    void *memory;
    rebatch_status status;
};

static void *allocate(void *user)
{
    struct request *r = user;
    r->status = rebatch_pool_alloc(&r->memory, r->p->pool, r->bytes, NULL, 0);
    return NULL;
}

static rebatch_status allocate_somewhere(void **out, struct program *p, size_t bytes)
{
    struct request r = {.p = p, .bytes = bytes};
    pthread_t thread;
    if (!p->in_thread) {
        (void)allocate(&r);
    } else {
        cr_assert_eq(pthread_create(&thread, NULL, allocate, &r), 0);
        cr_assert_eq(pthread_join(thread, NULL), 0);
    }
    *out = r.memory;
    return r.status;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct program *p = user;
    void *memory;
    p->calls++;
    for (size_t s = mb->first; s < mb->first + mb->count; s++)
        p->sum += (double)(s + 1);
    if (p->dirties)
        rebatch_mutating(p->rb);
    if (mb->count > p->fits) {
        cr_assert_eq(rebatch_pool_alloc(&p->held, p->pool, MIB(1), NULL, 0), REBATCH_OK);
        return REBATCH_OOM;
    }
    rebatch_status status = allocate_somewhere(&memory, p, mb->count * p->sample_bytes);
    if (status)
        return status;
    rebatch_mutating(p->rb);
    return rebatch_pool_free(p->pool, memory);
}

static rebatch_status optimizer_step(void *user)
{
    struct program *p = user;
    rebatch_mutating(p->rb);
    p->updates++;
    return REBATCH_OK;
}

static rebatch_step_ops program_ops(void)
{
    rebatch_step_ops ops = REBATCH_STEP_OPS_INIT;
    ops.zero_grad = zero_grad;
    ops.forward_backward = forward_backward;
    ops.optimizer_step = optimizer_step;
    ops.flags = REBATCH_DECLARES_MUTATION;
    return ops;
}

static rebatch *open_on(struct program *p)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch *rb;
    options.reclaim = REBATCH_OFF;
    options.existing_pool = p->pool;
    options.log_level = REBATCH_LOG_QUIET;
    cr_assert_eq(rebatch_open(&rb, p->device, &options), REBATCH_OK, "%s", rebatch_last_error());
    return rb;
}

static void open_program(struct program *p, size_t capacity_bytes)
{
    *p = (struct program){.sample_bytes = MIB(1), .fits = SIZE_MAX};
    cr_assert_eq(rebatch_device_open_host(&p->device, capacity_bytes, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&p->pool, p->device, NULL), REBATCH_OK);
    p->rb = open_on(p);
}

static uint64_t live_bytes(const struct program *p)
{
    rebatch_pool_stats stats;
    cr_assert_eq(rebatch_pool_get_stats(&stats, p->pool), REBATCH_OK);
    return stats.live_bytes;
}

static void close_program(struct program *p)
{
    rebatch_memory_info info;
    rebatch_close(p->rb);
    cr_assert_eq(rebatch_pool_free(p->pool, p->gradients), REBATCH_OK);
    cr_assert_eq(live_bytes(p), 0);
    rebatch_pool_destroy(p->pool);
    cr_assert_eq(rebatch_device_memory(p->device, &info), REBATCH_OK);
    cr_assert_eq(info.used_bytes, 0);
    rebatch_device_close(p->device);
}

static rebatch_step_report step(struct program *p, size_t batch, rebatch_status expected)
{
    const rebatch_step_ops ops = program_ops();
    rebatch_step_report report;
    const rebatch_status status = rebatch_step(p->rb, &ops, batch, p, &report);
    cr_assert_eq(status, expected, "%s: %s", rebatch_status_name(status), rebatch_last_error());
    return report;
}

/* ---- nothing is taken back ---- */

Test(step_reclaim, what_a_failed_attempt_holds_on_to_stays_in_use)
{
    struct program p;
    open_program(&p, MIB(64));
    p.fits = 4;
    const rebatch_step_report report = step(&p, 8, REBATCH_OK);
    cr_expect_eq(report.ooms, 1);
    cr_expect_eq(report.micro, 4);
    cr_expect_eq(live_bytes(&p), MIB(1));
    cr_expect_eq(rebatch_pool_free(p.pool, p.held), REBATCH_OK, "%s", rebatch_last_error());
    close_program(&p);
}

Test(step_reclaim, a_batch_that_runs_again_takes_nothing_back)
{
    struct program p;
    open_program(&p, MIB(64));
    p.fits = 4;
    p.dirties = true;
    p.gradient_bytes = MIB(2);
    const rebatch_step_report report = step(&p, 8, REBATCH_OK);
    cr_expect_eq(report.ooms, 1);
    cr_expect_eq(p.zeros, 2);
    cr_expect_eq(live_bytes(&p), MIB(3));
    cr_expect_eq(rebatch_pool_free(p.pool, p.held), REBATCH_OK);
    close_program(&p);
}

/* Else gradients that are freed and made anew in each step would be held twice. */
Test(step_reclaim, frees_are_effective_immediately)
{
    struct program p;
    open_program(&p, MIB(64));
    p.gradient_bytes = MIB(40);
    for (int i = 0; i < 3; i++) {
        const rebatch_step_report report = step(&p, 8, REBATCH_OK);
        cr_expect_eq(report.ooms, 0);
        cr_expect_eq(report.peak_bytes, MIB(48));
    }
    rebatch_pool_stats stats;
    cr_assert_eq(rebatch_pool_get_stats(&stats, p.pool), REBATCH_OK);
    cr_expect_eq(stats.deferred_bytes, 0);
    close_program(&p);
}

/* A scope of the program's own around the step holds frees back, as scopes do. */
Test(step_reclaim, a_scope_around_the_step_still_undoes)
{
    struct program p;
    rebatch_scope scope;
    open_program(&p, MIB(64));
    p.gradient_bytes = MIB(2);
    (void)step(&p, 8, REBATCH_OK);
    void *const before = p.gradients;
    cr_assert_eq(rebatch_scope_begin(&scope, p.pool), REBATCH_OK);
    (void)step(&p, 8, REBATCH_OK);
    cr_assert_eq(rebatch_scope_rollback(p.pool, scope), REBATCH_OK);
    p.gradients = before;
    cr_expect_eq(live_bytes(&p), MIB(2));
    close_program(&p);
}

Test(step_reclaim, an_oom_of_any_thread_is_the_callbacks)
{
    struct program p;
    open_program(&p, MIB(4));
    p.in_thread = true;
    const rebatch_step_report report = step(&p, 8, REBATCH_OK);
    cr_expect_eq(report.micro, 4);
    cr_expect_eq(report.oom.asked_bytes, MIB(8));
    close_program(&p);
}

/* What another thread allocated counts as needed, so the size that failed is not tried again. */
Test(step_reclaim, admission_knows_what_other_threads_allocated)
{
    struct program p;
    open_program(&p, MIB(16));
    p.in_thread = true;
    (void)step(&p, 8, REBATCH_OK);
    cr_assert_eq(rebatch_pool_trim(p.pool, 0, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_device_set_capacity(p.device, MIB(4)), REBATCH_OK);
    const size_t calls = p.calls;
    const rebatch_step_report report = step(&p, 8, REBATCH_OK);
    cr_expect_eq(report.ooms_in[REBATCH_PHASE_ADMISSION], 1);
    cr_expect_eq(report.ooms, 1);
    cr_expect_eq(p.calls, calls + 2);
    close_program(&p);
}

/* Its memory is needed in zero_grad, or in all sizes, and there is too little even so. */
struct pressed {
    rebatch *rb;
    rebatch_pool *pool;
    void *cache; /* guarded; freed by pressure */
    size_t zero_bytes, sample_bytes;
    bool is_in_thread;
};

static void *ask(void *user)
{
    struct pressed *p = user;
    void *memory;
    cr_assert_eq(rebatch_pool_alloc(&memory, p->pool, p->sample_bytes, NULL, 0), REBATCH_OOM);
    return NULL;
}

static rebatch_status zero_pressed(void *user)
{
    struct pressed *p = user;
    void *memory;
    const rebatch_status status = rebatch_pool_alloc(&memory, p->pool, p->zero_bytes, NULL, 0);
    return status ? status : rebatch_pool_free(p->pool, memory);
}

static rebatch_status forward_pressed(const rebatch_microbatch *mb, void *user)
{
    struct pressed *p = user;
    pthread_t thread;
    (void)mb;
    if (p->is_in_thread) {
        cr_assert_eq(pthread_create(&thread, NULL, ask, p), 0);
        cr_assert_eq(pthread_join(thread, NULL), 0);
    } else {
        (void)ask(p);
    }
    return REBATCH_OOM;
}

static rebatch_status update_pressed(void *user)
{
    (void)user;
    return REBATCH_OK;
}

static size_t give_up(size_t wanted_bytes, void *user)
{
    struct pressed *p = user;
    (void)wanted_bytes;
    if (!p->cache)
        return 0;
    cr_assert_eq(rebatch_pool_free(p->pool, p->cache), REBATCH_OK);
    p->cache = NULL;
    return MIB(1);
}

static void expect_cache_given_up(size_t zero_bytes, size_t sample_bytes, bool is_in_thread)
{
    struct program program;
    open_program(&program, MIB(16));
    struct pressed p = {.rb = program.rb,
                        .pool = program.pool,
                        .zero_bytes = zero_bytes,
                        .sample_bytes = sample_bytes,
                        .is_in_thread = is_in_thread};
    rebatch_step_ops ops = REBATCH_STEP_OPS_INIT;
    ops.zero_grad = zero_pressed;
    ops.forward_backward = forward_pressed;
    ops.optimizer_step = update_pressed;
    ops.flags = REBATCH_DECLARES_MUTATION;
    cr_assert_eq(rebatch_pool_alloc(&p.cache, p.pool, MIB(1), NULL, 0), REBATCH_OK);
    cr_assert_eq(rebatch_guard(p.rb, &p.cache, sizeof p.cache, REBATCH_GUARD_HOST), REBATCH_OK);
    cr_assert_eq(rebatch_pool_add_pressure(p.pool, give_up, &p), REBATCH_OK);
    cr_expect_eq(rebatch_step(p.rb, &ops, 4, &p, NULL), REBATCH_E_EXHAUSTED);
    cr_expect_null(p.cache, "the guard has put back a pointer to a block that is gone");
    cr_expect_eq(live_bytes(&program), 0);
    close_program(&program);
}

Test(step_reclaim, what_pressure_frees_is_not_put_back_by_a_guard)
{
    expect_cache_given_up(MIB(64), MIB(1), false);
    expect_cache_given_up(MIB(1), MIB(64), false);
    expect_cache_given_up(MIB(1), MIB(64), true);
}

static rebatch_status resize(size_t micro_batch, void *user)
{
    (void)micro_batch, (void)user;
    return REBATCH_OK;
}

Test(step_reclaim, what_needs_to_take_back_is_refused)
{
    struct program p;
    open_program(&p, MIB(16));
    rebatch_step_ops ops = program_ops();
    cr_expect_eq(rebatch_check(p.rb, &ops, 8, &p, NULL, NULL), REBATCH_E_UNSUPPORTED);
    cr_expect(strstr(rebatch_last_error(), "reclaim is off"), "%s", rebatch_last_error());
    ops.resize = resize;
    cr_expect_eq(rebatch_step(p.rb, &ops, 8, &p, NULL), REBATCH_E_INVALID);
    cr_expect(strstr(rebatch_last_error(), "reclaim is off"), "%s", rebatch_last_error());
    cr_expect_eq(p.calls, 0);
    close_program(&p);
}

Test(step_reclaim, a_probe_finds_the_largest_size)
{
    struct program p;
    rebatch_probe_report report;
    open_program(&p, MIB(20));
    p.gradient_bytes = MIB(3);
    p.in_thread = true;
    const rebatch_step_ops ops = program_ops();
    cr_assert_eq(rebatch_probe(p.rb, &ops, 64, &p, NULL, &report), REBATCH_OK, "%s",
                 rebatch_last_error());
    cr_expect_eq(report.size, 17);
    cr_expect_eq(report.ooms, 0);
    close_program(&p);
}

/* So is the micro-batch that runs before the trials. */
Test(step_reclaim, a_probe_of_a_small_batch_runs_all_of_it)
{
    struct program p;
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch_probe_report report;
    open_program(&p, MIB(20));
    rebatch_close(p.rb);
    options.reclaim = REBATCH_OFF;
    options.existing_pool = p.pool;
    options.micro_smallest = 4;
    options.log_level = REBATCH_LOG_QUIET;
    cr_assert_eq(rebatch_open(&p.rb, p.device, &options), REBATCH_OK);
    const rebatch_step_ops ops = program_ops();
    cr_assert_eq(rebatch_probe(p.rb, &ops, 3, &p, NULL, &report), REBATCH_OK, "%s",
                 rebatch_last_error());
    cr_expect_eq(report.size, 3);
    cr_expect_eq(p.sum, 6.0 * (double)p.calls, "%zu calls, not each of all samples", p.calls);
    close_program(&p);
}

/* ---- a pool that is there ---- */

Test(step_reclaim, sessions_share_a_pool)
{
    struct program p;
    open_program(&p, MIB(16));
    rebatch *const first = p.rb, *const second = open_on(&p);
    for (int i = 0; i < 4; i++) {
        p.rb = i % 2 ? second : first;
        (void)step(&p, 8, REBATCH_OK);
    }
    cr_expect_eq(p.updates, 4);
    cr_expect_eq(rebatch_get_pool(second), p.pool);
    rebatch_close(second);
    p.rb = first;
    (void)step(&p, 8, REBATCH_OK);
    close_program(&p);
}

/* Else a session that is closed would still be asked which requests fail. */
Test(step_reclaim, failures_on_purpose_end_with_the_session)
{
    struct program p;
    void *memory;
    cr_assert_eq(setenv("REBATCH_RUN_OOM", "2", 1), 0);
    open_program(&p, MIB(16));
    rebatch *const first = p.rb, *const second = open_on(&p);
    (void)step(&p, 8, REBATCH_OK);
    rebatch_close(first);
    p.rb = second;
    const rebatch_step_report report = step(&p, 8, REBATCH_OK);
    cr_expect_eq(report.ooms, 0); /* its second request is in its second step */
    cr_expect_eq(step(&p, 8, REBATCH_OK).ooms, 1);
    cr_expect_eq(rebatch_pool_alloc(&memory, p.pool, MIB(1), NULL, 0), REBATCH_OK);
    cr_expect_eq(rebatch_pool_free(p.pool, memory), REBATCH_OK);
    close_program(&p);
}

Test(step_reclaim, a_pool_outlives_its_sessions)
{
    struct program p;
    void *memory;
    open_program(&p, MIB(16));
    cr_assert_eq(rebatch_pool_alloc(&memory, p.pool, MIB(1), NULL, 0), REBATCH_OK);
    rebatch_pool_destroy(p.pool);
    cr_expect_str_eq(rebatch_last_error(), "1 session is open on the pool: expected none");
    rebatch_close(p.rb);
    p.rb = NULL;
    cr_expect_eq(live_bytes(&p), MIB(1));
    cr_expect_eq(rebatch_pool_free(p.pool, memory), REBATCH_OK);
    close_program(&p);
}

Test(step_reclaim, a_pool_of_its_own_needs_no_more_than_the_option)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    struct program p;
    open_program(&p, MIB(64));
    rebatch_close(p.rb);
    options.log_level = REBATCH_LOG_QUIET;
    options.existing_pool = p.pool;
    cr_assert_eq(rebatch_open(&p.rb, p.device, &options), REBATCH_OK);
    p.fits = 4;
    (void)step(&p, 8, REBATCH_OK); /* reclaim is on: the held block is taken back */
    cr_expect_eq(live_bytes(&p), 0);
    close_program(&p);
}

Test(step_reclaim, a_wrong_pool_is_refused)
{
    struct program p;
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch_device *other;
    rebatch *rb;
    open_program(&p, MIB(16));
    cr_assert_eq(rebatch_device_open_host(&other, MIB(16), NULL), REBATCH_OK);
    options.existing_pool = p.pool;
    cr_expect_eq(rebatch_open(&rb, other, &options), REBATCH_E_INVALID);
    cr_expect(strstr(rebatch_last_error(), "another device"), "%s", rebatch_last_error());
    options.pool.limit_bytes = MIB(8);
    cr_expect_eq(rebatch_open(&rb, p.device, &options), REBATCH_E_INVALID);
    cr_expect(strstr(rebatch_last_error(), "both set"), "%s", rebatch_last_error());
    rebatch_device_close(other);
    close_program(&p);
}

/* ---- state that functions guard ---- */

static rebatch_status save(rebatch_guard_point point, void *user)
{
    struct program *p = user;
    p->saved[point] = p->sum;
    p->saves[point]++;
    return p->save_status;
}

static rebatch_status restore(rebatch_guard_point point, void *user)
{
    struct program *p = user;
    p->sum = p->saved[point];
    p->restores[point]++;
    return REBATCH_OK;
}

static const rebatch_guard_ops guard = {sizeof guard, save, restore};

Test(step_reclaim, guard_functions_restore_what_an_attempt_changed)
{
    struct program p;
    open_program(&p, MIB(64));
    cr_assert_eq(rebatch_guard_with(p.rb, &guard, &p), REBATCH_OK);
    p.fits = 4;
    (void)step(&p, 8, REBATCH_OK);
    cr_expect_eq(p.sum, 36.0);
    cr_expect_eq(p.restores[REBATCH_GUARD_ATTEMPT], 1);
    cr_expect_eq(p.restores[REBATCH_GUARD_STEP], 0);
    cr_expect_eq(p.saves[REBATCH_GUARD_STEP], 1);
    (void)rebatch_pool_free(p.pool, p.held);
    close_program(&p);
}

Test(step_reclaim, guard_functions_restore_the_step_when_it_runs_again)
{
    struct program p;
    open_program(&p, MIB(64));
    cr_assert_eq(rebatch_guard_with(p.rb, &guard, &p), REBATCH_OK);
    p.fits = 4;
    p.dirties = true;
    (void)step(&p, 8, REBATCH_OK);
    cr_expect_eq(p.sum, 36.0);
    cr_expect_eq(p.restores[REBATCH_GUARD_STEP], 1);
    (void)rebatch_pool_free(p.pool, p.held);
    close_program(&p);
}

Test(step_reclaim, a_guard_function_that_fails_ends_the_step)
{
    struct program p;
    open_program(&p, MIB(64));
    cr_assert_eq(rebatch_guard_with(p.rb, &guard, &p), REBATCH_OK);
    p.save_status = REBATCH_E_USER + 3;
    (void)step(&p, 8, REBATCH_E_USER + 3);
    cr_expect_eq(p.calls, 0);
    p.save_status = REBATCH_OOM;
    (void)step(&p, 8, REBATCH_E_STATE);
    cr_expect(strstr(rebatch_last_error(), "beforehand"), "%s", rebatch_last_error());
    p.save_status = REBATCH_OK;
    (void)step(&p, 8, REBATCH_OK);
    close_program(&p);
}

Test(step_reclaim, guard_functions_are_checked)
{
    struct program p;
    rebatch_guard_ops ops = guard;
    open_program(&p, MIB(64));
    cr_expect_eq(rebatch_guard_with(p.rb, NULL, &p), REBATCH_E_INVALID);
    ops.restore = NULL;
    cr_expect_eq(rebatch_guard_with(p.rb, &ops, &p), REBATCH_E_INVALID);
    cr_expect(strstr(rebatch_last_error(), "ops.restore is NULL"), "%s", rebatch_last_error());
    cr_expect_eq(rebatch_guard_with(p.rb, &guard, &p), REBATCH_OK);
    close_program(&p);
}
