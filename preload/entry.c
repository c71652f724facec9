/* Owns what a program calls instead of the driver's functions for memory.
 * Must not know what a cap, a failure on purpose or a pool is.
 *
 * An output is written by the driver, or on success. */
#include <string.h>

#include "preload/preload.h"

#define PITCH_BYTES 512

/* ---- allocations ---- */

/* Has the driver allocate, unless that is to fail; `key` is where the result is then. */
#define ALLOCATE(symbol, bytes, stream, device, kind, key, ...)                                    \
    do {                                                                                           \
        rbi_##symbol##_type *const real = RBI_REAL(symbol);                                        \
        struct rbi_request request;                                                                \
        if (!real)                                                                                 \
            return RBI_CU_NOT_FOUND;                                                               \
        if (!rbi_ledger_begin(&request, bytes, stream, device))                                    \
            return RBI_CU_OUT_OF_MEMORY;                                                           \
        const int real_code = real(__VA_ARGS__);                                                   \
        rbi_ledger_end(&request, real_code, real_code ? 0 : (key), kind);                          \
        return real_code;                                                                          \
    } while (0)

/* NULL for the process's default stream. */
static cu_stream stream_of(cu_stream stream, bool per_thread)
{
    if (!stream && per_thread)
        return RBI_CU_STREAM_PER_THREAD;
    return stream == RBI_CU_STREAM_LEGACY ? NULL : stream;
}

/* The first form's pointers have 32 bits. */
static uint32_t first_of(const void *out)
{
    uint32_t first;
    memcpy(&first, out, sizeof first);
    return first;
}

int cuMemAlloc(cu_pointer *out, size_t bytes)
{
    ALLOCATE(cuMemAlloc, (uint32_t)bytes, NULL, -1, RBI_HOLDING_POINTER, first_of(out), out, bytes);
}

int cuMemAlloc_v2(cu_pointer *out, size_t bytes)
{
    int code;
    if (rbi_pool_serves_alloc(&code, out, bytes)) {
        rbi_ledger_note_pool(code, code ? 0 : *out, bytes, NULL);
        return code;
    }
    ALLOCATE(cuMemAlloc_v2, bytes, NULL, -1, RBI_HOLDING_POINTER, *out, out, bytes);
}

/* The driver's pitch is known afterwards only. What it wastes is counted as far as that is known
 * before. */
static uint64_t pitched(size_t width, size_t height)
{
    size_t bytes;
    return rbi_round_up(width, PITCH_BYTES, &bytes) && rbi_mul(bytes, height, &bytes) ? bytes : 0;
}

int cuMemAllocPitch_v2(cu_pointer *out, size_t *pitch, size_t width, size_t height,
                       unsigned element)
{
    ALLOCATE(cuMemAllocPitch_v2, pitched(width, height), NULL, -1, RBI_HOLDING_POINTER, *out, out,
             pitch, width, height, element);
}

static bool pool_serves_async(int *code, cu_pointer *out, size_t bytes, cu_stream stream)
{
    if (!rbi_pool_serves_alloc_on(code, out, bytes, stream))
        return false;
    rbi_ledger_note_pool(*code, *code ? 0 : *out, bytes, stream);
    return true;
}

int cuMemAllocAsync(cu_pointer *out, size_t bytes, cu_stream stream)
{
    int code;
    if (pool_serves_async(&code, out, bytes, stream_of(stream, false)))
        return code;
    ALLOCATE(cuMemAllocAsync, bytes, stream_of(stream, false), -1, RBI_HOLDING_POINTER, *out, out,
             bytes, stream);
}

int cuMemAllocAsync_ptsz(cu_pointer *out, size_t bytes, cu_stream stream)
{
    int code;
    if (pool_serves_async(&code, out, bytes, stream_of(stream, true)))
        return code;
    ALLOCATE(cuMemAllocAsync_ptsz, bytes, stream_of(stream, true), -1, RBI_HOLDING_POINTER, *out,
             out, bytes, stream);
}

int cuMemAllocFromPoolAsync(cu_pointer *out, size_t bytes, cu_pool pool, cu_stream stream)
{
    ALLOCATE(cuMemAllocFromPoolAsync, bytes, stream_of(stream, false), -1, RBI_HOLDING_POINTER,
             *out, out, bytes, pool, stream);
}

