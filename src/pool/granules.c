/* Owns physical memory: making it, keeping what is spare of it, mapping and unmapping it.
 * Must not know blocks' lives, nor what memory is asked for.
 *
 * Most pieces are one granule each: a larger piece can only be unmapped as a whole, and keeps free
 * memory from where it is needed. Where much is taken ahead of its use it comes in chunks all the
 * same: making, mapping and giving back one of them takes as long as of one granule. */
#include "pool/pool.h"

static unsigned granule_shift(const rebatch_pool *pool)
{
    return (unsigned)__builtin_ctzll(pool->granule_bytes);
}

static size_t index_of(const rebatch_pool *pool, const struct rbi_range *range, const char *address)
{
    return (size_t)(address - range->address) >> granule_shift(pool);
}

/* ---- what is spare ---- */

/* There is space for all that are held, so that an unmapped one always has a place. */
static bool prepare_spare(rebatch_pool *pool, size_t more)
{
    size_t capacity = rbi_max(pool->single_capacity, 64);
    while (capacity < pool->granules_held + more)
        capacity *= 2;
    if (capacity == pool->single_capacity)
        return true;
    rbi_physical *singles = rbi_heap_resize(pool->singles, capacity, sizeof *singles);
    if (!singles)
        return false;
    pool->singles = singles;
    pool->single_capacity = capacity;
    return true;
}

static bool prepare_chunks(rebatch_pool *pool, size_t more)
{
    const size_t needed = pool->chunks_held + more;
    if (needed <= pool->chunk_capacity)
        return true;
    const size_t capacity = rbi_max(needed, 2 * pool->chunk_capacity);
    struct rbi_chunk *chunks = rbi_heap_resize(pool->chunks, capacity, sizeof *chunks);
    if (!chunks)
        return false;
    pool->chunks = chunks;
    pool->chunk_capacity = capacity;
    return true;
}

static void put_spare(rebatch_pool *pool, rbi_physical physical, size_t granules)
{
    pool->spare_count += granules;
    if (granules == 1)
        pool->singles[pool->single_count++] = physical;
    else
        pool->chunks[pool->chunk_count++] = (struct rbi_chunk){physical, granules};
}

static void drop_single(rebatch_pool *pool)
{
    pool->single_count--;
    pool->spare_count--;
}

static void drop_chunk(rebatch_pool *pool)
{
    pool->spare_count -= pool->chunks[--pool->chunk_count].granules;
}

static rebatch_status release(rebatch_pool *pool, rbi_physical physical, size_t granules)
{
    const size_t bytes = granules * pool->granule_bytes;
    const rebatch_status status = rbi_device_release_physical(pool->device, physical, bytes);
    if (status != REBATCH_OK)
        return status; /* it stays spare */
    pool->granules_held -= granules;
    pool->chunks_held -= granules > 1;
    rbi_pool_note_given(pool, bytes);
    return REBATCH_OK;
}

/* Chunks first: the fewest calls. A chunk goes where as much is to go, or nothing else is left. */
static size_t release_one(rebatch_pool *pool, size_t most)
{
    const struct rbi_chunk *chunk = pool->chunk_count ? &pool->chunks[pool->chunk_count - 1] : NULL;
    if (chunk && (chunk->granules <= most || pool->single_count == 0)) {
        const size_t granules = chunk->granules;
        if (release(pool, chunk->physical, granules) != REBATCH_OK)
            return 0;
        drop_chunk(pool);
        return granules;
    }
    if (pool->single_count == 0 ||
        release(pool, pool->singles[pool->single_count - 1], 1) != REBATCH_OK)
        return 0;
    drop_single(pool);
    return 1;
}

size_t rbi_granules_release(rebatch_pool *pool, size_t keep)
{
    size_t released = 0;
    while (pool->spare_count > keep) {
        const size_t granules = release_one(pool, pool->spare_count - keep);
        if (granules == 0)
            break;
        released += granules;
    }
    pool->stats.device_frees += released > 0;
    return released;
}

/* ---- making it ---- */

static rebatch_status create(rebatch_pool *pool, size_t granules)
{
    rbi_physical physical;
    const size_t bytes = granules * pool->granule_bytes;
    rebatch_status status = rbi_device_create_physical(pool->device, &physical, bytes);
    if (status == REBATCH_OOM && rbi_ballast_drop(pool))
        status = rbi_device_create_physical(pool->device, &physical, bytes);
    if (status != REBATCH_OK)
        return status;
    put_spare(pool, physical, granules);
    pool->granules_held += granules;
    pool->chunks_held += granules > 1;
    rbi_pool_note_taken(pool, bytes);
    return REBATCH_OK;
}

