/* Owns the update: the loss scale, the norm of the gradients, AdamW, and the learning rate.
 * Must not know how batches are cut, nor where the moments are. */
#include "gpt/update.h"

#include <math.h>
#include <string.h>

/* ---- the rate ---- */

float gpt_learning_rate(const struct gpt_train_options *options, uint64_t update)
{
    const double high = (double)options->learning_rate, low = (double)options->least_learning_rate;
    const double warm = (double)options->warmup_steps, total = (double)options->total_steps;
    const double at = (double)update;
    if (at < warm)
        return (float)(high * (at + 1.0) / warm);
    if (at >= total)
        return (float)low;
    const double pi = 3.14159265358979323846;
    return (float)(low + (high - low) * 0.5 * (1.0 + cos(pi * (at - warm) / (total - warm))));
}

/* ---- memory ---- */

rebatch_status gpt_read_back(struct gpt_trainer *trainer, void *to, const void *from, size_t bytes)
{
    const struct gpt_queue *queue = &trainer->model->queue;
    const rebatch_status status = rebatch_copy(queue->device, to, from, bytes, queue->stream);
    return status ? status : rebatch_stream_synchronize(queue->device, queue->stream);
}

/* ---- the update ---- */

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

/* What gradients still have to be multiplied with: NULL when there is no loss scale. */
static const float *inverse_of(const struct gpt_trainer *trainer)
{
    return trainer->has_scaler ? &trainer->scalars->inverse : NULL;
}

/* Looks for gradients that overflowed, which only a loss scale brings about. Waits for the device.
 */
static rebatch_status check_gradients(bool *is_finite, struct gpt_trainer *trainer)
{
    struct gpt_model *model = trainer->model;
    struct gpt_scalars *scalars = trainer->scalars;
    const struct gpt_queue *queue = &model->queue;
    uint32_t is_not_finite = 0;
    *is_finite = true;
    if (!trainer->has_scaler)
        return REBATCH_OK;
    trainer->inverse = gpt_scaler_inverse(&trainer->scaler);
    rebatch_status status = rebatch_copy(queue->device, &scalars->inverse, &trainer->inverse,
                                         sizeof trainer->inverse, queue->stream);
    if (!status)
        status = rebatch_fill(queue->device, &scalars->is_not_finite, 0,
                              sizeof scalars->is_not_finite, queue->stream);
    for (size_t i = 0; i < gpt_block_count(&model->config) && !status; i++)
        status =
            model->ops->check_finite(queue, &scalars->is_not_finite, trainer->gradients.blocks[i],
                                     gpt_block_elements(&model->config, i));
    if (!status)
        status =
            gpt_read_back(trainer, &is_not_finite, &scalars->is_not_finite, sizeof is_not_finite);
    *is_finite = is_not_finite == 0;
    return status;
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
                           (size_t)(at - partials), trainer->options.clip, inverse_of(trainer));
}

static rebatch_status update_tensors(struct gpt_trainer *trainer, const struct gpt_set moments[2])
{
    struct gpt_model *model = trainer->model;
    const struct gpt_train_options *options = &trainer->options;
    struct gpt_adamw settings = {.learning_rate = gpt_learning_rate(options, trainer->updates),
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
            .inverse = inverse_of(trainer),
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
        moments[i] = gpt_moments_of(trainer)[i];
        if (moments[i].count > 0)
            continue;
        status =
            gpt_set_create(&moments[i], model, gpt_block_count(&model->config), GPT_TAG_MOMENTS);
        if (!status)
            status = gpt_set_zero(&moments[i], model);
    }
    return status;
}

rebatch_status gpt_update_run(void *user)
{
    struct gpt_trainer *trainer = user;
    struct gpt_model *model = trainer->model;
    const struct gpt_config *config = &model->config;
    struct gpt_set moments[2];
    void *partials;
    bool is_finite = true;
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
        status = check_gradients(&is_finite, trainer);
    if (!status)
        status = find_norm(trainer, partials);
    if (!status && is_finite)
        status = update_tensors(trainer, moments);
    if (!status)
        status = rebatch_pool_free(model->pool, partials);
    if (status)
        return status;
    if (trainer->pinned[0].count == 0)
        memcpy(trainer->moments, moments, sizeof moments);
    trainer->updates += is_finite;
    trainer->skipped += !is_finite;
    if (trainer->has_scaler)
        gpt_scaler_update(&trainer->scaler, is_finite);
    return REBATCH_OK;
}
