/* What the tests of several streams share: steps in which some use blocks of others, and a pool
 * that they run on, whose streams go on when the test says so. */
#ifndef POOL_STREAMS_H
#define POOL_STREAMS_H

#include "fault/fault_device.h"
#include "unit/lazy_device.h"
#include "unit/pool_help.h"

enum {
    DEVICE_PAGES = 8192,
    STREAM_PAGES = 2048,
    STREAMS = 3,
    BLOCKS = 60,
    CALLS = 4 * BLOCKS,
    WARM = 120
};

/* ---- steps ---- */

/* What a call does: allocates block `of` for a stream, says that a stream uses it, or frees it. */
struct call {
    enum { ALLOC, USE, FREE } what;
    size_t of, bytes;
    int stream;
};

/* A training step: blocks of its own, all freed before its end. */
struct step {
    struct call calls[CALLS];
    size_t count;
};

static inline void add(struct step *step, struct call call)
{
    cr_assert_lt(step->count, CALLS);
    step->calls[step->count++] = call;
}

static inline void add_random(struct step *step, uint64_t *random, size_t of)
{
    const size_t most = draw(random) % 4 == 0 ? 20 * PAGE : PAGE;
    add(step, (struct call){ALLOC, of, 1 + draw(random) % most, (int)(draw(random) % STREAMS)});
}

/* Of any stream, used on none, one or two, now and then on one twice or on its own. */
static inline struct step draw_step(uint64_t seed)
{
    struct step step = {.count = 0};
    size_t open[BLOCKS], opened = 0, made = 0, uses = 0;
    uint64_t random = seed;
    while (made < BLOCKS || opened > 0) {
        const size_t at = opened ? draw(&random) % opened : 0;
        if (made < BLOCKS && (opened == 0 || draw(&random) % 3 != 0)) {
            add_random(&step, &random, made);
            open[opened++] = made++;
        } else if (uses < BLOCKS && draw(&random) % 2 == 0) {
            add(&step, (struct call){USE, open[at], 0, (int)(draw(&random) % STREAMS)});
            uses++;
        } else {
            add(&step, (struct call){FREE, open[at], 0, 0});
            open[at] = open[--opened];
        }
    }
    return step;
}

/* Stream 1 gathers the weights of a layer ahead of its use on stream 0, and reduces its gradients,
 * which stream 0 has. */
static inline struct step gathering_step(void)
{
    enum { LAYERS = 10 };
    struct step step = {.count = 0};
    size_t made = 0, ahead = made++;
    add(&step, (struct call){ALLOC, ahead, 16 * PAGE, 1});
    for (int layer = 0; layer < LAYERS; layer++) {
        const size_t weights = ahead, first = made;
        add(&step, (struct call){USE, weights, 0, 0});
        if (layer + 1 < LAYERS)
            add(&step, (struct call){ALLOC, ahead = made++, 16 * PAGE, 1});
        const size_t gradients = made++;
        add(&step, (struct call){ALLOC, gradients, 16 * PAGE, 0});
        add(&step, (struct call){ALLOC, made++, (size_t)(layer + 1) * PAGE, 0});
        add(&step, (struct call){USE, gradients, 0, 1});
        add(&step, (struct call){FREE, made - 1, 0, 0});
        add(&step, (struct call){FREE, weights, 0, 0});
        add(&step, (struct call){FREE, gradients, 0, 0});
        cr_assert_leq(made - first, 3);
    }
    return step;
}

/* Stream 1 fills a small buffer for each layer, which stream 0 reads. */
static inline struct step buffered_step(void)
{
    struct step step = {.count = 0};
    add(&step, (struct call){ALLOC, 0, 96 * PAGE, 0});
    for (size_t layer = 1; layer < BLOCKS; layer++) {
        add(&step, (struct call){ALLOC, layer, 2 * PAGE, 1});
        add(&step, (struct call){USE, layer, 0, 0});
        add(&step, (struct call){FREE, layer, 0, 0});
    }
    add(&step, (struct call){FREE, 0, 0, 0});
    return step;
}

/* ---- a pool that steps run on ---- */

struct world {
    rebatch_device *lazy, *device; /* the latter fails calls of the former as a test says */
    rebatch_pool *pool;
    rebatch_stream streams[STREAMS]; /* the first is the default stream */
    struct {
        char *address;
        size_t bytes;
    } blocks[BLOCKS]; /* of the step, as long as they are in use */
    unsigned lag;     /* calls from one time that all work is done to the next; 0: never */
    unsigned held;    /* streams that stand still all the same, by their bits */
    uint64_t calls;
};

