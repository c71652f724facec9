/* Token and position embedding, forward and backward. Owns rbk_embedding_*. Must not know: the cut.
 *
 * Backward, token table: the positions are sorted by (token, position), then each token's run of
 * positions is added to its row by one warp per 128 channels, in ascending order. */
#include "common.cuh"
#include "reduce.cuh"
#include "types.cuh"

/* A block sorts SORT_RUN keys in shared memory; longer runs are merged in global memory. */
constexpr int SORT_RUN = 2048;
constexpr int SORT_THREADS = SORT_RUN / 2;
constexpr unsigned long long LAST_KEY = ~0ull;

/* The gathering warp: 4 channels a lane, AHEAD rows loaded before the first is added. */
constexpr int GATHER_WARPS = 4;
constexpr int GATHER_CHANNELS = 4 * WARP;
constexpr int AHEAD = 8;

/* Indices of keys and the block after them fit an int. */
constexpr size_t TOKENS_LIMIT = (size_t)1 << 30;

/* out[b,t,c] = token_weight[tokens[b,t],c] + position_weight[t,c]; width8 = width / 8 */
template <typename T>
__global__ void embedding_forward_kernel(T *out, const int32_t *tokens, size_t token_stride,
                                         const T *token_weight, const T *position_weight,
                                         size_t count, unsigned width8, unsigned length,
                                         int vocabulary)
{
    const chunk c = thread_chunk(count);
    if (c.size == 0)
        return;
    const unsigned eighth = (unsigned)(c.first / 8);
    const unsigned row = eighth / width8;
    const size_t column = (size_t)(eighth - row * width8) * 8;
    const size_t width = (size_t)width8 * 8;
    const unsigned sample = row / length, position = row - sample * length;
    const int token = tokens[sample * token_stride + position];
    float x[8] = {}, p[8];
    if (token >= 0 && token < vocabulary)
        load8(x, token_weight + token * width + column);
    load8(p, position_weight + position * width + column);
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] += p[i];
    store8(out + c.first, x);
}

/* keys[n] = (token, n), sorted inside each run of SORT_RUN by a bitonic network. A token that is
 * not in the vocabulary becomes the largest one, at the end. */
__global__ void __launch_bounds__(SORT_THREADS)
    sort_runs_kernel(unsigned long long *keys, const int32_t *tokens, size_t token_stride,
                     int count, int length, int vocabulary)
{
    __shared__ unsigned long long run[SORT_RUN];
    const int first = blockIdx.x * SORT_RUN;
    for (int i = threadIdx.x; i < SORT_RUN; i += SORT_THREADS) {
        unsigned long long key = LAST_KEY;
        if (first + i < count) {
            const int sample = (first + i) / length, position = (first + i) % length;
            const int token = tokens[sample * token_stride + position];
            const unsigned bucket = token >= 0 && token < vocabulary ? token : 0xffffffffu;
            key = (unsigned long long)bucket << 32 | (unsigned)(first + i);
        }
        run[i] = key;
    }
    for (int size = 2; size <= SORT_RUN; size *= 2) {
        for (int distance = size / 2; distance > 0; distance /= 2) {
            __syncthreads();
            const int low = 2 * threadIdx.x - (threadIdx.x & (distance - 1));
            const int high = low + distance;
            const bool ascending = (low & size) == 0;
            const unsigned long long a = run[low], b = run[high];
            if ((a > b) == ascending) {
                run[low] = b;
                run[high] = a;
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < SORT_RUN; i += SORT_THREADS)
        if (first + i < count)
            keys[first + i] = run[i];
}

/* Merge neighbouring sorted runs of `run` keys: a key goes to its rank in its own run plus the
 * number of smaller keys in the other. All keys are different. */
__global__ void merge_runs_kernel(unsigned long long *out, const unsigned long long *in, int count,
                                  int run)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count)
        return;
    const unsigned long long key = in[i];
    const int own = i / run * run;
    const int other = (i / run ^ 1) * run;
    int low = other < count ? other : count;
    const int begin = low;
    int high = min((long long)other + run, (long long)count);
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (in[middle] < key)
            low = middle + 1;
        else
            high = middle;
    }
    out[min(own, other) + (i - own) + (low - begin)] = key;
}

