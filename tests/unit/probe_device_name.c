/* Owns the test of whose results a saved size is: a card's, whatever its number in the machine.
 * Must not know how results are kept. */
#include <criterion/criterion.h>
#include <string.h>

#include "base/base.h"
#include "device/device.h"
#include "rebatch/rebatch.h"
#include "unit/config_files.h"

TestSuite(probe_device_name, .init = config_enter, .fini = config_leave);

#define MIB(n) ((size_t)(n) << 20)

static rebatch_status nothing(void *user)
{
    rebatch_mutating(user);
    return REBATCH_OK;
}

static rebatch_status run_samples(const rebatch_microbatch *mb, void *user)
{
    void *block;
    const rebatch_status status =
        rebatch_pool_alloc(&block, mb->pool, mb->count * MIB(1), mb->stream, 0);
    if (status)
        return status;
    rebatch_mutating(user);
    return rebatch_pool_free(mb->pool, block);
}

/* A process's life on a device of that name. */
static rebatch_saved_size probe_on(const char *name)
{
    const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                  .zero_grad = nothing,
                                  .forward_backward = run_samples,
                                  .optimizer_step = nothing,
                                  .flags = REBATCH_DECLARES_MUTATION};
    rebatch_probe_options options = REBATCH_PROBE_OPTIONS_INIT;
    rebatch_probe_report report;
    rebatch_device *device;
    rebatch *rb;
    const int64_t live = rbi_heap_live();
    options.file = "results";
    options.key = "a model";
    cr_assert_eq(rebatch_device_open_host(&device, MIB(12), NULL), REBATCH_OK);
    cr_assert_lt(strlen(name), sizeof device->name);
    strcpy(device->name, name);
    cr_assert_eq(rebatch_open(&rb, device, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_probe(rb, &ops, 64, rb, &options, &report), REBATCH_OK);
    cr_assert_eq(report.size, 12);
    rebatch_close(rb);
    rebatch_device_close(device);
    cr_assert_eq(rbi_heap_live(), live, "host memory goes with the probe");
    return report.saved;
}

Test(probe_device_name, a_size_counts_for_cards_of_that_name_and_for_no_others)
{
    static const struct {
        const char *name;
        rebatch_saved_size saved;
    } cases[] = {
        {"cuda:0 NVIDIA H200", REBATCH_SAVED_ABSENT},
        {"cuda:0 NVIDIA H200", REBATCH_SAVED_HELD},
        {"cuda:3 NVIDIA H200", REBATCH_SAVED_HELD},
        {"cuda:12 NVIDIA H200", REBATCH_SAVED_HELD},
        {"cuda:0 NVIDIA H100", REBATCH_SAVED_ABSENT},
        {"host", REBATCH_SAVED_ABSENT},
        {"host:1", REBATCH_SAVED_ABSENT},
        {"host:2", REBATCH_SAVED_ABSENT},
        {"host:1", REBATCH_SAVED_HELD},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        cr_assert_eq(probe_on(cases[i].name), cases[i].saved, "case %zu: %s", i, cases[i].name);
}
