/* Owns the tests of what is predicted of the memory of a size from what ran and what failed.
 * Must not know what is done about it. */
#include <criterion/criterion.h>

#include "rebatch/rebatch.h"
#include "recover/recover.h"

/* ---- by cost ---- */

enum { POINTS = 3 };

struct point {
    size_t cost;
    uint64_t bytes;
};

static void expect(rebatch_device *device, const struct point *points, const int *order,
                   const struct point *expected)
{
    rebatch *rb;
    uint64_t bytes;
    cr_assert_eq(rebatch_open(&rb, device, NULL), REBATCH_OK);
    rb->run.by_cost = true;
    cr_assert_not(rbi_need_predict(&bytes, rb, expected->cost, 0), "nothing is known");
    for (int i = 0; i < POINTS; i++)
        rbi_need_learn(rb, points[order[i]].cost, points[order[i]].bytes);
    for (int i = 0; i < POINTS; i++) {
        cr_assert(rbi_need_predict(&bytes, rb, points[i].cost, 0));
        cr_assert_geq(bytes, points[i].bytes, "cost %zu needs more", points[i].cost);
    }
    cr_assert(rbi_need_predict(&bytes, rb, expected->cost, 0));
    cr_assert_eq(bytes, expected->bytes, "cost %zu: %ju, expected %ju", expected->cost,
                 (uintmax_t)bytes, (uintmax_t)expected->bytes);
    rebatch_close(rb);
}

