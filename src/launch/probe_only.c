/* Owns the probe that runs instead of the training: whoever starts the program asks for it with
 * REBATCH_PROBE_ONLY. Must not know how a probe searches.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "launch/launch.h"

enum { EXIT_FOUND, EXIT_FAILED, EXIT_NOTHING_FITS = 3 };

/* Some 250 bytes a row. */
#define TEXT_BYTES (64 * 1024)

struct only {
    struct rbi_run *run;
    enum rbi_probe_form form;
    void (*on_event)(const rebatch_event *event, void *user); /* the program's */
    void *on_event_user;
    struct rbi_probe_result result;
    char text[TEXT_BYTES];
    char complaint[4096];
};

/* ---- trials ---- */

static struct rbi_probe_row *row_of(struct rbi_probe_result *result, size_t size)
{
    size_t at = 0;
    while (at < result->row_count && result->rows[at].prediction.size < size)
        at++;
    if (at < result->row_count && result->rows[at].prediction.size == size)
        return &result->rows[at];
    if (result->row_count == RBI_PROBE_ROWS)
        return NULL;
    memmove(&result->rows[at + 1], &result->rows[at],
            (result->row_count - at) * sizeof *result->rows);
    result->row_count++;
    result->rows[at] = (struct rbi_probe_row){.prediction = {.size = size}, .remark = ""};
    return &result->rows[at];
}

static void note_trial(struct only *only, const rebatch_event *event)
{
    struct rbi_probe_row *row = row_of(&only->result, rbi_size_get(only->run->rb));
    if (row && event->peak_bytes) {
        row->ran = true;
        row->measured_bytes = event->peak_bytes;
    } else if (row) {
        row->failed = true;
    }
}

/* Beside a command's object, trials are not said; without a command the program says what it
 * wants to. */
static void on_event(const rebatch_event *event, void *user)
{
    struct only *only = user;
    const bool is_trial = event->kind == REBATCH_EVENT_TRIAL;
    char line[512], said[480];
    struct rbi_text t = {line, sizeof line, 0};
    if (is_trial)
        note_trial(only, event);
    if (only->run->settings.report < 0) {
        if (only->on_event)
            only->on_event(event, only->on_event_user);
        return;
    }
    if (is_trial && only->form == RBI_PROBE_JSON)
        return;
    (void)rebatch_event_format(said, sizeof said, event);
    const char *text = strstr(said, ": ") ? strstr(said, ": ") + 2 : said; /* behind the step */
    rbi_text_add(&t, "rebatch: %s\n", text);
    (void)rbi_write_all(STDERR_FILENO, line, rbi_min(t.length, sizeof line - 1));
}

/* ---- the probe ---- */

/* One micro-batch of the smallest size, and an update, so that what an optimizer makes at its first
 * and keeps is there. A micro-batch that does not fit is the probe's to say. */
static rebatch_status warm_up(rebatch *rb, const rebatch_step_ops *ops, size_t batch, void *user)
{
    rbi_step_begin(rb, ops, batch, user);
    rbi_step_is_probe(rb);
    const size_t most = rbi_micro_upper(rb, batch);
    const size_t least = rbi_min(rbi_round_size_up(rbi_session_options(rb), 1), most);
    rebatch_status status = rbi_resize_ready(rb);
    if (!status)
        status = rbi_callback_run(rb, RBI_ZERO_GRAD, NULL);
    if (!status)
        status = rbi_callback_run_trial(rb, least, rbi_size_of(rb, 0, least));
    if (!status)
        status = rbi_resize_ready(rb);
    if (!status) {
        status = rbi_callback_run(rb, RBI_OPTIMIZER, NULL);
        if (status == REBATCH_OOM)
            status = rbi_error(REBATCH_E_EXHAUSTED,
                               "nothing fits: out of memory in optimizer_step after a micro-batch "
                               "of %zu sample%s: free memory, or raise the limit",
                               least, least == 1 ? "" : "s");
    }
    rbi_step_end(rb);
    return status == REBATCH_OOM ? REBATCH_OK : status;
}

/* What the table has beside the trials: powers of two up to the size found, the next one, the
 * whole batch, and twice the size. */
static void choose_rows(struct rbi_probe_result *result)
{
    const size_t found = result->report.size;
    for (size_t size = 1; size < found && size <= SIZE_MAX / 2; size *= 2)
        (void)row_of(result, size);
    if (found < result->total) {
        (void)row_of(result, found + 1);
        (void)row_of(result, (size_t)result->total);
    }
    (void)row_of(result, 2 * found);
}

/* A limit that no machine reaches is none. */
static uint64_t as_limit(uint64_t bytes)
{
    return bytes >= (uint64_t)1 << 60 ? UINT64_MAX : bytes;
}

