/* Owns the tests of every host operation against the reference in double.
 * Must not know private headers of the library. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

#include "gpt/error.h"
#include "gpt_host.h"
#include "gpt_reference.h"

TestSuite(gpt_ops, .init = set_up, .fini = tear_down);

/* ---- embedding ---- */

static int32_t *random_tokens(size_t count, size_t length, size_t vocabulary, uint64_t *state)
{
    const size_t all = count * (length + 1);
    float *uniform = random_floats(all, 1.0f, state);
    int32_t *tokens = (int32_t *)(void *)zero_floats(all);
    for (size_t i = 0; i < all; i++)
        tokens[i] = (int32_t)((uniform[i] + 1.0f) * 0.5f * (float)vocabulary);
    return tokens;
}

Test(gpt_ops, embedding, .description = "seed 11")
{
    uint64_t state = 11;
    const size_t count = 3, T = 5, C = 48, V = 7;
    const struct gpt_tokens tokens = {random_tokens(count, T, V, &state), count, T};
    const float *table = random_floats(V * C, 1.0f, &state);
    const float *positions = random_floats(T * C, 1.0f, &state);
    const float *dx = random_floats(count * T * C, 1.0f, &state);
    float *x = poisoned_floats(count * T * C);
    float *dtable = random_floats(V * C, 1.0f, &state);
    float *dpositions = random_floats(T * C, 1.0f, &state);
    double *want = zero_doubles(count * T * C);
    double *want_table = to_doubles(dtable, V * C);
    double *want_positions = to_doubles(dpositions, T * C);
    for (size_t i = 0; i < count * T * C; i++) {
        const size_t row = i / C, t = row % T;
        const size_t token = (size_t)tokens.tokens[row / T * (T + 1) + t];
        want[i] = (double)table[token * C + i % C] + (double)positions[t * C + i % C];
        want_table[token * C + i % C] += (double)dx[i];
        want_positions[t * C + i % C] += (double)dx[i];
    }
    ASSERT_OK(ops->embedding_forward(&queue, x, &tokens, table, positions, C));
    ASSERT_OK(ops->embedding_backward(&queue, dtable, dpositions, dx, &tokens, C));
    ASSERT_CLOSE(x, want, count * T * C);
    ASSERT_CLOSE(dtable, want_table, V * C);
    ASSERT_CLOSE(dpositions, want_positions, T * C);
}

/* ---- layer norm ---- */

static void check_layernorm(size_t rows, size_t C, uint64_t *state)
{
    const float *x = random_floats(rows * C, 3.0f, state);
    const float *gamma = random_floats(C, 1.0f, state), *beta = random_floats(C, 1.0f, state);
    float *y = poisoned_floats(rows * C);
    float *mean = poisoned_floats(rows), *rstd = poisoned_floats(rows);
    double *want = zero_doubles(rows * C), *want_mean = zero_doubles(rows);
    double *want_rstd = zero_doubles(rows);
    const double *wide_x = to_doubles(x, rows * C), *wide_gamma = to_doubles(gamma, C);
    reference_layernorm(want, want_mean, want_rstd, wide_x, wide_gamma, to_doubles(beta, C), rows,
                        C);
    ASSERT_OK(ops->layernorm_forward(&queue, y, mean, rstd, x, gamma, beta, rows, C));
    ASSERT_CLOSE(y, want, rows * C);
    ASSERT_CLOSE(mean, want_mean, rows);
    ASSERT_CLOSE(rstd, want_rstd, rows);

    const float *dy = random_floats(rows * C, 1.0f, state);
    float *dgamma = random_floats(C, 1.0f, state), *dbeta = random_floats(C, 1.0f, state);
    float *dx = poisoned_floats(rows * C), *sum = random_floats(rows * C, 1.0f, state);
    double *want_sum = to_doubles(sum, rows * C), *want_dx = zero_doubles(rows * C);
    double *want_dgamma = to_doubles(dgamma, C), *want_dbeta = to_doubles(dbeta, C);
    reference_layernorm_backward(want_dx, want_dgamma, want_dbeta, to_doubles(dy, rows * C), wide_x,
                                 wide_gamma, rows, C);
    ASSERT_OK(ops->layernorm_backward(&queue, dx, dgamma, dbeta, dy, x, mean, rstd, gamma, rows, C,
                                      false));
    ASSERT_CLOSE(dx, want_dx, rows * C);
    ASSERT_CLOSE(dgamma, want_dgamma, C);
    ASSERT_CLOSE(dbeta, want_dbeta, C);
    for (size_t i = 0; i < rows * C; i++)
        want_sum[i] += want_dx[i];
    ASSERT_OK(ops->layernorm_backward(&queue, sum, dgamma, dbeta, dy, x, mean, rstd, gamma, rows, C,
                                      true));
    ASSERT_CLOSE(sum, want_sum, rows * C);
}

