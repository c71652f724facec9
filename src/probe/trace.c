/* Owns the record of what one micro-batch did with the pool.
 * Must not know what other sizes would do. */
#include "probe/probe.h"

#include <string.h>

/* ---- recording ---- */

/* What others hold of the device, at the most: libraries' workspaces, which come and go between the
 * pool's calls. Where the device does not say, nothing. */
static void look_outside(struct rbi_trace *trace)
{
    rebatch_memory_info info;
    if (!trace->pool || rebatch_device_memory(rebatch_pool_device(trace->pool), &info))
        return;
    const size_t taken = info.total_bytes - rbi_min(info.free_bytes, info.total_bytes);
    const size_t own = (size_t)rbi_pool_reserved_bytes(trace->pool);
    trace->outside_bytes = rbi_max(trace->outside_bytes, taken > own ? taken - own : 0);
}

/* Runs with the pool's lock held. */
static void note(void *user, enum rbi_pool_call call, const void *address, size_t bytes,
                 rebatch_stream stream)
{
    struct rbi_trace *trace = user;
    look_outside(trace);
    if (trace->is_cut)
        return;
    if (trace->event_count == trace->event_room) {
        const size_t room = trace->event_room ? 2 * trace->event_room : 256;
        void *events = rbi_heap_resize(trace->events, room, sizeof *trace->events);
        if (!events) {
            trace->is_cut = true;
            return;
        }
        trace->events = events;
        trace->event_room = room;
    }
    static const enum rbi_trace_kind kinds[] = {[RBI_POOL_ALLOC] = RBI_TRACE_ALLOC,
                                                [RBI_POOL_FREE] = RBI_TRACE_FREE_OLDER,
                                                [RBI_POOL_RESERVE] = RBI_TRACE_RESERVE};
    trace->events[trace->event_count++] = (struct rbi_trace_event){
        kinds[call], RBI_NO_BLOCK, (void *)(uintptr_t)address, bytes, stream};
}

void rbi_trace_begin(struct rbi_trace *trace, rebatch_pool *pool, size_t count)
{
    *trace = (struct rbi_trace){.count = count, .pool = pool};
    look_outside(trace);
    trace->outside_before = trace->outside_bytes;
    rbi_pool_set_recorder(pool, &(struct rbi_pool_recorder){note, trace});
}

/* ---- which free is of which block ---- */

/* Open addressing, linear probing, at most half full; an address stays when it is freed. */
struct addresses {
    struct {
        const void *address;
        uint32_t block; /* RBI_NO_BLOCK: freed */
    } * entries;
    size_t capacity; /* a power of two */
};

static bool open_addresses(struct addresses *addresses, size_t most)
{
    addresses->capacity = 16;
    while (addresses->capacity < 2 * most)
        addresses->capacity *= 2;
    addresses->entries = rbi_heap_calloc(addresses->capacity, sizeof *addresses->entries);
    return addresses->entries != NULL;
}

/* The entry's index: that of the address, or the empty one where it goes. */
static size_t locate(const struct addresses *addresses, const void *address)
{
    const size_t mask = addresses->capacity - 1;
    rbi_assert(addresses->capacity > 0 && (addresses->capacity & mask) == 0);
    size_t i = (size_t)(((uint64_t)(uintptr_t)address * 0x9e3779b97f4a7c15u) >> 32) & mask;
    while (addresses->entries[i].address && addresses->entries[i].address != address)
        i = (i + 1) & mask;
    return i;
}

static void put(struct addresses *addresses, const void *address, uint32_t block)
{
    const size_t i = locate(addresses, address);
    addresses->entries[i].address = address;
    addresses->entries[i].block = block;
}

/* The block that lives there, which no longer does; RBI_NO_BLOCK when none did. */
static uint32_t take(struct addresses *addresses, const void *address)
{
    const size_t i = locate(addresses, address);
    if (!addresses->entries[i].address)
        return RBI_NO_BLOCK;
    const uint32_t block = addresses->entries[i].block;
    addresses->entries[i].block = RBI_NO_BLOCK;
    return block;
}

static void put_kept(struct addresses *addresses, const struct rbi_trace *before)
{
    for (size_t i = 0; before && i < before->event_count; i++) {
        const struct rbi_trace_event *event = &before->events[i];
        if (event->kind == RBI_TRACE_ALLOC && !before->is_freed[event->block])
            put(addresses, event->address, event->block);
    }
}

static void pair(struct rbi_trace *trace, struct addresses *own, struct addresses *kept)
{
    for (size_t i = 0; i < trace->event_count; i++) {
        struct rbi_trace_event *event = &trace->events[i];
        if (event->kind == RBI_TRACE_ALLOC) {
            event->block = trace->blocks++;
            put(own, event->address, event->block);
        } else if (event->kind == RBI_TRACE_FREE_OLDER) {
            if ((event->block = take(own, event->address)) != RBI_NO_BLOCK) {
                event->kind = RBI_TRACE_FREE;
                trace->is_freed[event->block] = true;
            } else if ((event->block = take(kept, event->address)) != RBI_NO_BLOCK) {
                event->kind = RBI_TRACE_FREE_PREVIOUS;
            }
        }
    }
}

rebatch_status rbi_trace_end(struct rbi_trace *trace, rebatch_pool *pool,
                             const struct rbi_trace *before)
{
    rbi_assert(trace->pool == pool);
    rbi_pool_set_recorder(pool, NULL);
    look_outside(trace);
    trace->pool = NULL;
    trace->before = before ? before->count : 0;
    struct addresses own = {0}, kept = {0};
    trace->is_freed = rbi_heap_calloc(trace->event_count + 1, sizeof *trace->is_freed);
    trace->is_passed = rbi_heap_calloc(trace->event_count + 1, sizeof *trace->is_passed);
    bool has_memory = !trace->is_cut && trace->is_freed && trace->is_passed &&
                      open_addresses(&own, trace->event_count);
    if (has_memory)
        has_memory = open_addresses(&kept, before ? before->event_count : 0);
    if (has_memory) {
        put_kept(&kept, before);
        pair(trace, &own, &kept);
    }
    rbi_heap_free(own.entries);
    rbi_heap_free(kept.entries);
    return has_memory ? REBATCH_OK
                      : rbi_error(REBATCH_E_HOST_OOM,
                                  "no host memory to record what a micro-batch allocates");
}

void rbi_trace_pass_on(struct rbi_trace *trace, const struct rbi_trace *next)
{
    trace->has_next = true;
    for (size_t i = 0; i < next->event_count; i++) {
        if (next->events[i].kind != RBI_TRACE_FREE_PREVIOUS)
            continue;
        rbi_assert(next->events[i].block < trace->blocks);
        trace->is_passed[next->events[i].block] = true;
    }
}

void rbi_trace_add_failure(struct rbi_trace *trace, size_t asked_bytes)
{
    note(trace, RBI_POOL_RESERVE, NULL, asked_bytes, NULL);
}

void rbi_trace_release(struct rbi_trace *trace)
{
    rbi_heap_free(trace->events);
    rbi_heap_free(trace->is_freed);
    rbi_heap_free(trace->is_passed);
    memset(trace, 0, sizeof *trace);
}
