/* Owns the tests of admission and of rebatch_reserve(): memory that is seen to before it is needed.
 * Must not know more of the library than its public headers say. */
#include "step_common.h"

/* ---- admission ---- */

/* A rig where 8, 4, 2 and 1 samples of 1 MiB each have run, one size a step, and 8 comes next. */
static void open_known(struct rig *rig, rebatch_toggle admission, uint32_t max_attempts)
{
    rig_open(rig, MIB(64),
             &OPTIONS(.admission = admission, .growth = REBATCH_OFF, .max_attempts = max_attempts));
    rig->script.sample_bytes = MIB(1);
    for (size_t batch = 8; batch > 0; batch /= 2)
        OK(rig_step(rig, batch));
    cr_assert_eq(rebatch_get_micro(rig->rb, 8), 8);
}

Test(step_admission, a_size_that_ran_is_not_started_when_its_memory_is_gone)
{
    OPEN_WITH(open_known, rig, rig, REBATCH_DEFAULT, 0);
    rig_set_capacity(&rig, MIB(6));
    STEP(&rig, 8, REBATCH_OK, "z f0+4 f4+4 u");
    cr_assert_eq(rig.report.ooms, 1);
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_ADMISSION], 1);
    cr_assert_eq(rig.report.attempts, 2);
    cr_assert_eq(rig.report.redone_samples, 0);
    const rebatch_event *event = rig_event(&rig, REBATCH_EVENT_SHRINK);
    cr_assert_not_null(event);
    cr_assert_eq(event->phase, REBATCH_PHASE_ADMISSION);
    cr_assert_eq(event->redone_samples, 0);
}

Test(step_admission, it_refuses_size_after_size_without_a_run)
{
    OPEN_WITH(open_known, rig, rig, REBATCH_ON, 0);
    rig_set_capacity(&rig, MIB(3));
    STEP(&rig, 8, REBATCH_OK, "z f0+2 f2+2 f4+2 f6+2 u");
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_ADMISSION], 2);
}

INSIDE(keep_a_buffer)
{
    void **kept = s->inside_user;
    if (callback != SCRIPT_FORWARD || *kept)
        return REBATCH_OK;
    return rebatch_pool_alloc(kept, rebatch_get_pool(s->rb), MIB(16), s->stream, 0);
}

/* A rig where steps of 8 samples alone have run, of 1 MiB each and `base_bytes` together. */
static void open_with_one_size(struct rig *rig, size_t base_bytes, void *kept)
{
    rig_open(rig, MIB(64), &OPTIONS(.growth = REBATCH_OFF));
    rig->script.sample_bytes = MIB(1);
    rig->script.base_bytes = base_bytes;
    if (kept) {
        script_inside(&rig->script, keep_a_buffer, kept);
    }
    for (int i = 0; i < 2; i++)
        OK(rig_step(rig, 8));
}

Test(step_admission, half_of_a_size_that_ran_needs_half_of_its_memory_at_least)
{
    OPEN_WITH(open_with_one_size, rig, rig, 0, NULL);
    rig_set_capacity(&rig, MIB(3));
    STEP(&rig, 8, REBATCH_OK, "z f0+2 f2+2 f4+2 f6+2 u");
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_ADMISSION], 2);
    cr_assert_eq(rig.report.redone_samples, 0);
}

Test(step_admission, half_of_a_size_that_ran_is_tried_where_half_of_its_memory_is_there)
{
    OPEN_WITH(open_with_one_size, rig, rig, MIB(2), NULL);
    rig_set_capacity(&rig, MIB(5) + KIB(512)); /* half of 10 MiB, but 6 are needed */
    STEP(&rig, 8, REBATCH_OK, "z f0+4! f0+2~1 f2+2~1 f4+2 f6+2 u");
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_ADMISSION], 1);
}

Test(step_admission, half_of_a_size_that_ran_needs_nothing_that_is_kept_for_it)
{
    void *kept = NULL;
    OPEN_WITH(open_with_one_size, rig, rig, 0, &kept);
    rig_set_capacity(&rig, MIB(16) + MIB(5)); /* kept, and the half of 8 */
    STEP(&rig, 8, REBATCH_OK, "z f0+4 f4+4 u");
}

Test(step_admission, a_limit_of_the_pool_is_as_good_as_a_capacity)
{
    OPEN_WITH(open_known, rig, rig, REBATCH_DEFAULT, 0);
    OK(rebatch_pool_set_limit(rebatch_get_pool(rig.rb), MIB(6)));
    STEP(&rig, 8, REBATCH_OK, "z f0+4 f4+4 u");
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_ADMISSION], 1);
}

