/* Causal attention backward. Owns rbk_attention_backward*. Must not know: other samples or heads.
 *
 * With p = exp(scale * <q, k> - log_sum), dp = <dout, v> and delta = <dout, out> of the query:
 * ds = p * (dp - delta), dv = sum of p dout, dk = scale * sum of ds q, dq = scale * sum of ds k.
 * A block of the first kernel owns keys and goes through the queries, one of the second owns
 * queries and goes through the keys. Both compute the products with the own rows as rows, so that p
 * and ds come out of the accumulators in the layout of the next product's operand and never pass
 * through memory. */
#include "attention_launch.cuh"
#include "attention_plain.cuh"
#include "attention_sm90.cuh"
#include "attention_tile.cuh"

/* Rows of a tile that passes by, and how many of them are handled at once: what keeps two blocks on
 * a multiprocessor and the accumulators in registers. */
template <int D> constexpr int passing_rows = D == 128 ? 32 : 64;
constexpr int STEP = 32;

/* delta [B,H,T] = sum over d of dout * out [B,T,H,D]; D / 8 lanes a row. */
template <typename T, int D>
__global__ void attention_delta_kernel(float *delta, const T *dout, const T *out, int length,
                                       int heads, size_t rows)
{
    constexpr int lanes = D / 8;
    const size_t thread = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    const size_t row = thread / lanes;
    float sum = 0.0f;
    if (row < rows) {
        float a[8], b[8];
        load8(a, dout + thread * 8);
        load8(b, out + thread * 8);
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum = fmaf(a[i], b[i], sum);
    }
#pragma unroll
    for (int distance = lanes / 2; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (row < rows && thread % lanes == 0) {
        const size_t head = row % heads, position = row / heads;
        delta[((position / length) * heads + head) * length + position % length] = sum;
    }
}

/* Everything that a block of either kernel needs to find its rows. */
template <typename T, int D> struct head_view {
    const T *q, *k, *v, *dout;
    T *dq, *dk, *dv;
    const float *log_sum, *delta;
    size_t stride; /* of q, k, v and their gradients */
    size_t dout_stride;

    __device__ head_view(T *dqkv, const T *dout_all, const T *qkv, const float *log_sum_all,
                         const float *delta_all, int length)
    {
        const int heads = gridDim.y;
        const size_t part = (size_t)heads * D;
        stride = 3 * part;
        dout_stride = part;
        const size_t at = (size_t)blockIdx.z * length * stride + (size_t)blockIdx.y * D;
        q = qkv + at;
        k = q + part;
        v = k + part;
        dq = dqkv + at;
        dk = dq + part;
        dv = dk + part;
        dout = dout_all + (size_t)blockIdx.z * length * dout_stride + (size_t)blockIdx.y * D;
        const size_t row = ((size_t)blockIdx.z * heads + blockIdx.y) * length;
        log_sum = log_sum_all + row;
        delta = delta_all + row;
    }
};

/* Start copying a tile of queries, their output gradients, log_sum and delta. Queries past the end
 * get zeros everywhere: p = 1, but dout = 0 and ds = 0, so they add nothing. */
template <typename T, int D>
__device__ inline void load_queries(shared_address queries, shared_address douts,
                                    shared_address statistics, const head_view<T, D> &view,
                                    int first, int length)
{
    constexpr int rows = passing_rows<D>;
    tile_load<T, D, rows>(queries, view.q, view.stride, first, length);
    tile_load<T, D, rows>(douts, view.dout, view.dout_stride, first, length);
    const int row = threadIdx.x;
    if (row < rows) {
        const bool inside = first + row < length;
        const int at = inside ? first + row : 0;
        copy_async_4(statistics + row * 4, view.log_sum + at, inside);
        copy_async_4(statistics + (rows + row) * 4, view.delta + at, inside);
    }
}

/* What STEP queries of a tile add to the dk and dv of the warp's keys. `key` and `query` are where
 * the warp's keys and these queries begin in the sequence, `key_row` and `query_row` where in their
 * tiles; `statistics` holds log_sum and delta of the tile. */
template <typename T, int D, int M>
__device__ __forceinline__ void
add_queries(float (&dk)[M][D / 8][4], float (&dv)[M][D / 8][4], shared_address keys,
            shared_address values, int key_row, int key, shared_address queries,
            shared_address douts, int query_row, int query, const float *statistics, float scale2)
{
    constexpr int N = STEP / 8;
    float p[M][N][4] = {}, ds[M][N][4] = {};
    multiply_transposed<T, D, M, N>(p, keys, key_row, queries, query_row);
    multiply_transposed<T, D, M, N>(ds, values, key_row, douts, query_row);
    if (query < key + 16 * M - 1)
        mask_later_keys<M, N, true>(p, key, query);
    const float *const row = statistics + query_row + (threadIdx.x & 3) * 2;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const float2 log_sums = *reinterpret_cast<const float2 *>(row + n * 8);
        const float2 deltas = *reinterpret_cast<const float2 *>(row + passing_rows<D> + n * 8);
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float base = ((e & 1) ? log_sums.y : log_sums.x) * LOG2_E;
                p[m][n][e] = power_of_2(fmaf(p[m][n][e], scale2, -base));
                ds[m][n][e] = p[m][n][e] * (ds[m][n][e] - ((e & 1) ? deltas.y : deltas.x));
            }
        }
    }
    unsigned operand[M][N / 2][4];
    round_to_operand<T, M, N>(operand, p);
    multiply_rows<T, D, M, N / 2>(dv, operand, douts, query_row);
    round_to_operand<T, M, N>(operand, ds);
    multiply_rows<T, D, M, N / 2>(dk, operand, queries, query_row);
}

