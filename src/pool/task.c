/* Owns what other threads ask of the one that trains, until that is between two micro-batches.
 * Must not know what is asked. */
#include "pool/pool.h"

bool rbi_pool_post_task(rebatch_pool *pool, struct rbi_pool_task *task)
{
    struct rbi_pool_task *none = NULL;
    return atomic_compare_exchange_strong(&pool->task, &none, task);
}

bool rbi_pool_withdraw_task(rebatch_pool *pool, struct rbi_pool_task *task)
{
    return atomic_compare_exchange_strong(&pool->task, &task, NULL);
}

void rbi_pool_run_task(rebatch_pool *pool)
{
    if (RBI_LIKELY(atomic_load_explicit(&pool->task, memory_order_relaxed) == NULL))
        return;
    struct rbi_pool_task *const task = atomic_exchange(&pool->task, NULL);
    if (task)
        task->run(task->user);
}
