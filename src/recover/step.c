/* Owns the step: the cutting of the effective batch, and what is run again after an OOM.
 * Must not know how memory is found. */
#include "recover/recover.h"

/* ---- what the step takes back ---- */

rebatch_status rbi_step_open_scope(rebatch *rb)
{
    rbi_assert(rb->run.ops && !rb->run.scope);
    rebatch_status status = rbi_pool_keep_headroom(rb->pool);
    if (!status)
        status = rbi_guards_save(rb, REBATCH_GUARD_STEP);
    return status ? status : rbi_scope_open(rb, &rb->run.scope);
}

rebatch_status rbi_step_undo(rebatch *rb)
{
    if (rb->any_stream)
        (void)rbi_callback_wait(rb); /* nothing must be at work in what is taken back */
    if (rb->run.scope) /* else it was taken back before the failure that ends the step */
        (void)rbi_scope_undo(rb->pool, rb->run.scope);
    rb->run.scope = 0;
    return rbi_guards_restore(rb, REBATCH_GUARD_STEP);
}

/* ---- zero_grad ---- */

rebatch_status rbi_zero_grad_run(rebatch *rb)
{
    for (;;) {
        const uint64_t began = rbi_now_ns();
        rebatch_status status = rbi_resize_ready(rb);
        rb->run.zeroed_from = rbi_pool_allocations(rb->pool);
        if (!status)
            status = rbi_callback_run(rb, RBI_ZERO_GRAD, NULL);
        rb->run.zeroed_to = rbi_pool_allocations(rb->pool);
        if (status != REBATCH_OOM)
            return status;
        status = rbi_guards_restore(rb, REBATCH_GUARD_STEP);
        if (!status)
            status =
                rbi_fallback_next(rb, &(struct rbi_interrupted){.lost_ns = rbi_now_ns() - began});
        if (status)
            return status;
    }
}

/* ---- forward_backward ---- */

/* Where the effective batch stands. Samples [0, next) are in the accumulators. */
struct progress {
    size_t next;
    uint32_t microbatches; /* that made them */
    uint64_t began_ns;     /* when the first of them did */
    uint64_t attempt_ns;   /* when the attempt that runs began */
};

static uint32_t attempts_of(const rebatch *rb, size_t sample)
{
    uint32_t attempts = 0;
    for (size_t i = 0; i < rb->run.failed_count; i++)
        attempts += rb->failed[i].first <= sample && sample < rb->failed[i].end;
    return attempts;
}

static void remember_failed(rebatch *rb, size_t first, size_t end)
{
    rbi_assert(first < end && end <= rb->run.batch);
    if (rb->run.failed_count < rb->failed_room)
        rb->failed[rb->run.failed_count++] = (struct rbi_failed_range){first, end};
}

/* Sees to it that memory that an attempt is known to need is there before it starts. The last
 * resort is always allowed to try: what is known may be out of date. So is what is tried once more:
 * memory that was taken ahead, in one piece, may just have been in the way. */
static rebatch_status admit(rebatch *rb, size_t count)
{
    const bool is_last_resort = rbi_round_size(&rb->options, count - 1) == 0;
    if (!rbi_session_admits(rb) || is_last_resort || rb->run.retried_same ||
        rbi_growth_overrules(rb))
        return REBATCH_OK;
    uint64_t need;
    if (!rbi_need_predict_surely(&need, rb, rb->run.size) || need == 0)
        return REBATCH_OK;
    need -= rbi_min(need, rbi_need_held(rb, rb->run.size));
    const uint64_t missing = need - rbi_min(need, rbi_resize_bytes(rb));
    if (missing == 0)
        return REBATCH_OK;
    const rebatch_status status = rbi_memory_admit(rb, missing);
    if (status != REBATCH_OOM)
        return status;
    size_t available;
    (void)rbi_available(&available, rb);
    rb->run.failure = (struct rbi_failure){
        .phase = REBATCH_PHASE_ADMISSION, .need_bytes = need, .available_bytes = available};
    return REBATCH_OOM;
}

static rebatch_status run_attempt(rebatch *rb, const rebatch_microbatch *mb)
{
    rebatch_status status = rbi_resize_ready(rb);
    if (!status)
        status = rbi_guards_save(rb, REBATCH_GUARD_ATTEMPT);
    if (status)
        return status;
    rb->run.report.attempts++;
    rb->run.refusal = (struct rbi_refusal){0};
    return rbi_callback_run(rb, rb->run.samples_callback, mb);
}

