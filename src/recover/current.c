/* Owns which session is the process's, and memory that any stream may use.
 * Must not know CUDA's headers, nor who goes by the process's session. */
#include "rebatch/current.h"

#include "rebatch/cuda.h"
#include "recover/recover.h"

static _Atomic(rebatch *) current;
static atomic_bool was_set;

rebatch_status rebatch_set_current(rebatch *rb)
{
    if (!rb) {
        atomic_store(&current, NULL);
        return REBATCH_OK;
    }
    rebatch *none = NULL;
    if (!atomic_compare_exchange_strong(&current, &none, rb) && none != rb)
        return rbi_error(REBATCH_E_STATE, "the process has a session already");
    rb->any_stream = true;
    atomic_store(&was_set, true);
    return REBATCH_OK;
}

bool rbi_current_was_set(void)
{
    return atomic_load(&was_set);
}

rebatch *rebatch_get_current(void)
{
    return atomic_load(&current);
}

void rbi_current_forget(rebatch *rb)
{
    (void)atomic_compare_exchange_strong(&current, &rb, NULL);
}

static void escape_on(rebatch_status (*translate)(rebatch_device *device, int code), int code)
{
    rebatch *const rb = rebatch_get_current();
    if (rbi_callback_is_running(rb) && translate(rb->device, code) == REBATCH_OOM)
        (void)rebatch_escape(rb, REBATCH_OOM);
}

void rebatch_escape_on_oom(int code)
{
    escape_on(rebatch_from_cuda, code);
}

void rebatch_escape_on_cublas_oom(int code)
{
    escape_on(rebatch_from_cublas, code);
}

void rebatch_escape_on_cudnn_oom(int code)
{
    escape_on(rebatch_from_cudnn, code);
}

/* Blocks of the session's stream go round there while its work is under way, unless they were freed
 * when no work was. So what comes out of the pool may be in use until that stream was waited for
 * once after the last free that did not wait. */
static rebatch_status wait_for_frees(rebatch *rb)
{
    const uint64_t frees = atomic_load(&rb->frees);
    if (atomic_load(&rb->frees_waited) == frees)
        return REBATCH_OK;
    const rebatch_status status = rebatch_stream_synchronize(rb->device, rb->options.stream);
    if (!status)
        atomic_store(&rb->frees_waited, frees);
    return status;
}

rebatch_status rebatch_alloc(void **out, rebatch *rb, size_t bytes)
{
    if (out)
        *out = NULL;
    if (!rb)
        return rbi_error(REBATCH_E_INVALID, "rb is NULL");
    rebatch_status status = rebatch_pool_alloc(out, rb->pool, bytes, rb->options.stream, 0);
    if (status)
        return status;
    status = wait_for_frees(rb);
    if (status) {
        (void)rebatch_pool_free(rb->pool, *out);
        *out = NULL;
    }
    return status;
}

/* Code that does not look at what it gets must not go on without it. */
void *rebatch_alloc_or_escape(rebatch *rb, size_t bytes)
{
    void *memory;
    const rebatch_status status = rebatch_alloc(&memory, rb, bytes);
    if (status && rebatch_can_escape(rb))
        (void)rebatch_escape(rb, status);
    return memory;
}

rebatch_status rebatch_free(rebatch *rb, void *pointer)
{
    if (!rb)
        return rbi_error(REBATCH_E_INVALID, "rb is NULL");
    if (!pointer)
        return REBATCH_OK;
    const rebatch_status status = rbi_device_synchronize(rb->device);
    return status ? status : rebatch_pool_free(rb->pool, pointer);
}

/* Counted first, so that whoever gets the block next finds that it must wait. */
rebatch_status rebatch_free_on(rebatch *rb, void *pointer, rebatch_stream stream)
{
    if (!rb)
        return rbi_error(REBATCH_E_INVALID, "rb is NULL");
    if (!pointer)
        return REBATCH_OK;
    if (!rbi_device_stream_is_valid(rb->device, stream))
        return rbi_error(REBATCH_E_INVALID, "stream %p is not a stream of device %s",
                         (void *)stream, rb->device->name);
    atomic_fetch_add(&rb->frees, 1);
    const rebatch_status status = rebatch_pool_use_on(rb->pool, pointer, stream);
    if (status && status != REBATCH_E_INVALID)
        return status;
    return rebatch_pool_free(rb->pool, pointer); /* which knows blocks that were taken back */
}
