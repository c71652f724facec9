/* Owns the training run: the callbacks, what they allocate and when, and the list of losses.
 * Must not know how batches are cut or how memory is found. */
#include "gpt/train.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gpt/error.h"

/* Small results, in device memory. */
struct gpt_scalars {
    double loss_sum; /* of the step's samples so far; zeroed by zero_grad */
    double evaluation_sum;
    float norm_and_scale[2]; /* of the last update */
};

/* ---- options ---- */

rebatch_status gpt_train_options_init(struct gpt_train_options *out, const char *preset)
{
    *out = (struct gpt_train_options){.batch = 64,
                                      .seed = 1,
                                      .learning_rate = 1e-3f,
                                      .least_learning_rate = 1e-4f,
                                      .warmup_steps = 4,
                                      .total_steps = 40,
                                      .beta1 = 0.9f,
                                      .beta2 = 0.95f,
                                      .epsilon = 1e-8f,
                                      .weight_decay = 0.1f,
                                      .clip = 1.0f};
    return gpt_config_preset(&out->config, preset);
}

static rebatch_status check_number(const char *name, float value, float least, float below)
{
    if (value >= least && value < below)
        return REBATCH_OK;
    return gpt_error(REBATCH_E_INVALID, "%s is %g: expected at least %g and less than %g", name,
                     (double)value, (double)least, (double)below);
}

static rebatch_status check_options(const struct gpt_train_options *options)
{
    const struct {
        const char *name;
        float value, below;
    } numbers[] = {{"learning_rate", options->learning_rate, 1e6f},
                   {"least_learning_rate", options->least_learning_rate, 1e6f},
                   {"beta1", options->beta1, 1.0f},
                   {"beta2", options->beta2, 1.0f},
                   {"epsilon", options->epsilon, 1.0f},
                   {"weight_decay", options->weight_decay, 1e6f},
                   {"clip", options->clip, INFINITY}};
    if (options->batch == 0 || options->batch > UINT32_MAX)
        return gpt_error(REBATCH_E_INVALID, "batch is %zu: expected 1 to %u samples",
                         options->batch, UINT32_MAX);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        const rebatch_status status =
            check_number(numbers[i].name, numbers[i].value, 0.0f, numbers[i].below);
        if (status)
            return status;
    }
    return REBATCH_OK;
}

/* ---- memory that outlives a callback ---- */

/* A set is published only at the end of the callback that allocated it. It can still be taken back:
 * when rebatch finds a late error behind a callback that succeeded. Then its blocks are no longer
 * in use, and the set is forgotten. */
static void forget_if_taken_back(struct gpt_trainer *trainer, struct gpt_set *set)
{
    size_t bytes;
    for (size_t i = 0; i < set->count; i++)
        if (rebatch_pool_block_bytes(&bytes, trainer->model->pool, set->blocks[i])) {
            *set = (struct gpt_set){0};
            return;
        }
}

static void forget_what_was_taken_back(struct gpt_trainer *trainer)
{
    forget_if_taken_back(trainer, &trainer->gradients);
    forget_if_taken_back(trainer, &trainer->moments[0]);
    forget_if_taken_back(trainer, &trainer->moments[1]);
}

/* ---- zero_grad ---- */

static rebatch_status zero_grad(void *user)
{
    struct gpt_trainer *trainer = user;
    struct gpt_model *model = trainer->model;
    forget_if_taken_back(trainer, &trainer->gradients);
    struct gpt_set gradients = trainer->gradients;
    rebatch_status status = REBATCH_OK;
    if (gradients.count == 0)
        status = gpt_set_create(&gradients, model, gpt_block_count(&model->config) + 1,
                                GPT_TAG_GRADIENTS);
    if (status)
        return status;
    rebatch_mutating(trainer->rb);
    status = gpt_set_zero(&gradients, model);
    if (!status)
        status = rebatch_fill(model->queue.device, &trainer->scalars->loss_sum, 0,
                              sizeof trainer->scalars->loss_sum, model->queue.stream);
    if (!status)
        trainer->gradients = gradients;
    return status;
}

/* ---- forward_backward ---- */

