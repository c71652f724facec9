/* Owns the tests of updates that run out of memory after they have begun to change parameters: host
 * memory serves them, so that none is torn. Must not know more of the library than its public
 * headers say. Seeds: none. */
#include "step_common.h"

#define PAGE ((size_t)4096)
#define LAYERS 6
#define FLOATS (3 * PAGE / sizeof(float))
#define BATCH 8
#define STEPS 6
/* Allocations of the first update: two moments of each layer, and a temporary. */
#define FIRST_ALLOCATIONS (3 * LAYERS)

struct trainer {
    rebatch_device *device;
    rebatch *rb;
    float *weights[LAYERS], *gradients[LAYERS], *moments[LAYERS], *squares[LAYERS];
    size_t fails_at; /* of the first update's allocations; 0: none */
    size_t allocations;
    size_t sample_pages;
    bool declares;
    size_t events, taken; /* that said that host memory was taken; how much the reports say */
    uint64_t left_bytes;
    size_t micro; /* of the last step */
};

static rebatch_status allocate(struct trainer *t, float **out)
{
    return rebatch_pool_alloc((void **)out, rebatch_get_pool(t->rb), FLOATS * sizeof(float), NULL,
                              0);
}

static rebatch_status zero_grad(void *user)
{
    struct trainer *t = user;
    rebatch_mutating(t->rb);
    for (size_t l = 0; l < LAYERS; l++)
        memset(t->gradients[l], 0, FLOATS * sizeof(float));
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    void *activations;
    const rebatch_status status = rebatch_pool_alloc(
        &activations, mb->pool, mb->count * t->sample_pages * PAGE, mb->stream, 0);
    if (status)
        return status;
    rebatch_mutating(t->rb);
    for (size_t i = mb->first; i < mb->first + mb->count; i++)
        for (size_t l = 0; l < LAYERS; l++)
            for (size_t j = 0; j < FLOATS; j++)
                t->gradients[l][j] += (float)(i + 1) * t->weights[l][j] / (float)mb->batch;
    return rebatch_pool_free(mb->pool, activations);
}

/* The device has not one byte more from here on. */
static void fill_device(const struct trainer *t)
{
    (void)rebatch_pool_trim(rebatch_get_pool(t->rb), 0, NULL);
    OK(rebatch_device_set_capacity(t->device, used_bytes_of(t->device)));
}

static rebatch_status make(struct trainer *t, float **out, float value)
{
    if (++t->allocations == t->fails_at)
        fill_device(t);
    const rebatch_status status = allocate(t, out);
    for (size_t j = 0; !status && j < FLOATS; j++)
        (*out)[j] = value;
    return status;
}

/* As AdamW does: what it keeps is made when it is first needed, layer by layer, between changes. */
static rebatch_status optimizer_step(void *user)
{
    struct trainer *t = user;
    rebatch_status status = REBATCH_OK;
    if (t->declares)
        rebatch_mutating(t->rb);
    for (size_t l = 0; l < LAYERS && !status; l++) {
        float *change = NULL;
        if (!t->moments[l])
            status = make(t, &t->moments[l], 0);
        if (!status && !t->squares[l])
            status = make(t, &t->squares[l], 0);
        if (!status)
            status = make(t, &change, 0);
        for (size_t j = 0; j < FLOATS && !status; j++) {
            const float g = t->gradients[l][j];
            t->moments[l][j] = 0.9f * t->moments[l][j] + 0.1f * g;
            t->squares[l][j] = 0.99f * t->squares[l][j] + 0.01f * g * g;
            change[j] = t->moments[l][j] / (1 + t->squares[l][j]);
            t->weights[l][j] -= 0.01f * change[j];
        }
        if (!status)
            status = rebatch_pool_free(rebatch_get_pool(t->rb), change);
    }
    return status;
}

static void note_event(const rebatch_event *event, void *user)
{
    struct trainer *t = user;
    char text[512];
    if (event->kind != REBATCH_EVENT_OVERFLOW)
        return;
    (void)rebatch_event_format(text, sizeof text, event);
    HAS(text, "the update took host memory");
    t->events++;
}

static void trainer_open(struct trainer *t, size_t pages, size_t beside,
                         const rebatch_options *given)
{
    rebatch_options options = given ? *given : (rebatch_options)REBATCH_OPTIONS_INIT;
    rebatch_host_options host = REBATCH_HOST_OPTIONS_INIT;
    host.page_bytes = PAGE;
    host.overflow_bytes = beside * PAGE;
    options.on_event = note_event;
    options.on_event_user = t;
    OK(rebatch_device_open_host(&t->device, pages * PAGE, &host));
    OK(rebatch_open(&t->rb, t->device, &options));
    for (size_t l = 0; l < LAYERS; l++) {
        OK(allocate(t, &t->weights[l]));
        OK(allocate(t, &t->gradients[l]));
        for (size_t j = 0; j < FLOATS; j++)
            t->weights[l][j] = 1.0f / (float)(l + j + 1);
    }
}

