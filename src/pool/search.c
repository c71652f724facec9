/* Owns the search for memory: the stages, their order, limit and headroom.
 * Must not know what the memory is for. */
#include "pool/pool.h"

/* Requests of less than a page share a segment of this many. */
#define SHARED_PAGES 4

_Thread_local const rebatch_pool *rbi_pool_pressing;
_Thread_local unsigned rbi_pool_callbacks;

rebatch_status rbi_pool_prepare(rebatch_pool *pool)
{
    /* Searches that are within a pressure callback keep what they were promised. */
    const size_t searches = pool->pressing + 1;
    if (rbi_pool_prepare_blocks(pool, rbi_pool_promised(pool)) &&
        rbi_nodes_prepare(&pool->range_nodes, searches))
        return REBATCH_OK;
    return rbi_error(REBATCH_E_HOST_OOM, "the pool has no host memory for another block");
}

static size_t share_of(size_t bytes, uint32_t permille)
{
    return bytes / 1000 * permille + bytes % 1000 * permille / 1000;
}

size_t rbi_pool_limit(const rebatch_pool *pool, size_t device_total_bytes)
{
    if (pool->limit_permille == 0)
        return pool->limit_bytes;
    return rbi_min(pool->limit_bytes, share_of(device_total_bytes, pool->limit_permille));
}

size_t rbi_pool_share(const rebatch_pool *pool, size_t device_total_bytes, uint32_t permille)
{
    return share_of(rbi_min(rbi_pool_limit(pool, device_total_bytes), device_total_bytes),
                    permille);
}

/* What the pool holds, and what it could still have: less than the limit where others have a part
 * of the device. */
static size_t reachable(const rebatch_pool *pool, size_t room)
{
    size_t all;
    return rbi_add((size_t)rbi_vm_bytes(&pool->vm), room, &all) ? all : SIZE_MAX;
}

/* The room that is to be kept. */
static size_t kept_room(const rebatch_pool *pool, size_t room)
{
    return share_of(reachable(pool, room), pool->keep_room_permille);
}

rebatch_status rbi_pool_room(size_t *room, rebatch_pool *pool, rebatch_memory_info *info)
{
    *room = 0;
    rebatch_memory_info own = {0, 0, 0};
    const rebatch_status status = rebatch_device_memory(pool->device, &own);
    if (info)
        *info = own;
    if (status != REBATCH_OK)
        return status;
    const size_t limit = rbi_pool_limit(pool, own.total_bytes);
    const size_t reserved = rbi_vm_bytes(&pool->vm);
    const size_t allowed = limit > reserved ? limit - reserved : 0;
    const size_t free_bytes =
        own.free_bytes > pool->headroom_bytes ? own.free_bytes - pool->headroom_bytes : 0;
    *room = rbi_min(allowed, free_bytes) & ~(pool->page_bytes - 1);
    pool->room_parts = *room / (reachable(pool, *room) / RBI_POOL_ROOM_PARTS + 1);
    return REBATCH_OK;
}

static void reach(rebatch_pool *pool, struct rbi_request *request, rebatch_pool_stage stage)
{
    request->stage = stage;
    pool->stages[stage]++;
}

static struct rbi_block *take(rebatch_pool *pool, const struct rbi_request *request,
                              struct rbi_block *block)
{
    return block ? rbi_pool_take_block(pool, block, request->bytes, request->stream) : NULL;
}

static struct rbi_block *take_own(rebatch_pool *pool, const struct rbi_request *request)
{
    return rbi_pool_take_own(pool, request->stream, request->bytes);
}

static struct rbi_block *find_own(const rebatch_pool *pool, const struct rbi_request *request,
                                  unsigned zone)
{
    return rbi_pool_find_fit(request->stream, request->bytes, UINT64_MAX, rbi_pool_split_most(pool),
                             zone);
}

