/* Owns the gradient check of the whole model on a GPU, in every type of elements: central
 * differences of a reference in double. Must not know private headers of the library. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gpt_cuda_support.h"
#include "integration/gpt_reference.h"

enum { SAMPLES = 2, FIRST = 5, STEP = 3, SEED = 77, LENGTH = 12 };

struct bed {
    rebatch_device *device;
    rebatch_pool *pool;
    struct gpt_model *model;
    struct gpt_samples samples;
    int32_t tokens[SAMPLES * (LENGTH + 1)]; /* the same on the host */
    float *parameters[GPT_LAYERS_MOST + 1], *gradients[GPT_LAYERS_MOST + 1];
    double *reference[GPT_LAYERS_MOST + 1]; /* the parameters again */
};

static void copy(const struct bed *bed, void *to, const void *from, size_t bytes)
{
    ASSERT_OK(rebatch_copy(bed->device, to, from, bytes, NULL));
    ASSERT_OK(rebatch_stream_synchronize(bed->device, NULL));
}

/* Weights away from their first values, where many gradients are nearly nothing. */
static void disturb(struct bed *bed, support_random *random)
{
    struct gpt_model *model = bed->model;
    for (size_t block = 0; block < gpt_block_count(&model->config); block++) {
        const size_t count = gpt_block_elements(&model->config, block);
        float *values = malloc(count * sizeof *values);
        bed->gradients[block] = malloc(count * sizeof *values);
        bed->reference[block] = malloc(count * sizeof(double));
        cr_assert(values && bed->gradients[block] && bed->reference[block]);
        copy(bed, values, model->parameters.blocks[block], count * sizeof *values);
        for (size_t i = 0; i < count; i++) {
            values[i] += 0.2f * (float)support_uniform(random) - 0.1f;
            bed->reference[block][i] = (double)values[i];
        }
        copy(bed, model->parameters.blocks[block], values, count * sizeof *values);
        bed->parameters[block] = values;
    }
    ASSERT_OK(gpt_model_refresh(model));
}

static void open_bed(struct bed *bed, enum gpt_dtype dtype, support_random *random)
{
    struct gpt_config config;
    struct gpt_data *data;
    void *tokens;
    *bed = (struct bed){0};
    ASSERT_OK(gpt_config_preset(&config, "tiny"));
    config.length = LENGTH;
    config.dropout = 0.25f;
    config.dtype = dtype;
    ASSERT_OK(rebatch_device_open_cuda(&bed->device, NULL));
    ASSERT_OK(rebatch_pool_create(&bed->pool, bed->device, NULL));
    ASSERT_OK(gpt_model_create(&bed->model, &config, gpt_cuda_ops_get(), bed->pool, NULL, SEED));
    ASSERT_OK(gpt_data_open(&data, TEST_TEXT, LENGTH));
    for (size_t i = 0; i < SAMPLES; i++)
        gpt_data_sample(bed->tokens + i * (LENGTH + 1), data, GPT_TRAINING, SEED, STEP, FIRST + i,
                        LENGTH);
    gpt_data_close(data);
    ASSERT_OK(rebatch_pool_alloc(&tokens, bed->pool, sizeof bed->tokens, NULL, 0));
    copy(bed, tokens, bed->tokens, sizeof bed->tokens);
    bed->samples = (struct gpt_samples){
        .tokens = tokens, .first = FIRST, .count = SAMPLES, .step = STEP, .training = true};
    disturb(bed, random);
}

static void close_bed(struct bed *bed)
{
    for (size_t i = 0; i < gpt_block_count(&bed->model->config); i++) {
        free(bed->parameters[i]);
        free(bed->gradients[i]);
        free(bed->reference[i]);
    }
    gpt_model_destroy(bed->model);
    rebatch_pool_destroy(bed->pool);
    rebatch_device_close(bed->device);
}

static double reference_loss(const struct bed *bed)
{
    return reference_model_loss(&bed->model->config, bed->reference, bed->tokens, FIRST, SAMPLES,
                                STEP, SEED);
}