static rebatch_status no_heap_for(size_t count)
{
    return rbi_error(REBATCH_E_HOST_OOM, "no host memory to note %zu granules", count);
}

rebatch_status rbi_granules_create(rebatch_pool *pool, size_t count)
{
    if (!prepare_spare(pool, count))
        return no_heap_for(count);
    pool->stats.device_allocations++;
    for (size_t made = 0; made < count; made++) {
        const rebatch_status status = create(pool, 1);
        if (status == REBATCH_OK)
            continue;
        while (made > 0 && release(pool, pool->singles[pool->single_count - 1], 1) == REBATCH_OK) {
            drop_single(pool);
            made--;
        }
        return status;
    }
    return REBATCH_OK;
}

size_t rbi_chunks_create(rebatch_pool *pool, size_t count)
{
    const size_t chunks = count / RBI_CHUNK_GRANULES;
    if (chunks < RBI_CHUNKS_LEAST || !prepare_spare(pool, count) || !prepare_chunks(pool, chunks))
        return 0;
    size_t made = 0;
    for (size_t i = 0; i < chunks && create(pool, RBI_CHUNK_GRANULES) == REBATCH_OK; i++)
        made += RBI_CHUNK_GRANULES;
    pool->stats.device_allocations += made > 0;
    return made;
}

/* Makes granules of a spare chunk. Its memory is the device's in between: somebody else may be
 * quicker to take it. */
static rebatch_status break_chunk(rebatch_pool *pool)
{
    const struct rbi_chunk chunk = pool->chunks[pool->chunk_count - 1];
    const rebatch_status status = release(pool, chunk.physical, chunk.granules);
    if (status != REBATCH_OK)
        return status;
    drop_chunk(pool);
    return rbi_granules_create(pool, chunk.granules);
}

/* ---- what is mapped ---- */

/* Of the piece that begins there. */
static size_t piece_granules(const rebatch_pool *pool, const struct rbi_range *range, size_t index)
{
    const size_t end = range->bytes >> granule_shift(pool);
    size_t granules = 1;
    while (index + granules < end && range->granules[index + granules] == RBI_CHUNK_GOES_ON)
        granules++;
    return granules;
}

size_t rbi_granules_piece(const rebatch_pool *pool, const struct rbi_range *range,
                          const char *address)
{
    return piece_granules(pool, range, index_of(pool, range, address));
}

static bool goes_on(const rebatch_pool *pool, const struct rbi_range *range, size_t index)
{
    return index < range->bytes >> granule_shift(pool) &&
           range->granules[index] == RBI_CHUNK_GOES_ON;
}

size_t rbi_granules_whole(const rebatch_pool *pool, const struct rbi_block *block, char **first)
{
    const size_t offset = (size_t)(block->address - block->range->address);
    const size_t lead = -offset & (pool->granule_bytes - 1);
    *first = block->address + lead;
    if (block->bytes < lead)
        return 0;
    return (block->bytes - lead) >> granule_shift(pool);
}

size_t rbi_granules_within(const rebatch_pool *pool, const struct rbi_block *block, char **first)
{
    const struct rbi_range *range = block->range;
    size_t count = rbi_granules_whole(pool, block, first);
    size_t index = index_of(pool, range, *first);
    for (; count > 0 && goes_on(pool, range, index); index++, count--)
        *first += pool->granule_bytes;
    while (count > 0 && goes_on(pool, range, index + count))
        count--;
    return count;
}

size_t rbi_granules_round(const rebatch_pool *pool, const struct rbi_range *range, char **first,
                          size_t count)
{
    size_t index = index_of(pool, range, *first);
    for (; goes_on(pool, range, index); index--, count++)
        *first -= pool->granule_bytes;
    while (goes_on(pool, range, index + count))
        count++;
    return count;
}

char *rbi_granules_unmap(rebatch_pool *pool, const struct rbi_range *range, char *at,
                         const char *to)
{
    while (at < to) {
        const size_t index = index_of(pool, range, at);
        const size_t granules = piece_granules(pool, range, index);
        if (rbi_device_unmap(pool->device, at, granules * pool->granule_bytes) != REBATCH_OK)
            break;
        put_spare(pool, range->granules[index], granules);
        memset(&range->granules[index], 0, granules * sizeof *range->granules);
        at += granules * pool->granule_bytes;
    }
    return at;
}

