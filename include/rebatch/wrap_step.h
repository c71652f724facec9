/** @file wrap_step.h
 *  Steps and maps of C++ functions, for wrap.h.
 *
 *  wrap.h includes this header. When memory runs out, a function leaves by longjmp()
 *  (rebatch_wrap_check(), rebatch_escape_on_oom()), or by an exception
 *  (rebatch_wrap_throw_on_oom(), and rebatch_wrap_check() with REBATCH_WRAP_THROWS), which runs the
 *  destructors of the objects on the way. Any other exception that leaves a function ends the step
 *  as a failure does, and then leaves rebatch_wrap_step() or rebatch_wrap_map().
 *
 *  Where CUDA's NVTX headers are installed, a profiler such as Nsight Systems shows a range for
 *  each run of a function, for example "train 0-63" and, after an OOM, "train 0-31". Define
 *  REBATCH_WRAP_NO_NVTX to leave them out. */
#ifndef REBATCH_WRAP_STEP_H
#define REBATCH_WRAP_STEP_H

#include "rebatch/wrap.h"

#ifdef __cplusplus
#include <stdlib.h>

#include <cstddef>
#include <type_traits>
#include <utility>
#ifdef __cpp_exceptions
#include <exception>
#include <new>
#endif
#if defined(__has_include) && !defined(REBATCH_WRAP_NO_NVTX)
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define REBATCH_WRAP_NVTX /* a profiler's timeline has a range for each function of a step */
#endif
#endif

/* ---- leaving a step ---- */

#ifdef __cpp_exceptions
/** Memory ran out in a function of a step. rebatch_wrap_step() and rebatch_wrap_map() catch it. */
class rebatch_out_of_memory : public std::bad_alloc
{
  public:
    /** What happened.
     *  @return a static string */
    const char *what() const noexcept override
    {
        return "out of device memory in a step";
    }
};
#endif

/** @cond internal */
static inline rebatch_device *rebatch_wrap_device(void)
{
    rebatch *const rb = rebatch_get_current();
    return rb ? rebatch_pool_device(rebatch_get_pool(rb)) : NULL;
}

/* What a result means. A code that wrap.h returned means what rebatch has said. */
static inline rebatch_status rebatch_wrap_status(rebatch_status status)
{
    return status;
}

static inline rebatch_status rebatch_wrap_status(cudaError_t code)
{
    const rebatch_status said = rebatch_last_status();
    return said && rebatch_wrap_code(said) == code ? said
                                                   : rebatch_from_cuda(rebatch_wrap_device(), code);
}

/* The code of another library would be taken for the cudaError_t of the same number. */
template <class Code> struct rebatch_wrap_is_foreign {
    static constexpr bool value = std::is_enum<Code>::value;
};
template <> struct rebatch_wrap_is_foreign<cudaError_t> {
    static constexpr bool value = false;
};
#ifdef CUDA_VERSION
template <> struct rebatch_wrap_is_foreign<CUresult> {
    static constexpr bool value = false;
};
#endif
template <class Code>
using rebatch_wrap_if_foreign = typename std::enable_if<rebatch_wrap_is_foreign<Code>::value>::type;

template <class Code, class = rebatch_wrap_if_foreign<Code>>
void rebatch_escape_on_oom(Code) = delete; /* include the header of this code before wrap.h */

#ifdef CUBLAS_VERSION
static inline rebatch_status rebatch_wrap_status(cublasStatus_t code)
{
    return rebatch_from_cublas(rebatch_wrap_device(), (int)code);
}

static inline void rebatch_escape_on_oom(cublasStatus_t code)
{
    rebatch_escape_on_cublas_oom((int)code);
}
#endif

#ifdef CUDNN_MAJOR
static inline rebatch_status rebatch_wrap_status(cudnnStatus_t code)
{
    return rebatch_from_cudnn(rebatch_wrap_device(), (int)code);
}

static inline void rebatch_escape_on_oom(cudnnStatus_t code)
{
    rebatch_escape_on_cudnn_oom((int)code);
}
#endif

static inline bool rebatch_wrap_can_leave(rebatch_status status)
{
    return status == REBATCH_OOM && rebatch_can_escape(rebatch_get_current());
}

