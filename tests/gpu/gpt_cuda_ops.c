/* Owns the tests of every CUDA operation against the host's, which are tested against a reference
 * in double. Must not know private headers of the library. */
#include <math.h>
#include <string.h>

#include "fault/fault_device.h"
#include "gpt/cuda.h"
#include "gpt_cuda_support.h"

static int side; /* of the pairs: 0, the host's, or 1 */

static void *at(struct pair pair)
{
    return side ? pair.gpu : pair.host;
}

/* The same call on both queues. */
#define ON_BOTH(member, ...)                                                                       \
    do {                                                                                           \
        side = 0;                                                                                  \
        ASSERT_OK(host_ops->member(&on_host, __VA_ARGS__));                                        \
        side = 1;                                                                                  \
        ASSERT_OK(gpu_ops->member(&on_gpu, __VA_ARGS__));                                          \
    } while (0)

/* ---- embedding ---- */

static void check_embedding(size_t samples, size_t T, size_t C, size_t V, support_random *random)
{
    const struct pair ids = pair_tokens(samples, T, V, random);
    const struct gpt_tokens tokens[] = {{ids.host, samples, T}, {ids.gpu, samples, T}};
    const struct pair table = pair_random(V * C, 1.0f, random);
    const struct pair positions = pair_random(T * C, 1.0f, random);
    const struct pair dx = pair_random(samples * T * C, 1.0f, random);
    const struct pair x = pair_poisoned(samples * T * C);
    const struct pair dtable = pair_random(V * C, 1.0f, random);
    const struct pair dpositions = pair_random(T * C, 1.0f, random);
    ON_BOTH(embedding_forward, at(x), &tokens[side], at(table), at(positions), C);
    ON_BOTH(embedding_backward, at(dtable), at(dpositions), at(dx), &tokens[side], C);
    pair_expect_close(&x, "x");
    pair_expect_close(&dtable, "dtoken_table");
    pair_expect_close(&dpositions, "dposition_table");
}

Test(gpt_cuda_ops, embedding, .description = "seed 11")
{
    support_random random = {11};
    queues_open(1);
    check_embedding(3, 5, 64, 7, &random);
    check_embedding(16, 32, 128, 256, &random);
    queues_close();
}

/* ---- layer norm ---- */

static void check_layernorm(size_t samples, size_t C, support_random *random)
{
    const size_t rows = samples * on_gpu.sample_rows;
    const struct pair x = pair_random(rows * C, 3.0f, random);
    const struct pair gamma = pair_random(C, 1.0f, random), beta = pair_random(C, 1.0f, random);
    const struct pair dy = pair_random(rows * C, 1.0f, random);
    const struct pair y = pair_poisoned(rows * C), dx = pair_poisoned(rows * C);
    const struct pair mean = pair_poisoned(rows), rstd = pair_poisoned(rows);
    const struct pair dgamma = pair_random(C, 1.0f, random), dbeta = pair_random(C, 1.0f, random);
    const struct pair sum = pair_random(rows * C, 1.0f, random);
    ON_BOTH(layernorm_forward, at(y), at(mean), at(rstd), at(x), at(gamma), at(beta), rows, C);
    ON_BOTH(layernorm_backward, at(dx), at(dgamma), at(dbeta), at(dy), at(x), at(mean), at(rstd),
            at(gamma), rows, C, false);
    ON_BOTH(layernorm_backward, at(sum), at(dgamma), at(dbeta), at(dy), at(x), at(mean), at(rstd),
            at(gamma), rows, C, true);
    pair_expect_close(&y, "y");
    pair_expect_close(&mean, "mean");
    pair_expect_close(&rstd, "rstd");
    pair_expect_close(&dx, "dx");
    pair_expect_close(&sum, "dx, added");
    pair_expect_close(&dgamma, "dgamma");
    pair_expect_close(&dbeta, "dbeta");
}

