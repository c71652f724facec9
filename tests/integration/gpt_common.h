/* What the gpt_* tests share: numbers, comparisons, and a session with a trainer on it.
 * Must not know private headers of the library. */
#ifndef GPT_COMMON_H
#define GPT_COMMON_H

#include "gpt/train.h"
#include "rebatch/rebatch.h"

/* ---- numbers ---- */

/* Uniform in [-scale, scale); `state` is the seed, and moves on. */
void fill_random(float *values, size_t count, float scale, uint64_t *state);
/* Arrays live until release_arrays(), which a suite calls at the end of each test. */
float *random_floats(size_t count, float scale, uint64_t *state);
/* Not-a-numbers: an output that an operation leaves out is noticed. */
float *poisoned_floats(size_t count);
double *to_doubles(const float *values, size_t count);
float *zero_floats(size_t count);
double *zero_doubles(size_t count);
void release_arrays(void);

/* |got - want| / |want|, in the Euclidean norm; infinite when anything got is not finite. */
double relative_error(const float *got, const double *want, size_t count);

/* Fails the test unless relative_error() is at most 1e-5. */
#define ASSERT_CLOSE(got, want, count)                                                             \
    do {                                                                                           \
        const double error_ = relative_error((got), (want), (count));                              \
        cr_assert(error_ <= 1e-5, "%s: relative error %g", #got, error_);                          \
    } while (0)

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

/* Every how many-th case a long loop takes: REBATCH_TEST_STRIDE, which is set where everything
 * takes many times as long, but no more than `most`; else 1. */
size_t stride_of_cases(size_t most);

/* Valgrind works out a fused multiply-add lane by lane, in a function call each. Where cases are
 * thinned as much as there, this takes the portable product, which has none. gpt_ops and gpt_exact
 * still go through all instruction sets. */
void choose_quick_isa(void);

/* ---- text ---- */

/* The repository's text, at least; closed by the caller. */
struct gpt_data *open_text(size_t length);

/* ---- a run ---- */

/* Everything that a training run stands on. */
struct run {
    rebatch_device *host, *device; /* device: host, behind a fault device */
    rebatch_stream stream;
    rebatch *rb;
    struct gpt_data *data;
    struct gpt_trainer *trainer;
};

struct run_options {
    struct gpt_train_options train;
    size_t capacity_bytes;     /* 0: no cap */
    size_t micro;              /* first micro-batch; 0: the whole batch */
    bool uncached;             /* every allocation goes to the device */
    bool own_stream;           /* not the default one */
    bool learns;               /* rebatch_options.learn */
    const struct gpt_ops *ops; /* NULL: the host's */
};

/* The tiny preset, with a batch of 16 and gradients that are clipped. */
struct run_options tiny_run(void);

void run_open(struct run *run, const struct run_options *options);
/* Also asserts that nothing is left in the pool. */
void run_close(struct run *run);

/* Steps that must succeed. */
void run_steps(struct run *run, size_t steps);
void run_hash(struct run *run, char text[GPT_HASH_TEXT_BYTES]);
/* Opens, runs `steps`, hashes, closes. */
void run_whole(char text[GPT_HASH_TEXT_BYTES], const struct run_options *options, size_t steps);

#endif
