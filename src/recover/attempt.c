/* Owns the running of one callback: its scope, the way out of it, and what an OOM in it was.
 * Must not know what is done about it. */
#include <inttypes.h>

#include "recover/recover.h"

/* ---- what callbacks call ---- */

bool rbi_callback_is_running(const rebatch *rb)
{
    return rb && rb->callback.is_running && pthread_equal(rb->callback.thread, pthread_self());
}

bool rbi_callback_includes_thread(const rebatch *rb)
{
    return rb->callback.is_running &&
           (!rbi_is_on(rb->options.reclaim) || rbi_callback_is_running(rb) ||
            rbi_pool_thread_has_joined(rb->pool));
}

bool rbi_callback_may_fail(const rebatch *rb)
{
    return !rb->run.ooms.retried_same && rb->run.ooms.batches_failed < RBI_INJECTED_BATCHES;
}

void rebatch_mutating(rebatch *rb)
{
    if (!rb)
        (void)rbi_error(REBATCH_E_INVALID, "rb is NULL");
    else if (!rb->callback.is_running)
        (void)rbi_error(REBATCH_E_STATE, "rebatch_mutating() was called outside a callback");
    else {
        rb->callback.has_mutated = true;
        if (rb->callback.is_updating)
            rbi_overflow_begin(rb);
    }
}

void rebatch_works_in_kept_memory(rebatch *rb, size_t new_bytes)
{
    if (!rb)
        (void)rbi_error(REBATCH_E_INVALID, "rb is NULL");
    else if (!rb->callback.is_running)
        (void)rbi_error(REBATCH_E_STATE,
                        "rebatch_works_in_kept_memory() was called outside a callback");
    else {
        rb->callback.needs_more = true;
        rbi_pool_drop_plan(rb->pool, new_bytes > 0);
        rb->leak.kept_bytes += new_bytes;
    }
}

bool rebatch_can_escape(const rebatch *rb)
{
    return rbi_callback_is_running(rb) && rb->callback.way_out &&
           rbi_pool_callback_depth() == rb->callback.pool_callbacks;
}

rebatch_status rebatch_escape(rebatch *rb, rebatch_status status)
{
    if (!rbi_callback_is_running(rb))
        return rbi_error(REBATCH_E_STATE,
                         "rebatch_escape() was called outside a callback, or in another thread");
    if (!rb->callback.way_out)
        return rbi_error(REBATCH_E_STATE, "rebatch_escape() was called in a block of "
                                          "rebatch_step_next(): expected REBATCH_STEP()");
    if (rbi_pool_callback_depth() != rb->callback.pool_callbacks)
        return rbi_error(REBATCH_E_STATE,
                         "rebatch_escape() was called within a callback of a pool: expected that "
                         "one to return");
    rb->callback.escape_status =
        status ? status
               : rbi_error(REBATCH_E_INVALID, "rebatch_escape() was called with REBATCH_OK");
    longjmp(*rb->callback.way_out, 1);
}

/* ---- scopes ---- */

/* The pool is told of the phase `key`; the callback's end ends it. */
static rebatch_status open_phase(rebatch *rb, rebatch_scope *out, uint64_t key)
{
    return rbi_scope_begin_phase(out, rb->pool, !rbi_is_on(rb->options.reclaim), key);
}

rebatch_status rbi_scope_open(rebatch *rb, rebatch_scope *out)
{
    return open_phase(rb, out, 0);
}

/* ---- who declares that it mutates ---- */

static void (*address_of(const rebatch *rb, enum rbi_callback which))(void)
{
    switch (which) {
    case RBI_ZERO_GRAD:
        return (void (*)(void))rb->run.ops->zero_grad;
    case RBI_FORWARD_BACKWARD:
    case RBI_MAP:
        return (void (*)(void))rb->run.ops->forward_backward;
    case RBI_OPTIMIZER:
        return (void (*)(void))rb->run.ops->optimizer_step;
    case RBI_RESIZE:
        return (void (*)(void))rb->run.ops->resize;
    case RBI_REDUCE:
        return (void (*)(void))rb->run.ops->reduce;
    default:
        return (void (*)(void))rb->run.ops->lighten;
    }
}

