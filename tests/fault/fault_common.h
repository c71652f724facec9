/* What the fault tests share: a host device behind one that fails, and plans for it. Must not know
 * what runs on it. */
#ifndef FAULT_COMMON_H
#define FAULT_COMMON_H

#include <criterion/criterion.h>

#include "fault/fault_device.h"
#include "rebatch/rebatch.h"

/* Kinds of device calls, and what they answer when they fail; 0 are those that take memory. */
static const struct fault_kind {
    uint32_t calls;
    rebatch_status status;
} fault_kinds[] = {{0, REBATCH_OOM},
                   {REBATCH_FAULT_RESERVE, REBATCH_E_DEVICE},
                   {REBATCH_FAULT_MAP, REBATCH_E_DEVICE},
                   {REBATCH_FAULT_ACCESS, REBATCH_E_DEVICE},
                   {REBATCH_FAULT_COPY, REBATCH_E_DEVICE},
                   {REBATCH_FAULT_FILL, REBATCH_E_DEVICE},
                   {REBATCH_FAULT_STREAM, REBATCH_E_DEVICE},
                   {REBATCH_FAULT_EVENT, REBATCH_E_DEVICE},
                   {REBATCH_FAULT_LAST_ERROR, REBATCH_E_DEVICE}};
#define FAULT_KINDS (sizeof fault_kinds / sizeof *fault_kinds)

/* From the `nth` call of these kinds on, `times` calls answer `status`. */
static inline rebatch_fault_plan fault_plan(uint32_t calls, rebatch_status status, uint64_t nth,
                                            uint64_t times)
{
    return FAULTS(.calls = calls, .nth = nth, .times = times, .status = status);
}

static inline void fault_arm(rebatch_device *device, const rebatch_fault_plan *plan)
{
    cr_assert_eq(rebatch_fault_arm(device, plan), REBATCH_OK, "%s", rebatch_last_error());
}

static inline void fault_open(rebatch_device **host, rebatch_device **device, size_t capacity_bytes)
{
    cr_assert_eq(rebatch_device_open_host(host, capacity_bytes, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_device_open_fault(device, *host, NULL), REBATCH_OK);
}

/* Nothing has leaked. Devices that were not opened are NULL. */
static inline void fault_close(rebatch_device *host, rebatch_device *device)
{
    rebatch_memory_info info = {0};
    if (host)
        cr_assert_eq(rebatch_device_memory(host, &info), REBATCH_OK);
    cr_assert_eq(info.used_bytes, 0, "%zu bytes leaked", info.used_bytes);
    rebatch_device_close(device);
    rebatch_device_close(host);
}

#endif
