/* Owns what a session does about host memory that served an update: when it may be taken, what is
 * said of it, and how much of it comes back. Must not know how memory is mapped. */
#include "recover/recover.h"

void rbi_overflow_begin(rebatch *rb)
{
    struct rbi_overflow_use use;
    if (rbi_meter_is_set(rb) || rbi_pool_open_overflow(rb->pool))
        return;
    rbi_pool_overflow_use(&use, rb->pool);
    rbi_assert(rb->callback.is_updating && use.total_bytes >= rb->run.report.overflow_bytes);
    rb->callback.overflow_before = use.total_bytes - rb->run.report.overflow_bytes;
}

void rbi_overflow_end(rebatch *rb)
{
    struct rbi_overflow_use use;
    if (rbi_meter_is_set(rb) || !rbi_pool_close_overflow(rb->pool))
        return;
    rbi_pool_overflow_use(&use, rb->pool);
    rbi_assert(use.total_bytes >= rb->callback.overflow_before);
    rb->run.report.overflow_bytes = use.total_bytes - rb->callback.overflow_before;
}

bool rbi_overflow_serves(const rebatch *rb, size_t bytes)
{
    return !rbi_meter_is_set(rb) && !rb->run.ops->lighten && !rb->run.ops->resize &&
           rebatch_pool_overflow_room(rb->pool) >= bytes;
}

/* What the next step needs at least: that of half the micro-batch, to which it then falls. */
static size_t bytes_to_keep(rebatch *rb)
{
    uint64_t bytes;
    const size_t size = rbi_size_now(rb);
    const size_t half = rbi_max(rbi_next_size(rb, RBI_HALVES, size), 1);
    if (half < size && rbi_need_predict(&bytes, rb, half, rb->lighten))
        return rbi_min(bytes, SIZE_MAX);
    if (!rbi_need_predict(&bytes, rb, size, rb->lighten))
        return 0;
    return rbi_min(half < size ? bytes / 2 : bytes, SIZE_MAX);
}

static void say(rebatch *rb, uint64_t left_bytes)
{
    char text[256];
    struct rbi_text t = {text, sizeof text, 0};
    rbi_text_add_bytes(&t, rb->run.report.overflow_bytes);
    rbi_text_add(&t, " that the device did not have, in place of an update of which only a part "
                     "was made; ");
    rbi_text_add_bytes(&t, left_bytes);
    rbi_text_add(&t, left_bytes ? " still lie there, where they make updates slower: raise the "
                                  "limit, or keep less on the device"
                                : " still lie there");
    rebatch_event event = rbi_event_begin(rb, REBATCH_EVENT_OVERFLOW);
    rbi_event_end(&event, rb);
    event.text = text;
    rbi_event_emit(rb, &event);
}

rebatch_status rbi_overflow_step_done(rebatch *rb)
{
    struct rbi_overflow_use use;
    if (rbi_meter_is_set(rb))
        return REBATCH_OK;
    rbi_pool_overflow_use(&use, rb->pool);
    if (use.bytes) {
        const rebatch_status status = rbi_pool_settle_overflow(rb->pool, bytes_to_keep(rb));
        if (status != REBATCH_OK)
            return status;
        rbi_pool_overflow_use(&use, rb->pool);
    }
    if (rb->run.report.overflow_bytes)
        say(rb, use.bytes);
    return REBATCH_OK;
}
