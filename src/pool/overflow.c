/* Owns when host memory may be taken, and its way back: what lies there moves to the device, at the
 * same addresses, when there is room. Must not know chunks or driver calls. */
#include "pool/pool.h"

/* ---- the phase ---- */

bool rbi_overflow_is_open(const rebatch_pool *pool)
{
    return RBI_UNLIKELY(pool->overflow.is_open) && pool->overflow.is_on &&
           !rbi_pool_is_other_thread(pool, pool->owner_thread);
}

bool rbi_pool_open_overflow(rebatch_pool *pool)
{
    rbi_lock_take(&pool->lock);
    const bool was_open = pool->overflow.is_open;
    pool->overflow.is_open = true;
    rbi_pool_give_lock(pool);
    return was_open;
}

bool rbi_pool_close_overflow(rebatch_pool *pool)
{
    rbi_lock_take(&pool->lock);
    const bool was_open = pool->overflow.is_open;
    pool->overflow.is_open = pool->overflow.is_struck = false;
    rbi_pool_give_lock(pool);
    return was_open;
}

size_t rebatch_pool_overflow_room(rebatch_pool *pool)
{
    if (rbi_pool_check(pool) != REBATCH_OK)
        return 0;
    rbi_lock_take(&pool->lock);
    const size_t bytes = pool->overflow.is_on ? rbi_pool_overflow_room(pool) : 0;
    rbi_pool_give_lock(pool);
    return bytes;
}

void rbi_pool_overflow_use(struct rbi_overflow_use *out, rebatch_pool *pool)
{
    rbi_lock_take(&pool->lock);
    *out = (struct rbi_overflow_use){pool->vm.overflow.bytes, pool->vm.overflow.total_bytes};
    rbi_pool_give_lock(pool);
}

rebatch_status rebatch_pool_allow_overflow(rebatch_pool *pool, bool may)
{
    const rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    if (may) {
        (void)rbi_pool_open_overflow(pool);
        return REBATCH_OK;
    }
    (void)rbi_pool_close_overflow(pool);
    return rbi_pool_settle_overflow(pool, 0);
}

/* ---- the way back ---- */

static struct rbi_range *range_of(const rebatch_pool *pool, const char *at)
{
    struct rbi_range *range = pool->heap.first_range;
    while (range && (at < range->address || at >= range->address + range->bytes))
        range = range->next;
    return range;
}

/* Makes the device have room for one more chunk, while `keep_bytes` stay available besides. */
static rebatch_status make_room(rebatch_pool *pool, size_t bytes, size_t keep_bytes)
{
    rbi_assert(rbi_lock_is_held(&pool->lock));
    size_t room;
    const rebatch_status status = rbi_pool_room(&room, pool, NULL);
    if (status != REBATCH_OK)
        return status;
    const uint64_t cached = rbi_pool_cached(pool);
    if (cached + room < bytes || cached + room - bytes < keep_bytes)
        return REBATCH_OOM;
    if (room >= bytes)
        return REBATCH_OK;
    const size_t lacking = (bytes - room) / pool->page_bytes;
    rbi_pool_harvest_all(pool, lacking, NULL);
    const size_t spare = pool->vm.spare_pages;
    if (spare < lacking)
        return REBATCH_OOM;
    pool->vm.floor_pages = 0; /* what is given back is taken again at once */
    const size_t released = rbi_vm_release(&pool->vm, spare - lacking);
    rbi_pool_set_floor(pool);
    return released >= lacking ? REBATCH_OK : REBATCH_OOM;
}

/* Chunks that are free as a whole go back to the host. */
static void give_free_back(rebatch_pool *pool)
{
    for (size_t i = pool->vm.overflow.count; i-- > 0;) {
        const struct rbi_host_chunk *const chunk = &pool->vm.overflow.chunks[i];
        struct rbi_range *const range = chunk->at ? range_of(pool, chunk->at) : NULL;
        if (range)
            rbi_pool_unmap_free(pool, range, chunk->at, (size_t)1 << chunk->size);
    }
}

static rebatch_status move_all(rebatch_pool *pool, size_t keep_bytes, void *beside)
{
    rebatch_status status = REBATCH_OK;
    for (size_t i = pool->vm.overflow.count; i-- > 0 && status == REBATCH_OK;) {
        const struct rbi_host_chunk *const chunk = &pool->vm.overflow.chunks[i];
        struct rbi_range *const range = chunk->at ? range_of(pool, chunk->at) : NULL;
        if (!range)
            continue;
        status = make_room(pool, pool->page_bytes << chunk->size, keep_bytes);
        if (status == REBATCH_OK)
            status = rbi_overflow_move(&pool->vm, range->map, i, beside);
    }
    return status;
}

static size_t largest_bytes(const rebatch_pool *pool)
{
    unsigned size = 0;
    for (size_t i = 0; i < pool->vm.overflow.count; i++)
        if (size < pool->vm.overflow.chunks[i].size)
            size = pool->vm.overflow.chunks[i].size;
    return pool->page_bytes << size;
}

static rebatch_status await_all(rebatch_pool *pool, size_t keep_bytes)
{
    rebatch_status status = rbi_device_synchronize(pool->device);
    if (status == REBATCH_OK && rbi_pool_has_waiting(pool, NULL))
        status = rbi_pool_await_all(pool);
    if (status != REBATCH_OK)
        return status;
    rbi_pool_flush_lists(pool);
    give_free_back(pool);
    rbi_overflow_drop(&pool->vm);
    if (pool->vm.overflow.count == 0)
        return REBATCH_OK;
    void *beside;
    const size_t bytes = largest_bytes(pool);
    status = rbi_device_reserve(pool->device, &beside, bytes);
    if (status == REBATCH_OK) {
        status = move_all(pool, keep_bytes, beside);
        (void)rbi_device_unreserve(pool->device, beside, bytes);
    }
    return status == REBATCH_OOM ? REBATCH_OK : status;
}

rebatch_status rbi_pool_settle_overflow(rebatch_pool *pool, size_t keep_bytes)
{
    rebatch_status status = REBATCH_OK;
    rbi_lock_take(&pool->lock);
    if (pool->vm.overflow.count && !rbi_pool_is_asleep(pool)) {
        rbi_plan_leave(pool); /* or the phase's plan goes on */
        status = await_all(pool, keep_bytes);
    }
    rbi_pool_give_lock(pool);
    return status;
}
