/* Owns the tests of threads beside a step: whose memory is taken back with an attempt, and whose is
 * not. Must not know more of the library than its public headers say. */
#include <pthread.h>

#include "rebatch/probe.h"
#include "step_common.h"

#define BATCH_BYTES KIB(40)

/* What another thread does while a callback runs. */
struct beside {
    rebatch *rb;
    bool joins;
    size_t bytes;         /* of a batch */
    unsigned char *batch; /* the last that it prepared; with its number in it */
    unsigned prepared;
    void *kept;
};

static void *prepare(void *user)
{
    struct beside *beside = user;
    void *next = NULL;
    if (beside->joins && rebatch_join(beside->rb))
        return NULL;
    rebatch_pool *const pool = rebatch_get_pool(beside->rb);
    if (rebatch_pool_alloc(&next, pool, beside->bytes, NULL, 0))
        return NULL;
    memset(next, (int)++beside->prepared, beside->bytes);
    beside->batch = next;
    return beside->joins && rebatch_join(NULL) ? NULL : next;
}

/* What another thread answers, which ends before this goes on; not NULL. */
static void *run_there(void *(*what)(void *user), struct beside *beside)
{
    pthread_t thread;
    void *answer = NULL;
    cr_assert_eq(pthread_create(&thread, NULL, what, beside), 0);
    cr_assert_eq(pthread_join(thread, &answer), 0);
    cr_assert_not_null(answer);
    return answer;
}

static unsigned char *run_beside(struct beside *beside)
{
    return run_there(prepare, beside);
}

/* Two micro-batches of 8. */
static void open_beside(struct rig *rig, struct beside *beside, bool joins)
{
    rig_open(rig, MIB(64), &OPTIONS(.micro_start = 8, .growth = REBATCH_OFF));
    rig->script.base_bytes = MIB(1);
    OK(rig_step(rig, 16));
    *beside = (struct beside){.rb = rig->rb, .joins = joins, .bytes = BATCH_BYTES};
    rig->script.inside_user = beside;
}

/* A batch that is prepared beside each micro-batch takes the place of the one before it. */
INSIDE(use_batch)
{
    struct beside *beside = s->inside_user;
    if (callback != SCRIPT_FORWARD)
        return REBATCH_OK;
    unsigned char *const batch = beside->batch;
    const unsigned number = beside->prepared;
    (void)run_beside(beside);
    if (!batch)
        return REBATCH_OK;
    cr_assert_eq(batch[0], (unsigned char)number);
    cr_assert_eq(batch[beside->bytes - 1], (unsigned char)number);
    return REBATCH_OK;
}

Test(step_threads, what_other_threads_allocate_stays_when_an_attempt_is_taken_back)
{
    struct beside beside;
    OPEN_WITH(open_beside, rig, rig, &beside, false);
    const uint64_t live_bytes = rig_live_bytes(&rig);
    rig.script.inside = use_batch;
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    script_fail(&rig.script, SCRIPT_FORWARD, 3, SCRIPT_WHILE, SCRIPT_ESCAPE);
    OK(rig_step(&rig, 16));
    cr_assert_gt(rig.report.ooms, 1);
    cr_assert_eq(rig_live_bytes(&rig), live_bytes + beside.prepared * BATCH_BYTES);
    size_t bytes;
    OK(rebatch_pool_block_bytes(&bytes, rebatch_get_pool(rig.rb), beside.batch));
}

/* Frees a batch that another thread prepared in this attempt, and another one from before. */
INSIDE(consume_batches)
{
    struct beside *beside = s->inside_user;
    if (callback != SCRIPT_FORWARD || mb->first != 0)
        return REBATCH_OK;
    rebatch_pool *const pool = rebatch_get_pool(s->rb);
    if (!beside->batch)
        (void)run_beside(beside);
    cr_assert_eq(beside->batch[0], 1, "it is the same in each attempt");
    OK(rebatch_pool_free(pool, beside->batch));
    void *other;
    OK(rebatch_pool_alloc(&other, pool, BATCH_BYTES, NULL, 0));
    memset(other, 0xff, BATCH_BYTES);
    return rebatch_pool_free(pool, other);
}

Test(step_threads, a_callback_that_frees_what_another_thread_allocated_finds_it_again)
{
    struct beside beside;
    OPEN_WITH(open_beside, rig, rig, &beside, false);
    const uint64_t live_bytes = rig_live_bytes(&rig);
    rig.script.inside = consume_batches;
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    script_fail(&rig.script, SCRIPT_FORWARD, 2, SCRIPT_BEFORE, SCRIPT_POOL);
    OK(rig_step(&rig, 16));
    cr_assert_eq(rig.report.ooms, 2);
    cr_assert_eq(beside.prepared, 1);
    cr_assert_eq(rig_live_bytes(&rig), live_bytes);
}

Test(step_threads, what_a_thread_that_joined_allocates_is_taken_back)
{
    struct beside beside;
    OPEN_WITH(open_beside, rig, rig, &beside, true);
    const uint64_t live_bytes = rig_live_bytes(&rig);
    rig.script.inside = use_batch;
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_OWN);
    cr_assert_eq(rig_step(&rig, 16), SCRIPT_STATUS);
    cr_assert_eq(beside.prepared, 1);
    cr_assert_eq(rig_live_bytes(&rig), live_bytes);
}

