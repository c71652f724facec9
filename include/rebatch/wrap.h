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
 *  check(rebatch_wrap_open(NULL));       // once, before the first allocation
 *  check(rebatch_wrap_step(batch, zero_gradients, train_on, update, REBATCH_DECLARES_MUTATION));
 *  @endcode
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
 *  - CUDA's own functions are called when there is no session (before rebatch_wrap_open() and after
 *    rebatch_wrap_close()), when another GPU is current, and for `(cudaMalloc)(...)` in
 *    parentheses. Not redirected at all are function pointers, files that do not include this
 *    header, and other allocation functions such as cudaMallocManaged and cudaMallocPitch.
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
 *  rebatch_escape_on_oom() leaves the step's function by longjmp(). Between that function and the
 *  program's error check there must be no object whose destructor has to run. */
#ifndef REBATCH_WRAP_H
#define REBATCH_WRAP_H

#include <cuda_runtime.h>
#include <stdio.h>

#include "rebatch/cuda.h"
#include "rebatch/current.h"

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
/** @endcond */

/** Open a session on the current GPU and make it the process's session. To open it in
 *  another way, call rebatch_open() and rebatch_set_current() instead.
 *  @param options  as for rebatch_open(): NULL means settings from REBATCH_CONFIG and REBATCH_*
 *                  variables, and events on standard error. With `learn` the first steps find the
 *                  micro-batch size
 *  @return cudaSuccess; cudaErrorUnknown when the process has a session already; otherwise the code
 *          of the status with which opening the device or the session failed. After a failure
 *          nothing is open */
static inline cudaError_t rebatch_wrap_open(const rebatch_options *options)
{
    rebatch_cuda_options cuda = REBATCH_CUDA_OPTIONS_INIT;
    rebatch_device *device = NULL;
    rebatch *rb = NULL;
    const cudaError_t code = cudaGetDevice(&cuda.ordinal);
    if (code != cudaSuccess)
        return code;
    cuda.take_last_error = rebatch_wrap_last_error;
    rebatch_status status = rebatch_device_open_cuda(&device, &cuda);
    if (!status)
        status = rebatch_open(&rb, device, options);
    if (!status)
        status = rebatch_set_current(rb);
    if (status) {
        rebatch_close(rb);
        rebatch_device_close(device);
    }
    return rebatch_wrap_code(status);
}

/** Close the process's session and its device, and release all memory of the pool. Freeing such
 *  memory afterwards is an error of CUDA's cudaFree. Without a session nothing happens. The call is
 *  refused from within a step: rebatch_last_error() says so. No other thread may be allocating. */
static inline void rebatch_wrap_close(void)
{
    rebatch *const rb = rebatch_get_current();
    rebatch_device *const device = rb ? rebatch_pool_device(rebatch_get_pool(rb)) : NULL;
    rebatch_close(rb);
    if (rb && rebatch_get_current() == rb)
        return; /* refused, and still in use */
    rebatch_device_close(device);
}

/** rebatch_mutating() for the process's session. */
static inline void rebatch_wrap_mutating(void)
{
    rebatch_mutating(rebatch_get_current());
}

/** @cond internal */
/* ---- the redirected calls ---- */

/* The session, if it is on the GPU that is current in this thread. */
static inline rebatch *rebatch_wrap_here(void)
{
    rebatch *const rb = rebatch_get_current();
    int ours, here;
    if (!rb)
        return NULL;
    (void)rebatch_device_ordinal(&ours, rebatch_pool_device(rebatch_get_pool(rb)));
    return cudaGetDevice(&here) == cudaSuccess && here == ours ? rb : NULL;
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
    rebatch *const rb = rebatch_wrap_here();
    return rb ? rebatch_wrap_code(rebatch_alloc(out, rb, bytes)) : cudaMalloc(out, bytes);
}

