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

/* The mean of all lines that are less than one unit below each size, and not below zero at no
 * samples: by a grid of them, through base bytes less `below`. */
static void mean_of_lines(double *below, double *slope, const struct rbi_points *points)
{
    const struct rbi_point *const base = &points->at[points->base];
    const double most = (double)base->bytes / (double)base->count;
    size_t count = 0;
    *below = *slope = 0;
    for (double b = 0.25; b < (double)points->unit; b += 1)
        for (double s = most / 4000; s < most; s += most / 2000) {
            bool fits = (double)base->bytes - b - s * (double)base->count >= 0;
            for (size_t i = 0; i < points->count; i++) {
                const double samples = (double)points->at[i].count - (double)base->count;
                const double above =
                    (double)points->at[i].bytes - ((double)base->bytes - b) - s * samples;
                fits &= above >= 0 && above < (double)points->unit;
            }
            if (!fits)
                continue;
            *below += b;
            *slope += s;
            count++;
        }
    cr_assert_gt(count, 100);
    *below /= (double)count;
    *slope /= (double)count;
}

Test(probe_model, of_the_lines_that_round_to_all_sizes_the_middle_is_taken)
{
    static const struct rbi_points rows[] = {
        {.at = {{4, 4096}, {8, 6656}, {16, 12288}}, .count = 3, .base = 2, .unit = 512},
        {.at = {{4, 4096}, {8, 6656}, {16, 12288}}, .count = 3, .base = 0, .unit = 512},
        {.at = {{3, 8192}, {7, 12288}, {15, 22528}}, .count = 3, .base = 1, .unit = 2048},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        double below, slope;
        const struct rbi_line line = rbi_line_fit(&rows[i]);
        mean_of_lines(&below, &slope, &rows[i]);
        cr_assert_eq(line.unit, rows[i].unit, "row %zu", i);
        const double got = (double)((int64_t)rows[i].at[rows[i].base].bytes - line.bytes);
        const double rises = (double)line.rise / (double)line.run;
        cr_expect(got > below - 4 && got < below + 4, "row %zu: %g, %g", i, got, below);
        cr_expect(rises > 0.98 * slope && rises < 1.02 * slope, "row %zu: %g, %g", i, rises, slope);
    }
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

static struct rbi_points points_of(size_t count, const struct rbi_point *at, size_t unit)
{
    struct rbi_points points = {.count = count, .base = count - 1, .unit = unit};
    for (size_t i = 0; i < count; i++)
        points.at[i] = at[i];
    return points;
}

Test(probe_model, samples_that_are_rounded_up_to_tiles_are_seen_in_three_points)
{
    const struct rbi_points points =
        points_of(3, (struct rbi_point[]){{1, 8021}, {12, 16021}, {29, 32021}}, 1);
    const struct rbi_line line = rbi_line_fit(&points);
    for (size_t count = 1; count < 300; count++)
        cr_assert_eq(rbi_line_at(&line, count), 21 + 1000 * ((count + 7) / 8 * 8));
}

Test(probe_model, tiles_through_zero_are_seen_in_two_points)
{
    const struct rbi_points points =
        points_of(2, (struct rbi_point[]){{1, 4 * 779}, {22, 24 * 779}}, 1);
    const struct rbi_line line = rbi_line_fit(&points);
    for (size_t count = 1; count < 300; count++)
        cr_assert_eq(rbi_line_at(&line, count), 779 * ((count + 3) / 4 * 4));
}

Test(probe_model, sizes_that_were_rounded_up_are_met_within_a_unit)
{
    const size_t unit = 65536, each = 70001;
    struct rbi_point at[3];
    for (size_t i = 0; i < 3; i++) {
        const size_t count = (size_t[]){1, 20, 41}[i];
        at[i] = (struct rbi_point){count, (count * each + unit - 1) / unit * unit};
    }
    const struct rbi_points points = points_of(3, at, unit);
    const struct rbi_line line = rbi_line_fit(&points);
    for (size_t count = 1; count <= 41; count++) {
        const size_t bytes = (count * each + unit - 1) / unit * unit;
        const size_t found = rbi_line_at(&line, count);
        cr_assert_eq(found % unit, 0);
        cr_assert(found <= bytes + unit && bytes <= found + unit, "%zu of %zu", found, bytes);
    }
    cr_assert_eq(rbi_line_at(&line, 41), at[2].bytes);
}

Test(probe_model, where_no_law_holds_the_residual_is_kept)
{
    const struct rbi_points points =
        points_of(3, (struct rbi_point[]){{1, 9001}, {10, 2003}, {20, 4001}}, 1);
    const struct rbi_line line = rbi_line_fit(&points);
    cr_assert_eq(rbi_line_at(&line, 20), 4001);
    cr_assert_geq(rbi_line_at(&line, 1), 9001);
    cr_assert_geq(rbi_line_at(&line, 21), 4001 + 9001 - 205);
}

static size_t rounded_up(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

/* Of `fixed` and so much a sample, rounded up to the unit, at three sizes. */
static struct rbi_points rounded_points(size_t fixed, size_t each, size_t unit)
{
    struct rbi_point at[3];
    for (size_t i = 0; i < 3; i++) {
        const size_t count = (size_t[]){1, 20, 41}[i];
        at[i] = (struct rbi_point){count, rounded_up(fixed + count * each, unit)};
    }
    return points_of(3, at, 1);
}

Test(probe_model, units_need_not_be_powers_of_two)
{
    for (size_t each = 1001; each < 9000; each += 333) {
        const struct rbi_points points = rounded_points(0, each, 768);
        const struct rbi_line line = rbi_line_fit(&points);
        for (size_t count = 1; count <= 80; count++) {
            const size_t bytes = rounded_up(count * each, 768);
            const size_t found = rbi_line_at(&line, count);
            cr_assert(found <= bytes + 768 && bytes <= found + 768, "%zu a sample: %zu of %zu",
                      each, found, bytes);
        }
    }
}

/* What 64 draws say of so many samples, at the least and at the most. */
static void draw_all(size_t found[2], const struct rbi_points *given, size_t count)
{
    struct rbi_points points = *given;
    found[0] = SIZE_MAX;
    found[1] = 0;
    for (points.draw = 1; points.draw <= 64; points.draw++) {
        const struct rbi_line line = rbi_line_fit(&points);
        const size_t bytes = rbi_line_at(&line, count);
        found[0] = rbi_min(found[0], bytes);
        found[1] = rbi_max(found[1], bytes);
        for (size_t i = 0; i < points.count; i++)
            cr_assert_eq(rbi_line_at(&line, points.at[i].count), points.at[i].bytes,
                         "draw %zu at %zu samples: %zu of %zu", (size_t)points.draw,
                         points.at[i].count, rbi_line_at(&line, points.at[i].count),
                         points.at[i].bytes);
    }
}

Test(probe_model, what_is_drawn_explains_what_was_seen_and_has_the_truth_within_it)
{
    size_t doubts = 0, within = 0, all = 0;
    for (size_t fixed = 0; fixed < 500000; fixed += 70001)
        for (size_t each = 5003; each < 90000; each += 7919) {
            struct rbi_points points = rounded_points(fixed, each, 65536);
            size_t found[2];
            points.unit = 65536;
            draw_all(found, &points, 60);
            const size_t bytes = rounded_up(fixed + 60 * each, 65536);
            within += found[0] <= bytes && bytes <= found[1];
            doubts += found[0] < found[1];
            all++;
        }
    cr_assert_gt(doubts, all / 2);
    cr_assert_geq(within, all - all / 20, "%zu of %zu", within, all);
}

Test(probe_model, a_law_that_is_certain_is_drawn_as_it_is)
{
    const struct rbi_points points =
        points_of(3, (struct rbi_point[]){{1, 5001}, {2, 8002}, {9, 29009}}, 1);
    size_t found[2];
    draw_all(found, &points, 100);
    cr_assert_eq(found[0], 302100);
    cr_assert_eq(found[1], 302100);
}

Test(probe_model, what_does_not_rise_may_be_less_than_a_unit)
{
    const size_t mib = (size_t)1 << 20;
    size_t found[2];
    struct rbi_points points =
        points_of(3, (struct rbi_point[]){{1, 2 * mib}, {10, 2 * mib}, {47, 2 * mib}}, 1);
    draw_all(found, &points, 90);
    cr_assert_eq(found[0], 2 * mib);
    cr_assert_eq(found[1], 4 * mib);
    points = points_of(3, (struct rbi_point[]){{1, 3001}, {10, 3001}, {47, 3001}}, 1);
    draw_all(found, &points, 90);
    cr_assert_eq(found[1], 3001, "so odd a size was not rounded");
}

Test(probe_model, what_does_not_rise_may_be_of_a_tile_where_others_are)
{
    struct rbi_points points =
        points_of(3, (struct rbi_point[]){{1, 8 * 779}, {2, 8 * 779}, {7, 8 * 779}}, 1);
    size_t found[2];
    draw_all(found, &points, 15);
    cr_assert_eq(found[1], 8 * 779, "no tile is known");
    points.tile = 8;
    draw_all(found, &points, 15);
    cr_assert_eq(found[0], 8 * 779);
    cr_assert_eq(found[1], 16 * 779);
}

Test(probe_model, multiples_of_a_large_power_of_two_are_of_tiles_or_were_rounded_up)
{
    const size_t mib = (size_t)1 << 20;
    const struct rbi_points points =
        points_of(3, (struct rbi_point[]){{1, 2 * mib}, {6, 2 * mib}, {100, 4 * mib}}, 1);
    const struct rbi_line line = rbi_line_fit(&points);
    size_t found[2];
    cr_assert_eq(line.step, 64);
    draw_all(found, &points, 110);
    cr_assert_eq(found[0], 4 * mib);
    cr_assert_eq(found[1], 6 * mib, "40000 bytes a sample are more than two units");
}

Test(probe_model, a_model_is_drawn_as_a_whole_and_the_same_for_the_same_number)
{
    struct made made = {.device = NULL};
    uint64_t needs[2][16];
    size_t others = 0;
    make_model(&made, 3, (size_t[]){1, 20, 41},
               (const size_t[][8]){{65536, 131072}, {1376256, 1966080}, {2818048, 4063232}});
    cr_assert(made.model.has_events);
    cr_assert(made.model.is_doubtful);
    const uint64_t middle = rbi_model_need(&made.model, 60);
    for (int turn = 0; turn < 2; turn++)
        for (uint64_t i = 0; i < 16; i++) {
            rbi_model_draw(&made.model, i + 1);
            needs[turn][i] = rbi_model_need(&made.model, 60);
            cr_assert_eq(rbi_model_need(&made.model, 41), 2818048 + 4063232);
            others += needs[turn][i] != middle;
        }
    cr_assert_arr_eq(needs[0], needs[1], sizeof needs[0]);
    cr_assert_gt(others, 0);
    release_made(&made, 3);
}

/* The n-th allocation of a model. */
static const struct rbi_model_event *allocation(const struct made *made, size_t n)
{
    for (size_t i = 0; i < made->model.event_count; i++)
        if (made->model.events[i].kind == RBI_TRACE_ALLOC && n-- == 0)
            return &made->model.events[i];
    cr_assert_fail("there are not so many");
    return NULL;
}

/* Of 1, 12 and 30 samples. One size that rises by units, or by tiles, may do so by chance; two show
 * what all of them may be rounded up to. */
Test(probe_model, what_two_sizes_are_rounded_up_to_holds_for_the_others)
{
    enum { UNIT = 3 * 4096, TILE = 8, BLOCKS = 3 };
    static const struct {
        size_t sizes[3][8]; /* of each trace */
        size_t unit[BLOCKS], tile;
        bool is_rough;
    } cases[] = {
        {{{3 * UNIT, UNIT, 2 * UNIT},
          {28 * UNIT, 12 * UNIT, 2 * UNIT},
          {70 * UNIT, 30 * UNIT, 2 * UNIT}},
         {UNIT, UNIT, UNIT},
         0,
         false},
        {{{3 * UNIT, UNIT, 5000}, {28 * UNIT, 12 * UNIT, 5000}, {70 * UNIT, 30 * UNIT, 5000}},
         {UNIT, UNIT, 1},
         0,
         false},
        /* one that rises, and two that do not */
        {{{3 * UNIT, 2 * UNIT, 2 * UNIT},
          {28 * UNIT, 2 * UNIT, 2 * UNIT},
          {70 * UNIT, 2 * UNIT, 2 * UNIT}},
         {1, 1, 1},
         0,
         false},
        {{{TILE * 779, TILE * 501, 6232},
          {2 * TILE * 779, 2 * TILE * 501, 6232},
          {4 * TILE * 779, 4 * TILE * 501, 6232}},
         {1, 1, 1},
         TILE,
         true},
        {{{TILE * 779, 501, 6232},
          {2 * TILE * 779, 12 * 501, 6232},
          {4 * TILE * 779, 30 * 501, 6232}},
         {1, 1, 1},
         0,
         true},
        {{{779, 501, 6232}, {12 * 779, 12 * 501, 6232}, {30 * 779, 30 * 501, 6232}},
         {1, 1, 1},
         0,
         false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct made made = {.device = NULL};
        make_model(&made, 3, (size_t[]){1, 12, 30}, cases[i].sizes);
        cr_assert(made.model.has_events, "case %zu", i);
        cr_assert_eq(made.model.is_rough, cases[i].is_rough, "case %zu", i);
        for (size_t n = 0; n < BLOCKS; n++) {
            const struct rbi_points *points = &allocation(&made, n)->points;
            cr_assert_eq(points->unit, cases[i].unit[n], "case %zu: %zu", i, points->unit);
            cr_assert_eq(points->tile, cases[i].tile, "case %zu: %zu", i, points->tile);
        }
        release_made(&made, 3);
    }
}

/* ---- reserves ---- */

/* Never lives more than the first of the blocks; the reserve asks for all of them. */
enum { RESERVED = 5 };

static size_t reserved_bytes(size_t n, size_t count)
{
    return (size_t[RESERVED]){700 * count + 11, 300 * count, 1000 * ((count + 3) / 4), 650 * count,
                              600 * count}[n];
}

static size_t sum_reserved(size_t count)
{
    size_t sum = 0;
    for (size_t i = 0; i < RESERVED; i++)
        sum += rounded_up(reserved_bytes(i, count), REBATCH_POOL_UNIT_BYTES);
    return sum;
}

/* `first`: bytes a sample that a reserve asks for which comes before, and of which nothing is used;
 * 0: there is none. */
static void make_reserving_trace(struct rbi_trace *trace, rebatch_pool *pool, size_t count,
                                 size_t first)
{
    void *block;
    rbi_trace_begin(trace, pool, count);
    cr_assert_eq(rebatch_pool_reserve(pool, first * count, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_pool_reserve(pool, sum_reserved(count), NULL), REBATCH_OK);
    for (size_t i = 0; i < RESERVED; i++) {
        cr_assert_eq(rebatch_pool_alloc(&block, pool, reserved_bytes(i, count), NULL, 0),
                     REBATCH_OK);
        cr_assert_eq(rebatch_pool_free(pool, block), REBATCH_OK);
    }
    cr_assert_eq(rbi_trace_end(trace, pool, NULL), REBATCH_OK);
    trace->is_whole = true;
    trace->peak_bytes = rounded_up(reserved_bytes(0, count), REBATCH_POOL_UNIT_BYTES);
}

static void assert_sum_is_foretold(size_t first)
{
    static const size_t counts[] = {1, 10, 27};
    rebatch_device *device;
    rebatch_pool *pool;
    struct rbi_trace made[3];
    struct rbi_model model;
    struct rbi_traces traces = {.count = 3, .latest = &made[2]};
    cr_assert_eq(rebatch_device_open_dry(&device, REBATCH_UNLIMITED, 0), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&pool, device, NULL), REBATCH_OK);
    for (size_t i = 0; i < 3; i++) {
        make_reserving_trace(&made[i], pool, counts[i], first);
        traces.whole[i] = &made[i];
    }
    cr_assert_eq(rbi_model_make(&model, &traces), REBATCH_OK);
    cr_assert(model.has_events, "what is reserved and not used refutes no model");
    for (size_t count = 1; count < 100; count++) {
        struct rbi_cursor cursor = {.model = &model, .count = count};
        const struct rbi_model_event *event = rbi_model_next(&cursor);
        if (first) {
            cr_assert_eq(cursor.bytes, first * count);
            event = rbi_model_next(&cursor);
        }
        cr_assert_eq(event->kind, RBI_TRACE_RESERVE);
        cr_assert_eq(cursor.bytes, sum_reserved(count));
    }
    rbi_model_release(&model);
    for (size_t i = 0; i < 3; i++)
        rbi_trace_release(&made[i]);
    rebatch_pool_destroy(pool);
    rebatch_device_close(device);
}

Test(probe_model, a_reserve_that_is_the_sum_of_what_follows_is_so_at_every_size)
{
    assert_sum_is_foretold(0);
}

/* Each reserve is looked at alone, also where the first asks for no sum. */
Test(probe_model, so_is_a_reserve_behind_one_that_is_no_sum)
{
    assert_sum_is_foretold(5000);
}