/* Whether it declares by a vote of all ranks (lockstep.c). */
static bool votes(const rebatch *rb, enum rbi_callback which)
{
    return which == RBI_FORWARD_BACKWARD && rbi_group_is_in_lockstep(rb);
}

/* A callback that does not declare is taken to change things from its first line. */
static bool declares(const rebatch *rb, enum rbi_callback which)
{
    return (rb->run.ops->flags & REBATCH_DECLARES_MUTATION) || votes(rb, which) ||
           rb->declares[which] == address_of(rb, which);
}

/* Host memory serves where the device has none: in an update that an OOM would tear, whatever else
 * could be made smaller. */
static bool host_serves(const rebatch *rb, size_t bytes)
{
    const bool is_torn = rb->callback.has_mutated || !declares(rb, RBI_OPTIMIZER);
    return rb->callback.is_updating && (is_torn ? rebatch_pool_overflow_room(rb->pool) >= bytes
                                                : rbi_overflow_serves(rb, bytes));
}

rebatch_status rebatch_reserve(rebatch *rb, size_t bytes)
{
    if (!rb)
        return rbi_error(REBATCH_E_INVALID, "rb is NULL");
    if (!rb->callback.is_running)
        return rbi_error(REBATCH_E_STATE, "rebatch_reserve() was called outside a callback");
    if (rbi_meter_is_set(rb))
        return rbi_memory_admit(rb, bytes);
    if (host_serves(rb, bytes) &&
        rbi_pool_admit(rb->pool, bytes, rb->options.stream) == REBATCH_OOM) {
        rbi_overflow_begin(rb);
        return REBATCH_OK;
    }
    return rebatch_pool_reserve(rb->pool, bytes, rb->options.stream);
}

/* A callback has succeeded that said it would declare, and never did in this session. It may have
 * changed things all the same, and an OOM then was handled wrong. That it changed nothing may be
 * true of an update, which can be skipped, and of a trial. */
bool rbi_callback_breaks_promise(const rebatch *rb, enum rbi_callback which)
{
    return (rb->run.ops->flags & REBATCH_DECLARES_MUTATION) && !rb->has_declared[which];
}

static rebatch_status check_promise(rebatch *rb, const struct rbi_call *call)
{
    if (call->which == RBI_FORWARD_BACKWARD && !call->mb->probing && !votes(rb, call->which) &&
        rbi_callback_breaks_promise(rb, call->which))
        return rbi_result_say_undeclared(rb, call);
    return REBATCH_OK;
}

static void warn_of_promise(rebatch *rb)
{
    if (rb->has_warned_of_promise || !rbi_callback_breaks_promise(rb, RBI_OPTIMIZER))
        return;
    rb->has_warned_of_promise = true;
    rebatch_event event = rbi_event_begin(rb, REBATCH_EVENT_UNDECLARED);
    rbi_event_end(&event, rb);
    rbi_event_emit(rb, &event);
}

/* Where the callback is before it has changed anything. */
static rebatch_phase first_phase_of(enum rbi_callback which)
{
    switch (which) {
    case RBI_FORWARD_BACKWARD:
        return REBATCH_PHASE_FORWARD;
    case RBI_OPTIMIZER:
        return REBATCH_PHASE_OPTIMIZER;
    case RBI_RESIZE:
        return REBATCH_PHASE_RESIZE;
    case RBI_MAP:
        return REBATCH_PHASE_MAP;
    case RBI_REDUCE:
        return REBATCH_PHASE_REDUCE;
    default:
        return REBATCH_PHASE_ZERO_GRAD;
    }
}

