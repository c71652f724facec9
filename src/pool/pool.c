/* Owns a pool's life, and that of its blocks between allocation and free.
 * Must not know how memory is found. */
#include "pool/pool.h"

rebatch_status rbi_pool_check(const rebatch_pool *pool)
{
    if (pool)
        return REBATCH_OK;
    return rbi_error(REBATCH_E_INVALID, "pool is NULL: expected one from rebatch_pool_create()");
}

static rebatch_status check_options(const rebatch_pool_options *options)
{
    if (options->limit_permille > 1000)
        return rbi_error(REBATCH_E_INVALID,
                         "rebatch_pool_options.limit_permille is %u: expected 0 to 1000",
                         (unsigned)options->limit_permille);
    return rbi_check_toggle(options->caching, "rebatch_pool_options.caching");
}

rebatch_status rebatch_pool_create(rebatch_pool **out, rebatch_device *device,
                                   const rebatch_pool_options *options)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL: expected where to put the pool");
    *out = NULL;
    if (!device)
        return rbi_error(REBATCH_E_INVALID, "device is NULL: expected an open device");
    rebatch_pool_options ours = REBATCH_POOL_OPTIONS_INIT;
    rebatch_status status = rbi_options_copy(&ours, sizeof ours, options, "rebatch_pool_options");
    if (status != REBATCH_OK || (status = check_options(&ours)) != REBATCH_OK)
        return status;
    rebatch_pool *pool = rbi_heap_calloc(1, sizeof *pool);
    if (!pool)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a pool");
    pool->device = device;
    pool->granule_bytes = rbi_device_granule_bytes(device);
    pool->limit_bytes = ours.limit_bytes ? ours.limit_bytes : SIZE_MAX;
    pool->limit_permille = ours.limit_permille;
    pool->headroom_bytes = ours.headroom_bytes;
    pool->caching = rbi_is_on(ours.caching);
    pool->block_nodes.node_bytes = sizeof(struct rbi_block);
    pool->segment_nodes.node_bytes = sizeof(struct rbi_segment);
    pool->use_nodes.node_bytes = sizeof(struct rbi_block_use);
    rbi_tags_init(pool);
    if (pthread_mutex_init(&pool->lock, NULL) != 0) {
        rbi_heap_free(pool);
        return rbi_error(REBATCH_E_HOST_OOM, "no mutex to be had for a pool");
    }
    *out = pool;
    return REBATCH_OK;
}

void rebatch_pool_destroy(rebatch_pool *pool)
{
    if (!pool)
        return;
    /* Also on streams of which nothing was freed: blocks in use go back as well. */
    for (struct rbi_pool_stream *s = pool->first_stream; s; s = s->next)
        (void)rbi_pool_await(pool, s, ++s->frees);
    rbi_pool_destroy_segments(pool);
    rbi_pool_destroy_streams(pool);
    rbi_nodes_destroy(&pool->block_nodes);
    rbi_nodes_destroy(&pool->segment_nodes);
    rbi_nodes_destroy(&pool->use_nodes);
    rbi_heap_free(pool->table.entries);
    pthread_mutex_destroy(&pool->lock);
    rbi_heap_free(pool);
}

rebatch_device *rebatch_pool_device(const rebatch_pool *pool)
{
    return pool ? pool->device : NULL;
}

/* ---- who listens ---- */

void rbi_pool_set_recorder(rebatch_pool *pool, const struct rbi_pool_recorder *recorder)
{
    pthread_mutex_lock(&pool->lock);
    pool->recorder = recorder ? *recorder : (struct rbi_pool_recorder){NULL, NULL};
    pthread_mutex_unlock(&pool->lock);
}

void rbi_pool_each_live(rebatch_pool *pool,
                        void (*show)(void *user, const void *address, size_t bytes), void *user)
{
    pthread_mutex_lock(&pool->lock);
    for (const struct rbi_block *block = pool->oldest; block; block = block->next)
        show(user, block->address, block->bytes);
    pthread_mutex_unlock(&pool->lock);
}

/* ---- allocate ---- */

static rebatch_status check_size(size_t *rounded, const rebatch_pool *pool, size_t bytes)
{
    size_t segment_bytes;
    if (rbi_round_up(bytes, REBATCH_POOL_UNIT_BYTES, rounded) &&
        rbi_round_up(*rounded, pool->granule_bytes, &segment_bytes))
        return REBATCH_OK;
    return rbi_error(REBATCH_E_INVALID,
                     "bytes is %zu: expected a size that can be rounded up to %zu bytes", bytes,
                     pool->granule_bytes);
}

