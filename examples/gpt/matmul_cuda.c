/* Owns the matrix products on CUDA: which algorithm of cuBLASLt runs, and the three operations made
 * of it and of the kernel for gradients of weights. Must not know what is multiplied.
 *
 * Exactness. The algorithm of a product is looked for once, for a number of rows that never varies:
 * the library would choose by the number of rows. It adds up an element of the result in one block
 * of threads: K is not split, and it gets no more workspace than a counter of what is left to do,
 * too little for parts of sums to meet there. So a row's result does not depend on the rows beside
 * it. Hopper's algorithms for fp16 and bf16 are of one family, which adds up K in one order, 16 at
 * a time, whatever the tiles: of that family each number of rows has the best, and
 * gpt_cuda_matmul.c tests the bits.
 *
 * Sums over rows are a kernel of our own, because the library adds what was there before at the
 * end: there a sum would tell where the batch was cut. On an inexact queue they are one product of
 * the library, which may split K. */
#include "gpt/cuda.h"
#include "gpt/error.h"

/* Samples of the call that an algorithm is chosen for. */
#define CANONICAL_SAMPLES 8

/* Algorithms that the library is asked for, best first. */
#define CANDIDATES_MOST 16

/* On Hopper the library wants 4 bytes where there are more tiles than fit on the GPU at once. */
#define WORKSPACE_BYTES 64

/* Of every array; the library may count on it. */
#define ALIGNMENT_BYTES 16

/* ---- what is multiplied ---- */

/* The library's arrays are column-major: an array of ours, [rows][columns], is theirs of `columns`
 * rows. c = a b + (start) c, with m rows, n columns and k products to an element. */
struct product {
    enum gpt_cuda_product_kind kind;
    bool turn_a, turn_b;
    size_t m, n, k;
    cudaDataType_t c_type;
    const void *bias; /* of GPT_CUDA_FORWARD_BIAS */
};

static struct product product_of(const struct gpt_cuda *cuda, enum gpt_cuda_product_kind kind,
                                 const struct gpt_matmul *shape, const void *bias)
{
    const bool transposed = shape->transposed;
    struct product p = {.kind = kind, .c_type = cuda->library_dtype, .bias = bias};
    switch (kind) {
    case GPT_CUDA_FORWARD:
    case GPT_CUDA_FORWARD_BIAS: /* a: the weight, b: x */
        p.turn_a = transposed;
        p.m = shape->outputs, p.n = shape->rows, p.k = shape->inputs;
        break;
    case GPT_CUDA_BACKWARD_INPUT: /* a: the weight, b: dy */
        p.turn_a = !transposed;
        p.m = shape->inputs, p.n = shape->rows, p.k = shape->outputs;
        break;
    case GPT_CUDA_BACKWARD_WEIGHT: /* inexact. a: dy, b: x; transposed: the other way round */
        p.turn_b = true;
        p.m = transposed ? shape->inputs : shape->outputs;
        p.n = transposed ? shape->outputs : shape->inputs;
        p.k = shape->rows;
        p.c_type = CUDA_R_32F;
        break;
    }
    return p;
}

/* ---- descriptors ---- */

/* On the stack: making them takes no memory. */
struct descriptors {
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t a, b, c;
};

static cublasStatus_t describe_array(cublasLtMatrixLayoutOpaque_t *out, cudaDataType_t type,
                                     size_t rows, size_t columns, bool turn)
{
    const size_t stored_rows = turn ? columns : rows, stored_columns = turn ? rows : columns;
    return cublasLtMatrixLayoutInit(out, type, stored_rows, stored_columns, (int64_t)stored_rows);
}

static cublasStatus_t set_bias(cublasLtMatmulDesc_t product, const void *bias)
{
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    cublasStatus_t code = cublasLtMatmulDescSetAttribute(product, CUBLASLT_MATMUL_DESC_EPILOGUE,
                                                         &epilogue, sizeof epilogue);
    if (!code)
        code = cublasLtMatmulDescSetAttribute(product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias,
                                              sizeof bias);
    return code;
}

