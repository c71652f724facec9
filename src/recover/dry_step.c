/* Owns dry steps: runs of a step up to its update, which leave the session as it was.
 * Must not know what they are for. */
#include "recover/recover.h"

static void forget_saved(struct rbi_dry_step *dry_step)
{
    rbi_heap_free(dry_step->sizes);
    rbi_heap_free(dry_step->launch);
    *dry_step = (struct rbi_dry_step){0};
}

rebatch_status rbi_dry_step_begin(struct rbi_dry_step *dry_step, rebatch *rb,
                                  const rebatch_step_ops *ops, size_t batch, void *user,
                                  const struct rbi_dry_step_watch *watch)
{
    rbi_assert(!rb->dry_step && !rb->run.ops);
    *dry_step = (struct rbi_dry_step){.watch = *watch,
                                      .on_oom = rb->options.on_oom,
                                      .max_attempts = rb->options.max_attempts,
                                      .max_ooms_in_row = rb->options.max_ooms_in_row,
                                      .on_event = rb->options.on_event,
                                      .log_level = rb->log.level};
    dry_step->sizes = rbi_heap_calloc(1, sizeof *dry_step->sizes);
    dry_step->launch = rbi_heap_calloc(1, sizeof *dry_step->launch);
    if (!dry_step->sizes || !dry_step->launch) {
        forget_saved(dry_step);
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a check");
    }
    *dry_step->sizes = rb->sizes;
    *dry_step->launch = rb->launch;
    rb->sizes = (struct rbi_sizes){0};
    rbi_sizes_init(&rb->sizes, &rb->options);
    rb->launch = (struct rbi_launch){.has_injected = dry_step->watch.has_injected,
                                     .user = dry_step->watch.user};
    rb->options.on_oom = REBATCH_ON_OOM_HALVE;
    rb->options.max_attempts = (uint32_t)rb->failed_room;
    rb->options.max_ooms_in_row = 0;
    rb->options.on_event = NULL;
    rb->log.level = REBATCH_LOG_QUIET;
    rb->dry_step = &dry_step->watch;
    rbi_step_begin(rb, ops, batch, user);
    rbi_resize_release(rb); /* its runs make their own */
    return REBATCH_OK;
}

static rebatch_status begin_run(rebatch *rb, size_t size)
{
    rbi_assert(rb->dry_step && rb->run.ops && size > 0);
    rb->sizes.micro = size;
    rb->sizes.budget = SIZE_MAX;
    rb->sizes.has_budget = true;
    const struct rbi_task task = {rb->run.ops, rb->run.user, rb->run.batch, size,
                                  RBI_FORWARD_BACKWARD};
    rbi_run_begin(rb, &task);
    return rbi_step_open_scope(rb);
}

static rebatch_status wait_for_it(const rebatch *rb, rebatch_status status)
{
    const rebatch_status waited = rbi_device_synchronize(rb->device);
    return status ? status : waited;
}

rebatch_status rbi_dry_step_run(rebatch *rb, size_t size, size_t *ran)
{
    *ran = 0;
    rebatch_status status = begin_run(rb, size);
    if (!status)
        status = rbi_zero_grad_run(rb);
    if (!status)
        status = rbi_samples_run(rb);
    if (!status)
        *ran = rb->sizes.thrashing.most_samples;
    return wait_for_it(rb, status);
}

rebatch_status rbi_dry_step_resize(rebatch *rb, size_t size)
{
    rebatch_status status = begin_run(rb, size);
    if (!status)
        status = rbi_resize_ready(rb);
    return wait_for_it(rb, status);
}

/* Buffers grow with the micro-batches. */
static rebatch_status run_part(rebatch *rb, const rebatch_microbatch *mb)
{
    rb->run.most = rb->sizes.micro = rbi_max(rb->sizes.micro, mb->count);
    rb->run.cut.size = rbi_size_of(rb, mb->first, mb->count);
    rebatch_status status = rbi_resize_ready(rb);
    if (!status)
        status = rbi_guards_save(rb, REBATCH_GUARD_ATTEMPT);
    return status ? status : rbi_callback_run(rb, RBI_FORWARD_BACKWARD, mb);
}

rebatch_status rbi_dry_step_run_parts(rebatch *rb, const struct rbi_part *parts, size_t count,
                                      size_t batch)
{
    rebatch_microbatch mb = {.step = rb->step,
                             .batch = batch,
                             .pool = rb->pool,
                             .stream = rb->options.stream,
                             .rank_batch = batch};
    rebatch_status status = begin_run(rb, count ? parts[0].count : 1);
    rb->run.total = batch; /* rebatch_get_batch() says so too */
    if (!status)
        status = rbi_zero_grad_run(rb);
    for (size_t i = 0; i < count && !status; i++) {
        mb.first = parts[i].first;
        mb.count = parts[i].count;
        rbi_assert(mb.count > 0 && mb.count <= batch && mb.first <= batch - mb.count);
        status = run_part(rb, &mb);
    }
    return wait_for_it(rb, status);
}

rebatch_status rbi_dry_step_update(rebatch *rb)
{
    const rebatch_status status = rbi_update_run(rb);
    if (!status) {
        rbi_scope_commit_all(rb->pool, rb->run.scope);
        rb->run.scope = 0;
    }
    return wait_for_it(rb, status);
}

void rbi_dry_step_end(struct rbi_dry_step *dry_step, rebatch *rb)
{
    rbi_assert(rb->dry_step == &dry_step->watch);
    rbi_resize_release(rb);
    rb->sizes = *dry_step->sizes;
    rb->launch = *dry_step->launch;
    rb->options.on_oom = dry_step->on_oom;
    rb->options.max_attempts = dry_step->max_attempts;
    rb->options.max_ooms_in_row = dry_step->max_ooms_in_row;
    rb->options.on_event = dry_step->on_event;
    rb->log.level = dry_step->log_level;
    rb->dry_step = NULL;
    rbi_step_end(rb);
    forget_saved(dry_step);
}
