/* Holds what a cycle does with several streams, of which some use blocks of others: it is served as
 * on one, and no memory is given out while work may still use it. Streams go on when the test says
 * so. Seeds 1 to 6 where a test draws, 31 to 36 for the random one. */
#include "unit/pool_streams.h"

/* ---- as on one stream ---- */

Test(pool_cycle_streams, blocks_that_other_streams_use_are_served_at_the_places_they_had)
{
    for (uint64_t seed = 0; seed <= 6; seed++) {
        const struct step step = seed ? draw_step(seed) : gathering_step();
        struct world w = open_cycle(&step, 1);
        const char *places[BLOCKS] = {NULL};
        const uint64_t served = w.pool->cycle.periods;
        for (int times = 0; times < 3; times++)
            for (size_t i = 0; i < step.count; i++) {
                const size_t of = step.calls[i].of;
                play_call(&w, &step.calls[i]);
                if (step.calls[i].what != ALLOC)
                    continue;
                cr_assert(times == 0 || places[of] == w.blocks[of].address);
                places[of] = w.blocks[of].address;
            }
        cr_assert(runs(&w));
        cr_assert_eq(w.pool->cycle.periods, served + 3);
        close_world(&w);
    }
}

/* Statistics are those of a pool that never has a cycle. */
Test(pool_cycle_streams, it_counts_as_without)
{
    const struct step step = draw_step(2);
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.cycles = REBATCH_OFF;
    rebatch_pool_stats with[CALLS], without[CALLS];
    for (int cycles = 0; cycles < 2; cycles++) {
        struct world w = open_world_with(1, cycles ? NULL : &options);
        play_times(&w, &step, WARM);
        cr_assert_eq(runs(&w), cycles);
        for (size_t i = 0; i < step.count; i++) {
            play_call(&w, &step.calls[i]);
            (cycles ? with : without)[i] = stats_of(w.pool);
        }
        cr_assert_eq(runs(&w), cycles);
        close_world(&w);
    }
    for (size_t i = 0; i < step.count; i++) {
        cr_assert_eq(with[i].live_bytes, without[i].live_bytes);
        cr_assert_eq(with[i].live_peak_bytes, without[i].live_peak_bytes);
        cr_assert_eq(with[i].requested_bytes, without[i].requested_bytes);
        cr_assert_eq(with[i].allocations, without[i].allocations);
        cr_assert_eq(with[i].frees, without[i].frees);
        cr_assert_eq(with[i].blocks, without[i].blocks);
    }
}

/* Where the calls are those of the cycle but the stream is another. */
Test(pool_cycle_streams, another_stream_is_another_call)
{
    const struct step step = draw_step(3);
    struct world w = open_cycle(&step, 1);
    for (size_t at = 0; at < step.count; at++) {
        const struct call *const call = &step.calls[at];
        play(&w, &step, 0, at);
        if (call->what == FREE) {
            play(&w, &step, at, step.count);
            continue;
        }
        struct call other = *call;
        other.stream = (call->stream + 1) % STREAMS;
        play_call(&w, &other);
        cr_assert_not(runs(&w));
        assert_valid(w.pool);
        play(&w, &step, at + 1, step.count);
        play_until_it_runs(&w, &step);
    }
    close_world(&w);
}

/* What is prepared ahead on one stream, used on another in the next step, and freed there. */
static void play_with_batches(struct world *w, const struct step *step, int times)
{
    enum { BYTES = 3 * GRANULE };
    void *batch = take_fresh(w, BYTES, 2);
    for (int i = 0; i < times; i++) {
        use_on(w, batch, BYTES, 0);
        play(w, step, 0, step->count / 2);
        void *next = take_fresh(w, BYTES, 2);
        play(w, step, step->count / 2, step->count);
        give(w->pool, batch);
        batch = next;
    }
    cr_assert(runs(w));
    assert_valid(w->pool);
    give(w->pool, batch);
}

