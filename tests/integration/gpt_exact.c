/* Owns the tests that operations give the same bits however the work is cut: over calls, rows,
 * threads and instruction sets. Must not know private headers of the library. */
#include <string.h>

#include <criterion/criterion.h>

#include "gpt/error.h"
#include "gpt_host.h"

TestSuite(gpt_exact, .init = set_up, .fini = tear_down);

#define ASSERT_SAME(got, want, count, ...)                                                         \
    cr_assert(memcmp((got), (want), (count) * sizeof *(got)) == 0, __VA_ARGS__)

/* Calls `check` with every instruction set and 1 to 3 threads. */
static void on_every_machine(void (*check)(uint64_t *state), uint64_t seed)
{
    for (int isa = GPT_ISA_PORTABLE; isa <= GPT_ISA_AVX512; isa++) {
        if (!gpt_isa_force((enum gpt_isa)isa))
            continue;
        for (size_t threads = 1; threads <= 3; threads += stride_of_cases(2)) {
            uint64_t state = seed;
            ASSERT_OK(gpt_parallel_set_threads(threads));
            check(&state);
        }
    }
}

/* ---- matrix product ---- */

enum { ROWS = 70, INPUTS = 131, OUTPUTS = 75 };

/* Rows [first, first + rows) alone give what they give among all. */
static void check_rows(const float *x, const float *w, const float *bias, const float *whole,
                       size_t first, size_t rows, bool transposed)
{
    const struct gpt_matmul shape = {rows, INPUTS, OUTPUTS, transposed};
    static float part[ROWS * OUTPUTS];
    ASSERT_OK(ops->matmul_forward(&queue, part, x + first * INPUTS, w, bias, &shape));
    ASSERT_SAME(part, whole + first * OUTPUTS, rows * OUTPUTS, "rows %zu from %zu", rows, first);
}

static void check_forward_rows(uint64_t *state)
{
    const float *x = random_floats(ROWS * INPUTS, 1.0f, state);
    const float *w = random_floats(INPUTS * OUTPUTS, 1.0f, state);
    const float *bias = random_floats(OUTPUTS, 1.0f, state);
    float *whole = poisoned_floats(ROWS * OUTPUTS);
    for (int transposed = 0; transposed < 2; transposed++) {
        const struct gpt_matmul shape = {ROWS, INPUTS, OUTPUTS, transposed != 0};
        ASSERT_OK(ops->matmul_forward(&queue, whole, x, w, bias, &shape));
        for (size_t rows = 1; rows <= ROWS; rows += stride_of_cases(3))
            check_rows(x, w, bias, whole, 0, rows, transposed != 0);
        for (size_t first = 0; first < ROWS; first += stride_of_cases(3))
            check_rows(x, w, bias, whole, first, 1, transposed != 0);
    }
}

Test(gpt_exact, matmul_rows_do_not_depend_on_each_other, .description = "seed 31")
{
    on_every_machine(check_forward_rows, 31);
}

static void check_input_rows(uint64_t *state)
{
    const float *dy = random_floats(ROWS * OUTPUTS, 1.0f, state);
    const float *w = random_floats(INPUTS * OUTPUTS, 1.0f, state);
    float *whole = poisoned_floats(ROWS * INPUTS), *part = poisoned_floats(ROWS * INPUTS);
    for (size_t rows = 1; rows <= ROWS; rows += stride_of_cases(3)) {
        const struct gpt_matmul all = {ROWS, INPUTS, OUTPUTS, rows % 2 == 0};
        struct gpt_matmul some = all;
        some.rows = rows;
        ASSERT_OK(ops->matmul_backward_input(&queue, whole, dy, w, &all));
        ASSERT_OK(ops->matmul_backward_input(&queue, part, dy, w, &some));
        ASSERT_SAME(part, whole, rows * INPUTS, "%zu rows", rows);
    }
}

Test(gpt_exact, matmul_backward_rows_do_not_depend_on_each_other, .description = "seed 32")
{
    on_every_machine(check_input_rows, 32);
}

/* Sums over rows: cut in two at every place, and at depths that packing cuts too. */
static void check_weight_cuts(uint64_t *state)
{
    enum { MANY = 300, IN = 40, OUT = 35 };
    const float *x = random_floats(MANY * IN, 1.0f, state);
    const float *dy = random_floats(MANY * OUT, 1.0f, state);
    const float *start = random_floats(IN * OUT + OUT, 1.0f, state);
    float *whole = poisoned_floats(IN * OUT + OUT), *parts = poisoned_floats(IN * OUT + OUT);
    struct gpt_matmul shape = {MANY, IN, OUT, false};
    for (size_t cut = 1; cut < MANY; cut += stride_of_cases(5) * (cut % 7 + 1)) {
        shape.transposed = cut % 2 == 0;
        memcpy(whole, start, (IN * OUT + OUT) * sizeof *whole);
        memcpy(parts, start, (IN * OUT + OUT) * sizeof *parts);
        shape.rows = MANY;
        ASSERT_OK(ops->matmul_backward_weight(&queue, whole, whole + IN * OUT, dy, x, &shape));
        shape.rows = cut;
        ASSERT_OK(ops->matmul_backward_weight(&queue, parts, parts + IN * OUT, dy, x, &shape));
        shape.rows = MANY - cut;
        ASSERT_OK(ops->matmul_backward_weight(&queue, parts, parts + IN * OUT, dy + cut * OUT,
                                              x + cut * IN, &shape));
        ASSERT_SAME(parts, whole, IN * OUT + OUT, "cut at %zu", cut);
    }
}

