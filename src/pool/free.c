/* Owns what becomes of a block in use: its free, now or when a scope ends, and who else uses it.
 * Must not know how memory is found. */
#include "pool/pool.h"

/* With caching off a block is all that its segment holds. What the device does not take back now
 * stays cached, and every trim tries it again. */
static void pass_back(rebatch_pool *pool, struct rbi_range *range)
{
    rbi_assert(!pool->caching && !range->map);
    if (pool->pending)
        (void)rbi_pool_await_all(pool);
    rbi_pool_flush_lists(pool);
    if (range->first->state == RBI_BLOCK_FREE)
        (void)rbi_range_free(pool, range);
}

void rbi_pool_drop_block(rebatch_pool *pool, struct rbi_block *block, bool rolled_back)
{
    rbi_assert(block->state == RBI_BLOCK_LIVE || block->state == RBI_BLOCK_DEFERRED);
    if (block->used)
        RBI_RECORD(pool, FREE_REQUESTED, block->address, block->bytes, rbi_stream_of(block)->stream,
                   block->tag);
    else
        RBI_RECORD(pool, FREE, block->address, block->bytes, rbi_stream_of(block)->stream,
                   block->tag);
    rbi_pool_fill_block(pool, block, pool->fill.freed);
    if (RBI_UNLIKELY(pool->plan.mode != RBI_PLAN_OFF))
        rbi_plan_note_free(pool, block);
    rbi_pool_count_free(pool, block);
    pool->stats.rolled_back_blocks += rolled_back;
    const uint64_t owner =
        block->resident ? pool->residents[block->resident].owner : pool->heap.late.owner;
    if (rolled_back && RBI_UNLIKELY(owner != 0))
        rbi_late_own(&pool->heap.late, block->address, owner);
    if (RBI_UNLIKELY(block->resident)) {
        rbi_assert(pool->residents[block->resident].bytes >= block->bytes);
        pool->residents[block->resident].bytes -= block->bytes;
        block->resident = 0;
    }
    rbi_pool_leave_use(block);
    block->late = rolled_back;
    if (RBI_UNLIKELY(block->planned)) {
        rbi_plan_discard(pool, block);
        return;
    }
    struct rbi_range *range = block->range;
    rbi_pool_retire_block(pool, block);
    if (!pool->caching)
        pass_back(pool, range);
}

void rbi_scope_push_deferred(struct rbi_scope *scope, struct rbi_block *block)
{
    rbi_assert(block->state == RBI_BLOCK_DEFERRED);
    block->next_deferred = scope->deferred;
    scope->deferred = block;
}

static void defer(rebatch_pool *pool, struct rbi_scope *scope, struct rbi_block *block)
{
    rbi_assert(block->state == RBI_BLOCK_LIVE && pool->depth > 0 && pool->undoing > 0);
    block->state = RBI_BLOCK_DEFERRED;
    rbi_scope_push_deferred(scope, block);
    pool->stats.deferred_bytes += block->bytes;
}

/* Frees a block in use as one that was taken back, past the scopes of rbi_scope_begin_phase(). */
static void free_past(rebatch_pool *pool, struct rbi_block *block)
{
    struct rbi_scope *const all = rbi_scope_of_all(pool);
    if (all && block->sequence < all->first_sequence) {
        defer(pool, all, block);
        return;
    }
    rbi_scope_pass_over(pool, block, false);
    rbi_pool_drop_block(pool, block, true);
}

/* Did a rollback take back what began there? `block` is what the table knows of it. */
static bool is_late(const rebatch_pool *pool, const struct rbi_block *block, const void *pointer)
{
    return block ? block->late : rbi_late_has(&pool->heap.late, pointer);
}

/* Says what is wrong with a pointer that is no block in use. */
static rebatch_status refuse_pointer(rebatch_pool *pool, const void *pointer)
{
    if (pointer && is_late(pool, rbi_table_find(&pool->heap.table, pointer), pointer))
        return rbi_error(REBATCH_E_INVALID,
                         "pointer is %p, which a rollback took back: expected a block in use",
                         pointer);
    const struct rbi_block *block = rbi_block_around(&pool->heap, pointer);
    if (!block || block->state == RBI_BLOCK_HOLE || block->state == RBI_BLOCK_LOST)
        return rbi_error(REBATCH_E_INVALID,
                         "pointer is %p: expected one from rebatch_pool_alloc() of this pool%s",
                         pointer, block ? ", not freed already" : "");
    if (block->state != RBI_BLOCK_LIVE)
        return rbi_error(REBATCH_E_INVALID,
                         "pointer is %p, which has been freed already: "
                         "expected a block in use",
                         pointer);
    return rbi_error(REBATCH_E_INVALID,
                     "pointer is %p, %zu bytes inside a block of %zu: expected its start", pointer,
                     (size_t)((uintptr_t)pointer - (uintptr_t)block->address), block->bytes);
}

