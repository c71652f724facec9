/* Owns the sums of shards, and their tree over all ranks.
 * Must not know how micro-batches are cut, nor how ranks are connected. */
#include "gpt/shards.h"

#include <stdlib.h>

#include "gpt/error.h"
#include "gpt/update.h"

static const rebatch_group *group_of(const struct gpt_trainer *trainer)
{
    return trainer->options.ranks ? &trainer->options.ranks->group : NULL;
}

static uint32_t size_of(const struct gpt_trainer *trainer)
{
    return group_of(trainer) ? group_of(trainer)->size : 1;
}

size_t gpt_rank_batch(const struct gpt_trainer *trainer)
{
    return trainer->options.batch / size_of(trainer);
}

size_t gpt_rank_first(const struct gpt_trainer *trainer)
{
    return group_of(trainer) ? group_of(trainer)->rank * gpt_rank_batch(trainer) : 0;
}

static size_t largest_block(const struct gpt_config *config)
{
    const size_t outer = gpt_block_elements(config, 0), layer = gpt_block_elements(config, 1);
    return outer > layer ? outer : layer;
}

/* ---- life ---- */

static rebatch_status check(const struct gpt_trainer *trainer)
{
    const size_t shards = trainer->options.shards, batch = trainer->options.batch;
    const size_t ranks = size_of(trainer);
    if (!group_of(trainer) || shards == 0)
        return !group_of(trainer) && shards == 0
                   ? REBATCH_OK
                   : gpt_error(REBATCH_E_INVALID, "shards is %zu: ranks and shards go together",
                               shards);
    if ((shards & (shards - 1)) || shards < ranks || batch % shards)
        return gpt_error(REBATCH_E_INVALID,
                         "shards is %zu: expected a power of two, at least the number of ranks, "
                         "%zu, that divides the batch, %zu",
                         shards, ranks, batch);
    return REBATCH_OK;
}

static bool is_on_device(const struct gpt_trainer *trainer)
{
    return trainer->options.ranks && trainer->options.ranks->is_on_device;
}

/* Made ahead: a rank that has failed takes part all the same. */
static rebatch_status open_buffers(struct gpt_trainer *trainer)
{
    struct gpt_shards *const s = &trainer->shards;
    struct gpt_model *const model = trainer->model;
    const size_t bytes = largest_block(&model->config) * sizeof(float);
    if (is_on_device(trainer)) {
        void *received = NULL;
        const rebatch_status status = rebatch_pool_alloc(
            &received, model->pool, bytes, model->queue.stream, model->tags[GPT_TAG_GRADIENTS]);
        s->received = received;
        return status;
    }
    s->sent = calloc(1, bytes);
    s->received = calloc(1, bytes);
    return s->sent && s->received
               ? REBATCH_OK
               : gpt_error(REBATCH_E_HOST_OOM, "no host memory for %zu bytes", 2 * bytes);
}

rebatch_status gpt_shards_open(struct gpt_trainer *trainer)
{
    struct gpt_shards *const s = &trainer->shards;
    struct gpt_model *const model = trainer->model;
    rebatch_status status = check(trainer);
    if (status)
        return status;
    s->count = trainer->options.shards ? trainer->options.shards / size_of(trainer) : 1;
    s->samples = gpt_rank_batch(trainer) / s->count;
    if (size_of(trainer) > 1)
        status = open_buffers(trainer);
    if (status)
        return status;
    if (s->count == 1)
        return REBATCH_OK;
    s->others = calloc(s->count - 1, sizeof *s->others);
    if (!s->others)
        return gpt_error(REBATCH_E_HOST_OOM, "no host memory for %zu shards", s->count);
    void *losses;
    status = rebatch_pool_alloc(&losses, model->pool, (s->count - 1) * sizeof(double),
                                model->queue.stream, model->tags[GPT_TAG_GRADIENTS]);
    if (status)
        return status;
    s->losses = losses;
    return rebatch_guard(trainer->rb, s->others, (s->count - 1) * sizeof *s->others,
                         REBATCH_GUARD_HOST);
}

