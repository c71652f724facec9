/* Micro-batches that CUDA captures: a training with REBATCH_STEP_CAPTURED has the bits of the same
 * without, runs forward_backward only until its graph is proved, and a graph that has the first
 * sample within is not used. Contexts are made inside the tests. */
#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <string.h>

#include "kernels.h"
#include "rebatch/rebatch.h"

enum { BATCH = 7, MICRO = 2, STEPS = 10, WIDTH = 4096 };

#define ASSERT_OK(call)                                                                            \
    do {                                                                                           \
        const rebatch_status status_ = (call);                                                     \
        cr_assert_eq(status_, REBATCH_OK, "%s: %s: %s", #call, rebatch_status_name(status_),       \
                     rebatch_last_error());                                                        \
    } while (0)

struct training {
    rebatch_device *device;
    rebatch_stream stream;
    rebatch *rb;
    bool by_value;
    float *samples; /* [BATCH][WIDTH] */
    float *buffer;  /* [micro-batch][WIDTH] */
    float *sums;    /* [WIDTH] */
    unsigned ran, told;
    char said[400];
    float results[STEPS][WIDTH];
    size_t step;
};

static rebatch_status inputs(const rebatch_microbatch *mb, void *user)
{
    const struct training *t = user;
    return rebatch_copy(t->device, t->buffer, t->samples + mb->first * WIDTH,
                        mb->count * WIDTH * sizeof *t->buffer, t->stream);
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct training *t = user;
    const float *const from = t->by_value ? t->samples + mb->first * WIDTH : t->buffer;
    t->ran++;
    rebatch_mutating(t->rb);
    return rebatch_from_cuda(t->device,
                             (int)rbk_accumulate_partials(t->sums, from, mb->count, 1, WIDTH,
                                                          (cudaStream_t)(void *)t->stream));
}

static rebatch_status zero_grad(void *user)
{
    const struct training *t = user;
    return rebatch_fill(t->device, t->sums, 0, WIDTH * sizeof *t->sums, t->stream);
}

static rebatch_status optimizer_step(void *user)
{
    struct training *t = user;
    rebatch_mutating(t->rb);
    const rebatch_status status =
        rebatch_copy(t->device, t->results[t->step++], t->sums, WIDTH * sizeof *t->sums, t->stream);
    return status ? status : rebatch_stream_synchronize(t->device, t->stream);
}

static rebatch_status resize(size_t micro_batch, void *user)
{
    struct training *t = user;
    void *memory;
    const rebatch_status status = rebatch_pool_alloc(
        &memory, rebatch_get_pool(t->rb), micro_batch * WIDTH * sizeof *t->buffer, t->stream, 0);
    if (!status)
        t->buffer = memory;
    return status;
}

static void note(const rebatch_event *event, void *user)
{
    struct training *t = user;
    if (event->kind != REBATCH_EVENT_NOT_CAPTURED)
        return;
    t->told++;
    (void)rebatch_event_format(t->said, sizeof t->said, event);
}

static float *take(const struct training *t, size_t count)
{
    void *memory;
    ASSERT_OK(
        rebatch_pool_alloc(&memory, rebatch_get_pool(t->rb), count * sizeof(float), t->stream, 0));
    return memory;
}

static void train(struct training *t, uint32_t flags, bool by_value)
{
    static float samples[BATCH * WIDTH];
    const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                  .zero_grad = zero_grad,
                                  .forward_backward = forward_backward,
                                  .optimizer_step = optimizer_step,
                                  .resize = resize,
                                  .inputs = inputs,
                                  .flags = flags | REBATCH_DECLARES_MUTATION};
    rebatch_options options = REBATCH_OPTIONS_INIT;
    memset(t, 0, sizeof *t);
    t->by_value = by_value;
    ASSERT_OK(rebatch_device_open_cuda(&t->device, NULL));
    ASSERT_OK(rebatch_stream_create(&t->stream, t->device));
    options.stream = t->stream;
    options.micro_start = options.micro_largest = MICRO;
    options.growth = REBATCH_OFF;
    options.on_event = note;
    options.on_event_user = t;
    ASSERT_OK(rebatch_open(&t->rb, t->device, &options));
    cr_assert_eq(cudaSetDevice(0), cudaSuccess);
    t->samples = take(t, BATCH * WIDTH);
    t->sums = take(t, WIDTH);
    for (size_t i = 0; i < BATCH * WIDTH; i++)
        samples[i] = 1.0f / (float)(i % 977 + 3);
    ASSERT_OK(rebatch_copy(t->device, t->samples, samples, sizeof samples, t->stream));
    ASSERT_OK(rebatch_watch_at(t->rb, "sums", &t->sums, WIDTH * sizeof *t->sums, REBATCH_F32));
    for (int i = 0; i < STEPS; i++)
        ASSERT_OK(rebatch_step(t->rb, &ops, BATCH, t, NULL));
    rebatch_close(t->rb);
    rebatch_stream_destroy(t->device, t->stream);
    rebatch_device_close(t->device);
}

static struct training plain, captured;

Test(captured_cuda, replays_have_the_bits_of_the_micro_batches_themselves)
{
    train(&plain, 0, false);
    train(&captured, REBATCH_STEP_CAPTURED, false);
    cr_assert_eq(captured.told, 0, "%s", captured.said);
    cr_assert_eq(captured.ran, 3 * 4 + 2 + 3, "the last six steps are replayed");
    cr_assert_arr_eq(captured.results, plain.results, sizeof plain.results);
}

Test(captured_cuda, a_graph_with_the_samples_address_within_is_refused)
{
    train(&plain, 0, true);
    train(&captured, REBATCH_STEP_CAPTURED, true);
    cr_assert_eq(captured.told, 1);
    cr_assert_not_null(strstr(captured.said, "a replay on other samples has another result"));
    cr_assert_arr_eq(captured.results, plain.results, sizeof plain.results);
}