/* Four neighbouring channels. */
template <typename T> __device__ inline float4 load4(const T *from)
{
    const uint2 word = *reinterpret_cast<const uint2 *>(from);
    const float2 low = unpack2<T>(word.x), high = unpack2<T>(word.y);
    return make_float4(low.x, low.y, high.x, high.y);
}

template <> __device__ inline float4 load4<float>(const float *from)
{
    return *reinterpret_cast<const float4 *>(from);
}

/* token_grad[v,c] += dout[n,c] for the n of token v, ascending. One warp a sorted key and 128
 * channels; the warp of a run's first key does the run. Grid: keys / GATHER_WARPS, channels / 128.
 * */
template <typename T>
__global__ void __launch_bounds__(GATHER_WARPS *WARP)
    gather_tokens_kernel(float *token_grad, const T *dout, const unsigned long long *keys,
                         int count, int width, int vocabulary)
{
    const int lane = threadIdx.x % WARP;
    const int head = blockIdx.x * GATHER_WARPS + threadIdx.x / WARP;
    const int column = blockIdx.y * GATHER_CHANNELS + lane * 4;
    if (head >= count)
        return;
    const unsigned token = (unsigned)(keys[head] >> 32);
    if (token >= (unsigned)vocabulary || (head > 0 && (unsigned)(keys[head - 1] >> 32) == token))
        return;
    const bool inside = column < width;
    float4 *target = reinterpret_cast<float4 *>(token_grad + (size_t)token * width + column);
    float4 sum = inside ? *target : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int base = head;; base += WARP) {
        const unsigned long long key = base + lane < count ? keys[base + lane] : LAST_KEY;
        const int here = __popc(__ballot_sync(FULL_WARP, (unsigned)(key >> 32) == token));
        for (int k = 0; k < here; k += AHEAD) {
            float4 ahead[AHEAD] = {};
#pragma unroll
            for (int u = 0; u < AHEAD; u++) {
                /* past the end the last row again, so that the loads do not wait for a branch */
                const unsigned row = __shfl_sync(FULL_WARP, (unsigned)key, min(k + u, here - 1));
                if (inside)
                    ahead[u] = load4(dout + (size_t)row * width + column);
            }
#pragma unroll
            for (int u = 0; u < AHEAD; u++) {
                if (k + u < here) {
                    sum.x += ahead[u].x;
                    sum.y += ahead[u].y;
                    sum.z += ahead[u].z;
                    sum.w += ahead[u].w;
                }
            }
        }
        if (here < WARP)
            break;
    }
    if (inside)
        *target = sum;
}

/* position_grad[i] += dout[b,i] for ascending b, i over the elements of a sample. */
template <typename T>
__global__ void gather_positions_kernel(float *position_grad, const T *dout, int batch,
                                        size_t elements)
{
    const chunk c = thread_chunk(elements);
    if (c.size == 0)
        return;
    float sum[8];
    load8(sum, position_grad + c.first);
#pragma unroll 4
    for (int b = 0; b < batch; b++) {
        float d[8];
        load8(d, dout + (size_t)b * elements + c.first);
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i] += d[i];
    }
    store8(position_grad + c.first, sum);
}