static rebatch_phase phase_of(const rebatch *rb, enum rbi_callback which)
{
    const rebatch_phase first = first_phase_of(which);
    if (!rb->callback.has_mutated && declares(rb, which))
        return first;
    return first == REBATCH_PHASE_FORWARD     ? REBATCH_PHASE_BACKWARD
           : first == REBATCH_PHASE_OPTIMIZER ? REBATCH_PHASE_UPDATE
                                              : first;
}

/* ---- running ---- */

static rebatch_status call_user(rebatch *rb, const struct rbi_call *call)
{
    rbi_assert(address_of(rb, call->which));
    rebatch_status status;
    switch (call->which) {
    case RBI_ZERO_GRAD:
        return rb->run.ops->zero_grad(rb->run.user);
    case RBI_FORWARD_BACKWARD:
        status = rb->run.ops->inputs ? rb->run.ops->inputs(call->mb, rb->run.user) : REBATCH_OK;
        return status ? status : rbi_captured_run(rb, call->mb);
    case RBI_MAP:
        return rb->run.ops->forward_backward(call->mb, rb->run.user);
    case RBI_OPTIMIZER:
        return rb->run.ops->optimizer_step(rb->run.user);
    case RBI_RESIZE:
        return rb->run.ops->resize(call->level, rb->run.user);
    case RBI_REDUCE:
        return rb->run.ops->reduce(rb->run.is_abandoned, rb->run.user);
    default:
        return rb->run.ops->lighten((unsigned)call->level, rb->run.user);
    }
}

/* Nothing here is changed between setjmp and longjmp, so nothing needs to be volatile. */
static rebatch_status call_with_way_out(rebatch *rb)
{
    jmp_buf way_out;
    rb->callback.way_out = &way_out;
    if (setjmp(way_out))
        return rb->callback.escape_status;
    return call_user(rb, &rb->callback.call);
}

static bool is_fatal(rebatch_status status)
{
    return status && status != REBATCH_OOM;
}

rebatch_status rbi_callback_wait(rebatch *rb)
{
    return rb->any_stream ? rbi_device_synchronize(rb->device)
                          : rebatch_stream_synchronize(rb->device, rb->options.stream);
}

/* An OOM is what it says only if the device is well: work that failed late surfaces now, and so
 * does an error that nobody looked at. */
static rebatch_status confirm_oom(rebatch *rb)
{
    const rebatch_status waited = rbi_callback_wait(rb);
    const rebatch_status stale = rbi_device_take_last_error(rb->device);
    return is_fatal(waited) ? waited : is_fatal(stale) ? stale : REBATCH_OOM;
}

/* A micro-batch needs its buffers too, and another size would have their memory; elsewhere they are
 * what they are. */
static void count_buffers(rebatch *rb)
{
    struct rbi_failure *failure = &rb->run.ooms.failure;
    const bool is_sized = failure->phase == REBATCH_PHASE_FORWARD ||
                          failure->phase == REBATCH_PHASE_BACKWARD ||
                          failure->phase == REBATCH_PHASE_MAP;
    size_t available = 0;
    (void)(is_sized ? rbi_available(&available, rb) : rbi_memory_available(&available, rb));
    failure->available_bytes = available;
    if (is_sized && failure->need_bytes)
        failure->need_bytes += rbi_resize_bytes(rb);
}

/* What a micro-batch needed, with the buffers of its size, and which blocks it leaves in use. Those
 * for a larger size tell nothing of its own. By cost sizes hardly ever repeat, and nothing is held
 * for one. */