static struct rbi_block *find_other(rebatch_pool *pool, const struct rbi_request *request,
                                    unsigned zone)
{
    struct rbi_block *best = NULL;
    for (struct rbi_pool_stream *s = pool->first_stream; s; s = s->next) {
        if (s == request->stream)
            continue;
        rbi_quick_flush(pool, s);
        struct rbi_block *block =
            rbi_pool_find_fit(s, request->bytes, s->done, rbi_pool_split_most(pool), zone);
        if (block && (!best || block->bytes < best->bytes))
            best = block;
    }
    return best;
}

/* After streams have come further: blocks may have become free on any of them. */
static struct rbi_block *take_any(rebatch_pool *pool, const struct rbi_request *request)
{
    struct rbi_block *block = take_own(pool, request);
    return block ? block
                 : take(pool, request,
                        find_other(pool, request, rbi_pool_zone(pool, request->bytes)));
}

/* A block between two holes, rather than fresh memory. */
static struct rbi_block *take_isolated(rebatch_pool *pool, const struct rbi_request *request)
{
    const unsigned zone = rbi_pool_zone(pool, request->bytes);
    return zone == RBI_ZONE_ANY
               ? NULL
               : take(pool, request, find_own(pool, request, zone | RBI_ZONE_ISOLATED));
}

static bool may_leave_zone(const rebatch_pool *pool, const struct rbi_request *request)
{
    return pool->caching && !pool->guard && rbi_pool_zone(pool, request->bytes) != RBI_ZONE_ANY;
}

/* A block of any zone, rather than wait for work or fail. */
static struct rbi_block *take_anywhere(rebatch_pool *pool, const struct rbi_request *request)
{
    if (!may_leave_zone(pool, request))
        return NULL;
    struct rbi_block *block = find_own(pool, request, RBI_ZONE_ANY);
    return take(pool, request, block ? block : find_other(pool, request, RBI_ZONE_ANY));
}

/* ---- addresses and pages ---- */

/* What a search of the stages REMAP and DEVICE is after. */
struct growth {
    size_t bytes;
    struct rbi_pool_stream *stream;
    const struct rbi_pool_stream *spared; /* keeps its free pages; may be NULL */
    size_t guard_bytes;                   /* to stay without memory behind it */
    bool no_fresh;                        /* free pages only */
    bool no_remap;                        /* fresh ones before free ones */
    bool ahead;                           /* it will be used as a whole */
    bool by_remap;                        /* out: no fresh memory was needed */
    bool from_cache;                      /* out: nothing was mapped for it */
    bool at_end;                          /* out: what is served is at the end of what was found */
};

static rebatch_status find_window(struct rbi_window *window, rebatch_pool *pool,
                                  const struct growth *growth)
{
    const size_t bytes = growth->bytes;
    if (pool->care_bytes != SIZE_MAX &&
        rbi_window_find_with_care(window, pool, bytes, growth->stream))
        return REBATCH_OK;
    if (rbi_window_find(window, pool, bytes, growth->stream))
        return REBATCH_OK;
    size_t whole;
    if (!rbi_round_up(bytes, pool->page_bytes, &whole))
        return REBATCH_OOM;
    const rebatch_status status =
        rbi_range_reserve(pool, whole, rbi_min(rbi_pool_zone(pool, bytes), RBI_ZONE_LARGE));
    if (status != REBATCH_OK)
        return status;
    return rbi_window_find(window, pool, bytes, growth->stream) ? REBATCH_OK : REBATCH_OOM;
}

/* A window that is a hole alone, whole pages long: for what needs a gap behind it, or shall add
 * to what is free. */
static rebatch_status find_hole(struct rbi_window *window, rebatch_pool *pool,
                                const struct growth *growth)
{
    const size_t bytes = growth->bytes + growth->guard_bytes;
    struct rbi_block *hole =
        rbi_pool_find_fit(pool->space, bytes, UINT64_MAX, SIZE_MAX, RBI_ZONE_ANY);
    rebatch_status status = REBATCH_OK;
    if (!hole && (status = rbi_range_reserve(pool, bytes, RBI_ZONE_LARGE)) == REBATCH_OK)
        hole = rbi_pool_find_fit(pool->space, bytes, UINT64_MAX, SIZE_MAX, RBI_ZONE_ANY);
    if (status == REBATCH_OK && !hole)
        status = REBATCH_OOM;
    *window = (struct rbi_window){hole, hole, bytes, bytes / pool->page_bytes, false};
    return status;
}

