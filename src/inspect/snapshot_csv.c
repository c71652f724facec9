/* Owns the layout of a snapshot as CSV (RFC 4180, lines end in a line feed): blocks, and events.
 * Must not know where it goes. */
#include <inttypes.h>
#include <string.h>
#include <time.h>

#include "inspect/inspect.h"

static void put_text(struct rbi_sink *sink, const char *text)
{
    rbi_sink_put(sink, text, strlen(text));
}

/* In quotes, as it may have anything in it. */
static void put_tag(struct rbi_sink *sink, const char *name)
{
    put_text(sink, "\"");
    for (; *name; name++) {
        rbi_sink_put(sink, name, 1);
        if (*name == '"')
            rbi_sink_put(sink, name, 1);
    }
    put_text(sink, "\"");
}

/* ---- blocks ---- */

/* Memory without a gap; it begins at `address`. */
struct segment {
    const char *address;
    size_t bytes;
};

/* What begins at the next piece of the walk. */
static struct segment segment_at(struct rbi_view_walk walk)
{
    struct segment segment = {NULL, 0};
    struct rbi_view_piece piece;
    while (rbi_view_next(&piece, &walk) &&
           (segment.bytes == 0 || piece.address == segment.address + segment.bytes)) {
        if (segment.bytes == 0)
            segment.address = piece.address;
        segment.bytes += piece.bytes;
    }
    return segment;
}

static void put_block(struct rbi_sink *sink, const rebatch_pool *pool,
                      const struct segment *segment, const struct rbi_view_piece *piece)
{
    static const char *const states[] = {[RBI_VIEW_FREE] = "free",
                                         [RBI_VIEW_LIVE] = "live",
                                         [RBI_VIEW_DEFERRED] = "deferred",
                                         [RBI_VIEW_PENDING] = "pending",
                                         [RBI_VIEW_LOST] = "quarantined"};
    const bool live = rbi_view_is_in_use(piece);
    rbi_sink_print(sink, "0x%" PRIxPTR ",%zu,0x%" PRIxPTR ",%zu,%zu,%s,",
                   (uintptr_t)segment->address, segment->bytes, (uintptr_t)piece->address,
                   piece->bytes, piece->requested_bytes, states[piece->state]);
    if (piece->state != RBI_VIEW_LOST)
        rbi_sink_print(sink, "%" PRIuPTR, (uintptr_t)piece->stream);
    put_text(sink, ",");
    if (live || piece->state == RBI_VIEW_PENDING)
        put_tag(sink, rbi_view_tag_name(pool, piece->tag));
    put_text(sink, ",");
    if (live)
        rbi_sink_print(sink, "%" PRIu64, piece->allocation);
    put_text(sink, "\n");
}

/* Held from the device too, but nobody's. */
static void put_rest(struct rbi_sink *sink, size_t bytes, const char *state)
{
    if (bytes > 0)
        rbi_sink_print(sink, ",,,%zu,0,%s,,,\n", bytes, state);
}

void rbi_snapshot_blocks(struct rbi_sink *sink, const rebatch_pool *pool)
{
    put_text(sink, "segment,segment_bytes,address,bytes,requested_bytes,state,stream,tag,"
                   "allocation\n");
    for (struct rbi_view_walk walk = rbi_view_ranges(pool); walk.range;
         rbi_view_next_range(&walk)) {
        struct segment segment = segment_at(walk);
        struct rbi_view_piece piece;
        for (struct rbi_view_walk next = walk; rbi_view_next(&piece, &walk); next = walk) {
            if (piece.address >= segment.address + segment.bytes)
                segment = segment_at(next);
            put_block(sink, pool, &segment, &piece);
        }
    }
    struct rbi_view_facts facts;
    rbi_view_get_facts(&facts, pool);
    put_rest(sink, facts.spare_bytes, "spare");
}

/* ---- events ---- */

static const char *action_of(const struct rbi_pool_event *event)
{
    static const char *const actions[] = {
#define ACTION(name, text) [RBI_POOL_EVENT_##name] = text,
        RBI_POOL_EVENTS(ACTION)
#undef ACTION
    };
    return actions[event->kind];
}

static void put_event(struct rbi_sink *sink, const rebatch_pool *pool,
                      const struct rbi_pool_event *event, int64_t epoch_us)
{
    rbi_sink_print(sink, "%" PRIu64 ",%" PRId64 ",%s,", event->number,
                   epoch_us + (int64_t)(event->time_ns / 1000), action_of(event));
    if (event->kind == RBI_POOL_EVENT_ROLLBACK) {
        rbi_sink_print(sink, ",,,,,%zu\n", event->bytes);
        return;
    }
    if (event->address)
        rbi_sink_print(sink, "0x%" PRIxPTR, (uintptr_t)event->address);
    rbi_sink_print(sink, ",%zu,%" PRIuPTR ",", event->bytes, (uintptr_t)event->stream);
    if (event->kind != RBI_POOL_EVENT_MAP && event->kind != RBI_POOL_EVENT_UNMAP)
        put_tag(sink, rbi_view_tag_name(pool, event->tag));
    put_text(sink, ",");
    if (event->kind == RBI_POOL_EVENT_OOM)
        rbi_sink_print(sink, "%" PRIu64, event->free_bytes);
    put_text(sink, ",\n");
}

/* Microseconds since 1970 of rbi_now_ns() == 0. */
static int64_t find_epoch_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000 - (int64_t)(rbi_now_ns() / 1000);
}

void rbi_snapshot_events(struct rbi_sink *sink, const rebatch_pool *pool)
{
    const int64_t epoch_us = find_epoch_us();
    struct rbi_view_facts facts;
    rbi_view_get_facts(&facts, pool);
    put_text(sink, "number,time_us,action,address,bytes,stream,tag,device_free_bytes,blocks\n");
    for (uint64_t n = rbi_event_log_first(facts.log); n < facts.log->count; n++)
        put_event(sink, pool, rbi_event_log_at(facts.log, n), epoch_us);
}