Test(gpt_ops, layernorm, .description = "seed 12")
{
    uint64_t state = 12;
    check_layernorm(1, 64, &state);
    check_layernorm(37, 128, &state);
    check_layernorm(300, 75, &state); /* a length that is no number of lanes */
}

/* ---- matrix product ---- */

static void check_matmul(size_t rows, size_t inputs, size_t outputs, bool transposed,
                         uint64_t *state)
{
    const struct gpt_matmul shape = {rows, inputs, outputs, transposed};
    const float *x = random_floats(rows * inputs, 1.0f, state);
    const float *w = random_floats(inputs * outputs, 1.0f, state);
    const float *bias = random_floats(outputs, 1.0f, state);
    const double *wide_x = to_doubles(x, rows * inputs);
    const double *wide_w = to_doubles(w, inputs * outputs);
    double *want = zero_doubles(rows * outputs);
    float *y = poisoned_floats(rows * outputs);
    reference_matmul(want, wide_x, wide_w, to_doubles(bias, outputs), rows, outputs, inputs,
                     transposed);
    ASSERT_OK(ops->matmul_forward(&queue, y, x, w, bias, &shape));
    ASSERT_CLOSE(y, want, rows * outputs);
    reference_matmul(want, wide_x, wide_w, NULL, rows, outputs, inputs, transposed);
    ASSERT_OK(ops->matmul_forward(&queue, y, x, w, NULL, &shape));
    ASSERT_CLOSE(y, want, rows * outputs);

    const float *dy = random_floats(rows * outputs, 1.0f, state);
    const double *wide_dy = to_doubles(dy, rows * outputs);
    float *dx = poisoned_floats(rows * inputs);
    double *want_dx = zero_doubles(rows * inputs);
    reference_matmul(want_dx, wide_dy, wide_w, NULL, rows, inputs, outputs, !transposed);
    ASSERT_OK(ops->matmul_backward_input(&queue, dx, dy, w, &shape));
    ASSERT_CLOSE(dx, want_dx, rows * inputs);

    float *dw = random_floats(inputs * outputs, 1.0f, state);
    float *dbias = random_floats(outputs, 1.0f, state);
    double *want_dw = to_doubles(dw, inputs * outputs), *want_dbias = to_doubles(dbias, outputs);
    for (size_t row = 0; row < rows; row++)
        for (size_t j = 0; j < outputs; j++) {
            want_dbias[j] += wide_dy[row * outputs + j];
            for (size_t i = 0; i < inputs; i++)
                want_dw[transposed ? j * inputs + i : i * outputs + j] +=
                    wide_x[row * inputs + i] * wide_dy[row * outputs + j];
        }
    ASSERT_OK(ops->matmul_backward_weight(&queue, dw, dbias, dy, x, &shape));
    ASSERT_CLOSE(dw, want_dw, inputs * outputs);
    ASSERT_CLOSE(dbias, want_dbias, outputs);
    ASSERT_OK(ops->matmul_backward_weight(&queue, dw, NULL, dy, x, &shape));
}

static void check_matmuls(uint64_t *state)
{
    static const size_t shapes[][3] = {{1, 1, 1},     {1, 64, 192},  {7, 13, 5},   {64, 128, 33},
                                       {70, 257, 96}, {193, 64, 31}, {12, 600, 32}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check_matmul(shapes[i][0], shapes[i][1], shapes[i][2], false, state);
        check_matmul(shapes[i][0], shapes[i][1], shapes[i][2], true, state);
    }
}

Test(gpt_ops, matmul, .description = "seed 13, with every instruction set that the machine has")
{
    uint64_t state = 13;
    for (int isa = GPT_ISA_PORTABLE; isa <= GPT_ISA_AVX512; isa++)
        if (gpt_isa_force((enum gpt_isa)isa))
            check_matmuls(&state);
}

/* ---- attention ---- */

