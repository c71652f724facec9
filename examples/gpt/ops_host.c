/* Owns the host's table of operations, its way onto a stream, and the small operations: embedding,
 * layer norm, GELU, cross-entropy. Must not know the model. */
#include <math.h>

#include "gpt/error.h"
#include "gpt/host.h"

/* ---- onto the stream ---- */

struct loop {
    size_t count, grain;
    gpt_range_function function;
    const void *arguments;
};

static void run_loop(void *user)
{
    const struct loop *loop = user;
    gpt_parallel_for(loop->count, loop->grain, loop->function, loop->arguments);
}

rebatch_status gpt_host_for(const struct gpt_queue *queue, size_t count, size_t grain,
                            gpt_range_function function, const void *arguments)
{
    struct loop loop = {count, grain, function, arguments};
    const rebatch_status status =
        rebatch_stream_call(queue->device, queue->stream, run_loop, &loop);
    if (status || !queue->stream)
        return status;
    return rebatch_stream_synchronize(queue->device, queue->stream);
}

static rebatch_status host_open(struct gpt_queue *queue)
{
    queue->state = NULL;
    if (queue->dtype != GPT_FP32)
        return gpt_error(REBATCH_E_UNSUPPORTED, "dtype is %s: expected fp32 on the host device",
                         gpt_dtype_name(queue->dtype));
    return gpt_parallel_prepare();
}

static void host_close(struct gpt_queue *queue)
{
    (void)queue;
}

/* ---- embedding ---- */

struct embedding {
    float *x; /* forward */
    const float *tokens_from, *positions_from;
    float *dtokens, *dpositions; /* backward */
    const float *dx;
    struct gpt_tokens tokens;
    size_t channels;
};

static size_t token_at(const struct gpt_tokens *tokens, size_t sample, size_t t)
{
    return (size_t)tokens->tokens[sample * (tokens->length + 1) + t];
}

/* Items are rows. */
GPT_INLINE void embed_rows_body(size_t begin, size_t end, const void *user)
{
    const struct embedding *e = user;
    const size_t channels = e->channels, length = e->tokens.length;
    for (size_t row = begin; row < end; row++) {
        const size_t token = token_at(&e->tokens, row / length, row % length);
        const float *restrict from = e->tokens_from + token * channels;
        const float *restrict position = e->positions_from + row % length * channels;
        float *restrict x = e->x + row * channels;
        for (size_t j = 0; j < channels; j++)
            x[j] = from[j] + position[j];
    }
}
GPT_VARIANTS(embed_rows)

static rebatch_status embedding_forward(const struct gpt_queue *queue, void *x,
                                        const struct gpt_tokens *tokens, const void *token_table,
                                        const void *position_table, size_t channels)
{
    const struct embedding e = {.x = x,
                                .tokens_from = token_table,
                                .positions_from = position_table,
                                .tokens = *tokens,
                                .channels = channels};
    return gpt_host_for(queue, tokens->count * tokens->length, gpt_row_grain(channels), embed_rows,
                        &e);
}

/* Items are channels: each goes through all rows in order. */
GPT_INLINE void embed_columns_body(size_t begin, size_t end, const void *user)
{
    const struct embedding *e = user;
    const size_t channels = e->channels, length = e->tokens.length;
    for (size_t sample = 0; sample < e->tokens.count; sample++)
        for (size_t t = 0; t < length; t++) {
            const float *restrict dx = e->dx + (sample * length + t) * channels;
            float *restrict token = e->dtokens + token_at(&e->tokens, sample, t) * channels;
            float *restrict position = e->dpositions + t * channels;
            for (size_t j = begin; j < end; j++) {
                token[j] += dx[j];
                position[j] += dx[j];
            }
        }
}
GPT_VARIANTS(embed_columns)

