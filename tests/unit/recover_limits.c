/* Owns the tests of which micro-batch sizes the limits allow, and how the samples that are left are
 * cut: every function against all sizes tried one by one. Must not know memory. Seeds: none. */
#include "recover/size_limits.h"

#include <criterion/criterion.h>
#include <stdint.h>
#include <string.h>

enum { MOST = 40 };

static const size_t lists[][5] = {{0}, {1}, {2, 3}, {4, 8, 16, 32}, {3, 7, 12, 25}, {6, 10, 15}};

/* By hand: smallest, largest, multiple, and the list. */
static bool is_allowed(const rebatch_options *o, size_t size)
{
    bool is_listed = o->micro_allowed[0] == 0;
    for (size_t i = 0; i < REBATCH_ALLOWED_SIZES && o->micro_allowed[i]; i++)
        is_listed |= o->micro_allowed[i] == size;
    return is_listed && size >= o->micro_smallest && size % o->micro_multiple_of == 0 &&
           (o->micro_largest == 0 || size <= o->micro_largest);
}

/* The next limits of all that are tried; false at the end. */
static bool next_limits(rebatch_options *o, size_t *number)
{
    static const size_t smallest[] = {1, 2, 5, 9}, largest[] = {0, 3, 11, 32},
                        multiple[] = {1, 2, 3, 5};
    enum { LISTS = sizeof lists / sizeof *lists };
    if (*number == (size_t)4 * 4 * 4 * LISTS)
        return false;
    size_t n = (*number)++;
    *o = (rebatch_options)REBATCH_OPTIONS_INIT;
    o->micro_smallest = smallest[n % 4];
    o->micro_largest = largest[n / 4 % 4];
    o->micro_multiple_of = multiple[n / 16 % 4];
    memcpy(o->micro_allowed, lists[n / 64], sizeof lists[0]);
    return true;
}

static bool has_a_size(const rebatch_options *o)
{
    for (size_t size = 1; size <= MOST; size++)
        if (is_allowed(o, size))
            return true;
    return false;
}

#define EACH(o)                                                                                    \
    rebatch_options o;                                                                             \
    for (size_t number = 0; next_limits(&o, &number);)

Test(recover_limits, a_size_is_rounded_to_the_nearest_that_is_allowed)
{
    EACH(o)
    {
        for (size_t size = 0; size <= MOST; size++) {
            size_t below = 0, above = 0;
            for (size_t s = 1; s <= 2 * MOST; s++) {
                below = s <= size && is_allowed(&o, s) ? s : below;
                above = s >= size && above == 0 && is_allowed(&o, s) ? s : above;
            }
            cr_assert_eq(rbi_round_size(&o, size), below, "limits %zu: %zu", number, size);
            cr_assert_eq(rbi_round_size_up(&o, size), above, "limits %zu: %zu", number, size);
        }
    }
}

Test(recover_limits, sizes_do_not_wrap)
{
    rebatch_options o = REBATCH_OPTIONS_INIT;
    o.micro_smallest = 1;
    o.micro_multiple_of = 4;
    cr_assert_eq(rbi_round_size_up(&o, SIZE_MAX), 0);
    cr_assert_eq(rbi_round_size_up(&o, SIZE_MAX - 3), SIZE_MAX - 3);
    cr_assert_eq(rbi_round_size(&o, SIZE_MAX), SIZE_MAX - 3);
}

/* ---- the last micro-batches ---- */

static size_t last_of(size_t left, size_t size)
{
    return left % size ? left % size : size;
}

Test(recover_limits, a_batch_ends_short_when_its_last_micro_batch_is_not_allowed)
{
    EACH(o)
    {
        for (size_t size = 1; size <= MOST; size++)
            for (size_t left = 1; left <= MOST; left++) {
                const bool is_short =
                    left > size && left % size != 0 && !is_allowed(&o, left % size);
                cr_assert_eq(rbi_ends_short(&o, size, left), is_short, "limits %zu: %zu of %zu",
                             number, left, size);
            }
    }
}

/* Of the allowed sizes up to `size`, those whose cut ends with an allowed one need that many
 * micro-batches at least; 0: there is none. */
static size_t fewest(const rebatch_options *o, size_t size, size_t left)
{
    size_t least = 0;
    for (size_t s = 1; s <= size; s++) {
        const size_t n = (left - 1) / s + 1;
        if (is_allowed(o, s) && is_allowed(o, last_of(left, s)) && (least == 0 || n < least))
            least = n;
    }
    return least;
}

/* As a step cuts: a size for what is left, micro-batch after micro-batch.
 *  @return how many there are */
static size_t cut_all(bool *all_allowed, const rebatch_options *o, size_t size, size_t left)
{
    size_t n = 0;
    *all_allowed = true;
    for (; left > 0; n++) {
        const size_t first = left > size ? rbi_even_size(o, size, left) : rbi_rest_size(o, left);
        cr_assert(first >= 1 && first <= size);
        *all_allowed &= is_allowed(o, first);
        left -= first;
    }
    return n;
}