Test(gpt_cuda_ops, layernorm, .description = "seed 12")
{
    support_random random = {12};
    queues_open(33);
    check_layernorm(1, 64, &random);
    check_layernorm(7, 128, &random);
    check_layernorm(3, 768, &random);
    queues_close();
}

/* ---- matrix product ---- */

static void check_matmul(size_t samples, size_t inputs, size_t outputs, bool transposed,
                         support_random *random)
{
    const size_t rows = samples * on_gpu.sample_rows;
    const struct gpt_matmul shape = {rows, inputs, outputs, transposed};
    const struct pair x = pair_random(rows * inputs, 1.0f, random);
    const struct pair w = pair_random(inputs * outputs, 1.0f, random);
    const struct pair bias = pair_random(outputs, 1.0f, random);
    const struct pair dy = pair_random(rows * outputs, 1.0f, random);
    const struct pair y = pair_poisoned(rows * outputs), plain = pair_poisoned(rows * outputs);
    const struct pair dx = pair_poisoned(rows * inputs);
    const struct pair dw = pair_random(inputs * outputs, 1.0f, random);
    const struct pair dbias = pair_random(outputs, 1.0f, random);
    ON_BOTH(matmul_forward, at(y), at(x), at(w), at(bias), &shape);
    ON_BOTH(matmul_forward, at(plain), at(x), at(w), NULL, &shape);
    ON_BOTH(matmul_backward_input, at(dx), at(dy), at(w), &shape);
    ON_BOTH(matmul_backward_weight, at(dw), at(dbias), at(dy), at(x), &shape);
    pair_expect_close(&y, "y with a bias");
    pair_expect_close(&plain, "y");
    pair_expect_close(&dx, "dx");
    pair_expect_close(&dw, "dweight");
    pair_expect_close(&dbias, "dbias");
    ON_BOTH(matmul_backward_weight, at(dw), NULL, at(dy), at(x), &shape);
    pair_expect_close(&dw, "dweight once more");
}

Test(gpt_cuda_ops, matmul, .description = "seed 13")
{
    static const size_t shapes[][3] = {{1, 64, 64},    {3, 64, 192},  {5, 256, 64},
                                       {16, 128, 512}, {2, 768, 256}, {2, 64, 256}};
    support_random random = {13};
    for (size_t length = 31; length <= 64; length += 33) {
        queues_open(length);
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
            check_matmul(shapes[i][0], shapes[i][1], shapes[i][2], false, &random);
            check_matmul(shapes[i][0], shapes[i][1], shapes[i][2], true, &random);
        }
        queues_close();
    }
}

Test(gpt_cuda_ops, matmul_refuses_shapes_that_it_does_not_take)
{
    queues_open(32);
    float *none = pair_poisoned(64).gpu;
    ASSERT_ERROR(gpu_ops->matmul_forward(&on_gpu, none, none, none, NULL,
                                         &(struct gpt_matmul){32, 65, 64, false}),
                 REBATCH_E_UNSUPPORTED, "inputs is 65");
    ASSERT_ERROR(gpu_ops->matmul_backward_input(&on_gpu, none, none, none,
                                                &(struct gpt_matmul){32, 64, 100, false}),
                 REBATCH_E_UNSUPPORTED, "outputs is 100");
    ASSERT_ERROR(gpu_ops->matmul_backward_weight(&on_gpu, none, NULL, none, none,
                                                 &(struct gpt_matmul){33, 64, 64, false}),
                 REBATCH_E_INVALID, "33 rows");
    ASSERT_ERROR(gpu_ops->matmul_forward(&on_gpu, none + 1, none, none, NULL,
                                         &(struct gpt_matmul){32, 64, 64, false}),
                 REBATCH_E_INVALID, "a multiple of 16 bytes");
    queues_close();
}

/* ---- attention ---- */

