/* Owns the choice of addresses for what no free block can hold: windows of free blocks and holes.
 * Must not know rungs or limits. */
#include "pool/pool.h"

/* How many holes are looked at. */
#define WINDOW_LOOKS 32

static size_t granules_for(const rebatch_pool *pool, size_t bytes)
{
    return (bytes + pool->granule_bytes - 1) >> (unsigned)__builtin_ctzll(pool->granule_bytes);
}

/* A free block that `stream` may have at once. */
static bool is_usable(const struct rbi_block *block, const struct rbi_pool_stream *stream)
{
    return block && block->state == RBI_BLOCK_FREE &&
           (block->stream == stream || block->freed_at <= block->stream->done);
}

/* A hole with what is free before and behind it. The request begins or ends where that uses more of
 * the parts of granules there. */
static bool open_around(struct rbi_window *window, const rebatch_pool *pool, struct rbi_block *hole,
                        size_t bytes, const struct rbi_pool_stream *stream, size_t *spare_bytes)
{
    struct rbi_block *const left = is_usable(hole->before, stream) ? hole->before : NULL;
    struct rbi_block *const right = is_usable(hole->after, stream) ? hole->after : NULL;
    const size_t lead = left ? left->bytes : 0;
    const size_t trail = right ? right->bytes : 0;
    const size_t all = lead + hole->bytes + trail;
    if (all < bytes || lead >= bytes || trail >= bytes)
        return false;
    const bool at_end = granules_for(pool, bytes - trail) < granules_for(pool, bytes - lead);
    const size_t beside = at_end ? trail : lead;
    const bool whole = beside + hole->bytes < bytes;
    struct rbi_block *const near = at_end ? right : left ? left : hole;
    struct rbi_block *const far = !whole ? hole : at_end ? left : right;
    *spare_bytes = all - bytes;
    *window = (struct rbi_window){at_end ? far : near, at_end ? near : far, bytes, 0, at_end};
    window->granules = granules_for(pool, rbi_min(hole->bytes, bytes - beside));
    return true;
}

bool rbi_window_find(struct rbi_window *window, rebatch_pool *pool, size_t bytes,
                     struct rbi_pool_stream *stream)
{
    /* Where a free block was and its granules were taken, parts of granules are left at both ends:
     * with them the place is as large as it was. */
    const size_t step = pool->granule_bytes;
    const size_t least = bytes > 3 * step ? bytes - 2 * step : step;
    struct rbi_block *hole = rbi_pool_first_free(pool->space, least);
    struct rbi_window found;
    size_t fewest = SIZE_MAX, spare_bytes;
    const bool zones = rbi_pool_zones(pool) != 0;
    const bool small = rbi_is_small(bytes, step);
    for (unsigned looks = 0; hole && (looks < WINDOW_LOOKS || fewest == SIZE_MAX) && fewest > 0;
         hole = rbi_pool_next_free(hole), looks++) {
        if ((zones && hole->range->small != small) ||
            !open_around(&found, pool, hole, bytes, stream, &spare_bytes) || spare_bytes >= fewest)
            continue;
        fewest = spare_bytes;
        *window = found;
    }
    return fewest != SIZE_MAX;
}

/* ---- the best of all ---- */

/* Free blocks and holes, one behind the other. Its wholly free granules count like any others,
 * mapped or not; what it has besides are the free parts of granules at its ends.
 *   bytes == lead + whole * granule + trail */
struct run {
    struct rbi_block *first, *last;
    size_t bytes, lead, whole, trail;
};

static bool is_in_run(const struct rbi_block *block)
{
    return block->state == RBI_BLOCK_FREE || block->state == RBI_BLOCK_HOLE;
}

/* The run that begins at `block` or behind it; false when there is none in the range. */
static bool next_run(struct run *run, const rebatch_pool *pool, struct rbi_block *block)
{
    while (block && !is_in_run(block))
        block = block->after;
    if (!block)
        return false;
    *run = (struct run){block, block, 0, 0, 0, 0};
    for (; block && is_in_run(block); block = block->after) {
        run->last = block;
        run->bytes += block->bytes;
    }
    const struct rbi_range *range = run->first->range;
    const size_t offset = (size_t)(run->first->address - range->address);
    run->lead = rbi_min(-offset & (pool->granule_bytes - 1), run->bytes);
    run->whole = (run->bytes - run->lead) / pool->granule_bytes;
    run->trail = run->bytes - run->lead - run->whole * pool->granule_bytes;
    return true;
}

/* Whole granules that `bytes` at the better end of the run take. */
static size_t granules_taken(const rebatch_pool *pool, const struct run *run, size_t bytes)
{
    const size_t beside = rbi_max(run->lead, run->trail);
    return bytes <= beside ? 0 : rbi_min(granules_for(pool, bytes - beside), run->whole);
}

/* Wholly free granules that are there, mapped or spare. */
static size_t count_supply(const rebatch_pool *pool)
{
    size_t supply = pool->spare_count;
    char *first;
    for (const struct rbi_range *r = pool->first_range; r; r = r->next)
        for (const struct rbi_block *b = r->first; b; b = b->after)
            if (b->state == RBI_BLOCK_FREE)
                supply += rbi_granules_within(pool, b, &first);
    return supply;
}

