/* Owns what the kernel tests share. Must not know: what any kernel does. Run with -j1. */
#include "kernels_support.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

const rbk_dtype support_dtypes[DTYPE_COUNT] = {RBK_F32, RBK_BF16, RBK_F16};

const size_t support_cuts[SUPPORT_CUT_COUNT][SUPPORT_CUT_BATCH + 1] = {
    {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0},
    {2, 2, 2, 2, 2, 2, 1, 0},
    {3, 3, 3, 3, 1, 0},
    {8, 5, 0},
    {12, 1, 0},
};

size_t support_stride(void)
{
    const char *text = getenv("REBATCH_TEST_STRIDE");
    const long stride = text ? strtol(text, NULL, 10) : 1;
    return stride > 1 ? (size_t)stride : 1;
}

const char *support_dtype_name(rbk_dtype dtype)
{
    return dtype == RBK_F32 ? "fp32" : dtype == RBK_BF16 ? "bf16" : "fp16";
}

double support_tolerance(rbk_dtype dtype)
{
    return dtype == RBK_F32 ? 1e-5 : 1e-2;
}

/* A binary format: bits of the significand with the leading one, least normal exponent, largest
 * number. */
static double round_to_format(double x, int bits, int least_exponent, double largest)
{
    if (x == 0.0 || !isfinite(x))
        return x;
    const int exponent = ilogb(x) > least_exponent ? ilogb(x) : least_exponent;
    const double unit = ldexp(1.0, exponent - (bits - 1));
    const double rounded = nearbyint(x / unit) * unit;
    return fabs(rounded) > largest ? copysign(INFINITY, x) : rounded;
}

double support_round(rbk_dtype dtype, double x)
{
    switch (dtype) {
    case RBK_F32:
        return (double)(float)x;
    case RBK_BF16:
        return round_to_format(x, 8, -126, 0x1.FEp127);
    case RBK_F16:
        return round_to_format(x, 11, -14, 65504.0);
    }
    return NAN;
}

uint64_t support_next(support_random *random)
{
    /* SplitMix64 (Steele, Lea and Flood, 2014) */
    random->state += UINT64_C(0x9E3779B97F4A7C15);
    uint64_t z = random->state;
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

double support_uniform(support_random *random)
{
    return (double)(support_next(random) >> 11) * 0x1p-53;
}

double support_normal(support_random *random)
{
    const double radius = sqrt(-2.0 * log(1.0 - support_uniform(random)));
    return radius * cos(6.283185307179586 * support_uniform(random));
}

void support_must(cudaError_t status, const char *what)
{
    if (status == cudaSuccess)
        status = cudaDeviceSynchronize();
    cr_assert(status == cudaSuccess, "%s: %s", what, cudaGetErrorString(status));
}

/* ---- memory that is freed at the end ---- */

#define OWNED_MOST 4096

static struct owned {
    void *memory[OWNED_MOST];
    size_t count;
} on_device, on_host;

static void *own(struct owned *owned, void *memory)
{
    cr_assert(owned->count < OWNED_MOST);
    return owned->memory[owned->count++] = memory;
}

void *support_scratch(size_t bytes)
{
    void *memory = NULL;
    support_must(cudaMalloc(&memory, bytes), "cudaMalloc");
    support_must(cudaMemset(memory, 0xFF, bytes), "cudaMemset");
    return own(&on_device, memory);
}

void *support_calloc(size_t count, size_t size)
{
    void *memory = calloc(count, size);
    cr_assert(memory != NULL, "no host memory for %zu times %zu bytes", count, size);
    return own(&on_host, memory);
}

void support_free_all(void)
{
    while (on_device.count > 0)
        support_must(cudaFree(on_device.memory[--on_device.count]), "cudaFree");
    while (on_host.count > 0)
        free(on_host.memory[--on_host.count]);
}

void support_each_dtype(void (*check)(rbk_dtype dtype, support_random *random), uint64_t seed)
{
    support_random random = {seed};
    for (int d = 0; d < DTYPE_COUNT; d++) {
        check(support_dtypes[d], &random);
        support_free_all();
    }
}

int32_t *support_upload_ints(const int32_t *values, size_t count)
{
    int32_t *memory = support_scratch(count * sizeof *values);
    support_must(cudaMemcpy(memory, values, count * sizeof *values, cudaMemcpyHostToDevice),
                 "cudaMemcpy");
    return memory;
}

/* The bits of a number that the format holds exactly. */
static uint16_t half_bits(double x)
{
    const uint16_t sign = signbit(x) ? 0x8000 : 0;
    if (isnan(x))
        return 0x7E00;
    if (isinf(x))
        return (uint16_t)(sign | 0x7C00);
    if (fabs(x) < 0x1p-14)
        return (uint16_t)(sign | (uint16_t)(fabs(x) * 0x1p24));
    const int exponent = ilogb(x);
    const double fraction = ldexp(fabs(x), 10 - exponent) - 1024.0;
    return (uint16_t)(sign | (exponent + 15) << 10 | (int)fraction);
}

static double half_value(uint16_t bits)
{
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double magnitude = exponent == 31  ? (fraction ? NAN : INFINITY)
                             : exponent == 0 ? ldexp(fraction, -24)
                                             : ldexp(1024 + fraction, exponent - 25);
    return bits & 0x8000 ? -magnitude : magnitude;
}

static void encode(void *to, rbk_dtype dtype, const double *from, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const float number = (float)from[i];
        uint32_t bits;
        memcpy(&bits, &number, sizeof bits);
        if (dtype == RBK_F32)
            ((float *)to)[i] = number;
        else if (dtype == RBK_BF16)
            ((uint16_t *)to)[i] = (uint16_t)(bits >> 16);
        else
            ((uint16_t *)to)[i] = half_bits(from[i]);
    }
}

