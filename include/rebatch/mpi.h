/** @file mpi.h
 *  A group whose ranks vote through MPI (group.h).
 *
 *  It is not part of rebatch.h, because it needs MPI's header. Its functions are inline, because
 *  the library links no MPI. docs/distributed.md has a training step.
 *
 *  @code
 *  static rebatch_mpi votes;
 *  rebatch_group group;
 *  rebatch_options options = REBATCH_OPTIONS_INIT;
 *  if (rebatch_group_mpi(&group, &votes, MPI_COMM_WORLD) == REBATCH_OK)
 *      options.group = &group;
 *  @endcode
 *
 *  Call MPI_Init_thread() with MPI_THREAD_MULTIPLE if another thread than that of the steps calls
 *  MPI during a step. */
#ifndef REBATCH_MPI_H
#define REBATCH_MPI_H

#include <mpi.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "rebatch/group.h"

/** What the functions of the group use. Its members are not for the program. */
typedef struct rebatch_mpi {
    MPI_Comm comm;                       /**< of the votes alone */
    uint64_t words[REBATCH_GROUP_WORDS]; /**< of the vote that runs, or never ended */
    int has_failed;                      /**< a vote never ended */
    int rank;                            /**< of this process in the communicator */
    int size;                            /**< of the communicator */
    uint64_t vote;                       /**< its number */
    unsigned char *is_here;              /**< of each rank, in the vote that runs */
} rebatch_mpi;

/** @cond internal */
#define REBATCH_MPI_POLL_S 0.01 /* how long a wait keeps the processor busy: then it sleeps */
/** @endcond */

/** Wait for a request, but not for ever: MPI_Wait() with a timeout, for the collectives that the
 *  program begins in `reduce`, such as MPI_Iallreduce().
 *  @param request     as for MPI_Test()
 *  @param timeout_ms  longest wait in milliseconds
 *  @return REBATCH_OK; REBATCH_E_PEER when the request is not complete by then, or when MPI reports
 *          an error. The request may still be active: its buffers must stay until the process ends.
 *          rebatch_last_error() has no text */
static inline rebatch_status rebatch_mpi_wait(MPI_Request *request, uint64_t timeout_ms)
{
    const double began = MPI_Wtime();
    for (;;) {
        int is_complete = 0;
        if (MPI_Test(request, &is_complete, MPI_STATUS_IGNORE) != MPI_SUCCESS)
            return REBATCH_E_PEER;
        if (is_complete)
            return REBATCH_OK;
        const double waited = MPI_Wtime() - began;
        if (waited * 1e3 > (double)timeout_ms)
            return REBATCH_E_PEER;
        if (waited > REBATCH_MPI_POLL_S)
            (void)poll(NULL, 0, 1);
    }
}

/** @cond internal */
/* Who is there. A rank that has waited for half of its timeout in a vote asks all others, and a
 * rank that waits in the same vote answers. A message has no bytes: its tag is the vote, and
 * whether it is the answer. */
static inline void rebatch_mpi_send(const rebatch_mpi *mpi, int to, int is_answer)
{
    const int tag = (int)(mpi->vote % 16000) * 2 + is_answer;
    MPI_Request request;
    if (MPI_Isend(NULL, 0, MPI_BYTE, to, tag, mpi->comm, &request) == MPI_SUCCESS)
        (void)MPI_Request_free(&request);
}

static inline void rebatch_mpi_ask(const rebatch_mpi *mpi)
{
    for (int rank = 0; rank < mpi->size; rank++)
        if (rank != mpi->rank)
            rebatch_mpi_send(mpi, rank, 0);
}

/* Messages of earlier votes, which have ended, say nothing. */
static inline void rebatch_mpi_hear(rebatch_mpi *mpi)
{
    int is_there = 0;
    MPI_Status status;
    while (MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, mpi->comm, &is_there, &status) == MPI_SUCCESS &&
           is_there) {
        const int from = status.MPI_SOURCE, tag = status.MPI_TAG;
        if (MPI_Recv(NULL, 0, MPI_BYTE, from, tag, mpi->comm, MPI_STATUS_IGNORE) != MPI_SUCCESS)
            return;
        if (tag / 2 != (int)(mpi->vote % 16000))
            continue;
        mpi->is_here[from] = 1;
        if (tag % 2 == 0)
            rebatch_mpi_send(mpi, from, 1);
    }
}

/* As rebatch_mpi_wait(), while other ranks ask. */
static inline rebatch_status rebatch_mpi_wait_for_vote(rebatch_mpi *mpi, MPI_Request *request,
                                                       uint64_t timeout_ms)
{
    const double began = MPI_Wtime();
    int has_asked = 0;
    for (;;) {
        int is_complete = 0;
        if (MPI_Test(request, &is_complete, MPI_STATUS_IGNORE) != MPI_SUCCESS)
            return REBATCH_E_PEER;
        if (is_complete)
            return REBATCH_OK;
        const double waited = MPI_Wtime() - began;
        if (waited <= REBATCH_MPI_POLL_S)
            continue;
        rebatch_mpi_hear(mpi);
        if (waited * 1e3 > (double)timeout_ms)
            return REBATCH_E_PEER;
        if (!has_asked && waited * 2e3 > (double)timeout_ms) {
            has_asked = 1;
            rebatch_mpi_ask(mpi);
        }
        (void)poll(NULL, 0, 1);
    }
}

