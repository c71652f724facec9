/* Owns the tests of rebatch_map(): what runs, what is undone, and that training does not notice.
 * Must not know more of the library than its public headers say. */
#include "rig.h"

#define SAMPLES 256

/* An evaluation: each sample needs memory, and has a result. */
struct evaluation {
    char events[1024]; /* what they say, but for times */
    rebatch *rb;
    rebatch_device *device;
    size_t sample_bytes;
    size_t fail_from; /* the call with this sample returns a status of its own; SAMPLES: none */
    unsigned ooms;    /* the next calls that return REBATCH_OOM, whatever room there is */
    unsigned tries[SAMPLES];
    unsigned result[SAMPLES];
    double sum; /* guarded */
    void *kept; /* guarded: made when it is NULL */
    size_t calls, largest;
    /* of a trainer */
    size_t room; /* samples of its buffers */
    size_t resizes, updates;
    char *buffer;
};

static rebatch_status evaluate(const rebatch_microbatch *mb, void *user)
{
    struct evaluation *e = user;
    void *memory;
    rebatch_status status = REBATCH_OK;
    e->calls++;
    if (e->ooms > 0) {
        e->ooms--;
        return REBATCH_OOM;
    }
    for (size_t s = mb->first; s < mb->first + mb->count; s++) {
        e->tries[s]++;
        e->sum += 1.0 / (double)(s + 1);
    }
    if (!e->kept)
        status = rebatch_pool_alloc(&e->kept, mb->pool, KIB(64), mb->stream, 0);
    if (!status)
        status = rebatch_pool_alloc(&memory, mb->pool, mb->count * e->sample_bytes, mb->stream, 0);
    if (status)
        return status;
    if (mb->first + mb->count > e->fail_from)
        return REBATCH_E_USER + 7;
    for (size_t s = mb->first; s < mb->first + mb->count; s++)
        e->result[s]++;
    e->largest = mb->count > e->largest ? mb->count : e->largest;
    return rebatch_pool_free(mb->pool, memory);
}

static void note(const rebatch_event *event, void *user)
{
    struct evaluation *e = user;
    char line[512];
    (void)rebatch_event_format(line, sizeof line, event);
    (void)strncat(e->events, line, strcspn(line, ";"));
    (void)strcat(e->events, "\n");
}

static rebatch_map_ops evaluation_ops(void)
{
    const rebatch_map_ops ops = {.struct_size = sizeof ops, .run = evaluate};
    return ops;
}

static void evaluation_open(struct evaluation *e, size_t limit_bytes, size_t sample_bytes)
{
    *e = (struct evaluation){.sample_bytes = sample_bytes, .fail_from = SAMPLES};
    OK(rebatch_device_open_host(&e->device, MIB(64), NULL));
    OK(rebatch_open(&e->rb, e->device,
                    &OPTIONS(.pool.limit_bytes = limit_bytes, .log_level = REBATCH_LOG_WARN,
                             .on_event = note, .on_event_user = e, .grow_after = 4)));
    OK(rebatch_guard(e->rb, &e->sum, sizeof e->sum, REBATCH_GUARD_HOST));
    OK(rebatch_guard(e->rb, &e->kept, sizeof e->kept, REBATCH_GUARD_HOST));
}

static void evaluation_close(struct evaluation *e)
{
    rebatch_close(e->rb);
    cr_assert_eq(used_bytes_of(e->device), 0);
    rebatch_device_close(e->device);
}

static double sum_of(size_t count)
{
    double sum = 0;
    for (size_t s = 0; s < count; s++)
        sum += 1.0 / (double)(s + 1);
    return sum;
}

