/* Causal attention forward on devices that have wgmma, heads 64 wide. Owns attention_forward_sm90.
 * Must not know: other samples or heads.
 *
 * A block owns queries; keys and values pass by. The tiles with most keys start first. */
#include "attention_sm90.cuh"
#include "attention_softmax.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* What a stage's keys add to the warpgroup's queries. `query` is this warp's first. */
template <typename T>
__device__ inline void attend(float (&acc)[1][8][4], softmax_state<1> &state,
                              shared_address queries, shared_address keys, int query, int key,
                              float scale2)
{
    float s[1][8][4];
    unsigned p[1][4][4];
    products_begin();
    multiply_tiles<T>(s[0], queries, keys);
    products_commit();
    products_wait<0>();
    if (key + TILE - 1 > query)
        mask_later_keys<1, 8, false>(s, query, key);
    softmax_step<HEAD, 1, 8>(s, acc, state, scale2);
    round_to_operand<T, 1, 8>(p, s);
    products_begin();
    multiply_kept<T>(acc[0], p[0], keys + TILE_BYTES);
    products_commit();
    products_wait<0>();
}

#endif

/* out [B,T,H,64] and log_sum [B,H,T] of OWN_ROWS queries; scale2 = scale * log2(e). Grid: tiles of
 * queries, heads, samples. */
template <typename T>
__global__ void __launch_bounds__(SM90_THREADS, 2)
    attention_forward_sm90_kernel(T *out, float *log_sum, const __grid_constant__ CUtensorMap qkv,
                                  int length, float scale2)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ unsigned char shared[];
    const sm90_shared s(shared);
    const head_place place;
    const int first = (int)(gridDim.x - 1 - blockIdx.x) * OWN_ROWS, group = threadIdx.x / GROUP;
    const int last = min(first + OWN_ROWS, length) - 1;
    sm90_begin(s, 1);
    if (group == OWN_GROUPS) {
        fill_own(s, &qkv, place.q, nullptr, 0, first, place.sample);
        fill_keys(s, &qkv, place, last);
        return;
    }
    float acc[1][8][4] = {}, factor[1][2];
    softmax_state<1> state = {{{-INFINITY, -INFINITY}}, {{0.0f, 0.0f}}};
    const int group_query = first + group * TILE;
    const int query = group_query + threadIdx.x % GROUP / 32 * 16;
    const shared_address queries = s.own + group * 2 * TILE_BYTES;
    ring_place at;
    barrier_wait(s.own_full, 0);
    for (int key = 0; key <= last; key += TILE, at.advance()) {
        barrier_wait(s.full + at.stage * 8, at.parity);
        if (key < group_query + TILE)
            attend<T>(acc, state, queries, s.stages + at.stage * 2 * TILE_BYTES, query, key,
                      scale2);
        if (threadIdx.x % 32 == 0)
            barrier_arrive(s.empty + at.stage * 8);
    }
    finish_softmax<1>(factor, log_sum + ((size_t)place.sample * gridDim.y + blockIdx.y) * length,
                      state, scale2, query, length);
    warpgroup_wait(1 + group);
    const size_t stride = (size_t)gridDim.y * HEAD;
    store_rows<T, HEAD, 1>(out + (size_t)place.sample * length * stride + place.q, stride, acc,
                           factor, s.own_tiles(group), threadIdx.x % GROUP / 32 * 16, group_query,
                           length);
#else
    __trap(); /* has_sm90() says no */
#endif
}

cudaError_t attention_forward_sm90(const sm90_forward_call &call, rbk_dtype dtype)
{
    CUtensorMap qkv;
    const dim3 grid((unsigned)ceil_div(call.length, OWN_ROWS), (unsigned)call.heads,
                    (unsigned)call.batch);
    cudaError_t status = describe_boxes(&qkv, call.qkv, call.batch, call.length,
                                        3 * call.heads * HEAD, TILE, HEAD, dtype);
    if (status != cudaSuccess)
        return status;
    const auto launch = [&](auto tag) {
        using T = typename decltype(tag)::type;
        const cudaError_t allowed =
            allow_shared(attention_forward_sm90_kernel<T>, SM90_SHARED_BYTES);
        if (allowed != cudaSuccess)
            return allowed;
        attention_forward_sm90_kernel<T><<<grid, SM90_THREADS, SM90_SHARED_BYTES, call.stream>>>(
            (T *)call.out, call.log_sum, qkv, (int)call.length, call.scale2);
        return cudaGetLastError();
    };
    return dtype == RBK_BF16 ? launch(type_tag<__nv_bfloat16>{}) : launch(type_tag<__half>{});
}
