/* Holds how often the pool asks the device how far it has come, which costs calls of the device,
 * and that what is done is known all the same. Calls are counted, nothing is timed.
 * Seeds: 201, 202 and 209, the order in which independent streams free. */
#include "unit/lazy_device.h"
#include "unit/pool_help.h"

enum { LIVE = 24, LAYERS = 24, PAIRS = 20000 };

struct world {
    rebatch_device *device;
    rebatch_pool *pool;
    rebatch_stream stream, other;
};

static struct world open_world(size_t pages)
{
    struct world w;
    w.device = lazy_open(pages * PAGE, PAGE, true);
    cr_assert_eq(rebatch_pool_create(&w.pool, w.device, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_stream_create(&w.stream, w.device), REBATCH_OK);
    cr_assert_eq(rebatch_stream_create(&w.other, w.device), REBATCH_OK);
    return w;
}

static void close_world(struct world *w)
{
    assert_valid(w->pool);
    rebatch_pool_destroy(w->pool);
    rebatch_stream_destroy(w->device, w->stream);
    rebatch_stream_destroy(w->device, w->other);
    lazy_close(w->device);
}

/* What is allocated is worked on at once. */
static void *use_new(const struct world *w, size_t bytes, rebatch_stream stream)
{
    void *block = take_on(w->pool, bytes, stream);
    lazy_check_fresh(stream, block, bytes);
    lazy_use(stream, block, bytes);
    return block;
}

/* Both streams allocate and free by turns, blocks of several sizes that they keep for a while;
 * their work goes on by `share` of 8 after each pair. */
static void churn(const struct world *w, uint64_t *random, unsigned share)
{
    void *live[2][LIVE] = {{NULL}};
    for (int n = 0; n < PAIRS; n++) {
        const rebatch_stream stream = n % 2 ? w->other : w->stream;
        const size_t at = draw(random) % LIVE;
        give(w->pool, live[n % 2][at]);
        live[n % 2][at] = use_new(w, (at % 8 + 1) * PAGE / 2, stream);
        lazy_go_on(stream, share);
    }
    for (int i = 0; i < 2 * LIVE; i++)
        give(w->pool, live[i / LIVE][i % LIVE]);
}

/* Whether their work is done at once, after a while, or as good as never. */
Test(pool_marks, streams_that_need_nothing_of_each_other_cost_next_to_no_calls)
{
    for (unsigned share = 0; share <= 8; share += share ? 7 : 1) {
        struct world w = open_world(1024);
        uint64_t random = 201 + share;
        churn(&w, &random, share); /* until its needs are known */
        const uint64_t calls = lazy_event_calls();
        churn(&w, &random, share);
        cr_assert_leq((lazy_event_calls() - calls) * 1000 / PAIRS, 10, "%zu calls, share %u",
                      (size_t)(lazy_event_calls() - calls), share);
        close_world(&w);
    }
}

/* A step in which `other` fills a buffer for each layer, one ahead, that `stream` then works with,
 * beside blocks of its own. That work is done at once where `lag` is 0, else half of it after so
 * many layers. */
static void step(const struct world *w, unsigned lag, uint64_t *work)
{
    void *ahead = use_new(w, 16 * PAGE, w->other);
    for (int layer = 0; layer < LAYERS; layer++) {
        void *buffer = ahead;
        if (layer + 1 < LAYERS)
            ahead = use_new(w, 16 * PAGE, w->other);
        cr_assert_eq(rebatch_pool_use_on(w->pool, buffer, w->stream), REBATCH_OK);
        void *own[10];
        for (int i = 0; i < 10; i++)
            own[i] = use_new(w, (size_t)(i + 1) * PAGE, w->stream);
        lazy_use(w->stream, buffer, 16 * PAGE);
        for (int i = 0; i < 10; i++)
            give(w->pool, own[i]);
        give(w->pool, buffer);
        lazy_go_on(w->other, 8);
        ++*work;
        if (lag == 0 || *work % lag == 0)
            lazy_go_on(w->stream, lag == 0 ? 8 : 4);
    }
}

/* Two calls each time when no buffer is free that is known to be, a query and the mark for it.
 * Where work lags there are more buffers, of which several are found free at a time. */
Test(pool_marks, memory_that_streams_use_in_turn_costs_two_calls_a_time_at_most)
{
    static const struct {
        unsigned lag, most_permille; /* of the buffers */
    } cases[] = {{0, 2000}, {1, 1200}, {8, 300}};
    const int steps = 50;
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
        struct world w = open_world(4096);
        uint64_t work = 0;
        for (int i = 0; i < 100; i++)
            step(&w, cases[n].lag, &work);
        const uint64_t calls = lazy_event_calls();
        for (int i = 0; i < steps; i++)
            step(&w, cases[n].lag, &work);
        const uint64_t permille = (lazy_event_calls() - calls) * 1000 / (steps * LAYERS);
        cr_assert_leq(permille, cases[n].most_permille, "%zu, lag %u", (size_t)permille,
                      cases[n].lag);
        close_world(&w);
    }
}