/* A pool that has made so many times the allocations in which live memory last reached a new peak,
 * and some steps' worth, knows what it needs. */
#define WARM_TIMES 8
#define WARM_ALLOCATIONS 16384

bool rbi_pool_knows_needs(const rebatch_pool *pool)
{
    return pool->sequence >= WARM_TIMES * pool->warm_sequence + WARM_ALLOCATIONS;
}

/* What a pool may spend to save calls of the device. Until it knows its needs, and where memory is
 * scarce, free pages are moved to where they are needed, so that every zone is kept for its
 * sizes and nothing is held in vain; but every move costs calls, in every step again. */
struct means {
    bool plenty; /* fresh memory, which costs calls once and then lies where it is needed */
    bool slack;  /* else blocks of other zones: there is more than it needs, if they are cut up */
};

/* What is beyond the peak must be at least this part of all that the pool could have. */
#define SLACK_PARTS 32

static size_t beyond_peak(const rebatch_pool *pool, size_t room)
{
    const size_t all = reachable(pool, room);
    return all - rbi_min(all, (size_t)pool->highest_live_bytes);
}

static bool has_slack(const rebatch_pool *pool, size_t room)
{
    const size_t beyond = beyond_peak(pool, room);
    return beyond != 0 && beyond >= reachable(pool, room) / SLACK_PARTS;
}

/* How much a pool holds rather than move pages: what was in use at its peak, and a part more. */
#define HELD_BEYOND_PEAK_PARTS 32
static size_t live_and_slack(const rebatch_pool *pool)
{
    const uint64_t peak = pool->highest_live_bytes;
    return (size_t)(peak + peak / HELD_BEYOND_PEAK_PARTS);
}

/* Whether others, and the pool itself, have enough left after `bytes` more. */
static bool has_plenty(const rebatch_pool *pool, size_t bytes, size_t room,
                       const rebatch_memory_info *info)
{
    const size_t reserved = (size_t)rbi_vm_bytes(&pool->vm);
    const size_t collected_above = rbi_pool_share(pool, info->total_bytes, pool->gc_permille);
    if (pool->gc_permille && (collected_above < reserved || bytes > collected_above - reserved))
        return false;
    const size_t most = live_and_slack(pool), kept = kept_room(pool, room);
    return reserved <= most && bytes <= most - reserved && room > kept && bytes <= room - kept;
}

/* The last micro-batch of a step is often smaller, and its blocks then just miss the zone in which
 * memory was taken ahead for the others': they may have it even if the needs are not known, as to
 * move it breaks large pieces up. */
static bool may_be_large(const rebatch_pool *pool, size_t bytes)
{
    return bytes < pool->large_bytes && bytes >= pool->large_bytes / 2 && rbi_vm_has_large(&pool->vm);
}

static struct means find_means(rebatch_pool *pool, size_t bytes)
{
    size_t room;
    rebatch_memory_info info;
    const bool knows = rbi_pool_knows_needs(pool), may_cut = knows || may_be_large(pool, bytes);
    if (!may_cut || rbi_pool_room(&room, pool, &info) != REBATCH_OK)
        return (struct means){false, false};
    return (struct means){knows && has_plenty(pool, bytes, room, &info), has_slack(pool, room)};
}

/* Whether a place is worth a longer search: in the beginning, when what a training keeps for good
 * finds its place, and as long as memory is scarce. */
static bool wants_care(const rebatch_pool *pool, bool plenty)
{
    if (plenty)
        return false;
    return pool->sequence < WARM_ALLOCATIONS ||
           pool->room_parts * 1000 < (size_t)pool->keep_room_permille * RBI_POOL_ROOM_PARTS;
}

