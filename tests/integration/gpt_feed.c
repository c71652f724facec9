/* Owns the tests of the way of samples to the device: which tokens arrive, and when their memory is
 * written to. Must not know private headers of the library. */
#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

#include "fault/fault_device.h"
#include "gpt/error.h"
#include "gpt/feed.h"
#include "gpt_common.h"

enum { BATCH = 5, LENGTH = 24, SEED = 3, BYTES = BATCH * (LENGTH + 1) * sizeof(int32_t) };

static rebatch_device *host, *device;
static struct gpt_data *data;
static struct gpt_feed feed;

static void set_up(void)
{
    ASSERT_OK(rebatch_device_open_host(&host, REBATCH_UNLIMITED, NULL));
    ASSERT_OK(rebatch_device_open_fault(&device, host, NULL));
    data = open_text(LENGTH);
    feed = (struct gpt_feed){.data = data, .seed = SEED, .batch = BATCH, .length = LENGTH};
    ASSERT_OK(rebatch_pool_create(&feed.pool, device, NULL));
}

static void tear_down(void)
{
    rebatch_pool_stats stats;
    ASSERT_OK(rebatch_pool_get_stats(&stats, feed.pool));
    cr_assert_eq(stats.live_bytes, 0);
    rebatch_pool_destroy(feed.pool);
    gpt_data_close(data);
    rebatch_device_close(device);
    rebatch_device_close(host);
}

TestSuite(gpt_feed, .init = set_up, .fini = tear_down);

static void assert_tokens(const int32_t *got, uint64_t step)
{
    int32_t want[BATCH * (LENGTH + 1)];
    for (size_t i = 0; i < BATCH; i++)
        gpt_data_sample(want + i * (LENGTH + 1), data, GPT_TRAINING, SEED, step, i, LENGTH);
    cr_assert_arr_eq(got, want, sizeof want, "step %llu", (unsigned long long)step);
}

static uint64_t copies(void)
{
    uint64_t seen;
    ASSERT_OK(rebatch_fault_counts(device, &seen, NULL));
    return seen;
}

static void count_copies(void)
{
    ASSERT_OK(rebatch_fault_arm(device, &FAULTS(.calls = REBATCH_FAULT_COPY)));
}

Test(gpt_feed, each_step_has_its_samples, .description = "seed 3")
{
    const int32_t *tokens;
    ASSERT_OK(gpt_feed_open(&feed, 0));
    for (uint64_t step = 0; step < 6; step++)
        for (int microbatch = 0; microbatch < 3; microbatch++) {
            ASSERT_OK(gpt_feed_take(&tokens, &feed, step));
            assert_tokens(tokens, step);
            ASSERT_OK(gpt_feed_ahead(&feed, step));
            assert_tokens(tokens, step); /* what runs beside it writes elsewhere */
        }
    gpt_feed_close(&feed);
}

Test(gpt_feed, a_step_is_brought_once_and_ahead, .description = "seed 3")
{
    const int32_t *tokens;
    ASSERT_OK(gpt_feed_open(&feed, 0));
    count_copies();
    for (uint64_t step = 0; step < 6; step++)
        for (int microbatch = 0; microbatch < 3; microbatch++) {
            ASSERT_OK(gpt_feed_take(&tokens, &feed, step));
            cr_assert_eq(copies(), step + 1 + (microbatch > 0));
            ASSERT_OK(gpt_feed_ahead(&feed, step));
            cr_assert_eq(copies(), step + 2);
        }
    gpt_feed_close(&feed);
}

Test(gpt_feed, steps_in_any_order, .description = "seed 3")
{
    static const uint64_t steps[] = {7, 7, 3, 4, 4, 100, 99, 0};
    const int32_t *tokens;
    ASSERT_OK(gpt_feed_open(&feed, 0));
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        ASSERT_OK(gpt_feed_take(&tokens, &feed, steps[i]));
        assert_tokens(tokens, steps[i]);
        if (i % 2)
            ASSERT_OK(gpt_feed_ahead(&feed, steps[i]));
    }
    gpt_feed_close(&feed);
}

/* Each call that opening makes fails once; closing copes with what there is. */
Test(gpt_feed, what_fails_on_opening_is_said_and_given_back)
{
    static const struct {
        uint32_t calls;
        uint64_t nth;
        rebatch_status status;
    } faults[] = {{REBATCH_FAULT_STREAM, 1, REBATCH_OOM},
                  {REBATCH_FAULT_PIN, 1, REBATCH_E_HOST_OOM},
                  {REBATCH_FAULT_PIN, 2, REBATCH_E_HOST_OOM},
                  {REBATCH_FAULT_ALLOC | REBATCH_FAULT_CREATE, 1, REBATCH_OOM}};
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        struct gpt_feed other = feed;
        ASSERT_OK(rebatch_fault_arm(device, &FAULTS(.calls = faults[i].calls, .nth = faults[i].nth,
                                                    .times = REBATCH_FAULT_FOREVER)));
        cr_assert_eq(gpt_feed_open(&other, 0), faults[i].status, "fault %zu", i);
        gpt_feed_close(&other);
        ASSERT_OK(rebatch_pool_trim(feed.pool, 0, NULL));
    }
    ASSERT_OK(rebatch_fault_arm(device, NULL));
}

/* A copy that fails is tried again when the step is asked for again. */
Test(gpt_feed, a_copy_that_fails_is_made_again, .description = "seed 3")
{
    const int32_t *tokens;
    ASSERT_OK(gpt_feed_open(&feed, 0));
    ASSERT_OK(rebatch_fault_arm(
        device, &FAULTS(.calls = REBATCH_FAULT_COPY, .nth = 2, .status = REBATCH_E_DEVICE)));
    ASSERT_OK(gpt_feed_take(&tokens, &feed, 0));
    cr_assert_eq(gpt_feed_ahead(&feed, 0), REBATCH_E_DEVICE);
    ASSERT_OK(gpt_feed_take(&tokens, &feed, 1));
    assert_tokens(tokens, 1);
    gpt_feed_close(&feed);
}
