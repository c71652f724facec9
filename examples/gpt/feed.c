/* Owns the way of training samples to the device: pinned memory, and a stream of its own.
 * Must not know the model, nor how a batch is cut. */
#include "gpt/feed.h"

static size_t slot_bytes(const struct gpt_feed *feed)
{
    return feed->batch * (feed->length + 1) * sizeof(int32_t);
}

static struct gpt_feed_slot *slot_of(struct gpt_feed *feed, uint64_t step)
{
    return &feed->slots[step % 2];
}

static bool has(struct gpt_feed *feed, uint64_t step)
{
    const struct gpt_feed_slot *slot = slot_of(feed, step);
    return slot->is_full && slot->step == step;
}

rebatch_status gpt_feed_open(struct gpt_feed *out, rebatch_tag tag)
{
    rebatch_device *device = rebatch_pool_device(out->pool);
    rebatch_status status = rebatch_stream_create(&out->copies, device);
    for (size_t i = 0; i < 2 && !status; i++) {
        void *memory;
        status = rebatch_pinned_alloc(&memory, device, slot_bytes(out));
        out->slots[i].staging = memory;
        if (!status)
            status = rebatch_pool_alloc(&memory, out->pool, slot_bytes(out), out->work, tag);
        if (!status)
            out->slots[i].tokens = memory;
    }
    return status;
}

void gpt_feed_close(struct gpt_feed *feed)
{
    rebatch_device *device = rebatch_pool_device(feed->pool);
    rebatch_stream_destroy(device, feed->copies); /* when the copies have run */
    for (size_t i = 0; i < 2; i++) {
        (void)rebatch_pinned_free(device, feed->slots[i].staging, slot_bytes(feed));
        (void)rebatch_pool_free(feed->pool, feed->slots[i].tokens);
    }
}

/* Fills a slot that nothing reads any more. */
static rebatch_status fill(struct gpt_feed *feed, uint64_t step)
{
    struct gpt_feed_slot *slot = slot_of(feed, step);
    slot->is_full = false;
    for (size_t i = 0; i < feed->batch; i++)
        gpt_data_sample(slot->staging + i * (feed->length + 1), feed->data, GPT_TRAINING,
                        feed->seed, step, feed->first + i, feed->length);
    const rebatch_status status = rebatch_copy(rebatch_pool_device(feed->pool), slot->tokens,
                                               slot->staging, slot_bytes(feed), feed->copies);
    if (status)
        return status;
    slot->is_full = true;
    slot->step = step;
    return REBATCH_OK;
}

rebatch_status gpt_feed_take(const int32_t **tokens, struct gpt_feed *feed, uint64_t step)
{
    rebatch_device *device = rebatch_pool_device(feed->pool);
    rebatch_status status = REBATCH_OK;
    *tokens = slot_of(feed, step)->tokens;
    if (has(feed, step) && has(feed, step + 1))
        return REBATCH_OK; /* both were waited for, or will be */
    /* Once a step: what is overwritten from here on is read by nothing that still runs. */
    status = rebatch_stream_synchronize(device, feed->work);
    if (!status)
        status = rebatch_stream_synchronize(device, feed->copies);
    if (!status && !has(feed, step))
        status = fill(feed, step);
    return status ? status : rebatch_stream_synchronize(device, feed->copies);
}

rebatch_status gpt_feed_ahead(struct gpt_feed *feed, uint64_t step)
{
    return has(feed, step + 1) ? REBATCH_OK : fill(feed, step + 1);
}