/* The host's [row][head] in the GPU's order, [sample][head][t]. */
static void reorder_log_sums(const struct pair *pair, const struct gpt_attention *shape)
{
    const size_t T = shape->length, H = shape->heads;
    float *values = pair->host, *copy = pair_poisoned(pair->count).host;
    memcpy(copy, values, pair->count * sizeof *copy);
    for (size_t sample = 0; sample < shape->count; sample++)
        for (size_t t = 0; t < T; t++)
            for (size_t head = 0; head < H; head++)
                values[(sample * H + head) * T + t] = copy[(sample * T + t) * H + head];
}

static void check_attention(size_t samples, size_t T, size_t heads, size_t width,
                            support_random *random)
{
    const struct gpt_attention shape = {samples, T, heads, width};
    const size_t rows = samples * T, C = heads * width;
    const struct pair qkv = pair_random(rows * 3 * C, 1.0f, random);
    const struct pair dout = pair_random(rows * C, 1.0f, random);
    const struct pair out = pair_poisoned(rows * C), sums = pair_poisoned(rows * heads);
    const struct pair dqkv = pair_poisoned(rows * 3 * C);
    ON_BOTH(attention_forward, at(out), at(sums), at(qkv), &shape);
    ON_BOTH(attention_backward, at(dqkv), at(dout), at(out), at(qkv), at(sums), &shape);
    reorder_log_sums(&sums, &shape);
    pair_expect_close(&out, "out");
    pair_expect_close(&sums, "log_sums");
    pair_expect_close(&dqkv, "dqkv");
}

Test(gpt_cuda_ops, attention, .description = "seed 14: lengths below, at and beyond a tile")
{
    support_random random = {14};
    queues_open(1);
    check_attention(2, 1, 2, 32, &random);
    check_attention(3, 32, 2, 32, &random);
    check_attention(2, 70, 2, 64, &random);
    check_attention(1, 150, 1, 128, &random);
    queues_close();
}

Test(gpt_cuda_ops, attention_refuses_heads_that_it_does_not_take)
{
    const struct gpt_attention shape = {1, 1, 1, 48};
    queues_open(1);
    float *none = pair_poisoned(144).gpu;
    ASSERT_ERROR(gpu_ops->attention_forward(&on_gpu, none, none, none, &shape),
                 REBATCH_E_UNSUPPORTED, "width is 48");
    ASSERT_ERROR(gpu_ops->attention_backward(&on_gpu, none, none, none, none, none, &shape),
                 REBATCH_E_UNSUPPORTED, "width is 48");
    queues_close();
}

/* ---- GELU, add ---- */

Test(gpt_cuda_ops, gelu_and_add, .description = "seed 15")
{
    support_random random = {15};
    const size_t count = 20011;
    queues_open(1);
    const struct pair x = pair_random(count, 8.0f, &random);
    const struct pair y = pair_poisoned(count), dy = pair_random(count, 1.0f, &random);
    const struct pair sum = pair_random(count, 1.0f, &random);
    ON_BOTH(gelu_forward, at(y), at(x), count);
    ON_BOTH(gelu_backward, at(dy), at(x), count);
    ON_BOTH(add, at(sum), at(x), count);
    pair_expect_close(&y, "y");
    pair_expect_close(&dy, "dy");
    pair_expect_close(&sum, "sum");
    queues_close();
}

/* ---- dropout ---- */

static void check_dropout(const struct gpt_dropout *dropout, size_t samples, size_t elements,
                          support_random *random)
{
    const size_t count = samples * elements;
    const struct pair x = pair_random(count, 1.0f, random);
    const struct pair residual = pair_random(count, 1.0f, random);
    const struct pair out = pair_poisoned(count), alone = pair_poisoned(count);
    ON_BOTH(dropout_add, at(out), at(residual), at(x), samples, elements, dropout);
    ON_BOTH(dropout_add, at(alone), NULL, at(x), samples, elements, dropout);
    ON_BOTH(dropout_add, at(x), at(residual), at(x), samples, elements, dropout);
    pair_expect_close(&out, "out");
    pair_expect_close(&alone, "out without a residual");
    pair_expect_close(&x, "out in place");
}

