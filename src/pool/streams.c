/* Owns how far each stream's work has come, and the blocks that wait for it.
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

/* The next free gets an event. */
static void begin_events(struct rbi_pool_stream *stream)
{
    stream->next_event = stream->frees + 1;
    stream->event_gap = RBI_EVENT_LEAST_GAP;
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
        s->done = s->clear = s->at_device_event = s->frees;
        s->event_count = 0;
        if (s->next_event != UINT64_MAX)
            begin_events(s);
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
    s->next_event = UINT64_MAX; /* one stream alone needs no events at its frees */
    struct rbi_pool_stream **end = &pool->first_stream;
    while (*end)
        end = &(*end)->next;
    *end = s;
    if (pool->first_stream != s)
        for (struct rbi_pool_stream *any = pool->first_stream; any; any = any->next)
            if (any->next_event == UINT64_MAX)
                begin_events(any);
    pool->last_stream = s;
    return s;
}

/* ---- events ---- */

static struct rbi_stream_event *event_at(struct rbi_pool_stream *stream, uint32_t number)
{
    rbi_assert(number < RBI_STREAM_EVENTS);
    return &stream->events[(stream->first_event + number) % RBI_STREAM_EVENTS];
}

static void note_done(const rebatch_pool *pool, struct rbi_pool_stream *stream, uint64_t point)
{
    rbi_assert(point <= stream->frees);
    stream->done = point;
    if (!pool->after_device)
        stream->clear = point;
    while (stream->event_count != 0 && event_at(stream, 0)->point <= point) {
        stream->first_event = (stream->first_event + 1) % RBI_STREAM_EVENTS;
        stream->event_count--;
    }
}

/* The number of the first event from a point on; event_count: there is none. */
static uint32_t first_event_from(struct rbi_pool_stream *stream, uint64_t point)
{
    uint32_t number = 0;
    while (number < stream->event_count && event_at(stream, number)->point < point)
        number++;
    return number;
}

/* Up to where there are events. */
static uint64_t recorded_point(struct rbi_pool_stream *stream)
{
    return stream->event_count != 0 ? event_at(stream, stream->event_count - 1)->point
                                    : stream->done;
}

/* Asks whether the oldest event has been reached, without waiting. */
static rebatch_status ask(bool *reached, rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    rbi_assert(stream->event_count != 0);
    const struct rbi_stream_event *event = event_at(stream, 0);
    const rebatch_status status = rbi_event_query(pool->device, event->handle, reached);
    *reached = *reached && status == REBATCH_OK;
    if (*reached)
        note_done(pool, stream, event->point);
    return status == REBATCH_OOM ? REBATCH_OK : status;
}

static rebatch_status ask_all(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    bool reached = true;
    rebatch_status status = REBATCH_OK;
    while (reached && stream->event_count != 0 && status == REBATCH_OK)
        status = ask(&reached, pool, stream);
    return status;
}

/* All at once, so that later calls take nothing of the heap. */
static void make_events(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    for (size_t i = 0; i < RBI_STREAM_EVENTS; i++)
        if (!stream->events[i].handle &&
            rbi_event_create(pool->device, &stream->events[i].handle) != REBATCH_OK)
            stream->events[i].handle = NULL;
}

/* Records an event behind the frees so far. Where that fails they are left to rbi_pool_await(). */
static void record(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    if (stream->event_count == RBI_STREAM_EVENTS || recorded_point(stream) == stream->frees)
        return;
    struct rbi_stream_event *event = event_at(stream, stream->event_count);
    if (!event->handle)
        make_events(pool, stream);
    if (!event->handle)
        return;
    if (rbi_event_record(pool->device, event->handle, stream->stream) != REBATCH_OK)
        return;
    rbi_assert(stream->event_count < RBI_STREAM_EVENTS);
    event->point = stream->frees;
    stream->event_count++;
}