static rebatch_status step(struct trainer *t, rebatch_step_report *report)
{
    const rebatch_step_ops ops = OPS(zero_grad, forward_backward, optimizer_step,
                                     .flags = t->declares ? REBATCH_DECLARES_MUTATION : 0);
    const rebatch_status status = rebatch_step(t->rb, &ops, BATCH, t, report);
    const rebatch_pool_stats stats = pool_stats_of(rebatch_get_pool(t->rb));
    t->taken += report->overflow_bytes;
    t->micro = report->micro;
    t->left_bytes = stats.overflow_bytes;
    return status;
}

CLOSE_BOTH(trainer)

/* Trains with an OOM at one allocation of the first update; afterwards there is memory again. */
static void train(struct trainer *t, size_t pages, float weights[LAYERS][FLOATS])
{
    rebatch_step_report report;
    trainer_open(t, pages, 200, NULL);
    for (int i = 0; i < STEPS; i++) {
        cr_assert_eq(step(t, &report), REBATCH_OK, "allocation %zu, step %d: %s", t->fails_at, i,
                     rebatch_last_error());
        cr_assert_not(report.torn);
        OK(rebatch_device_set_capacity(t->device, pages * PAGE));
    }
    for (size_t l = 0; l < LAYERS; l++)
        memcpy(weights[l], t->weights[l], FLOATS * sizeof(float));
    trainer_close(t);
}

static void fail_each(bool declares)
{
    static float undisturbed[LAYERS][FLOATS], weights[LAYERS][FLOATS];
    struct trainer t = {.declares = declares, .sample_pages = 8};
    train(&t, 400, undisturbed);
    cr_assert_eq(t.events, 0);
    cr_assert_geq(t.allocations, FIRST_ALLOCATIONS);
    for (size_t at = 1; at <= FIRST_ALLOCATIONS; at++) {
        t = (struct trainer){.declares = declares, .sample_pages = 8, .fails_at = at};
        train(&t, 400, weights);
        cr_assert_eq(memcmp(weights, undisturbed, sizeof weights), 0, "allocation %zu", at);
        cr_assert_eq(t.events, 1, "allocation %zu", at);
        cr_assert_gt(t.taken, 0);
        cr_assert_eq(t.left_bytes, 0, "the device has room for all of it again");
    }
}

Test(step_overflow, an_oom_at_any_allocation_of_an_update_tears_none)
{
    fail_each(true);
}

Test(step_overflow, nor_where_the_update_does_not_declare)
{
    fail_each(false);
}

/* All that the optimizer keeps has its place on the device in the end, and the micro-batch falls to
 * what is left. */
Test(step_overflow, the_micro_batch_makes_room_for_what_an_update_keeps)
{
    static float undisturbed[LAYERS][FLOATS], weights[LAYERS][FLOATS];
    const size_t kept = (size_t)4 * LAYERS * 3; /* pages */
    struct trainer t = {.declares = true, .sample_pages = 1};
    train(&t, 400, undisturbed);
    t = (struct trainer){.declares = true, .sample_pages = 1};
    /* Eight samples fit beside weights and gradients, and two beside what is kept; of a temporary
     * of the update, which is as large as three samples, a part does not. */
    train(&t, kept + 2, weights);
    cr_assert_eq(t.micro, 2);
    cr_assert_eq(memcmp(weights, undisturbed, sizeof weights), 0);
    cr_assert_eq(t.events > 0, t.taken > 0);
    cr_assert_gt(t.events, 0);
    cr_assert_eq(t.left_bytes, 0);
}

/* Where what is kept is more than the device has, the next step ends, and everything is whole. */
Test(step_overflow, what_never_fits_ends_the_next_step_with_whole_parameters)
{
    const size_t kept = (size_t)4 * LAYERS * 3;
    rebatch_step_report report;
    rebatch_options options = REBATCH_OPTIONS_INIT;
    AUTO_CLOSE(trainer, plain) = {.declares = true, .sample_pages = 1};
    AUTO_CLOSE(trainer, t) = plain;
    trainer_open(&plain, 400, 0, &options);
    trainer_open(&t, kept - 10, 200, &options);
    OK(step(&plain, &report));
    OK(step(&t, &report));
    cr_assert_geq(t.left_bytes, 10 * PAGE);
    cr_assert_eq(step(&t, &report), REBATCH_E_EXHAUSTED);
    cr_assert_not(report.torn);
    for (size_t l = 0; l < LAYERS; l++)
        cr_assert_eq(memcmp(t.weights[l], plain.weights[l], FLOATS * sizeof(float)), 0);
}

