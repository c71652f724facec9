/* Owns what an event says: its members, and one line of text.
 * Must not know where events go, nor why something happened. */
#include <inttypes.h>
#include <string.h>

#include "recover/recover.h"

static const char *const texts[] = {
#define TEXT(name, level, text) text,
    REBATCH_EVENTS(TEXT)
#undef TEXT
};

rebatch_event rbi_event_begin(const rebatch *rb, rebatch_event_kind kind)
{
    return (rebatch_event){.kind = kind,
                           .phase = rb->run.samples_callback == RBI_MAP ? REBATCH_PHASE_MAP : 0,
                           .batch = rb->run.batch,
                           .micro_before = rbi_micro_size(rb, rb->run.batch),
                           .lighten_before = rb->lighten,
                           .lighten_after = rb->lighten,
                           .cost_before = rbi_budget(rb)};
}

void rbi_event_end(rebatch_event *event, const rebatch *rb)
{
    event->micro_after = rbi_micro_size(rb, rb->run.batch);
    event->cost_after = rbi_budget(rb);
    event->lighten_after = rb->lighten;
}

const char *rbi_phase_text(rebatch_phase phase)
{
    switch (phase) {
#define PHASE_CASE(name, text)                                                                     \
    case REBATCH_PHASE_##name:                                                                     \
        return text;
        REBATCH_PHASES(PHASE_CASE)
#undef PHASE_CASE
    default:
        return "no such phase";
    }
}

bool rbi_event_is_oom(rebatch_event_kind kind)
{
    return kind == REBATCH_EVENT_RETRY || kind == REBATCH_EVENT_SHRINK ||
           kind == REBATCH_EVENT_LIGHTEN || kind == REBATCH_EVENT_EXHAUSTED ||
           kind == REBATCH_EVENT_TORN;
}

void rbi_text_add_samples(struct rbi_text *t, size_t first, size_t count)
{
    rbi_assert(count > 0);
    if (count == 1)
        rbi_text_add(t, "sample %zu", first);
    else
        rbi_text_add(t, "samples %zu-%zu", first, first + count - 1);
}

void rbi_text_add_available(struct rbi_text *t, uint64_t needed, uint64_t available)
{
    char need[32], have[32];
    rbi_text_add_bytes(&(struct rbi_text){need, sizeof need, 0}, needed);
    rbi_text_add_bytes(&(struct rbi_text){have, sizeof have, 0}, available);
    if (available >= needed || strcmp(need, have) != 0) {
        rbi_text_add(t, "%s", have);
        return;
    }
    rbi_text_add_bytes(t, needed - available);
    rbi_text_add(t, " less");
}

void rbi_text_add_need(struct rbi_text *t, const char *verb, uint64_t needed, uint64_t available)
{
    if (available >= needed) { /* a later request might not have been served */
        rbi_text_add(t, " needed ");
        rbi_text_add_bytes(t, needed);
        rbi_text_add(t, " so far");
        return;
    }
    rbi_text_add(t, " %s at least ", verb);
    rbi_text_add_bytes(t, needed);
}

/* ", there is 1.50 MiB" */
static void add_room(struct rbi_text *t, uint64_t needed, uint64_t available)
{
    rbi_text_add(t, ", there is ");
    rbi_text_add_available(t, needed, available);
    rbi_text_add(t, "%s", available >= needed ? " now" : "");
}

/* An attempt that was not started, as its memory is known not to be there. */
static bool is_refused(const rebatch_event *event)
{
    return event->phase == REBATCH_PHASE_ADMISSION && rbi_event_is_oom(event->kind);
}