template <class Result>
static inline void rebatch_wrap_check_at(Result result, const char *call, const char *file,
                                         int line)
{
    if (result == (Result)0)
        return;
    const rebatch_status status = rebatch_wrap_status(result);
    if (rebatch_wrap_can_leave(status)) {
#ifdef REBATCH_WRAP_THROWS
        throw rebatch_out_of_memory();
#else
        (void)rebatch_escape(rebatch_get_current(), status);
#endif
    }
    (void)fprintf(stderr, "%s:%d: %s: %s\n", file, line, call, rebatch_last_error());
    exit(1);
}
/** @endcond */

/** Check the result of a call as most CUDA programs do: a failure ends the program, with the line,
 *  the call and what went wrong on standard error. An OOM within a step leaves the function of the
 *  step instead: by longjmp(), or by rebatch_out_of_memory where REBATCH_WRAP_THROWS was defined
 *  before wrap.h was included.
 *  @param call  a cudaError_t or rebatch_status; a cublasStatus_t or cudnnStatus_t where its header
 *               was included before this one */
#define rebatch_wrap_check(call) rebatch_wrap_check_at((call), #call, __FILE__, __LINE__)

#ifdef __cpp_exceptions
/** @cond internal */
static inline void rebatch_wrap_throw_on(rebatch_status status)
{
    if (rebatch_wrap_can_leave(status))
        throw rebatch_out_of_memory();
}
/** @endcond */

/** As rebatch_escape_on_oom(), by an exception: throws rebatch_out_of_memory if `code` is an OOM
 *  within a step. Otherwise it returns, and the caller handles the code.
 *  @param code  a cudaError_t; a CUresult, cublasStatus_t or cudnnStatus_t where its header was
 *               included before this one, without which it does not compile */
static inline void rebatch_wrap_throw_on_oom(int code)
{
    rebatch_wrap_throw_on(rebatch_from_cuda(rebatch_wrap_device(), code));
}

/** @cond internal */
template <class Code, class = rebatch_wrap_if_foreign<Code>>
void rebatch_wrap_throw_on_oom(Code) = delete; /* include the header of this code before wrap.h */
/** @endcond */

#ifdef CUBLAS_VERSION
static inline void rebatch_wrap_throw_on_oom(cublasStatus_t code)
{
    rebatch_wrap_throw_on(rebatch_wrap_status(code));
}
#endif

#ifdef CUDNN_MAJOR
static inline void rebatch_wrap_throw_on_oom(cudnnStatus_t code)
{
    rebatch_wrap_throw_on(rebatch_wrap_status(code));
}
#endif
#endif

/* ---- guarded state ---- */

/** @cond internal */
/* The session, and where the state is. */
static inline cudaError_t rebatch_wrap_find(rebatch **rb, rebatch_guard_kind *kind,
                                            const void *state)
{
    cudaPointerAttributes where;
    cudaError_t code = rebatch_wrap_session(rb);
    if (code == cudaSuccess)
        code = cudaPointerGetAttributes(&where, state);
    if (code == cudaSuccess)
        *kind = where.type == cudaMemoryTypeDevice ? REBATCH_GUARD_DEVICE : REBATCH_GUARD_HOST;
    return code;
}
/** @endcond */

/** rebatch_guard() for the process's session: these objects are restored when samples run again.
 *  They may be in host or in device memory.
 *  @param state  the first object; borrowed until rebatch_wrap_close()
 *  @param count  number of objects
 *  @return cudaSuccess, or the code of rebatch_guard()'s status. After a failure the message is on
 *          standard error */
template <class T> static inline cudaError_t rebatch_wrap_guard(T *state, size_t count = 1)
{
    rebatch *rb;
    rebatch_guard_kind kind;
    const cudaError_t code = rebatch_wrap_find(&rb, &kind, state);
    return code != cudaSuccess
               ? code
               : rebatch_wrap_told(rebatch_guard(rb, (void *)state, count * sizeof(T), kind));
}

/** rebatch_guard_sums() for the process's session: accumulators that zero_grad does not clear.
 *  @param sums   the first number, in host or in device memory; borrowed until rebatch_wrap_close()
 *  @param count  how many
 *  @return as rebatch_wrap_guard() */