static rebatch_status check_stream(const rebatch_pool *pool, rebatch_stream stream)
{
    if (!stream || rbi_device_stream_is_valid(pool->device, stream))
        return REBATCH_OK;
    return rbi_error(REBATCH_E_INVALID, "stream is %p: expected a stream of device \"%s\"",
                     (void *)stream, rebatch_device_name(pool->device));
}

static rebatch_status check_caller(const rebatch_pool *pool, const char *function)
{
    if (!rbi_pool_is_pressing(pool))
        return REBATCH_OK;
    return rbi_error(REBATCH_E_STATE,
                     "%s called from within a pressure callback: expected only frees there",
                     function);
}

/* Readies a search: what it needs of the heap, and its stream, which is kept from being recycled
 * by a reference until close_request(). */
static rebatch_status open_request(struct rbi_request *request, rebatch_pool *pool, size_t bytes,
                                   rebatch_stream stream)
{
    const rebatch_status status = rbi_pool_prepare(pool);
    if (status != REBATCH_OK)
        return status;
    *request = (struct rbi_request){bytes, rbi_pool_open_stream(pool, stream), REBATCH_RUNG_CACHE};
    if (!request->stream)
        return rbi_error(REBATCH_E_HOST_OOM, "the pool has no host memory for another stream");
    request->stream->references++;
    return REBATCH_OK;
}

static void close_request(struct rbi_request *request)
{
    request->stream->references--;
}

static void use_block(rebatch_pool *pool, struct rbi_block *block, size_t bytes, rebatch_tag tag)
{
    block->state = RBI_BLOCK_LIVE;
    block->requested_bytes = bytes;
    block->tag = tag;
    block->birth = pool->births++;
    block->next = NULL;
    block->previous = pool->newest;
    if (block->previous)
        block->previous->next = block;
    else
        pool->oldest = block;
    pool->newest = block;
    rbi_table_put(&pool->table, block);
    rbi_pool_count_alloc(pool, block);
}

static rebatch_status alloc_locked(void **out, rebatch_pool *pool, size_t bytes, size_t rounded,
                                   rebatch_stream stream, rebatch_tag tag)
{
    if (tag >= pool->tag_count)
        return rbi_error(REBATCH_E_INVALID,
                         "tag is %u: expected one from rebatch_pool_tag(), 0 to %zu", (unsigned)tag,
                         pool->tag_count - 1);
    struct rbi_request request;
    rebatch_status status = open_request(&request, pool, rounded, stream);
    if (status != REBATCH_OK)
        return status;
    struct rbi_block *block;
    status = rbi_pool_search(&block, pool, &request);
    if (status == REBATCH_OK) {
        use_block(pool, block, bytes, tag);
        *out = block->address;
    } else if (status == REBATCH_OOM) {
        status = rbi_pool_report_oom(pool, &request, bytes, pool->tags[tag].name);
    }
    close_request(&request);
    return status;
}

rebatch_status rebatch_pool_alloc(void **out, rebatch_pool *pool, size_t bytes,
                                  rebatch_stream stream, rebatch_tag tag)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL: expected where to put the pointer");
    *out = NULL;
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK || bytes == 0)
        return status;
    size_t rounded = 0;
    if ((status = check_size(&rounded, pool, bytes)) != REBATCH_OK ||
        (status = check_stream(pool, stream)) != REBATCH_OK ||
        (status = check_caller(pool, "rebatch_pool_alloc")) != REBATCH_OK)
        return status;
    pthread_mutex_lock(&pool->lock);
    status = alloc_locked(out, pool, bytes, rounded, stream, tag);
    if (status == REBATCH_OK)
        rbi_pool_tell(pool, RBI_POOL_ALLOC, *out, bytes, stream);
    pthread_mutex_unlock(&pool->lock);
    return status;
}

/* ---- free ---- */

static void leave_live_list(rebatch_pool *pool, struct rbi_block *block)
{
    if (block->previous)
        block->previous->next = block->next;
    else
        pool->oldest = block->next;
    if (block->next)
        block->next->previous = block->previous;
    else
        pool->newest = block->previous;
    block->previous = block->next = NULL;
}

