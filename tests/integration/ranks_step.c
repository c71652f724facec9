/* Owns the tests of a step of several ranks that all live: what they sum, and what an OOM on some
 * of them changes. Must not know more of the library than its public headers say. */
#include "rank_asserts.h"

static rebatch_options small_microbatches(void)
{
    rebatch_options o = REBATCH_OPTIONS_INIT;
    o.micro_start = 4;
    o.max_attempts = 4096;
    return o;
}

static void open(struct ranks *ranks, uint32_t size)
{
    const rebatch_options o = small_microbatches();
    open_ranks(ranks, size, &o);
}

Test(ranks_step, the_effective_batch_is_the_samples_of_all_ranks)
{
    for (uint32_t size = 1; size <= 4; size++) {
        OPEN_WITH(open, ranks, ranks, size);
        for (uint64_t step = 0; step < 3; step++) {
            ranks_step(&ranks);
            assert_all(&ranks, REBATCH_OK);
        }
        cr_assert(ranks_have_stepped(&ranks, 3));
    }
}

Test(ranks_step, a_step_that_succeeds_votes_twice_and_reduces_once)
{
    OPEN_WITH(open, ranks, ranks, 3);
    for (int step = 0; step < 5; step++)
        ranks_step(&ranks);
    cr_assert_eq(ranks.meeting.votes, 10);
    cr_assert_eq(ranks.meeting.programs, 5);
}

static void check_reduced_once(const struct ranks *ranks, const struct rank *r)
{
    (void)ranks;
    cr_assert_eq(r->reduces, 1);
}

Test(ranks_step, an_oom_at_any_request_of_one_rank_is_its_own_matter)
{
    for (uint32_t only = 0; only < 3; only++) {
        OPEN_WITH(open, ranks, ranks, 3);
        cr_assert_gt(fail_every_request(&ranks, only, false, check_reduced_once), 6);
    }
}

Test(ranks_step, an_oom_at_any_request_of_all_ranks_changes_no_result)
{
    OPEN_WITH(open, ranks, ranks, 3);
    cr_assert_gt(fail_every_request(&ranks, 0, true, check_reduced_once), 6);
}

Test(ranks_step, an_oom_in_reduce_before_its_first_collective_runs_reduce_again)
{
    OPEN_WITH(open, ranks, ranks, 2);
    for (uint64_t nth = 1; ranks.rank[1].report.ooms_in[REBATCH_PHASE_REDUCE] == 0; nth++) {
        ranks.rank[1].fail_request = nth;
        ranks_step(&ranks);
        assert_all(&ranks, REBATCH_OK);
        cr_assert_lt(nth, 100);
    }
    cr_assert_eq(ranks.rank[1].report.ooms, 1);
    cr_assert_eq(ranks.rank[1].report.redone_samples, 0);
    cr_assert_eq(ranks.rank[0].report.ooms, 0);
}

Test(ranks_step, each_rank_has_its_own_sizes_and_report)
{
    OPEN_WITH(open_ranks, ranks, ranks, 2, &OPTIONS(.growth = REBATCH_OFF));
    ranks.rank[1].batch = 200; /* which need 200 KiB at once */
    OK(rebatch_pool_set_limit(rebatch_get_pool(ranks.rank[1].rb), (size_t)128 << 10));
    ranks_step(&ranks);
    cr_assert_gt(ranks.rank[1].report.ooms, 0);
    ranks_step(&ranks);
    assert_all(&ranks, REBATCH_OK);
    cr_assert(ranks_have_stepped(&ranks, 2));
    cr_assert_eq(ranks.rank[0].report.microbatches, 1);
    cr_assert_eq(ranks.rank[1].report.microbatches, 2); /* 100 + 100 */
}

static rebatch_status make_buffers(size_t micro_batch, void *user)
{
    const struct rank *const r = user;
    void *buffers;
    return rebatch_pool_alloc(&buffers, rebatch_get_pool(r->rb), micro_batch << 16, NULL, 0);
}

/* A reduction that needs half of the memory. */
static rebatch_status take_half(struct rank *r, enum rank_place place)
{
    rebatch_pool *const pool = rebatch_get_pool(r->rb);
    void *block;
    if (place != RANK_REDUCE)
        return REBATCH_OK;
    const rebatch_status status = rebatch_pool_alloc(&block, pool, (size_t)512 << 10, NULL, 0);
    return status ? status : rebatch_pool_free(pool, block);
}

Test(ranks_step, a_reduction_that_finds_no_memory_beside_the_buffers_makes_them_smaller)
{
    OPEN_WITH(open_ranks, ranks, ranks, 2, &OPTIONS(.growth = REBATCH_OFF));
    struct rank *const r = &ranks.rank[1];
    r->ops.resize = make_buffers; /* for 9 samples, 576 KiB */
    r->inside = take_half;
    OK(rebatch_pool_set_limit(rebatch_get_pool(r->rb), (size_t)1 << 20));
    ranks_step(&ranks);
    assert_all(&ranks, REBATCH_OK);
    cr_assert_eq(r->report.ooms_in[REBATCH_PHASE_REDUCE], 1);
    cr_assert_eq(r->report.attempts, 1);
    cr_assert_eq(r->report.micro_after, 4);
    ranks_step(&ranks);
    assert_all(&ranks, REBATCH_OK);
    cr_assert_eq(r->report.ooms, 0);
    cr_assert(ranks_have_stepped(&ranks, 2));
}

static rebatch_status count_call(void *user, rebatch_status status)
{
    ++*(uint64_t *)user;
    return status;
}
static rebatch_status run_samples(const rebatch_microbatch *mb, void *user)
{
    return count_call(user, mb->batch == 5 && mb->rank_batch == 5 ? REBATCH_OK : RANK_STATUS);
}

Test(ranks_step, functions_outside_of_training_do_not_vote)
{
    uint64_t calls = 0;
    const rebatch_map_ops map = {.struct_size = sizeof map, .run = run_samples};
    OPEN_WITH(open, ranks, ranks, 2);
    OK(rebatch_map(ranks.rank[1].rb, &map, 5, &calls, NULL));
    cr_assert_gt(calls, 0);
    ranks.rank[0].batch = 4;
    rebatch_check_report found = {0};
    OK(rebatch_watch(ranks.rank[0].rb, "sums", ranks.rank[0].sums, sizeof ranks.rank[0].sums,
                     REBATCH_GUARD_HOST, REBATCH_BYTES));
    OK(rebatch_check(ranks.rank[0].rb, &ranks.rank[0].ops, 4, &ranks.rank[0], NULL, &found));
    cr_assert_eq(ranks.meeting.arrived, 0);
    cr_assert_eq(ranks.meeting.votes + ranks.meeting.programs, 0);
}