static void assert_torn(size_t beside, const rebatch_options *options)
{
    AUTO_CLOSE(trainer, t) = {.declares = true, .sample_pages = 8, .fails_at = 4};
    rebatch_step_report report;
    trainer_open(&t, 400, beside, options);
    cr_assert_eq(step(&t, &report), REBATCH_E_TORN);
    cr_assert(report.torn);
}

Test(step_overflow, without_host_memory_an_update_is_torn)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.log_level = REBATCH_LOG_QUIET;
    assert_torn(0, &options);
    assert_torn(2, &options); /* less than a block */
    options.pool.overflow_bytes = 2 * PAGE;
    assert_torn(200, &options);
    options.pool.overflow_bytes = 0;
    options.pool.overflow = REBATCH_OFF;
    assert_torn(200, &options);
}

static rebatch_status no_lighter(unsigned level, void *user)
{
    (void)level;
    (void)user;
    return REBATCH_E_UNSUPPORTED;
}

static rebatch_status reserving_step(void *user)
{
    struct trainer *t = user;
    float *block;
    t->weights[0][0] += 1;
    if (++t->allocations == 1)
        fill_device(t);
    rebatch_status status = rebatch_reserve(t->rb, FLOATS * sizeof(float));
    if (!status)
        status = allocate(t, &block);
    if (!status)
        rebatch_mutating(t->rb);
    return status ? status : rebatch_pool_free(rebatch_get_pool(t->rb), block);
}

/* Whatever could be made smaller instead: it cannot run again. */
Test(step_overflow, a_reservation_of_an_update_that_does_not_declare_is_served)
{
    AUTO_CLOSE(trainer, t) = {.sample_pages = 1};
    rebatch_step_report report;
    trainer_open(&t, 400, 200, NULL);
    const rebatch_step_ops ops =
        OPS(zero_grad, forward_backward, reserving_step, .lighten = no_lighter);
    OK(rebatch_step(t.rb, &ops, BATCH, &t, &report));
    cr_assert_gt(report.overflow_bytes, 0);
    cr_assert_not(report.torn);
}

static rebatch_status no_samples(const rebatch_microbatch *mb, void *user)
{
    (void)mb;
    (void)user;
    return REBATCH_OK;
}

/* The update runs a step of another session, whose own update ends before this one allocates. */
static rebatch_status nesting_step(void *user)
{
    struct trainer *t = user;
    const rebatch_step_ops ops = OPS(nothing_to_do, no_samples, nothing_to_do, .flags = 0);
    rebatch *inner;
    float *block;
    rebatch_mutating(t->rb);
    OK(rebatch_open(&inner, t->device, &OPTIONS(.existing_pool = rebatch_get_pool(t->rb))));
    OK(rebatch_step(inner, &ops, 1, NULL, NULL));
    rebatch_close(inner);
    fill_device(t);
    const rebatch_status status = allocate(t, &block);
    return status ? status : rebatch_pool_free(rebatch_get_pool(t->rb), block);
}

/* The report of a step that succeeds with this update. */
static rebatch_step_report report_of(rebatch_status (*update)(void *user))
{
    struct trainer t = {.declares = true, .sample_pages = 1};
    rebatch_step_report report;
    trainer_open(&t, 400, 200, NULL);
    const rebatch_step_ops ops =
        OPS(zero_grad, forward_backward, update, .flags = REBATCH_DECLARES_MUTATION);
    OK(rebatch_step(t.rb, &ops, BATCH, &t, &report));
    trainer_close(&t);
    return report;
}

Test(step_overflow, a_step_of_another_session_within_an_update_leaves_it_served)
{
    cr_assert_gt(report_of(nesting_step).overflow_bytes, 0);
}

/* An allocation before rebatch_mutating() may fail, and then the update runs again. */
static rebatch_status careful_step(void *user)
{
    struct trainer *t = user;
    float *block;
    if (++t->allocations == 1)
        fill_device(t);
    const rebatch_status status = allocate(t, &block);
    if (status) {
        OK(rebatch_device_set_capacity(t->device, 400 * PAGE));
        return status;
    }
    rebatch_mutating(t->rb);
    return rebatch_pool_free(rebatch_get_pool(t->rb), block);
}

Test(step_overflow, what_can_be_undone_takes_none)
{
    const rebatch_step_report report = report_of(careful_step);
    cr_assert_eq(report.overflow_bytes, 0);
    cr_assert_eq(report.ooms_in[REBATCH_PHASE_OPTIMIZER], 1);
}
