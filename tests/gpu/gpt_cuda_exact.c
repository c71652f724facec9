/* Owns the tests that CUDA operations give the same bits however the samples are cut into calls.
 * Must not know private headers of the library. */
#include "gpt_cuda_support.h"

#define SAMPLES 16

/* Runs samples [first, first + count): writes their part of an output, at its beginning, or adds
 * them to sums. */
typedef void (*part_function)(void *out, size_t first, size_t count, const void *user);

/* 1 to 16 samples, at either end, give what they give among all. */
static void check_rows(part_function run, const void *user, size_t sample_numbers, const char *what)
{
    const struct pair whole = pair_poisoned(SAMPLES * sample_numbers);
    const struct pair part = pair_poisoned(SAMPLES * sample_numbers);
    run(whole.gpu, 0, SAMPLES, user);
    for (size_t count = 1; count <= SAMPLES; count++)
        for (size_t end = 0; end < 2; end++) {
            const size_t first = end ? SAMPLES - count : 0;
            pair_poison(&part);
            run(part.gpu, first, count, user);
            pair_expect_same(&part, 0, &whole, first * sample_numbers, count * sample_numbers,
                             what);
        }
}

/* Sums do not depend on the cut. */
static void check_sums_from(const struct pair *start, const struct pair *whole,
                            const struct pair *parts, part_function run, const void *user,
                            const char *what)
{
    static const size_t cuts[] = {1, 2, 3, 5, 8};
    pair_copy(whole, start);
    run(whole->gpu, 0, SAMPLES, user);
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        pair_copy(parts, start);
        for (size_t first = 0; first < SAMPLES; first += cuts[i])
            run(parts->gpu, first, SAMPLES - first < cuts[i] ? SAMPLES - first : cuts[i], user);
        pair_expect_same(parts, 0, whole, 0, whole->count, what);
    }
}

static void check_sums(part_function run, const void *user, size_t count, support_random *random,
                       const char *what)
{
    const struct pair start = pair_random(count, 1.0f, random);
    const struct pair whole = pair_poisoned(count), parts = pair_poisoned(count);
    check_sums_from(&start, &whole, &parts, run, user, what);
}

/* ---- matrix product ---- */

struct product {
    struct gpt_matmul shape; /* for one sample */
    struct pair x, w, bias, dy;
};

static struct gpt_matmul shape_of(const struct product *p, size_t samples)
{
    struct gpt_matmul shape = p->shape;
    shape.rows *= samples;
    return shape;
}

static void run_forward(void *y, size_t first, size_t count, const void *user)
{
    const struct product *p = user;
    const struct gpt_matmul shape = shape_of(p, count);
    ASSERT_OK(gpu_ops->matmul_forward(&on_gpu, y,
                                      pair_at(&p->x, first * p->shape.rows * p->shape.inputs),
                                      p->w.gpu, p->bias.gpu, &shape));
}

static void run_plain(void *y, size_t first, size_t count, const void *user)
{
    struct product plain = *(const struct product *)user;
    plain.bias.gpu = NULL;
    run_forward(y, first, count, &plain);
}

static void run_input(void *dx, size_t first, size_t count, const void *user)
{
    const struct product *p = user;
    const struct gpt_matmul shape = shape_of(p, count);
    ASSERT_OK(gpu_ops->matmul_backward_input(
        &on_gpu, dx, pair_at(&p->dy, first * p->shape.rows * p->shape.outputs), p->w.gpu, &shape));
}

/* The sums are dweight, then dbias. */
static void run_weight(void *sums, size_t first, size_t count, const void *user)
{
    const struct product *p = user;
    const struct gpt_matmul shape = shape_of(p, count);
    float *dweight = sums;
    ASSERT_OK(gpu_ops->matmul_backward_weight(
        &on_gpu, dweight, dweight + shape.inputs * shape.outputs,
        pair_at(&p->dy, first * p->shape.rows * shape.outputs),
        pair_at(&p->x, first * p->shape.rows * shape.inputs), &shape));
}

static void check_product(size_t inputs, size_t outputs, bool transposed, support_random *random)
{
    const size_t T = on_gpu.sample_rows;
    const struct product p = {.shape = {T, inputs, outputs, transposed},
                              .x = pair_random(SAMPLES * T * inputs, 1.0f, random),
                              .w = pair_random(inputs * outputs, 1.0f, random),
                              .bias = pair_random(outputs, 1.0f, random),
                              .dy = pair_random(SAMPLES * T * outputs, 1.0f, random)};
    check_rows(run_forward, &p, T * outputs, "y with a bias");
    check_rows(run_plain, &p, T * outputs, "y");
    check_rows(run_input, &p, T * inputs, "dx");
    check_sums(run_weight, &p, inputs * outputs + outputs, random, "dweight and dbias");
}

/* Products of a model of `channels` channels. */
static void check_products(size_t length, size_t channels, uint64_t seed)
{
    support_random random = {seed};
    queues_open(length);
    check_product(channels, 3 * channels, false, &random);
    check_product(channels, channels, false, &random);
    check_product(channels, 4 * channels, false, &random);
    check_product(4 * channels, channels, false, &random);
    check_product(channels, 256, true, &random);
    queues_close();
}

