/* Causal attention forward. Owns rbk_attention_forward. Must not know: other samples or heads.
 *
 * One block a sample, head and tile of queries; keys and values pass by in tiles, two of each in
 * shared memory, the next on its way while one is used. The tiles with most keys start first. */
#include "attention_launch.cuh"
#include "attention_plain.cuh"
#include "attention_sm90.cuh"
#include "attention_softmax.cuh"
#include "attention_tile.cuh"

constexpr int MMA_KEYS = 64;

/* out [B,T,H,D] and log_sum [B,H,T] from qkv [B,T,3,H,D]; scale2 = scale * log2(e).
 * Grid: tiles of queries, heads, samples. */
template <typename T, int D>
__global__ void __launch_bounds__(MMA_THREADS, 2)
    attention_forward_mma_kernel(T *out, float *log_sum, const T *qkv, int length, float scale2)
{
    constexpr int M = mma_shape<D>::BLOCKS, OWN = mma_shape<D>::OWN;
    constexpr int key_bytes = MMA_KEYS * tile_row_bytes<D>;
    extern __shared__ __align__(128) unsigned char shared[];
    const shared_address queries = shared_address_of(shared);
    const shared_address keys = queries + OWN * tile_row_bytes<D>;
    const shared_address values = keys + 2 * key_bytes;

    const int heads = gridDim.y;
    const size_t stride = (size_t)3 * heads * D;
    const T *q = qkv + (size_t)blockIdx.z * length * stride + (size_t)blockIdx.y * D;
    const T *k = q + (size_t)heads * D;
    const T *v = k + (size_t)heads * D;
    const int first = (int)(gridDim.x - 1 - blockIdx.x) * OWN;
    const int last = min(first + OWN, length) - 1;
    const int warp_row = threadIdx.x / 32 * 16 * M;
    const int warp_last = first + warp_row + 16 * M - 1;

    tile_load<T, D, OWN>(queries, q, stride, first, length);
    tile_load<T, D, MMA_KEYS>(keys, k, stride, 0, length);
    tile_load<T, D, MMA_KEYS>(values, v, stride, 0, length);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();

    unsigned operand[M][D / 16][4];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int d = 0; d < D / 16; d++)
            load_matrix_x4(operand[m][d], block_address<D>(queries, warp_row + m * 16, d * 2));

    float acc[M][D / 8][4] = {};
    softmax_state<M> state;
#pragma unroll
    for (int m = 0; m < M; m++) {
        state.high[m][0] = state.high[m][1] = -INFINITY;
        state.sum[m][0] = state.sum[m][1] = 0.0f;
    }
    for (int key = 0, now = 0; key <= last; key += MMA_KEYS, now ^= 1) {
        if (key + MMA_KEYS <= last) {
            const int next = (now ^ 1) * key_bytes;
            tile_load<T, D, MMA_KEYS>(keys + next, k, stride, key + MMA_KEYS, length);
            tile_load<T, D, MMA_KEYS>(values + next, v, stride, key + MMA_KEYS, length);
        }
        copy_async_commit();
        if (key <= warp_last) {
            float s[M][MMA_KEYS / 8][4] = {};
            multiply_transposed<T, D, M, MMA_KEYS / 8>(s, operand, keys + now * key_bytes, 0);
            if (key + MMA_KEYS - 1 > first + warp_row)
                mask_later_keys<M, MMA_KEYS / 8, false>(s, first + warp_row, key);
            softmax_step<D, M, MMA_KEYS / 8>(s, acc, state, scale2);
            unsigned p[M][MMA_KEYS / 16][4];
            round_to_operand<T, M, MMA_KEYS / 8>(p, s);
            multiply_rows<T, D, M, MMA_KEYS / 16>(acc, p, values + now * key_bytes, 0);
        }
        copy_async_wait<0>();
        __syncthreads();
    }

    float factor[M][2];
    finish_softmax<M>(factor, log_sum + ((size_t)blockIdx.z * heads + blockIdx.y) * length, state,
                      scale2, first + warp_row, length);
    T *to = out + ((size_t)blockIdx.z * length * heads + blockIdx.y) * D;
    store_rows<T, D, M>(to, (size_t)heads * D, acc, factor, shared, warp_row, first, length);
}

/* softmax_step() for the plain units; `key` and `query` are the first of this thread's column and
 * rows. */
template <int D>
__device__ __forceinline__ void
plain_softmax_step(float (&s)[PLAIN_EACH][plain_rows<D> / PLAIN_SIDE],
                   float (&acc)[PLAIN_EACH][plain_channels<D>::COUNT], float (&high)[PLAIN_EACH],
                   float (&sum)[PLAIN_EACH], int key, int query, float scale2)
{
    constexpr int columns = plain_rows<D> / PLAIN_SIDE;
#pragma unroll
    for (int r = 0; r < PLAIN_EACH; r++) {
        float top = high[r];
#pragma unroll
        for (int c = 0; c < columns; c++) {
            if (key + c * PLAIN_SIDE > query + r)
                s[r][c] = -INFINITY;
            top = fmaxf(top, s[r][c]);
        }
        top = plain_row_max(top);
        const float shrink = power_of_2((high[r] - top) * scale2);
        high[r] = top;
        sum[r] *= shrink;
#pragma unroll
        for (int c = 0; c < columns; c++) {
            s[r][c] = power_of_2((s[r][c] - top) * scale2);
            sum[r] += s[r][c];
        }
#pragma unroll
        for (int i = 0; i < plain_channels<D>::COUNT; i++)
            acc[r][i] *= shrink;
    }
}