static rebatch_status embedding_backward(const struct gpt_queue *queue, float *dtoken_table,
                                         float *dposition_table, const void *dx,
                                         const struct gpt_tokens *tokens, size_t channels)
{
    const struct embedding e = {.dtokens = dtoken_table,
                                .dpositions = dposition_table,
                                .dx = dx,
                                .tokens = *tokens,
                                .channels = channels};
    return gpt_host_for(queue, channels, GPT_COLUMN_GRAIN, embed_columns, &e);
}

/* ---- layer norm ---- */

#define NORM_EPSILON 1e-5f

struct layernorm {
    float *y, *mean, *rstd; /* forward */
    const float *x, *gamma, *beta;
    float *dx, *dgamma, *dbeta; /* backward */
    const float *dy, *saved_mean, *saved_rstd;
    size_t rows, channels;
    bool add;
};

/* Items are rows. */
GPT_INLINE void norm_rows_body(size_t begin, size_t end, const void *user)
{
    const struct layernorm *n = user;
    const size_t channels = n->channels;
    const float inverse = 1.0f / (float)channels;
    const float *restrict gamma = n->gamma, *restrict beta = n->beta;
    for (size_t row = begin; row < end; row++) {
        const float *restrict x = n->x + row * channels;
        float *restrict y = n->y + row * channels;
        float sums[GPT_LANES] = {0}, squares[GPT_LANES] = {0};
        GPT_FOR_LANES(channels, sums[lane] += x[i]);
        const float mean = gpt_sum_lanes(sums) * inverse;
        GPT_FOR_LANES(channels, squares[lane] += (x[i] - mean) * (x[i] - mean));
        const float rstd = 1.0f / sqrtf(gpt_sum_lanes(squares) * inverse + NORM_EPSILON);
        for (size_t j = 0; j < channels; j++)
            y[j] = (x[j] - mean) * rstd * gamma[j] + beta[j];
        n->mean[row] = mean;
        n->rstd[row] = rstd;
    }
}
GPT_VARIANTS(norm_rows)

static rebatch_status layernorm_forward(const struct gpt_queue *queue, void *y, float *mean,
                                        float *rstd, const void *x, const void *gamma,
                                        const void *beta, size_t rows, size_t channels)
{
    const struct layernorm n = {.y = y,
                                .mean = mean,
                                .rstd = rstd,
                                .x = x,
                                .gamma = gamma,
                                .beta = beta,
                                .channels = channels};
    return gpt_host_for(queue, rows, gpt_row_grain(channels), norm_rows, &n);
}

/* Items are rows: dx = rstd (dy gamma - mean(dy gamma) - xhat mean(dy gamma xhat)). */
GPT_INLINE void norm_slopes_body(size_t begin, size_t end, const void *user)
{
    const struct layernorm *n = user;
    const size_t channels = n->channels;
    const float inverse = 1.0f / (float)channels;
    const float *restrict gamma = n->gamma;
    for (size_t row = begin; row < end; row++) {
        const float *restrict x = n->x + row * channels, *restrict dy = n->dy + row * channels;
        float *restrict dx = n->dx + row * channels;
        const float mean = n->saved_mean[row], rstd = n->saved_rstd[row];
        float sums[GPT_LANES] = {0}, products[GPT_LANES] = {0};
        GPT_FOR_LANES(channels, const float slope = dy[i] * gamma[i]; sums[lane] += slope;
                      products[lane] += slope * ((x[i] - mean) * rstd));
        const float average = gpt_sum_lanes(sums) * inverse;
        const float tilt = gpt_sum_lanes(products) * inverse;
        for (size_t j = 0; j < channels; j++) {
            const float slope = rstd * (dy[j] * gamma[j] - average - (x[j] - mean) * rstd * tilt);
            dx[j] = n->add ? dx[j] + slope : slope;
        }
    }
}
GPT_VARIANTS(norm_slopes)

