/* A stand-in for CUDA's driver, with calls.c: a GPU that has addresses and no memory; with
 * DRIVER_MEMORY, memory that the process can use is behind them. Every call that allocates or frees
 * is written into the file that DRIVER_LOG names; with DRIVER_LOG_WAITS, waits are there too.
 * DRIVER_BYTES is how much memory there is, 64 MiB unless it is set; DRIVER_HAS is the number of
 * the one attribute that the GPU has; DRIVER_PAGE is the page's size of its virtual memory, all
 * other calls of which it refuses. With DRIVER_REFUSES_INFO it does not say what is free, as HAMi.
 * Must not know the tests. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef unsigned long long pointer;

enum {
    OK,
    INVALID_VALUE,
    OUT_OF_MEMORY,
    NOT_FOUND = 500,
    NOT_SUPPORTED = 801,
    STREAM_CAPTURE_UNSUPPORTED = 900
};

#define CAPTURED 99 /* a stream */

#define FIRST_ADDRESS 0x40000000u
#define UNIT 512u
#define MOST 4096

static struct {
    pointer address;
    size_t bytes;
} blocks[MOST]; /* by address */
static size_t block_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t capacity(void)
{
    const char *bytes = getenv("DRIVER_BYTES");
    return bytes ? strtoull(bytes, NULL, 10) : (size_t)64 << 20;
}

static int note(const char *symbol, unsigned long long what, int code)
{
    const char *path = getenv("DRIVER_LOG");
    char line[128];
    const int fd = path ? open(path, O_WRONLY | O_CREAT | O_APPEND, 0666) : -1;
    const int length = snprintf(line, sizeof line, "%s %llu = %d\n", symbol, what, code);
    if (fd >= 0 && write(fd, line, (size_t)length) != length)
        code = NOT_SUPPORTED;
    if (fd >= 0)
        (void)close(fd);
    return code;
}

/* ---- memory ---- */

/* What is behind the addresses: zeros at first, and later what was left there. */
static bool has_memory(void)
{
    static void *memory;
    if (!memory && getenv("DRIVER_MEMORY"))
        memory = mmap((void *)(uintptr_t)FIRST_ADDRESS, capacity(), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE | MAP_NORESERVE, -1, 0);
    return memory != MAP_FAILED;
}

/* The lowest address with room. */
static int take(const char *symbol, pointer *out, size_t bytes)
{
    const size_t whole = (bytes + UNIT - 1) / UNIT * UNIT;
    pointer at = FIRST_ADDRESS;
    size_t i = 0;
    if (!out || bytes == 0)
        return note(symbol, bytes, INVALID_VALUE);
    (void)pthread_mutex_lock(&lock);
    if (!has_memory())
        abort();
    while (i < block_count && blocks[i].address - at < whole) {
        at = blocks[i].address + blocks[i].bytes;
        i++;
    }
    const bool fits = block_count < MOST && whole <= FIRST_ADDRESS + capacity() - at;
    if (fits) {
        memmove(&blocks[i + 1], &blocks[i], (block_count - i) * sizeof *blocks);
        blocks[i].address = at;
        blocks[i].bytes = whole;
        block_count++;
        *out = at;
    }
    (void)pthread_mutex_unlock(&lock);
    return note(symbol, bytes, fits ? OK : OUT_OF_MEMORY);
}

static int give(const char *symbol, pointer address)
{
    size_t i = 0;
    (void)pthread_mutex_lock(&lock);
    while (i < block_count && blocks[i].address != address)
        i++;
    const bool found = i < block_count;
    if (found) {
        block_count--;
        memmove(&blocks[i], &blocks[i + 1], (block_count - i) * sizeof *blocks);
    }
    (void)pthread_mutex_unlock(&lock);
    return note(symbol, address, found || !address ? OK : INVALID_VALUE);
}

static size_t in_use(void)
{
    size_t bytes = 0;
    (void)pthread_mutex_lock(&lock);
    for (size_t i = 0; i < block_count; i++)
        bytes += blocks[i].bytes;
    (void)pthread_mutex_unlock(&lock);
    return bytes;
}

#define CALL(symbol, arguments, ...)                                                               \
    int symbol arguments;                                                                          \
    int symbol arguments                                                                           \
    {                                                                                              \
        __VA_ARGS__                                                                                \
    }

/* The first form has 32-bit pointers and sizes. */
CALL(cuMemAlloc, (unsigned *out, unsigned bytes), {
    pointer address = 0;
    const int code = take("cuMemAlloc", &address, bytes);
    if (!code)
        *out = (unsigned)address;
    return code;
})
CALL(cuMemFree, (unsigned address), { return give("cuMemFree", address); })
CALL(cuMemGetInfo, (unsigned *free_bytes, unsigned *total_bytes), {
    *total_bytes = (unsigned)capacity();
    *free_bytes = (unsigned)(capacity() - in_use());
    return OK;
})