/* With caching off a block is all that its segment holds. What the device does not take back now
 * stays cached, and every trim tries it again. */
static void pass_back(rebatch_pool *pool, struct rbi_segment *segment)
{
    for (struct rbi_block_use *use = segment->first->uses; use; use = use->next)
        (void)rbi_pool_await(pool, use->stream, use->until);
    if (pool->pending)
        (void)rbi_pool_poll_streams(pool);
    if (segment->used_bytes == 0)
        (void)rbi_pool_release_segment(pool, segment);
}

void rbi_pool_drop_block(rebatch_pool *pool, struct rbi_block *block, bool rolled_back)
{
    struct rbi_table_entry *entry = rbi_table_find(&pool->table, block->address);
    if (rolled_back)
        rbi_table_mark_late(&pool->table, entry);
    else
        rbi_table_remove(&pool->table, entry);
    rbi_pool_count_free(pool, block, rolled_back);
    leave_live_list(pool, block);
    struct rbi_segment *segment = block->segment;
    rbi_pool_retire_block(pool, block);
    if (!pool->caching)
        pass_back(pool, segment);
}

/* Says what is wrong with a pointer that is no block in use. */
static rebatch_status refuse_pointer(const rebatch_pool *pool, const void *pointer)
{
    const struct rbi_block *block = rbi_pool_block_around(pool, pointer);
    if (!block)
        return rbi_error(REBATCH_E_INVALID,
                         "pointer is %p: expected one from rebatch_pool_alloc() of this pool",
                         pointer);
    if (block->state != RBI_BLOCK_LIVE)
        return rbi_error(REBATCH_E_INVALID,
                         "pointer is %p, which has been freed already: "
                         "expected a block in use",
                         pointer);
    return rbi_error(REBATCH_E_INVALID,
                     "pointer is %p, %zu bytes inside a block of %zu: expected its start", pointer,
                     (size_t)((uintptr_t)pointer - (uintptr_t)block->address), block->bytes);
}

/* The block in use that begins at `pointer`. */
static rebatch_status find_live(struct rbi_block **out, const rebatch_pool *pool,
                                const void *pointer)
{
    const struct rbi_table_entry *entry = rbi_table_find(&pool->table, pointer);
    *out = entry ? entry->block : NULL;
    if (*out && (*out)->state == RBI_BLOCK_LIVE)
        return REBATCH_OK;
    *out = NULL;
    return refuse_pointer(pool, pointer);
}

static rebatch_status free_locked(rebatch_pool *pool, const void *pointer)
{
    const struct rbi_table_entry *entry = rbi_table_find(&pool->table, pointer);
    if (entry && !entry->block) {
        pool->stats.late_frees++;
        return REBATCH_OK;
    }
    struct rbi_block *block;
    const rebatch_status status = find_live(&block, pool, pointer);
    if (status != REBATCH_OK)
        return status;
    if (rbi_pool_has_younger_scope(pool, block))
        rbi_pool_defer_free(pool, block);
    else
        rbi_pool_drop_block(pool, block, false);
    return REBATCH_OK;
}

rebatch_status rebatch_pool_free(rebatch_pool *pool, void *pointer)
{
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK || !pointer)
        return status;
    pthread_mutex_lock(&pool->lock);
    status = free_locked(pool, pointer);
    if (status == REBATCH_OK)
        rbi_pool_tell(pool, RBI_POOL_FREE, pointer, 0, NULL);
    pthread_mutex_unlock(&pool->lock);
    return status;
}

/* ---- blocks in use ---- */

static rebatch_status use_on_locked(rebatch_pool *pool, const void *pointer, rebatch_stream stream)
{
    struct rbi_block *block;
    const rebatch_status status = find_live(&block, pool, pointer);
    if (status != REBATCH_OK || block->stream->stream == stream)
        return status;
    for (const struct rbi_block_use *use = block->uses; use; use = use->next)
        if (use->stream->stream == stream)
            return REBATCH_OK;
    struct rbi_pool_stream *other =
        rbi_nodes_prepare(&pool->use_nodes, 1) ? rbi_pool_open_stream(pool, stream) : NULL;
    if (!other)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory to note that a stream uses a block");
    struct rbi_block_use *use = rbi_nodes_take(&pool->use_nodes);
    use->stream = other;
    use->next = block->uses;
    block->uses = use;
    other->references++;
    return REBATCH_OK;
}

