/* Owns when the micro-batch grows again, or a lighter level is left.
 * Must not know to which size, nor what a step does. */
#include "recover/recover.h"

void rbi_growth_set_back(rebatch *rb, uint64_t available_bytes)
{
    struct rbi_growth *growth = &rb->sizes.growth;
    growth->clean = 0;
    if (!growth->on_trial)
        return;
    growth->on_trial = false;
    if (!growth->is_of_level)
        rbi_size_note_failed(rb, rb->run.by_cost ? rb->sizes.budget : rb->sizes.micro,
                             available_bytes);
    growth->wait =
        growth->wait > rb->options.grow_wait_max / 2 ? rb->options.grow_wait_max : growth->wait * 2;
    rbi_assert(growth->wait > 0 && growth->wait <= rb->options.grow_wait_max);
    rebatch_event event = rbi_event_begin(rb, REBATCH_EVENT_GROWTH_FAILED);
    rbi_event_end(&event, rb);
    rbi_event_emit(rb, &event);
}

static void begin_trial(struct rbi_growth *growth, bool is_overruling, bool is_of_level)
{
    rbi_assert(!growth->on_trial);
    growth->on_trial = true;
    growth->is_overruling = is_overruling;
    growth->is_of_level = is_of_level;
    growth->clean = 0;
}

static void leave_level(rebatch *rb, bool is_overruling)
{
    rebatch_event event = rbi_event_begin(rb, REBATCH_EVENT_GROW);
    const unsigned before = rb->lighten;
    rbi_assert(before > 0);
    (void)rbi_callback_lighten(rb, before - 1); /* the step is done: what fails late shows later */
    if (rb->lighten == before) {
        rb->sizes.growth.clean = 0; /* it is asked again after as long a wait */
        return;
    }
    rbi_event_end(&event, rb);
    rb->sizes.growth.previous = 0;
    begin_trial(&rb->sizes.growth, is_overruling, true);
    rbi_event_emit(rb, &event);
}

void rbi_growth_keep_previous(rebatch *rb)
{
    rb->sizes.growth.previous = rbi_size_now(rb);
    rb->sizes.growth.previous_by_cost = rb->run.by_cost;
}

static void grow_to(rebatch *rb, size_t size, bool is_overruling)
{
    rebatch_event event = rbi_event_begin(rb, REBATCH_EVENT_GROW);
    rbi_growth_keep_previous(rb);
    rbi_assert(size >= rb->sizes.growth.previous);
    rbi_size_set(rb, size);
    rbi_event_end(&event, rb);
    begin_trial(&rb->sizes.growth, is_overruling, false);
    rbi_event_emit(rb, &event);
}

bool rbi_growth_overrules(const rebatch *rb)
{
    return rb->sizes.growth.on_trial && rb->sizes.growth.is_overruling;
}

/* The last growth has held for so long that it is no longer on trial. */
static void end_trial(rebatch *rb)
{
    struct rbi_growth *growth = &rb->sizes.growth;
    if (growth->is_overruling)
        rbi_need_refute_model(rb);
    growth->on_trial = false;
    growth->previous = 0;
    growth->wait = rb->options.grow_after;
}

/* First back to the full speed of a sample, then to more samples at once. A prediction that has
 * refused that for grow_wait_max clean steps is tried: whatever is wrong with it, a size that fits
 * is found in the end. */
static void grow(rebatch *rb)
{
    const struct rbi_growth *growth = &rb->sizes.growth;
    const bool overrules = growth->clean - growth->wait >= rb->options.grow_wait_max;
    if (rb->lighten && rb->run.ops->lighten) {
        const size_t size = rb->run.by_cost ? rb->sizes.thrashing.largest : rbi_size_now(rb);
        if (overrules || rbi_size_may_fit(rb, size, rb->lighten - 1))
            leave_level(rb, overrules);
        return;
    }
    if (!rbi_size_is_cut(rb))
        return;
    const size_t size = rbi_size_now(rb);
    const size_t larger = rbi_next_size(rb, RBI_GROWS, size);
    if (larger)
        grow_to(rb, larger, false);
    else if (overrules)
        grow_to(rb, rbi_next_size(rb, RBI_OVERRULES, size), true);
}

void rbi_growth_step_done(rebatch *rb)
{
    struct rbi_growth *growth = &rb->sizes.growth;
    if (rb->run.report.ooms)
        return;
    if (growth->clean < UINT32_MAX)
        growth->clean++;
    if (growth->clean < growth->wait)
        return;
    if (growth->on_trial)
        end_trial(rb);
    if (rbi_is_on(rb->options.growth))
        grow(rb);
}
