/* Owns the tests of the memory model: lines, and traces made into one.
 * Must not know the search. */
#include <criterion/criterion.h>

#include "probe/probe.h"

Test(probe_model, a_line_is_exact_at_its_point_and_rounds_up_elsewhere)
{
    const struct rbi_line line = {.count = 4, .run = 3, .bytes = 100, .rise = 10};
    cr_assert_eq(rbi_line_at(&line, 4), 100);
    cr_assert_eq(rbi_line_at(&line, 5), 104);
    cr_assert_eq(rbi_line_at(&line, 7), 110);
    cr_assert_eq(rbi_line_at(&line, 1), 90);
}

Test(probe_model, a_line_never_wraps)
{
    const struct rbi_line line = {.count = 1, .run = 1, .bytes = 1, .rise = INT64_MAX};
    cr_assert_eq(rbi_line_at(&line, SIZE_MAX), SIZE_MAX / 4);
    const struct rbi_line falling = {.count = 1, .run = 1, .bytes = 9, .rise = -5};
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

/* A block that the next micro-batch frees, be it in its first call or its last. */
Test(probe_model, what_the_next_micro_batch_frees_is_passed_on)
{
    bool is_passed[4] = {false};
    struct rbi_trace_event events[] = {{.kind = RBI_TRACE_FREE_PREVIOUS, .block = 2},
                                       {.kind = RBI_TRACE_ALLOC, .bytes = 512},
                                       {.kind = RBI_TRACE_FREE, .block = 1},
                                       {.kind = RBI_TRACE_FREE_PREVIOUS, .block = 0}};
    struct rbi_trace trace = {.blocks = 4, .is_passed = is_passed};
    const struct rbi_trace next = {.events = events, .event_count = 4, .blocks = 1};
    rbi_trace_pass_on(&trace, &next);
    cr_assert(trace.has_next);
    cr_assert(is_passed[0] && !is_passed[1] && is_passed[2] && !is_passed[3]);
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
    cr_assert_eq(
        rbi_model_make(&model,
                       &(struct rbi_traces){.whole = {&low, &high}, .count = 2, .latest = &high}),
        REBATCH_OK);
    cr_assert(model.has_events);
    cr_assert_eq(rbi_model_need(&model, 10), 10240 + 1536);
    rbi_model_release(&model);
    rbi_trace_release(&low);
    rbi_trace_release(&high);
    rebatch_pool_destroy(pool);
    rebatch_device_close(device);
}

/* A model of traces on a dry pool; `sizes` are those of each trace, up to the first 0. */
struct made {
    rebatch_device *device;
    rebatch_pool *pool;
    struct rbi_trace traces[3];
    struct rbi_model model;
};

static void make_model(struct made *made, size_t count, const size_t *counts,
                       const size_t sizes[][8])
{
    struct rbi_traces traces = {.count = count, .latest = &made->traces[count - 1]};
    cr_assert_eq(rebatch_device_open_dry(&made->device, REBATCH_UNLIMITED, 0), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&made->pool, made->device, NULL), REBATCH_OK);
    for (size_t t = 0; t < count; t++) {
        size_t n = 0;
        while (n < 8 && sizes[t][n])
            n++;
        make_trace(&made->traces[t], made->pool, counts[t], 0, sizes[t], n);
        for (size_t i = 0; i < n; i++)
            made->traces[t].peak_bytes += (sizes[t][i] + 511) / 512 * 512;
        traces.whole[t] = &made->traces[t];
    }
    cr_assert_eq(rbi_model_make(&made->model, &traces), REBATCH_OK);
}

static void release_made(struct made *made, size_t count)
{
    rbi_model_release(&made->model);
    for (size_t t = 0; t < count; t++)
        rbi_trace_release(&made->traces[t]);
    rebatch_pool_destroy(made->pool);
    rebatch_device_close(made->device);
}

Test(probe_model, traces_of_another_form_leave_the_peak)
{
    struct made made = {.device = NULL};
    make_model(&made, 2, (size_t[]){1, 3}, (const size_t[][8]){{1024}, {512, 1536, 1024}});
    cr_assert_not(made.model.has_events);
    cr_assert_eq(rbi_model_need(&made.model, 7), 7168);
    release_made(&made, 2);
}