/* A stream waits for its work when it is destroyed, so one that is gone has none. */
static bool is_gone(const rebatch_pool *pool, const struct rbi_pool_stream *stream)
{
    return stream->stream && !rbi_device_stream_is_valid(pool->device, stream->stream);
}

static void record_on(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    bool reached;
    if (is_gone(pool, stream)) {
        note_done(pool, stream, stream->frees);
        return;
    }
    if (stream->event_count == RBI_STREAM_EVENTS)
        (void)ask(&reached, pool, stream); /* an error comes again where memory is searched */
    record(pool, stream);
}

/* Calls of the driver are dear beside what else a free costs. As long as no search misses anything,
 * events become rare, and whether they have been reached is asked only when there is place for no
 * other. */
static void record_when_due(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    stream->next_event = stream->frees + stream->event_gap;
    stream->event_gap = rbi_min(2 * stream->event_gap, RBI_EVENT_MOST_GAP);
    record_on(pool, stream);
}

static uint64_t note_free(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    const uint64_t point = ++stream->frees;
    if (point >= stream->next_event)
        record_when_due(pool, stream);
    return point;
}

void rbi_pool_catch_up_events(rebatch_pool *pool)
{
    for (struct rbi_pool_stream *s = pool->first_stream; s; s = s->next)
        s->next_event = rbi_max(s->next_event, s->frees + 1);
}

/* The free of a block that the stream uses and another one has. */
static uint64_t note_free_of_use(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    stream->next_event -= rbi_min(stream->next_event - stream->frees, RBI_EVENT_FREES_A_USE) - 1;
    return note_free(pool, stream);
}

void rbi_pool_record_soon(rebatch_pool *pool)
{
    for (struct rbi_pool_stream *s = pool->first_stream; s; s = s->next)
        if (s->done != s->frees && s->next_event != UINT64_MAX)
            begin_events(s);
}

/* ---- all work of the device ----
 *
 * With after_device blocks are used by streams that the pool does not know of, so that only the end
 * of all work of the device makes sure of one. One event of it is under way at a time; the next is
 * recorded when memory is searched for. Where the device has no such events, only a wait clears. */

static bool may_wait(const rebatch_pool *pool)
{
    return !pool->may_wait || pool->may_wait(pool->may_wait_user);
}

static bool is_clear(const rebatch_pool *pool)
{
    const struct rbi_pool_stream *s = pool->first_stream;
    while (s && s->clear == s->frees)
        s = s->next;
    return !s;
}

/* All work up to at_device_event is done. */
static void note_clear(rebatch_pool *pool)
{
    pool->is_device_event_recorded = false;
    for (struct rbi_pool_stream *s = pool->first_stream; s; s = s->next) {
        s->clear = s->at_device_event;
        if (s->done < s->clear)
            note_done(pool, s, s->clear);
    }
}

static void note_device_event(rebatch_pool *pool)
{
    for (struct rbi_pool_stream *s = pool->first_stream; s; s = s->next)
        s->at_device_event = s->frees;
}

static void record_device(rebatch_pool *pool)
{
    if (is_clear(pool) || !may_wait(pool) ||
        (!pool->device_event &&
         rbi_event_create(pool->device, &pool->device_event) != REBATCH_OK) ||
        rbi_event_record_all(pool->device, pool->device_event) != REBATCH_OK)
        return;
    pool->is_device_event_recorded = true;
    note_device_event(pool);
}

static rebatch_status ask_device(rebatch_pool *pool)
{
    bool reached = false;
    if (!pool->is_device_event_recorded)
        return REBATCH_OK;
    const rebatch_status status = rbi_event_query(pool->device, pool->device_event, &reached);
    if (status == REBATCH_OK && reached)
        note_clear(pool);
    return status == REBATCH_OOM ? REBATCH_OK : status;
}

/* What was freed after an event that has been reached may be done as well. */
static rebatch_status look_at_device(rebatch_pool *pool)
{
    rebatch_status status = ask_device(pool);
    if (status != REBATCH_OK || pool->is_device_event_recorded)
        return status;
    record_device(pool);
    return ask_device(pool);
}

