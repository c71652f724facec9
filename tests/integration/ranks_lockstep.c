/* Owns the tests of ranks whose micro-batches have collectives: all run the same ones, and an OOM
 * on one of them is undone on all.
 * Must not know more of the library than its public headers say. */
#include "rank_asserts.h"

static rebatch_options in_lockstep(void)
{
    rebatch_options o = REBATCH_OPTIONS_INIT;
    o.lockstep = REBATCH_ON;
    o.micro_start = 4;
    o.max_attempts = 4096;
    o.growth = REBATCH_OFF;
    return o;
}

static void open(struct ranks *ranks, uint32_t size)
{
    const rebatch_options o = in_lockstep();
    open_ranks(ranks, size, &o);
}

static void assert_says(const struct rank *r, const char *sentence)
{
    cr_assert_eq(r->status, REBATCH_E_PEER, "%s", r->error);
    cr_assert(strstr(r->error, sentence), "%s", r->error);
}

/* ---- what all of them run ---- */

Test(ranks_lockstep, each_micro_batch_has_one_vote_and_a_step_four_more)
{
    OPEN_WITH(open, ranks, ranks, 3); /* 12 samples on each: 4 + 4 + 4 */
    for (int step = 0; step < 5; step++)
        ranks_step(&ranks);
    assert_all(&ranks, REBATCH_OK);
    cr_assert(ranks_have_stepped(&ranks, 5));
    cr_assert_eq(ranks.meeting.votes, 5 * (3 + 4));
    cr_assert_eq(ranks.meeting.programs, 5 * 3 * 2);
}

Test(ranks_lockstep, micro_batches_are_as_large_as_the_least_of_the_ranks_can_run)
{
    AUTO_CLOSE(ranks, ranks);
    rebatch_options o = in_lockstep();
    o.micro_start = 0;
    cr_assert(ranks_open(&ranks, 3, &o, 0));
    for (uint32_t i = 0; i < 3; i++)
        ranks.rank[i].unit_bytes = (size_t)16 << 10;
    OK(rebatch_pool_set_limit(rebatch_get_pool(ranks.rank[2].rb),
                              (size_t)128 << 10)); /* for eight samples */
    ranks_step(&ranks);
    assert_all(&ranks, REBATCH_OK);
    cr_assert_eq(ranks.rank[2].report.ooms, 1);
    cr_assert_eq(ranks.rank[0].report.redone_samples, 12);
    ranks_step(&ranks);
    assert_all(&ranks, REBATCH_OK);
    cr_assert(ranks_have_stepped(&ranks, 2));
    for (uint32_t i = 0; i < 3; i++) {
        cr_assert_eq(ranks.rank[i].report.micro, 6);
        cr_assert_eq(ranks.rank[i].report.microbatches, 2);
        cr_assert_eq(ranks.rank[i].report.attempts, 2);
    }
}

Test(ranks_lockstep, sizes_grow_when_the_least_of_the_ranks_has_room)
{
    AUTO_CLOSE(ranks, ranks);
    rebatch_options o = in_lockstep();
    o.micro_start = 0;
    o.growth = REBATCH_ON;
    o.grow_after = 2;
    cr_assert(ranks_open(&ranks, 2, &o, 0));
    for (uint32_t i = 0; i < 2; i++)
        ranks.rank[i].unit_bytes = (size_t)16 << 10;
    rebatch_pool *const pool = rebatch_get_pool(ranks.rank[1].rb);
    OK(rebatch_pool_set_limit(pool, (size_t)64 << 10));
    uint64_t steps = 0;
    for (; steps < 3; steps++)
        ranks_step(&ranks);
    cr_assert_eq(ranks.rank[0].report.micro, 3);
    OK(rebatch_pool_set_limit(pool, 0));
    for (; ranks.rank[0].report.micro < 12 && steps < 50; steps++)
        ranks_step(&ranks);
    assert_all(&ranks, REBATCH_OK);
    cr_assert_eq(ranks.rank[0].report.micro, 12);
    cr_assert(ranks_have_stepped(&ranks, steps));
}

