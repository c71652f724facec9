/* Work on a stream that goes on when somebody waits for the device, and not before: what the pool
 * must wait for is not done earlier, and is done when the pool has waited, however fast or slow the
 * machine is. */
#ifndef AWAITED_H
#define AWAITED_H

#include <semaphore.h>
#include <stdatomic.h>

#include "device/device.h"

struct awaited {
    sem_t wanted;
    atomic_bool is_done;
};

/* Enqueues it on a stream of the device, which is a host device or lies over `host`. It outlives
 * the device's last wait; a test has one at a time. */
void awaited_enqueue(struct awaited *work, rebatch_device *device, rebatch_device *host,
                     rebatch_stream stream);

#endif
