/* What the host operations share: vector variants, fixed-order sums, exp, the matrix product, and
 * the way onto a stream. Must not know the model. */
#ifndef GPT_HOST_H
#define GPT_HOST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "gpt/ops.h"
#include "gpt/parallel.h"

/* ---- instruction sets ---- */

/* Worst to best. All of them give the same bits, except that the matrix product of PORTABLE rounds
 * each product where the others fuse it into the sum. */
enum gpt_isa { GPT_ISA_PORTABLE, GPT_ISA_AVX2, GPT_ISA_AVX512 };

/* The one in use: the best that the machine has, or what was forced. */
enum gpt_isa gpt_isa(void);

/* For tests: uses `isa` from now on; false, and nothing changed, when the machine lacks it. No
 * operation may be running. */
bool gpt_isa_force(enum gpt_isa isa);

#define GPT_INLINE static inline __attribute__((always_inline))

/* Makes NAME, a gpt_range_function, out of the inline function NAME_body: compiled once for every
 * instruction set, the right one taken at run time. A body holds plain loops that the compiler
 * vectorises without changing any order. */
#if defined(__x86_64__)
#define GPT_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define GPT_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define GPT_VARIANTS(name)                                                                         \
    GPT_TARGET_AVX512 static void name##_avx512(size_t begin, size_t end, const void *user)        \
    {                                                                                              \
        name##_body(begin, end, user);                                                             \
    }                                                                                              \
    GPT_TARGET_AVX2 static void name##_avx2(size_t begin, size_t end, const void *user)            \
    {                                                                                              \
        name##_body(begin, end, user);                                                             \
    }                                                                                              \
    static void name(size_t begin, size_t end, const void *user)                                   \
    {                                                                                              \
        switch (gpt_isa()) {                                                                       \
        case GPT_ISA_AVX512:                                                                       \
            name##_avx512(begin, end, user);                                                       \
            break;                                                                                 \
        case GPT_ISA_AVX2:                                                                         \
            name##_avx2(begin, end, user);                                                         \
            break;                                                                                 \
        case GPT_ISA_PORTABLE:                                                                     \
            name##_body(begin, end, user);                                                         \
            break;                                                                                 \
        }                                                                                          \
    }
#else
#define GPT_VARIANTS(name)                                                                         \
    static void name(size_t begin, size_t end, const void *user)                                   \
    {                                                                                              \
        name##_body(begin, end, user);                                                             \
    }
#endif

/* ---- sums in a fixed order ---- */

/* A sum over a row runs in this many lanes, element i in lane i % GPT_LANES, which are then added
 * pairwise: the order depends on the row's length alone. */
#define GPT_LANES 16

/* STATEMENT for every i below `count`, i in lane `lane`: whole groups of lanes first, so that they
 * become vectors. */
#define GPT_FOR_LANES(count, STATEMENT)                                                            \
    do {                                                                                           \
        size_t group_ = 0;                                                                         \
        for (; group_ + GPT_LANES <= (count); group_ += GPT_LANES)                                 \
            for (size_t lane = 0; lane < GPT_LANES; lane++) {                                      \
                const size_t i = group_ + lane;                                                    \
                STATEMENT;                                                                         \
            }                                                                                      \
        for (size_t lane = 0; group_ + lane < (count); lane++) {                                   \
            const size_t i = group_ + lane;                                                        \
            STATEMENT;                                                                             \
        }                                                                                          \
    } while (0)

GPT_INLINE float gpt_sum_lanes(float lanes[GPT_LANES])
{
    for (int half = GPT_LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            lanes[i] += lanes[i + half];
    return lanes[0];
}

/* ---- exp ---- */

/* e^x to 2 units in the last place; 0 below -87.3 (where a float would be subnormal), e^88 above
 * 88, NaN for NaN. 2^round(x / ln 2) times a polynomial: the Taylor series of e^r, |r| <= ln 2 / 2,
 * whose first term left out is r^8 / 40320 < 6e-9. */
GPT_INLINE float gpt_exp(float x)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it leaves an integer in the low bits */
    const float high = 0.693145751953125f, low = 1.42860682030941723e-6f; /* ln 2, in two parts */
    const float bounded = x > 88.0f ? 88.0f : x < -88.0f ? -88.0f : x;
    const float rounded = bounded * 1.44269504088896341f + shift;
    const float n = rounded - shift;
    const float r = (bounded - n * high) - n * low;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &rounded, sizeof bits);
    bits = (bits + 127u) << 23; /* n, in the exponent; the shift's own bits fall off the top */
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return x < -87.3f ? 0.0f : p * scale;
}

