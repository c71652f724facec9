/* Owns the tests of a driver that is there and not good enough: a stand-in under the name of
 * CUDA's. Must not know how a driver is found. */
#include <criterion/criterion.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
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

/* ---- what others leave of a GPU ---- */

/* HAMi refuses to say what is free while its container uses more than its limit. */
Test(device_driver, a_refusal_to_say_what_is_free_says_that_nothing_is)
{
    (void)setenv("DRIVER_REFUSES_INFO", "1", 1);
    rebatch_device *const device = open_gpu_with("", (uint64_t)64 << 20);
    rebatch_memory_info info;
    cr_assert_eq(rebatch_device_memory(device, &info), REBATCH_OK, "%s", rebatch_last_error());
    cr_assert_eq(info.free_bytes, 0);
    cr_assert_eq(info.total_bytes, 64 << 20);
    cr_assert_eq(rebatch_from_cuda(device, 303), REBATCH_OOM, "a module finds no memory");
    rebatch_device_close(device);
}

static const char *const limits[] = {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_DEVICE_MEMORY_LIMIT",
                                     "CUDA_DEVICE_MEMORY_LIMIT_1"};

static void check_limit(const char *const *values, int ordinal, size_t bytes, int variable,
                        int refused)
{
    char name[40];
    size_t found;
    for (size_t i = 0; i < 3; i++)
        (void)(values[i] ? setenv(limits[i], values[i], 1) : unsetenv(limits[i]));
    const rebatch_status status = rebatch_cuda_limit(&found, name, sizeof name, ordinal);
    cr_expect_eq(found, bytes, "%zu, expected %zu", found, bytes);
    cr_expect_str_eq(name, variable < 0 ? "" : limits[variable]);
    cr_expect_eq(status, refused < 0 ? REBATCH_OK : REBATCH_E_PARSE, "%s", rebatch_last_error());
    if (refused >= 0 && values[refused]) {
        char words[160];
        (void)snprintf(words, sizeof words, "%s is \"%s\": expected a size such as ",
                       limits[refused], values[refused]);
        cr_expect(strstr(rebatch_last_error(), words), "\"%s\" does not say \"%s\"",
                  rebatch_last_error(), words);
    }
}

#define MIB ((size_t)1 << 20)

