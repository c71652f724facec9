/* Owns the access of other GPUs to the pool's memory.
 * Must not know what lies where. */
#include "pool/pool.h"

rebatch_status rebatch_pool_allow_peer(rebatch_pool *pool, int ordinal)
{
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    rbi_pool_take_lock(pool);
    status = rbi_device_allow_peer(pool->device, ordinal);
    for (struct rbi_range *r = pool->heap.first_range; r && !status; r = r->next)
        if (r->map)
            status = rbi_map_set_access(&pool->vm, r->map);
    rbi_pool_give_lock(pool);
    return status;
}
