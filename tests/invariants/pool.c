/* Owns the walk that checks every equation of pool.h.
 * Must not know how they come to hold. */
#include "invariants/invariants.h"

#include <string.h>

/* What a walk over all blocks adds up to. */
struct tally {
    uint64_t live_bytes, resident_bytes[RBI_POOL_RESIDENTS], deferred_bytes, plain_bytes,
        requested_bytes, live_blocks;
    uint64_t blocks, free_blocks, quick_blocks, pending_blocks, lost_bytes;
    uint64_t chunks[RBI_CHUNK_SIZES]; /* mapped, by their size */
    uint64_t asleep;                  /* pages */
    uint64_t tag_bytes[RBI_POOL_TAGS];
};

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            (void)rbi_error(REBATCH_E_STATE, "%s:%d: does not hold: %s", __func__, __LINE__,       \
                            #condition);                                                           \
            return false;                                                                          \
        }                                                                                          \
    } while (0)

static bool is_known_stream(const rebatch_pool *pool, const struct rbi_pool_stream *stream)
{
    for (const struct rbi_pool_stream *s = pool->first_stream; s; s = s->next)
        if (s == stream)
            return true;
    for (const rebatch_arena *a = pool->first_arena; a; a = a->next)
        if (&a->own == stream)
            return true;
    return false;
}

/* A block that is not in use. */
static bool is_idle_block_valid(const rebatch_pool *pool, const struct rbi_block *b,
                                struct tally *tally)
{
    const size_t offset = (size_t)(b->address - b->range->address);
    switch (b->state) {
    case RBI_BLOCK_FREE:
    case RBI_BLOCK_HOLE:
        CHECK((b->lists == &pool->space->lists) == (b->state == RBI_BLOCK_HOLE));
        CHECK(b->freed_at <= pool->progress.frees);
        tally->free_blocks++;
        break;
    case RBI_BLOCK_QUICK:
    case RBI_BLOCK_PENDING:
        CHECK(b->freed_at <= pool->progress.frees);
        tally->quick_blocks += b->state == RBI_BLOCK_QUICK;
        tally->pending_blocks += b->state == RBI_BLOCK_PENDING;
        break;
    default:
        CHECK(b->state != RBI_BLOCK_HELD || pool->pressing > 0 || b == pool->plan.arena ||
              pool->old_buffers.aside || b->range->is_arena);
    }
    CHECK((b->state != RBI_BLOCK_HOLE && b->state != RBI_BLOCK_LOST) ||
          (offset % pool->page_bytes == 0 && b->bytes % pool->page_bytes == 0));
    return true;
}

static bool is_used_block_valid(const rebatch_pool *pool, const struct rbi_block *b,
                                struct tally *tally)
{
    CHECK(!b->late && !rbi_late_has(&pool->heap.late, b->address));
    CHECK(b->tag < pool->tag_count && b->sequence < pool->sequence);
    CHECK(b->requested_bytes <= b->bytes);
    /* As much as a unit where rbi_pool_pad() has made the block of a whole one longer. */
    CHECK(pool->rounding_divisions || b->bytes - b->requested_bytes <= REBATCH_POOL_UNIT_BYTES);
    tally->live_blocks++;
    tally->live_bytes += b->bytes;
    tally->resident_bytes[b->resident] += b->resident ? b->bytes : 0;
    tally->requested_bytes += b->requested_bytes;
    tally->tag_bytes[b->tag] += b->bytes;
    tally->deferred_bytes += b->state == RBI_BLOCK_DEFERRED ? b->bytes : 0;
    return true;
}