/* Micro-batches of 12 samples at the least, and of less memory at the first level. */
static rebatch_status lighten(unsigned level, void *user)
{
    struct rank *const r = user;
    if (level > 1)
        return REBATCH_E_UNSUPPORTED;
    r->unit_bytes = level ? 1024 : (size_t)16 << 10;
    return REBATCH_OK;
}

Test(ranks_lockstep, a_level_that_one_rank_needs_is_entered_by_all)
{
    AUTO_CLOSE(ranks, ranks);
    rebatch_options o = in_lockstep();
    o.micro_start = o.micro_smallest = 12;
    cr_assert(ranks_open(&ranks, 3, &o, 0));
    for (uint32_t i = 0; i < 3; i++) {
        ranks.rank[i].ops.lighten = lighten;
        ranks.rank[i].unit_bytes = (size_t)16 << 10;
    }
    rebatch_pool *const pool = rebatch_get_pool(ranks.rank[1].rb);
    OK(rebatch_pool_set_limit(pool, (size_t)64 << 10));
    ranks_step(&ranks);
    assert_all(&ranks, REBATCH_OK);
    for (uint32_t i = 0; i < 3; i++)
        cr_assert_eq(ranks.rank[i].report.lighten_level, 1);
    cr_assert(ranks_have_stepped(&ranks, 1));
}

Test(ranks_lockstep, a_level_that_another_rank_does_not_have_ends_the_step_on_all)
{
    AUTO_CLOSE(ranks, ranks);
    rebatch_options o = in_lockstep();
    o.micro_start = o.micro_smallest = 12;
    cr_assert(ranks_open(&ranks, 2, &o, 0));
    ranks.rank[1].ops.lighten = lighten;
    ranks.rank[1].unit_bytes = (size_t)16 << 10;
    rebatch_pool *const pool = rebatch_get_pool(ranks.rank[1].rb);
    OK(rebatch_pool_set_limit(pool, (size_t)64 << 10));
    ranks_step(&ranks);
    cr_assert_eq(ranks.rank[0].status, REBATCH_E_STATE);
    assert_says(&ranks.rank[1], "rank 0 ended step 0: another rank is at level 1 of lighten");
}

/* ---- an OOM anywhere ---- */

static uint64_t redone_samples;

static void check_alike(const struct ranks *ranks, const struct rank *r)
{
    cr_assert_eq(r->report.microbatches, ranks->rank[0].report.microbatches);
    cr_assert_eq(r->report.redone_samples, ranks->rank[0].report.redone_samples);
    redone_samples += r->report.redone_samples;
}

static void undo_every_request(struct ranks *ranks, uint32_t only, bool is_of_all)
{
    redone_samples = 0;
    cr_assert_gt(fail_every_request(ranks, only, is_of_all, check_alike), 12);
    cr_assert_gt(redone_samples, 0);
}

Test(ranks_lockstep, an_oom_at_any_request_of_one_rank_is_undone_on_all)
{
    for (uint32_t only = 0; only < 3; only++) {
        OPEN_WITH(open, ranks, ranks, 3);
        undo_every_request(&ranks, only, false);
    }
}

Test(ranks_lockstep, an_oom_at_any_request_of_all_ranks_changes_no_result)
{
    OPEN_WITH(open, ranks, ranks, 3);
    undo_every_request(&ranks, 0, true);
}

/* ---- a rank that fails ---- */

static rebatch_status fail(struct rank *r, enum rank_place place)
{
    return place == *(const enum rank_place *)r->inside_user ? RANK_STATUS : REBATCH_OK;
}

Test(ranks_lockstep, a_status_of_one_rank_ends_the_step_on_all_with_its_sentence)
{
    static enum rank_place places[] = {RANK_ZERO, RANK_FORWARD, RANK_ACCUMULATED};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        OPEN_WITH(open, ranks, ranks, 3);
        ranks.rank[1].inside = fail;
        ranks.rank[1].inside_user = &places[i];
        ranks_step(&ranks);
        cr_assert_eq(ranks.rank[1].status, RANK_STATUS, "%s", ranks.rank[1].error);
        assert_says(&ranks.rank[0], "rank 1 ended step 0: ");
        assert_says(&ranks.rank[2], "returned 1009");
        ranks.rank[1].inside = NULL;
        ranks_step(&ranks);
        assert_all(&ranks, REBATCH_OK);
        cr_assert(ranks_have_stepped(&ranks, 1));
    }
}

