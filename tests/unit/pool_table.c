/* Holds the table from addresses to blocks, against a naive list.
 * Seed: 1. */
#include "unit/pool_help.h"

/* Addresses are made up, the table never looks at what is there. */
static char *address_of(size_t unit)
{
    return (char *)(uintptr_t)(0x7f0000000000u + unit * UNIT);
}

/* Whether an entry says something of its address, and is not only left behind. */
static bool knows(const struct rbi_table_entry *entry)
{
    return entry && (rbi_table_is_late(entry) || rbi_table_block(entry));
}

/* Put, find, leave behind and mark late agree with a naive list, through growth and probes that
 * wrap. */
Test(pool_table, it_agrees_with_a_naive_list)
{
    enum { UNITS = 3000 };
    static struct rbi_block blocks[UNITS];
    static enum { ABSENT, PRESENT, LATE } model[UNITS];
    struct rbi_table table = {NULL, NULL, 0, 0, 0, 0};
    uint64_t random = 1;
    cr_assert(rbi_table_prepare(&table, 1));
    cr_assert_null(rbi_table_find(&table, address_of(1)));
    for (int n = 0; n < 60000; n++) {
        const size_t unit = draw(&random) % UNITS;
        struct rbi_table_entry *entry = rbi_table_find(&table, address_of(unit));
        cr_assert_eq(knows(entry), model[unit] != ABSENT);
        if (model[unit] == PRESENT) {
            cr_assert_eq(rbi_table_block(entry), &blocks[unit]);
            blocks[unit].listed = false;
            if (draw(&random) % 3 == 0) {
                table.rollback++;
                rbi_table_mark_late(&table, blocks[unit].address);
                model[unit] = LATE;
            } else {
                blocks[unit].address = NULL; /* as of one that has merged into another */
                model[unit] = ABSENT;
            }
            continue;
        }
        cr_assert(!entry || rbi_table_is_late(entry) == (model[unit] == LATE));
        blocks[unit].address = address_of(unit);
        cr_assert(rbi_table_prepare(&table, 1));
        rbi_table_put(&table, &blocks[unit]);
        model[unit] = PRESENT;
        cr_assert_leq(table.used * 2, table.capacity);
    }
    for (size_t unit = 0; unit < UNITS; unit++) {
        const struct rbi_table_entry *entry = rbi_table_find(&table, address_of(unit));
        cr_assert_eq(knows(entry), model[unit] != ABSENT);
    }
    rbi_table_destroy(&table);
}

/* What rollbacks took back is remembered within bounds: older rollbacks are forgotten first. */
Test(pool_table, what_it_remembers_of_rollbacks_is_bounded)
{
    struct rbi_table table = {NULL, NULL, 0, 0, 0, 0};
    static struct rbi_block block;
    const size_t most = RBI_POOL_LATE_MOST * 3;
    for (size_t unit = 0; unit < 4 * most; unit++) {
        if (unit % 1000 == 0)
            table.rollback++;
        block.address = address_of(unit);
        cr_assert(rbi_table_prepare(&table, 1));
        rbi_table_put(&table, &block);
        rbi_table_mark_late(&table, block.address);
        cr_assert_not_null(rbi_table_find(&table, address_of(unit - unit % 1000)));
    }
    cr_assert_leq(table.capacity, 4 * RBI_POOL_LATE_MOST);
    cr_assert_null(rbi_table_find(&table, address_of(0)));
    rbi_table_destroy(&table);
}

/* When the heap gives nothing, old rollbacks make place before a put is refused. */
Test(pool_table, without_heap_old_rollbacks_make_place)
{
    struct rbi_table table = {NULL, NULL, 0, 0, 0, 0};
    static struct rbi_block blocks[2000];
    size_t count = 0;
    cr_assert(rbi_table_prepare(&table, 1));
    rbi_heap_fail(1, UINT64_MAX);
    for (; rbi_table_prepare(&table, 1); count++) {
        blocks[count].address = address_of(count);
        rbi_table_put(&table, &blocks[count]);
    }
    cr_assert_eq(count, table.capacity / 2);
    table.rollback++;
    for (size_t i = 0; i < count; i += 2)
        rbi_table_mark_late(&table, address_of(i));
    cr_assert(rbi_table_prepare(&table, 1));
    cr_assert_eq(table.late, 0);
    for (size_t i = 1; i < count; i += 2)
        cr_assert_eq(rbi_table_block(rbi_table_find(&table, address_of(i))), &blocks[i]);
    rbi_heap_fail(0, 0);
    rbi_table_destroy(&table);
}