Test(device_driver, the_smallest_limit_of_others_holds)
{
    static const struct {
        const char *values[3];
        int ordinal;
        size_t bytes;
        int variable, refused; /* -1: none */
    } rows[] = {
        {{NULL}, 0, 0, -1, -1},
        {{"0=2G,1=512M"}, 0, 2048 * MIB, 0, -1},
        {{"0=2G,1=512M"}, 1, 512 * MIB, 0, -1},
        {{"0=2G,1=512MB"}, 1, 512 * MIB, 0, -1},
        {{"0=2G"}, 1, 0, -1, -1},
        {{NULL, "4g"}, 0, 4096 * MIB, 1, -1},
        {{NULL, "4g", "3000m"}, 0, 4096 * MIB, 1, -1},
        {{NULL, "4g", "3000m"}, 1, 3000 * MIB, 2, -1},
        {{NULL, "4g", "8g"}, 1, 8192 * MIB, 2, -1}, /* HAMi: a GPU's own comes first */
        {{NULL, "1048576"}, 1, MIB, 1, -1},
        {{NULL, "512k"}, 1, MIB / 2, 1, -1},
        {{NULL, "0"}, 0, 0, -1, -1}, /* HAMi: no limit */
        {{"", "", ""}, 1, 0, -1, -1},
        {{"0=2G", "1g"}, 0, 1024 * MIB, 1, -1},
        {{"0=1G", "2g"}, 0, 1024 * MIB, 0, -1},
        {{"half", "2g"}, 0, 2048 * MIB, 1, 0},
        {{"0=2G", "4 GPUs"}, 0, 2048 * MIB, 0, 1},
        {{"0=2G,1", NULL}, 1, 0, -1, 0},
        {{"0=2G;1=1G", NULL}, 0, 0, -1, 0},
        {{"=2G", NULL}, 0, 0, -1, 0},
        {{NULL, "-1g"}, 0, 0, -1, 1},
        {{NULL, "99999999999999999999g"}, 0, 0, -1, 1},
        {{NULL, "99999999999g"}, 0, 0, -1, 1},
        {{NULL, "4g", "all"}, 1, 0, -1, 2},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        check_limit(rows[i].values, rows[i].ordinal, rows[i].bytes, rows[i].variable,
                    rows[i].refused);
    cr_expect_eq(rebatch_cuda_limit(NULL, NULL, 0, 0), REBATCH_E_INVALID);
    cr_expect_eq(rebatch_cuda_limit(&(size_t){0}, NULL, 1, 0), REBATCH_E_INVALID);
}

/* Also where the program sets another limit later; a share is one of what others leave. */
Test(device_driver, a_pool_keeps_to_the_limit_of_others)
{
    (void)setenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=16M", 1);
    rebatch_device *const device = open_gpu_with("", (uint64_t)64 << 20);
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    rebatch_pool *pool;
    void *block;
    char text[8192];
    cr_assert_eq(rebatch_pool_create(&pool, device, NULL), REBATCH_OK, "%s", rebatch_last_error());
    cr_expect_eq(rebatch_pool_alloc(&block, pool, 20 << 20, NULL, 0), REBATCH_OOM);
    cr_expect_eq(rebatch_pool_set_limit(pool, 0), REBATCH_OK);
    cr_expect_eq(rebatch_pool_alloc(&block, pool, 20 << 20, NULL, 0), REBATCH_OOM);
    cr_expect_eq(rebatch_pool_alloc(&block, pool, 12 << 20, NULL, 0), REBATCH_OK);
    cr_expect_eq(rebatch_pool_free(pool, block), REBATCH_OK);
    (void)rebatch_pool_format_summary(text, sizeof text, pool);
    const char line[] = "limit 16.0 MiB; CUDA_MPS_PINNED_DEVICE_MEM_LIMIT sets 16.0 MiB\n";
    cr_expect(strncmp(text, line, sizeof line - 1) == 0, "%.100s", text);
    rebatch_pool_destroy(pool);
    options.limit_permille = 500;
    cr_assert_eq(rebatch_pool_create(&pool, device, &options), REBATCH_OK);
    cr_expect_eq(rebatch_pool_alloc(&block, pool, 10 << 20, NULL, 0), REBATCH_OOM);
    cr_expect_eq(rebatch_pool_alloc(&block, pool, 6 << 20, NULL, 0), REBATCH_OK);
    cr_expect_eq(rebatch_pool_free(pool, block), REBATCH_OK);
    rebatch_pool_destroy(pool);
    rebatch_device_close(device);
}

/* ---- with which arguments the driver is called ---- */

#define PAGE ((size_t)2 << 20)

/* A driver that writes down what it is asked, and its variables. */
static void *told;
static char *told_log;

static unsigned long long *told_number(const char *name)
{
    unsigned long long *const number = dlsym(told, name);
    cr_assert_not_null(number, "%s", name);
    return number;
}

static rebatch_device *open_told(const rebatch_cuda_options *options)
{
    rebatch_device *device;
    if (!told) {
        told = load_driver("told");
        told_log = dlsym(told, "driver_log");
        ((int *)dlsym(told, "driver_attributes"))[102] = 1; /* virtual memory */
        ((int *)dlsym(told, "driver_attributes"))[141] = 1; /* of the host, too */
    }
    told_log[0] = '\0';
    cr_assert_eq(rebatch_device_open_cuda(&device, options), REBATCH_OK, "%s",
                 rebatch_last_error());
    return device;
}

/* What the driver was asked since the last time, but for which context is current. */
static void expect_told(const char *expected)
{
    static char rest[8192];
    rest[0] = '\0';
    for (char *line = strtok(told_log, "\n"); line; line = strtok(NULL, "\n"))
        if (strncmp(line, "Ctx", 3) != 0 || strncmp(line, "CtxS", 4) == 0 ||
            strncmp(line, "CtxR", 4) == 0)
            (void)strcat(strcat(rest, line), "\n");
    told_log[0] = '\0';
    cr_expect_str_eq(rest, expected, "\n%sinstead of\n%s", rest, expected);
}

static void set_flag(void *flag)
{
    *(bool *)flag = true;
}

static rebatch_cuda_options third(void)
{
    rebatch_cuda_options options = REBATCH_CUDA_OPTIONS_INIT;
    options.ordinal = 3;
    return options;
}

Test(device_driver, a_gpu_is_opened_and_closed)
{
    const rebatch_cuda_options options = third();
    rebatch_device *const device = open_told(&options);
    int ordinal = 0;
    expect_told("Init 0\nDeviceGetCount \nDeviceGet 3\nDeviceGetName 48 103\n"
                "DevicePrimaryCtxRetain 103\nDeviceGetAttribute 18 103\n"
                "DeviceGetAttribute 102 103\nMemGetAllocationGranularity type 1 at 1:3, 0\n"
                "DeviceGetAttribute 141 103\nDeviceGetAttribute 134 103\n"
                "MemGetAllocationGranularity type 1 at 3:0, 0\nDriverGetVersion \n");
    cr_expect_str_eq(rebatch_device_name(device), "cuda:3 Told");
    cr_expect_eq(strncmp(device->driver, "CUDA 12.8", 9), 0, "%s", device->driver);
    cr_expect_eq(rbi_device_page_bytes(device), PAGE);
    cr_expect_eq(rebatch_device_ordinal(&ordinal, device), REBATCH_OK);
    cr_expect_eq(ordinal, 3);
    cr_expect(rbi_device_has_contents(device) && !rbi_device_is_in_process(device));
    rebatch_device_close(device);
    expect_told("DevicePrimaryCtxRelease_v2 103\n");
}

/* Each of its calls once, in turn. */
static rebatch_status call_all(rebatch_device *device, int upto)
{
    rebatch_memory_info info;
    rebatch_stream stream = (rebatch_stream)8;
    rbi_event event = (rbi_event)9;
    rbi_physical physical = 11;
    void *memory = (void *)0x10000;
    bool is_called = false, is_done = false;
    switch (upto) {
    case 0:
        return rebatch_device_memory(device, &info);
    case 1:
        return rbi_device_alloc(device, &memory, 700);
    case 2:
        return rbi_device_free(device, (void *)0x5000, 700);
    case 3:
        return rebatch_copy(device, (void *)0x5000, memory, 600, stream);
    case 4:
        return rebatch_fill(device, (void *)0x5000, 201, 500, stream);
    case 5:
        return rebatch_pinned_alloc(&memory, device, 4096);
    case 6:
        return rebatch_pinned_free(device, (void *)0x6000, 4096);
    case 7:
        return rbi_device_reserve(device, &memory, 2 * PAGE);
    case 8:
        return rbi_device_create_physical(device, &physical, PAGE);
    case 9:
        return rbi_device_map(device, memory, PAGE, physical);
    case 10:
        return rbi_device_set_access(device, memory, PAGE);
    case 11:
        return rbi_device_unmap(device, memory, PAGE);
    case 12:
        return rbi_device_release_physical(device, physical, PAGE);
    case 13:
        return rbi_device_create_host(device, &physical, PAGE);
    case 14:
        return rbi_device_release_host(device, physical, PAGE);
    case 15:
        return rbi_device_unreserve(device, memory, 2 * PAGE);
    case 16:
        return rbi_device_synchronize(device);
    case 17:
        return rebatch_stream_create(&stream, device);
    case 18:
        return rebatch_stream_synchronize(device, stream);
    case 19:
        return rebatch_stream_call(device, stream, set_flag, &is_called) ? REBATCH_E_DEVICE
               : is_called                                               ? REBATCH_OK
                                                                         : REBATCH_E_STATE;
    case 20:
        return rbi_event_create(device, &event);
    case 21:
        return rbi_event_record(device, event);
    case 22:
        return rbi_event_query(device, event, &is_done) ? REBATCH_E_DEVICE
               : is_done                                ? REBATCH_OK
                                                        : REBATCH_E_STATE;
    default:
        return rbi_event_synchronize(device, event);
    }
}

static const char *const calls[] = {
    "MemGetInfo_v2 \n",
    "MemAlloc_v2 700\n",
    "MemFree_v2 0x5000\n",
    "MemcpyAsync 0x5000 0x10000 600 8\n",
    "MemsetD8Async 0x5000 201 500 8\n",
    "MemHostAlloc 4096 3\n",
    "MemFreeHost 0x6000\n",
    "MemAddressReserve 4194304 0 0 0\n",
    "MemCreate 2097152 type 1 at 1:3, 0\n",
    "MemMap 0x10000 2097152 0 11 0\n",
    "MemSetAccess 0x10000 2097152 1:3=3\n",
    "MemUnmap 0x10000 2097152\n",
    "MemRelease 11\n",
    "MemCreate 2097152 type 1 at 3:0, 0\n",
    "MemRelease 11\n",
    "MemAddressFree 0x10000 4194304\n",
    "CtxSynchronize \n",
    "StreamCreate 1\n",
    "StreamSynchronize 8\n",
    "LaunchHostFunc 8\n",
    "EventCreate 2\n",
    "CtxRecordEvent 7 9\n",
    "EventQuery 9\n",
    "EventSynchronize 9\n",
};
#define CALLS (int)(sizeof calls / sizeof *calls)

static size_t used_of(rebatch_device *device)
{
    rebatch_memory_info info;
    (void)rebatch_device_memory(device, &info);
    return info.used_bytes;
}

Test(device_driver, each_call_has_the_arguments_that_the_driver_takes)
{
    static const size_t used[] = {0, 700, 0, 0, 0, 0, 0, 0, PAGE, PAGE, PAGE, PAGE, 0};
    const rebatch_cuda_options options = third();
    rebatch_device *const device = open_told(&options);
    told_log[0] = '\0';
    for (int i = 0; i < CALLS; i++) {
        cr_expect_eq(call_all(device, i), REBATCH_OK, "%s%s", calls[i], rebatch_last_error());
        expect_told(calls[i]);
        cr_expect_eq(used_of(device), i <= 12 ? used[i] : 0, "%s", calls[i]);
        told_log[0] = '\0';
    }
    rebatch_stream_destroy(device, (rebatch_stream)8);
    expect_told("StreamSynchronize 8\nStreamDestroy_v2 8\n");
    rbi_event_destroy(device, (rbi_event)9);
    expect_told("EventDestroy_v2 9\n");
    rebatch_memory_info info;
    cr_expect_eq(rebatch_device_memory(device, &info), REBATCH_OK);
    cr_expect(info.free_bytes == 3000 && info.total_bytes == 4000);
    rebatch_device_close(device);
}

/* The GPU's context is current for one call, and whatever was current comes back. */
Test(device_driver, the_context_is_current_for_a_call)
{
    static const struct {
        unsigned long long current;
        const char *fails, *said;
        rebatch_status status;
    } rows[] = {
        {7, "", "CtxGetCurrent \nStreamSynchronize 8\n", REBATCH_OK},
        {0, "", "CtxGetCurrent \nCtxPushCurrent_v2 7\nStreamSynchronize 8\nCtxPopCurrent_v2 \n",
         REBATCH_OK},
        {0, "cuStreamSynchronize",
         "CtxGetCurrent \nCtxPushCurrent_v2 7\nStreamSynchronize 8\nCtxPopCurrent_v2 \n",
         REBATCH_E_DEVICE},
        {0, "cuCtxGetCurrent", "CtxGetCurrent \n", REBATCH_E_DEVICE},
        {0, "cuCtxPushCurrent_v2", "CtxGetCurrent \nCtxPushCurrent_v2 7\n", REBATCH_E_DEVICE},
    };
    rebatch_device *const device = open_told(NULL);
    set_variable(told, "driver_code", 999);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        *told_number("driver_context") = rows[i].current;
        (void)strcpy(dlsym(told, "driver_fails"), rows[i].fails);
        told_log[0] = '\0';
        cr_expect_eq(rebatch_stream_synchronize(device, (rebatch_stream)8), rows[i].status);
        cr_expect_str_eq(told_log, rows[i].said, "row %zu: %s", i, told_log);
    }
    (void)strcpy(dlsym(told, "driver_fails"), "");
    rebatch_device_close(device);
}

