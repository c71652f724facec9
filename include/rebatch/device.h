/** @file device.h
 *  Where memory comes from: a GPU, or the CPU under a cap, or one of them with faults put in.
 *
 *  A device hands out memory and streams. Nothing here caches: that is the pool's work (pool.h). */
#ifndef REBATCH_DEVICE_H
#define REBATCH_DEVICE_H

#include "rebatch/status.h"

/** A device. Open it, hand it to rebatch_open() or rebatch_pool_create(), close it last. */
typedef struct rebatch_device rebatch_device;

/** A queue of work that runs in order. NULL is the device's default stream. On a CUDA device this
 *  is the CUstream (cudaStream_t) itself, so the two may be cast to each other; there, a stream
 *  that was made elsewhere is as good as one made here. */
typedef struct rebatch_stream_object *rebatch_stream;

/** No cap: a host device may use whatever the machine gives. */
#define REBATCH_UNLIMITED SIZE_MAX

/** What a device has and gives, in bytes. */
typedef struct rebatch_memory_info {
    size_t total_bytes; /**< all of it: the card's memory, or the host device's capacity */
    size_t free_bytes;  /**< the room: what a new allocation could still get */
    size_t used_bytes;  /**< what was taken through this rebatch_device and not given back */
} rebatch_memory_info;

/** Options of a host device. */
typedef struct rebatch_host_options {
    size_t struct_size;   /**< sizeof(rebatch_host_options) */
    size_t granule_bytes; /**< allocations are rounded up to this; a power of two of at least a
                               page; 0: 65536 bytes */
} rebatch_host_options;
#define REBATCH_HOST_OPTIONS_INIT                                                                  \
    {                                                                                              \
        sizeof(rebatch_host_options), 0                                                            \
    }

/** The kinds of device call that a fault device can fail: X(name, what it is). */
#define REBATCH_FAULT_CALLS(X)                                                                     \
    X(ALLOC, "allocate memory")                                                                    \
    X(COPY, "copy memory")                                                                         \
    X(FILL, "fill memory")                                                                         \
    X(STREAM, "make, wait for or enqueue on a stream")                                             \
    X(EVENT, "make or record an event")                                                            \
    X(LAST_ERROR, "look at the runtime's last error when a callback has returned")                 \
    X(RESERVE, "reserve address space")                                                            \
    X(CREATE, "create physical memory")                                                            \
    X(MAP, "map physical memory")                                                                  \
    X(ACCESS, "make mapped memory accessible")                                                     \
    X(UNMAP, "unmap physical memory")                                                              \
    X(RELEASE, "give memory or address space back")                                                \
    X(PIN, "allocate pinned host memory")

/** Bits for rebatch_fault_plan.calls: REBATCH_FAULT_ALLOC, REBATCH_FAULT_COPY and so on. */
typedef enum rebatch_fault_call {
#define REBATCH_FAULT_INDEX_(name, text) REBATCH_FAULT_##name##_INDEX_,
    REBATCH_FAULT_CALLS(REBATCH_FAULT_INDEX_)
#undef REBATCH_FAULT_INDEX_
        REBATCH_FAULT_CALL_COUNT_,
#define REBATCH_FAULT_BIT_(name, text) REBATCH_FAULT_##name = 1 << REBATCH_FAULT_##name##_INDEX_,
    REBATCH_FAULT_CALLS(REBATCH_FAULT_BIT_)
#undef REBATCH_FAULT_BIT_
        REBATCH_FAULT_ANY = (1 << REBATCH_FAULT_CALL_COUNT_) - 1
} rebatch_fault_call;

/** From the failing call on, every call fails. */
#define REBATCH_FAULT_FOREVER UINT64_MAX

/** At a given call, the device's capacity becomes something else: a co-tenant comes or goes. */
typedef struct rebatch_fault_room {
    uint64_t at_call;      /**< number of the call, counted as in rebatch_fault_plan.nth */
    size_t capacity_bytes; /**< from then on */
} rebatch_fault_room;

/** When a fault device fails. Counting starts when the plan is armed; only calls of the kinds in
 *  `calls` are counted. Zeroed, nothing ever fails. */
