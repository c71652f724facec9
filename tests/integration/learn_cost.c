/* Owns the tests of rebatch_learn_cost(): budgets of micro-batches that the program cuts.
 * Must not know more of the library than its public headers say. */
#include "rebatch/probe.h"
#include "rig.h"

/* A device with so much memory, of which a micro-batch needs base_bytes, and bytes for each unit of
 * its cost. */
struct cutter {
    rebatch *rb;
    rebatch_device *device;
    uint64_t capacity, base_bytes, unit_bytes, needed, asked;
    size_t events;
    char text[256]; /* of the last event */
};

static void begin(rebatch_phase phase, size_t size, void *user)
{
    (void)phase;
    (void)size;
    (void)user;
}

static rebatch_status read_figures(rebatch_meter_reading *out, void *user)
{
    const struct cutter *c = user;
    *out = (rebatch_meter_reading){
        .live_bytes = MIB(7), .peak_bytes = MIB(7) + c->needed, .asked_bytes = c->asked};
    return REBATCH_OK;
}

static rebatch_status available(uint64_t *out, void *user)
{
    *out = ((const struct cutter *)user)->capacity;
    return REBATCH_OK;
}

static uint64_t release(void *user)
{
    (void)user;
    return 0;
}

static void note(const rebatch_event *event, void *user)
{
    struct cutter *c = user;
    c->events++;
    (void)rebatch_event_format(c->text, sizeof c->text, event);
}

static void cutter_open(struct cutter *c, uint64_t capacity)
{
    *c = (struct cutter){.capacity = capacity, .base_bytes = MIB(4), .unit_bytes = KIB(1)};
    const rebatch_meter meter = {.struct_size = sizeof meter,
                                 .begin = begin,
                                 .read = read_figures,
                                 .available = available,
                                 .release = release,
                                 .user = c};
    OK(rebatch_device_open_dry(&c->device, REBATCH_UNLIMITED, 0));
    OK(rebatch_open(&c->rb, c->device,
                    &OPTIONS(.reclaim = REBATCH_OFF, .meter = &meter, .learn = REBATCH_ON,
                             .on_event = note, .on_event_user = c, .log_level = REBATCH_LOG_WARN,
                             .grow_after = 4)));
}

CLOSE_BOTH(cutter)

/* Runs one of that cost: the budget after it. */
static size_t run(struct cutter *c, int key, size_t cost, size_t budget)
{
    const uint64_t needed = c->base_bytes + cost * c->unit_bytes;
    const bool fits = needed <= c->capacity;
    c->needed = fits ? needed : c->base_bytes;
    c->asked = fits ? 0 : needed - c->base_bytes;
    OK(rebatch_learn_cost(c->rb, (const void *)(intptr_t)key, cost, fits ? REBATCH_OK : REBATCH_OOM,
                          &budget));
    return budget;
}

static size_t run_until(struct cutter *c, int key, size_t budget, int times)
{
    for (int i = 0; i < times; i++)
        budget = run(c, key, budget, budget);
    return budget;
}

Test(learn_cost, finds_what_fits_without_an_oom)
{
    OPEN(cutter, c, MIB(64));
    cr_expect_eq(run_until(&c, 1, 100, 16), KIB(60));
    cr_expect_eq(c.events, 0);
}

Test(learn_cost, begins_small_where_one_point_does_not_show_the_base)
{
    OPEN(cutter, c, MIB(64));
    cr_expect_eq(run_until(&c, 1, KIB(40), 12), KIB(60), "more than half of what fits");
}

Test(learn_cost, an_oom_lowers_the_budget_once)
{
    OPEN(cutter, c, MIB(64));
    size_t budget = run_until(&c, 1, 100, 16);
    c.capacity = MIB(40);
    budget = run(&c, 1, budget, budget);
    cr_expect(budget <= KIB(36) && budget > KIB(30), "%zu", budget);
    cr_expect(strstr(c.text, "out of memory") && strstr(c.text, "cost 61440"), "%s", c.text);
    cr_expect(strstr(c.text, "budget 61440 -> "), "%s", c.text);
    cr_expect_eq(run(&c, 1, KIB(60), budget), budget, "one that was cut before");
    cr_expect_eq(run(&c, 1, KIB(50), budget), budget, "another");
}

