/* Owns the tests of the matrix products at a model's sizes: that a sample's bits do not depend on
 * how many samples there are. Must not know private headers of the library. */
#include <stdlib.h>
#include <string.h>

#include "gpt_cuda_support.h"

enum { LENGTH = 1024, SAMPLES_MOST = 64, C = 768, V = 50304 };

static const size_t counts[] = {1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 22, 32, 48, 63, 64};
#define COUNT_COUNT (sizeof counts / sizeof *counts)

static void *device_memory(size_t bytes)
{
    return support_scratch(bytes);
}

/* A number in [-1, 1) as an element. */
static void put_random(unsigned char *to, enum gpt_dtype dtype, support_random *random)
{
    const float uniform = (float)support_uniform(random) * 2.0f - 1.0f;
    const uint32_t bits = (uint32_t)support_next(random);
    uint32_t whole;
    memcpy(&whole, &uniform, sizeof whole);
    const uint16_t bf16 = (uint16_t)(whole >> 16);
    const uint16_t fp16 = (uint16_t)((bits & 0x83FF) | (9 + (bits >> 16) % 6) << 10);
    if (dtype == GPT_FP32)
        memcpy(to, &uniform, sizeof uniform);
    else
        memcpy(to, dtype == GPT_BF16 ? &bf16 : &fp16, sizeof bf16);
}

/* So many random numbers, then the same again: no two samples are alike. */
#define PERIOD ((size_t)4194301)

static void *device_random(size_t elements, enum gpt_dtype dtype, support_random *random)
{
    const size_t size = gpt_dtype_bytes(dtype), bytes = elements * size;
    const size_t period = (elements < PERIOD ? elements : PERIOD) * size;
    unsigned char *numbers = malloc(period), *memory = device_memory(bytes);
    cr_assert(numbers != NULL);
    for (size_t at = 0; at < period; at += size)
        put_random(numbers + at, dtype, random);
    for (size_t at = 0; at < bytes; at += period)
        support_must(cudaMemcpy(memory + at, numbers, bytes - at < period ? bytes - at : period,
                                cudaMemcpyHostToDevice),
                     "cudaMemcpy");
    free(numbers);
    return memory;
}

/* One product of each kind, for `count` samples from the first. */
struct bed {
    struct gpt_matmul shape;
    size_t size; /* of an element */
    void *x, *dy, *weight, *bias, *y, *dx;
};

static void run(const struct bed *bed, size_t count)
{
    struct gpt_matmul shape = bed->shape;
    shape.rows = count * LENGTH;
    support_must(cudaMemset(bed->y, 0xFF, shape.rows * shape.outputs * bed->size), "cudaMemset");
    support_must(cudaMemset(bed->dx, 0xFF, shape.rows * shape.inputs * bed->size), "cudaMemset");
    ASSERT_OK(gpu_ops->matmul_forward(&on_gpu, bed->y, bed->x, bed->weight, bed->bias, &shape));
    ASSERT_OK(gpu_ops->matmul_backward_input(&on_gpu, bed->dx, bed->dy, bed->weight, &shape));
    support_must(cudaDeviceSynchronize(), "products");
}

/* The first and the last of `count` samples. */
static void expect_same(const char *got, const char *want, size_t sample_bytes, const char *what,
                        const struct bed *bed, size_t count)
{
    unsigned char *left = malloc(sample_bytes), *right = malloc(sample_bytes);
    cr_assert(left && right);
    for (size_t sample = 0; sample<count; sample += count> 1 ? count - 1 : 1) {
        const size_t at = sample * sample_bytes;
        support_must(cudaMemcpy(left, got + at, sample_bytes, cudaMemcpyDeviceToHost),
                     "cudaMemcpy");
        support_must(cudaMemcpy(right, want + at, sample_bytes, cudaMemcpyDeviceToHost),
                     "cudaMemcpy");
        cr_assert(memcmp(left, right, sample_bytes) == 0,
                  "%s of %zu x %zu, sample %zu of %zu: other bits", what, bed->shape.inputs,
                  bed->shape.outputs, sample, count);
    }
    free(left);
    free(right);
}

/* Every count against the largest. */
static void check_shape(size_t inputs, size_t outputs, bool transposed, bool with_bias,
                        enum gpt_dtype dtype, size_t most, support_random *random)
{
    const size_t size = gpt_dtype_bytes(dtype), rows = most * LENGTH;
    const size_t y_bytes = LENGTH * outputs * size, dx_bytes = LENGTH * inputs * size;
    struct bed bed = {{0, inputs, outputs, transposed},
                      size,
                      device_random(rows * inputs, dtype, random),
                      device_random(rows * outputs, dtype, random),
                      device_random(inputs * outputs, dtype, random),
                      with_bias ? device_random(outputs, dtype, random) : NULL,
                      device_memory(rows * outputs * size),
                      device_memory(rows * inputs * size)};
    char *y = device_memory(y_bytes * most), *dx = device_memory(dx_bytes * most);
    run(&bed, most);
    support_must(cudaMemcpy(y, bed.y, y_bytes * most, cudaMemcpyDeviceToDevice), "cudaMemcpy");
    support_must(cudaMemcpy(dx, bed.dx, dx_bytes * most, cudaMemcpyDeviceToDevice), "cudaMemcpy");
    for (size_t i = 0; i < COUNT_COUNT && counts[i] < most; i++) {
        run(&bed, counts[i]);
        expect_same(bed.y, y, y_bytes, "y", &bed, counts[i]);
        expect_same(bed.dx, dx, dx_bytes, "dx", &bed, counts[i]);
    }
    void *const all[] = {bed.x, bed.dy, bed.weight, bed.bias, bed.y, bed.dx, y, dx};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        support_must(cudaFree(all[i]), "cudaFree");
}

static void check_model(enum gpt_dtype dtype, size_t most, size_t head_most, support_random *random)
{
    queues_open(LENGTH);
    gpu_ops->close(&on_gpu);
    on_gpu.dtype = dtype;
    ASSERT_OK(gpu_ops->open(&on_gpu));
    check_shape(C, C, false, true, dtype, most, random);
    check_shape(C, 3 * C, false, true, dtype, most, random);
    check_shape(C, 4 * C, false, true, dtype, most, random);
    check_shape(4 * C, C, false, true, dtype, most, random);
    check_shape(C, V, true, false, dtype, head_most, random);
    queues_close();
}

Test(gpt_cuda_matmul, the_number_of_samples_changes_no_bit_in_bf16, .description = "seed 81")
{
    support_random random = {81};
    check_model(GPT_BF16, SAMPLES_MOST, 6, &random);
}

Test(gpt_cuda_matmul, the_number_of_samples_changes_no_bit_in_fp16, .description = "seed 82")
{
    support_random random = {82};
    check_model(GPT_FP16, 16, 3, &random);
}

Test(gpt_cuda_matmul, the_number_of_samples_changes_no_bit_in_fp32, .description = "seed 83")
{
    support_random random = {83};
    check_model(GPT_FP32, 8, 2, &random);
}
