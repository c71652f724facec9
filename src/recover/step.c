/* Owns the step: the order of its parts, and what it checks and reports.
 * Must not know how samples are cut. */
#include <stdlib.h>

#include "rebatch/sharing.h"
#include "recover/recover.h"

static rebatch_status clear_nothing(void *user)
{
    (void)user;
    return REBATCH_OK;
}

static rebatch_status read_ops(rebatch_step_ops *out, const rebatch_step_ops *given)
{
    *out = (rebatch_step_ops){.struct_size = sizeof *out};
    const rebatch_status status = rbi_options_copy(
        out, sizeof *out, RBI_SIZE_TO(rebatch_step_ops, cost), given, "rebatch_step_ops");
    if (status)
        return status;
    if (!out->zero_grad)
        out->zero_grad = clear_nothing;
    const uint32_t known = REBATCH_DECLARES_MUTATION | REBATCH_OWN_WEIGHTS | REBATCH_SCOPED_MEMORY |
                           REBATCH_STEP_CAPTURED;
    if (out->flags & ~known)
        return rbi_error(REBATCH_E_INVALID, "ops.flags is 0x%x: expected bits of 0x%x", out->flags,
                         known);
    return REBATCH_OK;
}

rebatch_status rbi_step_check_arguments(rebatch_step_ops *out, const rebatch *rb,
                                        const rebatch_step_ops *given, size_t batch,
                                        const char *function)
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
    if (!status && (out->flags & REBATCH_STEP_CAPTURED) &&
        (!rb->options.stream || rb->options.lockstep == REBATCH_ON))
        return rbi_error(REBATCH_E_INVALID,
                         "ops.flags has REBATCH_STEP_CAPTURED and %s: expected a stream of the "
                         "session's own, and no lockstep",
                         rb->options.stream ? "lockstep is on" : "options.stream is NULL");
    return status;
}

rebatch_status rbi_step_check(rebatch_step_ops *out, const rebatch *rb,
                              const rebatch_step_ops *given, size_t batch, const char *function)
{
    const rebatch_status status = rbi_step_check_arguments(out, rb, given, batch, function);
    if (status)
        return status;
    const char *missing = !out->forward_backward ? "forward_backward"
                          : !out->optimizer_step ? "optimizer_step"
                                                 : NULL;
    return missing ? rbi_error(REBATCH_E_INVALID, "ops.%s is NULL: expected a callback", missing)
                   : REBATCH_OK;
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
                               .pool_ooms = rbi_pool_oom_count(rb->pool),
                               .began_ns = rbi_now_ns()};
    rbi_parts_begin(rb);
    rbi_budget_begin(rb);
    rb->run.report.micro_before = rbi_micro_size(rb, task->batch);
    rb->run.report.cost_before = rbi_budget(rb);
    rbi_guards_watch_pressure(rb);
    const unsigned turn = rbi_residents_enter(rb->pool, rb->residents);
    if (turn != rb->residents || !rb->residents) /* else it has begun already */
        rb->outer.residents = turn;
    rb->outer.overflow |= rbi_pool_close_overflow(rb->pool);
    rbi_asked_turn(rb, RBI_TURN_BEGINS);
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
    rbi_asked_turn(rb, RBI_TURN_ENDS);
    rb->run.ops = NULL;
    rb->captured.is_on = false;
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
    rb->run.ooms.failure = (struct rbi_failure){
        .phase = REBATCH_PHASE_RESIZE, .need_bytes = held, .available_bytes = held - excess};
    const rebatch_status status = rbi_fallback_next(rb, &(struct rbi_interrupted){.mb = NULL});
    rbi_resize_release(rb);
    return status;
}

void rbi_step_open(rebatch *rb, const rebatch_step_ops *ops, size_t batch, void *user)
{
    if (rb->launch.user)
        rb->launch.step_begins(rb->launch.user, ops, batch, user);
    rbi_step_begin(rb, ops, batch, user);
    rbi_captured_begin_step(rb);
    rbi_resize_begin_step(rb);
    rb->run.report.micro_before = rbi_micro_size(rb, batch);
}

rebatch_status rbi_step_ready(rebatch *rb)
{
    rebatch_status status = rbi_step_open_scope(rb);
    rb->run.is_open = !status;
    if (!status)
        status = fit_buffers(rb);
    return status ? status : rbi_zero_grad_run(rb);
}

/* `own` is how the step has begun here. Where other ranks take part in each micro-batch, they hear
 * of it. */