static cublasStatus_t describe(struct descriptors *out, const struct gpt_cuda *cuda,
                               const struct product *p)
{
    const cublasOperation_t a = p->turn_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t b = p->turn_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    /* fp32 sums; fp32 operands are not cut down to TF32 */
    cublasStatus_t code = cublasLtMatmulDescInit(&out->product, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (!code)
        code = cublasLtMatmulDescSetAttribute(&out->product, CUBLASLT_MATMUL_DESC_TRANSA, &a,
                                              sizeof a);
    if (!code)
        code = cublasLtMatmulDescSetAttribute(&out->product, CUBLASLT_MATMUL_DESC_TRANSB, &b,
                                              sizeof b);
    if (!code && p->kind == GPT_CUDA_FORWARD_BIAS)
        code = set_bias(&out->product, p->bias);
    if (!code)
        code = describe_array(&out->a, cuda->library_dtype, p->m, p->k, p->turn_a);
    if (!code)
        code = describe_array(&out->b, cuda->library_dtype, p->k, p->n, p->turn_b);
    if (!code)
        code = describe_array(&out->c, p->c_type, p->m, p->n, false);
    return code;
}

/* ---- which algorithm ---- */

/* How much workspace a product may have. Sums over rows, which only an inexact queue leaves to the
 * library, may be split; where each number of rows has an algorithm of its own, none needs any. */
static size_t workspace_of(const struct gpt_cuda *cuda, enum gpt_cuda_product_kind kind)
{
    if (kind == GPT_CUDA_BACKWARD_WEIGHT)
        return GPT_CUDA_SCRATCH_BYTES;
    return cuda->has_alike ? 0 : WORKSPACE_BYTES;
}

static cublasStatus_t set_preference(cublasLtMatmulPreferenceOpaque_t *out,
                                     const struct gpt_cuda *cuda, enum gpt_cuda_product_kind kind)
{
    static const cublasLtMatmulPreferenceAttributes_t arrays[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    const uint64_t workspace_bytes = workspace_of(cuda, kind);
    const uint32_t schemes = kind == GPT_CUDA_BACKWARD_WEIGHT ? CUBLASLT_REDUCTION_SCHEME_MASK
                                                              : CUBLASLT_REDUCTION_SCHEME_NONE;
    const uint32_t alignment = ALIGNMENT_BYTES;
    cublasStatus_t code = cublasLtMatmulPreferenceInit(out);
    if (!code)
        code = cublasLtMatmulPreferenceSetAttribute(out, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                    &workspace_bytes, sizeof workspace_bytes);
    if (!code)
        code = cublasLtMatmulPreferenceSetAttribute(out, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                    &schemes, sizeof schemes);
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays && !code; i++)
        code = cublasLtMatmulPreferenceSetAttribute(out, arrays[i], &alignment, sizeof alignment);
    return code;
}

/* Whether K stays whole. */
static bool is_unsplit(const cublasLtMatmulAlgo_t *algorithm)
{
    int32_t splits = 0;
    uint32_t scheme = 0;
    size_t written;
    return cublasLtMatmulAlgoConfigGetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits,
                                                sizeof splits, &written) == CUBLAS_STATUS_SUCCESS &&
           cublasLtMatmulAlgoConfigGetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
                                                &scheme, sizeof scheme,
                                                &written) == CUBLAS_STATUS_SUCCESS &&
           (splits == 0 || splits == 1) && scheme == CUBLASLT_REDUCTION_SCHEME_NONE;
}

/* Whether an algorithm that was chosen for another number of rows takes this product. */
static bool takes(const struct gpt_cuda *cuda, const cublasLtMatmulAlgo_t *algorithm,
                  const struct product *product)
{
    struct descriptors d;
    cublasLtMatmulHeuristicResult_t result;
    return !describe(&d, cuda, product) &&
           !cublasLtMatmulAlgoCheck(cuda->library, &d.product, &d.a, &d.b, &d.c, &d.c, algorithm,
                                    &result) &&
           result.workspaceSize <= workspace_of(cuda, product->kind);
}

