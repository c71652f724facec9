/* Owns the choice of addresses for what no free block can hold: windows of free blocks and holes.
 * Must not know stages or limits. */
#include "pool/pool.h"

static size_t pages_for(const rebatch_pool *pool, size_t bytes)
{
    return (bytes + pool->page_bytes - 1) >> (unsigned)__builtin_ctzll(pool->page_bytes);
}

static bool is_in_run(const struct rbi_block *block)
{
    return (block->state == RBI_BLOCK_FREE || block->state == RBI_BLOCK_HOLE) &&
           !block->range->is_arena;
}

/* The window of `bytes` that begins, or ends, where `near` does. */
static void lay_window(struct rbi_window *window, const rebatch_pool *pool, struct rbi_block *near,
                       size_t bytes, bool at_end)
{
    rbi_assert(bytes > 0);
    *window = (struct rbi_window){near, near, bytes, 0, at_end};
    size_t left = bytes;
    for (struct rbi_block *b = near;; b = at_end ? b->before : b->after) {
        rbi_assert(b && is_in_run(b));
        const size_t part = rbi_min(left, b->bytes);
        if (b->state == RBI_BLOCK_HOLE)
            window->pages += pages_for(pool, part);
        *(at_end ? &window->first : &window->last) = b;
        left -= part;
        if (left == 0)
            return;
    }
}

/* A look at places for a request, and the best so far. */
struct look {
    size_t bytes;
    const struct rbi_pool_stream *stream;
    struct rbi_window window;
    size_t spare_bytes; /* what the place of the window has beyond it; SIZE_MAX: none found */
};

/* A free block that the request's stream may have at once, or a hole. */
static bool is_open(const rebatch_pool *pool, const struct rbi_block *block,
                    const struct rbi_pool_stream *stream)
{
    return block && (block->state == RBI_BLOCK_HOLE ||
                     (block->state == RBI_BLOCK_FREE &&
                      (block->lists == &stream->lists || block->freed_at <= pool->progress.done)));
}

/* A hole with what is open before and behind it. The request lies at the end where fewer pages
 * must be mapped for it; of places that are alike in this the smallest is taken. */
static void look_around(struct look *look, const rebatch_pool *pool, struct rbi_block *hole)
{
    struct rbi_block *first = hole, *last = hole;
    size_t all = hole->bytes;
    for (; is_open(pool, first->before, look->stream); first = first->before)
        all += first->before->bytes;
    for (; is_open(pool, last->after, look->stream); last = last->after)
        all += last->after->bytes;
    if (all < look->bytes)
        return;
    const size_t spare_bytes = all - look->bytes;
    for (int at_end = 0; at_end < 2; at_end++) {
        struct rbi_window window;
        lay_window(&window, pool, at_end ? last : first, look->bytes, at_end);
        /* Without a page to map it is a free block that the search before had its reasons to
         * leave. */
        if (window.pages == 0 ||
            (look->spare_bytes != SIZE_MAX &&
             (window.pages > look->window.pages ||
              (window.pages == look->window.pages && spare_bytes >= look->spare_bytes))))
            continue;
        look->window = window;
        look->spare_bytes = spare_bytes;
    }
}

bool rbi_window_find(struct rbi_window *window, rebatch_pool *pool, size_t bytes,
                     struct rbi_pool_stream *stream, unsigned zone)
{
    struct look look = {bytes, stream, {NULL, NULL, 0, 0, false}, SIZE_MAX};
    struct rbi_block *hole = rbi_lists_first(&pool->space->lists);
    for (unsigned looks = 0; hole && (looks < RBI_WINDOW_LOOKS || look.spare_bytes == SIZE_MAX);
         hole = rbi_lists_next(hole)) {
        if (zone != RBI_ZONE_ANY && hole->range->zone != zone)
            continue;
        look_around(&look, pool, hole);
        looks++;
    }
    *window = look.window;
    return look.spare_bytes != SIZE_MAX;
}

void rbi_window_widen(struct rbi_window *window, const rebatch_pool *pool, size_t pages)
{
    rbi_assert(window->bytes > 0);
    const struct rbi_block *const far = window->at_end ? window->first : window->last;
    const struct rbi_block *const end = window->last->after;
    if (far->state != RBI_BLOCK_HOLE || far->bytes / pool->page_bytes < pages ||
        pages < window->pages)
        return;
    size_t beside = 0; /* what is mapped already */
    for (const struct rbi_block *b = window->first; b != end; b = b->after) {
        if (b != far && b->state == RBI_BLOCK_HOLE)
            return;
        beside += b == far ? 0 : b->bytes;
    }
    window->bytes = beside + pages * pool->page_bytes;
    window->pages = pages;
}

/* ---- the best of all ---- */

/* Free blocks and holes, one behind the other. Its wholly free pages count like any others,
 * mapped or not; what it has besides are the free parts of pages at its ends.
 *
 *   | lead | fixed[0] |                      | fixed[1] | trail |
 *          |<------------- whole pages ---------------->|
 *   | lead |<- taken by a request at the start -->|              the same mirrored: at the end
 *
 *   bytes == lead + whole * page + trail */
