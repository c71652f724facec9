/* What all tests of the reference model share, on the host and on a GPU: a session with a trainer
 * on it. Must not know private headers of the library. */
#ifndef GPT_RUN_H
#define GPT_RUN_H

#include <criterion/criterion.h>

#include "gpt/error.h"
#include "gpt/train.h"
#include "rebatch/rebatch.h"
#include "rig.h"

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

/* What the tests train on, so that no other file of the tree decides their bits. */
#define TEST_TEXT "examples/gpt/text.txt"
/* Closed by the caller. */
struct gpt_data *open_text(size_t length);

/* ---- a run ---- */

/* Everything that a training run stands on. */
struct run {
    rebatch_device *inner, *device; /* device: the inner one behind a fault device */
    rebatch_stream stream;
    rebatch *rb;
    struct gpt_data *data;
    struct gpt_trainer *trainer;
    int (*last_error)(void);
};

struct run_options {
    struct gpt_train_options train;
    bool on_gpu;               /* else on the host */
    size_t capacity_bytes;     /* of the host device; 0: no cap */
    size_t limit_bytes;        /* of the pool; 0: none */
    size_t micro;              /* first micro-batch; 0: the whole batch */
    bool uncached;             /* every allocation goes to the device */
    bool own_stream;           /* not the default one */
    bool learns;               /* rebatch_options.learn */
    int (*last_error)(void);   /* cudaGetLastError(), for run_close(); NULL: not asked */
    const struct gpt_ops *ops; /* NULL: the device's own */
};

/* The tiny preset, with a batch of 16 and gradients that are clipped. */
struct run_options tiny_run(void);
/* A batch of 4, few enough allocations to fail each of them, and each of the device. */
struct run_options short_run(void);

void run_open(struct run *run, const struct run_options *options);
/* Also asserts that nothing is left in the pool or taken from the device, and no error in the
 * runtime. */
void run_close(struct run *run);

/* Steps that must succeed. */
void run_steps(struct run *run, size_t steps);
void run_hash(struct run *run, char text[GPT_HASH_TEXT_BYTES]);
/* Opens, runs `steps`, hashes, closes. */
void run_whole(char text[GPT_HASH_TEXT_BYTES], const struct run_options *options, size_t steps);

#endif
