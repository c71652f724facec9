/* The cases of bench-probe: models whose memory is a list of functions of the micro-batch, and the
 * devices and settings that they run with, drawn from a seed.
 * Must not know the probe. */
#ifndef BENCH_PROBE_CASES_H
#define BENCH_PROBE_CASES_H

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/device.h"
#include "rebatch/rebatch.h"

enum { ITEMS_MOST = 64, LOOPS_MOST = 2, TENSORS_MOST = 12, BATCH_MOST = 192 };

static inline uint64_t next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline size_t between(size_t low, size_t high, uint64_t *state)
{
    return low + (size_t)(next(state) % (high - low + 1));
}

static inline bool one_in(size_t n, uint64_t *state)
{
    return next(state) % n == 0;
}

/* ---- a model ---- */

/* HELD: till backward. SHORT: not even. LAZY: made once. LATE: made in backward. KEPT: till the
 * next micro-batch has made its own, as an output that is looked at afterwards. */
enum manner { HELD, SHORT, LAZY, LATE, KEPT };

struct item {
    size_t fixed, each, unit; /* fixed + each * count, rounded up to unit */
    size_t step;              /* count is rounded up to it before; 0: not */
    enum manner manner;
    bool is_aside; /* on the second stream */
};

/* One allocation for every `step` samples: of `bytes`, or of so much a sample, so that the last one
 * may be smaller. */
struct loop {
    size_t step, bytes, each;
    size_t after;   /* which item */
    bool is_held;   /* till backward; else freed before the loop ends */
    bool is_queued; /* freed in the order in which they were made, else the other way round */
};

struct model {
    struct item items[ITEMS_MOST];
    size_t item_count;
    struct loop loops[LOOPS_MOST];
    size_t loop_count;
    size_t tensor_bytes[TENSORS_MOST], tensor_count;
    size_t moments; /* blocks that the first update makes for each tensor, twice its size in all */
    bool is_queued; /* backward frees what was made first first */
    size_t outside_fixed,
        outside_each; /* taken from the device itself, and made larger when it must
                                           be */

    rebatch *rb;
    rebatch_device *device;
    rebatch_stream aside;
    void *once[ITEMS_MOST]; /* of LAZY and KEPT */
    void *parameters[TENSORS_MOST], *made[2 * TENSORS_MOST];
    void *outside;
    size_t outside_bytes;
};

static inline size_t round_to(size_t bytes, size_t unit)
{
    return unit ? (bytes + unit - 1) / unit * unit : bytes;
}

static inline size_t bytes_of(const struct item *item, size_t count)
{
    return round_to(item->fixed + item->each * round_to(count, item->step), item->unit);
}

static inline rebatch_status alloc(const struct model *model, void **out, size_t bytes,
                                   bool is_aside)
{
    return rebatch_pool_alloc(out, rebatch_get_pool(model->rb), bytes,
                              is_aside ? model->aside : NULL, 0);
}

static inline rebatch_status release(const struct model *model, void *block)
{
    return rebatch_pool_free(rebatch_get_pool(model->rb), block);
}

static inline rebatch_status make_once(const struct model *model, void **kept, size_t bytes)
{
    void *made;
    if (*kept)
        return REBATCH_OK;
    const rebatch_status status = alloc(model, &made, bytes, false);
    if (status == REBATCH_OK)
        *kept = made;
    return status;
}

static inline rebatch_status make_parameters(struct model *model)
{
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < model->tensor_count && !status; i++)
        status = make_once(model, &model->parameters[i], model->tensor_bytes[i]);
    return status;
}

static inline size_t moments_bytes(const struct model *model)
{
    size_t sum = 0;
    for (size_t i = 0; i < model->tensor_count && model->moments; i++)
        sum += model->moments *
               round_to(2 * model->tensor_bytes[i] / model->moments, REBATCH_POOL_UNIT_BYTES);
    return sum;
}

static inline rebatch_status zero_grad(void *user)
{
    struct model *model = user;
    rebatch_mutating(model->rb);
    return REBATCH_OK;
}

/* A library's workspace: it keeps the largest that it has needed. */
static inline rebatch_status take_outside(struct model *model, size_t count)
{
    const size_t page = rbi_device_page_bytes(model->device);
    const size_t bytes = round_to(model->outside_fixed + model->outside_each * count, page);
    if (bytes <= model->outside_bytes)
        return REBATCH_OK;
    void *made;
    const rebatch_status status = rbi_device_alloc(model->device, &made, bytes);
    if (status)
        return status;
    if (model->outside)
        (void)rbi_device_free(model->device, model->outside, model->outside_bytes);
    model->outside = made;
    model->outside_bytes = bytes;
    return REBATCH_OK;
}

