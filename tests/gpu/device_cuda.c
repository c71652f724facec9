/* The CUDA device on a real GPU: what the host device showed, confirmed. Run with -j1. Contexts are
 * made inside the tests, each of which is a process of its own. */
#include <criterion/criterion.h>
#include <string.h>

#include "device/device.h"
#include "invariants/invariants.h"
#include "pool/pool.h"
#include "rebatch/rebatch.h"

#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)

#define ASSERT_OK(call)                                                                            \
    do {                                                                                           \
        const rebatch_status status_ = (call);                                                     \
        cr_assert_eq(status_, REBATCH_OK, "%s: %s: %s", #call, rebatch_status_name(status_),       \
                     rebatch_last_error());                                                        \
    } while (0)

static rebatch_device *open_gpu(void)
{
    rebatch_device *device;
    ASSERT_OK(rebatch_device_open_cuda(&device, NULL));
    return device;
}

static size_t free_bytes(rebatch_device *device)
{
    rebatch_memory_info memory;
    ASSERT_OK(rebatch_device_memory(device, &memory));
    return memory.free_bytes;
}

Test(device_cuda, it_opens_and_names_the_gpu)
{
    rebatch_device *device = open_gpu();
    rebatch_memory_info memory;
    ASSERT_OK(rebatch_device_memory(device, &memory));
    cr_assert(strstr(rebatch_device_name(device), "cuda:0 "), "%s", rebatch_device_name(device));
    cr_assert_gt(memory.total_bytes, GIB);
    cr_assert_leq(memory.free_bytes, memory.total_bytes);
    cr_assert_eq(memory.used_bytes, 0);
    int ordinal;
    ASSERT_OK(rebatch_device_ordinal(&ordinal, device));
    cr_assert_eq(ordinal, 0);
    cr_assert(rbi_is_power_of_two(rbi_device_page_bytes(device)));
    rebatch_device_close(device);
}

Test(device_cuda, an_ordinal_that_is_none_is_refused)
{
    rebatch_device *device;
    rebatch_cuda_options options = REBATCH_CUDA_OPTIONS_INIT;
    options.ordinal = 1000;
    cr_assert_eq(rebatch_device_open_cuda(&device, &options), REBATCH_E_NO_DEVICE);
    cr_assert(strstr(rebatch_last_error(), "ordinal is 1000"), "%s", rebatch_last_error());
    options.ordinal = -1;
    cr_assert_eq(rebatch_device_open_cuda(&device, &options), REBATCH_E_NO_DEVICE);
}

static void round_trip(rebatch_device *device, void *memory, size_t bytes, rebatch_stream stream)
{
    unsigned char *host = rbi_heap_calloc(2, bytes);
    for (size_t i = 0; i < bytes; i++)
        host[i] = (unsigned char)(i * 7 + 3);
    ASSERT_OK(rebatch_fill(device, memory, 0xa5, bytes, stream));
    ASSERT_OK(rebatch_copy(device, memory, host, bytes / 2, stream));
    ASSERT_OK(rebatch_copy(device, host + bytes, memory, bytes, stream));
    ASSERT_OK(rebatch_stream_synchronize(device, stream));
    cr_assert_arr_eq(host, host + bytes, bytes / 2);
    for (size_t i = bytes / 2; i < bytes; i++)
        cr_assert_eq(host[bytes + i], 0xa5);
    rbi_heap_free(host);
}

Test(device_cuda, memory_keeps_what_is_written)
{
    rebatch_device *device = open_gpu();
    rebatch_stream stream;
    void *memory;
    ASSERT_OK(rebatch_stream_create(&stream, device));
    ASSERT_OK(rbi_device_alloc(device, &memory, 4 * MIB));
    round_trip(device, memory, 4 * MIB, stream);
    round_trip(device, memory, 4 * MIB, NULL);
    ASSERT_OK(rbi_device_free(device, memory, 4 * MIB));
    rebatch_stream_destroy(device, stream);
    rebatch_device_close(device);
}

