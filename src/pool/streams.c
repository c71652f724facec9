/* Owns how far the device's work has come, the blocks that wait for it, and the pool's streams.
 * Must not know how memory is found. */
#include "pool/pool.h"

struct rbi_pool_stream *rbi_pool_find_stream(const rebatch_pool *pool, rebatch_stream stream)
{
    struct rbi_pool_stream *s = pool->first_stream;
    while (s && s->stream != stream)
        s = s->next;
    return s;
}

static bool is_referred_to(const rebatch_pool *pool, const struct rbi_pool_stream *stream)
{
    if (stream->pins != 0)
        return true;
    for (const struct rbi_range *r = pool->heap.first_range; r; r = r->next)
        for (const struct rbi_block *b = r->first; b; b = b->after)
            if (b->lists == &stream->lists)
                return true;
    return false;
}

/* A stream that no block refers to any more can become another one, so that a program which makes
 * streams without end does not make the list grow without end. */
static struct rbi_pool_stream *reuse_stream(rebatch_pool *pool, rebatch_stream stream)
{
    for (struct rbi_pool_stream *s = pool->first_stream; s; s = s->next) {
        if (is_referred_to(pool, s))
            continue;
        if (pool->last_stream == s)
            pool->last_stream = pool->space;
        s->stream = stream;
        return s;
    }
    return NULL;
}

struct rbi_pool_stream *rbi_pool_open_stream(rebatch_pool *pool, rebatch_stream stream)
{
    struct rbi_pool_stream *s = rbi_pool_find_stream(pool, stream);
    if (s || (s = reuse_stream(pool, stream)))
        return s;
    s = rbi_heap_calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->stream = stream;
    s->lists.has_zones = pool->has_space;
    struct rbi_pool_stream **end = &pool->first_stream;
    while (*end)
        end = &(*end)->next;
    *end = s;
    if (pool->first_stream != s && pool->progress.due == UINT64_MAX)
        rbi_pool_record_soon(pool);
    pool->last_stream = s;
    return s;
}

/* ---- events ---- */

/* False while a graph is captured: a wait, an event and a query would end that. */
bool rbi_pool_may_wait(const rebatch_pool *pool)
{
    return !pool->may_wait || pool->may_wait(pool->may_wait_user);
}

static uint32_t place(const struct rbi_pool_progress *progress, uint32_t number)
{
    rbi_assert(number < RBI_PROGRESS_EVENTS);
    return (progress->first + number) % RBI_PROGRESS_EVENTS;
}

static void note_done(struct rbi_pool_progress *progress, uint64_t point)
{
    rbi_assert(point <= progress->frees);
    progress->done = point;
    while (progress->count != 0 && progress->events[progress->first].point <= point) {
        progress->first = place(progress, 1);
        progress->count--;
    }
}

/* Asks whether the oldest events have been reached. */
static rebatch_status ask(rebatch_pool *pool)
{
    struct rbi_pool_progress *const progress = &pool->progress;
    rebatch_status status = REBATCH_OK;
    bool reached = true;
    while (progress->count != 0 && reached) {
        status = rbi_event_query(pool->device, progress->events[progress->first].handle, &reached);
        reached = reached && status == REBATCH_OK;
        if (reached)
            note_done(progress, progress->events[progress->first].point);
    }
    return status == REBATCH_OOM ? REBATCH_OK : status;
}

/* All at once, so that later calls take nothing of the heap. */
static void make_events(rebatch_pool *pool)
{
    for (size_t i = 0; i < RBI_PROGRESS_EVENTS; i++)
        if (!pool->progress.events[i].handle)
            (void)rbi_event_create(pool->device, &pool->progress.events[i].handle);
}

/* Records an event behind the frees so far. Where that fails, or the device has no events of all
 * its work, they are left to rbi_pool_await(). */
static void record(rebatch_pool *pool)
{
    struct rbi_pool_progress *const progress = &pool->progress;
    if (progress->count == RBI_PROGRESS_EVENTS)
        return;
    const uint32_t at = place(progress, progress->count);
    if (!progress->events[at].handle)
        make_events(pool);
    if (!progress->events[at].handle ||
        rbi_event_record(pool->device, progress->events[at].handle) != REBATCH_OK)
        return;
    progress->events[at].point = progress->frees;
    progress->count++;
}

/* Calls of the driver are dear beside what else a free costs. As long as no search misses anything,
 * events become rare, and whether they have been reached is asked only when there is place for no
 * other. */
static void record_when_due(rebatch_pool *pool)
{
    struct rbi_pool_progress *const progress = &pool->progress;
    progress->due = progress->frees + progress->gap;
    progress->gap = rbi_min(2 * progress->gap, RBI_EVENT_MOST_GAP);
    if (!rbi_pool_may_wait(pool))
        return;
    if (progress->count == RBI_PROGRESS_EVENTS)
        (void)ask(pool); /* an error comes again where memory is searched */
    record(pool);
}

