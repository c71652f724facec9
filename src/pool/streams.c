/* Owns how far each stream's work has come, and the blocks that wait for it.
 * Must not know how memory is found. */
#include "pool/pool.h"

/* While an event is under way it is looked at only after so many frees. */
#define FREES_A_LOOK 16

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
    for (const struct rbi_range *r = pool->first_range; r; r = r->next)
        for (const struct rbi_block *b = r->first; b; b = b->after)
            if (b->stream == stream)
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
        s->done = s->frees;
        s->in_flight = false;
        return s;
    }
    return NULL;
}

/* One stream alone needs no events. Without one, waiting is for the whole stream. */
static void make_events(rebatch_pool *pool)
{
    for (struct rbi_pool_stream *s = pool->first_stream; s; s = s->next)
        if (!s->event && rbi_event_create(pool->device, &s->event) != REBATCH_OK)
            s->event = NULL;
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
    s->has_zones = pool->has_space;
    struct rbi_pool_stream **end = &pool->first_stream;
    while (*end)
        end = &(*end)->next;
    *end = s;
    if (pool->first_stream->next)
        make_events(pool);
    pool->last_stream = s;
    return s;
}

static void note_done(struct rbi_pool_stream *stream, uint64_t point)
{
    stream->done = point;
    stream->in_flight = stream->in_flight && stream->recorded > point;
}

/* Looks at the event under way, without waiting. */
static rebatch_status query(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    if (!stream->in_flight)
        return REBATCH_OK;
    bool done = false;
    const rebatch_status status = rbi_event_query(pool->device, stream->event, &done);
    if (status == REBATCH_OK && done)
        note_done(stream, stream->recorded);
    return status == REBATCH_OOM ? REBATCH_OK : status;
}

/* One event a stream is under way at a time: it stands for all frees before it, and those after
 * it wait for the next. Where recording fails the frees are left to rbi_pool_await(). */
static void record(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    if (stream->in_flight || !stream->event || stream->done == stream->frees)
        return;
    if (rbi_event_record(pool->device, stream->event, stream->stream) != REBATCH_OK)
        return;
    stream->recorded = stream->frees;
    stream->in_flight = true;
}

/* A stream waits for its work when it is destroyed, so one that is gone has none. */
static bool is_gone(const rebatch_pool *pool, const struct rbi_pool_stream *stream)
{
    return stream->stream && !rbi_device_stream_is_valid(pool->device, stream->stream);
}

uint64_t rbi_stream_note_free(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    const uint64_t point = ++stream->frees;
    if (!pool->first_stream->next || !stream->event)
        return point; /* the only stream so far: nobody asks */
    if (stream->in_flight && (point - stream->recorded) % FREES_A_LOOK != 0)
        return point; /* one event stands for many frees */
    if (is_gone(pool, stream)) {
        note_done(stream, point);
        return point;
    }
    (void)query(pool, stream); /* an error here comes again where memory is searched */
    record(pool, stream);
    return point;
}

rebatch_status rbi_pool_await(rebatch_pool *pool, struct rbi_pool_stream *stream, uint64_t until)
{
    if (stream->done >= until)
        return REBATCH_OK;
    if (is_gone(pool, stream)) {
        note_done(stream, stream->frees);
        return REBATCH_OK;
    }
    if (stream->in_flight && rbi_event_synchronize(pool->device, stream->event) == REBATCH_OK)
        note_done(stream, stream->recorded);
    if (stream->done >= until)
        return REBATCH_OK;
    const rebatch_status status = rebatch_stream_synchronize(pool->device, stream->stream);
    if (status == REBATCH_OK)
        note_done(stream, stream->frees);
    return status;
}

static bool is_ready(const struct rbi_block *block)
{
    for (const struct rbi_block_use *use = block->uses; use; use = use->next)
        if (use->stream->done < use->until)
            return false;
    return true;
}

static void end_uses(rebatch_pool *pool, struct rbi_block *block)
{
    while (block->uses) {
        struct rbi_block_use *use = block->uses;
        block->uses = use->next;
        use->stream->pins--;
        rbi_nodes_put(&pool->use_nodes, use);
    }
    block->used = false;
}

/* The gap behind a guarded block is a hole again with it. */
static void put_away(rebatch_pool *pool, struct rbi_block *block)
{
    struct rbi_block *const gap = block->after;
    rbi_pool_settle_block(pool, block);
    if (pool->guard)
        (void)rbi_pool_put_block(pool, gap);
}

void rbi_pool_retire_slowly(rebatch_pool *pool, struct rbi_block *block)
{
    block->freed_at = rbi_stream_note_free(pool, block->stream);
    block->birth = pool->births;
    if (!block->used) {
        if (pool->guard)
            put_away(pool, block);
        else
            rbi_pool_cache_block(pool, block);
        return;
    }
    for (struct rbi_block_use *use = block->uses; use; use = use->next)
        use->until = rbi_stream_note_free(pool, use->stream);
    block->state = RBI_BLOCK_PENDING;
    block->next = pool->pending;
    pool->pending = block;
}

static void settle_pending(rebatch_pool *pool)
{
    for (struct rbi_block **at = &pool->pending; *at;) {
        struct rbi_block *block = *at;
        if (!is_ready(block)) {
            at = &block->next;
            continue;
        }
        *at = block->next;
        RBI_RECORD(pool, FREE_COMPLETED, block->address, block->bytes, block->stream->stream,
                   block->tag);
        end_uses(pool, block);
        put_away(pool, block);
    }
}

rebatch_status rbi_pool_poll_streams(rebatch_pool *pool)
{
    if (pool->has_space)
        make_events(pool);
    for (struct rbi_pool_stream *s = pool->first_stream; s; s = s->next) {
        if (s->done == s->frees)
            continue;
        if (is_gone(pool, s)) {
            note_done(s, s->frees);
            continue;
        }
        rebatch_status status = query(pool, s);
        if (status == REBATCH_OK && !s->in_flight) {
            record(pool, s);
            status = query(pool, s);
        }
        if (status != REBATCH_OK)
            return status;
    }
    settle_pending(pool);
    return REBATCH_OK;
}

rebatch_status rbi_pool_await_streams(rebatch_pool *pool)
{
    for (struct rbi_pool_stream *s = pool->first_stream; s; s = s->next) {
        const rebatch_status status = rbi_pool_await(pool, s, s->frees);
        if (status != REBATCH_OK && status != REBATCH_OOM)
            return status;
    }
    settle_pending(pool);
    return REBATCH_OK;
}

bool rbi_pool_has_waiting(const rebatch_pool *pool, const struct rbi_pool_stream *except)
{
    if (pool->pending)
        return true;
    for (const struct rbi_pool_stream *s = pool->first_stream; s; s = s->next)
        if (s != except && s->free_bytes != 0 && s->done < s->frees)
            return true;
    return false;
}

void rbi_pool_destroy_streams(rebatch_pool *pool)
{
    while (pool->first_stream) {
        struct rbi_pool_stream *s = pool->first_stream;
        pool->first_stream = s->next;
        if (s->event)
            rbi_event_destroy(pool->device, s->event);
        rbi_heap_free(s);
    }
}
