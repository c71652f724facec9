/* How fast the GPU operations of the reference model run, one by one, at the shapes of GPT-2 124M
 * in bf16 with 16 samples of 1,024 tokens: TFLOP/s for products, GB/s for what only moves numbers.
 * A product of cuBLASLt stands beside each weight gradient. An argument: what a name has to
 * contain. */
#include <stdio.h>
#include <string.h>

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include "kernels.h"
#include "measure.h"

enum { RUNS = 9, WARM = 3 };
enum { B = 16, T = 1024, C = 768, H = 12, D = 64, V = 50304, R = B * T };

#define PARAMETERS ((size_t)124475904)

/* ---- what is measured with ---- */

static void must(cudaError_t status, const char *what)
{
    if (status == cudaSuccess)
        return;
    fprintf(stderr, "bench-kernels: %s: %s\n", what, cudaGetErrorString(status));
    exit(1);
}

static void must_library(cublasStatus_t status, const char *what)
{
    if (status == CUBLAS_STATUS_SUCCESS)
        return;
    fprintf(stderr, "bench-kernels: %s: %s\n", what, cublasLtGetStatusString(status));
    exit(1);
}

/* Large enough for any array; random, because a product of zeros takes less power and runs
 * faster. */
enum { ARRAYS = 5 };
static void *arrays[ARRAYS];
static void *scratch;
static int32_t *tokens;
static cublasLtHandle_t library;
static const char *only = ""; /* what a name has to contain */

#define ARRAY_BYTES ((size_t)R * V * 2)
#define SCRATCH_BYTES ((size_t)256 << 20)

static uint32_t next_random(void)
{
    static uint64_t state = 1;
    state += UINT64_C(0x9E3779B97F4A7C15);
    uint64_t z = state;
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return (uint32_t)(z >> 32);
}

/* Numbers of both signs between 2^-8 and 2, in bf16; read as fp32 they are numbers as well. */
static void fill_random(void)
{
    enum { COUNT = 1 << 22 };
    uint16_t *numbers = malloc(COUNT * sizeof *numbers);
    if (!numbers)
        exit(1);
    for (size_t i = 0; i < COUNT; i++) {
        const uint32_t bits = next_random();
        numbers[i] = (uint16_t)((bits & 0x807F) | (119 + (bits >> 16) % 9) << 7);
    }
    for (size_t a = 0; a < ARRAYS; a++) {
        must(cudaMalloc(&arrays[a], ARRAY_BYTES), "cudaMalloc");
        for (size_t at = 0; at < ARRAY_BYTES; at += COUNT * sizeof *numbers) {
            const size_t left = ARRAY_BYTES - at, size = COUNT * sizeof *numbers;
            must(cudaMemcpy((char *)arrays[a] + at, numbers, left < size ? left : size,
                            cudaMemcpyHostToDevice),
                 "cudaMemcpy");
        }
    }
    free(numbers);
    must(cudaMalloc(&scratch, SCRATCH_BYTES), "cudaMalloc");
    int32_t *ids = malloc((size_t)B * (T + 1) * sizeof *ids);
    if (!ids)
        exit(1);
    for (size_t i = 0; i < (size_t)B * (T + 1); i++)
        ids[i] = (int32_t)(next_random() % 50257);
    must(cudaMalloc((void **)&tokens, (size_t)B * (T + 1) * sizeof *ids), "cudaMalloc");
    must(cudaMemcpy(tokens, ids, (size_t)B * (T + 1) * sizeof *ids, cudaMemcpyHostToDevice),
         "cudaMemcpy");
    free(ids);
}

/* A product's sizes; others do not look at them. */
struct sizes {
    size_t m, n;
};

typedef cudaError_t operation(const struct sizes *sizes);

/* Median microseconds of one call. */
static double measure(const char *name, operation *run, const struct sizes *sizes)
{
    double micros[RUNS];
    cudaEvent_t began, ended;
    must(cudaEventCreate(&began), "cudaEventCreate");
    must(cudaEventCreate(&ended), "cudaEventCreate");
    for (int i = 0; i < WARM; i++)
        must(run(sizes), name);
    for (int r = 0; r < RUNS; r++) {
        enum { CALLS = 5 };
        must(cudaEventRecord(began, NULL), "cudaEventRecord");
        for (int i = 0; i < CALLS; i++)
            must(run(sizes), name);
        must(cudaEventRecord(ended, NULL), "cudaEventRecord");
        must(cudaEventSynchronize(ended), name);
        float ms;
        must(cudaEventElapsedTime(&ms, began, ended), "cudaEventElapsedTime");
        micros[r] = 1e3 * (double)ms / CALLS;
    }
    must(cudaEventDestroy(began), "cudaEventDestroy");
    must(cudaEventDestroy(ended), "cudaEventDestroy");
    return measure_median(micros, RUNS);
}

/* ---- products ---- */

static cudaError_t weight_gradient(const struct sizes *s)
{
    return rbk_weight_gradient(arrays[0], arrays[1], arrays[2], B, T, s->m, s->n, RBK_BF16, NULL);
}