static void learn_need(rebatch *rb)
{
    struct rbi_used used;
    const bool is_measured = rbi_meter_end(&used, rb);
    const size_t made_for = rb->run.by_cost ? rb->run.cut.most_cost / 2 : rb->buffers.size;
    const bool has_larger =
        rb->run.cut.size < made_for && rb->run.ops->resize && !rb->run.buffers_are_fixed;
    if (rb->run.progress.mb.first == 0)
        rb->run.ooms.first_live = used.live_before;
    if (rb->callback.needs_more)
        rbi_need_has_memory(rb, rb->run.cut.size);
    if (!is_measured || rb->callback.needs_more || has_larger)
        return;
    struct rbi_run_need run = {.peak_bytes = rbi_resize_bytes(rb) + used.peak_bytes};
    if (rb->sizes.learning.attempt == RBI_ATTEMPT_FRESH)
        run.reserved_bytes = used.reserved_bytes;
    if (used.keeps_blocks && !rb->run.by_cost && !rbi_meter_is_set(rb)) {
        run.kept_from = rb->run.use.first_sequence;
        run.kept_to = rbi_pool_allocations(rb->pool);
    }
    rbi_need_learn_run(rb, rb->run.cut.size, &run);
}

/* What an update needs that makes nothing to keep is what the next one will need too. */
static void learn_update(rebatch *rb)
{
    struct rbi_used used;
    if (rbi_meter_end(&used, rb) && !used.keeps_blocks)
        rb->update_bytes = used.peak_bytes;
}

/* The scope of a callback that succeeded becomes part of what lives; one that left a scope of its
 * own open fails, with all of them open still. */
static rebatch_status commit(rebatch *rb, const struct rbi_call *call)
{
    const rebatch_microbatch *const mb = call->mb;
    if (mb && (rb->run.ops->flags & REBATCH_SCOPED_MEMORY)) {
        rbi_assert(rbi_is_on(rb->options.reclaim)); /* rbi_step_check() has seen to it */
        const rebatch_status status = rb->any_stream ? rbi_callback_wait(rb) : REBATCH_OK;
        if (status)
            return status;
        rbi_guards_clear(rb, call->scope);
        rbi_scope_free_blocks(rb->pool, call->scope);
    }
    if (rbi_scope_commit_phase(&rb->run.use, rb->pool, call->scope))
        return rbi_error(REBATCH_E_STATE, "a callback returned with a scope of its own still open");
    if (mb && !mb->is_abandoned)
        learn_need(rb);
    if (call->which == RBI_OPTIMIZER)
        learn_update(rb);
    if (rb->callback.has_mutated && rb->run.ops != &rb->in_place.ops)
        rb->declares[call->which] = address_of(rb, call->which);
    return REBATCH_OK;
}

/* What a callback has failed with, as its scope shows while it is open. */
struct loss {
    rebatch_status status;
    rebatch_phase phase;
    bool is_told;     /* the callback has said why */
    bool pool_failed; /* a request of its own, which `oom` is about */
    rebatch_oom_report oom;
    bool is_measured;
    struct rbi_used used;
};

/* Ends the callback's phase, and waits for its work: nothing must be at work in what is taken back.
 * As long as the scope is open, OOMs of other threads are not counted. */
static struct loss classify(rebatch *rb, const struct rbi_call *call, rebatch_status status)
{
    struct loss loss = {.status = status, .phase = phase_of(rb, call->which)};
    rbi_assert(status != REBATCH_OK && !rb->callback.is_running);
    rbi_scope_end_phase(&rb->run.use, rb->pool, call->scope);
    loss.is_told =
        rbi_error_changes() != call->error_changes && rebatch_last_status() == REBATCH_OOM;
    if (status == REBATCH_OOM) {
        loss.status = confirm_oom(rb);
        if (loss.status != REBATCH_OOM)
            rbi_result_say(rb, call, loss.status, "returned REBATCH_OOM, and the device");
    } else if (rb->any_stream) {
        (void)rbi_callback_wait(rb);
    }
    loss.pool_failed = rbi_pool_oom_count(rb->pool) != call->pool_ooms;
    rbi_pool_last_own_oom(&loss.oom, rb->pool);
    loss.is_measured = rbi_meter_end(&loss.used, rb);
    return loss;
}