Test(gpt_cuda_ops, dropout, .description = "seed 16: the same elements as on the host")
{
    support_random random = {16};
    const struct gpt_dropout some = {0.1f, 0x123456789abcdef0u, 3, 7, 1000};
    const struct gpt_dropout late = {0.5f, 0xfedcba9876543210u, 0x500000002u, 0, 0};
    const struct gpt_dropout none = {0.0f, 5, 0, 0, 0};
    struct gpt_dropout wrong = {.probability = NAN};
    queues_open(1);
    check_dropout(&some, 3, 64 * 32, &random);
    check_dropout(&late, 5, 776, &random);
    check_dropout(&none, 2, 504, &random);
    float *array = pair_poisoned(64).gpu;
    ASSERT_ERROR(gpu_ops->dropout_add(&on_gpu, array, NULL, array, 1, 64, &wrong),
                 REBATCH_E_INVALID, "dropout is nan");
    ASSERT_ERROR(gpu_ops->dropout_add(&on_gpu, array, NULL, array, 1, 63, &some),
                 REBATCH_E_UNSUPPORTED, "63 elements");
    queues_close();
}

/* ---- loss ---- */

static void check_loss(size_t samples, size_t V, float spread, support_random *random)
{
    const size_t T = on_gpu.sample_rows, rows = samples * T;
    const struct pair ids = pair_tokens(samples, T, V, random);
    const struct gpt_tokens tokens[] = {{ids.host, samples, T}, {ids.gpu, samples, T}};
    const struct pair logits = pair_random(rows * V, spread, random);
    const struct pair losses = pair_poisoned(rows), again = pair_poisoned(rows);
    const struct pair sum = pair_random_doubles(1, 10.0, random);
    ON_BOTH(cross_entropy, at(again), at(logits), &tokens[side], V, 0.0f);
    pair_expect_close(&logits, "logits that were to be left alone");
    ON_BOTH(cross_entropy, at(losses), at(logits), &tokens[side], V, 0.125f);
    ON_BOTH(sum_losses, at(sum), at(losses), rows);
    pair_expect_close(&losses, "losses");
    pair_expect_close(&again, "losses in evaluation");
    pair_expect_close(&logits, "gradient of the logits");
    pair_expect_close(&sum, "sum of losses");
}

Test(gpt_cuda_ops, loss, .description = "seed 17")
{
    support_random random = {17};
    queues_open(37);
    check_loss(3, 256, 1.0f, &random);
    check_loss(2, 1024, 8.0f, &random);
    queues_close();
}

/* ---- update ---- */

/* One number, the same on both. */
static struct pair pair_of(float value, support_random *random)
{
    const struct pair pair = pair_random(1, 1.0f, random);
    *(float *)pair.host = value;
    ASSERT_OK(rebatch_copy(on_gpu.device, pair.gpu, pair.host, sizeof value, NULL));
    return pair;
}

static void check_norm(size_t count, float most, support_random *random)
{
    const struct pair x = pair_random(count, 1.0f, random);
    const struct pair partials =
        pair_poisoned_doubles((count + GPT_NORM_CHUNK - 1) / GPT_NORM_CHUNK);
    const struct pair norm = pair_poisoned(2);
    ON_BOTH(sum_squares, at(partials), at(x), count);
    const struct pair inverse = pair_of(0.125f, random);
    ON_BOTH(clip_scale, at(norm), at(partials), partials.count, most, at(inverse));
    pair_expect_close(&partials, "partial sums");
    pair_expect_close(&norm, "norm and scale");
}

