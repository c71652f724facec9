/* A GPT-2-class transformer on bytes: token and position embedding, layers of causal attention and
 * a two-layer perceptron with GELU, each behind a layer norm and inside a residual, a final norm,
 * and the token embedding once more as the head. All its memory comes from a pool. Must not know
 * how it is trained. */
#ifndef GPT_MODEL_H
#define GPT_MODEL_H

#include "gpt/ops.h"
#include "rebatch/pool.h"

#define GPT_LAYERS_MOST 64

/* Sizes, and what is computed in. channels and vocabulary are multiples of 64. */
struct gpt_config {
    size_t layers, channels, heads;
    size_t length;        /* T: tokens of a sample, its last target not counted */
    size_t vocabulary;    /* at least 256: a byte is a token */
    float dropout;        /* of the embedding and of each residual branch; 0 to less than 1 */
    enum gpt_dtype dtype; /* of activations and of the weights that they meet */
    bool inexact;         /* gpt_queue.inexact: faster, and the cut changes bits */
};

/* X(name, layers, channels, heads, length, vocabulary, dropout). Those of GPT-2's sizes have its
 * vocabulary, rounded up to a multiple of 64, though a token is a byte here: so that a step costs
 * what it costs there. */
#define GPT_PRESETS(X)                                                                             \
    X("tiny", 2, 64, 2, 32, 256, 0.1f)                                                             \
    X("ci", 2, 64, 2, 64, 256, 0.1f)                                                               \
    X("demo", 3, 128, 4, 64, 256, 0.1f)                                                            \
    X("gpt2-124m", 12, 768, 12, 1024, 50304, 0.0f)                                                 \
    X("gpt2-350m", 24, 1024, 16, 1024, 50304, 0.0f)                                                \
    X("gpt2-774m", 36, 1280, 20, 1024, 50304, 0.0f)

/* Computes in fp32, exactly, unless that is changed.
 * @return REBATCH_E_INVALID for a name that is none. */
rebatch_status gpt_config_preset(struct gpt_config *out, const char *name);
/* @return REBATCH_E_INVALID with the first value that is wrong. */
rebatch_status gpt_config_check(const struct gpt_config *config);

/* ---- parameters ---- */

/* How a tensor begins: X(name). Normal numbers have the deviation 0.02; those that end a residual
 * branch are divided by sqrt(2 layers), so that the residual stream does not grow with depth. */
enum gpt_initial { GPT_ZEROS, GPT_ONES, GPT_NORMAL, GPT_NORMAL_RESIDUAL };

/* Once: X(name, rows, columns, initial) with C channels, T length, V vocabulary. */
#define GPT_OUTER_TENSORS(X)                                                                       \
    X(TOKENS, V, C, GPT_NORMAL)                                                                    \
    X(POSITIONS, T, C, GPT_NORMAL)                                                                 \
    X(FINAL_GAMMA, 1, C, GPT_ONES)                                                                 \
    X(FINAL_BETA, 1, C, GPT_ZEROS)

/* And in each layer. Weights are [inputs][outputs]. */
#define GPT_LAYER_TENSORS(X)                                                                       \
    X(NORM1_GAMMA, 1, C, GPT_ONES)                                                                 \
    X(NORM1_BETA, 1, C, GPT_ZEROS)                                                                 \
    X(QKV_WEIGHT, C, 3 * C, GPT_NORMAL)                                                            \
    X(QKV_BIAS, 1, 3 * C, GPT_ZEROS)                                                               \
    X(PROJECT_WEIGHT, C, C, GPT_NORMAL_RESIDUAL)                                                   \
    X(PROJECT_BIAS, 1, C, GPT_ZEROS)                                                               \
    X(NORM2_GAMMA, 1, C, GPT_ONES)                                                                 \
    X(NORM2_BETA, 1, C, GPT_ZEROS)                                                                 \
    X(WIDEN_WEIGHT, C, 4 * C, GPT_NORMAL)                                                          \
    X(WIDEN_BIAS, 1, 4 * C, GPT_ZEROS)                                                             \
    X(NARROW_WEIGHT, 4 * C, C, GPT_NORMAL_RESIDUAL)                                                \
    X(NARROW_BIAS, 1, C, GPT_ZEROS)

enum gpt_outer_tensor {
#define GPT_NAME_(name, rows, columns, initial) GPT_##name,
    GPT_OUTER_TENSORS(GPT_NAME_) GPT_OUTER_COUNT
};
enum gpt_layer_tensor { GPT_LAYER_TENSORS(GPT_NAME_) GPT_LAYER_COUNT };
#undef GPT_NAME_

