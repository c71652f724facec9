/* Owns the tests of cross-entropy and of the loss's sum. Must not know: the kernels' insides. Run
 * with -j1. */
#include <math.h>
#include <string.h>

#include <criterion/criterion.h>

#include "kernels_support.h"

TestSuite(kernels_loss, .fini = support_free_all);

typedef struct shape {
    size_t batch, length, vocabulary, padded;
} shape;

/* A byte vocabulary; a padding that ends inside a chunk; less than a chunk; GPT-2's. */
static const shape shapes[] = {
    {4, 10, 256, 256}, {3, 7, 1001, 1024}, {1, 5, 3, 16}, {2, 3, 50257, 50304}};
#define SHAPE_COUNT (sizeof shapes / sizeof *shapes)
#define SCALE 0.125f

/* Targets are tokens one further: they begin at 4 bytes more, and samples are length + 1 apart. */
typedef struct problem {
    shape shape;
    size_t rows, stride;
    rbk_dtype dtype;
    int32_t *tokens, *device_tokens;
    support_array logits, gradient, loss, device_scale;
    double *want_loss, *want_gradient;
} problem;

static int32_t *target_of(const problem *p, size_t row)
{
    return &p->tokens[row / p->shape.length * p->stride + row % p->shape.length + 1];
}

static problem problem_create(shape size, rbk_dtype dtype, support_random *random)
{
    const size_t rows = size.batch * size.length, stride = size.length + 1;
    const size_t count = rows * size.padded;
    problem p = {.shape = size, .rows = rows, .stride = stride, .dtype = dtype};
    p.tokens = support_calloc(size.batch * stride, sizeof *p.tokens);
    for (size_t n = 0; n < size.batch * stride; n++)
        p.tokens[n] = (int32_t)(support_next(random) % size.vocabulary);
    p.logits = support_array_random(dtype, count, 3.0, random);
    for (size_t r = 0; r < rows; r++)
        for (size_t v = size.vocabulary; v < size.padded; v++)
            p.logits.host[r * size.padded + v] = v % 2 ? INFINITY : NAN; /* may hold anything */
    support_array_write(&p.logits);
    *target_of(&p, 0) = (int32_t)size.vocabulary - 1;
    *target_of(&p, 1) = -100;
    *target_of(&p, 2) = (int32_t)size.vocabulary;
    p.device_tokens = support_upload_ints(p.tokens, size.batch * stride);
    p.gradient = support_array_copy(&p.logits);
    p.loss = support_array_poisoned(RBK_F32, rows);
    p.device_scale = support_array_random(RBK_F32, 1, 1.0, random);
    p.want_loss = support_calloc(rows, sizeof(double));
    p.want_gradient = support_calloc(count, sizeof(double));
    return p;
}

static void compute_reference(problem *p)
{
    const double scale = (double)SCALE * p->device_scale.host[0];
    for (size_t r = 0; r < p->rows; r++) {
        const int32_t target = *target_of(p, r);
        const double *row = p->logits.host + r * p->shape.padded;
        double *gradient = p->want_gradient + r * p->shape.padded;
        if (target < 0 || (size_t)target >= p->shape.vocabulary)
            continue;
        double high = -INFINITY, sum = 0.0;
        for (size_t v = 0; v < p->shape.vocabulary; v++)
            high = fmax(high, row[v]);
        for (size_t v = 0; v < p->shape.vocabulary; v++)
            sum += exp(row[v] - high);
        const double log_sum = high + log(sum);
        p->want_loss[r] = log_sum - row[target];
        for (size_t v = 0; v < p->shape.vocabulary; v++)
            gradient[v] = exp(row[v] - log_sum) * scale;
        gradient[target] -= scale;
    }
}

/* All rows, in place in `logits`. */
static void run(const problem *p, support_array *logits, support_array *loss, bool write)
{
    support_must(rbk_cross_entropy(loss->device, logits->device, p->device_tokens + 1, p->stride,
                                   p->shape.batch, p->shape.length, p->shape.vocabulary,
                                   p->shape.padded, SCALE, p->device_scale.device, write, p->dtype,
                                   NULL),
                 "cross-entropy");
}

/* One row, in place in `logits`. */
static void run_row(const problem *p, support_array *logits, support_array *loss, size_t row)
{
    const ptrdiff_t token = target_of(p, row) - p->tokens;
    support_must(
        rbk_cross_entropy(support_float_at(loss, row), support_at(logits, row * p->shape.padded),
                          p->device_tokens + token, 1, 1, 1, p->shape.vocabulary, p->shape.padded,
                          SCALE, p->device_scale.device, 1, p->dtype, NULL),
        "cross-entropy of a row");
}

