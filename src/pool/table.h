/* The way from a pointer to its block, and the memory of what rollbacks took back (table.c).
 * Must not know how blocks are made. */
#ifndef RBI_POOL_TABLE_H
#define RBI_POOL_TABLE_H

#include "pool/block.h"

/* Rolled-back addresses that are remembered beyond those of the last rollback. */
#define RBI_POOL_LATE_MOST 65536

/* A block, or, where it is odd, the number, doubled, of the rollback that took the block back. */
struct rbi_table_entry {
    const char *address; /* NULL: empty */
    uintptr_t value;
};

/* Open addressing, linear probing; at most half full. A block that merges into another leaves
 * its entry behind: blocks come and go at the same addresses, and the next one there takes it
 * over. Such an entry is known by its block, which is elsewhere by now, or not listed; all of
 * them go when the table is full, and the others move to `other`, so that no call needs the
 * heap for that.
 *   used == entries that are not empty; late == odd ones */
struct rbi_table {
    struct rbi_table_entry *entries, *other;
    size_t capacity; /* of either; a power of two, or 0: then it must not be looked into */
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
/* Keeps the address of a block as one that a rollback took back. */
void rbi_table_mark_late(struct rbi_table *table, const char *address);
void rbi_table_destroy(struct rbi_table *table);

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
    size_t slot = rbi_table_home(table, address);
    struct rbi_table_entry *entry = &table->entries[slot];
    while (entry->address != address) {
        if (!entry->address)
            return NULL;
        slot = (slot + 1) & (table->capacity - 1);
        entry = &table->entries[slot];
    }
    return entry;
}
/* NULL: a rollback took it back, or it has become part of another. */
static inline struct rbi_block *rbi_table_block(const struct rbi_table_entry *entry)
{
    struct rbi_block *block = (struct rbi_block *)entry->value;
    return (entry->value & 1) == 0 && block->address == entry->address && block->listed ? block
                                                                                        : NULL;
}
/* The same of an entry that is not late, whatever has become of the block. */
static inline struct rbi_block *rbi_table_block_as_is(const struct rbi_table_entry *entry)
{
    return (struct rbi_block *)entry->value;
}
static inline bool rbi_table_is_late(const struct rbi_table_entry *entry)
{
    return entry->value & 1;
}

static inline void rbi_table_put(struct rbi_table *table, struct rbi_block *block)
{
    const char *const address = block->address;
    size_t slot = rbi_table_home(table, address);
    struct rbi_table_entry *entry = &table->entries[slot];
    while (entry->address && entry->address != address) {
        slot = (slot + 1) & (table->capacity - 1);
        entry = &table->entries[slot];
    }
    table->used += !entry->address;
    table->late -= entry->value & 1; /* rolled back before, now given out again */
    *entry = (struct rbi_table_entry){address, (uintptr_t)block};
    block->listed = true;
}

#endif