static void check_adamw(size_t count, const struct gpt_adamw *settings, support_random *random)
{
    /* Small weights, so that an update that is off shows. */
    const struct pair weight = pair_random(count, 1e-2f, random);
    const struct pair first = pair_random(count, 0.1f, random);
    const struct pair second = pair_random(count, 1e-3f, random);
    const struct pair gradient = pair_random(count, 1.0f, random);
    const struct pair scale = pair_random(1, 1.0f, random);
    float *squares = second.host;
    for (size_t i = 0; i < count; i++)
        squares[i] = fabsf(squares[i]);
    ASSERT_OK(rebatch_copy(on_gpu.device, second.gpu, squares, count * sizeof *squares, NULL));
    const struct pair inverse = pair_of(0.125f, random);
    struct gpt_adamw_arrays arrays[2];
    for (side = 0; side < 2; side++)
        arrays[side] = (struct gpt_adamw_arrays){at(weight),   at(first),   at(second), NULL,
                                                 at(gradient), at(inverse), at(scale),  count};
    ON_BOTH(adamw, &arrays[side], settings);
    pair_expect_close(&weight, "weight");
    pair_expect_close(&first, "first moment");
    pair_expect_close(&second, "second moment");
}

Test(gpt_cuda_ops, update, .description = "seed 18")
{
    support_random random = {18};
    const struct gpt_adamw early = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 1};
    const struct gpt_adamw late = {1e-2f, 0.9f, 0.999f, 1e-8f, 0.0f, 1000};
    queues_open(1);
    check_norm(1, 0.5f, &random);
    check_norm(4096 * 3 + 17, 0.5f, &random);
    check_norm(100000, 0.0f, &random);
    check_adamw(20011, &early, &random);
    check_adamw(64, &late, &random);
    queues_close();
}

/* ---- opening ---- */

Test(gpt_cuda_ops, open_refuses_what_it_cannot_serve)
{
    struct gpt_queue queue = {.sample_rows = 1};
    ASSERT_OK(rebatch_device_open_host(&queue.device, REBATCH_UNLIMITED, NULL));
    ASSERT_ERROR(gpt_cuda_ops_get()->open(&queue), REBATCH_E_UNSUPPORTED, "expected an NVIDIA GPU");
    queue.sample_rows = 0;
    ASSERT_ERROR(gpt_cuda_ops_get()->open(&queue), REBATCH_E_INVALID, "0 rows");
    cr_assert_null(queue.state);
    rebatch_device_close(queue.device);
}

Test(gpt_cuda_ops, an_oom_when_opening_is_an_oom)
{
    struct gpt_queue queue = {.sample_rows = 1};
    rebatch_device *gpu;
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    plan.nth = 1;
    plan.times = REBATCH_FAULT_FOREVER;
    ASSERT_OK(rebatch_device_open_cuda(&gpu, NULL));
    ASSERT_OK(rebatch_device_open_fault(&queue.device, gpu, &plan));
    cr_assert_eq(gpt_cuda_ops_get()->open(&queue), REBATCH_OOM);
    cr_assert_null(queue.state);
    ASSERT_OK(rebatch_fault_arm(queue.device, NULL));
    ASSERT_OK(gpt_cuda_ops_get()->open(&queue));
    gpt_cuda_ops_get()->close(&queue);
    rebatch_device_close(queue.device);
    rebatch_device_close(gpu);
}

/* ---- sizes that a kernel does not take: said before anything is launched ---- */

/* On a host device, which shows that no GPU was asked. */
static void check_refused(const struct gpt_config *config, rebatch_status status, const char *words)
{
    rebatch_device *device;
    rebatch_pool *pool;
    rebatch_memory_info memory;
    struct gpt_model *model;
    ASSERT_OK(rebatch_device_open_host(&device, REBATCH_UNLIMITED, NULL));
    ASSERT_OK(rebatch_pool_create(&pool, device, NULL));
    ASSERT_ERROR(gpt_model_create(&model, config, gpt_cuda_ops_get(), pool, NULL, 1), status,
                 words);
    cr_assert_null(model);
    rebatch_pool_destroy(pool);
    ASSERT_OK(rebatch_device_memory(device, &memory));
    cr_assert_eq(memory.used_bytes, 0);
    rebatch_device_close(device);
}

