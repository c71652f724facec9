/* Owns the CUDA table of operations, its state, and the operations that are a kernel each.
 * Must not know the model, nor how a kernel works. */
#include <stdlib.h>

#include "gpt/cuda.h"
#include "gpt/error.h"
#include "rebatch/cuda.h"

_Static_assert(GPT_NORM_CHUNK == RBK_NORM_CHUNK, "partial sums of squares cover as much");

/* ---- statuses ---- */

rebatch_status gpt_cuda_status(const struct gpt_queue *queue, cudaError_t code)
{
    if (code == cudaSuccess)
        return REBATCH_OK;
    (void)cudaGetLastError(); /* the same once more */
    return rebatch_from_cuda(queue->device, (int)code);
}

rebatch_status gpt_cuda_library_status(const struct gpt_queue *queue, cublasStatus_t code)
{
    if (code == CUBLAS_STATUS_SUCCESS)
        return REBATCH_OK;
    const cudaError_t cause = cudaGetLastError(); /* says more than the library does */
    return cause != cudaSuccess ? rebatch_from_cuda(queue->device, (int)cause)
                                : rebatch_from_cublas(queue->device, (int)code);
}

/* Ends an operation: one launcher, on the queue's GPU. */
#define LAUNCH(call)                                                                               \
    do {                                                                                           \
        cudaError_t code_ = cudaSetDevice(cuda->ordinal);                                          \
        if (code_ == cudaSuccess)                                                                  \
            code_ = (call);                                                                        \
        return gpt_cuda_status(queue, code_);                                                      \
    } while (0)

/* ---- samples ---- */

rebatch_status gpt_cuda_samples(size_t *out, const struct gpt_queue *queue, size_t rows)
{
    *out = rows / queue->sample_rows;
    if (rows > 0 && rows % queue->sample_rows == 0)
        return REBATCH_OK;
    return gpt_error(REBATCH_E_INVALID, "%zu rows: expected a multiple of the %zu of a sample",
                     rows, queue->sample_rows);
}

rebatch_status gpt_cuda_group(size_t *out, const char *what, size_t samples, size_t sample_bytes)
{
    const size_t most = sample_bytes > 0 ? GPT_CUDA_SCRATCH_BYTES / sample_bytes : samples;
    *out = most < samples ? most : samples;
    if (*out > 0)
        return REBATCH_OK;
    return gpt_error(REBATCH_E_UNSUPPORTED,
                     "%s needs %zu bytes of scratch memory a sample: expected at most %zu", what,
                     sample_bytes, GPT_CUDA_SCRATCH_BYTES);
}

/* The samples of group [first, first + group) that there are. */
static size_t in_group(size_t samples, size_t first, size_t group)
{
    return samples - first < group ? samples - first : group;
}

/* ---- sizes ---- */

static rebatch_status check_heads(float *scale, size_t width)
{
    static const struct {
        size_t width;
        float scale; /* 1 / sqrt(width) */
    } known[] = {{32, 0.17677669529663687f}, {64, 0.125f}, {128, 0.08838834764831845f}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (width == known[i].width) {
            *scale = known[i].scale;
            return REBATCH_OK;
        }
    return gpt_error(REBATCH_E_UNSUPPORTED, "a head's width is %zu: expected 32, 64 or 128", width);
}

/* Rows up to 4 C wide go through the kernels. Then a sample's partial sums fit the scratch for any
 * length that a gpt_config may have: at 65536 positions of 2048 channels they fill it. */
static rebatch_status check_sizes(const struct gpt_sizes *sizes)
{
    const size_t by_width = RBK_WIDTH_LIMIT / 4, by_norm = RBK_LAYER_NORM_WIDTH_LIMIT;
    const size_t widest = by_width < by_norm ? by_width : by_norm;
    float unused;
    const rebatch_status status = check_heads(&unused, sizes->channels / sizes->heads);
    if (status || sizes->channels <= widest)
        return status;
    return gpt_error(REBATCH_E_UNSUPPORTED, "channels is %zu: expected at most %zu on a GPU",
                     sizes->channels, widest);
}

/* ---- life ---- */

/* From a pool of its own, because a queue has none: the device counts it, and says OOM as it does
 * elsewhere. */
static rebatch_status take_scratch(struct gpt_cuda *cuda, const struct gpt_queue *queue)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.caching = REBATCH_OFF;
    const rebatch_status status = rebatch_pool_create(&cuda->pool, queue->device, &options);
    return status ? status
                  : rebatch_pool_alloc(&cuda->scratch, cuda->pool, GPT_CUDA_SCRATCH_BYTES,
                                       queue->stream, 0);
}

