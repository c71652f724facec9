/* Owns the order of operations: forward, and backward in reverse.
 * Must not know how batches are cut, or what gradients are for. */
#include "gpt/model.h"

/* Each operation runs only if those before it did. */
#define TRY(call)                                                                                  \
    do {                                                                                           \
        const rebatch_status status_ = (call);                                                     \
        if (status_)                                                                               \
            return status_;                                                                        \
    } while (0)

/* ---- memory ---- */

static rebatch_status take(void **out, struct gpt_model *model, size_t bytes, enum gpt_tag tag)
{
    return rebatch_pool_alloc(out, model->pool, bytes, model->queue.stream, model->tags[tag]);
}

static void give(void **memory, struct gpt_model *model)
{
    (void)rebatch_pool_free(model->pool, *memory);
    *memory = NULL;
}

static size_t rows_of(const struct gpt_model *model, const struct gpt_samples *samples)
{
    return samples->count * model->config.length;
}

/* Bytes of each activation in a row. */
static void row_bytes_of(size_t bytes[GPT_ACT_COUNT], const struct gpt_config *config)
{
    const size_t C = config->channels, H = config->heads, E = gpt_dtype_bytes(config->dtype);
#define BYTES(name, elements, bytes, level) (elements) * (bytes),
    const size_t all[GPT_ACT_COUNT] = {GPT_LAYER_ACTIVATIONS(BYTES)};
#undef BYTES
    for (size_t i = 0; i < GPT_ACT_COUNT; i++)
        bytes[i] = all[i];
}

/* Whether each layer keeps one of its own. */
static bool is_kept(size_t activation, enum gpt_lighten lighten)
{
#define LEVEL(name, elements, bytes, level) level,
    static const enum gpt_lighten levels[GPT_ACT_COUNT] = {GPT_LAYER_ACTIVATIONS(LEVEL)};
#undef LEVEL
    return lighten < levels[activation];
}

/* What all layers share. */
static rebatch_status take_shared(struct gpt_activations *acts, struct gpt_model *model,
                                  size_t rows)
{
    size_t bytes[GPT_ACT_COUNT];
    row_bytes_of(bytes, &model->config);
    for (size_t i = 0; i < GPT_ACT_COUNT; i++)
        if (!is_kept(i, acts->lighten))
            TRY(take(&acts->shared[i], model, rows * bytes[i], GPT_TAG_ACTIVATIONS));
    return REBATCH_OK;
}

static void give_shared(struct gpt_activations *acts, struct gpt_model *model)
{
    for (size_t i = 0; i < GPT_ACT_COUNT; i++)
        give(&acts->shared[i], model);
}

static rebatch_status take_layer(struct gpt_activations *acts, struct gpt_model *model,
                                 size_t layer, size_t rows)
{
    size_t bytes[GPT_ACT_COUNT];
    row_bytes_of(bytes, &model->config);
    for (size_t i = 0; i < GPT_ACT_COUNT; i++)
        if (is_kept(i, acts->lighten))
            TRY(take(&acts->layers[layer][i], model, rows * bytes[i], GPT_TAG_ACTIVATIONS));
        else
            acts->layers[layer][i] = acts->shared[i];
    return REBATCH_OK;
}

static void give_layer(struct gpt_activations *acts, struct gpt_model *model, size_t layer)
{
    for (size_t i = 0; i < GPT_ACT_COUNT; i++)
        if (is_kept(i, acts->lighten))
            give(&acts->layers[layer][i], model);
}

static void give_final(struct gpt_activations *acts, struct gpt_model *model)
{
    give(&acts->final_norm, model);
    give(&acts->final_mean, model);
    give(&acts->final_rstd, model);
    give(&acts->logits, model);
}

void gpt_activations_free(struct gpt_activations *activations, struct gpt_model *model)
{
    give(&activations->embedded, model);
    for (size_t i = 0; i < model->config.layers; i++)
        give_layer(activations, model, i);
    give_shared(activations, model);
    give_final(activations, model);
    give(&activations->losses, model);
}

/* ---- what both directions need ---- */