static rebatch_status run_samples(rebatch *rb, rebatch_status own)
{
    if (rbi_group_is_in_lockstep(rb))
        return rbi_lockstep_samples_run(rb, own);
    return own ? own : rbi_samples_run(rb);
}

static rebatch_status run(rebatch *rb)
{
    rebatch_status status = rbi_vote_begin(rb, REBATCH_OK);
    if (status)
        return status;
    status = rbi_update_settle(rb, run_samples(rb, rbi_step_ready(rb)));
    return status ? status : rbi_update_run(rb);
}

/* A step that failed is a step that did not happen, as far as that is in our hands. */
static rebatch_status keep_or_undo(rebatch *rb, rebatch_status status)
{
    if (!rb->run.is_open)
        return status;
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

static int compare_ns(const void *a, const void *b)
{
    const uint64_t first = *(const uint64_t *)a, second = *(const uint64_t *)b;
    return (first > second) - (first < second);
}

/* Of the steps of so many samples that had no OOM; 0: there was none. */
static uint64_t median_ns(const struct rbi_clean_steps *steps, size_t batch)
{
    if (steps->batch != batch || steps->count == 0)
        return 0;
    struct rbi_clean_steps sorted = *steps;
    const unsigned count = steps->count < RBI_CLEAN_STEPS ? steps->count : RBI_CLEAN_STEPS;
    qsort(sorted.ns, count, sizeof *sorted.ns, compare_ns);
    return sorted.ns[(count - 1) / 2];
}

/* What an OOM has cost is the step's time beyond that of a step without one, where that is known.
 * It is more than the attempts that failed: memory that is mapped again, and a GPU that waits. */
static void count_lost_time(rebatch *rb)
{
    struct rbi_clean_steps *clean = &rb->clean_steps;
    const uint64_t ns = rbi_now_ns() - rb->run.began_ns;
    if (rb->run.report.ooms) {
        const uint64_t usual = median_ns(clean, rb->run.batch);
        if (usual && ns > usual)
            rb->run.report.lost_ns = ns - usual;
        return;
    }
    if (clean->batch != rb->run.batch)
        *clean = (struct rbi_clean_steps){.batch = rb->run.batch};
    clean->ns[clean->count++ % RBI_CLEAN_STEPS] = ns;
}

static void succeed(rebatch *rb)
{
    rbi_assert(!rb->run.report.torn && !rb->run.scope);
    count_lost_time(rb);
    rb->sizes.made_count = 0;
    rb->sizes.retry_row = rb->run.ooms.retries ? rb->sizes.retry_row + 1 : 0;
    if (rbi_thrashing_step_done(rb))
        rbi_learn_stop(rb); /* what was learned is of memory, not of time */
    else if (!rbi_learn_step_done(rb)) {
        rb->run.most = SIZE_MAX; /* another rank's memory bounds the step, not the growth */
        rbi_parts_begin(rb);
        rbi_growth_step_done(rb);
    }
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

/* An average over time whose weights fall to 1/e in a minute, as avg60 of Linux's pressure stall
 * information. */
static void count_short(rebatch *rb)
{
    const double seconds = (double)(rbi_now_ns() - rb->run.began_ns) / 1e9;
    const double is_short = rb->sizes.by_memory && rbi_size_is_cut(rb) ? 1 : 0;
    rb->short_share += seconds / (60 + seconds) * (is_short - rb->short_share);
}

double rebatch_short_of_memory(const rebatch *rb)
{
    return rb ? rb->short_share : 0;
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

rebatch_status rbi_step_close(rebatch *rb, rebatch_status status)
{
    status = keep_or_undo(rb, status);
    count_short(rb);
    if (status == REBATCH_OK)
        succeed(rb);
    rbi_step_report(rb, status);
    rbi_step_end(rb);
    if (rb->launch.user)
        rb->launch.step_ended(rb->launch.user, &rb->run.report);
    return status;
}

rebatch_status rebatch_step(rebatch *rb, const rebatch_step_ops *ops, size_t batch, void *user,
                            rebatch_step_report *report)
{
    if (report)
        *report = (rebatch_step_report){0};
    rebatch_step_ops own;
    rebatch_status status = rbi_step_check(&own, rb, ops, batch, "rebatch_step");
    if (!status)
        status = rbi_group_check_ops(rb, &own);
    if (status && rb && !rb->run.ops)
        status = rbi_vote_begin(rb, status); /* the other ranks wait for this one */
    if (status) {
        rbi_step_report_refused(report, rb, status);
        return status;
    }
    rbi_step_open(rb, &own, batch, user);
    status = rbi_step_close(rb, run(rb));
    if (report)
        *report = rb->run.report;
    return status;
}
