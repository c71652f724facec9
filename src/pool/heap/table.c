/* Owns the way from an address to its block.
 * Must not know how blocks are made. */
#include "pool/heap/heap.h"

#include "base/base.h"

#define FEWEST_HEADS 256

static void move(struct rbi_table *to, const struct rbi_table *from)
{
    const size_t heads = from->heads ? (size_t)1 << (64 - from->shift) : 0;
    for (size_t i = 0; i < heads; i++) {
        for (struct rbi_block *b = from->heads[i], *next; b; b = next) {
            next = b->same_home;
            rbi_table_put(to, b);
        }
    }
}

bool rbi_table_prepare(struct rbi_table *table, size_t blocks)
{
    if (blocks <= table->blocks)
        return true;
    size_t heads = FEWEST_HEADS;
    while (heads < RBI_TABLE_HEADS_A_BLOCK * blocks)
        heads *= 2;
    struct rbi_table larger = {.shift = 64 - (unsigned)__builtin_ctzll(heads),
                               .blocks = heads / RBI_TABLE_HEADS_A_BLOCK};
    larger.heads = rbi_heap_calloc(heads, sizeof(struct rbi_block *));
    if (!larger.heads)
        return table->heads != NULL; /* longer lists do as well */
    move(&larger, table);
    rbi_heap_free(table->heads);
    *table = larger;
    return true;
}

void rbi_table_destroy(struct rbi_table *table)
{
    rbi_heap_free(table->heads);
    table->heads = NULL;
}
