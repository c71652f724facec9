/* Owns whose blocks are resident, and the addresses of former buffers: those that were taken back
 * of a resize, which may free them late, each once, whoever has the address by then.
 * Must not know what a resize is for. */
#include <string.h>

#include "pool/pool.h"

/* More than that are forgotten, the oldest first. */
#define FORMER_MOST 65536

static void forget_oldest(struct rbi_former *former, size_t count)
{
    former->count -= count;
    memmove(former->entries, former->entries + count, former->count * sizeof *former->entries);
}

static bool prepare(struct rbi_former *former, size_t more)
{
    if (former->count + more > FORMER_MOST)
        forget_oldest(former, rbi_min(former->count, former->count + more - FORMER_MOST));
    if (former->count + more <= former->capacity)
        return true;
    const size_t capacity = 2 * (former->count + more);
    struct rbi_former_entry *const entries = rbi_heap_calloc(capacity, sizeof *entries);
    if (!entries)
        return false;
    if (former->count)
        memcpy(entries, former->entries, former->count * sizeof *entries);
    rbi_heap_free(former->entries);
    former->entries = entries;
    former->capacity = capacity;
    return true;
}

static void add(struct rbi_former *former, const void *address, uint64_t owner)
{
    if (former->count < former->capacity)
        former->entries[former->count++] = (struct rbi_former_entry){address, owner, false};
}

void rbi_former_add(rebatch_pool *pool, const struct rbi_block *block)
{
    rbi_assert(block->resident != 0);
    add(&pool->former, block->address, pool->residents[block->resident].owner);
}

void rbi_former_note(rebatch_pool *pool, const void *address)
{
    add(&pool->former, address, pool->former.owner);
}

bool rbi_former_take(rebatch_pool *pool, const void *address)
{
    struct rbi_former *const former = &pool->former;
    for (size_t i = former->count; i-- > 0;) {
        struct rbi_former_entry *const entry = &former->entries[i];
        if (entry->address == address && entry->owner == former->owner && !entry->is_taken) {
            entry->is_taken = true;
            return true;
        }
    }
    return false;
}

void rbi_former_forget(struct rbi_former *former, const void *address)
{
    for (size_t i = former->count; i-- > 0;)
        if (former->entries[i].address == address) {
            former->entries[i] = former->entries[--former->count];
            return;
        }
}

void rbi_former_begin(rebatch_pool *pool, uint64_t owner)
{
    rbi_lock_take(&pool->lock);
    pool->former.owner = owner;
    pool->former.is_open = true;
    pool->former.doubtful = NULL;
    rbi_pool_give_lock(pool);
}

/* The blocks in use that the call has made, those that are resident, and those that wait to be free
 * (rbi_former_finish_frees()). */
static size_t count_blocks(const rebatch_pool *pool, uint64_t first_sequence)
{
    size_t count = 0;
    const struct rbi_block *const ring = &pool->by_sequence;
    for (const struct rbi_block *b = ring->previous; b != ring; b = b->previous)
        count += b->resident || (b->sequence >= first_sequence && !b->outside) ||
                 b->state == RBI_BLOCK_DEFERRED;
    return count;
}

rebatch_status rbi_former_prepare(rebatch_pool *pool, uint64_t first_sequence)
{
    rbi_lock_take(&pool->lock);
    pool->former.is_open = false;
    const bool has_room = prepare(&pool->former, count_blocks(pool, first_sequence));
    rbi_pool_give_lock(pool);
    return has_room ? REBATCH_OK
                    : rbi_error(REBATCH_E_HOST_OOM, "no host memory to note the buffers of a size");
}

/* A later call of the same resize has what this one made. */
static void forget_owner(struct rbi_former *former)
{
    size_t kept = 0;
    for (size_t i = 0; i < former->count; i++)
        if (former->entries[i].owner != former->owner)
            former->entries[kept++] = former->entries[i];
    former->count = kept;
}

static void keep_resident(rebatch_pool *pool)
{
    pool->residents[pool->resident_of].owner = pool->former.owner;
    forget_owner(&pool->former);
}

/* Whether the block that is doubtful is new, and the call has freed as many old buffers as it has
 * made new ones: then the frees were meant for the old ones. */
static bool has_freed_all(const rebatch_pool *pool, uint64_t first_sequence)
{
    size_t taken = 0, made = 0;
    const void *const doubtful = pool->former.doubtful;
    const struct rbi_block *const block =
        doubtful ? rbi_table_find(&pool->heap.table, doubtful) : NULL;
    if (!block || block->sequence < first_sequence)
        return false;
    for (size_t i = 0; i < pool->former.count; i++)
        taken +=
            pool->former.entries[i].owner == pool->former.owner && pool->former.entries[i].is_taken;
    const struct rbi_block *const ring = &pool->by_sequence;
    for (const struct rbi_block *b = ring->previous; b != ring && b->sequence >= first_sequence;
         b = b->previous)
        made += b->resident != 0;
    return taken >= made;
}

/* The next call may find the pointers of before this one, and those of this one. */
static void keep_all(rebatch_pool *pool, uint64_t first_sequence)
{
    struct rbi_former *const former = &pool->former;
    for (size_t i = 0; i < former->count; i++)
        if (former->entries[i].owner == former->owner)
            former->entries[i].is_taken = false;
    const struct rbi_block *const ring = &pool->by_sequence;
    for (const struct rbi_block *b = ring->previous; b != ring && b->sequence >= first_sequence;
         b = b->previous)
        if (!b->outside)
            add(former, b->address, former->owner);
}

const void *rbi_former_end(rebatch_pool *pool, uint64_t first_sequence, bool has_failed)
{
    rbi_lock_take(&pool->lock);
    const void *const doubtful = has_freed_all(pool, first_sequence) ? NULL : pool->former.doubtful;
    if (has_failed)
        keep_all(pool, first_sequence);
    else
        keep_resident(pool);
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

void rbi_former_destroy(struct rbi_former *former)
{
    rbi_heap_free(former->entries);
}
