/* Owns the tests of several sessions with resize on one pool: each has buffers of its own.
 * Must not know the library's inside. */
#include "rig.h"

struct trainer {
    rebatch *rb;
    char *buffer;
    size_t room;
    char mark;
    unsigned made;         /* calls of resize */
    rebatch_status answer; /* of the next forward_backward */
    struct trainer *inner; /* forward_backward runs a step of it */
};

static rebatch_device *device;
static rebatch_pool *pool;
static struct trainer trainers[2];

static void open_sessions(void)
{
    OK(rebatch_device_open_host(&device, MIB(400), NULL));
    OK(rebatch_pool_create(&pool, device, NULL));
    for (size_t i = 0; i < 2; i++) {
        trainers[i] = (struct trainer){.mark = (char)('a' + i)};
        OK(rebatch_open(
            &trainers[i].rb, device,
            &OPTIONS(.log_level = REBATCH_LOG_QUIET, .grow_after = 2, .existing_pool = pool)));
    }
}

static size_t live_mib(void)
{
    const rebatch_pool_stats stats = pool_stats_of(pool);
    return (size_t)stats.live_bytes / MIB(1);
}

static void close_sessions(void)
{
    rebatch_close(trainers[0].rb);
    cr_expect_eq(live_mib(), trainers[1].room, "its buffers are taken back, and no others");
    rebatch_close(trainers[1].rb);
    cr_expect_eq(live_mib(), 0);
    rebatch_pool_destroy(pool);
    rebatch_device_close(device);
}

static void check_buffer(const struct trainer *t)
{
    size_t bytes = 0;
    cr_assert_eq(rebatch_pool_block_bytes(&bytes, pool, t->buffer), REBATCH_OK, "%c: %s", t->mark,
                 rebatch_last_error());
    cr_assert_geq(bytes, t->room * MIB(1));
    for (size_t i = 0; i < t->room * MIB(1); i += 4096)
        cr_assert_eq(t->buffer[i], t->mark, "%c's buffer was overwritten", t->mark);
}

static rebatch_status resize(size_t samples, void *user)
{
    struct trainer *const t = user;
    t->made++;
    void *block;
    if (rebatch_pool_alloc(&block, pool, samples * MIB(1), NULL, 0))
        return REBATCH_OOM;
    t->buffer = memset(block, t->mark, samples * MIB(1));
    t->room = samples;
    return REBATCH_OK;
}

static rebatch_status zero_grad(void *user)
{
    check_buffer(user);
    return REBATCH_OK;
}

static rebatch_status step(struct trainer *t, size_t batch);

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct trainer *const t = user;
    check_buffer(t);
    cr_assert_leq(mb->count, t->room);
    if (t->inner)
        OK(step(t->inner, 8));
    check_buffer(t);
    const rebatch_status answer = t->answer;
    t->answer = REBATCH_OK;
    if (!answer)
        rebatch_mutating(t->rb);
    return answer;
}

static rebatch_status optimizer_step(void *user)
{
    struct trainer *const t = user;
    check_buffer(t);
    rebatch_mutating(t->rb);
    return REBATCH_OK;
}

static rebatch_status step(struct trainer *t, size_t batch)
{
    const rebatch_step_ops ops = OPS(zero_grad, forward_backward, optimizer_step,
                                     .flags = REBATCH_DECLARES_MUTATION, .resize = resize);
    return rebatch_step(t->rb, &ops, batch, t, NULL);
}

Test(step_shared, sessions_on_one_pool_have_buffers_of_their_own)
{
    open_sessions();
    for (size_t i = 0; i < 8; i++)
        OK(step(&trainers[i % 2], 8));
    cr_expect_eq(trainers[0].made + trainers[1].made, 2, "nothing has changed");
    cr_expect_eq(live_mib(), 16);
    for (size_t i = 0; i < 8; i++) {
        trainers[i % 2].answer = i < 2 ? REBATCH_OOM : REBATCH_OK;
        OK(step(&trainers[i % 2], 8));
        cr_expect_eq(live_mib(), trainers[0].room + trainers[1].room);
    }
    close_sessions();
}

