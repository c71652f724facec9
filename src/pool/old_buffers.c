/* Owns whose blocks are resident, and the addresses of old buffers: those that were taken back
 * of a resize, which may free them late, each once, whoever has the address by then.
 * Must not know what a resize is for. */
#include <string.h>

#include "pool/pool.h"

/* More than that are forgotten, the oldest first. */
#define OLD_BUFFERS_MOST 65536

static void forget_oldest(struct rbi_old_buffers *old, size_t count)
{
    old->count -= count;
    memmove(old->entries, old->entries + count, old->count * sizeof *old->entries);
}

static bool prepare(struct rbi_old_buffers *old, size_t more)
{
    if (old->count + more > OLD_BUFFERS_MOST)
        forget_oldest(old, rbi_min(old->count, old->count + more - OLD_BUFFERS_MOST));
    if (old->count + more <= old->capacity)
        return true;
    const size_t capacity = 2 * (old->count + more);
    struct rbi_old_buffer *const entries = rbi_heap_calloc(capacity, sizeof *entries);
    if (!entries)
        return false;
    if (old->count)
        memcpy(entries, old->entries, old->count * sizeof *entries);
    rbi_heap_free(old->entries);
    old->entries = entries;
    old->capacity = capacity;
    return true;
}

static void add(struct rbi_old_buffers *old, const void *address, uint64_t owner)
{
    if (old->count < old->capacity)
        old->entries[old->count++] = (struct rbi_old_buffer){address, owner, false};
}

void rbi_old_buffers_add(rebatch_pool *pool, const struct rbi_block *block)
{
    rbi_assert(block->resident != 0);
    add(&pool->old_buffers, block->address, pool->residents[block->resident].owner);
}

void rbi_old_buffers_note(rebatch_pool *pool, const void *address)
{
    add(&pool->old_buffers, address, pool->old_buffers.owner);
}

bool rbi_old_buffers_take(rebatch_pool *pool, const void *address)
{
    struct rbi_old_buffers *const old = &pool->old_buffers;
    for (size_t i = old->count; i-- > 0;) {
        struct rbi_old_buffer *const entry = &old->entries[i];
        if (entry->address == address && entry->owner == old->owner && !entry->is_taken) {
            entry->is_taken = true;
            old->freed++;
            return true;
        }
    }
    return false;
}

void rbi_old_buffers_forget(struct rbi_old_buffers *old, const void *address)
{
    for (size_t i = old->count; i-- > 0;)
        if (old->entries[i].address == address) {
            old->entries[i] = old->entries[--old->count];
            return;
        }
}

static size_t count_of_owner(const struct rbi_old_buffers *old)
{
    size_t count = 0;
    for (size_t i = 0; i < old->count; i++)
        count += old->entries[i].owner == old->owner;
    return count;
}

void rbi_old_buffers_begin(rebatch_pool *pool, uint64_t owner)
{
    struct rbi_old_buffers *const old = &pool->old_buffers;
    rbi_lock_take(&pool->lock);
    old->has_failed = old->has_failed && old->owner == owner;
    old->owner = owner;
    if (!old->has_failed)
        old->held = count_of_owner(old);
    old->is_open = true;
    old->freed = 0;
    old->doubtful = NULL;
    rbi_pool_give_lock(pool);
}

/* The blocks in use that the call has made, those that are resident, and those that wait to be free
 * (rbi_old_buffers_finish_frees()). */
static size_t count_blocks(const rebatch_pool *pool, uint64_t first_sequence)
{
    size_t count = 0;
    const struct rbi_block *const ring = &pool->by_sequence;
    for (const struct rbi_block *b = ring->previous; b != ring; b = b->previous)
        count += b->resident || (b->sequence >= first_sequence && !b->outside) ||
                 b->state == RBI_BLOCK_DEFERRED;
    return count;
}

rebatch_status rbi_old_buffers_prepare(rebatch_pool *pool, uint64_t first_sequence)
{
    rbi_lock_take(&pool->lock);
    pool->old_buffers.is_open = false;
    const bool has_room = prepare(&pool->old_buffers, count_blocks(pool, first_sequence));
    rbi_pool_give_lock(pool);
    return has_room ? REBATCH_OK
                    : rbi_error(REBATCH_E_HOST_OOM, "no host memory to note the buffers of a size");
}

