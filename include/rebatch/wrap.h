/** @file wrap.h
 *  Running an existing CUDA trainer with rebatch.
 *
 *  With this header, the CUDA runtime's allocations come from a session's pool, the program's error
 *  check leaves the step when memory runs out, and the program's own functions are the step. It is
 *  not part of rebatch.h, because it needs CUDA's headers.
 *
 *  Include it after all other headers, in each source file that allocates or frees device memory.
 *  It redirects calls by macros, so code before it, such as a function in an earlier header, calls
 *  CUDA's own functions, and so do libraries. Where such code frees memory of the pool, or is to
 *  allocate from it, preload librebatch_wrap.so or link with it (docs/run.md): then all code of the
 *  process uses the pool, with this header or without. New code uses the API (step.h) and needs
 *  neither.
 *
 *  @code
 *  #include <rebatch/wrap.h>             // cudaMalloc, cudaFree and others use the pool
 *
 *  void check(cudaError_t code) {
 *      if (code == cudaSuccess)
 *          return;
 *      rebatch_escape_on_oom(code);      // within a step, does not return from an OOM
 *      exit(1);                          // as before
 *  }
 *  check(rebatch_wrap_guard(&rng));      // what training changes beside gradients and parameters
 *  check(rebatch_wrap_step(batch, zero_gradients, train_on, update,
 *                          REBATCH_DECLARES_MUTATION));
 *  check(rebatch_wrap_map(test_samples, evaluate));
 *  @endcode
 *
 *  The first call that needs a session opens it, on the GPU that is current then. A program with
 *  settings of its own, or with options, opens it before that (rebatch_wrap_open()).
 *
 *  rebatch_wrap_check() is such a check. The functions for C++ are in wrap_step.h, which this
 *  header includes. In C, call rebatch_step(), rebatch_map() and rebatch_guard() with
 *  rebatch_get_current().
 *
 *  train_on(first, count) and update() call rebatch_wrap_mutating() where they begin to change
 *  gradients and parameters. The flag REBATCH_DECLARES_MUTATION says that they do. An OOM before
 *  that call costs at most one micro-batch. Without the calls and the flag, the effective batch
 *  runs again, and an OOM in update() ends the training (step.h).
 *
 *  The redirected calls behave as follows:
 *  - Memory comes from the pool, and is taken back when its attempt fails, even if the program
 *    still has the pointer. A pointer that outlives its attempt must be assigned again in the next
 *    attempt, or be guarded (rebatch_guard()). Freeing memory that was taken back is no error.
 *  - Any stream may use memory of cudaMalloc immediately. cudaFree waits for the whole device, as
 *    CUDA's own does; cudaFreeAsync does not wait.
 *  - An allocation opens the session if the process has had none. If that fails, so does the
 *    allocation, and the message is on standard error.
 *  - CUDA's own functions are called after rebatch_wrap_close(), when another GPU is current, and
 *    for `(cudaMalloc)(...)` in parentheses. Not redirected at all are function pointers, files
 *    that do not include this header, and other allocation functions such as cudaMallocManaged and
 *    cudaMallocPitch.
 *  - cudaFree passes a pointer that is not from the pool to CUDA. CUDA's own cudaFree, called in
 *    code without this header, cannot free memory of the pool, unless the process has
 *    librebatch_wrap.so.
 *  - A failed call returns a cudaError_t, cudaErrorMemoryAllocation for an OOM, and
 *    rebatch_last_error() has the message. cudaGetLastError() does not return the error.
 *  - The per-thread default stream (cudaStreamPerThread, --default-stream per-thread) has the same
 *    handle in all threads. On it, the Async calls behave like cudaMalloc and cudaFree.
 *  - Device state guarded by rebatch_guard() is copied on the session's stream. Work of other
 *    streams that changes the state must be done when a function of the step begins, and when it
 *    ends.
 *  - The calls are not for stream capture, nor for device code. Do not destroy a stream on which
 *    memory was allocated or freed before rebatch_wrap_close().
 *
 *  Any thread may make the redirected calls; one thread at a time runs steps. What other threads
 *  allocate during a step stays when an attempt is taken back. A thread that works for the step
 *  calls rebatch_join(rebatch_get_current()).
 *
 *  rebatch_escape_on_oom() leaves the step's function by longjmp(). Where there are objects with
 *  destructors between that function and the program's error check, call
 *  rebatch_wrap_throw_on_oom(), which leaves it by an exception. */
#ifndef REBATCH_WRAP_H
#define REBATCH_WRAP_H

#include <cuda_runtime.h>
#include <stdio.h>

#include "rebatch/check.h"
#include "rebatch/cuda.h"
#include "rebatch/current.h"
#include "rebatch/step_in_place.h"

