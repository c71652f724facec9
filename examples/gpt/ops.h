/* The operations that the model is made of, as one table a kind of device.
 *
 * An operation takes device memory and a queue, enqueues its work there and answers a status. It
 * allocates nothing. Rows are the tokens of a micro-batch, sample after sample: sample * T + t.
 *   "elements" (void *): activations, their gradients, and the weights that operations read, of the
 *                        queue's type; arithmetic on them is in fp32, and a result is rounded once
 *   float *, double *:   the weights that are updated, their gradients, statistics, losses: always
 *                        of that type
 *
 * Exactness, which each operation keeps and the comments below spell out:
 *   - what belongs to a row (or to a sample, in attention) depends on that row's (sample's) inputs
 *     alone, not on how many there are in the call or where in it they stand;
 *   - sums over rows are one chain an output element: it begins with the value that is there and
 *     adds the rows in ascending order, or, on a GPU, the sums of each sample's rows, which have an
 *     order of their own; so cutting the samples into several calls changes no bit.
 * Must not know the model, memory pools or training. */
#ifndef GPT_OPS_H
#define GPT_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "rebatch/device.h"

/* What elements are: X(NAME, name, bytes). */
#define GPT_DTYPES(X)                                                                              \
    X(FP32, "fp32", 4)                                                                             \
    X(BF16, "bf16", 2)                                                                             \
    X(FP16, "fp16", 2)

enum gpt_dtype {
#define GPT_DTYPE_(name, text, bytes) GPT_##name,
    GPT_DTYPES(GPT_DTYPE_)
#undef GPT_DTYPE_
        GPT_DTYPE_COUNT
};

/* 0 and NULL for a value that is none. */
size_t gpt_dtype_bytes(enum gpt_dtype dtype);
const char *gpt_dtype_name(enum gpt_dtype dtype);
/* @return REBATCH_E_INVALID for a name that is none */
rebatch_status gpt_dtype_parse(enum gpt_dtype *out, const char *name);

/* Where an operation's work goes. */
struct gpt_queue {
    rebatch_device *device;
    rebatch_stream stream;
    size_t sample_rows;   /* T: rows of a sample, for sums over rows; the host's do not need it */
    enum gpt_dtype dtype; /* what elements are */
    bool inexact;         /* gradients of weights may be sums over all rows of a call in any order:
                             faster, and the cut of the batch then changes bits */
    void *state;          /* what the table's open() made */
};

/* Sizes of the token ids and rows of a call: tokens are [count][length + 1], so that the target of
 * position t is the token at t + 1; a row is (sample, t). */
struct gpt_tokens {
    const int32_t *tokens; /* device memory */
    size_t count, length;
};

/* y = x W + b. Elements of W: [inputs][outputs], or, transposed, [outputs][inputs]. */
struct gpt_matmul {
    size_t rows, inputs, outputs;
    bool transposed;
};

/* The widest head that attention takes. */
#define GPT_HEAD_WIDTH_MOST 128

struct gpt_attention {
    size_t count, length, heads, width; /* samples, T, heads, channels of one head */
};

/* Which numbers decide what is dropped: Philox4x32-10 under the key `seed`, counter (element / 4,
 * first_sample + sample, site, step), word element % 4, where `element` counts from the beginning
 * of the sample. Dropped when the word is below probability * 2^32, else multiplied with
 * 1 / (1 - probability). The same in forward and backward: no mask is stored. */
struct gpt_dropout {
    float probability; /* 0: nothing is dropped and nothing scaled */
    uint64_t seed, step;
    uint32_t site;
    size_t first_sample; /* index of the call's first sample in the effective batch */
};

struct gpt_adamw {
    float learning_rate, beta1, beta2, epsilon, weight_decay;
    uint64_t update; /* number of this update, from 1 */
};

/* The arrays of one update, of `count` parameters: device memory, or pinned host memory that the
 * device reaches. */
