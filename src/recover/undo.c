/* Owns where a step begins, and begins again: the scope that it goes back to, and zero_grad.
 * Must not know what runs after that. */
#include "recover/recover.h"

rebatch_status rbi_step_open_scope(rebatch *rb)
{
    rbi_assert(rb->run.ops && !rb->run.scope);
    rebatch_status status = rbi_pool_wait_awake(rb->pool); /* guarded state may sleep */
    if (!status)
        status = rbi_pool_keep_headroom(rb->pool);
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
    rbi_captured_drop(rb);
    return rbi_guards_restore(rb, REBATCH_GUARD_STEP);
}

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