Test(device_cuda, a_physical_piece_can_be_mapped_at_another_place)
{
    rebatch_device *device = open_gpu();
    const size_t page = rbi_device_page_bytes(device);
    void *space;
    rbi_physical a, b;
    ASSERT_OK(rbi_device_reserve(device, &space, 4 * page));
    ASSERT_OK(rbi_device_create_physical(device, &a, page));
    ASSERT_OK(rbi_device_create_physical(device, &b, page));
    ASSERT_OK(rbi_device_map(device, space, page, a));
    ASSERT_OK(rbi_device_map(device, (char *)space + page, page, b));
    ASSERT_OK(rbi_device_set_access(device, space, 2 * page));
    round_trip(device, space, 2 * page, NULL);
    ASSERT_OK(rbi_device_unmap(device, space, page));
    ASSERT_OK(rbi_device_map(device, (char *)space + 2 * page, page, a));
    ASSERT_OK(rbi_device_set_access(device, (char *)space + 2 * page, page));
    round_trip(device, (char *)space + page, 2 * page, NULL);
    ASSERT_OK(rbi_device_unmap(device, (char *)space + page, page));
    ASSERT_OK(rbi_device_unmap(device, (char *)space + 2 * page, page));
    ASSERT_OK(rbi_device_release_physical(device, a, page));
    ASSERT_OK(rbi_device_release_physical(device, b, page));
    ASSERT_OK(rbi_device_unreserve(device, space, 4 * page));
    rebatch_memory_info memory;
    ASSERT_OK(rebatch_device_memory(device, &memory));
    cr_assert_eq(memory.used_bytes, 0);
    rebatch_device_close(device);
}

Test(device_cuda, pinned_memory_is_the_hosts_and_the_gpu_reaches_it)
{
    rebatch_device *device = open_gpu();
    rebatch_memory_info memory;
    void *pinned;
    ASSERT_OK(rebatch_pinned_alloc(&pinned, device, 4 * MIB));
    memset(pinned, 1, 4 * MIB);
    round_trip(device, pinned, 4 * MIB, NULL);
    cr_assert_eq(((unsigned char *)pinned)[MIB], (unsigned char)(MIB * 7 + 3));
    ASSERT_OK(rebatch_device_memory(device, &memory));
    cr_assert_eq(memory.used_bytes, 0);
    ASSERT_OK(rebatch_pinned_free(device, pinned, 4 * MIB));
    cr_assert_eq(rebatch_pinned_alloc(&pinned, device, (size_t)1 << 50), REBATCH_E_HOST_OOM);
    cr_assert_null(pinned);
    ASSERT_OK(rbi_device_take_last_error(device));
    rebatch_device_close(device);
}

/* A real answer of the driver, not one of our limits; and the device works on. */
Test(device_cuda, the_drivers_own_out_of_memory_is_an_oom_and_leaves_nothing_behind)
{
    rebatch_device *device = open_gpu();
    const size_t page = rbi_device_page_bytes(device);
    const size_t hog = (free_bytes(device) - 512 * MIB) / page * page;
    rbi_physical held, more;
    void *memory;
    ASSERT_OK(rbi_device_create_physical(device, &held, hog));
    cr_assert_eq(rbi_device_create_physical(device, &more, 4 * GIB), REBATCH_OOM);
    cr_assert_eq(rbi_device_alloc(device, &memory, 4 * GIB), REBATCH_OOM);
    cr_assert_null(memory);
    ASSERT_OK(rbi_device_take_last_error(device));
    ASSERT_OK(rbi_device_alloc(device, &memory, 4 * MIB));
    round_trip(device, memory, 4 * MIB, NULL);
    ASSERT_OK(rbi_device_free(device, memory, 4 * MIB));
    ASSERT_OK(rbi_device_release_physical(device, held, hog));
    rebatch_device_close(device);
}

