/* Owns the rig of the step_* tests, and what holds of every step whatever happens in it.
 * Must not know more of the library than its public headers say. */
#include "step_common.h"

/* ---- the rig ---- */

static void collect(const rebatch_event *event, void *user)
{
    struct rig *rig = user;
    if (rig->event_count < RIG_EVENTS)
        rig->events[rig->event_count++] = *event;
}

static void open_devices(struct rig *rig, size_t capacity_bytes)
{
    memset(rig, 0, sizeof *rig);
    OK(rebatch_device_open_host(&rig->host, capacity_bytes, NULL));
    OK(rebatch_device_open_fault(&rig->device, rig->host, NULL));
}

static void open_session(struct rig *rig, const rebatch_options *options, rebatch_stream stream)
{
    rebatch_options *o = &rig->options;
    *o = options ? *options : (rebatch_options)REBATCH_OPTIONS_INIT;
    o->stream = stream;
    o->on_event = collect;
    o->on_event_user = rig;
    if (o->log_level == REBATCH_LOG_DEFAULT)
        o->log_level = REBATCH_LOG_DEBUG;
    OK(rebatch_open(&rig->rb, rig->device, o));
    rig->script.rb = rig->rb;
    rig->script.stream = stream;
    rig->script.device = rig->device;
    rig->script.declares = true;
    rig->ops = script_ops();
    rig->ops.lighten = NULL;
    rig->ops.cost = NULL;
}

void rig_open(struct rig *rig, size_t capacity_bytes, const rebatch_options *options)
{
    open_devices(rig, capacity_bytes);
    open_session(rig, options, NULL);
}

void rig_open_on_stream(struct rig *rig, size_t capacity_bytes, const rebatch_options *options)
{
    rebatch_stream stream;
    open_devices(rig, capacity_bytes);
    OK(rebatch_stream_create(&stream, rig->device));
    open_session(rig, options, stream);
}

void rig_close(struct rig *rig)
{
    rebatch_close(rig->rb);
    rebatch_stream_destroy(rig->device, rig->script.stream);
    cr_assert_eq(rig_used_bytes(rig), 0, "%zu bytes were not given back", rig_used_bytes(rig));
    rebatch_device_close(rig->device);
    rebatch_device_close(rig->host);
}

uint64_t rig_live_bytes(const struct rig *rig)
{
    return pool_stats_of(rebatch_get_pool(rig->rb)).live_bytes;
}

size_t rig_used_bytes(const struct rig *rig)
{
    return used_bytes_of(rig->host);
}

void rig_set_capacity(struct rig *rig, size_t capacity_bytes)
{
    OK(rebatch_pool_trim(rebatch_get_pool(rig->rb), 0, NULL));
    OK(rebatch_device_set_capacity(rig->host, capacity_bytes));
}

void rig_fail_device(struct rig *rig, uint32_t calls, uint64_t times, rebatch_status status)
{
    if (times)
        script_arm(&rig->script, calls, times, status);
    else
        OK(rebatch_fault_arm(rig->device, NULL));
}

const char *rig_events(struct rig *rig)
{
    static const char *const names[] = {
#define NAME(name, level, text) #name,
        REBATCH_EVENTS(NAME)
#undef NAME
    };
    const size_t size = sizeof rig->text;
    rig->text[0] = '\0';
    for (size_t i = 0; i < rig->event_count; i++) {
        const rebatch_event *event = &rig->events[i];
        script_append(rig->text, size, "%s%s", i ? " " : "", names[event->kind]);
        if (event->kind == REBATCH_EVENT_STEP)
            continue;
        if (event->micro_before != event->micro_after)
            script_append(rig->text, size, "(%zu->%zu)", event->micro_before, event->micro_after);
        if (event->lighten_before != event->lighten_after)
            script_append(rig->text, size, "(l%u->l%u)", event->lighten_before,
                          event->lighten_after);
    }
    return rig->text;
}

const rebatch_event *rig_event(const struct rig *rig, rebatch_event_kind kind)
{
    for (size_t i = 0; i < rig->event_count; i++)
        if (rig->events[i].kind == kind)
            return &rig->events[i];
    return NULL;
}

/* ---- what holds of every step ---- */

/* Whether an OOM in this call has to be taken for one after rebatch_mutating(). */
static bool is_dirty(const struct rig *rig, const struct script_call *call)
{
    const bool trusted =
        (rig->ops.flags & REBATCH_DECLARES_MUTATION) || rig->learned[call->callback];
    return call->mutated || !trusted;
}

