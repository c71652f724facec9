/* Holds the snapshot: the pickle that PyTorch's memory viewer reads, its events played forward and
 * back as the viewer does, the same as CSV, and where it goes. Seeds: 1 to 6. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "fault/fault_device.h"
#include "inspect/inspect.h"
#include "unit/config_files.h"
#include "unit/pickle_reader.h"
#include "unit/pool_help.h"

TestSuite(pool_snapshot, .init = config_enter, .fini = config_leave);

/* ---- taking one ---- */

struct bytes {
    unsigned char *data;
    size_t size, room;
    size_t calls, fail_at; /* 0: never */
};

static rebatch_status collect(const void *data, size_t size, void *user)
{
    struct bytes *to = user;
    cr_assert(size > 0 && size <= 4096);
    if (++to->calls == to->fail_at)
        return (rebatch_status)(REBATCH_E_USER + 7);
    cr_assert(to->fail_at == 0 || to->calls < to->fail_at, "written after a failure");
    if (to->size + size + 1 > to->room) {
        to->room = 2 * (to->room + size + 1);
        to->data = realloc(to->data, to->room);
        cr_assert_not_null(to->data);
    }
    memcpy(to->data + to->size, data, size);
    to->size += size;
    to->data[to->size] = '\0';
    return REBATCH_OK;
}

static struct bytes snap(rebatch_pool *pool, rebatch_snapshot_format format)
{
    struct bytes bytes = {NULL, 0, 0, 0, 0};
    const uint64_t calls = rbi_heap_calls();
    cr_assert_eq(rebatch_pool_write_snapshot(pool, format, collect, &bytes), REBATCH_OK, "%s",
                 rebatch_last_error());
    cr_assert_eq(rbi_heap_calls(), calls, "a snapshot allocates");
    return bytes;
}

static struct pickle_value *snap_pickle(rebatch_pool *pool)
{
    struct bytes bytes = snap(pool, REBATCH_SNAPSHOT_PICKLE);
    struct pickle_value *value = pickle_read(bytes.data, bytes.size);
    free(bytes.data);
    return value;
}

/* ---- pools with something in them ---- */

enum { BLOCKS = 60, STREAMS = 2, TAGS = 4 };

struct busy {
    struct rig rig;
    rebatch_stream streams[STREAMS];
    rebatch_tag tags[TAGS];
    void *blocks[BLOCKS];
    void *before[BLOCKS]; /* when the scope began */
    uint64_t random;
};

static struct busy busy_make(uint64_t seed, struct rig rig)
{
    static const char *const names[TAGS] = {"", "weights", "a \"quoted\", tag", "caf\xc3\xa9 \xff"};
    struct busy b = {.random = seed, .rig = rig};
    cr_assert_eq(rebatch_stream_create(&b.streams[1], b.rig.device), REBATCH_OK);
    for (int i = 1; i < TAGS; i++)
        cr_assert_eq(rebatch_pool_tag(&b.tags[i], b.rig.pool, names[i]), REBATCH_OK);
    return b;
}

static struct busy busy_open(uint64_t seed, const rebatch_pool_options *options, bool plain)
{
    return busy_make(seed, plain ? rig_open_plain(80, options) : rig_open(80, options));
}

static void busy_close(struct busy *b)
{
    pickle_free();
    rebatch_stream_destroy(b->rig.device, b->streams[1]);
    rig_close(&b->rig);
}

/* Under valgrind a part of the calls must do. */
static bool is_slow(void)
{
    const char *stride = getenv("REBATCH_TEST_STRIDE");
    return stride && atoi(stride) > 8;
}

static void work(struct busy *b, int calls)
{
    rebatch_scope scope = 0;
    calls = is_slow() ? calls / 4 : calls;
    for (int n = 0; n < calls; n++) {
        const size_t at = draw(&b->random) % BLOCKS;
        const uint64_t kind = draw(&b->random) % 100;
        const size_t bytes = draw(&b->random) % (kind % 4 ? 8 * KIB : 4 * PAGE) + 1;
        const rebatch_stream stream = b->streams[draw(&b->random) % STREAMS];
        if (kind < 3 && !scope) {
            scope = begin(b->rig.pool);
            memcpy(b->before, b->blocks, sizeof b->before);
        } else if (kind < 5 && scope) {
            cr_assert_eq(rebatch_scope_rollback(b->rig.pool, scope), REBATCH_OK);
            memcpy(b->blocks, b->before, sizeof b->before);
            scope = 0;
        } else if (kind < 7 && scope) {
            cr_assert_eq(rebatch_scope_commit(b->rig.pool, scope), REBATCH_OK);
            scope = 0;
        } else if (kind < 10) {
            cr_assert_eq(rebatch_pool_trim(b->rig.pool, 10 * PAGE, NULL), REBATCH_OK);
        } else if (kind < 20 && b->blocks[at]) {
            cr_assert_eq(rebatch_pool_use_on(b->rig.pool, b->blocks[at], stream), REBATCH_OK);
        } else {
            give(b->rig.pool, b->blocks[at]); /* it may be deferred */
            b->blocks[at] = NULL;
            const rebatch_status status = rebatch_pool_alloc(
                &b->blocks[at], b->rig.pool, bytes, stream, b->tags[draw(&b->random) % TAGS]);
            cr_assert(status == REBATCH_OK || status == REBATCH_OOM);
        }
    }
    if (scope)
        cr_assert_eq(rebatch_scope_commit(b->rig.pool, scope), REBATCH_OK);
}

