/* Owns the graphs of micro-batches: when one is captured, compared and replayed, and when it goes.
 * Must not know how memory is found, nor what is done about an OOM. */
#include <string.h>

#include "recover/recover.h"

/* Steps in which a size runs by itself before it is captured: the first one loads kernels. */
enum { STEPS_BEFORE = 2 };

/* ---- what is watched ---- */

static void *address_of(const struct rbi_watched *watched)
{
    return watched->where ? *(void *const *)watched->where : watched->pointer;
}

/* With the batch, by which samples are weighted. */
static uint64_t key_of(const rebatch *rb)
{
    uint64_t key = rb->run.total;
    for (size_t i = 0; i < rb->watched_count; i++)
        key = (key ^ (uint64_t)(uintptr_t)address_of(&rb->watched[i])) *
                  UINT64_C(0x9e3779b97f4a7c15) +
              1;
    return key;
}

static size_t watched_bytes(const rebatch *rb)
{
    size_t sum = 0;
    for (size_t i = 0; i < rb->watched_count; i++)
        sum += address_of(&rb->watched[i]) ? rb->watched[i].bytes : 0;
    return sum;
}

/* Copies all that is watched from where it is, or back there, and waits. */
static rebatch_status copy_watched(rebatch *rb, char *copy, bool restores)
{
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < rb->watched_count && !status; i++) {
        const struct rbi_watched *const watched = &rb->watched[i];
        void *const there = address_of(watched);
        if (!there)
            continue;
        void *const to = restores ? there : copy;
        const void *const from = restores ? copy : there;
        if (watched->kind == REBATCH_GUARD_DEVICE)
            status = rebatch_copy(rb->device, to, from, watched->bytes, rb->options.stream);
        else
            memcpy(to, from, watched->bytes);
        copy += watched->bytes;
    }
    return status ? status : rebatch_stream_synchronize(rb->device, rb->options.stream);
}

/* ---- entries ---- */

static void drop(rebatch *rb, struct rbi_captured_size *size)
{
    rbi_graph_destroy(rb->device, size->graph);
    *size = (struct rbi_captured_size){0};
}

void rbi_captured_drop(rebatch *rb)
{
    for (size_t i = 0; i < RBI_CAPTURED_SIZES; i++)
        drop(rb, &rb->captured.sizes[i]);
}

void rbi_captured_begin_step(rebatch *rb)
{
    struct rbi_captured *const captured = &rb->captured;
    const rebatch_step_ops *const ops = rb->run.ops;
    captured->is_on = (ops->flags & REBATCH_STEP_CAPTURED) != 0;
    if (captured->is_on && captured->forward_backward == ops->forward_backward &&
        captured->user == rb->run.user)
        return;
    rbi_captured_drop(rb);
    captured->forward_backward = ops->forward_backward;
    captured->user = rb->run.user;
}

/* That of the micro-batch's size, if need be in the place of the one that was not used for longest.
 * Where what is watched lies elsewhere now, its graph is of no use. */
static struct rbi_captured_size *entry_of(rebatch *rb, size_t count)
{
    struct rbi_captured *const captured = &rb->captured;
    struct rbi_captured_size *found = &captured->sizes[0];
    for (size_t i = 0; i < RBI_CAPTURED_SIZES && found->count != count; i++)
        if (captured->sizes[i].count == count || captured->sizes[i].last_use < found->last_use)
            found = &captured->sizes[i];
    if (found->count != count || (found->graph && found->key != key_of(rb)))
        drop(rb, found);
    found->count = count;
    found->last_use = ++captured->uses;
    return found;
}

/* ---- why there is no graph ---- */

/* Says so once in a session, with the last error's sentence, which is then forgotten. */
static void refuse(rebatch *rb, struct rbi_captured_size *size)
{
    struct rbi_captured *const captured = &rb->captured;
    if (!captured->has_told) {
        rebatch_event event = rbi_event_begin(rb, REBATCH_EVENT_NOT_CAPTURED);
        rbi_event_end(&event, rb);
        event.text = rebatch_last_error();
        rbi_event_emit(rb, &event);
    }
    captured->has_told = true;
    rebatch_clear_error();
    (void)rbi_device_take_last_error(rb->device);
    rbi_graph_destroy(rb->device, size->graph);
    size->graph = NULL;
    size->state = RBI_GRAPH_REFUSED;
}

/* ---- capturing ---- */

static rebatch_status run_itself(rebatch *rb, const rebatch_microbatch *mb)
{
    return rb->run.ops->forward_backward(mb, rb->run.user);
}

/* The same where something has to follow: rebatch_escape() leads back here. */
static rebatch_status run_and_return(rebatch *rb, const rebatch_microbatch *mb)
{
    jmp_buf way_out;
    jmp_buf *const outer = rb->callback.way_out;
    rb->callback.way_out = &way_out;
    const rebatch_status status = setjmp(way_out) ? rb->callback.escape_status : run_itself(rb, mb);
    rb->callback.way_out = outer;
    return status;
}