template <class T> static inline cudaError_t rebatch_wrap_guard_sums(T *sums, size_t count = 1)
{
    rebatch *rb;
    rebatch_guard_kind kind;
    const cudaError_t code = rebatch_wrap_find(&rb, &kind, sums);
    return code != cudaSuccess
               ? code
               : rebatch_wrap_told(rebatch_guard_sums(rb, (void *)sums, count * sizeof(T), kind));
}

#ifdef CURAND_VERSION
/** A generator of cuRAND's host API whose place in its sequence is guarded. cuRAND can go to a
 *  place and does not tell where it is, so the program counts. The count is the place for Philox
 *  with any distribution, and for XORWOW and MRG32K3A with curandGenerate() and
 *  curandGenerateUniform(). A program that draws other numbers of the latter two sets the offset
 *  itself where `train` begins, by step and first sample, and needs no guard. */
struct rebatch_wrap_generator {
    curandGenerator_t generator; /**< borrowed until rebatch_wrap_close() */
    unsigned long long drawn;    /**< numbers drawn from offset 0 on: a call for n adds n */
    /** @cond internal */
    unsigned long long kept[2];

    static rebatch_status save(rebatch_guard_point point, void *user)
    {
        rebatch_wrap_generator *const own = static_cast<rebatch_wrap_generator *>(user);
        own->kept[point] = own->drawn;
        return REBATCH_OK;
    }
    static rebatch_status restore(rebatch_guard_point point, void *user)
    {
        rebatch_wrap_generator *const own = static_cast<rebatch_wrap_generator *>(user);
        own->drawn = own->kept[point];
        return curandSetGeneratorOffset(own->generator, own->drawn) == CURAND_STATUS_SUCCESS
                   ? REBATCH_OK
                   : REBATCH_E_DEVICE;
    }
    /** @endcond */
};

/** Guards a cuRAND generator: samples that run again draw the same numbers.
 *  @param state  borrowed until rebatch_wrap_close()
 *  @return cudaSuccess; cudaErrorNotSupported for a generator that has no offset, such as MTGP32;
 *          otherwise the code of rebatch_guard_with()'s status. After a failure the message is on
 *          standard error */
static inline cudaError_t rebatch_wrap_guard(rebatch_wrap_generator *state)
{
    rebatch *rb;
    const cudaError_t code = rebatch_wrap_session(&rb);
    const rebatch_guard_ops ops = {sizeof ops, rebatch_wrap_generator::save,
                                   rebatch_wrap_generator::restore};
    if (code != cudaSuccess)
        return code;
    if (curandSetGeneratorOffset(state->generator, state->drawn) != CURAND_STATUS_SUCCESS) {
        (void)fprintf(stderr, "rebatch: a cuRAND generator cannot be guarded: expected one whose "
                              "offset can be set, such as XORWOW or Philox\n");
        return cudaErrorNotSupported;
    }
    return rebatch_wrap_told(rebatch_guard_with(rb, &ops, state));
}
#endif

/** @cond internal */
struct __half; /* of cuda_fp16.h and cuda_bf16.h, which need not be included */
struct __nv_bfloat16;
template <class T> struct rebatch_wrap_number {
    static const rebatch_number value = std::is_same<T, float>::value           ? REBATCH_F32
                                        : std::is_same<T, double>::value        ? REBATCH_F64
                                        : std::is_same<T, __half>::value        ? REBATCH_F16
                                        : std::is_same<T, __nv_bfloat16>::value ? REBATCH_BF16
                                                                                : REBATCH_BYTES;
};
/** @endcond */

/** rebatch_watch() for the process's session: names a result of the step for a check. Numbers of
 *  another type than float, double, __half and __nv_bfloat16 are compared by their bits.
 *  @param name   for sentences
 *  @param first  the first object, in host or in device memory; borrowed until rebatch_wrap_close()
 *  @param count  number of objects
 *  @return as rebatch_wrap_guard() */
