/* The processes that train one model together, in a power of two. Must not know what they train. */
#ifndef GPT_RANKS_H
#define GPT_RANKS_H

#include "rebatch/device.h"
#include "rebatch/group.h"

struct gpt_ranks {
    rebatch_group group;
    bool is_on_device; /* what swap() sends and receives is memory of this rank's device */
    /* Sends `mine` to another rank and receives what that rank sends: both call it, for as many
     * bytes. What is sent has been enqueued on `stream` or is there; afterwards what was received
     * is there. Both may be the same memory where values do not matter.
     *  @return REBATCH_OK; REBATCH_E_PEER when the other rank does not come. The memory must then
     *          stay until the process ends */
    rebatch_status (*swap)(uint32_t other, const void *mine, void *theirs, size_t bytes,
                           rebatch_stream stream);
};

/* Those that were started together; in a program without MPI or NCCL this process alone. Only once.
 *  @return REBATCH_OK, REBATCH_E_UNSUPPORTED for a number of ranks that is no power of two,
 *          REBATCH_E_INVALID for a rank that is none, or REBATCH_E_PEER */
rebatch_status gpt_ranks_open(struct gpt_ranks *out);
/* After rebatch_close(). When `status`, with which the training ended, is no success, all ranks
 * end: with MPI at once, and it then does not return; with NCCL in their next step. */
void gpt_ranks_close(struct gpt_ranks *ranks, rebatch_status status);

#endif
