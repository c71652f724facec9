/* Owns the tests of a driver that is there and not good enough: a stand-in under the name of
 * CUDA's. Must not know how a driver is found. */
#include <criterion/criterion.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include "device/device.h"
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

/* ---- what a GPU is said to have ---- */

static rebatch_device *open_gpu_with(const char *attribute, uint64_t bytes)
{
    char text[32];
    rebatch_device *device = NULL;
    (void)snprintf(text, sizeof text, "%llu", (unsigned long long)bytes);
    (void)setenv("DRIVER_HAS", attribute, 1);
    (void)setenv("DRIVER_BYTES", text, 1);
    load_driver("gpu");
    cr_assert_eq(rebatch_device_open_cuda(&device, NULL), REBATCH_OK, "%s", rebatch_last_error());
    return device;
}

#define VIRTUAL_MEMORY "102"
#define INTEGRATED "18"

/* The stand-in answers CUDA_ERROR_NOT_SUPPORTED to the granularity, as a virtual GPU does. */
Test(device_driver, virtual_memory_that_is_refused_leaves_plain_memory)
{
    rebatch_device *const device = open_gpu_with(VIRTUAL_MEMORY, (uint64_t)64 << 20);
    rebatch_pool *pool;
    void *block;
    cr_assert_eq(rebatch_pool_create(&pool, device, NULL), REBATCH_OK, "%s", rebatch_last_error());
    cr_assert_eq(rebatch_pool_alloc(&block, pool, 1 << 20, NULL, 0), REBATCH_OK);
    cr_assert_eq(rebatch_pool_free(pool, block), REBATCH_OK);
    rebatch_pool_destroy(pool);
    rebatch_device_close(device);
}

/* Of its memory the driver says that a half is in use, as it says of the file cache. */
Test(device_driver, memory_shared_with_the_machine_is_free_as_the_machine_says)
{
    rebatch_device *const device = open_gpu_with(INTEGRATED, (uint64_t)64 << 20);
    rebatch_memory_info info;
    void *cache;
    cr_assert_eq(rbi_device_alloc(device, &cache, 32 << 20), REBATCH_OK);
    cr_assert_eq(rebatch_device_memory(device, &info), REBATCH_OK);
    cr_assert_eq(info.free_bytes, 64 << 20, "more is available on any machine that runs tests");
    cr_assert_eq(rbi_device_free(device, cache, 32 << 20), REBATCH_OK);
    rebatch_device_close(device);
}

/* The stand-in would give it, as a driver gives memory until the machine hangs. */
Test(device_driver, shared_memory_that_the_machine_has_not_is_out_of_memory)
{
    struct sysinfo machine;
    cr_assert_eq(sysinfo(&machine), 0);
    const size_t all = (size_t)machine.totalram * machine.mem_unit;
    rebatch_device *const device = open_gpu_with(INTEGRATED, 2 * (uint64_t)all);
    rebatch_memory_info info;
    rebatch_pool *pool;
    void *block;
    cr_assert_eq(rebatch_device_memory(device, &info), REBATCH_OK);
    cr_assert_leq(info.free_bytes, all - info.total_bytes / 16, "a part is left to the machine");
    cr_assert_eq(rebatch_pool_create(&pool, device, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_pool_alloc(&block, pool, all, NULL, 0), REBATCH_OOM);
    cr_assert_eq(rebatch_pool_alloc(&block, pool, 1 << 20, NULL, 0), REBATCH_OK);
    cr_assert_eq(rebatch_pool_free(pool, block), REBATCH_OK);
    rebatch_pool_destroy(pool);
    rebatch_device_close(device);
}