Test(gpt_exact, weight_gradients_do_not_depend_on_the_cut, .description = "seed 33")
{
    on_every_machine(check_weight_cuts, 33);
}

static float *product_with(enum gpt_isa isa, size_t threads, uint64_t seed)
{
    enum { M = 61, N = 100, K = 523 };
    uint64_t state = seed;
    const float *x = random_floats(M * K, 1.0f, &state), *w = random_floats(K * N, 1.0f, &state);
    float *y = poisoned_floats(M * N);
    cr_assert(gpt_isa_force(isa));
    ASSERT_OK(gpt_parallel_set_threads(threads));
    ASSERT_OK(ops->matmul_forward(&queue, y, x, w, NULL, &(struct gpt_matmul){M, K, N, false}));
    return y;
}

Test(gpt_exact, threads_do_not_matter, .description = "seed 34")
{
    for (int isa = GPT_ISA_PORTABLE; isa <= GPT_ISA_AVX512; isa++) {
        if (!gpt_isa_force((enum gpt_isa)isa))
            continue;
        const float *one = product_with((enum gpt_isa)isa, 1, 34);
        ASSERT_SAME(product_with((enum gpt_isa)isa, 2, 34), one, 61 * 100, "2 threads");
        ASSERT_SAME(product_with((enum gpt_isa)isa, 3, 34), one, 61 * 100, "3 threads");
    }
}

Test(gpt_exact, avx2_and_avx512_agree, .description = "seed 35")
{
    if (!gpt_isa_force(GPT_ISA_AVX512))
        cr_skip("this machine has no AVX-512");
    const float *wide = product_with(GPT_ISA_AVX512, 1, 35);
    ASSERT_SAME(product_with(GPT_ISA_AVX2, 1, 35), wide, 61 * 100, "AVX2 and AVX-512");
}

/* ---- the other operations: all samples at once, and cut in two ---- */

enum { SAMPLES = 5, LENGTH = 70, HEADS = 2, WIDTH = 32, CHANNELS = HEADS * WIDTH };

struct part {
    size_t first, count; /* samples */
};

static const struct part cuts[] = {{0, SAMPLES}, {0, 1}, {1, 3}, {4, 1}};

static void check_attention_parts(uint64_t *state)
{
    const size_t sample = LENGTH * CHANNELS;
    const float *qkv = random_floats(SAMPLES * 3 * sample, 1.0f, state);
    const float *dout = random_floats(SAMPLES * sample, 1.0f, state);
    float *out[2], *sums[2], *dqkv[2];
    for (int i = 0; i < 2; i++) {
        out[i] = poisoned_floats(SAMPLES * sample);
        sums[i] = poisoned_floats(SAMPLES * LENGTH * HEADS);
        dqkv[i] = poisoned_floats(SAMPLES * 3 * sample);
    }
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        const struct gpt_attention shape = {cuts[i].count, LENGTH, HEADS, WIDTH};
        const size_t at = cuts[i].first * sample, to = i > 0;
        float *sum = sums[to] + cuts[i].first * LENGTH * HEADS;
        ASSERT_OK(ops->attention_forward(&queue, out[to] + at, sum, qkv + 3 * at, &shape));
        ASSERT_OK(ops->attention_backward(&queue, dqkv[to] + 3 * at, dout + at, out[to] + at,
                                          qkv + 3 * at, sum, &shape));
    }
    ASSERT_SAME(out[1], out[0], SAMPLES * sample, "out");
    ASSERT_SAME(sums[1], sums[0], SAMPLES * LENGTH * HEADS, "log sums");
    ASSERT_SAME(dqkv[1], dqkv[0], SAMPLES * 3 * sample, "dqkv");
}

Test(gpt_exact, attention_samples_do_not_depend_on_each_other, .description = "seed 36")
{
    on_every_machine(check_attention_parts, 36);
}

