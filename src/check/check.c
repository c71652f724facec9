/* Owns rebatch_check(): which runs of a step are made, and what each of them shows.
 * Must not know how a run is made. */
#include <inttypes.h>
#include <math.h>

#include "check/check.h"

#define DEFAULT_MOST_OOMS 100
#define DEFAULT_MAX_SECONDS 300

struct check {
    rebatch *rb;
    rebatch_pool *pool;
    rebatch_check_options options;
    rebatch_check_report *report;
    struct rbi_findings findings;
    struct rbi_strike_plan plan;
    struct rbi_stale stale;
    struct rbi_values before;    /* the check */
    struct rbi_values reference; /* after the first run */
    struct rbi_values now;       /* after this one */
    struct rbi_values attempt;   /* before the attempt that failed */
    size_t base;                 /* the largest size that fits */
    uint64_t deadline_ns;
};

/* ---- a run ---- */

static rebatch_status run(struct check *c, size_t size, uint64_t fails_at, size_t *ran)
{
    c->report->runs++;
    rbi_strike_begin(&c->plan, fails_at);
    rebatch_status status = rbi_drill_run(c->rb, size, ran);
    if (!status)
        status = rbi_values_read(&c->now, c->rb);
    return status;
}

/* Who writes to memory that was taken back. */
static void find_stale(struct check *c)
{
    struct rbi_stale_block block;
    if (rbi_finding_has(&c->findings, REBATCH_FINDING_STALE, NULL) ||
        !rbi_stale_find(&block, &c->stale))
        return;
    char which[160];
    struct rbi_text t = {which, sizeof which, 0};
    rbi_place_add(&t, &block.place, block.bytes);
    rbi_finding_add(&c->findings, REBATCH_FINDING_STALE, "",
                    "the memory of %s is written after it was taken back: its pointer is kept "
                    "across attempts; assign it again in each attempt, or guard it",
                    which);
}

static rebatch_status take_back(struct check *c)
{
    find_stale(c);
    const rebatch_status status = rbi_drill_undo(c->rb);
    rbi_stale_take_back(&c->stale, true);
    return status;
}

static rebatch_status undo(struct check *c)
{
    const rebatch_status status = take_back(c);
    const rebatch_status written = rbi_values_write(&c->before, c->rb);
    return status ? status : written;
}

static bool has_time(struct check *c)
{
    c->report->is_cut_short |= rbi_now_ns() > c->deadline_ns;
    return !c->report->is_cut_short;
}

/* Nothing that is compared later would tell more of that name. */
static bool is_settled(const struct check *c, const char *name)
{
    static const rebatch_finding_kind kinds[] = {REBATCH_FINDING_NOT_REPEATABLE,
                                                 REBATCH_FINDING_NOT_CLEARED, REBATCH_FINDING_FREED,
                                                 REBATCH_FINDING_EARLY, REBATCH_FINDING_AFTER_OOM};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (rbi_finding_has(&c->findings, kinds[i], name))
            return true;
    return false;
}

/* What is watched and differs from the first run, by more than rounding, gets a finding: "NAME
 * differs WHEN: element 3 is 0.5 and was 0.25; ADVICE". */
static void compare(struct check *c, rebatch_finding_kind kind, const char *when,
                    const char *advice)
{
    const struct rbi_watched *watched;
    const size_t count = rbi_watched_get(&watched, c->rb);
    for (size_t i = 0; i < count; i++) {
        const struct rbi_difference difference =
            rbi_values_compare(&watched[i], c->reference.copies[i], c->now.copies[i]);
        if (is_settled(c, watched[i].name) ||
            !rbi_finding_is_wrong(&c->findings, &watched[i], &difference))
            continue;
        char values[128];
        struct rbi_text t = {values, sizeof values, 0};
        rbi_finding_add_values(&t, &watched[i], &difference);
        rbi_finding_add(&c->findings, kind, watched[i].name, "\"%s\" differs %s: %s; %s",
                        watched[i].name, when, values, advice);
    }
}

