/* What the tests of operations on the host share: a queue on a host device.
 * Must not know the library. */
#ifndef GPT_TEST_HOST_H
#define GPT_TEST_HOST_H

#include <criterion/criterion.h>

#include "gpt/error.h"
#include "gpt/host.h"
#include "gpt_common.h"

static struct gpt_queue queue;
static const struct gpt_ops *const ops = &gpt_host_ops;

static void set_up(void)
{
    ASSERT_OK(rebatch_device_open_host(&queue.device, REBATCH_UNLIMITED, NULL));
    ASSERT_OK(ops->open(&queue));
}

static void tear_down(void)
{
    ops->close(&queue);
    rebatch_device_close(queue.device);
    release_arrays();
}

#endif