/* The contract's table as an automaton: what has to be called next; SCRIPT_CALLBACKS: nothing. */
struct order {
    enum script_callback next;
    size_t first;    /* sample that comes next */
    uint32_t vain;   /* calls that ran into an OOM */
    uint32_t in_row; /* of them, since a micro-batch succeeded */
    bool torn;
};

/* What step.h says of the sizes that a micro-batch may have. */
static bool is_allowed(const rebatch_options *o, size_t size)
{
    if (size < o->micro_smallest || (o->micro_largest && size > o->micro_largest) ||
        (o->micro_multiple_of && size % o->micro_multiple_of))
        return false;
    size_t i = 0;
    while (i < REBATCH_ALLOWED_SIZES && o->micro_allowed[i] && o->micro_allowed[i] != size)
        i++;
    return i < REBATCH_ALLOWED_SIZES && (i == 0 || o->micro_allowed[i] == size);
}

static bool is_smallest(const rebatch_options *o, size_t size)
{
    while (size-- > 1)
        if (is_allowed(o, size))
            return false;
    return true;
}

static void follow_forward(struct order *order, struct rig *rig, const struct script_call *call)
{
    cr_assert_eq(call->first, order->first);
    cr_assert(is_allowed(&rig->options, call->count) ||
                  call->first + call->count == rig->script.batch,
              "%zu samples are not allowed: %s", call->count, script_trace(&rig->script));
    if (call->answer == REBATCH_OK) {
        order->first += call->count;
        order->next = order->first == rig->script.batch ? SCRIPT_UPDATE : SCRIPT_FORWARD;
    } else if (is_dirty(rig, call)) {
        order->next = SCRIPT_ZERO;
    }
}

/* `call` is the next that is no lighten. */
static void follow(struct order *order, struct rig *rig, const struct script_call *call)
{
    cr_assert_eq(call->callback, order->next, "this is not the call that the contract has next");
    order->vain += call->answer == REBATCH_OOM;
    order->torn = call->callback == SCRIPT_UPDATE && call->answer && is_dirty(rig, call);
    order->in_row = call->answer == REBATCH_OOM ? order->in_row + 1
                    : call->callback == SCRIPT_FORWARD && call->answer == REBATCH_OK
                        ? 0
                        : order->in_row;
    if (call->answer != REBATCH_OK && call->answer != REBATCH_OOM) {
        order->next = SCRIPT_CALLBACKS;
    } else if (call->callback == SCRIPT_FORWARD) {
        follow_forward(order, rig, call);
    } else if (call->callback == SCRIPT_ZERO && call->answer == REBATCH_OK) {
        order->next = SCRIPT_FORWARD;
        order->first = 0;
    } else if (call->callback == SCRIPT_UPDATE) {
        if (call->answer == REBATCH_OK || order->torn)
            order->next = SCRIPT_CALLBACKS;
    }
    if (call->answer == REBATCH_OK && call->mutated)
        rig->learned[call->callback] = !rig->in_place;
}

static const struct script_call *last_call(const struct script *s, bool lighten_too)
{
    size_t i = s->call_count;
    while (i && s->calls[i - 1].callback == SCRIPT_LIGHTEN && !lighten_too)
        i--;
    return i ? &s->calls[i - 1] : NULL;
}

/* EXHAUSTED only when the smallest size failed, all levels were tried, or attempts ran out. */
static void check_exhausted(const struct rig *rig, const struct order *order)
{
    const struct script *s = &rig->script;
    const rebatch_options *o = &rig->options;
    const uint32_t most = o->max_attempts ? o->max_attempts : 64;
    if (o->on_oom == REBATCH_ON_OOM_STOP || rig->report.ooms == most ||
        (o->max_ooms_in_row && order->in_row == o->max_ooms_in_row))
        return;
    const struct script_call *last = last_call(s, false);
    cr_assert_eq(last->answer, REBATCH_OOM, "EXHAUSTED without a try: %s", rebatch_last_error());
    cr_assert(last->callback != SCRIPT_FORWARD || is_smallest(o, last->count),
              "EXHAUSTED with %zu samples, after %u in vain: %s", last->count, order->vain,
              rebatch_last_error());
    if (s->lighten_levels && o->lighten != REBATCH_OFF)
        cr_assert(last_call(s, true)->callback == SCRIPT_LIGHTEN &&
                      last_call(s, true)->answer != REBATCH_OK,
                  "EXHAUSTED, but there is a level left");
}