/* ---- the viewer's memory: segments and blocks by address, as MemoryViz.js keeps them ---- */

struct span {
    int64_t at, bytes;
    bool pending;
};

struct memory {
    struct span *segments, *blocks;
    size_t segment_count, block_count;
};

enum { SPANS = 4096 };

static struct memory memory_make(void)
{
    struct memory memory = {calloc(SPANS, sizeof(struct span)), calloc(SPANS, sizeof(struct span)),
                            0, 0};
    cr_assert(memory.segments && memory.blocks);
    return memory;
}

static void memory_free(struct memory *memory)
{
    free(memory->segments);
    free(memory->blocks);
}

static struct span *find_block(const struct memory *memory, int64_t at)
{
    for (size_t i = 0; i < memory->block_count; i++)
        if (memory->blocks[i].at == at)
            return &memory->blocks[i];
    return NULL;
}

static bool is_inside(const struct span *block, const struct span *segment)
{
    return segment->at <= block->at && block->at + block->bytes <= segment->at + segment->bytes;
}

/* The viewer draws every block in its segment, whatever event is looked at. */
static void check_inside(const struct memory *memory, const struct span *block)
{
    bool inside = false;
    for (size_t i = 0; i < memory->segment_count && !inside; i++)
        inside = is_inside(block, &memory->segments[i]);
    cr_assert(inside, "a block that lies in no segment");
}

static void add_block(struct memory *memory, struct span block)
{
    check_inside(memory, &block);
    cr_assert(!find_block(memory, block.at) && memory->block_count < SPANS);
    memory->blocks[memory->block_count++] = block;
}

static void drop_block(struct memory *memory, int64_t at)
{
    struct span *block = find_block(memory, at);
    cr_assert_not_null(block, "a block that is not there");
    *block = memory->blocks[--memory->block_count];
}

static void add_segment(struct memory *memory, struct span span)
{
    for (size_t i = 0; i < memory->segment_count; i++) {
        struct span *s = &memory->segments[i];
        cr_assert(span.at + span.bytes <= s->at || s->at + s->bytes <= span.at, "mapped twice");
        if (s->at + s->bytes != span.at && span.at + span.bytes != s->at)
            continue;
        span = (struct span){s->at < span.at ? s->at : span.at, s->bytes + span.bytes, false};
        *s = memory->segments[--memory->segment_count];
        i = (size_t)-1; /* it may touch another one now */
    }
    cr_assert_lt(memory->segment_count, SPANS);
    memory->segments[memory->segment_count++] = span;
}

static void drop_segment(struct memory *memory, struct span span)
{
    for (size_t i = 0; i < memory->block_count; i++)
        cr_assert(memory->blocks[i].at + memory->blocks[i].bytes <= span.at ||
                      span.at + span.bytes <= memory->blocks[i].at,
                  "a segment goes under a block");
    for (size_t i = 0; i < memory->segment_count; i++) {
        const struct span s = memory->segments[i];
        if (span.at < s.at || span.at + span.bytes > s.at + s.bytes)
            continue;
        memory->segments[i] = memory->segments[--memory->segment_count];
        if (span.at > s.at)
            add_segment(memory, (struct span){s.at, span.at - s.at, false});
        const int64_t end = span.at + span.bytes;
        if (end < s.at + s.bytes)
            add_segment(memory, (struct span){end, s.at + s.bytes - end, false});
        return;
    }
    cr_assert_fail("a segment that is not there");
}

/* One event, or what it did is undone. */
static void play(struct memory *memory, const struct pickle_value *event, bool back)
{
    const char *action = pickle_text(event, "action");
    const struct span span = {strcmp(action, "oom") ? pickle_number(event, "addr") : 0,
                              pickle_number(event, "size"), false};
    const bool mapped = !strcmp(action, "segment_map") || !strcmp(action, "segment_alloc");
    if (mapped || !strcmp(action, "segment_unmap") || !strcmp(action, "segment_free")) {
        (mapped != back ? add_segment : drop_segment)(memory, span);
    } else if (!strcmp(action, "alloc")) {
        if (back)
            drop_block(memory, span.at);
        else
            add_block(memory, span);
    } else if (!strcmp(action, "free_requested")) {
        struct span *block = find_block(memory, span.at);
        cr_assert(block && block->pending == back && block->bytes == span.bytes);
        block->pending = !back;
    } else if (!strcmp(action, "free_completed")) {
        if (back)
            add_block(memory, (struct span){span.at, span.bytes, true});
        else
            drop_block(memory, span.at);
    } else {
        cr_assert(!strcmp(action, "oom") || !strcmp(action, "rollback"), "%s", action);
    }
}

