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

/* NULL: the report has no such finding. */
const rebatch_finding *check_find(const rebatch_check_report *report, rebatch_finding_kind kind,
                                  const char *name);
/* All that the report says; valid until the next call. */
const char *check_texts(const rebatch_check_report *report);

#endif