static void check_cross_entropy(problem *p)
{
    const size_t rows = p->rows, count = rows * p->shape.padded;
    compute_reference(p);
    run(p, &p->gradient, &p->loss, true);
    support_expect_close(&p->loss, p->want_loss, 1e-5, "cross-entropy: loss");
    support_expect_close(&p->gradient, p->want_gradient, support_tolerance(p->dtype),
                         "cross-entropy: gradient");
    for (size_t r = 0; r < rows; r++)
        for (size_t v = p->shape.vocabulary; v < p->shape.padded; v++)
            cr_assert(p->gradient.host[r * p->shape.padded + v] == 0.0, "padding has a gradient");

    /* without the gradient the logits stay; row by row everything has the same bits */
    support_array loss = support_array_poisoned(RBK_F32, rows);
    support_array logits = support_array_copy(&p->logits);
    run(p, &logits, &loss, false);
    support_expect_same(&loss, 0, &p->loss, 0, rows, "cross-entropy: loss alone");
    support_expect_same(&logits, 0, &p->logits, 0, count, "cross-entropy: logits kept");
    for (size_t r = 0; r < rows; r++)
        run_row(p, &logits, &loss, r);
    support_expect_same(&loss, 0, &p->loss, 0, rows, "cross-entropy: loss, row by row");
    support_expect_same(&logits, 0, &p->gradient, 0, count, "cross-entropy: gradient, row by row");
}

Test(kernels_loss, cross_entropy)
{
    support_random random = {501};
    for (int d = 0; d < DTYPE_COUNT; d++) {
        for (size_t s = 0; s < SHAPE_COUNT; s++) {
            problem p = problem_create(shapes[s], support_dtypes[d], &random);
            check_cross_entropy(&p);
            support_free_all();
        }
    }
}

/* A NaN among the logits must reach the loss, or a diverged run would go unseen. */
Test(kernels_loss, not_a_number_is_passed_on)
{
    support_random random = {502};
    problem p = problem_create(shapes[1], RBK_BF16, &random);
    p.logits.host[3 * p.shape.padded + 500] = NAN;
    support_array_write(&p.logits);
    run(&p, &p.logits, &p.loss, true);
    support_array_read(&p.loss);
    cr_assert(isnan(p.loss.host[3]));
    cr_assert(isfinite(p.loss.host[4]));
}

/* Shapes of the sum: several warps' worth of positions, and more samples than come in at once. */
static void check_sum(size_t batch, size_t length, support_random *random)
{
    support_array loss = support_array_random(RBK_F32, batch * length, 1.0, random);
    double *sum = support_scratch(sizeof *sum);
    const double start = 3.5;
    double whole, want = start;
    for (size_t i = 0; i < batch * length; i++)
        want += loss.host[i];
    support_must(cudaMemcpy(sum, &start, sizeof start, cudaMemcpyHostToDevice), "cudaMemcpy");
    support_must(rbk_loss_sum(sum, loss.device, batch, length, NULL), "loss sum");
    support_must(cudaMemcpy(&whole, sum, sizeof whole, cudaMemcpyDeviceToHost), "cudaMemcpy");
    cr_assert(fabs(whole - want) <= 1e-12 * (double)(batch * length), "loss sum %.17g, not %.17g",
              whole, want);
    for (size_t step = 1; step < batch; step += 7) {
        double cut;
        support_must(cudaMemcpy(sum, &start, sizeof start, cudaMemcpyHostToDevice), "cudaMemcpy");
        for (size_t first = 0; first < batch; first += step)
            support_must(rbk_loss_sum(sum, support_float_at(&loss, first * length),
                                      first + step < batch ? step : batch - first, length, NULL),
                         "loss sum, cut");
        support_must(cudaMemcpy(&cut, sum, sizeof cut, cudaMemcpyDeviceToHost), "cudaMemcpy");
        cr_assert(memcmp(&cut, &whole, sizeof cut) == 0, "loss sum by %zu: %.17g, not %.17g", step,
                  cut, whole);
    }
}

Test(kernels_loss, sum)
{
    support_random random = {503};
    check_sum(SUPPORT_CUT_BATCH, 75, &random);
    check_sum(100, 3, &random);
    check_sum(1, 1, &random);
}