static void check_attention(size_t count, size_t T, size_t heads, size_t width, float scale,
                            uint64_t *state)
{
    const struct gpt_attention shape = {count, T, heads, width};
    const size_t rows = count * T, C = heads * width;
    const float *qkv = random_floats(rows * 3 * C, scale, state);
    const float *dout = random_floats(rows * C, 1.0f, state);
    float *out = poisoned_floats(rows * C), *log_sums = poisoned_floats(rows * heads);
    float *dqkv = poisoned_floats(rows * 3 * C);
    double *want = zero_doubles(rows * C), *want_sums = zero_doubles(rows * heads);
    double *want_dqkv = zero_doubles(rows * 3 * C);
    const double *wide = to_doubles(qkv, rows * 3 * C);
    reference_attention(want, want_sums, wide, &shape);
    reference_attention_backward(want_dqkv, to_doubles(dout, rows * C), wide, &shape);
    ASSERT_OK(ops->attention_forward(&queue, out, log_sums, qkv, &shape));
    ASSERT_OK(ops->attention_backward(&queue, dqkv, dout, out, qkv, log_sums, &shape));
    ASSERT_CLOSE(out, want, rows * C);
    ASSERT_CLOSE(log_sums, want_sums, rows * heads);
    ASSERT_CLOSE(dqkv, want_dqkv, rows * 3 * C);
}

Test(gpt_ops, attention, .description = "seed 14: lengths below, at and beyond a block")
{
    uint64_t state = 14;
    check_attention(2, 1, 2, 32, 1.0f, &state);
    check_attention(3, 32, 2, 32, 1.0f, &state);
    check_attention(1, 64, 3, 16, 2.0f, &state);
    check_attention(2, 70, 2, 20, 1.0f, &state);
    check_attention(1, 150, 1, 128, 1.5f, &state);
}

Test(gpt_ops, attention_refuses_wide_heads)
{
    const struct gpt_attention shape = {1, 1, 1, GPT_HEAD_WIDTH_MOST + 1};
    float none[3 * (GPT_HEAD_WIDTH_MOST + 1)] = {0};
    ASSERT_ERROR(ops->attention_forward(&queue, none, none, none, &shape), REBATCH_E_INVALID,
                 "width is 129");
    ASSERT_ERROR(ops->attention_backward(&queue, none, none, none, none, none, &shape),
                 REBATCH_E_INVALID, "width is 129");
}

/* ---- GELU, exp ---- */

Test(gpt_ops, gelu, .description = "seed 15")
{
    uint64_t state = 15;
    const size_t count = 20011;
    float *x = random_floats(count, 8.0f, &state);
    const float edges[] = {0.0f, -0.0f, 50.0f, -50.0f, 1e-20f, -1e-20f, 300.0f, -300.0f, 13.0f};
    memcpy(x, edges, sizeof edges);
    float *y = poisoned_floats(count), *dy = random_floats(count, 1.0f, &state);
    double *want = zero_doubles(count), *want_dy = to_doubles(dy, count);
    for (size_t i = 0; i < count; i++) {
        want[i] = reference_gelu((double)x[i]);
        want_dy[i] *= reference_gelu_slope((double)x[i]);
    }
    ASSERT_OK(ops->gelu_forward(&queue, y, x, count));
    ASSERT_OK(ops->gelu_backward(&queue, dy, x, count));
    ASSERT_CLOSE(y, want, count);
    ASSERT_CLOSE(dy, want_dy, count);
}

Test(gpt_ops, exp, .description = "2 units in the last place all over its range")
{
    for (float x = -87.0f; x < 88.0f; x += 0.00137f) {
        const double want = exp((double)x);
        cr_assert(fabs((double)gpt_exp(x) - want) <= 2.0 * (double)FLT_EPSILON * want,
                  "exp(%.9g) = %.9g", (double)x, (double)gpt_exp(x));
    }
    cr_assert_eq(gpt_exp(0.0f), 1.0f);
    cr_assert_eq(gpt_exp(-88.0f), 0.0f);
    cr_assert_eq(gpt_exp(-INFINITY), 0.0f);
    cr_assert_eq(gpt_exp(1000.0f), gpt_exp(88.0f));
    cr_assert(isnan(gpt_exp(NAN)));
}

/* ---- dropout ---- */

static void check_dropout(const struct gpt_dropout *dropout, size_t samples, size_t elements,
                          bool with_residual, uint64_t *state)
{
    const size_t count = samples * elements;
    const float *x = random_floats(count, 1.0f, state);
    const float *residual = with_residual ? random_floats(count, 1.0f, state) : NULL;
    float *out = poisoned_floats(count);
    double *want = zero_doubles(count);
    size_t dropped = 0;
    for (size_t i = 0; i < count; i++) {
        const double factor = reference_dropout(dropout, i / elements, i % elements);
        want[i] = factor * (double)x[i] + (residual ? (double)residual[i] : 0.0);
        dropped += factor == 0.0;
    }
    ASSERT_OK(ops->dropout_add(&queue, out, residual, x, samples, elements, dropout));
    ASSERT_CLOSE(out, want, count);
    const double share = (double)dropped / (double)count;
    const double probability = (double)dropout->probability;
    /* Five deviations of the binomial distribution. */
    cr_assert_leq(fabs(share - probability),
                  5.0 * sqrt(probability * (1.0 - probability) / (double)count));
}

