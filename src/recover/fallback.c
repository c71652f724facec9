/* Owns the fallback stages after an OOM: once more, smaller, lighter, nothing left.
 * Must not know how callbacks run, nor how much smaller. */
#include <inttypes.h>
#include <string.h>

#include "recover/recover.h"

static bool has_too_many_in_row(const rebatch *rb)
{
    return rb->options.max_ooms_in_row && rb->run.ooms.in_row >= rb->options.max_ooms_in_row;
}

static bool has_given_up(const rebatch *rb)
{
    return rb->run.ooms.wasted >= rb->options.max_attempts || has_too_many_in_row(rb) ||
           rb->run.ooms.is_refused_again;
}

/* After MOST_RETRIES micro-batches of a step, or MOST_RETRY_ROW steps in a row, that needed "once
 * more", the size is just too large for how memory lies. */
#define MOST_RETRIES 2
#define MOST_RETRY_ROW 2

/* "Once more" is worth it when what failed would fit now: something was released since, or the
 * memory was there all along, in the wrong place or the wrong hands. */
static bool can_retry_same(const rebatch *rb, const rebatch_microbatch *mb)
{
    const struct rbi_failure *failure = &rb->run.ooms.failure;
    if (rb->run.ooms.retried_same || failure->phase == REBATCH_PHASE_ADMISSION)
        return false;
    const bool can_shrink = mb && rbi_size_can_shrink(rb, mb->count);
    if (can_shrink && (rbi_learn_goes_by_meter(rb) || rb->sizes.growth.previous))
        return false; /* nothing was in the way, or the size before the growth is known to fit */
    if (can_shrink && (failure->is_injected || rb->run.ooms.retries >= MOST_RETRIES ||
                       rb->sizes.retry_row >= MOST_RETRY_ROW))
        return false; /* with a full device a smaller micro-batch would be next */
    return failure->need_bytes ? failure->need_bytes <= failure->available_bytes
                               : failure->released_bytes > 0;
}

/* The samples that are to become fewer; 0: no matter how few, it does not help. Smaller buffers
 * leave more to a micro-batch that does not fill them, and outside of forward_backward. Admission
 * has counted their memory as free. */
static size_t samples_of(const rebatch *rb, const rebatch_microbatch *mb)
{
    if (rb->run.ooms.failure.phase == REBATCH_PHASE_ADMISSION)
        return mb->count;
    return rbi_max(mb ? mb->count : 0, rbi_resize_size(rb));
}

/* The same by cost: what the buffers in force were made for. */
static size_t cost_to_lower(const rebatch *rb)
{
    return rb->run.ooms.failure.phase == REBATCH_PHASE_ADMISSION
               ? rb->run.cut.size
               : rbi_max(rb->run.cut.size, rb->run.cut.most_cost);
}

static bool shrink(rebatch *rb, const rebatch_microbatch *mb)
{
    rbi_cut_survey(rb); /* the step may not have come to it */
    const size_t count = samples_of(rb, mb);
    if (!count || rb->options.on_oom == REBATCH_ON_OOM_STOP || !rbi_size_can_shrink(rb, count))
        return false;
    const bool is_sized = mb || rb->run.ooms.failure.phase == REBATCH_PHASE_RESIZE;
    rbi_size_set(rb, rbi_next_size(rb, is_sized ? RBI_AFTER_OOM : RBI_AFTER_OOM_ELSEWHERE,
                                   rb->run.by_cost ? cost_to_lower(rb) : count));
    return true;
}

/* Sets *is_lighter when there is a lighter level and it is in force. Gives what the callback
 * returned, unless that only says that there is none. */
static rebatch_status lighten(rebatch *rb, bool *is_lighter)
{
    *is_lighter = false;
    if (!rb->run.ops->lighten || !rbi_is_on(rb->options.lighten) ||
        rb->options.on_oom == REBATCH_ON_OOM_STOP)
        return REBATCH_OK;
    const rebatch_status status = rbi_callback_lighten(rb, rb->lighten + 1);
    *is_lighter = status == REBATCH_OK;
    rbi_assert(!*is_lighter || rb->lighten > 0);
    return status == REBATCH_OOM || status == REBATCH_E_UNSUPPORTED ? REBATCH_OK : status;
}

/* The last resort, where nothing smaller or lighter is left: shares of options.oom_wait_ms that
 * pass before each try. */
static const uint32_t wait_permille[] = {0, 50, 150, 300, 500};
#define MOST_LAST_TRIES (sizeof wait_permille / sizeof *wait_permille)

/* How many of these tries are worth it. All of them, where what is missing is no more than others
 * hold, who may give it back; one, at once, where nobody knows what was missing. */