/* What the segments say is there now. */
static struct memory memory_of(const struct pickle_value *snapshot)
{
    struct memory memory = memory_make();
    const struct pickle_value *segments = pickle_list(snapshot, "segments");
    for (size_t i = 0; i < segments->count; i++) {
        const struct pickle_value *s = segments->items[i];
        int64_t at = pickle_number(s, "address");
        add_segment(&memory, (struct span){at, pickle_number(s, "total_size"), false});
        const struct pickle_value *blocks = pickle_list(s, "blocks");
        for (size_t k = 0; k < blocks->count; k++) {
            const struct pickle_value *b = blocks->items[k];
            const char *state = pickle_text(b, "state");
            cr_assert_eq(pickle_number(b, "address"), at, "the blocks tile the segment");
            if (strcmp(state, "inactive"))
                add_block(&memory, (struct span){at, pickle_number(b, "size"),
                                                 !strcmp(state, "active_pending_free")});
            at += pickle_number(b, "size");
        }
        cr_assert_eq(at, pickle_number(s, "address") + pickle_number(s, "total_size"));
    }
    return memory;
}

static bool has(const struct span *spans, size_t count, const struct span *span)
{
    for (size_t i = 0; i < count; i++)
        if (spans[i].at == span->at && spans[i].bytes == span->bytes &&
            spans[i].pending == span->pending)
            return true;
    return false;
}

static void assert_same(const struct memory *a, const struct memory *b)
{
    cr_assert_eq(a->segment_count, b->segment_count);
    cr_assert_eq(a->block_count, b->block_count);
    for (size_t i = 0; i < a->segment_count; i++)
        cr_assert(has(b->segments, b->segment_count, &a->segments[i]));
    for (size_t i = 0; i < a->block_count; i++)
        cr_assert(has(b->blocks, b->block_count, &a->blocks[i]));
}

static const struct pickle_value *events_of(const struct pickle_value *snapshot)
{
    const struct pickle_value *traces = pickle_list(snapshot, "device_traces");
    cr_assert_eq(traces->count, 1);
    return traces->items[0];
}

/* ---- the tests ---- */

static const rebatch_pool_options *options_with(uint32_t events)
{
    static rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.events = events;
    return &options;
}

/* What is written into a pickle, and read again. */
static const uint64_t pickled_numbers[] = {0,
                                           1,
                                           255,
                                           256,
                                           65535,
                                           65536,
                                           INT32_MAX,
                                           UINT64_C(1) << 31,
                                           UINT32_MAX,
                                           INT64_C(1) << 39,
                                           INT64_C(1) << 47,
                                           INT64_C(1) << 55,
                                           INT64_MAX,
                                           UINT64_C(1) << 63,
                                           UINT64_MAX};
static const int64_t pickled_negatives[] = {
    -1, -128, -32769, INT32_MIN, INT32_MIN - INT64_C(1), INT64_MIN};
static const struct {
    const char *text, *read;
} pickled_texts[] = {
    {"", ""},
    {"caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80", "caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"},
    {"\xff"
     "a\xc3",
     "?a?"},                                               /* a byte that is none, one cut off */
    {"\xc0\xaf\xe0\x80\xaf\xf0\x80\x80\xaf", "?????????"}, /* longer than needed */
    {"\xed\xa0\x80\xf4\x90\x80\x80", "???????"}};          /* a surrogate, beyond the end */

static void write_values(struct rbi_sink *sink)
{
    rbi_pickle_begin(sink);
    rbi_pickle_begin_dict(sink);
    rbi_pickle_text(sink, "list");
    rbi_pickle_list(sink);
    for (size_t i = 0; i < sizeof pickled_numbers / sizeof *pickled_numbers; i++) {
        rbi_pickle_unsigned(sink, pickled_numbers[i]);
        rbi_pickle_append(sink);
    }
    for (size_t i = 0; i < sizeof pickled_negatives / sizeof *pickled_negatives; i++) {
        rbi_pickle_integer(sink, pickled_negatives[i]);
        rbi_pickle_append(sink);
    }
    for (size_t i = 0; i < sizeof pickled_texts / sizeof *pickled_texts; i++) {
        rbi_pickle_text(sink, pickled_texts[i].text);
        rbi_pickle_keep(sink, i % 2 ? 255 + (uint32_t)i : (uint32_t)i);
        rbi_pickle_append(sink);
        rbi_pickle_again(sink, i % 2 ? 255 + (uint32_t)i : (uint32_t)i);
        rbi_pickle_append(sink);
    }
    rbi_pickle_text(sink, "pair");
    rbi_pickle_bool(sink, true);
    rbi_pickle_float(sink, -0.1);
    rbi_pickle_pair(sink);
    rbi_pickle_text(sink, "empty");
    rbi_pickle_begin_dict(sink);
    rbi_pickle_end_dict(sink);
    rbi_pickle_end_dict(sink);
    rbi_pickle_end(sink);
}

