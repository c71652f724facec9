/* Owns the runs with an OOM at one allocation: what the failed attempt has left behind.
 * Must not know how a run is made. */
#include <math.h>
#include <string.h>

#include "check/check.h"

/* ---- what an attempt changed before it failed ---- */

void rbi_ooms_save_attempt(void *user)
{
    struct rbi_check *c = user;
    if (c->injection.fails_at)
        (void)rbi_values_read(&c->other, &c->items);
}

/* Guards have restored what they know. */
static void compare_attempt(struct rbi_check *c)
{
    char when[192];
    struct rbi_text t = {when, sizeof when, 0};
    if (rbi_values_read(&c->now, &c->items))
        return;
    rbi_text_add(&t, "when ");
    rbi_place_add(&t, &c->injection.injected, c->injection.injected_bytes);
    rbi_text_add(&t, " failed, before rebatch_mutating()");
    (void)rbi_compare(c, &(struct rbi_comparison){
                             REBATCH_FINDING_EARLY, when, "call it before the change, or guard it",
                             &c->other, &c->now, .verb = "had changed", .is_exact = true});
}

void rbi_ooms_was_taken_back(void *user)
{
    struct rbi_check *c = user;
    const rebatch_phase phase = rbi_session_failure(c->rb)->phase;
    const bool is_clean = phase == REBATCH_PHASE_FORWARD || phase == REBATCH_PHASE_OPTIMIZER;
    rbi_stale_take_back(&c->stale, phase == REBATCH_PHASE_BACKWARD);
    if (is_clean && c->injection.is_done &&
        c->injection.injected.serial == c->injection.place.serial)
        compare_attempt(c);
}

/* ---- what came out ---- */

static bool holds_no_number(const struct rbi_check *c, const struct rbi_values *was)
{
    for (size_t i = 0; i < c->items.count; i++) {
        const struct rbi_difference difference =
            rbi_values_compare(&c->items.list[i], was->copies[i], c->now.copies[i], 1);
        if (difference.differs && isnan(difference.is) && !isnan(difference.was))
            return true;
    }
    return false;
}

/* *was: the values of the same micro-batches without an OOM, so that any difference is caused by
 * the failed attempt, not by the cut or by rounding. NULL when they cannot run. */
static rebatch_status replay(struct rbi_check *c, const struct rbi_values **was)
{
    const struct rbi_parts *const parts = &c->ran;
    *was = &c->reference;
    if (rbi_parts_equal(parts, &c->whole))
        return REBATCH_OK;
    *was = &c->replayed;
    if (c->replayed_parts.count && rbi_parts_equal(parts, &c->replayed_parts))
        return REBATCH_OK;
    rebatch_status status = rbi_check_run_parts(c, parts, rbi_session_batch(c->rb), &c->replayed);
    const bool is_there = !status && rbi_parts_copy(&c->replayed_parts, parts);
    if (!is_there) {
        *was = NULL;
        c->replayed_parts.count = 0;
    }
    const rebatch_status undone = rbi_check_undo(c);
    return rbi_check_is_fatal(status) ? status : undone;
}

/* What a run with an OOM shows, whose results are in c->now. */
static rebatch_status judge(struct rbi_check *c, const char *when, bool was_swallowed)
{
    const struct rbi_values *was;
    rebatch_status status = replay(c, &was);
    if (status || !was || rbi_finding_has(c->report, REBATCH_FINDING_STALE))
        return status; /* writes to freed memory explain any difference */
    const uint32_t mistakes = c->report->mistakes;
    const char *const advice =
        was_swallowed ? "return the status of the allocation"
        : holds_no_number(c, was)
            ? "memory that was taken back is used: assign the pointer again in each attempt, or "
              "guard it"
            : "the failed attempt has changed what is not guarded, or a pointer to memory that was "
              "taken back is used, or samples that run again are treated differently";
    status = rbi_compare(c, &(struct rbi_comparison){was_swallowed ? REBATCH_FINDING_SWALLOWED
                                                                   : REBATCH_FINDING_AFTER_OOM,
                                                     when, advice, was, .is = &c->now});
    if (was_swallowed && c->report->mistakes == mistakes &&
        !rbi_finding_has(c->report, REBATCH_FINDING_SWALLOWED))
        rbi_compare_say_coped(c, when);
    return status;
}

static void add_when(struct rbi_text *t, const struct rbi_injection *injection)
{
    if (!injection->is_done) {
        rbi_text_add(t, "when nothing was made to fail");
        return;
    }
    rbi_text_add(t, "after ");
    rbi_place_add(t, &injection->injected, injection->injected_bytes);
    rbi_text_add(t, " failed%s",
                 injection->was_swallowed ? ", for which the callback returned REBATCH_OK" : "");
}

static rebatch_status resize(struct rbi_check *c, size_t size, uint64_t fails_at)
{
    rbi_injection_begin(&c->injection, fails_at);
    const rebatch_status status = rbi_dry_step_resize(c->rb, size);
    const rebatch_status undone = rbi_check_undo(c);
    return rbi_check_is_fatal(status) ? status : undone;
}

static size_t least_of(const struct rbi_check *c)
{
    return rbi_round_size_up(rbi_session_options(c->rb), 1);
}

