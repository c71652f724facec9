/* Holds what a pool does once its calls repeat: they are served as in the period before, and nobody
 * can tell but by the time it takes. Seeds 1 to 6 where a test draws. */
#include "unit/pool_help.h"
#include "unit/pool_script.h"

enum { DEVICE_GRANULES = 2048 };

static struct run open_run(const rebatch_pool_options *options)
{
    return (struct run){.rig = rig_open(DEVICE_GRANULES, options)};
}

/* A pool in which a script runs as a cycle. */
static struct run open_cycle(const struct script *script)
{
    struct run run = open_run(NULL);
    play_times(&run, script, WARM);
    cr_assert(runs(&run));
    return run;
}

Test(pool_cycles, a_step_that_repeats_is_served_at_the_places_it_had)
{
    for (uint64_t seed = 1; seed <= 6; seed++) {
        const struct script script = write_script(seed);
        struct run run = open_cycle(&script);
        void *places[STEP] = {NULL};
        const uint64_t made = run.rig.pool->block_nodes.made;
        for (int times = 0; times < 3; times++)
            for (size_t i = 0; i < script.count; i++) {
                const struct call *call = &script.calls[i];
                play_call(&run, call);
                if (call->bytes == 0)
                    continue;
                cr_assert(times == 0 || places[call->of] == run.blocks[call->of]);
                places[call->of] = run.blocks[call->of];
            }
        cr_assert(runs(&run));
        cr_assert_eq(run.rig.pool->block_nodes.made, made);
        close_run(&run);
    }
}

/* Wherever the calls go another way, blocks stay where they are and all is as it would have
 * been. */
Test(pool_cycles, it_is_left_at_any_call)
{
    const struct script script = write_script(1);
    const size_t bytes = strange_bytes(&script);
    struct run run = open_cycle(&script);
    for (size_t at = 0; at < script.count; at++) {
        play(&run, &script, 0, at);
        cr_assert(runs(&run));
        void *other = take(run.rig.pool, bytes);
        memset(other, 0xee, bytes);
        cr_assert_not(runs(&run));
        assert_valid(run.rig.pool);
        play(&run, &script, at, script.count);
        give(run.rig.pool, other);
        cr_assert_eq(stats_of(run.rig.pool).live_bytes, 0);
        play_times(&run, &script, AGAIN);
    }
    close_run(&run);
}

/* Looking at blocks ends it for the moment; it is taken up again. */
Test(pool_cycles, it_is_taken_up_again_after_a_look)
{
    const struct script script = write_script(2);
    struct run run = open_cycle(&script);
    play(&run, &script, 0, script.count / 2);
    settle(run.rig.pool);
    cr_assert_not(runs(&run));
    assert_valid(run.rig.pool);
    play(&run, &script, script.count / 2, script.count);
    play_times(&run, &script, AGAIN);
    cr_assert(runs(&run));
    close_run(&run);
}

/* What only counts does not end it, nor questions about older blocks: a session asks for that with
 * every micro-batch. */
Test(pool_cycles, counting_does_not_end_it)
{
    const struct script script = write_script(3);
    struct run run = open_run(NULL);
    void *older = take(run.rig.pool, GRANULE);
    play_times(&run, &script, WARM);
    cr_assert(runs(&run));
    size_t bytes;
    play(&run, &script, 0, script.count / 2);
    cr_assert_eq(rebatch_pool_block_bytes(&bytes, run.rig.pool, older), REBATCH_OK);
    cr_assert_eq(bytes, GRANULE);
    const rebatch_scope scope = begin(run.rig.pool);
    rebatch_scope_stats stats;
    cr_assert_eq(rebatch_scope_get_stats(&stats, run.rig.pool, scope), REBATCH_OK);
    cr_assert_eq(rebatch_scope_commit(run.rig.pool, scope), REBATCH_OK);
    cr_assert_eq(rbi_pool_admit(run.rig.pool, GRANULE, NULL), REBATCH_OK);
    cr_assert_eq(rbi_pool_expect(run.rig.pool, 0, NULL), REBATCH_OK);
    rbi_pool_mark(run.rig.pool);
    (void)rbi_pool_peak_since_mark(run.rig.pool);
    (void)stats_of(run.rig.pool);
    cr_assert(runs(&run));
    play(&run, &script, script.count / 2, script.count);
    cr_assert(runs(&run));
    give(run.rig.pool, older);
    close_run(&run);
}