static bool is_usable(const cublasLtMatmulHeuristicResult_t *candidate, const struct gpt_cuda *cuda,
                      const struct product *product)
{
    return candidate->state == CUBLAS_STATUS_SUCCESS &&
           candidate->workspaceSize <= workspace_of(cuda, product->kind) &&
           (product->kind == GPT_CUDA_BACKWARD_WEIGHT || is_unsplit(&candidate->algo));
}

/* Which family of kernels an algorithm is of; -1 when the library does not say. */
static int32_t family_of(const cublasLtMatmulAlgo_t *algorithm)
{
    int32_t id = -1;
    size_t written;
    return cublasLtMatmulAlgoConfigGetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_ID, &id, sizeof id,
                                                &written) == CUBLAS_STATUS_SUCCESS
               ? id
               : -1;
}

/* The best algorithm for a product, of the family of `alike` unless that is NULL. */
static rebatch_status choose(cublasLtMatmulAlgo_t *out, const struct gpt_queue *queue,
                             const struct product *product, const cublasLtMatmulAlgo_t *alike)
{
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    struct descriptors d;
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasLtMatmulHeuristicResult_t candidates[CANDIDATES_MOST];
    int found = 0;
    cublasStatus_t code = describe(&d, cuda, product);
    if (!code)
        code = set_preference(&preference, cuda, product->kind);
    if (!code)
        code = cublasLtMatmulAlgoGetHeuristic(cuda->library, &d.product, &d.a, &d.b, &d.c, &d.c,
                                              &preference, CANDIDATES_MOST, candidates, &found);
    if (code)
        return gpt_cuda_library_status(queue, code);
    for (int i = 0; i < found; i++)
        if (is_usable(&candidates[i], cuda, product) &&
            (!alike || family_of(&candidates[i].algo) == family_of(alike))) {
            *out = candidates[i].algo;
            return REBATCH_OK;
        }
    return gpt_error(REBATCH_E_UNSUPPORTED,
                     "cuBLASLt has %d algorithms for a product of %zu x %zu x %zu: expected one "
                     "that splits no sum%s",
                     found, product->m, product->n, product->k,
                     alike ? " and is like that for other numbers of rows" : "");
}

/* ---- which algorithms are settled ---- */

/* NULL when none is. */
static const cublasLtMatmulAlgo_t *
recall(const struct gpt_cuda *cuda, enum gpt_cuda_product_kind kind, const struct gpt_matmul *shape)
{
    for (size_t i = 0; i < cuda->product_count; i++) {
        const struct gpt_cuda_product *p = &cuda->products[i];
        if (p->kind == kind && p->shape.rows == shape->rows && p->shape.inputs == shape->inputs &&
            p->shape.outputs == shape->outputs && p->shape.transposed == shape->transposed)
            return &p->algorithm;
    }
    return NULL;
}

/* When there is no room for another, the last one's place is taken: it is found again when it is
 * asked for. */
static const cublasLtMatmulAlgo_t *remember(struct gpt_cuda *cuda, enum gpt_cuda_product_kind kind,
                                            const struct gpt_matmul *shape,
                                            const cublasLtMatmulAlgo_t *algorithm)
{
    if (cuda->product_count == GPT_CUDA_PRODUCTS_MOST)
        cuda->product_count--;
    struct gpt_cuda_product *product = &cuda->products[cuda->product_count++];
    *product = (struct gpt_cuda_product){kind, *shape, *algorithm};
    return &product->algorithm;
}

/* The algorithm from which a product's others come: that of CANONICAL_SAMPLES samples. */
static rebatch_status settle_canonical(cublasLtMatmulAlgo_t *out, const struct gpt_queue *queue,
                                       enum gpt_cuda_product_kind kind, struct gpt_matmul shape,
                                       const void *bias)
{
    struct gpt_cuda *cuda = gpt_cuda_of(queue);
    shape.rows = CANONICAL_SAMPLES * queue->sample_rows;
    const cublasLtMatmulAlgo_t *known = recall(cuda, kind, &shape);
    if (known) {
        *out = *known;
        return REBATCH_OK;
    }
    const struct product product = product_of(cuda, kind, &shape, bias);
    const rebatch_status status = choose(out, queue, &product, NULL);
    if (!status)
        remember(cuda, kind, &shape, out);
    return status;
}

