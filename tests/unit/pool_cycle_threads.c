/* Holds what cycles are to a pool that several threads use: those that take turns have them, and
 * those that wait for each other have caches instead. Threads run in the order that a test says
 * (be_thread). Seeds 1 to 6 where a test draws. */
#include <time.h>

#include "unit/pool_help.h"
#include "unit/pool_script.h"

enum { FORWARD = 1003, BACKWARD, LOADER };

static struct run open_run(void)
{
    return (struct run){.rig = rig_open(2048, NULL)};
}

/* A step whose second half another thread runs, as that of an autograd engine does. */
static void play_in_two(struct run *run, const struct script *script, int times)
{
    for (int i = 0; i < times; i++) {
        be_thread(FORWARD);
        play(run, script, 0, script->count / 2);
        be_thread(BACKWARD);
        play(run, script, script->count / 2, script->count);
    }
}

Test(pool_cycle_threads, threads_that_take_turns_have_one)
{
    for (uint64_t seed = 1; seed <= 6; seed++) {
        const struct script script = write_script(seed);
        struct run run = open_run();
        play_in_two(&run, &script, WARM);
        cr_assert(runs(&run));
        const uint64_t periods = run.rig.pool->cycle.periods;
        play_in_two(&run, &script, 10);
        cr_assert_eq(run.rig.pool->cycle.periods, periods + 10);
        assert_valid(run.rig.pool);
        close_run(&run);
    }
}

/* What one thread has begun another goes on with. */
Test(pool_cycle_threads, it_goes_on_in_another_thread)
{
    const struct script script = write_script(1);
    struct run run = open_run();
    play_times(&run, &script, WARM);
    cr_assert(runs(&run));
    const uint64_t periods = run.rig.pool->cycle.periods;
    play_in_two(&run, &script, 10);
    cr_assert(runs(&run));
    cr_assert_eq(run.rig.pool->cycle.periods, periods + 10);
    close_run(&run);
}

/* A thread that allocates now and then ends one, as any other call does, and it comes again. */
Test(pool_cycle_threads, a_call_of_another_thread_ends_it_for_a_while)
{
    const struct script script = write_script(2);
    struct run run = open_run();
    uint64_t random = 2;
    play_in_two(&run, &script, WARM);
    for (int i = 0; i < 50; i++) {
        const size_t at = draw(&random) % script.count;
        play(&run, &script, 0, at);
        be_thread(LOADER);
        unsigned char *batch = take(run.rig.pool, 1 + draw(&random) % (3 * GRANULE));
        batch[0] = 77;
        be_thread(FORWARD);
        play(&run, &script, at, script.count);
        play_times(&run, &script, AGAIN);
        cr_assert(runs(&run));
        cr_assert_eq(batch[0], 77);
        be_thread(LOADER);
        give(run.rig.pool, batch);
        be_thread(FORWARD);
        play_times(&run, &script, AGAIN);
        cr_assert(runs(&run));
    }
    assert_valid(run.rig.pool);
    close_run(&run);
}

/* As long as threads wait for each other small blocks come from caches, and no step repeats for the
 * pool; when they have not for long enough it is as if they never had. */
Test(pool_cycle_threads, when_threads_no_longer_wait_there_is_one_again)
{
    const struct script script = write_script(3);
    struct run run = open_run();
    play_in_two(&run, &script, WARM);
    contend(run.rig.pool);
    play_in_two(&run, &script, 10);
    cr_assert_not(runs(&run));
    cr_assert(run.rig.pool->lending);
    run.rig.pool->lock.waits = 2 * RBI_LOCK_CONTENDED;
    for (size_t calls = 0; calls < 16 * RBI_LOCK_CALM && !runs(&run); calls += script.count)
        play_in_two(&run, &script, 1);
    cr_assert(runs(&run));
    cr_assert_not(run.rig.pool->lending);
    assert_valid(run.rig.pool);
    close_run(&run);
}

/* ---- whose the lock is ---- */

static uint64_t owner_of(const struct run *run)
{
    return atomic_load_explicit(&run->rig.pool->lock.owner, memory_order_relaxed);
}

/* A thread that has the pool for itself for long needs no atomic operation for a call, until
 * another comes; and again later. */
Test(pool_cycle_threads, a_thread_that_is_alone_for_long_owns_the_lock)
{
    const struct script script = write_script(4);
    struct run run = open_run();
    for (int i = 0; i < 3; i++) {
        be_thread(LOADER);
        (void)stats_of(run.rig.pool);
        be_thread(FORWARD);
        for (int n = 1; n < RBI_LOCK_ALONE; n++)
            (void)stats_of(run.rig.pool);
        cr_assert_eq(owner_of(&run), RBI_LOCK_SHARED);
        (void)stats_of(run.rig.pool);
        cr_assert_eq(owner_of(&run), FORWARD);
        play_times(&run, &script, WARM);
        cr_assert(runs(&run));
        be_thread(LOADER);
        unsigned char *batch = take(run.rig.pool, (size_t)(5 + i) * GRANULE);
        cr_assert_eq(owner_of(&run), RBI_LOCK_SHARED);
        give(run.rig.pool, batch);
    }
    assert_valid(run.rig.pool);
    close_run(&run);
}

