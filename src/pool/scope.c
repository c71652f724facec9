/* Owns the stack of scopes: what was allocated inside, which frees wait, and undoing it all.
 * Must not know how memory is found.
 *
 * Blocks in use stand in one list by sequence, so a scope is the end of that list from its first
 * sequence on, but for blocks from outside: beginning and committing move nothing. */
#include "pool/pool.h"

#define INDEX_BITS 6
_Static_assert(RBI_POOL_SCOPES == 1 << INDEX_BITS, "a handle holds the index of its scope");

static struct rbi_scope *innermost(rebatch_pool *pool)
{
    return pool->depth ? &pool->scopes[pool->depth - 1] : NULL;
}

/* The open scope with this handle; NULL when there is none. */
static struct rbi_scope *find_open(rebatch_pool *pool, rebatch_scope handle)
{
    const size_t index = handle & (RBI_POOL_SCOPES - 1);
    if (index >= pool->depth || pool->scopes[index].handle != handle)
        return NULL;
    return &pool->scopes[index];
}

static rebatch_status refuse_scope(rebatch_scope handle)
{
    return rbi_error(REBATCH_E_INVALID, "scope is %u: expected one that is open", (unsigned)handle);
}

static rebatch_status begin_locked(rebatch_scope *out, rebatch_pool *pool, uint64_t owner_thread,
                                   bool is_phase, bool observes)
{
    rbi_assert(rbi_lock_is_held(&pool->lock));
    if (pool->depth == RBI_POOL_SCOPES)
        return rbi_error(REBATCH_E_UNSUPPORTED, "%d scopes are open: expected no more",
                         RBI_POOL_SCOPES);
    /* The serial makes a stale handle known; it is never 0, so that no handle is. */
    const uint32_t serials = UINT32_MAX >> INDEX_BITS;
    pool->scope_serial = pool->scope_serial == serials ? 1 : pool->scope_serial + 1;
    struct rbi_scope *scope = &pool->scopes[pool->depth];
    *scope = (struct rbi_scope){.handle = pool->scope_serial << INDEX_BITS | (uint32_t)pool->depth,
                                .first_sequence = pool->sequence,
                                .live_at_begin = pool->stats.live_bytes,
                                .live_most = pool->stats.live_bytes,
                                .owner_thread = owner_thread,
                                .is_phase = is_phase,
                                .observes = observes};
    pool->depth++;
    pool->undoing += !observes;
    pool->owner_thread = owner_thread;
    pool->quiet_bytes = pool->stats.live_bytes;
    *out = scope->handle;
    return REBATCH_OK;
}

rebatch_status rebatch_scope_begin(rebatch_scope *out, rebatch_pool *pool)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL: expected where to put the scope");
    *out = 0;
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    rbi_lock_take(&pool->lock);
    status = begin_locked(out, pool, pool->owner_thread, false, false);
    rbi_pool_give_lock(pool);
    return status;
}

rebatch_status rbi_scope_begin_phase(rebatch_scope *out, rebatch_pool *pool, bool observes,
                                     uint64_t key)
{
    *out = 0;
    const uint64_t owner = observes ? 0 : rbi_thread_number();
    rebatch_status status = rbi_pool_take_lock_awake(pool);
    if (status != REBATCH_OK)
        return status;
    status = begin_locked(out, pool, owner, true, observes);
    if (status == REBATCH_OK)
        rbi_pool_begin_phase(pool, key);
    rbi_pool_give_lock(pool);
    return status;
}

/* Takes the next of the frees that wait in a scope; NULL when none is left. */
static struct rbi_block *pop_deferred(struct rbi_scope *scope)
{
    struct rbi_block *block = scope->deferred;
    if (block) {
        rbi_assert(block->state == RBI_BLOCK_DEFERRED);
        scope->deferred = block->next_deferred;
        block->next_deferred = NULL;
    }
    return block;
}

static void close_innermost(rebatch_pool *pool)
{
    rbi_assert(pool->depth > 0);
    const struct rbi_scope *const scope = innermost(pool);
    pool->depth--;
    pool->undoing -= !scope->observes;
    pool->owner_thread = pool->depth ? scope[-1].owner_thread : 0;
    if (pool->depth)
        rbi_scope_fold(innermost(pool), scope);
    rbi_pool_set_quiet(pool);
}