CALL(cuMemAlloc_v2, (pointer * out, size_t bytes), { return take("cuMemAlloc_v2", out, bytes); })
CALL(cuMemFree_v2, (pointer address), { return give("cuMemFree_v2", address); })
CALL(cuMemAllocPitch_v2,
     (pointer * out, size_t *pitch, size_t width, size_t height, unsigned element), {
         (void)element;
         *pitch = (width + UNIT - 1) / UNIT * UNIT;
         return take("cuMemAllocPitch_v2", out, *pitch * height);
     })
CALL(cuMemAllocAsync, (pointer * out, size_t bytes, void *stream), {
    (void)stream;
    return take("cuMemAllocAsync", out, bytes);
})
CALL(cuMemAllocAsync_ptsz, (pointer * out, size_t bytes, void *stream), {
    (void)stream;
    return take("cuMemAllocAsync_ptsz", out, bytes);
})
CALL(cuMemAllocFromPoolAsync, (pointer * out, size_t bytes, void *pool, void *stream), {
    (void)pool;
    (void)stream;
    return take("cuMemAllocFromPoolAsync", out, bytes);
})
CALL(cuMemFreeAsync, (pointer address, void *stream), {
    if (stream == (void *)CAPTURED)
        return note("cuMemFreeAsync", address, STREAM_CAPTURE_UNSUPPORTED);
    return give("cuMemFreeAsync", address);
})
CALL(cuMemFreeAsync_ptsz, (pointer address, void *stream), {
    (void)stream;
    return give("cuMemFreeAsync_ptsz", address);
})
CALL(cuMemCreate, (pointer * out, size_t bytes, const void *kind, unsigned long long flags), {
    (void)kind;
    (void)flags;
    return take("cuMemCreate", out, bytes);
})
CALL(cuMemRelease, (pointer handle), { return give("cuMemRelease", handle); })
CALL(cuMemGetInfo_v2, (size_t * free_bytes, size_t *total_bytes), {
    *total_bytes = capacity();
    *free_bytes = capacity() - in_use();
    return getenv("DRIVER_REFUSES_INFO") ? INVALID_VALUE : OK;
})
/* What a later driver may have. */
CALL(cuMemGetInfo_v3, (size_t * free_bytes, size_t *total_bytes, int device), {
    (void)device;
    return cuMemGetInfo_v2(free_bytes, total_bytes);
})
CALL(cuDeviceTotalMem_v2, (size_t * bytes, int device), {
    (void)device;
    *bytes = capacity();
    return OK;
})

/* On one stream, in order and at once. */
CALL(cuMemcpyAsync, (pointer to, pointer from, size_t bytes, void *stream), {
    (void)stream;
    memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes);
    return OK;
})
CALL(cuMemsetD8Async, (pointer to, unsigned char value, size_t bytes, void *stream), {
    (void)stream;
    memset((void *)(uintptr_t)to, value, bytes);
    return OK;
})

/* ---- a device, streams and events on which nothing ever runs ---- */

CALL(cuInit, (unsigned flags), { return flags ? INVALID_VALUE : OK; })
CALL(cuDriverGetVersion, (int *version), {
    *version = 13000;
    return OK;
})
CALL(cuDeviceGetCount, (int *count), {
    *count = 1;
    return OK;
})
CALL(cuDeviceGet, (int *device, int ordinal), {
    *device = ordinal;
    return OK;
})
CALL(cuDeviceGetName, (char *name, int size, int device), {
    (void)device;
    (void)snprintf(name, (size_t)size, "stand-in");
    return OK;
})
CALL(cuDeviceGetAttribute, (int *value, int attribute, int device), {
    const char *const has = getenv("DRIVER_HAS");
    (void)device;
    *value = has && strtol(has, NULL, 10) == attribute;
    return OK;
})
CALL(cuMemGetAllocationGranularity, (size_t * bytes, const void *kind, int option), {
    const char *const page = getenv("DRIVER_PAGE");
    (void)kind;
    (void)option;
    *bytes = page ? strtoull(page, NULL, 10) : 0;
    return page ? OK : NOT_SUPPORTED;
})
static int context;
CALL(cuDevicePrimaryCtxRetain, (void **out, int device), {
    (void)device;
    *out = &context;
    return OK;
})
CALL(cuDevicePrimaryCtxRelease_v2, (int device), { return device ? INVALID_VALUE : OK; })
CALL(cuCtxGetCurrent, (void **out), {
    *out = &context;
    return OK;
})
static _Thread_local int current_device;
CALL(cuCtxGetDevice, (int *device), {
    *device = current_device;
    return OK;
})
/* How the driver looks itself up. */
const void *driver_find(const char *symbol);
const void *driver_find(const char *symbol)
{
    return dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), symbol);
}
/* Stands for cuCtxSetCurrent(). */
CALL(driver_set_device, (int device), {
    current_device = device;
    return OK;
})
CALL(cuCtxSynchronize, (void),
     { return getenv("DRIVER_LOG_WAITS") ? note("cuCtxSynchronize", 0, OK) : OK; })
