/* Holds what a period's allocations wait for against a naive model, which knows for each unit of
 * memory who used it last, and that each wait has a mark in time. Seeds 1 to 300. */
#include "unit/pool_help.h"

enum { UNITS = 64, CALLS = 200, STREAMS = 3, LIVE = 12 };

/* A period that is made up, on stream 0; the others use its blocks. */
struct period {
    struct rbi_cycle cycle;
    struct rbi_cycle_call calls[CALLS];
    struct rbi_cycle_use uses[CALLS];
    struct rbi_cycle_wait waits[CALLS * STREAMS];
    struct rbi_pool_stream streams[STREAMS];
    char memory[UNITS * REBATCH_POOL_UNIT_BYTES];
};

static struct rbi_cycle_call *add(struct period *p)
{
    cr_assert_lt(p->cycle.noted, CALLS);
    return &p->calls[p->cycle.noted++];
}

static bool overlaps(const struct rbi_cycle_call *call, const char *from, uint32_t units)
{
    return call->address < from + units * UNIT && from < call->address + call->units * UNIT;
}

/* Where nothing of what is in use lies; false: not there. */
static bool add_allocation(struct period *p, uint32_t at, uint32_t units, const uint32_t *live,
                           size_t count)
{
    char *const address = p->memory + at * UNIT;
    for (size_t i = 0; i < count; i++)
        if (overlaps(&p->calls[live[i]], address, units))
            return false;
    *add(p) = (struct rbi_cycle_call){.address = address, .units = units, .stream = &p->streams[0]};
    return true;
}

/* Of a block that none, one or both of the other streams used. */
static void add_free(struct period *p, uint32_t of, unsigned users)
{
    struct rbi_cycle_call *const call = add(p);
    const size_t first = p->cycle.use_count;
    *call = (struct rbi_cycle_call){.of = of, .stream = &p->streams[0], .first_use = first};
    for (unsigned stream = 1; stream < STREAMS; stream++)
        if (users >> (stream - 1) & 1)
            p->uses[p->cycle.use_count++] =
                (struct rbi_cycle_use){.stream = &p->streams[stream],
                                       .call = (uint32_t)p->cycle.noted - 1,
                                       .delay = UINT32_MAX};
    if (p->cycle.use_count == first)
        return;
    call->units = RBI_CYCLE_FREE_USED;
    p->uses[p->cycle.use_count - 1].last = true;
}

/* What is in use at the end was allocated for the next period: its free comes before it. */
static void draw_period(struct period *p, uint64_t seed)
{
    uint32_t live[LIVE];
    size_t count = 0;
    uint64_t random = seed;
    memset(p, 0, sizeof *p);
    p->cycle.calls = p->calls;
    p->cycle.uses = p->uses;
    p->cycle.waits = p->waits;
    p->cycle.use_capacity = sizeof p->uses / sizeof *p->uses;
    p->cycle.wait_capacity = sizeof p->waits / sizeof *p->waits;
    while (p->cycle.noted < CALLS - LIVE) {
        const uint32_t units = 1 + (uint32_t)(draw(&random) % 12);
        const uint32_t at = (uint32_t)(draw(&random) % (UNITS - units + 1));
        if (count < LIVE && draw(&random) % 2 && add_allocation(p, at, units, live, count)) {
            live[count++] = (uint32_t)p->cycle.noted - 1;
        } else if (count > 0) {
            const size_t which = draw(&random) % count;
            add_free(p, live[which], draw(&random) % 3 ? 0 : 1 + (unsigned)(draw(&random) % 3));
            live[which] = live[--count];
        }
    }
    while (count > 0)
        add_free(p, live[--count], 1 + (unsigned)(draw(&random) % 3));
}

/* The use of a unit by each stream that was last, since it was last given out; by its number and
 * one, and when that was. */
struct model {
    struct {
        size_t use, at;
    } last[UNITS][STREAMS];
};

static size_t first_unit(const struct period *p, const struct rbi_cycle_call *call)
{
    return (size_t)(call->address - p->memory) / UNIT;
}