/* dk and dv of a tile of keys. Grid: tiles of keys, heads, samples. */
template <typename T, int D>
__global__ void __launch_bounds__(MMA_THREADS, 2)
    attention_backward_keys_mma_kernel(T *dqkv, const T *dout, const T *qkv, const float *log_sum,
                                       const float *delta, int length, float scale)
{
    constexpr int M = mma_shape<D>::BLOCKS, OWN = mma_shape<D>::OWN;
    constexpr int ROWS = passing_rows<D>;
    constexpr int own_bytes = OWN * tile_row_bytes<D>, row_bytes = ROWS * tile_row_bytes<D>;
    constexpr int statistics_bytes = 2 * ROWS * 4;
    constexpr int statistics_offset = 2 * own_bytes + 4 * row_bytes;
    extern __shared__ __align__(128) unsigned char shared[];
    const shared_address keys = shared_address_of(shared);
    const shared_address values = keys + own_bytes;
    const shared_address queries = values + own_bytes;
    const shared_address douts = queries + 2 * row_bytes;
    const shared_address statistics = douts + 2 * row_bytes;

    const head_view<T, D> view(dqkv, dout, qkv, log_sum, delta, length);
    const int first = blockIdx.x * OWN;
    const int warp_row = threadIdx.x / 32 * 16 * M;
    const float scale2 = scale * LOG2_E;

    tile_load<T, D, OWN>(keys, view.k, view.stride, first, length);
    tile_load<T, D, OWN>(values, view.v, view.stride, first, length);
    load_queries(queries, douts, statistics, view, first, length);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();

    float dk[M][D / 8][4] = {}, dv[M][D / 8][4] = {};
    for (int query = first, now = 0; query < length; query += ROWS, now ^= 1) {
        if (query + ROWS < length) {
            const int next = now ^ 1;
            load_queries(queries + next * row_bytes, douts + next * row_bytes,
                         statistics + next * statistics_bytes, view, query + ROWS, length);
        }
        copy_async_commit();
#pragma unroll 1
        for (int step = 0; step < ROWS; step += STEP) {
            if (query + step + STEP - 1 < first + warp_row)
                continue; /* before all of the warp's keys */
            add_queries<T, D, M>(dk, dv, keys, values, warp_row, first + warp_row,
                                 queries + now * row_bytes, douts + now * row_bytes, step,
                                 query + step,
                                 reinterpret_cast<const float *>(shared + statistics_offset +
                                                                 now * statistics_bytes),
                                 scale2);
        }
        copy_async_wait<0>();
        __syncthreads();
    }

    float one[M][2], scales[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) {
        one[m][0] = one[m][1] = 1.0f;
        scales[m][0] = scales[m][1] = scale;
    }
    store_rows<T, D, M>(view.dk, view.stride, dk, scales, shared, warp_row, first, length);
    store_rows<T, D, M>(view.dv, view.stride, dv, one, shared + own_bytes, warp_row, first, length);
}

