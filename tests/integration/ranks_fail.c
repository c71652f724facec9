/* Owns the tests of ranks that fail, disagree, or do not come: what the others hear of it, and that
 * nobody updates. Must not know more of the library than its public headers say. */
#include <stdio.h>

#include "rank_asserts.h"

static void open(struct ranks *ranks, uint32_t size)
{
    open_ranks(ranks, size, &OPTIONS(.micro_start = 4));
}

static void assert_ends(const struct rank *r, rebatch_status status, const char *error)
{
    cr_assert_eq(r->status, status, "rank %u: %d, %s", r->number, r->status, r->error);
    cr_assert(strstr(r->error, error), "rank %u says: %s", r->number, r->error);
    cr_assert_eq(r->updates, 0);
}

/* The failing step changes nothing, and the ones after it go on. */
static void assert_goes_on(struct ranks *ranks, uint64_t steps)
{
    cr_assert(ranks_have_stepped(ranks, steps));
    for (uint32_t i = 0; i < ranks->size; i++) {
        ranks->rank[i].inside = NULL;
        ranks->rank[i].act = NULL;
        ranks->rank[i].fail_request = 0;
        ranks->rank[i].fails_for_ever = false;
    }
    ranks_step(ranks);
    assert_all(ranks, REBATCH_OK);
    cr_assert(ranks_have_stepped(ranks, steps + 1));
}

static rebatch_status fail_at(struct rank *r, enum rank_place place)
{
    return place == *(const enum rank_place *)r->inside_user ? RANK_STATUS : REBATCH_OK;
}

