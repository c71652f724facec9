/* Owns the buffers of the micro-batch's size: when resize is called, and when what it allocated is
 * taken back; a trial with buffers of its own. Must not know what is done about an OOM. */
#include "recover/recover.h"

/* Whether what resize allocated is all there still: the program may have freed some, and a scope of
 * its own around the step may have taken it back. */
static bool is_there(const rebatch *rb)
{
    return rb->buffers.size && rbi_pool_resident_bytes(rb->pool) == rb->buffers.bytes;
}

static bool is_of_step(const rebatch *rb)
{
    return rb->buffers.resize == rb->run.ops->resize && rb->buffers.user == rb->run.user &&
           rb->buffers.lighten == rb->lighten;
}

/* The size that resize is called for when it is due. */
static size_t due_size(const rebatch *rb)
{
    if (rb->run.is_probe)
        return rbi_min(rbi_round_size_up(&rb->options, 1), rb->run.batch);
    return rb->run.by_cost ? rb->run.cut.most_samples : rbi_micro_size(rb, rb->run.batch);
}

/* Whether memory has made the size smaller than the buffers' since they were made. */
static bool is_less(const rebatch *rb)
{
    return rb->run.by_cost
               ? rb->sizes.budget < rb->buffers.budget && due_size(rb) < rb->buffers.size
               : rb->sizes.micro < rb->buffers.size;
}

/* Buffers serve every smaller micro-batch, so a rest and a smaller batch need no others. */
static bool is_due(const rebatch *rb)
{
    if (!rb->run.ops->resize || rb->run.buffers_are_fixed)
        return false;
    if (!is_there(rb) || !is_of_step(rb) || is_less(rb))
        return true;
    return !rb->run.is_probe && due_size(rb) > rb->buffers.size;
}

size_t rbi_resize_size(const rebatch *rb)
{
    if (!rb->run.ops->resize || rb->run.buffers_are_fixed)
        return 0;
    return is_due(rb) ? due_size(rb) : rb->buffers.size;
}

void rbi_resize_begin_map(rebatch *rb)
{
    const size_t least = rbi_min(rbi_round_size_up(&rb->options, 1), rb->run.batch);
    const bool is_shared = rb->run.ops->resize && !rb->buffers.is_of_map && is_there(rb) &&
                           is_of_step(rb) && rb->buffers.size >= least;
    rb->run.buffers_are_fixed = !rb->run.ops->resize || is_shared;
    if (is_shared)
        rb->run.most = rbi_min(rb->run.most, rb->buffers.size);
    if (is_shared != rb->sizes.shares_buffers) /* what was learned counted them, or did not */
        rbi_need_forget(rb);
    rb->sizes.shares_buffers = is_shared;
}

void rbi_resize_begin_step(rebatch *rb)
{
    const bool is_unknown = rb->sizes.micro == SIZE_MAX && !rb->run.ops->cost;
    if (rb->buffers.is_of_map && is_unknown && is_there(rb) && is_of_step(rb))
        rb->sizes.micro = rb->buffers.found;
}

uint64_t rbi_resize_excess(const rebatch *rb)
{
    const bool can_shrink = is_there(rb) && rbi_size_can_shrink(rb, rb->buffers.size);
    return can_shrink ? rbi_min(rbi_pool_over_limit(rb->pool), rb->buffers.bytes) : 0;
}

void rbi_resize_release(rebatch *rb)
{
    if (!rb->buffers.size)
        return;
    if (rb->any_stream)
        (void)rbi_callback_wait(rb); /* nothing must be at work in what is taken back */
    rbi_assert(!rb->callback.is_running);
    rbi_captured_drop(rb);
    rbi_pool_free_resident(rb->pool);
    rb->buffers = (struct rbi_buffers){0};
}

/* Takes back those that are there, and calls resize. */
static rebatch_status resize_to(rebatch *rb, size_t size)
{
    if (!rb->run.ops->resize)
        return REBATCH_OK;
    rbi_assert(size > 0);
    rbi_resize_release(rb);
    const rebatch_status status = rbi_callback_resize(rb, size);
    if (status)
        return status;
    rb->buffers = (struct rbi_buffers){.size = size,
                                       .bytes = rbi_pool_resident_bytes(rb->pool),
                                       .budget = rb->sizes.budget,
                                       .lighten = rb->lighten,
                                       .resize = rb->run.ops->resize,
                                       .user = rb->run.user,
                                       .is_new = true,
                                       .is_of_map = rb->run.samples_callback == RBI_MAP,
                                       .found = rb->sizes.micro};
    return REBATCH_OK;
}

void rbi_resize_prepare(rebatch *rb, bool is_recorded)
{
    rbi_cut_survey(rb);
    if (rb->run.ops->resize && (is_recorded || is_due(rb)))
        rbi_resize_release(rb);
}

rebatch_status rbi_resize_ready(rebatch *rb)
{
    rbi_cut_survey(rb);
    if (is_due(rb))
        return resize_to(rb, due_size(rb));
    if (rb->run.ops->resize && rb->run.samples_callback != RBI_MAP)
        rb->buffers.is_of_map = false; /* a step has taken them over */
    return REBATCH_OK;
}

rebatch_status rbi_callback_run_trial(rebatch *rb, size_t count, size_t size)
{
    const rebatch_microbatch mb = {.step = rb->step,
                                   .count = count,
                                   .batch = rb->run.batch,
                                   .probing = true,
                                   .pool = rb->pool,
                                   .stream = rb->options.stream,
                                   .rank_batch = rb->run.batch};
    rb->run.cut.size = size;
    rebatch_status status = resize_to(rb, count);
    if (!status)
        status = rbi_callback_run(rb, RBI_FORWARD_BACKWARD, &mb);
    if (rb->run.ops->resize)
        rbi_resize_release(rb);
    return status;
}
