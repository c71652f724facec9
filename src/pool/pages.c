/* Owns physical memory: making it, keeping what is spare of it, mapping and unmapping it.
 * Must not know blocks' lives, nor what memory is asked for.
 *
 * A large chunk can only be unmapped as a whole, and then keeps free memory from where it is
 * needed; but to make, map and give back one takes hardly longer than for one page. */
#include "pool/pool.h"

static unsigned page_shift(const rebatch_pool *pool)
{
    return (unsigned)__builtin_ctzll(pool->page_bytes);
}

static size_t index_of(const rebatch_pool *pool, const struct rbi_range *range, const char *address)
{
    return (size_t)(address - range->address) >> page_shift(pool);
}

/* Of a chunk of a power of two of pages. */
static unsigned size_of(size_t pages)
{
    return (unsigned)__builtin_ctzll(pages);
}

/* ---- what is spare ---- */

/* There is a place for each chunk that is held, so that an unmapped one always has one. */
static bool prepare_spare(struct rbi_spare *spare)
{
    if (spare->held < spare->capacity)
        return true;
    const size_t capacity = rbi_max(2 * spare->capacity, 64);
    rbi_physical *chunks = rbi_heap_resize(spare->chunks, capacity, sizeof *chunks);
    if (!chunks)
        return false;
    spare->chunks = chunks;
    spare->capacity = capacity;
    return true;
}

static void put_spare(rebatch_pool *pool, rbi_physical physical, unsigned size)
{
    rbi_assert(physical && size < RBI_CHUNK_SIZES);
    struct rbi_spare *spare = &pool->spare[size];
    spare->chunks[spare->count++] = physical;
    pool->spare_count += (size_t)1 << size;
}

static rbi_physical newest_spare(const rebatch_pool *pool, unsigned size)
{
    return pool->spare[size].chunks[pool->spare[size].count - 1];
}

static void drop_spare(rebatch_pool *pool, unsigned size)
{
    rbi_assert(pool->spare[size].count > 0 && pool->spare_count >= (size_t)1 << size);
    pool->spare[size].count--;
    pool->spare_count -= (size_t)1 << size;
}

/* The largest size of at most `most` pages that is spare, else the smallest above; there must be
 * one. */
static unsigned choose_spare(const rebatch_pool *pool, size_t most)
{
    rbi_assert(pool->spare_count > 0);
    unsigned size = RBI_CHUNK_SIZES;
    while (size-- > 0)
        if (pool->spare[size].count && (size_t)1 << size <= most)
            return size;
    while (pool->spare[++size].count == 0)
        ;
    return size;
}

/* Gives the newest spare chunk of a size back. */
static rebatch_status release(rebatch_pool *pool, unsigned size)
{
    const size_t bytes = pool->page_bytes << size;
    const rebatch_status status =
        rbi_device_release_physical(pool->device, newest_spare(pool, size), bytes);
    if (status != REBATCH_OK)
        return status; /* it stays spare */
    drop_spare(pool, size);
    pool->spare[size].held--;
    pool->pages_held -= (size_t)1 << size;
    rbi_pool_note_given(pool, bytes);
    return REBATCH_OK;
}

size_t rbi_pages_release(rebatch_pool *pool, size_t keep)
{
    size_t released = 0;
    while (pool->spare_count > keep) {
        const unsigned size = choose_spare(pool, pool->spare_count - keep);
        if (release(pool, size) != REBATCH_OK)
            break;
        released += (size_t)1 << size;
    }
    pool->stats.device_frees += released > 0;
    return released;
}

bool rbi_pages_has_large(const rebatch_pool *pool)
{
    for (unsigned size = 1; size < RBI_CHUNK_SIZES; size++)
        if (pool->spare[size].held > pool->spare[size].count)
            return true;
    return false;
}

/* ---- making it ---- */