Test(step_map, every_sample_counts_once_whatever_the_cut)
{
    rebatch_step_report report;
    const rebatch_map_ops ops = evaluation_ops();
    OPEN(evaluation, e, MIB(4), KIB(100)); /* 39 samples at once */
    OK(rebatch_map(e.rb, &ops, 200, &e, &report));
    for (size_t s = 0; s < 200; s++)
        cr_assert_eq(e.result[s], 1, "sample %zu has %u results", s, e.result[s]);
    cr_assert_eq(e.sum, sum_of(200));
    cr_assert_gt(report.ooms_in[REBATCH_PHASE_MAP], 0);
    cr_assert_eq(report.micro, e.largest);
    cr_assert_eq(report.microbatches + report.ooms_in[REBATCH_PHASE_MAP], report.attempts);
    cr_assert_leq(e.largest, 39);
    cr_assert_geq(e.largest, 19);
    cr_assert_eq(live_bytes_of(e.rb), KIB(64),
                 "what the attempts have allocated was not taken back");
}

Test(step_map, the_size_is_kept_and_grows_again)
{
    rebatch_step_report report;
    const rebatch_map_ops ops = evaluation_ops();
    OPEN(evaluation, e, MIB(4), KIB(100));
    OK(rebatch_map(e.rb, &ops, 200, &e, &report));
    OK(rebatch_map(e.rb, &ops, 30, &e, &report));
    cr_assert_eq(report.ooms, 0, "what it had learned is forgotten");
    OK(rebatch_pool_set_limit(rebatch_get_pool(e.rb), MIB(32)));
    for (int i = 0; i < 8; i++)
        OK(rebatch_map(e.rb, &ops, 200, &e, &report));
    cr_assert_eq(e.largest, 200, "it went up to %zu only", e.largest);
}

Test(step_map, it_grows_after_grow_after_calls_without_an_oom)
{
    const rebatch_map_ops ops = evaluation_ops();
    OPEN(evaluation, e, MIB(16), KIB(100)); /* grow_after is 4 */
    e.ooms = 1;
    OK(rebatch_map(e.rb, &ops, 64, &e, NULL));
    cr_assert_eq(e.calls, 3);
    OK(rebatch_pool_set_limit(rebatch_get_pool(e.rb), MIB(32)));
    OK(rebatch_map(e.rb, &ops, 96, &e, NULL));
    cr_assert_eq(e.calls, 6);
    cr_assert_eq(e.largest, 32);
    OK(rebatch_map(e.rb, &ops, 96, &e, NULL));
    cr_assert_eq(e.largest, 64);
}

static size_t size_of_first_call(struct evaluation *e, const rebatch_map_ops *ops)
{
    e->largest = 0;
    OK(rebatch_map(e->rb, ops, 30, e, NULL));
    return e->largest;
}

/* A key stands for a function whose address tells nothing, such as that of all of Python's. */
Test(step_map, each_key_has_a_size_of_its_own)
{
    static const char large, small;
    rebatch_map_ops ops = evaluation_ops();
    OPEN(evaluation, e, MIB(4), KIB(400)); /* 9 samples at once */
    ops.key = &large;
    const size_t held = size_of_first_call(&e, &ops);
    cr_assert_leq(held, 9);
    e.sample_bytes = KIB(1);
    ops.key = &small;
    cr_assert_eq(size_of_first_call(&e, &ops), 30, "it begins with the size of another key");
    ops.key = NULL;
    cr_assert_eq(size_of_first_call(&e, &ops), 30);
    ops.key = &large;
    cr_assert_eq(size_of_first_call(&e, &ops), held, "the size of this key is forgotten");
}

Test(step_map, a_failure_undoes_what_the_calls_allocated_and_restores_guarded_state)
{
    const rebatch_map_ops ops = evaluation_ops();
    OPEN(evaluation, e, MIB(4), KIB(100));
    e.fail_from = 150;
    FAILS(rebatch_map(e.rb, &ops, 200, &e, NULL), REBATCH_E_USER + 7, "map of samples");
    cr_assert_eq(e.sum, 0);
    cr_assert_null(e.kept);
    cr_assert_eq(live_bytes_of(e.rb), 0);
}