/* What STEP keys of a tile add to the dq of the warp's queries; the arguments are as in
 * add_queries(). `base` is log_sum * log2(e), for the rows lane / 4 and lane / 4 + 8 of each 16. */
template <typename T, int D, int M>
__device__ __forceinline__ void
add_keys(float (&dq)[M][D / 8][4], const float (&base)[M][2], const float (&delta)[M][2],
         shared_address queries, shared_address douts, int query_row, int query,
         shared_address keys, shared_address values, int key_row, int key, float scale2)
{
    constexpr int N = STEP / 8;
    float s[M][N][4] = {}, ds[M][N][4] = {};
    multiply_transposed<T, D, M, N>(s, queries, query_row, keys, key_row);
    multiply_transposed<T, D, M, N>(ds, douts, query_row, values, key_row);
    if (key + STEP - 1 > query)
        mask_later_keys<M, N, false>(s, query, key);
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float p = power_of_2(fmaf(s[m][n][e], scale2, -base[m][e / 2]));
                ds[m][n][e] = p * (ds[m][n][e] - delta[m][e / 2]);
            }
        }
    }
    unsigned operand[M][N / 2][4];
    round_to_operand<T, M, N>(operand, ds);
    multiply_rows<T, D, M, N / 2>(dq, operand, keys, key_row);
}

/* dq of a tile of queries. Grid: tiles of queries, most keys first; heads; samples. */
template <typename T, int D>
__global__ void __launch_bounds__(MMA_THREADS, 2)
    attention_backward_queries_mma_kernel(T *dqkv, const T *dout, const T *qkv,
                                          const float *log_sum, const float *delta, int length,
                                          float scale)
{
    constexpr int M = mma_shape<D>::BLOCKS, OWN = mma_shape<D>::OWN;
    constexpr int ROWS = passing_rows<D>;
    constexpr int own_bytes = OWN * tile_row_bytes<D>, row_bytes = ROWS * tile_row_bytes<D>;
    extern __shared__ __align__(128) unsigned char shared[];
    const shared_address queries = shared_address_of(shared);
    const shared_address douts = queries + own_bytes;
    const shared_address keys = douts + own_bytes;
    const shared_address values = keys + 2 * row_bytes;

    const head_view<T, D> view(dqkv, dout, qkv, log_sum, delta, length);
    const int first = (int)(gridDim.x - 1 - blockIdx.x) * OWN;
    const int last = min(first + OWN, length) - 1;
    const int lane = threadIdx.x & 31;
    const int warp_row = threadIdx.x / 32 * 16 * M;
    const int warp_query = first + warp_row;
    const float scale2 = scale * LOG2_E;

    tile_load<T, D, OWN>(queries, view.q, view.stride, first, length);
    tile_load<T, D, OWN>(douts, view.dout, view.dout_stride, first, length);
    tile_load<T, D, ROWS>(keys, view.k, view.stride, 0, length);
    tile_load<T, D, ROWS>(values, view.v, view.stride, 0, length);
    copy_async_commit();

    float base[M][2], row_delta[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int query = warp_query + m * 16 + lane / 4 + half * 8;
            base[m][half] = query < length ? view.log_sum[query] * LOG2_E : 0.0f;
            row_delta[m][half] = query < length ? view.delta[query] : 0.0f;
        }
    }
    copy_async_wait<0>();
    __syncthreads();

    float dq[M][D / 8][4] = {};
    for (int key = 0, now = 0; key <= last; key += ROWS, now ^= 1) {
        if (key + ROWS <= last) {
            const int next = (now ^ 1) * row_bytes;
            tile_load<T, D, ROWS>(keys + next, view.k, view.stride, key + ROWS, length);
            tile_load<T, D, ROWS>(values + next, view.v, view.stride, key + ROWS, length);
        }
        copy_async_commit();
#pragma unroll 1
        for (int step = 0; step < ROWS; step += STEP) {
            if (key + step > warp_query + 16 * M - 1)
                break; /* after all of the warp's queries */
            add_keys<T, D, M>(dq, base, row_delta, queries, douts, warp_row, warp_query,
                              keys + now * row_bytes, values + now * row_bytes, step, key + step,
                              scale2);
        }
        copy_async_wait<0>();
        __syncthreads();
    }

    float scales[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
        scales[m][0] = scales[m][1] = scale;
    store_rows<T, D, M>(view.dq, view.stride, dq, scales, shared, warp_row, first, length);
}

