/* Owns the end of an arena: its memory becomes blocks of the pool, in use and free.
 * Must not know why. */
#include "pool/plan.h"
#include "pool/pool.h"

/* Lays a block into the gap around it. Needs a spare node. */
static void lay(rebatch_pool *pool, struct rbi_block *gap, struct rbi_block *block)
{
    rbi_assert(gap->state == RBI_BLOCK_HELD && block->address >= gap->address);
    rbi_assert(block->address + block->bytes <= gap->address + gap->bytes);
    const size_t before = (size_t)(block->address - gap->address);
    const size_t behind = gap->bytes - before - block->bytes;
    if (behind)
        rbi_block_cut(&pool->heap, gap, behind, true)->state = RBI_BLOCK_HELD;
    gap->bytes -= block->bytes;
    rbi_block_insert(block, gap, true);
    if (before)
        return;
    block->before = gap->before;
    if (block->before)
        block->before->after = block;
    else
        block->range->first = block;
    rbi_block_discard(&pool->heap, gap);
}

static struct rbi_block *find_gap(const struct rbi_range *range, const char *address)
{
    struct rbi_block *gap = range->first;
    while (address >= gap->address + gap->bytes)
        gap = gap->after;
    rbi_assert(address >= gap->address);
    return gap;
}

void rbi_plan_cut_up(rebatch_pool *pool, struct rbi_block *arena, uint64_t first_sequence)
{
    rbi_assert(arena->state == RBI_BLOCK_HELD && rbi_lock_is_held(&pool->lock));
    struct rbi_range *const range = arena->range;
    char *const end = arena->address + arena->bytes;
    char *at = arena->address;
    for (struct rbi_block *b = pool->by_sequence.previous;
         b != &pool->by_sequence && b->sequence >= first_sequence; b = b->previous) {
        if (!b->planned)
            continue;
        b->planned = false;
        lay(pool, find_gap(range, b->address), b);
    }
    const uint64_t point = ++pool->progress.frees;
    for (struct rbi_block *b = find_gap(range, at); b && b->address < end;) {
        at = b->address + b->bytes;
        if (b->state == RBI_BLOCK_HELD) {
            b->freed_at = point;
            b->sequence = pool->sequence;
            (void)rbi_block_put(&pool->heap, b);
        }
        b = at < end ? find_gap(range, at) : NULL;
    }
}
