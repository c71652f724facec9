/* Owns the tests of the memory model: lines, and traces made into one.
 * Must not know the search. */
#include <criterion/criterion.h>

#include "probe/probe.h"

Test(probe_model, a_line_is_exact_at_its_point_and_rounds_up_elsewhere)
{
    const struct rbi_line line = {.count = 4, .run = 3, .bytes = 100, .rise = 10, .unit = 1};
    cr_assert_eq(rbi_line_at(&line, 4), 100);
    cr_assert_eq(rbi_line_at(&line, 5), 104);
    cr_assert_eq(rbi_line_at(&line, 7), 110);
    cr_assert_eq(rbi_line_at(&line, 1), 90);
}

Test(probe_model, a_line_never_wraps)
{
    const struct rbi_line line = {.count = 1, .run = 1, .bytes = 1, .rise = INT64_MAX, .unit = 1};
    cr_assert_eq(rbi_line_at(&line, SIZE_MAX), SIZE_MAX / 4);
    const struct rbi_line falling = {.count = 1, .run = 1, .bytes = 9, .rise = -5, .unit = 1};
    cr_assert_eq(rbi_line_at(&falling, 9), 0);
}

/* Allocates each size, then frees all, on a dry pool. `kept` is made first and stays. */
static void make_trace(struct rbi_trace *trace, rebatch_pool *pool, size_t count, size_t kept,
                       const size_t *sizes, size_t n)
{
    void *blocks[8], *stays;
    rbi_trace_begin(trace, pool, count);
    cr_assert_eq(rebatch_pool_alloc(&stays, pool, kept, NULL, 0), REBATCH_OK);
    for (size_t i = 0; i < n; i++)
        cr_assert_eq(rebatch_pool_alloc(&blocks[i], pool, sizes[i], NULL, 0), REBATCH_OK);
    for (size_t i = 0; i < n; i++)
        cr_assert_eq(rebatch_pool_free(pool, blocks[i]), REBATCH_OK);
    cr_assert_eq(rbi_trace_end(trace, pool, NULL), REBATCH_OK);
    trace->is_whole = true;
}

Test(probe_model, what_was_made_once_is_left_out_and_the_rest_is_affine)
{
    rebatch_device *device;
    rebatch_pool *pool;
    struct rbi_trace low, high;
    struct rbi_model model;
    cr_assert_eq(rebatch_device_open_dry(&device, REBATCH_UNLIMITED, 0), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&pool, device, NULL), REBATCH_OK);
    make_trace(&low, pool, 1, 5000, (size_t[]){1000, 333}, 2);
    make_trace(&high, pool, 4, 0, (size_t[]){4000, 633}, 2);
    cr_assert_eq(rbi_model_make(&model, &low, &high, NULL), REBATCH_OK);
    cr_assert(model.has_events);
    cr_assert_eq(model.blocks, 2);
    size_t sizes[2];
    cr_assert_eq(rbi_model_need(&model, 10, sizes), 10240 + 1536);
    rbi_model_release(&model);
    rbi_trace_release(&low);
    rbi_trace_release(&high);
    rebatch_pool_destroy(pool);
    rebatch_device_close(device);
}

Test(probe_model, traces_of_another_form_leave_the_peak)
{
    rebatch_device *device;
    rebatch_pool *pool;
    struct rbi_trace low, high;
    struct rbi_model model;
    cr_assert_eq(rebatch_device_open_dry(&device, REBATCH_UNLIMITED, 0), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&pool, device, NULL), REBATCH_OK);
    make_trace(&low, pool, 1, 0, (size_t[]){1024}, 1);
    make_trace(&high, pool, 3, 0, (size_t[]){1024, 1024, 1024}, 3);
    low.peak_bytes = 1024;
    high.peak_bytes = 3072;
    cr_assert_eq(rbi_model_make(&model, &low, &high, NULL), REBATCH_OK);
    cr_assert_not(model.has_events);
    cr_assert_eq(rbi_model_need(&model, 7, NULL), 7168);
    rbi_model_release(&model);
    rbi_trace_release(&low);
    rbi_trace_release(&high);
    rebatch_pool_destroy(pool);
    rebatch_device_close(device);
}
