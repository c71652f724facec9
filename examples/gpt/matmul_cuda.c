/* Owns the matrix products on CUDA: which algorithm of cuBLASLt runs, and the three operations made
 * of it. Must not know what is multiplied.
 *
 * Exactness. The algorithm of a product is looked for once, for a number of rows that never varies,
 * and then kept for all: the library would choose by the number of rows. It adds up an element of
 * the result in one block of threads: K is not split, and it gets no more workspace than a counter
 * of what is left to do, too little for parts of sums to meet there. So a row's result does not
 * depend on the rows beside it. Sums over rows are one product a sample, in order, each added to
 * the fp32 accumulator. */
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
    case GPT_CUDA_BACKWARD_WEIGHT: /* a: dy, b: x; or, transposed, the other way round */
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

static cublasStatus_t set_preference(cublasLtMatmulPreferenceOpaque_t *out)
{
    static const cublasLtMatmulPreferenceAttributes_t arrays[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    const uint64_t workspace_bytes = WORKSPACE_BYTES;
    const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_NONE, alignment = ALIGNMENT_BYTES;
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

/* Whether an algorithm takes this product, for some numbers of samples that it was not chosen
 * for. */
static bool takes_other_rows(const cublasLtMatmulAlgo_t *algorithm, const struct gpt_queue *queue,
                             struct product product)
{
    static const size_t samples[] = {1, 3, 64};
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    if (product.kind == GPT_CUDA_BACKWARD_WEIGHT)
        return true; /* it runs for one sample alone */
    for (size_t i = 0; i < sizeof samples / sizeof *samples; i++) {
        struct descriptors d;
        cublasLtMatmulHeuristicResult_t result;
        product.n = samples[i] * queue->sample_rows;
        if (describe(&d, cuda, &product) ||
            cublasLtMatmulAlgoCheck(cuda->library, &d.product, &d.a, &d.b, &d.c, &d.c, algorithm,
                                    &result) ||
            result.workspaceSize > WORKSPACE_BYTES)
            return false;
    }
    return true;
}

static bool is_usable(const cublasLtMatmulHeuristicResult_t *candidate,
                      const struct gpt_queue *queue, const struct product *product)
{
    return candidate->state == CUBLAS_STATUS_SUCCESS &&
           candidate->workspaceSize <= WORKSPACE_BYTES && is_unsplit(&candidate->algo) &&
           takes_other_rows(&candidate->algo, queue, *product);
}

static rebatch_status choose(cublasLtMatmulAlgo_t *out, const struct gpt_queue *queue,
                             enum gpt_cuda_product_kind kind, struct gpt_matmul shape,
                             const void *bias)
{
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    shape.rows = queue->sample_rows * (kind == GPT_CUDA_BACKWARD_WEIGHT ? 1 : CANONICAL_SAMPLES);
    const struct product product = product_of(cuda, kind, &shape, bias);
    struct descriptors d;
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasLtMatmulHeuristicResult_t candidates[CANDIDATES_MOST];
    int found = 0;
    cublasStatus_t code = describe(&d, cuda, &product);
    if (!code)
        code = set_preference(&preference);
    if (!code)
        code = cublasLtMatmulAlgoGetHeuristic(cuda->library, &d.product, &d.a, &d.b, &d.c, &d.c,
                                              &preference, CANDIDATES_MOST, candidates, &found);
    if (code)
        return gpt_cuda_library_status(queue, code);
    for (int i = 0; i < found; i++)
        if (is_usable(&candidates[i], queue, &product)) {
            *out = candidates[i].algo;
            return REBATCH_OK;
        }
    return gpt_error(REBATCH_E_UNSUPPORTED,
                     "cuBLASLt has %d algorithms for %zu inputs and %zu outputs: expected one "
                     "that splits no sum and takes any number of rows",
                     found, shape.inputs, shape.outputs);
}

/* The product's algorithm, settled when it is first asked for. */
static rebatch_status settle(const cublasLtMatmulAlgo_t **out, const struct gpt_queue *queue,
                             enum gpt_cuda_product_kind kind, const struct gpt_matmul *shape,
                             const void *bias)
{
    struct gpt_cuda *cuda = gpt_cuda_of(queue);
    for (size_t i = 0; i < cuda->product_count; i++) {
        const struct gpt_cuda_product *p = &cuda->products[i];
        if (p->kind == kind && p->inputs == shape->inputs && p->outputs == shape->outputs &&
            p->transposed == shape->transposed) {
            *out = &p->algorithm;
            return REBATCH_OK;
        }
    }
    if (cuda->product_count == GPT_CUDA_PRODUCTS_MOST)
        return gpt_error(REBATCH_E_UNSUPPORTED, "more than %d different products on one queue",
                         GPT_CUDA_PRODUCTS_MOST);
    struct gpt_cuda_product *fresh = &cuda->products[cuda->product_count];
    *fresh = (struct gpt_cuda_product){kind, shape->inputs, shape->outputs, shape->transposed,
                                       .algorithm = {{0}}};
    const rebatch_status status = choose(&fresh->algorithm, queue, kind, *shape, bias);
    if (status)
        return status;
    cuda->product_count++;
    *out = &fresh->algorithm;
    return REBATCH_OK;
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

/* dweight += x^T dy, a sample at a time. */
static rebatch_status add_weight(const struct gpt_queue *queue, float *dweight, const void *dy,
                                 const void *x, const struct gpt_matmul *shape)
{
    const float one = 1.0f;
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    const size_t length = queue->sample_rows;
    const struct gpt_matmul sample = {length, shape->inputs, shape->outputs, shape->transposed};
    const cublasLtMatmulAlgo_t *algorithm;
    const rebatch_status status =
        settle(&algorithm, queue, GPT_CUDA_BACKWARD_WEIGHT, &sample, NULL);
    if (status)
        return status;
    const struct product product = product_of(cuda, GPT_CUDA_BACKWARD_WEIGHT, &sample, NULL);
    struct descriptors d;
    cublasStatus_t code = describe(&d, cuda, &product);
    for (size_t row = 0; row < shape->rows && !code; row += length) {
        const void *slopes = gpt_cuda_const_at(cuda, dy, row * shape->outputs);
        const void *values = gpt_cuda_const_at(cuda, x, row * shape->inputs);
        code = cublasLtMatmul(cuda->library, &d.product, &one, shape->transposed ? values : slopes,
                              &d.a, shape->transposed ? slopes : values, &d.b, &one, dweight, &d.c,
                              dweight, &d.c, algorithm, cuda->scratch, WORKSPACE_BYTES,
                              gpt_cuda_stream(queue));
    }
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
        status = add_weight(queue, dweight, dy, x, shape);
    if (!status && dbias)
        status = add_bias(queue, dbias, dy, shape->rows, shape->outputs);
    return status;
}