/* dk and dv of a tile of keys, fp32 on the plain units. */
template <int D>
__global__ void __launch_bounds__(PLAIN_THREADS, 1)
    attention_backward_keys_plain_kernel(float *dqkv, const float *dout, const float *qkv,
                                         const float *log_sum, const float *delta, int length,
                                         float scale)
{
    constexpr int ROWS = plain_rows<D>, COLUMNS = ROWS / PLAIN_SIDE;
    extern __shared__ __align__(128) unsigned char shared[];
    float *const keys = reinterpret_cast<float *>(shared);
    float *const values = keys + PLAIN_OWN * plain_stride<D>;
    float *const queries = values + PLAIN_OWN * plain_stride<D>;
    float *const douts = queries + ROWS * plain_stride<D>;
    float *const weights = douts + ROWS * plain_stride<D>;

    const head_view<float, D> view(dqkv, dout, qkv, log_sum, delta, length);
    const int first = blockIdx.x * PLAIN_OWN;
    const int x = threadIdx.x % PLAIN_SIDE;
    const int own = first + (int)threadIdx.x / PLAIN_SIDE * PLAIN_EACH;

    plain_load<D, PLAIN_OWN>(keys, view.k, view.stride, first, length);
    plain_load<D, PLAIN_OWN>(values, view.v, view.stride, first, length);
    float dk[PLAIN_EACH][plain_channels<D>::COUNT] = {};
    float dv[PLAIN_EACH][plain_channels<D>::COUNT] = {};
    for (int query = first; query < length; query += ROWS) {
        __syncthreads();
        plain_load<D, ROWS>(queries, view.q, view.stride, query, length);
        plain_load<D, ROWS>(douts, view.dout, view.dout_stride, query, length);
        __syncthreads();
        float p[PLAIN_EACH][COLUMNS], ds[PLAIN_EACH][COLUMNS];
        plain_dot<D>(p, keys, queries);
        plain_dot<D>(ds, values, douts);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const int at = query + x + c * PLAIN_SIDE;
            const float log_sum_here = at < length ? view.log_sum[at] : 0.0f;
            const float delta_here = at < length ? view.delta[at] : 0.0f;
#pragma unroll
            for (int r = 0; r < PLAIN_EACH; r++) {
                const float e = power_of_2(fmaf(p[r][c], scale, -log_sum_here) * LOG2_E);
                p[r][c] = own + r <= at && at < length ? e : 0.0f;
                ds[r][c] = p[r][c] * (ds[r][c] - delta_here);
            }
        }
        plain_put_weights<D>(weights, p);
        plain_accumulate<D>(dv, weights, douts);
        plain_put_weights<D>(weights, ds);
        plain_accumulate<D>(dk, weights, queries);
    }
    const float one[PLAIN_EACH] = {1.0f, 1.0f, 1.0f, 1.0f};
    const float scales[PLAIN_EACH] = {scale, scale, scale, scale};
    plain_store<D>(view.dk, view.stride, dk, scales, first, length);
    plain_store<D>(view.dv, view.stride, dv, one, first, length);
}