static void note_rounding(struct check *c, const char *when)
{
    const struct rbi_watched *watched;
    const size_t count = rbi_watched_get(&watched, c->rb);
    for (size_t i = 0; i < count; i++) {
        const struct rbi_difference difference =
            rbi_values_compare(&watched[i], c->reference.copies[i], c->now.copies[i]);
        if (!difference.differs || rbi_finding_is_wrong(&c->findings, &watched[i], &difference) ||
            rbi_finding_has(&c->findings, REBATCH_FINDING_ROUNDING, watched[i].name))
            continue;
        rbi_finding_add(&c->findings, REBATCH_FINDING_ROUNDING, watched[i].name,
                        "\"%s\" differs by rounding %s: by %.1e of its largest value at most",
                        watched[i].name, when, difference.largest);
    }
}

/* ---- the first runs ---- */

/* The step ends where it should not. */
static rebatch_status fail(struct check *c, const char *when, rebatch_status status)
{
    if (status == REBATCH_E_DEVICE_LOST || status == REBATCH_E_HOST_OOM)
        return status;
    rbi_finding_add(&c->findings, REBATCH_FINDING_FAILED, "", "the step returned %s %s: %s",
                    rebatch_status_name(status), when, rebatch_last_error());
    return REBATCH_OK;
}

/* A run without an OOM, to compare with. *is_there stays false when the step fails. */
static rebatch_status run_first(struct check *c, size_t batch, bool *is_there)
{
    size_t ran = 0;
    c->base = batch;
    for (;;) {
        const uint64_t ooms = rbi_pool_oom_count(c->pool);
        rebatch_status status = run(c, c->base, 0, &ran);
        const bool is_whole = !status && rbi_pool_oom_count(c->pool) == ooms;
        if (is_whole)
            status = rbi_values_read(&c->reference, c->rb);
        const rebatch_status undone = undo(c);
        if (status == REBATCH_E_EXHAUSTED)
            return status;
        if (status)
            return fail(c, "when nothing was made to fail", status);
        if (undone)
            return undone;
        *is_there = is_whole;
        c->report->allocations = c->plan.requests;
        c->report->micro = c->report->micro_smallest = ran;
        if (is_whole || ran >= c->base) /* what fails at the same size fails for ever */
            return REBATCH_OK;
        c->base = ran;
    }
}

static rebatch_status run_again(struct check *c)
{
    size_t ran;
    rebatch_status status = run(c, c->base, 0, &ran);
    if (!status) {
        compare(c, REBATCH_FINDING_NOT_REPEATABLE, "when the same samples run twice",
                "guard or watch what changes in between, such as RNG state, or make the arithmetic "
                "deterministic");
        note_rounding(c, "when the same samples run twice");
    }
    /* As when a batch runs again: what is not guarded stays. */
    const rebatch_status undone = take_back(c);
    if (!status)
        status = undone;
    if (!status)
        status = run(c, c->base, 0, &ran);
    if (!status)
        compare(c, REBATCH_FINDING_NOT_CLEARED, "when the batch runs again from zero_grad",
                "clear it in zero_grad, or guard it");
    const rebatch_status restored = undo(c);
    return status ? fail(c, "when it ran a second time", status) : restored;
}

/* NaN as float, double and bfloat16. */
#define NO_NUMBER 0xff

static void fill(const struct check *c, uint8_t freed, uint8_t allocated)
{
    rbi_pool_set_fill(c->pool, &(struct rbi_pool_fill){true, freed, allocated});
}