Test(recover_limits, what_would_end_short_is_cut_evenly_where_it_can_be)
{
    size_t cut = 0;
    EACH(o)
    {
        for (size_t size = 1; size <= MOST; size++)
            for (size_t left = 1; left <= MOST && is_allowed(&o, size); left++) {
                const size_t least = fewest(&o, size, left);
                bool all_allowed;
                if (!rbi_ends_short(&o, size, left) || least == 0)
                    continue;
                const size_t n = cut_all(&all_allowed, &o, size, left);
                cr_assert(all_allowed, "limits %zu: %zu in %zu", number, left, size);
                cr_assert_leq(n, least, "limits %zu: %zu in %zu", number, left, size);
                cut++;
            }
    }
    cr_assert_gt(cut, 100);
}

/* The fewest sizes of a list that are `left` samples together, by the sums of one size fewer; 0:
 * none are. */
static size_t fewest_of_list(const rebatch_options *o, size_t size, size_t left)
{
    size_t least[161] = {0};
    for (size_t sum = 1; sum <= left; sum++)
        for (size_t i = 0; i < REBATCH_ALLOWED_SIZES && o->micro_allowed[i]; i++) {
            const size_t part = o->micro_allowed[i];
            if (part > size || part > sum || (part < sum && least[sum - part] == 0))
                continue;
            const size_t n = part < sum ? least[sum - part] + 1 : 1;
            least[sum] = least[sum] == 0 || n < least[sum] ? n : least[sum];
        }
    return least[left];
}

/* 47 of {1, 13, 20} is 20 + 13 + 13 + 1, and not 20 + 20 and seven times 1. */
Test(recover_limits, a_list_cuts_into_as_few_of_its_sizes_as_can_be)
{
    static const size_t many[][5] = {{1, 13, 20}, {1, 13, 16},       {1, 5, 12, 19, 24},
                                     {2, 7},      {3, 11, 13, 29},   {4, 15},
                                     {6, 9, 20},  {1, 8, 27, 32, 33}};
    size_t compared = 0;
    for (size_t number = 0; number < sizeof many / sizeof *many; number++) {
        rebatch_options o = REBATCH_OPTIONS_INIT;
        o.micro_smallest = o.micro_multiple_of = 1;
        memcpy(o.micro_allowed, many[number], sizeof many[number]);
        for (size_t i = 0; i < 5 && many[number][i]; i++)
            for (size_t left = 1; left <= 160; left++) {
                const size_t size = many[number][i], least = fewest_of_list(&o, size, left);
                bool all_allowed;
                if (least == 0 || !rbi_ends_short(&o, size, left))
                    continue;
                const size_t n = cut_all(&all_allowed, &o, size, left);
                cr_assert(all_allowed, "list %zu: %zu in %zu", number, left, size);
                cr_assert_eq(n, least, "list %zu: %zu in %zu has %zu, %zu would do", number, left,
                             size, n, least);
                compared++;
            }
    }
    cr_assert_gt(compared, 500);
}

/* What is not found in bounded time is cut all the same. */
Test(recover_limits, a_large_batch_of_many_sizes_is_cut_in_bounded_time)
{
    rebatch_options o = REBATCH_OPTIONS_INIT;
    o.micro_smallest = o.micro_multiple_of = 1;
    for (size_t i = 0; i < REBATCH_ALLOWED_SIZES; i++)
        o.micro_allowed[i] = 1000 + 2 * i; /* no sum of them is odd */
    const size_t left = 1000001, size = o.micro_allowed[REBATCH_ALLOWED_SIZES - 1];
    cr_assert_eq(rbi_round_size(&o, rbi_even_size(&o, size, left - left % size)), size);
}

/* Sizes that may be any number differ by one at the most. */
Test(recover_limits, without_a_list_or_a_multiple_micro_batches_are_as_even_as_can_be)
{
    rebatch_options o = REBATCH_OPTIONS_INIT;
    o.micro_smallest = o.micro_multiple_of = 1;
    for (size_t size = 1; size <= MOST; size++)
        for (size_t left = 1; left <= MOST; left++) {
            const size_t n = (left - 1) / size + 1;
            cr_assert_eq(rbi_even_size(&o, size, left), (left - 1) / n + 1, "%zu in %zu", left,
                         size);
        }
}

/* What bounds a map may be below, or above, all that the limits allow. */
Test(recover_limits, a_bound_that_is_none_of_the_limits_is_kept)
{
    rebatch_options o = REBATCH_OPTIONS_INIT;
    o.micro_smallest = 8;
    o.micro_multiple_of = 1;
    cr_assert_eq(rbi_even_size(&o, 3, 10), 3);
    o.micro_smallest = 1;
    o.micro_multiple_of = o.micro_largest = 4;
    cr_assert_eq(rbi_even_size(&o, 6, 13), 6, "no multiple of 4 from 5 on is at most 4");
}

