/* Holds the whole pool against a naive model: random calls, nested scopes, streams, rollbacks.
 * Seeds: 1 to 8; each of 25,000 calls, times REBATCH_TEST_SCALE; 9 to 12. */
#include <stdlib.h>

#include "unit/pool_count.h"
#include "unit/pool_help.h"

enum { CALLS = 25000, MOST = 400, STREAMS = 3, LATE = 2000 };

struct model_block {
    unsigned char *address;
    struct counted is;
    unsigned char mark; /* what its first and last bytes are */
};

struct model {
    struct rig rig;
    rebatch_stream streams[STREAMS];
    uint64_t random;
    struct model_block blocks[MOST];
    size_t count;
    struct count counts;
    void *late[LATE]; /* taken back and not given out again */
    size_t late_count;
};

/* Enqueued: an earlier owner's work may still be under way on the stream. */
static void mark_block(const struct model *m, const struct model_block *b, rebatch_stream stream)
{
    const size_t edge = rbi_min(b->is.bytes, 64);
    cr_assert_eq(rebatch_fill(m->rig.device, b->address, b->mark, edge, stream), REBATCH_OK);
    cr_assert_eq(
        rebatch_fill(m->rig.device, b->address + b->is.bytes - edge, b->mark, edge, stream),
        REBATCH_OK);
}

static void check_mark(const struct model *m, const struct model_block *b)
{
    const size_t edge = rbi_min(b->is.bytes, 64);
    for (int i = 1; i < STREAMS; i++)
        cr_assert_eq(rebatch_stream_synchronize(m->rig.device, m->streams[i]), REBATCH_OK);
    for (size_t i = 0; i < edge; i++) {
        cr_assert_eq(b->address[i], b->mark);
        cr_assert_eq(b->address[b->is.bytes - 1 - i], b->mark);
    }
}

/* Not always: it waits for the streams, and that hides mistakes. */
static void check_marks_sometimes(struct model *m, size_t first, size_t count)
{
    if (draw(&m->random) % 4 == 0)
        for (size_t i = first; i < first + count; i++)
            check_mark(m, &m->blocks[i]);
}

/* It is gone, taken back by a rollback or freed. */
static void model_drop(struct model *m, size_t at, bool rolled_back)
{
    if (rolled_back) {
        cr_assert_lt(m->late_count, LATE);
        m->late[m->late_count++] = m->blocks[at].address;
    }
    m->blocks[at] = m->blocks[--m->count];
}

static void forget_late(struct model *m, const void *address)
{
    for (size_t i = 0; i < m->late_count; i++)
        if (m->late[i] == address)
            m->late[i--] = m->late[--m->late_count];
}

static size_t draw_size(struct model *m)
{
    const uint64_t kind = draw(&m->random) % 100;
    const size_t most = kind < 50 ? 4 * KIB : kind < 90 ? PAGE : 6 * PAGE;
    return draw(&m->random) % most + 1;
}

static void do_alloc(struct model *m)
{
    if (m->count == MOST)
        return;
    struct model_block b = {.is.bytes = draw_size(m)};
    b.is.rounded = (b.is.bytes + UNIT - 1) / UNIT * UNIT;
    b.is.tag = (rebatch_tag)(draw(&m->random) % COUNT_TAGS);
    b.mark = (unsigned char)draw(&m->random);
    void *pointer;
    const rebatch_stream stream = m->streams[draw(&m->random) % STREAMS];
    const rebatch_status status =
        rebatch_pool_alloc(&pointer, m->rig.pool, b.is.bytes, stream, b.is.tag);
    if (status == REBATCH_OOM) {
        rebatch_oom_report report;
        cr_assert_eq(rebatch_pool_last_oom(&report, m->rig.pool), REBATCH_OK);
        cr_assert_eq(report.asked_bytes, b.is.bytes);
        cr_assert_lt(report.would_fit_bytes, b.is.rounded);
        m->counts.want.ooms++;
        return;
    }
    cr_assert_eq(status, REBATCH_OK, "%s", rebatch_last_error());
    b.address = pointer;
    cr_assert_eq((uintptr_t)pointer % REBATCH_POOL_ALIGNMENT, 0);
    for (size_t i = 0; i < m->count; i++) /* no overlap with any block in use */
        cr_assert(b.address + b.is.rounded <= m->blocks[i].address ||
                  m->blocks[i].address + m->blocks[i].is.rounded <= b.address);
    mark_block(m, &b, stream);
    forget_late(m, pointer);
    count_alloc(&m->counts, &b.is);
    m->blocks[m->count++] = b;
}

static void do_free(struct model *m)
{
    if (m->count == 0)
        return;
    const size_t at = draw(&m->random) % m->count;
    struct model_block *b = &m->blocks[at];
    if (b->is.deferred_in) {
        cr_assert_eq(rebatch_pool_free(m->rig.pool, b->address), REBATCH_E_INVALID);
        return;
    }
    if (draw(&m->random) % 50 == 0)
        cr_assert_eq(rebatch_pool_free(m->rig.pool, b->address + 1), REBATCH_E_INVALID);
    check_marks_sometimes(m, at, 1);
    give(m->rig.pool, b->address);
    if (count_free(&m->counts, &b->is))
        model_drop(m, at, false);
}