static rebatch_status create(rebatch_pool *pool, unsigned size)
{
    rbi_physical physical;
    const size_t bytes = pool->page_bytes << size;
    if (!prepare_spare(&pool->spare[size]))
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory to note another %zu bytes", bytes);
    rebatch_status status = rbi_device_create_physical(pool->device, &physical, bytes);
    if (status == REBATCH_OOM && size == 0 && rbi_ballast_drop(pool))
        status = rbi_device_create_physical(pool->device, &physical, bytes);
    if (status != REBATCH_OK)
        return status;
    put_spare(pool, physical, size);
    pool->spare[size].held++;
    pool->pages_held += (size_t)1 << size;
    rbi_pool_note_taken(pool, bytes);
    return REBATCH_OK;
}

/* The largest size up to `most` that has no more than `count` pages, of which there are some. */
static unsigned largest_within(size_t count, unsigned most)
{
    const unsigned size = 63 - (unsigned)__builtin_clzll(count);
    return size < most ? size : most;
}

/* A sixteenth of the request, so that a request is served by a few calls, or a 128th of what the
 * pool holds, so that a pool that grows does so in few calls. But at most a 1,024th of what the
 * device could still give, and 32 pages: what is left over at the ends of chunks in use is of no
 * use elsewhere, and counts as soon as memory is short. A request of 16 GiB and more takes some
 * hundred chunks all the same. */
#define PARTS_OF_REQUEST 16
#define PARTS_OF_HELD 128
#define PARTS_OF_ROOM 1024
#define ORDINARY_MOST 32
#define PARTS_OF_HUGE 256

static size_t chunk_of(size_t pages)
{
    return (size_t)1 << largest_within(rbi_max(pages, 1), RBI_CHUNK_SIZES - 1);
}

size_t rbi_pages_chunk(const rebatch_pool *pool, size_t count, size_t room)
{
    const size_t wanted = rbi_max(count / PARTS_OF_REQUEST, pool->pages_held / PARTS_OF_HELD);
    const size_t ordinary = rbi_min(rbi_min(wanted, room / PARTS_OF_ROOM), ORDINARY_MOST);
    return chunk_of(rbi_max(ordinary, count / PARTS_OF_HUGE));
}

size_t rbi_pages_chunk_ahead(size_t count)
{
    return chunk_of(count / PARTS_OF_REQUEST);
}

/* Gives what was made since back. */
static void unmake(rebatch_pool *pool, const size_t before[static RBI_CHUNK_SIZES])
{
    for (unsigned size = 0; size < RBI_CHUNK_SIZES; size++)
        while (pool->spare[size].count > before[size] && release(pool, size) == REBATCH_OK)
            ;
}

rebatch_status rbi_pages_create(rebatch_pool *pool, size_t count, size_t chunk)
{
    rbi_assert(count > 0 && chunk > 0 && (chunk & (chunk - 1)) == 0);
    size_t before[RBI_CHUNK_SIZES];
    for (unsigned size = 0; size < RBI_CHUNK_SIZES; size++)
        before[size] = pool->spare[size].count;
    pool->stats.device_allocations++;
    unsigned most = RBI_CHUNK_SIZES - 1; /* what the device has in one chunk */
    for (size_t made = 0; made < count;) {
        const unsigned size = largest_within(rbi_min(count - made, chunk), most);
        const rebatch_status status = create(pool, size);
        if (status == REBATCH_OK) {
            made += (size_t)1 << size;
        } else if (status == REBATCH_OOM && size > 0) {
            most = size - 1;
        } else {
            unmake(pool, before);
            return status;
        }
    }
    return REBATCH_OK;
}

/* Makes smaller ones of a spare chunk, down to single pages. Its memory is the device's in
 * between: somebody else may be quicker to take it. */
static rebatch_status break_chunk(rebatch_pool *pool, unsigned size)
{
    rebatch_status status = release(pool, size);
    if (status == REBATCH_OK)
        status = create(pool, 0);
    while (status == REBATCH_OK && size-- > 0)
        status = create(pool, size);
    return status;
}

