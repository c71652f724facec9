/* Owns what is drawn: sessions, models, and the trouble of each step.
 * Must not know how the model answers to it. */
#include <string.h>

#include "fault/fault_device.h"
#include "storm.h"

/* ---- limits, read from what step.h says of them ---- */

bool storm_is_allowed(const rebatch_options *o, size_t size)
{
    if (size == 0 || size < o->micro_smallest || (o->micro_largest && size > o->micro_largest) ||
        (o->micro_multiple_of && size % o->micro_multiple_of))
        return false;
    if (o->micro_allowed[0] == 0)
        return true;
    for (size_t i = 0; i < REBATCH_ALLOWED_SIZES && o->micro_allowed[i]; i++)
        if (o->micro_allowed[i] == size)
            return true;
    return false;
}

size_t storm_upper(const rebatch_options *o, size_t batch)
{
    for (size_t size = batch; size > 0; size--)
        if (storm_is_allowed(o, size))
            return size;
    return batch; /* all of it is a rest */
}

bool storm_can_cut(const rebatch_options *o, size_t batch, size_t upper)
{
    for (size_t size = 1; size <= upper; size++)
        if (storm_is_allowed(o, size) && (batch % size == 0 || storm_is_allowed(o, batch % size)))
            return true;
    return false;
}

size_t storm_most(const rebatch_options *o, size_t batch)
{
    size_t least = 1;
    while (least < batch && !storm_is_allowed(o, least))
        least++;
    return (batch + least - 1) / least;
}

static size_t any_allowed(const rebatch_options *o, uint64_t *dice)
{
    size_t sizes[2 * STORM_BATCH_MOST], count = 0;
    for (size_t size = 1; size <= 2 * STORM_BATCH_MOST; size++)
        if (storm_is_allowed(o, size))
            sizes[count++] = size;
    return count ? sizes[storm_below(dice, count)] : 0;
}

static void draw_limits(rebatch_options *o, uint64_t *dice)
{
    do {
        o->micro_smallest = storm_one_in(dice, 3) ? storm_between(dice, 1, 6) : 0;
        o->micro_largest = storm_one_in(dice, 3) ? storm_between(dice, 1, 40) : 0;
        o->micro_multiple_of = storm_one_in(dice, 4) ? storm_between(dice, 1, 5) : 0;
        memset(o->micro_allowed, 0, sizeof o->micro_allowed);
        if (storm_one_in(dice, 5)) {
            const size_t count = storm_between(dice, 1, 5);
            for (size_t i = 0; i < count; i++)
                o->micro_allowed[i] = storm_between(dice, 1, 24);
        }
    } while (any_allowed(o, dice) == 0);
    const size_t start = any_allowed(o, dice);
    o->micro_start = storm_one_in(dice, 2) ? start : 0;
    o->learn = o->micro_start == 0 && storm_one_in(dice, 3) ? REBATCH_ON : REBATCH_DEFAULT;
}

/* The smallest batch that rebatch_step() takes. */
static size_t least_batch(const rebatch_options *o)
{
    size_t least = o->micro_multiple_of ? o->micro_multiple_of : 1;
    size_t smallest = 0;
    for (size_t i = 0; i < REBATCH_ALLOWED_SIZES && o->micro_allowed[i]; i++)
        if (smallest == 0 || o->micro_allowed[i] < smallest)
            smallest = o->micro_allowed[i];
    return least > smallest ? least : smallest;
}

static rebatch_toggle toggle(uint64_t *dice, size_t off_one_in)
{
    return storm_one_in(dice, off_one_in) ? REBATCH_OFF : REBATCH_DEFAULT;
}

static void draw_options(rebatch_options *o, uint64_t *dice)
{
    *o = (rebatch_options)REBATCH_OPTIONS_INIT;
    draw_limits(o, dice);
    o->on_oom = storm_one_in(dice, 3)   ? REBATCH_ON_OOM_FIT
                : storm_one_in(dice, 2) ? REBATCH_ON_OOM_DEFAULT
                                        : REBATCH_ON_OOM_HALVE;
    o->oom_wait_ms = 1;
    o->admission = toggle(dice, 3);
    o->lighten = toggle(dice, 6);
    o->growth = toggle(dice, 8);
    o->grow_after = (uint32_t)storm_between(dice, 1, 3);
    o->grow_wait_max = o->grow_after + (uint32_t)storm_below(dice, 4);
    if (storm_one_in(dice, 4))
        o->max_attempts = (uint32_t)storm_between(dice, 2, 12); /* of 1, a refusal is the end */
    if (storm_one_in(dice, 6))
        o->max_ooms_in_row = (uint32_t)storm_between(dice, 1, 8);
    o->pool.caching = toggle(dice, 5);
    o->pool.replay = toggle(dice, 2); /* what opening takes most time for */
    if (storm_one_in(dice, 8))
        o->pool.rounding_divisions = 1u << storm_below(dice, 4);
    o->reclaim = toggle(dice, 6);
    o->log_level = REBATCH_LOG_DEBUG;
}