/* Where it struck, and how much was missing. */
static void add_place(struct rbi_text *t, const rebatch_event *event)
{
    if (!is_refused(event))
        rbi_text_add(t, " in %s%s", rbi_phase_text(event->phase),
                     event->is_injected ? " (injected)" : "");
    if (event->count) {
        rbi_text_add(t, ": ");
        rbi_text_add_samples(t, event->first, event->count);
    }
    if (event->cost)
        rbi_text_add(t, ", cost %" PRIu64 "%s", event->cost, event->needed_bytes ? "," : "");
    if (event->needed_bytes) {
        const char *const verb = event->count > 1 ? "need" : "needs";
        rbi_text_add(t, "%s", event->count ? "" : ":");
        if (event->phase == REBATCH_PHASE_ADMISSION) {
            rbi_text_add(t, " %s ", verb);
            rbi_text_add_bytes(t, event->needed_bytes);
        } else {
            rbi_text_add_need(t, verb, event->needed_bytes, event->available_bytes);
        }
        add_room(t, event->needed_bytes, event->available_bytes);
    }
    if (event->is_unexplained)
        rbi_text_add(t, "; REBATCH_OOM was returned, but no allocation is known to have failed");
}

static void add_budget(struct rbi_text *t, const rebatch_event *event)
{
    rbi_text_add(t, "; budget ");
    if (event->cost_before)
        rbi_text_add(t, "%" PRIu64 " -> ", event->cost_before);
    rbi_text_add(t, "%" PRIu64, event->cost_after);
}

static void add_trial(struct rbi_text *t, const rebatch_event *event)
{
    rbi_text_add(t, " of %zu sample%s ", event->count, event->count == 1 ? "" : "s");
    if (event->peak_bytes) {
        rbi_text_add(t, "ran, at most ");
        rbi_text_add_bytes(t, event->peak_bytes);
        rbi_text_add(t, " live");
        return;
    }
    rbi_text_add(t, "ran out of memory");
    if (event->needed_bytes) {
        rbi_text_add(t, ": it");
        rbi_text_add_need(t, "needs", event->needed_bytes, event->available_bytes);
        add_room(t, event->needed_bytes, event->available_bytes);
    }
}

static void add_swallowed(struct rbi_text *t, const rebatch_event *event)
{
    const char *const phase = rbi_phase_text(event->phase);
    rbi_text_add(t, " in %.*s", (int)strcspn(phase, ","), phase);
    if (event->count) {
        rbi_text_add(t, " of ");
        rbi_text_add_samples(t, event->first, event->count);
    }
    rbi_text_add(t, ", of ");
    rbi_text_add_bytes(t, event->asked_bytes);
    rbi_text_add(t, ", and the callback returned REBATCH_OK: correct only if it copes");
}

/* What is done about it. */
static void add_consequence(struct rbi_text *t, const rebatch_event *event)
{
    if (event->kind == REBATCH_EVENT_RETRY)
        rbi_text_add(t, "; tried once more");
    if (event->micro_before != event->micro_after)
        rbi_text_add(t, "; micro-batch %zu -> %zu", event->micro_before, event->micro_after);
    if (event->cost_before != event->cost_after)
        add_budget(t, event);
    if (event->lighten_before != event->lighten_after)
        rbi_text_add(t, "; lighten level %u -> %u", event->lighten_before, event->lighten_after);
    if (event->redone_samples)
        rbi_text_add(t, "; %zu sample%s again; the attempt took %.1f ms", event->redone_samples,
                     event->redone_samples == 1 ? "" : "s", (double)event->lost_ns / 1e6);
    else if (is_refused(event))
        rbi_text_add(t, "; no work was lost");
}

size_t rebatch_event_format(char *text, size_t size, const rebatch_event *event)
{
    struct rbi_text t = {text, size, 0};
    if (text && size)
        text[0] = '\0';
    if (!event)
        return 0;
    rbi_text_add(&t, "step %" PRIu64 ": %s", event->step,
                 is_refused(event) ? "not started" : texts[event->kind]);
    if (rbi_event_is_oom(event->kind))
        add_place(&t, event);
    else if (event->phase == REBATCH_PHASE_MAP)
        rbi_text_add(&t, " in %s", rbi_phase_text(event->phase));
    if (event->kind == REBATCH_EVENT_TRIAL)
        add_trial(&t, event);
    if (event->kind == REBATCH_EVENT_SWALLOWED)
        add_swallowed(&t, event);
    if (event->text)
        rbi_text_add(&t, " %s", event->text);
    add_consequence(&t, event);
    return t.length;
}