typedef struct rebatch_fault_plan {
    size_t struct_size; /**< sizeof(rebatch_fault_plan) */
    uint32_t calls;     /**< bits of rebatch_fault_call; 0: those that take memory, ALLOC
                                and CREATE */
    uint64_t nth;       /**< the call that fails, from 1; 0: none by number */
    uint64_t times;     /**< how many calls in a row fail from there; 0: 1; REBATCH_FAULT_FOREVER */
    uint32_t permille;  /**< besides, this many of 1000 calls fail, by chance */
    uint64_t seed;      /**< of that chance: the same seed fails the same calls */
    rebatch_status status; /**< what a failing call answers, one of REBATCH_STATUSES; 0:
                                REBATCH_OOM, for pinned host memory REBATCH_E_HOST_OOM */
    const rebatch_fault_room
        *rooms;        /**< changes of capacity by rising at_call; copied; NULL: none */
    size_t room_count; /**< how many; at most 64 */
} rebatch_fault_plan;
#define REBATCH_FAULT_PLAN_INIT                                                                    \
    {                                                                                              \
        sizeof(rebatch_fault_plan), 0, 0, 0, 0, 0, REBATCH_OK, NULL, 0                             \
    }

#ifdef __cplusplus
extern "C" {
#endif

/** Open a host device: CPU memory under a cap, so that all of rebatch runs without a GPU.
 *  @param[out] out        owned by the caller, close with rebatch_device_close(); NULL on failure
 *  @param capacity_bytes  the cap; at least one granule; REBATCH_UNLIMITED for none
 *  @param options         copied; NULL means defaults
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_HOST_OOM. Any thread. */
REBATCH_API rebatch_status rebatch_device_open_host(rebatch_device **out, size_t capacity_bytes,
                                                    const rebatch_host_options *options);

/** Open a dry device: addresses without memory behind them, and streams that are always idle. It
 *  answers as a device of that capacity would, so that allocation patterns can be run for any card
 *  without one. Copies and fills are refused.
 *  @param[out] out        owned by the caller; NULL on failure
 *  @param capacity_bytes  at least one granule; REBATCH_UNLIMITED for none
 *  @param granule_bytes   of physical memory, a power of two; 0: 2 MiB, as on CUDA devices
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_HOST_OOM. Any thread. */
REBATCH_API rebatch_status rebatch_device_open_dry(rebatch_device **out, size_t capacity_bytes,
                                                   size_t granule_bytes);

/** Open a device that passes every call on to `inner` and fails some of them, for tests.
 *  @param[out] out  owned by the caller; NULL on failure
 *  @param inner     borrowed; must be closed after this one
 *  @param plan      copied; NULL: nothing fails until rebatch_fault_arm()
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_HOST_OOM. Any thread. */
REBATCH_API rebatch_status rebatch_device_open_fault(rebatch_device **out, rebatch_device *inner,
                                                     const rebatch_fault_plan *plan);

/** Give a fault device another plan; its counts start again at zero.
 *  @param plan  copied; NULL: nothing fails from now on
 *  @return REBATCH_OK; REBATCH_E_INVALID when `device` is no fault device or the plan is wrong.
 *          Any thread. */
REBATCH_API rebatch_status rebatch_fault_arm(rebatch_device *device,
                                             const rebatch_fault_plan *plan);

/** How many counted calls a fault device has seen since its plan was armed, and failed of them.
 *  @param[out] seen    may be NULL
 *  @param[out] failed  may be NULL
 *  @return REBATCH_OK; REBATCH_E_INVALID when `device` is no fault device. Any thread. */
REBATCH_API rebatch_status rebatch_fault_counts(const rebatch_device *device, uint64_t *seen,
                                                uint64_t *failed);

/** Close a device. Whatever was allocated from it must have been given back before; streams made
 *  with rebatch_stream_create() too. NULL is allowed. One on which a fault device, a pool or a
 *  session is still open stays open, and rebatch_last_error() says so. */
REBATCH_API void rebatch_device_close(rebatch_device *device);

/** A short name, for example "host" or "fault(host)".
 *  @return a string owned by the device. Any thread. */
REBATCH_API const char *rebatch_device_name(const rebatch_device *device);

/** What the device has, what it could still give, and what we took.
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST. Any thread. */
REBATCH_API rebatch_status rebatch_device_memory(rebatch_device *device, rebatch_memory_info *out);

/** Change the cap of a host device while it is in use, as a co-tenant would. A cap below what is in
 *  use takes nothing back: new allocations fail until enough was freed. On a fault device it is the
 *  inner device's cap that changes.
 *  @param capacity_bytes  at least one granule
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_UNSUPPORTED on a device without a cap of its
 *          own. Any thread. */
REBATCH_API rebatch_status rebatch_device_set_capacity(rebatch_device *device,
                                                       size_t capacity_bytes);

/** Make a stream. Work on it runs in order, beside that of other streams.
 *  @param[out] out  owned by the caller, release with rebatch_stream_destroy(); NULL on failure
 *  @return REBATCH_OK, REBATCH_OOM, REBATCH_E_INVALID, REBATCH_E_HOST_OOM, REBATCH_E_DEVICE.
 *          Any thread. */
REBATCH_API rebatch_status rebatch_stream_create(rebatch_stream *out, rebatch_device *device);

/** Wait for a stream's work, then release it. NULL is allowed. */
REBATCH_API void rebatch_stream_destroy(rebatch_device *device, rebatch_stream stream);

/** Wait until everything that was enqueued on `stream` has run. Faults that came late surface here.
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST. Any thread. */
REBATCH_API rebatch_status rebatch_stream_synchronize(rebatch_device *device,
                                                      rebatch_stream stream);

/** Wait for the work of every stream of the device, those that were made elsewhere included. Faults
 *  that came late surface here.
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST. Any thread. */
REBATCH_API rebatch_status rebatch_device_synchronize(rebatch_device *device);

/** Enqueue a host function: it runs when what was enqueued before has run. On the host device this
 *  is how work gets on a stream; on its default stream it runs before the call returns. The
 *  function must not call rebatch.
 *  @param user  handed to `function`; borrowed until it has run
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_HOST_OOM, REBATCH_E_DEVICE. Any thread. */
REBATCH_API rebatch_status rebatch_stream_call(rebatch_device *device, rebatch_stream stream,
                                               void (*function)(void *user), void *user);

/** Enqueue a copy of `bytes` bytes; either side may be host or device memory, and both must stay
 *  valid until it has run. Overlapping ranges are refused. That both lie within memory that is
 *  there is the caller's duty: a GPU refuses some ranges that do not, the host device, which takes
 *  any memory of the process, faults.
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_UNSUPPORTED on a dry device,
 *          REBATCH_E_HOST_OOM, REBATCH_E_DEVICE. Any thread. */
REBATCH_API rebatch_status rebatch_copy(rebatch_device *device, void *to, const void *from,
                                        size_t bytes, rebatch_stream stream);

/** Enqueue setting `bytes` bytes of device memory to `value`; that they are there is the caller's
 *  duty, as in rebatch_copy().
 *  @return as rebatch_copy(). Any thread. */
REBATCH_API rebatch_status rebatch_fill(rebatch_device *device, void *to, uint8_t value,
                                        size_t bytes, rebatch_stream stream);

/** Allocate host memory that the device reaches too: copies to and from it run beside other work,
 *  and kernels may read and write it. It does not count against the device's memory.
 *  @param[out] out  owned by the caller, release with rebatch_pinned_free(); aligned to 4096; its
 *                   contents are not defined; NULL on failure
 *  @param bytes     at least 1
 *  @return REBATCH_OK, REBATCH_E_HOST_OOM, REBATCH_E_INVALID, REBATCH_E_UNSUPPORTED on a dry
 *          device, REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST. Any thread. */
REBATCH_API rebatch_status rebatch_pinned_alloc(void **out, rebatch_device *device, size_t bytes);

/** Give it back. Nothing that was enqueued may still use it. A NULL `memory` is allowed.
 *  @param bytes  as it was allocated
 *  @return REBATCH_OK; REBATCH_E_INVALID for memory that the device has not given, or with another
 *          size, which a GPU does not look at; REBATCH_E_UNSUPPORTED, REBATCH_E_DEVICE,
 *          REBATCH_E_DEVICE_LOST. Any thread. */
REBATCH_API rebatch_status rebatch_pinned_free(rebatch_device *device, void *memory, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