static void check_values(const struct pickle_value *read)
{
    const struct pickle_value *const *at =
        (const struct pickle_value *const *)pickle_list(read, "list")->items;
    for (size_t i = 0; i < sizeof pickled_numbers / sizeof *pickled_numbers; i++, at++) {
        cr_expect_eq((uint64_t)(*at)->number, pickled_numbers[i]);
        cr_expect_eq((*at)->is_huge, pickled_numbers[i] > INT64_MAX);
    }
    for (size_t i = 0; i < sizeof pickled_negatives / sizeof *pickled_negatives; i++, at++)
        cr_expect(!(*at)->is_huge && (*at)->number == pickled_negatives[i]);
    for (size_t i = 0; i < sizeof pickled_texts / sizeof *pickled_texts; i++, at += 2) {
        cr_expect_str_eq(at[0]->text, pickled_texts[i].read);
        cr_expect(at[0] == at[1]);
    }
    const struct pickle_value *pair = pickle_list(read, "pair");
    cr_expect(pair->is_tuple && pair->count == 2 && pair->items[0]->number == 1);
    cr_expect(pair->items[1]->real <= -0.1 && pair->items[1]->real >= -0.1);
    cr_expect_eq(pickle_get(read, "empty")->count, 0);
}

/* Numbers, texts and references come back as they were. */
Test(pool_snapshot, a_pickle_reads_back)
{
    struct bytes bytes = {NULL, 0, 0, 0, 0};
    struct rbi_sink sink = {.write = collect, .user = &bytes};
    write_values(&sink);
    cr_assert_eq(collect(sink.buffer, sink.length, &bytes), REBATCH_OK);
    check_values(pickle_read(bytes.data, bytes.size));
    pickle_free();
    free(bytes.data);
}

static void check_block(rebatch_pool *pool, const struct pickle_value *block)
{
    const char *state = pickle_text(block, "state");
    const struct pickle_value *frames = pickle_list(block, "frames");
    const struct rbi_block *b =
        rbi_block_around(&pool->heap, (const void *)(uintptr_t)pickle_number(block, "address"));
    cr_assert_not_null(b);
    cr_assert_eq(pickle_number(block, "stream"), (int64_t)(uintptr_t)rbi_stream_of(b)->stream);
    const bool live = b->state == RBI_BLOCK_LIVE || b->state == RBI_BLOCK_DEFERRED;
    cr_assert_str_eq(state, live                            ? "active_allocated"
                            : b->state == RBI_BLOCK_PENDING ? "active_pending_free"
                                                            : "inactive");
    cr_assert_eq(frames->count, !strcmp(state, "inactive") ? 0 : 1);
    if (live)
        cr_assert_eq(pickle_number(block, "requested_size"), (int64_t)b->requested_bytes);
    if (frames->count == 0)
        return;
    static const char *const names[TAGS] = {"untagged", "weights", "a \"quoted\", tag",
                                            "caf\xc3\xa9 ?"};
    cr_assert_str_eq(pickle_text(frames->items[0], "name"), names[b->tag]);
    cr_assert_str_eq(pickle_text(frames->items[0], "filename"), "rebatch");
    cr_assert_eq(pickle_number(frames->items[0], "line"), 0);
}

/* The sums of the segments, as `python -m torch.cuda._memory_viz stats` adds them up. */
static void check_sums(const struct busy *b, const struct pickle_value *snapshot, bool plain)
{
    const rebatch_pool_stats stats = stats_of(b->rig.pool);
    const struct pickle_value *segments = pickle_list(snapshot, "segments");
    int64_t total = 0, allocated = 0, requested = 0, pending = 0;
    for (size_t i = 0; i < segments->count; i++) {
        const struct pickle_value *s = segments->items[i];
        const struct pickle_value *blocks = pickle_list(s, "blocks");
        int64_t live = 0, asked = 0, waiting = 0;
        for (size_t k = 0; k < blocks->count; k++) {
            check_block(b->rig.pool, blocks->items[k]);
            const char *state = pickle_text(blocks->items[k], "state");
            const int64_t size = pickle_number(blocks->items[k], "size");
            live += strcmp(state, "active_allocated") ? 0 : size;
            waiting += strcmp(state, "active_pending_free") ? 0 : size;
            asked += pickle_number(blocks->items[k], "requested_size");
        }
        cr_assert_eq(pickle_number(s, "allocated_size"), live);
        cr_assert_eq(pickle_number(s, "active_size"), live + waiting);
        cr_assert_eq(pickle_number(s, "requested_size"), asked);
        cr_assert_eq(pickle_number(s, "device"), 0);
        cr_assert_eq(pickle_number(s, "stream"), 0);
        cr_assert_eq(pickle_get(s, "is_expandable")->number, !plain);
        cr_assert_eq(pickle_list(s, "frames")->count, 0);
        cr_assert(strstr("large small", pickle_text(s, "segment_type")));
        cr_assert_eq(pickle_list(s, "segment_pool_id")->count, 2);
        total += pickle_number(s, "total_size");
        allocated += live;
        requested += asked;
        pending += waiting;
    }
    const struct pickle_value *ours = pickle_get(snapshot, "rebatch");
    const struct pickle_value *statistics = pickle_get(ours, "statistics");
    cr_assert_eq((uint64_t)allocated, stats.live_bytes);
    cr_assert_eq((uint64_t)(requested - pending), stats.requested_bytes);
    cr_assert_eq((uint64_t)(total + pickle_number(ours, "spare_bytes")), stats.reserved_bytes);
#define SAME(name, unit, what) cr_assert_eq((uint64_t)pickle_number(statistics, #name), stats.name);
    REBATCH_POOL_STATISTICS(SAME)
#undef SAME
    const struct pickle_value *tags = pickle_list(ours, "tags");
    cr_assert_eq(tags->count, TAGS);
    for (rebatch_tag t = 0; t < TAGS; t++) {
        rebatch_tag_usage usage;
        cr_assert_eq(rebatch_pool_get_tag_usage(&usage, b->rig.pool, t), REBATCH_OK);
        cr_assert_eq((uint64_t)pickle_number(tags->items[t], "live_bytes"), usage.live_bytes);
        cr_assert_eq((uint64_t)pickle_number(tags->items[t], "peak_bytes"), usage.peak_bytes);
        cr_assert_eq((uint64_t)pickle_number(tags->items[t], "at_peak_bytes"), usage.at_peak_bytes);
    }
}