struct pieces {
    void *blocks[BATCH_MOST];
    size_t count;
};

static inline rebatch_status end_loop(const struct model *model, const struct loop *loop,
                                      struct pieces *pieces)
{
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < pieces->count && !status; i++)
        status = release(model, pieces->blocks[loop->is_queued ? i : pieces->count - 1 - i]);
    pieces->count = 0;
    return status;
}

static inline rebatch_status begin_loop(const struct model *model, const struct loop *loop,
                                        struct pieces *pieces, size_t count)
{
    rebatch_status status = REBATCH_OK;
    for (size_t at = 0; at < count && !status; at += loop->step) {
        const size_t samples = count - at < loop->step ? count - at : loop->step;
        status = alloc(model, &pieces->blocks[pieces->count],
                       loop->bytes ? loop->bytes : loop->each * samples, false);
        pieces->count += !status;
    }
    return status || loop->is_held ? status : end_loop(model, loop, pieces);
}

/* What a micro-batch has in hand. */
struct work {
    void *blocks[ITEMS_MOST];
    struct pieces pieces[LOOPS_MOST];
    size_t late_bytes;
};

static inline rebatch_status forward(struct model *model, struct work *work, size_t count)
{
    rebatch_status status = take_outside(model, count);
    for (size_t i = 0; i < model->item_count && !status; i++) {
        const struct item *item = &model->items[i];
        const size_t bytes = bytes_of(item, count);
        if (item->manner == LATE)
            work->late_bytes += round_to(bytes, REBATCH_POOL_UNIT_BYTES);
        else if (item->manner == LAZY)
            status = make_once(model, &model->once[i], item->fixed);
        else
            status = alloc(model, &work->blocks[i], bytes, item->is_aside);
        if (!status && item->manner == SHORT) {
            status = release(model, work->blocks[i]);
            work->blocks[i] = NULL;
        }
        for (size_t k = 0; k < model->loop_count && !status; k++)
            if (i == model->loops[k].after)
                status = begin_loop(model, &model->loops[k], &work->pieces[k], count);
    }
    return status;
}

static inline rebatch_status backward(struct model *model, struct work *work, size_t count)
{
    rebatch_status status = REBATCH_OK;
    for (size_t n = 0; n < model->item_count && !status; n++) {
        const size_t i = model->is_queued ? n : model->item_count - 1 - n;
        const struct item *item = &model->items[i];
        void *block = work->blocks[i];
        if (item->manner == LATE)
            status = alloc(model, &block, bytes_of(item, count), item->is_aside);
        if (item->manner == KEPT) {
            block = model->once[i];
            model->once[i] = work->blocks[i];
        }
        if (!status)
            status = release(model, block);
    }
    for (size_t k = model->loop_count; k-- > 0 && !status;)
        status = end_loop(model, &model->loops[k], &work->pieces[k]);
    return status;
}

static inline rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct model *model = user;
    struct work work = {.late_bytes = 0};
    rebatch_status status = forward(model, &work, mb->count);
    if (!status)
        status = rebatch_reserve(model->rb, work.late_bytes);
    if (status)
        return status;
    rebatch_mutating(model->rb);
    return backward(model, &work, mb->count);
}

static inline rebatch_status optimizer_step(void *user)
{
    struct model *model = user;
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < model->moments * model->tensor_count && !status; i++)
        status = make_once(model, &model->made[i],
                           2 * model->tensor_bytes[i / model->moments] / model->moments);
    if (status == REBATCH_OK)
        rebatch_mutating(model->rb);
    return status;
}

static const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                     .zero_grad = zero_grad,
                                     .forward_backward = forward_backward,
                                     .optimizer_step = optimizer_step,
                                     .flags = REBATCH_DECLARES_MUTATION};

/* ---- a case ---- */

struct setup {
    struct model model;
    size_t batch, capacity_bytes, page_bytes, smallest, largest;
    bool is_plain;        /* the device has no virtual memory */
    bool is_after_a_step; /* the probe comes after a first step of one sample */
    rebatch_pool_options pool;
};

