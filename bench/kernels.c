/* TFLOP/s of the reference model's products on a GPU, one by one, at the shapes of GPT-2 124M in
 * bf16 with 16 samples of 1,024 tokens. A product of cuBLASLt stands beside each weight gradient.
 * An argument: what a name has to contain. */
#include <stdio.h>
#include <string.h>

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include "kernels.h"
#include "measure.h"

enum { RUNS = 9, WARM = 3 };
enum { B = 16, T = 1024, C = 768, H = 12, D = 64, V = 50304, R = B * T };

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
}

/* A product's sizes; attention does not look at them. */
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

int main(int count, char **arguments)
{
    if (count > 1)
        only = arguments[1];
    must(cudaSetDevice(0), "cudaSetDevice");
    must_library(cublasLtCreate(&library), "cublasLtCreate");
    fill_random();
    bench_products();
    return 0;
}