static void do_late_free(struct model *m)
{
    if (m->late_count == 0)
        return;
    give(m->rig.pool, m->late[draw(&m->random) % m->late_count]);
    m->counts.want.late_frees++;
}

static void do_commit(struct model *m)
{
    if (m->counts.depth == 0)
        return;
    check_marks_sometimes(m, 0, m->count);
    count_commit(&m->counts, m->rig.pool);
    for (size_t i = m->count; i-- > 0;)
        if (count_is_gone_by_commit(&m->counts, &m->blocks[i].is))
            model_drop(m, i, false);
}

static void do_rollback(struct model *m)
{
    if (m->counts.depth == 0)
        return;
    const size_t to = draw(&m->random) % m->counts.depth;
    check_marks_sometimes(m, 0, m->count);
    count_rollback(&m->counts, m->rig.pool, to);
    for (size_t i = m->count; i-- > 0;)
        if (count_is_gone_by_rollback(&m->counts, &m->blocks[i].is))
            model_drop(m, i, true);
    if (m->late_count > LATE / 2) /* the model's own bound, not the pool's */
        m->late_count = 0;
}

static void do_use_on(struct model *m)
{
    if (m->count == 0)
        return;
    const struct model_block *b = &m->blocks[draw(&m->random) % m->count];
    const rebatch_stream stream = m->streams[draw(&m->random) % STREAMS];
    cr_assert_eq(rebatch_pool_use_on(m->rig.pool, b->address, stream),
                 b->is.deferred_in ? REBATCH_E_INVALID : REBATCH_OK);
    if (!b->is.deferred_in)
        mark_block(m, b, stream);
}

static void do_other(struct model *m)
{
    const size_t bytes = draw(&m->random) % (20 * PAGE);
    switch (draw(&m->random) % 4) {
    case 0:
        cr_assert_eq(rebatch_pool_trim(m->rig.pool, bytes, NULL), REBATCH_OK);
        break;
    case 1:
        m->counts.want.ooms +=
            rebatch_pool_reserve(m->rig.pool, bytes, m->streams[0]) == REBATCH_OOM;
        break;
    case 2:
        (void)rbi_pool_admit(m->rig.pool, bytes, m->streams[0]);
        break;
    default:
        cr_assert_eq(rebatch_pool_set_limit(m->rig.pool, (60 + draw(&m->random) % 60) * PAGE),
                     REBATCH_OK);
    }
}

static void open_model(struct model *m, uint64_t seed, const rebatch_pool_options *options,
                       bool plain)
{
    memset(m, 0, sizeof *m);
    m->random = seed;
    m->rig = plain ? rig_open_plain(100, options) : rig_open(100, options);
    for (int i = 1; i < STREAMS; i++)
        cr_assert_eq(rebatch_stream_create(&m->streams[i], m->rig.device), REBATCH_OK);
    count_make_tags(m->rig.pool);
}

static void close_model(struct model *m)
{
    while (m->counts.depth)
        do_commit(m);
    while (m->count) {
        give(m->rig.pool, m->blocks[0].address);
        cr_assert(count_free(&m->counts, &m->blocks[0].is));
        model_drop(m, 0, false);
    }
    count_compare(&m->counts, m->rig.pool, 0);
    cr_assert_eq(rebatch_pool_trim(m->rig.pool, 0, NULL), REBATCH_OK);
    cr_assert_eq(stats_of(m->rig.pool).reserved_bytes, 0);
    rig_close(&m->rig);
}

static void run_model(uint64_t seed, int calls, const rebatch_pool_options *options, bool plain)
{
    struct model *m = malloc(sizeof *m);
    cr_assert_not_null(m);
    open_model(m, seed, options, plain);
    for (int n = 0; n < calls; n++) {
        const uint64_t kind = draw(&m->random) % 1000;
        if (kind < 470)
            do_alloc(m);
        else if (kind < 840)
            do_free(m);
        else if (kind < 880)
            count_begin(&m->counts, m->rig.pool);
        else if (kind < 910)
            do_commit(m);
        else if (kind < 925)
            do_rollback(m);
        else if (kind < 955)
            do_late_free(m);
        else if (kind < 995)
            do_use_on(m);
        else
            do_other(m);
        if (n % 50 == 0) {
            count_compare(&m->counts, m->rig.pool, 0);
            assert_valid(m->rig.pool);
        }
    }
    close_model(m);
    free(m);
}

/* Blocks never overlap, keep their content, and every statistic is that of a naive count. */
Test(pool_random, the_pool_agrees_with_a_naive_model)
{
    const char *scale = getenv("REBATCH_TEST_SCALE");
    for (uint64_t seed = 1; seed <= 8; seed++)
        run_model(seed, CALLS * (scale ? atoi(scale) : 1), NULL, false);
}

/* The same with caching off, and nothing is cached. */
Test(pool_random, the_pool_agrees_with_a_naive_model_without_caching)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.caching = REBATCH_OFF;
    run_model(9, 4000, &options, false);
}

/* The same on a device without virtual memory, where the pool lives on plain allocations. */
Test(pool_random, the_pool_agrees_with_a_naive_model_on_plain_allocations)
{
    run_model(10, CALLS, NULL, true);
    run_model(11, CALLS, NULL, true);
}

/* The same with every option that shapes the search. */
Test(pool_random, the_pool_agrees_with_a_naive_model_with_options)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.events = 16;
    run_model(12, CALLS, &options, false);
}