static void check_norm_parts(uint64_t *state)
{
    const size_t sample = LENGTH * CHANNELS;
    const float *x = random_floats(SAMPLES * sample, 1.0f, state);
    const float *dy = random_floats(SAMPLES * sample, 1.0f, state);
    const float *gamma = random_floats(CHANNELS, 1.0f, state);
    float *y[2], *stats[2], *dx[2], *sums[2];
    for (int i = 0; i < 2; i++) {
        y[i] = poisoned_floats(SAMPLES * sample);
        stats[i] = poisoned_floats(2 * SAMPLES * LENGTH);
        dx[i] = poisoned_floats(SAMPLES * sample);
        sums[i] = zero_floats(2 * CHANNELS);
    }
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        const size_t row = cuts[i].first * LENGTH, rows = cuts[i].count * LENGTH, to = i > 0;
        const size_t at = row * CHANNELS;
        float *mean = stats[to] + row, *rstd = stats[to] + SAMPLES * LENGTH + row;
        ASSERT_OK(ops->layernorm_forward(&queue, y[to] + at, mean, rstd, x + at, gamma, gamma, rows,
                                         CHANNELS));
        ASSERT_OK(ops->layernorm_backward(&queue, dx[to] + at, sums[to], sums[to] + CHANNELS,
                                          dy + at, x + at, mean, rstd, gamma, rows, CHANNELS,
                                          false));
    }
    ASSERT_SAME(y[1], y[0], SAMPLES * sample, "y");
    ASSERT_SAME(dx[1], dx[0], SAMPLES * sample, "dx");
    ASSERT_SAME(sums[1], sums[0], 2 * CHANNELS, "dgamma and dbeta");
}

Test(gpt_exact, layernorm_does_not_depend_on_the_cut, .description = "seed 37")
{
    on_every_machine(check_norm_parts, 37);
}

static void check_dropout_and_gelu_parts(uint64_t *state)
{
    const size_t sample = LENGTH * CHANNELS;
    const float *x = random_floats(SAMPLES * sample, 3.0f, state);
    float *y[2], *z[2];
    for (int i = 0; i < 2; i++) {
        y[i] = poisoned_floats(SAMPLES * sample);
        z[i] = poisoned_floats(SAMPLES * sample);
    }
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        const struct gpt_dropout dropout = {0.2f, 9, 4, 2, 100 + cuts[i].first};
        const size_t at = cuts[i].first * sample, count = cuts[i].count * sample, to = i > 0;
        ASSERT_OK(
            ops->dropout_add(&queue, y[to] + at, x + at, x + at, cuts[i].count, sample, &dropout));
        ASSERT_OK(ops->gelu_forward(&queue, z[to] + at, x + at, count));
        ASSERT_OK(ops->gelu_backward(&queue, z[to] + at, x + at, count));
    }
    ASSERT_SAME(y[1], y[0], SAMPLES * sample, "dropout");
    ASSERT_SAME(z[1], z[0], SAMPLES * sample, "GELU");
}

Test(gpt_exact, dropout_and_gelu_do_not_depend_on_the_cut, .description = "seed 38")
{
    on_every_machine(check_dropout_and_gelu_parts, 38);
}

static void check_token_parts(uint64_t *state)
{
    enum { V = 256 };
    const size_t sample = LENGTH * V;
    static int32_t tokens[SAMPLES * (LENGTH + 1)];
    const float *uniform = random_floats(SAMPLES * (LENGTH + 1), 0.5f, state);
    for (size_t i = 0; i < SAMPLES * (LENGTH + 1); i++)
        tokens[i] = (int32_t)((uniform[i] + 0.5f) * V);
    const float *table = random_floats(V * V, 1.0f, state);
    float *x[2], *losses[2], *sums[2];
    for (int i = 0; i < 2; i++) {
        x[i] = poisoned_floats(SAMPLES * sample);
        losses[i] = poisoned_floats(SAMPLES * LENGTH);
        sums[i] = zero_floats(V * V + sample);
    }
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        const struct gpt_tokens some = {tokens + cuts[i].first * (LENGTH + 1), cuts[i].count,
                                        LENGTH};
        const size_t at = cuts[i].first * sample, to = i > 0;
        ASSERT_OK(ops->embedding_forward(&queue, x[to] + at, &some, table, table, V));
        ASSERT_OK(ops->cross_entropy(&queue, losses[to] + cuts[i].first * LENGTH, x[to] + at, &some,
                                     V, 0.01f));
        ASSERT_OK(
            ops->embedding_backward(&queue, sums[to], sums[to] + V * V, x[to] + at, &some, V));
    }
    ASSERT_SAME(x[1], x[0], SAMPLES * sample, "logits");
    ASSERT_SAME(losses[1], losses[0], SAMPLES * LENGTH, "losses");
    ASSERT_SAME(sums[1], sums[0], V * V + sample, "embedding gradients");
}

Test(gpt_exact, embedding_and_loss_do_not_depend_on_the_cut, .description = "seed 39")
{
    on_every_machine(check_token_parts, 39);
}