template <class T>
static inline cudaError_t rebatch_wrap_watch(const char *name, T *first, size_t count = 1)
{
    rebatch *rb;
    rebatch_guard_kind kind;
    const rebatch_number number = rebatch_wrap_number<T>::value;
    const cudaError_t code = rebatch_wrap_find(&rb, &kind, first);
    return code != cudaSuccess ? code
                               : rebatch_wrap_told(rebatch_watch(rb, name, (void *)first,
                                                                 count * sizeof(T), kind, number));
}

/* ---- steps and maps of functions ---- */

/** @cond internal */
struct rebatch_wrap_no_resize {
    void operator()(size_t) const
    {
    }
};

/* What the callbacks get as `user`: the functions of the call that runs. The session knows buffers
 * by the address, so it is the same for the same resize. */
template <class Resize> struct rebatch_wrap_frame {
    Resize *resize;
    void *functions;
#ifdef __cpp_exceptions
    std::exception_ptr thrown;
#endif
#ifdef REBATCH_WRAP_NVTX
    bool has_range;
    nvtxRangeId_t range_id;
#endif

    /* Ends the range before, which longjmp() may have left open; NULL: begins none. */
    void range(const char *name, size_t first = 0, size_t count = 0)
    {
#ifdef REBATCH_WRAP_NVTX
        char text[64];
        if (has_range)
            nvtxRangeEnd(range_id);
        has_range = name != NULL;
        if (!name)
            return;
        if (count)
            (void)snprintf(text, sizeof text, "%s %zu-%zu", name, first, first + count - 1);
        else
            (void)snprintf(text, sizeof text, "%s", name);
        range_id = nvtxRangeStartA(text);
#else
        (void)name;
        (void)first;
        (void)count;
#endif
    }

    /* A lambda is known by its type. */
    static rebatch_wrap_frame *of(Resize &resize, void *functions)
    {
        static rebatch_wrap_frame frames[2];
        static const void *known;
        static int at;
        const void *const identity =
            std::is_function<Resize>::value ? (const void *)&resize : (const void *)&known;
        at = identity == known ? at : !at;
        known = identity;
        frames[at].resize = &resize;
        frames[at].functions = functions;
        return &frames[at];
    }

    /* Runs a function of the program, and turns an exception into a status. */
    template <class Function> rebatch_status run(const Function &function)
    {
#ifdef __cpp_exceptions
        try {
            function();
        } catch (const rebatch_out_of_memory &) {
            return REBATCH_OOM;
        } catch (...) {
            thrown = std::current_exception();
            return REBATCH_E_USER;
        }
#else
        function();
#endif
        return REBATCH_OK;
    }

    static rebatch_status call_resize(size_t size, void *user)
    {
        rebatch_wrap_frame *const frame = static_cast<rebatch_wrap_frame *>(user);
        frame->range("resize", 0, size);
        return frame->run([=] { (*frame->resize)(size); });
    }

    /* The step or map has ended. */
    cudaError_t end(rebatch_status status)
    {
        range(NULL);
        functions = NULL; /* they are the caller's, which returns */
#ifdef __cpp_exceptions
        const std::exception_ptr exception = thrown;
        thrown = nullptr;
        if (exception)
            std::rethrow_exception(exception);
#endif
        return rebatch_wrap_told(status);
    }
};

/* Calls zero_grad, where there is one. */
template <class Zero>
static inline auto rebatch_wrap_clear(Zero &zero_grad) -> decltype(zero_grad())
{
    return zero_grad();
}

static inline void rebatch_wrap_clear(const std::nullptr_t &)
{
}

template <class Zero, class Train, class Update, class Resize> struct rebatch_wrap_functions {
    typedef rebatch_wrap_frame<Resize> frame;
    Zero &zero_grad;
    Train &train;
    Update &update;
    bool declares;
    size_t largest;

    static rebatch_wrap_functions &begin(void *user)
    {
        rebatch_wrap_functions &f =
            *static_cast<rebatch_wrap_functions *>(static_cast<frame *>(user)->functions);
        if (!f.declares)
            rebatch_wrap_mutating();
        return f;
    }
    static rebatch_status call_zero_grad(void *user)
    {
        rebatch_wrap_functions &f = begin(user);
        static_cast<frame *>(user)->range("zero_grad");
        return static_cast<frame *>(user)->run([&] { rebatch_wrap_clear(f.zero_grad); });
    }
    static rebatch_status call_train(const rebatch_microbatch *mb, void *user)
    {
        rebatch_wrap_functions &f = begin(user);
        static_cast<frame *>(user)->range("train", mb->first, mb->count);
        return static_cast<frame *>(user)->run([&] { f.train(mb->first, mb->count); });
    }
    static rebatch_status call_update(void *user)
    {
        rebatch_wrap_functions &f = begin(user);
        static_cast<frame *>(user)->range("update");
        return static_cast<frame *>(user)->run([&] { f.update(); });
    }
    static size_t call_part(size_t first, void *user)
    {
        const size_t largest =
            static_cast<rebatch_wrap_functions *>(static_cast<frame *>(user)->functions)->largest;
        return largest - first % largest;
    }
};

