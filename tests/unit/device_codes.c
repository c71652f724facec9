/* What the codes of CUDA's libraries mean, and that a machine without a GPU says so. */
#include <criterion/criterion.h>
#include <string.h>

#include "fault/fault_device.h"
#include "rebatch/rebatch.h"

#define MIB ((size_t)1 << 20)

typedef rebatch_status (*translator)(rebatch_device *device, int code);

/* A device of which `left_bytes` are still free. */
static rebatch_device *device_with_room(size_t left_bytes)
{
    rebatch_device *device;
    cr_assert_eq(rebatch_device_open_host(&device, left_bytes, NULL), REBATCH_OK);
    return device;
}

static void check(translator from, rebatch_device *device, int code, rebatch_status want,
                  const char *words)
{
    rebatch_clear_error();
    const rebatch_status got = from(device, code);
    cr_assert_eq(got, want, "code %d: %s", code, rebatch_status_name(got));
    cr_assert(strstr(rebatch_last_error(), words), "code %d: \"%s\" does not say \"%s\"", code,
              rebatch_last_error(), words);
}

Test(device_codes, success_is_ok_and_says_nothing)
{
    const translator all[] = {rebatch_from_cuda, rebatch_from_cublas, rebatch_from_cudnn,
                              rebatch_from_nccl};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        rebatch_clear_error();
        cr_assert_eq(all[i](NULL, 0), REBATCH_OK);
        cr_assert_str_eq(rebatch_last_error(), "");
    }
}

Test(device_codes, an_out_of_memory_is_one)
{
    check(rebatch_from_cuda, NULL, 2, REBATCH_OOM, "CUDA answered 2 (out of memory)");
    check(rebatch_from_cublas, NULL, 3, REBATCH_OOM, "cuBLAS answered 3");
    check(rebatch_from_cudnn, NULL, 2, REBATCH_OOM, "cuDNN answered 2");
    check(rebatch_from_cudnn, NULL, 4004, REBATCH_OOM, "cuDNN answered 4004");
}

Test(device_codes, an_ambiguous_code_is_an_oom_only_when_the_room_is_gone)
{
    static const struct {
        translator from;
        int code;
    } ambiguous[] = {{rebatch_from_cuda, 303},   {rebatch_from_cuda, 46},
                     {rebatch_from_cublas, 1},   {rebatch_from_cublas, 13},
                     {rebatch_from_cublas, 14},  {rebatch_from_cudnn, 4},
                     {rebatch_from_cudnn, 4000}, {rebatch_from_cudnn, 1001},
                     {rebatch_from_cudnn, 5003}, {rebatch_from_nccl, 1}};
    rebatch_device *device = device_with_room(64 * MIB);
    rebatch_pool *pool;
    void *block;
    cr_assert_eq(rebatch_pool_create(&pool, device, NULL), REBATCH_OK);
    for (size_t i = 0; i < sizeof ambiguous / sizeof *ambiguous; i++) {
        check(ambiguous[i].from, device, ambiguous[i].code, REBATCH_E_DEVICE, "answered");
        check(ambiguous[i].from, NULL, ambiguous[i].code, REBATCH_E_DEVICE, "answered");
    }
    cr_assert_eq(rebatch_pool_alloc(&block, pool, 62 * MIB, NULL, 0), REBATCH_OK);
    for (size_t i = 0; i < sizeof ambiguous / sizeof *ambiguous; i++)
        check(ambiguous[i].from, device, ambiguous[i].code, REBATCH_OOM, "answered");
    rebatch_pool_destroy(pool);
    rebatch_device_close(device);
}

Test(device_codes, a_sticky_code_is_a_lost_device_however_full_it_is)
{
    static const int sticky[] = {214, 220, 700, 702, 710, 714, 715, 716, 717, 718, 719, 810};
    for (size_t i = 0; i < sizeof sticky / sizeof *sticky; i++)
        check(rebatch_from_cuda, NULL, sticky[i], REBATCH_E_DEVICE_LOST, "answered");
    check(rebatch_from_nccl, NULL, 6, REBATCH_E_DEVICE_LOST, "aborted");
}

Test(device_codes, the_callers_mistakes_are_not_tried_again)
{
    check(rebatch_from_cuda, NULL, 1, REBATCH_E_INVALID, "invalid value");
    check(rebatch_from_cuda, NULL, 701, REBATCH_E_INVALID, "registers");
    check(rebatch_from_cuda, NULL, 801, REBATCH_E_UNSUPPORTED, "not supported");
    check(rebatch_from_cuda, NULL, 100, REBATCH_E_NO_DEVICE, "no such device");
    check(rebatch_from_cublas, NULL, 7, REBATCH_E_INVALID, "invalid value");
    check(rebatch_from_cudnn, NULL, 2003, REBATCH_E_INVALID, "bad parameter");
    check(rebatch_from_cudnn, NULL, 3002, REBATCH_E_UNSUPPORTED, "not supported");
    check(rebatch_from_nccl, NULL, 5, REBATCH_E_INVALID, "usage");
}

Test(device_codes, an_unknown_code_is_an_error_of_the_device)
{
    check(rebatch_from_cuda, NULL, 12345, REBATCH_E_DEVICE, "CUDA answered 12345");
    check(rebatch_from_cublas, NULL, -1, REBATCH_E_DEVICE, "cuBLAS answered -1");
}

/* On a machine with a GPU this opens it; both are right. */
Test(device_codes, without_a_driver_there_is_no_cuda_device)
{
    rebatch_device *device;
    const rebatch_status status = rebatch_device_open_cuda(&device, NULL);
    if (status == REBATCH_OK) {
        cr_assert_not_null(device);
        rebatch_device_close(device);
        return;
    }
    cr_assert_eq(status, REBATCH_E_NO_DEVICE, "%s", rebatch_last_error());
    cr_assert_null(device);
    cr_assert(strstr(rebatch_last_error(), "no CUDA device"), "%s", rebatch_last_error());
}

Test(device_codes, a_device_that_is_no_gpu_has_no_ordinal)
{
    rebatch_device *host, *fault;
    int ordinal = 7;
    cr_assert_eq(rebatch_device_open_host(&host, REBATCH_UNLIMITED, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_device_open_fault(&fault, host, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_device_ordinal(&ordinal, host), REBATCH_E_UNSUPPORTED);
    cr_assert_eq(ordinal, -1);
    cr_assert(strstr(rebatch_last_error(), "the device is \"host\": expected an NVIDIA GPU"), "%s",
              rebatch_last_error());
    cr_assert_eq(rebatch_device_ordinal(&ordinal, fault), REBATCH_E_UNSUPPORTED);
    cr_assert_eq(rebatch_device_ordinal(&ordinal, NULL), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_device_ordinal(NULL, host), REBATCH_E_INVALID);
    rebatch_device_close(fault);
    rebatch_device_close(host);
}
