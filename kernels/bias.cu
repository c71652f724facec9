/* Bias: add it to every row, and its gradient. Owns rbk_bias_add and rbk_bias_backward*.
 * Must not know: what the rows are. */
#include "common.cuh"
#include "types.cuh"

/* The gradient's tile: TILE_ROWS positions of one sample by 32 * 8 channels; thread (x, y) adds the
 * positions y, y + TILE_CHAINS, ... of 8 channels. */
constexpr int TILE_ROWS = 64;
constexpr int TILE_CHAINS = 8;
constexpr int TILE_LANES = 32;

/* out[r,c] = in[r,c] + bias[c]; width8 = width / 8 */
template <typename T>
__global__ void bias_add_kernel(T *out, const T *in, const T *bias, size_t count, unsigned width8)
{
    const chunk c = thread_chunk(count);
    if (c.size == 0)
        return;
    float x[8], b[8];
    load8(x, in + c.first);
    load8(b, bias + (size_t)((unsigned)(c.first / 8) % width8) * 8);
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] += b[i];
    store8(out + c.first, x);
}

/* partial[b,tile,c] = sum over the tile's positions of dout[b,t,c].
 * Grid: channels in steps of 256, tiles, samples. */
template <typename T>
__global__ void bias_partial_kernel(float *partial, const T *dout, int length, int width)
{
    __shared__ float sums[TILE_CHAINS][TILE_LANES * 8 + 4];
    const int column = (blockIdx.x * TILE_LANES + threadIdx.x) * 8;
    const int tile = blockIdx.y;
    const size_t sample = blockIdx.z;
    const int end = min((tile + 1) * TILE_ROWS, length);
    float sum[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    if (column < width) {
        const T *from = dout + sample * length * width + column;
#pragma unroll 4
        for (int t = tile * TILE_ROWS + threadIdx.y; t < end; t += TILE_CHAINS) {
            float d[8];
            load8(d, from + (size_t)t * width);
#pragma unroll
            for (int i = 0; i < 8; i++)
                sum[i] += d[i];
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        sums[threadIdx.y][i * TILE_LANES + threadIdx.x] = sum[i];
    __syncthreads();
    if (column >= width)
        return;
    /* thread (x, y) adds the chains of channel 8x + y */
    const int at = threadIdx.y * TILE_LANES + threadIdx.x;
    float total = sums[0][at];
#pragma unroll
    for (int chain = 1; chain < TILE_CHAINS; chain++)
        total += sums[chain][at];
    partial[(sample * gridDim.y + tile) * width + column + threadIdx.y] = total;
}

static_assert(TILE_CHAINS == 8, "thread (x, y) finishes channel 8x + y");

extern "C" cudaError_t rbk_bias_add(void *out, const void *in, const void *bias, size_t rows,
                                    size_t width, rbk_dtype dtype, cudaStream_t stream)
{
    if (!are_arrays(out, in, bias) || !is_matrix(rows, width))
        return cudaErrorInvalidValue;
    const size_t count = rows * width;
    return with_dtype(dtype, [=](auto tag) {
        using T = typename decltype(tag)::type;
        bias_add_kernel<T><<<chunk_blocks(count), CHUNK_THREADS, 0, stream>>>(
            (T *)out, (const T *)in, (const T *)bias, count, (unsigned)(width / 8));
        return cudaGetLastError();
    });
}

extern "C" size_t rbk_bias_backward_scratch_bytes(size_t batch, size_t length, size_t width)
{
    return batch * ceil_div(length, TILE_ROWS) * width * sizeof(float);
}

extern "C" cudaError_t rbk_bias_backward(float *bias_grad, const void *dout, void *scratch,
                                         size_t scratch_bytes, size_t batch, size_t length,
                                         size_t width, rbk_dtype dtype, cudaStream_t stream)
{
    const size_t tiles = ceil_div(length, TILE_ROWS);
    if (!are_arrays(bias_grad, dout, scratch) || !is_batch(batch, length, width) ||
        tiles > GRID_YZ_LIMIT ||
        scratch_bytes < rbk_bias_backward_scratch_bytes(batch, length, width))
        return cudaErrorInvalidValue;
    const dim3 grid((unsigned)ceil_div(width, TILE_LANES * 8), (unsigned)tiles, (unsigned)batch);
    const cudaError_t status = with_dtype(dtype, [=](auto tag) {
        using T = typename decltype(tag)::type;
        bias_partial_kernel<T><<<grid, dim3(TILE_LANES, TILE_CHAINS), 0, stream>>>(
            (float *)scratch, (const T *)dout, (int)length, (int)width);
        return cudaGetLastError();
    });
    if (status != cudaSuccess)
        return status;
    return rbk_accumulate_partials(bias_grad, (const float *)scratch, batch, tiles, width, stream);
}
