/* How much of a micro-batch's time the replay of a CUDA graph saves the reference model: forward,
 * loss and backward, launched kernel by kernel, and captured once and replayed. A row is a line of
 * JSON: milliseconds a micro-batch of PASSES in a queue, those until the launches of one have
 * returned, and whether two passes launched, and one launched and one replayed, end in the same
 * bits. */
#include <stdio.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "gpt/error.h"
#include "gpt/model.h"
#include "measure.h"
#include "rebatch/cuda.h"

enum { PASSES = 32, ROUNDS = 7, WARM = 3 };

/* What a pass adds to. */
struct sums {
    struct gpt_set gradients;
    double *loss;
};

struct bench {
    rebatch_device *device;
    rebatch_pool *pool;
    rebatch_stream stream; /* of its own: CUDA captures no default stream */
    struct gpt_model *model;
    struct gpt_samples samples;
    struct sums launched, replayed;
    cudaGraphExec_t graph;
    size_t kernels; /* of the graph */
};

static void must(rebatch_status status)
{
    if (!status)
        return;
    fprintf(stderr, "bench-gpt-graph: %s: %s\n", rebatch_status_name(status), gpt_last_error());
    exit(1);
}

static void cuda(cudaError_t code)
{
    must(rebatch_from_cuda(NULL, (int)code));
}

/* ---- a pass ---- */

static void pass(struct bench *bench, const struct sums *into)
{
    struct gpt_model *model = bench->model;
    struct gpt_activations activations;
    const size_t rows = bench->samples.count * model->config.length;
    must(gpt_forward(&activations, model, &bench->samples, 1.0f / (float)rows));
    must(model->ops->sum_losses(&model->queue, into->loss, activations.losses, rows));
    must(gpt_backward(&activations, model, &bench->samples, &into->gradients));
}

/* The pool records events of the whole device, which would end the capture. */
static bool is_capturing;

static bool may_wait(void *user)
{
    (void)user;
    return !is_capturing;
}

/* After passes that were launched: they have taken the memory, loaded the kernels and chosen the
 * library's algorithms, so that the captured one does nothing but launch. */
static void capture(struct bench *bench)
{
    const cudaStream_t stream = (cudaStream_t)(void *)bench->stream;
    cudaGraph_t graph;
    is_capturing = true;
    cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    pass(bench, &bench->replayed);
    cuda(cudaStreamEndCapture(stream, &graph));
    is_capturing = false;
    cuda(cudaGraphGetNodes(graph, NULL, &bench->kernels));
    cuda(cudaGraphInstantiateWithFlags(&bench->graph, graph, 0));
    cuda(cudaGraphDestroy(graph));
}

static void replay(struct bench *bench)
{
    cuda(cudaGraphLaunch(bench->graph, (cudaStream_t)(void *)bench->stream));
}

static void run(struct bench *bench, bool replays, int passes)
{
    for (int i = 0; i < passes; i++)
        if (replays)
            replay(bench);
        else
            pass(bench, &bench->launched);
}

static void synchronize(const struct bench *bench)
{
    must(rebatch_stream_synchronize(bench->device, bench->stream));
}

/* ---- the same bits ---- */

static void zero(const struct bench *bench, const struct sums *sums)
{
    must(gpt_set_zero(&sums->gradients, bench->model));
    must(rebatch_fill(bench->device, sums->loss, 0, sizeof *sums->loss, bench->stream));
}

static void read_back(const struct bench *bench, void *out, const void *from, size_t bytes)
{
    must(rebatch_copy(bench->device, out, from, bytes, bench->stream));
    synchronize(bench);
}

/* Of gradients and losses after two passes, of which the second is launched here and replayed
 * there. */
static bool gives_same_bits(struct bench *bench)
{
    const struct sums *const launched = &bench->launched, *const replayed = &bench->replayed;
    double losses[2];
    zero(bench, launched);
    zero(bench, replayed);
    pass(bench, launched);
    pass(bench, replayed);
    pass(bench, launched);
    replay(bench);
    read_back(bench, &losses[0], launched->loss, sizeof losses[0]);
    read_back(bench, &losses[1], replayed->loss, sizeof losses[1]);
    bool same = losses[0] > 0.0 && memcmp(&losses[0], &losses[1], sizeof losses[0]) == 0;
    for (size_t i = 0; i < launched->gradients.count; i++) {
        const size_t bytes = gpt_block_elements(&bench->model->config, i) * sizeof(float);
        char *const both = malloc(2 * bytes);
        if (!both)
            exit(1);
        read_back(bench, both, launched->gradients.blocks[i], bytes);
        read_back(bench, both + bytes, replayed->gradients.blocks[i], bytes);
        same = same && memcmp(both, both + bytes, bytes) == 0;
        free(both);
    }
    return same;
}

/* ---- a row ---- */