struct gpt_adamw_arrays {
    float *weight, *first_moment, *second_moment;
    void *working; /* elements: the weight, rounded; NULL: none, when elements are fp32 */
    const float *gradient;
    const float *inverse; /* one float, 1 / loss scale; NULL: 1 */
    const float *scale;   /* one float, of clip_scale() */
    size_t count;
};

/* A partial sum of squares covers this many elements. */
#define GPT_NORM_CHUNK 4096

/* Of a model. */
struct gpt_sizes {
    size_t length, channels, heads, vocabulary;
};

struct gpt_ops {
    size_t struct_size;
    const char *name; /* "host", "cuda": of the kind of device */

    /* Whether every operation takes a model of these sizes: REBATCH_E_UNSUPPORTED with the first
     * that is too much. Needs no device. NULL: all that a gpt_config may have. */
    rebatch_status (*check_sizes)(const struct gpt_sizes *sizes);

    /* Takes what the operations need besides their arguments: library handles, workspaces. The
     * queue's other members are set before, and stay. REBATCH_E_UNSUPPORTED for a type of elements
     * that the table does not compute in. */
    rebatch_status (*open)(struct gpt_queue *queue);
    void (*close)(struct gpt_queue *queue);

    /* x[row] = token_table[token] + position_table[t]
     * x: elements [count * length][channels]; tables: [vocabulary] and [length], x [channels] */
    rebatch_status (*embedding_forward)(const struct gpt_queue *queue, void *x,
                                        const struct gpt_tokens *tokens, const void *token_table,
                                        const void *position_table, size_t channels);
    /* dtoken_table[token] += dx[row], rows ascending; dposition_table[t] += dx[row], samples
     * ascending. */
    rebatch_status (*embedding_backward)(const struct gpt_queue *queue, float *dtoken_table,
                                         float *dposition_table, const void *dx,
                                         const struct gpt_tokens *tokens, size_t channels);

    /* y = (x - mean) * rstd * gamma + beta over each row's channels, where
     * rstd = 1 / sqrt(variance + 1e-5).
     * x, y: elements [rows][channels]; gamma, beta: elements [channels]; mean, rstd: [rows] */
    rebatch_status (*layernorm_forward)(const struct gpt_queue *queue, void *y, float *mean,
                                        float *rstd, const void *x, const void *gamma,
                                        const void *beta, size_t rows, size_t channels);
    /* dx += the gradient of x, or, when `add` is false, dx = it; rows ascending:
     * dgamma += dy * (x - mean) * rstd, dbeta += dy. */
    rebatch_status (*layernorm_backward)(const struct gpt_queue *queue, void *dx, float *dgamma,
                                         float *dbeta, const void *dy, const void *x,
                                         const float *mean, const float *rstd, const void *gamma,
                                         size_t rows, size_t channels, bool add);

    /* y = bias + x W: inputs ascending. bias: elements [outputs]; NULL: 0. */
    rebatch_status (*matmul_forward)(const struct gpt_queue *queue, void *y, const void *x,
                                     const void *weight, const void *bias,
                                     const struct gpt_matmul *shape);
    /* dx = dy W^T: outputs ascending. */
    rebatch_status (*matmul_backward_input)(const struct gpt_queue *queue, void *dx, const void *dy,
                                            const void *weight, const struct gpt_matmul *shape);
    /* dweight += x^T dy (in W's layout) and dbias += dy: rows ascending. dbias may be NULL. */
    rebatch_status (*matmul_backward_weight)(const struct gpt_queue *queue, float *dweight,
                                             float *dbias, const void *dy, const void *x,
                                             const struct gpt_matmul *shape);

    /* Causal attention: out = softmax(q k^T / sqrt(width), keys up to the query's own) v, a head
     * and sample at a time; log_sums = log of the sum of the exponentials, on the host [row][head],
     * on a GPU [sample][head][t].
     * qkv: elements [rows][3][heads][width]; out: [rows][heads][width] */
    rebatch_status (*attention_forward)(const struct gpt_queue *queue, void *out, float *log_sums,
                                        const void *qkv, const struct gpt_attention *shape);
    /* dqkv = the gradient of qkv. */
    rebatch_status (*attention_backward)(const struct gpt_queue *queue, void *dqkv,
                                         const void *dout, const void *out, const void *qkv,
                                         const float *log_sums, const struct gpt_attention *shape);