/* One tensor: number `index` of gpt_tensor_count(), the outer ones first. */
struct gpt_tensor {
    const char *name;
    size_t block, offset; /* where it lies in a set */
    size_t rows, columns; /* 1 row: a vector, which weight decay leaves alone */
    enum gpt_initial initial;
};

size_t gpt_tensor_count(const struct gpt_config *config);
struct gpt_tensor gpt_tensor_at(const struct gpt_config *config, size_t index);

/* One fp32 value a parameter, in device memory: the parameters themselves, their gradients, or a
 * moment. Block 0 holds the outer tensors, block 1 + l layer l. Gradients have one block more, of
 * [vocabulary][channels]: the head's gradient of the token embedding. It has accumulators of its
 * own, because the head's sums and the embedding's would else mix in an order that depends on how
 * the batch is cut. */
struct gpt_set {
    float *blocks[GPT_LAYERS_MOST + 2];
    size_t count; /* of blocks; 0: the set is empty */
};

size_t gpt_block_count(const struct gpt_config *config); /* without the head's gradient */
size_t gpt_block_elements(const struct gpt_config *config, size_t block);

/* ---- the model ---- */

/* Who holds what in the pool's statistics: X(name, text). */
#define GPT_TAGS(X)                                                                                \
    X(PARAMETERS, "parameters")                                                                    \
    X(WORKING, "working weights")                                                                  \
    X(GRADIENTS, "gradients")                                                                      \
    X(MOMENTS, "moments")                                                                          \
    X(ACTIVATIONS, "activations")                                                                  \
    X(BACKWARD, "backward")                                                                        \
    X(UPDATE, "update")                                                                            \
    X(DATA, "data")

enum gpt_tag {
#define GPT_TAG_(name, text) GPT_TAG_##name,
    GPT_TAGS(GPT_TAG_)
#undef GPT_TAG_
        GPT_TAG_COUNT
};

/* How much memory a pass saves at the price of time: at each level it computes more of a layer's
 * activations a second time in the backward pass, by the same operations on the same values, so
 * that no bit changes. */
enum gpt_lighten {
    GPT_KEEP_ALL,         /* of them, until their layer's backward pass */
    GPT_RECOMPUTE_CHEAP,  /* layer norms and GELU again */
    GPT_RECOMPUTE_LAYERS, /* all of a layer again, from the residual stream before it */
    GPT_LIGHTEN_LEVELS
};

struct gpt_model {
    struct gpt_config config;
    const struct gpt_ops *ops;
    struct gpt_queue queue;
    rebatch_pool *pool;
    rebatch_tag tags[GPT_TAG_COUNT];
    struct gpt_set parameters;          /* fp32, which updates change */
    void *working[GPT_LAYERS_MOST + 1]; /* the same rounded to config.dtype; NULLs in fp32 */
    uint64_t seed;                      /* of the initial weights and of dropout */
    enum gpt_lighten lighten;           /* of the next forward pass in training */
};

/* Makes the model and its initial weights, which are a function of `seed` and the sizes alone.
 *  @param[out] out  owned by the caller, release with gpt_model_destroy(); NULL on failure
 *  @param config    copied
 *  @param ops       borrowed
 *  @param pool      borrowed; must outlive the model
 *  @return REBATCH_OK, REBATCH_OOM, REBATCH_E_INVALID, REBATCH_E_HOST_OOM, or a device's */
rebatch_status gpt_model_create(struct gpt_model **out, const struct gpt_config *config,
                                const struct gpt_ops *ops, rebatch_pool *pool,
                                rebatch_stream stream, uint64_t seed);
/* NULL is allowed. */
void gpt_model_destroy(struct gpt_model *model);

/* Takes memory for all of a set ahead, in one piece: that takes a GPU less time than block by
 * block. What is in use once the activations are free needs none. */
rebatch_status gpt_set_reserve(const struct gpt_model *model, size_t blocks);
/* Allocates every block of a set, or none: then the set stays as it was.
 *  @param blocks  gpt_block_count(), or one more with the head's gradient */
rebatch_status gpt_set_create(struct gpt_set *out, struct gpt_model *model, size_t blocks,
                              enum gpt_tag tag);
/* Empties the set. */
void gpt_set_destroy(struct gpt_set *set, struct gpt_model *model);
rebatch_status gpt_set_zero(const struct gpt_set *set, struct gpt_model *model);

/* Where a tensor lies in a set. */
float *gpt_outer(const struct gpt_model *model, const struct gpt_set *set,
                 enum gpt_outer_tensor tensor);
float *gpt_layer(const struct gpt_model *model, const struct gpt_set *set, size_t layer,
                 enum gpt_layer_tensor tensor);

