/* Owns the list of what runs allocate. A write to memory that was taken back shows a pointer that
 * is kept across attempts. Must not know what else is compared. */
#include "check/check.h"
#include "device/device.h"
#include "pool/view.h"

/* The part of a block that is looked at. */
#define LOOKED_AT_BYTES 4096

/* ---- what was allocated ---- */

static void add(struct rbi_stale_list *list, const struct rbi_stale_block *block)
{
    if (list->count == list->room) {
        const size_t room = list->room ? 2 * list->room : 256;
        void *blocks = rbi_heap_resize(list->blocks, room, sizeof *list->blocks);
        if (!blocks)
            return; /* the block is not looked at */
        list->blocks = blocks;
        list->room = room;
    }
    rbi_assert(list->count < list->room);
    list->blocks[list->count++] = *block;
}

static void remove_at(struct rbi_stale_list *list, size_t i)
{
    rbi_assert(i < list->count);
    list->blocks[i] = list->blocks[--list->count];
}

static bool overlap(const struct rbi_stale_block *block, const char *address, size_t bytes)
{
    return block->address < address + bytes && address < block->address + block->bytes;
}

static void forget(struct rbi_stale_list *list, const void *address)
{
    for (size_t i = list->count; i-- > 0;)
        if (list->blocks[i].address == address)
            remove_at(list, i);
}

/* Whether the calling thread is neither the callback's nor one that has joined: its memory is not
 * taken back. */
static bool is_beside(const struct rbi_stale *stale)
{
    return stale->injection->is_running &&
           !pthread_equal(stale->injection->thread, pthread_self()) &&
           !rbi_pool_thread_has_joined(rebatch_get_pool(stale->injection->rb));
}

/* A block that such a thread frees in the callback in which it was allocated was for it. */
static void free_beside(struct rbi_stale *stale, const void *address)
{
    for (size_t i = stale->beside.count; i-- > 0;) {
        const struct rbi_stale_block *const block = &stale->beside.blocks[i];
        if (block->address != address)
            continue;
        if (stale->injection->is_running && block->place.serial == stale->injection->place.serial) {
            stale->helped += block->place.serial != stale->helpers.place.serial;
            stale->helpers = *block;
        }
        remove_at(&stale->beside, i);
    }
}

/* Runs with the pool's lock held. */
static void on_call(void *user, enum rbi_pool_call call, const void *address, size_t bytes,
                    rebatch_stream stream)
{
    struct rbi_stale *stale = user;
    (void)stream;
    if (call == RBI_POOL_ALLOC && bytes) {
        size_t whole = bytes; /* with padding, which is filled too */
        (void)rbi_pool_check_size(&whole, rebatch_get_pool(stale->injection->rb), bytes + 1);
        for (size_t i = stale->gone.count; i-- > 0;)
            if (overlap(&stale->gone.blocks[i], address, whole))
                remove_at(&stale->gone, i);
        for (size_t i = stale->lost.count; i-- > 0;)
            if (overlap(&stale->lost.blocks[i], address, whole))
                remove_at(&stale->lost, i);
        add(is_beside(stale) ? &stale->beside : &stale->live,
            &(struct rbi_stale_block){.address = address,
                                      .bytes = bytes,
                                      .place = stale->injection->place,
                                      .is_padded = stale->pads});
    } else if (call == RBI_POOL_FREE) {
        forget(&stale->live, address);
        free_beside(stale, address);
    }
}

/* ---- what is there ---- */

/* Of the beginning. False when it cannot be read. */
static bool read_digest(uint64_t *out, const struct rbi_stale *stale,
                        const struct rbi_stale_block *block)
{
    char chunk[LOOKED_AT_BYTES];
    return !rbi_check_digest(out, stale->injection->rb, block->address,
                             rbi_min(block->bytes, sizeof chunk), chunk, sizeof chunk);
}

/* Whether the pool's memory has not moved since: otherwise addresses may be mapped elsewhere, or
 * not at all. */
static bool is_settled(struct rbi_stale *stale)
{
    rebatch_pool_stats stats;
    if (rebatch_pool_get_stats(&stats, rebatch_get_pool(stale->injection->rb)))
        return false;
    const uint64_t moves =
        stats.device_allocations + stats.device_frees + stats.trims + stats.remaps;
    const bool is_same = moves == stale->moves;
    stale->moves = moves;
    return is_same;
}

/* ---- taken back ---- */

/* The pool may have given the memory back to the device. */
static void find_cached(const struct rbi_stale *stale, struct rbi_stale_list *list, size_t from)
{
    struct rbi_view_piece piece;
    rebatch_pool *pool = rebatch_get_pool(stale->injection->rb);
    rbi_view_open(pool);
    struct rbi_view_walk walk = rbi_view_ranges(pool);
    for (; walk.range; rbi_view_next_range(&walk))
        while (rbi_view_next(&piece, &walk))
            for (size_t i = from; i < list->count && piece.state == RBI_VIEW_FREE; i++) {
                struct rbi_stale_block *const block = &list->blocks[i];
                block->is_cached |= block->address >= piece.address &&
                                    block->address + rbi_min(block->bytes, LOOKED_AT_BYTES) <=
                                        piece.address + piece.bytes;
            }
    rbi_view_close(pool);
}