static inline cudaError_t rebatch_wrap_malloc_async(void **out, size_t bytes, cudaStream_t stream)
{
    rebatch *const rb = rebatch_wrap_here();
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
#include <type_traits>
#include <utility>

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

/* ---- the step ---- */

/* The callbacks of a step that consists of functions. */
template <class Zero, class Train, class Update, class Resize> struct rebatch_wrap_functions {
    Zero &zero_grad;
    Train &train;
    Update &update;
    Resize &resize;
    bool declares;

    static rebatch_wrap_functions &of(void *user)
    {
        return **static_cast<rebatch_wrap_functions **>(user);
    }
    static rebatch_wrap_functions &begin(void *user)
    {
        rebatch_wrap_functions &f = of(user);
        if (!f.declares)
            rebatch_wrap_mutating();
        return f;
    }
    static rebatch_status call_zero_grad(void *user)
    {
        begin(user).zero_grad();
        return REBATCH_OK;
    }
    static rebatch_status call_train(const rebatch_microbatch *mb, void *user)
    {
        begin(user).train(mb->first, mb->count);
        return REBATCH_OK;
    }
    static rebatch_status call_update(void *user)
    {
        begin(user).update();
        return REBATCH_OK;
    }
    static rebatch_status call_resize(size_t micro_batch, void *user)
    {
        of(user).resize(micro_batch);
        return REBATCH_OK;
    }
};

/* Where functions are called through: the session takes buffers for those of the caller that passes
 * the same address again, so it is the same for the same resize. A lambda is known by its type. */
template <class Functions, class Resize>
static inline Functions **rebatch_wrap_place(Resize &resize)
{
    static Functions *places[2];
    static const void *known;
    static int place;
    const void *const identity =
        std::is_function<Resize>::value ? (const void *)&resize : (const void *)&known;
    place = identity == known ? place : !place;
    known = identity;
    return &places[place];
}

struct rebatch_wrap_no_resize {
    void operator()(size_t) const
    {
    }
};

template <class Zero, class Train, class Update, class Resize>
static inline cudaError_t rebatch_wrap_run(size_t batch, Zero &zero_grad, Train &train,
                                           Update &update, Resize &resize, bool resizes,
                                           uint32_t flags, rebatch_step_report *report)
{
    static_assert(std::is_void<decltype(zero_grad())>::value &&
                      std::is_void<decltype(train(batch, batch))>::value &&
                      std::is_void<decltype(update())>::value &&
                      std::is_void<decltype(resize(batch))>::value,
                  "the functions must return nothing: use rebatch_step() for others");
    typedef rebatch_wrap_functions<Zero, Train, Update, Resize> functions;
    functions f = {zero_grad, train, update, resize, (flags & REBATCH_DECLARES_MUTATION) != 0};
    functions **const user = rebatch_wrap_place<functions>(resize);
    rebatch_step_ops ops = REBATCH_STEP_OPS_INIT;
    ops.zero_grad = functions::call_zero_grad;
    ops.forward_backward = functions::call_train;
    ops.optimizer_step = functions::call_update;
    ops.flags = REBATCH_DECLARES_MUTATION;
    ops.resize = resizes ? functions::call_resize : NULL;
    *user = &f;
    return rebatch_wrap_code(rebatch_step(rebatch_get_current(), &ops, batch, user, report));
}
/** @endcond */

/** rebatch_step() for the process's session, for a step of three functions that return nothing and
 *  leave by rebatch_escape_on_oom() when memory runs out. For functions that return a status, and
 *  in C, use rebatch_step().
 *  @param batch      samples in the effective batch
 *  @param zero_grad  called as zero_grad(): clears the gradients
 *  @param train      called as train(first, count): forward and backward, with weight 1/batch for
 *                    each sample
 *  @param update     called as update(): applies the update
 *  @param flags      REBATCH_DECLARES_MUTATION: train and update call rebatch_wrap_mutating() each
 *                    time. Without it, they count as changing state from their first line
 *  @param report     may be NULL
 *  @return cudaSuccess; cudaErrorMemoryAllocation for REBATCH_E_EXHAUSTED and REBATCH_E_TORN;
 *          cudaErrorInvalidValue without a session; otherwise the code of rebatch_step()'s status.
 *          rebatch_last_error() has the message */
template <class Zero, class Train, class Update>
static inline cudaError_t rebatch_wrap_step(size_t batch, Zero &&zero_grad, Train &&train,
                                            Update &&update, uint32_t flags = 0,
                                            rebatch_step_report *report = NULL)
{
    const rebatch_wrap_no_resize nothing = {};
    return rebatch_wrap_run(batch, zero_grad, train, update, nothing, false, flags, report);
}

/** The same with a fourth function, for a trainer that allocates its activation buffers once and
 *  keeps them: rebatch_step_ops.resize. Code that allocates the buffers for a batch moves into it
 *  unchanged.
 *  @param batch      as above
 *  @param zero_grad  as above
 *  @param train      as above
 *  @param update     as above
 *  @param resize     called as resize(micro_batch) before the first step, and when the size
 *                    changes: allocates the buffers for up to that many samples. What it allocated
 *                    before is taken back by then. A function, or an object of a type of its own,
 *                    such as a lambda
 *  @param flags      as above
 *  @param report     may be NULL
 *  @return as above */
template <class Zero, class Train, class Update, class Resize,
          class = decltype(std::declval<Resize &>()((size_t)1))>
static inline cudaError_t rebatch_wrap_step(size_t batch, Zero &&zero_grad, Train &&train,
                                            Update &&update, Resize &&resize, uint32_t flags = 0,
                                            rebatch_step_report *report = NULL)
{
    return rebatch_wrap_run(batch, zero_grad, train, update, resize, true, flags, report);
}
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