static cudaError_t weight_gradient_portable(const struct sizes *s)
{
    return rbk_weight_gradient_portable(arrays[0], arrays[1], arrays[2], B, T, s->m, s->n, RBK_BF16,
                                        NULL);
}

static cudaError_t weight_gradient_fp32(const struct sizes *s)
{
    return rbk_weight_gradient(arrays[0], arrays[1], arrays[2], B, T, s->m, s->n, RBK_F32, NULL);
}

/* One product over all rows: the library's first choice. Its arrays are column-major. */
static cudaError_t library_weight_gradient(const struct sizes *s)
{
    static struct sizes last;
    static cublasLtMatmulHeuristicResult_t found;
    static cublasLtMatmulDescOpaque_t product;
    static cublasLtMatrixLayoutOpaque_t a, b, c;
    const float one = 1.0f;
    if (last.m != s->m || last.n != s->n) {
        const cublasOperation_t turn = CUBLAS_OP_T;
        const uint64_t workspace_bytes = (uint64_t)32 << 20;
        cublasLtMatmulPreferenceOpaque_t preference;
        int count = 0;
        must_library(cublasLtMatmulDescInit(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describe");
        must_library(cublasLtMatmulDescSetAttribute(&product, CUBLASLT_MATMUL_DESC_TRANSB, &turn,
                                                    sizeof turn),
                     "describe");
        must_library(cublasLtMatrixLayoutInit(&a, CUDA_R_16BF, s->n, R, (int64_t)s->n), "a");
        must_library(cublasLtMatrixLayoutInit(&b, CUDA_R_16BF, s->m, R, (int64_t)s->m), "b");
        must_library(cublasLtMatrixLayoutInit(&c, CUDA_R_32F, s->n, s->m, (int64_t)s->n), "c");
        must_library(cublasLtMatmulPreferenceInit(&preference), "preference");
        must_library(cublasLtMatmulPreferenceSetAttribute(&preference,
                                                          CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                          &workspace_bytes, sizeof workspace_bytes),
                     "preference");
        must_library(cublasLtMatmulAlgoGetHeuristic(library, &product, &a, &b, &c, &c, &preference,
                                                    1, &found, &count),
                     "cublasLtMatmulAlgoGetHeuristic");
        last = *s;
    }
    must_library(cublasLtMatmul(library, &product, &one, arrays[2], &a, arrays[1], &b, &one,
                                arrays[0], &c, arrays[0], &c, &found.algo, scratch,
                                (size_t)32 << 20, NULL),
                 "cublasLtMatmul");
    return cudaSuccess;
}

static cudaError_t attention_forward(const struct sizes *s)
{
    (void)s;
    return rbk_attention_forward(arrays[0], scratch, arrays[1], B, T, H, D, 0.125f, RBK_BF16, NULL);
}

static cudaError_t attention_backward(const struct sizes *s)
{
    (void)s;
    char *const delta = (char *)scratch + SCRATCH_BYTES / 2;
    return rbk_attention_backward(arrays[2], arrays[3], arrays[1], arrays[0], scratch, delta,
                                  SCRATCH_BYTES / 2, B, T, H, D, 0.125f, RBK_BF16, NULL);
}

static void print_product(const char *name, const char *shape, operation *run,
                          const struct sizes *sizes, double flops)
{
    if (!strstr(name, only))
        return;
    const double micros = measure(name, run, sizes);
    printf("%-36s %-16s %9.1f us %8.0f TFLOP/s\n", name, shape, micros, flops / micros * 1e-6);
}

static void bench_products(void)
{
    static const struct sizes weights[] = {{C, C}, {C, 3 * C}, {C, 4 * C}, {4 * C, C}, {V, C}};
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++) {
        const struct sizes *s = &weights[i];
        const double flops = 2.0 * R * (double)s->m * (double)s->n;
        char shape[32];
        snprintf(shape, sizeof shape, "%zu x %zu", s->m, s->n);
        print_product("weight gradient", shape, weight_gradient, s, flops);
        print_product("weight gradient, without wgmma", shape, weight_gradient_portable, s, flops);
        print_product("weight gradient, cuBLASLt in one", shape, library_weight_gradient, s, flops);
    }
    print_product("weight gradient, fp32", "768 x 768", weight_gradient_fp32, &weights[0],
                  2.0 * R * C * C);
    /* Of causal attention half of each product counts: 2 forward, 5 backward. */
    const double product = 2.0 * B * H * (double)T * T * D / 2;
    print_product("attention", "16 x 12 x 1024", attention_forward, NULL, 2 * product);
    print_product("attention, backward", "16 x 12 x 1024", attention_backward, NULL, 5 * product);
}

/* ---- what moves numbers ---- */

static cudaError_t copy(const struct sizes *s)
{
    (void)s;
    return cudaMemcpyAsync(arrays[0], arrays[1], (size_t)R * 4 * C * 2, cudaMemcpyDeviceToDevice,
                           NULL);
}

static cudaError_t layer_norm_forward(const struct sizes *s)
{
    (void)s;
    return rbk_layer_norm_forward(arrays[0], scratch, (float *)scratch + R, arrays[1], arrays[2],
                                  arrays[3], R, C, 1e-5f, RBK_BF16, NULL);
}

static cudaError_t layer_norm_backward(const struct sizes *s)
{
    (void)s;
    float *const sums = scratch;
    return rbk_layer_norm_backward(
        arrays[0], sums + 2 * R, sums + 2 * R + C, arrays[1], arrays[0], arrays[2], sums, sums + R,
        arrays[3], (char *)scratch + SCRATCH_BYTES / 2, SCRATCH_BYTES / 2, B, T, C, RBK_BF16, NULL);
}

static cudaError_t gelu_forward(const struct sizes *s)
{
    (void)s;
    return rbk_gelu_forward(arrays[0], arrays[1], (size_t)R * 4 * C, RBK_BF16, NULL);
}

static cudaError_t gelu_backward(const struct sizes *s)
{
    (void)s;
    return rbk_gelu_backward(arrays[0], arrays[0], arrays[1], (size_t)R * 4 * C, RBK_BF16, NULL);
}

static cudaError_t bias_backward(const struct sizes *s)
{
    (void)s;
    return rbk_bias_backward(scratch, arrays[1], (char *)scratch + SCRATCH_BYTES / 2,
                             SCRATCH_BYTES / 2, B, T, 4 * C, RBK_BF16, NULL);
}

static cudaError_t residual(const struct sizes *s)
{
    static const rbk_dropout_key key = {.seed = 1};
    (void)s;
    return rbk_bias_dropout_residual(arrays[0], arrays[1], NULL, arrays[2], &key, B, T, C, RBK_BF16,
                                     NULL);
}

static cudaError_t residual_dropout(const struct sizes *s)
{
    static const rbk_dropout_key key = {.seed = 1, .probability = 0.1f};
    (void)s;
    return rbk_bias_dropout_residual(arrays[0], arrays[1], NULL, arrays[2], &key, B, T, C, RBK_BF16,
                                     NULL);
}

static cudaError_t cross_entropy(const struct sizes *s)
{
    (void)s;
    return rbk_cross_entropy(scratch, arrays[0], tokens + 1, T + 1, B, T, 50257, V, 1e-5f, NULL, 1,
                             RBK_BF16, NULL);
}

static cudaError_t embedding_forward(const struct sizes *s)
{
    (void)s;
    return rbk_embedding_forward(arrays[0], tokens, T + 1, arrays[1], arrays[2], B, T, C, V,
                                 RBK_BF16, NULL);
}

static cudaError_t embedding_backward(const struct sizes *s)
{
    (void)s;
    return rbk_embedding_backward(arrays[0], arrays[1], arrays[2], tokens, T + 1, scratch,
                                  SCRATCH_BYTES, B, T, C, V, RBK_BF16, NULL);
}

static cudaError_t adamw(const struct sizes *s)
{
    static const rbk_adamw_settings settings = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 1};
    (void)s;
    return rbk_adamw(arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], &settings, NULL, NULL,
                     NULL, PARAMETERS, RBK_BF16, NULL);
}