/* Fills in a window at the better end of a run. */
static void open_window(struct rbi_window *window, const rebatch_pool *pool, const struct run *run,
                        size_t bytes)
{
    const bool at_end = run->trail > run->lead;
    struct rbi_block *b = at_end ? run->last : run->first;
    *window = (struct rbi_window){b, b, bytes, 0, at_end};
    for (size_t left = bytes;; b = at_end ? b->before : b->after) {
        const size_t part = rbi_min(left, b->bytes);
        if (b->state == RBI_BLOCK_HOLE)
            window->granules += granules_for(pool, part);
        *(at_end ? &window->first : &window->last) = b;
        left -= part;
        if (left == 0)
            return;
    }
}

bool rbi_window_find_best(struct rbi_window *window, const rebatch_pool *pool, size_t bytes,
                          size_t room)
{
    const size_t supply = count_supply(pool) + room;
    struct run run, best = {NULL, NULL, 0, 0, 0, 0};
    size_t fewest = SIZE_MAX;
    for (const struct rbi_range *r = pool->first_range; r; r = r->next) {
        for (struct rbi_block *b = r->first; next_run(&run, pool, b); b = run.last->after) {
            const size_t taken = granules_taken(pool, &run, bytes);
            if (run.bytes >= bytes && taken < fewest) {
                fewest = taken;
                best = run;
            }
        }
    }
    if (fewest > supply)
        return false;
    open_window(window, pool, &best, bytes);
    return true;
}

uint64_t rbi_window_most(const rebatch_pool *pool, size_t room)
{
    const size_t supply = count_supply(pool) + room;
    uint64_t most = (uint64_t)supply * pool->granule_bytes; /* in addresses yet to be reserved */
    struct run run;
    for (const struct rbi_range *r = pool->first_range; r; r = r->next)
        for (struct rbi_block *b = r->first; next_run(&run, pool, b); b = run.last->after)
            most = rbi_max(most, run.whole <= supply
                                     ? run.bytes
                                     : rbi_max(run.lead, run.trail) + supply * pool->granule_bytes);
    return most;
}

/* ---- taking it ---- */

/* Keeps of a block in no list the part of `bytes` at one end. */
static struct rbi_block *cut(rebatch_pool *pool, struct rbi_block *block, size_t bytes, bool at_end)
{
    if (bytes >= block->bytes)
        return block;
    struct rbi_block *rest = rbi_pool_split(pool, block, at_end ? block->bytes - bytes : bytes);
    rbi_pool_bin_add(at_end ? block : rest);
    return at_end ? rest : block;
}

void rbi_window_hold(rebatch_pool *pool, struct rbi_window *window)
{
    const bool at_end = window->at_end;
    struct rbi_block *const far = at_end ? window->first : window->last;
    const bool single = window->first == window->last;
    size_t left = window->bytes;
    for (struct rbi_block *b = at_end ? window->last : window->first;;) {
        rbi_pool_bin_remove(b);
        const bool last = b == far;
        if (last)
            b = cut(pool, b,
                    b->state == RBI_BLOCK_HOLE ? granules_for(pool, left) * pool->granule_bytes
                                               : left,
                    at_end);
        b->state = RBI_BLOCK_HELD;
        left -= rbi_min(left, b->bytes);
        if (last) {
            *(at_end ? &window->first : &window->last) = b;
            if (single)
                window->first = window->last = b;
            return;
        }
        b = at_end ? b->before : b->after;
    }
}

void rbi_window_drop(rebatch_pool *pool, struct rbi_window *window)
{
    /* One that was put back may be part of its neighbour: the next is named before. */
    struct rbi_block *const end = window->last->after;
    for (struct rbi_block *b = window->first, *next; b != end; b = next) {
        next = b->after;
        if (next == end && b->state == RBI_BLOCK_HELD) {
            (void)rbi_pool_put_block(pool, b);
            return;
        }
        if (b->state == RBI_BLOCK_HELD)
            (void)rbi_pool_put_block(pool, b);
    }
}

rebatch_status rbi_window_map(struct rbi_block **out, rebatch_pool *pool, struct rbi_window *window,
                              struct rbi_pool_stream *stream)
{
    *out = NULL;
    struct rbi_block *const end = window->last->after;
    for (struct rbi_block *b = window->first; b != end; b = b->after) {
        if (b->stream != pool->space)
            continue;
        const rebatch_status status = rbi_granules_map(pool, b);
        if (status != REBATCH_OK) {
            rbi_window_drop(pool, window);
            return status;
        }
        rbi_pool_give_to(b, stream);
    }
    struct rbi_block *first = window->first;
    rbi_pool_give_to(first, stream);
    while (first->after != end) {
        rbi_pool_give_to(first->after, stream);
        rbi_pool_join(pool, first);
    }
    *out = rbi_pool_put_block(pool, first);
    return REBATCH_OK;
}

void rbi_pool_adopt(rebatch_pool *pool, struct rbi_pool_stream *stream)
{
    rbi_quick_flush_all(pool);
    for (struct rbi_range *r = pool->first_range; r; r = r->next) {
        for (struct rbi_block *b = r->first; b; b = b->after) {
            if (b->state != RBI_BLOCK_FREE || b->stream == stream)
                continue;
            rbi_pool_bin_remove(b);
            rbi_pool_give_to(b, stream);
            b = rbi_pool_put_block(pool, b);
        }
    }
}