static rebatch_status create_lacking(rebatch_pool *pool, const struct growth *growth, size_t count,
                                     size_t room)
{
    const size_t lacking = count - pool->vm.spare_pages;
    const size_t room_pages = room / pool->page_bytes;
    if (lacking > room_pages)
        return REBATCH_OOM;
    return rbi_vm_create(&pool->vm, lacking,
                            growth->ahead ? rbi_vm_chunk_ahead(lacking)
                                          : rbi_vm_chunk(&pool->vm, lacking, room_pages));
}

/* Makes sure of `count` spare pages: free ones unmapped from elsewhere, then fresh ones. */
static rebatch_status gather(rebatch_pool *pool, struct growth *growth, size_t count)
{
    if (pool->vm.spare_pages >= count) {
        growth->by_remap = true;
        return REBATCH_OK;
    }
    size_t room = 0;
    const rebatch_status status = growth->no_fresh ? REBATCH_OK : rbi_pool_room(&room, pool, NULL);
    if (status != REBATCH_OK)
        return status;
    if (growth->no_remap) {
        const rebatch_status created = create_lacking(pool, growth, count, room);
        if (created != REBATCH_OOM)
            return created;
    }
    /* What cannot succeed shall not take blocks apart. */
    const uint64_t cached = rbi_vm_bytes(&pool->vm) - pool->stats.live_bytes;
    if (count > (cached + room) / pool->page_bytes)
        return REBATCH_OOM;
    rbi_pool_harvest(pool, count, growth->spared);
    growth->by_remap = pool->vm.spare_pages >= count;
    if (growth->by_remap)
        return REBATCH_OK;
    if (growth->no_fresh)
        return REBATCH_OOM;
    return create_lacking(pool, growth, count, room);
}

/* Fills a window with memory; with a guard the last page of it stays a gap. */
static rebatch_status fill_window(struct rbi_block **out, rebatch_pool *pool, struct growth *growth,
                                  struct rbi_window *window)
{
    growth->at_end = window->at_end;
    growth->from_cache = window->pages == 0 && window->first == window->last &&
                         window->first->stream == growth->stream;
    rbi_window_hold(pool, window);
    const rebatch_status status = gather(pool, growth, window->pages);
    if (status != REBATCH_OK) {
        rbi_window_drop(pool, window);
        return status;
    }
    return rbi_window_map(out, pool, window, growth->stream);
}

/* A pool that grows takes whole chunks, where others, and it itself, have plenty left. */
static void widen(struct rbi_window *window, rebatch_pool *pool, const struct growth *growth)
{
    size_t room;
    rebatch_memory_info info;
    if (growth->no_fresh || growth->ahead || pool->vm.spare_pages >= window->pages ||
        rbi_pool_room(&room, pool, &info) != REBATCH_OK)
        return;
    const size_t chunk = rbi_vm_chunk(&pool->vm, window->pages, room / pool->page_bytes);
    const size_t pages = (window->pages + chunk - 1) & ~(chunk - 1);
    if (pages > window->pages && has_plenty(pool, pages * pool->page_bytes, room, &info))
        rbi_window_widen(window, pool, pages);
}

static rebatch_status grow(struct rbi_block **out, rebatch_pool *pool, struct growth *growth)
{
    struct rbi_window window;
    const rebatch_status status = find_window(&window, pool, growth);
    if (status != REBATCH_OK)
        return status;
    widen(&window, pool, growth);
    return fill_window(out, pool, growth, &window);
}

rebatch_status rbi_pool_grow(struct rbi_block **out, rebatch_pool *pool, size_t bytes,
                             struct rbi_pool_stream *stream, const struct rbi_pool_stream *spared)
{
    *out = NULL;
    if (pool->has_space) {
        struct growth growth = {.bytes = bytes, .stream = stream, .spared = spared, .ahead = true};
        struct rbi_window window;
        const rebatch_status found = find_hole(&window, pool, &growth);
        return found == REBATCH_OK ? fill_window(out, pool, &growth, &window) : found;
    }
    size_t room;
    const rebatch_status status = rbi_pool_room(&room, pool, NULL);
    if (status != REBATCH_OK)
        return status;
    return bytes > room ? REBATCH_OOM : rbi_range_alloc(out, pool, bytes, stream);
}

