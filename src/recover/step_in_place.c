/* Owns steps that are written in place: the same parts as rebatch_step(), in the program's loop.
 * Must not know how samples are cut. */
#include <inttypes.h>

#include "rebatch/step_in_place.h"
#include "recover/recover.h"

/* What stands for the program's blocks where callbacks are asked for. */
static rebatch_status run_block(const rebatch_microbatch *mb, void *user)
{
    (void)mb;
    (void)user;
    return rbi_error(REBATCH_E_UNSUPPORTED,
                     "the step is written in place, so its blocks cannot be called: expected "
                     "rebatch_step() with callbacks for a check or a probe");
}

static rebatch_status run_update(void *user)
{
    return run_block(NULL, user);
}

/* Nobody has heard yet how the last step ended. */
static bool is_over(const rebatch *rb)
{
    return rb && rb->in_place.state == RBI_IN_PLACE_OVER;
}

static rebatch_status check(rebatch_step_ops *out, const rebatch *rb, const rebatch_step_ops *given,
                            size_t batch)
{
    static const rebatch_step_ops none = REBATCH_STEP_OPS_INIT;
    const bool is_open = rb && rb->run.ops == &rb->in_place.ops && !rb->callback.is_running;
    if (is_open || is_over(rb))
        return rbi_error(REBATCH_E_STATE, "rebatch_step_begin() was called before the last step "
                                          "had ended: expected rebatch_step_end()");
    const rebatch_status status =
        rbi_step_check_arguments(out, rb, given ? given : &none, batch, "rebatch_step_begin");
    if (status)
        return status;
    if (out->forward_backward)
        return rbi_error(REBATCH_E_INVALID, "ops.forward_backward is set: expected NULL, since the "
                                            "program runs what rebatch_step_next() gives it");
    if (out->inputs || (out->flags & REBATCH_STEP_CAPTURED))
        return rbi_error(REBATCH_E_UNSUPPORTED,
                         "ops has %s: expected rebatch_step() with callbacks for it",
                         out->inputs ? "inputs" : "REBATCH_STEP_CAPTURED");
    if (rb->options.lockstep == REBATCH_ON)
        return rbi_error(REBATCH_E_UNSUPPORTED,
                         "rebatch_step_begin() runs micro-batches of this rank's own, and lockstep "
                         "is on: expected rebatch_step() with callbacks");
    out->forward_backward = run_block;
    if (!out->optimizer_step)
        out->optimizer_step = run_update;
    return rbi_group_check_ops(rb, out);
}

/* The step is over with that status, which end() says again. */
static rebatch_status over(rebatch *rb, rebatch_status status)
{
    rb->in_place.state = RBI_IN_PLACE_OVER;
    rb->in_place.said = rbi_said_take(rb, status);
    rb->in_place.said.status = status;
    return status;
}

static rebatch_status close_step(rebatch *rb, rebatch_status status)
{
    return over(rb, rbi_step_close(rb, status));
}

/* Whether it is this thread's step, and in that state. */
static bool is_in(const rebatch *rb, enum rbi_in_place_state state)
{
    return rb && rb->in_place.state == state &&
           (!rb->callback.is_running || rbi_callback_is_running(rb));
}

/* All samples have run, and the update may be left to this call. */
static void finish(rebatch *rb)
{
    const bool is_of_program = rb->in_place.ops.optimizer_step == run_update;
    (void)close_step(rb, is_of_program ? REBATCH_OK : rbi_update_run(rb));
}

/* The program begins the next step, and has not asked how this one ended: well. */
static void end_by_next(rebatch *rb)
{
    if (is_in(rb, RBI_IN_PLACE_UPDATES) && !rb->callback.is_running)
        finish(rb);
    if (is_over(rb) && !rb->in_place.said.status)
        rb->in_place.state = RBI_IN_PLACE_NONE;
}