/* Places where dropout stands. */
static uint32_t attention_site(size_t layer)
{
    return (uint32_t)(1 + 2 * layer);
}
static uint32_t perceptron_site(size_t layer)
{
    return (uint32_t)(2 + 2 * layer);
}
#define EMBEDDING_SITE 0u

/* out = residual + dropout(x), over all rows. */
static rebatch_status drop(struct gpt_model *model, const struct gpt_samples *samples,
                           uint32_t site, void *out, const void *residual, const void *x)
{
    const struct gpt_config *config = &model->config;
    const struct gpt_dropout dropout = {.probability = samples->training ? config->dropout : 0.0f,
                                        .seed = model->seed,
                                        .step = samples->step,
                                        .site = site,
                                        .first_sample = samples->first};
    return model->ops->dropout_add(&model->queue, out, residual, x, samples->count,
                                   config->length * config->channels, &dropout);
}

static struct gpt_tokens tokens_of(const struct gpt_model *model, const struct gpt_samples *samples)
{
    return (struct gpt_tokens){samples->tokens, samples->count, model->config.length};
}

static struct gpt_attention attention_of(const struct gpt_model *model, size_t count)
{
    const struct gpt_config *config = &model->config;
    return (struct gpt_attention){count, config->length, config->heads,
                                  config->channels / config->heads};
}

/* ---- forward ---- */

static rebatch_status linear(struct gpt_model *model, void *y, const void *x, size_t layer,
                             enum gpt_layer_tensor weight, enum gpt_layer_tensor bias,
                             const struct gpt_matmul *shape)
{
    return model->ops->matmul_forward(&model->queue, y, x, gpt_layer_weight(model, layer, weight),
                                      gpt_layer_weight(model, layer, bias), shape);
}

/* The norm before a branch, of `x`. */
struct norm {
    enum gpt_layer_activation out, mean, rstd;
    enum gpt_layer_tensor gamma, beta;
};
static const struct norm attention_norm = {GPT_ACT_NORM1, GPT_ACT_MEAN1, GPT_ACT_RSTD1,
                                           GPT_NORM1_GAMMA, GPT_NORM1_BETA};
static const struct norm perceptron_norm = {GPT_ACT_NORM2, GPT_ACT_MEAN2, GPT_ACT_RSTD2,
                                            GPT_NORM2_GAMMA, GPT_NORM2_BETA};

static rebatch_status normalise(struct gpt_model *model, const struct norm *norm, size_t layer,
                                void **acts, const void *x, size_t rows)
{
    return model->ops->layernorm_forward(
        &model->queue, acts[norm->out], acts[norm->mean], acts[norm->rstd], x,
        gpt_layer_weight(model, layer, norm->gamma), gpt_layer_weight(model, layer, norm->beta),
        rows, model->config.channels);
}

static rebatch_status attention_branch(struct gpt_model *model, const struct gpt_samples *samples,
                                       size_t layer, void **acts, const void *x)
{
    const size_t rows = rows_of(model, samples), channels = model->config.channels;
    const struct gpt_attention shape = attention_of(model, samples->count);
    TRY(normalise(model, &attention_norm, layer, acts, x, rows));
    TRY(linear(model, acts[GPT_ACT_QKV], acts[GPT_ACT_NORM1], layer, GPT_QKV_WEIGHT, GPT_QKV_BIAS,
               &(struct gpt_matmul){rows, channels, 3 * channels, false}));
    TRY(model->ops->attention_forward(&model->queue, acts[GPT_ACT_ATTENTION],
                                      acts[GPT_ACT_LOG_SUMS], acts[GPT_ACT_QKV], &shape));
    TRY(linear(model, acts[GPT_ACT_MIDDLE], acts[GPT_ACT_ATTENTION], layer, GPT_PROJECT_WEIGHT,
               GPT_PROJECT_BIAS, &(struct gpt_matmul){rows, channels, channels, false}));
    return drop(model, samples, attention_site(layer), acts[GPT_ACT_MIDDLE], x,
                acts[GPT_ACT_MIDDLE]);
}

