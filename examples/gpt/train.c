/* Owns the training run: the callbacks but the update, what they allocate and when, and the list of
 * losses.
 * Must not know how batches are cut or how memory is found. */

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpt/error.h"
#include "gpt/update.h"

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
                   {"clip", options->clip, INFINITY},
                   {"loss_scale", options->loss_scale, INFINITY}};
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

/* ---- zero_grad ---- */

static rebatch_status zero_grad(void *user)
{
    struct gpt_trainer *trainer = user;
    struct gpt_model *model = trainer->model;
    struct gpt_set gradients = trainer->gradients;
    rebatch_status status = REBATCH_OK;
    if (gradients.count == 0)
        status = gpt_set_reserve(model, gpt_block_count(&model->config) + 1);
    if (gradients.count == 0 && !status)
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
    return status ? status : gpt_shards_zero(trainer);
}

/* ---- forward_backward ---- */

/* What a row's loss weighs in the gradient. A scale that has shrunk to nothing leaves the smallest
 * weight there is: 0 means no gradient at all to cross_entropy(). */
static float row_weight(const struct gpt_trainer *trainer, size_t batch)
{
    const double rows = (double)batch * (double)trainer->model->config.length;
    const double scale = trainer->has_scaler ? (double)trainer->scaler.scale : 1.0;
    return fmaxf((float)(scale / rows), FLT_MIN);
}

/* Samples of one shard: `samples->first` counts from this rank's first, as do the tokens. */
static rebatch_status run_samples(struct gpt_trainer *trainer, struct gpt_samples samples,
                                  size_t batch)
{
    struct gpt_model *model = trainer->model;
    struct gpt_activations activations;
    const size_t shard = samples.first / trainer->shards.samples;
    samples.tokens += samples.first * (model->config.length + 1);
    samples.first += gpt_rank_first(trainer);
    rebatch_status status = gpt_forward(&activations, model, &samples, row_weight(trainer, batch));
    if (!status)
        status = rebatch_reserve(trainer->rb, gpt_backward_bytes(model, samples.count));
    if (status)
        return status;
    rebatch_mutating(trainer->rb);
    status = model->ops->sum_losses(&model->queue, gpt_shard_loss(trainer, shard),
                                    activations.losses, samples.count * model->config.length);
    return status
               ? status
               : gpt_backward(&activations, model, &samples, gpt_shard_gradients(trainer, shard));
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct gpt_trainer *trainer = user;
    struct gpt_model *model = trainer->model;
    const size_t shard_samples = trainer->shards.samples, end = mb->first + mb->count;
    struct gpt_samples samples = {.first = mb->first, .step = mb->step, .training = true};
    if (mb->stream != model->queue.stream)
        return gpt_error(REBATCH_E_INVALID, "the trainer's stream is not the session's");
    if (mb->batch != trainer->options.batch)
        return gpt_error(REBATCH_E_INVALID,
                         "the effective batch is %zu: expected the trainer's %zu", mb->batch,
                         trainer->options.batch);
    trainer->samples_seen += mb->count;
    rebatch_status status = gpt_feed_take(&samples.tokens, &trainer->feed, mb->step);
    if (status)
        return status;
    for (; samples.first < end && !status; samples.first += samples.count) {
        const size_t left = shard_samples - samples.first % shard_samples;
        samples.count = left < end - samples.first ? left : end - samples.first;
        status = run_samples(trainer, samples, mb->batch);
    }
    if (!status)
        status = gpt_feed_ahead(&trainer->feed, mb->step);
    return status;
}

/* ---- lighten ---- */

static rebatch_status lighten(unsigned level, void *user)
{
    struct gpt_trainer *trainer = user;
    if (level > GPT_LIGHTEN_MOST)
        return gpt_error(REBATCH_E_UNSUPPORTED, "lighten level is %u: expected 0 to %d", level,
                         GPT_LIGHTEN_MOST);
    const rebatch_status status =
        level == GPT_LIGHTEN_MOST ? gpt_moments_pin(trainer) : gpt_moments_unpin(trainer);
    if (!status)
        trainer->model->lighten = gpt_lighten_of(level);
    return status;
}

