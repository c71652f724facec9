/* Owns where AdamW's moments are: in the pool, or in pinned host memory.
 * Must not know what they are used for. */
#include <string.h>

#include "gpt/error.h"
#include "gpt/update.h"

/* ---- sets in pinned memory ---- */

static size_t block_bytes(const struct gpt_trainer *trainer, size_t block)
{
    return gpt_block_elements(&trainer->model->config, block) * sizeof(float);
}

static void unpin_set(struct gpt_set *set, const struct gpt_trainer *trainer)
{
    for (size_t i = 0; i < set->count; i++)
        (void)rebatch_pinned_free(trainer->model->queue.device, set->blocks[i],
                                  block_bytes(trainer, i));
    *set = (struct gpt_set){0};
}

/* All blocks of a set, or none. */
static rebatch_status pin_set(struct gpt_set *out, const struct gpt_trainer *trainer)
{
    struct gpt_set set = {0};
    while (set.count < gpt_block_count(&trainer->model->config)) {
        void *memory;
        const rebatch_status status = rebatch_pinned_alloc(&memory, trainer->model->queue.device,
                                                           block_bytes(trainer, set.count));
        if (status) {
            unpin_set(&set, trainer);
            return status;
        }
        set.blocks[set.count++] = memory;
    }
    *out = set;
    return REBATCH_OK;
}

/* Copies both sets, or, from none, writes zeros; waits. */
static rebatch_status copy_sets(const struct gpt_set to[2], const struct gpt_set from[2],
                                const struct gpt_trainer *trainer)
{
    const struct gpt_queue *queue = &trainer->model->queue;
    rebatch_status status = REBATCH_OK;
    for (size_t set = 0; set < 2; set++)
        for (size_t i = 0; i < to[set].count && !status; i++)
            if (from[set].count > 0)
                status = rebatch_copy(queue->device, to[set].blocks[i], from[set].blocks[i],
                                      block_bytes(trainer, i), queue->stream);
            else
                memset(to[set].blocks[i], 0, block_bytes(trainer, i));
    return status ? status : rebatch_stream_synchronize(queue->device, queue->stream);
}

/* ---- moving ---- */

const struct gpt_set *gpt_moments_of(const struct gpt_trainer *trainer)
{
    return trainer->moments[0].count > 0 ? trainer->moments : trainer->pinned;
}

rebatch_status gpt_moments_pin(struct gpt_trainer *trainer)
{
    struct gpt_set pinned[2] = {{.count = 0}, {.count = 0}};
    if (trainer->pinned[0].count > 0)
        return REBATCH_OK;
    rebatch_status status = pin_set(&pinned[0], trainer);
    if (!status)
        status = pin_set(&pinned[1], trainer);
    if (!status)
        status = copy_sets(pinned, trainer->moments, trainer);
    if (status) {
        unpin_set(&pinned[0], trainer);
        unpin_set(&pinned[1], trainer);
        return status == REBATCH_E_HOST_OOM ? REBATCH_OOM : status;
    }
    memcpy(trainer->pinned, pinned, sizeof pinned);
    gpt_set_destroy(&trainer->moments[0], trainer->model);
    gpt_set_destroy(&trainer->moments[1], trainer->model);
    return REBATCH_OK;
}

rebatch_status gpt_moments_unpin(struct gpt_trainer *trainer)
{
    struct gpt_model *model = trainer->model;
    const size_t blocks = gpt_block_count(&model->config);
    struct gpt_set sets[2] = {{.count = 0}, {.count = 0}};
    if (trainer->pinned[0].count == 0)
        return REBATCH_OK;
    rebatch_status status = gpt_set_create(&sets[0], model, blocks, GPT_TAG_MOMENTS);
    if (!status)
        status = gpt_set_create(&sets[1], model, blocks, GPT_TAG_MOMENTS);
    if (!status)
        status = copy_sets(sets, trainer->pinned, trainer);
    if (status) {
        gpt_set_destroy(&sets[0], model);
        gpt_set_destroy(&sets[1], model);
        return status;
    }
    memcpy(trainer->moments, sets, sizeof sets);
    unpin_set(&trainer->pinned[0], trainer);
    unpin_set(&trainer->pinned[1], trainer);
    return REBATCH_OK;
}

void gpt_moments_destroy(struct gpt_trainer *trainer)
{
    const struct gpt_queue *queue = &trainer->model->queue;
    if (trainer->pinned[0].count > 0) /* an update may still use them */
        (void)rebatch_stream_synchronize(queue->device, queue->stream);
    for (size_t i = 0; i < 2; i++) {
        gpt_set_destroy(&trainer->moments[i], trainer->model);
        unpin_set(&trainer->pinned[i], trainer);
    }
}
