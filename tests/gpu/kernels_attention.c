/* Owns the tests of causal attention. Must not know: the kernels' insides. Run with -j1. */
#include <math.h>
#include <string.h>

#include <criterion/criterion.h>

#include "kernels_support.h"

TestSuite(kernels_attention, .fini = support_free_all);

/* One row; part of a tile; whole tiles; several tiles and a bit. */
static const size_t lengths[] = {1, 50, 128, 300};
static const size_t head_widths[] = {32, 64, 128};
#define LENGTH_COUNT (sizeof lengths / sizeof *lengths)
#define HEAD_WIDTH_COUNT (sizeof head_widths / sizeof *head_widths)

typedef struct problem {
    size_t batch, length, heads, width; /* width of a head */
    rbk_dtype dtype;
    float scale;
    support_array qkv, out, log_sum, dout, dqkv;
    void *scratch;
    size_t scratch_bytes;
} problem;

static problem problem_create(size_t batch, size_t length, size_t heads, size_t width,
                              rbk_dtype dtype, support_random *random)
{
    const size_t count = batch * length * heads * width;
    problem p = {.batch = batch, .length = length, .heads = heads, .width = width, .dtype = dtype};
    p.scale = 1.0f / sqrtf((float)width);
    p.qkv = support_array_random(dtype, 3 * count, 1.0, random);
    p.out = support_array_poisoned(dtype, count);
    p.log_sum = support_array_poisoned(RBK_F32, batch * heads * length);
    p.dout = support_array_random(dtype, count, 1.0, random);
    p.dqkv = support_array_poisoned(dtype, 3 * count);
    p.scratch_bytes = rbk_attention_backward_scratch_bytes(batch, length, heads);
    p.scratch = support_scratch(p.scratch_bytes);
    return p;
}

/* Samples [first, first + count) into arrays of that many samples. */
static void run(const problem *p, support_array *out, support_array *log_sum, support_array *dqkv,
                size_t first, size_t count)
{
    const size_t at = first * p->length * p->heads * p->width;
    support_must(rbk_attention_forward(out->device, log_sum->device, support_at(&p->qkv, 3 * at),
                                       count, p->length, p->heads, p->width, p->scale, p->dtype,
                                       NULL),
                 "attention forward");
    support_must(rbk_attention_backward(dqkv->device, support_at(&p->dout, at),
                                        support_at(&p->qkv, 3 * at), out->device, log_sum->device,
                                        p->scratch, p->scratch_bytes, count, p->length, p->heads,
                                        p->width, p->scale, p->dtype, NULL),
                 "attention backward");
}

typedef struct reference {
    double *out, *log_sum, *dqkv;
} reference;

/* Row `part` (0 q, 1 k, 2 v) of position t in an array [B,T,3,H,D]. */
static size_t row_at(const problem *p, size_t b, size_t t, size_t part, size_t h)
{
    return (((b * p->length + t) * 3 + part) * p->heads + h) * p->width;
}

static double dot(const double *a, const double *b, size_t count)
{
    double sum = 0.0;
    for (size_t i = 0; i < count; i++)
        sum += a[i] * b[i];
    return sum;
}

/* y += x * factor */
static void add(double *y, const double *x, double factor, size_t count)
{
    for (size_t i = 0; i < count; i++)
        y[i] += x[i] * factor;
}

/* One query of one head: its output, and what its output's gradient adds to dq, dk and dv. */
static void reference_query(const problem *p, reference *r, double *weights, size_t b, size_t h,
                            size_t t)
{
    const size_t width = p->width, out_at = ((b * p->length + t) * p->heads + h) * width;
    const double *qkv = p->qkv.host, *dout = p->dout.host + out_at;
    const double *q = qkv + row_at(p, b, t, 0, h);
    double high = -INFINITY, sum = 0.0;
    for (size_t s = 0; s <= t; s++) {
        weights[s] = (double)p->scale * dot(q, qkv + row_at(p, b, s, 1, h), width);
        high = fmax(high, weights[s]);
    }
    for (size_t s = 0; s <= t; s++)
        sum += exp(weights[s] - high);
    const double log_sum = high + log(sum);
    r->log_sum[(b * p->heads + h) * p->length + t] = log_sum;
    for (size_t s = 0; s <= t; s++) {
        weights[s] = exp(weights[s] - log_sum);
        add(r->out + out_at, qkv + row_at(p, b, s, 2, h), weights[s], width);
    }
    const double delta = dot(dout, r->out + out_at, width);
    for (size_t s = 0; s <= t; s++) {
        const size_t k = row_at(p, b, s, 1, h), v = row_at(p, b, s, 2, h);
        const double d = (double)p->scale * weights[s] * (dot(dout, qkv + v, width) - delta);
        add(r->dqkv + row_at(p, b, t, 0, h), qkv + k, d, width);
        add(r->dqkv + k, q, d, width);
        add(r->dqkv + v, dout, weights[s], width);
    }
}

