/* A wrapped CUDA program that includes a helper before rebatch/wrap.h: the helper's cudaFree is
 * CUDA's own. Prints "shared" where the helper can free the pool's memory and its allocations are
 * the pool's. Must not know what is preloaded. */
#include "preload_helper.h"

#include <cstdio>

#include "rebatch/rebatch.h"
#include "rebatch/wrap.h"

static int fail(const char *what)
{
    std::printf("%s: %s\n", what, rebatch_last_error());
    return 1;
}

static bool is_pools(void *memory)
{
    size_t bytes;
    return rebatch_pool_block_bytes(&bytes, rebatch_get_pool(rebatch_get_current()), memory) ==
           REBATCH_OK;
}

int main()
{
    void *a, *b, *c;
    cudaStream_t stream;
    if (rebatch_wrap_open(NULL))
        return fail("rebatch_wrap_open");
    if (cudaStreamCreate(&stream) || cudaMalloc(&a, 1 << 20) || cudaMalloc(&b, 1 << 20) ||
        helper_alloc(&c, 1 << 20))
        return fail("allocation");
    if (!is_pools(a) || !is_pools(b))
        return fail("the pool");
    const bool is_shared = is_pools(c);
    if (cudaMemset(a, 1, 1 << 20) || cudaMemset(c, 1, 1 << 20))
        return fail("cudaMemset");
    const cudaError_t first = helper_free(a);
    const cudaError_t second = helper_free_async(b, stream);
    (void)cudaGetLastError();
    if (helper_free(c))
        return fail("the helper's own memory");
    if ((first == cudaSuccess) != is_shared || (second == cudaSuccess) != is_shared)
        return fail("half of it");
    if (is_shared && (is_pools(a) || is_pools(b)))
        return fail("not freed");
    std::printf(is_shared ? "shared\n" : "not shared\n");
    if (cudaDeviceSynchronize())
        return fail("cudaDeviceSynchronize");
    rebatch_wrap_close();
    return 0;
}