static void check_order(struct rig *rig, rebatch_status status)
{
    struct script *s = &rig->script;
    struct order order = {.next = SCRIPT_ZERO};
    for (size_t i = 0; i < s->call_count; i++) {
        const struct script_call *call = &s->calls[i];
        if (call->callback != SCRIPT_LIGHTEN)
            follow(&order, rig, call);
        if (i >= 2 && call->count && call[-1].answer == REBATCH_OOM &&
            call[-2].answer == REBATCH_OOM)
            cr_assert(call->count != call[-1].count || call->count != call[-2].count ||
                          is_smallest(&rig->options, call->count),
                      "three times the same size: %s", script_trace(s));
    }
    cr_assert_leq(order.vain, rig->options.max_attempts ? rig->options.max_attempts : 64);
    cr_assert_eq(status == REBATCH_OK, s->updates == 1);
    const struct script_call *last = last_call(s, false);
    const bool is_own = last && last->answer == status; /* a callback's, passed through */
    if (status == REBATCH_E_TORN && !is_own)
        cr_assert(order.torn, "TORN, but the update had not begun");
    cr_assert_eq(rig->report.torn, order.torn);
    if (status == REBATCH_OK || status == REBATCH_E_EXHAUSTED)
        cr_assert(!order.torn, "TORN is not said");
    if (status == REBATCH_E_EXHAUSTED && !is_own)
        check_exhausted(rig, &order);
    /* Once the update was applied, a lighten that fails cannot make it undone. */
    if (last_call(s, true) && last_call(s, true)->answer == SCRIPT_STATUS && !s->updates)
        cr_assert_eq(status, SCRIPT_STATUS, "%s", script_trace(s));
}

/* What step.h says of a step that succeeded. */
static void check_success(const struct rig *rig, size_t batch, uint32_t version)
{
    const struct script *s = &rig->script;
    size_t microbatches = 0;
    size_t samples = 0;
    for (size_t i = 0; i < s->call_count; i++) {
        const struct script_call *call = &s->calls[i];
        if (call->callback == SCRIPT_ZERO)
            microbatches = 0;
        if (call->callback == SCRIPT_FORWARD)
            microbatches += call->answer == REBATCH_OK;
        samples += call->count;
    }
    cr_assert(s->whole_at_update, "the update did not have every sample once");
    for (size_t i = 0; i < SCRIPT_PARAMETERS; i++)
        cr_assert_eq(s->parameters[i], version + 1);
    cr_assert_eq(rig->report.microbatches, microbatches);
    cr_assert_eq(rig->report.redone_samples, samples - batch);
}

static void check_report(const struct rig *rig, rebatch_status status)
{
    const rebatch_step_report *report = &rig->report;
    uint32_t ooms = 0;
    for (size_t i = 0; i < REBATCH_PHASE_COUNT; i++)
        ooms += report->ooms_in[i];
    cr_assert_eq(report->status, status);
    cr_assert_eq(report->ooms, ooms);
    cr_assert_eq(report->attempts, script_calls(&rig->script, SCRIPT_FORWARD));
    cr_assert_eq(report->reserved_bytes, rig_used_bytes(rig), "reserved %ju, used %zu",
                 (uintmax_t)report->reserved_bytes, rig_used_bytes(rig));
    cr_assert_eq(report->lighten_level, rig->script.level);
}

/* The same in a loop. A block that leaves by rebatch_escape() comes back to its head. */
static rebatch_status step_in_place(struct rig *rig, size_t batch)
{
    rebatch *const rb = rig->rb;
    rebatch_step_ops ops = rig->ops;
    const rebatch_microbatch *mb;
    rebatch_status volatile status;
    jmp_buf way_out;
    ops.forward_backward = NULL;
    ops.optimizer_step = NULL;
    status = rebatch_step_begin(rb, &ops, batch, &rig->script);
    while ((mb = rebatch_step_next(rb, status))) {
        rebatch_escape_to(rb, &way_out);
        if (!setjmp(way_out))
            status = rig->ops.forward_backward(mb, &rig->script);
    }
    while (rebatch_step_updates(rb, status)) {
        rebatch_escape_to(rb, &way_out);
        if (!setjmp(way_out))
            status = rig->ops.optimizer_step(&rig->script);
    }
    return rebatch_step_end(rb, &rig->report);
}