/* What fails gives the driver's code, and no memory is taken for given. */
Test(device_driver, each_call_may_fail)
{
    static const struct {
        int code;
        rebatch_status status;
    } rows[] = {{2, REBATCH_OOM}, {999, REBATCH_E_DEVICE}, {719, REBATCH_E_DEVICE_LOST}};
    rebatch_device *const device = open_told(NULL);
    for (int i = 0; i < CALLS; i++) {
        char *const symbol = dlsym(told, "driver_fails");
        const size_t length = strcspn(calls[i], " ");
        for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
            const size_t used = used_of(device);
            (void)snprintf(symbol, 64, "cu%.*s", (int)length, calls[i]);
            set_variable(told, "driver_code", rows[r].code);
            const rebatch_status status = call_all(device, i);
            const bool is_asked = i == 19 || i == 22; /* of which the codes are put together */
            const rebatch_status expected = is_asked                      ? REBATCH_E_DEVICE
                                            : i == 5 && rows[r].code == 2 ? REBATCH_E_HOST_OOM
                                                                          : rows[r].status;
            cr_expect_eq(status, expected, "%s answers %d: %s", symbol, rows[r].code,
                         rebatch_status_name(status));
            symbol[0] = told_log[0] = '\0';
            cr_expect_eq(used_of(device), used, "%s", calls[i]);
        }
        (void)call_all(device, i);
    }
    rebatch_device_close(device);
}