template <class Zero, class Train, class Update, class Resize>
static inline cudaError_t
rebatch_wrap_run(size_t batch, Zero &zero_grad, Train &train, Update &update, Resize &resize,
                 bool resizes, uint32_t flags, rebatch_step_report *report, size_t largest)
{
    static_assert(std::is_void<decltype(rebatch_wrap_clear(zero_grad))>::value &&
                      std::is_void<decltype(train(batch, batch))>::value &&
                      std::is_void<decltype(update())>::value &&
                      std::is_void<decltype(resize(batch))>::value,
                  "the functions must return nothing: use rebatch_step() for others");
    rebatch *rb;
    const cudaError_t code = rebatch_wrap_session(&rb);
    if (code != cudaSuccess)
        return code;
    typedef rebatch_wrap_functions<Zero, Train, Update, Resize> functions;
    functions f = {zero_grad, train, update, (flags & REBATCH_DECLARES_MUTATION) != 0, largest};
    rebatch_wrap_frame<Resize> *const frame = rebatch_wrap_frame<Resize>::of(resize, &f);
    rebatch_step_ops ops = REBATCH_STEP_OPS_INIT;
    ops.zero_grad = functions::call_zero_grad;
    ops.forward_backward = functions::call_train;
    ops.optimizer_step = functions::call_update;
    ops.flags = flags | REBATCH_DECLARES_MUTATION | REBATCH_OWN_WEIGHTS;
    ops.resize = resizes ? rebatch_wrap_frame<Resize>::call_resize : NULL;
    ops.part = largest ? functions::call_part : NULL;
    return frame->end(rebatch_step(rb, &ops, batch, frame, report));
}

template <class Run, class Resize>
static inline rebatch_status rebatch_wrap_call_run(const rebatch_microbatch *mb, void *user)
{
    rebatch_wrap_frame<Resize> *const frame = static_cast<rebatch_wrap_frame<Resize> *>(user);
    Run &run = *(Run *)frame->functions;
    frame->range("map", mb->first, mb->count);
    return frame->run([&] { run(mb->first, mb->count); });
}

template <class Run, class Resize>
static inline cudaError_t rebatch_wrap_run_map(size_t count, Run &run, Resize &resize, bool resizes,
                                               size_t largest, rebatch_step_report *report,
                                               uint32_t flags)
{
    static_assert(std::is_void<decltype(run(count, count))>::value &&
                      std::is_void<decltype(resize(count))>::value,
                  "the functions must return nothing: use rebatch_map() for others");
    rebatch *rb;
    const cudaError_t code = rebatch_wrap_session(&rb);
    if (code != cudaSuccess)
        return code;
    rebatch_wrap_frame<Resize> *const frame = rebatch_wrap_frame<Resize>::of(resize, (void *)&run);
    rebatch_map_ops ops = REBATCH_MAP_OPS_INIT;
    ops.run = rebatch_wrap_call_run<Run, Resize>;
    ops.resize = resizes ? rebatch_wrap_frame<Resize>::call_resize : NULL;
    ops.largest = largest;
    ops.flags = flags;
    if (std::is_function<Run>::value) /* a lambda is known by its type */
        ops.key = (const void *)&run;
    return frame->end(rebatch_map(rb, &ops, count, frame, report));
}
/** @endcond */

