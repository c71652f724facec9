/* What finding the micro-batch of GPT-2 124M costs beside the GPU's own work: bf16, 1,024
 * positions, 128 samples a step, on a dry device with pages of 2 MiB and operations that do
 * nothing. So the calls of pool and driver are those of a GPU, and none is needed. For each cap a
 * line for a probe and one for the first step of a session that learns:
 *     NAME CAP_GIB SIZE SIZES_RUN PAGES PIECES CALLS HOST_MS
 * PAGES were taken from the device meanwhile; PIECES were mapped, each by calls of its own,
 * which is what a GPU's driver takes long for. CALLS are all those that make, map, open to access,
 * unmap or give back. HOST_MS of the thread's time were spent outside the
 * callbacks: on the search. Another line has the micro-batches of the first step beside those of a
 * later one.
 *     gpt_search [CAP_GIB...] */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device/device.h"
#include "gpt/error.h"
#include "gpt/probe.h"
#include "rebatch/rebatch.h"

enum { BATCH = 128, SIZES_MOST = 128 };

static const double caps_gib[] = {8, 12, 24, 48, 96};

/* Of this thread, so that other programs do not count. */
static double now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return 1e3 * (double)now.tv_sec + 1e-6 * (double)now.tv_nsec;
}

/* ---- operations that do nothing ---- */

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define NOTHING(name, parameters)                                                                  \
    static rebatch_status name parameters                                                          \
    {                                                                                              \
        return REBATCH_OK;                                                                         \
    }
typedef const struct gpt_queue *queue;
NOTHING(open_nothing, (struct gpt_queue * q))
NOTHING(embedding_forward,
        (queue q, void *x, const struct gpt_tokens *t, const void *a, const void *b, size_t c))
NOTHING(embedding_backward,
        (queue q, float *a, float *b, const void *x, const struct gpt_tokens *t, size_t c))
NOTHING(layernorm_forward, (queue q, void *y, float *m, float *s, const void *x, const void *g,
                            const void *b, size_t r, size_t c))
NOTHING(layernorm_backward,
        (queue q, void *d, float *g, float *b, const void *y, const void *x, const float *m,
         const float *s, const void *w, size_t r, size_t c, bool add))
NOTHING(matmul_forward,
        (queue q, void *y, const void *x, const void *w, const void *b, const struct gpt_matmul *s))
NOTHING(matmul_backward_input,
        (queue q, void *d, const void *y, const void *w, const struct gpt_matmul *s))
NOTHING(matmul_backward_weight,
        (queue q, float *w, float *b, const void *y, const void *x, const struct gpt_matmul *s))
NOTHING(attention_forward,
        (queue q, void *o, float *l, const void *x, const struct gpt_attention *s))
NOTHING(attention_backward, (queue q, void *d, const void *y, const void *o, const void *x,
                             const float *l, const struct gpt_attention *s))
NOTHING(gelu, (queue q, void *y, const void *x, size_t c))
NOTHING(dropout_add, (queue q, void *o, const void *r, const void *x, size_t s, size_t e,
                      const struct gpt_dropout *d))
NOTHING(cross_entropy, (queue q, float *l, void *x, const struct gpt_tokens *t, size_t v, float s))
NOTHING(sum_losses, (queue q, double *s, const float *l, size_t r))
NOTHING(add, (queue q, float *y, const float *x, size_t c))
NOTHING(cast, (queue q, void *o, const float *x, size_t c))
NOTHING(check_finite, (queue q, uint32_t *f, const float *x, size_t c))
NOTHING(sum_squares, (queue q, double *p, const float *x, size_t c))
NOTHING(clip_scale, (queue q, float *n, const double *p, size_t c, float m, const float *inverse))
NOTHING(adamw, (queue q, const struct gpt_adamw_arrays *a, const struct gpt_adamw *s))
NOTHING(copy_nothing, (void *self, void *to, const void *from, size_t bytes, rebatch_stream s))
NOTHING(fill_nothing, (void *self, void *to, uint8_t value, size_t bytes, rebatch_stream s))
static void close_nothing(struct gpt_queue *q)
{
}
static struct {
    const struct rbi_device_ops *dry;
    uint64_t pieces, calls;
} counted;
static rebatch_status count_create(void *self, rbi_physical *out, size_t bytes)
{
    counted.calls++;
    return counted.dry->create(self, out, bytes);
}
static rebatch_status count_release(void *self, rbi_physical physical, size_t bytes)
{
    counted.calls++;
    return counted.dry->release(self, physical, bytes);
}
static rebatch_status count_map(void *self, void *address, size_t bytes, rbi_physical physical)
{
    counted.pieces++;
    counted.calls++;
    return counted.dry->map(self, address, bytes, physical);
}
static rebatch_status count_set_access(void *self, void *address, size_t bytes)
{
    counted.calls++;
    return counted.dry->set_access(self, address, bytes);
}
static rebatch_status count_unmap(void *self, void *address, size_t bytes)
{
    counted.calls++;
    return counted.dry->unmap(self, address, bytes);
}
static rebatch_status pinned_alloc(void *self, void **out, size_t bytes)
{
    *out = calloc(bytes, 1);
    return *out ? REBATCH_OK : REBATCH_E_HOST_OOM;
}
static rebatch_status pinned_free(void *self, void *memory, size_t bytes)
{
    free(memory);
    return REBATCH_OK;
}
#pragma GCC diagnostic pop