rebatch_status rebatch_pool_use_on(rebatch_pool *pool, void *pointer, rebatch_stream stream)
{
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK || (status = check_stream(pool, stream)) != REBATCH_OK)
        return status;
    pthread_mutex_lock(&pool->lock);
    status = use_on_locked(pool, pointer, stream);
    pthread_mutex_unlock(&pool->lock);
    return status;
}

rebatch_status rebatch_pool_block_bytes(size_t *bytes, rebatch_pool *pool, const void *pointer)
{
    if (!bytes)
        return rbi_error(REBATCH_E_INVALID, "bytes is NULL: expected where to put the size");
    *bytes = 0;
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    pthread_mutex_lock(&pool->lock);
    struct rbi_block *block;
    status = find_live(&block, pool, pointer);
    if (status == REBATCH_OK)
        *bytes = block->bytes;
    pthread_mutex_unlock(&pool->lock);
    return status;
}

/* ---- memory ahead of its use ---- */

/* With caching off nothing is held: REBATCH_OOM when the device has not the room now. */
static rebatch_status look_for_room(rebatch_pool *pool, size_t bytes)
{
    size_t room;
    const rebatch_status status = rbi_pool_room(&room, pool, NULL);
    return status == REBATCH_OK && bytes > room ? REBATCH_OOM : status;
}

/* Why the guarantee holds. Let `left` be `bytes` less the rounded sizes allocated since. Claim:
 * there is always a free block of at least `left` that the stream can have before fresh memory
 * is given up. At first it is the piece found here. An allocation of s <= left takes either
 * another block, and the piece stays, or that one, and as blocks are cut to exactly s in one
 * place, left - s remain in one piece. A free only adds free memory, and merging makes no piece
 * smaller. An allocation for another stream takes the piece, or a part of it, on the rungs
 * OTHER_STREAMS or WAIT, which come before TRIM; so none of these allocations gets as far as
 * giving segments back, and the piece stays in the pool. */
static rebatch_status reserve_locked(rebatch_pool *pool, size_t bytes, size_t rounded,
                                     rebatch_stream stream)
{
    struct rbi_request request;
    rebatch_status status = open_request(&request, pool, rounded, stream);
    if (status != REBATCH_OK)
        return status;
    if (!pool->caching) {
        request.rung = REBATCH_RUNG_DEVICE;
        status = look_for_room(pool, rounded);
    } else if (!rbi_pool_find_fit(request.stream, rounded, UINT64_MAX)) {
        struct rbi_block *block;
        status = rbi_pool_search(&block, pool, &request);
        if (status == REBATCH_OK)
            (void)rbi_pool_put_block(pool, block);
    }
    if (status == REBATCH_OOM)
        status = rbi_pool_report_oom(pool, &request, bytes, "reserve");
    close_request(&request);
    return status;
}

rebatch_status rebatch_pool_reserve(rebatch_pool *pool, size_t bytes, rebatch_stream stream)
{
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK || bytes == 0)
        return status;
    size_t rounded = 0;
    if ((status = check_size(&rounded, pool, bytes)) != REBATCH_OK ||
        (status = check_stream(pool, stream)) != REBATCH_OK ||
        (status = check_caller(pool, "rebatch_pool_reserve")) != REBATCH_OK)
        return status;
    pthread_mutex_lock(&pool->lock);
    status = reserve_locked(pool, bytes, rounded, stream);
    if (status == REBATCH_OK)
        rbi_pool_tell(pool, RBI_POOL_RESERVE, NULL, bytes, stream);
    pthread_mutex_unlock(&pool->lock);
    return status;
}

/* Takes what `stream` lacks of `bytes` from the device. */
static rebatch_status top_up(rebatch_pool *pool, size_t bytes, struct rbi_pool_stream *stream)
{
    if (stream->free_bytes >= bytes)
        return REBATCH_OK;
    size_t room, shortage;
    const rebatch_status status = rbi_pool_room(&room, pool, NULL);
    if (status != REBATCH_OK)
        return status;
    if (!rbi_round_up(bytes - stream->free_bytes, pool->granule_bytes, &shortage) ||
        shortage > room)
        return REBATCH_OOM;
    struct rbi_block *block;
    return rbi_pool_grow(&block, pool, shortage, stream);
}

