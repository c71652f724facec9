/* Causal attention backward on devices that have wgmma, heads 64 wide. Owns
 * attention_backward_sm90. Must not know: other samples or heads.
 *
 * The sums are those of attention_backward.cu: a block of the first kernel owns keys and goes
 * through the queries, one of the second owns queries and goes through the keys. */
#include "attention_sm90.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* The queries of a stage: q, dout, log_sum * log2(e) and delta; zeros past the end, where p is then
 * 1, but dout and ds are 0. */
__device__ inline void fill_queries(const sm90_shared &s, const CUtensorMap *qkv,
                                    const CUtensorMap *dout, const head_place &place,
                                    const float *log_sum, const float *delta, int first, int length)
{
    const int lane = threadIdx.x % 32;
    ring_place at;
    for (int query = first; query < length; query += TILE, at.advance()) {
        const shared_address to = s.stages + at.stage * 2 * TILE_BYTES,
                             full = s.full + at.stage * 8;
        float *const statistics = s.statistics(at.stage);
        float numbers[4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = query + lane + i * 32;
            numbers[i] = row < length ? log_sum[row] * LOG2_E : 0.0f;
            numbers[2 + i] = row < length ? delta[row] : 0.0f;
        }
        barrier_wait(s.empty + at.stage * 8, at.parity ^ 1);
#pragma unroll
        for (int i = 0; i < 4; i++)
            statistics[lane + i * 32] = numbers[i];
        if (lane > 0) {
            barrier_arrive(full);
            continue;
        }
        barrier_arrive_expecting(full, 2 * TILE_BYTES);
        copy_box(to, qkv, place.q, query, place.sample, full);
        copy_box(to + TILE_BYTES, dout, place.dout, query, place.sample, full);
    }
}

/* What a stage's queries add to the dk and dv of the warpgroup's keys. `key` is this warp's first,
 * `query` the stage's. */
template <typename T>
__device__ inline void add_queries(float (&dk)[1][8][4], float (&dv)[1][8][4], shared_address keys,
                                   shared_address queries, const float *statistics, int key,
                                   int query, float scale2)
{
    const shared_address douts = queries + TILE_BYTES;
    float p[1][8][4], ds[1][8][4];
    products_begin();
    multiply_tiles<T>(p[0], keys, queries);
    products_commit();
    multiply_tiles<T>(ds[0], keys + TILE_BYTES, douts);
    products_commit();
    const float *const row = statistics + (threadIdx.x & 3) * 2;
    products_wait<1>(); /* p */
    if (query < key + 15)
        mask_later_keys<1, 8, true>(p, key, query);
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float2 base = *reinterpret_cast<const float2 *>(row + n * 8);
#pragma unroll
        for (int e = 0; e < 4; e++)
            p[0][n][e] = power_of_2(fmaf(p[0][n][e], scale2, -((e & 1) ? base.y : base.x)));
    }
    unsigned p_operand[1][4][4], ds_operand[1][4][4];
    round_to_operand<T, 1, 8>(p_operand, p);
    products_begin();
    multiply_kept<T>(dv[0], p_operand[0], douts);
    products_commit();
    products_wait<1>(); /* ds */
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float2 deltas = *reinterpret_cast<const float2 *>(row + TILE + n * 8);
#pragma unroll
        for (int e = 0; e < 4; e++)
            ds[0][n][e] = p[0][n][e] * (ds[0][n][e] - ((e & 1) ? deltas.y : deltas.x));
    }
    round_to_operand<T, 1, 8>(ds_operand, ds);
    products_begin();
    multiply_kept<T>(dk[0], ds_operand[0], queries);
    products_commit();
    products_wait<0>();
}