size_t rbi_granules_quarantine(rebatch_pool *pool, struct rbi_block *block, const char *at)
{
    const size_t bytes = rbi_granules_piece(pool, block->range, at) * pool->granule_bytes;
    rbi_pool_give_to(block, pool->space);
    block->state = RBI_BLOCK_LOST;
    pool->stats.quarantined_bytes += bytes;
    return bytes;
}

/* Takes back what rbi_granules_map() has mapped before it failed. */
static void unwind(rebatch_pool *pool, struct rbi_block *hole, const char *to)
{
    char *at = hole->address;
    while ((at = rbi_granules_unmap(pool, hole->range, at, to)) < to) {
        const size_t bytes = rbi_granules_quarantine(pool, hole, at);
        RBI_RECORD(pool, MAP, at, bytes, NULL, 0);
        at += bytes;
    }
}

static rebatch_status map_piece(rebatch_pool *pool, const struct rbi_range *range, char *at,
                                rbi_physical physical, size_t granules)
{
    const rebatch_status status =
        rbi_device_map(pool->device, at, granules * pool->granule_bytes, physical);
    if (status != REBATCH_OK)
        return status;
    rbi_physical *const slot = &range->granules[index_of(pool, range, at)];
    slot[0] = physical;
    for (size_t i = 1; i < granules; i++)
        slot[i] = RBI_CHUNK_GOES_ON;
    return REBATCH_OK;
}

/* Maps the next piece: a chunk where one fits; how many granules it has. */
static rebatch_status map_next(size_t *granules, rebatch_pool *pool, struct rbi_block *hole,
                               char *at)
{
    const size_t left = (size_t)(hole->address + hole->bytes - at) >> granule_shift(pool);
    const struct rbi_chunk *chunk = pool->chunk_count ? &pool->chunks[pool->chunk_count - 1] : NULL;
    rebatch_status status;
    if (chunk && chunk->granules <= left) {
        *granules = chunk->granules;
        status = map_piece(pool, hole->range, at, chunk->physical, chunk->granules);
        if (status == REBATCH_OK)
            drop_chunk(pool);
        return status;
    }
    if (pool->single_count == 0 && (status = break_chunk(pool)) != REBATCH_OK)
        return status;
    *granules = 1;
    status = map_piece(pool, hole->range, at, pool->singles[pool->single_count - 1], 1);
    if (status == REBATCH_OK)
        drop_single(pool);
    return status;
}

rebatch_status rbi_granules_map(rebatch_pool *pool, struct rbi_block *hole)
{
    const char *const end = hole->address + hole->bytes;
    char *at = hole->address;
    rebatch_status status = REBATCH_OK;
    while (at < end) {
        size_t granules = 0;
        status = map_next(&granules, pool, hole, at);
        if (status != REBATCH_OK)
            break;
        at += granules * pool->granule_bytes;
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

/* The piece that begins with granule i, if there is one; its granules. */
static size_t destroy_piece(rebatch_pool *pool, const struct rbi_range *range, size_t i)
{
    const rbi_physical physical = range->granules[i];
    if (physical == 0)
        return 1;
    const size_t granules = piece_granules(pool, range, i);
    const size_t bytes = granules * pool->granule_bytes;
    (void)rbi_device_unmap(pool->device, range->address + i * pool->granule_bytes, bytes);
    (void)rbi_device_release_physical(pool->device, physical, bytes);
    return granules;
}

void rbi_granules_destroy(rebatch_pool *pool, struct rbi_range *range)
{
    size_t done = 0;
    for (const struct rbi_block *b = range->first; b; b = b->after) {
        if (b->state == RBI_BLOCK_HOLE)
            continue; /* of most ranges most is */
        const size_t first = index_of(pool, range, b->address);
        const size_t last = index_of(pool, range, b->address + b->bytes - 1);
        for (size_t i = rbi_max(first, done); i <= last; done = i)
            i += destroy_piece(pool, range, i);
    }
}

void rbi_granules_forget(const rebatch_pool *pool, struct rbi_range *range, size_t first,
                         size_t end)
{
    while (goes_on(pool, range, first))
        first--;
    while (goes_on(pool, range, end))
        end++;
    for (size_t i = first; i < end; i++)
        range->granules[i] = 0;
}

void rbi_granules_destroy_spare(rebatch_pool *pool)
{
    (void)rbi_granules_release(pool, 0);
    rbi_heap_free(pool->singles);
    rbi_heap_free(pool->chunks);
}