/* That of 50 and 56 samples says that few need much. */
Test(probe_model, a_form_that_a_third_size_refutes_is_none)
{
    struct made made = {.device = NULL};
    make_model(&made, 3, (size_t[]){5, 50, 56},
               (const size_t[][8]){{81920, 512}, {163840, 409600, 1024}, {81920, 163840, 1024}});
    cr_assert_not(made.model.has_events);
    cr_assert_geq(rbi_model_need(&made.model, 50), made.traces[1].peak_bytes);
    release_made(&made, 3);
}

Test(probe_model, blocks_for_every_few_samples_are_turns)
{
    struct made made = {.device = NULL};
    make_model(&made, 2, (size_t[]){1, 15},
               (const size_t[][8]){{1001, 3003}, {1001, 1001, 1001, 1001, 15 * 3003}});
    cr_assert(made.model.has_events);
    for (size_t count = 1; count < 200; count++)
        cr_assert_eq(rbi_model_need(&made.model, count),
                     1024 * ((count + 3) / 4) + (3003 * count + 511) / 512 * 512, "%zu samples",
                     count);
    release_made(&made, 2);
}

Test(probe_model, the_last_of_the_turns_may_be_smaller)
{
    struct made made = {.device = NULL};
    make_model(&made, 3, (size_t[]){1, 7, 10},
               (const size_t[][8]){{1024, 512}, {4096, 3072, 512}, {4096, 4096, 2048, 512}});
    cr_assert(made.model.has_events);
    for (size_t count = 1; count < 200; count++)
        cr_assert_eq(rbi_model_need(&made.model, count), 1024 * count + 512, "%zu samples", count);
    release_made(&made, 3);
}

/* ---- size functions ---- */

static struct rbi_line fit(size_t count, size_t base, const struct rbi_point *at)
{
    struct rbi_points points = {.count = count, .base = base};
    for (size_t i = 0; i < count; i++)
        points.at[i] = at[i];
    return rbi_line_fit(&points);
}

Test(probe_model, a_straight_line_is_exact_at_every_size)
{
    for (size_t base = 0; base < 3; base++) {
        const struct rbi_line line =
            fit(3, base, (struct rbi_point[]){{1, 5001}, {2, 8002}, {9, 29009}});
        for (size_t count = 1; count < 300; count++)
            cr_assert_eq(rbi_line_at(&line, count), 2000 + 3001 * count);
    }
    const struct rbi_line one = fit(1, 0, (struct rbi_point[]){{5, 777}});
    cr_assert_eq(rbi_line_at(&one, 99), 777);
}

/* Sizes that were rounded up to a unit, and samples to tiles. */
Test(probe_model, what_ran_needs_no_more_than_its_line_and_the_base_just_that)
{
    static const struct rbi_point rows[][3] = {{{1, 65536}, {20, 1441792}, {41, 2883584}},
                                               {{1, 8021}, {12, 16021}, {29, 32021}},
                                               {{1, 9001}, {10, 2003}, {20, 4001}}};
    for (size_t row = 0; row < 3; row++)
        for (size_t base = 0; base < 3; base++) {
            const struct rbi_line line = fit(3, base, rows[row]);
            cr_assert_eq(rbi_line_at(&line, rows[row][base].count), rows[row][base].bytes);
            for (size_t i = 0; i < 3; i++)
                cr_assert_geq(rbi_line_at(&line, rows[row][i].count), rows[row][i].bytes);
        }
}

Test(probe_model, the_steeper_of_the_whole_and_of_the_end_goes_on)
{
    const struct rbi_line falls =
        fit(3, 2, (struct rbi_point[]){{1, 9001}, {10, 2003}, {20, 4003}});
    const struct rbi_line bends = fit(3, 2, (struct rbi_point[]){{1, 100}, {10, 1000}, {20, 9000}});
    const struct rbi_line flattens =
        fit(3, 2, (struct rbi_point[]){{1, 1000}, {10, 19000}, {21, 21000}});
    cr_assert_eq(falls.rise, 200);
    cr_assert_eq(bends.rise, 800);
    cr_assert_eq(flattens.rise, 1000);
}
