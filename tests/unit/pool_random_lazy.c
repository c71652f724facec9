/* Holds the pool against a naive model over millions of random calls, on a device whose streams
 * lag: no two blocks overlap, none has memory that another stream's work may still use or that is
 * not mapped, memory is never taken from under work, every statistic is that of a naive count, an
 * OOM is one, and the same seed gives the same addresses.
 * Seeds: 101 on, one a run; 14 million calls, times REBATCH_TEST_SCALE. */
#include <stdlib.h>

#include "unit/lazy_device.h"
#include "unit/pool_count.h"
#include "unit/pool_help.h"

enum { MOST = 256, STREAMS = 4, LATE = 64, PAGES = 100 };

struct block {
    char *address;
    struct counted is;
    rebatch_stream stream;
    size_t at; /* its place in `all` */
};

/* How a run differs from others. */
struct kind {
    int calls;
    bool plain;      /* no virtual memory */
    bool tight;      /* requests are large for the device, limit and capacity change often */
    bool pressure;   /* a pressure callback gives up blocks */
    int threads;     /* more than 0: calls are made as by so many threads */
    bool undeclared; /* half of what uses blocks of another stream is not told to the pool */
    bool no_events;
    rebatch_pool_options options;
};

struct model {
    const struct kind *kind;
    rebatch_device *device;
    rebatch_pool *pool;
    rebatch_stream streams[STREAMS];
    uint64_t random;
    struct block blocks[MOST];
    struct block *spare[MOST], *all[MOST], *sorted[MOST]; /* sorted by address */
    size_t count;
    struct count counts;
    const void *late[LATE]; /* the last ones that were taken back and not given out again */
    size_t late_at;
    uint64_t hash;
    size_t limit, capacity;
};

static size_t below(struct model *m, size_t most)
{
    return (size_t)(draw(&m->random) % most);
}

/* Rounded up as rebatch_pool_options.rounding_divisions says: to steps of an octave. */
static size_t round_up(const struct model *m, size_t bytes)
{
    const size_t units = (bytes + UNIT - 1) / UNIT * UNIT;
    size_t octave = UNIT;
    while (octave * 2 <= units)
        octave *= 2;
    const size_t divisions = m->kind->options.rounding_divisions;
    const size_t step = divisions ? rbi_max(octave / divisions, UNIT) : UNIT;
    return (units + step - 1) / step * step;
}

/* ---- the model's blocks ---- */

