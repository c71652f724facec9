/* What the gpt_cuda_* tests share: a GPU's queue beside a host's, arrays that exist on both, and a
 * training run on a GPU. Run these tests with -j1; the GPU is opened inside the test. Must not know
 * private headers of the library. */
#ifndef REBATCH_TESTS_GPT_CUDA_SUPPORT_H
#define REBATCH_TESTS_GPT_CUDA_SUPPORT_H

#include <criterion/criterion.h>

#include "gpt/error.h"
#include "gpt/train.h"
#include "kernels_support.h"
#include "rebatch/rebatch.h"

#define ASSERT_OK(call)                                                                            \
    do {                                                                                           \
        const rebatch_status status_ = (call);                                                     \
        cr_assert(status_ == REBATCH_OK, "%s: %s: %s", #call, rebatch_status_name(status_),        \
                  gpt_last_error());                                                               \
    } while (0)

/* Fails unless the call answers `status` with a sentence that has `words` in it. */
#define ASSERT_ERROR(call, status, words)                                                          \
    do {                                                                                           \
        const rebatch_status answer_ = (call);                                                     \
        cr_assert(answer_ == (status), "%s: %s", #call, rebatch_status_name(answer_));             \
        cr_assert(strstr(gpt_last_error(), (words)), "\"%s\" does not say \"%s\"",                 \
                  gpt_last_error(), (words));                                                      \
    } while (0)

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

struct run {
    rebatch_device *inner, *device; /* device: the GPU behind a fault device */
    rebatch_stream stream;
    rebatch *rb;
    struct gpt_data *data;
    struct gpt_trainer *trainer;
};

struct run_options {
    struct gpt_train_options train;
    size_t micro;    /* first micro-batch; 0: the whole batch */
    size_t limit;    /* of the pool; 0: none */
    bool uncached;   /* every allocation goes to the device */
    bool own_stream; /* not the default one */
    bool is_host;    /* on the host, for comparison */
};

/* The tiny preset with dropout, a batch of 16, and gradients that are clipped. */
struct run_options tiny_run(void);

void run_open(struct run *run, const struct run_options *options);
/* Also asserts that nothing is left in the pool, and no error in the runtime. */
void run_close(struct run *run);
/* Steps that must succeed. */
void run_steps(struct run *run, size_t steps);
void run_hash(struct run *run, char text[GPT_HASH_TEXT_BYTES]);
/* Opens, runs `steps`, hashes, closes. */
void run_whole(char text[GPT_HASH_TEXT_BYTES], const struct run_options *options, size_t steps);

#endif