Test(recover_limits, a_rest_is_cut_where_each_part_is_allowed_and_else_runs_whole)
{
    size_t cut = 0;
    EACH(o)
    {
        for (size_t left = 1; left <= MOST; left++) {
            const size_t first = rbi_rest_size(&o, left);
            cr_assert(first >= 1 && first <= left);
            if (is_allowed(&o, left))
                cr_assert_eq(first, left, "limits %zu: %zu", number, left);
            if (first == left)
                continue;
            for (size_t rest = left, part; rest > 0; rest -= part) {
                part = rbi_rest_size(&o, rest);
                cr_assert(is_allowed(&o, part), "limits %zu: %zu of %zu of %zu", number, part, rest,
                          left);
            }
            cut++;
        }
    }
    cr_assert_gt(cut, 100);
}

/* ---- limits that cannot hold together ---- */

Test(recover_limits, limits_hold_together_when_a_size_does)
{
    EACH(o)
    {
        const bool is_ordered = o.micro_largest == 0 || o.micro_smallest <= o.micro_largest;
        cr_assert_eq(rbi_limits_check(&o) == REBATCH_OK, is_ordered && has_a_size(&o),
                     "limits %zu: %s", number, rebatch_last_error());
    }
}

Test(recover_limits, the_first_size_is_an_allowed_one)
{
    EACH(o)
    {
        if (rbi_limits_check(&o))
            continue;
        for (o.micro_start = 1; o.micro_start <= MOST; o.micro_start++) {
            const rebatch_status status = rbi_limits_check(&o);
            cr_assert_eq(status == REBATCH_OK, is_allowed(&o, o.micro_start), "limits %zu: %zu",
                         number, o.micro_start);
            if (status)
                cr_assert(strstr(rebatch_last_error(), "micro_start is "), "%s",
                          rebatch_last_error());
        }
    }
}

Test(recover_limits, a_list_ends_at_its_first_zero)
{
    rebatch_options o = REBATCH_OPTIONS_INIT;
    o.micro_smallest = o.micro_multiple_of = 1;
    memcpy(o.micro_allowed, (const size_t[]){2, 0, 7}, 3 * sizeof(size_t));
    cr_assert_eq(rbi_limits_check(&o), REBATCH_E_INVALID);
    cr_assert_str_eq(rebatch_last_error(), "micro_allowed[2] is 7, after a 0 that ends the list");
}

Test(recover_limits, a_batch_has_an_allowed_size_in_it)
{
    rebatch_options o = REBATCH_OPTIONS_INIT;
    o.micro_smallest = 1;
    o.micro_multiple_of = 4;
    cr_assert_eq(rbi_limits_check_batch(&o, 3), REBATCH_E_INVALID);
    cr_assert(strstr(rebatch_last_error(), "batch is 3 and micro_multiple_of is 4"));
    cr_assert_eq(rbi_limits_check_batch(&o, 4), REBATCH_OK);
    o.micro_multiple_of = 1;
    o.micro_allowed[0] = 5;
    cr_assert_eq(rbi_limits_check_batch(&o, 4), REBATCH_E_INVALID);
    cr_assert(strstr(rebatch_last_error(), "batch is 4 and the smallest of micro_allowed is 5"));
    cr_assert_eq(rbi_limits_check_batch(&o, 5), REBATCH_OK);
}

/* ---- the list ---- */

Test(recover_limits, a_list_is_put_in_order_and_its_number_is_of_its_sizes)
{
    static const size_t orders[][4] = {
        {3, 7, 12, 25}, {25, 12, 7, 3}, {7, 3, 25, 12}, {12, 25, 3, 7}};
    rebatch_options o = REBATCH_OPTIONS_INIT;
    cr_assert_eq(rbi_limits_digest(&o), 0, "there is none");
    uint64_t first = 0;
    for (size_t i = 0; i < 4; i++) {
        memcpy(o.micro_allowed, orders[i], sizeof orders[i]);
        rbi_limits_sort(&o);
        cr_assert_arr_eq(o.micro_allowed, orders[0], sizeof orders[0]);
        cr_assert_eq(o.micro_allowed[4], 0);
        first = i ? first : rbi_limits_digest(&o);
        cr_assert_eq(rbi_limits_digest(&o), first);
    }
    cr_assert_neq(first, 0);
    for (size_t i = 0; i < 4; i++) {
        const size_t size = o.micro_allowed[i];
        o.micro_allowed[i]++;
        cr_assert_neq(rbi_limits_digest(&o), first, "another size is another list");
        o.micro_allowed[i] = size;
    }
    o.micro_allowed[3] = 0;
    cr_assert_neq(rbi_limits_digest(&o), first, "so is a shorter one");
}