Test(gpt_cuda_ops, sizes_that_no_kernel_takes_are_refused)
{
    struct gpt_config good, bad;
    ASSERT_OK(gpt_config_preset(&good, "tiny"));
    bad = good;
    bad.heads = 4;
    check_refused(&bad, REBATCH_E_UNSUPPORTED, "a head's width is 16: expected 32, 64 or 128");
    bad = good;
    bad.channels = 192;
    bad.heads = 2;
    check_refused(&bad, REBATCH_E_UNSUPPORTED, "a head's width is 96: expected 32, 64 or 128");
    bad = good;
    bad.channels = 96; /* K is no multiple of 64 */
    bad.heads = 3;
    check_refused(&bad, REBATCH_E_INVALID, "channels is 96: expected a multiple of 64");
    bad = good;
    bad.vocabulary = 50257;
    check_refused(&bad, REBATCH_E_INVALID, "vocabulary is 50257: expected a multiple of 64");
    bad = good;
    bad.channels = 4096;
    bad.heads = 32;
    check_refused(&bad, REBATCH_E_UNSUPPORTED, "channels is 4096: expected at most 2048 on a GPU");
    bad = good;
    bad.length = 65537;
    check_refused(&bad, REBATCH_E_INVALID, "length is 65537: expected 1 to 65536");
}

/* The longest and widest sample fits the scratch, as the check of sizes says. */
Test(gpt_cuda_ops, the_longest_and_widest_sample_is_taken)
{
    const size_t T = 65536, C = 2048;
    const struct gpt_sizes sizes = {T, C, 16, 256};
    ASSERT_OK(gpt_cuda_ops_get()->check_sizes(&sizes));
    cr_assert_leq(rbk_embedding_backward_scratch_bytes(1, T), GPT_CUDA_SCRATCH_BYTES);
    cr_assert_leq(rbk_layer_norm_backward_scratch_bytes(1, T, C), GPT_CUDA_SCRATCH_BYTES);
    cr_assert_leq(rbk_bias_backward_scratch_bytes(1, T, 4 * C), GPT_CUDA_SCRATCH_BYTES);
    cr_assert_leq(rbk_attention_backward_scratch_bytes(1, T, C / 32), GPT_CUDA_SCRATCH_BYTES);
}

Test(gpt_cuda_ops, products_that_are_no_multiple_of_64_are_refused)
{
    static const size_t sizes[][2] = {{63, 64}, {96, 64}, {64, 100}, {0, 64}};
    float *nowhere = NULL; /* nothing may be read there */
    queues_open(8);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const struct gpt_matmul shape = {8, sizes[i][0], sizes[i][1], false};
        const char *words = sizes[i][0] % 64 || sizes[i][0] == 0
                                ? "inputs is"
                                : "outputs is 100: expected a multiple of 64";
        ASSERT_ERROR(gpu_ops->matmul_forward(&on_gpu, nowhere, nowhere, nowhere, NULL, &shape),
                     REBATCH_E_UNSUPPORTED, words);
        ASSERT_ERROR(gpu_ops->matmul_backward_input(&on_gpu, nowhere, nowhere, nowhere, &shape),
                     REBATCH_E_UNSUPPORTED, words);
        ASSERT_ERROR(
            gpu_ops->matmul_backward_weight(&on_gpu, nowhere, NULL, nowhere, nowhere, &shape),
            REBATCH_E_UNSUPPORTED, words);
    }
    const struct gpt_matmul rows = {9, 64, 64, false};
    ASSERT_ERROR(gpu_ops->matmul_forward(&on_gpu, nowhere, nowhere, nowhere, NULL, &rows),
                 REBATCH_E_INVALID, "9 rows: expected a multiple of the 8 of a sample");
    ASSERT_OK(rebatch_stream_synchronize(on_gpu.device, NULL));
    queues_close();
}
