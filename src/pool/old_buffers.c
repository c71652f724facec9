/* Owns whose blocks are resident, and the addresses of those that were taken back of a resize,
 * which may free them late: none of its new blocks begins there.
 * Must not know what a resize is for. */
#include "pool/pool.h"

void rbi_old_buffers_begin(rebatch_pool *pool, struct rbi_old_buffers *call)
{
    rbi_lock_take(&pool->lock);
    struct rbi_old_buffers *const old = &pool->old_buffers;
    const struct rbi_old_buffers outer = *old;
    *old = *call;
    *call = outer;
    old->depth = pool->depth;
    pool->heap.late.owner = old->owner;
    pool->heap.late.rollback++; /* as whose late frees are known */
    rbi_pool_give_lock(pool);
}

void rbi_old_buffers_end(rebatch_pool *pool, const struct rbi_old_buffers *outer, bool has_failed)
{
    rbi_pool_take_lock(pool);
    struct rbi_old_buffers *const old = &pool->old_buffers;
    if (!has_failed) { /* the program has the pointers to its new ones */
        pool->residents[pool->resident_of].owner = old->owner;
        rbi_late_disown(&pool->heap.late, old->owner);
    }
    for (struct rbi_block *b = old->aside, *next; b; b = next) {
        next = b->next;
        (void)rbi_block_put(&pool->heap, b);
    }
    *old = *outer;
    pool->heap.late.owner = old->owner;
    rbi_pool_end_free(pool);
}

/* ---- within the call ---- */

bool rbi_old_buffers_pass(rebatch_pool *pool, struct rbi_block *block)
{
    struct rbi_late *const late = &pool->heap.late;
    if (rbi_late_owner(late, block->address) == 0 || block->planned)
        return true;
    if (!pool->caching || !rbi_blocks_prepare(&pool->heap, rbi_pool_search_nodes(pool) + 3)) {
        rbi_late_own(late, block->address, 0); /* it is the new block's now */
        return true;
    }
    rbi_table_remove(&pool->heap.table, block);
    rbi_late_add(late, block->address);
    block->late = false;
    block->state = RBI_BLOCK_HELD;
    block = rbi_block_hold_front(pool, block);
    if (block) {
        block->next = pool->old_buffers.aside;
        pool->old_buffers.aside = block;
    }
    return false;
}

enum rbi_old_free rbi_old_buffers_free(rebatch_pool *pool, const char *pointer,
                                       const struct rbi_block *older)
{
    const struct rbi_old_buffers *const old = &pool->old_buffers;
    if (rbi_pool_is_other_thread(pool, pool->owner_thread) || rbi_pool_is_pressing(pool))
        return RBI_OLD_FREE_NONE;
    if (rbi_late_owner(&pool->heap.late, pointer) == old->owner) {
        pool->stats.late_frees++;
        return RBI_OLD_FREE_LATE;
    }
    if (!older || pool->depth != old->depth || old->is_guarded(old->user, pointer))
        return RBI_OLD_FREE_NONE;
    return RBI_OLD_FREE_FINAL;
}

/* ---- whose they are ---- */

unsigned rbi_residents_open(rebatch_pool *pool)
{
    unsigned number = 1;
    rbi_lock_take(&pool->lock);
    while (number < RBI_POOL_RESIDENTS && pool->residents[number].is_open)
        number++;
    if (number < RBI_POOL_RESIDENTS)
        pool->residents[number] = (struct rbi_residents){.is_open = true};
    rbi_pool_give_lock(pool);
    return number < RBI_POOL_RESIDENTS ? number : 0;
}

void rbi_residents_close(rebatch_pool *pool, unsigned number)
{
    rbi_lock_take(&pool->lock);
    pool->residents[number].is_open = pool->residents[number].bytes != 0;
    rbi_pool_give_lock(pool);
}

unsigned rbi_residents_enter(rebatch_pool *pool, unsigned number)
{
    rbi_lock_take(&pool->lock);
    const unsigned before = pool->resident_of;
    pool->resident_of = number;
    rbi_pool_give_lock(pool);
    return before;
}