Test(recover_need, a_cost_is_predicted_above_all_that_was_seen_in_any_order)
{
    static const int orders[][POINTS] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2},
                                         {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    static const struct {
        struct point points[POINTS], expected;
    } cases[] = {
        /* 10 bytes a unit between the outermost, raised to the one in the middle */
        {{{10, 1000}, {20, 2600}, {30, 1200}}, {40, 2800}},
        /* the same from the smallest on, which leaves the others below */
        {{{10, 1000}, {20, 900}, {30, 1200}}, {40, 1300}},
        /* it does not fall */
        {{{10, 1200}, {20, 900}, {30, 1000}}, {40, 1200}},
        /* too near for a slope: in proportion to the worst, first, in the middle, last */
        {{{100, 1400}, {105, 1200}, {110, 1100}}, {200, 2800}},
        {{{100, 1000}, {105, 1470}, {110, 1100}}, {200, 2800}},
        {{{100, 1000}, {105, 1050}, {110, 1540}}, {200, 2800}},
    };
    rebatch_device *device;
    cr_assert_eq(rebatch_device_open_host(&device, (size_t)1 << 20, NULL), REBATCH_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (size_t o = 0; o < sizeof orders / sizeof *orders; o++)
            expect(device, cases[i].points, orders[o], &cases[i].expected);
    rebatch_device_close(device);
}

/* ---- by the number of samples ---- */

static rebatch *open_small(rebatch_device **device)
{
    rebatch *rb;
    cr_assert_eq(rebatch_device_open_host(device, (size_t)1 << 20, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_open(&rb, *device, NULL), REBATCH_OK);
    return rb;
}

static void close_small(rebatch *rb, rebatch_device *device)
{
    rebatch_close(rb);
    rebatch_device_close(device);
}

/* 10 samples need 1000 bytes, and each more 100. */
Test(recover_need, the_largest_that_fits_may_be_the_only_one_asked_about)
{
    static const struct {
        size_t most;
        uint64_t available;
        size_t largest;
    } cases[] = {{9, 5000, 0},   {10, 999, 0},   {10, 1000, 10}, {11, 1000, 10},
                 {11, 1100, 11}, {64, 1999, 19}, {64, 2000, 20}, {20, 5000, 20}};
    rebatch_device *device;
    rebatch *rb = open_small(&device);
    rbi_need_learn(rb, 10, 1000);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const size_t largest = rbi_size_largest(rb, cases[i].most, cases[i].available);
        cr_assert_eq(largest, cases[i].largest, "case %zu: %zu", i, largest);
    }
    close_small(rb, device);
}

static uint64_t hundred_each(void *user, size_t size)
{
    (void)user;
    return 100 * size;
}

/* Nothing is known of fewer samples than ran, but by a model of memory, or by cost. */
Test(recover_need, the_largest_may_be_less_than_ran_where_a_model_says_so)
{
    static const struct {
        bool by_cost, has_model;
        size_t largest;
    } cases[] = {{false, false, 0}, {false, true, 10}, {true, false, 10}, {true, true, 10}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rebatch_device *device;
        rebatch *rb = open_small(&device);
        rb->run.by_cost = cases[i].by_cost;
        rbi_need_learn(rb, 20, 2000);
        rbi_need_learn(rb, 40, 4000);
        if (cases[i].has_model)
            rbi_need_set_model(
                rb, &(struct rbi_memory_model){.need = hundred_each, .by_cost = cases[i].by_cost});
        cr_assert_eq(rbi_size_largest(rb, 64, 1099), cases[i].largest, "case %zu", i);
        cr_assert_eq(rbi_size_largest(rb, 64, 3099), 30, "case %zu", i);
        close_small(rb, device);
    }
}

/* 10 samples failed with 1000 bytes. That more of them ran in less shows that there was another
 * reason; that they ran in as much, or that fewer ran, does not. */
Test(recover_need, a_failure_is_forgotten_when_more_ran_in_less)
{
    static const struct {
        size_t size;
        uint64_t bytes;
        bool is_forgotten;
    } cases[] = {{10, 999, true}, {20, 999, true}, {20, 1000, false}, {9, 500, false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint64_t bytes;
        rebatch_device *device;
        rebatch *rb = open_small(&device);
        rbi_need_learn_least(rb, 10, 1000);
        cr_assert(rbi_need_predict(&bytes, rb, 10, 0));
        cr_assert_eq(bytes, 1000);
        rbi_need_learn(rb, cases[i].size, cases[i].bytes);
        const struct rbi_need *known = rbi_need_find(rb, 10, 0);
        cr_assert_eq(!known || known->is_exact, cases[i].is_forgotten, "case %zu", i);
        close_small(rb, device);
    }
}

struct taking {
    rebatch *rb;
    size_t bytes;
    bool is_replay;
    size_t kept_bytes; /* of the block, which stays in use */
};

static rebatch_status takes_bytes(const rebatch_microbatch *mb, void *user)
{
    const struct taking *const taking = user;
    void *block;
    const rebatch_status status =
        rebatch_pool_alloc(&block, mb->pool, taking->bytes, mb->stream, 0);
    if (!status && !taking->kept_bytes)
        (void)rebatch_pool_free(mb->pool, block);
    if (taking->is_replay)
        rebatch_works_in_kept_memory(taking->rb, taking->kept_bytes);
    return status;
}

static rebatch_status updates(void *user)
{
    (void)user;
    return REBATCH_OK;
}

/* As a replay does, which allocates next to nothing. */
Test(recover_need, nothing_is_learned_of_a_callback_that_works_in_kept_memory)
{
    rebatch_device *device;
    rebatch *rb = open_small(&device);
    const rebatch_step_ops ops = {
        .struct_size = sizeof ops, .forward_backward = takes_bytes, .optimizer_step = updates};
    struct taking taking = {rb, 8192, false, 0};
    cr_assert_eq(rebatch_step(rb, &ops, 4, &taking, NULL), REBATCH_OK, "%s", rebatch_last_error());
    const uint64_t needed = rbi_need_find(rb, 4, 0)->bytes;
    cr_assert_geq(needed, 8192);
    taking = (struct taking){rb, 512, true, 0};
    cr_assert_eq(rebatch_step(rb, &ops, 4, &taking, NULL), REBATCH_OK, "%s", rebatch_last_error());
    cr_assert_eq(rbi_need_find(rb, 4, 0)->bytes, needed);
    cr_assert(rbi_need_find(rb, 4, 0)->has_memory, "its next run needs no admission");
    taking = (struct taking){rb, 8192, false, 0};
    cr_assert_eq(rebatch_step(rb, &ops, 4, &taking, NULL), REBATCH_OK);
    cr_assert_not(rbi_need_find(rb, 4, 0)->has_memory);
    for (uint32_t declared = 0; declared < 2; declared++) {
        taking = (struct taking){rb, 8192, true, declared ? 8192 : 1};
        cr_assert_eq(rebatch_step(rb, &ops, 4, &taking, NULL), REBATCH_OK);
        cr_assert_eq(rb->leak.row, 1 - declared);
    }
    rebatch_works_in_kept_memory(rb, 0);
    cr_assert_str_eq(rebatch_last_error(),
                     "rebatch_works_in_kept_memory() was called outside a callback");
    close_small(rb, device);
}