bool rbi_pool_is_plentiful(rebatch_pool *pool)
{
    return find_means(pool, 0).plenty;
}

size_t rbi_pool_bytes_beyond_peak(rebatch_pool *pool)
{
    size_t room;
    return rbi_pool_room(&room, pool, NULL) == REBATCH_OK ? beyond_peak(pool, room) : 0;
}

bool rbi_pool_may_line_up(rebatch_pool *pool, size_t bytes)
{
    const uint64_t cached = rbi_vm_bytes(&pool->vm) - pool->stats.live_bytes;
    return bytes <= cached || find_means(pool, bytes).plenty;
}

struct rbi_block *rbi_pool_line_up(rebatch_pool *pool, size_t bytes, struct rbi_pool_stream *stream,
                                   bool fresh)
{
    struct growth growth = {.bytes = bytes,
                            .stream = stream,
                            .ahead = true,
                            .no_fresh = !fresh || !find_means(pool, bytes).plenty};
    struct rbi_window window;
    struct rbi_block *block;
    if (rbi_nodes_prepare(&pool->range_nodes, 1) && rbi_pool_await_streams(pool) == REBATCH_OK &&
        find_hole(&window, pool, &growth) == REBATCH_OK &&
        fill_window(&block, pool, &growth, &window) == REBATCH_OK)
        return block;
    return NULL;
}

/* Fresh memory of a device without pages. What does not fit limit and headroom is not asked
 * for. */
static rebatch_status take_plain(struct rbi_block **out, rebatch_pool *pool,
                                 struct rbi_request *request)
{
    reach(pool, request, REBATCH_STAGE_DEVICE);
    size_t room;
    rebatch_status status = rbi_pool_room(&room, pool, NULL);
    if (status != REBATCH_OK)
        return status;
    size_t bytes;
    if (!rbi_round_up(request->bytes, pool->page_bytes, &bytes) || bytes > room)
        return REBATCH_OOM;
    const size_t shared = SHARED_PAGES * pool->page_bytes;
    if (pool->caching && request->bytes < pool->page_bytes && shared <= room)
        bytes = shared;
    struct rbi_block *block;
    status = rbi_range_alloc(&block, pool, bytes, request->stream);
    *out = take(pool, request, block);
    return status;
}

/* What a window became: the request lies at the end where that joins it to its neighbour. */
static struct rbi_block *take_part(rebatch_pool *pool, const struct rbi_request *request,
                                   struct rbi_block *block, bool at_end)
{
    if (!block || !at_end || block->bytes == request->bytes)
        return take(pool, request, block);
    rbi_pool_bin_remove(block);
    struct rbi_block *end = rbi_pool_split(pool, block, block->bytes - request->bytes);
    rbi_pool_bin_add(block);
    end->state = RBI_BLOCK_HELD;
    return end;
}

/* A block whose end is that of its last page, and a gap behind: both out of one window. */
static rebatch_status take_guarded(struct rbi_block **out, rebatch_pool *pool,
                                   struct growth *growth)
{
    const size_t step = pool->page_bytes;
    size_t whole;
    if (!rbi_round_up(growth->bytes, step, &whole))
        return REBATCH_OOM;
    struct growth with_gap = *growth;
    struct rbi_window window;
    with_gap.bytes = whole;
    with_gap.guard_bytes = step;
    rebatch_status status = find_hole(&window, pool, &with_gap);
    if (status != REBATCH_OK)
        return status;
    rbi_window_hold(pool, &window);
    struct rbi_block *gap = rbi_pool_split(pool, window.first, whole);
    gap->state = RBI_BLOCK_GUARD;
    window.bytes = whole;
    window.pages--;
    status = gather(pool, growth, window.pages);
    if (status == REBATCH_OK)
        status = rbi_window_map(out, pool, &window, growth->stream);
    else
        rbi_window_drop(pool, &window);
    if (status != REBATCH_OK) {
        (void)rbi_pool_put_block(pool, gap);
        return status;
    }
    /* What is before it stays free; no request is served from parts of pages. */
    const struct rbi_request request = {.bytes = growth->bytes, .stream = growth->stream};
    *out = take_part(pool, &request, *out, true);
    return REBATCH_OK;
}

