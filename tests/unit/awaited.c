/* Owns work that ends when it is waited for. Must not know who waits. */
#include "unit/awaited.h"

#include <criterion/criterion.h>

static struct awaited *latest; /* each test is a process of its own */
static const struct rbi_device_ops *host_ops;

static rebatch_status wait_for_event(void *self, rbi_event event)
{
    (void)sem_post(&latest->wanted);
    return host_ops->event_synchronize(self, event);
}

static rebatch_status wait_for_stream(void *self, rebatch_stream stream)
{
    (void)sem_post(&latest->wanted);
    return host_ops->stream_synchronize(self, stream);
}

static rebatch_status wait_for_all(void *self)
{
    (void)sem_post(&latest->wanted);
    return host_ops->synchronize(self);
}

static void work_when_wanted(void *user)
{
    struct awaited *const work = user;
    while (sem_wait(&work->wanted) != 0) {
    }
    atomic_store(&work->is_done, true);
}

void awaited_enqueue(struct awaited *work, rebatch_device *device, rebatch_device *host,
                     rebatch_stream stream)
{
    static struct rbi_device_ops ops;
    host_ops = host_ops ? host_ops : host->ops;
    ops = *host_ops;
    ops.event_synchronize = wait_for_event;
    ops.stream_synchronize = wait_for_stream;
    ops.synchronize = wait_for_all;
    host->ops = &ops;
    latest = work;
    atomic_store(&work->is_done, false);
    cr_assert_eq(sem_init(&work->wanted, 0, 0), 0);
    cr_assert_eq(rebatch_stream_call(device, stream, work_when_wanted, work), REBATCH_OK);
}
