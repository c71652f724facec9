/* What the gpt_cuda_* tests share: a GPU's queue beside a host's, arrays that exist on both, and a
 * training run on a GPU. Run these tests with -j1; the GPU is opened inside the test. Must not know
 * private headers of the library. */
#ifndef REBATCH_TESTS_GPT_CUDA_SUPPORT_H
#define REBATCH_TESTS_GPT_CUDA_SUPPORT_H

#include "integration/gpt_run.h"
#include "kernels_support.h"

/* ---- two queues and their operations ---- */

extern struct gpt_queue on_host, on_gpu;
extern const struct gpt_ops *host_ops, *gpu_ops;

void queues_open(size_t sample_rows);
/* Frees every pair too. */
void queues_close(void);

/* ---- arrays on both ---- */

/* `count` numbers of `size` bytes: floats, doubles or tokens. */
struct pair {
    void *host, *gpu;
    size_t count, size;
};

/* Uniform in [-scale, scale), the same on both. */
struct pair pair_random(size_t count, float scale, support_random *random);
struct pair pair_random_doubles(size_t count, double scale, support_random *random);
/* Tokens [samples][length + 1] below `vocabulary`. */
struct pair pair_tokens(size_t samples, size_t length, size_t vocabulary, support_random *random);
/* Not-a-numbers on both. */
struct pair pair_poisoned(size_t count);
struct pair pair_poisoned_doubles(size_t count);
/* Not-a-numbers again, on the GPU. */
void pair_poison(const struct pair *pair);
/* The GPU's numbers of `from`, which is as long. */
void pair_copy(const struct pair *to, const struct pair *from);

/* Number `index` on the GPU. */
void *pair_at(const struct pair *pair, size_t index);

/* The GPU's numbers are within 1e-5 of the host's, in the Euclidean norm. */
void pair_expect_close(const struct pair *pair, const char *what);
/* Numbers [a_first, a_first + count) of a, on the GPU, and [b_first, ...) of b: the same bits, and
 * none a NaN. */
void pair_expect_same(const struct pair *a, size_t a_first, const struct pair *b, size_t b_first,
                      size_t count, const char *what);

/* ---- a training run ---- */

/* tiny_run() on the GPU; run_close() looks for an error in the runtime. */
struct run_options gpu_run(void);

#endif
