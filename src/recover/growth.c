/* Owns when the micro-batch grows again, or a lighter level is left.
 * Must not know what a step does. */
#include "recover/recover.h"

void rbi_growth_set_back(rebatch *rb, uint64_t available_bytes)
{
    struct rbi_growth *growth = &rb->sizes.growth;
    growth->clean = 0;
    if (!growth->on_trial)
        return;
    growth->on_trial = false;
    if (!growth->is_of_level) {
        growth->failed_size = rb->run.by_cost ? rb->sizes.budget : rb->sizes.micro;
        growth->failed_by_cost = rb->run.by_cost;
        growth->failed_available = available_bytes;
    }
    growth->wait =
        growth->wait > rb->options.grow_wait_max / 2 ? rb->options.grow_wait_max : growth->wait * 2;
    rbi_assert(growth->wait > 0 && growth->wait <= rb->options.grow_wait_max);
    rebatch_event event = rbi_event_begin(rb, REBATCH_EVENT_GROWTH_FAILED);
    rbi_event_end(&event, rb);
    rbi_event_emit(rb, &event);
}

/* Whether an attempt of that size would find its memory now, as far as anybody can tell. */
static bool has_room(rebatch *rb, size_t size, unsigned lighten)
{
    size_t available;
    if (rbi_available(&available, rb) != REBATCH_OK)
        return false;
    uint64_t need;
    return !rbi_need_predict(&need, rb, size, lighten) ||
           need - rbi_min(need, rbi_need_held(rb, size)) <= available;
}

/* It has run: what was reserved then may have been all there was. */
static bool may_fit(const rebatch *rb, size_t size)
{
    size_t available;
    uint64_t need;
    return rbi_available(&available, rb) || !rbi_need_predict_live(&need, rb, size, rb->lighten) ||
           need - rbi_min(need, rbi_need_held(rb, size)) <= available;
}

static size_t size_now(const rebatch *rb)
{
    return rb->run.by_cost ? rb->sizes.budget : rbi_micro_size(rb, rb->run.batch);
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
    rb->sizes.growth.previous = size_now(rb);
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

size_t rbi_growth_previous(const rebatch *rb, size_t failed)
{
    const struct rbi_growth *growth = &rb->sizes.growth;
    const size_t size = growth->previous_by_cost == rb->run.by_cost ? growth->previous : 0;
    return size > 0 && size < failed && may_fit(rb, size) ? size : 0;
}

/* ---- how far ---- */

/* Twice the size, or the next that is allowed; what it has when nothing larger is. */
static size_t doubled(const rebatch *rb, size_t size, size_t upper)
{
    const size_t twice = size > upper / 2 ? upper : rbi_max(size * 2, 1);
    if (rb->run.by_cost)
        return twice;
    const size_t allowed = rbi_round_size(&rb->options, twice);
    if (allowed > size)
        return allowed;
    const size_t next = rbi_round_size_up(&rb->options, size + 1);
    return next && next <= upper ? next : size;
}

/* `larger`, or halfway to it, and so on, until whole steps are predicted to find room. What did not
 * is not asked about again with no more memory. */
static size_t fitting(rebatch *rb, size_t size, size_t larger, size_t available)
{
    struct rbi_growth *growth = &rb->sizes.growth;
    if (!rbi_need_has_model(rb, rb->lighten) || !rb->sizes.model.fits)
        return larger;
    rbi_assert(larger >= size);
    while (larger > size && !rb->sizes.model.fits(rb->sizes.model.user, rb, larger)) {
        growth->failed_size = larger;
        growth->failed_by_cost = rb->run.by_cost;
        growth->failed_available = available;
        larger = size + (larger - size) / 2;
        if (!rb->run.by_cost)
            larger = rbi_max(rbi_round_size(&rb->options, larger), size);
    }
    return larger;
}

/* The largest that is predicted to fit in what there is now. Where a prediction did not hold with
 * no less than that, halfway to it. Points of one's own do not say what is far beyond them. */
static size_t predicted(rebatch *rb, size_t size, size_t upper)
{
    const struct rbi_growth *growth = &rb->sizes.growth;
    size_t available;
    if (rbi_available(&available, rb) != REBATCH_OK)
        return size;
    if (!rbi_need_has_model(rb, rb->lighten))
        upper = doubled(rb, size, upper);
    size_t larger = rbi_need_largest(rb, upper, available);
    if (growth->failed_size && growth->failed_by_cost == rb->run.by_cost &&
        larger >= growth->failed_size && available <= growth->failed_available)
        larger = size + (rbi_max(growth->failed_size, size) - size) / 2;
    if (!rb->run.by_cost)
        larger = rbi_round_size(&rb->options, larger);
    return fitting(rb, size, rbi_max(larger, size), available);
}

/* By cost, what uncuts this batch: a model takes its time to say what a size far beyond needs. */
static size_t upper_size(const rebatch *rb)
{
    if (!rb->run.by_cost)
        return rbi_micro_upper(rb, rb->run.batch);
    const size_t twice = rb->sizes.budget > SIZE_MAX / 2 ? SIZE_MAX : rb->sizes.budget * 2;
    return rbi_max(rbi_size_of(rb, 0, rb->run.batch), twice);
}

size_t rbi_growth_larger(rebatch *rb)
{
    const size_t size = size_now(rb);
    const size_t upper = upper_size(rb);
    if (rbi_need_can_choose(rb))
        return predicted(rb, size, upper);
    const size_t larger = doubled(rb, size, upper);
    return has_room(rb, larger, 0) ? larger : size;
}

/* Whether a larger size would make a difference. */
static bool is_cut(const rebatch *rb, size_t batch)
{
    return rb->run.by_cost ? rb->run.cut.by_budget
                           : rbi_micro_size(rb, batch) < rbi_micro_upper(rb, batch);
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
static void grow(rebatch *rb, size_t batch)
{
    const struct rbi_growth *growth = &rb->sizes.growth;
    const bool overrules = growth->clean - growth->wait >= rb->options.grow_wait_max;
    if (rb->lighten && rb->run.ops->lighten) {
        const size_t size = rb->run.by_cost ? rb->sizes.thrashing.largest : size_now(rb);
        if (overrules || has_room(rb, size, rb->lighten - 1))
            leave_level(rb, overrules);
        return;
    }
    if (!is_cut(rb, batch))
        return;
    const size_t size = size_now(rb);
    const size_t larger = rbi_growth_larger(rb);
    if (larger > size)
        grow_to(rb, larger, false);
    else if (overrules)
        grow_to(rb, doubled(rb, size, upper_size(rb)), true);
}

void rbi_growth_step_done(rebatch *rb, size_t batch)
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
        grow(rb, batch);
}