/* The block in use that begins at `pointer`. */
static rebatch_status find_live(struct rbi_block **out, rebatch_pool *pool, const void *pointer)
{
    *out = pointer ? rbi_table_find(&pool->heap.table, pointer) : NULL;
    if (*out && (*out)->state == RBI_BLOCK_LIVE)
        return REBATCH_OK;
    *out = NULL;
    return refuse_pointer(pool, pointer);
}

static rebatch_status free_locked(rebatch_pool *pool, const void *pointer)
{
    rbi_assert(rbi_lock_is_held(&pool->lock));
    struct rbi_block *const block = rbi_table_find(&pool->heap.table, pointer);
    const bool is_live = block && block->state == RBI_BLOCK_LIVE;
    const bool is_not_of_scope = is_live && rbi_pool_has_younger_scope(pool, block);
    enum rbi_old_free old = RBI_OLD_FREE_NONE;
    if (RBI_UNLIKELY(pool->heap.late.owner != 0))
        old = rbi_old_buffers_free(pool, pointer, is_not_of_scope ? block : NULL);
    if (old == RBI_OLD_FREE_LATE)
        return REBATCH_OK;
    if (!is_live) {
        if (!is_late(pool, block, pointer))
            return refuse_pointer(pool, pointer);
        pool->stats.late_frees++;
    } else if (old == RBI_OLD_FREE_FINAL) {
        free_past(pool, block);
    } else if (is_not_of_scope && !rbi_pool_is_other_thread(pool, pool->owner_thread) &&
               !rbi_pool_is_pressing(pool)) {
        defer(pool, &pool->scopes[pool->depth - 1], block);
    } else {
        if (is_not_of_scope)
            rbi_scope_pass_over(pool, block, false);
        rbi_pool_drop_block(pool, block, false);
    }
    rbi_pool_tell(pool, RBI_POOL_FREE, pointer, 0, NULL);
    return REBATCH_OK;
}

rebatch_status rebatch_pool_free(rebatch_pool *pool, void *pointer)
{
    const rebatch_status status = rbi_pool_check(pool);
    if (RBI_UNLIKELY(status != REBATCH_OK || !pointer))
        return status;
    rbi_lock_take(&pool->lock);
    const rebatch_status freed = free_locked(pool, pointer);
    rbi_pool_end_free(pool);
    return freed;
}

/* ---- blocks in use ---- */

static rebatch_status use_on_locked(rebatch_pool *pool, const void *pointer, rebatch_stream stream)
{
    rbi_assert(rbi_lock_is_held(&pool->lock));
    struct rbi_block *block;
    const rebatch_status status = find_live(&block, pool, pointer);
    if (status != REBATCH_OK || block->used || rbi_stream_of(block)->stream == stream)
        return status;
    rbi_plan_note_use(pool, block);
    block->used = true;
    if (pool->progress.due == UINT64_MAX)
        rbi_pool_record_soon(pool);
    return REBATCH_OK;
}

rebatch_status rebatch_pool_use_on(rebatch_pool *pool, void *pointer, rebatch_stream stream)
{
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK || (status = rbi_pool_check_stream(pool, stream)) != REBATCH_OK)
        return status;
    rbi_lock_take(&pool->lock);
    status = use_on_locked(pool, pointer, stream);
    rbi_pool_give_lock(pool);
    return status;
}

rebatch_status rebatch_pool_block_bytes(size_t *bytes, rebatch_pool *pool, const void *pointer)
{
    if (!bytes)
        return rbi_error(REBATCH_E_INVALID, "bytes is NULL: expected where to put the size");
    *bytes = 0;
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    rbi_lock_take(&pool->lock);
    struct rbi_block *block;
    status = find_live(&block, pool, pointer);
    if (status == REBATCH_OK)
        *bytes = block->bytes;
    rbi_pool_give_lock(pool);
    return status;
}

rebatch_status rbi_pool_find_block(const void **out, rebatch_pool *pool, const void *address,
                                   size_t bytes, const char *what)
{
    rbi_lock_take(&pool->lock);
    const struct rbi_block *const block = rbi_block_around(&pool->heap, address);
    const bool is_in_use = block && block->state == RBI_BLOCK_LIVE;
    const size_t left =
        is_in_use ? block->bytes - ((uintptr_t)address - (uintptr_t)block->address) : 0;
    *out = is_in_use ? block->address : NULL;
    rbi_pool_give_lock(pool);
    if (block && !is_in_use)
        return rbi_error(REBATCH_E_INVALID,
                         "%s is %p, which has been freed already: expected memory in use", what,
                         address);
    if (block && bytes > left)
        return rbi_error(REBATCH_E_INVALID,
                         "%s is %p with %zu bytes: expected at most %zu, to the end of its block",
                         what, address, bytes, left);
    return REBATCH_OK;
}

bool rbi_pool_is_in_use(rebatch_pool *pool, const void *block)
{
    rbi_lock_take(&pool->lock);
    const struct rbi_block *const found = rbi_table_find(&pool->heap.table, block);
    const bool is_in_use = found && found->state == RBI_BLOCK_LIVE;
    rbi_pool_give_lock(pool);
    return is_in_use;
}
