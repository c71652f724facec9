/* Owns the tests of graphs of micro-batches, on a host device that captures what a test launches.
 * Must not know how CUDA captures. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "device/device.h"
#include "rebatch/rebatch.h"

enum { BATCH = 7, MICRO = 2, STEPS = 10, LAUNCHES_MOST = 4 };

/* What differs between micro-batches, in device memory. */
struct place {
    uint64_t first, step;
};

/* A kernel's arguments. */
struct launch {
    void (*kernel)(const struct launch *launch);
    struct place *place;
    struct place value; /* by which a graph would go on for ever */
    double *sums;
    const double *samples;
    size_t count, batch;
};

struct rbi_graph_object {
    struct launch launches[LAUNCHES_MOST];
    size_t count;
};

static struct {
    struct rbi_device_ops ops;
    rebatch_device *device;
    rebatch_stream stream;
    rbi_graph recorded; /* NULL: what is launched runs */
    unsigned captured, launched, destroyed;
} gpu;

static void run_kernel(void *user)
{
    struct launch *const launch = user;
    launch->kernel(launch);
    free(launch);
}

static rebatch_status launch(const struct launch *given)
{
    if (gpu.recorded) {
        cr_assert_lt(gpu.recorded->count, LAUNCHES_MOST);
        gpu.recorded->launches[gpu.recorded->count++] = *given;
        return REBATCH_OK;
    }
    struct launch *const own = malloc(sizeof *own);
    cr_assert_not_null(own);
    *own = *given;
    return rebatch_stream_call(gpu.device, gpu.stream, run_kernel, own);
}

static rebatch_status begin_capture(void *self, rebatch_stream stream)
{
    (void)self;
    cr_assert_eq(stream, gpu.stream);
    cr_assert_null(gpu.recorded);
    gpu.recorded = calloc(1, sizeof *gpu.recorded);
    gpu.captured++;
    return REBATCH_OK;
}

static rebatch_status end_capture(void *self, rebatch_stream stream, rbi_graph *out)
{
    (void)self, (void)stream;
    cr_assert_not_null(gpu.recorded);
    *out = gpu.recorded;
    gpu.recorded = NULL;
    return REBATCH_OK;
}

static rebatch_status graph_launch(void *self, rbi_graph graph, rebatch_stream stream)
{
    (void)self, (void)stream;
    gpu.launched++;
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < graph->count && !status; i++)
        status = launch(&graph->launches[i]);
    return status;
}

static void graph_destroy(void *self, rbi_graph graph)
{
    (void)self;
    gpu.destroyed++;
    free(graph);
}

