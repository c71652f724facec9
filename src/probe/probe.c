/* Owns rebatch_probe(): trials in a session that leave no trace in its training state.
 * Must not know which size is tried next. */
#include "probe/probe.h"
#include "pool/view.h"
#include "probe/saved.h"
#include "recover/interface.h"

#define DEFAULT_MAX_TRIALS 5

const char *rebatch_confidence_text(rebatch_confidence confidence)
{
    static const char *const texts[] = {
#define TEXT(name, text) text,
        REBATCH_CONFIDENCES(TEXT)
#undef TEXT
    };
    return (size_t)confidence < sizeof texts / sizeof *texts ? texts[confidence]
                                                             : "no such confidence";
}

const char *rebatch_saved_size_text(rebatch_saved_size saved)
{
    static const char *const texts[] = {
#define TEXT(name, text) text,
        REBATCH_SAVED_SIZES(TEXT)
#undef TEXT
    };
    return (size_t)saved < sizeof texts / sizeof *texts ? texts[saved] : "no such answer";
}

/* ---- a trial ---- */

static void report_trial(const rebatch *rb, size_t count, rebatch_status status,
                         uint64_t peak_bytes)
{
    rebatch_event event = {.kind = REBATCH_EVENT_TRIAL,
                           .phase = REBATCH_PHASE_FORWARD,
                           .count = count,
                           .batch = rbi_session_batch(rb),
                           .peak_bytes = peak_bytes};
    if (status) {
        const struct rbi_failure *failure = rbi_session_failure(rb);
        event.phase = failure->phase;
        event.peak_bytes = 0;
        event.asked_bytes = failure->asked_bytes;
        event.needed_bytes = failure->need_bytes;
        event.available_bytes = failure->available_bytes;
    }
    rbi_event_emit(rb, &event);
}

void rbi_probe_note_need(struct rbi_trace *trace, const rebatch *rb, rebatch_status status)
{
    const struct rbi_failure *failure = rbi_session_failure(rb);
    const struct rbi_need *need = rbi_need_find(rb, trace->count, rbi_session_level(rb));
    trace->is_whole = status == REBATCH_OK;
    if (trace->is_whole) {
        trace->peak_bytes = need ? need->added_bytes : 0;
        return;
    }
    trace->peak_bytes = failure->need_bytes;
    if (failure->asked_bytes)
        rbi_trace_add_failure(trace, (size_t)failure->asked_bytes);
}

/* More pointers than that are not guarded. */
#define FORGOTTEN_MOST 1024

/* What a trial has made and a guarded pointer no longer knows. It is held till the next trial,
 * which makes it again, or till the probe ends, so that its memory counts as what a step will
 * keep. */
struct trials {
    rebatch *rb;
    rebatch_pool *pool; /* the session's */
    const struct rbi_setting *setting;
    rebatch_guard_point point; /* what guards are put back to */
    void *forgotten[FORGOTTEN_MOST];
    size_t bytes[FORGOTTEN_MOST];
    size_t count;
};

/* Runs with the pool's lock held. */
static void add_forgotten(void *user, const struct rbi_view_piece *block)
{
    struct trials *trials = user;
    if (trials->count < FORGOTTEN_MOST &&
        rbi_guards_forget(trials->rb, block->address, trials->point)) {
        trials->bytes[trials->count] = block->requested_bytes;
        trials->forgotten[trials->count++] = (void *)(uintptr_t)block->address;
    }
}

static void find_forgotten(struct trials *trials, uint64_t first_sequence)
{
    rbi_view_open(trials->pool);
    rbi_view_each_live(trials->pool, &(struct rbi_extent){first_sequence, true}, add_forgotten,
                       trials);
    rbi_view_close(trials->pool);
}

/* Runs with the pool's lock held. */
static bool is_known(void *user, const void *address)
{
    return rbi_guards_know(user, address);
}

static void free_forgotten(struct trials *trials)
{
    while (trials->count > 0)
        (void)rebatch_pool_free(trials->pool, trials->forgotten[--trials->count]);
}

/* Puts guarded state back after what ran in `scope`, which ends. A block of before that was freed
 * there, and that guards know again, is there again. */
