/* Owns the timed table of operations. Must not know what the operations do. */
#include "gpt_budget.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "gpt/cuda.h"

enum { NOTES_MOST = 1 << 16, KINDS_MOST = 64 };

/* One run of an operation. */
struct note {
    size_t kind;
    cudaEvent_t began, ended;
};

static const struct gpt_ops *inner;
static struct note notes[NOTES_MOST];
static size_t note_count, event_count; /* the first event_count notes have their events */
static char kinds[KINDS_MOST][48];
static size_t kind_count;

static void must(cudaError_t status, const char *what)
{
    if (status == cudaSuccess)
        return;
    fprintf(stderr, "bench-gpt: %s: %s\n", what, cudaGetErrorString(status));
    exit(1);
}

static size_t kind_of(const char *name)
{
    for (size_t i = 0; i < kind_count; i++)
        if (strcmp(kinds[i], name) == 0)
            return i;
    if (kind_count == KINDS_MOST) {
        fprintf(stderr, "bench-gpt: more than %d kinds of operation\n", KINDS_MOST);
        exit(1);
    }
    snprintf(kinds[kind_count], sizeof *kinds, "%s", name);
    return kind_count++;
}

static struct note *begin(const struct gpt_queue *queue, const char *name)
{
    if (note_count == NOTES_MOST) {
        fprintf(stderr, "bench-gpt: more than %d operations\n", NOTES_MOST);
        exit(1);
    }
    struct note *note = &notes[note_count++];
    if (note_count > event_count) {
        must(cudaEventCreate(&note->began), "cudaEventCreate");
        must(cudaEventCreate(&note->ended), "cudaEventCreate");
        event_count = note_count;
    }
    note->kind = kind_of(name);
    must(cudaEventRecord(note->began, gpt_cuda_stream(queue)), "cudaEventRecord");
    return note;
}

static rebatch_status end(const struct gpt_queue *queue, const struct note *note,
                          rebatch_status status)
{
    must(cudaEventRecord(note->ended, gpt_cuda_stream(queue)), "cudaEventRecord");
    return status;
}

/* ---- the operations ---- */

