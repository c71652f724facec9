/* What the check_* tests share. Must not know more of the library than its public headers say. */
#ifndef CHECK_COMMON_H
#define CHECK_COMMON_H

#include "rebatch/rebatch.h"

/* An input of a sample, from 0 to 1. */
float check_input(size_t sample, size_t parameter);
/* The next number of an RNG, from 0 to 1. */
float check_random(uint64_t *state);
/* Of the micro-batch's pool. */
rebatch_status check_alloc(float **out, const rebatch_microbatch *mb, size_t bytes);

/* What the trainer of a test begins with: its session, and how many updates it has made. */
struct check_run {
    rebatch *rb;
    size_t updates; /* none is allowed in a check */
};

/* The step of such a trainer, which declares what it changes. Its update only counts. */
rebatch_step_ops check_step_ops(rebatch_status (*zero_grad)(void *user),
                                rebatch_status (*forward_backward)(const rebatch_microbatch *mb,
                                                                   void *user));

/* NULL: the report has no such finding. */
const rebatch_finding *check_find(const rebatch_check_report *report, rebatch_finding_kind kind,
                                  const char *name);
/* All that the report says; valid until the next call. */
const char *check_texts(const rebatch_check_report *report);

#endif