/* A kernel is loaded when it is first launched, and that takes memory. The update's kernels run
 * when parameters are half changed, where an OOM cannot be undone: so they run here once, on 8
 * zeros each. The others may meet an OOM: then their micro-batch is tried again. */
static rebatch_status load_update(const struct gpt_queue *queue)
{
    enum { COUNT = 8, ARRAYS = 9 };
    static const struct gpt_adamw settings = {.epsilon = 1.0f, .update = 1};
    const struct gpt_ops *ops = gpt_cuda_ops_get();
    float(*arrays)[COUNT] = gpt_cuda_of(queue)->scratch;
    double *partials = (double *)(void *)arrays[ARRAYS];
    const struct gpt_adamw_arrays update = {.weight = arrays[1],
                                            .first_moment = arrays[2],
                                            .second_moment = arrays[3],
                                            .working = arrays[4],
                                            .gradient = arrays[5],
                                            .inverse = arrays[6],
                                            .scale = arrays[7],
                                            .count = COUNT};
    rebatch_status status =
        rebatch_fill(queue->device, arrays, 0, (ARRAYS + 1) * sizeof *arrays, queue->stream);
    if (!status)
        status = ops->add(queue, arrays[0], arrays[1], COUNT);
    if (!status)
        status = ops->check_finite(queue, (uint32_t *)(void *)arrays[8], arrays[0], COUNT);
    if (!status)
        status = ops->sum_squares(queue, partials, arrays[0], COUNT);
    if (!status)
        status = ops->clip_scale(queue, arrays[7], partials, 1, 1.0f, NULL);
    if (!status)
        status = ops->adamw(queue, &update, &settings);
    return status ? status : rebatch_stream_synchronize(queue->device, queue->stream);
}

static void cuda_close(struct gpt_queue *queue)
{
    struct gpt_cuda *cuda = gpt_cuda_of(queue);
    queue->state = NULL;
    if (!cuda)
        return;
    (void)rebatch_stream_synchronize(queue->device, queue->stream); /* what uses the scratch */
    if (cuda->library)
        (void)cublasLtDestroy(cuda->library);
    rebatch_pool_destroy(cuda->pool);
    free(cuda);
}

/* What elements are, in the words of the kernels and of the library. */
static rebatch_status take_dtype(struct gpt_cuda *cuda, enum gpt_dtype dtype)
{
    switch (dtype) {
    case GPT_FP32:
        cuda->dtype = RBK_F32, cuda->library_dtype = CUDA_R_32F;
        return REBATCH_OK;
    case GPT_BF16:
        cuda->dtype = RBK_BF16, cuda->library_dtype = CUDA_R_16BF;
        return REBATCH_OK;
    case GPT_FP16:
        cuda->dtype = RBK_F16, cuda->library_dtype = CUDA_R_16F;
        return REBATCH_OK;
    case GPT_DTYPE_COUNT:
        break;
    }
    return gpt_error(REBATCH_E_UNSUPPORTED, "dtype is number %d: expected fp32, bf16 or fp16",
                     (int)dtype);
}

/* Hopper's tensor cores, for 16-bit elements. */
static rebatch_status find_alike(struct gpt_cuda *cuda, const struct gpt_queue *queue)
{
    int major = 0, minor = 0;
    cudaError_t code =
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, cuda->ordinal);
    if (!code)
        code = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, cuda->ordinal);
    cuda->has_alike = cuda->dtype != RBK_F32 && major == 9 && minor == 0;
    return gpt_cuda_status(queue, code);
}