/* dq of a tile of queries, fp32 on the plain units. */
template <int D>
__global__ void __launch_bounds__(PLAIN_THREADS, 1)
    attention_backward_queries_plain_kernel(float *dqkv, const float *dout, const float *qkv,
                                            const float *log_sum, const float *delta, int length,
                                            float scale)
{
    constexpr int ROWS = plain_rows<D>, COLUMNS = ROWS / PLAIN_SIDE;
    extern __shared__ __align__(128) unsigned char shared[];
    float *const queries = reinterpret_cast<float *>(shared);
    float *const douts = queries + PLAIN_OWN * plain_stride<D>;
    float *const keys = douts + PLAIN_OWN * plain_stride<D>;
    float *const values = keys + ROWS * plain_stride<D>;
    float *const weights = values + ROWS * plain_stride<D>;

    const head_view<float, D> view(dqkv, dout, qkv, log_sum, delta, length);
    const int first = (int)(gridDim.x - 1 - blockIdx.x) * PLAIN_OWN;
    const int last = min(first + PLAIN_OWN, length) - 1;
    const int x = threadIdx.x % PLAIN_SIDE;
    const int own = first + (int)threadIdx.x / PLAIN_SIDE * PLAIN_EACH;

    plain_load<D, PLAIN_OWN>(queries, view.q, view.stride, first, length);
    plain_load<D, PLAIN_OWN>(douts, view.dout, view.dout_stride, first, length);
    float own_log_sum[PLAIN_EACH], own_delta[PLAIN_EACH];
#pragma unroll
    for (int r = 0; r < PLAIN_EACH; r++) {
        own_log_sum[r] = own + r < length ? view.log_sum[own + r] : 0.0f;
        own_delta[r] = own + r < length ? view.delta[own + r] : 0.0f;
    }
    float dq[PLAIN_EACH][plain_channels<D>::COUNT] = {};
    for (int key = 0; key <= last; key += ROWS) {
        __syncthreads();
        plain_load<D, ROWS>(keys, view.k, view.stride, key, length);
        plain_load<D, ROWS>(values, view.v, view.stride, key, length);
        __syncthreads();
        float s[PLAIN_EACH][COLUMNS], ds[PLAIN_EACH][COLUMNS];
        plain_dot<D>(s, queries, keys);
        plain_dot<D>(ds, douts, values);
#pragma unroll
        for (int r = 0; r < PLAIN_EACH; r++) {
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                const float p = power_of_2(fmaf(s[r][c], scale, -own_log_sum[r]) * LOG2_E);
                ds[r][c] =
                    key + x + c * PLAIN_SIDE <= own + r ? p * (ds[r][c] - own_delta[r]) : 0.0f;
            }
        }
        plain_put_weights<D>(weights, ds);
        plain_accumulate<D>(dq, weights, keys);
    }
    const float scales[PLAIN_EACH] = {scale, scale, scale, scale};
    plain_store<D>(view.dq, view.stride, dq, scales, first, length);
}

/* Launch one of the four kernels; they take the same arguments. */
template <typename T>
using backward_kernel = void(T *, const T *, const T *, const float *, const float *, int, float);

template <typename T> struct backward_call {
    T *dqkv;
    const T *dout, *qkv;
    const float *log_sum, *delta;
    size_t batch, length, heads;
    float scale;
    cudaStream_t stream;
};