static void commit_innermost(rebatch_pool *pool)
{
    struct rbi_scope *scope = innermost(pool);
    close_innermost(pool);
    struct rbi_block *block;
    while ((block = pop_deferred(scope))) {
        if (rbi_pool_has_younger_scope(pool, block)) {
            rbi_scope_push_deferred(innermost(pool), block);
            continue;
        }
        rbi_assert(pool->stats.deferred_bytes >= block->bytes);
        pool->stats.deferred_bytes -= block->bytes;
        rbi_pool_drop_block(pool, block, false);
    }
}

static rebatch_status commit_locked(rebatch_pool *pool, rebatch_scope scope)
{
    rbi_assert(rbi_lock_is_held(&pool->lock));
    const struct rbi_scope *open = find_open(pool, scope);
    if (!open)
        return refuse_scope(scope);
    if (open != innermost(pool))
        return rbi_error(REBATCH_E_INVALID, "scope is %u: expected the innermost open one, %u",
                         (unsigned)scope, (unsigned)innermost(pool)->handle);
    commit_innermost(pool);
    return REBATCH_OK;
}

rebatch_status rebatch_scope_commit(rebatch_pool *pool, rebatch_scope scope)
{
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    rbi_lock_take(&pool->lock);
    status = commit_locked(pool, scope);
    rbi_pool_end_free(pool);
    return status;
}

void rbi_scope_commit_all(rebatch_pool *pool, rebatch_scope scope)
{
    if (rbi_pool_check(pool) != REBATCH_OK)
        return;
    rbi_lock_take(&pool->lock);
    const struct rbi_scope *open = find_open(pool, scope);
    const size_t outside = open ? (size_t)(open - pool->scopes) : pool->depth;
    while (pool->depth > outside)
        commit_innermost(pool);
    rbi_pool_end_free(pool);
}

/* Where a free waits that no thread's own scope is to hold back: the innermost scope of all
 * threads, if the block is older. */
static struct rbi_scope *find_waiting_place(rebatch_pool *pool, const struct rbi_block *block)
{
    struct rbi_scope *const all = rbi_scope_of_all(pool);
    return all && block->sequence < all->first_sequence ? all : NULL;
}

/* Carries out a deferred free that no thread's own scope is to hold back. */
static void finish_free(rebatch_pool *pool, struct rbi_block *block, bool is_taken_back)
{
    struct rbi_scope *const place = find_waiting_place(pool, block);
    if (place) {
        rbi_scope_push_deferred(place, block);
        return;
    }
    pool->stats.deferred_bytes -= block->bytes;
    rbi_scope_pass_over(pool, block, false);
    rbi_pool_drop_block(pool, block, is_taken_back);
}

/* The block at an address, out of the frees that wait in a scope; NULL when it is not there. */
static struct rbi_block *take_deferred(struct rbi_scope *scope, const void *address)
{
    struct rbi_block **link = &scope->deferred;
    while (*link && (*link)->address != address)
        link = &(*link)->next_deferred;
    struct rbi_block *const block = *link;
    if (block) {
        *link = block->next_deferred;
        block->next_deferred = NULL;
    }
    return block;
}

/* Past the scopes around it: what was freed is free, and what was allocated is of no scope. */
static void commit_past(rebatch_pool *pool, struct rbi_scope *scope, bool is_resident)
{
    const uint64_t first_sequence = scope->first_sequence;
    rbi_plan_end(pool);
    close_innermost(pool);
    struct rbi_block *block;
    while ((block = pop_deferred(scope)))
        finish_free(pool, block, false);
    const bool has_owner = pool->owner_thread != 0;
    for (struct rbi_block *b = pool->by_sequence.previous;
         (has_owner || is_resident) && b != &pool->by_sequence && b->sequence >= first_sequence;
         b = b->previous) {
        if (b->outside)
            continue;
        b->resident = (is_resident ? pool->resident_of : 0) % RBI_POOL_RESIDENTS;
        pool->residents[b->resident].bytes += is_resident ? b->bytes : 0;
        if (!has_owner)
            continue;
        b->outside = true;
        rbi_scope_pass_over(pool, b, true);
    }
}

static rebatch_status commit_innermost_past(rebatch_pool *pool, rebatch_scope handle,
                                            bool is_resident)
{
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    rbi_pool_take_lock(pool);
    struct rbi_scope *const scope = find_open(pool, handle);
    if (scope && scope == innermost(pool))
        commit_past(pool, scope, is_resident);
    else
        status = refuse_scope(handle);
    rbi_pool_end_free(pool);
    return status;
}

