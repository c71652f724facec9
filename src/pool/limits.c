/* Owns how much memory the pool may have: limit, headroom, and what it may spend to save calls of
 * the device. Must not know where memory lies. */
#include "pool/pool.h"

static size_t share_of(size_t bytes, uint32_t permille)
{
    return bytes / 1000 * permille + bytes % 1000 * permille / 1000;
}

size_t rbi_pool_limit(const rebatch_pool *pool, size_t device_total_bytes)
{
    const size_t others = pool->device->others.bytes;
    const size_t limit = rbi_min(rbi_min(pool->limit_bytes, pool->given_bytes), others);
    if (pool->limit_permille == 0)
        return limit;
    return rbi_min(limit, share_of(rbi_min(device_total_bytes, others), pool->limit_permille));
}

/* What the pool holds, and what it could still have: less than the limit where others have a part
 * of the device. */
static size_t reachable(const rebatch_pool *pool, size_t room)
{
    size_t all;
    return rbi_add((size_t)rbi_vm_device_bytes(&pool->vm), room, &all) ? all : SIZE_MAX;
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
    const size_t reserved = rbi_vm_device_bytes(&pool->vm);
    const size_t allowed = limit > reserved ? limit - reserved : 0;
    const size_t free_bytes =
        own.free_bytes > pool->headroom_bytes ? own.free_bytes - pool->headroom_bytes : 0;
    *room = rbi_min(allowed, free_bytes) & ~(pool->page_bytes - 1);
    return REBATCH_OK;
}

void rbi_pool_set_floor(rebatch_pool *pool)
{
    const size_t most = rbi_min(pool->limit_bytes, pool->given_bytes);
    const size_t bytes = rbi_pool_is_asleep(pool) ? 0 : rbi_min(pool->floor_bytes, most);
    pool->vm.floor_pages = bytes / pool->page_bytes;
}

rebatch_status rbi_pool_take_floor(size_t *missing_bytes, rebatch_pool *pool)
{
    rbi_pool_set_floor(pool);
    *missing_bytes = 0;
    if (pool->vm.held_pages >= pool->vm.floor_pages)
        return REBATCH_OK;
    size_t room;
    const size_t missing = pool->vm.floor_pages - pool->vm.held_pages;
    rebatch_status status = rbi_pool_room(&room, pool, NULL);
    const size_t pages = rbi_min(missing, room / pool->page_bytes);
    if (pages)
        status = rbi_vm_create(&pool->vm, pages, RBI_CHUNK_ORDINARY_MOST);
    *missing_bytes = (missing - (status ? 0 : pages)) * pool->page_bytes;
    return status == REBATCH_OOM ? REBATCH_OK : status;
}

/* Free memory of all arenas. */
static uint64_t arenas_free_bytes(const rebatch_pool *pool)
{
    uint64_t bytes = 0;
    for (const rebatch_arena *a = pool->first_arena; a; a = a->next)
        bytes += a->own.lists.free_bytes;
    return bytes;
}

/* What of that is lent and could be taken. */
static uint64_t arenas_lent_bytes(const rebatch_pool *pool)
{
    size_t pages = 0;
    char *first;
    for (const rebatch_arena *a = pool->first_arena; a; a = a->next)
        for (const struct rbi_block *b = a->range->first; b && !a->range->is_kept; b = b->after)
            if (b->state == RBI_BLOCK_FREE)
                pages += rbi_block_own_pages(pool, b, &first);
    return (uint64_t)pages * pool->page_bytes;
}

uint64_t rbi_pool_own_bytes(const rebatch_pool *pool)
{
    return rbi_vm_bytes(&pool->vm) + pool->vm.asleep.pages * pool->page_bytes -
           arenas_free_bytes(pool);
}

uint64_t rbi_pool_cached(const rebatch_pool *pool)
{
    return rbi_pool_own_bytes(pool) - pool->stats.live_bytes + arenas_lent_bytes(pool);
}

