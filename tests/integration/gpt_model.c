/* Owns the tests of the model as a whole: its loss and gradients against the reference in double,
 * and what it allocates. Must not know private headers of the library. */
#include <math.h>
#include <string.h>

#include <criterion/criterion.h>

#include "gpt/error.h"
#include "gpt_common.h"
#include "gpt_reference.h"

enum { SAMPLES = 2, FIRST = 5, STEP = 3, SEED = 77 };

static rebatch_device *device;
static rebatch_pool *pool;

static void set_up(void)
{
    ASSERT_OK(rebatch_device_open_host(&device, REBATCH_UNLIMITED, NULL));
    ASSERT_OK(rebatch_pool_create(&pool, device, NULL));
    choose_quick_isa();
}

static void tear_down(void)
{
    rebatch_pool_destroy(pool);
    rebatch_device_close(device);
    release_arrays();
}

TestSuite(gpt_model, .init = set_up, .fini = tear_down);

static uint64_t live_bytes(void)
{
    rebatch_pool_stats stats;
    ASSERT_OK(rebatch_pool_get_stats(&stats, pool));
    return stats.live_bytes;
}

/* The tiny preset on short samples, so that the reference is quick. */
static struct gpt_config short_config(float dropout)
{
    struct gpt_config config;
    ASSERT_OK(gpt_config_preset(&config, "tiny"));
    config.length = 12;
    config.dropout = dropout;
    return config;
}

static struct gpt_model *open_model(const struct gpt_config *config)
{
    struct gpt_model *model;
    ASSERT_OK(gpt_model_create(&model, config, &gpt_host_ops, pool, NULL, SEED));
    return model;
}

/* Some samples of real text, in memory that serves as the device's too. */
static struct gpt_samples open_samples(const struct gpt_config *config, size_t count)
{
    struct gpt_data *data = open_text(config->length);
    int32_t *tokens = (int32_t *)(void *)zero_floats(count * (config->length + 1));
    for (size_t i = 0; i < count; i++)
        gpt_data_sample(tokens + i * (config->length + 1), data, GPT_TRAINING, SEED, STEP,
                        FIRST + i, config->length);
    gpt_data_close(data);
    return (struct gpt_samples){
        .tokens = tokens, .first = FIRST, .count = count, .step = STEP, .training = true};
}

/* ---- loss and gradients ---- */

/* Weights away from their first values, where many gradients are nearly nothing. */
static void disturb(struct gpt_model *model, uint64_t *state)
{
    for (size_t block = 0; block < gpt_block_count(&model->config); block++) {
        const size_t count = gpt_block_elements(&model->config, block);
        const float *noise = random_floats(count, 0.1f, state);
        for (size_t i = 0; i < count; i++)
            model->parameters.blocks[block][i] += noise[i];
    }
}

static void copy_parameters(double **blocks, const struct gpt_model *model)
{
    for (size_t i = 0; i < gpt_block_count(&model->config); i++)
        blocks[i] = to_doubles(model->parameters.blocks[i], gpt_block_elements(&model->config, i));
}

/* Runs forward and backward; returns the mean loss and leaves complete gradients. */
static double run_model(struct gpt_model *model, const struct gpt_samples *samples,
                        struct gpt_set *gradients)
{
    const struct gpt_config *config = &model->config;
    const size_t rows = samples->count * config->length;
    struct gpt_activations activations;
    double sum = 0.0;
    ASSERT_OK(gpt_set_create(gradients, model, gpt_block_count(config) + 1, GPT_TAG_GRADIENTS));
    ASSERT_OK(gpt_set_zero(gradients, model));
    ASSERT_OK(gpt_forward(&activations, model, samples, 1.0f / (float)rows));
    for (size_t i = 0; i < rows; i++)
        sum += (double)((const float *)activations.losses)[i];
    ASSERT_OK(gpt_backward(&activations, model, samples, gradients));
    ASSERT_OK(gpt_host_ops.add(&model->queue, gpt_outer(model, gradients, GPT_TOKENS),
                               gradients->blocks[gpt_block_count(config)],
                               config->vocabulary * config->channels));
    return sum / (double)rows;
}

/* Three parameters of a tensor: central differences of the reference's loss against the
 * gradient. */
