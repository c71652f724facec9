/* What the gpt_* tests share: numbers and comparisons, and what gpt_run.h has.
 * Must not know private headers of the library. */
#ifndef GPT_COMMON_H
#define GPT_COMMON_H

#include "integration/gpt_run.h"

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

#endif
