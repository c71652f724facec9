/* Owns the scripted step of the step_* tests.
 * Must not know more of the library than its public headers say. */
#include "step_common.h"

#include <stdarg.h>
#include <stdio.h>

uint64_t script_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

size_t below(uint64_t *random, size_t n)
{
    return (size_t)(script_random(random) % n);
}

void script_inside(struct script *s,
                   rebatch_status (*inside)(struct script *s, enum script_callback callback,
                                            const rebatch_microbatch *mb),
                   void *user)
{
    s->inside = inside;
    s->inside_user = user;
}

/* ---- orders to fail ---- */

struct script_fault *script_fail(struct script *s, enum script_callback callback, uint32_t nth,
                                 enum script_when when, enum script_manner manner)
{
    cr_assert_lt(s->fault_count, SCRIPT_FAULTS);
    struct script_fault *fault = &s->faults[s->fault_count++];
    *fault = (struct script_fault){
        .callback = callback, .nth = nth, .times = 1, .when = when, .manner = manner};
    return fault;
}

/* Counts a call in every order; the first that is due, or NULL. */
static const struct script_fault *due(struct script *s, enum script_callback callback, size_t count)
{
    const struct script_fault *found = NULL;
    for (size_t i = 0; i < s->fault_count; i++) {
        struct script_fault *fault = &s->faults[i];
        if (fault->callback != callback || count <= fault->more_than)
            continue;
        fault->seen++;
        if (!found && fault->seen >= fault->nth && fault->seen - fault->nth < fault->times)
            found = fault;
    }
    return found;
}

__attribute__((noinline)) static rebatch_status escape_from(struct script *s, int depth,
                                                            rebatch_status status)
{
    if (depth > 0) {
        const rebatch_status inner = escape_from(s, depth - 1, status);
        cr_assert_fail("rebatch_escape() came back with %s at depth %d", rebatch_status_name(inner),
                       depth);
    }
    return rebatch_escape(s->rb, status);
}

void script_arm(const struct script *s, uint32_t calls, uint64_t times, rebatch_status status)
{
    OK(rebatch_fault_arm(s->device,
                         &FAULTS(.calls = calls, .nth = 1, .times = times, .status = status)));
}

/* Fails in the order's manner: notes the answer and gives what the callback shall answer. */
static rebatch_status fail(struct script *s, const struct script_fault *fault,
                           struct script_call *call)
{
    const bool own = fault->manner == SCRIPT_OWN || fault->manner == SCRIPT_OWN_ESCAPE;
    call->answer = own ? SCRIPT_STATUS : REBATCH_OOM;
    switch (fault->manner) {
    case SCRIPT_POOL: {
        void *none;
        const rebatch_status status = rebatch_pool_alloc(&none, rebatch_get_pool(s->rb),
                                                         SCRIPT_IMPOSSIBLE_BYTES, s->stream, 0);
        cr_assert_eq(status, REBATCH_OOM);
        cr_assert_null(none);
        return status;
    }
    case SCRIPT_ESCAPE:
    case SCRIPT_OWN_ESCAPE:
        return escape_from(s, 3, call->answer);
    case SCRIPT_SWALLOW:
        script_arm(s, REBATCH_FAULT_LAST_ERROR, 1, REBATCH_OOM);
        return REBATCH_OK;
    case SCRIPT_LOST:
        script_arm(s, REBATCH_FAULT_STREAM, REBATCH_FAULT_FOREVER, REBATCH_E_DEVICE_LOST);
        return call->answer;
    default:
        return call->answer;
    }
}

/* ---- the log ---- */

static struct script_call *note(struct script *s, enum script_callback callback)
{
    cr_assert_lt(s->call_count, SCRIPT_CALLS, "the step never ends");
    struct script_call *call = &s->calls[s->call_count++];
    *call = (struct script_call){.callback = callback};
    return call;
}

size_t script_calls(const struct script *s, enum script_callback callback)
{
    size_t count = 0;
    for (size_t i = 0; i < s->call_count; i++)
        count += s->calls[i].callback == callback;
    return count;
}

void script_append(char *text, size_t size, const char *format, ...)
{
    const size_t length = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text + length, size - length, format, arguments);
    va_end(arguments);
}

