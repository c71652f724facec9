/* Owns the tests of a driver that is there and not good enough: a stand-in under the name of
 * CUDA's. Must not know how a driver is found. */
#include <criterion/criterion.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "rebatch/rebatch.h"

/* Loads this process's libcuda.so.1 from the folder `name` beside the tests, before anybody asks
 * for it: a library that is loaded under that name is found first. */
static void *load_driver(const char *name)
{
    char program[512], path[640];
    const ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    cr_assert_gt(length, 0);
    program[length] = '\0';
    char *end = strrchr(program, '/');
    cr_assert_not_null(end);
    *end = '\0';
    (void)snprintf(path, sizeof path, "%s/drivers/%s/libcuda.so.1", program, name);
    void *driver = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    cr_assert_not_null(driver, "%s", dlerror());
    return driver;
}

static void set_variable(void *driver, const char *name, int value)
{
    int *variable = dlsym(driver, name);
    cr_assert_not_null(variable, "%s", name);
    *variable = value;
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

Test(device_driver, one_that_is_too_old_is_no_device)
{
    load_driver("old");
    check_refused(0, "no CUDA device: the driver is too old, it has no cuMem");
    check_refused(0, "too old"); /* and again, without loading it again */
}

/* CUDA_ERROR_NO_DEVICE */
Test(device_driver, one_without_a_gpu_is_no_device)
{
    set_variable(load_driver("whole"), "driver_init_answer", 100);
    check_refused(0, "no CUDA device: the driver answered 100 to cuInit");
}

Test(device_driver, an_ordinal_out_of_range_is_no_device)
{
    set_variable(load_driver("whole"), "driver_gpus", 2);
    check_refused(2, "ordinal is 2: expected 0 to 1, there are 2 CUDA devices");
    check_refused(-1, "ordinal is -1: expected 0 to 1");
}

Test(device_driver, no_gpu_at_all_is_no_device)
{
    set_variable(load_driver("whole"), "driver_gpus", 0);
    check_refused(0, "no CUDA device: the driver sees none");
}
