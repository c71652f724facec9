/* Owns the way from an address to its block, and the memory of what rollbacks took back.
 * Must not know how blocks are made. */
#include "pool/table.h"

#include <string.h>

#include "base/base.h"

#define SMALLEST_CAPACITY 256

/* Entries that only are left behind, and, up to number `last`, rollbacks, are of no more use. */
static bool is_needed(const struct rbi_table_entry *entry, uint64_t last)
{
    if (!entry->address)
        return false;
    return rbi_table_is_late(entry) ? entry->value >> 1 > last : rbi_table_block(entry) != NULL;
}

/* How many are needed, and of them, late. */
static size_t count_needed(const struct rbi_table *table, uint64_t last, size_t *late)
{
    size_t needed = 0;
    *late = 0;
    for (size_t i = 0; i < table->capacity; i++) {
        const bool is = is_needed(&table->entries[i], last);
        needed += is;
        *late += is && rbi_table_is_late(&table->entries[i]);
    }
    return needed;
}

/* Puts what is needed of `from` into the empty `to`. */
static void move(struct rbi_table *to, const struct rbi_table *from, uint64_t last)
{
    to->used = to->late = 0;
    for (size_t i = 0; i < from->capacity; i++) {
        const struct rbi_table_entry *entry = &from->entries[i];
        if (!is_needed(entry, last))
            continue;
        size_t slot = rbi_table_home(to, entry->address);
        while (to->entries[slot].address)
            slot = (slot + 1) & (to->capacity - 1);
        to->entries[slot] = *entry;
        to->used++;
        to->late += rbi_table_is_late(entry);
    }
}

/* False when that leaves no space for `count` more. */
static bool clean(struct rbi_table *table, size_t count, uint64_t last)
{
    size_t late;
    if (table->capacity == 0 || (count_needed(table, last, &late) + count) * 2 > table->capacity)
        return false;
    struct rbi_table cleaned = *table;
    cleaned.entries = table->other;
    cleaned.other = table->entries;
    move(&cleaned, table, last);
    memset(cleaned.other, 0, cleaned.capacity * sizeof *cleaned.other);
    *table = cleaned;
    return true;
}

static bool grow(struct rbi_table *table, size_t capacity, uint64_t last)
{
    struct rbi_table larger = *table;
    larger.capacity = capacity;
    larger.entries = rbi_heap_calloc(capacity, sizeof *larger.entries);
    larger.other = rbi_heap_calloc(capacity, sizeof *larger.other);
    if (!larger.entries || !larger.other) {
        rbi_table_destroy(&larger);
        return false;
    }
    move(&larger, table, last);
    rbi_table_destroy(table);
    *table = larger;
    return true;
}

/* An eighth of the capacity is for blocks after it, so that it comes again only after three
 * times as many puts at new addresses; less than a third for what was rolled back, which may be
 * much. */
bool rbi_table_prepare_slowly(struct rbi_table *table, size_t count)
{
    const uint64_t last = table->late > RBI_POOL_LATE_MOST ? table->rollback - 1 : 0;
    size_t late;
    const size_t needed = count_needed(table, last, &late) + count;
    size_t capacity = rbi_max(SMALLEST_CAPACITY, table->capacity);
    while (2 * capacity < 16 * (needed - late) + 7 * late)
        capacity *= 2;
    if (capacity == table->capacity)
        return clean(table, count, last);
    return grow(table, capacity, last) || clean(table, count, last) ||
           clean(table, count, table->rollback);
}

void rbi_table_mark_late(struct rbi_table *table, const char *address)
{
    struct rbi_table_entry *entry = rbi_table_find(table, address);
    entry->value = (uintptr_t)table->rollback << 1 | 1;
    table->late++;
}

void rbi_table_destroy(struct rbi_table *table)
{
    rbi_heap_free(table->entries);
    rbi_heap_free(table->other);
    table->entries = table->other = NULL;
}
