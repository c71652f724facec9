/* Owns a limit that is lowered while the pool is in use: what is cached goes back at once, and what
 * is in use as it is freed. Must not know what a limit is for. */
#include "pool/pool.h"

/* What is reserved of the device beyond the limit. A share of the device, and what others allow,
 * count where memory is taken (rbi_pool_limit()): neither falls later, so nothing is beyond. */
static size_t excess_of(const rebatch_pool *pool)
{
    const uint64_t reserved = rbi_vm_device_bytes(&pool->vm);
    const size_t limit = rbi_min(pool->limit_bytes, pool->given_bytes);
    return reserved > limit ? (size_t)reserved - limit : 0;
}

void rbi_pool_keep_limit(rebatch_pool *pool)
{
    rbi_assert(rbi_lock_is_held(&pool->lock));
    const size_t cached = (size_t)rbi_pool_cached(pool);
    const size_t excess = excess_of(pool);
    const size_t keep = rbi_max(cached - rbi_min(cached, excess), pool->promised_bytes);
    size_t released = 0;
    /* The limit holds whether or not the device takes memory back; its error comes again. */
    if (excess)
        (void)rbi_pool_trim_cache(pool, keep, NULL, &released);
    pool->is_over_limit = excess_of(pool) > 0;
}

uint64_t rbi_pool_over_limit(rebatch_pool *pool)
{
    rbi_lock_take(&pool->lock);
    const size_t excess = excess_of(pool);
    rbi_pool_give_lock(pool);
    return excess;
}

rebatch_status rebatch_pool_set_limit(rebatch_pool *pool, size_t limit_bytes)
{
    const rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    rbi_pool_take_lock(pool);
    pool->limit_bytes = limit_bytes ? limit_bytes : SIZE_MAX;
    pool->limit_permille = 0;
    rbi_pool_set_floor(pool);
    rbi_pool_keep_limit(pool);
    rbi_pool_give_lock(pool);
    return REBATCH_OK;
}

rebatch_status rebatch_pool_give(rebatch_pool *pool, size_t most_bytes, size_t *released_bytes)
{
    if (released_bytes)
        *released_bytes = 0;
    const rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    if (most_bytes < pool->page_bytes)
        return rbi_error(REBATCH_E_INVALID,
                         "most_bytes is %zu: expected at least one page of %zu bytes", most_bytes,
                         pool->page_bytes);
    rbi_pool_take_lock(pool);
    const uint64_t before = rbi_vm_device_bytes(&pool->vm);
    pool->given_bytes = most_bytes;
    rbi_pool_set_floor(pool);
    rbi_pool_keep_limit(pool);
    if (released_bytes)
        *released_bytes = (size_t)(before - rbi_vm_device_bytes(&pool->vm));
    rbi_pool_give_lock(pool);
    return REBATCH_OK;
}

static rebatch_status set_floor_locked(rebatch_pool *pool, size_t floor_bytes)
{
    const size_t before = pool->floor_bytes;
    size_t missing;
    pool->floor_bytes = floor_bytes;
    rebatch_status status = rbi_pool_take_floor(&missing, pool);
    if (status == REBATCH_OK && missing)
        status = rbi_error(REBATCH_OOM,
                           "floor_bytes is %zu: expected at most what is free within limit and "
                           "headroom, which is %zu bytes less",
                           floor_bytes, missing);
    if (status != REBATCH_OK)
        pool->floor_bytes = before;
    rbi_pool_set_floor(pool);
    return status;
}

rebatch_status rebatch_pool_set_floor(rebatch_pool *pool, size_t floor_bytes)
{
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    if (floor_bytes && !pool->has_space)
        return rbi_error(REBATCH_E_UNSUPPORTED,
                         "floor_bytes is %zu: expected 0 for a pool that has no virtual memory, or "
                         "does not cache",
                         floor_bytes);
    rbi_lock_take(&pool->lock);
    if (floor_bytes > pool->limit_bytes)
        status =
            rbi_error(REBATCH_E_INVALID, "floor_bytes is %zu: expected at most the limit of %zu",
                      floor_bytes, pool->limit_bytes);
    else
        status = set_floor_locked(pool, floor_bytes);
    rbi_pool_give_lock(pool);
    return status;
}

void rbi_pool_lower_limit(rebatch_pool *pool, size_t limit_bytes, uint32_t limit_permille)
{
    const size_t others = pool->device->others.bytes;
    rebatch_memory_info info = {SIZE_MAX, 0, 0};
    (void)rebatch_device_memory(pool->device, &info);
    size_t limit = limit_bytes ? limit_bytes : SIZE_MAX;
    if (limit_permille)
        limit = rbi_min(limit, rbi_min(info.total_bytes, others) / 1000 * limit_permille);
    if (limit < rbi_pool_limit(pool, info.total_bytes))
        (void)rebatch_pool_set_limit(pool, limit);
}