void gpt_shards_close(struct gpt_trainer *trainer)
{
    struct gpt_shards *const s = &trainer->shards;
    for (size_t i = 0; s->others && i + 1 < s->count; i++)
        gpt_set_destroy(&s->others[i], trainer->model);
    if (s->losses)
        (void)rebatch_pool_free(trainer->model->pool, s->losses);
    free(s->others);
    free(s->sent);
    if (!is_on_device(trainer))
        free(s->received);
    else if (s->received)
        (void)rebatch_pool_free(trainer->model->pool, s->received);
}

/* ---- sums ---- */

const struct gpt_set *gpt_shard_gradients(const struct gpt_trainer *trainer, size_t shard)
{
    return shard == 0 ? &trainer->gradients : &trainer->shards.others[shard - 1];
}

double *gpt_shard_loss(const struct gpt_trainer *trainer, size_t shard)
{
    return shard == 0 ? &trainer->scalars->loss_sum : &trainer->shards.losses[shard - 1];
}

rebatch_status gpt_shards_zero(struct gpt_trainer *trainer)
{
    const struct gpt_shards *const s = &trainer->shards;
    struct gpt_model *const model = trainer->model;
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i + 1 < s->count && !status; i++) {
        if (s->others[i].count == 0)
            status = gpt_set_create(&s->others[i], model, gpt_block_count(&model->config) + 1,
                                    GPT_TAG_GRADIENTS);
        if (!status)
            status = gpt_set_zero(&s->others[i], model);
    }
    if (!status && s->losses)
        status = rebatch_fill(model->queue.device, s->losses, 0, (s->count - 1) * sizeof(double),
                              model->queue.stream);
    return status;
}

/* ---- the tree ---- */

/* The head's gradient has as many elements as the token embedding, which begins block 0. */
static size_t elements_of(const struct gpt_config *config, size_t block)
{
    return block < gpt_block_count(config) ? gpt_block_elements(config, block)
                                           : config->vocabulary * config->channels;
}

/* Adds this rank's shards: the sums of shard i are those of [i, i + width) before a level. */
static rebatch_status add_own(struct gpt_trainer *trainer, size_t block)
{
    const struct gpt_model *const model = trainer->model;
    const size_t count = trainer->shards.count, elements = elements_of(&model->config, block);
    rebatch_status status = REBATCH_OK;
    for (size_t width = 1; width < count; width *= 2)
        for (size_t i = 0; i + width < count && !status; i += 2 * width)
            status =
                model->ops->add(&model->queue, gpt_shard_gradients(trainer, i)->blocks[block],
                                gpt_shard_gradients(trainer, i + width)->blocks[block], elements);
    return status;
}

static rebatch_status swap(struct gpt_trainer *trainer, uint32_t width, const void *mine,
                           void *theirs, size_t bytes)
{
    const struct gpt_ranks *const ranks = trainer->options.ranks;
    return ranks->swap(ranks->group.rank ^ width, mine, theirs, bytes,
                       trainer->model->queue.stream);
}

/* Brings another rank's sums to device memory. A rank that has failed has no `sums`. */
static rebatch_status receive(struct gpt_trainer *trainer, uint32_t width, const float *sums,
                              float *incoming, size_t bytes)
{
    struct gpt_shards *const s = &trainer->shards;
    const struct gpt_queue *const queue = &trainer->model->queue;
    rebatch_status status = REBATCH_OK;
    if (is_on_device(trainer))
        return swap(trainer, width, sums ? sums : incoming, incoming, bytes);
    if (sums)
        status = gpt_read_back(trainer, s->sent, sums, bytes);
    if (!status)
        status = swap(trainer, width, s->sent, s->received, bytes);
    if (!status && sums)
        status = rebatch_copy(queue->device, incoming, s->received, bytes, queue->stream);
    return status;
}

/* Each rank of a pair has the sums of half a subtree and gets the other half. a + b has the bits of
 * b + a, so both have those of the subtree. */