static void model_free(struct model *m, const struct period *p, const struct rbi_cycle_call *call,
                       size_t now)
{
    const struct rbi_cycle_call *const from = &p->calls[call->of];
    const size_t first = first_unit(p, from);
    for (size_t unit = first; unit < first + rbi_cycle_units(from); unit++)
        for (size_t use = call->first_use;; use++) {
            const size_t stream = (size_t)(p->uses[use].stream - p->streams);
            m->last[unit][stream].use = use + 1;
            m->last[unit][stream].at = now;
            if (p->uses[use].last)
                break;
        }
}

/* The use of a stream that an allocation has to wait for, by its number and one; 0: none. */
static size_t model_wait(const struct model *m, const struct period *p,
                         const struct rbi_cycle_call *call, size_t stream)
{
    const size_t first = first_unit(p, call);
    size_t use = 0, at = 0;
    for (size_t unit = first; unit < first + rbi_cycle_units(call); unit++)
        if (m->last[unit][stream].use && m->last[unit][stream].at >= at) {
            use = m->last[unit][stream].use;
            at = m->last[unit][stream].at;
        }
    return use;
}

/* The same as it was planned. */
static size_t planned_wait(const struct period *p, const struct rbi_cycle_call *call, size_t stream)
{
    if (!(call->units & RBI_CYCLE_WAITS))
        return 0;
    for (size_t wait = call->of;; wait++) {
        if (p->uses[p->waits[wait].use].stream == &p->streams[stream])
            return p->waits[wait].use + 1;
        if (p->waits[wait].last)
            return 0;
    }
}

/* A mark of the stream stands after that free, and for the lead before `now`,
 * which is in the same period or in the next; where there are fewer in between, with the free. */
static void check_mark(const struct period *p, const struct rbi_cycle_use *use, size_t now)
{
    const size_t end = now > use->call ? now : now + p->cycle.noted;
    const size_t before = p->cycle.lead_calls;
    const size_t latest = end - use->call > before ? end - before : use->call;
    for (size_t i = 0; i < p->cycle.use_count; i++) {
        const struct rbi_cycle_use *const mark = &p->uses[i];
        if (mark->marks && mark->stream == use->stream && mark->call >= use->call &&
            mark->call <= latest)
            return;
    }
    cr_assert_fail("call %u has no mark up to %zu", (unsigned)use->call, latest);
}

/* How many waits there are. */
static size_t check_lap(struct model *m, const struct period *p, size_t lap)
{
    size_t waits = 0;
    for (size_t i = 0; i < p->cycle.noted; i++) {
        const struct rbi_cycle_call *const call = &p->calls[i];
        if (call->units == RBI_CYCLE_FREE_USED)
            model_free(m, p, call, lap * p->cycle.noted + i);
        if (!rbi_cycle_allocates(call))
            continue;
        for (size_t stream = 1; lap > 0 && stream < STREAMS; stream++) {
            const size_t use = model_wait(m, p, call, stream);
            cr_assert_eq(planned_wait(p, call, stream), use);
            if (use)
                check_mark(p, &p->uses[use - 1], i);
            waits += use != 0;
        }
        memset(m->last[first_unit(p, call)], 0, rbi_cycle_units(call) * sizeof m->last[0]);
    }
    return waits;
}

Test(pool_cycle_waits, each_allocation_waits_for_the_last_uses_of_its_memory)
{
    static struct period p;
    static struct model m;
    for (uint64_t seed = 1; seed <= 300; seed++) {
        draw_period(&p, seed);
        for (size_t stream = 0; stream < STREAMS; stream++)
            p.streams[stream].next = stream + 1 < STREAMS ? &p.streams[stream + 1] : NULL;
        p.cycle.lead_calls = seed % 3 * 20;
        const rebatch_pool pool = {.first_stream = &p.streams[0]};
        cr_assert(rbi_cycle_plan_waits(&pool, &p.cycle));
        memset(&m, 0, sizeof m);
        (void)check_lap(&m, &p, 0);
        const size_t waits = check_lap(&m, &p, 1);
        cr_assert_gt(waits, 0);
        cr_assert_eq(waits, p.cycle.wait_count);
    }
}