Test(pool_cycle_streams, a_batch_that_is_prepared_in_the_step_before_has_its_places_too)
{
    const struct step step = gathering_step();
    for (unsigned lag = 1; lag < 64; lag = 2 * lag + 1) {
        struct world w = open_world(lag);
        play_with_batches(&w, &step, 2 * WARM);
        cr_assert_not_null(w.pool->cycle.places.of);
        close_world(&w);
    }
}

/* Whether the free that is expected is of a block from before the calls were placed anew, and what
 * streams that used it get marks then. */
static const struct rbi_cycle_use *marked_use_of_old(const struct world *w)
{
    const struct rbi_cycle *const cycle = &w->pool->cycle;
    if (!runs(w) || cycle->next->units != RBI_CYCLE_FREE_USED ||
        !rbi_cycle_is_old(&cycle->calls[cycle->next->of]))
        return NULL;
    const struct rbi_cycle_use *use = &cycle->uses[cycle->next->first_use];
    while (!use->marks && !use->last)
        use++;
    return use->marks ? use : NULL;
}

/* Of all that was freed until now. */
static bool has_mark(const struct rbi_pool_stream *stream)
{
    const uint32_t last = (stream->first_mark + stream->mark_count - 1) % RBI_STREAM_MARKS;
    return stream->done == stream->frees ||
           (stream->mark_count && stream->marks[last].point == stream->frees);
}

/* What is placed anew is waited for by it. */
Test(pool_cycle_streams, a_mark_that_is_due_with_an_older_blocks_free_is_made)
{
    enum { BYTES = 3 * GRANULE };
    const struct step step = gathering_step();
    size_t seen = 0;
    for (unsigned lag = 1; lag < 64; lag++) {
        struct world w = open_world(lag);
        void *batch = take_fresh(&w, BYTES, 2);
        for (int i = 0; i < WARM; i++) {
            use_on(&w, batch, BYTES, 0);
            play(&w, &step, 0, step.count / 2);
            void *const next = take_fresh(&w, BYTES, 2);
            play(&w, &step, step.count / 2, step.count);
            const struct rbi_cycle_use *const use = marked_use_of_old(&w);
            give(w.pool, batch);
            cr_assert(!use || has_mark(use->stream));
            seen += use != NULL;
            batch = next;
        }
        give(w.pool, batch);
        close_world(&w);
    }
    cr_assert_geq(seen, 10);
}

/* A block that is in use all the time, of which each step says that another stream uses it. */
Test(pool_cycle_streams, uses_of_older_blocks_are_calls_of_it_too)
{
    enum { WEIGHTS = 300 };
    const struct step step = draw_step(1);
    struct world w = open_world(1);
    char *const weights[2] = {take_fresh(&w, GRANULE, 0), take_fresh(&w, GRANULE, 0)};
    for (int i = 0; i < WARM; i++) {
        play_times(&w, &step, 1);
        for (int n = 0; n < WEIGHTS; n++)
            use_on(&w, weights[n % 2], GRANULE, 1);
    }
    cr_assert(runs(&w));
    use_on(&w, weights[1], GRANULE, 1); /* not in that order */
    cr_assert_not(runs(&w));
    give(w.pool, weights[0]);
    give(w.pool, weights[1]);
    cr_assert_not_null(w.pool->pending);
    close_world(&w);
}

/* ---- memory that is not done ---- */

/* While a stream stands still, or several, what is used on it is not given out to others, by the
 * cycle or after it; once they have gone on, it is. */
Test(pool_cycle_streams, memory_is_not_given_out_before_the_other_streams_work_is_done)
{
    enum { LASTING = 4 }; /* steps of a cycle that is not an exception */
    const struct step step = draw_step(4);
    struct world w = open_cycle(&step, 1);
    for (unsigned held = 1; held < 1 << STREAMS; held++)
        for (size_t at = 0; at < step.count; at += 11) {
            play_times(&w, &step, LASTING);
            const uint64_t began = w.pool->cycle.began;
            play(&w, &step, 0, at);
            cr_assert(runs(&w));
            w.held = held;
            play(&w, &step, at, step.count); /* each allocation is held against all work */
            play_times(&w, &step, 2 * (int)(w.pool->cycle.noted / step.count));
            cr_assert(!runs(&w) || w.pool->cycle.began != began);
            assert_valid(w.pool);
            w.held = 0;
            play_until_it_runs(&w, &step);
        }
    close_world(&w);
}

