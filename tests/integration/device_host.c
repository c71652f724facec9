/* Owns the tests of the host device: its cap, its figures, and what it refuses.
 * Must not know more of the library than its public headers say. */
#include <unistd.h>

#include "rig.h"

#define PAGE_BYTES ((size_t)65536) /* the default */

static rebatch_memory_info memory_of(rebatch_device *device)
{
    rebatch_memory_info info;
    OK(rebatch_device_memory(device, &info));
    return info;
}

/* A pool that passes every call to the device: the public face of device memory. */
static rebatch_pool *open_pass_through(rebatch_device *device)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.caching = REBATCH_OFF;
    rebatch_pool *pool;
    OK(rebatch_pool_create(&pool, device, &options));
    return pool;
}

static void *allocate(rebatch_pool *pool, size_t pages)
{
    void *block;
    OK(rebatch_pool_alloc(&block, pool, pages * PAGE_BYTES, NULL, 0));
    memset(block, 1, pages * PAGE_BYTES);
    return block;
}

static void refuse(rebatch_pool *pool, size_t pages)
{
    void *block = pool;
    cr_assert_eq(rebatch_pool_alloc(&block, pool, pages * PAGE_BYTES, NULL, 0), REBATCH_OOM);
    cr_assert_null(block);
}

/* ---- the cap ---- */

Test(device_host, it_gives_what_the_cap_allows_and_not_a_byte_more)
{
    rebatch_device *device;
    OK(rebatch_device_open_host(&device, 8 * PAGE_BYTES, NULL));
    cr_assert_str_eq(rebatch_device_name(device), "host");
    rebatch_pool *pool = open_pass_through(device);
    void *a = allocate(pool, 5);
    rebatch_memory_info info = memory_of(device);
    cr_assert_eq(info.total_bytes, 8 * PAGE_BYTES);
    cr_assert_eq(info.used_bytes, 5 * PAGE_BYTES);
    cr_assert_eq(info.free_bytes, 3 * PAGE_BYTES);
    refuse(pool, 4);
    void *b = allocate(pool, 3);
    refuse(pool, 1);
    cr_assert_eq(memory_of(device).free_bytes, 0);
    OK(rebatch_pool_free(pool, a));
    cr_assert_eq(memory_of(device).used_bytes, 3 * PAGE_BYTES);
    a = allocate(pool, 5);
    OK(rebatch_pool_free(pool, a));
    OK(rebatch_pool_free(pool, b));
    rebatch_pool_destroy(pool);
    cr_assert_eq(memory_of(device).used_bytes, 0);
    rebatch_device_close(device);
}

Test(device_host, allocations_are_rounded_up_to_the_page)
{
    rebatch_device *device;
    OK(rebatch_device_open_host(&device, 8 * PAGE_BYTES, NULL));
    rebatch_pool *pool = open_pass_through(device);
    void *block;
    OK(rebatch_pool_alloc(&block, pool, 1, NULL, 0));
    cr_assert_eq(memory_of(device).used_bytes, PAGE_BYTES);
    rebatch_pool_destroy(pool);
    rebatch_device_close(device);

    rebatch_host_options options = REBATCH_HOST_OPTIONS_INIT;
    options.page_bytes = 4 * PAGE_BYTES;
    OK(rebatch_device_open_host(&device, 8 * PAGE_BYTES, &options));
    pool = open_pass_through(device);
    OK(rebatch_pool_alloc(&block, pool, 1, NULL, 0));
    cr_assert_eq(memory_of(device).used_bytes, 4 * PAGE_BYTES);
    rebatch_pool_destroy(pool);
    rebatch_device_close(device);
}

Test(device_host, a_cap_below_what_is_in_use_takes_nothing_back)
{
    rebatch_device *device;
    OK(rebatch_device_open_host(&device, 8 * PAGE_BYTES, NULL));
    rebatch_pool *pool = open_pass_through(device);
    unsigned char *a = allocate(pool, 3);
    void *b = allocate(pool, 3);
    OK(rebatch_device_set_capacity(device, 4 * PAGE_BYTES));
    rebatch_memory_info info = memory_of(device);
    cr_assert_eq(info.total_bytes, 4 * PAGE_BYTES);
    cr_assert_eq(info.used_bytes, 6 * PAGE_BYTES);
    cr_assert_eq(info.free_bytes, 0);
    for (size_t i = 0; i < 3 * PAGE_BYTES; i++)
        cr_assert_eq(a[i], 1);
    refuse(pool, 1);
    OK(rebatch_pool_free(pool, b));
    refuse(pool, 2);
    b = allocate(pool, 1);
    OK(rebatch_device_set_capacity(device, 9 * PAGE_BYTES));
    void *c = allocate(pool, 5);
    cr_assert_eq(memory_of(device).free_bytes, 0);
    OK(rebatch_pool_free(pool, a));
    OK(rebatch_pool_free(pool, b));
    OK(rebatch_pool_free(pool, c));
    rebatch_pool_destroy(pool);
    rebatch_device_close(device);
}

