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