rebatch_status rebatch_step_begin(rebatch *rb, const rebatch_step_ops *ops, size_t batch,
                                  void *user)
{
    end_by_next(rb);
    rebatch_step_ops own;
    rebatch_status status = check(&own, rb, ops, batch);
    if (status && (!rb || rb->run.ops || is_over(rb)))
        return status; /* whatever runs goes on, and what end() is to say stays */
    status = status ? rbi_vote_begin(rb, status) : REBATCH_OK;
    if (status) {
        rbi_step_report_refused(&rb->run.report, rb, status);
        return over(rb, status);
    }
    rb->in_place = (struct rbi_in_place){.state = RBI_IN_PLACE_SAMPLES, .ops = own};
    rbi_step_open(rb, &rb->in_place.ops, batch, user);
    status = rbi_vote_begin(rb, REBATCH_OK);
    if (status)
        return close_step(rb, status);
    status = rbi_step_ready(rb);
    if (status)
        return close_step(rb, rbi_update_settle(rb, status));
    rbi_samples_begin(rb);
    return REBATCH_OK;
}

/* How the block has ended that runs, if one does: by rebatch_escape(), or as the program says. */
static rebatch_status result_of(const rebatch *rb, rebatch_status said)
{
    if (!rb->callback.is_running)
        return REBATCH_OK;
    return rb->callback.escape_status ? rb->callback.escape_status : said;
}

const rebatch_microbatch *rebatch_step_next(rebatch *rb, rebatch_status status)
{
    if (!is_in(rb, RBI_IN_PLACE_SAMPLES))
        return NULL;
    status = result_of(rb, status);
    if (rbi_samples_next(rb, &status))
        return &rb->run.progress.mb;
    status = rbi_update_settle(rb, status);
    rb->in_place.state = RBI_IN_PLACE_UPDATES;
    if (status)
        (void)close_step(rb, status);
    return NULL;
}

/* What the program has left out, or left, ends the step. */
static void fail(rebatch *rb, const char *what)
{
    rebatch_status status = rbi_error(REBATCH_E_STATE, "step %" PRIu64 ": %s", rb->step, what);
    if (is_in(rb, RBI_IN_PLACE_SAMPLES)) {
        if (rb->callback.is_running)
            (void)rbi_samples_next(rb, &status);
        (void)close_step(rb, rbi_update_settle(rb, status));
    } else if (is_in(rb, RBI_IN_PLACE_UPDATES)) {
        if (rb->callback.is_running)
            (void)rbi_update_next(rb, &status);
        (void)close_step(rb, status);
    }
}

void rebatch_step_leave(rebatch *rb)
{
    if (rb && rbi_callback_is_running(rb) && rb->run.ops == &rb->in_place.ops)
        fail(rb,
             "a block was left by break, return, goto or an exception: expected it to reach its "
             "end");
}

bool rebatch_step_updates(rebatch *rb, rebatch_status status)
{
    if (is_in(rb, RBI_IN_PLACE_SAMPLES))
        fail(rb, "the update came before all samples had run: expected rebatch_step_next() until "
                 "it returns NULL");
    if (!is_in(rb, RBI_IN_PLACE_UPDATES))
        return false;
    status = result_of(rb, status);
    if (rb->in_place.ops.optimizer_step != run_update)
        status = rbi_update_run(rb);
    else if (rbi_update_next(rb, &status))
        return true;
    (void)close_step(rb, status);
    return false;
}

void rebatch_escape_to(rebatch *rb, jmp_buf *way_out)
{
    if (rb && rbi_callback_is_running(rb) && rb->run.ops == &rb->in_place.ops)
        rb->callback.way_out = way_out;
}

rebatch_status rebatch_step_end(rebatch *rb, rebatch_step_report *report)
{
    if (report)
        *report = (rebatch_step_report){0};
    if (!rb)
        return rbi_error(REBATCH_E_INVALID, "rb is NULL");
    if (is_in(rb, RBI_IN_PLACE_SAMPLES) || rb->callback.is_running)
        fail(rb, "rebatch_step_end() came before the step was done: expected rebatch_step_next() "
                 "until it returns NULL, and rebatch_step_updates() until it is false");
    else if (is_in(rb, RBI_IN_PLACE_UPDATES))
        finish(rb);
    if (!is_over(rb))
        return rbi_error(REBATCH_E_STATE,
                         "rebatch_step_end() without a step: expected rebatch_step_begin()");
    rb->in_place.state = RBI_IN_PLACE_NONE;
    if (report)
        *report = rb->run.report;
    const rebatch_status status = rb->in_place.said.status;
    return status ? rbi_said_again(&rb->in_place.said, status) : REBATCH_OK;
}
