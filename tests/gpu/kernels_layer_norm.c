/* Owns the tests of layer norm. Must not know: the kernels' insides. Run with -j1. */
#include <math.h>
#include <string.h>

#include <criterion/criterion.h>

#include "kernels_support.h"

TestSuite(kernels_layer_norm, .fini = support_free_all);

/* One thread, part of a warp, whole warps, a warp and a bit, and the widest block. */
static const size_t widths[] = {8, 64, 768, 1032, RBK_LAYER_NORM_WIDTH_LIMIT};
#define WIDTH_COUNT (sizeof widths / sizeof *widths)

/* Two tiles of positions and a short one. */
#define LENGTH 70
#define EPSILON 1e-5f

/* Everything of one shape; the samples' mean is far from 0, as in a trained network's residual. */
typedef struct problem {
    size_t batch, width;
    rbk_dtype dtype;
    support_array in, gamma, beta, dout, residual_grad;
    support_array out, mean, rstd, din;
    support_array gamma_start, beta_start, gamma_grad, beta_grad;
    void *scratch;
    size_t scratch_bytes;
} problem;

static problem problem_create(size_t batch, size_t width, rbk_dtype dtype, support_random *random)
{
    const size_t rows = batch * LENGTH, count = rows * width;
    problem p = {.batch = batch, .width = width, .dtype = dtype};
    p.in = support_array_random(dtype, count, 1.0, random);
    for (size_t i = 0; i < count; i++)
        p.in.host[i] = support_round(dtype, p.in.host[i] + 0.5 * sin((double)(i / width)));
    support_array_write(&p.in);
    p.gamma = support_array_random(dtype, width, 1.0, random);
    p.beta = support_array_random(dtype, width, 1.0, random);
    p.dout = support_array_random(dtype, count, 1.0, random);
    p.residual_grad = support_array_random(dtype, count, 1.0, random);
    p.out = support_array_poisoned(dtype, count);
    p.mean = support_array_poisoned(RBK_F32, rows);
    p.rstd = support_array_poisoned(RBK_F32, rows);
    p.din = support_array_poisoned(dtype, count);
    p.gamma_start = support_array_random(RBK_F32, width, 1.0, random);
    p.beta_start = support_array_random(RBK_F32, width, 1.0, random);
    p.gamma_grad = support_array_copy(&p.gamma_start);
    p.beta_grad = support_array_copy(&p.beta_start);
    p.scratch_bytes = rbk_layer_norm_backward_scratch_bytes(batch, LENGTH, width);
    p.scratch = support_scratch(p.scratch_bytes);
    return p;
}

static void row_statistics(double *mean, double *rstd, const double *row, size_t width)
{
    double sum = 0.0, squares = 0.0;
    for (size_t c = 0; c < width; c++)
        sum += row[c];
    *mean = sum / (double)width;
    for (size_t c = 0; c < width; c++)
        squares += (row[c] - *mean) * (row[c] - *mean);
    *rstd = 1.0 / sqrt(squares / (double)width + (double)EPSILON);
}

static void forward(problem *p)
{
    support_must(rbk_layer_norm_forward(p->out.device, p->mean.device, p->rstd.device, p->in.device,
                                        p->gamma.device, p->beta.device, p->batch * LENGTH,
                                        p->width, EPSILON, p->dtype, NULL),
                 "layer norm forward");
}

/* Samples [first, first + count) of the problem; the forward pass has run. */
static void backward(problem *p, support_array *din, const support_array *residual_grad,
                     support_array *gamma_grad, support_array *beta_grad, size_t first,
                     size_t count)
{
    const size_t row = first * LENGTH, at = row * p->width;
    support_must(rbk_layer_norm_backward(
                     support_at(din, at), gamma_grad->device, beta_grad->device,
                     support_at(&p->dout, at), residual_grad ? support_at(residual_grad, at) : NULL,
                     support_at(&p->in, at), support_float_at(&p->mean, row),
                     support_float_at(&p->rstd, row), p->gamma.device, p->scratch, p->scratch_bytes,
                     count, LENGTH, p->width, p->dtype, NULL),
                 "layer norm backward");
}

static void check_forward(problem *p)
{
    const size_t rows = p->batch * LENGTH, width = p->width;
    double *want = support_calloc(rows * width, sizeof(double));
    double *mean = support_calloc(rows, sizeof(double)),
           *rstd = support_calloc(rows, sizeof(double));
    forward(p);
    for (size_t r = 0; r < rows; r++) {
        row_statistics(&mean[r], &rstd[r], p->in.host + r * width, width);
        for (size_t c = 0; c < width; c++)
            want[r * width + c] =
                (p->in.host[r * width + c] - mean[r]) * rstd[r] * p->gamma.host[c] +
                p->beta.host[c];
    }
    support_expect_close(&p->out, want, support_tolerance(p->dtype), "layer norm: out");
    support_expect_close(&p->mean, mean, 1e-5, "layer norm: mean");
    support_expect_close(&p->rstd, rstd, 1e-5, "layer norm: rstd");
}