Test(ranks_lockstep, memory_that_stays_away_on_one_rank_ends_the_step_on_all)
{
    OPEN_WITH(open, ranks, ranks, 3);
    for (uint64_t nth = 2; nth < 12; nth++) {
        ranks.rank[2].fail_request = nth;
        ranks.rank[2].fails_for_ever = true;
        ranks_step(&ranks);
        cr_assert_eq(ranks.rank[2].status, REBATCH_E_EXHAUSTED, "%s", ranks.rank[2].error);
        assert_says(&ranks.rank[0], "rank 2 ended step 0: out of memory");
        assert_says(&ranks.rank[1], "rank 2 ended step 0: out of memory");
    }
    ranks.rank[2].fail_request = 0;
    ranks_step(&ranks);
    assert_all(&ranks, REBATCH_OK);
    cr_assert(ranks_have_stepped(&ranks, 1));
}

static void keep_last_error(const rebatch_event *event, void *user)
{
    if (event->level == REBATCH_LOG_ERROR)
        (void)rebatch_event_format(user, 512, event);
}

/* A caller may have another way to run the step, as Python has sums in host memory. */
Test(ranks_lockstep, what_is_logged_of_memory_that_stays_away_says_how_the_ranks_ran)
{
    char said[512] = "";
    rebatch_options o = in_lockstep();
    o.log_level = REBATCH_LOG_ERROR;
    o.on_event = keep_last_error;
    o.on_event_user = said;
    OPEN_WITH(open_ranks, ranks, ranks, 2, &o);
    ranks.rank[1].fail_request = 2;
    ranks.rank[1].fails_for_ever = true;
    ranks_step(&ranks);
    cr_assert_eq(ranks.rank[1].status, REBATCH_E_EXHAUSTED);
    cr_assert(
        strstr(said, "step 0: out of memory, and nothing smaller or lighter is left to run, "),
        "%s", said);
    cr_assert(strstr(said, "(in lockstep)"), "%s", said);
}

static rebatch_status die(struct rank *r, enum rank_place place)
{
    if (place != *(const enum rank_place *)r->inside_user)
        return REBATCH_OK;
    meeting_leave(&r->ranks->meeting);
    return RANK_STATUS;
}

Test(ranks_lockstep, a_rank_that_dies_ends_the_step_on_all)
{
    static enum rank_place places[] = {RANK_ZERO, RANK_FORWARD, RANK_ACCUMULATED};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        OPEN_WITH(open, ranks, ranks, 3);
        ranks.rank[1].inside = die;
        ranks.rank[1].inside_user = &places[i];
        for (int step = 0; step < 2; step++) {
            ranks_step(&ranks);
            cr_assert_eq(ranks.rank[0].status, REBATCH_E_PEER, "%s", ranks.rank[0].error);
            cr_assert_eq(ranks.rank[2].status, REBATCH_E_PEER, "%s", ranks.rank[2].error);
            ranks.rank[1].inside = NULL;
        }
        cr_assert_eq(ranks.meeting.aborts, 3);
        cr_assert(ranks_have_stepped(&ranks, 0));
    }
}

/* ---- callbacks that break the rules ---- */

static rebatch_status declare_alone(const rebatch_microbatch *mb, void *user)
{
    (void)mb;
    rebatch_mutating(((struct rank *)user)->rb);
    return REBATCH_OK;
}

static rebatch_status ignore_the_vote(const rebatch_microbatch *mb, void *user)
{
    struct rank *const r = user;
    if (mb->is_abandoned)
        return REBATCH_OK;
    if (r->number == 1) /* whose memory is gone */
        return REBATCH_OOM;
    const rebatch_status ignored = rebatch_mutating_together(r->rb);
    (void)ignored;
    return REBATCH_OK;
}

static rebatch_status vote_twice(const rebatch_microbatch *mb, void *user)
{
    struct rank *const r = user;
    if (mb->is_abandoned)
        return REBATCH_OK;
    const rebatch_status status = rebatch_mutating_together(r->rb);
    return status || r->number ? status : rebatch_mutating_together(r->rb);
}