/* How many blocks lie before `address`. */
static size_t rank(const struct model *m, const char *address)
{
    size_t low = 0, high = m->count;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (m->sorted[middle]->address < address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void model_add(struct model *m, const struct block *b)
{
    const size_t at = rank(m, b->address);
    cr_assert(at == 0 || m->sorted[at - 1]->address + m->sorted[at - 1]->is.rounded <= b->address);
    cr_assert(at == m->count || b->address + b->is.rounded <= m->sorted[at]->address);
    struct block *mine = m->spare[m->count];
    *mine = *b;
    mine->at = m->count;
    memmove(&m->sorted[at + 1], &m->sorted[at], (m->count - at) * sizeof *m->sorted);
    m->sorted[at] = mine;
    m->all[m->count++] = mine;
}

static void model_remove(struct model *m, struct block *b)
{
    const size_t at = rank(m, b->address);
    m->count--;
    memmove(&m->sorted[at], &m->sorted[at + 1], (m->count - at) * sizeof *m->sorted);
    m->all[b->at] = m->all[m->count];
    m->all[b->at]->at = b->at;
    m->spare[m->count] = b;
}

/* It is gone, taken back by a rollback or freed. */
static void model_drop(struct model *m, struct block *b, bool rolled_back)
{
    if (rolled_back)
        m->late[m->late_at++ % LATE] = b->address;
    model_remove(m, b);
}

/* ---- calls ---- */

static size_t draw_size(struct model *m)
{
    const size_t kind = below(m, 100);
    if (m->kind->tight)
        return below(m, kind < 40 ? 8 * KIB : kind < 80 ? 4 * PAGE : 40 * PAGE) + 1;
    return below(m, kind < 50 ? 4 * KIB : kind < 92 ? PAGE : 6 * PAGE) + 1;
}

/* Pages that no block in use touches. */
static size_t count_free_pages(const struct model *m)
{
    size_t taken = 0;
    uintptr_t end = 0; /* of the last page that was counted */
    for (size_t i = 0; i < m->count; i++) {
        const uintptr_t from = (uintptr_t)m->sorted[i]->address / PAGE;
        const uintptr_t to =
            ((uintptr_t)m->sorted[i]->address + m->sorted[i]->is.rounded - 1) / PAGE;
        const uintptr_t first = from > end ? from : end;
        taken += to + 1 > first ? to + 1 - first : 0;
        end = to + 1 > end ? to + 1 : end;
    }
    const size_t all = rbi_min(m->limit, m->capacity) / PAGE;
    return all > taken ? all - taken : 0;
}

/* Nothing would have served it: by the pool's own word, and, where no option keeps memory apart, as
 * there are not that many pages without a block in use. */
static void check_oom(struct model *m, const struct block *b)
{
    const rebatch_pool_options *o = &m->kind->options;
    rebatch_oom_report report;
    cr_assert_eq(rebatch_pool_last_oom(&report, m->pool), REBATCH_OK);
    cr_assert_eq(report.asked_bytes, b->is.bytes);
    m->counts.want.ooms++;
    if (o->may_wait)
        return; /* it may have been because the pool was not to wait */
    cr_assert_lt(report.would_fit_bytes, b->is.rounded);
    if (!m->kind->plain && o->caching != REBATCH_OFF && !o->headroom_bytes)
        cr_assert_lt(count_free_pages(m), (b->is.rounded + PAGE - 1) / PAGE,
                     "%zu bytes are refused, and %zu pages are free", b->is.bytes,
                     count_free_pages(m));
}

static void do_alloc(struct model *m)
{
    if (m->count == MOST)
        return;
    struct block b = {.is.bytes = draw_size(m)};
    b.is.tag = (rebatch_tag)below(m, COUNT_TAGS);
    b.is.rounded = round_up(m, b.is.bytes);
    const rebatch_stream stream = m->streams[below(m, STREAMS)];
    void *pointer;
    const rebatch_status status =
        rebatch_pool_alloc(&pointer, m->pool, b.is.bytes, stream, b.is.tag);
    if (status == REBATCH_OOM) {
        check_oom(m, &b);
        return;
    }
    cr_assert_eq(status, REBATCH_OK, "%s", rebatch_last_error());
    b.address = pointer;
    b.stream = stream;
    cr_assert_eq((uintptr_t)pointer % REBATCH_POOL_ALIGNMENT, 0);
    m->hash = (m->hash ^ (uintptr_t)pointer) * UINT64_C(0x100000001b3);
    lazy_check_fresh(stream, pointer, b.is.rounded);
    lazy_use(stream, pointer, b.is.rounded);
    for (size_t i = 0; i < LATE; i++)
        if (m->late[i] == pointer)
            m->late[i] = NULL;
    count_alloc(&m->counts, &b.is);
    model_add(m, &b);
}

static void free_block(struct model *m, struct block *b)
{
    give(m->pool, b->address);
    if (count_free(&m->counts, &b->is))
        model_drop(m, b, false);
}

static void do_free(struct model *m)
{
    if (m->count == 0)
        return;
    struct block *b = m->all[below(m, m->count)];
    if (b->is.deferred_in) {
        assert_refused(rebatch_pool_free(m->pool, b->address), REBATCH_E_INVALID, "freed already");
        return;
    }
    if (below(m, 64) == 0)
        assert_refused(rebatch_pool_free(m->pool, b->address + 1), REBATCH_E_INVALID, "1 bytes in");
    free_block(m, b);
}

static void do_late_free(struct model *m)
{
    const void *late = m->late[below(m, LATE)];
    if (!late)
        return;
    cr_assert_eq(rebatch_pool_free(m->pool, (void *)(uintptr_t)late), REBATCH_OK);
    m->counts.want.late_frees++;
}

static void do_commit(struct model *m)
{
    if (m->counts.depth == 0)
        return;
    count_commit(&m->counts, m->pool);
    for (size_t i = m->count; i-- > 0;)
        if (count_is_gone_by_commit(&m->counts, &m->all[i]->is))
            model_drop(m, m->all[i], false);
}

static void do_rollback(struct model *m)
{
    if (m->counts.depth == 0)
        return;
    count_rollback(&m->counts, m->pool, below(m, m->counts.depth));
    for (size_t i = m->count; i-- > 0;)
        if (count_is_gone_by_rollback(&m->counts, &m->all[i]->is))
            model_drop(m, m->all[i], true);
}

static void do_use_on(struct model *m)
{
    if (m->count == 0)
        return;
    const struct block *b = m->all[below(m, m->count)];
    const rebatch_stream stream = m->streams[below(m, STREAMS)];
    if (m->kind->undeclared && below(m, 2)) {
        lazy_read(stream, b->stream, b->address, b->is.rounded);
        return;
    }
    cr_assert_eq(rebatch_pool_use_on(m->pool, b->address, stream),
                 b->is.deferred_in ? REBATCH_E_INVALID : REBATCH_OK);
    if (!b->is.deferred_in)
        lazy_use(stream, b->address, b->is.rounded);
}

/* A stream goes, and another one comes, which may have the same handle. */
static void do_change_stream(struct model *m)
{
    rebatch_stream *stream = &m->streams[1 + below(m, STREAMS - 1)];
    rebatch_stream_destroy(m->device, *stream);
    cr_assert_eq(rebatch_stream_create(stream, m->device), REBATCH_OK);
}

static void do_change_room(struct model *m)
{
    const size_t least = m->kind->tight ? 30 : 60;
    if (below(m, 2)) {
        m->limit = below(m, 8) ? (least + below(m, PAGES)) * PAGE : 0;
        cr_assert_eq(rebatch_pool_set_limit(m->pool, m->limit), REBATCH_OK);
        m->limit = m->limit ? m->limit : SIZE_MAX;
    } else {
        m->capacity = (least + below(m, PAGES + 1 - least)) * PAGE;
        cr_assert_eq(rebatch_device_set_capacity(m->device, m->capacity), REBATCH_OK);
        if (below(m, 2))
            cr_assert_eq(rbi_pool_keep_headroom(m->pool), REBATCH_OK);
    }
}

static void do_other(struct model *m)
{
    const size_t bytes = below(m, 20 * PAGE);
    const rebatch_stream stream = m->streams[below(m, STREAMS)];
    switch (below(m, 8)) {
    case 0:
    case 1:
        cr_assert_eq(rebatch_pool_trim(m->pool, bytes, NULL), REBATCH_OK);
        break;
    case 2:
        m->counts.want.ooms += rebatch_pool_reserve(m->pool, bytes, stream) == REBATCH_OOM;
        break;
    case 3:
        (void)rbi_pool_admit(m->pool, bytes, stream);
        break;
    case 4:
        do_change_stream(m);
        break;
    default:
        do_change_room(m);
    }
}

/* Gives up to two blocks that can be freed at once; a free of an older one would wait. */
static size_t give_up(size_t wanted_bytes, void *user)
{
    struct model *m = user;
    size_t given = 0;
    (void)wanted_bytes;
    for (int n = 0; n < 2 && m->count > 0; n++) {
        struct block *b = m->all[below(m, m->count)];
        if (b->is.deferred_in || count_must_wait(&m->counts, &b->is))
            continue;
        given += b->is.rounded;
        free_block(m, b);
    }
    return given;
}

/* ---- running ---- */

static void compare(const struct model *m)
{
    count_compare(&m->counts, m->pool, 0);
}

static struct model *open_model(uint64_t seed, const struct kind *kind)
{
    struct model *m = calloc(1, sizeof *m);
    cr_assert_not_null(m);
    m->kind = kind;
    m->random = seed;
    m->limit = SIZE_MAX;
    m->capacity = PAGES * PAGE;
    m->device = lazy_open(m->capacity, PAGE, !kind->plain);
    lazy_set_events(!kind->no_events);
    cr_assert_eq(rebatch_pool_create(&m->pool, m->device, &kind->options), REBATCH_OK, "%s",
                 rebatch_last_error());
    for (size_t i = 0; i < MOST; i++)
        m->spare[i] = &m->blocks[i];
    for (int i = 1; i < STREAMS; i++)
        cr_assert_eq(rebatch_stream_create(&m->streams[i], m->device), REBATCH_OK);
    count_make_tags(m->pool);
    if (kind->pressure)
        cr_assert_eq(rebatch_pool_add_pressure(m->pool, give_up, m), REBATCH_OK);
    return m;
}

static void close_model(struct model *m)
{
    while (m->counts.depth)
        do_commit(m);
    while (m->count)
        free_block(m, m->all[0]);
    compare(m);
    assert_valid(m->pool);
    rebatch_pool_destroy(m->pool);
    for (int i = 1; i < STREAMS; i++)
        rebatch_stream_destroy(m->device, m->streams[i]);
    lazy_close(m->device);
    free(m);
}

static void call(struct model *m)
{
    size_t kind = below(m, 1024);
    if (m->kind->threads) {
        be_thread(1 + below(m, (size_t)m->kind->threads));
        if (kind >= 850 && kind < 903 && below(m, 16)) /* nearly all allocate or free */
            kind = below(m, 850);
    }
    if (kind < 470)
        do_alloc(m);
    else if (kind < 850)
        do_free(m);
    else if (kind < 875)
        count_begin(&m->counts, m->pool);
    else if (kind < 893)
        do_commit(m);
    else if (kind < 903)
        do_rollback(m);
    else if (kind < 920)
        do_late_free(m);
    else if (kind < 950)
        do_use_on(m);
    else if (kind < 1021)
        lazy_go_on(m->streams[below(m, STREAMS)], (unsigned)below(m, 9));
    else
        do_other(m);
}

/* What a run came to: its addresses, one after the other, and its statistics. */
struct outcome {
    uint64_t hash;
    rebatch_pool_stats stats;
};

static struct outcome run(uint64_t seed, const struct kind *kind, int calls)
{
    struct model *m = open_model(seed, kind);
    for (int n = 0; n < calls; n++) {
        call(m);
        if (n % 1024 == 0)
            assert_valid(m->pool);
        if (n % (kind->threads ? 512 : 64) == 1)
            compare(m);
    }
    const struct outcome outcome = {m->hash, stats_of(m->pool)};
    close_model(m);
    return outcome;
}

/* Slow kinds of run take a part. */
static int scaled(int calls)
{
    const char *scale = getenv("REBATCH_TEST_SCALE");
    const char *stride = getenv("REBATCH_TEST_STRIDE");
    const int part = stride && atoi(stride) > 1 ? calls / atoi(stride) : calls;
    return part * (scale ? atoi(scale) : 1);
}

/* The whole run, and its first tenth once more, which must be the same as it was. */
static void run_kind(uint64_t seed, const struct kind *kind)
{
    const int calls = scaled(kind->calls);
    const struct outcome whole = run(seed, kind, calls);
    cr_assert(whole.stats.allocations > 0 && whole.stats.ooms > 0 && whole.stats.rollbacks > 0 &&
              whole.stats.late_frees > 0);
    const struct outcome a = run(seed, kind, calls / 10);
    const struct outcome b = run(seed, kind, calls / 10);
    cr_assert_eq(a.hash, b.hash, "the same seed gives other addresses");
    cr_assert(memcmp(&a.stats, &b.stats, sizeof a.stats) == 0);
}

Test(pool_random, millions_of_calls)
{
    run_kind(101, &(struct kind){.calls = 6000000, .options = REBATCH_POOL_OPTIONS_INIT});
}

/* Memory is short: other streams' blocks, remapped pages, waiting, and a limit and a capacity
 * that change. */
Test(pool_random, many_calls_when_memory_is_short)
{
    run_kind(102,
             &(struct kind){.calls = 1200000, .tight = true, .options = REBATCH_POOL_OPTIONS_INIT});
}

/* And callbacks that give up blocks. */
Test(pool_random, many_calls_under_pressure)
{
    run_kind(103, &(struct kind){.calls = 600000,
                                 .tight = true,
                                 .pressure = true,
                                 .options = REBATCH_POOL_OPTIONS_INIT});
}

/* Every option that shapes the search. */
Test(pool_random, many_calls_with_options)
{
    struct kind kind = {.calls = 600000, .options = REBATCH_POOL_OPTIONS_INIT};
    kind.options.rounding_divisions = 8;
    kind.options.events = 16;
    run_kind(104, &kind);
    kind.tight = true;
    kind.calls = 200000;
    kind.options.headroom_bytes = 5 * PAGE + 1;
    run_kind(105, &kind);
}

Test(pool_random, many_calls_on_plain_allocations)
{
    struct kind kind = {.calls = 600000, .plain = true, .options = REBATCH_POOL_OPTIONS_INIT};
    run_kind(106, &kind);
    kind.tight = true;
    kind.calls = 200000;
    run_kind(107, &kind);
}

Test(pool_random, many_calls_without_caching)
{
    struct kind kind = {.calls = 600000, .options = REBATCH_POOL_OPTIONS_INIT};
    kind.options.caching = REBATCH_OFF;
    run_kind(108, &kind);
}

/* Streams read blocks of others without a word to the pool, and the program orders the owner. */
Test(pool_random, many_calls_with_readers_that_are_not_declared)
{
    struct kind kind = {.calls = 600000, .options = REBATCH_POOL_OPTIONS_INIT};
    kind.undeclared = true;
    run_kind(116, &kind);
    kind.plain = true;
    kind.calls = 200000;
    run_kind(117, &kind);
}

Test(pool_random, many_calls_with_such_readers_when_memory_is_short)
{
    struct kind kind = {.calls = 300000, .tight = true, .options = REBATCH_POOL_OPTIONS_INIT};
    kind.undeclared = true;
    run_kind(119, &kind);
    kind.no_events = true;
    run_kind(120, &kind);
    kind.plain = true;
    run_kind(121, &kind);
}

/* As while a graph is captured: one call of two must not wait. */
static bool now_and_then(void *user)
{
    uint64_t *calls = user;
    return ++*calls % 2 == 0;
}

Test(pool_random, many_calls_with_such_readers_where_the_pool_may_not_always_wait)
{
    uint64_t calls = 0;
    struct kind kind = {.calls = 300000, .tight = true, .options = REBATCH_POOL_OPTIONS_INIT};
    kind.undeclared = true;
    kind.options.may_wait = now_and_then;
    kind.options.may_wait_user = &calls;
    const struct outcome outcome = run(122, &kind, scaled(kind.calls));
    cr_assert(outcome.stats.allocations > 0 && outcome.stats.ooms > 0 && calls > 1000);
}

/* Threads that free each other's blocks. */
Test(pool_random, many_calls_of_threads)
{
    struct kind kind = {.calls = 1200000, .threads = 3, .options = REBATCH_POOL_OPTIONS_INIT};
    run_kind(111, &kind);
    kind.tight = true;
    kind.calls = 600000;
    run_kind(112, &kind);
    kind.pressure = true;
    kind.threads = 2;
    run_kind(113, &kind);
}

Test(pool_random, many_calls_of_threads_on_plain_allocations)
{
    struct kind kind = {
        .calls = 600000, .plain = true, .threads = 3, .options = REBATCH_POOL_OPTIONS_INIT};
    run_kind(114, &kind);
    kind.tight = true;
    kind.calls = 200000;
    run_kind(115, &kind);
}
