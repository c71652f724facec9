/* Owns the tests of steps that thrash: the pool gives memory back and takes it again in every
 * micro-batch. On a device with virtual memory the pool mostly maps it elsewhere instead, so the
 * device is one without, but for the last tests. Must not know how the pool finds memory. */
#include <string.h>

#include <criterion/criterion.h>

#include "device/device.h"
#include "rebatch/rebatch.h"
#include "unit/lazy_device.h"

#define KIB(n) ((size_t)(n) << 10)
#define MIB(n) ((size_t)(n) << 20)

/* A micro-batch has first a block of 384 KiB a sample, then one of 448, and the limit has no room
 * for both. At its end somebody else has memory for a moment. */
#define LIMIT MIB(10)
#define ENOUGH MIB(20)
#define TAKEN KIB(3584)
struct thrasher {
    rebatch_device *device;
    rebatch *rb;
    rebatch_step_ops ops;
    rebatch_step_report report;
    size_t limit, narrow; /* the second for a moment, at the end of a micro-batch */
    uint64_t count;       /* of samples that ran */
    bool trims;           /* gives the cache back itself */
    size_t events;        /* THRASHING */
    rebatch_event event;
    char text[256];
};

static rebatch_status use(const rebatch_microbatch *mb, size_t bytes)
{
    void *block;
    const rebatch_status status = rebatch_pool_alloc(&block, mb->pool, bytes, mb->stream, 0);
    return status ? status : rebatch_pool_free(mb->pool, block);
}

static rebatch_status nothing(void *user)
{
    const struct thrasher *c = user;
    rebatch_mutating(c->rb);
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct thrasher *c = user;
    rebatch_status status = use(mb, mb->count * KIB(384));
    if (!status)
        status = use(mb, mb->count * KIB(448));
    if (!status)
        status = rebatch_pool_set_limit(mb->pool, c->narrow);
    if (!status)
        status = rebatch_pool_set_limit(mb->pool, c->limit);
    if (!status && c->trims)
        status = rebatch_pool_trim(mb->pool, 0, NULL);
    if (status)
        return status;
    rebatch_mutating(c->rb);
    c->count += mb->count;
    return REBATCH_OK;
}

static uint64_t three_each(size_t first, size_t count, void *user)
{
    (void)first;
    (void)user;
    return 3 * count;
}

static void collect(const rebatch_event *event, void *user)
{
    struct thrasher *c = user;
    if (event->kind != REBATCH_EVENT_THRASHING)
        return;
    c->events++;
    c->event = *event;
    rebatch_event_format(c->text, sizeof c->text, event);
}

static rebatch_options thrashing_options(void)
{
    rebatch_options o = REBATCH_OPTIONS_INIT;
    o.micro_start = 16;
    o.grow_after = 4;
    o.pool.limit_bytes = LIMIT;
    return o;
}

static void open_thrasher(struct thrasher *c, rebatch_options *options)
{
    memset(c, 0, sizeof *c);
    cr_assert_eq(rbi_device_open_dry(&c->device, MIB(64), KIB(64), false), REBATCH_OK);
    options->on_event = collect;
    options->on_event_user = c;
    c->limit = options->pool.limit_bytes;
    c->narrow = c->limit - TAKEN;
    cr_assert_eq(rebatch_open(&c->rb, c->device, options), REBATCH_OK, "%s", rebatch_last_error());
    c->ops = (rebatch_step_ops){.struct_size = sizeof c->ops,
                                .zero_grad = nothing,
                                .forward_backward = forward_backward,
                                .optimizer_step = nothing,
                                .flags = REBATCH_DECLARES_MUTATION};
}

static void run_step(struct thrasher *c, size_t batch)
{
    c->count = 0;
    c->events = 0;
    cr_assert_eq(rebatch_step(c->rb, &c->ops, batch, c, &c->report), REBATCH_OK, "%s",
                 rebatch_last_error());
    cr_assert_eq(c->count, batch);
    cr_assert_eq(c->report.ooms, 0);
}

static void close_thrasher(struct thrasher *c)
{
    rebatch_close(c->rb);
    rebatch_device_close(c->device);
}

