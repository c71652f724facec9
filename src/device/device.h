/* One const table of operations a device. Below it stand host.c, cuda.c and dry.c; above
 * it everything goes through the rbi_device_… functions of device.c, which also test the optional
 * ones. Must not know pools or batches. */
#ifndef RBI_DEVICE_H
#define RBI_DEVICE_H

#include <pthread.h>

#include "base/base.h"
#include "rebatch/device.h"

/* A point in the work of all streams. Made once, recorded many times. */
typedef struct rbi_event_object *rbi_event;

/* Work that was captured on a stream, and can be launched again. */
typedef struct rbi_graph_object *rbi_graph;

/* Physical memory, wherever it is mapped. 0 is none. */
typedef uint64_t rbi_physical;

/* Every function that can fail returns a status and leaves the device as it was when it does. All
 * of them are safe from several threads. `self` is what the open function made. Sizes of memory and
 * mappings are multiples of page_bytes(). */
struct rbi_device_ops {
    size_t struct_size;

    /* -- must provide -- */
    void (*close)(void *self);
    size_t (*page_bytes)(void *self);
    rebatch_status (*memory)(void *self, rebatch_memory_info *out);
    /* REBATCH_OOM when there is no room. The result is aligned to REBATCH_POOL_ALIGNMENT at least.
     */
    rebatch_status (*alloc)(void *self, void **out, size_t bytes);
    rebatch_status (*free)(void *self, void *memory, size_t bytes);
    rebatch_status (*stream_create)(void *self, rebatch_stream *out);
    void (*stream_destroy)(void *self, rebatch_stream);
    rebatch_status (*stream_synchronize)(void *self, rebatch_stream);
    rebatch_status (*stream_call)(void *self, rebatch_stream, void (*function)(void *), void *user);
    rebatch_status (*event_create)(void *self, rbi_event *out);
    void (*event_destroy)(void *self, rbi_event);
    /* The event is reached when all work is done that any stream has now. REBATCH_E_UNSUPPORTED:
     * only a wait tells. */
    rebatch_status (*event_record)(void *self, rbi_event);
    rebatch_status (*event_query)(void *self, rbi_event, bool *done);
    rebatch_status (*event_synchronize)(void *self, rbi_event);

    /* -- may provide -- */
    /* Both or neither; NULL: its memory has no contents. */
    rebatch_status (*copy)(void *self, void *to, const void *from, size_t bytes, rebatch_stream);
    rebatch_status (*fill)(void *self, void *to, uint8_t value, size_t bytes, rebatch_stream);
    /* Waits for the work of every stream; NULL: there is never any. */
    rebatch_status (*synchronize)(void *self);
    /* False for a stream that is certainly none of this device's; NULL: not known. */
    bool (*stream_is_valid)(void *self, rebatch_stream);
    rebatch_status (*set_capacity)(void *self, size_t bytes);
    /* Takes the error that the runtime still holds from a call whose code nobody looked at, and
     * clears it: REBATCH_OK when there is none. */
    rebatch_status (*take_last_error)(void *self);
    /* Host memory, aligned to a page, that the device reaches under the same address: both or
     * neither. REBATCH_E_HOST_OOM when there is none. What is freed was allocated with that size.
     */
    rebatch_status (*pinned_alloc)(void *self, void **out, size_t bytes);
    rebatch_status (*pinned_free)(void *self, void *memory, size_t bytes);
    /* Between the first two, what this thread enqueues on the stream does not run: it becomes the
     * graph. After a failure of the second nothing is captured any more. All four or none. */
    rebatch_status (*begin_capture)(void *self, rebatch_stream);
    rebatch_status (*end_capture)(void *self, rebatch_stream, rbi_graph *out);
    rebatch_status (*graph_launch)(void *self, rbi_graph, rebatch_stream);
    void (*graph_destroy)(void *self, rbi_graph);
    /* Which GPU it is, as CUDA counts; NULL: it is none. */
    rebatch_status (*ordinal)(void *self, int *out);
    /* set_access, from here on, is for that GPU too; NULL: it is no GPU. */
    rebatch_status (*allow_peer)(void *self, int ordinal);
    /* See rbi_device_is_in_process(); NULL: it is not. */
    bool (*is_in_process)(void *self);