/* The inner step's buffers stay when the attempt that ran it is undone. */
Test(step_shared, a_step_within_a_callback_of_another_session_has_its_own)
{
    open_sessions();
    trainers[0].inner = &trainers[1];
    OK(step(&trainers[0], 8));
    trainers[0].answer = REBATCH_OOM;
    OK(step(&trainers[0], 8));
    cr_expect_eq(trainers[1].made, 1);
    trainers[0].inner = NULL;
    OK(step(&trainers[1], 8));
    cr_expect_eq(trainers[1].made, 1);
    cr_expect_eq(live_mib(), trainers[0].room + trainers[1].room);
    close_sessions();
}

Test(step_shared, a_session_that_ends_makes_room_for_another)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch *more[200];
    size_t count = 0;
    open_sessions();
    options.existing_pool = pool;
    while (count < 200 && rebatch_open(&more[count], device, &options) == REBATCH_OK)
        count++;
    cr_expect_eq(count, 125);
    cr_expect_str_eq(rebatch_last_error(), "127 sessions use existing_pool already: the most there "
                                           "are with reclaim on");
    rebatch_close(more[0]);
    OK(rebatch_open(&more[0], device, &options));
    options.reclaim = REBATCH_OFF;
    OK(rebatch_open(&more[count], device, &options));
    for (size_t i = 0; i <= count; i++)
        rebatch_close(more[i]);
    close_sessions();
}

/* ---- pressure within an inner step ---- */

static void *kept;    /* guarded by the outer session */
static size_t wanted; /* by the inner step */

static size_t give_up_kept(size_t wanted_bytes, void *user)
{
    (void)wanted_bytes;
    (void)user;
    if (!kept)
        return 0;
    OK(rebatch_pool_free(pool, kept));
    kept = NULL;
    return MIB(100);
}

static rebatch_status use_much(const rebatch_microbatch *mb, void *user)
{
    const struct trainer *const t = user;
    void *block;
    const rebatch_status status = rebatch_pool_alloc(&block, mb->pool, wanted, NULL, 0);
    if (status)
        return status;
    rebatch_mutating(t->rb);
    return rebatch_pool_free(mb->pool, block);
}

static rebatch_status update_nothing(void *user)
{
    const struct trainer *const t = user;
    rebatch_mutating(t->rb);
    return REBATCH_OK;
}

static rebatch_status run_inner_and_fail(const rebatch_microbatch *mb, void *user)
{
    (void)mb;
    struct trainer *const t = user;
    const rebatch_step_ops ops =
        OPS(nothing_to_do, use_much, update_nothing, .flags = REBATCH_DECLARES_MUTATION);
    OK(rebatch_step(t->inner->rb, &ops, 4, t->inner, NULL));
    cr_assert_null(kept, "the inner step has no memory without it");
    return REBATCH_E_USER;
}

/* What it frees is free for good, so a pointer to it must not come back. */
Test(step_shared, what_pressure_changes_within_an_inner_step_stays_in_the_outer_sessions_guards)
{
    open_sessions();
    const rebatch_step_ops ops =
        OPS(nothing_to_do, run_inner_and_fail, update_nothing, .flags = REBATCH_DECLARES_MUTATION);
    trainers[0].inner = &trainers[1];
    wanted = MIB(350);
    OK(rebatch_guard(trainers[0].rb, &kept, sizeof kept, REBATCH_GUARD_HOST));
    OK(rebatch_pool_alloc(&kept, pool, MIB(100), NULL, 0));
    OK(rebatch_pool_add_pressure(pool, give_up_kept, NULL));
    cr_assert_eq(rebatch_step(trainers[0].rb, &ops, 4, &trainers[0], NULL), REBATCH_E_USER);
    cr_expect_null(kept, "the step was undone, and what the pressure callback did was not");
    close_sessions();
}
