/** @file device.h
 *  GPUs, and CPU memory under a cap.
 *
 *  A device provides memory and streams. It caches nothing: the pool (pool.h) does. */
#ifndef REBATCH_DEVICE_H
#define REBATCH_DEVICE_H

#include "rebatch/status.h"

/** A device. Open it, pass it to rebatch_open() or rebatch_pool_create(), close it last. */
typedef struct rebatch_device rebatch_device;

/** A queue of work that runs in order. NULL is the device's default stream. On a CUDA device this
 *  is the CUstream (cudaStream_t) itself: the two may be cast to each other, and a stream that the
 *  program created with CUDA is valid here. */
typedef struct rebatch_stream_object *rebatch_stream;

/** A capacity without a cap: a host device may use all memory that the machine has. */
#define REBATCH_UNLIMITED SIZE_MAX

/** The memory of a device, in bytes. */
typedef struct rebatch_memory_info {
    size_t total_bytes; /**< all memory of the GPU, or the capacity of a host device */
    size_t free_bytes;  /**< the memory that new allocations could still get */
    size_t used_bytes;  /**< the memory allocated through this rebatch_device and not freed */
} rebatch_memory_info;

/** Options of a host device. */
typedef struct rebatch_host_options {
    size_t struct_size;    /**< sizeof(rebatch_host_options) */
    size_t page_bytes;     /**< allocations are rounded up to a multiple of this; a power of two, at
                             least the page size of the machine; 0: 65536 */
    size_t overflow_bytes; /**< memory beside the cap that stands for a GPU's host: a pool takes it
                                where an allocation must not fail (rebatch_pool_allow_overflow());
                                0: none */
} rebatch_host_options;
/** Default options of a host device. */
#define REBATCH_HOST_OPTIONS_INIT                                                                  \
    {                                                                                              \
        sizeof(rebatch_host_options), 0, 0                                                         \
    }

