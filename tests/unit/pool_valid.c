/* Holds the walker: it accepts a pool in any state, and notices when an equation does not hold.
 * Seeds: none. */
#include "unit/pool_help.h"

/* With one word of a valid pool changed, the walker says no; changed back, yes. */
#define ASSERT_NOTICED(pool, word, wrong)                                                          \
    do {                                                                                           \
        const uint64_t right = (uint64_t)(word);                                                   \
        assert_valid(pool);                                                                        \
        (word) = (wrong);                                                                          \
        cr_assert_not(rbi_pool_is_valid(pool), #word);                                             \
        cr_assert(strstr(rebatch_last_error(), "does not hold"));                                  \
        (word) = right;                                                                            \
        assert_valid(pool);                                                                        \
    } while (0)

/* Every kind of mistake that the equations exclude is noticed. */
Test(pool_valid, a_broken_equation_is_noticed)
{
    struct rig rig = rig_open(64, NULL);
    rebatch_pool *pool = rig.pool;
    void *older = take(pool, KIB);
    void *a = take(pool, 4 * KIB);
    (void)take(pool, PAGE);
    (void)begin(pool);
    give(pool, older);
    (void)take(pool, 2 * KIB);
    struct rbi_block *block = rbi_block_around(&pool->heap, a);
    struct rbi_range *range = block->range;
    struct rbi_pool_stream *stream = pool->first_stream;
    ASSERT_NOTICED(pool, pool->stats.live_bytes, 0);
    ASSERT_NOTICED(pool, pool->vm.taken_bytes, 5 * PAGE + 1);
    ASSERT_NOTICED(pool, pool->stats.requested_bytes, 1);
    ASSERT_NOTICED(pool, pool->stats.deferred_bytes, 0);
    ASSERT_NOTICED(pool, pool->stats.blocks, 1);
    ASSERT_NOTICED(pool, pool->stats.blocks_peak, 1);
    ASSERT_NOTICED(pool, pool->stats.live_peak_bytes, 1);
    ASSERT_NOTICED(pool, pool->quiet_bytes, UINT64_MAX);
    ASSERT_NOTICED(pool, pool->tags[0].live_bytes, 0);
    ASSERT_NOTICED(pool, range->bytes, PAGE);
    ASSERT_NOTICED(pool, range->map->chunks[0], 0);
    ASSERT_NOTICED(pool, range->map->chunks[range->bytes / PAGE - 1], 1);
    ASSERT_NOTICED(pool, pool->vm.held_pages, 1);
    ASSERT_NOTICED(pool, pool->vm.quarantined_bytes, PAGE);
    ASSERT_NOTICED(pool, block->bytes, 4 * KIB + 512);
    ASSERT_NOTICED(pool, block->bytes, 4 * KIB + 1);
    ASSERT_NOTICED(pool, block->bytes, 0);
    ASSERT_NOTICED(pool, pool->plan.mode, RBI_PLAN_SERVES);
    ASSERT_NOTICED(pool, block->requested_bytes, 4 * KIB + 1);
    ASSERT_NOTICED(pool, block->state, RBI_BLOCK_PENDING);
    ASSERT_NOTICED(pool, block->sequence, 0);
    ASSERT_NOTICED(pool, block->tag, 3);
    ASSERT_NOTICED(pool, stream->lists.free_bytes, 1);
    ASSERT_NOTICED(pool, block->bins->filled, 0);
    ASSERT_NOTICED(pool, stream->lists.quick_filled[0], 2);
    ASSERT_NOTICED(pool, stream->lists.small_bytes, 512);
    ASSERT_NOTICED(pool, stream->pins, 1);
    ASSERT_NOTICED(pool, pool->progress.done, UINT64_MAX);
    ASSERT_NOTICED(pool, pool->progress.first, RBI_PROGRESS_EVENTS);
    ASSERT_NOTICED(pool, pool->progress.count, RBI_PROGRESS_EVENTS);
    ASSERT_NOTICED(pool, pool->heap.table.shift, 63);
    ASSERT_NOTICED(pool, pool->heap.late.used, 1);
    ASSERT_NOTICED(pool, pool->heap.late.count, 1);
    ASSERT_NOTICED(pool, pool->scopes[0].first_sequence, UINT64_MAX);
    ASSERT_NOTICED(pool, pool->scopes[0].handle, 0);
    ASSERT_NOTICED(pool, pool->sequence, 0);
    rig_close(&rig);
}

/* The same for a cache, which the walk empties once it is found to be valid. */