static bool is_block_valid(const rebatch_pool *pool, const struct rbi_block *b, struct tally *tally)
{
    CHECK(b->bins == &b->lists->bins[b->lists->has_zones ? b->range->zone : 0]);
    CHECK(b->bytes > 0 && b->bytes % REBATCH_POOL_UNIT_BYTES == 0);
    CHECK((uintptr_t)b->address % REBATCH_POOL_ALIGNMENT == 0);
    CHECK(b->lists == &pool->space->lists || is_known_stream(pool, rbi_stream_of(b)));
    CHECK(!b->after || (b->after->address == b->address + b->bytes && b->after->before == b));
    CHECK(!b->after || (b->state != RBI_BLOCK_FREE && b->state != RBI_BLOCK_HOLE) ||
          b->after->state != b->state || b->after->lists != &rbi_stream_of(b)->lists);
    CHECK(b == pool->plan.arena || /* what lies in it may begin there */
          rbi_table_find(&pool->heap.table, b->address) == (rbi_block_is_listed(b) ? b : NULL));
    if (b->state != RBI_BLOCK_LIVE && b->state != RBI_BLOCK_DEFERRED)
        return is_idle_block_valid(pool, b, tally);
    CHECK(!b->planned);
    return is_used_block_valid(pool, b, tally);
}

/* Whether a block's pages are mapped just where it says so; of a lost one those that are left
 * are the quarantined. */
static bool are_pages_valid(const rebatch_pool *pool, const struct rbi_range *r,
                            const struct rbi_block *b, struct tally *tally)
{
    const size_t first = (size_t)(b->address - r->address) / pool->page_bytes;
    const size_t last = (size_t)(b->address - r->address + b->bytes - 1) / pool->page_bytes;
    const bool gap = b->state == RBI_BLOCK_HOLE ||
                     (b->state == RBI_BLOCK_HELD && b->lists == &pool->space->lists);
    for (size_t i = first; i <= last; i++) {
        CHECK(b->state == RBI_BLOCK_LOST ||
              gap != rbi_map_is_mapped(r->map, r->address + i * pool->page_bytes));
        if (b->state == RBI_BLOCK_LOST &&
            rbi_map_is_mapped(r->map, r->address + i * pool->page_bytes))
            tally->lost_bytes += pool->page_bytes;
    }
    return true;
}

static bool is_range_valid(const rebatch_pool *pool, const struct rbi_range *r, struct tally *tally)
{
    CHECK(r->first && r->first->address == r->address && !r->first->before);
    CHECK((r->map != NULL) == pool->has_space);
    size_t bytes = 0;
    for (const struct rbi_block *b = r->first; b; b = b->after) {
        CHECK(b->range == r);
        if (!is_block_valid(pool, b, tally) || (r->map && !are_pages_valid(pool, r, b, tally)))
            return false;
        bytes += b->bytes;
        tally->blocks++;
    }
    CHECK(bytes == r->bytes);
    CHECK(bytes % pool->page_bytes == 0);
    if (!r->map)
        tally->plain_bytes += bytes;
    CHECK(!r->map || (r->map->address == r->address && r->map->pages == bytes / pool->page_bytes));
    CHECK(!r->map || rbi_map_count(r->map, tally->chunks, &tally->asleep));
    return true;
}

static bool are_ranges_valid(const rebatch_pool *pool, struct tally *tally)
{
    const struct rbi_range *previous = NULL;
    for (const struct rbi_range *r = pool->heap.first_range; r; previous = r, r = r->next) {
        CHECK(r->previous == previous && (!previous || previous->number < r->number));
        if (!is_range_valid(pool, r, tally))
            return false;
    }
    CHECK(pool->heap.last_range == previous);
    CHECK(rbi_vm_is_valid(&pool->vm, tally->chunks, tally->plain_bytes));
    CHECK(pool->vm.asleep.pages == tally->asleep && (pool->is_asleep || tally->asleep == 0));
    return true;
}

static bool is_bin_valid(const struct rbi_pool_stream *s, struct rbi_block *const *bin,
                         size_t *least_bytes, struct tally *found)
{
    struct rbi_block *const *link = bin;
    size_t most = 0;
    for (struct rbi_block *b = *bin; b; link = &b->next, b = b->next) {
        CHECK((b->state == RBI_BLOCK_FREE || b->state == RBI_BLOCK_HOLE) && b->lists == &s->lists);
        CHECK(b->link == link && b->bytes >= *least_bytes);
        most = rbi_max(most, b->bytes);
        found->live_bytes += b->bytes;
        found->free_blocks++;
    }
    *least_bytes = most ? most + 1 : *least_bytes; /* classes are in the order of sizes */
    return true;
}

