/* Owns the tests of how far the micro-batch grows: what has no room, by the dry run of whole steps
 * or by a growth that failed, is followed by half as much. Must not know what a step does. */
#include <criterion/criterion.h>

#include "rebatch/rebatch.h"
#include "recover/recover.h"

#define CAPACITY_BYTES ((size_t)1 << 20)

/* Says of sizes up to `most` that there is room for them. */
struct dry_runs {
    size_t most;
    unsigned asked;
};

static uint64_t no_bytes(void *user, size_t size)
{
    (void)user;
    (void)size;
    return 0;
}

static bool has_room(void *user, rebatch *rb, size_t size)
{
    struct dry_runs *runs = user;
    (void)rb;
    runs->asked++;
    return size <= runs->most;
}

static uint64_t one_each(size_t first, size_t count, void *user)
{
    (void)first;
    (void)user;
    return count;
}

static const rebatch_step_ops ops_by_cost = {.struct_size = sizeof ops_by_cost, .cost = one_each};

static rebatch *open_at(rebatch_device *device, size_t multiple, size_t size, bool by_cost,
                        struct dry_runs *runs)
{
    rebatch *rb;
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.micro_multiple_of = multiple;
    cr_assert_eq(rebatch_open(&rb, device, &options), REBATCH_OK);
    rb->run.batch = 64;
    rb->run.ops = &ops_by_cost;
    rb->run.by_cost = by_cost;
    rb->sizes.micro = by_cost ? rb->sizes.micro : size;
    rb->sizes.budget = by_cost ? size : 0;
    rbi_need_set_model(rb, &(struct rbi_memory_model){.need = no_bytes,
                                                      .fits = runs ? has_room : NULL,
                                                      .user = runs,
                                                      .by_cost = by_cost});
    return rb;
}

static void close_at(rebatch *rb)
{
    rb->run.ops = NULL; /* no step runs */
    rebatch_close(rb);
}

/* From 64 samples down to `most`, for which there is room, by half of what is more than `size`. The
 * second time the largest that had no room is not asked about again. */
Test(recover_growth, what_has_no_room_is_followed_by_half_as_much)
{
    static const struct {
        bool by_cost;
        size_t multiple, size, most, larger;
        unsigned asked, asked_again;
    } cases[] = {
        {false, 1, 8, 64, 64, 1, 1}, /* at once */
        {false, 1, 8, 40, 36, 2, 1}, /* 64 36; 36 */
        {false, 1, 8, 20, 15, 4, 1}, /* 64 36 22 15; 15 */
        {false, 8, 8, 20, 16, 3, 1}, /* 64 32 16, multiples; 16 */
        {false, 8, 8, 8, 0, 3, 0},   /* 64 32 16, and nothing larger */
        {true, 1, 8, 20, 15, 4, 1},  /* a budget */
    };
    rebatch_device *device;
    cr_assert_eq(rebatch_device_open_host(&device, CAPACITY_BYTES, NULL), REBATCH_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct dry_runs runs = {.most = cases[i].most};
        rebatch *rb = open_at(device, cases[i].multiple, cases[i].size, cases[i].by_cost, &runs);
        const size_t larger = rbi_next_size(rb, RBI_GROWS, cases[i].size);
        cr_assert_eq(larger, cases[i].larger, "case %zu: %zu", i, larger);
        cr_assert_eq(runs.asked, cases[i].asked, "case %zu: %u asked", i, runs.asked);
        runs.asked = 0;
        const size_t again = rbi_next_size(rb, RBI_GROWS, cases[i].size);
        cr_assert_eq(again, cases[i].larger, "case %zu: then %zu", i, again);
        cr_assert_eq(runs.asked, cases[i].asked_again, "case %zu: then %u asked", i, runs.asked);
        close_at(rb);
    }
    rebatch_device_close(device);
}

/* A growth that failed says that a prediction did not hold with no more memory than then, and
 * nothing of sizes of the other kind, or below it. */