static rebatch_status gelu(struct gpt_model *model, void **acts, size_t rows)
{
    return model->ops->gelu_forward(&model->queue, acts[GPT_ACT_GELU], acts[GPT_ACT_WIDE],
                                    rows * 4 * model->config.channels);
}

/* The perceptron as far as its backward pass needs it. */
static rebatch_status widen(struct gpt_model *model, const struct gpt_samples *samples,
                            size_t layer, void **acts)
{
    const size_t rows = rows_of(model, samples), channels = model->config.channels;
    TRY(normalise(model, &perceptron_norm, layer, acts, acts[GPT_ACT_MIDDLE], rows));
    TRY(linear(model, acts[GPT_ACT_WIDE], acts[GPT_ACT_NORM2], layer, GPT_WIDEN_WEIGHT,
               GPT_WIDEN_BIAS, &(struct gpt_matmul){rows, channels, 4 * channels, false}));
    return gelu(model, acts, rows);
}

static rebatch_status narrow(struct gpt_model *model, const struct gpt_samples *samples,
                             size_t layer, void **acts)
{
    const size_t rows = rows_of(model, samples), channels = model->config.channels;
    TRY(linear(model, acts[GPT_ACT_END], acts[GPT_ACT_GELU], layer, GPT_NARROW_WEIGHT,
               GPT_NARROW_BIAS, &(struct gpt_matmul){rows, 4 * channels, channels, false}));
    return drop(model, samples, perceptron_site(layer), acts[GPT_ACT_END], acts[GPT_ACT_MIDDLE],
                acts[GPT_ACT_END]);
}

static rebatch_status embed(struct gpt_activations *acts, struct gpt_model *model,
                            const struct gpt_samples *samples)
{
    const struct gpt_tokens tokens = tokens_of(model, samples);
    TRY(take(&acts->embedded, model,
             rows_of(model, samples) * model->config.channels *
                 gpt_dtype_bytes(model->config.dtype),
             GPT_TAG_ACTIVATIONS));
    TRY(model->ops->embedding_forward(
        &model->queue, acts->embedded, &tokens, gpt_outer_weight(model, GPT_TOKENS),
        gpt_outer_weight(model, GPT_POSITIONS), model->config.channels));
    return drop(model, samples, EMBEDDING_SITE, acts->embedded, NULL, acts->embedded);
}

static struct gpt_matmul head_shape(const struct gpt_model *model, size_t rows)
{
    return (struct gpt_matmul){rows, model->config.channels, model->config.vocabulary, true};
}

/* Final norm, head and losses. */
static rebatch_status finish(struct gpt_activations *acts, struct gpt_model *model,
                             const struct gpt_samples *samples, const void *x, float row_weight)
{
    const struct gpt_ops *ops = model->ops;
    const size_t rows = rows_of(model, samples), channels = model->config.channels;
    const struct gpt_matmul shape = head_shape(model, rows);
    const struct gpt_tokens tokens = tokens_of(model, samples);
    TRY(take(&acts->final_norm, model, rows * channels * gpt_dtype_bytes(model->config.dtype),
             GPT_TAG_ACTIVATIONS));
    TRY(take(&acts->final_mean, model, rows * sizeof(float), GPT_TAG_ACTIVATIONS));
    TRY(take(&acts->final_rstd, model, rows * sizeof(float), GPT_TAG_ACTIVATIONS));
    TRY(take(&acts->logits, model,
             rows * model->config.vocabulary * gpt_dtype_bytes(model->config.dtype),
             GPT_TAG_ACTIVATIONS));
    TRY(take(&acts->losses, model, rows * sizeof(float), GPT_TAG_ACTIVATIONS));
    TRY(ops->layernorm_forward(&model->queue, acts->final_norm, acts->final_mean, acts->final_rstd,
                               x, gpt_outer_weight(model, GPT_FINAL_GAMMA),
                               gpt_outer_weight(model, GPT_FINAL_BETA), rows, channels));
    TRY(ops->matmul_forward(&model->queue, acts->logits, acts->final_norm,
                            gpt_outer_weight(model, GPT_TOKENS), NULL, &shape));
    return ops->cross_entropy(&model->queue, acts->losses, acts->logits, &tokens,
                              model->config.vocabulary, samples->training ? row_weight : 0.0f);
}