static void draw_model(struct storm_plan *p, uint64_t *dice)
{
    p->levels = (unsigned)storm_below(dice, STORM_LEVELS + 1);
    p->has_flag = !storm_one_in(dice, 3);
    p->declares = p->has_flag || !storm_one_in(dice, 3);
    p->reserves = p->declares && storm_one_in(dice, 2);
    p->has_cost = storm_one_in(dice, 3);
    p->cost_kind = (unsigned)storm_below(dice, 6);
    p->is_padded = storm_one_in(dice, 2);
    p->is_one_guard = storm_one_in(dice, 2);
    p->makes_gradients = storm_one_in(dice, 3);
    p->frees_first = storm_one_in(dice, 3);
    p->unpins = storm_one_in(dice, 2);
    p->pressures = storm_one_in(dice, 2) ? storm_between(dice, 1, 2) : 0;
    p->reclaims = p->options.reclaim != REBATCH_OFF;
    p->is_sloppy = p->reclaims && storm_one_in(dice, 2);
    p->base_bytes = storm_one_in(dice, 2) ? storm_below(dice, 8192) : 0;
    p->unit_bytes = storm_between(dice, 16, 768);
    p->late_bytes = storm_one_in(dice, 2) ? storm_below(dice, 16384) : 0;
    p->zero_bytes = storm_one_in(dice, 3) ? storm_below(dice, 8192) : 0;
    p->update_bytes = storm_one_in(dice, 2) ? storm_below(dice, 16384) : 0;
    p->spare_bytes = storm_between(dice, 100, 12000);
}

void storm_plan_draw(struct storm_plan *p, uint64_t *dice)
{
    memset(p, 0, sizeof *p);
    draw_options(&p->options, dice);
    draw_model(p, dice);
    p->page_bytes = storm_one_in(dice, 4) ? 16384 : 4096;
    const size_t least = least_batch(&p->options);
    p->batch_most = storm_between(dice, least, STORM_BATCH_MOST);
    p->batch_least = storm_one_in(dice, 3) ? p->batch_most : least;
    p->steps = (uint32_t)storm_between(dice, 2, 10);
    p->trouble = (unsigned)storm_below(dice, 3);
    p->probes = storm_one_in(dice, 6) ? (unsigned)storm_between(dice, 1, 5) : 0;
    p->checks = p->reclaims && storm_one_in(dice, 12) ? (unsigned)storm_between(dice, 2, 5) : 0;
    p->maps = storm_one_in(dice, 4) ? (unsigned)storm_between(dice, 1, 5) : 0;
    p->limits = storm_one_in(dice, 4) ? (unsigned)storm_between(dice, 1, 5) : 0;
    p->has_resize = p->reclaims && !p->has_cost && storm_one_in(dice, 2);
    p->guards_buffers = storm_one_in(dice, 2);
    p->has_neighbour = storm_one_in(dice, 4);
    p->nests = p->has_neighbour && storm_one_in(dice, 2);
    p->makes_before = p->has_resize && !p->guards_buffers && storm_one_in(dice, 3);
    p->overflow_bytes = storm_one_in(dice, 3) ? STORM_PLENTY_BYTES / 16 : 0;
    p->lowers = p->limits && storm_one_in(dice, 2);
    p->source = storm_one_in(dice, 3) ? (enum storm_source)storm_below(dice, STORM_SOURCES)
                                      : STORM_FROM_OPTIONS;
}

/* ---- a step ---- */

static void draw_fault(struct storm_fault *f, bool has_resize, uint64_t *dice)
{
    static const enum storm_callback callbacks[] = {STORM_FORWARD, STORM_FORWARD, STORM_FORWARD,
                                                    STORM_ZERO,    STORM_UPDATE,  STORM_LIGHTEN,
                                                    STORM_RESIZE,  STORM_RESIZE};
    memset(f, 0, sizeof *f);
    f->callback = callbacks[storm_below(dice, has_resize ? 8 : 6)];
    f->nth = (uint32_t)storm_between(dice, 1, f->callback == STORM_FORWARD ? 10 : 2);
    f->times = storm_one_in(dice, 12) ? UINT32_MAX : (uint32_t)storm_between(dice, 1, 3);
    f->more_than = storm_one_in(dice, 3) ? storm_below(dice, 20) : 0;
    f->is_late = storm_one_in(dice, 2);
    f->manner = (enum storm_manner)storm_below(dice, storm_one_in(dice, 6) ? 6 : 4);
}

/* Some device calls fail by chance, or one and those after it. */
static void arm_device(struct storm *s)
{
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    plan.calls = REBATCH_FAULT_ALLOC | REBATCH_FAULT_CREATE;
    /* A page that is not mapped again, on its way from the host, is lost with what is in it. */
    if (storm_one_in(&s->dice, 3) && !s->plan.overflow_bytes)
        plan.calls |= REBATCH_FAULT_MAP | REBATCH_FAULT_ACCESS | REBATCH_FAULT_RESERVE;
    plan.seed = storm_next(&s->dice);
    if (storm_one_in(&s->dice, 2)) {
        plan.permille = (uint32_t)storm_between(&s->dice, 1, 400);
    } else {
        plan.nth = storm_between(&s->dice, 1, 12);
        plan.times = storm_between(&s->dice, 1, 20);
    }
    if (rebatch_fault_arm(s->device, &plan) != REBATCH_OK)
        storm_fail(s, "a fault plan was refused: %s", rebatch_last_error());
    s->is_armed = true;
}

void storm_plan_step(struct storm *s)
{
    uint64_t *const dice = &s->dice;
    s->fault_count = 0;
    s->room_high = 0;
    if (s->is_calm)
        return;
    const bool is_short = s->plan.trouble != 1, has_faults = s->plan.trouble != 0;
    if (has_faults && !storm_one_in(dice, 3)) {
        s->fault_count = storm_between(dice, 1, 3);
        for (size_t i = 0; i < s->fault_count; i++)
            draw_fault(&s->faults[i], s->plan.has_resize, dice);
    }
    if (has_faults && storm_one_in(dice, 4))
        arm_device(s);
    if (is_short && storm_one_in(dice, 3)) { /* a co-tenant that moves while callbacks run */
        s->room_low = s->plan.page_bytes;
        s->room_high = storm_one_in(dice, 2) ? 1 << 16 : 1 << 19;
    }
}