Test(recover_growth, a_growth_that_failed_is_followed_by_half_as_much)
{
    static const struct {
        bool by_cost, failed_by_cost;
        size_t size, failed;
        uint64_t failed_available;
        size_t larger;
    } cases[] = {
        {false, false, 8, 64, CAPACITY_BYTES, 36},
        {false, false, 8, 65, CAPACITY_BYTES, 64},
        {false, false, 8, 20, CAPACITY_BYTES, 14},
        {false, false, 8, 4, CAPACITY_BYTES, 0},
        {false, false, 8, 64, 0, 64},
        {false, true, 8, 64, CAPACITY_BYTES, 64},
        {true, true, 8, 64, CAPACITY_BYTES, 36},
        {true, false, 8, 64, CAPACITY_BYTES, 64},
        {false, false, 8, 0, CAPACITY_BYTES, 64},
    };
    rebatch_device *device;
    cr_assert_eq(rebatch_device_open_host(&device, CAPACITY_BYTES, NULL), REBATCH_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rebatch *rb = open_at(device, 1, cases[i].size, cases[i].by_cost, NULL);
        rb->sizes.growth.failed_size = cases[i].failed;
        rb->sizes.growth.failed_by_cost = cases[i].failed_by_cost;
        rb->sizes.growth.failed_available = cases[i].failed_available;
        const size_t larger = rbi_next_size(rb, RBI_GROWS, cases[i].size);
        cr_assert_eq(larger, cases[i].larger, "case %zu: %zu", i, larger);
        close_at(rb);
    }
    rebatch_device_close(device);
}

/* What is known of double the size counts at the level in force: a map has no level to leave. */
Test(recover_growth, double_the_size_grows_by_what_is_known_at_the_level_in_force)
{
    static const struct {
        unsigned learned_at;
        size_t larger;
    } cases[] = {{1, 0}, {0, 16}};
    rebatch_device *device;
    cr_assert_eq(rebatch_device_open_host(&device, CAPACITY_BYTES, NULL), REBATCH_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rebatch *rb = open_at(device, 1, 8, false, NULL);
        rbi_need_set_model(rb, NULL);
        rb->lighten = cases[i].learned_at;
        rbi_need_learn(rb, 16, 2 * CAPACITY_BYTES);
        rb->lighten = 1;
        const size_t larger = rbi_next_size(rb, RBI_GROWS, 8);
        cr_assert_eq(larger, cases[i].larger, "case %zu: %zu", i, larger);
        close_at(rb);
    }
    rebatch_device_close(device);
}

/* ---- when ---- */

static uint64_t none_above_eight(void *user, size_t size)
{
    (void)user;
    return size > 8 ? UINT64_MAX : 0;
}

/* A prediction that refuses is tried after grow_wait_max clean steps on top of the wait. */
Test(recover_growth, a_prediction_is_overruled_after_the_longest_wait)
{
    static const uint32_t waits[][2] = {{1, 1}, {3, 5}, {4, 4}}; /* grow_after, grow_wait_max */
    rebatch_device *device;
    cr_assert_eq(rebatch_device_open_host(&device, CAPACITY_BYTES, NULL), REBATCH_OK);
    for (size_t i = 0; i < sizeof waits / sizeof *waits; i++) {
        const uint32_t steps = waits[i][0] + waits[i][1];
        rebatch_options options = REBATCH_OPTIONS_INIT;
        rebatch *rb;
        options.micro_start = 8;
        options.grow_after = waits[i][0];
        options.grow_wait_max = waits[i][1];
        cr_assert_eq(rebatch_open(&rb, device, &options), REBATCH_OK);
        rb->run.batch = 64;
        rbi_need_set_model(rb, &(struct rbi_memory_model){.need = none_above_eight});
        for (uint32_t clean = 1; clean <= steps; clean++) {
            cr_assert_eq(rbi_micro_size(rb, 64), 8, "wait %zu: %u clean steps", i, clean - 1);
            rbi_growth_step_done(rb);
        }
        cr_assert_eq(rbi_micro_size(rb, 64), 16, "wait %zu: %u clean steps", i, steps);
        rebatch_close(rb);
    }
    rebatch_device_close(device);
}