Test(learn_cost, a_sampler_that_goes_beyond_the_budget_lowers_it_too)
{
    OPEN(cutter, c, MIB(64));
    size_t budget = run_until(&c, 1, 100, 16);
    c.capacity = MIB(62);
    size_t lowered = run(&c, 1, budget + 100, budget);
    cr_expect_lt(lowered, budget, "it has never fallen yet");
    cr_expect_eq(run(&c, 1, budget + 100, lowered), lowered, "it has just fallen");
    for (int i = 0; i < 4; i++)
        lowered = run(&c, 1, KIB(20), lowered);
    cr_expect_lt(run(&c, 1, budget + 100, lowered), lowered, "long ago");
}

Test(learn_cost, follows_what_is_available_down_and_up)
{
    OPEN(cutter, c, MIB(64));
    const size_t before = run_until(&c, 1, 100, 16);
    c.capacity = MIB(24);
    size_t budget = before;
    OK(rebatch_learn_cost(c.rb, (const void *)1, 0, REBATCH_OK, &budget));
    cr_expect_eq(budget, KIB(20));
    c.capacity = MIB(64);
    cr_expect_eq(run_until(&c, 1, budget, 20), before);
    cr_expect_eq(c.events, 0);
}

Test(learn_cost, what_does_not_fill_the_budget_does_not_raise_it)
{
    OPEN(cutter, c, MIB(64));
    size_t budget = run(&c, 1, 1000, 1000);
    cr_expect_eq(budget, 2000);
    for (int i = 0; i < 100; i++)
        budget = run(&c, 1, 1000, budget);
    cr_expect_eq(budget, 2000);
}

Test(learn_cost, each_key_has_its_own)
{
    OPEN(cutter, c, MIB(64));
    const size_t budget = run_until(&c, 1, 100, 16);
    c.unit_bytes = KIB(4);
    cr_expect_eq(run_until(&c, 2, 100, 16), budget / 4);
    cr_expect_eq(run(&c, 0, 10, 10), 20);
    c.unit_bytes = KIB(1);
    cr_expect_eq(run(&c, 1, budget, 1), budget);
}

Test(learn_cost, without_figures_an_oom_halves)
{
    OPEN(cutter, c, REBATCH_UNLIMITED);
    size_t budget = 1000;
    c.needed = c.asked = 0;
    OK(rebatch_learn_cost(c.rb, NULL, 1000, REBATCH_OOM, &budget));
    cr_expect_eq(budget, 500);
    OK(rebatch_learn_cost(c.rb, NULL, 1, REBATCH_OOM, &budget));
    cr_expect_geq(budget, 1);
}

Test(learn_cost, refuses_what_it_cannot_learn_from)
{
    OPEN(cutter, c, MIB(64));
    size_t budget = 0;
    FAILS(rebatch_learn_cost(c.rb, NULL, 1, REBATCH_OK, &budget), REBATCH_E_INVALID,
          "*budget is 0: expected at least 1");
    FAILS(rebatch_learn_cost(c.rb, NULL, 1, REBATCH_OK, NULL), REBATCH_E_INVALID,
          "budget is NULL: expected at least 1");
    FAILS(rebatch_learn_cost(NULL, NULL, 1, REBATCH_OK, &budget), REBATCH_E_INVALID,
          "rb is NULL: expected a session with options.meter");
    budget = 5;
    FAILS(rebatch_learn_cost(c.rb, NULL, 1, REBATCH_E_USER, &budget), REBATCH_E_INVALID,
          "result is 1000: expected REBATCH_OK or REBATCH_OOM");
    cr_expect_eq(budget, 5);
}