static const struct gpt_ops nothing = {
    .struct_size = sizeof nothing,
    .name = "nothing",
    .open = open_nothing,
    .close = close_nothing,
    .embedding_forward = embedding_forward,
    .embedding_backward = embedding_backward,
    .layernorm_forward = layernorm_forward,
    .layernorm_backward = layernorm_backward,
    .matmul_forward = matmul_forward,
    .matmul_backward_input = matmul_backward_input,
    .matmul_backward_weight = matmul_backward_weight,
    .attention_forward = attention_forward,
    .attention_backward = attention_backward,
    .gelu_forward = gelu,
    .gelu_backward = gelu,
    .dropout_add = dropout_add,
    .cross_entropy = cross_entropy,
    .sum_losses = sum_losses,
    .add = add,
    .cast = cast,
    .check_finite = check_finite,
    .sum_squares = sum_squares,
    .clip_scale = clip_scale,
    .adamw = adamw,
};

/* ---- a training ---- */

struct bench {
    struct rbi_device_ops device_ops;
    rebatch_device *device;
    rebatch *rb;
    struct gpt_data *data;
    struct gpt_trainer *trainer;
    size_t sizes[SIZES_MOST];
    size_t ran;
    double inside_ms; /* callbacks */
};

static rebatch_status open_bench(struct bench *bench, size_t cap_bytes, bool learns)
{
    struct gpt_train_options train;
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.pool.limit_bytes = cap_bytes;
    options.learn = learns ? REBATCH_ON : REBATCH_OFF;
    rebatch_status status = gpt_train_options_init(&train, "gpt2-124m");
    train.batch = BATCH;
    train.total_steps = 1000;
    train.config.dtype = GPT_BF16;
    if (!status)
        status = rebatch_device_open_dry(&bench->device, (size_t)140 << 30, 0);
    if (status)
        return status;
    bench->device_ops = *bench->device->ops;
    counted.dry = bench->device->ops;
    bench->device_ops.create = count_create;
    bench->device_ops.release = count_release;
    bench->device_ops.map = count_map;
    bench->device_ops.set_access = count_set_access;
    bench->device_ops.unmap = count_unmap;
    bench->device_ops.copy = copy_nothing;
    bench->device_ops.fill = fill_nothing;
    bench->device_ops.pinned_alloc = pinned_alloc;
    bench->device_ops.pinned_free = pinned_free;
    bench->device->ops = &bench->device_ops;
    status = rebatch_open(&bench->rb, bench->device, &options);
    if (!status)
        status = gpt_data_open_default(&bench->data, ".", train.config.length);
    if (!status)
        status =
            gpt_trainer_create(&bench->trainer, bench->rb, &nothing, NULL, bench->data, &train);
    return status;
}

static void close_bench(struct bench *bench)
{
    gpt_trainer_destroy(bench->trainer);
    gpt_data_close(bench->data);
    rebatch_close(bench->rb);
    rebatch_device_close(bench->device);
}

static rebatch_status zero_grad(void *user)
{
    struct bench *bench = user;
    const double began = now_ms();
    const rebatch_status status = gpt_trainer_ops()->zero_grad(bench->trainer);
    bench->inside_ms += now_ms() - began;
    return status;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct bench *bench = user;
    if (bench->ran < SIZES_MOST)
        bench->sizes[bench->ran++] = mb->count;
    const double began = now_ms();
    const rebatch_status status = gpt_trainer_ops()->forward_backward(mb, bench->trainer);
    bench->inside_ms += now_ms() - began;
    return status;
}