static rebatch_status await_device(rebatch_pool *pool)
{
    if (!may_wait(pool))
        return REBATCH_OOM;
    const rebatch_status status = rbi_device_synchronize(pool->device);
    if (status != REBATCH_OK)
        return status;
    note_device_event(pool);
    note_clear(pool);
    return REBATCH_OK;
}

rebatch_status rbi_pool_await(rebatch_pool *pool, struct rbi_pool_stream *stream, uint64_t until)
{
    if (stream->clear >= until)
        return REBATCH_OK;
    if (pool->after_device)
        return await_device(pool);
    if (is_gone(pool, stream)) {
        note_done(pool, stream, stream->frees);
        return REBATCH_OK;
    }
    const uint32_t number = first_event_from(stream, until);
    if (number < stream->event_count &&
        rbi_event_synchronize(pool->device, event_at(stream, number)->handle) == REBATCH_OK) {
        note_done(pool, stream, event_at(stream, number)->point);
        return REBATCH_OK;
    }
    const rebatch_status status = rebatch_stream_synchronize(pool->device, stream->stream);
    if (status == REBATCH_OK)
        note_done(pool, stream, stream->frees);
    return status;
}

/* ---- pending blocks ---- */

static bool is_ready(const struct rbi_block *block)
{
    rbi_assert(block->state == RBI_BLOCK_PENDING && block->used);
    for (const struct rbi_block_use *use = block->uses; use; use = use->next)
        if (use->stream->done < use->until)
            return false;
    return true;
}

void rbi_pool_retire_slowly(rebatch_pool *pool, struct rbi_block *block)
{
    rbi_assert(block->state == RBI_BLOCK_LIVE || block->state == RBI_BLOCK_DEFERRED);
    block->freed_at = note_free(pool, rbi_stream_of(block));
    block->sequence = pool->sequence;
    if (!block->used) {
        rbi_block_cache(&pool->heap, block);
        return;
    }
    for (struct rbi_block_use *use = block->uses; use; use = use->next)
        use->until = note_free_of_use(pool, use->stream);
    block->state = RBI_BLOCK_PENDING;
    block->next = pool->pending;
    pool->pending = block;
}

static void end_pending(rebatch_pool *pool, struct rbi_block *block)
{
    rbi_assert(block->state == RBI_BLOCK_PENDING);
    rbi_block_end_uses(pool, block);
    rbi_block_merge(&pool->heap, block);
}

/* Is it one that `stream` would have for `bytes`? */
static bool is_for(const struct rbi_block *block, const struct rbi_pool_stream *stream,
                   size_t bytes)
{
    return rbi_stream_of(block) == stream && block->bytes >= bytes;
}