static void open_gpu(bool captures)
{
    memset(&gpu, 0, sizeof gpu);
    cr_assert_eq(rebatch_device_open_host(&gpu.device, 16 << 20, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_stream_create(&gpu.stream, gpu.device), REBATCH_OK);
    gpu.ops = *gpu.device->ops;
    if (captures) {
        gpu.ops.begin_capture = begin_capture;
        gpu.ops.end_capture = end_capture;
        gpu.ops.graph_launch = graph_launch;
        gpu.ops.graph_destroy = graph_destroy;
    }
    gpu.device->ops = &gpu.ops;
}

/* ---- a training ---- */

enum flaw {
    NONE,
    BY_VALUE,
    ALLOCATES,
    COUNTS,
    UNWATCHED,
    ESCAPES,
    MOVES,
    SMALLER,
    OOM_IN_ZERO_GRAD
};

struct training {
    rebatch *rb;
    enum flaw flaw;
    struct place *place;
    double *sums, *other, *samples;
    void *buffer;
    size_t counted; /* guarded */
    unsigned ran;   /* calls of forward_backward */
    unsigned told;
    char said[400];
    double results[STEPS];
    size_t step;
};

static void write_place(const struct launch *launch)
{
    *launch->place = launch->value;
}

static void add(const struct launch *launch)
{
    const struct place at = launch->place ? *launch->place : launch->value;
    for (size_t i = 0; i < launch->count; i++)
        *launch->sums += launch->samples[at.first + i] / (double)((at.step + 3) * launch->batch);
}

static rebatch_status inputs(const rebatch_microbatch *mb, void *user)
{
    const struct training *t = user;
    return launch(
        &(struct launch){.kernel = write_place, .place = t->place, .value = {mb->first, mb->step}});
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct training *t = user;
    t->ran++;
    t->counted += t->flaw == COUNTS;
    void *block = NULL;
    if (t->flaw == ALLOCATES && rebatch_pool_alloc(&block, mb->pool, 512, mb->stream, 0))
        return REBATCH_OOM;
    (void)rebatch_pool_free(mb->pool, block);
    rebatch_mutating(t->rb);
    if (t->flaw == ESCAPES && gpu.recorded)
        rebatch_escape(t->rb, REBATCH_E_DEVICE);
    return launch(&(struct launch){.kernel = add,
                                   .place = t->flaw == BY_VALUE ? NULL : t->place,
                                   .value = {mb->first, mb->step},
                                   .sums = t->sums,
                                   .samples = t->samples,
                                   .count = mb->count,
                                   .batch = mb->batch});
}

static rebatch_status zero_grad(void *user)
{
    struct training *t = user;
    if (t->flaw == MOVES && t->step == 6) {
        double *const now = t->other;
        t->other = t->sums;
        t->sums = now;
    }
    if (t->flaw == OOM_IN_ZERO_GRAD && t->step == 6) {
        t->flaw = NONE;
        return REBATCH_OOM;
    }
    return rebatch_fill(gpu.device, t->sums, 0, sizeof *t->sums, gpu.stream);
}

static rebatch_status optimizer_step(void *user)
{
    struct training *t = user;
    rebatch_mutating(t->rb);
    const rebatch_status status = rebatch_stream_synchronize(gpu.device, gpu.stream);
    t->results[t->step++] = *t->sums;
    return status;
}

static rebatch_status resize(size_t micro_batch, void *user)
{
    struct training *t = user;
    return rebatch_pool_alloc(&t->buffer, rebatch_get_pool(t->rb), 4096 * micro_batch, gpu.stream,
                              0);
}

static void note(const rebatch_event *event, void *user)
{
    struct training *t = user;
    if (event->kind != REBATCH_EVENT_NOT_CAPTURED)
        return;
    t->told++;
    (void)rebatch_event_format(t->said, sizeof t->said, event);
}

static void *take(struct training *t, size_t bytes)
{
    void *memory;
    cr_assert_eq(rebatch_pool_alloc(&memory, rebatch_get_pool(t->rb), bytes, gpu.stream, 0),
                 REBATCH_OK);
    memset(memory, 0, bytes);
    return memory;
}

static void train(struct training *t, uint32_t flags, enum flaw flaw)
{
    const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                  .zero_grad = zero_grad,
                                  .forward_backward = forward_backward,
                                  .optimizer_step = optimizer_step,
                                  .resize = resize,
                                  .inputs = inputs,
                                  .flags = flags | REBATCH_DECLARES_MUTATION};
    rebatch_options options = REBATCH_OPTIONS_INIT;
    *t = (struct training){.flaw = flaw};
    options.stream = gpu.stream;
    options.micro_start = options.micro_largest = MICRO;
    options.growth = REBATCH_OFF;
    options.on_event = note;
    options.on_event_user = t;
    cr_assert_eq(rebatch_open(&t->rb, gpu.device, &options), REBATCH_OK);
    t->place = take(t, sizeof *t->place);
    t->sums = take(t, sizeof *t->sums);
    t->other = take(t, sizeof *t->other);
    t->samples = take(t, BATCH * sizeof *t->samples);
    for (size_t i = 0; i < BATCH; i++)
        t->samples[i] = 1.0 / (double)(i + 3);
    cr_assert_eq(rebatch_guard(t->rb, &t->counted, sizeof t->counted, REBATCH_GUARD_HOST),
                 REBATCH_OK);
    if (flaw != UNWATCHED)
        cr_assert_eq(rebatch_watch_at(t->rb, "sums", &t->sums, sizeof *t->sums, REBATCH_F64),
                     REBATCH_OK);
    for (int i = 0; i < STEPS; i++)
        cr_assert_eq(rebatch_step(t->rb, &ops, flaw == SMALLER && i >= 6 ? 5 : BATCH, t, NULL),
                     REBATCH_OK, "%s", rebatch_last_error());
    rebatch_close(t->rb);
}