const char *script_trace(struct script *s)
{
    const size_t size = sizeof s->trace;
    s->trace[0] = '\0';
    for (size_t i = 0; i < s->call_count; i++) {
        const struct script_call *call = &s->calls[i];
        script_append(s->trace, size, "%s%c", i ? " " : "", "zful"[call->callback]);
        if (call->callback == SCRIPT_FORWARD)
            script_append(s->trace, size, "%zu+%zu", call->first, call->count);
        if (call->callback == SCRIPT_LIGHTEN)
            script_append(s->trace, size, "%u", call->level);
        if (call->attempt)
            script_append(s->trace, size, "~%u", call->attempt);
        if (call->answer)
            script_append(s->trace, size, "!");
    }
    return s->trace;
}

/* ---- the step's work ---- */

/* Allocates and touches both ends. */
static rebatch_status take(const struct script *s, void **out, size_t bytes)
{
    const rebatch_status status =
        rebatch_pool_alloc(out, rebatch_get_pool(s->rb), bytes, s->stream, 0);
    if (status == REBATCH_OK && bytes) {
        ((char *)*out)[0] = 1;
        ((char *)*out)[bytes - 1] = 1;
    }
    return status;
}

static void give_back(const struct script *s, void *block)
{
    OK(rebatch_pool_free(rebatch_get_pool(s->rb), block));
}

static void mutate(struct script *s, struct script_call *call)
{
    if (!s->declares)
        return;
    call->mutated = true;
    rebatch_mutating(s->rb);
}

static rebatch_status go_inside(struct script *s, struct script_call *call,
                                const rebatch_microbatch *mb)
{
    if (s->inside)
        call->answer = s->inside(s, call->callback, mb);
    return call->answer;
}

static void clear(struct script *s, size_t samples)
{
    memset(s->marks, 0, samples * sizeof s->marks[0]);
    s->weight = 0;
    s->loss = 0;
}

static rebatch_status zero_grad(void *user)
{
    struct script *s = user;
    struct script_call *call = note(s, SCRIPT_ZERO);
    const struct script_fault *fault = due(s, SCRIPT_ZERO, 1);
    if (go_inside(s, call, NULL))
        return call->answer;
    void *block;
    if ((call->answer = take(s, &block, s->zero_bytes)))
        return call->answer;
    if (fault && fault->when == SCRIPT_BEFORE)
        return fail(s, fault, call);
    mutate(s, call);
    if (fault) {
        clear(s, SCRIPT_SAMPLES / 2);
        return fail(s, fault, call);
    }
    clear(s, SCRIPT_SAMPLES);
    give_back(s, block);
    return REBATCH_OK;
}

static double value_of(size_t sample)
{
    return 1.0 / (double)(3 * sample + 1);
}

static void accumulate(struct script *s, size_t first, size_t end, size_t batch)
{
    for (size_t i = first; i < end; i++) {
        s->marks[i]++;
        s->weight += 1.0 / (double)batch;
        s->loss += value_of(i) / (double)batch;
    }
}

bool script_holds(const struct script *s, size_t end)
{
    for (size_t i = 0; i < SCRIPT_SAMPLES; i++)
        if (s->marks[i] != (i < end))
            return false;
    return true;
}

bool script_is_whole(const struct script *s, size_t batch)
{
    double weight = 0;
    double loss = 0;
    for (size_t i = 0; i < batch; i++) {
        weight += 1.0 / (double)batch;
        loss += value_of(i) / (double)batch;
    }
    return script_holds(s, batch) && memcmp(&weight, &s->weight, sizeof weight) == 0 &&
           memcmp(&loss, &s->loss, sizeof loss) == 0;
}

/* What step.h says of every micro-batch. */
static void check_microbatch(struct script *s, const rebatch_microbatch *mb)
{
    cr_assert_geq(mb->count, 1);
    cr_assert_eq(mb->batch, s->batch);
    cr_assert_leq(mb->first, mb->batch);
    cr_assert_leq(mb->count, mb->batch - mb->first);
    cr_assert_eq(mb->probing, s->is_probed);
    cr_assert_eq(mb->pool, rebatch_get_pool(s->rb));
    cr_assert_eq(mb->stream, s->stream);
    uint32_t least = UINT32_MAX;
    uint32_t most = 0;
    for (size_t i = mb->first; i < mb->first + mb->count; i++) {
        least = s->tries[i] < least ? s->tries[i] : least;
        most = s->tries[i] > most ? s->tries[i] : most;
        s->tries[i]++;
    }
    cr_assert(least <= mb->attempt && mb->attempt <= most,
              "samples %zu+%zu were tried %u to %u times before, attempt is %u", mb->first,
              mb->count, least, most, mb->attempt);
}

