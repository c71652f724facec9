/* A device for models: a dry one whose streams go on only when they are told to, or waited for, so
 * that a test decides when work is done, and the same calls give the same run. It knows what is
 * mapped and which work is under way, and fails the test when memory is taken from under it. */
#ifndef LAZY_DEVICE_H
#define LAZY_DEVICE_H

#include "device/device.h"

#define LAZY_STREAMS 8 /* the default stream included */

/* One device at a time: each test is a process of its own. */
rebatch_device *lazy_open(size_t capacity_bytes, size_t page_bytes, bool has_virtual_memory);
/* After everything was given back. */
void lazy_close(rebatch_device *device);

/* Enqueues work on a stream that uses memory. */
void lazy_use(rebatch_stream stream, const void *memory, size_t bytes);
/* The same, without the pool's knowledge: `owner`, whose memory it is, waits for it before it uses
 * the memory for anything else. */
void lazy_read(rebatch_stream stream, rebatch_stream owner, const void *memory, size_t bytes);
/* Whether events can be had; they can at first. */
void lazy_set_events(bool are_there);
/* Work of a stream is done: a `share` of what is under way, of 8. */
void lazy_go_on(rebatch_stream stream, unsigned share);
/* How many of these are not done. */
size_t lazy_under_way(void);
/* How often an event was made, recorded, queried or waited for. */
uint64_t lazy_event_calls(void);
/* Fails the test when memory is not mapped, or work of another stream may still use it. */
void lazy_check_fresh(rebatch_stream stream, const void *memory, size_t bytes);

#endif
