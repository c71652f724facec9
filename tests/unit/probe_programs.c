/* Owns the test that a model's calls are the calls of the program that it was made of, at every
 * size: for programs of blocks and of loops over a few samples, drawn by a seed.
 * Must not know forecasts. Seeds: 1 to PROGRAMS. */
#include <criterion/criterion.h>

#include "probe/probe.h"

enum {
    PROGRAMS = 400,
    PARTS = 6,
    SIZES = 90,
    CALLS = 4096,
    UNIT = 512,
    BACK_BYTES = 70001,
    SLOTS = 128
};

/* What a program does with the samples of a micro-batch, part after part. A block is fixed bytes
 * and `each` for a sample. A loop takes `step` samples a turn, and allocates for them in each turn;
 * what its turns have made is freed in the turn, after the loop from the first on, or from the
 * last, or there beside a block that each turn back takes for itself. */
enum part_kind { BLOCK, SHORT, LOOP_SHORT, LOOP_FIRST, LOOP_LAST, LOOP_BACK };

struct part {
    enum part_kind kind;
    size_t fixed, each, step;
    bool is_ragged; /* the last turn is as large as what is left */
};

struct program {
    struct part parts[PARTS];
    size_t count;
};

/* An allocation of so many bytes, or the free of the allocation of that number. */
struct call {
    bool is_free;
    size_t value;
};

struct calls {
    struct call at[CALLS];
    size_t count, blocks;
};

static size_t next(uint64_t *state, size_t most)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (size_t)(*state >> 33) % most;
}

static size_t add_alloc(struct calls *calls, size_t bytes)
{
    calls->at[calls->count++] = (struct call){false, bytes};
    return calls->blocks++;
}

static void add_free(struct calls *calls, size_t block)
{
    calls->at[calls->count++] = (struct call){true, block};
}

static void run_loop(struct calls *calls, const struct part *part, size_t samples)
{
    size_t made[SIZES], turns = 0;
    for (size_t at = 0; at < samples; at += part->step) {
        const size_t left = samples - at;
        const size_t own = part->is_ragged && left < part->step ? left : part->step;
        made[turns] = add_alloc(calls, part->each * own);
        if (part->kind == LOOP_SHORT)
            add_free(calls, made[turns]);
        turns++;
    }
    if (part->kind == LOOP_FIRST)
        for (size_t i = 0; i < turns; i++)
            add_free(calls, made[i]);
    while (part->kind >= LOOP_LAST && turns > 0) {
        const size_t work = part->kind == LOOP_BACK ? add_alloc(calls, BACK_BYTES) : 0;
        add_free(calls, made[--turns]);
        if (part->kind == LOOP_BACK)
            add_free(calls, work);
    }
}

static void run_program(struct calls *calls, const struct program *program, size_t samples)
{
    size_t made[PARTS], blocks = 0;
    *calls = (struct calls){.count = 0};
    for (size_t i = 0; i < program->count; i++) {
        const struct part *part = &program->parts[i];
        if (part->kind >= LOOP_SHORT) {
            run_loop(calls, part, samples);
            continue;
        }
        const size_t block = add_alloc(calls, part->fixed + part->each * samples);
        if (part->kind == SHORT)
            add_free(calls, block);
        else
            made[blocks++] = block;
    }
    while (blocks > 0)
        add_free(calls, made[--blocks]);
}

/* At most one loop: that two loops next to each other are two is not to be seen in their calls.
 * Odd sizes a sample, which nothing was rounded up to. */
static struct program draw_program(uint64_t seed)
{
    struct program program = {.count = 1 + next(&seed, PARTS)};
    const size_t loop = next(&seed, PARTS);
    for (size_t i = 0; i < program.count; i++) {
        struct part *part = &program.parts[i];
        part->kind = i == loop ? LOOP_SHORT + (enum part_kind)next(&seed, 4)
                               : (enum part_kind)next(&seed, 2);
        part->fixed = next(&seed, 3) ? 0 : 1001 + 2 * next(&seed, 50000);
        part->each = 3001 + 2 * next(&seed, 40000);
        part->step = 1 + next(&seed, 8);
        part->is_ragged = next(&seed, 2) == 0;
    }
    return program;
}

/* ---- the model of a program ---- */

struct made {
    rebatch_device *device;
    rebatch_pool *pool;
    struct rbi_trace traces[3];
    struct rbi_model model;
};

