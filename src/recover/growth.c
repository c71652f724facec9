/* Owns when the micro-batch grows again, or a lighter level is left.
 * Must not know what a step does. */
#include "recover/recover.h"

void rbi_growth_oom(rebatch *rb)
{
    struct rbi_growth *growth = &rb->growth;
    growth->clean = 0;
    if (!growth->on_trial)
        return;
    growth->on_trial = false;
    growth->wait =
        growth->wait > rb->options.grow_wait_max / 2 ? rb->options.grow_wait_max : growth->wait * 2;
    rebatch_event event = {.kind = REBATCH_EVENT_GROWTH_FAILED,
                           .batch = rb->batch,
                           .micro_before = rbi_micro_size(rb, rb->batch),
                           .micro_after = rbi_micro_size(rb, rb->batch),
                           .lighten_before = rb->lighten,
                           .lighten_after = rb->lighten};
    rbi_event_emit(rb, &event);
}

/* Whether an attempt of that size would find its memory now, as far as anybody can tell. */
static bool has_room(rebatch *rb, size_t micro, unsigned lighten)
{
    size_t available;
    if (rebatch_pool_available(&available, rb->pool) != REBATCH_OK)
        return false;
    return rbi_need_predict(rb, micro, lighten) <= available;
}

static void grow_to(rebatch *rb, size_t micro, unsigned lighten)
{
    if (!has_room(rb, micro, lighten))
        return;
    if (lighten != rb->lighten && rbi_callback_run(rb, RBI_LIGHTEN, NULL, lighten) != REBATCH_OK)
        return;
    rebatch_event event = {.kind = REBATCH_EVENT_GROW,
                           .batch = rb->batch,
                           .micro_before = rbi_micro_size(rb, rb->batch),
                           .micro_after = micro,
                           .lighten_before = rb->lighten,
                           .lighten_after = lighten};
    rb->micro = micro;
    rb->lighten = lighten;
    rb->growth.on_trial = true;
    rb->growth.clean = 0;
    rbi_event_emit(rb, &event);
}

/* Twice the size, or the next that is allowed; what it has when nothing larger is. */
static size_t doubled(const rebatch *rb, size_t micro, size_t upper)
{
    const size_t size = rbi_round_size(&rb->options, micro > upper / 2 ? upper : micro * 2);
    if (size > micro)
        return size;
    const size_t next = rbi_round_size_up(&rb->options, micro + 1);
    return next && next <= upper ? next : micro;
}

void rbi_growth_step_done(rebatch *rb, size_t batch)
{
    struct rbi_growth *growth = &rb->growth;
    if (rb->report.ooms)
        return;
    if (growth->clean < UINT32_MAX)
        growth->clean++;
    if (growth->clean < growth->wait)
        return;
    if (growth->on_trial) { /* the last growth has held */
        growth->on_trial = false;
        growth->wait = rb->options.grow_after;
    }
    const size_t upper = rbi_micro_upper(rb, batch);
    const size_t micro = rbi_micro_size(rb, batch);
    if (!rbi_is_on(rb->options.growth) || (micro >= upper && rb->lighten == 0))
        return;
    /* First back to the full speed of a sample, then to more samples at once. */
    if (rb->lighten)
        grow_to(rb, micro, rb->lighten - 1);
    else
        grow_to(rb, doubled(rb, micro, upper), 0);
}