/* ---- what is mapped ---- */

/* Of the chunk that begins there. */
static size_t piece_pages(const rebatch_pool *pool, const struct rbi_range *range, size_t index)
{
    const size_t end = range->bytes >> page_shift(pool);
    size_t pages = 1;
    while (index + pages < end && range->pages[index + pages] == RBI_CHUNK_GOES_ON)
        pages++;
    return pages;
}

size_t rbi_pages_in_chunk(const rebatch_pool *pool, const struct rbi_range *range,
                          const char *address)
{
    return piece_pages(pool, range, index_of(pool, range, address));
}

static bool goes_on(const rebatch_pool *pool, const struct rbi_range *range, size_t index)
{
    return index < range->bytes >> page_shift(pool) && range->pages[index] == RBI_CHUNK_GOES_ON;
}

size_t rbi_pages_cut_off(const rebatch_pool *pool, const struct rbi_range *range,
                         const char *address, bool behind)
{
    const size_t index = index_of(pool, range, address);
    size_t count = 0;
    if (behind)
        while (goes_on(pool, range, index + count))
            count++;
    else if (goes_on(pool, range, index))
        while (goes_on(pool, range, index - count++ - 1))
            ;
    return count;
}

size_t rbi_pages_whole(const rebatch_pool *pool, const struct rbi_block *block, char **first)
{
    const size_t offset = (size_t)(block->address - block->range->address);
    const size_t lead = -offset & (pool->page_bytes - 1);
    *first = block->address + lead;
    if (block->bytes < lead)
        return 0;
    return (block->bytes - lead) >> page_shift(pool);
}

size_t rbi_pages_within(const rebatch_pool *pool, const struct rbi_block *block, char **first)
{
    const struct rbi_range *range = block->range;
    size_t count = rbi_pages_whole(pool, block, first);
    size_t index = index_of(pool, range, *first);
    for (; count > 0 && goes_on(pool, range, index); index++, count--)
        *first += pool->page_bytes;
    while (count > 0 && goes_on(pool, range, index + count))
        count--;
    return count;
}

size_t rbi_pages_round(const rebatch_pool *pool, const struct rbi_range *range, char **first,
                       size_t count)
{
    size_t index = index_of(pool, range, *first);
    for (; goes_on(pool, range, index); index--, count++)
        *first -= pool->page_bytes;
    while (goes_on(pool, range, index + count))
        count++;
    return count;
}

char *rbi_pages_unmap(rebatch_pool *pool, const struct rbi_range *range, char *at, const char *to)
{
    while (at < to) {
        const size_t index = index_of(pool, range, at);
        const size_t pages = piece_pages(pool, range, index);
        if (rbi_device_unmap(pool->device, at, pages * pool->page_bytes) != REBATCH_OK)
            break;
        put_spare(pool, range->pages[index], size_of(pages));
        memset(&range->pages[index], 0, pages * sizeof *range->pages);
        at += pages * pool->page_bytes;
    }
    return at;
}

size_t rbi_pages_quarantine(rebatch_pool *pool, struct rbi_block *block, const char *at)
{
    const size_t bytes = rbi_pages_in_chunk(pool, block->range, at) * pool->page_bytes;
    rbi_pool_give_to(pool, block, pool->space);
    block->state = RBI_BLOCK_LOST;
    pool->stats.quarantined_bytes += bytes;
    return bytes;
}

/* Takes back what rbi_pages_map() has mapped before it failed. */
static void unwind(rebatch_pool *pool, struct rbi_block *hole, const char *to)
{
    char *at = hole->address;
    while ((at = rbi_pages_unmap(pool, hole->range, at, to)) < to) {
        const size_t bytes = rbi_pages_quarantine(pool, hole, at);
        RBI_RECORD(pool, MAP, at, bytes, NULL, 0);
        at += bytes;
    }
}