static reference reference_create(const problem *p)
{
    reference r = {support_calloc(p->out.count, sizeof(double)),
                   support_calloc(p->log_sum.count, sizeof(double)),
                   support_calloc(p->dqkv.count, sizeof(double))};
    double *weights = support_calloc(p->length, sizeof(double));
    for (size_t b = 0; b < p->batch; b++)
        for (size_t h = 0; h < p->heads; h++)
            for (size_t t = 0; t < p->length; t++)
                reference_query(p, &r, weights, b, h, t);
    return r;
}

/* dq, dk and dv have their own sizes, so each is compared by itself. */
static void check_part(problem *p, const double *want, size_t part, const char *what)
{
    const size_t row = p->heads * p->width, rows = p->batch * p->length;
    double distance = 0.0, size = 0.0;
    for (size_t n = 0; n < rows; n++) {
        for (size_t i = 0; i < row; i++) {
            const size_t at = (n * 3 + part) * row + i;
            distance += (p->dqkv.host[at] - want[at]) * (p->dqkv.host[at] - want[at]);
            size += want[at] * want[at];
        }
    }
    /* with one key the softmax is constant: dq and dk are 0 */
    const double error = p->length > 1 || part == 2 ? sqrt(distance / size) : sqrt(distance);
    cr_assert(error <= support_tolerance(p->dtype), "%s (%s, T=%zu, D=%zu): relative error %g",
              what, support_dtype_name(p->dtype), p->length, p->width, error);
}

static void check_against_reference(problem *p)
{
    reference r = reference_create(p);
    run(p, &p->out, &p->log_sum, &p->dqkv, 0, p->batch);
    support_expect_close(&p->out, r.out, support_tolerance(p->dtype), "attention: out");
    support_expect_close(&p->log_sum, r.log_sum, p->dtype == RBK_F32 ? 1e-5 : 1e-3,
                         "attention: log_sum");
    support_array_read(&p->dqkv);
    check_part(p, r.dqkv, 0, "attention: dq");
    check_part(p, r.dqkv, 1, "attention: dk");
    check_part(p, r.dqkv, 2, "attention: dv");
}

static void check_lengths(rbk_dtype dtype, uint64_t seed)
{
    support_random random = {seed};
    for (size_t w = 0; w < HEAD_WIDTH_COUNT; w++) {
        for (size_t l = 0; l < LENGTH_COUNT; l++) {
            problem p = problem_create(2, lengths[l], 2, head_widths[w], dtype, &random);
            check_against_reference(&p);
            support_free_all();
        }
    }
}

Test(kernels_attention, against_reference_fp32)
{
    check_lengths(RBK_F32, 401);
}

Test(kernels_attention, against_reference_bf16)
{
    check_lengths(RBK_BF16, 402);
}

Test(kernels_attention, against_reference_fp16)
{
    check_lengths(RBK_F16, 403);
}

/* Products far from 0 must not overflow: the softmax is shifted by its maximum. */
Test(kernels_attention, large_products)
{
    support_random random = {404};
    for (int d = 0; d < DTYPE_COUNT; d++) {
        problem p = problem_create(1, 150, 1, 64, support_dtypes[d], &random);
        for (size_t i = 0; i < p.qkv.count; i++)
            p.qkv.host[i] = support_round(p.dtype, p.qkv.host[i] * 6.0);
        support_array_write(&p.qkv);
        reference r = reference_create(&p);
        run(&p, &p.out, &p.log_sum, &p.dqkv, 0, 1);
        support_expect_close(&p.out, r.out, support_tolerance(p.dtype), "large products: out");
        support_expect_close(&p.log_sum, r.log_sum, 1e-3, "large products: log_sum");
        support_array_read(&p.dqkv);
        for (size_t i = 0; i < p.dqkv.count; i++)
            cr_assert(isfinite(p.dqkv.host[i]), "gradient %zu is %g", i, p.dqkv.host[i]);
        support_free_all();
    }
}

/* A sample gives the same bits alone, among others, and every time. */
static void check_batches(problem *p)
{
    const size_t sample = p->length * p->heads * p->width, rows = p->heads * p->length;
    run(p, &p->out, &p->log_sum, &p->dqkv, 0, p->batch);
    for (size_t count = 1; count <= p->batch; count++) {
        support_array out = support_array_poisoned(p->dtype, count * sample);
        support_array log_sum = support_array_poisoned(RBK_F32, count * rows);
        support_array dqkv = support_array_poisoned(p->dtype, count * 3 * sample);
        for (size_t first = 0; first + count <= p->batch; first++) {
            run(p, &out, &log_sum, &dqkv, first, count);
            support_expect_same(&out, 0, &p->out, first * sample, count * sample,
                                "attention of some samples: out");
            support_expect_same(&log_sum, 0, &p->log_sum, first * rows, count * rows,
                                "attention of some samples: log_sum");
            support_expect_same(&dqkv, 0, &p->dqkv, first * 3 * sample, count * 3 * sample,
                                "attention of some samples: dqkv");
        }
    }
}

Test(kernels_attention, samples_alone)
{
    support_random random = {405};
    for (int d = 0; d < DTYPE_COUNT; d++) {
        problem p = problem_create(3, 200, 2, 64, support_dtypes[d], &random);
        check_batches(&p);
        support_free_all();
    }
}
