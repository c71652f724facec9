/* Holds the snapshot: its blocks, its events played forward and back as PyTorch's memory viewer
 * does, and where it goes. Seeds: 1 to 6. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "fault/fault_device.h"
#include "inspect/inspect.h"
#include "unit/config_files.h"
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

/* ---- what is written, read again ---- */

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

/* A line of blocks, or of events. */
struct row {
    char *fields[FIELDS];
};
enum { SEGMENT, SEGMENT_BYTES, ADDRESS, BYTES, REQUESTED, STATE, STREAM, TAG, ALLOCATION };
enum { NUMBER, TIME, ACTION, EVENT_ADDRESS, EVENT_BYTES, EVENT_STREAM, EVENT_TAG, FREE, TAKEN };

struct table {
    char *text;
    struct row *rows; /* without the head */
    size_t count;
};

static struct table read_table(rebatch_pool *pool, rebatch_snapshot_format format)
{
    struct table table = {(char *)snap(pool, format).data, NULL, 0};
    size_t lines = 1;
    for (const char *c = table.text; *c; c++)
        lines += *c == '\n';
    table.rows = calloc(lines, sizeof *table.rows);
    cr_assert_not_null(table.rows);
    for (char *line = split(table.text, table.rows[0].fields); *line;)
        line = split(line, table.rows[table.count++].fields);
    return table;
}

static void table_free(struct table *table)
{
    free(table->text);
    free(table->rows);
}

static int64_t number(const struct row *row, size_t field)
{
    return (int64_t)strtoull(row->fields[field], NULL, 0);
}