/* Freed and new memory has been 0 until here. */
static rebatch_status run_filled(struct check *c)
{
    static const struct {
        uint8_t freed, allocated;
        rebatch_finding_kind kind;
        const char *when, *advice;
    } runs[] = {
        {NO_NUMBER, 0, REBATCH_FINDING_FREED, "when freed memory is overwritten",
         "a pointer is used after its memory was freed"},
        {0, NO_NUMBER, REBATCH_FINDING_UNINITIALIZED, "when new memory is not 0",
         "memory is read that was allocated and not written"},
    };
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < sizeof runs / sizeof *runs && !status && has_time(c); i++) {
        size_t ran;
        fill(c, runs[i].freed, runs[i].allocated);
        status = run(c, c->base, 0, &ran);
        if (!status)
            compare(c, runs[i].kind, runs[i].when, runs[i].advice);
        else
            status = fail(c, runs[i].when, status);
        const rebatch_status undone = undo(c);
        status = status ? status : undone;
    }
    fill(c, 0, 0);
    return status;
}

/* ---- other cuts ---- */

static rebatch_status run_cut(struct check *c, size_t size)
{
    char when[96];
    size_t ran;
    struct rbi_text t = {when, sizeof when, 0};
    rbi_text_add(&t, "with micro-batches of %zu sample%s instead of %zu", size,
                 size == 1 ? "" : "s", c->base);
    rebatch_status status = run(c, size, 0, &ran);
    if (!status) {
        compare(c, REBATCH_FINDING_CUT, when,
                "a sample's weight is 1/batch, its place is first + i, and neither depends on "
                "count");
        note_rounding(c, when);
        c->report->micro_smallest = rbi_min(c->report->micro_smallest, ran);
    } else {
        status = fail(c, when, status);
    }
    const rebatch_status undone = undo(c);
    return status ? status : undone;
}

static rebatch_status run_cuts(struct check *c)
{
    const size_t sizes[] = {c->base / 2 + c->base % 2, c->base / 3 + 1, c->base / 8};
    size_t before = c->base;
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes && !status && has_time(c); i++) {
        const size_t size = rbi_round_size(rbi_session_options(c->rb), sizes[i]);
        if (size == 0 || size >= before)
            continue;
        before = size;
        status = run_cut(c, size);
    }
    return status;
}

/* One note for all names. What is guarded is a state, not a sum over the batch. */
static void note_weights(struct check *c)
{
    char names[160];
    struct rbi_text t = {names, sizeof names, 0};
    const struct rbi_watched *watched;
    const size_t count = rbi_watched_get(&watched, c->rb);
    for (size_t i = 0; i < count; i++)
        if (!is_settled(c, watched[i].name) && !rbi_guards_hold(c->rb, watched[i].pointer) &&
            rbi_values_doubled(&watched[i], c->reference.copies[i], c->now.copies[i]))
            rbi_text_add(&t, "%s\"%s\"", t.length ? ", " : "", watched[i].name);
    if (t.length)
        rbi_finding_add(&c->findings, REBATCH_FINDING_WEIGHT, "",
                        "twice as large when the samples come twice, in a batch of twice the size: "
                        "%s; weight a sample by 1/batch, or set REBATCH_OWN_WEIGHTS if its weight "
                        "is of the whole effective batch already, such as 1/tokens",
                        names);
}

static rebatch_status run_twice(struct check *c, const rebatch_step_ops *ops)
{
    if ((ops->flags & REBATCH_OWN_WEIGHTS) || !has_time(c))
        return REBATCH_OK;
    c->report->runs++;
    rbi_strike_begin(&c->plan, 0);
    rebatch_status status = rbi_drill_run_twice(c->rb, c->base);
    if (status == REBATCH_E_DEVICE_LOST)
        return status;
    if (!status && rbi_values_read(&c->now, c->rb) == REBATCH_OK)
        note_weights(c);
    return undo(c);
}

/* ---- an OOM at each allocation ---- */

static void save_attempt(void *user)
{
    struct check *c = user;
    if (c->plan.fails_at)
        (void)rbi_values_read(&c->attempt, c->rb);
}

