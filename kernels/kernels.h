/** @file kernels.h
 *  The GPU operations of the reference model: one launcher with C linkage each.
 *
 *  What holds for all of them:
 *  - Every pointer is device memory and not NULL unless its line says so. It starts at a multiple
 *    of 16 bytes; tokens, targets, loss, mean, rstd, log_sum, partial sums of squares and single
 *    values ("one float") at one of their element's size. It stays the caller's and must be valid
 *    until the work on `stream` has run. Settings structs are host memory, copied by the call.
 *  - Arrays are dense, the last index runs fastest. B = batch (samples of the micro-batch),
 *    T = length (positions a sample), C = width (channels), H = heads, D = head width,
 *    V = vocabulary, R = rows (B*T where nothing else is said). Every size is at least 1.
 *  - `dtype` is the type of activations and of the working copy of the weights. Weight gradients,
 *    statistics, losses and the optimizer's state are fp32. Arithmetic is in fp32 (attention's
 *    products take fp16/bf16 operands and add in fp32); a result is rounded once, when it is
 *    stored.
 *  - Arguments are checked first: cudaErrorInvalidValue means that nothing was launched. Otherwise
 *    the value is cudaGetLastError() after the launch. Nothing is allocated and nothing waits, so a
 *    launcher may be called while an out-of-memory is being handled; scratch comes from the caller.
 *  - An output may be the same array as an input where its line says "in place"; any other overlap
 *    is not allowed.
 *  - Deterministic: no floating-point atomics. A row's result depends on that row alone: not on how
 *    many rows there are, nor where it stands.
 *  - "Cut-invariant" marks the operations that add over samples. They go on from what the fp32
 *    accumulator holds and add the samples in ascending order, so that any cut of an effective
 *    batch into micro-batches, handed over in ascending order, leaves the same bits. The sum inside
 *    one sample has a fixed shape that depends on T alone. */
#ifndef REBATCH_KERNELS_H
#define REBATCH_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

/** Type of activations and working weights. */
typedef enum rbk_dtype { RBK_F32 = 0, RBK_BF16 = 1, RBK_F16 = 2 } rbk_dtype;

/** Widths that the row-wise kernels take: multiples of the first, up to the second. */
#define RBK_WIDTH_MULTIPLE 8
#define RBK_WIDTH_LIMIT 8192

/** Layer norm holds a row in one block's registers: it goes up to this. */
#define RBK_LAYER_NORM_WIDTH_LIMIT 4096

/** What a dropout mask depends on, and nothing else does.
 *
 *  Element e of sample s (e counts 0, 1, ... through the sample's own [T, C] array; s is
 *  first_sample + the sample's index in the micro-batch) is decided by one word of
 *  Philox4x32-10 (Salmon et al., SC'11):
 *
 *      key     = { low 32 bits of seed, high 32 bits of seed ^ high 32 bits of step }
 *      counter = { e / 4, low 32 bits of s, site, low 32 bits of step }
 *      word    = output[e % 4]
 *      kept    = word >= floor(probability * 2^32)
 *      y       = kept ? x * (1 / (1 - probability)) : 0      (all in fp32) */
typedef struct rbk_dropout_key {
    uint64_t seed;
    uint64_t step;         /**< number of the effective batch */
    uint64_t first_sample; /**< index in the effective batch of the micro-batch's first sample */
    uint32_t site;         /**< which dropout of the model: any numbering, one number a site */
    float probability;     /**< of dropping, 0 <= probability < 1; 0 drops nothing */
} rbk_dropout_key;

/** Settings of AdamW (Loshchilov and Hutter, 2019). */
typedef struct rbk_adamw_settings {
    float learning_rate;
    float beta1, beta2;
    float epsilon;
    float weight_decay;
    uint64_t update; /**< number of this update, from 1: it sets the bias correction */
} rbk_adamw_settings;

