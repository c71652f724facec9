/* Owns what others look at from outside: the last events, and the walk over ranges and blocks.
 * Must not know what they make of it. */
#include "pool/pool.h"

void rbi_ring_add(struct rbi_ring *ring, enum rbi_pool_event_kind kind, const char *address,
                  size_t bytes, rebatch_stream stream, rebatch_tag tag)
{
    const uint64_t number = ring->count++;
    ring->events[number % ring->capacity] = (struct rbi_pool_event){
        number, address, bytes, stream, tag, (uint8_t)kind, rbi_now_ns(), 0};
}

void rbi_ring_add_oom(struct rbi_ring *ring, size_t asked_bytes, uint64_t free_bytes,
                      rebatch_stream stream, rebatch_tag tag)
{
    if (!ring->events)
        return;
    rbi_ring_add(ring, RBI_POOL_EVENT_OOM, NULL, asked_bytes, stream, tag);
    ring->events[(ring->count - 1) % ring->capacity].free_bytes = free_bytes;
}

size_t rbi_pool_get_events(struct rbi_pool_event *out, size_t most, rebatch_pool *pool)
{
    rbi_lock_take(&pool->lock);
    const struct rbi_ring *ring = &pool->ring;
    const size_t count = rbi_min((size_t)(ring->count - rbi_ring_first(ring)), most);
    for (size_t i = 0; i < count; i++)
        out[i] = ring->events[(ring->count - count + i) % ring->capacity];
    rbi_lock_give(&pool->lock);
    return count;
}

static bool visit_range(const struct rbi_range *range, const struct rbi_pool_visitor *visitor)
{
    if (visitor->range && !visitor->range(range, visitor->user))
        return false;
    for (const struct rbi_block *b = range->first; b && visitor->block; b = b->after)
        if (!visitor->block(range, b, visitor->user))
            return false;
    return true;
}

void rbi_pool_walk(rebatch_pool *pool, const struct rbi_pool_visitor *visitor)
{
    rbi_pool_take_lock(pool);
    rbi_quick_flush_all(pool);
    for (const struct rbi_range *r = pool->first_range; r; r = r->next)
        if (!visit_range(r, visitor))
            break;
    rbi_lock_give(&pool->lock);
}