/* The run's resize has its requests, as in the first run, and comes from another size. */
static rebatch_status run_with_oom(struct rbi_check *c, size_t size, uint64_t fails_at)
{
    char when[256];
    size_t ran;
    struct rbi_text t = {when, sizeof when, 0};
    rbi_resize_release(c->rb);
    rebatch_status status =
        c->has_resize && least_of(c) < size ? resize(c, least_of(c), 0) : REBATCH_OK;
    if (status)
        return status;
    status = rbi_check_run(c, size, fails_at, &ran);
    const bool is_there = !status && c->injection.is_done,
               was_swallowed = c->injection.was_swallowed;
    add_when(&t, &c->injection);
    c->report->ooms += size == c->base && c->injection.is_done;
    if (is_there)
        c->report->micro_smallest = rbi_min(c->report->micro_smallest, ran);
    status = rbi_check_end(c, when, status);
    return status || !is_there ? status : judge(c, when, was_swallowed);
}

/* Requests from number `from` to number `to`, `most` of them, evenly spread. */
static rebatch_status run_range(struct rbi_check *c, size_t size, uint64_t from, uint64_t to,
                                uint64_t most)
{
    rebatch_status status = REBATCH_OK;
    rbi_assert(0 < from && from <= to);
    const uint64_t all = to - from + 1;
    most = most < all ? most : all;
    for (uint64_t i = 0; i < most && !status && rbi_check_has_time(c); i++)
        status = run_with_oom(c, size, from + (most > 1 ? i * (all - 1) / (most - 1) : 0));
    return status;
}

/* In the last of several micro-batches, when the accumulators hold something. */
static rebatch_status run_last(struct rbi_check *c)
{
    size_t ran;
    const size_t size = rbi_round_size(rbi_session_options(c->rb), c->base / 2);
    if (size == 0 || !rbi_check_has_time(c))
        return REBATCH_OK;
    rebatch_status status = rbi_check_run(c, size, 0, &ran);
    const uint64_t all = c->injection.requests, last = c->injection.place.number;
    const rebatch_status undone = rbi_check_undo(c);
    rbi_assert(status || last <= all);
    if (status || undone) /* the runs of cuts.c reported it */
        return rbi_check_is_fatal(status) ? status : undone;
    return last ? run_range(c, size, all - last + 1, all, c->options.most_ooms / 4 + 1)
                : REBATCH_OK;
}

/* ---- resize ---- */

/* One micro-batch of the smallest size; reads what is watched into `values`. */
static rebatch_status run_least(struct rbi_check *c, struct rbi_values *values, bool *is_there)
{
    struct rbi_part part = {0, least_of(c)};
    const rebatch_status status =
        rbi_check_run_parts(c, &(struct rbi_parts){&part, 1, 1}, rbi_session_batch(c->rb), values);
    const rebatch_status undone = rbi_check_undo(c);
    *is_there = !status;
    return rbi_check_is_fatal(status) ? status : undone;
}

static bool is_same(const struct rbi_check *c)
{
    for (size_t i = 0; i < c->items.count; i++)
        if (memcmp(c->replayed.copies[i], c->now.copies[i], c->items.list[i].bytes) != 0)
            return false;
    return true;
}

/* A request fails the first time that it is made for this size, so that the host memory of
 * a resize moves as it grows: one that loses it ends the program, or gives something else. */
static rebatch_status fail_resize(struct rbi_check *c, size_t batch, uint64_t nth, bool *is_done)
{
    char when[256];
    struct rbi_text t = {when, sizeof when, 0};
    bool is_there = false;
    rebatch_status status = resize(c, batch, nth);
    *is_done = !status && c->injection.is_done;
    if (!*is_done)
        return status;
    add_when(&t, &c->injection);
    status = run_least(c, &c->now, &is_there);
    if (!status && is_there)
        status = rbi_compare(c, &(struct rbi_comparison){
                                    REBATCH_FINDING_AFTER_OOM, when,
                                    "resize is left at the request that fails: store what it has "
                                    "changed in host memory before, and make what is missing then",
                                    &c->replayed, .is = &c->now});
    return status;
}

rebatch_status rbi_ooms_run_resizes(struct rbi_check *c, size_t batch)
{
    bool is_there = true;
    if (!c->has_resize || !c->report->watched || least_of(c) >= batch)
        return REBATCH_OK; /* nothing could be compared, or there is one size */
    rebatch_status status = run_least(c, &c->replayed, &is_there);
    if (!status && is_there)
        status = run_least(c, &c->now, &is_there);
    is_there = is_there && !status && is_same(c); /* else other runs say why */
    for (uint64_t nth = 1; nth <= c->options.most_ooms && is_there && !status; nth++) {
        status = fail_resize(c, batch, nth, &is_there);
        is_there = is_there && c->report->mistakes == 0 && rbi_check_has_time(c);
    }
    rbi_resize_release(c->rb);
    return status;
}

rebatch_status rbi_ooms_run(struct rbi_check *c)
{
    const uint64_t all = c->report->allocations;
    rebatch_status status = REBATCH_OK;
    rbi_fill_set(c, RBI_NO_NUMBER,
                 rbi_finding_has(c->report, REBATCH_FINDING_UNINITIALIZED) ? 0 : RBI_NO_NUMBER);
    if (all)
        status = run_range(c, c->base, 1, all, c->options.most_ooms);
    if (!status)
        status = run_last(c);
    rbi_fill_set(c, 0, 0);
    return status;
}