static bool is(const struct row *row, size_t field, const char *text)
{
    return strcmp(row->fields[field], text) == 0;
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
static void play(struct memory *memory, const struct row *event, bool back)
{
    const char *action = event->fields[ACTION];
    const struct span span = {number(event, EVENT_ADDRESS), number(event, EVENT_BYTES), false};
    const bool maps = is(event, ACTION, "map"), frees = is(event, ACTION, "free");
    if (maps || is(event, ACTION, "unmap")) {
        (maps != back ? add_segment : drop_segment)(memory, span);
    } else if (frees || is(event, ACTION, "alloc")) {
        if (frees != back)
            drop_block(memory, span.at);
        else
            add_block(memory, span);
    } else if (is(event, ACTION, "free_requested")) {
        struct span *block = find_block(memory, span.at);
        cr_assert(block && block->pending == back && block->bytes == span.bytes);
        block->pending = !back;
    } else if (is(event, ACTION, "free_completed")) {
        if (back)
            add_block(memory, (struct span){span.at, span.bytes, true});
        else
            drop_block(memory, span.at);
    } else {
        cr_assert(is(event, ACTION, "oom") || is(event, ACTION, "rollback"), "%s", action);
    }
}

/* What the blocks say is there now; they tile their segments. */
static struct memory memory_of(const struct table *blocks)
{
    struct memory memory = memory_make();
    int64_t segment = 0, at = 0, end = 0;
    for (size_t i = 0; i < blocks->count && *blocks->rows[i].fields[SEGMENT]; i++) {
        const struct row *b = &blocks->rows[i];
        if (number(b, SEGMENT) != segment) {
            cr_assert_eq(at, end);
            at = segment = number(b, SEGMENT);
            end = at + number(b, SEGMENT_BYTES);
            add_segment(&memory, (struct span){at, end - at, false});
        }
        cr_assert_eq(number(b, ADDRESS), at);
        if (!is(b, STATE, "free") && !is(b, STATE, "quarantined"))
            add_block(&memory, (struct span){at, number(b, BYTES), is(b, STATE, "pending")});
        at += number(b, BYTES);
    }
    cr_assert_eq(at, end);
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

/* ---- the tests ---- */

static const rebatch_pool_options *options_with(uint32_t events)
{
    static rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.events = events;
    return &options;
}

static void check_block(rebatch_pool *pool, const struct row *block)
{
    static const char *const names[TAGS] = {"untagged", "weights", "a \"quoted\", tag",
                                            "caf\xc3\xa9 \xff"};
    const struct rbi_block *b =
        rbi_block_around(&pool->heap, (const char *)(uintptr_t)number(block, ADDRESS));
    const bool live = b->state == RBI_BLOCK_LIVE || b->state == RBI_BLOCK_DEFERRED;
    cr_assert_eq((size_t)number(block, BYTES), b->bytes);
    cr_assert_eq(number(block, STREAM), (int64_t)(uintptr_t)rbi_stream_of(b)->stream);
    cr_assert_eq(number(block, REQUESTED), live ? (int64_t)b->requested_bytes : 0);
    cr_assert_eq(is(block, STATE, "live"), b->state == RBI_BLOCK_LIVE);
    cr_assert_eq(is(block, STATE, "deferred"), b->state == RBI_BLOCK_DEFERRED);
    cr_assert_eq(is(block, STATE, "pending"), b->state == RBI_BLOCK_PENDING);
    const bool has_tag = live || b->state == RBI_BLOCK_PENDING;
    cr_assert_str_eq(block->fields[TAG], has_tag ? names[b->tag] : "");
}

/* Segments and blocks are those of the pool, and their sums its statistics. */
Test(pool_snapshot, blocks_are_those_of_the_pool)
{
    for (int plain = 0; plain < 2; plain++) {
        rebatch_pool_options options = *options_with(0);
        struct busy b = busy_open((uint64_t)(1 + plain), &options, plain);
        for (int i = 0; i < 20; i++) {
            work(&b, 100);
            struct table blocks = read_table(b.rig.pool, REBATCH_SNAPSHOT_BLOCKS_CSV);
            struct memory memory = memory_of(&blocks);
            for (size_t k = 0; k < blocks.count && *blocks.rows[k].fields[SEGMENT]; k++)
                check_block(b.rig.pool, &blocks.rows[k]);
            memory_free(&memory);
            table_free(&blocks);
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
        struct table blocks = read_table(b.rig.pool, REBATCH_SNAPSHOT_BLOCKS_CSV);
        struct table events = read_table(b.rig.pool, REBATCH_SNAPSHOT_EVENTS_CSV);
        struct memory played = memory_make();
        size_t frees = 0, pending = 0;
        for (size_t i = 0; i < events.count; i++) {
            play(&played, &events.rows[i], false);
            frees += is(&events.rows[i], ACTION, "free");
            pending += is(&events.rows[i], ACTION, "free_requested");
        }
        struct memory there = memory_of(&blocks);
        assert_same(&played, &there);
        cr_assert(frees > (is_slow() ? 200 : 1000) && pending > 10 && there.block_count > 10,
                  "%zu %zu", frees, pending);
        memory_free(&played);
        memory_free(&there);
        table_free(&blocks);
        table_free(&events);
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
            struct table blocks = read_table(b.rig.pool, REBATCH_SNAPSHOT_BLOCKS_CSV);
            struct table events = read_table(b.rig.pool, REBATCH_SNAPSHOT_EVENTS_CSV);
            cr_assert_geq(events.count, 1);
            struct memory memory = memory_of(&blocks);
            for (size_t i = events.count; i-- > 0;)
                play(&memory, &events.rows[i], true);
            memory_free(&memory);
            table_free(&blocks);
            table_free(&events);
        }
        busy_close(&b);
    }
}

/* The time is that of the clock on the wall, and never goes back. */
Test(pool_snapshot, events_have_their_time)
{
    AUTO_RIG rig = rig_open(8, options_with(100));
    (void)take(rig.pool, PAGE);
    struct table events = read_table(rig.pool, REBATCH_SNAPSHOT_EVENTS_CSV);
    const int64_t now = (int64_t)time(NULL) * 1000000;
    int64_t last = 0;
    for (size_t i = 0; i < events.count; i++) {
        const int64_t at = number(&events.rows[i], TIME);
        cr_assert(at >= last && at > now - 60000000 && at < now + 60000000);
        last = at;
    }
    cr_assert_gt(last, 0);
    table_free(&events);
}

/* ---- sums, and the last events ---- */

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
    struct table blocks = read_table(b.rig.pool, REBATCH_SNAPSHOT_BLOCKS_CSV);
    uint64_t reserved = 0, live = 0, requested = 0, deferred = 0, tagged = 0;
    for (size_t i = 0; i < blocks.count; i++) {
        const struct row *block = &blocks.rows[i];
        const uint64_t size = (uint64_t)number(block, BYTES);
        const bool is_live = is(block, STATE, "live") || is(block, STATE, "deferred");
        cr_assert_eq(*block->fields[ALLOCATION] != '\0', is_live);
        reserved += size;
        requested += (uint64_t)number(block, REQUESTED);
        deferred += is(block, STATE, "deferred") ? size : 0;
        live += is_live ? size : 0;
        tagged += is(block, TAG, "a \"quoted\", tag") ? size : 0;
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
    table_free(&blocks);
    cr_assert_eq(rebatch_scope_commit(b.rig.pool, scope), REBATCH_OK);
    busy_close(&b);
}

/* A line an event, as many as are kept. */
Test(pool_snapshot, events_as_csv_are_the_last_ones)
{
    AUTO_RIG rig = rig_open(8, options_with(3));
    const rebatch_scope scope = begin(rig.pool);
    char *a = take(rig.pool, 700);
    cr_assert_eq(rebatch_scope_rollback(rig.pool, scope), REBATCH_OK);
    void *pointer;
    cr_assert_eq(rebatch_pool_alloc(&pointer, rig.pool, 9 * PAGE, NULL, 0), REBATCH_OOM);
    struct table events = read_table(rig.pool, REBATCH_SNAPSHOT_EVENTS_CSV);
    const struct row *e = events.rows;
    cr_assert_eq(events.count, 3);
    cr_assert(is(&e[0], NUMBER, "2") && is(&e[0], ACTION, "free"));
    cr_assert(is(&e[0], EVENT_BYTES, "1024") && is(&e[0], EVENT_TAG, "untagged"));
    cr_assert_eq((uintptr_t)number(&e[0], EVENT_ADDRESS), (uintptr_t)a);
    cr_assert(is(&e[1], ACTION, "rollback") && is(&e[1], TAKEN, "1"));
    cr_assert(is(&e[2], ACTION, "oom"));
    cr_assert_eq(number(&e[2], EVENT_BYTES), 9 * PAGE);
    cr_assert_eq(number(&e[2], FREE), 7 * PAGE);
    table_free(&events);
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
    struct table blocks = read_table(pool, REBATCH_SNAPSHOT_BLOCKS_CSV);
    struct table events = read_table(pool, REBATCH_SNAPSHOT_EVENTS_CSV);
    struct memory there = memory_of(&blocks);
    struct memory played = memory_make();
    for (size_t i = 0; i < events.count; i++)
        play(&played, &events.rows[i], false);
    assert_same(&played, &there);
    size_t total = 0, quarantined = 0;
    for (size_t i = 0; i < blocks.count; i++) {
        total += (size_t)number(&blocks.rows[i], BYTES);
        quarantined += is(&blocks.rows[i], STATE, "quarantined");
    }
    cr_assert_eq(total, stats_of(pool).reserved_bytes);
    cr_assert_gt(quarantined, 0);
    memory_free(&there);
    memory_free(&played);
    table_free(&blocks);
    table_free(&events);
    rebatch_pool_destroy(pool);
    rebatch_device_close(fault);
    rebatch_device_close(host);
}

/* What `write` answers ends the writing and is the answer. */
Test(pool_snapshot, a_failing_write_ends_it)
{
    struct busy b = busy_open(1, options_with(1000), false);
    work(&b, 1000);
    for (int format = 0; format < 2; format++) {
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
        for (int format = 0; format < 2; format++)
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

/* What is wrong is said. */
Test(pool_snapshot, wrong_arguments_and_files_are_refused)
{
    AUTO_RIG rig = rig_open(8, NULL);
    struct bytes bytes = {NULL, 0, 0, 0, 0};
    assert_refused(rebatch_pool_write_snapshot(NULL, REBATCH_SNAPSHOT_BLOCKS_CSV, collect, &bytes),
                   REBATCH_E_INVALID, "pool is NULL");
    assert_refused(rebatch_pool_write_snapshot(rig.pool, REBATCH_SNAPSHOT_BLOCKS_CSV, NULL, NULL),
                   REBATCH_E_INVALID, "write is NULL");
    assert_refused(
        rebatch_pool_write_snapshot(rig.pool, (rebatch_snapshot_format)2, collect, &bytes),
        REBATCH_E_INVALID, "format is 2");
    cr_assert_eq(bytes.calls, 0);
    assert_refused(rebatch_pool_save_snapshot(NULL, REBATCH_SNAPSHOT_BLOCKS_CSV, "x"),
                   REBATCH_E_INVALID, "pool is NULL");
    assert_refused(rebatch_pool_save_snapshot(rig.pool, REBATCH_SNAPSHOT_BLOCKS_CSV, NULL),
                   REBATCH_E_INVALID, "path is NULL");
    assert_refused(rebatch_pool_save_snapshot(rig.pool, REBATCH_SNAPSHOT_BLOCKS_CSV, "none/x"),
                   REBATCH_E_IO, "none/x cannot be written: No such file or directory");
    assert_refused(rebatch_pool_save_snapshot(rig.pool, (rebatch_snapshot_format)-1, "x"),
                   REBATCH_E_INVALID, "format is -1");
    cr_assert_neq(access("x", F_OK), 0, "a file although the call was wrong");
    assert_refused(rebatch_pool_save_snapshot(rig.pool, REBATCH_SNAPSHOT_BLOCKS_CSV, "/dev/full"),
                   REBATCH_E_IO, "No space left on device");
}