static bool are_bins_valid(const struct rbi_pool_stream *s, unsigned zone, struct tally *found)
{
    const struct rbi_bins *bins = &s->lists.bins[zone];
    size_t least_bytes = 0;
    for (unsigned i = 0; i < RBI_POOL_BINS; i++) {
        CHECK((bins->filled >> i / 64 & 1) == (bins->words[i / 64] != 0));
        CHECK((bins->words[i / 64] >> i % 64 & 1) == (bins->of[i] != NULL));
        for (const struct rbi_block *b = bins->of[i]; b; b = b->next)
            CHECK(b->bins == bins && b->bin == i && rbi_bin_of(b->bytes) == i);
        if (!is_bin_valid(s, &bins->of[i], &least_bytes, found))
            return false;
    }
    return true;
}

static bool are_quick_lists_valid(const struct rbi_pool_stream *s, struct tally *found)
{
    uint64_t small_bytes = 0;
    for (unsigned i = 0; i < 2 * RBI_POOL_QUICK; i++) {
        CHECK((s->lists.quick_filled[i / 64] >> i % 64 & 1) == (s->lists.quick[i].newest != NULL));
        for (const struct rbi_block *b = s->lists.quick[i].newest; b; b = b->next) {
            CHECK(b->state == RBI_BLOCK_QUICK && b->lists == &s->lists &&
                  b->bytes == s->lists.quick[i].bytes);
            CHECK(rbi_quick_slot(b->bytes) == i);
            small_bytes += rbi_quick_is_small(b->bytes) ? b->bytes : 0;
            found->live_bytes += b->bytes;
            found->quick_blocks++;
        }
    }
    CHECK(small_bytes == s->lists.small_bytes);
    return true;
}

static bool is_stream_valid(const struct rbi_pool_stream *s, struct tally *found)
{
    const uint64_t before = found->live_bytes;
    for (unsigned zone = 0; zone < RBI_POOL_ZONES; zone++)
        if (!are_bins_valid(s, zone, found))
            return false;
    if (!are_quick_lists_valid(s, found))
        return false;
    CHECK(found->live_bytes - before == s->lists.free_bytes);
    return true;
}

static bool is_progress_valid(const struct rbi_pool_progress *progress)
{
    uint64_t point = progress->done;
    CHECK(progress->count <= RBI_PROGRESS_EVENTS && progress->first < RBI_PROGRESS_EVENTS);
    for (uint32_t i = 0; i < progress->count; i++) {
        const uint32_t at = (progress->first + i) % RBI_PROGRESS_EVENTS;
        CHECK(progress->events[at].handle && point < progress->events[at].point);
        point = progress->events[at].point;
    }
    CHECK(point <= progress->frees);
    return true;
}

/* Its range has its blocks alone, and memory everywhere before its tail unless it is lent. */
static bool is_arena_valid(const rebatch_arena *arena)
{
    bool is_tail = false;
    CHECK(arena->range->is_arena);
    for (const struct rbi_block *b = arena->range->first; b; b = b->after) {
        const bool is_bare = b->state == RBI_BLOCK_HELD, is_lost = b->state == RBI_BLOCK_LOST;
        CHECK(!is_tail);
        is_tail = b == arena->tail;
        CHECK((is_bare || is_lost) == (b->lists != &arena->own.lists));
        CHECK(!is_bare || is_tail || !arena->range->is_kept || arena->pool->pressing > 0);
    }
    CHECK(is_tail == (arena->tail != NULL));
    return true;
}

