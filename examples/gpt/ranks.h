/* The processes that train one model together, in a power of two. Must not know what they train. */
#ifndef GPT_RANKS_H
#define GPT_RANKS_H

#include "rebatch/group.h"

struct gpt_ranks {
    rebatch_group group;
    /* Sends `mine` to another rank and receives what that rank sends: both call it.
     *  @return REBATCH_OK; REBATCH_E_PEER when it does not come. The memory must then stay until
     *          the process ends */
    rebatch_status (*swap)(uint32_t other, const void *mine, void *theirs, size_t bytes);
};

/* Those that mpirun has started; in a program without MPI this process alone. Only once.
 *  @return REBATCH_OK, REBATCH_E_UNSUPPORTED for a number of ranks that is no power of two, or
 *          REBATCH_E_PEER */
rebatch_status gpt_ranks_open(struct gpt_ranks *out);
/* After rebatch_close(). When `status`, with which the training ended, is no success, it ends all
 * ranks and does not return where there are several. */
void gpt_ranks_close(struct gpt_ranks *ranks, rebatch_status status);

#endif