rebatch_status rig_step(struct rig *rig, size_t batch)
{
    struct script *s = &rig->script;
    cr_assert_leq(batch, SCRIPT_SAMPLES);
    s->batch = batch;
    s->updates = 0;
    s->whole_at_update = false;
    s->call_count = 0;
    memset(s->tries, 0, sizeof s->tries);
    for (size_t i = 0; i < s->fault_count; i++)
        s->faults[i].seen = 0;
    rig->event_count = 0;
    rig->ops.lighten = s->lighten_levels ? script_ops().lighten : NULL;
    rig->ops.cost = rig->cost ? rig->cost : s->lengths ? script_cost : NULL;
    const uint32_t version = s->parameters[0];
    const uint64_t live_bytes = rig_live_bytes(rig);
    size_t longest = rig->ops.part ? 0 : batch;
    for (size_t first = 0, left; longest < batch && first < batch; first += left) {
        left = rig->ops.part(first, s);
        longest = left > longest ? left : longest;
    }
    const size_t micro = rebatch_get_micro(rig->rb, longest);
    const unsigned level = s->level;

    const rebatch_status status = rig->in_place
                                      ? step_in_place(rig, batch)
                                      : rebatch_step(rig->rb, &rig->ops, batch, s, &rig->report);
    check_report(rig, status);
    check_order(rig, status);
    cr_assert_eq(rig->report.step, rig->steps);
    cr_assert_eq(rig->report.micro_before, micro);
    cr_assert_eq(rig->report.micro_after, rebatch_get_micro(rig->rb, longest));
    for (size_t i = 0; i < s->call_count; i++)
        if (s->calls[i].callback == SCRIPT_FORWARD)
            cr_assert_eq(s->calls[i].step, rig->steps);
    if (status == REBATCH_OK) {
        check_success(rig, batch, version);
        rig->steps++;
    } else if (!rig->report.torn && s->level == level) { /* what lighten moves stays */
        cr_assert_eq(rig_live_bytes(rig), live_bytes, "the step failed, but something is left");
    }
    if (status == REBATCH_E_EXHAUSTED)
        for (size_t i = 0; i < SCRIPT_PARAMETERS; i++)
            cr_assert_eq(s->parameters[i], version, "EXHAUSTED, but a parameter changed");
    return status;
}

/* ---- tables of steps ---- */

static void open_case(struct rig *rig, const struct rig_case *row)
{
    rig_open(rig, row->capacity_bytes ? row->capacity_bytes : MIB(64),
             &OPTIONS(.growth = REBATCH_OFF, .micro_start = row->micro_start,
                      .micro_smallest = row->micro_smallest, .micro_largest = row->micro_largest,
                      .on_oom = row->on_oom,
                      .pool.caching = row->is_uncached ? REBATCH_OFF : REBATCH_DEFAULT,
                      .lighten = row->never_lightens ? REBATCH_OFF : REBATCH_DEFAULT));
    rig->script.base_bytes = row->base_bytes;
    rig->script.sample_bytes = row->sample_bytes;
    rig->script.lighten_levels = row->lighten_levels;
    for (size_t i = 0; i < 2 && row->faults[i].nth; i++) {
        const struct script_fault *f = &row->faults[i];
        struct script_fault *fault =
            script_fail(&rig->script, f->callback, f->nth, f->when, f->manner);
        fault->times = f->times ? f->times : 1;
    }
    if (row->device_ooms)
        rig_fail_device(rig, REBATCH_FAULT_ALLOC, row->device_ooms, REBATCH_OOM);
}

static void check_text(const char *found, const char *wanted, const char *what)
{
    if (wanted)
        cr_assert_str_eq(found, wanted, "%s: %s, not %s", what, found, wanted);
}

static void run_case(const struct rig_case *row)
{
    OPEN_WITH(open_case, rig, rig, row);
    if (row->micro_before)
        cr_assert_eq(rebatch_get_micro(rig.rb, row->batch), row->micro_before, "%s", row->what);
    const rebatch_status status = rig_step(&rig, row->batch);
    cr_assert_eq(status, row->status, "%s: %s: %s", row->what, rebatch_status_name(status),
                 rebatch_last_error());
    check_text(script_trace(&rig.script), row->trace, row->what);
    check_text(rig_events(&rig), row->events, row->what);
    if (row->error)
        cr_assert(strstr(rebatch_last_error(), row->error), "%s: \"%s\" is missing in: %s",
                  row->what, row->error, rebatch_last_error());
    if (row->micro_after)
        cr_assert_eq(rebatch_get_micro(rig.rb, row->batch), row->micro_after, "%s", row->what);
    cr_assert_eq(rig.report.lighten_level, row->lighten_level, "%s", row->what);
    if (row->next_trace) {
        rig.script.fault_count = 0;
        cr_assert_eq(rig_step(&rig, row->batch), REBATCH_OK, "%s", row->what);
        check_text(script_trace(&rig.script), row->next_trace, row->what);
    }
}

void rig_run_cases(const struct rig_case *cases, size_t count)
{
    for (size_t i = 0; i < count; i++)
        run_case(&cases[i]);
}