static rebatch_status cuda_open(struct gpt_queue *queue)
{
    struct gpt_cuda *cuda = calloc(1, sizeof *cuda);
    queue->state = cuda;
    if (!cuda)
        return gpt_error(REBATCH_E_HOST_OOM, "no host memory for a queue's state");
    rebatch_status status = take_dtype(cuda, queue->dtype);
    if (!status && queue->sample_rows == 0)
        status = gpt_error(REBATCH_E_INVALID, "a sample has 0 rows: expected at least 1");
    if (!status)
        status = rebatch_device_ordinal(&cuda->ordinal, queue->device);
    if (!status)
        status = take_scratch(cuda, queue);
    if (!status)
        status = gpt_cuda_status(queue, cudaSetDevice(cuda->ordinal));
    if (!status)
        status = find_alike(cuda, queue);
    if (!status)
        status = gpt_cuda_library_status(queue, cublasLtCreate(&cuda->library));
    if (!status)
        status = load_update(queue);
    if (status)
        cuda_close(queue);
    return status;
}

/* ---- embedding ---- */

/* The kernels ask for the tables' length to leave out tokens that are none; here every token is
 * one, as on the host. */
#define ANY_TOKEN INT32_MAX

static rebatch_status embedding_forward(const struct gpt_queue *queue, void *x,
                                        const struct gpt_tokens *tokens, const void *token_table,
                                        const void *position_table, size_t channels)
{
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    LAUNCH(rbk_embedding_forward(x, tokens->tokens, tokens->length + 1, token_table, position_table,
                                 tokens->count, tokens->length, channels, ANY_TOKEN, cuda->dtype,
                                 gpt_cuda_stream(queue)));
}

static cudaError_t embed_group(const struct gpt_queue *queue, float *dtoken_table,
                               float *dposition_table, const void *dx,
                               const struct gpt_tokens *tokens, size_t channels, size_t first,
                               size_t count)
{
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    const size_t length = tokens->length;
    return rbk_embedding_backward(
        dtoken_table, dposition_table, gpt_cuda_const_at(cuda, dx, first * length * channels),
        tokens->tokens + first * (length + 1), length + 1, cuda->scratch, GPT_CUDA_SCRATCH_BYTES,
        count, length, channels, ANY_TOKEN, cuda->dtype, gpt_cuda_stream(queue));
}

static rebatch_status embedding_backward(const struct gpt_queue *queue, float *dtoken_table,
                                         float *dposition_table, const void *dx,
                                         const struct gpt_tokens *tokens, size_t channels)
{
    size_t group;
    rebatch_status status = gpt_cuda_group(&group, "the gradient of the embedding", tokens->count,
                                           rbk_embedding_backward_scratch_bytes(1, tokens->length));
    if (!status)
        status = gpt_cuda_status(queue, cudaSetDevice(gpt_cuda_of(queue)->ordinal));
    for (size_t first = 0; first < tokens->count && !status; first += group)
        status = gpt_cuda_status(queue, embed_group(queue, dtoken_table, dposition_table, dx,
                                                    tokens, channels, first,
                                                    in_group(tokens->count, first, group)));
    return status;
}

/* ---- layer norm ---- */

#define NORM_EPSILON 1e-5f

static rebatch_status layernorm_forward(const struct gpt_queue *queue, void *y, float *mean,
                                        float *rstd, const void *x, const void *gamma,
                                        const void *beta, size_t rows, size_t channels)
{
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    LAUNCH(rbk_layer_norm_forward(y, mean, rstd, x, gamma, beta, rows, channels, NORM_EPSILON,
                                  cuda->dtype, gpt_cuda_stream(queue)));
}

static rebatch_status layernorm_backward(const struct gpt_queue *queue, void *dx, float *dgamma,
                                         float *dbeta, const void *dy, const void *x,
                                         const float *mean, const float *rstd, const void *gamma,
                                         size_t rows, size_t channels, bool add)
{
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    const size_t length = queue->sample_rows;
    size_t samples, group = 0;
    rebatch_status status = gpt_cuda_samples(&samples, queue, rows);
    if (!status)
        status = gpt_cuda_group(&group, "the gradient of a layer norm", samples,
                                rbk_layer_norm_backward_scratch_bytes(1, length, channels));
    if (!status)
        status = gpt_cuda_status(queue, cudaSetDevice(cuda->ordinal));
    for (size_t first = 0; first < samples && !status; first += group) {
        const size_t row = first * length, at = row * channels;
        void *slopes = gpt_cuda_at(cuda, dx, at);
        status = gpt_cuda_status(
            queue, rbk_layer_norm_backward(slopes, dgamma, dbeta, gpt_cuda_const_at(cuda, dy, at),
                                           add ? slopes : NULL, gpt_cuda_const_at(cuda, x, at),
                                           mean + row, rstd + row, gamma, cuda->scratch,
                                           GPT_CUDA_SCRATCH_BYTES, in_group(samples, first, group),
                                           length, channels, cuda->dtype, gpt_cuda_stream(queue)));
    }
    return status;
}

