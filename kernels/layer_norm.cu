/* Layer norm forward and backward. Owns rbk_layer_norm_*. Must not know: where the rows come from.
 *
 * Forward, rows that a warp's registers hold have a warp each (layer_norm_warp.cuh). For longer
 * ones, and backward, a thread owns 8 neighbouring channels and goes through the block's rows, a
 * few at a time, so that enough loads are in flight and one barrier serves them all. */
#include <type_traits>

#include "accumulate.cuh"
#include "common.cuh"
#include "layer_norm_warp.cuh"

/* Rows at a time: what the registers hold. No sum depends on it. */
template <typename T> constexpr int rows_at_once = sizeof(T) == 4 ? 2 : 4;

constexpr int TILE_ROWS = 32;

/* Of a block: with this bound a thread may use 128 registers, and needs no more. */
constexpr int MOST_THREADS = RBK_LAYER_NORM_WIDTH_LIMIT / 8;

/* One block: rows_at_once rows of [rows, width]. */
template <typename T>
__global__ __launch_bounds__(MOST_THREADS,
                             1) void layer_norm_forward_kernel(T *out, float *mean, float *rstd,
                                                               const T *in, const T *gamma,
                                                               const T *beta, int rows, int width,
                                                               float epsilon)
{
    constexpr int ROWS = rows_at_once<T>;
    __shared__ float sums[ROWS * WARPS_LIMIT];
    const int column = threadIdx.x * 8;
    const bool inside = column < width;
    const int first = blockIdx.x * ROWS;
    const float inverse = 1.0f / (float)width;
    raw8<T> raw[ROWS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (inside && first + r < rows)
            raw[r] = load_raw8(in + (size_t)(first + r) * width + column);
    float x[8], means[ROWS], squares[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        unpack8<T>(x, raw[r]);
        means[r] = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++)
            means[r] += x[i];
    }
    block_sum(means, sums);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        means[r] *= inverse;
        unpack8<T>(x, raw[r]);
        squares[r] = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++)
            squares[r] = inside ? fmaf(x[i] - means[r], x[i] - means[r], squares[r]) : 0.0f;
    }
    block_sum(squares, sums);
    float g[8] = {}, b[8] = {};
    if (inside) {
        load8(g, gamma + column);
        load8(b, beta + column);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (first + r >= rows)
            return;
        const float scale = 1.0f / sqrtf(fmaf(squares[r], inverse, epsilon));
        unpack8<T>(x, raw[r]);
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = fmaf((x[i] - means[r]) * scale, g[i], b[i]);
        if (inside)
            store8(out + (size_t)(first + r) * width + column, x);
        if (mean && threadIdx.x == 0) {
            mean[first + r] = means[r];
            rstd[first + r] = scale;
        }
    }
}

/* One block: a tile of TILE_ROWS positions of one sample. Writes din, and the tile's sums of
 * dout * x and of dout to gamma_partial and beta_partial [B, tiles, C]. Grid: tiles, samples. */
template <typename T>
__global__ __launch_bounds__(MOST_THREADS, 1) void layer_norm_backward_kernel(
    T *din, float *gamma_partial, float *beta_partial, const T *dout, const T *residual_grad,
    const T *in, const float *mean, const float *rstd, const T *gamma, int length, int width)
{
    constexpr int ROWS = rows_at_once<T>;
    __shared__ float shared[2 * ROWS * WARPS_LIMIT];
    const int column = threadIdx.x * 8;
    const bool inside = column < width;
    const int end = min(((int)blockIdx.x + 1) * TILE_ROWS, length);
    const size_t sample_row = (size_t)blockIdx.y * length;
    const float inverse = 1.0f / (float)width;
    float g[8] = {}, gamma_sum[8] = {}, beta_sum[8] = {};
    if (inside)
        load8(g, gamma + column);

    for (int first = blockIdx.x * TILE_ROWS; first < end; first += ROWS) {
        raw8<T> raw_in[ROWS] = {}, raw_dout[ROWS] = {}, raw_residual[ROWS] = {};
        float row_mean[ROWS] = {}, row_rstd[ROWS] = {};
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (first + r >= end)
                continue;
            const size_t row = sample_row + first + r;
            row_mean[r] = mean[row];
            row_rstd[r] = rstd[row];
            if (!inside)
                continue;
            raw_in[r] = load_raw8(in + row * width + column);
            raw_dout[r] = load_raw8(dout + row * width + column);
            if (residual_grad)
                raw_residual[r] = load_raw8(residual_grad + row * width + column);
        }
        float sums[2 * ROWS]; /* of g = dout * gamma, and of g * x */
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float x[8], d[8];
            unpack8<T>(x, raw_in[r]);
            unpack8<T>(d, raw_dout[r]);
            sums[2 * r] = sums[2 * r + 1] = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                x[i] = (x[i] - row_mean[r]) * row_rstd[r];
                gamma_sum[i] = fmaf(d[i], x[i], gamma_sum[i]);
                beta_sum[i] += d[i];
                sums[2 * r] = fmaf(d[i], g[i], sums[2 * r]);
                sums[2 * r + 1] = fmaf(d[i] * g[i], x[i], sums[2 * r + 1]);
            }
        }
        block_sum(sums, shared);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (!inside || first + r >= end)
                continue;
            float x[8], d[8], residual[8];
            unpack8<T>(x, raw_in[r]);
            unpack8<T>(d, raw_dout[r]);
            unpack8<T>(residual, raw_residual[r]);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                x[i] = (x[i] - row_mean[r]) * row_rstd[r];
                const float centred = d[i] * g[i] - sums[2 * r] * inverse;
                d[i] =
                    fmaf(row_rstd[r], fmaf(-x[i], sums[2 * r + 1] * inverse, centred), residual[i]);
            }
            store8(din + (sample_row + first + r) * width + column, d);
        }
    }
    if (!inside)
        return;
    const size_t at = ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * width + column;
    store8(gamma_partial + at, gamma_sum);
    store8(beta_partial + at, beta_sum);
}