/* The same in fp32 on the plain units. */
template <int D>
__global__ void __launch_bounds__(PLAIN_THREADS, 1)
    attention_forward_plain_kernel(float *out, float *log_sum, const float *qkv, int length,
                                   float scale2)
{
    constexpr int ROWS = plain_rows<D>;
    extern __shared__ __align__(128) unsigned char shared[];
    float *const queries = reinterpret_cast<float *>(shared);
    float *const keys = queries + PLAIN_OWN * plain_stride<D>;
    float *const values = keys + ROWS * plain_stride<D>;
    float *const weights = values + ROWS * plain_stride<D>;

    const int heads = gridDim.y;
    const size_t stride = (size_t)3 * heads * D;
    const float *q = qkv + (size_t)blockIdx.z * length * stride + (size_t)blockIdx.y * D;
    const float *k = q + (size_t)heads * D;
    const float *v = k + (size_t)heads * D;
    const int first = (int)(gridDim.x - 1 - blockIdx.x) * PLAIN_OWN;
    const int last = min(first + PLAIN_OWN, length) - 1;
    const int x = threadIdx.x % PLAIN_SIDE;
    const int own = first + (int)threadIdx.x / PLAIN_SIDE * PLAIN_EACH;

    plain_load<D, PLAIN_OWN>(queries, q, stride, first, length);
    float acc[PLAIN_EACH][plain_channels<D>::COUNT] = {};
    float high[PLAIN_EACH], sum[PLAIN_EACH];
#pragma unroll
    for (int r = 0; r < PLAIN_EACH; r++) {
        high[r] = -INFINITY;
        sum[r] = 0.0f;
    }
    for (int key = 0; key <= last; key += ROWS) {
        __syncthreads();
        plain_load<D, ROWS>(keys, k, stride, key, length);
        plain_load<D, ROWS>(values, v, stride, key, length);
        __syncthreads();
        float s[PLAIN_EACH][ROWS / PLAIN_SIDE];
        plain_dot<D>(s, queries, keys);
        plain_softmax_step<D>(s, acc, high, sum, key + x, own, scale2);
        plain_put_weights<D>(weights, s);
        plain_accumulate<D>(acc, weights, values);
    }

    float factor[PLAIN_EACH];
#pragma unroll
    for (int r = 0; r < PLAIN_EACH; r++) {
        sum[r] = plain_row_sum(sum[r]);
        factor[r] = 1.0f / sum[r];
        if (x == 0 && own + r < length)
            log_sum[((size_t)blockIdx.z * heads + blockIdx.y) * length + own + r] =
                fmaf(high[r], scale2, log2f(sum[r])) * LN_2;
    }
    plain_store<D>(out + ((size_t)blockIdx.z * length * heads + blockIdx.y) * D, (size_t)heads * D,
                   acc, factor, first, length);
}

template <typename T, int D>
static cudaError_t launch_forward(T *out, float *log_sum, const T *qkv, size_t batch, size_t length,
                                  size_t heads, float scale2, cudaStream_t stream)
{
    cudaError_t status;
    if constexpr (std::is_same<T, float>::value) {
        const dim3 grid((unsigned)ceil_div(length, PLAIN_OWN), (unsigned)heads, (unsigned)batch);
        const size_t bytes = plain_shared_floats<D>(1) * sizeof(float);
        status = allow_shared(attention_forward_plain_kernel<D>, bytes);
        if (status != cudaSuccess)
            return status;
        attention_forward_plain_kernel<D>
            <<<grid, PLAIN_THREADS, bytes, stream>>>(out, log_sum, qkv, (int)length, scale2);
    } else {
        constexpr int own = mma_shape<D>::OWN;
        const dim3 grid((unsigned)ceil_div(length, own), (unsigned)heads, (unsigned)batch);
        const size_t bytes = (own + 4 * MMA_KEYS) * D * sizeof(T);
        status = allow_shared(attention_forward_mma_kernel<T, D>, bytes);
        if (status != cudaSuccess)
            return status;
        attention_forward_mma_kernel<T, D>
            <<<grid, MMA_THREADS, bytes, stream>>>(out, log_sum, qkv, (int)length, scale2);
    }
    return cudaGetLastError();
}

extern "C" cudaError_t rbk_attention_forward(void *out, float *log_sum, const void *qkv,
                                             size_t batch, size_t length, size_t heads,
                                             size_t head_width, float scale, rbk_dtype dtype,
                                             cudaStream_t stream)
{
    if (!are_arrays(out, qkv) || !are_values(log_sum) || !is_attention(batch, length, heads, scale))
        return cudaErrorInvalidValue;
    return with_dtype(dtype, [=](auto tag) {
        using T = typename decltype(tag)::type;
        return with_head_width(head_width, [=](auto width) {
            constexpr int D = decltype(width)::value;
            bool is_sm90 = false;
            if (D == HEAD && dtype != RBK_F32) {
                const cudaError_t status = has_sm90(&is_sm90);
                if (status != cudaSuccess)
                    return status;
            }
            return is_sm90 ? attention_forward_sm90(
                                 {out, log_sum, qkv, batch, length, heads, scale * LOG2_E, stream},
                                 dtype)
                           : launch_forward<T, D>((T *)out, log_sum, (const T *)qkv, batch, length,
                                                  heads, scale * LOG2_E, stream);
        });
    });
}