/* Guards have restored what they know. */
static void compare_attempt(struct check *c)
{
    const struct rbi_watched *watched;
    const size_t count = rbi_watched_get(&watched, c->rb);
    if (rbi_values_read(&c->now, c->rb))
        return;
    for (size_t i = 0; i < count; i++) {
        const struct rbi_difference difference =
            rbi_values_compare(&watched[i], c->attempt.copies[i], c->now.copies[i]);
        if (!difference.differs || is_settled(c, watched[i].name))
            continue;
        char where[160];
        struct rbi_text t = {where, sizeof where, 0};
        rbi_place_add(&t, &c->plan.struck, c->plan.struck_bytes);
        rbi_finding_add(
            &c->findings, REBATCH_FINDING_EARLY, watched[i].name,
            "\"%s\" had changed when %s failed, before rebatch_mutating(): call it before "
            "the change, or guard it",
            watched[i].name, where);
    }
}

static void was_taken_back(void *user)
{
    struct check *c = user;
    const rebatch_phase phase = rbi_session_failure(c->rb)->phase;
    const bool is_clean = phase == REBATCH_PHASE_FORWARD;
    rbi_stale_take_back(&c->stale, phase == REBATCH_PHASE_BACKWARD);
    if (is_clean && c->plan.has_struck && c->plan.struck.serial == c->plan.place.serial)
        compare_attempt(c);
}

static bool holds_no_number(const struct check *c)
{
    const struct rbi_watched *watched;
    const size_t count = rbi_watched_get(&watched, c->rb);
    for (size_t i = 0; i < count; i++) {
        const struct rbi_difference difference =
            rbi_values_compare(&watched[i], c->reference.copies[i], c->now.copies[i]);
        if (difference.differs && isnan(difference.is) && !isnan(difference.was))
            return true;
    }
    return false;
}

/* What a run with an OOM shows. */
static rebatch_status judge(struct check *c, rebatch_status status)
{
    char when[224];
    struct rbi_text t = {when, sizeof when, 0};
    rbi_text_add(&t, "after ");
    rbi_place_add(&t, &c->plan.struck, c->plan.struck_bytes);
    rbi_text_add(&t, " failed");
    if (c->plan.was_swallowed)
        rbi_text_add(&t, ", for which the callback returned REBATCH_OK");
    if (status)
        return fail(c, when, status);
    const uint32_t mistakes = c->report->mistakes;
    compare(c, REBATCH_FINDING_AFTER_OOM, when,
            c->plan.was_swallowed ? "return the status of the allocation"
            : holds_no_number(c)
                ? "memory that was taken back is used: assign the pointer again in each attempt, "
                  "or guard it"
                : "the failed attempt has changed what is not guarded, or a pointer to memory that "
                  "was taken back is used");
    if (c->plan.was_swallowed && c->report->mistakes == mistakes &&
        !rbi_finding_has(&c->findings, REBATCH_FINDING_COPED, ""))
        rbi_finding_add(&c->findings, REBATCH_FINDING_COPED, "",
                        "a callback returned REBATCH_OK %s, and the result is right: no mistake if "
                        "it copes with less memory",
                        when);
    return REBATCH_OK;
}

static rebatch_status run_with_oom(struct check *c, uint64_t fails_at)
{
    size_t ran;
    rebatch_status status = run(c, c->base, fails_at, &ran);
    if (c->plan.has_struck) {
        c->report->ooms++;
        c->report->micro_smallest =
            status ? c->report->micro_smallest : rbi_min(c->report->micro_smallest, ran);
        status = judge(c, status);
    } else if (status) {
        status = fail(c, "when nothing was made to fail", status);
    }
    const rebatch_status undone = undo(c);
    return status ? status : undone;
}

static rebatch_status run_ooms(struct check *c)
{
    const uint64_t all = c->report->allocations;
    const uint64_t most = c->options.most_ooms < all ? c->options.most_ooms : all;
    rebatch_status status = REBATCH_OK;
    fill(c, NO_NUMBER,
         rbi_finding_has(&c->findings, REBATCH_FINDING_UNINITIALIZED, NULL) ? 0 : NO_NUMBER);
    for (uint64_t i = 0; i < most && !status && has_time(c); i++)
        status = run_with_oom(c, 1 + (most > 1 ? i * (all - 1) / (most - 1) : 0));
    fill(c, 0, 0);
    return status;
}

