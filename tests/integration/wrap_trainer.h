/* A trainer as they are, in C++: three functions without arguments of their own, and a check that
 * does not come back from an OOM. Its samples are numbers, and a sample that counts is added up.
 * Must not know the tests. */
#ifndef WRAP_TRAINER_H
#define WRAP_TRAINER_H

#include <cuda_runtime.h>

#include "rebatch/step.h"

#ifdef __cplusplus
extern "C" {
#endif

struct wrap_trainer {
    size_t sample_bytes;             /* that a sample takes */
    unsigned fail_updates;           /* so many of them run out of memory when they have begun */
    double sum;                      /* accumulated */
    double parameter;                /* sum of all updates */
    unsigned zeros, trains, updates; /* calls */
    size_t longest;                  /* samples in a call of train of step_of_sums */
    unsigned made;                   /* calls of resize */
    size_t room;                     /* samples of the buffer */
    void *buffer;
    unsigned evaluations; /* calls */
    double evaluated;     /* sum of the samples that were */
    int objects;          /* that are alive */
};

/* A step of a trainer that keeps its buffer, which resize makes, by a function or by a lambda;
 * `made` counts the calls. */
cudaError_t wrap_trainer_step_with_resize(struct wrap_trainer *trainer, size_t batch,
                                          rebatch_step_report *report);
cudaError_t wrap_trainer_step_with_lambda(struct wrap_trainer *trainer, size_t batch,
                                          rebatch_step_report *report);

/* One step, through rebatch_wrap_step(), by functions or by lambdas that capture the trainer. */
cudaError_t wrap_trainer_step(struct wrap_trainer *trainer, size_t batch, uint32_t flags,
                              rebatch_step_report *report);
cudaError_t wrap_trainer_step_by_lambdas(struct wrap_trainer *trainer, size_t batch, uint32_t flags,
                                         rebatch_step_report *report);

/* One that is written in place. */
cudaError_t wrap_trainer_step_in_place(struct wrap_trainer *trainer, size_t batch,
                                       rebatch_step_report *report);

/* A step without zero_grad, whose program clears its sum before it, and which allocates when it has
 * added; `largest` samples at once. */
cudaError_t wrap_trainer_step_of_sums(struct wrap_trainer *trainer, size_t batch, size_t largest,
                                      rebatch_step_report *report);
/* Guards `sum` as one. */
cudaError_t wrap_trainer_guard_sums(struct wrap_trainer *trainer);

/* An evaluation, through rebatch_wrap_map(): in the buffer that the step's resize makes, or in
 * memory of its own. It leaves by rebatch_wrap_check(). */
cudaError_t wrap_trainer_map_in_buffer(struct wrap_trainer *trainer, size_t count,
                                       rebatch_step_report *report);
cudaError_t wrap_trainer_map(struct wrap_trainer *trainer, size_t count,
                             rebatch_step_report *report);
/* Names `sum` for a check. */
cudaError_t wrap_trainer_watch(struct wrap_trainer *trainer);
/* Guards `evaluated`. */
cudaError_t wrap_trainer_guard(struct wrap_trainer *trainer);
/* rebatch_wrap_check(): does not return from a failure. */
void wrap_trainer_check(cudaError_t code);

/* A step whose functions have objects, which are counted; OOMs are exceptions. */
cudaError_t wrap_trainer_step_of_objects(struct wrap_trainer *trainer, size_t batch,
                                         rebatch_step_report *report);
/* Whether an exception of the program's own leaves rebatch_wrap_step(). */
int wrap_trainer_throws_another(struct wrap_trainer *trainer);
/* Whether it leaves the block of a step that is written in place. */
int wrap_trainer_throws_out_of_a_block(struct wrap_trainer *trainer);
/* Whether a check by rebatch_wrap_throw_on_oom() lets a map recover. */
int wrap_trainer_own_check_throws(struct wrap_trainer *trainer);

#ifdef __cplusplus
}
#endif
#endif