/** rebatch_step() for the process's session, for a step of three functions that return nothing and
 *  leave when memory runs out. For functions that return a status, and in C, use rebatch_step().
 *  @param batch      samples in the effective batch
 *  @param zero_grad  called as zero_grad(): clears the gradients. nullptr: the program clears
 *                    guarded sums before each step (rebatch_step_ops.zero_grad)
 *  @param train      called as train(first, count): forward and backward, with weight 1/batch for
 *                    each sample
 *  @param update     called as update(): applies the update
 *  @param flags      REBATCH_DECLARES_MUTATION: train and update call rebatch_wrap_mutating() each
 *                    time. Without it, they count as changing state from their first line.
 *                    REBATCH_SCOPED_MEMORY: what train has not freed is freed when it returns
 *  @param report     may be NULL
 *  @param largest    most samples in one call of train, which are of one loader batch of that many:
 *                    no call goes beyond a multiple of it; 0: the whole batch. Not with lockstep
 *  @return cudaSuccess; cudaErrorMemoryAllocation for REBATCH_E_EXHAUSTED and REBATCH_E_TORN, which
 *          are events; otherwise the code of rebatch_step()'s status, whose message is on standard
 *          error. rebatch_last_error() has the message */
template <class Zero, class Train, class Update>
static inline cudaError_t rebatch_wrap_step(size_t batch, Zero &&zero_grad, Train &&train,
                                            Update &&update, uint32_t flags = 0,
                                            rebatch_step_report *report = NULL, size_t largest = 0)
{
    const rebatch_wrap_no_resize nothing = {};
    return rebatch_wrap_run(batch, zero_grad, train, update, nothing, false, flags, report,
                            largest);
}

/** The same with a fourth function, for a trainer that allocates its activation buffers once and
 *  keeps them: rebatch_step_ops.resize. Code that allocates the buffers for a batch moves into it
 *  unchanged.
 *  @param batch      as above
 *  @param zero_grad  as above
 *  @param train      as above
 *  @param update     as above
 *  @param resize     called as resize(micro_batch) before the first step, and when the size
 *                    changes: allocates the buffers for up to that many samples. rebatch has freed
 *                    the buffers of the call before. A function, or an object of a type of its own,
 *                    such as a lambda
 *  @param flags      as above
 *  @param report     may be NULL
 *  @param largest    as above
 *  @return as above */
template <class Zero, class Train, class Update, class Resize,
          class = decltype(std::declval<Resize &>()((size_t)1))>
static inline cudaError_t rebatch_wrap_step(size_t batch, Zero &&zero_grad, Train &&train,
                                            Update &&update, Resize &&resize, uint32_t flags = 0,
                                            rebatch_step_report *report = NULL, size_t largest = 0)
{
    return rebatch_wrap_run(batch, zero_grad, train, update, resize, true, flags, report, largest);
}

/** rebatch_map() for the process's session, for example an evaluation.
 *  @param count    number of samples
 *  @param run      called as run(first, count): stores a result for each of the samples, or adds to
 *                  a sum that is guarded
 *  @param largest  most samples in one call; 0: all
 *  @param report   may be NULL
 *  @param flags    0, or REBATCH_SCOPED_MEMORY
 *  @return as rebatch_wrap_step() */
template <class Run>
static inline cudaError_t rebatch_wrap_map(size_t count, Run &&run, size_t largest = 0,
                                           rebatch_step_report *report = NULL, uint32_t flags = 0)
{
    const rebatch_wrap_no_resize nothing = {};
    return rebatch_wrap_run_map(count, run, nothing, false, largest, report, flags);
}

/** The same in the buffers of the step.
 *  @param count    as above
 *  @param run      as above; it uses the buffers that `resize` made
 *  @param resize   the function that rebatch_wrap_step() has, or an object of the same type
 *  @param largest  as above
 *  @param report   may be NULL
 *  @param flags    as above
 *  @return as above */
template <class Run, class Resize, class = decltype(std::declval<Resize &>()((size_t)1))>
static inline cudaError_t rebatch_wrap_map(size_t count, Run &&run, Resize &&resize,
                                           size_t largest = 0, rebatch_step_report *report = NULL,
                                           uint32_t flags = 0)
{
    return rebatch_wrap_run_map(count, run, resize, true, largest, report, flags);
}

#endif
#endif
