/* Owns the tests of GELU, bias, residual, dropout, cast, scale and fill. Must not know: the
 * kernels' insides. Run with -j1. */
#include <math.h>
#include <string.h>

#include <criterion/criterion.h>

#include "kernels_support.h"

TestSuite(kernels_elementwise, .fini = support_free_all);

/* Not a multiple of 8, and more than one block. */
#define TAIL_COUNT 4099
#define ROWS 37
#define WIDTH 72

static double gelu(double x)
{
    return 0.5 * x * (1.0 + tanh(sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
}

static double gelu_derivative(double x)
{
    const double t = tanh(sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x));
    return 0.5 * (1.0 + t) +
           0.5 * x * (1.0 - t * t) * sqrt(2.0 / M_PI) * (1.0 + 3.0 * 0.044715 * x * x);
}

static void check_gelu(rbk_dtype dtype, support_random *random)
{
    support_array in = support_array_random(dtype, TAIL_COUNT, 3.0, random);
    support_array dout = support_array_random(dtype, TAIL_COUNT, 1.0, random);
    support_array out = support_array_poisoned(dtype, TAIL_COUNT);
    support_array din = support_array_poisoned(dtype, TAIL_COUNT);
    double *want = support_calloc(TAIL_COUNT, sizeof(double));

    support_must(rbk_gelu_forward(out.device, in.device, TAIL_COUNT, dtype, NULL), "gelu forward");
    for (size_t i = 0; i < TAIL_COUNT; i++)
        want[i] = gelu(in.host[i]);
    support_expect_close(&out, want, support_tolerance(dtype), "gelu forward");

    support_must(rbk_gelu_backward(din.device, dout.device, in.device, TAIL_COUNT, dtype, NULL),
                 "gelu backward");
    for (size_t i = 0; i < TAIL_COUNT; i++)
        want[i] = dout.host[i] * gelu_derivative(in.host[i]);
    support_expect_close(&din, want, support_tolerance(dtype), "gelu backward");

    /* an element's bits do not depend on where it stands */
    support_array part = support_array_poisoned(dtype, 11);
    support_must(rbk_gelu_forward(part.device, support_at(&in, 1024), 11, dtype, NULL), "gelu");
    support_expect_same(&part, 0, &out, 1024, 11, "gelu of a part");
}

Test(kernels_elementwise, gelu)
{
    support_each_dtype(check_gelu, 101);
}

static void check_bias_gelu(rbk_dtype dtype, support_random *random)
{
    const size_t count = ROWS * WIDTH;
    support_array in = support_array_random(dtype, count, 2.0, random);
    support_array bias = support_array_random(dtype, WIDTH, 1.0, random);
    support_array out = support_array_poisoned(dtype, count);
    support_array pre = support_array_poisoned(dtype, count);
    support_array again = support_array_poisoned(dtype, count);
    double *want = support_calloc(count, sizeof(double));

    support_must(rbk_bias_gelu_forward(out.device, pre.device, in.device, bias.device, ROWS, WIDTH,
                                       dtype, NULL),
                 "bias gelu");
    for (size_t i = 0; i < count; i++)
        want[i] = in.host[i] + bias.host[i % WIDTH];
    support_expect_close(&pre, want, support_tolerance(dtype), "bias gelu: pre");
    for (size_t i = 0; i < count; i++)
        want[i] = gelu(want[i]);
    support_expect_close(&out, want, support_tolerance(dtype), "bias gelu: out");

    support_must(rbk_gelu_forward(again.device, pre.device, count, dtype, NULL), "gelu");
    support_expect_same(&again, 0, &out, 0, count, "gelu of the kept pre");

    support_must(rbk_bias_gelu_forward(again.device, NULL, support_at(&in, 5 * WIDTH), bias.device,
                                       1, WIDTH, dtype, NULL),
                 "bias gelu of a row");
    support_expect_same(&again, 0, &out, 5 * WIDTH, WIDTH, "bias gelu of a row");

    support_must(rbk_bias_gelu_forward(again.device, in.device, in.device, bias.device, ROWS, WIDTH,
                                       dtype, NULL),
                 "bias gelu in place");
    support_expect_same(&again, 0, &out, 0, count, "bias gelu in place: out");
    support_expect_same(&in, 0, &pre, 0, count, "bias gelu in place: pre");
}

Test(kernels_elementwise, bias_gelu)
{
    support_each_dtype(check_bias_gelu, 102);
}

static void check_additions(rbk_dtype dtype, support_random *random)
{
    const size_t count = ROWS * WIDTH;
    support_array a = support_array_random(dtype, TAIL_COUNT, 1.0, random);
    support_array b = support_array_random(dtype, TAIL_COUNT, 1.0, random);
    support_array sum = support_array_poisoned(dtype, TAIL_COUNT);
    support_array biased = support_array_poisoned(dtype, count);
    double *want = support_calloc(TAIL_COUNT, sizeof(double));

    support_must(rbk_residual_add(sum.device, a.device, b.device, TAIL_COUNT, dtype, NULL), "add");
    for (size_t i = 0; i < TAIL_COUNT; i++)
        want[i] = a.host[i] + b.host[i];
    support_expect_close(&sum, want, support_tolerance(dtype), "residual add");

    support_must(rbk_bias_add(biased.device, a.device, b.device, ROWS, WIDTH, dtype, NULL),
                 "bias add");
    for (size_t i = 0; i < count; i++)
        want[i] = a.host[i] + b.host[i % WIDTH];
    support_expect_close(&biased, want, support_tolerance(dtype), "bias add");

    support_must(rbk_residual_add(a.device, a.device, b.device, TAIL_COUNT, dtype, NULL), "add");
    support_expect_same(&a, 0, &sum, 0, TAIL_COUNT, "residual add in place");
}

Test(kernels_elementwise, additions)
{
    support_each_dtype(check_additions, 103);
}

/* Several tiles of positions, the last one short; several blocks of channels, the last one short.
 * */
#define BIAS_LENGTH 70
#define BIAS_WIDTH 264

static void check_bias_backward(rbk_dtype dtype, support_random *random)
{
    const size_t sample = BIAS_LENGTH * BIAS_WIDTH, batch = SUPPORT_CUT_BATCH;
    const size_t bytes = rbk_bias_backward_scratch_bytes(batch, BIAS_LENGTH, BIAS_WIDTH);
    support_array dout = support_array_random(dtype, batch * sample, 1.0, random);
    support_array start = support_array_random(RBK_F32, BIAS_WIDTH, 1.0, random);
    support_array whole = support_array_copy(&start);
    void *scratch = support_scratch(bytes);
    double want[BIAS_WIDTH];

    memcpy(want, start.host, sizeof want);
    for (size_t i = 0; i < batch * sample; i++)
        want[i % BIAS_WIDTH] += dout.host[i];
    support_must(rbk_bias_backward(whole.device, dout.device, scratch, bytes, batch, BIAS_LENGTH,
                                   BIAS_WIDTH, dtype, NULL),
                 "bias backward");
    support_expect_close(&whole, want, 1e-5, "bias backward");

    for (int c = 0; c < SUPPORT_CUT_COUNT; c++) {
        support_array cut = support_array_copy(&start);
        size_t first = 0;
        for (const size_t *count = support_cuts[c]; *count > 0; first += *count++)
            support_must(rbk_bias_backward(cut.device, support_at(&dout, first * sample), scratch,
                                           bytes, *count, BIAS_LENGTH, BIAS_WIDTH, dtype, NULL),
                         "bias backward, cut");
        cr_assert(first == batch);
        support_expect_same(&cut, 0, &whole, 0, BIAS_WIDTH, "bias gradient, cut");
    }
}

Test(kernels_elementwise, bias_backward)
{
    support_each_dtype(check_bias_backward, 104);
}

/* Partial sums are added exactly in the order that the header promises. */
Test(kernels_elementwise, accumulate_partials_order)
{
    enum { BATCH = 71, PARTS = 9, COLUMNS = 45 };
    support_random random = {105};
    support_array partial = support_array_random(RBK_F32, BATCH * PARTS * COLUMNS, 1.0, &random);
    support_array sum = support_array_random(RBK_F32, COLUMNS, 1.0, &random);
    support_array want = support_array_copy(&sum);
    for (int column = 0; column < COLUMNS; column++) {
        float total = (float)sum.host[column];
        for (int b = 0; b < BATCH; b++) {
            float inner = 0.0f;
            for (int p = 0; p < PARTS; p++)
                inner += (float)partial.host[(b * PARTS + p) * COLUMNS + column];
            total += inner;
        }
        want.host[column] = total;
    }
    support_array_write(&want);
    support_must(rbk_accumulate_partials(sum.device, partial.device, BATCH, PARTS, COLUMNS, NULL),
                 "accumulate partials");
    support_expect_same(&sum, 0, &want, 0, COLUMNS, "accumulate partials");
}

/* ---- dropout ---- */

static void philox(uint32_t word[4], uint32_t key0, uint32_t key1)
{
    for (int round = 0; round < 10; round++) {
        const uint64_t even = UINT64_C(0xD2511F53) * word[0];
        const uint64_t odd = UINT64_C(0xCD9E8D57) * word[2];
        const uint32_t next[4] = {(uint32_t)(odd >> 32) ^ word[1] ^ key0, (uint32_t)odd,
                                  (uint32_t)(even >> 32) ^ word[3] ^ key1, (uint32_t)even};
        memcpy(word, next, sizeof next);
        key0 += UINT32_C(0x9E3779B9);
        key1 += UINT32_C(0xBB67AE85);
    }
}

/* The known answers that the generator's authors publish: they make the reference one. */
Test(kernels_elementwise, philox_reference)
{
    uint32_t zero[4] = {0, 0, 0, 0};
    philox(zero, 0, 0);
    cr_assert(zero[0] == 0x6627E8D5 && zero[1] == 0xE169C58D && zero[2] == 0xBC57AC4C &&
              zero[3] == 0x9B00DBD8);
    uint32_t pi[4] = {0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344};
    philox(pi, 0xA4093822, 0x299F31D0);
    cr_assert(pi[0] == 0xD16CFE09 && pi[1] == 0x94FDCCEB && pi[2] == 0x5001E420 &&
              pi[3] == 0x24126EA1);
}

static bool is_kept(const rbk_dropout_key *key, uint64_t sample, uint64_t element)
{
    uint32_t word[4] = {(uint32_t)(element / 4), (uint32_t)(key->first_sample + sample), key->site,
                        (uint32_t)key->step};
    philox(word, (uint32_t)key->seed, (uint32_t)(key->seed >> 32) ^ (uint32_t)(key->step >> 32));
    return word[element % 4] >= (uint32_t)floor((double)key->probability * 0x1p32);
}

#define DROP_BATCH 5
#define DROP_LENGTH 9

static const rbk_dropout_key drop_key = {UINT64_C(0x0123456789ABCDEF), UINT64_C(0x700000003), 11, 7,
                                         0.3f};

static void check_dropout(rbk_dtype dtype, support_random *random)
{
    const size_t elements = DROP_LENGTH * WIDTH, count = DROP_BATCH * elements;
    support_array in = support_array_random(dtype, count, 1.0, random);
    support_array out = support_array_poisoned(dtype, count);
    support_array part = support_array_poisoned(dtype, elements);
    double *want = support_calloc(count, sizeof(double));
    size_t dropped = 0;

    support_must(rbk_dropout(out.device, in.device, &drop_key, DROP_BATCH, elements, dtype, NULL),
                 "dropout");
    for (size_t i = 0; i < count; i++) {
        const bool kept = is_kept(&drop_key, i / elements, i % elements);
        want[i] = kept ? in.host[i] / (1.0 - drop_key.probability) : 0.0;
        dropped += !kept;
    }
    support_expect_close(&out, want, support_tolerance(dtype), "dropout");
    for (size_t i = 0; i < count; i++)
        cr_assert((out.host[i] == 0.0) == (want[i] == 0.0), "element %zu: wrongly %s", i,
                  want[i] == 0.0 ? "kept" : "dropped");
    cr_assert(fabs((double)dropped / (double)count - 0.3) < 0.05, "%zu of %zu dropped", dropped,
              count);

    rbk_dropout_key key = drop_key;
    key.first_sample += 3;
    support_must(
        rbk_dropout(part.device, support_at(&in, 3 * elements), &key, 1, elements, dtype, NULL),
        "dropout of a sample");
    support_expect_same(&part, 0, &out, 3 * elements, elements, "dropout of a sample");
    key.probability = 0.0f;
    support_must(rbk_dropout(out.device, in.device, &key, DROP_BATCH, elements, dtype, NULL),
                 "no dropout");
    support_expect_same(&out, 0, &in, 0, count, "no dropout");
}

Test(kernels_elementwise, dropout)
{
    support_each_dtype(check_dropout, 106);
}

static void check_bias_dropout_residual(rbk_dtype dtype, float probability, support_random *random)
{
    const size_t elements = DROP_LENGTH * WIDTH, count = DROP_BATCH * elements;
    rbk_dropout_key key = drop_key;
    key.probability = probability;
    support_array in = support_array_random(dtype, count, 1.0, random);
    support_array bias = support_array_random(dtype, WIDTH, 1.0, random);
    support_array residual = support_array_random(dtype, count, 1.0, random);
    support_array out = support_array_poisoned(dtype, count);
    support_array part = support_array_poisoned(dtype, 2 * elements);
    double *want = support_calloc(count, sizeof(double));

    support_must(rbk_bias_dropout_residual(out.device, in.device, bias.device, residual.device,
                                           &key, DROP_BATCH, DROP_LENGTH, WIDTH, dtype, NULL),
                 "bias dropout residual");
    for (size_t i = 0; i < count; i++) {
        const double x = in.host[i] + bias.host[i % WIDTH];
        const bool kept = is_kept(&key, i / elements, i % elements);
        want[i] = residual.host[i] + (kept ? x / (1.0 - key.probability) : 0.0);
    }
    support_expect_close(&out, want, support_tolerance(dtype), "bias dropout residual");

    key.first_sample += 2;
    support_must(rbk_bias_dropout_residual(part.device, support_at(&in, 2 * elements), bias.device,
                                           support_at(&residual, 2 * elements), &key, 2,
                                           DROP_LENGTH, WIDTH, dtype, NULL),
                 "bias dropout residual of two samples");
    support_expect_same(&part, 0, &out, 2 * elements, 2 * elements, "bias dropout residual");

    /* without bias and residual it is plain dropout */
    support_must(rbk_bias_dropout_residual(out.device, in.device, NULL, NULL, &drop_key, DROP_BATCH,
                                           DROP_LENGTH, WIDTH, dtype, NULL),
                 "dropout alone");
    support_must(
        rbk_dropout(residual.device, in.device, &drop_key, DROP_BATCH, elements, dtype, NULL),
        "dropout");
    support_array_read(&out);
    support_array_read(&residual);
    for (size_t i = 0; i < count; i++)
        cr_assert(out.host[i] == residual.host[i], "element %zu: %g, not %g", i, out.host[i],
                  residual.host[i]);
}

Test(kernels_elementwise, bias_dropout_residual)
{
    support_random random = {107};
    for (int d = 0; d < DTYPE_COUNT; d++) {
        check_bias_dropout_residual(support_dtypes[d], 0.3f, &random);
        check_bias_dropout_residual(support_dtypes[d], 0.0f, &random);
    }
}

/* ---- cast, scale, fill ---- */

/* Ties, subnormal numbers, the ends of the ranges, and what is no number. */
static const double cast_values[] = {
    0.0,     -0.0,    1.0,  1.00390625, 1.01171875, 0x1p-14, 0x1p-24,  0x1.8p-25, 0x1p-25, 65504.0,
    65519.0, 65520.0, -1e5, 3e38,       0x1.FFp127, 1e-38,   INFINITY, -INFINITY, NAN};

static void check_cast(rbk_dtype from, rbk_dtype to, support_random *random)
{
    support_array in = support_array_random(from, TAIL_COUNT, 100.0, random);
    for (size_t i = 0; i < sizeof cast_values / sizeof *cast_values; i++)
        in.host[i] = support_round(from, cast_values[i]);
    support_array_write(&in);
    support_array out = support_array_poisoned(to, TAIL_COUNT);
    support_must(rbk_cast(out.device, to, in.device, from, TAIL_COUNT, NULL), "cast");
    support_array_read(&out);
    for (size_t i = 0; i < TAIL_COUNT; i++) {
        const double want = support_round(to, in.host[i]);
        cr_assert(isnan(want) ? isnan(out.host[i])
                              : out.host[i] == want && signbit(out.host[i]) == signbit(want),
                  "cast of %.17g from %s to %s gives %.17g, not %.17g", in.host[i],
                  support_dtype_name(from), support_dtype_name(to), out.host[i], want);
    }
}

Test(kernels_elementwise, cast)
{
    support_random random = {108};
    for (int from = 0; from < DTYPE_COUNT; from++)
        for (int to = 0; to < DTYPE_COUNT; to++)
            check_cast(support_dtypes[from], support_dtypes[to], &random);
}

static void check_scale_and_fill(rbk_dtype dtype, support_random *random)
{
    support_array data = support_array_random(dtype, TAIL_COUNT, 1.0, random);
    support_array factor = support_array_random(RBK_F32, 1, 1.0, random);
    double *want = support_calloc(TAIL_COUNT, sizeof(double));
    for (size_t i = 0; i < TAIL_COUNT; i++)
        want[i] = data.host[i] * 0.75;
    support_must(rbk_scale(data.device, 0.75f, NULL, TAIL_COUNT, dtype, NULL), "scale");
    support_expect_close(&data, want, support_tolerance(dtype), "scale");
    for (size_t i = 0; i < TAIL_COUNT; i++)
        want[i] = data.host[i] * -3.0 * factor.host[0];
    support_must(rbk_scale(data.device, -3.0f, factor.device, TAIL_COUNT, dtype, NULL), "scale");
    support_expect_close(&data, want, support_tolerance(dtype), "scale by a device factor");

    support_must(rbk_fill(data.device, -2.5f, TAIL_COUNT - 1, dtype, NULL), "fill");
    const double last = data.host[TAIL_COUNT - 1];
    support_array_read(&data);
    for (size_t i = 0; i < TAIL_COUNT - 1; i++)
        cr_assert(data.host[i] == -2.5, "fill left %g at %zu", data.host[i], i);
    cr_assert(data.host[TAIL_COUNT - 1] == last, "fill wrote past its count");
}

Test(kernels_elementwise, scale_and_fill)
{
    support_each_dtype(check_scale_and_fill, 109);
}
