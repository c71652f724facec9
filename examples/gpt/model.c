/* Owns the model's sizes, the layout of its parameters, and their first values.
 * Must not know the order of operations. */
#include "gpt/model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gpt/error.h"
#include "gpt/parallel.h"
#include "gpt/random.h"

/* ---- sizes ---- */

rebatch_status gpt_config_preset(struct gpt_config *out, const char *name)
{
    static const struct {
        const char *name;
        struct gpt_config config;
    } presets[] = {
#define PRESET(name, layers, channels, heads, length, vocabulary, dropout)                         \
    {name, {layers, channels, heads, length, vocabulary, dropout, GPT_FP32, false}},
        GPT_PRESETS(PRESET)
#undef PRESET
    };
    for (size_t i = 0; i < sizeof presets / sizeof *presets; i++)
        if (strcmp(name, presets[i].name) == 0) {
            *out = presets[i].config;
            return REBATCH_OK;
        }
#define LIST(name, layers, channels, heads, length, vocabulary, dropout) " " name
    return gpt_error(REBATCH_E_INVALID, "preset is \"%s\": expected one of" GPT_PRESETS(LIST),
                     name);
#undef LIST
}

static rebatch_status check_size(const char *name, size_t value, size_t least, size_t most,
                                 size_t multiple)
{
    if (value >= least && value <= most && value % multiple == 0)
        return REBATCH_OK;
    if (multiple == 1)
        return gpt_error(REBATCH_E_INVALID, "%s is %zu: expected %zu to %zu", name, value, least,
                         most);
    return gpt_error(REBATCH_E_INVALID, "%s is %zu: expected a multiple of %zu from %zu to %zu",
                     name, value, multiple, least, most);
}

rebatch_status gpt_config_check(const struct gpt_config *config)
{
    const struct {
        const char *name;
        size_t value, least, most, multiple;
    } sizes[] = {{"layers", config->layers, 1, GPT_LAYERS_MOST, 1},
                 {"channels", config->channels, 64, 16384, 64},
                 {"heads", config->heads, 1, config->channels, 1},
                 {"length", config->length, 1, 65536, 1},
                 {"vocabulary", config->vocabulary, 256, 1 << 20, 64}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const rebatch_status status = check_size(sizes[i].name, sizes[i].value, sizes[i].least,
                                                 sizes[i].most, sizes[i].multiple);
        if (status)
            return status;
    }
    if (config->channels % config->heads != 0 ||
        config->channels / config->heads > GPT_HEAD_WIDTH_MOST)
        return gpt_error(REBATCH_E_INVALID,
                         "heads is %zu: expected a divisor of %zu channels with at most %d "
                         "channels a head",
                         config->heads, config->channels, GPT_HEAD_WIDTH_MOST);
    if (!(config->dropout >= 0.0f && config->dropout < 1.0f))
        return gpt_error(REBATCH_E_INVALID, "dropout is %g: expected at least 0 and less than 1",
                         (double)config->dropout);
    if (gpt_dtype_bytes(config->dtype) == 0)
        return gpt_error(REBATCH_E_INVALID, "dtype is number %d: expected 0 to %d",
                         (int)config->dtype, GPT_DTYPE_COUNT - 1);
    return REBATCH_OK;
}

/* ---- layout ---- */

/* Number `index` of the layer's (or outer) tensors; returns its offset in the block. Index
 * GPT_LAYER_COUNT (or GPT_OUTER_COUNT) is the block's end. */
static size_t describe(struct gpt_tensor *out, const struct gpt_config *config, bool outer,
                       size_t index)
{
    const size_t C = config->channels, T = config->length, V = config->vocabulary;
#define TENSOR(name, rows, columns, initial) {#name, 0, 0, rows, columns, initial},
    const struct gpt_tensor outers[] = {GPT_OUTER_TENSORS(TENSOR)};
    const struct gpt_tensor layers[] = {GPT_LAYER_TENSORS(TENSOR)};
#undef TENSOR
    const struct gpt_tensor *tensors = outer ? outers : layers;
    const size_t count = outer ? GPT_OUTER_COUNT : GPT_LAYER_COUNT;
    size_t offset = 0;
    for (size_t i = 0; i < index; i++)
        offset += tensors[i].rows * tensors[i].columns;
    if (index < count)
        *out = tensors[index];
    return offset;
}

size_t gpt_tensor_count(const struct gpt_config *config)
{
    return GPT_OUTER_COUNT + config->layers * GPT_LAYER_COUNT;
}

struct gpt_tensor gpt_tensor_at(const struct gpt_config *config, size_t index)
{
    const bool outer = index < GPT_OUTER_COUNT;
    const size_t in_layers = outer ? 0 : index - GPT_OUTER_COUNT;
    struct gpt_tensor tensor = {0};
    const size_t offset =
        describe(&tensor, config, outer, outer ? index : in_layers % GPT_LAYER_COUNT);
    tensor.block = outer ? 0 : 1 + in_layers / GPT_LAYER_COUNT;
    tensor.offset = offset;
    return tensor;
}

