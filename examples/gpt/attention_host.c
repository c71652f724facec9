/* Owns causal attention on the host: blocks of queries by blocks of keys, no T x T matrix.
 * Must not know what is attended to. */
#include <math.h>

#include "gpt/error.h"
#include "gpt/host.h"

/* Queries, and keys, of a block. A block's place is a function of t alone, and a sample's head is
 * done by one thread in one order, so that its bits depend on nothing else. */
#define BLOCK 64

struct attention {
    float *out;      /* forward: [rows][heads][width] */
    float *log_sums; /* forward: [rows][heads] */
    float *dqkv;     /* backward */
    const float *dout, *saved_out, *saved_log_sums;
    const float *qkv;
    struct gpt_attention shape;
};

/* One head of one sample. `row` floats lie between a position and the next in q, k, v and their
 * gradients, `out_row` in out and dout. */
struct head {
    size_t length, width, heads, row, out_row;
    float scale;
    const float *q, *k, *v;
    float *out, *log_sums;
    float *dq, *dk, *dv;
    const float *dout, *saved_out, *saved_log_sums;
};

static struct head head_of(const struct attention *a, size_t item)
{
    const struct gpt_attention *shape = &a->shape;
    const size_t sample = item / shape->heads, head = item % shape->heads;
    const size_t channels = shape->heads * shape->width;
    const size_t at = sample * shape->length * channels + head * shape->width;
    const size_t qkv_at = sample * shape->length * 3 * channels + head * shape->width;
    const size_t sums_at = sample * shape->length * shape->heads + head;
    struct head h = {.length = shape->length,
                     .width = shape->width,
                     .heads = shape->heads,
                     .row = 3 * channels,
                     .out_row = channels,
                     .scale = 1.0f / sqrtf((float)shape->width)};
    h.q = a->qkv + qkv_at;
    h.k = h.q + channels;
    h.v = h.k + channels;
    if (a->out) {
        h.out = a->out + at;
        h.log_sums = a->log_sums + sums_at;
    } else {
        h.dq = a->dqkv + qkv_at;
        h.dk = h.dq + channels;
        h.dv = h.dk + channels;
        h.dout = a->dout + at;
        h.saved_out = a->saved_out + at;
        h.saved_log_sums = a->saved_log_sums + sums_at;
    }
    return h;
}

/* A block of queries by a block of keys at or before it. */
struct block {
    size_t query, queries; /* first, how many */
    size_t key, keys;
};

static size_t block_size(size_t length, size_t first)
{
    return length - first < BLOCK ? length - first : BLOCK;
}

/* Keys of the block that query number i of it may see. */
static size_t visible(const struct block *b, size_t i)
{
    const size_t before = b->query + i - b->key + 1;
    return before < b->keys ? before : b->keys;
}

/* into[i][j] = rows(i) . columns(j), over the head's width */
static void dot_products(float *into, const float *rows, size_t row, const float *columns,
                         size_t column, const struct block *b, size_t width)
{
    gpt_product_run(&(struct gpt_product){.m = b->queries,
                                          .n = b->keys,
                                          .k = width,
                                          .a = rows,
                                          .a_row = row,
                                          .a_column = 1,
                                          .b = columns,
                                          .b_row = 1,
                                          .b_column = column,
                                          .c = into,
                                          .c_row = BLOCK,
                                          .start = GPT_START_ZERO});
}

/* into(query) += sum over keys of factors[query][key] values(key) */
static void add_over_keys(float *into, size_t into_row, const float *factors, const float *values,
                          size_t values_row, const struct block *b, size_t width)
{
    gpt_product_run(&(struct gpt_product){.m = b->queries,
                                          .n = width,
                                          .k = b->keys,
                                          .a = factors,
                                          .a_row = BLOCK,
                                          .a_column = 1,
                                          .b = values,
                                          .b_row = values_row,
                                          .b_column = 1,
                                          .c = into,
                                          .c_row = into_row,
                                          .start = GPT_START_SUM});
}