Test(step_admission, memory_that_somebody_took_from_the_pool_is_gone_too)
{
    OPEN_WITH(open_known, rig, rig, REBATCH_DEFAULT, 0);
    void *taken;
    OK(rebatch_pool_alloc(&taken, rebatch_get_pool(rig.rb), MIB(58), NULL, 0));
    STEP(&rig, 8, REBATCH_OK, "z f0+4 f4+4 u");
    OK(rebatch_pool_free(rebatch_get_pool(rig.rb), taken));
}

/* 8, 4 and 2 samples are refused, and the fourth try would be of 1. */
Test(step_admission, max_attempts_counts_attempts_that_are_not_started)
{
    struct rig rig;
    open_known(&rig, REBATCH_ON, 4);
    rig_set_capacity(&rig, MIB(1) + KIB(512));
    OK(rig_step(&rig, 8));
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_ADMISSION], 3);
    cr_assert_eq(rig.report.attempts, 8, "a refusal runs nothing");
    rig_close(&rig);
    open_known(&rig, REBATCH_ON, 2);
    rig_set_capacity(&rig, MIB(1) + KIB(512));
    cr_assert_eq(rig_step(&rig, 8), REBATCH_E_EXHAUSTED);
    cr_assert_eq(rig.report.ooms, 2);
    cr_assert_eq(rig.report.attempts, 0);
    SAYS("gave up after 2 failed attempts in one step (2 of them not started): raise max_attempts");
    rig_close(&rig);
}

Test(step_admission, switched_off_the_size_is_started_and_fails)
{
    OPEN_WITH(open_known, rig, rig, REBATCH_OFF, 0);
    rig_set_capacity(&rig, MIB(6));
    STEP(&rig, 8, REBATCH_OK, "z f0+8! f0+4~1 f4+4~1 u");
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_ADMISSION], 0);
    cr_assert_eq(rig.report.ooms_in[REBATCH_PHASE_FORWARD], 1);
}

Test(step_admission, the_smallest_size_may_try_all_the_same)
{
    OPEN_WITH(open_known, rig, rig, REBATCH_ON, 0);
    rig_set_capacity(&rig, KIB(512));
    STEP(&rig, 8, REBATCH_E_EXHAUSTED, "z f0+1!");
    rig.script.sample_bytes = KIB(256); /* what was known is out of date */
    OK(rig_step(&rig, 8));
}

Test(step_admission, what_is_admitted_cannot_fail_in_the_device)
{
    OPEN_WITH(open_known, rig, rig, REBATCH_ON, 0);
    rig_fail_device(&rig, REBATCH_FAULT_ALLOC, REBATCH_FAULT_FOREVER, REBATCH_OOM);
    OK(rig_step(&rig, 8)); /* from the cache, whole */
    cr_assert_str_eq(script_trace(&rig.script), "z f0+8 u");
}

Test(step_admission, with_room_it_is_not_felt)
{
    OPEN_WITH(open_known, rig, rig, REBATCH_ON, 0);
    for (int i = 0; i < 10; i++) {
        STEP(&rig, 8, REBATCH_OK, "z f0+8 u");
        cr_assert_eq(rig.report.ooms, 0);
    }
}

INSIDE(keep_a_little)
{
    void **kept = s->inside_user;
    if (callback != SCRIPT_UPDATE || *kept)
        return REBATCH_OK;
    return rebatch_pool_alloc(kept, rebatch_get_pool(s->rb), KIB(64), s->stream, 0);
}

/* The optimizer's state lands in what forward_backward has left in the cache, as it does in any
 * first step: from then on two pieces of 3 MiB are there, but not one of 6. */
Test(step_admission, memory_in_pieces_is_there_too)
{
    OPEN(rig, rig, MIB(8) + KIB(128), NULL);
    void *kept = NULL;
    script_inside(&rig.script, keep_a_little, &kept);
    rig.script.base_bytes = MIB(4);
    rig.script.late_bytes = MIB(4);
    OK(rig_step(&rig, 8));
    rig.script.base_bytes = MIB(3);
    rig.script.late_bytes = MIB(3);
    for (int i = 0; i < 5; i++) {
        OK(rig_step(&rig, 7));
        cr_assert_eq(rig.report.ooms, 0, "%s: %s", script_trace(&rig.script), rig_events(&rig));
    }
}

/* ---- rebatch_reserve() ---- */

#define RESERVED_BYTES KIB(768)
#define MOST_PIECES 256

struct pieces {
    uint64_t random;
    bool reserve_first;
    unsigned rounds;
};

