/* Owns the reference in double.
 * Must not use any operation of the model. */
#include "gpt_reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

#include "gpt/random.h"

static double *zeros(size_t count)
{
    double *values = calloc(count, sizeof *values);
    cr_assert_not_null(values);
    return values;
}

/* ---- layer norm ---- */

static void moments_of(double *mean, double *rstd, const double *x, size_t channels)
{
    double sum = 0.0, squares = 0.0;
    for (size_t j = 0; j < channels; j++)
        sum += x[j];
    *mean = sum / (double)channels;
    for (size_t j = 0; j < channels; j++)
        squares += (x[j] - *mean) * (x[j] - *mean);
    *rstd = 1.0 / sqrt(squares / (double)channels + 1e-5);
}

void reference_layernorm(double *y, double *mean, double *rstd, const double *x,
                         const double *gamma, const double *beta, size_t rows, size_t channels)
{
    for (size_t row = 0; row < rows; row++) {
        double m, r;
        moments_of(&m, &r, x + row * channels, channels);
        for (size_t j = 0; j < channels; j++)
            y[row * channels + j] = (x[row * channels + j] - m) * r * gamma[j] + beta[j];
        if (mean)
            mean[row] = m;
        if (rstd)
            rstd[row] = r;
    }
}

void reference_layernorm_backward(double *dx, double *dgamma, double *dbeta, const double *dy,
                                  const double *x, const double *gamma, size_t rows,
                                  size_t channels)
{
    for (size_t row = 0; row < rows; row++) {
        const double *xs = x + row * channels, *dys = dy + row * channels;
        double m, r, slope = 0.0, tilt = 0.0;
        moments_of(&m, &r, xs, channels);
        for (size_t j = 0; j < channels; j++) {
            slope += dys[j] * gamma[j];
            tilt += dys[j] * gamma[j] * (xs[j] - m) * r;
            dgamma[j] += dys[j] * (xs[j] - m) * r;
            dbeta[j] += dys[j];
        }
        for (size_t j = 0; j < channels; j++)
            dx[row * channels + j] = r * (dys[j] * gamma[j] - slope / (double)channels -
                                          (xs[j] - m) * r * tilt / (double)channels);
    }
}

/* ---- matrix product ---- */

void reference_matmul(double *c, const double *a, const double *b, const double *bias, size_t m,
                      size_t n, size_t k, bool transposed)
{
    for (size_t i = 0; i < m; i++)
        for (size_t j = 0; j < n; j++) {
            double sum = bias ? bias[j] : 0.0;
            for (size_t l = 0; l < k; l++)
                sum += a[i * k + l] * (transposed ? b[j * k + l] : b[l * n + j]);
            c[i * n + j] = sum;
        }
}

/* ---- attention ---- */

/* One query's softmax over keys [0, t]; returns the log of the sum of exponentials. */
static double soften(double *weights, const double *q, const double *k, size_t t, size_t row,
                     size_t width)
{
    double largest = -INFINITY, sum = 0.0;
    for (size_t j = 0; j <= t; j++) {
        weights[j] = 0.0;
        for (size_t d = 0; d < width; d++)
            weights[j] += q[d] * k[j * row + d];
        weights[j] /= sqrt((double)width);
        largest = fmax(largest, weights[j]);
    }
    for (size_t j = 0; j <= t; j++)
        sum += exp(weights[j] - largest);
    for (size_t j = 0; j <= t; j++)
        weights[j] = exp(weights[j] - largest) / sum;
    return largest + log(sum);
}

void reference_attention(double *out, double *log_sums, const double *qkv,
                         const struct gpt_attention *shape)
{
    const size_t channels = shape->heads * shape->width, row = 3 * channels, width = shape->width;
    double *weights = zeros(shape->length);
    for (size_t at = 0; at < shape->count * shape->heads * shape->length; at++) {
        const size_t t = at % shape->length, head = at / shape->length % shape->heads;
        const size_t first = at / shape->length / shape->heads * shape->length;
        const double *base = qkv + first * row + head * width;
        double *o = out + (first + t) * channels + head * width;
        const double log_sum = soften(weights, base + t * row, base + channels, t, row, width);
        if (log_sums)
            log_sums[(first + t) * shape->heads + head] = log_sum;
        for (size_t d = 0; d < width; d++) {
            o[d] = 0.0;
            for (size_t j = 0; j <= t; j++)
                o[d] += weights[j] * base[2 * channels + j * row + d];
        }
    }
    free(weights);
}