Test(gpt_cuda_exact, products_of_the_tiny_model, .description = "seed 31")
{
    check_products(32, 64, 31);
}

Test(gpt_cuda_exact, products_of_the_demo, .description = "seed 32")
{
    check_products(64, 128, 32);
}

Test(gpt_cuda_exact, products_of_odd_lengths, .description = "seed 33")
{
    check_products(37, 192, 33);
}

/* Wide enough that the library has reason to split K for few rows. */
Test(gpt_cuda_exact, products_of_a_wide_model, .description = "seed 34")
{
    check_products(16, 768, 34);
}

/* ---- attention ---- */

struct attention {
    struct gpt_attention shape; /* for all samples */
    struct pair qkv, out, sums, dout;
};

static void run_attention(void *out, size_t first, size_t count, const void *user)
{
    const struct attention *a = user;
    struct gpt_attention shape = a->shape;
    const size_t row = first * shape.length, C = shape.heads * shape.width;
    shape.count = count;
    ASSERT_OK(gpu_ops->attention_forward(&on_gpu, out, pair_at(&a->sums, row * shape.heads),
                                         pair_at(&a->qkv, row * 3 * C), &shape));
}

static void run_attention_backward(void *dqkv, size_t first, size_t count, const void *user)
{
    const struct attention *a = user;
    struct gpt_attention shape = a->shape;
    const size_t row = first * shape.length, C = shape.heads * shape.width;
    shape.count = count;
    ASSERT_OK(gpu_ops->attention_backward(&on_gpu, dqkv, pair_at(&a->dout, row * C),
                                          pair_at(&a->out, row * C), pair_at(&a->qkv, row * 3 * C),
                                          pair_at(&a->sums, row * shape.heads), &shape));
}

Test(gpt_cuda_exact, attention, .description = "seed 35")
{
    support_random random = {35};
    const size_t T = 70, heads = 2, width = 32, rows = SAMPLES * T, C = heads * width;
    queues_open(T);
    const struct attention a = {.shape = {SAMPLES, T, heads, width},
                                .qkv = pair_random(rows * 3 * C, 1.0f, &random),
                                .out = pair_poisoned(rows * C),
                                .sums = pair_poisoned(rows * heads),
                                .dout = pair_random(rows * C, 1.0f, &random)};
    check_rows(run_attention, &a, T * C, "out");
    run_attention(a.out.gpu, 0, SAMPLES, &a);
    check_rows(run_attention_backward, &a, T * 3 * C, "dqkv");
    queues_close();
}

/* ---- layer norm ---- */

struct norm {
    size_t channels;
    struct pair x, gamma, beta, mean, rstd, dy, y;
};

static void run_norm(void *y, size_t first, size_t count, const void *user)
{
    const struct norm *n = user;
    const size_t T = on_gpu.sample_rows, row = first * T;
    ASSERT_OK(gpu_ops->layernorm_forward(&on_gpu, y, pair_at(&n->mean, row), pair_at(&n->rstd, row),
                                         pair_at(&n->x, row * n->channels), n->gamma.gpu,
                                         n->beta.gpu, count * T, n->channels));
}

static void run_norm_backward(void *dx, void *sums, size_t first, size_t count,
                              const struct norm *n)
{
    const size_t T = on_gpu.sample_rows, row = first * T, at = row * n->channels;
    ASSERT_OK(gpu_ops->layernorm_backward(&on_gpu, dx, sums, (float *)sums + n->channels,
                                          pair_at(&n->dy, at), pair_at(&n->x, at),
                                          pair_at(&n->mean, row), pair_at(&n->rstd, row),
                                          n->gamma.gpu, count * T, n->channels, false));
}

static void run_norm_rows(void *dx, size_t first, size_t count, const void *user)
{
    const struct norm *n = user;
    const struct pair sums = n->y; /* not looked at */
    run_norm_backward(dx, sums.gpu, first, count, n);
}

static void run_norm_sums(void *sums, size_t first, size_t count, const void *user)
{
    const struct norm *n = user;
    run_norm_backward(n->y.gpu, sums, first, count, n); /* dx is not looked at */
}

Test(gpt_cuda_exact, layernorm, .description = "seed 36")
{
    support_random random = {36};
    const size_t T = 45, C = 192, rows = SAMPLES * T;
    queues_open(T);
    const struct norm n = {.channels = C,
                           .x = pair_random(rows * C, 3.0f, &random),
                           .gamma = pair_random(C, 1.0f, &random),
                           .beta = pair_random(C, 1.0f, &random),
                           .mean = pair_poisoned(rows),
                           .rstd = pair_poisoned(rows),
                           .dy = pair_random(rows * C, 1.0f, &random),
                           .y = pair_random(rows * C, 1.0f, &random)};
    check_rows(run_norm, &n, T * C, "y");
    run_norm(n.y.gpu, 0, SAMPLES, &n);
    check_rows(run_norm_rows, &n, T * C, "dx");
    check_sums(run_norm_sums, &n, 2 * C, &random, "dgamma and dbeta");
    queues_close();
}