Test(gpt_ops, dropout, .description = "seed 16: exactly the elements that the definition names")
{
    uint64_t state = 16;
    const struct gpt_dropout some = {0.1f, 0x123456789abcdef0u, 3, 7, 1000};
    const struct gpt_dropout half = {0.5f, 5, 0, 0, 0};
    const struct gpt_dropout none = {0.0f, 5, 0, 0, 0};
    check_dropout(&some, 3, 64 * 32, true, &state);
    check_dropout(&some, 2, 1003, false, &state);
    check_dropout(&half, 5, 777, true, &state);
    check_dropout(&none, 2, 500, true, &state);
    check_dropout(&none, 2, 500, false, &state);
}

Test(gpt_ops, dropout_refuses_what_is_no_probability)
{
    float one[4] = {0};
    struct gpt_dropout dropout = {.probability = 1.0f};
    ASSERT_ERROR(ops->dropout_add(&queue, one, NULL, one, 1, 4, &dropout), REBATCH_E_INVALID,
                 "dropout is 1");
    dropout.probability = NAN;
    ASSERT_ERROR(ops->dropout_add(&queue, one, NULL, one, 1, 4, &dropout), REBATCH_E_INVALID,
                 "dropout is nan");
    dropout.probability = -0.5f;
    ASSERT_ERROR(ops->dropout_add(&queue, one, NULL, one, 1, 4, &dropout), REBATCH_E_INVALID,
                 "dropout is -0.5");
}

/* ---- loss ---- */

static void check_cross_entropy(size_t V, float spread, uint64_t *state)
{
    const size_t count = 3, T = 9, rows = count * T;
    const float scale = 0.125f;
    const struct gpt_tokens tokens = {random_tokens(count, T, V, state), count, T};
    float *logits = random_floats(rows * V, spread, state);
    float *same = zero_floats(rows * V);
    memcpy(same, logits, rows * V * sizeof *same);
    const double *wide = to_doubles(logits, rows * V);
    float *losses = poisoned_floats(rows), *again = poisoned_floats(rows);
    double *want = zero_doubles(rows), *want_slopes = zero_doubles(rows * V);
    for (size_t row = 0; row < rows; row++) {
        const size_t target = (size_t)tokens.tokens[row / T * (T + 1) + row % T + 1];
        want[row] = reference_cross_entropy(want_slopes + row * V, wide + row * V, V, target);
    }
    for (size_t i = 0; i < rows * V; i++)
        want_slopes[i] *= (double)scale;
    ASSERT_OK(ops->cross_entropy(&queue, again, same, &tokens, V, 0.0f));
    ASSERT_OK(ops->cross_entropy(&queue, losses, logits, &tokens, V, scale));
    ASSERT_CLOSE(losses, want, rows);
    ASSERT_CLOSE(logits, want_slopes, rows * V);
    cr_assert_arr_eq(again, losses, rows * sizeof *losses);
    for (size_t i = 0; i < rows * V; i++)
        cr_assert_eq((double)same[i], wide[i], "a scale of 0 changed logits");
}

Test(gpt_ops, cross_entropy, .description = "seed 17")
{
    uint64_t state = 17;
    check_cross_entropy(256, 1.0f, &state);
    check_cross_entropy(259, 30.0f, &state);
    check_cross_entropy(2, 500.0f, &state);
}

Test(gpt_ops, sum_losses, .description = "seed 18: the same in two calls")
{
    uint64_t state = 18;
    const size_t rows = 5000;
    const float *losses = random_floats(rows, 3.0f, &state);
    double whole = 0.5, parts = 0.5, want = 0.5;
    for (size_t i = 0; i < rows; i++)
        want += (double)losses[i];
    ASSERT_OK(ops->sum_losses(&queue, &whole, losses, rows));
    ASSERT_OK(ops->sum_losses(&queue, &parts, losses, 1234));
    ASSERT_OK(ops->sum_losses(&queue, &parts, losses + 1234, rows - 1234));
    cr_assert_eq(whole, want);
    cr_assert_eq(parts, want);
}

/* ---- update ---- */