/* ---- attention ---- */

static rebatch_status attention_forward(const struct gpt_queue *queue, void *out, float *log_sums,
                                        const void *qkv, const struct gpt_attention *shape)
{
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    float scale = 0.0f;
    const rebatch_status status = check_heads(&scale, shape->width);
    if (status)
        return status;
    LAUNCH(rbk_attention_forward(out, log_sums, qkv, shape->count, shape->length, shape->heads,
                                 shape->width, scale, cuda->dtype, gpt_cuda_stream(queue)));
}

static rebatch_status attention_backward(const struct gpt_queue *queue, void *dqkv,
                                         const void *dout, const void *out, const void *qkv,
                                         const float *log_sums, const struct gpt_attention *shape)
{
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    const size_t rows = shape->length * shape->heads, elements = rows * shape->width; /* a sample */
    float scale = 0.0f;
    size_t group = 0;
    rebatch_status status = check_heads(&scale, shape->width);
    if (!status)
        status =
            gpt_cuda_group(&group, "the gradient of attention", shape->count,
                           rbk_attention_backward_scratch_bytes(1, shape->length, shape->heads));
    if (!status)
        status = gpt_cuda_status(queue, cudaSetDevice(cuda->ordinal));
    for (size_t first = 0; first < shape->count && !status; first += group)
        status = gpt_cuda_status(
            queue, rbk_attention_backward(
                       gpt_cuda_at(cuda, dqkv, 3 * first * elements),
                       gpt_cuda_const_at(cuda, dout, first * elements),
                       gpt_cuda_const_at(cuda, qkv, 3 * first * elements),
                       gpt_cuda_const_at(cuda, out, first * elements), log_sums + first * rows,
                       cuda->scratch, GPT_CUDA_SCRATCH_BYTES, in_group(shape->count, first, group),
                       shape->length, shape->heads, shape->width, scale, cuda->dtype,
                       gpt_cuda_stream(queue)));
    return status;
}

/* ---- element by element ---- */

static rebatch_status gelu_forward(const struct gpt_queue *queue, void *y, const void *x,
                                   size_t count)
{
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    LAUNCH(rbk_gelu_forward(y, x, count, cuda->dtype, gpt_cuda_stream(queue)));
}

static rebatch_status gelu_backward(const struct gpt_queue *queue, void *dy, const void *x,
                                    size_t count)
{
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    LAUNCH(rbk_gelu_backward(dy, dy, x, count, cuda->dtype, gpt_cuda_stream(queue)));
}

static rebatch_status dropout_add(const struct gpt_queue *queue, void *out, const void *residual,
                                  const void *x, size_t samples, size_t sample_elements,
                                  const struct gpt_dropout *dropout)
{
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    const rbk_dropout_key key = {.seed = dropout->seed,
                                 .step = dropout->step,
                                 .first_sample = dropout->first_sample,
                                 .site = dropout->site,
                                 .probability = dropout->probability};
    if (!(dropout->probability >= 0.0f && dropout->probability < 1.0f))
        return gpt_error(REBATCH_E_INVALID, "dropout is %g: expected at least 0 and less than 1",
                         (double)dropout->probability);
    if (sample_elements == 0 || sample_elements % RBK_WIDTH_MULTIPLE != 0)
        return gpt_error(REBATCH_E_UNSUPPORTED,
                         "a sample has %zu elements: expected a multiple "
                         "of %d",
                         sample_elements, RBK_WIDTH_MULTIPLE);
    /* Without a bias the kernel does not look at how a sample's elements make rows. */
    LAUNCH(rbk_bias_dropout_residual(out, x, NULL, residual, &key, samples,
                                     sample_elements / RBK_WIDTH_MULTIPLE, RBK_WIDTH_MULTIPLE,
                                     cuda->dtype, gpt_cuda_stream(queue)));
}