struct run {
    struct rbi_block *first, *last;
    size_t bytes, lead, whole, trail;
    size_t fixed[2]; /* of the whole pages those of pieces that reach beyond it: at either end */
};

/* A piece that reaches beyond a free block is in use there: its block is the first of a run, or the
 * last. */
static void note_fixed(struct run *run, const rebatch_pool *pool, const struct rbi_block *block)
{
    rbi_assert(block->range->map);
    char *first_whole, *first;
    const size_t whole = rbi_block_whole_pages(pool, block, &first_whole);
    const size_t within = rbi_block_own_pages(pool, block, &first);
    const size_t before = (size_t)(first - first_whole) / pool->page_bytes;
    run->fixed[0] += before;
    run->fixed[1] += whole - within - before;
}

/* The run that begins at `block` or behind it; false when there is none in the range. */
static bool next_run(struct run *run, const rebatch_pool *pool, struct rbi_block *block)
{
    while (block && !is_in_run(block))
        block = block->after;
    if (!block)
        return false;
    *run = (struct run){.first = block};
    for (; block && is_in_run(block); block = block->after) {
        run->last = block;
        run->bytes += block->bytes;
        if (block->state == RBI_BLOCK_FREE && rbi_vm_has_large(&pool->vm))
            note_fixed(run, pool, block);
    }
    const struct rbi_range *range = run->first->range;
    const size_t offset = (size_t)(run->first->address - range->address);
    run->lead = rbi_min(-offset & (pool->page_bytes - 1), run->bytes);
    run->whole = (run->bytes - run->lead) / pool->page_bytes;
    run->trail = run->bytes - run->lead - run->whole * pool->page_bytes;
    rbi_assert(run->trail < pool->page_bytes && run->fixed[0] + run->fixed[1] <= 2 * run->whole);
    return true;
}

/* Of a chunk that the end of a request cuts, the pages beyond the request: they stay where they
 * are, and cost as those that are `taken`. */
static size_t cut_off(const rebatch_pool *pool, const struct run *run, size_t taken, bool at_end)
{
    if (taken <= run->fixed[at_end] || taken >= run->whole - run->fixed[!at_end])
        return 0; /* no chunk, or one that could not be used elsewhere anyway */
    const size_t before = at_end ? run->whole - taken : taken;
    const char *const end = run->first->address + run->lead + before * pool->page_bytes;
    return rbi_map_cut_off(run->first->range->map, end, !at_end);
}

/* Pages of the supply that `bytes` at one end of the run take. Fixed ones could not be used
 * elsewhere, so they cost nothing here: those of the near end, and those of the far end that the
 * request reaches. */
static size_t taken_at(const rebatch_pool *pool, const struct run *run, size_t bytes, bool at_end)
{
    const size_t part = at_end ? run->trail : run->lead;
    const size_t taken = bytes <= part ? 0 : rbi_min(pages_for(pool, bytes - part), run->whole);
    const size_t near = rbi_min(taken, run->fixed[at_end]);
    const size_t before_far = run->whole - run->fixed[!at_end];
    const size_t far = taken > before_far ? taken - before_far : 0;
    return taken - rbi_min(taken, near + far) + cut_off(pool, run, taken, at_end);
}

/* At the better end; *at_end says which. */
static size_t pages_taken(bool *at_end, const rebatch_pool *pool, const struct run *run,
                          size_t bytes)
{
    const size_t at_first = taken_at(pool, run, bytes, false);
    const size_t at_last = taken_at(pool, run, bytes, true);
    *at_end = at_last < at_first || (at_last == at_first && run->trail > run->lead);
    return rbi_min(at_first, at_last);
}

size_t rbi_pool_supply(const rebatch_pool *pool)
{
    size_t supply = pool->vm.spare_pages;
    char *first;
    for (const struct rbi_range *r = pool->heap.first_range; r; r = r->next)
        for (const struct rbi_block *b = r->first; b; b = b->after)
            if (b->state == RBI_BLOCK_FREE && !r->is_kept)
                supply += rbi_block_own_pages(pool, b, &first);
    return supply;
}

bool rbi_window_find_best(struct rbi_window *window, const rebatch_pool *pool, size_t bytes,
                          size_t room)
{
    const size_t supply = rbi_pool_supply(pool) + room;
    struct run run, best = {.first = NULL};
    size_t fewest = SIZE_MAX;
    bool at_end = false, best_at_end = false;
    for (const struct rbi_range *r = pool->heap.first_range; r; r = r->next) {
        for (struct rbi_block *b = r->first; next_run(&run, pool, b); b = run.last->after) {
            const size_t taken = pages_taken(&at_end, pool, &run, bytes);
            if (run.bytes >= bytes && taken < fewest) {
                fewest = taken;
                best = run;
                best_at_end = at_end;
            }
        }
    }
    if (fewest > supply)
        return false;
    lay_window(window, pool, best_at_end ? best.last : best.first, bytes, best_at_end);
    return true;
}

