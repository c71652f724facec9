/** @file sharing.h
 *  Memory of a pool that is given to others for a while.
 *
 *  A pool that gives lowers what it may hold, for the device's other users, until
 *  rebatch_pool_wake(). A training goes on meanwhile in smaller micro-batches. */
#ifndef REBATCH_SHARING_H
#define REBATCH_SHARING_H

#include "rebatch/pool.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Lower what the pool may hold, until rebatch_pool_wake(): a bound beside the limit, of which the
 *  smaller one holds. The pool gives cached memory back at once, and the rest when it is freed, as
 *  after rebatch_pool_set_limit(). Thread-safe.
 *  @param pool                 the pool
 *  @param most_bytes           the most memory that the pool may hold, at least one page. A second
 *                              call replaces the bound of the first
 *  @param[out] released_bytes  given back to the device by this call; may be NULL
 *  @return REBATCH_OK, REBATCH_E_INVALID */
REBATCH_API rebatch_status rebatch_pool_give(rebatch_pool *pool, size_t most_bytes,
                                             size_t *released_bytes);

/** End the bound of rebatch_pool_give(). Nothing happens where there is none. Thread-safe.
 *  @param pool  the pool
 *  @return REBATCH_OK, REBATCH_E_INVALID */
REBATCH_API rebatch_status rebatch_pool_wake(rebatch_pool *pool);

#ifdef __cplusplus
}
#endif
#endif