/* An allocation may wait for several streams, as a block may be used on several: each of them is
 * waited for. */
Test(pool_cycle_streams, a_block_may_wait_for_several_streams)
{
    const struct step step = draw_step(4);
    struct world w = open_cycle(&step, 1);
    const struct rbi_cycle *const cycle = &w.pool->cycle;
    size_t several = 0;
    for (size_t i = 0; i < cycle->wait_count; i++)
        several += !cycle->waits[i].last;
    cr_assert_gt(several, 0);
    several = 0;
    for (size_t i = 0; i < cycle->use_count; i++)
        several += !cycle->uses[i].last;
    cr_assert_gt(several, 0);
    close_world(&w);
}

/* Whether that is pending just as it was freed. */
static bool is_pending(const struct world *w, const char *address, size_t bytes)
{
    const struct rbi_block *b = w->pool->pending;
    while (b && b->address != address)
        b = b->next;
    return b && b->bytes == (bytes + UNIT - 1) / UNIT * UNIT;
}

/* Plays the step as far as `end`, or as it runs, with streams that stand still; blocks that are
 * freed meanwhile and were used on another stream are not done from then on. */
static void play_still(struct world *w, const struct step *step, size_t end, const char **freed)
{
    int own[BLOCKS];
    bool used[BLOCKS] = {false};
    w->lag = 0;
    for (size_t i = 0; i < end; i++) {
        const struct call *const call = &step->calls[i];
        const char *const address = w->blocks[call->of].address;
        play_call(w, call);
        if (call->what == ALLOC)
            own[call->of] = call->stream;
        used[call->of] |= call->what == USE && call->stream != own[call->of];
        if (call->what == FREE && used[call->of])
            freed[call->of] = address;
    }
}

/* Wherever it is left, what is not done is pending, and free once it is. */
Test(pool_cycle_streams, what_is_not_done_is_pending_when_it_is_left)
{
    const struct step step = draw_step(1);
    struct world w = open_cycle(&step, 1);
    size_t left = 0;
    for (size_t end = 1; end <= step.count; end++) {
        const char *freed[BLOCKS] = {NULL};
        play_still(&w, &step, end, freed);
        left += runs(&w);
        settle(w.pool);
        cr_assert_not(runs(&w));
        assert_valid(w.pool);
        for (size_t of = 0; of < BLOCKS; of++)
            cr_assert(!freed[of] || is_pending(&w, freed[of], w.blocks[of].bytes));
        finish_work(&w);
        cr_assert_eq(rebatch_pool_trim(w.pool, SIZE_MAX, NULL), REBATCH_OK);
        cr_assert_null(w.pool->pending);
        assert_valid(w.pool);
        w.lag = 1;
        play(&w, &step, end, step.count);
        play_until_it_runs(&w, &step);
    }
    cr_assert_gt(left, step.count / 4);
    close_world(&w);
}

/* What waits for another stream is not free for an attempt that is to be admitted. */
Test(pool_cycle_streams, what_is_not_done_is_not_admitted)
{
    const struct step step = draw_step(1);
    struct world w = open_cycle(&step, 1);
    const struct rbi_pool_stream *const stream = rbi_pool_find_stream(w.pool, NULL);
    w.lag = 0;
    size_t at = 0;
    for (; rbi_cycle_waiting_bytes(w.pool, stream) == 0; at++)
        play_call(&w, &step.calls[at]);
    cr_assert(runs(&w));
    const size_t waiting = rbi_cycle_waiting_bytes(w.pool, stream);
    const size_t done = stream->free_bytes - waiting;
    cr_assert_eq(rbi_pool_admit(w.pool, done, NULL), REBATCH_OK);
    cr_assert(runs(&w));
    cr_assert_eq(rbi_pool_admit(w.pool, done + waiting, NULL), REBATCH_OK);
    cr_assert_not(runs(&w));
    cr_assert_geq(stream->free_bytes, done + waiting);
    w.lag = 1;
    play(&w, &step, at, step.count);
    close_world(&w);
}