static void decode(double *to, rbk_dtype dtype, const void *from, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (dtype == RBK_F32) {
            to[i] = ((const float *)from)[i];
        } else if (dtype == RBK_F16) {
            to[i] = half_value(((const uint16_t *)from)[i]);
        } else {
            const uint32_t bits = (uint32_t)((const uint16_t *)from)[i] << 16;
            float number;
            memcpy(&number, &bits, sizeof number);
            to[i] = number;
        }
    }
}

static void *host_memory(size_t bytes)
{
    void *memory = malloc(bytes);
    cr_assert(memory != NULL, "no host memory for %zu bytes", bytes);
    return memory;
}

support_array support_array_poisoned(rbk_dtype dtype, size_t count)
{
    support_array array = {dtype, count, NULL, NULL};
    array.device = support_scratch(count * rbk_dtype_bytes(dtype));
    array.host = support_calloc(count, sizeof *array.host);
    for (size_t i = 0; i < count; i++)
        array.host[i] = NAN;
    return array;
}

support_array support_array_random(rbk_dtype dtype, size_t count, double scale,
                                   support_random *random)
{
    support_array array = support_array_poisoned(dtype, count);
    for (size_t i = 0; i < count; i++)
        array.host[i] = support_round(dtype, support_normal(random) * scale);
    support_array_write(&array);
    return array;
}

support_array support_array_copy(const support_array *array)
{
    support_array copy = support_array_poisoned(array->dtype, array->count);
    memcpy(copy.host, array->host, array->count * sizeof *copy.host);
    support_must(cudaMemcpy(copy.device, array->device,
                            array->count * rbk_dtype_bytes(array->dtype), cudaMemcpyDeviceToDevice),
                 "cudaMemcpy");
    return copy;
}

void support_array_write(support_array *array)
{
    const size_t bytes = array->count * rbk_dtype_bytes(array->dtype);
    void *encoded = host_memory(bytes);
    encode(encoded, array->dtype, array->host, array->count);
    support_must(cudaMemcpy(array->device, encoded, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    free(encoded);
}

void support_array_read(support_array *array)
{
    const size_t bytes = array->count * rbk_dtype_bytes(array->dtype);
    void *encoded = host_memory(bytes);
    support_must(cudaMemcpy(encoded, array->device, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
    decode(array->host, array->dtype, encoded, array->count);
    free(encoded);
}

void *support_at(const support_array *array, size_t index)
{
    return (char *)array->device + index * rbk_dtype_bytes(array->dtype);
}

float *support_float_at(const support_array *array, size_t index)
{
    cr_assert(array->dtype == RBK_F32);
    return (float *)array->device + index;
}

void support_expect_close(support_array *got, const double *want, double tolerance,
                          const char *what)
{
    support_array_read(got);
    double distance = 0.0, size = 0.0;
    for (size_t i = 0; i < got->count; i++) {
        distance += (got->host[i] - want[i]) * (got->host[i] - want[i]);
        size += want[i] * want[i];
    }
    const double error = size > 0.0 ? sqrt(distance / size) : sqrt(distance);
    cr_assert(error <= tolerance, "%s (%s, %zu elements): relative error %g, at most %g is allowed",
              what, support_dtype_name(got->dtype), got->count, error, tolerance);
}

void support_expect_same(const support_array *a, size_t a_first, const support_array *b,
                         size_t b_first, size_t count, const char *what)
{
    cr_assert(a->dtype == b->dtype && a_first + count <= a->count && b_first + count <= b->count);
    const size_t bytes = count * rbk_dtype_bytes(a->dtype);
    unsigned char *left = host_memory(bytes), *right = host_memory(bytes);
    support_must(cudaMemcpy(left, support_at(a, a_first), bytes, cudaMemcpyDeviceToHost),
                 "cudaMemcpy");
    support_must(cudaMemcpy(right, support_at(b, b_first), bytes, cudaMemcpyDeviceToHost),
                 "cudaMemcpy");
    size_t at = 0;
    while (at < bytes && left[at] == right[at])
        at++;
    cr_assert(at == bytes, "%s (%s): bits differ at element %zu of %zu", what,
              support_dtype_name(a->dtype), at / rbk_dtype_bytes(a->dtype), count);
    free(left);
    free(right);
}
