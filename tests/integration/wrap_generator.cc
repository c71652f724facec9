/* Owns the functions for C++ that know codes and generators of libraries, for the tests of them
 * (wrap_libraries.c). Must not know the tests. */
#include "wrap_generator.h"

#include <cudnn.h>
#include <curand.h>
#include <rebatch/wrap.h>

static curandGenerator_st sequence;
static rebatch_wrap_generator guarded = {&sequence, 0, {}};

cudaError_t wrap_libraries_guard(bool cannot_go)
{
    sequence.cannot_go = cannot_go;
    return rebatch_wrap_guard(&guarded);
}

void wrap_libraries_go(unsigned long long place)
{
    (void)curandSetGeneratorOffset(&sequence, place);
    guarded.drawn = place;
}

void wrap_libraries_draw(float *out, size_t count)
{
    (void)curandGenerateUniform(&sequence, out, count);
    guarded.drawn += count;
}

/* The number is no OOM of CUDA's. */
void wrap_libraries_escape(void)
{
    rebatch_escape_on_oom(CUDNN_STATUS_SUCCESS);
    rebatch_escape_on_oom(CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED);
}
