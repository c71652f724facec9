/* Owns the tests of pinned host memory when the heap has nothing for its record.
 * Must not know what a device is made of. */
#include <criterion/criterion.h>

#include "base/base.h"
#include "rebatch/rebatch.h"

Test(pinned_faults, without_host_memory_for_its_record_there_is_none)
{
    rebatch_device *device;
    void *pinned = &device;
    const int64_t live = rbi_heap_live();
    cr_assert_eq(rebatch_device_open_host(&device, REBATCH_UNLIMITED, NULL), REBATCH_OK);
    rbi_heap_fail(1, 1);
    cr_assert_eq(rebatch_pinned_alloc(&pinned, device, 4096), REBATCH_E_HOST_OOM);
    cr_assert_null(pinned);
    cr_assert_eq(rebatch_pinned_alloc(&pinned, device, 4096), REBATCH_OK);
    rebatch_device_close(device); /* which forgets what was not given back */
    cr_assert_eq(rbi_heap_live(), live);
}
