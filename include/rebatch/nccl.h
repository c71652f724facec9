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
 *  its own in `reduce`, or between two steps. */
#ifndef REBATCH_NCCL_H
#define REBATCH_NCCL_H

#include <cuda_runtime.h>
#include <nccl.h>
#include <poll.h>
#include <string.h>
#include <time.h>

#include "rebatch/group.h"

/** What the functions of the group use. The program reads is_aborted alone. */
typedef struct rebatch_nccl {
    ncclComm_t comm;     /**< of the program */
    cudaStream_t stream; /**< of the votes alone */
    cudaEvent_t event;   /**< the vote has come back */
    uint64_t *device;    /**< its words on the GPU */
    uint64_t *host;      /**< and in pinned memory */
    int is_aborted;      /**< the communicator is gone: do not call ncclCommDestroy() */
} rebatch_nccl;

/** @cond internal */
#define REBATCH_NCCL_POLL_MS 10.0 /* how long a vote keeps the processor busy: then it sleeps */

static inline double rebatch_nccl_ms(void)
{
    struct timespec now;
    (void)timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

/* Whether the vote that was enqueued has come back in time. */
static inline int rebatch_nccl_wait(rebatch_nccl *nccl, uint64_t timeout_ms)
{
    double waited = 0, before = rebatch_nccl_ms();
    for (;;) {
        const double now = rebatch_nccl_ms(), passed = now - before;
        const cudaError_t code = cudaEventQuery(nccl->event);
        ncclResult_t result = ncclSuccess;
        if (code != cudaErrorNotReady)
            return code == cudaSuccess;
        (void)cudaGetLastError(); /* it is no error */
        if (ncclCommGetAsyncError(nccl->comm, &result) != ncclSuccess ||
            (result != ncclSuccess && result != ncclInProgress))
            return 0;
        waited += passed < 0 || passed > 1000 ? 0 : passed; /* else the clock was set */
        before = now;
        if (waited > (double)timeout_ms)
            return 0;
        if (waited > REBATCH_NCCL_POLL_MS)
            (void)poll(NULL, 0, 1);
    }
}

static inline rebatch_status rebatch_nccl_all_reduce(uint64_t *words, size_t count,
                                                     rebatch_reduction reduction,
                                                     uint64_t timeout_ms, void *user)
{
    rebatch_nccl *const nccl = (rebatch_nccl *)user;
    const ncclRedOp_t op = reduction == REBATCH_MIN   ? ncclMin
                           : reduction == REBATCH_MAX ? ncclMax
                                                      : ncclSum;
    const size_t bytes = count * sizeof *words;
    ncclResult_t result;
    memcpy(nccl->host, words, bytes);
    if (cudaMemcpyAsync(nccl->device, nccl->host, bytes, cudaMemcpyHostToDevice, nccl->stream) !=
        cudaSuccess)
        return REBATCH_E_PEER;
    result =
        ncclAllReduce(nccl->device, nccl->device, count, ncclUint64, op, nccl->comm, nccl->stream);
    if ((result != ncclSuccess && result != ncclInProgress) ||
        cudaMemcpyAsync(nccl->host, nccl->device, bytes, cudaMemcpyDeviceToHost, nccl->stream) !=
            cudaSuccess ||
        cudaEventRecord(nccl->event, nccl->stream) != cudaSuccess ||
        !rebatch_nccl_wait(nccl, timeout_ms))
        return REBATCH_E_PEER;
    memcpy(words, nccl->host, bytes);
    return REBATCH_OK;
}

/* The collectives in flight fail, on this rank and, as their connections close, on the others. */
static inline void rebatch_nccl_abort(void *user)
{
    rebatch_nccl *const nccl = (rebatch_nccl *)user;
    nccl->is_aborted = 1;
    (void)ncclCommAbort(nccl->comm);
}
/** @endcond */

/** Free what rebatch_group_nccl() made, after rebatch_close(). The communicator stays.
 *  @param nccl  of rebatch_group_nccl(); NULL does nothing */
static inline void rebatch_nccl_close(rebatch_nccl *nccl)
{
    if (!nccl)
        return;
    if (nccl->stream)
        (void)cudaStreamDestroy(nccl->stream);
    if (nccl->event)
        (void)cudaEventDestroy(nccl->event);
    (void)(cudaFree)(nccl->device);
    (void)cudaFreeHost(nccl->host);
    memset(nccl, 0, sizeof *nccl);
}

/** Make the group of a communicator's ranks, each with the GPU that is current. All memory that
 *  votes need is allocated here, by CUDA and not from a pool. NCCL cannot say which rank did not
 *  come, so the message of REBATCH_E_PEER has no number. After REBATCH_E_PEER for a missing rank
 *  the communicator has been aborted (rebatch_nccl.is_aborted).
 *  @param[out] out   the group, for rebatch_options.group
 *  @param[out] nccl  owned by the caller; must stay until rebatch_nccl_close()
 *  @param comm       blocking, with all ranks; borrowed until rebatch_nccl_close()
 *  @return REBATCH_OK; REBATCH_E_INVALID when an argument is NULL or NCCL refuses the communicator;
 *          REBATCH_E_DEVICE when CUDA fails; rebatch_last_error() has no text */
static inline rebatch_status rebatch_group_nccl(rebatch_group *out, rebatch_nccl *nccl,
                                                ncclComm_t comm)
{
    const rebatch_group none = REBATCH_GROUP_INIT;
    const size_t bytes = REBATCH_GROUP_WORDS * sizeof(uint64_t);
    int rank, size;
    if (!out || !nccl)
        return REBATCH_E_INVALID;
    *out = none;
    memset(nccl, 0, sizeof *nccl);
    if (!comm || ncclCommUserRank(comm, &rank) != ncclSuccess ||
        ncclCommCount(comm, &size) != ncclSuccess)
        return REBATCH_E_INVALID;
    nccl->comm = comm;
    if (cudaStreamCreateWithFlags(&nccl->stream, cudaStreamNonBlocking) != cudaSuccess ||
        cudaEventCreateWithFlags(&nccl->event, cudaEventDisableTiming) != cudaSuccess ||
        (cudaMalloc)((void **)&nccl->device, bytes) != cudaSuccess ||
        cudaMallocHost((void **)&nccl->host, bytes) != cudaSuccess) {
        rebatch_nccl_close(nccl);
        return REBATCH_E_DEVICE;
    }
    out->rank = (uint32_t)rank;
    out->size = (uint32_t)size;
    out->all_reduce = rebatch_nccl_all_reduce;
    out->abort = rebatch_nccl_abort;
    out->user = nccl;
    return REBATCH_OK;
}

#endif