const rebatch_step_ops *gpt_trainer_ops(void)
{
    static const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                         .zero_grad = zero_grad,
                                         .forward_backward = forward_backward,
                                         .optimizer_step = gpt_update_run,
                                         .reduce = gpt_shards_reduce,
                                         .lighten = lighten,
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

rebatch_status gpt_trainer_step(struct gpt_trainer *trainer, rebatch_step_report *report,
                                struct gpt_step_result *result)
{
    const struct gpt_train_options *options = &trainer->options;
    rebatch_status status = make_loss_room(trainer);
    if (status)
        return status;
    const float rate = gpt_learning_rate(options, trainer->updates);
    const float scale = trainer->has_scaler ? trainer->scaler.scale : 0.0f;
    const uint64_t skipped = trainer->skipped;
    status = rebatch_step(trainer->rb, gpt_trainer_ops(), gpt_rank_batch(trainer), trainer, report);
    if (status)
        return status;
    struct gpt_scalars scalars;
    status = gpt_read_back(trainer, &scalars, trainer->scalars, sizeof scalars);
    if (status)
        return status;
    const double tokens = (double)options->batch * (double)options->config.length;
    const double loss = scalars.loss_sum / tokens;
    trainer->losses[trainer->loss_count++] = loss;
    if (result)
        *result = (struct gpt_step_result){.loss = loss,
                                           .gradient_norm = scalars.norm_and_scale[0],
                                           .learning_rate = rate,
                                           .loss_scale = scale,
                                           .skipped = trainer->skipped != skipped};
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
            status = gpt_read_back(trainer, room, set->blocks[i], bytes);
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
    const struct gpt_set *moments = gpt_moments_of(trainer);
    const struct gpt_set *sets[] = {&trainer->model->parameters, &moments[0], &moments[1]};
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
    if (trainer->has_scaler) {
        gpt_hash_add(&hash, &trainer->scaler.scale, sizeof trainer->scaler.scale);
        gpt_hash_add(&hash, &trainer->scaler.good, sizeof trainer->scaler.good);
    }
    gpt_hash_end(&hash, text);
    return REBATCH_OK;
}

/* ---- evaluation ---- */

/* Puts held-out samples [first, first + count) on the device. The caller frees *out. */
static rebatch_status upload(int32_t **out, struct gpt_trainer *trainer, size_t first, size_t count)
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
        gpt_data_sample(trainer->staging + i * (length + 1), trainer->data, GPT_HELD_OUT,
                        trainer->options.seed, 0, first + i, length);
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

/* Adds the losses of one chunk of held-out samples. Leaves what it allocated to the caller's
 * scope. */
static rebatch_status evaluate_chunk(struct gpt_trainer *trainer, size_t first, size_t count)
{
    struct gpt_model *model = trainer->model;
    struct gpt_samples samples = {.first = first, .count = count};
    struct gpt_activations activations;
    int32_t *tokens = NULL;
    rebatch_status status = upload(&tokens, trainer, first, count);
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
        status = gpt_read_back(trainer, &sum, &trainer->scalars->evaluation_sum, sizeof sum);
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

static rebatch_status open_feed(struct gpt_trainer *trainer)
{
    const struct gpt_model *model = trainer->model;
    trainer->feed = (struct gpt_feed){.pool = model->pool,
                                      .work = model->queue.stream,
                                      .data = trainer->data,
                                      .seed = trainer->options.seed,
                                      .first = gpt_rank_first(trainer),
                                      .batch = gpt_rank_batch(trainer),
                                      .length = model->config.length};
    return gpt_feed_open(&trainer->feed, model->tags[GPT_TAG_DATA]);
}

/* The count, and the pointers to memory that callbacks make when they first need it. */
static rebatch_status guard_state(struct gpt_trainer *trainer)
{
    rebatch *rb = trainer->rb;
    rebatch_status status =
        rebatch_guard(rb, &trainer->samples_seen, sizeof trainer->samples_seen, REBATCH_GUARD_HOST);
    if (!status)
        status =
            rebatch_guard(rb, &trainer->gradients, sizeof trainer->gradients, REBATCH_GUARD_HOST);
    if (!status)
        status = rebatch_guard(rb, &trainer->moments, sizeof trainer->moments, REBATCH_GUARD_HOST);
    return status;
}

/* What a check compares: the results of a step. */
static rebatch_status watch_results(struct gpt_trainer *trainer)
{
    const struct gpt_config *config = &trainer->model->config;
    const size_t blocks = gpt_block_count(config) + 1;
    rebatch_status status =
        rebatch_watch(trainer->rb, "loss", &trainer->scalars->loss_sum,
                      sizeof trainer->scalars->loss_sum, REBATCH_GUARD_DEVICE, REBATCH_F64);
    for (size_t i = 0; i < blocks && !status; i++) {
        char name[64];
        (void)snprintf(name, sizeof name, "gradients, block %zu", i);
        status = rebatch_watch_at(trainer->rb, name, &trainer->gradients.blocks[i],
                                  gpt_block_elements(config, i) * sizeof(float), REBATCH_F32);
    }
    return status;
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
    trainer->has_scaler = options->loss_scale > 0.0f || options->config.dtype == GPT_FP16;
    trainer->scaler.scale = options->loss_scale > 0.0f ? options->loss_scale : GPT_SCALER_FIRST;
    trainer->rb = rb;
    trainer->data = data;
    status = gpt_model_create(&trainer->model, &options->config, ops, rebatch_get_pool(rb), stream,
                              options->seed);
    if (!status)
        status = take_scalars(trainer);
    if (!status)
        status = gpt_shards_open(trainer);
    if (!status)
        status = open_feed(trainer);
    if (!status)
        status = guard_state(trainer);
    if (!status)
        status = watch_results(trainer);
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
        gpt_moments_destroy(trainer);
        gpt_shards_close(trainer);
        if (trainer->feed.pool)
            gpt_feed_close(&trainer->feed);
        (void)rebatch_pool_free(trainer->model->pool, trainer->scalars);
    }
    gpt_model_destroy(trainer->model);
    free(trainer->losses);
    free(trainer->staging);
    free(trainer);
}