void reference_attention_backward(double *dqkv, const double *dout, const double *qkv,
                                  const struct gpt_attention *shape)
{
    const size_t channels = shape->heads * shape->width, row = 3 * channels, width = shape->width;
    double *weights = zeros(shape->length), *dweights = zeros(shape->length);
    memset(dqkv, 0, shape->count * shape->length * row * sizeof *dqkv);
    for (size_t at = 0; at < shape->count * shape->heads * shape->length; at++) {
        const size_t t = at % shape->length, head = at / shape->length % shape->heads;
        const size_t first = at / shape->length / shape->heads * shape->length;
        const size_t place = first * row + head * width;
        const double *q = qkv + place, *k = q + channels, *v = k + channels;
        double *dq = dqkv + place, *dk = dq + channels, *dv = dk + channels;
        const double *slope = dout + (first + t) * channels + head * width;
        double mean = 0.0;
        (void)soften(weights, q + t * row, k, t, row, width);
        for (size_t j = 0; j <= t; j++) {
            dweights[j] = 0.0;
            for (size_t d = 0; d < width; d++) {
                dweights[j] += slope[d] * v[j * row + d];
                dv[j * row + d] += weights[j] * slope[d];
            }
            mean += weights[j] * dweights[j];
        }
        for (size_t j = 0; j <= t; j++) {
            const double dscore = weights[j] * (dweights[j] - mean) / sqrt((double)width);
            for (size_t d = 0; d < width; d++) {
                dq[t * row + d] += dscore * k[j * row + d];
                dk[j * row + d] += dscore * q[t * row + d];
            }
        }
    }
    free(weights);
    free(dweights);
}

/* ---- GELU, cross-entropy, dropout ---- */