/* Items are channels: each goes through all rows in order. */
GPT_INLINE void norm_columns_body(size_t begin, size_t end, const void *user)
{
    const struct layernorm *n = user;
    float *restrict dgamma = n->dgamma, *restrict dbeta = n->dbeta;
    for (size_t row = 0; row < n->rows; row++) {
        const float *restrict x = n->x + row * n->channels;
        const float *restrict dy = n->dy + row * n->channels;
        const float mean = n->saved_mean[row], rstd = n->saved_rstd[row];
        for (size_t j = begin; j < end; j++) {
            dgamma[j] += dy[j] * ((x[j] - mean) * rstd);
            dbeta[j] += dy[j];
        }
    }
}
GPT_VARIANTS(norm_columns)

static rebatch_status layernorm_backward(const struct gpt_queue *queue, void *dx, float *dgamma,
                                         float *dbeta, const void *dy, const void *x,
                                         const float *mean, const float *rstd, const void *gamma,
                                         size_t rows, size_t channels, bool add)
{
    const struct layernorm n = {.dx = dx,
                                .dgamma = dgamma,
                                .dbeta = dbeta,
                                .dy = dy,
                                .x = x,
                                .saved_mean = mean,
                                .saved_rstd = rstd,
                                .gamma = gamma,
                                .rows = rows,
                                .channels = channels,
                                .add = add};
    const rebatch_status status =
        gpt_host_for(queue, rows, gpt_row_grain(channels), norm_slopes, &n);
    if (status)
        return status;
    return gpt_host_for(queue, channels, GPT_COLUMN_GRAIN, norm_columns, &n);
}

/* ---- GELU, add ---- */

struct elementwise {
    float *y;
    const float *x;
};

#define GELU_FACTOR 1.5957691216057308f /* 2 sqrt(2 / pi) */
#define GELU_CUBE 0.044715f

GPT_INLINE float gelu_gate(float x)
{
    return 1.0f / (1.0f + gpt_exp(-GELU_FACTOR * (x + GELU_CUBE * x * x * x)));
}

/* Items are elements, here and below. */
GPT_INLINE void gelu_body(size_t begin, size_t end, const void *user)
{
    const struct elementwise *e = user;
    float *restrict y = e->y;
    const float *restrict x = e->x;
    for (size_t i = begin; i < end; i++)
        y[i] = x[i] * gelu_gate(x[i]);
}
GPT_VARIANTS(gelu)

GPT_INLINE void gelu_slope_body(size_t begin, size_t end, const void *user)
{
    const struct elementwise *e = user;
    float *restrict dy = e->y;
    const float *restrict x = e->x;
    for (size_t i = begin; i < end; i++) {
        const float gate = gelu_gate(x[i]);
        const float inner = GELU_FACTOR * (1.0f + 3.0f * GELU_CUBE * x[i] * x[i]);
        dy[i] *= gate + x[i] * gate * (1.0f - gate) * inner;
    }
}
GPT_VARIANTS(gelu_slope)

GPT_INLINE void add_all_body(size_t begin, size_t end, const void *user)
{
    const struct elementwise *e = user;
    float *restrict y = e->y;
    const float *restrict x = e->x;
    for (size_t i = begin; i < end; i++)
        y[i] += x[i];
}
GPT_VARIANTS(add_all)

static rebatch_status gelu_forward(const struct gpt_queue *queue, void *y, const void *x,
                                   size_t count)
{
    return gpt_host_for(queue, count, GPT_ELEMENT_GRAIN, gelu, &(struct elementwise){y, x});
}

static rebatch_status gelu_backward(const struct gpt_queue *queue, void *dy, const void *x,
                                    size_t count)
{
    return gpt_host_for(queue, count, GPT_ELEMENT_GRAIN, gelu_slope, &(struct elementwise){dy, x});
}

static rebatch_status add(const struct gpt_queue *queue, float *y, const float *x, size_t count)
{
    return gpt_host_for(queue, count, GPT_ELEMENT_GRAIN, add_all, &(struct elementwise){y, x});
}

/* ---- cross-entropy ---- */

struct cross_entropy {
    float *losses, *logits;
    struct gpt_tokens tokens;
    size_t vocabulary;
    float scale;
};

