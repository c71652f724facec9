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

/* A quarter less, or what is allowed. */
static void shrink(rebatch *rb)
{
    if (rb->run.by_cost) {
        const size_t budget = rbi_min(rb->sizes.budget, rb->sizes.thrashing.largest);
        rb->sizes.budget = budget - (budget / 4 + (budget < 4));
        return;
    }
    const size_t micro = rbi_micro_size(rb, rb->run.batch);
    const size_t less = rbi_round_size(&rb->options, micro - (micro + 3) / 4);
    rb->sizes.micro = less ? less : rbi_round_size_up(&rb->options, 1);
    rbi_assert(rb->sizes.micro > 0 && rb->sizes.micro < micro);
}

bool rbi_thrashing_step_done(rebatch *rb)
{
    const struct rbi_thrashing *thrashing = &rb->sizes.thrashing;
    if (thrashing->row < THRASHING_ROW || rb->run.report.thrashed < rb->run.report.microbatches ||
        rbi_round_size(&rb->options, thrashing->most_samples - 1) == 0 ||
        rb->options.on_oom == REBATCH_ON_OOM_STOP || !rbi_pool_is_caching(rb->pool))
        return false;
    rebatch_event event = rbi_event_begin(rb, REBATCH_EVENT_THRASHING);
    size_t available = 0;
    (void)rbi_available(&available, rb);
    rbi_growth_set_back(rb, available);
    shrink(rb);
    rb->sizes.thrashing.row = 0;
    rbi_event_end(&event, rb);
    rbi_event_emit(rb, &event);
    return true;
}
