/** @file current.h
 *  For code that is there already and hands no session on: the process's session, and memory as
 *  cudaMalloc gives it, which any stream may use. wrap.h puts both under a CUDA trainer. */
#ifndef REBATCH_CURRENT_H
#define REBATCH_CURRENT_H

#include "rebatch/status.h"
#include "rebatch/step.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Make `rb` the process's session. This is all that the library keeps for a process, and nothing
 *  but the callers of rebatch_get_current() go by it. From here on `rb` reckons with memory in use
 *  on streams that it was not told of: before an attempt is taken back it waits for the whole
 *  device. rebatch_close() ends it as well.
 *  @param rb  borrowed; NULL: none from here on
 *  @return REBATCH_OK; REBATCH_E_STATE when there is one already: nothing changed. Any thread. */
REBATCH_API rebatch_status rebatch_set_current(rebatch *rb);

/** The process's session, NULL when there is none. Borrowed. Any thread. */
REBATCH_API rebatch *rebatch_get_current(void);

/** Leave the running callback of the process's session when `code` means that memory ran out, as
 *  rebatch_from_cuda() and rebatch_escape() do. It comes back when it means anything else, when
 *  this thread runs no callback, or one of a pool inside it, and without a session: then the code
 *  is the caller's to answer.
 *  @param code  a CUresult or cudaError_t */
REBATCH_API void rebatch_escape_on_oom(int code);

/** Allocate memory that any stream may use at once, without rebatch_pool_use_on(). It is the
 *  session's pool's, and what the running callback's thread, or one that joined it, allocates is
 *  taken back with a failed attempt like all that comes from there.
 *  @param[out] out  as of rebatch_pool_alloc(). What is freed on the session's stream in another
 *                   way than by the two below may be given out while work there still uses it
 *  @return as rebatch_pool_alloc(). Any thread, within callbacks and outside. */
REBATCH_API rebatch_status rebatch_alloc(void **out, rebatch *rb, size_t bytes);

/** Give a block of the session's pool back when the work of all streams is done, for which it
 *  waits.
 *  @param pointer  NULL is allowed: then it does not wait
 *  @return as rebatch_pool_free(); REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST when work had failed:
 *          the block is then as it was. Any thread. */
REBATCH_API rebatch_status rebatch_free(rebatch *rb, void *pointer);

/** Give a block back when the work already enqueued on `stream` is done, without waiting for it.
 *  @param stream  of the session's device; it must not be destroyed before the session is closed
 *  @return as rebatch_pool_free(), REBATCH_E_HOST_OOM. Any thread. */
REBATCH_API rebatch_status rebatch_free_on(rebatch *rb, void *pointer, rebatch_stream stream);

#ifdef __cplusplus
}
#endif
#endif