#ifdef __cplusplus
extern "C" {
#endif

/** Open a host device: CPU memory under a cap, on which all of rebatch runs without a GPU.
 *  Thread-safe.
 *  @param[out] out        owned by the caller, close with rebatch_device_close(); NULL on failure
 *  @param capacity_bytes  the cap, at least one page of the device; REBATCH_UNLIMITED: none
 *  @param options         copied; NULL: defaults
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_HOST_OOM */
REBATCH_API rebatch_status rebatch_device_open_host(rebatch_device **out, size_t capacity_bytes,
                                                    const rebatch_host_options *options);

/** Open a dry device: it gives out addresses without memory behind them, and its streams are always
 *  idle. It shows whether an allocation pattern fits on a device of a given capacity, on any
 *  machine. Copies and fills are refused. Thread-safe.
 *  @param[out] out        owned by the caller, close with rebatch_device_close(); NULL on failure
 *  @param capacity_bytes  at least one page; REBATCH_UNLIMITED: no cap
 *  @param page_bytes      size of a page of physical memory, a power of two; 0: 2 MiB, as on CUDA
 *                         devices
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_HOST_OOM */
REBATCH_API rebatch_status rebatch_device_open_dry(rebatch_device **out, size_t capacity_bytes,
                                                   size_t page_bytes);

/** Close a device. Free all its memory and destroy the streams of rebatch_stream_create() first.
 *  While a pool or a session is open on a device, the device stays open and
 *  rebatch_last_error() says so.
 *  @param device  NULL is allowed */
REBATCH_API void rebatch_device_close(rebatch_device *device);

/** A short name, for example "host". Thread-safe.
 *  @param device  any device
 *  @return a string owned by the device */
REBATCH_API const char *rebatch_device_name(const rebatch_device *device);

/** How much memory the device has, could still give, and has given. Thread-safe.
 *  @param device    any device
 *  @param[out] out  sizes in bytes
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST */
REBATCH_API rebatch_status rebatch_device_memory(rebatch_device *device, rebatch_memory_info *out);

/** Change the cap of a host device that is in use, as if another program allocated or freed memory.
 *  A cap below the memory in use takes nothing away: new allocations fail until enough is freed.
 *  Thread-safe.
 *  @param device          a host device or a dry device
 *  @param capacity_bytes  at least one page of the device
 *  @return REBATCH_OK, REBATCH_E_INVALID; REBATCH_E_UNSUPPORTED on a device whose capacity is
 *          fixed */
REBATCH_API rebatch_status rebatch_device_set_capacity(rebatch_device *device,
                                                       size_t capacity_bytes);

/** Create a stream. Its work runs in order, concurrently with the work of other streams.
 *  Thread-safe.
 *  @param[out] out  owned by the caller, release with rebatch_stream_destroy(); NULL on failure
 *  @param device    the device on which it runs
 *  @return REBATCH_OK, REBATCH_OOM, REBATCH_E_INVALID, REBATCH_E_HOST_OOM, REBATCH_E_DEVICE */
REBATCH_API rebatch_status rebatch_stream_create(rebatch_stream *out, rebatch_device *device);

/** Wait for the work of a stream, then release the stream.
 *  @param device  the device on which it was created
 *  @param stream  NULL is allowed */
REBATCH_API void rebatch_stream_destroy(rebatch_device *device, rebatch_stream stream);

/** Wait until the work enqueued on `stream` is done. Asynchronous errors are reported here.
 *  Thread-safe.
 *  @param device  the device of the stream
 *  @param stream  NULL: the default stream
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST */
REBATCH_API rebatch_status rebatch_stream_synchronize(rebatch_device *device,
                                                      rebatch_stream stream);

/** Enqueue a host function, which runs when the work enqueued before it is done. On the default
 *  stream of a host device it runs before this call returns. Thread-safe.
 *  @param device    the device of the stream
 *  @param stream    NULL: the default stream
 *  @param function  must not call rebatch
 *  @param user      passed to `function`; borrowed until `function` has run
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_HOST_OOM, REBATCH_E_DEVICE */
REBATCH_API rebatch_status rebatch_stream_call(rebatch_device *device, rebatch_stream stream,
                                               void (*function)(void *user), void *user);

/** Enqueue a copy. Overlapping ranges are refused. The caller makes sure that both ranges are valid
 *  memory: a GPU refuses some invalid ranges; a host device accepts any address of the process, and
 *  an invalid one is a segmentation fault. Thread-safe.
 *  @param device  the device of the stream
 *  @param to      device or host memory, valid until the copy is done
 *  @param from    device or host memory, valid until the copy is done
 *  @param bytes   number of bytes
 *  @param stream  NULL: the default stream
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_HOST_OOM, REBATCH_E_DEVICE;
 *          REBATCH_E_UNSUPPORTED on a dry device */
REBATCH_API rebatch_status rebatch_copy(rebatch_device *device, void *to, const void *from,
                                        size_t bytes, rebatch_stream stream);

/** Enqueue setting device memory to a byte value. The caller makes sure that the range is valid
 *  memory, as for rebatch_copy(). Thread-safe.
 *  @param device  the device of the stream
 *  @param to      device memory, valid until the fill is done
 *  @param value   value of each byte
 *  @param bytes   number of bytes
 *  @param stream  NULL: the default stream
 *  @return as rebatch_copy() */
REBATCH_API rebatch_status rebatch_fill(rebatch_device *device, void *to, uint8_t value,
                                        size_t bytes, rebatch_stream stream);

/** Allocate pinned host memory: copies to and from it run concurrently with other work, and kernels
 *  may access it. It does not count as device memory. Thread-safe.
 *  @param[out] out  owned by the caller, release with rebatch_pinned_free(); aligned to 4096 bytes,
 *                   contents undefined; NULL on failure
 *  @param device    the device that will access it
 *  @param bytes     at least 1
 *  @return REBATCH_OK, REBATCH_E_HOST_OOM, REBATCH_E_INVALID, REBATCH_E_DEVICE,
 *          REBATCH_E_DEVICE_LOST; REBATCH_E_UNSUPPORTED on a dry device */
REBATCH_API rebatch_status rebatch_pinned_alloc(void **out, rebatch_device *device, size_t bytes);

/** Free pinned host memory. No enqueued work may still use it. Thread-safe.
 *  @param device  the device from which it came
 *  @param memory  from rebatch_pinned_alloc(); NULL is allowed
 *  @param bytes   the size with which it was allocated
 *  @return REBATCH_OK; REBATCH_E_INVALID for memory that did not come from this device, or for
 *          another size; REBATCH_E_UNSUPPORTED, REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST */
REBATCH_API rebatch_status rebatch_pinned_free(rebatch_device *device, void *memory, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
