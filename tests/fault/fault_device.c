/* Owns the fault device: counts the calls that pass to another device, and fails some by a plan.
 * Must not know what the other device is. */
#include "fault/fault_device.h"

#include <assert.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "device/device.h"
#include "rebatch/cuda.h"

#define MAX_ROOMS 64

struct fault {
    rebatch_device *inner;
    struct rbi_device_ops ops;
    pthread_mutex_t lock;    /* of everything below */
    rebatch_fault_plan plan; /* its rooms point into `rooms` */
    rebatch_fault_room rooms[MAX_ROOMS];
    size_t rooms_done;
    uint64_t seen, failed; /* failed <= seen */
    uint64_t random;       /* state of the generator */
};

static const char *const call_texts[] = {
#define CALL_TEXT(name, text) text,
    REBATCH_FAULT_CALLS(CALL_TEXT)
#undef CALL_TEXT
};

/* splitmix64 (Steele, Lea, Flood 2014): any seed is good, zero included. */
static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static bool is_due(const rebatch_fault_plan *plan, uint64_t call)
{
    if (plan->nth == 0 || call < plan->nth)
        return false;
    const uint64_t times = plan->times ? plan->times : 1;
    return call - plan->nth < times;
}

/* Counts one call; REBATCH_OK when it may pass. */
static rebatch_status gate(struct fault *fault, rebatch_fault_call kind)
{
    pthread_mutex_lock(&fault->lock);
    const rebatch_fault_plan *plan = &fault->plan;
    rebatch_status status = REBATCH_OK;
    uint64_t number = 0;
    size_t capacity = 0;
    if (plan->calls & (uint32_t)kind) {
        number = ++fault->seen;
        while (fault->rooms_done < plan->room_count &&
               plan->rooms[fault->rooms_done].at_call <= number)
            capacity = plan->rooms[fault->rooms_done++].capacity_bytes;
        const bool by_chance =
            plan->permille && next_random(&fault->random) % 1000 < plan->permille;
        if (is_due(plan, number) || by_chance) {
            fault->failed++;
            status = plan->status                ? plan->status
                     : kind == REBATCH_FAULT_PIN ? REBATCH_E_HOST_OOM
                                                 : REBATCH_OOM;
        }
    }
    pthread_mutex_unlock(&fault->lock);

    if (capacity)
        (void)rebatch_device_set_capacity(fault->inner, capacity);
    if (status)
        (void)rbi_error(status, "fault by plan: call %" PRIu64 " failed (%s)", number,
                        call_texts[__builtin_ctz((unsigned)kind)]);
    return status;
}

#define PASS(kind, call)                                                                           \
    do {                                                                                           \
        struct fault *fault = self;                                                                \
        rebatch_device *inner = fault->inner;                                                      \
        const rebatch_status gate_status = gate(fault, kind);                                      \
        return gate_status ? gate_status : (call);                                                 \
    } while (0)

static rebatch_device *inner_of(void *self)
{
    return ((struct fault *)self)->inner;
}

static void fault_close(void *self)
{
    struct fault *fault = self;
    rbi_device_let_go(fault->inner);
    pthread_mutex_destroy(&fault->lock);
    rbi_heap_free(fault);
}

static size_t fault_page_bytes(void *self)
{
    return rbi_device_page_bytes(inner_of(self));
}

static rebatch_status fault_memory(void *self, rebatch_memory_info *out)
{
    return rebatch_device_memory(inner_of(self), out);
}

static rebatch_status fault_alloc(void *self, void **out, size_t bytes)
{
    PASS(REBATCH_FAULT_ALLOC, rbi_device_alloc(inner, out, bytes));
}

static rebatch_status fault_free(void *self, void *memory, size_t bytes)
{
    return rbi_device_free(inner_of(self), memory, bytes);
}

static rebatch_status fault_copy(void *self, void *to, const void *from, size_t bytes,
                                 rebatch_stream stream)
{
    PASS(REBATCH_FAULT_COPY, rebatch_copy(inner, to, from, bytes, stream));
}

static rebatch_status fault_fill(void *self, void *to, uint8_t value, size_t bytes,
                                 rebatch_stream stream)
{
    PASS(REBATCH_FAULT_FILL, rebatch_fill(inner, to, value, bytes, stream));
}

static rebatch_status fault_synchronize(void *self)
{
    PASS(REBATCH_FAULT_STREAM, rbi_device_synchronize(inner));
}

static rebatch_status fault_stream_create(void *self, rebatch_stream *out)
{
    PASS(REBATCH_FAULT_STREAM, rebatch_stream_create(out, inner));
}

static void fault_stream_destroy(void *self, rebatch_stream stream)
{
    rebatch_stream_destroy(inner_of(self), stream);
}