#define TIMED(member, parameters, arguments)                                                       \
    static rebatch_status member parameters                                                        \
    {                                                                                              \
        const struct note *note = begin(queue, #member);                                           \
        return end(queue, note, inner->member arguments);                                          \
    }

/* A product's kind has its sizes. */
#define TIMED_PRODUCT(member, parameters, arguments)                                               \
    static rebatch_status member parameters                                                        \
    {                                                                                              \
        char name[48];                                                                             \
        snprintf(name, sizeof name, "%s %zu x %zu", #member, shape->inputs, shape->outputs);       \
        const struct note *note = begin(queue, name);                                              \
        return end(queue, note, inner->member arguments);                                          \
    }

TIMED(embedding_forward,
      (const struct gpt_queue *queue, void *x, const struct gpt_tokens *tokens,
       const void *token_table, const void *position_table, size_t channels),
      (queue, x, tokens, token_table, position_table, channels))
TIMED(embedding_backward,
      (const struct gpt_queue *queue, float *dtoken_table, float *dposition_table, const void *dx,
       const struct gpt_tokens *tokens, size_t channels),
      (queue, dtoken_table, dposition_table, dx, tokens, channels))
TIMED(layernorm_forward,
      (const struct gpt_queue *queue, void *y, float *mean, float *rstd, const void *x,
       const void *gamma, const void *beta, size_t rows, size_t channels),
      (queue, y, mean, rstd, x, gamma, beta, rows, channels))
TIMED(layernorm_backward,
      (const struct gpt_queue *queue, void *dx, float *dgamma, float *dbeta, const void *dy,
       const void *x, const float *mean, const float *rstd, const void *gamma, size_t rows,
       size_t channels, bool add),
      (queue, dx, dgamma, dbeta, dy, x, mean, rstd, gamma, rows, channels, add))
TIMED_PRODUCT(matmul_forward,
              (const struct gpt_queue *queue, void *y, const void *x, const void *weight,
               const void *bias, const struct gpt_matmul *shape),
              (queue, y, x, weight, bias, shape))
TIMED_PRODUCT(matmul_backward_input,
              (const struct gpt_queue *queue, void *dx, const void *dy, const void *weight,
               const struct gpt_matmul *shape),
              (queue, dx, dy, weight, shape))
TIMED_PRODUCT(matmul_backward_weight,
              (const struct gpt_queue *queue, float *dweight, float *dbias, const void *dy,
               const void *x, const struct gpt_matmul *shape),
              (queue, dweight, dbias, dy, x, shape))
TIMED(attention_forward,
      (const struct gpt_queue *queue, void *out, float *log_sums, const void *qkv,
       const struct gpt_attention *shape),
      (queue, out, log_sums, qkv, shape))
TIMED(attention_backward,
      (const struct gpt_queue *queue, void *dqkv, const void *dout, const void *out,
       const void *qkv, const float *log_sums, const struct gpt_attention *shape),
      (queue, dqkv, dout, out, qkv, log_sums, shape))
TIMED(gelu_forward, (const struct gpt_queue *queue, void *y, const void *x, size_t count),
      (queue, y, x, count))
TIMED(gelu_backward, (const struct gpt_queue *queue, void *dy, const void *x, size_t count),
      (queue, dy, x, count))
TIMED(dropout_add,
      (const struct gpt_queue *queue, void *out, const void *residual, const void *x,
       size_t samples, size_t sample_elements, const struct gpt_dropout *dropout),
      (queue, out, residual, x, samples, sample_elements, dropout))
TIMED(cross_entropy,
      (const struct gpt_queue *queue, float *losses, void *logits, const struct gpt_tokens *tokens,
       size_t vocabulary, float scale),
      (queue, losses, logits, tokens, vocabulary, scale))
TIMED(sum_losses, (const struct gpt_queue *queue, double *sum, const float *losses, size_t rows),
      (queue, sum, losses, rows))
TIMED(add, (const struct gpt_queue *queue, float *y, const float *x, size_t count),
      (queue, y, x, count))
TIMED(sum_squares, (const struct gpt_queue *queue, double *partials, const float *x, size_t count),
      (queue, partials, x, count))
TIMED(clip_scale,
      (const struct gpt_queue *queue, float *norm_and_scale, const double *partials, size_t count,
       float most, const float *inverse),
      (queue, norm_and_scale, partials, count, most, inverse))
TIMED(adamw,
      (const struct gpt_queue *queue, const struct gpt_adamw_arrays *arrays,
       const struct gpt_adamw *settings),
      (queue, arrays, settings))

const struct gpt_ops *budget_ops(const struct gpt_ops *timed)
{
    static struct gpt_ops table;
    inner = timed;
    table = *timed;
    table.embedding_forward = embedding_forward;
    table.embedding_backward = embedding_backward;
    table.layernorm_forward = layernorm_forward;
    table.layernorm_backward = layernorm_backward;
    table.matmul_forward = matmul_forward;
    table.matmul_backward_input = matmul_backward_input;
    table.matmul_backward_weight = matmul_backward_weight;
    table.attention_forward = attention_forward;
    table.attention_backward = attention_backward;
    table.gelu_forward = gelu_forward;
    table.gelu_backward = gelu_backward;
    table.dropout_add = dropout_add;
    table.cross_entropy = cross_entropy;
    table.sum_losses = sum_losses;
    table.add = add;
    table.sum_squares = sum_squares;
    table.clip_scale = clip_scale;
    table.adamw = adamw;
    return &table;
}

/* ---- the figures ---- */

void budget_clear(void)
{
    note_count = 0;
}

struct sum {
    double milliseconds;
    size_t kind, runs;
};

static int longest_first(const void *a, const void *b)
{
    const struct sum *x = a, *y = b;
    return (x->milliseconds < y->milliseconds) - (x->milliseconds > y->milliseconds);
}

void budget_print(size_t steps, size_t tokens)
{
    struct sum sums[KINDS_MOST] = {{0}};
    double all = 0.0;
    must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    for (size_t i = 0; i < kind_count; i++)
        sums[i].kind = i;
    for (size_t i = 0; i < note_count; i++) {
        float milliseconds;
        must(cudaEventElapsedTime(&milliseconds, notes[i].began, notes[i].ended),
             "cudaEventElapsedTime");
        sums[notes[i].kind].milliseconds += (double)milliseconds;
        sums[notes[i].kind].runs++;
        all += (double)milliseconds;
    }
    qsort(sums, kind_count, sizeof *sums, longest_first);
    for (size_t i = 0; i < kind_count; i++)
        printf("  %-40s %5zu runs %9.3f ms %7.1f ns a token %5.1f %%\n", kinds[sums[i].kind],
               sums[i].runs / steps, sums[i].milliseconds / (double)steps,
               sums[i].milliseconds * 1e6 / (double)steps / (double)tokens,
               100.0 * sums[i].milliseconds / all);
    printf("  %-40s %5zu runs %9.3f ms %7.1f ns a token\n", "all", note_count / steps,
           all / (double)steps, all * 1e6 / (double)steps / (double)tokens);
}