/* However rarely anybody asked before: a search that needs what another stream has done finds it at
 * once, and takes no fresh memory. */
Test(pool_marks, a_search_after_a_long_silence_finds_what_is_done)
{
    struct world w = open_world(64);
    give(w.pool, use_new(&w, PAGE, w.other));
    lazy_go_on(w.other, 8);
    for (int i = 0; i < 5000; i++) {
        give(w.pool, use_new(&w, 40 * PAGE, w.stream));
        lazy_go_on(w.stream, 8);
    }
    const uint64_t reserved = stats_of(w.pool).reserved_bytes;
    give(w.pool, use_new(&w, 40 * PAGE, w.other));
    cr_assert_eq(stats_of(w.pool).reserved_bytes, reserved);
    cr_assert_eq(w.pool->stages[REBATCH_STAGE_WAIT], 0);
    close_world(&w);
}

/* The same of a block that the other stream used. All work of the device is done. */
Test(pool_marks, a_used_block_is_free_after_a_long_silence_too)
{
    struct world w = open_world(64);
    void *block = use_new(&w, 40 * PAGE, w.stream);
    cr_assert_eq(rebatch_pool_use_on(w.pool, block, w.other), REBATCH_OK);
    for (int i = 0; i < 5000; i++)
        give(w.pool, use_new(&w, PAGE, w.other));
    lazy_use(w.other, block, 40 * PAGE);
    give(w.pool, block);
    lazy_go_on(w.other, 8);
    const uint64_t reserved = stats_of(w.pool).reserved_bytes;
    cr_assert_eq(take_on(w.pool, 40 * PAGE, w.stream), block);
    cr_assert_eq(stats_of(w.pool).reserved_bytes, reserved);
    close_world(&w);
}

/* Several marks are under way: what was freed first is known to be done first, while later work
 * goes on. Each search before a free that is not served makes that free one with a mark. */
Test(pool_marks, what_was_freed_earlier_is_had_earlier)
{
    enum { BLOCKS = 6 };
    struct world w = open_world(256);
    for (int round = 0; round < 3; round++) {
        void *blocks[BLOCKS];
        for (int i = 0; i < BLOCKS; i++) {
            blocks[i] = use_new(&w, 4 * PAGE, w.stream);
            (void)use_new(&w, PAGE, w.stream); /* lest they merge */
        }
        lazy_go_on(w.stream, 8);
        for (int i = 0; i < BLOCKS; i++) {
            lazy_use(w.stream, blocks[i], 4 * PAGE);
            give(w.pool, blocks[i]);
            (void)use_new(&w, 4 * PAGE, w.other); /* not served by what is under way */
        }
        for (unsigned i = 0; i < BLOCKS; i++) {
            const unsigned left = BLOCKS - i;
            lazy_go_on(w.stream, (8 + left - 1) / left); /* the work on one more is done */
            lazy_go_on(w.other, 8);
            cr_assert_eq(use_new(&w, 4 * PAGE, w.other), blocks[i]);
        }
        assert_valid(w.pool);
    }
    close_world(&w);
}

/* More frees are under way than there can be marks. */
Test(pool_marks, more_frees_than_marks_lose_nothing)
{
    enum { BLOCKS = 4 * RBI_PROGRESS_EVENTS };
    struct world w = open_world(512);
    void *blocks[BLOCKS];
    for (int i = 0; i < BLOCKS; i++)
        blocks[i] = use_new(&w, 4 * PAGE, w.stream);
    for (int i = 0; i < BLOCKS; i++) {
        give(w.pool, blocks[i]);
        (void)use_new(&w, 4 * PAGE, w.other);
    }
    const uint64_t reserved = stats_of(w.pool).reserved_bytes;
    lazy_go_on(w.stream, 8);
    lazy_go_on(w.other, 8);
    for (int i = 0; i < BLOCKS; i++)
        (void)use_new(&w, 4 * PAGE, w.other);
    cr_assert_eq(stats_of(w.pool).reserved_bytes, reserved);
    close_world(&w);
}
