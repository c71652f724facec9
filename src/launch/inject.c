/* Owns failures on purpose: requests of callbacks that fail, and a limit that is lowered at a step.
 * Must not know how a step answers them. */
#include <inttypes.h>
#include <unistd.h>

#include "launch/launch.h"

static void say(const struct rbi_run *run);

/* ---- requests that fail ---- */

/* Runs with the pool's lock held, in the thread that asks. */
static bool strikes(void *user, size_t bytes)
{
    (void)bytes;
    struct rbi_run *run = user;
    const rebatch *rb = run->rb;
    if (!run->in_step || !rbi_callback_includes_thread(rb))
        return false;
    run->requests++;
    if (!rbi_callback_may_fail(rb) || !rbi_run_fails(&run->settings, run->requests))
        return false;
    run->injected++;
    run->last_struck = rbi_pool_oom_count(rebatch_get_pool(rb)) + 1;
    say(run); /* a program that does not survive it says nothing any more */
    return true;
}

/* ---- the limit ---- */

static uint64_t share_of(uint64_t bytes, uint32_t permille)
{
    return bytes / 1000 * permille + bytes % 1000 * permille / 1000;
}

/* What the pool can hold at the most as things are, of limit and device. */
static rebatch_status find_whole_limit(struct rbi_run *run)
{
    rebatch_memory_info memory;
    rebatch_device *device = rbi_session_device(run->rb);
    const rebatch_status status = rebatch_device_memory(device, &memory);
    if (status)
        return status;
    const rebatch_pool_options *pool = &rbi_session_options(run->rb)->pool;
    uint64_t whole = memory.total_bytes;
    if (pool->limit_permille && memory.total_bytes != REBATCH_UNLIMITED)
        whole = share_of(memory.total_bytes, pool->limit_permille);
    if (pool->limit_bytes && pool->limit_bytes < whole)
        whole = pool->limit_bytes;
    if (whole == REBATCH_UNLIMITED)
        return rbi_error(REBATCH_E_INVALID,
                         "%s is set, and %s has no limit to take a share of: expected one, "
                         "REBATCH_MEMORY_LIMIT",
                         rbi_run_variables[RBI_RUN_SHRINK], rebatch_device_name(device));
    run->whole_limit_bytes = whole;
    return REBATCH_OK;
}

static void shrink(struct rbi_run *run)
{
    const struct rbi_run_settings *settings = &run->settings;
    const size_t first = run->next_shrink;
    while (run->next_shrink < settings->shrink_count &&
           settings->shrinks[run->next_shrink].step <= rbi_session_step(run->rb))
        run->next_shrink++;
    if (run->next_shrink == first)
        return;
    const uint32_t permille = settings->shrinks[run->next_shrink - 1].permille;
    (void)rebatch_pool_set_limit(rebatch_get_pool(run->rb),
                                 (size_t)rbi_max(share_of(run->whole_limit_bytes, permille), 1));
}

/* ---- what came of it ---- */

static bool is_asked(const struct rbi_run *run)
{
    return run->settings.oom || run->settings.chance > 0 || run->settings.shrink_count;
}

static void add_summary(struct rbi_text *t, const struct rbi_run *run)
{
    const double share =
        run->samples ? 100 * (double)run->redone_samples / (double)run->samples : 0;
    rbi_text_add(t, "%" PRIu64 " failure%s injected, %" PRIu64 " survived", run->injected,
                 run->injected == 1 ? "" : "s", run->survived);
    if (run->injected == 0 && (run->settings.oom || run->settings.chance > 0))
        rbi_text_add(t, " (callbacks made %" PRIu64 " requests)", run->requests);
    rbi_text_add(t, "; %" PRIu64 " OOM%s in all, ", run->ooms, run->ooms == 1 ? "" : "s");
    if (run->steps == 0) {
        rbi_text_add(t, "%.1f ms lost; no step was completed", (double)run->lost_ns / 1e6);
        return;
    }
    rbi_text_add(t, "%.1f%% of the samples ran again, %.1f ms lost; %" PRIu64 " step%s", share,
                 (double)run->lost_ns / 1e6, run->steps, run->steps == 1 ? "" : "s");
}

static void say(const struct rbi_run *run)
{
    char text[320];
    struct rbi_text t = {text, sizeof text, 0};
    if (run->settings.report < 0)
        return;
    rbi_text_add(&t, "run %ld-%p ", (long)getpid(), (const void *)run);
    add_summary(&t, run);
    (void)rbi_report_send(run, text, rbi_min(t.length, sizeof text - 1));
}

rebatch_status rbi_inject_begin(struct rbi_run *run)
{
    return run->settings.shrink_count ? find_whole_limit(run) : REBATCH_OK;
}

/* Sessions may share a pool, so requests fail in the session's own steps alone. */
static void begin_failing(struct rbi_run *run)
{
    const struct rbi_pool_fault own = {.strikes = strikes, .user = run};
    if (run->settings.oom || run->settings.chance > 0)
        run->outer_fault = rbi_pool_set_fault(rebatch_get_pool(run->rb), &own);
}

static void end_failing(struct rbi_run *run)
{
    if (run->settings.oom || run->settings.chance > 0)
        (void)rbi_pool_set_fault(rebatch_get_pool(run->rb), &run->outer_fault);
}

void rbi_inject_step_begins(struct rbi_run *run)
{
    run->in_step = true;
    run->injected_before = run->injected;
    begin_failing(run);
    shrink(run);
}

void rbi_inject_step_ended(struct rbi_run *run, const rebatch_step_report *report)
{
    run->in_step = false;
    end_failing(run);
    run->redone_samples += report->redone_samples;
    run->lost_ns += report->lost_ns;
    run->ooms += report->ooms;
    if (report->status == REBATCH_OK) {
        run->survived += run->injected - run->injected_before;
        run->samples += rbi_session_batch(run->rb);
        run->steps++;
    }
    say(run);
}

void rbi_inject_map_ended(struct rbi_run *run, const rebatch_step_report *report)
{
    run->ooms += report->ooms;
    run->lost_ns += report->lost_ns;
    if (run->has_begun)
        say(run);
}

void rbi_inject_end(const struct rbi_run *run)
{
    char text[352];
    struct rbi_text t = {text, sizeof text, 0};
    if (run->settings.report >= 0 || !run->rb || !is_asked(run))
        return;
    rbi_text_add(&t, "rebatch run: ");
    add_summary(&t, run);
    rbi_text_add(&t, "\n");
    (void)rbi_write_all(STDERR_FILENO, text, rbi_min(t.length, sizeof text - 1));
}
