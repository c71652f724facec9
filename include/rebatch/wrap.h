/** @file wrap.h
 *  A CUDA trainer that is there already, under rebatch: the CUDA runtime's allocations come from a
 *  session's pool, its check of errors leaves the step when memory runs out, and its own functions
 *  are the step. Not part of rebatch.h, for it needs CUDA's headers. Include it last.
 *
 *  @code
 *  #include <rebatch/wrap.h>             // cudaMalloc, cudaFree and their Async are the pool's now
 *
 *  void check(cudaError_t code) {
 *      if (code == cudaSuccess)
 *          return;
 *      rebatch_escape_on_oom(code);      // within a step it does not come back from an OOM
 *      exit(1);                          // as ever
 *  }
 *  check(rebatch_wrap_open(NULL));       // once, before the first allocation
 *  check(rebatch_wrap_step(batch, zero_gradients, train_on, update, REBATCH_DECLARES_MUTATION));
 *  @endcode
 *
 *  In train_on(first, count) and update(), rebatch_wrap_mutating() stands where they begin to
 *  change gradients and parameters, which the flag of the step says. An OOM before that costs one
 *  micro-batch at most. Without lines and flag the effective batch runs again, and an OOM in
 *  update() ends the training (step.h).
 *
 *  What the redirected calls do:
 *  - Memory is the pool's, and is taken back when its attempt fails, whoever holds the pointer: one
 *    that is kept beyond its attempt must be set anew in the next, or be guarded (rebatch_guard()).
 *    To free it all the same is no error.
 *  - cudaMalloc: any stream may use the memory at once. cudaFree waits for the whole device, as
 *    CUDA's own does; cudaFreeAsync does not wait.
 *  - They are CUDA's own where there is no session, before rebatch_wrap_open() and after
 *    rebatch_wrap_close(), and where another GPU is current. So is `(cudaMalloc)(...)`, in
 *    parentheses, and whatever is not redirected: function pointers, files that do not include this
 *    header, and other allocations, of cudaMallocManaged or cudaMallocPitch for example.
 *  - A pointer that is not the pool's goes to CUDA's own cudaFree; but CUDA's own, called in a file
 *    without this header, does not free what is the pool's.
 *  - A failure is a cudaError_t, cudaErrorMemoryAllocation for an OOM, and the sentence behind it
 *    is rebatch_last_error(). It is not in cudaGetLastError().
 *  - Each thread's own default stream (cudaStreamPerThread, --default-stream per-thread) has one
 *    name in all of them, so there the Async calls are cudaMalloc and cudaFree.
 *  - Device state under rebatch_guard() is copied on the session's stream: work of other streams
 *    that changes it must be done when a function of the step begins, and when it ends.
 *  - Not within a stream capture, and not in device code. A stream that memory was allocated or
 *    freed on must not be destroyed before rebatch_wrap_close().
 *
 *  The redirected calls may be made in any thread, steps in one at a time. What other threads than
 *  the step's allocate is theirs, and stays when an attempt is taken back; one that works for the
 *  step says rebatch_join(rebatch_get_current()).
 *
 *  rebatch_escape_on_oom() leaves by longjmp: between the step's function and check() there must be
 *  nothing that a destructor would have to release. */
#ifndef REBATCH_WRAP_H
#define REBATCH_WRAP_H

#include <cuda_runtime.h>
#include <stdio.h>

#include "rebatch/cuda.h"
#include "rebatch/current.h"

/* ---- the session ---- */

/** What a status is as CUDA's code; rebatch_from_cuda() leads back, and the text is lost. */
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

/** Writes an event to stderr: what rebatch_wrap_open() reports to by default. */
static inline void rebatch_wrap_print(const rebatch_event *event, void *user)
{
    char line[512];
    (void)user;
    (void)rebatch_event_format(line, sizeof line, event);
    (void)fprintf(stderr, "rebatch: %s\n", line);
}

static inline int rebatch_wrap_last_error(void)
{
    return (int)cudaGetLastError();
}

/** Open a session on the GPU that is current, and make it the process's: see rebatch_set_current().
 *  To open one in another way, say so there.
 *  @param options  copied; NULL: defaults, with rebatch_wrap_print() as on_event. With `learn` the
 *                  first step finds the size of micro-batches
 *  @return cudaSuccess; cudaErrorUnknown when the process has a session; else what is behind the
 *          status that the opening of device or session answered: then nothing is open. */
