/* Owns the search for memory: the rungs, their order, limit and headroom.
 * Must not know what the memory is for. */
#include "pool/pool.h"

/* Requests of less than a granule share a segment of this many. */
#define SHARED_GRANULES 4

static _Thread_local const rebatch_pool *pressing;

bool rbi_pool_is_pressing(const rebatch_pool *pool)
{
    return pressing == pool;
}

rebatch_status rbi_pool_prepare(rebatch_pool *pool)
{
    /* One search makes at most one segment, of one block, and splits one block. Searches that are
     * within a pressure callback keep what they were promised. */
    const size_t searches = pool->pressing + 1;
    if (rbi_nodes_prepare(&pool->block_nodes, 2 * searches) &&
        rbi_nodes_prepare(&pool->segment_nodes, searches) &&
        rbi_table_prepare(&pool->table, searches))
        return REBATCH_OK;
    return rbi_error(REBATCH_E_HOST_OOM, "the pool has no host memory for another block");
}

size_t rbi_pool_limit(const rebatch_pool *pool, size_t device_total_bytes)
{
    if (pool->limit_permille == 0)
        return pool->limit_bytes;
    const size_t permille = pool->limit_permille;
    const size_t share =
        device_total_bytes / 1000 * permille + device_total_bytes % 1000 * permille / 1000;
    return rbi_min(pool->limit_bytes, share);
}

rebatch_status rbi_pool_room(size_t *room, rebatch_pool *pool, rebatch_memory_info *info)
{
    *room = 0;
    rebatch_memory_info own = {0, 0, 0};
    const rebatch_status status = rebatch_device_memory(pool->device, &own);
    if (info)
        *info = own;
    if (status != REBATCH_OK)
        return status;
    const size_t limit = rbi_pool_limit(pool, own.total_bytes);
    const size_t reserved = pool->stats.reserved_bytes;
    const size_t allowed = limit > reserved ? limit - reserved : 0;
    const size_t free_bytes =
        own.free_bytes > pool->headroom_bytes ? own.free_bytes - pool->headroom_bytes : 0;
    *room = rbi_min(allowed, free_bytes) & ~(pool->granule_bytes - 1);
    return REBATCH_OK;
}

static void reach(rebatch_pool *pool, struct rbi_request *request, rebatch_pool_rung rung)
{
    request->rung = rung;
    pool->rungs[rung]++;
}

static struct rbi_block *take(rebatch_pool *pool, const struct rbi_request *request,
                              struct rbi_block *block)
{
    if (block)
        rbi_pool_take_block(pool, block, request->bytes, request->stream);
    return block;
}

static struct rbi_block *take_own(rebatch_pool *pool, const struct rbi_request *request)
{
    return take(pool, request, rbi_pool_find_fit(request->stream, request->bytes, UINT64_MAX));
}

static struct rbi_block *take_other(rebatch_pool *pool, const struct rbi_request *request)
{
    struct rbi_block *best = NULL;
    for (struct rbi_pool_stream *s = pool->first_stream; s; s = s->next) {
        if (s == request->stream)
            continue;
        struct rbi_block *block = rbi_pool_find_fit(s, request->bytes, s->done);
        if (block && (!best || block->bytes < best->bytes))
            best = block;
    }
    return take(pool, request, best);
}

/* After streams have come further: blocks may have become free on any of them. */
static struct rbi_block *take_any(rebatch_pool *pool, const struct rbi_request *request)
{
    struct rbi_block *block = take_own(pool, request);
    return block ? block : take_other(pool, request);
}

/* Fresh memory. What does not fit limit and headroom is not asked for. */
static rebatch_status take_fresh(struct rbi_block **out, rebatch_pool *pool,
                                 struct rbi_request *request)
{
    reach(pool, request, REBATCH_RUNG_DEVICE);
    size_t room;
    rebatch_status status = rbi_pool_room(&room, pool, NULL);
    if (status != REBATCH_OK)
        return status;
    size_t bytes;
    if (!rbi_round_up(request->bytes, pool->granule_bytes, &bytes) || bytes > room)
        return REBATCH_OOM;
    const size_t shared = SHARED_GRANULES * pool->granule_bytes;
    if (pool->caching && request->bytes < pool->granule_bytes && shared <= room)
        bytes = shared;
    struct rbi_block *block;
    status = rbi_pool_grow(&block, pool, bytes, request->stream);
    *out = take(pool, request, block);
    return status;
}

static rebatch_status take_after_trim(struct rbi_block **out, rebatch_pool *pool,
                                      struct rbi_request *request)
{
    size_t released;
    rebatch_status status = rbi_pool_trim_segments(pool, 0, NULL, &released);
    if (status != REBATCH_OK || released == 0)
        return status == REBATCH_OK ? REBATCH_OOM : status;
    status = take_fresh(out, pool, request);
    reach(pool, request, REBATCH_RUNG_TRIM);
    return status;
}

/* Every rung below the pressure callbacks. REBATCH_OOM when none had memory. */
static rebatch_status climb(struct rbi_block **out, rebatch_pool *pool, struct rbi_request *request)
{
    rebatch_status status;
    if (pool->caching) {
        reach(pool, request, REBATCH_RUNG_CACHE);
        if ((*out = take_own(pool, request)))
            return REBATCH_OK;
        if (pool->pending || pool->first_stream->next) {
            reach(pool, request, REBATCH_RUNG_OTHER_STREAMS);
            if ((status = rbi_pool_poll_streams(pool)) != REBATCH_OK)
                return status;
            if ((*out = take_any(pool, request)))
                return REBATCH_OK;
        }
    }
    if ((status = take_fresh(out, pool, request)) != REBATCH_OOM)
        return status;
    if (rbi_pool_has_waiting(pool, request->stream)) {
        reach(pool, request, REBATCH_RUNG_WAIT);
        if ((status = rbi_pool_await_streams(pool)) != REBATCH_OK)
            return status;
        if (pool->caching && (*out = take_any(pool, request)))
            return REBATCH_OK;
    }
    return take_after_trim(out, pool, request);
}

/* Has one callback give up memory; true when it did. It runs without the lock, so that it can
 * free. */
static bool press(rebatch_pool *pool, const struct rbi_pressure *pressure, size_t wanted_bytes)
{
    const uint64_t frees = pool->stats.frees;
    pool->stats.pressure_calls++;
    pool->pressing++;
    pthread_mutex_unlock(&pool->lock);
    const rebatch_pool *outer = pressing;
    pressing = pool;
    const size_t given = pressure->give_up(wanted_bytes, pressure->user);
    pressing = outer;
    pthread_mutex_lock(&pool->lock);
    pool->pressing--;
    return given > 0 || pool->stats.frees != frees;
}

rebatch_status rbi_pool_search(struct rbi_block **out, rebatch_pool *pool,
                               struct rbi_request *request)
{
    *out = NULL;
    rebatch_status status = climb(out, pool, request);
    for (size_t i = 0; status == REBATCH_OOM && i < pool->pressure_count; i++) {
        const struct rbi_pressure pressure = pool->pressures[i];
        reach(pool, request, REBATCH_RUNG_PRESSURE);
        if (!press(pool, &pressure, request->bytes))
            continue;
        status = climb(out, pool, request);
        request->rung = REBATCH_RUNG_PRESSURE;
    }
    return status;
}
