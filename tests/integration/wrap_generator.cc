/* Owns the functions for C++ that know codes and generators of libraries, for the tests of them
 * (wrap_libraries.c). Must not know the tests. */
#include "wrap_generator.h"

#include <cudnn.h>
#include <curand.h>

/* What cuda.h has of it. */
#define CUDA_VERSION 13000
typedef enum cudaError_enum { CUDA_ERROR_OUT_OF_MEMORY = 2 } CUresult;

#include <rebatch/wrap.h>

/* Of headers that come too late. */
typedef enum { CUBLAS_STATUS_ALLOC_FAILED = 3 } cublasStatus_t;
enum class late { OUT_OF_MEMORY = 2 };

template <class Code, class = void> struct compiles : std::false_type {
};
template <class Code>
struct compiles<Code, decltype(rebatch_escape_on_oom(std::declval<Code>()))> : std::true_type {
};
static_assert(compiles<int>::value && compiles<cudaError_t>::value && compiles<CUresult>::value &&
                  compiles<cudnnStatus_t>::value,
              "codes that are known");
static_assert(!compiles<cublasStatus_t>::value && !compiles<curandStatus_t>::value &&
                  !compiles<rebatch_status>::value && !compiles<late>::value,
              "codes that would be taken for CUDA's");

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
