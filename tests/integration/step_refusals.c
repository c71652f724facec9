/* Owns the tests of attempts that are not started: each refusal leads to a smaller size, with the
 * buffers of resize counted once, and every step and map ends.
 * Must not know more of the library than its public headers say. */
#include <stdlib.h>
#include <unistd.h>

#include "rig.h"

#define SECONDS 300 /* what ends at all ends within milliseconds */

/* ---- a trainer with buffers ---- */

struct trainer {
    rebatch_device *device;
    rebatch *rb;
    size_t made_bytes;    /* by resize, for each sample */
    size_t attempt_bytes; /* by forward_backward, for each sample */
    size_t counted;       /* samples that ran to their end */
    size_t largest;       /* micro-batch among them */
    size_t resizes;
    unsigned level; /* each halves what a sample needs */
};

static rebatch_status resize(size_t samples, void *user)
{
    struct trainer *t = user;
    void *buffer;
    t->resizes++;
    return rebatch_pool_alloc(&buffer, rebatch_get_pool(t->rb), samples * t->made_bytes >> t->level,
                              NULL, 0);
}

static rebatch_status run(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    void *block;
    const size_t bytes = mb->count * t->attempt_bytes >> t->level;
    if (rebatch_pool_alloc(&block, mb->pool, bytes, mb->stream, 0))
        return REBATCH_OOM;
    rebatch_mutating(t->rb);
    t->counted += mb->count;
    t->largest = mb->count > t->largest ? mb->count : t->largest;
    return rebatch_pool_free(mb->pool, block);
}

static rebatch_status zero(void *user)
{
    struct trainer *t = user;
    t->counted = t->largest = 0;
    return REBATCH_OK;
}

static rebatch_status update(void *user)
{
    rebatch_mutating(((struct trainer *)user)->rb);
    return REBATCH_OK;
}

static rebatch_status lighten(unsigned level, void *user)
{
    struct trainer *t = user;
    if (level > 3)
        return REBATCH_E_UNSUPPORTED;
    t->level = level;
    return REBATCH_OK;
}

static rebatch_step_ops ops_of(rebatch_toggle lightens)
{
    return (rebatch_step_ops)OPS(zero, run, update,
                                 .lighten = lightens == REBATCH_ON ? lighten : NULL,
                                 .flags = REBATCH_DECLARES_MUTATION, .resize = resize);
}

/* `need_bytes` a sample, of which the buffers have `made_bytes`. */
static void trainer_open(struct trainer *t, size_t made_bytes, size_t need_bytes,
                         const rebatch_options *given)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    if (given)
        options = *given;
    options.log_level = REBATCH_LOG_QUIET;
    *t = (struct trainer){.made_bytes = made_bytes, .attempt_bytes = need_bytes - made_bytes};
    open_on_host(&t->device, &t->rb, MIB(1024), &options);
}

CLOSE_BOTH(trainer)

static void set_limit(struct trainer *t, size_t bytes)
{
    OK(rebatch_pool_set_limit(rebatch_get_pool(t->rb), bytes));
}

/* ---- steps ---- */

Test(step_refusals, a_step_with_resize_goes_on_to_sizes_that_fit)
{
    (void)alarm(SECONDS);
    for (size_t fits = 1; fits <= 64; fits++) {
        rebatch_step_report report;
        const rebatch_step_ops ops = ops_of(REBATCH_OFF);
        OPEN(trainer, t, KIB(64), MIB(4), NULL);
        OK(rebatch_step(t.rb, &ops, 64, &t, NULL));
        set_limit(&t, MIB(4) * fits);
        cr_assert_eq(rebatch_step(t.rb, &ops, 64, &t, &report), REBATCH_OK, "%zu: %s", fits,
                     rebatch_last_error());
        cr_assert_eq(t.counted, 64);
        cr_assert(t.largest <= fits && 2 * t.largest > fits, "%zu of %zu", t.largest, fits);
        cr_assert_eq(report.redone_samples, 0, "%zu: something ran in vain", fits);
    }
}