size_t gpt_block_count(const struct gpt_config *config)
{
    return 1 + config->layers;
}

size_t gpt_block_elements(const struct gpt_config *config, size_t block)
{
    struct gpt_tensor unused;
    if (block > config->layers)
        return config->vocabulary * config->channels;
    return describe(&unused, config, block == 0, block == 0 ? GPT_OUTER_COUNT : GPT_LAYER_COUNT);
}

float *gpt_outer(const struct gpt_model *model, const struct gpt_set *set,
                 enum gpt_outer_tensor tensor)
{
    struct gpt_tensor unused;
    return set->blocks[0] + describe(&unused, &model->config, true, tensor);
}

float *gpt_layer(const struct gpt_model *model, const struct gpt_set *set, size_t layer,
                 enum gpt_layer_tensor tensor)
{
    struct gpt_tensor unused;
    return set->blocks[1 + layer] + describe(&unused, &model->config, false, tensor);
}

/* ---- working weights ---- */

void *gpt_working_of(const struct gpt_model *model, const struct gpt_tensor *tensor)
{
    char *block = model->working[tensor->block];
    return block ? block + tensor->offset * gpt_dtype_bytes(model->config.dtype) : NULL;
}

static const void *weight_of(const struct gpt_model *model, size_t index)
{
    const struct gpt_tensor tensor = gpt_tensor_at(&model->config, index);
    const void *working = gpt_working_of(model, &tensor);
    return working ? working : model->parameters.blocks[tensor.block] + tensor.offset;
}

const void *gpt_outer_weight(const struct gpt_model *model, enum gpt_outer_tensor tensor)
{
    return weight_of(model, tensor);
}

const void *gpt_layer_weight(const struct gpt_model *model, size_t layer,
                             enum gpt_layer_tensor tensor)
{
    return weight_of(model, GPT_OUTER_COUNT + layer * GPT_LAYER_COUNT + tensor);
}

rebatch_status gpt_model_refresh(struct gpt_model *model)
{
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < gpt_block_count(&model->config) && !status; i++)
        if (model->working[i])
            status = model->ops->cast(&model->queue, model->working[i], model->parameters.blocks[i],
                                      gpt_block_elements(&model->config, i));
    return status;
}

/* Memory for them; none in fp32. */
static rebatch_status take_working(struct gpt_model *model)
{
    const size_t bytes = gpt_dtype_bytes(model->config.dtype);
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < gpt_block_count(&model->config) && !status; i++)
        if (model->config.dtype != GPT_FP32)
            status = rebatch_pool_alloc(&model->working[i], model->pool,
                                        gpt_block_elements(&model->config, i) * bytes,
                                        model->queue.stream, model->tags[GPT_TAG_WORKING]);
    return status;
}

/* ---- sets ---- */

rebatch_status gpt_set_reserve(const struct gpt_model *model, size_t blocks)
{
    size_t elements = 0;
    for (size_t i = 0; i < blocks; i++)
        elements += gpt_block_elements(&model->config, i);
    return rebatch_pool_reserve(model->pool, elements * sizeof(float), model->queue.stream);
}

rebatch_status gpt_set_create(struct gpt_set *out, struct gpt_model *model, size_t blocks,
                              enum gpt_tag tag)
{
    struct gpt_set set = {.count = blocks};
    for (size_t i = 0; i < blocks; i++) {
        void *memory;
        const rebatch_status status = rebatch_pool_alloc(
            &memory, model->pool, gpt_block_elements(&model->config, i) * sizeof(float),
            model->queue.stream, model->tags[tag]);
        if (status) {
            gpt_set_destroy(&set, model);
            return status;
        }
        set.blocks[i] = memory;
    }
    *out = set;
    return REBATCH_OK;
}

void gpt_set_destroy(struct gpt_set *set, struct gpt_model *model)
{
    for (size_t i = 0; i < set->count; i++)
        (void)rebatch_pool_free(model->pool, set->blocks[i]);
    *set = (struct gpt_set){0};
}

rebatch_status gpt_set_zero(const struct gpt_set *set, struct gpt_model *model)
{
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < set->count && !status; i++)
        status = rebatch_fill(model->queue.device, set->blocks[i], 0,
                              gpt_block_elements(&model->config, i) * sizeof(float),
                              model->queue.stream);
    return status;
}

/* ---- first values ---- */

#define DEVIATION 0.02
#define NORMAL_GRAIN 4096 /* groups that are worth waking a thread for */
#define PI 3.14159265358979323846

/* Two numbers of the normal distribution from two random words, by Box and Muller. */
static void normal_pair(float out[2], const uint32_t words[2], double deviation)
{
    const double u = ((double)words[0] + 0.5) / 4294967296.0; /* never 0 */
    const double angle = 2.0 * PI * ((double)words[1] + 0.5) / 4294967296.0;
    const double radius = deviation * sqrt(-2.0 * log(u));
    out[0] = (float)(radius * cos(angle));
    out[1] = (float)(radius * sin(angle));
}

