/* The reference model once more, in double and as plainly as possible: what the host operations and
 * the whole model are measured against. Must not use any operation of the model. */
#ifndef GPT_REFERENCE_H
#define GPT_REFERENCE_H

#include "gpt/model.h"

/* y and, where not NULL, mean and rstd, of rows of `channels`. */
void reference_layernorm(double *y, double *mean, double *rstd, const double *x,
                         const double *gamma, const double *beta, size_t rows, size_t channels);
/* dx = ..., dgamma += ..., dbeta += ... */
void reference_layernorm_backward(double *dx, double *dgamma, double *dbeta, const double *dy,
                                  const double *x, const double *gamma, size_t rows,
                                  size_t channels);

/* c[m][n] = bias + a[m][k] b, where b is [k][n] or, transposed, [n][k]; a NULL bias is 0. */
void reference_matmul(double *c, const double *a, const double *b, const double *bias, size_t m,
                      size_t n, size_t k, bool transposed);

void reference_attention(double *out, double *log_sums, const double *qkv,
                         const struct gpt_attention *shape);
void reference_attention_backward(double *dqkv, const double *dout, const double *qkv,
                                  const struct gpt_attention *shape);

/* The tanh form as it is usually written, and its derivative. */
double reference_gelu(double x);
double reference_gelu_slope(double x);

/* A row's loss and, unless NULL, the gradient of its logits. */
double reference_cross_entropy(double *dlogits, const double *logits, size_t vocabulary,
                               size_t target);

/* What an element of a sample is multiplied with: 0 or 1 / (1 - probability). */
double reference_dropout(const struct gpt_dropout *dropout, size_t sample, size_t element);

/* Mean loss over all rows of some samples of an effective batch.
 *  @param blocks  the parameters, laid out as in a gpt_set
 *  @param tokens  [count][length + 1] */
double reference_model_loss(const struct gpt_config *config, double *const *blocks,
                            const int32_t *tokens, size_t first, size_t count, uint64_t step,
                            uint64_t seed);

#endif