/* Statistics and tags are those of a pool that never has a cycle, as one that records events. */
Test(pool_cycles, it_counts_as_without)
{
    const struct script script = write_script(4);
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.events = 16;
    struct run cycle = open_cycle(&script), plain = open_run(&options);
    play_times(&plain, &script, WARM);
    for (size_t i = 0; i < 3 * script.count; i++) {
        play_call(&cycle, &script.calls[i % script.count]);
        play_call(&plain, &script.calls[i % script.count]);
        const rebatch_pool_stats a = stats_of(cycle.rig.pool), b = stats_of(plain.rig.pool);
        cr_assert_eq(a.live_bytes, b.live_bytes);
        cr_assert_eq(a.live_peak_bytes, b.live_peak_bytes);
        cr_assert_eq(a.requested_bytes, b.requested_bytes);
        cr_assert_eq(a.allocations, b.allocations);
        cr_assert_eq(a.frees, b.frees);
        cr_assert_eq(a.blocks, b.blocks);
        cr_assert_eq(a.blocks_peak, b.blocks_peak);
        rebatch_tag_usage at, bt;
        cr_assert_eq(rebatch_pool_get_tag_usage(&at, cycle.rig.pool, 0), REBATCH_OK);
        cr_assert_eq(rebatch_pool_get_tag_usage(&bt, plain.rig.pool, 0), REBATCH_OK);
        cr_assert_eq(at.live_bytes, bt.live_bytes);
        cr_assert_eq(at.peak_bytes, bt.peak_bytes);
    }
    cr_assert(runs(&cycle));
    close_run(&cycle);
    close_run(&plain);
}

/* ---- what crosses from one step into the next ---- */

/* As a loss that is kept until the next one is there. */
Test(pool_cycles, a_block_that_outlives_its_step_has_its_places_too)
{
    const struct script script = write_script(5);
    struct run run = open_run(NULL);
    unsigned char *loss = play_with_loss(&run, &script, WARM);
    cr_assert(runs(&run));
    assert_valid(run.rig.pool);
    cr_assert_eq(*loss, (unsigned char)(WARM - 1));
    give(run.rig.pool, loss);
    close_run(&run);
}

/* What is kept for good in every step makes each another one. */
Test(pool_cycles, steps_that_leave_something_behind_are_no_cycle)
{
    const struct script script = write_script(5);
    struct run run = open_run(NULL);
    void *kept[WARM];
    for (int i = 0; i < WARM; i++) {
        play(&run, &script, 0, script.count);
        kept[i] = take(run.rig.pool, 700);
        cr_assert_not(runs(&run));
    }
    for (int i = 0; i < WARM; i++)
        give(run.rig.pool, kept[i]);
    close_run(&run);
}

/* A step of several micro-batches, of which each repeats the one before, and an update. */
Test(pool_cycles, a_step_of_several_micro_batches_is_one)
{
    const struct script micro_batch = write_script(1), update = write_script(2);
    struct run run = open_run(NULL);
    for (int step = 0; step < WARM; step++) {
        play_times(&run, &micro_batch, 4);
        play(&run, &update, 0, update.count);
    }
    cr_assert(runs(&run));
    cr_assert_eq(run.rig.pool->trail.period, 4 * micro_batch.count + update.count);
    close_run(&run);
}