static void break_rule(rebatch_status (*callback)(const rebatch_microbatch *, void *),
                       const char *sentence)
{
    OPEN_WITH(open, ranks, ranks, 2);
    ranks.rank[0].ops.forward_backward = callback;
    ranks.rank[1].ops.forward_backward =
        callback == declare_alone ? vote_twice : callback; /* which rank 1 does not */
    ranks_step(&ranks);
    cr_assert_eq(ranks.rank[0].status, REBATCH_E_STATE, "%s", ranks.rank[0].error);
    cr_assert(strstr(ranks.rank[0].error, sentence), "%s", ranks.rank[0].error);
    assert_says(&ranks.rank[1], "rank 0 ended step 0: ");
}

Test(ranks_lockstep, a_callback_that_does_not_vote_as_it_should_ends_the_step_on_all)
{
    break_rule(declare_alone, "without rebatch_mutating_together(): expected one call");
    break_rule(ignore_the_vote, "had returned REBATCH_OOM: expected REBATCH_OOM");
    break_rule(vote_twice, "expected one call");
}

/* ---- what is refused ---- */

Test(ranks_lockstep, ranks_with_other_batches_or_limits_are_told_both_values)
{
    OPEN_WITH(open, ranks, ranks, 2);
    ranks.rank[1].batch = 9;
    ranks_step(&ranks);
    assert_says(&ranks.rank[0], "the number of samples of a rank, which are in lockstep: 9 on one "
                                "rank, 12 on another, and 12 here");
    assert_says(&ranks.rank[1], "12 on another, and 9 here");
}

static uint64_t cost(size_t first, size_t count, void *user)
{
    (void)first, (void)user;
    return count;
}

static size_t part(size_t first, void *user)
{
    (void)user;
    return 12 - first;
}

Test(ranks_lockstep, what_does_not_go_with_it_is_refused)
{
    rebatch *rb;
    rebatch_options o = REBATCH_OPTIONS_INIT;
    OPEN_WITH(open, ranks, ranks, 2);
    struct rank *const r = &ranks.rank[0];
    o.lockstep = REBATCH_ON;
    FAILS(rebatch_open(&rb, r->device, &o), REBATCH_E_INVALID, "lockstep is on and group is NULL");
    const rebatch_group group = rank_group(r);
    o.group = &group;
    o.learn = REBATCH_ON;
    FAILS(rebatch_open(&rb, r->device, &o), REBATCH_E_INVALID, "lockstep and learn are both on");
    FAILS(rebatch_probe(r->rb, &r->ops, 12, r, NULL, NULL), REBATCH_E_UNSUPPORTED,
          "lockstep is on");
    rebatch_check_report found;
    cr_assert_eq(rebatch_check(r->rb, &r->ops, 12, r, NULL, &found), REBATCH_E_UNSUPPORTED);
    cr_assert_eq(ranks.meeting.votes, 0);
    r->ops.cost = cost;
    ranks_step(&ranks);
    cr_assert_eq(r->status, REBATCH_E_INVALID);
    cr_assert(strstr(r->error, "ops.cost is set and lockstep is on"), "%s", r->error);
    assert_says(&ranks.rank[1], "rank 0 ended step 0: ops.cost is set");
    r->ops.cost = NULL;
    r->ops.part = part;
    ranks_step(&ranks);
    cr_assert(strstr(r->error, "ops.part is set and lockstep is on"), "%s", r->error);
    cr_assert_eq(rebatch_mutating_together(NULL), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_mutating_together(r->rb), REBATCH_E_STATE);
}

static rebatch_status run_samples(const rebatch_microbatch *mb, void *user)
{
    (void)mb;
    return rebatch_mutating_together(user);
}

Test(ranks_lockstep, functions_outside_of_training_do_not_vote)
{
    rebatch_map_ops map = REBATCH_MAP_OPS_INIT;
    map.run = run_samples;
    OPEN_WITH(open, ranks, ranks, 2);
    OK(rebatch_map(ranks.rank[1].rb, &map, 5, ranks.rank[1].rb, NULL));
    cr_assert_eq(ranks.meeting.arrived + ranks.meeting.votes, 0);
}