/* What a thread that has left again allocates stays; so does what is allocated beside no callback,
 * whoever joined. */
Test(step_threads, joining_holds_until_the_thread_leaves)
{
    struct beside beside;
    OPEN_WITH(open_beside, rig, rig, &beside, false);
    OK(rebatch_join(rig.rb));
    OK(rebatch_join(rig.rb));
    OK(rebatch_join(NULL));
    cr_assert_eq(rebatch_join(NULL), REBATCH_OK, "it has left already");
    const uint64_t live_bytes = rig_live_bytes(&rig);
    beside.joins = true;
    (void)run_beside(&beside);
    cr_assert_eq(rig_live_bytes(&rig), live_bytes + BATCH_BYTES);
    beside.joins = false;
    rig.script.inside = use_batch;
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    OK(rig_step(&rig, 16));
    cr_assert_eq(rig_live_bytes(&rig), live_bytes + beside.prepared * BATCH_BYTES);
}

/* ---- what the session makes of it ---- */

/* Asks for more than there is for it. */
static void *ask_in_vain(void *user)
{
    struct beside *beside = user;
    void *none;
    const rebatch_status status =
        rebatch_pool_alloc(&none, rebatch_get_pool(beside->rb), beside->bytes, NULL, 0);
    return status == REBATCH_OOM ? user : NULL;
}

/* Another thread's request fails, before memory beside the pool runs out for the callback. */
INSIDE(fail_beside)
{
    struct beside *beside = s->inside_user;
    if (callback != SCRIPT_FORWARD || beside->prepared++ != 0)
        return REBATCH_OK;
    beside->bytes = MIB(4000);
    (void)run_there(ask_in_vain, beside);
    return REBATCH_OOM;
}

Test(step_threads, an_oom_of_another_thread_is_not_the_callbacks)
{
    struct beside beside;
    OPEN_WITH(open_beside, rig, rig, &beside, false);
    rig.script.inside = fail_beside;
    OK(rig_step(&rig, 16));
    cr_assert_eq(rig.report.ooms, 1);
    cr_assert_str_eq(script_trace(&rig.script), "z f0+8! f0+8~1 f8+8 u",
                     "the cache went back to the device, and it was tried once more");
    cr_assert_eq(rig.report.oom.asked_bytes, 0);
}

/* A batch that comes beside one attempt is no part of what such an attempt needs. */
Test(step_threads, what_others_allocate_is_not_learnt_as_a_need)
{
    struct beside beside;
    OPEN(rig, rig, MIB(64), &OPTIONS(.micro_start = 32));
    rig.script.base_bytes = MIB(36);
    beside = (struct beside){.rb = rig.rb, .bytes = MIB(24)};
    rig.script.inside_user = &beside;
    OK(rig_step(&rig, 32));
    rig.script.inside = use_batch;
    OK(rig_step(&rig, 32));
    rig.script.inside = NULL;
    OK(rig_step(&rig, 32));
    cr_assert_eq(rig.report.ooms, 0);
    cr_assert_eq(rig.report.micro_after, 32);
}

/* What the callback has reserved stays its own: else the update would be torn. */
INSIDE(reserve_and_mutate)
{
    struct beside *beside = s->inside_user;
    void *own;
    if (callback != SCRIPT_UPDATE)
        return REBATCH_OK;
    OK(rebatch_reserve(s->rb, MIB(40)));
    rebatch_mutating(s->rb);
    beside->bytes = MIB(40);
    (void)run_there(ask_in_vain, beside);
    OK(rebatch_pool_alloc(&own, rebatch_get_pool(s->rb), MIB(40), NULL, 0));
    return rebatch_pool_free(rebatch_get_pool(s->rb), own);
}

Test(step_threads, what_was_reserved_is_there_whatever_others_take)
{
    struct beside beside;
    OPEN_WITH(open_beside, rig, rig, &beside, false);
    rig.script.inside = reserve_and_mutate;
    OK(rig_step(&rig, 16));
}

/* The pointer to another thread's batch is guarded: when it comes back to what it was, the batch is
 * not forgotten, for that thread has it. */
static rebatch_status keep_pointer(const rebatch_microbatch *mb, void *user)
{
    struct beside *beside = user;
    void *own;
    const rebatch_status status =
        rebatch_pool_alloc(&own, mb->pool, mb->count * KIB(64), mb->stream, 0);
    if (status)
        return status;
    beside->kept = run_beside(beside);
    return rebatch_pool_free(mb->pool, own);
}

Test(step_threads, a_probe_leaves_others_their_blocks)
{
    struct beside beside;
    const rebatch_step_ops ops = OPS(nothing_to_do, keep_pointer, nothing_to_do, .flags = 0);
    OPEN_WITH(open_beside, rig, rig, &beside, false);
    const uint64_t live_bytes = rig_live_bytes(&rig);
    OK(rebatch_guard(rig.rb, &beside.kept, sizeof beside.kept, REBATCH_GUARD_HOST));
    rebatch_probe_report report;
    OK(rebatch_probe(rig.rb, &ops, 16, &beside, NULL, &report));
    cr_assert_null(beside.kept);
    cr_assert_gt(beside.prepared, 1);
    cr_assert_eq(rig_live_bytes(&rig), live_bytes + beside.prepared * BATCH_BYTES);
}