/* Trains with the flag, and without, and asserts that the results have the same bits. */
static void train_both(struct training *t, enum flaw flaw, bool captures)
{
    struct training plain;
    open_gpu(captures);
    train(&plain, 0, flaw);
    cr_assert_eq(gpu.captured, 0);
    train(t, REBATCH_STEP_CAPTURED, flaw);
    cr_assert_arr_eq(t->results, plain.results, sizeof plain.results);
    cr_assert_eq(gpu.captured, gpu.destroyed, "a graph is left");
    rebatch_stream_destroy(gpu.device, gpu.stream);
    rebatch_device_close(gpu.device);
}

/* Of 2, 2, 2 and 1 samples. Captured in the third step; in the fourth the first micro-batch runs
 * by itself, as its samples are those of the capture, the second is compared, and so is the last,
 * which has no others. */
Test(recover_captured, a_micro_batch_is_captured_compared_and_then_replayed)
{
    struct training t;
    train_both(&t, NONE, true);
    cr_assert_eq(t.told, 0, "%s", t.said);
    cr_assert_eq(gpu.captured, 2);
    cr_assert_eq(t.ran, 3 * 4 + 2 + 3);
    cr_assert_eq(gpu.launched, 3 + 6 * 4);
}

static void assert_refused(enum flaw flaw, bool captures, const char *why)
{
    struct training t;
    train_both(&t, flaw, captures);
    cr_assert_eq(t.told, 1);
    cr_assert_not_null(strstr(t.said, "micro-batches run without a graph:"));
    cr_assert_not_null(strstr(t.said, why), "%s", t.said);
}

Test(recover_captured, what_is_wrong_in_a_replay_is_said_once_and_not_replayed)
{
    assert_refused(BY_VALUE, true, "a replay on other samples has another result");
    assert_refused(COUNTS, true, "forward_backward changes guarded host state");
    assert_refused(ALLOCATES, true, "forward_backward allocates from the pool");
    assert_refused(UNWATCHED, true, "nothing is watched that could be compared");
    assert_refused(ESCAPES, true, "");
    assert_refused(NONE, false, "cannot capture: expected a GPU");
}

Test(recover_captured, graphs_go_where_memory_may_have_moved)
{
    struct training t;
    train_both(&t, MOVES, true);
    cr_assert_eq(t.told, 0, "%s", t.said);
    cr_assert_eq(gpu.captured, 4, "captured anew");
    train_both(&t, SMALLER, true);
    cr_assert_eq(t.told, 0, "%s", t.said);
    cr_assert_eq(gpu.captured, 4, "captured anew");
    train_both(&t, OOM_IN_ZERO_GRAD, true);
    cr_assert_eq(t.told, 0, "%s", t.said);
    cr_assert_gt(gpu.captured, 2, "captured anew");
}

Test(recover_captured, the_flag_needs_a_stream_and_callbacks)
{
    rebatch *rb;
    rebatch_step_ops ops = {.struct_size = sizeof ops,
                            .forward_backward = forward_backward,
                            .optimizer_step = optimizer_step,
                            .flags = REBATCH_STEP_CAPTURED};
    open_gpu(true);
    cr_assert_eq(rebatch_open(&rb, gpu.device, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_step(rb, &ops, BATCH, NULL, NULL), REBATCH_E_INVALID);
    cr_assert_not_null(strstr(rebatch_last_error(), "options.stream is NULL"));
    cr_assert_eq(rebatch_step_plain(rb, BATCH, NULL, NULL, NULL, NULL, REBATCH_STEP_CAPTURED, NULL),
                 REBATCH_E_UNSUPPORTED);
    rebatch_close(rb);
    rebatch_stream_destroy(gpu.device, gpu.stream);
    rebatch_device_close(gpu.device);
}
