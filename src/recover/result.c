/* Owns what is said of a callback's result, and which it may not return.
 * Must not know how callbacks run. */
#include <inttypes.h>
#include <string.h>

#include "recover/recover.h"

/* So much of a sentence is kept within another. */
#define WITHIN 300

static void add_status(struct rbi_text *t, rebatch_status status)
{
    const char *name = rebatch_status_name(status);
    if (strcmp(name, "REBATCH_E_USER") == 0 || strcmp(name, "REBATCH_E_UNKNOWN") == 0)
        rbi_text_add(t, "%d", (int)status);
    else
        rbi_text_add(t, "%s", name);
}

const char *rbi_callback_name(enum rbi_callback which)
{
    static const char *const names[RBI_CALLBACKS] = {[RBI_ZERO_GRAD] = "zero_grad",
                                                     [RBI_FORWARD_BACKWARD] = "forward_backward",
                                                     [RBI_OPTIMIZER] = "optimizer_step",
                                                     [RBI_LIGHTEN] = "lighten",
                                                     [RBI_RESIZE] = "resize",
                                                     [RBI_MAP] = "map",
                                                     [RBI_REDUCE] = "reduce"};
    rbi_assert(which < RBI_CALLBACKS);
    return names[which];
}

static void add_call(struct rbi_text *t, const rebatch *rb, const struct rbi_call *call)
{
    rbi_text_add(t, "step %" PRIu64 ": %s", rb->step, rbi_callback_name(call->which));
    if (call->mb) {
        rbi_text_add(t, " of ");
        rbi_text_add_samples(t, call->mb->first, call->mb->count);
    }
    if (call->which == RBI_LIGHTEN)
        rbi_text_add(t, " to level %zu", call->level);
    if (call->which == RBI_RESIZE)
        rbi_text_add(t, " to %zu sample%s", call->level, call->level == 1 ? "" : "s");
}

static void say(const rebatch *rb, const struct rbi_call *call, rebatch_status status,
                const char *verb, rebatch_status result, const char *more)
{
    rbi_assert(status != REBATCH_OK);
    char text[512];
    char within[WITHIN + 1] = "";
    struct rbi_text t = {text, sizeof text, 0};
    if (rbi_error_changes() != call->error_changes) { /* it coped with that, or says it otherwise */
        struct rbi_text w = {within, sizeof within, 0};
        rbi_text_add(&w, "%s", rebatch_last_error());
    }
    add_call(&t, rb, call);
    rbi_text_add(&t, " %s ", verb);
    add_status(&t, result);
    rbi_text_add(&t, "%s", more);
    if (rb->group.explained[0])
        rbi_text_add(&t, ": %s", rb->group.explained);
    if (within[0])
        rbi_text_add(&t, "; the last failure within it: %s", within);
    (void)rbi_error(status, "%s", text);
}

/* Whether what was said since is about that status, or the sentence was cleared. */
static bool is_said(rebatch_status status, uint64_t error_changes)
{
    return rbi_error_changes() != error_changes &&
           (rebatch_last_status() == status || rebatch_last_error()[0] == '\0');
}

void rbi_result_say(const rebatch *rb, const struct rbi_call *call, rebatch_status status,
                    const char *verb)
{
    if (!is_said(status, call->error_changes))
        say(rb, call, status, verb, status, "");
}

void rbi_result_say_guard(const rebatch *rb, const char *function, rebatch_status status,
                          uint64_t error_changes)
{
    char text[128];
    struct rbi_text t = {text, sizeof text, 0};
    if (is_said(status, error_changes))
        return;
    rbi_text_add(&t, "step %" PRIu64 ": %s of rebatch_guard_with() returned ", rb->step, function);
    add_status(&t, status);
    (void)rbi_error(status, "%s", text);
}

void rbi_result_say_left(const rebatch *rb, const struct rbi_call *call, rebatch_status status)
{
    say(rb, call, status, "left in the device's last error", status, "");
}

rebatch_status rbi_result_check(const rebatch *rb, const struct rbi_call *call,
                                rebatch_status result)
{
    const char *more = NULL;
    if (result == REBATCH_OK || result == REBATCH_OOM)
        return result;
    if (call->which == RBI_LIGHTEN && result == REBATCH_E_UNSUPPORTED)
        return result; /* there is no such level: no failure */
    if (result == REBATCH_E_EXHAUSTED || result == REBATCH_E_TORN)
        more = ", which only rebatch_step() returns: expected another status, or a number from "
               "REBATCH_E_USER on";
    else if (strcmp(rebatch_status_name(result), "REBATCH_E_UNKNOWN") == 0)
        more = ", which is no status: expected one, or a number from REBATCH_E_USER, 1000, on";
    if (!more) {
        rbi_result_say(rb, call, result, "returned");
        return result;
    }
    say(rb, call, REBATCH_E_STATE, "returned", result, more);
    return REBATCH_E_STATE;
}

rebatch_status rbi_result_say_undeclared(const rebatch *rb, const struct rbi_call *call)
{
    char text[128];
    struct rbi_text t = {text, sizeof text, 0};
    add_call(&t, rb, call);
    return rbi_error(REBATCH_E_STATE,
                     "%s returned without rebatch_mutating(), which REBATCH_DECLARES_MUTATION "
                     "promises",
                     text);
}

void rbi_result_say_torn(const rebatch *rb, rebatch_status status)
{
    char text[WITHIN + 1] = "";
    struct rbi_text t = {text, sizeof text, 0};
    rbi_text_add(&t, "%s", rebatch_last_error());
    if (text[0] == '\0')
        rbi_text_add(&t, "step %" PRIu64 ": optimizer_step failed", rb->step);
    (void)rbi_error(status, "%s; optimizer_step %s", text,
                    rb->callback.has_mutated
                        ? "had begun to change parameters: some are new, some old; restore "
                          "a checkpoint"
                        : "does not declare when it changes parameters: some may be new, "
                          "some old; restore a checkpoint");
}