/* ---- streams that lag ---- */

/* Whether the cycle that runs after `times` steps goes on for some more. No memory changes hands
 * then. */
static bool lasts(struct world *w, const struct step *step, int times)
{
    play_times(w, step, times);
    const uint64_t births = w->pool->births, layout = w->pool->layout;
    play_times(w, step, 20);
    const bool lasted = runs(w) && w->pool->cycle.began < births;
    cr_assert(!lasted || w->pool->layout == layout);
    assert_valid(w->pool);
    return lasted;
}

/* Where work always lags, blocks are pending whenever a step begins, and some of the work has to be
 * done before memory is given out again: the cycle begins all the same, and goes on. Marks come
 * earlier for it, or blocks are placed anew, so that memory is given out again later. */
Test(pool_cycle_streams, streams_that_lag_have_one_too)
{
    for (unsigned lag = 7; lag < 128; lag = 2 * lag + 1) {
        int lasted = 0;
        for (uint64_t seed = 1; seed <= 6; seed++) {
            const struct step step = draw_step(seed);
            struct world w = open_world(lag);
            lasted += lasts(&w, &step, WARM);
            close_world(&w);
        }
        cr_assert_eq(lasted, 6, "%d at lag %u", lasted, lag);
    }
}

/* Where work lags by more than a step, its memory is not done when the next one asks for it:
 * several steps become one period. */
Test(pool_cycle_streams, steps_that_lag_by_more_than_one_become_one_period)
{
    const struct step step = draw_step(1);
    struct world w = open_world(2 * (unsigned)step.count);
    cr_assert(lasts(&w, &step, 2 * WARM));
    cr_assert_gt(w.pool->trail.period, step.count);
    close_world(&w);
}

/* Where streams take memory of each other in every step there is no place to learn: blocks are
 * placed anew, each stream's by themselves, once that fits into what is cached, or there is
 * plenty. */
Test(pool_cycle_streams, streams_that_take_memory_of_each_other_are_placed_apart)
{
    for (uint64_t seed = 1; seed <= 6; seed++) {
        const struct step step = draw_step(seed);
        struct world w = open_bare_world(7, NULL);
        bool lasted = false;
        for (int i = 0; i < 40 && !lasted; i++)
            lasted = lasts(&w, &step, WARM);
        cr_assert(lasted, "seed %d", (int)seed);
        close_world(&w);
    }
}

/* ---- what else may come ---- */

/* A stream that is destroyed has no work left; another one may have its handle. */
Test(pool_cycle_streams, a_stream_may_go_and_come_again)
{
    const struct step step = draw_step(5);
    struct world w = open_cycle(&step, 1);
    for (size_t at = 0; at < step.count; at += 7) {
        w.held = 1 << 2;
        play(&w, &step, 0, at);
        rebatch_stream_destroy(w.device, w.streams[2]);
        cr_assert_eq(rebatch_stream_create(&w.streams[2], w.device), REBATCH_OK);
        w.held = 0;
        play(&w, &step, at, step.count);
        assert_valid(w.pool);
        play_until_it_runs(&w, &step);
    }
    close_world(&w);
}

Test(pool_cycle_streams, a_rollback_takes_back_what_other_streams_use)
{
    const struct step step = draw_step(6);
    struct world w = open_cycle(&step, 1);
    for (size_t at = 1; at < step.count; at += 5) {
        w.held = 7;
        const rebatch_scope scope = begin(w.pool);
        play(&w, &step, 0, at);
        cr_assert_eq(rebatch_scope_rollback(w.pool, scope), REBATCH_OK);
        cr_assert_eq(stats_of(w.pool).live_bytes, 0);
        assert_valid(w.pool);
        memset(w.blocks, 0, sizeof w.blocks);
        play_times(&w, &step, 1);
        w.held = 0;
        play_until_it_runs(&w, &step);
    }
    close_world(&w);
}