/* What never repeats is looked through now and then only; a period is found all the same. */
Test(pool_cycles, a_step_is_found_after_a_long_time_without_one)
{
    enum { CALLS = 400000, STEPS_MOST = 10000 };
    const struct script script = write_script(3);
    struct run run = open_run(NULL);
    uint64_t random = 1;
    for (int i = 0; i < CALLS; i++)
        give(run.rig.pool, take(run.rig.pool, draw_bytes(&random)));
    cr_assert_not(runs(&run));
    int steps = 0;
    for (; steps < STEPS_MOST && !runs(&run); steps++)
        play(&run, &script, 0, script.count);
    cr_assert(runs(&run));
    close_run(&run);
}

/* ---- what is reserved ---- */

/* The reserve of a cycle is there, whichever way the calls go after it. */
Test(pool_cycles, what_is_reserved_in_every_step_is_there)
{
    enum { RESERVED = 100 };
    const struct script script = write_script(2);
    struct run run = open_run(NULL);
    for (int step = 0; step < WARM; step++) {
        cr_assert_eq(rebatch_pool_reserve(run.rig.pool, RESERVED * GRANULE, NULL), REBATCH_OK);
        give(run.rig.pool, take(run.rig.pool, RESERVED * GRANULE));
        play(&run, &script, 0, script.count);
    }
    cr_assert(runs(&run));
    cr_assert_eq(rebatch_pool_reserve(run.rig.pool, RESERVED * GRANULE, NULL), REBATCH_OK);
    cr_assert(runs(&run));
    const size_t held = stats_of(run.rig.pool).reserved_bytes;
    cr_assert_eq(rebatch_device_set_capacity(run.rig.device, held), REBATCH_OK);
    void *half[2] = {take(run.rig.pool, RESERVED / 2 * GRANULE),
                     take(run.rig.pool, RESERVED / 2 * GRANULE)};
    assert_valid(run.rig.pool);
    give(run.rig.pool, half[0]);
    give(run.rig.pool, half[1]);
    close_run(&run);
}

Test(pool_cycles, another_reserve_than_the_last_step_had_is_made)
{
    const struct script script = write_script(2);
    struct run run = open_run(NULL);
    for (int step = 0; step < WARM; step++) {
        cr_assert_eq(rebatch_pool_reserve(run.rig.pool, GRANULE, NULL), REBATCH_OK);
        give(run.rig.pool, take(run.rig.pool, GRANULE));
        play(&run, &script, 0, script.count);
    }
    cr_assert(runs(&run));
    cr_assert_eq(rebatch_pool_reserve(run.rig.pool, DEVICE_GRANULES / 2 * GRANULE, NULL),
                 REBATCH_OK);
    cr_assert_not(runs(&run));
    cr_assert_geq(stats_of(run.rig.pool).reserved_bytes, DEVICE_GRANULES / 2 * GRANULE);
    assert_refused(rebatch_pool_reserve(run.rig.pool, DEVICE_GRANULES * 2 * GRANULE, NULL),
                   REBATCH_OOM, "");
    close_run(&run);
}

/* ---- scopes ---- */

Test(pool_cycles, a_rollback_takes_back_what_it_gave)
{
    const struct script script = write_script(6);
    struct run run = open_cycle(&script);
    const rebatch_scope scope = begin(run.rig.pool);
    play(&run, &script, 0, script.count / 2);
    cr_assert(runs(&run));
    const uint64_t in_use = stats_of(run.rig.pool).blocks;
    cr_assert_gt(in_use, 0);
    cr_assert_eq(rebatch_scope_rollback(run.rig.pool, scope), REBATCH_OK);
    cr_assert_eq(stats_of(run.rig.pool).live_bytes, 0);
    assert_valid(run.rig.pool);
    for (size_t i = 0; i < STEP; i++) /* late */
        if (run.blocks[i])
            give(run.rig.pool, run.blocks[i]);
    cr_assert_eq(stats_of(run.rig.pool).late_frees, in_use);
    play_times(&run, &script, WARM);
    close_run(&run);
}