/* Its caches give back what they have before a cycle begins. */
Test(pool_cycle_threads, an_owner_that_was_in_others_way_has_one)
{
    const struct script script = write_script(5);
    struct run run = open_run();
    contend(run.rig.pool);
    give(run.rig.pool, take(run.rig.pool, 20 * GRANULE)); /* so that no peak rises now */
    void *large = take(run.rig.pool, 9 * GRANULE);
    be_thread(LOADER);
    void *small = take(run.rig.pool, KIB);
    be_thread(FORWARD);
    cr_assert(run.rig.pool->lending);
    run.rig.pool->lock.waits = RBI_LOCK_CONTENDED - 1;
    size_t bytes;
    for (int i = 0; i < RBI_LOCK_ALONE; i++) /* what looks at no block in a cache */
        cr_assert_eq(rebatch_pool_block_bytes(&bytes, run.rig.pool, large), REBATCH_OK);
    cr_assert_eq(owner_of(&run), FORWARD);
    cr_assert(run.rig.pool->lending);
    play_times(&run, &script, WARM);
    cr_assert(runs(&run));
    cr_assert_not(run.rig.pool->lending);
    be_thread(LOADER);
    give(run.rig.pool, small);
    give(run.rig.pool, large);
    assert_valid(run.rig.pool);
    close_run(&run);
}

static struct rbi_lock one_lock;
static atomic_int taken;

static void *take_it(void *unused)
{
    (void)unused;
    rbi_lock_take(&one_lock);
    atomic_store(&taken, 1);
    rbi_lock_give(&one_lock);
    return NULL;
}

/* A thread that was stopped between its two looks at whose the lock is says that it is not busy
 * when another has long been the owner, and is within. */
Test(pool_cycle_threads, who_lost_the_lock_late_lets_nobody_in)
{
    const struct timespec a_while = {.tv_nsec = 20 * 1000 * 1000};
    pthread_t third;
    rbi_lock_init(&one_lock);
    be_thread(FORWARD);
    rbi_lock_take(&one_lock);
    rbi_lock_give(&one_lock);
    be_thread(BACKWARD);
    for (int i = 0; i < RBI_LOCK_ALONE; i++) {
        rbi_lock_take(&one_lock);
        rbi_lock_give(&one_lock);
    }
    cr_assert_eq(atomic_load(&one_lock.owner), BACKWARD);
    rbi_lock_take(&one_lock);
    atomic_store(rbi_lock_busy(&one_lock, FORWARD), 0);
    cr_assert_eq(pthread_create(&third, NULL, take_it, NULL), 0);
    (void)nanosleep(&a_while, NULL);
    cr_assert_eq(atomic_load(&taken), 0);
    rbi_lock_give(&one_lock);
    cr_assert_eq(pthread_join(third, NULL), 0);
    cr_assert_eq(atomic_load(&taken), 1);
}

/* Each owner has a place of its own to say that it is busy: who finds it taken is never one. */
Test(pool_cycle_threads, threads_whose_places_are_one_do_not_both_own_it)
{
    rbi_lock_init(&one_lock);
    be_thread(FORWARD);
    rbi_lock_take(&one_lock);
    rbi_lock_give(&one_lock);
    be_thread(FORWARD + RBI_LOCK_OWNERS);
    for (int i = 0; i < 2 * RBI_LOCK_ALONE; i++) {
        rbi_lock_take(&one_lock);
        rbi_lock_give(&one_lock);
    }
    cr_assert_eq(atomic_load(&one_lock.owner), RBI_LOCK_SHARED);
}

/* Allocations in caches are counted, but not seen: a block of theirs is none of a period that is
 * being learnt, whatever its number. */
Test(pool_cycle_threads, what_caches_gave_out_is_no_part_of_a_period)
{
    enum { BLOCKS = 40 };
    struct rig rig = rig_open(2048, NULL);
    rebatch_pool *const pool = rig.pool;
    rebatch_stream stream;
    cr_assert_eq(rebatch_stream_create(&stream, rig.device), REBATCH_OK);
    void *blocks[BLOCKS], *small = NULL;
    for (int step = 0; step < 4000 && !small; step++) {
        size_t k = 0;
        for (; k < BLOCKS && !small; k++) {
            blocks[k] = take(pool, GRANULE + 3000 * k);
            if (k != BLOCKS / 2)
                continue;
            if (pool->cycle.phase == RBI_CYCLE_LEARNS && pool->cycle.noted > 5) {
                contend(pool);
                be_thread(LOADER);
                small = take(pool, 512);
                for (size_t i = 0; i < 8 * pool->cycle.capacity; i++)
                    give(pool, take(pool, KIB));
                (void)stats_of(pool); /* the small one is the pool's from here on, and the last */
                give(pool, small);
                cr_assert_eq(pool->cycle.phase, RBI_CYCLE_NONE);
            }
            cr_assert_eq(rebatch_pool_use_on(pool, blocks[k], stream), REBATCH_OK);
        }
        while (k-- > 0)
            give(pool, blocks[k]);
    }
    cr_assert_not_null(small);
    assert_valid(pool);
    rebatch_stream_destroy(rig.device, stream);
    rig_close(&rig);
}
