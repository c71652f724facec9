/** @file nccl.h
 *  A group whose ranks vote through NCCL (group.h).
 *
 *  It is not part of rebatch.h, because it needs the headers of CUDA and NCCL. Its functions are
 *  inline, because the library links no NCCL. docs/distributed.md has a training step. Where the
 *  program has MPI too, rebatch/mpi.h is the better choice: its votes need no GPU and do not wait
 *  for one.
 *
 *  The votes use the program's communicator, so collectives of several communicators never wait for
 *  each other. All ranks call collectives of that communicator in the same order: the program calls
 *  its own in `reduce`, or between two steps.
 *
 *  Create the communicator with ncclConfig_t.blocking = 0. Otherwise NCCL's own calls may wait for
 *  a missing rank without a timeout. */
#ifndef REBATCH_NCCL_H
#define REBATCH_NCCL_H

#include <cuda_runtime.h>
#include <nccl.h>
#include <poll.h>
#include <string.h>
#include <time.h>

#include "rebatch/cuda.h"
#include "rebatch/group.h"

/** What the functions of the group use. The program reads is_aborted alone. */
typedef struct rebatch_nccl {
    ncclComm_t comm;     /**< of the program */
    cudaStream_t stream; /**< of the votes alone */
    uint64_t *device;    /**< the words of a vote on the GPU */
    uint64_t *host;      /**< and in pinned memory */
    int is_aborted;      /**< the communicator is gone: neither use nor destroy it */
} rebatch_nccl;

/** @cond internal */
#define REBATCH_NCCL_POLL_MS 10.0    /* how long a wait keeps the processor busy: then it sleeps */
#define REBATCH_NCCL_SETUP_MS 300000 /* longest wait for another rank's rebatch_group_nccl() */

