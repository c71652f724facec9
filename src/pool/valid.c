/* Owns the walk that checks every equation of pool.h.
 * Must not know how they come to hold. */
#include <string.h>

#include "pool/pool.h"

/* What a walk over all blocks adds up to. */
struct tally {
    uint64_t live_bytes, deferred_bytes, reserved_bytes, requested_bytes, live_blocks;
    uint64_t blocks, free_blocks, pending_blocks;
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
    return false;
}

static bool is_block_valid(const rebatch_pool *pool, const struct rbi_block *b, struct tally *tally)
{
    const bool in_use = b->state == RBI_BLOCK_LIVE || b->state == RBI_BLOCK_DEFERRED;
    CHECK(b->bytes > 0 && b->bytes % REBATCH_POOL_UNIT_BYTES == 0);
    CHECK((uintptr_t)b->address % REBATCH_POOL_ALIGNMENT == 0);
    CHECK(is_known_stream(pool, b->stream));
    CHECK(!b->after || (b->after->address == b->address + b->bytes && b->after->before == b));
    CHECK(!b->after || b->state != RBI_BLOCK_FREE || b->after->state != RBI_BLOCK_FREE ||
          b->after->stream != b->stream);
    const struct rbi_table_entry *entry = rbi_table_find(&pool->table, b->address);
    if (!in_use) {
        CHECK(!entry || !entry->block);
        CHECK(b->freed_at <= b->stream->frees);
        tally->free_blocks += b->state == RBI_BLOCK_FREE;
        tally->pending_blocks += b->state == RBI_BLOCK_PENDING;
        return true;
    }
    CHECK(entry && entry->block == b);
    CHECK(b->tag < pool->tag_count && b->birth < pool->births);
    CHECK(b->requested_bytes <= b->bytes &&
          b->bytes - b->requested_bytes < REBATCH_POOL_UNIT_BYTES);
    tally->live_blocks++;
    tally->live_bytes += b->bytes;
    tally->requested_bytes += b->requested_bytes;
    tally->tag_bytes[b->tag] += b->bytes;
    tally->deferred_bytes += b->state == RBI_BLOCK_DEFERRED ? b->bytes : 0;
    return true;
}

static bool are_segments_valid(const rebatch_pool *pool, struct tally *tally)
{
    const struct rbi_segment *previous = NULL;
    for (const struct rbi_segment *s = pool->first_segment; s; previous = s, s = s->next) {
        CHECK(s->previous == previous && (!previous || previous->number < s->number));
        CHECK(s->first && s->first->address == s->address && !s->first->before);
        size_t bytes = 0, used_bytes = 0;
        for (const struct rbi_block *b = s->first; b; b = b->after) {
            CHECK(b->segment == s);
            if (!is_block_valid(pool, b, tally))
                return false;
            bytes += b->bytes;
            used_bytes += b->state == RBI_BLOCK_FREE ? 0 : b->bytes;
            tally->blocks++;
        }
        CHECK(bytes == s->bytes && used_bytes == s->used_bytes);
        CHECK(bytes % pool->granule_bytes == 0);
        tally->reserved_bytes += bytes;
    }
    CHECK(pool->last_segment == previous);
    return true;
}

static bool is_stream_valid(const struct rbi_pool_stream *s, uint64_t *free_blocks)
{
    uint64_t bytes = 0;
    for (unsigned c = 0; c < RBI_POOL_CLASSES; c++) {
        CHECK(((s->filled >> c & 1) != 0) == (s->bins[c] != NULL));
        const struct rbi_block *previous = NULL;
        for (const struct rbi_block *b = s->bins[c]; b; previous = b, b = b->next) {
            CHECK(b->state == RBI_BLOCK_FREE && b->stream == s && b->previous == previous);
            CHECK(b->bytes / REBATCH_POOL_UNIT_BYTES >> c == 1);
            bytes += b->bytes;
            (*free_blocks)++;
        }
    }
    CHECK(bytes == s->free_bytes);
    CHECK(s->done <= s->frees);
    CHECK(!s->in_flight || (s->event && s->done < s->recorded && s->recorded <= s->frees));
    return true;
}

/* Blocks of which `stream` is the own, and uses that name it. */
static uint64_t references_to(const rebatch_pool *pool, const struct rbi_pool_stream *stream)
{
    uint64_t references = 0;
    for (const struct rbi_segment *s = pool->first_segment; s; s = s->next) {
        for (const struct rbi_block *b = s->first; b; b = b->after) {
            references += b->stream == stream;
            for (const struct rbi_block_use *use = b->uses; use; use = use->next)
                references += use->stream == stream;
        }
    }
    return references;
}

