/* Holds what the pool promises about streams: no block is given out while work may still use it.
 * Seeds: none. A gate is a task that holds a stream up until the test opens it. */
#include <semaphore.h>
#include <unistd.h>

#include "fault/fault_device.h"
#include "unit/awaited.h"
#include "unit/pool_help.h"

struct gate {
    sem_t open;
};

static void pass(void *user)
{
    struct gate *gate = user;
    while (sem_wait(&gate->open) != 0) {
    }
}

static void shut(struct gate *gate, rebatch_device *device, rebatch_stream stream)
{
    cr_assert_eq(sem_init(&gate->open, 0, 0), 0);
    cr_assert_eq(rebatch_stream_call(device, stream, pass, gate), REBATCH_OK);
}

/* Until all streams have done what is asked of them, events of the device among it. */
static void open_and_wait(struct gate *gate, rebatch_device *device)
{
    cr_assert_eq(sem_post(&gate->open), 0);
    cr_assert_eq(rbi_device_synchronize(device), REBATCH_OK);
}

static rebatch_stream make_stream(rebatch_device *device)
{
    rebatch_stream stream;
    cr_assert_eq(rebatch_stream_create(&stream, device), REBATCH_OK);
    return stream;
}

/* On its own stream a freed block is at once there again, whatever the stream has still to do. */
Test(pool_streams, a_block_is_reused_at_once_on_its_own_stream)
{
    struct rig rig = rig_open(64, NULL);
    const rebatch_stream stream = make_stream(rig.device);
    struct gate gate;
    void *block = take_on(rig.pool, PAGE, stream);
    shut(&gate, rig.device, stream);
    give(rig.pool, block);
    cr_assert_eq(take_on(rig.pool, PAGE, stream), block);
    open_and_wait(&gate, rig.device);
    rig_close(&rig);
}

/* Another stream gets it only when the work before the free is done; until then it gets fresh
 * memory. */
Test(pool_streams, another_stream_gets_a_block_only_when_its_work_is_done)
{
    struct rig rig = rig_open(64, NULL);
    const rebatch_stream first = make_stream(rig.device);
    const rebatch_stream second = make_stream(rig.device);
    struct gate gate;
    void *block = take_on(rig.pool, 8 * PAGE, first);
    void *other = take_on(rig.pool, PAGE, second);
    shut(&gate, rig.device, first);
    give(rig.pool, block);
    void *fresh = take_on(rig.pool, 8 * PAGE, second);
    cr_assert_neq(fresh, block);
    open_and_wait(&gate, rig.device);
    cr_assert_eq(take_on(rig.pool, 8 * PAGE, second), block);
    cr_assert_eq(stats_of(rig.pool).device_allocations, 3);
    assert_valid(rig.pool);
    give(rig.pool, other);
    rig_close(&rig);
}

/* The work of a stream that the pool has never seen counts too. */
Test(pool_streams, work_of_every_stream_of_the_device_counts)
{
    struct rig rig = rig_open(64, NULL);
    const rebatch_stream first = make_stream(rig.device);
    const rebatch_stream unknown = make_stream(rig.device);
    struct gate gate;
    (void)take(rig.pool, KIB);
    void *block = take_on(rig.pool, 8 * PAGE, first);
    shut(&gate, rig.device, unknown);
    give(rig.pool, block);
    cr_assert_neq(take(rig.pool, 8 * PAGE), block);
    open_and_wait(&gate, rig.device);
    cr_assert_eq(take(rig.pool, 8 * PAGE), block);
    rig_close(&rig);
}

/* What a stream has enqueued after a free does not hold the block up. */
Test(pool_streams, work_after_the_free_does_not_count)
{
    struct rig rig = rig_open(64, NULL);
    const rebatch_stream first = make_stream(rig.device);
    struct gate gate;
    (void)take(rig.pool, KIB);
    void *block = take_on(rig.pool, 8 * PAGE, first);
    give(rig.pool, block);
    cr_assert_eq(rebatch_stream_synchronize(rig.device, first), REBATCH_OK);
    shut(&gate, rig.device, first);
    cr_assert_eq(take(rig.pool, 8 * PAGE), block);
    open_and_wait(&gate, rig.device);
    rig_close(&rig);
}

/* When there is no fresh memory the pool waits for the other stream rather than fail. */
Test(pool_streams, the_pool_waits_for_another_stream_before_it_fails)
{
    struct rig rig = rig_open(8, NULL);
    const rebatch_stream first = make_stream(rig.device);
    struct awaited work;
    void *block = take_on(rig.pool, 7 * PAGE, first);
    awaited_enqueue(&work, rig.device, rig.device, first);
    give(rig.pool, block);
    cr_assert_eq(take(rig.pool, 6 * PAGE), block);
    cr_assert(work.is_done);
    cr_assert_eq(rig.pool->stages[REBATCH_STAGE_WAIT], 1);
    assert_valid(rig.pool);
    rig_close(&rig);
}

/* What a stream has freed it can have at once, wherever it lies: between two holes, or among blocks
 * of other sizes. */
