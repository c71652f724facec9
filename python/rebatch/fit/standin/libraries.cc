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

/* ---- workspaces of cuFFT, cuSPARSE and cuSOLVER: none was measured ---- */

/* Called by the functions that `build` makes of the latter two's headers. */
extern "C" void standin_notes_unmeasured(void)
{
    note_library(UNMEASURED);
}

/* The documentation's least: as much as the transform, in complex numbers. */
STANDIN_API int cufftXtMakePlanMany(int, int rank, const long long *sides, const long long *,
                                    long long, long long, int input, const long long *, long long,
                                    long long, int output, long long batch, size_t *bytes,
                                    int execution)
{
    const int R_32F = 0, R_64F = 1, R_16F = 2, C_64F = 5, C_16F = 6;
    note_library(UNMEASURED);
    const auto is_real = [=](int type) { return type == R_32F || type == R_64F || type == R_16F; };
    *bytes = execution == C_64F ? 16 : execution == C_16F ? 4 : 8;
    for (int i = 0; i < rank; i++)
        *bytes *= (size_t)(i + 1 == rank && (is_real(input) || is_real(output)) ? sides[i] / 2 + 1
                                                                                : sides[i]);
    *bytes *= (size_t)batch;
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
