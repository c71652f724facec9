/* Owns which allocations of a period wait for other streams, what for, and where those streams get
 * marks.
 * Must not know how a period is learnt, or run.
 *
 * The calls are gone through twice, as they will come: after the first lap it is known what the
 * period before leaves behind. On the way stretches of memory are kept that were freed after other
 * streams had used them; an allocation waits for those that it lies in, and after it they are no
 * longer of interest. So each piece of memory is waited for once, and only where it is needed. */
#include "pool/pool.h"

/* Streams that one allocation waits for. */
#define MOST_WAITS 8
/* Waits of a period that there is space for at first. */
#define LEAST_WAITS 1024
/* Where so many stretches have to be moved, in all, a period is no cycle: it takes some 0.1 s. */
#define MOST_MOVED (UINT64_C(1) << 25)

/* Memory that was freed with call `at`, counted from the beginning of the first lap, and may be in
 * use on other streams still. */
struct stretch {
    char *from, *to;
    uint32_t at;
};

/* The latest use by its stream that an allocation waits for. */
struct latest {
    uint32_t use, at;
};

/* Stretches are sorted by their addresses, and do not overlap. */
struct walk {
    struct rbi_cycle *cycle;
    struct stretch *stretches;
    size_t count;
    uint64_t moved; /* within their array, so far */
    uint32_t now;
    struct latest waits[MOST_WAITS]; /* of the allocation that is looked at */
    size_t wait_count;
};

/* ---- stretches ---- */

