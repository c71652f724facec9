/* Trainings of several processes: for each seed, needs, OOMs and ranks that fail are drawn alike on
 * all ranks, and each compares its end of every step with what was drawn. With a place, the last
 * rank is killed there, or falls silent. Must not know how ranks are connected. */
#ifndef DRAWN_H
#define DRAWN_H

#include "rebatch/rebatch.h"

/* Each rank's; all of them call open(), close() and sum() together. */
struct drawn_connection {
    rebatch_status (*open)(rebatch_group *out); /* again and again */
    void (*close)(void);                        /* waits for nobody */
    rebatch_status (*open_device)(rebatch_device **out);
    /* Sums over the ranks, in place. REBATCH_E_PEER when one does not come. */
    rebatch_status (*sum)(uint64_t *values, size_t count, uint64_t timeout_ms);
    void (*end)(int code); /* of the process; does not return */
};

/* @param what  a number of seeds, or where the last rank ends: "zero_grad", "forward", "reduce",
 *              "update" or "silent"; then it does not return
 * @return      what the process is to exit with */
int drawn_live(const struct drawn_connection *connection, uint32_t rank, uint32_t size,
               const char *what);

#endif