Test(device_host, without_a_cap_the_total_is_the_machines)
{
    rebatch_device *device;
    OK(rebatch_device_open_host(&device, REBATCH_UNLIMITED, NULL));
    const rebatch_memory_info info = memory_of(device);
    const size_t machine = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    cr_assert_eq(info.total_bytes, machine);
    cr_assert_leq(info.free_bytes, info.total_bytes);
    cr_assert_eq(info.used_bytes, 0);
    rebatch_pool *pool = open_pass_through(device);
    void *block = allocate(pool, 100);
    cr_assert_eq(memory_of(device).used_bytes, 100 * PAGE_BYTES);
    /* more than any machine's address space: refused by the machine, counted as nothing */
    void *none;
    cr_assert_eq(rebatch_pool_alloc(&none, pool, (size_t)1 << 60, NULL, 0), REBATCH_OOM);
    cr_assert_eq(memory_of(device).used_bytes, 100 * PAGE_BYTES);
    OK(rebatch_pool_free(pool, block));
    OK(rebatch_device_set_capacity(device, 2 * PAGE_BYTES));
    cr_assert_eq(memory_of(device).total_bytes, 2 * PAGE_BYTES);
    rebatch_pool_destroy(pool);
    rebatch_device_close(device);
}

Test(device_host, devices_have_caps_of_their_own)
{
    rebatch_device *a, *b;
    OK(rebatch_device_open_host(&a, 4 * PAGE_BYTES, NULL));
    OK(rebatch_device_open_host(&b, 4 * PAGE_BYTES, NULL));
    rebatch_pool *pool = open_pass_through(a);
    void *block = allocate(pool, 4);
    cr_assert_eq(memory_of(b).free_bytes, 4 * PAGE_BYTES);
    OK(rebatch_pool_free(pool, block));
    rebatch_pool_destroy(pool);
    rebatch_device_close(a);
    rebatch_device_close(b);
}

/* ---- bad input ---- */

Test(device_host, opening_refuses_what_cannot_be)
{
    rebatch_device *device = (rebatch_device *)&device;
    rebatch_clear_error();
    FAILS(rebatch_device_open_host(NULL, PAGE_BYTES, NULL), REBATCH_E_INVALID, "out");
    cr_assert_eq(rebatch_device_open_host(&device, 0, NULL), REBATCH_E_INVALID);
    cr_assert_null(device);
    SAYS("capacity_bytes is 0");
    FAILS(rebatch_device_open_host(&device, PAGE_BYTES - 1, NULL), REBATCH_E_INVALID, "65535");
    SAYS("65536");
    OK(rebatch_device_open_host(&device, PAGE_BYTES, NULL));
    rebatch_device_close(device);
}

Test(device_host, opening_refuses_bad_options)
{
    rebatch_device *device = (rebatch_device *)&device;
    rebatch_host_options options = REBATCH_HOST_OPTIONS_INIT;
    options.page_bytes = 3 * PAGE_BYTES;
    cr_assert_eq(rebatch_device_open_host(&device, 8 * PAGE_BYTES, &options), REBATCH_E_INVALID);
    cr_assert_null(device);
    SAYS("page_bytes");
    SAYS("196608");
    options.page_bytes = 16 * PAGE_BYTES; /* larger than the capacity */
    FAILS(rebatch_device_open_host(&device, 8 * PAGE_BYTES, &options), REBATCH_E_INVALID,
          "capacity_bytes");
    options = (rebatch_host_options)REBATCH_HOST_OPTIONS_INIT;
    options.struct_size = 0;
    FAILS(rebatch_device_open_host(&device, 8 * PAGE_BYTES, &options), REBATCH_E_INVALID,
          "struct_size");
    options.struct_size = sizeof(size_t); /* no version was without page_bytes */
    FAILS(rebatch_device_open_host(&device, 8 * PAGE_BYTES, &options), REBATCH_E_INVALID,
          "struct_size is 8");
}

Test(device_host, a_cap_of_nothing_is_refused_and_changes_nothing)
{
    rebatch_device *device;
    OK(rebatch_device_open_host(&device, 8 * PAGE_BYTES, NULL));
    FAILS(rebatch_device_set_capacity(device, 0), REBATCH_E_INVALID, "0");
    cr_assert_eq(rebatch_device_set_capacity(device, PAGE_BYTES - 1), REBATCH_E_INVALID);
    cr_assert_eq(memory_of(device).total_bytes, 8 * PAGE_BYTES);
    FAILS(rebatch_device_set_capacity(NULL, PAGE_BYTES), REBATCH_E_INVALID, "device");
    rebatch_device_close(device);
}

Test(device_host, null_is_refused_or_allowed_as_the_header_says)
{
    rebatch_device *device;
    rebatch_memory_info info = {1, 1, 1};
    rebatch_device_close(NULL);
    cr_assert_eq(rebatch_device_memory(NULL, &info), REBATCH_E_INVALID);
    cr_assert_eq(info.total_bytes, 0, "outputs are 0 on failure");
    OK(rebatch_device_open_host(&device, 8 * PAGE_BYTES, NULL));
    cr_assert_eq(rebatch_device_memory(device, NULL), REBATCH_E_INVALID);
    rebatch_device_close(device);
}