rebatch_status rbi_scope_commit_finally(rebatch_pool *pool, rebatch_scope scope)
{
    return commit_innermost_past(pool, scope, false);
}

rebatch_status rbi_scope_commit_resident(rebatch_pool *pool, rebatch_scope scope)
{
    return commit_innermost_past(pool, scope, true);
}

/* Makes the block's free a deferred one that is in no scope's list; false: it is lost there. */
static bool take_out_of_use(rebatch_pool *pool, struct rbi_block *block)
{
    if (block->state == RBI_BLOCK_LIVE) {
        block->state = RBI_BLOCK_DEFERRED;
        pool->stats.deferred_bytes += block->bytes;
        return true;
    }
    for (size_t i = pool->depth; i-- > 0;)
        if (take_deferred(&pool->scopes[i], block->address))
            return true;
    return false;
}

void rbi_pool_free_resident(rebatch_pool *pool)
{
    rbi_pool_take_lock(pool);
    const struct rbi_block *const ring = &pool->by_sequence;
    uint64_t *const left = &pool->residents[pool->resident_of].bytes;
    pool->heap.late.rollback += *left > 0; /* as whose late frees are known */
    for (struct rbi_block *b = ring->next, *next; *left && b != ring; b = next) {
        next = b->next;
        if (b->resident != pool->resident_of || !take_out_of_use(pool, b))
            continue;
        rbi_late_own(&pool->heap.late, b->address, pool->residents[b->resident].owner);
        *left -= b->bytes;
        b->resident = 0;
        rbi_pool_tell(pool, RBI_POOL_FREE, b->address, 0, NULL);
        finish_free(pool, b, true);
    }
    rbi_pool_end_free(pool);
}

uint64_t rbi_pool_resident_bytes(rebatch_pool *pool)
{
    rbi_lock_take(&pool->lock);
    const uint64_t bytes = pool->residents[pool->resident_of].bytes;
    rbi_pool_give_lock(pool);
    return bytes;
}

void rbi_scope_free_waiting(rebatch_pool *pool, const void *address)
{
    rbi_pool_take_lock(pool);
    struct rbi_block *block = NULL;
    for (size_t i = pool->depth; !block && i-- > 0 && pool->scopes[i].owner_thread != 0;)
        block = take_deferred(&pool->scopes[i], address);
    if (block)
        finish_free(pool, block, false);
    rbi_pool_end_free(pool);
}

void rbi_scope_revive(rebatch_pool *pool, rebatch_scope handle,
                      bool (*is_known)(void *user, const void *address), void *user)
{
    rbi_pool_take_lock(pool);
    struct rbi_scope *const scope = find_open(pool, handle);
    struct rbi_block *block = scope ? scope->deferred : NULL;
    if (scope)
        scope->deferred = NULL;
    while (block) {
        struct rbi_block *const next = block->next_deferred;
        if (is_known(user, block->address)) {
            pool->stats.deferred_bytes -= block->bytes;
            block->state = RBI_BLOCK_LIVE;
            block->next_deferred = NULL;
        } else {
            rbi_scope_push_deferred(scope, block);
        }
        block = next;
    }
    rbi_pool_give_lock(pool);
}

rebatch_status rbi_pool_available_resident(size_t *out, rebatch_pool *pool)
{
    const rebatch_status status = rebatch_pool_available(out, pool);
    if (!status && !rbi_add(*out, (size_t)rbi_pool_resident_bytes(pool), out))
        *out = SIZE_MAX;
    return status;
}

/* Those that were allocated in the innermost scope, and are in use. */
static void drop_blocks(rebatch_pool *pool, const struct rbi_scope *scope, bool is_told)
{
    const struct rbi_block *const ring = &pool->by_sequence;
    for (struct rbi_block *b = ring->previous, *previous; b != ring; b = previous) {
        if (b->sequence < scope->first_sequence)
            break;
        previous = b->previous;
        if (b->outside && scope->owner_thread != 0)
            continue;
        if (is_told)
            rbi_pool_tell(pool, RBI_POOL_FREE, b->address, 0, NULL);
        rbi_pool_drop_block(pool, b, true);
    }
}

