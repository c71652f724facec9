/* What the CUDA operations share: the state behind a queue, scratch memory, statuses, and the
 * matrix products. Must not know the model. */
#ifndef GPT_CUDA_H
#define GPT_CUDA_H

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include "gpt/ops.h"
#include "kernels.h"
#include "rebatch/pool.h"

/* ---- the state ---- */

/* What kernels need besides their arguments. Where that is more for all samples of a call than
 * this, the call works on some samples at a time, which changes no bit. */
#define GPT_CUDA_SCRATCH_BYTES ((size_t)32 << 20)

/* Different products of a queue that are kept: a model has 15, for each number of rows. */
#define GPT_CUDA_PRODUCTS_MOST 256

enum gpt_cuda_product_kind {
    GPT_CUDA_FORWARD,
    GPT_CUDA_FORWARD_BIAS,
    GPT_CUDA_BACKWARD_INPUT,
    GPT_CUDA_BACKWARD_WEIGHT /* on an inexact queue */
};

/* A product whose algorithm is settled. */
struct gpt_cuda_product {
    enum gpt_cuda_product_kind kind;
    struct gpt_matmul shape;
    cublasLtMatmulAlgo_t algorithm;
};

/* A queue's state. What the elements are stands here and nowhere else. */
struct gpt_cuda {
    rbk_dtype dtype;
    cudaDataType_t library_dtype;
    int ordinal;
    rebatch_pool *pool; /* of the scratch memory alone */
    void *scratch;
    cublasLtHandle_t library;
    bool has_alike; /* the library's algorithms of one family give the same bits, whatever their
                       tiles */
    struct gpt_cuda_product products[GPT_CUDA_PRODUCTS_MOST];
    size_t product_count;
};

static inline struct gpt_cuda *gpt_cuda_of(const struct gpt_queue *queue)
{
    return queue->state;
}

static inline cudaStream_t gpt_cuda_stream(const struct gpt_queue *queue)
{
    return (cudaStream_t)(void *)queue->stream;
}

/* Addresses of element number `index`. */
static inline void *gpt_cuda_at(const struct gpt_cuda *cuda, void *elements, size_t index)
{
    return (char *)elements + index * rbk_dtype_bytes(cuda->dtype);
}

static inline const void *gpt_cuda_const_at(const struct gpt_cuda *cuda, const void *elements,
                                            size_t index)
{
    return (const char *)elements + index * rbk_dtype_bytes(cuda->dtype);
}

/* ---- statuses (ops_cuda.c) ---- */

/* What a launcher, or a call of the runtime, answered; no stale last error stays behind. */
rebatch_status gpt_cuda_status(const struct gpt_queue *queue, cudaError_t code);
/* The same for the library. */
rebatch_status gpt_cuda_library_status(const struct gpt_queue *queue, cublasStatus_t code);

/* ---- samples (ops_cuda.c) ---- */

/* How many samples `rows` rows are. REBATCH_E_INVALID when that is no whole number. */
rebatch_status gpt_cuda_samples(size_t *out, const struct gpt_queue *queue, size_t rows);

/* How many of `samples` samples to work on at a time when one needs `sample_bytes` of scratch.
 * REBATCH_E_UNSUPPORTED when not even one fits; `what` is for the sentence. */
rebatch_status gpt_cuda_group(size_t *out, const char *what, size_t samples, size_t sample_bytes);

/* ---- members of the table (matmul_cuda.c), documented in ops.h ---- */

rebatch_status gpt_cuda_matmul_forward(const struct gpt_queue *queue, void *y, const void *x,
                                       const void *weight, const void *bias,
                                       const struct gpt_matmul *shape);
rebatch_status gpt_cuda_matmul_backward_input(const struct gpt_queue *queue, void *dx,
                                              const void *dy, const void *weight,
                                              const struct gpt_matmul *shape);
rebatch_status gpt_cuda_matmul_backward_weight(const struct gpt_queue *queue, float *dweight,
                                               float *dbias, const void *dy, const void *x,
                                               const struct gpt_matmul *shape);

#endif