static cudaError_t sum_squares(const struct sizes *s)
{
    (void)s;
    return rbk_sum_squares(scratch, arrays[4], PARAMETERS, NULL);
}

static void bench_movers(void)
{
    /* Bytes that have to pass between memory and the chip at least: what is read and written. */
    static const struct {
        const char *name;
        operation *run;
        double bytes;
    } all[] = {
        {"copy, for comparison", copy, 2.0 * R * 4 * C * 2},
        {"layer norm", layer_norm_forward, 2.0 * R * C * 2},
        {"layer norm, backward", layer_norm_backward, 4.0 * R * C * 2},
        {"GELU", gelu_forward, 2.0 * R * 4 * C * 2},
        {"GELU, backward", gelu_backward, 3.0 * R * 4 * C * 2},
        {"bias, backward", bias_backward, 1.0 * R * 4 * C * 2},
        {"residual", residual, 3.0 * R * C * 2},
        {"residual with dropout", residual_dropout, 3.0 * R * C * 2},
        {"cross-entropy and gradient", cross_entropy, 2.0 * R * V * 2},
        {"embedding", embedding_forward, 2.0 * R * C * 2},
        {"embedding, backward", embedding_backward, 1.0 * R * C * 2},
        {"AdamW", adamw, 30.0 * PARAMETERS},
        {"sum of squares", sum_squares, 4.0 * PARAMETERS},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (!strstr(all[i].name, only))
            continue;
        const double micros = measure(all[i].name, all[i].run, NULL);
        printf("%-53s %9.1f us %8.0f GB/s\n", all[i].name, micros, all[i].bytes / micros * 1e-3);
    }
}

int main(int count, char **arguments)
{
    if (count > 1)
        only = arguments[1];
    must(cudaSetDevice(0), "cudaSetDevice");
    must_library(cublasLtCreate(&library), "cublasLtCreate");
    fill_random();
    bench_products();
    bench_movers();
    return 0;
}