/* ---- matrix product (matmul_host.c) ---- */

enum gpt_product_start { GPT_START_ZERO, GPT_START_BIAS, GPT_START_SUM };

/* c(i, j) = start + a(i, 0) b(0, j) + a(i, 1) b(1, j) + ..., in this order, with one accumulator of
 * fp32 an element: the result does not depend on m, n, threads, or on how k is split over calls
 * with GPT_START_SUM.
 *   a(i, k) = a[i * a_row + k * a_column]     m x k
 *   b(k, j) = b[k * b_row + j * b_column]     k x n; one of the strides is 1
 *   c(i, j) = c[i * c_row + j]                m x n */
struct gpt_product {
    size_t m, n, k;
    const float *a;
    size_t a_row, a_column;
    const float *b;
    size_t b_row, b_column;
    float *c;
    size_t c_row;
    enum gpt_product_start start; /* 0, bias[j], or what c holds */
    const float *bias;            /* n; of GPT_START_BIAS */
};

/* In this thread alone. */
void gpt_product_run(const struct gpt_product *product);
/* Spread over threads. */
void gpt_product_run_parallel(const struct gpt_product *product);

/* ---- streams (ops_host.c) ---- */

/* Runs gpt_parallel_for() on the queue's stream, after what was enqueued before, and waits for it
 * when the stream is not the default one: `arguments` may live on the caller's stack. */
rebatch_status gpt_host_for(const struct gpt_queue *queue, size_t count, size_t grain,
                            gpt_range_function function, const void *arguments);

/* The least columns, elements, or multiplications of a product, that are worth waking a thread for:
 * some 10 microseconds' worth. */
#define GPT_COLUMN_GRAIN 32
#define GPT_ELEMENT_GRAIN 16384
#define GPT_PRODUCT_GRAIN 524288

/* As many items as make GPT_PRODUCT_GRAIN. */
static inline size_t gpt_product_grain(size_t item_multiplications)
{
    return item_multiplications < GPT_PRODUCT_GRAIN ? GPT_PRODUCT_GRAIN / item_multiplications : 1;
}

/* As many rows as make GPT_ELEMENT_GRAIN. */
static inline size_t gpt_row_grain(size_t row_elements)
{
    return row_elements < GPT_ELEMENT_GRAIN ? GPT_ELEMENT_GRAIN / row_elements : 1;
}

/* ---- members of the table, documented in ops.h ---- */

rebatch_status gpt_host_matmul_forward(const struct gpt_queue *queue, void *y, const void *x,
                                       const void *weight, const void *bias,
                                       const struct gpt_matmul *shape);
rebatch_status gpt_host_matmul_backward_input(const struct gpt_queue *queue, void *dx,
                                              const void *dy, const void *weight,
                                              const struct gpt_matmul *shape);
rebatch_status gpt_host_matmul_backward_weight(const struct gpt_queue *queue, float *dweight,
                                               float *dbias, const void *dy, const void *x,
                                               const struct gpt_matmul *shape);
rebatch_status gpt_host_attention_forward(const struct gpt_queue *queue, void *out, float *log_sums,
                                          const void *qkv, const struct gpt_attention *shape);
rebatch_status gpt_host_attention_backward(const struct gpt_queue *queue, void *dqkv,
                                           const void *dout, const void *out, const void *qkv,
                                           const float *log_sums,
                                           const struct gpt_attention *shape);
rebatch_status gpt_host_dropout_add(const struct gpt_queue *queue, void *out, const void *residual,
                                    const void *x, size_t samples, size_t sample_elements,
                                    const struct gpt_dropout *dropout);
rebatch_status gpt_host_sum_squares(const struct gpt_queue *queue, double *partials, const float *x,
                                    size_t count);
rebatch_status gpt_host_check_finite(const struct gpt_queue *queue, uint32_t *flag, const float *x,
                                     size_t count);
rebatch_status gpt_host_clip_scale(const struct gpt_queue *queue, float *norm_and_scale,
                                   const double *partials, size_t count, float most,
                                   const float *inverse);
rebatch_status gpt_host_adamw(const struct gpt_queue *queue, const struct gpt_adamw_arrays *arrays,
                              const struct gpt_adamw *settings);

#endif
