/* The ways in which programs find the driver's functions.
 * Must not know what is asked of them. */
#ifndef PRELOAD_WAYS_H
#define PRELOAD_WAYS_H

#include <stddef.h>

typedef unsigned long long pointer;

/* X(member, name for cuGetProcAddress(), symbol, arguments) */
#define API(X)                                                                                     \
    X(alloc, "cuMemAlloc", "cuMemAlloc_v2", (pointer * out, size_t bytes))                         \
    X(pitch, "cuMemAllocPitch", "cuMemAllocPitch_v2",                                              \
      (pointer * out, size_t * pitch, size_t width, size_t height, unsigned element))              \
    X(alloc_on, "cuMemAllocAsync", "cuMemAllocAsync",                                              \
      (pointer * out, size_t bytes, const void *stream))                                           \
    X(alloc_from, "cuMemAllocFromPoolAsync", "cuMemAllocFromPoolAsync",                            \
      (pointer * out, size_t bytes, const void *pool, const void *stream))                         \
    X(create, "cuMemCreate", "cuMemCreate",                                                        \
      (pointer * out, size_t bytes, const void *kind, unsigned long long flags))                   \
    X(release, "cuMemRelease", "cuMemRelease", (pointer handle))                                   \
    X(free, "cuMemFree", "cuMemFree_v2", (pointer memory))                                         \
    X(free_on, "cuMemFreeAsync", "cuMemFreeAsync", (pointer memory, const void *stream))           \
    X(info, "cuMemGetInfo", "cuMemGetInfo_v2", (size_t * free_bytes, size_t * total_bytes))

struct api {
#define MEMBER(member, name, symbol, arguments) int(*member) arguments;
    API(MEMBER)
#undef MEMBER
};

typedef int get_address(const char *name, void **out, int version, unsigned long long flags,
                        int *found);

/* By `way`: "asked" as CUDA's runtime does, "asked-old" with the first cuGetProcAddress(),
 * "asked-thread" with per-thread streams, "symbol" by dlsym(), "global" by dlsym(RTLD_DEFAULT).
 * Prints what is wrong and gives 0. */
int find_api(struct api *api, const char *way);

#endif