static rebatch_status end_trial(struct trials *trials, rebatch_scope scope, uint64_t first_sequence)
{
    rebatch *rb = trials->rb;
    const bool has_guards = rbi_guards_exist(rb);
    if (has_guards)
        find_forgotten(trials, first_sequence);
    const rebatch_status status = rbi_guards_restore(rb, trials->point);
    if (has_guards)
        rbi_scope_revive(trials->pool, scope, is_known, rb);
    rbi_scope_commit_all(trials->pool, scope);
    return status;
}

/* By cost, the sizes are those of the first samples of the batch, each number that is allowed. */
static size_t samples_of(const rebatch *rb, size_t size)
{
    return rbi_session_is_by_cost(rb) ? rbi_cut_to(rb, 0, size)
                                      : rbi_round_size(rbi_session_options(rb), size);
}

size_t rbi_probe_round(void *limits, size_t size)
{
    const rebatch *rb = limits;
    const size_t count = samples_of(rb, size);
    return count && rbi_session_is_by_cost(rb) ? rbi_size_of(rb, 0, count) : count;
}

size_t rbi_probe_round_up(void *limits, size_t size)
{
    const rebatch *rb = limits;
    const rebatch_options *options = rbi_session_options(rb);
    if (!rbi_session_is_by_cost(rb))
        return rbi_round_size_up(options, size);
    const size_t most = rbi_micro_upper(rb, rbi_session_batch(rb));
    size_t count = rbi_min(rbi_round_size_up(options, 1), most);
    while (rbi_size_of(rb, 0, count) < size) {
        const size_t next = rbi_round_size_up(options, count + 1);
        if (next == 0 || next > most)
            return 0;
        count = next;
    }
    return rbi_size_of(rb, 0, count);
}

/* Runs it, and waits for its work: what fails late fails here, and what it took can be measured. */
static rebatch_status run_callback(rebatch *rb, size_t count, size_t size)
{
    const rebatch_status status = rbi_callback_run_trial(rb, count, size);
    return status ? status
                  : rebatch_stream_synchronize(rbi_session_device(rb),
                                               rbi_session_options(rb)->stream);
}

/* The least may be a batch that is smaller than every allowed size. */
static size_t trial_count(const rebatch *rb, size_t size)
{
    return rbi_session_is_by_cost(rb) ? rbi_max(rbi_cut_to(rb, 0, size), 1) : size;
}

static rebatch_status run_trial(struct rbi_trace *trace, uint64_t *peak_bytes, void *user,
                                size_t size, const struct rbi_trace *before)
{
    struct trials *trials = user;
    rebatch *rb = trials->rb;
    rebatch_pool *pool = trials->pool;
    const size_t count = trial_count(rb, size);
    free_forgotten(trials);
    rbi_resize_release(rb); /* so that the trial's record has buffers of its own alone */
    rebatch_scope scope;
    rebatch_status status = rbi_scope_open(rb, &scope);
    if (status)
        return status;
    const uint64_t sequence = rbi_pool_allocations(pool);
    (void)rbi_pool_mark_peak(pool);
    rbi_trace_begin(trace, pool, size);
    status = run_callback(rb, count, size);
    const rebatch_status ended = rbi_trace_end(trace, pool, before);
    *peak_bytes = rbi_pool_peak_since_mark(pool) + rbi_reserve_missing(trials->setting);
    const rebatch_status restored = end_trial(trials, scope, sequence);
    if (status && status != REBATCH_OOM)
        return status;
    rbi_probe_note_need(trace, rb, status);
    if (status && trace->peak_bytes)
        rbi_need_learn_least(rb, size, trace->peak_bytes);
    report_trial(rb, count, status, *peak_bytes);
    return ended ? ended : restored ? restored : status;
}

/* ---- the probe ---- */

static rebatch_status say_nothing_fits(const rebatch *rb, const char *what, size_t bytes)
{
    char text[256];
    struct rbi_text t = {text, sizeof text, 0};
    rbi_text_add(&t, "nothing fits: out of memory in %s", what);
    if (bytes) {
        rbi_text_add(&t, ", which needs ");
        rbi_text_add_bytes(&t, bytes);
    }
    size_t available = 0;
    (void)rebatch_pool_available(&available, rebatch_get_pool(rb));
    rbi_text_add(&t, ", with ");
    rbi_text_add_bytes(&t, available);
    rbi_text_add(&t, " available: free memory, or raise the limit");
    return rbi_error(REBATCH_E_EXHAUSTED, "%s", text);
}