/* Strict C11 has no clock but this one, which can be set. */
static inline double rebatch_nccl_ms(void)
{
    struct timespec now;
#ifdef CLOCK_MONOTONIC
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
#else
    (void)timespec_get(&now, TIME_UTC);
#endif
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

/* Whether the communicator has taken in all calls, and, with a stream, whether its work is done. A
 * communicator that does not block enqueues late. */
static inline rebatch_status rebatch_nccl_test(bool *is_done, ncclComm_t comm,
                                               const cudaStream_t *stream)
{
    ncclResult_t state = ncclSuccess;
    ncclResult_t result = ncclCommGetAsyncError(comm, &state);
    cudaError_t code = cudaSuccess;
    *is_done = false;
    if (result == ncclSuccess)
        result = state;
    if (result == ncclInProgress)
        return REBATCH_OK;
    if (result != ncclSuccess)
        return rebatch_from_nccl(NULL, (int)result);
    if (stream)
        code = cudaStreamQuery(*stream);
    if (code == cudaErrorNotReady) {
        (void)cudaGetLastError(); /* it is no error */
        return REBATCH_OK;
    }
    *is_done = code == cudaSuccess;
    return rebatch_from_cuda(NULL, (int)code);
}

static inline rebatch_status rebatch_nccl_poll(ncclComm_t comm, const cudaStream_t *stream,
                                               double until_ms)
{
    const double busy_until_ms = rebatch_nccl_ms() + REBATCH_NCCL_POLL_MS;
    for (;;) {
        bool is_done;
        const rebatch_status status = rebatch_nccl_test(&is_done, comm, stream);
        if (status || is_done)
            return status;
        const double now_ms = rebatch_nccl_ms();
        if (now_ms > until_ms)
            return REBATCH_E_PEER;
        if (now_ms > busy_until_ms)
            (void)poll(NULL, 0, 1);
    }
}
/** @endcond */

/** Wait until a communicator has taken in all calls made so far and the work of a stream is done,
 *  but not for ever: cudaStreamSynchronize() with a timeout, for the collectives that the program
 *  calls in `reduce`. They return ncclSuccess or ncclInProgress.
 *  @param comm        the communicator of the collectives
 *  @param stream      their stream
 *  @param timeout_ms  longest wait in milliseconds
 *  @return REBATCH_OK; REBATCH_E_PEER when that is not so by then; what rebatch_from_nccl() and
 *          rebatch_from_cuda() make of an error. The work goes on until ncclCommAbort() */
static inline rebatch_status rebatch_nccl_wait(ncclComm_t comm, cudaStream_t stream,
                                               uint64_t timeout_ms)
{
    return rebatch_nccl_poll(comm, &stream, rebatch_nccl_ms() + (double)timeout_ms);
}

/** @cond internal */
static inline rebatch_status rebatch_nccl_copy(rebatch_nccl *nccl, void *to, const void *from,
                                               size_t count, enum cudaMemcpyKind kind)
{
    const size_t bytes = count * sizeof(uint64_t);
    return rebatch_from_cuda(NULL, (int)cudaMemcpyAsync(to, from, bytes, kind, nccl->stream));
}

static inline rebatch_status rebatch_nccl_all_reduce(uint64_t *words, size_t count,
                                                     rebatch_reduction reduction,
                                                     uint64_t timeout_ms, void *user)
{
    rebatch_nccl *const nccl = (rebatch_nccl *)user;
    const double until_ms = rebatch_nccl_ms() + (double)timeout_ms;
    const ncclRedOp_t op = reduction == REBATCH_MIN   ? ncclMin
                           : reduction == REBATCH_MAX ? ncclMax
                                                      : ncclSum;
    ncclResult_t result;
    memcpy(nccl->host, words, count * sizeof *words);
    rebatch_status status =
        rebatch_nccl_copy(nccl, nccl->device, nccl->host, count, cudaMemcpyHostToDevice);
    if (status)
        return status;
    result =
        ncclAllReduce(nccl->device, nccl->device, count, ncclUint64, op, nccl->comm, nccl->stream);
    if (result != ncclSuccess && result != ncclInProgress)
        return rebatch_from_nccl(NULL, (int)result);
    status = rebatch_nccl_poll(nccl->comm, NULL, until_ms); /* now it is in the stream */
    if (!status)
        status = rebatch_nccl_copy(nccl, nccl->host, nccl->device, count, cudaMemcpyDeviceToHost);
    if (!status)
        status = rebatch_nccl_poll(nccl->comm, &nccl->stream, until_ms);
    if (!status)
        memcpy(words, nccl->host, count * sizeof *words);
    return status;
}

/* The collectives in flight fail, on this rank and, as their connections close, on the others. */
static inline void rebatch_nccl_abort(void *user)
{
    rebatch_nccl *const nccl = (rebatch_nccl *)user;
    nccl->is_aborted = 1;
    (void)ncclCommAbort(nccl->comm);
}

static inline cudaError_t rebatch_nccl_allocate(rebatch_nccl *nccl)
{
    const size_t bytes = REBATCH_GROUP_WORDS * sizeof(uint64_t);
    void *device = NULL, *host = NULL;
    cudaError_t code = cudaStreamCreateWithFlags(&nccl->stream, cudaStreamNonBlocking);
    if (code == cudaSuccess)
        code = (cudaMalloc)(&device, bytes);
    nccl->device = (uint64_t *)device;
    if (code == cudaSuccess)
        code = cudaMallocHost(&host, bytes);
    nccl->host = (uint64_t *)host;
    return code;
}
/** @endcond */

/** Free what rebatch_group_nccl() made, after rebatch_close(). The communicator stays, unless it
 *  was aborted: is_aborted is kept.
 *  @param nccl  of rebatch_group_nccl(); NULL does nothing */
static inline void rebatch_nccl_close(rebatch_nccl *nccl)
{
    if (!nccl)
        return;
    if (nccl->stream)
        (void)cudaStreamDestroy(nccl->stream);
    if (nccl->device)
        (void)(cudaFree)(nccl->device);
    if (nccl->host)
        (void)cudaFreeHost(nccl->host);
    nccl->comm = NULL;
    nccl->stream = NULL;
    nccl->device = nccl->host = NULL;
}

/** Make the group of a communicator's ranks, each with the GPU that is current. All of them call
 *  it, and vote once, so that NCCL connects the ranks and allocates its buffers here and not in a
 *  step. All memory that votes need is allocated here, by CUDA and not from a pool. NCCL cannot say
 *  which rank did not come, so the message of REBATCH_E_PEER has no number. When a vote fails, in
 *  this call too, the communicator is aborted (rebatch_nccl.is_aborted).
 *  @param[out] out   the group, for rebatch_options.group
 *  @param[out] nccl  owned by the caller; must stay until rebatch_nccl_close()
 *  @param comm       with all ranks; borrowed until rebatch_nccl_close()
 *  @return REBATCH_OK; REBATCH_E_INVALID when an argument is NULL; REBATCH_E_PEER when a rank does
 *          not call it within 300 s; what rebatch_from_nccl() and rebatch_from_cuda() make of an
 *          error. After a failure nothing is left to close */
static inline rebatch_status rebatch_group_nccl(rebatch_group *out, rebatch_nccl *nccl,
                                                ncclComm_t comm)
{
    const rebatch_group none = REBATCH_GROUP_INIT;
    int rank = 0, size = 0;
    uint64_t word = 0;
    if (!out || !nccl)
        return REBATCH_E_INVALID;
    *out = none;
    memset(nccl, 0, sizeof *nccl);
    if (!comm)
        return REBATCH_E_INVALID;
    nccl->comm = comm;
    rebatch_status status = rebatch_from_nccl(NULL, (int)ncclCommUserRank(comm, &rank));
    if (!status)
        status = rebatch_from_nccl(NULL, (int)ncclCommCount(comm, &size));
    if (!status)
        status = rebatch_from_cuda(NULL, (int)rebatch_nccl_allocate(nccl));
    if (!status) {
        status = rebatch_nccl_all_reduce(&word, 1, REBATCH_SUM, REBATCH_NCCL_SETUP_MS, nccl);
        if (status) /* before memory is freed, which waits for the collective */
            rebatch_nccl_abort(nccl);
    }
    if (status) {
        rebatch_nccl_close(nccl);
        return status;
    }
    out->rank = (uint32_t)rank;
    out->size = (uint32_t)size;
    out->all_reduce = rebatch_nccl_all_reduce;
    out->abort = rebatch_nccl_abort;
    out->user = nccl;
    return REBATCH_OK;
}

#endif