/* into(key) += sum over queries of factors[query][key] values(query) */
static void add_over_queries(float *into, size_t into_row, const float *factors,
                             const float *values, size_t values_row, const struct block *b,
                             size_t width)
{
    gpt_product_run(&(struct gpt_product){.m = b->keys,
                                          .n = width,
                                          .k = b->queries,
                                          .a = factors,
                                          .a_row = 1,
                                          .a_column = BLOCK,
                                          .b = values,
                                          .b_row = values_row,
                                          .b_column = 1,
                                          .c = into,
                                          .c_row = into_row,
                                          .start = GPT_START_SUM});
}

/* ---- forward ---- */

/* A block of queries while its keys pass by: the largest score so far, the sum of exponentials and
 * the sum of values, both relative to that largest score. */
struct running {
    float largest[BLOCK], sum[BLOCK];
    float values[BLOCK * GPT_HEAD_WIDTH_MOST];
    float scores[BLOCK * BLOCK];
};

/* Turns a query's scores into exponentials and brings what ran before to the new largest score. */
GPT_INLINE void soften_row(struct running *r, size_t query, size_t keys, size_t width, float scale)
{
    float *restrict scores = r->scores + query * BLOCK;
    float lanes[GPT_LANES] = {0};
    float largest = r->largest[query];
    for (size_t j = 0; j < keys; j++) {
        scores[j] *= scale;
        largest = scores[j] > largest ? scores[j] : largest;
    }
    for (size_t j = 0; j < keys; j++)
        scores[j] = gpt_exp(scores[j] - largest);
    for (size_t j = keys; j < BLOCK; j++)
        scores[j] = 0.0f;
    GPT_FOR_LANES(BLOCK, lanes[lane] += scores[i]);
    const float before = gpt_exp(r->largest[query] - largest);
    r->sum[query] = r->sum[query] * before + gpt_sum_lanes(lanes);
    r->largest[query] = largest;
    for (size_t d = 0; d < width; d++)
        r->values[query * width + d] *= before;
}

GPT_INLINE void forward_queries(const struct head *h, size_t query, struct running *r)
{
    const size_t width = h->width;
    struct block b = {.query = query, .queries = block_size(h->length, query)};
    for (size_t i = 0; i < b.queries; i++) {
        r->largest[i] = -INFINITY;
        r->sum[i] = 0.0f;
    }
    memset(r->values, 0, b.queries * width * sizeof *r->values);
    for (b.key = 0; b.key <= query; b.key += BLOCK) {
        b.keys = block_size(h->length, b.key);
        dot_products(r->scores, h->q + query * h->row, h->row, h->k + b.key * h->row, h->row, &b,
                     width);
        for (size_t i = 0; i < b.queries; i++)
            soften_row(r, i, visible(&b, i), width, h->scale);
        add_over_keys(r->values, width, r->scores, h->v + b.key * h->row, h->row, &b, width);
    }
    for (size_t i = 0; i < b.queries; i++) {
        const float inverse = 1.0f / r->sum[i];
        for (size_t d = 0; d < width; d++)
            h->out[(query + i) * h->out_row + d] = r->values[i * width + d] * inverse;
        h->log_sums[(query + i) * h->heads] = r->largest[i] + logf(r->sum[i]);
    }
}

/* Items are (sample, head). */
GPT_INLINE void forward_body(size_t begin, size_t end, const void *user)
{
    struct running running;
    for (size_t item = begin; item < end; item++) {
        const struct head head = head_of(user, item);
        for (size_t query = 0; query < head.length; query += BLOCK)
            forward_queries(&head, query, &running);
    }
}
GPT_VARIANTS(forward)

/* Heads of samples that are worth a thread. */
static size_t head_grain(const struct gpt_attention *shape)
{
    return gpt_product_grain(shape->length * shape->length * shape->width);
}

rebatch_status gpt_host_attention_forward(const struct gpt_queue *queue, void *out, float *log_sums,
                                          const void *qkv, const struct gpt_attention *shape)
{
    if (shape->width > GPT_HEAD_WIDTH_MOST)
        return gpt_error(REBATCH_E_INVALID, "attention: width is %zu: expected at most %d",
                         shape->width, GPT_HEAD_WIDTH_MOST);
    const struct attention a = {.out = out, .log_sums = log_sums, .qkv = qkv, .shape = *shape};
    return gpt_host_for(queue, shape->count * shape->heads, head_grain(shape), forward, &a);
}