Test(ranks_fail, a_status_of_one_rank_ends_the_step_on_all_with_its_sentence)
{
    static const struct {
        enum rank_place place;
        const char *sentence;
    } rows[] = {
        {RANK_ZERO, "rank 1 ended step 1: zero_grad returned 1009"},
        {RANK_FORWARD, "rank 1 ended step 1: forward_backward of samples 0-3 returned 1009"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        enum rank_place place = rows[i].place;
        OPEN_WITH(open, ranks, ranks, 3);
        ranks_step(&ranks);
        ranks.rank[1].inside = fail_at;
        ranks.rank[1].inside_user = &place;
        ranks_step(&ranks);
        assert_ends(&ranks.rank[0], REBATCH_E_PEER, rows[i].sentence);
        assert_ends(&ranks.rank[1], RANK_STATUS, "returned 1009");
        assert_ends(&ranks.rank[2], REBATCH_E_PEER, rows[i].sentence);
        cr_assert_eq(ranks.rank[1].abandons, 1);
        assert_goes_on(&ranks, 1);
    }
}

static rebatch_status explain(struct rank *r, enum rank_place place)
{
    if (place != RANK_FORWARD)
        return REBATCH_OK;
    rebatch_explain(r->rb, r->inside_user);
    return RANK_STATUS;
}

Test(ranks_fail, a_callback_can_say_why)
{
    char why[] = "ValueError: no label";
    OPEN_WITH(open, ranks, ranks, 2);
    ranks.rank[1].inside = explain;
    ranks.rank[1].inside_user = why;
    ranks_step(&ranks);
    assert_ends(&ranks.rank[0], REBATCH_E_PEER, "rank 1 ended step 0: ValueError: no label");
    assert_ends(&ranks.rank[1], RANK_STATUS, "returned 1009: ValueError: no label");
    assert_goes_on(&ranks, 0);
}

static rebatch_status explain_twice(struct rank *r, enum rank_place place)
{
    if (place != RANK_FORWARD)
        return REBATCH_OK;
    rebatch_explain(r->rb, "the first of two sentences, which is the longer one");
    rebatch_explain(r->rb, "no label!");
    return RANK_STATUS;
}

Test(ranks_fail, the_last_sentence_of_a_callback_is_heard_alone)
{
    OPEN_WITH(open, ranks, ranks, 2);
    ranks.rank[1].inside = explain_twice;
    ranks_step(&ranks);
    assert_ends(&ranks.rank[0], REBATCH_E_PEER, "rank 1 ended step 0: no label!");
    const char *const why = strstr(ranks.rank[0].error, "no label!");
    cr_assert_str_eq(why, "no label!", "%s", ranks.rank[0].error);
}

Test(ranks_fail, a_sentence_that_is_too_long_ends_with_a_whole_character)
{
    char why[300];
    memset(why, 'x', sizeof why);
    memcpy(why + 199, "\xc3\xa9", 2); /* e with an accent, across the limit of 200 bytes */
    why[299] = '\0';
    OPEN_WITH(open, ranks, ranks, 2);
    ranks.rank[0].inside = explain;
    ranks.rank[0].inside_user = why;
    ranks_step(&ranks);
    why[199] = '\0';
    assert_ends(&ranks.rank[1], REBATCH_E_PEER, why);
    cr_assert_eq(strlen(strchr(ranks.rank[1].error, 'x')), 199);
}

Test(ranks_fail, where_several_fail_the_lowest_rank_is_heard_and_each_has_its_own_status)
{
    char why[] = "that of rank 1", other[] = "that of rank 2";
    OPEN_WITH(open, ranks, ranks, 3);
    ranks.rank[1].inside = ranks.rank[2].inside = explain;
    ranks.rank[1].inside_user = why;
    ranks.rank[2].inside_user = other;
    ranks_step(&ranks);
    assert_ends(&ranks.rank[0], REBATCH_E_PEER, "rank 1 ended step 0: that of rank 1");
    assert_ends(&ranks.rank[1], RANK_STATUS, "returned");
    assert_ends(&ranks.rank[2], RANK_STATUS, "returned");
    assert_goes_on(&ranks, 0);
}

static rebatch_status reduce_nothing(bool is_abandoned, void *user)
{
    struct rank *r = user;
    const rebatch_status status =
        r->inside ? r->inside(r, is_abandoned ? RANK_ABANDONED : RANK_REDUCE) : REBATCH_OK;
    r->reduces += !is_abandoned;
    r->abandons += is_abandoned;
    return status;
}

static rebatch_status save_nothing(rebatch_guard_point point, void *user)
{
    const bool *const fails = user;
    return *fails && point == REBATCH_GUARD_STEP ? RANK_STATUS : REBATCH_OK;
}

Test(ranks_fail, a_rank_that_fails_before_its_first_callback_takes_part_in_the_reduction)
{
    bool fails = true;
    rebatch_guard_ops guard = {sizeof guard, save_nothing, save_nothing};
    OPEN_WITH(open, ranks, ranks, 2);
    OK(rebatch_guard_with(ranks.rank[1].rb, &guard, &fails));
    ranks_step(&ranks);
    cr_assert_eq(ranks.rank[0].status, REBATCH_E_PEER);
    cr_assert_eq(ranks.rank[1].status, RANK_STATUS);
    cr_assert_eq(ranks.rank[1].abandons, 1);
    fails = false;
    assert_goes_on(&ranks, 0);
}

/* Rank 0 fails only because rank 1 has: its collective ends without that rank. */
Test(ranks_fail, a_failure_within_reduce_is_heard_after_the_others)
{
    enum rank_place reduce = RANK_REDUCE, forward = RANK_FORWARD;
    OPEN_WITH(open, ranks, ranks, 3);
    for (uint32_t i = 0; i < 3; i++)
        ranks.rank[i].ops.reduce = reduce_nothing;
    ranks.rank[0].inside = ranks.rank[1].inside = fail_at;
    ranks.rank[0].inside_user = &reduce;
    ranks.rank[1].inside_user = &forward;
    ranks_step(&ranks);
    assert_ends(&ranks.rank[0], RANK_STATUS, "reduce returned 1009");
    assert_ends(&ranks.rank[2], REBATCH_E_PEER, "rank 1 ended step 0: forward_backward of");
    cr_assert_eq(ranks.rank[0].abandons, 0, "reduce had run");
    cr_assert_eq(ranks.rank[1].abandons, 1);
}

/* With every request from the n-th on, for every n before the update's. */
Test(ranks_fail, memory_that_stays_away_on_one_rank_ends_the_step_on_all)
{
    for (uint64_t nth = 1;; nth++) {
        struct ranks ranks;
        open(&ranks, 2);
        ranks_step(&ranks);
        ranks.rank[0].fail_request = nth;
        ranks.rank[0].fails_for_ever = true;
        ranks_step(&ranks);
        cr_assert_eq(ranks.rank[0].status, REBATCH_E_EXHAUSTED, "%s", ranks.rank[0].error);
        if (ranks.rank[0].report.ooms_in[REBATCH_PHASE_OPTIMIZER]) {
            cr_assert_gt(nth, 4);
            ranks_close(&ranks);
            break;
        }
        assert_ends(&ranks.rank[1], REBATCH_E_PEER, "rank 0 ended step 1: out of memory in ");
        cr_assert_eq(ranks.rank[0].updates, 0);
        assert_goes_on(&ranks, 1);
        ranks_close(&ranks);
    }
}

/* Somebody else takes the memory that the update had the last time. */
static rebatch_status take_memory(struct rank *r, enum rank_place place)
{
    if (place == RANK_ABANDONED)
        return REBATCH_OOM;
    if (place != RANK_REDUCE)
        return REBATCH_OK;
    (void)rebatch_pool_trim(rebatch_get_pool(r->rb), 0, NULL);
    return rebatch_pool_set_limit(rebatch_get_pool(r->rb), 4096);
}

Test(ranks_fail, an_update_whose_memory_is_gone_ends_the_step_before_anybody_updates)
{
    OPEN_WITH(open, ranks, ranks, 2);
    ranks.rank[0].ops.reduce = ranks.rank[1].ops.reduce = reduce_nothing;
    ranks_step(&ranks);
    ranks_step(&ranks);
    ranks.rank[1].inside = take_memory;
    ranks_step(&ranks);
    assert_ends(&ranks.rank[0], REBATCH_E_PEER,
                "rank 1 ended step 2: out of memory in optimizer_step");
    assert_ends(&ranks.rank[1], REBATCH_E_EXHAUSTED, "out of memory in optimizer_step");
    cr_assert_eq(ranks.rank[1].abandons, 0, "reduce had run");
}

/* ---- ranks that do not step ---- */

static rebatch_status abandon(struct rank *r)
{
    return rebatch_abandon_step(r->rb, "its data cannot be read");
}

static rebatch_status fail_and_leave_memory(struct rank *r, enum rank_place place)
{
    void *left;
    if (place == *(const enum rank_place *)r->inside_user)
        return RANK_STATUS;
    return place == RANK_ABANDONED
               ? rebatch_pool_alloc(&left, rebatch_get_pool(r->rb), 1 << 20, NULL, 0)
               : REBATCH_OK;
}

/* A rank that has failed in a callback, before its first one, or without a step. */
Test(ranks_fail, what_is_allocated_for_a_reduction_that_was_abandoned_is_taken_back)
{
    static const struct {
        enum rank_place place;
        bool fails_to_save, abandons;
    } rows[] = {{RANK_ZERO, false, false},
                {RANK_FORWARD, false, false},
                {RANK_UPDATE, true, false},
                {RANK_UPDATE, false, true}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        bool fails = rows[i].fails_to_save;
        enum rank_place place = rows[i].place;
        rebatch_guard_ops guard = {sizeof guard, save_nothing, save_nothing};
        OPEN_WITH(open, ranks, ranks, 2);
        struct rank *const r = &ranks.rank[1];
        r->ops.reduce = reduce_nothing;
        OK(rebatch_guard_with(r->rb, &guard, &fails));
        r->inside = fail_and_leave_memory;
        r->inside_user = &place;
        r->act = rows[i].abandons ? abandon : NULL;
        const uint64_t before = live_bytes_of(r->rb);
        ranks_step(&ranks);
        cr_expect_eq(ranks.rank[0].status, REBATCH_E_PEER, "row %zu", i);
        cr_expect_eq(r->abandons, !rows[i].abandons, "row %zu", i);
        cr_expect_eq(live_bytes_of(r->rb), before, "row %zu", i);
    }
}

Test(ranks_fail, a_rank_can_abandon_a_step_before_it)
{
    OPEN_WITH(open, ranks, ranks, 3);
    ranks.rank[2].act = abandon;
    ranks_step(&ranks);
    assert_ends(&ranks.rank[0], REBATCH_E_PEER, "rank 2 ended step 0: its data cannot be read");
    assert_ends(&ranks.rank[1], REBATCH_E_PEER, "rank 2 ended step 0: its data cannot be read");
    OK(ranks.rank[2].status);
    cr_assert_eq(ranks.meeting.programs, 0);
    assert_goes_on(&ranks, 0);
}

static rebatch_status step_wrongly(struct rank *r)
{
    return rebatch_step(r->rb, &r->ops, 0, r, &r->report);
}
static rebatch_status step_without_reduce(struct rank *r)
{
    rebatch_step_ops ops = r->ops;
    ops.reduce = NULL;
    return rebatch_step(r->rb, &ops, r->batch, r, &r->report);
}
static void do_nothing(void *user)
{
    (void)user;
}
static void train_nothing(size_t first, size_t count, void *user)
{
    (void)first, (void)count, (void)user;
}
static rebatch_status step_plainly(struct rank *r)
{
    return rebatch_step_plain(r->rb, r->batch, do_nothing, train_nothing, do_nothing, r, 0,
                              &r->report);
}

Test(ranks_fail, arguments_that_are_refused_on_one_rank_end_the_step_on_all)
{
    static rebatch_status (*const acts[])(struct rank *) = {step_wrongly, step_without_reduce,
                                                            step_plainly};
    static const char *const sentences[] = {"batch is 0", "ops.reduce is NULL",
                                            "ops.reduce is NULL"};
    for (size_t i = 0; i < sizeof acts / sizeof *acts; i++) {
        OPEN_WITH(open, ranks, ranks, 2);
        ranks.rank[0].act = acts[i];
        ranks_step(&ranks);
        assert_ends(&ranks.rank[0], REBATCH_E_INVALID, sentences[i]);
        assert_ends(&ranks.rank[1], REBATCH_E_PEER, sentences[i]);
        assert_goes_on(&ranks, 0);
    }
}

Test(ranks_fail, ranks_that_disagree_are_told_both_values)
{
    OPEN_WITH(open, ranks, ranks, 3);
    OK(rebatch_set_step(ranks.rank[1].rb, 7));
    ranks_step(&ranks);
    for (uint32_t i = 0; i < 3; i++) {
        assert_ends(&ranks.rank[i], REBATCH_E_PEER, "disagree on the number of the step");
        assert_ends(&ranks.rank[i], REBATCH_E_PEER, "0 on one rank, 7 on another");
    }
    OK(rebatch_set_step(ranks.rank[1].rb, 0));
    ranks.rank[2].ops.flags |= REBATCH_OWN_WEIGHTS;
    ranks_step(&ranks);
    assert_ends(&ranks.rank[0], REBATCH_E_PEER, "ops.flags: 1 on one rank, 3 on another");
    ranks.rank[2].ops.flags = ranks.rank[0].ops.flags;
    assert_goes_on(&ranks, 0);
}

/* ---- updates that fail after the vote ---- */

static rebatch_status tear(struct rank *r, enum rank_place place)
{
    if (place != RANK_UPDATE)
        return REBATCH_OK;
    if (r->inside_user)
        rebatch_mutating(r->rb);
    return RANK_STATUS;
}

Test(ranks_fail, an_update_that_fails_on_one_rank_is_told_to_all_in_the_next_step)
{
    for (int is_torn = 0; is_torn < 2; is_torn++) {
        OPEN_WITH(open, ranks, ranks, 2);
        ranks.rank[1].inside = tear;
        ranks.rank[1].inside_user = is_torn ? &ranks : NULL;
        ranks_step(&ranks);
        OK(ranks.rank[0].status);
        cr_assert_eq(ranks.rank[0].updates, 1);
        assert_ends(&ranks.rank[1], RANK_STATUS, "other ranks have updated");
        cr_assert_eq(ranks.rank[1].report.torn, is_torn);
        ranks.rank[1].inside = NULL;
        ranks_step(&ranks);
        assert_ends(&ranks.rank[0], REBATCH_E_PEER,
                    "rank 1 ended step 1: the update of step 0 failed on rank 1");
        assert_ends(&ranks.rank[1], REBATCH_E_STATE, "the update of step 0 failed on rank 1");
        ranks_step(&ranks); /* and nobody has restored anything */
        assert_ends(&ranks.rank[0], REBATCH_E_PEER, "disagree on the number of the step");
        for (uint32_t i = 0; i < 2; i++) {
            memset(ranks.rank[i].parameters, 0, sizeof ranks.rank[i].parameters);
            OK(rebatch_set_step(ranks.rank[i].rb, 0));
        }
        assert_goes_on(&ranks, 0);
    }
}

/* ---- a rank that does not come ---- */

static void assert_over(struct ranks *ranks, uint32_t absent, const char *sentence)
{
    for (int again = 0; again < 3; again++) {
        for (uint32_t i = 0; i < ranks->size; i++)
            if (i != absent)
                assert_ends(&ranks->rank[i], REBATCH_E_PEER, sentence);
        ranks_step_without(ranks, absent);
    }
    cr_assert_eq(ranks->meeting.aborts, ranks->size - 1);
    cr_assert_eq(rebatch_abandon_step(ranks->rank[absent ? 0 : 1].rb, "x"), REBATCH_E_PEER);
}

Test(ranks_fail, a_rank_that_does_not_come_ends_the_group_with_its_number)
{
    for (uint32_t absent = 0; absent < 3; absent++) {
        AUTO_CLOSE(ranks, ranks);
        rebatch_options o = REBATCH_OPTIONS_INIT;
        o.group_timeout_ms = 15;
        cr_assert(ranks_open(&ranks, 3, &o, 0));
        ranks_step_without(&ranks, absent);
        char sentence[64];
        (void)snprintf(sentence, sizeof sentence, "step 0: rank %u did not vote within 15 ms",
                       absent);
        assert_over(&ranks, absent, sentence);
    }
}

static rebatch_status leave(struct rank *r, enum rank_place place)
{
    if (place == RANK_FORWARD)
        meeting_leave(&r->ranks->meeting);
    return REBATCH_OK;
}

Test(ranks_fail, a_connection_that_is_lost_within_a_step_undoes_it)
{
    OPEN_WITH(open, ranks, ranks, 2);
    ranks_step(&ranks);
    ranks.rank[1].inside = leave;
    ranks_step(&ranks);
    for (uint32_t i = 0; i < 2; i++) {
        cr_assert_eq(ranks.rank[i].status, REBATCH_E_PEER);
        cr_assert_eq(ranks.rank[i].updates, 0);
    }
    cr_assert_eq(ranks.meeting.aborts, 2);
    cr_assert(ranks_have_stepped(&ranks, 1));
}

/* The n-th all-reduce of the rank fails, with a status and a sentence of its own. */
struct breaking {
    struct rank *rank;
    uint64_t calls, fails;
};

static rebatch_status all_reduce_until(uint64_t *words, size_t count, rebatch_reduction reduction,
                                       uint64_t timeout_ms, void *user)
{
    struct breaking *const b = user;
    if (++b->calls == b->fails) {
        meeting_leave(&b->rank->ranks->meeting);
        rebatch_device *none;
        return rebatch_device_open_host(&none, 0, NULL); /* whose sentence is kept */
    }
    return meeting_reduce(&b->rank->ranks->meeting, b->rank->number, words, count, (int)reduction,
                          timeout_ms);
}

static void open_breaking(struct ranks *ranks, struct breaking *b)
{
    open(ranks, 2);
    struct rank *const r = &ranks->rank[1];
    rebatch_group group = rank_group(r);
    b->rank = r;
    group.all_reduce = all_reduce_until;
    group.missing = NULL;
    group.abort = NULL;
    group.user = b;
    rebatch_close(r->rb);
    OK(rebatch_open(&r->rb, r->device, &OPTIONS(.group = &group, .log_level = REBATCH_LOG_QUIET)));
}

/* Of a step that succeeds, of one that rank 0 fails in, and of one that this rank fails in. */
Test(ranks_fail, an_all_reduce_that_fails_at_any_call_ends_the_group)
{
    enum rank_place place = RANK_FORWARD;
    for (uint32_t failing = 0; failing < 3; failing++)
        for (uint64_t nth = 1; nth <= (failing < 2 ? 4 : 2); nth++) {
            struct breaking b = {.fails = nth};
            OPEN_WITH(open_breaking, ranks, ranks, &b);
            if (failing < 2) {
                ranks.rank[failing].inside = fail_at;
                ranks.rank[failing].inside_user = &place;
            }
            ranks_step(&ranks);
            for (uint32_t i = 0; i < 2; i++) {
                const struct rank *const r = &ranks.rank[i];
                const bool has_failed = nth > 1 && i == failing;
                cr_assert_eq(r->status, has_failed ? RANK_STATUS : REBATCH_E_PEER, "%s", r->error);
                cr_assert_eq(r->updates, 0);
            }
            cr_assert_eq(b.calls, nth);
            ranks_step(&ranks);
            assert_ends(&ranks.rank[0], REBATCH_E_PEER, "did not vote");
            assert_ends(&ranks.rank[1], REBATCH_E_PEER,
                        "step 0: another rank did not vote: capacity_bytes is 0");
            cr_assert_eq(b.calls, nth, "it is not called again");
            cr_assert(ranks_have_stepped(&ranks, 0));
        }
}
