/* Holds that a pool which took fresh memory because the device was behind, and could not say which
 * pages its work was done with, gives it back once the calls of its phases repeat. */
#include "unit/lazy_device.h"
#include "unit/pool_help.h"

enum { LAYERS = 16, GRADIENT_PAGES = 2, PHASES = 12 };

struct world {
    rebatch_device *device;
    rebatch_pool *pool;
    void *kept[LAYERS];
};

static struct world open_world(size_t pages)
{
    struct world w = {.device = lazy_open(pages * PAGE, PAGE, true)};
    cr_assert_eq(rebatch_pool_create(&w.pool, w.device, NULL), REBATCH_OK);
    return w;
}

static void give_kept(struct world *w)
{
    for (size_t i = 0; i < LAYERS; i++) {
        give(w->pool, w->kept[i]); /* NULL: nothing */
        w->kept[i] = NULL;
    }
}

static void close_world(struct world *w)
{
    give_kept(w);
    assert_valid(w->pool);
    rebatch_pool_destroy(w->pool);
    lazy_close(w->device);
}

static void *use_new(const struct world *w, size_t pages)
{
    void *block = take_on(w->pool, pages * PAGE, NULL);
    lazy_check_fresh(NULL, block, pages * PAGE);
    lazy_use(NULL, block, pages * PAGE);
    return block;
}

/* A forward and a backward pass: activations that live until their layer's turn comes again, larger
 * and larger blocks for a moment, and a gradient of each layer that stays until the next phase. */
static void run_phase(struct world *w)
{
    void *activations[LAYERS];
    give_kept(w);
    cr_assert_eq(rebatch_pool_mark(w->pool, 1), REBATCH_OK);
    for (size_t i = 0; i < LAYERS; i++) {
        void *moment = use_new(w, 16 + 4 * i);
        activations[i] = use_new(w, 8 + i % 3);
        give(w->pool, moment);
    }
    for (size_t i = LAYERS; i-- > 0;) {
        void *moment = use_new(w, 12 + 8 * (LAYERS - i));
        give(w->pool, activations[i]);
        w->kept[i] = use_new(w, GRADIENT_PAGES);
        give(w->pool, moment);
    }
    cr_assert_eq(rebatch_pool_mark(w->pool, 0), REBATCH_OK);
}

/* The gradients have memory of their own, beside the plan's. */
static uint64_t most_wanted(const rebatch_pool_stats *stats)
{
    return stats->live_peak_bytes + stats->live_peak_bytes / 16 + LAYERS * GRADIENT_PAGES * PAGE;
}

Test(pool_give_back, what_was_taken_while_the_device_was_behind_goes_back)
{
    struct world w = open_world(4096);
    run_phase(&w);
    rebatch_pool_stats stats = stats_of(w.pool);
    cr_assert_gt(stats.reserved_bytes, most_wanted(&stats), "the device is not behind");
    for (int i = 0; i < PHASES; i++)
        run_phase(&w);
    stats = stats_of(w.pool);
    cr_assert_leq(stats.reserved_bytes, most_wanted(&stats));
    for (int i = 0; i < PHASES; i++)
        run_phase(&w);
    const rebatch_pool_stats later = stats_of(w.pool);
    cr_assert_eq(later.reserved_bytes, stats.reserved_bytes);
    cr_assert_eq(later.remaps, stats.remaps);
    cr_assert_eq(later.device_allocations, stats.device_allocations);
    cr_assert_eq(later.trims, stats.trims);
    close_world(&w);
}