/* Puts samples [first, first + count) of a split on the device. The caller frees *out. */
static rebatch_status upload(int32_t **out, struct gpt_trainer *trainer, enum gpt_split split,
                             uint64_t step, size_t first, size_t count)
{
    struct gpt_model *model = trainer->model;
    const size_t length = model->config.length, tokens = count * (length + 1);
    if (trainer->staging_room < tokens) {
        int32_t *staging = realloc(trainer->staging, tokens * sizeof *staging);
        if (!staging)
            return gpt_error(REBATCH_E_HOST_OOM, "no host memory for %zu tokens", tokens);
        trainer->staging = staging;
        trainer->staging_room = tokens;
    }
    for (size_t i = 0; i < count; i++)
        gpt_data_sample(trainer->staging + i * (length + 1), trainer->data, split,
                        trainer->options.seed, step, first + i, length);
    void *memory;
    rebatch_status status = rebatch_pool_alloc(&memory, model->pool, tokens * sizeof(int32_t),
                                               model->queue.stream, model->tags[GPT_TAG_DATA]);
    if (!status)
        status = rebatch_copy(model->queue.device, memory, trainer->staging,
                              tokens * sizeof(int32_t), model->queue.stream);
    if (!status) /* the next upload overwrites the staging memory */
        status = rebatch_stream_synchronize(model->queue.device, model->queue.stream);
    *out = memory;
    return status;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct gpt_trainer *trainer = user;
    struct gpt_model *model = trainer->model;
    struct gpt_samples samples = {
        .first = mb->first, .count = mb->count, .step = mb->step, .training = true};
    const float row_weight = (float)(1.0 / ((double)mb->batch * (double)model->config.length));
    struct gpt_activations activations;
    int32_t *tokens;
    if (mb->stream != model->queue.stream)
        return gpt_error(REBATCH_E_INVALID, "the trainer's stream is not the session's");
    trainer->samples_seen += mb->count;
    rebatch_status status = upload(&tokens, trainer, GPT_TRAINING, mb->step, mb->first, mb->count);
    if (status)
        return status;
    samples.tokens = tokens;
    status = gpt_forward(&activations, model, &samples, row_weight);
    if (!status)
        status = rebatch_reserve(trainer->rb, gpt_backward_bytes(model, mb->count));
    if (status)
        return status;
    rebatch_mutating(trainer->rb);
    status = model->ops->sum_losses(&model->queue, &trainer->scalars->loss_sum, activations.losses,
                                    mb->count * model->config.length);
    if (!status)
        status = gpt_backward(&activations, model, &samples, &trainer->gradients);
    if (!status)
        status = rebatch_pool_free(model->pool, tokens);
    return status;
}

/* ---- optimizer_step ---- */

static float learning_rate(const struct gpt_train_options *options, uint64_t step)
{
    const double high = (double)options->learning_rate, low = (double)options->least_learning_rate;
    const double warm = (double)options->warmup_steps, total = (double)options->total_steps;
    const double at = (double)step;
    if (at < warm)
        return (float)(high * (at + 1.0) / warm);
    if (at >= total)
        return (float)low;
    const double pi = 3.14159265358979323846;
    return (float)(low + (high - low) * 0.5 * (1.0 + cos(pi * (at - warm) / (total - warm))));
}

static size_t chunks_of(size_t elements)
{
    return (elements + GPT_NORM_CHUNK - 1) / GPT_NORM_CHUNK;
}

/* Partial sums of squares of all gradients: the head's are in the token embedding's by then. */
static size_t partial_count(const struct gpt_config *config)
{
    size_t count = 0;
    for (size_t i = 0; i < gpt_block_count(config); i++)
        count += chunks_of(gpt_block_elements(config, i));
    return count;
}

