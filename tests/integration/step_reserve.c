/* Owns the tests of updates that reserve before they begin to change parameters: none is torn,
 * whether or not a plan serves them. Must not know more of the library than its public headers say.
 */
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