/* What operations read of a tensor, in elements: its rounded copy, or in fp32 the tensor itself. */
const void *gpt_outer_weight(const struct gpt_model *model, enum gpt_outer_tensor tensor);
const void *gpt_layer_weight(const struct gpt_model *model, size_t layer,
                             enum gpt_layer_tensor tensor);
/* Brings the rounded copies up to date when the parameters were written to otherwise. */
rebatch_status gpt_model_refresh(struct gpt_model *model);
/* The rounded copy that an update of the tensor has to bring up to date; NULL in fp32. */
void *gpt_working_of(const struct gpt_model *model, const struct gpt_tensor *tensor);

/* ---- forward and backward (pass.c) ---- */

/* What a layer's forward pass computes: X(name, elements a row, their bytes, first level at which
 * it is not kept) with C channels, H heads, E bytes of an element. */
#define GPT_LAYER_ACTIVATIONS(X)                                                                   \
    X(NORM1, C, E, GPT_RECOMPUTE_CHEAP)                                                            \
    X(MEAN1, 1, sizeof(float), GPT_RECOMPUTE_LAYERS)                                               \
    X(RSTD1, 1, sizeof(float), GPT_RECOMPUTE_LAYERS)                                               \
    X(QKV, 3 * C, E, GPT_RECOMPUTE_LAYERS)                                                         \
    X(LOG_SUMS, H, sizeof(float), GPT_RECOMPUTE_LAYERS)                                            \
    X(ATTENTION, C, E, GPT_RECOMPUTE_LAYERS)                                                       \
    X(MIDDLE, C, E, GPT_RECOMPUTE_LAYERS) /* the residual stream between the two branches */       \
    X(NORM2, C, E, GPT_RECOMPUTE_CHEAP)                                                            \
    X(MEAN2, 1, sizeof(float), GPT_RECOMPUTE_LAYERS)                                               \
    X(RSTD2, 1, sizeof(float), GPT_RECOMPUTE_LAYERS)                                               \
    X(WIDE, 4 * C, E, GPT_RECOMPUTE_LAYERS)                                                        \
    X(GELU, 4 * C, E, GPT_RECOMPUTE_CHEAP)                                                         \
    X(END, C, E, GPT_LIGHTEN_LEVELS) /* the residual stream behind the layer */

enum gpt_layer_activation {
#define GPT_NAME_(name, elements, bytes, level) GPT_ACT_##name,
    GPT_LAYER_ACTIVATIONS(GPT_NAME_)
#undef GPT_NAME_
        GPT_ACT_COUNT
};

/* Samples of an effective batch. */
struct gpt_samples {
    const int32_t *tokens; /* device memory [count][length + 1] */
    size_t first, count;   /* indices in the effective batch: dropout depends on them */
    uint64_t step;
    bool training; /* with dropout, and keeping what backward needs */
};

/* Between forward and backward. Rows of channels unless said otherwise. */
struct gpt_activations {
    enum gpt_lighten lighten; /* of the forward pass */
    void *embedded;
    void *layers[GPT_LAYERS_MOST][GPT_ACT_COUNT]; /* what is not kept lies in `shared` */
    void *shared[GPT_ACT_COUNT];                  /* of the layer that was computed last */
    void *final_norm;
    void *final_mean, *final_rstd; /* float [rows] */
    void *logits;                  /* [rows][vocabulary]; in training: their gradient */
    void *losses;                  /* float [rows] */
};

/* Runs the samples up to their losses. Allocates from the model's pool and frees nothing on
 * failure: that is for the scope around it.
 *  @param[out] out    released by gpt_backward() or gpt_activations_free()
 *  @param row_weight  what a row's loss weighs in the gradient: 1 / tokens of the whole batch,
 *                     times the loss scale where there is one */
rebatch_status gpt_forward(struct gpt_activations *out, struct gpt_model *model,
                           const struct gpt_samples *samples, float row_weight);

/* What gpt_forward() allocates for a sample in training, and gpt_backward() after it. */
size_t gpt_sample_bytes(const struct gpt_config *config, enum gpt_lighten lighten);

/* What gpt_backward() allocates, each block rounded up as the pool does. */
size_t gpt_backward_bytes(const struct gpt_model *model, size_t samples);

/* Adds the samples' gradients, in sample order, and frees the activations as it goes; the same
 * about failure.
 *  @param gradients  with the head's block */
rebatch_status gpt_backward(struct gpt_activations *activations, struct gpt_model *model,
                            const struct gpt_samples *samples, const struct gpt_set *gradients);

void gpt_activations_free(struct gpt_activations *activations, struct gpt_model *model);

#endif
