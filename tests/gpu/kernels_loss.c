/* Owns the tests of cross-entropy and of the loss's sum. Must not know: the kernels' insides. Run
 * with -j1. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

#include "kernels_support.h"

typedef struct shape {
    size_t rows, vocabulary, padded;
} shape;

/* A byte vocabulary; a padding that ends inside a chunk; less than a chunk; GPT-2's. */
static const shape shapes[] = {{40, 256, 256}, {21, 1001, 1024}, {5, 3, 16}, {6, 50257, 50304}};
#define SHAPE_COUNT (sizeof shapes / sizeof *shapes)
#define SCALE 0.125f

typedef struct problem {
    shape shape;
    rbk_dtype dtype;
    int32_t *targets, *device_targets;
    support_array logits, gradient, loss, device_scale;
    double *want_loss, *want_gradient;
} problem;

static problem problem_create(shape size, rbk_dtype dtype, support_random *random)
{
    const size_t count = size.rows * size.padded;
    problem p = {.shape = size, .dtype = dtype};
    p.targets = malloc(size.rows * sizeof *p.targets);
    p.logits = support_array_random(dtype, count, 3.0, random);
    for (size_t r = 0; r < size.rows; r++) {
        p.targets[r] = (int32_t)(support_next(random) % size.vocabulary);
        for (size_t v = size.vocabulary; v < size.padded; v++)
            p.logits.host[r * size.padded + v] = v % 2 ? INFINITY : NAN; /* may hold anything */
    }
    support_array_write(&p.logits);
    p.targets[0] = (int32_t)size.vocabulary - 1;
    p.targets[1] = -100;
    p.targets[2] = (int32_t)size.vocabulary;
    p.device_targets = support_upload_ints(p.targets, size.rows);
    p.gradient = support_array_copy(&p.logits);
    p.loss = support_array_poisoned(RBK_F32, size.rows);
    p.device_scale = support_array_random(RBK_F32, 1, 1.0, random);
    p.want_loss = calloc(size.rows, sizeof *p.want_loss);
    p.want_gradient = calloc(count, sizeof *p.want_gradient);
    cr_assert(p.targets && p.want_loss && p.want_gradient);
    return p;
}

static void problem_destroy(problem *p)
{
    support_array_free(&p->logits);
    support_array_free(&p->gradient);
    support_array_free(&p->loss);
    support_array_free(&p->device_scale);
    support_must(cudaFree(p->device_targets), "cudaFree");
    free(p->targets);
    free(p->want_loss);
    free(p->want_gradient);
}

static void compute_reference(problem *p)
{
    const double scale = (double)SCALE * p->device_scale.host[0];
    for (size_t r = 0; r < p->shape.rows; r++) {
        const double *row = p->logits.host + r * p->shape.padded;
        double *gradient = p->want_gradient + r * p->shape.padded;
        if (p->targets[r] < 0 || (size_t)p->targets[r] >= p->shape.vocabulary)
            continue;
        double high = -INFINITY, sum = 0.0;
        for (size_t v = 0; v < p->shape.vocabulary; v++)
            high = fmax(high, row[v]);
        for (size_t v = 0; v < p->shape.vocabulary; v++)
            sum += exp(row[v] - high);
        const double log_sum = high + log(sum);
        p->want_loss[r] = log_sum - row[p->targets[r]];
        for (size_t v = 0; v < p->shape.vocabulary; v++)
            gradient[v] = exp(row[v] - log_sum) * scale;
        gradient[p->targets[r]] -= scale;
    }
}

/* Rows [first, first + rows) in place in `logits`. */
static void run(const problem *p, support_array *logits, support_array *loss, size_t first,
                size_t rows, bool write)
{
    support_must(rbk_cross_entropy(
                     support_float_at(loss, first), support_at(logits, first * p->shape.padded),
                     p->device_targets + first, rows, p->shape.vocabulary, p->shape.padded, SCALE,
                     p->device_scale.device, write, p->dtype, NULL),
                 "cross-entropy");
}