/* Segments and blocks are those of the pool, and their sums its statistics. */
Test(pool_snapshot, segments_and_blocks_are_those_of_the_pool)
{
    for (int plain = 0; plain < 2; plain++) {
        rebatch_pool_options options = *options_with(0);
        struct busy b = busy_open((uint64_t)(1 + plain), &options, plain);
        for (int i = 0; i < 20; i++) {
            work(&b, 100);
            const struct pickle_value *snapshot = snap_pickle(b.rig.pool);
            check_sums(&b, snapshot, plain);
            cr_assert_eq(events_of(snapshot)->count, 0);
            pickle_free();
        }
        busy_close(&b);
    }
}

/* All events since the pool was made, played one after the other, give what is there. */
Test(pool_snapshot, events_played_forward_give_what_is_there)
{
    for (int plain = 0; plain < 2; plain++) {
        struct busy b = busy_open((uint64_t)(3 + plain), options_with(20000), plain);
        work(&b, 3000);
        const struct pickle_value *snapshot = snap_pickle(b.rig.pool);
        const struct pickle_value *events = events_of(snapshot);
        struct memory played = memory_make();
        size_t frees = 0, pending = 0;
        for (size_t i = 0; i < events->count; i++) {
            play(&played, events->items[i], false);
            const char *action = pickle_text(events->items[i], "action");
            frees += !strcmp(action, "free_completed");
            pending += !strcmp(action, "free_requested") &&
                       strcmp(pickle_text(events->items[i + 1], "action"), "free_completed") != 0;
        }
        struct memory there = memory_of(snapshot);
        assert_same(&played, &there);
        cr_assert(frees > (is_slow() ? 200 : 1000) && pending > 10 && there.block_count > 10,
                  "%zu %zu", frees, pending);
        memory_free(&played);
        memory_free(&there);
        busy_close(&b);
    }
}

/* However few events are kept, the viewer can go back through them from what is there. */
Test(pool_snapshot, events_played_back_undo_what_is_there)
{
    static const uint32_t kept[] = {1, 2, 7, 100, 1000};
    for (size_t k = 0; k < 10; k++) {
        struct busy b = busy_open(5, options_with(kept[k % 5]), k >= 5);
        for (int round = 0; round < 8; round++) {
            work(&b, 250);
            const struct pickle_value *snapshot = snap_pickle(b.rig.pool);
            const struct pickle_value *events = events_of(snapshot);
            cr_assert_geq(events->count, 1);
            struct memory memory = memory_of(snapshot);
            for (size_t i = events->count; i-- > 0;)
                play(&memory, events->items[i], true);
            memory_free(&memory);
            pickle_free();
        }
        busy_close(&b);
    }
}

/* The time is that of the clock on the wall, and never goes back; an OOM says what was free. */
Test(pool_snapshot, events_have_their_time_and_an_oom_what_was_free)
{
    struct rig rig = rig_open(8, options_with(100));
    rebatch_tag tag;
    cr_assert_eq(rebatch_pool_tag(&tag, rig.pool, "logits"), REBATCH_OK);
    (void)take(rig.pool, PAGE);
    void *pointer;
    cr_assert_eq(rebatch_pool_alloc(&pointer, rig.pool, 8 * PAGE, NULL, tag), REBATCH_OOM);
    const struct pickle_value *snapshot = snap_pickle(rig.pool);
    const struct pickle_value *events = events_of(snapshot);
    const int64_t now = (int64_t)time(NULL) * 1000000;
    int64_t last = 0;
    for (size_t i = 0; i < events->count; i++) {
        const int64_t at = pickle_number(events->items[i], "time_us");
        cr_assert(at >= last && at > now - 60000000 && at < now + 60000000);
        last = at;
    }
    const struct pickle_value *oom = events->items[events->count - 1];
    cr_assert_str_eq(pickle_text(oom, "action"), "oom");
    cr_assert_eq(pickle_number(oom, "device_free"), 7 * PAGE);
    cr_assert_eq(pickle_number(oom, "size"), 8 * PAGE);
    cr_assert_str_eq(pickle_text(pickle_list(oom, "frames")->items[0], "name"), "logits");
    pickle_free();
    rig_close(&rig);
}

static rebatch_status second_gpu(void *self, int *out)
{
    (void)self;
    *out = 1;
    return REBATCH_OK;
}

