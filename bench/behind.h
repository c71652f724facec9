/* A dry device that is behind its host, as a GPU is: an event is done `behind.lag` calls of the
 * pool after it was recorded; 0 is an idle GPU. Whoever calls the pool counts `behind.now` up. */
#ifndef REBATCH_BENCH_BEHIND_H
#define REBATCH_BENCH_BEHIND_H

#include <stdlib.h>

#include "device/device.h"

struct rbi_event_object {
    uint64_t done_at;
};

static struct {
    struct rbi_device_ops ops; /* the dry device's, with the events below */
    uint64_t now, lag;         /* in calls of the pool */
} behind;

static inline rebatch_status behind_create(void *self, rbi_event *out)
{
    (void)self;
    *out = calloc(1, sizeof **out);
    return *out ? REBATCH_OK : REBATCH_E_HOST_OOM;
}

static inline void behind_destroy(void *self, rbi_event event)
{
    (void)self;
    free(event);
}

static inline rebatch_status behind_record(void *self, rbi_event event)
{
    (void)self;
    event->done_at = behind.now + behind.lag;
    return REBATCH_OK;
}

static inline rebatch_status behind_query(void *self, rbi_event event, bool *done)
{
    (void)self;
    *done = event->done_at <= behind.now;
    return REBATCH_OK;
}

static inline rebatch_status behind_await(void *self, rbi_event event)
{
    (void)self;
    behind.now = event->done_at > behind.now ? event->done_at : behind.now;
    return REBATCH_OK;
}

static inline rebatch_status behind_open(rebatch_device **out, size_t capacity, size_t page_bytes)
{
    const rebatch_status status = rebatch_device_open_dry(out, capacity, page_bytes);
    if (status)
        return status;
    behind.ops = *(*out)->ops;
    behind.ops.event_create = behind_create;
    behind.ops.event_destroy = behind_destroy;
    behind.ops.event_record = behind_record;
    behind.ops.event_query = behind_query;
    behind.ops.event_synchronize = behind_await;
    (*out)->ops = &behind.ops;
    behind.now = 0;
    return REBATCH_OK;
}

#endif