static void *take(struct bench *bench, size_t bytes)
{
    void *memory;
    must(rebatch_pool_alloc(&memory, bench->pool, bytes, bench->stream, 0));
    return memory;
}

static void take_sums(struct bench *bench, struct sums *out)
{
    must(gpt_set_create(&out->gradients, bench->model, gpt_block_count(&bench->model->config) + 1,
                        GPT_TAG_GRADIENTS));
    out->loss = take(bench, sizeof *out->loss);
    zero(bench, out);
}

static void open_bench(struct bench *bench, rebatch_device *device, const struct gpt_config *config,
                       size_t samples)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    const size_t count = samples * (config->length + 1);
    *bench = (struct bench){.device = device, .samples = {.count = samples, .training = true}};
    options.may_wait = may_wait;
    must(rebatch_stream_create(&bench->stream, device));
    must(rebatch_pool_create(&bench->pool, device, &options));
    must(
        gpt_model_create(&bench->model, config, gpt_cuda_ops_get(), bench->pool, bench->stream, 1));
    int32_t *const tokens = malloc(count * sizeof *tokens);
    if (!tokens)
        exit(1);
    for (size_t i = 0; i < count; i++)
        tokens[i] = (int32_t)((uint32_t)i * 2654435761u >> 24);
    void *const memory = take(bench, count * sizeof *tokens);
    must(rebatch_copy(device, memory, tokens, count * sizeof *tokens, bench->stream));
    bench->samples.tokens = memory;
    take_sums(bench, &bench->launched);
    take_sums(bench, &bench->replayed);
    synchronize(bench);
    free(tokens);
}

static void close_bench(struct bench *bench)
{
    cuda(cudaGraphExecDestroy(bench->graph));
    gpt_model_destroy(bench->model);
    rebatch_pool_destroy(bench->pool);
    rebatch_stream_destroy(bench->device, bench->stream);
}

/* Milliseconds of a pass, launched and replayed in turn. */
struct times {
    double queued[2][ROUNDS];   /* with PASSES of them behind each other */
    double launches[2][ROUNDS]; /* until its launches have returned, on an idle device */
};

static void measure(struct times *out, struct bench *bench)
{
    for (int round = 0; round < ROUNDS; round++)
        for (int replays = 0; replays < 2; replays++) {
            double began = measure_seconds();
            run(bench, replays, PASSES);
            synchronize(bench);
            out->queued[replays][round] = (measure_seconds() - began) * 1e3 / PASSES;
            began = measure_seconds();
            run(bench, replays, 1);
            out->launches[replays][round] = (measure_seconds() - began) * 1e3;
            synchronize(bench);
        }
}

static void print_row(rebatch_device *device, const char *name, const struct gpt_config *config,
                      size_t samples)
{
    struct bench bench;
    struct times times;
    open_bench(&bench, device, config, samples);
    run(&bench, false, WARM);
    capture(&bench);
    run(&bench, true, WARM);
    synchronize(&bench);
    measure(&times, &bench);
    const double launched = measure_median(times.queued[false], ROUNDS);
    const double replayed = measure_median(times.queued[true], ROUNDS);
    printf("{\"device\": \"%s\", \"model\": \"%s\", \"exact\": %s, \"samples\": %zu, "
           "\"kernels\": %zu, \"launched_ms\": %.4f, \"replayed_ms\": %.4f, "
           "\"saved_percent\": %.2f, \"launches_ms\": %.4f, \"replay_launch_ms\": %.4f, "
           "\"same_bits\": %s}\n",
           rebatch_device_name(device), name, config->inexact ? "false" : "true", samples,
           bench.kernels, launched, replayed, 100.0 * (1.0 - replayed / launched),
           measure_median(times.launches[false], ROUNDS),
           measure_median(times.launches[true], ROUNDS),
           gives_same_bits(&bench) ? "true" : "false");
    fflush(stdout);
    close_bench(&bench);
}

int main(void)
{
    static const size_t samples[] = {1, 2, 4};
    rebatch_device *device;
    struct {
        const char *name;
        struct gpt_config config;
    } models[] = {{.name = "gpt2-124m"},
                  {"6 layers of 384", {6, 384, 6, 256, 8192, 0.0f, GPT_BF16, false}}};
    must(gpt_config_preset(&models[0].config, models[0].name));
    must(rebatch_device_open_cuda(&device, NULL));
    cuda(cudaSetDevice(0));
    for (size_t m = 0; m < sizeof models / sizeof *models; m++)
        for (int inexact = 0; inexact < 2; inexact++)
            for (size_t s = 0; s < sizeof samples / sizeof *samples; s++) {
                models[m].config.dtype = GPT_BF16;
                models[m].config.inexact = inexact;
                print_row(device, models[m].name, &models[m].config, samples[s]);
            }
    rebatch_device_close(device);
    return 0;
}