/* ---- loss ---- */

static rebatch_status cross_entropy(const struct gpt_queue *queue, float *losses, void *logits,
                                    const struct gpt_tokens *tokens, size_t vocabulary, float scale)
{
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    LAUNCH(rbk_cross_entropy(losses, logits, tokens->tokens + 1, tokens->length + 1, tokens->count,
                             tokens->length, vocabulary, vocabulary, scale, NULL, scale != 0.0f,
                             cuda->dtype, gpt_cuda_stream(queue)));
}

static rebatch_status sum_losses(const struct gpt_queue *queue, double *sum, const float *losses,
                                 size_t rows)
{
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    size_t samples;
    const rebatch_status status = gpt_cuda_samples(&samples, queue, rows);
    if (status)
        return status;
    LAUNCH(rbk_loss_sum(sum, losses, samples, queue->sample_rows, gpt_cuda_stream(queue)));
}

/* ---- update: fp32 whatever the elements are; working weights follow ---- */

static rebatch_status add(const struct gpt_queue *queue, float *y, const float *x, size_t count)
{
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    LAUNCH(rbk_residual_add(y, y, x, count, RBK_F32, gpt_cuda_stream(queue)));
}

static rebatch_status cast(const struct gpt_queue *queue, void *out, const float *x, size_t count)
{
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    LAUNCH(rbk_cast(out, cuda->dtype, x, RBK_F32, count, gpt_cuda_stream(queue)));
}

static rebatch_status check_finite(const struct gpt_queue *queue, uint32_t *flag, const float *x,
                                   size_t count)
{
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    LAUNCH(rbk_finite_check(flag, x, count, gpt_cuda_stream(queue)));
}

static rebatch_status sum_squares(const struct gpt_queue *queue, double *partials, const float *x,
                                  size_t count)
{
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    LAUNCH(rbk_sum_squares(partials, x, count, gpt_cuda_stream(queue)));
}

static rebatch_status clip_scale(const struct gpt_queue *queue, float *norm_and_scale,
                                 const double *partials, size_t count, float most,
                                 const float *inverse)
{
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    LAUNCH(rbk_clip_coefficient(norm_and_scale + 1, norm_and_scale, partials, count, inverse, most,
                                gpt_cuda_stream(queue)));
}

static rebatch_status adamw(const struct gpt_queue *queue, const struct gpt_adamw_arrays *arrays,
                            const struct gpt_adamw *settings)
{
    const struct gpt_cuda *cuda = gpt_cuda_of(queue);
    const rbk_adamw_settings own = {.learning_rate = settings->learning_rate,
                                    .beta1 = settings->beta1,
                                    .beta2 = settings->beta2,
                                    .epsilon = settings->epsilon,
                                    .weight_decay = settings->weight_decay,
                                    .update = settings->update};
    LAUNCH(rbk_adamw(arrays->weight, arrays->first_moment, arrays->second_moment, arrays->working,
                     arrays->gradient, &own, arrays->inverse, arrays->scale, NULL, arrays->count,
                     cuda->dtype, gpt_cuda_stream(queue)));
}

/* ---- the table ---- */

const struct gpt_ops *gpt_cuda_ops_get(void)
{
    static const struct gpt_ops table = {
        .struct_size = sizeof(struct gpt_ops),
        .name = "cuda",
        .check_sizes = check_sizes,
        .open = cuda_open,
        .close = cuda_close,
        .embedding_forward = embedding_forward,
        .embedding_backward = embedding_backward,
        .layernorm_forward = layernorm_forward,
        .layernorm_backward = layernorm_backward,
        .matmul_forward = gpt_cuda_matmul_forward,
        .matmul_backward_input = gpt_cuda_matmul_backward_input,
        .matmul_backward_weight = gpt_cuda_matmul_backward_weight,
        .attention_forward = attention_forward,
        .attention_backward = attention_backward,
        .gelu_forward = gelu_forward,
        .gelu_backward = gelu_backward,
        .dropout_add = dropout_add,
        .cross_entropy = cross_entropy,
        .sum_losses = sum_losses,
        .add = add,
        .cast = cast,
        .check_finite = check_finite,
        .sum_squares = sum_squares,
        .clip_scale = clip_scale,
        .adamw = adamw,
    };
    return &table;
}