/* Whole warps that cover the width. */
static unsigned threads_for(size_t width)
{
    return (unsigned)(ceil_div(width, 8 * WARP) * WARP);
}

/* Call `launch` with the chunks a lane as a compile-time number, when a warp holds a row of this
 * width; whether it does depends on width and dtype alone. */
template <typename T, int CHUNKS = 1, typename Launch>
static bool with_chunks(size_t width, Launch launch)
{
    if (width <= (size_t)CHUNKS * WARP_CHANNELS) {
        launch(std::integral_constant<int, CHUNKS>{});
        return true;
    }
    if constexpr (CHUNKS < most_chunks<T>)
        return with_chunks<T, CHUNKS + 1>(width, launch);
    return false;
}

/* Floats of one of the two arrays of partial sums. */
static size_t partial_count(size_t batch, size_t length, size_t width)
{
    return batch * ceil_div(length, TILE_ROWS) * width;
}

extern "C" cudaError_t rbk_layer_norm_forward(void *out, float *mean, float *rstd, const void *in,
                                              const void *gamma, const void *beta, size_t rows,
                                              size_t width, float epsilon, rbk_dtype dtype,
                                              cudaStream_t stream)
{
    if (!are_arrays(out, in, gamma, beta) || !are_optional_values(mean, rstd) ||
        (mean == nullptr) != (rstd == nullptr) || !is_matrix(rows, width) ||
        width > RBK_LAYER_NORM_WIDTH_LIMIT || !(epsilon >= 0.0f))
        return cudaErrorInvalidValue;
    return with_dtype(dtype, [=](auto tag) {
        using T = typename decltype(tag)::type;
        const bool is_warp = with_chunks<T>(width, [=](auto chunks) {
            layer_norm_forward_warp_kernel<T, decltype(chunks)::value>
                <<<(unsigned)ceil_div(rows, FORWARD_WARPS), FORWARD_WARPS * WARP, 0, stream>>>(
                    (T *)out, mean, rstd, (const T *)in, (const T *)gamma, (const T *)beta,
                    (int)rows, (int)width, epsilon);
        });
        if (!is_warp)
            layer_norm_forward_kernel<T>
                <<<(unsigned)ceil_div(rows, rows_at_once<T>), threads_for(width), 0, stream>>>(
                    (T *)out, mean, rstd, (const T *)in, (const T *)gamma, (const T *)beta,
                    (int)rows, (int)width, epsilon);
        return cudaGetLastError();
    });
}

extern "C" size_t rbk_layer_norm_backward_scratch_bytes(size_t batch, size_t length, size_t width)
{
    return 2 * partial_count(batch, length, width) * sizeof(float);
}

extern "C" cudaError_t rbk_layer_norm_backward(void *din, float *gamma_grad, float *beta_grad,
                                               const void *dout, const void *residual_grad,
                                               const void *in, const float *mean, const float *rstd,
                                               const void *gamma, void *scratch,
                                               size_t scratch_bytes, size_t batch, size_t length,
                                               size_t width, rbk_dtype dtype, cudaStream_t stream)
{
    if (!are_arrays(din, gamma_grad, beta_grad, dout, in, gamma, scratch) ||
        !are_values(mean, rstd) || !are_optional_arrays(residual_grad) ||
        !is_batch(batch, length, width) || width > RBK_LAYER_NORM_WIDTH_LIMIT ||
        scratch_bytes < rbk_layer_norm_backward_scratch_bytes(batch, length, width))
        return cudaErrorInvalidValue;
    const size_t tiles = ceil_div(length, TILE_ROWS);
    float *gamma_partial = (float *)scratch;
    float *beta_partial = gamma_partial + partial_count(batch, length, width);
    cudaError_t status = with_dtype(dtype, [=](auto tag) {
        using T = typename decltype(tag)::type;
        const dim3 grid((unsigned)tiles, (unsigned)batch);
        layer_norm_backward_kernel<T><<<grid, threads_for(width), 0, stream>>>(
            (T *)din, gamma_partial, beta_partial, (const T *)dout, (const T *)residual_grad,
            (const T *)in, mean, rstd, (const T *)gamma, (int)length, (int)width);
        return cudaGetLastError();
    });
    if (status == cudaSuccess)
        status = accumulate_both(gamma_grad, beta_grad, gamma_partial, beta_partial, batch, tiles,
                                 width, stream);
    return status;
}
