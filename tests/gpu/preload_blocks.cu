/* A plain CUDA program: allocates blocks in several ways, works on them, and prints what it got.
 * Must not know rebatch.
 *
 * preload_blocks COUNT MIB */
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <vector>

__global__ static void fill(unsigned *block, size_t count, unsigned value)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count;
         i += (size_t)gridDim.x * blockDim.x)
        block[i] = value + (unsigned)i;
}

static void check(cudaError_t code, const char *what)
{
    if (code == cudaSuccess)
        return;
    std::printf("%s: %s\n", what, cudaGetErrorString(code));
    std::exit(1);
}

static void print_memory(const char *when)
{
    size_t free_bytes, total_bytes;
    check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    std::printf("%s: total %zu MiB, %s\n", when, total_bytes >> 20,
                free_bytes <= total_bytes ? "free is not more" : "free is more");
}

/* One block in turn by cudaMalloc, cudaMallocAsync and cudaMallocPitch. */
static cudaError_t allocate(void **out, size_t bytes, int way, cudaStream_t stream)
{
    size_t pitch;
    if (way == 1)
        return cudaMallocAsync(out, bytes, stream);
    return way == 0 ? cudaMalloc(out, bytes) : cudaMallocPitch(out, &pitch, 1 << 20, bytes >> 20);
}

int main(int argument_count, char **arguments)
{
    const int count = argument_count > 1 ? std::atoi(arguments[1]) : 12;
    const size_t bytes = (size_t)(argument_count > 2 ? std::atoi(arguments[2]) : 64) << 20;
    std::vector<unsigned *> blocks(count, nullptr);
    unsigned long long sum = 0;
    cudaStream_t stream;
    check(cudaStreamCreate(&stream), "cudaStreamCreate");
    print_memory("before");
    for (int i = 0; i < count; i++) {
        void *memory = nullptr;
        const cudaError_t code = allocate(&memory, bytes, i % 3, stream);
        if (code != cudaErrorMemoryAllocation)
            check(code, "allocation");
        else if (cudaGetLastError() != cudaErrorMemoryAllocation)
            std::printf("the error was lost\n");
        blocks[i] = code == cudaSuccess ? (unsigned *)memory : nullptr;
        std::printf("%d: %s\n", i, code == cudaSuccess ? "ok" : "out of memory");
    }
    for (int i = 0; i < count; i++) {
        unsigned last = 0;
        if (!blocks[i])
            continue;
        fill<<<64, 256, 0, stream>>>(blocks[i], bytes / sizeof(unsigned), (unsigned)i);
        check(cudaMemcpyAsync(&last, blocks[i] + bytes / sizeof(unsigned) - 1, sizeof last,
                              cudaMemcpyDeviceToHost, stream),
              "copy");
        check(cudaStreamSynchronize(stream), "kernel");
        sum += last;
    }
    for (int i = 0; i < count; i++)
        if (blocks[i])
            check(i % 3 == 1 ? cudaFreeAsync(blocks[i], stream) : cudaFree(blocks[i]), "free");
    check(cudaStreamSynchronize(stream), "free");
    print_memory("after");
    std::printf("sum %llu\n", sum);
    return 0;
}