/* One that the tuner records has buffers of its own, so that it sees all that the size needs. */
static rebatch_status try_samples(rebatch *rb, const rebatch_microbatch *mb)
{
    const bool is_recorded = rbi_learn_will_watch(rb, mb->count);
    rbi_resize_prepare(rb, is_recorded);
    rebatch_status status = admit(rb, mb->count);
    if (status)
        return status;
    rbi_learn_begin(rb, mb->count);
    status = run_attempt(rb, mb);
    if (rb->run.ops->resize && is_recorded)
        rbi_resize_release(rb);
    rbi_learn_end(rb, mb->count, status);
    return status;
}

/* No forward_backward ran, so there is nothing to run again. */
static rebatch_status refused(rebatch *rb, const struct progress *progress,
                              const rebatch_microbatch *mb)
{
    if (rb->run.failure.phase == REBATCH_PHASE_ADMISSION)
        rbi_learn_refused(rb, mb->count);
    return rbi_fallback_next(
        rb, &(struct rbi_interrupted){.mb = mb, .lost_ns = rbi_now_ns() - progress->attempt_ns});
}

/* The accumulators are as they were: only those samples run again. */
static rebatch_status redo_samples(rebatch *rb, const struct progress *progress,
                                   const rebatch_microbatch *mb)
{
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
static rebatch_status redo_batch(rebatch *rb, struct progress *progress,
                                 const rebatch_microbatch *mb)
{
    const size_t end = mb->first + mb->count;
    remember_failed(rb, 0, end);
    rebatch_status status = rbi_step_undo(rb);
    size_t available;
    (void)rbi_available(&available, rb);
    rb->run.failure.available_bytes = available;
    if (!status)
        status = rbi_fallback_next(
            rb, &(struct rbi_interrupted){
                    .mb = mb, .redone_samples = end, .lost_ns = rbi_now_ns() - progress->began_ns});
    if (!status)
        status = rbi_scope_open(rb, &rb->run.scope);
    if (!status)
        status = rbi_zero_grad_run(rb);
    rbi_thrashing_restart(rb);
    rb->run.report.learned = 0;
    const uint64_t now = rbi_now_ns();
    *progress = (struct progress){.began_ns = now, .attempt_ns = now};
    return status;
}

static rebatch_status handle_oom(rebatch *rb, struct progress *progress,
                                 const rebatch_microbatch *mb)
{
    rbi_assert(mb->count > 0 && rb->run.failure.phase != REBATCH_PHASE_UPDATE);
    switch (rb->run.failure.phase) {
    case REBATCH_PHASE_ADMISSION:
    case REBATCH_PHASE_RESIZE:
        return refused(rb, progress, mb);
    case REBATCH_PHASE_FORWARD:
    case REBATCH_PHASE_MAP:
        return redo_samples(rb, progress, mb);
    default:
        return redo_batch(rb, progress, mb);
    }
}

static void succeeded(rebatch *rb, struct progress *progress, const rebatch_microbatch *mb)
{
    rbi_assert(mb->first == progress->next && mb->count <= rb->run.batch - mb->first);
    progress->next += mb->count;
    progress->microbatches++;
    rb->run.ooms_in_row = 0;
    rbi_thrashing_end(rb, mb->count, rb->sizes.known[rb->sizes.known_last].bytes);
    rb->run.retried_same = false;
    if (rb->run.samples_callback == RBI_MAP)
        rbi_growth_step_done(rb, rb->run.batch);
}

static void cut(rebatch *rb, rebatch_microbatch *mb, size_t first)
{
    mb->first = first;
    mb->count = rbi_cut(rb, first);
    const size_t room = rb->run.by_cost ? rbi_resize_size(rb) : 0;
    if (room) /* after an OOM the budget may cut otherwise than buffers are made for */
        mb->count = rbi_min(mb->count, room);
    rbi_assert(mb->count > 0 && mb->count <= rb->run.batch - first);
    rb->run.size = rbi_size_of(rb, first, mb->count);
    mb->attempt = attempts_of(rb, first);
}

/* In lockstep: the size that this rank can run, then the one that all can. `own` is how it has
 * fared until now. */
static rebatch_status choose_together(rebatch *rb, struct progress *progress,
                                      rebatch_microbatch *mb, rebatch_status own)
{
    if (rb->lockstep.is_over)
        return own;
    rb->run.most = SIZE_MAX;
    while (!own) {
        cut(rb, mb, progress->next);
        rbi_resize_prepare(rb, false);
        own = admit(rb, mb->count);
        if (own != REBATCH_OOM)
            break;
        own = refused(rb, progress, mb);
    }
    return rbi_lockstep_choose(rb, own);
}

/* One micro-batch, or in lockstep, where none is left, the vote on whether all have accumulated. */
static rebatch_status try_next(rebatch *rb, struct progress *progress, rebatch_microbatch *mb)
{
    const bool is_in_lockstep = rbi_group_is_in_lockstep(rb);
    if (progress->next == rb->run.batch)
        return rbi_lockstep_finish(rb);
    cut(rb, mb, progress->next);
    if (!is_in_lockstep)
        return try_samples(rb, mb);
    rbi_lockstep_begin_attempt(rb);
    const rebatch_status status = rbi_lockstep_is_doomed(rb) ? REBATCH_OK : try_samples(rb, mb);
    return rbi_lockstep_end_attempt(rb, mb, status);
}

rebatch_status rbi_samples_run(rebatch *rb)
{
    const bool is_in_lockstep = rbi_group_is_in_lockstep(rb);
    const uint64_t now = rbi_now_ns();
    rbi_thrashing_restart(rb);
    struct progress progress = {.began_ns = now, .attempt_ns = now};
    rebatch_microbatch mb = {.step = rb->step,
                             .batch = rb->run.total,
                             .pool = rb->pool,
                             .stream = rb->options.stream,
                             .rank_batch = rb->run.batch};
    rbi_learn_begin_step(rb);
    rebatch_status status =
        is_in_lockstep ? choose_together(rb, &progress, &mb, REBATCH_OK) : REBATCH_OK;
    for (bool is_done = false; !status && !is_done;) {
        const size_t left = rb->run.batch - progress.next;
        if (left)
            rbi_learn_choose(rb, left);
        status = try_next(rb, &progress, &mb);
        if (status == REBATCH_OOM) {
            status = handle_oom(rb, &progress, &mb);
            rbi_thrashing_begin(rb);
            if (is_in_lockstep)
                status = choose_together(rb, &progress, &mb, status);
        } else if (status == REBATCH_OK) {
            if (left)
                succeeded(rb, &progress, &mb);
            is_done = progress.next == rb->run.batch && !(is_in_lockstep && left);
        } else if (is_in_lockstep) {
            status = choose_together(rb, &progress, &mb, status);
        }
        progress.attempt_ns = rbi_now_ns();
    }
    rbi_assert(status || (progress.next == rb->run.batch && progress.microbatches > 0));
    rb->run.report.microbatches = progress.microbatches;
    return status;
}

/* ---- the step ---- */

static rebatch_status read_ops(rebatch_step_ops *out, const rebatch_step_ops *given)
{
    *out = (rebatch_step_ops){.struct_size = sizeof *out};
    const rebatch_status status = rbi_options_copy(
        out, sizeof *out, RBI_SIZE_TO(rebatch_step_ops, cost), given, "rebatch_step_ops");
    if (status)
        return status;
    const char *missing = !out->zero_grad          ? "zero_grad"
                          : !out->forward_backward ? "forward_backward"
                          : !out->optimizer_step   ? "optimizer_step"
                                                   : NULL;
    if (missing)
        return rbi_error(REBATCH_E_INVALID, "ops.%s is NULL: expected a callback", missing);
    const uint32_t known = REBATCH_DECLARES_MUTATION | REBATCH_OWN_WEIGHTS | REBATCH_SCOPED_MEMORY;
    if (out->flags & ~known)
        return rbi_error(REBATCH_E_INVALID, "ops.flags is 0x%x: expected bits of 0x%x", out->flags,
                         known);
    return REBATCH_OK;
}

rebatch_status rbi_step_check(rebatch_step_ops *out, const rebatch *rb,
                              const rebatch_step_ops *given, size_t batch, const char *function)
{
    if (!rb || !given)
        return rbi_error(REBATCH_E_INVALID, "%s is NULL", rb ? "ops" : "rb");
    rebatch_status status = rbi_session_check_idle(rb, function);
    if (status)
        return status;
    if (batch == 0)
        return rbi_error(REBATCH_E_INVALID, "batch is 0: expected at least 1 sample");
    status = rbi_limits_check_batch(&rb->options, batch);
    if (!status)
        status = read_ops(out, given);
    if (!status && out->resize && !rbi_is_on(rb->options.reclaim))
        return rbi_error(REBATCH_E_INVALID, "ops.resize is set and reclaim is off: expected one "
                                            "without the other");
    if (!status && (out->flags & REBATCH_SCOPED_MEMORY) && !rbi_is_on(rb->options.reclaim))
        return rbi_error(REBATCH_E_INVALID, "ops.flags has REBATCH_SCOPED_MEMORY and reclaim is "
                                            "off: expected one without the other");
    return status;
}

void rbi_run_begin(rebatch *rb, const struct rbi_task *task)
{
    rbi_assert(task->batch > 0 && task->most > 0);
    rbi_assert(!rb->callback.is_running);
    rb->group.explained[0] = '\0';
    rb->buffers.is_new = false;
    rb->run = (struct rbi_run){.ops = task->ops,
                               .user = task->user,
                               .samples_callback = task->samples_callback,
                               .batch = task->batch,
                               .total = task->batch,
                               .most = task->most,
                               .by_cost = task->ops->cost != NULL,
                               .report.step = rb->step,
                               .live_before = rbi_pool_mark_peak(rb->pool),
                               .pool_ooms = rbi_pool_oom_count(rb->pool)};
    rbi_budget_begin(rb);
    rb->run.report.micro_before = rbi_micro_size(rb, task->batch);
    rb->run.report.cost_before = rbi_budget(rb);
    rbi_guards_watch_pressure(rb);
    const unsigned turn = rbi_residents_enter(rb->pool, rb->residents);
    if (turn != rb->residents || !rb->residents) /* else it has begun already */
        rb->outer.residents = turn;
    rb->outer.overflow |= rbi_pool_close_overflow(rb->pool);
}

void rbi_step_begin(rebatch *rb, const rebatch_step_ops *ops, size_t batch, void *user)
{
    const struct rbi_task task = {ops, user, batch, SIZE_MAX, RBI_FORWARD_BACKWARD};
    rbi_run_begin(rb, &task);
}

void rbi_step_is_probe(rebatch *rb)
{
    rb->run.is_probe = true;
}

/* What it says of itself can be read on; what holds outside of runs holds again. */
void rbi_step_end(rebatch *rb)
{
    rbi_assert(rb->run.ops && !rb->callback.is_running);
    rb->run.ops = NULL;
    rb->run.most = SIZE_MAX;
    rb->run.samples_callback = RBI_FORWARD_BACKWARD;
    rb->run.buffers_are_fixed = false;
    (void)rbi_residents_enter(rb->pool, rb->outer.residents);
    if (rb->outer.overflow)
        (void)rbi_pool_open_overflow(rb->pool);
    rb->outer.overflow = false;
    rbi_guards_unwatch_pressure(rb);
}

void rbi_step_get_oom(rebatch_oom_report *out, const rebatch *rb)
{
    if (rbi_pool_oom_count(rb->pool) != rb->run.pool_ooms)
        rbi_pool_last_own_oom(out, rb->pool);
}

/* Buffers that are there hold no call back, so a limit that was lowered is as an OOM in resize. */
static rebatch_status fit_buffers(rebatch *rb)
{
    const uint64_t excess = rbi_resize_excess(rb), held = rb->buffers.bytes;
    if (excess == 0)
        return REBATCH_OK;
    rb->run.failure = (struct rbi_failure){
        .phase = REBATCH_PHASE_RESIZE, .need_bytes = held, .available_bytes = held - excess};
    const rebatch_status status = rbi_fallback_next(rb, &(struct rbi_interrupted){.mb = NULL});
    rbi_resize_release(rb);
    return status;
}

/* A step that failed is a step that did not happen, as far as that is in our hands. */
static rebatch_status run(rebatch *rb)
{
    rebatch_status status = rbi_vote_begin(rb, REBATCH_OK);
    if (status)
        return status;
    rbi_lockstep_begin(rb);
    status = rbi_step_open_scope(rb);
    const bool is_open = !status;
    if (is_open)
        status = fit_buffers(rb);
    if (!status)
        status = rbi_zero_grad_run(rb);
    if (status && rbi_group_is_in_lockstep(rb))
        status = rbi_lockstep_choose(rb, status); /* the others are about to */
    if (!is_open)
        return rbi_update_settle(rb, status);
    if (!status)
        status = rbi_samples_run(rb);
    status = rbi_update_settle(rb, status);
    if (!status)
        status = rbi_update_run(rb);
    const uint64_t first_sequence =
        rb->run.scope ? rbi_scope_first_sequence(rb->pool, rb->run.scope) : 0;
    if (status && !rb->run.report.torn)
        (void)rbi_step_undo(rb);
    else
        rbi_scope_commit_all(rb->pool, rb->run.scope);
    rb->run.scope = 0;
    if (status && !rb->run.report.torn && rb->buffers.is_new)
        rbi_resize_release(rb);
    if (!status)
        rbi_leak_step_done(rb, first_sequence, !rb->buffers.is_new && !rb->run.report.learned);
    return status ? status : rbi_overflow_step_done(rb);
}

/* In lockstep a rank grows by its own memory, and all run what the least of them can. */
static void grow(rebatch *rb)
{
    if (rbi_group_is_in_lockstep(rb))
        rb->run.most = SIZE_MAX;
    rbi_growth_step_done(rb, rb->run.batch);
}

static void succeed(rebatch *rb)
{
    rbi_assert(!rb->run.report.torn && !rb->run.scope);
    rb->sizes.made_count = 0;
    rb->sizes.retry_row = rb->run.retries ? rb->sizes.retry_row + 1 : 0;
    if (rbi_thrashing_step_done(rb))
        rbi_learn_stop(rb); /* what was learned is of memory, not of time */
    else if (!rbi_learn_step_done(rb))
        grow(rb);
    rebatch_event event = {.kind = REBATCH_EVENT_STEP,
                           .batch = rb->run.batch,
                           .micro_before = rb->run.report.micro_before,
                           .micro_after = rbi_micro_size(rb, rb->run.batch),
                           .cost_before = rb->run.report.cost_before,
                           .cost_after = rbi_budget(rb),
                           .redone_samples = rb->run.report.redone_samples,
                           .lost_ns = rb->run.report.lost_ns,
                           .peak_bytes = rbi_memory_step_peak(rb)};
    rbi_event_emit(rb, &event);
    rb->step++;
}

void rbi_step_report(rebatch *rb, rebatch_status status)
{
    rebatch_step_report *report = &rb->run.report;
    report->status = status;
    report->micro = status ? 0 : rb->sizes.thrashing.most_samples;
    struct rbi_memory memory;
    rbi_memory_get(&memory, rb);
    report->peak_bytes = memory.step_peak_bytes;
    report->reserved_bytes = memory.reserved_bytes;
    report->micro_after = rbi_micro_size(rb, rb->run.batch);
    report->cost_after = rbi_budget(rb);
    report->lighten_level = rb->lighten;
    rbi_step_get_oom(&report->oom, rb);
}

void rbi_step_report_refused(rebatch_step_report *out, const rebatch *rb, rebatch_status status)
{
    if (out)
        *out = (rebatch_step_report){
            .step = rb ? rb->step : 0, .status = status, .lighten_level = rb ? rb->lighten : 0};
}

static rebatch_status check_group(const rebatch *rb, const rebatch_step_ops *ops)
{
    const bool is_in_lockstep = rbi_group_is_in_lockstep(rb);
    if (rbi_group_is_set(rb) && !ops->reduce && !is_in_lockstep)
        return rbi_error(REBATCH_E_INVALID, "ops.reduce is NULL: expected a callback with "
                                            "rebatch_options.group");
    if (is_in_lockstep && ops->cost)
        return rbi_error(REBATCH_E_INVALID, "ops.cost is set and lockstep is on: expected one, "
                                            "since the cost of the same samples differs by rank");
    return REBATCH_OK;
}

rebatch_status rebatch_step(rebatch *rb, const rebatch_step_ops *ops, size_t batch, void *user,
                            rebatch_step_report *report)
{
    if (report)
        *report = (rebatch_step_report){0};
    rebatch_step_ops own;
    rebatch_status status = rbi_step_check(&own, rb, ops, batch, "rebatch_step");
    if (!status)
        status = check_group(rb, &own);
    if (status && rb && !rb->run.ops)
        status = rbi_vote_begin(rb, status); /* the other ranks wait for this one */
    if (status) {
        rbi_step_report_refused(report, rb, status);
        return status;
    }
    if (rb->launch.user)
        rb->launch.step_begins(rb->launch.user, &own, batch, user);
    rbi_step_begin(rb, &own, batch, user);
    rbi_resize_begin_step(rb);
    rb->run.report.micro_before = rbi_micro_size(rb, batch);
    status = run(rb);
    if (status == REBATCH_OK)
        succeed(rb);
    rbi_step_report(rb, status);
    rbi_step_end(rb);
    if (rb->launch.user)
        rb->launch.step_ended(rb->launch.user, &rb->run.report);
    if (report)
        *report = rb->run.report;
    return status;
}