/* ---- embedding, loss, dropout ---- */

#define VOCABULARY 256

struct tokens_case {
    size_t channels;
    struct pair tokens, table, positions, dx, logits, losses;
};

static struct gpt_tokens tokens_from(const struct tokens_case *c, size_t first, size_t count)
{
    const size_t T = on_gpu.sample_rows;
    return (struct gpt_tokens){pair_at(&c->tokens, first * (T + 1)), count, T};
}

static void run_embedding(void *x, size_t first, size_t count, const void *user)
{
    const struct tokens_case *c = user;
    const struct gpt_tokens tokens = tokens_from(c, first, count);
    ASSERT_OK(gpu_ops->embedding_forward(&on_gpu, x, &tokens, c->table.gpu, c->positions.gpu,
                                         c->channels));
}

/* The sums are the tokens' table, then the positions'. */
static void run_embedding_sums(void *sums, size_t first, size_t count, const void *user)
{
    const struct tokens_case *c = user;
    const struct gpt_tokens tokens = tokens_from(c, first, count);
    ASSERT_OK(gpu_ops->embedding_backward(&on_gpu, sums, (float *)sums + VOCABULARY * c->channels,
                                          pair_at(&c->dx, first * tokens.length * c->channels),
                                          &tokens, c->channels));
}

/* The losses of the samples, then the gradients of their logits. */
static void run_losses(void *losses, size_t first, size_t count, const void *user)
{
    const struct tokens_case *c = user;
    const struct gpt_tokens tokens = tokens_from(c, first, count);
    ASSERT_OK(gpu_ops->cross_entropy(&on_gpu, losses,
                                     pair_at(&c->logits, first * tokens.length * VOCABULARY),
                                     &tokens, VOCABULARY, 0.0f));
}

static void run_slopes(void *slopes, size_t first, size_t count, const void *user)
{
    const struct tokens_case *c = user;
    const struct gpt_tokens tokens = tokens_from(c, first, count);
    const size_t row = first * tokens.length;
    ASSERT_OK(rebatch_copy(on_gpu.device, slopes, pair_at(&c->logits, row * VOCABULARY),
                           count * tokens.length * VOCABULARY * sizeof(float), NULL));
    ASSERT_OK(gpu_ops->cross_entropy(&on_gpu, pair_at(&c->losses, row), slopes, &tokens, VOCABULARY,
                                     0.125f));
}

static void run_loss_sum(void *sum, size_t first, size_t count, const void *user)
{
    const struct tokens_case *c = user;
    const size_t T = on_gpu.sample_rows;
    ASSERT_OK(gpu_ops->sum_losses(&on_gpu, sum, pair_at(&c->losses, first * T), count * T));
}

Test(gpt_cuda_exact, embedding_and_loss, .description = "seed 37")
{
    support_random random = {37};
    const size_t T = 45, C = 64, rows = SAMPLES * T;
    queues_open(T);
    const struct tokens_case c = {.channels = C,
                                  .tokens = pair_tokens(SAMPLES, T, VOCABULARY, &random),
                                  .table = pair_random(VOCABULARY * C, 1.0f, &random),
                                  .positions = pair_random(T * C, 1.0f, &random),
                                  .dx = pair_random(rows * C, 1.0f, &random),
                                  .logits = pair_random(rows * VOCABULARY, 4.0f, &random),
                                  .losses = pair_random(rows, 4.0f, &random)};
    check_rows(run_embedding, &c, T * C, "x");
    check_sums(run_embedding_sums, &c, (VOCABULARY + T) * C, &random, "tables");
    check_rows(run_losses, &c, T, "losses");
    check_rows(run_slopes, &c, T * VOCABULARY, "gradient of the logits");
    const struct pair start = pair_random_doubles(1, 10.0, &random);
    const struct pair whole = pair_poisoned_doubles(1), parts = pair_poisoned_doubles(1);
    check_sums_from(&start, &whole, &parts, run_loss_sum, &c, "sum of losses");
    queues_close();
}

struct drop {
    size_t elements; /* of a sample */
    struct pair x, residual;
};

static void run_drop(void *out, size_t first, size_t count, const void *user)
{
    const struct drop *d = user;
    const struct gpt_dropout dropout = {0.2f, 0x123456789abcdef0u, 3, 7, 5 + first};
    ASSERT_OK(gpu_ops->dropout_add(&on_gpu, out, pair_at(&d->residual, first * d->elements),
                                   pair_at(&d->x, first * d->elements), count, d->elements,
                                   &dropout));
}

Test(gpt_cuda_exact, dropout, .description = "seed 38")
{
    support_random random = {38};
    queues_open(1);
    const struct drop d = {.elements = 1048,
                           .x = pair_random(SAMPLES * 1048, 1.0f, &random),
                           .residual = pair_random(SAMPLES * 1048, 1.0f, &random)};
    check_rows(run_drop, &d, d.elements, "out");
    queues_close();
}