#ifdef __cplusplus
extern "C" {
#endif

/** Bytes of one element; 0 for a value that is no dtype. */
size_t rbk_dtype_bytes(rbk_dtype dtype);

/* ---- embedding ---- */

/** out[b,t,c] = token_weight[tokens[b,t],c] + position_weight[t,c].
 *  A token outside [0, V) reads as a row of zeros.
 *  @param[out] out         [B,T,C]
 *  @param tokens           [B,T], samples token_stride >= T apart: T + 1, say, where the targets
 *                          are the same tokens, one further
 *  @param token_weight     [V,C]
 *  @param position_weight  [at least T,C]
 *  C: a multiple of 8. */
cudaError_t rbk_embedding_forward(void *out, const int32_t *tokens, size_t token_stride,
                                  const void *token_weight, const void *position_weight,
                                  size_t batch, size_t length, size_t width, size_t vocabulary,
                                  rbk_dtype dtype, cudaStream_t stream);

/** Scratch for rbk_embedding_backward(). */
size_t rbk_embedding_backward_scratch_bytes(size_t batch, size_t length);

/** Gradients of both tables, cut-invariant. Each element is one chain of additions that starts from
 *  the accumulator: over ascending (b,t) with tokens[b,t] = v for token_grad[v,c], over ascending b
 *  for position_grad[t,c]. Positions are brought into the order (token, b, t) by sorting keys that
 *  are all different, so there is one order only. A token outside [0, V) gives no token gradient.
 *  @param[in,out] token_grad     [V,C] fp32
 *  @param[in,out] position_grad  [at least T,C] fp32
 *  @param dout                   [B,T,C]
 *  @param tokens                 as in the forward pass
 *  @param scratch                of rbk_embedding_backward_scratch_bytes(); contents do not matter
 *  B*T: at most 2^30. */
cudaError_t rbk_embedding_backward(float *token_grad, float *position_grad, const void *dout,
                                   const int32_t *tokens, size_t token_stride, void *scratch,
                                   size_t scratch_bytes, size_t batch, size_t length, size_t width,
                                   size_t vocabulary, rbk_dtype dtype, cudaStream_t stream);

/* ---- layer norm (Ba et al., 2016) ---- */

/** out = (in - mean) * rstd * gamma + beta over the C channels of a row, rstd = 1 / sqrt(variance +
 *  epsilon), variance the mean squared distance from the mean (two passes).
 *  Order: a thread adds its channels, ascending, a warp adds by butterfly, then warps ascending;
 *  which channels a thread has depends on C and dtype alone.
 *  @param[out] out         [R,C]; in place on `in` is allowed
 *  @param[out] mean, rstd  [R] fp32; both NULL: not stored
 *  @param gamma, beta      [C]
 *  C: a multiple of 8, at most RBK_LAYER_NORM_WIDTH_LIMIT. */
cudaError_t rbk_layer_norm_forward(void *out, float *mean, float *rstd, const void *in,
                                   const void *gamma, const void *beta, size_t rows, size_t width,
                                   float epsilon, rbk_dtype dtype, cudaStream_t stream);

/** Scratch for rbk_layer_norm_backward(). */
size_t rbk_layer_norm_backward_scratch_bytes(size_t batch, size_t length, size_t width);

/** With x = (in - mean) * rstd and g = dout * gamma, over a row:
 *  din = rstd * (g - mean(g) - x * mean(g * x)) + residual_grad;
 *  gamma_grad += sum of dout * x, beta_grad += sum of dout, cut-invariant: inside tiles of 32
 *  positions of one sample in an order that depends on C and dtype alone, tiles ascending, samples
 *  ascending.
 *  @param[out] din                       [B,T,C]; in place on `dout` or `residual_grad` is allowed
 *  @param[in,out] gamma_grad, beta_grad  [C] fp32
 *  @param dout                           [B,T,C]
 *  @param residual_grad                  [B,T,C]: the gradient that comes round the block; NULL:
 *                                        none
 *  @param in, mean, rstd, gamma          as in the forward pass
 *  @param scratch                        of rbk_layer_norm_backward_scratch_bytes() */
cudaError_t rbk_layer_norm_backward(void *din, float *gamma_grad, float *beta_grad,
                                    const void *dout, const void *residual_grad, const void *in,
                                    const float *mean, const float *rstd, const void *gamma,
                                    void *scratch, size_t scratch_bytes, size_t batch,
                                    size_t length, size_t width, rbk_dtype dtype,
                                    cudaStream_t stream);

/* ---- GELU, tanh form (Hendrycks and Gimpel, 2016) ---- */

/** out = x / (1 + exp(-2u)), u = sqrt(2/pi) * (x + 0.044715 x^3): the same as x/2 * (1 + tanh u).
 *  @param[out] out  [count]; in place is allowed */
cudaError_t rbk_gelu_forward(void *out, const void *in, size_t count, rbk_dtype dtype,
                             cudaStream_t stream);

/** din = dout * gelu'(in).
 *  @param[out] din  [count]; in place on `dout` is allowed
 *  @param in        what the forward pass read */
cudaError_t rbk_gelu_backward(void *din, const void *dout, const void *in, size_t count,
                              rbk_dtype dtype, cudaStream_t stream);

/** pre = in + bias, out = gelu(pre). GELU reads the rounded `pre`, so that rbk_gelu_forward() on a
 *  kept `pre` gives the same bits.
 *  @param[out] out  [R,C]
 *  @param[out] pre  [R,C], what rbk_gelu_backward() needs; in place on `in` is allowed; NULL: not
 *                   kept
 *  @param bias      [C]
 *  C: a multiple of 8. */
cudaError_t rbk_bias_gelu_forward(void *out, void *pre, const void *in, const void *bias,
                                  size_t rows, size_t width, rbk_dtype dtype, cudaStream_t stream);

/* ---- bias, residual, dropout ---- */

/** out = in + bias.
 *  @param[out] out  [R,C]; in place is allowed
 *  @param bias      [C]; C: a multiple of 8 */
cudaError_t rbk_bias_add(void *out, const void *in, const void *bias, size_t rows, size_t width,
                         rbk_dtype dtype, cudaStream_t stream);

/** Scratch for rbk_bias_backward(). */
size_t rbk_bias_backward_scratch_bytes(size_t batch, size_t length, size_t width);

/** bias_grad[c] += sum over b,t of dout[b,t,c], cut-invariant: inside a tile of 64 positions of one
 *  sample, eight chains (positions i, i+8, ...) and then these ascending; tiles ascending; samples
 *  ascending.
 *  @param[in,out] bias_grad  [C] fp32
 *  @param dout               [B,T,C]
 *  @param scratch            of rbk_bias_backward_scratch_bytes()
 *  C: a multiple of 8. */
cudaError_t rbk_bias_backward(float *bias_grad, const void *dout, void *scratch,
                              size_t scratch_bytes, size_t batch, size_t length, size_t width,
                              rbk_dtype dtype, cudaStream_t stream);

/** out = a + b. Also adds fp32 gradients, with RBK_F32.
 *  @param[out] out  [count]; in place on either is allowed */
cudaError_t rbk_residual_add(void *out, const void *a, const void *b, size_t count, rbk_dtype dtype,
                             cudaStream_t stream);

/** out = dropout(in): forward on activations, backward on their gradient.
 *  @param[out] out  [B, elements]; in place is allowed
 *  @param key       see rbk_dropout_key
 *  @param elements  of one sample, T*C: a multiple of 8, below 2^34 */
cudaError_t rbk_dropout(void *out, const void *in, const rbk_dropout_key *key, size_t batch,
                        size_t elements, rbk_dtype dtype, cudaStream_t stream);

/** out = residual + dropout(in + bias), rounded once. Its backward pass: the gradient itself for
 *  `residual`, rbk_dropout() of it for `in`, and rbk_bias_backward() of that for `bias`.
 *  @param[out] out  [B,T,C]; in place on `in` or `residual` is allowed
 *  @param bias      [C]; NULL: none
 *  @param residual  [B,T,C]; NULL: none
 *  C: a multiple of 8; T*C below 2^34. */
cudaError_t rbk_bias_dropout_residual(void *out, const void *in, const void *bias,
                                      const void *residual, const rbk_dropout_key *key,
                                      size_t batch, size_t length, size_t width, rbk_dtype dtype,
                                      cudaStream_t stream);

/* ---- causal attention ---- */

/** out[b,t,h,:] = sum over s <= t of softmax_s(scale * <q[b,t,h], k[b,s,h]>) * v[b,s,h,:].
 *
 *  Online softmax (Milakov and Gimelshein, 2018) over tiles, no T x T array: FlashAttention-2 (Dao,
 *  2023). Keys ascend in tiles whose size depends on D, dtype and the device alone. fp16 and
 *  bf16 run on the tensor cores (wgmma on Hopper where D = 64, else mma.sync m16n8k16); the
 *  probabilities are rounded to `dtype` before they meet v.
 *  @param[out] out      [B,T,H,D]
 *  @param[out] log_sum  [B,H,T] fp32: the natural logarithm of the sum of exponentials
 *  @param qkv           [B,T,3,H,D]
 *  @param scale         usually 1 / sqrt(D); above 0
 *  D: 32, 64 or 128. T: any, below 2^24. B and H: at most 65535. */
cudaError_t rbk_attention_forward(void *out, float *log_sum, const void *qkv, size_t batch,
                                  size_t length, size_t heads, size_t head_width, float scale,
                                  rbk_dtype dtype, cudaStream_t stream);

/** Scratch for rbk_attention_backward(). */
size_t rbk_attention_backward_scratch_bytes(size_t batch, size_t length, size_t heads);

/** Gradient of rbk_attention_forward(). Probabilities are computed again from q, k and `log_sum`.
 *  One kernel owns tiles of keys and adds dk and dv over ascending queries, another owns tiles of
 *  queries and adds dq over ascending keys, so that no two blocks add to the same place.
 *  @param[out] dqkv                [B,T,3,H,D]
 *  @param dout                     [B,T,H,D]
 *  @param qkv, out, log_sum, scale as in the forward pass
 *  @param scratch                  of rbk_attention_backward_scratch_bytes() */
cudaError_t rbk_attention_backward(void *dqkv, const void *dout, const void *qkv, const void *out,
                                   const float *log_sum, void *scratch, size_t scratch_bytes,
                                   size_t batch, size_t length, size_t heads, size_t head_width,
                                   float scale, rbk_dtype dtype, cudaStream_t stream);

/* ---- gradient of a weight ---- */

/** grad[m,n] += sum over b,t of a[b,t,m] * b[b,t,n], cut-invariant: an element is one chain of
 *  additions that starts from the accumulator and takes the positions in ascending order. In fp32 a
 *  link is one fused multiply-add. In fp16 and bf16 it is the tensor cores' sum of 16 positions of
 *  one sample, whose positions are filled up with zeros; which instruction adds them depends on the
 *  device, so that the bits are those of one kind of device.
 *  @param[in,out] grad  [M,N] fp32
 *  @param a             [B,T,M]
 *  @param b             [B,T,N]
 *  @param rows          M
 *  @param columns       N, below 2^30; M up to 2,097,120; both multiples of 8 */
cudaError_t rbk_weight_gradient(float *grad, const void *a, const void *b, size_t batch,
                                size_t length, size_t rows, size_t columns, rbk_dtype dtype,
                                cudaStream_t stream);

/** The same as a device without wgmma does it, on any device. */
cudaError_t rbk_weight_gradient_portable(float *grad, const void *a, const void *b, size_t batch,
                                         size_t length, size_t rows, size_t columns,
                                         rbk_dtype dtype, cudaStream_t stream);

/* ---- loss ---- */

/** Cross-entropy of each row and, in place of the logits, its gradient:
 *  loss = log(sum over v < V of exp(logits[v])) - logits[target];
 *  logits[v] = (softmax[v] - [v == target]) * scale * (*device_scale) for v < V, and 0 beyond.
 *  A target outside [0, V) takes its row out: loss 0, gradient 0.
 *  Order: a thread's columns ascending, a warp by butterfly, warps ascending; depends on Vp alone.
 *  @param[out] loss         [B,T] fp32, not scaled
 *  @param[in,out] logits    [B,T,Vp]; columns V..Vp-1 are padding and may hold anything
 *  @param targets           [B,T], samples target_stride >= T apart
 *  @param padded            Vp >= V, a multiple of 8
 *  @param scale             1 / (target tokens of the effective batch), say
 *  @param device_scale      one float, e.g. the loss scale of fp16; NULL: 1
 *  @param write_gradient    0: leave the logits as they are (evaluation) */
cudaError_t rbk_cross_entropy(float *loss, void *logits, const int32_t *targets,
                              size_t target_stride, size_t batch, size_t length, size_t vocabulary,
                              size_t padded, float scale, const float *device_scale,
                              int write_gradient, rbk_dtype dtype, cudaStream_t stream);

/** sum[0] += sum over t of loss[b,t] for ascending b, in fp64, cut-invariant. Inside a sample, lane
 *  i of a warp adds positions i, i+32, ... and the lanes are added by butterfly.
 *  @param[in,out] sum  one double
 *  @param loss         [B,T] fp32 */
cudaError_t rbk_loss_sum(double *sum, const float *loss, size_t batch, size_t length,
                         cudaStream_t stream);

/* ---- optimizer ---- */

/** One AdamW update of `count` parameters, with g = grad * (*inverse_scale) * (*clip):
 *  w *= 1 - lr * decay;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;
 *  w -= lr * (m / (1 - beta1^update)) / (sqrt(v / (1 - beta2^update)) + epsilon).
 *  The result of an element does not depend on where it stands, so the arrays may be updated in
 *  pieces.
 *  @param[in,out] master, m, v  [count] fp32
 *  @param[out] working          [count] of `dtype`: the rounded copy; NULL: none. With RBK_F32 it
 *                               may be NULL and `master` used in its place
 *  @param grad                  [count] fp32
 *  @param inverse_scale         one float, 1 / loss scale; NULL: 1
 *  @param clip                  one float, from rbk_clip_coefficient(); NULL: 1
 *  @param skip                  one flag: if it is not 0 nothing is changed; NULL: 0 */
cudaError_t rbk_adamw(float *master, float *m, float *v, void *working, const float *grad,
                      const rbk_adamw_settings *settings, const float *inverse_scale,
                      const float *clip, const uint32_t *skip, size_t count, rbk_dtype dtype,
                      cudaStream_t stream);

/** A partial sum of squares covers this many elements. */
#define RBK_NORM_CHUNK 4096

/** partial[i] = sum of the squares of in's i-th RBK_NORM_CHUNK elements. Order: a thread's 16
 *  ascending in fp32, then threads in fp64.
 *  @param[out] partial  [count / RBK_NORM_CHUNK, rounded up] fp64
 *  @param in            [count] fp32 */
cudaError_t rbk_sum_squares(double *partial, const float *in, size_t count, cudaStream_t stream);

/** norm = sqrt(sum of partial) * (*inverse_scale); clip = norm > limit ? limit / norm : 1.
 *  Order: thread i of 1024 adds i, i+1024, ... in fp64, then warps by butterfly, then ascending.
 *  @param[out] clip      one float
 *  @param[out] norm      one float; NULL: not stored
 *  @param partial        [parts] fp64, from rbk_sum_squares(), of one array or several
 *  @param inverse_scale  one float, 1 / loss scale; NULL: 1
 *  @param limit          the largest norm that stays as it is; 0: no clipping */
cudaError_t rbk_clip_coefficient(float *clip, float *norm, const double *partial, size_t parts,
                                 const float *inverse_scale, float limit, cudaStream_t stream);

/** Set flag[0] to 1 if any of in[i] is infinite or no number; it is never set to 0 here.
 *  @param[in,out] flag  one uint32_t
 *  @param in            [count] fp32 */
cudaError_t rbk_finite_check(uint32_t *flag, const float *in, size_t count, cudaStream_t stream);

/* ---- plain array work ---- */

/** out = in, rounded to nearest even. Too large for fp16 becomes infinite.
 *  @param[out] out  [count] of out_dtype; in place is allowed when both types are the same size */
cudaError_t rbk_cast(void *out, rbk_dtype out_dtype, const void *in, rbk_dtype in_dtype,
                     size_t count, cudaStream_t stream);

/** data *= factor * (*device_factor).
 *  @param device_factor  one float; NULL: 1 */
cudaError_t rbk_scale(void *data, float factor, const float *device_factor, size_t count,
                      rbk_dtype dtype, cudaStream_t stream);

/** data = value. */
cudaError_t rbk_fill(void *data, float value, size_t count, rbk_dtype dtype, cudaStream_t stream);

/** sum[m] += sum over p of partial[b,p,m] (p ascending, from 0.0) for ascending b: what makes the
 *  parameter gradients cut-invariant.
 *  @param[in,out] sum  [width] fp32
 *  @param partial      [B, parts, width] fp32 */
cudaError_t rbk_accumulate_partials(float *sum, const float *partial, size_t batch, size_t parts,
                                    size_t width, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
