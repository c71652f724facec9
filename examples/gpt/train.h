/* Training the model under rebatch: the three callbacks, AdamW, the loss, evaluation. Must not know
 * how a device computes. */
#ifndef GPT_TRAIN_H
#define GPT_TRAIN_H

#include "gpt/data.h"
#include "gpt/feed.h"
#include "gpt/hash.h"
#include "gpt/model.h"
#include "gpt/scaler.h"
#include "gpt/shards.h"
#include "rebatch/check.h"
#include "rebatch/step.h"

/* What a training run is a function of, besides the text. */
struct gpt_train_options {
    struct gpt_config config;
    size_t batch;        /* samples of an update, on all ranks; at least 1 */
    uint64_t seed;       /* of weights, dropout and samples */
    float learning_rate; /* at its highest */
    float least_learning_rate;
    size_t warmup_steps; /* the rate rises over these */
    size_t total_steps;  /* and falls as a cosine until here, then stays at its least */
    float beta1, beta2, epsilon;
    float weight_decay;            /* of matrices */
    float clip;                    /* most that the gradients' norm may be; 0: no clipping */
    float loss_scale;              /* at first; 0: GPT_SCALER_FIRST in fp16, and no scaling else */
    size_t shards;                 /* of the gradients' sums; 0: one chain over the batch */
    const struct gpt_ranks *ranks; /* borrowed; the session's group. With shards alone */
};

/* Defaults for a preset's sizes: a batch of 64, 40 steps.
 *  @return REBATCH_E_INVALID for a preset that is none */
rebatch_status gpt_train_options_init(struct gpt_train_options *out, const char *preset);

/* One run. Its fields are for reading. */
struct gpt_trainer {
    struct gpt_train_options options;
    rebatch *rb;                 /* borrowed */
    const struct gpt_data *data; /* borrowed */
    struct gpt_model *model;
    struct gpt_set gradients;    /* from the first zero_grad on */
    struct gpt_set moments[2];   /* from the first optimizer_step on, unless they are pinned */
    struct gpt_set pinned[2];    /* moments in host memory */
    struct gpt_scalars *scalars; /* device memory */
    uint64_t updates;            /* applied */
    uint64_t skipped;            /* because gradients were not finite */
    bool has_scaler;
    struct gpt_scaler scaler; /* changed by a whole update alone */
    float inverse;            /* 1 / its scale, on its way to the device */
    uint64_t samples_seen;    /* that went into updates: guarded, so that repeats do not count */
    double *losses;           /* of each step so far */
    size_t loss_count, loss_room;
    struct gpt_feed feed; /* samples to train on */
    struct gpt_shards shards;
    int32_t *staging; /* held-out samples on their way to the device */
    size_t staging_room;
};

/* @param[out] out   owned by the caller, release with gpt_trainer_destroy() before the session is
 *                   closed; NULL on failure
 *  @param rb        borrowed; a session serves one trainer, which guards state in it
 *  @param ops       for the session's device; borrowed
 *  @param stream    the session's
 *  @param data      borrowed
 *  @param options   copied
 *  @return REBATCH_OK, REBATCH_OOM (not even the parameters fit), REBATCH_E_INVALID,
 *          REBATCH_E_HOST_OOM, or what the device says */
rebatch_status gpt_trainer_create(struct gpt_trainer **out, rebatch *rb, const struct gpt_ops *ops,
                                  rebatch_stream stream, const struct gpt_data *data,
                                  const struct gpt_train_options *options);
/* NULL is allowed. */
void gpt_trainer_destroy(struct gpt_trainer *trainer);

/* The highest level of `lighten`: those of enum gpt_lighten, and then AdamW's moments in pinned
 * host memory as well. No level changes a bit. */
#define GPT_LIGHTEN_MOST 3

/* The callbacks, for rebatch_step(); the user pointer is the trainer, whose batch the effective
 * batch has to be. */
const rebatch_step_ops *gpt_trainer_ops(void);

/* Without shards, what a step holds at most, from the second on: persistent_bytes + micro-batch *
 * sample_bytes, and less than REBATCH_POOL_UNIT_BYTES more for each block of a micro-batch. It is
 * the pool's: a GPU's libraries and code take more. */
struct gpt_memory {
    uint64_t persistent_bytes; /* weights, gradients, moments, tokens */
    uint64_t sample_bytes;     /* activations and their gradients */
};
struct gpt_memory gpt_train_memory(const struct gpt_train_options *options, unsigned lighten);

/* What a step came to. */
struct gpt_step_result {
    double loss;         /* mean over the batch's tokens, before the update */
    float gradient_norm; /* without the loss scale */
    float learning_rate;
    float loss_scale; /* with which it ran; 0: none */
    bool skipped;     /* the update: gradients were not finite. The learning rate stays where it is,
                         and so does AdamW's count of updates */
};

/* One rebatch_step(), and its loss added to the list.
 *  @param report  may be NULL
 *  @param result  may be NULL
 *  @return as rebatch_step() */
rebatch_status gpt_trainer_step(struct gpt_trainer *trainer, rebatch_step_report *report,
                                struct gpt_step_result *result);

/* SHA-256 over weights, both moments (zeros before the first update), every loss, and the state of
 * the loss scaler if there is one. */
rebatch_status gpt_trainer_hash(struct gpt_trainer *trainer, char text[GPT_HASH_TEXT_BYTES]);

/* Mean loss of `samples` held-out samples, without gradients or dropout, in chunks that fit: an OOM
 * halves the chunk. Which samples they are depends on the seed alone. Not from within a callback.
 *  @param[out] loss  not a function of the chunks, to the bit
 *  @return REBATCH_OK; REBATCH_OOM when not even one sample fits; REBATCH_E_INVALID for none */
rebatch_status gpt_trainer_evaluate(struct gpt_trainer *trainer, size_t samples, double *loss);

#endif
