/* Owns what the gpt_cuda_* tests share.
 * Must not know what any operation does. */
#include "gpt_cuda_support.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- queues ---- */

struct gpt_queue on_host, on_gpu;
const struct gpt_ops *host_ops, *gpu_ops;

#define PAIRS_MOST 512
static void *host_arrays[PAIRS_MOST];
static size_t host_array_count;
static rebatch_pool *arrays;

void queues_open(size_t sample_rows)
{
    host_ops = &gpt_host_ops;
    gpu_ops = gpt_cuda_ops_get();
    cr_assert_not_null(gpu_ops, "the tests were built without CUDA");
    on_host = (struct gpt_queue){.sample_rows = sample_rows};
    on_gpu = (struct gpt_queue){.sample_rows = sample_rows};
    ASSERT_OK(rebatch_device_open_host(&on_host.device, REBATCH_UNLIMITED, NULL));
    ASSERT_OK(rebatch_device_open_cuda(&on_gpu.device, NULL));
    ASSERT_OK(rebatch_pool_create(&arrays, on_gpu.device, NULL));
    ASSERT_OK(host_ops->open(&on_host));
    ASSERT_OK(gpu_ops->open(&on_gpu));
}

void queues_close(void)
{
    rebatch_memory_info memory;
    while (host_array_count > 0)
        free(host_arrays[--host_array_count]);
    host_ops->close(&on_host);
    gpu_ops->close(&on_gpu);
    rebatch_pool_destroy(arrays);
    ASSERT_OK(rebatch_device_memory(on_gpu.device, &memory));
    cr_assert_eq(memory.used_bytes, 0);
    rebatch_device_close(on_host.device);
    rebatch_device_close(on_gpu.device);
}

/* ---- pairs ---- */

static void copy(void *to, const void *from, size_t bytes)
{
    ASSERT_OK(rebatch_copy(on_gpu.device, to, from, bytes, NULL));
    ASSERT_OK(rebatch_stream_synchronize(on_gpu.device, NULL));
}

static struct pair pair_make(size_t count, size_t size)
{
    struct pair pair = {.count = count, .size = size};
    pair.host = malloc(count * size);
    cr_assert_not_null(pair.host);
    cr_assert_lt(host_array_count, PAIRS_MOST);
    host_arrays[host_array_count++] = pair.host;
    ASSERT_OK(rebatch_pool_alloc(&pair.gpu, arrays, count * size, NULL, 0));
    return pair;
}

static void upload(const struct pair *pair)
{
    copy(pair->gpu, pair->host, pair->count * pair->size);
}

struct pair pair_random(size_t count, float scale, support_random *random)
{
    const struct pair pair = pair_make(count, sizeof(float));
    float *values = pair.host;
    for (size_t i = 0; i < count; i++)
        values[i] = scale * (float)(2.0 * support_uniform(random) - 1.0);
    upload(&pair);
    return pair;
}

struct pair pair_random_doubles(size_t count, double scale, support_random *random)
{
    const struct pair pair = pair_make(count, sizeof(double));
    double *values = pair.host;
    for (size_t i = 0; i < count; i++)
        values[i] = scale * (2.0 * support_uniform(random) - 1.0);
    upload(&pair);
    return pair;
}

struct pair pair_tokens(size_t samples, size_t length, size_t vocabulary, support_random *random)
{
    const struct pair pair = pair_make(samples * (length + 1), sizeof(int32_t));
    int32_t *values = pair.host;
    for (size_t i = 0; i < pair.count; i++)
        values[i] = (int32_t)(support_next(random) % vocabulary);
    upload(&pair);
    return pair;
}

static struct pair poisoned(size_t count, size_t size)
{
    const struct pair pair = pair_make(count, size);
    memset(pair.host, 0xFF, count * size);
    pair_poison(&pair);
    return pair;
}

struct pair pair_poisoned(size_t count)
{
    return poisoned(count, sizeof(float));
}

struct pair pair_poisoned_doubles(size_t count)
{
    return poisoned(count, sizeof(double));
}

void pair_poison(const struct pair *pair)
{
    ASSERT_OK(rebatch_fill(on_gpu.device, pair->gpu, 0xFF, pair->count * pair->size, NULL));
}

void pair_copy(const struct pair *to, const struct pair *from)
{
    cr_assert(to->count == from->count && to->size == from->size);
    copy(to->gpu, from->gpu, to->count * to->size);
}

void *pair_at(const struct pair *pair, size_t index)
{
    return (char *)pair->gpu + index * pair->size;
}

static double number_at(const void *values, size_t size, size_t index)
{
    return size == sizeof(double) ? ((const double *)values)[index]
                                  : (double)((const float *)values)[index];
}

void pair_expect_close(const struct pair *pair, const char *what)
{
    void *got = malloc(pair->count * pair->size);
    double difference = 0.0, whole = 0.0;
    cr_assert_not_null(got);
    copy(got, pair->gpu, pair->count * pair->size);
    for (size_t i = 0; i < pair->count; i++) {
        const double want = number_at(pair->host, pair->size, i);
        const double off = number_at(got, pair->size, i) - want;
        difference += off * off; /* not a number as soon as one is */
        whole += want * want;
    }
    free(got);
    const double error = whole > 0.0 ? sqrt(difference / whole) : sqrt(difference);
    cr_assert(error <= 1e-5, "%s: relative error %g", what, error);
}

void pair_expect_same(const struct pair *a, size_t a_first, const struct pair *b, size_t b_first,
                      size_t count, const char *what)
{
    const size_t size = a->size;
    cr_assert(size == b->size && a_first + count <= a->count && b_first + count <= b->count);
    char *left = malloc(count * size), *right = malloc(count * size);
    cr_assert(left && right);
    copy(left, pair_at(a, a_first), count * size);
    copy(right, pair_at(b, b_first), count * size);
    size_t at = 0;
    while (at < count && memcmp(left + at * size, right + at * size, size) == 0 &&
           isfinite(number_at(left, size, at)))
        at++;
    if (at < count)
        cr_assert_fail("%s: number %zu of %zu is %.9g and %.9g", what, at, count,
                       number_at(left, size, at), number_at(right, size, at));
    free(left);
    free(right);
}

/* ---- a training run ---- */

static int last_error(void)
{
    return (int)cudaGetLastError();
}

struct run_options gpu_run(void)
{
    struct run_options options = tiny_run();
    options.on_gpu = true;
    options.last_error = last_error;
    return options;
}