static inline void draw_items(struct model *model, uint64_t *state)
{
    static const size_t units[] = {1, 1, 1, 1, 256, 512, 4096, 65536};
    const size_t unit = units[next(state) % 8];
    static const enum manner manners[] = {HELD, HELD, HELD, HELD, SHORT, SHORT, LATE, LATE};
    model->item_count = between(3, ITEMS_MOST, state);
    for (size_t i = 0; i < model->item_count; i++) {
        struct item *item = &model->items[i];
        *item = (struct item){.unit = unit, .manner = manners[next(state) % 8]};
        item->each = between(1, (size_t)1 << between(8, 18, state), state);
        if (one_in(4, state))
            item->fixed = between(1, (size_t)1 << between(8, 21, state), state);
        if (one_in(6, state))
            item->each = 0;
        if (one_in(12, state)) {
            item->manner = LAZY;
            item->fixed = between(1, (size_t)1 << 21, state);
        }
    }
    model->tensor_count = 1;
    model->tensor_bytes[0] = between(1, (size_t)32 << 20, state);
    model->moments = one_in(2, state);
    if (one_in(20, state)) {
        model->loop_count = 1;
        model->loops[0] = (struct loop){.step = between(1, 4, state),
                                        .bytes = (size_t)300 << 10,
                                        .after = model->item_count - 1};
    }
}

/* As much larger as the pages are: those of a card are small beside what it has. */
static inline void scale(struct model *model, size_t factor)
{
    for (size_t i = 0; i < model->item_count; i++) {
        model->items[i].fixed *= factor;
        model->items[i].each *= factor;
        model->items[i].each += model->items[i].each ? model->items[i].each % 509 : 0;
    }
    for (size_t i = 0; i < model->tensor_count; i++)
        model->tensor_bytes[i] *= factor;
}

/* What a size needs, roughly: caps are drawn around it. */
static inline size_t need_of(const struct model *model, size_t count)
{
    size_t sum = moments_bytes(model) + model->outside_fixed + model->outside_each * count;
    for (size_t i = 0; i < model->tensor_count; i++)
        sum += model->tensor_bytes[i];
    for (size_t i = 0; i < model->item_count; i++)
        if (model->items[i].manner != SHORT)
            sum += bytes_of(&model->items[i], count) * (model->items[i].manner == KEPT ? 2 : 1);
    for (size_t k = 0; k < model->loop_count; k++) {
        const struct loop *loop = &model->loops[k];
        if (loop->is_held)
            sum += loop->bytes ? round_to(count, loop->step) / loop->step * loop->bytes
                               : loop->each * count;
    }
    return sum;
}

static inline void draw_capacity(struct setup *setup, uint64_t *state)
{
    const size_t aim = one_in(12, state) ? setup->batch * 2 : between(1, setup->batch, state);
    const size_t room = need_of(&setup->model, aim);
    size_t capacity = room + between(0, room / 8, state);
    if (one_in(80, state)) /* nothing fits */
        capacity = setup->model.tensor_bytes[0] * (setup->model.moments ? 2 : 1);
    setup->capacity_bytes = capacity + 2 * setup->page_bytes;
}

/* The cases that the probe was made with. */
static inline void draw_first(struct setup *setup, size_t number)
{
    uint64_t state = 20261120 + number;
    *setup = (struct setup){.pool = REBATCH_POOL_OPTIONS_INIT};
    draw_items(&setup->model, &state);
    setup->batch = between(8, BATCH_MOST, &state);
    setup->page_bytes = one_in(2, &state) ? (size_t)64 << 10 : (size_t)2 << 20;
    scale(&setup->model, setup->page_bytes >> 16);
    draw_capacity(setup, &state);
    switch (between(0, 5, &state)) {
    case 0:
        setup->pool.limit_bytes = setup->capacity_bytes;
        setup->capacity_bytes *= 2;
        break;
    case 1:
        setup->pool.limit_permille = 500;
        setup->capacity_bytes *= 2;
        break;
    case 2:
        setup->pool.headroom_bytes = between(1, (size_t)8 << 20, &state);
        setup->capacity_bytes += setup->pool.headroom_bytes;
        break;
    case 3:
        setup->pool.caching = one_in(3, &state) ? REBATCH_OFF : REBATCH_ON;
        break;
    default:
        break;
    }
}

/* ---- more of what there is ---- */

/* Sizes that are each rounded in their own way, samples padded to whole tiles, outputs that are
 * kept for a while, work on a second stream. */