/* The product's algorithm, settled when it is first asked for with this number of rows. */
static rebatch_status settle(const cublasLtMatmulAlgo_t **out, const struct gpt_queue *queue,
                             enum gpt_cuda_product_kind kind, const struct gpt_matmul *shape,
                             const void *bias)
{
    struct gpt_cuda *cuda = gpt_cuda_of(queue);
    cublasLtMatmulAlgo_t algorithm;
    *out = recall(cuda, kind, shape);
    if (*out)
        return REBATCH_OK;
    const struct product product = product_of(cuda, kind, shape, bias);
    rebatch_status status;
    if (kind == GPT_CUDA_BACKWARD_WEIGHT) {
        status = choose(&algorithm, queue, &product, NULL);
    } else {
        cublasLtMatmulAlgo_t canonical;
        status = settle_canonical(&canonical, queue, kind, *shape, bias);
        algorithm = canonical;
        if (!status && cuda->has_alike)
            status = choose(&algorithm, queue, &product, &canonical);
        else if (!status && !takes(cuda, &canonical, &product))
            status = gpt_error(REBATCH_E_UNSUPPORTED,
                               "cuBLASLt's algorithm for %zu rows does not take %zu",
                               CANONICAL_SAMPLES * queue->sample_rows, shape->rows);
    }
    if (!status)
        *out = remember(cuda, kind, shape, &algorithm);
    return status;
}

/* ---- the operations ---- */

static rebatch_status check_shape(const struct gpt_queue *queue, const struct gpt_matmul *shape)
{
    size_t samples;
    if (shape->inputs == 0 || shape->inputs % 64 != 0)
        return gpt_error(REBATCH_E_UNSUPPORTED, "inputs is %zu: expected a multiple of 64",
                         shape->inputs);
    if (shape->outputs == 0 || shape->outputs % 64 != 0)
        return gpt_error(REBATCH_E_UNSUPPORTED, "outputs is %zu: expected a multiple of 64",
                         shape->outputs);
    return gpt_cuda_samples(&samples, queue, shape->rows);
}

static rebatch_status check_arrays(const void *a, const void *b, const void *c, const void *bias)
{
    const void *const arrays[] = {a, b, c, bias};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        if ((uintptr_t)arrays[i] % ALIGNMENT_BYTES != 0)
            return gpt_error(REBATCH_E_INVALID,
                             "an array of a product is at %p: expected a multiple of %d bytes",
                             arrays[i], ALIGNMENT_BYTES);
    return REBATCH_OK;
}

/* c = a b + bias for all rows. */
static rebatch_status run_rows(const struct gpt_queue *queue, enum gpt_cuda_product_kind kind,
                               void *c, const void *a, const void *b, const void *bias,
                               const struct gpt_matmul *shape)
{
    const float one = 1.0f, zero = 0.0f;
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    const cublasLtMatmulAlgo_t *algorithm;
    rebatch_status status = check_shape(queue, shape);
    if (!status)
        status = check_arrays(a, b, c, bias);
    if (!status)
        status = gpt_cuda_status(queue, cudaSetDevice(cuda->ordinal));
    if (!status)
        status = settle(&algorithm, queue, kind, shape, bias);
    if (status)
        return status;
    const struct product product = product_of(cuda, kind, shape, bias);
    struct descriptors d;
    cublasStatus_t code = describe(&d, cuda, &product);
    if (!code)
        code =
            cublasLtMatmul(cuda->library, &d.product, &one, a, &d.a, b, &d.b, &zero, c, &d.c, c,
                           &d.c, algorithm, cuda->scratch, WORKSPACE_BYTES, gpt_cuda_stream(queue));
    return gpt_cuda_library_status(queue, code);
}

