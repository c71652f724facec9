/* Owns the tests of a weight's gradient. Must not know: the kernels' insides. Run with -j1. */
#include <string.h>

#include <criterion/criterion.h>

#include "kernels_support.h"

TestSuite(kernels_weight_gradient, .fini = support_free_all);

typedef cudaError_t operation(float *grad, const void *a, const void *b, size_t batch,
                              size_t length, size_t rows, size_t columns, rbk_dtype dtype,
                              cudaStream_t stream);

typedef struct problem {
    rbk_dtype dtype;
    size_t batch, length, rows, columns;
    support_array grad, a, b; /* grad: what is there before */
} problem;

static problem problem_create(rbk_dtype dtype, size_t batch, size_t length, size_t rows,
                              size_t columns, support_random *random)
{
    const problem p = {dtype,
                       batch,
                       length,
                       rows,
                       columns,
                       support_array_random(RBK_F32, rows * columns, 3.0, random),
                       support_array_random(dtype, batch * length * rows, 1.0, random),
                       support_array_random(dtype, batch * length * columns, 1.0, random)};
    return p;
}

/* Samples [first, first + count) join `grad`. */
static void add(const problem *p, operation *op, support_array *grad, size_t first, size_t count)
{
    support_must(op(grad->device, support_at(&p->a, first * p->length * p->rows),
                    support_at(&p->b, first * p->length * p->columns), count, p->length, p->rows,
                    p->columns, p->dtype, NULL),
                 "the gradient of a weight");
}

static double *reference(const problem *p)
{
    double *want = support_calloc(p->rows * p->columns, sizeof(double));
    memcpy(want, p->grad.host, p->rows * p->columns * sizeof *want);
    for (size_t k = 0; k < p->batch * p->length; k++)
        for (size_t m = 0; m < p->rows; m++) {
            const double a = p->a.host[k * p->rows + m];
            const double *b = p->b.host + k * p->columns;
            for (size_t n = 0; n < p->columns; n++)
                want[m * p->columns + n] += a * b[n];
        }
    return want;
}

/* Products of 16-bit numbers are exact in fp32: what is off comes from the sum alone. */
static double tolerance(const problem *p)
{
    return p->dtype == RBK_F32 ? 1e-5 : 1e-4;
}

/* Against the sum in double, and cut in every way. */
static void check(problem *p, operation *op)
{
    double *want = reference(p);
    support_array whole = support_array_copy(&p->grad);
    add(p, op, &whole, 0, p->batch);
    support_expect_close(&whole, want, tolerance(p), "the gradient of a weight");
    for (size_t c = 0; c < SUPPORT_CUT_COUNT && p->batch == SUPPORT_CUT_BATCH;
         c += support_stride()) {
        support_array grad = support_array_copy(&p->grad);
        for (size_t i = 0, first = 0; support_cuts[c][i]; first += support_cuts[c][i++])
            add(p, op, &grad, first, support_cuts[c][i]);
        support_expect_same(&whole, 0, &grad, 0, p->rows * p->columns, "cut samples");
    }
}

/* Tiles that are not full in both directions; lengths that fill no step, one, and several with a
 * rest; a product of one position. */
static void check_shapes(operation *op, support_random *random)
{
    static const size_t shapes[][3] = {{1, 8, 8},      {5, 24, 136},   {16, 64, 64},
                                       {33, 200, 328}, {64, 128, 256}, {65, 72, 104},
                                       {96, 384, 96},  {130, 256, 128}};
    const size_t count = sizeof shapes / sizeof *shapes;
    for (size_t i = 0; i < count * DTYPE_COUNT; i += support_stride()) {
        const size_t *shape = shapes[i % count];
        problem p = problem_create(support_dtypes[i / count], SUPPORT_CUT_BATCH, shape[0], shape[1],
                                   shape[2], random);
        check(&p, op);
        support_free_all();
    }
}

Test(kernels_weight_gradient, against_a_sum_in_double, .description = "seed 61")
{
    support_random random = {61};
    check_shapes(rbk_weight_gradient, &random);
}

Test(kernels_weight_gradient, portable_against_a_sum_in_double, .description = "seed 62")
{
    support_random random = {62};
    check_shapes(rbk_weight_gradient_portable, &random);
}

/* So many tiles that large ones are taken, of a model's shapes: every tile size runs. */
static void check_large(operation *op, support_random *random)
{
    static const size_t shapes[][2] = {{768, 768},  {768, 2304}, {768, 3072},
                                       {3072, 768}, {5000, 768}, {1024, 4096}};
    for (size_t d = 0; d < DTYPE_COUNT; d++)
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
            problem p =
                problem_create(support_dtypes[d], 2, 40, shapes[i][0], shapes[i][1], random);
            check(&p, op);
            support_free_all();
        }
}

Test(kernels_weight_gradient, large, .description = "seed 63")
{
    support_random random = {63};
    check_large(rbk_weight_gradient, &random);
}

Test(kernels_weight_gradient, portable_large, .description = "seed 64")
{
    support_random random = {64};
    check_large(rbk_weight_gradient_portable, &random);
}

/* GPT-2's lengths, and every cut of 13 samples into two. */
static void check_cuts(operation *op, rbk_dtype dtype, size_t rows, size_t columns,
                       support_random *random)
{
    const size_t stride = support_stride(), length = 1024 / stride;
    problem p = problem_create(dtype, SUPPORT_CUT_BATCH, length, rows, columns, random);
    support_array whole = support_array_copy(&p.grad);
    add(&p, op, &whole, 0, p.batch);
    for (size_t cut = 1; cut < p.batch; cut += stride) {
        support_array grad = support_array_copy(&p.grad);
        add(&p, op, &grad, 0, cut);
        add(&p, op, &grad, cut, p.batch - cut);
        support_expect_same(&whole, 0, &grad, 0, rows * columns, "cut in two");
    }
    support_free_all();
}

Test(kernels_weight_gradient, every_cut, .description = "seed 65")
{
    support_random random = {65};
    const bool slow = support_stride() > 1; /* then the tensor cores' kernel alone */
    for (size_t d = 0; d < DTYPE_COUNT; d++) {
        if (slow && support_dtypes[d] != RBK_BF16)
            continue;
        check_cuts(rbk_weight_gradient, support_dtypes[d], 768, 768, &random);
        if (slow)
            continue;
        check_cuts(rbk_weight_gradient, support_dtypes[d], 3072, 768, &random);
        check_cuts(rbk_weight_gradient_portable, support_dtypes[d], 768, 768, &random);
    }
}