bool rbi_scope_has(rebatch_pool *pool, rebatch_scope handle, const void *address)
{
    rbi_lock_take(&pool->lock);
    const struct rbi_scope *const scope = find_open(pool, handle);
    const struct rbi_block *const block = rbi_table_find(&pool->heap.table, address);
    const bool has = scope && block && block->state == RBI_BLOCK_LIVE &&
                     block->sequence >= scope->first_sequence &&
                     !(block->outside && scope->owner_thread != 0);
    rbi_pool_give_lock(pool);
    return has;
}

void rbi_scope_free_blocks(rebatch_pool *pool, rebatch_scope scope)
{
    rbi_pool_take_lock(pool);
    const struct rbi_scope *const open = find_open(pool, scope);
    if (open && open == innermost(pool)) {
        pool->heap.late.rollback++; /* as whose late frees are known */
        drop_blocks(pool, open, true);
    }
    rbi_pool_end_free(pool);
}

static void rollback_innermost(rebatch_pool *pool, bool is_told)
{
    struct rbi_scope *scope = innermost(pool);
    struct rbi_block *block;
    while ((block = pop_deferred(scope))) {
        pool->stats.deferred_bytes -= block->bytes;
        block->state = RBI_BLOCK_LIVE;
    }
    const uint64_t before = pool->stats.rolled_back_blocks;
    drop_blocks(pool, scope, is_told);
    RBI_RECORD(pool, ROLLBACK, NULL, pool->stats.rolled_back_blocks - before, NULL, 0);
    close_innermost(pool);
    pool->stats.rollbacks++;
}

static rebatch_status roll_back(rebatch_pool *pool, rebatch_scope scope, bool is_told)
{
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    rbi_pool_take_lock(pool);
    const struct rbi_scope *open = find_open(pool, scope);
    if (open) {
        const size_t outside = (size_t)(open - pool->scopes);
        const bool observes = open->observes;
        pool->heap.late.rollback++;
        while (pool->depth > outside)
            if (observes && innermost(pool)->observes)
                commit_innermost(pool);
            else
                rollback_innermost(pool, is_told);
    } else {
        status = refuse_scope(scope);
    }
    rbi_pool_end_free(pool);
    return status;
}

rebatch_status rebatch_scope_rollback(rebatch_pool *pool, rebatch_scope scope)
{
    return roll_back(pool, scope, true);
}

rebatch_status rbi_scope_undo(rebatch_pool *pool, rebatch_scope scope)
{
    return roll_back(pool, scope, false);
}

uint64_t rbi_scope_first_sequence(rebatch_pool *pool, rebatch_scope scope)
{
    rbi_lock_take(&pool->lock);
    const struct rbi_scope *const open = find_open(pool, scope);
    const uint64_t sequence = open ? open->first_sequence : pool->sequence;
    rbi_pool_give_lock(pool);
    return sequence;
}

static void end_phase_locked(struct rbi_scope_use *out, rebatch_pool *pool, rebatch_scope scope)
{
    rbi_assert(rbi_lock_is_held(&pool->lock));
    rbi_plan_end(pool);
    const struct rbi_scope *const open = find_open(pool, scope);
    *out = (struct rbi_scope_use){.live_before = pool->stats.live_bytes,
                                  .first_sequence = pool->sequence,
                                  .traffic = rbi_pool_traffic(pool)};
    if (!open)
        return;
    struct rbi_scope sum = *open;
    for (const struct rbi_scope *s = open + 1; s < pool->scopes + pool->depth; s++)
        rbi_scope_fold(&sum, s);
    const int64_t peak = (int64_t)(sum.live_most - open->live_at_begin);
    out->live_before = open->live_at_begin;
    out->peak_bytes = peak > 0 ? (uint64_t)peak : 0;
    out->keeps_blocks = (int64_t)(pool->stats.live_bytes - open->live_at_begin) > 0;
    out->first_sequence = open->first_sequence;
}

void rbi_scope_end_phase(struct rbi_scope_use *out, rebatch_pool *pool, rebatch_scope scope)
{
    rbi_lock_take(&pool->lock);
    end_phase_locked(out, pool, scope);
    rbi_pool_give_lock(pool);
}

rebatch_status rbi_scope_commit_phase(struct rbi_scope_use *out, rebatch_pool *pool,
                                      rebatch_scope scope)
{
    rbi_lock_take(&pool->lock);
    end_phase_locked(out, pool, scope);
    const rebatch_status status = commit_locked(pool, scope);
    rbi_pool_end_free(pool);
    return status;
}
