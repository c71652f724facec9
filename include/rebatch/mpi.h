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
#include <string.h>

#include "rebatch/group.h"

/** What the functions of the group use. Its members are not for the program. */
typedef struct rebatch_mpi {
    MPI_Comm comm;                       /**< of the votes alone */
    uint64_t words[REBATCH_GROUP_WORDS]; /**< of the vote that runs, or never ended */
    int has_failed;                      /**< a vote never ended */
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
static inline rebatch_status rebatch_mpi_all_reduce(uint64_t *words, size_t count,
                                                    rebatch_reduction reduction,
                                                    uint64_t timeout_ms, void *user)
{
    rebatch_mpi *const mpi = (rebatch_mpi *)user;
    const MPI_Op op = reduction == REBATCH_MIN   ? MPI_MIN
                      : reduction == REBATCH_MAX ? MPI_MAX
                                                 : MPI_SUM;
    MPI_Request request;
    memcpy(mpi->words, words, count * sizeof *words);
    mpi->has_failed = MPI_Iallreduce(MPI_IN_PLACE, mpi->words, (int)count, MPI_UINT64_T, op,
                                     mpi->comm, &request) != MPI_SUCCESS ||
                      rebatch_mpi_wait(&request, timeout_ms) != REBATCH_OK;
    if (mpi->has_failed)
        return REBATCH_E_PEER;
    memcpy(words, mpi->words, count * sizeof *words);
    return REBATCH_OK;
}
/** @endcond */

/** Make the group of a communicator's ranks. All of them call it, after MPI_Init(). The votes have
 *  a duplicate of the communicator, on which an error is returned instead of ending the program.
 *
 *  MPI cannot say which rank did not come, so the message of REBATCH_E_PEER has no number; mpirun
 *  names a process that died, and by default ends the others. A vote that timed out cannot be
 *  withdrawn either: end the program with MPI_Abort().
 *  @param[out] out  the group, for rebatch_options.group
 *  @param[out] mpi  owned by the caller; must stay until MPI_Finalize() or rebatch_mpi_close()
 *  @param comm      the ranks; duplicated
 *  @return REBATCH_OK; REBATCH_E_INVALID when an argument is NULL or MPI refuses the communicator;
 *          rebatch_last_error() has no text */
static inline rebatch_status rebatch_group_mpi(rebatch_group *out, rebatch_mpi *mpi, MPI_Comm comm)
{
    const rebatch_group none = REBATCH_GROUP_INIT;
    int rank, size;
    if (!out || !mpi)
        return REBATCH_E_INVALID;
    *out = none;
    memset(mpi, 0, sizeof *mpi);
    mpi->comm = MPI_COMM_NULL;
    if (comm == MPI_COMM_NULL || MPI_Comm_dup(comm, &mpi->comm) != MPI_SUCCESS ||
        MPI_Comm_set_errhandler(mpi->comm, MPI_ERRORS_RETURN) != MPI_SUCCESS ||
        MPI_Comm_rank(mpi->comm, &rank) != MPI_SUCCESS ||
        MPI_Comm_size(mpi->comm, &size) != MPI_SUCCESS)
        return REBATCH_E_INVALID;
    out->rank = (uint32_t)rank;
    out->size = (uint32_t)size;
    out->all_reduce = rebatch_mpi_all_reduce;
    out->user = mpi;
    return REBATCH_OK;
}

/** Free the communicator of the votes, after rebatch_close() and before MPI_Finalize(), on all
 *  ranks. After a vote that failed, it stays until the process ends.
 *  @param mpi  of rebatch_group_mpi(); NULL does nothing */
static inline void rebatch_mpi_close(rebatch_mpi *mpi)
{
    if (mpi && !mpi->has_failed && mpi->comm != MPI_COMM_NULL)
        (void)MPI_Comm_free(&mpi->comm);
}

#endif