rebatch_status gpt_forward(struct gpt_activations *out, struct gpt_model *model,
                           const struct gpt_samples *samples, float row_weight)
{
    const size_t layers = model->config.layers, rows = rows_of(model, samples);
    *out = (struct gpt_activations){.lighten =
                                        samples->training ? model->lighten : GPT_RECOMPUTE_LAYERS};
    TRY(take_shared(out, model, rows));
    TRY(embed(out, model, samples));
    void **x = &out->embedded;
    for (size_t i = 0; i < layers; i++) {
        void **acts = out->layers[i];
        TRY(take_layer(out, model, i, rows));
        TRY(attention_branch(model, samples, i, acts, *x));
        TRY(widen(model, samples, i, acts));
        TRY(narrow(model, samples, i, acts));
        if (!samples->training)
            give(x, model);
        x = &acts[GPT_ACT_END];
    }
    if (!samples->training)
        give_shared(out, model);
    return finish(out, model, samples, *x, row_weight);
}

/* ---- backward ---- */

/* Gradients of activations, one buffer of each kind for the whole pass. */
struct scratch {
    void *stream; /* [rows][C]: of the residual stream */
    void *branch; /* [rows][C]: of what enters or leaves a branch */
    void *wide;   /* [rows][4C]: inside a branch */
};

#define SCRATCH_BUFFERS 3
static void scratch_bytes(size_t bytes[SCRATCH_BUFFERS], const struct gpt_model *model,
                          size_t samples)
{
    const size_t one = samples * model->config.length * model->config.channels *
                       gpt_dtype_bytes(model->config.dtype);
    bytes[0] = one;
    bytes[1] = one;
    bytes[2] = 4 * one;
}

size_t gpt_sample_bytes(const struct gpt_config *config, enum gpt_lighten lighten)
{
    const size_t E = gpt_dtype_bytes(config->dtype);
    size_t bytes[GPT_ACT_COUNT], row = 0;
    row_bytes_of(bytes, config);
    for (size_t i = 0; i < GPT_ACT_COUNT; i++)
        row += bytes[i] * (is_kept(i, lighten) ? config->layers : 1);
    row += 2 * config->channels * E + 2 * sizeof(float); /* the embedding, the final norm */
    row += config->vocabulary * E + sizeof(float);       /* logits, loss */
    row += 6 * config->channels * E;                     /* backward */
    return row * config->length;
}

size_t gpt_backward_bytes(const struct gpt_model *model, size_t samples)
{
    const size_t unit = REBATCH_POOL_UNIT_BYTES;
    size_t bytes[SCRATCH_BUFFERS], sum = 0;
    scratch_bytes(bytes, model, samples);
    for (size_t i = 0; i < SCRATCH_BUFFERS; i++)
        sum += (bytes[i] + unit - 1) / unit * unit;
    return sum;
}

static rebatch_status take_scratch(struct scratch *out, struct gpt_model *model, size_t samples)
{
    size_t bytes[SCRATCH_BUFFERS];
    scratch_bytes(bytes, model, samples);
    TRY(take(&out->stream, model, bytes[0], GPT_TAG_BACKWARD));
    TRY(take(&out->branch, model, bytes[1], GPT_TAG_BACKWARD));
    return take(&out->wide, model, bytes[2], GPT_TAG_BACKWARD);
}

/* What the functions below hand on. */
struct backward {
    struct gpt_model *model;
    const struct gpt_samples *samples;
    enum gpt_lighten lighten;
    const struct gpt_set *gradients;
    struct scratch scratch;
    size_t rows;
};