static bool are_streams_valid(const rebatch_pool *pool, const struct tally *tally)
{
    struct tally found;
    memset(&found, 0, sizeof found);
    uint64_t pending_blocks = 0;
    if (!is_progress_valid(&pool->progress) || !is_stream_valid(pool->space, &found))
        return false;
    for (const struct rbi_pool_stream *s = pool->first_stream; s; s = s->next) {
        if (!is_stream_valid(s, &found))
            return false;
        uint64_t pins = 0;
        for (const rebatch_arena *a = pool->first_arena; a; a = a->next)
            pins += a->home == s;
        CHECK(pool->pressing > 0 || s->pins == pins);
    }
    for (const rebatch_arena *a = pool->first_arena; a; a = a->next)
        if (!is_stream_valid(&a->own, &found) || !is_arena_valid(a))
            return false;
    for (const struct rbi_block *b = pool->pending; b; b = b->next) {
        CHECK(b->state == RBI_BLOCK_PENDING && b->used);
        pending_blocks++;
    }
    CHECK(found.free_blocks == tally->free_blocks);
    CHECK(found.quick_blocks == tally->quick_blocks);
    CHECK(pending_blocks == tally->pending_blocks);
    return true;
}

static bool is_table_valid(const rebatch_pool *pool)
{
    const struct rbi_table *table = &pool->heap.table;
    size_t in_use = 0;
    for (size_t i = 0; i < (size_t)1 << (64 - table->shift); i++)
        for (const struct rbi_block *b = table->heads[i]; b; b = b->same_home) {
            CHECK(rbi_table_find(table, b->address) == b && rbi_block_is_listed(b));
            in_use += b->state == RBI_BLOCK_LIVE || b->state == RBI_BLOCK_DEFERRED;
        }
    CHECK(in_use == pool->stats.blocks);
    return true;
}

static bool is_late_valid(const rebatch_pool *pool)
{
    const struct rbi_late *late = &pool->heap.late;
    size_t used = 0, count = 0;
    for (size_t i = 0; i < late->capacity; i++) {
        const struct rbi_late_entry *entry = &late->entries[i];
        CHECK(!late->other[i].address && (entry->address || entry->rollback == 0));
        CHECK(entry->rollback <= late->rollback);
        CHECK(entry->rollback == 0 || rbi_late_has(late, entry->address));
        used += entry->address != NULL;
        count += entry->rollback != 0;
    }
    CHECK(used == late->used && count == late->count && 2 * used <= late->capacity);
    CHECK(late->capacity >= 4 * pool->heap.block_nodes.made);
    return true;
}

static bool are_scopes_valid(const rebatch_pool *pool)
{
    uint64_t blocks = 0, deferred = 0;
    const struct rbi_block *const ring = &pool->by_sequence;
    const struct rbi_block *previous = ring;
    for (const struct rbi_block *b = ring->next; b != ring; previous = b, b = b->next) {
        CHECK(b->previous == previous && (previous == ring || previous->sequence < b->sequence));
        blocks++;
        deferred += b->state == RBI_BLOCK_DEFERRED;
    }
    CHECK(ring->previous == previous && blocks == pool->stats.blocks);
    CHECK(pool->depth <= RBI_POOL_SCOPES);
    uint64_t first_sequence = pool->sequence;
    size_t undoing = 0;
    for (size_t i = pool->depth; i-- > 0;) {
        const struct rbi_scope *scope = &pool->scopes[i];
        undoing += !scope->observes;
        CHECK(scope->first_sequence <= first_sequence && scope->live_most >= scope->live_at_begin);
        CHECK((scope->handle & (RBI_POOL_SCOPES - 1)) == i && scope->handle != 0);
        for (const struct rbi_block *b = scope->deferred; b; b = b->next_deferred) {
            CHECK(b->state == RBI_BLOCK_DEFERRED &&
                  (b->sequence < scope->first_sequence || b->outside));
            CHECK(deferred > 0);
            deferred--;
        }
        first_sequence = scope->first_sequence;
    }
    CHECK(deferred == 0 && pool->undoing == undoing);
    return true;
}

