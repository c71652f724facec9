/* Owns the copy of a pool as it is, over a dry device: where blocks, holes and pages lie.
 * Must not know what is tried on the copy. */
#include "pool/pool.h"

/* What of the pool has a counterpart in the copy, by its address. Every block has an address of its
 * own, by which the copy's table has them all until it is done; streams are few and stand in the
 * same order. */
struct copy {
    rebatch_pool *from, *to;
    rbi_physical handle; /* stands for all chunks of the copy */
};

static rebatch_status no_memory(void)
{
    return rbi_error(REBATCH_E_HOST_OOM, "no host memory to copy the state of a pool");
}

static struct rbi_block *counterpart(const struct copy *copy, const struct rbi_block *block)
{
    return block ? rbi_table_find(&copy->to->heap.table, block->address) : NULL;
}

static struct rbi_lists *lists_of(const struct copy *copy, const struct rbi_lists *lists)
{
    struct rbi_pool_stream *theirs = copy->from->first_stream, *ours = copy->to->first_stream;
    if (lists == copy->from->heap.holes)
        return copy->to->heap.holes;
    for (; theirs && &theirs->lists != lists; theirs = theirs->next)
        ours = ours->next;
    if (theirs)
        return &ours->lists;
    const rebatch_arena *of = copy->from->first_arena;
    rebatch_arena *arena = copy->to->first_arena;
    for (; &of->own.lists != lists; of = of->next)
        arena = arena->next;
    return &arena->own.lists;
}

/* ---- what has no pointers ---- */

/* But for the frees that wait in scopes, which copy_lists() sets. */
static void copy_figures(rebatch_pool *to, const rebatch_pool *from)
{
    const size_t first = offsetof(rebatch_pool, limit_bytes);
    const size_t end = offsetof(rebatch_pool, tags) + sizeof to->tags;
    memcpy((char *)to + first, (const char *)from + first, end - first);
}

/* On a dry device all work is done as soon as it is enqueued. */
static rebatch_status copy_streams(struct copy *copy)
{
    const struct rbi_pool_progress *const from = &copy->from->progress;
    copy->to->progress = (struct rbi_pool_progress){
        .frees = from->frees, .done = from->frees, .due = from->due, .gap = from->gap};
    struct rbi_pool_stream **end = &copy->to->first_stream;
    for (const struct rbi_pool_stream *s = copy->from->first_stream; s; s = s->next) {
        struct rbi_pool_stream *ours = rbi_heap_calloc(1, sizeof *ours);
        if (!ours)
            return no_memory();
        ours->stream = s->stream;
        ours->lists.misses = s->lists.misses;
        ours->lists.merged = s->lists.merged;
        ours->lists.has_zones = s->lists.has_zones;
        *end = ours;
        end = &ours->next;
        if (s == copy->from->last_stream)
            copy->to->last_stream = ours;
    }
    return REBATCH_OK;
}

/* Their ranges are known when these are copied. */
static rebatch_status copy_arenas(struct copy *copy)
{
    rebatch_arena **end = &copy->to->first_arena;
    for (const rebatch_arena *a = copy->from->first_arena; a; a = a->next) {
        rebatch_arena *const ours = *end = rbi_heap_calloc(1, sizeof *ours);
        if (!ours)
            return no_memory();
        end = &ours->next;
        ours->pool = copy->to;
        ours->own.stream = a->own.stream;
        ours->is_lost = a->is_lost;
        ours->taken_total_bytes = a->taken_total_bytes;
        ours->home = a->home ? rbi_pool_find_stream(copy->to, a->home->stream) : NULL;
        if (ours->home)
            ours->home->pins++;
    }
    return REBATCH_OK;
}

static void set_ranges(const struct copy *copy)
{
    rebatch_arena *ours = copy->to->first_arena;
    for (const rebatch_arena *a = copy->from->first_arena; a; a = a->next, ours = ours->next) {
        ours->tail = counterpart(copy, a->tail);
        ours->range = counterpart(copy, a->range->first)->range;
    }
}

/* ---- what is held from the device ---- */

/* Whatever others hold of the device is held of the dry one too. */
static rebatch_status take_memory(struct copy *copy)
{
    rebatch_pool *const to = copy->to, *const from = copy->from;
    rebatch_memory_info info;
    rebatch_status status = rebatch_device_memory(from->device, &info);
    const size_t reserved = (size_t)rbi_vm_device_bytes(&from->vm);
    const size_t taken = info.total_bytes - rbi_min(info.free_bytes, info.total_bytes);
    void *others;
    if (!status && taken > reserved)
        status = rbi_device_alloc(to->device, &others, taken - reserved);
    return status ? status : rbi_vm_copy(&copy->handle, &to->vm, &from->vm);
}