Test(pool_cycles, frees_of_older_blocks_wait_for_the_commit)
{
    const struct script script = write_script(6);
    struct run run = open_cycle(&script);
    play(&run, &script, 0, script.count / 2);
    const uint64_t in_use = stats_of(run.rig.pool).blocks;
    const rebatch_scope scope = begin(run.rig.pool);
    for (size_t i = 0; i < STEP; i++)
        if (run.blocks[i])
            give(run.rig.pool, run.blocks[i]);
    cr_assert_eq(stats_of(run.rig.pool).blocks, in_use);
    assert_valid(run.rig.pool);
    cr_assert_eq(rebatch_scope_commit(run.rig.pool, scope), REBATCH_OK);
    cr_assert_eq(stats_of(run.rig.pool).blocks, 0);
    close_run(&run);
}

/* ---- what asks for more ---- */

Test(pool_cycles, bad_frees_are_refused_as_ever)
{
    const struct script script = write_script(1);
    struct run run = open_cycle(&script);
    size_t at = 0;
    while (script.calls[at].bytes != 0)
        at++;
    play(&run, &script, 0, at);
    void *freed = run.blocks[script.calls[at].of];
    play(&run, &script, at, at + 1);
    cr_assert(runs(&run));
    int foreign;
    assert_refused(rebatch_pool_free(run.rig.pool, &foreign), REBATCH_E_INVALID, "expected one");
    assert_refused(rebatch_pool_free(run.rig.pool, freed), REBATCH_E_INVALID, "freed already");
    assert_valid(run.rig.pool);
    play(&run, &script, at + 1, script.count);
    close_run(&run);
}

Test(pool_cycles, memory_goes_back_to_the_device_in_the_middle_of_one)
{
    const struct script script = write_script(2);
    struct run run = open_cycle(&script);
    play(&run, &script, 0, script.count / 3);
    size_t released;
    cr_assert_eq(rebatch_pool_trim(run.rig.pool, 0, &released), REBATCH_OK);
    cr_assert_gt(released, 0);
    assert_valid(run.rig.pool);
    play(&run, &script, script.count / 3, script.count);
    play_times(&run, &script, WARM);
    cr_assert(runs(&run));
    close_run(&run);
}

Test(pool_cycles, a_request_that_does_not_fit_is_reported)
{
    const struct script script = write_script(3);
    struct run run = open_cycle(&script);
    play(&run, &script, 0, script.count / 2);
    void *pointer;
    assert_refused(
        rebatch_pool_alloc(&pointer, run.rig.pool, (DEVICE_GRANULES + 1) * GRANULE, NULL, 0),
        REBATCH_OOM, "would have fitted");
    assert_valid(run.rig.pool);
    play(&run, &script, script.count / 2, script.count);
    close_run(&run);
}

Test(pool_cycles, another_stream_and_another_thread_may_use_its_blocks)
{
    const struct script script = write_script(4);
    struct run run = open_cycle(&script);
    rebatch_stream stream;
    cr_assert_eq(rebatch_stream_create(&stream, run.rig.device), REBATCH_OK);
    play(&run, &script, 0, script.count / 2);
    size_t of = 0;
    while (!run.blocks[of])
        of++;
    cr_assert_eq(rebatch_pool_use_on(run.rig.pool, run.blocks[of], stream), REBATCH_OK);
    size_t bytes;
    cr_assert_eq(rebatch_pool_block_bytes(&bytes, run.rig.pool, run.blocks[of]), REBATCH_OK);
    void *there = take_on(run.rig.pool, 5 * GRANULE, stream);
    assert_valid(run.rig.pool);
    contend(run.rig.pool);
    play(&run, &script, script.count / 2, script.count);
    give(run.rig.pool, there);
    play_times(&run, &script, 3);
    cr_assert_not(runs(&run)); /* threads that wait for each other have caches instead */
    cr_assert_eq(rebatch_stream_synchronize(run.rig.device, stream), REBATCH_OK);
    assert_valid(run.rig.pool);
    rebatch_stream_destroy(run.rig.device, stream);
    close_run(&run);
}