/* The frees of blocks from before the scope are carried out when it is committed. */
Test(pool_cycle_streams, frees_of_older_blocks_that_are_used_wait_for_the_commit)
{
    const struct step step = draw_step(6);
    struct world w = open_cycle(&step, 1);
    play(&w, &step, 0, step.count / 2);
    const uint64_t in_use = stats_of(w.pool).blocks;
    const rebatch_scope scope = begin(w.pool);
    w.held = 7;
    for (size_t of = 0; of < BLOCKS; of++)
        if (w.blocks[of].address)
            give(w.pool, w.blocks[of].address);
    cr_assert_eq(stats_of(w.pool).blocks, in_use);
    cr_assert_not(runs(&w));
    assert_valid(w.pool);
    cr_assert_eq(rebatch_scope_commit(w.pool, scope), REBATCH_OK);
    cr_assert_eq(stats_of(w.pool).blocks, 0);
    memset(w.blocks, 0, sizeof w.blocks);
    play_times(&w, &step, 1);
    close_world(&w);
}

/* What is promised by a reserve is there at once, so it must not be what waits for a stream. */
Test(pool_cycle_streams, a_step_that_reserves_has_none_where_streams_use_others_blocks)
{
    struct step step = draw_step(2);
    for (int with_uses = 1; with_uses >= 0; with_uses--) {
        struct world w = open_world(1);
        for (int i = 0; i < WARM; i++) {
            cr_assert_eq(rebatch_pool_reserve(w.pool, GRANULE, w.streams[1]), REBATCH_OK);
            play_times(&w, &step, 1);
            cr_assert(!with_uses || !runs(&w));
        }
        cr_assert_neq(with_uses, runs(&w));
        close_world(&w);
        size_t count = 0;
        for (size_t i = 0; i < step.count; i++)
            if (step.calls[i].what != USE)
                step.calls[count++] = step.calls[i];
        step.count = count;
    }
}

/* ---- what fails ---- */

/* Without events nothing is known to be done before it is waited for: it is left, and no memory is
 * given out too early. */
Test(pool_cycle_streams, every_call_for_an_event_may_fail)
{
    const struct step step = draw_step(1);
    struct world w = open_cycle(&step, 7);
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    plan.calls = REBATCH_FAULT_EVENT;
    for (int forever = 0; forever < 2; forever++)
        for (plan.nth = 1; plan.nth < 40; plan.nth++) {
            plan.times = forever ? REBATCH_FAULT_FOREVER : 1;
            cr_assert_eq(rebatch_fault_arm(w.device, &plan), REBATCH_OK);
            play_times(&w, &step, 6);
            assert_valid(w.pool);
        }
    plan.nth = 0;
    cr_assert_eq(rebatch_fault_arm(w.device, &plan), REBATCH_OK);
    w.lag = 1;
    play_until_it_runs(&w, &step);
    close_world(&w);
}

static uint64_t failed_calls(const struct world *w)
{
    uint64_t calls, failed;
    cr_assert_eq(rebatch_fault_counts(w->device, &calls, &failed), REBATCH_OK);
    return failed;
}

/* Plays on until a cycle is placed that streams take memory of each other in, or a call of the
 * device has failed in that; then to the end of the step. */
static void play_until_placed(struct world *w, const struct step *step, uint64_t nth)
{
    size_t next = 0;
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    plan.calls = REBATCH_FAULT_RESERVE | REBATCH_FAULT_CREATE | REBATCH_FAULT_MAP |
                 REBATCH_FAULT_ACCESS | REBATCH_FAULT_UNMAP;
    const rebatch_fault_plan none = REBATCH_FAULT_PLAN_INIT;
    const uint64_t before = failed_calls(w);
    plan.nth = nth;
    for (; !runs(w) && failed_calls(w) == before; next = (next + 1) % step->count) {
        const bool places = w->pool->cycle.phase == RBI_CYCLE_READY;
        cr_assert_eq(rebatch_fault_arm(w->device, places ? &plan : &none), REBATCH_OK);
        play_call(w, &step->calls[next]);
    }
    cr_assert_eq(rebatch_fault_arm(w->device, &none), REBATCH_OK);
    play(w, step, next, step->count);
}

