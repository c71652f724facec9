/* Holds that a cycle that was ended comes again: soon, where it was, and with the memory that it
 * had. */
#include "pool/place.h"
#include "unit/pool_streams.h"

enum { LOOKS = 10 };

static struct world open_settled(const struct step *step)
{
    struct world w = open_bare_world(1, NULL);
    play_until_it_has_enough(&w, step);
    while (w.pool->cycle.next != w.pool->cycle.calls)
        play_times(&w, step, 1);
    return w;
}

static void note_addresses(const struct world *w, char *addresses[BLOCKS])
{
    const struct rbi_cycle *const cycle = &w->pool->cycle;
    cr_assert_leq(cycle->allocation_count, BLOCKS);
    for (size_t i = 0; i < cycle->allocation_count; i++)
        addresses[i] = cycle->calls[cycle->allocations[i]].address;
}

/* Of all that it holds nothing is moved, and nothing is taken from the device, however often and
 * wherever it is ended: the search cuts up what the cycle had. */
Test(pool_cycle_again, it_has_its_places_and_takes_no_more_memory)
{
    const struct step step = buffered_step();
    struct world w = open_settled(&step);
    char *places[BLOCKS], *again[BLOCKS];
    note_addresses(&w, places);
    const rebatch_pool_stats stats = stats_of(w.pool);
    for (size_t look = 0; look < LOOKS; look++) {
        const size_t at = step.count * look / LOOKS;
        play(&w, &step, 0, at);
        end_cycle(&w);
        play(&w, &step, at, step.count);
        play_until_it_runs(&w, &step);
        note_addresses(&w, again);
        for (size_t i = 0; i < w.pool->cycle.allocation_count; i++)
            cr_assert_eq(again[i], places[i]);
    }
    cr_assert_eq(stats_of(w.pool).remaps, stats.remaps);
    cr_assert_eq(stats_of(w.pool).device_allocations, stats.device_allocations);
    cr_assert_eq(stats_of(w.pool).reserved_bytes, stats.reserved_bytes);
    close_world(&w);
}

/* Another stream takes a part of a stretch while no cycle runs. */
static void *take_part(struct world *w, const struct step *step, size_t bytes)
{
    end_cycle(w);
    play_times(w, step, 1);
    void *const part = take_fresh(w, bytes, 2);
    const char *const from = w->pool->cycle.places.stretches[0].address;
    const uint64_t units = w->pool->cycle.places.stretches[0].units;
    cr_assert((char *)part >= from &&
              (char *)part < from + (size_t)units * REBATCH_POOL_UNIT_BYTES);
    return part;
}

Test(pool_cycle_again, what_other_streams_had_of_its_memory_is_its_own_again)
{
    const struct step step = buffered_step();
    struct world w = open_settled(&step);
    char *places[BLOCKS], *again[BLOCKS];
    note_addresses(&w, places);
    give(w.pool, take_part(&w, &step, 40 * GRANULE));
    play_until_it_runs(&w, &step);
    note_addresses(&w, again);
    for (size_t i = 0; i < w.pool->cycle.allocation_count; i++)
        cr_assert_eq(again[i], places[i]);
    close_world(&w);
}

/* It may run elsewhere then, but nobody else's memory is taken for it. */
Test(pool_cycle_again, what_others_have_in_use_of_its_memory_is_left_to_them)
{
    const struct step step = buffered_step();
    struct world w = open_settled(&step);
    char *const part = take_part(&w, &step, 40 * GRANULE);
    for (int i = 0; i < WARM; i++) {
        play_times(&w, &step, 1);
        for (size_t n = 0; n < w.pool->cycle.allocation_count && runs(&w); n++) {
            const struct rbi_cycle_call *const call =
                &w.pool->cycle.calls[w.pool->cycle.allocations[n]];
            const size_t bytes = (size_t)rbi_cycle_units(call) * REBATCH_POOL_UNIT_BYTES;
            cr_assert(call->address + bytes <= part || part + 40 * GRANULE <= call->address);
        }
    }
    give(w.pool, part);
    close_world(&w);
}

/* Work of other streams in its memory is waited for once in sixteen periods at most, as that holds
 * up whoever enqueues ahead. */
Test(pool_cycle_again, work_in_its_memory_is_waited_for_seldom)
{
    enum { STEPS = 400, PERIODS = 16 };
    const struct step step = buffered_step();
    struct world w = open_settled(&step);
    const struct rbi_cycle *const cycle = &w.pool->cycle;
    uint64_t last = cycle->waited_births;
    size_t waits = 0;
    w.lag = 0; /* work is done when it is waited for */
    for (int i = 0; i < STEPS; i++) {
        play_times(&w, &step, 1);
        end_cycle(&w);
        if (cycle->waited_births == last)
            continue;
        cr_assert(waits == 0 || cycle->waited_births - last >= PERIODS * cycle->allocation_count);
        last = cycle->waited_births;
        waits++;
    }
    cr_assert_geq(waits, 3, "%zu", waits);
    close_world(&w);
}

enum { BATCH_BYTES = 3 * GRANULE };

/* A step with a batch that was prepared in the one before: where blocks are at its end depends on
 * how far a search came. */
static void play_with_batch(struct world *w, const struct step *step, void **batch)
{
    use_on(w, *batch, BATCH_BYTES, 0);
    play(w, step, 0, step->count / 2);
    void *const next = take_fresh(w, BATCH_BYTES, 2);
    play(w, step, step->count / 2, step->count);
    give(w->pool, *batch);
    *batch = next;
}

/* The most steps after a look until a cycle runs. */
static size_t most_steps_lost(struct world *w, const struct step *step, void **batch)
{
    enum { BETWEEN = 40, MOST = 500 };
    size_t most = 0;
    for (size_t look = 0; look < LOOKS; look++) {
        size_t steps = 0;
        for (int i = 0; i < BETWEEN; i++)
            play_with_batch(w, step, batch);
        rbi_pool_enter(w->pool);
        rbi_lock_give(&w->pool->lock);
        for (; steps < MOST && !runs(w); steps++)
            play_with_batch(w, step, batch);
        most = rbi_max(most, steps);
    }
    return most;
}

/* What a cycle with too little time for the streams' work has learnt by that is not forgotten
 * before one lasts, and one whose places are gone has others. */
Test(pool_cycle_again, it_comes_soon_however_far_streams_lag)
{
    enum { SOON = 50 };
    const struct step step = gathering_step();
    for (unsigned lag = 1; lag < 64; lag = 2 * lag + 1) {
        for (int bare = 0; bare < 2; bare++) {
            struct world w = bare ? open_bare_world(lag, NULL) : open_world(lag);
            void *batch = take_fresh(&w, BATCH_BYTES, 2);
            while (!rbi_pool_knows_needs(w.pool))
                give(w.pool, take(w.pool, 512));
            for (int i = 0; i < 2 * WARM; i++)
                play_with_batch(&w, &step, &batch);
            const size_t most = most_steps_lost(&w, &step, &batch);
            cr_assert_leq(most, SOON, "lag %u: %zu steps", lag, most);
            give(w.pool, batch);
            close_world(&w);
        }
    }
}
