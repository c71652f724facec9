/* Owns the tests of which pointers guards know: those in what is guarded, and none beside it.
 * Must not know what is done about them. */
#include <criterion/criterion.h>
#include <string.h>

#include "rebatch/rebatch.h"
#include "recover/recover.h"

enum { WORDS = 4 };

Test(recover_guard, a_pointer_is_known_in_every_guarded_word_and_in_no_other)
{
    static const struct {
        size_t first, count; /* guarded words */
        size_t odd_bytes;    /* and so many bytes more */
    } cases[] = {{0, 4, 0}, {1, 2, 0}, {0, 1, 0}, {3, 1, 0}, {0, 2, 4}};
    static char block;
    rebatch_device *device;
    cr_assert_eq(rebatch_device_open_host(&device, (size_t)1 << 20, NULL), REBATCH_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rebatch *rb;
        void *state[WORDS] = {NULL};
        cr_assert_eq(rebatch_open(&rb, device, NULL), REBATCH_OK);
        cr_assert_not(rbi_guards_know(rb, &block));
        cr_assert_eq(rebatch_guard(rb, state + cases[i].first,
                                   cases[i].count * sizeof *state + cases[i].odd_bytes,
                                   REBATCH_GUARD_HOST),
                     REBATCH_OK);
        for (size_t at = 0; at < WORDS; at++) {
            const bool is_guarded = at >= cases[i].first && at < cases[i].first + cases[i].count;
            state[at] = &block;
            cr_assert_eq(rbi_guards_know(rb, &block), is_guarded, "case %zu, word %zu", i, at);
            state[at] = NULL;
        }
        rebatch_close(rb);
    }
    rebatch_device_close(device);
}

static rebatch_status nothing(void *user)
{
    (void)user;
    return REBATCH_OK;
}

static rebatch_status no_samples(const rebatch_microbatch *mb, void *user)
{
    (void)mb;
    (void)user;
    return REBATCH_OK;
}

/* A pool outlives the sessions that use it: no pressure after a step must reach a session that has
 * gone. */
Test(recover_guard, after_a_step_the_pool_tells_the_session_of_no_pressure)
{
    const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                  .zero_grad = nothing,
                                  .forward_backward = no_samples,
                                  .optimizer_step = nothing};
    rebatch_device *device;
    rebatch *rb;
    cr_assert_eq(rebatch_device_open_host(&device, (size_t)1 << 20, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_open(&rb, device, NULL), REBATCH_OK);
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(rebatch_step(rb, &ops, 2, NULL, NULL), REBATCH_OK);
        const struct rbi_pool_pressure_watch none = {0};
        const struct rbi_pool_pressure_watch left =
            rbi_pool_watch_pressure(rebatch_get_pool(rb), &none);
        cr_expect(!left.on_pressure && !left.user, "after step %d", i);
        cr_expect_eq(rbi_residents_enter(rebatch_get_pool(rb), 0), 0,
                     "what is resident now is no session's");
    }
    rebatch_close(rb);
    rebatch_device_close(device);
}

static rebatch_status first_gpu(void *self, int *ordinal)
{
    (void)self;
    *ordinal = 0;
    return REBATCH_OK;
}

/* Which memcpy() cannot read; a host device's can be read. */
Test(recover_guard, memory_of_a_gpu_is_not_guarded_as_host_memory)
{
    rebatch_device *device;
    rebatch *rb;
    void *memory;
    cr_assert_eq(rebatch_device_open_host(&device, (size_t)1 << 20, NULL), REBATCH_OK);
    struct rbi_device_ops ops = *device->ops;
    ops.ordinal = first_gpu;
    cr_assert_eq(rebatch_open(&rb, device, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_pool_alloc(&memory, rebatch_get_pool(rb), 100, NULL, 0), REBATCH_OK);
    cr_assert_eq(rebatch_guard(rb, memory, 100, REBATCH_GUARD_HOST), REBATCH_OK);
    device->ops = &ops;
    cr_assert_eq(rebatch_guard(rb, memory, 100, REBATCH_GUARD_HOST), REBATCH_E_INVALID);
    cr_assert(strstr(rebatch_last_error(), "expected REBATCH_GUARD_DEVICE"), "%s",
              rebatch_last_error());
    cr_assert_eq(rebatch_guard(rb, memory, 100, REBATCH_GUARD_DEVICE), REBATCH_OK);
    rebatch_close(rb);
    rebatch_device_close(device);
}