static void record(struct rbi_trace *trace, rebatch_pool *pool, const struct program *program,
                   size_t samples)
{
    static struct calls calls;
    static void *blocks[CALLS];
    size_t made = 0;
    run_program(&calls, program, samples);
    rbi_trace_begin(trace, pool, samples);
    for (size_t i = 0; i < calls.count; i++)
        if (calls.at[i].is_free)
            cr_assert_eq(rebatch_pool_free(pool, blocks[calls.at[i].value]), REBATCH_OK);
        else
            cr_assert_eq(rebatch_pool_alloc(&blocks[made++], pool, calls.at[i].value, NULL, 0),
                         REBATCH_OK);
    cr_assert_eq(rbi_trace_end(trace, pool, NULL), REBATCH_OK);
    trace->is_whole = true;
}

static void make(struct made *made, const struct program *program, size_t count,
                 const size_t *samples)
{
    struct rbi_traces traces = {.count = count, .latest = &made->traces[count - 1]};
    *made = (struct made){.device = NULL};
    cr_assert_eq(rebatch_device_open_dry(&made->device, REBATCH_UNLIMITED, 0), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&made->pool, made->device, NULL), REBATCH_OK);
    for (size_t t = 0; t < count; t++) {
        record(&made->traces[t], made->pool, program, samples[t]);
        traces.whole[t] = &made->traces[t];
    }
    cr_assert_eq(rbi_model_make(&made->model, &traces), REBATCH_OK, "%s", rebatch_last_error());
    made->model.pool = made->pool;
}

static void release(struct made *made)
{
    rbi_model_release(&made->model);
    for (size_t t = 0; t < 3; t++)
        rbi_trace_release(&made->traces[t]);
    rebatch_pool_destroy(made->pool);
    rebatch_device_close(made->device);
}

/* The calls that the model makes: each slot is a list, freed from its oldest or its newest. */
static void run_model(struct calls *calls, const struct rbi_model *model, size_t samples)
{
    static size_t lists[SLOTS][SIZES + 1];
    size_t oldest[SLOTS] = {0}, behind[SLOTS] = {0};
    struct rbi_cursor cursor = {.model = model, .count = samples};
    const struct rbi_model_event *event;
    *calls = (struct calls){.count = 0};
    cr_assert_leq(model->slots, SLOTS);
    while ((event = rbi_model_next(&cursor))) {
        const uint32_t slot = event->slot;
        cr_assert_lt(calls->count, CALLS);
        if (event->kind == RBI_TRACE_ALLOC) {
            cr_assert_lt(behind[slot], SIZES + 1);
            lists[slot][behind[slot]++] = add_alloc(calls, cursor.bytes);
            continue;
        }
        cr_assert_eq(event->kind, RBI_TRACE_FREE);
        cr_assert_lt(oldest[slot], behind[slot], "it frees what is there");
        add_free(calls,
                 event->is_queued ? lists[slot][oldest[slot]++] : lists[slot][--behind[slot]]);
    }
}

static bool is_same(const struct calls *a, const struct calls *b)
{
    bool same = a->count == b->count;
    for (size_t i = 0; i < a->count && same; i++)
        same = a->at[i].is_free == b->at[i].is_free && a->at[i].value == b->at[i].value;
    return same;
}

static size_t peak_of(const struct calls *calls)
{
    static size_t bytes[CALLS];
    size_t live = 0, peak = 0, made = 0;
    for (size_t i = 0; i < calls->count; i++) {
        if (calls->at[i].is_free) {
            live -= bytes[calls->at[i].value];
        } else {
            bytes[made] = (calls->at[i].value + UNIT - 1) / UNIT * UNIT;
            live += bytes[made++];
        }
        peak = live > peak ? live : peak;
    }
    return peak;
}

/* Every size from 1 on, and what lives at the most. */
static void assert_same(const struct made *made, const struct program *program, uint64_t seed)
{
    static struct calls own, modelled;
    for (size_t samples = 1; samples <= SIZES; samples++) {
        run_program(&own, program, samples);
        run_model(&modelled, &made->model, samples);
        cr_assert(is_same(&own, &modelled), "seed %d: %zu samples", (int)seed, samples);
        const size_t need = rbi_model_need(&made->model, samples);
        cr_assert_eq(need, peak_of(&own), "seed %d: %zu samples need %zu, not %zu", (int)seed,
                     samples, need, peak_of(&own));
    }
}

/* Of 1, 20 and 43 samples the step of a loop is known for certain. */
Test(probe_programs, the_calls_of_three_sizes_are_those_of_every_size)
{
    static const size_t samples[] = {1, 20, 43};
    size_t loops = 0;
    for (uint64_t seed = 1; seed <= PROGRAMS; seed++) {
        const struct program program = draw_program(seed * 7919);
        struct made made;
        make(&made, &program, 3, samples);
        cr_assert(made.model.has_events, "seed %d", (int)seed);
        assert_same(&made, &program, seed);
        loops += made.model.loop_count > 0;
        release(&made);
    }
    cr_assert_gt(loops, PROGRAMS / 3);
}