Test(device_cuda, events_say_how_far_all_streams_are)
{
    rebatch_device *device = open_gpu();
    rebatch_stream a;
    rbi_event event;
    void *memory;
    bool done;
    ASSERT_OK(rebatch_stream_create(&a, device));
    ASSERT_OK(rbi_event_create(device, &event));
    ASSERT_OK(rbi_device_alloc(device, &memory, GIB));
    for (int i = 0; i < 50; i++)
        ASSERT_OK(rebatch_fill(device, memory, (uint8_t)i, GIB, a));
    ASSERT_OK(rbi_event_record(device, event));
    ASSERT_OK(rbi_event_query(device, event, &done));
    cr_assert_not(done, "50 GiB were filled in no time");
    ASSERT_OK(rbi_event_synchronize(device, event));
    ASSERT_OK(rbi_event_query(device, event, &done));
    cr_assert(done);
    for (int i = 0; i < 50; i++)
        ASSERT_OK(rebatch_fill(device, memory, (uint8_t)i, GIB, a));
    ASSERT_OK(rbi_event_record(device, event));
    ASSERT_OK(rbi_device_synchronize(device)); /* waits for every stream */
    ASSERT_OK(rbi_event_query(device, event, &done));
    cr_assert(done);
    rbi_event_destroy(device, event);
    ASSERT_OK(rbi_device_free(device, memory, GIB));
    rebatch_stream_destroy(device, a);
    rebatch_device_close(device);
}

/* ---- a step, with nothing but device memory in it ---- */

struct step {
    rebatch *rb;
    size_t sample_bytes;
    size_t counted, updates;
};

static rebatch_status zero_grad(void *user)
{
    ((struct step *)user)->counted = 0;
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct step *step = user;
    void *memory;
    const size_t bytes = mb->count * step->sample_bytes;
    rebatch_status status = rebatch_pool_alloc(&memory, mb->pool, bytes, mb->stream, 0);
    if (!status)
        status = rebatch_fill(rebatch_pool_device(mb->pool), memory, 1, bytes, mb->stream);
    if (status)
        return status;
    rebatch_mutating(step->rb);
    step->counted += mb->count;
    return rebatch_pool_free(mb->pool, memory);
}

static rebatch_status optimizer_step(void *user)
{
    struct step *step = user;
    rebatch_mutating(step->rb);
    step->updates++;
    return REBATCH_OK;
}

static void run_step(struct step *step, rebatch_step_report *report)
{
    const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                  .zero_grad = zero_grad,
                                  .forward_backward = forward_backward,
                                  .optimizer_step = optimizer_step,
                                  .flags = REBATCH_DECLARES_MUTATION};
    ASSERT_OK(rebatch_step(step->rb, &ops, 64, step, report));
    cr_assert_eq(step->counted, 64);
}

Test(device_cuda, a_step_recovers_from_the_drivers_out_of_memory)
{
    rebatch_device *device = open_gpu();
    const size_t page = rbi_device_page_bytes(device);
    const size_t hog = (free_bytes(device) - 3 * GIB) / page * page;
    rbi_physical held;
    ASSERT_OK(rbi_device_create_physical(device, &held, hog));
    struct step step = {.sample_bytes = 128 * MIB};
    rebatch_step_report report;
    ASSERT_OK(rebatch_open(&step.rb, device, NULL));
    run_step(&step, &report);
    cr_assert_eq(report.micro_before, 64);
    cr_assert_eq(report.micro_after, 16);
    cr_assert_eq(report.ooms, 2);
    run_step(&step, &report);
    cr_assert_eq(report.ooms, 0);
    rebatch_close(step.rb);
    ASSERT_OK(rbi_device_release_physical(device, held, hog));
    rebatch_device_close(device);
}

Test(device_cuda, a_step_recovers_from_a_limit)
{
    rebatch_device *device = open_gpu();
    struct step step = {.sample_bytes = 16 * MIB};
    rebatch_step_report report;
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.pool.limit_bytes = 300 * MIB;
    ASSERT_OK(rebatch_open(&step.rb, device, &options));
    run_step(&step, &report);
    cr_assert_eq(report.micro_after, 16);
    rebatch_pool_stats stats;
    ASSERT_OK(rebatch_pool_get_stats(&stats, rebatch_get_pool(step.rb)));
    cr_assert_leq(stats.reserved_peak_bytes, 300 * MIB);
    cr_assert(rbi_pool_is_valid(rebatch_get_pool(step.rb)), "%s", rebatch_last_error());
    rebatch_close(step.rb);
    rebatch_device_close(device);
}