static size_t worthy_tries(const rebatch *rb)
{
    const struct rbi_failure *failure = &rb->run.ooms.failure;
    if (failure->is_unexplained || failure->is_injected || rb->dry_step ||
        rb->options.on_oom == REBATCH_ON_OOM_STOP)
        return 0;
    if (!failure->need_bytes)
        return 1;
    const uint64_t missing =
        failure->need_bytes - rbi_min(failure->need_bytes, failure->available_bytes);
    const uint64_t outside = rbi_memory_outside(rb);
    return outside && missing <= outside ? MOST_LAST_TRIES : 0;
}

static bool try_last(rebatch *rb)
{
    struct rbi_run_ooms *ooms = &rb->run.ooms;
    if (ooms->last_tries >= worthy_tries(rb))
        return false;
    uint64_t most_ms = rb->options.oom_wait_ms;
    if (rb->group.table.size) /* the others wait for this rank */
        most_ms = rbi_min(most_ms, (rb->group.timeout_ms - 1) / 4);
    ooms->wait_ms = (uint32_t)(most_ms * wait_permille[ooms->last_tries] / 1000);
    ooms->last_tries++;
    ooms->retried_same = true;
    return true;
}

/* What is cached goes back to the device: it may be in pieces, and is whole again there. */
static void prepare_retry(rebatch *rb)
{
    const uint64_t began = rbi_now_ns();
    (void)rbi_memory_release(rb);
    if (rb->run.ooms.wait_ms)
        rbi_sleep_ms(rb->run.ooms.wait_ms);
    rb->run.ooms.wait_ms = 0;
    rb->run.report.lost_ns += rbi_now_ns() - began;
}

/* Chooses the stage. Gives what lighten returned when that ends the step. */
static rebatch_status choose_stage(rebatch *rb, const rebatch_microbatch *mb,
                                   rebatch_event_kind *kind)
{
    *kind = REBATCH_EVENT_TORN;
    if (rb->run.ooms.failure.phase == REBATCH_PHASE_UPDATE)
        return REBATCH_OK;
    *kind = REBATCH_EVENT_EXHAUSTED;
    if (has_given_up(rb))
        return REBATCH_OK;
    if (can_retry_same(rb, mb)) {
        rb->run.ooms.retried_same = true;
        rb->run.ooms.retries++;
        *kind = REBATCH_EVENT_RETRY;
        return REBATCH_OK;
    }
    rb->run.ooms.retried_same = false;
    if (shrink(rb, mb)) {
        *kind = REBATCH_EVENT_SHRINK;
        return REBATCH_OK;
    }
    bool is_lighter;
    const rebatch_status status = lighten(rb, &is_lighter);
    if (is_lighter)
        *kind = REBATCH_EVENT_LIGHTEN;
    else if (!status && (rbi_asked_lift(rb) || try_last(rb)))
        *kind = REBATCH_EVENT_RETRY;
    return status;
}

/* ---- saying it ---- */

/* Whether it would fit but for what the micro-batches before it have left. That counts as available
 * where the whole batch was taken back. */
static bool is_left_too_much(const struct rbi_failure *failure)
{
    const uint64_t left = failure->phase == REBATCH_PHASE_BACKWARD ? 0 : failure->left_bytes;
    const uint64_t beyond = failure->need_bytes - rbi_min(failure->need_bytes, left);
    return failure->left_bytes && beyond <= failure->available_bytes;
}

static void add_reason(struct rbi_text *t, const rebatch *rb, const rebatch_microbatch *mb)
{
    const size_t smallest = rbi_round_size_up(&rb->options, 1);
    const uint32_t refused = rb->run.report.ooms_in[REBATCH_PHASE_ADMISSION];
    const struct rbi_failure *const failure = &rb->run.ooms.failure;
    if (is_left_too_much(failure) && !rbi_leak_is_likely(rb)) {
        rbi_text_add(t, "; the micro-batches before it in the %s had left ",
                     rb->run.samples_callback == RBI_MAP ? "map" : "step");
        rbi_text_add_bytes(t, failure->left_bytes);
        rbi_text_add(t, " allocated: free what is not needed");
    } else if (rb->run.ooms.wasted >= rb->options.max_attempts) {
        rbi_text_add(t, "; gave up after %u failed attempts in one step", rb->run.ooms.wasted);
        if (refused)
            rbi_text_add(t, " (%u of them not started)", refused);
        rbi_text_add(t, ": raise max_attempts");
    } else if (rb->run.ooms.is_refused_again) {
        rbi_text_add(t, "; the same size was refused twice in a row with the same memory: free "
                        "memory, or raise the limit");
    } else if (has_too_many_in_row(rb)) {
        rbi_text_add(t, "; gave up after %u in a row: raise max_ooms_in_row", rb->run.ooms.in_row);
    } else if (rb->options.on_oom == REBATCH_ON_OOM_STOP) {
        rbi_text_add(t, "; on_oom says stop");
    } else if (mb && smallest > 1) {
        rbi_text_add(t, "; the smallest micro-batch allowed is %zu: lower it", smallest);
    } else if (rb->run.ooms.failure.is_unexplained) {
        rbi_text_add(t,
                     "; REBATCH_OOM, which is %d, was returned, but no allocation is known to have "
                     "failed: return another status for another failure",
                     (int)REBATCH_OOM);
    } else if (!rbi_leak_is_likely(rb)) {
        rbi_text_add(t, "; there is nothing smaller or lighter to try: free memory, or raise the "
                        "limit");
    }
}

