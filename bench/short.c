/* What a training step costs in the driver's calls for memory where memory is short: a first OOM,
 * memory that somebody else takes, steps in little more than they need. GPT-2 124M, 64 samples of
 * 1,024 tokens a step, with the allocations that PyTorch makes for it under autocast in bf16. The
 * device is a dry one, on which each call has the price that it has on an H100: figures are the
 * same on every machine.
 *
 *   short [LAG]    an event is done LAG calls of the pool after it was recorded, as on a GPU
 *                  that is behind its host; default 0, an idle one */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "behind.h"
#include "rebatch/rebatch.h"

#define GIB ((size_t)1 << 30)
#define PAGE_BYTES ((size_t)2 << 20)
#define WHOLE (79 * GIB)
enum {
    BATCH = 64,
    LAYERS = 12,
    ROWS = 1024,
    WIDTH = 768,
    HEADS = 12,
    WORDS = 50304,
    BF16 = 2,
    FP32 = 4,
    STEPS = 8,
    BLOCKS_MOST = 1024
};

static void check(rebatch_status status)
{
    if (status == REBATCH_OK)
        return;
    fprintf(stderr, "bench-short: %s\n", rebatch_last_error());
    exit(1);
}

/* ---- the model ---- */

/* Blocks in use that are freed in the order in which they were not allocated. */
struct blocks {
    void *of[BLOCKS_MOST];
    size_t count;
};

struct training {
    rebatch_device *device;
    rebatch_pool *pool;
    rebatch *rb;
    struct blocks parameters, sums, moments;
    struct blocks kept, casts, grads; /* of the micro-batch that runs */
    size_t take_in;                   /* 0, or micro-batches until somebody takes memory */
    size_t left_bytes;                /* and what is left of the device then */
    bool failed;
};

static void *take(struct training *t, size_t bytes)
{
    void *block = NULL;
    behind.now++;
    if (!t->failed && rebatch_pool_alloc(&block, t->pool, bytes, NULL, 0))
        t->failed = true;
    return block;
}

static void give(struct training *t, void *block)
{
    behind.now++;
    if (!t->failed)
        check(rebatch_pool_free(t->pool, block));
}

static void keep(struct training *t, struct blocks *blocks, size_t bytes)
{
    blocks->of[blocks->count++] = take(t, bytes);
}

static void give_last(struct training *t, struct blocks *blocks)
{
    give(t, blocks->of[--blocks->count]);
}

static void give_all(struct training *t, struct blocks *blocks)
{
    for (size_t i = 0; i < blocks->count; i++)
        give(t, blocks->of[i]);
    blocks->count = 0;
}

/* Elements of the parameters of a layer, and of those outside of layers. */
static const size_t layer_sizes[] = {
    WIDTH, WIDTH, 3 * WIDTH *WIDTH, 3 * WIDTH, WIDTH *WIDTH,     WIDTH,
    WIDTH, WIDTH, 4 * WIDTH *WIDTH, 4 * WIDTH, 4 * WIDTH *WIDTH, WIDTH};
static const size_t outer_sizes[] = {(size_t)WORDS * WIDTH, ROWS *WIDTH, WIDTH, WIDTH};
#define COUNT(array) (sizeof(array) / sizeof *(array))

static void keep_like_parameters(struct training *t, struct blocks *blocks)
{
    for (size_t i = 0; i < COUNT(outer_sizes); i++)
        keep(t, blocks, outer_sizes[i] * FP32);
    for (size_t layer = 0; layer < LAYERS; layer++)
        for (size_t i = 0; i < COUNT(layer_sizes); i++)
            keep(t, blocks, layer_sizes[i] * FP32);
}

/* Without result: it is there for a moment. */
static void pass(struct training *t, size_t bytes)
{
    void *block = take(t, bytes);
    give(t, block);
}

/* A normalisation, its result in bf16, and a product with weights in bf16; what the backward pass
 * reads is kept. */
static void normalise(struct training *t, size_t n)
{
    void *result = take(t, n * WIDTH * FP32);
    keep(t, &t->kept, n * FP32);
    keep(t, &t->kept, n * FP32);
    keep(t, &t->kept, n * WIDTH * BF16);
    give(t, result);
}

static void multiply(struct training *t, size_t weights, size_t result_bytes)
{
    keep(t, &t->casts, weights * BF16);
    keep(t, &t->kept, result_bytes);
}

/* The product's result is added to what runs past the layers, in fp32, and gone. */
static void multiply_and_add(struct training *t, size_t n, size_t weights)
{
    keep(t, &t->casts, weights * BF16);
    void *result = take(t, n * WIDTH * BF16);
    keep(t, &t->kept, n * WIDTH * FP32);
    give(t, result);
}