Test(step_map, one_sample_that_does_not_fit_is_the_end)
{
    rebatch_step_report report;
    const rebatch_map_ops ops = evaluation_ops();
    OPEN(evaluation, e, MIB(4), MIB(5));
    FAILS(rebatch_map(e.rb, &ops, 16, &e, &report), REBATCH_E_EXHAUSTED,
          "out of memory in map of 1 sample");
    cr_assert_eq(report.status, REBATCH_E_EXHAUSTED);
    cr_assert_eq(report.micro, 0);
    cr_assert_eq(e.sum, 0);
}

Test(step_map, largest_and_the_limits_hold)
{
    rebatch_map_ops ops = evaluation_ops();
    ops.largest = 7;
    OPEN(evaluation, e, MIB(4), KIB(1));
    OK(rebatch_map(e.rb, &ops, 100, &e, NULL));
    cr_assert_eq(e.largest, 7);
    OK(rebatch_map(e.rb, &ops, 3, &e, NULL));
    OK(rebatch_map(e.rb, &ops, 0, &e, NULL));
    cr_assert_eq(e.result[0], 2);
}

/* ---- beside training ---- */

static rebatch_status resize(size_t samples, void *user)
{
    struct evaluation *e = user;
    void *memory;
    e->resizes++;
    const rebatch_status status =
        rebatch_pool_alloc(&memory, rebatch_get_pool(e->rb), samples * e->sample_bytes, NULL, 0);
    if (!status) {
        e->buffer = memory;
        e->room = samples;
    }
    return status;
}

static rebatch_status use_buffer(const rebatch_microbatch *mb, void *user)
{
    struct evaluation *e = user;
    cr_assert_leq(mb->count, e->room, "%zu samples in a buffer for %zu", mb->count, e->room);
    rebatch_mutating(e->rb);
    memset(e->buffer, 1, mb->count * e->sample_bytes);
    for (size_t s = mb->first; s < mb->first + mb->count; s++)
        e->result[s]++;
    e->largest = mb->count > e->largest ? mb->count : e->largest;
    return REBATCH_OK;
}

static rebatch_status train_alone(const rebatch_microbatch *mb, void *user)
{
    struct evaluation *e = user;
    void *memory;
    const rebatch_status status =
        rebatch_pool_alloc(&memory, mb->pool, mb->count * e->sample_bytes * 2, mb->stream, 0);
    if (status)
        return status;
    rebatch_mutating(e->rb);
    return rebatch_pool_free(mb->pool, memory);
}

static rebatch_status update(void *user)
{
    struct evaluation *e = user;
    rebatch_mutating(e->rb);
    e->updates++;
    return REBATCH_OK;
}

static rebatch_step_ops training_ops(bool resizes)
{
    return (rebatch_step_ops)OPS(nothing_to_do, resizes ? use_buffer : train_alone, update,
                                 .resize = resizes ? resize : NULL,
                                 .flags = REBATCH_DECLARES_MUTATION);
}

Test(step_map, training_does_not_notice)
{
    rebatch_step_report before, after;
    const rebatch_map_ops map = evaluation_ops();
    const rebatch_step_ops step = training_ops(false);
    OPEN(evaluation, e, MIB(4), KIB(100)); /* training fits 20 samples, evaluation 39 */
    OK(rebatch_step(e.rb, &step, 64, &e, &before));
    const size_t size = rebatch_get_micro(e.rb, 64);
    cr_assert_eq(size, 16);
    OK(rebatch_map(e.rb, &map, 200, &e, NULL));
    cr_assert_gt(e.largest, size, "evaluation has the size of training");
    cr_assert_eq(rebatch_get_micro(e.rb, 64), size);
    OK(rebatch_step(e.rb, &step, 64, &e, &after));
    cr_assert_eq(after.step, 1, "evaluation counts as a step");
    cr_assert_eq(after.ooms, 0);
    cr_assert_eq(after.micro_before, size);
}