static rebatch_status take_pages(struct rbi_block **out, rebatch_pool *pool,
                                 const struct rbi_request *request, struct growth *growth,
                                 bool plenty)
{
    struct rbi_block *block = NULL;
    rbi_pool_set_care(pool, wants_care(pool, plenty));
    growth->no_remap = plenty;
    growth->no_fresh = !plenty;
    rebatch_status status = plenty ? REBATCH_OOM : grow(&block, pool, growth);
    if (status == REBATCH_OOM && (*out = take_isolated(pool, request)))
        return REBATCH_OK;
    growth->no_fresh = false;
    if (status == REBATCH_OOM)
        status = grow(&block, pool, growth);
    *out = take_part(pool, request, block, growth->at_end);
    return status;
}

/* Several blocks that lie one behind the other. */
static struct rbi_block *take_row(rebatch_pool *pool, const struct rbi_request *request)
{
    struct rbi_block *block = NULL;
    struct rbi_window window;
    struct growth growth = {.bytes = request->bytes, .stream = request->stream};
    if (!rbi_window_find(&window, pool, request->bytes, request->stream) || window.pages != 0 ||
        fill_window(&block, pool, &growth, &window) != REBATCH_OK)
        return NULL;
    return take_part(pool, request, block, growth.at_end);
}

/* What is free and mapped already, as far as it is taken before fresh memory: a block between two
 * holes, a row of blocks, or a part of a stretch. Where there was plenty last time: then the device
 * need not be asked what it has left, which takes it microseconds. */
static struct rbi_block *take_mapped_already(rebatch_pool *pool, const struct rbi_request *request)
{
    if (pool->guard || pool->care_bytes != SIZE_MAX || !rbi_pool_knows_needs(pool))
        return NULL;
    struct rbi_block *block = take_isolated(pool, request);
    if (!block)
        block = take_row(pool, request);
    return block;
}

/* Free pages from elsewhere, then fresh ones, mapped where the request finds addresses. */
static rebatch_status take_mapped(struct rbi_block **out, rebatch_pool *pool,
                                  struct rbi_request *request)
{
    if ((*out = take_mapped_already(pool, request))) {
        request->stage = REBATCH_STAGE_CACHE;
        return REBATCH_OK;
    }
    const struct means means = find_means(pool, request->bytes);
    if (!means.plenty && means.slack && (*out = take_anywhere(pool, request))) {
        request->stage = REBATCH_STAGE_CACHE;
        return REBATCH_OK;
    }
    struct growth growth = {
        .bytes = request->bytes, .stream = request->stream, .ahead = request->ahead};
    const uint64_t remaps = pool->stages[REBATCH_STAGE_REMAP];
    reach(pool, request, REBATCH_STAGE_REMAP);
    const rebatch_status status = pool->guard
                                      ? take_guarded(out, pool, &growth)
                                      : take_pages(out, pool, request, &growth, means.plenty);
    if (growth.from_cache && *out) {
        pool->stages[REBATCH_STAGE_REMAP] = remaps;
        request->stage = REBATCH_STAGE_CACHE;
    } else if (!growth.by_remap) {
        pool->stages[REBATCH_STAGE_REMAP] = remaps;
        reach(pool, request, REBATCH_STAGE_DEVICE);
    }
    return status;
}

static rebatch_status take_fresh(struct rbi_block **out, rebatch_pool *pool,
                                 struct rbi_request *request)
{
    const uint64_t held = rbi_vm_bytes(&pool->vm);
    const rebatch_status status =
        pool->has_space ? take_mapped(out, pool, request) : take_plain(out, pool, request);
    if (rbi_vm_bytes(&pool->vm) > held && status == REBATCH_OK)
        rbi_pool_collect(pool);
    return status;
}