static void check_tensor(struct gpt_model *model, const struct gpt_samples *samples,
                         const struct gpt_set *gradients, double **blocks, size_t index,
                         uint64_t *state)
{
    const struct gpt_config *config = &model->config;
    const struct gpt_tensor tensor = gpt_tensor_at(config, index);
    const size_t count = tensor.rows * tensor.columns;
    const float *gradient = gradients->blocks[tensor.block] + tensor.offset;
    double *values = blocks[tensor.block] + tensor.offset, largest = 0.0;
    for (size_t i = 0; i < count; i++)
        largest = fmax(largest, fabs((double)gradient[i]));
    cr_assert_gt(largest, 0.0);
    for (int probe = 0; probe < 3; probe++) {
        float where;
        fill_random(&where, 1, 0.5f, state);
        const size_t at = (size_t)((where + 0.5f) * (float)count);
        const double value = values[at], by = 1e-4;
        values[at] = value + by;
        const double above = reference_model_loss(config, blocks, samples->tokens, samples->first,
                                                  samples->count, samples->step, SEED);
        values[at] = value - by;
        const double below = reference_model_loss(config, blocks, samples->tokens, samples->first,
                                                  samples->count, samples->step, SEED);
        values[at] = value;
        const double slope = (above - below) / (2.0 * by);
        cr_assert(fabs(slope - (double)gradient[at]) <= 1e-4 * largest,
                  "%s[%zu]: gradient %.9g, reference %.9g, largest %.9g", tensor.name, at,
                  (double)gradient[at], slope, largest);
    }
}

static void check_gradients(float dropout, uint64_t seed)
{
    uint64_t state = seed;
    const struct gpt_config config = short_config(dropout);
    struct gpt_model *model = open_model(&config);
    const struct gpt_samples samples = open_samples(&config, SAMPLES);
    struct gpt_set gradients;
    double *blocks[GPT_LAYERS_MOST + 1];
    disturb(model, &state);
    copy_parameters(blocks, model);
    const double loss = run_model(model, &samples, &gradients);
    const double want =
        reference_model_loss(&config, blocks, samples.tokens, FIRST, SAMPLES, STEP, SEED);
    cr_assert(fabs(loss - want) <= 1e-6 * want, "loss %.9g, reference %.9g", loss, want);
    for (size_t i = 0; i < gpt_tensor_count(&config); i += stride_of_cases(5))
        check_tensor(model, &samples, &gradients, blocks, i, &state);
    gpt_set_destroy(&gradients, model);
    gpt_model_destroy(model);
}

Test(gpt_model, gradients_without_dropout, .description = "seed 41")
{
    check_gradients(0.0f, 41);
}

Test(gpt_model, gradients_with_dropout, .description = "seed 42")
{
    check_gradients(0.25f, 42);
}

/* ---- forward alone ---- */

Test(gpt_model, evaluation_is_the_forward_pass_of_training)
{
    const struct gpt_config config = short_config(0.0f);
    struct gpt_model *model = open_model(&config);
    struct gpt_samples samples = open_samples(&config, 7);
    struct gpt_activations training, evaluation;
    ASSERT_OK(gpt_forward(&training, model, &samples, 0.01f));
    const uint64_t live = live_bytes();
    samples.training = false;
    ASSERT_OK(gpt_forward(&evaluation, model, &samples, 0.01f));
    cr_assert_lt(live_bytes() - live, live / 4, "evaluation kept %llu bytes",
                 (unsigned long long)(live_bytes() - live));
    cr_assert_arr_eq(evaluation.losses, training.losses, 7 * config.length * sizeof(float));
    gpt_activations_free(&evaluation, model);
    gpt_activations_free(&training, model);
    gpt_model_destroy(model);
    cr_assert_eq(live_bytes(), 0);
}

Test(gpt_model, dropout_is_for_training_alone)
{
    const struct gpt_config with = short_config(0.3f), without = short_config(0.0f);
    struct gpt_model *first = open_model(&with), *second = open_model(&without);
    struct gpt_samples samples = open_samples(&with, 3);
    struct gpt_activations a, b;
    samples.training = false;
    ASSERT_OK(gpt_forward(&a, first, &samples, 0.0f));
    ASSERT_OK(gpt_forward(&b, second, &samples, 0.0f));
    cr_assert_arr_eq(a.losses, b.losses, 3 * with.length * sizeof(float));
    gpt_activations_free(&a, first);
    samples.training = true;
    ASSERT_OK(gpt_forward(&a, first, &samples, 0.0f));
    cr_assert_arr_neq(a.losses, b.losses, 3 * with.length * sizeof(float));
    gpt_activations_free(&a, first);
    gpt_activations_free(&b, second);
    gpt_model_destroy(first);
    gpt_model_destroy(second);
}