static bool is_mapped(char *memory)
{
    unsigned char is_there;
    return mincore(memory, 4096, &is_there) == 0;
}

/* But where the GPU has it at another address. */
Test(device_driver, large_pinned_memory_is_mapped_and_registered)
{
    enum { SAME_ADDRESS = 91 };
    const size_t bytes = PAGE + 100;
    rebatch_device *const device = open_told(NULL);
    char *memory, expected[96];
    told_log[0] = '\0';
    cr_assert_eq(rebatch_pinned_alloc((void **)&memory, device, bytes), REBATCH_OK);
    cr_assert_eq(rebatch_pinned_free(device, memory, bytes), REBATCH_OK);
    (void)snprintf(expected, sizeof expected,
                   "DeviceGetAttribute 91 100\nMemHostAlloc %zu 3\n"
                   "DeviceGetAttribute 91 100\nMemFreeHost 0x6000\n",
                   bytes);
    expect_told(expected);
    ((int *)dlsym(told, "driver_attributes"))[SAME_ADDRESS] = 1;
    cr_assert_eq(rebatch_pinned_alloc((void **)&memory, device, bytes), REBATCH_OK);
    cr_assert_eq((uintptr_t)memory % PAGE, 0);
    memory[0] = memory[bytes - 1] = 1;
    (void)snprintf(expected, sizeof expected,
                   "DeviceGetAttribute 91 100\nMemHostRegister_v2 %zu 3\n", bytes);
    expect_told(expected);
    cr_assert_eq(rebatch_pinned_free(device, memory, 2 * bytes), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_pinned_free(device, memory, PAGE), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_pinned_free(device, memory + PAGE, bytes), REBATCH_E_INVALID);
    cr_assert(is_mapped(memory));
    expect_told("");
    cr_assert_eq(rebatch_pinned_free(device, memory, bytes), REBATCH_OK);
    expect_told("DeviceGetAttribute 91 100\nMemHostUnregister \n");
    cr_assert_not(is_mapped(memory));
    cr_assert_eq(rebatch_pinned_alloc((void **)&memory, device, SIZE_MAX), REBATCH_E_HOST_OOM);
    cr_assert_null(memory);
    (void)strcpy(dlsym(told, "driver_fails"), "cuMemHostRegister_v2");
    set_variable(told, "driver_code", 2);
    cr_assert_eq(rebatch_pinned_alloc((void **)&memory, device, bytes), REBATCH_E_HOST_OOM);
    cr_assert_null(memory);
    set_variable(told, "driver_code", 999);
    cr_assert_eq(rebatch_pinned_alloc((void **)&memory, device, bytes), REBATCH_E_DEVICE);
    rebatch_device_close(device);
}