Test(step_refusals, what_fits_at_no_size_ends_the_step_or_a_lighter_level_does)
{
    (void)alarm(SECONDS);
    for (int lightens = 0; lightens < 2; lightens++) {
        const rebatch_step_ops ops = ops_of(lightens ? REBATCH_ON : REBATCH_OFF);
        OPEN(trainer, t, KIB(64), MIB(4), NULL);
        OK(rebatch_step(t.rb, &ops, 16, &t, NULL));
        set_limit(&t, MIB(3));
        cr_assert_eq(rebatch_step(t.rb, &ops, 16, &t, NULL),
                     lightens ? REBATCH_OK : REBATCH_E_EXHAUSTED, "%s", rebatch_last_error());
        cr_assert_eq(t.level, lightens ? 1 : 0);
    }
}

/* A rest, and a batch that does not fill its buffers, are refused at the size of the buffers. */
Test(step_refusals, batches_of_other_sizes_find_what_fits)
{
    (void)alarm(SECONDS);
    for (size_t batch = 1; batch <= 40; batch++) {
        const rebatch_step_ops ops = ops_of(REBATCH_OFF);
        OPEN(trainer, t, KIB(64), MIB(2), NULL);
        OK(rebatch_step(t.rb, &ops, 32, &t, NULL));
        OK(rebatch_step(t.rb, &ops, batch, &t, NULL));
        set_limit(&t, MIB(3));
        cr_assert_eq(rebatch_step(t.rb, &ops, batch, &t, NULL), REBATCH_OK, "%zu: %s", batch,
                     rebatch_last_error());
        cr_assert(t.counted == batch && t.largest == 1, "%zu: %zu", batch, t.largest);
    }
}

Test(step_refusals, limits_on_the_size_hold)
{
    (void)alarm(SECONDS);
    const rebatch_step_ops ops = ops_of(REBATCH_OFF);
    OPEN(trainer, t, KIB(64), MIB(1), &OPTIONS(.micro_multiple_of = 3, .micro_smallest = 6));
    OK(rebatch_step(t.rb, &ops, 60, &t, NULL));
    set_limit(&t, MIB(13));
    OK(rebatch_step(t.rb, &ops, 60, &t, NULL));
    cr_assert_eq(t.largest, 6);
    set_limit(&t, MIB(5));
    FAILS(rebatch_step(t.rb, &ops, 60, &t, NULL), REBATCH_E_EXHAUSTED,
          "the smallest micro-batch allowed is 6");
}

/* ---- maps ---- */

static rebatch_status map(struct trainer *t, size_t count)
{
    const rebatch_map_ops ops = {.struct_size = sizeof ops, .run = run, .resize = resize};
    t->counted = t->largest = 0;
    return rebatch_map(t->rb, &ops, count, t, NULL);
}

Test(step_refusals, a_map_with_resize_before_the_first_step_ends)
{
    (void)alarm(SECONDS);
    OPEN(trainer, t, MIB(1), MIB(1) + KIB(64), NULL);
    set_limit(&t, MIB(40));
    for (int i = 0; i < 4; i++) {
        cr_assert_eq(map(&t, 64), REBATCH_OK, "map %d: %s", i, rebatch_last_error());
        cr_assert(t.counted == 64 && t.largest == 32, "map %d: %zu", i, t.largest);
    }
}

/* No step has made the buffers, so they are the map's to make larger. */
Test(step_refusals, a_map_alone_has_larger_buffers_for_more_samples)
{
    (void)alarm(SECONDS);
    OPEN(trainer, t, MIB(1), MIB(2), NULL);
    OK(map(&t, 8));
    OK(map(&t, 64));
    cr_assert(t.largest == 64 && t.resizes == 2, "%zu", t.largest);
}

Test(step_refusals, maps_and_steps_in_any_order_end_under_any_limit)
{
    (void)alarm(SECONDS);
    for (unsigned seed = 1; seed <= 200; seed++) {
        const rebatch_step_ops ops = ops_of(REBATCH_OFF);
        OPEN(trainer, t, KIB(64), KIB(512) * (1 + seed % 4), NULL);
        for (unsigned i = 0; i < 12; i++) {
            const size_t count = 1 + (seed * 13 + i * 29) % 70;
            set_limit(&t, MIB(8 + (seed * 7 + i * 31) % 90));
            const bool maps = (seed >> i % 7) & 1;
            const rebatch_status status =
                maps ? map(&t, count) : rebatch_step(t.rb, &ops, count, &t, NULL);
            cr_assert_eq(status, REBATCH_OK, "seed %u, %u: %s", seed, i, rebatch_last_error());
            cr_assert_eq(t.counted, count, "seed %u, %u: %zu of %zu samples", seed, i, t.counted,
                         count);
        }
    }
}
