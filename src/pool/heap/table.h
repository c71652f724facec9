/* The way from a pointer to its block (table.c).
 * Must not know how blocks are made. */
#ifndef RBI_POOL_TABLE_H
#define RBI_POOL_TABLE_H

#ifndef RBI_POOL_HEAP_H
#error "include pool/heap/heap.h"
#endif

/* Blocks by their address: a list for every home, linked through the blocks, so that neither a put
 * nor a removal needs memory or leaves anything behind. No two blocks in it begin at one address.
 *   shift == 64 - log2(number of heads) */
struct rbi_table {
    struct rbi_block **heads; /* NULL: then it must not be looked into */
    unsigned shift;
    size_t blocks; /* how many its lists are short for */
};
/* Keeps the lists short for `blocks` blocks, where the heap has memory for that. False when there
 * is no table at all. */
bool rbi_table_prepare(struct rbi_table *table, size_t blocks);
void rbi_table_destroy(struct rbi_table *table);

static inline struct rbi_block **rbi_table_home(const struct rbi_table *table, const void *address)
{
    rbi_assert(table->heads);
    /* Fibonacci hashing: the high bits of the product depend on all bits of the unit's number. */
    const uint64_t unit = (uint64_t)(uintptr_t)address / REBATCH_POOL_ALIGNMENT;
    return &table->heads[(unit * UINT64_C(0x9e3779b97f4a7c15)) >> table->shift];
}

/* NULL when no block in the table begins there. */
static inline struct rbi_block *rbi_table_find(const struct rbi_table *table, const void *address)
{
    struct rbi_block *block = *rbi_table_home(table, address);
    while (block && block->address != address)
        block = block->same_home;
    return block;
}

static inline void rbi_table_put(struct rbi_table *table, struct rbi_block *block)
{
    struct rbi_block **const home = rbi_table_home(table, block->address);
    block->same_home = *home;
    *home = block;
}

/* The block must be in the table. */
static inline void rbi_table_remove(struct rbi_table *table, const struct rbi_block *block)
{
    struct rbi_block **link = rbi_table_home(table, block->address);
    while (*link != block)
        link = &(*link)->same_home;
    *link = block->same_home;
}

#endif
