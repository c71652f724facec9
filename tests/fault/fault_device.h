/* A device around another one that counts the calls it passes on, and fails some by a plan. A wrong
 * plan ends the test. Thread-safe. */
#ifndef FAULT_DEVICE_H
#define FAULT_DEVICE_H

#include "rebatch/device.h"

/* The kinds of call: X(name, what it does). */
#define REBATCH_FAULT_CALLS(X)                                                                     \
    X(ALLOC, "allocate memory")                                                                    \
    X(COPY, "copy memory")                                                                         \
    X(FILL, "fill memory")                                                                         \
    X(STREAM, "create, wait for or enqueue on a stream")                                           \
    X(EVENT, "create or record an event")                                                          \
    X(LAST_ERROR, "read the runtime's last error after a callback returned")                       \
    X(RESERVE, "reserve address space")                                                            \
    X(CREATE, "create physical memory")                                                            \
    X(MAP, "map physical memory")                                                                  \
    X(ACCESS, "make mapped memory accessible")                                                     \
    X(UNMAP, "unmap physical memory")                                                              \
    X(RELEASE, "release physical memory or address space")                                         \
    X(PIN, "allocate pinned host memory")                                                          \
    X(OVERFLOW, "create host memory that is mapped beside the device's")

/* Bits of rebatch_fault_plan.calls. */
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

/* For rebatch_fault_plan.times: every call fails from the first failing one on. */
#define REBATCH_FAULT_FOREVER UINT64_MAX

/* A change of the capacity at a call, as if another program allocated or freed memory. */
typedef struct rebatch_fault_room {
    uint64_t at_call;
    size_t capacity_bytes;
} rebatch_fault_room;

/* Which calls fail. Counting starts when the plan is armed, and only calls of the kinds in `calls`
 * count. With all members zero no call fails. */
typedef struct rebatch_fault_plan {
    uint32_t calls;                  /* 0: those that take memory: ALLOC and CREATE */
    uint64_t nth;                    /* number of the first call that fails, from 1; 0: none */
    uint64_t times;                  /* how many fail in a row; 0: 1 */
    uint32_t permille;               /* in addition, each call fails with this probability */
    uint64_t seed;                   /* of that probability */
    rebatch_status status;           /* of a failing call; 0: REBATCH_OOM, or HOST_OOM for PIN */
    const rebatch_fault_room *rooms; /* in ascending order of at_call; copied */
    size_t room_count;               /* at most 64 */
} rebatch_fault_plan;
#define REBATCH_FAULT_PLAN_INIT                                                                    \
    {                                                                                              \
        .calls = 0                                                                                 \
    }
/* One with some members set: &FAULTS(.nth = 3). */
#define FAULTS(...) ((rebatch_fault_plan){__VA_ARGS__})

/* Wraps `inner`, which is borrowed: close it after this device. `plan` is copied; NULL: no call
 * fails. */
rebatch_status rebatch_device_open_fault(rebatch_device **out, rebatch_device *inner,
                                         const rebatch_fault_plan *plan);
/* Replaces the plan of a fault device; its counts restart at zero. */
rebatch_status rebatch_fault_arm(rebatch_device *device, const rebatch_fault_plan *plan);
/* How many calls were counted since the plan was armed, and how many failed; each may be NULL. */
rebatch_status rebatch_fault_counts(const rebatch_device *device, uint64_t *seen, uint64_t *failed);

#endif