int cuMemAllocFromPoolAsync_ptsz(cu_pointer *out, size_t bytes, cu_pool pool, cu_stream stream)
{
    ALLOCATE(cuMemAllocFromPoolAsync_ptsz, bytes, stream_of(stream, true), -1, RBI_HOLDING_POINTER,
             *out, out, bytes, pool, stream);
}

/* Memory of the host is none of a device's. */
static bool is_on_device(const struct cu_memory_kind *kind)
{
    enum { LOCATION_DEVICE = 1 };
    return kind && kind->location.type == LOCATION_DEVICE && kind->location.id >= 0;
}

int cuMemCreate(unsigned long long *out, size_t bytes, const struct cu_memory_kind *kind,
                unsigned long long flags)
{
    const bool counts = is_on_device(kind);
    ALLOCATE(cuMemCreate, counts ? bytes : 0, NULL, counts ? kind->location.id : -1,
             RBI_HOLDING_PHYSICAL, *out, out, bytes, kind, flags);
}

/* ---- frees ---- */

/* Frees, by the session's pool if `served` says so in `code`, else by the driver. Takes note
 * before: once it is freed, the address may be another's. */
#define FREE(symbol, key, kind, stream, served, ...)                                               \
    do {                                                                                           \
        rbi_##symbol##_type *const real = RBI_REAL(symbol);                                        \
        int code = RBI_CU_NOT_FOUND;                                                               \
        if (!real)                                                                                 \
            return code;                                                                           \
        const struct rbi_holding held = rbi_ledger_take(key, kind, stream);                        \
        if (!(served))                                                                             \
            code = real(__VA_ARGS__);                                                              \
        if (code)                                                                                  \
            rbi_ledger_put_back(&held);                                                            \
        return code;                                                                               \
    } while (0)

int cuMemFree(cu_pointer memory)
{
    FREE(cuMemFree, (uint32_t)memory, RBI_HOLDING_POINTER, NULL, false, memory);
}

int cuMemFree_v2(cu_pointer memory)
{
    FREE(cuMemFree_v2, memory, RBI_HOLDING_POINTER, NULL, rbi_pool_serves_free(&code, memory),
         memory);
}

int cuMemFreeAsync(cu_pointer memory, cu_stream stream)
{
    const cu_stream on = stream_of(stream, false);
    FREE(cuMemFreeAsync, memory, RBI_HOLDING_POINTER, &on,
         rbi_pool_serves_free_on(&code, memory, on), memory, stream);
}

int cuMemFreeAsync_ptsz(cu_pointer memory, cu_stream stream)
{
    const cu_stream on = stream_of(stream, true);
    FREE(cuMemFreeAsync_ptsz, memory, RBI_HOLDING_POINTER, &on,
         rbi_pool_serves_free_on(&code, memory, on), memory, stream);
}

int cuMemRelease(unsigned long long physical)
{
    FREE(cuMemRelease, physical, RBI_HOLDING_PHYSICAL, NULL, false, physical);
}

/* ---- what there is ---- */

int cuMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    rbi_cuMemGetInfo_type *const real = RBI_REAL(cuMemGetInfo);
    if (!real)
        return RBI_CU_NOT_FOUND;
    const int code = real(free_bytes, total_bytes);
    if (code || !free_bytes || !total_bytes)
        return code;
    uint64_t free_now = first_of(free_bytes), total = first_of(total_bytes);
    rbi_ledger_lower(&free_now, &total);
    const uint32_t lowered[] = {(uint32_t)free_now, (uint32_t)total};
    memcpy(free_bytes, &lowered[0], sizeof lowered[0]);
    memcpy(total_bytes, &lowered[1], sizeof lowered[1]);
    return code;
}

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    rbi_cuMemGetInfo_v2_type *const real = RBI_REAL(cuMemGetInfo_v2);
    if (!real)
        return RBI_CU_NOT_FOUND;
    const int code = real(free_bytes, total_bytes);
    if (code || !free_bytes || !total_bytes)
        return code;
    uint64_t free_now = *free_bytes, total = *total_bytes;
    rbi_ledger_lower(&free_now, &total);
    *free_bytes = (size_t)free_now;
    *total_bytes = (size_t)total;
    return code;
}