/* What the callback allocated is taken back, unless it was an update that had begun, for its
 * pointers may be in use. */
static void undo(rebatch *rb, const struct rbi_call *call, const struct loss *loss)
{
    rb->run.report.torn = loss->phase == REBATCH_PHASE_UPDATE;
    rbi_assert(!rb->run.report.torn || call->which == RBI_OPTIMIZER);
    if (rb->run.report.torn)
        rbi_scope_commit_all(rb->pool, call->scope);
    else
        (void)rbi_scope_undo(rb->pool, call->scope);
}

/* Fills in the run's failure, by what is available now that memory was taken back. */
static void note_failure(rebatch *rb, const struct loss *loss)
{
    struct rbi_failure *failure = &rb->run.ooms.failure;
    const struct rbi_used *used = loss->is_measured ? &loss->used : NULL;
    *failure = (struct rbi_failure){.phase = loss->phase,
                                    .is_unexplained = !loss->pool_failed && !loss->is_told &&
                                                      rbi_is_on(rb->options.reclaim)};
    if (loss->pool_failed) {
        const rebatch_oom_report *oom = &loss->oom;
        failure->is_injected = rb->launch.user && rb->launch.has_injected(rb->launch.user);
        failure->asked_bytes = oom->asked_bytes;
        const uint64_t before = used ? used->live_before : oom->live_bytes;
        const uint64_t first = rb->run.progress.mb.first ? rb->run.ooms.first_live : before;
        failure->left_bytes = before - rbi_min(before, first);
        failure->need_bytes =
            oom->asked_bytes + (oom->live_bytes > before ? oom->live_bytes - before : 0);
    } else { /* somebody beside the pool needs memory, so the cache must not keep it */
        failure->released_bytes = rbi_memory_release(rb);
    }
    if (used && used->asked_bytes) {
        failure->asked_bytes = used->asked_bytes;
        failure->need_bytes = used->asked_bytes + used->peak_bytes;
    }
    count_buffers(rb);
}

/* Ends a callback that failed. Gives what it has failed with. */
static rebatch_status give_up(rebatch *rb, const struct rbi_call *call, rebatch_status status)
{
    const struct loss loss = classify(rb, call, status);
    undo(rb, call, &loss);
    rbi_captured_drop(rb);
    if (loss.status == REBATCH_OOM && rb->run.ooms.failure.is_peers)
        rb->run.ooms.failure.available_bytes = 0; /* whatever is here, there it was not enough */
    else if (loss.status == REBATCH_OOM)
        note_failure(rb, &loss);
    else if (rb->run.report.torn)
        rbi_result_say_torn(rb, loss.status);
    return loss.status;
}

/* ---- its beginning and end ---- */

/* Opens the callback's scope, and a phase of the pool's plan with `key`; 0: none. */
static rebatch_status open_call(rebatch *rb, struct rbi_call *call, uint64_t key)
{
    call->error_changes = rbi_error_changes();
    const rebatch_status status = open_phase(rb, &call->scope, key);
    call->pool_ooms = rbi_pool_oom_count(rb->pool);
    return status;
}

/* The same of lighten and resize, which may change guarded state for good. */
static rebatch_status open_change(rebatch *rb, struct rbi_call *call)
{
    const rebatch_status status = open_call(rb, call, 0);
    if (!status)
        rbi_guards_begin_change(rb, RBI_CHANGE_CALLBACK);
    return status;
}

static void begin(rebatch *rb, const struct rbi_call *which)
{
    rbi_assert(rb->run.ops);
    rbi_assert(!rb->callback.is_running);
    rb->callback = (struct rbi_running){.call = *which,
                                        .is_updating = which->which == RBI_OPTIMIZER,
                                        .thread = pthread_self(),
                                        .pool_callbacks = rbi_pool_callback_depth()};
    rbi_meter_begin(rb, first_phase_of(which->which));
    if (rb->dry_step)
        rb->dry_step->callback_begins(rb->dry_step->user, which->which, which->mb);
    rb->group.explained[0] = '\0';
    rb->callback.is_running = true;
    if (rb->callback.is_updating && !declares(rb, RBI_OPTIMIZER))
        rbi_overflow_begin(rb);
}

