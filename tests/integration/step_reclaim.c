/* Owns the tests of sessions that take nothing back (reclaim off), of sessions on a pool that is
 * there, and of state that functions guard.
 * Must not know more of the library than its public headers say. */
#include <pthread.h>
#include <stdlib.h>

#include "rig.h"

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
        OK(rebatch_pool_alloc(&p->held, p->pool, MIB(1), NULL, 0));
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
    return (rebatch_step_ops)OPS(zero_grad, forward_backward, optimizer_step,
                                 .flags = REBATCH_DECLARES_MUTATION);
}

static rebatch *open_on(struct program *p)
{
    rebatch *rb;
    OK(rebatch_open(&rb, p->device,
                    &OPTIONS(.reclaim = REBATCH_OFF, .existing_pool = p->pool,
                             .log_level = REBATCH_LOG_QUIET)));
    return rb;
}

static void program_open(struct program *p, size_t capacity_bytes)
{
    *p = (struct program){.sample_bytes = MIB(1), .fits = SIZE_MAX};
    OK(rebatch_device_open_host(&p->device, capacity_bytes, NULL));
    OK(rebatch_pool_create(&p->pool, p->device, NULL));
    p->rb = open_on(p);
}

static uint64_t live_bytes(const struct program *p)
{
    return pool_stats_of(p->pool).live_bytes;
}

static void program_close(struct program *p)
{
    rebatch_close(p->rb);
    OK(rebatch_pool_free(p->pool, p->gradients));
    cr_assert_eq(live_bytes(p), 0);
    rebatch_pool_destroy(p->pool);
    cr_assert_eq(used_bytes_of(p->device), 0);
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
    OPEN(program, p, MIB(64));
    p.fits = 4;
    const rebatch_step_report report = step(&p, 8, REBATCH_OK);
    cr_expect_eq(report.ooms, 1);
    cr_expect_eq(report.micro, 4);
    cr_expect_eq(live_bytes(&p), MIB(1));
    cr_expect_eq(rebatch_pool_free(p.pool, p.held), REBATCH_OK, "%s", rebatch_last_error());
}

Test(step_reclaim, a_batch_that_runs_again_takes_nothing_back)
{
    OPEN(program, p, MIB(64));
    p.fits = 4;
    p.dirties = true;
    p.gradient_bytes = MIB(2);
    const rebatch_step_report report = step(&p, 8, REBATCH_OK);
    cr_expect_eq(report.ooms, 1);
    cr_expect_eq(p.zeros, 2);
    cr_expect_eq(live_bytes(&p), MIB(3));
    cr_expect_eq(rebatch_pool_free(p.pool, p.held), REBATCH_OK);
}

/* Else gradients that are freed and made anew in each step would be held twice. */
Test(step_reclaim, frees_are_effective_immediately)
{
    OPEN(program, p, MIB(64));
    p.gradient_bytes = MIB(40);
    for (int i = 0; i < 3; i++) {
        const rebatch_step_report report = step(&p, 8, REBATCH_OK);
        cr_expect_eq(report.ooms, 0);
        cr_expect_eq(report.peak_bytes, MIB(48));
    }
    const rebatch_pool_stats stats = pool_stats_of(p.pool);
    cr_expect_eq(stats.deferred_bytes, 0);
}

/* A scope of the program's own around the step holds frees back, as scopes do. */
Test(step_reclaim, a_scope_around_the_step_still_undoes)
{
    rebatch_scope scope;
    OPEN(program, p, MIB(64));
    p.gradient_bytes = MIB(2);
    (void)step(&p, 8, REBATCH_OK);
    void *const before = p.gradients;
    OK(rebatch_scope_begin(&scope, p.pool));
    (void)step(&p, 8, REBATCH_OK);
    OK(rebatch_scope_rollback(p.pool, scope));
    p.gradients = before;
    cr_expect_eq(live_bytes(&p), MIB(2));
}

Test(step_reclaim, an_oom_of_any_thread_is_the_callbacks)
{
    OPEN(program, p, MIB(4));
    p.in_thread = true;
    const rebatch_step_report report = step(&p, 8, REBATCH_OK);
    cr_expect_eq(report.micro, 4);
    cr_expect_eq(report.oom.asked_bytes, MIB(8));
}