static rebatch_status fault_stream_synchronize(void *self, rebatch_stream stream)
{
    PASS(REBATCH_FAULT_STREAM, rebatch_stream_synchronize(inner, stream));
}

static rebatch_status fault_stream_call(void *self, rebatch_stream stream, void (*function)(void *),
                                        void *user)
{
    PASS(REBATCH_FAULT_STREAM, rebatch_stream_call(inner, stream, function, user));
}

static rebatch_status fault_event_create(void *self, rbi_event *out)
{
    PASS(REBATCH_FAULT_EVENT, rbi_event_create(inner, out));
}

static void fault_event_destroy(void *self, rbi_event event)
{
    rbi_event_destroy(inner_of(self), event);
}

static rebatch_status fault_event_record(void *self, rbi_event event)
{
    PASS(REBATCH_FAULT_EVENT, rbi_event_record(inner, event));
}

static rebatch_status fault_event_query(void *self, rbi_event event, bool *done)
{
    return rbi_event_query(inner_of(self), event, done);
}

static rebatch_status fault_event_synchronize(void *self, rbi_event event)
{
    return rbi_event_synchronize(inner_of(self), event);
}

static bool fault_stream_is_valid(void *self, rebatch_stream stream)
{
    return rbi_device_stream_is_valid(inner_of(self), stream);
}

static rebatch_status fault_set_capacity(void *self, size_t bytes)
{
    return rebatch_device_set_capacity(inner_of(self), bytes);
}

static rebatch_status fault_take_last_error(void *self)
{
    PASS(REBATCH_FAULT_LAST_ERROR, rbi_device_take_last_error(inner));
}

static rebatch_status fault_pinned_alloc(void *self, void **out, size_t bytes)
{
    PASS(REBATCH_FAULT_PIN, rebatch_pinned_alloc(out, inner, bytes));
}

static rebatch_status fault_pinned_free(void *self, void *memory, size_t bytes)
{
    return rebatch_pinned_free(inner_of(self), memory, bytes);
}

static rebatch_status fault_allow_peer(void *self, int ordinal)
{
    return rbi_device_allow_peer(inner_of(self), ordinal);
}

static rebatch_status fault_ordinal(void *self, int *out)
{
    return rebatch_device_ordinal(out, inner_of(self));
}

static rebatch_status fault_reserve(void *self, void **out, size_t bytes)
{
    PASS(REBATCH_FAULT_RESERVE, rbi_device_reserve(inner, out, bytes));
}

static rebatch_status fault_unreserve(void *self, void *address, size_t bytes)
{
    PASS(REBATCH_FAULT_RELEASE, rbi_device_unreserve(inner, address, bytes));
}

static rebatch_status fault_create(void *self, rbi_physical *out, size_t bytes)
{
    PASS(REBATCH_FAULT_CREATE, rbi_device_create_physical(inner, out, bytes));
}

static rebatch_status fault_create_shared(void *self, rbi_physical *out, size_t bytes)
{
    PASS(REBATCH_FAULT_CREATE, rbi_device_create_shared(inner, out, bytes));
}

static rebatch_status fault_export(void *self, int *fd, rbi_physical physical)
{
    PASS(REBATCH_FAULT_CREATE, rbi_device_export(inner, fd, physical));
}

static rebatch_status fault_release(void *self, rbi_physical physical, size_t bytes)
{
    PASS(REBATCH_FAULT_RELEASE, rbi_device_release_physical(inner, physical, bytes));
}

static rebatch_status fault_map(void *self, void *address, size_t bytes, rbi_physical physical)
{
    PASS(REBATCH_FAULT_MAP, rbi_device_map(inner, address, bytes, physical));
}

static rebatch_status fault_set_access(void *self, void *address, size_t bytes)
{
    PASS(REBATCH_FAULT_ACCESS, rbi_device_set_access(inner, address, bytes));
}

static rebatch_status fault_unmap(void *self, void *address, size_t bytes)
{
    PASS(REBATCH_FAULT_UNMAP, rbi_device_unmap(inner, address, bytes));
}

static bool fault_is_in_process(void *self)
{
    return rbi_device_is_in_process(inner_of(self));
}

static size_t fault_host_room(void *self)
{
    return rbi_device_host_room(inner_of(self));
}

static rebatch_status fault_create_host(void *self, rbi_physical *out, size_t bytes)
{
    PASS(REBATCH_FAULT_OVERFLOW, rbi_device_create_host(inner, out, bytes));
}

static rebatch_status fault_release_host(void *self, rbi_physical physical, size_t bytes)
{
    PASS(REBATCH_FAULT_RELEASE, rbi_device_release_host(inner, physical, bytes));
}