/* The viewer asks for a device's events by the device's number. */
Test(pool_snapshot, segments_and_events_are_those_of_the_devices_number)
{
    static struct rbi_device_ops ops;
    struct rig rig = rig_open(8, options_with(10));
    const struct rbi_device_ops *const host = rig.device->ops;
    ops = *host;
    ops.ordinal = second_gpu;
    rig.device->ops = &ops;
    (void)take(rig.pool, 1);
    const struct pickle_value *snapshot = snap_pickle(rig.pool);
    cr_assert_eq(pickle_number(pickle_list(snapshot, "segments")->items[0], "device"), 1);
    const struct pickle_value *traces = pickle_list(snapshot, "device_traces");
    cr_assert(traces->count == 2 && traces->items[0]->count == 0 && traces->items[1]->count == 2);
    pickle_free();
    rig.device->ops = host;
    rig_close(&rig);
}

/* The settings stand where PyTorch has its own. */
Test(pool_snapshot, settings_are_in_it)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    struct rig rig = rig_open(8, &options);
    const struct pickle_value *s = pickle_get(snap_pickle(rig.pool), "allocator_settings");
    cr_assert_eq(pickle_number(s, "max_split_size"), -1);
    cr_assert(pickle_get(s, "garbage_collection_threshold")->real <= 0);
    cr_assert_eq(pickle_get(s, "expandable_segments")->number, 1);
    cr_assert_eq(pickle_get(s, "roundup_power2_divisions")->count, 0);
    rig_close(&rig);
    options.rounding_divisions = 8;
    rig = rig_open_plain(8, &options);
    s = pickle_get(snap_pickle(rig.pool), "allocator_settings");
    cr_assert_eq(pickle_number(s, "max_split_size"), -1);
    cr_assert_eq(pickle_get(s, "expandable_segments")->number, 0);
    cr_assert_eq(pickle_get(s, "roundup_power2_divisions")->count, 32);
    cr_assert_eq(pickle_number(pickle_get(s, "roundup_power2_divisions"), "32768"), 8);
    pickle_free();
    rig_close(&rig);
}

/* ---- CSV ---- */

enum { FIELDS = 9 };

/* The fields of a line; gives the next line. A quoted field stays without its quotes. */
static char *split(char *line, char *fields[FIELDS])
{
    for (size_t i = 0; i < FIELDS; i++) {
        char *to = line;
        fields[i] = line;
        const bool quoted = *line == '"';
        line += quoted;
        for (; quoted ? line[0] != '"' || line[1] == '"' : *line != ',' && *line != '\n'; line++) {
            cr_assert(*line != '\0');
            line += quoted && *line == '"';
            *to++ = *line;
        }
        line += quoted;
        cr_assert(*line == (i + 1 < FIELDS ? ',' : '\n'), "field %zu ends in '%c'", i, *line);
        line++;
        *to = '\0';
    }
    return line;
}

/* A line a block; together they are what is reserved. */
Test(pool_snapshot, blocks_as_csv_add_up)
{
    rebatch_pool_options options = *options_with(0);
    struct busy b = busy_open(6, &options, false);
    work(&b, 2000);
    const rebatch_scope scope = begin(b.rig.pool);
    void *old = b.blocks[0] ? b.blocks[0] : b.blocks[1];
    (void)rebatch_pool_free(b.rig.pool, old); /* is deferred */
    (void)scope;
    struct bytes bytes = snap(b.rig.pool, REBATCH_SNAPSHOT_BLOCKS_CSV);
    char *fields[FIELDS];
    char *line = split((char *)bytes.data, fields);
    cr_assert_str_eq(fields[7], "tag");
    cr_assert_str_eq(fields[8], "allocation");
    uint64_t reserved = 0, live = 0, requested = 0, deferred = 0, tagged = 0;
    for (; *line;) {
        line = split(line, fields);
        const uint64_t size = strtoull(fields[3], NULL, 10);
        const bool is_live = !strcmp(fields[5], "live") || !strcmp(fields[5], "deferred");
        cr_assert_eq(*fields[8] != '\0', is_live, "%s has number '%s'", fields[5], fields[8]);
        reserved += size;
        requested += strtoull(fields[4], NULL, 10);
        deferred += strcmp(fields[5], "deferred") ? 0 : size;
        live += is_live ? size : 0;
        tagged += strcmp(fields[7], "a \"quoted\", tag") ? 0 : size;
    }
    const rebatch_pool_stats stats = stats_of(b.rig.pool);
    rebatch_tag_usage usage;
    cr_assert_eq(rebatch_pool_get_tag_usage(&usage, b.rig.pool, b.tags[2]), REBATCH_OK);
    cr_assert_eq(reserved, stats.reserved_bytes);
    cr_assert_eq(live, stats.live_bytes);
    cr_assert_eq(requested, stats.requested_bytes);
    cr_assert(deferred > 0 && deferred == stats.deferred_bytes);
    cr_assert_geq(tagged, usage.live_bytes); /* pending ones have their tag too */
    cr_assert_gt(usage.live_bytes, 0);
    free(bytes.data);
    cr_assert_eq(rebatch_scope_commit(b.rig.pool, scope), REBATCH_OK);
    busy_close(&b);
}

