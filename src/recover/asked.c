/* Owns when a session tells whoever is asked for its memory, and what it needs at least.
 * Must not know who asks, nor how. */
#include "recover/recover.h"

_Atomic(const struct rbi_asker *) rbi_asker_now;

void rbi_asker_set(const struct rbi_asker *asker)
{
    atomic_store(&rbi_asker_now, asker);
}

/* The pool holds whole pages: a bound within one lacks what is beyond it. */
static uint64_t in_pages(const rebatch *rb, uint64_t bytes)
{
    const uint64_t rest = rbi_device_page_bytes(rb->device) - 1;
    return (bytes + rest) & ~rest;
}

bool rbi_asked_lift(rebatch *rb)
{
    const struct rbi_asker *const asker = atomic_load(&rbi_asker_now);
    const struct rbi_failure *const failure = &rb->run.ooms.failure;
    if (!asker || rb->dry_step || failure->is_injected)
        return false;
    const uint64_t available = rbi_min(failure->need_bytes, failure->available_bytes);
    return asker->lift(rb, in_pages(rb, rbi_max(failure->need_bytes - available, 1)));
}

/* Of the smallest micro-batch, beside what is in use: as far as anything is known of it. */
static uint64_t smallest_needs(const rebatch *rb)
{
    uint64_t bytes;
    const size_t smallest =
        rb->run.by_cost ? 1 : rbi_min(rbi_round_size_up(&rb->options, 1), rb->run.batch);
    if (!rbi_need_predict(&bytes, rb, smallest, rb->lighten) &&
        !rbi_need_predict_surely(&bytes, rb, smallest))
        return 0;
    return bytes - rbi_min(bytes, rbi_need_held(rb, smallest));
}

uint64_t rbi_session_needs(const rebatch *rb)
{
    struct rbi_memory memory;
    rbi_assert(rb->run.batch > 0);
    rbi_memory_get(&memory, rb);
    const uint64_t kept = memory.live_bytes - rbi_min(memory.live_bytes, rbi_resize_bytes(rb));
    return in_pages(rb, kept + rbi_max(smallest_needs(rb), rb->update_bytes));
}

const rebatch_step_report *rbi_session_report(const rebatch *rb)
{
    return &rb->run.report;
}

bool rbi_session_borrows_pool(const rebatch *rb)
{
    return rb->borrows_pool;
}
