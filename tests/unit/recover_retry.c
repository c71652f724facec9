/* Owns the tests of what is tried once more, on a device without virtual memory, where memory lies
 * in the pieces in which it was taken. Must not know the pool's lists. */
#include <criterion/criterion.h>

#include "device/device.h"
#include "rebatch/rebatch.h"

enum { PAGE = 65536 };

struct training {
    rebatch *rb;
    size_t ran;
};

/* Two blocks of two pages a sample. */
static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct training *t = user;
    void *blocks[2] = {NULL, NULL};
    rebatch_status status = REBATCH_OK;
    t->ran++;
    for (int i = 0; i < 2 && !status; i++)
        status = rebatch_pool_alloc(&blocks[i], mb->pool, 2 * PAGE * mb->count, NULL, 0);
    rebatch_mutating(t->rb);
    for (int i = 0; i < 2 && !status; i++)
        status = rebatch_pool_free(mb->pool, blocks[i]);
    return status;
}

static rebatch_status nothing(void *user)
{
    struct training *t = user;
    rebatch_mutating(t->rb);
    return REBATCH_OK;
}

/* A small block lives in a segment of four pages, so that what admission takes beside it is five
 * in one piece: then the second block of four finds three here and three there. */
Test(recover_retry, what_is_tried_once_more_takes_its_memory_request_by_request)
{
    const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                  .zero_grad = nothing,
                                  .forward_backward = forward_backward,
                                  .optimizer_step = nothing};
    rebatch_device *device;
    struct training t = {.ran = 0};
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch_step_report report;
    void *small;
    options.micro_start = 2;
    options.growth = REBATCH_OFF;
    cr_assert_eq(rbi_device_open_dry(&device, 12 * PAGE, PAGE, false), REBATCH_OK);
    cr_assert_eq(rebatch_open(&t.rb, device, &options), REBATCH_OK);
    rebatch_pool *pool = rebatch_get_pool(t.rb);
    cr_assert_eq(rebatch_pool_alloc(&small, pool, 512, NULL, 0), REBATCH_OK);
    cr_assert_eq(rebatch_step(t.rb, &ops, 2, &t, &report), REBATCH_OK);
    cr_assert_eq(report.ooms, 0, "what it needs is not known");
    cr_assert_eq(rebatch_pool_trim(pool, 0, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_step(t.rb, &ops, 2, &t, &report), REBATCH_OK);
    cr_assert_eq(report.ooms, 1, "what admission took is in the way");
    cr_assert_eq(report.micro_after, 2, "and is not taken again");
    cr_assert_eq(t.ran, 3);
    cr_assert_eq(rebatch_step(t.rb, &ops, 2, &t, &report), REBATCH_OK);
    cr_assert_eq(report.ooms, 0);
    rebatch_close(t.rb);
    rebatch_device_close(device);
}