static rebatch_status find_norm(struct gpt_trainer *trainer, double *partials)
{
    struct gpt_model *model = trainer->model;
    const struct gpt_ops *ops = model->ops;
    const struct gpt_config *config = &model->config;
    double *at = partials;
    for (size_t i = 0; i < gpt_block_count(config); i++) {
        const size_t elements = gpt_block_elements(config, i);
        const rebatch_status status =
            ops->sum_squares(&model->queue, at, trainer->gradients.blocks[i], elements);
        if (status)
            return status;
        at += chunks_of(elements);
    }
    return ops->clip_scale(&model->queue, trainer->scalars->norm_and_scale, partials,
                           (size_t)(at - partials), trainer->options.clip, NULL);
}

static rebatch_status update_tensors(struct gpt_trainer *trainer, const struct gpt_set moments[2])
{
    struct gpt_model *model = trainer->model;
    const struct gpt_train_options *options = &trainer->options;
    struct gpt_adamw settings = {.learning_rate = learning_rate(options, trainer->updates),
                                 .beta1 = options->beta1,
                                 .beta2 = options->beta2,
                                 .epsilon = options->epsilon,
                                 .update = trainer->updates + 1};
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < gpt_tensor_count(&model->config) && !status; i++) {
        const struct gpt_tensor tensor = gpt_tensor_at(&model->config, i);
        const struct gpt_adamw_arrays arrays = {
            .weight = model->parameters.blocks[tensor.block] + tensor.offset,
            .first_moment = moments[0].blocks[tensor.block] + tensor.offset,
            .second_moment = moments[1].blocks[tensor.block] + tensor.offset,
            .working = gpt_working_of(model, &tensor),
            .gradient = trainer->gradients.blocks[tensor.block] + tensor.offset,
            .scale = &trainer->scalars->norm_and_scale[1],
            .count = tensor.rows * tensor.columns};
        settings.weight_decay = tensor.rows > 1 ? options->weight_decay : 0.0f;
        status = model->ops->adamw(&model->queue, &arrays, &settings);
    }
    return status;
}

/* Moments that are zero, unless they are there already. */
static rebatch_status take_moments(struct gpt_set moments[2], struct gpt_trainer *trainer)
{
    struct gpt_model *model = trainer->model;
    rebatch_status status = REBATCH_OK;
    for (int i = 0; i < 2 && !status; i++) {
        forget_if_taken_back(trainer, &trainer->moments[i]);
        moments[i] = trainer->moments[i];
        if (moments[i].count > 0)
            continue;
        status =
            gpt_set_create(&moments[i], model, gpt_block_count(&model->config), GPT_TAG_MOMENTS);
        if (!status)
            status = gpt_set_zero(&moments[i], model);
    }
    return status;
}

static rebatch_status optimizer_step(void *user)
{
    struct gpt_trainer *trainer = user;
    struct gpt_model *model = trainer->model;
    const struct gpt_config *config = &model->config;
    struct gpt_set moments[2];
    void *partials;
    rebatch_status status = take_moments(moments, trainer);
    if (!status)
        status = rebatch_pool_alloc(&partials, model->pool, partial_count(config) * sizeof(double),
                                    model->queue.stream, model->tags[GPT_TAG_UPDATE]);
    if (status)
        return status;
    rebatch_mutating(trainer->rb);
    status = model->ops->add(&model->queue, gpt_outer(model, &trainer->gradients, GPT_TOKENS),
                             trainer->gradients.blocks[gpt_block_count(config)],
                             config->vocabulary * config->channels);
    if (!status)
        status = find_norm(trainer, partials);
    if (!status)
        status = update_tensors(trainer, moments);
    if (!status)
        status = rebatch_pool_free(model->pool, partials);
    if (status)
        return status;
    trainer->moments[0] = moments[0];
    trainer->moments[1] = moments[1];
    trainer->updates++;
    return REBATCH_OK;
}

const rebatch_step_ops *gpt_trainer_ops(void)
{
    static const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                         .zero_grad = zero_grad,
                                         .forward_backward = forward_backward,
                                         .optimizer_step = optimizer_step,
                                         .flags = REBATCH_DECLARES_MUTATION};
    return &ops;
}

/* ---- a step ---- */