/* Without host memory to learn one calls are served as before. */
Test(pool_cycles, without_host_memory_there_is_none)
{
    const struct script script = write_script(5);
    struct run run = open_run(NULL);
    play_times(&run, &script, 3);
    rbi_heap_fail(1, UINT64_MAX);
    play_times(&run, &script, WARM);
    rbi_heap_fail(0, 0);
    cr_assert_not(runs(&run));
    cr_assert_eq(run.rig.pool->cycle.served, 0);
    close_run(&run);
}

/* ---- anything at any time ---- */

static void disturb(struct run *run, uint64_t *random)
{
    rebatch_pool *pool = run->rig.pool;
    void *extra;
    rebatch_scope scope;
    switch (draw(random) % 6) {
    case 0:
        give(pool, take(pool, draw_bytes(random)));
        break;
    case 1:
        scope = begin(pool);
        extra = take(pool, draw_bytes(random));
        cr_assert_eq(rebatch_scope_rollback(pool, scope), REBATCH_OK);
        give(pool, extra);
        break;
    case 2:
        cr_assert_eq(rebatch_pool_trim(pool, draw_bytes(random), NULL), REBATCH_OK);
        break;
    case 3:
        cr_assert_eq(rebatch_pool_reserve(pool, draw_bytes(random), NULL), REBATCH_OK);
        break;
    case 4:
        assert_valid(pool);
        break;
    default:
        cr_assert_eq(rbi_pool_admit(pool, draw_bytes(random), NULL), REBATCH_OK);
    }
}

/* Blocks never overlap, and everything holds, whatever comes between the calls of a cycle. */
Test(pool_cycles, disturbed_cycles_stay_right)
{
    uint64_t served = 0;
    for (uint64_t seed = 1; seed <= 6; seed++) {
        const struct script script = write_script(seed);
        struct run run = open_run(NULL);
        uint64_t random = seed;
        for (int times = 0; times < 10 * WARM; times++)
            for (size_t i = 0; i < script.count; i++) {
                play_call(&run, &script.calls[i]);
                if (draw(&random) % (10 * script.count) == 0)
                    disturb(&run, &random);
            }
        assert_valid(run.rig.pool);
        served += run.rig.pool->cycle.served;
        close_run(&run);
    }
    cr_assert_gt(served, 6 * 10 * WARM * STEP / 4);
}

/* ---- switched off ---- */

/* Each call is searched for, however often a step repeats, and no memory is taken to find out. What
 * is in use, and was at most, is the same. */
Test(pool_cycles, switched_off_there_is_none)
{
    const struct script script = write_script(1);
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.cycles = REBATCH_OFF;
    struct run run = open_run(&options), cycle = open_cycle(&script);
    for (int step = 0; step < WARM; step++) {
        play(&run, &script, 0, script.count);
        cr_assert_eq(run.rig.pool->cycle.phase, RBI_CYCLE_NONE);
    }
    cr_assert_eq(run.rig.pool->cycle.served, 0);
    cr_assert_eq(run.rig.pool->cycle.capacity, 0);
    cr_assert_eq(run.rig.pool->trail.mask, 0);
    cr_assert_eq(stats_of(run.rig.pool).allocations, WARM * STEP);
    cr_assert_eq(stats_of(run.rig.pool).live_peak_bytes, stats_of(cycle.rig.pool).live_peak_bytes);
    assert_valid(run.rig.pool);
    close_run(&run);
    close_run(&cycle);
}

Test(pool_cycles, switched_on_there_is_one)
{
    const struct script script = write_script(1);
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.cycles = REBATCH_ON;
    struct run run = open_run(&options);
    play_times(&run, &script, WARM);
    cr_assert(runs(&run));
    close_run(&run);
}