/* A line an event, as many as are kept. */
Test(pool_snapshot, events_as_csv_are_the_last_ones)
{
    struct rig rig = rig_open(8, options_with(3));
    const rebatch_scope scope = begin(rig.pool);
    char *a = take(rig.pool, 700);
    cr_assert_eq(rebatch_scope_rollback(rig.pool, scope), REBATCH_OK);
    void *pointer;
    cr_assert_eq(rebatch_pool_alloc(&pointer, rig.pool, 9 * PAGE, NULL, 0), REBATCH_OOM);
    struct bytes bytes = snap(rig.pool, REBATCH_SNAPSHOT_EVENTS_CSV);
    char *fields[FIELDS];
    char *line = split((char *)bytes.data, fields);
    cr_assert_str_eq(fields[2], "action");
    line = split(line, fields);
    cr_assert_str_eq(fields[0], "2");
    cr_assert_str_eq(fields[2], "free");
    cr_assert_eq(strtoull(fields[3], NULL, 16), (uintptr_t)a);
    cr_assert_str_eq(fields[4], "1024");
    cr_assert_str_eq(fields[6], "untagged");
    line = split(line, fields);
    cr_assert_str_eq(fields[2], "rollback");
    cr_assert_str_eq(fields[8], "1");
    line = split(line, fields);
    cr_assert_str_eq(fields[2], "oom");
    cr_assert_eq(strtoull(fields[4], NULL, 10), 9 * PAGE);
    cr_assert_eq(strtoull(fields[7], NULL, 10), 7 * PAGE);
    cr_assert_eq(*line, '\0');
    free(bytes.data);
    rig_close(&rig);
}

/* ---- where it goes ---- */

/* Memory that is neither a block's nor mapped is there too: what the device did not unmap. */
Test(pool_snapshot, quarantined_memory_is_in_it)
{
    rebatch_device *host, *fault;
    rebatch_pool *pool;
    cr_assert_eq(rebatch_device_open_host(&host, 16 * PAGE, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_device_open_fault(&fault, host, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&pool, fault, options_with(50)), REBATCH_OK);
    give(pool, take(pool, 4 * PAGE));
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    plan.calls = REBATCH_FAULT_UNMAP;
    plan.nth = 2;
    plan.status = REBATCH_E_DEVICE;
    cr_assert_eq(rebatch_fault_arm(fault, &plan), REBATCH_OK);
    (void)rebatch_pool_trim(pool, 0, NULL);
    /* And mapping fails on the way, with one that is not unmapped again. */
    void *pointer;
    plan.calls = REBATCH_FAULT_ACCESS | REBATCH_FAULT_UNMAP;
    plan.nth = 1;
    plan.times = 2;
    cr_assert_eq(rebatch_fault_arm(fault, &plan), REBATCH_OK);
    cr_assert_neq(rebatch_pool_alloc(&pointer, pool, 6 * PAGE, NULL, 0), REBATCH_OK);
    cr_assert_eq(rebatch_fault_arm(fault, NULL), REBATCH_OK);
    cr_assert_geq(stats_of(pool).quarantined_bytes, 2 * PAGE);
    assert_valid(pool);
    const struct pickle_value *snapshot = snap_pickle(pool);
    struct memory there = memory_of(snapshot);
    struct memory played = memory_make();
    const struct pickle_value *events = events_of(snapshot);
    for (size_t i = 0; i < events->count; i++)
        play(&played, events->items[i], false);
    assert_same(&played, &there);
    int64_t total = pickle_number(pickle_get(snapshot, "rebatch"), "spare_bytes");
    for (size_t i = 0; i < there.segment_count; i++)
        total += there.segments[i].bytes;
    cr_assert_eq((uint64_t)total, stats_of(pool).reserved_bytes);
    memory_free(&there);
    memory_free(&played);
    pickle_free();
    struct bytes bytes = snap(pool, REBATCH_SNAPSHOT_BLOCKS_CSV);
    cr_assert(strstr((char *)bytes.data, ",quarantined,"));
    free(bytes.data);
    rebatch_pool_destroy(pool);
    rebatch_device_close(fault);
    rebatch_device_close(host);
}

/* What `write` answers ends the writing and is the answer. */
Test(pool_snapshot, a_failing_write_ends_it)
{
    struct busy b = busy_open(1, options_with(1000), false);
    work(&b, 1000);
    for (int format = 0; format < 3; format++) {
        struct bytes bytes = snap(b.rig.pool, (rebatch_snapshot_format)format);
        const size_t calls = bytes.calls;
        free(bytes.data);
        cr_assert_geq(calls, 2);
        for (size_t n = 1; n <= calls; n++) {
            struct bytes part = {NULL, 0, 0, 0, n};
            cr_assert_eq(rebatch_pool_write_snapshot(b.rig.pool, (rebatch_snapshot_format)format,
                                                     collect, &part),
                         REBATCH_E_USER + 7);
            free(part.data);
        }
    }
    busy_close(&b);
}

/* A device on which all work is done at once, so that nothing depends on when. */
static struct rig rig_open_dry(const rebatch_pool_options *options)
{
    struct rig rig = {NULL, NULL};
    cr_assert_eq(rebatch_device_open_dry(&rig.device, 80 * PAGE, PAGE), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&rig.pool, rig.device, options), REBATCH_OK);
    return rig;
}