/* What a stage's keys add to the dq of the warpgroup's queries. `query` is this warp's first. */
template <typename T>
__device__ inline void add_keys(float (&dq)[1][8][4], const float (&base)[2],
                                const float (&delta)[2], shared_address queries,
                                shared_address keys, int query, int key, float scale2)
{
    float p[1][8][4], ds[1][8][4];
    products_begin();
    multiply_tiles<T>(p[0], queries, keys);
    products_commit();
    multiply_tiles<T>(ds[0], queries + TILE_BYTES, keys + TILE_BYTES);
    products_commit();
    products_wait<1>(); /* p */
    if (key + TILE - 1 > query)
        mask_later_keys<1, 8, false>(p, query, key);
#pragma unroll
    for (int n = 0; n < 8; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++)
            p[0][n][e] = power_of_2(fmaf(p[0][n][e], scale2, -base[e / 2]));
    }
    products_wait<0>(); /* ds */
#pragma unroll
    for (int n = 0; n < 8; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++)
            ds[0][n][e] = p[0][n][e] * (ds[0][n][e] - delta[e / 2]);
    }
    unsigned operand[1][4][4];
    round_to_operand<T, 1, 8>(operand, ds);
    products_begin();
    multiply_kept<T>(dq[0], operand[0], keys);
    products_commit();
    products_wait<0>();
}

/* The warpgroup's rows, from `first`, by way of its own tile, which it no longer needs. */
template <typename T>
__device__ inline void store_group(T *to, size_t stride, const float (&acc)[1][8][4], float factor,
                                   unsigned char *tile, int first, int length)
{
    const float factors[1][2] = {{factor, factor}};
    store_rows<T, HEAD, 1>(to, stride, acc, factors, tile, threadIdx.x % GROUP / 32 * 16, first,
                           length);
}

#endif

/* dk and dv of OWN_ROWS keys. Grid: tiles of keys, heads, samples. */
template <typename T>
__global__ void __launch_bounds__(SM90_THREADS, 1)
    attention_backward_keys_sm90_kernel(T *dqkv, const __grid_constant__ CUtensorMap qkv,
                                        const __grid_constant__ CUtensorMap dout,
                                        const float *log_sum, const float *delta, int length,
                                        float scale)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ unsigned char shared[];
    const sm90_shared s(shared);
    const head_place place;
    const int first = blockIdx.x * OWN_ROWS, group = threadIdx.x / GROUP;
    sm90_begin(s, 32, OWN_GROUPS * GROUP);
    if (group == OWN_GROUPS) {
        const size_t row = ((size_t)place.sample * gridDim.y + blockIdx.y) * length;
        fill_own(s, &qkv, place.k, &qkv, place.v, first, place.sample);
        fill_queries(s, &qkv, &dout, place, log_sum + row, delta + row, first, length);
        return;
    }
    float dk[1][8][4] = {}, dv[1][8][4] = {};
    const int group_key = first + group * TILE;
    const int key = group_key + threadIdx.x % GROUP / 32 * 16;
    const shared_address keys = s.own + group * 2 * TILE_BYTES;
    ring_place at;
    barrier_wait(s.own_full, 0);
    for (int query = first; query < length; query += TILE, at.advance()) {
        barrier_wait(s.full + at.stage * 8, at.parity);
        if (query + TILE > group_key)
            add_queries<T>(dk, dv, keys, s.stages + at.stage * 2 * TILE_BYTES,
                           s.statistics(at.stage), key, query, scale * LOG2_E);
        barrier_arrive(s.empty + at.stage * 8); /* it has read the stage's statistics */
    }
    warpgroup_wait(1 + group);
    const size_t stride = (size_t)3 * gridDim.y * HEAD;
    T *const to = dqkv + (size_t)place.sample * length * stride;
    store_group(to + place.k, stride, dk, scale, s.own_tiles(group), group_key, length);
    store_group(to + place.v, stride, dv, 1.0f, s.own_tiles(group) + TILE_BYTES, group_key, length);
#else
    __trap(); /* has_sm90() says no */
#endif
}