/* ---- backward ---- */

struct slopes {
    float weights[BLOCK * BLOCK]; /* softmax, made again from the saved log sums */
    float dscores[BLOCK * BLOCK]; /* first the gradient of the weights, then of the scores */
    float products[BLOCK];        /* dout . out of each query */
};

GPT_INLINE void clear_gradients(const struct head *h)
{
    for (size_t t = 0; t < h->length; t++)
        for (size_t d = 0; d < h->width; d++) {
            h->dq[t * h->row + d] = 0.0f;
            h->dk[t * h->row + d] = 0.0f;
            h->dv[t * h->row + d] = 0.0f;
        }
}

GPT_INLINE float dot(const float *restrict x, const float *restrict y, size_t count)
{
    float lanes[GPT_LANES] = {0};
    GPT_FOR_LANES(count, lanes[lane] += x[i] * y[i]);
    return gpt_sum_lanes(lanes);
}

/* weights = softmax from scores; dscores = weights (dweights - dout . out) scale. What a query may
 * not see is 0 in both. */
GPT_INLINE void slope_row(struct slopes *s, size_t i, size_t keys, float log_sum, float scale)
{
    float *restrict weights = s->weights + i * BLOCK;
    float *restrict dscores = s->dscores + i * BLOCK;
    const float product = s->products[i];
    for (size_t j = 0; j < keys; j++) {
        weights[j] = gpt_exp(weights[j] * scale - log_sum);
        dscores[j] = weights[j] * (dscores[j] - product) * scale;
    }
    for (size_t j = keys; j < BLOCK; j++) {
        weights[j] = 0.0f;
        dscores[j] = 0.0f;
    }
}

GPT_INLINE void backward_queries(const struct head *h, size_t query, struct slopes *s)
{
    const size_t width = h->width;
    const float *dout = h->dout + query * h->out_row, *out = h->saved_out + query * h->out_row;
    const float *q = h->q + query * h->row;
    struct block b = {.query = query, .queries = block_size(h->length, query)};
    for (size_t i = 0; i < b.queries; i++)
        s->products[i] = dot(dout + i * h->out_row, out + i * h->out_row, width);
    for (b.key = 0; b.key <= query; b.key += BLOCK) {
        const size_t at = b.key * h->row;
        b.keys = block_size(h->length, b.key);
        dot_products(s->weights, q, h->row, h->k + at, h->row, &b, width);
        dot_products(s->dscores, dout, h->out_row, h->v + at, h->row, &b, width);
        for (size_t i = 0; i < b.queries; i++)
            slope_row(s, i, visible(&b, i), h->saved_log_sums[(query + i) * h->heads], h->scale);
        add_over_queries(h->dv + at, h->row, s->weights, dout, h->out_row, &b, width);
        add_over_queries(h->dk + at, h->row, s->dscores, q, h->row, &b, width);
        add_over_keys(h->dq + query * h->row, h->row, s->dscores, h->k + at, h->row, &b, width);
    }
}

/* Items are (sample, head). */
GPT_INLINE void backward_body(size_t begin, size_t end, const void *user)
{
    struct slopes slopes;
    for (size_t item = begin; item < end; item++) {
        const struct head head = head_of(user, item);
        clear_gradients(&head);
        for (size_t query = 0; query < head.length; query += BLOCK)
            backward_queries(&head, query, &slopes);
    }
}
GPT_VARIANTS(backward)

rebatch_status gpt_host_attention_backward(const struct gpt_queue *queue, void *dqkv,
                                           const void *dout, const void *out, const void *qkv,
                                           const float *log_sums, const struct gpt_attention *shape)
{
    if (shape->width > GPT_HEAD_WIDTH_MOST)
        return gpt_error(REBATCH_E_INVALID, "attention: width is %zu: expected at most %d",
                         shape->width, GPT_HEAD_WIDTH_MOST);
    const struct attention a = {.dqkv = dqkv,
                                .dout = dout,
                                .saved_out = out,
                                .saved_log_sums = log_sums,
                                .qkv = qkv,
                                .shape = *shape};
    return gpt_host_for(queue, shape->count * shape->heads, head_grain(shape), backward, &a);
}