static rebatch_status capture(rebatch *rb, const rebatch_microbatch *mb, rbi_graph *out)
{
    const uint64_t allocations = rbi_pool_allocations(rb->pool);
    const bool has_mutated = rb->callback.has_mutated;
    rebatch_status status = rbi_device_begin_capture(rb->device, rb->options.stream);
    if (status)
        return status;
    status = run_and_return(rb, mb);
    rb->callback.has_mutated = has_mutated;
    const rebatch_status ended = rbi_device_end_capture(rb->device, rb->options.stream, out);
    if (status || ended)
        return status ? status : ended;
    if (rbi_pool_allocations(rb->pool) != allocations)
        return rbi_error(REBATCH_E_STATE, "forward_backward allocates from the pool: expected it "
                                          "to use the buffers of ops.resize");
    return REBATCH_OK;
}

static void try_to_capture(rebatch *rb, struct rbi_captured_size *size,
                           const rebatch_microbatch *mb)
{
    if (watched_bytes(rb) == 0)
        (void)rbi_error(REBATCH_E_STATE, "nothing is watched that could be compared: expected "
                                         "rebatch_watch() for each sum of forward_backward");
    else if (capture(rb, mb, &size->graph) == REBATCH_OK) {
        size->state = RBI_GRAPH_UNKNOWN;
        size->key = key_of(rb);
        size->first = mb->first;
        return;
    }
    refuse(rb, size);
}

/* ---- comparing ---- */

static rebatch_status replay(rebatch *rb, const struct rbi_captured_size *size)
{
    const rebatch_status status = rbi_graph_launch(rb->device, size->graph, rb->options.stream);
    if (status == REBATCH_OK)
        rb->callback.has_mutated = true;
    return status;
}

/* In another step, and on other samples unless there are none. */
static bool is_other(const struct rbi_captured_size *size, const rebatch_microbatch *mb)
{
    const bool is_last_of_size = mb->first + 2 * mb->count > mb->rank_batch;
    return mb->step != size->step && (mb->first != size->first || is_last_of_size);
}

/* What the micro-batch itself and its replay leave, of the same state; then it counts once. */
static rebatch_status compare(rebatch *rb, struct rbi_captured_size *size,
                              const rebatch_microbatch *mb, char *before, char *itself)
{
    const size_t bytes = watched_bytes(rb);
    rebatch_status status = copy_watched(rb, before, false);
    rbi_guards_begin_change(rb, RBI_CHANGE_CALLBACK);
    if (!status)
        status = run_and_return(rb, mb);
    if (!status)
        status = copy_watched(rb, itself, false);
    if (status)
        return status;
    const bool changes_host = rbi_guards_have_changed(rb);
    const bool adds = memcmp(before, itself, bytes) != 0;
    status = copy_watched(rb, before, true);
    if (!status && rb->run.ops->inputs)
        status = rb->run.ops->inputs(mb, rb->run.user);
    if (!status)
        status = replay(rb, size);
    if (!status)
        status = copy_watched(rb, before, false);
    if (!status && adds && !changes_host && memcmp(before, itself, bytes) == 0) {
        size->state = RBI_GRAPH_PROVED;
        return REBATCH_OK;
    }
    const char *const why = changes_host ? "forward_backward changes guarded host state"
                            : !adds ? "forward_backward changes nothing that rebatch_watch() names"
                                    : "a replay on other samples has another result: expected "
                                      "forward_backward to read what changes from device memory";
    if (!status)
        (void)rbi_error(REBATCH_E_STATE, "%s", why);
    refuse(rb, size);
    return copy_watched(rb, itself, true);
}

static rebatch_status prove(rebatch *rb, struct rbi_captured_size *size,
                            const rebatch_microbatch *mb)
{
    const size_t bytes = watched_bytes(rb);
    char *const before = rbi_heap_calloc(1, bytes), *const itself = rbi_heap_calloc(1, bytes);
    rebatch_status status;
    if (before && itself) {
        status = compare(rb, size, mb, before, itself);
    } else {
        (void)rbi_error(REBATCH_E_HOST_OOM, "no host memory to compare %zu bytes", bytes);
        refuse(rb, size);
        status = run_itself(rb, mb);
    }
    rbi_heap_free(before);
    rbi_heap_free(itself);
    return status;
}

/* ---- a micro-batch ---- */

rebatch_status rbi_captured_run(rebatch *rb, const rebatch_microbatch *mb)
{
    if (!rb->captured.is_on || mb->probing)
        return run_itself(rb, mb);
    struct rbi_captured_size *const size = entry_of(rb, mb->count);
    if (size->state == RBI_GRAPH_PROVED)
        return replay(rb, size);
    if (size->state == RBI_GRAPH_UNKNOWN && is_other(size, mb))
        return prove(rb, size, mb);
    if (size->state == RBI_GRAPH_NONE && (size->steps == 0 || size->step != mb->step)) {
        if (size->steps++ == STEPS_BEFORE)
            try_to_capture(rb, size, mb);
        size->step = mb->step;
    }
    return run_itself(rb, mb);
}