/* What is mapped where a block lies. */
static void copy_mapped(const struct copy *copy, struct rbi_range *to, const struct rbi_range *from,
                        const struct rbi_block *block)
{
    const size_t offset = (size_t)(block->address - from->address);
    rbi_map_copy_chunks(to->map, from->map, offset / copy->from->page_bytes,
                        rbi_vm_pages_for(&copy->from->vm, offset + block->bytes), copy->handle);
}

static rebatch_status copy_pages(struct copy *copy, struct rbi_range *to,
                                 const struct rbi_range *from)
{
    void *address;
    if (!from->map)
        return rbi_device_alloc(copy->to->device, &address, from->bytes);
    to->map = rbi_map_copy(from->map);
    if (!to->map)
        return no_memory();
    for (const struct rbi_block *b = from->first; b; b = b->after)
        if (b->state != RBI_BLOCK_HOLE)
            copy_mapped(copy, to, from, b);
    return REBATCH_OK;
}

/* ---- ranges and blocks ---- */

static bool copy_block(struct copy *copy, struct rbi_range *range, struct rbi_block *last,
                       const struct rbi_block *from)
{
    rbi_assert(from->bytes > 0 && from->range);
    rebatch_pool *to = copy->to;
    if (!rbi_blocks_prepare(&to->heap, 1))
        return false;
    struct rbi_block *block =
        rbi_block_make(&to->heap, range, from->address, from->bytes, lists_of(copy, from->lists));
    block->state = from->state;
    block->sequence = from->sequence;
    block->requested_bytes = from->requested_bytes; /* or freed_at */
    block->tag = from->tag;
    block->outside = from->outside;
    block->resident = from->resident;
    to->residents[from->resident].bytes += from->resident ? from->bytes : 0;
    block->before = last;
    if (last)
        last->after = block;
    else
        range->first = block;
    rbi_table_put(&to->heap.table, block);
    return true;
}

static rebatch_status copy_range(struct copy *copy, const struct rbi_range *from)
{
    rebatch_pool *to = copy->to;
    if (!rbi_nodes_prepare(&to->heap.range_nodes, 1))
        return no_memory();
    struct rbi_range *range =
        rbi_blocks_add_empty(&to->heap, from->address, from->bytes, from->zone);
    range->number = from->number;
    range->is_arena = from->is_arena;
    range->is_kept = from->is_kept;
    const rebatch_status status = copy_pages(copy, range, from);
    if (status) {
        rbi_blocks_remove_range(&to->heap, range);
        return status;
    }
    struct rbi_block *last = NULL;
    for (const struct rbi_block *b = from->first; b; b = b->after) {
        if (!copy_block(copy, range, last, b))
            return no_memory();
        last = last ? last->after : range->first;
    }
    return REBATCH_OK;
}

/* ---- the lists ---- */

/* How many free blocks a stream has, and their counterparts where `out` is not NULL. */
static size_t list_free(const struct copy *copy, const struct rbi_pool_stream *from,
                        struct rbi_block **out)
{
    size_t count = 0;
    for (unsigned zone = 0; zone < RBI_POOL_ZONES; zone++) {
        const struct rbi_bins *bins = &from->lists.bins[zone];
        for (unsigned i = 0; (i = rbi_bin_next(bins, i)) < RBI_POOL_BINS; i++)
            for (const struct rbi_block *b = bins->of[i]; b; b = b->next, count++)
                if (out)
                    out[count] = counterpart(copy, b);
    }
    return count;
}

/* A bin's newest block stands first, so the last is put in first. */
static bool copy_bins(const struct copy *copy, const struct rbi_pool_stream *from)
{
    size_t count = list_free(copy, from, NULL);
    struct rbi_block **blocks = rbi_heap_calloc(count + 1, sizeof *blocks);
    if (!blocks)
        return false;
    (void)list_free(copy, from, blocks);
    while (count-- > 0)
        rbi_lists_add(blocks[count]);
    rbi_heap_free(blocks);
    return true;
}

static void copy_live(const struct copy *copy)
{
    rebatch_pool *to = copy->to;
    const struct rbi_block *const from_ring = &copy->from->by_sequence;
    struct rbi_block *const ring = &to->by_sequence;
    for (const struct rbi_block *b = from_ring->next; b != from_ring; b = b->next) {
        struct rbi_block *block = counterpart(copy, b);
        block->next_deferred = counterpart(copy, b->next_deferred);
        block->next = ring;
        block->previous = ring->previous;
        ring->previous->next = block;
        ring->previous = block;
    }
    for (size_t i = 0; i < to->depth; i++)
        to->scopes[i].deferred = counterpart(copy, copy->from->scopes[i].deferred);
}