static bool are_streams_valid(const rebatch_pool *pool, const struct tally *tally)
{
    uint64_t free_blocks = 0;
    uint64_t pending_blocks = 0;
    for (const struct rbi_pool_stream *s = pool->first_stream; s; s = s->next) {
        if (!is_stream_valid(s, &free_blocks))
            return false;
        CHECK(pool->pressing > 0 || references_to(pool, s) == s->references);
    }
    for (const struct rbi_block *b = pool->pending; b; b = b->next) {
        CHECK(b->state == RBI_BLOCK_PENDING && b->uses);
        pending_blocks++;
    }
    CHECK(free_blocks == tally->free_blocks);
    CHECK(pending_blocks == tally->pending_blocks);
    return true;
}

static bool is_table_valid(const rebatch_pool *pool)
{
    const struct rbi_table *table = &pool->table;
    size_t used = 0, late = 0;
    for (size_t i = 0; i < table->capacity; i++) {
        const struct rbi_table_entry *entry = &table->entries[i];
        if (!entry->address)
            continue;
        CHECK(rbi_table_find(table, entry->address) == entry);
        CHECK(!entry->block || entry->block->address == entry->address);
        CHECK(entry->block || entry->rollback <= table->rollback);
        used++;
        late += entry->block == NULL;
    }
    CHECK(used == table->used && late == table->late && 2 * used <= table->capacity);
    CHECK(used - late == pool->stats.blocks);
    return true;
}

static bool are_scopes_valid(const rebatch_pool *pool)
{
    uint64_t blocks = 0, deferred = 0;
    const struct rbi_block *previous = NULL;
    for (const struct rbi_block *b = pool->oldest; b; previous = b, b = b->next) {
        CHECK(b->previous == previous && (!previous || previous->birth < b->birth));
        blocks++;
        deferred += b->state == RBI_BLOCK_DEFERRED;
    }
    CHECK(pool->newest == previous && blocks == pool->stats.blocks);
    CHECK(pool->depth <= RBI_POOL_SCOPES);
    uint64_t first_birth = pool->births;
    for (size_t i = pool->depth; i-- > 0;) {
        const struct rbi_scope *scope = &pool->scopes[i];
        CHECK(scope->first_birth <= first_birth && scope->live_most >= scope->live_at_begin);
        CHECK((scope->handle & (RBI_POOL_SCOPES - 1)) == i && scope->handle != 0);
        for (const struct rbi_block *b = scope->deferred; b; b = b->next_deferred) {
            CHECK(b->state == RBI_BLOCK_DEFERRED && b->birth < scope->first_birth);
            CHECK(deferred > 0);
            deferred--;
        }
        first_birth = scope->first_birth;
    }
    CHECK(deferred == 0);
    return true;
}

static bool are_sums_valid(const rebatch_pool *pool, const struct tally *tally)
{
    const rebatch_pool_stats *s = &pool->stats;
    CHECK(s->live_bytes == tally->live_bytes && s->live_bytes <= s->live_peak_bytes);
    CHECK(s->reserved_bytes == tally->reserved_bytes);
    CHECK(s->reserved_bytes <= s->reserved_peak_bytes);
    CHECK(s->reserved_bytes == pool->device_taken_bytes - pool->device_given_bytes);
    CHECK(s->requested_bytes == tally->requested_bytes);
    CHECK(s->deferred_bytes == tally->deferred_bytes);
    CHECK(s->blocks == tally->live_blocks && s->blocks <= s->blocks_peak);
    CHECK(s->blocks == s->allocations - s->frees - s->rolled_back_blocks);
    CHECK(s->live_bytes == s->allocated_total_bytes - s->freed_total_bytes);
    for (size_t i = 0; i < pool->tag_count; i++) {
        CHECK(pool->tags[i].live_bytes == tally->tag_bytes[i]);
        CHECK(pool->tags[i].live_bytes <= pool->tags[i].peak_bytes);
    }
    return true;
}

bool rbi_pool_is_valid(rebatch_pool *pool)
{
    struct tally tally;
    memset(&tally, 0, sizeof tally);
    pthread_mutex_lock(&pool->lock);
    const bool valid = are_segments_valid(pool, &tally) && are_streams_valid(pool, &tally) &&
                       is_table_valid(pool) && are_scopes_valid(pool) &&
                       are_sums_valid(pool, &tally);
    pthread_mutex_unlock(&pool->lock);
    return valid;
}