/* ---- memory ---- */

Test(gpt_model, backward_allocates_what_it_says)
{
    const struct gpt_config config = short_config(0.1f);
    struct gpt_model *model = open_model(&config);
    for (size_t count = 1; count <= 5; count++) {
        const struct gpt_samples samples = open_samples(&config, count);
        struct gpt_set gradients;
        rebatch_tag_usage usage;
        const uint64_t live = live_bytes();
        ASSERT_OK(rebatch_pool_reset_peaks(pool));
        (void)run_model(model, &samples, &gradients);
        ASSERT_OK(rebatch_pool_get_tag_usage(&usage, pool, model->tags[GPT_TAG_BACKWARD]));
        cr_assert_eq(usage.peak_bytes, gpt_backward_bytes(model, count));
        cr_assert_eq(usage.live_bytes, 0);
        ASSERT_OK(rebatch_pool_get_tag_usage(&usage, pool, model->tags[GPT_TAG_ACTIVATIONS]));
        cr_assert_eq(usage.live_bytes, 0);
        gpt_set_destroy(&gradients, model);
        cr_assert_eq(live_bytes(), live);
    }
    gpt_model_destroy(model);
    cr_assert_eq(live_bytes(), 0);
}

Test(gpt_model, a_set_is_all_or_nothing)
{
    const struct gpt_config config = short_config(0.1f);
    struct gpt_model *model = open_model(&config);
    const uint64_t live = live_bytes();
    struct gpt_set set = {0};
    rebatch_pool_stats stats;
    ASSERT_OK(rebatch_pool_get_stats(&stats, pool));
    /* Room for the outer block, but not for all of the layers'. */
    ASSERT_OK(rebatch_pool_set_limit(
        pool, stats.reserved_bytes + gpt_block_elements(&config, 0) * sizeof(float) + 100000));
    cr_assert_eq(gpt_set_create(&set, model, gpt_block_count(&config), GPT_TAG_MOMENTS),
                 REBATCH_OOM);
    cr_assert_eq(set.count, 0);
    cr_assert_eq(live_bytes(), live);
    gpt_model_destroy(model);
}

/* ---- first values ---- */

Test(gpt_model, initial_weights_are_a_function_of_the_seed)
{
    const struct gpt_config config = short_config(0.1f);
    struct gpt_model *model = open_model(&config), *again = open_model(&config), *other;
    ASSERT_OK(gpt_model_create(&other, &config, &gpt_host_ops, pool, NULL, SEED + 1));
    const size_t count = config.vocabulary * config.channels;
    const float *tokens = gpt_outer(model, &model->parameters, GPT_TOKENS);
    double sum = 0.0, squares = 0.0;
    for (size_t i = 0; i < count; i++) {
        sum += (double)tokens[i];
        squares += (double)tokens[i] * (double)tokens[i];
    }
    /* Five deviations of the mean's and of the variance's estimate. */
    cr_assert_float_eq(sum / (double)count, 0.0, 5.0 * 0.02 / sqrt((double)count));
    cr_assert_float_eq(squares / (double)count / 0.0004, 1.0, 5.0 * sqrt(2.0 / (double)count));
    cr_assert_arr_eq(tokens, gpt_outer(again, &again->parameters, GPT_TOKENS),
                     count * sizeof *tokens);
    cr_assert_arr_neq(tokens, gpt_outer(other, &other->parameters, GPT_TOKENS),
                      count * sizeof *tokens);
    gpt_model_destroy(model);
    gpt_model_destroy(again);
    gpt_model_destroy(other);
}

/* ---- bad sizes ---- */

static void check_refused(const struct gpt_config *config, const char *words)
{
    struct gpt_model *model = (struct gpt_model *)(void *)&model;
    ASSERT_ERROR(gpt_model_create(&model, config, &gpt_host_ops, pool, NULL, SEED),
                 REBATCH_E_INVALID, words);
    cr_assert_null(model);
}