void rbi_pool_record_soon(rebatch_pool *pool)
{
    pool->progress.due = pool->progress.frees + 1;
    pool->progress.gap = RBI_EVENT_LEAST_GAP;
}

/* ---- pending blocks ---- */

void rbi_pool_retire_slowly(rebatch_pool *pool, struct rbi_block *block)
{
    rbi_assert(block->state == RBI_BLOCK_LIVE || block->state == RBI_BLOCK_DEFERRED);
    pool->progress.frees += block->used ? RBI_EVENT_FREES_A_USE : 1;
    block->freed_at = pool->progress.frees;
    block->sequence = pool->sequence;
    if (pool->progress.frees >= pool->progress.due)
        record_when_due(pool);
    if (!block->used) {
        rbi_block_cache(&pool->heap, block);
        return;
    }
    block->state = RBI_BLOCK_PENDING;
    block->next = pool->pending;
    pool->pending = block;
}

/* Frees the pending blocks that are ready. */
static void finish_pending(rebatch_pool *pool)
{
    for (struct rbi_block **at = &pool->pending; *at;) {
        struct rbi_block *block = *at;
        rbi_assert(block->state == RBI_BLOCK_PENDING && block->used);
        if (block->freed_at > pool->progress.done) {
            at = &block->next;
            continue;
        }
        *at = block->next;
        RBI_RECORD(pool, FREE_COMPLETED, block->address, block->bytes, rbi_stream_of(block)->stream,
                   block->tag);
        block->used = false;
        rbi_block_merge(&pool->heap, block);
    }
}

/* ---- how far the device has come ---- */

rebatch_status rbi_pool_poll(rebatch_pool *pool)
{
    const rebatch_status status =
        pool->progress.count != 0 && rbi_pool_may_wait(pool) ? ask(pool) : REBATCH_OK;
    finish_pending(pool);
    return status;
}

rebatch_status rbi_pool_poll_beyond(rebatch_pool *pool, bool asks)
{
    struct rbi_pool_progress *const progress = &pool->progress;
    if (progress->count != 0 || progress->done == progress->frees || !rbi_pool_may_wait(pool))
        return REBATCH_OK;
    record(pool);
    return asks ? rbi_pool_poll(pool) : REBATCH_OK;
}

rebatch_status rbi_pool_await(rebatch_pool *pool, uint64_t until)
{
    struct rbi_pool_progress *const progress = &pool->progress;
    if (progress->done >= until)
        return REBATCH_OK;
    if (!rbi_pool_may_wait(pool))
        return REBATCH_OOM;
    for (uint32_t i = 0; i < progress->count; i++) {
        const uint64_t point = progress->events[place(progress, i)].point;
        if (point < until)
            continue;
        if (rbi_event_synchronize(pool->device, progress->events[place(progress, i)].handle) !=
            REBATCH_OK)
            break;
        note_done(progress, point);
        return REBATCH_OK;
    }
    const rebatch_status status = rbi_device_synchronize(pool->device);
    if (status == REBATCH_OK)
        note_done(progress, progress->frees);
    return status;
}

rebatch_status rbi_pool_await_all(rebatch_pool *pool)
{
    const rebatch_status status = rbi_pool_await(pool, pool->progress.frees);
    finish_pending(pool);
    return status == REBATCH_OOM ? REBATCH_OK : status;
}

bool rbi_pool_has_waiting(const rebatch_pool *pool, const struct rbi_pool_stream *except)
{
    if (pool->progress.done == pool->progress.frees)
        return false;
    bool is_free = pool->pending != NULL;
    for (const struct rbi_pool_stream *s = pool->first_stream; s && !is_free; s = s->next)
        is_free = s != except && s->lists.free_bytes != 0;
    for (const rebatch_arena *a = pool->first_arena; a && !is_free; a = a->next)
        is_free = !a->range->is_kept && a->own.lists.free_bytes != 0;
    return is_free;
}

/* ---- free blocks of all streams ---- */

void rbi_pool_flush_lists(rebatch_pool *pool)
{
    for (struct rbi_pool_stream *s = pool->first_stream; s; s = s->next)
        rbi_lists_flush(&pool->heap, &s->lists);
}

uint64_t rbi_pool_largest_free(const rebatch_pool *pool)
{
    uint64_t largest = 0;
    for (const struct rbi_pool_stream *s = pool->first_stream; s; s = s->next)
        largest = rbi_max(largest, rbi_lists_largest_bytes(&s->lists));
    return largest;
}

void rbi_pool_destroy_streams(rebatch_pool *pool)
{
    for (size_t i = 0; i < RBI_PROGRESS_EVENTS; i++)
        rbi_event_destroy(pool->device, pool->progress.events[i].handle);
    while (pool->first_stream) {
        struct rbi_pool_stream *s = pool->first_stream;
        pool->first_stream = s->next;
        rbi_heap_free(s);
    }
}