/* ---- the session ---- */

/** Translate a status into CUDA's code. rebatch_from_cuda() translates it back.
 *  @param status  any status
 *  @return the code */
static inline cudaError_t rebatch_wrap_code(rebatch_status status)
{
    switch (status) {
    case REBATCH_OK:
        return cudaSuccess;
    case REBATCH_OOM:
    case REBATCH_E_EXHAUSTED:
    case REBATCH_E_TORN:
        return cudaErrorMemoryAllocation;
    case REBATCH_E_INVALID:
        return cudaErrorInvalidValue;
    case REBATCH_E_NO_DEVICE:
        return cudaErrorNoDevice;
    case REBATCH_E_UNSUPPORTED:
        return cudaErrorNotSupported;
    case REBATCH_E_DEVICE_LOST:
        return cudaErrorLaunchFailure;
    default:
        return cudaErrorUnknown;
    }
}

/** An on_event that writes each event to standard error, of whatever level it is given.
 *  @param event  the event
 *  @param user   unused */
static inline void rebatch_wrap_print(const rebatch_event *event, void *user)
{
    char line[512];
    (void)user;
    (void)rebatch_event_format(line, sizeof line, event);
    (void)fprintf(stderr, "rebatch: %s\n", line);
}

/** @cond internal */
static inline int rebatch_wrap_last_error(void)
{
    return (int)cudaGetLastError();
}

/* The process's session, opened on the current GPU. Without settings, and when it was closed, there
 * may be none: *out is NULL. */
static inline rebatch_status rebatch_wrap_open_here(rebatch **out, const char *settings)
{
    rebatch_cuda_options gpu = REBATCH_CUDA_OPTIONS_INIT;
    const cudaError_t code = cudaGetDevice(&gpu.ordinal);
    *out = NULL;
    if (code != cudaSuccess)
        return rebatch_from_cuda(NULL, (int)code);
    gpu.take_last_error = rebatch_wrap_last_error;
    return rebatch_open_current(out, &gpu, settings);
}
/** @endcond */

/** @cond internal */
/* CUDA's codes cannot say what rebatch means, so its sentence goes to standard error, unless an
 * event has said it. */
static inline cudaError_t rebatch_wrap_told(rebatch_status status)
{
    if (status && status != REBATCH_E_EXHAUSTED && status != REBATCH_E_TORN)
        (void)fprintf(stderr, "rebatch: %s\n", rebatch_last_error());
    return rebatch_wrap_code(status);
}
/** @endcond */

/** Open a session on the current GPU and make it the process's. A program that has no settings of
 *  its own need not call it: the first allocation, guard, step or map does so. To open a session
 *  with rebatch_options, call rebatch_open() and rebatch_set_current() instead.
 *  @param settings  such as "batch.smallest = 4; memory.headroom = 1GiB" (rebatch_open_default());
 *                   NULL: none. What the file of REBATCH_CONFIG or a REBATCH_* variable sets
 *                   overrides them. Events are on standard error
 *  @return cudaSuccess; cudaErrorUnknown when the process has a session already; otherwise the code
 *          of the status with which opening the device or the session failed. After a failure
 *          nothing is open, and the message is on standard error */
static inline cudaError_t rebatch_wrap_open(const char *settings)
{
    rebatch *rb;
    return rebatch_wrap_told(rebatch_wrap_open_here(&rb, settings ? settings : ""));
}

/** Close the process's session, and the device that was opened with it, and release all memory of
 *  the pool. Freeing such memory afterwards is an error of CUDA's cudaFree. Without a session
 *  nothing happens, and the next allocation opens none. The call is refused from within a step:
 *  rebatch_last_error() says so. No other thread may be allocating. */
static inline void rebatch_wrap_close(void)
{
    rebatch_close(rebatch_get_current());
}

/** rebatch_mutating() for the process's session. */
static inline void rebatch_wrap_mutating(void)
{
    rebatch_mutating(rebatch_get_current());
}

/** rebatch_remake_buffers() for the process's session, which is done with a change of what buffers
 *  depend on beside the micro-batch size, for example of the size of the images.
 *  @return cudaSuccess, also without a session; cudaErrorUnknown from within a step */
static inline cudaError_t rebatch_wrap_remake_buffers(void)
{
    rebatch *const rb = rebatch_get_current();
    return rb ? rebatch_wrap_code(rebatch_remake_buffers(rb)) : cudaSuccess;
}

/** rebatch_get_batch() for the process's session: what a trainer that divides by the samples of its
 *  batch divides by.
 *  @param otherwise  what is returned outside of a step or map
 *  @return samples of the effective batch */
