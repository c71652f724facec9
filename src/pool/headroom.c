/* Owns the promise to others: what should be free on the device is free, whoever took it.
 * Must not know why memory was cached. */
#include "pool/pool.h"

/* What others are short of. A device can hold more than it has only when its cap was lowered. */
static size_t shortage(const rebatch_memory_info *memory, size_t headroom_bytes)
{
    const size_t over =
        memory->used_bytes > memory->total_bytes ? memory->used_bytes - memory->total_bytes : 0;
    const size_t missing =
        memory->free_bytes < headroom_bytes ? headroom_bytes - memory->free_bytes : 0;
    return over + missing;
}

rebatch_status rbi_pool_keep_headroom(rebatch_pool *pool)
{
    rebatch_memory_info memory;
    rebatch_status status = rebatch_device_memory(pool->device, &memory);
    if (status)
        return status;
    const size_t wanted = shortage(&memory, pool->headroom_bytes);
    if (wanted == 0)
        return REBATCH_OK;
    rbi_lock_take(&pool->lock);
    const uint64_t cached = rbi_pool_cached(pool);
    rbi_pool_give_lock(pool);
    return rebatch_pool_trim(pool, cached > wanted ? (size_t)(cached - wanted) : 0, NULL);
}