static bool are_sums_valid(const rebatch_pool *pool, const struct tally *tally)
{
    const rebatch_pool_stats *s = &pool->stats;
    CHECK(s->live_bytes == tally->live_bytes && s->live_bytes <= s->live_peak_bytes);
    CHECK(s->live_peak_bytes <= pool->highest_live_bytes);
    CHECK(pool->stats.requested_bytes == tally->requested_bytes);
    uint64_t quiet_bytes = rbi_min(s->live_peak_bytes, pool->mark_peak_bytes);
    if (pool->depth)
        quiet_bytes = rbi_min(quiet_bytes, pool->scopes[pool->depth - 1].live_most);
    for (size_t i = pool->depth; i-- > 0 && pool->owner_thread;)
        if (pool->scopes[i].owner_thread == 0) {
            quiet_bytes = rbi_min(quiet_bytes, pool->scopes[i].live_most);
            break;
        }
    CHECK(pool->quiet_bytes == quiet_bytes && s->live_bytes <= quiet_bytes);
    CHECK(s->deferred_bytes == tally->deferred_bytes);
    for (size_t i = 0; i < RBI_POOL_RESIDENTS; i++)
        CHECK(pool->residents[i].bytes == tally->resident_bytes[i]);
    CHECK(s->blocks == tally->live_blocks && s->blocks <= s->blocks_peak);
    CHECK(pool->sequence >= s->blocks + s->rolled_back_blocks);
    CHECK(pool->vm.quarantined_bytes == tally->lost_bytes);
    for (size_t i = 0; i < pool->tag_count; i++) {
        CHECK(pool->tags[i].live_bytes == tally->tag_bytes[i]);
        CHECK(pool->tags[i].live_bytes <= pool->tags[i].peak_bytes);
    }
    return true;
}

/* Blocks of the plan's arena lie in it, and not on one another. */
static bool is_plan_valid(const rebatch_pool *pool, struct tally *tally)
{
    const struct rbi_pool_plan *const plan = &pool->plan;
    const struct rbi_block *const arena = plan->arena, *const ring = &pool->by_sequence;
    size_t bytes = 0;
    CHECK((plan->mode == RBI_PLAN_SERVES) == (arena != NULL));
    CHECK(plan->mode == RBI_PLAN_OFF || plan->phase);
    for (const struct rbi_block *b = ring->next; b != ring; b = b->next) {
        if (!b->planned)
            continue;
        CHECK(arena && b->sequence >= plan->first_sequence && b->phase == plan->serial);
        CHECK(b->address >= arena->address);
        CHECK(b->address + b->bytes <= arena->address + arena->bytes);
        CHECK(b->lists == &rbi_stream_of(arena)->lists && !b->used);
        for (const struct rbi_block *o = ring->next; o != b; o = o->next)
            CHECK(!o->planned || o->address >= b->address + b->bytes ||
                  b->address >= o->address + o->bytes);
        if (!is_used_block_valid(pool, b, tally))
            return false;
        bytes += b->bytes;
    }
    CHECK(bytes == (arena ? plan->arena_live_bytes : 0));
    return true;
}

static bool is_state_valid(const rebatch_pool *pool)
{
    struct tally tally;
    memset(&tally, 0, sizeof tally);
    return are_ranges_valid(pool, &tally) && is_plan_valid(pool, &tally) &&
           are_streams_valid(pool, &tally) && is_table_valid(pool) && is_late_valid(pool) &&
           are_scopes_valid(pool) && are_sums_valid(pool, &tally);
}

bool rbi_pool_is_valid(rebatch_pool *pool)
{
    rbi_lock_take(&pool->lock);
    const bool valid = is_state_valid(pool);
    rbi_lock_give(&pool->lock);
    return valid;
}

#ifdef RBI_CHECK
/* What a walk looks at: blocks, and each page of the addresses. */
static uint64_t count_steps(const rebatch_pool *pool)
{
    uint64_t steps = pool->heap.block_nodes.made;
    for (const struct rbi_range *r = pool->heap.first_range; r; r = r->next)
        steps += pool->has_space ? r->bytes / pool->page_bytes : 0;
    return steps;
}

/* A small pool is walked at the end of every call, a large one as often as that makes these many
 * steps a call. */
#define STEPS_A_CALL 512

void rbi_pool_check_state(const rebatch_pool *pool)
{
    static _Atomic uint64_t saved; /* steps that were not made yet */
    if (atomic_fetch_add(&saved, STEPS_A_CALL) + STEPS_A_CALL < count_steps(pool))
        return;
    saved = 0;
    if (!is_state_valid(pool))
        rbi_assert_failed(rebatch_last_error(), __FILE__, __LINE__);
}
#endif
