/* Holds what a cycle of several streams costs: how many calls for events, how much memory, and
 * what it is ended and begun for. Seeds 1 to 40 for the random test. */
#include "pool/place.h"
#include "unit/pool_streams.h"

/* Marks are made where they are waited for, and as few as can be: with other places than a search
 * finds there are hardly more calls for them than without a cycle. */
Test(pool_cycle_marks, it_costs_hardly_more_calls_of_the_device)
{
    enum { STEPS = 20 };
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.cycles = REBATCH_OFF;
    const struct step step = gathering_step();
    uint64_t calls[2];
    for (int cycles = 0; cycles < 2; cycles++) {
        struct world w = open_world_with(1, cycles ? NULL : &options);
        play_times(&w, &step, WARM);
        const uint64_t before = lazy_event_calls();
        play_times(&w, &step, STEPS);
        cr_assert_eq(runs(&w), cycles);
        calls[cycles] = lazy_event_calls() - before;
        close_world(&w);
    }
    cr_assert_leq(10 * calls[1], 11 * calls[0], "%zu with, %zu without", (size_t)calls[1],
                  (size_t)calls[0]);
}

/* Event calls of so many steps. */
static uint64_t event_calls(struct world *w, const struct step *step, int times)
{
    const uint64_t before = lazy_event_calls();
    play_times(w, step, times);
    cr_assert(runs(w));
    return lazy_event_calls() - before;
}

/* What was held then is held for good, and no more than `most` beyond the peak. */
static void check_held(struct world *w, const struct step *step, size_t most)
{
    const rebatch_pool_stats stats = stats_of(w->pool);
    cr_assert_leq(stats.reserved_bytes, stats.live_peak_bytes + most + STREAMS * GRANULE);
    play_times(w, step, 10 * WARM);
    cr_assert_eq(stats_of(w->pool).reserved_bytes, stats.reserved_bytes);
}

/* A cycle may begin before the pool knows its needs, with what is cached by then. Once they are
 * known it takes a little more, so that what other streams have used is left alone for longer, and
 * one mark serves for many frees. It is a part of the peak, and taken once. */
Test(pool_cycle_marks, where_there_is_plenty_a_mark_serves_for_many_frees)
{
    enum { STEPS = 50 };
    const struct step step = buffered_step();
    struct world w = open_bare_world(1, NULL);
    play_times(&w, &step, WARM);
    cr_assert(w.pool->cycle.hopes);
    const uint64_t before = event_calls(&w, &step, STEPS);
    play_until_it_has_enough(&w, &step);
    cr_assert_leq(4 * event_calls(&w, &step, STEPS), before);
    check_held(&w, &step, (size_t)stats_of(w.pool).live_peak_bytes / 2);
    close_world(&w);
}

/* Others may want what is left: an eighth of it is taken. */
Test(pool_cycle_marks, where_there_is_less_than_plenty_less_is_held_for_it)
{
    enum { PEAK = 98, BEYOND = 160 }; /* granules */
    const struct step step = buffered_step();
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.limit_bytes = (PEAK + BEYOND) * GRANULE;
    struct world w = open_bare_world(1, &options);
    play_until_it_has_enough(&w, &step);
    cr_assert_eq(stats_of(w.pool).live_peak_bytes, PEAK * GRANULE);
    check_held(&w, &step, BEYOND / 8 * GRANULE);
    close_world(&w);
}

/* How far streams lag is known at once when they do, and forgotten by and by when they do not any
 * more. */
Test(pool_cycle_marks, how_far_streams_lag_is_seen)
{
    enum { LAG = 40 };
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.cycles = REBATCH_OFF; /* which would ask no more than it must */
    const struct step step = gathering_step();
    struct world w = open_world_with(1, &options);
    play_times(&w, &step, WARM);
    cr_assert_leq(w.pool->lag_calls, 1);
    w.lag = LAG;
    play_times(&w, &step, WARM);
    cr_assert(w.pool->lag_calls > LAG / 2 && w.pool->lag_calls <= LAG, "%zu",
              (size_t)w.pool->lag_calls);
    w.lag = 1;
    play_times(&w, &step, 20 * WARM);
    cr_assert_leq(w.pool->lag_calls, 2);
    close_world(&w);
}

/* Blocks that are lent to threads' caches are counted as in use before they are as allocated, so
 * that calls seem to go backwards. */
Test(pool_cycle_marks, blocks_that_are_lent_do_not_look_like_lag)
{
    enum { LENT = 5000 };
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.cycles = REBATCH_OFF;
    const struct step step = gathering_step();
    struct world w = open_world_with(0, &options); /* no work is ever done */
    play(&w, &step, 0, step.count / 2);
    w.pool->stats.blocks += LENT;
    play(&w, &step, step.count / 2, step.count);
    w.pool->stats.blocks -= LENT;
    cr_assert_lt(w.pool->lag_calls, LENT);
    finish_work(&w);
    close_world(&w);
}

/* However little streams lag when a cycle begins, its places are good for that, so that they come
 * again. */