/* Cuts `total` into pieces that add up to it when rounded, and allocates them. */
static size_t allocate_pieces(rebatch_pool *pool, void *blocks[], size_t total, uint64_t *random)
{
    size_t left = total;
    size_t count = 0;
    while (left) {
        size_t rounded = (1 + script_random(random) % 96) * REBATCH_POOL_UNIT_BYTES;
        if (rounded > left || count == MOST_PIECES - 1)
            rounded = left;
        const size_t bytes = rounded - script_random(random) % REBATCH_POOL_UNIT_BYTES;
        cr_assert_eq(rebatch_pool_alloc(&blocks[count], pool, bytes, NULL, 0), REBATCH_OK,
                     "piece %zu of %zu bytes, %zu of %zu reserved bytes left", count, bytes, left,
                     total);
        memset(blocks[count], 0x33, bytes);
        left -= rounded;
        count++;
    }
    return count;
}

INSIDE(reserve_and_use)
{
    struct pieces *pieces = s->inside_user;
    if (callback == SCRIPT_LIGHTEN)
        return REBATCH_OK;
    rebatch_pool *pool = rebatch_get_pool(s->rb);
    void *blocks[MOST_PIECES];
    OK(rebatch_reserve(s->rb, RESERVED_BYTES));
    OK(rebatch_fault_arm(s->device, &FAULTS(.nth = 1, .times = REBATCH_FAULT_FOREVER)));
    const size_t count = allocate_pieces(pool, blocks, RESERVED_BYTES, &pieces->random);
    OK(rebatch_fault_arm(s->device, NULL));
    for (size_t i = 0; i < count; i++) /* every third stays: the next reserve finds holes */
        if (i % 3)
            OK(rebatch_pool_free(pool, blocks[i]));
    pieces->rounds++;
    return REBATCH_OK;
}

/* Seed 1. */
Test(step_admission, what_was_reserved_cannot_fail_to_be_allocated)
{
    OPEN(rig, rig, MIB(64), NULL);
    struct pieces pieces = {.random = 1};
    script_inside(&rig.script, reserve_and_use, &pieces);
    for (int i = 0; i < 30; i++)
        OK(rig_step(&rig, 4));
    cr_assert_geq(pieces.rounds, 60);
}

INSIDE(reserve_more_than_there_is)
{
    cr_assert_eq(rebatch_reserve(s->rb, MIB(65)), REBATCH_OOM);
    cr_assert_eq(rebatch_reserve(s->rb, SIZE_MAX) == REBATCH_OK, false);
    OK(rebatch_reserve(s->rb, 0));
    return REBATCH_OK;
}

Test(step_admission, more_than_there_is_cannot_be_reserved)
{
    OPEN(rig, rig, MIB(64), NULL);
    rig.script.inside = reserve_more_than_there_is;
    OK(rig_step(&rig, 4));
    cr_assert_eq(rig.report.ooms, 0, "the callback coped");
}

Test(step_admission, reserve_outside_a_callback_is_refused)
{
    OPEN(rig, rig, MIB(64), NULL);
    cr_assert_eq(rebatch_reserve(rig.rb, 512), REBATCH_E_STATE);
    cr_assert_str_neq(rebatch_last_error(), "");
    cr_assert_eq(rebatch_reserve(NULL, 512), REBATCH_E_INVALID);
    OK(rig_step(&rig, 4));
    cr_assert_eq(rebatch_reserve(rig.rb, 512), REBATCH_E_STATE);
}

/* The order that the contract asks for: what backward needs is reserved before anything is dirty,
 * so an OOM never costs more than the micro-batch. */
static uint32_t dirty_ooms(bool reserves)
{
    OPEN(rig, rig, MIB(6), NULL);
    rig.script.sample_bytes = KIB(512);
    rig.script.late_bytes = MIB(2) + KIB(512);
    rig.script.reserves = reserves;
    OK(rig_step(&rig, 9));
    const uint32_t ooms = rig.report.ooms_in[REBATCH_PHASE_BACKWARD];
    cr_assert_gt(rig.report.ooms, 0);
    return ooms;
}

Test(step_admission, who_reserves_before_mutating_never_loses_the_batch)
{
    cr_assert_gt(dirty_ooms(false), 0);
    cr_assert_eq(dirty_ooms(true), 0);
}

Test(step_admission, with_caching_off_reserve_only_looks_at_the_room)
{
    OPEN(rig, rig, MIB(64), &OPTIONS(.pool.caching = REBATCH_OFF));
    rig.script.inside = reserve_more_than_there_is;
    OK(rig_step(&rig, 4));
    cr_assert_eq(rig_used_bytes(&rig), 0, "nothing is held with caching off");
}