static void backward_reference(const problem *p, bool with_residual, double *din,
                               double *gamma_grad, double *beta_grad)
{
    const size_t width = p->width;
    memcpy(gamma_grad, p->gamma_start.host, width * sizeof *gamma_grad);
    memcpy(beta_grad, p->beta_start.host, width * sizeof *beta_grad);
    for (size_t r = 0; r < p->batch * LENGTH; r++) {
        const double *in = p->in.host + r * width, *dout = p->dout.host + r * width;
        double mean, rstd, sum = 0.0, product = 0.0;
        row_statistics(&mean, &rstd, in, width);
        for (size_t c = 0; c < width; c++) {
            const double x = (in[c] - mean) * rstd, g = dout[c] * p->gamma.host[c];
            sum += g;
            product += g * x;
            gamma_grad[c] += dout[c] * x;
            beta_grad[c] += dout[c];
        }
        for (size_t c = 0; c < width; c++) {
            const double x = (in[c] - mean) * rstd, g = dout[c] * p->gamma.host[c];
            din[r * width + c] = rstd * (g - sum / (double)width - x * product / (double)width) +
                                 (with_residual ? p->residual_grad.host[r * width + c] : 0.0);
        }
    }
}

static void check_backward(problem *p)
{
    const size_t count = p->batch * LENGTH * p->width;
    double *din = support_calloc(count, sizeof(double));
    double *gamma_grad = support_calloc(p->width, sizeof(double));
    double *beta_grad = support_calloc(p->width, sizeof(double));

    backward(p, &p->din, &p->residual_grad, &p->gamma_grad, &p->beta_grad, 0, p->batch);
    backward_reference(p, true, din, gamma_grad, beta_grad);
    support_expect_close(&p->din, din, support_tolerance(p->dtype), "layer norm: din");
    support_expect_close(&p->gamma_grad, gamma_grad, 1e-5, "layer norm: gamma_grad");
    support_expect_close(&p->beta_grad, beta_grad, 1e-5, "layer norm: beta_grad");

    /* the same in place, and once without the residual's gradient */
    support_array gamma_again = support_array_copy(&p->gamma_start);
    support_array beta_again = support_array_copy(&p->beta_start);
    support_array in_place = support_array_copy(&p->residual_grad);
    backward(p, &in_place, &in_place, &gamma_again, &beta_again, 0, p->batch);
    support_expect_same(&in_place, 0, &p->din, 0, count, "layer norm backward in place");
    support_expect_same(&gamma_again, 0, &p->gamma_grad, 0, p->width, "gamma_grad again");
    backward(p, &in_place, NULL, &gamma_again, &beta_again, 0, p->batch);
    backward_reference(p, false, din, gamma_grad, beta_grad);
    support_expect_close(&in_place, din, support_tolerance(p->dtype), "layer norm: din alone");
}

Test(kernels_layer_norm, against_reference)
{
    support_random random = {201};
    for (int d = 0; d < DTYPE_COUNT; d++) {
        for (size_t w = 0; w < WIDTH_COUNT; w++) {
            problem p =
                problem_create(widths[w] > 2000 ? 1 : 2, widths[w], support_dtypes[d], &random);
            check_forward(&p);
            check_backward(&p);
            support_free_all();
        }
    }
}

static void check_cuts(problem *p)
{
    forward(p);
    backward(p, &p->din, &p->residual_grad, &p->gamma_grad, &p->beta_grad, 0, p->batch);
    for (int c = 0; c < SUPPORT_CUT_COUNT; c++) {
        support_array gamma_grad = support_array_copy(&p->gamma_start);
        support_array beta_grad = support_array_copy(&p->beta_start);
        support_array din = support_array_poisoned(p->dtype, p->din.count);
        size_t first = 0;
        for (const size_t *count = support_cuts[c]; *count > 0; first += *count++)
            backward(p, &din, &p->residual_grad, &gamma_grad, &beta_grad, first, *count);
        cr_assert(first == p->batch);
        support_expect_same(&din, 0, &p->din, 0, din.count, "layer norm din, cut");
        support_expect_same(&gamma_grad, 0, &p->gamma_grad, 0, p->width, "gamma_grad, cut");
        support_expect_same(&beta_grad, 0, &p->beta_grad, 0, p->width, "beta_grad, cut");
    }
}

/* Row r gives the same bits alone, and as the last of a few. */
static void check_rows(problem *p)
{
    const size_t width = p->width;
    support_array out = support_array_poisoned(p->dtype, 3 * width);
    for (size_t row = 0; row < 9; row++) {
        for (size_t rows = 1; rows <= 3 && rows <= row + 1; rows++) {
            const size_t first = row + 1 - rows;
            support_must(rbk_layer_norm_forward(
                             out.device, NULL, NULL, support_at(&p->in, first * width),
                             p->gamma.device, p->beta.device, rows, width, EPSILON, p->dtype, NULL),
                         "layer norm of some rows");
            support_expect_same(&out, (rows - 1) * width, &p->out, row * width, width,
                                "layer norm of some rows");
        }
    }
}

Test(kernels_layer_norm, cuts_and_rows)
{
    support_random random = {202};
    for (int d = 0; d < DTYPE_COUNT; d++) {
        problem p = problem_create(SUPPORT_CUT_BATCH, 136, support_dtypes[d], &random);
        check_cuts(&p);
        check_rows(&p);
        support_free_all();
    }
}