/* dq of OWN_ROWS queries. Grid: tiles of queries, most keys first; heads; samples. */
template <typename T>
__global__ void __launch_bounds__(SM90_THREADS, 1)
    attention_backward_queries_sm90_kernel(T *dqkv, const __grid_constant__ CUtensorMap qkv,
                                           const __grid_constant__ CUtensorMap dout,
                                           const float *log_sum, const float *delta, int length,
                                           float scale)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ unsigned char shared[];
    const sm90_shared s(shared);
    const head_place place;
    const int first = (int)(gridDim.x - 1 - blockIdx.x) * OWN_ROWS, group = threadIdx.x / GROUP;
    const int last = min(first + OWN_ROWS, length) - 1;
    sm90_begin(s, 1);
    if (group == OWN_GROUPS) {
        fill_own(s, &qkv, place.q, &dout, place.dout, first, place.sample);
        fill_keys(s, &qkv, place, last);
        return;
    }
    float dq[1][8][4] = {}, base[2], own_delta[2];
    const int group_query = first + group * TILE;
    const int query = group_query + threadIdx.x % GROUP / 32 * 16;
    const size_t row = ((size_t)place.sample * gridDim.y + blockIdx.y) * length;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int at = query + threadIdx.x % 32 / 4 + half * 8;
        base[half] = at < length ? log_sum[row + at] * LOG2_E : 0.0f;
        own_delta[half] = at < length ? delta[row + at] : 0.0f;
    }
    const shared_address queries = s.own + group * 2 * TILE_BYTES;
    ring_place at;
    barrier_wait(s.own_full, 0);
    for (int key = 0; key <= last; key += TILE, at.advance()) {
        barrier_wait(s.full + at.stage * 8, at.parity);
        if (key < group_query + TILE)
            add_keys<T>(dq, base, own_delta, queries, s.stages + at.stage * 2 * TILE_BYTES, query,
                        key, scale * LOG2_E);
        if (threadIdx.x % 32 == 0)
            barrier_arrive(s.empty + at.stage * 8);
    }
    warpgroup_wait(1 + group);
    const size_t stride = (size_t)3 * gridDim.y * HEAD;
    store_group(dqkv + (size_t)place.sample * length * stride + place.q, stride, dq, scale,
                s.own_tiles(group), group_query, length);
#else
    __trap(); /* has_sm90() says no */
#endif
}

/* ---- host ---- */

template <typename T>
using sm90_backward_kernel = void(T *, const CUtensorMap, const CUtensorMap, const float *,
                                  const float *, int, float);

template <typename T>
static cudaError_t launch_kernel(sm90_backward_kernel<T> *kernel, const sm90_backward_call &call,
                                 const CUtensorMap &qkv, const CUtensorMap &dout)
{
    const cudaError_t status = allow_shared(kernel, SM90_SHARED_BYTES);
    if (status != cudaSuccess)
        return status;
    const dim3 grid((unsigned)ceil_div(call.length, OWN_ROWS), (unsigned)call.heads,
                    (unsigned)call.batch);
    kernel<<<grid, SM90_THREADS, SM90_SHARED_BYTES, call.stream>>>(
        (T *)call.dqkv, qkv, dout, call.log_sum, call.delta, (int)call.length, call.scale);
    return cudaGetLastError();
}

template <typename T>
static cudaError_t launch_both(const sm90_backward_call &call, const CUtensorMap &qkv,
                               const CUtensorMap &dout)
{
    const cudaError_t status =
        launch_kernel<T>(attention_backward_keys_sm90_kernel<T>, call, qkv, dout);
    return status != cudaSuccess
               ? status
               : launch_kernel<T>(attention_backward_queries_sm90_kernel<T>, call, qkv, dout);
}

cudaError_t attention_backward_sm90(const sm90_backward_call &call, rbk_dtype dtype)
{
    CUtensorMap qkv, dout;
    const size_t width = call.heads * HEAD;
    cudaError_t status =
        describe_boxes(&qkv, call.qkv, call.batch, call.length, 3 * width, TILE, HEAD, dtype);
    if (status == cudaSuccess)
        status =
            describe_boxes(&dout, call.dout, call.batch, call.length, width, TILE, HEAD, dtype);
    if (status != cudaSuccess)
        return status;
    return dtype == RBK_BF16 ? launch_both<__nv_bfloat16>(call, qkv, dout)
                             : launch_both<__half>(call, qkv, dout);
}