static size_t first_behind(const struct walk *walk, const char *address)
{
    size_t low = 0, high = walk->count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (walk->stretches[middle].to <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool insert(struct walk *walk, size_t index, struct stretch stretch)
{
    walk->moved += walk->count - index;
    if (walk->count == RBI_CYCLE_PENDING_MOST || walk->moved > MOST_MOVED)
        return false;
    struct stretch *const place = &walk->stretches[index];
    memmove(place + 1, place, (walk->count++ - index) * sizeof *place);
    *place = stretch;
    return true;
}

static void discard(struct walk *walk, size_t first, size_t end)
{
    walk->moved += walk->count - end;
    memmove(&walk->stretches[first], &walk->stretches[end],
            (walk->count - end) * sizeof *walk->stretches);
    walk->count -= end - first;
}

/* Nothing is kept of [from, to) any more. */
static bool clear(struct walk *walk, char *from, char *to)
{
    const size_t first = first_behind(walk, from);
    size_t end = first;
    while (end < walk->count && walk->stretches[end].from < to)
        end++;
    if (first == end)
        return true;
    const struct stretch front = walk->stretches[first], back = walk->stretches[end - 1];
    discard(walk, first, end);
    if (back.to > to && !insert(walk, first, (struct stretch){to, back.to, back.at}))
        return false;
    return front.from >= from || insert(walk, first, (struct stretch){front.from, from, front.at});
}

/* ---- what an allocation waits for ---- */

static bool add_wait(struct walk *walk, uint32_t use, uint32_t at)
{
    const struct rbi_cycle_use *const uses = walk->cycle->uses;
    size_t i = 0;
    while (i < walk->wait_count && uses[walk->waits[i].use].stream != uses[use].stream)
        i++;
    if (i == MOST_WAITS)
        return false;
    if (i == walk->wait_count)
        walk->waits[walk->wait_count++] = (struct latest){use, at};
    else if (walk->waits[i].at < at)
        walk->waits[i] = (struct latest){use, at};
    return true;
}

static bool collect_waits(struct walk *walk, const char *from, const char *to)
{
    const struct rbi_cycle *const cycle = walk->cycle;
    walk->wait_count = 0;
    for (size_t i = first_behind(walk, from); i < walk->count && walk->stretches[i].from < to;
         i++) {
        const uint32_t at = walk->stretches[i].at;
        uint32_t use = (uint32_t)cycle->calls[at % cycle->noted].first_use;
        while (add_wait(walk, use, at) && !cycle->uses[use].last)
            use++;
        if (!cycle->uses[use].last)
            return false;
    }
    return true;
}

/* How much later than the free a mark may be made which is waited for so many calls after it. */
static uint32_t delay_of(const struct rbi_cycle *cycle, uint32_t calls)
{
    return calls > cycle->lead_calls ? calls - (uint32_t)cycle->lead_calls : 0;
}

/* So that there is space for one allocation's more. */
static bool prepare_waits(struct rbi_cycle *cycle)
{
    if (cycle->wait_count + MOST_WAITS <= cycle->wait_capacity)
        return true;
    const size_t capacity = rbi_max(2 * cycle->wait_capacity, (size_t)LEAST_WAITS);
    struct rbi_cycle_wait *const waits =
        rbi_heap_resize(cycle->waits, capacity, sizeof *cycle->waits);
    if (!waits)
        return false;
    cycle->waits = waits;
    cycle->wait_capacity = capacity;
    return true;
}

static bool note_waits(struct walk *walk, struct rbi_cycle_call *call)
{
    struct rbi_cycle *const cycle = walk->cycle;
    if (walk->wait_count == 0)
        return true;
    if (!prepare_waits(cycle))
        return false;
    call->units |= RBI_CYCLE_WAITS;
    call->of = (uint32_t)cycle->wait_count;
    for (size_t i = 0; i < walk->wait_count; i++) {
        const struct latest *const latest = &walk->waits[i];
        struct rbi_cycle_use *const use = &cycle->uses[latest->use];
        use->delay = rbi_min(use->delay, delay_of(cycle, walk->now - latest->at));
        cycle->waits[cycle->wait_count++] =
            (struct rbi_cycle_wait){latest->use, i + 1 == walk->wait_count};
    }
    return true;
}

/* ---- the walk ---- */

static char *end_of(const struct rbi_cycle_call *call)
{
    return call->address + (size_t)rbi_cycle_units(call) * REBATCH_POOL_UNIT_BYTES;
}

static bool pass(struct walk *walk, struct rbi_cycle_call *call, bool is_last_lap)
{
    if (call->units == RBI_CYCLE_FREE_USED) {
        const struct rbi_cycle_call *const from = &walk->cycle->calls[call->of];
        return insert(walk, first_behind(walk, from->address),
                      (struct stretch){from->address, end_of(from), walk->now});
    }
    if (!rbi_cycle_allocates(call))
        return true;
    if (is_last_lap &&
        (!collect_waits(walk, call->address, end_of(call)) || !note_waits(walk, call)))
        return false;
    return clear(walk, call->address, end_of(call));
}

static bool pass_twice(struct walk *walk)
{
    const struct rbi_cycle *const cycle = walk->cycle;
    for (int lap = 0; lap < 2; lap++)
        for (size_t i = 0; i < cycle->noted; i++, walk->now++)
            if (!pass(walk, &cycle->calls[i], lap == 1))
                return false;
    return true;
}

/* ---- marks ---- */

/* A mark may come later than the free that it is for, so that it serves others too: where streams
 * do not lag as late as when it is waited for. There are as few as can be: one is made only where
 * the next free that is waited for would be too late for what was freed since the last. */
static void plan_marks(struct rbi_cycle *cycle, const struct rbi_pool_stream *stream)
{
    struct rbi_cycle_use *latest = NULL;
    uint64_t due = UINT64_MAX;
    for (size_t i = 0; i < cycle->use_count; i++) {
        struct rbi_cycle_use *const use = &cycle->uses[i];
        if (use->stream != stream || use->delay == UINT32_MAX)
            continue;
        if (due < use->call) {
            latest->marks = true;
            due = UINT64_MAX;
        }
        latest = use;
        due = rbi_min(due, (uint64_t)use->call + use->delay);
    }
    if (latest)
        latest->marks = true;
}

bool rbi_cycle_plan_waits(const rebatch_pool *pool, struct rbi_cycle *cycle)
{
    if (cycle->use_count == 0)
        return true;
    struct walk walk = {.cycle = cycle,
                        .stretches =
                            rbi_heap_calloc(RBI_CYCLE_PENDING_MOST, sizeof(struct stretch))};
    const bool done = walk.stretches && pass_twice(&walk);
    rbi_heap_free(walk.stretches);
    for (const struct rbi_pool_stream *s = pool->first_stream; done && s; s = s->next)
        plan_marks(cycle, s);
    return done;
}
