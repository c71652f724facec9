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

static void allow_sleep(rebatch_pool *pool, uint64_t thread)
{
    rbi_lock_take(&pool->lock);
    pool->sleep.allowed_to = thread;
    rbi_pool_give_lock(pool);
}

rebatch_status rbi_pool_run_task(rebatch_pool *pool)
{
    if (RBI_LIKELY(atomic_load_explicit(&pool->task, memory_order_relaxed) == NULL))
        return REBATCH_OK;
    struct rbi_pool_task *const task = atomic_exchange(&pool->task, NULL);
    if (!task)
        return REBATCH_OK;
    allow_sleep(pool, rbi_thread_number());
    task->run(task->user);
    allow_sleep(pool, 0);
    return rbi_pool_wait_awake(pool);
}
