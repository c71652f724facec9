/* Cross-entropy with its gradient in place of the logits, and the loss's sum. Owns
 * rbk_cross_entropy and rbk_loss_sum. Must not know: how many tokens the effective batch has.
 *
 * One block a row, twice over it: once for the maximum and the sum of exponentials (online softmax,
 * Milakov and Gimelshein, 2018), once for the gradient. The second reading comes from L2: the rows
 * in flight are a few tens of megabytes. */
#include "common.cuh"
#include "exponential.cuh"
#include "reduce.cuh"
#include "types.cuh"

/* A small vocabulary does not feed a large block. The choice depends on the width alone, so a row's
 * bits do not depend on anything else. */
constexpr int LARGE_THREADS = 1024;
constexpr int SMALL_THREADS = 128;
constexpr size_t LARGE_WIDTH = 4096;

constexpr int LOSS_SAMPLES = 32;

/* Logits of 8 columns, -inf beyond the vocabulary. */
template <typename T>
__device__ inline void load_logits(float (&x)[8], const T *row, int column, int vocabulary)
{
    load8(x, row + column);
    if (column + 8 > vocabulary) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (column + i >= vocabulary)
                x[i] = -INFINITY;
    }
}

/* The row's maximum, and the sum of exp(x - maximum); exponentials in base 2. */
template <typename T>
__device__ inline void row_softmax(float *maximum, float *sum, const T *row, int vocabulary)
{
    __shared__ float shared[WARPS_LIMIT];
    float high = -INFINITY, total[1] = {0.0f};
    for (int column = threadIdx.x * 8; column < vocabulary; column += blockDim.x * 8) {
        float x[8];
        load_logits(x, row, column, vocabulary);
        float top = high;
#pragma unroll
        for (int i = 0; i < 8; i++)
            top = fmaxf(top, x[i]);
        if (top > high) {
            total[0] *= power_of_2((high - top) * LOG2_E);
            high = top;
        }
        const float base = high > -INFINITY ? high * LOG2_E : 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++)
            total[0] += power_of_2(fmaf(x[i], LOG2_E, -base));
    }
    *maximum = block_max(high, shared);
    if (high > -INFINITY) /* else the thread had no column, or nothing but -inf */
        total[0] *= power_of_2((high - *maximum) * LOG2_E);
    block_sum(total, shared);
    *sum = total[0];
}

/* The gradient of the row in its place; `counts` is whether it has a target. */
template <typename T>
__device__ inline void write_gradient(T *row, int target, bool counts, float log_sum2, float scale,
                                      int vocabulary, int padded)
{
    for (int column = threadIdx.x * 8; column < padded; column += blockDim.x * 8) {
        float x[8] = {};
        if (counts && column < vocabulary) {
            load_logits(x, row, column, vocabulary);
#pragma unroll
            for (int i = 0; i < 8; i++)
                x[i] = power_of_2(fmaf(x[i], LOG2_E, -log_sum2));
            if (target - column >= 0 && target - column < 8) {
#pragma unroll
                for (int i = 0; i < 8; i++)
                    x[i] -= column + i == target ? 1.0f : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < 8; i++)
                x[i] *= scale;
            if (column + 8 > vocabulary) {
#pragma unroll
                for (int i = 0; i < 8; i++)
                    x[i] = column + i < vocabulary ? x[i] : 0.0f;
            }
        }
        store8(row + column, x);
    }
}

template <typename T>
__global__ void __launch_bounds__(LARGE_THREADS)
    cross_entropy_kernel(float *loss, T *logits, const int32_t *targets, size_t target_stride,
                         unsigned length, int vocabulary, int padded, float scale,
                         const float *device_scale, bool write)
{
    T *row = logits + (size_t)blockIdx.x * padded;
    const int target = targets[blockIdx.x / length * target_stride + blockIdx.x % length];
    const bool counts = target >= 0 && target < vocabulary;
    const float at_target = counts ? to_float(row[target]) : 0.0f;
    float maximum, sum;
    row_softmax(&maximum, &sum, row, vocabulary);
    const float log_sum2 = fmaf(maximum, LOG2_E, log2f(sum));
    if (threadIdx.x == 0)
        loss[blockIdx.x] = counts ? log_sum2 * LN_2 - at_target : 0.0f;
    if (write)
        write_gradient(row, target, counts, log_sum2, device_scale ? scale * *device_scale : scale,
                       vocabulary, padded);
}

/* One block. Warp w adds up sample first + w, then one thread adds the samples in order. */
__global__ void __launch_bounds__(LOSS_SAMPLES *WARP)
    loss_sum_kernel(double *sum, const float *loss, int batch, int length)
{
    __shared__ double samples[LOSS_SAMPLES];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    double total = sum[0];
    for (int first = 0; first < batch; first += LOSS_SAMPLES) {
        const int sample = first + warp;
        double x = 0.0;
        if (sample < batch) {
            const float *from = loss + (size_t)sample * length;
#pragma unroll 8
            for (int t = lane; t < length; t += WARP)
                x += (double)from[t];
        }
        x = warp_sum(x);
        if (lane == 0)
            samples[warp] = x;
        __syncthreads();
        const int here = min(LOSS_SAMPLES, batch - first);
        for (int s = 0; s < here; s++)
            total += samples[s];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        sum[0] = total;
}

extern "C" cudaError_t rbk_cross_entropy(float *loss, void *logits, const int32_t *targets,
                                         size_t target_stride, size_t batch, size_t length,
                                         size_t vocabulary, size_t padded, float scale,
                                         const float *device_scale, int write_gradient,
                                         rbk_dtype dtype, cudaStream_t stream)
{
    if (!are_arrays(logits) || !are_values(loss, targets) || !are_optional_values(device_scale) ||
        !are_sizes(INDEX_LIMIT, batch, length, vocabulary, target_stride) ||
        !are_sizes(INDEX_LIMIT, batch * length) || target_stride < length || vocabulary > padded ||
        padded % CHUNK != 0 || padded >= INDEX_LIMIT - LARGE_THREADS * CHUNK)
        return cudaErrorInvalidValue;
    const unsigned threads = padded >= LARGE_WIDTH ? LARGE_THREADS : SMALL_THREADS;
    return with_dtype(dtype, [=](auto tag) {
        using T = typename decltype(tag)::type;
        cross_entropy_kernel<T><<<(unsigned)(batch * length), threads, 0, stream>>>(
            loss, (T *)logits, targets, target_stride, (unsigned)length, (int)vocabulary,
            (int)padded, scale, device_scale, write_gradient != 0);
        return cudaGetLastError();
    });
}

extern "C" cudaError_t rbk_loss_sum(double *sum, const float *loss, size_t batch, size_t length,
                                    cudaStream_t stream)
{
    if (!are_values(sum) || !are_values(loss) ||
        !are_sizes(INDEX_LIMIT - LOSS_SAMPLES * WARP, batch, length))
        return cudaErrorInvalidValue;
    loss_sum_kernel<<<1, LOSS_SAMPLES * WARP, 0, stream>>>(sum, loss, (int)batch, (int)length);
    return cudaGetLastError();
}
