/* Owns the ranks of a build without MPI and NCCL: there is this process alone. Stands in for
 * ranks_mpi.c and ranks_nccl.c. Must not know anything else. */
#include "gpt/ranks.h"

static rebatch_status vote_alone(uint64_t *words, size_t count, rebatch_reduction reduction,
                                 uint64_t timeout_ms, void *user)
{
    (void)words, (void)count, (void)reduction, (void)timeout_ms, (void)user;
    return REBATCH_OK;
}

rebatch_status gpt_ranks_open(struct gpt_ranks *out)
{
    *out = (struct gpt_ranks){.group = REBATCH_GROUP_INIT};
    out->group.size = 1;
    out->group.all_reduce = vote_alone;
    return REBATCH_OK;
}

void gpt_ranks_close(struct gpt_ranks *ranks, rebatch_status status)
{
    (void)ranks, (void)status;
}
