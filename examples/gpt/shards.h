/* Gradients that are summed shard by shard. The effective batch is cut into K shards of as many
 * samples each, in order; the sums of a shard are one chain, and those of all shards are added in
 * one binary tree. So the bits depend on K, and neither on the number of ranks nor on the
 * micro-batches of each. Must not know how a micro-batch is computed. */
#ifndef GPT_SHARDS_H
#define GPT_SHARDS_H

#include "gpt/model.h"
#include "gpt/ranks.h"

struct gpt_trainer;

/* What this rank has of the shards. Its first shard is in the trainer's gradients and loss_sum. */
struct gpt_shards {
    size_t count;           /* of this rank; 1 without shards */
    size_t samples;         /* of a shard */
    struct gpt_set *others; /* [count - 1]; made by zero_grad, guarded */
    double *losses;         /* device memory [count - 1] */
    /* Memory of the largest block, for what is sent and received; NULL on one rank. Where ranks
     * swap memory of the device, `received` is that, and nothing is copied to be sent. */
    float *sent, *received;
};

/* First of this rank's samples in the effective batch, and their number. */
size_t gpt_rank_first(const struct gpt_trainer *trainer);
size_t gpt_rank_batch(const struct gpt_trainer *trainer);

/*  @return REBATCH_OK, REBATCH_OOM, REBATCH_E_HOST_OOM, or REBATCH_E_INVALID for a number of shards
 *          that does not divide the batch, or is no power of two and multiple of the ranks */
rebatch_status gpt_shards_open(struct gpt_trainer *trainer);
void gpt_shards_close(struct gpt_trainer *trainer);

/* Part of zero_grad: makes the sums of shards but the first, and sets them to zero. */
rebatch_status gpt_shards_zero(struct gpt_trainer *trainer);

/* Where samples of shard `shard` of this rank are summed. */
const struct gpt_set *gpt_shard_gradients(const struct gpt_trainer *trainer, size_t shard);
double *gpt_shard_loss(const struct gpt_trainer *trainer, size_t shard);

/* The callback reduce: afterwards the first shard has the sums of all, on all ranks. */
rebatch_status gpt_shards_reduce(bool is_abandoned, void *trainer);

#endif