CALL(cuStreamCreate, (void **out, unsigned flags), {
    static uintptr_t last = 64;
    (void)flags;
    *out = (void *)++last;
    return OK;
})
CALL(cuStreamDestroy_v2, (void *stream), { return stream ? OK : INVALID_VALUE; })
CALL(cuStreamSynchronize, (void *stream), {
    (void)stream;
    return OK;
})
CALL(cuStreamIsCapturing, (void *stream, int *status), {
    *status = stream == (void *)CAPTURED;
    return OK;
})
CALL(cuStreamWaitEvent, (void *stream, void *event, unsigned flags), {
    (void)stream;
    (void)event;
    return flags ? INVALID_VALUE : OK;
})
CALL(cuEventCreate, (void **out, unsigned flags), {
    (void)flags;
    *out = &context;
    return OK;
})
CALL(cuEventDestroy_v2, (void *event), { return event ? OK : INVALID_VALUE; })
CALL(cuEventRecord, (void *event, void *stream), {
    (void)event;
    (void)stream;
    return OK;
})
CALL(cuEventQuery, (void *event), { return event ? OK : INVALID_VALUE; })
CALL(cuEventSynchronize, (void *event), { return event ? OK : INVALID_VALUE; })

/* ---- functions by name ---- */

int cuGetProcAddress_v2(const char *name, void **out, int version, unsigned long long flags,
                        int *found);

int cuGetProcAddress(const char *name, void **out, int version, unsigned long long flags);
int cuGetProcAddress(const char *name, void **out, int version, unsigned long long flags)
{
    return cuGetProcAddress_v2(name, out, version, flags, NULL);
}

typedef void function(void);

static const struct {
    const char *name;
    int version;
    bool per_thread;
    function *address;
} functions[] = {
    {"cuMemAlloc", 2000, false, (function *)cuMemAlloc},
    {"cuMemAlloc", 3020, false, (function *)cuMemAlloc_v2},
    {"cuMemAllocPitch", 3020, false, (function *)cuMemAllocPitch_v2},
    {"cuMemAllocAsync", 11020, false, (function *)cuMemAllocAsync},
    {"cuMemAllocAsync", 11020, true, (function *)cuMemAllocAsync_ptsz},
    {"cuMemAllocFromPoolAsync", 11020, false, (function *)cuMemAllocFromPoolAsync},
    {"cuMemFree", 2000, false, (function *)cuMemFree},
    {"cuMemFree", 3020, false, (function *)cuMemFree_v2},
    {"cuMemFreeAsync", 11020, false, (function *)cuMemFreeAsync},
    {"cuMemFreeAsync", 11020, true, (function *)cuMemFreeAsync_ptsz},
    {"cuMemCreate", 10020, false, (function *)cuMemCreate},
    {"cuMemRelease", 10020, false, (function *)cuMemRelease},
    {"cuMemGetInfo", 2000, false, (function *)cuMemGetInfo},
    {"cuMemGetInfo", 3020, false, (function *)cuMemGetInfo_v2},
    {"cuMemGetInfo", 14000, false, (function *)cuMemGetInfo_v3},
    {"cuDriverGetVersion", 2020, false, (function *)cuDriverGetVersion},
    {"cuGetProcAddress", 11030, false, (function *)cuGetProcAddress},
    {"cuGetProcAddress", 12000, false, (function *)cuGetProcAddress_v2},
};

int cuGetProcAddress_v2(const char *name, void **out, int version, unsigned long long flags,
                        int *found)
{
    const bool per_thread = (flags & 2) != 0;
    bool has_name = false;
    function *address = NULL;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        if (strcmp(functions[i].name, name) != 0)
            continue;
        has_name = true;
        if (functions[i].version <= version && (per_thread || !functions[i].per_thread))
            address = functions[i].address;
    }
    if (found)
        *found = address ? 0 : has_name ? 2 : 1;
    memcpy(out, &address, sizeof address);
    return address ? OK : NOT_FOUND;
}
