/* Owns the tests of what callbacks reserve: an update that does so before it changes parameters is
 * never torn, whether or not a plan serves it; and what is not used is free again.
 * Must not know more of the library than its public headers say. */
#include <pthread.h>

#include "step_common.h"

#define PAGE ((size_t)4096)
#define SEEDS 200
#define STEPS 10

struct trainer {
    rebatch_device *device;
    rebatch *rb;
    uint64_t seed;
    size_t reserved;
    bool is_other; /* the update's allocations are not those of the steps before */
    bool is_full;  /* the device has no byte more once memory is reserved */
};

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    (void)mb;
    rebatch_mutating(t->rb);
    return REBATCH_OK;
}

static void fill_device(const struct trainer *t)
{
    OK(rebatch_device_set_capacity(t->device, used_bytes_of(t->device)));
}

/* Allocates all that was reserved, in pieces that depend on the seed; another one has the rest in
 * one piece. */
static rebatch_status optimizer_step(void *user)
{
    struct trainer *t = user;
    rebatch_pool *pool = rebatch_get_pool(t->rb);
    uint64_t random = t->seed;
    void *blocks[64] = {NULL};
    rebatch_status status = rebatch_reserve(t->rb, t->reserved);
    if (status)
        return status;
    rebatch_mutating(t->rb);
    if (t->is_full)
        fill_device(t);
    const size_t other_from = t->is_other ? 1 + t->seed % 6 : 63;
    size_t left = t->reserved;
    for (size_t i = 0; left && i < 64; i++) {
        size_t bytes = PAGE / 8 * (1 + script_random(&random) % (t->reserved / PAGE));
        bytes = i >= other_from || bytes > left ? left : bytes;
        if ((status = rebatch_pool_alloc(&blocks[i], pool, bytes, NULL, 0)))
            return status;
        left -= bytes;
        const size_t k = script_random(&random) % (2 * i + 2);
        if (k > i)
            continue;
        (void)rebatch_pool_free(pool, blocks[k]);
        blocks[k] = NULL;
    }
    for (size_t i = 0; i < 64; i++)
        (void)rebatch_pool_free(pool, blocks[i]);
    return REBATCH_OK;
}

Test(step_reserve, an_update_that_reserves_is_never_torn, .description = "seeds 1 to 200")
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        struct trainer t = {.seed = seed, .reserved = PAGE * (4 + seed % 40)};
        rebatch_host_options host = REBATCH_HOST_OPTIONS_INIT;
        host.page_bytes = PAGE;
        OK(rebatch_device_open_host(&t.device, 1000 * PAGE, &host));
        OK(rebatch_open(&t.rb, t.device,
                        &OPTIONS(.log_level = REBATCH_LOG_QUIET,
                                 .pool.replay = seed % 5 ? REBATCH_ON : REBATCH_OFF)));
        /* Where the pool holds much more than is in use, callbacks are planned. */
        OK(rebatch_pool_reserve(rebatch_get_pool(t.rb), 500 * PAGE, NULL));
        const rebatch_step_ops ops = OPS(nothing_to_do, forward_backward, optimizer_step,
                                         .flags = REBATCH_DECLARES_MUTATION);
        for (int i = 0; i < STEPS; i++) {
            t.is_other = t.is_full = i == STEPS - 1;
            if (t.is_full)
                OK(rebatch_pool_trim(rebatch_get_pool(t.rb), 0, NULL));
            cr_assert_eq(rebatch_step(t.rb, &ops, 1, &t, NULL), REBATCH_OK, "seed %ju, step %d: %s",
                         (uintmax_t)seed, i, rebatch_last_error());
        }
        rebatch_close(t.rb);
        rebatch_device_close(t.device);
    }
}

/* ---- when a reservation ends ---- */

#define RESERVED MIB(8)

struct reserver {
    rebatch_device *device;
    rebatch *rb;
    rebatch_phase where; /* it reserves, and allocates nothing */
    bool is_refused;     /* another thread, of more than the rest, in the next callback */
};

CLOSE_BOTH(reserver)

static rebatch_status reserve_in(const struct reserver *r, rebatch_phase phase)
{
    return r->where == phase ? rebatch_reserve(r->rb, RESERVED) : REBATCH_OK;
}

static rebatch_status reserve_in_zero_grad(void *user)
{
    return reserve_in(user, REBATCH_PHASE_ZERO_GRAD);
}