static inline void draw_manners(struct model *model, uint64_t *state)
{
    static const size_t units[] = {1, 1, 1, 256, 768, 4096, 65536, 2097152};
    const bool is_ragged = one_in(4, state), is_tiled = one_in(8, state), keeps = one_in(10, state);
    const bool is_aside = one_in(8, state);
    const size_t step = (size_t)1 << between(1, 4, state);
    model->is_queued = one_in(3, state);
    for (size_t i = 0; i < model->item_count; i++) {
        struct item *item = &model->items[i];
        if (is_ragged)
            item->unit = units[next(state) % 8];
        if (is_tiled && one_in(4, state))
            item->step = step;
        if (keeps && item->manner == HELD && one_in(8, state))
            item->manner = KEPT;
        if (is_aside && item->manner != LAZY && one_in(4, state))
            item->is_aside = true;
    }
}

/* One allocation for every `step` samples, as code does that works through a batch in pieces. */
static inline void draw_loops(struct model *model, uint64_t *state)
{
    static const size_t steps[] = {1, 2, 3, 4, 4, 8, 8, 8, 16, 16, 32, 10};
    model->loop_count = one_in(8, state) ? between(1, LOOPS_MOST, state) : 0;
    for (size_t k = 0; k < model->loop_count; k++) {
        struct loop *loop = &model->loops[k];
        *loop = (struct loop){.step = steps[next(state) % 12],
                              .after = between(0, model->item_count - 1, state)};
        if (one_in(3, state))
            loop->each = between(1, (size_t)1 << between(8, 16, state), state);
        else
            loop->bytes = between(1, (size_t)1 << between(10, 20, state), state);
        loop->is_held = one_in(2, state);
        loop->is_queued = one_in(2, state);
    }
}

static inline void draw_tensors(struct model *model, uint64_t *state)
{
    size_t left = model->tensor_bytes[0];
    model->moments = model->moments ? between(1, 2, state) : 0;
    const size_t count = between(1, TENSORS_MOST, state);
    model->tensor_count = 0;
    while (model->tensor_count + 1 < count && left > 1) {
        const size_t part = between(1, left / 2 + 1, state);
        model->tensor_bytes[model->tensor_count++] = part;
        left -= part;
    }
    model->tensor_bytes[model->tensor_count++] = left;
}

static inline void draw_pool(struct setup *setup, uint64_t *state)
{
    rebatch_pool_options *pool = &setup->pool;
    const size_t needed = setup->capacity_bytes;
    if (one_in(4, state)) {
        setup->capacity_bytes += between(0, needed, state);
        if (one_in(2, state))
            pool->limit_bytes = needed;
        else
            pool->limit_permille =
                (uint32_t)(needed / (setup->capacity_bytes / 1000 + 1) % 1000 + 1);
    }
    if (one_in(4, state)) {
        pool->headroom_bytes = between(1, (size_t)8 << 20, state);
        setup->capacity_bytes += pool->headroom_bytes;
    }
    if (one_in(12, state))
        pool->caching = REBATCH_OFF;
    if (one_in(12, state))
        pool->rounding_divisions = (uint32_t)4 << between(0, 2, state);
    if (one_in(16, state))
        (void)between(18, 24, state); /* draws, so that the cases stay those of the figures */
    if (one_in(16, state))
        (void)between(500, 1000, state);
    if (one_in(16, state))
        (void)between(1, 4, state);
}

/* A case of the set that a seed names. */
static inline void draw(struct setup *setup, uint64_t seed, size_t number)
{
    static const size_t pages[] = {16384, 65536, 65536, 262144, 2097152, 2097152};
    uint64_t state = seed * 1000003 + number;
    (void)next(&state);
    struct model *model = &setup->model;
    *setup = (struct setup){.pool = REBATCH_POOL_OPTIONS_INIT};
    draw_items(model, &state);
    draw_manners(model, &state);
    draw_loops(model, &state);
    setup->batch = between(8, BATCH_MOST, &state);
    setup->page_bytes = pages[next(&state) % 6];
    setup->is_plain = one_in(12, &state);
    setup->is_after_a_step = one_in(4, &state);
    if (setup->page_bytes > 65536)
        scale(model, setup->page_bytes >> 16);
    draw_tensors(model, &state);
    if (one_in(6, &state))
        model->outside_fixed = between(1, (size_t)8 << 20, &state);
    if (one_in(12, &state))
        model->outside_each = between(1, (size_t)1 << 17, &state);
    draw_capacity(setup, &state);
    draw_pool(setup, &state);
    if (one_in(16, &state))
        setup->smallest = between(2, 4, &state);
    if (one_in(16, &state))
        setup->largest = between(4, setup->batch, &state);
}

#endif