rebatch_status gpt_cuda_matmul_forward(const struct gpt_queue *queue, void *y, const void *x,
                                       const void *weight, const void *bias,
                                       const struct gpt_matmul *shape)
{
    return run_rows(queue, bias ? GPT_CUDA_FORWARD_BIAS : GPT_CUDA_FORWARD, y, weight, x, bias,
                    shape);
}

rebatch_status gpt_cuda_matmul_backward_input(const struct gpt_queue *queue, void *dx,
                                              const void *dy, const void *weight,
                                              const struct gpt_matmul *shape)
{
    return run_rows(queue, GPT_CUDA_BACKWARD_INPUT, dx, weight, dy, NULL, shape);
}

/* dweight += x^T dy, row after row. */
static rebatch_status add_weight(const struct gpt_queue *queue, float *dweight, const void *dy,
                                 const void *x, const struct gpt_matmul *shape)
{
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    const bool turn = shape->transposed;
    const size_t length = queue->sample_rows;
    return gpt_cuda_status(queue, rbk_weight_gradient(dweight, turn ? dy : x, turn ? x : dy,
                                                      shape->rows / length, length,
                                                      turn ? shape->outputs : shape->inputs,
                                                      turn ? shape->inputs : shape->outputs,
                                                      cuda->dtype, gpt_cuda_stream(queue)));
}

/* dweight += x^T dy, in one product of the library. */
static rebatch_status add_weight_inexactly(const struct gpt_queue *queue, float *dweight,
                                           const void *dy, const void *x,
                                           const struct gpt_matmul *shape)
{
    const float one = 1.0f;
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    const cublasLtMatmulAlgo_t *algorithm;
    const rebatch_status status = settle(&algorithm, queue, GPT_CUDA_BACKWARD_WEIGHT, shape, NULL);
    if (status)
        return status;
    const struct product product = product_of(cuda, GPT_CUDA_BACKWARD_WEIGHT, shape, NULL);
    struct descriptors d;
    cublasStatus_t code = describe(&d, cuda, &product);
    if (!code)
        code = cublasLtMatmul(cuda->library, &d.product, &one, shape->transposed ? x : dy, &d.a,
                              shape->transposed ? dy : x, &d.b, &one, dweight, &d.c, dweight, &d.c,
                              algorithm, cuda->scratch, GPT_CUDA_SCRATCH_BYTES,
                              gpt_cuda_stream(queue));
    return gpt_cuda_library_status(queue, code);
}

static rebatch_status add_bias(const struct gpt_queue *queue, float *dbias, const void *dy,
                               size_t rows, size_t width)
{
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    const size_t length = queue->sample_rows, samples = rows / length;
    size_t group;
    rebatch_status status = gpt_cuda_group(&group, "the gradient of a bias", samples,
                                           rbk_bias_backward_scratch_bytes(1, length, width));
    for (size_t first = 0; first < samples && !status; first += group) {
        const size_t count = samples - first < group ? samples - first : group;
        status = gpt_cuda_status(
            queue, rbk_bias_backward(dbias, gpt_cuda_const_at(cuda, dy, first * length * width),
                                     cuda->scratch, GPT_CUDA_SCRATCH_BYTES, count, length, width,
                                     cuda->dtype, gpt_cuda_stream(queue)));
    }
    return status;
}

rebatch_status gpt_cuda_matmul_backward_weight(const struct gpt_queue *queue, float *dweight,
                                               float *dbias, const void *dy, const void *x,
                                               const struct gpt_matmul *shape)
{
    rebatch_status status = check_shape(queue, shape);
    if (!status)
        status = check_arrays(dweight, dy, x, dbias);
    if (!status)
        status = gpt_cuda_status(queue, cudaSetDevice(gpt_cuda_of(queue)->ordinal));
    if (!status)
        status = (queue->inexact ? add_weight_inexactly : add_weight)(queue, dweight, dy, x, shape);
    if (!status && dbias)
        status = add_bias(queue, dbias, dy, shape->rows, shape->outputs);
    return status;
}