/* Until here the table had them all, for counterparts to be found. */
static void unlist(const struct copy *copy)
{
    for (const struct rbi_range *r = copy->to->heap.first_range; r; r = r->next)
        for (const struct rbi_block *b = r->first; b; b = b->after)
            if (!rbi_block_is_listed(b))
                rbi_table_remove(&copy->to->heap.table, b);
}

static rebatch_status copy_lists(const struct copy *copy)
{
    rebatch_pool *from = copy->from;
    bool has_memory = copy_bins(copy, from->space);
    for (const struct rbi_pool_stream *s = from->first_stream; s && has_memory; s = s->next)
        has_memory = copy_bins(copy, s);
    for (const rebatch_arena *a = from->first_arena; a && has_memory; a = a->next)
        has_memory = copy_bins(copy, &a->own);
    if (!has_memory)
        return no_memory();
    copy_live(copy);
    set_ranges(copy);
    unlist(copy);
    return REBATCH_OK;
}

/* ---- the whole ---- */

/* A pool that is itself over a dry device has addresses that the copy's would give out again: they
 * are used up. */
static rebatch_status skip_addresses(const struct copy *copy)
{
    uintptr_t end = 0;
    for (const struct rbi_range *r = copy->from->heap.first_range; r; r = r->next)
        end = rbi_max(end, (uintptr_t)r->address + r->bytes);
    void *at;
    rebatch_device *dry = copy->to->device;
    rebatch_status status = rbi_device_alloc(dry, &at, copy->from->page_bytes);
    if (!status)
        status = rbi_device_free(dry, at, copy->from->page_bytes);
    if (status || (uintptr_t)at >= end)
        return status;
    const size_t gap = end - (uintptr_t)at;
    status = rbi_device_alloc(dry, &at, gap);
    return status ? status : rbi_device_free(dry, at, gap);
}

/* Where all work is done, no block is pending. Where none is, it does not matter how far the work
 * has come, and whoever copies a pool to look ahead need not let the device run idle for it. */
static rebatch_status copy_locked(struct copy *copy)
{
    rbi_assert(rbi_lock_is_held(&copy->from->lock) && !copy->from->plan.arena);
    rebatch_status status = copy->from->pending ? rbi_pool_await_all(copy->from) : REBATCH_OK;
    rbi_pool_flush_lists(copy->from);
    for (rebatch_arena *a = copy->from->first_arena; a; a = a->next)
        rbi_lists_flush(&copy->from->heap, &a->own.lists);
    if (!status)
        status = take_memory(copy);
    copy_figures(copy->to, copy->from);
    if (!status)
        status = skip_addresses(copy);
    if (!status)
        status = copy_streams(copy);
    if (!status)
        status = copy_arenas(copy);
    for (const struct rbi_range *r = copy->from->heap.first_range; r && !status; r = r->next)
        status = copy_range(copy, r);
    copy->to->heap.ranges_made = copy->from->heap.ranges_made;
    return status ? status : copy_lists(copy);
}

/* Only at the end does the dry device get the cap, which may be below what is held. */
static rebatch_status fill(rebatch_pool **out, rebatch_pool *pool, rebatch_device *dry)
{
    struct copy copy = {.from = pool};
    rebatch_memory_info info;
    rebatch_status status = rebatch_device_memory(pool->device, &info);
    if (!status)
        status = rebatch_pool_create(&copy.to, dry, NULL);
    if (status)
        return status;
    status = rbi_pool_take_lock_awake(pool);
    if (!status) {
        rbi_plan_leave(pool);
        status = copy_locked(&copy);
        rbi_pool_give_lock(pool);
    }
    if (!status && info.total_bytes >= pool->page_bytes)
        status = rebatch_device_set_capacity(dry, info.total_bytes);
    if (status) {
        rebatch_pool_destroy(copy.to);
        return status;
    }
    copy.to->resident_of = pool->resident_of;
    rbi_pool_free_resident(copy.to); /* which goes before anything that a copy is asked about */
    *out = copy.to;
    return REBATCH_OK;
}

rebatch_status rbi_pool_clone(rebatch_pool **out, rebatch_device **dry, rebatch_pool *pool)
{
    *out = NULL;
    rebatch_status status = rbi_device_open_dry(dry, REBATCH_UNLIMITED, pool->page_bytes,
                                                rbi_device_has_virtual_memory(pool->device));
    if (!status) {
        (*dry)->others = pool->device->others;
        status = fill(out, pool, *dry);
    }
    if (status) {
        rebatch_device_close(*dry);
        *dry = NULL;
    }
    return status;
}