extern "C" cudaError_t rbk_embedding_forward(void *out, const int32_t *tokens, size_t token_stride,
                                             const void *token_weight, const void *position_weight,
                                             size_t batch, size_t length, size_t width,
                                             size_t vocabulary, rbk_dtype dtype,
                                             cudaStream_t stream)
{
    if (!are_arrays(out, token_weight, position_weight) || !are_values(tokens) ||
        !are_sizes(INDEX_LIMIT, batch, length, vocabulary, token_stride) || token_stride < length ||
        !is_matrix(batch * length, width))
        return cudaErrorInvalidValue;
    const size_t count = batch * length * width;
    return with_dtype(dtype, [=](auto tag) {
        using T = typename decltype(tag)::type;
        embedding_forward_kernel<T><<<chunk_blocks(count), CHUNK_THREADS, 0, stream>>>(
            (T *)out, tokens, token_stride, (const T *)token_weight, (const T *)position_weight,
            count, (unsigned)(width / 8), (unsigned)length, (int)vocabulary);
        return cudaGetLastError();
    });
}

/* Sort the keys of the tokens [batch, length]; scratch holds two arrays of them. */
static cudaError_t sort_positions(unsigned long long **sorted, const int32_t *tokens,
                                  size_t token_stride, void *scratch, size_t batch, size_t length,
                                  size_t vocabulary, cudaStream_t stream)
{
    const size_t count = batch * length;
    unsigned long long *keys = (unsigned long long *)scratch;
    unsigned long long *other = keys + count;
    sort_runs_kernel<<<(unsigned)ceil_div(count, SORT_RUN), SORT_THREADS, 0, stream>>>(
        keys, tokens, token_stride, (int)count, (int)length, (int)vocabulary);
    cudaError_t status = cudaGetLastError();
    for (size_t run = SORT_RUN; run < count && status == cudaSuccess; run *= 2) {
        merge_runs_kernel<<<(unsigned)ceil_div(count, CHUNK_THREADS), CHUNK_THREADS, 0, stream>>>(
            other, keys, (int)count, (int)run);
        status = cudaGetLastError();
        unsigned long long *const merged = other;
        other = keys;
        keys = merged;
    }
    *sorted = keys;
    return status;
}

extern "C" size_t rbk_embedding_backward_scratch_bytes(size_t batch, size_t length)
{
    return 2 * batch * length * sizeof(unsigned long long);
}

extern "C" cudaError_t rbk_embedding_backward(float *token_grad, float *position_grad,
                                              const void *dout, const int32_t *tokens,
                                              size_t token_stride, void *scratch,
                                              size_t scratch_bytes, size_t batch, size_t length,
                                              size_t width, size_t vocabulary, rbk_dtype dtype,
                                              cudaStream_t stream)
{
    if (!are_arrays(token_grad, position_grad, dout, scratch) || !are_values(tokens) ||
        !are_sizes(INDEX_LIMIT, batch, length, vocabulary, token_stride) || token_stride < length ||
        batch * length > TOKENS_LIMIT || !is_matrix(batch * length, width) ||
        scratch_bytes < rbk_embedding_backward_scratch_bytes(batch, length))
        return cudaErrorInvalidValue;
    const size_t count = batch * length;
    unsigned long long *keys;
    const cudaError_t status =
        sort_positions(&keys, tokens, token_stride, scratch, batch, length, vocabulary, stream);
    if (status != cudaSuccess)
        return status;
    return with_dtype(dtype, [=](auto tag) {
        using T = typename decltype(tag)::type;
        const dim3 grid((unsigned)ceil_div(count, GATHER_WARPS),
                        (unsigned)ceil_div(width, GATHER_CHANNELS));
        gather_tokens_kernel<T><<<grid, GATHER_WARPS * WARP, 0, stream>>>(
            token_grad, (const T *)dout, keys, (int)count, (int)width, (int)vocabulary);
        const cudaError_t launched = cudaGetLastError();
        if (launched != cudaSuccess)
            return launched;
        gather_positions_kernel<T><<<chunk_blocks(length * width), CHUNK_THREADS, 0, stream>>>(
            position_grad, (const T *)dout, (int)batch, length * width);
        return cudaGetLastError();
    });
}
