/* Owns the micro-batches of a run: where the effective batch is cut, admission, attempts, and what
 * is run again after an OOM. Must not know how memory is found. */
#include "recover/recover.h"

void rbi_samples_begin(rebatch *rb)
{
    const uint64_t now = rbi_now_ns();
    rbi_thrashing_restart(rb);
    rbi_learn_begin_step(rb);
    rb->run.progress = (struct rbi_progress){.began_ns = now,
                                             .attempt_ns = now,
                                             .mb = {.step = rb->step,
                                                    .batch = rb->run.total,
                                                    .pool = rb->pool,
                                                    .stream = rb->options.stream,
                                                    .rank_batch = rb->run.batch}};
}

/* ---- the next micro-batch ---- */

static uint32_t attempts_of(const rebatch *rb, size_t sample)
{
    uint32_t attempts = 0;
    for (size_t i = 0; i < rb->run.ooms.failed_count; i++)
        attempts += rb->failed[i].first <= sample && sample < rb->failed[i].end;
    return attempts;
}

void rbi_samples_cut(rebatch *rb)
{
    rebatch_microbatch *const mb = &rb->run.progress.mb;
    mb->first = rb->run.progress.next;
    mb->count = rbi_cut(rb, mb->first);
    const size_t room = rb->run.by_cost ? rbi_resize_size(rb) : 0;
    if (room) /* after an OOM the budget may cut otherwise than buffers are made for */
        mb->count = rbi_min(mb->count, room);
    rbi_assert(mb->count > 0 && mb->count <= rb->run.batch - mb->first);
    rb->run.cut.size = rbi_size_of(rb, mb->first, mb->count);
    mb->attempt = attempts_of(rb, mb->first);
}

rebatch_status rbi_samples_admit(rebatch *rb, const rebatch_microbatch *mb)
{
    rebatch_status status = rbi_pool_run_task(rb->pool); /* which may leave less memory */
    if (status)
        return status;
    const bool is_last_resort = !rbi_size_can_shrink(rb, mb->count);
    if (!rbi_session_admits(rb) || is_last_resort || rb->run.ooms.retried_same ||
        rbi_growth_overrules(rb))
        return REBATCH_OK;
    const struct rbi_need *const known = rbi_need_find(rb, rb->run.cut.size, rb->lighten);
    uint64_t need;
    if ((known && known->has_memory) || !rbi_need_predict_surely(&need, rb, rb->run.cut.size) ||
        need == 0)
        return REBATCH_OK;
    need -= rbi_min(need, rbi_need_held(rb, rb->run.cut.size));
    const uint64_t missing = need - rbi_min(need, rbi_resize_bytes(rb));
    if (missing == 0)
        return REBATCH_OK;
    status = rbi_memory_admit(rb, missing);
    if (status != REBATCH_OOM)
        return status;
    size_t available;
    (void)rbi_available(&available, rb);
    rb->run.ooms.failure = (struct rbi_failure){
        .phase = REBATCH_PHASE_ADMISSION, .need_bytes = need, .available_bytes = available};
    return REBATCH_OOM;
}

/* What is done after an attempt, however it has ended. */
static rebatch_status end_attempt(rebatch *rb, rebatch_status status)
{
    if (rb->run.ops->resize && rb->run.progress.is_recorded)
        rbi_resize_release(rb);
    rbi_learn_end(rb, rb->run.progress.mb.count, status);
    return status;
}

/* Admission, and what is ready before an attempt. One that the tuner records has buffers of its
 * own, so that it sees all that the size needs. */
static rebatch_status begin_attempt(rebatch *rb)
{
    struct rbi_progress *const progress = &rb->run.progress;
    progress->is_recorded = rbi_learn_will_watch(rb, progress->mb.count);
    rbi_resize_prepare(rb, progress->is_recorded);
    rebatch_status status = rbi_samples_admit(rb, &progress->mb);
    if (status)
        return status;
    rbi_learn_begin(rb, progress->mb.count);
    status = rbi_resize_ready(rb);
    if (!status)
        status = rbi_guards_save(rb, REBATCH_GUARD_ATTEMPT);
    if (!status) {
        rb->run.report.attempts++;
        rb->run.ooms.refusal = (struct rbi_refusal){0};
        status = rbi_callback_begin(rb, rb->run.samples_callback, &progress->mb);
    }
    return status ? end_attempt(rb, status) : REBATCH_OK;
}

rebatch_status rbi_samples_try(rebatch *rb)
{
    const rebatch_status status = begin_attempt(rb);
    return status ? status : end_attempt(rb, rbi_callback_end(rb, rbi_callback_call(rb)));
}