/* Tells a need of memory that cannot be met from other failures. */
static rebatch_status judge(const rebatch *rb, rebatch_status status, const char *what,
                            size_t bytes)
{
    return status == REBATCH_OOM ? say_nothing_fits(rb, what, bytes) : status;
}

static rebatch_status zero_grad(rebatch *rb)
{
    rebatch_status status = rbi_resize_ready(rb);
    if (!status)
        status = rbi_guards_save(rb, REBATCH_GUARD_ATTEMPT);
    if (status)
        return judge(rb, status, "resize", 0);
    status = rbi_callback_run(rb, RBI_ZERO_GRAD, NULL);
    if (status)
        (void)rbi_guards_restore(rb, REBATCH_GUARD_ATTEMPT);
    return judge(rb, status, "zero_grad", 0);
}

/* Accumulators are zeroed as well when nothing fits; after any other failure the callbacks are not
 * to be trusted. */
static rebatch_status search_with_reserve(struct rbi_search *search, rebatch *rb,
                                          size_t reserve_bytes)
{
    rebatch_status status = rbi_search_run(search);
    if (status == REBATCH_OOM)
        status = say_nothing_fits(rb, "reserve_bytes", reserve_bytes);
    else if (status == REBATCH_E_EXHAUSTED)
        status = say_nothing_fits(rb, "forward_backward of the smallest micro-batch",
                                  (size_t)rbi_session_failure(rb)->need_bytes);
    if (status && status != REBATCH_E_EXHAUSTED)
        return status;
    const rebatch_status zeroed = zero_grad(rb);
    return status ? status : zeroed;
}

/* Where nothing is taken back, the first micro-batch makes what later ones find, such as gradients:
 * they are what is to be predicted. */
static rebatch_status warm_up(const struct rbi_search *search, rebatch *rb)
{
    if (rbi_is_on(rbi_session_options(rb)->reclaim))
        return REBATCH_OK;
    const rebatch_status status = run_callback(rb, trial_count(rb, search->least), search->least);
    return judge(rb, status, "forward_backward of the smallest micro-batch", 0);
}

/* Trials begin as micro-batches do, after zero_grad, and each leaves guarded state as that did. */
static rebatch_status search_sizes(struct rbi_search *search, rebatch *rb, size_t reserve_bytes)
{
    struct rbi_setting *const setting = &search->setting;
    rebatch_status status = zero_grad(rb);
    if (!status)
        status = warm_up(search, rb);
    if (!status)
        status = rbi_guards_save(rb, REBATCH_GUARD_ATTEMPT);
    if (!status)
        status = rbi_pool_clone(&setting->fresh, &setting->fresh_device, setting->pool);
    if (status)
        return status;
    status = rbi_reserve_plan(setting, reserve_bytes);
    if (status)
        return judge(rb, status, "reserve_bytes", reserve_bytes);
    status = search_with_reserve(search, rb, reserve_bytes);
    rbi_reserve_release(setting);
    return status;
}

/* The search between two zero_grads leaves guarded state as it was before the first. What they and
 * the last trial made and a guarded pointer no longer knows is given back, and the next step makes
 * it again. */
static rebatch_status search_and_undo(struct rbi_search *search, struct trials *trials,
                                      size_t reserve_bytes)
{
    rebatch *rb = trials->rb;
    rebatch_scope scope;
    rebatch_status status = rbi_guards_save(rb, REBATCH_GUARD_STEP);
    if (!status)
        status = rbi_scope_open(rb, &scope);
    if (status)
        return status;
    const uint64_t sequence = rbi_pool_allocations(trials->pool);
    status = search_sizes(search, rb, reserve_bytes);
    trials->point = REBATCH_GUARD_STEP;
    const rebatch_status restored = end_trial(trials, scope, sequence);
    rbi_need_set_made(rb, trials->bytes, trials->count);
    free_forgotten(trials);
    return status ? status : restored;
}

