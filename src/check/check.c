/* Owns rebatch_check(): its options, the order of the runs, and what is left of them.
 * Must not know what a run shows. */
#include <math.h>

#include "check/check.h"

#define DEFAULT_MOST_OOMS 100
#define DEFAULT_MAX_SECONDS 300

/* ---- the runs ---- */

static void was_cleared(void *user)
{
    struct rbi_check *c = user;
    if (c->is_first)
        (void)rbi_values_read(&c->other, &c->items);
}

/* A thread that allocates and frees in at least nine of ten callbacks works for them. */
static void find_helper(struct rbi_check *c)
{
    if (c->stale.helped == 0 || c->stale.helped * 10 < c->injection.succeeded * 9)
        return;
    rbi_finding_add_block(c->report, REBATCH_FINDING_THREAD,
                          "another thread allocates and frees memory beside ",
                          &c->stale.helpers.place, c->stale.helpers.bytes,
                          ": what it allocates is not taken back when the attempt fails; call "
                          "rebatch_join() in that thread");
}

static rebatch_status run_all(struct rbi_check *c, size_t batch)
{
    bool is_there = false;
    rebatch_status status = rbi_ooms_run_resizes(c, batch);
    if (!status)
        status = rbi_reference_run(c, batch, &is_there);
    if (status || !is_there)
        return status;
    status = rbi_reference_run_again(c);
    if (!status)
        status = rbi_fill_run(c);
    if (!status)
        status = rbi_cuts_run(c);
    if (!status)
        status = rbi_ooms_run(c);
    if (!status)
        status = rbi_cuts_run_twice(c);
    return status ? status : rbi_update_check(c);
}

/* ---- beginning and end ---- */

static void release(struct rbi_check *c)
{
    struct rbi_values *const all[] = {&c->before, &c->reference, &c->now, &c->other, &c->replayed};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        rbi_values_close(all[i]);
    rbi_items_release(&c->items);
    rbi_older_close(&c->blocks);
    rbi_trend_release(&c->trend);
    rbi_parts_release(&c->whole);
    rbi_parts_release(&c->ran);
    rbi_parts_release(&c->replayed_parts);
    rbi_parts_release(&c->injection.done);
}

static rebatch_status run_dry_step(struct rbi_check *c, const rebatch_step_ops *ops, size_t batch,
                                   void *user)
{
    struct rbi_dry_step dry_step;
    const struct rbi_dry_step_watch watch = rbi_injection_watch(&c->injection);
    rebatch_status status = rbi_dry_step_begin(&dry_step, c->rb, ops, batch, user, &watch);
    if (status)
        return status;
    const struct rbi_pool_fault before = rbi_pool_set_fault(
        c->pool, &(struct rbi_pool_fault){.strikes = rbi_injection_fails, .user = &c->injection});
    rbi_fill_set(c, 0, 0);
    rbi_stale_begin(&c->stale, &c->injection);
    status = rbi_older_open(&c->blocks, &c->items);
    rbi_ending_watch(c);
    if (!status)
        status = run_all(c, batch);
    rbi_ending_leave(c);
    find_helper(c);
    rbi_compare_end(c);
    rbi_stale_end(&c->stale);
    rbi_pool_set_fill(c->pool, &(struct rbi_pool_fill){.is_on = false});
    (void)rbi_pool_set_fault(c->pool, &before);
    rbi_dry_step_end(&dry_step, c->rb);
    return status;
}

static rebatch_status check(struct rbi_check *c, const rebatch_step_ops *ops, size_t batch,
                            void *user)
{
    const uint64_t began = rbi_now_ns();
    const struct rbi_watched *watched;
    c->pool = rebatch_get_pool(c->rb);
    c->began_ns = began;
    c->deadline_ns = began + c->options.max_seconds * UINT64_C(1000000000);
    c->report->watched = (uint32_t)rbi_watched_get(&watched, c->rb);
    c->items.rb = c->rb;
    c->items.stale = &c->stale;
    c->blocks.rb = c->rb;
    c->injection = (struct rbi_injection){.rb = c->rb,
                                          .attempt_begins = rbi_ooms_save_attempt,
                                          .was_taken_back = rbi_ooms_was_taken_back,
                                          .was_cleared = was_cleared,
                                          .user = c};
    rebatch_status status = rbi_items_add_names(&c->items);
    if (!status)
        status = rbi_check_open_values(c);
    if (!status)
        status = run_dry_step(c, ops, batch, user);
    release(c);
    c->report->seconds = 1e-9 * (double)(rbi_now_ns() - began);
    return status;
}

/* ---- the call ---- */

static rebatch_status read_options(rebatch_check_options *out, const rebatch_check_options *given)
{
    *out = (rebatch_check_options)REBATCH_CHECK_OPTIONS_INIT;
    rebatch_status status =
        rbi_options_copy(out, sizeof *out, RBI_SIZE_TO(rebatch_check_options, exact), given,
                         "rebatch_check_options");
    if (!status)
        status = rbi_check_toggle(out->exact, "exact");
    if (!status && !(out->tolerance >= 0 && isfinite(out->tolerance)))
        return rbi_error(REBATCH_E_INVALID, "tolerance is %g: expected at least 0", out->tolerance);
    if (out->most_ooms == 0)
        out->most_ooms = DEFAULT_MOST_OOMS;
    if (out->max_seconds == 0)
        out->max_seconds = DEFAULT_MAX_SECONDS;
    return status;
}

static rebatch_status say(const rebatch_check_report *report)
{
    for (size_t i = 0; i < report->finding_count; i++)
        if (report->findings[i].is_mistake)
            return rbi_error(REBATCH_E_STATE, "%s", report->findings[i].text);
    return REBATCH_OK;
}

rebatch_status rebatch_check(rebatch *rb, const rebatch_step_ops *ops, size_t batch, void *user,
                             const rebatch_check_options *options, rebatch_check_report *report)
{
    rebatch_check_report *own = rbi_heap_calloc(1, sizeof *own);
    struct rbi_check *c = rbi_heap_calloc(1, sizeof *c);
    rebatch_step_ops table;
    rebatch_status status =
        own && c ? REBATCH_OK : rbi_error(REBATCH_E_HOST_OOM, "no host memory for a check");
    if (!status)
        status = rbi_step_check(&table, rb, ops, batch, "rebatch_check");
    if (!status)
        status = rbi_session_check_reclaims(rb, "rebatch_check");
    if (!status)
        status = rbi_session_check_alone(rb, "rebatch_check");
    if (!status)
        status = read_options(&c->options, options);
    if (!status) {
        table.lighten = NULL;
        c->has_own_weights = (table.flags & REBATCH_OWN_WEIGHTS) != 0;
        c->has_resize = table.resize != NULL;
        c->rb = rb;
        c->report = own;
        status = check(c, &table, batch, user);
    }
    if (!status)
        status = say(own);
    if (own)
        own->status = status;
    if (report)
        *report = own ? *own : (rebatch_check_report){.status = status};
    rbi_heap_free(own);
    rbi_heap_free(c);
    return status;
}
