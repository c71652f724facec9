/* Owns the few functions of CUDA's libraries whose results programs look at; the others are stubs.
 * Their headers are not needed: what is passed are pointers and numbers, from 0 for success. */
#include <string.h>

#include <atomic>

#include "standin.h"

namespace
{
constexpr size_t SMALL_BYTES = 1 << 12;
constexpr size_t HEURISTIC_BYTES = 96; /* of cublasLtMatmulHeuristicResult_t */
std::atomic<unsigned> used;
} // namespace

namespace standin
{

void note_library(library l)
{
    used |= l;
}

void *new_handle(void)
{
    static std::atomic<uintptr_t> last;
    return (void *)(last += 64);
}

} // namespace standin

using namespace standin;

/* Which libraries were used, as bits of `library`: each takes memory of the GPU. */
STANDIN_API unsigned standin_libraries(void)
{
    return used;
}

STANDIN_API int cublasCreate_v2(void **out)
{
    note_library(CUBLAS);
    *out = new_handle();
    return 0;
}

/* Products in half precision are among these. */
STANDIN_API int cublasGemmEx(void)
{
    note_library(CUBLAS_EX);
    return 0;
}

STANDIN_API int cublasGemmStridedBatchedEx(void)
{
    note_library(CUBLAS_EX);
    return 0;
}

STANDIN_API int cublasGetPointerMode_v2(void *, int *mode)
{
    *mode = 0;
    return 0;
}

STANDIN_API int cublasGetMathMode(void *, int *mode)
{
    *mode = 0;
    return 0;
}

/* One algorithm is found; its description is zeros. */
STANDIN_API int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *,
                                               void *, int, void *results, int *count)
{
    memset(results, 0, HEURISTIC_BYTES);
    *count = 1;
    return 0;
}

STANDIN_API int cublasLtMatmulAlgoCheck(void *, void *, void *, void *, void *, void *, void *,
                                        void *result)
{
    memset(result, 0, HEURISTIC_BYTES);
    return 0;
}

STANDIN_API int cublasLtMatmulAlgoConfigGetAttribute(void *, int, void *out, size_t bytes,
                                                     size_t *written)
{
    memset(out, 0, bytes);
    if (written)
        *written = bytes;
    return 0;
}

STANDIN_API int cublasLtCreate(void **out)
{
    *out = new_handle();
    return 0;
}

/* ---- sizes that cuDNN is asked for, and that the caller has not set before ---- */

STANDIN_API int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *, int, int, void *,
                                                                         void *, void *, void *,
                                                                         void *, size_t *bytes)
{
    *bytes = SMALL_BYTES;
    return 0;
}

STANDIN_API int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *, int, int, void *, void *,
                                                                  void *, void *, void *, void *,
                                                                  void *, size_t *bytes)
{
    *bytes = SMALL_BYTES;
    return 0;
}

STANDIN_API int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *, int, int, void *,
                                                                     void *, size_t *bytes)
{
    *bytes = SMALL_BYTES;
    return 0;
}