/* Streams have nothing of their own yet. */
static inline struct world open_bare_world(unsigned lag, const rebatch_pool_options *options)
{
    struct world w = {.lag = lag};
    w.lazy = lazy_open(DEVICE_PAGES * PAGE, PAGE, true);
    cr_assert_eq(rebatch_device_open_fault(&w.device, w.lazy, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&w.pool, w.device, options), REBATCH_OK);
    for (int i = 1; i < STREAMS; i++)
        cr_assert_eq(rebatch_stream_create(&w.streams[i], w.device), REBATCH_OK);
    pass_beginning(w.pool);
    return w;
}

/* Each stream has more than it needs, so that none takes memory of another. */
static inline struct world open_world_with(unsigned lag, const rebatch_pool_options *options)
{
    struct world w = open_bare_world(lag, options);
    for (int i = 0; i < STREAMS; i++)
        give(w.pool, take_on(w.pool, STREAM_PAGES * PAGE, w.streams[i]));
    return w;
}

static inline struct world open_world(unsigned lag)
{
    return open_world_with(lag, NULL);
}

static inline void finish_work(const struct world *w)
{
    for (int i = 0; i < STREAMS; i++)
        if (!(w->held >> i & 1))
            lazy_go_on(w->streams[i], 8);
}

static inline void close_world(struct world *w)
{
    assert_valid(w->pool);
    rebatch_pool_destroy(w->pool);
    for (int i = 1; i < STREAMS; i++)
        rebatch_stream_destroy(w->device, w->streams[i]);
    rebatch_device_close(w->device);
    lazy_close(w->lazy);
}

static inline void check_overlaps(const struct world *w, size_t of)
{
    const char *const from = w->blocks[of].address, *const to = from + w->blocks[of].bytes;
    for (size_t i = 0; i < BLOCKS; i++)
        if (i != of && w->blocks[i].address)
            cr_assert(w->blocks[i].address + w->blocks[i].bytes <= from ||
                          to <= w->blocks[i].address,
                      "blocks %zu and %zu overlap", of, i);
}

static inline void *take_fresh(const struct world *w, size_t bytes, int stream)
{
    void *block = take_on(w->pool, bytes, w->streams[stream]);
    lazy_check_fresh(w->streams[stream], block, bytes);
    lazy_use(w->streams[stream], block, bytes);
    return block;
}

static inline void use_on(const struct world *w, void *block, size_t bytes, int stream)
{
    cr_assert_eq(rebatch_pool_use_on(w->pool, block, w->streams[stream]), REBATCH_OK);
    lazy_use(w->streams[stream], block, bytes);
}

static inline void play_call(struct world *w, const struct call *call)
{
    const size_t of = call->of;
    switch (call->what) {
    case ALLOC:
        w->blocks[of].address = take_fresh(w, call->bytes, call->stream);
        w->blocks[of].bytes = call->bytes;
        check_overlaps(w, of);
        break;
    case USE:
        use_on(w, w->blocks[of].address, w->blocks[of].bytes, call->stream);
        break;
    case FREE:
        give(w->pool, w->blocks[of].address);
        w->blocks[of].address = NULL;
        break;
    }
    if (w->lag && ++w->calls % w->lag == 0)
        finish_work(w);
}

static inline void play(struct world *w, const struct step *step, size_t first, size_t end)
{
    for (size_t i = first; i < end; i++)
        play_call(w, &step->calls[i]);
}

static inline void play_times(struct world *w, const struct step *step, int times)
{
    for (int i = 0; i < times; i++)
        play(w, step, 0, step->count);
}

static inline bool runs(const struct world *w)
{
    return w->pool->cycle.phase == RBI_CYCLE_RUNS;
}

/* Steps until it runs, so that a step begins with the next call. */
static inline void play_until_it_runs(struct world *w, const struct step *step)
{
    for (int i = 0; i < WARM && !runs(w); i++)
        play(w, step, 0, step->count);
    cr_assert(runs(w));
    while (w->pool->cycle.next != w->pool->cycle.calls)
        play(w, step, 0, step->count);
}

/* A pool in which a step runs as a cycle, a new one beginning. */
static inline struct world open_cycle(const struct step *step, unsigned lag)
{
    struct world w = open_world(lag);
    play_until_it_runs(&w, step);
    return w;
}

/* Plays until a cycle has what memory it wants for few marks. */
static inline void play_until_it_has_enough(struct world *w, const struct step *step)
{
    while (!rbi_pool_knows_needs(w->pool))
        play_times(w, step, WARM);
    play_times(w, step, WARM);
    cr_assert(w->pool->cycle.has_enough && !w->pool->cycle.hopes);
}

/* Whoever looks at blocks ends a cycle. */
static inline void end_cycle(const struct world *w)
{
    rbi_pool_enter(w->pool);
    rbi_lock_give(&w->pool->lock);
    cr_assert_not(runs(w));
}

#endif
