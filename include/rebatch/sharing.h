/** @file sharing.h
 *  Memory of a pool that is given to others for a while.
 *
 *  A pool that gives lowers what it may hold, for the device's other users, until
 *  rebatch_pool_wake(). A training goes on meanwhile in smaller micro-batches. */
#ifndef REBATCH_SHARING_H
#define REBATCH_SHARING_H

#include "rebatch/pool.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Lower what the pool may hold, until rebatch_pool_wake(): a bound beside the limit, of which the
 *  smaller one holds. The pool gives cached memory back at once, and the rest when it is freed, as
 *  after rebatch_pool_set_limit(). Thread-safe.
 *  @param pool                 the pool
 *  @param most_bytes           the most memory that the pool may hold, at least one page. A second
 *                              call replaces the bound of the first
 *  @param[out] released_bytes  given back to the device by this call; may be NULL
 *  @return REBATCH_OK, REBATCH_E_INVALID */
REBATCH_API rebatch_status rebatch_pool_give(rebatch_pool *pool, size_t most_bytes,
                                             size_t *released_bytes);

/** End the bound of rebatch_pool_give(). Nothing happens where there is none. Thread-safe.
 *  @param pool  the pool
 *  @return REBATCH_OK, REBATCH_E_INVALID */
REBATCH_API rebatch_status rebatch_pool_wake(rebatch_pool *pool);

/** Answer requests for a pool's memory on a Unix socket, which only this user and root may use: a
 *  line each of `status`, `give 4GiB`, `give to 12GiB` and `wake` (docs/sharing.md). A thread
 *  answers `status` and `wake`, and gives back what is cached. A session of the pool gives what is
 *  in use between two micro-batches, which then become smaller. The environment variable
 *  REBATCH_YIELD and the setting memory.yield do this in rebatch_open(). A process has one such
 *  socket: another call replaces it.
 *  @param pool  borrowed until the next call of this function; where it is a session's own, until
 *               rebatch_close(); NULL: only the socket that is there is removed
 *  @param path  of the socket, at most 107 bytes. One that a killed process left there is replaced.
 *               A folder: PID.sock in it; NULL: the same in the folder of rebatch_top_format(),
 *               which is made. The socket is removed when the process exits
 *  @return REBATCH_OK; REBATCH_E_IO when there can be no socket, or a process answers there
 *          already: rebatch_last_error() says why, and the process has none */
REBATCH_API rebatch_status rebatch_yield_to(rebatch_pool *pool, const char *path);

/** Ask a process with rebatch_yield_to(), and wait for its answer: for `status` at most two
 *  seconds. A socket that a killed process left is removed. Thread-safe.
 *  @param[out] answer  a line without its newline, zero-terminated and cut to `size` bytes: an
 *                      object of JSON for `status`; else a sentence that begins with "ok: " where
 *                      all that was asked is done, with "partly: " or with "no: "
 *  @param size         at least 1
 *  @param path         the socket; a number: the process of that id, in the folder of
 *                      rebatch_top_format()
 *  @param request      a line of at most 127 bytes
 *  @return REBATCH_OK; REBATCH_E_IO when nobody answers: rebatch_last_error() says why, and the
 *          answer is empty; REBATCH_E_INVALID */
REBATCH_API rebatch_status rebatch_ask(char *answer, size_t size, const char *path,
                                       const char *request);

/** Write what the processes of this user answer to `status` that have a socket in the folder
 *  $XDG_RUNTIME_DIR/rebatch, or /tmp/rebatch-UID where that variable is not set: a table, or an
 *  array of JSON. Sockets that killed processes left are removed. Thread-safe.
 *  @param[out] text  zero-terminated, truncated to `size` bytes; may be NULL when `size` is 0
 *  @param size       size of `text` in bytes
 *  @param as_json    false: a table
 *  @return length of the whole text without the terminating zero, as snprintf() returns */
REBATCH_API size_t rebatch_top_format(char *text, size_t size, bool as_json);

#ifdef __cplusplus
}
#endif
#endif