static rebatch_status optimizer_step(void *user)
{
    struct bench *bench = user;
    const double began = now_ms();
    const rebatch_status status = gpt_trainer_ops()->optimizer_step(bench->trainer);
    bench->inside_ms += now_ms() - began;
    return status;
}

static const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                     .zero_grad = zero_grad,
                                     .forward_backward = forward_backward,
                                     .optimizer_step = optimizer_step,
                                     .flags = REBATCH_DECLARES_MUTATION};

/* ---- what is measured ---- */

static uint64_t held_pages(const struct bench *bench)
{
    rebatch_pool_stats stats = {0};
    (void)rebatch_pool_get_stats(&stats, rebatch_get_pool(bench->rb));
    return stats.reserved_bytes >> 21;
}

/* What had been counted when the search began. */
struct before {
    uint64_t pages, pieces, calls;
    double ms;
};

static struct before note_before(const struct bench *bench)
{
    return (struct before){held_pages(bench), counted.pieces, counted.calls, now_ms()};
}

static void print_line(const struct bench *bench, const char *name, double gib,
                       const struct before *before)
{
    const double ms = now_ms() - before->ms - bench->inside_ms;
    const struct before now = note_before(bench);
    char sizes[8 * SIZES_MOST] = "";
    size_t length = 0;
    for (size_t i = 0; i < bench->ran; i++)
        length += (size_t)snprintf(sizes + length, sizeof sizes - length, "%s%zu", i ? "," : "",
                                   bench->sizes[i]);
    printf("%s %g %zu %s %" PRIu64 " %" PRIu64 " %" PRIu64 " %.2f\n", name, gib,
           rebatch_get_micro(bench->rb, BATCH), sizes, now.pages - before->pages,
           now.pieces - before->pieces, now.calls - before->calls, ms);
}

static size_t in_bytes(double gib)
{
    return (size_t)(gib * 1024) << 20;
}

static rebatch_status bench_probe(double gib)
{
    struct bench bench = {.ran = 0};
    rebatch_probe_options options = REBATCH_PROBE_OPTIONS_INIT;
    rebatch_status status = open_bench(&bench, in_bytes(gib), false);
    if (!status) {
        const struct before before = note_before(&bench);
        options.reserve_bytes = gpt_trainer_reserve_bytes(bench.trainer);
        status = rebatch_probe(bench.rb, &ops, BATCH, &bench, &options, NULL);
        if (!status)
            print_line(&bench, "probe", gib, &before);
    }
    close_bench(&bench);
    return status;
}

static rebatch_status bench_learn(double gib)
{
    struct bench bench = {.ran = 0};
    rebatch_step_report first, later;
    rebatch_status status = open_bench(&bench, in_bytes(gib), true);
    const struct before before = status ? (struct before){0} : note_before(&bench);
    if (!status)
        status = rebatch_step(bench.rb, &ops, BATCH, &bench, &first);
    if (!status)
        print_line(&bench, "learn", gib, &before);
    for (int i = 0; i < 3 && !status; i++)
        status = rebatch_step(bench.rb, &ops, BATCH, &bench, &later);
    if (!status)
        printf("first %g microbatches=%u later=%u size=%zu ooms=%u redone=%zu\n", gib,
               first.microbatches, later.microbatches, later.micro_after, first.ooms + later.ooms,
               first.redone_samples);
    close_bench(&bench);
    return status;
}

static rebatch_status bench(double cap_gib)
{
    const rebatch_status status = bench_probe(cap_gib);
    return status ? status : bench_learn(cap_gib);
}

int main(int count, char **arguments)
{
    const size_t all = sizeof caps_gib / sizeof *caps_gib;
    rebatch_status status = REBATCH_OK;
    for (int i = 1; i < count && !status; i++)
        status = bench(strtod(arguments[i], NULL));
    for (size_t i = 0; count == 1 && i < all && !status; i++)
        status = bench(caps_gib[i]);
    if (status)
        fprintf(stderr, "gpt_search: %s: %s\n", rebatch_status_name(status), gpt_last_error());
    return status ? 1 : 0;
}
