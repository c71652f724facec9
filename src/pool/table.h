/* The way from a pointer to its block, and the memory of what rollbacks took back (table.c).
 * Must not know how blocks are made. */
#ifndef RBI_POOL_TABLE_H
#define RBI_POOL_TABLE_H

#include "pool/block.h"

/* Rolled-back addresses that are remembered beyond those of the last rollback. */
#define RBI_POOL_LATE_MOST 65536

/* `block` and `rollback` are one word: an odd one is the number, doubled, of the rollback that took
 * the block back. */
struct rbi_table_entry {
    const char *address; /* NULL: empty */
    uintptr_t value;
};
/* NULL: a rollback took it back. */
static inline struct rbi_block *rbi_table_block(const struct rbi_table_entry *entry)
{
    return entry->value & 1 ? NULL : (struct rbi_block *)entry->value;
}

/* Open addressing, linear probing; at most half full.
 *   used == entries that are not empty; late == entries without a block */
struct rbi_table {
    struct rbi_table_entry *entries;
    size_t capacity; /* a power of two, or 0 */
    size_t used, late;
    uint64_t rollback; /* number of the last one */
};
/* Makes sure that `count` more addresses can be put in; may forget old rollbacks. */
bool rbi_table_prepare_slowly(struct rbi_table *table, size_t count);
static inline bool rbi_table_has_space(const struct rbi_table *table, size_t count)
{
    return (table->used + count) * 2 <= table->capacity;
}
static inline bool rbi_table_prepare(struct rbi_table *table, size_t count)
{
    return rbi_table_has_space(table, count) || rbi_table_prepare_slowly(table, count);
}
void rbi_table_remove(struct rbi_table *table, struct rbi_table_entry *entry);
/* Keeps the address as one that a rollback took back. */
void rbi_table_mark_late(struct rbi_table *table, struct rbi_table_entry *entry);

static inline size_t rbi_table_home(const struct rbi_table *table, const void *address)
{
    /* Fibonacci hashing: the high bits of the product depend on all bits of the unit's number. */
    const uint64_t unit = (uint64_t)(uintptr_t)address / REBATCH_POOL_ALIGNMENT;
    return (size_t)((unit * UINT64_C(0x9e3779b97f4a7c15)) >> 32) & (table->capacity - 1);
}

/* NULL when there is no such entry; the entry is valid until the next change. */
static inline struct rbi_table_entry *rbi_table_find(const struct rbi_table *table,
                                                     const void *address)
{
    if (table->capacity == 0)
        return NULL;
    size_t slot = rbi_table_home(table, address);
    while (table->entries[slot].address != address) {
        if (!table->entries[slot].address)
            return NULL;
        slot = (slot + 1) & (table->capacity - 1);
    }
    return &table->entries[slot];
}

static inline void rbi_table_put(struct rbi_table *table, struct rbi_block *block)
{
    size_t slot = rbi_table_home(table, block->address);
    while (table->entries[slot].address && table->entries[slot].address != block->address)
        slot = (slot + 1) & (table->capacity - 1);
    struct rbi_table_entry *entry = &table->entries[slot];
    if (entry->address)
        table->late--; /* rolled back before, now given out again */
    else
        table->used++;
    *entry = (struct rbi_table_entry){block->address, (uintptr_t)block};
}

#endif