Test(recover_thrashing, trimming_in_every_microbatch_shrinks_the_next_step)
{
    rebatch_options options = thrashing_options();
    struct thrasher c;
    open_thrasher(&c, &options);
    run_step(&c, 64);
    cr_assert_eq(c.report.microbatches, 4, "the step that thrashes is not cut anew");
    cr_assert_eq(c.report.thrashed, 4);
    cr_assert_eq(c.report.micro_after, 12);
    cr_assert_eq(c.events, 1);
    cr_assert_eq(c.event.micro_before, 16);
    cr_assert_eq(c.event.micro_after, 12);
    cr_assert_eq(c.event.level, REBATCH_LOG_WARN);
    cr_assert_str_eq(c.text,
                     "step 0: every micro-batch returns memory to the device and allocates it "
                     "again; micro-batch 16 -> 12");
    run_step(&c, 64);
    cr_assert_eq(c.report.micro_after, 12);
    cr_assert_eq(c.events, 0);
    cr_assert_leq(c.report.thrashed, 1, "its first may clear away what the larger size left");
    run_step(&c, 64);
    cr_assert_eq(c.report.thrashed, 0);
    close_thrasher(&c);
}

/* Growth comes after its wait; that it thrashes again counts as a growth that failed. */
Test(recover_thrashing, growth_does_not_undo_it_at_once_and_waits_longer_each_time)
{
    static const uint32_t waits[] = {4, 8, 16};
    rebatch_options options = thrashing_options();
    options.micro_largest = 16;
    struct thrasher c;
    open_thrasher(&c, &options);
    run_step(&c, 64);
    cr_assert_eq(c.events, 1);
    for (size_t i = 0; i < sizeof waits / sizeof *waits; i++) {
        for (uint32_t clean = 0; clean < waits[i]; clean++) {
            cr_assert_eq(rebatch_get_micro(c.rb, 64), 12, "wait %zu, step %u", i, clean);
            run_step(&c, 64);
            cr_assert_eq(c.events, 0);
        }
        cr_assert_eq(rebatch_get_micro(c.rb, 64), 16, "it grew after %u steps", waits[i]);
        run_step(&c, 64);
        cr_assert_eq(c.events, 1);
    }
    close_thrasher(&c);
}

Test(recover_thrashing, single_microbatches_thrash_when_two_steps_in_a_row_do)
{
    rebatch_options options = thrashing_options();
    struct thrasher c;
    open_thrasher(&c, &options);
    run_step(&c, 16);
    cr_assert_eq(c.report.thrashed, 1);
    cr_assert_eq(c.report.micro_after, 16);
    run_step(&c, 16);
    cr_assert_eq(c.events, 1);
    cr_assert_eq(c.report.micro_after, 12);
    close_thrasher(&c);
}

Test(recover_thrashing, the_limits_on_the_size_hold)
{
    rebatch_options options = thrashing_options();
    options.micro_multiple_of = 8;
    struct thrasher c;
    open_thrasher(&c, &options);
    run_step(&c, 64);
    cr_assert_eq(c.report.micro_after, 8);
    close_thrasher(&c);

    options = thrashing_options();
    options.micro_smallest = 16;
    open_thrasher(&c, &options);
    for (int i = 0; i < 4; i++) {
        run_step(&c, 64);
        cr_assert_eq(c.report.thrashed, 4);
        cr_assert_eq(c.events, 0, "there is nothing smaller");
        cr_assert_eq(c.report.micro_after, 16);
    }
    close_thrasher(&c);

    options = thrashing_options();
    options.on_oom = REBATCH_ON_OOM_STOP;
    options.growth = REBATCH_OFF;
    open_thrasher(&c, &options);
    run_step(&c, 64);
    cr_assert_eq(c.report.micro_after, 16, "the size was not to change");
    close_thrasher(&c);
}

