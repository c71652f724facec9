/* Owns what of the driver's memory is the process's session's: allocations that its pool serves,
 * and frees of its blocks. Must not know how a pool finds memory. */
#include <dlfcn.h>

#include "preload/preload.h"
#include "rebatch/cuda.h"
#include "rebatch/current.h"

/* How deep this thread is in calls of the library: callbacks of a pool may allocate, too. */
static _Thread_local unsigned inside __attribute__((tls_model("initial-exec")));

/* ---- the session ---- */

/* A program that has a part of the library inside, and shows it to others, must not be mixed with
 * the rest of another copy. Threads may look at the same time: a lock here could be waited for by
 * one that has the loader's. */
static bool is_whole(void)
{
    enum { UNKNOWN, WHOLE, MIXED };
    static atomic_int known;
    void *const functions[] = {
#define ADDRESS(name) (void *)(uintptr_t)(name)
        ADDRESS(rebatch_get_current),
        ADDRESS(rebatch_get_pool),
        ADDRESS(rebatch_pool_device),
        ADDRESS(rebatch_alloc),
        ADDRESS(rebatch_device_ordinal),
        ADDRESS(rebatch_pool_alloc),
        ADDRESS(rebatch_free),
        ADDRESS(rebatch_free_on),
        ADDRESS(rebatch_pool_free),
        ADDRESS(rebatch_pool_block_bytes)
#undef ADDRESS
    };
    Dl_info first, info;
    int answer = atomic_load(&known);
    if (answer != UNKNOWN)
        return answer == WHOLE;
    answer = dladdr(functions[0], &first) ? WHOLE : MIXED;
    for (size_t i = 1; i < sizeof functions / sizeof *functions; i++)
        if (!dladdr(functions[i], &info) || info.dli_fbase != first.dli_fbase)
            answer = MIXED;
    atomic_store(&known, answer);
    return answer == WHOLE;
}

static rebatch *session(void)
{
    rebatch *const rb = rebatch_get_current();
    return rb && is_whole() ? rb : NULL;
}

/* The session, if it is on the GPU that is current in this thread, and did not make this call. A
 * device of the driver has the number of its ordinal. */
static rebatch *session_here(void)
{
    rebatch *const rb = inside ? NULL : session();
    int ours;
    if (!rb || rebatch_device_ordinal(&ours, rebatch_pool_device(rebatch_get_pool(rb))))
        return NULL;
    return rbi_driver_current_device() == ours ? rb : NULL;
}

static int code_of(rebatch_status status)
{
    switch (status) {
    case REBATCH_OK:
        return RBI_CU_SUCCESS;
    case REBATCH_OOM:
    case REBATCH_E_EXHAUSTED:
    case REBATCH_E_TORN:
        return RBI_CU_OUT_OF_MEMORY;
    case REBATCH_E_INVALID:
        return RBI_CU_INVALID_VALUE;
    case REBATCH_E_NO_DEVICE:
        return RBI_CU_NO_DEVICE;
    case REBATCH_E_UNSUPPORTED:
        return RBI_CU_NOT_SUPPORTED;
    case REBATCH_E_DEVICE_LOST:
        return RBI_CU_LAUNCH_FAILED;
    default:
        return RBI_CU_UNKNOWN;
    }
}

/* ---- allocations ---- */

/* Memory that is allocated while a graph is captured is the graph's. */
static bool is_capturing(cu_stream stream)
{
    static _Atomic(rbi_function) known;
    rbi_function function = atomic_load(&known);
    int status = 0;
    if (!function) {
        function = rbi_driver_find_other("cuStreamIsCapturing");
        atomic_store(&known, function);
    }
    return function && (((int (*)(cu_stream, int *))function)(stream, &status) || status);
}

/* The thread's default stream has the same handle in all threads, so any stream may use what is
 * allocated on it. */
static bool serve_alloc(int *code, rebatch *rb, cu_pointer *out, size_t bytes, cu_stream stream,
                        bool is_for_any_stream)
{
    void *memory = NULL;
    inside++;
    const rebatch_status status =
        is_for_any_stream
            ? rebatch_alloc(&memory, rb, bytes)
            : rebatch_pool_alloc(&memory, rebatch_get_pool(rb), bytes, (rebatch_stream)stream, 0);
    inside--;
    if (status == REBATCH_OK)
        *out = (uintptr_t)memory;
    *code = code_of(status);
    return true;
}

bool rbi_pool_serves_alloc(int *code, cu_pointer *out, size_t bytes)
{
    rebatch *const rb = out && bytes ? session_here() : NULL;
    return rb && serve_alloc(code, rb, out, bytes, NULL, true);
}

bool rbi_pool_serves_alloc_on(int *code, cu_pointer *out, size_t bytes, cu_stream stream)
{
    rebatch *const rb = out && bytes ? session_here() : NULL;
    return rb && !is_capturing(stream) &&
           serve_alloc(code, rb, out, bytes, stream, stream == RBI_CU_STREAM_PER_THREAD);
}

/* ---- frees ---- */

/* The driver's own memory, or none at all, is not waited for. */
static rebatch_status free_block(rebatch *rb, void *memory)
{
    rebatch_pool *const pool = rebatch_get_pool(rb);
    size_t bytes;
    if (rebatch_pool_block_bytes(&bytes, pool, memory) == REBATCH_OK)
        return rebatch_free(rb, memory);
    return rebatch_pool_free(pool, memory); /* which knows blocks that were taken back */
}

static bool serve_free(int *code, cu_pointer memory, const cu_stream *stream)
{
    rebatch *const rb = memory ? session() : NULL;
    void *const pointer = (void *)(uintptr_t)memory;
    if (!rb)
        return false;
    inside++;
    const rebatch_status status =
        stream ? rebatch_free_on(rb, pointer, (rebatch_stream)*stream) : free_block(rb, pointer);
    inside--;
    *code = code_of(status);
    return status != REBATCH_E_INVALID;
}

bool rbi_pool_serves_free(int *code, cu_pointer memory)
{
    return serve_free(code, memory, NULL);
}

bool rbi_pool_serves_free_on(int *code, cu_pointer memory, cu_stream stream)
{
    return serve_free(code, memory, stream == RBI_CU_STREAM_PER_THREAD ? NULL : &stream);
}