/* Frees the pending blocks that are ready; true when one of them is for `stream` and `bytes`. */
static bool finish_pending(rebatch_pool *pool, const struct rbi_pool_stream *stream, size_t bytes)
{
    bool any = false;
    for (struct rbi_block **at = &pool->pending; *at;) {
        struct rbi_block *block = *at;
        if (!is_ready(block)) {
            at = &block->next;
            continue;
        }
        *at = block->next;
        any = any || is_for(block, stream, bytes);
        RBI_RECORD(pool, FREE_COMPLETED, block->address, block->bytes, rbi_stream_of(block)->stream,
                   block->tag);
        end_pending(pool, block);
    }
    return any;
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

/* ---- looking how far streams have come ---- */

/* By the events that there are. Once in a search, as later it would hardly have come further. */
static rebatch_status look(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    if (stream->done == stream->frees || stream->looked == pool->looks)
        return REBATCH_OK;
    stream->looked = pool->looks;
    if (is_gone(pool, stream)) {
        note_done(pool, stream, stream->frees);
        return REBATCH_OK;
    }
    return ask_all(pool, stream);
}

/* Where all events have been reached, what was freed after them may be done as well. */
static rebatch_status look_beyond(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    if (stream->event_count != 0)
        return REBATCH_OK;
    record(pool, stream);
    return ask_all(pool, stream);
}

/* What was freed after the last event shall be known to be done when it is needed next. */
static rebatch_status record_beyond(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    if (stream->event_count == 0)
        record(pool, stream);
    return REBATCH_OK;
}

/* Takes a step with each stream that a block waits for. */
static rebatch_status step_users(rebatch_pool *pool, const struct rbi_block *block,
                                 rebatch_status (*step)(rebatch_pool *, struct rbi_pool_stream *))
{
    rebatch_status status = REBATCH_OK;
    for (const struct rbi_block_use *use = block->uses; use && status == REBATCH_OK;
         use = use->next)
        if (use->stream->done < use->until)
            status = step(pool, use->stream);
    return status;
}

/* The same with all that pending blocks for `stream` and `bytes` wait for. */
static rebatch_status step_awaited(rebatch_pool *pool, const struct rbi_pool_stream *stream,
                                   size_t bytes,
                                   rebatch_status (*step)(rebatch_pool *, struct rbi_pool_stream *))
{
    rebatch_status status = REBATCH_OK;
    for (const struct rbi_block *b = pool->pending; b && status == REBATCH_OK; b = b->next)
        if (is_for(b, stream, bytes))
            status = step_users(pool, b, step);
    return status;
}

rebatch_status rbi_pool_poll_pending(bool *any, rebatch_pool *pool,
                                     const struct rbi_pool_stream *stream, size_t bytes)
{
    pool->looks++;
    *any = false;
    rebatch_status status = step_awaited(pool, stream, bytes, look);
    if (status != REBATCH_OK)
        return status;
    *any = finish_pending(pool, stream, bytes);
    if (*any)
        return step_awaited(pool, stream, bytes, record_beyond);
    status = step_awaited(pool, stream, bytes, look_beyond);
    if (status == REBATCH_OK)
        *any = finish_pending(pool, stream, bytes);
    return status;
}

rebatch_status rbi_pool_poll_rest(rebatch_pool *pool)
{
    rebatch_status status = pool->after_device ? look_at_device(pool) : REBATCH_OK;
    for (struct rbi_pool_stream *s = pool->first_stream;
         s && status == REBATCH_OK && (!pool->after_device || pool->pending); s = s->next) {
        status = look(pool, s);
        if (status == REBATCH_OK)
            status = look_beyond(pool, s);
    }
    if (status != REBATCH_OK)
        return status;
    (void)finish_pending(pool, NULL, 0);
    return REBATCH_OK;
}

rebatch_status rbi_pool_poll_streams(rebatch_pool *pool)
{
    pool->looks++;
    return rbi_pool_poll_rest(pool);
}

rebatch_status rbi_pool_await_streams(rebatch_pool *pool)
{
    for (struct rbi_pool_stream *s = pool->first_stream; s; s = s->next) {
        const rebatch_status status = rbi_pool_await(pool, s, s->frees);
        if (status != REBATCH_OK && status != REBATCH_OOM)
            return status;
    }
    (void)finish_pending(pool, NULL, 0);
    return REBATCH_OK;
}

bool rbi_pool_has_waiting(const rebatch_pool *pool, const struct rbi_pool_stream *except)
{
    if (pool->pending)
        return true;
    for (const struct rbi_pool_stream *s = pool->first_stream; s; s = s->next)
        if (s != except && s->lists.free_bytes != 0 && s->clear < s->frees)
            return true;
    return false;
}

void rbi_pool_destroy_streams(rebatch_pool *pool)
{
    rbi_event_destroy(pool->device, pool->device_event);
    while (pool->first_stream) {
        struct rbi_pool_stream *s = pool->first_stream;
        pool->first_stream = s->next;
        for (size_t i = 0; i < RBI_STREAM_EVENTS; i++)
            rbi_event_destroy(pool->device, s->events[i].handle);
        rbi_heap_free(s);
    }
}
