/* Holds the table from addresses to blocks, and the memory of what rollbacks took back, against
 * naive lists.
 * Seed: 1. */
#include "unit/pool_help.h"

/* Addresses are made up, nobody looks at what is there. */
static char *address_of(size_t unit)
{
    return (char *)(uintptr_t)(0x7f0000000000u + unit * UNIT);
}

/* Put, find and remove agree with a naive list, through growth and in lists of several. */
Test(pool_table, it_agrees_with_a_naive_list)
{
    enum { UNITS = 3000 };
    static struct rbi_block blocks[UNITS];
    static bool model[UNITS];
    struct rbi_table table = {NULL, 0, 0};
    uint64_t random = 1;
    cr_assert(rbi_table_prepare(&table, 1));
    for (size_t n = 0; n < 60000; n++) {
        const size_t unit = draw(&random) % UNITS;
        cr_assert_eq(rbi_table_find(&table, address_of(unit)), model[unit] ? &blocks[unit] : NULL);
        blocks[unit].address = address_of(unit);
        if (model[unit])
            rbi_table_remove(&table, &blocks[unit]);
        else
            rbi_table_put(&table, &blocks[unit]);
        model[unit] = !model[unit];
        cr_assert(rbi_table_prepare(&table, n / 20));
    }
    for (size_t unit = 0; unit < UNITS; unit++)
        cr_assert_eq(rbi_table_find(&table, address_of(unit)), model[unit] ? &blocks[unit] : NULL);
    rbi_table_destroy(&table);
}

/* A table that the heap lets not grow goes on with longer lists; without any there is none. */
Test(pool_table, without_heap_it_does_as_it_is)
{
    static struct rbi_block blocks[2000];
    struct rbi_table table = {NULL, 0, 0};
    rbi_heap_fail(1, UINT64_MAX);
    cr_assert_not(rbi_table_prepare(&table, 1));
    rbi_heap_fail(0, 0);
    cr_assert(rbi_table_prepare(&table, 1));
    rbi_heap_fail(1, UINT64_MAX);
    for (size_t i = 0; i < 2000; i++) {
        cr_assert(rbi_table_prepare(&table, i + 1));
        blocks[i].address = address_of(i);
        rbi_table_put(&table, &blocks[i]);
    }
    rbi_heap_fail(0, 0);
    for (size_t i = 0; i < 2000; i++)
        cr_assert_eq(rbi_table_find(&table, address_of(i)), &blocks[i]);
    rbi_table_destroy(&table);
}

/* Added, given out again, owned until the owner lets go, forgotten when there are too many: as a
 * naive list has it. */
Test(pool_late, it_agrees_with_a_naive_list)
{
    enum { UNITS = 3000, OWNERS = 3 };
    static bool model[UNITS];
    static uint64_t owners[UNITS];
    struct rbi_late late = {.rollback = 1};
    uint64_t random = 1;
    cr_assert_not(rbi_late_has(&late, address_of(1)));
    cr_assert(rbi_late_prepare(&late, 1));
    for (int n = 0; n < 60000; n++) {
        const size_t unit = draw(&random) % UNITS;
        cr_assert_eq(rbi_late_has(&late, address_of(unit)), model[unit]);
        late.rollback += n % 100 == 0;
        model[unit] = draw(&random) % 2;
        if (model[unit])
            rbi_late_add(&late, address_of(unit));
        else
            rbi_late_remove(&late, address_of(unit));
        if (n % 20 == 0)
            rbi_late_own(&late, address_of(unit), owners[unit] = 1 + draw(&random) % OWNERS);
        if (n % 5000 == 0) {
            const uint64_t owner = draw(&random) % (1 + OWNERS);
            rbi_late_disown(&late, owner);
            for (size_t i = 0; i < UNITS; i++)
                owners[i] = !owner || owners[i] == owner ? 0 : owners[i];
        }
        cr_assert(!late.crowded || rbi_late_prepare(&late, 1));
        cr_assert_leq(late.used * 2, late.capacity);
    }
    for (size_t unit = 0; unit < UNITS; unit++) {
        cr_assert_eq(rbi_late_has(&late, address_of(unit)), model[unit]);
        cr_assert_eq(rbi_late_owner(&late, address_of(unit)), owners[unit]);
    }
    rbi_late_destroy(&late);
}

/* What rollbacks took back is remembered within bounds: older rollbacks are forgotten first. */
Test(pool_late, what_it_remembers_is_bounded)
{
    struct rbi_late late = {.rollback = 0};
    const size_t most = RBI_POOL_LATE_MOST * 3;
    for (size_t unit = 0; unit < 4 * most; unit++) {
        late.rollback += unit % 1000 == 0;
        cr_assert(rbi_late_prepare(&late, 1000));
        rbi_late_add(&late, address_of(unit));
        cr_assert(rbi_late_has(&late, address_of(unit - unit % 1000)));
        cr_assert(unit >= RBI_POOL_LATE_MOST || rbi_late_has(&late, address_of(0)));
    }
    cr_assert_leq(late.capacity, 8 * RBI_POOL_LATE_MOST);
    cr_assert_not(rbi_late_has(&late, address_of(0)));
    rbi_late_destroy(&late);
}

/* Whatever number of blocks each rollback takes back. */
Test(pool_late, the_latest_are_remembered)
{
    struct rbi_late late = {.rollback = 0};
    uint64_t random = 1;
    for (size_t unit = 0, left = 0; unit < 10 * RBI_POOL_LATE_MOST; unit++, left--) {
        if (left == 0) {
            late.rollback++;
            left = draw(&random) % 64 ? 1 + draw(&random) % 100 : 20000;
            cr_assert(rbi_late_prepare(&late, left));
        }
        rbi_late_add(&late, address_of(unit));
        const size_t latest = draw(&random) % RBI_POOL_LATE_LEAST;
        cr_assert(unit < latest || rbi_late_has(&late, address_of(unit - latest)));
    }
    cr_assert_leq(late.capacity, 8 * RBI_POOL_LATE_MOST);
    rbi_late_destroy(&late);
}

/* When the heap gives nothing, old rollbacks make place for the last. */
Test(pool_late, without_heap_old_rollbacks_make_place)
{
    struct rbi_late late = {.rollback = 0};
    enum { BLOCKS = 500 };
    cr_assert(rbi_late_prepare(&late, BLOCKS));
    rbi_heap_fail(1, UINT64_MAX);
    for (size_t rollback = 1; rollback < 50; rollback++) {
        late.rollback = rollback;
        for (size_t i = 0; i < BLOCKS; i++) {
            rbi_late_own(&late, address_of(rollback * BLOCKS + i), rollback);
            rbi_late_add(&late, address_of(rollback * BLOCKS + i));
        }
        for (size_t i = 0; i < BLOCKS; i++)
            cr_assert(rbi_late_has(&late, address_of(rollback * BLOCKS + i)));
        cr_assert(rbi_late_prepare(&late, BLOCKS));
    }
    cr_assert_not(rbi_late_has(&late, address_of(BLOCKS)));
    rbi_heap_fail(0, 0);
    rbi_late_destroy(&late);
}
