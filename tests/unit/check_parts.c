/* Owns the tests of lists of micro-batches, by which a check knows what it has compared with what.
 * Must not know how they run. */
#include <criterion/criterion.h>

#include "check/check.h"

static void fill(struct rbi_parts *parts, size_t count, size_t size)
{
    parts->count = 0;
    for (size_t i = 0; i < count; i++)
        cr_assert(rbi_parts_add(parts, i * size, size));
}

/* A list that was longer before has other micro-batches behind its end. */
Test(check_parts, lists_are_equal_if_their_micro_batches_are)
{
    struct rbi_parts a = {NULL, 0, 0}, b = {NULL, 0, 0};
    fill(&a, 100, 3);
    cr_expect(rbi_parts_copy(&b, &a));
    cr_expect(rbi_parts_equal(&a, &b));
    fill(&a, 100, 5);
    cr_expect_not(rbi_parts_equal(&a, &b));
    for (size_t count = 0; count < 4; count++) {
        fill(&a, count, 2);
        fill(&b, count, 2);
        cr_expect(rbi_parts_equal(&a, &b), "%zu", count);
        fill(&b, count + 1, 2);
        cr_expect_not(rbi_parts_equal(&a, &b), "%zu", count);
    }
    fill(&a, 2, 2);
    fill(&b, 2, 2);
    b.list[1].count = 1;
    cr_expect_not(rbi_parts_equal(&a, &b));
    b.list[1] = (struct rbi_part){1, 2};
    cr_expect_not(rbi_parts_equal(&a, &b));
    rbi_parts_release(&a);
    rbi_parts_release(&b);
    cr_expect(!a.list && a.count == 0 && a.room == 0);
}

/* An injected request is found again by callback, samples, number and size. */
Test(check_parts, a_request_is_named_by_its_callback_and_samples)
{
    static const struct {
        struct rbi_place place;
        const char *says;
    } cases[] = {
        {{.which = RBI_ZERO_GRAD, .number = 2}, "allocation 2 (1.50 KiB) of zero_grad"},
        {{.which = RBI_FORWARD_BACKWARD, .first = 4, .count = 1, .number = 1},
         "allocation 1 (1.50 KiB) of forward_backward of sample 4"},
        {{.which = RBI_FORWARD_BACKWARD, .first = 4, .count = 3, .number = 1, .is_helpers = true},
         "allocation 1 (1.50 KiB) of forward_backward of samples 4-6, made by a helper thread,"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[160];
        struct rbi_text t = {text, sizeof text, 0};
        rbi_place_add(&t, &cases[i].place, 1536);
        cr_expect_str_eq(text, cases[i].says);
    }
}

/* Each is 1, -2.5 and a number that is smaller. */
Test(check_parts, numbers_of_each_type_are_read_as_what_they_are)
{
    static const double f64[] = {1, -2.5, 0.125};
    static const float f32[] = {1, -2.5f, 0.125f};
    static const uint16_t f16[] = {0x3c00, 0xc100, 0x0001}, bf16[] = {0x3f80, 0xc020, 0x3e00};
    static const uint16_t infinite[] = {0x3c00, 0x7c00};
    static const struct {
        rebatch_number number;
        size_t bytes;
        const void *values;
    } cases[] = {{REBATCH_F64, sizeof f64, f64},
                 {REBATCH_F32, sizeof f32, f32},
                 {REBATCH_F16, sizeof f16, f16},
                 {REBATCH_BF16, sizeof bf16, bf16}};
    size_t at;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct rbi_item item = {.bytes = cases[i].bytes, .number = cases[i].number};
        cr_expect_eq(rbi_values_count(&item), 3);
        cr_expect_float_eq(rbi_values_largest(&item, cases[i].values), 2.5, 0);
        cr_expect_not(rbi_values_find_no_number(&at, &item, cases[i].values));
    }
    const struct rbi_item item = {.bytes = sizeof infinite, .number = REBATCH_F16};
    cr_expect(rbi_values_find_no_number(&at, &item, (const char *)infinite));
    cr_expect_eq(at, 1);
}