Test(step_map, with_the_steps_resize_it_uses_the_steps_buffers)
{
    const rebatch_step_ops step = training_ops(true);
    const rebatch_map_ops map = {.struct_size = sizeof map, .run = use_buffer, .resize = resize};
    OPEN(evaluation, e, MIB(4), KIB(100));
    OK(rebatch_step(e.rb, &step, 64, &e, NULL));
    const size_t resizes = e.resizes;
    cr_assert_eq(e.room, 32);
    e.largest = 0;
    memset(e.result, 0, sizeof e.result);
    OK(rebatch_map(e.rb, &map, 200, &e, NULL));
    cr_assert_eq(e.resizes, resizes);
    cr_assert_eq(e.largest, 32);
    for (size_t s = 0; s < 200; s++)
        cr_assert_eq(e.result[s], 1);
    OK(rebatch_step(e.rb, &step, 64, &e, NULL));
    cr_assert_eq(e.resizes, resizes, "the step's buffers were made again");
}

Test(step_map, before_the_first_step_it_makes_the_buffers)
{
    const rebatch_step_ops step = training_ops(true);
    const rebatch_map_ops map = {
        .struct_size = sizeof map, .run = use_buffer, .resize = resize, .largest = 64};
    OPEN(evaluation, e, MIB(4), KIB(100));
    OK(rebatch_map(e.rb, &map, 200, &e, NULL));
    cr_assert_eq(e.room, 32);
    const size_t resizes = e.resizes;
    OK(rebatch_step(e.rb, &step, 32, &e, NULL));
    cr_assert_eq(e.resizes, resizes);
}

static rebatch_status resize_otherwise(size_t samples, void *user)
{
    return resize(samples, user);
}

Test(step_map, with_another_resize_the_steps_buffers_give_way)
{
    const rebatch_step_ops step = training_ops(true);
    const rebatch_map_ops map = {
        .struct_size = sizeof map, .run = use_buffer, .resize = resize_otherwise};
    OPEN(evaluation, e, MIB(4), KIB(100));
    OK(rebatch_step(e.rb, &step, 32, &e, NULL));
    const size_t resizes = e.resizes;
    OK(rebatch_map(e.rb, &map, 200, &e, NULL));
    cr_assert_gt(e.resizes, resizes);
    cr_assert_leq(live_bytes_of(e.rb), MIB(4));
    const size_t again = e.resizes;
    OK(rebatch_step(e.rb, &step, 32, &e, NULL));
    cr_assert_gt(e.resizes, again);
}

/* The OOM of an allocation, an attempt that was not started, and buffers that were not made. */
Test(step_map, events_and_the_last_sentence_name_the_map)
{
    const rebatch_map_ops ops = evaluation_ops();
    const rebatch_map_ops buffered = {
        .struct_size = sizeof ops, .run = use_buffer, .resize = resize};
    OPEN(evaluation, e, MIB(4), KIB(100));
    OK(rebatch_map(e.rb, &ops, 39, &e, NULL));
    cr_expect_str_empty(e.events);
    OK(rebatch_pool_set_limit(rebatch_get_pool(e.rb), MIB(2)));
    OK(rebatch_map(e.rb, &ops, 39, &e, NULL));
    HAS(e.events, "step 0: not started: samples 0-38 need 3.");
    HAS(e.events, ", there is 1.94 MiB (in map)");
    e.events[0] = '\0';
    OK(rebatch_map(e.rb, &buffered, 39, &e, NULL));
    HAS(e.events, "step 0: out of memory in resize: ");
    HAS(e.events, " (in map)");
    OK(rebatch_pool_set_limit(rebatch_get_pool(e.rb), KIB(64)));
    FAILS(rebatch_map(e.rb, &ops, 1, &e, NULL), REBATCH_E_EXHAUSTED, "out of memory in map of 1 ");
    OPEN(evaluation, other, KIB(64), KIB(100));
    FAILS(rebatch_map(other.rb, &buffered, 1, &other, NULL), REBATCH_E_EXHAUSTED,
          "out of memory in resize of 1 sample of a map, ");
}

