/* Owns the way from an address to its block, and the memory of what rollbacks took back.
 * Must not know how blocks are made. */
#include "pool/pool.h"

#define SMALLEST_CAPACITY 256

static size_t after(const struct rbi_table *table, size_t slot)
{
    return (slot + 1) & (table->capacity - 1);
}

/* Where `address` is, or the empty slot where it would go. */
static size_t slot_of(const struct rbi_table *table, const void *address)
{
    size_t slot = rbi_table_home(table, address);
    while (table->entries[slot].address && table->entries[slot].address != address)
        slot = after(table, slot);
    return slot;
}

/* Empties a slot and closes the gap, so that no probe ends early. */
static void empty_slot(struct rbi_table *table, size_t gap)
{
    table->used--;
    table->late -= rbi_table_block(&table->entries[gap]) == NULL;
    for (size_t slot = after(table, gap); table->entries[slot].address; slot = after(table, slot)) {
        const size_t home = rbi_table_home(table, table->entries[slot].address);
        const size_t mask = table->capacity - 1;
        if (((slot - home) & mask) < ((slot - gap) & mask))
            continue; /* its probe begins behind the gap */
        table->entries[gap] = table->entries[slot];
        gap = slot;
    }
    table->entries[gap] = (struct rbi_table_entry){NULL, 0};
}

/* Forgets what rollbacks up to number `last` took back. An entry that moves into a slot already
 * seen was itself seen before: it would otherwise have had to pass the slot being emptied. */
static void forget_late(struct rbi_table *table, uint64_t last)
{
    for (size_t slot = 0; slot < table->capacity;) {
        const struct rbi_table_entry *entry = &table->entries[slot];
        if (entry->address && (entry->value & 1) && entry->value >> 1 <= last)
            empty_slot(table, slot);
        else
            slot++;
    }
}

static bool grow(struct rbi_table *table, size_t count)
{
    struct rbi_table larger = *table;
    larger.capacity = rbi_max(SMALLEST_CAPACITY, table->capacity);
    while (!rbi_table_has_space(&larger, count))
        larger.capacity *= 2;
    larger.entries = rbi_heap_calloc(larger.capacity, sizeof *larger.entries);
    if (!larger.entries)
        return false;
    for (size_t i = 0; i < table->capacity; i++)
        if (table->entries[i].address)
            larger.entries[slot_of(&larger, table->entries[i].address)] = table->entries[i];
    rbi_heap_free(table->entries);
    *table = larger;
    return true;
}

bool rbi_table_prepare_slowly(struct rbi_table *table, size_t count)
{
    if (table->late > RBI_POOL_LATE_MOST) {
        forget_late(table, table->rollback - 1);
        if (rbi_table_has_space(table, count))
            return true;
    }
    if (grow(table, count))
        return true;
    forget_late(table, table->rollback);
    return rbi_table_has_space(table, count);
}

void rbi_table_remove(struct rbi_table *table, struct rbi_table_entry *entry)
{
    empty_slot(table, (size_t)(entry - table->entries));
}

void rbi_table_mark_late(struct rbi_table *table, struct rbi_table_entry *entry)
{
    entry->value = (uintptr_t)table->rollback << 1 | 1;
    table->late++;
}