/* Runs forward and backward; returns the mean loss and leaves complete gradients. */
static double run_model(struct bed *bed)
{
    struct gpt_model *model = bed->model;
    const struct gpt_config *config = &model->config;
    enum { ROWS = SAMPLES * LENGTH };
    struct gpt_activations activations;
    struct gpt_set gradients;
    float losses[ROWS];
    double sum = 0.0;
    ASSERT_OK(gpt_set_create(&gradients, model, gpt_block_count(config) + 1, GPT_TAG_GRADIENTS));
    ASSERT_OK(gpt_set_zero(&gradients, model));
    ASSERT_OK(gpt_forward(&activations, model, &bed->samples, 1.0f / ROWS));
    copy(bed, losses, activations.losses, sizeof losses);
    ASSERT_OK(gpt_backward(&activations, model, &bed->samples, &gradients));
    ASSERT_OK(gpu_ops->add(&model->queue, gpt_outer(model, &gradients, GPT_TOKENS),
                           gradients.blocks[gpt_block_count(config)],
                           config->vocabulary * config->channels));
    for (size_t i = 0; i < gpt_block_count(config); i++)
        copy(bed, bed->gradients[i], gradients.blocks[i],
             gpt_block_elements(config, i) * sizeof(float));
    for (size_t i = 0; i < ROWS; i++)
        sum += (double)losses[i];
    return sum / ROWS;
}

/* Four parameters of a tensor. */
static void check_tensor(struct bed *bed, size_t index, double tolerance, support_random *random)
{
    const struct gpt_tensor tensor = gpt_tensor_at(&bed->model->config, index);
    const size_t count = tensor.rows * tensor.columns;
    const float *gradient = bed->gradients[tensor.block] + tensor.offset;
    double *values = bed->reference[tensor.block] + tensor.offset, largest = 0.0;
    for (size_t i = 0; i < count; i++)
        largest = fmax(largest, fabs((double)gradient[i]));
    cr_assert(largest > 0.0 && isfinite(largest), "%s: largest %g", tensor.name, largest);
    for (int probe = 0; probe < 4; probe++) {
        const size_t at = support_next(random) % count;
        const double value = values[at], by = 1e-4;
        values[at] = value + by;
        const double above = reference_loss(bed);
        values[at] = value - by;
        const double below = reference_loss(bed);
        values[at] = value;
        const double slope = (above - below) / (2.0 * by);
        cr_assert(fabs(slope - (double)gradient[at]) <= tolerance * largest,
                  "%s[%zu]: gradient %.9g, reference %.9g, largest %.9g", tensor.name, at,
                  (double)gradient[at], slope, largest);
    }
}

/* `tolerance` of the loss, and of gradients against the largest of their tensor. */
static void check_gradients(enum gpt_dtype dtype, double loss_tolerance, double tolerance,
                            uint64_t seed)
{
    support_random random = {seed};
    struct bed bed;
    gpu_ops = gpt_cuda_ops_get();
    open_bed(&bed, dtype, &random);
    const double loss = run_model(&bed), want = reference_loss(&bed);
    cr_assert(fabs(loss - want) <= loss_tolerance * want, "loss %.9g, reference %.9g", loss, want);
    for (size_t i = 0; i < gpt_tensor_count(&bed.model->config); i++)
        check_tensor(&bed, i, tolerance, &random);
    close_bed(&bed);
}

Test(gpt_cuda_model, gradients_in_fp32, .description = "seed 51")
{
    check_gradients(GPT_FP32, 1e-6, 1e-4, 51);
}

/* Some thirty roundings stand between a weight and its gradient, each of at most 2^-9 of a value in
 * bf16 and 2^-12 in fp16, weights included. */
Test(gpt_cuda_model, gradients_in_bf16, .description = "seed 52")
{
    check_gradients(GPT_BF16, 1e-2, 5e-2, 52);
}

Test(gpt_cuda_model, gradients_in_fp16, .description = "seed 53")
{
    check_gradients(GPT_FP16, 1e-3, 1e-2, 53);
}