Test(recover_thrashing, by_cost_it_is_the_budget_that_shrinks)
{
    rebatch_options options = thrashing_options();
    struct thrasher c;
    open_thrasher(&c, &options);
    c.ops.cost = three_each;
    run_step(&c, 64);
    cr_assert_eq(c.report.cost_before, 48);
    cr_assert_eq(c.report.cost_after, 36);
    cr_assert_eq(c.events, 1);
    run_step(&c, 64);
    cr_assert_eq(c.events, 0);
    cr_assert_eq(c.report.microbatches, 6);
    close_thrasher(&c);
}

/* The first growth goes to the cost of 22 samples, for which there is room in all; the 16 that run
 * thrash, and the next growth goes half as far. */
Test(recover_thrashing, by_cost_growth_goes_halfway_to_what_thrashed)
{
    rebatch_options options = thrashing_options();
    options.micro_start = 12;
    options.micro_largest = 16;
    struct thrasher c;
    open_thrasher(&c, &options);
    c.ops.cost = three_each;
    uint64_t before = 36, grown[2] = {0};
    for (int i = 0; i < 2;) {
        run_step(&c, 64);
        if (c.report.cost_after > before) {
            grown[i++] = c.report.cost_after;
            if (i == 2)
                cr_assert_eq(grown[1], before + (grown[0] - before) / 2, "%d after %d",
                             (int)grown[1], (int)grown[0]);
        }
        before = c.report.cost_after;
    }
    cr_assert_eq(grown[0], 68);
    close_thrasher(&c);
}

Test(recover_thrashing, with_room_for_both_it_does_not_thrash)
{
    rebatch_options options = thrashing_options();
    options.pool.limit_bytes = ENOUGH;
    struct thrasher c;
    open_thrasher(&c, &options);
    for (int i = 0; i < 4; i++) {
        run_step(&c, 64);
        cr_assert_eq(c.report.thrashed, 0);
    }
    close_thrasher(&c);
}

/* What it gave and takes again in each was not given for want of memory. */
Test(recover_thrashing, while_more_is_free_than_it_needs_it_does_not_thrash)
{
    rebatch_options options = thrashing_options();
    options.pool.limit_bytes = ENOUGH;
    options.growth = REBATCH_OFF;
    struct thrasher c;
    open_thrasher(&c, &options);
    c.narrow = LIMIT - TAKEN;
    for (int i = 0; i < 4; i++) {
        run_step(&c, 64);
        cr_assert_eq(c.report.thrashed, 0);
        cr_assert_eq(c.report.micro_after, 16);
        cr_assert_eq(c.events, 0);
    }
    rebatch_pool_stats stats;
    cr_assert_eq(rebatch_pool_get_stats(&stats, rebatch_get_pool(c.rb)), REBATCH_OK);
    cr_assert_geq(stats.device_frees, 16, "it gave some back in each");
    close_thrasher(&c);
}

/* It would trim smaller micro-batches as well. */
Test(recover_thrashing, a_callback_that_trims_itself_does_not_thrash)
{
    rebatch_options options = thrashing_options();
    options.pool.limit_bytes = ENOUGH;
    options.growth = REBATCH_OFF;
    struct thrasher c;
    open_thrasher(&c, &options);
    c.trims = true;
    for (int i = 0; i < 4; i++) {
        run_step(&c, 64);
        cr_assert_eq(c.report.thrashed, 0);
        cr_assert_eq(c.report.micro_after, 16);
    }
    close_thrasher(&c);
}

/* ---- on pages ---- */

/* A micro-batch has a block on the session's stream, frees it, and then one on another stream; the
 * limit has room for the pages of one of them, or both of a micro-batch of half the size. */
struct streams {
    rebatch_device *device;
    rebatch *rb;
    rebatch_stream own, side;
    size_t narrow_bytes;   /* the limit in between; 0: as it is */
    uint64_t remaps;       /* pages moved up to the end of the last micro-batch */
    uint64_t least_remaps; /* and from there to the end of the next, but for the first ever */
};

static uint64_t remaps_of(rebatch_pool *pool)
{
    rebatch_pool_stats stats;
    cr_assert_eq(rebatch_pool_get_stats(&stats, pool), REBATCH_OK);
    return stats.remaps;
}

