/* How fast the reference model trains at the size of GPT-2 124M: bf16, 1,024 positions, 65,536
 * tokens a step, micro-batches of 16 and of 64, exact and not. Its lines are read by
 * scripts/bench-gpt, which puts PyTorch's beside them:
 *     result rebatch MODE MICRO TOKENS_A_SECOND PEAK_MIB */
#include <stdio.h>
#include <stdlib.h>

#include "gpt/error.h"
#include "gpt/train.h"
#include "measure.h"
#include "rebatch/rebatch.h"

enum { BATCH = 64, WARM = 3, STEPS = 8, RUNS = 3 };

/* ---- a training ---- */

struct bench {
    rebatch_device *device;
    rebatch *rb;
    struct gpt_data *data;
    struct gpt_trainer *trainer;
    struct gpt_train_options train;
};

static rebatch_status open_bench(struct bench *bench, const struct gpt_ops *ops, size_t micro,
                                 bool inexact)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.micro_start = micro;
    options.micro_largest = micro;
    *bench = (struct bench){0};
    rebatch_status status = gpt_train_options_init(&bench->train, "gpt2-124m");
    bench->train.batch = BATCH;
    bench->train.total_steps = 1000;
    bench->train.config.dtype = GPT_BF16;
    bench->train.config.inexact = inexact;
    if (!status)
        status = rebatch_device_open_cuda(&bench->device, NULL);
    if (!status)
        status = rebatch_open(&bench->rb, bench->device, &options);
    if (!status)
        status = gpt_data_open_default(&bench->data, ".", bench->train.config.length);
    if (!status)
        status =
            gpt_trainer_create(&bench->trainer, bench->rb, ops, NULL, bench->data, &bench->train);
    return status;
}

static void close_bench(struct bench *bench)
{
    gpt_trainer_destroy(bench->trainer);
    gpt_data_close(bench->data);
    rebatch_close(bench->rb);
    rebatch_device_close(bench->device);
}

/* Seconds of `steps` steps; each ends with the loss on the host. */
static rebatch_status run_steps(struct bench *bench, size_t steps, double *seconds, double *peak)
{
    rebatch_step_report report;
    rebatch_status status = REBATCH_OK;
    const double began = measure_seconds();
    for (size_t i = 0; i < steps && !status; i++)
        status = gpt_trainer_step(bench->trainer, &report, NULL);
    *seconds = measure_seconds() - began;
    if (!status)
        *peak = (double)report.peak_bytes;
    return status;
}

/* What a sample's activations take while backward begins, by the shapes alone: of each layer the
 * inputs and outputs of its parts (32 C elements' bytes in bf16, statistics in fp32), the
 * embedding, the last norm, logits, loss, and 6 C of gradients. */
static double formula_bytes(const struct gpt_config *config)
{
    const double layers = (double)config->layers, C = (double)config->channels;
    const double V = (double)config->vocabulary, H = (double)config->heads;
    return (double)config->length *
           (layers * (32 * C + 16 + 4 * H) + 2 * C + 2 * C + 8 + 2 * V + 4 + 12 * C + 4);
}

static rebatch_status bench_one(bool inexact, size_t micro, double *peak)
{
    struct bench bench;
    double seconds, rates[RUNS];
    rebatch_status status = open_bench(&bench, gpt_cuda_ops_get(), micro, inexact);
    if (!status)
        status = run_steps(&bench, WARM, &seconds, peak);
    for (size_t i = 0; i < RUNS && !status; i++) {
        status = run_steps(&bench, STEPS, &seconds, peak);
        rates[i] = (double)(STEPS * BATCH * bench.train.config.length) / seconds;
    }
    if (!status) {
        printf("result rebatch %s %zu %.0f %.1f\n", inexact ? "inexact" : "exact", micro,
               measure_median(rates, RUNS), *peak / 1048576.0);
        fflush(stdout);
    }
    close_bench(&bench);
    return status;
}

/* Both sizes; the difference of their peaks is what a sample takes. */
static rebatch_status bench_mode(bool inexact)
{
    double small = 0.0, large = 0.0;
    struct gpt_config config;
    rebatch_status status = gpt_config_preset(&config, "gpt2-124m");
    if (!status)
        status = bench_one(inexact, 16, &small);
    if (!status)
        status = bench_one(inexact, 64, &large);
    if (!status)
        printf("memory %s: %.2f MiB a sample (64 samples' peak less 16's), %.2f MiB by the "
               "shapes\n",
               inexact ? "inexact" : "exact", (large - small) / 48 / 1048576.0,
               formula_bytes(&config) / 1048576.0);
    return status;
}

int main(void)
{
    rebatch_status status = bench_mode(false);
    if (!status)
        status = bench_mode(true);
    if (status)
        fprintf(stderr, "bench-gpt: %s: %s\n", rebatch_status_name(status), gpt_last_error());
    return status ? 1 : 0;
}
