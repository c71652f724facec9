/* Adds per-sample partial sums to an accumulator in the order of the samples. Owns
 * rbk_accumulate_partials. Must not know: what the partial sums are of. */
#include "accumulate.cuh"

/* A block takes 32 columns and brings in 32 samples at a time: thread (x, y) adds up the parts of
 * sample y, then row 0 of the threads adds the samples in order. Blocks of y = 1: of the second
 * array. */
constexpr int SIDE = 32;

__global__ void __launch_bounds__(SIDE *SIDE)
    accumulate_kernel(float *sum_a, float *sum_b, const float *partial_a, const float *partial_b,
                      int batch, int parts, int width)
{
    float *const sum = blockIdx.y ? sum_b : sum_a;
    const float *const partial = blockIdx.y ? partial_b : partial_a;
    __shared__ float samples[SIDE][SIDE + 1];
    const int column = blockIdx.x * SIDE + threadIdx.x;
    const bool inside = column < width;
    float total = inside && threadIdx.y == 0 ? sum[column] : 0.0f;
    for (int first = 0; first < batch; first += SIDE) {
        const int sample = first + threadIdx.y;
        float part_sum = 0.0f;
        if (inside && sample < batch) {
            const float *from = partial + (size_t)sample * parts * width + column;
#pragma unroll 8
            for (int p = 0; p < parts; p++)
                part_sum += from[(size_t)p * width];
        }
        samples[threadIdx.y][threadIdx.x] = part_sum;
        __syncthreads();
        if (threadIdx.y == 0) {
            const int here = min(SIDE, batch - first);
            for (int s = 0; s < here; s++)
                total += samples[s][threadIdx.x];
        }
        __syncthreads();
    }
    if (inside && threadIdx.y == 0)
        sum[column] = total;
}

cudaError_t accumulate_both(float *sum_a, float *sum_b, const float *partial_a,
                            const float *partial_b, size_t batch, size_t parts, size_t width,
                            cudaStream_t stream)
{
    accumulate_kernel<<<dim3((unsigned)ceil_div(width, SIDE), 2), dim3(SIDE, SIDE), 0, stream>>>(
        sum_a, sum_b, partial_a, partial_b, (int)batch, (int)parts, (int)width);
    return cudaGetLastError();
}

extern "C" cudaError_t rbk_accumulate_partials(float *sum, const float *partial, size_t batch,
                                               size_t parts, size_t width, cudaStream_t stream)
{
    if (!are_arrays(sum, partial) || !are_sizes(INDEX_LIMIT - SIDE, batch, parts, width))
        return cudaErrorInvalidValue;
    accumulate_kernel<<<(unsigned)ceil_div(width, SIDE), dim3(SIDE, SIDE), 0, stream>>>(
        sum, nullptr, partial, nullptr, (int)batch, (int)parts, (int)width);
    return cudaGetLastError();
}