/* A step without a resize of its own does not make a map's buffers the step's. */
Test(step_map, buffers_of_its_own_grow_with_its_samples)
{
    const rebatch_step_ops step = training_ops(false);
    const rebatch_map_ops map = {.struct_size = sizeof map, .run = use_buffer, .resize = resize};
    OPEN(evaluation, e, MIB(4), KIB(1));
    OK(rebatch_map(e.rb, &map, 1, &e, NULL));
    for (int i = 0; i < 3; i++) {
        OK(rebatch_step(e.rb, &step, 8, &e, NULL));
        e.largest = 0;
        OK(rebatch_map(e.rb, &map, 64, &e, NULL));
        cr_expect_eq(e.largest, 64);
    }
}

/* A step of a small batch leaves small buffers; the limits on the size hold for a map. */
Test(step_map, the_steps_buffers_do_not_make_it_smaller_than_the_limits)
{
    AUTO_CLOSE(evaluation, e);
    const rebatch_step_ops step = training_ops(true);
    rebatch_map_ops map = REBATCH_MAP_OPS_INIT;
    rebatch_step_report report;
    map.run = use_buffer;
    map.resize = resize;
    e = (struct evaluation){.sample_bytes = KIB(1), .fail_from = SAMPLES};
    open_on_host(&e.device, &e.rb, MIB(64), &OPTIONS(.micro_smallest = 4));
    OK(rebatch_step(e.rb, &step, 2, &e, NULL));
    cr_assert_eq(e.room, 2);
    OK(rebatch_map(e.rb, &map, 2, &e, NULL));
    cr_expect_eq(e.room, 2, "a rest is as it is");
    OK(rebatch_map(e.rb, &map, 64, &e, &report));
    cr_expect_eq(report.microbatches, 1);
}

/* The first step begins with what an evaluation before it has found. */
Test(step_map, a_step_does_not_search_again_for_the_size_of_the_same_buffers)
{
    const rebatch_step_ops step = training_ops(true);
    rebatch_map_ops map = REBATCH_MAP_OPS_INIT;
    rebatch_step_report report;
    map.run = use_buffer;
    map.resize = resize;
    OPEN(evaluation, e, MIB(4), KIB(100));
    OK(rebatch_map(e.rb, &map, 200, &e, &report));
    cr_assert_gt(report.ooms, 0);
    const size_t found = report.micro_after, resizes = e.resizes;
    OK(rebatch_step(e.rb, &step, 200, &e, &report));
    cr_expect_eq(report.ooms, 0);
    cr_expect_eq(report.micro_before, found);
    cr_expect_eq(e.resizes, resizes);
}

static rebatch_status evaluate_within(const rebatch_microbatch *mb, void *user)
{
    struct evaluation *e = user;
    const rebatch_map_ops ops = evaluation_ops();
    cr_assert_eq(rebatch_map(e->rb, &ops, 4, e, NULL), REBATCH_E_STATE);
    return mb->count ? REBATCH_OK : REBATCH_E_STATE;
}

Test(step_map, what_it_refuses)
{
    rebatch_map_ops ops = REBATCH_MAP_OPS_INIT;
    OPEN(evaluation, e, MIB(4), KIB(1));
    cr_assert_eq(rebatch_map(NULL, &ops, 4, &e, NULL), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_map(e.rb, NULL, 4, &e, NULL), REBATCH_E_INVALID);
    FAILS(rebatch_map(e.rb, &ops, 4, &e, NULL), REBATCH_E_INVALID, "ops.run is NULL");
    ops.run = evaluate_within;
    OK(rebatch_map(e.rb, &ops, 4, &e, NULL));
    ops.struct_size = 3;
    rebatch_step_report report;
    OK(rebatch_set_lighten(e.rb, 2));
    cr_assert_eq(rebatch_map(e.rb, &ops, 4, &e, &report), REBATCH_E_INVALID);
    cr_expect_eq(report.lighten_level, 2, "the report tells the level that is in effect");
}