Test(device_driver, an_event_that_is_not_reached_is_no_error)
{
    bool is_done = true;
    rebatch_device *const device = open_told(NULL);
    set_variable(told, "driver_code", 600);
    (void)strcpy(dlsym(told, "driver_fails"), "cuEventQuery");
    cr_expect_eq(rbi_event_query(device, (rbi_event)9, &is_done), REBATCH_OK);
    cr_expect_not(is_done);
    rebatch_device_close(device);
}

static int kept_error(void)
{
    return 2;
}

Test(device_driver, the_error_that_the_runtime_keeps_is_taken)
{
    rebatch_cuda_options options = REBATCH_CUDA_OPTIONS_INIT;
    rebatch_device *device = open_told(&options);
    cr_expect_eq(rbi_device_take_last_error(device), REBATCH_OK);
    rebatch_device_close(device);
    options.take_last_error = kept_error;
    device = open_told(&options);
    cr_expect_eq(rbi_device_take_last_error(device), REBATCH_OOM);
    rebatch_device_close(device);
}

/* What a GPU and its driver have, by attributes: 18 memory of the machine, 102 virtual memory, 134
 * the host's node, 141 virtual memory of the host; and by the pages of both. */
Test(device_driver, abilities_are_as_the_driver_says)
{
    static const struct {
        int integrated, virtual, node, host;
        unsigned long long page, host_page;
        size_t page_bytes;
        bool has_virtual, has_host;
    } rows[] = {
        {0, 1, 0, 1, PAGE, PAGE, PAGE, true, true},
        {0, 1, 2, 1, PAGE, PAGE / 2, PAGE, true, true},
        {0, 1, -1, 1, PAGE, PAGE, PAGE, true, true},
        {0, 1, 0, 0, PAGE, PAGE, PAGE, true, false},
        {0, 1, 0, 1, PAGE, 2 * PAGE, PAGE, true, false},
        {0, 1, 0, 1, PAGE, 0, PAGE, true, false},
        {0, 1, 0, 1, 2 * PAGE, PAGE, 2 * PAGE, true, true},
        {0, 1, 0, 1, 0, PAGE, PAGE, false, false},
        {0, 0, 0, 1, 2 * PAGE, PAGE, PAGE, false, false},
        {1, 1, 0, 1, PAGE, PAGE, PAGE, true, false},
    };
    rebatch_device_close(open_told(NULL));
    int *const attributes = dlsym(told, "driver_attributes");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char said[64];
        attributes[18] = rows[i].integrated;
        attributes[102] = rows[i].virtual;
        attributes[134] = rows[i].node;
        attributes[141] = rows[i].host;
        *told_number("driver_page") = rows[i].page;
        *told_number("driver_host_page") = rows[i].host_page;
        rebatch_device *const device = open_told(NULL);
        cr_expect_eq(rbi_device_page_bytes(device), rows[i].page_bytes, "row %zu", i);
        cr_expect_eq(rbi_device_has_virtual_memory(device), rows[i].has_virtual, "row %zu", i);
        cr_expect_eq(rbi_device_has_overflow(device), rows[i].has_host, "row %zu", i);
        if (rows[i].has_host) {
            rbi_physical physical;
            told_log[0] = '\0';
            cr_expect_eq(rbi_device_create_host(device, &physical, PAGE), REBATCH_OK);
            (void)snprintf(said, sizeof said, "MemCreate %zu type 1 at 3:%d, 0\n", PAGE,
                           rows[i].node > 0 ? rows[i].node : 0);
            expect_told(said);
            cr_expect_gt(rbi_device_host_room(device), 0);
        }
        rebatch_device_close(device);
    }
}

