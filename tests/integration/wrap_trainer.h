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
    unsigned made;                   /* calls of resize */
    size_t room;                     /* samples of the buffer */
    void *buffer;
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

#ifdef __cplusplus
}
#endif
#endif