/* The most bytes at one end of the run that the supply suffices for. */
static uint64_t most_at(const rebatch_pool *pool, const struct run *run, size_t supply, bool at_end)
{
    if (taken_at(pool, run, run->bytes, at_end) <= supply)
        return run->bytes;
    const size_t part = at_end ? run->trail : run->lead;
    size_t fits = 0, fails = run->whole; /* pages; what is taken rises with them */
    while (fails - fits > 1) {
        const size_t middle = fits + (fails - fits) / 2;
        const size_t bytes = part + middle * pool->page_bytes;
        *(taken_at(pool, run, bytes, at_end) <= supply ? &fits : &fails) = middle;
    }
    return part + fits * pool->page_bytes;
}

uint64_t rbi_window_most(const rebatch_pool *pool, size_t room)
{
    const size_t supply = rbi_pool_supply(pool) + room;
    uint64_t most = (uint64_t)supply * pool->page_bytes; /* in addresses yet to be reserved */
    struct run run;
    for (const struct rbi_range *r = pool->heap.first_range; r; r = r->next)
        for (struct rbi_block *b = r->first; next_run(&run, pool, b); b = run.last->after)
            most = rbi_max(most, rbi_max(most_at(pool, &run, supply, false),
                                         most_at(pool, &run, supply, true)));
    return most;
}

/* ---- taking it ---- */

/* Keeps of a block in no list the part of `bytes` at one end. */
static struct rbi_block *cut(rebatch_pool *pool, struct rbi_block *block, size_t bytes, bool at_end)
{
    if (bytes >= block->bytes)
        return block;
    struct rbi_block *rest =
        rbi_block_split(&pool->heap, block, at_end ? block->bytes - bytes : bytes);
    rbi_lists_add(at_end ? block : rest);
    return at_end ? rest : block;
}

void rbi_window_hold(rebatch_pool *pool, struct rbi_window *window)
{
    rbi_assert(window->first->range == window->last->range && window->bytes > 0);
    rbi_assert(pool->heap.block_nodes.spare >= 2);
    const bool at_end = window->at_end;
    struct rbi_block *const far = at_end ? window->first : window->last;
    const bool single = window->first == window->last;
    size_t left = window->bytes;
    for (struct rbi_block *b = at_end ? window->last : window->first;;) {
        rbi_lists_remove(b);
        const bool last = b == far;
        if (last)
            b = cut(pool, b,
                    b->state == RBI_BLOCK_HOLE ? pages_for(pool, left) * pool->page_bytes : left,
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
        if (b->state == RBI_BLOCK_HELD)
            (void)rbi_block_put(&pool->heap, b);
    }
}

/* What stays mapped of a hole, because the device did not unmap it. */
static void record_stuck(rebatch_pool *pool, const struct rbi_block *hole)
{
    const struct rbi_map *const map = hole->range->map;
    for (size_t done = 0, bytes; done < hole->bytes; done += bytes) {
        char *const at = hole->address + done;
        bytes = rbi_map_chunk_pages(map, at) * pool->page_bytes;
        if (rbi_map_is_mapped(map, at))
            RBI_RECORD(pool, MAP, at, bytes, NULL, 0);
    }
}

/* Maps spare memory to a held hole, which keeps its state unless a chunk of it is quarantined. */
static rebatch_status fill(rebatch_pool *pool, struct rbi_block *hole)
{
    rbi_assert(hole->lists == &pool->space->lists && hole->state == RBI_BLOCK_HELD);
    bool quarantined;
    const rebatch_status status =
        rbi_map_fill(&pool->vm, hole->range->map, hole->address, hole->bytes, &quarantined);
    if (status == REBATCH_OK)
        RBI_RECORD(pool, MAP, hole->address, hole->bytes, NULL, 0);
    if (quarantined) {
        rbi_block_lose(pool, hole);
        record_stuck(pool, hole);
    }
    return status;
}

rebatch_status rbi_window_map(struct rbi_block **out, rebatch_pool *pool, struct rbi_window *window,
                              struct rbi_pool_stream *stream)
{
    *out = NULL;
    rbi_assert(window->first->range == window->last->range);
    struct rbi_block *const end = window->last->after;
    for (struct rbi_block *b = window->first; b != end; b = b->after) {
        if (b->lists != &pool->space->lists)
            continue;
        const rebatch_status status = fill(pool, b);
        if (status != REBATCH_OK) {
            rbi_window_drop(pool, window);
            return status;
        }
        rbi_block_give(b, &stream->lists);
    }
    struct rbi_block *first = window->first;
    rbi_block_give(first, &stream->lists);
    while (first->after != end) {
        rbi_block_give(first->after, &stream->lists);
        rbi_block_take_in_after(&pool->heap, first);
    }
    *out = rbi_block_put(&pool->heap, first);
    return REBATCH_OK;
}