void rbi_samples_succeeded(rebatch *rb)
{
    struct rbi_progress *const progress = &rb->run.progress;
    const size_t count = progress->mb.count;
    rbi_assert(progress->mb.first == progress->next && count <= rb->run.batch - progress->next);
    progress->next += count;
    rb->run.report.microbatches++;
    rb->run.ooms.in_row = 0;
    rbi_thrashing_end(rb, count, rb->sizes.known[rb->sizes.known_last].bytes);
    rb->run.ooms.retried_same = false;
    if (rb->run.samples_callback == RBI_MAP)
        rbi_growth_step_done(rb);
    progress->attempt_ns = rbi_now_ns();
}

/* ---- after an OOM ---- */

static void remember_failed(rebatch *rb, size_t first, size_t end)
{
    rbi_assert(first < end && end <= rb->run.batch);
    if (rb->run.ooms.failed_count < rb->failed_room)
        rb->failed[rb->run.ooms.failed_count++] = (struct rbi_failed_range){first, end};
}

/* No forward_backward ran, so there is nothing to run again. */
static rebatch_status refused(rebatch *rb)
{
    const struct rbi_progress *const progress = &rb->run.progress;
    const rebatch_microbatch *const mb = &progress->mb;
    if (rb->run.ooms.failure.phase == REBATCH_PHASE_ADMISSION)
        rbi_learn_refused(rb, mb->count);
    return rbi_fallback_next(
        rb, &(struct rbi_interrupted){.mb = mb, .lost_ns = rbi_now_ns() - progress->attempt_ns});
}

/* The accumulators are as they were: only those samples run again. */
static rebatch_status redo_samples(rebatch *rb)
{
    const struct rbi_progress *const progress = &rb->run.progress;
    const rebatch_microbatch *const mb = &progress->mb;
    remember_failed(rb, mb->first, mb->first + mb->count);
    const rebatch_status status = rbi_guards_restore(rb, REBATCH_GUARD_ATTEMPT);
    if (status)
        return status;
    return rbi_fallback_next(
        rb, &(struct rbi_interrupted){.mb = mb,
                                      .redone_samples = mb->count,
                                      .lost_ns = rbi_now_ns() - progress->attempt_ns});
}

/* The accumulators are dirty: the effective batch runs again from zero_grad. */
static rebatch_status redo_batch(rebatch *rb)
{
    struct rbi_progress *const progress = &rb->run.progress;
    const rebatch_microbatch *const mb = &progress->mb;
    const size_t end = mb->first + mb->count;
    remember_failed(rb, 0, end);
    rebatch_status status = rbi_step_undo(rb);
    size_t available;
    (void)rbi_available(&available, rb);
    rb->run.ooms.failure.available_bytes = available;
    if (!status)
        status = rbi_fallback_next(
            rb, &(struct rbi_interrupted){
                    .mb = mb, .redone_samples = end, .lost_ns = rbi_now_ns() - progress->began_ns});
    if (!status)
        status = rbi_scope_open(rb, &rb->run.scope);
    if (!status)
        status = rbi_zero_grad_run(rb);
    rbi_thrashing_restart(rb);
    rb->run.report.learned = rb->run.report.microbatches = 0;
    progress->next = 0;
    progress->began_ns = rbi_now_ns();
    return status;
}

static rebatch_status redo(rebatch *rb)
{
    rbi_assert(rb->run.progress.mb.count > 0 && rb->run.ooms.failure.phase != REBATCH_PHASE_UPDATE);
    switch (rb->run.ooms.failure.phase) {
    case REBATCH_PHASE_ADMISSION:
    case REBATCH_PHASE_RESIZE:
        return refused(rb);
    case REBATCH_PHASE_FORWARD:
    case REBATCH_PHASE_MAP:
        return redo_samples(rb);
    default:
        return redo_batch(rb);
    }
}

rebatch_status rbi_samples_recover(rebatch *rb)
{
    const rebatch_status status = redo(rb);
    rbi_thrashing_begin(rb);
    rb->run.progress.attempt_ns = rbi_now_ns();
    return status;
}

/* ---- the loop ---- */

bool rbi_samples_next(rebatch *rb, rebatch_status *status)
{
    struct rbi_progress *const progress = &rb->run.progress;
    if (rb->callback.is_running) {
        *status = end_attempt(rb, rbi_callback_end(rb, *status));
        if (!*status)
            rbi_samples_succeeded(rb);
        else if (*status == REBATCH_OOM)
            *status = rbi_samples_recover(rb);
    }
    while (!*status && progress->next < rb->run.batch) {
        rbi_learn_choose(rb, rb->run.batch - progress->next);
        rbi_samples_cut(rb);
        *status = begin_attempt(rb);
        if (!*status)
            return true;
        if (*status == REBATCH_OOM)
            *status = rbi_samples_recover(rb);
    }
    return false;
}

rebatch_status rbi_samples_run(rebatch *rb)
{
    rebatch_status status = REBATCH_OK;
    rbi_samples_begin(rb);
    while (rbi_samples_next(rb, &status))
        status = rbi_callback_call(rb);
    return status;
}
