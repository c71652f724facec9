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
    if (!task)
        return;
    rbi_lock_take(&pool->lock);
    pool->sleep.allowed_to = rbi_thread_number();
    rbi_pool_give_lock(pool);
    task->run(task->user);
    rbi_pool_take_lock_awake(pool);
    pool->sleep.allowed_to = 0;
    rbi_pool_give_lock(pool);
}
