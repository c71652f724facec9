/* Tokens of training samples on their way to the device, an effective batch ahead of the work that
 * reads them. Must not know the model, nor how a batch is cut. */
#ifndef GPT_FEED_H
#define GPT_FEED_H

#include "gpt/data.h"
#include "rebatch/pool.h"

/* One effective batch. */
struct gpt_feed_slot {
    int32_t *staging; /* pinned host memory [batch][length + 1] */
    int32_t *tokens;  /* the same in device memory */
    bool is_full;     /* with the batch of `step`; the copy may still be on its way */
    uint64_t step;
};

struct gpt_feed {
    rebatch_pool *pool;
    rebatch_stream work;   /* of what reads tokens */
    rebatch_stream copies; /* beside it */
    const struct gpt_data *data;
    uint64_t seed;
    size_t first, batch, length;   /* samples [first, first + batch) of each effective batch */
    struct gpt_feed_slot slots[2]; /* steps with an even number, and with an odd one */
};

/* Takes memory for two effective batches, on the device and pinned on the host.
 *  @param out    fields other than the slots and `copies` are set; closed with gpt_feed_close(),
 *                also after a failure
 *  @param tag    of the pool, for who holds what
 *  @return REBATCH_OK, REBATCH_OOM, REBATCH_E_HOST_OOM, REBATCH_E_UNSUPPORTED, or a device's */
rebatch_status gpt_feed_open(struct gpt_feed *out, rebatch_tag tag);
void gpt_feed_close(struct gpt_feed *feed);

/* The tokens of a step, on the device when this returns, until the step after the next is asked
 * for. */
rebatch_status gpt_feed_take(const int32_t **tokens, struct gpt_feed *feed, uint64_t step);

/* Begins to bring those of the step after `step`, which was taken; does not wait. */
rebatch_status gpt_feed_ahead(struct gpt_feed *feed, uint64_t step);

#endif
