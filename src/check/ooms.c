/* Owns the runs with an OOM at one allocation: what the failed attempt has left behind.
 * Must not know how a run is made. */
#include <math.h>

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
    (void)rbi_compare(c, &(struct rbi_comparison){REBATCH_FINDING_EARLY, when,
                                                  "call it before the change, or guard it",
                                                  &c->other, &c->now, NULL, "had changed", true});
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

static rebatch_status run_with_oom(struct rbi_check *c, size_t size, uint64_t fails_at)
{
    char when[256];
    size_t ran;
    struct rbi_text t = {when, sizeof when, 0};
    rbi_dry_step_release(c->rb); /* as in the first run, so that resize has its requests */
    rebatch_status status = rbi_check_run(c, size, fails_at, &ran);
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
