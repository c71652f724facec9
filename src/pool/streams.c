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

/* The next free gets a mark. */
static void begin_marks(struct rbi_pool_stream *stream)
{
    stream->next_mark = stream->frees + 1;
    stream->mark_gap = RBI_MARK_LEAST_GAP;
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
        s->mark_count = 0;
        if (s->next_mark != UINT64_MAX)
            begin_marks(s);
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
    s->next_mark = UINT64_MAX; /* one stream alone needs no marks at its frees */
    struct rbi_pool_stream **end = &pool->first_stream;
    while (*end)
        end = &(*end)->next;
    *end = s;
    if (pool->first_stream != s)
        for (struct rbi_pool_stream *any = pool->first_stream; any; any = any->next)
            if (any->next_mark == UINT64_MAX)
                begin_marks(any);
    pool->last_stream = s;
    return s;
}

/* ---- marks ---- */

static struct rbi_mark *mark_at(struct rbi_pool_stream *stream, uint32_t number)
{
    return &stream->marks[(stream->first_mark + number) % RBI_STREAM_MARKS];
}

static void note_done(struct rbi_pool_stream *stream, uint64_t point)
{
    stream->done = point;
    while (stream->mark_count != 0 && mark_at(stream, 0)->point <= point) {
        stream->first_mark = (stream->first_mark + 1) % RBI_STREAM_MARKS;
        stream->mark_count--;
    }
}

/* The number of the first mark from a point on; mark_count: there is none. */
static uint32_t first_mark_from(struct rbi_pool_stream *stream, uint64_t point)
{
    uint32_t number = 0;
    while (number < stream->mark_count && mark_at(stream, number)->point < point)
        number++;
    return number;
}

/* Up to where there are marks. */
static uint64_t marked_point(struct rbi_pool_stream *stream)
{
    return stream->mark_count != 0 ? mark_at(stream, stream->mark_count - 1)->point : stream->done;
}

/* Asks whether the oldest mark has been reached, without waiting. */
static rebatch_status ask(bool *reached, rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    const struct rbi_mark *mark = mark_at(stream, 0);
    const rebatch_status status = rbi_event_query(pool->device, mark->event, reached);
    *reached = *reached && status == REBATCH_OK;
    if (*reached)
        note_done(stream, mark->point);
    return status == REBATCH_OOM ? REBATCH_OK : status;
}

static rebatch_status ask_all(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    bool reached = true;
    rebatch_status status = REBATCH_OK;
    while (reached && stream->mark_count != 0 && status == REBATCH_OK)
        status = ask(&reached, pool, stream);
    return status;
}

/* All at once, so that later calls take nothing of the heap. */
static void make_events(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    for (size_t i = 0; i < RBI_STREAM_MARKS; i++)
        if (!stream->marks[i].event &&
            rbi_event_create(pool->device, &stream->marks[i].event) != REBATCH_OK)
            stream->marks[i].event = NULL;
}

/* Marks the frees so far. Where that fails they are left to rbi_pool_await(). */
static void mark(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    if (stream->mark_count == RBI_STREAM_MARKS || marked_point(stream) == stream->frees)
        return;
    struct rbi_mark *mark = mark_at(stream, stream->mark_count);
    if (!mark->event)
        make_events(pool, stream);
    if (!mark->event)
        return;
    if (rbi_event_record(pool->device, mark->event, stream->stream) != REBATCH_OK)
        return;
    mark->point = stream->frees;
    stream->mark_count++;
}

/* A stream waits for its work when it is destroyed, so one that is gone has none. */
static bool is_gone(const rebatch_pool *pool, const struct rbi_pool_stream *stream)
{
    return stream->stream && !rbi_device_stream_is_valid(pool->device, stream->stream);
}

static void mark_stream(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    bool reached;
    if (is_gone(pool, stream)) {
        note_done(stream, stream->frees);
        return;
    }
    if (stream->mark_count == RBI_STREAM_MARKS)
        (void)ask(&reached, pool, stream); /* an error comes again where memory is searched */
    mark(pool, stream);
}

/* Calls of the driver are dear beside what else a free costs. As long as no search misses anything,
 * marks become rare, and whether they have been reached is asked only when there is place for no
 * other. */
static void mark_when_due(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    stream->next_mark = stream->frees + stream->mark_gap;
    stream->mark_gap = rbi_min(2 * stream->mark_gap, RBI_MARK_MOST_GAP);
    mark_stream(pool, stream);
}

