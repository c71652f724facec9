/* What the parts of a trainer share: small results on the device, memory that outlives a callback,
 * and the update. Must not know how micro-batches run. */
#ifndef GPT_UPDATE_H
#define GPT_UPDATE_H

#include "gpt/train.h"

/* Small results, in device memory. */
struct gpt_scalars {
    double loss_sum; /* of the step's samples so far; zeroed by zero_grad */
    double evaluation_sum;
    float norm_and_scale[2]; /* of the last update */
    float inverse;           /* 1 / loss scale */
    uint32_t is_not_finite;  /* something in the last gradients */
};

/* Brings device memory to the host, and waits for it. */
rebatch_status gpt_read_back(struct gpt_trainer *trainer, void *to, const void *from, size_t bytes);

/* What a level of the callback `lighten` means to the model. */
static inline enum gpt_lighten gpt_lighten_of(unsigned level)
{
    return level < GPT_LIGHTEN_LEVELS ? (enum gpt_lighten)level : GPT_RECOMPUTE_LAYERS;
}

/* ---- where the moments are (moments.c) ---- */

/* Both sets where they are now, empty when there are none yet. */
const struct gpt_set *gpt_moments_of(const struct gpt_trainer *trainer);
/* Moves them to pinned host memory, which kernels reach, or makes them there; REBATCH_OOM when
 * there is none. */
rebatch_status gpt_moments_pin(struct gpt_trainer *trainer);
/* And back. */
rebatch_status gpt_moments_unpin(struct gpt_trainer *trainer);
void gpt_moments_destroy(struct gpt_trainer *trainer);

/* ---- the update (update.c) ---- */

float gpt_learning_rate(const struct gpt_train_options *options, uint64_t update);
/* The callback optimizer_step. */
rebatch_status gpt_update_run(void *trainer);

#endif