Test(gpt_model, refuses_bad_sizes)
{
    const struct gpt_config good = short_config(0.1f);
    struct gpt_config bad = good;
    bad.layers = 0;
    check_refused(&bad, "layers is 0: expected 1 to 64");
    bad = good;
    bad.channels = 65;
    check_refused(&bad, "channels is 65: expected a multiple of 64");
    bad = good;
    bad.heads = 3;
    check_refused(&bad, "heads is 3: expected a divisor of 64");
    bad.channels = 256;
    bad.heads = 1;
    check_refused(&bad, "heads is 1: expected a divisor of 256 channels with at most 128");
    bad = good;
    bad.length = 0;
    check_refused(&bad, "length is 0");
    bad = good;
    bad.vocabulary = 128;
    check_refused(&bad, "vocabulary is 128");
    bad = good;
    bad.dropout = 1.0f;
    check_refused(&bad, "dropout is 1");
    bad.dropout = NAN;
    check_refused(&bad, "dropout is nan");
    bad = good;
    bad.dtype = GPT_DTYPE_COUNT;
    check_refused(&bad, "dtype is number 3: expected 0 to 2");
    ASSERT_ERROR(gpt_config_preset(&bad, "huge"), REBATCH_E_INVALID,
                 "preset is \"huge\": expected one of tiny ci demo gpt2-124m");
}

Test(gpt_model, the_host_computes_in_fp32_alone)
{
    static const enum gpt_dtype others[] = {GPT_BF16, GPT_FP16};
    struct gpt_config config = short_config(0.1f);
    for (size_t i = 0; i < 2; i++) {
        struct gpt_model *model;
        config.dtype = others[i];
        ASSERT_ERROR(gpt_model_create(&model, &config, &gpt_host_ops, pool, NULL, SEED),
                     REBATCH_E_UNSUPPORTED, i == 0 ? "dtype is bf16" : "dtype is fp16");
        cr_assert_null(model);
        cr_assert_eq(live_bytes(), 0);
    }
}

Test(gpt_model, the_types_have_names)
{
    enum gpt_dtype dtype;
    for (size_t i = 0; i < GPT_DTYPE_COUNT; i++) {
        ASSERT_OK(gpt_dtype_parse(&dtype, gpt_dtype_name((enum gpt_dtype)i)));
        cr_assert_eq(dtype, i);
    }
    ASSERT_ERROR(gpt_dtype_parse(&dtype, "fp8"), REBATCH_E_INVALID,
                 "dtype is \"fp8\": expected one of fp32 bf16 fp16");
    cr_assert_eq(gpt_dtype_bytes(GPT_DTYPE_COUNT), 0);
    cr_assert_null(gpt_dtype_name(GPT_DTYPE_COUNT));
}

/* What the operations may do is the model's to say: exactly, unless it is told otherwise. */
Test(gpt_model, it_is_exact_unless_it_is_told_otherwise)
{
    struct gpt_config config = short_config(0.1f);
    struct gpt_model *exact = open_model(&config), *inexact;
    config.inexact = true;
    inexact = open_model(&config);
    cr_assert(!exact->queue.inexact && inexact->queue.inexact);
    gpt_model_destroy(exact);
    gpt_model_destroy(inexact);
}

/* Parameters as GPT-2 has them, with the vocabulary rounded up: 50257 to 50304. */
Test(gpt_model, presets_have_the_sizes_of_their_names)
{
    static const struct {
        const char *name;
        double millions;
    } presets[] = {{"gpt2-124m", 124.475904}, {"gpt2-350m", 354.871296}, {"gpt2-774m", 774.090240}};
    for (size_t i = 0; i < sizeof presets / sizeof *presets; i++) {
        struct gpt_config config;
        size_t parameters = 0;
        ASSERT_OK(gpt_config_preset(&config, presets[i].name));
        ASSERT_OK(gpt_config_check(&config));
        for (size_t block = 0; block < gpt_block_count(&config); block++)
            parameters += gpt_block_elements(&config, block);
        cr_assert_float_eq((double)parameters / 1e6, presets[i].millions, 1e-6, "%s: %zu",
                           presets[i].name, parameters);
        cr_assert_eq(config.length, 1024);
        cr_assert_eq(config.vocabulary, 50304);
    }
}