/* A fault device has virtual memory and contents when the device that it wraps has. */
static const struct rbi_device_ops plain_ops = {
    .struct_size = sizeof(struct rbi_device_ops),
    .close = fault_close,
    .page_bytes = fault_page_bytes,
    .memory = fault_memory,
    .alloc = fault_alloc,
    .free = fault_free,
    .copy = fault_copy,
    .fill = fault_fill,
    .synchronize = fault_synchronize,
    .stream_create = fault_stream_create,
    .stream_destroy = fault_stream_destroy,
    .stream_synchronize = fault_stream_synchronize,
    .stream_call = fault_stream_call,
    .event_create = fault_event_create,
    .event_destroy = fault_event_destroy,
    .event_record = fault_event_record,
    .event_query = fault_event_query,
    .event_synchronize = fault_event_synchronize,
    .stream_is_valid = fault_stream_is_valid,
    .is_in_process = fault_is_in_process,
    .set_capacity = fault_set_capacity,
    .take_last_error = fault_take_last_error,
    .pinned_alloc = fault_pinned_alloc,
    .pinned_free = fault_pinned_free,
    .ordinal = fault_ordinal,
    .allow_peer = fault_allow_peer,
};

static void add_virtual_memory(struct rbi_device_ops *ops, const struct rbi_device_ops *inner)
{
    ops->prices = inner->prices;
    ops->reserve = fault_reserve;
    ops->unreserve = fault_unreserve;
    ops->create = fault_create;
    ops->release = fault_release;
    ops->map = fault_map;
    ops->set_access = fault_set_access;
    ops->unmap = fault_unmap;
    ops->create_shared = inner->create_shared ? fault_create_shared : NULL;
    ops->export_physical = fault_export;
    ops->host_room = fault_host_room;
    ops->create_host = inner->create_host ? fault_create_host : NULL;
    ops->release_host = fault_release_host;
}

/* ---- plans ---- */

static void arm(struct fault *fault, const rebatch_fault_plan *given)
{
    const rebatch_fault_plan none = REBATCH_FAULT_PLAN_INIT;
    rebatch_fault_plan plan = given ? *given : none;
    assert((plan.calls & ~(uint32_t)REBATCH_FAULT_ANY) == 0 && plan.permille <= 1000);
    assert(plan.room_count <= MAX_ROOMS);
    if (plan.calls == 0)
        plan.calls = REBATCH_FAULT_ALLOC | REBATCH_FAULT_CREATE;

    pthread_mutex_lock(&fault->lock);
    for (size_t i = 0; i < plan.room_count; i++) {
        assert(i == 0 || plan.rooms[i - 1].at_call <= plan.rooms[i].at_call);
        fault->rooms[i] = plan.rooms[i];
    }
    plan.rooms = fault->rooms;
    fault->plan = plan;
    fault->rooms_done = 0;
    fault->seen = 0;
    fault->failed = 0;
    fault->random = plan.seed;
    pthread_mutex_unlock(&fault->lock);
}

static struct fault *fault_of(const rebatch_device *device)
{
    assert(device && device->ops->close == fault_close);
    return device->self;
}

rebatch_status rebatch_fault_arm(rebatch_device *device, const rebatch_fault_plan *plan)
{
    arm(fault_of(device), plan);
    return REBATCH_OK;
}

rebatch_status rebatch_fault_counts(const rebatch_device *device, uint64_t *seen, uint64_t *failed)
{
    struct fault *fault = fault_of(device);
    pthread_mutex_lock(&fault->lock);
    if (seen)
        *seen = fault->seen;
    if (failed)
        *failed = fault->failed;
    pthread_mutex_unlock(&fault->lock);
    return REBATCH_OK;
}

rebatch_status rebatch_device_open_fault(rebatch_device **out, rebatch_device *inner,
                                         const rebatch_fault_plan *plan)
{
    *out = NULL;
    struct fault *fault = rbi_heap_calloc(1, sizeof *fault);
    if (!fault)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a fault device");
    fault->inner = inner;
    rbi_device_hold(inner);
    fault->ops = plain_ops;
    if (rbi_device_has_virtual_memory(inner))
        add_virtual_memory(&fault->ops, inner->ops);
    if (!rbi_device_has_contents(inner)) {
        fault->ops.copy = NULL;
        fault->ops.fill = NULL;
    }
    pthread_mutex_init(&fault->lock, NULL);
    char name[64];
    (void)snprintf(name, sizeof name, "fault(%.50s)", inner->name);
    arm(fault, plan);
    const rebatch_status status = rbi_device_create(out, &fault->ops, fault, name);
    if (status)
        fault_close(fault);
    else
        memcpy((*out)->driver, inner->driver, sizeof inner->driver);
    return status;
}