/* ---- the check ---- */

static rebatch_status run_all(struct check *c, const rebatch_step_ops *ops, size_t batch)
{
    bool is_there = false;
    rebatch_status status = rbi_values_read(&c->before, c->rb);
    if (!status)
        status = run_first(c, batch, &is_there);
    if (status || !is_there)
        return status;
    status = run_again(c);
    if (!status)
        status = run_filled(c);
    if (!status)
        status = run_cuts(c);
    if (!status)
        status = run_ooms(c);
    return status ? status : run_twice(c, ops);
}

static rebatch_status open_values(struct check *c)
{
    rebatch_status status = rbi_values_open(&c->before, c->rb);
    if (!status)
        status = rbi_values_open(&c->reference, c->rb);
    if (!status)
        status = rbi_values_open(&c->now, c->rb);
    return status ? status : rbi_values_open(&c->attempt, c->rb);
}

static void close_values(struct check *c)
{
    rbi_values_close(&c->before, c->rb);
    rbi_values_close(&c->reference, c->rb);
    rbi_values_close(&c->now, c->rb);
    rbi_values_close(&c->attempt, c->rb);
}

static rebatch_status check(struct check *c, const rebatch_step_ops *ops, size_t batch, void *user)
{
    struct rbi_drill drill;
    c->plan = (struct rbi_strike_plan){
        .rb = c->rb, .attempt_begins = save_attempt, .was_taken_back = was_taken_back, .user = c};
    const struct rbi_drill_watch watch = rbi_strike_watch(&c->plan);
    rebatch_status status = open_values(c);
    if (!status)
        status = rbi_drill_begin(&drill, c->rb, ops, batch, user, &watch);
    if (!status) {
        const struct rbi_pool_fault before = rbi_pool_set_fault(
            c->pool, &(struct rbi_pool_fault){.strikes = rbi_strike_asked, .user = &c->plan});
        fill(c, 0, 0);
        rbi_stale_begin(&c->stale, &c->plan);
        status = run_all(c, ops, batch);
        rbi_stale_end(&c->stale);
        rbi_pool_set_fill(c->pool, &(struct rbi_pool_fill){.is_on = false});
        (void)rbi_pool_set_fault(c->pool, &before);
        rbi_drill_end(&drill, c->rb);
    }
    close_values(c);
    return status;
}

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
    struct check c = {.rb = rb, .report = own};
    rebatch_step_ops table;
    rebatch_status status =
        own ? REBATCH_OK : rbi_error(REBATCH_E_HOST_OOM, "no host memory for a check");
    if (!status)
        status = rbi_step_check(&table, rb, ops, batch, "rebatch_check");
    if (!status)
        status = rbi_session_check_reclaims(rb, "rebatch_check");
    if (!status)
        status = read_options(&c.options, options);
    if (!status) {
        const struct rbi_watched *watched;
        const uint64_t began = rbi_now_ns();
        c.pool = rebatch_get_pool(rb);
        c.findings = (struct rbi_findings){own, &c.options};
        c.deadline_ns = began + c.options.max_seconds * UINT64_C(1000000000);
        own->watched = (uint32_t)rbi_watched_get(&watched, rb);
        if (own->watched == 0)
            rbi_finding_add(&c.findings, REBATCH_FINDING_UNWATCHED, "",
                            "nothing is watched, so no result was compared: name the gradients and "
                            "the loss with rebatch_watch()");
        status = check(&c, &table, batch, user);
        own->seconds = 1e-9 * (double)(rbi_now_ns() - began);
    }
    if (!status)
        status = say(own);
    if (own)
        own->status = status;
    if (report)
        *report = own ? *own : (rebatch_check_report){.status = status};
    rbi_heap_free(own);
    return status;
}
