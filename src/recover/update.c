/* Owns what follows the samples of a step: the reduction over the ranks, and the update.
 * Must not know how samples are cut. */
#include "recover/recover.h"

/* An OOM within an update tears it, so the memory of the one before is there when it begins, on the
 * device, or where nothing of the step could be smaller on the host. */
static rebatch_status admit(rebatch *rb)
{
    if (rb->update_bytes == 0 || !rbi_session_admits(rb))
        return REBATCH_OK;
    const rebatch_status status = rbi_memory_admit(rb, rb->update_bytes);
    if (status != REBATCH_OOM)
        return status;
    if (rbi_overflow_serves(rb, rb->update_bytes))
        return REBATCH_OK;
    size_t available;
    (void)rbi_memory_available(&available, rb);
    rb->run.ooms.failure = (struct rbi_failure){.phase = REBATCH_PHASE_OPTIMIZER,
                                                .need_bytes = rb->update_bytes,
                                                .available_bytes = available};
    return REBATCH_OOM;
}

static rebatch_status begin_once(rebatch *rb, enum rbi_callback which)
{
    rbi_assert(which == RBI_OPTIMIZER || which == RBI_REDUCE);
    rb->run.progress.attempt_ns = rbi_now_ns();
    rebatch_status status = rbi_resize_ready(rb);
    if (!status)
        status = rbi_guards_save(rb, REBATCH_GUARD_ATTEMPT);
    if (which == RBI_OPTIMIZER) {
        rbi_leak_update_begins(rb);
        if (!status)
            status = admit(rb);
    }
    return status ? status : rbi_callback_begin(rb, which, NULL);
}

static rebatch_status recover(rebatch *rb)
{
    const rebatch_phase phase = rb->run.ooms.failure.phase;
    rebatch_status status = REBATCH_OK; /* torn: nothing can be undone; resize: nothing has to be */
    if (phase == REBATCH_PHASE_OPTIMIZER || phase == REBATCH_PHASE_REDUCE)
        status = rbi_guards_restore(rb, REBATCH_GUARD_ATTEMPT);
    const uint64_t lost_ns = rbi_now_ns() - rb->run.progress.attempt_ns;
    return status ? status : rbi_fallback_next(rb, &(struct rbi_interrupted){.lost_ns = lost_ns});
}

/* As rbi_samples_next(), of optimizer_step or reduce: true for the first time, and again after each
 * OOM that comes before it has begun. */
static bool next(rebatch *rb, enum rbi_callback which, rebatch_status *status)
{
    if (rb->callback.is_running) {
        *status = rbi_callback_end(rb, *status);
        rb->run.has_reduced = which == RBI_REDUCE && *status != REBATCH_OOM;
        if (!*status)
            return false;
        if (*status == REBATCH_OOM)
            *status = recover(rb);
    }
    while (!*status) {
        *status = begin_once(rb, which);
        if (!*status)
            return true;
        if (*status == REBATCH_OOM)
            *status = recover(rb);
    }
    return false;
}

static rebatch_status run(rebatch *rb, enum rbi_callback which)
{
    rebatch_status status = REBATCH_OK;
    while (next(rb, which, &status))
        status = rbi_callback_call(rb);
    return status;
}

bool rbi_update_next(rebatch *rb, rebatch_status *status)
{
    if (next(rb, RBI_OPTIMIZER, status))
        return true;
    *status = *status ? rbi_vote_owe(rb, *status) : REBATCH_OK;
    return false;
}

rebatch_status rbi_update_run(rebatch *rb)
{
    rebatch_status status = REBATCH_OK;
    while (rbi_update_next(rb, &status))
        status = rbi_callback_call(rb);
    return status;
}

/* ---- the reduction ---- */

/* The update's memory is there before the ranks vote: after it nobody can go back. */
static rebatch_status secure_memory(rebatch *rb)
{
    for (;;) {
        const uint64_t began = rbi_now_ns();
        rebatch_status status = rbi_resize_ready(rb);
        if (!status)
            status = admit(rb);
        if (status != REBATCH_OOM)
            return status;
        status = rbi_fallback_next(rb, &(struct rbi_interrupted){.lost_ns = rbi_now_ns() - began});
        if (status)
            return status;
    }
}

/* This rank has failed, and takes part in the collectives all the same. What it allocates there is
 * taken back with the step; here where that has happened already. */
static void reduce_abandoned(rebatch *rb)
{
    rebatch_scope own = 0;
    if (!rb->run.scope && rbi_scope_open(rb, &own))
        return;
    rbi_assert(rbi_group_is_set(rb) && rb->run.ops->reduce);
    rb->run.is_abandoned = true;
    (void)rbi_callback_run(rb, RBI_REDUCE, NULL);
    rb->run.is_abandoned = false;
    if (own)
        (void)rbi_scope_undo(rb->pool, own);
}

rebatch_status rbi_update_settle(rebatch *rb, rebatch_status own)
{
    if (!rbi_group_is_set(rb) || rb->run.lockstep.is_over)
        return own;
    rb->run.has_reduced = false;
    if (!own) {
        own = rb->run.ops->reduce ? run(rb, RBI_REDUCE) : REBATCH_OK;
        rb->group.has_failed_in_reduce = own && rb->run.has_reduced;
        if (!own)
            own = secure_memory(rb);
    }
    const struct rbi_said said = rbi_said_take(rb, own);
    if (own && !rb->run.has_reduced && rb->run.ops->reduce)
        reduce_abandoned(rb);
    return rbi_vote_end(rb, own, &said);
}