/* Done before the step, so that nothing can fail once it has happened. */
static rebatch_status make_loss_room(struct gpt_trainer *trainer)
{
    if (trainer->loss_count < trainer->loss_room)
        return REBATCH_OK;
    const size_t room = trainer->loss_room ? 2 * trainer->loss_room : 64;
    double *losses = realloc(trainer->losses, room * sizeof *losses);
    if (!losses)
        return gpt_error(REBATCH_E_HOST_OOM, "no host memory for %zu losses", room);
    trainer->losses = losses;
    trainer->loss_room = room;
    return REBATCH_OK;
}

/* Brings device memory to the host. */
static rebatch_status read_back(struct gpt_trainer *trainer, void *to, const void *from,
                                size_t bytes)
{
    const struct gpt_queue *queue = &trainer->model->queue;
    const rebatch_status status = rebatch_copy(queue->device, to, from, bytes, queue->stream);
    return status ? status : rebatch_stream_synchronize(queue->device, queue->stream);
}

rebatch_status gpt_trainer_step(struct gpt_trainer *trainer, rebatch_step_report *report,
                                struct gpt_step_result *result)
{
    const struct gpt_train_options *options = &trainer->options;
    rebatch_status status = make_loss_room(trainer);
    if (status)
        return status;
    const float rate = learning_rate(options, trainer->updates);
    status = rebatch_step(trainer->rb, gpt_trainer_ops(), options->batch, trainer, report);
    if (status) {
        forget_what_was_taken_back(trainer);
        return status;
    }
    struct gpt_scalars scalars;
    status = read_back(trainer, &scalars, trainer->scalars, sizeof scalars);
    if (status)
        return status;
    const double tokens = (double)options->batch * (double)options->config.length;
    const double loss = scalars.loss_sum / tokens;
    trainer->losses[trainer->loss_count++] = loss;
    if (result)
        *result = (struct gpt_step_result){loss, scalars.norm_and_scale[0], rate};
    return REBATCH_OK;
}

/* ---- hash ---- */

/* Adds a set as `blocks` blocks; an empty one counts as zeros. */
static rebatch_status hash_set(struct gpt_hash *hash, struct gpt_trainer *trainer,
                               const struct gpt_set *set, void *room)
{
    const struct gpt_config *config = &trainer->model->config;
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < gpt_block_count(config) && !status; i++) {
        const size_t bytes = gpt_block_elements(config, i) * sizeof(float);
        if (set->count > 0)
            status = read_back(trainer, room, set->blocks[i], bytes);
        else
            memset(room, 0, bytes);
        if (!status)
            gpt_hash_add(hash, room, bytes);
    }
    return status;
}

rebatch_status gpt_trainer_hash(struct gpt_trainer *trainer, char text[GPT_HASH_TEXT_BYTES])
{
    const struct gpt_config *config = &trainer->model->config;
    const struct gpt_set *sets[] = {&trainer->model->parameters, &trainer->moments[0],
                                    &trainer->moments[1]};
    const size_t outer = gpt_block_elements(config, 0), layer = gpt_block_elements(config, 1);
    const size_t bytes = (outer > layer ? outer : layer) * sizeof(float);
    text[0] = '\0';
    void *room = malloc(bytes);
    if (!room)
        return gpt_error(REBATCH_E_HOST_OOM, "no host memory for %zu bytes of weights", bytes);
    struct gpt_hash hash;
    gpt_hash_begin(&hash);
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < sizeof sets / sizeof *sets && !status; i++)
        status = hash_set(&hash, trainer, sets[i], room);
    free(room);
    if (status)
        return status;
    gpt_hash_add(&hash, trainer->losses, trainer->loss_count * sizeof *trainer->losses);
    gpt_hash_end(&hash, text);
    return REBATCH_OK;
}

/* ---- evaluation ---- */

/* Adds the losses of one chunk of held-out samples. Leaves what it allocated to the caller's
 * scope. */
static rebatch_status evaluate_chunk(struct gpt_trainer *trainer, size_t first, size_t count)
{
    struct gpt_model *model = trainer->model;
    struct gpt_samples samples = {.first = first, .count = count};
    struct gpt_activations activations;
    int32_t *tokens;
    rebatch_status status = upload(&tokens, trainer, GPT_HELD_OUT, 0, first, count);
    if (status)
        return status;
    samples.tokens = tokens;
    status = gpt_forward(&activations, model, &samples, 0.0f);
    if (!status)
        status = model->ops->sum_losses(&model->queue, &trainer->scalars->evaluation_sum,
                                        activations.losses, count * model->config.length);
    return status;
}