/* What memory there is for the pool, and how much of it the step found in use. */
static void add_bound(struct rbi_text *t, const rebatch *rb)
{
    const char *const what = rb->run.samples_callback == RBI_MAP ? "map" : "step";
    struct rbi_pool_bound bound = {.is_limit = false};
    if (rbi_meter_is_set(rb) && !rb->run.meter.has_begun)
        return; /* no callback has run, so nothing was measured */
    rbi_text_add(t, "; ");
    if (!rbi_meter_is_set(rb) && rbi_pool_get_bound(&bound, rb->pool) == REBATCH_OK) {
        rbi_text_add(t, "%s", bound.is_limit ? "limit " : "the device has ");
        rbi_text_add_bytes(t, bound.bytes);
        /* More than that: it was lowered since, or the host has some of it. */
        rbi_text_add(t, "%s", bound.bytes < rb->run.live_before ? ", but " : ", of which ");
    }
    rbi_text_add_bytes(t, rb->run.live_before);
    rbi_text_add(t, " were in use before the %s", what);
    if (bound.is_limit || !bound.outside_bytes)
        return;
    rbi_text_add(t, " and ");
    rbi_text_add_bytes(t, bound.outside_bytes);
    rbi_text_add(t, " are outside the pool");
}

static void add_growth(struct rbi_text *t, const rebatch *rb)
{
    if (!rbi_leak_is_likely(rb))
        return;
    rbi_text_add(t, "; ");
    rbi_leak_add(t, rb);
    rbi_text_add(t, ": free what is not needed");
}

/* Whether it is a map's, and its phase does not say so. */
static bool is_of_map(const rebatch *rb)
{
    return rb->run.samples_callback == RBI_MAP && rb->run.ooms.failure.phase != REBATCH_PHASE_MAP;
}

/* "forward_backward of 2 samples, before accumulating" */
static void add_phase(struct rbi_text *t, const rebatch *rb, const rebatch_microbatch *mb)
{
    const char *const text = rbi_phase_text(rb->run.ooms.failure.phase);
    const size_t callback = strcspn(text, ",");
    rbi_text_add(t, "%.*s", (int)callback, text);
    if (mb)
        rbi_text_add(t, " of %zu sample%s", mb->count, mb->count == 1 ? "" : "s");
    rbi_text_add(t, "%s%s", text + callback, is_of_map(rb) ? " of a map" : "");
}

static rebatch_status say_exhausted(const rebatch *rb, const rebatch_microbatch *mb)
{
    const struct rbi_failure *failure = &rb->run.ooms.failure;
    char text[512];
    struct rbi_text t = {text, sizeof text, 0};
    rbi_text_add(&t, "step %" PRIu64 ": out of memory in ", rb->step);
    add_phase(&t, rb, mb);
    if (failure->need_bytes) {
        rbi_text_add(&t, ", which");
        rbi_text_add_need(&t, "needs", failure->need_bytes, failure->available_bytes);
    }
    if (failure->available_bytes != SIZE_MAX) { /* which is not known */
        rbi_text_add(&t, ", with ");
        rbi_text_add_available(&t, failure->need_bytes, failure->available_bytes);
        rbi_text_add(&t, " available");
    }
    rbi_text_add(&t, "%s", failure->is_injected ? " (the failure is injected)" : "");
    add_bound(&t, rb);
    add_reason(&t, rb, mb);
    add_growth(&t, rb);
    return rbi_error(REBATCH_E_EXHAUSTED, "%s", text);
}

static rebatch_status say_torn(const rebatch *rb)
{
    rbi_assert(rb->run.report.torn);
    return rbi_error(
        REBATCH_E_TORN, "step %" PRIu64 ": out of memory in optimizer_step%s", rb->step,
        rb->callback.has_mutated ? " after it began to change parameters: some are new, some old; "
                                   "restore a checkpoint, and reserve before rebatch_mutating()"
                                 : ", which does not declare when it changes parameters: some may "
                                   "be new, some old; restore a checkpoint, and declare it "
                                   "(REBATCH_DECLARES_MUTATION)");
}

/* Whether an attempt was refused like the one before it: what was chosen after that changed
 * nothing, so it would go on for ever. */