/* Gives what the step goes by. */
static rebatch_status end(rebatch *rb, const struct rbi_call *which, rebatch_status result)
{
    rbi_assert(rb->callback.is_running);
    rb->callback.is_running = false;
    if (rb->callback.is_updating)
        rbi_overflow_end(rb);
    rb->callback.is_updating = false;
    if (!is_fatal(result))
        rb->group.explained[0] = '\0';
    rb->has_declared[which->which] |= rb->callback.has_mutated;
    if (rb->dry_step)
        rb->dry_step->callback_ended(rb->dry_step->user, result);
    return rbi_result_check(rb, which, result);
}

static rebatch_status run(rebatch *rb, const struct rbi_call *which)
{
    begin(rb, which);
    return end(rb, which, call_with_way_out(rb));
}

/* An OOM that the callback swallowed, or an error that it did not look at. */
static rebatch_status find_swallowed(const rebatch *rb, const struct rbi_call *which)
{
    const rebatch_status status = rbi_device_take_last_error(rb->device);
    if (is_fatal(status))
        rbi_result_say_left(rb, which, status);
    if (status == REBATCH_OOM && which->which == RBI_REDUCE)
        return rbi_error(REBATCH_E_STATE,
                         "step %" PRIu64 ": reduce returned REBATCH_OK and left an OOM in the "
                         "device's last error: expected REBATCH_OOM before its first collective",
                         rb->step);
    return status;
}

/* Calls of one callback repeat where size and level are the same. The last micro-batch of a batch
 * may be smaller, and does more: it puts the sums where the update finds them. */
static uint64_t key_of(const rebatch *rb, enum rbi_callback which, const rebatch_microbatch *mb)
{
    const uint64_t size = mb ? rb->run.cut.size : 0;
    const uint64_t is_last = mb && mb->first + mb->count == rb->run.batch;
    return ((size * RBI_CALLBACKS + (uint64_t)which) * 2 + is_last) * UINT64_C(0x9e3779b97f4a7c15) +
           rb->lighten + 1;
}

/* An allocation failed in a callback that succeeded: it copes, or it has not looked. */
static void warn_of_swallowed(rebatch *rb, enum rbi_callback which, const rebatch_microbatch *mb)
{
    rebatch_oom_report oom;
    rbi_pool_last_own_oom(&oom, rb->pool);
    rebatch_event event = rbi_event_begin(rb, REBATCH_EVENT_SWALLOWED);
    rbi_event_end(&event, rb);
    event.phase = phase_of(rb, which);
    event.first = mb ? mb->first : 0;
    event.count = mb ? mb->count : 0;
    event.asked_bytes = oom.asked_bytes;
    rbi_event_emit(rb, &event);
}

rebatch_status rbi_callback_begin(rebatch *rb, enum rbi_callback which,
                                  const rebatch_microbatch *mb)
{
    struct rbi_call call = {.which = which, .mb = mb};
    rbi_assert((mb != NULL) == (which == RBI_FORWARD_BACKWARD || which == RBI_MAP));
    rbi_assert(!mb || (mb->count > 0 && rb->run.cut.size > 0));
    const rebatch_status status = open_call(rb, &call, key_of(rb, which, mb));
    if (!status)
        begin(rb, &call);
    return status;
}

rebatch_status rbi_callback_call(rebatch *rb)
{
    rbi_assert(rb->callback.is_running);
    return call_with_way_out(rb);
}

