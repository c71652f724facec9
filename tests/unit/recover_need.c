/* Owns the tests of the line that predicts the memory of a cost: above all that was seen, in
 * whatever order it was. Must not know what is done about it. */
#include <criterion/criterion.h>

#include "rebatch/rebatch.h"
#include "recover/recover.h"

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
    rb->by_cost = true;
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