static void check_cross_entropy(problem *p)
{
    const size_t rows = p->shape.rows, count = rows * p->shape.padded;
    compute_reference(p);
    run(p, &p->gradient, &p->loss, 0, rows, true);
    support_expect_close(&p->loss, p->want_loss, 1e-5, "cross-entropy: loss");
    support_expect_close(&p->gradient, p->want_gradient, support_tolerance(p->dtype),
                         "cross-entropy: gradient");
    for (size_t r = 0; r < rows; r++)
        for (size_t v = p->shape.vocabulary; v < p->shape.padded; v++)
            cr_assert(p->gradient.host[r * p->shape.padded + v] == 0.0, "padding has a gradient");

    /* without the gradient the logits stay; row by row everything has the same bits */
    support_array loss = support_array_poisoned(RBK_F32, rows);
    support_array logits = support_array_copy(&p->logits);
    run(p, &logits, &loss, 0, rows, false);
    support_expect_same(&loss, 0, &p->loss, 0, rows, "cross-entropy: loss alone");
    support_expect_same(&logits, 0, &p->logits, 0, count, "cross-entropy: logits kept");
    for (size_t r = 0; r < rows; r++)
        run(p, &logits, &loss, r, 1, true);
    support_expect_same(&loss, 0, &p->loss, 0, rows, "cross-entropy: loss, row by row");
    support_expect_same(&logits, 0, &p->gradient, 0, count, "cross-entropy: gradient, row by row");
    support_array_free(&loss);
    support_array_free(&logits);
}

Test(kernels_loss, cross_entropy)
{
    support_random random = {501};
    for (int d = 0; d < DTYPE_COUNT; d++) {
        for (size_t s = 0; s < SHAPE_COUNT; s++) {
            problem p = problem_create(shapes[s], support_dtypes[d], &random);
            check_cross_entropy(&p);
            problem_destroy(&p);
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
    run(&p, &p.logits, &p.loss, 0, p.shape.rows, true);
    support_array_read(&p.loss);
    cr_assert(isnan(p.loss.host[3]));
    cr_assert(isfinite(p.loss.host[4]));
    problem_destroy(&p);
}

Test(kernels_loss, sum)
{
    enum { LENGTH = 75, BATCH = SUPPORT_CUT_BATCH };
    support_random random = {503};
    support_array loss = support_array_random(RBK_F32, BATCH * LENGTH, 1.0, &random);
    support_array start = support_array_random(RBK_F32, 1, 1.0, &random);
    support_array whole = support_array_copy(&start);
    double want = 0.0;
    for (size_t i = 0; i < BATCH * LENGTH; i++)
        want += loss.host[i];
    want = start.host[0] + want * 0.25;
    support_must(rbk_loss_sum(whole.device, loss.device, 0.25f, BATCH, LENGTH, NULL), "loss sum");
    support_expect_close(&whole, &want, 1e-5, "loss sum");
    for (int c = 0; c < SUPPORT_CUT_COUNT; c++) {
        support_array cut = support_array_copy(&start);
        size_t first = 0;
        for (const size_t *count = support_cuts[c]; *count > 0; first += *count++)
            support_must(rbk_loss_sum(cut.device, support_float_at(&loss, first * LENGTH), 0.25f,
                                      *count, LENGTH, NULL),
                         "loss sum, cut");
        support_expect_same(&cut, 0, &whole, 0, 1, "loss sum, cut");
        support_array_free(&cut);
    }
    support_array_free(&loss);
    support_array_free(&start);
    support_array_free(&whole);
}

/* More samples than the block brings in at once. */
Test(kernels_loss, sum_of_many_samples)
{
    enum { LENGTH = 3, BATCH = 100 };
    support_random random = {504};
    support_array loss = support_array_random(RBK_F32, BATCH * LENGTH, 1.0, &random);
    support_array whole = support_array_random(RBK_F32, 1, 1.0, &random);
    support_array cut = support_array_copy(&whole);
    double want = whole.host[0];
    for (size_t i = 0; i < BATCH * LENGTH; i++)
        want += loss.host[i];
    support_must(rbk_loss_sum(whole.device, loss.device, 1.0f, BATCH, LENGTH, NULL), "loss sum");
    support_expect_close(&whole, &want, 1e-5, "loss sum of many samples");
    for (size_t b = 0; b < BATCH; b += 50)
        support_must(
            rbk_loss_sum(cut.device, support_float_at(&loss, b * LENGTH), 1.0f, 50, LENGTH, NULL),
            "loss sum, cut");
    support_expect_same(&cut, 0, &whole, 0, 1, "loss sum of many samples, cut");
    support_array_free(&loss);
    support_array_free(&whole);
    support_array_free(&cut);
}