/* Up to 31 others, each once, of which the GPU itself is none. */
Test(device_driver, other_gpus_get_access_once_each)
{
    char expected[512] = "MemSetAccess 0x10000 2097152 1:3=3";
    const rebatch_cuda_options options = third();
    rebatch_device *const device = open_told(&options);
    void *const memory = (void *)0x10000;
    told_log[0] = '\0';
    set_variable(told, "driver_reaches", 0);
    cr_expect_eq(rbi_device_allow_peer(device, 5), REBATCH_E_UNSUPPORTED);
    cr_expect_str_eq(rebatch_last_error(), "GPU 5 cannot reach the memory of GPU 3");
    cr_expect_eq(rbi_device_allow_peer(device, 3), REBATCH_OK);
    expect_told("DeviceGet 5\nDeviceCanAccessPeer 105 103\nDeviceGet 3\n");
    set_variable(told, "driver_reaches", 1);
    for (int peer = 0, count = 0; count < 31; peer++) {
        char one[16];
        cr_assert_eq(rbi_device_allow_peer(device, peer), REBATCH_OK);
        cr_assert_eq(rbi_device_allow_peer(device, peer), REBATCH_OK); /* again */
        if (peer == 3)
            continue;
        (void)snprintf(one, sizeof one, " 1:%d=3", peer + 100);
        (void)strcat(expected, one);
        count++;
    }
    told_log[0] = '\0';
    cr_expect_eq(rbi_device_set_access(device, memory, PAGE), REBATCH_OK);
    expect_told(strcat(expected, "\n"));
    cr_expect_eq(rbi_device_allow_peer(device, 38), REBATCH_E_UNSUPPORTED);
    cr_expect_str_eq(rebatch_last_error(), "31 other GPUs have access: expected no more");
    rebatch_device_close(device);
}