/* Nothing changes in the pool: what comes after is the same with and without snapshots. */
Test(pool_snapshot, a_snapshot_changes_nothing)
{
    struct busy a = busy_make(2, rig_open_dry(options_with(100)));
    struct busy b = busy_make(2, rig_open_dry(options_with(100)));
    for (int round = 0; round < 40; round++) {
        work(&a, 100);
        work(&b, 100);
        for (int format = 0; format < 3; format++)
            free(snap(a.rig.pool, (rebatch_snapshot_format)format).data);
        const rebatch_pool_stats x = stats_of(a.rig.pool), y = stats_of(b.rig.pool);
        cr_assert(memcmp(&x, &y, sizeof x) == 0);
        for (size_t i = 0; i < BLOCKS; i++) {
            const struct rbi_block *p = rbi_block_around(&a.rig.pool->heap, a.blocks[i]);
            const struct rbi_block *q = rbi_block_around(&b.rig.pool->heap, b.blocks[i]);
            cr_assert_eq(p != NULL, q != NULL);
            cr_assert(!p || (p->range->number == q->range->number &&
                             p->address - p->range->address == q->address - q->range->address));
        }
    }
    busy_close(&a);
    busy_close(&b);
}

/* Into a file, and Python reads it where there is one. */
Test(pool_snapshot, a_file_has_it_and_python_reads_it)
{
    struct busy b = busy_open(4, options_with(5000), false);
    work(&b, 1500);
    cr_assert_eq(rebatch_pool_save_snapshot(b.rig.pool, REBATCH_SNAPSHOT_PICKLE, "s.pickle"),
                 REBATCH_OK, "%s", rebatch_last_error());
    config_write("s.py",
                 "import pickle, sys\n"
                 "s = pickle.load(open('s.pickle', 'rb'))\n"
                 "blocks = [b for g in s['segments'] for b in g['blocks']]\n"
                 "live = sum(b['size'] for b in blocks if b['state'] == 'active_allocated')\n"
                 "assert live == s['rebatch']['statistics']['live_bytes']\n"
                 "assert sum(b['size'] for b in blocks) == sum(g['total_size'] for g in "
                 "s['segments'])\n"
                 "assert all(type(g['segment_pool_id']) is tuple for g in s['segments'])\n"
                 "assert type(s['allocator_settings']['garbage_collection_threshold']) is float\n"
                 "actions = {e['action'] for e in s['device_traces'][0]}\n"
                 "assert {'alloc', 'free_requested', 'free_completed', 'segment_map'} <= actions\n"
                 "names = {f['name'] for b in blocks for f in b['frames']}\n"
                 "assert 'weights' in names and 'caf\\u00e9 ?' in names, names\n"
                 "print(live)\n");
    const char *stride = getenv("REBATCH_TEST_STRIDE"); /* a checker would look at Python too */
    if ((!stride || !strcmp(stride, "1")) && system("python3 -c pass >/dev/null 2>&1") == 0) {
        char want[32];
        (void)snprintf(want, sizeof want, "%ju\n", (uintmax_t)stats_of(b.rig.pool).live_bytes);
        cr_assert_eq(system("python3 s.py >out 2>error"), 0, "%s", config_read("error"));
        char *out = config_read("out");
        cr_assert_str_eq(out, want);
        free(out);
    }
    busy_close(&b);
}

/* What is wrong is said. */
Test(pool_snapshot, wrong_arguments_and_files_are_refused)
{
    struct rig rig = rig_open(8, NULL);
    struct bytes bytes = {NULL, 0, 0, 0, 0};
    assert_refused(rebatch_pool_write_snapshot(NULL, REBATCH_SNAPSHOT_PICKLE, collect, &bytes),
                   REBATCH_E_INVALID, "pool is NULL");
    assert_refused(rebatch_pool_write_snapshot(rig.pool, REBATCH_SNAPSHOT_PICKLE, NULL, NULL),
                   REBATCH_E_INVALID, "write is NULL");
    assert_refused(
        rebatch_pool_write_snapshot(rig.pool, (rebatch_snapshot_format)3, collect, &bytes),
        REBATCH_E_INVALID, "format is 3");
    cr_assert_eq(bytes.calls, 0);
    assert_refused(rebatch_pool_save_snapshot(NULL, REBATCH_SNAPSHOT_PICKLE, "x"),
                   REBATCH_E_INVALID, "pool is NULL");
    assert_refused(rebatch_pool_save_snapshot(rig.pool, REBATCH_SNAPSHOT_PICKLE, NULL),
                   REBATCH_E_INVALID, "path is NULL");
    assert_refused(rebatch_pool_save_snapshot(rig.pool, REBATCH_SNAPSHOT_PICKLE, "none/x"),
                   REBATCH_E_IO, "none/x cannot be written: No such file or directory");
    assert_refused(rebatch_pool_save_snapshot(rig.pool, (rebatch_snapshot_format)-1, "x"),
                   REBATCH_E_INVALID, "format is -1");
    cr_assert_neq(access("x", F_OK), 0, "a file although the call was wrong");
    assert_refused(rebatch_pool_save_snapshot(rig.pool, REBATCH_SNAPSHOT_PICKLE, "/dev/full"),
                   REBATCH_E_IO, "No space left on device");
    rig_close(&rig);
}