Test(pool_streams, a_stream_does_not_wait_for_its_own_blocks)
{
    (void)alarm(300);
    struct rig rig = rig_open(12, NULL);
    const rebatch_stream first = make_stream(rig.device);
    struct gate gate;
    void *blocks[3];
    for (int i = 0; i < 3; i++)
        blocks[i] = take_on(rig.pool, 4 * PAGE, first);
    give(rig.pool, blocks[0]);
    give(rig.pool, blocks[2]);
    void *large = take_on(rig.pool, 8 * PAGE, first); /* made of both */
    const uint64_t waits = rig.pool->stages[REBATCH_STAGE_WAIT];
    shut(&gate, rig.device, first);
    give(rig.pool, blocks[1]);
    merge_freed(rig.pool);
    void *between = take_on(rig.pool, 3 * PAGE, first);
    cr_assert_eq(between, blocks[1]);
    give(rig.pool, large);
    merge_freed(rig.pool);
    char *const among = take_on(rig.pool, 2 * PAGE, first);
    cr_assert(among >= (char *)large && among < (char *)large + 8 * PAGE);
    cr_assert_eq(rig.pool->stages[REBATCH_STAGE_WAIT], waits);
    open_and_wait(&gate, rig.device);
    rig_close(&rig);
}

/* It waits for the free alone, not for what was enqueued after it. */
Test(pool_streams, the_pool_waits_no_longer_than_it_must)
{
    (void)alarm(300);
    struct rig rig = rig_open(8, NULL);
    const rebatch_stream first = make_stream(rig.device);
    struct awaited work;
    struct gate gate;
    void *other = take(rig.pool, PAGE);
    void *block = take_on(rig.pool, 4 * PAGE, first);
    awaited_enqueue(&work, rig.device, rig.device, first);
    give(rig.pool, block);
    shut(&gate, rig.device, first);
    cr_assert_eq(take(rig.pool, 4 * PAGE), block);
    cr_assert(work.is_done);
    open_and_wait(&gate, rig.device);
    give(rig.pool, other);
    rig_close(&rig);
}

/* A block that merged with one freed later waits for the later of the two. */
Test(pool_streams, merged_blocks_wait_for_the_later_free)
{
    for (int order = 0; order < 2; order++) {
        struct rig rig = rig_open(64, NULL);
        const rebatch_stream first = make_stream(rig.device);
        struct gate gate;
        (void)take(rig.pool, KIB);
        give(rig.pool, take_on(rig.pool, 6 * PAGE, first));
        cr_assert_eq(rebatch_stream_synchronize(rig.device, first), REBATCH_OK);
        void *halves[2];
        for (int i = 0; i < 2; i++)
            halves[i] = take_on(rig.pool, 3 * PAGE, first);
        give(rig.pool, halves[order]);
        cr_assert_eq(rebatch_stream_synchronize(rig.device, first), REBATCH_OK);
        shut(&gate, rig.device, first);
        give(rig.pool, halves[!order]);
        cr_assert_neq(take(rig.pool, 6 * PAGE), halves[0]);
        open_and_wait(&gate, rig.device);
        cr_assert_eq(take(rig.pool, 6 * PAGE), halves[0]);
        rig_close(&rig);
    }
}

/* A block that another stream uses too is not given out before that stream's work at the free is
 * done, not even on its own stream. */
Test(pool_streams, a_block_used_on_another_stream_waits_for_it)
{
    struct rig rig = rig_open(64, NULL);
    const rebatch_stream other = make_stream(rig.device);
    struct gate gate;
    void *block = take(rig.pool, 8 * PAGE);
    cr_assert_eq(rebatch_pool_use_on(rig.pool, block, other), REBATCH_OK);
    cr_assert_eq(rebatch_pool_use_on(rig.pool, block, other), REBATCH_OK); /* says nothing new */
    cr_assert_eq(rebatch_pool_use_on(rig.pool, block, NULL), REBATCH_OK);
    shut(&gate, rig.device, other);
    give(rig.pool, block);
    cr_assert_eq(stats_of(rig.pool).live_bytes, 0);
    assert_valid(rig.pool);
    assert_refused(rebatch_pool_free(rig.pool, block), REBATCH_E_INVALID, "freed already");
    cr_assert_neq(take(rig.pool, 8 * PAGE), block);
    open_and_wait(&gate, rig.device);
    cr_assert_eq(take(rig.pool, 8 * PAGE), block);
    rig_close(&rig);
}

/* The same for a block that a rollback takes back, and for a free that waited for the commit. */
Test(pool_streams, scopes_wait_for_other_streams_too)
{
    for (int commit = 0; commit < 2; commit++) {
        struct rig rig = rig_open(64, NULL);
        const rebatch_stream other = make_stream(rig.device);
        struct gate gate;
        void *older = take(rig.pool, 8 * PAGE);
        cr_assert_eq(rebatch_pool_use_on(rig.pool, older, other), REBATCH_OK);
        const rebatch_scope scope = begin(rig.pool);
        void *inside = take(rig.pool, 8 * PAGE);
        cr_assert_eq(rebatch_pool_use_on(rig.pool, inside, other), REBATCH_OK);
        shut(&gate, rig.device, other);
        if (commit) {
            give(rig.pool, older);
            cr_assert_eq(rebatch_scope_commit(rig.pool, scope), REBATCH_OK);
        } else {
            cr_assert_eq(rebatch_scope_rollback(rig.pool, scope), REBATCH_OK);
        }
        assert_valid(rig.pool);
        void *gone = commit ? older : inside;
        cr_assert_neq(take(rig.pool, 8 * PAGE), gone);
        open_and_wait(&gate, rig.device);
        cr_assert_eq(take(rig.pool, 8 * PAGE), gone);
        rig_close(&rig);
    }
}