static void note_refusal(rebatch *rb)
{
    struct rbi_run_ooms *ooms = &rb->run.ooms;
    const struct rbi_refusal now = {
        ooms->failure.phase == REBATCH_PHASE_ADMISSION ? rb->run.cut.size : 0, rb->lighten,
        ooms->failure.available_bytes};
    const struct rbi_refusal *last = &ooms->refusal;
    ooms->is_refused_again = now.size && now.size == last->size && now.lighten == last->lighten &&
                             now.available_bytes == last->available_bytes;
    ooms->refusal = now;
}

/* Failures on purpose are as many as somebody asks for. Whoever asks sees to it that the step ends;
 * a check asks for all of them, and counts on the bounds. */
static bool is_exempt(const rebatch *rb)
{
    return rb->run.ooms.failure.is_injected && !rb->dry_step;
}

static void count(rebatch *rb, const struct rbi_interrupted *interrupted)
{
    struct rbi_run_ooms *ooms = &rb->run.ooms;
    note_refusal(rb);
    rbi_assert(ooms->failure.phase < REBATCH_PHASE_COUNT);
    rb->run.report.ooms++;
    rb->run.report.ooms_in[ooms->failure.phase]++;
    rb->run.report.lost_ns += interrupted->lost_ns;
    ooms->batches_failed +=
        ooms->failure.is_injected && ooms->failure.phase == REBATCH_PHASE_BACKWARD;
    ooms->wasted += !is_exempt(rb);
    ooms->in_row += ooms->failure.phase != REBATCH_PHASE_ADMISSION && !is_exempt(rb);
    if (interrupted->mb && ooms->failure.phase != REBATCH_PHASE_ADMISSION)
        rbi_need_learn_least(rb, rb->run.cut.size, ooms->failure.need_bytes);
}

/* Another rank's OOM: that one chooses what is next. */
static rebatch_status follow(rebatch *rb, const struct rbi_interrupted *interrupted)
{
    rb->run.ooms.failure.is_peers = false; /* as far as it is handled here */
    rb->run.report.redone_samples += interrupted->redone_samples;
    rb->run.report.lost_ns += interrupted->lost_ns;
    return REBATCH_OK;
}

rebatch_status rbi_fallback_next(rebatch *rb, const struct rbi_interrupted *interrupted)
{
    rbi_assert(rb->run.ops && !rb->callback.is_running);
    const struct rbi_failure *failure = &rb->run.ooms.failure;
    if (failure->is_peers)
        return follow(rb, interrupted);
    const rebatch_microbatch *mb = interrupted->mb;
    rebatch_event event = {.phase = failure->phase,
                           .attempt = mb ? mb->attempt : 0,
                           .first = mb ? mb->first : 0,
                           .count = mb ? mb->count : 0,
                           .batch = rb->run.batch,
                           .micro_before = rbi_micro_size(rb, rb->run.batch),
                           .cost = mb && rb->run.by_cost ? rb->run.cut.size : 0,
                           .cost_before = rbi_budget(rb),
                           .lighten_before = rb->lighten,
                           .lost_ns = interrupted->lost_ns,
                           .asked_bytes = failure->asked_bytes,
                           .needed_bytes = failure->need_bytes,
                           .available_bytes = failure->available_bytes,
                           .is_unexplained = failure->is_unexplained,
                           .is_injected = failure->is_injected};
    count(rb, interrupted);
    rbi_growth_set_back(rb, failure->available_bytes);
    const rebatch_status status = choose_stage(rb, mb, &event.kind);
    if (status)
        return status;
    const bool goes_on = event.kind != REBATCH_EVENT_TORN && event.kind != REBATCH_EVENT_EXHAUSTED;
    event.micro_after = rbi_micro_size(rb, rb->run.batch);
    event.cost_after = rbi_budget(rb);
    event.lighten_after = rb->lighten;
    char wait[32] = "";
    if (rb->run.ooms.wait_ms)
        rbi_text_add(&(struct rbi_text){wait, sizeof wait, 0}, "(%" PRIu32 " ms to wait)",
                     rb->run.ooms.wait_ms);
    event.text = *wait                                      ? wait
                 : is_of_map(rb)                            ? "(in map)"
                 : !goes_on && rbi_group_is_in_lockstep(rb) ? "(in lockstep)"
                                                            : NULL;
    event.redone_samples = goes_on ? interrupted->redone_samples : 0;
    rb->run.report.redone_samples += event.redone_samples;
    rbi_event_emit(rb, &event);
    if (event.kind == REBATCH_EVENT_RETRY)
        prepare_retry(rb);
    if (goes_on)
        return REBATCH_OK;
    return event.kind == REBATCH_EVENT_TORN ? say_torn(rb) : say_exhausted(rb, mb);
}