static rebatch_status reserve_in_forward(const rebatch_microbatch *mb, void *user)
{
    const struct reserver *r = user;
    (void)mb;
    const rebatch_status status = reserve_in(r, REBATCH_PHASE_FORWARD);
    rebatch_mutating(r->rb);
    return status;
}

static rebatch_status reserve_in_update(void *user)
{
    const struct reserver *r = user;
    const rebatch_status status = reserve_in(r, REBATCH_PHASE_OPTIMIZER);
    rebatch_mutating(r->rb);
    return status;
}

static rebatch_status reserve_in_resize(size_t micro_batch, void *user)
{
    (void)micro_batch;
    return reserve_in(user, REBATCH_PHASE_RESIZE);
}

static rebatch_step_ops reserver_ops(const struct reserver *r)
{
    return (rebatch_step_ops)OPS(reserve_in_zero_grad, reserve_in_forward, reserve_in_update,
                                 .flags = REBATCH_DECLARES_MUTATION,
                                 .resize =
                                     r->where == REBATCH_PHASE_RESIZE ? reserve_in_resize : NULL);
}

static const rebatch_phase reserving[] = {REBATCH_PHASE_ZERO_GRAD, REBATCH_PHASE_FORWARD,
                                          REBATCH_PHASE_OPTIMIZER, REBATCH_PHASE_RESIZE};

static void reserver_open(struct reserver *r, rebatch_phase where)
{
    *r = (struct reserver){.where = where};
    open_on_host(&r->device, &r->rb, MIB(16), &OPTIONS(.log_level = REBATCH_LOG_QUIET));
}

Test(step_reserve, what_a_callback_reserved_is_not_held_after_the_step)
{
    for (size_t i = 0; i < sizeof reserving / sizeof *reserving; i++) {
        OPEN(reserver, r, reserving[i]);
        const rebatch_step_ops ops = reserver_ops(&r);
        OK(rebatch_step(r.rb, &ops, 4, &r, NULL));
        OK(rebatch_pool_set_limit(rebatch_get_pool(r.rb), MIB(1)));
        const rebatch_pool_stats stats = pool_stats_of(rebatch_get_pool(r.rb));
        cr_expect_leq(stats.reserved_bytes, MIB(1), "reserved in phase %d", (int)reserving[i]);
    }
}

static void *allocate_beside(void *user)
{
    struct reserver *r = user;
    void *memory;
    r->is_refused =
        rebatch_pool_alloc(&memory, rebatch_get_pool(r->rb), MIB(10), NULL, 0) != REBATCH_OK;
    if (!r->is_refused)
        OK(rebatch_pool_free(rebatch_get_pool(r->rb), memory));
    return NULL;
}

static rebatch_status update_beside(void *user)
{
    pthread_t thread;
    struct reserver *r = user;
    cr_assert_eq(pthread_create(&thread, NULL, allocate_beside, r), 0);
    cr_assert_eq(pthread_join(thread, NULL), 0);
    rebatch_mutating(r->rb);
    return REBATCH_OK;
}

Test(step_reserve, what_a_callback_reserved_is_not_held_in_the_next_one)
{
    for (size_t i = 0; i < sizeof reserving / sizeof *reserving; i++) {
        OPEN(reserver, r, reserving[i]);
        rebatch_step_ops ops = reserver_ops(&r);
        if (reserving[i] == REBATCH_PHASE_OPTIMIZER) { /* of the step before */
            OK(rebatch_step(r.rb, &ops, 4, &r, NULL));
            r.where = REBATCH_PHASE_COUNT;
        }
        ops.optimizer_step = update_beside;
        OK(rebatch_step(r.rb, &ops, 4, &r, NULL));
        cr_expect(!r.is_refused, "reserved in phase %d: %s", (int)reserving[i],
                  rebatch_last_error());
    }
}

Test(step_reserve, a_mark_releases_what_the_program_reserved)
{
    for (uint64_t key = 0; key < 2; key++) {
        OPEN(reserver, r, REBATCH_PHASE_COUNT);
        rebatch_pool *const pool = rebatch_get_pool(r.rb);
        OK(rebatch_pool_reserve(pool, RESERVED, NULL));
        OK(rebatch_pool_mark(pool, key));
        OK(rebatch_pool_set_limit(pool, MIB(1)));
        cr_expect_leq(pool_stats_of(pool).reserved_bytes, MIB(1), "key %d", (int)key);
    }
}