static void run_forward(struct training *t, size_t n)
{
    keep(t, &t->kept, n * WIDTH * FP32); /* embeddings */
    for (size_t layer = 0; layer < LAYERS; layer++) {
        normalise(t, n);
        multiply(t, 3 * WIDTH * WIDTH, n * 3 * WIDTH * BF16);
        keep(t, &t->kept, n * WIDTH * BF16); /* of attention */
        keep(t, &t->kept, n * HEADS * FP32);
        multiply_and_add(t, n, WIDTH * WIDTH);
        normalise(t, n);
        multiply(t, 4 * WIDTH * WIDTH, n * 4 * WIDTH * BF16);
        keep(t, &t->kept, n * 4 * WIDTH * BF16); /* GELU */
        multiply_and_add(t, n, 4 * WIDTH * WIDTH);
    }
    normalise(t, n);
    multiply(t, (size_t)WORDS * WIDTH, n * WORDS * BF16); /* logits */
}

#define KEPT_A_LAYER 12

/* A gradient of what runs past the layers comes in, and one goes out. */
static void *run_layer_back(struct training *t, size_t n, void *gradient)
{
    struct blocks within = {.count = 0};
    keep(t, &within, n * WIDTH * BF16);
    keep(t, &within, n * 4 * WIDTH * BF16);
    keep(t, &t->grads, 4 * WIDTH * WIDTH * FP32);
    keep(t, &within, n * 4 * WIDTH * BF16);
    keep(t, &t->grads, 4 * WIDTH * WIDTH * FP32);
    pass(t, n * WIDTH * BF16);
    give_all(t, &within);
    void *middle = take(t, n * WIDTH * FP32);
    give(t, gradient);
    keep(t, &within, n * WIDTH * BF16);
    keep(t, &t->grads, WIDTH * WIDTH * FP32);
    keep(t, &within, n * 3 * WIDTH * BF16);
    keep(t, &t->grads, 3 * WIDTH * WIDTH * FP32);
    pass(t, n * WIDTH * FP32);
    for (size_t i = 0; i < COUNT(layer_sizes) - 4; i++) /* biases and normalisations */
        keep(t, &t->grads, 4 * WIDTH * FP32);
    give_all(t, &within);
    void *out = take(t, n * WIDTH * FP32);
    give(t, middle);
    for (size_t i = 0; i < KEPT_A_LAYER; i++)
        give_last(t, &t->kept);
    return out;
}

static void run_backward(struct training *t, size_t n)
{
    void *logits = take(t, n * WORDS * FP32);
    void *logarithms = take(t, n * WORDS * FP32);
    give(t, logits);
    void *of_logits = take(t, n * WORDS * FP32);
    give(t, logarithms);
    void *narrow = take(t, n * WORDS * BF16);
    give(t, of_logits);
    give_last(t, &t->kept);
    keep(t, &t->grads, (size_t)WORDS * WIDTH * FP32);
    void *gradient = take(t, n * WIDTH * FP32);
    give(t, narrow);
    for (size_t layer = 0; layer < LAYERS; layer++)
        gradient = run_layer_back(t, n, gradient);
    pass(t, (size_t)WORDS * WIDTH * FP32);
    keep(t, &t->grads, ROWS * WIDTH * FP32);
    give(t, gradient);
    while (t->kept.count > 0)
        give_last(t, &t->kept);
    give_all(t, &t->casts);
}

/* ---- the callbacks ---- */

static rebatch_status zero_grad(void *user)
{
    struct training *t = user;
    t->failed = false;
    if (!t->parameters.count)
        keep_like_parameters(t, &t->parameters);
    give_all(t, &t->sums);
    keep_like_parameters(t, &t->sums);
    return t->failed ? REBATCH_OOM : REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct training *t = user;
    t->kept.count = t->casts.count = t->grads.count = 0;
    t->failed = false;
    run_forward(t, mb->count * ROWS);
    if (t->take_in && --t->take_in == 0)
        check(rebatch_device_set_capacity(t->device, t->left_bytes));
    run_backward(t, mb->count * ROWS);
    if (t->failed)
        return REBATCH_OOM;
    rebatch_mutating(t->rb);
    give_all(t, &t->grads);
    return REBATCH_OK;
}

static rebatch_status optimizer_step(void *user)
{
    struct training *t = user;
    t->failed = false;
    if (!t->moments.count) {
        keep_like_parameters(t, &t->moments);
        keep_like_parameters(t, &t->moments);
    }
    rebatch_mutating(t->rb);
    return t->failed ? REBATCH_OOM : REBATCH_OK;
}