template <typename T>
static cudaError_t launch_kernel(backward_kernel<T> *kernel, const backward_call<T> &call,
                                 size_t own_rows, unsigned threads, size_t shared_bytes)
{
    const cudaError_t status = allow_shared(kernel, shared_bytes);
    if (status != cudaSuccess)
        return status;
    const dim3 grid((unsigned)ceil_div(call.length, own_rows), (unsigned)call.heads,
                    (unsigned)call.batch);
    kernel<<<grid, threads, shared_bytes, call.stream>>>(
        call.dqkv, call.dout, call.qkv, call.log_sum, call.delta, (int)call.length, call.scale);
    return cudaGetLastError();
}

template <typename T, int D>
static cudaError_t launch_delta(float *delta, const T *dout, const T *out, size_t batch,
                                size_t length, size_t heads, cudaStream_t stream)
{
    const size_t rows = batch * length * heads;
    const size_t blocks = ceil_div(rows * (D / 8), CHUNK_THREADS);
    if (blocks >= INDEX_LIMIT)
        return cudaErrorInvalidValue;
    attention_delta_kernel<T, D><<<(unsigned)blocks, CHUNK_THREADS, 0, stream>>>(
        delta, dout, out, (int)length, (int)heads, rows);
    return cudaGetLastError();
}

template <typename T, int D> static cudaError_t launch_backward(const backward_call<T> &call)
{
    if constexpr (std::is_same<T, float>::value) {
        const size_t bytes = plain_shared_floats<D>(2) * sizeof(float);
        const cudaError_t status = launch_kernel<T>(attention_backward_keys_plain_kernel<D>, call,
                                                    PLAIN_OWN, PLAIN_THREADS, bytes);
        if (status != cudaSuccess)
            return status;
        return launch_kernel<T>(attention_backward_queries_plain_kernel<D>, call, PLAIN_OWN,
                                PLAIN_THREADS, bytes);
    } else {
        constexpr size_t own = mma_shape<D>::OWN, rows = passing_rows<D>;
        constexpr size_t bytes = (2 * own + 4 * rows) * D * sizeof(T);
        const cudaError_t status =
            launch_kernel<T>(attention_backward_keys_mma_kernel<T, D>, call, own, MMA_THREADS,
                             bytes + 4 * rows * sizeof(float));
        if (status != cudaSuccess)
            return status;
        return launch_kernel<T>(attention_backward_queries_mma_kernel<T, D>, call, own, MMA_THREADS,
                                bytes);
    }
}

extern "C" size_t rbk_attention_backward_scratch_bytes(size_t batch, size_t length, size_t heads)
{
    return batch * length * heads * sizeof(float);
}

extern "C" cudaError_t rbk_attention_backward(void *dqkv, const void *dout, const void *qkv,
                                              const void *out, const float *log_sum, void *scratch,
                                              size_t scratch_bytes, size_t batch, size_t length,
                                              size_t heads, size_t head_width, float scale,
                                              rbk_dtype dtype, cudaStream_t stream)
{
    if (!are_arrays(dqkv, dout, qkv, out, scratch) || !are_values(log_sum) ||
        !is_attention(batch, length, heads, scale) ||
        scratch_bytes < rbk_attention_backward_scratch_bytes(batch, length, heads))
        return cudaErrorInvalidValue;
    return with_dtype(dtype, [=](auto tag) {
        using T = typename decltype(tag)::type;
        return with_head_width(head_width, [=](auto width) {
            constexpr int D = decltype(width)::value;
            const backward_call<T> call = {
                (T *)dqkv, (const T *)dout, (const T *)qkv, log_sum, (float *)scratch,
                batch,     length,          heads,          scale,   stream};
            bool is_sm90 = false;
            cudaError_t status = launch_delta<T, D>((float *)scratch, (const T *)dout,
                                                    (const T *)out, batch, length, heads, stream);
            if (status == cudaSuccess && D == HEAD && dtype != RBK_F32)
                status = has_sm90(&is_sm90);
            if (status != cudaSuccess)
                return status;
            return is_sm90 ? attention_backward_sm90({dqkv, qkv, dout, log_sum, (float *)scratch,
                                                      batch, length, heads, scale, stream},
                                                     dtype)
                           : launch_backward<T, D>(call);
        });
    });
}