static rebatch_status run(struct rbi_search *search, struct trials *trials, size_t reserve_bytes)
{
    rebatch *rb = trials->rb;
    rebatch_status status = rbi_pool_keep_headroom(trials->pool);
    if (!status)
        status = search_and_undo(search, trials, reserve_bytes);
    if (!status && search->whole_count > 1)
        status = rbi_probe_hand_over(rb, &search->model, rbi_session_level(rb),
                                     rbi_session_is_by_cost(rb));
    if (status)
        return status;
    rbi_learn_stop(rb);
    rbi_size_set(rb, search->report.size);
    return REBATCH_OK;
}

static rebatch_status read_options(rebatch_probe_options *out, const rebatch_probe_options *given)
{
    *out = (rebatch_probe_options)REBATCH_PROBE_OPTIONS_INIT;
    const rebatch_status status =
        rbi_options_copy(out, sizeof *out, RBI_SIZE_TO(rebatch_probe_options, choose), given,
                         "rebatch_probe_options");
    if (!status && out->choose != REBATCH_PROBE_LARGEST && out->choose != REBATCH_PROBE_FASTEST)
        return rbi_error(REBATCH_E_INVALID,
                         "choose is %d: expected REBATCH_PROBE_LARGEST or REBATCH_PROBE_FASTEST",
                         (int)out->choose);
    if (out->max_trials == 0)
        out->max_trials =
            DEFAULT_MAX_TRIALS + (out->choose == REBATCH_PROBE_FASTEST ? RBI_TIMED_RUNS : 0);
    return status;
}

static rebatch_status probe(rebatch_probe_report *report, rebatch *rb, size_t batch,
                            const rebatch_probe_options *options)
{
    const size_t most = rbi_micro_upper(rb, batch);
    const size_t least = rbi_min(rbi_round_size_up(rbi_session_options(rb), 1), most);
    struct trials trials = {.rb = rb, .pool = rebatch_get_pool(rb), .point = REBATCH_GUARD_ATTEMPT};
    struct rbi_search search = {.trial = run_trial,
                                .user = &trials,
                                .now = rbi_now_ns,
                                .max_ns = options->max_seconds * UINT64_C(1000000000),
                                .is_fastest = options->choose == REBATCH_PROBE_FASTEST,
                                .setting = rbi_probe_setting(rb, rbi_size_of(rb, 0, least)),
                                .least = rbi_size_of(rb, 0, least),
                                .most = rbi_size_of(rb, 0, most),
                                .batch = rbi_size_of(rb, 0, batch),
                                .round = rbi_probe_round,
                                .round_up = rbi_probe_round_up,
                                .limits = rb,
                                .max_trials = options->max_trials};
    trials.setting = &search.setting;
    struct rbi_saved saved;
    rebatch_status status = rbi_saved_open(&saved, rb, options, search.least, search.most, batch);
    if (status)
        return status;
    if (saved.size)
        search.hint = rbi_probe_round(rb, saved.size);
    search.too_large = saved.too_large;
    status = run(&search, &trials, options->reserve_bytes);
    rbi_step_get_oom(&search.report.oom, rb);
    if (!status)
        rbi_saved_close(&saved, &search.report, search.fails);
    *report = search.report;
    report->saved = saved.state;
    report->saved_size = saved.size;
    rbi_search_release(&search);
    return status;
}

rebatch_status rebatch_probe(rebatch *rb, const rebatch_step_ops *ops, size_t batch, void *user,
                             const rebatch_probe_options *options, rebatch_probe_report *report)
{
    rebatch_probe_report own = {0};
    rebatch_probe_options o;
    rebatch_step_ops table;
    rebatch_status status = rbi_step_check(&table, rb, ops, batch, "rebatch_probe");
    if (!status)
        status = rbi_session_check_records(rb, "rebatch_probe");
    if (!status)
        status = rbi_session_check_alone(rb, "rebatch_probe");
    if (!status)
        status = read_options(&o, options);
    if (!status) {
        rbi_session_probe_begins(rb, &table, batch, user, &o);
        rbi_step_begin(rb, &table, batch, user);
        rbi_step_is_probe(rb);
        status = probe(&own, rb, batch, &o);
        rbi_step_end(rb);
    }
    if (status) /* what was on the way is none that was found */
        own.size = 0;
    own.status = status;
    if (report)
        *report = own;
    return status;
}