    /* y = x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3))): GELU in its tanh form, written without
     * tanh. */
    rebatch_status (*gelu_forward)(const struct gpt_queue *queue, void *y, const void *x,
                                   size_t count);
    /* dy *= the derivative at x. */
    rebatch_status (*gelu_backward)(const struct gpt_queue *queue, void *dy, const void *x,
                                    size_t count);

    /* out = residual + dropout(x); a NULL residual is 0. Without it, this is dropout's backward as
     * well. out may be residual or x. Elements [samples][sample_elements]. */
    rebatch_status (*dropout_add)(const struct gpt_queue *queue, void *out, const void *residual,
                                  const void *x, size_t samples, size_t sample_elements,
                                  const struct gpt_dropout *dropout);

    /* losses[row] = -log softmax(logits[row])[target], and logits = scale * its gradient in their
     * place; a scale of 0 leaves logits alone. logits: elements [rows][vocabulary] */
    rebatch_status (*cross_entropy)(const struct gpt_queue *queue, float *losses, void *logits,
                                    const struct gpt_tokens *tokens, size_t vocabulary,
                                    float scale);
    /* *sum += each of `losses`, ascending. */
    rebatch_status (*sum_losses)(const struct gpt_queue *queue, double *sum, const float *losses,
                                 size_t rows);

    /* y += x */
    rebatch_status (*add)(const struct gpt_queue *queue, float *y, const float *x, size_t count);

    /* Elements of `out` = x, rounded to nearest even. */
    rebatch_status (*cast)(const struct gpt_queue *queue, void *out, const float *x, size_t count);

    /* *flag = 1 when any of x is infinite or no number; else it stays as it is. */
    rebatch_status (*check_finite)(const struct gpt_queue *queue, uint32_t *flag, const float *x,
                                   size_t count);
    /* partials[i] = sum of the squares of x's i-th GPT_NORM_CHUNK, in double. */
    rebatch_status (*sum_squares)(const struct gpt_queue *queue, double *partials, const float *x,
                                  size_t count);
    /* norm_and_scale[0] = sqrt(sum of partials) * *inverse, the sum in an order that depends on
     * `count` alone; [1] = what gradients of that norm are to be multiplied with so that it is at
     * most `most`, or 1; a `most` of 0 is none.
     * inverse: one float, 1 / loss scale; NULL: 1 */
    rebatch_status (*clip_scale)(const struct gpt_queue *queue, float *norm_and_scale,
                                 const double *partials, size_t count, float most,
                                 const float *inverse);
    /* g = gradient * *inverse * *scale; m = beta1 m + (1 - beta1) g; v likewise of g^2;
     * weight -= learning_rate * (m / (1 - beta1^update) / (sqrt(v / (1 - beta2^update)) + epsilon)
     *                            + weight_decay * weight); working = weight, rounded. */
    rebatch_status (*adamw)(const struct gpt_queue *queue, const struct gpt_adamw_arrays *arrays,
                            const struct gpt_adamw *settings);
};

/* The host's: fp32, in several threads (parallel.h), for any host device. */
extern const struct gpt_ops gpt_host_ops;

/* Those of NVIDIA GPUs: fp32, bf16 and fp16, for channels, inputs and outputs that are multiples of
 * 64, and heads 32, 64 or 128 wide. NULL in a program that was built without CUDA. */
const struct gpt_ops *gpt_cuda_ops_get(void);
/* The table for a device, by its kind.
 *  @return REBATCH_OK; REBATCH_E_UNSUPPORTED when there is none in this program */
rebatch_status gpt_ops_for_device(const struct gpt_ops **out, const rebatch_device *device);

#endif