/* A later call of the same resize has what this one made. */
static void forget_owner(struct rbi_old_buffers *old)
{
    size_t kept = 0;
    for (size_t i = 0; i < old->count; i++)
        if (old->entries[i].owner != old->owner)
            old->entries[kept++] = old->entries[i];
    old->count = kept;
}

static void keep_resident(rebatch_pool *pool)
{
    pool->residents[pool->resident_of].owner = pool->old_buffers.owner;
    forget_owner(&pool->old_buffers);
}

static size_t count_made(const rebatch_pool *pool, uint64_t first_sequence)
{
    size_t made = 0;
    const struct rbi_block *const ring = &pool->by_sequence;
    for (const struct rbi_block *b = ring->previous; b != ring && b->sequence >= first_sequence;
         b = b->previous)
        made += b->resident || !b->outside;
    return made;
}

/* Whether the block that is doubtful is new, and the call has freed as many blocks that were there
 * before as it has made new ones, or as there were: then the frees were meant for the old ones. */
static bool has_freed_all(const rebatch_pool *pool, uint64_t first_sequence, size_t made)
{
    const struct rbi_old_buffers *const old = &pool->old_buffers;
    const struct rbi_block *const block =
        old->doubtful ? rbi_table_find(&pool->heap.table, old->doubtful) : NULL;
    const size_t least = old->has_failed ? rbi_min(made, old->held) : made;
    return block && block->sequence >= first_sequence && old->freed >= least;
}

/* The next call may find the pointers of before this one, and those of this one. */
static void keep_all(rebatch_pool *pool, uint64_t first_sequence)
{
    struct rbi_old_buffers *const old = &pool->old_buffers;
    for (size_t i = 0; i < old->count; i++)
        if (old->entries[i].owner == old->owner)
            old->entries[i].is_taken = false;
    const struct rbi_block *const ring = &pool->by_sequence;
    for (const struct rbi_block *b = ring->previous; b != ring && b->sequence >= first_sequence;
         b = b->previous)
        if (!b->outside)
            add(old, b->address, old->owner);
}

const void *rbi_old_buffers_end(rebatch_pool *pool, uint64_t first_sequence, bool has_failed)
{
    rbi_lock_take(&pool->lock);
    struct rbi_old_buffers *const old = &pool->old_buffers;
    const size_t made = count_made(pool, first_sequence);
    const void *const doubtful = has_freed_all(pool, first_sequence, made) ? NULL : old->doubtful;
    if (has_failed)
        keep_all(pool, first_sequence);
    else
        keep_resident(pool);
    old->has_failed = has_failed;
    old->held = old->held + made - rbi_min(old->held + made, old->freed);
    rbi_pool_give_lock(pool);
    return doubtful;
}

/* ---- whose they are ---- */

unsigned rbi_residents_open(rebatch_pool *pool)
{
    unsigned number = 1;
    rbi_lock_take(&pool->lock);
    while (number < RBI_POOL_RESIDENTS && pool->residents[number].is_open)
        number++;
    if (number < RBI_POOL_RESIDENTS)
        pool->residents[number] = (struct rbi_residents){.is_open = true};
    rbi_pool_give_lock(pool);
    return number < RBI_POOL_RESIDENTS ? number : 0;
}

void rbi_residents_close(rebatch_pool *pool, unsigned number)
{
    rbi_lock_take(&pool->lock);
    pool->residents[number].is_open = pool->residents[number].bytes != 0;
    rbi_pool_give_lock(pool);
}

unsigned rbi_residents_enter(rebatch_pool *pool, unsigned number)
{
    rbi_lock_take(&pool->lock);
    const unsigned before = pool->resident_of;
    pool->resident_of = number;
    rbi_pool_give_lock(pool);
    return before;
}

void rbi_old_buffers_destroy(struct rbi_old_buffers *old)
{
    rbi_heap_free(old->entries);
}