/* ---- a training ---- */

static void open_session(struct training *t, size_t micro)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.micro_start = micro;
    options.growth = REBATCH_OFF;
    options.log_level = REBATCH_LOG_QUIET;
    options.existing_pool = t->pool;
    check(rebatch_open(&t->rb, t->device, &options));
}

static void open_training(struct training *t, size_t capacity, size_t micro)
{
    *t = (struct training){.failed = false};
    check(behind_open(&t->device, WHOLE, PAGE_BYTES));
    check(rebatch_device_set_capacity(t->device, capacity));
    check(rebatch_pool_create(&t->pool, t->device, NULL));
    open_session(t, micro);
}

static void close_training(struct training *t)
{
    rebatch_close(t->rb);
    rebatch_pool_destroy(t->pool);
    rebatch_device_close(t->device);
}

static rebatch_pool_stats stats_of(const struct training *t)
{
    rebatch_pool_stats stats;
    check(rebatch_pool_get_stats(&stats, t->pool));
    return stats;
}

static const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                     .flags = REBATCH_DECLARES_MUTATION,
                                     .zero_grad = zero_grad,
                                     .forward_backward = forward_backward,
                                     .optimizer_step = optimizer_step};

/* Runs `count` steps and prints what each took in the driver. */
static void run_steps(struct training *t, const char *name, size_t count)
{
    rebatch_step_report report;
    rebatch_pool_stats first = {0}, before = stats_of(t), after;
    unsigned ooms = 0;
    double ms[STEPS];
    for (size_t i = 0; i < count; i++) {
        check(rebatch_step(t->rb, &ops, BATCH, t, &report));
        after = stats_of(t);
        ooms += report.ooms;
        ms[i] = (double)(after.driver_ns - before.driver_ns) / 1e6;
        if (i == 0) {
            first = after;
            first.driver_creates -= before.driver_creates;
            first.driver_pieces -= before.driver_pieces;
            first.driver_unmaps -= before.driver_unmaps;
            first.driver_releases -= before.driver_releases;
        }
        before = after;
    }
    printf("%-34s %5zu %4u %7llu %7llu %7llu %8llu ", name, (size_t)report.micro, ooms,
           (unsigned long long)first.driver_creates, (unsigned long long)first.driver_pieces,
           (unsigned long long)first.driver_unmaps, (unsigned long long)first.driver_releases);
    for (size_t i = 0; i < count; i++)
        printf(" %7.1f", ms[i]);
    printf("\n");
}

static void begin_too_large(size_t micro)
{
    struct training t;
    char name[64];
    open_training(&t, 20 * GIB, micro);
    snprintf(name, sizeof name, "cap 20 GiB, begun with %zu: cold", micro);
    run_steps(&t, name, STEPS);
    rebatch_close(t.rb);
    open_session(&t, micro);
    run_steps(&t, "  once more: warm", STEPS);
    close_training(&t);
}

static void begin_cold(size_t micro)
{
    struct training t;
    char name[64];
    open_training(&t, WHOLE, micro);
    snprintf(name, sizeof name, "plenty, cold, micro-batch %zu", micro);
    run_steps(&t, name, STEPS);
    close_training(&t);
}

/* Somebody takes 15 GiB, or all but `left`, of what a step needs. */
static void take_from(size_t micro, size_t left_bytes, bool within)
{
    struct training t;
    char name[64];
    open_training(&t, WHOLE, micro);
    rebatch_step_report report;
    for (size_t i = 0; i < STEPS; i++)
        check(rebatch_step(t.rb, &ops, BATCH, &t, &report));
    t.left_bytes = left_bytes;
    if (within)
        t.take_in = 1;
    else
        check(rebatch_device_set_capacity(t.device, t.left_bytes));
    snprintf(name, sizeof name, "%zu, all but %zu GiB taken %s", micro, left_bytes / GIB,
             within ? "within" : "between");
    run_steps(&t, name, STEPS);
    close_training(&t);
}

int main(int count, char **arguments)
{
    behind.lag = count > 1 ? strtoull(arguments[1], NULL, 10) : 0;
    printf("%-34s %5s %4s %7s %7s %7s %8s  ms in the driver, by step\n", "first step", "micro",
           "OOMs", "creates", "pieces", "unmaps", "releases");
    begin_cold(16);
    begin_cold(64);
    begin_too_large(64);
    begin_too_large(32);
    begin_too_large(16);
    take_from(32, 21 * GIB, false);
    take_from(32, 21 * GIB, true);
    take_from(16, 4 * GIB, false);
    return 0;
}
