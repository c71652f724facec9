/* Owns the test that a session which takes its settings from a file, and opens a log, opens whole
 * or not at all, whatever call of the host heap fails. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/base.h"
#include "fault/fault_device.h"
#include "integration/rig.h"

static unsigned open_files(void)
{
    unsigned count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (folder && readdir(folder))
        count++;
    if (folder)
        (void)closedir(folder);
    return count;
}

/* Opens with the n-th heap call failing, on `device` or for NULL on a device of its own; false when
 * there were fewer. */
static bool opens_without(uint64_t nth, rebatch_device *device)
{
    rebatch *rb;
    const int64_t blocks = rbi_heap_live();
    const unsigned files = open_files();
    const uint64_t calls = rbi_heap_calls();
    rbi_heap_fail(nth, 1);
    const rebatch_status status = device ? rebatch_open(&rb, device, NULL)
                                         : rebatch_open_default(&rb, "device.capacity = 64MiB");
    rbi_heap_fail(0, 0);
    const bool failed = rbi_heap_calls() - calls < nth;
    cr_assert_eq(status, failed ? REBATCH_E_HOST_OOM : REBATCH_OK, "call %ju: %s", (uintmax_t)nth,
                 rebatch_last_error());
    cr_assert_eq(rb == NULL, failed);
    rebatch_close(rb);
    cr_assert_eq(rbi_heap_live(), blocks, "call %ju leaks", (uintmax_t)nth);
    cr_assert_eq(open_files(), files, "call %ju leaves a file open", (uintmax_t)nth);
    return failed;
}

Test(open_faults, every_heap_call_fails)
{
    char settings[] = "/tmp/rebatch-settings-XXXXXX";
    char log[] = "/tmp/rebatch-log-XXXXXX";
    FILE *file = fdopen(mkstemp(settings), "w");
    (void)close(mkstemp(log));
    cr_assert_not_null(file);
    cr_assert_gt(fprintf(file, "batch: { learn = true; };\nlog: { file = \"%s\"; };\n", log), 0);
    cr_assert_eq(fclose(file), 0);
    setenv("REBATCH_CONFIG", settings, 1);
    rebatch_device *device;
    OK(rebatch_device_open_host(&device, 64 << 20, NULL));
    uint64_t nth = 1;
    while (opens_without(nth, device))
        nth++;
    cr_assert_gt(nth, 10, "only %ju calls failed", (uintmax_t)nth - 1);
    for (nth = 1; opens_without(nth, NULL);)
        nth++;
    cr_assert_gt(nth, 10, "only %ju calls failed", (uintmax_t)nth - 1);
    rebatch_device_close(device);
    (void)unlink(settings);
    (void)unlink(log);
}
