/* Owns single runs: how one is made, read, and undone, and what each of them may show.
 * Must not know which are made. */
#include "check/check.h"

static rebatch_status end_run(struct rbi_check *c, rebatch_status status, struct rbi_values *into)
{
    if (!status && c->injection.is_short)
        status = rbi_error(REBATCH_E_HOST_OOM, "no host memory for a check");
    if (status)
        return status;
    rbi_older_drop_gone(&c->items, &c->blocks);
    rbi_items_drop_missing(&c->items);
    return rbi_values_read(into, &c->items);
}

rebatch_status rbi_check_run(struct rbi_check *c, size_t size, uint64_t fails_at, size_t *ran)
{
    rbi_assert(size > 0);
    c->report->runs++;
    rbi_injection_begin(&c->injection, fails_at);
    const rebatch_status status = end_run(c, rbi_dry_step_run(c->rb, size, ran), &c->now);
    return status || rbi_parts_copy(&c->ran, &c->injection.done)
               ? status
               : rbi_error(REBATCH_E_HOST_OOM, "no host memory for a check");
}

rebatch_status rbi_check_run_parts(struct rbi_check *c, const struct rbi_parts *parts, size_t batch,
                                   struct rbi_values *into)
{
    rbi_assert(parts->count > 0 && batch > 0);
    c->report->runs++;
    rbi_injection_begin(&c->injection, 0);
    return end_run(c, rbi_dry_step_run_parts(c->rb, parts->list, parts->count, batch), into);
}

rebatch_status rbi_check_run_repeated(struct rbi_check *c, size_t times)
{
    struct rbi_parts parts = {NULL, 0, 0};
    bool is_made = true;
    rbi_assert(times > 0 && c->whole.count > 0);
    for (size_t i = 0; i < times * c->whole.count && is_made; i++) {
        const struct rbi_part *const part = &c->whole.list[i % c->whole.count];
        is_made = rbi_parts_add(&parts, part->first, part->count);
    }
    const rebatch_status status =
        is_made ? rbi_check_run_parts(c, &parts, times * rbi_session_batch(c->rb), &c->now)
                : rbi_error(REBATCH_E_HOST_OOM, "no host memory for a check");
    rbi_parts_release(&parts);
    return status;
}

/* Who writes to memory that was taken back. */
void rbi_check_find_stale(struct rbi_check *c)
{
    struct rbi_stale_block block;
    if (rbi_finding_has(c->report, REBATCH_FINDING_STALE) || !rbi_stale_find(&block, &c->stale))
        return;
    rbi_finding_add_block(c->report, REBATCH_FINDING_STALE, "the memory of ", &block.place,
                          block.bytes,
                          " is written after it was taken back: its pointer is kept across "
                          "attempts; assign it again in each attempt, or guard it");
}

/* What micro-batches leave in use. The first one may make what all of them need. */
static void find_leak(struct rbi_check *c)
{
    struct rbi_stale_block block;
    const size_t ran = c->injection.done.count;
    c->most_ran = rbi_max(c->most_ran, ran);
    if (ran < RBI_CHECK_FOR_LEAKS || c->injection.is_done ||
        rbi_finding_has(c->report, REBATCH_FINDING_LEAK))
        return;
    const size_t left = rbi_stale_count_left(&block, &c->stale);
    if (left + 1 < ran)
        return;
    char before[96];
    struct rbi_text t = {before, sizeof before, 0};
    rbi_text_add(&t, "%zu of %zu micro-batches leave memory allocated, such as ", left, ran);
    rbi_finding_add_block(c->report, REBATCH_FINDING_LEAK, before, &block.place, block.bytes,
                          ": free it in forward_backward, or make it once, in zero_grad");
}

rebatch_status rbi_check_take_back(struct rbi_check *c)
{
    rbi_check_find_stale(c);
    find_leak(c);
    const rebatch_status status = rbi_step_undo(c->rb);
    rbi_stale_take_back(&c->stale, true);
    return status;
}

rebatch_status rbi_check_undo(struct rbi_check *c)
{
    const rebatch_status status = rbi_check_take_back(c);
    rbi_older_drop_gone(&c->items, &c->blocks);
    const rebatch_status written = rbi_values_write(&c->before, &c->items);
    return status ? status : written;
}

bool rbi_check_has_time(struct rbi_check *c)
{
    c->report->is_cut_short |= rbi_now_ns() > c->deadline_ns;
    return !c->report->is_cut_short;
}

bool rbi_check_is_fatal(rebatch_status status)
{
    return status == REBATCH_E_DEVICE_LOST || status == REBATCH_E_HOST_OOM;
}

rebatch_status rbi_check_fail(struct rbi_check *c, const char *when, rebatch_status status)
{
    rbi_assert(status != REBATCH_OK);
    if (rbi_check_is_fatal(status))
        return status;
    if (!rbi_finding_has(c->report, REBATCH_FINDING_FAILED)) /* others have the same cause */
        rbi_finding_add(c->report, REBATCH_FINDING_FAILED, "", "the step returned %s %s: %s",
                        rebatch_status_name(status), when, rebatch_last_error());
    return REBATCH_OK;
}

rebatch_status rbi_check_end(struct rbi_check *c, const char *when, rebatch_status status)
{
    if (status)
        status = rbi_check_fail(c, when, status);
    const rebatch_status undone = rbi_check_undo(c);
    return status ? status : undone;
}