/* Padded: every sample is as long as the longest. */
uint64_t script_cost(size_t first, size_t count, void *user)
{
    const struct script *s = user;
    cr_assert(count >= 1 && first + count <= s->batch);
    size_t longest = 0;
    for (size_t i = first; i < first + count; i++)
        longest = s->lengths[i] > longest ? s->lengths[i] : longest;
    return count * longest;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct script *s = user;
    struct script_call *call = note(s, SCRIPT_FORWARD);
    call->first = mb->first;
    call->count = mb->count;
    call->attempt = mb->attempt;
    call->step = mb->step;
    check_microbatch(s, mb);
    const struct script_fault *fault = due(s, SCRIPT_FORWARD, mb->count);
    if (go_inside(s, call, mb))
        return call->answer;
    void *block;
    const size_t size = s->lengths ? script_cost(mb->first, mb->count, s) : mb->count;
    call->answer = take(s, &block, s->base_bytes + (s->sample_bytes >> s->level) * size);
    if (!call->answer && s->reserves)
        call->answer = rebatch_reserve(s->rb, s->late_bytes);
    if (call->answer)
        return call->answer;
    if (fault && fault->when == SCRIPT_BEFORE)
        return fail(s, fault, call);
    mutate(s, call);
    const size_t half = mb->first + (mb->count + 1) / 2;
    accumulate(s, mb->first, half, mb->batch);
    if (fault)
        return fail(s, fault, call);
    void *late;
    if ((call->answer = take(s, &late, s->late_bytes)))
        return call->answer;
    accumulate(s, half, mb->first + mb->count, mb->batch);
    give_back(s, late);
    give_back(s, block);
    return REBATCH_OK;
}

static rebatch_status optimizer_step(void *user)
{
    struct script *s = user;
    struct script_call *call = note(s, SCRIPT_UPDATE);
    s->whole_at_update = script_is_whole(s, s->batch);
    const struct script_fault *fault = due(s, SCRIPT_UPDATE, 1);
    if (go_inside(s, call, NULL))
        return call->answer;
    void *block;
    if ((call->answer = take(s, &block, s->update_bytes)))
        return call->answer;
    if (fault && fault->when == SCRIPT_BEFORE)
        return fail(s, fault, call);
    mutate(s, call);
    for (size_t i = 0; i < SCRIPT_PARAMETERS / 2; i++)
        s->parameters[i]++;
    if (fault)
        return fail(s, fault, call);
    for (size_t i = SCRIPT_PARAMETERS / 2; i < SCRIPT_PARAMETERS; i++)
        s->parameters[i]++;
    s->updates++;
    give_back(s, block);
    return REBATCH_OK;
}

static rebatch_status lighten(unsigned level, void *user)
{
    struct script *s = user;
    struct script_call *call = note(s, SCRIPT_LIGHTEN);
    call->level = level;
    const struct script_fault *fault = due(s, SCRIPT_LIGHTEN, 1);
    if (go_inside(s, call, NULL))
        return call->answer;
    if (fault && (fault->manner != SCRIPT_SWALLOW || fail(s, fault, call) != REBATCH_OK))
        return fail(s, fault, call);
    if (level > s->lighten_levels)
        return call->answer = REBATCH_E_UNSUPPORTED;
    call->answer = REBATCH_OK; /* also where it has left an OOM in the device's last error */
    s->level = level;
    return REBATCH_OK;
}

rebatch_step_ops script_ops(void)
{
    return (rebatch_step_ops)OPS(zero_grad, forward_backward, optimizer_step, .lighten = lighten,
                                 .flags = REBATCH_DECLARES_MUTATION);
}

void script_restore(struct script *s)
{
    for (size_t i = 0; i < SCRIPT_PARAMETERS; i++)
        s->parameters[i] = s->parameters[SCRIPT_PARAMETERS - 1];
}
