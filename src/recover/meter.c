/* Owns what a session knows of memory: the figures of its pool, or of the allocator that the
 * program uses instead. Must not know what is done about them. */
#include "recover/recover.h"

rebatch_status rbi_meter_check(const rebatch_options *o)
{
    const rebatch_meter *meter = o->meter;
    if (!meter)
        return REBATCH_OK;
    if (meter->struct_size < offsetof(rebatch_meter, outside))
        return rbi_error(REBATCH_E_INVALID, "meter->struct_size is %zu: expected %zu",
                         meter->struct_size, sizeof *meter);
    const char *missing = !meter->begin       ? "begin"
                          : !meter->read      ? "read"
                          : !meter->available ? "available"
                          : !meter->release   ? "release"
                                              : NULL;
    if (missing)
        return rbi_error(REBATCH_E_INVALID, "meter->%s is NULL: expected a function", missing);
    if (rbi_is_on(o->reclaim))
        return rbi_error(REBATCH_E_INVALID, "meter is set and reclaim is on: expected it off, "
                                            "since rebatch cannot take back another's memory");
    return REBATCH_OK;
}

/* Samples of the micro-batch that begins, or their cost; 0: the callback has none. */
static size_t size_in(const rebatch *rb, rebatch_phase phase)
{
    return phase == REBATCH_PHASE_FORWARD || phase == REBATCH_PHASE_MAP ? rb->run.cut.size : 0;
}

static bool is_settled(const rebatch *rb, size_t size)
{
    const rebatch_meter *const meter = &rb->meter;
    const size_t settled = meter->settled_size && meter->settled ? *meter->settled_size : 0;
    return settled && (settled == SIZE_MAX || size == settled || !size);
}

/* For the callback of `size` that runs, or ran last. */
static bool read_meter(rebatch_meter_reading *out, const rebatch *rb, size_t size)
{
    const bool is_there = is_settled(rb, size);
    *out = is_there ? *rb->meter.settled : (rebatch_meter_reading){0};
    return is_there || rb->meter.read(out, rb->meter.user) == REBATCH_OK;
}

/* ---- around a callback ---- */

void rbi_meter_begin(rebatch *rb, rebatch_phase phase)
{
    if (!rbi_meter_is_set(rb))
        return;
    rebatch_meter_reading reading;
    const size_t size = rb->callback.meter_size = size_in(rb, phase);
    if (!is_settled(rb, size))
        rb->meter.begin(phase, size, rb->meter.user);
    rb->callback.meter_live = read_meter(&reading, rb, size) ? reading.live_bytes : 0;
    if (!rb->run.meter.has_begun)
        rb->run.live_before = rb->callback.meter_live;
    rb->run.meter.has_begun = true;
}

bool rbi_meter_end(struct rbi_used *out, rebatch *rb)
{
    rbi_assert(!rbi_meter_is_set(rb) || rb->run.meter.has_begun);
    *out = (struct rbi_used){0};
    if (!rbi_meter_is_set(rb)) {
        *out = (struct rbi_used){.live_before = rb->run.use.live_before,
                                 .peak_bytes = rb->run.use.peak_bytes,
                                 .keeps_blocks = rb->run.use.keeps_blocks};
        return true;
    }
    rebatch_meter_reading reading;
    const bool is_read = read_meter(&reading, rb, rb->callback.meter_size);
    rb->run.meter.retries += reading.retries;
    if (!is_read || !reading.peak_bytes) {
        rb->run.meter.peak_is_unknown = true;
        return false;
    }
    out->live_before = rb->callback.meter_live;
    out->peak_bytes = reading.peak_bytes - rbi_min(reading.peak_bytes, rb->callback.meter_live);
    out->asked_bytes = reading.asked_bytes;
    out->reserved_bytes =
        reading.reserved_peak_bytes - rbi_min(reading.reserved_peak_bytes, rb->callback.meter_live);
    out->keeps_blocks = reading.live_bytes > rb->callback.meter_live;
    rb->run.meter.peak = rbi_max(rb->run.meter.peak, reading.peak_bytes);
    return true;
}

/* ---- at any time ---- */

void rbi_memory_get(struct rbi_memory *out, const rebatch *rb)
{
    *out = (struct rbi_memory){0};
    if (rbi_meter_is_set(rb)) {
        rebatch_meter_reading reading;
        (void)read_meter(&reading, rb, rb->callback.meter_size);
        *out = (struct rbi_memory){reading.live_bytes, rbi_memory_step_peak(rb),
                                   reading.reserved_bytes};
        return;
    }
    rebatch_pool_stats stats = {0};
    (void)rebatch_pool_get_stats(&stats, rb->pool);
    *out = (struct rbi_memory){stats.live_bytes, rbi_pool_peak_since_mark(rb->pool),
                               stats.reserved_bytes};
}

uint64_t rbi_memory_step_peak(const rebatch *rb)
{
    if (!rbi_meter_is_set(rb))
        return rbi_pool_peak_since_mark(rb->pool);
    return rb->run.meter.peak_is_unknown ? 0 : rb->run.meter.peak;
}

rebatch_status rbi_memory_available(size_t *out, const rebatch *rb)
{
    if (!rbi_meter_is_set(rb))
        return rebatch_pool_available(out, rb->pool);
    uint64_t bytes = 0;
    const rebatch_status status = rb->meter.available(&bytes, rb->meter.user);
    *out = rbi_min(bytes, SIZE_MAX);
    return status;
}

uint64_t rbi_resize_bytes(const rebatch *rb)
{
    return rb->buffers.size && !rb->run.buffers_are_fixed ? rbi_pool_resident_bytes(rb->pool) : 0;
}

rebatch_status rbi_available(size_t *out, const rebatch *rb)
{
    if (rbi_meter_is_set(rb) || rb->run.buffers_are_fixed)
        return rbi_memory_available(out, rb);
    return rbi_pool_available_resident(out, rb->pool);
}

rebatch_status rbi_memory_admit(rebatch *rb, size_t bytes)
{
    if (!rbi_meter_is_set(rb))
        return rbi_pool_admit(rb->pool, bytes, rb->options.stream);
    size_t available;
    return rbi_memory_available(&available, rb) || bytes <= available ? REBATCH_OK : REBATCH_OOM;
}

uint64_t rbi_memory_outside(const rebatch *rb)
{
    if (rbi_meter_is_set(rb))
        return rb->meter.outside ? rb->meter.outside(rb->meter.user) : 0;
    struct rbi_pool_bound bound;
    if (rbi_pool_get_bound(&bound, rb->pool) || bound.is_limit)
        return 0;
    return bound.outside_bytes;
}

size_t rbi_memory_release(rebatch *rb)
{
    if (rbi_meter_is_set(rb))
        return (size_t)rb->meter.release(rb->meter.user);
    size_t released = 0;
    (void)rebatch_pool_trim(rb->pool, 0, &released);
    return released;
}
