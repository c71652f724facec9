/* Owns the tests of the one heap seam: counting, overflow, and failures on order.
 * Must not know who asks for memory. */
#include <string.h>

#include <criterion/criterion.h>

#include "base/base.h"

Test(base_heap, memory_is_zeroed_and_counted)
{
    const uint64_t calls = rbi_heap_calls();
    const int64_t live = rbi_heap_live();
    for (int round = 0; round < 20; round++) { /* so that used memory comes round again */
        unsigned char *memory = rbi_heap_calloc(1000, 7);
        cr_assert_not_null(memory);
        for (size_t i = 0; i < 7000; i++)
            cr_assert_eq(memory[i], 0);
        memset(memory, 0xff, 7000);
        cr_assert_eq(rbi_heap_live(), live + 1);
        rbi_heap_free(memory);
        cr_assert_eq(rbi_heap_live(), live);
    }
    cr_assert_eq(rbi_heap_calls(), calls + 20);
    rbi_heap_free(NULL);
    cr_assert_eq(rbi_heap_live(), live);
}

Test(base_heap, lines_begin_where_the_caches_do)
{
    const uint64_t calls = rbi_heap_calls();
    const int64_t live = rbi_heap_live();
    for (size_t size = 1; size <= 1000; size += 37) { /* of used memory, too */
        unsigned char *memory = rbi_heap_calloc_lines(3, size);
        cr_assert_not_null(memory);
        cr_assert_eq((uintptr_t)memory % RBI_LINE_BYTES, 0);
        for (size_t i = 0; i < 3 * size; i++)
            cr_assert_eq(memory[i], 0);
        memset(memory, 0xff, 3 * size);
        cr_assert_eq(rbi_heap_live(), live + 1);
        rbi_heap_free(memory);
    }
    cr_assert_eq(rbi_heap_calls(), calls + 28);
    cr_assert_eq(rbi_heap_live(), live);
}

/* Behind volatile, so that no compiler complains about what is being tested. */
static volatile size_t most = SIZE_MAX;

Test(base_heap, a_size_that_overflows_is_refused)
{
    const int64_t live = rbi_heap_live();
    cr_assert_null(rbi_heap_calloc(most, 2));
    cr_assert_null(rbi_heap_calloc(most / 2 + 1, 2));
    cr_assert_null(rbi_heap_calloc_lines(most, 2));
    cr_assert_null(rbi_heap_calloc_lines(most, 1));
    cr_assert_null(rbi_heap_resize(NULL, most, 2));
    char *memory = rbi_heap_resize(NULL, 4, 1);
    memcpy(memory, "abc", 4);
    cr_assert_null(rbi_heap_resize(memory, most / 2 + 1, 2));
    cr_assert_str_eq(memory, "abc", "the old one stays");
    rbi_heap_free(memory);
    cr_assert_eq(rbi_heap_live(), live);
}

Test(base_heap, resizing_keeps_what_was_there)
{
    const int64_t live = rbi_heap_live();
    unsigned *numbers = NULL;
    for (unsigned count = 1; count <= 4096; count *= 2) {
        numbers = rbi_heap_resize(numbers, count, sizeof *numbers);
        cr_assert_not_null(numbers);
        for (unsigned i = 0; i < count / 2; i++)
            cr_assert_eq(numbers[i], i);
        for (unsigned i = count / 2; i < count; i++)
            numbers[i] = i;
    }
    cr_assert_eq(rbi_heap_live(), live + 1, "one block, however often it grew");
    rbi_heap_free(numbers);
    cr_assert_eq(rbi_heap_live(), live);
}

/* Makes `count` calls and says which failed, as bits from the lowest. */
static uint64_t failures(unsigned count)
{
    uint64_t bits = 0;
    for (unsigned i = 0; i < count; i++) {
        void *memory = i % 3 == 0   ? rbi_heap_calloc(1, 1)
                       : i % 3 == 1 ? rbi_heap_calloc_lines(1, 1)
                                    : rbi_heap_resize(NULL, 1, 1);
        bits |= (uint64_t)!memory << i;
        rbi_heap_free(memory);
    }
    return bits;
}

Test(base_heap, the_nth_call_fails_so_many_times_in_a_row)
{
    cr_assert_eq(failures(8), 0);
    rbi_heap_fail(1, 1);
    cr_assert_eq(failures(8), 0x01);
    rbi_heap_fail(3, 1);
    cr_assert_eq(failures(8), 0x04);
    rbi_heap_fail(3, 4);
    cr_assert_eq(failures(8), 0x3c);
    cr_assert_eq(failures(8), 0, "it is over");
    rbi_heap_fail(2, UINT64_MAX);
    cr_assert_eq(failures(8), 0xfe);
    cr_assert_eq(failures(8), 0xff);
    rbi_heap_fail(0, 0);
    cr_assert_eq(failures(8), 0);
}

Test(base_heap, a_failure_gives_nothing_and_keeps_the_old)
{
    const uint64_t calls = rbi_heap_calls();
    const int64_t live = rbi_heap_live();
    char *memory = rbi_heap_resize(NULL, 4, 1);
    memcpy(memory, "abc", 4);
    rbi_heap_fail(1, 1);
    cr_assert_null(rbi_heap_resize(memory, 4096, 1));
    cr_assert_str_eq(memory, "abc");
    cr_assert_eq(rbi_heap_calls(), calls + 1, "a call that gave nothing is not counted");
    cr_assert_eq(rbi_heap_live(), live + 1);
    rbi_heap_free(memory);
    cr_assert_eq(rbi_heap_live(), live);
}