void rbi_stale_take_back(struct rbi_stale *stale, bool is_all)
{
    if (!stale->is_on)
        return;
    if (!is_settled(stale))
        stale->gone.count = 0;
    const size_t from = stale->gone.count;
    for (size_t i = stale->live.count; i-- > 0;) {
        const struct rbi_stale_block block = stale->live.blocks[i];
        if ((!is_all && block.place.serial != stale->injection->place.serial) ||
            block.place.which == RBI_RESIZE)
            continue;
        remove_at(&stale->live, i);
        add(&stale->gone, &block);
        add(&stale->lost, &block);
    }
    rbi_assert(from <= stale->gone.count);
    find_cached(stale, &stale->gone, from);
    for (size_t i = stale->gone.count; i-- > from;) {
        struct rbi_stale_block *const block = &stale->gone.blocks[i];
        if (!block->is_cached || !read_digest(&block->digest, stale, block))
            remove_at(&stale->gone, i);
    }
}

bool rbi_stale_find(struct rbi_stale_block *out, struct rbi_stale *stale)
{
    if (!stale->is_on)
        return false;
    if (!is_settled(stale))
        stale->gone.count = 0;
    for (size_t i = 0; i < stale->gone.count; i++) {
        uint64_t digest;
        *out = stale->gone.blocks[i];
        if (read_digest(&digest, stale, out) && digest != out->digest)
            return true;
    }
    return false;
}

const struct rbi_stale_block *rbi_stale_at(const struct rbi_stale_list *list, const void *address)
{
    for (size_t i = list->count; i-- > 0;)
        if (overlap(&list->blocks[i], address, 1))
            return &list->blocks[i];
    return NULL;
}

/* ---- what is in use ---- */

/* Of how many micro-batches the allocation of that number is in use. */
static size_t count_left(const struct rbi_stale *stale, uint64_t number)
{
    size_t count = 0;
    for (size_t i = 0; i < stale->live.count; i++) {
        const struct rbi_place *const place = &stale->live.blocks[i].place;
        count += place->which == RBI_FORWARD_BACKWARD && place->number == number;
    }
    return count;
}

size_t rbi_stale_count_left(struct rbi_stale_block *out, const struct rbi_stale *stale)
{
    uint64_t last = 0;
    size_t most = 0;
    for (size_t i = 0; i < stale->live.count; i++) {
        const struct rbi_place *const place = &stale->live.blocks[i].place;
        if (place->which == RBI_FORWARD_BACKWARD && place->serial > last)
            last = place->serial;
    }
    for (size_t i = 0; i < stale->live.count; i++) {
        const struct rbi_stale_block *const block = &stale->live.blocks[i];
        if (block->place.serial != last)
            continue;
        const size_t count = count_left(stale, block->place.number);
        if (count > most)
            *out = *block;
        most = rbi_max(most, count);
    }
    return most;
}

bool rbi_stale_find_overrun(struct rbi_stale_block *out, const struct rbi_stale *stale,
                            uint8_t fill)
{
    unsigned char beyond[LOOKED_AT_BYTES];
    rebatch_pool *pool = rebatch_get_pool(stale->injection->rb);
    for (size_t i = 0; i < stale->live.count && stale->is_on; i++) {
        const struct rbi_stale_block *const block = &stale->live.blocks[i];
        size_t whole = 0;
        if (!block->is_padded || rebatch_pool_block_bytes(&whole, pool, block->address) ||
            whole <= block->bytes)
            continue;
        const size_t count = rbi_min(whole - block->bytes, sizeof beyond);
        if (rbi_check_copy(stale->injection->rb, REBATCH_GUARD_DEVICE, beyond,
                           block->address + block->bytes, count))
            continue;
        *out = *block;
        for (size_t k = 0; k < count; k++)
            if (beyond[k] != fill)
                return true;
    }
    return false;
}

/* ---- beginning and end ---- */

void rbi_stale_begin(struct rbi_stale *stale, const struct rbi_injection *injection)
{
    rebatch_pool *pool = rebatch_get_pool(injection->rb);
    *stale = (struct rbi_stale){.injection = injection};
    stale->is_on = rbi_device_has_contents(rbi_session_device(injection->rb));
    if (!stale->is_on)
        return;
    (void)is_settled(stale);
    rbi_pool_set_recorder(pool, &(struct rbi_pool_recorder){on_call, stale});
}

void rbi_stale_end(struct rbi_stale *stale)
{
    if (stale->is_on)
        rbi_pool_set_recorder(rebatch_get_pool(stale->injection->rb), NULL);
    rbi_heap_free(stale->live.blocks);
    rbi_heap_free(stale->gone.blocks);
    rbi_heap_free(stale->lost.blocks);
    rbi_heap_free(stale->beside.blocks);
    *stale = (struct rbi_stale){.is_on = false};
}
