/* Owns the tests of a driver that is there and not good enough: made here, with a compiler, under
 * the name of CUDA's. Must not know how a driver is found. */
#include <criterion/criterion.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/cuda_driver.h"
#include "rebatch/rebatch.h"

/* ---- a driver ---- */

static const char *const symbols[] = {
#define SYMBOL(member, symbol, arguments) #symbol,
    RBI_CUDA_CALLS(SYMBOL)
#undef SYMBOL
};
#define SYMBOLS (sizeof symbols / sizeof *symbols)

/* Makes this process's libcuda.so.1, before anybody asks for it: a library that is loaded under
 * that name is found first. It has every call but `missing`; `calls` are those that do more than
 * answer 0. */
static void make_driver(const char *missing, const char *calls)
{
    char folder[] = "/tmp/rebatch_driver_XXXXXX", command[256], path[128];
    cr_assert_not_null(mkdtemp(folder));
    (void)snprintf(path, sizeof path, "%s/driver.c", folder);
    FILE *file = fopen(path, "w");
    cr_assert_not_null(file);
    fprintf(file, "%s\n", calls);
    for (size_t i = 0; i < SYMBOLS; i++) {
        char call[64];
        (void)snprintf(call, sizeof call, " %s(", symbols[i]);
        if (!strstr(calls, call) && (!missing || strcmp(missing, symbols[i]) != 0))
            fprintf(file, "int%svoid) { return 0; }\n", call);
    }
    cr_assert_eq(fclose(file), 0);
    (void)snprintf(command, sizeof command,
                   "cc -shared -fPIC -Wl,-soname,libcuda.so.1 -o %s/libcuda.so.1 %s", folder, path);
    cr_assert_eq(system(command), 0);
    (void)snprintf(path, sizeof path, "%s/libcuda.so.1", folder);
    cr_assert_not_null(dlopen(path, RTLD_NOW | RTLD_GLOBAL), "%s", dlerror());
    (void)snprintf(command, sizeof command, "rm -r %s", folder);
    cr_assert_eq(system(command), 0);
}

static void check_refused(int ordinal, const char *words)
{
    rebatch_cuda_options options = REBATCH_CUDA_OPTIONS_INIT;
    rebatch_device *device = (rebatch_device *)(void *)&options;
    options.ordinal = ordinal;
    cr_assert_eq(rebatch_device_open_cuda(&device, &options), REBATCH_E_NO_DEVICE);
    cr_assert_null(device);
    cr_assert(strstr(rebatch_last_error(), words), "\"%s\" does not say \"%s\"",
              rebatch_last_error(), words);
}

TestSuite(device_driver);

Test(device_driver, one_that_is_too_old_is_no_device)
{
    make_driver("cuMemAddressReserve", "");
    check_refused(0, "no CUDA device: the driver is too old, it has no cuMemAddressReserve");
    check_refused(0, "too old"); /* and again, without loading it again */
}

/* CUDA_ERROR_NO_DEVICE */
Test(device_driver, one_without_a_gpu_is_no_device)
{
    make_driver(NULL, "int cuInit(unsigned flags) { return flags == 0 ? 100 : 1; }");
    check_refused(0, "no CUDA device: the driver answered 100 to cuInit");
}

Test(device_driver, an_ordinal_out_of_range_is_no_device)
{
    make_driver(NULL, "int cuDeviceGetCount(int *count) { *count = 2; return 0; }");
    check_refused(2, "ordinal is 2: expected 0 to 1, there are 2 CUDA devices");
    check_refused(-1, "ordinal is -1: expected 0 to 1");
}

/* All GPUs hidden by CUDA_VISIBLE_DEVICES, for example. */
Test(device_driver, no_gpu_at_all_is_no_device)
{
    make_driver(NULL, "int cuDeviceGetCount(int *count) { *count = 0; return 0; }");
    check_refused(0, "no CUDA device: the driver sees none");
}