/* A device that has no events to give makes the pool wait for the whole stream, no more. */
Test(pool_streams, without_events_the_pool_waits_for_the_stream)
{
    struct rig rig = rig_open(8, NULL);
    rebatch_device *fault;
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    plan.calls = REBATCH_FAULT_EVENT;
    plan.nth = 1;
    plan.times = REBATCH_FAULT_FOREVER;
    cr_assert_eq(rebatch_device_open_fault(&fault, rig.device, &plan), REBATCH_OK);
    rebatch_pool *pool;
    cr_assert_eq(rebatch_pool_create(&pool, fault, NULL), REBATCH_OK);
    const rebatch_stream first = make_stream(fault);
    struct awaited work;
    void *own = take(pool, KIB);
    void *block = take_on(pool, 4 * PAGE, first);
    awaited_enqueue(&work, fault, rig.device, first);
    give(pool, block);
    cr_assert_eq(take(pool, 4 * PAGE), block);
    cr_assert(work.is_done);
    give(pool, own);
    assert_valid(pool);
    rebatch_pool_destroy(pool);
    rebatch_device_close(fault);
    rig_close(&rig);
}

/* A destroyed stream has no work left: its blocks are there for the others. */
Test(pool_streams, blocks_of_a_destroyed_stream_are_there_for_others)
{
    struct rig rig = rig_open(8, NULL);
    const rebatch_stream first = make_stream(rig.device);
    void *block = take_on(rig.pool, 6 * PAGE, first);
    void *late = take_on(rig.pool, 2 * PAGE, first);
    give(rig.pool, block);
    rebatch_stream_destroy(rig.device, first);
    cr_assert_eq(take(rig.pool, 6 * PAGE), block);
    give(rig.pool, late); /* freed after its stream is gone */
    cr_assert_eq(take(rig.pool, 2 * PAGE), late);
    assert_valid(rig.pool);
    rig_close(&rig);
}

/* A program that makes streams without end does not make the pool grow without end. */
Test(pool_streams, streams_without_blocks_are_forgotten)
{
    struct rig rig = rig_open(64, NULL);
    for (int i = 0; i < 50; i++) {
        const rebatch_stream stream = make_stream(rig.device);
        give(rig.pool, take_on(rig.pool, PAGE, stream));
        cr_assert_eq(rebatch_pool_trim(rig.pool, 0, NULL), REBATCH_OK);
        rebatch_stream_destroy(rig.device, stream);
    }
    cr_assert_null(rig.pool->first_stream->next);
    rig_close(&rig);
}

/* Memory goes back to the device only when the work on it is done, with caching on and off. */
Test(pool_streams, memory_goes_back_only_when_work_on_it_is_done)
{
    for (int caching = 0; caching < 2; caching++) {
        rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
        options.caching = caching ? REBATCH_ON : REBATCH_OFF;
        struct rig rig = rig_open(64, &options);
        const rebatch_stream stream = make_stream(rig.device);
        struct awaited work;
        void *block = take_on(rig.pool, PAGE, stream);
        void *shared = take(rig.pool, PAGE);
        cr_assert_eq(rebatch_pool_use_on(rig.pool, shared, stream), REBATCH_OK);
        awaited_enqueue(&work, rig.device, rig.device, stream);
        cr_assert_eq(rebatch_fill(rig.device, block, 1, PAGE, stream), REBATCH_OK);
        cr_assert_eq(rebatch_fill(rig.device, shared, 1, PAGE, stream), REBATCH_OK);
        give(rig.pool, shared);
        give(rig.pool, block);
        cr_assert_eq(rebatch_pool_trim(rig.pool, 0, NULL), REBATCH_OK);
        cr_assert(work.is_done);
        cr_assert_eq(stats_of(rig.pool).reserved_bytes, 0);
        rig_close(&rig);
    }
}

/* Destroying a pool waits for the work on blocks that are still in use. */
Test(pool_streams, destroy_waits_for_work_on_blocks_in_use)
{
    struct rig rig = rig_open(64, NULL);
    const rebatch_stream stream = make_stream(rig.device);
    struct awaited work;
    void *block = take_on(rig.pool, PAGE, stream);
    awaited_enqueue(&work, rig.device, rig.device, stream);
    cr_assert_eq(rebatch_fill(rig.device, block, 1, PAGE, stream), REBATCH_OK);
    rebatch_pool_destroy(rig.pool);
    cr_assert(work.is_done);
    rebatch_device_close(rig.device);
}