static rebatch_status use_on(const rebatch_microbatch *mb, rebatch_stream stream, size_t bytes)
{
    void *block;
    const rebatch_status status = rebatch_pool_alloc(&block, mb->pool, bytes, stream, 0);
    if (!status)
        lazy_use(stream, block, bytes);
    return status ? status : rebatch_pool_free(mb->pool, block);
}

static rebatch_status on_two_streams(const rebatch_microbatch *mb, void *user)
{
    struct streams *s = user;
    rebatch_status status = use_on(mb, s->own, mb->count * KIB(384));
    if (!status && s->narrow_bytes) {
        status = rebatch_pool_set_limit(mb->pool, s->narrow_bytes);
        if (!status)
            status = rebatch_pool_set_limit(mb->pool, MIB(8));
    }
    if (!status)
        status = use_on(mb, s->side, mb->count * KIB(448));
    const uint64_t remaps = remaps_of(mb->pool), moved = remaps - s->remaps;
    if (s->remaps && moved < s->least_remaps)
        s->least_remaps = moved;
    s->remaps = remaps;
    if (!status)
        rebatch_mutating(s->rb);
    return status;
}

static rebatch_status nothing_on_streams(void *user)
{
    const struct streams *s = user;
    rebatch_mutating(s->rb);
    return REBATCH_OK;
}

static void open_streams(struct streams *s, size_t narrow_bytes)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    *s = (struct streams){.device = lazy_open(MIB(64), KIB(64), true)};
    cr_assert_eq(rebatch_stream_create(&s->own, s->device), REBATCH_OK);
    cr_assert_eq(rebatch_stream_create(&s->side, s->device), REBATCH_OK);
    s->narrow_bytes = narrow_bytes;
    options.micro_start = 16;
    options.growth = REBATCH_OFF;
    options.stream = s->own;
    options.pool.limit_bytes = MIB(8);
    cr_assert_eq(rebatch_open(&s->rb, s->device, &options), REBATCH_OK);
}

static rebatch_step_report step_on_streams(struct streams *s)
{
    static const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                         .zero_grad = nothing_on_streams,
                                         .forward_backward = on_two_streams,
                                         .optimizer_step = nothing_on_streams,
                                         .flags = REBATCH_DECLARES_MUTATION};
    rebatch_step_report report;
    s->least_remaps = UINT64_MAX;
    cr_assert_eq(rebatch_step(s->rb, &ops, 64, s, &report), REBATCH_OK, "%s", rebatch_last_error());
    cr_assert_eq(report.ooms, 0);
    return report;
}

static void close_streams(struct streams *s)
{
    rebatch_close(s->rb);
    rebatch_stream_destroy(s->device, s->own);
    rebatch_stream_destroy(s->device, s->side);
    lazy_close(s->device);
}

/* Pages go to and fro between the streams, but none to the device: fewer samples would move as
 * many in all. */
Test(recover_thrashing, pages_that_move_between_streams_are_no_thrashing)
{
    struct streams s;
    open_streams(&s, 0);
    for (int i = 0; i < 4; i++) {
        const rebatch_step_report report = step_on_streams(&s);
        cr_assert_eq(report.thrashed, 0);
        cr_assert_eq(report.micro_after, 16);
        cr_assert_neq(s.least_remaps, UINT64_MAX);
        cr_assert_geq(s.least_remaps, 7 * 16 / 4, "a quarter of what it needs, in each");
    }
    close_streams(&s);
}

/* The limit goes down and up in each, so that what is cached goes to the device and comes again.
 * They shrink until as much as one needs is free beside what it has. */
Test(recover_thrashing, pages_that_go_to_the_device_and_come_again_are)
{
    struct streams s;
    open_streams(&s, MIB(2));
    rebatch_step_report report = step_on_streams(&s);
    cr_assert_eq(report.thrashed, report.microbatches);
    cr_assert_eq(report.micro_after, 12);
    for (int i = 0; i < 8; i++)
        report = step_on_streams(&s);
    cr_assert_lt(report.thrashed, report.microbatches);
    cr_assert_leq(report.micro_after * KIB(448), MIB(4));
    close_streams(&s);
}
