/* Owns lockstep: the loop in which all ranks run the same micro-batches, and take back the same
 * ones, and its votes. Must not know how samples are cut. */
#include <inttypes.h>

#include "recover/recover.h"

/* Of each word the least of all ranks holds. */
enum {
    SIZE,    /* samples of a micro-batch that a rank can run */
    OUTCOME, /* of an attempt */
    LEVEL,   /* of lighten, complemented: the lightest holds */
    FAILED,  /* a rank that cannot go on */
    WORDS
};
enum outcome { RUN_BATCH_AGAIN, RUN_SAMPLES_AGAIN, SUCCEEDED };

/* One all-reduce. A rank that cannot go on says so by `own`, and why by `said`; then the step is
 * over for all. */
static rebatch_status vote(rebatch *rb, uint64_t words[WORDS], rebatch_status own,
                           const struct rbi_said *said)
{
    words[FAILED] = own ? rb->group.table.rank : UINT64_MAX;
    rebatch_status status = rbi_group_all_reduce(rb, words, WORDS, REBATCH_MIN);
    if (!status && words[FAILED] != UINT64_MAX)
        status = rbi_vote_hear(rb, own, said);
    rb->run.lockstep.is_over = own || status;
    return own ? rbi_said_again(said, own) : status;
}

/* ---- the size ---- */

/* Another rank has no memory at this level, and what its recomputation calls must be called here
 * too. */
static rebatch_status lighten_to(rebatch *rb, unsigned level)
{
    while (rb->lighten < level) {
        if (!rb->run.ops->lighten)
            return rbi_error(
                REBATCH_E_STATE,
                "another rank is at level %u of lighten, and ops.lighten is NULL here: "
                "expected the same callbacks on all ranks in lockstep",
                level);
        const rebatch_status status = rbi_callback_lighten(rb, rb->lighten + 1);
        if (status == REBATCH_OOM || status == REBATCH_E_UNSUPPORTED)
            return rbi_error(REBATCH_E_STATE,
                             "another rank is at level %u of lighten, and this one does not get "
                             "beyond %u",
                             level, rb->lighten);
        if (status)
            return status;
    }
    return REBATCH_OK;
}

/* Told in the next vote. The collectives until then are called. */
static void owe(rebatch *rb, rebatch_status status)
{
    rbi_assert(status != REBATCH_OK && rb->run.lockstep.owed == REBATCH_OK);
    rb->run.lockstep.owed = status;
    rb->run.lockstep.owed_failure = rb->run.ooms.failure;
    if (status != REBATCH_OOM)
        rb->run.lockstep.owed_said = rbi_said_take(rb, status);
}

/* The micro-batch that this rank would run by itself: REBATCH_OK, or why it cannot go on. */
static rebatch_status choose_own(rebatch *rb)
{
    rebatch_status status = REBATCH_OK;
    while (!status) {
        rbi_samples_cut(rb);
        rbi_resize_prepare(rb, false);
        status = rbi_samples_admit(rb, &rb->run.progress.mb);
        if (status != REBATCH_OOM)
            break;
        status = rbi_samples_recover(rb);
    }
    return status;
}

/* The vote on the size: no micro-batch of any rank has more samples than the least of all asks for.
 * `own` is how this rank has fared until now. */
static rebatch_status choose(rebatch *rb, rebatch_status own)
{
    rb->run.most = SIZE_MAX;
    if (!own)
        own = choose_own(rb);
    const struct rbi_said said = rbi_said_take(rb, own);
    uint64_t words[WORDS] = {[SIZE] = own ? UINT64_MAX : rbi_micro_size(rb, rb->run.batch),
                             [OUTCOME] = SUCCEEDED,
                             [LEVEL] = ~(uint64_t)rb->lighten};
    const rebatch_status status = vote(rb, words, own, &said);
    if (status)
        return status;
    rb->run.most = words[SIZE];
    rbi_assert(rb->run.most > 0);
    rb->run.cut.even_size = 0; /* what is decided of the cut is decided now, on all ranks */
    const rebatch_status lightened = lighten_to(rb, (unsigned)~words[LEVEL]);
    if (lightened)
        owe(rb, lightened);
    return REBATCH_OK;
}