/* Items are rows. */
GPT_INLINE void entropy_rows_body(size_t begin, size_t end, const void *user)
{
    const struct cross_entropy *c = user;
    const size_t vocabulary = c->vocabulary, length = c->tokens.length;
    for (size_t row = begin; row < end; row++) {
        float *restrict logits = c->logits + row * vocabulary;
        const size_t target = token_at(&c->tokens, row / length, row % length + 1);
        const float hit = logits[target];
        float largest = logits[0], lanes[GPT_LANES] = {0};
        for (size_t j = 1; j < vocabulary; j++)
            largest = logits[j] > largest ? logits[j] : largest;
        GPT_FOR_LANES(vocabulary, lanes[lane] += gpt_exp(logits[i] - largest));
        const float sum = gpt_sum_lanes(lanes);
        c->losses[row] = logf(sum) + (largest - hit);
        if (c->scale == 0.0f)
            continue;
        const float inverse = c->scale / sum;
        for (size_t j = 0; j < vocabulary; j++)
            logits[j] = gpt_exp(logits[j] - largest) * inverse;
        logits[target] -= c->scale;
    }
}
GPT_VARIANTS(entropy_rows)

static rebatch_status cross_entropy(const struct gpt_queue *queue, float *losses, void *logits,
                                    const struct gpt_tokens *tokens, size_t vocabulary, float scale)
{
    const struct cross_entropy c = {losses, logits, *tokens, vocabulary, scale};
    return gpt_host_for(queue, tokens->count * tokens->length, gpt_row_grain(vocabulary),
                        entropy_rows, &c);
}

struct loss_sum {
    double *sum;
    const float *losses;
    size_t rows;
};

static void add_losses(size_t begin, size_t end, const void *user)
{
    (void)begin, (void)end; /* one item */
    const struct loss_sum *s = user;
    double sum = *s->sum;
    for (size_t row = 0; row < s->rows; row++)
        sum += (double)s->losses[row];
    *s->sum = sum;
}

static rebatch_status sum_losses(const struct gpt_queue *queue, double *sum, const float *losses,
                                 size_t rows)
{
    return gpt_host_for(queue, 1, 1, add_losses, &(struct loss_sum){sum, losses, rows});
}

/* ---- cast ---- */

struct copy {
    float *out;
    const float *x;
};

/* Items are elements, which are fp32 here. */
static void copy_elements(size_t begin, size_t end, const void *user)
{
    const struct copy *c = user;
    memcpy(c->out + begin, c->x + begin, (end - begin) * sizeof *c->x);
}

static rebatch_status cast(const struct gpt_queue *queue, void *out, const float *x, size_t count)
{
    return gpt_host_for(queue, count, GPT_ELEMENT_GRAIN, copy_elements, &(struct copy){out, x});
}

/* ---- the table ---- */

const struct gpt_ops gpt_host_ops = {
    .struct_size = sizeof(struct gpt_ops),
    .name = "host",
    .open = host_open,
    .close = host_close,
    .embedding_forward = embedding_forward,
    .embedding_backward = embedding_backward,
    .layernorm_forward = layernorm_forward,
    .layernorm_backward = layernorm_backward,
    .matmul_forward = gpt_host_matmul_forward,
    .matmul_backward_input = gpt_host_matmul_backward_input,
    .matmul_backward_weight = gpt_host_matmul_backward_weight,
    .attention_forward = gpt_host_attention_forward,
    .attention_backward = gpt_host_attention_backward,
    .gelu_forward = gelu_forward,
    .gelu_backward = gelu_backward,
    .dropout_add = gpt_host_dropout_add,
    .cross_entropy = cross_entropy,
    .sum_losses = sum_losses,
    .add = add,
    .cast = cast,
    .check_finite = gpt_host_check_finite,
    .sum_squares = gpt_host_sum_squares,
    .clip_scale = gpt_host_clip_scale,
    .adamw = gpt_host_adamw,
};