double reference_gelu(double x)
{
    return 0.5 * x * (1.0 + tanh(sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
}

double reference_gelu_slope(double x)
{
    const double factor = sqrt(2.0 / M_PI);
    const double t = tanh(factor * (x + 0.044715 * x * x * x));
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * factor * (1.0 + 3.0 * 0.044715 * x * x);
}

double reference_cross_entropy(double *dlogits, const double *logits, size_t vocabulary,
                               size_t target)
{
    double largest = -INFINITY, sum = 0.0;
    for (size_t j = 0; j < vocabulary; j++)
        largest = fmax(largest, logits[j]);
    for (size_t j = 0; j < vocabulary; j++)
        sum += exp(logits[j] - largest);
    for (size_t j = 0; dlogits && j < vocabulary; j++)
        dlogits[j] = exp(logits[j] - largest) / sum - (j == target ? 1.0 : 0.0);
    return log(sum) + largest - logits[target];
}

double reference_dropout(const struct gpt_dropout *dropout, size_t sample, size_t element)
{
    if (dropout->probability == 0.0f)
        return 1.0;
    const uint32_t counter[4] = {(uint32_t)(element / 4),
                                 (uint32_t)(dropout->first_sample + sample), dropout->site,
                                 (uint32_t)dropout->step};
    uint32_t words[4];
    gpt_philox(words, counter, dropout->seed);
    const bool dropped =
        (double)words[element % 4] < floor((double)dropout->probability * 4294967296.0);
    return dropped ? 0.0 : 1.0 / (1.0 - (double)dropout->probability);
}

/* ---- the model ---- */

/* The model on one sample. */
struct walk {
    const struct gpt_config *config;
    double *const *blocks;
    struct gpt_dropout dropout; /* first_sample is the sample */
    double *x, *norm, *qkv, *branch, *wide;
};

static const double *tensor_of(const struct walk *w, size_t index)
{
    const struct gpt_tensor tensor = gpt_tensor_at(w->config, index);
    return w->blocks[tensor.block] + tensor.offset;
}

static const double *layer_tensor(const struct walk *w, size_t layer, enum gpt_layer_tensor tensor)
{
    return tensor_of(w, GPT_OUTER_COUNT + layer * GPT_LAYER_COUNT + tensor);
}

/* x += dropout(branch), or x = dropout(x) for a NULL branch. */
static void drop(struct walk *w, uint32_t site, const double *branch)
{
    w->dropout.site = site;
    for (size_t i = 0; i < w->config->length * w->config->channels; i++) {
        const double factor = reference_dropout(&w->dropout, 0, i);
        w->x[i] = branch ? w->x[i] + factor * branch[i] : factor * w->x[i];
    }
}

static void walk_layer(struct walk *w, size_t layer)
{
    const size_t T = w->config->length, C = w->config->channels;
    const struct gpt_attention shape = {1, T, w->config->heads, C / w->config->heads};
    reference_layernorm(w->norm, NULL, NULL, w->x, layer_tensor(w, layer, GPT_NORM1_GAMMA),
                        layer_tensor(w, layer, GPT_NORM1_BETA), T, C);
    reference_matmul(w->qkv, w->norm, layer_tensor(w, layer, GPT_QKV_WEIGHT),
                     layer_tensor(w, layer, GPT_QKV_BIAS), T, 3 * C, C, false);
    reference_attention(w->norm, NULL, w->qkv, &shape);
    reference_matmul(w->branch, w->norm, layer_tensor(w, layer, GPT_PROJECT_WEIGHT),
                     layer_tensor(w, layer, GPT_PROJECT_BIAS), T, C, C, false);
    drop(w, (uint32_t)(1 + 2 * layer), w->branch);
    reference_layernorm(w->norm, NULL, NULL, w->x, layer_tensor(w, layer, GPT_NORM2_GAMMA),
                        layer_tensor(w, layer, GPT_NORM2_BETA), T, C);
    reference_matmul(w->wide, w->norm, layer_tensor(w, layer, GPT_WIDEN_WEIGHT),
                     layer_tensor(w, layer, GPT_WIDEN_BIAS), T, 4 * C, C, false);
    for (size_t i = 0; i < 4 * T * C; i++)
        w->wide[i] = reference_gelu(w->wide[i]);
    reference_matmul(w->branch, w->wide, layer_tensor(w, layer, GPT_NARROW_WEIGHT),
                     layer_tensor(w, layer, GPT_NARROW_BIAS), T, C, 4 * C, false);
    drop(w, (uint32_t)(2 + 2 * layer), w->branch);
}

/* Sum of a sample's losses. */
static double walk_sample(struct walk *w, const int32_t *tokens)
{
    const size_t T = w->config->length, C = w->config->channels, V = w->config->vocabulary;
    for (size_t i = 0; i < T * C; i++)
        w->x[i] = tensor_of(w, GPT_TOKENS)[(size_t)tokens[i / C] * C + i % C] +
                  tensor_of(w, GPT_POSITIONS)[i];
    drop(w, 0, NULL);
    for (size_t layer = 0; layer < w->config->layers; layer++)
        walk_layer(w, layer);
    reference_layernorm(w->norm, NULL, NULL, w->x, tensor_of(w, GPT_FINAL_GAMMA),
                        tensor_of(w, GPT_FINAL_BETA), T, C);
    double *logits = zeros(T * V), sum = 0.0;
    reference_matmul(logits, w->norm, tensor_of(w, GPT_TOKENS), NULL, T, V, C, true);
    for (size_t t = 0; t < T; t++)
        sum += reference_cross_entropy(NULL, logits + t * V, V, (size_t)tokens[t + 1]);
    free(logits);
    return sum;
}

double reference_model_loss(const struct gpt_config *config, double *const *blocks,
                            const int32_t *tokens, size_t first, size_t count, uint64_t step,
                            uint64_t seed)
{
    const size_t rows = config->length, C = config->channels;
    struct walk w = {.config = config,
                     .blocks = blocks,
                     .dropout = {.probability = config->dropout, .seed = seed, .step = step},
                     .x = zeros(rows * C),
                     .norm = zeros(rows * C),
                     .qkv = zeros(rows * 3 * C),
                     .branch = zeros(rows * C),
                     .wide = zeros(rows * 4 * C)};
    double sum = 0.0;
    for (size_t i = 0; i < count; i++) {
        w.dropout.first_sample = first + i;
        sum += walk_sample(&w, tokens + i * (config->length + 1));
    }
    free(w.x);
    free(w.norm);
    free(w.qkv);
    free(w.branch);
    free(w.wide);
    return sum / (double)(count * rows);
}