/* The one rank that did not come; where there are several, none is named. */
static inline uint32_t rebatch_mpi_missing(void *user)
{
    const rebatch_mpi *const mpi = (const rebatch_mpi *)user;
    int missing = mpi->size;
    for (int rank = 0; rank < mpi->size; rank++) {
        if (mpi->is_here[rank] || rank == mpi->rank)
            continue;
        if (missing < mpi->size)
            return (uint32_t)mpi->size;
        missing = rank;
    }
    return (uint32_t)missing;
}

static inline rebatch_status rebatch_mpi_all_reduce(uint64_t *words, size_t count,
                                                    rebatch_reduction reduction,
                                                    uint64_t timeout_ms, void *user)
{
    rebatch_mpi *const mpi = (rebatch_mpi *)user;
    const MPI_Op op = reduction == REBATCH_MIN   ? MPI_MIN
                      : reduction == REBATCH_MAX ? MPI_MAX
                                                 : MPI_SUM;
    MPI_Request request;
    if (mpi->has_failed)
        return REBATCH_E_PEER;
    mpi->vote++;
    memset(mpi->is_here, 0, (size_t)mpi->size);
    memcpy(mpi->words, words, count * sizeof *words);
    mpi->has_failed = MPI_Iallreduce(MPI_IN_PLACE, mpi->words, (int)count, MPI_UINT64_T, op,
                                     mpi->comm, &request) != MPI_SUCCESS ||
                      rebatch_mpi_wait_for_vote(mpi, &request, timeout_ms) != REBATCH_OK;
    if (mpi->has_failed)
        return REBATCH_E_PEER;
    memcpy(words, mpi->words, count * sizeof *words);
    return REBATCH_OK;
}
/** @endcond */

/** Wait for all ranks: call it first in `reduce`, which would wait for a missing rank twice
 *  otherwise, for its sum and in the vote behind it. All ranks call it, also when `is_abandoned` is
 *  set.
 *  @param mpi         of rebatch_group_mpi()
 *  @param timeout_ms  longest wait in milliseconds
 *  @return REBATCH_OK; REBATCH_E_PEER when a rank did not come: return it from `reduce`, and the
 *          step ends with the number of that rank. rebatch_last_error() has no text */
static inline rebatch_status rebatch_mpi_meet(rebatch_mpi *mpi, uint64_t timeout_ms)
{
    uint64_t none = 0;
    return rebatch_mpi_all_reduce(&none, 1, REBATCH_SUM, timeout_ms, mpi);
}

/** Make the group of a communicator's ranks. All of them call it, after MPI_Init(). The votes have
 *  a duplicate of the communicator, on which an error is returned instead of ending the program.
 *
 *  When a vote times out, the ranks that wait in it have asked each other who is there, and the
 *  message of REBATCH_E_PEER names the rank that is missing, if it is one. mpirun names a process
 *  that died, and by default ends the others. A vote that timed out cannot be withdrawn: end the
 *  program with MPI_Abort().
 *  @param[out] out  the group, for rebatch_options.group
 *  @param[out] mpi  owned by the caller; must stay until MPI_Finalize() or rebatch_mpi_close()
 *  @param comm      the ranks; duplicated
 *  @return REBATCH_OK; REBATCH_E_INVALID when an argument is NULL or MPI refuses the communicator;
 *          REBATCH_E_HOST_OOM; rebatch_last_error() has no text */
static inline rebatch_status rebatch_group_mpi(rebatch_group *out, rebatch_mpi *mpi, MPI_Comm comm)
{
    const rebatch_group none = REBATCH_GROUP_INIT;
    if (!out || !mpi)
        return REBATCH_E_INVALID;
    *out = none;
    memset(mpi, 0, sizeof *mpi);
    mpi->comm = MPI_COMM_NULL;
    if (comm == MPI_COMM_NULL || MPI_Comm_dup(comm, &mpi->comm) != MPI_SUCCESS ||
        MPI_Comm_set_errhandler(mpi->comm, MPI_ERRORS_RETURN) != MPI_SUCCESS ||
        MPI_Comm_rank(mpi->comm, &mpi->rank) != MPI_SUCCESS ||
        MPI_Comm_size(mpi->comm, &mpi->size) != MPI_SUCCESS)
        return REBATCH_E_INVALID;
    mpi->is_here = (unsigned char *)calloc((size_t)mpi->size, 1);
    if (!mpi->is_here)
        return REBATCH_E_HOST_OOM;
    out->rank = (uint32_t)mpi->rank;
    out->size = (uint32_t)mpi->size;
    out->all_reduce = rebatch_mpi_all_reduce;
    out->missing = rebatch_mpi_missing;
    out->user = mpi;
    return REBATCH_OK;
}

/** Free the communicator of the votes, after rebatch_close() and before MPI_Finalize(), on all
 *  ranks. After a vote that failed, it stays until the process ends.
 *  @param mpi  of rebatch_group_mpi(); NULL does nothing */
static inline void rebatch_mpi_close(rebatch_mpi *mpi)
{
    if (!mpi)
        return;
    if (!mpi->has_failed && mpi->is_here && mpi->comm != MPI_COMM_NULL) {
        rebatch_mpi_hear(mpi); /* what was asked late */
        (void)MPI_Comm_free(&mpi->comm);
    }
    free(mpi->is_here);
    mpi->is_here = NULL;
}

#endif