    /* -- virtual memory: all of these, or none and then reserve is NULL --
     * Address space is reserved, physical memory is created, and the one is mapped to the other;
     * only created memory counts against the capacity. A created piece is mapped as a whole, at one
     * place at a time. Mapped memory cannot be touched before set_access, which takes any range
     * that is mapped throughout. unmap takes what one map mapped. release takes a piece that is not
     * mapped. */
    rebatch_status (*reserve)(void *self, void **out, size_t bytes);
    rebatch_status (*unreserve)(void *self, void *address, size_t bytes);
    rebatch_status (*create)(void *self, rbi_physical *out, size_t bytes);
    rebatch_status (*release)(void *self, rbi_physical physical, size_t bytes);
    rebatch_status (*map)(void *self, void *address, size_t bytes, rbi_physical physical);
    rebatch_status (*set_access)(void *self, void *address, size_t bytes);
    rebatch_status (*unmap)(void *self, void *address, size_t bytes);
    /* Physical memory of the host, pinned, which is mapped, made accessible and unmapped like the
     * device's and does not count against the capacity, and how much could be had: all or none.
     * REBATCH_OOM when there is none. */
    size_t (*host_room)(void *self);
    rebatch_status (*create_host)(void *self, rbi_physical *out, size_t bytes);
    rebatch_status (*release_host)(void *self, rbi_physical physical, size_t bytes);
    /* Memory for other processes: create as above; a descriptor of it, which the caller closes; and
     * to map memory by another process's descriptor for reading, which does not count as used. All
     * or none. */
    rebatch_status (*create_shared)(void *self, rbi_physical *out, size_t bytes);
    rebatch_status (*export_physical)(void *self, int *fd, rbi_physical physical);
    rebatch_status (*map_export)(void *self, void *address, size_t bytes, int fd);
    /* What these calls would take; NULL: they take what they take. */
    const struct rbi_device_prices *prices;
};

/* Of one call, in nanoseconds. */
struct rbi_device_prices {
    uint32_t create, release, map, unmap;
    uint32_t access; /* for each piece in the range */
};

/* What others let a process have of a GPU, and the variable that says so; SIZE_MAX: all. */
struct rbi_others_limit {
    size_t bytes;
    char variable[40];
};

struct rebatch_device {
    atomic_size_t users; /* pools, devices around it: it is not closed under them */
    struct rbi_others_limit others;
    const struct rbi_device_ops *ops;
    void *self;
    char name[64];
    char driver[64]; /* what drives it, with its version; "": nothing that could change */
    pthread_mutex_t given_lock; /* of the lists, each with the latest first */
    struct rbi_given *pinned, *exports;
};

/* What a device has given out, so that it is given back once and as a whole: pinned memory, and
 * what another process has exported. From the heap. */
struct rbi_given {
    struct rbi_given *next;
    const void *address;
    size_t size; /* or another number that says how it was made, but 0 */
};
void rbi_given_add(rebatch_device *device, struct rbi_given **list, struct rbi_given *given);
/* NULL where the list does not have it with this size. *known is the size that it has there; 0: it
 * is not there. */
struct rbi_given *rbi_given_take(rebatch_device *device, struct rbi_given **list,
                                 const void *address, size_t size, size_t *known);
/* At the end of a device. */
void rbi_given_forget(struct rbi_given *list);

/* Wraps `self` into a device; on failure the caller still owns `self`. */
rebatch_status rbi_device_create(rebatch_device **out, const struct rbi_device_ops *ops, void *self,
                                 const char *name);

/* REBATCH_E_PARSE with its text where a variable has no size: then the others count. */
rebatch_status rbi_others_limit_read(struct rbi_others_limit *out, int ordinal);

/* From the first to the second, rebatch_device_close() does nothing. */
void rbi_device_hold(rebatch_device *device);
void rbi_device_let_go(rebatch_device *device);

/* REBATCH_E_INVALID when not even one page fits. */
rebatch_status rbi_device_check_capacity(size_t capacity_bytes, size_t page_bytes);

