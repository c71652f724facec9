/* Streams and events of the host device: each stream is a thread that runs its queue in order.
 * Must not know memory or capacities. */
#ifndef RBI_HOST_STREAM_H
#define RBI_HOST_STREAM_H

#include "device/device.h"

rebatch_status rbi_host_stream_create(rebatch_stream *out);
/* Runs what is left, then ends the thread. */
void rbi_host_stream_destroy(rebatch_stream stream);
rebatch_status rbi_host_stream_synchronize(rebatch_stream stream);

/* Enqueue; on the NULL stream they run before the call returns. */
rebatch_status rbi_host_stream_call(rebatch_stream stream, void (*function)(void *), void *user);
rebatch_status rbi_host_stream_copy(rebatch_stream stream, void *to, const void *from,
                                    size_t bytes);
rebatch_status rbi_host_stream_fill(rebatch_stream stream, void *to, uint8_t value, size_t bytes);

rebatch_status rbi_host_event_create(rbi_event *out);
void rbi_host_event_destroy(rbi_event event);
rebatch_status rbi_host_event_record(rbi_event event, rebatch_stream stream);
bool rbi_host_event_is_done(rbi_event event);
void rbi_host_event_synchronize(rbi_event event);

/* The device's list of its streams is threaded through them. */
rebatch_stream *rbi_host_stream_next(rebatch_stream stream);

#endif