static rebatch_status admit_locked(rebatch_pool *pool, size_t bytes, rebatch_stream stream)
{
    if (!pool->caching)
        return look_for_room(pool, bytes);
    const struct rbi_pool_stream *known = rbi_pool_find_stream(pool, stream);
    if (known && known->free_bytes >= bytes)
        return REBATCH_OK;
    struct rbi_request request;
    rebatch_status status = open_request(&request, pool, bytes, stream);
    if (status != REBATCH_OK)
        return status;
    status = top_up(pool, bytes, request.stream);
    if (status == REBATCH_OOM && (status = rbi_pool_await_streams(pool)) == REBATCH_OK) {
        size_t released;
        status = rbi_pool_trim_segments(pool, 0, request.stream, &released);
        if (status == REBATCH_OK)
            status = top_up(pool, bytes, request.stream);
    }
    close_request(&request);
    return status;
}

rebatch_status rbi_pool_admit(rebatch_pool *pool, size_t bytes, rebatch_stream stream)
{
    rebatch_status status = rbi_pool_check(pool);
    size_t rounded = 0;
    if (status != REBATCH_OK || (status = check_size(&rounded, pool, bytes)) != REBATCH_OK ||
        (status = check_stream(pool, stream)) != REBATCH_OK)
        return status;
    pthread_mutex_lock(&pool->lock);
    status = admit_locked(pool, rounded, stream);
    pthread_mutex_unlock(&pool->lock);
    return status;
}

bool rbi_pool_is_caching(const rebatch_pool *pool)
{
    return pool->caching;
}

/* ---- limits ---- */

rebatch_status rebatch_pool_trim(rebatch_pool *pool, size_t keep_bytes, size_t *released_bytes)
{
    if (released_bytes)
        *released_bytes = 0;
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    size_t released = 0;
    pthread_mutex_lock(&pool->lock);
    if (pool->pending)
        status = rbi_pool_await_streams(pool);
    if (status == REBATCH_OK)
        status = rbi_pool_trim_segments(pool, keep_bytes, NULL, &released);
    pthread_mutex_unlock(&pool->lock);
    if (released_bytes)
        *released_bytes = released;
    return status;
}

rebatch_status rebatch_pool_set_limit(rebatch_pool *pool, size_t limit_bytes)
{
    const rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    pthread_mutex_lock(&pool->lock);
    pool->limit_bytes = limit_bytes ? limit_bytes : SIZE_MAX;
    pool->limit_permille = 0;
    const uint64_t reserved = pool->stats.reserved_bytes;
    if (reserved > pool->limit_bytes) {
        const uint64_t cached = reserved - pool->stats.live_bytes;
        const uint64_t excess = reserved - pool->limit_bytes;
        size_t released;
        /* The limit holds whether or not the device takes memory back; its error comes again. */
        (void)rbi_pool_trim_segments(pool, cached > excess ? cached - excess : 0, NULL, &released);
    }
    pthread_mutex_unlock(&pool->lock);
    return REBATCH_OK;
}

rebatch_status rebatch_pool_available(size_t *bytes, rebatch_pool *pool)
{
    if (!bytes)
        return rbi_error(REBATCH_E_INVALID, "bytes is NULL: expected where to put the sum");
    *bytes = 0;
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    pthread_mutex_lock(&pool->lock);
    size_t room;
    status = rbi_pool_room(&room, pool, NULL);
    if (status == REBATCH_OK &&
        !rbi_add(pool->stats.reserved_bytes - pool->stats.live_bytes, room, bytes))
        *bytes = SIZE_MAX;
    pthread_mutex_unlock(&pool->lock);
    return status;
}

rebatch_status rebatch_pool_add_pressure(rebatch_pool *pool,
                                         size_t (*give_up)(size_t wanted_bytes, void *user),
                                         void *user)
{
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    if (!give_up)
        return rbi_error(REBATCH_E_INVALID, "give_up is NULL: expected a function");
    pthread_mutex_lock(&pool->lock);
    if (pool->pressure_count < RBI_POOL_PRESSURES)
        pool->pressures[pool->pressure_count++] = (struct rbi_pressure){give_up, user};
    else
        status =
            rbi_error(REBATCH_E_UNSUPPORTED,
                      "%d pressure callbacks are registered: expected no more", RBI_POOL_PRESSURES);
    pthread_mutex_unlock(&pool->lock);
    return status;
}