Test(gpt_ops, add, .description = "seed 19")
{
    uint64_t state = 19;
    const size_t count = 10007;
    const float *x = random_floats(count, 1.0f, &state);
    float *y = random_floats(count, 1.0f, &state);
    double *want = to_doubles(y, count);
    for (size_t i = 0; i < count; i++)
        want[i] += (double)x[i];
    ASSERT_OK(ops->add(&queue, y, x, count));
    ASSERT_CLOSE(y, want, count);
}

Test(gpt_ops, norm_and_clip, .description = "seed 20")
{
    uint64_t state = 20;
    const size_t count = 2 * GPT_NORM_CHUNK + 77;
    const float *x = random_floats(count, 1.0f, &state);
    double partials[3] = {NAN, NAN, NAN}, want = 0.0;
    float result[2] = {NAN, NAN};
    for (size_t i = 0; i < count; i++)
        want += (double)x[i] * (double)x[i];
    want = sqrt(want);
    ASSERT_OK(ops->sum_squares(&queue, partials, x, count));
    ASSERT_OK(ops->clip_scale(&queue, result, partials, 3, 0.25f, NULL));
    cr_assert_float_eq((double)result[0] / want, 1.0, 1e-6);
    cr_assert_float_eq((double)result[1] * want, 0.25, 1e-6);
    ASSERT_OK(ops->clip_scale(&queue, result, partials, 3, 1e6f, NULL)); /* small enough already */
    cr_assert_eq(result[1], 1.0f);
    ASSERT_OK(ops->clip_scale(&queue, result, partials, 3, 0.0f, NULL)); /* no clipping */
    cr_assert_eq(result[1], 1.0f);
    const float inverse = 0.0009765625f; /* of a loss scale of 1024 */
    ASSERT_OK(ops->clip_scale(&queue, result, partials, 3, 0.25f / 1024.0f, &inverse));
    cr_assert_float_eq((double)result[0] / want * 1024.0, 1.0, 1e-6);
    cr_assert_float_eq((double)result[1] * want, 0.25, 1e-6);
}

Test(gpt_ops, finite_or_not, .description = "seed 22")
{
    static const float bad[] = {INFINITY, -INFINITY, NAN};
    uint64_t state = 22;
    const size_t count = 40009;
    float *x = random_floats(count, FLT_MAX, &state);
    uint32_t flag = 0;
    ASSERT_OK(ops->check_finite(&queue, &flag, x, count));
    cr_assert_eq(flag, 0);
    for (size_t at = 0; at < count; at += 4001)
        for (size_t i = 0; i < 3; i++) {
            const float good = x[at];
            x[at] = bad[i];
            flag = 0;
            ASSERT_OK(ops->check_finite(&queue, &flag, x, count));
            cr_assert_eq(flag, 1, "%g at %zu", (double)bad[i], at);
            x[at] = good;
        }
    ASSERT_OK(ops->check_finite(&queue, &flag, x, count)); /* it stays as it is */
    cr_assert_eq(flag, 1);
}

Test(gpt_ops, adamw, .description = "seed 21: three updates")
{
    uint64_t state = 21;
    const size_t count = 1000;
    float *w = random_floats(count, 1.0f, &state);
    float *m = zero_floats(count), *v = zero_floats(count);
    double *want_w = to_doubles(w, count);
    double *want_m = zero_doubles(count), *want_v = zero_doubles(count);
    const float scale = 0.5f, inverse = 0.0625f;
    struct gpt_adamw s = {0.01f, 0.9f, 0.99f, 1e-8f, 0.1f, 0};
    for (s.update = 1; s.update <= 3; s.update++) {
        const float *g = random_floats(count, 1.0f, &state);
        const double b1 = (double)s.beta1, b2 = (double)s.beta2, n = (double)s.update;
        for (size_t i = 0; i < count; i++) {
            const double slope = (double)g[i] * (double)inverse * (double)scale;
            want_m[i] = b1 * want_m[i] + (1.0 - b1) * slope;
            want_v[i] = b2 * want_v[i] + (1.0 - b2) * slope * slope;
            const double towards = want_m[i] / (1.0 - pow(b1, n)) /
                                   (sqrt(want_v[i] / (1.0 - pow(b2, n))) + (double)s.epsilon);
            want_w[i] -= (double)s.learning_rate * (towards + (double)s.weight_decay * want_w[i]);
        }
        const struct gpt_adamw_arrays arrays = {w, m, v, NULL, g, &inverse, &scale, count};
        ASSERT_OK(ops->adamw(&queue, &arrays, &s));
    }
    ASSERT_CLOSE(w, want_w, count);
    ASSERT_CLOSE(m, want_m, count);
    ASSERT_CLOSE(v, want_v, count);
}