/* What another thread allocated counts as needed, so the size that failed is not tried again. */
Test(step_reclaim, admission_knows_what_other_threads_allocated)
{
    OPEN(program, p, MIB(16));
    p.in_thread = true;
    (void)step(&p, 8, REBATCH_OK);
    OK(rebatch_pool_trim(p.pool, 0, NULL));
    OK(rebatch_device_set_capacity(p.device, MIB(4)));
    const size_t calls = p.calls;
    const rebatch_step_report report = step(&p, 8, REBATCH_OK);
    cr_expect_eq(report.ooms_in[REBATCH_PHASE_ADMISSION], 1);
    cr_expect_eq(report.ooms, 1);
    cr_expect_eq(p.calls, calls + 2);
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

static size_t give_up(size_t wanted_bytes, void *user)
{
    struct pressed *p = user;
    (void)wanted_bytes;
    if (!p->cache)
        return 0;
    OK(rebatch_pool_free(p->pool, p->cache));
    p->cache = NULL;
    return MIB(1);
}

static void expect_cache_given_up(size_t zero_bytes, size_t sample_bytes, bool is_in_thread)
{
    OPEN(program, program, MIB(16));
    struct pressed p = {.rb = program.rb,
                        .pool = program.pool,
                        .zero_bytes = zero_bytes,
                        .sample_bytes = sample_bytes,
                        .is_in_thread = is_in_thread};
    rebatch_step_ops ops =
        OPS(zero_pressed, forward_pressed, nothing_to_do, .flags = REBATCH_DECLARES_MUTATION);
    OK(rebatch_pool_alloc(&p.cache, p.pool, MIB(1), NULL, 0));
    OK(rebatch_guard(p.rb, &p.cache, sizeof p.cache, REBATCH_GUARD_HOST));
    OK(rebatch_pool_add_pressure(p.pool, give_up, &p));
    cr_expect_eq(rebatch_step(p.rb, &ops, 4, &p, NULL), REBATCH_E_EXHAUSTED);
    cr_expect_null(p.cache, "the guard has put back a pointer to a block that is gone");
    cr_expect_eq(live_bytes(&program), 0);
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
    OPEN(program, p, MIB(16));
    rebatch_step_ops ops = program_ops();
    FAILS(rebatch_check(p.rb, &ops, 8, &p, NULL, NULL), REBATCH_E_UNSUPPORTED, "reclaim is off");
    ops.resize = resize;
    FAILS(rebatch_step(p.rb, &ops, 8, &p, NULL), REBATCH_E_INVALID, "reclaim is off");
    cr_expect_eq(p.calls, 0);
}

Test(step_reclaim, a_probe_finds_the_largest_size)
{
    rebatch_probe_report report;
    OPEN(program, p, MIB(20));
    p.gradient_bytes = MIB(3);
    p.in_thread = true;
    const rebatch_step_ops ops = program_ops();
    OK(rebatch_probe(p.rb, &ops, 64, &p, NULL, &report));
    cr_expect_eq(report.size, 17);
    cr_expect_eq(report.ooms, 0);
}

/* So is the micro-batch that runs before the trials. */
Test(step_reclaim, a_probe_of_a_small_batch_runs_all_of_it)
{
    rebatch_probe_report report;
    OPEN(program, p, MIB(20));
    rebatch_close(p.rb);
    OK(rebatch_open(&p.rb, p.device,
                    &OPTIONS(.reclaim = REBATCH_OFF, .existing_pool = p.pool, .micro_smallest = 4,
                             .log_level = REBATCH_LOG_QUIET)));
    const rebatch_step_ops ops = program_ops();
    OK(rebatch_probe(p.rb, &ops, 3, &p, NULL, &report));
    cr_expect_eq(report.size, 3);
    cr_expect_eq(p.sum, 6.0 * (double)p.calls, "%zu calls, not each of all samples", p.calls);
}

/* ---- a pool that is there ---- */

Test(step_reclaim, sessions_share_a_pool)
{
    OPEN(program, p, MIB(16));
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
}

/* Else a session that is closed would still be asked which requests fail. */
Test(step_reclaim, failures_on_purpose_end_with_the_session)
{
    void *memory;
    cr_assert_eq(setenv("REBATCH_RUN_OOM", "2", 1), 0);
    OPEN(program, p, MIB(16));
    rebatch *const first = p.rb, *const second = open_on(&p);
    (void)step(&p, 8, REBATCH_OK);
    rebatch_close(first);
    p.rb = second;
    const rebatch_step_report report = step(&p, 8, REBATCH_OK);
    cr_expect_eq(report.ooms, 0); /* its second request is in its second step */
    cr_expect_eq(step(&p, 8, REBATCH_OK).ooms, 1);
    cr_expect_eq(rebatch_pool_alloc(&memory, p.pool, MIB(1), NULL, 0), REBATCH_OK);
    cr_expect_eq(rebatch_pool_free(p.pool, memory), REBATCH_OK);
}

Test(step_reclaim, a_pool_outlives_its_sessions)
{
    void *memory;
    OPEN(program, p, MIB(16));
    OK(rebatch_pool_alloc(&memory, p.pool, MIB(1), NULL, 0));
    rebatch_pool_destroy(p.pool);
    cr_expect_str_eq(rebatch_last_error(), "1 session is open on the pool: expected none");
    rebatch_close(p.rb);
    p.rb = NULL;
    cr_expect_eq(live_bytes(&p), MIB(1));
    cr_expect_eq(rebatch_pool_free(p.pool, memory), REBATCH_OK);
}

Test(step_reclaim, a_pool_of_its_own_needs_no_more_than_the_option)
{
    OPEN(program, p, MIB(64));
    rebatch_close(p.rb);
    OK(rebatch_open(&p.rb, p.device,
                    &OPTIONS(.log_level = REBATCH_LOG_QUIET, .existing_pool = p.pool)));
    p.fits = 4;
    (void)step(&p, 8, REBATCH_OK); /* reclaim is on: the held block is taken back */
    cr_expect_eq(live_bytes(&p), 0);
}

Test(step_reclaim, a_wrong_pool_is_refused)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch_device *other;
    rebatch *rb;
    OPEN(program, p, MIB(16));
    OK(rebatch_device_open_host(&other, MIB(16), NULL));
    options.existing_pool = p.pool;
    FAILS(rebatch_open(&rb, other, &options), REBATCH_E_INVALID, "another device");
    options.pool.limit_bytes = MIB(8);
    FAILS(rebatch_open(&rb, p.device, &options), REBATCH_E_INVALID, "both set");
    rebatch_device_close(other);
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
    OPEN(program, p, MIB(64));
    OK(rebatch_guard_with(p.rb, &guard, &p));
    p.fits = 4;
    (void)step(&p, 8, REBATCH_OK);
    cr_expect_eq(p.sum, 36.0);
    cr_expect_eq(p.restores[REBATCH_GUARD_ATTEMPT], 1);
    cr_expect_eq(p.restores[REBATCH_GUARD_STEP], 0);
    cr_expect_eq(p.saves[REBATCH_GUARD_STEP], 1);
    (void)rebatch_pool_free(p.pool, p.held);
}

