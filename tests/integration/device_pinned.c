/* Owns the tests of pinned host memory: what it is, what it does not count against, and who has
 * none. Must not know more of the library than its public headers say. */
#include "fault/fault_device.h"
#include "rig.h"

#define ASSERT_OK(call) cr_assert_eq((call), REBATCH_OK, "%s: %s", #call, rebatch_last_error())

Test(device_pinned, it_can_be_written_and_copied_and_does_not_count)
{
    enum { BYTES = 300000 };
    rebatch_device *device;
    rebatch_memory_info before, after;
    void *pinned, *memory;
    rebatch_pool *pool;
    ASSERT_OK(rebatch_device_open_host(&device, 4 << 20, NULL));
    ASSERT_OK(rebatch_pool_create(&pool, device, NULL));
    ASSERT_OK(rebatch_pool_alloc(&memory, pool, BYTES, NULL, 0));
    ASSERT_OK(rebatch_device_memory(device, &before));
    ASSERT_OK(rebatch_pinned_alloc(&pinned, device, BYTES));
    ASSERT_OK(rebatch_device_memory(device, &after));
    cr_assert_eq(after.used_bytes, before.used_bytes);
    cr_assert_eq((uintptr_t)pinned % 4096, 0);
    memset(pinned, 7, BYTES);
    ASSERT_OK(rebatch_copy(device, memory, pinned, BYTES, NULL));
    ASSERT_OK(rebatch_fill(device, pinned, 1, BYTES, NULL));
    ASSERT_OK(rebatch_copy(device, pinned, memory, BYTES, NULL));
    for (size_t i = 0; i < BYTES; i++)
        cr_assert_eq(((const char *)pinned)[i], 7);
    ASSERT_OK(rebatch_pinned_free(device, pinned, BYTES));
    rebatch_pool_destroy(pool);
    rebatch_device_close(device);
}

/* More than the device has: that is the machine's memory, not its own. */
Test(device_pinned, it_is_there_when_the_device_is_full)
{
    rebatch_device *device;
    void *pinned;
    ASSERT_OK(rebatch_device_open_host(&device, 65536, NULL));
    ASSERT_OK(rebatch_pinned_alloc(&pinned, device, 8 << 20));
    ASSERT_OK(rebatch_pinned_free(device, pinned, 8 << 20));
    cr_assert_eq(rebatch_pinned_alloc(&pinned, device, (size_t)1 << 60), REBATCH_E_HOST_OOM);
    cr_assert_null(pinned);
    rebatch_device_close(device);
}

Test(device_pinned, a_dry_device_has_none)
{
    rebatch_device *dry, *fault;
    void *pinned = &dry;
    ASSERT_OK(rebatch_device_open_dry(&dry, 4 << 20, 0));
    cr_assert_eq(rebatch_pinned_alloc(&pinned, dry, 4096), REBATCH_E_UNSUPPORTED);
    cr_assert_null(pinned);
    SAYS("device dry has no pinned host memory");
    ASSERT_OK(rebatch_device_open_fault(&fault, dry, NULL));
    cr_assert_eq(rebatch_pinned_alloc(&pinned, fault, 4096), REBATCH_E_UNSUPPORTED);
    rebatch_device_close(fault);
    rebatch_device_close(dry);
}

Test(device_pinned, a_fault_device_fails_it_by_plan)
{
    rebatch_device *host, *fault;
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    uint64_t seen, failed;
    void *pinned;
    ASSERT_OK(rebatch_device_open_host(&host, REBATCH_UNLIMITED, NULL));
    ASSERT_OK(rebatch_device_open_fault(&fault, host, NULL));
    plan.nth = 1;
    ASSERT_OK(rebatch_fault_arm(fault, &plan)); /* of the device's memory, which this is not */
    ASSERT_OK(rebatch_pinned_alloc(&pinned, fault, 4096));
    ASSERT_OK(rebatch_pinned_free(fault, pinned, 4096));
    plan.calls = REBATCH_FAULT_PIN;
    plan.nth = 2;
    ASSERT_OK(rebatch_fault_arm(fault, &plan));
    ASSERT_OK(rebatch_pinned_alloc(&pinned, fault, 4096));
    ASSERT_OK(rebatch_pinned_free(fault, pinned, 4096));
    cr_assert_eq(rebatch_pinned_alloc(&pinned, fault, 4096), REBATCH_E_HOST_OOM);
    cr_assert_null(pinned);
    SAYS("allocate pinned host memory");
    ASSERT_OK(rebatch_fault_counts(fault, &seen, &failed));
    cr_assert_eq(seen, 2);
    cr_assert_eq(failed, 1);
    plan.nth = 1;
    plan.status = REBATCH_E_DEVICE;
    ASSERT_OK(rebatch_fault_arm(fault, &plan));
    cr_assert_eq(rebatch_pinned_alloc(&pinned, fault, 4096), REBATCH_E_DEVICE);
    rebatch_device_close(fault);
    rebatch_device_close(host);
}

Test(device_pinned, bad_arguments_are_refused)
{
    rebatch_device *device;
    void *pinned;
    ASSERT_OK(rebatch_device_open_host(&device, REBATCH_UNLIMITED, NULL));
    cr_assert_eq(rebatch_pinned_alloc(NULL, device, 1), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_pinned_alloc(&pinned, NULL, 1), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_pinned_alloc(&pinned, device, 0), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_pinned_free(NULL, NULL, 1), REBATCH_E_INVALID);
    ASSERT_OK(rebatch_pinned_free(device, NULL, 1));
    rebatch_device_close(device);
}

static void refuse_free(rebatch_device *device, void *memory, size_t bytes, const char *text)
{
    rebatch_clear_error();
    cr_assert_eq(rebatch_pinned_free(device, memory, bytes), REBATCH_E_INVALID, "%s", text);
    cr_assert(strstr(rebatch_last_error(), text), "%s", rebatch_last_error());
}

static void refuse_wrong_frees(rebatch_device *device)
{
    char *first, *second, own[8];
    ASSERT_OK(rebatch_pinned_alloc((void **)&first, device, 100));
    ASSERT_OK(rebatch_pinned_alloc((void **)&second, device, 8192));
    refuse_free(device, second, 4096, "bytes is 4096: expected 8192");
    refuse_free(device, second + 4096, 4096, "no pinned memory at");
    refuse_free(device, own, sizeof own, "no pinned memory at");
    memset(first, 3, 100); /* all is as it was */
    memset(second, 4, 8192);
    ASSERT_OK(rebatch_pinned_free(device, second, 8192));
    refuse_free(device, second, 8192, "no pinned memory at");
    ASSERT_OK(rebatch_pinned_free(device, first, 100));
    refuse_free(device, first, 100, "no pinned memory at");
}

Test(device_pinned, a_free_of_another_size_or_a_second_one_is_refused)
{
    rebatch_device *host, *fault;
    ASSERT_OK(rebatch_device_open_host(&host, REBATCH_UNLIMITED, NULL));
    ASSERT_OK(rebatch_device_open_fault(&fault, host, NULL));
    refuse_wrong_frees(host);
    refuse_wrong_frees(fault);
    rebatch_device_close(fault);
    rebatch_device_close(host);
}