Test(pool_cycle_marks, places_are_good_for_a_small_lag)
{
    const struct step step = buffered_step();
    for (uint64_t lag = 1; lag <= 40; lag++) {
        struct world w = open_world(1);
        for (size_t next = 0; !runs(&w); next = (next + 1) % step.count) {
            if (w.pool->cycle.phase == RBI_CYCLE_READY)
                w.pool->lag_calls = lag; /* as it is seen when the next call begins one */
            play_call(&w, &step.calls[next]);
        }
        cr_assert_gt(w.pool->cycle.lead_calls, lag);
        cr_assert_geq(w.pool->cycle.spare_calls, w.pool->cycle.lead_calls);
        cr_assert(rbi_cycle_may_be_apart(&w.pool->cycle));
        close_world(&w);
    }
}

/* Where more blocks are used by others than it is worked out for, the cycle runs with the places
 * that a search finds. */
Test(pool_cycle_marks, with_very_many_uses_it_runs_as_well)
{
    enum { USES = RBI_PLAN_APART_FREES + 3000, STEPS = 60 };
    struct world w = open_bare_world(1, NULL);
    int ran = 0;
    for (int i = 0; i < STEPS; i++) {
        void *const large = take_on(w.pool, 512 * GRANULE, w.streams[1]);
        for (int n = 0; n < USES; n++) {
            void *const block = take_on(w.pool, 512, w.streams[1]);
            cr_assert_eq(rebatch_pool_use_on(w.pool, block, NULL), REBATCH_OK);
            give(w.pool, block);
        }
        give(w.pool, large);
        finish_work(&w);
        ran += runs(&w);
    }
    cr_assert(rbi_pool_knows_needs(w.pool));
    cr_assert_gt(ran, STEPS / 2, "%d", ran);
    close_world(&w);
}

/* A stall of any length is not taken for more than the longest period. */
Test(pool_cycle_marks, lag_has_a_bound)
{
    const struct step step = buffered_step();
    struct world w = open_world(1);
    play_until_it_runs(&w, &step);
    w.pool->lag_calls = RBI_TRAIL_CALLS - 1;
    for (int times = 0; times < 5; times++) {
        w.pool->cycle.lags = true; /* as if it had run into work that was not done */
        w.pool->cycle.periods = 0;
        end_cycle(&w);
        cr_assert_leq(w.pool->lag_calls, RBI_TRAIL_CALLS);
        w.pool->cycle.phase = RBI_CYCLE_NONE;
        for (int i = 0; i < 40 * WARM && !runs(&w); i++)
            play_times(&w, &step, 1);
        if (!runs(&w))
            break;
    }
    close_world(&w);
}

/* Blocks that one stream alone uses need none, however many streams there are. */
Test(pool_cycle_marks, without_uses_it_costs_none)
{
    struct step step = draw_step(2);
    size_t count = 0;
    for (size_t i = 0; i < step.count; i++)
        if (step.calls[i].what != USE)
            step.calls[count++] = step.calls[i];
    step.count = count;
    struct world w = open_cycle(&step, 1);
    const uint64_t before = lazy_event_calls();
    play_times(&w, &step, 50);
    cr_assert(runs(&w));
    cr_assert_eq(lazy_event_calls(), before);
    close_world(&w);
}

/* ---- anything at any time ---- */

/* Two programs by turns, whose streams lag by this and by that or stand still, with cycles ended
 * and memory given back at any time; where `is_tight` there is half as much again as they hold.
 * Blocks never overlap, and none is given out that work may still use. */
static void play_anything(uint64_t seed, bool is_tight)
{
    uint64_t random = seed;
    const struct step steps[2] = {draw_step(seed), draw_step(seed + 1000)};
    struct world w = is_tight ? open_bare_world(1, NULL) : open_world(1);
    play_times(&w, &steps[0], 3);
    play_times(&w, &steps[1], 3);
    if (is_tight)
        w.pool->limit_bytes = w.pool->stats.reserved_bytes / 2 * 3;
    w.pool->births += draw(&random) % 2 * 200000; /* its needs are known then */
    for (int i = 0, which = 0; i < 200; i++) {
        const uint64_t what = draw(&random) % 24;
        which ^= what == 0;
        if (what == 1 || what == 2)
            w.lag = 1 + (unsigned)(draw(&random) % (what == 1 ? 400 : 10));
        if (what == 3)
            end_cycle(&w);
        if (what == 4)
            w.held = (unsigned)(draw(&random) % 8);
        if (what == 5 || what == 6)
            w.held = 0;
        if (what == 7)
            cr_assert_eq(rebatch_pool_trim(w.pool, 0, NULL), REBATCH_OK);
        if (what == 8)
            assert_valid(w.pool);
        play_times(&w, &steps[which], 1);
    }
    w.held = 0;
    finish_work(&w);
    close_world(&w);
}

Test(pool_cycle_marks, two_programs_by_turns_stay_right)
{
    for (uint64_t seed = 1; seed <= 40; seed++)
        play_anything(seed, seed % 2);
}