Test(step_reclaim, guard_functions_restore_the_step_when_it_runs_again)
{
    OPEN(program, p, MIB(64));
    OK(rebatch_guard_with(p.rb, &guard, &p));
    p.fits = 4;
    p.dirties = true;
    (void)step(&p, 8, REBATCH_OK);
    cr_expect_eq(p.sum, 36.0);
    cr_expect_eq(p.restores[REBATCH_GUARD_STEP], 1);
    (void)rebatch_pool_free(p.pool, p.held);
}

Test(step_reclaim, a_guard_function_that_fails_ends_the_step)
{
    OPEN(program, p, MIB(64));
    OK(rebatch_guard_with(p.rb, &guard, &p));
    p.save_status = REBATCH_E_USER + 3;
    (void)step(&p, 8, REBATCH_E_USER + 3);
    cr_expect_eq(p.calls, 0);
    p.save_status = REBATCH_OOM;
    (void)step(&p, 8, REBATCH_E_STATE);
    SAYS("beforehand");
    p.save_status = REBATCH_OK;
    (void)step(&p, 8, REBATCH_OK);
}

Test(step_reclaim, guard_functions_are_checked)
{
    rebatch_guard_ops ops = guard;
    OPEN(program, p, MIB(64));
    cr_expect_eq(rebatch_guard_with(p.rb, NULL, &p), REBATCH_E_INVALID);
    ops.restore = NULL;
    FAILS(rebatch_guard_with(p.rb, &ops, &p), REBATCH_E_INVALID, "ops.restore is NULL");
    cr_expect_eq(rebatch_guard_with(p.rb, &guard, &p), REBATCH_OK);
}