/* Gradients of a linear part's weight, bias and input. */
static rebatch_status linear_backward(const struct backward *b, void *dx, const void *dy,
                                      const void *x, size_t layer, enum gpt_layer_tensor weight,
                                      enum gpt_layer_tensor bias, const struct gpt_matmul *shape)
{
    const struct gpt_ops *ops = b->model->ops;
    TRY(ops->matmul_backward_weight(&b->model->queue,
                                    gpt_layer(b->model, b->gradients, layer, weight),
                                    gpt_layer(b->model, b->gradients, layer, bias), dy, x, shape));
    return ops->matmul_backward_input(&b->model->queue, dx, dy,
                                      gpt_layer_weight(b->model, layer, weight), shape);
}

/* The stream's gradient += what comes through a branch's norm. */
static rebatch_status norm_backward(const struct backward *b, const struct norm *norm, size_t layer,
                                    void **acts, const void *x)
{
    struct gpt_model *model = b->model;
    return model->ops->layernorm_backward(
        &model->queue, b->scratch.stream, gpt_layer(model, b->gradients, layer, norm->gamma),
        gpt_layer(model, b->gradients, layer, norm->beta), b->scratch.branch, x, acts[norm->mean],
        acts[norm->rstd], gpt_layer_weight(model, layer, norm->gamma), b->rows,
        model->config.channels, true);
}

/* What enters a branch from behind: the stream's gradient as dropout left it. Without dropout that
 * is the stream itself, which nobody changes before the branch's norm. */
static rebatch_status branch_gradient(const void **out, const struct backward *b, uint32_t site)
{
    const bool drops = b->model->config.dropout > 0.0f;
    *out = drops ? b->scratch.branch : b->scratch.stream;
    return drops ? drop(b->model, b->samples, site, b->scratch.branch, NULL, b->scratch.stream)
                 : REBATCH_OK;
}

static rebatch_status perceptron_backward(const struct backward *b, size_t layer, void **acts)
{
    struct gpt_model *model = b->model;
    const struct scratch *s = &b->scratch;
    const size_t channels = model->config.channels;
    const bool again = b->lighten == GPT_RECOMPUTE_CHEAP;
    const void *x = acts[GPT_ACT_MIDDLE], *dy;
    TRY(branch_gradient(&dy, b, perceptron_site(layer)));
    if (again)
        TRY(gelu(model, acts, b->rows));
    TRY(linear_backward(b, s->wide, dy, acts[GPT_ACT_GELU], layer, GPT_NARROW_WEIGHT,
                        GPT_NARROW_BIAS,
                        &(struct gpt_matmul){b->rows, 4 * channels, channels, false}));
    TRY(model->ops->gelu_backward(&model->queue, s->wide, acts[GPT_ACT_WIDE],
                                  b->rows * 4 * channels));
    if (again)
        TRY(normalise(model, &perceptron_norm, layer, acts, x, b->rows));
    TRY(linear_backward(b, s->branch, s->wide, acts[GPT_ACT_NORM2], layer, GPT_WIDEN_WEIGHT,
                        GPT_WIDEN_BIAS,
                        &(struct gpt_matmul){b->rows, channels, 4 * channels, false}));
    return norm_backward(b, &perceptron_norm, layer, acts, x);
}

static rebatch_status attention_branch_backward(const struct backward *b, size_t layer, void **acts,
                                                const void *x)
{
    struct gpt_model *model = b->model;
    const struct scratch *s = &b->scratch;
    const size_t channels = model->config.channels;
    const struct gpt_attention shape = attention_of(model, b->samples->count);
    /* Three quarters of the wide buffer are the gradient of qkv, the rest that of attention's
     * output. */
    void *dqkv = s->wide;
    void *dout = (char *)s->wide + b->rows * 3 * channels * gpt_dtype_bytes(model->config.dtype);
    const void *dy;
    TRY(branch_gradient(&dy, b, attention_site(layer)));
    TRY(linear_backward(b, dout, dy, acts[GPT_ACT_ATTENTION], layer, GPT_PROJECT_WEIGHT,
                        GPT_PROJECT_BIAS,
                        &(struct gpt_matmul){b->rows, channels, channels, false}));
    TRY(model->ops->attention_backward(&model->queue, dqkv, dout, acts[GPT_ACT_ATTENTION],
                                       acts[GPT_ACT_QKV], acts[GPT_ACT_LOG_SUMS], &shape));
    if (b->lighten == GPT_RECOMPUTE_CHEAP)
        TRY(normalise(model, &attention_norm, layer, acts, x, b->rows));
    TRY(linear_backward(b, s->branch, dqkv, acts[GPT_ACT_NORM1], layer, GPT_QKV_WEIGHT,
                        GPT_QKV_BIAS,
                        &(struct gpt_matmul){b->rows, channels, 3 * channels, false}));
    return norm_backward(b, &attention_norm, layer, acts, x);
}