/* ---- an attempt ---- */

/* `outcome` is this rank's; `own` is REBATCH_OK, or what ends the step here. */
static rebatch_status vote_on(rebatch *rb, enum outcome outcome, rebatch_status own,
                              const struct rbi_said *said)
{
    struct rbi_lockstep *const lockstep = &rb->run.lockstep;
    uint64_t words[WORDS] = {
        [SIZE] = UINT64_MAX, [OUTCOME] = outcome, [LEVEL] = ~(uint64_t)rb->lighten};
    lockstep->stage = RBI_LOCKSTEP_VOTED;
    lockstep->verdict = vote(rb, words, own, said);
    if (lockstep->verdict || words[OUTCOME] == SUCCEEDED)
        return lockstep->verdict;
    if (outcome == SUCCEEDED)
        rb->run.ooms.failure =
            (struct rbi_failure){.phase = REBATCH_PHASE_FORWARD, .is_peers = true};
    if (words[OUTCOME] == RUN_BATCH_AGAIN)
        rb->run.ooms.failure.phase = REBATCH_PHASE_BACKWARD;
    lockstep->verdict = REBATCH_OOM;
    return REBATCH_OOM;
}

/* What this rank knew of before, and the others hear of only now. */
static rebatch_status vote_owed(rebatch *rb)
{
    struct rbi_lockstep *const lockstep = &rb->run.lockstep;
    const rebatch_status owed = lockstep->owed;
    rbi_assert(owed != REBATCH_OK);
    lockstep->owed = REBATCH_OK;
    rb->run.ooms.failure = lockstep->owed_failure;
    return owed == REBATCH_OOM ? vote_on(rb, RUN_BATCH_AGAIN, REBATCH_OK, NULL)
                               : vote_on(rb, SUCCEEDED, owed, &lockstep->owed_said);
}

rebatch_status rebatch_mutating_together(rebatch *rb)
{
    if (!rb)
        return rbi_error(REBATCH_E_INVALID, "rb is NULL");
    if (!rb->callback.is_running)
        return rbi_error(REBATCH_E_STATE,
                         "rebatch_mutating_together() was called outside a callback");
    if (rb->run.lockstep.stage == RBI_LOCKSTEP_VOTED)
        return rbi_error(REBATCH_E_STATE, "rebatch_mutating_together() was called after the ranks "
                                          "had voted on the micro-batch: expected one call");
    if (rb->run.lockstep.stage == RBI_LOCKSTEP_RUNS) {
        const rebatch_status status = vote_on(rb, SUCCEEDED, REBATCH_OK, NULL);
        if (status)
            return status;
    }
    rebatch_mutating(rb);
    return REBATCH_OK;
}

/* This rank has failed, and calls the collectives of the micro-batch all the same. What it
 * allocates there is taken back. */
static void abandon(rebatch *rb, const rebatch_microbatch *mb)
{
    const struct rbi_failure failure = rb->run.ooms.failure;
    rebatch_microbatch abandoned = *mb;
    abandoned.is_abandoned = true;
    rebatch_scope own;
    rb->run.lockstep.stage = RBI_LOCKSTEP_VOTED; /* what it says does not count */
    if (rbi_scope_open(rb, &own) == REBATCH_OK) {
        (void)rbi_callback_run(rb, RBI_FORWARD_BACKWARD, &abandoned);
        (void)rbi_scope_undo(rb->pool, own);
    }
    rb->run.ooms.failure = failure;
}

/* It failed before the ranks had voted. */
static rebatch_status fail(rebatch *rb, const rebatch_microbatch *mb, rebatch_status status)
{
    const bool is_oom = status == REBATCH_OOM;
    const struct rbi_said said = rbi_said_take(rb, is_oom ? REBATCH_OK : status);
    abandon(rb, mb);
    const enum outcome outcome =
        rb->run.ooms.failure.phase == REBATCH_PHASE_BACKWARD ? RUN_BATCH_AGAIN : RUN_SAMPLES_AGAIN;
    return is_oom ? vote_on(rb, outcome, REBATCH_OK, &said) : vote_on(rb, SUCCEEDED, status, &said);
}