/* rebatch_device_open_dry(), with the calls for virtual memory or without. */
rebatch_status rbi_device_open_dry(rebatch_device **out, size_t capacity_bytes, size_t page_bytes,
                                   bool has_virtual_memory);

size_t rbi_device_page_bytes(const rebatch_device *device);
rebatch_status rbi_device_alloc(rebatch_device *device, void **out, size_t bytes);
rebatch_status rbi_device_free(rebatch_device *device, void *memory, size_t bytes);
/* The seven below are there only when this says so. */
bool rbi_device_has_virtual_memory(const rebatch_device *device);
rebatch_status rbi_device_reserve(rebatch_device *device, void **out, size_t bytes);
rebatch_status rbi_device_unreserve(rebatch_device *device, void *address, size_t bytes);
rebatch_status rbi_device_create_physical(rebatch_device *device, rbi_physical *out, size_t bytes);
rebatch_status rbi_device_release_physical(rebatch_device *device, rbi_physical physical,
                                           size_t bytes);
/* Whether host memory can be mapped beside the device's: the three below are there only then. */
bool rbi_device_has_overflow(const rebatch_device *device);
size_t rbi_device_host_room(const rebatch_device *device);
rebatch_status rbi_device_create_host(rebatch_device *device, rbi_physical *out, size_t bytes);
rebatch_status rbi_device_release_host(rebatch_device *device, rbi_physical physical, size_t bytes);
/* REBATCH_E_UNSUPPORTED with its text where the device has no memory for other processes. */
rebatch_status rbi_device_check_shared(const rebatch_device *device);
rebatch_status rbi_device_create_shared(rebatch_device *device, rbi_physical *out, size_t bytes);
/* The descriptor is closed on exec. */
rebatch_status rbi_device_export(rebatch_device *device, int *fd, rbi_physical physical);
rebatch_status rbi_device_map(rebatch_device *device, void *address, size_t bytes,
                              rbi_physical physical);
rebatch_status rbi_device_set_access(rebatch_device *device, void *address, size_t bytes);
/* NULL where its calls are not modelled. */
static inline const struct rbi_device_prices *rbi_device_prices_of(const rebatch_device *device)
{
    return device->ops->prices;
}
/* REBATCH_E_UNSUPPORTED with its text where the device is no GPU. */
rebatch_status rbi_device_allow_peer(rebatch_device *device, int ordinal);
rebatch_status rbi_device_unmap(rebatch_device *device, void *address, size_t bytes);

/* Whether memory can be copied and filled. */
bool rbi_device_has_contents(const rebatch_device *device);
/* Whether it is nothing but memory of this process, without threads, so that a copy of the process
 * can go on with it. What virtual memory is made of is shared with it all the same. */
bool rbi_device_is_in_process(const rebatch_device *device);
/* REBATCH_E_UNSUPPORTED with its text where the device cannot. */
rebatch_status rbi_device_begin_capture(rebatch_device *device, rebatch_stream stream);
rebatch_status rbi_device_end_capture(rebatch_device *device, rebatch_stream stream,
                                      rbi_graph *out);
rebatch_status rbi_graph_launch(rebatch_device *device, rbi_graph graph, rebatch_stream stream);
/* NULL is allowed. What was launched runs to its end. */
void rbi_graph_destroy(rebatch_device *device, rbi_graph graph);
/* Waits for the work of all streams, also of those that the program created with CUDA. */
rebatch_status rbi_device_synchronize(rebatch_device *device);
bool rbi_device_stream_is_valid(rebatch_device *device, rebatch_stream stream);
rebatch_status rbi_device_take_last_error(rebatch_device *device);

rebatch_status rbi_event_create(rebatch_device *device, rbi_event *out);
void rbi_event_destroy(rebatch_device *device, rbi_event event);
/* Behind the work of every stream, this library's or not. REBATCH_E_UNSUPPORTED without a text
 * where the device has no such events. */
rebatch_status rbi_event_record(rebatch_device *device, rbi_event event);
rebatch_status rbi_event_query(rebatch_device *device, rbi_event event, bool *done);
rebatch_status rbi_event_synchronize(rebatch_device *device, rbi_event event);

#endif