rebatch_status rbi_callback_end(rebatch *rb, rebatch_status result)
{
    const struct rbi_call call = rb->callback.call;
    rebatch_status status = end(rb, &call, result);
    if (status == REBATCH_OK)
        status = find_swallowed(rb, &call);
    if (status == REBATCH_OK)
        status = check_promise(rb, &call);
    if (status == REBATCH_OK)
        status = commit(rb, &call);
    if (status)
        return give_up(rb, &call, status);
    if (rbi_pool_oom_count(rb->pool) != call.pool_ooms)
        warn_of_swallowed(rb, call.which, call.mb);
    if (call.which == RBI_OPTIMIZER) {
        rb->has_updated = true;
        warn_of_promise(rb);
    }
    return REBATCH_OK;
}

rebatch_status rbi_callback_run(rebatch *rb, enum rbi_callback which, const rebatch_microbatch *mb)
{
    const rebatch_status status = rbi_callback_begin(rb, which, mb);
    return status ? status : rbi_callback_end(rb, rbi_callback_call(rb));
}

/* ---- resize ---- */

/* Whose buffers they are. */
static uint64_t owner_of(const rebatch *rb)
{
    const uint64_t factor = UINT64_C(0x9e3779b97f4a7c15);
    return ((uint64_t)(uintptr_t)rb->run.ops->resize * factor ^ (uint64_t)(uintptr_t)rb->run.user) *
               factor |
           1;
}

rebatch_status rbi_callback_resize(rebatch *rb, size_t size)
{
    struct rbi_call call = {.which = RBI_RESIZE, .level = size};
    rbi_assert(size > 0 && rb->buffers.size == 0);
    rebatch_status status = open_change(rb, &call);
    if (status)
        return status;
    struct rbi_old_buffers old = {
        .owner = owner_of(rb), .is_guarded = rbi_guards_bring_back, .user = rb};
    rbi_old_buffers_begin(rb->pool, &old);
    status = run(rb, &call);
    if (status == REBATCH_OK)
        status = find_swallowed(rb, &call);
    if (status == REBATCH_OK && rbi_scope_commit_resident(rb->pool, call.scope))
        status = rbi_error(REBATCH_E_STATE, "resize returned with a scope of its own still open");
    if (status)
        status = give_up(rb, &call, status);
    rbi_old_buffers_end(rb->pool, &old, status != REBATCH_OK);
    rbi_guards_end_change(rb, RBI_CHANGE_CALLBACK, status == REBATCH_OK);
    return status;
}

/* ---- lighten ---- */

/* The level is in force, so all that it needs stays. */
static rebatch_status enter_level(rebatch *rb, const struct rbi_call *call)
{
    rbi_guards_end_change(rb, RBI_CHANGE_CALLBACK, true);
    rb->lighten = (unsigned)call->level;
    rbi_captured_drop(rb);
    rebatch_status status = rbi_scope_commit_finally(rb->pool, call->scope);
    if (status) {
        rbi_scope_commit_all(rb->pool, call->scope);
        status = rbi_error(REBATCH_E_STATE, "lighten returned with a scope of its own still open");
    }
    const rebatch_status left = find_swallowed(rb, call);
    return is_fatal(left) ? left : status;
}

rebatch_status rbi_callback_lighten(rebatch *rb, unsigned level)
{
    struct rbi_call call = {.which = RBI_LIGHTEN, .level = level};
    rbi_assert(level == rb->lighten + 1 || level + 1 == rb->lighten);
    const struct rbi_failure failure = rb->run.ooms.failure; /* of the callback before this one */
    rebatch_status status = open_change(rb, &call);
    if (status)
        return status;
    status = run(rb, &call);
    if (status == REBATCH_OK) {
        status = enter_level(rb, &call);
    } else {
        status = give_up(rb, &call, status);
        rbi_guards_end_change(rb, RBI_CHANGE_CALLBACK, false);
        if (status == REBATCH_E_UNSUPPORTED) /* what it tried is no callback's to answer for */
            (void)rbi_device_take_last_error(rb->device);
    }
    rb->run.ooms.failure = failure;
    return status;
}