/* What was moved then stays so, the calls are served as before, and a later try finds it all. */
Test(pool_cycle_streams, placing_may_fail_at_any_call)
{
    const struct step step = draw_step(3);
    uint64_t nth = 0;
    for (bool placed = false; !placed; nth++) {
        struct world w = open_bare_world(7, NULL);
        play_until_placed(&w, &step, nth + 1);
        placed = runs(&w);
        assert_valid(w.pool);
        for (int i = 0; i < 30 * WARM && !runs(&w); i++)
            play_times(&w, &step, 1);
        cr_assert(runs(&w));
        close_world(&w);
    }
    cr_assert_gt(nth, 10);
}

/* Calls are served as before where the heap has no memory to learn one, or to begin it. */
Test(pool_cycle_streams, every_call_of_the_heap_may_fail)
{
    const struct step step = gathering_step();
    uint64_t nth = 0;
    for (bool began = false; !began; nth++) {
        struct world w = open_world(1);
        play_times(&w, &step, 3);
        rbi_heap_fail(nth + 1, UINT64_MAX);
        play_times(&w, &step, 20);
        rbi_heap_fail(0, 0);
        began = runs(&w);
        assert_valid(w.pool);
        play_times(&w, &step, WARM);
        cr_assert(runs(&w));
        close_world(&w);
    }
    cr_assert_geq(nth, 6); /* calls, places, blocks in use, uses, waits, stretches */
}

/* ---- anything at any time ---- */

static void disturb(struct world *w, uint64_t *random)
{
    rebatch_pool *const pool = w->pool;
    const int stream = (int)(draw(random) % STREAMS);
    const size_t bytes = 1 + draw(random) % (20 * GRANULE), of = draw(random) % BLOCKS;
    rebatch_scope scope;
    void *extra;
    switch (draw(random) % 8) {
    case 0:
        give(pool, take_fresh(w, bytes, stream));
        break;
    case 1:
        scope = begin(pool);
        extra = take_fresh(w, bytes, stream);
        use_on(w, extra, bytes, (stream + 1) % STREAMS);
        cr_assert_eq(rebatch_scope_rollback(pool, scope), REBATCH_OK);
        give(pool, extra);
        break;
    case 2:
        cr_assert_eq(rebatch_pool_trim(pool, bytes, NULL), REBATCH_OK);
        break;
    case 3:
        cr_assert_eq(rebatch_pool_reserve(pool, bytes, w->streams[stream]), REBATCH_OK);
        break;
    case 4:
        assert_valid(pool);
        break;
    case 5:
        if (w->blocks[of].address)
            use_on(w, w->blocks[of].address, w->blocks[of].bytes, stream);
        break;
    case 6:
        w->held = (unsigned)draw(random) % 8;
        break;
    default:
        cr_assert_eq(rbi_pool_admit(pool, bytes, w->streams[stream]), REBATCH_OK);
    }
}

/* No block overlaps another, or has memory that work may still use, and everything holds. */
Test(pool_cycle_streams, disturbed_cycles_stay_right)
{
    enum { TIMES = 2000 };
    uint64_t served = 0;
    for (uint64_t seed = 31; seed <= 36; seed++) {
        const struct step step = draw_step(seed);
        struct world w = open_world(1 + seed % 3 * 7);
        uint64_t random = seed;
        for (int times = 0; times < TIMES; times++)
            for (size_t i = 0; i < step.count; i++) {
                play_call(&w, &step.calls[i]);
                if (draw(&random) % (20 * step.count) == 0)
                    disturb(&w, &random);
                if (w.held && draw(&random) % (2 * step.count) == 0)
                    w.held = 0;
            }
        assert_valid(w.pool);
        served += w.pool->cycle.served;
        close_world(&w);
    }
    cr_assert_gt(served, 6 * TIMES * BLOCKS / 4);
}
