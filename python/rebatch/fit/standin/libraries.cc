/* Owns the few functions of CUDA's libraries whose results PyTorch looks at; the others are stubs.
 * Their headers are not needed: what is passed are pointers and numbers, from 0 for success. */
#include <string.h>

#include "standin.h"

namespace
{
char handle;
constexpr size_t SMALL_BYTES = 1 << 12;
} // namespace

STANDIN_API int cublasCreate_v2(void **out)
{
    *out = &handle;
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
    constexpr size_t RESULT_BYTES = 96; /* of cublasLtMatmulHeuristicResult_t */
    memset(results, 0, RESULT_BYTES);
    *count = 1;
    return 0;
}

STANDIN_API int cublasLtCreate(void **out)
{
    *out = &handle;
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

STANDIN_API int cudnnDropoutGetStatesSize(void *, size_t *bytes)
{
    *bytes = SMALL_BYTES;
    return 0;
}