/* All work is done: every free page counts, and the place that needs fewest is looked for. */
static rebatch_status take_best(struct rbi_block **out, rebatch_pool *pool,
                                struct rbi_request *request)
{
    size_t room;
    rebatch_status status = rbi_pool_room(&room, pool, NULL);
    if (status != REBATCH_OK)
        return status;
    rbi_pool_adopt(pool, request->stream);
    struct rbi_block *block = rbi_pool_find_fit(request->stream, request->bytes, UINT64_MAX,
                                                rbi_pool_split_most(pool), RBI_ZONE_ANY);
    struct rbi_window window = {NULL, NULL, 0, 0, false};
    if (!block && !pool->guard &&
        rbi_window_find_best(&window, pool, request->bytes, room / pool->page_bytes)) {
        struct growth growth = {.bytes = request->bytes, .stream = request->stream};
        reach(pool, request, REBATCH_STAGE_REMAP);
        status = fill_window(&block, pool, &growth, &window);
    }
    *out = pool->guard ? NULL : take_part(pool, request, block, window.at_end);
    return *out || status != REBATCH_OK ? status : REBATCH_OOM;
}

static rebatch_status take_after_trim(struct rbi_block **out, rebatch_pool *pool,
                                      struct rbi_request *request)
{
    size_t released;
    rebatch_status status = rbi_pool_trim_cache(pool, 0, NULL, &released);
    if (status != REBATCH_OK || released == 0)
        return status == REBATCH_OK ? REBATCH_OOM : status;
    status = take_fresh(out, pool, request);
    reach(pool, request, REBATCH_STAGE_TRIM);
    return status;
}

static bool is_waiting(const rebatch_pool *pool, const struct rbi_request *request)
{
    /* Pages of the stream's own free blocks are of use elsewhere once its work is done. */
    return rbi_pool_has_waiting(pool, pool->has_space ? NULL : request->stream);
}

/* What streams have left since the pool last looked. Where pending blocks of its own stream serve a
 * request, only the streams that they wait for are asked. */
static rebatch_status take_done(struct rbi_block **out, rebatch_pool *pool,
                                struct rbi_request *request)
{
    const bool others = pool->pending || pool->first_stream->next;
    if (others)
        reach(pool, request, REBATCH_STAGE_OTHER_STREAMS);
    bool any;
    rebatch_status status = rbi_pool_poll_pending(&any, pool, request->stream, request->bytes);
    if (status != REBATCH_OK || (any && !pool->guard && (*out = take_own(pool, request))))
        return status;
    if ((status = rbi_pool_poll_rest(pool)) != REBATCH_OK)
        return status;
    rbi_quick_flush_all(pool);
    if (!others)
        return REBATCH_OK;
    if (!pool->guard)
        *out = take_any(pool, request);
    if (!*out)
        rbi_pool_mark_soon(pool);
    return REBATCH_OK;
}

/* Every stage below the pressure callbacks. REBATCH_OOM when none had memory. */
static rebatch_status run_stages(struct rbi_block **out, rebatch_pool *pool,
                                 struct rbi_request *request)
{
    rebatch_status status;
    if (pool->caching && !pool->guard) {
        reach(pool, request, REBATCH_STAGE_CACHE);
        if ((*out = take_own(pool, request)))
            return REBATCH_OK;
    }
    if (pool->caching && (pool->pending || pool->has_space || pool->first_stream->next)) {
        status = take_done(out, pool, request);
        if (status != REBATCH_OK || *out)
            return status;
    }
    if ((status = take_fresh(out, pool, request)) != REBATCH_OOM)
        return status;
    if ((*out = take_anywhere(pool, request)))
        return REBATCH_OK;
    if (is_waiting(pool, request)) {
        reach(pool, request, REBATCH_STAGE_WAIT);
        if ((status = rbi_pool_await_streams(pool)) != REBATCH_OK)
            return status;
        if (pool->caching && !pool->guard && (*out = take_any(pool, request)))
            return REBATCH_OK;
        if (pool->has_space && (status = take_fresh(out, pool, request)) != REBATCH_OOM)
            return status;
    }
    if (!pool->has_space)
        return take_after_trim(out, pool, request);
    return rbi_pool_has_waiting(pool, NULL) ? REBATCH_OOM : take_best(out, pool, request);
}

