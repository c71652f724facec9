/* Owns the ranks that mpirun has started: their votes, and what two of them send each other.
 * Must not know what they train. */
#include <limits.h>

#include "gpt/error.h"
#include "gpt/ranks.h"
#include "rebatch/mpi.h"

#define TIMEOUT_MS 300000

static rebatch_mpi votes;

/* In messages of at most INT_MAX bytes. */
static rebatch_status swap(uint32_t other, const void *mine, void *theirs, size_t bytes,
                           rebatch_stream stream)
{
    (void)stream; /* host memory needs none */
    const char *from = mine;
    char *to = theirs;
    rebatch_status status = REBATCH_OK;
    for (size_t done = 0; done < bytes && !status;) {
        const int count = bytes - done < INT_MAX ? (int)(bytes - done) : INT_MAX;
        MPI_Request requests[2];
        if (MPI_Irecv(to + done, count, MPI_BYTE, (int)other, 0, MPI_COMM_WORLD, &requests[0]) ||
            MPI_Isend(from + done, count, MPI_BYTE, (int)other, 0, MPI_COMM_WORLD, &requests[1]))
            return gpt_error(REBATCH_E_PEER, "rank %u cannot be reached", other);
        for (int i = 0; i < 2 && !status; i++)
            status = rebatch_mpi_wait(&requests[i], TIMEOUT_MS);
        done += (size_t)count;
    }
    return status ? gpt_error(status, "rank %u sent no gradients within %d ms", other, TIMEOUT_MS)
                  : REBATCH_OK;
}

rebatch_status gpt_ranks_open(struct gpt_ranks *out)
{
    int level;
    *out = (struct gpt_ranks){.swap = swap};
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level) ||
        rebatch_group_mpi(&out->group, &votes, MPI_COMM_WORLD))
        return gpt_error(REBATCH_E_PEER, "MPI did not start");
    const uint32_t size = out->group.size;
    return size & (size - 1) ? gpt_error(REBATCH_E_UNSUPPORTED,
                                         "there are %u ranks: expected a power of two", size)
                             : REBATCH_OK;
}

void gpt_ranks_close(struct gpt_ranks *ranks, rebatch_status status)
{
    if (!ranks->group.all_reduce)
        return;
    if (status && ranks->group.size > 1)
        (void)MPI_Abort(MPI_COMM_WORLD, 1);
    rebatch_mpi_close(&votes);
    (void)MPI_Finalize();
}