static rebatch_status add_others(struct gpt_trainer *trainer, size_t block, bool is_abandoned,
                                 float *incoming)
{
    const struct gpt_model *const model = trainer->model;
    const size_t elements = elements_of(&model->config, block), bytes = elements * sizeof(float);
    float *const sums = is_abandoned ? NULL : trainer->gradients.blocks[block];
    rebatch_status status = REBATCH_OK;
    for (uint32_t width = 1; width < size_of(trainer) && !status; width *= 2) {
        status = receive(trainer, width, sums, incoming, bytes);
        if (!status && sums)
            status = model->ops->add(&model->queue, sums, incoming, elements);
    }
    return status;
}

static rebatch_status add_own_losses(double *out, struct gpt_trainer *trainer)
{
    const size_t count = trainer->shards.count;
    double *const sums = calloc(count, sizeof *sums);
    if (!sums)
        return gpt_error(REBATCH_E_HOST_OOM, "no host memory for %zu losses", count);
    rebatch_status status = gpt_read_back(trainer, sums, gpt_shard_loss(trainer, 0), sizeof *sums);
    if (!status && count > 1)
        status =
            gpt_read_back(trainer, sums + 1, trainer->shards.losses, (count - 1) * sizeof *sums);
    for (size_t width = 1; width < count; width *= 2)
        for (size_t i = 0; i + width < count; i += 2 * width)
            sums[i] += sums[i + width];
    *out = sums[0];
    free(sums);
    return status;
}

/* One number goes from host to host. */
static rebatch_status swap_number(struct gpt_trainer *trainer, uint32_t width, double mine,
                                  double *theirs)
{
    const struct gpt_queue *const queue = &trainer->model->queue;
    if (!is_on_device(trainer))
        return swap(trainer, width, &mine, theirs, sizeof mine);
    double *const place = (double *)(void *)trainer->shards.received;
    rebatch_status status = rebatch_copy(queue->device, place, &mine, sizeof mine, queue->stream);
    if (!status)
        status = swap(trainer, width, place, place + 1, sizeof mine);
    return status ? status : gpt_read_back(trainer, theirs, place + 1, sizeof mine);
}

static rebatch_status add_losses(struct gpt_trainer *trainer, double sum)
{
    const struct gpt_queue *const queue = &trainer->model->queue;
    rebatch_status status = REBATCH_OK;
    for (uint32_t width = 1; width < size_of(trainer) && !status; width *= 2) {
        double other = 0.0;
        status = swap_number(trainer, width, sum, &other);
        sum += other;
    }
    if (status)
        return status;
    status =
        rebatch_copy(queue->device, &trainer->scalars->loss_sum, &sum, sizeof sum, queue->stream);
    return status ? status : rebatch_stream_synchronize(queue->device, queue->stream);
}

/* What can fail for want of memory comes before the first message. */
rebatch_status gpt_shards_reduce(bool is_abandoned, void *user)
{
    struct gpt_trainer *const trainer = user;
    const struct gpt_model *const model = trainer->model;
    const size_t bytes = largest_block(&model->config) * sizeof(float);
    const bool has_own = is_on_device(trainer);
    void *incoming = has_own ? trainer->shards.received : NULL;
    double loss = 0.0;
    rebatch_status status = REBATCH_OK;
    if (!is_abandoned && !has_own && size_of(trainer) > 1)
        status = rebatch_pool_alloc(&incoming, model->pool, bytes, model->queue.stream,
                                    model->tags[GPT_TAG_UPDATE]);
    if (!status && !is_abandoned)
        status = add_own_losses(&loss, trainer);
    for (size_t block = 0; block < gpt_block_count(&model->config) + 1 && !status; block++) {
        if (!is_abandoned)
            status = add_own(trainer, block);
        if (!status)
            status = add_others(trainer, block, is_abandoned, incoming);
    }
    if (!status)
        status = add_losses(trainer, loss);
    return status || has_own || !incoming ? status : rebatch_pool_free(model->pool, incoming);
}