static rebatch_status say_undeclared(const rebatch *rb, const rebatch_microbatch *mb)
{
    return rbi_error(
        REBATCH_E_STATE,
        "step %" PRIu64 ": forward_backward of samples %zu-%zu returned REBATCH_OK %s", rb->step,
        mb->first, mb->first + mb->count - 1,
        rb->run.lockstep.verdict == REBATCH_OOM
            ? "although rebatch_mutating_together() had returned REBATCH_OOM: expected "
              "REBATCH_OOM"
            : "without rebatch_mutating_together(): expected one call in lockstep");
}

/* After an attempt that ended with `status`: the collectives that it has not called, and the vote
 * on it, where it has not voted. REBATCH_OK: the samples are accumulated everywhere. REBATCH_OOM:
 * it runs again, on all ranks, by rb->run.ooms.failure. Any other status is fatal here. */
static rebatch_status end_attempt(rebatch *rb, const rebatch_microbatch *mb, rebatch_status status)
{
    struct rbi_lockstep *const lockstep = &rb->run.lockstep;
    if (lockstep->stage == RBI_LOCKSTEP_RUNS && status)
        return fail(rb, mb, status);
    if (lockstep->stage == RBI_LOCKSTEP_RUNS) {
        const struct rbi_said said = rbi_said_take(rb, say_undeclared(rb, mb));
        return vote_on(rb, SUCCEEDED, REBATCH_E_STATE, &said);
    }
    if (lockstep->verdict == REBATCH_OK && status) {
        owe(rb, status); /* the others have accumulated, and are on their way to the next one */
        return REBATCH_OK;
    }
    if (lockstep->verdict && !status)
        return lockstep->is_over ? lockstep->verdict : say_undeclared(rb, mb);
    return status;
}

/* What this rank owes dooms the micro-batch: it does not run here. */
static rebatch_status run_doomed(rebatch *rb, const rebatch_microbatch *mb)
{
    abandon(rb, mb);
    return vote_owed(rb);
}

static rebatch_status run_attempt(rebatch *rb, const rebatch_microbatch *mb)
{
    rbi_assert(rb->run.lockstep.stage == RBI_LOCKSTEP_IDLE);
    rb->run.lockstep.stage = RBI_LOCKSTEP_RUNS;
    return end_attempt(rb, mb, rbi_samples_try(rb));
}

/* ---- the loop ---- */

static rebatch_status run_next(rebatch *rb)
{
    const rebatch_microbatch *const mb = &rb->run.progress.mb;
    const bool is_doomed = rb->run.lockstep.owed != REBATCH_OK;
    rbi_samples_cut(rb);
    const rebatch_status status = is_doomed ? run_doomed(rb, mb) : run_attempt(rb, mb);
    if (!status)
        rbi_samples_succeeded(rb);
    return status;
}

/* The vote after the last micro-batch, on whether all have accumulated it. */
static rebatch_status finish(rebatch *rb)
{
    const bool owes = rb->run.lockstep.owed != REBATCH_OK;
    return owes ? vote_owed(rb) : vote_on(rb, SUCCEEDED, REBATCH_OK, NULL);
}

/* All ranks go on, or all of them end the step. */
static rebatch_status recover(rebatch *rb, rebatch_status status)
{
    if (rb->run.lockstep.is_over)
        return status;
    return choose(rb, status == REBATCH_OOM ? rbi_samples_recover(rb) : status);
}

rebatch_status rbi_lockstep_samples_run(rebatch *rb, rebatch_status own)
{
    rbi_samples_begin(rb);
    rebatch_status status = choose(rb, own);
    for (bool is_done = false; !status && !is_done;) {
        is_done = rb->run.progress.next == rb->run.batch;
        status = is_done ? finish(rb) : run_next(rb);
        rb->run.lockstep.stage = RBI_LOCKSTEP_IDLE;
        if (status) {
            is_done = false;
            status = recover(rb, status);
        }
    }
    return status;
}
