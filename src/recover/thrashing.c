/* Owns the noticing of thrashing: the pool gives memory back to the device and takes as much
 * again in every micro-batch. Must not know how the pool finds memory. */
#include "recover/recover.h"

/* A micro-batch thrashes when this part of what it needs went and came again. That takes a GPU some
 * 50 us for 2 MiB, so a quarter of 10 GiB 60 ms, and a micro-batch of that size runs for some 400:
 * a size a quarter smaller costs less. */
#define THRASHING_PART 4
/* Once may be chance. */
#define THRASHING_ROW 2

void rbi_thrashing_begin(rebatch *rb)
{
    rbi_pool_read_traffic(&rb->sizes.thrashing.before, rb->pool);
}

/* Whether as much as the step's micro-batches need is free beside the memory that they had: what
 * went then was not given for want of memory, and fewer samples would not keep it. */
static bool is_plentiful(const rebatch *rb)
{
    size_t available;
    return rbi_memory_available(&available, rb) == REBATCH_OK &&
           available / 2 >= rb->sizes.thrashing.most_bytes;
}

void rbi_thrashing_end(rebatch *rb, size_t count, uint64_t needed_bytes)
{
    struct rbi_thrashing *thrashing = &rb->sizes.thrashing;
    const struct rbi_pool_traffic now = rb->run.use.traffic;
    rbi_assert(now.taken_bytes >= thrashing->before.taken_bytes);
    rbi_assert(now.given_bytes >= thrashing->before.given_bytes);
    const uint64_t taken = now.taken_bytes - thrashing->before.taken_bytes;
    const uint64_t given = now.given_bytes - thrashing->before.given_bytes;
    const uint64_t again = rbi_min(taken, given);
    thrashing->most_bytes = rbi_max(thrashing->most_bytes, needed_bytes);
    const bool thrashed = again && again >= needed_bytes / THRASHING_PART && !is_plentiful(rb);
    thrashing->row = thrashed ? thrashing->row + 1 : 0;
    rb->run.report.thrashed += thrashed;
    thrashing->largest = rbi_max(thrashing->largest, rb->run.cut.size);
    thrashing->most_samples = rbi_max(thrashing->most_samples, count);
    thrashing->before = now;
}

void rbi_thrashing_restart(rebatch *rb)
{
    rb->run.report.thrashed = 0;
    rb->sizes.thrashing.largest = 0;
    rb->sizes.thrashing.most_samples = 0;
    rb->sizes.thrashing.most_bytes = 0;
    rbi_thrashing_begin(rb);
}

bool rbi_thrashing_step_done(rebatch *rb)
{
    const struct rbi_thrashing *thrashing = &rb->sizes.thrashing;
    if (thrashing->row < THRASHING_ROW || rb->run.report.thrashed < rb->run.report.microbatches ||
        !rbi_size_can_shrink(rb, thrashing->most_samples) ||
        rb->options.on_oom == REBATCH_ON_OOM_STOP || !rbi_pool_is_caching(rb->pool))
        return false;
    rebatch_event event = rbi_event_begin(rb, REBATCH_EVENT_THRASHING);
    size_t available = 0;
    (void)rbi_available(&available, rb);
    rbi_growth_set_back(rb, available);
    const size_t ran = rb->run.by_cost ? thrashing->largest : SIZE_MAX;
    rbi_size_set(rb, rbi_next_size(rb, RBI_THRASHES, rbi_min(rbi_size_now(rb), ran)));
    rb->sizes.thrashing.row = 0;
    rbi_event_end(&event, rb);
    rbi_event_emit(rb, &event);
    return true;
}