/* The smallest free block that what is promised fits in, cut to that and out of all lists; NULL:
 * there is none. Needs a spare node. */
static struct rbi_block *set_promised_aside(rebatch_pool *pool)
{
    struct rbi_block *best = NULL;
    rbi_quick_flush_all(pool);
    for (struct rbi_pool_stream *s = pool->first_stream; s; s = s->next) {
        struct rbi_block *block =
            rbi_pool_find_fit(s, pool->promised_bytes, UINT64_MAX, SIZE_MAX, RBI_ZONE_ANY);
        if (block && (!best || block->bytes < best->bytes))
            best = block;
    }
    return best ? rbi_block_take(pool, best, pool->promised_bytes) : NULL;
}

/* For who was promised nothing: as if the piece that was were not there. Nodes are for both
 * searches, what waits in callbacks keeps its own, and for the rest of the piece. */
static rebatch_status run_stages_beside(struct rbi_block **out, rebatch_pool *pool,
                                        struct rbi_request *request)
{
    if (!request->beside || pool->promised_bytes <= rbi_plan_idle_bytes(pool))
        return run_stages(out, pool, request);
    if (!rbi_pool_prepare_blocks(pool, 3 * rbi_pool_promised(pool) + 1) ||
        !rbi_nodes_prepare(&pool->range_nodes, 2 * (pool->pressing + 1)))
        return rbi_error(REBATCH_E_HOST_OOM, "the pool has no host memory for another block");
    struct rbi_request promised = *request;
    promised.bytes = pool->promised_bytes;
    struct rbi_block *aside = set_promised_aside(pool);
    rebatch_status status = aside ? REBATCH_OK : run_stages(&aside, pool, &promised);
    if (status == REBATCH_OK)
        status = run_stages(out, pool, request);
    if (aside)
        (void)rbi_pool_put_block(pool, aside);
    return status;
}

/* Has one callback give up memory; true when it did. It runs without the lock, so that it can
 * free. */
static bool press(rebatch_pool *pool, const struct rbi_pressure *pressure, size_t wanted_bytes)
{
    const uint64_t freed = pool->stats.freed_total_bytes;
    const bool is_watched = pool->pressure_watch.on_pressure && pool->owner_thread != 0 &&
                            !rbi_pool_is_other_thread(pool, pool->owner_thread);
    const struct rbi_pool_pressure_watch watch = pool->pressure_watch;
    pool->stats.pressure_calls++;
    pool->pressing++;
    rbi_pool_give_lock(pool);
    const rebatch_pool *outer = rbi_pool_pressing;
    rbi_pool_pressing = pool;
    rbi_pool_callbacks++;
    if (is_watched)
        watch.on_pressure(watch.user, true);
    const size_t given = pressure->give_up(wanted_bytes, pressure->user);
    if (is_watched)
        watch.on_pressure(watch.user, false);
    rbi_pool_callbacks--;
    rbi_pool_pressing = outer;
    rbi_pool_take_lock(pool);
    pool->pressing--;
    return given > 0 || pool->stats.freed_total_bytes != freed;
}

rebatch_status rbi_pool_search(struct rbi_block **out, rebatch_pool *pool,
                               struct rbi_request *request)
{
    *out = NULL;
    rebatch_status status = run_stages_beside(out, pool, request);
    if (status == REBATCH_OOM && pool->plan.mode == RBI_PLAN_SERVES) {
        rbi_plan_leave(pool); /* what the arena does not use may do */
        status = run_stages_beside(out, pool, request);
    }
    rbi_assert((status == REBATCH_OK) == (*out != NULL));
    for (size_t i = 0; status == REBATCH_OOM && i < pool->pressure_count; i++) {
        const struct rbi_pressure pressure = pool->pressures[i];
        reach(pool, request, REBATCH_STAGE_PRESSURE);
        if (!press(pool, &pressure, request->bytes))
            continue;
        status = run_stages_beside(out, pool, request);
        request->stage = REBATCH_STAGE_PRESSURE;
    }
    return status;
}
