/* Owns the ranks that mpirun has started, and their votes through rebatch/mpi.h.
 * Must not know what they live through (drawn.h). */
#include <stdlib.h>
#include <string.h>

#include "drawn/drawn.h"
#include "rebatch/mpi.h"

#define SUMS_MOST 16

static rebatch_mpi votes;
static bool are_open; /* the votes: sums are made without them too */

static rebatch_status open_group(rebatch_group *out)
{
    const rebatch_status status = rebatch_group_mpi(out, &votes, MPI_COMM_WORLD);
    are_open = status == REBATCH_OK;
    return status;
}

static void close_group(void)
{
    are_open = false;
    rebatch_mpi_close(&votes);
}

static rebatch_status open_device(rebatch_device **out)
{
    return rebatch_device_open_host(out, (size_t)4 << 20, NULL);
}

static rebatch_status sum(uint64_t *values, size_t count, uint64_t timeout_ms)
{
    static uint64_t sums[SUMS_MOST]; /* MPI may still have it when the wait has ended */
    MPI_Request request;
    if (are_open && rebatch_mpi_meet(&votes, timeout_ms))
        return REBATCH_E_PEER;
    memcpy(sums, values, count * sizeof *values);
    if (MPI_Iallreduce(MPI_IN_PLACE, sums, (int)count, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD,
                       &request))
        return REBATCH_E_PEER;
    const rebatch_status status = rebatch_mpi_wait(&request, timeout_ms);
    if (!status)
        memcpy(values, sums, count * sizeof *values);
    return status;
}

static void end(int code)
{
    MPI_Abort(MPI_COMM_WORLD, code);
    exit(code);
}

int main(int count, char **arguments)
{
    static const struct drawn_connection connection = {open_group, close_group, open_device, sum,
                                                       end};
    int rank, size;
    MPI_Init(&count, &arguments);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    const int code =
        drawn_live(&connection, (uint32_t)rank, (uint32_t)size, count > 1 ? arguments[1] : "1");
    MPI_Finalize();
    return code;
}