static inline cudaError_t rebatch_wrap_open(const rebatch_options *options)
{
    rebatch_cuda_options cuda = REBATCH_CUDA_OPTIONS_INIT;
    rebatch_options printing = REBATCH_OPTIONS_INIT;
    rebatch_device *device = NULL;
    rebatch *rb = NULL;
    const cudaError_t code = cudaGetDevice(&cuda.ordinal);
    if (code != cudaSuccess)
        return code;
    cuda.take_last_error = rebatch_wrap_last_error;
    printing.on_event = rebatch_wrap_print;
    rebatch_status status = rebatch_device_open_cuda(&device, &cuda);
    if (!status)
        status = rebatch_open(&rb, device, options ? options : &printing);
    if (!status)
        status = rebatch_set_current(rb);
    if (status) {
        rebatch_close(rb);
        rebatch_device_close(device);
    }
    return rebatch_wrap_code(status);
}

/** Close the process's session and its device. All that came from the pool is gone then, and a free
 *  that comes later is CUDA's own, an error. Without a session nothing happens. From within a step
 *  nothing happens either, and rebatch_last_error() says so. No other thread may be allocating. */
static inline void rebatch_wrap_close(void)
{
    rebatch *const rb = rebatch_get_current();
    rebatch_device *const device = rb ? rebatch_pool_device(rebatch_get_pool(rb)) : NULL;
    rebatch_close(rb);
    if (rb && rebatch_get_current() == rb)
        return; /* refused, and still in use */
    rebatch_device_close(device);
}

/** rebatch_mutating() of the process's session. */
static inline void rebatch_wrap_mutating(void)
{
    rebatch_mutating(rebatch_get_current());
}

/* ---- what the runtime's calls become ---- */

/* The session, where it is on the GPU that is current in this thread. */
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

#ifdef __cplusplus
#include <type_traits>

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

/* The callbacks of a step that was given as functions. */
template <class Zero, class Train, class Update> struct rebatch_wrap_functions {
    Zero &zero_grad;
    Train &train;
    Update &update;
    bool declares;

    static rebatch_wrap_functions &begin(void *user)
    {
        rebatch_wrap_functions &f = *static_cast<rebatch_wrap_functions *>(user);
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
};

/** rebatch_step() of the process's session, for a step that is three functions which return nothing
 *  and leave by rebatch_escape_on_oom() when memory runs out. Functions that return a status are
 *  for rebatch_step() itself, and so is the step in C.
 *  @param zero_grad  called as zero_grad(), and as the callbacks of that name
 *  @param train      called as train(first, count): forward and backward, each sample weighing
 *                    1/batch
 *  @param update     called as update()
 *  @param flags      REBATCH_DECLARES_MUTATION: train and update call rebatch_wrap_mutating(), each
 *                    time. Without it they are taken to change things from their first line
 *  @param report     may be NULL
 *  @return cudaSuccess; cudaErrorMemoryAllocation for REBATCH_E_EXHAUSTED and REBATCH_E_TORN;
 *          cudaErrorInvalidValue without a session; else what is behind rebatch_step()'s status,
 *          whose sentence is rebatch_last_error(). */
template <class Zero, class Train, class Update>
static inline cudaError_t rebatch_wrap_step(size_t batch, Zero &&zero_grad, Train &&train,
                                            Update &&update, uint32_t flags = 0,
                                            rebatch_step_report *report = NULL)
{
    static_assert(std::is_void<decltype(zero_grad())>::value &&
                      std::is_void<decltype(train(batch, batch))>::value &&
                      std::is_void<decltype(update())>::value,
                  "what a function returns would be lost: give such to rebatch_step()");
    typedef rebatch_wrap_functions<Zero, Train, Update> functions;
    functions f = {zero_grad, train, update, (flags & REBATCH_DECLARES_MUTATION) != 0};
    const rebatch_step_ops ops = {sizeof ops,
                                  functions::call_zero_grad,
                                  functions::call_train,
                                  functions::call_update,
                                  NULL,
                                  REBATCH_DECLARES_MUTATION,
                                  NULL};
    return rebatch_wrap_code(rebatch_step(rebatch_get_current(), &ops, batch, &f, report));
}
#endif

/* From here on. A call in parentheses is CUDA's own. */
#undef cudaMallocAsync
#undef cudaFreeAsync
#define cudaMalloc(...) rebatch_wrap_malloc(__VA_ARGS__)
#define cudaFree(...) rebatch_wrap_free(__VA_ARGS__)
#define cudaMallocAsync(...) rebatch_wrap_malloc_async(__VA_ARGS__)
#define cudaFreeAsync(...) rebatch_wrap_free_async(__VA_ARGS__)

#endif