/* One chunk in a scope that is taken back whatever happens: nothing in it is needed any more. */
static rebatch_status evaluate_in_scope(struct gpt_trainer *trainer, size_t first, size_t count)
{
    rebatch_scope scope;
    rebatch_status status = rebatch_scope_begin(&scope, trainer->model->pool);
    if (status)
        return status;
    status = evaluate_chunk(trainer, first, count);
    const rebatch_status rolled = rebatch_scope_rollback(trainer->model->pool, scope);
    return status ? status : rolled;
}

rebatch_status gpt_trainer_evaluate(struct gpt_trainer *trainer, size_t samples, double *loss)
{
    const struct gpt_queue *queue = &trainer->model->queue;
    *loss = 0.0;
    if (samples == 0)
        return gpt_error(REBATCH_E_INVALID, "0 samples to evaluate: expected at least 1");
    rebatch_status status = rebatch_fill(queue->device, &trainer->scalars->evaluation_sum, 0,
                                         sizeof(double), queue->stream);
    size_t most = samples;
    for (size_t first = 0; first < samples && !status;) {
        const size_t count = samples - first < most ? samples - first : most;
        status = evaluate_in_scope(trainer, first, count);
        if (status == REBATCH_OOM && count > 1) {
            most = count / 2;
            status = REBATCH_OK;
        } else if (!status) {
            first += count;
        }
    }
    double sum;
    if (!status)
        status = read_back(trainer, &sum, &trainer->scalars->evaluation_sum, sizeof sum);
    if (!status)
        *loss = sum / ((double)samples * (double)trainer->options.config.length);
    return status;
}

/* ---- life ---- */

static rebatch_status take_scalars(struct gpt_trainer *trainer)
{
    struct gpt_model *model = trainer->model;
    void *memory;
    const rebatch_status status =
        rebatch_pool_alloc(&memory, model->pool, sizeof *trainer->scalars, model->queue.stream,
                           model->tags[GPT_TAG_UPDATE]);
    if (status)
        return status;
    trainer->scalars = memory;
    return rebatch_fill(model->queue.device, memory, 0, sizeof *trainer->scalars,
                        model->queue.stream);
}

rebatch_status gpt_trainer_create(struct gpt_trainer **out, rebatch *rb, const struct gpt_ops *ops,
                                  rebatch_stream stream, const struct gpt_data *data,
                                  const struct gpt_train_options *options)
{
    *out = NULL;
    rebatch_status status = check_options(options);
    if (status)
        return status;
    struct gpt_trainer *trainer = calloc(1, sizeof *trainer);
    if (!trainer)
        return gpt_error(REBATCH_E_HOST_OOM, "no host memory for a trainer");
    trainer->options = *options;
    trainer->rb = rb;
    trainer->data = data;
    status = gpt_model_create(&trainer->model, &options->config, ops, rebatch_get_pool(rb), stream,
                              options->seed);
    if (!status)
        status = take_scalars(trainer);
    if (!status)
        status = rebatch_guard(rb, &trainer->samples_seen, sizeof trainer->samples_seen,
                               REBATCH_GUARD_HOST);
    if (status) {
        gpt_trainer_destroy(trainer);
        return status;
    }
    *out = trainer;
    return REBATCH_OK;
}

void gpt_trainer_destroy(struct gpt_trainer *trainer)
{
    if (!trainer)
        return;
    if (trainer->model) {
        gpt_set_destroy(&trainer->gradients, trainer->model);
        gpt_set_destroy(&trainer->moments[0], trainer->model);
        gpt_set_destroy(&trainer->moments[1], trainer->model);
        (void)rebatch_pool_free(trainer->model->pool, trainer->scalars);
    }
    gpt_model_destroy(trainer->model);
    free(trainer->losses);
    free(trainer->staging);
    free(trainer);
}