rebatch_status rbi_pool_count_available(size_t *bytes, rebatch_pool *pool)
{
    size_t room;
    const rebatch_status status = rbi_pool_room(&room, pool, NULL);
    *bytes = 0;
    room -= rbi_min(room, pool->vm.asleep.pages * pool->page_bytes); /* what a wake takes */
    if (status == REBATCH_OK && !rbi_add((size_t)rbi_pool_cached(pool), room, bytes))
        *bytes = SIZE_MAX;
    return status;
}

static size_t less(size_t bytes, size_t taken)
{
    return bytes > taken ? bytes - taken : 0;
}

size_t rbi_pool_overflow_room(const rebatch_pool *pool)
{
    const size_t most = less(pool->overflow.most_bytes, (size_t)pool->vm.overflow.bytes);
    return rbi_min(most, rbi_device_host_room(pool->device)) & ~(pool->page_bytes - 1);
}

rebatch_status rbi_pool_get_bound(struct rbi_pool_bound *out, rebatch_pool *pool)
{
    rebatch_memory_info info;
    *out = (struct rbi_pool_bound){.is_limit = false};
    const rebatch_status status = rebatch_device_memory(pool->device, &info);
    if (status)
        return status;
    rbi_lock_take(&pool->lock);
    const size_t limit = rbi_pool_limit(pool, info.total_bytes);
    const size_t reserved = rbi_vm_device_bytes(&pool->vm);
    out->is_limit =
        limit != SIZE_MAX && less(limit, reserved) <= less(info.free_bytes, pool->headroom_bytes);
    out->bytes = out->is_limit ? limit : info.total_bytes;
    out->outside_bytes = less(less(info.total_bytes, info.free_bytes), reserved);
    rbi_pool_give_lock(pool);
    return REBATCH_OK;
}

bool rbi_pool_knows_needs(const rebatch_pool *pool)
{
    return pool->sequence >= RBI_WARM_TIMES * pool->warm_sequence + RBI_WARM_ALLOCATIONS;
}

/* Whether `bytes` more leave others what should be kept of the device. */
static bool leaves_room(const rebatch_pool *pool, size_t bytes, size_t room)
{
    const size_t kept = kept_room(pool, room);
    return room > kept && bytes <= room - kept;
}

static bool is_within_peak(const rebatch_pool *pool, size_t bytes)
{
    const uint64_t peak = pool->highest_live_bytes;
    const uint64_t most =
        peak + peak / RBI_HELD_BEYOND_PEAK_PARTS + pool->moved_bytes / RBI_HELD_FOR_MOVED_PARTS;
    const uint64_t reserved = rbi_pool_own_bytes(pool);
    return reserved <= most && bytes <= most - reserved;
}

bool rbi_pool_may_take(const rebatch_pool *pool, size_t bytes, size_t room)
{
    return leaves_room(pool, bytes, room) && is_within_peak(pool, bytes);
}

bool rbi_pool_holds_too_much(const rebatch_pool *pool)
{
    const uint64_t peak = pool->highest_live_bytes;
    const uint64_t most = peak + peak / RBI_TOO_MUCH_PARTS + RBI_TOO_MUCH_PAGES * pool->page_bytes;
    return rbi_pool_own_bytes(pool) > rbi_max(most, pool->vm.floor_pages * pool->page_bytes);
}

/* The last micro-batch of a step is often smaller, and its blocks then just miss the zone in which
 * memory was taken ahead for the others': they may have it even if the needs are not known, as to
 * move it breaks large pieces up. */
static bool may_be_large(const rebatch_pool *pool, size_t bytes)
{
    return bytes < pool->large_bytes && bytes >= pool->large_bytes / 2 &&
           rbi_vm_has_large(&pool->vm);
}

struct rbi_policy rbi_pool_find_policy(rebatch_pool *pool, size_t bytes)
{
    size_t room;
    const bool knows = rbi_pool_knows_needs(pool), may_cut = knows || may_be_large(pool, bytes);
    if (!may_cut || rbi_pool_room(&room, pool, NULL) != REBATCH_OK)
        return (struct rbi_policy){false, false};
    const bool has_room = knows && leaves_room(pool, bytes, room);
    const bool fresh_first = has_room && is_within_peak(pool, bytes);
    if (has_room && !fresh_first)
        pool->moved_bytes += bytes; /* pages are moved for it instead */
    return (struct rbi_policy){fresh_first, true};
}