static uint64_t note_free(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    const uint64_t point = ++stream->frees;
    if (point >= stream->next_mark)
        mark_when_due(pool, stream);
    return point;
}

void rbi_pool_catch_up_marks(rebatch_pool *pool)
{
    for (struct rbi_pool_stream *s = pool->first_stream; s; s = s->next)
        s->next_mark = rbi_max(s->next_mark, s->frees + 1);
}

/* The free of a block that the stream uses and another one has. */
static uint64_t note_free_of_use(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    stream->next_mark -= rbi_min(stream->next_mark - stream->frees, RBI_MARK_FREES_A_USE) - 1;
    return note_free(pool, stream);
}

void rbi_pool_mark_soon(rebatch_pool *pool)
{
    for (struct rbi_pool_stream *s = pool->first_stream; s; s = s->next)
        if (s->done != s->frees && s->next_mark != UINT64_MAX)
            begin_marks(s);
}

rebatch_status rbi_pool_await(rebatch_pool *pool, struct rbi_pool_stream *stream, uint64_t until)
{
    if (stream->done >= until)
        return REBATCH_OK;
    if (is_gone(pool, stream)) {
        note_done(stream, stream->frees);
        return REBATCH_OK;
    }
    const uint32_t number = first_mark_from(stream, until);
    if (number < stream->mark_count &&
        rbi_event_synchronize(pool->device, mark_at(stream, number)->event) == REBATCH_OK) {
        note_done(stream, mark_at(stream, number)->point);
        return REBATCH_OK;
    }
    const rebatch_status status = rebatch_stream_synchronize(pool->device, stream->stream);
    if (status == REBATCH_OK)
        note_done(stream, stream->frees);
    return status;
}

/* ---- pending blocks ---- */

static bool is_ready(const struct rbi_block *block)
{
    for (const struct rbi_block_use *use = block->uses; use; use = use->next)
        if (use->stream->done < use->until)
            return false;
    return true;
}

/* The gap behind a fenced block is a hole again with it. */
static void put_away(rebatch_pool *pool, struct rbi_block *block)
{
    struct rbi_block *const gap = block->after;
    rbi_block_merge(&pool->heap, block);
    if (pool->fence)
        (void)rbi_block_put(&pool->heap, gap);
}

void rbi_pool_retire_slowly(rebatch_pool *pool, struct rbi_block *block)
{
    block->freed_at = note_free(pool, rbi_stream_of(block));
    block->sequence = pool->sequence;
    if (!block->used) {
        if (pool->fence)
            put_away(pool, block);
        else
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
    rbi_block_end_uses(pool, block);
    put_away(pool, block);
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

/* By the marks that there are. Once in a search, as later it would hardly have come further. */
static rebatch_status look(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    if (stream->done == stream->frees || stream->looked == pool->looks)
        return REBATCH_OK;
    stream->looked = pool->looks;
    if (is_gone(pool, stream)) {
        note_done(stream, stream->frees);
        return REBATCH_OK;
    }
    return ask_all(pool, stream);
}

/* Where all marks have been reached, what was freed after them may be done as well. */
static rebatch_status look_beyond(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    if (stream->mark_count != 0)
        return REBATCH_OK;
    mark(pool, stream);
    return ask_all(pool, stream);
}

/* What was freed after the last mark shall be known to be done when it is needed next. */
static rebatch_status mark_beyond(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    if (stream->mark_count == 0)
        mark(pool, stream);
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
        return step_awaited(pool, stream, bytes, mark_beyond);
    status = step_awaited(pool, stream, bytes, look_beyond);
    if (status == REBATCH_OK)
        *any = finish_pending(pool, stream, bytes);
    return status;
}

rebatch_status rbi_pool_poll_rest(rebatch_pool *pool)
{
    for (struct rbi_pool_stream *s = pool->first_stream; s; s = s->next) {
        rebatch_status status = look(pool, s);
        if (status == REBATCH_OK)
            status = look_beyond(pool, s);
        if (status != REBATCH_OK)
            return status;
    }
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
        if (s != except && s->lists.free_bytes != 0 && s->done < s->frees)
            return true;
    return false;
}

void rbi_pool_destroy_streams(rebatch_pool *pool)
{
    while (pool->first_stream) {
        struct rbi_pool_stream *s = pool->first_stream;
        pool->first_stream = s->next;
        for (size_t i = 0; i < RBI_STREAM_MARKS; i++)
            rbi_event_destroy(pool->device, s->marks[i].event);
        rbi_heap_free(s);
    }
}