/* Brings back what the layer's forward pass left, where another layer's has taken its place. */
static rebatch_status recompute(const struct backward *b, size_t layer, void **acts, const void *x)
{
    if (b->lighten != GPT_RECOMPUTE_LAYERS || layer + 1 == b->model->config.layers)
        return REBATCH_OK;
    TRY(attention_branch(b->model, b->samples, layer, acts, x));
    return widen(b->model, b->samples, layer, acts);
}

/* From the logits' gradient to the stream's. */
static rebatch_status finish_backward(const struct backward *b, struct gpt_activations *acts,
                                      const void *x)
{
    struct gpt_model *model = b->model;
    const struct gpt_ops *ops = model->ops;
    const struct gpt_matmul shape = head_shape(model, b->rows);
    float *head = b->gradients->blocks[gpt_block_count(&model->config)];
    TRY(ops->matmul_backward_weight(&model->queue, head, NULL, acts->logits, acts->final_norm,
                                    &shape));
    TRY(ops->matmul_backward_input(&model->queue, b->scratch.branch, acts->logits,
                                   gpt_outer_weight(model, GPT_TOKENS), &shape));
    TRY(ops->layernorm_backward(
        &model->queue, b->scratch.stream, gpt_outer(model, b->gradients, GPT_FINAL_GAMMA),
        gpt_outer(model, b->gradients, GPT_FINAL_BETA), b->scratch.branch, x, acts->final_mean,
        acts->final_rstd, gpt_outer_weight(model, GPT_FINAL_GAMMA), b->rows, model->config.channels,
        false));
    give_final(acts, model);
    return REBATCH_OK;
}

static rebatch_status embed_backward(const struct backward *b)
{
    struct gpt_model *model = b->model;
    const struct gpt_tokens tokens = tokens_of(model, b->samples);
    TRY(drop(model, b->samples, EMBEDDING_SITE, b->scratch.stream, NULL, b->scratch.stream));
    return model->ops->embedding_backward(&model->queue, gpt_outer(model, b->gradients, GPT_TOKENS),
                                          gpt_outer(model, b->gradients, GPT_POSITIONS),
                                          b->scratch.stream, &tokens, model->config.channels);
}

rebatch_status gpt_backward(struct gpt_activations *activations, struct gpt_model *model,
                            const struct gpt_samples *samples, const struct gpt_set *gradients)
{
    struct backward b = {.model = model,
                         .samples = samples,
                         .gradients = gradients,
                         .lighten = activations->lighten,
                         .rows = rows_of(model, samples)};
    const size_t layers = model->config.layers;
    TRY(take_scratch(&b.scratch, model, samples->count));
    TRY(finish_backward(&b, activations, activations->layers[layers - 1][GPT_ACT_END]));
    for (size_t i = layers; i-- > 0;) {
        void **acts = activations->layers[i];
        const void *x = i == 0 ? activations->embedded : activations->layers[i - 1][GPT_ACT_END];
        TRY(recompute(&b, i, acts, x));
        TRY(perceptron_backward(&b, i, acts));
        TRY(attention_branch_backward(&b, i, acts, x));
        give_layer(activations, model, i);
    }
    TRY(embed_backward(&b));
    give(&b.scratch.stream, model);
    give(&b.scratch.branch, model);
    give(&b.scratch.wide, model);
    gpt_activations_free(activations, model); /* what is left of them */
    return REBATCH_OK;
}