/* Maps the newest spare chunk of a size. */
static rebatch_status map_chunk(rebatch_pool *pool, const struct rbi_range *range, char *at,
                                unsigned size)
{
    const rbi_physical physical = newest_spare(pool, size);
    const rebatch_status status =
        rbi_device_map(pool->device, at, pool->page_bytes << size, physical);
    if (status != REBATCH_OK)
        return status;
    rbi_physical *const slot = &range->pages[index_of(pool, range, at)];
    slot[0] = physical;
    for (size_t i = 1; i < (size_t)1 << size; i++)
        slot[i] = RBI_CHUNK_GOES_ON;
    drop_spare(pool, size);
    return REBATCH_OK;
}

/* Maps the largest chunk that fits; how many pages it has. */
static rebatch_status map_next(size_t *pages, rebatch_pool *pool, struct rbi_block *hole, char *at)
{
    const size_t left = (size_t)(hole->address + hole->bytes - at) >> page_shift(pool);
    unsigned size = choose_spare(pool, left);
    if ((size_t)1 << size > left) {
        const rebatch_status status = break_chunk(pool, size);
        if (status != REBATCH_OK)
            return status;
        size = choose_spare(pool, left);
    }
    *pages = (size_t)1 << size;
    return map_chunk(pool, hole->range, at, size);
}

rebatch_status rbi_pages_map(rebatch_pool *pool, struct rbi_block *hole)
{
    rbi_assert(hole->stream == pool->space && hole->state == RBI_BLOCK_HELD);
    rbi_assert(hole->bytes % pool->page_bytes == 0);
    rbi_assert(hole->bytes / pool->page_bytes <= pool->spare_count);
    const char *const end = hole->address + hole->bytes;
    char *at = hole->address;
    rebatch_status status = REBATCH_OK;
    while (at < end) {
        size_t pages = 0;
        status = map_next(&pages, pool, hole, at);
        if (status != REBATCH_OK)
            break;
        at += pages * pool->page_bytes;
    }
    if (status == REBATCH_OK)
        status = rbi_device_set_access(pool->device, hole->address, hole->bytes);
    if (status == REBATCH_OK)
        RBI_RECORD(pool, MAP, hole->address, hole->bytes, NULL, 0);
    else
        unwind(pool, hole, at);
    return status;
}

/* ---- the end ---- */

/* The chunk that begins with page i, if there is one; its pages. */
static size_t destroy_chunk(rebatch_pool *pool, const struct rbi_range *range, size_t i)
{
    const rbi_physical physical = range->pages[i];
    if (physical == 0)
        return 1;
    const size_t pages = piece_pages(pool, range, i);
    const size_t bytes = pages * pool->page_bytes;
    (void)rbi_device_unmap(pool->device, range->address + i * pool->page_bytes, bytes);
    (void)rbi_device_release_physical(pool->device, physical, bytes);
    return pages;
}

void rbi_pages_destroy(rebatch_pool *pool, struct rbi_range *range)
{
    size_t done = 0;
    for (const struct rbi_block *b = range->first; b; b = b->after) {
        if (b->state == RBI_BLOCK_HOLE)
            continue; /* of most ranges most is */
        const size_t first = index_of(pool, range, b->address);
        const size_t last = index_of(pool, range, b->address + b->bytes - 1);
        for (size_t i = rbi_max(first, done); i <= last; done = i)
            i += destroy_chunk(pool, range, i);
    }
}

void rbi_pages_forget(const rebatch_pool *pool, struct rbi_range *range, size_t first, size_t end)
{
    while (goes_on(pool, range, first))
        first--;
    while (goes_on(pool, range, end))
        end++;
    for (size_t i = first; i < end; i++)
        range->pages[i] = 0;
}

void rbi_pages_destroy_spare(rebatch_pool *pool)
{
    (void)rbi_pages_release(pool, 0);
    for (unsigned size = 0; size < RBI_CHUNK_SIZES; size++)
        rbi_heap_free(pool->spare[size].chunks);
}