static inline size_t rebatch_wrap_batch(size_t otherwise)
{
    return rebatch_get_batch(rebatch_get_current(), otherwise);
}

/** @cond internal */
/* ---- the redirected calls ---- */

/* The process's session, which is opened if there was none; NULL in *out: it was closed. */
static inline cudaError_t rebatch_wrap_session(rebatch **out)
{
    *out = rebatch_get_current();
    return *out ? cudaSuccess : rebatch_wrap_told(rebatch_wrap_open_here(out, NULL));
}

/* The session, if it is on the GPU that is current in this thread. */
static inline cudaError_t rebatch_wrap_here(rebatch **out)
{
    int ours, here;
    const cudaError_t code = rebatch_wrap_session(out);
    if (!*out)
        return code;
    (void)rebatch_device_ordinal(&ours, rebatch_pool_device(rebatch_get_pool(*out)));
    if (cudaGetDevice(&here) != cudaSuccess || here != ours)
        *out = NULL;
    return cudaSuccess;
}

static inline bool rebatch_wrap_is_per_thread(cudaStream_t stream)
{
#ifdef __CUDART_API_PER_THREAD_DEFAULT_STREAM
    return !stream || stream == cudaStreamPerThread;
#else
    return stream == cudaStreamPerThread;
#endif
}

static inline cudaError_t rebatch_wrap_malloc(void **out, size_t bytes)
{
    rebatch *rb;
    const cudaError_t code = rebatch_wrap_here(&rb);
    if (code != cudaSuccess)
        return code;
    return rb ? rebatch_wrap_code(rebatch_alloc(out, rb, bytes)) : cudaMalloc(out, bytes);
}

static inline cudaError_t rebatch_wrap_malloc_async(void **out, size_t bytes, cudaStream_t stream)
{
    rebatch *rb;
    const cudaError_t code = rebatch_wrap_here(&rb);
    if (code != cudaSuccess)
        return code;
    if (!rb)
        return cudaMallocAsync(out, bytes, stream);
    return rebatch_wrap_code(
        rebatch_wrap_is_per_thread(stream)
            ? rebatch_alloc(out, rb, bytes)
            : rebatch_pool_alloc(out, rebatch_get_pool(rb), bytes, (rebatch_stream)stream, 0));
}

static inline cudaError_t rebatch_wrap_free(void *pointer)
{
    rebatch *const rb = rebatch_get_current();
    const rebatch_status status = rb ? rebatch_free(rb, pointer) : REBATCH_E_INVALID;
    return status == REBATCH_E_INVALID ? cudaFree(pointer) : rebatch_wrap_code(status);
}

static inline cudaError_t rebatch_wrap_free_async(void *pointer, cudaStream_t stream)
{
    rebatch *const rb = rebatch_get_current();
    if (rb && rebatch_wrap_is_per_thread(stream)) {
        const rebatch_status status = rebatch_free(rb, pointer);
        return status == REBATCH_E_INVALID ? cudaFreeAsync(pointer, stream)
                                           : rebatch_wrap_code(status);
    }
    const rebatch_status status =
        rb ? rebatch_free_on(rb, pointer, (rebatch_stream)stream) : REBATCH_E_INVALID;
    return status == REBATCH_E_INVALID ? cudaFreeAsync(pointer, stream) : rebatch_wrap_code(status);
}
/** @endcond */

#ifdef __cplusplus
/** @cond internal */
/* The runtime's overloads for C++. */
template <class T> static inline cudaError_t rebatch_wrap_malloc(T **out, size_t bytes)
{
    return rebatch_wrap_malloc((void **)(void *)out, bytes);
}

template <class T>
static inline cudaError_t rebatch_wrap_malloc_async(T **out, size_t bytes, cudaStream_t stream)
{
    return rebatch_wrap_malloc_async((void **)(void *)out, bytes, stream);
}

template <class T>
static inline cudaError_t rebatch_wrap_malloc_async(T **out, size_t bytes, cudaMemPool_t pool,
                                                    cudaStream_t stream)
{
    return cudaMallocFromPoolAsync((void **)(void *)out, bytes, pool, stream);
}
/** @endcond */

#include "rebatch/wrap_step.h"
#endif

/** @cond internal */
/* From here on these calls use the pool. A call in parentheses is CUDA's own. */
#undef cudaMallocAsync
#undef cudaFreeAsync
#define cudaMalloc(...) rebatch_wrap_malloc(__VA_ARGS__)
#define cudaFree(...) rebatch_wrap_free(__VA_ARGS__)
#define cudaMallocAsync(...) rebatch_wrap_malloc_async(__VA_ARGS__)
#define cudaFreeAsync(...) rebatch_wrap_free_async(__VA_ARGS__)
/** @endcond */

#endif
