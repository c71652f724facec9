/* Owns what the rest of the library may read of a session.
 * Must not know what happens in a step. */
#include "recover/recover.h"

rebatch_status rbi_session_check_idle(const rebatch *rb, const char *function)
{
    if (!rb->run.ops)
        return REBATCH_OK;
    return rbi_error(REBATCH_E_STATE,
                     "%s() was called from within a callback, or while another thread is in a step",
                     function);
}

rebatch_status rbi_session_check_records(const rebatch *rb, const char *function)
{
    if (!rbi_meter_is_set(rb))
        return REBATCH_OK;
    return rbi_error(REBATCH_E_UNSUPPORTED,
                     "%s() goes by the allocations of a pool, and this session has a meter instead",
                     function);
}

rebatch_status rbi_session_check_alone(const rebatch *rb, const char *function)
{
    if (rb->options.lockstep != REBATCH_ON)
        return REBATCH_OK;
    return rbi_error(REBATCH_E_UNSUPPORTED,
                     "%s() runs forward_backward on this rank alone, and lockstep is on: its "
                     "collectives would wait for the other ranks",
                     function);
}

rebatch_status rbi_session_check_reclaims(const rebatch *rb, const char *function)
{
    if (rbi_is_on(rb->options.reclaim))
        return REBATCH_OK;
    return rbi_error(REBATCH_E_UNSUPPORTED,
                     "%s() takes back what runs have allocated, and reclaim is off", function);
}

const rebatch_options *rbi_session_options(const rebatch *rb)
{
    return &rb->options;
}

unsigned rbi_session_buffers(const rebatch *rb)
{
    return rb->sizes.shares_buffers ? 0 : rb->residents;
}

rebatch_device *rbi_session_device(const rebatch *rb)
{
    return rb->device;
}

uint64_t rbi_session_step(const rebatch *rb)
{
    return rb->step;
}

size_t rbi_session_batch(const rebatch *rb)
{
    return rb->run.batch;
}

bool rbi_session_is_by_cost(const rebatch *rb)
{
    return rb->run.by_cost;
}

unsigned rbi_session_level(const rebatch *rb)
{
    return rb->lighten;
}

bool rbi_session_admits(const rebatch *rb)
{
    return rbi_is_on(rb->options.admission) && rb->options.on_oom != REBATCH_ON_OOM_STOP &&
           rbi_pool_is_caching(rb->pool);
}

rebatch_tag rbi_session_guard_tag(const rebatch *rb)
{
    return rb->guard_tag;
}

bool rbi_session_has_updated(const rebatch *rb)
{
    return rb->step > 0 || rb->has_updated;
}

const struct rbi_failure *rbi_session_failure(const rebatch *rb)
{
    return &rb->run.ooms.failure;
}
