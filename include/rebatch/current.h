/** @file current.h
 *  The process's session, for existing code.
 *
 *  For code that cannot pass a session on, and for memory that any stream may use, as with
 *  cudaMalloc. wrap.h builds on both to run an existing CUDA trainer with rebatch. */
#ifndef REBATCH_CURRENT_H
#define REBATCH_CURRENT_H

#include "rebatch/cuda.h"
#include "rebatch/status.h"
#include "rebatch/step.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Set the process's session. Only callers of rebatch_get_current() and rebatch_escape_on_oom() use
 *  it; the library has no other global state. From now on `rb` assumes that streams which it does
 *  not know use its memory: before it takes back an attempt it waits for the whole device.
 *  rebatch_close() unsets the session. Thread-safe.
 *  @param rb  borrowed; NULL: the process has no session from now on
 *  @return REBATCH_OK; REBATCH_E_STATE when the process has another session: nothing changed */
REBATCH_API rebatch_status rebatch_set_current(rebatch *rb);

/** Open a session on a GPU, as rebatch_open_default() does, and make it the process's. wrap.h calls
 *  it at the program's first allocation. Thread-safe.
 *  @param[out] out   the process's session, borrowed; NULL on failure
 *  @param gpu        copied; NULL: the device of the settings
 *  @param settings   as for rebatch_open_default(), "" for none. NULL: the process's session is to
 *                    be there: one is opened without settings only if the process has none and has
 *                    had none; *out is NULL when it was closed
 *  @return as rebatch_open_default(); REBATCH_E_STATE when the process has a session and `settings`
 *          is not NULL */
REBATCH_API rebatch_status rebatch_open_current(rebatch **out, const rebatch_cuda_options *gpu,
                                                const char *settings);

/** The process's session. Thread-safe.
 *  @return borrowed; NULL when there is none */
REBATCH_API rebatch *rebatch_get_current(void);

/** Leave the running callback of the process's session if `code` is an OOM, as rebatch_from_cuda()
 *  and rebatch_escape() together do. The function returns, and the caller handles the code, in
 *  these cases: `code` is not an OOM; this thread runs no callback of the session, or runs a
 *  callback of a pool inside it; there is no session. Thread-safe.
 *  @param code  a CUresult or cudaError_t */
REBATCH_API void rebatch_escape_on_oom(int code);

/** rebatch_escape_on_oom() for a code of cuBLAS or cuBLASLt, whose numbers mean other things. In
 *  C++, wrap.h has overloads of rebatch_escape_on_oom() for the types of these codes, and refuses
 *  to compile it for a type whose header was not included before wrap.h.
 *  @param code  a cublasStatus_t */
REBATCH_API void rebatch_escape_on_cublas_oom(int code);

/** rebatch_escape_on_oom() for a code of cuDNN 8 or 9.
 *  @param code  a cudnnStatus_t */
REBATCH_API void rebatch_escape_on_cudnn_oom(int code);

/** Allocate memory that any stream may use immediately, without rebatch_pool_use_on(). It comes
 *  from the session's pool: what the callback's thread allocates, or a thread that joined
 *  (rebatch_join()), is taken back when the attempt fails. May be called in and outside callbacks.
 *
 *  In a program that calls this function, free blocks of the session's stream with rebatch_free()
 *  or rebatch_free_on() only: a block freed by rebatch_pool_free() may be returned here while work
 *  of that stream still uses it. Thread-safe.
 *  @param[out] out  as for rebatch_pool_alloc()
 *  @param rb        the session
 *  @param bytes     size of the block
 *  @return as rebatch_pool_alloc() */
REBATCH_API_CHECKED rebatch_status rebatch_alloc(void **out, rebatch *rb, size_t bytes);

/** rebatch_alloc() for code that does not look at a status. A failure leaves the running callback,
 *  as rebatch_escape() does, so what returns within a callback is memory. Thread-safe.
 *  @param rb     the session
 *  @param bytes  size of the block
 *  @return the block; NULL for 0 bytes, and for a failure outside of callbacks, or in a thread that
 *          cannot leave the callback (rebatch_can_escape()): rebatch_last_error() has the reason */
REBATCH_API_CHECKED void *rebatch_alloc_or_escape(rebatch *rb, size_t bytes);

/** Wait for the work of all streams, then free a block of the session's pool. Thread-safe.
 *  @param rb       the session
 *  @param pointer  NULL is allowed, and then nothing is waited for
 *  @return as rebatch_pool_free(); REBATCH_E_DEVICE or REBATCH_E_DEVICE_LOST when enqueued work
 *          failed: the block is not freed */
REBATCH_API rebatch_status rebatch_free(rebatch *rb, void *pointer);

/** Free a block when the work now enqueued on `stream` is done, without waiting for that work.
 *  Thread-safe.
 *  @param rb       the session
 *  @param pointer  a block of the session's pool; NULL is allowed
 *  @param stream   a stream of the session's device; keep it until the session is closed
 *  @return as rebatch_pool_free(); REBATCH_E_HOST_OOM */
REBATCH_API rebatch_status rebatch_free_on(rebatch *rb, void *pointer, rebatch_stream stream);

#ifdef __cplusplus
}
#endif
#endif