static rebatch_status predict_rows(struct rbi_probe_result *result, rebatch *rb,
                                   const rebatch_probe_options *options)
{
    for (size_t i = 0; i < result->row_count; i++) {
        struct rbi_probe_row *row = &result->rows[i];
        const size_t size = row->prediction.size;
        const rebatch_status status =
            rebatch_predict(&row->prediction, rb, size, result->batch, options);
        row->has_prediction = !status;
        if (status == REBATCH_E_STATE) { /* a single size has run: there is no model */
            row->prediction.size = size;
            continue;
        }
        if (status)
            return status;
        result->limit_bytes = as_limit(row->prediction.limit_bytes);
        row->remark = size == result->report.size ? "largest"
                      : row->prediction.fits      ? ""
                                                  : "does not fit";
    }
    return REBATCH_OK;
}

static void describe(struct rbi_probe_result *result, rebatch *rb)
{
    rebatch_memory_info memory;
    size_t available;
    rebatch_pool_stats stats;
    rebatch_device *device = rbi_session_device(rb);
    rebatch_pool *pool = rebatch_get_pool(rb);
    result->device = rebatch_device_name(device);
    result->device_bytes = result->limit_bytes = UINT64_MAX;
    if (rebatch_device_memory(device, &memory) == REBATCH_OK)
        result->device_bytes = as_limit(memory.total_bytes);
    if (rebatch_pool_available(&available, pool) == REBATCH_OK &&
        rebatch_pool_get_stats(&stats, pool) == REBATCH_OK)
        result->limit_bytes = as_limit(available + stats.live_bytes);
}

static rebatch_status probe(struct only *only, const rebatch_step_ops *ops, size_t batch,
                            void *user, const rebatch_probe_options *options)
{
    rebatch *rb = only->run->rb;
    struct rbi_probe_result *result = &only->result;
    result->batch = batch;
    result->by_cost = ops->cost != NULL;
    result->total = ops->cost ? ops->cost(0, batch, user) : batch;
    describe(result, rb);
    const uint64_t began = rbi_now_ns();
    rbi_learn_stop(rb);
    rebatch_status status = options ? REBATCH_OK : warm_up(rb, ops, batch, user);
    if (!status)
        status = rebatch_probe(rb, ops, batch, user, options, &result->report);
    result->seconds = 1e-9 * (double)(rbi_now_ns() - began);
    if (status)
        return status;
    choose_rows(result);
    return predict_rows(result, rb, options);
}

/* ---- what is said ---- */

/* Why nothing was found, and who holds the memory. */
static void complain(struct only *only, bool is_memory)
{
    struct rbi_probe_result *result = &only->result;
    struct rbi_text t = {only->complaint, sizeof only->complaint, 0};
    rbi_text_add(&t, "rebatch: %s\n", result->error);
    if (is_memory && result->report.oom.asked_bytes == 0)
        (void)rebatch_pool_last_oom(&result->report.oom, rebatch_get_pool(only->run->rb));
    if (is_memory && result->report.oom.asked_bytes) {
        char text[2048] = "";
        (void)rebatch_oom_format(text, sizeof text, &result->report.oom);
        rbi_text_add(&t, "%s", text); /* lines, the last one too */
    }
}

/* The exit status. */
static int describe_result(struct only *only)
{
    struct rbi_probe_result *result = &only->result;
    struct rbi_text t = {only->text, sizeof only->text, 0};
    const bool is_memory = result->status == REBATCH_E_EXHAUSTED || result->status == REBATCH_OOM;
    if (result->status)
        complain(only, is_memory);
    if (only->form == RBI_PROBE_JSON)
        rbi_probe_add_json(&t, result);
    else if (!result->status)
        rbi_probe_add_table(&t, result);
    return !result->status ? EXIT_FOUND : is_memory ? EXIT_NOTHING_FITS : EXIT_FAILED;
}

_Noreturn void rbi_only_probe(struct rbi_run *run, const rebatch_step_ops *ops, size_t batch,
                              void *user, const rebatch_probe_options *options)
{
    static struct only only; /* the process ends here: some 150,000 bytes, and one of them */
    const rebatch_options *own = rbi_session_options(run->rb);
    only.run = run;
    only.on_event = own->on_event;
    only.on_event_user = own->on_event_user;
    rbi_event_redirect(run->rb, on_event, &only); /* trials are the table */
    only.form = run->settings.probe;
    run->settings.probe = RBI_PROBE_NONE;
    only.result.status = probe(&only, ops, batch, user, options);
    if (only.result.status) {
        const char *error = rebatch_last_error();
        struct rbi_text t = {only.result.error, sizeof only.result.error, 0};
        if (error[0])
            rbi_text_add(&t, "%s", error);
        else /* the program would have said more */
            rbi_text_add(&t, "a callback returned %s", rebatch_status_name(only.result.status));
    }
    const int code = describe_result(&only);
    rbi_report_end(run, code, only.complaint, only.text);
}