struct normal {
    float *values;
    double deviation;
    uint32_t site;
    uint64_t seed;
};

/* Items are groups of 4 values. */
static void fill_normal(size_t begin, size_t end, const void *user)
{
    const struct normal *n = user;
    for (size_t i = begin; i < end; i++) {
        const uint32_t counter[4] = {(uint32_t)i, 0, n->site, 0};
        uint32_t words[4];
        gpt_philox(words, counter, n->seed);
        normal_pair(n->values + 4 * i, words, n->deviation);
        normal_pair(n->values + 4 * i + 2, words + 2, n->deviation);
    }
}

static void fill_initial(float *values, const struct gpt_model *model,
                         const struct gpt_tensor *tensor, size_t index)
{
    const size_t count = tensor->rows * tensor->columns; /* a multiple of 64 */
    if (tensor->initial == GPT_ZEROS || tensor->initial == GPT_ONES) {
        for (size_t i = 0; i < count; i++)
            values[i] = tensor->initial == GPT_ONES ? 1.0f : 0.0f;
        return;
    }
    const double deviation = tensor->initial == GPT_NORMAL
                                 ? DEVIATION
                                 : DEVIATION / sqrt(2.0 * (double)model->config.layers);
    const struct normal normal = {values, deviation, (uint32_t)(GPT_RANDOM_INITIAL + index),
                                  model->seed};
    gpt_parallel_for(count / 4, NORMAL_GRAIN, fill_normal, &normal);
}

static rebatch_status initialise(struct gpt_model *model)
{
    size_t largest = 0;
    for (size_t i = 0; i < gpt_tensor_count(&model->config); i++) {
        const struct gpt_tensor tensor = gpt_tensor_at(&model->config, i);
        const size_t count = tensor.rows * tensor.columns;
        largest = count > largest ? count : largest;
    }
    float *values = malloc(largest * sizeof *values);
    if (!values)
        return gpt_error(REBATCH_E_HOST_OOM, "no host memory for %zu initial weights", largest);
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < gpt_tensor_count(&model->config) && !status; i++) {
        const struct gpt_tensor tensor = gpt_tensor_at(&model->config, i);
        fill_initial(values, model, &tensor, i);
        status = rebatch_copy(model->queue.device,
                              model->parameters.blocks[tensor.block] + tensor.offset, values,
                              tensor.rows * tensor.columns * sizeof *values, model->queue.stream);
        if (!status)
            status = rebatch_stream_synchronize(model->queue.device, model->queue.stream);
    }
    free(values);
    return status;
}

/* ---- life ---- */

static rebatch_status name_tags(struct gpt_model *model)
{
    static const char *const names[GPT_TAG_COUNT] = {
#define TAG(name, text) text,
        GPT_TAGS(TAG)
#undef TAG
    };
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < GPT_TAG_COUNT && !status; i++)
        status = rebatch_pool_tag(&model->tags[i], model->pool, names[i]);
    return status;
}

rebatch_status gpt_model_create(struct gpt_model **out, const struct gpt_config *config,
                                const struct gpt_ops *ops, rebatch_pool *pool,
                                rebatch_stream stream, uint64_t seed)
{
    *out = NULL;
    const struct gpt_sizes sizes = {config->length, config->channels, config->heads,
                                    config->vocabulary};
    rebatch_status status = gpt_config_check(config);
    if (!status && ops->check_sizes)
        status = ops->check_sizes(&sizes);
    if (status)
        return status;
    struct gpt_model *model = calloc(1, sizeof *model);
    if (!model)
        return gpt_error(REBATCH_E_HOST_OOM, "no host memory for a model");
    model->config = *config;
    model->pool = pool;
    model->seed = seed;
    model->queue = (struct gpt_queue){.device = rebatch_pool_device(pool),
                                      .stream = stream,
                                      .sample_rows = config->length,
                                      .dtype = config->dtype,
                                      .inexact = config->inexact};
    status = ops->open(&model->queue);
    if (status)
        goto fail;
    model->ops = ops;
    status = name_tags(model);
    if (status)
        goto fail;
    status = gpt_set_reserve(model, gpt_block_count(config));
    if (status)
        goto fail;
    status = gpt_set_create(&model->parameters, model, gpt_block_count(config), GPT_TAG_PARAMETERS);
    if (status)
        goto fail;
    status = initialise(model);
    if (!status)
        status = take_working(model);
    if (!status)
        status = gpt_model_refresh(model);
    if (status)
        goto fail;
    *out = model;
    return REBATCH_OK;
fail:
    gpt_model_destroy(model);
    return status;
}

void gpt_model_destroy(struct gpt_model *model)
{
    if (!model)
        return;
    gpt_set_destroy(&model->parameters, model);
    for (size_t i = 0; i <= GPT_LAYERS_MOST; i++)
        (void)rebatch_pool_free(model->pool, model->working[i]);
    if (model->ops)
        model->ops->close(&model->queue);
    free(model);
}
